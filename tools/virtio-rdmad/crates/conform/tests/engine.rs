// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The suite judges the device of this project, which keeps all clauses.

use std::collections::BTreeSet;
use std::rc::Rc;

use conform::port::{Attach, InProcess, Network};
use conform::report::{Mark, Report};
use conform::suite::{all, Finding, Settings, Suite, Verdict};

/// Returns devices of a network of this process.
fn devices(network: &Rc<Network>, count: u8) -> Vec<Box<dyn Attach>> {
    (1..=count).map(|number| Box::new(InProcess::new(network, number)) as _).collect()
}

/// Runs the tests of some families, and returns what they find.
fn judge(count: u8, families: &[&str]) -> Vec<Finding> {
    let mut suite = Suite::new(Settings::default(), devices(&Network::new(), count));
    let is_of = |name: &str| families.iter().any(|family| name.starts_with(&format!("{family}.")));
    let runs: Vec<_> = all().into_iter().filter(|run| is_of(&run.name())).collect();
    assert!(!runs.is_empty());
    runs.iter().map(|run| suite.run(run)).collect()
}

/// Checks that nothing fails, and that each test judges all that it names.
fn all_pass(findings: &[Finding]) {
    let mut wrong = Vec::new();
    for Finding { name, clauses, verdict, passed, .. } in findings {
        match verdict {
            Verdict::Pass => {
                let missing: Vec<_> = clauses.iter().filter(|it| !passed.contains(it)).collect();
                if !missing.is_empty() {
                    wrong.push(format!("{name} does not judge {missing:?}"));
                }
            }
            Verdict::Fail(failure) => wrong.push(format!("{name}: {failure}")),
            Verdict::NotJudged(reason) if reason.starts_with("the transport") => {}
            Verdict::NotJudged(reason) if reason == "a READ has as many SGEs as a SEND" => {}
            Verdict::NotJudged(reason) => wrong.push(format!("{name}: {reason}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Makes a test of each of these families.
macro_rules! pass {
    ($($family:ident)*) => {
        $(#[test]
        fn $family() {
            all_pass(&judge(2, &[stringify!($family)]));
        })*

        #[test]
        fn each_family_has_a_test_here() {
            let here: BTreeSet<&str> = [$(stringify!($family)),*].into();
            for run in all() {
                let name = run.name();
                assert!(here.contains(name.split('.').next().unwrap()), "{name}");
            }
        }
    };
}

pass! {
    completion configuration connection control datagram lost_memory management memory options port queue_pair reset
    ring shared_receive virtqueues work_request xrc
}

#[test]
fn one_device_leaves_tests_out() {
    let findings = judge(1, &["port"]);
    let two = findings.iter().find(|it| it.name == "port.a_gid_has_one_owner").unwrap();
    assert_eq!(two.verdict, Verdict::NotJudged("needs two devices".into()));
    let one = findings.iter().find(|it| it.name == "port.other_ports").unwrap();
    assert_eq!(one.verdict, Verdict::Pass);
}

#[test]
fn names_are_used_once_and_clauses_have_their_form() {
    let runs = all();
    let names: BTreeSet<String> = runs.iter().map(conform::suite::Run::name).collect();
    assert_eq!(names.len(), runs.len());
    for clause in runs.iter().flat_map(|run| run.test.clauses) {
        let (family, number) = clause.strip_prefix("D-").unwrap().split_once('-').unwrap();
        assert!(family.bytes().all(|byte| byte.is_ascii_uppercase()), "{clause}");
        assert!(number.parse::<u16>().is_ok(), "{clause}");
    }
}

#[test]
fn report_counts_tests_and_clauses() {
    let mut report = Report::default();
    let mut text = Vec::new();
    for finding in judge(1, &["configuration"]) {
        report.add(&mut text, finding).unwrap();
    }
    report.end(&mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    assert!(text.starts_with("ok 1 configuration."), "{text}");
    assert!(text.contains("# SKIP the transport has FEATURES_OK"), "{text}");
    assert!(text.contains("# Totals: pass:"), "{text}");
    assert_eq!(report.clauses()["D-FEAT-05"].0, Mark::Pass);
    assert_eq!(report.clauses()["D-FEAT-03"].0, Mark::NotJudged);
    let json = report.json(&["a device".into()], 7);
    assert_eq!(json["clauses"]["D-FEAT-05"]["result"], "pass");
    assert_eq!(json["clauses"]["D-FEAT-03"]["reason"], "the transport has FEATURES_OK");
    assert_eq!(json["seed"], 7);
}
