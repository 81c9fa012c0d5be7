# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Reads the KTAP that a program in a guest printed, by the parser of the kernel's KUnit tools."""

import fnmatch
import re

import kunit_parser
from kunit_printer import null_printer

VERSION = re.compile(r"K?TAP version \d+$")
NO_TESTS = re.compile(r"1\.\.0(?:\s*# *SKIP *(.*))?$")
# Lines that say what the results say already.
NOISE = re.compile(r"\s*(K?TAP version|# Totals)")
# The name of results that say that a feature is not there.
WITHOUT = "without"
# The statuses that kselftests end with when all tests passed, and when all were skipped.
KSFT_PASS, KSFT_SKIP = 0, 4


def report(results, label, text, status, known=None):
    """Reports each result in the output of a program, and makes up for results that were announced and did not come.

    label: stands in front of the results' names. status: the program's exit status, or "hangs". known: patterns of the
    names of results that may be skipped, or say that there is no such feature; None for any.
    """
    results = results if known is None else Known(results, known)
    lines = [line.rstrip("\r") for line in text.split("\n")]
    start = next((number for number, line in enumerate(lines) if VERSION.match(line)), len(lines))
    note(results, label, lines[:start])
    stream = kunit_parser.extract_tap_lines(lines[start:])
    tests, planned = [], None
    if stream:
        parsed = kunit_parser.parse_test(stream, 0, [], False, null_printer)
        tests, planned = parsed.subtests, parsed.expected_count
        note(results, label, parsed.log)
    seen = failed = 0
    for test in tests:
        note(results, label, test.log)
        if not test.name:
            # No result: what is missing, or a plan that came last.
            planned = planned if planned is not None else test.expected_count
            continue
        # ktap_helpers.sh puts the reason in front of the directive.
        name, _, early = test.name.partition(" # ")
        skip = None
        if test.status == kunit_parser.TestStatus.SKIPPED:
            skip = test.skip_reason or early or "no reason given"
        passed = test.ok_status()
        seen += 1
        failed += not passed
        results.result(f"{label}: {name}", passed, skip)
    note(results, label, list(stream))
    if planned == 0:
        reasons = [match[1] for match in map(NO_TESTS.match, lines) if match]
        results.result(label, skip=(reasons and reasons[0]) or "no reason given")
    elif planned is None or seen < planned:
        results.result(f"{label}: ended early, status {status}, {seen} of {planned} results", False)
    if planned is not None and seen >= planned and status not in (KSFT_PASS, KSFT_SKIP) and not failed:
        results.result(f"{label}: exit status {status}", False)


class Known:
    """Takes results, and fails those that are left out and match no pattern of known ones."""

    def __init__(self, results, known):
        self.results = results
        self.known = known

    def result(self, name, passed=True, skip=None):
        """Reports one result."""
        left_out = skip is not None or name.rpartition(": ")[2] == WITHOUT
        if left_out and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.known):
            self.results.note(f"left out: {skip or 'a feature is not there'}; tools/test/skips does not have it")
            passed, skip = False, None
        return self.results.result(name, passed, skip)

    def note(self, text):
        """Adds diagnosis."""
        self.results.note(text)


def note(results, label, lines):
    """Notes diagnosis. A seed is named with its program."""
    for line in lines:
        line = line.removeprefix("# ")
        if line.startswith("seed"):
            line = f"{label}: {line}"
        if line and not NOISE.match("# " + line) and not NOISE.match(line):
            results.note(line)
