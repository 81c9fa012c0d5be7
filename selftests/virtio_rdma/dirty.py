#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Writes a file through the page cache while memory is short, and compares it at the end.

Usage: dirty.py FILE STOP

Takes the memory of the machine until LEFT of it is available, which is less than the file has. So the kernel has to
look for memory all the time, and much of what it finds are dirty pages of the file. Goes on until there is a file STOP,
and says "running" every now and then.
"""

import mmap
import os
import random
import re
import sys

MIB = 1 << 20
LEFT = 20 * MIB
BLOCK, BLOCKS = 64 << 10, 768
# Blocks that are written between two looks at the memory.
ROUND = 64
# Which part of the memory that is available may be dirty, in percent. If all of it were, the kernel would have nothing
# left but to kill a process, because a host of NVMe over Fabrics allocates memory when it connects.
DIRTY = {"dirty_background_ratio": 20, "dirty_ratio": 40}


def content(block, version):
    """Returns what a block holds after it was written in some round."""
    return random.Random(f"{block}/{version}").randbytes(BLOCK)


def numbers(path):
    """Returns the numbers of a file with a name and a number in each line."""
    with open(path, encoding="ascii") as file:
        return {name: int(number) for name, number in re.findall(r"^(\S+?):?\s+(\d+)", file.read(), re.MULTILINE)}


def scanned():
    """Returns how many pages the kernel has looked at for want of memory."""
    found = numbers("/proc/vmstat")
    return found["pgscan_kswapd"] + found["pgscan_direct"]


def adjust(taken):
    """Takes memory, or gives some back, so that LEFT is available. `taken` is what was taken, in pieces."""
    more = numbers("/proc/meminfo")["MemAvailable"] * 1024 - LEFT
    for _ in range(max(0, more) // MIB):
        piece = mmap.mmap(-1, MIB)
        for page in range(0, MIB, mmap.PAGESIZE):
            piece[page] = 1
        taken.append(piece)
    for _ in range(min(max(0, -more) // MIB, len(taken))):
        taken.pop().close()


def load(file, stop):
    """Writes blocks at random places until told to stop. Returns the round in which each block was written last."""
    rng, taken, last, version = random.Random(7), [], [0] * BLOCKS, 0
    while version == 0 or not os.path.exists(stop):
        adjust(taken)
        for block in range(BLOCKS) if version == 0 else rng.sample(range(BLOCKS), ROUND):
            os.pwrite(file, content(block, version), block * BLOCK)
            last[block] = version
        version += 1
        print("running", flush=True)
    return last


def compare(file, last):
    """Compares the file, as it comes from the disk."""
    os.fsync(file)
    with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as drop:
        drop.write("3")
    wrong = [block for block, version in enumerate(last)
             if os.pread(file, BLOCK, block * BLOCK) != content(block, version)]
    if wrong:
        sys.exit(f"blocks {wrong} are not as they were written last")


def main():
    """Runs the program, and fails if memory was not short."""
    path, stop = sys.argv[1:]
    for name, percent in DIRTY.items():
        with open(f"/proc/sys/vm/{name}", "w", encoding="ascii") as setting:
            setting.write(str(percent))
    before = scanned()
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    compare(file, load(file, stop))
    pages = scanned() - before
    print(f"{pages} pages scanned")
    if pages < BLOCKS * BLOCK // mmap.PAGESIZE:
        sys.exit("memory was not short")


main()
