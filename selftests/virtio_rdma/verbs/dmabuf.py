#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Memory regions over dma-bufs, of files in memory that udmabuf makes into such."""

import errno
import fcntl
import mmap
import os
import signal
import struct

import abi
import ktap
import uverbs
from rc import ALL_ACCESS, SGE, Pair, PyverbsRDMAError, complete, e, fails_with, open_device, pinned
from pyverbs.mr import DmaBufMR
from pyverbs.pd import PD

DEVICE = open_device()
# The dma-buf has more pages than a page of a page table lists.
SIZE = 3 << 20
OFFSET = 3 * mmap.PAGESIZE + 100
LENGTH = SIZE - 2 * OFFSET
WRITE, READ, SEND, FAA = (e.IBV_WR_RDMA_WRITE, e.IBV_WR_RDMA_READ, e.IBV_WR_SEND,
                          e.IBV_WR_ATOMIC_FETCH_AND_ADD)
REFUSED = e.IBV_WC_REM_ACCESS_ERR
# _IOW('u', 0x42, struct udmabuf_create) and its flag.
UDMABUF_CREATE, UDMABUF_FLAGS_CLOEXEC = 0x40187542, 1


class Buffer:
    """A dma-buf, and the file that it shows."""

    def __init__(self, rng):
        self.file = os.memfd_create("dmabuf", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(self.file, SIZE)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        # The pages of the file come in any order.
        pages = list(range(SIZE // mmap.PAGESIZE))
        rng.shuffle(pages)
        for page in pages:
            os.pwrite(self.file, rng.randbytes(mmap.PAGESIZE), page * mmap.PAGESIZE)
        device = os.open("/dev/udmabuf", os.O_RDWR | os.O_CLOEXEC)
        request = bytearray(struct.pack("=IIQQ", self.file, UDMABUF_FLAGS_CLOEXEC, 0, SIZE))
        self.fd = fcntl.ioctl(device, UDMABUF_CREATE, request)
        os.close(device)

    def read(self, length, offset):
        return os.pread(self.file, length, offset)

    def write(self, data, offset):
        os.pwrite(self.file, data, offset)

    def close_fd(self):
        """Closes the descriptor; MRs that are attached keep the dma-buf."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close_fd()
        os.close(self.file)


def register(pair, buffer):
    """Registers LENGTH bytes at OFFSET for `b`, which are named by their offsets; returns the MR."""
    region = DmaBufMR(pair.b.pd, LENGTH, ALL_ACCESS, dmabuf=buffer.fd, offset=OFFSET)
    pair.b.mrs.append(region)
    return region


def move(rng, pair, buffer, region):
    """Moves data through a region in each way, to and from any place."""
    length = rng.randint(1, 20000)
    offset = OFFSET + rng.randrange(LENGTH - length)
    local, here = pair.a.mrs[0], SGE(offset, length, region.lkey)
    there = SGE(local.buf, length, local.lkey)
    data = rng.randbytes(length)
    local.write(data, length)
    before = buffer.read(SIZE, 0)
    pair.a.post_send(WRITE, [there], remote=(offset, region.rkey))
    complete(pair.a.send_cq)
    expected = before[:offset] + data + before[offset + length:]
    ktap.same_bytes(buffer.read(SIZE, 0), expected, "the file after a WRITE")
    data = rng.randbytes(length)
    buffer.write(data, offset)
    pair.a.post_send(READ, [there], remote=(offset, region.rkey))
    complete(pair.a.send_cq)
    ktap.same_bytes(local.read(length, 0), data, "what a READ brought")
    pair.a.post_recv([there])
    buffer.write(data[::-1], offset)
    pair.b.post_send(SEND, [here])
    complete(pair.b.send_cq)
    complete(pair.a.recv_cq)
    ktap.same_bytes(local.read(length, 0), data[::-1], "what a SEND brought")
    data = rng.randbytes(length)
    local.write(data, length)
    pair.b.post_recv([here])
    pair.a.post_send(SEND, [there])
    complete(pair.a.send_cq)
    complete(pair.b.recv_cq)
    ktap.same_bytes(buffer.read(length, offset), data, "what was received")


def refused(pair, region, offset, length=8):
    """Fails the test unless a write to a place is refused; connects both ends again."""
    local = pair.a.mrs[0]
    pair.a.post_send(WRITE, [SGE(local.buf, length, local.lkey)], remote=(offset, region))
    complete(pair.a.send_cq, 1, REFUSED)
    for end in (pair.a, pair.b):
        end.move(e.IBV_QPS_RESET)
    pair.connect()


def data(rng):
    """What goes into a region is in the file, and the reverse; nothing else changes."""
    with Buffer(rng) as buffer, Pair(DEVICE) as pair:
        local, region = pair.a.memory(20000), register(pair, buffer)
        for _ in range(20):
            move(rng, pair, buffer, region)
        word = -(-OFFSET // 8) * 8
        buffer.write(struct.pack("=Q", 41), word)
        pair.a.post_send(FAA, [SGE(local.buf, 8, local.lkey)], remote=(word, region.rkey), atomic=(1, 0))
        complete(pair.a.send_cq)
        ktap.equal(struct.unpack("=Q", buffer.read(8, word)), (42,), "an atomic")
        refused(pair, region.rkey, OFFSET - 1)
        refused(pair, region.rkey, OFFSET + LENGTH - 7)
        move(rng, pair, buffer, region)


def arguments(rng):
    """Ranges that are not in the dma-buf, files that are not a dma-buf, and access that it cannot give are refused."""
    with Buffer(rng) as buffer, Pair(DEVICE) as pair:
        pd, local = pair.b.pd, e.IBV_ACCESS_LOCAL_WRITE

        def fails(number, length=4096, access=local, fd=buffer.fd, offset=0):
            fails_with(number, lambda: DmaBufMR(pd, length, access, dmabuf=fd, offset=offset))

        fails(errno.EINVAL, length=0)
        fails(errno.EINVAL, length=SIZE + 1)
        fails(errno.EINVAL, length=4097, offset=SIZE - 4096)
        fails(errno.EINVAL, offset=SIZE)
        fails(errno.EINVAL, length=8192, offset=2 ** 64 - 4096)
        fails(errno.EINVAL, length=DEVICE.attr.max_mr_size + 1)
        fails(errno.EINVAL, fd=buffer.file)
        closed = os.dup(buffer.fd)
        os.close(closed)
        for fd in (closed, -1):
            fails(errno.EBADF, fd=fd)
        for flag in (e.IBV_ACCESS_MW_BIND, e.IBV_ACCESS_ZERO_BASED, e.IBV_ACCESS_ON_DEMAND, e.IBV_ACCESS_HUGETLB,
                     1 << 19):
            fails(errno.EINVAL, access=local | flag)
        fails(errno.EINVAL, access=e.IBV_ACCESS_REMOTE_WRITE)
        fails(errno.EINVAL, access=e.IBV_ACCESS_REMOTE_ATOMIC)
        whole = [DmaBufMR(pd, SIZE, local, dmabuf=buffer.fd) for _ in range(3)]
        whole.append(DmaBufMR(pd, 1, local | e.IBV_ACCESS_RELAXED_ORDERING, dmabuf=buffer.fd, offset=SIZE - 1))
        ktap.equal(len({region.rkey for region in whole}), 4, "keys")
        for region in whole:
            region.close()


def outlives_its_descriptor(rng):
    """A region works when its program has closed the dma-buf."""
    before = pinned()
    with Buffer(rng) as buffer, Pair(DEVICE) as pair:
        pair.a.memory(20000)
        region = register(pair, buffer)
        buffer.close_fd()
        for _ in range(3):
            move(rng, pair, buffer, region)
        ktap.equal(pinned() > before, True, "pages are pinned")
    ktap.equal(pinned(), before, "pages that are pinned")


def deregistered(rng):
    """A region that was deregistered gives access to nothing."""
    with Buffer(rng) as buffer, Pair(DEVICE) as pair:
        pair.a.memory(20000)
        for _ in range(3):
            region = register(pair, buffer)
            move(rng, pair, buffer, region)
            key = region.rkey
            pair.b.mrs.remove(region)
            region.close()
            refused(pair, key, OFFSET)


def not_registered_anew(rng):
    """The kernel refuses ibv_rereg_mr(), which libibverbs has done before, and the region stays as it was."""
    with Buffer(rng) as buffer, Pair(DEVICE) as pair:
        local, region = pair.a.memory(20000), register(pair, buffer)
        for flags in range(1, 8):
            request = abi.IbUverbsReregMr(
                mr_handle=region.handle, flags=flags, start=local.buf, length=4096, hca_va=local.buf,
                pd_handle=pair.b.pd.handle, access_flags=ALL_ACCESS)
            fails_with(errno.EOPNOTSUPP, uverbs.Commands(DEVICE.context.cmd_fd).ask, abi.IB_USER_VERBS_CMD_REREG_MR,
                       request, abi.IbUverbsReregMrResp)
        move(rng, pair, buffer, region)


def of_a_program_that_is_killed(rng):
    """Nothing stays of a region whose program is killed."""
    before = pinned()
    for _ in range(3):
        ready, told = os.pipe()
        child = os.fork()
        if not child:
            try:
                buffer, pd = Buffer(rng), PD(open_device().context)
                region = DmaBufMR(pd, SIZE, ALL_ACCESS, dmabuf=buffer.fd)
                os.write(told, b"%d" % region.rkey)
                signal.pause()
            finally:
                os._exit(1)
        os.close(told)
        key = os.read(ready, 20)
        os.close(ready)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        ktap.equal(bool(key), True, "the program had a region")
        ktap.equal(pinned(), before, "pages that are pinned")
        with Pair(DEVICE) as pair:
            pair.a.memory(8)
            refused(pair, int(key), 0)


def probe():
    """Ends the program with a skip if there are no dma-bufs, or the device has no MRs over them."""
    if not os.path.exists("/dev/udmabuf"):
        ktap.skip_all("no /dev/udmabuf (CONFIG_UDMABUF)")
    pd = PD(DEVICE.context)
    try:
        DmaBufMR(pd, 4096, ALL_ACCESS, dmabuf=-1)
    except PyverbsRDMAError as error:
        if error.error_code == errno.EOPNOTSUPP:
            ktap.skip_all(f"{DEVICE.name} has no memory regions over dma-bufs")
    finally:
        pd.close()


if __name__ == "__main__":
    probe()
    ktap.run([data, arguments, outlives_its_descriptor, deregistered, not_registered_anew,
              of_a_program_that_is_killed])
