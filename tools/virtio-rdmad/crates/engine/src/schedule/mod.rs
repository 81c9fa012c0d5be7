// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Which queue of a guest is visited when, and what a visit does.

pub(crate) mod busy_poll;
pub(crate) mod change;
pub(crate) mod doorbell;
mod freeze;
pub(crate) mod guest;
pub(crate) mod remap;
pub(crate) mod reset;
pub(crate) mod scheduler;
pub(crate) mod step;
