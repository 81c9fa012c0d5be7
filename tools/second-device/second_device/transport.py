# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""How messages get from one QP to another: by copying, in this process.

A message is done at once or not at all. What IBA divides into packets counts as packets here only for PSNs.
"""

import struct
from typing import TYPE_CHECKING, Any

from .layout import abi
from .memory import scatter
from .memory_regions import NoAccess
from .port import MTU, is_ipv4, mtu_bytes
from .rings import RingFailed
from .work_requests import SENDS, LocalError, SendRequest

if TYPE_CHECKING:
    from .device import Device
    from .queue_pairs import QueuePair

AREA = 40
PSN_MASK, PSN_HALF = 0xffffff, 1 << 23
RECEIVING = (abi.QPS_RTR, abi.QPS_RTS, abi.QPS_SQD, abi.QPS_SQE)


class NoAnswer(Exception):
    """Nobody answers a request."""


class NotReady(Exception):
    """The responder has no receive. It was asked for `timer`, its min_rnr_timer."""

    def __init__(self, timer: int) -> None:
        super().__init__(timer)
        self.timer = timer


class Refusal(Exception):
    """A message ends in an error of the requester, and with `responder` in one of the responder, too."""

    def __init__(self, status: int, responder: "QueuePair | None" = None, event: int | None = None) -> None:
        super().__init__(status)
        self.status, self.responder, self.event = status, responder, event


def step(qp: "QueuePair") -> bool:
    """Tries the send that is under way. Says whether it has ended."""
    assert qp.current is not None
    try:
        length = _send_datagram(qp, qp.current) if qp.type != abi.QPT_RC else _request(qp, qp.current)
        qp.end_send(abi.WC_SUCCESS, length)
    except LocalError as error:
        qp.end_send(error.status)
        if qp.type == abi.QPT_RC:
            qp.enter_error()
        elif qp.state != abi.QPS_ERR:
            qp.state = abi.QPS_SQE
    except Refusal as refusal:
        _refuse(qp, refusal)
    except NoAnswer:
        qp.wait_for_answer()
        return False
    except NotReady as answer:
        if qp.wait_for_receive(answer.timer):
            return False
        qp.end_send(abi.WC_RNR_RETRY_EXC_ERR)
        qp.enter_error()
    return True


def _refuse(qp: "QueuePair", refusal: Refusal) -> None:
    qp.end_send(refusal.status)
    qp.enter_error()
    responder = refusal.responder
    if responder is not None:
        responder.enter_error()
        if refusal.event is not None:
            responder.device.raise_event(refusal.event, responder.number)


# ---- reliable connections


def _request(qp: "QueuePair", request: SendRequest) -> int:
    local = request.memory(qp)
    length = sum(map(len, local))
    responder = _responder(qp)
    ahead = (qp.attr.sq_psn - responder.attr.rq_psn) & PSN_MASK
    if ahead >= PSN_HALF:
        raise NoAnswer
    if ahead:
        raise Refusal(abi.WC_RETRY_EXC_ERR)
    responder.message_arrives()
    if request.opcode in SENDS:
        _send(qp, responder, request, local, length)
    elif request.opcode == abi.WR_RDMA_READ:
        _read(qp, responder, request, local, length)
    else:
        _write(qp, responder, request, local, length)
    qp.attr.sq_psn = (qp.attr.sq_psn + _packets(qp, length)) & PSN_MASK
    responder.attr.rq_psn = (responder.attr.rq_psn + _packets(responder, length)) & PSN_MASK
    return length if request.opcode == abi.WR_RDMA_READ else 0


def _responder(qp: "QueuePair") -> "QueuePair":
    """Returns the QP with which `qp` is connected, if it takes messages."""
    device = _reach(qp, bytes(qp.attr.ah_attr.grh.dgid))
    responder = device.qps.get(qp.attr.dest_qp_num)
    if responder is None or responder.type != abi.QPT_RC or responder.state not in RECEIVING \
            or responder.attr.dest_qp_num != qp.number or responder.source != bytes(qp.attr.ah_attr.grh.dgid) \
            or bytes(responder.attr.ah_attr.grh.dgid) != qp.source:
        raise NoAnswer
    if responder.neighbour is None:
        responder.neighbour = qp.device
    if responder.neighbour is not qp.device:
        raise NoAnswer
    return responder


def _reach(qp: "QueuePair", gid: bytes) -> "Device":
    """Returns the device instance with which `qp` is connected, if it is there, and `qp` has its own GID still."""
    device = qp.device.network.owner(gid)
    if device is None or qp.source not in qp.device.gids:
        raise NoAnswer
    if qp.neighbour is None:
        qp.neighbour = device
    if qp.neighbour is not device:
        raise NoAnswer
    return device


def _packets(qp: "QueuePair", length: int) -> int:
    return max(1, -(-length // qp.mtu))


def _one_packet(qp: "QueuePair", responder: "QueuePair", length: int) -> bool:
    return length <= min(qp.mtu, responder.mtu)


def _misfit(qp: "QueuePair", responder: "QueuePair", length: int) -> bool:
    return qp.mtu != responder.mtu and not _one_packet(qp, responder, length)


def _take_receive(qp: "QueuePair", responder: "QueuePair", length: int, opcode: int) -> list[memoryview]:
    """Takes a receive for a message that writes `length` bytes into it, and returns its memory."""
    try:
        receive = responder.next_receive(sleep=qp.waits_for_receives())
    except RingFailed:
        responder.fail(responder.rq)
        raise Refusal(abi.WC_REM_OP_ERR, responder) from None
    if receive is None:
        responder.waiter = qp
        raise NotReady(responder.attr.min_rnr_timer)
    responder.waiter = None
    try:
        return receive.memory(responder, length)
    except LocalError as error:
        responder.end_receive(error.status, opcode=opcode)
        raise Refusal(abi.WC_REM_OP_ERR, responder) from None


def _send(qp: "QueuePair", responder: "QueuePair", request: SendRequest, local: list[memoryview], length: int) -> None:
    place = _take_receive(qp, responder, length, abi.WC_RECV)
    if length > sum(map(len, place)) or _misfit(qp, responder, length):
        responder.end_receive(abi.WC_LOC_LEN_ERR)
        raise Refusal(abi.WC_REM_INV_REQ_ERR, responder)
    scatter(place, b"".join(local))
    _end_receive(responder, request, abi.WC_RECV, length)


def _end_receive(responder: "QueuePair", request: SendRequest, opcode: int, length: int, **fields: int) -> None:
    flags = fields.pop("wc_flags", 0)
    if request.immediate is not None:
        flags |= abi.WC_WITH_IMM
        fields["imm_data"] = request.immediate
    responder.end_receive(abi.WC_SUCCESS, request.solicited, opcode=opcode, byte_len=length, wc_flags=flags, **fields)


def _remote(responder: "QueuePair", request: SendRequest, length: int, right: int) -> list[memoryview]:
    """Returns the memory at the responder that a key gives, or raises NoAccess."""
    if not length:
        return []
    mr = responder.device.keys.get(request.header.rkey)
    if mr is None or mr.pd is not responder.pd or not mr.access & right:
        raise NoAccess
    write = right == abi.ACCESS_REMOTE_WRITE
    return mr.pieces(responder.device.memory, request.header.remote_addr, length, write)


def _read(qp: "QueuePair", responder: "QueuePair", request: SendRequest, local: list[memoryview], length: int) -> None:
    if not responder.attr.qp_access_flags & abi.ACCESS_REMOTE_READ or not responder.attr.max_dest_rd_atomic:
        raise Refusal(abi.WC_REM_INV_REQ_ERR, responder, abi.EVENT_QP_REQ_ERR)
    try:
        remote = _remote(responder, request, length, abi.ACCESS_REMOTE_READ)
    except NoAccess:
        raise Refusal(abi.WC_REM_ACCESS_ERR, responder, abi.EVENT_QP_ACCESS_ERR) from None
    if _misfit(qp, responder, length):
        raise Refusal(abi.WC_LOC_LEN_ERR)
    scatter(local, b"".join(remote))


def _write(qp: "QueuePair", responder: "QueuePair", request: SendRequest, local: list[memoryview], length: int) -> None:
    if not responder.attr.qp_access_flags & abi.ACCESS_REMOTE_WRITE or _misfit(qp, responder, length):
        raise Refusal(abi.WC_REM_INV_REQ_ERR, responder, abi.EVENT_QP_REQ_ERR)
    immediate = request.immediate is not None
    early = immediate and _one_packet(qp, responder, length)
    if early:
        _take_receive(qp, responder, 0, abi.WC_RECV_RDMA_WITH_IMM)
    try:
        remote = _remote(responder, request, length, abi.ACCESS_REMOTE_WRITE)
    except NoAccess:
        if early:
            responder.end_receive(abi.WC_LOC_ACCESS_ERR, opcode=abi.WC_RECV_RDMA_WITH_IMM)
            raise Refusal(abi.WC_REM_ACCESS_ERR, responder) from None
        raise Refusal(abi.WC_REM_ACCESS_ERR, responder, abi.EVENT_QP_ACCESS_ERR) from None
    if immediate and not early:
        _take_receive(qp, responder, 0, abi.WC_RECV_RDMA_WITH_IMM)
    if length:
        _place(remote, b"".join(local), request.header.remote_addr + length)
    if immediate:
        _end_receive(responder, request, abi.WC_RECV_RDMA_WITH_IMM, length)


def _place(remote: list[memoryview], data: bytes, end: int) -> None:
    """Writes the bytes of a WRITE, and the aligned word that ends with the last byte last, by one store (D-RC-51)."""
    tail = min(end & -end, 8)
    while tail > len(remote[-1]):
        tail //= 2
    last = remote[-1][len(remote[-1]) - tail:]
    scatter([*remote[:-1], remote[-1][:len(remote[-1]) - tail]], data[:len(data) - tail])
    form = {1: "B", 2: "H", 4: "I", 8: "Q"}[tail]
    last.cast(form)[0] = int.from_bytes(data[len(data) - tail:], "little")  # type: ignore[call-overload]


# ---- datagrams


def _send_datagram(qp: "QueuePair", request: SendRequest) -> int:
    local = request.memory(qp)
    length = sum(map(len, local))
    if length > mtu_bytes(MTU):
        raise LocalError(abi.WC_LOC_LEN_ERR)
    av, gids = request.header.av, qp.device.gids
    source = gids[av.gid_index] if av.gid_index < len(gids) else None
    if av.port != abi.PORT or av.pdn != qp.pd.number or source is None:
        raise LocalError(abi.WC_LOC_QP_OP_ERR)
    device = qp.device.network.owner(bytes(av.dgid))
    receiver = device.qps.get(request.header.remote_qpn) if device else None
    if receiver is not None and receiver.type in (abi.QPT_UD, abi.QPT_GSI) and receiver.state in RECEIVING:
        _deliver(qp, receiver, request, source, b"".join(local))
    return 0


def _deliver(qp: "QueuePair", receiver: "QueuePair", request: SendRequest, source: bytes, data: bytes) -> None:
    """Gives a datagram to its receiver, or drops it. The sender hears nothing."""
    key = request.header.remote_qkey
    if (qp.attr.qkey if key & 1 << 31 else key) != receiver.attr.qkey:
        receiver.device.qkey_violations = min(receiver.device.qkey_violations + 1, 0xffffffff)
        return
    receiver.message_arrives()
    try:
        receive = receiver.next_receive(sleep=False)
        if receive is None:
            return
        place = receive.memory(receiver, AREA + len(data))
    except RingFailed:
        receiver.fail(receiver.rq)
        return
    except LocalError as error:
        receiver.end_receive(error.status)
        receiver.enter_error()
        return
    if AREA + len(data) > sum(map(len, place)):
        return
    av = request.header.av
    scatter(place, _area(source, av, len(data) + 4 * (request.immediate is not None)) + data)
    _end_receive(receiver, request, abi.WC_RECV, AREA + len(data), wc_flags=abi.WC_GRH, src_qp=qp.number,
                 sl=av.sl_tclass_flowlabel >> 28, port_num=abi.PORT)


def _area(source: bytes, av: Any, length: int) -> bytes:
    """Returns the header of a datagram whose payload and immediate data have `length` bytes."""
    dgid = bytes(av.dgid)
    size = 32 + -(-length // 4) * 4
    if not (is_ipv4(source) and is_ipv4(dgid)):
        first = 6 << 28 | av.sl_tclass_flowlabel & 0xfffffff
        return struct.pack(">IHBB", first, size, 17, av.hop_limit) + source + dgid
    tclass = av.sl_tclass_flowlabel >> 20 & 0xff
    header = struct.pack(">BBHHBBBBH", 0x45, tclass, 20 + size, 0, 0x40, 0, av.hop_limit, 17, 0)
    total = sum(struct.unpack(">10H", header + source[12:] + dgid[12:]))
    total = (total & 0xffff) + (total >> 16)
    checksum = ~((total & 0xffff) + (total >> 16)) & 0xffff
    return bytes(20) + header[:10] + struct.pack(">H", checksum) + source[12:] + dgid[12:]
