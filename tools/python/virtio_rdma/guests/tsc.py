# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The frequency of this machine's time stamp counter (TSC), which an emulated x86 guest sees as its own."""

import ctypes
import functools
import mmap
import platform
import time

# rdtsc; shl rdx, 32; or rax, rdx; ret
RDTSC = bytes.fromhex("0f31 48c1e220 4809d0 c3")
SAMPLES = 50
INTERVAL = 0.2


@functools.cache
def frequency_khz():
    """Measures the TSC against the clock that QEMU keeps its guest's other clocks by (CLOCK_MONOTONIC). Returns kHz,
    with an error of about 10 ppm, or None on a machine without a TSC."""
    if platform.machine() != "x86_64":
        return None
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        page.write(RDTSC)
        start = ctypes.c_char.from_buffer(page)
        rdtsc = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(start))
        first_ns, first = sample(rdtsc)
        time.sleep(INTERVAL)
        last_ns, last = sample(rdtsc)
        # The page cannot be unmapped while an object of ctypes points into it.
        del start
    return round((last - first) * 1_000_000 / (last_ns - first_ns))


def sample(rdtsc):
    """Returns a time in nanoseconds and the TSC at that time: the pair of several between whose clock readings the
    least time went by, so that nothing else ran in between."""
    tries = []
    for _ in range(SAMPLES):
        before = time.monotonic_ns()
        ticks = rdtsc()
        after = time.monotonic_ns()
        tries.append((after - before, (before + after) // 2, ticks))
    return min(tries)[1:]
