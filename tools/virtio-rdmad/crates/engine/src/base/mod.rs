// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The parts that all floors share: addresses, limits, tables, locks and counters, and the modules that decide when a
//! queue gets its next visit.

pub(crate) mod address;
pub(crate) mod budget;
pub(crate) mod by_key;
#[macro_use]
pub(crate) mod counted;
pub(crate) mod counters;
pub(crate) mod features;
pub(crate) mod gate;
pub(crate) mod guest_clock;
pub(crate) mod host;
pub(crate) mod identity;
pub(crate) mod image;
pub(crate) mod limits;
pub(crate) mod observe;
pub(crate) mod port;
pub(crate) mod qp_type;
pub(crate) mod queues;
pub(crate) mod quota;
pub(crate) mod ready_set;
pub(crate) mod refused;
pub(crate) mod slab;
pub(crate) mod slot;
pub(crate) mod sync;
pub(crate) mod table;
pub(crate) mod tenure;
pub(crate) mod timers;
pub(crate) mod traffic_class;
pub(crate) mod visit;
pub(crate) mod wc_status;
