# SPDX-License-Identifier: GPL-2.0
"""Replies to commands that cannot be, for hostile.py: their length, their status, and the numbers in them."""

import errno
import os
import threading

import abi
import ktap
import rc
import uverbs
from hostile_device import (CREATE_CQ, CREATE_QP, RINGS, WRITE, Watch, bind, data_flows, device, hits, honest, in_reply,
                            lost_device, polled_to_its_end, rebind, recovers, refuse, spoil, spoilt_create, unbind,
                            wrong_number)
from rc import CQ, MR, PD, QP, ALL_ACCESS, Pair, QPCap, QPInitAttr, complete, e, fails_with, pinned, remote, sge
from rings import PAGE, CqRing, QpRings, SrqRing

CREATE_PD = abi.CMD_CREATE_PD
# Numbers that no object can have.
TOO_LARGE = (1000, 2**31, 2**32 - 1)


def rc_qp(pd, cq, depth=4):
    """Creates an RC QP."""
    return QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(depth, depth, 1, 1)))


def reply_of_no_length(_rng):
    context = device().context
    spoilt_create(CREATE_PD, lambda: PD(context), "bad_reply_length", used=0)


def reply_of_a_status_alone(_rng):
    context = device().context
    spoilt_create(CREATE_PD, lambda: PD(context), "bad_reply_length", used=1)
    spoilt_create(CREATE_CQ, lambda: CQ(context, 4), "bad_reply_length", used=4)


def reply_longer_than_its_buffer(_rng):
    context = device().context
    for used in (257, 2**31, 2**32 - 1):
        spoilt_create(CREATE_PD, lambda: PD(context), "bad_reply_length", used=used)


def reply_with_an_unknown_status(_rng):
    context = device().context
    for status in (abi.STATUS_EXISTS + 1, 0x80, 0xff):
        spoilt_create(CREATE_PD, lambda: PD(context), "bad_reply_status", write=[[0, f"{status:02x}"]], used=1)


def each_status_has_its_errno(_rng):
    context = device().context
    numbers = {
        abi.STATUS_ERR: errno.EIO, abi.STATUS_INVAL: errno.EINVAL, abi.STATUS_NO_OBJECT: errno.ENOENT,
        abi.STATUS_NO_RESOURCE: errno.ENOMEM, abi.STATUS_BUSY: errno.EBUSY, abi.STATUS_UNSUPPORTED: errno.EOPNOTSUPP,
        abi.STATUS_PERM: errno.EPERM, abi.STATUS_FAULT: errno.EFAULT, abi.STATUS_LENGTH: errno.EMSGSIZE,
        abi.STATUS_STATE: errno.EPROTO, abi.STATUS_EXISTS: errno.EEXIST,
    }
    for status, number in numbers.items():
        refuse(CREATE_PD, status)
        fails_with(number, PD, context)
    honest()


def numbers_that_cannot_be(_rng):
    """Numbers of CQs and QPs that are out of range or taken, for objects with rings: the device may take the memory of
    one object for that of another, so it is out of service."""
    for number in (1, 0, 2, 1000, 2**24, 2**32 - 1):
        found = device()
        with Pair(found) as pair:
            pd, cq = PD(found.context), CQ(found.context, 16)
            taken = pair.a.qp.qp_num if number == 2 else number
            wrong_number(CREATE_QP, abi.RspCreateQp.qpn, taken, lambda pd=pd, cq=cq: rc_qp(pd, cq))
            cq.close()
            pd.close()
        found.context.close()
        recovers()
    # The first CQ is the GSI's.
    for number in (0, *TOO_LARGE):
        with lost_device() as (found, _):
            wrong_number(CREATE_CQ, abi.RspCreateCq.cqn, number, lambda found=found: CQ(found.context, 4))


class Full:
    """A program that has as many objects of a kind as the device has numbers for."""

    def __init__(self, found, kind):
        self.verbs = uverbs.Uverbs(found.name)
        self.pd = self.verbs.alloc_pd()
        self.rings = {"cq": CqRing(16), "qp": QpRings(size=PAGE), "srq": SrqRing()}
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
        """Returns the driver data of an object, which all of a kind share."""
        return self.rings[kind].request() if RINGS else b""

    def create_cq(self):
        """Creates a CQ; returns its handle."""
        return self.verbs.create_cq(16, self.driver_data("cq"))[0]

    def create(self):
        """Creates an object; returns its handle."""
        if self.kind == "cq":
            return self.create_cq()
        if self.kind == "srq":
            return self.verbs.create_srq(self.pd, 8, 1, self.driver_data("srq"))
        return self.verbs.create_qp(self.pd, self.cq, self.driver_data("qp"))[0]

    def destroy_one(self):
        """Destroys an object."""
        getattr(self.verbs, "destroy_" + self.kind)(self.objects.pop())

    def create_one(self):
        """Creates an object."""
        self.objects.append(self.create())


KINDS = {"cq": (CREATE_CQ, abi.CMD_DESTROY_CQ), "qp": (CREATE_QP, abi.CMD_DESTROY_QP)}
if RINGS:
    KINDS["srq"] = abi.CMD_CREATE_SRQ, abi.CMD_DESTROY_SRQ


def numbers_given_out_again(_rng):
    """The device gives out a number again before the program that destroyed its object is told that it is gone."""
    for kind, (create, destroy) in KINDS.items():
        found = device()
        watch = Watch()
        full = Full(found, kind)
        count = len(full.objects)
        for _ in range(3):
            spoil(create)
            before = spoil(destroy, hold=2)
            threads = [threading.Thread(target=full.destroy_one), threading.Thread(target=full.create_one)]
            for done, thread in enumerate(threads, 1):
                thread.start()
                while hits() != before + done:
                    os.sched_yield()
            # The device has given out the only free number, and replies to the command that freed it only now.
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
    """Threads destroy and create objects while no number is free but theirs."""
    def run(full, count, errors):
        try:
            for _ in range(count):
                full.destroy_one()
                full.create_one()
        except OSError as error:
            errors.append(error)

    for kind in KINDS:
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


def fails_while_a_cq_comes(_rng):
    """The device fails just when a CQ is created, or moved to another ring."""
    for resizes in [False, True] * 8:
        with lost_device() as (found, _):
            cq = CQ(found.context, 32) if resizes else None
            spoil(abi.CMD_RESIZE_CQ if resizes else CREATE_CQ, jump=5000)
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


def resize_of_too_many_cqes(_rng):
    """The device says that it moved more CQEs than the new ring holds."""
    for number in (65, 2**31, 2**32 - 1):
        with lost_device() as (found, _):
            cq = CQ(found.context, 32)
            watch = Watch()
            spoil(abi.CMD_RESIZE_CQ, write=[in_reply(abi.RspResizeCq.moved, number)])
            fails_with(errno.EIO, cq.resize, 64)
            watch.failed("it moved more CQEs than there is room for")
            polled_to_its_end(cq)
            cq.close()


def resize_that_fails(_rng):
    """The CQ keeps its old ring; a new ring that the device may use nevertheless stays pinned."""
    found = device()
    with Pair(found) as pair:
        keep = pair.a.memory(64), pair.b.memory(64)
        for what, number in (({"write": [[0, f"{abi.STATUS_NO_RESOURCE:02x}"]], "used": 1}, errno.ENOMEM),
                             ({"used": 0}, errno.EIO)):
            before = pinned()
            spoil(abi.CMD_RESIZE_CQ, **what)
            fails_with(number, pair.a.send_cq.resize, 4096)
            ktap.equal(pinned() - before > 0, number == errno.EIO, "the new ring is still pinned")
        honest()
    del keep
    found.context.close()
    recovers()


def handles_that_cannot_be(_rng):
    """Numbers of CQs and QPs that are out of range or taken; the objects that have them are not harmed."""
    rebind()
    found = device()
    with Pair(found) as pair:
        here, there = pair.a.memory(64), pair.b.memory(64)
        pd, cq = PD(found.context), CQ(found.context, 16)
        for number in (pair.a.qp.qp_num, 0, 1, 1000, 2**32 - 1):
            spoilt_create(CREATE_QP, lambda: rc_qp(pd, cq), "bad_handle",
                          write=[in_reply(abi.RspCreateQp.qpn, number)])
        # The first CQ is the pair's, or the GSI's.
        for number in (0, *TOO_LARGE):
            spoilt_create(CREATE_CQ, lambda: CQ(found.context, 4), "bad_handle",
                          write=[in_reply(abi.RspCreateCq.cqn, number)])
        pair.a.post_send(WRITE, [sge(here)], remote=remote(there))
        complete(pair.a.send_cq)
        pd.close()
    recovers()


def mr_handles_mean_nothing(_rng):
    """The number of an MR is the device's own affair: the driver keeps no table of them."""
    found = device()
    pd = PD(found.context)
    for number in (0, 1, 2**32 - 1):
        spoil(abi.CMD_REG_USER_MR, write=[in_reply(abi.RspMr.mrn, number)])
        region = MR(pd, 4096, ALL_ACCESS)
        region.close()
    pd.close()
    recovers()


def port_that_cannot_be(_rng):
    """MTU 0, tables of 2^32 - 1 and 0 entries, a speed and a width that do not exist."""
    found = device()
    watch = Watch()
    before = honest()
    size = abi.RspQueryPort.reserved.offset
    spoil(abi.CMD_QUERY_PORT, times=3, write=[[1, "ff" * size]])
    port = found.context.query_port(1)
    ktap.equal((port.gid_tbl_len <= 256, port.pkey_tbl_len <= 128, port.active_mtu <= e.IBV_MTU_4096),
               (True,) * 3, "limits of the port")
    spoil(abi.CMD_QUERY_PORT, times=3, write=[[1, "00" * size]])
    port = found.context.query_port(1)
    ktap.equal(honest() > before, True, "spoilt replies")
    watch.counted("bad_reply_value")
    found.context.close()
    # The tables of the core are made while the device is bound.
    unbind()
    spoil(abi.CMD_QUERY_PORT, times=100, write=[[1 + abi.RspQueryPort.max_mtu.offset, "ff" * 26]])
    bind()
    recovers()
    # The port has P_Keys, which the device then does not tell.
    unbind()
    spoil(abi.CMD_QUERY_PORT, times=100, write=[in_reply(abi.RspQueryPort.pkey_tbl_len, 0xffff)])
    fails_with(errno.EINVAL, bind)
    recovers()


def qp_state_that_cannot_be(_rng):
    with Pair(device()) as pair:
        watch = Watch()
        spoil(abi.CMD_QUERY_QP, write=[in_reply(abi.QpAttr.qp_state, 0xff)])
        fails_with(errno.EIO, pair.a.state)
        watch.counted("bad_reply_value", 1)
        spoil(abi.CMD_QUERY_QP, write=[[1 + abi.QpAttr.cur_qp_state.offset, "ff" * 200]])
        pair.a.state()
        ktap.equal(pair.a.state(), e.IBV_QPS_RTS, "state")
        honest()


def objects_that_are_not_destroyed(_rng):
    """The device refuses to destroy an object: it is taken out of service, and memory that it may still use is kept
    until it is reset."""
    for command in (abi.CMD_DESTROY_QP, abi.CMD_DEREG_MR, abi.CMD_DESTROY_PD):
        watch = Watch()
        pair = Pair(device())
        pair.a.memory(65536)
        refuse(command, abi.STATUS_BUSY)
        pair.a.close()
        pair.b.close()
        watch.failed("does not destroy")
        pair.a.device.context.close()
        recovers()


def breaks_control(**what):
    """Fails the test unless the control queue breaks: the command fails, and so do all later ones."""
    found = device()
    watch = Watch()
    spoil(CREATE_PD, **what)
    try:
        PD(found.context).close()
    except rc.PyverbsRDMAError as error:
        ktap.equal(errno.errorcode[error.error_code], "EIO", "error")
    fails_with(errno.EIO, PD, found.context)
    fails_with(errno.EIO, CQ, found.context, 4)
    watch.failed("the control queue broke")
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


TESTS = [reply_of_no_length, reply_of_a_status_alone, reply_longer_than_its_buffer, reply_with_an_unknown_status,
         each_status_has_its_errno, mr_handles_mean_nothing, port_that_cannot_be, qp_state_that_cannot_be,
         objects_that_are_not_destroyed, reply_twice, used_id_out_of_range, used_id_never_posted, used_index_jumps,
         numbers_given_out_again, numbers_change_hands]
TESTS += [numbers_that_cannot_be, fails_while_a_cq_comes, resize_of_too_many_cqes, resize_that_fails] if RINGS else [
    handles_that_cannot_be]
