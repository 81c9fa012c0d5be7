#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Rings of programs: what the driver accepts of them, and with which error it refuses the rest. The commands are
sent as they are, without a library."""

import ctypes
import errno
import os

import abi
import ktap
import rc
import uverbs
from rc import fails_with as fails
from rings import CQ_HEAD, CQE, HEAD, NO_RING, PAGE, CqRing, QpRings, SrqRing
from uverbs import POST_RECV, POST_SEND, address, zeros

# The transport's bit of a device behind a bus.
F_ORDER_PLATFORM = 36
DEVICE = rc.open_device()


class Program:
    """An open device with a PD and a CQ."""

    def __enter__(self):
        self.verbs = uverbs.Uverbs(DEVICE.name)
        if self.verbs.path == abi.UDATA_PATH_KERNEL:
            self.verbs.close()
            raise ktap.Skip("the device has no rings")
        self.pd = self.verbs.alloc_pd()
        self.ring = CqRing(16)
        self.cq, _ = self.verbs.create_cq(16, self.ring.request())
        return self

    def __exit__(self, *_):
        self.verbs.close()

    def qp(self, rings, **options):
        """Creates a QP with these rings; returns its handle, its number and its sizes."""
        return self.verbs.create_qp(self.pd, self.cq, rings.request(), **options)


def what_a_program_is_told(_rng):
    """An older library has no room for all of it, a later one for more than there is."""
    if not DEVICE.has_feature(abi.F_RINGS):
        raise ktap.Skip("the device has no rings")
    size = ctypes.sizeof(abi.UrespAllocUcontext)
    programs = [uverbs.Uverbs(DEVICE.name, room) for room in (8, size, size + 16)]
    short, whole, long = (program.told for program in programs)
    told = abi.UrespAllocUcontext.from_buffer_copy(whole)
    inline = told.max_inline_data
    path = abi.UDATA_PATH_RINGS_BUS if DEVICE.has_feature(F_ORDER_PLATFORM) else abi.UDATA_PATH_RINGS
    ktap.equal((told.data_path, told.features >> abi.F_RINGS & 1), (path, 1), "told")
    attr = DEVICE.attr
    ktap.equal((told.max_cqe, told.max_qp_wr, told.max_send_sge, told.max_recv_sge, told.max_srq_wr, told.max_srq_sge),
               (attr.max_cqe, attr.max_qp_wr, attr.max_sge, attr.max_sge, attr.max_srq_wr, attr.max_srq_sge), "limits")
    ktap.equal((short, long), (whole[:8], whole + bytes(16)), "shorter and longer")
    for program in programs:
        program.close()
    # The most that a QP may ask for, if its entries have room.
    with Program() as program:
        rings = [QpRings(sq=(8, 4096, 4096), rq=(8, 32, 1024), size=9 * PAGE) for _ in range(2)]
        ktap.equal(program.qp(rings[0], inline=inline)[2].max_inline_data, inline, "inline data")
        fails(errno.EINVAL, program.qp, rings[1], inline=inline + 1)


def what_a_library_says(_rng):
    """GET_CONTEXT has driver data since a later version: less of it and zeros are what an older library sends, and a
    bit that the driver does not know is refused. The command and the method have the same rules."""
    size = ctypes.sizeof(abi.UrespAllocUcontext)
    core = ctypes.sizeof(abi.IbUverbsGetContextResp)

    def command(file, driver):
        return file.command(abi.IB_USER_VERBS_CMD_GET_CONTEXT, abi.IbUverbsGetContext(), driver, core + size)[core:]

    def method(file, driver):
        attributes = {abi.UVERBS_ATTR_UHW_IN: driver} if driver else {}
        rooms = [(abi.UVERBS_ATTR_UHW_OUT, size), (abi.UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS, 4),
                 (abi.UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT, 8)]
        return file.ioctl(abi.UVERBS_OBJECT_DEVICE, abi.UVERBS_METHOD_GET_CONTEXT, attributes,
                          rooms)[abi.UVERBS_ATTR_UHW_OUT]

    def opened(way, driver):
        file = uverbs.Commands(uverbs.open_file(DEVICE.name))
        try:
            return way(file, driver)
        finally:
            file.close()

    def says(mask, more=b""):
        return bytes(abi.UreqAllocUcontext(mask)) + more

    for way in command, method:
        name, told = f"GET_CONTEXT, {way.__name__}", set()
        for known in b"", bytes(4), says(0), says(0, bytes(8)), says(0, bytes(64)):
            told.add(taken(name, opened, way, known))
        ktap.equal(len(told), 1, "different answers")
        ktap.equal(abi.UrespAllocUcontext.from_buffer_copy(told.pop()).comp_mask, 0, "mask of the answer")
        for unknown in says(1), says(1 << 31), says(1 << 32), says(1 << 63), b"\1" + bytes(3), says(1, bytes(8)), *(
                says(0, more) for more in UNKNOWN):
            refused(name, opened, way, unknown)


def create_and_destroy(_rng):
    """Objects with rings come and go; their sizes are those of the rings."""
    with Program() as program:
        rings = QpRings()
        qp, number, sizes = program.qp(rings, send_wr=5, recv_wr=7)
        ktap.equal(number > 1, True, "QP number above the GSI's")
        ktap.equal((sizes.max_send_wr, sizes.max_recv_wr), (8, 8), "work requests")
        fails(errno.EBUSY, program.verbs.destroy_cq, program.cq)
        program.verbs.destroy_qp(qp)
        program.verbs.destroy_cq(program.cq)


def qp_without_receives(_rng):
    """A QP that receives nothing needs no receive ring."""
    with Program() as program:
        rings = QpRings(rq=NO_RING)
        fails(errno.EINVAL, program.qp, rings)
        program.qp(rings, recv_wr=0)


def bad_cq_rings(_rng):
    """Completion rings that the driver refuses."""
    with Program() as program:
        create = program.verbs.create_cq
        ring = CqRing(64)
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
        fails(errno.EFAULT, create, 16, bytes(abi.UreqCreateCq(PAGE, 16 * PAGE)))
        fails(errno.EINVAL, create, 16, bytes(abi.UreqCreateCq(address(ring.memory), 1 << 40)))
        create(64, ring.request() + bytes(8))


def bad_qp_rings(_rng):
    """Work rings that the driver refuses."""
    with Program() as program:
        def refused(number=errno.EINVAL, options=None, **rings):
            fails(number, program.qp, QpRings(**rings), **(options or {}))

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
        refused(options={"kind": abi.QPT_UD})
        # More work requests than entries.
        refused(options={"send_wr": 9})
        refused(options={"recv_wr": 9})
        rings = QpRings()
        create = program.verbs.create_qp
        fails(errno.EINVAL, create, program.pd, program.cq, rings.request(offset=64))
        fails(errno.EINVAL, create, program.pd, program.cq, rings.request(more=1))
        fails(errno.EINVAL, create, program.pd, program.cq, rings.request()[:32])
        fails(errno.EOPNOTSUPP, create, program.pd, program.cq, rings.request() + b"\0" * 7 + b"\1")


def inline_data(_rng):
    """A QP has the inline data that it asked for and its entries hold."""
    with Program() as program:
        _, _, sizes = program.qp(QpRings(sq=(8, 128, HEAD), rq=(8, 32, 2048)), inline=80)
        ktap.equal(sizes.max_inline_data, 80, "inline data")


def kernel_does_not_post(_rng):
    """The kernel leaves a program's rings alone; without requests it rings the doorbell."""
    with Program() as program:
        rings = QpRings()
        qp, _, _ = program.qp(rings)
        before = bytes(rings.memory)
        for flags in (0, abi.SEND_INLINE):
            request = abi.IbUverbsSendWr(opcode=abi.IB_UVERBS_WR_SEND, send_flags=flags)
            fails(errno.EOPNOTSUPP, program.verbs.post, POST_SEND, qp, [request])
        fails(errno.EOPNOTSUPP, program.verbs.post, POST_RECV, qp, [abi.IbUverbsRecvWr()])
        fails(errno.EOPNOTSUPP, program.verbs.poll_cq, program.cq)
        ktap.same_bytes(bytes(rings.memory)[:128], before[:128], "the program's part of the head")
        for _ in range(1000):
            program.verbs.post(POST_SEND, qp, [])
            program.verbs.post(POST_RECV, qp, [])


def resize(_rng):
    """A CQ moves to another ring, and back to a small one."""
    with Program() as program:
        large, small, tiny = CqRing(256), CqRing(16), CqRing(1)
        verbs = program.verbs
        ktap.equal(verbs.resize_cq(program.cq, 256, large.request()), (256, 0), "larger")
        ktap.equal(verbs.resize_cq(program.cq, 16, small.request()), (16, 0), "smaller")
        fails(errno.EINVAL, verbs.resize_cq, program.cq, 17, large.request())
        fails(errno.EINVAL, verbs.resize_cq, program.cq, 4096, large.request())
        fails(errno.EINVAL, verbs.resize_cq, program.cq, 16, b"")
        ktap.equal(verbs.resize_cq(program.cq, 1, tiny.request()), (1, 0), "one CQE")


# Driver data with a byte that the driver does not know, right behind what it knows and far behind that.
UNKNOWN = b"\1" + bytes(7), bytes(7) + b"\1", bytes(60) + b"\0\0\1\0"


def command_number(name):
    """Returns the number of a command, of which more words may follow the name."""
    return getattr(abi, "IB_USER_VERBS_CMD_" + name.split()[0])


def modify_to_init(qp):
    """Returns the request of MODIFY_QP that moves a QP from RESET to INIT."""
    path = abi.IbUverbsQpDest(hop_limit=64, is_global=1, port_num=1)
    return abi.IbUverbsModifyQp(path, qp_handle=qp, attr_mask=uverbs.TO_INIT, qp_state=abi.QPS_INIT, port_num=1)


def driver_data_of(program):
    """Returns every command that may carry driver data, by name: a valid request, the driver data that it has, and the
    class of its answer, or None; and what must stay as long as these are used."""
    verbs, pd = program.verbs, program.pd
    memory, rings, ring, work = zeros(2 * PAGE), QpRings(), CqRing(16), SrqRing()
    at = address(memory)
    qp, _, _ = program.qp(rings)
    srq = verbs.create_srq(pd, 8, 1, work.request())
    xrcd = verbs.open_xrcd()
    mr, _, _ = verbs.reg_mr(pd, at, PAGE)
    gid = bytes.fromhex(DEVICE.context.query_gid(rc.PORT, DEVICE.gid.gid_index).gid.replace(":", ""))
    route = abi.IbUverbsGlobalRoute(tuple(gid), sgid_index=DEVICE.gid.gid_index, hop_limit=1)
    sizes = {"max_wr": 8, "max_sge": 1}
    commands = {
        "ALLOC_PD": (abi.IbUverbsAllocPd(), b"", abi.IbUverbsAllocPdResp),
        "CREATE_AH": (abi.IbUverbsCreateAh(pd_handle=pd, attr=abi.IbUverbsAhAttr(route, is_global=1, port_num=1)), b"",
                      abi.IbUverbsCreateAhResp),
        "REG_MR": (abi.IbUverbsRegMr(start=at, length=PAGE, hca_va=at, pd_handle=pd, access_flags=uverbs.ALL_ACCESS),
                   b"", abi.IbUverbsRegMrResp),
        "REREG_MR": (abi.IbUverbsReregMr(mr_handle=mr, flags=abi.REREG_ACCESS, pd_handle=pd,
                                         access_flags=uverbs.ALL_ACCESS), b"", abi.IbUverbsReregMrResp),
        "ALLOC_MW": (abi.IbUverbsAllocMw(pd_handle=pd, mw_type=abi.MW_TYPE_1), b"", abi.IbUverbsAllocMwResp),
        "CREATE_CQ": (abi.IbUverbsCreateCq(cqe=16, comp_channel=-1), ring.request(), abi.IbUverbsCreateCqResp),
        "RESIZE_CQ": (abi.IbUverbsResizeCq(cq_handle=program.cq, cqe=16), ring.request(), abi.IbUverbsResizeCqResp),
        "CREATE_QP": (abi.IbUverbsCreateQp(
            pd_handle=pd, send_cq_handle=program.cq, recv_cq_handle=program.cq, max_send_wr=8, max_recv_wr=8,
            max_send_sge=1, max_recv_sge=1, qp_type=abi.QPT_RC), rings.request(), abi.IbUverbsCreateQpResp),
        "MODIFY_QP": (modify_to_init(qp), b"", None),
        "CREATE_SRQ": (abi.IbUverbsCreateSrq(pd_handle=pd, **sizes), work.request(), abi.IbUverbsCreateSrqResp),
        "MODIFY_SRQ": (abi.IbUverbsModifySrq(srq, uverbs.SRQ_LIMIT, srq_limit=1), b"", None),
        "MODIFY_SRQ to another size": (abi.IbUverbsModifySrq(srq, uverbs.SRQ_MAX_WR, 8), work.request(), None),
        "OPEN_XRCD": (abi.IbUverbsOpenXrcd(fd=0xffffffff, oflags=os.O_CREAT), b"", abi.IbUverbsOpenXrcdResp),
        "CREATE_XSRQ": (abi.IbUverbsCreateXsrq(
            srq_type=abi.IB_UVERBS_SRQT_XRC, pd_handle=pd, xrcd_handle=xrcd, cq_handle=program.cq, **sizes),
            work.request(), abi.IbUverbsCreateSrqResp),
    }
    return commands, (memory, rings, ring, work)


def driver_data_that_is_not_known(_rng):
    """Every command refuses bytes that the driver does not know unless they are zero, and zeroes the part of its
    answer that has no meaning: struct ib_udata in <rdma/ib_verbs.h>."""
    if not DEVICE.attr.max_srq:
        raise ktap.Skip("the device has no SRQs, windows and XRC domains, whose commands are among these")
    with Program() as program:
        commands, _keep = driver_data_of(program)
        for name, (request, driver, response) in commands.items():
            number, answer = command_number(name), ctypes.sizeof(response) if response else 0
            room = answer + 64 if answer else 0
            for more in UNKNOWN:
                refused(name, program.verbs.command, number, request, driver + more, room)
            told = taken(name, program.verbs.command, number, request, driver + bytes(8), room)
            ktap.equal(told[answer + 48:], bytes(len(told[answer + 48:])), f"{name}: the end of its answer")


def refused(name, call, *arguments):
    """Fails the test unless the driver refuses the call with EOPNOTSUPP."""
    try:
        call(*arguments)
    except OSError as error:
        ktap.equal((name, error.errno), (name, errno.EOPNOTSUPP), "error")
    else:
        raise AssertionError(f"{name} succeeds with {arguments}, expected EOPNOTSUPP")


def taken(name, call, *arguments):
    """Fails the test unless the call succeeds; returns what it returns."""
    try:
        return call(*arguments)
    except OSError as error:
        raise AssertionError(f"{name} fails with {arguments}: {error}") from error


def refused_and_taken(name, send):
    """Expects that `send(more, room)` fails with unknown bytes behind the driver data and succeeds with zeros, and
    that the driver's answer, which it returns, is zeros."""
    for more in UNKNOWN:
        refused(name, send, more, 64)
    for more in b"", bytes(8), bytes(64):
        ktap.equal((name, taken(name, send, more, 64)), (name, bytes(64)), "the driver's answer")


def extended_commands(program, qp):
    """Returns every extended command whose driver data the core hands on, which it does not for EX_MODIFY_CQ, by name:
    a valid request, the driver data that it has, and the bytes of its answer; and what must stay as long as these are
    used."""
    rings, ring = QpRings(), CqRing(16)
    create_qp = abi.IbUverbsExCreateQp(
        pd_handle=program.pd, send_cq_handle=program.cq, recv_cq_handle=program.cq, max_send_wr=8, max_recv_wr=8,
        max_send_sge=1, max_recv_sge=1, qp_type=abi.QPT_RC)
    commands = {
        "QUERY_DEVICE": (abi.IbUverbsExQueryDevice(), b"", ctypes.sizeof(abi.IbUverbsExQueryDeviceResp)),
        "CREATE_CQ": (abi.IbUverbsExCreateCq(cqe=16, comp_channel=-1), ring.request(),
                      ctypes.sizeof(abi.IbUverbsExCreateCqResp)),
        "CREATE_QP": (create_qp, rings.request(), ctypes.sizeof(abi.IbUverbsExCreateQpResp)),
        "MODIFY_QP": (abi.IbUverbsExModifyQp(modify_to_init(qp)), b"", ctypes.sizeof(abi.IbUverbsExModifyQpResp)),
    }
    return commands, (rings, ring)


def driver_data_of_extended_commands(_rng):
    """The extended commands refuse what the plain ones refuse, and take what those take."""
    with Program() as program:
        qp, _, _ = program.qp(QpRings())
        commands, _keep = extended_commands(program, qp)
        for name, (request, driver, answer) in commands.items():
            def send(more, room, name=name, request=request, driver=driver, answer=answer):
                number = command_number(name)
                return program.verbs.extended(number, bytes(request), driver + more, answer, room)[answer:]
            refused_and_taken("EX_" + name, send)


def reserved_fields_of_extended_commands(_rng):
    """The core or the driver refuses masks and flags that neither knows."""
    with Program() as program:
        qp, _, _ = program.qp(QpRings())
        commands, _keep = extended_commands(program, qp)
        # comp_mask, flags and reserved fields, which must be zero here.
        fields = {"QUERY_DEVICE": ("comp_mask", "reserved"), "CREATE_CQ": ("comp_mask", "flags", "reserved"),
                  "CREATE_QP": ("reserved", "comp_mask", "create_flags")}
        for name, names in fields.items():
            request, driver, answer = commands[name]
            for field in names:
                place = getattr(type(request), field)
                for offset, bit in (place.offset, 1), (place.offset + place.size - 1, 128):
                    wrong = bytearray(bytes(request))
                    wrong[offset] = bit
                    try:
                        program.verbs.extended(command_number(name), bytes(wrong), driver, answer)
                    except OSError as error:
                        ktap.equal(error.errno in (errno.EINVAL, errno.EOPNOTSUPP), True,
                                   f"EX_{name}, {field}: {error}")
                    else:
                        raise AssertionError(f"EX_{name} succeeds with {bit} at offset {offset}")


def methods_of(program, at, rings, ring, work):
    """Returns methods of ioctl() by name: the object, the method, its driver data, its attributes, and the attributes
    of its answers with their bytes."""
    def u32(value):
        return value.to_bytes(4, "little")

    def u64(value):
        return value.to_bytes(8, "little")

    return {
        "CQ_CREATE": (abi.UVERBS_OBJECT_CQ, abi.UVERBS_METHOD_CQ_CREATE, ring.request(), {
            abi.UVERBS_ATTR_CREATE_CQ_HANDLE: 0, abi.UVERBS_ATTR_CREATE_CQ_CQE: u32(16),
            abi.UVERBS_ATTR_CREATE_CQ_USER_HANDLE: u64(0), abi.UVERBS_ATTR_CREATE_CQ_COMP_VECTOR: u32(0),
        }, {abi.UVERBS_ATTR_CREATE_CQ_RESP_CQE: 4}),
        "QP_CREATE": (abi.UVERBS_OBJECT_QP, abi.UVERBS_METHOD_QP_CREATE, rings.request(), {
            abi.UVERBS_ATTR_CREATE_QP_HANDLE: 0, abi.UVERBS_ATTR_CREATE_QP_PD_HANDLE: program.pd,
            abi.UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE: program.cq, abi.UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE: program.cq,
            abi.UVERBS_ATTR_CREATE_QP_USER_HANDLE: u64(0),
            abi.UVERBS_ATTR_CREATE_QP_CAP: bytes(abi.IbUverbsQpCap(8, 8, 1, 1)),
            abi.UVERBS_ATTR_CREATE_QP_TYPE: u64(abi.QPT_RC),
        }, {abi.UVERBS_ATTR_CREATE_QP_RESP_CAP: ctypes.sizeof(abi.IbUverbsQpCap),
            abi.UVERBS_ATTR_CREATE_QP_RESP_QP_NUM: 4}),
        "SRQ_CREATE": (abi.UVERBS_OBJECT_SRQ, abi.UVERBS_METHOD_SRQ_CREATE, work.request(), {
            abi.UVERBS_ATTR_CREATE_SRQ_HANDLE: 0, abi.UVERBS_ATTR_CREATE_SRQ_PD_HANDLE: program.pd,
            abi.UVERBS_ATTR_CREATE_SRQ_TYPE: u64(abi.IB_UVERBS_SRQT_BASIC),
            abi.UVERBS_ATTR_CREATE_SRQ_USER_HANDLE: u64(0), abi.UVERBS_ATTR_CREATE_SRQ_MAX_WR: u32(8),
            abi.UVERBS_ATTR_CREATE_SRQ_MAX_SGE: u32(1), abi.UVERBS_ATTR_CREATE_SRQ_LIMIT: u32(0),
        }, {abi.UVERBS_ATTR_CREATE_SRQ_RESP_MAX_WR: 4, abi.UVERBS_ATTR_CREATE_SRQ_RESP_MAX_SGE: 4}),
        "REG_MR": (abi.UVERBS_OBJECT_MR, abi.UVERBS_METHOD_REG_MR, b"", {
            abi.UVERBS_ATTR_REG_MR_HANDLE: 0, abi.UVERBS_ATTR_REG_MR_PD_HANDLE: program.pd,
            abi.UVERBS_ATTR_REG_MR_IOVA: u64(at), abi.UVERBS_ATTR_REG_MR_ADDR: u64(at),
            abi.UVERBS_ATTR_REG_MR_LENGTH: u64(PAGE), abi.UVERBS_ATTR_REG_MR_ACCESS_FLAGS: u64(0),
        }, {abi.UVERBS_ATTR_REG_MR_RESP_LKEY: 4, abi.UVERBS_ATTR_REG_MR_RESP_RKEY: 4}),
        "ALLOC_PD, invoked": (abi.UVERBS_OBJECT_DEVICE, abi.UVERBS_METHOD_INVOKE_WRITE, b"", {
            abi.UVERBS_ATTR_CORE_IN: u64(0), abi.UVERBS_ATTR_WRITE_CMD: u64(abi.IB_USER_VERBS_CMD_ALLOC_PD),
        }, {abi.UVERBS_ATTR_CORE_OUT: 4}),
    }


def driver_data_of_methods(_rng):
    """ioctl() has the same rules, for methods and for the commands that a method invokes."""
    if not DEVICE.attr.max_srq:
        raise ktap.Skip("the device has no SRQs, whose method is among these")
    with Program() as program:
        memory, rings, ring, work = zeros(PAGE), QpRings(), CqRing(16), SrqRing()
        methods = methods_of(program, address(memory), rings, ring, work)
        for name, (what, method, driver, attributes, answers) in methods.items():
            def send(more, room, call=(what, method), driver=driver, attributes=attributes, answers=answers):
                sent = {**attributes, abi.UVERBS_ATTR_UHW_IN: driver + more} if driver + more else attributes
                rooms = [*answers.items(), (abi.UVERBS_ATTR_UHW_OUT, room)]
                return program.verbs.ioctl(*call, sent, rooms)[abi.UVERBS_ATTR_UHW_OUT]
            refused_and_taken(name, send)


def reserved_fields(_rng):
    """A reserved field of driver data must be zero, or it could never get a meaning."""
    if not DEVICE.attr.max_srq:
        raise ktap.Skip("the device has no SRQs")
    with Program() as program:
        verbs, ring = program.verbs, SrqRing()
        fails(errno.EOPNOTSUPP, verbs.create_srq, program.pd, 8, 1, ring.request(reserved=1))
        srq = verbs.create_srq(program.pd, 8, 1, ring.request())
        fails(errno.EOPNOTSUPP, verbs.resize_srq, srq, 8, ring.request(reserved=1 << 31))


def many_and_killed(_rng):
    """A program that ends without destroying anything leaves nothing behind."""
    for _ in range(3):
        with Program() as program:
            keep = [QpRings() for _ in range(64)]
            for rings in keep:
                program.qp(rings)


if __name__ == "__main__":
    ktap.run([what_a_program_is_told, what_a_library_says, create_and_destroy, qp_without_receives, bad_cq_rings,
              bad_qp_rings, inline_data, kernel_does_not_post, resize, driver_data_that_is_not_known,
              driver_data_of_extended_commands, reserved_fields_of_extended_commands, driver_data_of_methods,
              reserved_fields, many_and_killed])
