// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Queue pairs: states, attributes and the two halves.

pub(crate) mod admission;
pub(crate) mod answered;
pub(crate) mod config;
pub(crate) mod cwnd;
pub(crate) mod dcqcn;
pub(crate) mod expected;
pub(crate) mod flow;
pub(crate) mod gaps;
pub(crate) mod halves;
pub(crate) mod held;
pub(crate) mod inbound;
#[cfg(test)]
mod incast;
pub(crate) mod mtu;
pub(crate) mod naks;
pub(crate) mod pace;
pub(crate) mod probe;
pub(crate) mod saved;
#[cfg(test)]
mod simulation;
pub(crate) mod state;
pub(crate) mod window;
