// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What all floors share: addresses, numbers, tables, locks, counters, and how a queue is visited.

pub(crate) mod by_key;
pub(crate) mod counters;
pub(crate) mod gate;
pub(crate) mod ready_set;
pub(crate) mod slab;
pub(crate) mod sync;
pub(crate) mod table;
pub(crate) mod timers;
