// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The place that a guest has for one VMM, as the main thread sees it.
//!
//! A worker serves the VMM that has the place. The main thread looks here when another VMM connects. The VMM that has
//! the place may have ended, which its worker has not noticed yet, or its device may still be under a reset. Then the
//! new VMM waits for the place.

use std::io::Error;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::event::{poll, PollFd, PollFlags, Timespec};

/// The place.
#[derive(Debug, Default)]
pub struct Seat {
    /// The connection of the VMM that has it.
    taken: Mutex<Option<UnixStream>>,
    /// Whether another VMM waits for it.
    is_awaited: AtomicBool,
    /// Whether a VMM was refused since it was taken.
    has_refused: AtomicBool,
    /// The number of VMMs that were refused.
    refused: AtomicU64,
}

impl Seat {
    /// Gives the place to the VMM of this connection.
    pub fn take(&self, stream: &UnixStream) -> Result<(), Error> {
        let stream = stream.try_clone()?;
        *self.taken.lock().unwrap_or_else(PoisonError::into_inner) = Some(stream);
        self.is_awaited.store(false, Ordering::Relaxed);
        self.has_refused.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Notes that nobody has the place any more, and closes the connection.
    pub fn leave(&self) {
        *self.taken.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Makes a VMM that connects now wait if the VMM that has the place has ended. Returns whether that is so.
    pub fn awaits(&self) -> bool {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let has_ended = taken.as_ref().is_none_or(is_closed);
        self.is_awaited.store(has_ended, Ordering::Relaxed);
        has_ended
    }

    /// Returns whether another VMM waits for the place, if it is taken.
    pub fn is_awaited(&self) -> bool {
        self.is_awaited.load(Ordering::Relaxed)
    }

    /// Counts a VMM that is refused. Returns whether it is the first one since the place was taken.
    pub fn refuse(&self) -> bool {
        self.refused.fetch_add(1, Ordering::Relaxed);
        !self.has_refused.swap(true, Ordering::Relaxed)
    }

    /// Returns how many VMMs were refused.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
}

/// Returns whether the other end of a connection is closed, or sends nothing any more.
fn is_closed(stream: &UnixStream) -> bool {
    let ended = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    poll(&mut fds, Some(&Timespec::default())).is_ok() && fds[0].revents().intersects(ended)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_vmm_that_has_ended_is_waited_for() {
        let seat = Seat::default();
        let (near, mut far) = UnixStream::pair().unwrap();
        seat.take(&near).unwrap();
        assert!(!seat.awaits());
        assert_eq!([(); 3].map(|()| seat.refuse()), [true, false, false]);
        // What it has sent last is not read yet.
        far.write_all(b"last words").unwrap();
        drop(far);
        assert!(seat.awaits() && seat.is_awaited());
        seat.leave();
        drop(near);
        let (near, far) = UnixStream::pair().unwrap();
        seat.take(&near).unwrap();
        assert!(!seat.is_awaited() && !seat.awaits());
        assert!(seat.refuse());
        assert_eq!(seat.refused(), 4);
        far.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(seat.awaits());
    }
}
