// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What other threads have of a worker.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;

use crate::guests::MAX_GUESTS;
use crate::handover::Connected;
use crate::times::Times;
use crate::waker::Waker;

/// The number of guests of a worker that has ended, so that it gets no others.
const RETIRED: usize = usize::MAX / 2;

/// A VMM that has connected.
#[derive(Debug)]
pub struct Arrival {
    /// The index of its guest.
    pub guest: u32,
    /// The connection.
    pub connected: Connected,
}

/// The part of a worker that other threads may use, all of it at any time. Guests are named by their
/// index.
#[derive(Debug)]
pub struct WorkerHandle {
    /// Wakes the worker, which takes what is here for it then.
    pub waker: Waker,
    /// What the worker does with its time.
    pub times: Times,
    stop: AtomicBool,
    /// The guests that other threads want to get a turn, a bit each.
    wanted: [AtomicU64; MAX_GUESTS.div_ceil(64)],
    /// How many words of these may have a bit.
    covered: AtomicUsize,
    arrivals: Mutex<Vec<Arrival>>,
    /// How many guests the worker serves, or is about to.
    guests: AtomicUsize,
}

impl WorkerHandle {
    /// Makes the handle of a worker.
    pub fn new() -> Result<Self, Errno> {
        Ok(Self {
            waker: Waker::new()?,
            times: Times::new(),
            stop: AtomicBool::new(false),
            wanted: std::array::from_fn(|_| AtomicU64::new(0)),
            covered: AtomicUsize::new(0),
            arrivals: Mutex::new(Vec::new()),
            guests: AtomicUsize::new(0),
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

    /// Makes the worker give a guest a turn.
    pub fn want(&self, guest: u32) {
        if let Some(word) = self.wanted.get(guest as usize / 64) {
            word.fetch_or(1 << (guest % 64), Ordering::SeqCst);
        }
        self.waker.wake();
    }

    /// Counts a guest that the worker is about to serve.
    pub fn claim(&self) {
        self.guests.fetch_add(1, Ordering::Relaxed);
    }

    /// Makes the worker serve a guest, whose link names the worker already.
    pub fn serve(&self, guest: u32, connected: Connected) {
        self.claim();
        let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        arrivals.push(Arrival { guest, connected });
        drop(arrivals);
        self.waker.wake();
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

    /// Takes the VMMs that have connected.
    pub fn take_arrivals(&self) -> Vec<Arrival> {
        std::mem::take(&mut *self.arrivals.lock().unwrap_or_else(PoisonError::into_inner))
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

    /// Keeps guests away from a worker that has ended.
    pub fn retire(&self) {
        self.guests.store(RETIRED, Ordering::Relaxed);
    }
}
