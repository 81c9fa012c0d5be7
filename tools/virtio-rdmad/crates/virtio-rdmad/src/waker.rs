// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Waking a thread from another thread.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use memory::atomic::AtomicU8;
use rustix::event::{eventfd, EventfdFlags};
use rustix::io::Errno;

/// The thread runs and nobody wants it to look again.
const AWAKE: u8 = 0;
/// The thread sleeps, or is about to.
const ASLEEP: u8 = 1;
/// Somebody wants the thread to look again.
const WANTED: u8 = 2;

/// Wakes one thread. Waking a thread that is awake costs one atomic operation.
#[derive(Debug)]
pub struct Waker {
    state: AtomicU8,
    /// Watched edge-triggered by the thread, and never read.
    eventfd: OwnedFd,
}

impl Waker {
    /// A waker whose thread is awake.
    pub fn new() -> Result<Self, Errno> {
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { state: AtomicU8::new(AWAKE), eventfd })
    }

    /// Becomes readable, as an edge, when the thread is to wake.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }

    /// Makes the thread look again; what the caller wrote before is seen by it then.
    pub fn wake(&self) {
        if self.state.swap(WANTED, Ordering::SeqCst) == ASLEEP {
            // A counter that is full is an event that the thread has yet to see.
            let _ = rustix::io::write(&self.eventfd, &1_u64.to_ne_bytes());
        }
    }

    /// The thread runs; whether somebody wanted it to look since it last asked.
    pub fn take(&self) -> bool {
        self.state.load(Ordering::SeqCst) != AWAKE
            && self.state.swap(AWAKE, Ordering::SeqCst) == WANTED
    }

    /// The thread is about to sleep, and may if this says so. Otherwise it must look again.
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

/// On a processor of any kind: `make loom`.
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
