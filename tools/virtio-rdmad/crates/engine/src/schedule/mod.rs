// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Which queue has its turn when.

pub(crate) mod busy_poll;
pub(crate) mod change;
pub(crate) mod doorbell;
