# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Work requests: their entries, and the checks of what they ask for."""

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .layout import abi
from .memory_regions import NoAccess
from .port import MAX_MESSAGE

if TYPE_CHECKING:
    from .queue_pairs import QueuePair

SGE_BYTES = ctypes.sizeof(abi.Sge)
SEND_FLAGS = abi.SEND_FENCE | abi.SEND_SIGNALED | abi.SEND_SOLICITED | abi.SEND_INLINE
SENDS = (abi.WR_SEND, abi.WR_SEND_WITH_IMM)
WRITES = (abi.WR_RDMA_WRITE, abi.WR_RDMA_WRITE_WITH_IMM)
WITH_IMM = (abi.WR_SEND_WITH_IMM, abi.WR_RDMA_WRITE_WITH_IMM)
OPCODES = {abi.QPT_RC: (*SENDS, *WRITES, abi.WR_RDMA_READ), abi.QPT_UD: SENDS, abi.QPT_GSI: SENDS}
HEADERS = {abi.QPT_RC: abi.RingSqWqe, abi.QPT_UD: abi.RingUdWqe, abi.QPT_GSI: abi.RingUdWqe}
CQE_OPCODES = {
    abi.WR_RDMA_WRITE: abi.WC_RDMA_WRITE, abi.WR_RDMA_WRITE_WITH_IMM: abi.WC_RDMA_WRITE,
    abi.WR_RDMA_READ: abi.WC_RDMA_READ, abi.WR_RDMA_READ_WITH_INV: abi.WC_RDMA_READ,
    abi.WR_ATOMIC_CMP_AND_SWP: abi.WC_COMP_SWAP, abi.WR_ATOMIC_FETCH_AND_ADD: abi.WC_FETCH_ADD,
    abi.WR_LOCAL_INV: abi.WC_LOCAL_INV, abi.WR_BIND_MW: abi.WC_BIND_MW, abi.WR_FLUSH: abi.WC_FLUSH,
    abi.WR_ATOMIC_WRITE: abi.WC_ATOMIC_WRITE, abi.WR_REG_MR: abi.WC_REG_MR,
}  # The others are SEND.


class LocalError(Exception):
    """A work request ends in this status because of what it asks for itself."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class SendRequest:
    """A send work request, with how far it is. `deadline` is when to look after it again, if it waits."""

    def __init__(self, qp: "QueuePair", index: int, entry: bytes) -> None:
        self.index = index
        self.header = HEADERS[qp.type].from_buffer_copy(entry)
        self.behind = entry[ctypes.sizeof(self.header):]
        self.opcode, self.flags = self.header.opcode, self.header.send_flags
        self.deadline: float | None = None
        self.not_ready = False  # It waits for a receive, and not for an answer.
        self.tries = self.rnr_tries = 0

    @property
    def cqe_opcode(self) -> int:
        """The opcode of the CQE."""
        return CQE_OPCODES.get(self.opcode, abi.WC_SEND)

    @property
    def solicited(self) -> bool:
        """Says whether the CQE of the peer's receive is solicited."""
        return bool(self.flags & abi.SEND_SOLICITED)

    @property
    def immediate(self) -> int | None:
        """The immediate data, as abi has it: a number of network order."""
        return self.header.imm_data if self.opcode in WITH_IMM else None

    def memory(self, qp: "QueuePair") -> list[memoryview]:
        """Checks the work request, and returns the memory that it reads, or that a READ writes."""
        if self.opcode not in OPCODES[qp.type] or self.flags & ~SEND_FLAGS:
            raise LocalError(abi.WC_LOC_QP_OP_ERR)
        if self.flags & abi.SEND_INLINE:
            return self._inline(qp)
        count, read = self.header.num_sge, self.opcode == abi.WR_RDMA_READ
        if count > qp.cap.max_send_sge or read and count > qp.device.config.max_sge_rd:
            raise LocalError(abi.WC_LOC_QP_OP_ERR)
        if read and qp.attr.max_rd_atomic == 0:
            raise LocalError(abi.WC_LOC_QP_OP_ERR)
        sges = parse(self.behind, count)
        if sum(sge.length for sge in sges) > MAX_MESSAGE:
            raise LocalError(abi.WC_LOC_LEN_ERR)
        return gather(qp, sges, lambda _: read)

    def _inline(self, qp: "QueuePair") -> list[memoryview]:
        length = self.header.inline_len
        if self.header.num_sge or length > qp.cap.max_inline_data or self.opcode == abi.WR_RDMA_READ:
            raise LocalError(abi.WC_LOC_QP_OP_ERR)
        return [memoryview(self.behind)[:length]]


class Receive:
    """A receive work request."""

    def __init__(self, index: int, entry: bytes) -> None:
        self.index = index
        self.header = abi.RqWqe.from_buffer_copy(entry)
        self.behind = entry[ctypes.sizeof(self.header):]

    def memory(self, qp: "QueuePair", length: int) -> list[memoryview]:
        """Checks the work request for a message that writes `length` bytes, and returns all its memory."""
        if self.header.num_sge > qp.cap.max_recv_sge:
            raise LocalError(abi.WC_LOC_QP_OP_ERR)
        return gather(qp, parse(self.behind, self.header.num_sge), lambda at: at < length)


def parse(data: bytes, count: int) -> list[Any]:
    """Returns SGEs."""
    return [abi.Sge.from_buffer_copy(data, i * SGE_BYTES) for i in range(count)]


def gather(qp: "QueuePair", sges: list[Any], writes: Callable[[int], bool]) -> list[memoryview]:
    """Returns the memory of SGEs. `writes` says whether the device writes the SGE that begins at this byte."""
    found: list[memoryview] = []
    at = 0
    for sge in sges:
        if sge.length:
            found += _pieces(qp, sge, writes(at))
        at += sge.length
    return found


def _pieces(qp: "QueuePair", sge: Any, write: bool) -> list[memoryview]:
    mr = qp.device.keys.get(sge.lkey)
    if mr is None or mr.pd is not qp.pd or write and not mr.access & abi.ACCESS_LOCAL_WRITE:
        raise LocalError(abi.WC_LOC_PROT_ERR)
    try:
        return mr.pieces(qp.device.memory, sge.addr, sge.length, write)
    except NoAccess:
        raise LocalError(abi.WC_LOC_PROT_ERR) from None
