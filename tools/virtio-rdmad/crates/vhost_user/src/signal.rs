// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The interrupt of one queue.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use rustix::fs::{fcntl_getfl, fcntl_setfl, OFlags};
use rustix::io::Errno;

/// The eventfd or socket by which a front end is told to interrupt its guest. (What user-mode Linux
/// calls a pipe is a pair of sockets.)
///
/// The front end may change it at any time; without one nobody is told.
#[derive(Debug, Default)]
pub struct Signal {
    fd: Mutex<Option<Event>>,
}

#[derive(Debug)]
enum Event {
    Eventfd(OwnedFd),
    Socket(OwnedFd),
}

impl Signal {
    /// Interrupts the guest. Does not wait for the front end, whatever it does. A socket that is full
    /// holds interrupts that the guest has yet to take, so one more says nothing new.
    pub fn signal(&self) {
        let fd = self.fd.lock().unwrap_or_else(PoisonError::into_inner);
        // What can fail is that the front end closed its end; then it will be gone soon.
        let _ = match fd.as_ref() {
            Some(Event::Eventfd(fd)) => descriptor::signal(fd),
            Some(Event::Socket(fd)) => descriptor::send(fd),
            None => Ok(()),
        };
    }

    /// Replaces the file descriptor, which is made non-blocking for the kernels on which a signal is
    /// a write.
    pub(crate) fn set(&self, fd: Option<OwnedFd>) -> Result<(), Errno> {
        if let Some(fd) = &fd {
            fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)?;
        }
        let kind =
            |fd| if descriptor::is_socket(&fd) { Event::Socket(fd) } else { Event::Eventfd(fd) };
        *self.fd.lock().unwrap_or_else(PoisonError::into_inner) = fd.map(kind);
        Ok(())
    }
}
