# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Regions of rings, and the rings of work requests: posting, from the side of the device.

Words are stored and loaded in the order of the program, see memory.py.
"""

from typing import Any

from .layout import abi
from .memory import Fault, GuestMemory, full_barrier
from .memory_regions import PAGE, page_table
from .refused import Refused

MASK = 0xffffffff


class RingFailed(Exception):
    """A ring cannot be used any more."""


class RingRegion:
    """The memory that holds the rings of an object."""

    def __init__(self, memory: GuestMemory, region: Any, size: int) -> None:
        count = -(-size // PAGE)
        if region.npages < count:
            raise Refused(abi.STATUS_INVAL)
        self.memory, self.size = memory, size
        self.pages = page_table(memory, region.pages, count)
        if not self.intact():
            raise Refused(abi.STATUS_FAULT)

    def intact(self) -> bool:
        """Says whether all pages are memory of the guest."""
        return all(self.memory.covers(page, min(PAGE, self.size - PAGE * index), write=True)
                   for index, page in enumerate(self.pages))

    def load(self, offset: int) -> int:
        """Reads a word."""
        return self.memory.load(self._address(offset), "I")

    def store(self, offset: int, value: int) -> None:
        """Writes a word."""
        self.memory.store(self._address(offset), "I", value)

    def read(self, offset: int, length: int) -> bytes:
        """Copies an entry, which no page boundary cuts."""
        return self.memory.read(self._address(offset), length)

    def write(self, offset: int, data: bytes) -> None:
        """Writes into an entry."""
        self.memory.write(self._address(offset), data)

    def _address(self, offset: int) -> int:
        return self.pages[offset // PAGE] + offset % PAGE


class WorkRing:
    """A send or receive ring of a QP. `next` is the device's own index, and `seen` the last producer."""

    def __init__(self, region: RingRegion, shape: Any, producer: int, wake: int) -> None:
        self.region, self.producer_at, self.wake_at = region, producer, wake
        self.depth, self.stride, self.offset = shape.depth, shape.stride, shape.offset
        self.next = self.seen = 0
        self.failed = False

    def reset(self) -> None:
        """Begins at index 0 with a wake word of 0, if the memory is there."""
        self.next = self.seen = 0
        self.failed = False
        try:
            self.region.store(self.wake_at, 0)
        except Fault:
            pass

    def look(self) -> int:
        """Returns how many entries wait, or raises RingFailed."""
        if self.failed:
            raise RingFailed
        try:
            producer = self.region.load(self.producer_at)
        except Fault:
            raise RingFailed from None
        waiting = (producer - self.next) & MASK
        if waiting > self.depth or waiting < (self.seen - self.next) & MASK:
            raise RingFailed
        self.seen = producer
        return waiting

    def take(self, sleep: bool) -> tuple[int, bytes] | None:
        """Returns the next entry and its index. If there is none, and with `sleep`, the owner has to ring."""
        self.wake(0)
        while not self.look():
            if not sleep:
                return None
            self.wake(1)
            full_barrier()
            if not self.look():
                return None
            self.wake(0)
        index = self.next
        self.next = (index + 1) & MASK
        try:
            return index, self.region.read(self.offset + index % self.depth * self.stride, self.stride)
        except Fault:
            raise RingFailed from None

    def wake(self, value: int) -> None:
        """Sets or clears the wake word."""
        if self.failed:
            raise RingFailed
        try:
            self.region.store(self.wake_at, value)
        except Fault:
            raise RingFailed from None


def is_depth(depth: int, least: int, most: int) -> bool:
    """Says whether a ring may have this depth."""
    return depth > 0 and not depth & (depth - 1) and least <= depth <= most


def qp_region_size(shapes: list[tuple[Any, int, int]], most: int) -> int:
    """Returns the bytes of a QP's region. `shapes` has the shape of each ring, the least depth, and the longest entry.

    A shape that is not valid is refused.
    """
    size = 256
    pages = 1
    for shape, least, entry in shapes:
        stride = shape.stride
        if not is_depth(shape.depth, least, most) or not is_depth(stride, max(32, entry), 4096) \
                or shape.offset % stride or shape.offset < 256:
            raise Refused(abi.STATUS_INVAL)
        size = max(size, shape.offset + shape.depth * stride)
        pages += -(-shape.depth * stride // PAGE) + 1
    if size > pages * PAGE:
        raise Refused(abi.STATUS_INVAL)
    return size
