#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""The state machine of a QP (IBA 10.3, and the attributes of 11.2.5.2): each
transition takes what it must and what it may, and nothing else; each pair of
states without a transition is refused, and a refused MODIFY changes nothing."""

import errno
import time

import abi
import ktap
from rc import ALL_ACCESS, PORT, Endpoint, PyverbsError, QPAttr, e, fails_with, open_device

DEVICE = open_device()
STATE, CUR, NOTIFY, ACCESS = e.IBV_QP_STATE, e.IBV_QP_CUR_STATE, e.IBV_QP_EN_SQD_ASYNC_NOTIFY, e.IBV_QP_ACCESS_FLAGS
PKEY, PORTNUM, QKEY, AV = e.IBV_QP_PKEY_INDEX, e.IBV_QP_PORT, e.IBV_QP_QKEY, e.IBV_QP_AV
MTU, TIMEOUT, RETRY, RNR_RETRY = e.IBV_QP_PATH_MTU, e.IBV_QP_TIMEOUT, e.IBV_QP_RETRY_CNT, e.IBV_QP_RNR_RETRY
RQ_PSN, RD, RNR_TIMER = e.IBV_QP_RQ_PSN, e.IBV_QP_MAX_QP_RD_ATOMIC, e.IBV_QP_MIN_RNR_TIMER
SQ_PSN, DEST_RD, DEST = e.IBV_QP_SQ_PSN, e.IBV_QP_MAX_DEST_RD_ATOMIC, e.IBV_QP_DEST_QPN
# All attributes but CUR, which says what the state is, and alternate paths, which RoCE does not have.
ALL = (NOTIFY, ACCESS, PKEY, PORTNUM, QKEY, AV, MTU, TIMEOUT, RETRY, RNR_RETRY, RQ_PSN, RD, RNR_TIMER, SQ_PSN,
       DEST_RD, DEST)
RESET, INIT, RTR, RTS = e.IBV_QPS_RESET, e.IBV_QPS_INIT, e.IBV_QPS_RTR, e.IBV_QPS_RTS
SQD, ERR = e.IBV_QPS_SQD, e.IBV_QPS_ERR
STATES = (RESET, INIT, RTR, RTS, SQD, ERR)
FLUSH = abi.ACCESS_FLUSH_GLOBAL | abi.ACCESS_FLUSH_PERSISTENT
RC, UC, UD = e.IBV_QPT_RC, e.IBV_QPT_UC, e.IBV_QPT_UD

# (from, to): for each type the attributes that must be set, and those that may be set.
TABLE = {
    (RESET, INIT): {RC: (PKEY | PORTNUM | ACCESS, 0), UC: (PKEY | PORTNUM | ACCESS, 0),
                    UD: (PKEY | PORTNUM | QKEY, 0)},
    (INIT, INIT): {RC: (0, PKEY | PORTNUM | ACCESS), UC: (0, PKEY | PORTNUM | ACCESS),
                   UD: (0, PKEY | PORTNUM | QKEY)},
    (INIT, RTR): {RC: (AV | MTU | DEST | RQ_PSN | DEST_RD | RNR_TIMER, ACCESS | PKEY),
                  UC: (AV | MTU | DEST | RQ_PSN, ACCESS | PKEY), UD: (0, PKEY | QKEY)},
    (RTR, RTS): {RC: (TIMEOUT | RETRY | RNR_RETRY | SQ_PSN | RD, ACCESS | RNR_TIMER),
                 UC: (SQ_PSN, ACCESS), UD: (SQ_PSN, QKEY)},
    (RTS, RTS): {RC: (0, ACCESS | RNR_TIMER), UC: (0, ACCESS), UD: (0, QKEY)},
    (RTS, SQD): {RC: (0, NOTIFY), UC: (0, NOTIFY), UD: (0, NOTIFY)},
    (SQD, RTS): {RC: (0, ACCESS | RNR_TIMER), UC: (0, ACCESS), UD: (0, QKEY)},
    (SQD, SQD): {RC: (0, PORTNUM | AV | TIMEOUT | RETRY | RNR_RETRY | RD | DEST_RD | ACCESS | PKEY | RNR_TIMER),
                 # With AV, which UC may change, uverbs changes PORT too, which UC may not.
                 UC: (0, ACCESS | PKEY), UD: (0, PKEY | QKEY)},
}
for start in STATES:
    TABLE[start, RESET] = {kind: (0, 0) for kind in (RC, UC, UD)}
    if start != RESET:
        TABLE[start, ERR] = {kind: (0, 0) for kind in (RC, UC, UD)}
WAY = {INIT: (RESET,), RTR: (RESET, INIT), RTS: (RESET, INIT, RTR), SQD: (RESET, INIT, RTR, RTS),
       ERR: (RESET, INIT), RESET: ()}


def values(end):
    """Returns attributes that all have a valid value."""
    attr = end.attributes(end.qp.qp_num, qkey=0x1111)
    attr.pkey_index = 0
    attr.port_num = PORT
    attr.qp_access_flags = ALL_ACCESS
    return attr


def modify(end, state, mask):
    attr = values(end)
    attr.qp_state = state
    end.qp.modify(attr, mask)


def go(end, kind, state):
    """Brings a QP from any state to this one."""
    modify(end, RESET, STATE)
    steps = WAY[state] + (state,)
    for start, to in zip(steps, steps[1:]):
        modify(end, to, STATE | TABLE[start, to][kind][0])


def bits(mask):
    return [bit for bit in ALL if mask & bit]


def check(kind):
    end = Endpoint(DEVICE, depth=4, qp_type=kind)
    for start in STATES:
        for to in STATES:
            row = TABLE.get((start, to), {}).get(kind)
            go(end, kind, start)
            if row is None:
                refused(end, start, to, STATE)
                continue
            must, may = row
            for bit in bits(must):
                refused(end, start, to, STATE | must & ~bit)
            for bit in ALL:
                if not bit & (must | may):
                    refused(end, start, to, STATE | must | bit)
            for allowed in (0, *bits(may), may):
                accepted(end, start, to, STATE | must | allowed)
                ktap.equal(end.state(), to, f"state after {start} to {to}, {allowed:#x}")
                go(end, kind, start)
    end.close()


def accepted(end, start, to, mask):
    try:
        modify(end, to, mask)
    except PyverbsError as error:
        raise AssertionError(f"{start} to {to} with {mask:#x}: {error}") from error


def refused(end, start, to, mask):
    try:
        fails_with(errno.EINVAL, modify, end, to, mask)
    except AssertionError as error:
        raise AssertionError(f"{start} to {to} with {mask:#x}: {error}") from error
    ktap.equal(end.state(), start, f"state after a refused {start} to {to}, {mask:#x}")


def rc(_rng):
    check(RC)


def uc(_rng):
    check(UC)


def ud(_rng):
    check(UD)


def wrong_current_state(_rng):
    """CUR_STATE must be what the QP is in."""
    end = Endpoint(DEVICE, depth=4)
    go(end, RC, RTS)
    attr = QPAttr()
    attr.qp_state, attr.cur_qp_state = RTS, RTS
    end.qp.modify(attr, STATE | CUR)
    attr.cur_qp_state = SQD
    try:
        end.qp.modify(attr, STATE | CUR)
    except PyverbsError as error:
        ktap.equal(end.state(), RTS, f"state after {error}")
    else:
        raise AssertionError("a wrong current state was taken")
    end.close()


def commands():
    """Returns how many commands the driver has sent."""
    # The RDMA core keeps the values of counters for 10 ms, from one read to the next.
    time.sleep(0.02)
    with open(f"/sys/class/infiniband/{DEVICE.name}/ports/{PORT}/hw_counters/commands", encoding="ascii") as file:
        return int(file.read())


def init_goes_with_rtr(_rng):
    """With VIRTIO_RDMA_F_RESET_TO_RTR, INIT takes no command, with the rights that the connection manager asks for and
    once more without the state, until RTR takes both, or something else needs it. Without, each change takes one."""
    DEVICE.skip_on_rxe("rxe has no commands")
    has_feature = DEVICE.has_feature(abi.F_RESET_TO_RTR)
    end = Endpoint(DEVICE, depth=4)
    attr = values(end)
    before = commands()

    def change(state, mask, sent, sent_without):
        attr.qp_state = state
        end.qp.modify(attr, mask)
        expected = sent if has_feature else sent_without
        ktap.equal(commands() - before, expected, f"commands up to state {state} with {mask:#x}")

    attr.qp_access_flags = FLUSH
    change(INIT, STATE | PKEY | PORTNUM | ACCESS, 0, 1)
    attr.qp_access_flags = ALL_ACCESS | FLUSH
    change(ERR, ACCESS, 0, 2)
    must, _ = TABLE[INIT, RTR][RC]
    change(RTR, STATE | must, 1, 3)
    change(RESET, STATE, 2, 4)
    change(INIT, STATE | PKEY | PORTNUM | ACCESS, 2, 5)
    ktap.equal(end.state(), INIT, "state")
    change(ERR, STATE, 5, 7)
    end.close()


ktap.run([rc, uc, ud, wrong_current_state, init_goes_with_rtr])
