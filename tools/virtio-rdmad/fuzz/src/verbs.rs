// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The objects that a guest creates, and the work requests that it posts.

use std::mem::offset_of;
use std::ops::Range;

use abi::{
    virtio_rdma_cmd_create_cq, virtio_rdma_cmd_create_qp, virtio_rdma_cmd_modify_qp,
    virtio_rdma_cmd_reg_user_mr, virtio_rdma_qp_attr, virtio_rdma_rsp_create_cq,
    virtio_rdma_rsp_create_pd, virtio_rdma_rsp_create_qp, virtio_rdma_rsp_mr, virtio_rdma_sge,
    virtio_rdma_sq_wqe, VIRTIO_RDMA_CMD_CREATE_CQ, VIRTIO_RDMA_CMD_CREATE_PD,
    VIRTIO_RDMA_CMD_CREATE_QP, VIRTIO_RDMA_CMD_CREATE_RING_CQ, VIRTIO_RDMA_CMD_CREATE_RING_QP,
    VIRTIO_RDMA_CMD_MODIFY_QP, VIRTIO_RDMA_CMD_REG_USER_MR, VIRTIO_RDMA_PAGE_SHIFT,
    VIRTIO_RDMA_QPS_INIT, VIRTIO_RDMA_QPS_RTR, VIRTIO_RDMA_QPS_RTS,
};
use engine::Gid;
use zerocopy::{FromZeros, IntoBytes};

use crate::guest::{command, modify, Guest, RING};
use crate::rings::RING_PAGES;

/// Registers memory that the guest names by its own addresses, and returns the key.
pub fn reg_mr(guest: &mut Guest, pdn: u32, range: Range<u64>, access: u32) -> u32 {
    let pages: Vec<u64> = range.clone().step_by(0x1000).collect();
    let request = virtio_rdma_cmd_reg_user_mr {
        pdn,
        access_flags: access,
        start: range.start,
        length: range.end - range.start,
        virt_addr: range.start,
        pages: guest.place(pages.as_bytes()),
        npages: pages.len() as u32,
        levels: 0,
        page_shift: VIRTIO_RDMA_PAGE_SHIFT as u8,
        reserved_2e: [0; 2],
    };
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
    let mut request = virtio_rdma_cmd_create_qp::new_zeroed();
    (request.pdn, request.qp_type) = (pdn, kind as u8);
    (request.max_send_wr, request.max_recv_wr) = (16, 16);
    (request.max_send_sge, request.max_recv_sge) = (4, 4);
    (request.send_cqn, request.recv_cqn) = (cqn.into(), cqn.into());
    request
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
pub fn set_state(guest: &Guest, qpn: u32, mask: u32, attr: virtio_rdma_qp_attr) -> Result<(), u8> {
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

/// Returns a send work request without SGEs.
pub fn send_header(wr_id: u64, opcode: u32, flags: u32, wr: &[u8]) -> virtio_rdma_sq_wqe {
    let mut header = virtio_rdma_sq_wqe::new_zeroed();
    (header.wr_id, header.opcode, header.send_flags) = (wr_id, opcode, flags);
    let at = offset_of!(virtio_rdma_sq_wqe, wr);
    header.as_mut_bytes()[at..at + wr.len()].copy_from_slice(wr);
    header
}

/// Returns the bytes of a send work request for a virtqueue.
pub fn send_bytes(mut header: virtio_rdma_sq_wqe, sges: &[virtio_rdma_sge]) -> Vec<u8> {
    header.num_sge = sges.len() as u32;
    [header.as_bytes(), sges.as_bytes()].concat()
}
