// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Queue pairs: states, attributes and the two halves.

pub(crate) mod config;
pub(crate) mod halves;
pub(crate) mod pace;
pub(crate) mod state;
