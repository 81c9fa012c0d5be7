// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Counts of what a VMM does wrong.

use std::collections::HashMap;
use std::fmt::Display;
use std::hash::Hash;

/// The number of times that each fault of type `F` happened on one connection. `F` is the protocol's list of faults;
/// its text goes to the log.
#[derive(Debug)]
pub struct Faults<F>(HashMap<F, u64>);

impl<F: Copy + Display + Eq + Hash> Faults<F> {
    /// Counts a fault in a message whose kind has the number `request`. Logs the first fault of
    /// each kind, and only that, so that a VMM cannot fill the log.
    pub fn count(&mut self, fault: F, request: u32) {
        let count = self.0.entry(fault).or_default();
        *count += 1;
        if *count == 1 {
            tracing::warn!(%fault, request, "a fault of the VMM; further ones are only counted");
        }
    }

    /// Returns how often this fault happened.
    pub fn get(&self, fault: F) -> u64 {
        self.0.get(&fault).copied().unwrap_or_default()
    }
}

impl<F> Default for Faults<F> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}
