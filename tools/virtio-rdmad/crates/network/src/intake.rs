// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The frames that come over a lane of the uplink of a network, and the thread that takes them in.
//!
//! A worker that serves a guest of the network does so: then a packet reaches its QP without the wake-up
//! of another thread. While no worker wants it, and while more comes than a worker can take in beside the
//! work of its guests, the thread of the network's [`Switch`] does. So a flood of packets takes no time
//! of the guests.
//!
//! Each lane has an intake. A worker that serves a guest whose lane it is comes before workers of other guests, so that
//! a packet tends to be taken in by the thread that needs it.
//!
//! The packets of a connection keep their order, also when the holder changes. They come over one lane, whoever takes
//! them in has the lock of its room until they are in the inbox of the guest, and the inbox keeps their order.

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use engine::Fabric;
use rustix::io::Errno;
use scheduler::Waker;

use crate::forwarding::Mac;
use crate::switch::Switch;
use crate::uplink::{Room, Uplink, UplinkCounter};

/// The most calls of the uplink, and about the most frames and the most bytes, of a turn.
const CALLS: usize = 64;
const FRAMES: usize = 128;
const BYTES: usize = 128 << 10;

/// What may be taken in until something else gets a turn. Turns of several lanes may share a budget.
#[derive(Clone, Copy)]
pub struct Budget {
    calls: usize,
    frames: usize,
    bytes: usize,
}

impl Default for Budget {
    fn default() -> Self {
        Self { calls: CALLS, frames: FRAMES, bytes: BYTES }
    }
}

impl Budget {
    /// Returns whether nothing is left of it.
    pub fn is_over(&self) -> bool {
        self.calls == 0 || self.frames == 0 || self.bytes == 0
    }

    fn spend(&mut self, frame: &[u8]) {
        self.frames = self.frames.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(frame.len());
    }
}

/// The holder of an intake that no worker has: the thread of the switch.
const THREAD: usize = usize::MAX;

/// The result of a turn.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Found {
    /// Nothing had come.
    Nothing,
    /// Something had come. More may have come.
    Frames,
    /// Nothing could be taken: the lane may have lost its interface.
    Failed,
}

/// The intake of a lane.
pub struct Intake {
    uplink: Arc<Uplink>,
    /// The index of the lane.
    lane: usize,
    switch: Arc<Switch>,
    fabric: Arc<Fabric>,
    /// The index of the worker that takes frames in, or [`THREAD`].
    holder: AtomicUsize,
    /// The number of guests that workers serve and whose lane it is.
    guests: AtomicUsize,
    /// Room for frames. Whoever takes frames in has it locked, so frames keep their order when the
    /// holder changes.
    room: Mutex<Room>,
    /// Tells the thread of the switch that the intake is its own again.
    pub waker: Waker,
}

impl Intake {
    /// Makes the intakes of a switch that has this uplink, by lane. The thread of the switch has them.
    pub fn of_lanes(
        switch: &Arc<Switch>,
        uplink: &Arc<Uplink>,
        fabric: &Arc<Fabric>,
    ) -> Result<Vec<Arc<Self>>, Errno> {
        let intake = |lane| {
            Ok(Arc::new(Self {
                uplink: uplink.clone(),
                lane,
                switch: switch.clone(),
                fabric: fabric.clone(),
                holder: THREAD.into(),
                guests: 0.into(),
                room: uplink.room().into(),
                waker: Waker::new()?,
            }))
        };
        (0..uplink.lanes()).map(intake).collect()
    }

    /// Returns the name of the network.
    pub fn network(&self) -> &str {
        &self.uplink.network
    }

    /// Returns whether the lane is that of a guest with this MAC address.
    pub fn is_of(&self, mac: Mac) -> bool {
        self.uplink.lane_of(mac) == self.lane
    }

    /// Notes that a worker begins to serve a guest whose lane it is.
    pub fn add_guest(&self) {
        self.guests.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that a worker serves such a guest no longer.
    pub fn remove_guest(&self) {
        self.guests.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns whether a worker serves a guest whose lane it is.
    pub fn has_guests(&self) -> bool {
        self.guests.load(Ordering::Relaxed) != 0
    }

    /// Gives the intake to a worker, if no worker has it. Returns whether that was so. While the lane has no interface,
    /// the thread of the switch keeps it: a thread that begins to wait then gets no event, also when the lane has an
    /// interface again.
    pub fn claim(&self, worker: usize) -> bool {
        let (order, holder) = (Ordering::SeqCst, &self.holder);
        self.uplink.has_lane(self.lane)
            && holder.compare_exchange(THREAD, worker, order, order).is_ok()
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

    /// Takes in frames that have come, as many as the budget allows. The holder calls this.
    pub fn turn(&self, budget: &mut Budget) -> Found {
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = Found::Nothing;
        while !budget.is_over() {
            budget.calls -= 1;
            let take = |frame: &[u8], segment| {
                budget.spend(frame);
                self.switch.take_from_uplink(&self.uplink, &self.fabric, frame, segment);
            };
            match self.uplink.receive(self.lane, &mut room, take) {
                Ok(false) => return Found::Frames,
                Ok(true) => found = Found::Frames,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return found,
                Err(error) => {
                    // The next event tries it again.
                    self.uplink.counters.report(UplinkCounter::RxError, error);
                    return if found == Found::Nothing { Found::Failed } else { found };
                }
            }
        }
        Found::Frames
    }
}

impl AsFd for Intake {
    /// Returns the descriptor that becomes readable when something comes.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.uplink.fd(self.lane)
    }
}
