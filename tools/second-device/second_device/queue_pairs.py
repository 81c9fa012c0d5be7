# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Queue pairs: their commands, their states, and the work requests of their rings."""

import ctypes
import math
import time
from typing import TYPE_CHECKING, Any

from . import transitions, transport
from .layout import abi
from .memory_regions import find_pd
from .port import mtu_bytes
from .refused import Refused
from .rings import RingFailed, RingRegion, WorkRing, qp_region_size
from .work_requests import HEADERS, SGE_BYTES, Receive, SendRequest

if TYPE_CHECKING:
    from .device import Device
    from .memory_regions import ProtectionDomain

BATCH = 64
PSN_MASK = 0xffffff
FLUSHING = (abi.QPS_SQE, abi.QPS_ERR)
TIMER_MS = (655.36, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32, 0.48, 0.64, 0.96, 1.28, 1.92, 2.56,
            3.84, 5.12, 7.68, 10.24, 15.36, 20.48, 30.72, 40.96, 61.44, 81.92, 122.88, 163.84, 245.76, 327.68, 491.52)


class QueuePair:
    """A QP. One send work request is under way at most: `current`."""

    def __init__(self, device: "Device", number: int, pd: "ProtectionDomain", request: Any, region: RingRegion) -> None:
        base = request.base
        self.device, self.number, self.pd, self.region, self.type = device, number, pd, region, base.qp_type
        self.cap = abi.QpCap(**{name: getattr(base, name) for name, _ in abi.QpCap._fields_})
        self.signal_all = base.sq_sig_type == abi.SIGNAL_ALL_WR
        self.send_cq, self.recv_cq = device.cqs[base.send_cqn], device.cqs[base.recv_cqn]
        self.sq = WorkRing(region, request.sq, abi.QpRing.sq_producer.offset, abi.QpRing.sq_wake.offset)
        self.rq = None
        if request.rq.depth:
            self.rq = WorkRing(region, request.rq, abi.QpRing.rq_producer.offset, abi.QpRing.rq_wake.offset)
        self.state = abi.QPS_RESET
        self.clear()

    def clear(self) -> None:
        """Makes all but the rings what it is in RESET."""
        self.attr = abi.QpAttr()
        self.source: bytes | None = None
        self.neighbour: Device | None = None
        self.current: SendRequest | None = None
        self.receive: Receive | None = None  # It was copied, and no message has taken it.
        self.waiter: QueuePair | None = None  # The peer, while a message of it waits for a receive.
        self.established = self.tells_drained = False

    @property
    def rings(self) -> list[WorkRing]:
        """The rings of the QP."""
        return [self.sq] if self.rq is None else [self.sq, self.rq]

    @property
    def mtu(self) -> int:
        """Bytes of a packet."""
        return mtu_bytes(self.attr.path_mtu)

    # ---- the loop

    def run(self) -> None:
        """Does what there is to do, or a part of it."""
        if self.state == abi.QPS_RESET:
            return
        if self.state == abi.QPS_ERR:
            self.flush_receives()
        self.run_sends(BATCH)

    def timer(self, deadline: float) -> None:
        """Tries the send that is under way again, if it still waits for this moment."""
        request = self.current
        if request is None or request.deadline != deadline or self.state in FLUSHING:
            return
        request.deadline = None
        request.rnr_tries += request.not_ready
        if not request.not_ready and request.tries > self.attr.retry_cnt:
            self.end_send(abi.WC_RETRY_EXC_ERR)
            self.enter_error()
        self.device.loop.schedule(self)

    def doorbell(self, which: int) -> None:
        """Looks at a ring because the owner asks for it."""
        if self.state == abi.QPS_RESET or which not in (abi.DOORBELL_SQ, abi.DOORBELL_RQ):
            return
        ring = self.sq if which == abi.DOORBELL_SQ else self.rq
        if ring is None or ring.failed or ring is self.rq and self.waiter is not None and self.waiter.hint():
            return
        try:
            ring.wake(0)
            ring.look()
            if ring is self.sq:
                ring.wake(1)  # run() clears it where there is a use for the entries.
        except RingFailed:
            self.fail(ring)
        self.device.loop.schedule(self)

    def hint(self) -> bool:
        """Tries a send that waits for a receive once more, before its time. Says whether there is such a send."""
        if self.current is None or not self.current.not_ready or self.state in FLUSHING:
            return False
        transport.step(self)
        self.device.loop.schedule(self)
        return True

    # ---- sends

    def run_sends(self, limit: int) -> None:
        """Does or flushes up to `limit` sends, and has the loop go on if there may be more."""
        for _ in range(limit):
            if self.current is None and not self._next_send():
                return
            if self.state in FLUSHING:
                self.end_send(abi.WC_WR_FLUSH_ERR)
            elif self.current is not None and (self.current.deadline is not None or not transport.step(self)):
                self._sleep()
                return
        self.device.loop.schedule(self)

    def _next_send(self) -> bool:
        if self.state not in (abi.QPS_RTS, *FLUSHING) or self.sq.failed:
            return False
        try:
            entry = self.sq.take(sleep=True)
        except RingFailed:
            self.fail(self.sq)
            return False
        if entry is not None:
            self.current = SendRequest(self, *entry)
        return entry is not None

    def _sleep(self) -> None:
        try:
            self.sq.wake(1)  # The send that is under way waits: there is no use for an entry.
        except RingFailed:
            self.fail(self.sq)

    def wait_for_answer(self) -> None:
        """Has the send wait because nobody answers."""
        request = self.current
        assert request is not None
        request.not_ready = False
        request.tries += 1
        # Between T and 4 T. A process cannot keep the upper bound where T is a few microseconds.
        seconds = 2 * 4.096e-6 * 2 ** self.attr.timeout if self.attr.timeout else math.inf
        self._wait(request, seconds)

    def wait_for_receive(self, timer: int) -> bool:
        """Has the send wait because the peer has no receive, or says that it waits no longer."""
        request = self.current
        assert request is not None
        request.tries = 0
        if not self.waits_for_receives():
            return False
        if not request.not_ready or request.deadline is None:
            request.not_ready = True
            self._wait(request, TIMER_MS[timer] / 1000)
        return True

    def waits_for_receives(self) -> bool:
        """Says whether the send that is under way may wait for a receive once more."""
        return self.attr.rnr_retry == 7 or self.current is not None and self.current.rnr_tries < self.attr.rnr_retry

    def _wait(self, request: SendRequest, seconds: float) -> None:
        request.deadline = time.monotonic() + seconds
        if seconds != math.inf:
            self.device.loop.at(request.deadline, self)

    def end_send(self, status: int, byte_len: int = 0) -> None:
        """Completes the send that is under way."""
        request, self.current = self.current, None
        assert request is not None
        if status != abi.WC_SUCCESS or self.signal_all or request.flags & abi.SEND_SIGNALED:
            cqe = abi.RingCqe(wr_id=request.header.wr_id, status=status, opcode=request.cqe_opcode, qp_num=self.number,
                              wqe_index=request.index, byte_len=byte_len)
            self.send_cq.write(cqe, False)
        if self.state == abi.QPS_SQD and self.tells_drained and status == abi.WC_SUCCESS:
            self.tells_drained = False
            self.device.raise_event(abi.EVENT_SQ_DRAINED, self.number)

    # ---- receives

    def next_receive(self, sleep: bool) -> Receive | None:
        """Returns the next receive, which stays the next one until end_receive(). May raise RingFailed."""
        if self.receive is None and self.rq is not None:
            entry = self.rq.take(sleep)
            if entry is not None:
                self.receive = Receive(*entry)
        return self.receive

    def end_receive(self, status: int, solicited: bool = False, **fields: int) -> None:
        """Completes the next receive."""
        receive, self.receive = self.receive, None
        assert receive is not None
        fields = {"opcode": abi.WC_RECV, **fields}
        cqe = abi.RingCqe(wr_id=receive.header.wr_id, status=status, qp_num=self.number, wqe_index=receive.index,
                          **fields)
        self.recv_cq.write(cqe, solicited)

    def flush_receives(self) -> None:
        """Flushes receives, and has the loop go on if there may be more."""
        for _ in range(BATCH):
            try:
                if self.rq is None or self.receive is None and self.rq.failed or self.next_receive(True) is None:
                    return
            except RingFailed:
                self.fail(self.rq)
                return
            self.end_receive(abi.WC_WR_FLUSH_ERR)
        self.device.loop.schedule(self)

    def message_arrives(self) -> None:
        """Notes that a message has arrived."""
        if not self.established and self.state == abi.QPS_RTR:
            self.device.raise_event(abi.EVENT_COMM_EST, self.number)
        self.established = True

    # ---- states

    def enter_error(self) -> None:
        """Takes the QP into ERR, where the loop flushes it."""
        self.state = abi.QPS_ERR
        self.device.loop.schedule(self)

    def fail(self, ring: WorkRing | None = None) -> None:
        """Takes a QP whose ring, CQ or region has failed into ERR, with QP_FATAL. A QP in RESET stays there."""
        if ring is not None:
            ring.failed = True
        if self.state != abi.QPS_RESET:
            self.enter_error()
            self.device.raise_event(abi.EVENT_QP_FATAL, self.number)

    def check_region(self) -> None:
        """Fails if pages of the region are gone."""
        if self.state != abi.QPS_RESET and not all(ring.failed for ring in self.rings) and not self.region.intact():
            self._lose_region()

    def _lose_region(self) -> None:
        for ring in self.rings:
            ring.failed = True
        self.fail()

    def set_state(self, state: int) -> None:
        """Does what a transition does beside setting attributes."""
        before, self.state = self.state, state
        if state == abi.QPS_RESET:
            if before != abi.QPS_RESET:
                for ring in self.rings:
                    ring.reset()
            self.clear()
        elif before == abi.QPS_RESET and not self.region.intact():
            self._lose_region()
        elif before == abi.QPS_RESET and (self.send_cq.error or self.recv_cq.error):
            self.fail()
        elif state == abi.QPS_SQD and before == abi.QPS_RTS and self.tells_drained and self.current is None:
            self.tells_drained = False
            self.device.raise_event(abi.EVENT_SQ_DRAINED, self.number)
        elif state != abi.QPS_SQD:
            self.tells_drained = False
        self.device.loop.schedule(self)

    def do_posted(self) -> None:
        """Does what was posted before the QP leaves RTS (D-QP-30)."""
        if self.state == abi.QPS_RTS:
            self.run_sends(self.sq.depth)

    def destroyed(self) -> None:
        """Ends all that the QP does."""
        self.state = abi.QPS_RESET
        self.clear()


def create_ring_qp(device: "Device", request: Any) -> Any:
    """CREATE_RING_QP"""
    base = request.base
    if base.qp_type not in HEADERS or base.create_flags:
        raise Refused(abi.STATUS_UNSUPPORTED)
    pd = find_pd(device, base.pdn)
    if base.send_cqn not in device.cqs or base.recv_cqn not in device.cqs:
        raise Refused(abi.STATUS_NO_OBJECT)
    region = RingRegion(device.memory, request.region, _check_shape(device, request))
    gsi = base.qp_type == abi.QPT_GSI
    if gsi and abi.GSI_QPN in device.qps:
        raise Refused(abi.STATUS_BUSY)
    if not gsi and not device.qp_numbers:
        raise Refused(abi.STATUS_NO_RESOURCE)
    number = abi.GSI_QPN if gsi else device.qp_numbers.popleft()
    qp = device.qps[number] = QueuePair(device, number, pd, request, region)
    pd.uses += 1
    qp.send_cq.users.append(qp)
    qp.recv_cq.users.append(qp)
    return abi.RspCreateQp(qpn=number)


def _check_shape(device: "Device", request: Any) -> int:
    base, config = request.base, device.config
    if base.sq_sig_type not in (abi.SIGNAL_ALL_WR, abi.SIGNAL_REQ_WR) or request.flags & ~abi.QP_PRIVILEGED \
            or not 1 <= base.max_send_wr <= config.ring_max_qp_wr or base.max_recv_wr > config.ring_max_qp_wr \
            or not 1 <= base.max_send_sge <= config.max_send_sge or base.max_recv_sge > config.max_recv_sge \
            or base.max_inline_data > config.ring_max_inline_data:
        raise Refused(abi.STATUS_INVAL)
    send = ctypes.sizeof(HEADERS[base.qp_type]) + max(SGE_BYTES * base.max_send_sge, base.max_inline_data)
    shapes = [(request.sq, base.max_send_wr, send)]
    if request.rq.depth or base.max_recv_wr:
        shapes.append((request.rq, base.max_recv_wr, ctypes.sizeof(abi.RqWqe) + SGE_BYTES * base.max_recv_sge))
    return qp_region_size(shapes, config.ring_max_qp_wr)


def find_qp(device: "Device", qpn: int) -> QueuePair:
    """Returns a QP by its number."""
    if qpn not in device.qps:
        raise Refused(abi.STATUS_NO_OBJECT)
    return device.qps[qpn]


def destroy_qp(device: "Device", request: Any) -> None:
    """DESTROY_QP"""
    qp = find_qp(device, request.qpn)
    qp.do_posted()
    qp.destroyed()
    del device.qps[qp.number]
    if qp.number != abi.GSI_QPN:
        device.qp_numbers.append(qp.number)
    qp.pd.uses -= 1
    qp.send_cq.users.remove(qp)
    qp.recv_cq.users.remove(qp)


def modify_qp(device: "Device", request: Any) -> None:
    """MODIFY_QP"""
    qp, mask, attr = find_qp(device, request.qpn), request.attr_mask, request.attr
    state = transitions.check(device, qp.state, qp.type, mask, attr)
    if state in (abi.QPS_RESET, abi.QPS_ERR):
        qp.do_posted()
    for bit, field in transitions.FIELDS.items():
        if mask & bit:
            setattr(qp.attr, field, getattr(attr, field))
    qp.attr.rq_psn &= PSN_MASK
    qp.attr.sq_psn &= PSN_MASK
    if mask & abi.QP_AV:
        qp.attr.ah_attr.reserved_22[:] = bytes(6)
        qp.attr.ah_attr.grh.reserved_17 = 0
        qp.source = device.gids[attr.ah_attr.grh.sgid_index]
        qp.neighbour = device.network.owner(bytes(attr.ah_attr.grh.dgid))
    if mask & abi.QP_EN_SQD_ASYNC_NOTIFY:
        qp.tells_drained = bool(attr.en_sqd_async_notify)
    qp.set_state(state)


def query_qp(device: "Device", request: Any) -> Any:
    """QUERY_QP"""
    qp = find_qp(device, request.qpn)
    attr = abi.QpAttr.from_buffer_copy(qp.attr)
    attr.qp_state = attr.cur_qp_state = qp.state
    attr.cap = qp.cap
    attr.sq_draining = qp.state == abi.QPS_SQD and qp.current is not None
    attr.en_sqd_async_notify = qp.tells_drained
    return abi.RspQueryQp(attr=attr)
