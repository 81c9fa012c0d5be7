// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The scheduler of one guest: which of its queues is visited next, by the thread that serves the guest.
//!
//! A queue gets into the ready set by a kick, a doorbell, a timer or a peer. One that had work is
//! busy-polled for a while; then the guest is asked for kicks again.

use std::time::Instant;

use memory::GuestMemory;

use super::busy_poll::BusyPoll;
use super::change::Change;
use super::freeze::Freeze;
use super::guest::Guest;
use super::remap::Remap;
use super::reset::Reset;
use crate::base::budget::{cost, Budget};
use crate::base::counters::Counter;
use crate::base::queues::Queue;
use crate::base::ready_set::Set;
use crate::base::sync::lock;
use crate::base::visit::Visit;
use crate::transport::round::Round;

/// Timers that are taken in one round.
const MOST_TIMERS: usize = 256;
/// Queues that one call of [`Scheduler::arm`] asks for kicks of.
const MOST_ARMED: usize = 256;

/// The result of [`crate::Device::run`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Work was done, or is left: the caller calls [`crate::Device::run`] again.
    Busy,
    /// There was no work.
    Idle,
    /// There was no work, and there will be some at this time.
    At(Instant),
}

/// The state that is kept from one round to the next.
pub(crate) struct Scheduler {
    /// Queues that have work.
    active: Set,
    /// Queues that had work lately, and ask for no kicks.
    busy_poll: BusyPoll,
    /// Queues that were asked for no kicks.
    quiet: Set,
    /// The queue at which the next round begins.
    cursor: u16,
    /// The memory of a round; `None` while a round is under way, and after one that a panic has ended.
    round: Option<Box<Round>>,
    /// The change that goes before all other work.
    change: Option<Change>,
}

/// Returns whether a queue that had work is busy-polled.
fn is_busy_polled(queue: Queue) -> bool {
    matches!(queue, Queue::Control | Queue::Doorbell | Queue::Send(_))
}

impl Scheduler {
    /// Returns the scheduler of a guest with so many queues.
    pub fn new(queues: u16) -> Self {
        Self {
            active: Set::new(queues),
            busy_poll: BusyPoll::new(queues),
            quiet: Set::new(queues),
            cursor: 0,
            round: None,
            change: None,
        }
    }

    /// Forgets the state of a queue, whose virtqueue is another one now.
    pub fn forget(&mut self, number: u16) {
        self.busy_poll.remove(number);
        self.quiet.remove(number);
    }

    /// Forgets the watches of rings, because commands may have replaced the rings.
    pub fn forget_watches(&mut self) {
        self.busy_poll.forget_watches();
    }

    /// Begins to follow a change of the guest's memory map.
    pub fn begin_memory(&mut self, memory: &GuestMemory) {
        self.busy_poll.forget_watches();
        self.change = Some(Change::Memory(Box::new(Remap::new(memory))));
    }

    /// Begins a reset.
    pub fn begin_reset(&mut self) {
        self.active.clear();
        self.busy_poll.clear();
        self.quiet.clear();
        self.cursor = 0;
        self.change = Some(Change::Reset(Reset::new()));
    }

    /// Begins to freeze the guest.
    pub fn begin_freeze(&mut self) {
        self.change = Some(Change::Freeze(Freeze::new()));
    }

    /// Returns whether a change of memory, a reset or a freeze is under way.
    pub fn is_changing(&self) -> bool {
        self.change.is_some()
    }

    /// Takes the change that is under way, to bring it to its end.
    pub fn take_change(&mut self) -> Option<Change> {
        self.change.take()
    }

    /// Does the work that there is, `budget` messages or chunks at most, until the round is over.
    pub fn run(&mut self, guest: &Guest, budget: u32) -> Next {
        let hca = &guest.hca;
        hca.ready.begin();
        hca.ready.take(&mut self.active);
        let mut round = self.round.take().unwrap_or_else(|| Round::new(hca));
        round.renew();
        round.budget.stopwatch.begin(hca.fabric.clock());
        let next = self.change_or_round(guest, &mut round, budget);
        self.round = Some(round);
        next
    }

    /// Goes on with the change that is under way, or makes a round.
    fn change_or_round(&mut self, guest: &Guest, round: &mut Round, budget: u32) -> Next {
        let hca = &guest.hca;
        if let Some(mut change) = self.change.take() {
            round.begin(budget, true);
            if !change.run(guest, &mut round.budget) {
                self.change = Some(change);
            }
            round.end();
            hca.stats.add(Counter::Work, round.finish(hca));
            return Next::Busy;
        }
        if hca.is_frozen() {
            return Next::Idle;
        }
        let is_late = self.expire(guest, &mut round.budget);
        let worked = self.round(guest, round, budget);
        hca.stats.add(Counter::Work, round.finish(hca));
        if worked || is_late || !self.active.is_empty() || !hca.ready.is_empty() {
            return Next::Busy;
        }
        let next = lock(&hca.timers).next();
        next.map_or(Next::Idle, |time| Next::At(hca.in_network(time)))
    }

    /// Makes queues ready whose time has come; whether some are left for the next round.
    fn expire(&mut self, guest: &Guest, budget: &mut Budget) -> bool {
        let mut timers = lock(&guest.hca.timers);
        if timers.next().is_none() {
            return false;
        }
        let now = guest.hca.clock().now();
        for _ in 0..MOST_TIMERS {
            let Some(queue) = timers.pop(now) else { return false };
            budget.work_between(cost::TIMER);
            self.active.insert(queue);
        }
        true
    }

    /// Visits each queue that has work once; whether work was done or is left.
    fn round(&mut self, guest: &Guest, round: &mut Round, budget: u32) -> bool {
        let looks = self.busy_poll.look(&mut self.active);
        round.budget.work_between(looks as u64 * cost::LOOK);
        while let Some(number) = self.busy_poll.next_tired() {
            round.budget.work_between(cost::VISIT);
            self.arm_queue(guest, number);
        }
        let mut left = budget;
        let mut worked = false;
        let start = self.cursor;
        for (from, to) in [(start, guest.hca.jobs.count()), (0, start)] {
            let mut at = from;
            while let Some(number) = self.active.next(at).filter(|number| *number < to) {
                if left == 0 || round.budget.is_round_over() {
                    self.cursor = number;
                    return true;
                }
                worked |= self.visit(guest, number, round, &mut left);
                at = number + 1;
            }
        }
        self.cursor = 0;
        worked
    }

    /// Visits one queue, and decides whether it is visited again; whether work was done.
    fn visit(&mut self, guest: &Guest, number: u16, round: &mut Round, left: &mut u32) -> bool {
        let Some(queue) = guest.hca.jobs.queue(number) else { return false };
        if is_busy_polled(queue) && !self.quiet.contains(number) {
            self.quiet.insert(number);
            guest.disable_notify(queue);
        }
        if queue == Queue::Control {
            // Deregistration waits for every thread that holds a region. What a command sends leaves behind
            // what its QP has sent before.
            round.release();
            round.outbox.flush(&guest.hca);
        }
        let given = round.begin(*left, self.active.len() <= 1);
        let visit = guest.visit(queue, round);
        round.end();
        if let Some(stall) = round.budget.stopwatch.take_stall() {
            guest.stalled(queue, stall);
        }
        if matches!(queue, Queue::Doorbell | Queue::Wire) {
            // The rings that a doorbell named, and the QPs that packets were for, are visited in this
            // round.
            guest.hca.ready.take(&mut self.active);
        }
        let spent = given - round.budget.left();
        *left -= spent;
        self.active.remove(number);
        match visit {
            Visit::More => self.active.insert(number),
            Visit::Done => self.busy_poll.had_work(number, round.taken, || guest.watch(queue)),
            Visit::Parked => self.busy_poll.remove(number),
            Visit::Empty => {
                if self.busy_poll.was_empty(number, round.taken, || guest.watch(queue)) {
                    self.arm_queue(guest, number);
                }
            }
        }
        if queue == Queue::Control && visit != Visit::Empty {
            self.busy_poll.forget_watches();
        }
        spent != 0 || visit == Visit::More
    }

    /// Asks for kicks of a queue that is busy-polled; whether work has come meanwhile.
    fn arm_queue(&mut self, guest: &Guest, number: u16) -> bool {
        self.busy_poll.remove(number);
        self.quiet.remove(number);
        let Some(queue) = guest.hca.jobs.queue(number) else { return false };
        let more = guest.enable_notify(queue);
        if more {
            self.active.insert(number);
        }
        more
    }

    /// Asks for kicks of the queues that are busy-polled, a part of them at a time; whether work has
    /// come meanwhile, or such queues are left.
    pub fn arm(&mut self, guest: &Guest) -> bool {
        if self.change.is_none() && guest.hca.is_frozen() {
            return false;
        }
        let mut more = false;
        for _ in 0..MOST_ARMED {
            let Some(number) = self.busy_poll.any() else { break };
            more |= self.arm_queue(guest, number);
        }
        more || self.busy_poll.any().is_some()
            || !self.active.is_empty()
            || !guest.hca.ready.is_empty()
    }
}
