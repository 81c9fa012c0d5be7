# SPDX-License-Identifier: GPL-2.0
"""The commands of /dev/infiniband/uverbsN as they are, without a library in
between: for what a library would not send."""

import ctypes
import fcntl
import mmap
import os
import struct

CREATE_AH, REREG_MR = 5, 11
GET_CONTEXT, ALLOC_PD, REG_MR, CREATE_CQ, RESIZE_CQ, DESTROY_CQ, POLL_CQ = 0, 3, 9, 18, 19, 20, 21
ALLOC_MW, DEALLOC_MW = 14, 16
CREATE_QP, MODIFY_QP, DESTROY_QP, POST_SEND, POST_RECV = 24, 26, 27, 28, 29
CREATE_SRQ, MODIFY_SRQ, DESTROY_SRQ, POST_SRQ_RECV = 32, 33, 35, 36
OPEN_XRCD, CLOSE_XRCD, CREATE_XSRQ = 37, 38, 39
QPT_RC, QPT_UD, QPT_XRC_INI, QPT_XRC_TGT = 2, 4, 9, 10
SRQT_XRC, SRQ_MAX_WR = 1, 1
PATH_KERNEL, PATH_RINGS = 0, 1
F_RINGS, F_REREG_MR, F_PAGE_LEVELS = 2, 6, 12
ALL_ACCESS, MW_BIND = 15, 16
# enum ibv_qp_state, and what each step on the way to RTS names (enum ibv_qp_attr_mask).
RESET, INIT, RTR, RTS, ERR = 0, 1, 2, 3, 6
STATE = 1
TO_INIT = STATE | 1 << 3 | 1 << 4 | 1 << 5
TO_RTR = STATE | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 15 | 1 << 17 | 1 << 20
TO_RTS = STATE | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 16
# Of the two types of XRC: an initiator answers nothing, a target asks for nothing.
STEPS = {QPT_RC: (TO_RTR, TO_RTS), QPT_XRC_INI: (TO_RTR & ~(1 << 15 | 1 << 17), TO_RTS),
         QPT_XRC_TGT: (TO_RTR, STATE | 1 << 9 | 1 << 16)}
SEND_WR_SIZE, RECV_WR_SIZE = 56, 16
# The flag of the numbers of extended commands, and the command that the plain ones here do not have.
EXTENDED, QUERY_DEVICE = 1 << 31, 1
# ioctl(): RDMA_VERBS_IOCTL, objects and their methods (<rdma/ib_user_ioctl_cmds.h>), attributes of driver data.
IOCTL, MANDATORY = 0xc0181b01, 1
ON_DEVICE, ON_CQ, ON_QP, ON_SRQ, ON_MR = 0, 3, 4, 5, 7
INVOKE_WRITE, CREATE, REG_MR_METHOD = 0, 0, 5
UHW_IN, UHW_OUT = 1 << 12, (1 << 12) + 1


def zeros(size):
    """Zeroed memory in whole pages."""
    return mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)


def address(memory):
    """Where memory of zeros() is."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Uverbs:
    """An open device. Commands raise OSError."""

    def __init__(self, device, room=8):
        """`room`: bytes for what the driver tells, 8 at least."""
        self.fd = os.open(self.path_of(device), os.O_RDWR | os.O_CLOEXEC)
        self.told = self.command(GET_CONTEXT, b"", 8 + room)[8:]
        self.path, = struct.unpack_from("I", self.told)

    @staticmethod
    def path_of(device):
        """The file of a device."""
        name, = os.listdir(f"/sys/class/infiniband/{device}/device/infiniband_verbs")
        return f"/dev/infiniband/{name}"

    def close(self):
        """Ends all that was created here."""
        os.close(self.fd)

    def command(self, number, body, answer=0):
        """Sends a command whose first member is the address of the answer."""
        # Not zeros, so that it shows what is written.
        out = ctypes.create_string_buffer(b"\xff" * max(answer, 1), max(answer, 1))
        size = 8 + (8 if answer else 0) + len(body)
        assert size % 4 == 0
        head = struct.pack("IHH", number, size // 4, answer // 4)
        if answer:
            head += struct.pack("Q", ctypes.addressof(out))
        os.write(self.fd, head + body)
        return out.raw[:answer]

    def extended(self, number, body, driver=b"", answer=0, room=0):
        """Sends an extended command with driver data; its answer, and behind it the driver's."""
        out = ctypes.create_string_buffer(b"\xff" * max(answer + room, 1), max(answer + room, 1))
        sizes = len(body), len(driver), answer, room
        assert not any(size % 8 for size in sizes)
        words = [size // 8 for size in sizes]
        head = struct.pack("IHHQHHI", number | EXTENDED, words[0], words[2],
                           ctypes.addressof(out) if answer + room else 0, words[1], words[3], 0)
        os.write(self.fd, head + body + driver)
        return out.raw[:answer + room]

    def ioctl(self, what, method, attributes, answers=()):
        """Calls a method with attributes that are numbers (a handle, a descriptor) or bytes, and room for answers: numbers
        of attributes and bytes. The answers by number; a handle of 0 is one that is made, and is an answer as well."""
        keep, packed = [], b""
        for number, value in attributes.items():
            size = 0 if isinstance(value, int) else len(value)
            if isinstance(value, bytes):
                # Up to eight bytes stand in the attribute itself.
                keep.append(ctypes.create_string_buffer(value, max(size, 1)))
                value = int.from_bytes(value, "little") if size <= 8 else ctypes.addressof(keep[-1])
            packed += struct.pack("HHHHQ", number, size, MANDATORY, 0, value)
        rooms = {number: ctypes.create_string_buffer(b"\xff" * size, size) for number, size in answers}
        for number, room in rooms.items():
            packed += struct.pack("HHHHQ", number, len(room), MANDATORY, 0, ctypes.addressof(room))
        count = len(attributes) + len(rooms)
        request = bytearray(struct.pack("HHHHQII", 24 + len(packed), what, method, count, 0, 0, 0) + packed)
        fcntl.ioctl(self.fd, IOCTL, request)
        made = {number: struct.unpack_from("Q", request, 24 + 16 * place + 8)[0]
                for place, (number, value) in enumerate(attributes.items()) if value == 0}
        return {**made, **{number: room.raw for number, room in rooms.items()}}

    def alloc_pd(self):
        """A PD; its handle."""
        return struct.unpack("I", self.command(ALLOC_PD, b"", 4))[0]

    def reg_mr(self, pd, start, length, access=ALL_ACCESS):
        """Registers memory; lkey and rkey."""
        body = struct.pack("QQQII", start, length, start, pd, access)
        _, lkey, rkey = struct.unpack("III", self.command(REG_MR, body, 12))
        return lkey, rkey

    def alloc_mw(self, pd, kind):
        """A memory window of a type; its handle and its key."""
        return struct.unpack("II", self.command(ALLOC_MW, struct.pack("IB3x", pd, kind), 8))

    def dealloc_mw(self, window):
        """Deallocates a memory window."""
        self.command(DEALLOC_MW, struct.pack("I", window))

    def create_cq(self, cqe, driver, vector=0):
        """A CQ; its handle and its size."""
        body = struct.pack("QIIiI", 0, cqe, vector, -1, 0)
        return struct.unpack("II", self.command(CREATE_CQ, body + driver, 8))

    def resize_cq(self, cq, cqe, driver):
        """Gives a CQ another ring; its size, and how many CQEs moved."""
        answer = self.command(RESIZE_CQ, struct.pack("II", cq, cqe) + driver, 16)
        size, _, moved, _ = struct.unpack("IIII", answer)
        return size, moved

    def create_qp(self, pd, cq, driver, **options):
        """A QP; its handle, its number and its sizes."""
        o = {"send_wr": 8, "recv_wr": 8, "sge": 1, "inline": 0, "type": QPT_RC, "srq": None, **options}
        body = struct.pack("QIIIIIIIIIBBBB", 0, pd, cq, cq, o["srq"] or 0, o["send_wr"], o["recv_wr"],
                           o["sge"], o["sge"], o["inline"], 0, o["type"], o["srq"] is not None, 0)
        answer = struct.unpack("8I", self.command(CREATE_QP, body + driver, 32))
        return answer[0], answer[1], answer[2:7]

    def modify_qp(self, qp, state, mask, gid=bytes(16), gid_index=0, peer=0, mtu=3):
        """Moves an RC QP to a state, with the attributes of the mask."""
        path = struct.pack("16sIHHBBBBBBBB", gid, 0, 0, 0, gid_index, 64, 0, 0, 0, 0, 1, 1)
        body = path + bytes(32) + struct.pack("7I", qp, mask, 0, 0, 0, peer, ALL_ACCESS)
        body += struct.pack("HH4B8B4B", 0, 0, state, 0, mtu, 0, 0, 16, 16, 1, 1, 14, 7, 7, 0, 0, 0, 0)
        self.command(MODIFY_QP, body)

    def connect(self, qp, gid, gid_index, peer, mtu, kind=QPT_RC):
        """Brings a QP from RESET to RTS."""
        to_rtr, to_rts = STEPS[kind]
        self.modify_qp(qp, INIT, TO_INIT)
        self.modify_qp(qp, RTR, to_rtr, gid, gid_index, peer, mtu)
        self.modify_qp(qp, RTS, to_rts)

    def destroy_qp(self, qp):
        """Destroys a QP."""
        self.command(DESTROY_QP, struct.pack("II", qp, 0), 4)

    def destroy_cq(self, cq):
        """Destroys a CQ."""
        self.command(DESTROY_CQ, struct.pack("II", cq, 0), 8)

    def create_srq(self, pd, max_wr, max_sge, driver):
        """An SRQ; its handle and its sizes."""
        body = struct.pack("QIIII", 0, pd, max_wr, max_sge, 0)
        handle, *sizes, _ = struct.unpack("IIII", self.command(CREATE_SRQ, body + driver, 16))
        return handle, sizes

    def resize_srq(self, srq, max_wr, driver):
        """Gives an SRQ another ring."""
        self.command(MODIFY_SRQ, struct.pack("IIII", srq, SRQ_MAX_WR, max_wr, 0) + driver)

    def open_xrcd(self):
        """An XRC domain that no file names; its handle."""
        return struct.unpack("I", self.command(OPEN_XRCD, struct.pack("iI", -1, os.O_CREAT), 4))[0]

    def close_xrcd(self, xrcd):
        """Ends an XRC domain."""
        self.command(CLOSE_XRCD, struct.pack("I", xrcd))

    def create_xsrq(self, pd, xrcd, cq, max_wr, max_sge, driver):
        """An SRQ for XRC; its handle and its number."""
        body = struct.pack("Q8I", 0, SRQT_XRC, pd, max_wr, max_sge, 0, 0, xrcd, cq)
        handle, _, _, number = struct.unpack("IIII", self.command(CREATE_XSRQ, body + driver, 16))
        return handle, number

    def destroy_srq(self, srq):
        """Destroys an SRQ."""
        self.command(DESTROY_SRQ, struct.pack("II", srq, 0), 4)

    def poll_cq(self, cq):
        """Asks the kernel for a completion; how many there were."""
        answer = self.command(POLL_CQ, struct.pack("II", cq, 1), 8 + 56)
        return struct.unpack_from("I", answer)[0]

    def post(self, command, qp, requests):
        """POST_SEND, POST_RECV or POST_SRQ_RECV of requests without SGEs."""
        size = SEND_WR_SIZE if command == POST_SEND else RECV_WR_SIZE
        body = struct.pack("IIII", qp, len(requests), 0, size)
        self.command(command, body + b"".join(requests), 4)
