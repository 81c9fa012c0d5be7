// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The notes of a test that runs: what it did, and which clauses it has judged.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fmt::{Debug, LowerHex};
use std::time::{Duration, Instant};

use crate::outcome::{Failure, Outcome, Stop};

/// The notes of a test.
pub struct Journal {
    step: RefCell<String>,
    about: Cell<&'static str>,
    passed: RefCell<BTreeSet<&'static str>>,
    remarks: RefCell<Vec<String>>,
    deadline: Cell<Instant>,
    silence: Duration,
}

impl Journal {
    /// Returns the notes of a test that begins now and is about this clause. The test has so much time, and so has each
    /// command.
    pub fn new(about: &'static str, timeout: Duration, silence: Duration) -> Self {
        Self {
            step: RefCell::new("start".into()),
            about: Cell::new(about),
            passed: RefCell::default(),
            remarks: RefCell::default(),
            deadline: Cell::new(Instant::now() + timeout),
            silence,
        }
    }

    /// Notes what the test does next.
    pub fn step(&self, step: impl Into<String>) {
        *self.step.borrow_mut() = step.into();
    }

    /// Names the clause that is broken if what the test waits for next does not come.
    pub fn about(&self, clause: &'static str) {
        self.about.set(clause);
    }

    /// Returns the clause that the test is about now.
    pub fn clause(&self) -> &'static str {
        self.about.get()
    }

    /// Returns the time at which waits of the test end.
    pub fn deadline(&self) -> Instant {
        self.deadline.get()
    }

    /// Returns how long a command may take.
    pub fn silence(&self) -> Duration {
        self.silence
    }

    /// Gives the test so much more time.
    pub fn extend(&self, time: Duration) {
        self.deadline.set(self.deadline.get() + time);
    }

    /// Notes something that a SHOULD asks for and the device does not do.
    pub fn remark(&self, remark: impl Into<String>) {
        self.remarks.borrow_mut().push(remark.into());
    }

    /// Returns what was remarked.
    pub fn remarks(&self) -> Vec<String> {
        self.remarks.borrow().clone()
    }

    /// Returns the clauses that were judged so far, and not broken.
    pub fn passed(&self) -> BTreeSet<&'static str> {
        self.passed.borrow().clone()
    }

    /// Notes that the device keeps a clause.
    pub fn pass(&self, clause: &'static str) {
        self.passed.borrow_mut().insert(clause);
    }

    /// Returns that the device breaks a clause.
    pub fn failure(&self, clause: &str, what: &str, expected: String, got: String) -> Stop {
        let (clause, what) = (clause.to_owned(), what.to_owned());
        Stop::Failed(Box::new(Failure {
            clause,
            what,
            expected,
            got,
            step: self.step.borrow().clone(),
        }))
    }

    /// Judges a clause by a value.
    pub fn is<T: PartialEq + Debug>(
        &self,
        clause: &'static str,
        what: &str,
        got: T,
        expected: T,
    ) -> Outcome {
        if got == expected {
            self.pass(clause);
            return Ok(());
        }
        Err(self.failure(clause, what, format!("{expected:?}"), format!("{got:?}")))
    }

    /// Judges a clause by bits that must be 0.
    pub fn zero<T: PartialEq + Default + LowerHex>(
        &self,
        clause: &'static str,
        what: &str,
        got: T,
    ) -> Outcome {
        if got == T::default() {
            self.pass(clause);
            return Ok(());
        }
        Err(self.failure(clause, what, "0".into(), format!("{got:#x}")))
    }

    /// Judges a clause by a condition.
    pub fn holds(&self, clause: &'static str, what: &str, holds: bool, got: impl Debug) -> Outcome {
        if holds {
            self.pass(clause);
            return Ok(());
        }
        Err(self.failure(clause, what, "this to hold".into(), format!("{got:?}")))
    }

    /// Judges a clause by bytes, and says where they differ.
    pub fn same_bytes(
        &self,
        clause: &'static str,
        what: &str,
        got: &[u8],
        expected: &[u8],
    ) -> Outcome {
        if got == expected {
            self.pass(clause);
            return Ok(());
        }
        let differs = |(_, (a, b)): &(usize, (&u8, &u8))| a != b;
        let first = got.iter().zip(expected).enumerate().find(differs).map_or(0, |(at, _)| at);
        let some = |bytes: &[u8]| {
            let end = bytes.len().min(first + 8);
            format!("{} bytes, at {first}: {:02x?}", bytes.len(), &bytes[first.min(end)..end])
        };
        Err(self.failure(clause, what, some(expected), some(got)))
    }
}
