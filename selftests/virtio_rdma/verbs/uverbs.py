# SPDX-License-Identifier: GPL-2.0
"""Sends the commands of /dev/infiniband/uverbsN as they are, without a library in between: for what a library would
not send."""

import ctypes
import fcntl
import mmap
import os

import abi

# What each step of an RC QP on the way from RESET to RTS sets.
TO_INIT = abi.QP_STATE | abi.QP_PKEY_INDEX | abi.QP_PORT | abi.QP_ACCESS_FLAGS
TO_RTR = (abi.QP_STATE | abi.QP_AV | abi.QP_PATH_MTU | abi.QP_DEST_QPN | abi.QP_RQ_PSN | abi.QP_MAX_DEST_RD_ATOMIC |
          abi.QP_MIN_RNR_TIMER)
TO_RTS = (abi.QP_STATE | abi.QP_TIMEOUT | abi.QP_RETRY_CNT | abi.QP_RNR_RETRY | abi.QP_SQ_PSN |
          abi.QP_MAX_QP_RD_ATOMIC)
# An XRC initiator sets nothing of a responder, and a target sets nothing of a requester.
STEPS = {abi.QPT_RC: (TO_RTR, TO_RTS),
         abi.QPT_XRC_INI: (TO_RTR & ~(abi.QP_MAX_DEST_RD_ATOMIC | abi.QP_MIN_RNR_TIMER), TO_RTS),
         abi.QPT_XRC_TGT: (TO_RTR, abi.QP_STATE | abi.QP_TIMEOUT | abi.QP_SQ_PSN)}
ALL_ACCESS = (abi.ACCESS_LOCAL_WRITE | abi.ACCESS_REMOTE_WRITE | abi.ACCESS_REMOTE_READ | abi.ACCESS_REMOTE_ATOMIC)
# IB_SRQ_MAX_WR and IB_SRQ_LIMIT of <rdma/ib_verbs.h>, which programs do not have.
SRQ_MAX_WR, SRQ_LIMIT = 1, 2

POST_SEND, POST_RECV, POST_SRQ_RECV = (
    abi.IB_USER_VERBS_CMD_POST_SEND, abi.IB_USER_VERBS_CMD_POST_RECV, abi.IB_USER_VERBS_CMD_POST_SRQ_RECV)


def zeros(size):
    """Returns zeroed memory in whole pages."""
    return mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)


def address(memory):
    """Returns the address of memory that zeros() returned."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def room_for(size):
    """Returns a buffer for an answer, filled with ones so that it shows what is written."""
    return ctypes.create_string_buffer(b"\xff" * size, size)



class Commands:
    """An open file of a device. Commands raise OSError."""

    def __init__(self, fd):
        self.fd = fd

    def close(self):
        """Closes the file, by which the kernel destroys all objects that were created here."""
        os.close(self.fd)

    def command(self, number, request, driver=b"", answer=0):
        """Sends a command with driver data, and returns its answer of `answer` bytes. A command with an answer has
        the field `response`."""
        out = room_for(answer)
        if answer:
            request.response = ctypes.addressof(out)
        body = bytes(request) + driver
        assert len(body) % 4 == 0
        header = abi.IbUverbsCmdHdr(number, ctypes.sizeof(abi.IbUverbsCmdHdr) // 4 + len(body) // 4, answer // 4)
        os.write(self.fd, bytes(header) + body)
        return out.raw

    def ask(self, number, request, answer, driver=b""):
        """Sends a command with driver data, and returns its answer, which is an object of the class `answer`."""
        return answer.from_buffer_copy(self.command(number, request, driver, ctypes.sizeof(answer)))

    def extended(self, number, body, driver=b"", answer=0, room=0):
        """Sends an extended command with driver data; returns its answer, and behind it that of the driver, which has
        `room` bytes."""
        out = room_for(answer + room)
        sizes = len(body), len(driver), answer, room
        assert not any(size % 8 for size in sizes)
        words = [size // 8 for size in sizes]
        header = abi.IbUverbsCmdHdr(number | abi.IB_USER_VERBS_CMD_FLAG_EXTENDED, words[0], words[2])
        more = abi.IbUverbsExCmdHdr(ctypes.addressof(out) if answer + room else 0, words[1], words[3])
        os.write(self.fd, bytes(header) + bytes(more) + body + driver)
        return out.raw

    def ioctl(self, what, method, attributes, answers=()):
        """Calls a method of an object with attributes that are numbers (a handle, a descriptor) or bytes, and with
        room for answers: numbers of attributes and bytes. Returns the answers by the numbers of their attributes; a
        handle of 0 is one that the kernel makes, and is an answer as well."""
        keep, packed = [], b""
        for number, value in attributes.items():
            size = 0 if isinstance(value, int) else len(value)
            if isinstance(value, bytes):
                # Up to eight bytes stand in the attribute itself.
                keep.append(ctypes.create_string_buffer(value, max(size, 1)))
                value = int.from_bytes(value, "little") if size <= 8 else ctypes.addressof(keep[-1])
            packed += bytes(abi.IbUverbsAttr(number, size, abi.UVERBS_ATTR_F_MANDATORY, data=value))
        rooms = {number: room_for(size) for number, size in answers}
        for number, room in rooms.items():
            packed += bytes(abi.IbUverbsAttr(number, len(room), abi.UVERBS_ATTR_F_MANDATORY,
                                             data=ctypes.addressof(room)))
        head, each = ctypes.sizeof(abi.IbUverbsIoctlHdr), ctypes.sizeof(abi.IbUverbsAttr)
        header = abi.IbUverbsIoctlHdr(head + len(packed), what, method, len(packed) // each)
        request = bytearray(bytes(header) + packed)
        fcntl.ioctl(self.fd, abi.RDMA_VERBS_IOCTL, request)
        made = {number: abi.IbUverbsAttr.from_buffer(request, head + each * place).data
                for place, (number, value) in enumerate(attributes.items()) if value == 0}
        return {**made, **{number: room.raw for number, room in rooms.items()}}


def open_file(device):
    """Opens the file of a device."""
    name, = os.listdir(f"/sys/class/infiniband/{device}/device/infiniband_verbs")
    return os.open(f"/dev/infiniband/{name}", os.O_RDWR | os.O_CLOEXEC)


class Uverbs(Commands):
    """An open device with a context."""

    def __init__(self, device, room=8):
        """Opens a device by its name. The driver tells as much of struct virtio_rdma_uresp_alloc_ucontext as `room`
        bytes hold, which are 8 at least."""
        super().__init__(open_file(device))
        size = ctypes.sizeof(abi.IbUverbsGetContextResp)
        self.told = self.command(abi.IB_USER_VERBS_CMD_GET_CONTEXT, abi.IbUverbsGetContext(), answer=size + room)[size:]
        self.path = int.from_bytes(self.told[:4], "little")

    def alloc_pd(self):
        """Allocates a PD; returns its handle."""
        return self.ask(abi.IB_USER_VERBS_CMD_ALLOC_PD, abi.IbUverbsAllocPd(), abi.IbUverbsAllocPdResp).pd_handle

    def reg_mr(self, pd, start, length, access=ALL_ACCESS):
        """Registers memory; returns the handle, the lkey and the rkey of the MR."""
        request = abi.IbUverbsRegMr(start=start, length=length, hca_va=start, pd_handle=pd, access_flags=access)
        answer = self.ask(abi.IB_USER_VERBS_CMD_REG_MR, request, abi.IbUverbsRegMrResp)
        return answer.mr_handle, answer.lkey, answer.rkey

    def alloc_mw(self, pd, kind):
        """Allocates a memory window of a type; returns its handle and its key."""
        request = abi.IbUverbsAllocMw(pd_handle=pd, mw_type=kind)
        answer = self.ask(abi.IB_USER_VERBS_CMD_ALLOC_MW, request, abi.IbUverbsAllocMwResp)
        return answer.mw_handle, answer.rkey

    def dealloc_mw(self, window):
        """Deallocates a memory window."""
        self.command(abi.IB_USER_VERBS_CMD_DEALLOC_MW, abi.IbUverbsDeallocMw(window))

    def create_cq(self, cqe, driver, vector=0):
        """Creates a CQ; returns its handle and its size."""
        request = abi.IbUverbsCreateCq(cqe=cqe, comp_vector=vector, comp_channel=-1)
        answer = self.ask(abi.IB_USER_VERBS_CMD_CREATE_CQ, request, abi.IbUverbsCreateCqResp, driver)
        return answer.cq_handle, answer.cqe

    def resize_cq(self, cq, cqe, driver):
        """Gives a CQ another ring; returns its size, and how many CQEs moved."""
        size = ctypes.sizeof(abi.IbUverbsResizeCqResp)
        answer = self.command(abi.IB_USER_VERBS_CMD_RESIZE_CQ, abi.IbUverbsResizeCq(cq_handle=cq, cqe=cqe), driver,
                              size + ctypes.sizeof(abi.UrespResizeCq))
        return (abi.IbUverbsResizeCqResp.from_buffer_copy(answer).cqe,
                abi.UrespResizeCq.from_buffer_copy(answer, size).moved)

    def create_qp(self, pd, cq, driver, *, send_wr=8, recv_wr=8, sge=1, inline=0, kind=abi.QPT_RC, srq=None):
        """Creates a QP; returns its handle, its number, and its sizes: struct ib_uverbs_create_qp_resp."""
        request = abi.IbUverbsCreateQp(
            pd_handle=pd, send_cq_handle=cq, recv_cq_handle=cq, srq_handle=srq or 0, max_send_wr=send_wr,
            max_recv_wr=recv_wr, max_send_sge=sge, max_recv_sge=sge, max_inline_data=inline, qp_type=kind,
            is_srq=srq is not None)
        answer = self.ask(abi.IB_USER_VERBS_CMD_CREATE_QP, request, abi.IbUverbsCreateQpResp, driver)
        return answer.qp_handle, answer.qpn, answer

    def modify_qp(self, qp, state, mask, gid=bytes(16), gid_index=0, peer=0, mtu=3):
        """Moves a QP to a state, with the attributes of the mask."""
        path = abi.IbUverbsQpDest(tuple(gid), sgid_index=gid_index, hop_limit=64, is_global=1, port_num=1)
        self.command(abi.IB_USER_VERBS_CMD_MODIFY_QP, abi.IbUverbsModifyQp(
            path, qp_handle=qp, attr_mask=mask, dest_qp_num=peer, qp_access_flags=ALL_ACCESS, qp_state=state,
            path_mtu=mtu, max_rd_atomic=16, max_dest_rd_atomic=16, min_rnr_timer=1, port_num=1, timeout=14,
            retry_cnt=7, rnr_retry=7))

    def connect(self, qp, gid, gid_index, peer, mtu, kind=abi.QPT_RC):
        """Brings a QP from RESET to RTS."""
        to_rtr, to_rts = STEPS[kind]
        self.modify_qp(qp, abi.QPS_INIT, TO_INIT)
        self.modify_qp(qp, abi.QPS_RTR, to_rtr, gid, gid_index, peer, mtu)
        self.modify_qp(qp, abi.QPS_RTS, to_rts)

    def destroy_qp(self, qp):
        """Destroys a QP."""
        self.ask(abi.IB_USER_VERBS_CMD_DESTROY_QP, abi.IbUverbsDestroyQp(qp_handle=qp), abi.IbUverbsDestroyQpResp)

    def destroy_cq(self, cq):
        """Destroys a CQ."""
        self.ask(abi.IB_USER_VERBS_CMD_DESTROY_CQ, abi.IbUverbsDestroyCq(cq_handle=cq), abi.IbUverbsDestroyCqResp)

    def create_srq(self, pd, max_wr, max_sge, driver):
        """Creates an SRQ; returns its handle."""
        request = abi.IbUverbsCreateSrq(pd_handle=pd, max_wr=max_wr, max_sge=max_sge)
        return self.ask(abi.IB_USER_VERBS_CMD_CREATE_SRQ, request, abi.IbUverbsCreateSrqResp, driver).srq_handle

    def resize_srq(self, srq, max_wr, driver):
        """Gives an SRQ another ring."""
        request = abi.IbUverbsModifySrq(srq, SRQ_MAX_WR, max_wr)
        self.command(abi.IB_USER_VERBS_CMD_MODIFY_SRQ, request, driver)

    def open_xrcd(self):
        """Opens an XRC domain that no file names; returns its handle."""
        request = abi.IbUverbsOpenXrcd(fd=0xffffffff, oflags=os.O_CREAT)
        return self.ask(abi.IB_USER_VERBS_CMD_OPEN_XRCD, request, abi.IbUverbsOpenXrcdResp).xrcd_handle

    def close_xrcd(self, xrcd):
        """Closes an XRC domain."""
        self.command(abi.IB_USER_VERBS_CMD_CLOSE_XRCD, abi.IbUverbsCloseXrcd(xrcd))

    def create_xsrq(self, pd, xrcd, cq, max_wr, max_sge, driver):
        """Creates an SRQ for XRC; returns its handle and its number."""
        request = abi.IbUverbsCreateXsrq(srq_type=abi.IB_UVERBS_SRQT_XRC, pd_handle=pd, max_wr=max_wr, max_sge=max_sge,
                                         xrcd_handle=xrcd, cq_handle=cq)
        answer = self.ask(abi.IB_USER_VERBS_CMD_CREATE_XSRQ, request, abi.IbUverbsCreateSrqResp, driver)
        return answer.srq_handle, answer.srqn

    def destroy_srq(self, srq):
        """Destroys an SRQ."""
        self.ask(abi.IB_USER_VERBS_CMD_DESTROY_SRQ, abi.IbUverbsDestroySrq(srq_handle=srq), abi.IbUverbsDestroySrqResp)

    def poll_cq(self, cq):
        """Asks the kernel for a completion; returns how many there were."""
        size = ctypes.sizeof(abi.IbUverbsPollCqResp) + ctypes.sizeof(abi.IbUverbsWc)
        answer = self.command(abi.IB_USER_VERBS_CMD_POLL_CQ, abi.IbUverbsPollCq(cq_handle=cq, ne=1), answer=size)
        return abi.IbUverbsPollCqResp.from_buffer_copy(answer).count

    def post(self, command, queue, requests, sges=()):
        """Sends POST_SEND, POST_RECV or POST_SRQ_RECV for a QP or SRQ with requests, and the SGEs of all of them: the
        address, the length and the lkey of each. Without requests it rings the doorbell of a ring."""
        size = ctypes.sizeof(abi.IbUverbsSendWr if command == POST_SEND else abi.IbUverbsRecvWr)
        # The three commands have the same fields, but for the name of the queue's.
        request = abi.IbUverbsPostSend(qp_handle=queue, wr_count=len(requests), sge_count=len(sges), wqe_size=size)
        body = b"".join([*map(bytes, requests), *(bytes(abi.IbUverbsSge(*sge)) for sge in sges)])
        self.command(command, request, body, ctypes.sizeof(abi.IbUverbsPostSendResp))


def has_rings(device):
    """Returns whether programs own the rings of their QPs and CQs on this device."""
    verbs = Uverbs(device)
    verbs.close()
    return verbs.path != abi.UDATA_PATH_KERNEL
