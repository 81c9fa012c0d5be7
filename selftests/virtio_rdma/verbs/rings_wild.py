# SPDX-License-Identifier: GPL-2.0
"""A program that abuses its own rings: rings_hostile.py runs it.

Its argument is JSON: what to do (a name of WAYS), seed, rounds, the device,
its GID, and what a victim has told of itself. It ends with status 0 when it
is through, whatever became of its QPs.
"""

import errno
import json
import mmap
import os
import random
import struct
import sys
import time

import uverbs
from uverbs import (ALL_ACCESS, ERR, MW_BIND, POST_RECV, POST_SEND, POST_SRQ_RECV, QPT_XRC_INI, QPT_XRC_TGT, RESET,
                    STATE, address, zeros)

# Sizes of the rings: depth, stride and offset of each, as the driver is told.
SQ, RQ, REGION = (16, 128, 256), (16, 128, 2304), 8192
SRQ, NO_RQ = (16, 128, 256), (0, 0, 0)
CQ_HEAD, CQE, CQ_DEPTH = 128, 64, 64
SGES, INLINE, MEMORY = 4, 64, 65536
# Of struct virtio_rdma_qp_ring, struct virtio_rdma_srq_ring and struct virtio_rdma_cq_ring.
SQ_PRODUCER, RQ_PRODUCER, SQ_WAKE, RQ_WAKE = 0, 64, 128, 132
SRQ_PRODUCER, SRQ_CONSUMER, SRQ_WAKE = 0, 64, 128
CONSUMER, CLOSED, ARM_NEXT, ARM_SOLICITED = 0, 4, 8, 12
WRITE, WRITE_IMM, SEND, SEND_IMM, READ, SWAP, ADD = range(7)
LOCAL_INV, BIND_MW, SEND_INV, FLUSH, ATOMIC_WRITE, REG_MR = 7, 8, 9, 14, 15, 32
SIGNALED, INLINED = 2, 8
# Of enum ib_access_flags, what a window may have.
WINDOW_ACCESS, ZERO_BASED = ALL_ACCESS | MW_BIND | 1 << 20, 1 << 5
# Of enum ib_wc_status.
SUCCESS, QP_OP_ERR, MW_BIND_ERR, REM_INV_REQ_ERR, REM_ACCESS_ERR, RETRY_EXC_ERR = 0, 2, 6, 9, 10, 12


def ordered(memory, at, value):
    """Writes a word of a head."""
    struct.pack_into("<I", memory, at, value & 0xffffffff)


class Qp:
    """An RC QP on rings of this program, which may receive from an SRQ."""

    def __init__(self, program, srq=None):
        self.program = program
        self.memory = zeros(REGION)
        rq = RQ if srq is None else NO_RQ
        request = struct.pack("QQ6I", address(self.memory), REGION, *SQ, *rq)
        self.handle, self.number, _ = program.verbs.create_qp(
            program.pd, program.cq, request, send_wr=SQ[0], recv_wr=rq[0], sge=SGES, inline=INLINE,
            srq=srq and srq.handle)
        self.sent = self.received = 0

    def connect(self, peer):
        """Brings it to RTS."""
        at = self.program.order
        self.program.verbs.connect(self.handle, bytes.fromhex(at["gid"]), at["gid_index"], peer, at["mtu"])

    def reset(self):
        """Forgets all work, as the specification wants it: RESET, and zeroed heads."""
        self.program.verbs.modify_qp(self.handle, RESET, STATE)
        for at in (SQ_PRODUCER, RQ_PRODUCER, SQ_WAKE, RQ_WAKE):
            ordered(self.memory, at, 0)
        self.sent = self.received = 0

    def ring(self):
        """Both doorbells."""
        for command in (POST_SEND, POST_RECV):
            try:
                self.program.verbs.post(command, self.handle, [])
            except OSError:
                pass  # a QP that is gone, or a device that is

    def entry(self, ring, index):
        """Where an entry is."""
        return ring[2] + index % ring[0] * ring[1]

    def post_send(self, wqe):
        """Puts an entry where the next belongs."""
        at = self.entry(SQ, self.sent)
        self.memory[at:at + len(wqe)] = wqe
        self.sent += 1
        ordered(self.memory, SQ_PRODUCER, self.sent)

    def post_recv(self, wqe):
        """The same of a receive."""
        at = self.entry(RQ, self.received)
        self.memory[at:at + len(wqe)] = wqe
        self.received += 1
        ordered(self.memory, RQ_PRODUCER, self.received)


class Srq:
    """An SRQ on a ring of this program."""

    def __init__(self, program):
        self.program = program
        self.memory = zeros(REGION)
        request = struct.pack("QQ4I", address(self.memory), REGION, *SRQ, 0)
        self.handle, _ = program.verbs.create_srq(program.pd, SRQ[0], SGES, request)
        self.posted = 0

    def post(self, wqe):
        """Puts an entry where the next belongs."""
        at = SRQ[2] + self.posted % SRQ[0] * SRQ[1]
        self.memory[at:at + len(wqe)] = wqe
        self.posted += 1
        ordered(self.memory, SRQ_PRODUCER, self.posted)

    def ring(self):
        """Its doorbell."""
        self.program.verbs.post(POST_SRQ_RECV, self.handle, [])

    def resize(self, depth):
        """Another ring for what waits, if the device can make sense of that."""
        memory = zeros(SRQ[2] + depth * SRQ[1])
        request = struct.pack("QQ4I", address(memory), len(memory), depth, *SRQ[1:], 0)
        try:
            self.program.verbs.resize_srq(self.handle, depth, request)
        except OSError:
            return  # it is in error, or what waits does not fit
        self.memory = memory


class Extended:
    """A domain of its own with an SRQ, and a connection of XRC."""

    def __init__(self, program):
        self.program, verbs, at = program, program.verbs, program.order
        self.domain = verbs.open_xrcd()
        self.srq_memory, self.memory = zeros(REGION), zeros(REGION)
        request = struct.pack("QQ4I", address(self.srq_memory), REGION, *SRQ, 0)
        self.srq, self.srqn = verbs.create_xsrq(program.pd, self.domain, program.cq, SRQ[0], SGES, request)
        self.target, number, _ = verbs.create_qp(self.domain, 0, b"", type=QPT_XRC_TGT)
        request = struct.pack("QQ6I", address(self.memory), REGION, *SQ, *NO_RQ)
        self.initiator, own, _ = verbs.create_qp(program.pd, program.cq, request, type=QPT_XRC_INI, send_wr=SQ[0],
                                                 recv_wr=0, sge=SGES, inline=INLINE)
        for qp, peer, kind in ((self.initiator, number, QPT_XRC_INI), (self.target, own, QPT_XRC_TGT)):
            verbs.connect(qp, bytes.fromhex(at["gid"]), at["gid_index"], peer, at["mtu"], kind)

    def send(self, wqe, srqn):
        """Posts a request of an RC QP as one for an SRQ; it is the only one."""
        wqe = wqe[:48] + struct.pack("<I12x", srqn) + wqe[48:112]
        self.memory[SQ[2]:SQ[2] + len(wqe)] = wqe
        ordered(self.memory, SQ_PRODUCER, 1)
        self.program.verbs.post(POST_SEND, self.initiator, [])

    def close_domain(self):
        """The errno with which the domain stays, or None."""
        try:
            self.program.verbs.close_xrcd(self.domain)
        except OSError as error:
            return error.errno
        return None

    def close(self, *, srq=True):
        """Ends everything, the SRQ too if it is still there."""
        self.program.verbs.destroy_qp(self.initiator)
        self.program.verbs.destroy_qp(self.target)
        if srq:
            self.program.verbs.destroy_srq(self.srq)
        if self.close_domain() is not None:
            sys.exit("a domain of which nothing is left stays")


class Program:
    """An open device, a region of memory, a CQ and two QPs that talk to each other."""

    def __init__(self, order):
        self.order = order
        self.rng = random.Random(order["seed"])
        self.verbs = uverbs.Uverbs(order["device"])
        self.pd = self.verbs.alloc_pd()
        self.data = zeros(MEMORY)
        self.lkey, self.rkey = self.verbs.reg_mr(self.pd, address(self.data), MEMORY)
        self.qps = []
        self.renew(CQ_DEPTH)

    def share(self):
        """Other QPs, which receive from an SRQ."""
        self.destroy()
        srq = Srq(self)
        self.qps = [Qp(self, srq), Qp(self, srq)]
        self.connect()
        return srq

    def destroy(self):
        """Destroys its QPs."""
        for qp in self.qps:
            self.verbs.destroy_qp(qp.handle)
        self.qps = []

    @staticmethod
    def cq_request(memory):
        return struct.pack("QQ", address(memory), len(memory))

    def connect(self):
        for qp, peer in zip(self.qps, self.qps[::-1]):
            qp.connect(peer.number)

    def renew(self, depth):
        """Another CQ, and other QPs."""
        self.destroy()
        self.cq_memory = zeros(CQ_HEAD + depth * CQE)
        self.cq, _ = self.verbs.create_cq(depth, self.cq_request(self.cq_memory))
        self.qps = [Qp(self), Qp(self)]
        self.connect()

    def again(self):
        """Everything as at the beginning."""
        try:
            for qp in self.qps:
                qp.reset()
            self.connect()
        except OSError as error:
            # The CQ has overflowed, and took its QPs along.
            if error.errno != errno.EPROTO:
                raise
            self.renew(CQ_DEPTH)

    def rounds(self):
        return range(self.order["rounds"])

    def consume(self):
        """Says that all completions were taken; how many there were is not looked at."""
        ordered(self.cq_memory, CONSUMER, self.rng.getrandbits(32))

    def completion(self, index):
        """Waits for the CQE with this index; its status."""
        at = CQ_HEAD + index % CQ_DEPTH * CQE
        while struct.unpack_from("<I", self.cq_memory, at + 60)[0] != index // CQ_DEPTH + 1:
            time.sleep(0)
        return self.cq_memory[at + 8]

    def spray(self, memory, longest=256):
        """Random bytes at a random place."""
        length = self.rng.randint(1, min(longest, len(memory)))
        at = self.rng.randrange(len(memory) - length + 1)
        memory[at:at + length] = self.rng.randbytes(length)

    # ---- requests

    def sge(self):
        """One that is right."""
        length = self.rng.choice((0, 1, 8, 100, 4096))
        return struct.pack("<QII", address(self.data) + self.rng.randrange(MEMORY - length), length, self.lkey)

    def bad_sge(self):
        """One that is not: the victim's key, a key at random, or a place outside."""
        rng, victim = self.rng, self.order["victim"]
        lkey = rng.choice((self.lkey, victim["lkey"], victim["rkey"], rng.getrandbits(32)))
        place = rng.choice((victim["address"], victim["canary"], address(self.data) + MEMORY - 4,
                            rng.getrandbits(64), (1 << 64) - 8))
        return struct.pack("<QII", place, rng.choice((1, 64, 1 << 31, 0xffffffff)), lkey)

    def wqe(self, opcode=None, flags=SIGNALED, sges=None, count=None, inline=0, remote=None):
        """A send request, as right as its arguments."""
        rng = self.rng
        opcode = rng.choice((WRITE, WRITE_IMM, SEND, SEND_IMM, READ, SWAP, ADD)) if opcode is None else opcode
        sges = [self.sge() for _ in range(rng.randint(1, SGES))] if sges is None else sges
        if opcode in (SWAP, ADD) and count is None and not flags & INLINED:
            sges = [struct.pack("<QII", address(self.data), 8, self.lkey)]
        place, key = remote or (address(self.data) + 8 * rng.randrange(1000), self.rkey)
        head = struct.pack("<QBBHIHHIQQQ", rng.getrandbits(64), opcode, len(sges) if count is None else count,
                           flags, rng.getrandbits(32), inline, 0, key, place, rng.getrandbits(64),
                           rng.getrandbits(64))
        return (head + b"".join(sges))[:SQ[1]]

    def receive(self, sges=None, count=None):
        """A receive request."""
        sges = [self.sge() for _ in range(SGES)] if sges is None else sges
        count = len(sges) if count is None else count
        return (struct.pack("<IIQ", count, 0, self.rng.getrandbits(64)) + b"".join(sges))[:RQ[1]]

    def spoiled(self):
        """A send request with one thing wrong."""
        rng, victim = self.rng, self.order["victim"]
        there = rng.choice((victim["address"], victim["canary"], rng.getrandbits(64)))
        key = rng.choice((victim["rkey"], victim["lkey"], self.rkey, rng.getrandbits(32)))
        return rng.choice((
            lambda: self.wqe(opcode=rng.randrange(7, 256)),
            lambda: self.wqe(flags=rng.getrandbits(16)),
            lambda: self.wqe(count=rng.randrange(SGES + 1, 256)),
            lambda: self.wqe(sges=[self.bad_sge() for _ in range(rng.randint(1, SGES))]),
            lambda: self.wqe(flags=SIGNALED | INLINED, sges=[], count=0, inline=rng.randrange(INLINE + 1, 65536)),
            lambda: self.wqe(flags=SIGNALED | INLINED),
            lambda: self.wqe(opcode=rng.choice((WRITE, READ, SWAP, ADD)), remote=(there, key)),
            lambda: self.wqe(opcode=ADD, remote=(address(self.data) + rng.randrange(1, 8), self.rkey)),
            lambda: rng.randbytes(SQ[1]),
        ))()


# ---- ways of abuse

def qp_bytes(program):
    """Random bytes all over the regions of its QPs."""
    for number in program.rounds():
        for qp in program.qps:
            for _ in range(program.rng.randint(1, 8)):
                program.spray(qp.memory, REGION)
            qp.ring()
        if number % 8 == 7:
            program.consume()
            program.again()


def cq_bytes(program):
    """The same over its CQ, with work that completes there."""
    for number in program.rounds():
        for _ in range(program.rng.randint(1, 4)):
            program.spray(program.cq_memory, len(program.cq_memory))
        work(program)
        if number % 8 == 7:
            program.again()


def work(program):
    """A few requests, right but for what the CQ makes of them."""
    for qp in program.qps:
        for _ in range(4):
            qp.post_recv(program.receive())
            qp.post_send(program.wqe())
        qp.ring()


def indices(program):
    """Producers and consumers that jump: far ahead, back, and around."""
    steps = (1, 15, 16, 17, 31, 1 << 16, 1 << 31, -1, -16, -(1 << 20))
    for number in program.rounds():
        qp = program.rng.choice(program.qps)
        work(program)
        for at in program.rng.sample((SQ_PRODUCER, RQ_PRODUCER), program.rng.randint(1, 2)):
            before, = struct.unpack_from("<I", qp.memory, at)
            ordered(qp.memory, at, before + program.rng.choice(steps))
        program.consume()
        qp.ring()
        if number % 4 == 3:
            program.again()


def requests(program):
    """Requests with one thing wrong, and right ones behind them."""
    for number in program.rounds():
        for qp in program.qps:
            qp.post_recv(program.receive() if number % 2 else
                         program.receive([program.bad_sge()], program.rng.choice((1, 5, 1 << 16))))
            qp.post_send(program.spoiled())
            qp.post_send(program.wqe())
            qp.ring()
        program.consume()
        program.again()


def moving(program):
    """Bytes that change while the device reads them."""
    child = os.fork()
    if not child:
        memories = [qp.memory for qp in program.qps] + [program.cq_memory]
        while os.getppid() == program.order["pid"]:
            for _ in range(256):
                program.spray(program.rng.choice(memories), 128)
        os._exit(0)
    for number in program.rounds():
        work(program)
        if number % 16 == 15:
            program.again()
    os.kill(child, 9)
    os.waitpid(child, 0)


def states(program):
    """Doorbells and work in each state, and for a QP that is no more."""
    for _ in program.rounds():
        state = program.rng.choice((RESET, ERR))
        for qp in program.qps:
            program.verbs.modify_qp(qp.handle, state, STATE)
            qp.ring()
        work(program)
        if program.rng.random() < 0.2:
            gone = program.qps.pop(0)
            program.verbs.destroy_qp(gone.handle)
            gone.ring()
            program.qps.append(Qp(program))
        program.consume()
        program.again()


def overflow(program):
    """A CQ whose program takes nothing; then its QPs fail, and nobody else's."""
    for _ in range(max(2, program.order["rounds"] // 40)):
        for _ in range(2 * CQ_DEPTH // 16 + 2):
            work(program)
        program.renew(4)


def memory_goes(program):
    """The program gives its rings' and its data's pages back while the device uses them."""
    for number in program.rounds():
        work(program)
        if number % 8 == 0:
            for memory in [qp.memory for qp in program.qps] + [program.cq_memory, program.data]:
                memory.madvise(mmap.MADV_REMOVE if number % 16 else mmap.MADV_DONTNEED)
            program.again()


def resizes(program):
    """CQs that are resized while their bytes are random."""
    for number in program.rounds():
        work(program)
        program.spray(program.cq_memory, len(program.cq_memory))
        depth = program.rng.choice((1, 4, 64, 256))
        memory = zeros(CQ_HEAD + depth * CQE)
        try:
            program.verbs.resize_cq(program.cq, depth, program.cq_request(memory))
            program.cq_memory = memory
        except OSError:
            pass  # what it holds does not fit, or it is in error
        if number % 8 == 7:
            program.again()


def keys(program):
    """Registrations, which are the kernel's, and invalidations of keys that are not for that."""
    rng, victim = program.rng, program.order["victim"]
    expected = {REG_MR: [QP_OP_ERR], LOCAL_INV: [MW_BIND_ERR], SEND_INV: [REM_INV_REQ_ERR, RETRY_EXC_ERR]}
    taken = 0
    for _ in program.rounds():
        qp, peer = program.qps
        what = rng.choice(tuple(expected))
        key = rng.choice((program.rkey, victim["rkey"], victim["lkey"], rng.getrandbits(32)))
        # A page of the guest's, and a list of pages in another.
        place, pages = (rng.randrange(1 << 12) << 12 for _ in range(2))
        fields = (15, 1, 0, key) if what == REG_MR else (key, 0, 0, 0)
        peer.post_recv(program.receive())
        qp.post_send(struct.pack("<QBBHIHHIQQQ", 1, what, 0, SIGNALED, *fields, place, pages, 4096))
        qp.ring()
        statuses = [program.completion(taken + i) for i in range(len(expected[what]))]
        if statuses != expected[what]:
            sys.exit(f"opcode {what} with key {key:#x} ended in {statuses}")
        taken += len(statuses)
        ordered(program.cq_memory, CONSUMER, taken)
        program.again()


def windows(program):
    """Windows of its own that it binds to anything, and uses for anything."""
    rng, victim, verbs = program.rng, program.order["victim"], program.verbs
    begin = address(program.data)
    lkey, _ = verbs.reg_mr(program.pd, begin, MEMORY, ALL_ACCESS | MW_BIND)
    own = {kind: verbs.alloc_mw(program.pd, kind) for kind in (1, 2)}
    taken = 0
    for _ in program.rounds():
        qp, peer = program.qps
        kind = rng.choice((1, 2))
        handle, window = own[kind]
        key = rng.choice((window, window, window, victim["rkey"], victim["lkey"], program.rkey, rng.getrandbits(32)))
        new = key & ~0xff | rng.getrandbits(8) if rng.random() < 0.9 else rng.getrandbits(32)
        access = rng.choice((14, 14, 15, rng.getrandbits(32)))
        region = rng.choice((lkey, lkey, lkey, program.lkey, victim["lkey"], victim["rkey"], window,
                             rng.getrandbits(32)))
        place = rng.choice((begin, begin, begin + MEMORY - 4, victim["address"], victim["canary"],
                            rng.getrandbits(64)))
        length = rng.choice((8, 8, 8, 4096, 0, 1 << 63, (1 << 64) - 1))
        within = region == lkey and place >= begin and 0 < length <= begin + MEMORY - place
        flags = WINDOW_ACCESS | (ZERO_BASED if kind == 2 else 0)
        right = key == window and not access & ~flags and (within or length == 0 and kind == 1)
        qp.post_send(struct.pack("<QBBHIIIQQII", 1, BIND_MW, 0, SIGNALED, access, key, new, place, length, region, 0))
        qp.ring()
        status = program.completion(taken)
        if status != (SUCCESS if right else MW_BIND_ERR):
            what = " ".join(map(hex, (key, new, access, region, place, length)))
            sys.exit(f"type {kind}: {'right' if right else 'wrong'}, status {status}: {what}")
        taken += 1
        if right:
            # By its peer, which names the victim's memory with the window's key.
            there = rng.choice((victim["address"], victim["canary"], begin + MEMORY, place + length))
            bound = key & ~0xff | new & 0xff
            peer.post_send(program.wqe(opcode=rng.choice((WRITE, READ)), remote=(there, bound),
                                       sges=[struct.pack("<QII", begin, 64, program.lkey)]))
            peer.ring()
            status = program.completion(taken)
            if status != REM_ACCESS_ERR:
                sys.exit(f"a window let its peer to {there:#x}: {status}")
            taken += 1
        verbs.dealloc_mw(handle)
        own[kind] = verbs.alloc_mw(program.pd, kind)
        ordered(program.cq_memory, CONSUMER, taken)
        program.again()


def other_peer(program):
    """A QP that says it is connected to the victim's, which is connected to another."""
    qp = program.qps[0]
    victim = program.order["victim"]
    for _ in program.rounds():
        qp.reset()
        qp.connect(victim["qpn"])
        for opcode in (WRITE, SEND, READ, ADD):
            qp.post_send(program.wqe(opcode=opcode, remote=(victim["address"], victim["rkey"])))
        qp.ring()
        program.consume()


def shared(program):
    """An SRQ whose bytes, indices and requests are wrong, under messages that take from it."""
    rng = program.rng
    steps = (1, 15, 16, 17, 1 << 16, 1 << 31, -1, -16)
    for _ in range(max(2, program.order["rounds"] // 4)):
        srq = program.share()
        way = rng.randrange(4)
        for _ in range(8):
            for _ in range(rng.randint(1, 8)):
                srq.post(program.receive())
            if way == 0:
                program.spray(srq.memory, REGION)
            elif way == 1:
                at = rng.choice((SRQ_PRODUCER, SRQ_CONSUMER, SRQ_WAKE))
                before, = struct.unpack_from("<I", srq.memory, at)
                ordered(srq.memory, at, before + rng.choice(steps))
            elif way == 2:
                srq.post(program.receive([program.bad_sge()], rng.choice((1, 5, 1 << 16))))
            for qp in program.qps:
                qp.post_send(program.wqe(opcode=rng.choice((SEND, SEND_IMM, WRITE_IMM))))
                qp.ring()
            srq.ring()
            program.consume()
        program.destroy()
        program.verbs.destroy_srq(srq.handle)
        program.renew(CQ_DEPTH)


def resized(program):
    """An SRQ that moves to other rings while its bytes and indices are wrong and messages take from it."""
    rng = program.rng
    for _ in range(max(2, program.order["rounds"] // 4)):
        srq = program.share()
        for _ in range(8):
            for _ in range(rng.randint(1, 8)):
                srq.post(program.receive())
            if rng.random() < 0.3:
                program.spray(srq.memory, len(srq.memory))
            for qp in program.qps:
                qp.post_send(program.wqe(opcode=rng.choice((SEND, SEND_IMM, WRITE_IMM))))
                qp.ring()
            srq.ring()
            srq.resize(rng.choice((1, 4, 16, 16, 256)))
            program.consume()
        program.destroy()
        program.verbs.destroy_srq(srq.handle)
        program.renew(CQ_DEPTH)


def extended(program):
    """Messages for SRQs of others and for none; an SRQ that goes while one is under way; a domain in use."""
    rng, victim = program.rng, program.order["victim"]
    if victim["srqn"] is None:
        return
    taken = 0
    for number in program.rounds():
        connection = Extended(program)
        goes = number % 4 == 3
        others = (victim["srqn"], victim["srqn"], 0, connection.srqn + 1, rng.getrandbits(32))
        # Its own SRQ has no receives: the message waits for one.
        srqn = connection.srqn if goes else rng.choice([other for other in others if other != connection.srqn])
        opcode = rng.choice((SEND, SEND_IMM, WRITE_IMM) if goes else (SEND, WRITE, WRITE_IMM, READ, SWAP, ADD))
        connection.send(program.wqe(opcode=opcode), srqn)
        if connection.close_domain() != errno.EBUSY:
            sys.exit("a domain goes that is in use")
        if goes:
            program.verbs.destroy_srq(connection.srq)
        status = program.completion(taken)
        if status != REM_INV_REQ_ERR:
            sys.exit(f"a message for SRQ {srqn:#x}, not {connection.srqn:#x}, ended in {status}")
        taken += 1
        ordered(program.cq_memory, CONSUMER, taken)
        connection.close(srq=not goes)


def memory_operations(program):
    """FLUSH, which nobody here gave the right to, and ATOMIC_WRITE to anything by any key."""
    rng, victim = program.rng, program.order["victim"]
    begin, taken = address(program.data), 0
    for _ in program.rounds():
        qp, _ = program.qps
        key = rng.choice((program.rkey, program.rkey, victim["rkey"], victim["lkey"], rng.getrandbits(32)))
        place = rng.choice((begin, begin + 8, begin + 1, begin + MEMORY, begin + MEMORY - 4, victim["address"],
                            victim["canary"], (1 << 64) - 8, rng.getrandbits(64)))
        if rng.random() < 0.5:
            kind, level = rng.choice((1, 1, 2, 3, 0, 255)), rng.choice((0, 1, 2, 255))
            length = rng.choice((0, 8, MEMORY, (1 << 64) - 1))
            wqe = struct.pack("<QBBHBBHIIQQQ", 1, FLUSH, 0, SIGNALED, kind, level, 0, 0, key, place, length, 0)
            right = False
        else:
            wqe = program.wqe(opcode=ATOMIC_WRITE, sges=[], remote=(place, key))
            right = key == program.rkey and place in (begin, begin + 8)
        qp.post_send(wqe)
        qp.ring()
        status = program.completion(taken)
        if (status == SUCCESS) != right or not right and status not in (QP_OP_ERR, REM_INV_REQ_ERR, REM_ACCESS_ERR):
            sys.exit(f"opcode {wqe[8]} at {place:#x} by {key:#x}: {status}")
        taken += 1
        ordered(program.cq_memory, CONSUMER, taken)
        program.again()


def until_killed(program):
    """Everything at once, for ever."""
    print("running", flush=True)
    while True:
        for qp in program.qps:
            program.spray(qp.memory, REGION)
            program.spray(program.cq_memory)
            qp.ring()
        work(program)
        if program.rng.random() < 0.1:
            program.again()
        time.sleep(0)


WAYS = (qp_bytes, cq_bytes, indices, requests, moving, states, overflow, memory_goes, resizes, keys, windows,
        other_peer, shared, resized, extended, memory_operations, until_killed)


def main():
    order = json.loads(sys.argv[1])
    order["pid"] = os.getpid()
    way = {way.__name__: way for way in WAYS}[order["way"]]
    way(Program(order))


if __name__ == "__main__":
    main()
