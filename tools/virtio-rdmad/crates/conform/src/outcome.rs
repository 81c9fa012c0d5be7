// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a test ends.

use std::fmt;

use serde::Serialize;

/// What a device did wrong.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Failure {
    /// The clause that the device breaks.
    pub clause: String,
    /// What was looked at.
    pub what: String,
    /// The value that the clause asks for.
    pub expected: String,
    /// The value that came.
    pub got: String,
    /// What the test did last.
    pub step: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { clause, what, expected, got, step } = self;
        write!(f, "{clause}: {what}: expected {expected}, got {got} (step: {step})")
    }
}

/// Why a test does not go on.
#[derive(Clone, Debug)]
pub enum Stop {
    /// The device breaks a clause.
    Failed(Box<Failure>),
    /// The test cannot judge this device.
    NotJudged(String),
    /// The connection to the device has ended.
    Gone(String),
}

/// The result of a step of a test.
pub type Outcome<T = ()> = Result<T, Stop>;

/// Returns that the test cannot judge this device.
pub fn not_judged<T>(reason: impl Into<String>) -> Outcome<T> {
    Err(Stop::NotJudged(reason.into()))
}

/// Returns that the connection to the device has ended.
pub fn gone(error: impl fmt::Display) -> Stop {
    Stop::Gone(error.to_string())
}
