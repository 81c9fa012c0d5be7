// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The completion batch: CQEs, and counts of messages, that are held back until they can be handed over
//! together.

use std::sync::Arc;

use smallvec::SmallVec;

use super::hca::Hca;
use crate::base::counters::{Counter, Stats};
use crate::queue::cq::Cqe;

/// Counters that a round adds to at its end: those of every message.
const TALLIED: usize = Counter::MulticastRcvPackets as usize + 1;

/// CQs, and peers, that are held back at most: each message looks through these.
const MOST: usize = 64;

/// The traffic of a port, which is counted at the end of a round.
#[derive(Clone, Copy, Default)]
pub(crate) struct Traffic {
    /// Payload bytes sent.
    pub xmit_bytes: u64,
    /// Packets sent.
    pub xmit_packets: u64,
    /// Payload bytes received.
    pub rcv_bytes: u64,
    /// Packets received.
    pub rcv_packets: u64,
}

impl Traffic {
    /// Returns the traffic of a message of `bytes` for its sender.
    pub fn sent(bytes: u64, packets: u32) -> Self {
        Self { xmit_bytes: bytes, xmit_packets: packets.into(), ..Self::default() }
    }

    /// Returns the traffic of the other end.
    pub fn mirrored(self) -> Self {
        Self {
            xmit_bytes: self.rcv_bytes,
            xmit_packets: self.rcv_packets,
            rcv_bytes: self.xmit_bytes,
            rcv_packets: self.xmit_packets,
        }
    }

    #[inline(always)]
    fn add(&mut self, other: Self) {
        self.xmit_bytes += other.xmit_bytes;
        self.xmit_packets += other.xmit_packets;
        self.rcv_bytes += other.rcv_bytes;
        self.rcv_packets += other.rcv_packets;
    }

    /// Returns the addition to each counter.
    fn counters(self) -> [(Counter, u64); 4] {
        [
            (Counter::XmitBytes, self.xmit_bytes),
            (Counter::XmitPackets, self.xmit_packets),
            (Counter::RcvBytes, self.rcv_bytes),
            (Counter::RcvPackets, self.rcv_packets),
        ]
    }
}

/// Completions that went into a CQ, and the traffic that was received with them.
struct Touched {
    hca: Arc<Hca>,
    cq: u16,
    messages: u64,
    bytes: u64,
}

/// A completion that is yet to be placed.
struct Completion {
    /// The index of its CQ in `CompletionBatch::touched`.
    touched: usize,
    cqe: Cqe,
    solicited: bool,
}

/// Places the CQEs of a list that is held back, those of each CQ under one lock.
fn place(held: &mut Vec<Completion>, touched: &[Touched]) {
    while let Some(Completion { touched: next, .. }) = held.first() {
        let next = *next;
        let Touched { hca, cq, .. } = &touched[next];
        let those = held.iter().filter(|held| held.touched == next);
        hca.complete(*cq, those.map(|held| (&held.cqe, held.solicited)));
        held.retain(|held| held.touched != next);
    }
}

/// The completion batch: what visits leave to be done later, once for all of their messages. Guests are told of what
/// was placed when it is dropped, too: a round that a panic ends is that of one guest, and its peers sleep otherwise.
#[derive(Default)]
pub(crate) struct CompletionBatch {
    touched: SmallVec<[Touched; 2]>,
    /// CQEs of receives that are held back, and those of sends.
    receives: Vec<Completion>,
    sends: Vec<Completion>,
    traffic: SmallVec<[(Arc<Hca>, Traffic); 2]>,
    /// The traffic of the HCA that is served.
    own: Traffic,
    tally: [u64; TALLIED],
}

impl CompletionBatch {
    /// Holds the CQE of a send back for [`Self::place_completions`], which has to come before the
    /// half of the QP that it completes a work request of is unlocked: its CQEs are in the order of
    /// its work requests. The guest is told later.
    pub fn complete_send(&mut self, hca: &Arc<Hca>, cq: u16, cqe: Cqe) {
        let touched = self.touch(hca, cq);
        self.sends.push(Completion { touched, cqe, solicited: false });
    }

    /// Holds the CQE of a receive back, as [`Self::complete_send`] does.
    pub fn complete_receive(&mut self, hca: &Arc<Hca>, cq: u16, cqe: Cqe, solicited: bool) {
        let touched = self.touch(hca, cq);
        self.receives.push(Completion { touched, cqe, solicited });
    }

    /// Counts a message of `bytes` that was received; its CQE was the last.
    pub fn count_receive(&mut self, bytes: u64) {
        if let Some(held) = self.receives.last() {
            let place = &mut self.touched[held.touched];
            place.messages += 1;
            place.bytes += bytes;
        }
    }

    /// Returns the place of a CQ among those that were touched. Most likely it is one of the last two, those of the two
    /// ends of a connection.
    #[inline(always)]
    fn touch(&mut self, hca: &Arc<Hca>, cq: u16) -> usize {
        let is_it = |touched: &Touched| touched.cq == cq && Arc::ptr_eq(&touched.hca, hca);
        match self.touched.as_slice() {
            [.., last] if is_it(last) => self.touched.len() - 1,
            [.., before, _] if is_it(before) => self.touched.len() - 2,
            _ => self.touch_another(hca, cq),
        }
    }

    #[inline(never)]
    fn touch_another(&mut self, hca: &Arc<Hca>, cq: u16) -> usize {
        if self.touched.len() >= MOST && self.has_placed_all() {
            self.tell();
        }
        let is_it = |touched: &Touched| touched.cq == cq && Arc::ptr_eq(&touched.hca, hca);
        self.touched.iter().rposition(is_it).unwrap_or_else(|| {
            let hca = Arc::clone(hca);
            self.touched.push(Touched { hca, cq, messages: 0, bytes: 0 });
            self.touched.len() - 1
        })
    }

    /// Places the CQEs that are held back. Those of receives are first, also in a CQ that has both: a program that sees
    /// that a send is complete finds that its message has arrived.
    pub fn place_completions(&mut self) {
        place(&mut self.receives, &self.touched);
        place(&mut self.sends, &self.touched);
    }

    /// Returns whether no CQE is held back.
    fn has_placed_all(&self) -> bool {
        self.receives.is_empty() && self.sends.is_empty()
    }

    /// Adds to the traffic of the HCA that is served.
    #[inline(always)]
    pub fn carry_own(&mut self, traffic: Traffic) {
        self.own.add(traffic);
    }

    /// Adds to the traffic of a peer.
    #[inline(always)]
    pub fn carry(&mut self, hca: &Arc<Hca>, traffic: Traffic) {
        match self.traffic.iter_mut().find(|(other, _)| Arc::ptr_eq(other, hca)) {
            Some((_, sum)) => sum.add(traffic),
            None => self.carry_first(hca, traffic),
        }
    }

    #[cold]
    fn carry_first(&mut self, hca: &Arc<Hca>, traffic: Traffic) {
        if self.traffic.len() >= MOST {
            self.settle_traffic();
        }
        self.traffic.push((Arc::clone(hca), traffic));
    }

    /// Adds to a counter of the HCA that is served; one of those up to
    /// [`Counter::MulticastRcvPackets`].
    pub fn count(&mut self, counter: Counter, value: u64) {
        if let Some(place) = self.tally.get_mut(counter as usize) {
            *place += value;
        }
    }

    /// Tells the guests of completions.
    pub fn announce(&mut self) {
        debug_assert!(self.has_placed_all(), "a CQE is told of before it is placed");
        self.tell();
    }

    fn tell(&mut self) {
        for Touched { hca, cq, messages, bytes } in self.touched.drain(..) {
            if messages != 0 {
                hca.stats.add(Counter::ReceiveMessages, messages);
                hca.stats.add(Counter::ReceiveBytes, bytes);
            }
            hca.announce(cq);
        }
    }

    /// Adds the counts of the batch to the counters.
    pub fn settle(&mut self, stats: &Stats) {
        self.settle_traffic();
        for (counter, value) in std::mem::take(&mut self.own).counters() {
            self.count(counter, value);
        }
        for (counter, value) in Counter::ALL.iter().zip(&mut self.tally) {
            if *value != 0 {
                stats.add(*counter, std::mem::take(value));
            }
        }
    }

    fn settle_traffic(&mut self) {
        for (hca, traffic) in self.traffic.drain(..) {
            for (counter, value) in traffic.counters() {
                if value != 0 {
                    hca.stats.add(counter, value);
                }
            }
        }
    }
}

impl Drop for CompletionBatch {
    fn drop(&mut self) {
        self.tell();
    }
}
