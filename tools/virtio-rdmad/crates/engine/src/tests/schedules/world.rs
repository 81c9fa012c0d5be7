// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Two guests on two hosts that do what a plan says, in virtual time, and the reference that judges what
//! they get.

use std::collections::VecDeque;

use abi::*;
use zerocopy::{FromZeros, IntoBytes};

use super::dice::Dice;
use super::hosts::Hosts;
use super::model::{fails_responder, fresh_area, Model, Posted, Verdict};
use super::network::Network;
use super::plan::{EndPlan, Flaw, Op, Place, Plan, Work, AREA};
use crate::tests::driver::*;

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
const FLUSHED: u32 = VIRTIO_RDMA_WC_WR_FLUSH_ERR;

/// The work requests of a queue that are not done, at most.
pub const DEPTH: usize = 16;
/// The bytes of guest memory that a QP uses: its area, what it sends, and its receives.
pub const SHARE: u64 = 0x5_0000;
pub const SENDS: u64 = 0x1_0000;
pub const RECEIVES: u64 = 0x3_0000;
/// The bit of `wr_id` that a receive has.
const IS_RECEIVE: u64 = 1 << 63;
/// What memory has that nothing was written to.
const UNTOUCHED: u8 = 0xa5;
/// What memory has that its owner uses again.
const USED_AGAIN: u8 = 0x5a;

/// A receive that was posted.
struct Receive {
    len: usize,
    time: u64,
}

/// One end of a connection.
struct End {
    /// The guest.
    guest: usize,
    qpn: u32,
    cqn: u32,
    /// Where its memory begins.
    memory: u64,
    /// The key of its area, for its peer, and of the rest.
    area_key: u32,
    key: u32,
    plan: EndPlan,
    /// What it sends, as its peer sees it.
    model: Model,
    /// What is to be posted, and when the next of it is.
    works: VecDeque<(u64, Work)>,
    receives: VecDeque<(u64, Place)>,
    work_at: u64,
    receive_at: u64,
    /// Receives that were posted, and how many of them have completed.
    posted: Vec<Receive>,
    received: usize,
    /// Whether receives were flushed.
    is_flushed: bool,
    /// When its requester last got on.
    progress: u64,
}

struct Connection {
    ends: [End; 2],
}

pub struct World {
    plan: Plan,
    hosts: Hosts,
    connections: Vec<Connection>,
    dice: Dice,
    tells: bool,
}

impl World {
    pub fn new(seed: u64, plan: Plan, tells: bool) -> Self {
        let hosts = Hosts::new(seed, &plan.faults, tells);
        let connections = Vec::new();
        let dice = Dice::new(seed ^ 0x776f_726c);
        let mut world = Self { plan, hosts, connections, dice, tells };
        world.connect();
        world
    }

    /// Makes all connections.
    fn connect(&mut self) {
        let plans = self.plan.connections.clone();
        let objects: Vec<_> = self
            .hosts
            .guests
            .iter_mut()
            .map(|guest| (guest.create_pd(), guest.create_cq(256)))
            .collect();
        for (number, plan) in (0..).zip(plans) {
            let mut ends = [0, 1].map(|side| {
                let (pdn, cqn) = objects[side];
                let (guest, end) = (&mut self.hosts.guests[side], plan.ends[side].clone());
                let memory = DATA + number * SHARE;
                let access = ALL | VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL;
                let area = guest.reg_mr(pdn, memory, AREA as u64, access);
                let rest = guest.reg_mr(pdn, memory + SENDS, SHARE - SENDS, LOCAL);
                // What the peer sends works on this area.
                let bytes = fresh_area(number);
                guest.memory.write(memory, &bytes).unwrap();
                End {
                    guest: side,
                    qpn: guest.create_qp(pdn, cqn, VIRTIO_RDMA_QPT_RC),
                    cqn,
                    memory,
                    area_key: area.rkey,
                    key: rest.lkey,
                    model: Model::new(128 << plan.path_mtu, bytes),
                    works: end.works.iter().copied().collect(),
                    receives: end.receives.iter().copied().collect(),
                    work_at: end.works.first().map_or(0, |(pause, _)| *pause),
                    receive_at: end.receives.first().map_or(0, |(pause, _)| *pause),
                    plan: end,
                    posted: Vec::new(),
                    received: 0,
                    is_flushed: false,
                    progress: 0,
                }
            });
            for side in 0..2 {
                let (own, other) = (&ends[side], &ends[1 - side]);
                let (guest, dgid) = (&mut self.hosts.guests[own.guest], gid(other.guest as u8 + 1));
                make_connection(guest, own, other, dgid, plan.path_mtu);
            }
            // A receive that is not late is there before the peer can send.
            for (end, guest) in ends.iter_mut().zip(&mut self.hosts.guests) {
                end.post_receives(guest, 0);
            }
            self.connections.push(Connection { ends });
        }
    }

    fn now(&self) -> u64 {
        self.hosts.now()
    }

    /// Does what the plan says, until nothing is left to be done.
    pub fn run(&mut self) -> Verdict {
        for _ in 0..200_000 {
            let timer = self.hosts.settle();
            self.poll()?;
            if self.act() {
                continue;
            }
            let posts = self.connections.iter().flat_map(|connection| &connection.ends);
            if !self.hosts.pass(posts.filter_map(End::next_post).chain(timer)) {
                return self.end();
            }
        }
        Err("the schedule never ends".into())
    }

    /// Posts what is due; whether something was.
    fn act(&mut self) -> bool {
        let now = self.now();
        let mut has_posted = false;
        for connection in &mut self.connections {
            for side in 0..2 {
                let remote = (connection.ends[1 - side].memory, connection.ends[1 - side].area_key);
                let end = &mut connection.ends[side];
                let guest = &mut self.hosts.guests[end.guest];
                has_posted |= end.post_receives(guest, now);
                has_posted |= end.post_works(guest, now, remote, &mut self.dice, self.tells);
            }
        }
        has_posted
    }

    /// Takes all CQEs, and judges them.
    fn poll(&mut self) -> Verdict {
        let now = self.now();
        let mut has_news = false;
        for side in 0..self.hosts.guests.len() {
            let cqn = self.connections[0].ends[side].cqn;
            while let Some(cqe) = self.hosts.guests[side].poll(cqn) {
                if self.tells {
                    let (wr_id, status, opcode) = brief(Some(cqe)).unwrap();
                    println!("{now} guest {side} gets {wr_id:#x} status {status} opcode {opcode}");
                }
                has_news = true;
                self.take_cqe(side, &cqe)?;
            }
        }
        if has_news || self.dice.happens(50) {
            for number in 0..self.connections.len() {
                for side in 0..2 {
                    self.check(number, side).map_err(|why| self.name(number, side, &why))?;
                }
            }
        }
        Ok(())
    }

    fn name(&self, number: usize, side: usize, why: &str) -> String {
        format!("{} ns, connection {number}, end {side}: {why}", self.now())
    }

    fn take_cqe(&mut self, side: usize, cqe: &virtio_rdma_cqe) -> Verdict {
        let number = (cqe.wr_id as u32 >> 16) as usize;
        let index = (cqe.wr_id & 0xffff) as usize;
        let taken = if cqe.wr_id & IS_RECEIVE == 0 {
            self.take_send(number, side, index, cqe)
        } else {
            self.take_receive(number, side, index, cqe)
        };
        taken.map_err(|why| self.name(number, side, &why))
    }

    /// Judges a CQE of a send queue.
    fn take_send(
        &mut self,
        number: usize,
        side: usize,
        index: usize,
        cqe: &virtio_rdma_cqe,
    ) -> Verdict {
        let now = self.now();
        let ends = &mut self.connections[number].ends;
        let (own, other) = split(ends, side);
        let guest = &mut self.hosts.guests[own.guest];
        if cqe.qp_num != own.qpn {
            return Err(format!("a CQE names QP {}", cqe.qp_num));
        }
        let status = u32::from(cqe.status);
        let was_failed = own.model.failed.is_some();
        let since = std::mem::replace(&mut own.progress, now);
        for done in own.model.complete(index, status, cqe.opcode.into())? {
            if status == OK || done < index {
                own.check_result(guest, done)?;
            }
            own.poison(guest, done);
        }
        if status == OK || was_failed {
            return Ok(());
        }
        own.explain(index, status, other, now, since, &self.plan, &self.hosts.network)
    }

    /// Judges a CQE of a receive queue.
    fn take_receive(
        &mut self,
        number: usize,
        side: usize,
        index: usize,
        cqe: &virtio_rdma_cqe,
    ) -> Verdict {
        let ends = &mut self.connections[number].ends;
        let (own, other) = split(ends, side);
        let guest = &mut self.hosts.guests[own.guest];
        if cqe.qp_num != own.qpn || index != own.received || index >= own.posted.len() {
            return Err(format!("receive {index} completes, {} is next", own.received));
        }
        own.received += 1;
        let status = u32::from(cqe.status);
        if status == FLUSHED {
            own.is_flushed = true;
            return Ok(());
        }
        if own.is_flushed {
            return Err(format!("receive {index} ends with {status} after others were flushed"));
        }
        let len = own.posted[index].len;
        let found = guest.bytes(own.receive_at(index), len);
        if status != OK {
            return other.model.check_refused(index, status);
        }
        check_message(other.model.arrive()?, cqe, &found)
            .map_err(|why| format!("receive {index}: {why}"))
    }

    /// Judges the area that an end works on, and what it knows to have arrived.
    fn check(&mut self, number: usize, side: usize) -> Verdict {
        let (own, other) = split(&mut self.connections[number].ends, side);
        own.model.check_area(&self.hosts.guests[other.guest].bytes(other.memory, AREA))?;
        own.model.check_arrived()
    }

    /// Judges what is left when nothing happens any more, and ends all QPs.
    fn end(&mut self) -> Verdict {
        for number in 0..self.connections.len() {
            for side in 0..2 {
                self.end_direction(number, side).map_err(|why| self.name(number, side, &why))?;
            }
        }
        for connection in &mut self.connections {
            for end in &mut connection.ends {
                let guest = &mut self.hosts.guests[end.guest];
                let state = u32::from(guest.query(end.qpn).qp_state);
                if end.is_flushed && state != VIRTIO_RDMA_QPS_ERR {
                    return Err(format!("QP {} has flushed receives in state {state}", end.qpn));
                }
                guest.set_state(end.qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
            }
        }
        self.hosts.settle();
        self.poll()?;
        let ends = self.connections.iter().flat_map(|connection| &connection.ends);
        for end in ends {
            if end.received != end.posted.len() {
                return Err(format!("receive {} of QP {} never completes", end.received, end.qpn));
            }
        }
        Ok(())
    }

    fn end_direction(&mut self, number: usize, side: usize) -> Verdict {
        let (own, other) = split(&mut self.connections[number].ends, side);
        if !own.works.is_empty() {
            return Err(format!("{} work requests were never posted", own.works.len()));
        }
        let failed = own.model.failed.is_some() || other.model.failed.is_some();
        let found = self.hosts.guests[other.guest].bytes(other.memory, AREA);
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
fn split(ends: &mut [End; 2], side: usize) -> (&mut End, &mut End) {
    let [a, b] = ends;
    if side == 0 {
        (a, b)
    } else {
        (b, a)
    }
}

/// Brings a QP to RTS.
fn make_connection(guest: &mut Guest, own: &End, other: &End, dgid: crate::Gid, path_mtu: u8) {
    guest.make_init(own.qpn, ALL | VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL);
    let mut attr = virtio_rdma_qp_attr::new_zeroed();
    attr.qp_state = VIRTIO_RDMA_QPS_RTR as u8;
    (attr.path_mtu, attr.rq_psn, attr.dest_qp_num) = (path_mtu, other.plan.psn, other.qpn);
    (attr.max_dest_rd_atomic, attr.min_rnr_timer) = (other.plan.max_rd_atomic, own.plan.rnr_timer);
    (attr.ah_attr.grh.dgid, attr.ah_attr.grh.hop_limit) = (dgid, 64);
    (attr.ah_attr.ah_flags, attr.ah_attr.port_num) = (VIRTIO_RDMA_AH_GRH as u8, 1);
    let mask = VIRTIO_RDMA_QP_STATE
        | VIRTIO_RDMA_QP_AV
        | VIRTIO_RDMA_QP_PATH_MTU
        | VIRTIO_RDMA_QP_DEST_QPN
        | VIRTIO_RDMA_QP_RQ_PSN
        | VIRTIO_RDMA_QP_MAX_DEST_RD_ATOMIC
        | VIRTIO_RDMA_QP_MIN_RNR_TIMER;
    guest.modify(own.qpn, mask, attr).unwrap();
    let mut attr = virtio_rdma_qp_attr::new_zeroed();
    attr.qp_state = VIRTIO_RDMA_QPS_RTS as u8;
    (attr.sq_psn, attr.max_rd_atomic) = (own.plan.psn, own.plan.max_rd_atomic);
    (attr.timeout, attr.retry_cnt) = (own.plan.timeout, own.plan.retry_cnt);
    attr.rnr_retry = own.plan.rnr_retry;
    let mask = VIRTIO_RDMA_QP_STATE
        | VIRTIO_RDMA_QP_SQ_PSN
        | VIRTIO_RDMA_QP_TIMEOUT
        | VIRTIO_RDMA_QP_RETRY_CNT
        | VIRTIO_RDMA_QP_RNR_RETRY
        | VIRTIO_RDMA_QP_MAX_QP_RD_ATOMIC;
    guest.modify(own.qpn, mask, attr).unwrap();
}

/// Judges a message by its CQE and by the memory of its receive.
fn check_message(posted: &Posted, cqe: &virtio_rdma_cqe, found: &[u8]) -> Verdict {
    let (opcode, imm, written) = match posted.work.op {
        Op::Send { imm, .. } => (VIRTIO_RDMA_WC_RECV, imm, posted.data.as_slice()),
        Op::Write { imm, .. } => (VIRTIO_RDMA_WC_RECV_RDMA_WITH_IMM, imm, [].as_slice()),
        _ => return Err("it is no message".into()),
    };
    let expected = (opcode, posted.work.op.len(), imm);
    let has_imm = cqe.wc_flags & VIRTIO_RDMA_WC_WITH_IMM != 0;
    let got = (cqe.opcode.into(), cqe.byte_len as usize, has_imm.then_some(cqe.ex));
    if got != expected {
        return Err(format!("its CQE says {got:x?}, not {expected:x?}"));
    }
    let (message, rest) = found.split_at(written.len());
    if message != written {
        return Err("its data is wrong".into());
    }
    if rest.iter().any(|byte| *byte != UNTOUCHED) {
        return Err("bytes behind it were written".into());
    }
    Ok(())
}

impl End {
    /// Returns when something can be posted, if that can be told.
    fn next_post(&self) -> Option<u64> {
        let work = self.works.front().filter(|_| self.has_send_room()).map(|_| self.work_at);
        let receive = self.receives.front().filter(|_| self.has_receive_room());
        work.into_iter().chain(receive.map(|_| self.receive_at)).min()
    }

    fn has_send_room(&self) -> bool {
        self.model.posted.len() - self.model.next < DEPTH
    }

    fn has_receive_room(&self) -> bool {
        self.posted.len() - self.received < DEPTH
    }

    /// Returns where a receive goes.
    fn receive_at(&self, index: usize) -> u64 {
        self.memory + RECEIVES + (index % DEPTH * AREA) as u64
    }

    /// Returns where the local memory of a work request is.
    fn send_at(&self, index: usize) -> u64 {
        self.memory + SENDS + (index % DEPTH * AREA) as u64
    }

    fn wr_id(&self, index: usize) -> u64 {
        ((self.memory - DATA) / SHARE) << 16 | index as u64
    }

    fn post_receives(&mut self, guest: &mut Guest, now: u64) -> bool {
        let mut has_posted = false;
        while self.receive_at <= now && self.has_receive_room() {
            let Some((_, Place { len, has_key })) = self.receives.pop_front() else { break };
            let index = self.posted.len();
            let at = self.receive_at(index);
            guest.memory.write(at, &vec![UNTOUCHED; len]).unwrap();
            let wr_id = IS_RECEIVE | self.wr_id(index);
            let key = if has_key { self.key } else { self.key ^ 0x0100_0000 };
            guest.post_recv(self.qpn, wr_id, &pieces(at, len, 3000, key));
            self.posted.push(Receive { len, time: now });
            self.receive_at = now + self.receives.front().map_or(0, |(pause, _)| *pause);
            has_posted = true;
        }
        has_posted
    }

    fn post_works(
        &mut self,
        guest: &mut Guest,
        now: u64,
        remote: (u64, u32),
        dice: &mut Dice,
        tells: bool,
    ) -> bool {
        let mut has_posted = false;
        while self.work_at <= now && self.has_send_room() {
            let Some((_, mut work)) = self.works.pop_front() else { break };
            let index = self.model.posted.len();
            // A queue full of what is not signaled would stay full.
            work.is_signaled |= index + 1 - self.model.next == DEPTH;
            let at = self.send_at(index);
            let sends = matches!(work.op, Op::Send { .. } | Op::Write { .. } | Op::Store { .. });
            let data = if sends { dice.bytes(work.op.len()) } else { Vec::new() };
            let local = if sends { data.clone() } else { vec![UNTOUCHED; work.op.len()] };
            guest.memory.write(at, &local).unwrap();
            if tells {
                println!("{now} QP {} posts {index}: {work:?}", self.qpn);
            }
            let (wr_id, key, qpn) = (self.wr_id(index), self.key, self.qpn);
            let send = request(wr_id, self.model.post(work, data), at, key, remote);
            guest.post_send(qpn, &send);
            self.work_at = now + self.works.front().map_or(0, |(pause, _)| *pause);
            has_posted = true;
        }
        has_posted
    }

    /// Judges what a work request has brought.
    fn check_result(&self, guest: &Guest, index: usize) -> Verdict {
        let op = self.model.posted[index].work.op;
        let found = guest.bytes(self.send_at(index), op.len());
        match op {
            Op::Read { .. } => self.model.check_read(index, &found),
            Op::Add { .. } | Op::Swap { .. } => {
                let word = u64::from_le_bytes(found.try_into().unwrap());
                self.model.check_atomic(index, word)
            }
            _ => Ok(()),
        }
    }

    /// Uses the memory of a work request again that is done.
    fn poison(&self, guest: &Guest, index: usize) {
        let len = self.model.posted[index].work.op.len();
        guest.memory.write(self.send_at(index), &vec![USED_AGAIN; len]).unwrap();
    }

    /// Judges whether the first error of a direction has a reason.
    #[allow(clippy::too_many_arguments)] // each is a fact of its own
    fn explain(
        &self,
        index: usize,
        status: u32,
        other: &End,
        now: u64,
        since: u64,
        plan: &Plan,
        network: &Network,
    ) -> Verdict {
        let is_flawed = |model: &Model| {
            model.flawed.is_some_and(|flawed| fails_responder(&model.posted[flawed].work))
        };
        let longest = plan.faults.longest();
        let has_reason = match status {
            FLUSHED => is_flawed(&other.model),
            VIRTIO_RDMA_WC_RETRY_EXC_ERR => {
                let qps = [self, other].map(|end| (end.guest as u8 + 1, end.qpn));
                let retries = usize::from(self.plan.retry_cnt) + 1;
                let answer = 4096 << self.plan.timeout;
                is_flawed(&self.model)
                    || other.model.failed.is_some()
                    || plan.faults.mark + plan.faults.corrupt != 0
                    || answer < 2 * longest
                    || network.harm_since(since.saturating_sub(longest), &qps) >= retries
            }
            VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR => {
                let receive = self.model.receive_of(index);
                let posted = receive.map(|receive| other.posted.get(receive));
                let is_late = |receive: &Receive| receive.time + longest >= now;
                let has_mark = plan.faults.mark + plan.faults.corrupt != 0;
                self.plan.rnr_retry != 7
                    && posted.is_some_and(|posted| has_mark || posted.is_none_or(is_late))
            }
            _ => self.model.explains(index, status),
        };
        if has_reason {
            Ok(())
        } else {
            Err(format!("work request {index} ends with {status} for no reason"))
        }
    }
}

/// Returns SGEs of at most so many bytes each, and not more than 8.
fn pieces(at: u64, len: usize, piece: usize, key: u32) -> Vec<virtio_rdma_sge> {
    let piece = piece.max(len.div_ceil(8)).max(1);
    let cut = |from| sge(at + from as u64, piece.min(len - from) as u32, key);
    (0..len).step_by(piece).map(cut).collect()
}

/// Returns the work request that was posted; `remote` is the area of the peer, and its key.
fn request(wr_id: u64, posted: &Posted, at: u64, key: u32, remote: (u64, u32)) -> Send {
    let work = &posted.work;
    let len = work.op.len();
    let key = if work.flaw == Some(Flaw::LocalKey) { key ^ 0x0100_0000 } else { key };
    let sges = pieces(at, len, work.piece, key);
    let (area, rkey) = remote;
    let rkey = if work.flaw == Some(Flaw::RemoteKey) { rkey ^ 0x0100_0000 } else { rkey };
    let shift = match work.flaw {
        Some(Flaw::RemoteRange) => AREA as u64,
        Some(Flaw::Unaligned) => 4,
        _ => 0,
    };
    let remote_at = |at: usize| area + at as u64 + shift;
    let send = |opcode| Send::new(wr_id, opcode, &sges);
    let mut send = match work.op {
        Op::Send { imm: None, .. } => send(VIRTIO_RDMA_WR_SEND),
        Op::Send { imm: Some(imm), .. } => send(VIRTIO_RDMA_WR_SEND_WITH_IMM).imm(imm),
        Op::Write { at, imm: None, .. } => {
            send(VIRTIO_RDMA_WR_RDMA_WRITE).rdma(remote_at(at), rkey)
        }
        Op::Write { at, imm: Some(imm), .. } => {
            send(VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM).imm(imm).rdma(remote_at(at), rkey)
        }
        Op::Read { at, .. } => send(VIRTIO_RDMA_WR_RDMA_READ).rdma(remote_at(at), rkey),
        Op::Add { at, value } => {
            send(VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD).atomic(remote_at(at), rkey, value, 0)
        }
        Op::Swap { at, value, .. } => {
            let compare = posted.compare;
            send(VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP).atomic(remote_at(at), rkey, compare, value)
        }
        Op::Store { at } => send(VIRTIO_RDMA_WR_ATOMIC_WRITE).rdma(remote_at(at), rkey),
        Op::Flush { at, len } => {
            let mut entry = virtio_rdma_ring_flush_wqe::new_zeroed();
            (entry.type_, entry.rkey) = (VIRTIO_RDMA_FLUSH_GLOBAL as u8, rkey);
            (entry.remote_addr, entry.length) = (remote_at(at), len as u64);
            Send { wr: entry.as_bytes().to_vec(), ..send(VIRTIO_RDMA_WR_FLUSH) }
        }
    };
    let signaled = if work.is_signaled { VIRTIO_RDMA_SEND_SIGNALED } else { 0 };
    let fenced = if work.is_fenced { VIRTIO_RDMA_SEND_FENCE } else { 0 };
    send = send.flags(signaled | fenced);
    if work.is_inline {
        send = send.inline(&posted.data);
        send.sges.clear();
    }
    send
}
