// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A change of the guest's memory map: rings and memory regions are found again.

use std::sync::Arc;

use abi::VIRTIO_RDMA_EVENT_QP_FATAL;
use memory::{GuestMemory, Pages};

use super::guest::Guest;
use super::step::{number, waits_for_status, Step};
use crate::base::budget::{cost, Budget};
use crate::base::counters::Counter;
use crate::base::sync::{lock, write};
use crate::control::mr::replace;
use crate::control::objects::MrEntry;
use crate::control::prepare::PreparedRings;
use crate::control::srq::set_pages as set_srq_pages;
use crate::memory::mr::Resolving;
use crate::memory::page_list::Range;
use crate::qp::state::QpState;
use crate::transport::failure::fail_responder;
use crate::transport::hca::Hca;

/// What a change of memory finds again, in this order.
#[derive(Clone, Copy)]
enum Follower {
    /// The request of the control queue that is under way, which ends in the memory of before.
    Request,
    Regions,
    Cqs,
    Qps,
    Srqs,
    /// A thread that counts, for the status, what waits in rings of before.
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
            Follower::Status if waits_for_status(&guest.hca, budget) => Step::Wait,
            Follower::Status => self.next(Follower::Virtqueues),
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
        let ranges = || lock(hca.cqs.get(cqn)?).ring().map(|ring| ring.ranges().into());
        let pages = match self.find_rings(budget, ranges) {
            Rings::Found(pages) => pages,
            other => return other.step(),
        };
        if lock(hca.cqs.take(cqn)).set_pages(pages).is_err() {
            hca.stats.guest_error(Counter::LostRings, "a completion ring is not in memory");
            hca.report_cq_error(cqn);
        }
        Step::More
    }

    fn follow_qp(&mut self, guest: &Guest, budget: &mut Budget) -> Step {
        let hca = &guest.hca;
        let Some(slot) = number(self.at, hca.qps.len()) else {
            return self.next(Follower::Srqs);
        };
        let ranges = || {
            let mut requester = lock(&hca.qps.get(slot)?.requester);
            requester.queue.ring()?;
            Some(requester.region.clone())
        };
        match self.find_rings(budget, ranges) {
            Rings::Found(pages) => set_qp_pages(hca, slot, pages.map(Arc::new).as_ref()),
            other => return other.step(),
        }
        Step::More
    }

    fn follow_srq(&mut self, guest: &Guest, budget: &mut Budget) -> Step {
        let hca = &guest.hca;
        let Some(slot) = number(self.at, hca.srqs.len()) else {
            return self.next(Follower::Status);
        };
        let ranges = || lock(hca.srqs.get(slot)?).as_ref().map(|srq| srq.region().into());
        match self.find_rings(budget, ranges) {
            Rings::Found(pages) => set_srq_pages(hca, slot, pages.map(Arc::new)),
            other => return other.step(),
        }
        Step::More
    }

    fn follow_virtqueue(&mut self, guest: &Guest, budget: &mut Budget) -> Step {
        let layout = guest.layout();
        let Some(index) = number(self.at, layout.count()) else { return Step::Done };
        self.at += 1;
        budget.work(cost::OBJECT);
        let Some(queue) = layout.queue(index) else { return Step::More };
        let result = guest.with_virtqueue(queue, |ring| ring.set_memory(&self.memory));
        if let Some(Err(error)) = result {
            tracing::debug!(guest = guest.hca.stats.name(), index, %error, "a queue is not in memory");
        }
        Step::More
    }

    /// Goes on with the rings of the object that comes next, whose region is what `ranges` returns;
    /// behind them comes the next object.
    fn find_rings(
        &mut self,
        budget: &mut Budget,
        ranges: impl FnOnce() -> Option<Box<[Range]>>,
    ) -> Rings {
        budget.work(cost::LOOK);
        let begin = || {
            let ranges = ranges()?;
            budget.work(cost::OBJECT + ranges.len() as u64 * cost::FREE);
            Some(PreparedRings::of_ranges(ranges))
        };
        let Some(mut rings) = self.rings.take().or_else(begin) else {
            self.at += 1;
            return Rings::Absent;
        };
        if !rings.run(&self.memory, budget) {
            self.rings = Some(rings);
            return Rings::Unfinished;
        }
        self.at += 1;
        Rings::Found(rings.finish().ok().map(|(pages, _)| pages))
    }
}

/// What was found of an object's rings.
enum Rings {
    /// There are no rings.
    Absent,
    /// The budget is exhausted.
    Unfinished,
    /// The rings are in these pages, or not in memory.
    Found(Option<Pages>),
}

impl Rings {
    /// Returns the step of an object for which there is nothing else to do now.
    fn step(&self) -> Step {
        match self {
            Self::Unfinished => Step::Wait,
            Self::Absent | Self::Found(_) => Step::More,
        }
    }
}

/// Gives the rings of a QP their pages in other memory; without pages, the QP fails.
fn set_qp_pages(hca: &Hca, slot: u16, pages: Option<&Arc<Pages>>) {
    let qp = hca.qps.take(slot);
    let mut requester = lock(&qp.requester);
    let mut responder = lock(&qp.responder);
    let lost = pages.is_none();
    let jobs = [hca.jobs.send(slot), hca.jobs.receive(slot)];
    for (queue, job) in [&mut requester.queue, &mut responder.queue].into_iter().zip(jobs) {
        // What is flushed there waited, and nobody rings for it.
        if queue.ring().is_some_and(|ring| ring.set_pages(pages.cloned())) {
            hca.make_ready(job);
        }
    }
    if lost && !matches!(qp.state(), QpState::Err | QpState::Reset) {
        hca.stats.guest_error(Counter::LostRings, "the rings of a QP are not in memory");
        fail_responder(hca, slot, &mut responder, Some(VIRTIO_RDMA_EVENT_QP_FATAL));
    }
}
