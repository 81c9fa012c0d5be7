#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""The driver in front of a device that misbehaves: each kind of it ends in an
error and a counter of its own, at most one line in the log, and a device that
works again after it was bound anew. With rings, programs take their CQEs
themselves: the library in front of them gives out none that makes no sense.

The device is virtio-rdma-hostile. This program asks for a misbehaviour by a
line of JSON behind "@" on its standard output, and reads the answer from its
standard input; who runs it passes both on. HOSTILE_TRANSPORT is "vfio-user" or
"vhost-user".
"""

import errno
import functools
import glob
import json
import os
import re
import select
import struct
import subprocess
import sys
import threading

import ktap
import rc
import uverbs
from async_events import next_event
from pyverbs.mr import MW
from pyverbs.qp import QPInitAttrEx
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr
from pyverbs.xrcd import XRCD, XRCDInitAttr
from rc import (CQ, MR, PD, QP, ALL_ACCESS, AHAttr, Endpoint, GlobalRoute, Pair, QPAttr, QPCap, QPInitAttr, complete,
                e, empty, fails_with, pinned, post, recv_wr, remote, send_wr, sge)

DRIVER = "/sys/bus/virtio/drivers/virtio_rdma"
MODULE = "/run/vr/virtio_rdma.ko"
VFIO = os.environ.get("HOSTILE_TRANSPORT") == "vfio-user"
WRITE, SEND = e.IBV_WR_RDMA_WRITE, e.IBV_WR_SEND

# enum virtio_rdma_cmd
QUERY_PORT, CREATE_CQ, DESTROY_CQ, CREATE_PD, DESTROY_PD, REG_USER_MR, DEREG_MR = 1, 2, 3, 4, 5, 9, 10
CREATE_QP, MODIFY_QP, QUERY_QP, DESTROY_QP, QUERY_PKEY, REQ_NOTIFY_CQ = 11, 12, 13, 14, 15, 18
CREATE_RING_CQ, RESIZE_CQ, CREATE_RING_QP = 32, 33, 34
CREATE_SRQ, QUERY_SRQ, DESTROY_SRQ, RESIZE_SRQ, ALLOC_MW, DEALLOC_MW = 35, 37, 38, 39, 41, 42
ALLOC_XRCD, DEALLOC_XRCD = 47, 48
# Offsets in struct virtio_rdma_config.
PHYS_PORT_CNT, MAX_MR_SIZE, PAGE_SIZE_CAP, MAX_QP, MAX_QP_WR, MAX_SEND_SGE = 0, 32, 40, 48, 52, 64
MAX_CQ, MAX_CQE = 76, 80
COMP_VECTORS, RING_MAX_QP, RING_MAX_CQ, RING_MAX_QP_WR, RING_MAX_CQE = range(160, 180, 4)
# Offsets in struct virtio_rdma_cqe, and its size.
WR_ID, STATUS, OPCODE, BYTE_LEN, QP_NUM, CQE_SIZE = 0, 8, 9, 16, 24, 40
# The same where they are in struct virtio_rdma_ring_cqe, and others; its index of the work request is
# what names it.
WC_FLAGS, VLAN_ID, WQE_INDEX, SRQN, LAP = 32, 38, 40, 44, 60
WITH_VLAN = 1 << 5
# Offsets in struct virtio_rdma_qp_ring and struct virtio_rdma_cq_ring.
SQ_PRODUCER, RQ_PRODUCER, SQ_WAKE, RQ_WAKE = 0, 64, 128, 132
CONSUMER, CLOSED, ARM_NEXT, ARM_SOLICITED = 0, 4, 8, 12
# The same of struct virtio_rdma_srq_ring.
SRQ_PRODUCER, SRQ_CONSUMER, SRQ_WAKE = 0, 64, 128
# enum virtio_rdma_event_type
QP_FATAL, PORT_ACTIVE, SRQ_ERR, SRQ_LIMIT_REACHED, LAST_WQE_REACHED = 1, 9, 14, 15, 16
EVENT_SIZE = 8


def u32(value):
    return struct.pack("<I", value).hex()


def u64(value):
    return struct.pack("<Q", value).hex()


def order(**what):
    """Tells the device what to do wrong; how often a rule has held so far."""
    print("@" + json.dumps(what), flush=True)
    answer = json.loads(sys.stdin.readline())
    if "error" in answer:
        raise AssertionError(f"the device does not understand {what}: {answer['error']}")
    return answer["hits"]


def honest():
    return order(honest=True)


def reply(command, **what):
    """Spoils replies to a command."""
    return order(on="control", command=command, **what)


def virtio_device():
    """The virtio device that is bound, or was."""
    bound = glob.glob(DRIVER + "/virtio*")
    return os.path.basename(bound[0]) if bound else None


NAME = virtio_device()


def ctl(file, name=NAME):
    """Writes to a file of the driver in sysfs."""
    handle = os.open(f"{DRIVER}/{file}", os.O_WRONLY)
    try:
        os.write(handle, name.encode())
    finally:
        os.close(handle)


def bind():
    ctl("bind")


def unbind():
    ctl("unbind")


def rebind():
    """A fresh device."""
    if virtio_device():
        unbind()
    honest()
    bind()


def has_rings():
    """Whether driver and device agreed on VIRTIO_RDMA_F_RINGS."""
    (name,) = os.listdir(f"{DRIVER}/{NAME}/infiniband")
    verbs = uverbs.Uverbs(name)
    verbs.close()
    return verbs.path == uverbs.PATH_RINGS


RINGS = bool(NAME) and has_rings()
if RINGS:
    CREATE_CQ, CREATE_QP = CREATE_RING_CQ, CREATE_RING_QP


def device():
    """The device under test, once its port and its GID are there: the network interface brings
    these, after the device is registered."""
    (name,) = os.listdir(f"{DRIVER}/{NAME}/infiniband")
    found = rc.Device(name)
    while not found.usable():
        os.sched_yield()
        found.refresh()
    return found


def counters():
    links = json.loads(subprocess.run(["rdma", "-j", "statistic", "show"], check=True,
                                      stdout=subprocess.PIPE).stdout)
    return links[0]


def kernel_log():
    return subprocess.run(["dmesg"], check=True, stdout=subprocess.PIPE,
                          encoding="utf-8", errors="replace").stdout.splitlines()


class Watch:
    """What the driver counts and logs while a test runs."""

    def __init__(self):
        self.log = len(kernel_log())
        self.before = counters() if virtio_device() else {}

    def lines(self, pattern):
        return [line for line in kernel_log()[self.log:] if re.search(pattern, line)]

    def silent(self):
        """Nothing was counted or logged that is bad."""
        now = counters()
        ktap.equal([key for key in now if key.startswith("bad_") and now[key] != self.before[key]], [], "counters")
        ktap.equal(self.lines("misbehaves|has failed"), [], "lines")

    def counted(self, name, times=None):
        """The counter went up (by this much), and the first was logged, once."""
        now = counters()
        difference = now[name] - self.before[name]
        if times is None:
            ktap.equal(difference > 0, True, f"{name} goes up")
        else:
            ktap.equal(difference, times, f"{name} goes up by")
        expected = 0 if self.before[name] else 1
        logged = self.lines("the device misbehaves")
        ktap.equal(len(logged) <= max(expected, 1), True, f"at most one line: {logged}")
        others = [key for key, value in now.items() if key.startswith("bad_")
                  and key != name and value != self.before[key]]
        ktap.equal(others, [], "other counters that went up")

    def failed(self, why):
        """The device was taken out of service, with one line that says why."""
        lines = self.lines("the device has failed")
        ktap.equal(len(lines), 1, f"lines that say so: {lines}")
        ktap.equal(why in lines[0], True, f"{lines[0]} says: {why}")


def data_flows():
    """A fresh pair moves data."""
    with Pair(device()) as pair:
        here, there = pair.a.memory(8192, data=bytes(range(256)) * 32), pair.b.memory(8192)
        pair.b.post_recv([sge(there, 0, 4096)])
        pair.a.post_send(WRITE, [sge(here)], remote=remote(there))
        pair.a.post_send(SEND, [sge(here, 0, 4096)])
        complete(pair.a.send_cq, 2)
        complete(pair.b.recv_cq)
        ktap.same_bytes(there.read(8192, 0), bytes(range(256)) * 32, "data")


def recovers():
    """The device can be unbound, and works when it is bound again."""
    rebind()
    data_flows()


def isolated(test):
    """A test that fails leaves the next one a fresh device."""
    @functools.wraps(test)
    def run(rng):
        try:
            test(rng)
        except (Exception, ktap.Stuck):
            rebind()
            raise
    return run


# ---- configuration ---------------------------------------------------------

def fails(number, function):
    """A file of sysfs cannot be written to."""
    try:
        function()
    except OSError as error:
        ktap.equal(errno.errorcode[error.errno], errno.errorcode[number], "error")
        return
    raise AssertionError(f"no error, expected {errno.errorcode[number]}")


def refused(why, number=errno.EINVAL):
    """The driver does not bind, and one line says why."""
    watch = Watch()
    fails(number, bind)
    ktap.equal(os.path.exists(f"{DRIVER}/{NAME}/infiniband"), False, "there is an RDMA device")
    lines = watch.lines(r"virtio_rdma|virtio\d+:")
    said = [line for line in lines if why in line]
    ktap.equal(len(said), 1, f"lines that say {why}: {lines}")


def config(why, *patches):
    unbind()
    honest()
    for patch in patches:
        order(config=patch)
    refused(why)
    recovers()


def config_of_ones(_rng):
    config("has 4294967295 ports", "ones")


def config_of_zeros(_rng):
    config("has 0 ports", "zeros")


def config_of_ones_but_ports(_rng):
    config("virtqueues, more than there can be", "ones", [PHYS_PORT_CNT, u32(1)])


def config_without_objects(_rng):
    names = ("max_qp 0", "max_cq 0", "max_qp_wr 0", "max_cqe 0")
    offsets = (RING_MAX_QP, RING_MAX_CQ, RING_MAX_QP_WR, RING_MAX_CQE) if RINGS else (
        MAX_QP, MAX_CQ, MAX_QP_WR, MAX_CQE)
    for name, offset in zip(names, offsets):
        config(name, [offset, u32(0)])
    config("max_send_sge 0", [MAX_SEND_SGE, u32(0)])
    if RINGS:
        config("no completion vector", [COMP_VECTORS, u32(0)])
        config("no power of two", [RING_MAX_QP_WR, u32(100)])
        config("no power of two", [RING_MAX_CQE, u32(2**32 - 1)])
    config("no pages of 4 KiB", [PAGE_SIZE_CAP, u64(1 << 13)])


def config_with_queues_that_do_not_exist(_rng):
    if not VFIO:
        raise ktap.Skip("user-mode Linux itself warns about it")
    if RINGS:
        config("cannot set up", [COMP_VECTORS, u32(1000)])
    else:
        config("cannot set up", [MAX_QP, u32(100)])
        config("cannot set up", [MAX_CQ, u32(1000)])


def config_with_huge_queues(_rng):
    """The sizes of the rings count."""
    unbind()
    honest()
    for offset in (RING_MAX_CQE, RING_MAX_QP_WR) if RINGS else (MAX_CQE, MAX_QP_WR):
        order(config=[offset, u32(2**31 if RINGS else 2**32 - 1)])
    if RINGS:
        order(config=[RING_MAX_QP, u32(2**32 - 1)])
        order(config=[RING_MAX_CQ, u32(2**32 - 1)])
    order(config=[MAX_SEND_SGE, u32(2**32 - 1)])
    bind()
    attr = device().attr
    ktap.equal((attr.max_cqe <= (1 << 22 if RINGS else 32768), attr.max_qp_wr <= (1 << 16 if RINGS else 32768), attr.max_sge <= 32),
               (True,) * 3, "limits are sane")
    data_flows()
    recovers()


def config_of_huge_mrs(_rng):
    """The largest MR is one whose pages a command can count."""
    unbind()
    honest()
    order(config=[MAX_MR_SIZE, u64(2**64 - 1)])
    bind()
    ktap.equal(device().attr.max_mr_size, (2**32 - 1) << 12, "max_mr_size")
    data_flows()
    recovers()


# ---- replies ---------------------------------------------------------------

def spoilt_create(command, create, number, counter, **what):
    """A command that creates fails with this error and is counted; then it works."""
    watch = Watch()
    before = reply(command, **what)
    fails_with(number, create)
    ktap.equal(honest() - before, 1, "spoilt replies")
    watch.counted(counter, 1)
    create().close()


def reply_of_no_length(_rng):
    context = device().context
    spoilt_create(CREATE_PD, lambda: PD(context), errno.EIO, "bad_reply_length", used=0)


def reply_of_a_status_alone(_rng):
    context = device().context
    spoilt_create(CREATE_PD, lambda: PD(context), errno.EIO, "bad_reply_length", used=1)
    spoilt_create(CREATE_CQ, lambda: CQ(context, 4), errno.EIO, "bad_reply_length", used=4)


def reply_longer_than_its_buffer(_rng):
    context = device().context
    for used in (257, 2**31, 2**32 - 1):
        spoilt_create(CREATE_PD, lambda: PD(context), errno.EIO, "bad_reply_length", used=used)


def reply_with_an_unknown_status(_rng):
    context = device().context
    for status in ("0c", "80", "ff"):
        spoilt_create(CREATE_PD, lambda: PD(context), errno.EIO, "bad_reply_status",
                      write=[[0, status]], used=1)


def each_status_has_its_errno(_rng):
    context = device().context
    numbers = (errno.EIO, errno.EINVAL, errno.ENOENT, errno.ENOMEM, errno.EBUSY, errno.EOPNOTSUPP,
               errno.EPERM, errno.EFAULT, errno.EMSGSIZE, errno.EPROTO, errno.EEXIST)
    for status, number in enumerate(numbers, 1):
        reply(CREATE_PD, write=[[0, f"{status:02x}"]], used=1)
        fails_with(number, lambda: PD(context))
    honest()


def numbers_that_cannot_be(_rng):
    """CQ and QP numbers out of range or taken, for objects with rings: the device may take the memory
    of one for that of another, so it is out of service."""
    def wrong(command, create, number):
        watch = Watch()
        reply(command, write=[[1, u32(number)]])
        fails_with(errno.EIO, create)
        watch.counted("bad_handle", 1)
        watch.failed("it gives objects wrong numbers")

    for number in (1, 0, 2, 1000, 2**24, 2**32 - 1):
        found = device()
        with Pair(found) as pair:
            pd = PD(found.context)
            cq = CQ(found.context, 16)
            init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(4, 4, 1, 1))
            if number == 2:
                number = pair.a.qp.qp_num
            wrong(CREATE_QP, lambda: QP(pd, init), number)
            cq.close()
            pd.close()
        found.context.close()
        recovers()
    # The first CQ is the GSI's.
    for number in (0, 1000, 2**31, 2**32 - 1):
        found = device()
        wrong(CREATE_CQ, lambda: CQ(found.context, 4), number)
        found.context.close()
        recovers()


def hits():
    """How often a rule has held so far."""
    return order(interrupt="control", times=0)


class Full:
    """A program with as many objects of a kind as the device has."""

    def __init__(self, found, kind):
        self.verbs = uverbs.Uverbs(found.name)
        self.pd = self.verbs.alloc_pd()
        self.memory = uverbs.zeros(16384)
        at = uverbs.address(self.memory)
        self.rings = {"cq": (at, 4096), "qp": (at + 4096, 4096, 8, 64, 256, 8, 32, 1024),
                      "srq": (at + 8192, 4096, 8, 32, 256, 0)}
        self.kind = kind
        self.cq = None if kind == "cq" else self.create_cq()
        self.objects = []
        while True:
            try:
                self.objects.append(self.create())
            except OSError as error:
                ktap.equal(errno.errorcode[error.errno], "ENOMEM", f"the last {kind}")
                return

    def driver_data(self, kind):
        """The rings of an object."""
        return struct.pack("QQ" + "I" * (len(self.rings[kind]) - 2), *self.rings[kind]) if RINGS else b""

    def create_cq(self):
        return self.verbs.create_cq(16, self.driver_data("cq"))[0]

    def create(self):
        """An object; its handle."""
        if self.kind == "cq":
            return self.create_cq()
        if self.kind == "srq":
            return self.verbs.create_srq(self.pd, 8, 1, self.driver_data("srq"))[0]
        return self.verbs.create_qp(self.pd, self.cq, self.driver_data("qp"))[0]

    def destroy(self, handle):
        getattr(self.verbs, "destroy_" + self.kind)(handle)


KINDS = {"cq": (CREATE_CQ, DESTROY_CQ), "qp": (CREATE_QP, DESTROY_QP), "srq": (CREATE_SRQ, DESTROY_SRQ)}


def numbers_given_out_again(_rng):
    """A number is given out again before whoever destroyed the object that had it knows that it is gone."""
    for kind in ("cq", "qp", "srq") if RINGS else ("cq", "qp"):
        found = device()
        watch = Watch()
        full = Full(found, kind)
        count = len(full.objects)
        for _ in range(3):
            create, destroy = KINDS[kind]
            reply(create)
            before = reply(destroy, hold=2)
            threads = [threading.Thread(target=full.destroy, args=(full.objects.pop(),)),
                       threading.Thread(target=lambda: full.objects.append(full.create()))]
            for done, thread in enumerate(threads, 1):
                thread.start()
                while hits() != before + done:
                    os.sched_yield()
            # The device has given the only number out that is free; only now it says that it was freed.
            full.verbs.alloc_pd()
            for thread in threads:
                thread.join()
            ktap.equal(len(full.objects), count, "objects")
            honest()
        watch.silent()
        full.verbs.close()
        found.context.close()
    data_flows()


def numbers_change_hands(_rng):
    """Threads destroy and create objects where no number is free but theirs."""
    def run(full, count, errors):
        try:
            for _ in range(count):
                full.destroy(full.objects.pop())
                full.objects.append(full.create())
        except OSError as error:
            errors.append(error)

    for kind in ("cq", "qp", "srq") if RINGS else ("cq", "qp"):
        found = device()
        watch = Watch()
        full, errors = Full(found, kind), []
        threads = [threading.Thread(target=run, args=(full, 100, errors)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ktap.equal(errors, [], "errors")
        watch.silent()
        full.verbs.close()
        found.context.close()
    data_flows()


def polled_to_its_end(cq):
    """Whoever polls a CQ of a device that has failed hears of it."""
    try:
        while True:
            empty(cq)
            os.sched_yield()
    except rc.PyverbsError:
        pass


def fails_while_a_cq_comes(_rng):
    """The device fails just when a CQ is created, or moved to another ring."""
    for resizes in [False, True] * 8:
        found = device()
        cq = CQ(found.context, 32) if resizes else None
        reply(RESIZE_CQ if resizes else CREATE_CQ, jump=5000)
        try:
            if resizes:
                cq.resize(64)
            else:
                cq = CQ(found.context, 32)
        except rc.PyverbsError:
            pass
        if cq:
            polled_to_its_end(cq)
            cq.close()
        found.context.close()
        recovers()


def resize_of_too_many_cqes(_rng):
    """The device says that it moved more CQEs than the new ring holds."""
    for number in (65, 2**31, 2**32 - 1):
        found = device()
        cq = CQ(found.context, 32)
        watch = Watch()
        reply(RESIZE_CQ, write=[[1, u32(number)]])
        fails_with(errno.EIO, lambda: cq.resize(64))
        watch.failed("it moved more CQEs than there is room for")
        polled_to_its_end(cq)
        cq.close()
        found.context.close()
        recovers()


def resize_that_fails(_rng):
    """The old ring is in use then; memory that the device may use nevertheless stays where it is."""
    found = device()
    with Pair(found) as pair:
        here, there = pair.a.memory(64), pair.b.memory(64)
        for what, number in (({"write": [[0, "04"]]}, errno.ENOMEM), ({"used": 0}, errno.EIO)):
            before = pinned()
            reply(RESIZE_CQ, **{"used": 1, **what})
            fails_with(number, lambda: pair.a.send_cq.resize(4096))
            ktap.equal(pinned() - before > 0, number == errno.EIO, "the new ring is still pinned")
        honest()
    del here, there
    found.context.close()
    recovers()


def handles_that_cannot_be(_rng):
    """CQ and QP numbers out of range or taken; the objects that have them are not harmed."""
    rebind()
    found = device()
    with Pair(found) as pair:
        here, there = pair.a.memory(64), pair.b.memory(64)
        pd = PD(found.context)
        cq = CQ(found.context, 16)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(4, 4, 1, 1))
        for number in (pair.a.qp.qp_num, 0, 1, 1000, 2**32 - 1):
            spoilt_create(CREATE_QP, lambda: QP(pd, init), errno.EIO, "bad_handle", write=[[1, u32(number)]])
        # The first CQ is the pair's, or the GSI's.
        for number in (0, 1000, 2**31, 2**32 - 1):
            spoilt_create(CREATE_CQ, lambda: CQ(found.context, 4), errno.EIO, "bad_handle", write=[[1, u32(number)]])
        pair.a.post_send(WRITE, [sge(here)], remote=remote(there))
        complete(pair.a.send_cq)
        pd.close()
    recovers()


def mr_handles_mean_nothing(_rng):
    """The number of an MR is the device's own business: the driver keeps no table of them."""
    found = device()
    pd = PD(found.context)
    for number in (0, 1, 2**32 - 1):
        reply(REG_USER_MR, write=[[1, u32(number)]])
        region = MR(pd, 4096, ALL_ACCESS)
        region.close()
    pd.close()
    recovers()


def port_that_cannot_be(_rng):
    """MTU 0, tables of 2^32 - 1 and 0 entries, a speed and a width that do not exist."""
    found = device()
    watch = Watch()
    before = honest()
    ones = "ff" * 0x24
    reply(QUERY_PORT, times=3, write=[[1, ones]])
    port = found.context.query_port(1)
    ktap.equal((port.gid_tbl_len <= 256, port.pkey_tbl_len <= 128, port.active_mtu <= e.IBV_MTU_4096),
               (True,) * 3, "limits of the port")
    reply(QUERY_PORT, times=3, write=[[1, "00" * 0x24]])
    port = found.context.query_port(1)
    ktap.equal(honest() > before, True, "spoilt replies")
    watch.counted("bad_reply_value")
    found.context.close()
    # The tables of the core are made while the device is bound.
    unbind()
    reply(QUERY_PORT, times=100, write=[[2, "ff" * 26]])
    bind()
    recovers()
    # P_Keys that are said to be there and then are not.
    unbind()
    reply(QUERY_PORT, times=100, write=[[29, "ffff"]])
    fails(errno.EINVAL, bind)
    recovers()


def qp_state_that_cannot_be(_rng):
    with Pair(device()) as pair:
        watch = Watch()
        reply(QUERY_QP, write=[[1, "ff"]])
        fails_with(errno.EIO, pair.a.state)
        watch.counted("bad_reply_value", 1)
        reply(QUERY_QP, write=[[2, "ff" * 200]])
        pair.a.state()
        ktap.equal(pair.a.state(), e.IBV_QPS_RTS, "state")
        honest()


def objects_that_are_not_destroyed(_rng):
    """The device refuses to destroy: it is taken out of service, and what it may still touch is
    kept until it has been reset."""
    for command in (DESTROY_QP, DEREG_MR, DESTROY_PD):
        watch = Watch()
        pair = Pair(device())
        pair.a.memory(65536)
        reply(command, write=[[0, "05"]], used=1)
        pair.a.close()
        pair.b.close()
        watch.failed("does not destroy")
        pair.a.device.context.close()
        recovers()


# ---- SRQs, windows, domains ------------------------------------------------

def new_srq(pd):
    return SRQ(pd, SrqInitAttr(SrqAttr(max_wr=16, max_sge=1)))


def new_xrcd(context):
    """A domain that nobody else can name."""
    mask = e.IBV_XRCD_INIT_ATTR_FD | e.IBV_XRCD_INIT_ATTR_OFLAGS
    return XRCD(context, XRCDInitAttr(mask, os.O_CREAT, -1))


def async_fds():
    """The open files of asynchronous events; those of contexts that nobody closed are among them."""
    names = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in rc.descriptors()}
    return {fd for fd, name in names.items() if name == "anon_inode:[infinibandevent]"}


def no_event(fd):
    ktap.equal(select.select([fd], [], [], 0)[0], [], "events that wait")


# What makes each kind of object, and the commands that do and undo it.
EXTENDED = ((CREATE_SRQ, DESTROY_SRQ, lambda found, pd: new_srq(pd)),
            (ALLOC_MW, DEALLOC_MW, lambda found, pd: MW(pd, e.IBV_MW_TYPE_2)),
            (ALLOC_XRCD, DEALLOC_XRCD, lambda found, pd: new_xrcd(found.context)))


def short_replies(_rng):
    """Without the number of the new object, or with a part of it, which the driver does not use."""
    for command, _, create in EXTENDED:
        for used in (0, 1, 3, 2**32 - 1):
            found = device()
            pd = PD(found.context)
            spoilt_create(command, lambda: create(found, pd), errno.EIO, "bad_reply_length", used=used)
            # The device still has what it made, and does not let go of the PD.
            pd.close()
            found.context.close()
            recovers()


def refusals(_rng):
    """Each status has its errno, and nothing is left behind."""
    found = device()
    pd = PD(found.context)
    watch, before = Watch(), pinned()
    for command, _, create in EXTENDED:
        for status, number in ((2, errno.EINVAL), (3, errno.ENOENT), (4, errno.ENOMEM), (6, errno.EOPNOTSUPP)):
            order(on="control", command=command, write=[[0, f"{status:02x}"]], used=1)
            fails_with(number, lambda: create(found, pd))
    ktap.equal(pinned() - before, 0, "pages that are pinned")
    watch.silent()
    # The device has made each of them.
    found.context.close()
    recovers()


def srq_numbers_that_cannot_be(_rng):
    """Those of SRQs that exist, and those that no SRQ has; a domain has any but 0."""
    def wrong(command, number, create):
        watch = Watch()
        reply(command, write=[[1, u32(number)]])
        fails_with(errno.EIO, create)
        watch.counted("bad_handle", 1)
        watch.failed("it gives objects wrong numbers")

    for number in (0, 1, 2**24, 2**32 - 1):
        rebind()
        found = device()
        pd = PD(found.context)
        # The first SRQ of a fresh device has number 1.
        srq = new_srq(pd)
        wrong(CREATE_SRQ, number, lambda: new_srq(pd))
        srq.close()
        pd.close()
        found.context.close()
        recovers()
    found = device()
    wrong(ALLOC_XRCD, 0, lambda: new_xrcd(found.context))
    found.context.close()
    recovers()


def extended_objects_that_are_not_destroyed(_rng):
    for _, command, create in EXTENDED:
        watch = Watch()
        found = device()
        pd = PD(found.context)
        thing = create(found, pd)
        reply(command, write=[[0, "05"]], used=1)
        thing.close()
        watch.failed("does not destroy")
        pd.close()
        found.context.close()
        recovers()


def srq_that_moves_too_much(_rng):
    """The device says that it moved more work requests than the new ring holds."""
    for number in (65, 2**31, 2**32 - 1):
        found = device()
        pd = PD(found.context)
        srq = new_srq(pd)
        watch = Watch()
        reply(RESIZE_SRQ, write=[[1, u32(number)]])
        try:
            srq.modify(SrqAttr(max_wr=64), e.IBV_SRQ_MAX_WR)
        except rc.PyverbsRDMAError:
            pass
        watch.failed("it moved more work requests than there is room for")
        srq.close()
        pd.close()
        found.context.close()
        recovers()


def srq_whose_resizing_fails(_rng):
    """The old ring is in use then; memory that the device may use nevertheless stays where it is."""
    found = device()
    pd = PD(found.context)
    srq = new_srq(pd)
    for what, number in (({"write": [[0, "04"]]}, errno.ENOMEM), ({"used": 0}, errno.EIO)):
        before = pinned()
        reply(RESIZE_SRQ, **{"used": 1, **what})
        fails_with(number, lambda: srq.modify(SrqAttr(max_wr=256), e.IBV_SRQ_MAX_WR))
        ktap.equal(pinned() - before > 0, number == errno.EIO, "the new ring is still pinned")
    honest()
    srq.close()
    pd.close()
    found.context.close()
    recovers()


def srq_attributes_that_cannot_be(_rng):
    found = device()
    pd = PD(found.context)
    srq = new_srq(pd)
    watch = Watch()
    reply(QUERY_SRQ, write=[[1, "ff" * 16]])
    fails_with(errno.EIO, srq.query)
    watch.counted("bad_reply_value", 1)
    # Sizes are the driver's own business.
    reply(QUERY_SRQ, write=[[1, "ff" * 8]])
    ktap.equal(srq.query().max_wr, 16, "max_wr")
    honest()
    srq.close()
    pd.close()
    found.context.close()
    recovers()


def flood_of_srq_events(_rng):
    """A limit is reached once, if there is one, and an SRQ is in error once."""
    rebind()
    before = async_fds()
    found = device()
    (fd,) = async_fds() - before
    pd = PD(found.context)
    srq = new_srq(pd)
    watch = Watch()
    forge_event(SRQ_LIMIT_REACHED, 1, times=5000)
    wait_counted(watch, "events", 5000)
    no_event(fd)
    # Nothing waits in the SRQ, so that the device itself says so at once.
    srq.modify(SrqAttr(max_wr=16, srq_limit=1), e.IBV_SRQ_LIMIT)
    forge_event(SRQ_LIMIT_REACHED, 1, times=5000)
    forge_event(SRQ_ERR, 1, times=5000)
    forge_event(SRQ_ERR, 2, times=5000)
    wait_counted(watch, "stale_events", 5000)
    events = [next_event(found.context), next_event(found.context)]
    ktap.equal(events, [e.IBV_EVENT_SRQ_LIMIT_REACHED, e.IBV_EVENT_SRQ_ERR], "events")
    no_event(fd)
    watch.silent()
    srq.close()
    pd.close()
    found.context.close()
    recovers()


class Shared:
    """A pair of which one end receives from an SRQ."""

    def __enter__(self):
        self.device = device()
        self.pd = PD(self.device.context)
        self.srq = new_srq(self.pd)
        self.a, self.b = Endpoint(self.device), Endpoint(self.device, srq=self.srq)
        self.a.connect(self.b.qp.qp_num)
        self.b.connect(self.a.qp.qp_num)
        self.here = self.a.memory(64, data=bytes(range(64)))
        self.there = self.b.memory(64, pd=self.pd)
        return self

    def __exit__(self, *_):
        for thing in (self.a, self.b, self.srq, self.pd):
            thing.close()
        self.device.context.close()

    def send(self, wr_id=1):
        """One message, whose receive may complete otherwise."""
        post(self.srq.post_recv, [recv_wr([sge(self.there)], wr_id)])
        self.a.post_send(SEND, [sge(self.here)])
        complete(self.a.send_cq)


def cqes_of_an_srq(_rng):
    """Of a QP that does not exist, of an SRQ for XRC that does not exist, with a status or an opcode that
    does not exist; what came before and behind is not harmed."""
    for write in ([[QP_NUM, u32(1000)]], [[SRQN, u32(1)]], [[SRQN, u32(2**32 - 1)]]):
        with Shared() as shared:
            order(on="cq", write=write)
            shared.send()
            empty(shared.b.recv_cq)
            shared.send(2)
            ktap.equal(complete(shared.b.recv_cq)[0].wr_id, 2, "wr_id")
            ktap.same_bytes(shared.there.read(64, 0), bytes(range(64)), "data")
            honest()
    for write in ([[STATUS, "ff"]], [[OPCODE, "ff"]]):
        with Shared() as shared:
            order(on="cq", write=write)
            shared.send()
            complete(shared.b.recv_cq, 1, e.IBV_WC_GENERAL_ERR)
            honest()
    data_flows()


def heads_of_srqs_that_change(_rng):
    """What the device writes there harms the SRQ and its QPs alone, at most."""
    for offset in (SRQ_PRODUCER, SRQ_CONSUMER, SRQ_WAKE):
        for number in (1, 0, 2**31, 2**32 - 1):
            with Shared() as shared:
                for wr_id in range(3):
                    poke("srq", offset, number)
                    try:
                        post(shared.srq.post_recv, [recv_wr([sge(shared.there)], wr_id)])
                        shared.a.post_send(SEND, [sge(shared.here)])
                    except rc.PyverbsError:
                        break
                    shared.a.send_cq.poll(4)
                    shared.b.recv_cq.poll(4)
            data_flows()


def events_of_shared_queues(_rng):
    """A QP with an SRQ hears once that it took its last work request; an XRC target, which nobody has
    connected yet, hears nothing."""
    before = async_fds()
    with Shared() as shared:
        (fd,) = async_fds() - before
        watch = Watch()
        forge_event(LAST_WQE_REACHED, shared.b.qp.qp_num, times=1000)
        wait_counted(watch, "events", 1000)
        ktap.equal(next_event(shared.device.context), e.IBV_EVENT_QP_LAST_WQE_REACHED, "event")
        xrcd = new_xrcd(shared.device.context)
        init = QPInitAttrEx(qp_type=e.IBV_QPT_XRC_RECV, comp_mask=e.IBV_QP_INIT_ATTR_XRCD, xrcd=xrcd)
        target = QP(shared.device.context, init)
        watch = Watch()
        forge_event(QP_FATAL, target.qp_num, times=1000)
        wait_counted(watch, "events", 1000)
        no_event(fd)
        target.close()
        xrcd.close()
    data_flows()


# ---- the used ring ---------------------------------------------------------

def breaks_control(why="the control queue broke", **what):
    """The control queue breaks: the command fails, and so do all others."""
    found = device()
    watch = Watch()
    reply(CREATE_PD, **what)
    try:
        PD(found.context).close()
    except rc.PyverbsRDMAError as error:
        ktap.equal(errno.errorcode[error.error_code], "EIO", "error")
    fails_with(errno.EIO, lambda: PD(found.context))
    fails_with(errno.EIO, lambda: CQ(found.context, 4))
    watch.failed(why)
    ktap.equal(len(watch.lines("id .* is not a head|id .* out of range")) <= 1, True, "lines of virtio")
    found.context.close()
    recovers()


def reply_twice(_rng):
    breaks_control(twice=True)


def used_id_out_of_range(_rng):
    breaks_control(id=0xffff)
    breaks_control(id=2**32 - 1)


def used_id_never_posted(_rng):
    breaks_control(id=100)


def used_index_jumps(_rng):
    breaks_control(jump=5000)


def cq_breaks(_rng):
    """A CQ whose ring breaks takes the device out of service: what is outstanding is flushed."""
    for what in ({"id": 0xffff}, {"id": 200}):
        watch = Watch()
        found = device()
        pair = Pair(found)
        here, there = pair.a.memory(64), pair.b.memory(64)
        for wr_id in (1, 2):
            pair.b.post_recv([sge(there)], wr_id=wr_id)
        order(on="cq", **what)
        pair.a.post_send(WRITE, [sge(here)], wr_id=3, remote=remote(there))
        rc.poll(pair.a.send_cq, 1)
        while not watch.lines("the device has failed"):
            pair.a.send_cq.poll(1)
        watch.failed("a completion queue broke")
        flushed = complete(pair.b.recv_cq, 2, e.IBV_WC_WR_FLUSH_ERR)
        ktap.equal([wc.wr_id for wc in flushed], [1, 2], "flushed")
        pair.a.close()
        pair.b.close()
        found.context.close()
        recovers()


def cq_index_jumps(_rng):
    """The old entries that the jump uncovers name a buffer that is available: they are CQEs, if bad
    ones."""
    found = device()
    watch = Watch()
    pair = Pair(found)
    here, there = pair.a.memory(64), pair.b.memory(64)
    order(on="cq", jump=3000)
    pair.a.post_send(WRITE, [sge(here)], wr_id=3, remote=remote(there))
    complete(pair.a.send_cq)
    for _ in range(3000):
        empty(pair.a.send_cq)
    ktap.equal(len(watch.lines("misbehaves: a CQE has a wrong length")), 1, "lines")
    pair.a.close()
    pair.b.close()
    found.context.close()
    recovers()


def send_descriptor_twice(_rng):
    watch = Watch()
    found = device()
    pair = Pair(found)
    here, there = pair.a.memory(64), pair.b.memory(64)
    order(on="sq", twice=True)
    try:
        while True:
            pair.a.post_send(WRITE, [sge(here)], remote=remote(there))
            rc.poll(pair.a.send_cq, 1)
            if watch.lines("the device has failed"):
                break
    except rc.PyverbsError:
        pass
    watch.failed("a work queue broke")
    pair.a.close()
    pair.b.close()
    found.context.close()
    recovers()


def descriptors_kept_after_completion(_rng):
    """Work requests complete, and their descriptors do not come back: the ring is full then."""
    watch = Watch()
    found = device()
    pair = Pair(found, depth=256)
    here, there = pair.a.memory(64), pair.b.memory(64)
    order(on="sq", keep=True, times=2**40)
    try:
        # The largest ring of this driver's limits has fewer entries.
        for _ in range(5000):
            pair.a.post_send(WRITE, [sge(here)], remote=remote(there))
            rc.poll(pair.a.send_cq, 1)
    except rc.PyverbsError:
        pass
    watch.failed("keeps buffers of work requests that it completed")
    pair.a.close()
    pair.b.close()
    found.context.close()
    recovers()


def descriptors_kept_at_destroy(_rng):
    for queue in ("sq", "rq"):
        watch = Watch()
        found = device()
        pair = Pair(found)
        region = pair.a.memory(64)
        order(on=queue, keep=True, times=2**40)
        pair.a.post_recv([sge(region)])
        pair.b.move(e.IBV_QPS_ERR)
        pair.b.post_send(SEND, [])
        pair.a.close()
        pair.b.close()
        watch.failed("keeps buffers of an object")
        found.context.close()
        recovers()


def descriptors_kept_at_reset(_rng):
    watch = Watch()
    found = device()
    pair = Pair(found)
    region = pair.a.memory(64)
    order(on="rq", keep=True, times=2**40)
    pair.a.post_recv([sge(region)])
    pair.a.move(e.IBV_QPS_RESET)
    watch.failed("keeps buffers of an object")
    pair.a.close()
    pair.b.close()
    found.context.close()
    recovers()


# ---- CQEs ------------------------------------------------------------------

def bad_cqe(counter, write=(), receive=False, times=1, **what):
    """A CQE that makes no sense is counted and dropped; the CQ goes on. In the ring of a program it is
    dropped as well, and only the library sees it."""
    with Pair(device()) as pair:
        here, there = pair.a.memory(64), pair.b.memory(64)
        pair.b.post_recv([sge(there)], wr_id=7)
        watch = Watch()
        if receive:
            # The CQE of the receive is placed before that of the send.
            order(on="cq", times=times, write=list(write), **what)
            pair.a.post_send(SEND, [sge(here)])
            complete(pair.a.send_cq)
            empty(pair.b.recv_cq)
            watch.silent() if RINGS else watch.counted(counter, times)
            # For the device it is done; others complete, and this one goes with the QP.
            pair.b.post_recv([sge(there)], wr_id=6)
            pair.a.post_send(SEND, [sge(here)])
            complete(pair.a.send_cq)
            ktap.equal(complete(pair.b.recv_cq)[0].wr_id, 6, "wr_id")
        else:
            order(on="cq", times=times, write=list(write), **what)
            pair.a.post_send(WRITE, [sge(here)], wr_id=8, remote=remote(there))
            pair.a.post_send(WRITE, [sge(here)], wr_id=9, remote=remote(there))
            # Completing the second completes the first.
            ktap.equal(complete(pair.a.send_cq)[0].wr_id, 9, "wr_id")
            empty(pair.a.send_cq)
            watch.silent() if RINGS else watch.counted(counter, times)
        honest()
    data_flows()


def cqe_of_a_wrong_length(_rng):
    for used in (0, 39, 41, 2**32 - 1):
        bad_cqe("bad_cqe_length", used=used)


def cqe_of_no_qp(_rng):
    for number in (0, 5, 1000, 2**32 - 1):
        bad_cqe("bad_cqe_qp", [[QP_NUM, u32(number)]])


def cqe_of_no_work_request(_rng):
    if RINGS:
        for number in (5, 64, 1000, 2**31, 2**32 - 1):
            bad_cqe("", [[WQE_INDEX, u32(number)]])
            bad_cqe("", [[WQE_INDEX, u32(number)]], receive=True)
        return
    for number in (5, 63, 64, 1000, 2**32, 2**64 - 1):
        bad_cqe("bad_cqe_wr_id", [[WR_ID, u64(number)]])
        bad_cqe("bad_cqe_wr_id", [[WR_ID, u64(number)]], receive=True)


def cqe_of_an_unknown_status(_rng):
    bad_cqe("bad_cqe_status", [[STATUS, "ff"]])
    bad_cqe("bad_cqe_status", [[STATUS, "ff"]], receive=True)


def cqe_of_an_unknown_opcode(_rng):
    bad_cqe("bad_cqe_opcode", [[OPCODE, "ff"]], receive=True)


def cqe_of_the_other_kind(_rng):
    """A receive's in the place of a send's and the reverse: the CQ is not that queue's."""
    bad_cqe("bad_cqe_qp", [[OPCODE, "80"]])
    bad_cqe("bad_cqe_qp", [[OPCODE, "00"]], receive=True)


def cqe_of_too_many_bytes(_rng):
    for number in (65, 2**31, 2**32 - 1):
        bad_cqe("bad_cqe_byte_len", [[BYTE_LEN, u32(number)]], receive=True)


def cqe_again(_rng):
    """The copies of a CQE name nothing that is outstanding any more. A buffer that is given back
    twice is a copy too: the driver has made it available again by then."""
    for times, what in ((1, {"twice": True}), (10, {"then": [{"used": CQE_SIZE, "times": 10}]})):
        copies_of_a_cqe(times, what)
        recovers()


def copies_of_a_cqe(times, what):
    with Pair(device()) as pair:
        here, there = pair.a.memory(64), pair.b.memory(64)
        watch = Watch()
        order(on="cq", **what)
        pair.a.post_send(WRITE, [sge(here)], wr_id=1, remote=remote(there))
        ktap.equal(complete(pair.a.send_cq)[0].wr_id, 1, "wr_id")
        empty(pair.a.send_cq)
        watch.silent() if RINGS else watch.counted("bad_cqe_wr_id", times)
        honest()


def wrong_cqe(write, receive=False):
    """What a CQE says of its work request cannot be: the program hears of an error of it."""
    with Pair(device()) as pair:
        here, there = pair.a.memory(64), pair.b.memory(64)
        pair.b.post_recv([sge(there)], wr_id=7)
        order(on="cq", write=write)
        if receive:
            pair.a.post_send(SEND, [sge(here)])
            complete(pair.a.send_cq)
            cq = pair.b.recv_cq
        else:
            pair.a.post_send(WRITE, [sge(here)], wr_id=7, remote=remote(there))
            cq = pair.a.send_cq
        ktap.equal(complete(cq, 1, e.IBV_WC_GENERAL_ERR)[0].wr_id, 7, "wr_id")
        honest()
    data_flows()


def wrong_cqes_in_a_ring(_rng):
    for status in ("16", "80", "ff"):
        wrong_cqe([[STATUS, status]])
        wrong_cqe([[STATUS, status]], receive=True)
    for opcode in ("82", "ff"):
        wrong_cqe([[OPCODE, opcode]], receive=True)
    for opcode in ("07", "40", "7f"):
        wrong_cqe([[OPCODE, opcode]])


def cqe_that_never_comes(_rng):
    """A later one completes what was before it."""
    with Pair(device()) as pair:
        here, there = pair.a.memory(64), pair.b.memory(64)
        order(on="cq", keep=True)
        for wr_id in (8, 9):
            pair.a.post_send(WRITE, [sge(here)], wr_id=wr_id, remote=remote(there))
        ktap.equal(complete(pair.a.send_cq)[0].wr_id, 9, "wr_id")
        empty(pair.a.send_cq)
    data_flows()


def cqes_out_of_place(_rng):
    """A lap that is wrong, an index that jumps: nothing is seen of that CQ any more, and nobody hangs."""
    for what in ({"write": [[LAP, u32(0)]]}, {"write": [[LAP, u32(2)]]}, {"write": [[LAP, u32(2**32 - 1)]]},
                 {"keep": True, "times": 2**40}):
        with Pair(device(), channel=True) as pair:
            here, there = pair.a.memory(64), pair.b.memory(64)
            pair.a.send_cq.req_notify()
            order(on="cq", **what)
            for _ in range(4):
                pair.a.post_send(WRITE, [sge(here)], remote=remote(there))
            for _ in range(1000):
                empty(pair.a.send_cq)
            honest()
        data_flows()
    with Pair(device()) as pair:
        here, there = pair.a.memory(64), pair.b.memory(64)
        order(on="cq", jump=3)
        for wr_id in range(4):
            pair.a.post_send(WRITE, [sge(here)], wr_id=wr_id, remote=remote(there))
        ktap.equal(complete(pair.a.send_cq)[0].wr_id, 0, "wr_id")
        for _ in range(1000):
            empty(pair.a.send_cq)
    data_flows()


def poke(what, offset, number):
    order(poke=what, at=offset, bytes=u32(number))


def heads_that_change(_rng):
    """What the device writes into the heads of rings harms their objects alone, at most."""
    words = (1, 0, 2**31, 2**32 - 1)
    for what, offset in [("qp", SQ_WAKE), ("qp", RQ_WAKE), ("cq", CONSUMER), ("cq", ARM_NEXT), ("cq", ARM_SOLICITED),
                         ("qp", SQ_PRODUCER), ("qp", RQ_PRODUCER)]:
        for number in words:
            found = device()
            with Pair(found) as pair:
                here, there = pair.a.memory(64), pair.b.memory(64)
                for _ in range(3):
                    poke(what, offset, number)
                    try:
                        pair.b.post_recv([sge(there)])
                        pair.a.post_send(SEND, [sge(here)])
                    except rc.PyverbsError:
                        break
                    pair.a.send_cq.poll(4)
                    pair.b.recv_cq.poll(4)
            found.context.close()
    # The GSI's CQ and QP were among them.
    recovers()


def ring_that_says_it_is_closed(_rng):
    """The device cannot keep CQEs from the program by that; without any, the program hears an error."""
    found = device()
    with Pair(found) as pair:
        here, there = pair.a.memory(64), pair.b.memory(64)
        poke("cq", CLOSED, 1)
        pair.a.post_send(WRITE, [sge(here)], wr_id=3, remote=remote(there))
        while True:
            try:
                (wc,) = pair.a.send_cq.poll(1)[1]
                break
            except rc.PyverbsError:
                os.sched_yield()
        ktap.equal(wc.wr_id, 3, "wr_id")
    found.context.close()
    recovers()


# ---- CQEs of the kernel ----------------------------------------------------

QKEY = 0x80010000
MAD = 256


class Mads:
    """A QP that sends datagrams to the GSI, where the kernel takes them."""

    def __enter__(self):
        self.device = device()
        context = self.device.context
        self.pd = PD(context)
        self.cq = CQ(context, 64)
        init = QPInitAttr(qp_type=e.IBV_QPT_UD, scq=self.cq, rcq=self.cq, cap=QPCap(64, 1, 1, 1))
        attr = QPAttr(port_num=rc.PORT)
        attr.qkey = QKEY
        self.qp = QP(self.pd, init, attr)
        gid = self.device.gid.gid_index
        route = GlobalRoute(dgid=context.query_gid(rc.PORT, gid), sgid_index=gid, hop_limit=64)
        self.ah = rc.AH(self.pd, attr=AHAttr(port_num=rc.PORT, is_global=1, gr=route))
        self.region = MR(self.pd, MAD, ALL_ACCESS)
        return self

    def __exit__(self, *_):
        for thing in (self.qp, self.region, self.ah, self.cq, self.pd):
            thing.close()
        self.device.context.close()

    def send(self, count=1):
        """Sends MADs of no class that anybody serves."""
        for _ in range(count):
            wr = send_wr(SEND, [sge(self.region)])
            wr.set_wr_ud(self.ah, 1, QKEY)
            post(self.qp.post_send, [wr])
            complete(self.cq)


def bad_cqe_of_kernel(counter, times=1, **what):
    """The CQ of the GSI is the first."""
    with Mads() as mads:
        watch = Watch()
        order(on="cq", cqn=0, **what)
        mads.send(2)
        wait_counted(watch, counter, times)
        watch.counted(counter, times)
    recovers()


def bad_cqes_of_the_kernel(_rng):
    for number in (0, 5, 1000, 2**32 - 1):
        bad_cqe_of_kernel("bad_cqe_qp", write=[[QP_NUM, u32(number)]])
    for number in (5000, 2**31, 2**32 - 1):
        bad_cqe_of_kernel("bad_cqe_wr_id", write=[[WQE_INDEX, u32(number)]])
    bad_cqe_of_kernel("bad_cqe_status", write=[[STATUS, "ff"]])
    bad_cqe_of_kernel("bad_cqe_opcode", write=[[OPCODE, "ff"]])
    bad_cqe_of_kernel("bad_cqe_byte_len", write=[[BYTE_LEN, u32(2**32 - 1)]])
    bad_cqe_of_kernel("bad_cqe_vlan", write=[[WC_FLAGS, u32(WITH_VLAN)], [VLAN_ID, u32(4095)[:4]]])
    bad_cqe_of_kernel("bad_cqe_wr_id", twice=True)
    bad_cqe_of_kernel("bad_cqe_wr_id", times=10, then=[{"used": 64, "times": 10}])


def cqes_of_the_kernel_out_of_place(_rng):
    """The kernel polls a CQ that shows nothing any more; it can be destroyed."""
    for what in ({"write": [[LAP, u32(0)]]}, {"write": [[LAP, u32(2**32 - 1)]]}, {"jump": 5}, {"keep": True}):
        with Mads() as mads:
            watch = Watch()
            order(on="cq", cqn=0, **what)
            mads.send(5)
            watch.silent()
        recovers()


def flood_of_cqes_of_the_kernel(_rng):
    """Those of no QP, without an end, on every CQ: the kernel goes on."""
    with Mads() as mads:
        watch = Watch()
        order(on="cq", cqn=0, then=[{"bytes": "ff" * (LAP - 1), "used": 64, "times": 2**60}])
        mads.send()
        wait_counted(watch, "bad_cqe_qp", 100000)
        watch.counted("bad_cqe_qp")
        honest()
    recovers()


def flood_of_cqes(_rng):
    """Without an end. A poll ends nevertheless, and so does the CQ."""
    floods = (("", {"bytes": "ff" * (LAP - 1), "used": 0}), ("", {"used": 0})) if RINGS else (("bad_cqe_qp", {"bytes": "ff" * CQE_SIZE, "used": CQE_SIZE}),
                             ("bad_cqe_length", {"used": 0}))
    for counter, forgery in floods:
        found = device()
        pair = Pair(found)
        here, there = pair.a.memory(64), pair.b.memory(64)
        watch = Watch()
        order(on="cq", then=[{**forgery, "times": 2**60}])
        pair.a.post_send(WRITE, [sge(here)], wr_id=1, remote=remote(there))
        ktap.equal(complete(pair.a.send_cq)[0].wr_id, 1, "wr_id")
        for _ in range(1000):
            empty(pair.a.send_cq)
        watch.silent() if RINGS else watch.counted(counter)
        pair.a.close()
        pair.b.close()
        honest()
        found.context.close()
        data_flows()


# ---- events and interrupts -------------------------------------------------

def forge_event(event, handle=0, used=EVENT_SIZE, times=1):
    order(forge="event", bytes=u32(event) + u32(handle), used=used, times=times)


def wait_counted(watch, name, times):
    """Until a counter that the interrupt increments has gone up so far."""
    while counters()[name] - watch.before[name] < times:
        os.sched_yield()


def event_of_an_unknown_kind(_rng):
    watch = Watch()
    for event in (6, 17, 0xffff, 2**32 - 1):
        forge_event(event)
    wait_counted(watch, "bad_event", 4)
    watch.counted("bad_event", 4)


def event_of_a_wrong_length(_rng):
    watch = Watch()
    for used in (0, 7, 9, 2**32 - 1):
        forge_event(PORT_ACTIVE, used=used)
    wait_counted(watch, "bad_event", 4)
    watch.counted("bad_event", 4)


def event_of_no_object(_rng):
    watch = Watch()
    for handle in (0, 19, 1000, 2**32 - 1):
        forge_event(QP_FATAL, handle)
    wait_counted(watch, "stale_events", 4)
    ktap.equal(watch.lines("virtio_rdma|misbehaves"), [], "log")


def flood_of_events(_rng):
    """Each is counted; of those of an object, the program that has it keeps one."""
    with Pair(device()) as pair:
        watch = Watch()
        forge_event(0x55, times=20000)
        forge_event(QP_FATAL, pair.a.qp.qp_num, times=20000)
        wait_counted(watch, "events", 20000)
        watch.counted("bad_event", 20000)
        event = pair.a.device.context.get_async_event()
        ktap.equal(event.event_type, e.IBV_EVENT_QP_FATAL, "event")
        event.ack()
    honest()
    data_flows()


# What the device has of these.
VECTORS, CQS = 8 if VFIO else 4, 64


def forge_completion_event(cqn, used=EVENT_SIZE, times=1):
    order(forge="comp", bytes=u32(cqn) + u32(0), used=used, times=times)


def completion_event_of_no_cq(_rng):
    """Each order is for all vectors."""
    watch = Watch()
    numbers = (63, 64, 1000, 2**31, 2**32 - 1)
    for number in numbers:
        forge_completion_event(number)
    wait_counted(watch, "stale_events", VECTORS * len(numbers))
    watch.silent()


def completion_event_of_a_wrong_length(_rng):
    watch = Watch()
    for used in (0, 7, 9, 2**32 - 1):
        forge_completion_event(0, used)
    wait_counted(watch, "bad_event", VECTORS * 4)
    watch.counted("bad_event", VECTORS * 4)
    data_flows()


def waiting_events(end):
    """Takes the events of the send CQ that are there; how many."""
    count = 0
    while select.select([end.channel_fd], [], [], 0)[0]:
        end.channel.get_cq_event(end.send_cq)
        end.send_cq.ack_events(1)
        count += 1
    return count


def flood_of_completion_events(_rng):
    """The kernel keeps events until a program reads them: a CQ has no more than it asked for."""
    with Pair(device(), channel=True) as pair:
        region, there = pair.a.memory(64), pair.b.memory(64)
        pair.a.send_cq.req_notify()
        watch = Watch()
        live = json.loads(subprocess.run(["rdma", "-j", "resource", "show", "cq"], check=True,
                                         stdout=subprocess.PIPE).stdout)
        for number in range(CQS):
            forge_completion_event(number, times=500)
        # The last of each vector.
        forge_completion_event(CQS)
        wait_counted(watch, "stale_events", VECTORS * (500 * (CQS - len(live)) + 1))
        ktap.equal(waiting_events(pair.a), 1, "events that wait")
        watch.silent()
        honest()
        # What is asked for comes.
        for _ in range(10):
            pair.a.send_cq.req_notify()
            pair.a.post_send(WRITE, [sge(region)], remote=remote(there))
            complete(pair.a.send_cq)
            while not waiting_events(pair.a):
                os.sched_yield()
    data_flows()


def completion_events_break(_rng):
    for what in ({"id": 0xffff}, {"id": 2**32 - 1}, {"twice": True}, {"jump": 5000}):
        found = device()
        pair = Pair(found, channel=True)
        region, there = pair.a.memory(64), pair.b.memory(64)
        watch = Watch()
        order(on="comp", **what)
        pair.b.post_recv([sge(there)], wr_id=5)
        pair.a.send_cq.req_notify()
        pair.a.post_send(WRITE, [sge(region)], remote=remote(there))
        while not watch.lines("the device has failed"):
            # The queue is looked at with the next event, at the latest.
            pair.a.send_cq.req_notify()
            try:
                pair.a.post_send(WRITE, [sge(region)], remote=remote(there))
                pair.a.send_cq.poll(4)
            except rc.PyverbsError:
                pass
        watch.failed("a queue of completion events broke")
        honest()
        pair.a.close()
        pair.b.close()
        found.context.close()
        recovers()


# ---- doorbells -------------------------------------------------------------

def doorbells(pair, count):
    """Rings the doorbell of a QP, each time that it sends."""
    here, there = pair.a.memory(64), pair.b.memory(64)
    for _ in range(count):
        poke("qp", SQ_WAKE, 1)
        try:
            pair.a.post_send(WRITE, [sge(here)], remote=remote(there))
            pair.a.send_cq.poll(8)
        except rc.PyverbsError:
            return


def doorbell_queue_breaks(_rng):
    for what in ({"id": 0xffff}, {"id": 2**32 - 1}, {"twice": True}, {"jump": 5000}):
        found = device()
        pair = Pair(found)
        watch = Watch()
        order(on="doorbell", **what)
        while not watch.lines("the device has failed"):
            doorbells(pair, 8)
        watch.failed("the doorbell queue broke")
        pair.a.close()
        pair.b.close()
        found.context.close()
        recovers()


def doorbells_kept(_rng):
    """The queue is full for ever: doorbells wait, and go with their QPs."""
    found = device()
    watch = Watch()
    verbs = uverbs.Uverbs(found.name)
    pd = verbs.alloc_pd()
    memory = uverbs.zeros(8192)
    cq, _ = verbs.create_cq(16, struct.pack("QQ", uverbs.address(memory), 4096))
    rings = struct.pack("QQ6I", uverbs.address(memory) + 4096, 4096, 8, 64, 256, 8, 32, 1024)
    order(on="doorbell", keep=True, times=2**40)
    for _ in range(3):
        qp, _, _ = verbs.create_qp(pd, cq, rings)
        for _ in range(2000):
            verbs.post(uverbs.POST_SEND, qp, [])
            verbs.post(uverbs.POST_RECV, qp, [])
        verbs.destroy_qp(qp)
    watch.silent()
    verbs.close()
    honest()
    found.context.close()
    recovers()


def interrupts_without_a_cause(_rng):
    for queue in ("control", "comp", "doorbell", "event") if RINGS else ("control", "cq", "event"):
        order(interrupt=queue, times=1000)
    data_flows()


def closed(end, region):
    """The program that has the rings of a failed device hears errors: when it polls, and when it posts."""
    polled_to_its_end(end.send_cq)
    polled_to_its_end(end.recv_cq)
    try:
        end.post_send(SEND, [sge(region, 0, 64)])
    except rc.PyverbsError:
        return
    raise AssertionError("a work request was posted")


def asks_for_a_reset(_rng):
    if not VFIO:
        raise ktap.Skip("vhost-user cannot say it")
    found = device()
    watch = Watch()
    pair = Pair(found)
    region = pair.a.memory(64)
    pair.a.post_recv([sge(region)], wr_id=5)
    order(needs_reset=True)
    if RINGS:
        closed(pair.a, region)
    else:
        ktap.equal(complete(pair.a.recv_cq, 1, e.IBV_WC_WR_FLUSH_ERR)[0].wr_id, 5, "wr_id")
    watch.failed("asks for a reset")
    pair.a.close()
    pair.b.close()
    found.context.close()
    recovers()


# ---- no reply --------------------------------------------------------------

def no_reply(_rng):
    """A command times out: the device has failed. What is outstanding is flushed, what is posted
    then too, and memory that the device may still write to stays pinned until it was reset."""
    reload_module("command_timeout=3")
    found = device()
    watch = Watch()
    before = pinned()
    pair = Pair(found, channel=True)
    region = pair.a.memory(1 << 20)
    for wr_id in range(8):
        pair.a.post_recv([sge(region, 0, 64)], wr_id=wr_id)
    pair.a.recv_cq.req_notify()
    reply(CREATE_PD, keep=True)
    fails_with(errno.EIO, lambda: PD(found.context))
    watch.failed("a command has no reply")
    if RINGS:
        # Whoever waits is woken.
        select.select([pair.a.channel_fd], [], [])
        closed(pair.a, region)
    else:
        pair.a.channel.get_cq_event(pair.a.recv_cq)
        pair.a.recv_cq.ack_events(1)
        flushed = complete(pair.a.recv_cq, 8, e.IBV_WC_WR_FLUSH_ERR)
        ktap.equal([wc.wr_id for wc in flushed], list(range(8)), "flushed")
        pair.a.post_send(SEND, [sge(region, 0, 64)], wr_id=9)
        ktap.equal(complete(pair.a.send_cq, 1, e.IBV_WC_WR_FLUSH_ERR)[0].wr_id, 9, "wr_id")
    pair.a.close()
    pair.b.close()
    found.context.close()
    ktap.equal(pinned() - before >= 256, True, "1 MiB is still pinned")
    unbind()
    ktap.equal(pinned() - before, 0, "pages that are pinned after a reset")
    recovers()
    reload_module()
    data_flows()


def no_reply_to_destroy(_rng):
    """The rings of objects that may still be in use stay pinned until the device was reset."""
    for command in (DESTROY_QP, DESTROY_CQ):
        reload_module("command_timeout=3")
        found = device()
        watch = Watch()
        context = found.context
        pd = PD(context)
        cq = CQ(context, 32)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(512, 512, 1, 1))
        before = pinned()
        objects = [QP(pd, init)] if command == DESTROY_QP else [CQ(context, 1024)]
        size = pinned() - before
        ktap.equal(size > 8, True, f"{size} pages of rings are pinned")
        reply(command, keep=True)
        for thing in objects:
            thing.close()
        watch.failed("a command has no reply")
        ktap.equal(pinned() - before >= size, True, "the rings are still pinned")
        cq.close()
        pd.close()
        context.close()
        unbind()
        ktap.equal(pinned() - before <= 0, True, "pages that are pinned after a reset")
        recovers()
    reload_module()
    data_flows()


def reload_module(*parameters):
    """Loads the module anew."""
    honest()
    subprocess.run(["rmmod", "virtio_rdma"], check=True)
    subprocess.run(["insmod", MODULE, *parameters], check=True)


def unbound_under_a_program(_rng):
    """A failed device goes while a program has objects of it."""
    found = device()
    pair = Pair(found, channel=True)
    region = pair.a.memory(65536)
    pair.a.recv_cq.req_notify()
    pair.a.post_recv([sge(region, 0, 64)])
    reply(CREATE_PD, id=0xffff)
    fails_with(errno.EIO, lambda: PD(found.context))
    rebind()
    data_flows()
    for end in (pair.a, pair.b):
        end.close()
    found.context.close()


def module_unloads_from_a_failed_device(_rng):
    found = device()
    reply(CREATE_PD, id=0xffff)
    fails_with(errno.EIO, lambda: PD(found.context))
    found.context.close()
    reload_module()
    data_flows()


if __name__ == "__main__":
    if not VFIO and os.environ.get("HOSTILE_TRANSPORT") != "vhost-user":
        ktap.skip_all("the device is not hostile")
    virtqueues = [
        handles_that_cannot_be, numbers_given_out_again, numbers_change_hands,
        cq_breaks, cq_index_jumps, send_descriptor_twice, descriptors_kept_after_completion,
        descriptors_kept_at_destroy, descriptors_kept_at_reset,
        cqe_of_a_wrong_length, cqe_of_an_unknown_status, cqe_of_an_unknown_opcode, cqe_of_too_many_bytes,
    ]
    rings = [
        numbers_that_cannot_be, numbers_given_out_again, numbers_change_hands, fails_while_a_cq_comes,
        resize_of_too_many_cqes, resize_that_fails,
        wrong_cqes_in_a_ring, cqe_that_never_comes, cqes_out_of_place, heads_that_change,
        ring_that_says_it_is_closed,
        bad_cqes_of_the_kernel, cqes_of_the_kernel_out_of_place, flood_of_cqes_of_the_kernel,
        completion_event_of_no_cq, completion_event_of_a_wrong_length, flood_of_completion_events,
        completion_events_break,
        doorbell_queue_breaks, doorbells_kept,
        no_reply_to_destroy,
        short_replies, refusals, srq_numbers_that_cannot_be, extended_objects_that_are_not_destroyed,
        srq_that_moves_too_much, srq_whose_resizing_fails, srq_attributes_that_cannot_be, flood_of_srq_events,
        cqes_of_an_srq, heads_of_srqs_that_change, events_of_shared_queues,
    ]
    ktap.run([isolated(test) for test in [
        config_of_ones, config_of_zeros, config_of_ones_but_ports, config_without_objects,
        config_with_queues_that_do_not_exist, config_with_huge_queues, config_of_huge_mrs,
        reply_of_no_length, reply_of_a_status_alone, reply_longer_than_its_buffer,
        reply_with_an_unknown_status, each_status_has_its_errno,
        mr_handles_mean_nothing, port_that_cannot_be, qp_state_that_cannot_be,
        objects_that_are_not_destroyed,
        reply_twice, used_id_out_of_range, used_id_never_posted, used_index_jumps,
        cqe_of_no_qp, cqe_of_no_work_request, cqe_of_the_other_kind, cqe_again, flood_of_cqes,
        event_of_an_unknown_kind, event_of_a_wrong_length, event_of_no_object, flood_of_events,
        interrupts_without_a_cause, asks_for_a_reset,
        *(rings if RINGS else virtqueues),
        no_reply, unbound_under_a_program, module_unloads_from_a_failed_device,
    ]])
