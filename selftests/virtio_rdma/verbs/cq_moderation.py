#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""CQ moderation: completion events are held back, and each of them comes."""

import ctypes
import errno
import select
import struct
import subprocess
import time

import ktap
from rc import SIGNALED, Pair, PyverbsRDMAError, complete, e, fails_with, open_device, pointer, poll, remote, sge

DEVICE = open_device()
MODERATE = 1
# For how many microseconds an event is held back at most.
LONGEST = 65535
# Bounds a wait for an event that never comes; nothing is measured.
NEVER_MS = 60000


class Attr(ctypes.Structure):
    """struct ibv_modify_cq_attr"""

    _fields_ = [("mask", ctypes.c_uint32), ("count", ctypes.c_uint16), ("period", ctypes.c_uint16)]


def modify_cq(cq, count, period, mask=MODERATE):
    """Calls ibv_modify_cq(). pyverbs does not have it, and the library has no symbol for it: it is in the table in
    front of struct ibv_context, at a place that does not change."""
    # struct ibv_cq: context, channel, cq_context, handle, cqe.
    address = pointer(cq, 32, lambda raw: struct.unpack("3QIi", raw)[-1] == cq.cqe)
    context = ctypes.c_uint64.from_address(address).value
    verb = ctypes.c_uint64.from_address(context - 23 * 8).value
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Attr))(verb)
    number = call(address, Attr(mask, count, period))
    if number:
        raise PyverbsRDMAError("ibv_modify_cq", number)


def is_supported():
    """Returns whether the device can moderate CQs, as ibv_devinfo shows it."""
    text = subprocess.run(["ibv_devinfo", "-v", "-d", DEVICE.name], check=True, stdout=subprocess.PIPE, text=True)
    lines = [line.split() for line in text.stdout.splitlines()]
    limits = [line[1] for line in lines if line and line[0] in ("max_cq_count:", "max_cq_period:")]
    ktap.equal(limits in ([], ["65535", "65535"]), True, f"limits: {limits}")
    return bool(limits)


class Moderated:
    """A pair whose side `b` gets messages and sleeps until an event comes."""

    def __init__(self, count, period):
        self.pair = Pair(DEVICE, channel=True)
        self.end = self.pair.b
        self.source, self.target = self.pair.a.memory(4096), self.end.memory(4096)
        self.sent = 0
        modify_cq(self.end.recv_cq, count, period)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.end.recv_cq.ack_events(self.events)
        self.pair.__exit__(*error)

    events = 0

    def send(self, count):
        """Sends messages, with their numbers as data."""
        for _ in range(count):
            self.source.write(struct.pack("Q", self.sent), 8)
            self.end.post_recv([sge(self.target, self.sent % 512 * 8, 8)], wr_id=self.sent)
            self.pair.a.post_send(e.IBV_WR_SEND, [sge(self.source, 0, 8)])
            complete(self.pair.a.send_cq)
            self.sent += 1

    def event(self):
        """Waits for an event."""
        poller = select.poll()
        poller.register(self.end.channel_fd, select.POLLIN)
        if not poller.poll(NEVER_MS):
            raise AssertionError("no event")
        self.end.channel.get_cq_event(self.end.recv_cq)
        self.events += 1

    def receive(self, first, count):
        """Takes messages that are there."""
        for number, wc in enumerate(complete(self.end.recv_cq, count), first):
            data = struct.unpack("Q", self.target.read(8, number % 512 * 8))[0]
            ktap.equal((wc.wr_id, data), (number, number), "message")


def what_there_is_not(_rng):
    """Attributes that no CQ has are refused, and moderation if the device does not know it."""
    with Pair(DEVICE) as pair:
        cq = pair.a.send_cq
        fails_with(errno.EINVAL, modify_cq, cq, 1, 1, 0)
        fails_with(errno.EINVAL, modify_cq, cq, 1, 1, 2)
        if not SUPPORTED:
            fails_with(errno.EOPNOTSUPP, modify_cq, cq, 1, 1)
            return
        for count, period in ((0, 0), (0, 1), (1, 0), (65535, 65535), (1, 1)):
            modify_cq(cq, count, period)


def event_after_the_period(_rng):
    """The event of a single message comes, and not before its time; the completion is there at once."""
    with Moderated(65535, LONGEST) as moderated:
        for number in range(3):
            moderated.end.recv_cq.req_notify()
            begin = time.monotonic_ns()
            moderated.send(1)
            moderated.receive(number, 1)
            moderated.event()
            # The bound is half of that time, because the clocks of guest and host may differ.
            ktap.equal((time.monotonic_ns() - begin) // 1000 >= LONGEST // 2, True, "held back")


def event_after_so_many(_rng):
    """The event comes with the last of the messages that the CQ counts."""
    with Moderated(5, LONGEST) as moderated:
        for number in range(0, 500, 5):
            moderated.end.recv_cq.req_notify()
            moderated.send(5)
            moderated.event()
            moderated.receive(number, 5)


def solicited_event(_rng):
    """An event for a solicited completion is held back, and comes."""
    with Moderated(3, 100) as moderated:
        moderated.end.recv_cq.req_notify(solicited_only=True)
        moderated.send(4)
        moderated.end.post_recv([])
        moderated.pair.a.post_send(e.IBV_WR_SEND, [], flags=SIGNALED | e.IBV_SEND_SOLICITED)
        moderated.event()
        moderated.receive(0, 4)
        complete(moderated.end.recv_cq)


def end_of_it(_rng):
    """Without moderation, the event that was held back comes, and later ones at once."""
    with Moderated(65535, LONGEST) as moderated:
        for number in range(100):
            moderated.end.recv_cq.req_notify()
            moderated.send(1)
            modify_cq(moderated.end.recv_cq, 0, 0)
            moderated.event()
            moderated.end.recv_cq.req_notify()
            moderated.send(1)
            moderated.event()
            moderated.receive(2 * number, 2)
            modify_cq(moderated.end.recv_cq, 65535, LONGEST)


def nothing_is_lost(rng):
    """Bursts of messages to a program that sleeps whenever its CQ is empty, while the limits and the size of the
    CQ change."""
    with Moderated(8, 200) as moderated:
        taken = 0
        while taken < 2000:
            moderated.end.recv_cq.req_notify()
            moderated.send(rng.randint(1, 40))
            if rng.random() < 0.1:
                modify_cq(moderated.end.recv_cq, rng.randint(0, 20), rng.randint(0, 1000))
            if rng.random() < 0.05:
                moderated.end.recv_cq.resize(rng.randint(64, 300))
            moderated.event()
            moderated.receive(taken, moderated.sent - taken)
            taken = moderated.sent


def destroyed_meanwhile(_rng):
    """A CQ is destroyed while its event is held back; the next CQ may have its number."""
    for _ in range(20):
        with Moderated(65535, LONGEST) as moderated:
            moderated.end.recv_cq.req_notify()
            moderated.send(1)
    with Pair(DEVICE) as pair:
        here, there = pair.a.memory(8), pair.b.memory(8)
        pair.a.post_send(e.IBV_WR_RDMA_WRITE, [sge(here)], remote=remote(there))
        ktap.equal(len(poll(pair.a.send_cq, 1)), 1, "completions")


SUPPORTED = is_supported()
ktap.run([what_there_is_not] + ([event_after_the_period, event_after_so_many, solicited_event, end_of_it,
                                 nothing_is_lost, destroyed_meanwhile] if SUPPORTED else []))
