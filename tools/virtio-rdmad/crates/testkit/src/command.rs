// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Commands of the control queue, and what they consist of.

use abi::*;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

/// The address of a port.
pub type Gid = [u8; 16];

/// The bytes of the pages of regions.
pub const PAGE: u64 = 1 << VIRTIO_RDMA_PAGE_SHIFT;

/// Returns the bytes of a command.
pub fn encode(command: u32, request: &(impl IntoBytes + Immutable)) -> Vec<u8> {
    [&[command as u8], request.as_bytes()].concat()
}

/// Returns what a reply says, or the status of a command that failed. Only a whole reply is one.
pub fn decode<R: FromBytes>(reply: &[u8]) -> Result<R, u32> {
    let (&status, rest) = reply.split_first().expect("a status");
    if u32::from(status) == VIRTIO_RDMA_STATUS_OK {
        return Ok(R::read_from_bytes(rest).expect("a reply of this size"));
    }
    assert!(rest.is_empty(), "an error has no reply");
    Err(status.into())
}

/// Returns the GID of the guest with this number.
pub fn gid(number: u8) -> Gid {
    let mut gid = [0; 16];
    gid[10..12].fill(0xff);
    gid[12..].copy_from_slice(&[10, 0, 0, number]);
    gid
}

/// Returns the request ADD_GID for a GID of RoCE v2 that belongs to no VLAN.
pub fn add_gid(index: u16, gid: Gid) -> virtio_rdma_cmd_add_gid {
    let (gid_type, vlan_id) = (VIRTIO_RDMA_GID_TYPE_ROCE_UDP_ENCAP, VIRTIO_RDMA_NO_VLAN as u16);
    virtio_rdma_cmd_add_gid { gid, gid_type, index, vlan_id, port_num: 1 }
}

/// Returns the request REG_USER_MR for `[addr, addr + len)`, which peers name by the same address. The table of its
/// pages is at `table`.
pub fn reg_user_mr(
    pdn: u32,
    access_flags: u32,
    (start, length): (u64, u64),
    (pages, npages): (u64, u32),
) -> virtio_rdma_cmd_reg_user_mr {
    virtio_rdma_cmd_reg_user_mr {
        pdn,
        access_flags,
        start,
        length,
        virt_addr: start,
        pages,
        npages,
        levels: 0,
        page_shift: VIRTIO_RDMA_PAGE_SHIFT as u8,
        reserved_2e: [0; 2],
    }
}

/// Returns the pages that `[addr, addr + len)` touches.
pub fn pages_of(addr: u64, len: u64) -> Vec<u64> {
    let first = addr & !(PAGE - 1);
    (first..addr + len).step_by(PAGE as usize).collect()
}

/// Returns the request CREATE_QP, whose work requests may have so many SGEs.
pub fn create_qp(pdn: u32, cqn: u32, qp_type: u32, sges: u32) -> virtio_rdma_cmd_create_qp {
    let mut request = virtio_rdma_cmd_create_qp::new_zeroed();
    (request.pdn, request.qp_type) = (pdn, qp_type as u8);
    (request.max_send_wr, request.max_recv_wr) = (16, 16);
    (request.max_send_sge, request.max_recv_sge) = (sges, sges);
    (request.send_cqn, request.recv_cqn) = (cqn, cqn);
    request
}

/// Returns a region of rings, whose page table is at `pages`.
pub fn region(pages: u64, npages: u32) -> virtio_rdma_ring_region {
    virtio_rdma_ring_region { pages, npages, reserved_0c: 0 }
}

/// Returns the shape of a ring.
pub fn shape(depth: u32, stride: u32, offset: u32) -> virtio_rdma_ring_shape {
    virtio_rdma_ring_shape { depth, stride, offset, reserved_0c: 0 }
}

/// Returns the request CREATE_RING_QP of the kernel, with a send ring and a receive ring.
pub fn create_ring_qp(
    base: virtio_rdma_cmd_create_qp,
    region: virtio_rdma_ring_region,
    [sq, rq]: [virtio_rdma_ring_shape; 2],
) -> virtio_rdma_cmd_create_ring_qp {
    let mut request = virtio_rdma_cmd_create_ring_qp::new_zeroed();
    (request.base, request.flags) = (base, VIRTIO_RDMA_QP_PRIVILEGED);
    (request.region, request.sq, request.rq) = (region, sq, rq);
    request
}

/// Returns the request CREATE_RING_QP for the target of an XRC.
pub fn create_xrc_tgt(xrcdn: u32) -> virtio_rdma_cmd_create_ring_qp {
    let mut request = virtio_rdma_cmd_create_ring_qp::new_zeroed();
    (request.base.qp_type, request.xrcdn) = (VIRTIO_RDMA_QPT_XRC_TGT as u8, xrcdn);
    request
}

/// Returns the request CREATE_SRQ, whose work requests may have four SGEs.
pub fn create_srq(
    pdn: u32,
    region: virtio_rdma_ring_region,
    ring: virtio_rdma_ring_shape,
) -> virtio_rdma_cmd_create_srq {
    let mut request = virtio_rdma_cmd_create_srq::new_zeroed();
    (request.region, request.ring) = (region, ring);
    (request.pdn, request.max_sge) = (pdn, 4);
    request
}

/// Returns the request RESIZE_SRQ.
pub fn resize_srq(
    srqn: u32,
    region: virtio_rdma_ring_region,
    ring: virtio_rdma_ring_shape,
) -> virtio_rdma_cmd_resize_srq {
    virtio_rdma_cmd_resize_srq { region, ring, srqn, reserved_24: 0 }
}

/// Returns which attributes take a QP of this type to a state.
pub fn attr_mask(qp_type: u32, state: u32) -> u32 {
    let is_reliable = qp_type == VIRTIO_RDMA_QPT_RC;
    let is_connected = is_reliable || qp_type == VIRTIO_RDMA_QPT_UC;
    let mut mask = VIRTIO_RDMA_QP_STATE;
    match state {
        VIRTIO_RDMA_QPS_INIT => {
            mask |= VIRTIO_RDMA_QP_PKEY_INDEX | VIRTIO_RDMA_QP_PORT;
            mask |= if is_connected { VIRTIO_RDMA_QP_ACCESS_FLAGS } else { VIRTIO_RDMA_QP_QKEY };
        }
        VIRTIO_RDMA_QPS_RTR if is_connected => {
            mask |= VIRTIO_RDMA_QP_AV | VIRTIO_RDMA_QP_PATH_MTU;
            mask |= VIRTIO_RDMA_QP_DEST_QPN | VIRTIO_RDMA_QP_RQ_PSN;
            if is_reliable {
                mask |= VIRTIO_RDMA_QP_MAX_DEST_RD_ATOMIC | VIRTIO_RDMA_QP_MIN_RNR_TIMER;
            }
        }
        VIRTIO_RDMA_QPS_RTS => {
            mask |= VIRTIO_RDMA_QP_SQ_PSN;
            if is_reliable {
                mask |= VIRTIO_RDMA_QP_TIMEOUT | VIRTIO_RDMA_QP_RETRY_CNT;
                mask |= VIRTIO_RDMA_QP_RNR_RETRY | VIRTIO_RDMA_QP_MAX_QP_RD_ATOMIC;
            }
        }
        _ => {}
    }
    mask
}

/// Returns attributes of a QP that goes to this state, on the only port, with a route to a peer.
pub fn attributes(state: u32, dgid: Gid, dest_qp_num: u32) -> virtio_rdma_qp_attr {
    let mut attr = virtio_rdma_qp_attr::new_zeroed();
    (attr.qp_state, attr.port_num, attr.dest_qp_num) = (state as u8, 1, dest_qp_num);
    (attr.ah_attr.grh.dgid, attr.ah_attr.port_num) = (dgid, 1);
    attr.ah_attr.ah_flags = VIRTIO_RDMA_AH_GRH as u8;
    attr
}
