// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A freeze: the guest's memory is not touched any more.
//!
//! The guest is marked as frozen before this begins. A thread of a peer, or one that asks for the status, touches the
//! guest's memory with a lock held, and looks for the mark behind each lock that it takes. So the guest's own thread
//! takes each of these locks once: whoever had it is out of the guest's memory then, and whoever takes it later finds
//! the mark.

use super::guest::Guest;
use super::step::{lock_in_turn, number, Step};
use crate::base::budget::{cost, Budget};
use crate::base::sync::{lock, try_lock};

/// The locks that a freeze takes, in this order.
#[derive(Clone, Copy)]
enum Guard {
    /// The request of the control queue that is under way, which comes to its end.
    Request,
    /// Both halves of each QP. A peer receives with that of the responder held: it takes receives, copies data, and
    /// places CQEs.
    Qps,
    /// The lock of the status. A thread holds it while it counts the work requests that wait in rings.
    Status,
    /// CQs, of which a peer tells the guest without a half of a QP.
    Cqs,
    /// The queues of events, in which a peer raises events without a half of a QP.
    Events,
}

/// A freeze that is under way.
pub(crate) struct Freeze {
    what: Guard,
    /// The number of the object of that kind that comes next.
    at: u32,
}

impl Freeze {
    /// Begins to freeze a guest that is marked as frozen.
    pub fn new() -> Self {
        Self { what: Guard::Request, at: 0 }
    }

    /// Does one step.
    pub fn step(&mut self, guest: &Guest, budget: &mut Budget) -> Step {
        let hca = &guest.hca;
        match self.what {
            Guard::Request => {
                if lock(&guest.control).hurry_on(hca, budget) {
                    self.next(Guard::Qps)
                } else {
                    Step::Wait
                }
            }
            Guard::Qps => self.pass_each(budget, hca.qps.len(), Guard::Status, |slot| {
                let qp = hca.qps.get(slot.into())?;
                Some(try_lock(&qp.requester).is_some() && try_lock(&qp.responder).is_some())
            }),
            Guard::Status => match lock_in_turn(&hca.status, budget) {
                Some(_) => self.next(Guard::Cqs),
                None => Step::Wait,
            },
            Guard::Cqs => self.pass_each(budget, hca.cqs.len(), Guard::Events, |cq| {
                hca.cqs.get(cq).map(|cq| try_lock(cq).is_some())
            }),
            Guard::Events => {
                let mut queues = hca.completion_events.iter().chain([&hca.events]);
                if queues.all(|events| lock_in_turn(events, budget).is_some()) {
                    Step::Done
                } else {
                    Step::Wait
                }
            }
        }
    }

    /// Goes on with locks of another kind.
    fn next(&mut self, what: Guard) -> Step {
        (self.what, self.at) = (what, 0);
        Step::More
    }

    /// Calls `pass` for the next of `count` objects, if there is an object of that number. `pass` takes and releases
    /// the lock of the object, and returns whether no other thread had the lock. The locks of `next` follow.
    fn pass_each(
        &mut self,
        budget: &mut Budget,
        count: u16,
        next: Guard,
        pass: impl FnOnce(u16) -> Option<bool>,
    ) -> Step {
        let Some(at) = number(self.at, count) else { return self.next(next) };
        match pass(at) {
            Some(false) => {
                budget.work(cost::WAIT);
                return Step::Wait;
            }
            Some(true) => budget.work(cost::OBJECT),
            None => budget.work(cost::LOOK),
        }
        self.at += 1;
        Step::More
    }
}
