// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Queues of receives, and what is known of the receives in them.

use std::collections::VecDeque;

use super::model::Verdict;
use super::plan::{Place, QueuePlan, AREA, DEPTH};
use super::request::pieces;
use crate::tests::driver::*;

/// The bytes of guest memory that a queue uses.
pub const MEMORY: u64 = (DEPTH * AREA) as u64;
/// The bit of `wr_id` that a receive has.
pub const IS_RECEIVE: u64 = 1 << 63;
/// What memory has that nothing was written to.
pub const UNTOUCHED: u8 = 0xa5;

/// A receive that was posted.
struct Receive {
    /// Its memory.
    at: u64,
    len: usize,
    /// When it was posted.
    time: u64,
    /// Whether it has not completed.
    is_open: bool,
}

/// A queue of receives.
pub struct Receives {
    /// Its number in the plan.
    number: usize,
    pub guest: usize,
    /// The QP that it belongs to.
    qpn: u32,
    /// The key of its memory.
    key: u32,
    /// What is to be posted, and when the next of it is.
    plan: VecDeque<(u64, Place)>,
    next_at: u64,
    posted: Vec<Receive>,
    /// Memory that no receive has that is posted.
    free: Vec<u64>,
}

impl Receives {
    /// Returns the queue of this number, whose receives use [`MEMORY`] bytes from an address on.
    pub fn new(number: usize, plan: &QueuePlan, qpn: u32, memory: u64, key: u32) -> Self {
        let plan_of = plan.receives.iter().copied().collect();
        Self {
            number,
            guest: plan.guest,
            qpn,
            key,
            next_at: plan.receives.first().map_or(0, |(pause, _)| *pause),
            plan: plan_of,
            posted: Vec::new(),
            free: (0..DEPTH).rev().map(|place| memory + (place * AREA) as u64).collect(),
        }
    }

    /// Returns when something can be posted, if that can be told.
    pub fn next_post(&self) -> Option<u64> {
        let has_more = !self.plan.is_empty() && !self.free.is_empty();
        has_more.then_some(self.next_at)
    }

    /// Posts what is due. Returns whether something was.
    pub fn post(&mut self, guest: &mut Guest, now: u64) -> bool {
        let first = self.posted.len();
        while self.next_post().is_some_and(|time| time <= now) {
            let (Some((_, place)), Some(at)) = (self.plan.pop_front(), self.free.pop()) else {
                break;
            };
            guest.memory.write(at, &vec![UNTOUCHED; place.len]).unwrap();
            let wr_id = IS_RECEIVE | (self.number << 16 | self.posted.len()) as u64;
            let key = if place.has_key { self.key } else { self.key ^ 0x0100_0000 };
            guest.post_recv(self.qpn, wr_id, &pieces(at, place.len, 3000, key));
            self.posted.push(Receive { at, len: place.len, time: now, is_open: true });
            self.next_at = now + self.plan.front().map_or(0, |(pause, _)| *pause);
        }
        self.posted.len() != first
    }

    /// Follows a receive that completes. Returns what its memory has.
    pub fn complete(&mut self, guest: &Guest, index: usize) -> Verdict<Vec<u8>> {
        let next = self.posted.iter().position(|receive| receive.is_open);
        if next != Some(index) {
            return Err(format!("receive {index} completes, {next:?} is next"));
        }
        let receive = &mut self.posted[index];
        receive.is_open = false;
        self.free.push(receive.at);
        Ok(guest.bytes(receive.at, receive.len))
    }

    /// Returns whether message `number` that comes may have found no receive since a time.
    pub fn may_lack(&self, number: usize, since: u64) -> bool {
        self.posted.get(number).is_none_or(|receive| receive.time >= since)
    }

    /// Judges what is left when all QPs have ended.
    pub fn check_end(&self) -> Verdict {
        match self.posted.iter().position(|receive| receive.is_open) {
            None => Ok(()),
            Some(index) => Err(format!("receive {index} of queue {} never completes", self.number)),
        }
    }
}
