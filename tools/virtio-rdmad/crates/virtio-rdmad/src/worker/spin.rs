// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The time for which a worker polls a guest without work before the guest has to kick.
//!
//! Polling costs processor time; sleeping costs whoever has work next a kick and a wake-up. So
//! polling pays where work tends to come soon. Each guest has its own [`Spin`], which remembers how
//! long the worker had to wait for its work of late, much as the kernel's halt polling does for idle
//! virtual CPUs. Each worker has one [`Contention`], because whether other threads want its processor
//! concerns all of its guests.

use std::time::{Duration, Instant};

/// The weight of the newest gap in the mean of gaps is 1 in this many.
const WEIGHT: u32 = 8;

/// The time for which a worker polls a guest without work, in units of the guest's mean gap.
const PATIENCE: u32 = 4;

/// The shortest time that a worker polls a guest without work, if it does at all: the mean gap of a
/// guest that always has work is 0, and one short pause of such a guest should not end the polling.
const LEAST: Duration = Duration::from_micros(10);

/// Decides how long a worker polls one guest without work.
#[derive(Debug)]
pub struct Spin {
    /// The longest time.
    limit: Duration,
    /// Mean time from the end of work to the next work, exponentially weighted. A single gap counts
    /// as twice the limit at most, so that one long pause is forgotten after a few short ones.
    gap: Duration,
    /// The time at which there was work last.
    since: Instant,
    /// Whether the worker has looked for work since then and found none.
    idle: bool,
}

impl Spin {
    /// Polls for `limit` at most, and for that long at first.
    pub fn new(limit: Duration, now: Instant) -> Self {
        Self { limit, gap: limit / PATIENCE, since: now, idle: false }
    }

    /// Notes work, which was done by `now`.
    pub fn worked(&mut self, now: Instant) {
        if std::mem::take(&mut self.idle) {
            let gap = now.saturating_duration_since(self.since).min(2 * self.limit);
            self.gap = (self.gap * (WEIGHT - 1) + gap) / WEIGHT;
        }
        self.since = now;
    }

    /// Notes that there was no work, and returns whether to look again. Where other threads want the
    /// processor (`contended`), polling pays for a moment only: a program that posts a batch rings the
    /// doorbell for the first work request, and has posted the rest before a worker that took only the
    /// first sleeps again.
    pub fn again(&mut self, now: Instant, contended: bool) -> bool {
        self.idle = true;
        let window = if contended { LEAST.min(self.limit) } else { self.window() };
        now.saturating_duration_since(self.since) < window
    }

    /// Returns how long polling is worth it.
    fn window(&self) -> Duration {
        if self.gap > self.limit {
            return Duration::ZERO;
        }
        (PATIENCE * self.gap).max(LEAST).min(self.limit)
    }
}

/// A yield that takes longer than this went to a thread that has much to do. A guest's CPU that is
/// woken for a completion takes less, and a scheduler's slice more. With 100 µs the workers of two
/// guests that answer each other's events on two CPUs slept, although it was the guests' own CPUs that
/// they yielded to, which is what a yield is for.
const LONG_YIELD: Duration = Duration::from_micros(300);

/// Some rounds without work that take longer than this were preempted by another thread.
const PREEMPTED: Duration = Duration::from_millis(1);

/// The number of naps during which a worker does not poll after it found that other threads want its processor. A
/// sleep counts as [`NAPS`] of them.
const BACKOFF: u32 = 64 * NAPS;

/// The number of naps that count as one sleep. When the number is used up, the worker polls and yields, which costs it
/// a slice of another thread if that still wants the processor. A nap is too short for that.
const NAPS: u32 = 32;

/// Knows whether other threads want a worker's processor.
///
/// A worker that polls yields now and then. On a busy machine a yield costs a scheduler's slice,
/// milliseconds, while a thread that sleeps runs soon after it is woken: there it is better to sleep,
/// for the guest too, whose own CPUs may be what waits for the processor.
#[derive(Debug, Default)]
pub struct Contention {
    /// The number of naps during which the worker still does not poll.
    backoff: u32,
}

impl Contention {
    /// Notes that a yield took `time`.
    pub fn yielded(&mut self, time: Duration) {
        if time > LONG_YIELD {
            self.backoff = BACKOFF;
        }
    }

    /// Notes that some rounds without work took `time`.
    pub fn polled(&mut self, time: Duration) {
        if time > PREEMPTED {
            self.backoff = BACKOFF;
        }
    }

    /// Notes that the worker slept.
    pub fn slept(&mut self) {
        self.backoff = self.backoff.saturating_sub(NAPS);
    }

    /// Notes that the worker napped.
    pub fn napped(&mut self) {
        self.backoff = self.backoff.saturating_sub(1);
    }

    /// Returns whether polling does more harm than good.
    pub fn is_high(&self) -> bool {
        self.backoff > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_micros(100);

    /// Makes the guest work, pause for `gap`, and work again. Returns whether it was still polled when it worked again.
    fn pause(spin: &mut Spin, now: &mut Instant, gap: Duration) -> bool {
        spin.worked(*now);
        spin.again(*now, false);
        *now += gap;
        let looked = spin.again(*now, false);
        spin.worked(*now);
        looked
    }

    #[test]
    fn no_time_means_sleep() {
        let now = Instant::now();
        let mut spin = Spin::new(Duration::ZERO, now);
        assert!(!spin.again(now, false));
        spin.worked(now);
        assert!(!spin.again(now, false));
    }

    #[test]
    fn polling_goes_on_while_it_pays() {
        let mut now = Instant::now();
        let mut spin = Spin::new(LIMIT, now);
        let short = Duration::from_micros(20);
        for _ in 0..16 {
            pause(&mut spin, &mut now, short);
        }
        assert!(pause(&mut spin, &mut now, short));
        for _ in 0..32 {
            pause(&mut spin, &mut now, 10 * LIMIT);
        }
        assert!(!spin.again(now, false), "work does not come in time: no polling at all");
        for _ in 0..32 {
            pause(&mut spin, &mut now, short);
        }
        assert!(pause(&mut spin, &mut now, short), "it comes in time again");
    }

    #[test]
    fn a_contended_processor_is_left_soon() {
        let now = Instant::now();
        let mut spin = Spin::new(LIMIT, now);
        spin.worked(now);
        assert!(spin.again(now + LEAST / 2, true));
        assert!(!spin.again(now + LEAST, true));
        assert!(spin.again(now + LEAST, false));
    }

    #[test]
    fn one_long_pause_does_not_end_polling() {
        let mut now = Instant::now();
        let mut spin = Spin::new(LIMIT, now);
        for _ in 0..16 {
            pause(&mut spin, &mut now, Duration::from_micros(5));
        }
        assert!(!pause(&mut spin, &mut now, Duration::from_secs(10)));
        assert!(pause(&mut spin, &mut now, Duration::from_micros(5)));
    }

    #[test]
    fn contention_means_sleep_for_a_while() {
        let mut contention = Contention::default();
        contention.yielded(LONG_YIELD);
        contention.polled(PREEMPTED);
        assert!(!contention.is_high());
        contention.yielded(2 * LONG_YIELD);
        for _ in 0..BACKOFF / NAPS / 2 {
            assert!(contention.is_high());
            contention.slept();
        }
        for _ in 0..BACKOFF / 2 {
            assert!(contention.is_high());
            contention.napped();
        }
        assert!(!contention.is_high());
    }
}
