# SPDX-License-Identifier: GPL-2.0
"""What a device can do wrong with queues of work requests, events, doorbells and interrupts, for hostile.py: used rings
that cannot be, buffers that it keeps, and floods."""

import os
import select

import abi
import ktap
import rc
import uverbs
from hostile_device import (ALWAYS, RINGS, SEND, VFIO, WRITE, Watch, data_flows, device, forge_event, honest, lost_pair,
                            order, poke, recovers)
from rc import Pair, complete, e, empty, rdma, remote, sge
from rings import CqRing, QpRings

# How the used ring of a queue can be wrong.
BROKEN = ({"id": 0xffff}, {"id": 2**32 - 1}, {"twice": True}, {"jump": 5000})


# ---- virtqueues of work requests and of CQEs

def cq_breaks(_rng):
    """A CQ whose virtqueue breaks takes the device out of service: outstanding work requests are flushed."""
    for what in ({"id": 0xffff}, {"id": 200}):
        watch = Watch()
        with lost_pair() as pair:
            here, there = pair.a.memory(64), pair.b.memory(64)
            for wr_id in (1, 2):
                pair.b.post_recv([sge(there)], wr_id=wr_id)
            order(on="cq", **what)
            pair.a.post_send(WRITE, [sge(here)], wr_id=3, remote=remote(there))
            rc.poll(pair.a.send_cq, 1)
            while not watch.has_failed():
                pair.a.send_cq.poll(1)
            watch.failed("a completion queue broke")
            flushed = complete(pair.b.recv_cq, 2, e.IBV_WC_WR_FLUSH_ERR)
            ktap.equal([wc.wr_id for wc in flushed], [1, 2], "flushed")


def cq_index_jumps(_rng):
    """The entries that the jump uncovers name a buffer that is available: they are CQEs, if bad ones. What is bad
    depends on what was in the memory of the used ring before."""
    watch = Watch()
    with lost_pair() as pair:
        here, there = pair.a.memory(64), pair.b.memory(64)
        order(on="cq", jump=3000)
        pair.a.post_send(WRITE, [sge(here)], wr_id=3, remote=remote(there))
        complete(pair.a.send_cq)
        for _ in range(3000):
            empty(pair.a.send_cq)
        kinds = watch.misbehaviours()
        ktap.equal([kind for kind in kinds if not kind.startswith("bad_cqe_")], [], "other counters that went up")
        ktap.equal(bool(kinds), True, "bad CQEs are counted")
        logged = watch.lines("the device misbehaves")
        ktap.equal(len(logged) <= len(kinds), True, f"at most one line of each kind: {logged}")


def send_descriptor_twice(_rng):
    watch = Watch()
    with lost_pair() as pair:
        here, there = pair.a.memory(64), pair.b.memory(64)
        order(on="sq", twice=True)
        try:
            while not watch.has_failed():
                pair.a.post_send(WRITE, [sge(here)], remote=remote(there))
                rc.poll(pair.a.send_cq, 1)
        except rc.PyverbsError:
            pass
        watch.failed("a work queue broke")


def descriptors_kept_after_completion(_rng):
    """Work requests complete, and their descriptors do not come back until the virtqueue is full."""
    watch = Watch()
    with lost_pair(depth=256) as pair:
        here, there = pair.a.memory(64), pair.b.memory(64)
        order(on="sq", keep=True, times=ALWAYS)
        try:
            # The largest virtqueue has fewer entries.
            for _ in range(5000):
                pair.a.post_send(WRITE, [sge(here)], remote=remote(there))
                rc.poll(pair.a.send_cq, 1)
        except rc.PyverbsError:
            pass
        watch.failed("keeps buffers of work requests that it completed")


def descriptors_kept_at_destroy(_rng):
    for queue in ("sq", "rq"):
        watch = Watch()
        found = device()
        pair = Pair(found)
        region = pair.a.memory(64)
        order(on=queue, keep=True, times=ALWAYS)
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
    with lost_pair() as pair:
        region = pair.a.memory(64)
        order(on="rq", keep=True, times=ALWAYS)
        pair.a.post_recv([sge(region)])
        pair.a.move(e.IBV_QPS_RESET)
        watch.failed("keeps buffers of an object")


# ---- asynchronous events

def event_of_an_unknown_kind(_rng):
    watch = Watch()
    for event in (6, 17, 0xffff, 2**32 - 1):
        forge_event(event)
    watch.wait("bad_event", 4)
    watch.counted("bad_event", 4)


def event_of_a_wrong_length(_rng):
    watch = Watch()
    for used in (0, 7, 9, 2**32 - 1):
        forge_event(abi.EVENT_PORT_ACTIVE, used=used)
    watch.wait("bad_event", 4)
    watch.counted("bad_event", 4)


def event_of_no_object(_rng):
    watch = Watch()
    for handle in (0, 19, 1000, 2**32 - 1):
        forge_event(abi.EVENT_QP_FATAL, handle)
    watch.wait("stale_events", 4)
    ktap.equal(watch.lines("virtio_rdma|misbehaves"), [], "log")


def flood_of_events(_rng):
    """The driver counts each event; for the program that has the object it keeps one."""
    with Pair(device()) as pair:
        watch = Watch()
        forge_event(0x55, times=20000)
        forge_event(abi.EVENT_QP_FATAL, pair.a.qp.qp_num, times=20000)
        watch.wait("events", 20000)
        watch.counted("bad_event", 20000)
        event = pair.a.device.context.get_async_event()
        ktap.equal(event.event_type, e.IBV_EVENT_QP_FATAL, "event")
        event.ack()
    honest()
    data_flows()


# ---- completion events

# How many of these the device has.
VECTORS, CQS = 8 if VFIO else 4, 64


def forge_completion_event(cqn, used=None, times=1):
    """Makes the device use buffers of the completion event queues, of all vectors."""
    data = bytes(abi.CompEvent(cqn))
    order(forge="comp", bytes=data.hex(), used=len(data) if used is None else used, times=times)


def completion_event_of_no_cq(_rng):
    watch = Watch()
    numbers = (63, 64, 1000, 2**31, 2**32 - 1)
    for number in numbers:
        forge_completion_event(number)
    watch.wait("stale_events", VECTORS * len(numbers))
    watch.silent()


def completion_event_of_a_wrong_length(_rng):
    watch = Watch()
    for used in (0, 7, 9, 2**32 - 1):
        forge_completion_event(0, used)
    watch.wait("bad_event", VECTORS * 4)
    watch.counted("bad_event", VECTORS * 4)
    data_flows()


def waiting_events(end):
    """Takes the events of the send CQ that wait; returns how many there were."""
    count = 0
    while select.select([end.channel_fd], [], [], 0)[0]:
        end.channel.get_cq_event(end.send_cq)
        end.send_cq.ack_events(1)
        count += 1
    return count


def flood_of_completion_events(_rng):
    """The kernel keeps events until a program reads them, and for a CQ no more than the program asked for."""
    with Pair(device(), channel=True) as pair:
        region, there = pair.a.memory(64), pair.b.memory(64)
        pair.a.send_cq.req_notify()
        watch = Watch()
        live = rdma("resource", "show", "cq")
        for number in range(CQS):
            forge_completion_event(number, times=500)
        # The last event of each vector.
        forge_completion_event(CQS)
        watch.wait("stale_events", VECTORS * (500 * (CQS - len(live)) + 1))
        ktap.equal(waiting_events(pair.a), 1, "events that wait")
        watch.silent()
        honest()
        # An event that the program asks for comes.
        for _ in range(10):
            pair.a.send_cq.req_notify()
            pair.a.post_send(WRITE, [sge(region)], remote=remote(there))
            complete(pair.a.send_cq)
            while not waiting_events(pair.a):
                os.sched_yield()
    data_flows()


def completion_events_break(_rng):
    for what in BROKEN:
        with lost_pair(channel=True) as pair:
            region, there = pair.a.memory(64), pair.b.memory(64)
            watch = Watch()
            order(on="comp", **what)
            pair.b.post_recv([sge(there)], wr_id=5)
            pair.a.send_cq.req_notify()
            pair.a.post_send(WRITE, [sge(region)], remote=remote(there))
            while not watch.has_failed():
                # The driver looks at the queue with the next event, at the latest.
                pair.a.send_cq.req_notify()
                try:
                    pair.a.post_send(WRITE, [sge(region)], remote=remote(there))
                    pair.a.send_cq.poll(4)
                except rc.PyverbsError:
                    pass
            watch.failed("a queue of completion events broke")
            honest()


# ---- doorbells and interrupts

def doorbells(pair, count):
    """Posts send requests, each with a doorbell."""
    here, there = pair.a.memory(64), pair.b.memory(64)
    for _ in range(count):
        poke("qp", abi.QpRing.sq_wake, 1)
        try:
            pair.a.post_send(WRITE, [sge(here)], remote=remote(there))
            pair.a.send_cq.poll(8)
        except rc.PyverbsError:
            return


def doorbell_queue_breaks(_rng):
    for what in BROKEN:
        with lost_pair() as pair:
            watch = Watch()
            order(on="doorbell", **what)
            while not watch.has_failed():
                doorbells(pair, 8)
            watch.failed("the doorbell queue broke")


def doorbells_kept(_rng):
    """The doorbell queue stays full: doorbells wait, and go with their QPs."""
    found = device()
    watch = Watch()
    verbs = uverbs.Uverbs(found.name)
    pd = verbs.alloc_pd()
    ring, rings = CqRing(16), QpRings()
    cq, _ = verbs.create_cq(16, ring.request())
    order(on="doorbell", keep=True, times=ALWAYS)
    for _ in range(3):
        qp, _, _ = verbs.create_qp(pd, cq, rings.request())
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


TESTS = [event_of_an_unknown_kind, event_of_a_wrong_length, event_of_no_object, flood_of_events,
         interrupts_without_a_cause]
TESTS += [completion_event_of_no_cq, completion_event_of_a_wrong_length, flood_of_completion_events,
          completion_events_break, doorbell_queue_breaks, doorbells_kept] if RINGS else [
    cq_breaks, cq_index_jumps, send_descriptor_twice, descriptors_kept_after_completion, descriptors_kept_at_destroy,
    descriptors_kept_at_reset]
