// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Waiting until nobody uses a thing any more.

use std::sync::atomic::Ordering;
use std::sync::PoisonError;

use memory::atomic::{AtomicU32, Condvar, Mutex, MutexGuard};

/// Counts those who are inside, until it is closed: then nobody else comes in,
/// and whoever closed it waits until all have left.
#[derive(Default)]
pub(crate) struct Gate {
    /// [`CLOSED`], and how many are inside.
    state: AtomicU32,
    /// Only of a closed gate whose last visitor leaves.
    left: Mutex<()>,
    last_left: Condvar,
}

const CLOSED: u32 = 1 << 31;

impl Gate {
    /// Goes in, which [`Gate::leave`] must follow; `false` if it is closed.
    #[inline]
    pub fn enter(&self) -> bool {
        if self.state.fetch_add(1, Ordering::Acquire) & CLOSED == 0 {
            return true;
        }
        self.leave();
        false
    }

    /// Goes out.
    #[inline]
    pub fn leave(&self) {
        if self.state.fetch_sub(1, Ordering::Release) == CLOSED | 1 {
            drop(self.lock());
            self.last_left.notify_all();
        }
    }

    /// Closes it; whether nobody is inside any more.
    pub fn shut(&self) -> bool {
        self.state.fetch_or(CLOSED, Ordering::AcqRel) & !CLOSED == 0
    }

    /// Closes it, and waits until nobody is inside.
    pub fn close(&self) {
        if self.shut() {
            return;
        }
        let mut guard = self.lock();
        while self.state.load(Ordering::Acquire) != CLOSED {
            guard = self.last_left.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns whether it is closed.
    pub fn is_closed(&self) -> bool {
        self.state.load(Ordering::Acquire) & CLOSED != 0
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
