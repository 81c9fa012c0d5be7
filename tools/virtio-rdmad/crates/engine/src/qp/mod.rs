// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Queue pairs: states, attributes and the two halves.

pub(crate) mod admission;
pub(crate) mod answered;
pub(crate) mod config;
pub(crate) mod halves;
pub(crate) mod image;
pub(crate) mod inbound;
pub(crate) mod mtu;
pub(crate) mod state;
