#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Unreliable connections: the operations that they have, what is dropped
without a word (IBA 9.8.3), and errors of the sender, which end in SQE."""

import errno

import ktap
from rc import (ALL_ACCESS, SGE, Pair, complete, e, empty, fails_with, open_device, poll, remote, sge,
                status_name)

DEVICE = open_device()
SEND, SEND_IMM = e.IBV_WR_SEND, e.IBV_WR_SEND_WITH_IMM
WRITE, WRITE_IMM = e.IBV_WR_RDMA_WRITE, e.IBV_WR_RDMA_WRITE_WITH_IMM
SIZES = (1, 255, 4096, 4097, 65536, 1 << 20)


def uc_pair(**options):
    return Pair(DEVICE, qp_type=e.IBV_QPT_UC, **options)


def transfer(rng, opcode):
    """Messages of every size arrive at their place, and change no other."""
    with uc_pair() as pair:
        for size in SIZES:
            data, imm = rng.randbytes(size), rng.getrandbits(32)
            source = pair.a.memory(size, data=data)
            target = pair.b.memory(size + 64, data=bytes(size + 64))
            takes_receive = opcode != WRITE
            if takes_receive:
                pair.b.post_recv([sge(target)], wr_id=size)
            pair.a.post_send(opcode, [sge(source)], remote=remote(target), imm=imm)
            complete(pair.a.send_cq)
            if takes_receive:
                wc = complete(pair.b.recv_cq)[0]
                ktap.equal((wc.wr_id, wc.byte_len), (size, size), "receive")
                if opcode != SEND:
                    ktap.equal((wc.wc_flags & e.IBV_WC_WITH_IMM != 0, wc.imm_data), (True, imm), "imm")
            ktap.same_bytes(target.read(size + 64, 0), data + bytes(64), f"{size} bytes")
        empty(pair.b.recv_cq)


def send(rng):
    transfer(rng, SEND)


def send_with_imm(rng):
    transfer(rng, SEND_IMM)


def write(rng):
    transfer(rng, WRITE)


def write_with_imm(rng):
    transfer(rng, WRITE_IMM)


def still_works(pair, rng):
    """Fails the test unless data flows from a to b, and b's QP is in RTS."""
    data = rng.randbytes(64)
    source, target = pair.a.memory(64, data=data), pair.b.memory(64)
    pair.b.post_recv([sge(target)], wr_id=99)
    pair.a.post_send(SEND, [sge(source)])
    complete(pair.a.send_cq)
    ktap.equal(complete(pair.b.recv_cq)[0].wr_id, 99, "wr_id")
    ktap.same_bytes(target.read(64, 0), data, "message")
    ktap.equal(pair.b.state(), e.IBV_QPS_RTS, "responder's state")


def no_receive(rng):
    with uc_pair() as pair:
        source, target = pair.a.memory(64), pair.b.memory(64)
        for opcode in (SEND, SEND_IMM, WRITE_IMM):
            pair.a.post_send(opcode, [sge(source)], remote=remote(target))
            complete(pair.a.send_cq)
        empty(pair.b.recv_cq)
        still_works(pair, rng)


def receive_too_short(rng):
    """The message is dropped; the receive is there for the next one."""
    DEVICE.skip_on_rxe("rxe fails the receive")
    with uc_pair() as pair:
        source, target = pair.a.memory(128), pair.b.memory(64)
        pair.b.post_recv([sge(target)], wr_id=5)
        pair.a.post_send(SEND, [sge(source)])
        complete(pair.a.send_cq)
        empty(pair.b.recv_cq)
        pair.a.post_send(SEND, [sge(source, 0, 64)])
        complete(pair.a.send_cq)
        ktap.equal(complete(pair.b.recv_cq)[0].wr_id, 5, "wr_id")
        still_works(pair, rng)


def refused_writes(rng):
    """Nothing is written with a wrong key, outside of the MR, and to an MR or a QP without remote write."""
    read_only = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ
    for access, qp_access, make in (
            (ALL_ACCESS, ALL_ACCESS, lambda mr: (mr.buf, mr.rkey ^ 0xff00)),
            (ALL_ACCESS, ALL_ACCESS, lambda mr: (mr.buf + 1, mr.rkey)),
            (read_only, ALL_ACCESS, remote),
            (ALL_ACCESS, read_only, remote)):
        with uc_pair(b={"qp_access_flags": qp_access}) as pair:
            content = rng.randbytes(64)
            target = pair.b.memory(64, access=access, data=content)
            source = pair.a.memory(64, data=rng.randbytes(64))
            pair.a.post_send(WRITE, [sge(source)], remote=make(target))
            complete(pair.a.send_cq)
            ktap.same_bytes(target.read(64, 0), content, "memory")
            still_works(pair, rng)


def peer_gone(rng):
    """The peer's QP is gone: the sender is not told."""
    with uc_pair() as pair:
        source = pair.a.memory(64)
        pair.b.move(e.IBV_QPS_RESET)
        for opcode in (SEND, WRITE):
            pair.a.post_send(opcode, [sge(source)], remote=(0, 0))
            complete(pair.a.send_cq)
        pair.b.connect(pair.a.qp.qp_num)
        still_works(pair, rng)


def sender_errors(rng):
    """A wrong local key stops the send queue: SQE. Receives go on, and RTS brings it back."""
    DEVICE.skip_on_rxe("rxe goes into ERR")
    with uc_pair() as pair:
        region = pair.a.memory(64)
        for _ in range(3):
            pair.a.post_send(SEND, [SGE(region.buf, 64, region.lkey ^ 0xff00)], wr_id=1)
            wcs = poll(pair.a.send_cq, 1)
            pair.a.post_send(SEND, [sge(region)], wr_id=2)
            wcs += poll(pair.a.send_cq, 1)
            ktap.equal([(wc.wr_id, status_name(wc.status)) for wc in wcs],
                       [(1, "LOC_PROT_ERR"), (2, "WR_FLUSH_ERR")], "send completions")
            ktap.equal(pair.a.state(), e.IBV_QPS_SQE, "state")
            pair.a.post_recv([sge(region)], wr_id=3)
            pair.b.post_send(SEND, [sge(pair.b.memory(64))])
            complete(pair.b.send_cq)
            ktap.equal(complete(pair.a.recv_cq)[0].wr_id, 3, "a receive in SQE")
            pair.a.move(e.IBV_QPS_RTS)
            still_works(pair, rng)


def operations_that_uc_lacks(rng):
    """READ and atomics are refused where they are posted, as other providers do."""
    with uc_pair() as pair:
        source, target = pair.a.memory(8), pair.b.memory(8)
        for opcode in (e.IBV_WR_RDMA_READ, e.IBV_WR_ATOMIC_CMP_AND_SWP, e.IBV_WR_ATOMIC_FETCH_AND_ADD):
            atomic = (0, 0) if opcode != e.IBV_WR_RDMA_READ else None
            fails_with(errno.EINVAL, lambda opcode=opcode, atomic=atomic: pair.a.post_send(
                opcode, [sge(source)], remote=remote(target), atomic=atomic))
        still_works(pair, rng)


ktap.run([send, send_with_imm, write, write_with_imm, no_receive, receive_too_short, refused_writes,
          peer_gone, sender_errors, operations_that_uc_lacks])
