# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Memory of the guest: what the front end has shared.

Words are read and written through casts of memoryview, which CPython does by one access of native size. A processor of
x86 keeps the order of stores, and that of loads, so a release and an acquire need nothing. A full barrier is needed
where a store comes before a load; full_barrier() is one.
"""

import mmap
import sys
import threading
from typing import NamedTuple

assert sys.byteorder == "little", "words of rings are little-endian"

_lock = threading.Lock()


def full_barrier() -> None:
    """Orders all earlier stores before all later loads: taking a lock is a locked instruction."""
    with _lock:
        pass


class Fault(Exception):
    """An address is not memory of the guest."""


class Extent(NamedTuple):
    """A contiguous piece of memory by its address in the guest."""

    address: int
    length: int


class Region:
    """A region of memory that the front end has shared."""

    def __init__(self, guest: int, size: int, user: int, offset: int, fd: int) -> None:
        self.guest, self.size, self.user = guest, size, user
        try:
            area = mmap.mmap(fd, offset + size)
            self.writable = True
        except PermissionError:
            area = mmap.mmap(fd, offset + size, prot=mmap.PROT_READ)
            self.writable = False
        self.bytes = memoryview(area)[offset:offset + size]


class GuestMemory:
    """All regions. `generation` changes when they do."""

    SIZES = {"H": 2, "I": 4, "Q": 8}

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.generation = 0

    def set_regions(self, regions: list[Region]) -> None:
        """Replaces all regions."""
        self.regions = regions
        self.generation += 1

    def guest_address(self, user: int) -> int:
        """Returns the address in the guest of an address in the front end."""
        for region in self.regions:
            if region.user <= user < region.user + region.size:
                return region.guest + user - region.user
        raise Fault

    def pieces(self, address: int, length: int, write: bool = False) -> list[memoryview]:
        """Returns the bytes of a range, which may lie in several regions. No bytes are memory wherever they lie."""
        found = []
        while length:
            region = self._region(address)
            if write and not region.writable:
                raise Fault
            start = address - region.guest
            piece = region.bytes[start:start + min(length, region.size - start)]
            found.append(piece)
            address += len(piece)
            length -= len(piece)
        return found

    def covers(self, address: int, length: int, write: bool = False) -> bool:
        """Says whether all bytes of a range are memory of the guest."""
        try:
            self.pieces(address, length, write)
        except Fault:
            return False
        return True

    def read(self, address: int, length: int) -> bytes:
        """Copies bytes."""
        return b"".join(self.pieces(address, length))

    def write(self, address: int, data: bytes) -> None:
        """Writes bytes."""
        scatter(self.pieces(address, len(data), write=True), data)

    def load(self, address: int, form: str) -> int:
        """Reads a word by one access."""
        return self._word(address, form, False)[0]

    def store(self, address: int, form: str, value: int) -> None:
        """Writes a word by one access."""
        self._word(address, form, True)[0] = value

    def _region(self, address: int) -> Region:
        for region in self.regions:
            if region.guest <= address < region.guest + region.size:
                return region
        raise Fault

    def _word(self, address: int, form: str, write: bool) -> memoryview:
        pieces = self.pieces(address, self.SIZES[form], write)
        if len(pieces) != 1:
            raise Fault
        return pieces[0].cast(form)  # type: ignore[call-overload]


def scatter(pieces: list[memoryview], data: bytes | memoryview) -> None:
    """Writes `data` to the beginning of `pieces`."""
    at = 0
    for piece in pieces:
        part = data[at:at + len(piece)]
        piece[:len(part)] = part
        at += len(part)
