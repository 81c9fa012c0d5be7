#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Two hosts over a network that loses, reorders, delays, duplicates and corrupts packets: nothing of it may show.

Reliable connections carry each message once, in order and right. What unreliable ones deliver is whole.
"""

import os
import struct
import tempfile

import hosts
import ktap
import rc
from rc import CQ, MR, PD, QP, QPCap, e, sge
from pyverbs.addr import GID
from pyverbs.qp import QPInitAttrEx
from pyverbs.srq import SRQ, SrqInitAttrEx
from pyverbs.xrcd import XRCD, XRCDInitAttr

KINDS = {"send": e.IBV_WR_SEND, "send_imm": e.IBV_WR_SEND_WITH_IMM,
         "write": e.IBV_WR_RDMA_WRITE, "write_imm": e.IBV_WR_RDMA_WRITE_WITH_IMM, "read": e.IBV_WR_RDMA_READ,
         "add": e.IBV_WR_ATOMIC_FETCH_AND_ADD, "swap": e.IBV_WR_ATOMIC_CMP_AND_SWP}
RECEIVED = ("send", "send_imm", "write_imm")
SIZES = (1, 3, 64, 1023, 1024, 1025, 4096, 4097, 20000, 65536)
WORD = struct.Struct("=Q")
MASK = (1 << 64) - 1
# The word that atomics change, and what separates the places of two operations.
WORD_AT, GUARD = 0, 8
WINDOW, RECEIVES = 16, 32
QKEY = 0x11112222
GRH = 40


class Operation:
    """What one side does, and its place in the memories of both."""

    def __init__(self, rng, kind, size, place):
        self.kind, self.place = kind, place
        self.size = 8 if kind in ("add", "swap") else size
        self.data = rng.randbytes(self.size)
        self.imm = rng.getrandbits(32)
        self.value, self.compare, self.before = rng.getrandbits(64), 0, 0

    def change(self, word):
        """Returns the word that atomics change as it is afterwards."""
        if self.kind not in ("add", "swap"):
            return word
        self.before, self.data = word, WORD.pack(word)
        # Some words are as expected, and are swapped.
        self.compare = word if self.value % 4 else word ^ 1
        if self.kind == "add":
            return (word + self.value) & MASK
        return self.value if self.compare == word else word

    def request(self, region, there):
        """Returns the request."""
        operands = {"add": (self.value, 0), "swap": (self.compare, self.value)}.get(self.kind)
        place = WORD_AT if operands else self.place
        return rc.send_wr(KINDS[self.kind], [sge(region, self.place, self.size)], self.place, imm=self.imm,
                          remote=(there[0] + place, there[1]), atomic=operands)


class Plan:
    """The operations of one side, and what the memories must hold before and after them: that of the side itself,
    and that of the other side."""

    def __init__(self, rng, large):
        sizes = [(rng.choice(list(KINDS)), rng.choice(SIZES)) for _ in range(120)] + large
        rng.shuffle(sizes)
        self.operations, place, word = [], 16, 0
        for kind, size in sizes:
            operation = Operation(rng, kind, size, place)
            self.operations.append(operation)
            word = operation.change(word)
            place += (operation.size + 7) // 8 * 8 + GUARD
        self.before, self.after = [[bytearray(place), bytearray(place)] for _ in range(2)]
        for operation in self.operations:
            holds = slice(operation.place, operation.place + operation.size)
            is_read = operation.kind == "read"
            self.before[is_read][holds] = operation.data if operation.kind not in ("add", "swap") else bytes(8)
            for memory in self.after if operation.kind not in ("add", "swap") else self.after[:1]:
                memory[holds] = operation.data
        self.after[1][WORD_AT:WORD_AT + 8] = WORD.pack(word)

    def received(self):
        """Returns the operations that take a receive of the other side."""
        return [operation for operation in self.operations if operation.kind in RECEIVED]


def receive(end, region, operation):
    """Posts the receive of an operation."""
    pieces = [sge(region, operation.place, operation.size)] if operation.kind != "write_imm" else []
    end.post_recv(pieces, wr_id=operation.place)


def check_receive(wc, operation):
    """Checks the completion of a receive."""
    ktap.equal((rc.status_name(wc.status), wc.wr_id, wc.byte_len),
               ("SUCCESS", operation.place, operation.size), "receive completion")
    if operation.kind != "send":
        ktap.equal(wc.imm_data, operation.imm, "immediate")


def both_hosts_at_once(side, rng):
    """Each host does a random list of operations of many sizes, and answers those of the other at the same time. All
    memory of both is compared."""
    plans = [Plan(rng, [("write", 1 << 20), ("read", 1 << 20)]) for _ in range(2)]
    mine, theirs = plans if side.active else plans[::-1]
    end = side.endpoint(depth=64, cqe=256)
    own = end.memory(len(mine.before[0]), data=bytes(mine.before[0]))
    shared = end.memory(len(theirs.before[1]), data=bytes(theirs.before[1]))
    coming = theirs.received()
    for operation in coming[:RECEIVES]:
        receive(end, shared, operation)
    there = side.target(shared)
    sent = completed = arrived = 0
    while completed < len(mine.operations) or arrived < len(coming):
        while sent < min(completed + WINDOW, len(mine.operations)):
            rc.post(end.qp.post_send, [mine.operations[sent].request(own, there)])
            sent += 1
        for wc in end.send_cq.poll(WINDOW)[1]:
            operation = mine.operations[completed]
            ktap.equal((rc.status_name(wc.status), wc.wr_id), ("SUCCESS", operation.place),
                       f"request {completed}, {operation.kind} of {operation.size} bytes")
            completed += 1
        for wc in end.recv_cq.poll(RECEIVES)[1]:
            check_receive(wc, coming[arrived])
            if arrived + RECEIVES < len(coming):
                receive(end, shared, coming[arrived + RECEIVES])
            arrived += 1
        os.sched_yield()
    side.exchange()
    ktap.same_bytes(own.read(own.length, 0), bytes(mine.after[0]), "memory of the requester")
    ktap.same_bytes(shared.read(shared.length, 0), bytes(theirs.after[1]), "memory of the responder")
    side.exchange()
    end.close()


def additions(end, landing, remote, count):
    """Adds 1 to a word so often. Returns what the word was before each time."""
    completed = 0
    for number in range(count + WINDOW):
        if number >= WINDOW:
            rc.complete(end.send_cq)
            completed += 1
        if number < count:
            end.post_send(e.IBV_WR_ATOMIC_FETCH_AND_ADD, [sge(landing, 8 * number, 8)], remote=remote, atomic=(1, 0))
    ktap.equal(completed, count, "additions")
    return [WORD.unpack(landing.read(8, 8 * number))[0] for number in range(count)]


def atomics_are_counted(side, _rng):
    """One host adds to a word over several connections, the other one in loopback. Each addition takes place once."""
    connections, count = 4, 150
    ends = [side.endpoint() for _ in range(connections)]
    word = ends[0].memory(8, data=bytes(8))
    aliases = [MR(end.pd, 8, rc.ALL_ACCESS, address=word.buf) for end in ends[1:]]
    theirs = [side.target(region) for region in (word, *aliases)]
    found = []
    if side.active:
        for end, there in zip(ends, theirs):
            found.append(additions(end, end.memory(8 * count), there, count))
    else:
        pair = rc.Pair(side.device)
        alias = MR(pair.b.pd, 8, rc.ALL_ACCESS, address=word.buf)
        for _ in range(connections):
            found.append(additions(pair.a, pair.a.memory(8 * count), rc.remote(alias), count))
    for values in found:
        ktap.equal(values, sorted(set(values)), "what one connection found")
    others = side.exchange(found)
    values = sorted(value for each in found + others for value in each)
    ktap.equal(values, list(range(2 * connections * count)), "what all additions found")
    if not side.active:
        ktap.equal(WORD.unpack(word.read(8, 0))[0], len(values), "the word")
        alias.close()
        pair.a.close()
        pair.b.close()
    side.exchange()
    for alias in aliases:
        alias.close()
    for end in ends:
        end.close()


BLOCK = 1500 * WORD.size


def block(region):
    """Returns the words of the block. The last word was read first."""
    last = region.read(WORD.size, BLOCK - WORD.size)
    return struct.unpack(f"=Q{BLOCK // WORD.size}Q", last + region.read(BLOCK, 0))


def watch(region, count):
    """Watches a block into which the other host writes 1, 2, …, each over all of it: no word goes back, and when the
    last word has changed, all have."""
    before = (0,) * (1 + BLOCK // WORD.size)
    while before[0] != count:
        words = block(region)
        ktap.equal([(word, words[0]) for word in words if word < words[0]][:1], [], "words behind the last word")
        ktap.equal([pair for pair in zip(words, before) if pair[0] < pair[1]][:1], [], "words that went back")
        before = words
        os.sched_yield()


def writes_in_order(side, _rng):
    """The other host watches the memory that WRITEs of many packets change."""
    count = 400
    end = side.endpoint()
    region = end.memory(BLOCK * (WINDOW if side.active else 1))
    region.write(bytes(region.length), region.length)
    there = side.target(region)
    if side.active:
        for number in range(1, count + WINDOW + 1):
            if number > WINDOW:
                rc.complete(end.send_cq)
            if number <= count:
                place = number % WINDOW * BLOCK
                region.write(WORD.pack(number) * (BLOCK // WORD.size), BLOCK, place)
                end.post_send(e.IBV_WR_RDMA_WRITE, [sge(region, place, BLOCK)], remote=there)
    else:
        watch(region, count)
    side.exchange()
    end.close()


def sends_behind_writes(side, _rng):
    """Who receives a message sees all that was written before it."""
    count = 200
    end = side.endpoint()
    region = end.memory(BLOCK * (WINDOW if side.active else 1))
    region.write(bytes(region.length), region.length)
    for number in range(0 if side.active else 48):
        end.post_recv([], wr_id=number)
    there = side.target(region)
    if side.active:
        for number in range(1, count + WINDOW + 1):
            if number > WINDOW:
                rc.complete(end.send_cq)
            if number <= count:
                place = number % WINDOW * BLOCK
                region.write(WORD.pack(number) * (BLOCK // WORD.size), BLOCK, place)
                end.post_send(e.IBV_WR_RDMA_WRITE, [sge(region, place, BLOCK)], flags=0, remote=there)
                end.post_send(e.IBV_WR_SEND_WITH_IMM, [], imm=number)
    else:
        for number in range(1, count + 1):
            (wc,) = rc.complete(end.recv_cq)
            ktap.equal((wc.imm_data, wc.byte_len), (number, 0), "message")
            ktap.equal([word for word in block(region) if word < number][:1], [], "words that were written too late")
            end.post_recv([], wr_id=number)
    side.exchange()
    end.close()


class Initiator(rc.Endpoint):
    """The QP of XRC that sends."""

    def __init__(self, device):
        # pylint: disable=super-init-not-called
        self.device, self.mrs, self.channel = device, [], None
        self.pd = PD(device.context)
        self.own_cqs = [CQ(device.context, 64)]
        (self.send_cq,) = self.own_cqs
        cap = QPCap(max_send_wr=32, max_recv_wr=0, max_send_sge=1, max_recv_sge=0)
        self.qp = QP(device.context, QPInitAttrEx(qp_type=e.IBV_QPT_XRC_SEND, comp_mask=e.IBV_QP_INIT_ATTR_PD,
                                                  pd=self.pd, scq=self.send_cq, cap=cap))

    def post(self, srqn, sges, imm):
        """Posts a SEND for an SRQ of the other host."""
        wr = rc.send_wr(e.IBV_WR_SEND_WITH_IMM, sges, imm=imm)
        wr.set_qp_type_xrc(srqn)
        rc.post(self.qp.post_send, [wr])


class Target(rc.Endpoint):
    """The QP of XRC that receives, its domain, and an SRQ."""

    def __init__(self, device, depth):
        # pylint: disable=super-init-not-called
        self.device, self.mrs, self.channel = device, [], None
        self.pd = PD(device.context)
        self.own_cqs = [CQ(device.context, depth)]
        (self.recv_cq,) = self.own_cqs
        self.file = tempfile.NamedTemporaryFile()  # pylint: disable=consider-using-with
        self.xrcd = XRCD(device.context, XRCDInitAttr(e.IBV_XRCD_INIT_ATTR_FD | e.IBV_XRCD_INIT_ATTR_OFLAGS,
                                                      os.O_CREAT, self.file.fileno()))
        init = SrqInitAttrEx(max_wr=depth, max_sge=1)
        init.srq_type, init.pd, init.xrcd, init.cq = e.IBV_SRQT_XRC, self.pd, self.xrcd, self.recv_cq
        init.comp_mask = (e.IBV_SRQ_INIT_ATTR_TYPE | e.IBV_SRQ_INIT_ATTR_PD |
                          e.IBV_SRQ_INIT_ATTR_CQ | e.IBV_SRQ_INIT_ATTR_XRCD)
        self.srq = SRQ(device.context, init)
        self.qp = QP(device.context, QPInitAttrEx(qp_type=e.IBV_QPT_XRC_RECV,
                                                  comp_mask=e.IBV_QP_INIT_ATTR_XRCD, xrcd=self.xrcd))

    def close(self):
        self.qp.close()
        self.srq.close()
        for region in self.mrs:
            region.close()
        for thing in (*self.own_cqs, self.xrcd, self.pd):
            thing.close()
        self.file.close()


def extended_connections(side, rng):
    """Each message arrives once, in order, in a receive of the SRQ."""
    has_it = bool(side.device.attr.device_cap_flags & e.IBV_DEVICE_XRC)
    if not side.exchange(has_it) or not has_it:
        raise ktap.Skip("one of the devices has no XRC")
    count, slot = 150, 8192
    messages = [rng.randbytes(rng.randint(1, slot)) for _ in range(count)]
    end = Initiator(side.device) if side.active else Target(side.device, count)
    region = end.memory(count * slot, data=b"".join(each.ljust(slot, b"\0") for each in messages)
                        if side.active else bytes(count * slot))
    if not side.active:
        for number in range(count):
            rc.post(end.srq.post_recv, [rc.recv_wr([sge(region, number * slot, slot)], number)])
    side.connect(end)
    srqn = side.exchange(0 if side.active else end.srq.get_srq_num())
    for number in range(count + WINDOW if side.active else 0):
        if number >= WINDOW:
            rc.complete(end.send_cq)
        if number < count:
            end.post(srqn, [sge(region, number * slot, len(messages[number]))], number)
    for number in range(0 if side.active else count):
        (wc,) = rc.complete(end.recv_cq)
        ktap.equal((wc.wr_id, wc.imm_data, wc.byte_len), (number, number, len(messages[number])), "receive")
        ktap.same_bytes(region.read(slot, number * slot), messages[number].ljust(slot, b"\0"), f"message {number}")
    side.exchange()
    end.close()


def arrivals(cq):
    """Returns the completions of receives that are there. They must be successes."""
    found = []
    while True:
        polled, some = cq.poll(16)
        if not polled:
            return found
        ktap.equal({rc.status_name(wc.status) for wc in some}, {"SUCCESS"}, "status")
        found += some


def unreliable_connections(side, rng):
    """What arrives is whole: messages of SENDs in their receives, and what WRITEs with immediate data have written."""
    count, slot = 120, 8192
    end = side.endpoint(qp_type=e.IBV_QPT_UC, depth=256)
    messages = [rng.randbytes(rng.choice((1, 64, 1024, 1025, 4096, slot))) for _ in range(count)]
    content = b"".join(each.ljust(slot, b"\0") for each in messages)
    # The first half is for receives, the second one for WRITEs.
    region = end.memory(2 * count * slot, data=2 * content if side.active else bytes(2 * count * slot))
    for number in range(0 if side.active else count):
        end.post_recv([sge(region, number * slot, slot)], wr_id=number)
    there = side.target(region)
    for number in range(count if side.active else 0):
        here = [sge(region, number * slot, len(messages[number]))]
        if number % 2:
            end.post_send(e.IBV_WR_RDMA_WRITE_WITH_IMM, here, imm=number,
                          remote=(there[0] + (count + number) * slot, there[1]))
        else:
            end.post_send(e.IBV_WR_SEND_WITH_IMM, here, imm=number)
        rc.complete(end.send_cq)
    side.exchange()
    found = [] if side.active else arrivals(end.recv_cq)
    for wc in found:
        is_write = wc.opcode == e.IBV_WC_RECV_RDMA_WITH_IMM
        ktap.equal((is_write, wc.byte_len), (bool(wc.imm_data % 2), len(messages[wc.imm_data])), "receive")
        place = count + wc.imm_data if is_write else wc.wr_id
        ktap.same_bytes(region.read(wc.byte_len, place * slot), messages[wc.imm_data], f"message {wc.imm_data}")
    ktap.equal(bool(found), not side.active, "messages arrive")
    side.exchange()
    end.close()


def datagrams(side, rng):
    """What arrives is whole."""
    count, slot = 200, 2048
    end = rc.Endpoint(side.device, depth=256, qp_type=e.IBV_QPT_UD)
    attr = end.attributes(0)
    attr.qkey = QKEY
    end.qp.to_rts(attr)
    messages = [rng.randbytes(rng.randint(1, 1024)) for _ in range(count)]
    region = end.memory(count * slot)
    for number in range(0 if side.active else count):
        end.post_recv([sge(region, number * slot, slot)], wr_id=number)
    number, gid = side.exchange((end.qp.qp_num, str(side.device.context.query_gid(rc.PORT, side.gid_index))))
    if side.active:
        route = rc.GlobalRoute(dgid=GID(gid), sgid_index=side.gid_index, hop_limit=64)
        address = rc.AH(end.pd, attr=rc.AHAttr(port_num=rc.PORT, is_global=1, gr=route))
        for index, message in enumerate(messages):
            region.write(message, len(message))
            wr = rc.send_wr(e.IBV_WR_SEND_WITH_IMM, [sge(region, 0, len(message))], imm=index)
            wr.set_wr_ud(address, number, QKEY)
            rc.post(end.qp.post_send, [wr])
            rc.complete(end.send_cq)
        address.close()
    side.exchange()
    found = [] if side.active else arrivals(end.recv_cq)
    for wc in found:
        message = messages[wc.imm_data]
        ktap.equal(wc.byte_len, GRH + len(message), "receive")
        ktap.same_bytes(region.read(len(message), wc.wr_id * slot + GRH), message, f"datagram {wc.imm_data}")
    ktap.equal(bool(found), not side.active, "datagrams arrive")
    side.exchange()
    end.close()


if __name__ == "__main__":
    hosts.run([both_hosts_at_once, atomics_are_counted, writes_in_order, sends_behind_writes,
               extended_connections, unreliable_connections, datagrams])
