// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a guest's thread waits for.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{epoll, Timespec};
use rustix::io::Errno;

/// Something that a thread waits for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Source {
    /// The guest's waker.
    Wake,
    /// A connection to accept, or a message of the one there is.
    Socket,
    /// The driver made buffers available in a queue.
    Kick(u16),
}

impl Source {
    const KICKS: u64 = 2;

    fn token(self) -> u64 {
        match self {
            Self::Wake => 0,
            Self::Socket => 1,
            Self::Kick(queue) => Self::KICKS + u64::from(queue),
        }
    }

    fn of(token: u64) -> Option<Self> {
        match token {
            0 => Some(Self::Wake),
            1 => Some(Self::Socket),
            token => u16::try_from(token - Self::KICKS).ok().map(Self::Kick),
        }
    }
}

/// An epoll instance.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
}

/// Events taken at once; others wait for the next time.
const EVENTS: usize = 64;

impl Poller {
    /// One that waits for nothing yet.
    pub fn new() -> Result<Self, Errno> {
        Ok(Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)? })
    }

    /// Waits for `fd` from now on. A socket is reported as long as it is readable, the others once
    /// each time they are written to.
    pub fn add(&self, fd: impl AsFd, source: Source) -> Result<(), Errno> {
        let flags = match source {
            Source::Socket => epoll::EventFlags::IN,
            Source::Wake | Source::Kick(_) => epoll::EventFlags::IN | epoll::EventFlags::ET,
        };
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(source.token()), flags)
    }

    /// Waits for `fd` no more. Closing it is not enough: others may have it open too.
    pub fn remove(&self, fd: impl AsFd) {
        // It fails only if `fd` was never added.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits at most `timeout`, or for ever, and says what happened.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Vec<Source>, Errno> {
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        let none =
            epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [none; EVENTS];
        let count = match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(errno) => return Err(errno),
        };
        Ok(events[..count].iter().filter_map(|event| Source::of(event.data.u64())).collect())
    }
}
