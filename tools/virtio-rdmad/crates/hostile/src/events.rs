// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Waits for sockets and kicks.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{epoll, Timespec};
use rustix::io::Errno;

/// Something to wait for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Source {
    /// A VMM connects.
    Listener,
    /// A message of the VMM.
    Vmm,
    /// A client connects to the control socket.
    Control,
    /// The driver made buffers available.
    Kick,
    /// The process is to end.
    End,
}

impl Source {
    const ALL: [Self; 5] = [Self::Listener, Self::Vmm, Self::Control, Self::Kick, Self::End];

    fn token(self) -> u64 {
        self as u64
    }
}

/// An epoll instance.
#[derive(Debug)]
pub struct Events(OwnedFd);

impl Events {
    /// Makes an instance that waits for nothing yet.
    pub fn new() -> Result<Self, Errno> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    /// Waits for `fd` from now on. A kick is never read, so it is reported once each time that it is
    /// written to.
    pub fn add(&self, fd: impl AsFd, source: Source) -> Result<(), Errno> {
        let edges = match source {
            Source::Kick => epoll::EventFlags::ET,
            _ => epoll::EventFlags::empty(),
        };
        let data = epoll::EventData::new_u64(source.token());
        epoll::add(&self.0, fd, data, epoll::EventFlags::IN | edges)
    }

    /// Waits for `fd` no more.
    pub fn remove(&self, fd: impl AsFd) {
        // This fails only if `fd` was never added.
        let _ = epoll::delete(&self.0, fd);
    }

    /// Waits for `timeout` at most, or for ever. Returns the sources that have something.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Vec<Source>, Errno> {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let data = epoll::EventData::new_u64(0);
        let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data }; 16];
        let count = match epoll::wait(&self.0, &mut events, timeout.as_ref()) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(errno) => return Err(errno),
        };
        let tokens: Vec<u64> = events[..count].iter().map(|event| event.data.u64()).collect();
        Ok(Source::ALL.into_iter().filter(|source| tokens.contains(&source.token())).collect())
    }
}
