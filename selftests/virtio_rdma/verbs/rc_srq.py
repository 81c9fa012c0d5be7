#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Shared receive queues: many QPs that take their receives from one."""

import errno

import ktap
from async_events import has_event, next_event
from rc import (ALL_ACCESS, PORT, Endpoint, PyverbsError, complete, e, empty, fails_with, move, open_device,
                post, recv_wr, sge, status_name)
from pyverbs.addr import AH
from pyverbs.cq import CQ
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr
from pyverbs.wr import SendWR

DEVICE = open_device()
SIZE = 64
GRH = 40
# The QPs of a test that has many of them. Each has a sender, and the kernel has QPs as well.
MANY = min(64, DEVICE.attr.max_qp // 4)


class Receiver:
    """An SRQ, and QPs of one PD and one CQ that receive from it, each connected to a sender."""

    def __init__(self, count=1, depth=64, **changes):
        """`changes`: attributes of the senders that differ from the defaults."""
        self.pd = PD(DEVICE.context)
        self.srq = SRQ(self.pd, SrqInitAttr(SrqAttr(max_wr=depth, max_sge=4)))
        self.cq = CQ(DEVICE.context, 4 * max(depth, count))
        self.changes = changes
        self.mrs = []
        self.senders = [Endpoint(DEVICE, depth=16, max_sge=1) for _ in range(count)]
        self.qps = [self.qp() for _ in range(count)]
        for sender, qp in zip(self.senders, self.qps):
            self.connect(sender, qp)

    def qp(self, kind=e.IBV_QPT_RC):
        """Creates a QP that receives from the SRQ."""
        cap = QPCap(max_send_wr=1, max_recv_wr=0, max_send_sge=1, max_recv_sge=0)
        init = QPInitAttr(qp_type=kind, scq=self.cq, rcq=self.cq, srq=self.srq, cap=cap)
        return QP(self.pd, init)

    def connect(self, sender, qp):
        """Brings both ends from RESET to RTS."""
        sender.connect(qp.qp_num, **self.changes)
        qp.to_rts(sender.attributes(sender.qp.qp_num))

    def memory(self, length):
        """Registers memory in the PD of the SRQ; returns the MR."""
        self.mrs.append(MR(self.pd, length, ALL_ACCESS))
        return self.mrs[-1]

    def post(self, sges, wr_id=0):
        """Posts one receive to the SRQ."""
        post(self.srq.post_recv, [recv_wr(sges, wr_id)])

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            for thing in (*self.qps, *self.senders, self.srq, self.cq, *self.mrs, self.pd):
                thing.close()
        except PyverbsError:
            # Of a test that failed already, the first error is the one to see.
            if kind is None:
                raise


def attributes(_rng):
    """An SRQ has at least what the program asked for, and tells what it has."""
    with Receiver(depth=100) as receiver:
        attr = receiver.srq.query()
        ktap.equal((attr.max_wr, attr.max_sge, attr.srq_limit), (128, 4, 0), "queried")
        _, init = receiver.qps[0].query(e.IBV_QP_CAP)
        ktap.equal(init.cap.max_recv_wr, 0, "max_recv_wr")
    ktap.equal(DEVICE.attr.max_srq > 0, True, "max_srq")


def limits(_rng):
    """Attributes that no SRQ can have are refused."""
    with Receiver() as receiver:
        for max_wr, max_sge in ((0, 1), (DEVICE.attr.max_srq_wr + 1, 1), (1, DEVICE.attr.max_srq_sge + 1), (1 << 24, 1),
                                (1, 1 << 24)):
            fails_with(errno.EINVAL, SRQ, receiver.pd, SrqInitAttr(SrqAttr(max_wr=max_wr, max_sge=max_sge)))
        for sges in (5, 17):
            fails_with(errno.EINVAL, receiver.post, [sge(receiver.memory(8))] * sges)
        fails_with(errno.EINVAL, post, receiver.qps[0].post_recv, [recv_wr([])])
        fails_with(errno.EINVAL, receiver.srq.modify, SrqAttr(srq_limit=65), e.IBV_SRQ_LIMIT)
        for max_wr in (0, DEVICE.attr.max_srq_wr + 1, 1 << 24):
            fails_with(errno.EINVAL, receiver.srq.modify, SrqAttr(max_wr=max_wr), e.IBV_SRQ_MAX_WR)
        both = e.IBV_SRQ_MAX_WR | e.IBV_SRQ_LIMIT
        fails_with(errno.EINVAL, receiver.srq.modify, SrqAttr(max_wr=8, srq_limit=9), both)
        ktap.equal(receiver.srq.query().max_wr, 64, "max_wr")


def traffic(rng, receiver, messages, meanwhile=lambda: None):
    """Sends messages of random senders; each must arrive once, whole, and in a receive that was free."""
    count, depth = len(receiver.qps), receiver.srq.query().max_wr
    target = receiver.memory(depth * SIZE)
    source = [sender.memory(SIZE) for sender in receiver.senders]
    numbers = {qp.qp_num: index for index, qp in enumerate(receiver.qps)}
    free, expected = list(range(depth)), {}
    rng.shuffle(free)
    sent = received = posted = 0
    while received < messages:
        while free and rng.random() < 0.8:
            slot = free.pop()
            receiver.post([sge(target, slot * SIZE, SIZE)], slot)
            posted += 1
        busy = [index for index in range(count) if index not in expected]
        for index in rng.sample(busy, min(len(busy), messages - sent)):
            data = rng.randbytes(rng.randint(0, SIZE))
            source[index].write(data, len(data))
            receiver.senders[index].post_send(e.IBV_WR_SEND, [sge(source[index], 0, len(data))], sent)
            expected[index] = data
            sent += 1
        meanwhile()
        for wc in receiver.cq.poll(rng.randint(1, 8))[1]:
            ktap.equal(status_name(wc.status), "SUCCESS", "status")
            index = numbers[wc.qp_num]
            data = expected[index]
            ktap.equal(wc.byte_len, len(data), "byte_len")
            ktap.same_bytes(target.read(len(data), wc.wr_id * SIZE), data, f"receive {wc.wr_id}")
            complete(receiver.senders[index].send_cq)
            del expected[index]
            free.append(wc.wr_id)
            received += 1
    ktap.equal(posted - received, depth - len(free), "receives left")
    empty(receiver.cq)


def one_qp(rng):
    """One QP receives over many laps of a small ring."""
    with Receiver(1, depth=4) as receiver:
        traffic(rng, receiver, 500)


def many_qps(rng):
    """Many QPs on one SRQ that has fewer receives than there are QPs."""
    with Receiver(MANY, depth=16) as receiver:
        traffic(rng, receiver, 2000)


def resized(rng):
    """The SRQ gets other rings, larger and smaller, while messages arrive."""
    with Receiver(16, depth=16) as receiver:
        def resize():
            size = 1 << rng.randint(4, 9)
            receiver.srq.modify(SrqAttr(max_wr=size), e.IBV_SRQ_MAX_WR)
            ktap.equal(receiver.srq.query().max_wr, size, "max_wr")
        traffic(rng, receiver, 1000, resize)


def too_small(_rng):
    """An SRQ keeps its ring if what waits does not fit another, and its limit if it does."""
    with Receiver(1, depth=16) as receiver:
        for wr_id in range(9):
            receiver.post([], wr_id)
        fails_with(errno.EINVAL, receiver.srq.modify, SrqAttr(max_wr=8), e.IBV_SRQ_MAX_WR)
        receiver.senders[0].post_send(e.IBV_WR_SEND, [])
        ktap.equal(complete(receiver.cq)[0].wr_id, 0, "wr_id")
        receiver.srq.modify(SrqAttr(max_wr=8, srq_limit=7), e.IBV_SRQ_MAX_WR | e.IBV_SRQ_LIMIT)
        attr = receiver.srq.query()
        ktap.equal((attr.max_wr, attr.srq_limit), (8, 7), "queried")
        fails_with(errno.ENOMEM, receiver.post, [])
        for wr_id in range(1, 9):
            receiver.senders[0].post_send(e.IBV_WR_SEND, [])
            ktap.equal(complete(receiver.cq)[0].wr_id, wr_id, "wr_id")
        ktap.equal(next_event(DEVICE.context), e.IBV_EVENT_SRQ_LIMIT_REACHED, "event")


def full(_rng):
    """An SRQ takes no more receives than it has room for; receives that were taken make room."""
    with Receiver(2, depth=8) as receiver:
        target = receiver.memory(SIZE)
        for _ in range(3):
            for wr_id in range(8):
                receiver.post([sge(target)], wr_id)
            fails_with(errno.ENOMEM, receiver.post, [sge(target)])
            for index in range(8):
                sender = receiver.senders[index % 2]
                sender.post_send(e.IBV_WR_SEND, [])
                complete(sender.send_cq)
                (wc,) = complete(receiver.cq)
                ktap.equal((wc.wr_id, wc.qp_num), (index, receiver.qps[index % 2].qp_num), "completion")


def woken(rng):
    """Senders wait for receives without an end; each receive that is posted wakes one of them."""
    with Receiver(MANY, depth=MANY, min_rnr_timer=0) as receiver:
        target = receiver.memory(SIZE)
        for index, sender in enumerate(receiver.senders):
            sender.post_send(e.IBV_WR_SEND, [], index)
        seen = set()
        while len(seen) < MANY:
            count = min(rng.randint(1, 4), MANY - len(seen))
            for _ in range(count):
                receiver.post([sge(target)])
            seen |= {wc.qp_num for wc in complete(receiver.cq, count)}
            empty(receiver.cq)
        for sender in receiver.senders:
            complete(sender.send_cq)


def no_receive(_rng):
    """A sender that does not wait without an end fails, and no other does."""
    with Receiver(2, rnr_retry=1) as receiver:
        first, second = receiver.senders
        first.post_send(e.IBV_WR_SEND, [])
        complete(first.send_cq, status=e.IBV_WC_RNR_RETRY_EXC_ERR)
        receiver.post([])
        second.post_send(e.IBV_WR_SEND, [])
        complete(second.send_cq)
        ktap.equal(complete(receiver.cq)[0].qp_num, receiver.qps[1].qp_num, "qp_num")


def write_with_immediate(rng):
    """Takes a receive, whose memory it does not touch."""
    with Receiver() as receiver:
        target = receiver.memory(SIZE)
        data = rng.randbytes(SIZE)
        source = receiver.senders[0].memory(SIZE, data=data)
        receiver.post([], 5)
        receiver.senders[0].post_send(e.IBV_WR_RDMA_WRITE_WITH_IMM, [sge(source)], imm=7,
                                      remote=(target.buf, target.rkey))
        (wc,) = complete(receiver.cq)
        ktap.equal((wc.wr_id, wc.imm_data), (5, 7), "completion")
        ktap.same_bytes(target.read(SIZE, 0), data, "memory")


def limit_event(_rng):
    """One event comes when fewer receives are left than the limit, until the next limit is set."""
    with Receiver(2, depth=8) as receiver:
        for wr_id in range(8):
            receiver.post([], wr_id)
        for limit in (6, 3):
            receiver.srq.modify(SrqAttr(srq_limit=limit), e.IBV_SRQ_LIMIT)
            ktap.equal(receiver.srq.query().srq_limit, limit, "armed")
            while receiver.srq.query().srq_limit:
                ktap.equal(has_event(), False, "an event too early")
                receiver.senders[0].post_send(e.IBV_WR_SEND, [])
                complete(receiver.cq)
                complete(receiver.senders[0].send_cq)
            ktap.equal(next_event(DEVICE.context), e.IBV_EVENT_SRQ_LIMIT_REACHED, "event")
        # Two receives are left, which is fewer than three already.
        receiver.srq.modify(SrqAttr(srq_limit=3), e.IBV_SRQ_LIMIT)
        ktap.equal(next_event(DEVICE.context), e.IBV_EVENT_SRQ_LIMIT_REACHED, "event")
        for _ in range(2):
            receiver.senders[1].post_send(e.IBV_WR_SEND, [])
            complete(receiver.cq)
        ktap.equal(has_event(), False, "an event without a limit")


def last_wqe_event(_rng):
    """An event says that a QP in error has taken its last receive; other QPs take the rest."""
    with Receiver(2) as receiver:
        for wr_id in range(3):
            receiver.post([], wr_id)
        for _ in range(3):
            move(receiver.qps[0], e.IBV_QPS_ERR)
            ktap.equal(next_event(DEVICE.context), e.IBV_EVENT_QP_LAST_WQE_REACHED, "event")
            empty(receiver.cq)
            move(receiver.qps[0], e.IBV_QPS_RESET)
            receiver.senders[0].move(e.IBV_QPS_RESET)
            receiver.connect(receiver.senders[0], receiver.qps[0])
        for wr_id, index in enumerate((1, 0, 1)):
            receiver.senders[index].post_send(e.IBV_WR_SEND, [])
            ktap.equal(complete(receiver.cq)[0].wr_id, wr_id, "wr_id")
        ktap.equal(has_event(), False, "another event")


def failed_receive(_rng):
    """A message that does not fit fails its QP, after its completion, and no other."""
    with Receiver(2) as receiver:
        source = receiver.senders[0].memory(SIZE)
        receiver.post([], 1)
        receiver.post([], 2)
        receiver.senders[0].post_send(e.IBV_WR_SEND, [sge(source)])
        ktap.equal(next_event(DEVICE.context), e.IBV_EVENT_QP_LAST_WQE_REACHED, "event")
        ktap.equal(complete(receiver.cq, status=e.IBV_WC_LOC_LEN_ERR)[0].wr_id, 1, "wr_id")
        complete(receiver.senders[0].send_cq, status=e.IBV_WC_REM_INV_REQ_ERR)
        receiver.senders[1].post_send(e.IBV_WR_SEND, [])
        ktap.equal(complete(receiver.cq)[0].wr_id, 2, "wr_id")


def protection(_rng):
    """Receives name memory of the SRQ's PD, whatever PD the QP has."""
    with Receiver(1) as receiver:
        mine, foreign = receiver.memory(SIZE), receiver.senders[0].memory(SIZE)
        source = receiver.senders[0].memory(SIZE)
        receiver.post([sge(mine)], 1)
        receiver.post([sge(foreign)], 2)
        for status in (e.IBV_WC_SUCCESS, e.IBV_WC_LOC_PROT_ERR):
            receiver.senders[0].post_send(e.IBV_WR_SEND, [sge(source)])
            complete(receiver.cq, status=status)
        ktap.equal(next_event(DEVICE.context), e.IBV_EVENT_QP_LAST_WQE_REACHED, "event")


def resets(rng):
    """QPs are reset in the middle of traffic; each place without a receive can be used again."""
    with Receiver(4, depth=16) as receiver:
        target, free = receiver.memory(SIZE), 16
        for _ in range(40):
            for _ in range(free):
                receiver.post([sge(target)])
            fails_with(errno.ENOMEM, receiver.post, [sge(target)])
            busy = rng.sample(range(4), rng.randint(1, 4))
            for index in busy:
                receiver.senders[index].post_send(e.IBV_WR_SEND, [])
            reset = rng.choice(busy)
            receiver.cq.poll(rng.randint(1, 4))
            receiver.senders[reset].move(e.IBV_QPS_RESET)
            move(receiver.qps[reset], e.IBV_QPS_RESET)
            receiver.connect(receiver.senders[reset], receiver.qps[reset])
            for index in set(busy) - {reset}:
                complete(receiver.senders[index].send_cq)
            receiver.cq.poll(16)
            free = 16 - waiting(receiver)


def waiting(receiver):
    """Returns how many receives wait, which is the largest limit that is not reached."""
    low, high = 0, 16
    while low < high:
        middle = (low + high + 1) // 2
        receiver.srq.modify(SrqAttr(srq_limit=middle), e.IBV_SRQ_LIMIT)
        if receiver.srq.query().srq_limit:
            low = middle
        else:
            ktap.equal(next_event(DEVICE.context), e.IBV_EVENT_SRQ_LIMIT_REACHED, "event")
            high = middle - 1
    receiver.srq.modify(SrqAttr(srq_limit=0), e.IBV_SRQ_LIMIT)
    return low


def datagrams(rng):
    """UD QPs receive from an SRQ as well, each its own datagrams."""
    with Receiver(0, depth=8) as receiver:
        qps = [receiver.qp(e.IBV_QPT_UD) for _ in range(4)]
        receiver.qps += qps
        for qp in qps:
            attr = QPAttr(port_num=PORT)
            attr.qkey = 0x1234
            qp.to_rts(attr)
        sender = Endpoint(DEVICE)
        receiver.senders.append(sender)
        ah = AH(receiver.pd, attr=sender.attributes(0).ah_attr)
        source, target = receiver.memory(SIZE), receiver.memory(8 * (GRH + SIZE))
        for wr_id in range(8):
            receiver.post([sge(target, wr_id * (GRH + SIZE), GRH + SIZE)], wr_id)
        for wr_id in range(8):
            data, to = rng.randbytes(SIZE), qps[rng.randrange(4)]
            source.write(data, SIZE)
            wr = SendWR(0, e.IBV_WR_SEND, 1, 0, [sge(source)], e.IBV_SEND_SIGNALED)
            wr.set_wr_ud(ah, to.qp_num, 0x1234)
            post(qps[0].post_send, [wr])
            done = {wc.opcode: wc for wc in complete(receiver.cq, 2)}
            wc = done[e.IBV_WC_RECV]
            ktap.equal((wc.wr_id, wc.qp_num, wc.byte_len), (wr_id, to.qp_num, GRH + SIZE), "completion")
            ktap.same_bytes(target.read(SIZE, wr_id * (GRH + SIZE) + GRH), data, "datagram")
        ah.close()


def without(_rng):
    """A device without SRQs says so."""
    ktap.equal(DEVICE.attr.max_srq, 0, "max_srq")
    pd = PD(DEVICE.context)
    fails_with(errno.EOPNOTSUPP, SRQ, pd, SrqInitAttr(SrqAttr(max_wr=1, max_sge=1)))
    pd.close()


if DEVICE.attr.max_srq:
    ktap.run([attributes, limits, one_qp, many_qps, resized, too_small, full, woken, no_receive, write_with_immediate,
              limit_event, last_wqe_event, failed_receive, protection, resets, datagrams])
else:
    ktap.run([without])
