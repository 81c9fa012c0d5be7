// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The reference: what a reliable connection guarantees to its two ends, in one direction (IBA 9.7, 10.8,
//! 11.4). It knows nothing of packets but their size.
//!
//! * Each work request completes once, in order; those that are not signaled complete without a CQE, unless
//!   the QP has failed.
//! * Requests have their effect once, in order: at each moment the memory of the responder is what the
//!   first so many packets make of it. Nothing behind a request that was refused has an effect.
//! * Each message takes one receive, in order.
//! * An atomic finds what the requests before it have left. So does a READ, unless later requests changed
//!   it already: only a fenced one waits for the READ (IBA 10.8.3.3).

use abi::*;

use super::plan::{Flaw, Op, Work, AREA};
use super::receives::UNTOUCHED;

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
const FLUSHED: u32 = VIRTIO_RDMA_WC_WR_FLUSH_ERR;

/// A work request that was posted.
pub struct Posted {
    pub work: Work,
    /// The data that it sends; empty for an atomic.
    pub data: Vec<u8>,
    /// The word that a compare-and-swap compares with.
    pub compare: u64,
    /// The steps before it, and those up to its end.
    steps: (usize, usize),
}

/// The effect of a packet: bytes of the area that are others then.
struct Step {
    at: usize,
    bytes: Vec<u8>,
}

/// The judgement of the reference. The error says what is wrong.
pub type Verdict<T = ()> = Result<T, String>;

/// One direction of a connection.
pub struct Model {
    mtu: usize,
    pub posted: Vec<Posted>,
    steps: Vec<Step>,
    /// The area before the first step, and after the last.
    first: Vec<u8>,
    last: Vec<u8>,
    /// The steps that were done at least, and the area after these.
    done: usize,
    area: Vec<u8>,
    /// The next work request that completes.
    pub next: usize,
    /// The work request that has failed, and its status.
    pub failed: Option<(usize, u32)>,
    /// The first work request that something is wrong with.
    pub flawed: Option<usize>,
    /// The work requests that take receives, and how many of them have arrived.
    takers: Vec<usize>,
    pub arrived: usize,
    /// The number of these work requests that must have arrived, because they have completed.
    due: usize,
}

impl Model {
    pub fn new(mtu: usize, area: Vec<u8>) -> Self {
        Self {
            mtu,
            posted: Vec::new(),
            steps: Vec::new(),
            first: area.clone(),
            last: area.clone(),
            done: 0,
            area,
            next: 0,
            failed: None,
            flawed: None,
            takers: Vec::new(),
            arrived: 0,
            due: 0,
        }
    }

    /// Returns a word as it is when all that was posted is done.
    fn word(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.last[at..at + 8].try_into().unwrap())
    }

    /// Follows a work request that is posted with this data. Returns what it is.
    pub fn post(&mut self, work: Work, data: Vec<u8>) -> &Posted {
        let before = self.steps.len();
        let is_vain = self.flawed.is_some();
        let index = self.posted.len();
        let mut compare = 0;
        if work.flaw.is_some() && !is_vain {
            self.flawed = Some(index);
        }
        if !is_vain && work.flaw.is_none() {
            match work.op {
                Op::Write { at, .. } => {
                    for (packet, bytes) in data.chunks(self.mtu).enumerate() {
                        self.step(at + packet * self.mtu, bytes);
                    }
                }
                Op::Store { at } => self.step(at, &data),
                Op::Add { at, value } => {
                    let word = self.word(at).wrapping_add(value);
                    self.step(at, &word.to_le_bytes());
                }
                Op::Swap { at, matches, value } => {
                    compare = if matches { self.word(at) } else { !self.word(at) };
                    if matches {
                        self.step(at, &value.to_le_bytes());
                    }
                }
                Op::Send { .. } | Op::Read { .. } | Op::Flush { .. } => {}
            }
        }
        if work.op.takes_receive() {
            self.takers.push(index);
        }
        let steps = (before, self.steps.len());
        self.posted.push(Posted { work, data, compare, steps });
        &self.posted[index]
    }

    fn step(&mut self, at: usize, bytes: &[u8]) {
        self.last[at..at + bytes.len()].copy_from_slice(bytes);
        self.steps.push(Step { at, bytes: bytes.to_vec() });
    }

    /// Notes that so many steps were done.
    fn need(&mut self, steps: usize) {
        while self.done < steps {
            self.redo();
        }
    }

    /// Does the next step.
    fn redo(&mut self) {
        let Step { at, bytes } = &self.steps[self.done];
        self.area[*at..at + bytes.len()].copy_from_slice(bytes);
        self.done += 1;
    }

    /// Judges what the area of the responder has at this moment.
    pub fn check_area(&mut self, found: &[u8]) -> Verdict {
        let from = self.done;
        while self.area != found {
            if self.done == self.steps.len() {
                let at = self.area.iter().zip(found).position(|(one, other)| one != other);
                return Err(format!(
                    "the area is that after none of the steps from {from} to {}; byte {at:?} differs from the last",
                    self.done
                ));
            }
            self.redo();
        }
        Ok(())
    }

    /// Judges a CQE of the send queue. Returns the work requests that are done with it.
    pub fn complete(&mut self, index: usize, status: u32, opcode: u32) -> Verdict<Vec<usize>> {
        let from = self.next;
        if index < from || index >= self.posted.len() {
            return Err(format!("work request {index} completes, but {from} is next"));
        }
        let expected = opcode_of(self.posted[index].work.op);
        if opcode != expected {
            return Err(format!("work request {index} has opcode {opcode}, not {expected}"));
        }
        if let Some((failed, _)) = self.failed {
            if index != from || status != FLUSHED {
                return Err(format!(
                    "work request {index} ends with {status}; {from} is next after {failed} has failed"
                ));
            }
            self.next += 1;
            return Ok(vec![index]);
        }
        let silent = from..index;
        if let Some(lost) = silent.clone().find(|index| self.posted[*index].work.is_signaled) {
            return Err(format!("work request {index} completes before {lost}, which is signaled"));
        }
        if status == OK {
            if !self.posted[index].work.is_signaled {
                return Err(format!("work request {index} is not signaled, and completes"));
            }
            if self.flawed.is_some_and(|flawed| index >= flawed) {
                return Err(format!("work request {index} succeeds behind {:?}", self.flawed));
            }
            self.need(self.posted[index].steps.1);
        } else {
            self.failed = Some((index, status));
            self.need(self.posted[index].steps.0);
        }
        let done = index + usize::from(status == OK);
        self.due = self.takers.partition_point(|taker| *taker < done);
        self.next = index + 1;
        Ok((from..=index).collect())
    }

    /// Judges the status with which the direction has failed, if a work request is wrong. `None`: nothing
    /// that was posted here explains it.
    pub fn explains(&self, index: usize, status: u32) -> bool {
        let Some(flawed) = self.flawed else { return false };
        let works = &self.posted[index.min(flawed)..flawed];
        // The NAK of a request tells that those before it were done, but their responses may be lost.
        let may_be_early = works.iter().any(|posted| posted.work.op.is_answered());
        let is_its = index == flawed || index < flawed && may_be_early;
        is_its && status_of(&self.posted[flawed].work) == status
    }

    /// Judges the data of a READ that has completed.
    pub fn check_read(&self, index: usize, found: &[u8]) -> Verdict {
        let Op::Read { at, len } = self.posted[index].work.op else { return Ok(()) };
        let fenced = self.posted[index + 1..].iter().find(|posted| posted.work.is_fenced);
        let last = fenced.map_or(self.steps.len(), |posted| posted.steps.0);
        let mut area = self.first.clone();
        let mut is_found = vec![false; len.div_ceil(self.mtu)];
        for step in 0..=last {
            if step >= self.posted[index].steps.0 {
                for (packet, bytes) in found.chunks(self.mtu).enumerate() {
                    let at = at + packet * self.mtu;
                    is_found[packet] |= area[at..at + bytes.len()] == *bytes;
                }
            }
            if step < last {
                let Step { at, bytes } = &self.steps[step];
                area[*at..at + bytes.len()].copy_from_slice(bytes);
            }
        }
        match is_found.iter().position(|is_found| !is_found) {
            None => Ok(()),
            Some(packet) => {
                Err(format!("packet {packet} of READ {index} is what the memory never was"))
            }
        }
    }

    /// Judges the result of an atomic that has completed.
    pub fn check_atomic(&self, index: usize, found: u64) -> Verdict {
        let posted = &self.posted[index];
        let (Op::Add { at, .. } | Op::Swap { at, .. }) = posted.work.op else { return Ok(()) };
        let mut area = self.first.clone();
        for Step { at, bytes } in &self.steps[..posted.steps.0] {
            area[*at..at + bytes.len()].copy_from_slice(bytes);
        }
        let expected = u64::from_le_bytes(area[at..at + 8].try_into().unwrap());
        if found == expected {
            Ok(())
        } else {
            Err(format!("atomic {index} has found {found:#x}, not {expected:#x}"))
        }
    }

    /// Returns the message that arrives next, which has arrived then.
    pub fn arrive(&mut self) -> Verdict<&Posted> {
        let number = self.arrived;
        let Some(&index) = self.takers.get(number) else {
            return Err(format!("message {number} arrives, and was not sent"));
        };
        if self.flawed.is_some_and(|flawed| index >= flawed) {
            return Err(format!("work request {index} arrives behind {:?}", self.flawed));
        }
        self.arrived += 1;
        let Posted { work, steps, .. } = &self.posted[index];
        let steps = if matches!(work.op, Op::Send { .. }) { steps.0 } else { steps.1 };
        self.need(steps);
        Ok(&self.posted[index])
    }

    /// Judges the status of a receive that has failed.
    pub fn check_refused(&self, receive: usize, status: u32) -> Verdict {
        let flawed = self.flawed.filter(|flawed| self.receive_of(*flawed) == Some(receive));
        let expected =
            flawed.and_then(|flawed| self.posted[flawed].work.flaw).map(|flaw| match flaw {
                Flaw::ShortReceive => VIRTIO_RDMA_WC_LOC_LEN_ERR,
                Flaw::ReceiveKey => VIRTIO_RDMA_WC_LOC_PROT_ERR,
                _ => VIRTIO_RDMA_WC_LOC_ACCESS_ERR,
            });
        if expected == Some(status) && self.arrived == receive {
            Ok(())
        } else {
            Err(format!("receive {receive} ends with {status}, not {expected:?}"))
        }
    }

    /// Returns the work request whose message comes behind so many others.
    pub fn taker(&self, number: usize) -> Option<&Work> {
        self.takers.get(number).map(|taker| &self.posted[*taker].work)
    }

    /// Returns which receive a work request takes.
    pub fn receive_of(&self, index: usize) -> Option<usize> {
        self.takers.iter().position(|taker| *taker == index)
    }

    /// Judges whether all has arrived that the requester knows to have.
    pub fn check_arrived(&self) -> Verdict {
        if self.arrived < self.due {
            return Err(format!("{} messages have completed, {} arrived", self.due, self.arrived));
        }
        Ok(())
    }

    /// Judges whether all that was posted has completed, and nothing is left to be done.
    pub fn check_end(&mut self, found: &[u8]) -> Verdict {
        if self.next != self.posted.len() {
            return Err(format!("work request {} never completes", self.next));
        }
        if self.failed.is_none() {
            self.need(self.steps.len());
            if self.arrived != self.takers.len() {
                return Err(format!(
                    "{} of {} messages have arrived",
                    self.arrived,
                    self.takers.len()
                ));
            }
        }
        self.check_area(found)
    }
}

/// Returns the `enum virtio_rdma_wc_opcode` of an operation.
fn opcode_of(op: Op) -> u32 {
    match op {
        Op::Send { .. } => VIRTIO_RDMA_WC_SEND,
        Op::Write { .. } => VIRTIO_RDMA_WC_RDMA_WRITE,
        Op::Read { .. } => VIRTIO_RDMA_WC_RDMA_READ,
        Op::Add { .. } => VIRTIO_RDMA_WC_FETCH_ADD,
        Op::Swap { .. } => VIRTIO_RDMA_WC_COMP_SWAP,
        Op::Store { .. } => VIRTIO_RDMA_WC_ATOMIC_WRITE,
        Op::Flush { .. } => VIRTIO_RDMA_WC_FLUSH,
    }
}

/// Returns the status that a work request ends with that is flawed.
fn status_of(work: &Work) -> u32 {
    match work.flaw {
        None => OK,
        Some(Flaw::LocalKey) => VIRTIO_RDMA_WC_LOC_PROT_ERR,
        Some(Flaw::Unaligned | Flaw::ShortReceive | Flaw::OtherSrq) => {
            VIRTIO_RDMA_WC_REM_INV_REQ_ERR
        }
        Some(Flaw::ReceiveKey) => VIRTIO_RDMA_WC_REM_OP_ERR,
        Some(Flaw::RemoteKey | Flaw::RemoteRange) => VIRTIO_RDMA_WC_REM_ACCESS_ERR,
    }
}

/// Returns whether a work request makes the responder fail.
pub fn fails_responder(work: &Work) -> bool {
    work.flaw.is_some_and(|flaw| flaw != Flaw::LocalKey)
}

/// Judges a message by its CQE and by the memory of its receive.
pub fn check_message(posted: &Posted, cqe: &virtio_rdma_cqe, found: &[u8]) -> Verdict {
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

/// The area of a QP before anything is done.
pub fn fresh_area(seed: u64) -> Vec<u8> {
    super::dice::Dice::new(seed).bytes(AREA)
}
