#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Uses a device in loopback until it is taken away, then ends with status 0.

Prints "running" once data flows. A device that goes away shows as an error of
any call or completion, never as a hang: this program's parent waits for it.
"""

import rc
from rc import e, remote, sge


def main():
    device = rc.open_device()
    limits = device.attr
    # Three of these run at a time, and a transport may have few queues.
    count = min(4, limits.max_qp // 2 // 3, limits.max_cq // 4 // 3)
    pairs = [rc.Pair(device, depth=32) for _ in range(count)]
    regions = [(pair.a.memory(65536), pair.b.memory(65536)) for pair in pairs]
    for pair, (here, there) in zip(pairs, regions):
        pair.a.post_send(e.IBV_WR_RDMA_WRITE, [sge(here)], remote=remote(there))
        rc.complete(pair.a.send_cq)
    print("running", flush=True)
    try:
        while True:
            for pair, (here, there) in zip(pairs, regions):
                pair.b.post_recv([sge(there, 0, 4096)])
                pair.a.post_send(e.IBV_WR_RDMA_WRITE, [sge(here)], remote=remote(there))
                pair.a.post_send(e.IBV_WR_RDMA_READ, [sge(here)], remote=remote(there))
                pair.a.post_send(e.IBV_WR_SEND, [sge(here, 0, 4096)])
            for pair in pairs:
                rc.complete(pair.a.send_cq, 3)
                rc.complete(pair.b.recv_cq)
    except (rc.PyverbsError, AssertionError) as error:
        print(f"ended: {error}", flush=True)


if __name__ == "__main__":
    main()
