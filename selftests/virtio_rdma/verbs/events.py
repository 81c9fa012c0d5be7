#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Asynchronous events: those of a QP through its life, and those of the port
when its network interface and its addresses change."""

import errno
import os
import select
import subprocess

import ktap
from async_events import async_fds
from rc import PORT, Context, Endpoint, Pair, QPAttr, complete, e, empty, fails_with, open_device, sge

DEVICE = open_device()
SEND = e.IBV_WR_SEND
# Bounds a wait for an event that never comes; nothing is measured.
NEVER_MS = 60000


def netdev():
    """Returns the name of the port's network interface."""
    path = f"/sys/class/infiniband/{DEVICE.name}/ports/1/gid_attrs/ndevs/{DEVICE.gid.gid_index}"
    with open(path, encoding="ascii") as file:
        return file.read().strip()


def next_event(context):
    """Waits for the next event of a context; returns its type. Fails the test if no event comes."""
    poller = select.poll()
    poller.register(context_fd(context), select.POLLIN)
    if not poller.poll(NEVER_MS):
        raise AssertionError("no event")
    event = context.get_async_event()
    kind = event.event_type
    event.ack()
    return kind


def context_fd(context):
    return FDS[id(context)]


def open_context():
    """Opens a context, and keeps the descriptor of its events, which pyverbs does not tell."""
    before = async_fds()
    context = Context(name=DEVICE.name)
    (FDS[id(context)],) = async_fds() - before
    return context


FDS = {}


class WithEvents:
    """The device under test with a context of its own, and so with events of its own."""

    def __init__(self):
        self.context = open_context()
        self.name, self.attr, self.port, self.gid = DEVICE.name, DEVICE.attr, DEVICE.port, DEVICE.gid


def comm_est(_rng):
    """The first message that finds a QP in RTR says so."""
    DEVICE.skip_on_rxe("rxe raises it with each message")
    device = WithEvents()
    with Pair(device) as pair:
        pair.b.move(e.IBV_QPS_RESET)
        attr = pair.b.attributes(pair.a.qp.qp_num)
        pair.b.qp.to_rtr(attr)
        source, target = pair.a.memory(8), pair.b.memory(8)
        for _ in range(2):
            pair.b.post_recv([sge(target)])
            pair.a.post_send(SEND, [sge(source)])
            complete(pair.a.send_cq)
        ktap.equal(next_event(device.context), e.IBV_EVENT_COMM_EST, "event")
        no_event(device.context)
    device.context.close()


def no_event(context):
    poller = select.poll()
    poller.register(context_fd(context), select.POLLIN)
    ktap.equal(poller.poll(0), [], "events")


def sqd(pair, notify=True):
    attr = QPAttr()
    attr.qp_state = e.IBV_QPS_SQD
    attr.en_sqd_async_notify = int(notify)
    pair.a.qp.modify(attr, e.IBV_QP_STATE | e.IBV_QP_EN_SQD_ASYNC_NOTIFY)


def sq_drained(_rng):
    """SQD lets what is under way end, holds back what is posted then, and tells when it is done."""
    DEVICE.skip_on_rxe("rxe raises it before the queue has drained")
    device = WithEvents()
    with Pair(device) as pair:
        source, target = pair.a.memory(1 << 20), pair.b.memory(1 << 20)
        for _ in range(8):
            pair.b.post_recv([sge(target)])
        # Under way, for want of a receive it is not: it ends with its completion.
        pair.a.post_send(SEND, [sge(source)], wr_id=1)
        sqd(pair)
        ktap.equal(next_event(device.context), e.IBV_EVENT_SQ_DRAINED, "event")
        attr = pair.a.qp.query(e.IBV_QP_STATE)[0]
        ktap.equal((attr.qp_state, attr.sq_draining), (e.IBV_QPS_SQD, 0), "state, draining")
        ended = pair.a.send_cq.poll(1)[0]
        pair.a.post_send(SEND, [sge(source)], wr_id=2)
        pair.a.post_send(SEND, [sge(source)], wr_id=3)
        empty(pair.a.send_cq)
        pair.a.move(e.IBV_QPS_RTS)
        wcs = complete(pair.a.send_cq, 3 - ended)
        ktap.equal([wc.wr_id for wc in wcs], [1, 2, 3][ended:], "sends, in order")
        sqd(pair, notify=False)
        no_event(device.context)
        pair.a.move(e.IBV_QPS_RTS)
        complete(pair.b.recv_cq, 3)
    device.context.close()


def port_and_gids(_rng):
    """The interface goes down and comes up; an address comes and goes."""
    name = netdev()
    device = WithEvents()
    context = device.context

    def change(command, *events):
        subprocess.run(["ip", *command.split(), "dev", name], check=True)
        seen = set()
        while not seen.issuperset(events):
            seen.add(next_event(context))

    change("addr add 10.99.99.1/24", e.IBV_EVENT_GID_CHANGE)
    change("addr del 10.99.99.1/24", e.IBV_EVENT_GID_CHANGE)
    change("link set down", e.IBV_EVENT_PORT_ERR)
    change("link set up", e.IBV_EVENT_PORT_ACTIVE)
    while DEVICE.context.query_port(1).state != e.IBV_PORT_ACTIVE:
        os.sched_yield()
    context.close()


def port_down(_rng):
    """A program that takes a device whatever its port is, as TensorPipe does, is told that the port is down. It makes its
    objects, cannot connect them, and can once the port is up."""
    name = netdev()
    subprocess.run(["ip", "link", "set", name, "down"], check=True)
    while DEVICE.context.query_port(PORT).state == e.IBV_PORT_ACTIVE:
        os.sched_yield()
    try:
        ktap.equal(DEVICE.context.query_port(PORT).state, e.IBV_PORT_DOWN, "state of the port")
        ends = [Endpoint(DEVICE) for _ in range(2)]
        for end in ends:
            fails_with(errno.ENETUNREACH, end.connect, end.qp.qp_num)
    finally:
        subprocess.run(["ip", "link", "set", name, "up"], check=True)
    while DEVICE.context.query_port(PORT).state != e.IBV_PORT_ACTIVE:
        os.sched_yield()
    for end, other in zip(ends, reversed(ends)):
        end.move(e.IBV_QPS_RESET)
        end.connect(other.qp.qp_num)
    ends[0].post_send(e.IBV_WR_RDMA_WRITE, [], remote=(0, 0))
    complete(ends[0].send_cq)
    for end in ends:
        end.close()


ktap.run([comm_est, sq_drained, port_and_gids, port_down])
