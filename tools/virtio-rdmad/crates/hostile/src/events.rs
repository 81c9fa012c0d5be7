// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the process waits for.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{epoll, Timespec};
use rustix::io::Errno;

/// Something to wait for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Source {
    /// A monitor connects.
    Listener,
    /// A message of the monitor.
    Monitor,
    /// Somebody has an order.
    Control,
    /// The driver made buffers available.
    Kick,
    /// The process is to end.
    End,
}

impl Source {
    const ALL: [Self; 5] = [Self::Listener, Self::Monitor, Self::Control, Self::Kick, Self::End];

    fn token(self) -> u64 {
        self as u64
    }
}

/// An epoll instance.
#[derive(Debug)]
pub struct Events(OwnedFd);

impl Events {
    /// One that waits for nothing yet.
    pub fn new() -> Result<Self, Errno> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    /// Waits for `fd` from now on. A kick is never read, so only its edges count.
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
        // It fails only if `fd` was never added.
        let _ = epoll::delete(&self.0, fd);
    }

    /// Waits at most `timeout`, or for ever, and says for what there was something.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Vec<Source>, Errno> {
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
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
