// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The congestion window of a requester: how many packets of SENDs and WRITEs it sends before they are
//! acknowledged (slow start and congestion avoidance, RFC 5681, in packets).
//!
//! No rate helps against what many flows send before the first CNP can come. So a flow begins with a few
//! packets, and each packet that is acknowledged lets one more be under way: the window doubles in each round
//! trip, as long as it is used. A flow whose rate was cut by a CNP has met congestion. DCQCN has its
//! rate then, and its window grows by a packet in each round trip. A loss is no sign of congestion here, and does
//! not make the window smaller. A time-out does: nothing has come for so long that nothing is known.
//!
//! [`INITIAL`] is what the simulation in `incast.rs` shows: the longest queue of an incast is as long as all
//! initial windows together, and with 8 packets 1,000 flows do not share the bottleneck equally any more.

use serde::{Deserialize, Serialize};

use crate::saved::{require, Wrong};

/// The first size of the window, to which it returns after a time without a packet and after a time-out.
pub(crate) const INITIAL: u32 = 16;

/// The greatest size of the window. A responder holds as many packets if the first of them is lost.
pub(crate) const MOST: u32 = 256;

/// The congestion window of a flow.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Cwnd {
    /// The number of packets that may be under way.
    packets: u32,
    /// The packets of a flow with a cut rate that were acknowledged since its window grew last.
    acknowledged: u32,
}

impl Default for Cwnd {
    fn default() -> Self {
        Self { packets: INITIAL, acknowledged: 0 }
    }
}

impl Cwnd {
    /// Checks a window that was saved.
    pub fn check(self) -> Result<(), Wrong> {
        let fits = (1..=MOST).contains(&self.packets) && self.acknowledged <= MOST;
        require(fits, "the congestion window is too large")
    }

    /// Returns how many packets may be under way.
    #[inline]
    pub fn packets(self) -> u32 {
        self.packets
    }

    /// Returns whether the window has its greatest size.
    #[inline]
    pub fn is_full(self) -> bool {
        self.packets == MOST
    }

    /// Handles an acknowledgement of `packets` packets, before which `in_flight` were under way. `is_cut` is whether a
    /// CNP has cut the rate of the flow. A window of which less than half is in use does not grow, because its size is
    /// not what bounds the flow (RFC 7661).
    pub fn acknowledge(&mut self, packets: u32, in_flight: u32, is_cut: bool) {
        if self.is_full() || 2 * in_flight < self.packets {
            return;
        }
        if !is_cut {
            self.packets = self.packets.saturating_add(packets).min(MOST);
            return;
        }
        self.acknowledged += packets;
        if self.acknowledged >= self.packets {
            self.acknowledged = 0;
            self.packets += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the window after so many round trips in which all of it is used.
    fn after(round_trips: u32, is_cut: bool) -> u32 {
        let mut cwnd = Cwnd::default();
        for _ in 0..round_trips {
            let packets = cwnd.packets();
            cwnd.acknowledge(packets, packets, is_cut);
        }
        cwnd.packets()
    }

    #[test]
    fn a_window_doubles_in_each_round_trip() {
        assert_eq!(
            [0, 1, 2, 3, 4, 5, 1000].map(|trips| after(trips, false)),
            [16, 32, 64, 128, 256, 256, 256]
        );
    }

    #[test]
    fn the_window_of_a_flow_that_was_cut_grows_by_a_packet() {
        assert_eq!([0, 1, 10, 1000].map(|trips| after(trips, true)), [16, 17, 26, 256]);
        let mut cwnd = Cwnd::default();
        (0..16).for_each(|_| cwnd.acknowledge(1, 16, true));
        assert_eq!(cwnd.packets(), 17, "packets that are acknowledged one by one");
    }

    #[test]
    fn a_window_that_is_not_used_stays() {
        let mut cwnd = Cwnd::default();
        (0..1000).for_each(|_| cwnd.acknowledge(1, 7, false));
        assert_eq!(cwnd.packets(), INITIAL);
        cwnd.acknowledge(1, 8, false);
        assert_eq!(cwnd.packets(), INITIAL + 1);
    }
}
