# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""In a guest: how fast a device registers memory and makes queue pairs.

    objects.py DEVICE GID_INDEX mr SIZE SECONDS   registrations a second
    objects.py DEVICE GID_INDEX mr-huge SIZE SECONDS
                                                  the same of memory in huge pages of 2 MiB
    objects.py DEVICE GID_INDEX qp SECONDS        QPs a second, from none to RTS and back to none
    objects.py DEVICE GID_INDEX hold QPS MRS      makes as many, says "holding", and fails if a QP is not in RTS when it
                                                  is told to end

The calls are libibverbs', through pyverbs; the microsecond or two that Python takes a call is in the figure.
"""

import contextlib
import ctypes
import mmap
import signal
import sys
import time

import pyverbs.enums as e
from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

PORT = 1
HUGE_PAGE = 2 << 20
MAP_HUGETLB = 0x40000


def repeated(action, seconds):
    """How many a second."""
    action()  # once for what is loaded or mapped the first time
    count, start = 0, time.monotonic()
    while True:
        action()
        count += 1
        elapsed = time.monotonic() - start
        if elapsed >= seconds:
            return count / elapsed


def registrations(context, size, seconds):
    """ibv_reg_mr and ibv_dereg_mr of memory that is there already."""
    with PD(context) as pd:
        memory = MR(pd, size, e.IBV_ACCESS_LOCAL_WRITE)
        memory.write(b"\x5a" * size, size)
        return registrations_of(pd, memory.buf, size, seconds)


def huge_registrations(context, size, seconds):
    """The same of memory in huge pages."""
    with huge_memory(size) as address, PD(context) as pd:
        return registrations_of(pd, address, size, seconds)


def registrations_of(pd, address, size, seconds):
    """ibv_reg_mr and ibv_dereg_mr of memory at an address."""
    access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ

    def one():
        MR(pd, size, access, address=address).close()

    return repeated(one, seconds)


@contextlib.contextmanager
def huge_memory(size):
    """Memory in huge pages that are there already."""
    set_huge_pages(-(-size // HUGE_PAGE))
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_HUGETLB)
        for place in range(0, size, HUGE_PAGE):
            memory[place] = 0x5a
        yield ctypes.addressof(ctypes.c_char.from_buffer(memory))
    finally:
        # Those of the mapping end with the program.
        set_huge_pages(0)


def set_huge_pages(count):
    """Sets how many huge pages the kernel keeps. It takes one write for each time that the file is opened."""
    with open("/proc/sys/vm/nr_hugepages", "w", encoding="ascii") as pool:
        pool.write(str(count))


def connect_to_itself(qp, gid, index):
    """INIT, RTR, RTS."""
    attr = QPAttr(port_num=PORT)
    attr.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
    attr.dest_qp_num = qp.qp_num
    attr.path_mtu = e.IBV_MTU_1024
    attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
    attr.min_rnr_timer, attr.retry_cnt, attr.rnr_retry, attr.timeout = 12, 7, 7, 14
    attr.ah_attr = AHAttr(gr=GlobalRoute(dgid=gid, sgid_index=index), is_global=1, port_num=PORT)
    qp.to_rts(attr)


def queue_pairs(context, index, seconds):
    """A QP connected to itself: create, INIT, RTR, RTS, destroy."""
    gid = context.query_gid(PORT, index)
    with PD(context) as pd, CQ(context, 16) as cq:
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(8, 8, 1, 1))

        def one():
            qp = QP(pd, init, QPAttr())
            connect_to_itself(qp, gid, index)
            qp.close()

        return repeated(one, seconds)


def hold(context, index, qps, mrs):
    """Keeps objects until SIGTERM, and returns how many of the QPs are not in RTS then."""
    gid = context.query_gid(PORT, index)
    with PD(context) as pd, CQ(context, 16) as cq:
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(8, 8, 1, 1))
        held = [QP(pd, init, QPAttr()) for _ in range(qps)]
        for qp in held:
            connect_to_itself(qp, gid, index)
        memory = MR(pd, 4096, e.IBV_ACCESS_LOCAL_WRITE)
        regions = [MR(pd, 4096, e.IBV_ACCESS_LOCAL_WRITE, address=memory.buf) for _ in range(mrs)]
        print("holding", flush=True)
        signal.sigwait({signal.SIGTERM})
        lost = sum(qp.query(e.IBV_QP_STATE)[0].qp_state != e.IBV_QPS_RTS for qp in held)
        for thing in (*held, *regions):
            thing.close()
        return lost


def main(device, index, what, *numbers):
    with Context(name=device) as context:
        if what == "mr":
            print(registrations(context, int(numbers[0]), float(numbers[1])))
        elif what == "mr-huge":
            print(huge_registrations(context, int(numbers[0]), float(numbers[1])))
        elif what == "hold":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            lost = hold(context, int(index), int(numbers[0]), int(numbers[1]))
            sys.exit(f"{lost} QPs are not in RTS" if lost else 0)
        else:
            print(queue_pairs(context, int(index), float(numbers[0])))


if __name__ == "__main__":
    main(*sys.argv[1:])
