#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Multicast for UD: delivery to each attached QP, Q_Keys, the GRH area,
limits and teardown."""

import contextlib
import ctypes
import errno
import socket
import struct

import abi
import ktap
from rc import (AH, CQ, MR, PD, PORT, QP, AHAttr, GlobalRoute, PyverbsError, PyverbsRDMAError, QPAttr,
                QPCap, QPInitAttr, SIGNALED, complete, e, empty, fails_with, open_device, pointer, post,
                recv_wr, send_wr, sge)
from pyverbs.addr import GID
from pyverbs.qp import QPInitAttrEx

DEVICE = open_device()
QKEY = 0x11112222
GRH = 40
V4 = "::ffff:239.1.2.3"
V6 = "ff0e::1234"


LIBIBVERBS = ctypes.CDLL("libibverbs.so.1")


def multicast(verb, qp, group):
    """Calls ibv_attach_mcast() or ibv_detach_mcast(), which pyverbs does not have."""
    # struct ibv_qp begins with six pointers; handle and number follow.
    address = pointer(qp, 56, lambda raw: struct.unpack("6QII", raw)[-1] == qp.qp_num)
    packed = socket.inet_pton(socket.AF_INET6, group)
    number = getattr(LIBIBVERBS, f"ibv_{verb}_mcast")(ctypes.c_void_p(address), packed, 0)
    if number:
        raise PyverbsRDMAError(f"ibv_{verb}_mcast", number)


def attach(qp, group):
    multicast("attach", qp, group)


def detach(qp, group):
    multicast("detach", qp, group)


def flagged(end, qp_type, create_flags):
    """Returns attributes of a QP that is created with flags."""
    mask = e.IBV_QP_INIT_ATTR_PD | (e.IBV_QP_INIT_ATTR_CREATE_FLAGS if create_flags else 0)
    cap = QPCap(max_send_wr=16, max_recv_wr=16, max_send_sge=2, max_recv_sge=2)
    return QPInitAttrEx(qp_type=qp_type, scq=end.send_cq, rcq=end.recv_cq, cap=cap, pd=end.pd,
                        create_flags=create_flags, comp_mask=mask)


class Ud:
    """A UD QP in RTS with a CQ for its sends and one for its receives."""

    def __init__(self, qkey=QKEY, create_flags=0):
        self.pd = PD(DEVICE.context)
        self.send_cq, self.recv_cq = CQ(DEVICE.context, 32), CQ(DEVICE.context, 32)
        init = flagged(self, e.IBV_QPT_UD, create_flags)
        self.qp = QP(DEVICE.context, init, self.attributes(qkey))
        self.mr = MR(self.pd, 8192, e.IBV_ACCESS_LOCAL_WRITE)
        self.groups = []

    @staticmethod
    def attributes(qkey):
        attr = QPAttr(port_num=PORT)
        attr.qkey = qkey
        return attr

    def attach(self, group):
        attach(self.qp, group)
        self.groups.append(group)

    def detach(self, group):
        detach(self.qp, group)
        self.groups.remove(group)

    def expect(self, wr_id=0):
        """Posts a receive into the upper half of the memory."""
        self.mr.write(bytes(4096), 4096, 4096)
        post(self.qp.post_recv, [recv_wr([sge(self.mr, 4096, 4096)], wr_id)])

    def cast(self, group, data, qkey=QKEY, qpn=abi.MCAST_QPN):
        """Sends to a group, and waits for the completion."""
        self.mr.write(data, len(data))
        digits = socket.inet_pton(socket.AF_INET6, group).hex()
        dgid = GID(":".join(digits[i:i + 4] for i in range(0, 32, 4)))
        route = GlobalRoute(dgid=dgid, sgid_index=DEVICE.gid.gid_index, hop_limit=5)
        address = AH(self.pd, attr=AHAttr(port_num=PORT, is_global=1, gr=route))
        wr = send_wr(e.IBV_WR_SEND, [sge(self.mr, 0, len(data))], flags=SIGNALED)
        wr.set_wr_ud(address, qpn, qkey)
        post(self.qp.post_send, [wr])
        complete(self.send_cq)
        address.close()

    def received(self, data):
        """Takes the only message, which must be there; returns its GRH area and its completion."""
        wc = complete(self.recv_cq)[0]
        ktap.equal((wc.byte_len, wc.wc_flags & e.IBV_WC_GRH != 0), (GRH + len(data), True), "receive")
        ktap.same_bytes(self.mr.read(len(data), 4096 + GRH), data, "payload")
        return self.mr.read(GRH, 4096), wc

    def close(self):
        for group in list(self.groups):
            self.detach(group)
        for thing in (self.qp, self.mr, self.send_cq, self.recv_cq, self.pd):
            thing.close()


def reaches(rng, sender, group, member):
    """Sends random bytes to a group, and fails the test unless the member receives them."""
    data = rng.randbytes(10)
    sender.cast(group, data)
    member.received(data)


@contextlib.contextmanager
def opened(*ends):
    """Gives these QPs to a test, and closes them at its end."""
    yield ends
    for end in ends:
        end.close()


def every_member(rng):
    """Each attached QP receives a copy, and so does the sender if it is attached; no other QP does."""
    for group in (V4, V6):
        with opened(Ud(), Ud(), Ud()) as (sender, member, stranger):
            for end in (sender, member):
                end.attach(group)
            for end in (sender, member, stranger):
                end.expect()
            data = rng.randbytes(1000)
            sender.cast(group, data)
            for end in (sender, member):
                header, wc = end.received(data)
                ktap.equal(wc.src_qp, sender.qp.qp_num, "src_qp")
                if group == V4:
                    ktap.equal((header[20] >> 4, header[28], header[36:]), (4, 5, bytes([239, 1, 2, 3])),
                               "IPv4 header")
                else:
                    ktap.equal((header[0] >> 4, header[7], header[24:26], header[38:]),
                               (6, 5, b"\xff\x0e", b"\x12\x34"), "IPv6 header")
            empty(stranger.recv_cq)


def loopback_is_blocked(rng):
    """A QP with the flag BLOCK_SELF_MCAST_LB does not receive what it sends to its own group."""
    DEVICE.skip_on_rxe("no creation flags")
    ends = [Ud(create_flags=e.IBV_QP_CREATE_BLOCK_SELF_MCAST_LB) for _ in range(2)]
    with opened(*ends) as (sender, member):
        for end in (sender, member):
            end.attach(V4)
            end.expect()
        reaches(rng, sender, V4, member)
        empty(sender.recv_cq)
        # The flag concerns a QP's own messages: it receives those of other senders.
        reaches(rng, member, V4, sender)
        empty(member.recv_cq)
        for number, qp_type, flags in ((errno.EINVAL, e.IBV_QPT_RC, e.IBV_QP_CREATE_BLOCK_SELF_MCAST_LB),
                                       (errno.EOPNOTSUPP, e.IBV_QPT_UD, e.IBV_QP_CREATE_SCATTER_FCS),
                                       (errno.EOPNOTSUPP, e.IBV_QPT_UD, 1 << 31)):
            fails_with(number, QP, DEVICE.context, flagged(sender, qp_type, flags))


def after_detach(rng):
    """A QP receives nothing after it is detached, and receives again after it is attached again."""
    with opened(Ud(), Ud()) as (sender, member):
        member.attach(V4)
        member.expect()
        member.detach(V4)
        sender.cast(V4, rng.randbytes(10))
        empty(member.recv_cq)
        member.attach(V4)
        reaches(rng, sender, V4, member)


def wrong_qkey(rng):
    """A member with another Q_Key receives nothing."""
    with opened(Ud(), Ud(), Ud(qkey=QKEY + 1)) as (sender, member, other):
        for end in (member, other):
            end.attach(V4)
            end.expect()
        reaches(rng, sender, V4, member)
        empty(other.recv_cq)


def no_receive(rng):
    """A member without a posted receive does not stop the other members from receiving."""
    with opened(Ud(), Ud(), Ud()) as (sender, empty_handed, member):
        for end in (empty_handed, member):
            end.attach(V6)
        member.expect()
        reaches(rng, sender, V6, member)
        empty(empty_handed.recv_cq)


def only_to_all_qps(rng):
    """A datagram to a group names QP 0xffffff; no QP receives one that names another number."""
    with opened(Ud(), Ud()) as (sender, member):
        member.attach(V4)
        member.expect()
        sender.cast(V4, rng.randbytes(10), qpn=member.qp.qp_num)
        empty(member.recv_cq)


def bad_arguments(_rng):
    """Invalid arguments are refused with the errors of ib_core and rxe."""
    end = Ud()
    fails_with(errno.EINVAL, attach, end.qp, "fe80::1")
    fails_with(errno.EINVAL, attach, end.qp, "::ffff:10.0.0.1")
    fails_with(errno.EINVAL, detach, end.qp, V4)
    end.attach(V4)
    fails_with(errno.EINVAL, detach, end.qp, V6)
    # A second call is no error, and makes no second attachment.
    attach(end.qp, V4)
    end.close()
    pd, cq = PD(DEVICE.context), CQ(DEVICE.context, 8)
    cap = QPCap(max_send_wr=1, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
    for kind in (e.IBV_QPT_RC, e.IBV_QPT_UC):
        qp = QP(pd, QPInitAttr(qp_type=kind, scq=cq, rcq=cq, cap=cap))
        fails_with(errno.EINVAL, attach, qp, V4)
        qp.close()
    cq.close()
    pd.close()


def destroyed_while_attached(_rng):
    """A QP that is attached cannot be destroyed."""
    end = Ud()
    end.attach(V4)
    try:
        end.qp.close()
    except PyverbsError as error:
        if isinstance(error, PyverbsRDMAError):
            ktap.equal(errno.errorcode.get(error.error_code), "EBUSY", "error")
    else:
        raise AssertionError("an attached QP was destroyed")
    end.close()


def attachment_limit(_rng):
    """A group takes as many QPs as the device says; one more fails with ENOMEM until another one is detached."""
    limit = DEVICE.attr.max_mcast_qp_attach
    if not 1 <= limit <= 256 or DEVICE.attr.max_qp < limit + 8:
        raise ktap.Skip(f"{limit} QPs a group, {DEVICE.attr.max_qp} QPs")
    pd, cq = PD(DEVICE.context), CQ(DEVICE.context, 8)
    cap = QPCap(max_send_wr=1, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
    qps = [QP(pd, QPInitAttr(qp_type=e.IBV_QPT_UD, scq=cq, rcq=cq, cap=cap), Ud.attributes(QKEY))
           for _ in range(limit + 1)]
    for qp in qps[:limit]:
        attach(qp, V6)
    fails_with(errno.ENOMEM, attach, qps[limit], V6)
    detach(qps[0], V6)
    attach(qps[limit], V6)
    for qp in qps[1:]:
        detach(qp, V6)
    for thing in (*qps, cq, pd):
        thing.close()


def without(_rng):
    """A device without multicast says so."""
    end = Ud()
    for group in (V4, V6):
        fails_with(errno.EOPNOTSUPP, attach, end.qp, group)
    flags = e.IBV_QP_CREATE_BLOCK_SELF_MCAST_LB
    fails_with(errno.EOPNOTSUPP, QP, DEVICE.context, flagged(end, e.IBV_QPT_UD, flags))
    end.close()


if __name__ == "__main__":
    if DEVICE.attr.max_mcast_grp:
        ktap.run([every_member, loopback_is_blocked, after_detach, wrong_qkey, no_receive, only_to_all_qps,
                  bad_arguments, destroyed_while_attached, attachment_limit])
    else:
        ktap.run([without])
