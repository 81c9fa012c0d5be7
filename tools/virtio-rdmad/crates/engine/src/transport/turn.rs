// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What one queue does before the next has its turn, and what a round of turns
//! keeps.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::base::counters::{Counter, Stats};
use crate::device::Shared;
use crate::memory::mr_cache::PinSet;
use crate::queue::cq::Cqe;

/// What work costs, in nanoseconds: what it takes where nothing of it is in the processor's caches.
///
/// These are estimates. What counts is that everything whose amount a guest chooses has a price, so
/// that a turn ends in time whatever the guest wants done.
pub(crate) mod cost {
    /// To look whether a ring has work, without visiting it.
    pub const LOOK: u64 = 20;
    /// To take a timer that has come.
    pub const TIMER: u64 = 200;
    /// To visit a queue, or to ask for its kicks.
    pub const VISIT: u64 = 200;
    /// A message, apart from its bytes.
    pub const MESSAGE: u64 = 250;
    /// A doorbell in a buffer of several.
    pub const DOORBELL: u64 = 20;
    /// To write an event into a buffer.
    pub const EVENT: u64 = 60;
    /// To find a page of memory.
    pub const PAGE: u64 = 50;
    /// To free what was known of a page.
    pub const FREE: u64 = 10;
    /// To copy an entry of a ring to another.
    pub const ENTRY: u64 = 60;
    /// To wait until a peer's round has ended: nothing else is done in this one.
    pub const WAIT: u64 = 100_000;
    /// To look at an object, and to do what a change of another one means for it.
    pub const OBJECT: u64 = 150;
}

/// Nanoseconds of work after which a round ends, so that other guests have their turn: with the turn
/// that comes last, a call of [`crate::Device::run`] takes 0.2 ms at most.
const ROUND: u64 = 100_000;

/// Bytes that are copied in a nanosecond.
const BYTES_PER_NS: u64 = 8;

/// Messages or chunks that one queue is served for before the next has its turn.
const BURST: u32 = 32;

/// The same while no other queue of the guest is known to have work: about 15 us of small ones.
const LONE_BURST: u32 = 128;

/// Bytes likewise. With [`crate::CHUNK`] it bounds how long a small message waits
/// behind each queue that moves large ones.
const BURST_BYTES: u64 = crate::CHUNK;

/// The same while no other queue of the guest is known to have work: about 10 us.
const LONE_BURST_BYTES: u64 = 4 * crate::CHUNK;

/// Counters that a turn adds to at its end: those of every message.
const TALLIED: usize = Counter::MulticastRcvPackets as usize + 1;

/// What a port sent and received, counted at the end of a round.
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
    /// What was sent of a message.
    pub fn sent(bytes: u64, packets: u32) -> Self {
        Self { xmit_bytes: bytes, xmit_packets: packets.into(), ..Self::default() }
    }

    /// The same at the other end.
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

    /// By counter.
    fn counters(self) -> [(Counter, u64); 4] {
        [
            (Counter::XmitBytes, self.xmit_bytes),
            (Counter::XmitPackets, self.xmit_packets),
            (Counter::RcvBytes, self.rcv_bytes),
            (Counter::RcvPackets, self.rcv_packets),
        ]
    }
}

/// Completions that went into a CQ, and what was received with them.
struct Touched {
    device: Arc<Shared>,
    cq: u16,
    messages: u64,
    bytes: u64,
}

/// A completion that is yet to be placed.
pub(crate) struct Completion {
    /// Its CQ: an index of `Outbox::touched`.
    touched: usize,
    /// What is placed.
    pub cqe: Cqe,
    /// Whether it was solicited.
    pub solicited: bool,
    is_receive: bool,
}

/// What turns leave to be done later, once for all of their messages.
#[derive(Default)]
pub(crate) struct Outbox {
    touched: SmallVec<[Touched; 2]>,
    /// CQEs that are held back.
    pub completions: Vec<Completion>,
    traffic: SmallVec<[(Arc<Shared>, Traffic); 2]>,
    tally: [u64; TALLIED],
}

impl Outbox {
    /// Holds the CQE of a send back for [`Self::place_completions`], which has to come before the
    /// half of the QP that it completes a work request of is unlocked: its CQEs are in the order of
    /// its work requests. The guest is told later.
    pub fn complete_send(&mut self, device: &Arc<Shared>, cq: u16, cqe: Cqe) {
        let touched = self.touch(device, cq);
        self.completions.push(Completion { touched, cqe, solicited: false, is_receive: false });
    }

    /// The same for the CQE of a receive.
    pub fn complete_receive(&mut self, device: &Arc<Shared>, cq: u16, cqe: Cqe, solicited: bool) {
        let touched = self.touch(device, cq);
        self.completions.push(Completion { touched, cqe, solicited, is_receive: true });
    }

    /// A message of `bytes` was received; its CQE was the last.
    pub fn count_receive(&mut self, bytes: u64) {
        if let Some(held) = self.completions.last() {
            let place = &mut self.touched[held.touched];
            place.messages += 1;
            place.bytes += bytes;
        }
    }

    fn touch(&mut self, device: &Arc<Shared>, cq: u16) -> usize {
        let is_it = |touched: &Touched| touched.cq == cq && Arc::ptr_eq(&touched.device, device);
        // Most likely it was touched just now.
        self.touched.iter().rposition(is_it).unwrap_or_else(|| {
            let device = Arc::clone(device);
            self.touched.push(Touched { device, cq, messages: 0, bytes: 0 });
            self.touched.len() - 1
        })
    }

    /// Places the CQEs that are held back, each CQ's under one lock. Those of receives are first:
    /// who sees that a send is complete finds that its message has arrived.
    pub fn place_completions(&mut self) {
        let held = &mut self.completions;
        while let Some(next) = held.iter().find(|held| held.is_receive).or(held.first()) {
            let next = next.touched;
            let Touched { device, cq, .. } = &self.touched[next];
            device.complete(*cq, held.iter().filter(|held| held.touched == next));
            held.retain(|held| held.touched != next);
        }
    }

    /// Adds to what the port of the device whose turn it is sent and received.
    pub fn carry_own(&mut self, traffic: Traffic) {
        for (counter, value) in traffic.counters() {
            self.count(counter, value);
        }
    }

    /// Adds to what the port of a peer sent and received.
    #[inline(always)]
    pub fn carry(&mut self, device: &Arc<Shared>, traffic: Traffic) {
        match self.traffic.iter_mut().find(|(other, _)| Arc::ptr_eq(other, device)) {
            Some((_, sum)) => sum.add(traffic),
            None => self.traffic.push((Arc::clone(device), traffic)),
        }
    }

    /// Adds to a counter of the device whose turn it is; one of those up to
    /// [`Counter::MulticastRcvPackets`].
    pub fn count(&mut self, counter: Counter, value: u64) {
        if let Some(place) = self.tally.get_mut(counter as usize) {
            *place += value;
        }
    }

    /// Tells the guests of completions.
    fn announce(&mut self) {
        debug_assert!(self.completions.is_empty(), "a CQE is told of before it is placed");
        for Touched { device, cq, messages, bytes } in self.touched.drain(..) {
            if messages != 0 {
                device.stats.add(Counter::ReceiveMessages, messages);
                device.stats.add(Counter::ReceiveBytes, bytes);
            }
            device.announce(cq);
        }
    }

    /// Adds up what was counted.
    fn settle(&mut self, stats: &Stats) {
        for (device, traffic) in self.traffic.drain(..) {
            for (counter, value) in traffic.counters() {
                if value != 0 {
                    device.stats.add(counter, value);
                }
            }
        }
        for (counter, value) in Counter::ALL.iter().zip(&mut self.tally) {
            if *value != 0 {
                stats.add(*counter, std::mem::take(value));
            }
        }
    }
}

/// How much a queue may do in its turn, and what the turns of a round share.
#[derive(Default)]
pub(crate) struct Turn {
    left: u32,
    bytes: u64,
    most_bytes: u64,
    /// Messages and chunks that the turn began with.
    given: u32,
    /// Nanoseconds that the round has cost so far.
    spent: u64,
    /// Bytes since guests were told of completions.
    untold: u64,
    /// How far the ring of the queue was emptied whose turn it is, if it has one.
    pub taken: Option<u32>,
    /// Regions of the device whose turn it is.
    pub local: PinSet,
    /// Regions of its peer.
    pub remote: PinSet,
    /// What is left for later.
    pub outbox: Outbox,
}

impl Turn {
    /// A turn that is over when all is done.
    pub fn endless() -> Self {
        Self { left: u32::MAX, given: u32::MAX, most_bytes: u64::MAX, ..Self::default() }
    }

    /// Begins a turn of at most `most` messages or chunks, which may be longer if nobody else is
    /// known to wait for one; returns how many.
    pub fn begin(&mut self, most: u32, alone: bool) -> u32 {
        self.left = most.min(if alone { LONE_BURST } else { BURST });
        self.given = self.left;
        self.bytes = 0;
        self.taken = None;
        self.most_bytes = if alone { LONE_BURST_BYTES } else { BURST_BYTES };
        self.left
    }

    /// Whether the turn is over.
    #[inline]
    pub fn is_over(&self) -> bool {
        self.left == 0 || self.bytes >= self.most_bytes
    }

    /// Counts a message or chunk of `bytes`.
    #[inline]
    pub fn spend(&mut self, bytes: u64) {
        self.left = self.left.saturating_sub(1);
        self.bytes += bytes;
    }

    /// Counts other work of so many nanoseconds, [`cost`].
    #[inline]
    pub fn work(&mut self, nanoseconds: u64) {
        self.bytes = self.bytes.saturating_add(nanoseconds.saturating_mul(BYTES_PER_NS));
    }

    /// Counts work between two turns.
    #[inline]
    pub fn work_between(&mut self, nanoseconds: u64) {
        self.spent += nanoseconds;
    }

    /// Whether the round is over.
    #[inline]
    pub fn is_round_over(&self) -> bool {
        self.spent >= ROUND
    }

    /// Messages and chunks that are left.
    pub fn left(&self) -> u32 {
        self.left
    }

    /// Ends a turn. Completions are told with those of the next, unless they have
    /// waited for many bytes.
    pub fn end(&mut self) {
        let messages = u64::from(self.given - self.left);
        self.spent += cost::VISIT + messages * cost::MESSAGE + self.bytes / BYTES_PER_NS;
        self.untold += self.bytes;
        if self.untold >= BURST_BYTES {
            self.untold = 0;
            self.outbox.announce();
        }
    }

    /// No region is held any more.
    pub fn release(&mut self) {
        self.local.release();
        self.remote.release();
    }

    /// Ends a round of turns: no region is held, and what waits is told. Returns what the round has
    /// cost.
    pub fn finish(&mut self, device: &Shared) -> u64 {
        self.release();
        self.outbox.announce();
        self.outbox.settle(&device.stats);
        self.spent
    }
}
