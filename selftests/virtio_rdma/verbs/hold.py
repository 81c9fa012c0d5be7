#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Makes objects until the kernel refuses one, says so, and keeps them until it
is told to end, or killed.

Usage: hold.py contexts | objects

Prints "KIND NUMBER ERRNO": how many there are of a kind, and why not one more.
"""

import errno
import signal
import sys

import rc
from rc import e
from pyverbs.cq import CQ
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr

# How many objects there are at most, which is more than any limit of the tests.
MOST = 200


def objects(device):
    """Yields new objects of each kind that a limit counts, without an end; the first is a PD."""
    pd = PD(device.context)
    cq = None
    yield pd
    while True:
        cq = CQ(device.context, 4)
        yield cq
        yield MR(pd, 4096, e.IBV_ACCESS_LOCAL_WRITE)
        yield rc.QP(pd, rc.QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=rc.QPCap(1, 1, 1, 1)))
        if device.attr.max_srq:
            yield SRQ(pd, SrqInitAttr(SrqAttr(max_wr=4, max_sge=1)))


def contexts(name):
    """Yields open contexts, without an end."""
    while True:
        yield rc.Context(name=name)


def main(kind):
    device = rc.open_device()
    # The device is open, which is the first context.
    held = [device.context] if kind == "contexts" else []
    why = 0
    try:
        for made in contexts(device.name) if kind == "contexts" else objects(device):
            held.append(made)
            if len(held) == MOST:
                break
    except PyverbsRDMAError as error:
        why = error.error_code
    print(kind, len(held), errno.errorcode.get(why, why), flush=True)
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main(sys.argv[1])
