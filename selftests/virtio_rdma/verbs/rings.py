# SPDX-License-Identifier: GPL-2.0
"""Rings in memory of this program, and the driver data that tells the driver where they are, for commands that are
sent as they are (uverbs.py)."""

import ctypes
import mmap

import abi
from uverbs import address, zeros

PAGE = mmap.PAGESIZE
# Bytes of the heads of rings, and of a CQE.
HEAD, SRQ_HEAD, CQ_HEAD, CQE = map(ctypes.sizeof, (abi.QpRing, abi.SrqRing, abi.CqRing, abi.RingCqe))
# The shape of a ring: its number of entries, the bytes of each, and the offset of the first.
NO_RING = (0, 0, 0)


class CqRing:
    """The ring of a CQ."""

    def __init__(self, cqe, size=None):
        self.memory = zeros(CQ_HEAD + cqe * CQE if size is None else size)

    def request(self, offset=0, more=0):
        """Returns the driver data of CREATE_CQ and RESIZE_CQ; `offset` and `more` spoil the address and the length."""
        return bytes(abi.UreqCreateCq(address(self.memory) + offset, len(self.memory) + more))


class QpRings:
    """The send ring and the receive ring of a QP."""

    def __init__(self, sq=(8, 64, HEAD), rq=(8, 32, 1024), size=2 * PAGE):
        self.memory, self.sq, self.rq = zeros(size), sq, rq

    def request(self, offset=0, more=0):
        """Returns the driver data of CREATE_QP; `offset` and `more` spoil the address and the length."""
        return bytes(abi.UreqCreateQp(address(self.memory) + offset, len(self.memory) + more, *self.sq, *self.rq))


class SrqRing:
    """The ring of an SRQ."""

    def __init__(self, ring=(8, 32, SRQ_HEAD), size=PAGE):
        self.memory, self.ring = zeros(size), ring

    def request(self, reserved=0):
        """Returns the driver data of CREATE_SRQ, and of MODIFY_SRQ for another ring."""
        return bytes(abi.UreqCreateSrq(address(self.memory), len(self.memory), *self.ring, reserved))
