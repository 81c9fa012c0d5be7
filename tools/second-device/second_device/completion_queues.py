# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Completion queues: CQEs, overflow, and arming."""

import time
from typing import TYPE_CHECKING, Any

from .layout import abi
from .memory import Fault, full_barrier
from .refused import Refused
from .rings import MASK, RingRegion, is_depth

if TYPE_CHECKING:
    from .device import Device
    from .queue_pairs import QueuePair

HEAD, ENTRY = 128, 64
CONSUMER, ARM_NEXT, ARM_SOLICITED = 0, 64, 68
LAP = 60


class CompletionQueue:
    """A CQ. `users` are the QPs that use it, once for each of their two queues."""

    def __init__(self, device: "Device", number: int, region: RingRegion, depth: int, vector: int) -> None:
        self.device, self.number, self.region, self.depth, self.vector = device, number, region, depth, vector
        self.index = 0
        self.error = False
        self.armed = (0, 0)
        self.users: list[QueuePair] = []

    def write(self, cqe: Any, solicited: bool) -> None:
        """Writes a CQE, and raises an event if the owner asks for one. A CQ in error drops the CQE."""
        if self.error:
            return
        try:
            self._write(cqe)
            self._event(solicited or cqe.status != abi.WC_SUCCESS)
        except Fault:
            self.fail()

    def fail(self) -> None:
        """Puts the CQ into error, and its QPs with it."""
        if self.error:
            return
        self.error = True
        self.device.raise_event(abi.EVENT_CQ_ERR, self.number)
        for qp in dict.fromkeys(self.users):
            qp.fail()

    def _write(self, cqe: Any) -> None:
        if (self.index - self.region.load(CONSUMER)) & MASK >= self.depth:
            raise Fault
        offset = HEAD + self.index % self.depth * ENTRY
        cqe.timestamp = time.monotonic_ns()
        self.region.write(offset, bytes(cqe)[:LAP])
        # The lap comes last: the owner takes the CQE when it sees the lap.
        self.region.store(offset + LAP, (self.index // self.depth + 1) & MASK)
        self.index = (self.index + 1) & MASK

    def _event(self, solicited: bool) -> None:
        full_barrier()
        armed = self.region.load(ARM_NEXT), self.region.load(ARM_SOLICITED)
        if armed[0] != self.armed[0] or solicited and armed[1] != self.armed[1]:
            self.armed = armed
            self.device.raise_completion_event(self.number, self.vector)


def create_ring_cq(device: "Device", request: Any) -> Any:
    """CREATE_RING_CQ"""
    if not is_depth(request.cqe, 1, device.config.ring_max_cqe) \
            or request.comp_vector >= device.config.num_comp_vectors:
        raise Refused(abi.STATUS_INVAL)
    region = RingRegion(device.memory, request.region, HEAD + ENTRY * request.cqe)
    if not device.cq_numbers:
        raise Refused(abi.STATUS_NO_RESOURCE)
    number = device.cq_numbers.popleft()
    device.cqs[number] = CompletionQueue(device, number, region, request.cqe, request.comp_vector)
    return abi.RspCreateCq(cqn=number)


def destroy_cq(device: "Device", request: Any) -> None:
    """DESTROY_CQ"""
    cq = device.cqs.get(request.cqn)
    if cq is None:
        raise Refused(abi.STATUS_NO_OBJECT)
    if cq.users:
        raise Refused(abi.STATUS_BUSY)
    del device.cqs[cq.number]
    device.cq_numbers.append(cq.number)
