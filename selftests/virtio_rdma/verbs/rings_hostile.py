#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""A program that abuses its own rings harms only its own QPs.

rings_wild.py abuses rings, in a process of its own and in one way a test. It belongs to a user without rights, who may
lock 8 MiB of memory. This program is its victim: it uses the same device, other QPs, and data that it checks all the
while, and it has memory to which it gave nobody access. ROUNDS in the environment is how much abuse there is.
"""

import json
import os
import resource
import subprocess
import sys

import ktap
import rc
import rc_xrc
import rings_wild
import uverbs
from rc import e, complete, empty, remote, sge

DEVICE = rc.open_device()
ROUNDS = int(os.environ.get("ROUNDS", "200"))
LENGTH = 4096
# The user of the hostile program, nobody, and what the user may lock of memory, as systemd lets users do.
USER = 65534
LOCKED = 8 << 20
# How often the hostile program is started and killed. An emulated guest with a debug kernel takes a quarter of a minute
# to start it.
KILLS = 8
ktap.WATCHDOG = max(ktap.WATCHDOG, 40 * KILLS)
# Lines of the kernel log that one test may add: each cause is logged once.
LINES = 20


class Victim:
    """A pair of QPs between which data flows, and memory that must not change."""

    def __init__(self, rng):
        self.rng = rng
        self.pair = rc.Pair(DEVICE, depth=16)
        self.source, self.target = self.pair.a.memory(LENGTH), self.pair.b.memory(LENGTH)
        self.inbox = self.pair.b.memory(LENGTH)
        # Memory that is registered, but whose key no program was told, and memory that is not registered.
        self.pattern = rng.randbytes(LENGTH)
        self.kept = self.pair.b.memory(LENGTH, data=self.pattern)
        self.canary = uverbs.zeros(LENGTH)
        self.canary[:] = self.pattern
        # An SRQ for XRC whose receives no message may take.
        self.domain = self.extended = None
        if DEVICE.attr.device_cap_flags & rc_xrc.XRC:
            self.domain = rc_xrc.Domain()
            self.extended = rc_xrc.Program(self.domain)
            self.extended.post(0)

    def tells(self):
        """Returns what a hostile program may know."""
        srqn = self.extended.number if self.extended else None
        return {"qpn": self.pair.b.qp.qp_num, "srqn": srqn, "lkey": self.kept.lkey, "rkey": self.kept.rkey,
                "address": self.kept.buf, "canary": uverbs.address(self.canary)}

    def round(self):
        """Sends and writes data, and compares what arrives."""
        a, b, data = self.pair.a, self.pair.b, self.rng.randbytes(LENGTH)
        self.source.write(data, LENGTH)
        b.post_recv([sge(self.inbox)])
        a.post_send(e.IBV_WR_RDMA_WRITE, [sge(self.source)], remote=remote(self.target))
        a.post_send(e.IBV_WR_SEND, [sge(self.source)])
        complete(a.send_cq, 2)
        complete(b.recv_cq)
        for region in (self.target, self.inbox):
            ktap.same_bytes(region.read(LENGTH, 0), data, "data")

    def check(self):
        """Fails the test if anything is there that did not come from here."""
        self.round()
        for cq in (self.pair.a.send_cq, self.pair.b.recv_cq):
            empty(cq)
        ktap.same_bytes(self.kept.read(LENGTH, 0), self.pattern, "memory whose key no program was told")
        ktap.same_bytes(bytes(self.canary), self.pattern, "memory that is not registered")
        if self.extended:
            empty(self.extended.cq)
            inbox = self.extended.inbox
            ktap.same_bytes(inbox.read(inbox.length, 0), bytes(inbox.length), "receives that no message may take")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.pair.__exit__(*error)
        for thing in (self.extended, self.domain):
            if thing:
                thing.close()


def lines():
    """Returns how many lines of the kernel log are the driver's."""
    return sum("virtio_rdma" in line for line in rc.kernel_log())


def limit():
    """Has this process lock no more memory than a user may."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LOCKED, LOCKED))


def start(way, rng, victim):
    """Starts the hostile program."""
    order = {"way": way, "seed": rng.getrandbits(32), "rounds": ROUNDS, "device": DEVICE.name,
             "gid": DEVICE.context.query_gid(rc.PORT, DEVICE.gid.gid_index).gid.replace(":", ""),
             "gid_index": DEVICE.gid.gid_index, "mtu": DEVICE.port.active_mtu, "victim": victim.tells()}
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rings_wild.py")
    return subprocess.Popen([sys.executable, program, json.dumps(order)], user=USER, group=USER, extra_groups=[],
                            preexec_fn=limit, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")


def abuse(way, rng, victim):
    """Runs the hostile program to its end while data flows."""
    program = start(way, rng, victim)
    try:
        while program.poll() is None:
            victim.round()
        _, errors = program.communicate()
        ktap.equal((program.returncode, errors), (0, ""), "end of the hostile program")
    finally:
        program.kill()
        program.wait()


def kill(way, rng, victim):
    """Starts the hostile program and kills it while it runs, several times."""
    for _ in range(KILLS):
        program = start(way, rng, victim)
        ktap.equal(program.stdout.readline(), "running\n", "hostile program")
        for _ in range(rng.randint(1, 50)):
            victim.round()
        program.kill()
        program.communicate()


def test(way):
    """Returns the test of one way of abuse."""
    def run(rng):
        before, said = DEVICE.objects(), lines()
        with Victim(rng) as victim:
            (kill if way is rings_wild.until_killed else abuse)(way.__name__, rng, victim)
            victim.check()
        with Victim(rng) as another:
            another.check()
        ktap.equal(DEVICE.objects(), before, "objects that are left")
        ktap.equal(lines() - said <= LINES, True, "few lines in the kernel log")
    run.__name__, run.__doc__ = way.__name__, way.__doc__
    return run


if __name__ == "__main__":
    if not uverbs.has_rings(DEVICE.name):
        ktap.skip_all("the device has no rings")
    ktap.run([test(way) for way in rings_wild.WAYS])
