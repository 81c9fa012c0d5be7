// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is told of a driver: a line of KTAP for each clause, and JSON.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::{json, Value};

use super::clauses::{ELSEWHERE, JUDGED};
use super::notes::{Judgement, Notes};
use super::provoke;
use crate::outcome::Failure;
use crate::report::Mark;

/// The reason for which a clause is not judged that does not show to a device that only watches.
const NOT_HERE: &str = "not judged here: a device that only watches does not see it";

/// Returns the clauses that may be judged, with the reason for which one is not.
fn rows() -> Vec<(&'static str, String)> {
    let judged = JUDGED.iter().map(|(clause, reason)| (*clause, (*reason).to_owned()));
    let mut rows: Vec<_> = judged.collect();
    for clause in provoke::ALL.iter().flat_map(|what| what.clauses) {
        if rows.iter().all(|(other, _)| other != clause) {
            rows.push((*clause, format!("not provoked: --provoke {}", provoke::names(clause))));
        }
    }
    rows
}

/// What is told of a driver.
#[derive(Clone, Debug)]
pub struct DriverReport {
    clauses: BTreeMap<&'static str, Judgement>,
}

impl DriverReport {
    /// Returns what is told of these notes.
    pub fn new(notes: &Notes) -> Self {
        Self { clauses: notes.clauses().clone() }
    }

    /// Returns the result for a clause.
    pub fn mark(&self, clause: &str) -> Mark {
        match self.clauses.get(clause) {
            Some(judgement) if judgement.broken > 0 => Mark::Fail,
            Some(judgement) if judgement.kept > 0 && judgement.missed.is_none() => Mark::Pass,
            _ => Mark::NotJudged,
        }
    }

    /// Returns the clauses with this result.
    pub fn with(&self, mark: Mark) -> Vec<&'static str> {
        rows().iter().map(|row| row.0).filter(|clause| self.mark(clause) == mark).collect()
    }

    /// Returns how the driver does not do what this clause says that it SHOULD do.
    pub fn missed(&self, clause: &str) -> Option<&Failure> {
        self.clauses.get(clause).and_then(|judgement| judgement.missed.as_ref())
    }

    /// Returns the reason for which a clause is not judged. `why` is that of one that nothing puts to the test.
    fn reason(&self, clause: &str, why: String) -> String {
        let missed = self.missed(clause);
        missed.map_or(why, |it| format!("SHOULD: expected {}, got {}", it.expected, it.got))
    }

    /// Returns what was judged of a clause.
    pub fn of(&self, clause: &str) -> Option<&Judgement> {
        self.clauses.get(clause)
    }

    /// Returns whether the driver breaks a clause.
    pub fn has_failed(&self) -> bool {
        !self.with(Mark::Fail).is_empty()
    }

    /// Writes the results as KTAP.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let rows = rows();
        writeln!(out, "TAP version 13\n1..{}", rows.len())?;
        for (number, (clause, reason)) in (1..).zip(rows) {
            match self.mark(clause) {
                Mark::Pass => writeln!(out, "ok {number} {clause}")?,
                Mark::NotJudged => {
                    let reason = self.reason(clause, reason);
                    writeln!(out, "ok {number} {clause} # SKIP {reason}")?;
                }
                Mark::Fail => {
                    let judgement = self.of(clause).cloned().unwrap_or_default();
                    for failure in &judgement.failures {
                        writeln!(out, "# {}", failure.to_string().replace('\n', " "))?;
                    }
                    writeln!(out, "# {clause}: broken {} times", judgement.broken)?;
                    writeln!(out, "not ok {number} {clause}")?;
                }
            }
        }
        for clause in self.with(Mark::Fail) {
            writeln!(out, "# fails: {clause}")?;
        }
        let marks = [Mark::Pass, Mark::Fail, Mark::NotJudged];
        let [pass, fail, skip] = marks.map(|mark| self.with(mark).len());
        let elsewhere = ELSEWHERE.split(' ').count();
        writeln!(out, "# Clauses: pass:{pass} fail:{fail} not judged:{}", skip + elsewhere)?;
        writeln!(out, "# Totals: pass:{pass} fail:{fail} xfail:0 xpass:0 skip:{skip} error:0")
    }

    /// Returns everything as JSON.
    pub fn json(&self) -> Value {
        let judged = rows().into_iter().map(|(clause, reason)| {
            let mark = self.mark(clause);
            let mut value = json!({ "result": mark.word() });
            match self.of(clause).filter(|_| mark != Mark::NotJudged) {
                Some(it) => {
                    value["kept"] = json!(it.kept);
                    value["broken"] = json!(it.broken);
                    value["failures"] = json!(it.failures);
                }
                None => value["reason"] = json!(self.reason(clause, reason)),
            }
            (clause.to_owned(), value)
        });
        let word = Mark::NotJudged.word();
        let elsewhere = ELSEWHERE
            .split(' ')
            .map(|clause| (clause.to_owned(), json!({ "result": word, "reason": NOT_HERE })));
        json!({ "clauses": judged.chain(elsewhere).collect::<BTreeMap<_, _>>() })
    }
}
