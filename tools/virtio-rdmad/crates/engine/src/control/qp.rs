// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Making and ending queue pairs, on virtqueues and on rings.

use std::sync::Arc;

use abi::{
    virtio_rdma_cmd_create_qp, virtio_rdma_cmd_create_ring_qp, virtio_rdma_cmd_destroy_qp,
    virtio_rdma_rsp_create_qp, VIRTIO_RDMA_QP_CREATE_BLOCK_MCAST_LOOPBACK,
    VIRTIO_RDMA_QP_PRIVILEGED, VIRTIO_RDMA_SIGNAL_ALL_WR, VIRTIO_RDMA_SIGNAL_REQ_WR,
};
use memory::Pages;
use zerocopy::FromZeros;

use super::call::Call;
use super::cq;
use super::objects::Objects;
use super::prepare::{self, Prepared};
use super::quota;
use super::srq::{check_gaps, with_srq};
use super::status::Status;
use super::xrcd;
use crate::base::budget::cost;
use crate::base::limits::{Limits, MAX_SGE};
use crate::base::qp_type::QpType;
use crate::base::slot::Slot;
use crate::base::sync::lock;
use crate::memory::management::release_windows;
use crate::memory::page_list::{pages_of, Range};
use crate::qp::config::QpConfig;
use crate::qp::state::QpState;
use crate::queue::users::User;
use crate::queue::work_queue::WorkQueue;
use crate::queue::wq_ring::{Kind, Shape, WqRing};
use crate::queue::wqe::{receive_entry_len, send_entry_len, WqConfig};
use crate::transport::hca::Hca;
use crate::transport::{requester, srq};

/// Rings of a QP that its guest described well.
struct QpRings {
    pages: Arc<Pages>,
    region: Box<[Range]>,
    send: Shape,
    receive: Shape,
}

impl QpRings {
    /// Returns the two queues, and the region for later.
    fn into_queues(self) -> (WorkQueue, WorkQueue, Box<[Range]>) {
        let Self { pages, region, send, receive } = self;
        let queue = |shape, kind| WorkQueue::Ring(WqRing::new(Arc::clone(&pages), shape, kind));
        (queue(send, Kind::Send), queue(receive, Kind::Receive), region)
    }
}

/// Checks the capabilities of a new QP; `wr` is the most work requests of a queue.
fn check_capabilities(request: &virtio_rdma_cmd_create_qp, wr: u32) -> Result<(), Status> {
    let sge = MAX_SGE as u32;
    let signal = u32::from(request.sq_sig_type);
    let valid = (1..=wr).contains(&request.max_send_wr)
        && (1..=sge).contains(&request.max_send_sge)
        && request.max_recv_wr <= wr
        && request.max_recv_sge <= sge
        && matches!(signal, VIRTIO_RDMA_SIGNAL_ALL_WR | VIRTIO_RDMA_SIGNAL_REQ_WR);
    if valid {
        Ok(())
    } else {
        Err(Status::Invalid)
    }
}

/// Returns the type of a new QP, if driver and device agreed on the features that the type needs.
fn qp_type(hca: &Hca, request: &virtio_rdma_cmd_create_qp) -> Result<QpType, Status> {
    let kind = QpType::from_abi(request.qp_type).ok_or(Status::Unsupported)?;
    let is_offered = match kind {
        QpType::Uc => hca.features.has_uc(),
        QpType::XrcIni | QpType::XrcTgt => hca.features.has_xrc(),
        QpType::Gsi | QpType::Rc | QpType::Ud => true,
    };
    if is_offered {
        Ok(kind)
    } else {
        Err(Status::Unsupported)
    }
}

/// Returns the configuration of a new QP, if its PD and CQs exist.
fn qp_config(
    hca: &Hca,
    objects: &Objects,
    kind: QpType,
    request: &virtio_rdma_cmd_create_qp,
) -> Result<QpConfig, Status> {
    objects.pds.require(request.pdn)?;
    let flags = u32::from(request.create_flags);
    let known = match kind {
        QpType::Ud if hca.features.has_mcast() => VIRTIO_RDMA_QP_CREATE_BLOCK_MCAST_LOOPBACK,
        _ => 0,
    };
    if flags & !known != 0 {
        return Err(Status::Unsupported);
    }
    let send_cq = cq::index_of(hca, request.send_cqn)?;
    Ok(QpConfig {
        wq: WqConfig {
            kind,
            max_send_sge: request.max_send_sge as usize,
            max_recv_sge: request.max_recv_sge as usize,
            max_inline: request.max_inline_data as usize,
        },
        pdn: request.pdn,
        xrcdn: 0,
        srq: None,
        recv_pdn: request.pdn,
        send_cq,
        recv_cq: if kind.is_xrc() { send_cq } else { cq::index_of(hca, request.recv_cqn)? },
        signal_all: u32::from(request.sq_sig_type) == VIRTIO_RDMA_SIGNAL_ALL_WR,
        // Virtqueues are written by the kernel alone.
        privileged: hca.features.has_virtqueues(),
        block_loopback: flags & VIRTIO_RDMA_QP_CREATE_BLOCK_MCAST_LOOPBACK != 0,
    })
}

/// Handles CREATE_QP.
pub(super) fn create(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_create_qp,
) -> Result<virtio_rdma_rsp_create_qp, Status> {
    let (hca, objects) = (call.hca, &mut *call.objects);
    let kind = qp_type(hca, request)?;
    if request.max_inline_data != 0 {
        return Err(Status::Unsupported);
    }
    check_capabilities(request, hca.limits.wq_size.into())?;
    let config = qp_config(hca, objects, kind, request)?;
    let slot = free_slot(hca, objects, kind)?;
    check_virtqueues(hca, slot, request)?;
    occupy(hca, slot, request, config, None);
    Ok(attach(hca, objects, slot, config))
}

/// Returns a place for a QP on virtqueues: the first for the GSI, any other for the
/// rest.
fn free_slot(hca: &Hca, objects: &mut Objects, kind: QpType) -> Result<Slot, Status> {
    quota::check(objects.qps as usize, hca.quota().qps)?;
    let is_free = |slot: Slot| {
        let requester = lock(&hca.qps.take(slot).requester);
        requester.config.is_none() && requester.queue.size() != 0
    };
    if kind == QpType::Gsi {
        let taken = lock(&hca.qps.take(Slot::GSI).requester).config.is_some();
        return match (taken, is_free(Slot::GSI)) {
            (true, _) => Err(Status::Busy),
            (false, true) => Ok(Slot::GSI),
            (false, false) => Err(Status::NoResource),
        };
    }
    let (first, end) = (objects.next_slot, hca.limits.max_qp);
    let slot = (first..end).chain(1..first).find(|slot| *slot < end && is_free(Slot::from(*slot)));
    let slot = slot.ok_or(Status::NoResource)?;
    objects.next_slot = slot + 1;
    Ok(Slot::from(slot))
}

/// Fails if the virtqueues of a place are shorter than the QP needs.
fn check_virtqueues(
    hca: &Hca,
    slot: Slot,
    request: &virtio_rdma_cmd_create_qp,
) -> Result<(), Status> {
    let qp = hca.qps.take(slot);
    if request.max_send_wr > lock(&qp.requester).queue.size().into()
        || request.max_recv_wr > lock(&qp.responder).queue.size().into()
    {
        return Err(Status::Invalid);
    }
    Ok(())
}

/// Makes a QP in its place.
fn occupy(
    hca: &Hca,
    slot: Slot,
    request: &virtio_rdma_cmd_create_qp,
    config: QpConfig,
    rings: Option<QpRings>,
) {
    let qp = hca.qps.take(slot);
    let mut requester = lock(&qp.requester);
    let mut responder = lock(&qp.responder);
    if let Some(rings) = rings {
        let (send, receive, region) = rings.into_queues();
        (requester.queue, requester.region, responder.queue) = (send, region, receive);
    }
    requester.reset();
    responder.reset();
    let cap = &mut responder.attr.cap;
    cap.max_send_wr = request.max_send_wr;
    cap.max_send_sge = request.max_send_sge;
    cap.max_recv_wr = request.max_recv_wr;
    cap.max_recv_sge = request.max_recv_sge;
    cap.max_inline_data = request.max_inline_data;
    qp.set_state(&mut responder, QpState::Reset);
    let is_observed = hca.is_observed(slot);
    (requester.observed, responder.observed) = (is_observed, is_observed);
    requester.config = Some(config);
    qp.configure(&mut responder, Some(config));
    // Receives are found when they are needed.
    responder.notify = false;
    responder.queue.disable_notify();
}

/// Notes that a new QP uses its PD or XRC domain, its CQs and its SRQ; returns the reply that names it.
fn attach(
    hca: &Hca,
    objects: &mut Objects,
    slot: Slot,
    config: QpConfig,
) -> virtio_rdma_rsp_create_qp {
    for cq in config.own_cqs() {
        lock(hca.cqs.take(cq)).users.insert(User::Qp(slot));
    }
    if let Some(srq) = config.srq {
        hca.with_srq(srq, |srq| srq.users.insert(User::Qp(slot)));
    }
    match config.own_pdn() {
        Some(pdn) => objects.pds.enter(pdn),
        None => xrcd::enter(objects, config.xrcdn),
    }
    objects.qps += 1;
    virtio_rdma_rsp_create_qp { qpn: slot.number() }
}

/// Notes that a QP that is gone uses nothing any more.
fn detach(hca: &Hca, objects: &mut Objects, slot: Slot, config: QpConfig) {
    for cq in config.own_cqs() {
        lock(hca.cqs.take(cq)).users.remove(User::Qp(slot));
    }
    if let Some(srq) = config.srq {
        hca.with_srq(srq, |srq| srq.users.remove(User::Qp(slot)));
    }
    match config.own_pdn() {
        Some(pdn) => objects.pds.leave(pdn),
        None => xrcd::leave(objects, config.xrcdn),
    }
    objects.qps -= 1;
}

/// Returns the shapes of the send and the receive ring, whose region has no more pages than they and
/// its head need.
fn shapes(
    limits: &Limits,
    request: &virtio_rdma_cmd_create_ring_qp,
) -> Result<(Shape, Shape), Status> {
    let base = &request.base;
    let kind = QpType::from_abi(base.qp_type).ok_or(Status::Unsupported)?;
    if base.max_inline_data > limits.inline_data.into() {
        return Err(Status::Invalid);
    }
    check_capabilities(base, limits.ring_wr)?;
    let (sges, inline) = (base.max_send_sge as usize, base.max_inline_data as usize);
    let most = limits.ring_wr;
    let send_len = send_entry_len(kind, sges, inline);
    let send = Shape::check(&request.sq, base.max_send_wr, most, send_len);
    let receive_len = receive_entry_len(base.max_recv_sge as usize);
    let receive = Shape::check(&request.rq, base.max_recv_wr, most, receive_len);
    let (send, receive) = send.zip(receive).ok_or(Status::Invalid)?;
    check_gaps(&[send, receive])?;
    Ok((send, receive))
}

/// Prepares CREATE_RING_QP: finds the pages of its rings.
pub(super) fn prepare_ring(
    hca: &Hca,
    objects: &Objects,
    request: &virtio_rdma_cmd_create_ring_qp,
) -> Option<Prepared> {
    let (send, receive) = shapes(&hca.limits, request).ok()?;
    let end = send.end().max(receive.end());
    prepare::rings(hca, objects, &request.region, end).map(Prepared::Rings).ok()
}

/// Handles CREATE_RING_QP.
pub(super) fn create_ring(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_create_ring_qp,
) -> Result<virtio_rdma_rsp_create_qp, Status> {
    let (hca, objects) = (call.hca, &mut *call.objects);
    let base = &request.base;
    let kind = qp_type(hca, base)?;
    if kind == QpType::XrcTgt {
        return create_xrc_target(hca, objects, request);
    }
    let (send, receive) = shapes(&hca.limits, request)?;
    let receives_nothing = kind == QpType::XrcIni;
    if request.flags & !VIRTIO_RDMA_QP_PRIVILEGED != 0 || receives_nothing && receive.depth != 0 {
        return Err(Status::Invalid);
    }
    let mut config = qp_config(hca, objects, kind, base)?;
    config.privileged = request.flags & VIRTIO_RDMA_QP_PRIVILEGED != 0;
    if hca.features.has_srqs() && request.srqn != 0 {
        if kind == QpType::Gsi || receives_nothing || receive.depth != 0 {
            return Err(Status::Invalid);
        }
        use_srq(hca, &mut config, request.srqn)?;
    }
    let end = send.end().max(receive.end());
    let prepared = std::mem::take(&mut call.prepared);
    let (pages, region) = prepare::found_rings(hca, objects, &request.region, end, prepared)?;
    let slot = free_ring_slot(hca, objects, kind)?;
    objects.extents += pages_of(&region);
    let rings = QpRings { pages: Arc::new(pages), region, send, receive };
    occupy(hca, slot, base, config, Some(rings));
    Ok(attach(hca, objects, slot, config))
}

/// Makes a new QP receive from an SRQ. Refuses an SRQ for XRC.
fn use_srq(hca: &Hca, config: &mut QpConfig, srqn: u32) -> Result<(), Status> {
    let srq = with_srq(hca, srqn, |srq| *srq.config())?;
    if srq.xrc.is_some() {
        return Err(Status::Invalid);
    }
    config.srq = hca.srq_slot_of(srqn);
    (config.recv_pdn, config.wq.max_recv_sge) = (srq.pdn, srq.max_sge);
    Ok(())
}

/// Handles CREATE_RING_QP of an XRC target: it belongs to a domain, and has
/// nothing besides.
fn create_xrc_target(
    hca: &Hca,
    objects: &mut Objects,
    request: &virtio_rdma_cmd_create_ring_qp,
) -> Result<virtio_rdma_rsp_create_qp, Status> {
    if request.base.create_flags != 0 {
        return Err(Status::Unsupported);
    }
    let rings = request.sq.depth != 0 || request.rq.depth != 0 || request.region.npages != 0;
    if rings || request.srqn != 0 || request.flags != 0 {
        return Err(Status::Invalid);
    }
    xrcd::require(objects, request.xrcdn)?;
    let slot = free_ring_slot(hca, objects, QpType::XrcTgt)?;
    let config = QpConfig::xrc_target(request.xrcdn);
    occupy(hca, slot, &virtio_rdma_cmd_create_qp::new_zeroed(), config, None);
    Ok(attach(hca, objects, slot, config))
}

/// Returns a place for a QP with rings: the first for the GSI, any other for the rest.
fn free_ring_slot(hca: &Hca, objects: &mut Objects, kind: QpType) -> Result<Slot, Status> {
    quota::check(objects.qps as usize, hca.quota().qps)?;
    if kind != QpType::Gsi {
        return objects.ring_slots.take().ok_or(Status::NoResource);
    }
    let taken = lock(&hca.qps.take(Slot::GSI).requester).config.is_some();
    if taken {
        return Err(Status::Busy);
    }
    Ok(Slot::GSI)
}

/// Prepares DESTROY_QP, if nothing refuses the end of the QP: frees its windows.
pub(super) fn prepare_destroy(
    hca: &Hca,
    _: &Objects,
    request: &virtio_rdma_cmd_destroy_qp,
) -> Option<Prepared> {
    if !hca.features.has_mws() {
        return None;
    }
    let slot = hca.slot_of(request.qpn)?;
    let qp = hca.qps.get(slot)?;
    let exists = lock(&qp.requester).config.is_some();
    let may_end = exists && lock(&qp.responder).groups.is_empty();
    may_end.then_some(Prepared::QpEnd(slot))
}

/// Parts the QP in place `slot`, which is to end, from its peer: it neither sends nor answers any
/// more. Returns the nanoseconds that this has cost.
pub(super) fn part(hca: &Arc<Hca>, slot: Slot) -> u64 {
    let cost = requester::last_visit(hca, slot);
    let qp = hca.qps.take(slot);
    qp.set_state(&mut lock(&qp.responder), QpState::Reset);
    cost
}

/// Handles DESTROY_QP.
pub(super) fn destroy(
    call: &mut Call<'_>,
    request: &virtio_rdma_cmd_destroy_qp,
) -> Result<(), Status> {
    let (hca, objects) = (call.hca, &mut *call.objects);
    let slot = hca.slot_of(request.qpn).ok_or(Status::NoObject)?;
    call.budget.work(requester::last_visit(hca, slot));
    let qp = hca.qps.take(slot);
    let mut requester = lock(&qp.requester);
    if !lock(&qp.responder).groups.is_empty() {
        return Err(Status::Busy);
    }
    let config = requester.config.take().ok_or(Status::NoObject)?;
    requester.reset();
    let region = std::mem::take(&mut requester.region);
    requester.queue.drain();
    requester.queue.remove_ring();
    drop(requester);
    hca.set_timer(slot, None);
    let mut responder = lock(&qp.responder);
    srq::leave(hca, slot, &mut responder);
    qp.configure(&mut responder, None);
    responder.rouse();
    responder.reset();
    qp.set_state(&mut responder, QpState::Reset);
    responder.queue.drain();
    responder.queue.remove_ring();
    drop(responder);
    // There are few more than when the command began, or it had gone on.
    loop {
        match release_windows(&hca.keys, slot) {
            0 => break,
            count => call.budget.work(count * cost::OBJECT),
        }
    }
    objects.extents -= pages_of(&region);
    if hca.features.has_rings() && slot != Slot::GSI {
        objects.ring_slots.give_back(slot);
    }
    detach(hca, objects, slot, config);
    Ok(())
}
