// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What both protocols of VMMs have in common: a socket whose other end may say anything, and eventfds.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use testkit::socket::{self, new_eventfd};

use crate::outcome::{gone, Outcome};

/// How long the other end may take for an answer.
const ANSWER: Duration = Duration::from_secs(30);
/// How long to try to connect to a device that may just be starting.
const CONNECT: Duration = Duration::from_secs(3);
/// The largest payload that is taken.
const MAX_PAYLOAD: usize = 1 << 16;

/// Connects to a socket.
pub fn connect(path: &Path) -> Outcome<UnixStream> {
    let deadline = std::time::Instant::now() + CONNECT;
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => {
                stream.set_read_timeout(Some(ANSWER)).map_err(gone)?;
                return Ok(stream);
            }
            Err(error) if std::time::Instant::now() > deadline => {
                return Err(gone(format!("{}: {error}", path.display())));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// Sends a message.
pub fn send(socket: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Outcome {
    let sent = socket::send(socket, bytes, fds).map_err(gone)?;
    if sent != bytes.len() {
        return Err(gone("the socket takes no whole message"));
    }
    Ok(())
}

/// Receives so many bytes.
pub fn receive(mut socket: &UnixStream, len: usize) -> Outcome<Vec<u8>> {
    if len > MAX_PAYLOAD {
        return Err(gone(format!("a message of {len} bytes")));
    }
    let mut bytes = vec![0; len];
    let why = |error: io::Error| match error.kind() {
        ErrorKind::UnexpectedEof => gone("the device closed the connection"),
        ErrorKind::WouldBlock | ErrorKind::TimedOut => gone("the device does not answer the VMM"),
        _ => gone(error),
    };
    socket.read_exact(&mut bytes).map_err(why)?;
    Ok(bytes)
}

/// Returns the 32-bit word at an offset.
pub fn word(bytes: &[u8], at: usize) -> u32 {
    let bytes = bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    u32::from_ne_bytes(bytes.unwrap_or_default())
}

/// Returns the 64-bit word at an offset.
pub fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

/// The eventfds of queues.
pub struct Signals {
    /// By which the device is kicked.
    pub kicks: BTreeMap<u16, OwnedFd>,
    /// By which the device interrupts.
    pub calls: BTreeMap<u16, OwnedFd>,
    counts: BTreeMap<u16, u64>,
}

impl Signals {
    /// Returns eventfds for these queues.
    pub fn new(queues: impl Iterator<Item = u16>) -> Self {
        let (mut kicks, mut calls) = (BTreeMap::new(), BTreeMap::new());
        for queue in queues {
            kicks.insert(queue, new_eventfd());
            calls.insert(queue, new_eventfd());
        }
        Self { kicks, calls, counts: BTreeMap::new() }
    }

    /// Waits for an interrupt or the end of the connection, and takes the interrupts that are there.
    pub fn rest(&mut self, socket: &UnixStream, at_most: Duration) -> Outcome {
        let limit = Timespec::try_from(at_most).map_err(gone)?;
        let mut fds: Vec<_> =
            self.calls.values().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        fds.push(PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN));
        match poll(&mut fds, Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(gone(error)),
        }
        let has_ended = fds.last().is_some_and(|fd| fd.revents().intersects(PollFlags::HUP));
        drop(fds);
        self.take();
        if has_ended {
            return Err(gone("the device closed the connection"));
        }
        Ok(())
    }

    /// Takes the interrupts that have come.
    fn take(&mut self) {
        for (queue, call) in &self.calls {
            let mut count = [0; 8];
            if rustix::io::read(call, &mut count) == Ok(8) {
                *self.counts.entry(*queue).or_default() += u64::from_ne_bytes(count);
            }
        }
    }

    /// Returns how many interrupts of a queue have come.
    pub fn count(&mut self, queue: u16) -> u64 {
        self.take();
        self.counts.get(&queue).copied().unwrap_or(0)
    }
}
