// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whether the limit of a guest's work requests lets the one under way of a QP pass.

use std::time::Instant;

use reliability::{RateLimit, Turn};

/// The state of a work request with regard to the limit of the guest's work requests.
pub(crate) enum Admission {
    /// The work request has not passed the limit. It has this turn, if the limit was asked.
    Waits(Option<Turn>),
    /// The work request has passed, and the limit is not asked again.
    Passed,
}

impl Default for Admission {
    /// Returns the state of a new work request.
    fn default() -> Self {
        Self::Waits(None)
    }
}

impl Admission {
    /// Asks the limit. Returns until when the work request has to wait; `None` if it has passed.
    pub fn wait(&mut self, limit: &RateLimit, now: Instant) -> Option<Instant> {
        let Self::Waits(turn) = self else { return None };
        let until = limit.wait(turn, 1, now);
        if until.is_none() {
            *self = Self::Passed;
        }
        until
    }

    /// Returns until when the work request has to wait that has asked the limit and has not passed.
    pub fn until(&self) -> Option<Instant> {
        match self {
            Self::Waits(turn) => turn.map(|turn| turn.at()),
            Self::Passed => None,
        }
    }
}
