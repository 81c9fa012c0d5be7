// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long a guest without work is looked at before it has to kick.
//!
//! To look in vain costs processor time; to sleep costs whoever has work next a kick and a wake-up.
//! So looking pays where work tends to come soon. Each guest has its own [`Spin`], which remembers
//! how long its work let others wait lately, much as the kernel's halt polling does for idle virtual
//! CPUs; each worker has one [`Crowd`], because whether others want its processor concerns all of
//! its guests.

use std::time::{Duration, Instant};

/// The newest gap counts for one in so many in the mean of gaps.
const WEIGHT: u32 = 8;

/// Gaps that a guest is waited for, in units of its mean gap.
const PATIENCE: u32 = 4;

/// Least time that a guest is waited for if it is waited for at all: what the mean of a guest that
/// never lets anybody wait, which is 0, would make of a hiccup of it.
const LEAST: Duration = Duration::from_micros(10);

/// Decides how long one guest is looked at in vain.
#[derive(Debug)]
pub struct Spin {
    /// The longest.
    limit: Duration,
    /// Mean time, exponentially weighted, from the end of work to the next. A single gap counts as
    /// no more than twice the limit, so that one long pause is forgotten after a few short ones.
    gap: Duration,
    /// When there was work last.
    since: Instant,
    /// There was none since.
    idle: bool,
}

impl Spin {
    /// One that looks for at most `limit`, and does at first.
    pub fn new(limit: Duration, now: Instant) -> Self {
        Self { limit, gap: limit / PATIENCE, since: now, idle: false }
    }

    /// There was work, done by `now`.
    pub fn worked(&mut self, now: Instant) {
        if std::mem::take(&mut self.idle) {
            let gap = now.saturating_duration_since(self.since).min(2 * self.limit);
            self.gap = (self.gap * (WEIGHT - 1) + gap) / WEIGHT;
        }
        self.since = now;
    }

    /// There was none: whether to look again. Where the processor is crowded (`dense`) it pays for a
    /// moment alone: who posts a batch rings at its first work request, and is through with the rest
    /// before a sleeper that took only that one is asleep again.
    pub fn again(&mut self, now: Instant, dense: bool) -> bool {
        self.idle = true;
        let window = if dense { LEAST.min(self.limit) } else { self.window() };
        now.saturating_duration_since(self.since) < window
    }

    /// How long it is worth to look.
    fn window(&self) -> Duration {
        if self.gap > self.limit {
            return Duration::ZERO;
        }
        (PATIENCE * self.gap).max(LEAST).min(self.limit)
    }
}

/// A yield that takes longer found somebody who has much to do. A guest that is woken for a completion
/// takes less, and a scheduler's slice more: with 100 µs, two guests on two CPUs that answer each
/// other's events, whose own CPUs are what such yields are for, had their workers asleep.
const YIELD: Duration = Duration::from_micros(300);

/// Looking in vain that takes so much longer than it should was interrupted by somebody else.
const PREEMPTED: Duration = Duration::from_millis(1);

/// How often a worker sleeps at once after it found its processor crowded.
const PENANCE: u32 = 64;

/// Knows whether somebody else wants a worker's processor.
///
/// Who looks for work in vain yields now and then. On a crowded machine a yield costs a scheduler's
/// slice, milliseconds, while a sleeper that is woken runs soon: there it is better to sleep, for
/// the guest too, whose own CPUs may be what waits for the processor.
#[derive(Debug, Default)]
pub struct Crowd {
    penance: u32,
}

impl Crowd {
    /// A yield took `time`.
    pub fn yielded(&mut self, time: Duration) {
        if time > YIELD {
            self.penance = PENANCE;
        }
    }

    /// A few looks in vain took `time`.
    pub fn looked(&mut self, time: Duration) {
        if time > PREEMPTED {
            self.penance = PENANCE;
        }
    }

    /// The worker sleeps.
    pub fn slept(&mut self) {
        self.penance = self.penance.saturating_sub(1);
    }

    /// Whether looking in vain does more harm than good.
    pub fn is_dense(&self) -> bool {
        self.penance > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_micros(100);

    /// Work, a gap of `gap` and work again; whether the guest was still looked at by then.
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
    fn looking_goes_on_while_it_pays() {
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
        assert!(!spin.again(now, false), "work does not come in time: no look at all");
        for _ in 0..32 {
            pause(&mut spin, &mut now, short);
        }
        assert!(pause(&mut spin, &mut now, short), "it comes in time again");
    }

    #[test]
    fn a_crowded_processor_is_left_soon() {
        let now = Instant::now();
        let mut spin = Spin::new(LIMIT, now);
        spin.worked(now);
        assert!(spin.again(now + LEAST / 2, true));
        assert!(!spin.again(now + LEAST, true));
        assert!(spin.again(now + LEAST, false));
    }

    #[test]
    fn one_long_pause_does_not_end_looking() {
        let mut now = Instant::now();
        let mut spin = Spin::new(LIMIT, now);
        for _ in 0..16 {
            pause(&mut spin, &mut now, Duration::from_micros(5));
        }
        assert!(!pause(&mut spin, &mut now, Duration::from_secs(10)));
        assert!(pause(&mut spin, &mut now, Duration::from_micros(5)));
    }

    #[test]
    fn a_crowded_processor_means_sleep_for_a_while() {
        let mut crowd = Crowd::default();
        crowd.yielded(YIELD);
        crowd.looked(PREEMPTED);
        assert!(!crowd.is_dense());
        crowd.yielded(2 * YIELD);
        for _ in 0..PENANCE {
            assert!(crowd.is_dense());
            crowd.slept();
        }
        assert!(!crowd.is_dense());
    }
}
