# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The tests' own machinery: what becomes of a program's KTAP, what the plugin "results" prints, and what is judged of a
device and of cases that began again."""

import collections
import types
import xml.etree.ElementTree

import pytest

from virtio_rdma.tests import ktap, rules, tools

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


@pytest.fixture
def guest(tmp_path):
    """What the judge of a device wants of its guest. Nothing is broken yet."""
    counters = {"bad_doorbell": 0, "timeouts": 7}
    network = types.SimpleNamespace(dir=str(tmp_path), device_status=lambda: {"g1": {"counters": counters}})
    return types.SimpleNamespace(
        name="g1", number=1, log=str(tmp_path / "guest1.log"), network=network, counters=counters,
        options=types.SimpleNamespace(rdma="virtio"), known_to_break=collections.Counter())


def says(guest, name, line):
    """Writes a line to a log of a guest's network."""
    with open(f"{guest.network.dir}/{name}.log", "a", encoding="ascii") as file:
        file.write(line + "\n")


def break_nothing(guest):
    says(guest, "virtio-rdmad", 'now WARN no QP (further ones are only counted) guest="g2" kind="bad_doorbell"')
    says(guest, "virtio-rdmad", 'now WARN command 9 ended in Invalid guest="g1" kind="command_invalid"')
    says(guest, "guest1", "[    9.5] virtio_rdma virtio2: takes the device that has failed into service again in 1 s")


def break_counter(guest):
    guest.counters["bad_doorbell"] += 1


def break_log(guest):
    says(guest, "virtio-rdmad", 'now WARN no QP (further ones are only counted) guest="g1" kind="bad_doorbell"')


def spoil_packet(guest):
    guest.counters["bad_icrc"] = 1


def fail(guest):
    says(guest, "guest1", "[    1.5] virtio_rdma virtio2: the device has failed: it is not there")


@pytest.mark.parametrize(("breaks", "what", "kept"), [
    ({}, break_nothing, True), ({}, break_counter, False), ({}, break_log, False),
    ({}, spoil_packet, False), ({}, fail, False), ({"guest": "why"}, break_log, True),
    ({"guest": "why"}, spoil_packet, False), ({"packets": "why"}, spoil_packet, True),
    ({"packets": "why"}, fail, False), ({"device": "why"}, fail, True), ({"device": "why"}, break_counter, False)])
def test_rules(guest, breaks, what, kept):
    """A class of tests fails when a rule is broken that it does not name."""
    what(guest)
    results = Lines()
    rules.judge(results, "two guests", guest, breaks)
    assert results.lines[-1] == f"{'' if kept else 'not '}ok two guests: the rules of guest 1's device are kept"


@pytest.mark.parametrize(("name", "kept"), [("verbs/rc_data.py", False), ("verbs/rings_hostile.py", True),
                                           ("verbs/hostile.py", False)])
def test_rules_of_programs(guest, name, kept):
    """What a program breaks is told once: of the program, or not at all if it is there to break that."""
    results = Lines()
    before = rules.broken(guest)
    break_counter(guest)
    rules.judge_program(results, name, name, guest, before)
    assert results.lines == ([] if kept else [
        "# bad_doorbell: 1", f"not ok {name}: keeps the device's rules"])
    rules.judge(results, "one guest", guest, {})
    assert results.lines[-1] == "ok one guest: the rules of guest 1's device are kept"
    break_counter(guest)
    rules.judge(results, "one guest", guest, {})
    assert results.lines[-2:] == ["# bad_doorbell: 1", "not ok one guest: the rules of guest 1's device are kept"]


@pytest.mark.parametrize(("cases", "again", "passed"), [(1, 3, True), (1, 4, False), (980, 20, True), (979, 21, False)])
def test_tries(cases, again, passed):
    """A suite whose cases began again too often fails."""
    tries, results = tools.Tries(), Lines()
    for number in range(cases):
        tries.add(tools.Outcome(again=0 if number else again))
    tries.judge(results)
    assert results.lines[-1] == ("ok" if passed else "not ok") + " few cases begin again"


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


LATE = """
import pytest

@pytest.fixture(scope="class")
def platform():
    pass

class TestBooted:
    @pytest.mark.parametrize("program", ["a", "b"])
    def test_program(self, program, platform, results):
        results.until = 0

    def test_objects(self, platform):
        pass

class TestOthers:
    def test_boots(self, platform):
        pass

def test_without_guests():
    pass
"""
LATE_KTAP = ["ok 1 program: a", "ok 2 program: b # SKIP", "ok 3 objects", "ok 4 boots # SKIP", "ok 5 without guests",
             "1..5"]


def test_late(pytester):
    """No program begins when the time is over, and no guest boots. What needs no guests runs."""
    pytester.makepyfile(LATE)
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider -p virtio_rdma.tests.results")
    done = pytester.runpytest_subprocess("--ktap")
    lines = [line for line in done.outlines if line.startswith(("ok", "not ok", "1.."))]
    assert [line.split("not this time")[0].strip() for line in lines] == LATE_KTAP


def test_interrupted_run_has_no_plan(pytester):
    pytester.makepyfile("def test_one():\n    pass\n\ndef test_two():\n    raise KeyboardInterrupt\n")
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider -p virtio_rdma.tests.results")
    done = pytester.runpytest_subprocess("--ktap")
    assert "ok 1 one" in done.outlines
    assert not [line for line in done.outlines if line.startswith("1..")]
    assert done.ret == pytest.ExitCode.INTERRUPTED
