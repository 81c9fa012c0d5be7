// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The interrupt of one queue.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use rustix::fs::{fcntl_getfl, fcntl_setfl, OFlags};
use rustix::io::Errno;

/// The eventfd or pipe by which a front end is told to interrupt its guest.
///
/// The front end may change it at any time; without one nobody is told.
#[derive(Debug, Default)]
pub struct Signal {
    fd: Mutex<Option<OwnedFd>>,
}

impl Signal {
    /// Interrupts the guest. Never blocks: a pipe that is full holds interrupts that the guest has
    /// yet to take, so one more says nothing new.
    pub fn signal(&self) {
        let fd = self.fd.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(fd) = fd.as_ref() {
            // What else can fail is that the front end closed its end; then it will be gone soon.
            let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
        }
    }

    /// Replaces the file descriptor, which is made non-blocking.
    pub(crate) fn set(&self, fd: Option<OwnedFd>) -> Result<(), Errno> {
        if let Some(fd) = &fd {
            fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)?;
        }
        *self.fd.lock().unwrap_or_else(PoisonError::into_inner) = fd;
        Ok(())
    }
}
