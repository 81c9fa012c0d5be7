#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Rings in memory that a program names by the attributes of the kernel, as part of its own or as part of a dma-buf. The
programs here poll and arm the rings themselves, so they also see what is in a CQ before anybody has taken it."""

import contextlib
import errno
import fcntl
import mmap
import os
import select
import struct
import time

import abi
import ktap
import rc
import rings_wild
import uverbs
from rc import fails_with as fails
from rings import CQ_HEAD, CQE, HEAD, PAGE
from rings_wild import CQ_DEPTH, INLINE, REGION, RQ, SGES, SIGNALED, SQ, WRITE, store
from uverbs import address, zeros

DEVICE = rc.open_device()
ARM_NEXT, CLOSED = abi.CqRing.arm_next.offset, abi.CqRing.closed.offset
CQ_BYTES = -(-(CQ_HEAD + CQ_DEPTH * CQE) // PAGE) * PAGE
QP_BYTES = -(-REGION // PAGE) * PAGE
# _IOW('u', 0x42, struct udmabuf_create) and its flag.
UDMABUF_CREATE, UDMABUF_FLAGS_CLOEXEC = 0x40187542, 1
# Bounds a wait for an event that never comes, and is how long an event that must not come has time to, in milliseconds.
NEVER_MS, SOON_MS = 60000, 50


def u32(value):
    return value.to_bytes(4, "little")


def u64(value):
    return value.to_bytes(8, "little")


class Own:
    """Memory of this process."""

    def __init__(self, size):
        self.memory = zeros(size)
        self.size, self.fd, self.start = size, -1, address(self.memory)

    def umem(self, **wrong):
        """Returns the description of the memory, with fields that are wrong."""
        fields = {"type": abi.IB_UVERBS_BUFFER_TYPE_VA, "addr": self.start, "length": self.size}
        return bytes(abi.IbUverbsBufferDesc(**{**fields, **wrong}))

    def cq(self):
        """Returns the attributes that name the memory to CQ_CREATE."""
        return {abi.UVERBS_ATTR_CREATE_CQ_BUF_UMEM: self.umem()}

    def close(self):
        self.memory = None


class OwnAsBefore(Own):
    """Memory of this process, in the attributes that older kernels have."""

    def cq(self):
        return {abi.UVERBS_ATTR_CREATE_CQ_BUFFER_VA: u64(self.start),
                abi.UVERBS_ATTR_CREATE_CQ_BUFFER_LENGTH: u64(self.size)}


class DmaBuf(Own):
    """Pages of a dma-buf, which does not begin with them."""

    def __init__(self, size):
        self.start, self.size, whole = PAGE, size, size + 2 * PAGE
        file = os.memfd_create("rings", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(file, whole)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.memory = mmap.mmap(file, size, offset=self.start)
        self.memory[:] = bytes(size)
        device = os.open("/dev/udmabuf", os.O_RDWR | os.O_CLOEXEC)
        request = bytearray(struct.pack("=IIQQ", file, UDMABUF_FLAGS_CLOEXEC, 0, whole))
        self.fd = fcntl.ioctl(device, UDMABUF_CREATE, request)
        os.close(device)
        os.close(file)

    def umem(self, **wrong):
        fields = {"type": abi.IB_UVERBS_BUFFER_TYPE_DMABUF, "fd": self.fd}
        return super().umem(**{**fields, **wrong})

    def close(self):
        if self.memory is not None:
            os.close(self.fd)
        super().close()


class DmaBufAsBefore(DmaBuf):
    """Pages of a dma-buf, in the attributes that older kernels have."""

    def cq(self):
        return {abi.UVERBS_ATTR_CREATE_CQ_BUFFER_FD: self.fd, abi.UVERBS_ATTR_CREATE_CQ_BUFFER_OFFSET: u64(self.start),
                abi.UVERBS_ATTR_CREATE_CQ_BUFFER_LENGTH: u64(self.size)}


def create_cq(program, attributes, driver=b"", cqe=CQ_DEPTH):
    """Creates a CQ with these attributes of its memory and with the program's channel; returns its handle."""
    uhw = {abi.UVERBS_ATTR_UHW_IN: driver} if driver else {}
    made = program.verbs.ioctl(abi.UVERBS_OBJECT_CQ, abi.UVERBS_METHOD_CQ_CREATE, {
        abi.UVERBS_ATTR_CREATE_CQ_HANDLE: 0, abi.UVERBS_ATTR_CREATE_CQ_CQE: u32(cqe),
        abi.UVERBS_ATTR_CREATE_CQ_USER_HANDLE: u64(0), abi.UVERBS_ATTR_CREATE_CQ_COMP_VECTOR: u32(0),
        abi.UVERBS_ATTR_CREATE_CQ_COMP_CHANNEL: program.channel, **attributes, **uhw,
    }, [(abi.UVERBS_ATTR_CREATE_CQ_RESP_CQE, 4)])
    return made[abi.UVERBS_ATTR_CREATE_CQ_HANDLE]


def create_qp(program, attributes, at=0, length=0, **shape):
    """Creates a QP with these attributes of its memory; returns its handle and its number."""
    sq, rq = shape.get("sq", SQ), shape.get("rq", RQ)
    made = program.verbs.ioctl(abi.UVERBS_OBJECT_QP, abi.UVERBS_METHOD_QP_CREATE, {
        abi.UVERBS_ATTR_CREATE_QP_HANDLE: 0, abi.UVERBS_ATTR_CREATE_QP_PD_HANDLE: program.pd,
        abi.UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE: program.cq, abi.UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE: program.cq,
        abi.UVERBS_ATTR_CREATE_QP_USER_HANDLE: u64(0),
        abi.UVERBS_ATTR_CREATE_QP_CAP: bytes(abi.IbUverbsQpCap(SQ[0], RQ[0], SGES, SGES, INLINE)),
        abi.UVERBS_ATTR_CREATE_QP_TYPE: u64(abi.QPT_RC), **attributes,
        abi.UVERBS_ATTR_UHW_IN: bytes(abi.UreqCreateQp(at, length, *sq, *rq)),
    }, [(abi.UVERBS_ATTR_CREATE_QP_RESP_CAP, len(bytes(abi.IbUverbsQpCap()))),
        (abi.UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, 4)])
    return made[abi.UVERBS_ATTR_CREATE_QP_HANDLE], int.from_bytes(made[abi.UVERBS_ATTR_CREATE_QP_RESP_QP_NUM], "little")


class Qp(rings_wild.Qp):
    """An RC QP on rings in memory of a kind."""

    def __init__(self, program, kind):
        self.program, self.buffer = program, kind(QP_BYTES)
        self.memory = self.buffer.memory
        attributes = {abi.UVERBS_ATTR_CREATE_QP_BUF_UMEM: self.buffer.umem()}
        self.handle, self.number = create_qp(program, attributes)
        self.sent = self.received = 0


class Program(rings_wild.Program):
    """An open device, and two QPs that talk to each other and have a CQ, all of them in memory of a kind."""

    def __init__(self, kind, rng):
        self.kind, self.completions, self.arms = kind, 0, 0
        super().__init__({"seed": rng.getrandbits(32), "device": DEVICE.name,
                          "gid": DEVICE.context.query_gid(rc.PORT, DEVICE.gid.gid_index).gid.replace(":", ""),
                          "gid_index": DEVICE.gid.gid_index, "mtu": DEVICE.port.active_mtu})

    def renew(self, depth):
        self.channel = self.verbs.ask(abi.IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL, abi.IbUverbsCreateCompChannel(),
                                      abi.IbUverbsCreateCompChannelResp).fd
        self.buffer = self.kind(CQ_BYTES)
        self.cq_memory = self.buffer.memory
        self.cq = create_cq(self, self.buffer.cq(), cqe=depth)
        self.qps = [Qp(self, self.kind), Qp(self, self.kind)]
        self.connect()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.channel)
        self.verbs.close()
        for buffer in [self.buffer, *(qp.buffer for qp in self.qps)]:
            buffer.close()

    def arm(self):
        """Asks for an event at the next completion."""
        self.arms += 1
        store(self.cq_memory, ARM_NEXT, self.arms)

    def has_event(self, wait):
        """Returns whether an event comes, and takes it."""
        came = bool(select.select([self.channel], [], [], wait / 1000)[0])
        if came:
            os.read(self.channel, 8)
        return came

    def complete(self):
        """Has one of the QPs write, and waits for the CQE, which stays in the ring."""
        qp = self.qps[self.completions % 2]
        qp.post_send(self.wqe(WRITE, SIGNALED))
        qp.ring()
        ktap.equal(self.completion(self.completions), 0, "status")
        self.completions += 1

    def take(self):
        """Takes all CQEs."""
        store(self.cq_memory, rings_wild.CONSUMER, self.completions)


def need_rings():
    """Ends the program with a skip if the device has no rings."""
    if not uverbs.has_rings(DEVICE.name):
        ktap.skip_all(f"{DEVICE.name} has no rings")


def need_dma_bufs():
    if not os.path.exists("/dev/udmabuf"):
        raise ktap.Skip("no /dev/udmabuf (CONFIG_UDMABUF)")


def works(kind, rng):
    """Data and events go through rings in memory of a kind; the memory is free again at the end."""
    before = rc.pinned()
    with Program(kind, rng) as program:
        for _ in range(3 * CQ_DEPTH):
            program.arm()
            program.complete()
            ktap.equal(program.has_event(NEVER_MS), True, "event")
            program.take()
        ktap.equal(program.has_event(0), False, "events that nobody asked for")
    ktap.equal(rc.pinned(), before, "pages that are pinned")


def own_memory(rng):
    """Rings in memory of the program."""
    works(Own, rng)
    works(OwnAsBefore, rng)


def dma_bufs(rng):
    """Rings in dma-bufs. The driver reads there how many events the program asked for."""
    need_dma_bufs()
    works(DmaBuf, rng)
    works(DmaBufAsBefore, rng)


def armed_beside_completions(rng):
    """CQEs that are in the ring when the program arms it raise no event (IBA 11.4.2.2), and the program finds them when
    it looks once more. The next one raises an event."""
    with Program(Own, rng) as program:
        for there in (1, 2, 8):
            for _ in range(there):
                program.complete()
            program.arm()
            ktap.equal(program.has_event(SOON_MS), False, f"event for {there} CQEs that were there")
            program.complete()
            ktap.equal(program.has_event(NEVER_MS), True, "event for the next one")
            program.complete()
            ktap.equal(program.has_event(SOON_MS), False, "event of a CQ that is not armed")
            program.take()


def refused(rng):
    """What the kernel or the driver does not take; nothing stays pinned."""
    with Program(Own, rng) as program:
        before = rc.pinned()
        buffer, small, ring = Own(CQ_BYTES), Own(PAGE), abi.UVERBS_ATTR_CREATE_CQ_BUF_UMEM

        def cq(error, attributes, driver=b"", cqe=CQ_DEPTH):
            fails(error, create_cq, program, attributes, driver, cqe)

        cq(errno.EINVAL, {})
        cq(errno.EINVAL, {ring: small.umem()}, cqe=2 * PAGE // CQE)
        cq(errno.EINVAL, {ring: buffer.umem()}, cqe=CQ_DEPTH - 1)
        cq(errno.EINVAL, {ring: buffer.umem(addr=buffer.start + 64, length=CQ_BYTES - 64)}, cqe=1)
        cq(errno.EINVAL, {ring: buffer.umem(length=CQ_BYTES - 64)}, cqe=1)
        cq(errno.EINVAL, {ring: buffer.umem(flags=1)})
        cq(errno.EINVAL, {ring: buffer.umem(type=2)})
        cq(errno.EINVAL, {ring: buffer.umem(), **OwnAsBefore(CQ_BYTES).cq()})
        cq(errno.EBADF, {ring: buffer.umem(type=abi.IB_UVERBS_BUFFER_TYPE_DMABUF, fd=-1)})
        driver = bytes(abi.UreqCreateCq(buffer.start, CQ_BYTES))
        cq(errno.EINVAL, {ring: buffer.umem()}, driver)
        cq(errno.EINVAL, {ring: buffer.umem()}, bytes(abi.UreqCreateCq(0, CQ_BYTES)))
        cq(errno.EOPNOTSUPP, {ring: buffer.umem()}, bytes(16) + u64(1))

        buffer = Own(QP_BYTES)

        def qp(error, description, *data, name=abi.UVERBS_ATTR_CREATE_QP_BUF_UMEM, **shape):
            fails(error, create_qp, program, {name: description}, *data, **shape)

        qp(errno.EINVAL, buffer.umem(), buffer.start, QP_BYTES)
        qp(errno.EINVAL, buffer.umem(), 0, QP_BYTES)
        qp(errno.EINVAL, buffer.umem(length=QP_BYTES - 64))
        qp(errno.EINVAL, buffer.umem(), sq=(SQ[0], SQ[1], QP_BYTES))
        qp(errno.EINVAL, buffer.umem(length=0), sq=(SQ[0], SQ[1], HEAD))
        for other in abi.UVERBS_ATTR_CREATE_QP_SQ_BUF_UMEM, abi.UVERBS_ATTR_CREATE_QP_RQ_BUF_UMEM:
            qp(errno.EINVAL, buffer.umem(), buffer.start, QP_BYTES, name=other)
        ktap.equal(rc.pinned(), before, "pages that are pinned")


def refused_dma_bufs(rng):
    """Parts of a dma-buf that are not there, or not whole pages."""
    need_dma_bufs()
    with Program(Own, rng) as program:
        buffer, ring = DmaBuf(CQ_BYTES), abi.UVERBS_ATTR_CREATE_CQ_BUF_UMEM
        for wrong in ({"addr": 3 * PAGE, "length": CQ_BYTES}, {"addr": PAGE + 64, "length": CQ_BYTES},
                      {"length": CQ_BYTES - 64}, {"length": 0}, {"addr": (1 << 64) - PAGE}):
            fails(errno.EINVAL, create_cq, program, {ring: buffer.umem(**wrong)}, cqe=1)
        fails(errno.EINVAL, create_cq, program, {ring: buffer.umem(fd=program.channel)})
        buffer.close()


def closed_when_the_device_goes(rng):
    """The driver writes to the rings that the device is gone, wherever they are. The program that opened it keeps its
    objects until it closes it."""
    kinds = [Own] + [DmaBuf] * os.path.exists("/dev/udmabuf")
    before = rc.pinned()
    with contextlib.ExitStack() as stack:
        programs = [stack.enter_context(Program(kind, rng)) for kind in kinds]
        for program in programs:
            program.complete()
            ktap.equal(rings_wild.load(program.cq_memory, CLOSED), 0, "closed")
        name = virtio_device()
        tell_driver("unbind", name)
        stack.callback(tell_driver, "bind", name)
        for program in programs:
            ktap.equal(rings_wild.load(program.cq_memory, CLOSED), 1, "closed")
            wakes = [rings_wild.load(qp.memory, at) for qp in program.qps for at in rings_wild.WAKES]
            ktap.equal(wakes, [1] * len(wakes), "wake words")
            fails(errno.EIO, program.verbs.post, uverbs.POST_SEND, program.qps[0].handle, [])
            ktap.equal(program.completion(0), 0, "status of the CQE that was there")
    ktap.equal(rc.pinned(), before, "pages that are pinned")
    while not is_usable():
        time.sleep(0.05)


def virtio_device():
    """Returns the name of the virtio device, which is the parent of the RDMA device or stands beside it."""
    parent = os.path.realpath(f"/sys/class/infiniband/{DEVICE.name}/device")
    return next((name for name in os.listdir(parent) if name.startswith("virtio")), os.path.basename(parent))


def tell_driver(what, name):
    """Writes the name of a device to a file of the driver."""
    with open(f"/sys/bus/virtio/drivers/virtio_rdma/{what}", "w", encoding="ascii") as file:
        file.write(name)


def is_usable():
    """Returns whether the device is there again, with its addresses."""
    try:
        return rc.Device(DEVICE.name).usable()
    except rc.PyverbsError:
        return False


if __name__ == "__main__":
    need_rings()
    # The last one takes the device away.
    ktap.run([own_memory, dma_bufs, armed_beside_completions, refused, refused_dma_bufs, closed_when_the_device_goes])
