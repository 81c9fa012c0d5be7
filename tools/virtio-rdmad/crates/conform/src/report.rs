// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is told of the findings: KTAP for each run, and JSON with each clause.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::{json, Value};

use crate::suite::{Finding, Run, Verdict};

/// The result for a clause.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Mark {
    /// No run has judged it.
    NotJudged,
    /// All runs that judge it pass.
    Pass,
    /// The device breaks it.
    Fail,
}

impl Mark {
    /// Returns the word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::NotJudged => "not judged",
            Self::Pass => "pass",
            Self::Fail => "fail",
        }
    }
}

/// The findings of all runs.
#[derive(Default)]
pub struct Report {
    findings: Vec<Finding>,
}

impl Report {
    /// Writes what comes before the runs.
    pub fn begin(out: &mut impl Write, runs: &[Run], seed: u64) -> io::Result<()> {
        writeln!(out, "TAP version 13\n1..{}\n# seed {seed:#x}", runs.len())
    }

    /// Adds a finding, and writes it.
    pub fn add(&mut self, out: &mut impl Write, finding: Finding) -> io::Result<()> {
        let (number, name) = (self.findings.len() + 1, &finding.name);
        for remark in &finding.remarks {
            writeln!(out, "# {name}: {remark}")?;
        }
        match &finding.verdict {
            Verdict::Pass => writeln!(out, "ok {number} {name}")?,
            Verdict::NotJudged(reason) => writeln!(out, "ok {number} {name} # SKIP {reason}")?,
            Verdict::Fail(failure) => {
                writeln!(out, "# {}", failure.to_string().replace('\n', " "))?;
                writeln!(out, "not ok {number} {name}")?;
            }
        }
        out.flush()?;
        self.findings.push(finding);
        Ok(())
    }

    /// Writes what comes behind the runs.
    pub fn end(&self, out: &mut impl Write) -> io::Result<()> {
        let clauses = self.clauses();
        let of = |mark| clauses.values().filter(|it| it.0 == mark).count();
        for (clause, _) in clauses.iter().filter(|(_, it)| it.0 == Mark::Fail) {
            writeln!(out, "# fails: {clause}")?;
        }
        let [pass, fail, none] = [Mark::Pass, Mark::Fail, Mark::NotJudged].map(of);
        writeln!(out, "# Clauses: pass:{pass} fail:{fail} not judged:{none}")?;
        let runs = |what: fn(&Verdict) -> bool| {
            self.findings.iter().filter(|finding| what(&finding.verdict)).count()
        };
        let pass = runs(|it| matches!(it, Verdict::Pass));
        let skip = runs(|it| matches!(it, Verdict::NotJudged(_)));
        let fail = self.findings.len() - pass - skip;
        writeln!(out, "# Totals: pass:{pass} fail:{fail} xfail:0 xpass:0 skip:{skip} error:0")
    }

    /// Returns whether the device breaks a clause.
    pub fn has_failed(&self) -> bool {
        self.findings.iter().any(|finding| matches!(finding.verdict, Verdict::Fail(_)))
    }

    /// Returns the result for each clause that a run has to do with, and the reason if it was not judged.
    pub fn clauses(&self) -> BTreeMap<String, (Mark, String)> {
        let mut marks: BTreeMap<String, (Mark, String)> = BTreeMap::new();
        let mut note = |clause: &str, mark: Mark, reason: &str| {
            let entry = marks.entry(clause.to_owned()).or_insert((Mark::NotJudged, String::new()));
            if mark > entry.0 || entry.1.is_empty() {
                *entry = (entry.0.max(mark), reason.to_owned());
            }
        };
        for finding in &self.findings {
            let reason = match &finding.verdict {
                Verdict::Pass => "no check was reached",
                Verdict::Fail(failure) => {
                    note(&failure.clause, Mark::Fail, &finding.name);
                    "a test ended before"
                }
                Verdict::NotJudged(reason) => reason,
            };
            finding.clauses.iter().for_each(|clause| note(clause, Mark::NotJudged, reason));
            finding.passed.iter().for_each(|clause| note(clause, Mark::Pass, &finding.name));
        }
        marks
    }

    /// Returns everything as JSON.
    pub fn json(&self, devices: &[String], seed: u64) -> Value {
        let clauses: BTreeMap<_, _> = self
            .clauses()
            .into_iter()
            .map(|(clause, (mark, why))| {
                let key = if mark == Mark::NotJudged { "reason" } else { "test" };
                (clause, json!({ "result": mark.word(), key: why }))
            })
            .collect();
        let tests: Vec<Value> = self.findings.iter().map(test_json).collect();
        json!({ "devices": devices, "seed": seed, "clauses": clauses, "tests": tests })
    }
}

fn test_json(finding: &Finding) -> Value {
    let mut value = json!({
        "name": finding.name,
        "clauses": finding.clauses,
        "passed": finding.passed,
        "remarks": finding.remarks,
        "milliseconds": u64::try_from(finding.took.as_millis()).unwrap_or(u64::MAX),
    });
    let (result, key, why) = match &finding.verdict {
        Verdict::Pass => ("pass", "failure", Value::Null),
        Verdict::Fail(failure) => ("fail", "failure", json!(failure)),
        Verdict::NotJudged(reason) => ("not judged", "reason", json!(reason)),
    };
    value["result"] = json!(result);
    if !why.is_null() {
        value[key] = why;
    }
    value
}
