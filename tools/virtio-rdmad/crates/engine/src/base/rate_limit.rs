// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A limit on bytes per second: a token bucket whose tokens are reserved in advance.
//!
//! Each sender has at most one reservation, for its next packet, and the times of reservations follow
//! each other. So the senders that have something to send take turns, packet by packet, and none of them
//! has to know of the others. A sender that does not use its turn costs the others that one turn.

use std::time::{Duration, Instant};

/// The time whose bytes may be sent at once after a time in which less was sent: the depth of the bucket.
const BURST: Duration = Duration::from_millis(1);

/// Returns how long so many bytes take at a rate in bytes per second, at which 0 means 1.
pub(crate) fn time_of(bytes: u64, rate: u64) -> Duration {
    let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
    Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
}

/// What senders share who may send so many bytes per second together.
pub(crate) struct RateLimit {
    /// Bytes per second.
    rate: u64,
    /// The time of the next reservation.
    next: Instant,
}

impl RateLimit {
    /// Returns a limit of so many bytes per second, with a full bucket.
    pub fn new(rate: u64, now: Instant) -> Self {
        Self { rate, next: now.checked_sub(BURST).unwrap_or(now) }
    }

    /// Reserves so many bytes; returns when they may be sent.
    pub fn reserve(&mut self, bytes: u64, now: Instant) -> Instant {
        let earliest = now.checked_sub(BURST).unwrap_or(now);
        let turn = self.next.max(earliest);
        self.next = turn + time_of(bytes, self.rate);
        turn
    }

    /// Counts bytes that are sent without a reservation. A peer chooses how many these are, so they delay
    /// others for no more than the time of a burst.
    pub fn charge(&mut self, bytes: u64, now: Instant) {
        if self.next < now + BURST {
            self.reserve(bytes, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: u64 = 1_000_000;

    #[test]
    fn the_rate_is_kept_after_a_burst() {
        let start = Instant::now();
        let mut limit = RateLimit::new(RATE, start);
        let mut now = start;
        for _ in 0..1000 {
            now = now.max(limit.reserve(100, now));
        }
        // The last of 1,000 packets goes when the others have gone, 1 ms earlier for the burst.
        assert_eq!(now - start, Duration::from_micros(99_900 - 1000));
    }

    #[test]
    fn no_more_than_a_burst_is_saved_up() {
        let start = Instant::now();
        let mut limit = RateLimit::new(RATE, start);
        let late = start + Duration::from_secs(60);
        let at_once = (0..1000).take_while(|_| limit.reserve(100, late) <= late).count();
        assert_eq!(
            at_once, 11,
            "1,000 bytes, and the packet that finds the bucket empty but not in debt"
        );
    }

    #[test]
    fn what_is_not_reserved_delays_others_for_a_bounded_time() {
        let start = Instant::now();
        let mut limit = RateLimit::new(RATE, start);
        (0..1000).for_each(|_| limit.charge(100, start));
        assert_eq!(limit.reserve(100, start) - start, BURST);
    }

    #[test]
    fn senders_take_turns() {
        let start = Instant::now();
        let mut limit = RateLimit::new(RATE, start);
        let mut turns = [start; 3];
        let mut sent = [0; 3];
        for _ in 0..3000 {
            let first = (0..3).min_by_key(|at| turns[*at]).unwrap();
            let now = turns[first].max(start);
            sent[first] += 1;
            turns[first] = limit.reserve(100, now);
        }
        // One of them may have the burst alone, of 10 packets.
        assert!(sent.iter().all(|sent| (990..=1010).contains(sent)), "{sent:?}");
    }
}
