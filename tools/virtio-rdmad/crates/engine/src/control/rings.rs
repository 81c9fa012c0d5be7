// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! CREATE_RING_CQ, RESIZE_CQ, CREATE_RING_QP (specification, chapter 13).

use std::sync::Arc;

use abi::{
    virtio_rdma_cmd_create_ring_cq, virtio_rdma_cmd_create_ring_qp, virtio_rdma_cmd_modify_cq,
    virtio_rdma_cmd_resize_cq, virtio_rdma_ring_region, virtio_rdma_rsp_create_cq,
    virtio_rdma_rsp_create_qp, virtio_rdma_rsp_resize_cq, VIRTIO_RDMA_QP_PRIVILEGED,
};
use memory::Pages;

use crate::base::sync::lock;
use crate::control::prepare::{Prepared, MOVED};
use crate::control::queue::{check_capabilities, Control, Status};
use crate::device::Shared;
use crate::memory::mr::{Range, PAGE_SIZE};
use crate::qp::state::QpType;
use crate::queue::cq_ring::{CqRing, MovingCq};
use crate::queue::work_queue::WorkQueue;
use crate::queue::wq_ring::{Kind, Shape, WqRing};
use crate::queue::wqe::{receive_entry_len, send_entry_len};

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
        prepared: Prepared,
    ) -> Result<virtio_rdma_rsp_create_cq, Status> {
        let vector = u16::try_from(request.comp_vector).map_err(|_| Status::Invalid)?;
        if vector >= self.limits.comp_vectors {
            return Err(Status::Invalid);
        }
        let len = self.cq_region_len(request.cqe)?;
        let (pages, ranges) = self.region(control, &request.region, len, prepared)?;
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
        prepared: Prepared,
    ) -> Result<virtio_rdma_rsp_resize_cq, Status> {
        // The number first: a CQ that does not exist has no size.
        self.with_cq(request.cqn, |_| ())?;
        let len = self.cq_region_len(request.cqe)?;
        let moving = match prepared {
            Prepared::Cq(_, moving) => moving,
            other => return Err(self.why_not(control, &request.region, len, &other)),
        };
        let (moved, old_pages, new_pages) = self.with_cq(request.cqn, |cq| {
            let ring = cq.ring().ok_or(Status::NoObject)?;
            let old_pages = ring.pages_len();
            let moved = ring.end_move(moving).ok_or(Status::Invalid)?;
            Ok((moved, old_pages, ring.pages_len()))
        })??;
        control.extents = control.extents + new_pages - old_pages;
        Ok(virtio_rdma_rsp_resize_cq { moved })
    }

    /// Begins a RESIZE_CQ whose new region was found.
    pub(crate) fn begin_resize_cq(
        &self,
        request: &virtio_rdma_cmd_resize_cq,
        pages: Pages,
        ranges: Box<[Range]>,
    ) -> Result<MovingCq, Status> {
        self.with_cq(request.cqn, |cq| {
            let ring = cq.ring().ok_or(Status::NoObject)?;
            ring.begin_move(pages, ranges, request.cqe).ok_or(Status::Invalid)
        })?
    }

    /// Moves some CQEs of a RESIZE_CQ; how many.
    pub(crate) fn move_cqes(&self, cqn: u32, moving: &mut MovingCq) -> Result<u32, Status> {
        self.with_cq(cqn, |cq| {
            let ring = cq.ring().ok_or(Status::NoObject)?;
            ring.move_some(moving, MOVED).ok_or(Status::Invalid)
        })?
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

    /// The shapes of the send and the receive ring, whose region has no more pages than they and its
    /// head need.
    pub(crate) fn qp_shapes(
        &self,
        request: &virtio_rdma_cmd_create_ring_qp,
    ) -> Result<(Shape, Shape), Status> {
        let base = &request.base;
        let kind = QpType::from_abi(base.qp_type).ok_or(Status::Unsupported)?;
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
        check_gaps(&[send, receive])?;
        Ok((send, receive))
    }

    pub(crate) fn create_ring_qp(
        &self,
        control: &mut Control,
        request: &virtio_rdma_cmd_create_ring_qp,
        prepared: Prepared,
    ) -> Result<virtio_rdma_rsp_create_qp, Status> {
        let base = &request.base;
        let kind = QpType::from_abi(base.qp_type).ok_or(Status::Unsupported)?;
        if kind.is_xrc() && !self.has_xrc() {
            return Err(Status::Unsupported);
        }
        if kind == QpType::XrcTgt {
            return self.create_xrc_target(control, request);
        }
        let (send, receive) = self.qp_shapes(request)?;
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
        let (pages, region) = self.region(control, &request.region, end, prepared)?;
        let slot = self.free_ring_slot(control, kind)?;
        control.extents += pages_of(&region);
        let rings = QpRings { pages: Arc::new(pages), region, send, receive };
        self.occupy(slot, base, config, Some(rings));
        self.attach(control, slot, config);
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

    /// The pages of a region that holds `len` bytes, which were found before.
    pub(crate) fn region(
        &self,
        control: &Control,
        region: &virtio_rdma_ring_region,
        len: u64,
        prepared: Prepared,
    ) -> Result<(Pages, Box<[Range]>), Status> {
        match prepared {
            Prepared::Rings(rings) => rings.finish(),
            other => Err(self.why_not(control, region, len, &other)),
        }
    }

    /// Why there is no region for rings.
    pub(crate) fn why_not(
        &self,
        control: &Control,
        region: &virtio_rdma_ring_region,
        len: u64,
        prepared: &Prepared,
    ) -> Status {
        match prepared {
            Prepared::Failed(why) => *why,
            _ => self.prepare_rings(control, region, len).err().unwrap_or(Status::Error),
        }
    }
}

/// Whether a region has no more pages than its head and its rings need, wherever they begin.
pub(crate) fn check_gaps(rings: &[Shape]) -> Result<(), Status> {
    let end = rings.iter().map(Shape::end).max().unwrap_or(0);
    let most = 1 + rings.iter().map(Shape::most_pages).sum::<u64>();
    if end.div_ceil(PAGE_SIZE) > most {
        return Err(Status::Invalid);
    }
    Ok(())
}
