// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The requester of an adapter. It sends at the rate of the line, and only CNPs and credits hold it back.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use roce::{
    AtomicEth, Bth, Credits, ExtendedHeaders, Headers, ImmDt, NakCode, Opcode, Operation, Packet,
    Position, Psn, Reth, Service, Syndrome,
};

use super::nic::{Habits, MTU};

/// The time for an answer, as the connection manager of Linux sets it.
pub const TIMEOUT: Duration = Duration::from_millis(537);
/// The most times that a request is sent again without progress, as the connection manager of Linux sets it.
const RETRIES: u32 = 7;
/// The most READs and atomics under way, as many as the guest's QP remembers (`max_dest_rd_atomic`).
pub const MOST_ANSWERS: usize = 4;
/// The lowest rate of a flow, in bytes per second.
const MIN_RATE: u64 = 12_500_000;
/// The time after which a flow without a CNP recovers half of what it lost (`rpg_time_reset` of mlx5).
const RECOVERY: Duration = Duration::from_micros(300);
/// The number of these steps before the rate becomes higher than it was (`rpg_threshold`).
const STEPS: u32 = 5;
/// By how much it becomes higher then, in bytes per second (`rpg_ai_rate`).
const INCREASE: u64 = 625_000;

/// What an adapter is asked to do with the memory of the guest.
#[derive(Clone, Debug)]
pub enum Work {
    Send { data: Vec<u8>, immediate: Option<u32> },
    Write { at: u64, data: Vec<u8> },
    Read { at: u64, len: usize },
    Add { at: u64, add: u64 },
}

/// A work request under way.
struct Entry {
    number: u64,
    work: Work,
    first: Psn,
    packets: u32,
    /// The number of the message, from 1 on (SSN, IBA 9.7.7.2).
    ssn: u32,
    /// The data of a READ, or the result of an atomic.
    answer: Vec<u8>,
    /// Whether its answer is complete.
    is_answered: bool,
}

impl Entry {
    fn end(&self) -> Psn {
        self.first.plus(self.packets)
    }

    fn has_answer(&self) -> bool {
        matches!(self.work, Work::Read { .. } | Work::Add { .. })
    }
}

/// A work request that is done: its number, and what it has read.
pub type Done = (u64, Vec<u8>);

/// The requester of an adapter.
pub struct Requester {
    habits: Habits,
    rkey: u32,
    entries: VecDeque<Entry>,
    next_psn: Psn,
    next_ssn: u32,
    posted: u64,
    /// Everything in front of this PSN is acknowledged, and answered.
    una: Psn,
    /// The PSN of the next packet.
    nxt: Psn,
    /// The PSN behind all packets that were ever sent.
    max: Psn,
    /// The number of the last message for which there is a credit; `None`: credits are not counted.
    last_credit: Option<u32>,
    rate: u64,
    /// The rate before the last CNP.
    target: u64,
    /// The steps of recovery since the last CNP.
    steps: u32,
    recover_at: Option<Instant>,
    line_free_at: Option<Instant>,
    /// The end of the time for an answer.
    deadline: Option<Instant>,
    /// The number of times that the time was over since the last progress.
    tries: u32,
    rnr_until: Option<Instant>,
    /// Whether the gap at `una` was asked for.
    asked_for_gap: bool,
    pub done: Vec<Done>,
    /// The NAK that has ended the connection.
    pub failed: Option<NakCode>,
    pub timeouts: u64,
    pub rnr_naks: u64,
    pub cnps: u64,
    /// The number of packets sent.
    pub sent: u64,
    /// The number of bytes of acknowledged messages.
    pub acked_bytes: u64,
}

impl Requester {
    pub fn new(habits: Habits, rkey: u32, psn: Psn) -> Self {
        Self {
            habits,
            rkey,
            entries: VecDeque::new(),
            next_psn: psn,
            next_ssn: 1,
            posted: 0,
            una: psn,
            nxt: psn,
            max: psn,
            last_credit: None,
            rate: habits.line_rate,
            target: habits.line_rate,
            steps: 0,
            recover_at: None,
            line_free_at: None,
            deadline: None,
            tries: 0,
            rnr_until: None,
            asked_for_gap: false,
            done: Vec::new(),
            failed: None,
            timeouts: 0,
            rnr_naks: 0,
            cnps: 0,
            sent: 0,
            acked_bytes: 0,
        }
    }

    /// Posts a work request, and returns its number.
    pub fn post(&mut self, work: Work) -> u64 {
        let len = match &work {
            Work::Send { data, .. } | Work::Write { data, .. } => data.len(),
            Work::Read { len, .. } => *len,
            Work::Add { .. } => 8,
        };
        let packets = len.div_ceil(MTU).max(1) as u32;
        let (number, first, ssn) = (self.posted, self.next_psn, self.next_ssn);
        let (answer, is_answered) = (Vec::new(), false);
        self.entries.push_back(Entry { number, work, first, packets, ssn, answer, is_answered });
        self.next_psn = first.plus(packets);
        (self.next_ssn, self.posted) = (ssn + 1, number + 1);
        number
    }

    pub fn is_idle(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns what is under way, for a test that fails.
    pub fn state(&self) -> String {
        let Self { una, nxt, max, last_credit, deadline, rnr_until, failed, .. } = self;
        let entries: Vec<_> =
            self.entries.iter().map(|entry| (entry.first, entry.packets)).collect();
        format!(
            "{entries:?}, {una:?} {nxt:?} {max:?}, credit {last_credit:?}, {deadline:?}, {rnr_until:?}, {failed:?}"
        )
    }

    /// Returns the next packet that is sent at the time `now`, if one may be sent.
    pub fn poll(&mut self, now: Instant) -> Option<(Opcode, Psn, bool, ExtendedHeaders, Vec<u8>)> {
        self.expire(now);
        let is_free = self.line_free_at.is_none_or(|at| at <= now);
        if !is_free || self.rnr_until.is_some_and(|until| until > now) || self.failed.is_some() {
            return None;
        }
        self.rnr_until = None;
        let entry = self.next_entry()?;
        let index = self.nxt.distance_from(entry.first).unsigned_abs();
        let packet = self.packet(entry, index);
        self.nxt = if entry.has_answer() { entry.end() } else { self.nxt.plus(1) };
        if self.nxt.is_after(self.max) {
            self.max = self.nxt;
        }
        self.sent += 1;
        let bytes = packet.4.len() as u64 + 82;
        self.line_free_at = Some(now + Duration::from_nanos(bytes * 1_000_000_000 / self.rate));
        self.deadline.get_or_insert(now + self.timeout());
        Some(packet)
    }

    /// Returns the message of the next packet, if that may be sent.
    fn next_entry(&self) -> Option<&Entry> {
        let entry = self.entries.iter().find(|entry| entry.end().is_after(self.nxt))?;
        (self.has_credit(entry) && self.has_room(entry)).then_some(entry)
    }

    /// Returns whether the peer remembers the answer to a message and all answers in front of it that are missing.
    fn has_room(&self, entry: &Entry) -> bool {
        let in_front = self.entries.iter().filter(|other| other.first.is_before(entry.first));
        let missing = in_front.filter(|other| other.has_answer() && !other.is_answered).count();
        !entry.has_answer() || missing < MOST_ANSWERS
    }

    /// Returns whether a message has a credit. A requester may send one message beyond them when nothing else is under
    /// way (IBA 9.7.7.2.5).
    fn has_credit(&self, entry: &Entry) -> bool {
        let needs = self.habits.obeys_credits && matches!(entry.work, Work::Send { .. });
        let has = self.last_credit.is_none_or(|last| entry.ssn <= last);
        !needs || has || self.una == entry.first
    }

    /// Makes a packet of a message.
    fn packet(&self, entry: &Entry, index: u32) -> (Opcode, Psn, bool, ExtendedHeaders, Vec<u8>) {
        let (psn, is_last) = (entry.first.plus(index), index + 1 == entry.packets);
        let at_byte = index as usize * MTU;
        let part = |data: &[u8]| data[at_byte..data.len().min(at_byte + MTU)].to_vec();
        let position = match (index, is_last) {
            (0, true) => Position::Only,
            (0, false) => Position::First,
            (_, true) => Position::Last,
            _ => Position::Middle,
        };
        let mut extended = ExtendedHeaders::default();
        let of = |operation, position| Opcode::new(Service::Rc, operation, position).unwrap();
        let is_far = psn.get() % 64 == 0;
        match &entry.work {
            Work::Send { data, immediate } => {
                let operation = match immediate.filter(|_| is_last) {
                    Some(word) => {
                        extended.imm_dt = Some(ImmDt(word.to_be_bytes()));
                        Operation::SendWithImmediate
                    }
                    None => Operation::Send,
                };
                (of(operation, position), psn, is_last || is_far, extended, part(data))
            }
            Work::Write { at, data } if self.habits.writes_only => {
                let data = part(data);
                let (va, dma_len) = (at + at_byte as u64, data.len() as u32);
                extended.reth = Some(Reth { va, rkey: self.rkey, dma_len });
                (of(Operation::Write, Position::Only), psn, is_last || is_far, extended, data)
            }
            Work::Write { at, data } => {
                if index == 0 {
                    let dma_len = data.len() as u32;
                    extended.reth = Some(Reth { va: *at, rkey: self.rkey, dma_len });
                }
                (of(Operation::Write, position), psn, is_last || is_far, extended, part(data))
            }
            Work::Read { at, len } => {
                let (va, dma_len) = (at + at_byte as u64, (len - at_byte) as u32);
                extended.reth = Some(Reth { va, rkey: self.rkey, dma_len });
                (of(Operation::ReadRequest, Position::Only), psn, true, extended, Vec::new())
            }
            Work::Add { at, add } => {
                let (va, rkey, swap_add, compare) = (*at, self.rkey, *add, 0);
                extended.atomic_eth = Some(AtomicEth { va, rkey, swap_add, compare });
                (of(Operation::FetchAdd, Position::Only), psn, true, extended, Vec::new())
            }
        }
    }

    fn timeout(&self) -> Duration {
        let first = self.habits.repeats_after.unwrap_or(TIMEOUT);
        (first * 2_u32.pow(self.tries.min(16))).min(TIMEOUT)
    }

    /// Goes back if the time for an answer is over.
    fn expire(&mut self, now: Instant) {
        if self.recover_at.is_some_and(|at| at <= now) {
            self.recover(now);
        }
        if self.deadline.is_some_and(|at| at <= now) {
            self.timeouts += 1;
            self.tries += 1;
            assert!(self.tries <= RETRIES, "no answer after {RETRIES} retries: {}", self.state());
            (self.nxt, self.deadline, self.asked_for_gap) = (self.una, None, false);
        }
    }

    /// Makes a step towards the rate before the last CNP, or beyond it.
    fn recover(&mut self, now: Instant) {
        self.steps += 1;
        if self.steps > STEPS {
            self.target = (self.target + INCREASE).min(self.habits.line_rate);
        }
        self.rate = self.rate.midpoint(self.target);
        let is_whole = self.habits.line_rate - self.rate <= INCREASE;
        self.recover_at = (!is_whole && !self.is_idle()).then_some(now + RECOVERY);
    }

    /// Returns when the requester wants to be asked again.
    pub fn next(&self, now: Instant) -> Option<Instant> {
        let may_send = self.next_entry().is_some() && self.failed.is_none();
        let line = self.line_free_at.unwrap_or(now).max(self.rnr_until.unwrap_or(now));
        may_send.then_some(line).into_iter().chain(self.deadline).chain(self.recover_at).min()
    }

    fn progress(&mut self, now: Instant) {
        (self.tries, self.asked_for_gap) = (0, false);
        let has_more = self.nxt.is_after(self.una);
        self.deadline = has_more.then(|| now + self.timeout());
    }

    /// Handles a CNP.
    pub fn slow_down(&mut self, now: Instant) {
        self.cnps += 1;
        self.target = self.rate;
        self.rate = (self.rate / 2).max(MIN_RATE);
        self.steps = 0;
        self.recover_at = Some(now + RECOVERY);
    }

    /// Handles a packet that answers a request.
    pub fn answer(&mut self, packet: &Packet<'_>, now: Instant) {
        let Headers { bth: Bth { opcode, psn, .. }, extended, .. } = &packet.headers;
        match opcode.operation() {
            Operation::Acknowledge => {
                let aeth = extended.aeth.unwrap();
                match aeth.syndrome {
                    Syndrome::Ack(credits) => {
                        self.take_credits(credits, aeth.msn.get());
                        let end = self.end_by_msn(aeth.msn.get()).unwrap_or(psn.plus(1));
                        self.acknowledged(end, now);
                    }
                    Syndrome::RnrNak(timer) => {
                        self.rnr_naks += 1;
                        self.acknowledged(*psn, now);
                        (self.nxt, self.deadline) = (*psn, None);
                        self.rnr_until = Some(now + timer.delay());
                    }
                    Syndrome::Nak(NakCode::PsnSequenceError) => {
                        self.acknowledged(*psn, now);
                        self.nxt = self.una;
                    }
                    Syndrome::Nak(code) => {
                        self.acknowledged(*psn, now);
                        (self.failed, self.deadline) = (Some(code), None);
                    }
                    Syndrome::Reserved(_) => {}
                }
            }
            Operation::ReadResponse => self.take_data(*psn, packet.payload, now),
            Operation::AtomicAcknowledge => {
                let original = extended.atomic_ack_eth.unwrap().original;
                self.take_data(*psn, &original.to_le_bytes(), now);
            }
            other => panic!("{other:?} is no answer"),
        }
    }

    /// Returns the end of the last message that is done by an MSN, if the adapter goes by that.
    fn end_by_msn(&self, msn: u32) -> Option<Psn> {
        let done = self.entries.iter().take_while(|entry| entry.ssn <= msn).last();
        self.habits.retires_by_msn.then(|| done.map_or(self.una, Entry::end))
    }

    fn take_credits(&mut self, credits: Credits, msn: u32) {
        self.last_credit = credits.messages().map(|messages| msn + u32::from(messages));
    }

    /// Handles an acknowledgement of all in front of a PSN: of SENDs and WRITEs up to the first answer that is missing.
    fn acknowledged(&mut self, end: Psn, now: Instant) {
        if end.is_after(self.max) || !end.is_after(self.una) {
            return;
        }
        let first = self.entries.iter().find(|entry| entry.has_answer() && !entry.is_answered);
        let missing = first.map(|entry| entry.first.plus(entry.answer.len().div_ceil(MTU) as u32));
        let to = missing.filter(|missing| missing.is_before(end));
        let una = to.unwrap_or(end);
        if una.is_after(self.una) {
            self.una = una;
            if self.nxt.is_before(una) {
                self.nxt = una;
            }
            self.progress(now);
        }
        if to.is_some() && !self.asked_for_gap {
            // The answer was lost, because the peer has acknowledged what is behind it.
            (self.nxt, self.asked_for_gap) = (self.una, true);
        }
        self.complete();
    }

    /// Takes a packet of an answer, which has to be the next one.
    fn take_data(&mut self, psn: Psn, payload: &[u8], now: Instant) {
        self.acknowledged_by_answer(psn, now);
        if psn != self.una {
            let is_ahead = psn.is_after(self.una) && psn.is_before(self.max);
            if is_ahead && !self.asked_for_gap {
                (self.nxt, self.asked_for_gap) = (self.una, true);
            }
            return;
        }
        let Some(entry) = self.entries.iter_mut().find(|entry| entry.end().is_after(psn)) else {
            return;
        };
        if !entry.has_answer() {
            return;
        }
        entry.answer.extend_from_slice(payload);
        self.una = psn.plus(1);
        entry.is_answered = self.una == entry.end();
        if self.nxt.is_before(self.una) {
            self.nxt = self.una;
        }
        self.progress(now);
        self.complete();
    }

    /// An answer acknowledges the SENDs and WRITEs in front of it.
    fn acknowledged_by_answer(&mut self, psn: Psn, now: Instant) {
        let entry = self.entries.iter().find(|entry| entry.end().is_after(psn));
        if let Some(first) = entry.map(|entry| entry.first) {
            self.acknowledged(first, now);
        }
    }

    fn complete(&mut self) {
        while let Some(entry) = self.entries.front() {
            if entry.end().is_after(self.una) {
                break;
            }
            let Some(entry) = self.entries.pop_front() else { break };
            if let Work::Send { data, .. } | Work::Write { data, .. } = &entry.work {
                self.acked_bytes += data.len() as u64;
            }
            self.done.push((entry.number, entry.answer));
        }
    }
}
