# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""A device instance: its configuration, its objects, its virtqueues and its events; and the network of all."""

import os
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from . import control
from .completion_queues import CompletionQueue
from .layout import abi
from .loop import Loop
from .memory import GuestMemory, Region
from .memory_regions import MemoryRegion, ProtectionDomain
from .queue_pairs import QueuePair
from .virtqueue import Chain, Malformed, Virtqueue

VIRTIO_F_VERSION_1 = 32
STATUS_FEATURES_OK, STATUS_NEEDS_RESET = 8, 64
VECTORS = 2  # V of the numbering of virtqueues
CONTROL, COMPLETION, DOORBELLS, EVENTS = 0, 1, 1 + VECTORS, 2 + VECTORS
GIDS = 16
EVENT_BYTES = 8


class Again:
    """Has the loop look at a virtqueue once more, so that a driver that never stops does not keep others waiting."""

    def __init__(self, device: "Device", index: int) -> None:
        self.device, self.index = device, index

    def run(self) -> None:
        """Looks at the virtqueue."""
        self.device.kick(self.index)

    def timer(self, deadline: float) -> None:
        """Is not used."""


class Network:
    """The device instances that reach each other."""

    def __init__(self) -> None:
        self.members: list[Device] = []

    def owner(self, gid: bytes) -> "Device | None":
        """Returns the device instance that has a GID."""
        return next((device for device in self.members if gid in device.gids), None)


class Device:
    """A device instance."""

    NEEDED = 1 << VIRTIO_F_VERSION_1 | 1 << abi.F_RINGS

    def __init__(self, network: Network, loop: Loop, mac: bytes | None) -> None:
        self.network, self.loop = network, loop
        network.members.append(self)
        self.memory = GuestMemory()
        self.config: Any = configuration(mac)
        self.offered = self.NEEDED | (mac is not None) << abi.F_MAC
        self.queues = [Virtqueue(self.memory) for _ in range(EVENTS + 1)]
        self.again = [Again(self, index) for index in range(EVENTS + 1)]
        self._forget()

    def _forget(self) -> None:
        """Makes everything that a driver can change what it is at first."""
        self.features = self.status = 0
        self.possible = False
        self.gids: list[bytes | None] = [None] * GIDS
        self.qkey_violations = 0
        self.pds: dict[int, ProtectionDomain] = {}
        self.mrs: dict[int, MemoryRegion] = {}
        self.keys: dict[int, MemoryRegion] = {}
        self.cqs: dict[int, CompletionQueue] = {}
        self.qps: dict[int, QueuePair] = {}
        # The number that has been unused for longest is the first one (D-RING-08).
        self.pd_numbers = deque(range(self.config.max_pd))
        self.mr_numbers = deque(range(self.config.max_mr))
        self.cq_numbers = deque(range(self.config.ring_max_cq))
        self.qp_numbers = deque(range(abi.GSI_QPN + 1, self.config.ring_max_qp + 1))
        self.events: deque[tuple[int, int]] = deque()
        self.completion_events: list[deque[int]] = [deque() for _ in range(VECTORS)]

    # ---- features and reset

    def agree(self, features: int) -> None:
        """Notes the features that the driver accepts. Those that are not possible count as not accepted."""
        self.features = features & self.offered
        self.possible = self.features == features and features & self.NEEDED == self.NEEDED

    def agreed(self, feature: int) -> bool:
        """Says whether the driver has agreed on a feature bit."""
        return bool(self.features >> feature & 1)

    def set_status(self, status: int) -> None:
        """Notes the device status. FEATURES_OK does not stand with features that are not possible."""
        if not self.possible:
            status &= ~STATUS_FEATURES_OK
        self.status = status | (self.status & STATUS_NEEDS_RESET if status else 0)

    def reset(self) -> None:
        """Resets the device instance. Its place in the network stays."""
        for qp in self.qps.values():
            qp.destroyed()
        for queue in self.queues:
            queue.started = queue.enabled = queue.broken = False
        self._forget()

    def disconnect(self) -> None:
        """Resets the device instance after its front end has gone."""
        self.reset()
        self.memory.set_regions([])
        for queue in self.queues:
            if queue.call is not None:
                os.close(queue.call)
        self.queues[:] = [Virtqueue(self.memory) for _ in self.queues]

    def set_regions(self, regions: list[Region]) -> None:
        """Changes what is memory of the guest. An object whose ring has lost memory fails (D-RING-39)."""
        self.memory.set_regions(regions)
        for cq in list(self.cqs.values()):
            if not cq.region.intact():
                cq.fail()
        for qp in list(self.qps.values()):
            qp.check_region()
        for index in range(len(self.queues)):
            self.kick(index)

    # ---- virtqueues

    def kick(self, index: int) -> None:
        """Handles what the driver has made available in a virtqueue."""
        if not self.queues[index].usable:
            return
        try:
            if index == CONTROL:
                self._commands()
            elif index == DOORBELLS:
                self._doorbells()
            elif index == EVENTS:
                self._deliver(EVENTS, self.events, lambda event: struct.pack("<II", *event))
            else:
                self._deliver(index, self.completion_events[index - COMPLETION],
                              lambda cqn: struct.pack("<II", cqn, 0))
        except Malformed:
            print(f"second-device: a malformed chain in virtqueue {index}", file=sys.stderr)
            if index in (CONTROL, DOORBELLS):
                self.status |= STATUS_NEEDS_RESET
                self.raise_event(abi.EVENT_DEVICE_FATAL, 0)

    def raise_event(self, event: int, handle: int) -> None:
        """Raises an asynchronous event. Of several that are the same and wait, one is kept."""
        if (event, handle) not in self.events:
            self.events.append((event, handle))
        self.kick(EVENTS)

    def raise_completion_event(self, cqn: int, vector: int) -> None:
        """Raises the event of a CQ. One event of a CQ waits at most."""
        if cqn not in self.completion_events[vector]:
            self.completion_events[vector].append(cqn)
        self.kick(COMPLETION + vector)

    def _commands(self) -> None:
        for queue, chain in self._chains(CONTROL):
            if chain.room == 0:
                queue.push(chain, 0)
                continue
            reply = control.execute(self, chain.read(control.MAX_REQUEST), chain.room)
            chain.write(reply)
            queue.push(chain, len(reply))

    def _doorbells(self) -> None:
        for queue, chain in self._chains(DOORBELLS):
            data = chain.read(8 * abi.MAX_DOORBELLS)
            queue.push(chain, 0)
            for number, which in struct.iter_unpack("<II", data[:len(data) & ~7]):
                if number in self.qps:
                    self.qps[number].doorbell(which)

    def _chains(self, index: int) -> Iterator[tuple[Virtqueue, Chain]]:
        queue = self.queues[index]
        for _ in range(queue.size):
            chain = queue.pop()
            if chain is None:
                return
            yield queue, chain
        self.loop.schedule(self.again[index])

    def _deliver(self, index: int, waiting: deque[Any], form: Callable[[Any], bytes]) -> None:
        queue = self.queues[index]
        while waiting and (chain := queue.pop()):
            if chain.room < EVENT_BYTES:
                queue.push(chain, 0)
                continue
            chain.write(form(waiting.popleft()))
            queue.push(chain, EVENT_BYTES)


def configuration(mac: bytes | None) -> Any:
    """Returns the configuration space. Fields of what the device does not have are 0."""
    features = 1 << abi.F_RINGS | (mac is not None) << abi.F_MAC
    return abi.Config(
        phys_port_cnt=1, magic=abi.MAGIC, revision=abi.REVISION, sys_image_guid=int.from_bytes(os.urandom(8), "little"),
        max_mr_size=1 << 30, page_size_cap=1 << abi.PAGE_SHIFT, max_send_sge=16, max_recv_sge=16, max_sge_rd=2,
        max_mr=4096, max_pd=256, max_qp_rd_atom=16, max_res_rd_atom=16 * 256, max_qp_init_rd_atom=16, max_pkeys=1,
        local_ca_ack_delay=15, features=features, mac=tuple(mac or bytes(6)),
        num_comp_vectors=VECTORS, ring_max_qp=256, ring_max_cq=256,
        ring_max_qp_wr=1024, ring_max_cqe=8192, ring_max_inline_data=256, fw_ver=1 << 32)
