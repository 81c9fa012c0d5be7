// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Shared receive queues (IBA 10.2.9; specification, 13.6).

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use abi::{
    virtio_rdma_cmd_create_srq, virtio_rdma_cmd_destroy_srq, virtio_rdma_cmd_modify_srq,
    virtio_rdma_cmd_query_srq, virtio_rdma_cmd_resize_srq, virtio_rdma_qp_ring,
    virtio_rdma_ring_shape, virtio_rdma_rsp_create_srq, virtio_rdma_rsp_query_srq,
    virtio_rdma_rsp_resize_srq, virtio_rdma_srq_ring, VIRTIO_RDMA_EVENT_SRQ_ERR,
    VIRTIO_RDMA_EVENT_SRQ_LIMIT_REACHED,
};
use memory::Pages;
use zerocopy::FromZeros;

use crate::base::counters::{Counter, SrqStatus};
use crate::base::sync::lock;
use crate::config::MAX_SGE;
use crate::control::prepare::{Prepared, MOVED};
use crate::control::queue::{unuse_pd, use_pd, Control, Status};
use crate::control::rings::{check_gaps, pages_of};
use crate::device::Shared;
use crate::memory::mr::Range;
use crate::qp::halves::Responder;
use crate::queue::users::{User, Users};
use crate::queue::wq_ring::{Kind, MovingWq, Shape, WqRing, WqRingError};
use crate::queue::wqe::{receive_entry_len, Malformed, ReceiveWqe};
use crate::transport::turn::{cost, Turn};

// `Shape::check` keeps entries out of the head of either kind of region.
const _: () = assert!(size_of::<virtio_rdma_srq_ring>() == size_of::<virtio_rdma_qp_ring>());

/// Why an SRQ gives no more work requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SrqError {
    /// Its ring is none.
    #[error(transparent)]
    Ring(#[from] WqRingError),
    /// It is in error already.
    #[error("the SRQ is in error")]
    InError,
}

/// What an SRQ for XRC has besides.
#[derive(Clone, Copy)]
pub(crate) struct XrcSrq {
    /// Its domain.
    pub xrcdn: u32,
    /// The CQ of its completions.
    pub cq: u16,
}

/// An SRQ.
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own
pub(crate) struct Srq {
    pdn: u32,
    /// If it is for XRC.
    xrc: Option<XrcSrq>,
    max_wr: u32,
    max_sge: usize,
    ring: WqRing,
    region: Box<[Range]>,
    /// SRQ_LIMIT_REACHED is due when fewer work requests than this wait; 0: never.
    limit: u32,
    /// No work request is taken any more.
    in_error: bool,
    /// DESTROY_SRQ is under way: no target receives from here any more.
    ends: bool,
    /// QPs that receive from here.
    users: Users,
    /// The owner was asked for a doorbell.
    asleep: bool,
    /// Places of the QPs that wait for a work request.
    waiting: BTreeSet<u16>,
    /// Places of those that waited, and are to look again.
    roused: BTreeSet<u16>,
    /// Work requests that QPs took and did not complete before they were reset or
    /// destroyed. They are taken first, so there are never more than QPs.
    returned: VecDeque<ReceiveWqe>,
}

/// The ring that an SRQ moves to.
pub(crate) struct MovingSrq {
    region: Box<[Range]>,
    ring: MovingWq,
}

impl Srq {
    /// Takes the next work request into `wqe`, for the QP in place `slot`. If there
    /// is none and the QP `waits`, its owner is asked for a doorbell, which
    /// rouses the QP.
    fn take(
        &mut self,
        slot: u16,
        waits: bool,
        wqe: &mut ReceiveWqe,
    ) -> Result<Option<Result<(), Malformed>>, SrqError> {
        if self.in_error {
            return Err(SrqError::InError);
        }
        if let Some(returned) = self.returned.pop_front() {
            *wqe = returned;
            self.stop_waiting(slot);
            return Ok(Some(Ok(())));
        }
        // Asked to be told: once, whatever the index does meanwhile.
        let mut asked = false;
        loop {
            if let Some((index, entry)) = self.ring.pop()? {
                let read = wqe.read_entry(index, entry, self.max_sge);
                self.ring.publish_consumer();
                self.stop_waiting(slot);
                return Ok(Some(read));
            }
            if asked || !waits {
                return Ok(None);
            }
            asked = true;
            self.asleep = true;
            self.waiting.insert(slot);
            if !self.ring.sleep() {
                return Ok(None);
            }
        }
    }

    /// The QP in place `slot` waits no longer. The owner is asked for doorbells as
    /// long as another one does: what it posts then would wake nobody.
    fn stop_waiting(&mut self, slot: u16) {
        self.waiting.remove(&slot);
        if self.asleep && self.waiting.is_empty() {
            self.asleep = false;
            self.ring.wake_up();
        }
    }

    /// The QPs that wait are to look again, each once, and wait again if they must. `false` while
    /// others are that did so before.
    fn rouse(&mut self) -> bool {
        let is_free = self.roused.is_empty();
        if is_free {
            std::mem::swap(&mut self.waiting, &mut self.roused);
        }
        is_free
    }

    /// The next QP that is to look again.
    fn next_roused(&mut self) -> Option<u16> {
        self.roused.pop_first()
    }

    /// Begins to move to another ring; `None` if the work requests that wait, or the limit, do not
    /// fit there.
    fn begin_resize(&mut self, pages: Pages, shape: Shape) -> Result<Option<MovingWq>, SrqError> {
        if self.in_error {
            return Err(SrqError::InError);
        }
        if self.limit > shape.depth {
            return Ok(None);
        }
        Ok(self.ring.begin_move(pages, shape, receive_entry_len(self.max_sge))?)
    }

    /// Goes on in the other ring; how many work requests were moved. `None`, and nothing is changed,
    /// if they do not fit there.
    fn end_resize(
        &mut self,
        moving: MovingWq,
        region: Box<[Range]>,
        shape: Shape,
    ) -> Result<Option<u32>, SrqError> {
        if self.in_error {
            return Err(SrqError::InError);
        }
        let moved = self.ring.end_move(moving)?;
        if moved.is_some() {
            (self.max_wr, self.region) = (shape.depth, region);
        }
        Ok(moved)
    }

    /// What its region is made of.
    pub fn region(&self) -> &[Range] {
        &self.region
    }

    /// How many QPs receive from here.
    pub fn users(&self) -> usize {
        self.users.len()
    }

    /// Work requests that wait to be taken.
    fn left(&self) -> u32 {
        self.ring.waiting().saturating_add(self.returned.len() as u32)
    }

    /// Whether SRQ_LIMIT_REACHED is due; it is so once.
    fn take_limit_reached(&mut self) -> bool {
        let reached = self.limit != 0 && self.left() < self.limit;
        if reached {
            self.limit = 0;
        }
        reached
    }
}

impl Shared {
    /// The place of an SRQ number, if there was one ever.
    pub fn srq_slot_of(&self, srqn: u32) -> Option<u16> {
        let slot = u16::try_from(srqn.checked_sub(1)?).ok()?;
        self.srqs.get(slot).map(|_| slot)
    }

    /// Calls `f` with a live SRQ.
    fn with_srq<R>(&self, srqn: u32, f: impl FnOnce(&mut Srq) -> R) -> Result<R, Status> {
        let slot = self.srq_slot_of(srqn).ok_or(Status::NoObject)?;
        self.in_srq_slot(slot, f).ok_or(Status::NoObject)
    }

    /// The same by its place.
    fn in_srq_slot<R>(&self, slot: u16, f: impl FnOnce(&mut Srq) -> R) -> Option<R> {
        lock(self.srqs.get(slot)?).as_mut().map(f)
    }

    /// The shape of the ring of an SRQ, whose region has no more pages than it and its head need.
    pub(crate) fn srq_shape(
        &self,
        ring: &virtio_rdma_ring_shape,
        max_sge: usize,
    ) -> Result<Shape, Status> {
        if max_sge > MAX_SGE {
            return Err(Status::Invalid);
        }
        let shape = Shape::check(ring, 1, self.limits.ring_wr, receive_entry_len(max_sge));
        let shape = shape.ok_or(Status::Invalid)?;
        check_gaps(&[shape])?;
        Ok(shape)
    }

    /// The same of RESIZE_SRQ.
    pub(crate) fn resized_shape(
        &self,
        request: &virtio_rdma_cmd_resize_srq,
    ) -> Result<Shape, Status> {
        let max_sge = self.with_srq(request.srqn, |srq| srq.max_sge)?;
        self.srq_shape(&request.ring, max_sge)
    }

    /// Handles CREATE_SRQ.
    pub(crate) fn create_srq(
        &self,
        control: &mut Control,
        request: &virtio_rdma_cmd_create_srq,
        prepared: Prepared,
    ) -> Result<virtio_rdma_rsp_create_srq, Status> {
        control.require_pd(request.pdn)?;
        let max_sge = request.max_sge as usize;
        let shape = self.srq_shape(&request.ring, max_sge)?;
        let xrc = self.xrc_of_srq(control, request.xrcdn, request.cqn)?;
        let (pages, region) = self.region(control, &request.region, shape.end(), prepared)?;
        let slot = control.srq_slots.take().ok_or(Status::NoResource)?;
        control.extents += pages_of(&region);
        use_pd(control, request.pdn);
        if let Some(XrcSrq { xrcdn, cq }) = xrc {
            control.use_xrcd(xrcdn);
            lock(self.cqs.take(cq)).users.insert(User::Srq(slot));
        }
        let srq = Srq {
            pdn: request.pdn,
            xrc,
            max_wr: shape.depth,
            max_sge,
            ring: WqRing::new(Arc::new(pages), shape, Kind::Shared),
            region,
            limit: 0,
            in_error: false,
            ends: false,
            users: Users::default(),
            asleep: false,
            waiting: BTreeSet::new(),
            roused: BTreeSet::new(),
            returned: VecDeque::new(),
        };
        *lock(self.srqs.take(slot)) = Some(srq);
        Ok(virtio_rdma_rsp_create_srq { srqn: u32::from(slot) + 1 })
    }

    /// Handles MODIFY_SRQ: sets the limit, which may be reached already.
    pub(crate) fn modify_srq(&self, request: &virtio_rdma_cmd_modify_srq) -> Result<(), Status> {
        let (srqn, limit) = (request.srqn, request.srq_limit);
        let reached = self.with_srq(srqn, |srq| {
            if limit > srq.max_wr {
                return Err(Status::Invalid);
            }
            if srq.in_error {
                return Err(Status::State);
            }
            srq.limit = limit;
            Ok(srq.take_limit_reached())
        })??;
        if reached {
            self.raise(VIRTIO_RDMA_EVENT_SRQ_LIMIT_REACHED, srqn);
        }
        Ok(())
    }

    /// Handles QUERY_SRQ.
    pub(crate) fn query_srq(
        &self,
        request: &virtio_rdma_cmd_query_srq,
    ) -> Result<virtio_rdma_rsp_query_srq, Status> {
        self.with_srq(request.srqn, |srq| {
            let mut reply = virtio_rdma_rsp_query_srq::new_zeroed();
            reply.max_wr = srq.max_wr;
            reply.max_sge = srq.max_sge as u32;
            reply.srq_limit = srq.limit;
            reply
        })
    }

    /// Handles RESIZE_SRQ, whose work requests were moved but for the last.
    pub(crate) fn resize_srq(
        &self,
        control: &mut Control,
        request: &virtio_rdma_cmd_resize_srq,
        prepared: Prepared,
    ) -> Result<virtio_rdma_rsp_resize_srq, Status> {
        let slot = self.srq_slot_of(request.srqn).ok_or(Status::NoObject)?;
        let shape = self.resized_shape(request)?;
        let (region, moving) = match prepared {
            Prepared::Srq(_, MovingSrq { region, ring }) => (region, ring),
            other => return Err(self.why_not(control, &request.region, shape.end(), &other)),
        };
        let new_pages = pages_of(&region);
        let (old_pages, resized) = self.with_srq(request.srqn, |srq| {
            (pages_of(&srq.region), srq.end_resize(moving, region, shape))
        })?;
        let moved = self.resized(slot, resized)?;
        control.extents = control.extents + new_pages - old_pages;
        // The owner is asked for doorbells as it was at the old ring.
        let awaited = self.in_srq_slot(slot, |srq| srq.asleep && srq.ring.sleep());
        if awaited == Some(true) {
            self.make_hot(self.jobs.srq(slot));
        }
        Ok(virtio_rdma_rsp_resize_srq { moved })
    }

    /// What becomes of a RESIZE_SRQ: an SRQ whose old ring is wrong fails.
    fn resized<T>(&self, slot: u16, result: Result<Option<T>, SrqError>) -> Result<T, Status> {
        let resized = result.map_err(|error| {
            if error != SrqError::InError {
                self.complain(Counter::BadReceiveChain, &error);
                self.fail_srq(slot);
            }
            Status::State
        })?;
        resized.ok_or(Status::Invalid)
    }

    /// Begins a RESIZE_SRQ whose new region was found.
    pub(crate) fn begin_resize_srq(
        &self,
        request: &virtio_rdma_cmd_resize_srq,
        pages: Pages,
        region: Box<[Range]>,
    ) -> Result<(u16, MovingSrq), Status> {
        let slot = self.srq_slot_of(request.srqn).ok_or(Status::NoObject)?;
        let shape = self.resized_shape(request)?;
        let begun = self.with_srq(request.srqn, |srq| srq.begin_resize(pages, shape))?;
        let ring = self.resized(slot, begun)?;
        Ok((slot, MovingSrq { region, ring }))
    }

    /// Moves some work requests of a RESIZE_SRQ; how many.
    pub(crate) fn move_receives(&self, slot: u16, moving: &mut MovingSrq) -> Result<u32, Status> {
        let moved = self.in_srq_slot(slot, |srq| srq.ring.move_some(&mut moving.ring, MOVED));
        moved.flatten().ok_or(Status::Invalid)
    }

    /// Handles DESTROY_SRQ.
    pub(crate) fn destroy_srq(
        &self,
        control: &mut Control,
        request: &virtio_rdma_cmd_destroy_srq,
    ) -> Result<(), Status> {
        let slot = self.srq_slot_of(request.srqn).ok_or(Status::NoObject)?;
        let mut place = lock(self.srqs.take(slot));
        let srq = match place.take() {
            Some(srq) if !srq.users.is_empty() => {
                *place = Some(srq);
                return Err(Status::Busy);
            }
            srq => srq.ok_or(Status::NoObject)?,
        };
        drop(place);
        if let Some(XrcSrq { xrcdn, cq }) = srq.xrc {
            control.unuse_xrcd(xrcdn);
            lock(self.cqs.take(cq)).users.remove(User::Srq(slot));
        }
        control.extents -= pages_of(&srq.region);
        control.srq_slots.give_back(slot);
        unuse_pd(control, srq.pdn);
        Ok(())
    }

    /// Begins the end of an SRQ for XRC, if nothing refuses it; its place. From now on no target finds
    /// it.
    pub(crate) fn begin_srq_end(&self, srqn: u32) -> Option<u16> {
        let slot = self.srq_slot_of(srqn)?;
        let ends = self.in_srq_slot(slot, |srq| {
            srq.ends = srq.xrc.is_some() && srq.users.is_empty();
            srq.ends
        })?;
        ends.then_some(slot)
    }

    /// An SRQ for XRC ends: the target in place `slot` is not in the middle of a message for it, and
    /// whoever sent one finds that out. Whether there was a QP ever.
    pub(crate) fn abandon_srq(&self, srq: u16, slot: u16) -> bool {
        let Some(qp) = self.qps.get(slot) else { return false };
        let mut responder = lock(&qp.responder);
        if responder.config.is_some_and(|config| config.srq == Some(srq)) {
            responder.has_receive = false;
            responder.deselect();
            if let Some((device, slot)) = responder.waiter.take() {
                drop(responder);
                device.make_hot(device.jobs.send(slot));
            }
        }
        true
    }

    /// PD and CQ of the SRQ in a place, if that is one for XRC of this domain.
    pub(crate) fn xrc_srq(&self, srq: u16, xrcdn: u32) -> Option<(u32, u16)> {
        self.in_srq_slot(srq, |srq| {
            let xrc = srq.xrc.filter(|xrc| xrc.xrcdn == xrcdn && !srq.ends)?;
            Some((srq.pdn, xrc.cq))
        })?
    }

    /// What a QP needs to know of the SRQ that it is created with, which is none for
    /// XRC: its place, its PD and the SGEs of its work requests.
    pub(crate) fn srq_config(&self, srqn: u32) -> Result<(u16, u32, usize), Status> {
        let slot = self.srq_slot_of(srqn).ok_or(Status::NoObject)?;
        self.with_srq(srqn, |srq| match srq.xrc {
            Some(_) => Err(Status::Invalid),
            None => Ok((slot, srq.pdn, srq.max_sge)),
        })?
    }

    /// The QP in place `slot` receives from an SRQ.
    pub(crate) fn attach_srq(&self, srq: u16, slot: u16) {
        self.in_srq_slot(srq, |srq| srq.users.insert(User::Qp(slot)));
    }

    /// It does no more, and has left the SRQ before.
    pub(crate) fn detach_srq(&self, srq: u16, slot: u16) {
        self.in_srq_slot(srq, |srq| srq.users.remove(User::Qp(slot)));
    }

    /// Takes a work request of an SRQ into the place of the responder's, which,
    /// if it `waits`, is woken when there is one.
    pub(crate) fn take_shared(
        &self,
        slot: u16,
        srq: u16,
        responder: &mut Responder,
        waits: bool,
    ) -> Result<Option<Result<(), Malformed>>, SrqError> {
        let wqe = &mut responder.receive;
        let (taken, limit) = self
            .in_srq_slot(srq, |srq| (srq.take(slot, waits, wqe), srq.take_limit_reached()))
            .unwrap_or((Ok(None), false));
        if limit {
            self.raise(VIRTIO_RDMA_EVENT_SRQ_LIMIT_REACHED, u32::from(srq) + 1);
        }
        taken
    }

    /// Puts an SRQ into error, for its owner's doing. Every QP that uses it fails
    /// when the guest's own thread comes to it.
    pub(crate) fn fail_srq(&self, srq: u16) {
        let first = self.in_srq_slot(srq, |srq| {
            let first = !std::mem::replace(&mut srq.in_error, true);
            if first {
                srq.users.fail();
            }
            first
        });
        if first == Some(true) {
            self.raise(VIRTIO_RDMA_EVENT_SRQ_ERR, u32::from(srq) + 1);
            self.make_hot(self.jobs.srq(srq));
        }
    }

    /// The QP in place `slot` is reset or destroyed, or takes no more work requests:
    /// it does not wait for one, and one that it did not complete is taken by
    /// another.
    pub(crate) fn leave_srq(&self, slot: u16, responder: &mut Responder) {
        let Some(srq) = responder.config.and_then(|config| config.srq) else { return };
        let mut unfinished = None;
        if std::mem::take(&mut responder.has_receive) {
            unfinished = Some(std::mem::replace(&mut responder.receive, ReceiveWqe::empty()));
        }
        let awaited = self.in_srq_slot(srq, |srq| {
            srq.returned.extend(unfinished);
            srq.stop_waiting(slot);
            !srq.returned.is_empty() && !srq.waiting.is_empty()
        });
        responder.deselect();
        if awaited == Some(true) {
            self.make_hot(self.jobs.srq(srq));
        }
    }

    /// Looks after an SRQ when its owner rang, or it has failed: whoever waits for
    /// a work request looks again. Whether some are left at the end of the turn. Own thread only.
    pub(crate) fn service_srq(&self, srq: u16, turn: &mut Turn) -> bool {
        let next = || self.in_srq_slot(srq, |srq| srq.users.next_to_fail())?;
        if self.fail_users(turn, next) {
            return true;
        }
        let Some(mut all) = self.in_srq_slot(srq, Srq::rouse) else { return false };
        while !turn.is_over() {
            let Some(slot) = self.in_srq_slot(srq, Srq::next_roused).flatten() else {
                if all {
                    return false;
                }
                // Those that began to wait since the others were roused.
                all = self.in_srq_slot(srq, Srq::rouse) == Some(true);
                continue;
            };
            turn.work(cost::OBJECT);
            let Some(qp) = self.qps.get(slot) else { continue };
            let waiter = lock(&qp.responder).waiter.take();
            if let Some((device, slot)) = waiter {
                device.make_hot(device.jobs.send(slot));
            }
        }
        true
    }

    /// Gives the ring of an SRQ its pages after a change of the memory map; without them, it fails.
    pub(crate) fn set_srq_pages(&self, slot: u16, pages: Option<Arc<Pages>>) {
        let lost = pages.is_none();
        self.in_srq_slot(slot, |srq| srq.ring.set_pages(pages));
        if lost {
            self.complain(Counter::LostRings, &"the ring of an SRQ is not in memory");
            self.fail_srq(slot);
        }
    }

    /// What there is to tell of each SRQ.
    pub(crate) fn srq_status(&self) -> Vec<SrqStatus> {
        let status = |(slot, place): (u16, &std::sync::Mutex<Option<Srq>>)| {
            lock(place).as_ref().map(|srq| SrqStatus {
                srqn: u32::from(slot) + 1,
                receives: srq.left(),
                max_wr: srq.max_wr,
                limit: srq.limit,
                qps: u32::try_from(srq.users.len()).unwrap_or(u32::MAX),
                in_error: srq.in_error,
            })
        };
        self.srqs.iter().filter_map(status).collect()
    }
}
