// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Visits of queues by the thread that serves a guest.

/// The result of a visit of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Visit {
    /// The queue had no work, and is worth another look soon.
    Empty,
    /// Work was done, and none is left.
    Done,
    /// Work is left.
    More,
    /// The queue has no work until it is made ready again.
    Parked,
}
