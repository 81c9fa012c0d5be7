#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Memory windows: what they give access to, when they are bound and invalidated, and what goes wrong."""

import errno
import os
import struct

import ktap
from rc import (ALL_ACCESS, PD, QP, SIGNALED, Endpoint, Pair, QPCap, complete, e, empty, fails_with,
                open_device, post, send_wr, sge)
from pyverbs.mr import MR, MW, MWBind, MWBindInfo
from pyverbs.qp import QPEx, QPInitAttrEx
from pyverbs.wr import SGE, SendWR

DEVICE = open_device()
ONE, TWO = e.IBV_MW_TYPE_1, e.IBV_MW_TYPE_2
WRITE, READ, FAA = e.IBV_WR_RDMA_WRITE, e.IBV_WR_RDMA_READ, e.IBV_WR_ATOMIC_FETCH_AND_ADD
REMOTE = e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_ATOMIC
ACCESS = ALL_ACCESS | e.IBV_ACCESS_MW_BIND
REFUSED, BIND_ERR = e.IBV_WC_REM_ACCESS_ERR, e.IBV_WC_MW_BIND_ERR
SIZE = 3 * 4096 + 100
KEY_BITS = 0xff
# A key that the responder cannot invalidate is an error of class J, which no NAK tells of (IBA 9.9.3.1).
NOT_ANSWERED = e.IBV_WC_RETRY_EXC_ERR


class Windows(Pair):
    """Two connected endpoints; `b` binds windows, which `a` uses."""

    def __init__(self, **options):
        self.windows = []
        super().__init__(DEVICE, **options)

    def window(self, kind, pd=None):
        """Allocates a window, which is not bound."""
        self.windows.append(MW(pd or self.b.pd, kind))
        return self.windows[-1]

    def bind(self, window, region, offset=0, length=None, access=REMOTE, status=e.IBV_WC_SUCCESS):
        """Binds a window to a part of a region; returns its new key."""
        length = region.length - offset if length is None else length
        info = MWBindInfo(region, region.buf + offset, length, access)
        if window.type == ONE:
            self.b.qp.bind_mw(window, MWBind(info, SIGNALED, 77))
            key = window.rkey
        else:
            wr = SendWR(77, e.IBV_WR_BIND_MW)
            wr.set_bind_wr(window, info)
            key = wr.rkey
            post(self.b.qp.post_send, [wr])
        wc, = complete(self.b.send_cq, 1, status)
        ktap.equal((wc.wr_id, wc.opcode), (77, e.IBV_WC_BIND_MW), "completion")
        return key

    def access(self, opcode, local, address, key, status=e.IBV_WC_SUCCESS):
        """Lets `a` use a key; connects both ends again after an error."""
        self.a.post_send(opcode, [local], remote=(address, key), atomic=(1, 0) if opcode == FAA else None)
        complete(self.a.send_cq, 1, status)
        if status != e.IBV_WC_SUCCESS:
            self.renew()

    def refused(self, address, key):
        """Fails the test unless a write with this key is refused."""
        self.access(WRITE, sge(self.a.memory(8)), address, key, REFUSED)

    def invalidate(self, key, status=e.IBV_WC_SUCCESS):
        """Invalidates a key at `b`."""
        self.b.post_send(e.IBV_WR_LOCAL_INV, [], imm=key)
        complete(self.b.send_cq, 1, status)

    def renew(self):
        """Connects both ends again."""
        for end in (self.a, self.b):
            end.move(e.IBV_QPS_RESET)
        self.connect()

    def __exit__(self, *error):
        for window in self.windows:
            window.close()
        super().__exit__(*error)


def attributes(_rng):
    """The device says what it has."""
    ktap.equal(DEVICE.attr.max_mw > 0, True, "max_mw")
    flags = e.IBV_DEVICE_MEM_WINDOW | e.IBV_DEVICE_MEM_WINDOW_TYPE_2B
    ktap.equal(DEVICE.attr.device_cap_flags & flags, flags, "capabilities")
    ktap.equal(DEVICE.attr.device_cap_flags & e.IBV_DEVICE_MEM_WINDOW_TYPE_2A, 0, "type 2A")
    with Windows() as pair:
        for kind in (0, 3):
            fails_with(errno.EINVAL, MW, pair.b.pd, kind)
        keys = [pair.window(kind).rkey >> 8 for kind in (ONE, TWO) * 50]
        ktap.equal(len(set(keys)), 100, "keys")


def data(rng):
    """What goes through a window comes to the right place, and nothing else is touched."""
    with Windows() as pair:
        region, local = pair.b.memory(SIZE, ACCESS), pair.a.memory(SIZE)
        for round_ in range(60):
            window = pair.window((ONE, TWO)[round_ % 2])
            offset = rng.randrange(SIZE - 16)
            length = rng.randint(8, SIZE - offset)
            content, new = rng.randbytes(SIZE), rng.randbytes(length)
            region.write(content, SIZE)
            local.write(new, length)
            key = pair.bind(window, region, offset, length)
            ktap.equal(key >> 8, window.rkey >> 8, "key")
            at = rng.randrange(length)
            count = rng.randint(1, length - at)
            pair.access(WRITE, sge(local, at, count), region.buf + offset + at, key)
            expected = content[:offset + at] + new[at:at + count] + content[offset + at + count:]
            ktap.same_bytes(region.read(SIZE, 0), expected, "written")
            pair.access(READ, sge(local, 0, length), region.buf + offset, key)
            ktap.same_bytes(local.read(length, 0), expected[offset:offset + length], "read")


def atomics(rng):
    """An atomic through a window."""
    with Windows() as pair:
        for kind in (ONE, TWO):
            value = rng.getrandbits(32)
            region, result = pair.b.memory(64, ACCESS, data=struct.pack("=8Q", *[value] * 8)), pair.a.memory(8)
            key = pair.bind(pair.window(kind), region, 8, 16)
            pair.access(FAA, sge(result), region.buf + 16, key)
            ktap.equal(struct.unpack("=Q", result.read(8, 0)), (value,), "before")
            ktap.equal(struct.unpack("=8Q", region.read(64, 0))[1:4], (value, value + 1, value), "words")


def zero_based(rng):
    """A window of type 2 may count from its own beginning; one of type 1 may not."""
    with Windows() as pair:
        region, content = pair.b.memory(SIZE, ACCESS, data=bytes(SIZE)), rng.randbytes(100)
        local = pair.a.memory(100, data=content)
        window = pair.window(TWO)
        key = pair.bind(window, region, 4000, 200, REMOTE | e.IBV_ACCESS_ZERO_BASED)
        pair.access(WRITE, sge(local), 100, key)
        ktap.same_bytes(region.read(SIZE, 0), bytes(4100) + content + bytes(SIZE - 4200), "written")
        pair.access(WRITE, sge(local), 101, key, REFUSED)
        pair.refused(region.buf + 4000, key)
        info = MWBindInfo(region, region.buf, 8, REMOTE | e.IBV_ACCESS_ZERO_BASED)
        fails_with(errno.EINVAL, pair.b.qp.bind_mw, pair.window(ONE), MWBind(info, SIGNALED))


def bounds(_rng):
    """A window gives access to no byte before or behind it."""
    with Windows() as pair:
        region, local = pair.b.memory(SIZE, ACCESS), pair.a.memory(SIZE)
        for kind in (ONE, TWO):
            key = pair.bind(pair.window(kind), region, 4000, 200)
            for at, length in ((3999, 1), (3999, 201), (4000, 201), (4200, 1), (0, SIZE)):
                for opcode in (WRITE, READ):
                    pair.access(opcode, sge(local, 0, length), region.buf + at, key, REFUSED)


def rights(_rng):
    """A window gives no more than it was bound with, whatever the region gives."""
    uses = {WRITE: e.IBV_ACCESS_REMOTE_WRITE, READ: e.IBV_ACCESS_REMOTE_READ, FAA: e.IBV_ACCESS_REMOTE_ATOMIC}
    with Windows() as pair:
        region, local = pair.b.memory(64, ACCESS), pair.a.memory(8)
        for kind in (ONE, TWO):
            for access in (0, e.IBV_ACCESS_LOCAL_WRITE, *uses.values()):
                key = pair.bind(pair.window(kind), region, access=access)
                for opcode, right in uses.items():
                    status = e.IBV_WC_SUCCESS if access & right else REFUSED
                    pair.access(opcode, sge(local), region.buf, key, status)


def type_1_again(_rng):
    """A window of type 1 is bound again with another key, and unbound."""
    with Windows() as pair:
        region, local = pair.b.memory(SIZE, ACCESS), pair.a.memory(8)
        window = pair.window(ONE)
        pair.refused(region.buf, window.rkey)
        for round_ in range(300):
            old = window.rkey
            key = pair.bind(window, region, 8 * round_, 8)
            ktap.equal(key, old & ~KEY_BITS | (old + 1) & KEY_BITS, "key")
            pair.access(WRITE, sge(local), region.buf + 8 * round_, key)
            if round_ % 50 == 0:
                pair.refused(region.buf + 8 * round_, old)
        key = pair.bind(window, region, 0, 0, 0)
        for unbound in (old, key):
            pair.refused(region.buf, unbound)
        region.close()
        pair.b.mrs.remove(region)


def type_2_invalidated(_rng):
    """A window of type 2 is bound when it is free, which its owner or its peer makes it."""
    with Windows() as pair:
        region, local, inbox = pair.b.memory(SIZE, ACCESS), pair.a.memory(8), pair.b.memory(8)
        window = pair.window(TWO)
        for by_peer in (False, True) * 5:
            key = pair.bind(window, region)
            pair.access(WRITE, sge(local), region.buf, key)
            if by_peer:
                pair.b.post_recv([sge(inbox)])
                pair.a.post_send(e.IBV_WR_SEND_WITH_INV, [sge(local)], imm=key)
                complete(pair.a.send_cq)
                wc, = complete(pair.b.recv_cq)
                ktap.equal((wc.wc_flags & e.IBV_WC_WITH_INV, wc.imm_data & 0xffffffff), (e.IBV_WC_WITH_INV, key),
                           "completion")
            else:
                pair.invalidate(key)
                pair.invalidate(key)
            pair.refused(region.buf, key)
        key = pair.bind(window, region)
        pair.bind(window, region, status=BIND_ERR)
        ktap.equal(pair.b.state(), e.IBV_QPS_ERR, "state")
        pair.renew()
        pair.access(WRITE, sge(local), region.buf, key)


def type_2_of_another(_rng):
    """What is not bound to this QP is neither used nor invalidated through it."""
    with Windows() as pair:
        region, local, inbox = pair.b.memory(SIZE, ACCESS), pair.a.memory(8), pair.b.memory(8)
        sender, qp = Endpoint(DEVICE), QP(pair.b.pd, pair.b.init_attr)
        sender.connect(qp.qp_num)
        qp.to_rts(pair.b.attributes(sender.qp.qp_num))
        first, second = pair.window(ONE), pair.window(TWO)
        key = pair.bind(first, region)
        wr = SendWR(1, e.IBV_WR_BIND_MW)
        wr.set_bind_wr(second, MWBindInfo(region, region.buf, 8, REMOTE))
        others = wr.rkey
        post(qp.post_send, [wr])
        complete(pair.b.send_cq)
        pair.refused(region.buf, others)
        pair.invalidate(others, BIND_ERR)
        pair.renew()
        pair.b.post_recv([sge(inbox)])
        pair.a.post_send(e.IBV_WR_SEND_WITH_INV, [sge(local)], imm=others)
        complete(pair.b.recv_cq, 1, e.IBV_WC_REM_INV_REQ_ERR)
        complete(pair.a.send_cq, 1, NOT_ANSWERED)
        pair.renew()
        source = sender.memory(8)
        for good in (key, others):
            sender.post_send(WRITE, [sge(source)], remote=(region.buf, good))
            complete(sender.send_cq)
        # A window goes with its QP; the region is free then, but for the first window.
        qp.close()
        fails_with(errno.EBUSY, region.close)
        first.close()
        region.close()
        pair.b.mrs.remove(region)
        sender.close()


def type_1_is_not_invalidated(_rng):
    """Neither its owner nor its peer makes a window of type 1 free."""
    with Windows() as pair:
        region, local = pair.b.memory(SIZE, ACCESS), pair.a.memory(8)
        key = pair.bind(pair.window(ONE), region)
        pair.invalidate(key, BIND_ERR)
        pair.renew()
        pair.b.post_recv([sge(pair.b.memory(8))])
        pair.a.post_send(e.IBV_WR_SEND_WITH_INV, [sge(local)], imm=key)
        complete(pair.b.recv_cq, 1, e.IBV_WC_REM_INV_REQ_ERR)
        complete(pair.a.send_cq, 1, NOT_ANSWERED)
        pair.renew()
        pair.access(WRITE, sge(local), region.buf, key)


def bad_binds(_rng):
    """What cannot be bound ends in a bind error, and binds nothing."""
    local_write, bind = e.IBV_ACCESS_LOCAL_WRITE, e.IBV_ACCESS_MW_BIND
    with Windows() as pair:
        good = pair.b.memory(SIZE, ACCESS)
        other = pair.b.memory(SIZE, ACCESS, pd=pair.a.pd)
        closed = pair.b.memory(SIZE, ALL_ACCESS)
        readable = pair.b.memory(SIZE, bind)
        gone = MR(pair.b.pd, SIZE, ACCESS)
        cases = [(good, -1, SIZE, REMOTE), (good, 0, SIZE + 1, REMOTE), (good, SIZE, 1, REMOTE),
                 (good, 0, 1 << 63, REMOTE), (good, 8, (1 << 64) - 8, REMOTE),
                 # Around the end of the address space, into the region.
                 (good, (1 << 64) - 8 - good.buf, good.buf + 16, REMOTE), (good, 0, 8, 1 << 15), (other, 0, 8, REMOTE),
                 (closed, 0, 8, REMOTE), (readable, 0, 8, e.IBV_ACCESS_REMOTE_WRITE),
                 (readable, 0, 8, e.IBV_ACCESS_REMOTE_ATOMIC)]
        for region, offset, length, access in cases:
            # libibverbs keeps windows of type 1 from regions of another PD itself.
            for kind in (TWO,) if region is other else (ONE, TWO):
                window = pair.window(kind)
                key = pair.bind(window, region, offset, length, access, BIND_ERR)
                ktap.equal(pair.b.state(), e.IBV_QPS_ERR, "state")
                pair.renew()
                pair.refused(region.buf, key)
        pair.bind(pair.window(TWO), good, 0, 0, status=BIND_ERR)
        pair.renew()
        # The region is gone when its window is bound.
        wr = SendWR(1, e.IBV_WR_BIND_MW)
        wr.set_bind_wr(pair.window(TWO), MWBindInfo(gone, gone.buf, 8, local_write))
        pair.b.move(e.IBV_QPS_SQD)
        post(pair.b.qp.post_send, [wr])
        gone.close()
        pair.b.move(e.IBV_QPS_RTS)
        complete(pair.b.send_cq, 1, BIND_ERR)
        pair.renew()


def no_local_memory(_rng):
    """The peers use the key of a window, and its owner cannot."""
    with Windows() as pair:
        region, target = pair.b.memory(SIZE, ACCESS), pair.a.memory(8)
        for kind in (ONE, TWO):
            key = pair.bind(pair.window(kind), region, access=REMOTE | e.IBV_ACCESS_LOCAL_WRITE)
            for opcode in (WRITE, READ):
                pair.b.post_send(opcode, [SGE(region.buf, 8, key)], remote=(target.buf, target.rkey))
                complete(pair.b.send_cq, 1, e.IBV_WC_LOC_PROT_ERR)
                pair.renew()


def bound_regions(_rng):
    """A region stays as long as a window is bound to it, and works."""
    with Windows() as pair:
        for kind in (ONE, TWO):
            region, local = MR(pair.b.pd, SIZE, ACCESS), pair.a.memory(8)
            windows = [pair.window(kind) for _ in range(3)]
            keys = [pair.bind(window, region) for window in windows]
            fails_with(errno.EBUSY, region.rereg, e.IBV_REREG_MR_CHANGE_ACCESS, pair.b.pd, 0, 0, ALL_ACCESS)
            for window, key in zip(windows, keys):
                fails_with(errno.EBUSY, region.close)
                pair.access(WRITE, sge(local), region.buf, key)
                window.close()
                pair.refused(region.buf, key)
            region.close()
        pd = PD(DEVICE.context)
        window = MW(pd, ONE)
        window.close()
        pd.close()


def in_order(rng):
    """Windows are bound, announced and invalidated in one list of requests, again and again."""
    with Windows(depth=256) as pair:
        content = rng.randbytes(64)
        region, told = pair.b.memory(64, ACCESS, data=content), pair.a.memory(64)
        source = pair.b.memory(64, data=content)
        window = pair.window(TWO)
        wrs = []
        for round_ in range(40):
            wr = SendWR(3 * round_, e.IBV_WR_BIND_MW)
            wr.set_bind_wr(window, MWBindInfo(region, region.buf, 64, REMOTE))
            key = wr.rkey
            wrs += [wr, send_wr(WRITE, [sge(source)], 3 * round_ + 1, remote=(told.buf, told.rkey)),
                    send_wr(e.IBV_WR_LOCAL_INV, [], 3 * round_ + 2, SIGNALED | e.IBV_SEND_FENCE, key)]
        post(pair.b.qp.post_send, wrs)
        done = []
        while len(done) < len(wrs):
            done += complete(pair.b.send_cq, min(16, len(wrs) - len(done)))
        ktap.equal([wc.wr_id for wc in done], list(range(len(wrs))), "order")
        ktap.same_bytes(told.read(64, 0), content, "told")
        pair.refused(region.buf, key)


def by_calls(rng):
    """
    ibv_wr_bind_mw(), ibv_wr_local_inv() and ibv_wr_send_inv(), under keys of the program's choice: the low 8 bits are
    the program's, the others stay the window's (IBA 10.6.7.2.3), and the window has the new key once it is posted.
    """
    builders = (e.IBV_QP_EX_WITH_BIND_MW | e.IBV_QP_EX_WITH_LOCAL_INV | e.IBV_QP_EX_WITH_SEND_WITH_INV |
                e.IBV_QP_EX_WITH_SEND)
    with Windows() as pair:
        cap = QPCap(max_send_wr=16, max_recv_wr=16, max_send_sge=4, max_recv_sge=4)
        for end in (pair.a, pair.b):
            end.qp.close()
            attr = QPInitAttrEx(qp_type=e.IBV_QPT_RC, scq=end.send_cq, rcq=end.recv_cq, cap=cap, pd=end.pd,
                                send_ops_flags=builders | e.IBV_QP_EX_WITH_RDMA_WRITE,
                                comp_mask=e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS)
            end.qp = QPEx(DEVICE.context, attr)
        pair.connect()
        region, inbox = pair.b.memory(SIZE, ACCESS), pair.b.memory(8)
        window, local = pair.window(TWO), pair.a.memory(8)
        info = MWBindInfo(region, region.buf, SIZE, REMOTE)
        qp = pair.b.qp
        for round_ in range(20):
            asked = rng.getrandbits(32)
            key = window.rkey & ~KEY_BITS | asked & KEY_BITS
            qp.wr_start()
            qp.wr_id, qp.wr_flags = 2 * round_, SIGNALED
            qp.wr_bind_mw(window, asked, info)
            qp.wr_complete()
            ktap.equal(window.rkey, key, "key")
            wc, = complete(pair.b.send_cq)
            ktap.equal((wc.wr_id, wc.opcode), (2 * round_, e.IBV_WC_BIND_MW), "completion")
            pair.access(WRITE, sge(local), region.buf, key)
            if round_ % 2:
                qp.wr_start()
                qp.wr_id, qp.wr_flags = 2 * round_ + 1, SIGNALED
                qp.wr_local_inv(key)
                qp.wr_complete()
                wc, = complete(pair.b.send_cq)
                ktap.equal((wc.wr_id, wc.opcode), (2 * round_ + 1, e.IBV_WC_LOCAL_INV), "completion")
            else:
                pair.b.post_recv([sge(inbox)])
                pair.a.qp.wr_start()
                pair.a.qp.wr_flags = SIGNALED
                pair.a.qp.wr_send_inv(key)
                pair.a.qp.wr_set_sge(sge(local))
                pair.a.qp.wr_complete()
                complete(pair.a.send_cq)
                complete(pair.b.recv_cq)
            pair.refused(region.buf, key)
        # Nothing is posted of a batch in which a request to bind a window has data.
        qp.wr_start()
        qp.wr_bind_mw(window, window.rkey, info)
        qp.wr_set_sge(sge(region))
        fails_with(errno.EINVAL, qp.wr_complete)
        empty(pair.b.send_cq)


def flushed(_rng):
    """A bind in a QP in error is flushed, and binds nothing."""
    with Windows() as pair:
        region = pair.b.memory(SIZE, ACCESS)
        for kind in (ONE, TWO):
            pair.b.move(e.IBV_QPS_ERR)
            key = pair.bind(pair.window(kind), region, status=e.IBV_WC_WR_FLUSH_ERR)
            pair.renew()
            pair.refused(region.buf, key)
        region.close()
        pair.b.mrs.remove(region)


def program_ends(_rng):
    """A program that ends with windows bound leaves nothing behind, in whatever order it made them."""
    before = DEVICE.objects()
    child = os.fork()
    if not child:
        status = 1
        try:
            # The parent's context is the parent's.
            globals()["DEVICE"] = open_device()
            pair = Windows()
            early = [pair.window(kind) for kind in (ONE, TWO)]
            region = pair.b.memory(SIZE, ACCESS)
            for window in (*early, pair.window(ONE), pair.window(TWO)):
                pair.bind(window, region)
            status = 0
        finally:
            os._exit(status)
    ktap.equal(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0, "the program")
    ktap.equal(DEVICE.objects(), before, "what is left")


def without(_rng):
    """A device without windows says so."""
    ktap.equal(DEVICE.attr.max_mw, 0, "max_mw")
    flags = e.IBV_DEVICE_MEM_WINDOW | e.IBV_DEVICE_MEM_WINDOW_TYPE_2B
    ktap.equal(DEVICE.attr.device_cap_flags & flags, 0, "capabilities")
    pd = PD(DEVICE.context)
    for kind in (ONE, TWO):
        fails_with(errno.EOPNOTSUPP, MW, pd, kind)
    fails_with(errno.EOPNOTSUPP, MR, pd, SIZE, ACCESS)
    pd.close()


if DEVICE.attr.max_mw:
    ktap.run([attributes, data, atomics, zero_based, bounds, rights, type_1_again, type_2_invalidated,
              type_2_of_another, type_1_is_not_invalidated, bad_binds, no_local_memory, bound_regions, in_order,
              by_calls, flushed, program_ends])
else:
    ktap.run([without])
