#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Writes a large file of a remote file system, reads it back from the server, and looks at every byte.

Usage: large.py FILE MEBIBYTES
"""

import os
import random
import sys

PIECE = 1 << 20


def pieces(count):
    """Yields the contents of the file."""
    rng = random.Random(count)
    return (rng.randbytes(PIECE) for _ in range(count))


def main():
    path, count = sys.argv[1], int(sys.argv[2])
    with open(path, "wb") as file:
        for piece in pieces(count):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as caches:
        caches.write("3")
    with open(path, "rb") as file:
        for number, piece in enumerate(pieces(count)):
            if file.read(PIECE) != piece:
                sys.exit(f"{path}: the MiB {number} of {count} differs")
        if file.read(1):
            sys.exit(f"{path}: it has more than {count} MiB")
    os.remove(path)


main()
