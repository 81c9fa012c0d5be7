// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Shared receive queues (IBA 10.2.9; specification, Shared receive queues).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use abi::{virtio_rdma_qp_ring, virtio_rdma_srq_ring};
use memory::{GuestMemory, Pages};
use serde::{Deserialize, Serialize};

use super::users::{Failing, Users};
use super::waiters::Waiters;
use super::wq_ring::{Backlog, Kind, MovingWq, Shape, Sizes, WqRing, WqRingError, WqRingImage};
use super::wqe::{receive_entry_len, Popped, ReceiveWqe};
use crate::base::host::Clock;
use crate::base::image::{require, Wrong};
use crate::base::limits::{Limits, MAX_SGE};
use crate::base::slot::Slot;
use crate::memory::page_list::{check_region, find_pages, Range};

// `Shape::check` keeps entries out of the head of either kind of region.
const _: () = assert!(size_of::<virtio_rdma_srq_ring>() == size_of::<virtio_rdma_qp_ring>());

/// The time for which work requests are set aside for QPs that have to come for them. The requester of such a QP may
/// have come to an end meanwhile, or its worker may be late.
const SET_ASIDE: Duration = Duration::from_millis(2);

/// The way in which a QP waits that finds no work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// The QP does not wait, because the message that it was to receive is dropped. So the QP also takes a work request
    /// that was set aside for another QP.
    No,
    /// The requester of the QP asks again by itself.
    AsksAgain,
    /// The QP is roused when there is a work request.
    Roused,
}

/// The reason why an SRQ gives no more work requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SrqError {
    /// The producer of the SRQ went wrong, or its ring is not in memory.
    #[error(transparent)]
    Ring(#[from] WqRingError),
    /// The SRQ is in error already.
    #[error("the SRQ is in error")]
    InError,
}

/// The part of an SRQ that only an SRQ for XRC has.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct XrcSrq {
    /// The XRC domain.
    pub xrcdn: u32,
    /// The CQ of its completions.
    pub cq: u16,
}

/// An SRQ.
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own
pub(crate) struct Srq {
    config: SrqConfig,
    max_wr: u32,
    ring: WqRing,
    region: Box<[Range]>,
    /// SRQ_LIMIT_REACHED is due when fewer work requests than this wait; 0: never.
    limit: u32,
    /// No work request is taken any more.
    in_error: bool,
    /// DESTROY_SRQ is under way: no target receives from here any more.
    ends: bool,
    /// QPs that receive from here.
    pub users: Users,
    /// The owner was asked for a doorbell.
    asleep: bool,
    /// The QPs that wait for a work request.
    waiters: Waiters,
    /// The time at which QPs that have to come by themselves lose the work requests that are set aside for them.
    set_aside_until: Option<Instant>,
    /// Work requests that QPs took and did not complete before they were reset or
    /// destroyed. They are taken first, so there are never more than QPs.
    returned: VecDeque<ReceiveWqe>,
}

/// The ring that an SRQ moves to.
pub(crate) struct MovingSrq {
    region: Box<[Range]>,
    ring: MovingWq,
}

impl MovingSrq {
    /// Returns the ranges of the region of the new ring.
    pub fn region(&self) -> &[Range] {
        &self.region
    }
}

/// The configuration of an SRQ.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct SrqConfig {
    /// The protection domain.
    pub pdn: u32,
    /// The XRC part, if the SRQ is one for XRC.
    pub xrc: Option<XrcSrq>,
    /// SGEs of a work request.
    pub max_sge: usize,
}

/// The image of an SRQ. The QPs that wait for a work request are not in it: a requester that waits asks its peer once
/// more after loading, and so the QP of that peer waits again.
#[derive(Serialize, Deserialize)]
pub(crate) struct SrqImage {
    config: SrqConfig,
    max_wr: u32,
    ring: WqRingImage,
    region: Vec<Range>,
    limit: u32,
    in_error: bool,
    ends: bool,
    failing: Failing,
    asleep: bool,
    returned: Vec<ReceiveWqe>,
}

impl SrqImage {
    /// Returns the SRQ, whose region has `room` pages at most, and which `qps` QPs may use.
    pub fn load(
        self,
        memory: &GuestMemory,
        limits: &Limits,
        room: usize,
        qps: u16,
    ) -> Result<Srq, Wrong> {
        let Self { config, max_wr, ring, region, limit, in_error, ends, .. } = self;
        require(config.max_sge <= MAX_SGE, "its work requests have too many SGEs")?;
        require(limit <= max_wr && max_wr <= limits.ring_wr, "its limit is beyond its size")?;
        require(self.returned.len() <= qps.into(), "too many work requests were given back")?;
        let len = check_region(&region, room)?;
        let pages = ring.has_pages().then(|| find_pages(memory, &region)).transpose()?;
        let entry = receive_entry_len(config.max_sge);
        let sizes = Sizes { least: 1, most: limits.ring_wr, entry };
        let ring = ring.load(Kind::Shared, sizes, len, pages.map(Arc::new).as_ref())?;
        Ok(Srq {
            config,
            max_wr,
            ring,
            region: region.into(),
            limit,
            in_error,
            ends,
            users: Users::load(self.failing),
            asleep: self.asleep,
            waiters: Waiters::default(),
            set_aside_until: None,
            returned: self.returned.into(),
        })
    }
}

impl Srq {
    /// Returns the image. Those that use the SRQ are not in it.
    pub fn save(&self) -> SrqImage {
        SrqImage {
            config: self.config,
            max_wr: self.max_wr,
            ring: self.ring.save(),
            region: self.region.to_vec(),
            limit: self.limit,
            in_error: self.in_error,
            ends: self.ends,
            failing: self.users.save(),
            asleep: self.asleep,
            returned: self.returned.iter().cloned().collect(),
        }
    }

    /// Makes an SRQ whose ring has this shape, in a region of these pages.
    pub fn new(config: SrqConfig, pages: Pages, region: Box<[Range]>, shape: Shape) -> Self {
        Self {
            config,
            max_wr: shape.depth,
            ring: WqRing::new(Arc::new(pages), shape, Kind::Shared),
            region,
            limit: 0,
            in_error: false,
            ends: false,
            users: Users::default(),
            asleep: false,
            waiters: Waiters::default(),
            set_aside_until: None,
            returned: VecDeque::new(),
        }
    }

    /// Takes the next work request into `wqe`, for the QP in place `slot`. Where there are fewer than QPs that wait,
    /// each QP has one in its turn. If there is none for this one and it waits to be roused, the owner is asked for a
    /// doorbell.
    pub fn take(
        &mut self,
        slot: Slot,
        wait: Wait,
        wqe: &mut ReceiveWqe,
        clock: &dyn Clock,
    ) -> Result<Popped, SrqError> {
        if self.in_error {
            return Err(SrqError::InError);
        }
        // It stands in line once, whatever the index does meanwhile.
        let mut is_in_line = wait == Wait::No;
        loop {
            if wait == Wait::No || self.waiters.admit(slot, || self.left() as usize) {
                if let Some(taken) = self.take_next(wqe)? {
                    self.stop_waiting(slot);
                    return Ok(taken);
                }
            }
            if is_in_line {
                return Ok(Popped::Empty);
            }
            is_in_line = true;
            self.stand_in_line(slot, wait, clock.now());
        }
    }

    /// Puts a QP in the line for which there is no work request, before it looks once more.
    fn stand_in_line(&mut self, slot: Slot, wait: Wait, now: Instant) {
        self.forget_late(now);
        self.waiters.join(slot, wait == Wait::AsksAgain);
        self.set_aside_until(now);
        if wait == Wait::Roused {
            self.asleep = true;
            self.ring.sleep();
        }
    }

    /// Takes the next work request, if there is one.
    #[inline]
    fn take_next(&mut self, wqe: &mut ReceiveWqe) -> Result<Option<Popped>, SrqError> {
        if let Some(returned) = self.returned.pop_front() {
            *wqe = returned;
            return Ok(Some(Popped::Taken));
        }
        let Some((index, entry)) = self.ring.pop()? else { return Ok(None) };
        let read = wqe.read_entry(index, entry, self.config.max_sge);
        self.ring.publish_consumer();
        Ok(Some(read.into()))
    }

    /// Notes that the QP in place `slot` waits no longer. The owner is asked for doorbells as long as
    /// another QP waits, because a work request that it posts without one would wake nobody.
    fn stop_waiting(&mut self, slot: Slot) {
        self.waiters.leave(slot);
        if self.asleep && self.waiters.is_none_idle() {
            self.asleep = false;
            self.ring.wake_up();
        }
    }

    /// Returns the next QP that is to look again: there are as many as work requests, and those that wait longest are
    /// first. Of an SRQ in error, all look. If others still wait behind the last one, the owner is asked for a doorbell
    /// once more, because it clears the wake word when it rings.
    pub fn rouse(&mut self, now: Instant) -> Option<Slot> {
        self.forget_late(now);
        let roused = self.rouse_next();
        if roused.is_some() || !self.asleep || self.waiters.is_none_idle() {
            return roused;
        }
        self.ring.sleep();
        // The owner may have posted before it could see the word.
        self.rouse_next()
    }

    fn rouse_next(&mut self) -> Option<Slot> {
        let left = if self.in_error { usize::MAX } else { self.left() as usize };
        self.waiters.rouse(left)
    }

    /// Notes that a QP that was roused cannot look yet: it is roused again. The owner is asked for doorbells, as where
    /// a QP comes to stand in the line: another QP may take the last work request before this one is roused.
    pub fn put_back(&mut self, slot: Slot) {
        if self.waiters.put_back(slot) {
            self.asleep = true;
            self.ring.sleep();
        }
    }

    /// Notes that a QP that was roused cannot look, so that another one does.
    pub fn skip(&mut self, slot: Slot) {
        self.waiters.leave(slot);
    }

    /// Returns until when work requests are set aside for QPs that have to come for them, if some are.
    fn set_aside_until(&mut self, now: Instant) -> Option<Instant> {
        if !self.waiters.has_others() {
            self.set_aside_until = None;
            return None;
        }
        Some(*self.set_aside_until.get_or_insert(now + SET_ASIDE))
    }

    /// Returns when the SRQ is to be visited because others may not have come for what is set aside for them, if QPs
    /// wait for that.
    pub fn next_visit(&mut self, now: Instant) -> Option<Instant> {
        let waits = !self.waiters.is_none_idle() && self.left() != 0;
        self.set_aside_until(now).filter(|_| waits)
    }

    fn forget_late(&mut self, now: Instant) {
        // If many QPs are late, each look forgets some of them.
        if self.set_aside_until.is_some_and(|until| until <= now) && !self.waiters.forget_others() {
            self.set_aside_until = None;
        }
    }

    /// Begins to move to another ring, in a region that was found; `None` if the work requests that
    /// wait, or the limit, do not fit there.
    pub fn begin_resize(
        &mut self,
        pages: Pages,
        region: Box<[Range]>,
        shape: Shape,
    ) -> Result<Option<MovingSrq>, SrqError> {
        if self.in_error {
            return Err(SrqError::InError);
        }
        if self.limit > shape.depth {
            return Ok(None);
        }
        let ring = self.ring.begin_move(pages, shape, receive_entry_len(self.config.max_sge))?;
        Ok(ring.map(|ring| MovingSrq { region, ring }))
    }

    /// Moves up to `most` work requests to the other ring, and returns how many; `None` if they do
    /// not fit there, or one of the two rings is not in memory.
    pub fn move_some(&self, moving: &mut MovingSrq, most: u32) -> Option<u32> {
        self.ring.move_some(&mut moving.ring, most)
    }

    /// Goes on in the other ring, which has this shape, and returns how many work requests were
    /// moved. `None`, and nothing is changed, if they do not fit there.
    pub fn end_resize(&mut self, moving: MovingSrq, shape: Shape) -> Result<Option<u32>, SrqError> {
        if self.in_error {
            return Err(SrqError::InError);
        }
        let MovingSrq { region, ring } = moving;
        let moved = self.ring.end_move(ring)?;
        if moved.is_some() {
            (self.max_wr, self.region) = (shape.depth, region);
        }
        Ok(moved)
    }

    /// Asks the owner for a doorbell in the new ring, if it was asked in the old one; whether there
    /// is a work request already.
    pub fn sleep_again(&mut self) -> bool {
        self.asleep && self.ring.sleep()
    }

    /// Follows a change of the memory map; with `None`, the ring is not in memory.
    pub fn set_pages(&mut self, pages: Option<Arc<Pages>>) {
        self.ring.set_pages(pages);
    }

    /// Returns the configuration.
    pub fn config(&self) -> &SrqConfig {
        &self.config
    }

    /// Returns the ranges of the region.
    pub fn region(&self) -> &[Range] {
        &self.region
    }

    /// Returns how many work requests it holds at most.
    pub fn max_wr(&self) -> u32 {
        self.max_wr
    }

    /// Returns below how many work requests SRQ_LIMIT_REACHED is due; 0: never.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Returns whether the SRQ is in error.
    pub fn is_in_error(&self) -> bool {
        self.in_error
    }

    /// Sets the limit; whether SRQ_LIMIT_REACHED is due at once.
    pub fn set_limit(&mut self, limit: u32) -> bool {
        self.limit = limit;
        self.take_limit_reached()
    }

    /// Begins the end of the SRQ, if it is one for XRC that no QP uses. Returns whether it is. No target finds the SRQ
    /// from then on.
    pub fn begin_end(&mut self) -> bool {
        self.ends = self.config.xrc.is_some() && self.users.is_empty();
        self.ends
    }

    /// Returns PD and CQ, if this is an SRQ for XRC of this domain.
    pub fn of_domain(&self, xrcdn: u32) -> Option<(u32, u16)> {
        let xrc = self.config.xrc.filter(|xrc| xrc.xrcdn == xrcdn && !self.ends)?;
        Some((self.config.pdn, xrc.cq))
    }

    /// Puts the SRQ into error, and its users behind it; whether it was not in error before.
    pub fn fail(&mut self) -> bool {
        let first = !std::mem::replace(&mut self.in_error, true);
        if first {
            self.users.fail();
        }
        first
    }

    /// Notes that the QP in place `slot` takes no more work requests: it waits no longer, and another QP takes
    /// what it left unfinished. Returns whether one waits for that.
    pub fn leave(&mut self, slot: Slot, unfinished: Option<ReceiveWqe>) -> bool {
        self.returned.extend(unfinished);
        self.stop_waiting(slot);
        !self.waiters.is_none_idle() && self.left() != 0
    }

    /// Returns the backlog of work requests that wait to be taken.
    pub fn backlog(&self) -> Backlog {
        self.ring.backlog().and(self.returned.len() as u32)
    }

    /// Returns how many work requests wait to be taken.
    pub fn left(&self) -> u32 {
        self.ring.waiting().saturating_add(self.returned.len() as u32)
    }

    /// Returns whether SRQ_LIMIT_REACHED is due; it is so once.
    pub fn take_limit_reached(&mut self) -> bool {
        let reached = self.limit != 0 && self.left() < self.limit;
        if reached {
            self.limit = 0;
        }
        reached
    }
}
