# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Blocks of memory that programs move between two hosts, and the TCP connection by which the hosts talk meanwhile."""

import pickle

import numpy

SIZES = (1, 64, 4096, 65537, 4 << 20)


def pattern(number, size):
    """Returns what a block holds: bytes that follow from its number."""
    return ((numpy.arange(size, dtype=numpy.uint64) * 31 + number * 97) & 255).astype(numpy.uint8)


class Blocks:
    """A block of memory for each size, and a connection to the other side."""

    def __init__(self, connection):
        self.blocks = [numpy.zeros(size, dtype=numpy.uint8) for size in SIZES]
        self.stream = connection.makefile("rwb")

    def tell(self, what):
        """Sends an object to the other side."""
        pickle.dump(what, self.stream)
        self.stream.flush()

    def hear(self):
        """Returns what the other side sent."""
        return pickle.load(self.stream)

    def fill(self, first):
        """Gives each block its pattern."""
        for number, block in enumerate(self.blocks, first):
            block[:] = pattern(number, block.nbytes)

    def check(self, what, first):
        """Compares each block with its pattern."""
        for number, block in enumerate(self.blocks, first):
            differs = numpy.flatnonzero(block != pattern(number, block.nbytes))
            assert not differs.size, f"{what}: {block.nbytes} bytes: the first that differs is {differs[0]}"
