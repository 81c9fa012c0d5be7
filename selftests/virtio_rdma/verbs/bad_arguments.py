#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Invalid arguments of each verb, which are refused with the error numbers of
ib_core, mlx5 and rxe. libibverbs' log says why the provider refuses them."""

import ctypes
import errno
import os
import tempfile

# libibverbs looks at these once, when it looks for devices.
LOG = tempfile.NamedTemporaryFile(mode="r", prefix="verbs_log")  # pylint: disable=consider-using-with
os.environ.update(VERBS_LOG_LEVEL="4", VERBS_LOG_FILE=LOG.name)

from pyverbs.addr import GID  # noqa: E402

import ktap  # noqa: E402
from rc import (AH, ALL_ACCESS, CQ, MR, PD, PORT, QP, SGE, AHAttr, Endpoint, GlobalRoute, PyverbsError,
                QPCap, QPInitAttr, e, open_device, sge)

DEVICE = open_device()
CONTEXT, LIMITS = DEVICE.context, DEVICE.attr


def fails(number, what, function, *args, **options):
    """Fails the test unless the call fails with one of these errors. Constructors of pyverbs give
    the error in words."""
    numbers = number if isinstance(number, tuple) else (number,)
    try:
        function(*args, **options)
    except PyverbsError as error:
        text = str(error)
        if getattr(error, "error_code", None) in numbers or any(os.strerror(n) in text for n in numbers):
            return
        raise AssertionError(f"{what}: {error}, expected {[errno.errorcode[n] for n in numbers]}") from error
    raise AssertionError(f"{what}: accepted")


def said():
    """Returns the lines of the log since the last call."""
    ctypes.CDLL(None).fflush(None)
    return LOG.read().splitlines()


def create_cq(_rng):
    fails(errno.EINVAL, "no entry", CQ, CONTEXT, 0)
    # A number with which memory for the ring would not be there, if the library looked at the number only then.
    for cqe in (LIMITS.max_cqe + 1, 1 << 24, (1 << 31) - 1):
        fails(errno.EINVAL, f"{cqe} CQEs", CQ, CONTEXT, cqe)
    fails(errno.EINVAL, "no such vector", CQ, CONTEXT, 8, None, None, CONTEXT.num_comp_vectors)


def reg_mr(_rng):
    pd = PD(CONTEXT)
    for what, access in (("REMOTE_WRITE alone", e.IBV_ACCESS_REMOTE_WRITE),
                         ("REMOTE_ATOMIC alone", e.IBV_ACCESS_REMOTE_ATOMIC)):
        fails(errno.EINVAL, what, MR, pd, 64, access)
    fails((errno.EFAULT, errno.EINVAL, errno.ENOMEM), "no memory there", MR, pd, 4096, ALL_ACCESS, address=0x1000)
    fails((errno.EINVAL, errno.ENOMEM), "around the end", MR, pd, 4096, ALL_ACCESS, address=(1 << 64) - 2048)
    pd.close()


def create_qp(_rng):
    pd, cq = PD(CONTEXT), CQ(CONTEXT, 8)

    def qp(kind=e.IBV_QPT_RC, **cap):
        sizes = {"max_send_wr": 1, "max_recv_wr": 1, "max_send_sge": 1, "max_recv_sge": 1, **cap}
        return QP(pd, QPInitAttr(qp_type=kind, scq=cq, rcq=cq, cap=QPCap(**sizes)))

    for name, limit in (("max_send_wr", LIMITS.max_qp_wr), ("max_recv_wr", LIMITS.max_qp_wr),
                        ("max_send_sge", LIMITS.max_sge), ("max_recv_sge", LIMITS.max_sge),
                        ("max_inline_data", 1 << 16)):
        for number in (limit + 1, 1 << 24, (1 << 32) - 1):
            fails(errno.EINVAL, f"{name} {number}", qp, **{name: number})
    fails((errno.EOPNOTSUPP, errno.EINVAL), "raw packets", qp, e.IBV_QPT_RAW_PACKET)
    fails((errno.EOPNOTSUPP, errno.EINVAL), "a driver's type", qp, e.IBV_QPT_DRIVER)
    for kind in (e.IBV_QPT_RC, e.IBV_QPT_UC, e.IBV_QPT_UD):
        qp(kind).close()
    cq.close()
    pd.close()


def create_ah(_rng):
    pd = PD(CONTEXT)
    gid = CONTEXT.query_gid(PORT, DEVICE.gid.gid_index)

    def ah(port=PORT, is_global=1, index=DEVICE.gid.gid_index):
        route = GlobalRoute(dgid=gid, sgid_index=index, hop_limit=1)
        return AH(pd, attr=AHAttr(port_num=port, is_global=is_global, gr=route))

    fails(errno.EINVAL, "no such port", ah, port=2)
    fails(errno.EINVAL, "port 0", ah, port=0)
    fails(errno.EINVAL, "no GRH", ah, is_global=0)
    fails(errno.ENODATA, "no such GID", ah, index=DEVICE.port.gid_tbl_len - 1)
    ah().close()
    pd.close()


def refuses(end, before, after, mask, attributes):
    """Fails the test unless each attribute (name, value) is refused, and the QP stays in the state before."""
    for name, value in attributes:
        wrong = end.attributes(end.qp.qp_num, **{name: value})
        wrong.qp_state = after
        fails(errno.EINVAL, name, end.qp.modify, wrong, mask)
        ktap.equal(end.state(), before, name)


def modify_qp(_rng):
    end = Endpoint(DEVICE, depth=4)
    to_init = e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS
    attr = end.attributes(end.qp.qp_num)
    attr.qp_state = e.IBV_QPS_INIT
    refuses(end, e.IBV_QPS_RESET, e.IBV_QPS_INIT, to_init,
            (("port_num", 0), ("port_num", 2), ("pkey_index", DEVICE.port.pkey_tbl_len)))
    fails(errno.EINVAL, "no such state", end.move, 9)
    end.qp.modify(attr, to_init)
    rtr = (e.IBV_QP_STATE | e.IBV_QP_AV | e.IBV_QP_PATH_MTU | e.IBV_QP_DEST_QPN | e.IBV_QP_RQ_PSN |
           e.IBV_QP_MAX_DEST_RD_ATOMIC | e.IBV_QP_MIN_RNR_TIMER)
    refuses(end, e.IBV_QPS_INIT, e.IBV_QPS_RTR, rtr,
            (("path_mtu", 0), ("path_mtu", 6), ("min_rnr_timer", 32),
             ("max_dest_rd_atomic", min(255, LIMITS.max_qp_rd_atom + 1))))
    attr.qp_state = e.IBV_QPS_RTR
    end.qp.modify(attr, rtr)
    rts = (e.IBV_QP_STATE | e.IBV_QP_TIMEOUT | e.IBV_QP_RETRY_CNT | e.IBV_QP_RNR_RETRY | e.IBV_QP_SQ_PSN |
           e.IBV_QP_MAX_QP_RD_ATOMIC)
    refuses(end, e.IBV_QPS_RTR, e.IBV_QPS_RTS, rts,
            (("timeout", 32), ("retry_cnt", 8), ("rnr_retry", 8),
             ("max_rd_atomic", min(255, LIMITS.max_qp_init_rd_atom + 1))))
    end.close()


def post(_rng):
    end = Endpoint(DEVICE, depth=4)
    end.connect(end.qp.qp_num)
    region = end.memory(1024)
    more = end.init_attr.cap.max_send_sge + 1
    fails(errno.EINVAL, "too many SGEs", end.post_send, e.IBV_WR_SEND, [SGE(region.buf, 1, region.lkey)] * more)
    fails(errno.EINVAL, "an unknown opcode", end.post_send, 77, [sge(region)])
    inline = end.init_attr.cap.max_inline_data + 1
    fails(errno.EINVAL, "inline beyond the limit", end.post_send, e.IBV_WR_SEND, [sge(region, 0, inline)],
          flags=e.IBV_SEND_SIGNALED | e.IBV_SEND_INLINE)
    for count in range(end.init_attr.cap.max_recv_wr):
        end.post_recv([sge(region)], count)
    fails(errno.ENOMEM, "a full receive queue", end.post_recv, [sge(region)])
    end.close()


def log(_rng):
    if DEVICE.is_rxe:
        raise ktap.Skip("the provider of rxe says nothing")
    end = Endpoint(DEVICE, depth=4)
    end.connect(end.qp.qp_num)
    region = end.memory(64)
    most = end.init_attr.cap.max_send_sge
    said()
    fails(errno.EINVAL, "too many SGEs", end.post_send, e.IBV_WR_SEND, [SGE(region.buf, 1, region.lkey)] * (most + 1))
    ktap.equal(said(), [f"{DEVICE.name}: send queue of QP {end.qp.qp_num}: a work request has {most + 1} SGEs, "
                        f"and the most is {most}"], "the log")
    most = end.init_attr.cap.max_recv_sge
    fails(errno.EINVAL, "too many SGEs", end.post_recv, [SGE(region.buf, 1, region.lkey)] * (most + 1))
    ktap.equal(said(), [f"{DEVICE.name}: receive queue of QP {end.qp.qp_num}: a work request has {most + 1} SGEs, "
                        f"and the most is {most}"], "the log")
    # What is posted is not worth a line.
    end.post_recv([sge(region)])
    ktap.equal(said(), [], "the log")
    end.close()


def address_of_nobody(_rng):
    """No datagram is sent, and no QP is connected, to an address for which the network has no MAC address."""
    if DEVICE.is_rxe:
        raise ktap.Skip("this is about what the driver tells its device")
    index = DEVICE.gid.gid_index
    own = CONTEXT.query_gid(PORT, index).gid
    # Another address of the same network.
    nobody = own[:-2] + f"{int(own[-2:], 16) ^ 0x40:02x}"
    numbers = (errno.ENODATA, errno.ETIMEDOUT, errno.EHOSTUNREACH)
    pd = PD(CONTEXT)
    route = GlobalRoute(dgid=GID(nobody), sgid_index=index, hop_limit=64)
    fails(numbers, nobody, AH, pd, attr=AHAttr(port_num=PORT, is_global=1, gr=route))
    end = Endpoint(DEVICE)
    fails(numbers, nobody, end.connect, end.qp.qp_num, ah_attr=AHAttr(port_num=PORT, is_global=1, gr=route))
    ktap.equal(end.state(), e.IBV_QPS_INIT, "state")
    end.close()
    pd.close()


ktap.run([create_cq, reg_mr, create_qp, create_ah, modify_qp, post, log, address_of_nobody])
