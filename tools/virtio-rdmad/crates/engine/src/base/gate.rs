// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Gates, which count the threads that use an object, so that another thread can wait until none uses it.

use std::sync::atomic::Ordering;
use std::sync::PoisonError;

use memory::atomic::{AtomicU32, Condvar, Mutex, MutexGuard};

/// Counts the threads that are inside, until the gate is closed. Then no other thread comes in, and the thread that
/// closed the gate waits until all have left.
#[derive(Default)]
pub(crate) struct Gate {
    /// [`CLOSED`], and the number of threads inside.
    state: AtomicU32,
    /// Locked only when a thread waits at a closed gate, or the last one leaves it.
    left: Mutex<()>,
    last_left: Condvar,
}

const CLOSED: u32 = 1 << 31;

impl Gate {
    /// Enters the gate; `false` if it is closed. A thread that has entered must call [`Gate::leave`].
    #[inline]
    pub fn enter(&self) -> bool {
        if self.state.fetch_add(1, Ordering::Acquire) & CLOSED == 0 {
            return true;
        }
        self.leave();
        false
    }

    /// Leaves the gate.
    #[inline]
    pub fn leave(&self) {
        if self.state.fetch_sub(1, Ordering::Release) == CLOSED | 1 {
            drop(self.lock());
            self.last_left.notify_all();
        }
    }

    /// Closes the gate. Returns whether no thread is inside any more.
    pub fn shut(&self) -> bool {
        self.state.fetch_or(CLOSED, Ordering::AcqRel) & !CLOSED == 0
    }

    /// Closes the gate, and waits until no thread is inside.
    pub fn close(&self) {
        if self.shut() {
            return;
        }
        let mut guard = self.lock();
        while self.state.load(Ordering::Acquire) != CLOSED {
            guard = self.last_left.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns whether the gate is closed.
    pub fn is_closed(&self) -> bool {
        self.state.load(Ordering::Acquire) & CLOSED != 0
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
