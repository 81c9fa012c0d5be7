#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""A program polls a CQ in the kernel while another of its threads destroys the QP that the completion is of.

The caller of the driver in the kernel reads the QP's number from the completion with the CQ alone held. slow_poll.ko
lets polling return late, and the QP goes meanwhile; KASAN tells whether its memory is looked at behind that. A child
that shares the open device polls, because Python's threads take turns.
"""

import json
import os
import re
import subprocess
import time

import abi
import ktap
from rc import Pair, e, open_device, remote, sge

DEVICE = open_device()
MODULE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../kverbs/slow_poll.ko")
# Rounds. In each the QP may be destroyed too early or too late.
ROUNDS = 4
# Half of the time by which polling is late, in seconds.
HALF = 0.15


def poll_function():
    """Returns the symbol of the operation poll_cq. With CONFIG_CFI there is another one in front of it, __cfi_..., where
    the hash of its type is."""
    with open("/proc/kallsyms", encoding="ascii") as file:
        names = re.findall(r" [tT] (_R\S*2cq7poll_cq\S*)\t\[virtio_rdma\]", file.read())
    ktap.equal(len(names), 1, "functions of the driver that poll")
    return names[0]


def polls(pair, tell):
    """Polls once in a child, and writes what it found and when polling returned."""
    os.write(tell, b"x")
    completions = pair.a.send_cq.poll(1)[1]
    end = time.monotonic()
    os.write(tell, json.dumps([end, [(wc.wr_id, wc.status, wc.qp_num) for wc in completions]]).encode())
    os._exit(0)


def destroyed_meanwhile():
    """Runs a round; returns whether the QP was destroyed while the kernel polled, and the completion came."""
    with Pair(DEVICE, channel=True) as pair:
        source, target = pair.a.memory(64), pair.b.memory(64)
        pair.a.send_cq.req_notify()
        pair.a.post_send(e.IBV_WR_RDMA_WRITE, [sge(source)], wr_id=7, remote=remote(target))
        # The completion is there, so the first poll finds it.
        pair.a.channel.get_cq_event(pair.a.send_cq)
        pair.a.send_cq.ack_events(1)
        number = pair.a.qp.qp_num
        hear, tell = os.pipe()
        if os.fork() == 0:
            polls(pair, tell)
        os.read(hear, 1)
        time.sleep(HALF)
        pair.a.qp.close()
        gone = time.monotonic()
        end, completions = json.loads(os.read(hear, 1024))
        os.wait()
        os.close(hear)
        os.close(tell)
    if not completions or gone > end:
        return False
    ktap.equal(completions, [[7, e.IBV_WC_SUCCESS, number]], "completions")
    return True


def qp_goes_beside_poll(_rng):
    """The memory of a QP is not read once it was destroyed."""
    if DEVICE.has_feature(abi.F_RINGS):
        raise ktap.Skip("programs poll rings themselves")
    if not os.path.exists(MODULE):
        raise ktap.Skip("slow_poll.ko was not built (make KDIR=...)")
    loaded = subprocess.run(["insmod", MODULE, f"symbol={poll_function()}"], capture_output=True, text=True,
                            check=False)
    if loaded.returncode:
        raise ktap.Skip(f"the kernel cannot make a function late: {loaded.stderr.strip()}")
    try:
        rounds = sum(destroyed_meanwhile() for _ in range(ROUNDS))
    finally:
        subprocess.run(["rmmod", "slow_poll"], check=True)
    print(f"# the QP went in time in {rounds} of {ROUNDS} rounds")
    ktap.equal(rounds > 0, True, "the QP went in time")


ktap.run([qp_goes_beside_poll])
