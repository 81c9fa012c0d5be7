// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The interrupt of one queue.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;

/// The eventfd or socket by which a front end learns that it is to interrupt its guest. (What
/// user-mode Linux calls a pipe is a pair of sockets.)
///
/// The front end may change it at any time. Without one nobody is told.
#[derive(Debug, Default)]
pub(crate) struct Call {
    fd: Mutex<Option<CallFd>>,
}

/// The file descriptor of an interrupt.
#[derive(Debug)]
enum CallFd {
    Eventfd(Arc<OwnedFd>),
    Socket(Arc<OwnedFd>),
}

impl CallFd {
    fn of(fd: Arc<OwnedFd>) -> Self {
        if descriptor::is_socket(&fd) {
            Self::Socket(fd)
        } else {
            Self::Eventfd(fd)
        }
    }
}

impl Call {
    /// Replaces the file descriptor.
    pub(crate) fn set(&self, fd: Option<OwnedFd>) -> Result<(), Errno> {
        fd.as_ref().map(descriptor::set_nonblocking).transpose()?;
        let call = fd.map(|fd| CallFd::of(Arc::new(fd)));
        *self.fd.lock().unwrap_or_else(PoisonError::into_inner) = call;
        Ok(())
    }

    /// Makes the interrupt of a queue whose file descriptor this is, which is non-blocking.
    pub(crate) fn of(fd: Option<Arc<OwnedFd>>) -> Self {
        Self { fd: Mutex::new(fd.map(CallFd::of)) }
    }

    /// Returns the file descriptor.
    pub(crate) fn descriptor(&self) -> Option<Arc<OwnedFd>> {
        match self.fd.lock().unwrap_or_else(PoisonError::into_inner).as_ref()? {
            CallFd::Eventfd(fd) | CallFd::Socket(fd) => Some(fd.clone()),
        }
    }
}

impl ring::Signal for Call {
    /// Does not wait for the front end, whatever that does. A socket that is full holds interrupts
    /// that the guest has yet to take, so one more says nothing new.
    fn signal(&self) {
        let fd = self.fd.lock().unwrap_or_else(PoisonError::into_inner);
        // What can fail is that the front end closed its end; then it will be gone soon.
        let _ = match fd.as_ref() {
            Some(CallFd::Eventfd(fd)) => descriptor::signal(fd),
            Some(CallFd::Socket(fd)) => descriptor::send(fd),
            None => Ok(()),
        };
    }
}
