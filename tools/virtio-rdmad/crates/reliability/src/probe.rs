// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The measured time of answers, and the delay after which a requester probes for the loss of its last packets.
//!
//! No later packet shows the loss of the last packets of a burst, and the time for an answer, which the consumer sets,
//! is mostly some 100 ms. So the requester measures how long answers take (RFC 6298). After a few times as long it
//! sends the last packet again, for which the peer answers with the packets that it misses; if no answer arrives, the
//! requester takes all packets for lost (as TCP does: RFC 8985, section 7). A peer without selective acknowledgements is
//! asked by one packet each time instead. A probe is no retry of the consumer, and the time for an answer goes on.

use std::time::{Duration, Instant};

use roce::Psn;

use crate::queue::Queue;

/// The shortest delay. Other threads may keep the peer's worker from its processor for so long.
const SHORTEST: Duration = Duration::from_millis(1);

/// The shortest delay where each probe is one packet, which does no harm if it is sent in vain.
const SHORTEST_OF_PACKETS: Duration = Duration::from_micros(250);

/// The delay before anything was measured.
const FIRST: Duration = Duration::from_millis(10);

/// The longest time of an answer that is taken into account.
const LONGEST: Duration = Duration::from_secs(1);

/// The measured time of answers, and the number of probes since the last answer.
#[derive(Default)]
pub struct Probe {
    /// The packet whose answer is measured, and the time at which the packet was sent.
    measured: Option<(Psn, Instant)>,
    /// The smoothed time of answers (SRTT), and its smoothed deviation (RTTVAR).
    time: Option<(Duration, Duration)>,
    /// The shortest time of an answer.
    least: Option<Duration>,
    /// What the times of answers tell of queues.
    pub(crate) queue: Queue,
    /// The number of probes since the last answer.
    count: u32,
}

impl Probe {
    /// Notes that a packet that requests an answer was sent for the first time.
    pub fn sent(&mut self, psn: Psn, now: Instant) {
        self.measured.get_or_insert((psn, now));
    }

    /// Notes that the requests in front of the PSN `psn` are acknowledged.
    pub fn done(&mut self, psn: Psn, now: Instant) {
        self.count = 0;
        self.measure(now, |measured| measured.is_before(psn));
    }

    /// Measures the time of the answer if the peer `has` the packet whose answer is measured.
    pub(crate) fn measure(&mut self, now: Instant, has: impl Fn(Psn) -> bool) {
        let Some((_, sent)) = self.measured.take_if(|(measured, _)| has(*measured)) else { return };
        let time = now.saturating_duration_since(sent).min(LONGEST);
        self.queue.measured(time);
        self.least = Some(self.least.map_or(time, |least| least.min(time)));
        self.time = Some(match self.time {
            None => (time, time / 2),
            Some((smoothed, deviation)) => {
                ((7 * smoothed + time) / 8, (3 * deviation + smoothed.abs_diff(time)) / 4)
            }
        });
    }

    /// Returns whether two probes were sent since the last answer.
    pub fn is_third(&self) -> bool {
        self.count == 2
    }

    /// Returns whether an even number of probes was sent since the last answer.
    pub fn is_even(&self) -> bool {
        self.count % 2 == 0
    }

    /// Returns the shortest time of an answer, which is that of the path; zero before one was measured.
    pub(crate) fn least(&self) -> Duration {
        self.least.unwrap_or_default()
    }

    /// Returns whether no probe was sent since the last answer.
    pub fn is_first(&self) -> bool {
        self.count == 0
    }

    /// Notes that the packet with this PSN is sent again, whose answer is not measured then.
    pub(crate) fn forget(&mut self, psn: Psn) {
        self.measured = self.measured.filter(|(measured, _)| *measured != psn);
    }

    /// Notes that a probe is sent. The time of an answer is not measured then, because the answer may be to the packet
    /// that was sent first (RFC 6298, section 3).
    pub fn again(&mut self) {
        self.measured = None;
        self.count = self.count.saturating_add(1);
    }

    /// Returns the delay of the next probe. `are_packets` is whether each probe is one packet.
    pub fn delay(&self, are_packets: bool) -> Duration {
        let measured = self.time.map(|(smoothed, deviation)| smoothed + 4 * deviation);
        let shortest = if are_packets { SHORTEST_OF_PACKETS } else { SHORTEST };
        let delay = measured.map_or(FIRST, |delay| delay.max(shortest));
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
        assert_eq!(probe.delay(false), FIRST);
        probe.sent(Psn::new(5), at(0));
        probe.sent(Psn::new(6), at(3));
        probe.done(Psn::new(5), at(3));
        assert_eq!(probe.delay(false), FIRST, "the packet is not acknowledged");
        probe.done(Psn::new(6), at(4));
        assert_eq!(probe.delay(false), Duration::from_millis(12));
        probe.again();
        probe.again();
        assert_eq!(probe.delay(false), Duration::from_millis(48));
        for number in 6..100 {
            probe.sent(Psn::new(number), at(10));
            probe.done(Psn::new(number + 1), at(10));
        }
        assert_eq!(probe.delay(false), SHORTEST);
        assert_eq!(probe.delay(true), SHORTEST_OF_PACKETS);
    }
}
