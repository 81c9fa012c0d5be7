#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Uses an MR over much memory, with data checked, until the file /tmp/stop is
there; then checks all of it.

Usage: plugged.py MIB

Prints "running" once data flows. A guest whose memory is plugged and unplugged
meanwhile runs this.
"""

import ctypes
import os
import random
import sys

import ktap
import rc
from rc import e, SGE

PAGE = 4096


def word(page, round_):
    """Returns what is in the first bytes of a page that was written in this round."""
    return (page << 32 | round_).to_bytes(8, "little")


def main(mib):
    size = mib << 20
    device = rc.open_device()
    rng = random.Random(mib)
    pair = rc.Pair(device)
    region, local = pair.b.memory(size), pair.a.memory(PAGE)
    pages = size // PAGE
    rounds = [0] * pages
    for page in range(pages):
        ctypes.memmove(region.buf + page * PAGE, word(page, 0), 8)
    sge, round_ = SGE(local.buf, PAGE, local.lkey), 0
    while not os.path.exists("/tmp/stop"):
        page, round_ = rng.randrange(pages), round_ + 1
        remote = (region.buf + page * PAGE, region.rkey)
        pair.a.post_send(e.IBV_WR_RDMA_READ, [sge], remote=remote)
        rc.complete(pair.a.send_cq)
        ktap.same_bytes(local.read(8, 0), word(page, rounds[page]), f"page {page} in round {round_}")
        rounds[page] = round_
        local.write(word(page, round_), 8)
        pair.a.post_send(e.IBV_WR_RDMA_WRITE, [sge], remote=remote)
        rc.complete(pair.a.send_cq)
        if round_ == 100:
            print("running", flush=True)
    for page in range(pages):
        got = ctypes.string_at(region.buf + page * PAGE, 8)
        ktap.same_bytes(got, word(page, rounds[page]), f"page {page} at the end")
    print(f"{round_} rounds, {pages} pages", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
