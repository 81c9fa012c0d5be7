# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Protection domains, memory regions and their page tables."""

import secrets
import struct
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from .layout import abi
from .memory import Extent, Fault, GuestMemory
from .refused import Refused

if TYPE_CHECKING:
    from .device import Device

PAGE = 1 << abi.PAGE_SHIFT
FLAGS = (abi.ACCESS_LOCAL_WRITE | abi.ACCESS_REMOTE_WRITE | abi.ACCESS_REMOTE_READ | abi.ACCESS_REMOTE_ATOMIC
         | abi.ACCESS_MW_BIND | abi.ACCESS_HUGETLB | abi.ACCESS_RELAXED_ORDERING)


class ProtectionDomain:
    """A PD. `uses` counts the MRs and QPs that belong to it."""

    def __init__(self, number: int) -> None:
        self.number, self.uses = number, 0


class NoAccess(Exception):
    """A key does not give access to a range."""


def page_table(memory: GuestMemory, address: int, count: int) -> list[int]:
    """Reads a page table."""
    if address % 8:
        raise Refused(abi.STATUS_INVAL)
    try:
        pages = struct.unpack(f"<{count}Q", memory.read(address, 8 * count))
    except Fault:
        raise Refused(abi.STATUS_FAULT) from None
    if any(page % PAGE for page in pages):
        raise Refused(abi.STATUS_INVAL)
    return list(pages)


def extents(pages: list[int], offset: int, length: int) -> list[Extent]:
    """Returns where `length` bytes lie whose first one is at `offset` of the first page."""
    found: list[Extent] = []
    for page in pages:
        if length <= 0:
            break
        part = min(PAGE - offset, length)
        if found and found[-1].address + found[-1].length == page + offset:
            found[-1] = Extent(found[-1].address, found[-1].length + part)
        else:
            found.append(Extent(page + offset, part))
        length -= part
        offset = 0
    return found


class MemoryRegion:
    """An MR of REG_USER_MR, or, without extents, that of GET_DMA_MR over all memory of the guest."""

    def __init__(self, pd: ProtectionDomain, access: int, start: int, length: int, places: list[Extent] | None) -> None:
        self.pd, self.access, self.start, self.length = pd, access, start, length
        self.places = places
        self.ends = [0]
        for place in places or []:
            self.ends.append(self.ends[-1] + place.length)
        self.number = self.key = 0
        self.checked = -1

    def pieces(self, memory: GuestMemory, address: int, length: int, write: bool) -> list[memoryview]:
        """Returns the bytes of a range, or raises NoAccess."""
        at = address - self.start
        if at < 0 or at + length > self.length:
            raise NoAccess
        try:
            if self.places is None:
                return memory.pieces(address, length, write)
            self.check(memory)
            return self._pieces(self.places, memory, at, length, write)
        except Fault:
            raise NoAccess from None

    def check(self, memory: GuestMemory) -> None:
        """Raises Fault if a byte of the MR is not memory of the guest any more (D-MR-37)."""
        if self.checked == memory.generation or self.places is None:
            return
        for place in self.places:
            memory.pieces(*place, write=bool(self.access & abi.ACCESS_LOCAL_WRITE))
        self.checked = memory.generation

    def _pieces(self, places: list[Extent], memory: GuestMemory, at: int, length: int, write: bool) -> list[memoryview]:
        found: list[memoryview] = []
        index = bisect_right(self.ends, at) - 1
        while length:
            skip = at - self.ends[index]
            part = min(places[index].length - skip, length)
            found += memory.pieces(places[index].address + skip, part, write)
            at += part
            length -= part
            index += 1
        return found


def check_access(flags: int) -> None:
    """Refuses access flags that are not valid."""
    if flags & ~FLAGS:
        raise Refused(abi.STATUS_INVAL)
    if flags & (abi.ACCESS_REMOTE_WRITE | abi.ACCESS_REMOTE_ATOMIC) and not flags & abi.ACCESS_LOCAL_WRITE:
        raise Refused(abi.STATUS_INVAL)


def get_dma_mr(device: "Device", request: Any) -> Any:
    """GET_DMA_MR"""
    check_access(request.access_flags)
    return add(device, MemoryRegion(find_pd(device, request.pdn), request.access_flags, 0, 1 << 64, None))


def reg_user_mr(device: "Device", request: Any) -> Any:
    """REG_USER_MR"""
    pd = find_pd(device, request.pdn)
    check_access(request.access_flags)
    offset, length = request.start % PAGE, request.length
    npages = -(-(offset + length) // PAGE) if length else 0
    if length > device.config.max_mr_size or request.npages != npages or request.virt_addr + length > (1 << 64) - 1:
        raise Refused(abi.STATUS_INVAL)
    places = extents(page_table(device.memory, request.pages, npages), offset, length)
    mr = MemoryRegion(pd, request.access_flags, request.virt_addr, length, places)
    try:
        mr.check(device.memory)
    except Fault:
        raise Refused(abi.STATUS_FAULT) from None
    return add(device, mr)


def dereg_mr(device: "Device", request: Any) -> None:
    """DEREG_MR"""
    mr = device.mrs.pop(request.mrn, None)
    if mr is None:
        raise Refused(abi.STATUS_NO_OBJECT)
    del device.keys[mr.key]
    device.mr_numbers.append(mr.number)
    mr.pd.uses -= 1


def find_pd(device: "Device", pdn: int) -> ProtectionDomain:
    """Returns a PD by its number."""
    if pdn not in device.pds:
        raise Refused(abi.STATUS_NO_OBJECT)
    return device.pds[pdn]


def add(device: "Device", mr: MemoryRegion) -> Any:
    """Gives an MR its number and its key, and returns the reply."""
    if not device.mr_numbers:
        raise Refused(abi.STATUS_NO_RESOURCE)
    mr.number = device.mr_numbers.popleft()
    taken = {key >> 8 for key in device.keys} | {0}
    while mr.key >> 8 in taken:
        mr.key = secrets.randbits(32)
    device.mrs[mr.number] = device.keys[mr.key] = mr
    mr.pd.uses += 1
    return abi.RspMr(mrn=mr.number, lkey=mr.key, rkey=mr.key)


def create_pd(device: "Device", _request: Any) -> Any:
    """CREATE_PD"""
    if not device.pd_numbers:
        raise Refused(abi.STATUS_NO_RESOURCE)
    number = device.pd_numbers.popleft()
    device.pds[number] = ProtectionDomain(number)
    return abi.RspCreatePd(pdn=number)


def destroy_pd(device: "Device", request: Any) -> None:
    """DESTROY_PD"""
    if find_pd(device, request.pdn).uses:
        raise Refused(abi.STATUS_BUSY)
    del device.pds[request.pdn]
    device.pd_numbers.append(request.pdn)
