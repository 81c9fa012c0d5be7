// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! DCQCN: the rate of a flow whose packets meet congestion ("Congestion Control for Large-Scale RDMA
//! Deployments", Zhu et al., SIGCOMM 2015, section 5; this is the reaction point).
//!
//! The receiver of a marked packet sends a CNP. Each
//! CNP cuts the rate by a part that depends on how many CNPs came lately (alpha). Then the rate comes
//! back in steps, one after each period of time and one after each number of bytes: at first half of
//! the way to the rate before the cut (fast recovery), then the goal itself is raised (additive increase,
//! and hyper increase if both kinds of steps have gone beyond fast recovery).
//!
//! # What differs from the paper
//! The numbers are those of the simulation in `incast.rs` with 1,000 flows, whose share is 40 Mbit/s each:
//!
//! * A period of time counts only if a packet is sent after it, and alpha decreases only then as well.
//!   Each flow sends a packet of 4 KiB in 0.8 ms, and the paper lets 15 periods count in that time, although
//!   no mark can have come: flows leave fast recovery after each packet. Then the queue of the bottleneck
//!   never gets shorter than all windows together.
//! * The additive increase (`R_AI`) is 5 Mbit/s instead of 40 Mbit/s, and the hyper increase 50 Mbit/s, as in
//!   adapters of NVIDIA (`rpg_ai_rate`, `rpg_hai_rate`). 40 Mbit/s is the whole share of a flow: Jain's
//!   index is 0.53 with it, and 0.97 with 5 Mbit/s.
//! * The lowest rate is 6.4 Mbit/s. As steps need packets, a flow of 1 Mbit/s, the lowest rate of these
//!   adapters (`rpg_min_rate`), needs 0.2 s to come out of fast recovery: 0.2 s after all flows began, a
//!   third of the bottleneck is used.
//! * A flow that is as fast as it could ever be, or that has sent nothing for 0.1 s, is released: it is
//!   like a new flow, which knows nothing of the network.
//!
//! # Beside adapters
//! Adapters of NVIDIA raise a rate after 300 us (`rpg_time_reset`), and this module after 55 us. Yet flows of this
//! module have no more than those of adapters, but less, in the simulation of `incast.rs` with the defaults that are
//! documented (`adapter.rs`). The alpha of an adapter changes each microsecond, and is down to a third 205 us after a
//! CNP. So CNPs that are 50 us apart cut its rate by a hundredth each, and that of this module by up to a half. With
//! the marking of the paper a flow has 0.09 to 0.49 of the share of an adapter beside it, where half of 2 to 20 flows
//! are adapters, and with a marking without a jump 0.49 to 1.04. Where 10 of 100 flows are adapters, it has 0.02 to
//! 0.15, and 0.33 to 0.52.
//!
//! No parameter brings both together without harm. Steps of 300 us make it 0.07 to 0.34. With one step of fast
//! recovery, as `rpg_threshold` says, flows have 0.54 to 1.12 without a jump, but no more with one; and then 0.35 of
//! the packets of 1,000 flows find a queue that is shorter than the marking's `max`, instead of 0.5. An alpha that
//! decreases each 20 us makes it 0.42 to 1.22 beside as many adapters, and Jain's index of 100 flows 0.81. So the
//! parameters are those that serve many flows of this module.

use std::time::{Duration, Instant};

use crate::rate_limit::time_of;

/// The rate of a flow that was never cut, in bytes per second: 100 Gbit/s. The rate of the uplink is not
/// known; where it is lower, a few more CNPs halve the rate until it is reached.
pub const LINE_RATE: u64 = 12_500_000_000;

/// The lowest rate, in bytes per second: a packet of 4096 bytes in 5 ms.
const MIN_RATE: u64 = 800_000;

/// The additive increase (`R_AI`), in bytes per second.
const ADDITIVE: u64 = 625_000;

/// The hyper increase (`R_HAI`), in bytes per second.
const HYPER: u64 = 10 * ADDITIVE;

/// The time after which alpha decreases without a CNP (K), and that of an increase (T). It is longer
/// than [`CNP_INTERVAL`], so that alpha does not decrease while every packet is marked.
const PERIOD: Duration = Duration::from_micros(55);

/// The bytes of an increase (B).
const BYTES: u64 = 10_000_000;

/// The steps of fast recovery (F).
const FAST_RECOVERY: u32 = 5;

/// The base-2 logarithm of 1/g: each CNP, and each period without one, moves alpha by a 256th of the
/// way.
const GAIN_SHIFT: u32 = 8;

/// The alpha of 1.
const ONE: u32 = 1 << 20;

/// The time of sending that a flow may make up for if it comes late: the thread that sends serves other
/// queues as well.
const LATENESS: Duration = Duration::from_micros(50);

/// The time without a packet after which nothing is known of the network any more.
pub(crate) const IDLE: Duration = Duration::from_millis(100);

/// The time between two CNPs for one flow, at least (the parameter N of the notification point).
const CNP_INTERVAL: Duration = Duration::from_micros(50);

/// The time between two cuts, at least. It is shorter than [`CNP_INTERVAL`], as the network may bring two CNPs
/// closer together.
const CUT_INTERVAL: Duration = Duration::from_micros(25);

/// The receiver of a flow: when it tells the sender of marked packets (the notification point).
#[derive(Default)]
pub struct Notifier {
    told: Option<Instant>,
}

impl Notifier {
    /// Returns whether a CNP is due for a packet that arrives marked.
    pub fn marked(&mut self, now: Instant) -> bool {
        let is_due = self.told.is_none_or(|told| now.duration_since(told) >= CNP_INTERVAL);
        if is_due {
            self.told = Some(now);
        }
        is_due
    }

    /// Returns the time of the last CNP.
    pub(crate) fn told(&self) -> Option<Instant> {
        self.told
    }
}

/// A flow whose rate was cut.
pub(crate) struct Dcqcn {
    /// The current rate (`R_C`), in bytes per second.
    rate: u64,
    /// The rate that recovery leads to (`R_T`), in bytes per second.
    target: u64,
    /// The rate at which the flow is released, in bytes per second.
    line_rate: u64,
    /// The amount of recent congestion, from 0 to [`ONE`].
    alpha: u32,
    /// The earliest time at which the next CNP cuts the rate.
    cut_at: Instant,
    /// The time at which alpha decreases.
    decrease_at: Instant,
    /// The time at which a step of time is over.
    increase_at: Instant,
    /// The bytes that were sent since the last step of bytes.
    bytes: u64,
    /// Steps of time since the last cut.
    time_steps: u32,
    /// Steps of bytes since the last cut.
    byte_steps: u32,
    /// The time at which the next packet may be sent.
    next: Instant,
}

impl Dcqcn {
    /// Returns a flow that had this rate, in bytes per second, and gets its first CNP.
    pub fn new(now: Instant, line_rate: u64) -> Self {
        let mut flow = Self {
            rate: line_rate,
            target: line_rate,
            line_rate,
            alpha: ONE,
            cut_at: now,
            decrease_at: now,
            increase_at: now,
            bytes: 0,
            time_steps: 0,
            byte_steps: 0,
            next: now,
        };
        flow.cut(now);
        flow
    }

    /// Follows a CNP. Returns `false` if it is ignored, as it comes too soon after another one.
    pub fn cut(&mut self, now: Instant) -> bool {
        if now < self.cut_at {
            return false;
        }
        self.cut_at = now + CUT_INTERVAL;
        self.target = self.rate;
        let part = u64::from(self.alpha);
        // A rate has fewer than 40 bits, and alpha 21.
        self.rate = (self.rate - self.rate * part / u64::from(2 * ONE)).max(MIN_RATE);
        self.alpha += (ONE - self.alpha) >> GAIN_SHIFT;
        self.decrease_at = now + PERIOD;
        self.increase_at = now + PERIOD;
        (self.bytes, self.time_steps, self.byte_steps) = (0, 0, 0);
        true
    }

    /// Returns when the next packet may be sent.
    pub fn next(&self) -> Instant {
        self.next
    }

    /// Returns whether the flow is not bound to a rate any more.
    pub fn is_released(&self, now: Instant) -> bool {
        self.rate >= self.line_rate || now.saturating_duration_since(self.next) >= IDLE
    }

    /// Notes that a packet was sent.
    pub fn sent(&mut self, now: Instant, bytes: u64) {
        if now >= self.decrease_at {
            self.alpha -= self.alpha >> GAIN_SHIFT;
            self.decrease_at = now + PERIOD;
        }
        if now >= self.increase_at {
            self.increase_at = now + PERIOD;
            self.time_steps += 1;
            self.increase();
        }
        self.bytes += bytes;
        if self.bytes >= BYTES {
            self.bytes -= BYTES;
            self.byte_steps += 1;
            self.increase();
        }
        let earliest = now.checked_sub(LATENESS).unwrap_or(now);
        self.next = self.next.max(earliest) + time_of(bytes, self.rate);
    }

    /// Makes a step towards the target, which goes up itself after fast recovery.
    fn increase(&mut self) {
        let (most, fewest) =
            (self.time_steps.max(self.byte_steps), self.time_steps.min(self.byte_steps));
        let step = if fewest > FAST_RECOVERY {
            HYPER * u64::from(fewest - FAST_RECOVERY)
        } else if most > FAST_RECOVERY {
            ADDITIVE
        } else {
            0
        };
        self.target = self.target.saturating_add(step).min(self.line_rate);
        self.rate = self.rate.midpoint(self.target);
        if self.target.saturating_sub(self.rate) <= ADDITIVE {
            // The halves would never get there.
            self.rate = self.target;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKET: u64 = 1000;

    /// Sends packets as soon as the rate allows, for some time; returns the bytes.
    fn send(flow: &mut Dcqcn, now: &mut Instant, time: Duration) -> u64 {
        let end = *now + time;
        let mut bytes = 0;
        while flow.next() < end {
            *now = flow.next().max(*now);
            flow.sent(*now, PACKET);
            bytes += PACKET;
        }
        bytes
    }

    #[test]
    fn the_first_cnp_halves_the_rate_and_fast_recovery_brings_it_back() {
        let mut now = Instant::now();
        let mut flow = Dcqcn::new(now, 1_000_000_000);
        let bytes = send(&mut flow, &mut now, Duration::from_micros(50));
        assert_eq!(bytes, 25_000, "half of 1 GB/s in 50 us");
        // After five steps of the way, of 55 us each, all but 1/64 is back.
        send(&mut flow, &mut now, Duration::from_micros(240));
        let bytes = send(&mut flow, &mut now, Duration::from_micros(50));
        assert!((49_000..50_000).contains(&bytes), "{bytes}");
        send(&mut flow, &mut now, Duration::from_secs(1));
        assert!(flow.is_released(now));
    }

    #[test]
    fn no_number_of_cnps_stops_a_flow() {
        let mut now = Instant::now();
        let mut flow = Dcqcn::new(now, LINE_RATE);
        for _ in 0..10_000 {
            now += CUT_INTERVAL;
            assert!(flow.cut(now));
        }
        let bytes = send(&mut flow, &mut now, Duration::from_millis(10));
        // 0.8 MB/s, and the first steps upwards.
        assert!((8_000..16_000).contains(&bytes), "{bytes}");
        send(&mut flow, &mut now, Duration::from_millis(100));
        let bytes = send(&mut flow, &mut now, Duration::from_millis(10));
        assert!(bytes > 5_000_000, "{bytes}: more than 500 MB/s after 0.1 s");
    }

    #[test]
    fn cnps_that_come_together_are_one() {
        let now = Instant::now();
        let mut flow = Dcqcn::new(now, LINE_RATE);
        assert!(!flow.cut(now) && !flow.cut(now + CUT_INTERVAL / 2));
        assert_eq!(flow.rate, LINE_RATE / 2);
        assert!(flow.cut(now + CUT_INTERVAL));
    }

    #[test]
    fn a_flow_that_is_idle_is_released() {
        let now = Instant::now();
        let mut flow = Dcqcn::new(now, LINE_RATE);
        flow.sent(now, PACKET);
        assert!(!flow.is_released(now + IDLE));
        assert!(flow.is_released(now + IDLE + Duration::from_millis(1)));
    }

    #[test]
    fn cnps_of_a_flow_are_50_us_apart() {
        let start = Instant::now();
        let mut notifier = Notifier::default();
        let marked = |at| notifier.marked(start + Duration::from_micros(at));
        assert_eq!([0, 1, 49, 50, 51, 120].map(marked), [true, false, false, true, false, true]);
    }
}
