# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The suites pyverbs and debug-pyverbs: rdma-core's own tests of the verbs, in one guest in loopback: user-mode Linux
with rings; QEMU with virtqueues, as those of user-mode Linux are too short for the CQs of most tests; with the debug
kernel QEMU with rings. In user-mode Linux they run between two devices of one guest as well, which reach each other
over the wire.

A platform is named after a release of rdma-core and the path, "65.0, rings". Its image has the release, and its share
the release's package "tests". Each test must come to what the list pyverbs/outcomes says: a test that the list does
not name passes, one that it names skips, and no test fails.
"""

import collections
import glob
import json
import os
import re
import signal
import subprocess

import pytest

from virtio_rdma.common import TOP, Failure
from virtio_rdma.guests.daemons import TwoPorts

# A bound on a module that hangs; the longest takes some seconds, with the debug kernel minutes.
HANG_SECONDS = {"plain": 300, "debug": 1800}
# How often each module runs.
ROUNDS = {"uml": 2, "qemu": 1}
# Modules for devices of one vendor, which end the interpreter on others'.
VENDORS = re.compile(r"test_(mlx5|efa|irdma|cuda|hns)")
OUTCOMES = os.path.join(TOP, "tools/test/pyverbs/outcomes")
# Lines of a module that ends badly that are shown.
LAST_LINES = 30


class Outcomes:
    """The list of the tests that skip.

    A line that begins with "=" is the reason of the tests below it. A test may be followed by the configurations in
    which it skips, if not in all: a release, "rings", "virtqueues". "total RELEASE N" is the number of tests.
    """

    def __init__(self, path):
        self.totals = {}
        self.skips: dict[str, list] = collections.defaultdict(list)
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
                    raise Failure(f"{path}:{number}: a test without a reason")

    def reason(self, test, configuration):
        """Returns why a test skips in a configuration, a set of words, or None if it does not."""
        for where, reason in self.skips.get(test, ()):
            if where <= configuration:
                return reason
        return None

    def named(self, configuration):
        """Returns the tests that skip in a configuration."""
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
        """Takes the end: what was begun and is not over has failed, and so has a module that did not get to its
        end."""
        for test in self.begun:
            self.outcomes.setdefault(test, ("fail", f"ended early, status {status}"))
        if status:
            self.outcomes[name] = ("fail", f"exit status {status}\n" + "\n".join(self.noise[-LAST_LINES:]))


def modules(share):
    """Returns the modules of the tests below a share."""
    names = sorted(os.path.basename(path)[:-3] for path in glob.glob(f"{share}/tests/test_*.py"))
    return [name for name in names if not VENDORS.match(name)]


def has_players(share, module):
    """Returns whether the tests of a module have a client and a server that exchange messages. Both ends of a
    connection of the RDMA CM have one address, so its tests stay within a device."""
    with open(f"{share}/tests/{module}.py", encoding="utf-8") as file:
        return "create_players(" in file.read() and module != "test_rdmacm"


def pytest_generate_tests(metafunc):
    if "program" in metafunc.fixturenames:
        every = sorted({name for platform in metafunc.config.option.platform for name in modules(platform.share)})
        metafunc.parametrize("program", every)


@pytest.fixture(scope="session")
def outcomes():
    """What the list says."""
    return Outcomes(OUTCOMES)


@pytest.fixture(scope="class")
def title(platform):
    return platform.name


@pytest.fixture(scope="class")
def configuration(platform):
    """What the list calls this guest."""
    return frozenset(platform.name.split(", "))


@pytest.fixture(scope="class")
def seen(platform):
    """What the tests came to so far, by the round and their names. Each platform begins with an empty list: a class
    has one value of a fixture that depends on no parameter."""
    return collections.defaultdict(dict)


@pytest.mark.network("")
class TestPyverbs:
    """One guest, which runs all modules as often as asked."""

    @staticmethod
    def selects(where, program):
        return program in modules(where.platform.share)

    def test_module(self, program, guest, platform, title, configuration, outcomes, seen, results):
        for number in range(ROUNDS[platform.vmm]):
            found = run(guest, program, HANG_SECONDS[platform.kernel])
            seen[number] |= found
            for test, (outcome, why) in found.items():
                expected = outcomes.reason(test, configuration)
                report(results, f"{title}: {test}", outcome, why, expected)

    def test_list_is_complete(self, platform, title, configuration, outcomes, seen, results):
        (total,) = {outcomes.totals.get(name) for name in configuration} - {None} or {None}
        for number in range(ROUNDS[platform.vmm]):
            missing = outcomes.named(configuration) - set(seen[number])
            for test in sorted(missing):
                results.note(f"in the list, and no test: {test}")
            if total != len(seen[number]):
                results.note(f"{len(seen[number])} tests, not {total}")
            results.result(f"{title}: the list is complete", not missing and total == len(seen[number]))
            counts = collections.Counter(outcome for outcome, _ in seen[number].values())
            results.note(f"{title}: {counts['ok']} pass, {counts['skip']} skip, {counts['fail']} fail")

    def test_nothing_is_left_behind(self, guest, title, results):
        left = guest.check("rdma -j res show qp; rdma -j res show cq; rdma -j res show mr")
        results.result(f"{title}: nothing is left behind", not re.findall(r'"pid":\d+', left))


@pytest.mark.network("the wire", kind=TwoPorts, mtu=9000)
@pytest.mark.only(lambda where: where.platform.vmm == "uml")
class TestWire:
    """The modules whose tests have a client and a server, which have a device each, of a daemon each. What one sends to
    the other goes over the wire."""

    @staticmethod
    def selects(where, program):
        return program in modules(where.platform.share) and has_players(where.platform.share, program)

    @pytest.fixture(scope="class")
    def title(self, platform):
        return f"{platform.name}, wire"

    @pytest.fixture(scope="class")
    def configuration(self, configuration):
        """What the list calls this guest."""
        return configuration | {"wire"}

    @pytest.fixture(scope="class")
    def devices(self, network):
        """Both devices. A test uses one index for the GIDs of both."""
        ends = network.of_device()
        assert len({end.link[1] for end in ends}) == 1
        return ends

    def test_module(self, program, devices, platform, title, configuration, outcomes, results):
        client, server = devices
        found = run(client, program, HANG_SECONDS[platform.kernel], "--to", server.link[0])
        for test, (outcome, why) in found.items():
            report(results, f"{title}: {test}", outcome, why, outcomes.reason(test, configuration))

    def test_packets(self, network, title, results):
        """What the tests did went over both taps."""
        carried = [frames_of(tap) for tap in network.taps()]
        results.note(f"{title}: frames from and to each device: {carried}")
        results.result(f"{title}: packets", all(map(all, carried)))


def frames_of(tap):
    """Returns how many frames came from a device through its tap, and how many went there."""
    text = subprocess.run(["ip", "-stats", "-json", "link", "show", tap], check=True, stdout=subprocess.PIPE).stdout
    (link,) = json.loads(text)
    return [link["stats64"][way]["packets"] for way in ("rx", "tx")]



def run(guest, name, seconds, *options):
    """Runs a module in the guest, and returns what its tests came to."""
    module = Module()
    device, gid = guest.link
    command = ["python3", "-B", "/mnt/run_module.py", "/mnt", name, *options,
               "--dev", device, "--port", "1", "--gid", str(gid)]
    job = guest.start(command, sink=module.feed)
    try:
        module.end(job.wait(seconds), name)
    except Failure:
        job.kill(signal.SIGKILL)
        module.end("hangs", name)
    return module.outcomes


def report(results, name, outcome, why, expected):
    """Reports what a test came to. expected: why it should skip, or None."""
    if outcome == "fail":
        results.note(why)
        results.result(name, False)
    elif outcome == "skip":
        if expected is None:
            results.note(f"skips and is not in the list: {why}")
            results.result(name, False)
        else:
            results.result(name, skip=expected)
    else:
        if expected is not None:
            results.note(f"passes, but is in the list: {expected}")
        results.result(name, expected is None)
