// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What keeps the lab from its work.

use std::fmt;
use std::io::{self, Write};

/// An error, as a sentence.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// Nobody reads the output of the lab any more.
#[derive(Debug)]
pub struct OutputClosed;

impl fmt::Display for OutputClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nobody reads the output")
    }
}

impl std::error::Error for OutputClosed {}

/// Returns the error of a lab whose output cannot be written.
pub fn of_output(error: &io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe => OutputClosed.into(),
        _ => format!("the output cannot be written: {error}").into(),
    }
}

/// Tells the user something.
pub fn say(text: &dyn fmt::Display) {
    // Perhaps nobody reads this, and nothing follows from that.
    let _ = writeln!(io::stderr(), "virtio-rdma-lab: {text}");
}
