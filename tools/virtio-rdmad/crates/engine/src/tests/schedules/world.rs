// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guests on several hosts that do what a plan says, in virtual time, and the reference that judges what
//! they get.

use std::collections::VecDeque;

use abi::*;

use super::dice::Dice;
use super::end::End;
use super::freezes::Freezes;
use super::hosts::Hosts;
use super::model::{check_message, fails_responder, Model, Verdict};
use super::objects::{connect, Objects};
use super::plan::{peer, Plan, AREA};
use super::receives::{Receives, IS_RECEIVE};
use crate::tests::driver::*;

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
const FLUSHED: u32 = VIRTIO_RDMA_WC_WR_FLUSH_ERR;

pub struct World {
    plan: Plan,
    hosts: Hosts,
    /// Each CQ, and its guest.
    cqs: Vec<(usize, u32)>,
    ends: Vec<End>,
    queues: Vec<Receives>,
    /// The times at which guests lose their addresses (`false`), or get them (`true`).
    moves: VecDeque<(u64, bool, usize)>,
    freezes: Freezes,
    dice: Dice,
    tells: bool,
}

impl World {
    pub fn new(seed: u64, plan: Plan, tells: bool) -> Self {
        let mut hosts = Hosts::new(seed, &plan.guests, &plan.links, tells);
        let Objects { cqs, ends, queues, .. } = Objects::new(&plan, &mut hosts);
        let dice = Dice::new(seed ^ 0x776f_726c);
        let mut moves = Vec::new();
        for (guest, plan) in plan.guests.iter().enumerate() {
            for (from, until) in &plan.absences {
                moves.extend((*from != 0).then_some((*from, false, guest)));
                moves.extend((*until != u64::MAX).then_some((*until, true, guest)));
            }
        }
        moves.sort_unstable();
        let moves = moves.into();
        let freezes = Freezes::new(&plan.guests);
        Self { plan, hosts, cqs, ends, queues, moves, freezes, dice, tells }
    }

    /// Upgrades the hosts meanwhile.
    pub fn with_upgrades(mut self, seed: u64) -> Self {
        self.hosts.upgrade(seed);
        self
    }

    fn now(&self) -> u64 {
        self.hosts.now()
    }

    /// Does some of what the plan says, and then damages the images of the guests.
    pub fn damage(&mut self, seed: u64) -> [usize; 2] {
        let mut dice = Dice::new(seed ^ 0x6461_6d61);
        // It comes to no end in so few steps, and that is no error here.
        let _ = self.run_for(dice.below(60));
        self.hosts.load_damaged(&mut dice)
    }

    /// Does what the plan says, until nothing is left to be done.
    pub fn run(&mut self) -> Verdict {
        // A requester with the shortest time for an answer looks for a frozen peer each 8 us, for up to some seconds.
        self.run_for(1_000_000)
    }

    /// Does what the plan says, in so many steps at most.
    fn run_for(&mut self, steps: u64) -> Verdict {
        for _ in 0..steps {
            self.freezes.pass(&mut self.hosts, &mut self.dice, self.tells)?;
            let timer = self.hosts.settle();
            self.poll()?;
            if self.act()? {
                continue;
            }
            let works = self.ends.iter().filter_map(End::next_post);
            let receives = self.queues.iter().filter_map(Receives::next_post);
            let moves = self.moves.front().map(|(time, ..)| *time);
            let times = works.chain(receives).chain(moves).chain(self.freezes.next());
            if !self.hosts.pass(times.chain(timer)) {
                return self.end();
            }
        }
        Err("the schedule never ends".into())
    }

    /// Posts what is due; whether something was.
    fn act(&mut self) -> Verdict<bool> {
        let now = self.now();
        let mut has_posted = self.move_addresses(now);
        for queue in self.queues.iter_mut().filter(|queue| !self.freezes.has(queue.guest)) {
            has_posted |= queue.post(&mut self.hosts.guests[queue.guest], now)?;
        }
        for number in 0..self.ends.len() {
            let (own, other) = pair(&mut self.ends, number);
            if self.freezes.has(own.plan.guest) {
                continue;
            }
            let guest = &mut self.hosts.guests[own.plan.guest];
            has_posted |= own.post(guest, now, other, &mut self.dice, self.tells);
        }
        Ok(has_posted)
    }

    /// Takes addresses from guests, and gives them to guests; whether that was due for one.
    fn move_addresses(&mut self, now: u64) -> bool {
        let mut has_moved = false;
        while self.moves.front().is_some_and(|(time, ..)| *time <= now) {
            let Some((_, comes, number)) = self.moves.pop_front() else { break };
            has_moved = true;
            if self.tells {
                println!(
                    "{now} guest {number} {} its address",
                    if comes { "gets" } else { "loses" }
                );
            }
            let guest = &mut self.hosts.guests[number];
            if !comes {
                guest.del_gid(0).unwrap();
                continue;
            }
            guest.add_gid(0, guest.gid, 0).unwrap();
            if !self.plan.guests[number].is_there_first() {
                // All ends that are connected late are those of its connections.
                let late = (0..self.ends.len()).filter(|end| self.plan.connects_late(*end));
                late.for_each(|end| connect(&self.ends, end, &mut self.hosts));
            }
        }
        has_moved
    }

    /// Takes all CQEs, and judges them.
    fn poll(&mut self) -> Verdict {
        let mut cqes = Vec::new();
        for (guest, cqn) in self.cqs.iter().filter(|(guest, _)| !self.freezes.has(*guest)) {
            let polled = std::iter::from_fn(|| self.hosts.guests[*guest].poll(*cqn));
            cqes.extend(polled.map(|cqe| (*guest, cqe)));
        }
        // What has arrived is known before the sender is judged.
        let is_receive = |(_, cqe): &(usize, virtio_rdma_cqe)| cqe.wr_id & IS_RECEIVE != 0;
        cqes.sort_by_key(|cqe| !is_receive(cqe));
        for (guest, cqe) in &cqes {
            if self.tells {
                let (wr_id, status, opcode) = brief(Some(*cqe)).unwrap();
                let now = self.now();
                println!("{now} guest {guest} gets {wr_id:#x} status {status} opcode {opcode}");
            }
            self.take_cqe(*guest, cqe)?;
        }
        if !cqes.is_empty() || self.dice.happens(50) {
            for number in 0..self.ends.len() {
                self.check(number).map_err(|why| self.name(number, &why))?;
            }
        }
        Ok(())
    }

    fn name(&self, end: usize, why: &str) -> String {
        format!("{} ns, end {end}: {why}", self.now())
    }

    fn take_cqe(&mut self, guest: usize, cqe: &virtio_rdma_cqe) -> Verdict {
        let is_its = |end: &End| (end.plan.guest, end.qpn) == (guest, cqe.qp_num);
        let Some(end) = self.ends.iter().position(is_its) else {
            return Err(format!("guest {guest} gets a CQE of QP {}", cqe.qp_num));
        };
        let number = (cqe.wr_id as u32 >> 16) as usize;
        let index = (cqe.wr_id & 0xffff) as usize;
        let taken = if cqe.wr_id & IS_RECEIVE != 0 {
            self.take_receive(end, number, index, cqe)
        } else if number == end {
            self.take_send(end, index, cqe)
        } else {
            Err(format!("it gets work request {index} of end {number}"))
        };
        taken.map_err(|why| self.name(end, &why))
    }

    /// Judges a CQE of a send queue.
    fn take_send(&mut self, end: usize, index: usize, cqe: &virtio_rdma_cqe) -> Verdict {
        let now = self.now();
        let own = &mut self.ends[end];
        let guest = &mut self.hosts.guests[own.plan.guest];
        let status = u32::from(cqe.status);
        let was_failed = own.model.failed.is_some();
        let since = std::mem::replace(&mut own.progress, now);
        for done in own.model.complete(index, status, cqe.opcode.into())? {
            if status == OK || done < index {
                own.check_result(guest, done)?;
            }
            own.poison(guest, done);
        }
        if status == OK || was_failed || self.has_reason(end, index, status, since) {
            return Ok(());
        }
        Err(format!("work request {index} ends with {status} for no reason"))
    }

    /// Judges a CQE of a queue of receives.
    fn take_receive(
        &mut self,
        end: usize,
        queue: usize,
        index: usize,
        cqe: &virtio_rdma_cqe,
    ) -> Verdict {
        let (own, other) = pair(&mut self.ends, end);
        if !own.plan.queues.contains(&queue) {
            return Err(format!("it takes a receive of queue {queue}"));
        }
        let found = self.queues[queue].complete(&self.hosts.guests[own.plan.guest], end, index)?;
        let number = own.received;
        own.received += 1;
        let status = u32::from(cqe.status);
        if status == FLUSHED {
            own.is_flushed = true;
            return Ok(());
        }
        if own.is_flushed {
            return Err(format!("receive {index} ends with {status} after others were flushed"));
        }
        let now = self.hosts.now();
        let guests = [&*own, &*other].map(|end| &self.plan.guests[end.plan.guest]);
        let longest = self.plan.links.between(guests[0].address, guests[1].address).longest();
        if guests[0].is_away(now, now) || guests[1].is_away(now.saturating_sub(longest), now) {
            return Err(format!("receive {index} ends while an address is away"));
        }
        let named = other.model.taker(number).map(|work| own.plan.queues[work.queue]);
        if named != Some(queue) {
            return Err(format!("receive {index} of queue {queue} ends, not of {named:?}"));
        }
        if status != OK {
            return other.model.check_refused(number, status);
        }
        check_message(other.model.arrive()?, cqe, &found)
            .map_err(|why| format!("receive {index}: {why}"))
    }

    /// Judges the area that the peer of an end works on, and what the end knows to have arrived.
    fn check(&mut self, end: usize) -> Verdict {
        let (own, other) = pair(&mut self.ends, end);
        own.model.check_area(&self.hosts.guests[other.plan.guest].bytes(other.memory, AREA))?;
        own.model.check_arrived()
    }

    /// Returns whether the first error of a direction has a reason. `since` is when it got on before.
    fn has_reason(&self, end: usize, index: usize, status: u32, since: u64) -> bool {
        let (own, other) = (&self.ends[end], &self.ends[peer(end)]);
        let guests = [own, other].map(|end| &self.plan.guests[end.plan.guest]);
        let faults = self.plan.links.between(guests[0].address, guests[1].address);
        let is_flawed = |model: &Model| {
            model.flawed.is_some_and(|flawed| fails_responder(&model.posted[flawed].work))
        };
        let longest = faults.longest();
        let has_marks = faults.mark + faults.corrupt != 0;
        match status {
            FLUSHED => is_flawed(&other.model),
            VIRTIO_RDMA_WC_RETRY_EXC_ERR => {
                let qps = [(guests[0], own.qpn), (guests[1], other.qpn)];
                let qps = qps.map(|(guest, qpn)| (guest.address as u8 + 1, qpn));
                let retries = usize::from(own.plan.retry_cnt) + 1;
                let answer = 4096 << own.plan.timeout;
                // What was lost may have been sent before what was answered last.
                let since = since.saturating_sub(2 * longest);
                let vain = guests.map(|guest| guest.tries_in_vain(since, self.now(), answer));
                // A guest of the same network is waited for.
                let is_near = guests[0].host == guests[1].host;
                let frozen = guests.map(|guest| {
                    if is_near {
                        0
                    } else {
                        guest.tries_while_frozen(since, self.now(), answer)
                    }
                });
                let harm = self.hosts.network.harm_since(since, &qps);
                is_flawed(&own.model)
                    || other.model.failed.is_some()
                    || has_marks
                    || answer < 2 * longest
                    || harm + vain[0] + vain[1] + frozen[0] + frozen[1] >= retries
            }
            VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR => {
                let work = &own.model.posted[index].work;
                let queue = &self.queues[other.plan.queues[work.queue]];
                let since = guests[0].seen_since(self.now()).saturating_sub(longest);
                let since = if has_marks { 0 } else { since };
                let receive = own.model.receive_of(index);
                own.plan.rnr_retry != 7
                    && receive.is_some_and(|number| queue.may_lack(number, since))
            }
            _ => own.model.explains(index, status),
        }
    }

    /// Judges what is left when nothing happens any more, and ends all QPs.
    fn end(&mut self) -> Verdict {
        for number in 0..self.ends.len() {
            self.end_direction(number).map_err(|why| self.name(number, &why))?;
        }
        for end in &self.ends {
            let guest = &mut self.hosts.guests[end.plan.guest];
            let state = u32::from(guest.query(end.qpn).qp_state);
            if end.is_flushed && state != VIRTIO_RDMA_QPS_ERR {
                return Err(format!("QP {} has flushed receives in state {state}", end.qpn));
            }
            guest.set_state(end.qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
        }
        self.hosts.settle();
        self.poll()?;
        self.queues.iter().try_for_each(|queue| queue.check_end(&self.hosts.guests[queue.guest]))
    }

    fn end_direction(&mut self, end: usize) -> Verdict {
        let (own, other) = pair(&mut self.ends, end);
        if !own.works.is_empty() {
            return Err(format!("{} work requests were never posted", own.works.len()));
        }
        let failed = own.model.failed.is_some() || other.model.failed.is_some();
        let found = self.hosts.guests[other.plan.guest].bytes(other.memory, AREA);
        if !failed {
            if own.model.flawed.is_some() {
                return Err(format!("{:?} is flawed, and did not fail", own.model.flawed));
            }
            return own.model.check_end(&found);
        }
        // The end that knows nothing of the failure of the other one has nothing to send.
        if own.model.next != own.model.posted.len() {
            return Err(format!("work request {} never completes", own.model.next));
        }
        own.model.check_area(&found)
    }
}

/// Returns an end of a connection, and the other one.
fn pair(ends: &mut [End], end: usize) -> (&mut End, &mut End) {
    let other = peer(end);
    let (front, back) = ends.split_at_mut(end.max(other));
    let (low, high) = (&mut front[end.min(other)], &mut back[0]);
    if end < other {
        (low, high)
    } else {
        (high, low)
    }
}
