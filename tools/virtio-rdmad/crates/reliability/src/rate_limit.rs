// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A limit on bytes, or on something else, per second: a token bucket whose tokens are reserved in advance.
//!
//! Each sender has at most one reservation, for its next packet, and the times of reservations follow
//! each other. So the senders that have something to send take turns, packet by packet, and none of them
//! has to know of the others. A sender that does not use its turn costs the others that one turn.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::sync::lock;

/// The depth of the bucket: after a time in which less was sent, the bytes of this time may be sent at once.
const BURST: Duration = Duration::from_millis(1);

/// Returns the time that `bytes` bytes take at a rate in bytes per second, of which 0 stands for 1.
pub(crate) fn time_of(bytes: u64, rate: u64) -> Duration {
    let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
    Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
}

/// The limit on the bytes per second of all senders that share it. The rate may change at any time.
pub struct RateLimit {
    /// The rate in bytes per second; 0: there is no limit.
    rate: AtomicU64,
    bucket: Mutex<Bucket>,
}

struct Bucket {
    /// The time of the next reservation.
    next: Instant,
    /// The number of changes of the rate.
    changes: u64,
}

/// A reservation, which counts until the rate changes.
#[derive(Clone, Copy)]
pub struct Turn {
    at: Instant,
    changes: u64,
}

impl Turn {
    /// Returns the time from which on the sender may send.
    pub fn at(&self) -> Instant {
        self.at
    }
}

impl RateLimit {
    /// Returns a limit of `rate` bytes per second, with a full bucket; `None`: there is no limit.
    pub fn new(rate: Option<u64>, now: Instant) -> Self {
        let bucket = Bucket { next: earliest(now), changes: 0 };
        Self { rate: AtomicU64::new(rate.unwrap_or(0)), bucket: Mutex::new(bucket) }
    }

    /// Returns the bytes per second; `None`: there is no limit.
    #[inline]
    pub fn rate(&self) -> Option<u64> {
        Some(self.rate.load(Ordering::Relaxed)).filter(|rate| *rate != 0)
    }

    /// Changes the rate. The bucket is full then, and each sender reserves again.
    pub fn set(&self, rate: Option<u64>, now: Instant) {
        let mut bucket = lock(&self.bucket);
        self.rate.store(rate.unwrap_or(0), Ordering::Relaxed);
        *bucket = Bucket { next: earliest(now), changes: bucket.changes.wrapping_add(1) };
    }

    /// Returns until when a sender has to wait before it sends `bytes` bytes; `None` if it may send them now. `turn` is
    /// the reservation of the sender, which drops it when the bytes are sent.
    #[inline]
    pub fn wait(&self, turn: &mut Option<Turn>, bytes: u64, now: Instant) -> Option<Instant> {
        self.rate()?;
        let at = self.turn(turn, bytes, now);
        (at > now).then_some(at)
    }

    /// Returns the time of a reservation, which is made if `turn` has no reservation that still counts.
    fn turn(&self, turn: &mut Option<Turn>, bytes: u64, now: Instant) -> Instant {
        let mut bucket = lock(&self.bucket);
        if let Some(turn) = turn.filter(|turn| turn.changes == bucket.changes) {
            return turn.at;
        }
        let at = self.reserve(&mut bucket, bytes, now);
        *turn = Some(Turn { at, changes: bucket.changes });
        at
    }

    /// Reserves `bytes` bytes. Returns the time from which on they may be sent.
    fn reserve(&self, bucket: &mut Bucket, bytes: u64, now: Instant) -> Instant {
        let at = bucket.next.max(earliest(now));
        // Another thread may have removed the limit since the caller looked.
        bucket.next = at + self.rate().map_or(Duration::ZERO, |rate| time_of(bytes, rate));
        at
    }

    /// Counts bytes that were sent in excess of a reservation.
    #[inline]
    pub fn spend(&self, bytes: u64) {
        if let Some(rate) = self.rate().filter(|_| bytes != 0) {
            let mut bucket = lock(&self.bucket);
            bucket.next += time_of(bytes, rate);
        }
    }

    /// Counts bytes that are sent without a reservation. A peer chooses how many these are, so they delay
    /// others for no more than the time of a burst.
    pub fn charge(&self, bytes: u64, now: Instant) {
        if self.rate().is_none() {
            return;
        }
        let mut bucket = lock(&self.bucket);
        if bucket.next < now + BURST {
            self.reserve(&mut bucket, bytes, now);
        }
    }
}

/// Returns the time at which a bucket begins to fill that is full now.
fn earliest(now: Instant) -> Instant {
    now.checked_sub(BURST).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: u64 = 1_000_000;

    /// Returns when a sender without a reservation may send so many bytes.
    fn reserve(limit: &RateLimit, bytes: u64, now: Instant) -> Instant {
        limit.wait(&mut None, bytes, now).unwrap_or(now)
    }

    #[test]
    fn the_rate_is_kept_after_a_burst() {
        let start = Instant::now();
        let limit = RateLimit::new(Some(RATE), start);
        let mut now = start;
        for _ in 0..1000 {
            now = now.max(reserve(&limit, 100, now));
        }
        // The last of 1,000 packets goes when the others have gone, 1 ms earlier for the burst.
        assert_eq!(now - start, Duration::from_micros(99_900 - 1000));
    }

    #[test]
    fn no_more_than_a_burst_is_saved_up() {
        let start = Instant::now();
        let limit = RateLimit::new(Some(RATE), start);
        let late = start + Duration::from_secs(60);
        let sent = (0..1000).take_while(|_| reserve(&limit, 100, late) <= late).count();
        assert_eq!(sent, 11);
    }

    #[test]
    fn what_nobody_reserves_delays_others_by_a_burst() {
        let start = Instant::now();
        let limit = RateLimit::new(Some(RATE), start);
        (0..1000).for_each(|_| limit.charge(100, start));
        assert_eq!(reserve(&limit, 100, start) - start, BURST);
    }

    #[test]
    fn what_was_sent_besides_delays_others() {
        let start = Instant::now();
        let limit = RateLimit::new(Some(RATE), start);
        assert_eq!(reserve(&limit, 100, start), start);
        (0..100).for_each(|_| limit.spend(1000));
        let passed = reserve(&limit, 100, start) - start;
        assert_eq!(passed, Duration::from_micros(100_100 - 1000));
    }

    #[test]
    fn senders_take_turns() {
        let start = Instant::now();
        let limit = RateLimit::new(Some(RATE), start);
        let mut turns = [start; 3];
        let mut sent = [0; 3];
        for _ in 0..3000 {
            let first = (0..3).min_by_key(|at| turns[*at]).unwrap();
            let now = turns[first].max(start);
            sent[first] += 1;
            turns[first] = reserve(&limit, 100, now);
        }
        // One of them may have the burst alone, of 10 packets.
        assert!(sent.iter().all(|sent| (990..=1010).contains(sent)), "{sent:?}");
    }

    /// A sender that waits by a low rate does not go on waiting when the rate is higher, or there is no limit.
    #[test]
    fn a_reservation_is_made_again_when_the_rate_changes() {
        let now = Instant::now();
        let limit = RateLimit::new(Some(1000), now);
        let mut turns = [None; 2];
        assert_eq!(limit.wait(&mut turns[0], 1_000_000, now), None);
        let until = limit.wait(&mut turns[1], 1000, now);
        assert_eq!(until, Some(now + Duration::from_millis(1_000_000 - 1)));
        assert_eq!(limit.wait(&mut turns[1], 1000, now), until, "it keeps its turn");
        limit.set(Some(RATE), now);
        assert_eq!(limit.wait(&mut turns[1], 1000, now), None);
        limit.set(Some(1000), now);
        assert_eq!(limit.wait(&mut turns[0], 1000, now), None);
        assert!(limit.wait(&mut turns[1], 1000, now) > Some(now));
        limit.set(None, now);
        assert_eq!((limit.wait(&mut turns[1], 1000, now), limit.rate()), (None, None));
    }
}
