// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Queue pairs: states, attributes and the two halves.

pub(crate) mod config;
pub(crate) mod expected;
pub(crate) mod halves;
pub(crate) mod inbound;
pub(crate) mod pace;
#[cfg(test)]
mod simulation;
pub(crate) mod state;
pub(crate) mod window;
