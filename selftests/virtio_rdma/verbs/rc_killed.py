#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Programs that are killed in the midst of their traffic, two at a time that are
connected to each other: nothing of them stays, and the device goes on. One whose
peer is killed is told.

KILLS in the environment is how many are killed in all.
"""

import mmap
import multiprocessing
import os
import random
import signal
import time
import traceback

import ktap
import rc
from rc import e, remote, send_wr, sge
from pyverbs.cq import CQ
from pyverbs.pd import PD
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr

KILLS = int(os.environ.get("KILLS", "0")) or max(4, int(os.environ.get("ROUNDS", "200")) // 2)
QPS = 3
RECEIVES = 16
SIZE = 4 * mmap.PAGESIZE
KINDS = (e.IBV_WR_RDMA_WRITE, e.IBV_WR_RDMA_READ, e.IBV_WR_SEND)
# Seconds from the first round of traffic to a kill, at most: many rounds, of some 100 us where a guest is fast.
LONGEST = 0.05
# What TensorPipe asks for: sends of a QP, CQEs of a CQ and receives of an SRQ that all QPs share.
SENDS, CQES, SRQ_RECEIVES = 2048, 3072, 1024
PEER_QPS = 2
# The first wr_id of sends, behind all of receives.
SEND_ID = 1 << 32
ktap.WATCHDOG = max(ktap.WATCHDOG, 6 * KILLS)


class Channel:
    """A QP with what it sends from, receives into and lets the other program write and read."""

    def __init__(self, device, srq, srq_pd):
        self.end = rc.Endpoint(device, max_sge=1, srq=srq)
        self.post = srq.post_recv if srq else self.end.qp.post_recv
        self.source = self.end.memory(SIZE)
        self.exposed = self.end.memory(SIZE)
        self.inbox = self.end.memory(SIZE, pd=srq_pd)
        self.target = None
        self.sends = 0

    def connect(self, number, target):
        """To the other program's channel: the number of its QP, and where it may be written."""
        self.target = target
        self.end.connect(number)
        for _ in range(RECEIVES):
            self.post_recv()

    def post_recv(self):
        """Posts a receive, into memory that the test does not look at."""
        rc.post(self.post, [rc.recv_wr([sge(self.inbox)])])

    def post_round(self, rng):
        """Posts work requests of each kind and of any size, as one list."""
        rc.post(self.end.qp.post_send, [
            send_wr(kind, [sge(self.source, 0, rng.randint(0, SIZE))],
                    remote=None if kind == e.IBV_WR_SEND else self.target)
            for kind in rng.sample(KINDS, len(KINDS))])
        self.sends += len(KINDS)

    def poll(self):
        """Polls completions; returns False if a work request has failed."""
        done = self.end.send_cq.poll(self.sends)[1] if self.sends else []
        came = self.end.recv_cq.poll(RECEIVES)[1]
        self.sends -= len(done)
        if any(wc.status != e.IBV_WC_SUCCESS for wc in done + came):
            return False
        for _ in came:
            self.post_recv()
        return True


class Victim:
    """A program with QPs that write, read and send to those of another, which does the same."""

    def __init__(self, link, rng):
        """`link`: a connection to the other program."""
        self.rng = rng
        device = rc.open_device()
        srq = srq_pd = None
        if device.attr.max_srq:
            srq_pd = PD(device.context)
            srq = SRQ(srq_pd, SrqInitAttr(SrqAttr(max_wr=2 * RECEIVES, max_sge=1)))
        # The first QP has an SRQ if the device has SRQs.
        self.channels = [Channel(device, *(None, None) if number else (srq, srq_pd)) for number in range(QPS)]
        link.send([(channel.end.qp.qp_num, remote(channel.exposed)) for channel in self.channels])
        for channel, (number, target) in zip(self.channels, link.recv()):
            channel.connect(number, target)
        # Both are connected before either sends.
        link.send(None)
        link.recv()

    def round(self):
        """Runs one round; returns False when the other program is gone."""
        for channel in self.channels:
            channel.post_round(self.rng)
        while any(channel.sends for channel in self.channels):
            if not all([channel.poll() for channel in self.channels]):
                return False
        return True


def live(link, ready, rng):
    """Runs a victim until it is killed; it writes to the file `ready` once data flows."""
    try:
        victim = Victim(link, rng)
        if victim.round():
            os.write(ready, b"!")
            while victim.round():
                pass
    except (EOFError, ConnectionError):
        pass  # The other program was killed before it was connected.
    while True:
        signal.pause()


def start(ends, number, rng):
    """Forks a victim that has one of two ends of a connection. Returns its process, and a file that says that it runs,
    or that ends."""
    told, ready = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            ends[not number].close()
            live(ends[number], ready, rng)
        except BaseException:  # pylint: disable=broad-exception-caught
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(ready)
    return pid, told


def kill(pid):
    """Kills a victim that runs, and waits until it is gone with all its objects."""
    os.kill(pid, signal.SIGKILL)
    ktap.equal(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), -signal.SIGKILL, "how a program ended")


def killed(rng):
    """Two programs after two others, killed one after the other; some before they are connected."""
    before = rc.rdma("resource", "show")
    for number in range(KILLS // 2):
        ends = multiprocessing.Pipe()
        victims = [start(ends, index, random.Random(rng.random())) for index in range(2)]
        for end in ends:
            end.close()
        for pid, told in victims:
            if number % 4:
                os.read(told, 1)
            os.close(told)
        for pid, _ in rng.sample(victims, 2):
            time.sleep(rng.uniform(0, LONGEST))
            kill(pid)
        ktap.equal(rc.rdma("resource", "show"), before, f"objects after {2 * number + 2} kills")


class Peer:
    """A program whose QPs share a CQ and, if there are SRQs, receives without memory, as those of TensorPipe do."""

    def __init__(self, link):
        """`link`: a connection to the other program."""
        self.device = device = rc.open_device()
        self.cqes = min(CQES, device.attr.max_cqe)
        self.cq, self.pd, self.srq = CQ(device.context, self.cqes), PD(device.context), None
        if device.attr.max_srq:
            self.srq = SRQ(self.pd, SrqInitAttr(SrqAttr(max_wr=SRQ_RECEIVES, max_sge=0)))
            ktap.equal(self.srq.query().max_wr, SRQ_RECEIVES, "max_wr")
        self.depth = min(SENDS, device.attr.max_qp_wr)
        self.ends = [rc.Endpoint(device, depth=self.depth, max_sge=1, cq=self.cq, srq=self.srq)
                     for _ in range(PEER_QPS)]
        link.send([end.qp.qp_num for end in self.ends])
        for end, number in zip(self.ends, link.recv()):
            end.connect(number)
            for wr_id in range(0 if self.srq else RECEIVES):
                end.post_recv([], wr_id)
        for wr_id in range(SRQ_RECEIVES if self.srq else 0):
            rc.post(self.srq.post_recv, [rc.recv_wr([], wr_id)])
        # Both are connected before either sends.
        link.send(None)
        link.recv()

    def close(self):
        """Destroys everything."""
        for thing in (*self.ends, self.srq, self.pd, self.cq, self.device.context):
            if thing:
                thing.close()


def wait_for_death(link):
    """Runs a peer that does nothing more until it is killed."""
    try:
        _peer = Peer(link)
        while True:
            signal.pause()
    except BaseException:  # pylint: disable=broad-exception-caught
        traceback.print_exc()
    finally:
        os._exit(1)


def survives(_rng):
    """A program whose peer is killed learns from completions which work requests of which QP have failed, and why. What
    a failed completion says of its opcode has no meaning."""
    ours, theirs = multiprocessing.Pipe()
    pid = os.fork()
    if not pid:
        ours.close()
        wait_for_death(theirs)
    theirs.close()
    peer = Peer(ours)
    for end in peer.ends:
        end.post_send(e.IBV_WR_SEND, [])
    rc.complete(peer.cq, PEER_QPS)
    kill(pid)
    receives = 0 if peer.srq else RECEIVES
    sends = min(peer.depth, peer.cqes // PEER_QPS - receives)
    for end in peer.ends:
        rc.post(end.qp.post_send, [send_wr(e.IBV_WR_SEND, [], SEND_ID + number) for number in range(sends)])
    found = {end.qp.qp_num: [] for end in peer.ends}
    for wc in rc.poll(peer.cq, PEER_QPS * (sends + receives)):
        found[wc.qp_num].append((wc.wr_id, rc.status_name(wc.status)))
    for number, completions in found.items():
        ktap.equal([wc for wc in completions if wc[0] >= SEND_ID],
                   [(SEND_ID, "RETRY_EXC_ERR"), *((SEND_ID + n, "WR_FLUSH_ERR") for n in range(1, sends))],
                   f"sends of QP {number:#x}")
        ktap.equal([wc for wc in completions if wc[0] < SEND_ID], [(n, "WR_FLUSH_ERR") for n in range(receives)],
                   f"receives of QP {number:#x}")
    rc.empty(peer.cq)
    peer.close()


def goes_on(_rng):
    """The device serves programs that start later."""
    with rc.Pair(rc.open_device()) as pair:
        source, target = pair.a.memory(8, data=b"goes on!"), pair.b.memory(8)
        pair.a.post_send(e.IBV_WR_RDMA_WRITE, [sge(source)], remote=remote(target))
        rc.complete(pair.a.send_cq)
        ktap.same_bytes(target.read(8, 0), b"goes on!", "written")


if __name__ == "__main__":
    # The victims open the device themselves.
    rc.open_device().context.close()
    ktap.run([killed, survives, goes_on])
