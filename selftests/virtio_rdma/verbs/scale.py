#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Many objects at once: CQs, QPs and MRs are created, connected, used and
destroyed, and nothing of them stays.

SCALE_QPS and SCALE_MRS in the environment are how many, which the device has to
have then; without them there are fewer where it has fewer. What one costs in time
and in memory of the kernel is a diagnostic line, not a result: time includes
this program's own, and memory is what the guest has less than before, without
what this program has.
"""

import ctypes
import mmap
import os
import resource
import time

import ktap
import rc
from rc import CQ, MR, PD, QP, QPCap, QPInitAttr, ALL_ACCESS, e, remote, sge

DEVICE = rc.open_device()


def count_of(name, usual, limit):
    """Returns how many the environment asks for; without that the usual number, or what the device has left."""
    asked = os.environ.get(name)
    return int(asked) if asked else max(1, min(usual, limit - 8))


QPS = count_of("SCALE_QPS", 256, min(DEVICE.attr.max_qp, DEVICE.attr.max_cq))
MRS = count_of("SCALE_MRS", 1000, DEVICE.attr.max_mr)
# Each object may take a descriptor of nothing, but pinned memory counts.
resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY,) * 2)
ktap.WATCHDOG = max(ktap.WATCHDOG, (QPS + MRS) // 20)


def field(path, name):
    """Returns a line of a file in /proc that is in KiB, in bytes."""
    with open(path, encoding="ascii") as file:
        for line in file:
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    raise KeyError(name)


def memory():
    """Returns how many bytes the kernel has taken, without those of this program."""
    return -field("/proc/meminfo", "MemAvailable") - field("/proc/self/status", "VmRSS")


class Cost:
    """Reports what `count` objects cost that the body of `with` creates or destroys."""

    def __init__(self, what, count):
        self.what, self.count = what, count

    def __enter__(self):
        self.memory, self.time = memory(), time.monotonic()

    def __exit__(self, kind, *_):
        if kind:
            return
        taken = (time.monotonic() - self.time) / self.count
        used = (memory() - self.memory) / self.count
        print(f"# {self.what}: {self.count}, each {taken * 1e6:.0f} us, {used:.0f} bytes")


def queue_pairs(_rng):
    """Each QP has its own CQ; neighbours are connected and write to each other."""
    count = QPS & ~1 or 2
    pd = PD(DEVICE.context)
    region = MR(pd, mmap.PAGESIZE, ALL_ACCESS)
    cqs, qps = [], []
    with Cost("create CQ", count):
        for number in range(count):
            cqs.append(CQ(DEVICE.context, 4, None, None, number % DEVICE.context.num_comp_vectors))
    with Cost("create QP", count):
        for cq in cqs:
            cap = QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1)
            qps.append(QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap)))
    ktap.equal(len({qp.qp_num for qp in qps}), count, "different QP numbers")
    end = Attributes(DEVICE)
    with Cost("connect QP", count):
        for number, qp in enumerate(qps):
            qp.to_rts(end.attributes(qps[number ^ 1].qp_num))
    with Cost("write and poll", count):
        for qp in qps:
            rc.post(qp.post_send, [rc.send_wr(e.IBV_WR_RDMA_WRITE, [sge(region, 0, 64)],
                                              wr_id=qp.qp_num, remote=remote(region, 64))])
        for cq, qp in zip(cqs, qps):
            (done,) = rc.complete(cq)
            ktap.equal((done.wr_id, done.qp_num), (qp.qp_num, qp.qp_num), "completion")
    with Cost("destroy QP", count):
        for qp in qps:
            qp.close()
    with Cost("destroy CQ", count):
        for cq in cqs:
            cq.close()
    region.close()
    pd.close()


class Attributes(rc.Endpoint):
    """An endpoint without a QP, for the attributes that connect one."""

    def __init__(self, device):  # pylint: disable=super-init-not-called
        self.device = device


def memory_regions(_rng):
    """Registers MRs over one buffer; the first, the last and some between carry data."""
    count = MRS
    with rc.Pair(DEVICE) as pair:
        memory_of = mmap.mmap(-1, mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory_of))
        source = pair.a.memory(8, data=b"scale is")
        regions = []
        with Cost("register MR", count):
            for _ in range(count):
                regions.append(MR(pair.b.pd, mmap.PAGESIZE, ALL_ACCESS, address))
        ktap.equal(len({region.rkey for region in regions}), count, "different keys")
        for number in {0, count - 1, *range(0, count, max(1, count // 100))}:
            memory_of[:8] = bytes(8)
            pair.a.post_send(e.IBV_WR_RDMA_WRITE, [sge(source)],
                             remote=(address, regions[number].rkey))
            rc.complete(pair.a.send_cq)
            ktap.same_bytes(memory_of[:8], b"scale is", "written")
        with Cost("deregister MR", count):
            for region in regions:
                region.close()


if __name__ == "__main__":
    ktap.run([queue_pairs, memory_regions])
