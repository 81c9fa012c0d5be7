#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Doorbells that the kernel has no memory for: what was posted is in the ring, and goes to the device once.

A program that rings calls the kernel, which allocates. CONFIG_FAILSLAB makes these allocations fail in this task
alone (Documentation/fault-injection/fault-injection.rst).
"""

import os
import subprocess
import time

import abi
import ktap
from rc import Pair, complete, e, empty, open_device, remote, sge

DEVICE = open_device()
FAILSLAB = "/sys/kernel/debug/failslab/"
# More allocations than a test makes fail.
ALL = 1000000
# How often the library rings before it returns: tools/provider/src/doorbell.rs.
TRIES = 64
# After so many seconds without work the device wants to be told of more.
IDLE = 0.02
MESSAGES = 20


def setting(name, value=None):
    """Reads a parameter of failslab, or sets it."""
    if value is None:
        with open(FAILSLAB + name, encoding="ascii") as file:
            return file.read().strip()
    with open(FAILSLAB + name, "w", encoding="ascii") as file:
        file.write(str(value))
    return value


class Failing:
    """Makes the next `times` allocations of this task fail; `failed` is how many have failed."""

    def __init__(self):
        self.file = os.open("/proc/self/make-it-fail", os.O_RDWR)
        self.times = self.failed = 0

    def close(self):
        os.close(self.file)

    def __call__(self, times):
        self.times = times
        return self

    def __enter__(self):
        setting("times", self.times)
        os.pwrite(self.file, b"1", 0)

    def __exit__(self, *_):
        os.pwrite(self.file, b"0", 0)
        self.failed += self.times - int(setting("times"))


def prepared():
    """Makes failslab ready for this task, or skips all tests with the reason."""
    if not DEVICE.has_feature(abi.F_RINGS):
        ktap.skip_all("programs of this device post in the kernel")
    if not os.path.isdir(FAILSLAB):
        subprocess.run(["mount", "-t", "debugfs", "debugfs", "/sys/kernel/debug"], check=False, capture_output=True)
    if not os.path.isdir(FAILSLAB) or not os.path.exists("/proc/self/make-it-fail"):
        ktap.skip_all("the kernel has no CONFIG_FAILSLAB")
    values = {"task-filter": "Y", "ignore-gfp-wait": "N", "probability": 100, "interval": 1, "verbose": 0}
    for name, value in values.items():
        setting(name, value)
    return Failing()


FAILING = prepared()


def message(pair, number, times):
    """Posts a SEND and a fetch-and-add to a device that sleeps while the kernel has no memory."""
    source, counter = pair.source, pair.counter
    source.write(number.to_bytes(8, "little"), 8)
    time.sleep(IDLE)
    with FAILING(times):
        pair.a.post_send(e.IBV_WR_SEND_WITH_IMM, [sge(source)], wr_id=number, imm=number)
        pair.a.post_send(e.IBV_WR_ATOMIC_FETCH_AND_ADD, [sge(pair.result)], wr_id=number,
                         remote=remote(counter), atomic=(1, 0))


def check(pair, number):
    """Fails the test unless the SEND and the fetch-and-add were carried out once."""
    sent = complete(pair.a.send_cq, 2)
    ktap.equal([wc.wr_id for wc in sent], [number] * 2, "wr_ids")
    ktap.equal(pair.result.read(8, 0), number.to_bytes(8, "little"), "the counter before")
    received = complete(pair.b.recv_cq)[0]
    ktap.equal((received.wr_id, received.imm_data), (number, number), "wr_id and immediate data")
    ktap.equal(pair.target.read(8, 0), number.to_bytes(8, "little"), "data")
    empty(pair.a.send_cq)
    empty(pair.b.recv_cq)


def connected(**options):
    pair = Pair(DEVICE, depth=2 * MESSAGES, **options)
    pair.source, pair.result = pair.a.memory(8), pair.a.memory(8)
    pair.target, pair.counter = pair.b.memory(8), pair.b.memory(8, data=bytes(8))
    for number in range(MESSAGES):
        pair.b.post_recv([sge(pair.target)], number)
    return pair


def some_fail(rng):
    """The library rings until it is heard: the program sleeps meanwhile and is woken."""
    before = FAILING.failed
    with connected(channel=True) as pair:
        for number in range(MESSAGES):
            pair.a.send_cq.req_notify()
            message(pair, number, rng.choice((1, 2, TRIES - 1)))
            pair.a.channel.get_cq_event(pair.a.send_cq)
            pair.a.send_cq.ack_events(1)
            check(pair, number)
    print(f"# {FAILING.failed - before} allocations failed")
    ktap.equal(FAILING.failed > before, True, "allocations failed")


def all_fail(_rng):
    """Posting succeeds, because the device may take what is in the ring; polling rings again."""
    before = FAILING.failed
    with connected() as pair:
        for number in range(MESSAGES):
            message(pair, number, ALL)
            check(pair, number)
    print(f"# {FAILING.failed - before} allocations failed")
    ktap.equal(FAILING.failed - before >= TRIES, True, "as many failed as the library rings in a row")


try:
    ktap.run([some_fail, all_fail])
finally:
    setting("probability", 0)
    FAILING.close()
