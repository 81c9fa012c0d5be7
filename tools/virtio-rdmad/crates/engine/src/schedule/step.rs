// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Steps of a change that goes from object to object.

use std::sync::{Mutex, MutexGuard};

use crate::base::budget::{cost, Budget};
use crate::base::sync::try_lock;

/// The rest of a change (of memory, a reset, a freeze) after one of its steps.
pub(crate) enum Step {
    /// There are more steps.
    More,
    /// There are more steps, and a peer has to go on first, or the budget is exhausted.
    Wait,
    /// There is nothing more: all is done.
    Done,
}

/// Returns the number of the object that comes next, if it is one of `count`.
pub(crate) fn number(at: u32, count: u16) -> Option<u16> {
    u16::try_from(at).ok().filter(|at| *at < count)
}

/// Locks what another thread may have locked for as long as an access to memory takes. `None` if one has: the change
/// goes on in a later turn, and this one is charged for the wait.
pub(crate) fn lock_in_turn<'a, T>(
    mutex: &'a Mutex<T>,
    budget: &mut Budget,
) -> Option<MutexGuard<'a, T>> {
    let guard = try_lock(mutex);
    if guard.is_none() {
        budget.work(cost::WAIT);
    }
    guard
}
