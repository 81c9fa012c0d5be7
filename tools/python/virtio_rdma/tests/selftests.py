# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Runs the kselftests in guests, which see them in /mnt/virtio_rdma."""

import functools
import os
import random
import re
import signal
import time

from virtio_rdma.common import TOP, Failure
from virtio_rdma.guests.hostile import Orders
from virtio_rdma.tests import ktap, rules
from virtio_rdma.tests.networks import HANG_SECONDS

# The end of the kernel log of a guest in which a test failed.
LAST_LINES = "dmesg | tail -n 40"
LAST_LINES_SECONDS = 60
# Shows who is blocked, and where. User-mode Linux has no SysRq.
WHO_WAITS = "(echo w >/proc/sysrq-trigger) 2>/dev/null; dmesg | tail -n 200; ps -ef | tail -n 60"
WHO_WAITS_SECONDS = 60
# Rounds of abuse in verbs/rings_hostile.py: an emulated guest is a hundred times slower.
ROUNDS = {("uml", "plain"): 200, ("qemu", "stock"): 40, ("qemu", "plain"): 40, ("qemu", "debug"): 12}
# An emulated guest with a debug kernel is slower again by as much: it goes round fewer loops.
FEWER_LOOPS = {"LOOPS_PERCENT": "20"}
SLEEPS = "suspend.sh"
# The bound on it, in seconds: a debug kernel in an emulated guest needs minutes to write its memory to a disk.
SLEEPS_SECONDS = 1800
# Which results may be left out.
SKIPS = os.path.join(TOP, "tools/test/skips")
# The environment of a host by itself.
ALONE = {"PEERS": ""}


def programs(share):
    """Returns TEST_PROGS of the Makefile of the selftests below a directory."""
    with open(os.path.join(share, "virtio_rdma", "Makefile"), encoding="ascii") as file:
        text = file.read().replace("\\\n", " ")
    found = re.search(r"^TEST_PROGS := (.*)$", text, re.MULTILINE)
    assert found, f"{share}: no TEST_PROGS"
    return found[1].split()


@functools.cache
def known_skips():
    """Returns the patterns of the results that may be left out in user-mode Linux."""
    with open(SKIPS, encoding="ascii") as file:
        lines = [line.strip() for line in file]
    return tuple(line for line in lines if line and line[0] not in "#=")


def seed_of(label):
    """Returns the seed of a program, which follows from the seed of the suite (conftest.py)."""
    return hex(random.Random(f"{os.environ['SEED']}/{label}").getrandbits(32))


class Program:
    """A kselftest that runs in a guest, perhaps with arguments behind its path. Its results have `label` in front of
    their names; finish() reports them, and whether the device's rules were kept."""

    def __init__(self, results, platform, path, guest, env=None, label=""):
        self.results = results
        self.path = path.partition(" ")[0]
        self.label = label + self.path
        self.known = known_skips() if (platform.vmm, platform.kernel) == ("uml", "plain") else None
        self.start = time.monotonic()
        self.guest, self.before = guest, rules.broken(guest)
        env = {"ROUNDS": str(ROUNDS[platform.vmm, platform.kernel]), "SEED": seed_of(self.label), **(env or {})}
        if platform.is_slow:
            env |= FEWER_LOOPS
        self.job = self.launch(guest, f"cd /mnt/virtio_rdma && exec ./{path}", env)

    def launch(self, guest, command, env):
        """Starts the program."""
        return guest.start(command, env)

    @property
    def output(self):
        """What the program printed."""
        return self.job.text

    def finish(self, bound=HANG_SECONDS):
        """Waits for the end, and reports. Says of a program that has not ended after `bound` seconds who waits in its
        guest."""
        status = "hangs"
        try:
            status = self.job.wait(bound)
        except Failure as failure:
            self.results.note(str(failure))
            self.note_of_guest(WHO_WAITS, WHO_WAITS_SECONDS)
            self.job.kill(signal.SIGKILL)
        failed = self.results.failed
        ktap.report(self.results, self.label, self.output, status, self.known)
        if self.results.failed > failed:
            self.note_of_guest(LAST_LINES, LAST_LINES_SECONDS)
        rules.judge_program(self.results, self.label, self.path, self.guest, self.before)
        self.results.note(f"{self.label}: {time.monotonic() - self.start:.0f} s")

    def note_of_guest(self, command, seconds):
        """Adds what a command prints in the guest, which may not answer any more, as diagnosis."""
        job = self.job.guest.start(command)
        job.done.wait(seconds)
        self.results.note(job.text)


class Orderly(Program):
    """A kselftest that tells the device what to do wrong (hostile.Orders)."""

    def __init__(self, results, platform, path, guest, network, **how):
        self.network = network
        self.lines = []
        super().__init__(results, platform, path, guest, **how)

    def launch(self, guest, command, env):
        orders = Orders(self.network, self.lines.append)
        orders.job = guest.start(command, env, orders.feed, typed=True)
        return orders.job

    @property
    def output(self):
        return "".join(self.lines)


def between(results, platform, path, guests, label=""):
    """Runs a kselftest in some guests at the same time: the programs meet each other. The first guest is the host
    that the others connect to."""
    programs = [Program(results, platform, path, guest, {"GUEST": str(number)},
                        f"{label}guest {guest.number} of {len(guests)}: ")
                for number, guest in enumerate(guests, 1)]
    for program in programs:
        program.finish()


def sleeps(results, network, platform, label):
    """Runs the selftest that lets its machine sleep in guest 2, which uses disks of guest 1."""
    target, guest = network.guests

    def step(kind, word):
        env = f"ADDRESS={target.address} PLACE=/tmp/ulp.{kind}"
        return target.check(f"cd /mnt/virtio_rdma && {env} ./ulp.sh {kind} {word}", timeout=HANG_SECONDS).strip()
    kinds = [kind for kind in ("nvme", "iser") if not step(kind, "missing")]
    for kind in kinds:
        step(kind, "target_up")
    env = ALONE | {"SLEEPS": "1", "ADDRESS": target.address, "CONSUMERS": " ".join(kinds)}
    if guest.options.swap:
        env["SWAP"] = "/dev/vdb"
    Program(results, platform, SLEEPS, guest, env, label).finish(SLEEPS_SECONDS)
    for kind in kinds:
        step(kind, "target_down")
