// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests that change interfaces of the kernel. Each runs once more, in a process that has a network namespace of its
//! own.

use std::process::Command;

/// A variable that only the processes in their own namespaces have.
const INSIDE: &str = "RDMAD_TEST_HAS_A_NAMESPACE";

/// Runs a program of the system.
pub fn run(words: &str) {
    let mut words = words.split(' ');
    assert!(Command::new(words.next().unwrap()).args(words).status().unwrap().success());
}

/// Makes the test of this name run `inside` a namespace. Does not run it if this process may make none.
pub fn in_namespace(test: &str, inside: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        return inside();
    }
    if !Command::new("unshare").args(["--net", "true"]).status().is_ok_and(|done| done.success()) {
        return eprintln!("skipped: this process may not make a network namespace");
    }
    let mut again = Command::new("unshare");
    again.arg("--net").arg(std::env::current_exe().unwrap()).env(INSIDE, "1");
    let output = again.args([test, "--exact", "--nocapture"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
}
