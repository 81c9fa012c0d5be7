// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The mailbox of a worker, by which other threads reach it.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::io::Errno;
use scheduler::Waker;

use super::times::Times;
use crate::handover::Connected;
use crate::spec::MAX_GUESTS;

/// The time in [`Mailbox::may_be_called`] that never comes.
const NEVER: u64 = u64::MAX;

/// An order for a worker, about a guest that it serves, which is named by its index.
#[derive(Debug)]
pub enum Order {
    /// Hand the guest to the worker with this index.
    SendAway(u32, usize),
}

/// The inbox of a worker.
#[derive(Default)]
pub struct Inbox {
    /// The guests that it is to serve, by their index, and their VMMs, which have connected. The link of such a guest
    /// names the worker already.
    pub connected: Vec<(u32, Connected)>,
    /// The orders about its guests.
    pub orders: Vec<Order>,
}

/// The part of a worker that other threads may use, all of it at any time. Guests are named by their
/// index.
pub struct Mailbox {
    /// Wakes the worker, which then takes the contents of this mailbox.
    pub waker: Waker,
    /// The use that the worker makes of its time.
    pub times: Times,
    /// The NUMA node on whose CPUs the worker runs, if there are several nodes.
    pub node: Option<u32>,
    stop: AtomicBool,
    /// The time from which the worker, when it sleeps, would help others with large copies, in nanoseconds since the
    /// mailbox was made; [`NEVER`] if it would not.
    may_be_called: AtomicU64,
    made: Instant,
    /// Whether the worker is to help others.
    is_called: AtomicBool,
    /// The guests that other threads want to get a turn, a bit each.
    wanted: [AtomicU64; MAX_GUESTS.div_ceil(64)],
    /// The number of words of `wanted` that may have a bit.
    covered: AtomicUsize,
    inbox: Mutex<Inbox>,
    /// The number of guests that the worker serves, or is about to serve.
    guests: AtomicUsize,
    /// Whether the worker takes nothing into its inbox any more. It is written while that is locked.
    is_retired: AtomicBool,
}

impl Mailbox {
    /// Makes the mailbox of a worker that runs on the CPUs of this node, if there are several nodes.
    pub fn new(node: Option<u32>) -> Result<Self, Errno> {
        Ok(Self {
            waker: Waker::new()?,
            times: Times::new(),
            node,
            stop: AtomicBool::new(false),
            may_be_called: AtomicU64::new(NEVER),
            made: Instant::now(),
            is_called: AtomicBool::new(false),
            wanted: std::array::from_fn(|_| AtomicU64::new(0)),
            covered: AtomicUsize::new(0),
            inbox: Mutex::default(),
            guests: AtomicUsize::new(0),
            is_retired: AtomicBool::new(false),
        })
    }

    /// Returns how many guests the worker serves.
    pub fn guests(&self) -> usize {
        self.guests.load(Ordering::Relaxed)
    }

    /// Notes that the process gets a guest with this index, which is less than [`MAX_GUESTS`].
    pub fn cover(&self, guest: u32) {
        self.covered.fetch_max(guest as usize / 64 + 1, Ordering::SeqCst);
    }

    /// Makes the worker give a guest a turn, or pass this on to the worker that serves the guest by then. Returns
    /// whether it will; a worker that has retired does not.
    pub fn want(&self, guest: u32) -> bool {
        if let Some(word) = self.wanted.get(guest as usize / 64) {
            word.fetch_or(1 << (guest % 64), Ordering::SeqCst);
        }
        self.waker.wake();
        !self.is_retired()
    }

    /// Counts a guest that the worker is about to serve.
    pub fn claim(&self) {
        self.guests.fetch_add(1, Ordering::Relaxed);
    }

    /// Makes the worker serve the guest with this index, whose VMM has connected. A worker that has retired returns the
    /// connection.
    pub fn serve(&self, guest: u32, connected: Connected) -> Result<(), Connected> {
        let mut inbox = self.inbox();
        if self.is_retired() {
            return Err(connected);
        }
        self.claim();
        inbox.connected.push((guest, connected));
        drop(inbox);
        self.waker.wake();
        Ok(())
    }

    /// Makes the worker do something with a guest, unless the guest has gone by then. A worker that has retired returns
    /// the order.
    pub fn order(&self, order: Order) -> Result<(), Order> {
        let mut inbox = self.inbox();
        if self.is_retired() {
            return Err(order);
        }
        inbox.orders.push(order);
        drop(inbox);
        self.waker.wake();
        Ok(())
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes from when on the worker, which is about to sleep, would help others with large copies, if it would.
    pub fn may_be_called(&self, from: Option<Instant>) {
        self.may_be_called
            .store(from.map_or(NEVER, |from| self.nanoseconds(from)), Ordering::Release);
    }

    fn nanoseconds(&self, time: Instant) -> u64 {
        u64::try_from(time.saturating_duration_since(self.made).as_nanos()).unwrap_or(NEVER)
    }

    /// Wakes the worker to help others with large copies, if it sleeps and would do so. Returns whether it was woken.
    pub fn call(&self) -> bool {
        let from = || self.may_be_called.load(Ordering::Acquire);
        let helps = self.times.is_asleep() && from() <= self.nanoseconds(Instant::now());
        if helps {
            self.is_called.store(true, Ordering::SeqCst);
            self.waker.wake();
        }
        helps
    }

    /// Returns whether the worker is to help others, and was not asked since the last call.
    pub fn take_call(&self) -> bool {
        self.is_called.load(Ordering::SeqCst) && self.is_called.swap(false, Ordering::SeqCst)
    }

    /// Ends the worker.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.waker.wake();
    }

    /// Returns whether the worker is to end.
    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Takes the contents of the inbox.
    pub fn take_inbox(&self) -> Inbox {
        std::mem::take(&mut *self.inbox())
    }

    /// Calls `f` with each guest that other threads want to get a turn.
    pub fn take_wanted(&self, mut f: impl FnMut(u32)) {
        let covered = self.covered.load(Ordering::SeqCst);
        for (base, word) in (0..).step_by(64).zip(&self.wanted).take(covered) {
            if word.load(Ordering::SeqCst) == 0 {
                continue;
            }
            let mut bits = word.swap(0, Ordering::SeqCst);
            while bits != 0 {
                f(base + bits.trailing_zeros());
                bits &= bits - 1;
            }
        }
    }

    /// Counts a guest that the worker does not serve any more.
    pub fn release(&self) {
        self.guests.fetch_sub(1, Ordering::Relaxed);
    }

    /// Keeps guests away from now on, because the worker ends. Returns the contents of the inbox.
    pub fn retire(&self) -> Inbox {
        let mut inbox = self.inbox();
        self.is_retired.store(true, Ordering::SeqCst);
        std::mem::take(&mut *inbox)
    }

    /// Returns whether the worker has ended, or is about to, and takes no guest any more.
    pub fn is_retired(&self) -> bool {
        self.is_retired.load(Ordering::SeqCst)
    }
}

/// Returns the index of the worker that has the fewest guests, of those that have not retired.
pub fn least(workers: &[Mailbox]) -> Option<usize> {
    let there = workers.iter().enumerate().filter(|(_, worker)| !worker.is_retired());
    there.min_by_key(|(_, worker)| worker.guests()).map(|(index, _)| index)
}
