// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The bound on NAKs by which a responder tells its requester that packets are missing.
//!
//! A NAK has the requester send all packets under way again. Anybody can send a packet with a PSN ahead of the expected
//! one, so NAKs have a bound: [`BURST`] at once, and one in [`INTERVAL`] or in [`PACKETS`] expected packets. A NAK for
//! which the bound leaves no room is sent later, and so is a NAK for a PSN far ahead, as most guessed PSNs are. A late
//! NAK is not sent if the expected packet arrives before.

use std::time::{Duration, Instant};

/// The most NAKs that are sent at once.
const BURST: u32 = 16;

/// The time between two NAKs of a connection that loses packets all the time, and the least delay of a late NAK.
const INTERVAL: Duration = Duration::from_millis(1);

/// The number of expected packets that allow another NAK: so many arrive between two losses if one packet in thirty is
/// lost.
const PACKETS: u32 = 32;

/// The NAKs of a responder.
#[derive(Clone, Copy, Default)]
pub struct Naks {
    /// The time until which all NAKs would have been sent at the rate of one in [`INTERVAL`].
    paid_at: Option<Instant>,
    /// The time at which a late NAK is sent.
    late: Option<Instant>,
}

impl Naks {
    /// Returns the NAKs of a saved state; `is_late` is whether a NAK was late.
    pub fn load(is_late: bool, now: Instant) -> Self {
        Self { paid_at: None, late: is_late.then_some(now) }
    }

    /// Returns whether a NAK is late.
    pub fn is_late(&self) -> bool {
        self.late.is_some()
    }

    /// Asks for a NAK, for a packet that is far ahead or not. Returns whether it is sent now.
    pub fn ask(&mut self, now: Instant, is_far: bool) -> bool {
        let room = self.paid_at.and_then(|paid_at| paid_at.checked_sub(INTERVAL * (BURST - 1)));
        if !is_far && room.is_none_or(|at| at <= now) {
            self.send(now);
            return true;
        }
        let late = if is_far { now + INTERVAL } else { now }.max(room.unwrap_or(now));
        self.late = Some(self.late.map_or(late, |other| other.min(late)));
        false
    }

    /// Returns whether a late NAK is sent now.
    pub fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.late.is_some_and(|late| late <= now);
        if is_due {
            self.send(now);
        }
        is_due
    }

    /// Returns the time at which a late NAK is sent.
    pub fn next(&self) -> Option<Instant> {
        self.late
    }

    /// Notes that the expected packet has arrived.
    #[inline]
    pub fn forget(&mut self) {
        self.late = None;
        self.paid_at = self.paid_at.and_then(|paid_at| paid_at.checked_sub(INTERVAL / PACKETS));
    }

    fn send(&mut self, now: Instant) {
        self.paid_at = Some(self.paid_at.map_or(now, |paid_at| paid_at.max(now)) + INTERVAL);
        self.late = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn naks_have_a_rate() {
        let (start, mut naks) = (Instant::now(), Naks::default());
        let sent = (0..100_000_u32)
            .filter(|micros| {
                let now = start + Duration::from_micros(u64::from(*micros));
                naks.is_due(now) || naks.ask(now, false)
            })
            .count();
        assert!((100..=117).contains(&sent), "{sent} in 100 ms");
    }

    /// A fast connection that loses a packet in a hundred is told of each loss at once.
    #[test]
    fn packets_that_arrive_allow_naks() {
        let (mut now, mut naks) = (Instant::now(), Naks::default());
        for _ in 0..1000 {
            (0..100).for_each(|_| naks.forget());
            now += Duration::from_micros(100);
            assert!(naks.ask(now, false));
        }
    }

    #[test]
    fn what_is_far_ahead_is_late() {
        let (now, mut naks) = (Instant::now(), Naks::default());
        assert!(!naks.ask(now, true) && !naks.is_due(now));
        assert_eq!(naks.next(), Some(now + INTERVAL));
        naks.forget();
        assert!(!naks.is_due(now + INTERVAL));
        assert!(!naks.ask(now, true) && naks.is_due(now + INTERVAL) && !naks.is_late());
    }
}
