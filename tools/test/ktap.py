# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Reports results in KTAP, flat: one line a result, the plan at the end."""

import re
import sys
import time

RESULT = re.compile(r"^(not )?ok (\d+)(?: -)? ?(.*?)\s*(?:# *(SKIP|XFAIL)\b *(.*))?$")


class Report:
    """The results of one suite, printed as they come."""

    def __init__(self):
        self.number = 0
        self.failed = 0
        print("KTAP version 1", flush=True)

    def result(self, name, passed=True, skip=None):
        """One result; skip is the reason why there is none."""
        self.number += 1
        self.failed += not passed
        word = "ok" if passed else "not ok"
        tail = f" # SKIP {skip}" if skip is not None else ""
        print(f"{word} {self.number} {name}{tail}", flush=True)
        return passed

    def note(self, text):
        """Diagnosis, in front of the result that it belongs to."""
        for line in text.rstrip("\n").split("\n"):
            print("# " + line, flush=True)

    def end(self):
        """The plan; the exit status of the suite."""
        print(f"1..{self.number}", flush=True)
        return 1 if self.failed else 0


class Relay:
    """Turns the KTAP that a program prints into results of a report.

    Feed it text as it comes; end() with the program's exit status makes up for
    results that were announced and never came.
    """

    def __init__(self, report, prefix):
        self.report = report
        self.prefix = prefix
        self.rest = ""
        self.planned = None
        self.seen = 0
        self.failed = 0
        self.start = time.monotonic()

    def feed(self, text):
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.line(line.rstrip("\r"))

    def line(self, line):
        plan = re.match(r"^1\.\.(\d+)(?:\s*# *SKIP *(.*))?", line)
        match = RESULT.match(line)
        if plan:
            self.planned = int(plan[1])
            if self.planned == 0:
                self.report.result(self.prefix, skip=plan[2] or "no reason given")
        elif match:
            failed, _, name, directive, reason = match.groups()
            # ktap_helpers.sh puts the reason in front of the directive.
            name, _, early = name.partition(" # ")
            self.seen += 1
            self.failed += bool(failed)
            skip = (reason or early or "no reason given") if directive == "SKIP" else None
            self.report.result(f"{self.prefix}: {name}", not failed, skip)
        elif line and not re.match(r"^(K?TAP version|# Totals|# seed)", line):
            self.report.note(line.removeprefix("# "))
        elif line.startswith("# seed"):
            self.report.note(f"{self.prefix}: {line[2:]}")

    def end(self, status):
        """The program has ended; also says how long it took."""
        if self.rest:
            self.line(self.rest)
            self.rest = ""
        if self.planned is None or self.seen < self.planned:
            self.report.result(f"{self.prefix}: ended early, status {status}, "
                               f"{self.seen} of {self.planned} results", False)
        elif status not in (0, 4) and not self.failed:
            self.report.result(f"{self.prefix}: exit status {status}", False)
        self.report.note(f"{self.prefix}: {time.monotonic() - self.start:.0f} s")


def main_guard(function):
    """Runs a suite's main function; its return value is the exit status."""
    sys.exit(function(sys.argv[1:]))
