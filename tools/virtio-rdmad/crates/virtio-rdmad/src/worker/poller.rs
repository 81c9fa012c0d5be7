// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Waits for the sockets and the kicks of a worker's guests, and for frames that come over their uplinks.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{epoll, poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// Something that a worker waits for. Guests are named by their index.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Source {
    /// Another thread wakes the worker.
    Wake,
    /// The VMM of this guest has sent something.
    Socket(u32),
    /// The driver of this guest has made buffers available in this queue.
    Kick(u32, u16),
    /// Something has come over the uplink of the network whose intake has this index.
    Uplink(u32),
}

impl Source {
    const WAKE: u64 = 0;
    const SOCKET: u64 = 1;
    const KICK: u64 = 2;
    const UPLINK: u64 = 3;

    /// Returns the kind in the lowest 16 bits, the guest or the intake in the next 32 and the queue in
    /// the last 16.
    fn token(self) -> u64 {
        match self {
            Self::Wake => Self::WAKE,
            Self::Socket(guest) => Self::SOCKET | u64::from(guest) << 16,
            Self::Kick(guest, queue) => {
                Self::KICK | u64::from(guest) << 16 | u64::from(queue) << 48
            }
            Self::Uplink(intake) => Self::UPLINK | u64::from(intake) << 16,
        }
    }

    #[allow(clippy::cast_possible_truncation)] // each part is cut out of the word
    fn of(token: u64) -> Option<Self> {
        let (guest, queue) = ((token >> 16) as u32, (token >> 48) as u16);
        match token & 0xffff {
            Self::WAKE => Some(Self::Wake),
            Self::SOCKET => Some(Self::Socket(guest)),
            Self::KICK => Some(Self::Kick(guest, queue)),
            Self::UPLINK => Some(Self::Uplink(guest)),
            _ => None,
        }
    }
}

/// An epoll instance.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
}

/// Most events that are taken at once. The others come first the next time.
const EVENTS: usize = 64;

impl Poller {
    /// Makes a poller that waits for nothing yet.
    pub fn new() -> Result<Self, Errno> {
        Ok(Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)? })
    }

    /// Waits for `fd` from now on. A socket is reported as long as it is readable, the others once each
    /// time that they are written to or that something comes.
    pub fn add(&self, fd: impl AsFd, source: Source) -> Result<(), Errno> {
        let flags = match source {
            Source::Socket(_) => epoll::EventFlags::IN,
            Source::Wake | Source::Kick(..) | Source::Uplink(_) => {
                epoll::EventFlags::IN | epoll::EventFlags::ET
            }
        };
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(source.token()), flags)
    }

    /// Waits for `fd` no more. To close it is not enough, because other processes may have it open.
    pub fn remove(&self, fd: impl AsFd) {
        // This fails only if `fd` was never added.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits until there are events, for `timeout` at most, and returns the events.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Vec<Source>, Errno> {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        if let Some(time) = timeout.as_ref().filter(|time| (time.tv_sec, time.tv_nsec) != (0, 0)) {
            self.sleep(time)?;
        }
        let timeout = timeout.map(|_| Timespec::default());
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

    /// Waits until there is an event, for `time` at most. `poll()` waits to the microsecond, where
    /// `epoll_wait()` counts milliseconds; not all kernels have `epoll_pwait2()`.
    fn sleep(&self, time: &Timespec) -> Result<(), Errno> {
        match poll(&mut [PollFd::new(&self.epoll, PollFlags::IN)], Some(time)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_time_passes_unless_there_is_an_event() {
        let poller = Poller::new().unwrap();
        let (time, start) = (Duration::from_micros(100), Instant::now());
        assert_eq!(poller.wait(Some(time)).unwrap(), []);
        assert!(start.elapsed() >= time);
        let (reader, mut writer) = std::os::unix::net::UnixStream::pair().unwrap();
        poller.add(&reader, Source::Socket(7)).unwrap();
        std::io::Write::write_all(&mut writer, b"x").unwrap();
        assert_eq!(poller.wait(Some(Duration::from_secs(1000))).unwrap(), [Source::Socket(7)]);
    }

    #[test]
    fn tokens_tell_sources_apart() {
        let kicks = [Source::Kick(0, 0), Source::Kick(u32::MAX, u16::MAX), Source::Kick(1, 2)];
        let sockets = [Source::Wake, Source::Socket(0), Source::Socket(u32::MAX)];
        let uplinks = [Source::Uplink(0), Source::Uplink(u32::MAX)];
        for source in sockets.iter().chain(&kicks).chain(&uplinks) {
            assert_eq!(Source::of(source.token()), Some(*source));
        }
    }
}
