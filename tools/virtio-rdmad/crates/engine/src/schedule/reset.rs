// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A reset: everything that the guest made ends.

use memory::GuestMemory;

use super::guest::Guest;
use super::step::{lock_in_turn, number, Step};
use crate::base::budget::{cost, Budget};
use crate::base::slot::Slot;
use crate::base::sync::{lock, write};
use crate::control::objects::MrEntry;
use crate::control::queue::Control;
use crate::memory::mr::{Map, Mr};
use crate::qp::state::QpState;
use crate::queue::event::Events;
use crate::queue::virtqueue::Virtqueue;
use crate::queue::work_queue::WorkQueue;

/// The objects that a reset ends, in this order.
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
    /// A thread that counts, for the status, the work requests that wait in rings.
    Status,
    /// The queues of events, of which the first is that of asynchronous ones.
    Events,
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

    /// Does one step.
    pub fn step(&mut self, guest: &Guest, budget: &mut Budget) -> Step {
        match self.what {
            Victim::Request => {
                if lock(&guest.control).drop_request(budget) {
                    self.next(Victim::Gids)
                } else {
                    Step::Wait
                }
            }
            Victim::Gids => self.end_gid(guest, budget),
            Victim::Qps => self.end_qp(guest, budget),
            Victim::Srqs => self.end_srq(guest, budget),
            Victim::Windows => self.end_window(guest, budget),
            Victim::Regions => self.end_region(guest, budget),
            Victim::Cqs => self.end_cq(guest, budget),
            Victim::Status => match lock_in_turn(&guest.hca.status, budget) {
                Some(_) => self.next(Victim::Events),
                None => Step::Wait,
            },
            Victim::Events => self.end_events(guest, budget),
            Victim::Rest => {
                end_rest(guest);
                Step::Done
            }
        }
    }

    /// Goes on with objects of another kind.
    fn next(&mut self, what: Victim) -> Step {
        (self.what, self.at) = (what, 0);
        Step::More
    }

    fn end_gid(&mut self, guest: &Guest, budget: &mut Budget) -> Step {
        let hca = &guest.hca;
        budget.work(cost::OBJECT);
        if hca.del_gid(self.at as usize).is_err() {
            return self.next(Victim::Qps);
        }
        self.at += 1;
        Step::More
    }

    fn end_qp(&mut self, guest: &Guest, budget: &mut Budget) -> Step {
        let hca = &guest.hca;
        let Some(slot) = number(self.at, hca.qps.len()).map(Slot::from) else {
            return self.next(Victim::Srqs);
        };
        budget.work(cost::LOOK);
        if let Some(qp) = hca.qps.get(slot) {
            budget.work(cost::OBJECT);
            let mut requester = lock(&qp.requester);
            let Some(mut responder) = lock_in_turn(&qp.responder, budget) else {
                return Step::Wait;
            };
            if let Some(gid) = responder.groups.pop() {
                drop((requester, responder));
                hca.fabric.leave(&gid, hca, slot);
                return Step::More;
            }
            requester.reset();
            requester.config = None;
            requester.region = Box::default();
            requester.queue = WorkQueue::default();
            drop(requester);
            qp.set_state(&mut responder, QpState::Reset);
            responder.rouse();
            responder.reset();
            qp.configure(&mut responder, None);
            responder.notify = true;
            responder.queue = WorkQueue::default();
        }
        self.at += 1;
        Step::More
    }

    fn end_srq(&mut self, guest: &Guest, budget: &mut Budget) -> Step {
        let hca = &guest.hca;
        let Some(slot) = number(self.at, hca.srqs.len()).map(Slot::from) else {
            return self.next(Victim::Windows);
        };
        budget.work(cost::LOOK);
        if let Some(place) = hca.srqs.get(slot) {
            let Some(mut place) = lock_in_turn(place, budget) else { return Step::Wait };
            let srq = place.take();
            drop(place);
            if let Some(srq) = srq {
                budget.work(cost::OBJECT + srq.users.len() as u64 * cost::FREE);
            }
        }
        self.at += 1;
        Step::More
    }

    fn end_window(&mut self, guest: &Guest, budget: &mut Budget) -> Step {
        let hca = &guest.hca;
        budget.work(cost::LOOK);
        let objects = &mut lock(&guest.control).objects;
        if !objects.is_let_go(budget) {
            return Step::Wait;
        }
        if objects.mws.numbers() == 0 {
            return self.next(Victim::Regions);
        }
        let Some(window) = objects.mws.pop() else { return Step::More };
        budget.work(cost::OBJECT);
        let bound = write(&hca.keys).remove_window(window.key);
        if let Some(mr) = bound {
            objects.retire(mr);
        }
        Step::More
    }

    fn end_region(&mut self, guest: &Guest, budget: &mut Budget) -> Step {
        let hca = &guest.hca;
        let objects = &mut lock(&guest.control).objects;
        if !objects.is_let_go(budget) || !objects.free_dead(budget) {
            return Step::Wait;
        }
        budget.work(cost::LOOK);
        if objects.mrs.numbers() == 0 {
            return self.next(Victim::Cqs);
        }
        let Some(region) = objects.mrs.pop() else { return Step::More };
        budget.work(cost::OBJECT);
        let mut keys = write(&hca.keys);
        let live = match region {
            MrEntry::Fixed { attributes, live } => {
                if live.is_none() {
                    objects.bury(Mr::remains(attributes.backing, Map::NOWHERE));
                }
                keys.remove(attributes.key)
            }
            MrEntry::FastReg { key, .. } => keys.remove_fast_reg(key),
        };
        drop(keys);
        if let Some(mr) = live {
            objects.retire(mr);
        }
        Step::More
    }

    fn end_cq(&mut self, guest: &Guest, budget: &mut Budget) -> Step {
        let hca = &guest.hca;
        let Some(cqn) = number(self.at, hca.cqs.len()) else { return self.next(Victim::Status) };
        budget.work(cost::LOOK);
        if let Some(place) = hca.cqs.get(cqn) {
            let Some(mut place) = lock_in_turn(place, budget) else { return Step::Wait };
            let cq = std::mem::take(&mut *place);
            drop(place);
            budget.work(cost::OBJECT + cq.users.len() as u64 * cost::FREE);
        }
        self.at += 1;
        Step::More
    }

    fn end_events(&mut self, guest: &Guest, budget: &mut Budget) -> Step {
        let hca = &guest.hca;
        let mut queues = [&hca.events].into_iter().chain(&hca.completion_events);
        let Some(events) = queues.nth(self.at as usize) else { return self.next(Victim::Rest) };
        budget.work(cost::OBJECT);
        let Some(mut events) = lock_in_turn(events, budget) else { return Step::Wait };
        *events = Events::default();
        self.at += 1;
        Step::More
    }
}

/// Ends the rest of the guest's state, when the guest has no object any more.
fn end_rest(guest: &Guest) {
    let hca = &guest.hca;
    *lock(&guest.control) = Control::new(hca);
    write(&hca.keys).set_memory(&GuestMemory::default());
    *lock(&guest.doorbells) = Virtqueue::default();
    lock(&hca.inbox).clear();
    lock(&hca.timers).clear();
    hca.clear_needs_reset();
    hca.thaw();
}
