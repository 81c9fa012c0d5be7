// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The objects that a guest creates, and the work requests that it posts.

use std::ops::Range;

use abi::{
    virtio_rdma_cmd_create_cq, virtio_rdma_cmd_create_qp, virtio_rdma_cmd_modify_qp,
    virtio_rdma_qp_attr, virtio_rdma_rsp_create_cq, virtio_rdma_rsp_create_pd,
    virtio_rdma_rsp_create_qp, virtio_rdma_rsp_mr, VIRTIO_RDMA_CMD_CREATE_CQ,
    VIRTIO_RDMA_CMD_CREATE_PD, VIRTIO_RDMA_CMD_CREATE_QP, VIRTIO_RDMA_CMD_CREATE_RING_CQ,
    VIRTIO_RDMA_CMD_CREATE_RING_QP, VIRTIO_RDMA_CMD_MODIFY_QP, VIRTIO_RDMA_CMD_REG_USER_MR,
    VIRTIO_RDMA_QPS_INIT, VIRTIO_RDMA_QPS_RTR, VIRTIO_RDMA_QPS_RTS,
};
use engine::Gid;
use testkit::command as requests;
use testkit::command::{pages_of, reg_user_mr};
use zerocopy::IntoBytes;

use crate::guest::{command, modify, Guest, RING};
use crate::rings::RING_PAGES;

/// Registers memory that the guest names by its own addresses, and returns the key.
pub fn reg_mr(guest: &mut Guest, pdn: u32, range: Range<u64>, access: u32) -> u32 {
    let memory = (range.start, range.end - range.start);
    let pages = pages_of(memory.0, memory.1);
    let table = (guest.place(pages.as_bytes()), pages.len() as u32);
    let request = reg_user_mr(pdn, access, memory, table);
    let mr: virtio_rdma_rsp_mr =
        command(&guest.device, VIRTIO_RDMA_CMD_REG_USER_MR, &request).expect("a good region");
    mr.lkey
}

/// Creates a CQ. A guest with rings puts the ring on this one of the [`RING_PAGES`].
pub fn create_cq(guest: &mut Guest, page: usize) -> u16 {
    if guest.rings {
        let request = guest.ring_cq_request(RING_PAGES[page], RING.into());
        let cq: virtio_rdma_rsp_create_cq =
            command(&guest.device, VIRTIO_RDMA_CMD_CREATE_RING_CQ, &request)
                .expect("room for a CQ");
        guest.has_cq_ring(cq.cqn, RING_PAGES[page], RING.into());
        return cq.cqn as u16;
    }
    let request = virtio_rdma_cmd_create_cq { cqe: RING.into() };
    let cq: virtio_rdma_rsp_create_cq =
        command(&guest.device, VIRTIO_RDMA_CMD_CREATE_CQ, &request).expect("room for a CQ");
    let cqn = cq.cqn as u16;
    guest.add_cq_buffers(cqn);
    cqn
}

/// Creates a PD.
pub fn create_pd(guest: &Guest) -> u32 {
    let pd: virtio_rdma_rsp_create_pd =
        command(&guest.device, VIRTIO_RDMA_CMD_CREATE_PD, &()).expect("room for a PD");
    pd.pdn
}

/// Returns the request for a QP of this type.
pub fn qp_request(pdn: u32, cqn: u16, kind: u32) -> virtio_rdma_cmd_create_qp {
    requests::create_qp(pdn, cqn.into(), kind, 4)
}

/// Creates a QP. A guest with rings puts its rings on this one of the [`RING_PAGES`].
pub fn create_qp(guest: &mut Guest, pdn: u32, cqn: u16, kind: u32, page: usize) -> u32 {
    let request = qp_request(pdn, cqn, kind);
    if guest.rings {
        let request = guest.ring_qp_request(RING_PAGES[page], request);
        let qp: virtio_rdma_rsp_create_qp =
            command(&guest.device, VIRTIO_RDMA_CMD_CREATE_RING_QP, &request)
                .expect("room for a QP");
        guest.has_qp_rings(qp.qpn, RING_PAGES[page]);
        return qp.qpn;
    }
    let qp: virtio_rdma_rsp_create_qp =
        command(&guest.device, VIRTIO_RDMA_CMD_CREATE_QP, &request).expect("room for a QP");
    qp.qpn
}

/// Changes the attributes of a QP that the mask names.
pub fn set_state(guest: &Guest, qpn: u32, mask: u32, attr: virtio_rdma_qp_attr) -> Result<(), u32> {
    let request = virtio_rdma_cmd_modify_qp { qpn, attr_mask: mask, attr };
    command(&guest.device, VIRTIO_RDMA_CMD_MODIFY_QP, &request)
}

/// Takes a QP from RESET to RTS.
pub fn connect_qp(guest: &Guest, kind: u32, qpn: u32, dgid: Gid, dest: u32) {
    for state in [VIRTIO_RDMA_QPS_INIT, VIRTIO_RDMA_QPS_RTR, VIRTIO_RDMA_QPS_RTS] {
        let (mask, attr) = modify(kind, state, dgid, dest);
        set_state(guest, qpn, mask, attr).expect("a good transition");
    }
}
