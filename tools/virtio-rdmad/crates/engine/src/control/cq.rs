// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Completion queues, on virtqueues and on rings.

use abi::{
    virtio_rdma_cmd_create_cq, virtio_rdma_cmd_create_ring_cq, virtio_rdma_cmd_destroy_cq,
    virtio_rdma_cmd_modify_cq, virtio_rdma_cmd_req_notify, virtio_rdma_cmd_resize_cq,
    virtio_rdma_rsp_create_cq, virtio_rdma_rsp_resize_cq,
};
use memory::Pages;

use super::call::Call;
use super::objects::Objects;
use super::prepare::{self, Prepared, MOVED};
use super::quota;
use super::status::Status;
use crate::base::limits::Limits;
use crate::base::sync::lock;
use crate::memory::page_list::{pages_of, Range};
use crate::queue::cq::{valid_notify_flags, Cq};
use crate::queue::cq_ring::{region_len, CqRing, MovingCq};
use crate::transport::hca::Hca;

/// Calls `f` with the CQ of this number, if there is one.
pub(super) fn with_cq<R>(hca: &Hca, cqn: u32, f: impl FnOnce(&mut Cq) -> R) -> Result<R, Status> {
    let index = u16::try_from(cqn).map_err(|_| Status::NoObject)?;
    let mut cq = lock(hca.cqs.get(index).ok_or(Status::NoObject)?);
    if cq.is_live() {
        Ok(f(&mut cq))
    } else {
        Err(Status::NoObject)
    }
}

/// Returns the index of the CQ of this number, if there is one.
pub(super) fn index_of(hca: &Hca, cqn: u32) -> Result<u16, Status> {
    with_cq(hca, cqn, |_| ())?;
    u16::try_from(cqn).map_err(|_| Status::NoObject)
}

/// Handles CREATE_CQ.
pub(super) fn create(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_create_cq,
) -> Result<virtio_rdma_rsp_create_cq, Status> {
    let hca = call.hca;
    if request.cqe == 0 || request.cqe > hca.limits.cq_size.into() {
        return Err(Status::Invalid);
    }
    quota::check(call.objects.cqs as usize, hca.quota().cqs)?;
    for (cqn, place) in hca.cqs.iter() {
        let mut cq = lock(place);
        if cq.is_live() || cq.size() == 0 {
            continue;
        }
        if request.cqe > cq.size().into() {
            return Err(Status::Invalid);
        }
        cq.create(None);
        call.objects.cqs += 1;
        return Ok(virtio_rdma_rsp_create_cq { cqn: cqn.into() });
    }
    Err(Status::NoResource)
}

/// Returns the bytes of the region of a CQ, if it may have so many entries.
fn cq_region_len(limits: &Limits, cqe: u32) -> Result<u64, Status> {
    if !cqe.is_power_of_two() || cqe > limits.ring_cqe {
        return Err(Status::Invalid);
    }
    Ok(region_len(cqe))
}

/// Prepares CREATE_RING_CQ: finds the pages of its ring.
pub(super) fn prepare_ring(
    hca: &Hca,
    objects: &Objects,
    request: &virtio_rdma_cmd_create_ring_cq,
) -> Option<Prepared> {
    let len = cq_region_len(&hca.limits, request.cqe).ok()?;
    prepare::rings(hca, objects, &request.region, len).map(Prepared::Rings).ok()
}

/// Handles CREATE_RING_CQ.
pub(super) fn create_ring(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_create_ring_cq,
) -> Result<virtio_rdma_rsp_create_cq, Status> {
    let (hca, objects) = (call.hca, &mut *call.objects);
    let vector = u16::try_from(request.comp_vector).map_err(|_| Status::Invalid)?;
    if vector >= hca.limits.comp_vectors {
        return Err(Status::Invalid);
    }
    let len = cq_region_len(&hca.limits, request.cqe)?;
    let prepared = std::mem::take(&mut call.prepared);
    let (pages, ranges) = prepare::found_rings(hca, objects, &request.region, len, prepared)?;
    quota::check(objects.cqs as usize, hca.quota().cqs)?;
    let cqn = objects.ring_cqs.take().ok_or(Status::NoResource)?;
    objects.cqs += 1;
    objects.extents += pages_of(&ranges);
    let ring = CqRing::new(pages, ranges, request.cqe, vector);
    lock(hca.cqs.take(cqn)).create(Some(ring));
    Ok(virtio_rdma_rsp_create_cq { cqn: cqn.into() })
}

/// Prepares RESIZE_CQ: finds the pages of the new ring.
pub(super) fn prepare_resize(
    hca: &Hca,
    objects: &Objects,
    request: &virtio_rdma_cmd_resize_cq,
) -> Option<Prepared> {
    let len = cq_region_len(&hca.limits, request.cqe).ok()?;
    let rings = prepare::rings(hca, objects, &request.region, len).ok()?;
    Some(Prepared::CqRing(*request, rings))
}

/// Begins the move of a RESIZE_CQ whose new region was found.
pub(super) fn begin_move(
    hca: &Hca,
    request: &virtio_rdma_cmd_resize_cq,
    pages: Pages,
    ranges: Box<[Range]>,
) -> Result<Prepared, Status> {
    let moving = with_cq(hca, request.cqn, |cq| {
        let ring = cq.ring().ok_or(Status::NoObject)?;
        ring.begin_move(pages, ranges, request.cqe).ok_or(Status::Invalid)
    })??;
    Ok(Prepared::MovingCq(request.cqn, moving))
}

/// Moves some CQEs of a RESIZE_CQ, and returns how many.
pub(super) fn move_some(hca: &Hca, cqn: u32, moving: &mut MovingCq) -> Result<u32, Status> {
    with_cq(hca, cqn, |cq| {
        let ring = cq.ring().ok_or(Status::NoObject)?;
        ring.move_some(moving, MOVED).ok_or(Status::Invalid)
    })?
}

/// Handles RESIZE_CQ, whose CQEs were moved but for the last.
pub(super) fn resize(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_resize_cq,
) -> Result<virtio_rdma_rsp_resize_cq, Status> {
    let (hca, objects) = (call.hca, &mut *call.objects);
    // The number first: a CQ that does not exist has no size.
    with_cq(hca, request.cqn, |_| ())?;
    let len = cq_region_len(&hca.limits, request.cqe)?;
    let moving = match std::mem::take(&mut call.prepared) {
        Prepared::MovingCq(_, moving) => moving,
        other => return Err(prepare::why_not(hca, objects, &request.region, len, &other)),
    };
    let (moved, old_pages, new_pages) = with_cq(hca, request.cqn, |cq| {
        let ring = cq.ring().ok_or(Status::NoObject)?;
        let old_pages = ring.pages_len();
        let moved = ring.end_move(moving).ok_or(Status::Invalid)?;
        Ok((moved, old_pages, ring.pages_len()))
    })??;
    objects.extents = objects.extents + new_pages - old_pages;
    Ok(virtio_rdma_rsp_resize_cq { moved })
}

/// Handles MODIFY_CQ.
pub(super) fn modify(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_modify_cq,
) -> Result<(), Status> {
    let hca = call.hca;
    let cqn = u16::try_from(request.cqn).map_err(|_| Status::NoObject)?;
    with_cq(hca, request.cqn, |cq| {
        let ring = cq.ring().ok_or(Status::NoObject)?;
        ring.moderate(request.cq_count, request.cq_period);
        Ok(())
    })??;
    // The event that is held back may be due at another time.
    hca.make_ready(hca.jobs.completion(cqn));
    Ok(())
}

/// Handles DESTROY_CQ.
pub(super) fn destroy(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_destroy_cq,
) -> Result<(), Status> {
    let (hca, objects) = (call.hca, &mut *call.objects);
    let pages = with_cq(hca, request.cqn, |cq| {
        if !cq.users.is_empty() {
            return Err(Status::Busy);
        }
        let pages = cq.ring().map(|ring| ring.pages_len());
        cq.destroy();
        Ok(pages)
    })??;
    objects.cqs -= 1;
    if let (Some(pages), Ok(cqn)) = (pages, u16::try_from(request.cqn)) {
        objects.extents -= pages;
        objects.ring_cqs.give_back(cqn);
        hca.forget_event(cqn);
    }
    Ok(())
}

/// Handles REQ_NOTIFY_CQ.
pub(super) fn req_notify(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_req_notify,
) -> Result<(), Status> {
    with_cq(call.hca, request.cqn, |cq| {
        if !valid_notify_flags(request.flags) {
            return Err(Status::Invalid);
        }
        cq.arm(request.flags);
        Ok(())
    })?
}
