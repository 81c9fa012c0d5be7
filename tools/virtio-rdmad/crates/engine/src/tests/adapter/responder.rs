// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The responder of an adapter. It takes packets in their order alone, and tells the requester of each gap once.

use std::collections::VecDeque;

use roce::{
    Aeth, AtomicAckEth, Credits, ExtendedHeaders, Msn, NakCode, Opcode, Operation, Packet,
    Position, Psn, RnrTimer, Service, Syndrome,
};

use super::nic::{Habits, MTU, RKEY};

/// An answer: its opcode, its PSN, its headers, and its payload.
pub type Answer = (Opcode, Psn, ExtendedHeaders, Vec<u8>);

/// The responder of an adapter.
pub struct Responder {
    habits: Habits,
    expected: Psn,
    msn: Msn,
    was_told: bool,
    /// The memory that peers name by [`RKEY`], from the address 0 on.
    pub memory: Vec<u8>,
    /// The lengths of the receives that were posted.
    receives: VecDeque<usize>,
    /// The messages that have come, and their immediate data.
    pub received: Vec<(Vec<u8>, Option<[u8; 4]>)>,
    /// The message whose first packet has come: SENDs collect their data, WRITEs have the address of the next byte.
    message: Option<Message>,
    /// The READs that may be asked for again.
    reads: VecDeque<Read>,
    /// The atomics that were done, with what they found.
    atomics: Vec<(Psn, u64)>,
    pub answers: VecDeque<Answer>,
    /// Whether a NAK has ended the connection.
    pub has_failed: bool,
    /// The number of packets with an opcode that an adapter does not know.
    pub unknown: u64,
    /// The number of RNR NAKs.
    pub rnr_naks: u64,
    /// The number of packets that came early, and of those that came twice.
    pub early: u64,
    pub duplicates: u64,
    /// The number of requests for a part of a READ that the responder has forgotten.
    pub forgotten: u64,
}

/// A READ that was answered: its first PSN, the PSN behind its last one, and the part of it that is kept.
struct Read {
    first: Psn,
    end: Psn,
    va: u64,
    len: u64,
}

/// The most READs that a responder keeps.
const MOST_READS: usize = 16;

enum Message {
    Send(Vec<u8>),
    Write(usize),
}

impl Responder {
    pub fn new(habits: Habits, psn: Psn) -> Self {
        Self {
            habits,
            expected: psn,
            msn: Msn::default(),
            was_told: false,
            memory: vec![0; 4 << 20],
            receives: VecDeque::new(),
            received: Vec::new(),
            message: None,
            reads: VecDeque::new(),
            atomics: Vec::new(),
            answers: VecDeque::new(),
            has_failed: false,
            unknown: 0,
            rnr_naks: 0,
            early: 0,
            duplicates: 0,
            forgotten: 0,
        }
    }

    /// Posts receives of so many bytes. With credits, an adapter tells of them (an unsolicited acknowledgement, IBA
    /// 9.7.7.2.6).
    pub fn post_receives(&mut self, count: usize, len: usize) {
        self.receives.extend(std::iter::repeat_n(len, count));
        if self.habits.gives_credits {
            self.acknowledge(self.expected.minus(1));
        }
    }

    fn credits(&self) -> Credits {
        if !self.habits.gives_credits {
            return Credits::UNLIMITED;
        }
        let fits = |code: &u8| {
            let messages = Credits::new(*code).unwrap().messages();
            messages.is_some_and(|messages| usize::from(messages) <= self.receives.len())
        };
        Credits::new((0..31).rev().find(fits).unwrap_or(0)).unwrap()
    }

    fn answer(&mut self, operation: Operation, psn: Psn, extended: ExtendedHeaders) {
        let opcode = Opcode::new(Service::Rc, operation, Position::Only).unwrap();
        self.answers.push_back((opcode, psn, extended, Vec::new()));
    }

    /// Answers a packet by an acknowledgement or a NAK.
    pub fn syndrome(&mut self, psn: Psn, syndrome: Syndrome) {
        let aeth = Some(Aeth { syndrome, msn: self.msn });
        self.answer(Operation::Acknowledge, psn, ExtendedHeaders { aeth, ..Default::default() });
    }

    fn acknowledge(&mut self, psn: Psn) {
        self.syndrome(psn, Syndrome::Ack(self.credits()));
    }

    fn refuse(&mut self, psn: Psn, code: NakCode) {
        self.has_failed = true;
        self.syndrome(psn, Syndrome::Nak(code));
    }

    /// Handles a request.
    pub fn take(&mut self, packet: &Packet<'_>) {
        if self.has_failed {
            return;
        }
        let psn = packet.headers.bth.psn;
        match psn.distance_from(self.expected) {
            0 => self.execute(packet),
            1.. => {
                self.early += 1;
                if !std::mem::replace(&mut self.was_told, true) {
                    self.syndrome(self.expected, Syndrome::Nak(NakCode::PsnSequenceError));
                }
            }
            _ => {
                self.duplicates += 1;
                self.repeat(packet);
            }
        }
    }

    fn repeat(&mut self, packet: &Packet<'_>) {
        let bth = &packet.headers.bth;
        match bth.opcode.operation() {
            Operation::ReadRequest if self.keeps(packet) => self.read(packet),
            Operation::ReadRequest => self.forgotten += 1,
            Operation::FetchAdd => {
                let found = self.atomics.iter().find(|(psn, _)| *psn == bth.psn);
                if let Some((psn, original)) = found.copied() {
                    self.answer_atomic(psn, original);
                }
            }
            // The last packet that was received is acknowledged (IBA C9-105).
            _ => self.acknowledge(self.expected.minus(1)),
        }
    }

    /// Returns whether a part of a READ is kept that is asked for again.
    fn keeps(&mut self, packet: &Packet<'_>) -> bool {
        let (psn, reth) = (packet.headers.bth.psn, packet.headers.extended.reth.unwrap());
        let is_it = |read: &&mut Read| !psn.is_before(read.first) && psn.is_before(read.end);
        let Some(read) = self.reads.iter_mut().find(is_it) else { return false };
        let (va, len) = (reth.va, u64::from(reth.dma_len));
        let is_kept = va >= read.va && len <= read.len && va + len <= read.va + read.len;
        if is_kept && self.habits.forgets_parts {
            read.va = va;
        }
        is_kept
    }

    fn execute(&mut self, packet: &Packet<'_>) {
        let bth = &packet.headers.bth;
        let (operation, position) = (bth.opcode.operation(), bth.opcode.position());
        let is_first = matches!(position, Position::First | Position::Only);
        let is_last = matches!(position, Position::Last | Position::Only);
        self.was_told = false;
        match operation {
            Operation::Send | Operation::SendWithImmediate => {
                if is_first && self.receives.is_empty() {
                    self.rnr_naks += 1;
                    self.was_told = true;
                    return self.syndrome(bth.psn, Syndrome::RnrNak(RnrTimer::new(12).unwrap()));
                }
                let mut data = match self.message.take() {
                    Some(Message::Send(data)) => data,
                    _ => Vec::new(),
                };
                data.extend_from_slice(packet.payload);
                if is_last {
                    let room = self.receives.pop_front().unwrap();
                    assert!(data.len() <= room, "a message of {} bytes", data.len());
                    let immediate = packet.headers.extended.imm_dt.map(|word| word.0);
                    self.received.push((data, immediate));
                } else {
                    self.message = Some(Message::Send(data));
                }
            }
            Operation::Write => {
                let at = match (&packet.headers.extended.reth, self.message.take()) {
                    (Some(reth), _) if reth.rkey != RKEY => {
                        return self.refuse(bth.psn, NakCode::RemoteAccessError);
                    }
                    (Some(reth), _) => reth.va as usize,
                    (None, Some(Message::Write(at))) => at,
                    _ => panic!("a WRITE without a beginning"),
                };
                let end = at + packet.payload.len();
                self.memory[at..end].copy_from_slice(packet.payload);
                self.message = (!is_last).then_some(Message::Write(end));
            }
            Operation::ReadRequest => {
                let reth = packet.headers.extended.reth.unwrap();
                if reth.rkey != RKEY {
                    return self.refuse(bth.psn, NakCode::RemoteAccessError);
                }
                self.msn = self.msn.next();
                self.expected = bth.psn.plus((reth.dma_len as usize).div_ceil(MTU).max(1) as u32);
                let (first, end) = (bth.psn, self.expected);
                self.reads.push_back(Read { first, end, va: reth.va, len: reth.dma_len.into() });
                self.reads.drain(..self.reads.len().saturating_sub(MOST_READS));
                return self.read(packet);
            }
            Operation::FetchAdd => {
                let add = packet.headers.extended.atomic_eth.unwrap();
                let place = &mut self.memory[add.va as usize..][..8];
                let original = u64::from_le_bytes(place.try_into().unwrap());
                place.copy_from_slice(&original.wrapping_add(add.swap_add).to_le_bytes());
                self.atomics.push((bth.psn, original));
                self.msn = self.msn.next();
                self.expected = bth.psn.plus(1);
                return self.answer_atomic(bth.psn, original);
            }
            other => panic!("{other:?} from the guest"),
        }
        self.expected = bth.psn.plus(1);
        if is_last {
            self.msn = self.msn.next();
        }
        if bth.ack_request {
            self.acknowledge(bth.psn);
        }
    }

    fn answer_atomic(&mut self, psn: Psn, original: u64) {
        let aeth = Some(Aeth { syndrome: Syndrome::Ack(self.credits()), msn: self.msn });
        let atomic_ack_eth = Some(AtomicAckEth { original });
        let extended = ExtendedHeaders { aeth, atomic_ack_eth, ..Default::default() };
        self.answer(Operation::AtomicAcknowledge, psn, extended);
    }

    /// Answers a READ, or the rest of one.
    fn read(&mut self, packet: &Packet<'_>) {
        let reth = packet.headers.extended.reth.unwrap();
        let data = self.memory[reth.va as usize..][..reth.dma_len as usize].to_vec();
        let count = data.len().div_ceil(MTU).max(1);
        let aeth = Aeth { syndrome: Syndrome::Ack(self.credits()), msn: self.msn };
        for index in 0..count {
            let position = match (index == 0, index + 1 == count) {
                (true, true) => Position::Only,
                (true, false) => Position::First,
                (false, true) => Position::Last,
                (false, false) => Position::Middle,
            };
            let opcode = Opcode::new(Service::Rc, Operation::ReadResponse, position).unwrap();
            let aeth = (position != Position::Middle).then_some(aeth);
            let extended = ExtendedHeaders { aeth, ..Default::default() };
            let part = data[index * MTU..data.len().min((index + 1) * MTU)].to_vec();
            let psn = packet.headers.bth.psn.plus(index as u32);
            self.answers.push_back((opcode, psn, extended, part));
        }
    }
}
