# SPDX-License-Identifier: GPL-2.0
"""What a device can do wrong with SRQs, memory windows and XRC domains, for hostile.py. Devices with rings have
these."""

import ctypes
import errno
import os
import select

import abi
import ktap
import rc
from async_events import async_fds, next_event
from hostile_device import (RINGS, SEND, Watch, data_flows, device, forge_event, honest, in_reply, lost_device, order,
                            patch, poke, rebind, refuse, spoil, spoilt_create, wrong_number)
from pyverbs.mr import MW
from pyverbs.qp import QPInitAttrEx
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr
from pyverbs.xrcd import XRCD, XRCDInitAttr
from rc import PD, QP, Endpoint, complete, e, empty, fails_with, pinned, post, recv_wr, sge

# The number of the first SRQ of a fresh device.
FIRST = 1


def new_srq(pd):
    """Creates an SRQ."""
    return SRQ(pd, SrqInitAttr(SrqAttr(max_wr=16, max_sge=1)))


def new_xrcd(context):
    """Opens a domain that no file names."""
    mask = e.IBV_XRCD_INIT_ATTR_FD | e.IBV_XRCD_INIT_ATTR_OFLAGS
    return XRCD(context, XRCDInitAttr(mask, os.O_CREAT, -1))


def no_event(fd):
    """Fails the test if an event waits."""
    ktap.equal(select.select([fd], [], [], 0)[0], [], "events that wait")


# The commands that create and destroy each kind of object, and what creates it here.
EXTENDED = ((abi.CMD_CREATE_SRQ, abi.CMD_DESTROY_SRQ, lambda found, pd: new_srq(pd)),
            (abi.CMD_ALLOC_MW, abi.CMD_DEALLOC_MW, lambda found, pd: MW(pd, e.IBV_MW_TYPE_2)),
            (abi.CMD_ALLOC_XRCD, abi.CMD_DEALLOC_XRCD, lambda found, pd: new_xrcd(found.context)))


def short_replies(_rng):
    """Replies without the number of the new object, or with a part of it, which the driver does not use."""
    for command, _, create in EXTENDED:
        for used in (0, 1, 3, 2**32 - 1):
            # The device keeps the object that it made, and so does not destroy the PD.
            with lost_device() as (found, pd):
                spoilt_create(command, lambda create=create, found=found, pd=pd: create(found, pd),
                              "bad_reply_length", used=used)


def refusals(_rng):
    """Each status has its errno, and no pages stay pinned."""
    # The device has made each of the objects.
    with lost_device() as (found, pd):
        watch, before = Watch(), pinned()
        for command, _, create in EXTENDED:
            for status, number in ((abi.STATUS_INVAL, errno.EINVAL), (abi.STATUS_NO_OBJECT, errno.ENOENT),
                                   (abi.STATUS_NO_RESOURCE, errno.ENOMEM), (abi.STATUS_UNSUPPORTED, errno.EOPNOTSUPP)):
                refuse(command, status)
                fails_with(number, create, found, pd)
        ktap.equal(pinned() - before, 0, "pages that are pinned")
        watch.silent()


def srq_numbers_that_cannot_be(_rng):
    """Numbers of SRQs that exist, and numbers that no SRQ can have; a domain can have any but 0."""
    for number in (0, FIRST, 2**24, 2**32 - 1):
        rebind()
        with lost_device() as (found, pd):
            srq = new_srq(pd)
            wrong_number(abi.CMD_CREATE_SRQ, abi.RspCreateSrq.srqn, number, lambda pd=pd: new_srq(pd))
            srq.close()
    with lost_device() as (found, _):
        wrong_number(abi.CMD_ALLOC_XRCD, abi.RspAllocXrcd.xrcdn, 0, lambda: new_xrcd(found.context))


def extended_objects_that_are_not_destroyed(_rng):
    for _, command, create in EXTENDED:
        watch = Watch()
        with lost_device() as (found, pd):
            thing = create(found, pd)
            refuse(command, abi.STATUS_BUSY)
            thing.close()
            watch.failed("does not destroy")


def srq_that_moves_too_much(_rng):
    """The device says that it moved more work requests than the new ring holds."""
    for number in (65, 2**31, 2**32 - 1):
        with lost_device() as (_, pd):
            srq = new_srq(pd)
            watch = Watch()
            spoil(abi.CMD_RESIZE_SRQ, write=[in_reply(abi.RspResizeSrq.moved, number)])
            try:
                srq.modify(SrqAttr(max_wr=64), e.IBV_SRQ_MAX_WR)
            except rc.PyverbsRDMAError:
                pass
            watch.failed("it moved more work requests than there is room for")
            srq.close()


def srq_whose_resizing_fails(_rng):
    """The SRQ keeps its old ring; a new ring that the device may use nevertheless stays pinned."""
    with lost_device() as (_, pd):
        srq = new_srq(pd)
        for what, number in (({"write": [[0, f"{abi.STATUS_NO_RESOURCE:02x}"]], "used": 1}, errno.ENOMEM),
                             ({"used": 0}, errno.EIO)):
            before = pinned()
            spoil(abi.CMD_RESIZE_SRQ, **what)
            fails_with(number, srq.modify, SrqAttr(max_wr=256), e.IBV_SRQ_MAX_WR)
            ktap.equal(pinned() - before > 0, number == errno.EIO, "the new ring is still pinned")
        honest()
        srq.close()


def srq_attributes_that_cannot_be(_rng):
    with lost_device() as (_, pd):
        srq = new_srq(pd)
        watch = Watch()
        spoil(abi.CMD_QUERY_SRQ, write=[[1, "ff" * ctypes.sizeof(abi.RspQuerySrq)]])
        fails_with(errno.EIO, srq.query)
        watch.counted("bad_reply_value", 1)
        # The driver itself knows the sizes.
        spoil(abi.CMD_QUERY_SRQ, write=[[1, "ff" * abi.RspQuerySrq.srq_limit.offset]])
        ktap.equal(srq.query().max_wr, 16, "max_wr")
        honest()
        srq.close()


def flood_of_srq_events(_rng):
    """A limit is reached once, if there is one, and an SRQ is in error once."""
    rebind()
    before = async_fds()
    with lost_device() as (found, pd):
        (fd,) = async_fds() - before
        srq = new_srq(pd)
        watch = Watch()
        forge_event(abi.EVENT_SRQ_LIMIT_REACHED, FIRST, times=5000)
        watch.wait("events", 5000)
        no_event(fd)
        # No receive waits in the SRQ, so that the device itself says at once that the limit is reached.
        srq.modify(SrqAttr(max_wr=16, srq_limit=1), e.IBV_SRQ_LIMIT)
        forge_event(abi.EVENT_SRQ_LIMIT_REACHED, FIRST, times=5000)
        forge_event(abi.EVENT_SRQ_ERR, FIRST, times=5000)
        forge_event(abi.EVENT_SRQ_ERR, FIRST + 1, times=5000)
        watch.wait("stale_events", 5000)
        events = [next_event(found.context), next_event(found.context)]
        ktap.equal(events, [e.IBV_EVENT_SRQ_LIMIT_REACHED, e.IBV_EVENT_SRQ_ERR], "events")
        no_event(fd)
        watch.silent()
        srq.close()


class Shared:
    """A pair of QPs of which `b` receives from an SRQ."""

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
        """Sends a message, and leaves the completion of its receive."""
        post(self.srq.post_recv, [recv_wr([sge(self.there)], wr_id)])
        self.a.post_send(SEND, [sge(self.here)])
        complete(self.a.send_cq)


def cqes_of_an_srq(_rng):
    """CQEs of a QP that does not exist, of an SRQ for XRC that does not exist, with a status or an opcode that does not
    exist; the completions before and behind these are not harmed."""
    cqe = abi.RingCqe
    for write in (patch(cqe.qp_num, 1000), patch(cqe.srqn, 1), patch(cqe.srqn, 2**32 - 1)):
        with Shared() as shared:
            order(on="cq", write=[write])
            shared.send()
            empty(shared.b.recv_cq)
            shared.send(2)
            ktap.equal(complete(shared.b.recv_cq)[0].wr_id, 2, "wr_id")
            ktap.same_bytes(shared.there.read(64, 0), bytes(range(64)), "data")
            honest()
    for write in (patch(cqe.status, 0xff), patch(cqe.opcode, 0xff)):
        with Shared() as shared:
            order(on="cq", write=[write])
            shared.send()
            complete(shared.b.recv_cq, 1, e.IBV_WC_GENERAL_ERR)
            honest()
    data_flows()


def heads_of_srqs_that_change(_rng):
    """What the device writes into the head of an SRQ's ring harms at most this SRQ and its QPs."""
    for field in (abi.SrqRing.producer, abi.SrqRing.consumer, abi.SrqRing.wake):
        for number in (1, 0, 2**31, 2**32 - 1):
            with Shared() as shared:
                for wr_id in range(3):
                    poke("srq", field, number)
                    try:
                        post(shared.srq.post_recv, [recv_wr([sge(shared.there)], wr_id)])
                        shared.a.post_send(SEND, [sge(shared.here)])
                    except rc.PyverbsError:
                        break
                    shared.a.send_cq.poll(4)
                    shared.b.recv_cq.poll(4)
            data_flows()


def events_of_shared_queues(_rng):
    """A QP with an SRQ is told once that it took its last work request; an XRC target that is not connected yet is told
    nothing."""
    before = async_fds()
    with Shared() as shared:
        (fd,) = async_fds() - before
        watch = Watch()
        forge_event(abi.EVENT_QP_LAST_WQE_REACHED, shared.b.qp.qp_num, times=1000)
        watch.wait("events", 1000)
        ktap.equal(next_event(shared.device.context), e.IBV_EVENT_QP_LAST_WQE_REACHED, "event")
        xrcd = new_xrcd(shared.device.context)
        init = QPInitAttrEx(qp_type=e.IBV_QPT_XRC_RECV, comp_mask=e.IBV_QP_INIT_ATTR_XRCD, xrcd=xrcd)
        target = QP(shared.device.context, init)
        watch = Watch()
        forge_event(abi.EVENT_QP_FATAL, target.qp_num, times=1000)
        watch.wait("events", 1000)
        no_event(fd)
        target.close()
        xrcd.close()
    data_flows()


TESTS = [short_replies, refusals, srq_numbers_that_cannot_be, extended_objects_that_are_not_destroyed,
         srq_that_moves_too_much, srq_whose_resizing_fails, srq_attributes_that_cannot_be, flood_of_srq_events,
         cqes_of_an_srq, heads_of_srqs_that_change, events_of_shared_queues] if RINGS else []
