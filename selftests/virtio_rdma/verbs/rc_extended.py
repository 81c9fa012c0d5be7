#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""libibverbs' extended interfaces: work requests by calls, extended CQs with
time stamps, parent domains with allocators of the program's own."""

import ctypes
import errno
import mmap
import os
import struct
import time

import ktap
from rc import (ALL_ACCESS, MR, PD, QP, SIGNALED, Endpoint, Pair, PyverbsError, QPCap, QPInitAttr, complete,
                e, empty, fails_with, open_device, pieces, remote, sge)
from pyverbs.cq import CQEX, CqInitAttrEx, PollCqAttr
from pyverbs.pd import ParentDomain, ParentDomainContext, ParentDomainInitAttr
from pyverbs.qp import QPEx, QPInitAttrEx

DEVICE = open_device()
DEPTH = 16
INLINE = 100
MAX_SGE = 4
BUILDERS = (e.IBV_QP_EX_WITH_SEND | e.IBV_QP_EX_WITH_SEND_WITH_IMM | e.IBV_QP_EX_WITH_RDMA_WRITE |
            e.IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | e.IBV_QP_EX_WITH_RDMA_READ |
            e.IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | e.IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD)
TIMES = e.IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | e.IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK


class ByCalls(Endpoint):
    """An endpoint whose QP takes work requests by calls."""

    def __init__(self, device, ops=BUILDERS, **options):
        super().__init__(device, depth=DEPTH, max_sge=MAX_SGE, inline=INLINE, **options)
        self.qp.close()
        cap = QPCap(max_send_wr=DEPTH, max_recv_wr=DEPTH, max_send_sge=MAX_SGE, max_recv_sge=MAX_SGE,
                    max_inline_data=INLINE)
        attr = QPInitAttrEx(qp_type=e.IBV_QPT_RC, scq=self.send_cq, rcq=self.recv_cq, cap=cap, pd=self.pd,
                            send_ops_flags=ops,
                            comp_mask=e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS)
        self.qp = QPEx(device.context, attr)

    def begin(self, wr_id=0, flags=SIGNALED):
        """Sets wr_id and flags of the next work request."""
        self.qp.wr_id = wr_id
        self.qp.wr_flags = flags


class CallPair(Pair):
    """Two connected endpoints; `a` takes work requests by calls."""

    def __init__(self, device, **options):
        super().__init__(device, depth=DEPTH)
        self.a.close()
        self.a = ByCalls(device, **options)
        # `b` has been connected to the endpoint that is closed.
        self.b.move(e.IBV_QPS_RESET)
        self.connect()


def by_calls():
    """Returns whether QPs take work requests by calls, which they do not if the kernel posts."""
    try:
        ByCalls(DEVICE).close()
    except PyverbsError:
        return False
    return True


def builders_and_setters(rng):
    """Every operation, with data in lists of SGEs and inline, in batches."""
    with CallPair(DEVICE) as pair:
        a, b, qp = pair.a, pair.b, pair.a.qp
        for _ in range(100):
            length = rng.randint(1, INLINE)
            data = rng.randbytes(length)
            source, sink = a.memory(length, data=data), a.memory(length)
            target, origin = b.memory(length), b.memory(length, data=data[::-1])
            received = [b.memory(length), b.memory(length)]
            for region in received:
                b.post_recv([sge(region)])
            address, key = remote(target)
            sges, offset = [], 0
            for piece in pieces(rng, length, rng.randint(1, MAX_SGE)):
                sges.append(sge(source, offset, piece))
                offset += piece
            qp.wr_start()
            a.begin(1)
            qp.wr_rdma_write(key, address)
            qp.wr_set_sge_list(len(sges), sges)
            a.begin(2)
            qp.wr_rdma_read(*reversed(remote(origin)))
            qp.wr_set_sge(sge(sink))
            a.begin(3, 0)
            qp.wr_send()
            qp.wr_set_inline_data(source.buf, length)
            a.begin(4, SIGNALED | e.IBV_SEND_FENCE)
            qp.wr_send_imm(0x11223344)
            qp.wr_set_sge_list(len(sges), sges)
            qp.wr_complete()
            ktap.equal([wc.wr_id for wc in complete(a.send_cq, 3)], [1, 2, 4], "wr_id")
            first, second = complete(b.recv_cq, 2)
            ktap.equal((first.byte_len, second.byte_len), (length, length), "bytes")
            ktap.equal(second.imm_data & 0xffffffff in (0x11223344, 0x44332211), True, "immediate data")
            for region, expected in ((target, data), (sink, data[::-1]), (received[0], data), (received[1], data)):
                ktap.same_bytes(region.read(length, 0), expected, "data")
            for region in (source, sink):
                region.close()
                a.mrs.remove(region)
            for region in (target, origin, *received):
                region.close()
                b.mrs.remove(region)


def atomics(rng):
    """Compare and swap, fetch and add, and an RDMA WRITE that has immediate data alone."""
    with CallPair(DEVICE) as pair:
        a, b, qp = pair.a, pair.b, pair.a.qp
        word = rng.getrandbits(64)
        target, results = b.memory(8, data=struct.pack("=Q", word)), a.memory(16)
        address, key = remote(target)
        b.post_recv([])
        qp.wr_start()
        a.begin(1)
        qp.wr_atomic_fetch_add(key, address, 5)
        qp.wr_set_sge(sge(results, 0, 8))
        a.begin(2)
        qp.wr_atomic_cmp_swp(key, address, (word + 5) & (2 ** 64 - 1), 77)
        qp.wr_set_sge(sge(results, 8, 8))
        a.begin(3)
        qp.wr_rdma_write_imm(key, address, 9)
        qp.wr_complete()
        complete(a.send_cq, 3)
        complete(b.recv_cq)
        ktap.equal(struct.unpack("=QQ", results.read(16, 0)), (word, (word + 5) & (2 ** 64 - 1)), "before")
        ktap.equal(struct.unpack("=Q", target.read(8, 0)), (77,), "after")


def batch_whole_or_not_at_all(_rng):
    """A batch with an error posts nothing, and does no harm to the next one."""
    with CallPair(DEVICE) as pair:
        a, b, qp = pair.a, pair.b, pair.a.qp
        target, source = b.memory(8), a.memory(8, data=b"whatever")
        address, key = remote(target)

        def write(count=1):
            for _ in range(count):
                a.begin()
                qp.wr_rdma_write(key, address)
                qp.wr_set_sge(sge(source))

        def too_many_sges():
            write()
            a.begin()
            qp.wr_rdma_write(key, address)
            qp.wr_set_sge_list(MAX_SGE + 1, [sge(source)] * (MAX_SGE + 1))

        def too_much_inline():
            write()
            a.begin()
            qp.wr_send()
            qp.wr_set_inline_data(source.buf, 1 << 20)

        def two_setters():
            write()
            qp.wr_set_sge(sge(source))

        for make, number in ((too_many_sges, errno.EINVAL), (too_much_inline, errno.EINVAL),
                             (two_setters, errno.EINVAL), (lambda: write(DEPTH + 1), errno.ENOMEM)):
            qp.wr_start()
            make()
            fails_with(number, qp.wr_complete)
        qp.wr_start()
        write(DEPTH)
        qp.wr_abort()
        empty(a.send_cq)
        ktap.same_bytes(target.read(8, 0), bytes(8), "target")
        qp.wr_start()
        write(DEPTH)
        qp.wr_complete()
        complete(a.send_cq, DEPTH)
        ktap.same_bytes(target.read(8, 0), b"whatever", "target")


def batches_and_lists(rng):
    """ibv_post_send() between batches, over many laps of the ring, in order."""
    with CallPair(DEVICE) as pair:
        a, b, qp = pair.a, pair.b, pair.a.qp
        source, target = a.memory(8), b.memory(8)
        address, key = remote(target)
        posted = seen = 0
        while seen < 2000:
            room = DEPTH - (posted - seen)
            count = rng.randint(0, room)
            if rng.random() < 0.5:
                qp.wr_start()
                for wr_id in range(posted, posted + count):
                    a.begin(wr_id)
                    qp.wr_rdma_write(key, address)
                    qp.wr_set_sge(sge(source))
                qp.wr_complete()
            else:
                for wr_id in range(posted, posted + count):
                    a.post_send(e.IBV_WR_RDMA_WRITE, [sge(source)], wr_id, remote=remote(target))
            posted += count
            for wc in a.send_cq.poll(DEPTH)[1]:
                ktap.equal((wc.wr_id, wc.status), (seen, e.IBV_WC_SUCCESS), "completion")
                seen += 1
        complete(a.send_cq, posted - seen)


def what_no_qp_has(_rng):
    """Work requests that a QP does not have are refused when it is made."""
    for ops in (e.IBV_QP_EX_WITH_TSO, e.IBV_QP_EX_WITH_SEND | 1 << 40):
        fails_with(errno.EOPNOTSUPP, ByCalls, DEVICE, ops)


class Extended:
    """An extended CQ, polled one completion at a time."""

    def __init__(self, wc_flags=e.IBV_WC_STANDARD_FLAGS, **options):
        self.cq = CQEX(DEVICE.context, CqInitAttrEx(cqe=64, wc_flags=wc_flags, **options))

    def poll(self, count, read):
        """Polls batches until there were `count` completions; returns what read() returns for each."""
        got = []
        while len(got) < count:
            if self.cq.start_poll(PollCqAttr()) == errno.ENOENT:
                os.sched_yield()
                continue
            got.append(read(self.cq))
            while len(got) < count and self.cq.poll_next() == 0:
                got.append(read(self.cq))
            self.cq.end_poll()
        return got


class Loop(Endpoint):
    """A QP in loopback with itself, in a PD, that completes to a CQ."""

    # This endpoint has nothing but a QP.
    # pylint: disable-next=super-init-not-called
    def __init__(self, cq, pd):
        self.device = DEVICE
        cap = QPCap(max_send_wr=DEPTH, max_recv_wr=DEPTH, max_send_sge=1, max_recv_sge=1)
        self.qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap))
        self.connect(self.qp.qp_num)


def post_sends(end, region, count):
    """Sends messages of a QP to itself."""
    for wr_id in range(count):
        end.post_recv([sge(region)], 100 + wr_id)
    for wr_id in range(count):
        end.post_send(e.IBV_WR_SEND_WITH_IMM, [sge(region)], wr_id, imm=wr_id)


def extended_cq(_rng):
    """Completions that are read piece by piece are those that ibv_poll_cq() reads."""
    extended, pd = Extended(), PD(DEVICE.context)
    loop, region = Loop(extended.cq, pd), MR(pd, 8, ALL_ACCESS)
    ktap.equal(extended.cq.start_poll(PollCqAttr()), errno.ENOENT, "empty")
    for _ in range(10):
        post_sends(loop, region, DEPTH)
        got = extended.poll(2 * DEPTH, lambda cq: (
            cq.wr_id, cq.status, cq.read_opcode(), cq.read_qp_num(), cq.read_byte_len(), cq.read_wc_flags()))
        sent = [wc for wc in got if wc[0] < 100]
        received = [wc for wc in got if wc[0] >= 100]
        ktap.equal([wc[:4] for wc in sent],
                   [(i, e.IBV_WC_SUCCESS, e.IBV_WC_SEND, loop.qp.qp_num) for i in range(DEPTH)], "sent")
        ktap.equal(received, [(100 + i, e.IBV_WC_SUCCESS, e.IBV_WC_RECV, loop.qp.qp_num, 8, e.IBV_WC_WITH_IMM)
                              for i in range(DEPTH)], "received")
    # A batch that ends early leaves the other completions where they are.
    post_sends(loop, region, 3)
    extended.poll(1, lambda cq: cq.wr_id)
    ktap.equal(len(extended.poll(5, lambda cq: cq.wr_id)), 5, "the others")
    ktap.equal(extended.cq.start_poll(PollCqAttr()), errno.ENOENT, "empty")
    for thing in (loop.qp, region, extended.cq, pd):
        thing.close()


def time_stamps(_rng):
    """A completion has the time at which it was polled, by both clocks."""
    extended, pd = Extended(e.IBV_WC_STANDARD_FLAGS | TIMES), PD(DEVICE.context)
    loop, region = Loop(extended.cq, pd), MR(pd, 8, ALL_ACCESS)
    ktap.equal(DEVICE.context.query_device_ex().hca_core_clock, 1_000_000, "kHz")

    def clocks():
        return DEVICE.context.query_rt_values_ex()[1], time.time_ns()

    before = clocks()
    for _ in range(5):
        post_sends(loop, region, DEPTH)
        for stamp in extended.poll(2 * DEPTH, lambda cq: (cq.read_timestamp(), cq.read_completion_wallclock_ns())):
            after = clocks()
            ktap.equal(before[0] <= stamp[0] <= after[0], True, "device's clock")
            ktap.equal(before[1] <= stamp[1] <= after[1], True, "wall clock")
            before = (stamp[0], before[1])
    for thing in (loop.qp, region, extended.cq, pd):
        thing.close()


def what_no_cq_has(_rng):
    """What an extended CQ cannot tell, and flags that it does not have."""
    for flag in (e.IBV_WC_EX_WITH_CVLAN, e.IBV_WC_EX_WITH_FLOW_TAG, e.IBV_WC_EX_WITH_TM_INFO, 1 << 40):
        fails_with(errno.EOPNOTSUPP, Extended, flag)
    flags = e.IBV_CQ_INIT_ATTR_MASK_FLAGS
    for flag, works in ((e.IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN, False), (1 << 20, False),
                        (e.IBV_CREATE_CQ_ATTR_SINGLE_THREADED, True)):
        if works:
            Extended(comp_mask=flags, flags=flag).cq.close()
        else:
            fails_with(errno.EOPNOTSUPP, lambda flag=flag: Extended(comp_mask=flags, flags=flag))


class Allocator:
    """Memory for the objects of a parent domain, and what was asked for."""

    def __init__(self):
        self.lent = {}
        self.asked = []
        self.answer = None

    def alloc(self, _pd, _context, size, alignment, kind):
        self.asked.append((size, alignment, kind))
        if self.answer is not None:
            return self.answer(size, alignment)
        region = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(region))
        # The memory has been used before, which does no harm.
        ctypes.memset(address, 0xff, size)
        self.lent[address] = region
        return address

    def free(self, _pd, _context, address, _kind):
        del self.lent[address]

    def domain(self, pd):
        """Returns a parent domain that has its objects in this memory, and its context, which must live as long."""
        context = ParentDomainContext(pd, self.alloc, self.free)
        return ParentDomain(DEVICE.context, ParentDomainInitAttr(pd, context)), context


def parent_domain(_rng):
    """Rings in the program's own memory, which comes back when they are gone."""
    allocator, pd = Allocator(), PD(DEVICE.context)
    domain, _context = allocator.domain(pd)
    extended = Extended(comp_mask=e.IBV_CQ_INIT_ATTR_MASK_PD, parent_domain=domain)
    loop, region = Loop(extended.cq, domain), MR(domain, 8, ALL_ACCESS)
    page = mmap.PAGESIZE
    if BY_CALLS:
        ktap.equal([kind for _, _, kind in allocator.asked], [2, 1], "for a CQ and a QP")
        ktap.equal(all(size % page == 0 and alignment == page for size, alignment, _ in allocator.asked),
                   True, "pages")
        ktap.equal(len(allocator.lent), 2, "lent")
    else:
        ktap.equal(allocator.asked, [], "asked for")
    for _ in range(5):
        post_sends(loop, region, DEPTH)
        ktap.equal(len(extended.poll(2 * DEPTH, lambda cq: cq.wr_id)), 2 * DEPTH, "completions")
    for thing in (loop.qp, region, extended.cq, domain, pd):
        thing.close()
    ktap.equal(allocator.lent, {}, "lent")


def allocators_that_fail(_rng):
    """What an allocator may answer, and what it must not."""
    if not BY_CALLS:
        raise ktap.Skip("there are no rings")
    allocator, pd = Allocator(), PD(DEVICE.context)
    domain, _context = allocator.domain(pd)

    def cq():
        return Extended(comp_mask=e.IBV_CQ_INIT_ATTR_MASK_PD, parent_domain=domain).cq

    allocator.answer = lambda size, alignment: 0
    fails_with(errno.ENOMEM, cq)
    # The provider's own memory: IBV_ALLOCATOR_USE_DEFAULT.
    allocator.answer = lambda size, alignment: 2 ** 64 - 1
    cq().close()
    memory = mmap.mmap(-1, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    allocator.lent[address + 64] = memory
    allocator.answer = lambda size, alignment: address + 64
    fails_with(errno.EINVAL, cq)
    ktap.equal(allocator.lent, {}, "lent")
    domain.close()
    pd.close()


BY_CALLS = by_calls()
COMMON = [extended_cq, time_stamps, what_no_cq_has, parent_domain, allocators_that_fail]
# QPs to which the kernel posts have no such calls.
RINGS = [builders_and_setters, atomics, batch_whole_or_not_at_all, batches_and_lists, what_no_qp_has]

if __name__ == "__main__":
    ktap.run((RINGS if BY_CALLS else []) + COMMON)
