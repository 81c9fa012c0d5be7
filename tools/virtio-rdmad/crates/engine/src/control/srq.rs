// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Shared receive queues (IBA 10.2.9; specification, Shared receive queues).

use abi::{
    virtio_rdma_cmd_create_srq, virtio_rdma_cmd_destroy_srq, virtio_rdma_cmd_modify_srq,
    virtio_rdma_cmd_query_srq, virtio_rdma_cmd_resize_srq, virtio_rdma_ring_shape,
    virtio_rdma_rsp_create_srq, virtio_rdma_rsp_query_srq, virtio_rdma_rsp_resize_srq,
    VIRTIO_RDMA_EVENT_SRQ_LIMIT_REACHED,
};
use memory::Pages;
use zerocopy::FromZeros;

use super::call::Call;
use super::cq;
use super::objects::Objects;
use super::prepare::{self, Prepared, MOVED};
use super::quota;
use super::status::Status;
use super::xrcd;
use crate::base::counters::Counter;
use crate::base::limits::{Limits, MAX_SGE};
use crate::base::slot::Slot;
use crate::base::sync::lock;
use crate::memory::page_list::{pages_of, Range, PAGE_SIZE};
use crate::queue::srq::{MovingSrq, Srq, SrqConfig, SrqError, XrcSrq};
use crate::queue::users::User;
use crate::queue::wq_ring::Shape;
use crate::queue::wqe::receive_entry_len;
use crate::transport::failure::fail_srq;
use crate::transport::hca::Hca;

/// Calls `f` with the SRQ of this number, if there is one.
pub(super) fn with_srq<R>(
    hca: &Hca,
    srqn: u32,
    f: impl FnOnce(&mut Srq) -> R,
) -> Result<R, Status> {
    let slot = hca.srq_slot_of(srqn).ok_or(Status::NoObject)?;
    hca.with_srq(slot, f).ok_or(Status::NoObject)
}

/// Fails if a region has more pages than its head and its rings need, wherever they begin.
pub(super) fn check_gaps(rings: &[Shape]) -> Result<(), Status> {
    let end = rings.iter().map(Shape::end).max().unwrap_or(0);
    let most = 1 + rings.iter().map(Shape::most_pages).sum::<u64>();
    if end.div_ceil(PAGE_SIZE) > most {
        return Err(Status::Invalid);
    }
    Ok(())
}

/// Returns the shape of the ring of an SRQ, whose region has no more pages than it and its head need.
fn shape(limits: &Limits, ring: &virtio_rdma_ring_shape, max_sge: usize) -> Result<Shape, Status> {
    if max_sge > MAX_SGE {
        return Err(Status::Invalid);
    }
    let shape = Shape::check(ring, 1, limits.ring_wr, receive_entry_len(max_sge));
    let shape = shape.ok_or(Status::Invalid)?;
    check_gaps(&[shape])?;
    Ok(shape)
}

/// Returns the shape of the ring that RESIZE_SRQ asks for.
fn resized_shape(hca: &Hca, request: &virtio_rdma_cmd_resize_srq) -> Result<Shape, Status> {
    let max_sge = with_srq(hca, request.srqn, |srq| srq.config().max_sge)?;
    shape(&hca.limits, &request.ring, max_sge)
}

/// Returns the XRC part of an SRQ with these numbers, if its domain and CQ exist. To a driver that does not know XRC,
/// both numbers are reserved.
fn xrc_config(
    hca: &Hca,
    objects: &Objects,
    xrcdn: u32,
    cqn: u32,
) -> Result<Option<XrcSrq>, Status> {
    if xrcdn == 0 || !hca.features.has_xrc() {
        return Ok(None);
    }
    xrcd::require(objects, xrcdn)?;
    Ok(Some(XrcSrq { xrcdn, cq: cq::index_of(hca, cqn)? }))
}

/// Prepares CREATE_SRQ: finds the pages of its ring.
pub(super) fn prepare_create(
    hca: &Hca,
    objects: &Objects,
    request: &virtio_rdma_cmd_create_srq,
) -> Option<Prepared> {
    let shape = shape(&hca.limits, &request.ring, request.max_sge as usize).ok()?;
    prepare::rings(hca, objects, &request.region, shape.end()).map(Prepared::Rings).ok()
}

/// Handles CREATE_SRQ.
pub(super) fn create(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_create_srq,
) -> Result<virtio_rdma_rsp_create_srq, Status> {
    let (hca, objects) = (call.hca, &mut *call.objects);
    objects.pds.require(request.pdn)?;
    let max_sge = request.max_sge as usize;
    let shape = shape(&hca.limits, &request.ring, max_sge)?;
    let xrc = xrc_config(hca, objects, request.xrcdn, request.cqn)?;
    let (region, end) = (&request.region, shape.end());
    let prepared = std::mem::take(&mut call.prepared);
    let (pages, region) = prepare::found_rings(hca, objects, region, end, prepared)?;
    quota::check(objects.srqs as usize, hca.quota().srqs)?;
    let slot = objects.srq_slots.take().ok_or(Status::NoResource)?;
    objects.srqs += 1;
    objects.extents += pages_of(&region);
    objects.pds.enter(request.pdn);
    if let Some(XrcSrq { xrcdn, cq }) = xrc {
        xrcd::enter(objects, xrcdn);
        lock(hca.cqs.take(cq)).users.insert(User::Srq(slot));
    }
    let config = SrqConfig { pdn: request.pdn, xrc, max_sge };
    *lock(hca.srqs.take(slot)) = Some(Srq::new(config, pages, region, shape));
    if xrc.is_some_and(|xrc| lock(hca.cqs.take(xrc.cq)).is_in_error()) {
        fail_srq(hca, slot);
    }
    Ok(virtio_rdma_rsp_create_srq { srqn: slot.number() })
}

/// Handles MODIFY_SRQ: sets the limit, which may be reached already.
pub(super) fn modify(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_modify_srq,
) -> Result<(), Status> {
    let (srqn, limit) = (request.srqn, request.srq_limit);
    let reached = with_srq(call.hca, srqn, |srq| {
        if limit > srq.max_wr() {
            return Err(Status::Invalid);
        }
        if srq.is_in_error() {
            return Err(Status::State);
        }
        Ok(srq.set_limit(limit))
    })??;
    if reached {
        call.hca.raise(VIRTIO_RDMA_EVENT_SRQ_LIMIT_REACHED, srqn);
    }
    Ok(())
}

/// Handles QUERY_SRQ.
pub(super) fn query(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_query_srq,
) -> Result<virtio_rdma_rsp_query_srq, Status> {
    with_srq(call.hca, request.srqn, |srq| {
        let mut reply = virtio_rdma_rsp_query_srq::new_zeroed();
        reply.max_wr = srq.max_wr();
        reply.max_sge = srq.config().max_sge as u32;
        reply.srq_limit = srq.limit();
        reply
    })
}

/// Prepares RESIZE_SRQ: finds the pages of the new ring.
pub(super) fn prepare_resize(
    hca: &Hca,
    objects: &Objects,
    request: &virtio_rdma_cmd_resize_srq,
) -> Option<Prepared> {
    let end = resized_shape(hca, request).ok()?.end();
    let rings = prepare::rings(hca, objects, &request.region, end).ok()?;
    Some(Prepared::SrqRing(*request, rings))
}

/// Begins the move of a RESIZE_SRQ whose new region was found.
pub(super) fn begin_move(
    hca: &Hca,
    request: &virtio_rdma_cmd_resize_srq,
    pages: Pages,
    region: Box<[Range]>,
) -> Result<Prepared, Status> {
    let slot = hca.srq_slot_of(request.srqn).ok_or(Status::NoObject)?;
    let shape = resized_shape(hca, request)?;
    let begun = with_srq(hca, request.srqn, |srq| srq.begin_resize(pages, region, shape))?;
    Ok(Prepared::MovingSrq(slot, resized(hca, slot, begun)?))
}

/// Moves some work requests of a RESIZE_SRQ, and returns how many.
pub(super) fn move_some(hca: &Hca, slot: Slot, moving: &mut MovingSrq) -> Result<u32, Status> {
    hca.with_srq(slot, |srq| srq.move_some(moving, MOVED)).flatten().ok_or(Status::Invalid)
}

/// Handles RESIZE_SRQ, whose work requests were moved but for the last.
pub(super) fn resize(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_resize_srq,
) -> Result<virtio_rdma_rsp_resize_srq, Status> {
    let (hca, objects) = (call.hca, &mut *call.objects);
    let slot = hca.srq_slot_of(request.srqn).ok_or(Status::NoObject)?;
    let shape = resized_shape(hca, request)?;
    let moving = match std::mem::take(&mut call.prepared) {
        Prepared::MovingSrq(_, moving) => moving,
        other => {
            let (region, end) = (&request.region, shape.end());
            return Err(prepare::why_not(hca, objects, region, end, &other));
        }
    };
    let new_pages = pages_of(moving.region());
    let (old_pages, done) =
        with_srq(hca, request.srqn, |srq| (pages_of(srq.region()), srq.end_resize(moving, shape)))?;
    let moved = resized(hca, slot, done)?;
    objects.extents = objects.extents + new_pages - old_pages;
    // The owner is asked for doorbells as it was at the old ring.
    if hca.with_srq(slot, Srq::sleep_again) == Some(true) {
        hca.make_ready(hca.jobs.srq(slot));
    }
    Ok(virtio_rdma_rsp_resize_srq { moved })
}

/// Returns what becomes of a RESIZE_SRQ: an SRQ whose old ring is wrong fails.
fn resized<T>(hca: &Hca, slot: Slot, result: Result<Option<T>, SrqError>) -> Result<T, Status> {
    let resized = result.map_err(|error| {
        if error != SrqError::InError {
            hca.stats.guest_error(Counter::BadReceiveChain, error);
            fail_srq(hca, slot);
        }
        Status::State
    })?;
    resized.ok_or(Status::Invalid)
}

/// Prepares DESTROY_SRQ of an SRQ for XRC, if nothing refuses its end: parts it from all targets.
pub(super) fn prepare_destroy(
    hca: &Hca,
    _: &Objects,
    request: &virtio_rdma_cmd_destroy_srq,
) -> Option<Prepared> {
    let slot = hca.srq_slot_of(request.srqn)?;
    let ends = hca.with_srq(slot, Srq::begin_end)?;
    ends.then_some(Prepared::SrqEnd(slot, 0))
}

/// Handles DESTROY_SRQ.
pub(super) fn destroy(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_destroy_srq,
) -> Result<(), Status> {
    let (hca, objects) = (call.hca, &mut *call.objects);
    let slot = hca.srq_slot_of(request.srqn).ok_or(Status::NoObject)?;
    let mut place = lock(hca.srqs.take(slot));
    let srq = match place.take() {
        Some(srq) if !srq.users.is_empty() => {
            *place = Some(srq);
            return Err(Status::Busy);
        }
        srq => srq.ok_or(Status::NoObject)?,
    };
    drop(place);
    if let Some(XrcSrq { xrcdn, cq }) = srq.config().xrc {
        xrcd::leave(objects, xrcdn);
        lock(hca.cqs.take(cq)).users.remove(User::Srq(slot));
    }
    objects.extents -= pages_of(srq.region());
    objects.srqs -= 1;
    objects.srq_slots.give_back(slot);
    objects.pds.leave(srq.config().pdn);
    Ok(())
}
