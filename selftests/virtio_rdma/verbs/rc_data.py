#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""RC data transfer: every opcode, with the data compared byte by byte."""

import errno
import struct

import abi
import ktap
from rc import (ALL_ACCESS, MR, SGE, SIGNALED, Pair, complete, e, empty, fails_with, open_device, pieces, poll,
                post, recv_wr, remote, send_wr, sge)
from uverbs import address, zeros

DEVICE = open_device()
MTU = 128 << DEVICE.port.active_mtu
SIZES = [1, 3, MTU - 1, MTU, MTU + 1, 4096, 65536, 3 * 65536 + 5, 1 << 20]
GUARD = 64


def guarded(endpoint, rng, length):
    """Registers memory with random bytes around a target of `length`; returns the MR and its content."""
    content = rng.randbytes(length + 2 * GUARD)
    return endpoint.memory(len(content), data=content), bytearray(content)


def check(region, content, what):
    ktap.same_bytes(region.read(len(content), 0), bytes(content), what)


def two_sided(rng, imm):
    opcode = e.IBV_WR_SEND if imm is None else e.IBV_WR_SEND_WITH_IMM
    with Pair(DEVICE) as pair:
        for size in SIZES:
            data = rng.randbytes(size)
            source = pair.a.memory(size, data=data)
            target, content = guarded(pair.b, rng, size)
            pair.b.post_recv([sge(target, GUARD, size)], wr_id=size)
            pair.a.post_send(opcode, [sge(source)], wr_id=size + 1, imm=imm or 0)
            sent = complete(pair.a.send_cq)[0]
            received = complete(pair.b.recv_cq)[0]
            ktap.equal((sent.wr_id, sent.opcode, sent.qp_num),
                       (size + 1, e.IBV_WC_SEND, pair.a.qp.qp_num), "send completion")
            ktap.equal((received.wr_id, received.opcode, received.byte_len, received.qp_num),
                       (size, e.IBV_WC_RECV, size, pair.b.qp.qp_num), "receive completion")
            ktap.equal(bool(received.wc_flags & e.IBV_WC_WITH_IMM), imm is not None, "WITH_IMM")
            if imm is not None:
                ktap.equal(received.imm_data, imm, "immediate data")
            content[GUARD:GUARD + size] = data
            check(target, content, f"{size} bytes")
        empty(pair.a.send_cq)
        empty(pair.b.recv_cq)


def send(rng):
    two_sided(rng, None)


def send_with_imm(rng):
    two_sided(rng, rng.getrandbits(32))


def send_nothing(_rng):
    """A message without data and without SGE."""
    with Pair(DEVICE) as pair:
        pair.b.post_recv([], wr_id=1)
        pair.a.post_send(e.IBV_WR_SEND, [])
        complete(pair.a.send_cq)
        ktap.equal(complete(pair.b.recv_cq)[0].byte_len, 0, "byte_len")


def send_into_larger_receive(rng):
    """Bytes of the receive buffer behind the message stay as they are."""
    with Pair(DEVICE) as pair:
        source = pair.a.memory(1000, data=rng.randbytes(1000))
        target, content = guarded(pair.b, rng, 5000)
        pair.b.post_recv([sge(target, GUARD, 5000)])
        pair.a.post_send(e.IBV_WR_SEND, [sge(source)])
        complete(pair.a.send_cq)
        ktap.equal(complete(pair.b.recv_cq)[0].byte_len, 1000, "byte_len")
        content[GUARD:GUARD + 1000] = source.read(1000, 0)
        check(target, content, "receive buffer")


def rdma_write(rng):
    with Pair(DEVICE) as pair:
        for size in SIZES:
            source = pair.a.memory(size, data=rng.randbytes(size))
            target, content = guarded(pair.b, rng, size)
            pair.a.post_send(e.IBV_WR_RDMA_WRITE, [sge(source)], wr_id=size,
                             remote=remote(target, GUARD))
            wc = complete(pair.a.send_cq)[0]
            ktap.equal((wc.wr_id, wc.opcode), (size, e.IBV_WC_RDMA_WRITE), "completion")
            content[GUARD:GUARD + size] = source.read(size, 0)
            check(target, content, f"{size} bytes")
        empty(pair.b.recv_cq)


def rdma_write_with_imm(rng):
    """The receive request gives the completion only, its memory is not touched."""
    with Pair(DEVICE) as pair:
        for size in SIZES:
            imm = rng.getrandbits(32)
            source = pair.a.memory(size, data=rng.randbytes(size))
            target, content = guarded(pair.b, rng, size)
            bystander, untouched = guarded(pair.b, rng, 16)
            pair.b.post_recv([sge(bystander)], wr_id=size)
            pair.a.post_send(e.IBV_WR_RDMA_WRITE_WITH_IMM, [sge(source)], imm=imm,
                             remote=remote(target, GUARD))
            complete(pair.a.send_cq)
            wc = complete(pair.b.recv_cq)[0]
            ktap.equal((wc.wr_id, wc.opcode, wc.byte_len, wc.imm_data),
                       (size, e.IBV_WC_RECV_RDMA_WITH_IMM, size, imm), "receive completion")
            content[GUARD:GUARD + size] = source.read(size, 0)
            check(target, content, f"{size} bytes")
            check(bystander, untouched, "memory of the receive request")


def rdma_read(rng):
    with Pair(DEVICE) as pair:
        for size in SIZES:
            source = pair.b.memory(size, data=rng.randbytes(size))
            target, content = guarded(pair.a, rng, size)
            pair.a.post_send(e.IBV_WR_RDMA_READ, [sge(target, GUARD, size)], wr_id=size,
                             remote=remote(source))
            wc = complete(pair.a.send_cq)[0]
            ktap.equal((wc.wr_id, wc.opcode), (size, e.IBV_WC_RDMA_READ), "completion")
            content[GUARD:GUARD + size] = source.read(size, 0)
            check(target, content, f"{size} bytes")


def zero_length_rdma(_rng):
    """No memory is touched, so neither address nor key is looked at (IBA C9-88)."""
    with Pair(DEVICE) as pair:
        for opcode in (e.IBV_WR_RDMA_WRITE, e.IBV_WR_RDMA_READ):
            pair.a.post_send(opcode, [], remote=(0xdeadbeef, 0))
            complete(pair.a.send_cq)


def atomic(pair, opcode, operands, target, offset=0):
    """Runs one atomic operation; returns the value that it read."""
    result = pair.a.memory(8, data=b"\xa5" * 8)
    pair.a.post_send(opcode, [sge(result)], remote=remote(target, offset), atomic=operands)
    wc = complete(pair.a.send_cq)[0]
    expected = (e.IBV_WC_COMP_SWAP if opcode == e.IBV_WR_ATOMIC_CMP_AND_SWP else e.IBV_WC_FETCH_ADD)
    ktap.equal((wc.opcode, wc.byte_len), (expected, 8), "completion")
    return struct.unpack("=Q", result.read(8, 0))[0]


def value(region, offset=0):
    return struct.unpack("=Q", region.read(8, offset))[0]


def compare_and_swap(rng):
    with Pair(DEVICE) as pair:
        target = pair.b.memory(4096)
        for _ in range(64):
            offset = 8 * rng.randrange(512)
            before, swap = value(target, offset), rng.getrandbits(64)
            hit = rng.random() < 0.5
            compare = before if hit else before ^ (1 << rng.randrange(64))
            read = atomic(pair, e.IBV_WR_ATOMIC_CMP_AND_SWP, (compare, swap), target, offset)
            ktap.equal(read, before, "value read")
            ktap.equal(value(target, offset), swap if hit else before, "value left")


def fetch_and_add(rng):
    """The sum wraps at 64 bits."""
    with Pair(DEVICE) as pair:
        target = pair.b.memory(24, data=rng.randbytes(24))
        before, guards = value(target, 8), (value(target), value(target, 16))
        for add in [0, 1, (1 << 64) - 1] + [rng.getrandbits(64) for _ in range(61)]:
            read = atomic(pair, e.IBV_WR_ATOMIC_FETCH_AND_ADD, (add, 0), target, 8)
            ktap.equal(read, before, "value read")
            before = (before + add) % (1 << 64)
            ktap.equal(value(target, 8), before, "value left")
        ktap.equal((value(target), value(target, 16)), guards, "neighbours")


def fetch_and_add_from_both_sides(_rng):
    """Two QPs add to one counter; every value is seen once."""
    rounds = 200
    with Pair(DEVICE) as pair:
        counter = pair.b.memory(8, data=bytes(8))
        other = pair.a.memory(8, data=bytes(8))
        ends = []
        for end, target in ((pair.a, counter), (pair.b, other)):
            ends.append((end, target, end.memory(8 * rounds)))
        for i in range(rounds):
            for end, target, results in ends:
                end.post_send(e.IBV_WR_ATOMIC_FETCH_AND_ADD, [sge(results, 8 * i, 8)],
                              remote=remote(target), atomic=(1, 0))
            for end, _target, _results in ends:
                complete(end.send_cq)
        for _end, target, results in ends:
            seen = struct.unpack(f"={rounds}Q", results.read(8 * rounds, 0))
            ktap.equal(list(seen), list(range(rounds)), "values read")
            ktap.equal(value(target), rounds, "sum")


def scattered(rng, endpoint, lengths):
    """Registers memory with guarded places of these lengths in random order; returns the SGEs for them."""
    order = list(range(len(lengths)))
    rng.shuffle(order)
    offsets, end = {}, GUARD
    for i in order:
        offsets[i] = end
        end += lengths[i] + GUARD
    content = rng.randbytes(end)
    region = endpoint.memory(end, data=content)
    return region, bytearray(content), [(offsets[i], lengths[i]) for i in range(len(lengths))]


def sge_lists(rng, opcode):
    """Messages with 1 to 16 SGEs at either end, some of them empty."""
    limit = min(16, DEVICE.attr.max_sge)
    reading = opcode == e.IBV_WR_RDMA_READ
    with Pair(DEVICE, max_sge=limit) as pair:
        for count in range(1, limit + 1):
            size = rng.choice([17, 1000, MTU + 3, 20000, 70000])
            local, local_content, local_places = scattered(rng, pair.a, pieces(rng, size, count))
            peer_count = rng.randint(1, limit) if opcode == e.IBV_WR_SEND else 1
            peer, peer_content, peer_places = scattered(rng, pair.b, pieces(rng, size, peer_count))
            sges = [sge(local, *place) for place in local_places]
            if opcode == e.IBV_WR_SEND:
                pair.b.post_recv([sge(peer, *place) for place in peer_places])
            pair.a.post_send(opcode, sges, remote=remote(peer, peer_places[0][0]))
            complete(pair.a.send_cq)
            if opcode == e.IBV_WR_SEND:
                ktap.equal(complete(pair.b.recv_cq)[0].byte_len, size, "byte_len")
            ends = [(local_content, local_places), (peer_content, peer_places)]
            (source, from_places), (target, to_places) = reversed(ends) if reading else ends
            data = b"".join(bytes(source[o:o + n]) for o, n in from_places)
            for offset, length in to_places:
                target[offset:offset + length], data = data[:length], data[length:]
            what = f"{size} bytes, {count} SGEs to {peer_count}"
            check(local, local_content, what + ", requester")
            check(peer, peer_content, what + ", responder")


def sge_lists_of_send(rng):
    sge_lists(rng, e.IBV_WR_SEND)


def sge_lists_of_write(rng):
    sge_lists(rng, e.IBV_WR_RDMA_WRITE)


def sge_lists_of_read(rng):
    sge_lists(rng, e.IBV_WR_RDMA_READ)


def fence(rng):
    """A fenced request sends what the READ before it fetched (IBA 10.8.3.3)."""
    with Pair(DEVICE) as pair:
        size = 50000
        staging = pair.a.memory(size)
        target = pair.b.memory(size)
        for opcode in (e.IBV_WR_RDMA_WRITE, e.IBV_WR_SEND):
            for _ in range(10):
                source = pair.b.memory(size, data=rng.randbytes(size))
                staging.write(bytes(size), size)
                if opcode == e.IBV_WR_SEND:
                    pair.b.post_recv([sge(target)])
                pair.a.post_send(e.IBV_WR_RDMA_READ, [sge(staging)], flags=0, remote=remote(source))
                pair.a.post_send(opcode, [sge(staging)], flags=SIGNALED | e.IBV_SEND_FENCE,
                                 remote=remote(target))
                complete(pair.a.send_cq)
                if opcode == e.IBV_WR_SEND:
                    complete(pair.b.recv_cq)
                ktap.same_bytes(target.read(size, 0), source.read(size, 0), "forwarded data")


def sink_that_goes_under_reads(_rng):
    """Nothing is written to the sink of READs once its MR is deregistered. Those that came too late fail."""
    size, count = 1 << 20, 8
    with Pair(DEVICE) as pair:
        source = pair.b.memory(size, data=b"\xff" * size)
        memory = zeros(size)
        for _ in range(10):
            sink = MR(pair.a.pd, size, ALL_ACCESS, address(memory))
            for _ in range(count):
                pair.a.post_send(e.IBV_WR_RDMA_READ, [sge(sink)], remote=remote(source))
            sink.close()
            memory[:] = bytes(size)
            statuses = [wc.status for wc in poll(pair.a.send_cq, count)]
            ktap.same_bytes(memory[:], bytes(size), "memory that is registered no more")
            done = statuses.count(e.IBV_WC_SUCCESS)
            late = [e.IBV_WC_LOC_PROT_ERR] + [e.IBV_WC_WR_FLUSH_ERR] * count
            ktap.equal(statuses, ([e.IBV_WC_SUCCESS] * done + late)[:count], "statuses")
            for end in (pair.a, pair.b):
                end.move(e.IBV_QPS_RESET)
            pair.connect()


def random_operations(rng):
    """A sequence of WRITE, READ, atomics and SEND in flight together, against a model.

    Requests of one QP take effect in order at the responder, so the model
    applies them in order. READs and atomics get a place of their own to write
    to, and the requests that carry data never use such a place.
    """
    depth, size, rounds = 32, 1 << 16, 25
    with Pair(DEVICE, depth=depth) as pair:
        data = rng.randbytes(size)
        local = pair.a.memory(size, data=data)
        shadow = bytearray(rng.randbytes(size))
        peer = pair.b.memory(size, data=bytes(shadow))
        for _ in range(rounds):
            results, receives = [], []
            landing = pair.a.memory(depth * 8192)
            inbox = pair.b.memory(depth * 8192)
            for slot in range(depth):
                place = 8192 * slot
                kind = rng.choice(["write", "read", "cas", "faa", "send"])
                length = rng.choice([8, 100, MTU, 8192])
                offset = rng.randrange(size - length)
                last = SIGNALED if slot == depth - 1 else 0
                if kind == "write":
                    start = rng.randrange(size - length)
                    pair.a.post_send(e.IBV_WR_RDMA_WRITE, [sge(local, start, length)], flags=last,
                                     remote=remote(peer, offset))
                    shadow[offset:offset + length] = data[start:start + length]
                elif kind == "send":
                    start = rng.randrange(size - length)
                    pair.b.post_recv([sge(inbox, place, 8192)])
                    pair.a.post_send(e.IBV_WR_SEND, [sge(local, start, length)], flags=last)
                    receives.append((place, data[start:start + length]))
                elif kind == "read":
                    pair.a.post_send(e.IBV_WR_RDMA_READ, [sge(landing, place, length)], flags=last,
                                     remote=remote(peer, offset))
                    results.append((place, bytes(shadow[offset:offset + length])))
                else:
                    offset &= ~7
                    old = struct.unpack_from("=Q", shadow, offset)[0]
                    operand = rng.getrandbits(64)
                    if kind == "cas":
                        compare = old if rng.random() < 0.5 else old ^ 1
                        opcode, operands = e.IBV_WR_ATOMIC_CMP_AND_SWP, (compare, operand)
                        new = operand if compare == old else old
                    else:
                        opcode, operands = e.IBV_WR_ATOMIC_FETCH_AND_ADD, (operand, 0)
                        new = (old + operand) % (1 << 64)
                    pair.a.post_send(opcode, [sge(landing, place, 8)], flags=last,
                                     remote=remote(peer, offset), atomic=operands)
                    results.append((place, struct.pack("=Q", old)))
                    struct.pack_into("=Q", shadow, offset, new)
            complete(pair.a.send_cq)
            for wc, (place, expected) in zip(complete(pair.b.recv_cq, len(receives)), receives):
                ktap.equal(wc.byte_len, len(expected), "byte_len")
                ktap.same_bytes(inbox.read(len(expected), place), expected, "message")
            for place, expected in results:
                ktap.same_bytes(landing.read(len(expected), place), expected, "value read")
            check(peer, shadow, "responder's memory")


def lists_of_requests(rng):
    """Lists are posted whole and in order, up to the length of the queue."""
    depth = min(200, DEVICE.attr.max_qp_wr, DEVICE.attr.max_cqe)
    with Pair(DEVICE, depth=depth) as pair:
        source, target = pair.a.memory(8 * depth), pair.b.memory(8 * depth)
        for count in (1, 2, 31, 32, 33, 64, 65, depth):
            source.write(rng.randbytes(8 * depth), 8 * depth)
            post(pair.b.qp.post_recv, [recv_wr([sge(target, 8 * i, 8)], i) for i in range(count)])
            post(pair.a.qp.post_send, [send_wr(e.IBV_WR_SEND, [sge(source, 8 * i, 8)], i)
                                       for i in range(count)])
            for cq in (pair.a.send_cq, pair.b.recv_cq):
                ktap.equal([wc.wr_id for wc in complete(cq, count)], list(range(count)), "wr_ids")
            ktap.same_bytes(target.read(8 * count, 0), source.read(8 * count, 0), "messages")


def refuses_list(verb, wrs, named, number, bad):
    """Fails the test unless a list is refused with this error, and bad_wr, which `named` becomes, is the request `bad`
    of it."""
    fails_with(number, post, verb, wrs, named)
    ktap.equal(named.wr_id, bad, "bad_wr")


def list_with_a_bad_request(_rng):
    """The requests before it are posted, those behind it are not, and bad_wr names it."""
    depth = 100
    with Pair(DEVICE, depth=depth, max_sge=2) as pair:
        source, target = pair.a.memory(8), pair.b.memory(8)
        for bad in (0, 1, 31, 32, 33, 99):
            def sges(region, wr_id, bad=bad):
                return [sge(region)] * (100 if wr_id == bad else 1)
            for verb, named, wrs in (
                    (pair.b.qp.post_recv, recv_wr([]),
                     [recv_wr(sges(target, i), i) for i in range(depth)]),
                    (pair.a.qp.post_send, send_wr(e.IBV_WR_SEND, []),
                     [send_wr(e.IBV_WR_SEND, sges(source, i), i) for i in range(depth)])):
                refuses_list(verb, wrs, named, errno.EINVAL, bad)
            for cq in (pair.a.send_cq, pair.b.recv_cq):
                ktap.equal([wc.wr_id for wc in complete(cq, bad)], list(range(bad)), "wr_ids")
            empty(pair.a.send_cq)


def list_with_an_unknown_opcode(_rng):
    """The third of five requests has an opcode that the QP does not have: two complete, and the QP works."""
    with Pair(DEVICE) as pair:
        source, target = pair.a.memory(8), pair.b.memory(8)
        for opcode in (77, e.IBV_WR_TSO):
            for i in range(3):
                pair.b.post_recv([sge(target)], i)
            wrs = [send_wr(opcode if i == 2 else e.IBV_WR_SEND, [sge(source)], i) for i in range(5)]
            refuses_list(pair.a.qp.post_send, wrs, send_wr(e.IBV_WR_SEND, []), errno.EINVAL, 2)
            pair.a.post_send(e.IBV_WR_SEND, [sge(source)], 2)
            for cq in (pair.a.send_cq, pair.b.recv_cq):
                ktap.equal([wc.wr_id for wc in complete(cq, 3)], [0, 1, 2], "wr_ids")
        empty(pair.a.send_cq)


def list_without_room(_rng):
    """A queue has room for two of five requests: these complete behind those that were there, and bad_wr names the
    third."""
    with Pair(DEVICE, depth=8, cqe=64) as pair:
        source, target = pair.a.memory(8), pair.b.memory(8)
        cap = pair.a.init_attr.cap

        def sends(wr_ids):
            return [send_wr(e.IBV_WR_SEND, [sge(source)], i) for i in wr_ids]

        def receives(wr_ids):
            return [recv_wr([sge(target)], i) for i in wr_ids]

        # Sends wait until their peer has receives.
        for room, requests, verb in ((cap.max_send_wr, sends, pair.a.qp.post_send),
                                     (cap.max_recv_wr, receives, pair.b.qp.post_recv)):
            post(verb, requests(range(room - 2)))
            named, = requests([99])
            refuses_list(verb, requests(range(room - 2, room + 3)), named, errno.ENOMEM, room)
        ktap.equal(cap.max_send_wr, cap.max_recv_wr, "room")
        for cq in (pair.a.send_cq, pair.b.recv_cq):
            ktap.equal([wc.wr_id for wc in complete(cq, cap.max_send_wr)], list(range(cap.max_send_wr)), "wr_ids")
            empty(cq)


def both_directions(rng):
    """Messages cross; each side's arrive whole and in order."""
    depth, rounds = 32, 8
    with Pair(DEVICE, depth=depth) as pair:
        ends = (pair.a, pair.b)
        for _ in range(rounds):
            lengths = [rng.randint(1, 9000) for _ in range(depth)]
            boxes = {end: end.memory(9000 * depth, data=rng.randbytes(9000 * depth)) for end in ends}
            inboxes = {end: end.memory(9000 * depth) for end in ends}
            for end in ends:
                for i in range(depth):
                    end.post_recv([sge(inboxes[end], 9000 * i, 9000)], wr_id=i)
            for i, length in enumerate(lengths):
                for end in ends:
                    end.post_send(e.IBV_WR_SEND, [sge(boxes[end], 9000 * i, length)], wr_id=i)
            for end, peer in (ends, ends[::-1]):
                complete(peer.send_cq, depth)
                received = complete(end.recv_cq, depth)
                ktap.equal([(wc.wr_id, wc.byte_len) for wc in received], list(enumerate(lengths)),
                           "receive completions")
                for i, length in enumerate(lengths):
                    ktap.same_bytes(inboxes[end].read(length, 9000 * i),
                                    boxes[peer].read(length, 9000 * i), f"message {i}")


def modified_under_traffic(rng):
    """MODIFY_QP in RTS, of both ends, while READs are in flight: each READ has its data. REMOTE_READ that is taken away
    is missed by the next READ."""
    depth, size, rounds = 16, 8192, 40
    with Pair(DEVICE, depth=depth) as pair:
        source = pair.b.memory(depth * size, data=rng.randbytes(depth * size))
        landing = pair.a.memory(depth * size)

        def read(slot):
            pair.a.post_send(e.IBV_WR_RDMA_READ, [sge(landing, slot * size, size)], wr_id=slot,
                             remote=remote(source, slot * size))

        def modify(end, mask, **values):
            attr = end.attributes(0, **values)
            attr.qp_state = attr.cur_qp_state = e.IBV_QPS_RTS
            end.qp.modify(attr, e.IBV_QP_STATE | mask)

        for _ in range(rounds):
            landing.write(bytes(depth * size), depth * size)
            for slot in range(depth):
                read(slot)
                end = rng.choice((pair.a, pair.b))
                mask, values = rng.choice(((e.IBV_QP_MIN_RNR_TIMER, {"min_rnr_timer": rng.randrange(32)}),
                                           (e.IBV_QP_ACCESS_FLAGS, {"qp_access_flags": ALL_ACCESS}),
                                           (e.IBV_QP_CUR_STATE, {})))
                modify(end, mask, **values)
            ktap.equal([wc.wr_id for wc in complete(pair.a.send_cq, depth)], list(range(depth)), "wr_ids")
            ktap.same_bytes(landing.read(depth * size, 0), source.read(depth * size, 0), "data")
        modify(pair.b, e.IBV_QP_ACCESS_FLAGS, qp_access_flags=ALL_ACCESS & ~e.IBV_ACCESS_REMOTE_READ)
        read(0)
        complete(pair.a.send_cq, status=e.IBV_WC_REM_INV_REQ_ERR)


def registered_part_of_a_page(rng):
    """MRs that begin and end within a page, side by side in the same pages."""
    with Pair(DEVICE) as pair:
        arena = pair.b.memory(3 * 4096, data=rng.randbytes(3 * 4096))
        content = bytearray(arena.read(3 * 4096, 0))
        for offset, length in ((1, 7), (4090, 12), (100, 4096), (8191, 1), (13, 12000)):
            part = MR(pair.b.pd, length, ALL_ACCESS, address=arena.buf + offset)
            pair.b.mrs.append(part)
            source = pair.a.memory(length, data=rng.randbytes(length))
            pair.a.post_send(e.IBV_WR_RDMA_WRITE, [sge(source)], remote=(arena.buf + offset, part.rkey))
            complete(pair.a.send_cq)
            content[offset:offset + length] = source.read(length, 0)
            check(arena, content, f"{length} bytes at {offset}")


def zero_based(rng):
    """Both ends name memory by offsets, wherever it begins."""
    DEVICE.skip_on_rxe("it names all memory by addresses")
    access = ALL_ACCESS | e.IBV_ACCESS_ZERO_BASED
    with Pair(DEVICE) as pair:
        for size in (8, 100, 4096, 3 * 4096 + 5):
            for skip in (0, 1, 77, 4095):
                memories = [zeros(skip + size + GUARD) for _ in range(2)]
                source, target = [MR(end.pd, size, access, address(memory) + skip)
                                  for end, memory in zip((pair.a, pair.b), memories)]
                data = rng.randbytes(size)
                memories[0][skip:skip + size] = data
                offset = rng.randrange(size)
                pair.a.post_send(e.IBV_WR_RDMA_WRITE, [SGE(offset, size - offset, source.lkey)],
                                 remote=(offset, target.rkey))
                complete(pair.a.send_cq)
                expected = bytes(skip + offset) + data[offset:]
                ktap.same_bytes(memories[1][:len(memories[1])], expected.ljust(len(memories[1]), b"\0"), "written")
                pair.b.post_recv([SGE(0, offset, target.lkey)])
                pair.a.post_send(e.IBV_WR_SEND, [SGE(0, offset, source.lkey)])
                complete(pair.a.send_cq)
                complete(pair.b.recv_cq)
                ktap.same_bytes(memories[1][skip:skip + size], data, "sent")
                source.close()
                target.close()


def zero_based_anew(rng):
    """ibv_rereg_mr() decides whether memory is named by offsets. Without ibv_rereg_mr() the MR stays as it was."""
    DEVICE.skip_on_rxe("it names all memory by addresses")
    with Pair(DEVICE) as pair:
        region, local = pair.b.memory(64), pair.a.memory(64)

        def register(access):
            region.rereg(e.IBV_REREG_MR_CHANGE_ACCESS, pair.b.pd, 0, 0, access)

        def written(start):
            local.write(rng.randbytes(64), 64)
            pair.a.post_send(e.IBV_WR_RDMA_WRITE, [sge(local)], remote=(start, region.rkey))
            complete(pair.a.send_cq)
            ktap.same_bytes(region.read(64, 0), local.read(64, 0), "written")

        offsets = ALL_ACCESS | e.IBV_ACCESS_ZERO_BASED
        if not DEVICE.has_feature(abi.F_REREG_MR):
            fails_with(errno.EOPNOTSUPP, register, offsets)
            written(region.buf)
            raise ktap.Skip("the device has no REREG_MR")
        for access, start in ((offsets, 0), (ALL_ACCESS, region.buf), (offsets, 0)):
            register(access)
            written(start)
        pair.a.post_send(e.IBV_WR_RDMA_WRITE, [sge(local)], remote=(region.buf, region.rkey))
        complete(pair.a.send_cq, 1, e.IBV_WC_REM_ACCESS_ERR)


ktap.run([send, send_with_imm, send_nothing, send_into_larger_receive, rdma_write,
          rdma_write_with_imm, rdma_read, zero_length_rdma, compare_and_swap, fetch_and_add,
          fetch_and_add_from_both_sides, sge_lists_of_send, sge_lists_of_write, sge_lists_of_read,
          fence, random_operations, lists_of_requests, list_with_a_bad_request,
          list_with_an_unknown_opcode, list_without_room, sink_that_goes_under_reads, both_directions,
          modified_under_traffic, registered_part_of_a_page, zero_based, zero_based_anew])
