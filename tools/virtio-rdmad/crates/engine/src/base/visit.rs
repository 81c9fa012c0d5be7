// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Visits: what the thread that serves a guest finds in a queue.

/// What a visit of a queue found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Visit {
    /// There was nothing to do; it is worth to look again soon.
    Empty,
    /// Something was done, and nothing is left.
    Done,
    /// Something is left.
    More,
    /// There is nothing to do until somebody says so.
    Parked,
}
