#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Rings of programs: what the driver accepts of them, and what it refuses with
which error. The commands are written as they are, without a library."""

import errno
import mmap
import os
import struct

import ktap
import rc
import uverbs
from uverbs import POST_RECV, POST_SEND, address, zeros

PAGE = mmap.PAGESIZE
DEVICE = rc.open_device()
HEAD, CQ_HEAD, CQE = 256, 128, 64
# The opcode SEND without data; see struct ib_uverbs_send_wr.
SEND = struct.pack("QIII", 1, 0, 2, 0) + bytes(uverbs.SEND_WR_SIZE - 20)
RECV = bytes(uverbs.RECV_WR_SIZE)


def fails(number, function, *args, **options):
    """Fails the test unless the call fails with this error number."""
    try:
        function(*args, **options)
    except OSError as error:
        ktap.equal(errno.errorcode.get(error.errno), errno.errorcode[number], "error")
        return
    raise AssertionError(f"no error, expected {errno.errorcode[number]}")


class Ring:
    """The memory of a CQ's ring, and what the driver is told of it."""

    def __init__(self, cqe, size=None):
        self.memory = zeros(CQ_HEAD + cqe * CQE if size is None else size)

    def request(self, offset=0, more=0):
        """struct virtio_rdma_ureq_create_cq."""
        return struct.pack("QQ", address(self.memory) + offset, len(self.memory) + more)


class Rings:
    """The same of a QP."""

    def __init__(self, sq=(8, 64, HEAD), rq=(8, 32, 1024), size=2 * PAGE):
        self.memory, self.sq, self.rq = zeros(size), sq, rq

    def request(self, offset=0, more=0):
        """struct virtio_rdma_ureq_create_qp."""
        return struct.pack("QQ6I", address(self.memory) + offset, len(self.memory) + more,
                           *self.sq, *self.rq)


class Program:
    """An open device with a PD and a CQ."""

    def __enter__(self):
        self.verbs = uverbs.Uverbs(DEVICE.name)
        if self.verbs.path != uverbs.PATH_RINGS:
            self.verbs.close()
            raise ktap.Skip("the device has no rings")
        self.pd = self.verbs.alloc_pd()
        self.ring = Ring(16)
        self.cq, _ = self.verbs.create_cq(16, self.ring.request())
        return self

    def __exit__(self, *_):
        self.verbs.close()

    def qp(self, rings, **options):
        """A QP with these rings."""
        return self.verbs.create_qp(self.pd, self.cq, rings.request(), **options)


def what_a_program_is_told(_rng):
    """An older library has no room for all of it, a later one for more than there is."""
    programs = [uverbs.Uverbs(DEVICE.name, room) for room in (8, 16, 32)]
    short, whole, long = (program.told for program in programs)
    path, inline, features = struct.unpack("IIQ", whole)
    ktap.equal((path, features >> uverbs.F_RINGS & 1), (uverbs.PATH_RINGS, 1), "told")
    ktap.equal((short, long), (whole[:8], whole + bytes(16)), "shorter and longer")
    for program in programs:
        program.close()
    # The most that a QP may ask for, if its entries have room.
    with Program() as program:
        rings = [Rings(sq=(8, 4096, 4096), rq=(8, 32, 1024), size=9 * PAGE) for _ in range(2)]
        ktap.equal(program.qp(rings[0], inline=inline)[2][4], inline, "inline data")
        fails(errno.EINVAL, program.qp, rings[1], inline=inline + 1)


def create_and_destroy(_rng):
    """Objects with rings come and go; their sizes are those of the rings."""
    with Program() as program:
        rings = Rings()
        qp, number, sizes = program.qp(rings, send_wr=5, recv_wr=7)
        ktap.equal(number > 1, True, "QP number above the GSI's")
        ktap.equal(sizes[:2], (8, 8), "work requests")
        fails(errno.EBUSY, program.verbs.destroy_cq, program.cq)
        program.verbs.destroy_qp(qp)
        program.verbs.destroy_cq(program.cq)


def qp_without_receives(_rng):
    """A QP that receives nothing needs no receive ring."""
    with Program() as program:
        rings = Rings(rq=(0, 0, 0))
        fails(errno.EINVAL, program.qp, rings)
        program.qp(rings, recv_wr=0)


def bad_cq_rings(_rng):
    """Completion rings that the driver refuses."""
    with Program() as program:
        create = program.verbs.create_cq
        ring = Ring(64)
        # A page may hold more than the entries that the ring is for.
        too_many = 64
        while CQ_HEAD + too_many * CQE <= len(ring.memory):
            too_many *= 2
        for cqe in 0, 63, too_many, 1 << 31, 0xffffffff:
            fails(errno.EINVAL, create, cqe, ring.request())
        fails(errno.EINVAL, create, 16, ring.request(offset=8))
        fails(errno.EINVAL, create, 16, ring.request(more=8))
        fails(errno.EINVAL, create, 64, ring.request()[:8])
        fails(errno.EINVAL, create, 64, b"")
        fails(errno.EOPNOTSUPP, create, 64, ring.request() + b"\1" + bytes(7))
        fails(errno.EINVAL, create, 64, ring.request(), vector=10000)
        fails(errno.EFAULT, create, 16, struct.pack("QQ", PAGE, 16 * PAGE))
        fails(errno.EINVAL, create, 16, struct.pack("QQ", address(ring.memory), 1 << 40))
        create(64, ring.request() + bytes(8))


def bad_qp_rings(_rng):
    """Work rings that the driver refuses."""
    with Program() as program:
        def refused(number=errno.EINVAL, options=None, **rings):
            fails(number, program.qp, Rings(**rings), **(options or {}))

        for depth in 0, 7, 1 << 31, 0xffffffff:
            refused(sq=(depth, 64, HEAD))
            refused(rq=(depth, 32, 1024))
        for stride in 0, 16, 48, 2 * PAGE, 1 << 31:
            refused(sq=(8, stride, 8192))
            refused(rq=(8, stride, 8192))
        for offset in 0, 192, HEAD + 32, 2 * PAGE, 0xffffffc0:
            refused(sq=(8, 64, offset))
        refused(sq=(2 * PAGE // 64, 64, HEAD))
        # Entries too small for what the QP may post.
        refused(options={"sge": 2})
        refused(options={"inline": 17})
        refused(options={"type": uverbs.QPT_UD})
        # More work requests than entries.
        refused(options={"send_wr": 9})
        refused(options={"recv_wr": 9})
        rings = Rings()
        create = program.verbs.create_qp
        fails(errno.EINVAL, create, program.pd, program.cq, rings.request(offset=64))
        fails(errno.EINVAL, create, program.pd, program.cq, rings.request(more=1))
        fails(errno.EINVAL, create, program.pd, program.cq, rings.request()[:32])
        fails(errno.EOPNOTSUPP, create, program.pd, program.cq, rings.request() + b"\0" * 7 + b"\1")


def inline_data(_rng):
    """A QP has the inline data that it asked for and its entries hold."""
    with Program() as program:
        _, _, sizes = program.qp(Rings(sq=(8, 128, HEAD), rq=(8, 32, 2048)), inline=80)
        ktap.equal(sizes[4], 80, "inline data")


def kernel_does_not_post(_rng):
    """The kernel leaves a program's rings alone; without requests it rings the doorbell."""
    with Program() as program:
        rings = Rings()
        qp, _, _ = program.qp(rings)
        before = bytes(rings.memory)
        fails(errno.EOPNOTSUPP, program.verbs.post, POST_SEND, qp, [SEND])
        fails(errno.EOPNOTSUPP, program.verbs.post, POST_RECV, qp, [RECV])
        fails(errno.EOPNOTSUPP, program.verbs.poll_cq, program.cq)
        ktap.same_bytes(bytes(rings.memory)[:128], before[:128], "the program's part of the head")
        for _ in range(1000):
            program.verbs.post(POST_SEND, qp, [])
            program.verbs.post(POST_RECV, qp, [])


def resize(_rng):
    """A CQ moves to another ring, and back to a small one."""
    with Program() as program:
        large, small, tiny = Ring(256), Ring(16), Ring(1)
        verbs = program.verbs
        ktap.equal(verbs.resize_cq(program.cq, 256, large.request()), (256, 0), "larger")
        ktap.equal(verbs.resize_cq(program.cq, 16, small.request()), (16, 0), "smaller")
        fails(errno.EINVAL, verbs.resize_cq, program.cq, 17, large.request())
        fails(errno.EINVAL, verbs.resize_cq, program.cq, 4096, large.request())
        fails(errno.EINVAL, verbs.resize_cq, program.cq, 16, b"")
        ktap.equal(verbs.resize_cq(program.cq, 1, tiny.request()), (1, 0), "one CQE")


# Driver data with a byte that nobody knows: behind what the driver knows, right away and far away.
UNKNOWN = b"\1" + bytes(7), bytes(7) + b"\1", bytes(60) + b"\0\0\1\0"


def modify_to_init(qp):
    """struct ib_uverbs_modify_qp for RESET to INIT."""
    path = struct.pack("16sIHHBBBBBBBB", bytes(16), 0, 0, 0, 0, 64, 0, 0, 0, 0, 1, 1)
    body = path + bytes(32) + struct.pack("7I", qp, uverbs.TO_INIT, 0, 0, 0, 0, 0)
    return body + struct.pack("HH4B8B4B", 0, 0, uverbs.INIT, *[0] * 7, 1, *[0] * 7)


def driver_data_of(program):
    """Every command that may carry driver data, each with what is valid of it: its number, its body with the driver
    data that it has, and the bytes of its answer without that of the driver."""
    verbs = program.verbs
    memory, rings, ring = zeros(2 * PAGE), Rings(), Ring(16)
    at = address(memory)
    qp, _, _ = program.qp(rings)
    work = struct.pack("QQIIII", at, PAGE, 8, 32, HEAD, 0)
    srq, _ = verbs.create_srq(program.pd, 8, 1, work)
    xrcd = verbs.open_xrcd()
    mr, *_ = struct.unpack("III", verbs.command(
        uverbs.REG_MR, struct.pack("QQQII", at, PAGE, at, program.pd, uverbs.ALL_ACCESS), 12))
    gid = bytes.fromhex(DEVICE.context.query_gid(rc.PORT, DEVICE.gid.gid_index).gid.replace(":", ""))
    route = struct.pack("16sI4B", gid, 0, DEVICE.gid.gid_index, 1, 0, 0)
    sizes = struct.pack("QIIIIIIIIIBBBB", 0, program.pd, program.cq, program.cq, 0, 8, 8, 1, 1, 0, 0, uverbs.QPT_RC, 0, 0)
    commands = {
        "ALLOC_PD": (uverbs.ALLOC_PD, b"", 4),
        "CREATE_AH": (uverbs.CREATE_AH, struct.pack("QII", 0, program.pd, 0) + route + struct.pack("H6B", 0, *[0] * 3, 1, 1, 0),
                      4),
        "REG_MR": (uverbs.REG_MR, struct.pack("QQQII", at, PAGE, at, program.pd, uverbs.ALL_ACCESS), 12),
        "REREG_MR": (uverbs.REREG_MR, struct.pack("IIQQQII", mr, 4, 0, 0, 0, program.pd, uverbs.ALL_ACCESS), 8),
        "ALLOC_MW": (uverbs.ALLOC_MW, struct.pack("IB3x", program.pd, 1), 8),
        "CREATE_CQ": (uverbs.CREATE_CQ, struct.pack("QIIiI", 0, 16, 0, -1, 0) + ring.request(), 8),
        "RESIZE_CQ": (uverbs.RESIZE_CQ, struct.pack("II", program.cq, 16) + ring.request(), 8),
        "CREATE_QP": (uverbs.CREATE_QP, sizes + rings.request(), 32),
        "MODIFY_QP": (uverbs.MODIFY_QP, modify_to_init(qp), 0),
        "CREATE_SRQ": (uverbs.CREATE_SRQ, struct.pack("QIIII", 0, program.pd, 8, 1, 0) + work, 16),
        "MODIFY_SRQ": (uverbs.MODIFY_SRQ, struct.pack("IIII", srq, 2, 0, 1), 0),
        "MODIFY_SRQ to another size": (uverbs.MODIFY_SRQ, struct.pack("IIII", srq, uverbs.SRQ_MAX_WR, 8, 0) + work, 0),
        "OPEN_XRCD": (uverbs.OPEN_XRCD, struct.pack("iI", -1, os.O_CREAT), 4),
        "CREATE_XSRQ": (uverbs.CREATE_XSRQ,
                        struct.pack("Q8I", 0, uverbs.SRQT_XRC, program.pd, 8, 1, 0, 0, xrcd, program.cq) + work, 16),
    }
    keep = memory, rings, ring
    return commands, keep


def driver_data_that_is_not_known(_rng):
    """Bytes that the driver knows nothing of are refused by every command unless they are zero, and what a command
    has no answer for is zeroed: struct ib_udata in <rdma/ib_verbs.h>."""
    if not DEVICE.attr.max_srq:
        raise ktap.Skip("the device has no SRQs, windows and XRC domains, whose commands are among these")
    with Program() as program:
        commands, _keep = driver_data_of(program)
        for name, (number, body, answer) in commands.items():
            for more in UNKNOWN:
                try:
                    program.verbs.command(number, body + more, answer + (64 if answer else 0))
                except OSError as error:
                    ktap.equal(error.errno, errno.EOPNOTSUPP, name)
                else:
                    raise AssertionError(f"{name} takes {more}")
            try:
                told = program.verbs.command(number, body + bytes(8), answer + (64 if answer else 0))
            except OSError as error:
                raise AssertionError(f"{name} fails: {error}") from error
            ktap.equal(told[answer + 48:], bytes(len(told[answer + 48:])), f"{name}: the end of its answer")
        verbs = uverbs.Uverbs.__new__(uverbs.Uverbs)
        verbs.fd = os.open(program.verbs.path_of(DEVICE.name), os.O_RDWR | os.O_CLOEXEC)
        fails(errno.EOPNOTSUPP, verbs.command, uverbs.GET_CONTEXT, b"\1" + bytes(7), 16)
        verbs.close()


def refused_and_taken(name, send):
    """Expects that `send(more, room)` fails with unknown bytes behind the driver data, and takes zeros; and that the
    driver's answer, which it returns, ends in zeros."""
    for more in UNKNOWN:
        try:
            send(more, 64)
        except OSError as error:
            ktap.equal((name, error.errno), (name, errno.EOPNOTSUPP), "error")
        else:
            raise AssertionError(f"{name} takes {more}")
    for more in b"", bytes(8), bytes(64):
        try:
            told = send(more, 64)
        except OSError as error:
            raise AssertionError(f"{name} fails with {len(more)} zeros: {error}") from error
        ktap.equal((name, told), (name, bytes(64)), "the driver's answer")


def extended_commands(program, qp):
    """Every extended command whose driver data the core hands on (that of EX_MODIFY_CQ it does not): its number, its
    body, the driver data that it has, and the bytes of its answer without that of the driver."""
    sizes = struct.pack("Q9I4B4I", 0, program.pd, program.cq, program.cq, 0, 8, 8, 1, 1, 0, 0, uverbs.QPT_RC, 0, 0,
                        0, 0, 0, 0)
    rings, ring = Rings(), Ring(16)
    commands = {
        "EX_QUERY_DEVICE": (uverbs.QUERY_DEVICE, bytes(8), b"", 304),
        "EX_CREATE_CQ": (uverbs.CREATE_CQ, struct.pack("QIIiIII", 0, 16, 0, -1, 0, 0, 0), ring.request(), 16),
        "EX_CREATE_QP": (uverbs.CREATE_QP, sizes, rings.request(), 40),
        "EX_MODIFY_QP": (uverbs.MODIFY_QP, modify_to_init(qp) + bytes(8), b"", 8),
    }
    return commands, (rings, ring)


def driver_data_of_extended_commands(_rng):
    """The extended commands refuse what the plain ones refuse, and take what those take."""
    with Program() as program:
        qp, _, _ = program.qp(Rings())
        commands, _keep = extended_commands(program, qp)
        for name, (number, body, driver, answer) in commands.items():
            refused_and_taken(name, lambda more, room, command=(number, body), driver=driver, answer=answer:
                              program.verbs.extended(*command, driver + more, answer, room)[answer:])


def reserved_fields_of_extended_commands(_rng):
    """Masks and flags that nobody knows are refused, by the core or by the driver."""
    with Program() as program:
        qp, _, _ = program.qp(Rings())
        commands, _keep = extended_commands(program, qp)
        # The places of comp_mask, flags and reserved fields, and of what else must be zero.
        places = {"EX_QUERY_DEVICE": (0, 4), "EX_CREATE_CQ": (20, 24, 28), "EX_CREATE_QP": (47, 48, 52)}
        for name, offsets in places.items():
            number, body, driver, answer = commands[name]
            for offset in offsets:
                for bit in 1, 128:
                    wrong = bytearray(body)
                    wrong[offset + (0 if bit == 1 or offset == 47 else 3)] = bit
                    try:
                        program.verbs.extended(number, bytes(wrong), driver, answer)
                    except OSError as error:
                        ktap.equal(error.errno in (errno.EINVAL, errno.EOPNOTSUPP), True, f"{name}, {offset}: {error}")
                    else:
                        raise AssertionError(f"{name} takes {bit} at {offset}")


def driver_data_of_methods(_rng):
    """ioctl() has the same rules, for methods and for the commands that a method invokes."""
    if not DEVICE.attr.max_srq:
        raise ktap.Skip("the device has no SRQs, whose method is among these")
    with Program() as program:
        verbs, memory, rings, ring = program.verbs, zeros(PAGE), Rings(), Ring(16)
        at = address(memory)
        number = struct.Struct("Q").pack
        handles = {
            "CQ_CREATE": (uverbs.ON_CQ, uverbs.CREATE, ring.request(), {
                0: 0, 1: struct.pack("I", 16), 2: number(0), 4: struct.pack("I", 0)}, {6: 4}),
            "QP_CREATE": (uverbs.ON_QP, uverbs.CREATE, rings.request(), {
                0: 0, 2: program.pd, 4: program.cq, 5: program.cq, 7: number(0), 8: struct.pack("5I", 8, 8, 1, 1, 0),
                9: number(uverbs.QPT_RC)}, {13: 20, 14: 4}),
            "SRQ_CREATE": (uverbs.ON_SRQ, uverbs.CREATE, struct.pack("QQIIII", at, PAGE, 8, 32, HEAD, 0), {
                0: 0, 1: program.pd, 9: number(0), 4: number(0), 5: struct.pack("I", 8), 6: struct.pack("I", 1),
                7: struct.pack("I", 0)}, {11: 4, 12: 4}),
            "REG_MR": (uverbs.ON_MR, uverbs.REG_MR_METHOD, b"", {
                0: 0, 1: program.pd, 3: number(at), 4: number(at), 5: number(PAGE), 6: number(0)}, {9: 4, 10: 4}),
            "ALLOC_PD, invoked": (uverbs.ON_DEVICE, uverbs.INVOKE_WRITE, b"", {
                0: number(0), 2: number(uverbs.ALLOC_PD)}, {1: 4}),
        }
        for name, (what, method, driver, attributes, answers) in handles.items():
            def send(more, room, call=(what, method), driver=driver, attributes=attributes, answers=answers):
                sent = {**attributes, uverbs.UHW_IN: driver + more} if driver + more else attributes
                return verbs.ioctl(*call, sent, [*answers.items(), (uverbs.UHW_OUT, room)])[uverbs.UHW_OUT]
            refused_and_taken(name, send)


def reserved_fields(_rng):
    """A reserved field of driver data must be zero, or it could never get a meaning."""
    if not DEVICE.attr.max_srq:
        raise ktap.Skip("the device has no SRQs")
    with Program() as program:
        memory = zeros(PAGE)
        fields = address(memory), PAGE, 8, 32, HEAD
        fails(errno.EOPNOTSUPP, program.verbs.create_srq, program.pd, 8, 1, struct.pack("QQIIII", *fields, 1))
        srq, _ = program.verbs.create_srq(program.pd, 8, 1, struct.pack("QQIIII", *fields, 0))
        fails(errno.EOPNOTSUPP, program.verbs.resize_srq, srq, 8, struct.pack("QQIIII", *fields, 1 << 31))


def many_and_killed(_rng):
    """A program that ends without destroying anything leaves nothing behind."""
    for _ in range(3):
        with Program() as program:
            keep = [Rings() for _ in range(64)]
            for rings in keep:
                program.qp(rings)


if __name__ == "__main__":
    ktap.run([what_a_program_is_told, create_and_destroy, qp_without_receives, bad_cq_rings, bad_qp_rings, inline_data,
              kernel_does_not_post, resize, driver_data_that_is_not_known,
              driver_data_of_extended_commands, reserved_fields_of_extended_commands, driver_data_of_methods,
              reserved_fields, many_and_killed])
