// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What was judged of a driver: each clause, how often the driver kept it, and where it broke it.

use std::collections::BTreeMap;

use crate::outcome::Failure;

/// The most failures of one clause that are kept. All are counted.
const MOST: u64 = 5;

/// What was judged of a clause.
#[derive(Clone, Debug, Default)]
pub struct Judgement {
    /// How often the driver kept it.
    pub kept: u64,
    /// How often the driver broke it.
    pub broken: u64,
    /// The first failures.
    pub failures: Vec<Failure>,
}

/// The notes of a driver.
#[derive(Clone, Debug, Default)]
pub struct Notes {
    step: String,
    clauses: BTreeMap<&'static str, Judgement>,
}

impl Notes {
    /// Notes what the driver does now.
    pub fn step(&mut self, step: impl Into<String>) {
        self.step = step.into();
    }

    /// Returns what was judged.
    pub fn clauses(&self) -> &BTreeMap<&'static str, Judgement> {
        &self.clauses
    }

    /// Notes that the driver keeps a clause.
    pub fn pass(&mut self, clause: &'static str) {
        self.clauses.entry(clause).or_default().kept += 1;
    }

    /// Notes that the driver breaks a clause.
    pub fn fail(&mut self, clause: &'static str, what: &str, expected: &str, got: &str) {
        let judgement = self.clauses.entry(clause).or_default();
        judgement.broken += 1;
        if judgement.broken <= MOST {
            judgement.failures.push(Failure {
                clause: clause.into(),
                what: what.into(),
                expected: expected.into(),
                got: got.into(),
                step: self.step.clone(),
            });
        }
    }

    /// Judges a clause by a condition. The text says what was looked at, what is expected, and what came.
    pub fn judge(&mut self, clause: &'static str, holds: bool, text: impl FnOnce() -> [String; 3]) {
        if holds {
            return self.pass(clause);
        }
        let [what, expected, got] = text();
        self.fail(clause, &what, &expected, &got);
    }
}
