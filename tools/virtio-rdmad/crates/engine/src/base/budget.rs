// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Budgets: what one visit of a queue may do before the next queue is visited, and what a round of
//! visits may.

/// What work costs, in nanoseconds: what it takes where nothing of it is in the processor's caches.
///
/// These are estimates. What counts is that everything whose amount a guest chooses has a price, so
/// that a visit ends in time whatever the guest wants done.
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
    /// To wait until a peer's round has ended, which leaves no time for anything else in this one.
    pub const WAIT: u64 = 100_000;
    /// To look at an object, and to do what a change of another one means for it.
    pub const OBJECT: u64 = 150;
}

/// Bytes that are copied before other queues are visited.
pub const CHUNK: u64 = 128 << 10;

/// Nanoseconds of work after which a round ends, so that other guests have their turn: with the visit
/// that comes last, a call of [`crate::Device::run`] takes 0.2 ms at most.
const ROUND: u64 = 100_000;

/// Bytes that are copied in a nanosecond.
const BYTES_PER_NS: u64 = 8;

/// Messages or chunks that a visit of a queue serves.
const BURST: u32 = 32;

/// Messages or chunks that a visit serves while no other queue of the guest is known to have work:
/// about 15 us of small ones.
const LONE_BURST: u32 = 128;

/// Bytes that a visit copies. With [`CHUNK`] it bounds how long a small message waits behind each
/// queue that moves large ones.
pub(crate) const BURST_BYTES: u64 = CHUNK;

/// Bytes that a visit copies while no other queue of the guest is known to have work: about 10 us.
const LONE_BURST_BYTES: u64 = 4 * CHUNK;

/// How much a visit may still do, and what the round has cost so far.
#[derive(Default)]
pub(crate) struct Budget {
    /// Messages and chunks that are left.
    left: u32,
    /// Bytes of the visit, and other work as so many bytes.
    bytes: u64,
    most_bytes: u64,
    /// Messages and chunks that the visit began with.
    given: u32,
    /// Nanoseconds that the round has cost so far.
    spent: u64,
}

impl Budget {
    /// Returns a budget that is not exhausted before all is done.
    pub fn endless() -> Self {
        Self { left: u32::MAX, given: u32::MAX, most_bytes: u64::MAX, ..Self::default() }
    }

    /// Begins a visit of at most `most` messages or chunks, which may be longer if it is `alone`: no
    /// other queue is known to wait. Returns how many.
    pub fn begin(&mut self, most: u32, alone: bool) -> u32 {
        self.left = most.min(if alone { LONE_BURST } else { BURST });
        self.given = self.left;
        self.bytes = 0;
        self.most_bytes = if alone { LONE_BURST_BYTES } else { BURST_BYTES };
        self.left
    }

    /// Returns whether the visit is over.
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

    /// Counts work between two visits.
    #[inline]
    pub fn work_between(&mut self, nanoseconds: u64) {
        self.spent += nanoseconds;
    }

    /// Returns whether the round is over.
    #[inline]
    pub fn is_round_over(&self) -> bool {
        self.spent >= ROUND
    }

    /// Returns how many messages and chunks are left.
    pub fn left(&self) -> u32 {
        self.left
    }

    /// Ends the visit, and returns its bytes.
    pub fn end(&mut self) -> u64 {
        let messages = u64::from(self.given - self.left);
        self.spent += cost::VISIT + messages * cost::MESSAGE + self.bytes / BYTES_PER_NS;
        self.bytes
    }

    /// Returns what the round has cost so far, in nanoseconds.
    pub fn spent(&self) -> u64 {
        self.spent
    }
}
