// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The READs and atomics that a responder has carried out and remembers (IBA 9.7.5.1.5, "responder resources").
//!
//! A requester repeats a request whose answer was lost. The answer is sent again only for a request that is remembered.
//! A packet with the PSN of such a request that asks for something else gets no answer.

use std::collections::VecDeque;

use roce::{Psn, Reth};
use serde::{Deserialize, Serialize};

use crate::base::image::{require, Wrong};
use crate::base::limits::MAX_MSG_SIZE;

/// The data of a READ that is yet to be sent.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct ReadReply {
    /// The PSN of the request.
    pub psn: Psn,
    /// The PD that its key must be of.
    pub pdn: u32,
    /// The memory.
    pub remote_addr: u64,
    /// Its key.
    pub rkey: u32,
    /// Bytes.
    pub total: u64,
    /// Packets that were sent.
    pub sent: u32,
    /// The PSN behind its last packet.
    pub end: Psn,
}

impl ReadReply {
    /// Returns a response without data, which answers FLUSH and ATOMIC WRITE (IBA A19).
    pub fn empty(psn: Psn) -> Self {
        Self { psn, pdn: 0, remote_addr: 0, rkey: 0, total: 0, sent: 0, end: psn.plus(1) }
    }

    /// Returns the PSN of the next packet.
    pub fn next(&self) -> Psn {
        self.psn.plus(self.sent)
    }

    /// Returns the bytes of the next packet, of at most `mtu` bytes.
    pub fn next_len(&self, mtu: u64) -> u64 {
        self.total.saturating_sub(u64::from(self.sent) * mtu).min(mtu)
    }

    /// Returns which of its packets has this PSN.
    fn index(&self, psn: Psn) -> Option<u32> {
        let index = u32::try_from(psn.distance_from(self.psn)).ok()?;
        psn.is_before(self.end).then_some(index)
    }

    /// Returns the part of the response that a request of this PSN asks for, which is of `count` packets of `mtu`
    /// bytes; `None` if it is no part of it.
    fn part(&self, psn: Psn, reth: &Reth, count: u32, mtu: u64) -> Option<Self> {
        let skip = u64::from(self.index(psn)?) * mtu;
        let total = u64::from(reth.dma_len);
        let is_part = reth.rkey == self.rkey
            && reth.va == self.remote_addr.wrapping_add(skip)
            && total <= self.total.saturating_sub(skip);
        let end = psn.plus(count);
        is_part.then_some(Self { psn, remote_addr: reth.va, total, sent: 0, end, ..*self })
    }
}

/// The last READs and atomics that were done, as many of each as the peer may have under way.
#[derive(Default)]
pub(crate) struct Answered {
    /// READs, the last one first, with nothing sent.
    reads: VecDeque<ReadReply>,
    /// Atomics and the words that they found, the last one first. A duplicate is answered with that, and not done
    /// again.
    atomics: VecDeque<(Psn, u64)>,
}

/// The image of the requests that were answered.
#[derive(Serialize, Deserialize)]
pub(crate) struct AnsweredImage {
    reads: Vec<ReadReply>,
    atomics: Vec<(Psn, u64)>,
}

impl AnsweredImage {
    /// Returns the requests that were answered; `packets` returns how many packets a response of so many bytes has.
    pub fn load(self, packets: impl Fn(u64) -> u32) -> Result<Answered, Wrong> {
        let Self { reads, atomics } = self;
        let are_few = [reads.len(), atomics.len()].map(|len| u8::try_from(len).is_ok());
        require(are_few == [true; 2], "too many requests were answered")?;
        for read in &reads {
            require(read.total <= MAX_MSG_SIZE.into(), "a READ was too long")?;
            let is_whole = read.sent == 0 && read.end == read.psn.plus(packets(read.total));
            require(is_whole, "a READ had another number of packets")?;
        }
        Ok(Answered { reads: reads.into(), atomics: atomics.into() })
    }
}

impl Answered {
    /// Returns the image.
    pub fn save(&self) -> AnsweredImage {
        let Self { reads, atomics } = self;
        AnsweredImage {
            reads: reads.iter().copied().collect(),
            atomics: atomics.iter().copied().collect(),
        }
    }

    /// Remembers a READ, and as many as the peer may have under way.
    pub fn keep_read(&mut self, read: ReadReply, most: u8) {
        self.reads.truncate(usize::from(most).saturating_sub(1));
        self.reads.push_front(read);
    }

    /// Remembers the result of an atomic, and as many as the peer may have under way.
    pub fn keep_atomic(&mut self, psn: Psn, original: u64, most: u8) {
        self.atomics.truncate(usize::from(most).saturating_sub(1));
        self.atomics.push_front((psn, original));
    }

    /// Returns the response to a READ that repeats an earlier one, or a part of it; `None` if it does not. The response
    /// has `count` packets of `mtu` bytes.
    pub fn read(&self, psn: Psn, reth: &Reth, count: u32, mtu: u64) -> Option<ReadReply> {
        self.reads.iter().find_map(|read| read.part(psn, reth, count, mtu))
    }

    /// Returns the result of an atomic that was done.
    pub fn atomic(&self, psn: Psn) -> Option<u64> {
        self.atomics.iter().find(|(of, _)| *of == psn).map(|(_, original)| *original)
    }

    /// Returns whether this is the PSN of a READ or of an atomic.
    pub fn has(&self, psn: Psn) -> bool {
        self.atomic(psn).is_some() || self.reads.iter().any(|read| read.index(psn).is_some())
    }

    /// Returns the PSN of the first READ or atomic behind this PSN.
    pub fn first_behind(&self, psn: Psn) -> Option<Psn> {
        let reads = self.reads.iter().map(|read| read.psn);
        let all = reads.chain(self.atomics.iter().map(|(of, _)| *of));
        all.filter(|of| of.is_after(psn)).min_by_key(|of| of.distance_from(psn))
    }

    /// Returns the PSN of the oldest READ.
    pub fn oldest_read(&self) -> Option<Psn> {
        self.reads.back().map(|read| read.psn)
    }

    /// Forgets the requests that are half of all PSNs behind the expected one, because new requests are about to have
    /// their PSNs.
    pub fn forget_before(&mut self, expected: Psn) {
        while self.reads.back().is_some_and(|read| read.psn.is_after(expected)) {
            self.reads.pop_back();
        }
        while self.atomics.back().is_some_and(|(psn, _)| psn.is_after(expected)) {
            self.atomics.pop_back();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MTU: u64 = 1024;

    fn read(psn: u32, packets: u32) -> ReadReply {
        let total = u64::from(packets) * MTU;
        let psn = Psn::new(psn);
        let end = psn.plus(packets);
        ReadReply { psn, pdn: 1, remote_addr: 1 << 20, rkey: 7, total, sent: 0, end }
    }

    /// Returns how many packets are sent again for a request of `len` bytes, `skip` bytes behind a READ's memory.
    fn again(answered: &Answered, psn: u32, rkey: u32, skip: u64, len: u32) -> Option<u32> {
        let reth = Reth { va: (1 << 20) + skip, rkey, dma_len: len };
        let count = len.div_ceil(MTU as u32).max(1);
        let part = answered.read(Psn::new(psn), &reth, count, MTU)?;
        Some(part.end.distance_from(part.psn).unsigned_abs())
    }

    #[test]
    fn only_parts_of_reads_are_sent_again() {
        let mut answered = Answered::default();
        answered.keep_read(read(0xff_fff0, 64), 2);
        for (psn, skip, len, packets) in [(0xff_fff0, 0, 65536, 64), (0, 16384, 2000, 2)] {
            assert_eq!(again(&answered, psn, 7, skip, len), Some(packets), "{psn:#x}");
            for (psn, rkey, skip, len) in [
                (psn, 8, skip, len),
                (psn + 1, 7, skip, len),
                (psn, 7, skip + 1, len),
                (psn, 7, skip, len + 65536),
                (psn ^ 0x40_0000, 7, skip, len),
            ] {
                assert_eq!(again(&answered, psn, rkey, skip, len), None, "{psn:#x} {rkey} {skip}");
            }
        }
        answered.keep_read(read(0x30, 1), 2);
        answered.keep_read(read(0x31, 1), 2);
        assert_eq!(again(&answered, 0xff_fff0, 7, 0, 65536), None, "two are remembered");
        assert_eq!(again(&answered, 0x30, 7, 0, 1024), Some(1));
    }

    #[test]
    fn the_first_request_behind_a_psn_is_found() {
        let mut answered = Answered::default();
        assert_eq!(answered.first_behind(Psn::new(0)), None);
        answered.keep_read(read(0xff_fff0, 4), 4);
        answered.keep_atomic(Psn::new(2), 5, 4);
        answered.keep_read(read(8, 4), 4);
        for (psn, first) in [
            (0xff_ff00, Some(0xff_fff0)),
            (0xff_fff0, Some(2)),
            (1, Some(2)),
            (2, Some(8)),
            (8, None),
        ] {
            assert_eq!(answered.first_behind(Psn::new(psn)), first.map(Psn::new), "{psn:#x}");
        }
    }

    /// PSNs come again after 2^24 packets, and are those of other requests then.
    #[test]
    fn what_is_half_of_all_psns_old_is_forgotten() {
        let mut answered = Answered::default();
        answered.keep_read(read(0, (1 << 23) - 1), 2);
        answered.keep_atomic(Psn::new(1 << 22), 5, 2);
        let mut expected = Psn::new((1 << 23) - 1);
        for steps in [1, 1 << 22, (1 << 23) - 1] {
            answered.forget_before(expected);
            let is_old = Psn::new(0).is_after(expected);
            assert_eq!(answered.has(Psn::new(9)), !is_old, "{expected:?}");
            expected = expected.plus(steps);
        }
        answered.forget_before(expected);
        assert!(!answered.has(Psn::new(1 << 22)));
    }
}
