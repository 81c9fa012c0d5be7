# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""A pytest plugin: a test may have many results, and each is a test case of the report (KTAP, junit).

What runs in a guest prints results of its own, whose number and names nothing here knows before. The fixture
`results` takes them one by one as they come, from a test or from what prepares or ends its guests. A test that
reported results is not counted itself, unless it fails for another reason.

With --ktap the output is KTAP, flat: one line a result, diagnosis in front of the result that it belongs to, the
plan at the end. A run that does not get to its end prints no plan.
"""

import os
import sys
import time
from typing import Any

import pytest

from virtio_rdma.common import Failure

NOTES = "notes"
# What is written of a test that would begin when the time of "make test" is over.
NO_TIME = "not this time: the minutes of make test are over (MINUTES); a suite that T names has no limit"


def pytest_addoption(parser):
    parser.addoption("--ktap", action="store_true", help="print the results as KTAP, and nothing else")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    config.pluginmanager.register(Results(config), "results")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Names(), "result-names")
        if config.option.ktap:
            # What tests print is captured: a descriptor of its own goes past that.
            config.pluginmanager.register(Ktap(os.fdopen(os.dup(sys.stdout.fileno()), "w")), "ktap")
            # Others use the reporter, so a silent one takes its place.
            reporter = config.pluginmanager.get_plugin("terminalreporter")
            config.pluginmanager.unregister(reporter)
            nowhere = open(os.devnull, "w", encoding="ascii")  # noqa: SIM115
            silent = type(reporter)(config, nowhere)
            config.pluginmanager.register(silent, "terminalreporter")


class Results:
    """Takes results and diagnosis, and gives them to pytest as reports of the test that runs. `failed` counts what
    failed; `interrupted` is set once Ctrl-C or a signal ends the run."""

    def __init__(self, config):
        self.config = config
        self.failed = 0
        self.interrupted = False
        self.item: Any = None
        self.count = 0
        self.notes: list[str] = []
        self.lost: dict[tuple, str] = {}
        self.until = float(os.environ.get("UNTIL", "inf"))
        self.begun: set[tuple] = set()

    def result(self, name, passed=True, skip=None):
        """Reports one result, and returns whether it passed. skip: the reason why it could not run."""
        passed = bool(passed)
        self.count += 1
        self.failed += not passed
        outcome: Any = "passed"
        text: Any = None
        if skip is not None:
            outcome, text = "skipped", (str(self.item.path), 0, f"Skipped: {skip}")
        elif not passed:
            outcome, text = "failed", "\n".join([name, *self.notes])
        report = pytest.TestReport(
            nodeid=self.item.nodeid, location=self.item.location, keywords={}, outcome=outcome, longrepr=text,
            when="call", sections=self.take_notes(), case=name)
        self.config.hook.pytest_runtest_logreport(report=report)
        return passed

    def note(self, text):
        """Adds diagnosis, which is shown in front of the next result."""
        self.notes += text.rstrip("\n").split("\n")

    def take_notes(self):
        """Returns what note() was told since the last result, as a section of a report."""
        notes, self.notes = self.notes, []
        return [(NOTES, "\n".join(notes))] if notes else []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.item, self.count = item, 0
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        """Leaves out tests whose guests are lost, and those in guests for which no time is left. What is judged at the
        end of guests that have booted comes always."""
        guests = guests_of(item)
        reason = self.lost.get(guests)
        if reason:
            pytest.skip(f"left out: {reason}")
        if "platform" in item.fixturenames:
            is_late = time.time() > self.until
            if is_late and ("program" in item.fixturenames or guests not in self.begun):
                pytest.skip(NO_TIME)
            self.begun.add(guests)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        error = call.excinfo.value if call.excinfo else None
        if isinstance(error, Failure):
            # The message says it all.
            report.longrepr = str(error)
            self.lost.setdefault(guests_of(item), str(error).split("\n", maxsplit=1)[0])
        self.failed += report.failed
        report.title = title_of(item)
        report.has_results = self.count > 0
        report.sections = self.take_notes() + report.sections
        return report

    def pytest_keyboard_interrupt(self):
        self.interrupted = True


class Names:
    """Gives each result a node ID of its own, so that reports tell them apart. Workers do without: there a report
    has the node ID of the test that runs."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        if hasattr(report, "case"):
            report.nodeid += f"::{report.case}"


class Ktap:
    """Writes KTAP."""

    def __init__(self, stream):
        self.stream = stream
        self.number = 0
        self.print("KTAP version 1")

    def print(self, line):
        print(line, file=self.stream, flush=True)

    def result(self, name, report):
        """Prints one line for a result, and why it failed or was skipped."""
        self.number += 1
        if report.failed and not hasattr(report, "case"):
            self.diagnose(str(report.longrepr))
        word = "not ok" if report.failed else "ok"
        tail = ""
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            tail = f" # SKIP {reason.removeprefix('Skipped: ')}"
        self.print(f"{word} {self.number} {name}{tail}")

    def diagnose(self, text):
        for line in text.rstrip("\n").split("\n"):
            self.print("# " + line)

    def pytest_runtest_logreport(self, report):
        for name, text in report.sections:
            if name == NOTES or report.failed:
                self.diagnose(text)
        if hasattr(report, "case"):
            self.result(report.case, report)
        elif report.failed or report.skipped or (report.when == "call" and not report.has_results):
            self.result(report.title + f": {report.when}" * (report.when == "teardown"), report)

    def pytest_collectreport(self, report):
        if report.failed:
            self.result(f"collecting {report.nodeid}", report)

    def pytest_internalerror(self, excrepr):
        self.diagnose(str(excrepr))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus):
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self.print(f"1..{self.number}")


def guests_of(item):
    """Returns what tells the guests of a test from those of others: its class, and the class's parameters."""
    parameters = getattr(item, "callspec", None)
    chosen = parameters.params if parameters else {}
    return item.cls, chosen.get("platform"), chosen.get("path")


def words(name):
    """Returns a name of Python's as words."""
    return name.removeprefix("test_").replace("_", " ")


def title_of(item):
    """Returns what a test is called in KTAP: TITLE of its stash, or the words of its name and its parameters."""
    if TITLE in item.stash:
        return item.stash[TITLE]
    name, bracket, parameters = item.name.partition("[")
    return words(name) + (": " + parameters.removesuffix("]") if bracket else "")


TITLE = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def results(request):
    """Takes results and diagnosis (Results)."""
    return request.config.pluginmanager.get_plugin("results")
