#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""RC between two hosts: every operation with its data compared, many at once,
and what one host sees of the other's mistakes and end."""

import struct

import hosts
import ktap
import rc
from rc import e, sge

SIZES = (1, 3, 64, 1023, 1024, 1025, 4096, 4097, 65536, 1 << 20)


def send(side, rng):
    """SEND and SEND with immediate of every size."""
    end = side.endpoint()
    region = end.memory(max(SIZES))
    for size in SIZES:
        data, imm = rng.randbytes(size), rng.getrandbits(32)
        for opcode in (e.IBV_WR_SEND, e.IBV_WR_SEND_WITH_IMM):
            if side.active:
                region.write(data, size)
                side.exchange()
                end.post_send(opcode, [sge(region, 0, size)], imm=imm)
                hosts.complete(side, end.send_cq)
                continue
            region.write(bytes(size), size)
            end.post_recv([sge(region)], wr_id=size)
            side.exchange()
            (wc,) = hosts.complete(side, end.recv_cq)
            ktap.equal((wc.wr_id, wc.byte_len), (size, size), "receive completion")
            if opcode == e.IBV_WR_SEND_WITH_IMM:
                ktap.equal(wc.imm_data, imm, "immediate")
            ktap.same_bytes(region.read(size, 0), data, f"{size} bytes")
    end.close()


def write(side, rng):
    """RDMA WRITE of every size into the middle of the other host's memory."""
    end = side.endpoint()
    region = end.memory(max(SIZES) + 64)
    there = side.target(region)
    for size in SIZES:
        data = rng.randbytes(size)
        region.write(data if side.active else bytes(size + 64), size + (0 if side.active else 64))
        side.exchange()
        if side.active:
            end.post_send(e.IBV_WR_RDMA_WRITE, [sge(region, 0, size)], remote=(there[0] + 32, there[1]))
            rc.complete(end.send_cq)
        side.exchange()
        if not side.active:
            ktap.same_bytes(region.read(size + 64, 0), bytes(32) + data + bytes(32), f"{size} bytes")
            rc.empty(end.recv_cq)
    end.close()


def write_with_imm(side, rng):
    end = side.endpoint()
    region = end.memory(65536)
    there = side.target(region)
    data, imm = rng.randbytes(65536), rng.getrandbits(32)
    if side.active:
        region.write(data, len(data))
        side.exchange()
        end.post_send(e.IBV_WR_RDMA_WRITE_WITH_IMM, [sge(region)], imm=imm, remote=there)
        rc.complete(end.send_cq)
    else:
        end.post_recv([])
        side.exchange()
        (wc,) = rc.complete(end.recv_cq)
        ktap.equal((wc.opcode, wc.imm_data, wc.byte_len),
                   (e.IBV_WC_RECV_RDMA_WITH_IMM, imm, len(data)), "receive completion")
        ktap.same_bytes(region.read(len(data), 0), data, "data")
    side.exchange()
    end.close()


def read(side, rng):
    end = side.endpoint()
    region = end.memory(max(SIZES) + 64)
    there = side.target(region)
    for size in SIZES:
        data = rng.randbytes(size)
        region.write(bytes(size + 64) if side.active else data, size + (64 if side.active else 0))
        side.exchange()
        if side.active:
            end.post_send(e.IBV_WR_RDMA_READ, [sge(region, 32, size)], remote=there)
            rc.complete(end.send_cq)
            ktap.same_bytes(region.read(size + 64, 0), bytes(32) + data + bytes(32), f"{size} bytes")
        side.exchange()
    end.close()


def atomics_from_both_hosts(side, _rng):
    """Both hosts add to one word, through the device; nothing is lost."""
    end = side.endpoint()
    word = end.memory(8, data=bytes(8))
    landing = end.memory(8)
    there = side.target(word)
    count = 300
    if side.active:
        via, at = end, there
    else:
        # This host reaches its own word through two QPs of its own, in a PD
        # where the word has another key.
        pair = rc.Pair(side.device)
        alias = rc.MR(pair.b.pd, 8, rc.ALL_ACCESS, address=word.buf)
        landing = pair.a.memory(8)
        via, at = pair.a, (word.buf, alias.rkey)
    side.exchange()
    for _ in range(count):
        via.post_send(e.IBV_WR_ATOMIC_FETCH_AND_ADD, [sge(landing)], remote=at, atomic=(1, 0))
        rc.complete(via.send_cq)
    side.exchange()
    if not side.active:
        ktap.equal(struct.unpack("=Q", word.read(8, 0))[0], 2 * count, "the word")
        alias.close()
    side.exchange()
    end.close()


def places(lengths):
    """Returns the places of pieces of these lengths, eight bytes apart."""
    return [sum(lengths[:n]) + 8 * n for n in range(len(lengths))]


def sge_lists(side, rng):
    """A message gathered from up to 16 pieces here lands in others there."""
    end = side.endpoint()
    most = min(16, side.device.attr.max_sge)
    region = end.memory(1 << 17)
    for count in range(1, most + 1):
        size = rng.randint(count, 3000 * count)
        data = rng.randbytes(size)
        lengths = [rc.pieces(rng, size, count), rc.pieces(rng, size, most + 1 - count)][side.active]
        pieces = list(zip(places(lengths), lengths))
        if side.active:
            for number, (place, length) in enumerate(pieces):
                begin = sum(lengths[:number])
                region.write(data[begin:begin + length], length, place)
            side.exchange()
            end.post_send(e.IBV_WR_SEND, [sge(region, *piece) for piece in pieces])
            hosts.complete(side, end.send_cq)
        else:
            end.post_recv([sge(region, *piece) for piece in pieces])
            side.exchange()
            hosts.complete(side, end.recv_cq)
            got = b"".join(region.read(length, place) for place, length in pieces)
            ktap.same_bytes(got, data, f"{count} pieces")
    end.close()


def in_flight(side, rng):
    """Many messages in flight arrive in order, each in its own receive."""
    count, size, window = 500, 700, 32
    end = side.endpoint()
    region = end.memory(window * size)
    messages = [rng.randbytes(size) for _ in range(count)]

    def slot(number):
        return number % window * size

    if side.active:
        side.exchange()
        for number in range(count + window):
            if number >= window:
                (wc,) = rc.complete(end.send_cq)
                ktap.equal(wc.wr_id, number - window, "order of send completions")
            if number < count:
                region.write(messages[number], size, slot(number))
                end.post_send(e.IBV_WR_SEND, [sge(region, slot(number), size)], wr_id=number)
    else:
        for number in range(window):
            end.post_recv([sge(region, slot(number), size)], wr_id=number)
        side.exchange()
        for number in range(count):
            (wc,) = rc.complete(end.recv_cq)
            ktap.equal(wc.wr_id, number, "order of receive completions")
            ktap.same_bytes(region.read(size, slot(number)), messages[number], f"message {number}")
            if number + window < count:
                end.post_recv([sge(region, slot(number), size)], wr_id=number + window)
    side.exchange()
    end.close()


def both_directions(side, rng):
    """Both hosts write, read and send at the same time, on several connections."""
    size, connections = 32768, 4
    ends = [side.endpoint() for _ in range(connections)]
    regions = [end.memory(4 * size) for end in ends]
    there = [side.target(region) for region in regions]
    for _ in range(10):
        data = [[rng.randbytes(size) for _ in ends] for _ in range(2)]
        mine, theirs = data[side.active], data[not side.active]
        for end, region, content in zip(ends, regions, mine):
            region.write(content, size)
            end.post_recv([sge(region, 3 * size)])
        side.exchange()
        for end, region, (address, rkey) in zip(ends, regions, there):
            here = sge(region, 0, size)
            end.post_send(e.IBV_WR_RDMA_WRITE, [here], flags=0, remote=(address + size, rkey))
            end.post_send(e.IBV_WR_RDMA_READ, [sge(region, 2 * size, size)], flags=0, remote=(address, rkey))
            end.post_send(e.IBV_WR_SEND, [here])
        for end in ends:
            rc.complete(end.send_cq)
            rc.complete(end.recv_cq)
        side.exchange()
        for region, content in zip(regions, theirs):
            for part, what in ((1, "written"), (2, "read"), (3, "sent")):
                ktap.same_bytes(region.read(size, part * size), content, what)
        side.exchange()
    for end in ends:
        end.close()


def wrong_rkey(side, _rng):
    """An rkey that the other host never gave out is refused, and its memory does not change."""
    end = side.endpoint()
    region = end.memory(4096, data=bytes(4096))
    address, rkey = side.target(region)
    if side.active:
        region.write(b"x" * 4096, 4096)
        end.post_send(e.IBV_WR_RDMA_WRITE, [sge(region)], remote=(address, rkey ^ 0x5A5A5A00))
        rc.complete(end.send_cq, status=e.IBV_WC_REM_ACCESS_ERR)
        ktap.equal(end.state(), e.IBV_QPS_ERR, "state")
    side.exchange()
    if not side.active:
        ktap.same_bytes(region.read(4096, 0), bytes(4096), "memory")
    side.exchange()
    end.close()


def late_receive(side, rng):
    """The sender retries until the receiver is ready."""
    end = side.endpoint()
    data = rng.randbytes(4096)
    region = end.memory(4096, data=data if side.active else bytes(4096))
    if side.active:
        end.post_send(e.IBV_WR_SEND, [sge(region)])
        side.exchange()
        rc.complete(end.send_cq)
    else:
        side.exchange()
        end.post_recv([sge(region)])
        rc.complete(end.recv_cq)
        ktap.same_bytes(region.read(4096, 0), data, "data")
    side.exchange()
    end.close()


def peer_gone(side, _rng):
    """The other host destroys its QP: retries run out here."""
    end = side.endpoint({"timeout": 10, "retry_cnt": 1})
    region = end.memory(64)
    if not side.active:
        end.close()
    side.exchange()
    if side.active:
        end.post_send(e.IBV_WR_SEND, [sge(region)])
        rc.complete(end.send_cq, status=e.IBV_WC_RETRY_EXC_ERR)
        end.close()
    side.exchange()


def destroy_under_traffic(side, _rng):
    """QPs destroyed while the other host writes and reads, many times."""
    for _ in range(20):
        end = side.endpoint({"timeout": 10, "retry_cnt": 1}, depth=32)
        region = end.memory(65536)
        there = side.target(region)
        for number in range(16):
            opcode = e.IBV_WR_RDMA_READ if number % 2 else e.IBV_WR_RDMA_WRITE
            end.post_send(opcode, [sge(region)], flags=0, remote=there)
        end.close()
        side.exchange()


if __name__ == "__main__":
    hosts.run([send, write, write_with_imm, read, atomics_from_both_hosts, sge_lists, in_flight,
               both_directions, wrong_rkey, late_receive, peer_gone, destroy_under_traffic])
