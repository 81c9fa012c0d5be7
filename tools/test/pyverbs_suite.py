# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suites pyverbs and debug-pyverbs: rdma-core's own tests of the verbs, in
one guest in loopback: user-mode Linux with rings, QEMU with virtqueues, as those
of user-mode Linux are too short for the CQs of most tests; with the debug kernel
QEMU with rings. Runs inside the build root.

Arguments: plain or debug, the kernels' build directories (user-mode Linux's,
which debug has none of, and QEMU's), then for each release of rdma-core its
version, the guest image that has it and a directory with its package "tests".

Each test must come to what the list pyverbs/outcomes says: a test that it does
not name passes, one that it names skips, and none fails.
"""

import collections
import glob
import json
import os
import re
import signal
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "../vm"))
import guests  # noqa: E402  pylint: disable=wrong-import-position
import guest_suite  # noqa: E402  pylint: disable=wrong-import-position
import ktap  # noqa: E402  pylint: disable=wrong-import-position

# A bound on a module that hangs; the longest takes some seconds, with the debug kernel minutes.
HANG_SECONDS = {"plain": 300, "debug": 1800}
# Modules for devices of one vendor, which end the interpreter on others'.
VENDORS = re.compile(r"test_(mlx5|efa|irdma|cuda|hns)")


class Outcomes:
    """The list of the tests that skip.

    A line that begins with "=" is the reason of the tests below it. A test may
    be followed by the configurations in which it skips, if not in all: a
    release, "rings", "virtqueues". "total RELEASE N" is the number of tests.
    """

    def __init__(self, path):
        self.totals = {}
        self.skips = collections.defaultdict(list)
        reason = None
        with open(path, encoding="ascii") as file:
            for number, line in enumerate(file, 1):
                words = line.split("#", 1)[0].split()
                if not words:
                    continue
                if words[0] == "=":
                    reason = " ".join(words[1:])
                elif words[0] == "total":
                    self.totals[words[1]] = int(words[2])
                elif reason:
                    self.skips[words[0]].append((frozenset(words[1:]), reason))
                else:
                    raise guests.Failure(f"{path}:{number}: a test without a reason")

    def reason(self, test, configuration):
        """Why a test skips in a configuration, a set of words; None if it does not."""
        for where, reason in self.skips.get(test, ()):
            if where <= configuration:
                return reason
        return None

    def named(self, configuration):
        """The tests that skip in a configuration."""
        return {test for test in self.skips if self.reason(test, configuration)}


class Module:
    """What comes of one module: `outcomes` of the tests that are over, by name."""

    def __init__(self):
        self.outcomes = {}
        self.begun = []
        self.rest = ""
        self.noise = []

    def feed(self, text):
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.line(line)

    def line(self, line):
        try:
            said = json.loads(line)
            test = said["test"]
        except (ValueError, TypeError, KeyError):
            self.noise.append(line)
            return
        if "outcome" not in said:
            self.begun.append(test)
        elif self.outcomes.get(test, ("ok",))[0] != "fail":
            self.outcomes[test] = (said["outcome"], said.get("why", ""))

    def end(self, status, name):
        """What was begun and is not over has failed, and so has a module that
        did not get to its end."""
        for test in self.begun:
            self.outcomes.setdefault(test, ("fail", f"ended early, status {status}"))
        if status:
            self.outcomes[name] = ("fail", f"exit status {status}\n" + "\n".join(self.noise[-30:]))


class Suite:
    def __init__(self, kernel, directories, outcomes):
        self.kernel = kernel
        self.directories = directories
        self.outcomes = outcomes
        self.report = ktap.Report()

    def module(self, guest, name):
        """Run a module in the guest."""
        module = Module()
        device, gid = guest.link
        command = ["python3", "-B", "/mnt/run_module.py", "/mnt", name,
                   "--dev", device, "--port", "1", "--gid", str(gid)]
        job = guest.start(command, sink=module.feed)
        try:
            module.end(job.wait(HANG_SECONDS[self.kernel]), name)
        except guests.Failure:
            job.kill(signal.SIGKILL)
            module.end("hangs", name)
        return module.outcomes

    def judge(self, title, test, outcome, why, configuration):
        """One result: what a test came to, and what it should."""
        label = f"{title}: {test}"
        reason = self.outcomes.reason(test, configuration)
        if outcome == "fail":
            self.report.note(why)
            self.report.result(label, False)
        elif outcome == "skip":
            if reason is None:
                self.report.note(f"skips and is not in the list: {why}")
            self.report.result(label, reason is not None, reason or why)
        else:
            if reason is not None:
                self.report.note(f"passes, but is in the list: {reason}")
            self.report.result(label, reason is None)

    def round(self, title, guest, modules, configuration, total):
        """All modules once."""
        outcomes = {}
        for name in modules:
            outcomes |= self.module(guest, name)
        for test, (outcome, why) in outcomes.items():
            self.judge(title, test, outcome, why, configuration)
        missing = self.outcomes.named(configuration) - set(outcomes)
        for test in sorted(missing):
            self.report.note(f"in the list, and no test: {test}")
        if total != len(outcomes):
            self.report.note(f"{len(outcomes)} tests, not {total}")
        self.report.result(f"{title}: the list is complete", not missing and total == len(outcomes))
        counts = collections.Counter(outcome for outcome, _ in outcomes.values())
        self.report.note(f"{title}: {counts['ok']} pass, {counts['skip']} skip, {counts['fail']} fail")

    def part(self, vmm, path, release, image, share, rounds):
        """One guest: boot, run the tests as often as asked, judge, end."""
        title, configuration = f"{release}, {path}", frozenset((release, path))
        options = guest_suite.options(vmm, self.kernel, self.directories[vmm], image, share)
        options.no_rings = () if path == "rings" else (1,)
        network = guests.Network(options)
        before, start = self.report.failed, time.monotonic()
        try:
            network.boot()
            (guest,) = network.guests
            modules = sorted(os.path.basename(file)[:-3] for file in glob.glob(f"{share}/tests/test_*.py"))
            modules = [name for name in modules if not VENDORS.match(name)]
            for _ in range(rounds):
                self.round(title, guest, modules, configuration, self.outcomes.totals.get(release))
            lines = guest.reports()
            for line in lines:
                self.report.note(line)
            self.report.result(f"{title}: the kernel log has no report", not lines)
            left = guest.check("rdma -j res show qp; rdma -j res show cq; rdma -j res show mr")
            mine = re.findall(r'"pid":\d+', left)
            self.report.result(f"{title}: nothing is left behind", not mine)
        except guests.Failure as failure:
            self.report.note(str(failure))
            self.report.result(title, False)
        finally:
            failed = self.report.failed > before
            network.close(failed)
            if failed:
                self.report.note("logs: " + " ".join(network.logs()))
        status = network.daemon.returncode if network.daemon else None
        self.report.result(f"{title}: the device ends cleanly", status == 0)
        self.report.note(f"{title}: {time.monotonic() - start:.0f} s")


def main(arguments):
    kernel, um, x86_64, *releases = arguments
    signal.signal(signal.SIGTERM, guest_suite.interrupt)
    try:
        suite = Suite(kernel, {"uml": um, "qemu": x86_64}, Outcomes(os.path.join(HERE, "pyverbs/outcomes")))
        for release in zip(*[iter(releases)] * 3):
            if kernel == "debug":
                suite.part("qemu", "rings", *release, rounds=1)
            else:
                suite.part("uml", "rings", *release, rounds=2)
        if kernel == "plain":
            suite.part("qemu", "virtqueues", *releases[:3], rounds=1)
    except KeyboardInterrupt:
        return 130
    except guests.Failure as failure:
        guests.say(str(failure))
        return 1
    return suite.report.end()


if __name__ == "__main__":
    ktap.main_guard(main)
