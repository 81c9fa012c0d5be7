# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Split virtqueues (VIRTIO 1.0), from the side of the device."""

import os
import struct

from .memory import Fault, GuestMemory, full_barrier, scatter

MAX_DESCRIPTORS = 8  # D-RING-10
DESC_F_NEXT, DESC_F_WRITE, DESC_F_INDIRECT = 1, 2, 4
AVAIL_F_NO_INTERRUPT = 1


class Malformed(Exception):
    """A chain, or the ring itself, cannot be followed. The queue is not used any more."""


class Chain:
    """The buffers of one descriptor chain."""

    def __init__(self, head: int) -> None:
        self.head = head
        self.readable: list[memoryview] = []
        self.writable: list[memoryview] = []

    @property
    def room(self) -> int:
        """Bytes that the device may write."""
        return sum(map(len, self.writable))

    def read(self, limit: int) -> bytes:
        """Copies up to `limit` readable bytes."""
        found = b""
        for piece in self.readable:
            found += piece[:limit - len(found)]
        return found

    def write(self, data: bytes) -> None:
        """Writes `data` to the beginning of the writable bytes."""
        scatter(self.writable, data)


class Virtqueue:
    """A virtqueue. Addresses of its parts are the front end's, and translated at each use: memory comes and goes."""

    def __init__(self, memory: GuestMemory) -> None:
        self.memory = memory
        self.size = 0
        self.descriptors = self.available = self.used = 0
        self.next_available = self.next_used = 0
        self.call: int | None = None
        self.started = self.enabled = self.broken = False

    @property
    def usable(self) -> bool:
        """Says whether the device may use the queue."""
        return self.started and self.enabled and not self.broken and self.size > 0

    def set_addresses(self, descriptors: int, available: int, used: int) -> None:
        """Sets where the parts are. The index of the used ring goes on from where it stands."""
        self.descriptors, self.available, self.used = descriptors, available, used
        self.next_used = self.memory.load(self.memory.guest_address(used) + 2, "H")

    def pop(self) -> Chain | None:
        """Takes the next chain, if there is one and the queue is usable."""
        if not self.usable:
            return None
        try:
            return self._pop()
        except (Fault, Malformed):
            self.broken = True
            raise Malformed from None

    def push(self, chain: Chain, written: int) -> None:
        """Returns a chain to the driver, and notifies the driver unless it wants no interrupt."""
        try:
            used = self.memory.guest_address(self.used)
            place = used + 4 + 8 * (self.next_used % self.size)
            self.memory.write(place, struct.pack("<II", chain.head, written))
            self.next_used = (self.next_used + 1) & 0xffff
            self.memory.store(used + 2, "H", self.next_used)
            full_barrier()
            flags = self.memory.load(self.memory.guest_address(self.available), "H")
        except Fault:
            self.broken = True
            raise Malformed from None
        if not flags & AVAIL_F_NO_INTERRUPT and self.call is not None:
            try:
                os.write(self.call, (1).to_bytes(8, "little"))
            except OSError:
                pass  # The counter is full, or nobody listens.

    def _pop(self) -> Chain | None:
        available = self.memory.guest_address(self.available)
        waiting = (self.memory.load(available + 2, "H") - self.next_available) & 0xffff
        if not waiting:
            return None
        if waiting > self.size:
            raise Malformed
        head = self.memory.load(available + 4 + 2 * (self.next_available % self.size), "H")
        chain = self._follow(head)
        self.next_available = (self.next_available + 1) & 0xffff
        return chain

    def _follow(self, head: int) -> Chain:
        chain, index = Chain(head), head
        table = self.memory.guest_address(self.descriptors)
        for _ in range(MAX_DESCRIPTORS):
            if index >= self.size:
                raise Malformed
            address, length, flags, following = struct.unpack("<QIHH", self.memory.read(table + 16 * index, 16))
            if flags & DESC_F_INDIRECT:  # The device does not offer them.
                raise Malformed
            write = bool(flags & DESC_F_WRITE)
            (chain.writable if write else chain.readable).extend(self.memory.pieces(address, length, write))
            if not flags & DESC_F_NEXT:
                return chain
            index = following
        raise Malformed
