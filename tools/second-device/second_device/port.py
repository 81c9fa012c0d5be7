# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""The port: its attributes, its GIDs, and its one P_Key."""

from typing import TYPE_CHECKING, Any

from .layout import abi
from .refused import Refused

if TYPE_CHECKING:
    from .device import Device

MTU = 5  # 4096 bytes
MAX_MESSAGE = 1 << 26


def mtu_bytes(mtu: int) -> int:
    """Returns the bytes of an MTU."""
    return 128 << mtu


def query_port(device: "Device", request: Any) -> Any:
    """QUERY_PORT"""
    if request.port != abi.PORT:
        raise Refused(abi.STATUS_INVAL)
    return abi.RspQueryPort(state=4, max_mtu=MTU, active_mtu=MTU, phys_mtu=mtu_bytes(MTU), gid_tbl_len=len(device.gids),
                            port_cap_flags=abi.PORT_CM_SUP, max_msg_sz=MAX_MESSAGE,
                            qkey_viol_cntr=device.qkey_violations, pkey_tbl_len=1, active_width=2, active_speed=32,
                            phys_state=5)


def query_pkey(_device: "Device", request: Any) -> Any:
    """QUERY_PKEY"""
    if request.port != abi.PORT or request.index != 0:
        raise Refused(abi.STATUS_INVAL)
    return abi.RspQueryPkey(pkey=0xffff)


def is_ipv4(gid: bytes) -> bool:
    """Says whether a GID is an IPv4 address."""
    return gid[:12] == bytes(10) + b"\xff\xff"


def is_group(gid: bytes) -> bool:
    """Says whether a GID is that of a multicast group."""
    return gid[0] == 0xff or is_ipv4(gid) and gid[12] >> 4 == 0xe


def add_gid(device: "Device", request: Any) -> None:
    """ADD_GID"""
    gid = bytes(request.gid)
    if request.port_num != abi.PORT or request.index >= len(device.gids) or not any(gid) or is_group(gid) \
            or request.gid_type != abi.GID_TYPE_ROCE_UDP_ENCAP:
        raise Refused(abi.STATUS_INVAL)
    if device.network.owner(gid) not in (None, device):
        raise Refused(abi.STATUS_EXISTS)
    device.gids[request.index] = gid


def del_gid(device: "Device", request: Any) -> None:
    """DEL_GID"""
    if request.port != abi.PORT or request.index >= len(device.gids):
        raise Refused(abi.STATUS_INVAL)
    device.gids[request.index] = None
