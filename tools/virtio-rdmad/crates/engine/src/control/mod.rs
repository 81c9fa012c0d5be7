// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The control queue and its commands (specification, chapter 5).

pub(crate) mod mcast;
pub(crate) mod modify_qp;
pub(crate) mod prepare;
pub(crate) mod queue;
pub(crate) mod rings;
