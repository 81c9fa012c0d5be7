// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The frames that come over the uplink of a network, and the thread that takes them in.
//!
//! A worker that serves a guest of the network does so: then a packet reaches its QP without the wake-up
//! of another thread. While no worker wants it, and while more comes than a worker can take in beside the
//! work of its guests, the thread of the network's [`Switch`] does. So a flood of packets takes no time
//! of the guests.

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use engine::Fabric;
use rustix::io::Errno;
use scheduler::Waker;

use crate::switch::Switch;
use crate::uplink::{Room, Uplink, UplinkCounter};

/// The most calls of the uplink, and about the most frames and the most bytes, of a turn.
const CALLS: usize = 64;
const FRAMES: usize = 128;
const BYTES: usize = 128 << 10;

/// The holder of an intake that no worker has: the thread of the switch.
const THREAD: usize = usize::MAX;

/// The result of a turn.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Found {
    /// Nothing had come.
    Nothing,
    /// Something had come, and all of it was taken, as far as that is known without another look.
    All,
    /// Something was taken, and more may have come.
    Part,
}

/// The intake of a network.
pub struct Intake {
    uplink: Arc<Uplink>,
    switch: Arc<Switch>,
    fabric: Arc<Fabric>,
    /// The index of the worker that takes frames in, or [`THREAD`].
    holder: AtomicUsize,
    /// Room for a frame. Whoever takes frames in has it locked, so frames keep their order when the
    /// holder changes.
    room: Mutex<Room>,
    /// Tells the thread of the switch that the intake is its own again.
    pub waker: Waker,
}

impl Intake {
    /// Makes the intake of a switch that has this uplink. The thread of the switch has it.
    pub fn new(
        switch: Arc<Switch>,
        uplink: Arc<Uplink>,
        fabric: Arc<Fabric>,
    ) -> Result<Self, Errno> {
        let room = Mutex::new(uplink.room());
        let (holder, waker) = (AtomicUsize::new(THREAD), Waker::new()?);
        Ok(Self { uplink, switch, fabric, holder, room, waker })
    }

    /// Returns the name of the network.
    pub fn network(&self) -> &str {
        &self.uplink.network
    }

    /// Gives the intake to a worker, if no worker has it. Returns whether that was so. While the interface is gone, the
    /// thread of the switch keeps it: who begins to wait then is told of nothing, also when it is there again.
    pub fn claim(&self, worker: usize) -> bool {
        let (order, holder) = (Ordering::SeqCst, &self.holder);
        !self.uplink.is_gone() && holder.compare_exchange(THREAD, worker, order, order).is_ok()
    }

    /// Gives the intake back to the thread of the switch. The worker that has it calls this.
    pub fn give_back(&self) {
        self.holder.store(THREAD, Ordering::SeqCst);
        self.waker.wake();
    }

    /// Returns whether the thread of the switch has it.
    pub fn is_of_thread(&self) -> bool {
        self.holder.load(Ordering::SeqCst) == THREAD
    }

    /// Takes in a bounded number of frames that have come. The holder calls this.
    pub fn turn(&self) -> Found {
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut found, mut frames, mut bytes) = (Found::Nothing, 0, 0);
        for _ in 0..CALLS {
            let take = |frame: &[u8], segment| {
                (frames, bytes) = (frames + 1, bytes + frame.len());
                self.switch.take_from_uplink(&self.uplink, &self.fabric, frame, segment);
            };
            match self.uplink.receive(&mut room, take) {
                Ok(false) => return Found::All,
                Ok(true) if frames < FRAMES && bytes < BYTES => found = Found::All,
                Ok(true) => break,
                Err(error) => {
                    if error.kind() != ErrorKind::WouldBlock {
                        // The next event tries it again.
                        self.uplink.counters.report(UplinkCounter::RxError, error);
                    }
                    return found;
                }
            }
        }
        Found::Part
    }
}

impl AsFd for Intake {
    /// Returns the descriptor that becomes readable when something comes.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.uplink.as_fd()
    }
}
