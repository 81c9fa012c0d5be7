// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! When a requester sends again what may be lost, before the time for an answer is over.
//!
//! The loss of the last packets of a burst shows in no later packet, and the time for an answer, which the
//! consumer sets, is mostly some 100 ms. So the requester measures how long answers take, and sends the last packet
//! again after a few times as long, which has the peer tell what it misses, and everything if that helps nothing (as
//! TCP does: RFC 6298, RFC 8985). This is no retry of the consumer's: it does not count as one, and the time for an
//! answer goes on.

use std::time::{Duration, Instant};

use roce::Psn;

/// The shortest delay. Two busy threads may keep a worker from its processor for so long.
const SHORTEST: Duration = Duration::from_millis(1);

/// The delay before anything was measured.
const FIRST: Duration = Duration::from_millis(10);

/// The longest delay that is measured.
const LONGEST: Duration = Duration::from_secs(1);

/// How long answers take, and how often something was sent again since the last one.
#[derive(Default)]
pub struct Probe {
    /// The packet that is measured, and when it was sent.
    measured: Option<(Psn, Instant)>,
    /// The smoothed time, and its smoothed deviation.
    time: Option<(Duration, Duration)>,
    /// How often something was sent again since something came.
    count: u32,
}

impl Probe {
    /// Notes that a packet was sent for the first time which asks for an answer.
    pub fn sent(&mut self, psn: Psn, now: Instant) {
        self.measured.get_or_insert((psn, now));
    }

    /// Notes that the requests in front of this PSN were done.
    pub fn done(&mut self, psn: Psn, now: Instant) {
        self.count = 0;
        let Some((_, sent)) = self.measured.take_if(|(measured, _)| measured.is_before(psn)) else {
            return;
        };
        let time = now.saturating_duration_since(sent).min(LONGEST);
        self.time = Some(match self.time {
            None => (time, time / 2),
            Some((smoothed, deviation)) => {
                ((7 * smoothed + time) / 8, (3 * deviation + smoothed.abs_diff(time)) / 4)
            }
        });
    }

    /// Returns whether nothing was sent again since something came.
    pub fn is_first(&self) -> bool {
        self.count == 0
    }

    /// Notes that packets are sent again. An answer to one of them tells no time (RFC 6298, 3).
    pub fn again(&mut self) {
        self.measured = None;
        self.count = self.count.saturating_add(1);
    }

    /// Returns how long the next answer is waited for.
    pub fn delay(&self) -> Duration {
        let measured = self.time.map(|(smoothed, deviation)| smoothed + 4 * deviation);
        let delay = measured.map_or(FIRST, |delay| delay.max(SHORTEST));
        delay.saturating_mul(1 << self.count.min(16))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delay_follows_what_was_measured() {
        let (mut probe, start) = (Probe::default(), Instant::now());
        let at = |millis| start + Duration::from_millis(millis);
        assert_eq!(probe.delay(), FIRST);
        probe.sent(Psn::new(5), at(0));
        probe.sent(Psn::new(6), at(3));
        probe.done(Psn::new(5), at(3));
        assert_eq!(probe.delay(), FIRST, "the packet is not acknowledged");
        probe.done(Psn::new(6), at(4));
        assert_eq!(probe.delay(), Duration::from_millis(12));
        probe.again();
        probe.again();
        assert_eq!(probe.delay(), Duration::from_millis(48));
        for number in 6..100 {
            probe.sent(Psn::new(number), at(10));
            probe.done(Psn::new(number + 1), at(10));
        }
        assert_eq!(probe.delay(), SHORTEST);
    }
}
