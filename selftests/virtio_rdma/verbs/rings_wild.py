# SPDX-License-Identifier: GPL-2.0
"""A program that abuses its own rings, for rings_hostile.py, which runs it.

Its argument is JSON: what to do (a name of WAYS), the seed, the number of rounds, the device, its GID, and what a
victim has told of itself. It ends with status 0 when it has done that, whatever became of its QPs.
"""

import ctypes
import errno
import json
import mmap
import os
import random
import resource
import struct
import sys
import time

import abi
import uverbs
from rings import CQ_HEAD, CQE, HEAD, NO_RING, CqRing, QpRings, SrqRing
from uverbs import ALL_ACCESS, POST_RECV, POST_SEND, POST_SRQ_RECV, address, zeros

# Depth, stride and offset of each ring.
SQ, RQ, REGION = (16, 128, HEAD), (16, 128, HEAD + 16 * 128), 8192
SRQ, CQ_DEPTH = (16, 128, HEAD), 64
SGES, INLINE, MEMORY = 4, 64, 65536
SQ_PRODUCER, RQ_PRODUCER = abi.QpRing.sq_producer.offset, abi.QpRing.rq_producer.offset
WAKES = abi.QpRing.sq_wake.offset, abi.QpRing.rq_wake.offset
CONSUMER = abi.CqRing.consumer.offset
WRITE, WRITE_IMM, READ = abi.WR_RDMA_WRITE, abi.WR_RDMA_WRITE_WITH_IMM, abi.WR_RDMA_READ
SEND, SEND_IMM = abi.WR_SEND, abi.WR_SEND_WITH_IMM
SWAP, ADD = abi.WR_ATOMIC_CMP_AND_SWP, abi.WR_ATOMIC_FETCH_AND_ADD
SIGNALED, INLINED = abi.SEND_SIGNALED, abi.SEND_INLINE
# The access that a window may give.
WINDOW_ACCESS = ALL_ACCESS | abi.ACCESS_MW_BIND | abi.ACCESS_RELAXED_ORDERING
# The pages of a ring that is there to be pinned.
LARGE_RING = 64


def store(memory, at, value):
    """Writes a word of a head."""
    struct.pack_into("<I", memory, at, value & 0xffffffff)


def load(memory, at):
    """Reads a word of a head."""
    return struct.unpack_from("<I", memory, at)[0]


def put(memory, ring, index, wqe):
    """Writes the entry of a ring that an index means."""
    depth, stride, offset = ring
    at = offset + index % depth * stride
    memory[at:at + len(wqe)] = wqe


class Qp:
    """An RC QP on rings of this program, which may receive from an SRQ."""

    def __init__(self, program, srq=None):
        self.program = program
        rings = QpRings(SQ, RQ if srq is None else NO_RING, REGION)
        self.memory = rings.memory
        self.handle, self.number, _ = program.verbs.create_qp(
            program.pd, program.cq, rings.request(), send_wr=SQ[0], recv_wr=rings.rq[0], sge=SGES, inline=INLINE,
            srq=srq and srq.handle)
        self.sent = self.received = 0

    def connect(self, peer):
        """Brings it to RTS."""
        at = self.program.order
        self.program.verbs.connect(self.handle, bytes.fromhex(at["gid"]), at["gid_index"], peer, at["mtu"])

    def reset(self):
        """Forgets all work as the specification wants it: moves the QP to RESET, and zeroes the heads."""
        self.program.verbs.modify_qp(self.handle, abi.QPS_RESET, abi.QP_STATE)
        for at in (SQ_PRODUCER, RQ_PRODUCER, *WAKES):
            store(self.memory, at, 0)
        self.sent = self.received = 0

    def ring(self):
        """Rings both doorbells."""
        for command in (POST_SEND, POST_RECV):
            try:
                self.program.verbs.post(command, self.handle, [])
            except OSError:
                pass  # The QP is gone, or the device.

    def post_send(self, wqe):
        """Posts a send request."""
        put(self.memory, SQ, self.sent, wqe)
        self.sent += 1
        store(self.memory, SQ_PRODUCER, self.sent)

    def post_recv(self, wqe):
        """Posts a receive request."""
        put(self.memory, RQ, self.received, wqe)
        self.received += 1
        store(self.memory, RQ_PRODUCER, self.received)


class Srq:
    """An SRQ on a ring of this program."""

    def __init__(self, program):
        self.program = program
        ring = SrqRing(SRQ, REGION)
        self.memory = ring.memory
        self.handle = program.verbs.create_srq(program.pd, SRQ[0], SGES, ring.request())
        self.posted = 0

    def post(self, wqe):
        """Posts a receive request."""
        put(self.memory, SRQ, self.posted, wqe)
        self.posted += 1
        store(self.memory, abi.SrqRing.producer.offset, self.posted)

    def ring(self):
        """Rings the doorbell."""
        self.program.verbs.post(POST_SRQ_RECV, self.handle, [])

    def resize(self, depth):
        """Moves to another ring, if the device can make sense of what is in this one."""
        ring = SrqRing((depth, *SRQ[1:]), SRQ[2] + depth * SRQ[1])
        try:
            self.program.verbs.resize_srq(self.handle, depth, ring.request())
        except OSError:
            return  # The SRQ is in error, or what waits does not fit.
        self.memory = ring.memory


class Extended:
    """A domain of its own with an SRQ, and a connection of XRC."""

    def __init__(self, program):
        self.program, verbs, at = program, program.verbs, program.order
        self.domain = verbs.open_xrcd()
        self.ring, rings = SrqRing(SRQ, REGION), QpRings(SQ, NO_RING, REGION)
        self.memory = rings.memory
        self.srq, self.srqn = verbs.create_xsrq(program.pd, self.domain, program.cq, SRQ[0], SGES, self.ring.request())
        self.target, number, _ = verbs.create_qp(self.domain, 0, b"", kind=abi.QPT_XRC_TGT)
        self.initiator, own, _ = verbs.create_qp(
            program.pd, program.cq, rings.request(), kind=abi.QPT_XRC_INI, send_wr=SQ[0], recv_wr=0, sge=SGES,
            inline=INLINE)
        for qp, peer, kind in ((self.initiator, number, abi.QPT_XRC_INI), (self.target, own, abi.QPT_XRC_TGT)):
            verbs.connect(qp, bytes.fromhex(at["gid"]), at["gid_index"], peer, at["mtu"], kind)

    def send(self, wqe, srqn):
        """Posts a request of an RC QP as one for an SRQ, the only one of this connection."""
        head = ctypes.sizeof(abi.RingSqWqe)
        request = abi.RingXrcWqe(abi.RingSqWqe.from_buffer_copy(wqe), srqn)
        put(self.memory, SQ, 0, (bytes(request) + wqe[head:])[:SQ[1]])
        store(self.memory, SQ_PRODUCER, 1)
        self.program.verbs.post(POST_SEND, self.initiator, [])

    def close_domain(self):
        """Closes the domain; returns the errno if it stays, and None if it is closed."""
        try:
            self.program.verbs.close_xrcd(self.domain)
        except OSError as error:
            return error.errno
        return None

    def close(self, *, srq=True):
        """Destroys everything; `srq` says whether the SRQ is still there."""
        self.program.verbs.destroy_qp(self.initiator)
        self.program.verbs.destroy_qp(self.target)
        if srq:
            self.program.verbs.destroy_srq(self.srq)
        if self.close_domain() is not None:
            sys.exit("an XRC domain without objects cannot be closed")


class Program:
    """An open device, a region of memory, a CQ and two QPs that talk to each other."""

    def __init__(self, order):
        self.order = order
        self.rng = random.Random(order["seed"])
        self.verbs = uverbs.Uverbs(order["device"])
        self.pd = self.verbs.alloc_pd()
        self.data = zeros(MEMORY)
        _, self.lkey, self.rkey = self.verbs.reg_mr(self.pd, address(self.data), MEMORY)
        self.qps, self.cq = [], None
        self.renew(CQ_DEPTH)

    def share(self):
        """Replaces its QPs by two that receive from an SRQ; returns the SRQ."""
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

    def connect(self):
        """Connects its QPs to each other."""
        for qp, peer in zip(self.qps, self.qps[::-1]):
            qp.connect(peer.number)

    def renew(self, depth):
        """Replaces its CQ and its QPs."""
        self.destroy()
        if self.cq is not None:
            self.verbs.destroy_cq(self.cq)
        ring = CqRing(depth)
        self.cq_memory = ring.memory
        self.cq, _ = self.verbs.create_cq(depth, ring.request())
        self.qps = [Qp(self), Qp(self)]
        self.connect()

    def again(self):
        """Makes everything as it was at the beginning."""
        try:
            for qp in self.qps:
                qp.reset()
            self.connect()
        except OSError as error:
            # The CQ has overflowed, and its QPs are in error.
            if error.errno != errno.EPROTO:
                raise
            self.renew(CQ_DEPTH)

    def rounds(self):
        """Returns the numbers of the rounds."""
        return range(self.order["rounds"])

    def consume(self):
        """Writes any number of CQEs that were taken."""
        store(self.cq_memory, CONSUMER, self.rng.getrandbits(32))

    def completion(self, index):
        """Waits for the CQE with this index; returns its status."""
        at = CQ_HEAD + index % CQ_DEPTH * CQE
        while load(self.cq_memory, at + abi.RingCqe.lap.offset) != index // CQ_DEPTH + 1:
            time.sleep(0)
        return self.cq_memory[at + abi.RingCqe.status.offset]

    def spray(self, memory, longest=256):
        """Writes random bytes at a random place."""
        length = self.rng.randint(1, min(longest, len(memory)))
        at = self.rng.randrange(len(memory) - length + 1)
        memory[at:at + length] = self.rng.randbytes(length)

    # ---- requests

    def sge(self):
        """Returns an SGE that is right."""
        length = self.rng.choice((0, 1, 8, 100, 4096))
        return bytes(abi.Sge(address(self.data) + self.rng.randrange(MEMORY - length), length, self.lkey))

    def bad_sge(self):
        """Returns an SGE that is wrong: with the victim's key, a key at random, or a place outside."""
        rng, victim = self.rng, self.order["victim"]
        lkey = rng.choice((self.lkey, victim["lkey"], victim["rkey"], rng.getrandbits(32)))
        place = rng.choice((victim["address"], victim["canary"], address(self.data) + MEMORY - 4,
                            rng.getrandbits(64), (1 << 64) - 8))
        return bytes(abi.Sge(place, rng.choice((1, 64, 1 << 31, 0xffffffff)), lkey))

    def wqe(self, opcode=None, flags=SIGNALED, sges=None, count=None, inline=0, remote=None):
        """Returns a send request, which is right as far as its arguments are."""
        rng = self.rng
        opcode = rng.choice((WRITE, WRITE_IMM, SEND, SEND_IMM, READ, SWAP, ADD)) if opcode is None else opcode
        sges = [self.sge() for _ in range(rng.randint(1, SGES))] if sges is None else sges
        if opcode in (SWAP, ADD) and count is None and not flags & INLINED:
            sges = [bytes(abi.Sge(address(self.data), 8, self.lkey))]
        place, key = remote or (address(self.data) + 8 * rng.randrange(1000), self.rkey)
        head = abi.RingSqWqe(
            wr_id=rng.getrandbits(64), opcode=opcode, num_sge=len(sges) if count is None else count, send_flags=flags,
            invalidate_rkey=rng.getrandbits(32), inline_len=inline, rkey=key, remote_addr=place,
            compare_add=rng.getrandbits(64), swap=rng.getrandbits(64))
        return (bytes(head) + b"".join(sges))[:SQ[1]]

    def receive(self, sges=None, count=None):
        """Returns a receive request."""
        sges = [self.sge() for _ in range(SGES)] if sges is None else sges
        count = len(sges) if count is None else count
        return (bytes(abi.RqWqe(count, wr_id=self.rng.getrandbits(64))) + b"".join(sges))[:RQ[1]]

    def spoiled(self):
        """Returns a send request with one thing wrong."""
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
    """Random bytes all over the region of its CQ, with work that completes there."""
    for number in program.rounds():
        for _ in range(program.rng.randint(1, 4)):
            program.spray(program.cq_memory, len(program.cq_memory))
        work(program)
        if number % 8 == 7:
            program.again()


def work(program):
    """Posts a few requests that are right."""
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
            store(qp.memory, at, load(qp.memory, at) + program.rng.choice(steps))
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
    """Doorbells and work in each state, and for a QP that was destroyed."""
    for _ in program.rounds():
        state = program.rng.choice((abi.QPS_RESET, abi.QPS_ERR))
        for qp in program.qps:
            program.verbs.modify_qp(qp.handle, state, abi.QP_STATE)
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
    """A CQ of which the program takes nothing: its QPs fail, and no other program's."""
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
        ring = CqRing(depth)
        try:
            program.verbs.resize_cq(program.cq, depth, ring.request())
            program.cq_memory = ring.memory
        except OSError:
            pass  # What the CQ holds does not fit, or the CQ is in error.
        if number % 8 == 7:
            program.again()


def keys(program):
    """Registrations, which only the kernel may ask for, and invalidations of keys that cannot be invalidated."""
    rng, victim = program.rng, program.order["victim"]
    expected = {abi.WR_REG_MR: [abi.WC_LOC_QP_OP_ERR], abi.WR_LOCAL_INV: [abi.WC_MW_BIND_ERR],
                abi.WR_SEND_WITH_INV: [abi.WC_REM_INV_REQ_ERR, abi.WC_RETRY_EXC_ERR]}
    taken = 0
    for _ in program.rounds():
        qp, peer = program.qps
        what = rng.choice(tuple(expected))
        key = rng.choice((program.rkey, victim["rkey"], victim["lkey"], rng.getrandbits(32)))
        # A page of the guest's memory, and a page that lists it.
        place, pages = (rng.randrange(1 << 12) << 12 for _ in range(2))
        head = {"wr_id": 1, "opcode": what, "send_flags": SIGNALED}
        if what == abi.WR_REG_MR:
            wqe = abi.RingRegWqe(**head, access=ALL_ACCESS, npages=1, key=key, iova=place, pages=pages, length=4096)
        else:
            wqe = abi.RingSqWqe(**head, invalidate_rkey=key)
        peer.post_recv(program.receive())
        qp.post_send(bytes(wqe))
        qp.ring()
        statuses = [program.completion(taken + i) for i in range(len(expected[what]))]
        if statuses != expected[what]:
            sys.exit(f"opcode {what} with key {key:#x} ended in {statuses}")
        taken += len(statuses)
        store(program.cq_memory, CONSUMER, taken)
        program.again()


def windows(program):
    """Its own windows, which it binds to any memory and uses for any memory."""
    rng, victim, verbs = program.rng, program.order["victim"], program.verbs
    begin = address(program.data)
    _, lkey, _ = verbs.reg_mr(program.pd, begin, MEMORY, ALL_ACCESS | abi.ACCESS_MW_BIND)
    kinds = abi.MW_TYPE_1, abi.MW_TYPE_2
    own = {kind: verbs.alloc_mw(program.pd, kind) for kind in kinds}
    taken = 0
    for _ in program.rounds():
        qp, peer = program.qps
        kind = rng.choice(kinds)
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
        flags = WINDOW_ACCESS | (abi.ACCESS_ZERO_BASED if kind == abi.MW_TYPE_2 else 0)
        right = key == window and not access & ~flags and (within or length == 0 and kind == abi.MW_TYPE_1)
        qp.post_send(bytes(abi.RingBindWqe(
            wr_id=1, opcode=abi.WR_BIND_MW, send_flags=SIGNALED, access=access, mw_rkey=key, new_rkey=new, addr=place,
            length=length, lkey=region)))
        qp.ring()
        status = program.completion(taken)
        if status != (abi.WC_SUCCESS if right else abi.WC_MW_BIND_ERR):
            what = " ".join(map(hex, (key, new, access, region, place, length)))
            sys.exit(f"type {kind}: {'right' if right else 'wrong'}, status {status}: {what}")
        taken += 1
        if right:
            # The peer of the QP uses the window for memory that is outside of it.
            there = rng.choice((victim["address"], victim["canary"], begin + MEMORY, place + length))
            bound = key & ~0xff | new & 0xff
            peer.post_send(program.wqe(opcode=rng.choice((WRITE, READ)), remote=(there, bound),
                                       sges=[bytes(abi.Sge(begin, 64, program.lkey))]))
            peer.ring()
            status = program.completion(taken)
            if status != abi.WC_REM_ACCESS_ERR:
                sys.exit(f"a window gives access to {there:#x}: status {status}")
            taken += 1
        verbs.dealloc_mw(handle)
        own[kind] = verbs.alloc_mw(program.pd, kind)
        store(program.cq_memory, CONSUMER, taken)
        program.again()


def other_peer(program):
    """A QP that connects to the victim's QP, which is connected to another."""
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
                fields = abi.SrqRing.producer, abi.SrqRing.consumer, abi.SrqRing.wake
                at = rng.choice(fields).offset
                store(srq.memory, at, load(srq.memory, at) + rng.choice(steps))
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
    """Messages for SRQs of others and for numbers without an SRQ, an SRQ that is destroyed while a message waits for
    it, and a domain that is in use."""
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
            sys.exit("an XRC domain that is in use is closed")
        if goes:
            program.verbs.destroy_srq(connection.srq)
        status = program.completion(taken)
        if status != abi.WC_REM_INV_REQ_ERR:
            sys.exit(f"a message for SRQ {srqn:#x}, not {connection.srqn:#x}, ended in {status}")
        taken += 1
        store(program.cq_memory, CONSUMER, taken)
        connection.close(srq=not goes)


def memory_operations(program):
    """FLUSH, for which no MR has the access, and ATOMIC_WRITE to any memory by any key."""
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
            wqe = bytes(abi.RingFlushWqe(wr_id=1, opcode=abi.WR_FLUSH, send_flags=SIGNALED, type=kind, level=level,
                                         rkey=key, remote_addr=place, length=length))
            right = False
        else:
            wqe = program.wqe(opcode=abi.WR_ATOMIC_WRITE, sges=[], remote=(place, key))
            right = key == program.rkey and place in (begin, begin + 8)
        qp.post_send(wqe)
        qp.ring()
        status = program.completion(taken)
        errors = abi.WC_LOC_QP_OP_ERR, abi.WC_REM_INV_REQ_ERR, abi.WC_REM_ACCESS_ERR
        if (status == abi.WC_SUCCESS) != right or not right and status not in errors:
            sys.exit(f"opcode {wqe[abi.RingFlushWqe.opcode.offset]} at {place:#x} by {key:#x}: {status}")
        taken += 1
        store(program.cq_memory, CONSUMER, taken)
        program.again()


def pinned():
    """Returns how many pages the kernel has pinned for this program."""
    with open("/proc/self/status", encoding="ascii") as file:
        values = dict(line.split(":") for line in file)
    return (int(values["VmPin"].split()[0]) << 10) // mmap.PAGESIZE


def fill(verbs):
    """Creates CQs with large rings until the kernel refuses one; returns their handles, the number that the program's
    limit of locked memory has room for."""
    room = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] // mmap.PAGESIZE - pinned()
    made = []
    try:
        while len(made) <= room:
            ring = CqRing(CQ_DEPTH, LARGE_RING * mmap.PAGESIZE)
            made.append(verbs.create_cq(CQ_DEPTH, ring.request())[0])
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
    if len(made) != room // LARGE_RING:
        sys.exit(f"{len(made)} rings of {LARGE_RING} pages where there is room for {room}")
    return made


def locked_memory(program):
    """Rings count against the limit of locked memory, each page of them once."""
    before = pinned()
    expected = (MEMORY + len(program.cq_memory) + sum(len(qp.memory) for qp in program.qps)) // mmap.PAGESIZE
    if before != expected:
        sys.exit(f"{before} pages are pinned, not {expected}")
    made = fill(program.verbs)
    if not made or pinned() - before != len(made) * LARGE_RING:
        sys.exit(f"{pinned() - before} pages are pinned for {len(made)} rings of {LARGE_RING} pages")


def locked_memory_returned(program):
    """What rings took of the limit is there again when their CQs are destroyed, and when the file is closed."""
    before = pinned()
    for how in ("destroyed", "closed", "closed"):
        verbs = uverbs.Uverbs(program.order["device"])
        for cq in fill(verbs):
            if how == "destroyed":
                verbs.destroy_cq(cq)
        if how == "destroyed" and pinned() != before:
            sys.exit(f"{pinned() - before} pages are pinned for rings of CQs that were destroyed")
        verbs.close()
        if pinned() != before:
            sys.exit(f"{pinned() - before} pages are pinned for rings of a file that was closed")


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
        other_peer, shared, resized, extended, memory_operations, locked_memory, locked_memory_returned, until_killed)


def main():
    order = json.loads(sys.argv[1])
    order["pid"] = os.getpid()
    way = {way.__name__: way for way in WAYS}[order["way"]]
    way(Program(order))


if __name__ == "__main__":
    main()
