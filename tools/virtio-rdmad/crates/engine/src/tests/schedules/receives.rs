// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Queues of receives, and what is known of the receives in them.

use std::collections::{HashMap, VecDeque};

use super::model::Verdict;
use super::plan::{Owner, Place, QueuePlan, AREA, DEPTH};
use super::request::pieces;
use crate::tests::driver::*;

/// The bytes of guest memory that a queue uses.
pub const MEMORY: u64 = (DEPTH * AREA) as u64;
/// The bit of `wr_id` that a receive has.
pub const IS_RECEIVE: u64 = 1 << 63;
/// The value of bytes in memory to which nothing was written.
pub const UNTOUCHED: u8 = 0xa5;
/// The value of bytes in memory that its owner uses again.
pub const USED_AGAIN: u8 = 0x5a;

/// A receive that was posted.
struct Receive {
    /// Its memory.
    at: u64,
    len: usize,
    /// The time at which it was posted.
    time: u64,
    /// Whether it has not completed.
    is_open: bool,
}

/// The QP or SRQ that has a queue.
#[derive(Clone, Copy)]
pub struct Object {
    /// Its number.
    pub number: u32,
    /// The number of QPs that receive from it.
    pub users: usize,
}

/// A queue of receives.
pub struct Receives {
    /// Its number in the plan.
    number: usize,
    pub guest: usize,
    owner: Owner,
    object: Object,
    /// The key of its memory.
    key: u32,
    /// The receives that are yet to be posted, each with the pause in nanoseconds after the previous one.
    plan: VecDeque<(u64, Place)>,
    next_at: u64,
    posted: Vec<Receive>,
    /// The receive that each end has completed last.
    last: HashMap<usize, usize>,
    /// Memory that no receive has that is posted, and how many bytes of it are used for something else.
    free: Vec<(u64, usize)>,
}

impl Receives {
    /// Returns the queue of this number, whose receives use [`MEMORY`] bytes from an address on.
    pub fn new(number: usize, plan: &QueuePlan, object: Object, memory: u64, key: u32) -> Self {
        Self {
            number,
            guest: plan.guest,
            owner: plan.owner,
            object,
            key,
            next_at: plan.receives.first().map_or(0, |(pause, _)| *pause),
            plan: plan.receives.iter().copied().collect(),
            posted: Vec::new(),
            last: HashMap::new(),
            free: (0..DEPTH).rev().map(|place| (memory + (place * AREA) as u64, 0)).collect(),
        }
    }

    /// Returns when something can be posted, if that can be told.
    pub fn next_post(&self) -> Option<u64> {
        let has_more = !self.plan.is_empty() && !self.free.is_empty();
        has_more.then_some(self.next_at)
    }

    /// Posts what is due. Returns whether something was.
    pub fn post(&mut self, guest: &mut Guest, now: u64) -> Verdict<bool> {
        let first = self.posted.len();
        while self.next_post().is_some_and(|time| time <= now) {
            let (Some((_, place)), Some(free)) = (self.plan.pop_front(), self.free.pop()) else {
                break;
            };
            self.check_free(guest, free)?;
            let at = free.0;
            guest.memory.write(at, &vec![UNTOUCHED; place.len]).unwrap();
            let wr_id = IS_RECEIVE | (self.number << 16 | self.posted.len()) as u64;
            let key = if place.has_key { self.key } else { self.key ^ 0x0100_0000 };
            let sges = pieces(at, place.len, 3000, key);
            match self.owner {
                Owner::Qp => guest.post_recv(self.object.number, wr_id, &sges),
                Owner::Srq | Owner::XrcSrq => {
                    guest.post_srq_recv(self.object.number, wr_id, &sges);
                }
            }
            self.posted.push(Receive { at, len: place.len, time: now, is_open: true });
            self.next_at = now + self.plan.front().map_or(0, |(pause, _)| *pause);
        }
        Ok(self.posted.len() != first)
    }

    /// Judges memory that is used for something else since its receive has completed.
    fn check_free(&self, guest: &Guest, (at, len): (u64, usize)) -> Verdict {
        if guest.bytes(at, len).iter().all(|byte| *byte == USED_AGAIN) {
            return Ok(());
        }
        Err(format!("memory of queue {} changes behind the CQE of its receive", self.number))
    }

    /// Follows a receive that an end completes. Returns what its memory has, which is used for something else then.
    ///
    /// Receives are taken in order, and each QP has taken one at most that has not completed.
    pub fn complete(&mut self, guest: &Guest, end: usize, index: usize) -> Verdict<Vec<u8>> {
        let is_open = self.posted.get(index).is_some_and(|receive| receive.is_open);
        let earlier = self.posted.iter().take(index).filter(|receive| receive.is_open).count();
        let last = self.last.insert(end, index);
        if !is_open || earlier >= self.object.users || last >= Some(index) {
            return Err(format!(
                "receive {index} completes: open {is_open}, {earlier} earlier ones are, {last:?} was last"
            ));
        }
        let receive = &mut self.posted[index];
        receive.is_open = false;
        self.free.push((receive.at, receive.len));
        let found = guest.bytes(receive.at, receive.len);
        guest.memory.write(receive.at, &vec![USED_AGAIN; receive.len]).unwrap();
        Ok(found)
    }

    /// Returns whether there may have been no receive at a moment since a time for a message that comes to a
    /// QP behind `number` others.
    pub fn may_lack(&self, number: usize, since: u64) -> bool {
        let before = self.posted.partition_point(|receive| receive.time < since);
        let taken = match self.owner {
            Owner::Qp => number,
            Owner::Srq | Owner::XrcSrq => {
                let completed = self.posted.iter().filter(|receive| !receive.is_open);
                completed.count() + self.object.users - 1
            }
        };
        before <= taken
    }

    /// Judges what is left when all QPs have ended: in an SRQ, what none has taken.
    pub fn check_end(&self, guest: &Guest) -> Verdict {
        self.free.iter().try_for_each(|free| self.check_free(guest, *free))?;
        let open = self.posted.iter().position(|receive| receive.is_open);
        let is_taken = |open: &usize| self.posted[*open..].iter().any(|receive| !receive.is_open);
        let lost = if self.owner == Owner::Qp { open } else { open.filter(is_taken) };
        match lost {
            None => Ok(()),
            Some(index) => Err(format!("receive {index} of queue {} never completes", self.number)),
        }
    }
}
