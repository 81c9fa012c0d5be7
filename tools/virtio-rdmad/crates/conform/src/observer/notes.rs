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
    /// How the driver does not do what the clause says that it SHOULD do.
    pub missed: Option<Failure>,
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
        let failure = self.failure(clause, what, expected, got);
        let judgement = self.clauses.entry(clause).or_default();
        judgement.broken += 1;
        if judgement.broken <= MOST {
            judgement.failures.push(failure);
        }
    }

    /// Notes that the driver does not do what a clause says that it SHOULD do.
    pub fn miss(&mut self, clause: &'static str, what: &str, expected: &str, got: &str) {
        let failure = self.failure(clause, what, expected, got);
        self.clauses.entry(clause).or_default().missed.get_or_insert(failure);
    }

    fn failure(&self, clause: &str, what: &str, expected: &str, got: &str) -> Failure {
        let [clause, what, expected, got] = [clause, what, expected, got].map(str::to_owned);
        Failure { clause, what, expected, got, step: self.step.clone() }
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
