// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Budgets: what one visit of a queue may do before the next queue is visited, and what a round of
//! visits may.
//!
//! What work costs is estimated, because to look at the clock for each message would be a quarter of a small one. An
//! access to a guest's memory can take longer than any estimate, as its page may have to be made, cleared or read from
//! a disk. So a round looks at the clock as well, now and then ([`Stopwatch`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::host::Clock;

/// The costs of work, in nanoseconds, where none of its memory is in the processor's caches.
///
/// These are estimates. All work whose amount a guest chooses has a price, so that a visit ends in time whatever the
/// guest wants.
pub(crate) mod cost {
    /// A look at a ring for work, without a visit.
    pub const LOOK: u64 = 20;
    /// The handling of a timer that has come.
    pub const TIMER: u64 = 200;
    /// A visit of a queue, or the request for its kicks.
    pub const VISIT: u64 = 200;
    /// A message, apart from its bytes.
    pub const MESSAGE: u64 = 250;
    /// A doorbell in a buffer of several.
    pub const DOORBELL: u64 = 20;
    /// The writing of an event into a buffer.
    pub const EVENT: u64 = 60;
    /// The search for a page of memory.
    pub const PAGE: u64 = 50;
    /// The touch of a page of a file, which maps the page into this process.
    pub const TOUCH: u64 = 500;
    /// The release of the state of a page.
    pub const FREE: u64 = 10;
    /// The copy of an entry of a ring to another ring.
    pub const ENTRY: u64 = 60;
    /// The wait for a peer, until its round has ended or it has released a lock. It leaves no time for anything else in
    /// this round.
    pub const WAIT: u64 = 100_000;
    /// A look at an object, and its change after a change of another object.
    pub const OBJECT: u64 = 150;
}

/// Bytes that are copied before other queues are visited.
pub const CHUNK: u64 = 128 << 10;

/// Bytes that are copied at a time while other threads help: to share a copy takes about as long as to copy 8 KiB.
pub(crate) const SHARED_CHUNK: u64 = 4 * CHUNK;

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
const LONE_BURST_BYTES: u64 = SHARED_CHUNK;

/// The time by the clock after which a round ends, whatever the estimate of its work.
const LATE: Duration = Duration::from_micros(200);

/// The longest time between two looks at the clock, unless something holds the thread up.
const STALL: Duration = Duration::from_millis(1);

/// The most work of a visit between two looks at the clock: messages, or bytes.
const LOOK_MESSAGES: u32 = 32;
const LOOK_BYTES: u64 = LONE_BURST_BYTES;

/// Messages and chunks behind a stall that are each followed by a look, so that only one of them can stall again. They
/// are so few that a thread that has no processor now and then does not spend its time with looks.
const WARY: u32 = 1024;

/// Looks at the clock while a round is under way.
#[derive(Default)]
pub(crate) struct Stopwatch {
    /// The clock, once a round has begun.
    clock: Option<Arc<dyn Clock>>,
    /// The work of short visits since the last look, in bytes.
    unseen: u64,
    /// The times of the first and of the last look of the round; `None` before the first look.
    looks: Option<(Instant, Instant)>,
    /// Messages and chunks that are still followed by a look each.
    wary: u32,
    /// The longest time between two looks, if it was a stall.
    stall: Duration,
    /// Whether the round has taken longer than it may.
    is_late: bool,
}

impl Stopwatch {
    /// Begins a round by this clock.
    pub fn begin(&mut self, clock: &Arc<dyn Clock>) {
        self.clock.get_or_insert_with(|| Arc::clone(clock));
        (self.unseen, self.looks) = (0, None);
        (self.stall, self.is_late) = (Duration::ZERO, false);
        if self.wary != 0 {
            self.look();
        }
    }

    /// Returns how many messages and bytes may be done before the next look.
    fn part(&self) -> (u32, u64) {
        if self.wary == 0 {
            (LOOK_MESSAGES, LOOK_BYTES)
        } else {
            (1, 1)
        }
    }

    /// Looks at the end of a visit that has done so much, if it is time for that.
    #[inline]
    fn end_visit(&mut self, messages: u64, bytes: u64) {
        let message = LOOK_BYTES / u64::from(LOOK_MESSAGES);
        self.unseen = self.unseen.saturating_add(bytes).saturating_add(messages * message);
        if self.unseen >= LOOK_BYTES || self.wary != 0 {
            self.look();
        }
    }

    /// Looks at the clock.
    #[cold]
    fn look(&mut self) {
        self.unseen = 0;
        let Some(clock) = &self.clock else { return };
        let now = clock.now();
        let (first, last) = self.looks.unwrap_or((now, now));
        self.looks = Some((first, now));
        let passed = now.saturating_duration_since(last);
        self.wary = self.wary.saturating_sub(1);
        if passed >= STALL {
            self.stall = self.stall.max(passed);
            self.wary = WARY;
        }
        self.is_late = now.saturating_duration_since(first) >= LATE;
    }

    /// Returns how long the thread was held up since the last call, if it was.
    #[inline]
    pub fn take_stall(&mut self) -> Option<Duration> {
        (!self.stall.is_zero()).then(|| std::mem::take(&mut self.stall))
    }
}

/// The work that a visit may still do, and the cost of the round so far.
#[derive(Default)]
pub(crate) struct Budget {
    /// Messages and chunks that are left before the next look at the clock, and those behind it.
    left: u32,
    rest: u32,
    /// Bytes of the visit, and other work as so many bytes: those so far, those before the next look, and all.
    bytes: u64,
    look_bytes: u64,
    most_bytes: u64,
    /// Messages and chunks that the visit began with.
    given: u32,
    /// Nanoseconds that the round has cost so far.
    spent: u64,
    /// The clock of the round, if somebody waits for its end.
    pub stopwatch: Stopwatch,
}

impl Budget {
    /// Returns a budget that is not exhausted before all is done.
    pub fn endless() -> Self {
        let (left, bytes) = (u32::MAX, u64::MAX);
        Self { left, given: left, look_bytes: bytes, most_bytes: bytes, ..Self::default() }
    }

    /// Makes it the budget of another round.
    pub fn renew(&mut self) {
        *self = Self { stopwatch: std::mem::take(&mut self.stopwatch), ..Self::default() };
    }

    /// Returns whether an access to memory was held up lately, so that each one may be.
    pub fn is_wary(&self) -> bool {
        self.stopwatch.wary != 0
    }

    /// Begins a visit of at most `most` messages or chunks, which may be longer if it is `alone`: no
    /// other queue is known to wait. Returns how many.
    pub fn begin(&mut self, most: u32, alone: bool) -> u32 {
        self.given = most.min(if alone { LONE_BURST } else { BURST });
        (self.left, self.rest) = (0, self.given);
        self.bytes = 0;
        self.most_bytes = if alone { LONE_BURST_BYTES } else { BURST_BYTES };
        self.begin_part();
        self.given
    }

    /// Goes on to the next look at the clock.
    fn begin_part(&mut self) {
        let (messages, bytes) = self.stopwatch.part();
        let all = self.left();
        self.left = all.min(messages);
        self.rest = all - self.left;
        self.look_bytes = self.bytes.saturating_add(bytes).min(self.most_bytes);
    }

    /// Returns whether the visit is over.
    #[inline]
    pub fn is_over(&mut self) -> bool {
        (self.left == 0 || self.bytes >= self.look_bytes) && self.ends_part()
    }

    /// Looks at the clock, unless the visit is over. Returns whether the visit is over, or the time of the round.
    #[cold]
    fn ends_part(&mut self) -> bool {
        if self.left() == 0 || self.bytes >= self.most_bytes {
            return true;
        }
        self.stopwatch.look();
        if self.stopwatch.is_late {
            self.most_bytes = 0;
        }
        self.begin_part();
        self.stopwatch.is_late
    }

    /// Counts a message or chunk of `bytes`.
    #[inline]
    pub fn spend(&mut self, bytes: u64) {
        self.left = self.left.saturating_sub(1);
        self.bytes += bytes;
    }

    /// Returns how many bytes of a message are copied at a time, a multiple of [`CHUNK`]. `shared`: other threads help. The
    /// visit becomes no longer by that.
    #[inline]
    pub fn chunk(&self, shared: bool) -> u64 {
        if shared {
            (self.most_bytes.saturating_sub(self.bytes) / CHUNK * CHUNK).clamp(CHUNK, SHARED_CHUNK)
        } else {
            CHUNK
        }
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
        self.spent >= ROUND || self.stopwatch.is_late
    }

    /// Returns how many messages and chunks are left.
    #[inline]
    pub fn left(&self) -> u32 {
        self.left + self.rest
    }

    /// Ends the visit, and returns its bytes.
    pub fn end(&mut self) -> u64 {
        let messages = u64::from(self.given - self.left());
        self.stopwatch.end_visit(messages, self.bytes);
        self.spent += cost::VISIT + messages * cost::MESSAGE + self.bytes / BYTES_PER_NS;
        self.bytes
    }

    /// Returns the cost of the round so far, in nanoseconds.
    pub fn spent(&self) -> u64 {
        self.spent
    }
}
