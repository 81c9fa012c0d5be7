// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Steps of what goes on object by object.

use crate::base::budget::{cost, Budget};
use crate::base::sync::try_lock;
use crate::transport::hca::Hca;

/// What one step of a change leaves.
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

/// Returns whether a change has to wait for a thread that reads rings for the status, and charges for the look. That
/// thread may be in an access to memory that takes long.
pub(crate) fn waits_for_status(hca: &Hca, budget: &mut Budget) -> bool {
    let waits = try_lock(&hca.status).is_none();
    if waits {
        budget.work(cost::WAIT);
    }
    waits
}
