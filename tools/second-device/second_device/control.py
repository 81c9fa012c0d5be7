# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The commands of the control queue."""

import ctypes
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from .completion_queues import create_ring_cq, destroy_cq
from .layout import abi
from .memory_regions import create_pd, dereg_mr, destroy_pd, get_dma_mr, reg_user_mr
from .port import add_gid, del_gid, query_pkey, query_port
from .queue_pairs import create_ring_qp, destroy_qp, modify_qp, query_qp
from .refused import Refused

if TYPE_CHECKING:
    from .device import Device


class Command(NamedTuple):
    """What a command takes and gives, and what does it."""

    request: type[ctypes.LittleEndianStructure] | None
    reply: type[ctypes.LittleEndianStructure] | None
    carry_out: Callable[["Device", Any], Any]


def execute(device: "Device", data: bytes, room: int) -> bytes:
    """Carries out a command, and returns the status and the reply."""
    try:
        return bytes([abi.STATUS_OK]) + bytes(_carry_out(device, data, room) or b"")
    except Refused as refused:
        return bytes([refused.status])
    except Exception:  # A defect of this program: the guest gets ERR, and the log says where it is.
        traceback.print_exc(file=sys.stderr)
        return bytes([abi.STATUS_ERR])


def _carry_out(device: "Device", data: bytes, room: int) -> Any:
    if not data:
        raise Refused(abi.STATUS_LENGTH)
    if data[0] not in COMMANDS or not device.agreed(abi.F_RINGS) and data[0] in NEEDS_RINGS:
        raise Refused(abi.STATUS_UNSUPPORTED)
    command = COMMANDS[data[0]]
    size = ctypes.sizeof(command.request) if command.request else 0
    if len(data) - 1 < size or room - 1 < (ctypes.sizeof(command.reply) if command.reply else 0):
        raise Refused(abi.STATUS_LENGTH)
    request = command.request.from_buffer_copy(data, 1) if command.request else None
    return command.carry_out(device, request)


COMMANDS = {
    abi.CMD_QUERY_PORT: Command(abi.CmdQueryPort, abi.RspQueryPort, query_port),
    abi.CMD_DESTROY_CQ: Command(abi.CmdDestroyCq, None, destroy_cq),
    abi.CMD_CREATE_PD: Command(None, abi.RspCreatePd, create_pd),
    abi.CMD_DESTROY_PD: Command(abi.CmdDestroyPd, None, destroy_pd),
    abi.CMD_GET_DMA_MR: Command(abi.CmdGetDmaMr, abi.RspMr, get_dma_mr),
    abi.CMD_REG_USER_MR: Command(abi.CmdRegUserMr, abi.RspMr, reg_user_mr),
    abi.CMD_DEREG_MR: Command(abi.CmdDeregMr, None, dereg_mr),
    abi.CMD_MODIFY_QP: Command(abi.CmdModifyQp, None, modify_qp),
    abi.CMD_QUERY_QP: Command(abi.CmdQueryQp, abi.RspQueryQp, query_qp),
    abi.CMD_DESTROY_QP: Command(abi.CmdDestroyQp, None, destroy_qp),
    abi.CMD_QUERY_PKEY: Command(abi.CmdQueryPkey, abi.RspQueryPkey, query_pkey),
    abi.CMD_ADD_GID: Command(abi.CmdAddGid, None, add_gid),
    abi.CMD_DEL_GID: Command(abi.CmdDelGid, None, del_gid),
    abi.CMD_CREATE_RING_CQ: Command(abi.CmdCreateRingCq, abi.RspCreateCq, create_ring_cq),
    abi.CMD_CREATE_RING_QP: Command(abi.CmdCreateRingQp, abi.RspCreateQp, create_ring_qp),
}
NEEDS_RINGS = (abi.CMD_CREATE_RING_CQ, abi.CMD_CREATE_RING_QP)
MAX_REQUEST = 1 + max(ctypes.sizeof(command.request) for command in COMMANDS.values() if command.request)
