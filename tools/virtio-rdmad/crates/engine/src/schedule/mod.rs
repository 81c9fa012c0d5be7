// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The order in which the queues of a guest are visited, and the work of a visit.

pub(crate) mod busy_poll;
pub(crate) mod change;
pub(crate) mod doorbell;
mod freeze;
pub(crate) mod guest;
pub(crate) mod remap;
pub(crate) mod reset;
pub(crate) mod scheduler;
pub(crate) mod step;
