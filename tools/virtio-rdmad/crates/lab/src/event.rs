// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What happens while guests run.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Sender;

use signal_hook::consts::SIGCHLD;

use crate::error::Error;

/// Something that happened.
#[derive(Debug)]
pub enum Event {
    /// A child of this process has ended, or some have.
    Child,
    /// Output of a guest cannot be written.
    Output(io::Error),
}

/// Sends an event whenever a child of this process ends, from now on.
pub fn notice_children(events: Sender<Event>) -> Result<(), Error> {
    let (mut read, write) = UnixStream::pair()?;
    signal_hook::low_level::pipe::register(SIGCHLD, write)?;
    std::thread::spawn(move || {
        while matches!(read.read(&mut [0; 64]), Ok(1..)) && events.send(Event::Child).is_ok() {}
    });
    Ok(())
}
