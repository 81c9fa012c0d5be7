#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""FLUSH and ATOMIC WRITE, by calls: what they do, and what they need."""

import errno
import os
import struct

import abi
import ktap
from rc import (ALL_ACCESS, MR, PD, SIGNALED, Pair, QPCap, complete, e, fails_with, open_device,
                post, remote, send_wr, sge)
from pyverbs.mr import MW, MWBindInfo
from pyverbs.qp import QPEx, QPInitAttrEx
from pyverbs.wr import SendWR
from uverbs import address, zeros

DEVICE = open_device()
FLUSH_GLOBAL, FLUSH_PERSISTENT = e.IBV_ACCESS_FLUSH_GLOBAL, e.IBV_ACCESS_FLUSH_PERSISTENT
RANGE, ALL_OF_IT = e.IBV_FLUSH_RANGE, e.IBV_FLUSH_MR
BUILDERS = (e.IBV_QP_EX_WITH_RDMA_WRITE | e.IBV_QP_EX_WITH_FLUSH | e.IBV_QP_EX_WITH_ATOMIC_WRITE)
SIZE = 3 * 4096
# Bits of device_cap_flags_ex that only the kernel's ib_verbs.h names.
CAP_FLUSH_GLOBAL, CAP_FLUSH_PERSISTENT, CAP_ATOMIC_WRITE = 1 << 38, 1 << 39, 1 << 40
CAPS = CAP_FLUSH_GLOBAL | CAP_FLUSH_PERSISTENT | CAP_ATOMIC_WRITE


def by_calls(end, builders):
    """Returns attributes of a QP that takes work requests by calls."""
    cap = QPCap(max_send_wr=64, max_recv_wr=16, max_send_sge=4, max_recv_sge=4)
    return QPInitAttrEx(qp_type=e.IBV_QPT_RC, scq=end.send_cq, rcq=end.recv_cq, cap=cap, pd=end.pd,
                        send_ops_flags=builders,
                        comp_mask=e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS)


class CallPair(Pair):
    """Two connected endpoints; `a` takes work requests by calls, and `b` grants the access `grants`."""

    def __init__(self, grants=ALL_ACCESS | FLUSH_GLOBAL | FLUSH_PERSISTENT):
        super().__init__(DEVICE, b={"qp_access_flags": grants})
        self.a.qp.close()
        self.a.qp = QPEx(DEVICE.context, by_calls(self.a, BUILDERS))
        self.b.move(e.IBV_QPS_RESET)
        self.connect()

    def call(self, verb, *args, status=e.IBV_WC_SUCCESS, opcode=None):
        """Posts one work request by a call; connects both ends again after an error."""
        self.a.qp.wr_start()
        self.a.qp.wr_id, self.a.qp.wr_flags = 7, SIGNALED
        verb(*args)
        self.a.qp.wr_complete()
        wc, = complete(self.a.send_cq, 1, status)
        if opcode is not None:
            ktap.equal(wc.opcode, opcode, "opcode")
        if status != e.IBV_WC_SUCCESS:
            for end in (self.a, self.b):
                end.move(e.IBV_QPS_RESET)
            self.connect()

    def flush(self, key, address, length, kind=e.IBV_FLUSH_GLOBAL, level=RANGE, status=e.IBV_WC_SUCCESS):
        """Posts one FLUSH."""
        self.call(self.a.qp.wr_flush, key, address, length, kind, level, status=status, opcode=e.IBV_WC_FLUSH)

    def word(self, key, address, data, status=e.IBV_WC_SUCCESS):
        """Posts one ATOMIC WRITE."""
        self.call(self.a.qp.wr_atomic_write, key, address, data, status=status, opcode=e.IBV_WC_ATOMIC_WRITE)


def attributes(_rng):
    """The device says what it has, and makes nothing persistent."""
    ktap.equal(DEVICE.context.query_device_ex().device_cap_flags_ex & CAPS,
               CAP_FLUSH_GLOBAL | CAP_ATOMIC_WRITE, "capabilities")
    pd = PD(DEVICE.context)
    fails_with(errno.EOPNOTSUPP, MR, pd, SIZE, ALL_ACCESS | FLUSH_PERSISTENT)
    pd.close()


def flushed(rng):
    """What was written before a FLUSH is there when it completes."""
    with CallPair() as pair:
        qp = pair.a.qp
        target, source = pair.b.memory(SIZE, ALL_ACCESS | FLUSH_GLOBAL), pair.a.memory(SIZE)
        for _ in range(50):
            data = rng.randbytes(SIZE)
            source.write(data, SIZE)
            offset = rng.randrange(SIZE)
            qp.wr_start()
            qp.wr_id, qp.wr_flags = 1, 0
            qp.wr_rdma_write(target.rkey, target.buf)
            qp.wr_set_sge(sge(source))
            qp.wr_id, qp.wr_flags = 2, SIGNALED
            qp.wr_flush(target.rkey, target.buf + offset, SIZE - offset, e.IBV_FLUSH_GLOBAL, RANGE)
            qp.wr_complete()
            wc, = complete(pair.a.send_cq)
            ktap.equal((wc.wr_id, wc.opcode), (2, e.IBV_WC_FLUSH), "completion")
            ktap.same_bytes(target.read(SIZE, 0), data, "data")
        pair.flush(target.rkey, 12345, 0, level=ALL_OF_IT)
        pair.flush(target.rkey, target.buf, 0)


def flush_errors(_rng):
    """What a FLUSH needs of key, range and QP."""
    access, refused = ALL_ACCESS | FLUSH_GLOBAL, e.IBV_WC_REM_ACCESS_ERR
    persistent = e.IBV_FLUSH_PERSISTENT
    with CallPair() as pair:
        target, closed = pair.b.memory(SIZE, access), pair.b.memory(SIZE)
        for level in (RANGE, ALL_OF_IT):
            pair.flush(closed.rkey, closed.buf, 8, level=level, status=refused)
            pair.flush(target.rkey ^ 0xff00, target.buf, 8, level=level, status=refused)
            for kind in (persistent, persistent | e.IBV_FLUSH_GLOBAL):
                pair.flush(target.rkey, target.buf, 8, kind, level, refused)
        pair.flush(target.rkey, target.buf - 1, 8, status=refused)
        pair.flush(target.rkey, target.buf, SIZE + 1, status=refused)
        for kind, level in ((0, RANGE), (4, RANGE), (1, 2)):
            pair.flush(target.rkey, target.buf, 8, kind, level, e.IBV_WC_LOC_QP_OP_ERR)
        pair.flush(target.rkey, target.buf, SIZE)
    with CallPair(ALL_ACCESS) as pair:
        target = pair.b.memory(SIZE, access)
        pair.flush(target.rkey, target.buf, 8, status=e.IBV_WC_REM_INV_REQ_ERR)


def windows(_rng):
    """A FLUSH through a memory window needs the window's right."""
    with CallPair() as pair:
        region = pair.b.memory(SIZE, ALL_ACCESS | e.IBV_ACCESS_MW_BIND)
        for access, status in ((FLUSH_GLOBAL, e.IBV_WC_SUCCESS),
                               (e.IBV_ACCESS_REMOTE_WRITE, e.IBV_WC_REM_ACCESS_ERR)):
            window = MW(pair.b.pd, e.IBV_MW_TYPE_2)
            wr = SendWR(1, e.IBV_WR_BIND_MW)
            wr.set_bind_wr(window, MWBindInfo(region, region.buf, 64, access))
            key = wr.rkey
            post(pair.b.qp.post_send, [wr])
            complete(pair.b.send_cq)
            pair.flush(key, region.buf, 64, status=status)
            window.close()


def words(rng):
    """An ATOMIC WRITE puts 8 bytes where they belong, and nothing else."""
    with CallPair() as pair:
        content = rng.randbytes(SIZE)
        target, source = pair.b.memory(SIZE, data=content), pair.a.memory(8)
        for round_ in range(200):
            data, offset = rng.randbytes(8), 8 * rng.randrange(SIZE // 8)
            if round_ % 2:
                pair.word(target.rkey, target.buf + offset, data)
            else:
                source.write(data, 8)
                post(pair.a.qp.post_send, [send_wr(e.IBV_WR_ATOMIC_WRITE, [sge(source)], 7,
                                                   remote=remote(target, offset))])
                complete(pair.a.send_cq)
            content = content[:offset] + data + content[offset + 8:]
            ktap.same_bytes(target.read(SIZE, 0), content, "memory")


def never_torn(_rng):
    """A thread that reads the word meanwhile sees either value, and no mixture."""
    with CallPair() as pair:
        memory = zeros(4096)
        target = MR(pair.b.pd, 4096, ALL_ACCESS, address(memory))
        child = os.fork()
        if not child:
            # A word in the machine's own order and size is read with one load.
            values = (struct.unpack_from("Q", memory)[0] for _ in range(200000))
            os._exit(any(value & 0xffffffff != value >> 32 for value in values))
        value, done = 0, (0, 0)
        while done[0] == 0:
            value += 1
            pair.word(target.rkey, target.buf, struct.pack("=II", value, value))
            done = os.waitpid(child, os.WNOHANG)
        ktap.equal(os.waitstatus_to_exitcode(done[1]), 0, "torn words")
        ktap.equal(struct.unpack_from("=II", memory), (value, value), "word")
        target.close()


def word_errors(_rng):
    """What an ATOMIC WRITE needs of key, range, alignment and QP."""
    data = bytes(range(8))
    with CallPair() as pair:
        target, closed = pair.b.memory(64, data=bytes(64)), pair.b.memory(64, e.IBV_ACCESS_REMOTE_READ)
        for offset in (1, 2, 4):
            pair.word(target.rkey, target.buf + offset, data, e.IBV_WC_REM_INV_REQ_ERR)
        for key, address in ((closed.rkey, closed.buf), (target.rkey ^ 0xff00, target.buf),
                             (target.rkey, target.buf + 64)):
            pair.word(key, address, data, e.IBV_WC_REM_ACCESS_ERR)
        ktap.same_bytes(target.read(64, 0), bytes(64), "memory")
    with CallPair(e.IBV_ACCESS_REMOTE_READ) as pair:
        target = pair.b.memory(64)
        pair.word(target.rkey, target.buf, data, e.IBV_WC_REM_INV_REQ_ERR)
    with Pair(DEVICE) as pair:
        source, target = pair.a.memory(16), pair.b.memory(16)
        pair.a.post_send(e.IBV_WR_ATOMIC_WRITE, [sge(source)], remote=remote(target))
        complete(pair.a.send_cq, 1, e.IBV_WC_LOC_LEN_ERR)
        for opcode, sges in ((e.IBV_WR_ATOMIC_WRITE, []), (e.IBV_WR_FLUSH, [])):
            fails_with(errno.EINVAL, pair.a.post_send, opcode, sges)


def without(_rng):
    """A device without FLUSH and ATOMIC WRITE says so."""
    pd = PD(DEVICE.context)
    fails_with(errno.EOPNOTSUPP, MR, pd, SIZE, ALL_ACCESS | FLUSH_GLOBAL)
    pd.close()
    with Pair(DEVICE) as pair:
        for builders in (e.IBV_QP_EX_WITH_FLUSH, e.IBV_QP_EX_WITH_ATOMIC_WRITE):
            fails_with(errno.EOPNOTSUPP, QPEx, DEVICE.context, by_calls(pair.a, builders))
        source, target = pair.a.memory(8), pair.b.memory(8)
        wr = send_wr(e.IBV_WR_ATOMIC_WRITE, [sge(source)], remote=remote(target))
        if DEVICE.has_feature(abi.F_RINGS):
            post(pair.a.qp.post_send, [wr])
            complete(pair.a.send_cq, 1, e.IBV_WC_LOC_QP_OP_ERR)
        else:
            fails_with(errno.EINVAL, post, pair.a.qp.post_send, [wr])
        ktap.same_bytes(target.read(8, 0), bytes(8), "memory")


if __name__ == "__main__":
    if DEVICE.context.query_device_ex().device_cap_flags_ex & CAP_FLUSH_GLOBAL:
        ktap.run([attributes, flushed, flush_errors, windows, words, never_torn, word_errors])
    else:
        ktap.run([without])
