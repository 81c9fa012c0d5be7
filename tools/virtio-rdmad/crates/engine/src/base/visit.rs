// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Visits: what the thread that serves a guest finds in a queue.

/// What visiting a queue found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Visit {
    /// Nothing to do; worth looking again soon.
    Empty,
    /// Something was done, and nothing is left.
    Done,
    /// Something is left.
    More,
    /// There is nothing to do until somebody says so.
    Parked,
}
