#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Memory regions of many GiB, what is beyond the first four of them, and regions of huge pages."""

import contextlib
import ctypes
import errno
import mmap
import os
import time

import abi
import ktap
from rc import ALL_ACCESS, MR, SGE, Pair, complete, e, fails_with, open_device, rdma

DEVICE = open_device()
GIB = 1 << 30
SIZE = 5 * GIB + 4096
# Bytes of the file that is mapped over and over where there is less memory than SIZE. 4 GiB are no
# multiple of it: a place that was cut to 32 bits is in another page of the file.
FILE_SIZE = 25013 * mmap.PAGESIZE
SMALL_SHIFT = 12
HUGE_SHIFT = 21
HUGE_PAGE = 1 << HUGE_SHIFT
HUGE_SIZE = 16 * HUGE_PAGE
# How much memory a guest has besides a region of SIZE.
REST = GIB // 2
# An emulated guest takes minutes to pin more than a million pages.
ktap.WATCHDOG = max(ktap.WATCHDOG, 500)
WRITE, READ, SEND = e.IBV_WR_RDMA_WRITE, e.IBV_WR_RDMA_READ, e.IBV_WR_SEND
REFUSED = e.IBV_WC_REM_ACCESS_ERR

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
MAP_FIXED, MAP_NORESERVE, MAP_HUGETLB = 0x10, 0x4000, 0x40000
MADV_HUGEPAGE = 14
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def map_memory(length, flags, file=-1, at=None):
    """Maps memory that may be written; returns its address. Raises OSError."""
    address = LIBC.mmap(at, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address


def map_file(length):
    """Maps a file of FILE_SIZE over and over."""
    file = os.memfd_create("memory")
    os.truncate(file, FILE_SIZE)
    start = map_memory(length, PRIVATE | MAP_NORESERVE)
    for offset in range(0, length, FILE_SIZE):
        map_memory(min(FILE_SIZE, length - offset), mmap.MAP_SHARED | MAP_FIXED, file, start + offset)
    os.close(file)
    return start


def memory_info(name):
    """Returns how many bytes of memory a line of /proc/meminfo says."""
    with open("/proc/meminfo", encoding="ascii") as file:
        values = dict(line.split(":") for line in file)
    return int(values[name].split()[0]) << 10


def needs_large_regions():
    """Skips the test if the device has no MRs of SIZE."""
    if DEVICE.attr.max_mr_size < SIZE:
        why = "" if DEVICE.has_feature(abi.F_PAGE_LEVELS) else ": page tables have no levels"
        raise ktap.Skip(f"MRs of at most {DEVICE.attr.max_mr_size} bytes{why}")


def places(rng, size):
    """Returns offsets within a region of `size`, and how many bytes the test moves there."""
    for border in (HUGE_PAGE, GIB, 2 * GIB, 4 * GIB):
        if border < size:
            yield from ((border - 32, 64), (border, min(8192, size - border)))
    yield from ((0, 64), (size - 64, 64))
    for _ in range(20):
        length = rng.randint(1, 20000)
        yield rng.randrange(4 * GIB if size > 5 * GIB else 0, size - length), length


def page_shift(size):
    """Returns the binary logarithm of the bytes of the pages that the driver lists for the region of `size` bytes."""
    (shift,) = [entry["drv_page_shift"] for entry in rdma("-dd", "resource", "show", "mr") if entry["mrlen"] == size]
    return shift


def check(rng, start, size, what, shifts=range(SMALL_SHIFT, 64)):
    """Registers `size` bytes at `start`, and moves data from and to them. The driver lists them in pages of 2^n bytes,
    with n in `shifts`."""
    with Pair(DEVICE) as pair:
        before = time.monotonic()
        region = MR(pair.b.pd, size, ALL_ACCESS, address=start)
        pair.b.mrs.append(region)
        print(f"# {what}: {(time.monotonic() - before) * GIB / size * 1000:.0f} ms a GiB", flush=True)
        if not DEVICE.is_rxe:
            shift = page_shift(size)
            assert shift in (shifts if DEVICE.has_feature(abi.F_PAGE_SIZES) else [SMALL_SHIFT]), f"pages of 2^{shift}"
        local = pair.a.memory(20000)
        for offset, length in places(rng, size):
            new = rng.randbytes(length)
            local.write(new, length)
            pair.a.post_send(WRITE, [SGE(local.buf, length, local.lkey)], remote=(start + offset, region.rkey))
            complete(pair.a.send_cq)
            ktap.same_bytes(ctypes.string_at(start + offset, length), new, f"written at {offset:#x}")
            new = rng.randbytes(length)
            ctypes.memmove(start + offset, new, length)
            pair.a.post_send(READ, [SGE(local.buf, length, local.lkey)], remote=(start + offset, region.rkey))
            complete(pair.a.send_cq)
            ktap.same_bytes(local.read(length, 0), new, f"read at {offset:#x}")
            pair.a.post_recv([SGE(local.buf, length, local.lkey)])
            ctypes.memmove(start + offset, new[::-1], length)
            pair.b.post_send(SEND, [SGE(start + offset, length, region.lkey)])
            complete(pair.b.send_cq)
            complete(pair.a.recv_cq)
            ktap.same_bytes(local.read(length, 0), new[::-1], f"sent from {offset:#x}")
        pair.a.post_send(WRITE, [SGE(local.buf, 8, local.lkey)], remote=(start + size - 7, region.rkey))
        complete(pair.a.send_cq, 1, REFUSED)


def check_and_unmap(rng, start, size, what, **pages):
    """Checks a region over mapped memory, and unmaps it."""
    try:
        check(rng, start, size, what, **pages)
    finally:
        LIBC.munmap(start, size)


def file_over_and_over(rng):
    """Regions around 4 GiB and of 5 GiB, with less memory behind them."""
    needs_large_regions()
    start = map_file(SIZE)
    try:
        for size in (4 * GIB, 4 * GIB + mmap.PAGESIZE, SIZE):
            # No page of 8 KiB begins at an even place of the file each time.
            check(rng, start, size, f"{size:#x} bytes, the same pages of 4 KiB over and over", shifts=[SMALL_SHIFT])
    finally:
        LIBC.munmap(start, SIZE)


def pages(rng):
    """5 GiB of memory in pages of 4 KiB."""
    needs_large_regions()
    if (free := memory_info("MemAvailable")) < SIZE + REST:
        raise ktap.Skip(f"{free // GIB} GiB of memory are free")
    start = map_memory(SIZE, PRIVATE)
    check_and_unmap(rng, start, SIZE, "pages of 4 KiB")


def pool(size=None):
    """Sets the number of huge pages of hugetlbfs if `size` is given; returns how many there are, in use or not."""
    path = "/proc/sys/vm/nr_hugepages"
    if not os.path.exists(path):
        raise ktap.Skip("a kernel without hugetlbfs")
    if size is not None:
        with open(path, "w", encoding="ascii") as file:
            file.write(str(size))
    with open(path, encoding="ascii") as file:
        return int(file.read())


@contextlib.contextmanager
def reserved(count):
    """Reserves huge pages."""
    before = pool()
    try:
        if (size := pool(before + count)) < before + count:
            raise ktap.Skip(f"memory for {size - before} of {count} huge pages")
        yield
    finally:
        pool(before)


def huge_pages(rng):
    """Memory in huge pages of hugetlbfs."""
    with reserved(HUGE_SIZE // HUGE_PAGE):
        start = map_memory(HUGE_SIZE, PRIVATE | MAP_HUGETLB)
        check_and_unmap(rng, start, HUGE_SIZE, "huge pages", shifts=range(HUGE_SHIFT, 64))


def transparent_huge_pages(rng):
    """Memory that the kernel puts into huge pages, which does not begin and end with one."""
    if not os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        raise ktap.Skip("a kernel without transparent huge pages")
    before, length = memory_info("AnonHugePages"), HUGE_SIZE + HUGE_PAGE
    start = map_memory(length, PRIVATE)
    try:
        LIBC.madvise(start, length, MADV_HUGEPAGE)
        first = -start % HUGE_PAGE + 3 * mmap.PAGESIZE
        check(rng, start + first, HUGE_SIZE - 7 * mmap.PAGESIZE, "transparent huge pages")
        found = memory_info("AnonHugePages") - before
        if found < HUGE_SIZE // 2:
            raise ktap.Skip(f"all went well, but only {found} of {length} bytes were in huge pages")
    finally:
        LIBC.munmap(start, length)


def larger_than_the_largest(_rng):
    """A region of one page more than the device registers is refused."""
    with Pair(DEVICE) as pair:
        length = DEVICE.attr.max_mr_size + mmap.PAGESIZE
        fails_with(errno.EINVAL, MR, pair.a.pd, length, ALL_ACCESS, 0x10000)


if __name__ == "__main__":
    ktap.run([file_over_and_over, pages, huge_pages, transparent_huge_pages, larger_than_the_largest])
