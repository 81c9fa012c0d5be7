#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""What only a data path in rings has: inline data, CQs that are resized, and
completions that the program itself must forget."""

import ctypes
import errno
import os

import ktap
from rc import (QP, SGE, SIGNALED, Endpoint, Pair, PyverbsError, PyverbsRDMAError, QPCap, complete, e, empty,
                fails_with, open_device, pieces, poll, remote, sge)
from pyverbs.qp import QPInitAttrEx

DEVICE = open_device()
INLINE = 236
# The device's limit.
MOST_INLINE = 512


def rings():
    """Returns whether the device has rings: QPs to which the kernel posts have no inline data."""
    try:
        Endpoint(DEVICE, depth=1, inline=1).close()
    except PyverbsError:
        return False
    return True


def inline_sges(rng, buffer, length):
    """Returns SGEs for the first bytes of a buffer, with any keys: the library does not look at them."""
    address, sges = ctypes.addressof(buffer), []
    for piece in pieces(rng, length, rng.randint(1, 4)):
        sges.append(SGE(address, piece, rng.getrandbits(32)))
        address += piece
    return sges


def inline_data(rng):
    """Inline data of all lengths, from memory that is not registered and that is used again at once."""
    buffer = ctypes.create_string_buffer(INLINE)
    with Pair(DEVICE, inline=INLINE) as pair:
        target = pair.b.memory(INLINE)
        for length in range(INLINE + 1):
            for opcode in (e.IBV_WR_SEND, e.IBV_WR_RDMA_WRITE):
                data = rng.randbytes(length)
                target.write(bytes(INLINE), INLINE)
                if opcode == e.IBV_WR_SEND:
                    pair.b.post_recv([sge(target)])
                ctypes.memmove(buffer, data, length)
                pair.a.post_send(opcode, inline_sges(rng, buffer, length), remote=remote(target),
                                 flags=SIGNALED | e.IBV_SEND_INLINE)
                ctypes.memset(buffer, 0xaa, INLINE)
                complete(pair.a.send_cq)
                if opcode == e.IBV_WR_SEND:
                    ktap.equal(complete(pair.b.recv_cq)[0].byte_len, length, "bytes")
                ktap.same_bytes(target.read(INLINE, 0), data + bytes(INLINE - length), f"{length} bytes")


def inline_limits(rng):
    """A QP takes no more inline data than it has room for, and no READ with inline data."""
    buffer = ctypes.create_string_buffer(4096)
    with Pair(DEVICE, inline=INLINE) as pair:
        limit = pair.a.init_attr.cap.max_inline_data
        ktap.equal(limit >= INLINE, True, "max_inline_data")
        ktap.equal(pair.a.qp.query(e.IBV_QP_CAP)[1].cap.max_inline_data, limit, "queried")
        for opcode, length in ((e.IBV_WR_SEND, limit + 1), (e.IBV_WR_RDMA_READ, 8),
                               (e.IBV_WR_ATOMIC_FETCH_AND_ADD, 8)):
            def attempt(opcode=opcode, length=length):
                pair.a.post_send(opcode, inline_sges(rng, buffer, length), remote=(0, 0),
                                 flags=SIGNALED | e.IBV_SEND_INLINE)
            fails_with(errno.EINVAL, attempt)
        empty(pair.a.send_cq)


def inline_data_unasked(rng):
    """A QP has the inline data that its entries hold anyway, up to 96 bytes, and that many are sent."""
    for max_sge, expected in ((1, 16), (2, 80), (4, 80), (6, 96), (16, 96)):
        with Pair(DEVICE, max_sge=max_sge) as pair:
            limit = pair.a.init_attr.cap.max_inline_data
            ktap.equal(limit, expected, f"max_inline_data with {max_sge} SGEs")
            ktap.equal(pair.a.qp.query(e.IBV_QP_CAP)[1].cap.max_inline_data, limit, "queried")
            data = rng.randbytes(limit)
            target, buffer = pair.b.memory(limit), ctypes.create_string_buffer(data, limit)
            for length, works in ((limit, True), (limit + 1, False)):
                def attempt(length=length):
                    pair.a.post_send(e.IBV_WR_RDMA_WRITE, [SGE(ctypes.addressof(buffer), length, 0)],
                                     remote=remote(target), flags=SIGNALED | e.IBV_SEND_INLINE)
                if works:
                    attempt()
                    complete(pair.a.send_cq)
                else:
                    fails_with(errno.EINVAL, attempt)
            ktap.same_bytes(target.read(limit, 0), data, "data")


def inline_data_by_trial(_rng):
    """Programs find the most inline data that a QP can have by trial. Each type of QP has what it is asked for or more,
    up to the same limit, and one byte more is refused."""
    for kind in (e.IBV_QPT_RC, e.IBV_QPT_UC, e.IBV_QPT_UD, e.IBV_QPT_XRC_SEND):
        if kind == e.IBV_QPT_XRC_SEND and not DEVICE.attr.device_cap_flags & e.IBV_DEVICE_XRC:
            continue
        for asked in (1, 96, 97, 511, MOST_INLINE):
            found = inline_of(kind, asked)
            ktap.equal(asked <= found <= MOST_INLINE, True, f"type {kind}, {asked} asked for, {found}")
        for asked in (MOST_INLINE + 1, 1024, 2048, (1 << 32) - 1):
            fails_with(errno.EINVAL, inline_of, kind, asked)


def inline_of(kind, asked):
    """Returns how much inline data a new QP has."""
    end = Endpoint(DEVICE, depth=4, max_sge=1)
    cap = QPCap(max_send_wr=4, max_recv_wr=0, max_send_sge=1, max_recv_sge=0, max_inline_data=asked)
    init = QPInitAttrEx(qp_type=kind, scq=end.send_cq, rcq=end.recv_cq, cap=cap, pd=end.pd,
                        comp_mask=e.IBV_QP_INIT_ATTR_PD)
    try:
        qp = QP(DEVICE.context, init)
        found = init.cap.max_inline_data
        ktap.equal(qp.query(e.IBV_QP_CAP)[1].cap.max_inline_data, found, "queried")
        qp.close()
        return found
    finally:
        end.close()


def resize_under_traffic(rng):
    """A CQ that is resized again and again loses no completion and keeps their order."""
    depth, total = 32, 3000
    with Pair(DEVICE, depth=depth) as pair:
        source, target = pair.a.memory(8), pair.b.memory(8)
        posted = seen = refused = 0
        while seen < total:
            while posted < total and posted - seen < depth:
                pair.a.post_send(e.IBV_WR_RDMA_WRITE, [sge(source)], posted, remote=remote(target))
                posted += 1
            if rng.random() < 0.1:
                try:
                    # The test asks for no CQ that could overflow.
                    pair.a.send_cq.resize(rng.choice((depth, 2 * depth, 300)))
                except PyverbsRDMAError as error:
                    ktap.equal(error.error_code, errno.EINVAL, "error")
                    refused += 1
            for wc in pair.a.send_cq.poll(rng.randint(1, depth))[1]:
                ktap.equal((wc.wr_id, wc.status), (seen, e.IBV_WC_SUCCESS), "completion")
                seen += 1
        empty(pair.a.send_cq)
        ktap.equal(refused, 0, "refused")


def resized_cq_stays_armed(_rng):
    """Whether a CQ is armed survives its ring."""
    with Pair(DEVICE, channel=True) as pair:
        source, target = pair.a.memory(8), pair.b.memory(8)
        cq = pair.b.recv_cq
        for size in (256, 64, 128):
            cq.req_notify()
            cq.resize(size)
            pair.b.post_recv([sge(target)])
            pair.a.post_send(e.IBV_WR_SEND, [sge(source)])
            pair.b.channel.get_cq_event(cq)
            cq.ack_events(1)
            complete(cq)
            complete(pair.a.send_cq)


def flushed(end, count):
    """Polls flushed receives, of which the first was polled already."""
    target = end.memory(8)
    for wr_id in range(count):
        end.post_recv([sge(target)], wr_id)
    end.move(e.IBV_QPS_ERR)
    ktap.equal([wc.wr_id for wc in poll(end.recv_cq, 1)], [0], "wr_id")


def destroyed_qp_leaves_no_completion(_rng):
    """Completions that a QP left in its CQ are gone when it is destroyed."""
    for _ in range(10):
        with Pair(DEVICE) as pair:
            flushed(pair.b, 20)
            pair.b.qp.close()
            empty(pair.b.recv_cq)


def reset_qp_leaves_no_completion(rng):
    """After RESET, indices count from 0 on both sides, whatever they were."""
    with Pair(DEVICE, depth=16) as pair:
        source, target = pair.a.memory(8), pair.b.memory(8)
        for _ in range(20):
            count = rng.randint(1, 15)
            for wr_id in range(count):
                pair.b.post_recv([sge(target)], wr_id)
                pair.a.post_send(e.IBV_WR_SEND, [sge(source)], wr_id)
            complete(pair.b.recv_cq, count)
            flushed(pair.b, 10)
            for end in (pair.a, pair.b):
                end.move(e.IBV_QPS_RESET)
            empty(pair.b.recv_cq)
            empty(pair.a.send_cq)
            pair.connect()


def rings_over_fork(rng):
    """A child shares the pages of the rings with its parent, which keeps all of them."""
    with Pair(DEVICE) as pair:
        source, target = pair.a.memory(64), pair.b.memory(64)
        wait, end = os.pipe()
        child = os.fork()
        if not child:
            os.close(end)
            os.read(wait, 1)
            os._exit(0)
        try:
            for _ in range(200):
                data = rng.randbytes(64)
                source.write(data, 64)
                pair.b.post_recv([sge(target)])
                pair.a.post_send(e.IBV_WR_SEND, [sge(source)])
                complete(pair.a.send_cq)
                complete(pair.b.recv_cq)
                ktap.same_bytes(target.read(64, 0), data, "message")
        finally:
            os.close(end)
            os.close(wait)
            os.waitpid(child, 0)


def more_qps_than_virtqueues(rng):
    """More QPs than there are virtqueues, and traffic on the last as on the first."""
    # A pair takes two QPs and four CQs; the kernel has some of its own.
    count = min(200, DEVICE.attr.max_qp // 2 - 1, DEVICE.attr.max_cq // 4 - 1)
    pairs = [Pair(DEVICE, depth=4, max_sge=1) for _ in range(count)]
    try:
        for pair in pairs:
            source, target = pair.a.memory(8, data=rng.randbytes(8)), pair.b.memory(8)
            pair.a.post_send(e.IBV_WR_RDMA_WRITE, [sge(source)], remote=remote(target))
            complete(pair.a.send_cq)
            ktap.same_bytes(target.read(8, 0), source.read(8, 0), "memory")
    finally:
        for pair in pairs:
            pair.__exit__(None)


if rings():
    ktap.run([inline_data, inline_limits, inline_data_unasked, inline_data_by_trial, resize_under_traffic,
              resized_cq_stays_armed, destroyed_qp_leaves_no_completion, reset_qp_leaves_no_completion, rings_over_fork,
              more_qps_than_virtqueues])
else:
    ktap.skip_all(f"{DEVICE.name} has no rings")
