// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A change of the guest's memory map: rings and memory regions are found again.

use std::sync::Arc;

use memory::{GuestMemory, Pages};

use super::guest::Guest;
use super::step::{lock_in_turn, number, Step};
use crate::base::budget::{cost, Budget};
use crate::base::counters::Counter;
use crate::base::slot::Slot;
use crate::base::sync::{lock, write};
use crate::control::mr::replace;
use crate::control::objects::MrEntry;
use crate::control::prepare::PreparedRings;
use crate::memory::mr::Resolving;
use crate::memory::page_list::Range;
use crate::qp::halves::Requester;
use crate::qp::state::QpState;
use crate::transport::failure::{fail_responder, fail_srq, fatal};
use crate::transport::hca::{Hca, Responder};

/// The objects whose memory a change of the memory map finds again, in this order.
#[derive(Clone, Copy)]
enum Follower {
    /// The request of the control queue that is under way, which ends in the memory of before.
    Request,
    Regions,
    Cqs,
    Qps,
    Srqs,
    /// A thread that counts, for the status, the work requests that wait in the former rings.
    Status,
    Virtqueues,
}

/// A change of the memory map: rings and memory regions are found again.
pub(crate) struct Remap {
    memory: GuestMemory,
    what: Follower,
    /// The number of the object of that kind that comes next.
    at: u32,
    /// The region that is being resolved.
    resolving: Option<Resolving>,
    /// The region that was resolved has windows, which follow: upper 24 bits of its key, and of that
    /// of the next window.
    windows: Option<(u32, u32)>,
    /// The rings that are being found.
    rings: Option<PreparedRings>,
}

impl Remap {
    /// Begins with a change to `memory`.
    pub fn new(memory: &GuestMemory) -> Self {
        let memory = memory.clone();
        let what = Follower::Request;
        Self { memory, what, at: 0, resolving: None, windows: None, rings: None }
    }

    /// Does one step.
    pub fn step(&mut self, guest: &Guest, budget: &mut Budget) -> Step {
        match self.what {
            Follower::Request => {
                let mut control = lock(&guest.control);
                if !control.hurry_on(&guest.hca, budget) {
                    return Step::Wait;
                }
                guest.give_memory(&mut control, &self.memory);
                drop(control);
                self.next(Follower::Regions)
            }
            Follower::Regions => self.follow_region(guest, budget),
            Follower::Cqs => self.follow_cq(guest, budget),
            Follower::Qps => self.follow_qp(guest, budget),
            Follower::Srqs => self.follow_srq(guest, budget),
            Follower::Status => match lock_in_turn(&guest.hca.status, budget) {
                Some(_) => self.next(Follower::Virtqueues),
                None => Step::Wait,
            },
            Follower::Virtqueues => self.follow_virtqueue(guest, budget),
        }
    }

    /// Goes on with objects of another kind.
    fn next(&mut self, what: Follower) -> Step {
        (self.what, self.at) = (what, 0);
        Step::More
    }

    fn follow_region(&mut self, guest: &Guest, budget: &mut Budget) -> Step {
        let hca = &guest.hca;
        let objects = &mut lock(&guest.control).objects;
        if !objects.is_let_go(budget) {
            return Step::Wait;
        }
        if let Some((region, window)) = self.windows {
            budget.work(cost::OBJECT);
            let next = write(&hca.keys).remap_window(region, window);
            self.windows = next.as_ref().map(|(window, _)| (region, window + 1));
            if let Some((_, Some(before))) = next {
                objects.retire(before);
            }
            return Step::More;
        }
        if !objects.free_dead(budget) {
            return Step::Wait;
        }
        if self.at >= objects.mrs.numbers() {
            return self.next(Follower::Cqs);
        }
        budget.work(cost::LOOK);
        match objects.mrs.get(self.at) {
            None => {}
            Some(MrEntry::FastReg { key, .. }) => {
                budget.work(cost::OBJECT);
                let before = write(&hca.keys).remap_fast_reg(*key);
                if let Some(before) = before {
                    budget.work(before.extents() as u64 * cost::PAGE);
                    objects.retire(before);
                }
            }
            Some(MrEntry::Fixed { attributes, live }) => {
                let held = live.as_ref().map_or(0, |mr| mr.extents());
                let room = hca.limits.max_extents.saturating_sub(objects.extents - held);
                let resolving = self.resolving.get_or_insert_with(|| {
                    Resolving::new(&attributes.backing, attributes.writes(), room)
                });
                if !resolving.run(&self.memory, budget) {
                    return Step::Wait;
                }
                budget.work(cost::OBJECT);
                let key = attributes.key;
                let map = self.resolving.take().and_then(|it| it.finish(&self.memory).ok());
                self.windows = Some((key >> 8, 0));
                replace(hca, objects, self.at, map);
            }
        }
        self.at += 1;
        Step::More
    }

    fn follow_cq(&mut self, guest: &Guest, budget: &mut Budget) -> Step {
        let hca = &guest.hca;
        let Some(cqn) = number(self.at, hca.cqs.len()) else { return self.next(Follower::Qps) };
        let ranges = |budget: &mut Budget| -> Result<Option<Box<[Range]>>, Rings> {
            let Some(place) = hca.cqs.get(cqn) else { return Ok(None) };
            let mut place = lock_in_turn(place, budget).ok_or(Rings::Unfinished)?;
            Ok(place.ring().map(|ring| ring.ranges().into()))
        };
        match self.find_rings(budget, ranges) {
            Rings::Found => {}
            other => return other.step(),
        }
        let Some(mut cq) = lock_in_turn(hca.cqs.take(cqn), budget) else { return Step::Wait };
        let result = cq.set_pages(self.take_pages());
        drop(cq);
        if result.is_err() {
            hca.stats.guest_error(Counter::LostRings, "a completion ring is not in memory");
            hca.report_cq_error(cqn);
        }
        Step::More
    }

    fn follow_qp(&mut self, guest: &Guest, budget: &mut Budget) -> Step {
        let hca = &guest.hca;
        let Some(slot) = number(self.at, hca.qps.len()).map(Slot::from) else {
            return self.next(Follower::Srqs);
        };
        let ranges = |_: &mut Budget| {
            let Some(qp) = hca.qps.get(slot) else { return Ok(None) };
            let mut requester = lock(&qp.requester);
            let has_ring = requester.queue.ring().is_some();
            Ok(has_ring.then(|| requester.region.clone()))
        };
        match self.find_rings(budget, ranges) {
            Rings::Found => {}
            other => return other.step(),
        }
        let qp = hca.qps.take(slot);
        let mut requester = lock(&qp.requester);
        let Some(mut responder) = lock_in_turn(&qp.responder, budget) else { return Step::Wait };
        let pages = self.take_pages().map(Arc::new);
        set_qp_pages(hca, slot, &mut requester, &mut responder, pages.as_ref());
        Step::More
    }

    fn follow_srq(&mut self, guest: &Guest, budget: &mut Budget) -> Step {
        let hca = &guest.hca;
        let Some(slot) = number(self.at, hca.srqs.len()).map(Slot::from) else {
            return self.next(Follower::Status);
        };
        let ranges = |budget: &mut Budget| -> Result<Option<Box<[Range]>>, Rings> {
            let Some(place) = hca.srqs.get(slot) else { return Ok(None) };
            let place = lock_in_turn(place, budget).ok_or(Rings::Unfinished)?;
            Ok(place.as_ref().map(|srq| srq.region().into()))
        };
        match self.find_rings(budget, ranges) {
            Rings::Found => {}
            other => return other.step(),
        }
        let Some(mut place) = lock_in_turn(hca.srqs.take(slot), budget) else { return Step::Wait };
        let pages = self.take_pages().map(Arc::new);
        let lost = pages.is_none();
        if let Some(srq) = &mut *place {
            srq.set_pages(pages);
        }
        drop(place);
        if lost {
            hca.stats.guest_error(Counter::LostRings, "the ring of an SRQ is not in memory");
            fail_srq(hca, slot);
        }
        Step::More
    }

    fn follow_virtqueue(&mut self, guest: &Guest, budget: &mut Budget) -> Step {
        let numbering = guest.numbering();
        let Some(index) = number(self.at, numbering.count()) else { return Step::Done };
        self.at += 1;
        budget.work(cost::OBJECT);
        let Some(queue) = numbering.queue(index) else { return Step::More };
        let result = guest.with_virtqueue(queue, |ring| ring.set_memory(&self.memory));
        if let Some(Err(error)) = result {
            let hca = &guest.hca;
            tracing::debug!(guest = hca.stats.name(), index, %error, "a queue is not in memory");
            // The visit finds that the queue is malformed.
            hca.make_ready(hca.jobs.number(queue));
        }
        Step::More
    }

    /// Goes on with the rings of the object that comes next. `ranges` returns its region, or an error if it has to
    /// be asked again. Without rings, the next object follows.
    fn find_rings(
        &mut self,
        budget: &mut Budget,
        ranges: impl FnOnce(&mut Budget) -> Result<Option<Box<[Range]>>, Rings>,
    ) -> Rings {
        budget.work(cost::LOOK);
        if self.rings.is_none() {
            let ranges = match ranges(budget) {
                Ok(Some(ranges)) => ranges,
                Ok(None) => {
                    self.at += 1;
                    return Rings::Absent;
                }
                Err(unfinished) => return unfinished,
            };
            budget.work(cost::OBJECT + ranges.len() as u64 * cost::FREE);
            self.rings = Some(PreparedRings::of_ranges(ranges));
        }
        let memory = &self.memory;
        if self.rings.as_mut().is_some_and(|rings| rings.run(memory, budget)) {
            Rings::Found
        } else {
            Rings::Unfinished
        }
    }

    /// Returns the pages of the rings that were found, `None` if they are not in memory. Behind them comes the next
    /// object.
    fn take_pages(&mut self) -> Option<Pages> {
        self.at += 1;
        self.rings.take()?.finish().ok().map(|(pages, _)| pages)
    }
}

/// The result of the search for the memory of an object's rings.
enum Rings {
    /// There are no rings.
    Absent,
    /// The budget is exhausted, or another thread is to go on first.
    Unfinished,
    /// The search is over. [`Remap::take_pages`] returns the pages, if they are in memory.
    Found,
}

impl Rings {
    /// Returns the step of an object for which there is nothing else to do now.
    fn step(&self) -> Step {
        match self {
            Self::Unfinished => Step::Wait,
            Self::Absent | Self::Found => Step::More,
        }
    }
}

/// Gives the rings of a QP their pages in other memory; without pages, the QP fails.
fn set_qp_pages(
    hca: &Hca,
    slot: Slot,
    requester: &mut Requester,
    responder: &mut Responder,
    pages: Option<&Arc<Pages>>,
) {
    let lost = pages.is_none();
    let jobs = [hca.jobs.send(slot), hca.jobs.receive(slot)];
    for (queue, job) in [&mut requester.queue, &mut responder.queue].into_iter().zip(jobs) {
        // The work requests that are flushed there have waited, and nobody rings a doorbell for them.
        if queue.ring().is_some_and(|ring| ring.set_pages(pages.cloned())) {
            hca.make_ready(job);
        }
    }
    if lost && !matches!(hca.qps.take(slot).state(), QpState::Err | QpState::Reset) {
        hca.stats.guest_error(Counter::LostRings, "the rings of a QP are not in memory");
        fail_responder(hca, slot, responder, fatal(slot));
    }
}
