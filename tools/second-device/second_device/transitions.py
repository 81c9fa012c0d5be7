# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Which transitions MODIFY_QP may do, with which attributes and values (D-QP-40, D-QP-60)."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .layout import abi
from .refused import Refused

if TYPE_CHECKING:
    from .device import Device

RESET, INIT, RTR, RTS, SQD, SQE, ERR = range(7)
RC, DATAGRAM = "RC", "UD and GSI"
STATE, CUR_STATE, NOTIFY, ACCESS, PKEY, PORT, QKEY, AV, MTU, TIMEOUT, RETRY, RNR_RETRY, RQ_PSN, INIT_DEPTH, \
    MIN_RNR, SQ_PSN, DEST_DEPTH, MIG_STATE, DEST_QPN = (
        abi.QP_STATE, abi.QP_CUR_STATE, abi.QP_EN_SQD_ASYNC_NOTIFY, abi.QP_ACCESS_FLAGS, abi.QP_PKEY_INDEX, abi.QP_PORT,
        abi.QP_QKEY, abi.QP_AV, abi.QP_PATH_MTU, abi.QP_TIMEOUT, abi.QP_RETRY_CNT, abi.QP_RNR_RETRY, abi.QP_RQ_PSN,
        abi.QP_MAX_QP_RD_ATOMIC, abi.QP_MIN_RNR_TIMER, abi.QP_SQ_PSN, abi.QP_MAX_DEST_RD_ATOMIC, abi.QP_PATH_MIG_STATE,
        abi.QP_DEST_QPN)

RTS_RC, RTS_DATAGRAM = CUR_STATE | ACCESS | MIN_RNR | MIG_STATE, CUR_STATE | QKEY

# (from, to, type): (needs, may have)
TABLE: dict[tuple[int, int, str], tuple[int, int]] = {
    (RESET, INIT, RC): (PKEY | PORT | ACCESS, 0),
    (RESET, INIT, "UD"): (PKEY | PORT | QKEY, 0),
    (RESET, INIT, "GSI"): (PKEY | QKEY, 0),
    (INIT, INIT, RC): (0, PKEY | PORT | ACCESS),
    (INIT, INIT, "UD"): (0, PKEY | PORT | QKEY),
    (INIT, INIT, "GSI"): (0, PKEY | QKEY),
    (INIT, RTR, RC): (AV | MTU | DEST_QPN | RQ_PSN | DEST_DEPTH | MIN_RNR, ACCESS | PKEY),
    (INIT, RTR, DATAGRAM): (0, PKEY | QKEY),
    (RTR, RTS, RC): (TIMEOUT | RETRY | RNR_RETRY | SQ_PSN | INIT_DEPTH, RTS_RC),
    (RTR, RTS, DATAGRAM): (SQ_PSN, RTS_DATAGRAM),
    (RTS, RTS, RC): (0, RTS_RC),
    (RTS, RTS, DATAGRAM): (0, RTS_DATAGRAM),
    (SQD, RTS, RC): (0, RTS_RC),
    (SQD, RTS, DATAGRAM): (0, RTS_DATAGRAM),
    (RTS, SQD, RC): (0, NOTIFY),
    (RTS, SQD, DATAGRAM): (0, NOTIFY),
    (SQD, SQD, RC): (0, PORT | AV | TIMEOUT | ACCESS | PKEY | MIG_STATE | RETRY | RNR_RETRY | INIT_DEPTH | DEST_DEPTH
                     | MIN_RNR),
    (SQD, SQD, DATAGRAM): (0, PKEY | QKEY),
    (SQE, RTS, DATAGRAM): (0, CUR_STATE | QKEY),
}
TYPES = {abi.QPT_RC: (RC,), abi.QPT_UD: ("UD", DATAGRAM), abi.QPT_GSI: ("GSI", DATAGRAM)}

QP_ACCESS = (abi.ACCESS_REMOTE_WRITE | abi.ACCESS_REMOTE_READ | abi.ACCESS_REMOTE_ATOMIC | abi.ACCESS_LOCAL_WRITE
             | abi.ACCESS_MW_BIND | abi.ACCESS_HUGETLB | abi.ACCESS_RELAXED_ORDERING)

# Attributes that MODIFY_QP sets, and their fields.
FIELDS = {ACCESS: "qp_access_flags", PKEY: "pkey_index", PORT: "port_num", QKEY: "qkey", AV: "ah_attr",
          MTU: "path_mtu", TIMEOUT: "timeout", RETRY: "retry_cnt", RNR_RETRY: "rnr_retry", RQ_PSN: "rq_psn",
          INIT_DEPTH: "max_rd_atomic", MIN_RNR: "min_rnr_timer", SQ_PSN: "sq_psn", DEST_DEPTH: "max_dest_rd_atomic",
          MIG_STATE: "path_mig_state", DEST_QPN: "dest_qp_num"}


def _valid_av(device: "Device", attr: Any) -> bool:
    av = attr.ah_attr
    return bool(av.ah_flags & abi.AH_GRH and av.port_num == abi.PORT and av.grh.sgid_index < len(device.gids)
                and device.gids[av.grh.sgid_index])


# Which values are valid, where not each value is.
VALID: dict[int, Callable[["Device", Any], bool]] = {
    STATE: lambda _, attr: attr.qp_state <= ERR,
    CUR_STATE: lambda _, attr: attr.cur_qp_state <= ERR,
    ACCESS: lambda _, attr: not attr.qp_access_flags & ~QP_ACCESS,
    PKEY: lambda _, attr: attr.pkey_index == 0,
    PORT: lambda _, attr: attr.port_num == abi.PORT,
    AV: _valid_av,
    MTU: lambda _, attr: 1 <= attr.path_mtu <= 5,
    TIMEOUT: lambda _, attr: attr.timeout <= 31,
    RETRY: lambda _, attr: attr.retry_cnt <= 7,
    RNR_RETRY: lambda _, attr: attr.rnr_retry <= 7,
    INIT_DEPTH: lambda device, attr: attr.max_rd_atomic <= device.config.max_qp_init_rd_atom,
    MIN_RNR: lambda _, attr: attr.min_rnr_timer <= 31,
    DEST_DEPTH: lambda device, attr: attr.max_dest_rd_atomic <= device.config.max_qp_rd_atom,
    MIG_STATE: lambda _, attr: attr.path_mig_state == 0,
    DEST_QPN: lambda _, attr: attr.dest_qp_num <= 0xffffff,
}


def find(before: int, after: int, qp_type: int) -> tuple[int, int] | None:
    """Returns the row of a transition: the attributes that it needs, and those that it may have."""
    if after == RESET or after == ERR and before != RESET:
        return 0, 0
    return next((TABLE[before, after, name] for name in TYPES[qp_type] if (before, after, name) in TABLE), None)


def check(device: "Device", before: int, qp_type: int, mask: int, attr: Any) -> int:
    """Checks a MODIFY_QP, and returns the state to which it leads."""
    if any(mask & bit and not valid(device, attr) for bit, valid in VALID.items()):
        raise Refused(abi.STATUS_INVAL)
    after = attr.qp_state if mask & STATE else before
    row = find(before, after, qp_type)
    if row is None or mask & CUR_STATE and (attr.cur_qp_state != before or before in (RESET, INIT, ERR)):
        raise Refused(abi.STATUS_STATE)
    needs, may_have = row
    if mask & ~(STATE | needs | may_have) or needs & ~mask:
        raise Refused(abi.STATUS_INVAL)
    return after
