# SPDX-License-Identifier: GPL-2.0
"""CQEs that cannot be, for hostile.py. With virtqueues the driver counts and drops them; with rings the library in
front of the program drops them. The CQEs of the kernel are the driver's in either case."""

import ctypes
import os

import abi
import ktap
import rc
from hostile_device import (ALWAYS, RINGS, SEND, WRITE, Watch, data_flows, device, honest, order, patch, poke,
                            recovers)
from rc import (CQ, MR, PD, QP, ALL_ACCESS, AHAttr, GlobalRoute, Pair, QPAttr, QPCap, QPInitAttr, complete, e, empty,
                post, remote, send_wr, sge)

CQE = abi.RingCqe if RINGS else abi.Cqe
# What a device uses of a buffer for a CQE, and what it writes into the ring of the kernel.
CQE_SIZE, RING_CQE_SIZE = ctypes.sizeof(abi.Cqe), ctypes.sizeof(abi.RingCqe)
# A CQE of the ring, but for its lap.
ONES = "ff" * (abi.RingCqe.lap.offset - 1)
MAX = 2**32 - 1


def noticed(watch, counter, times=None):
    """Fails the test unless the driver counted the CQE, which it does not see in the ring of a program."""
    if RINGS:
        watch.silent()
    else:
        watch.counted(counter, times)


def bad_cqe(counter, *write, receive=False, **what):
    """Fails the test unless a CQE that makes no sense is dropped, and the CQ goes on."""
    with Pair(device()) as pair:
        here, there = pair.a.memory(64), pair.b.memory(64)
        pair.b.post_recv([sge(there)], wr_id=7)
        watch = Watch()
        order(on="cq", times=1, write=list(write), **what)
        if receive:
            # The device writes the CQE of the receive before that of the send.
            pair.a.post_send(SEND, [sge(here)])
            complete(pair.a.send_cq)
            empty(pair.b.recv_cq)
            noticed(watch, counter, 1)
            # The device is done with the receive; later ones complete, and this one goes with the QP.
            pair.b.post_recv([sge(there)], wr_id=6)
            pair.a.post_send(SEND, [sge(here)])
            complete(pair.a.send_cq)
            ktap.equal(complete(pair.b.recv_cq)[0].wr_id, 6, "wr_id")
        else:
            pair.a.post_send(WRITE, [sge(here)], wr_id=8, remote=remote(there))
            pair.a.post_send(WRITE, [sge(here)], wr_id=9, remote=remote(there))
            # The completion of the second says that the first is done.
            ktap.equal(complete(pair.a.send_cq)[0].wr_id, 9, "wr_id")
            empty(pair.a.send_cq)
            noticed(watch, counter, 1)
        honest()
    data_flows()


def cqe_of_a_wrong_length(_rng):
    for used in (0, CQE_SIZE - 1, CQE_SIZE + 1, MAX):
        bad_cqe("bad_cqe_length", used=used)


def cqe_of_no_qp(_rng):
    for number in (0, 5, 1000, MAX):
        bad_cqe("bad_cqe_qp", patch(CQE.qp_num, number))


def cqe_of_no_work_request(_rng):
    """The index of the work request names it in a ring, and its wr_id in a virtqueue."""
    field, numbers = ((CQE.wqe_index, (5, 64, 1000, 2**31, MAX)) if RINGS else
                      (CQE.wr_id, (5, 63, 64, 1000, 2**32, 2**64 - 1)))
    for number in numbers:
        bad_cqe("bad_cqe_wr_id", patch(field, number))
        bad_cqe("bad_cqe_wr_id", patch(field, number), receive=True)


def cqe_of_an_unknown_status(_rng):
    bad_cqe("bad_cqe_status", patch(CQE.status, 0xff))
    bad_cqe("bad_cqe_status", patch(CQE.status, 0xff), receive=True)


def cqe_of_an_unknown_opcode(_rng):
    bad_cqe("bad_cqe_opcode", patch(CQE.opcode, 0xff), receive=True)


def cqe_of_the_other_kind(_rng):
    """The CQE of a receive in place of that of a send, and the reverse: the CQ is not that queue's."""
    bad_cqe("bad_cqe_qp", patch(CQE.opcode, abi.WC_RECV))
    bad_cqe("bad_cqe_qp", patch(CQE.opcode, abi.WC_SEND), receive=True)


def cqe_of_too_many_bytes(_rng):
    for number in (65, 2**31, MAX):
        bad_cqe("bad_cqe_byte_len", patch(CQE.byte_len, number), receive=True)


def cqe_of_an_error(_rng):
    """Fields that only a success has do not matter in the CQE of a work request that failed, whatever they hold."""
    wild = [patch(CQE.byte_len, MAX), patch(CQE.src_qp, MAX), patch(CQE.wc_flags, MAX), patch(CQE.pkey_index, 0xffff),
            patch(CQE.sl, 0xff), patch(CQE.port_num, 0xff), patch(CQE.vlan_id, 0xffff), patch(CQE.ex, MAX)]
    for receive in (False, True):
        watch = Watch()
        with Pair(device()) as pair:
            here, there = pair.a.memory(64), pair.b.memory(64)
            pair.b.post_recv([sge(there)], wr_id=7)
            order(on="cq", times=1, write=[patch(CQE.status, abi.WC_REM_ACCESS_ERR), *wild])
            if receive:
                pair.a.post_send(SEND, [sge(here)])
                complete(pair.a.send_cq)
            else:
                pair.a.post_send(WRITE, [sge(here)], wr_id=7, remote=remote(there))
            cq = pair.b.recv_cq if receive else pair.a.send_cq
            ktap.equal(complete(cq, 1, e.IBV_WC_REM_ACCESS_ERR)[0].wr_id, 7, "wr_id")
            honest()
        watch.silent()
    data_flows()


def cqe_again(_rng):
    """The copies of a CQE name no work request that is outstanding. A buffer that is given back twice is a copy too:
    the driver has made it available again by then."""
    for times, what in ((1, {"twice": True}), (10, {"then": [{"used": CQE_SIZE, "times": 10}]})):
        copies_of_a_cqe(times, what)
        recovers()


def copies_of_a_cqe(times, what):
    """Fails the test unless the copies of a CQE are dropped."""
    with Pair(device()) as pair:
        here, there = pair.a.memory(64), pair.b.memory(64)
        watch = Watch()
        order(on="cq", **what)
        pair.a.post_send(WRITE, [sge(here)], wr_id=1, remote=remote(there))
        ktap.equal(complete(pair.a.send_cq)[0].wr_id, 1, "wr_id")
        empty(pair.a.send_cq)
        noticed(watch, "bad_cqe_wr_id", times)
        honest()


def wrong_cqe(*write, receive=False):
    """Fails the test unless the program is told of an error of a work request of which a CQE says what cannot be."""
    with Pair(device()) as pair:
        here, there = pair.a.memory(64), pair.b.memory(64)
        pair.b.post_recv([sge(there)], wr_id=7)
        order(on="cq", write=list(write))
        if receive:
            pair.a.post_send(SEND, [sge(here)])
            complete(pair.a.send_cq)
            cq = pair.b.recv_cq
        else:
            pair.a.post_send(WRITE, [sge(here)], wr_id=7, remote=remote(there))
            cq = pair.a.send_cq
        ktap.equal(complete(cq, 1, e.IBV_WC_GENERAL_ERR)[0].wr_id, 7, "wr_id")
        honest()
    data_flows()


def wrong_cqes_in_a_ring(_rng):
    for status in (abi.WC_GENERAL_ERR + 1, 0x80, 0xff):
        wrong_cqe(patch(CQE.status, status))
        wrong_cqe(patch(CQE.status, status), receive=True)
    for opcode in (abi.WC_RECV_RDMA_WITH_IMM + 1, 0xff):
        wrong_cqe(patch(CQE.opcode, opcode), receive=True)
    for opcode in (abi.WC_LOCAL_INV + 1, abi.WC_REG_MR, 0x7f):
        wrong_cqe(patch(CQE.opcode, opcode))


def cqe_that_never_comes(_rng):
    """A later CQE says that the work requests before its own are done."""
    with Pair(device()) as pair:
        here, there = pair.a.memory(64), pair.b.memory(64)
        order(on="cq", keep=True)
        for wr_id in (8, 9):
            pair.a.post_send(WRITE, [sge(here)], wr_id=wr_id, remote=remote(there))
        ktap.equal(complete(pair.a.send_cq)[0].wr_id, 9, "wr_id")
        empty(pair.a.send_cq)
    data_flows()


def cqes_out_of_place(_rng):
    """A lap that is wrong, an index that jumps: the program sees nothing of that CQ any more, and does not hang."""
    for what in (*({"write": [patch(CQE.lap, lap)]} for lap in (0, 2, MAX)), {"keep": True, "times": ALWAYS}):
        with Pair(device(), channel=True) as pair:
            here, there = pair.a.memory(64), pair.b.memory(64)
            pair.a.send_cq.req_notify()
            order(on="cq", **what)
            for _ in range(4):
                pair.a.post_send(WRITE, [sge(here)], remote=remote(there))
            for _ in range(1000):
                empty(pair.a.send_cq)
            honest()
        data_flows()
    with Pair(device()) as pair:
        here, there = pair.a.memory(64), pair.b.memory(64)
        order(on="cq", jump=3)
        for wr_id in range(4):
            pair.a.post_send(WRITE, [sge(here)], wr_id=wr_id, remote=remote(there))
        ktap.equal(complete(pair.a.send_cq)[0].wr_id, 0, "wr_id")
        for _ in range(1000):
            empty(pair.a.send_cq)
    data_flows()


def heads_that_change(_rng):
    """What the device writes into the heads of rings harms at most their objects."""
    qp, cq = abi.QpRing, abi.CqRing
    for kind, field in [("qp", qp.sq_wake), ("qp", qp.rq_wake), ("cq", cq.consumer), ("cq", cq.arm_next),
                        ("cq", cq.arm_solicited), ("qp", qp.sq_producer), ("qp", qp.rq_producer)]:
        for number in (1, 0, 2**31, MAX):
            found = device()
            with Pair(found) as pair:
                here, there = pair.a.memory(64), pair.b.memory(64)
                for _ in range(3):
                    poke(kind, field, number)
                    try:
                        pair.b.post_recv([sge(there)])
                        pair.a.post_send(SEND, [sge(here)])
                    except rc.PyverbsError:
                        break
                    pair.a.send_cq.poll(4)
                    pair.b.recv_cq.poll(4)
            found.context.close()
    # The GSI's CQ and QP were among them.
    recovers()


def ring_that_says_it_is_closed(_rng):
    """The device cannot keep CQEs from the program by that; while there are no CQEs, polling fails."""
    found = device()
    with Pair(found) as pair:
        here, there = pair.a.memory(64), pair.b.memory(64)
        poke("cq", abi.CqRing.closed, 1)
        pair.a.post_send(WRITE, [sge(here)], wr_id=3, remote=remote(there))
        while True:
            try:
                (wc,) = pair.a.send_cq.poll(1)[1]
                break
            except rc.PyverbsError:
                os.sched_yield()
        ktap.equal(wc.wr_id, 3, "wr_id")
    found.context.close()
    recovers()


QKEY = 0x80010000
MAD = 256


class Mads:
    """A QP that sends datagrams to the GSI, where the kernel takes them."""

    def __enter__(self):
        self.device = device()
        context = self.device.context
        self.pd = PD(context)
        self.cq = CQ(context, 64)
        init = QPInitAttr(qp_type=e.IBV_QPT_UD, scq=self.cq, rcq=self.cq, cap=QPCap(64, 1, 1, 1))
        attr = QPAttr(port_num=rc.PORT)
        attr.qkey = QKEY
        self.qp = QP(self.pd, init, attr)
        gid = self.device.gid.gid_index
        route = GlobalRoute(dgid=context.query_gid(rc.PORT, gid), sgid_index=gid, hop_limit=64)
        self.ah = rc.AH(self.pd, attr=AHAttr(port_num=rc.PORT, is_global=1, gr=route))
        self.region = MR(self.pd, MAD, ALL_ACCESS)
        return self

    def __exit__(self, *_):
        for thing in (self.qp, self.region, self.ah, self.cq, self.pd):
            thing.close()
        self.device.context.close()

    def send(self, count=1):
        """Sends MADs of a class that no agent serves."""
        for _ in range(count):
            wr = send_wr(SEND, [sge(self.region)])
            wr.set_wr_ud(self.ah, abi.GSI_QPN, QKEY)
            post(self.qp.post_send, [wr])
            complete(self.cq)


def bad_cqe_of_kernel(counter, *write, times=1, **what):
    """Fails the test unless the driver counts a bad CQE of the GSI's CQ, which is the first."""
    with Mads() as mads:
        watch = Watch()
        order(on="cq", cqn=0, write=list(write), **what)
        mads.send(2)
        watch.wait(counter, times)
        watch.counted(counter, times)
    recovers()


def bad_cqes_of_the_kernel(_rng):
    for number in (0, 5, 1000, MAX):
        bad_cqe_of_kernel("bad_cqe_qp", patch(CQE.qp_num, number))
    for number in (5000, 2**31, MAX):
        bad_cqe_of_kernel("bad_cqe_wr_id", patch(CQE.wqe_index, number))
    bad_cqe_of_kernel("bad_cqe_status", patch(CQE.status, 0xff))
    bad_cqe_of_kernel("bad_cqe_opcode", patch(CQE.opcode, 0xff))
    bad_cqe_of_kernel("bad_cqe_byte_len", patch(CQE.byte_len, MAX))
    bad_cqe_of_kernel("bad_cqe_vlan", patch(CQE.wc_flags, abi.WC_WITH_VLAN), patch(CQE.vlan_id, 4095))
    bad_cqe_of_kernel("bad_cqe_wr_id", twice=True)
    bad_cqe_of_kernel("bad_cqe_wr_id", times=10, then=[{"used": RING_CQE_SIZE, "times": 10}])


def cqes_of_the_kernel_out_of_place(_rng):
    """The kernel polls a CQ that shows nothing any more; it can be destroyed."""
    for what in (*({"write": [patch(CQE.lap, lap)]} for lap in (0, MAX)), {"jump": 5}, {"keep": True}):
        with Mads() as mads:
            watch = Watch()
            order(on="cq", cqn=0, **what)
            mads.send(5)
            watch.silent()
        recovers()


def flood_of_cqes_of_the_kernel(_rng):
    """CQEs of no QP without an end, on every CQ: the kernel goes on."""
    with Mads() as mads:
        watch = Watch()
        order(on="cq", cqn=0, then=[{"bytes": ONES, "used": RING_CQE_SIZE, "times": 2**60}])
        mads.send()
        watch.wait("bad_cqe_qp", 100000)
        watch.counted("bad_cqe_qp")
        honest()
    recovers()


def flood_of_cqes(_rng):
    """CQEs without an end: nevertheless polling returns, and the CQ can be destroyed."""
    floods = ((("", {"bytes": ONES, "used": 0}), ("", {"used": 0})) if RINGS else
              (("bad_cqe_qp", {"bytes": "ff" * CQE_SIZE, "used": CQE_SIZE}), ("bad_cqe_length", {"used": 0})))
    for counter, forgery in floods:
        found = device()
        pair = Pair(found)
        here, there = pair.a.memory(64), pair.b.memory(64)
        watch = Watch()
        order(on="cq", then=[{**forgery, "times": 2**60}])
        pair.a.post_send(WRITE, [sge(here)], wr_id=1, remote=remote(there))
        ktap.equal(complete(pair.a.send_cq)[0].wr_id, 1, "wr_id")
        for _ in range(1000):
            empty(pair.a.send_cq)
        noticed(watch, counter)
        pair.a.close()
        pair.b.close()
        honest()
        found.context.close()
        data_flows()


TESTS = [cqe_of_no_qp, cqe_of_no_work_request, cqe_of_the_other_kind, cqe_of_an_error, cqe_again, flood_of_cqes]
TESTS += [wrong_cqes_in_a_ring, cqe_that_never_comes, cqes_out_of_place, heads_that_change,
          ring_that_says_it_is_closed, bad_cqes_of_the_kernel, cqes_of_the_kernel_out_of_place,
          flood_of_cqes_of_the_kernel] if RINGS else [
    cqe_of_a_wrong_length, cqe_of_an_unknown_status, cqe_of_an_unknown_opcode, cqe_of_too_many_bytes]
