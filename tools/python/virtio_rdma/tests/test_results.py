# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The tests' own machinery: what becomes of a program's KTAP, and what the plugin "results" prints."""

import xml.etree.ElementTree

import pytest

from virtio_rdma.tests import ktap

pytest_plugins = ["pytester"]


class Lines:
    """Keeps results as lines."""

    def __init__(self):
        self.lines = []

    def result(self, name, passed=True, skip=None):
        self.lines.append(("ok " if passed else "not ok ") + name + (f" # SKIP {skip}" if skip is not None else ""))

    def note(self, text):
        self.lines.append("# " + text)


@pytest.mark.parametrize(("text", "status", "expected"), [
    ("TAP version 13\n1..2\n# seed 0x1\nok 1 a\nok 2 b\n# Totals: pass:2\n", 0,
     ["# x: seed 0x1", "ok x: a", "ok x: b"]),
    ("KTAP version 1\n1..1\n# why\nnot ok 1 a\n", 1, ["# why", "not ok x: a"]),
    ("TAP version 13\n1..2\nok 1 a # SKIP no disk\nok 2 b # no net # SKIP\n", 0,
     ["ok x: a # SKIP no disk", "ok x: b # SKIP no net"]),
    ("TAP version 13\n1..0 # SKIP no device\n", 4, ["ok x # SKIP no device"]),
    ("TAP version 13\n1..3\nok 1 a\nTraceback\n", 1,
     ["ok x: a", "# Traceback", "not ok x: ended early, status 1, 1 of 3 results"]),
    ("TAP version 13\n1..1\nok 1 a\n", 9, ["ok x: a", "not ok x: exit status 9"]),
    ("KTAP version 1\nok 1 a\nok 2 b\n1..2\n", 0, ["ok x: a", "ok x: b"]),
    ("KTAP version 1\nok 1 a\n1..2\n", 1, ["ok x: a", "not ok x: ended early, status 1, 1 of 2 results"]),
    ("sh: no such file\n", 127, ["# sh: no such file", "not ok x: ended early, status 127, 0 of None results"]),
    ("", "hangs", ["not ok x: ended early, status hangs, 0 of None results"]),
    ("TAP version 13\n1..1\n# KTAP version 1\n#     # Subtest: k\n#         ok 1 rc\nok 1 a\n", 0,
     ["#     # Subtest: k", "#         ok 1 rc", "ok x: a"]),
], ids=["passes", "fails", "skips", "skips all", "ends early", "exit status", "plan comes last",
        "plan comes last and early", "is not there", "hangs", "nested"])
def test_ktap(text, status, expected):
    results = Lines()
    ktap.report(results, "x", text, status)
    assert results.lines == expected


PROGRAM = """
import pytest
from virtio_rdma.common import Failure

@pytest.fixture(scope="class")
def guests(results):
    yield
    results.note("at the end")
    results.result("guests end", False)

class TestMany:
    def test_many(self, guests, results):
        results.note("first")
        results.result("one")
        results.result("two", skip="no time")
        results.note("third")
        results.result("three", False)

    def test_simple_thing(self, guests):
        pass

    @pytest.mark.parametrize("kind", ["x"])
    def test_lost(self, guests, kind):
        raise Failure("guest 1 is gone")

    def test_after(self, guests):
        pass

def test_assertion():
    assert 1 + 1 == 3
"""
KTAP = """KTAP version 1
# first
ok 1 one
ok 2 two # SKIP no time
# third
not ok 3 three
ok 4 simple thing
# guest 1 is gone
not ok 5 lost: x
ok 6 after # SKIP left out: guest 1 is gone
# at the end
not ok 7 guests end
not ok 8 assertion
1..8
"""


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["", "xdist"])
def test_plugin(pytester, workers):
    pytester.makepyfile(PROGRAM)
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider -p virtio_rdma.tests.results")
    done = pytester.runpytest_subprocess("--ktap", "--junitxml=junit.xml", *workers)
    printed = [line for line in done.outlines if line.startswith(("#", "ok", "not ok", "1..", "KTAP"))]
    expected = KTAP.splitlines()
    # The assertion is explained in front of its result.
    assert printed[:11] == expected[:11]
    assert "# E       assert (1 + 1) == 3" in printed
    assert printed[-2:] == expected[-2:]
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    cases = xml.etree.ElementTree.parse(pytester.path / "junit.xml").getroot().iter("testcase")
    outcomes = {case.get("name"): [child.tag for child in case] for case in cases}
    assert outcomes["one"] == []
    assert outcomes["two"] == ["skipped"]
    assert outcomes["three"] == ["failure"]
    assert outcomes["guests end"] == ["failure"]


def test_interrupted_run_has_no_plan(pytester):
    pytester.makepyfile("def test_one():\n    pass\n\ndef test_two():\n    raise KeyboardInterrupt\n")
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider -p virtio_rdma.tests.results")
    done = pytester.runpytest_subprocess("--ktap")
    assert "ok 1 one" in done.outlines
    assert not [line for line in done.outlines if line.startswith("1..")]
    assert done.ret == pytest.ExitCode.INTERRUPTED
