// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! CREATE_RING_CQ, RESIZE_CQ, CREATE_RING_QP (specification, chapter 13).

use std::sync::Arc;

use abi::{
    virtio_rdma_cmd_create_ring_cq, virtio_rdma_cmd_create_ring_qp, virtio_rdma_cmd_modify_cq,
    virtio_rdma_cmd_resize_cq, virtio_rdma_ring_region, virtio_rdma_rsp_create_cq,
    virtio_rdma_rsp_create_qp, virtio_rdma_rsp_resize_cq, VIRTIO_RDMA_QP_PRIVILEGED,
};
use memory::Pages;

use crate::control::{check_capabilities, Control, Status};
use crate::cq_ring::{region_len, CqRing};
use crate::device::Shared;
use crate::mr::{Range, PAGE_SIZE};
use crate::page_table::Reader;
use crate::state::QpType;
use crate::sync::lock;
use crate::work_queue::WorkQueue;
use crate::wq_ring::{Kind, Shape, WqRing};
use crate::wqe::{receive_entry_len, send_entry_len};

/// Rings of a QP that its guest described well.
pub(crate) struct QpRings {
    pages: Arc<Pages>,
    region: Box<[Range]>,
    send: Shape,
    receive: Shape,
}

impl QpRings {
    /// The two queues, and the region for later.
    pub fn into_queues(self) -> (WorkQueue, WorkQueue, Box<[Range]>) {
        let Self { pages, region, send, receive } = self;
        let queue = |shape, kind| WorkQueue::Ring(WqRing::new(Arc::clone(&pages), shape, kind));
        (queue(send, Kind::Send), queue(receive, Kind::Receive), region)
    }
}

/// Pages of a region of whole pages.
pub(crate) fn pages_of(region: &[Range]) -> usize {
    region.iter().map(Range::pages).sum()
}

impl Shared {
    pub(crate) fn create_ring_cq(
        &self,
        control: &mut Control,
        request: &virtio_rdma_cmd_create_ring_cq,
    ) -> Result<virtio_rdma_rsp_create_cq, Status> {
        let vector = u16::try_from(request.comp_vector).map_err(|_| Status::Invalid)?;
        if vector >= self.limits.comp_vectors {
            return Err(Status::Invalid);
        }
        let (pages, ranges) = self.cq_region(control, &request.region, request.cqe)?;
        let cqn = control.ring_cqs.take().ok_or(Status::NoResource)?;
        control.extents += pages_of(&ranges);
        let ring = CqRing::new(pages, ranges, request.cqe, vector);
        lock(self.cqs.take(cqn)).create(Some(ring));
        Ok(virtio_rdma_rsp_create_cq { cqn: cqn.into() })
    }

    pub(crate) fn resize_cq(
        &self,
        control: &mut Control,
        request: &virtio_rdma_cmd_resize_cq,
    ) -> Result<virtio_rdma_rsp_resize_cq, Status> {
        // The number first: a CQ that does not exist has no size.
        self.with_cq(request.cqn, |_| ())?;
        let (pages, ranges) = self.cq_region(control, &request.region, request.cqe)?;
        let new_pages = pages_of(&ranges);
        let (moved, old_pages) = self.with_cq(request.cqn, |cq| {
            let ring = cq.ring().ok_or(Status::NoObject)?;
            let old_pages = ring.pages_len();
            let moved = ring.resize(pages, ranges, request.cqe).ok_or(Status::Invalid)?;
            Ok((moved, old_pages))
        })??;
        control.extents = control.extents + new_pages - old_pages;
        Ok(virtio_rdma_rsp_resize_cq { moved })
    }

    /// Handles MODIFY_CQ.
    pub(crate) fn modify_cq(&self, request: &virtio_rdma_cmd_modify_cq) -> Result<(), Status> {
        let cqn = u16::try_from(request.cqn).map_err(|_| Status::NoObject)?;
        self.with_cq(request.cqn, |cq| {
            let ring = cq.ring().ok_or(Status::NoObject)?;
            ring.moderate(request.cq_count, request.cq_period);
            Ok(())
        })??;
        // The event that is held back may be due at another time.
        self.make_hot(self.jobs.completion(cqn));
        Ok(())
    }

    fn cq_region(
        &self,
        control: &Control,
        region: &virtio_rdma_ring_region,
        cqe: u32,
    ) -> Result<(Pages, Box<[Range]>), Status> {
        if !cqe.is_power_of_two() || cqe > self.limits.ring_cqe {
            return Err(Status::Invalid);
        }
        self.read_region(control, region, region_len(cqe))
    }

    pub(crate) fn create_ring_qp(
        &self,
        control: &mut Control,
        request: &virtio_rdma_cmd_create_ring_qp,
    ) -> Result<virtio_rdma_rsp_create_qp, Status> {
        let base = &request.base;
        let kind = QpType::from_abi(base.qp_type).ok_or(Status::Unsupported)?;
        if kind.is_xrc() && !self.has_xrc() {
            return Err(Status::Unsupported);
        }
        if kind == QpType::XrcTgt {
            return self.create_xrc_target(control, request);
        }
        if base.max_inline_data > self.limits.inline_data.into() {
            return Err(Status::Invalid);
        }
        check_capabilities(base, self.limits.ring_wr)?;
        let (sges, inline) = (base.max_send_sge as usize, base.max_inline_data as usize);
        let most = self.limits.ring_wr;
        let send_len = send_entry_len(kind, sges, inline);
        let send = Shape::check(&request.sq, base.max_send_wr, most, send_len);
        let receive_len = receive_entry_len(base.max_recv_sge as usize);
        let receive = Shape::check(&request.rq, base.max_recv_wr, most, receive_len);
        let (send, receive) = send.zip(receive).ok_or(Status::Invalid)?;
        let receives_nothing = kind == QpType::XrcIni;
        if request.flags & !VIRTIO_RDMA_QP_PRIVILEGED != 0 || receives_nothing && receive.depth != 0
        {
            return Err(Status::Invalid);
        }
        let mut config = self.qp_config(control, kind, base)?;
        config.privileged = request.flags & VIRTIO_RDMA_QP_PRIVILEGED != 0;
        if self.has_srqs() && request.srqn != 0 {
            if kind == QpType::Gsi || receives_nothing || receive.depth != 0 {
                return Err(Status::Invalid);
            }
            let (srq, recv_pdn, max_recv_sge) = self.srq_config(request.srqn)?;
            (config.srq, config.recv_pdn, config.max_recv_sge) =
                (Some(srq), recv_pdn, max_recv_sge);
        }
        let end = send.end().max(receive.end());
        let (pages, region) = self.read_region(control, &request.region, end)?;
        let slot = self.free_ring_slot(control, kind)?;
        control.extents += pages_of(&region);
        let rings = QpRings { pages: Arc::new(pages), region, send, receive };
        self.occupy(slot, base, config, Some(rings));
        self.attach(control, config);
        Ok(virtio_rdma_rsp_create_qp { qpn: u32::from(slot) + 1 })
    }

    /// A place for a QP with rings: the first for the GSI, any other for the rest.
    pub(crate) fn free_ring_slot(
        &self,
        control: &mut Control,
        kind: QpType,
    ) -> Result<u16, Status> {
        if kind != QpType::Gsi {
            return control.ring_slots.take().ok_or(Status::NoResource);
        }
        let taken = lock(&self.qps.take(0).requester).config.is_some();
        if taken {
            return Err(Status::Busy);
        }
        Ok(0)
    }

    /// Reads the page table of a region that holds `len` bytes, and finds the
    /// pages.
    pub(crate) fn read_region(
        &self,
        control: &Control,
        region: &virtio_rdma_ring_region,
        len: u64,
    ) -> Result<(Pages, Box<[Range]>), Status> {
        // Pages beyond those that the rings need are never touched.
        let needed = len.div_ceil(PAGE_SIZE);
        if u64::from(region.npages) < needed {
            return Err(Status::Invalid);
        }
        let count = usize::try_from(needed).map_err(|_| Status::Invalid)?;
        if count > self.limits.max_extents.saturating_sub(control.extents) {
            return Err(Status::NoResource);
        }
        let room = self.limits.max_extents.saturating_sub(control.extents);
        let table = Reader::new(region.pages, 0, needed, room);
        let ranges = table.finish(&control.memory)?.ranges();
        let pages = Pages::new(&control.memory, ranges.iter().map(|r| (r.addr, r.len)));
        Ok((pages.map_err(|_| Status::Fault)?, ranges))
    }
}
