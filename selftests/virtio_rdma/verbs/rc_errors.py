#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""RC errors: each kind of bad request ends in the completion status, QP state
or error number that IBA and the verbs API give it, and in nothing else."""

import ctypes
import errno
import os
import struct

import abi
import ktap
import uverbs
from rc import (ALL_ACCESS, CQ, MR, PD, PORT, QP, SGE, SIGNALED, Endpoint, Pair, PyverbsError, QPCap,
                QPInitAttr, complete, e, empty, fails_with, open_device, pointer, poll, remote, sge,
                status_name)
from rings import CQ_HEAD, CqRing, QpRings

DEVICE = open_device()
WRITE, READ, SEND = e.IBV_WR_RDMA_WRITE, e.IBV_WR_RDMA_READ, e.IBV_WR_SEND
CAS, FAA = e.IBV_WR_ATOMIC_CMP_AND_SWP, e.IBV_WR_ATOMIC_FETCH_AND_ADD
SIZE = 4096
ADDRESSES = 1 << 64
# Where kernels are: of x86-64 and arm64, their linear map and their text; of user-mode Linux.
KERNEL_ADDRESSES = (0xffff888000001000, 0xffffffff81000000, 0xffff000000001000, 0x60001000)
# struct ibv_mr: context, pd, addr, length, handle, lkey, rkey.
IBV_MR = struct.Struct("4Q3I4x")
LIBIBVERBS = ctypes.CDLL("libibverbs.so.1", use_errno=True)
LIBIBVERBS.ibv_reg_mr_iova2.restype = ctypes.c_void_p
LIBIBVERBS.ibv_reg_mr_iova2.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64,
                                        ctypes.c_uint)
LIBIBVERBS.ibv_dereg_mr.argtypes = (ctypes.c_void_p,)
TO_RTR = (e.IBV_QP_STATE | e.IBV_QP_AV | e.IBV_QP_PATH_MTU | e.IBV_QP_DEST_QPN | e.IBV_QP_RQ_PSN |
          e.IBV_QP_MAX_DEST_RD_ATOMIC | e.IBV_QP_MIN_RNR_TIMER)


class Elsewhere:
    """An MR over the first bytes of another one, whose requests name them by other addresses."""

    def __init__(self, region, iova, length, access=ALL_ACCESS):
        def is_region(raw):
            return IBV_MR.unpack(raw)[2:4] + IBV_MR.unpack(raw)[5:] == (
                region.buf, region.length, region.lkey, region.rkey)
        at = pointer(region, IBV_MR.size, is_region)
        pd = IBV_MR.unpack(ctypes.string_at(at, IBV_MR.size))[1]
        self.mr = LIBIBVERBS.ibv_reg_mr_iova2(pd, region.buf, length, iova, access)
        if not self.mr:
            raise OSError(ctypes.get_errno(), "ibv_reg_mr_iova2")
        *_, self.lkey, self.rkey = IBV_MR.unpack(ctypes.string_at(self.mr, IBV_MR.size))

    def close(self):
        """Deregisters it."""
        ktap.equal(LIBIBVERBS.ibv_dereg_mr(self.mr), 0, "ibv_dereg_mr")


def requester_fails(pair, status, opcode, sges, **options):
    """Posts a request that must fail, and one behind it that must be flushed."""
    pair.a.post_send(opcode, sges, wr_id=1, **options)
    # This request has no data, so that it harms nothing if it overtakes the failure.
    pair.a.post_send(WRITE, [], wr_id=2, remote=(0, 0))
    ktap.equal([(wc.wr_id, status_name(wc.status)) for wc in poll(pair.a.send_cq, 2)],
               [(1, status_name(status)), (2, "WR_FLUSH_ERR")], "send completions")
    ktap.equal(pair.a.state(), e.IBV_QPS_ERR, "requester's state")
    empty(pair.a.send_cq)


def operands(opcode):
    """Returns the operands of an atomic. Those of compare and swap would swap."""
    return {CAS: (0, 1), FAA: (1, 0)}.get(opcode)


def unharmed(region, content):
    ktap.same_bytes(region.read(len(content), 0), content, "memory")


# rxe reports a SEND or WRITE that it cannot read as flushed.
LOCAL_OPCODES = (READ,) if DEVICE.is_rxe else (SEND, WRITE, READ, CAS, FAA)


def local_error(rng, make_sge, opcodes=LOCAL_OPCODES):
    """A request whose local memory is wrong: LOC_PROT_ERR, and the peer is not touched."""
    for opcode in opcodes:
        with Pair(DEVICE) as pair:
            content = rng.randbytes(2 * SIZE)
            target = pair.b.memory(2 * SIZE, data=content)
            pair.b.post_recv([sge(target)])
            requester_fails(pair, e.IBV_WC_LOC_PROT_ERR, opcode, [make_sge(pair)],
                            remote=remote(target), atomic=operands(opcode))
            unharmed(target, content)
            empty(pair.b.recv_cq)


def unknown_lkey(rng):
    def make(pair):
        region = pair.a.memory(8)
        return SGE(region.buf, 8, region.lkey ^ 0xff00)
    local_error(rng, make)


def stale_lkey(rng):
    def make(pair):
        region = MR(pair.a.pd, 8, ALL_ACCESS)
        key, address = region.lkey, pair.a.memory(8).buf
        region.close()
        return SGE(address, 8, key)
    local_error(rng, make)


def lkey_of_another_pd(rng):
    def make(pair):
        return sge(pair.a.memory(8, pd=pair.b.pd))
    local_error(rng, make)


def local_range(rng):
    """Addresses one byte before and one byte behind the MR, and around the end of the address space."""
    for start, length in ((-1, 8), (SIZE - 7, 8), (0, SIZE + 1), (1 << 40, 8)):
        def make(pair, start=start, length=length):
            region = pair.a.memory(SIZE)
            return SGE(region.buf + start, length, region.lkey)
        local_error(rng, make, LOCAL_OPCODES if length == 8 else LOCAL_OPCODES[:3])
    local_error(rng, lambda pair: SGE((1 << 64) - 4, 8, pair.a.memory(SIZE).lkey))


def read_into_memory_without_local_write(rng):
    content = rng.randbytes(64)
    with Pair(DEVICE) as pair:
        region = pair.a.memory(64, access=0, data=content)
        target = pair.b.memory(64)
        requester_fails(pair, e.IBV_WC_LOC_PROT_ERR, READ, [sge(region)], remote=remote(target))
        unharmed(region, content)


def remote_error(rng, make_remote, opcodes=(WRITE, READ, CAS, FAA), access=ALL_ACCESS,
                 status=e.IBV_WC_REM_ACCESS_ERR, qp_access=ALL_ACCESS):
    """A request whose remote memory is wrong: REM_ACCESS_ERR, nothing is read or written."""
    for opcode in opcodes:
        with Pair(DEVICE, b={"qp_access_flags": qp_access}) as pair:
            content = rng.randbytes(SIZE)
            target = pair.b.memory(SIZE, access=access, data=content)
            mine = rng.randbytes(8)
            local = pair.a.memory(8, data=mine)
            requester_fails(pair, status, opcode, [sge(local)], remote=make_remote(pair, target),
                            atomic=operands(opcode))
            unharmed(target, content)
            if opcode != WRITE:
                unharmed(local, mine)


def unknown_rkey(rng):
    remote_error(rng, lambda _pair, target: (target.buf, target.rkey ^ 0xff00))


def stale_rkey(rng):
    def make(pair, target):
        region = MR(pair.b.pd, SIZE, ALL_ACCESS)
        key = region.rkey
        region.close()
        return target.buf, key
    remote_error(rng, make)


def rkey_of_another_pd(rng):
    def make(pair, target):
        region = MR(pair.a.pd, SIZE, ALL_ACCESS, address=target.buf)
        pair.a.mrs.append(region)
        return remote(region)
    remote_error(rng, make)


def remote_range(rng):
    for offset in (-8, SIZE, SIZE + (1 << 32), 1 << 62):
        remote_error(rng, lambda _pair, target, offset=offset: ((target.buf + offset) % (1 << 64),
                                                                target.rkey))
    for offset in (-1, SIZE - 7):
        remote_error(rng, lambda _pair, target, offset=offset: remote(target, offset), (WRITE, READ))


def regions_that_reach_the_last_address(_rng):
    """No MR has the last address there is: the end of its addresses is a number of 64 bits."""
    end = Endpoint(DEVICE)
    region = end.memory(4 * SIZE)
    for pages in (1, 2):
        for more in (0, 1, SIZE):
            fails_with(errno.EINVAL, Elsewhere, region, ADDRESSES - pages * SIZE, pages * SIZE + more)
    Elsewhere(region, ADDRESSES - SIZE, SIZE - 1).close()
    end.close()


def around_the_last_address(rng):
    """Requests in an MR whose addresses end where there are no more: what fits there works, and what goes on behind it,
    at the address 0 or in the MR's own first bytes, does not."""
    low, size = ADDRESSES - 2 * SIZE, 2 * SIZE - 1
    for opcode, at, length, works in (
            (WRITE, -9, 8, True), (READ, -9, 8, True), (CAS, -16, 8, True), (FAA, -16, 8, True),
            (WRITE, -8, 8, False), (READ, -8, 8, False), (CAS, -8, 8, False), (FAA, -8, 8, False),
            (WRITE, -1, 1, False), (READ, -1, 1, False), (WRITE, -1, 4 * SIZE, False), (READ, -1, 4 * SIZE, False),
            (WRITE, -2 * SIZE, 3 * SIZE, False), (READ, -2 * SIZE, 3 * SIZE, False)):
        with Pair(DEVICE) as pair:
            content = rng.randbytes(4 * SIZE)
            target, local = pair.b.memory(4 * SIZE, data=content), pair.a.memory(4 * SIZE)
            high = Elsewhere(target, low, size)
            options = {"remote": (ADDRESSES + at, high.rkey), "atomic": operands(opcode)}
            sges = [sge(local, 0, length)]
            if works:
                pair.a.post_send(opcode, sges, **options)
                complete(pair.a.send_cq)
            else:
                requester_fails(pair, e.IBV_WC_REM_ACCESS_ERR, opcode, sges, **options)
                unharmed(target, content)
                unharmed(local, bytes(4 * SIZE))
            high.close()


def local_memory_around_the_last_address(rng):
    """The same for memory that a request sends from, reads into or receives into."""
    low, size = ADDRESSES - 2 * SIZE, 2 * SIZE - 1
    for at, length in ((-8, 8), (-1, 1), (-1, 2 * SIZE), (-2 * SIZE, 3 * SIZE)):
        for opcode in (SEND, WRITE, READ):
            with Pair(DEVICE) as pair:
                content = rng.randbytes(4 * SIZE)
                target, local = pair.b.memory(4 * SIZE, data=content), pair.a.memory(4 * SIZE, data=content)
                high = Elsewhere(local, low, size)
                pair.b.post_recv([sge(target)])
                requester_fails(pair, e.IBV_WC_LOC_PROT_ERR, opcode, [SGE(ADDRESSES + at, length, high.lkey)],
                                remote=remote(target))
                unharmed(target, content)
                unharmed(local, content)
                high.close()
        with Pair(DEVICE) as pair:
            inbox, source = pair.b.memory(4 * SIZE, data=content), pair.a.memory(length)
            high = Elsewhere(inbox, low, size)
            pair.b.post_recv([SGE(ADDRESSES + at, length, high.lkey)])
            pair.a.post_send(SEND, [sge(source)])
            complete(pair.b.recv_cq, status=e.IBV_WC_LOC_PROT_ERR)
            complete(pair.a.send_cq, status=e.IBV_WC_REM_OP_ERR)
            high.close()


def memory_without_remote_access(rng):
    """An MR grants nothing that it was not registered for."""
    for opcode, granted in ((WRITE, e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_ATOMIC),
                            (READ, e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_ATOMIC),
                            (CAS, e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ),
                            (FAA, e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ)):
        remote_error(rng, lambda _pair, target: remote(target), (opcode,),
                     access=e.IBV_ACCESS_LOCAL_WRITE | granted)


def qp_without_remote_access(rng):
    """A QP grants nothing that its qp_access_flags do not (IBA table 'R_Key and access')."""
    for opcode, granted in ((WRITE, e.IBV_ACCESS_REMOTE_READ), (READ, e.IBV_ACCESS_REMOTE_WRITE),
                            (CAS, e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ)):
        remote_error(rng, lambda _pair, target: remote(target), (opcode,), qp_access=granted,
                     status=e.IBV_WC_REM_INV_REQ_ERR)


def unaligned_atomic(rng):
    DEVICE.skip_on_rxe("rxe refuses to post it")
    for offset in (1, 4, 7):
        remote_error(rng, lambda _pair, target, offset=offset: remote(target, offset), (CAS, FAA),
                     status=e.IBV_WC_REM_INV_REQ_ERR)


def short_receive(rng):
    """A message that is longer than the receive request, by one byte and by much."""
    DEVICE.skip_on_rxe("rxe calls it a malformed receive request")
    for room, length in ((63, 64), (0, 1), (100, 100000)):
        with Pair(DEVICE) as pair:
            content = rng.randbytes(room + 256)
            target = pair.b.memory(room + 256, data=content)
            source = pair.a.memory(length, data=rng.randbytes(length))
            pair.b.post_recv([sge(target, 0, room)] if room else [], wr_id=7)
            requester_fails(pair, e.IBV_WC_REM_INV_REQ_ERR, SEND, [sge(source)])
            wc = complete(pair.b.recv_cq, status=e.IBV_WC_LOC_LEN_ERR)[0]
            ktap.equal(wc.wr_id, 7, "wr_id")
            ktap.same_bytes(target.read(256, room), content[room:], "bytes behind the buffer")


def receive_into_wrong_memory(_rng):
    """The receiver's own mistake: LOC_PROT_ERR there, REM_OP_ERR at the sender."""
    DEVICE.skip_on_rxe("rxe completes the receive with LOC_QP_OP_ERR")
    makers = (lambda end: SGE(end.memory(65).buf, 65, 0xdead00),
              lambda end: sge(end.memory(65, access=0)),
              lambda end: sge(end.memory(64), 0, 65))
    for make in makers:
        with Pair(DEVICE) as pair:
            source = pair.a.memory(65)
            pair.b.post_recv([make(pair.b)])
            pair.a.post_send(SEND, [sge(source)])
            complete(pair.b.recv_cq, status=e.IBV_WC_LOC_PROT_ERR)
            complete(pair.a.send_cq, status=e.IBV_WC_REM_OP_ERR)


def rnr_retries_exhausted(_rng):
    with Pair(DEVICE, a={"rnr_retry": 2}) as pair:
        source = pair.a.memory(64)
        requester_fails(pair, e.IBV_WC_RNR_RETRY_EXC_ERR, SEND, [sge(source)])


def rnr_retried(_rng):
    """With rnr_retry 7 the sender retries without an end: a receive that is posted late gets the message."""
    with Pair(DEVICE, a={"rnr_retry": 7}) as pair:
        source, target = pair.a.memory(64, data=b"late" * 16), pair.b.memory(64)
        pair.a.post_send(SEND, [sge(source)])
        empty(pair.a.send_cq)
        pair.b.post_recv([sge(target)])
        complete(pair.a.send_cq)
        complete(pair.b.recv_cq)
        ktap.same_bytes(target.read(64, 0), b"late" * 16, "message")


def retries_exceeded(_rng):
    """The peer does not answer: its QP is in RESET, or does not exist any more."""
    for gone in (False, True):
        peer = Endpoint(DEVICE)
        end = Endpoint(DEVICE)
        end.connect(peer.qp.qp_num, timeout=8, retry_cnt=1)
        if gone:
            peer.close()
        source = end.memory(64)
        end.post_send(WRITE, [sge(source)], remote=(0, 0))
        complete(end.send_cq, status=e.IBV_WC_RETRY_EXC_ERR)
        ktap.equal(end.state(), e.IBV_QPS_ERR, "state")
        end.close()
        if not gone:
            peer.close()


def flush_on_error(_rng):
    """ERR flushes what is posted and what is posted later, in order (IBA 10.3.1.6)."""
    with Pair(DEVICE) as pair:
        target, source = pair.b.memory(64), pair.b.memory(64)
        for wr_id in range(10):
            pair.b.post_recv([sge(target)], wr_id)
        pair.b.move(e.IBV_QPS_ERR)
        for wr_id in range(10, 20):
            pair.b.post_recv([sge(target)], wr_id)
            pair.b.post_send(SEND, [sge(source)], wr_id, flags=SIGNALED if wr_id % 2 else 0)
        ktap.equal([wc.wr_id for wc in complete(pair.b.recv_cq, 20, e.IBV_WC_WR_FLUSH_ERR)],
                   list(range(20)), "receive requests")
        ktap.equal([wc.wr_id for wc in complete(pair.b.send_cq, 10, e.IBV_WC_WR_FLUSH_ERR)],
                   list(range(10, 20)), "send requests, signalled or not")


def reset_and_connect_again(rng):
    """A QP in ERR works again after RESET, and remembers nothing of its requests."""
    with Pair(DEVICE) as pair:
        source, target = pair.a.memory(64, data=rng.randbytes(64)), pair.b.memory(64)
        for _ in range(5):
            pair.b.post_recv([sge(target)], wr_id=1)
            pair.a.post_send(WRITE, [sge(source)], remote=(target.buf, target.rkey ^ 0xff00))
            complete(pair.a.send_cq, status=e.IBV_WC_REM_ACCESS_ERR)
            for end in (pair.a, pair.b):
                end.move(e.IBV_QPS_RESET)
                ktap.equal(end.state(), e.IBV_QPS_RESET, "state")
            poll_all(pair.b.recv_cq)
            pair.connect()
            pair.b.post_recv([sge(target)], wr_id=2)
            pair.a.post_send(SEND, [sge(source)])
            complete(pair.a.send_cq)
            ktap.equal(complete(pair.b.recv_cq)[0].wr_id, 2, "wr_id")
            ktap.same_bytes(target.read(64, 0), source.read(64, 0), "message")
            target.write(bytes(64), 64)


def poll_all(cq):
    while cq.poll(16)[0]:
        pass


def post_in_the_wrong_state(_rng):
    """Sends want RTS, receives want INIT (ibv_post_send(3), IBA table 91)."""
    end = Endpoint(DEVICE)
    region = end.memory(64)
    post_recv = (end.post_recv, [sge(region)])
    post_send = (end.post_send, SEND, [sge(region)])
    attr = end.attributes(end.qp.qp_num)
    fails_with(errno.EINVAL, *post_recv)
    fails_with(errno.EINVAL, *post_send)
    end.qp.to_init(attr)
    end.post_recv([sge(region)])
    fails_with(errno.EINVAL, *post_send)
    end.qp.to_rtr(attr)
    end.post_recv([sge(region)])
    fails_with(errno.EINVAL, *post_send)
    end.qp.to_rts(attr)
    end.post_send(SEND, [sge(region)])
    complete(end.send_cq)
    end.close()


def too_many_sges(_rng):
    with Pair(DEVICE, max_sge=4) as pair:
        region = pair.a.memory(64)
        more = pair.a.init_attr.cap.max_send_sge + 1
        fails_with(errno.EINVAL, pair.a.post_send, SEND, [sge(region)] * more)
        more = pair.a.init_attr.cap.max_recv_sge + 1
        fails_with(errno.EINVAL, pair.a.post_recv, [sge(region)] * more)
        empty(pair.a.send_cq)


def inline_data_by_address(_rng):
    """A program hands the kernel a send with inline data, which no library does, and names memory of the kernel. It is
    refused, nothing is sent, and the QP goes on."""
    DEVICE.skip_on_rxe("its objects have driver data of their own")
    verbs = uverbs.Uverbs(DEVICE.name)
    has_rings = verbs.path != abi.UDATA_PATH_KERNEL
    cq_ring, qp_rings = CqRing(16), QpRings()
    pd = verbs.alloc_pd()
    cq, _ = verbs.create_cq(16, cq_ring.request() if has_rings else b"")
    qp, number, _ = verbs.create_qp(pd, cq, qp_rings.request() if has_rings else b"")
    gid = bytes.fromhex(DEVICE.context.query_gid(PORT, DEVICE.gid.gid_index).gid.replace(":", ""))
    verbs.connect(qp, gid, DEVICE.gid.gid_index, number, DEVICE.port.active_mtu)
    memory = uverbs.zeros(SIZE)
    at = uverbs.address(memory)
    _, lkey, rkey = verbs.reg_mr(pd, at, SIZE)
    for opcode in (abi.IB_UVERBS_WR_SEND, abi.IB_UVERBS_WR_RDMA_WRITE):
        for start in KERNEL_ADDRESSES:
            request = abi.IbUverbsSendWr(num_sge=1, opcode=opcode, send_flags=abi.SEND_INLINE | abi.SEND_SIGNALED)
            request.wr.rdma.remote_addr, request.wr.rdma.rkey = at, rkey
            fails_with(errno.EOPNOTSUPP if has_rings else errno.EINVAL, verbs.post, uverbs.POST_SEND, qp, [request],
                       [(start, 8, lkey)])
    if has_rings:
        ktap.same_bytes(bytes(cq_ring.memory)[CQ_HEAD:], bytes(len(cq_ring.memory) - CQ_HEAD), "completions")
    else:
        goes_on(verbs, qp, cq, (at, 8, lkey))
    ktap.same_bytes(bytes(memory), bytes(SIZE), "memory")
    verbs.close()
    with Pair(DEVICE) as pair:
        pair.a.post_send(WRITE, [], remote=(0, 0))
        complete(pair.a.send_cq)


def goes_on(verbs, qp, cq, piece):
    """Sends a message from a piece of memory to itself, by commands. Fails the test if there was another one."""
    ktap.equal(verbs.poll_cq(cq), 0, "completions")
    verbs.post(uverbs.POST_RECV, qp, [abi.IbUverbsRecvWr(num_sge=1)], [piece])
    verbs.post(uverbs.POST_SEND, qp, [abi.IbUverbsSendWr(num_sge=1, opcode=abi.IB_UVERBS_WR_SEND,
                                                         send_flags=abi.SEND_SIGNALED)], [piece])
    for _ in range(2):
        while not verbs.poll_cq(cq):
            os.sched_yield()
    ktap.equal(verbs.poll_cq(cq), 0, "completions")


def wrong_transitions(_rng):
    """States that cannot follow each other."""
    end = Endpoint(DEVICE)
    attr = end.attributes(end.qp.qp_num)
    for state in (e.IBV_QPS_RTR, e.IBV_QPS_RTS, e.IBV_QPS_SQD):
        attr.qp_state = state
        fails_with(errno.EINVAL, end.qp.modify, attr, e.IBV_QP_STATE)
    end.qp.to_init(attr)
    attr.qp_state = e.IBV_QPS_RTR
    fails_with(errno.EINVAL, end.qp.modify, attr, e.IBV_QP_STATE)
    end.qp.to_rtr(attr)
    attr.qp_state = e.IBV_QPS_INIT
    fails_with(errno.EINVAL, end.qp.modify, attr, e.IBV_QP_STATE)
    ktap.equal(end.state(), e.IBV_QPS_RTR, "state")
    end.close()


def attributes_out_of_range(_rng):
    """No attribute of a refused modify takes effect."""
    DEVICE.skip_on_rxe("rxe takes any path MTU")
    end = Endpoint(DEVICE)
    end.qp.to_init(end.attributes(end.qp.qp_num))
    for wrong in ({"path_mtu": 0}, {"path_mtu": 6}, {"max_dest_rd_atomic": 255}):
        attr = end.attributes(end.qp.qp_num, **wrong)
        attr.qp_state = e.IBV_QPS_RTR
        fails_with(errno.EINVAL, end.qp.modify, attr, TO_RTR)
        ktap.equal(end.state(), e.IBV_QPS_INIT, "state")
    end.close()


def query_what_was_set(_rng):
    values = {"path_mtu": 2, "rq_psn": 0xabcdef, "sq_psn": 0x13579b, "min_rnr_timer": 9, "timeout": 11,
              "retry_cnt": 3, "rnr_retry": 4, "qp_access_flags": e.IBV_ACCESS_REMOTE_WRITE}
    with Pair(DEVICE, a=values) as pair:
        attr, init = pair.a.qp.query(0x1fffff)
        values["dest_qp_num"] = pair.b.qp.qp_num
        values["qp_state"] = e.IBV_QPS_RTS
        for name, value in values.items():
            ktap.equal(getattr(attr, name), value, name)
        cap = pair.a.init_attr.cap
        for name in ("max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge"):
            ktap.equal(getattr(init.cap, name), getattr(cap, name), name)


def limits_of_the_device(_rng):
    """What is beyond a limit is refused; what a limit allows works."""
    limit = DEVICE.attr.max_qp_wr
    end = Endpoint(DEVICE, depth=8, max_sge=DEVICE.attr.max_sge)
    end.close()
    for options in ({"depth": limit + 1}, {"max_sge": DEVICE.attr.max_sge + 1}):
        refused(errno.EINVAL, **options)


def refused(number, depth=8, max_sge=1):
    """Fails the test unless a QP of this size is refused with this error."""
    pd = PD(DEVICE.context)
    cq = CQ(DEVICE.context, 8)
    cap = QPCap(max_send_wr=depth, max_recv_wr=depth, max_send_sge=max_sge, max_recv_sge=max_sge)
    try:
        QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap))
    except PyverbsError as error:
        if os.strerror(number) not in str(error):
            raise AssertionError(f"{error}, expected {errno.errorcode[number]}") from error
    else:
        raise AssertionError(f"depth {depth}, {max_sge} SGEs accepted")
    finally:
        cq.close()
        pd.close()


def bad_memory_registration(_rng):
    """Remote rights that change memory want local ones; memory must be there."""
    pd = PD(DEVICE.context)
    for access, length, address in ((e.IBV_ACCESS_REMOTE_WRITE, 64, None),
                                    (e.IBV_ACCESS_REMOTE_ATOMIC, 64, None),
                                    (ALL_ACCESS, 4096, 0x1000)):
        try:
            MR(pd, length, access, address=address)
        except PyverbsError:
            continue
        raise AssertionError(f"access {access:#x}, address {address} accepted")
    pd.close()


def region_of_no_bytes(_rng):
    """A region of no bytes has keys, which give access to nothing, and which requests of no bytes may name (C9-88)."""
    with Pair(DEVICE) as pair:
        near, local = pair.b.memory(64, data=bytes(64)), pair.a.memory(64)
        for region, pd in ((near, pair.b.pd), (local, pair.a.pd)):
            MR(pd, 0, ALL_ACCESS, address=region.buf).close()
        region = MR(pair.b.pd, 0, ALL_ACCESS, address=near.buf + 8)
        for opcode in (WRITE, READ):
            pair.a.post_send(opcode, [SGE(local.buf, 0, local.lkey)], remote=(near.buf + 8, region.rkey))
            complete(pair.a.send_cq)
        requester_fails(pair, e.IBV_WC_REM_ACCESS_ERR, WRITE, [SGE(local.buf, 1, local.lkey)],
                        remote=(near.buf + 8, region.rkey))
        unharmed(near, bytes(64))
        region.close()


def immediate_with_a_bad_key(rng):
    """A WRITE with immediate data whose key is bad completes its receive with an error (IBA 11.6.2, Local Access)."""
    with Pair(DEVICE) as pair:
        content = rng.randbytes(64)
        target, inbox = pair.b.memory(64, data=content), pair.b.memory(8)
        pair.b.post_recv([sge(inbox)], wr_id=5)
        requester_fails(pair, e.IBV_WC_REM_ACCESS_ERR, e.IBV_WR_RDMA_WRITE_WITH_IMM, [sge(pair.a.memory(64))],
                        remote=(target.buf, target.rkey ^ 0xff00))
        # rxe has the status that the requester sees.
        status = e.IBV_WC_REM_ACCESS_ERR if DEVICE.is_rxe else e.IBV_WC_LOC_ACCESS_ERR
        wc, = complete(pair.b.recv_cq, status=status)
        ktap.equal(wc.wr_id, 5, "receive")
        unharmed(target, content)


def unexpected_psn(rng):
    """A message with another PSN than the expected one is retried in vain (IBA 9.7.4.1)."""
    for psn in (0x123455, 0x123457):
        with Pair(DEVICE, b={"rq_psn": psn}) as pair:
            content = rng.randbytes(64)
            target = pair.b.memory(64, data=content)
            requester_fails(pair, e.IBV_WC_RETRY_EXC_ERR, WRITE, [sge(pair.a.memory(64))], remote=remote(target))
            ktap.equal(pair.b.state(), e.IBV_QPS_RTS, "responder's state")
            unharmed(target, content)


def one_failing_qp_leaves_others_alone(rng):
    with Pair(DEVICE) as good, Pair(DEVICE) as bad:
        source, target = good.a.memory(SIZE, data=rng.randbytes(SIZE)), good.b.memory(SIZE)
        local = bad.a.memory(8)
        bad.a.post_send(WRITE, [sge(local)], remote=(target.buf, 0xdead00))
        good.a.post_send(WRITE, [sge(source)], remote=remote(target))
        complete(bad.a.send_cq, status=e.IBV_WC_REM_ACCESS_ERR)
        complete(good.a.send_cq)
        ktap.same_bytes(target.read(SIZE, 0), source.read(SIZE, 0), "memory")


ktap.run([unknown_lkey, stale_lkey, lkey_of_another_pd, local_range,
          read_into_memory_without_local_write, unknown_rkey, stale_rkey, rkey_of_another_pd,
          remote_range, regions_that_reach_the_last_address, around_the_last_address,
          local_memory_around_the_last_address, memory_without_remote_access, qp_without_remote_access, unaligned_atomic,
          short_receive, receive_into_wrong_memory, rnr_retries_exhausted, rnr_retried,
          retries_exceeded, flush_on_error, reset_and_connect_again, post_in_the_wrong_state,
          too_many_sges, inline_data_by_address, wrong_transitions, attributes_out_of_range, query_what_was_set,
          limits_of_the_device, bad_memory_registration, region_of_no_bytes, immediate_with_a_bad_key,
          unexpected_psn, one_failing_qp_leaves_others_alone])
