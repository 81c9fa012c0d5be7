// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Wakes a thread from another thread.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use memory::atomic::AtomicU8;
use rustix::event::{eventfd, EventfdFlags};
use rustix::io::Errno;

/// The thread runs, and no other thread wants it to look again.
const AWAKE: u8 = 0;
/// The thread sleeps, or is about to sleep.
const ASLEEP: u8 = 1;
/// Another thread wants it to look again.
const WANTED: u8 = 2;

/// Wakes one thread. Waking a thread that is awake costs one atomic operation.
#[derive(Debug)]
pub struct Waker {
    state: AtomicU8,
    /// Watched edge-triggered by the thread, and never read.
    eventfd: OwnedFd,
}

impl Waker {
    /// Makes the waker of a thread that is awake.
    pub fn new() -> Result<Self, Errno> {
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { state: AtomicU8::new(AWAKE), eventfd })
    }

    /// Returns a descriptor that becomes readable, as an edge, when the thread is to wake.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }

    /// Makes the thread look again. It then sees everything that the caller wrote before.
    pub fn wake(&self) {
        if self.state.swap(WANTED, Ordering::SeqCst) == ASLEEP {
            // If the counter is full, the thread has not seen an earlier event yet, and will look.
            let _ = rustix::io::write(&self.eventfd, &1_u64.to_ne_bytes());
        }
    }

    /// Called by the thread, which runs. Returns whether another thread wanted it to look since the last
    /// call.
    pub fn take(&self) -> bool {
        self.state.load(Ordering::SeqCst) != AWAKE
            && self.state.swap(AWAKE, Ordering::SeqCst) == WANTED
    }

    /// Called by the thread before it sleeps. Returns whether it may; otherwise it must look again.
    pub fn may_sleep(&self) -> bool {
        let (from, to) = (AWAKE, ASLEEP);
        self.state.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(waker: &Waker) -> bool {
        rustix::io::read(&waker.eventfd, &mut [0; 8]).is_ok()
    }

    #[test]
    fn only_a_sleeper_is_written_to() {
        let waker = Waker::new().unwrap();
        assert!(!waker.take());
        waker.wake();
        assert!(!written(&waker));
        assert!(!waker.may_sleep(), "somebody wanted it meanwhile");
        assert!(waker.take());
        assert!(!waker.take());
        assert!(waker.may_sleep());
        waker.wake();
        waker.wake();
        assert!(written(&waker));
        assert!(waker.take());
        assert!(waker.may_sleep());
        assert!(!waker.take(), "it woke for another reason");
    }
}

/// Checks the orders of memory accesses on a processor of any kind: `make loom`.
#[cfg(all(test, loom))]
mod orders {
    use std::sync::Arc;

    use litmus::{check, thread, Memory};

    use super::*;

    const WORK: usize = 0;

    #[test]
    fn work_is_found_or_wakes_a_sleeper() {
        check(|| {
            let waker = Arc::new(Waker::new().unwrap());
            let memory = Arc::new(Memory::new([WORK], []));
            let caller = thread::spawn({
                let (waker, memory) = (Arc::clone(&waker), Arc::clone(&memory));
                move || {
                    memory.word(WORK).store(1, Ordering::Relaxed);
                    waker.wake();
                }
            });
            let finds = || memory.word(WORK).load(Ordering::Relaxed) == 1;
            waker.take();
            if !finds() {
                let sleeps = waker.may_sleep();
                if sleeps {
                    caller.join().unwrap();
                    assert!(rustix::io::read(&waker.eventfd, &mut [0; 8]).is_ok());
                } else {
                    assert!(waker.take() && finds());
                }
            }
        });
    }
}
