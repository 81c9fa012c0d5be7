#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""RC completions: which requests complete, in what order, and with what event."""

import errno
import select

import ktap
from rc import (SIGNALED, Endpoint, Pair, PyverbsRDMAError, complete, e, empty, fails_with, open_device,
                poll, remote, sge)

DEVICE = open_device()


def wr_ids(completions):
    return [wc.wr_id for wc in completions]


def selective_signalling(rng):
    """Only requests that ask for a completion get one, in order, also around the end of the queue."""
    depth = 32
    with Pair(DEVICE, depth=depth) as pair:
        source = pair.a.memory(64, data=rng.randbytes(64))
        target = pair.b.memory(64)
        for _ in range(40):
            signalled = sorted(rng.sample(range(depth - 1), rng.randint(0, 5)) + [depth - 1])
            for wr_id in range(depth):
                pair.a.post_send(e.IBV_WR_RDMA_WRITE, [sge(source)], wr_id=wr_id,
                                 flags=SIGNALED if wr_id in signalled else 0, remote=remote(target))
            ktap.equal(wr_ids(complete(pair.a.send_cq, len(signalled))), signalled, "wr_ids")
            empty(pair.a.send_cq)


def signal_all(_rng):
    """sq_sig_all makes every request complete, whatever its flags."""
    depth = 32
    with Pair(DEVICE, depth=depth, sig_all=True) as pair:
        source, target = pair.a.memory(64), pair.b.memory(64)
        for _ in range(3):
            for wr_id in range(depth):
                pair.a.post_send(e.IBV_WR_RDMA_WRITE, [sge(source)], wr_id=wr_id,
                                 flags=SIGNALED if wr_id % 3 == 0 else 0, remote=remote(target))
            ktap.equal(wr_ids(complete(pair.a.send_cq, depth)), list(range(depth)), "wr_ids")


def send_queue_full(_rng):
    """A queue takes max_send_wr requests and not one that it has no room for."""
    # A device may give larger queues than the test asks for, so the CQ has room for these.
    with Pair(DEVICE, depth=16, cqe=64) as pair:
        capacity = pair.a.init_attr.cap.max_send_wr
        source, target = pair.a.memory(64), pair.b.memory(64)
        # Nothing completes before the first receive is posted.
        posted = 0
        try:
            while posted <= capacity:
                pair.a.post_send(e.IBV_WR_SEND, [sge(source)], wr_id=posted)
                posted += 1
        except PyverbsRDMAError as error:
            ktap.equal(error.error_code, errno.ENOMEM, "error of a full queue")
        ktap.equal(posted, capacity, "requests posted")
        for _ in range(capacity):
            pair.b.post_recv([sge(target)])
        ktap.equal(wr_ids(complete(pair.a.send_cq, capacity)), list(range(capacity)), "wr_ids")
        complete(pair.b.recv_cq, capacity)
        # The completions were polled, so that there is room again.
        pair.b.post_recv([sge(target)])
        pair.a.post_send(e.IBV_WR_SEND, [sge(source)])
        complete(pair.a.send_cq)


def receive_queue_full(_rng):
    with Pair(DEVICE, depth=16) as pair:
        capacity = pair.b.init_attr.cap.max_recv_wr
        target = pair.b.memory(64)
        for wr_id in range(capacity):
            pair.b.post_recv([sge(target)], wr_id)
        fails_with(errno.ENOMEM, pair.b.post_recv, [sge(target)])
        source = pair.a.memory(64)
        pair.a.post_send(e.IBV_WR_SEND, [sge(source)])
        complete(pair.a.send_cq)
        ktap.equal(wr_ids(complete(pair.b.recv_cq)), [0], "wr_ids")
        pair.b.post_recv([sge(target)], capacity)


def poll_in_pieces(_rng):
    """Completions come out once and in order, however many are asked for."""
    depth = 64
    with Pair(DEVICE, depth=depth) as pair:
        source, target = pair.a.memory(8), pair.b.memory(8)
        for wr_id in range(depth):
            pair.a.post_send(e.IBV_WR_RDMA_WRITE, [sge(source)], wr_id=wr_id, remote=remote(target))
        seen = []
        for count in (1, 2, 3, 5, 8, 13, 32):
            seen += wr_ids(poll(pair.a.send_cq, count))
        ktap.equal(seen, list(range(depth)), "wr_ids")
        empty(pair.a.send_cq)


def wr_id_is_opaque(_rng):
    """All 64 bits of a wr_id come back."""
    ids = [0, 1, 1 << 63, (1 << 64) - 1, 0x0123456789abcdef]
    with Pair(DEVICE) as pair:
        source, target = pair.a.memory(8), pair.b.memory(8)
        for wr_id in ids:
            pair.b.post_recv([sge(target)], wr_id)
            pair.a.post_send(e.IBV_WR_SEND, [sge(source)], wr_id)
        ktap.equal(wr_ids(complete(pair.a.send_cq, len(ids))), ids, "send")
        ktap.equal(wr_ids(complete(pair.b.recv_cq, len(ids))), ids, "receive")


def has_event(end):
    """Returns whether the endpoint's channel holds an event now."""
    return bool(select.select([end.channel_fd], [], [], 0)[0])


def wait_event(end, cq):
    end.channel.get_cq_event(cq)
    cq.ack_events(1)


def completion_event(_rng):
    """An armed CQ raises one event; a CQ that is not armed raises no event."""
    with Pair(DEVICE, channel=True) as pair:
        source, target = pair.a.memory(8), pair.b.memory(8)
        for _ in range(50):
            pair.b.recv_cq.req_notify()
            for _ in range(3):
                pair.b.post_recv([sge(target)])
                pair.a.post_send(e.IBV_WR_SEND, [sge(source)])
            wait_event(pair.b, pair.b.recv_cq)
            complete(pair.b.recv_cq, 3)
            complete(pair.a.send_cq, 3)
        ktap.equal((has_event(pair.a), has_event(pair.b)),
                   (False, False), "further events")


def event_loop(_rng):
    """Arm, poll, wait: the loop of every event-driven program loses no completion."""
    total, window = 2000, 16
    with Pair(DEVICE, depth=window, channel=True) as pair:
        source, target = pair.a.memory(8), pair.b.memory(8)
        cq, posted, sent, seen = pair.b.recv_cq, 0, 0, 0
        for _ in range(window):
            pair.b.post_recv([sge(target)])
        while seen < total:
            while posted < total and posted - min(sent, seen) < window:
                pair.a.post_send(e.IBV_WR_SEND, [sge(source)])
                posted += 1
            cq.req_notify()
            received = cq.poll(window)[1]
            if not received and seen < posted:
                wait_event(pair.b, cq)
                received = cq.poll(window)[1]
            for wc in received:
                ktap.equal(wc.status, e.IBV_WC_SUCCESS, "status")
                pair.b.post_recv([sge(target)])
            seen += len(received)
            sent += pair.a.send_cq.poll(window)[0]
        ktap.equal(seen, total, "completions")


def events_beside_a_destroy(rng):
    """A QP that is destroyed takes its own completions out of a CQ, and no event of another QP."""
    last_vector = DEVICE.context.num_comp_vectors - 1
    with Pair(DEVICE, channel=True, vector=last_vector) as pair:
        source, target = pair.a.memory(8), pair.b.memory(8)
        cq = pair.b.recv_cq
        for _ in range(300):
            other = Endpoint(DEVICE, cq=cq)
            other.qp.to_init(other.attributes(0))
            other.post_recv([sge(target)])
            cq.req_notify()
            pair.b.post_recv([sge(target)])
            steps = [lambda: pair.a.post_send(e.IBV_WR_SEND, [sge(source)]),
                     lambda: other.move(e.IBV_QPS_ERR)]
            rng.shuffle(steps)
            for step in steps:
                step()
            other.close()
            received = []
            while not received:
                # The first event may have been for the completion of the other QP.
                wait_event(pair.b, cq)
                cq.req_notify()
                received = cq.poll(2)[1]
            while has_event(pair.b):
                wait_event(pair.b, cq)
            ktap.equal([(wc.status, wc.qp_num) for wc in received],
                       [(e.IBV_WC_SUCCESS, pair.b.qp.qp_num)], "completions")
            complete(pair.a.send_cq, 1)


def solicited_event(_rng):
    """A CQ armed for solicited completions stays silent for others (IBA 11.4.2.2)."""
    with Pair(DEVICE, channel=True) as pair:
        source, target = pair.a.memory(8), pair.b.memory(8)
        for opcode in (e.IBV_WR_SEND, e.IBV_WR_SEND_WITH_IMM, e.IBV_WR_RDMA_WRITE_WITH_IMM):
            pair.b.recv_cq.req_notify(solicited_only=True)
            for _ in range(20):
                pair.b.post_recv([sge(target)])
                pair.a.post_send(opcode, [sge(source)], remote=remote(target))
            complete(pair.b.recv_cq, 20)
            ktap.equal(has_event(pair.b), False, "event for an unsolicited message")
            pair.b.post_recv([sge(target)])
            pair.a.post_send(opcode, [sge(source)], flags=SIGNALED | e.IBV_SEND_SOLICITED,
                             remote=remote(target))
            wait_event(pair.b, pair.b.recv_cq)
            complete(pair.b.recv_cq)
            complete(pair.a.send_cq, 21)


def solicited_event_for_an_error(_rng):
    """A completion in error counts as solicited (IBA 11.4.2.2)."""
    DEVICE.skip_on_rxe("rxe counts only the sender's request as solicited")
    with Pair(DEVICE, channel=True) as pair:
        target = pair.b.memory(8)
        pair.b.post_recv([sge(target)])
        pair.b.recv_cq.req_notify(solicited_only=True)
        pair.b.move(e.IBV_QPS_ERR)
        wait_event(pair.b, pair.b.recv_cq)
        complete(pair.b.recv_cq, status=e.IBV_WC_WR_FLUSH_ERR)


def every_completion_vector(_rng):
    """A CQ raises its events whatever vector it was given."""
    for vector in range(DEVICE.context.num_comp_vectors):
        with Pair(DEVICE, depth=8, channel=True, vector=vector) as pair:
            source, target = pair.a.memory(8), pair.b.memory(8)
            for end, cq in ((pair.a, pair.a.send_cq), (pair.b, pair.b.recv_cq)):
                cq.req_notify()
            pair.b.post_recv([sge(target)])
            pair.a.post_send(e.IBV_WR_SEND, [sge(source)])
            for end, cq in ((pair.a, pair.a.send_cq), (pair.b, pair.b.recv_cq)):
                wait_event(end, cq)
                complete(cq)


ktap.run([selective_signalling, signal_all, send_queue_full, receive_queue_full, poll_in_pieces,
          wr_id_is_opaque, completion_event, event_loop, events_beside_a_destroy,
          solicited_event, solicited_event_for_an_error, every_completion_vector])
