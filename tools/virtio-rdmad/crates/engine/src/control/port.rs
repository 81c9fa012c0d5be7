// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The port: its attributes, P_Keys and counters.

use abi::{
    virtio_rdma_cmd_query_counters, virtio_rdma_cmd_query_pkey, virtio_rdma_cmd_query_port,
    virtio_rdma_rsp_query_counters, virtio_rdma_rsp_query_pkey, virtio_rdma_rsp_query_port,
    VIRTIO_RDMA_PORT, VIRTIO_RDMA_PORT_CM_SUP,
};
use zerocopy::FromZeros;

use super::call::Call;
use super::status::Status;
use crate::base::counters::Counter;
use crate::base::limits::MAX_MSG_SIZE;
use crate::base::port::PortState;

/// `enum ib_port_phys_state`: link up, and disabled.
const PHYS_LINK_UP: u8 = 5;
const PHYS_DISABLED: u8 = 3;
/// `enum ib_mtu`: 4096 bytes.
const MTU_4096: u8 = 5;
/// `enum ib_port_width`: 4 lanes.
const WIDTH_4X: u8 = 2;
/// `enum ib_port_speed`: EDR, 25 Gb/s a lane. Nothing depends on it.
const SPEED_EDR: u16 = 32;
/// The only P_Key: the default partition, full member.
const DEFAULT_PKEY: u16 = 0xffff;

/// Handles QUERY_PORT.
pub(super) fn query(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_query_port,
) -> Result<virtio_rdma_rsp_query_port, Status> {
    if u32::from(request.port) != VIRTIO_RDMA_PORT {
        return Err(Status::Invalid);
    }
    let hca = call.hca;
    let mut reply = virtio_rdma_rsp_query_port::new_zeroed();
    let state = hca.fabric.port_state().unwrap_or(PortState::Active);
    reply.state = state as u8;
    reply.max_mtu = MTU_4096;
    reply.active_mtu = MTU_4096;
    reply.phys_mtu = 4096;
    reply.gid_tbl_len = hca.limits.gid_table.into();
    reply.port_cap_flags = VIRTIO_RDMA_PORT_CM_SUP;
    reply.max_msg_sz = MAX_MSG_SIZE;
    let count = |counter| u32::try_from(hca.stats.get(counter)).unwrap_or(u32::MAX);
    reply.bad_pkey_cntr = count(Counter::DropPkey);
    reply.qkey_viol_cntr = count(Counter::DropQkey);
    reply.pkey_tbl_len = 1;
    reply.active_width = WIDTH_4X;
    reply.active_speed = SPEED_EDR;
    reply.phys_state = match state {
        PortState::Active => PHYS_LINK_UP,
        PortState::Down => PHYS_DISABLED,
    };
    Ok(reply)
}

/// Handles QUERY_PKEY.
pub(super) fn query_pkey(
    _: &mut Call<'_>,
    request: &virtio_rdma_cmd_query_pkey,
) -> Result<virtio_rdma_rsp_query_pkey, Status> {
    if request.port != VIRTIO_RDMA_PORT || request.index != 0 {
        return Err(Status::Invalid);
    }
    Ok(virtio_rdma_rsp_query_pkey { pkey: DEFAULT_PKEY })
}

/// Handles QUERY_COUNTERS.
pub(super) fn query_counters(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_query_counters,
) -> Result<virtio_rdma_rsp_query_counters, Status> {
    if request.port != VIRTIO_RDMA_PORT {
        return Err(Status::Invalid);
    }
    let stats = &call.hca.stats;
    let mut reply = virtio_rdma_rsp_query_counters::new_zeroed();
    reply.xmit_data = stats.get(Counter::XmitBytes);
    reply.rcv_data = stats.get(Counter::RcvBytes);
    reply.xmit_packets = stats.get(Counter::XmitPackets);
    reply.rcv_packets = stats.get(Counter::RcvPackets);
    reply.multicast_xmit_packets = stats.get(Counter::MulticastXmitPackets);
    reply.multicast_rcv_packets = stats.get(Counter::MulticastRcvPackets);
    reply.xmit_discards = stats.get(Counter::DropUnreachable);
    Ok(reply)
}
