# SPDX-License-Identifier: GPL-2.0
"""A device that has failed, for hostile.py: what programs are told, and that they get nothing back before the device
was reset."""

import errno
import select

import abi
import ktap
import rc
from hostile_device import (RINGS, SEND, VFIO, Watch, data_flows, device, lost_pair, order, polled_to_its_end, rebind,
                            recovers, reload_module, spoil, was_reset)
from rc import CQ, PD, QP, Pair, QPCap, QPInitAttr, complete, e, fails_with, pinned, sge


def closed(end, region):
    """Fails the test unless the program that has the rings of a failed device gets errors: when it polls, and when it
    posts."""
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
    watch = Watch()
    with lost_pair() as pair:
        region = pair.a.memory(64)
        pair.a.post_recv([sge(region)], wr_id=5)
        order(needs_reset=1)
        if RINGS:
            closed(pair.a, region)
        else:
            ktap.equal(complete(pair.a.recv_cq, 1, e.IBV_WC_WR_FLUSH_ERR)[0].wr_id, 5, "wr_id")
        watch.failed("asks for a reset")


def no_reply(_rng):
    """A command times out, so the device has failed, although its data path goes on. It is reset; then outstanding work
    requests are flushed, and those that are posted later, and not before."""
    reload_module("command_timeout=3")
    found = device()
    watch = Watch()
    before = pinned()
    pair = Pair(found, channel=True)
    region = pair.a.memory(1 << 20)
    for wr_id in range(8):
        pair.a.post_recv([sge(region, 0, 64)], wr_id=wr_id)
    pair.a.recv_cq.req_notify()
    spoil(abi.CMD_CREATE_PD, keep=True)
    fails_with(errno.EIO, PD, found.context)
    watch.failed("CREATE_PD has no reply")
    if RINGS:
        # An event wakes the program.
        select.select([pair.a.channel_fd], [], [])
        ktap.equal(was_reset(), True, "the device was reset before the program was told")
        closed(pair.a, region)
    else:
        pair.a.channel.get_cq_event(pair.a.recv_cq)
        ktap.equal(was_reset(), True, "the device was reset before work requests were flushed")
        pair.a.recv_cq.ack_events(1)
        flushed = complete(pair.a.recv_cq, 8, e.IBV_WC_WR_FLUSH_ERR)
        ktap.equal([wc.wr_id for wc in flushed], list(range(8)), "flushed")
        pair.a.post_send(SEND, [sge(region, 0, 64)], wr_id=9)
        ktap.equal(complete(pair.a.send_cq, 1, e.IBV_WC_WR_FLUSH_ERR)[0].wr_id, 9, "wr_id")
    pair.a.close()
    pair.b.close()
    found.context.close()
    ktap.equal(pinned() - before, 0, "pages that are pinned after a reset")
    recovers()
    reload_module()
    data_flows()


def no_reply_to_destroy(_rng):
    """An object that the device may still use is destroyed only when the device was reset."""
    for command in (abi.CMD_DESTROY_QP, abi.CMD_DESTROY_CQ):
        reload_module("command_timeout=3")
        found = device()
        watch = Watch()
        context = found.context
        pd, cq = PD(context), CQ(context, 32)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(512, 512, 1, 1))
        before = pinned()
        thing = QP(pd, init) if command == abi.CMD_DESTROY_QP else CQ(context, 1024)
        size = pinned() - before
        ktap.equal(size > 8, True, f"{size} pages of rings are pinned")
        spoil(command, keep=True)
        thing.close()
        watch.failed("has no reply")
        ktap.equal(was_reset(), True, "the device was reset before the object was destroyed")
        ktap.equal(pinned() - before <= 0, True, "pages that are pinned after a reset")
        cq.close()
        pd.close()
        context.close()
        recovers()
    reload_module()
    data_flows()


def unbound_under_a_program(_rng):
    """A failed device is unbound while a program has objects of it."""
    found = device()
    pair = Pair(found, channel=True)
    region = pair.a.memory(65536)
    pair.a.recv_cq.req_notify()
    pair.a.post_recv([sge(region, 0, 64)])
    spoil(abi.CMD_CREATE_PD, id=0xffff)
    fails_with(errno.EIO, PD, found.context)
    rebind()
    data_flows()
    for end in (pair.a, pair.b):
        end.close()
    found.context.close()


def module_unloads_from_a_failed_device(_rng):
    found = device()
    spoil(abi.CMD_CREATE_PD, id=0xffff)
    fails_with(errno.EIO, PD, found.context)
    found.context.close()
    reload_module()
    data_flows()


TESTS = [asks_for_a_reset, *([no_reply_to_destroy] if RINGS else []), no_reply, unbound_under_a_program,
         module_unloads_from_a_failed_device]
