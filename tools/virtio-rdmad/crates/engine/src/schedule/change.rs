// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What concerns all that a guest has: a change of its memory, and a reset. Either goes on over as
//! many turns as it takes, object by object.
//!
//! Until it has come to its end, the guest's own thread does nothing else for the guest. Peers go on
//! meanwhile, and find each object as it was or as it is to be.

use std::sync::atomic::Ordering;
use std::sync::Arc;

use abi::VIRTIO_RDMA_EVENT_QP_FATAL;
use memory::{GuestMemory, Pages};

use crate::base::counters::Counter;
use crate::base::sync::{lock, write};
use crate::control::prepare::PreparedRings;
use crate::control::queue::{Control, MrEntry};
use crate::device::Shared;
use crate::memory::mr::{Map, Mr, Range, Resolving};
use crate::qp::state::QpState;
use crate::queue::event::Events;
use crate::queue::virtqueue::RingQueue;
use crate::queue::work_queue::WorkQueue;
use crate::transport::turn::{cost, Turn};

/// What is under way.
pub(crate) enum Change {
    /// All is found again in other memory.
    Memory(Box<Remap>),
    /// All ends.
    Reset(Reset),
}

impl Change {
    /// Goes on until the turn is over; whether it has come to its end.
    pub fn run(&mut self, shared: &Arc<Shared>, turn: &mut Turn) -> bool {
        while !turn.is_over() {
            let step = match self {
                Self::Memory(remap) => remap.step(shared, turn),
                Self::Reset(reset) => reset.step(shared, turn),
            };
            turn.work(shared.take_charge());
            match step {
                Step::Done => return true,
                Step::More => {}
                Step::Wait => return false,
            }
        }
        false
    }
}

/// What one step of a change leaves.
enum Step {
    /// There are more.
    More,
    /// There are more, and a peer has to go on first, or the turn is over.
    Wait,
    /// Nothing: all is done.
    Done,
}

/// What a change of memory finds again, in this order.
#[derive(Clone, Copy)]
enum Follower {
    /// The request of the control queue that is under way, which ends in the memory of before.
    Request,
    Regions,
    Cqs,
    Qps,
    Srqs,
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

    fn step(&mut self, shared: &Arc<Shared>, turn: &mut Turn) -> Step {
        match self.what {
            Follower::Request => {
                let mut control = lock(&shared.control);
                if !shared.go_on_request(&mut control, turn) {
                    return Step::Wait;
                }
                shared.give_memory(&mut control, &self.memory);
                drop(control);
                self.next(Follower::Regions)
            }
            Follower::Regions => self.follow_region(shared, turn),
            Follower::Cqs => self.follow_cq(shared, turn),
            Follower::Qps => self.follow_qp(shared, turn),
            Follower::Srqs => self.follow_srq(shared, turn),
            Follower::Virtqueues => self.follow_virtqueue(shared, turn),
        }
    }

    /// Goes on with objects of another kind.
    fn next(&mut self, what: Follower) -> Step {
        (self.what, self.at) = (what, 0);
        Step::More
    }

    fn follow_region(&mut self, shared: &Shared, turn: &mut Turn) -> Step {
        let mut control = lock(&shared.control);
        let control = &mut *control;
        if let Some((region, window)) = self.windows {
            turn.work(cost::OBJECT);
            let next = write(&shared.keys).remap_window(region, window);
            self.windows = next.as_ref().map(|(window, _)| (region, window + 1));
            if let Some((_, Some(before))) = next {
                shared.retire(control, before);
            }
            return Step::More;
        }
        if !control.free_dead(turn) {
            return Step::Wait;
        }
        if self.at >= control.mr_numbers() {
            return self.next(Follower::Cqs);
        }
        turn.work(cost::LOOK);
        match control.mr(self.at) {
            None => {}
            Some(MrEntry::FastReg { key, .. }) => {
                turn.work(cost::OBJECT);
                let before = write(&shared.keys).remap_fast_reg(*key);
                if let Some(before) = before {
                    turn.work(before.extents() as u64 * cost::PAGE);
                    shared.retire(control, before);
                }
            }
            Some(MrEntry::Fixed { attributes, live }) => {
                let held = live.as_ref().map_or(0, |mr| mr.extents());
                let room = shared.limits.max_extents.saturating_sub(control.extents - held);
                let resolving = self.resolving.get_or_insert_with(|| {
                    Resolving::new(&attributes.backing, attributes.writes(), room)
                });
                if !resolving.run(&self.memory, turn) {
                    return Step::Wait;
                }
                turn.work(cost::OBJECT);
                let key = attributes.key;
                let map = self.resolving.take().and_then(|it| it.finish(&self.memory).ok());
                self.windows = Some((key >> 8, 0));
                shared.replace_region(control, self.at, map);
            }
        }
        self.at += 1;
        Step::More
    }

    fn follow_cq(&mut self, shared: &Shared, turn: &mut Turn) -> Step {
        let Some(cqn) = number(self.at, shared.cqs.len()) else { return self.next(Follower::Qps) };
        let ranges = || lock(shared.cqs.get(cqn)?).ring().map(|ring| ring.ranges().into());
        let pages = match self.find_rings(turn, ranges) {
            Rings::Found(pages) => pages,
            other => return other.step(),
        };
        if lock(shared.cqs.take(cqn)).set_pages(pages).is_err() {
            shared.complain(Counter::LostRings, &"a completion ring is not in memory");
            shared.fail_cq(cqn);
        }
        Step::More
    }

    fn follow_qp(&mut self, shared: &Shared, turn: &mut Turn) -> Step {
        let Some(slot) = number(self.at, shared.qps.len()) else {
            return self.next(Follower::Srqs);
        };
        let ranges = || {
            let mut requester = lock(&shared.qps.get(slot)?.requester);
            requester.queue.ring()?;
            Some(requester.region.clone())
        };
        match self.find_rings(turn, ranges) {
            Rings::Found(pages) => shared.set_qp_pages(slot, pages.map(Arc::new).as_ref()),
            other => return other.step(),
        }
        Step::More
    }

    fn follow_srq(&mut self, shared: &Shared, turn: &mut Turn) -> Step {
        let Some(slot) = number(self.at, shared.srqs.len()) else {
            return self.next(Follower::Virtqueues);
        };
        let ranges = || lock(shared.srqs.get(slot)?).as_ref().map(|srq| srq.region().into());
        match self.find_rings(turn, ranges) {
            Rings::Found(pages) => shared.set_srq_pages(slot, pages.map(Arc::new)),
            other => return other.step(),
        }
        Step::More
    }

    fn follow_virtqueue(&mut self, shared: &Shared, turn: &mut Turn) -> Step {
        let layout = shared.layout();
        let Some(index) = number(self.at, layout.count()) else { return Step::Done };
        self.at += 1;
        turn.work(cost::OBJECT);
        let Some(queue) = layout.queue(index) else { return Step::More };
        let result = shared.with_virtqueue(queue, |ring| ring.set_memory(&self.memory));
        if let Some(Err(error)) = result {
            tracing::debug!(guest = shared.name, index, %error, "a queue is not in memory");
        }
        Step::More
    }

    /// Goes on with the rings of the object that comes next, whose region is what `ranges` returns;
    /// behind them comes the next object.
    fn find_rings(
        &mut self,
        turn: &mut Turn,
        ranges: impl FnOnce() -> Option<Box<[Range]>>,
    ) -> Rings {
        turn.work(cost::LOOK);
        let begin = || {
            let ranges = ranges()?;
            turn.work(cost::OBJECT + ranges.len() as u64 * cost::FREE);
            Some(PreparedRings::of_ranges(ranges))
        };
        let Some(mut rings) = self.rings.take().or_else(begin) else {
            self.at += 1;
            return Rings::Absent;
        };
        if !rings.run(&self.memory, turn) {
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
    /// The turn is over.
    Unfinished,
    /// These pages, or that the rings are not in memory.
    Found(Option<Pages>),
}

impl Rings {
    /// Of an object of which nothing else is to be done now.
    fn step(&self) -> Step {
        match self {
            Self::Unfinished => Step::Wait,
            Self::Absent | Self::Found(_) => Step::More,
        }
    }
}

/// The number of the object that comes next, if it is one of `count`.
fn number(at: u32, count: u16) -> Option<u16> {
    u16::try_from(at).ok().filter(|at| *at < count)
}

/// What a reset ends, in this order.
#[derive(Clone, Copy)]
enum Victim {
    /// The request of the control queue that is under way, which gets no reply.
    Request,
    Gids,
    Qps,
    Srqs,
    Windows,
    Regions,
    Cqs,
    Rest,
}

/// A reset: everything that the guest made ends, and its memory is touched no more.
pub(crate) struct Reset {
    what: Victim,
    /// The number of the object of that kind that comes next.
    at: u32,
}

impl Reset {
    /// Begins.
    pub fn new() -> Self {
        Self { what: Victim::Request, at: 0 }
    }

    fn step(&mut self, shared: &Arc<Shared>, turn: &mut Turn) -> Step {
        match self.what {
            Victim::Request => {
                if lock(&shared.control).drop_request(turn) {
                    self.next(Victim::Gids)
                } else {
                    Step::Wait
                }
            }
            Victim::Gids => self.end_gid(shared, turn),
            Victim::Qps => self.end_qp(shared, turn),
            Victim::Srqs => self.end_srq(shared, turn),
            Victim::Windows => self.end_window(shared, turn),
            Victim::Regions => self.end_region(shared, turn),
            Victim::Cqs => self.end_cq(shared, turn),
            Victim::Rest => {
                shared.end_rest();
                Step::Done
            }
        }
    }

    /// Goes on with objects of another kind.
    fn next(&mut self, what: Victim) -> Step {
        (self.what, self.at) = (what, 0);
        Step::More
    }

    fn end_gid(&mut self, shared: &Arc<Shared>, turn: &mut Turn) -> Step {
        turn.work(cost::OBJECT);
        if shared.set_gid(self.at as usize, None).is_none() {
            return self.next(Victim::Qps);
        }
        self.at += 1;
        Step::More
    }

    fn end_qp(&mut self, shared: &Shared, turn: &mut Turn) -> Step {
        let Some(slot) = number(self.at, shared.qps.len()) else { return self.next(Victim::Srqs) };
        turn.work(cost::LOOK);
        if let Some(qp) = shared.qps.get(slot) {
            turn.work(cost::OBJECT);
            let group = lock(&qp.responder).groups.pop();
            if let Some(gid) = group {
                shared.fabric.leave(&gid, shared, slot);
                return Step::More;
            }
            let mut requester = lock(&qp.requester);
            requester.reset();
            requester.config = None;
            requester.region = Box::default();
            requester.queue = WorkQueue::default();
            drop(requester);
            let mut responder = lock(&qp.responder);
            qp.set_state(&mut responder, QpState::Reset);
            responder.reset();
            responder.config = None;
            responder.notify = true;
            responder.queue = WorkQueue::default();
        }
        self.at += 1;
        Step::More
    }

    fn end_srq(&mut self, shared: &Shared, turn: &mut Turn) -> Step {
        let Some(slot) = number(self.at, shared.srqs.len()) else {
            return self.next(Victim::Windows);
        };
        turn.work(cost::LOOK);
        self.at += 1;
        let srq = shared.srqs.get(slot).and_then(|place| lock(place).take());
        if let Some(srq) = srq {
            turn.work(cost::OBJECT + srq.users() as u64 * cost::FREE);
        }
        Step::More
    }

    fn end_window(&mut self, shared: &Shared, turn: &mut Turn) -> Step {
        turn.work(cost::LOOK);
        let control = &mut *lock(&shared.control);
        if control.mws.numbers() == 0 {
            return self.next(Victim::Regions);
        }
        let Some(window) = control.mws.pop() else { return Step::More };
        turn.work(cost::OBJECT);
        let bound = write(&shared.keys).remove_window(window.key());
        if let Some(mr) = bound {
            shared.retire(control, mr);
        }
        Step::More
    }

    fn end_region(&mut self, shared: &Shared, turn: &mut Turn) -> Step {
        let control = &mut *lock(&shared.control);
        if !control.free_dead(turn) {
            return Step::Wait;
        }
        turn.work(cost::LOOK);
        if control.mr_numbers() == 0 {
            return self.next(Victim::Cqs);
        }
        let Some(region) = control.pop_mr() else { return Step::More };
        turn.work(cost::OBJECT);
        let mut keys = write(&shared.keys);
        let live = match region {
            MrEntry::Fixed { attributes, .. } => keys.remove(attributes.key),
            MrEntry::FastReg { key, .. } => keys.remove_fast_reg(key),
        };
        drop(keys);
        if let Some(mr) = live {
            shared.retire(control, mr);
        }
        Step::More
    }

    fn end_cq(&mut self, shared: &Shared, turn: &mut Turn) -> Step {
        let Some(cqn) = number(self.at, shared.cqs.len()) else { return self.next(Victim::Rest) };
        turn.work(cost::LOOK);
        self.at += 1;
        if let Some(place) = shared.cqs.get(cqn) {
            let cq = std::mem::take(&mut *lock(place));
            turn.work(cost::OBJECT + cq.users.len() as u64 * cost::FREE);
        }
        Step::More
    }
}

impl Shared {
    /// The guest has this memory from now on. What it has made of it follows object by object.
    pub fn give_memory(&self, control: &mut Control, memory: &GuestMemory) {
        control.memory = memory.clone();
        write(&self.keys).set_memory(memory);
    }

    /// Gives a region its place in other memory, or none, and ends the use of the one of before.
    fn replace_region(&self, control: &mut Control, mrn: u32, map: Option<Map>) {
        let Some(MrEntry::Fixed { attributes, live }) = control.mr(mrn) else { return };
        let (key, held) = (attributes.key, live.as_ref().map_or(0, |mr| mr.extents()));
        let mr = map.map(|map| Arc::new(Mr::resolved(attributes.clone(), map)));
        control.extents = control.extents - held + mr.as_ref().map_or(0, |mr| mr.extents());
        control.set_valid_key(key, mr.is_some());
        let mut keys = write(&self.keys);
        match &mr {
            Some(mr) => keys.insert(Arc::clone(mr)),
            None => keys.remove(key),
        };
        drop(keys);
        if let Some(before) = control.set_live(mrn, mr) {
            self.retire(control, before);
        }
    }

    /// Gives the rings of a QP their pages in other memory; without them, it fails.
    fn set_qp_pages(&self, slot: u16, pages: Option<&Arc<Pages>>) {
        let qp = self.qps.take(slot);
        let mut requester = lock(&qp.requester);
        let mut responder = lock(&qp.responder);
        let lost = pages.is_none();
        let jobs = [self.jobs.send(slot), self.jobs.receive(slot)];
        for (queue, job) in [&mut requester.queue, &mut responder.queue].into_iter().zip(jobs) {
            // What is flushed there waited, and nobody rings for it.
            if queue.ring().is_some_and(|ring| ring.set_pages(pages.cloned())) {
                self.make_hot(job);
            }
        }
        if lost && !matches!(qp.state(), QpState::Err | QpState::Reset) {
            self.complain(Counter::LostRings, &"the rings of a QP are not in memory");
            self.fail_responder(slot, &mut responder, Some(VIRTIO_RDMA_EVENT_QP_FATAL));
        }
    }

    /// Ends what is left when the guest has no object any more.
    fn end_rest(&self) {
        lock(&self.control).clear(&self.limits);
        write(&self.keys).set_memory(&GuestMemory::default());
        for events in self.completion_events.iter().chain([&self.events]) {
            *lock(events) = Events::default();
        }
        *lock(&self.doorbells) = RingQueue::default();
        lock(&self.timers).clear();
        self.needs_reset.store(false, Ordering::Release);
    }
}
