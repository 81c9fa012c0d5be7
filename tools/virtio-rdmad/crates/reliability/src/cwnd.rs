// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The congestion window of a requester: how many packets it sends before they are acknowledged (slow start and
//! congestion avoidance, RFC 5681, in packets).
//!
//! No rate helps against what many flows send before the first CNP can come. So a flow begins with a few packets, and
//! each packet that is acknowledged lets one more be under way: the window doubles in each round trip, as long as it is
//! used. A flow whose rate was cut by a CNP has met congestion. DCQCN has its rate then, and its window grows by a
//! packet in each round trip. After a time-out, the window begins again: nothing has come for so long that nothing is
//! known.
//!
//! [`INITIAL`] is what the simulation in `incast.rs` shows: the longest queue of an incast is as long as all
//! initial windows together, and with 8 packets 1,000 flows do not share the bottleneck equally any more.
//!
//! # Loss
//! A path that has marked a packet within the last second tells of congestion by marks, and a loss there does not make
//! the window smaller. On any other path a loss may be the only sign of congestion (RFC 8085, section 3.1). The window
//! is then reduced to [`KEPT`] of its size, once for all losses of a round trip (RFC 5681, RFC 6675), and grows by a
//! packet in two round trips from there on. These are the factors by which CUBIC gets as much as Reno (RFC 9438,
//! section 4.3); a factor of a half leaves a queue of the length of a bottleneck's delay empty.
//!
//! What differs from these RFCs is that not each loss counts. A network may lose a hundredth of all packets by chance.
//! Reno has twelve packets under way then (1.2 divided by the square root of the share of losses), whatever the path
//! can carry. So a loss counts if
//!
//! * the times of answers tell of a queue that is about as long as it can be ([`crate::queue`]); where packets do not
//!   wait, nobody has to send less; or
//! * more than a part of [`TOLERATED`] of the last packets were lost, whatever the cause: the time of answers may be
//!   that of peers rather than of queues, and BBR tolerates a fiftieth (draft-ietf-ccwg-bbr).
//!
//! A peer that holds nothing behind a missing packet is sent all of it again. What waits in a queue then is sent in
//! vain, whatever the loss came of. So a loss to such a peer leaves as much of the window as does not wait, by the
//! shortest time of an answer, if a third of it or more waits.
//!
//! Silence counts as well. If a peer that has selective acknowledgements answers neither a packet nor the probe for it
//! (`probe.rs`), all packets are taken for lost, and the window is reduced in the same way.
//!
//! A packet is lost if the peer holds three later ones (RFC 6675), so that packets that overtake each other are no sign
//! of congestion. A NAK of a peer that sends no selective acknowledgements does not say that.
//!
//! # Long paths
//! A responder holds 256 packets, as many as a selective acknowledgement has bits for. A window of more packets is of use
//! where the round trip is long: 256 packets of 1 KiB in 1 ms are 2 Gbit/s. So the window is larger as long as nothing is
//! lost: it has up to [`LONGEST`] bytes, and no more than are under way at [`LONGEST_RATE`] in the shortest round trip.
//! Every responder takes that. What is lost costs more, because a responder drops what is 256 packets or more behind it.
//! So a loss, silence or a time-out brings the window back to 256 packets until [`WARY`] others were sent, also where the
//! path marks packets.
//!
//! # READs
//! The data of READs has a window as well: how many packets may be missing when another response is requested. It
//! begins with its greatest size, because the responder sends a response at once whatever its length is, and bounds the
//! number of responses alone. The time from a request to its response depends on the responses before it, and tells
//! nothing of queues. So losses of responses count by their number alone.

use std::time::Duration;

use roce::Psn;
use serde::{Deserialize, Serialize};

use crate::saved::{require, Wrong};

/// The first size of the window, to which it returns after a time without a packet and after a time-out.
pub(crate) const INITIAL: u32 = 16;

/// The greatest size of the window behind a loss. A responder holds as many packets if the first of them is lost.
pub(crate) const MOST: u32 = 256;

/// The most bytes of payload that are under way if nothing was lost: as many as 256 of the longest packets have.
const LONGEST: u64 = 1 << 20;

/// The rate, in bytes per second, for which a window of more than [`MOST`] packets is large enough: 8 Gbit/s.
const LONGEST_RATE: u64 = 1_000_000_000;

/// The number of packets that are sent behind a loss before the window has more than [`MOST`] packets again.
const WARY: u32 = 1 << 14;

/// The distance of packets that request an acknowledgement, at most.
const ACK_EVERY: u32 = 128;

/// The least size of the window, and the least size to which losses make it smaller that tell of no queue and may be
/// none: the first window of TCP (RFC 6928).
const LEAST: u32 = 2;
const LEAST_IF_UNSURE: u32 = 10;

/// The part of a window that a loss leaves, in tenths.
const KEPT: u32 = 7;

/// The part of all packets of which the loss is tolerated where packets do not wait: a 32nd, and fewer than 8.
const TOLERATED: u32 = 32;
const FEW: u32 = 8;

/// The number of packets after which those that were sent and lost count by half.
const LATELY: u32 = 512;

/// The window of SENDs and WRITEs.
pub(crate) type Requests = Cwnd<INITIAL, MOST>;

/// The window of responses to READs. The peer sends all packets of a response at once, and a packet for which the inbox
/// has no room is lost.
pub(crate) type Responses = Cwnd<512, 512>;

/// A congestion window of at most `MOST` packets, which begins with `FIRST`.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Cwnd<const FIRST: u32, const MOST: u32> {
    /// The number of packets that may be under way.
    packets: u32,
    /// The packets that were acknowledged since the window grew last, if it grows slowly.
    acknowledged: u32,
    /// The number of packets of the longest window.
    #[serde(skip)]
    longest: u32,
    /// The losses of the flow. They are not saved, because they are measured again.
    #[serde(skip)]
    pub losses: Losses,
}

/// What is known when a packet is lost.
#[derive(Clone, Copy, Default)]
pub(crate) struct Signs {
    /// Whether packets wait in a long queue.
    pub is_queued: bool,
    /// Whether the path marks packets.
    pub is_marking: bool,
    /// Whether later packets may have overtaken the one that is taken for lost.
    pub is_unsure: bool,
    /// The part of the window, in thousandths, that does not wait in a queue, if no more is to be under way.
    pub fits: Option<u32>,
}

/// The packets that a flow has lost lately.
#[derive(Clone, Copy, Default)]
pub(crate) struct Losses {
    /// The number of packets that were sent lately, and of those that were lost.
    sent: u32,
    lost: u32,
    /// The number of packets that are sent before the window has more than [`MOST`] packets again.
    wary: u32,
    /// The size of the window up to which it doubles; `None`: there was no congestion.
    threshold: Option<u32>,
    /// Losses of packets in front of this PSN have made the window smaller (the recovery point of RFC 6675).
    recover: Option<Psn>,
    /// Losses of packets in front of this PSN were counted.
    pub counted_below: Option<Psn>,
}

impl Losses {
    /// Returns whether more packets were lost than are tolerated without a queue.
    fn are_many(&self) -> bool {
        self.lost >= FEW && self.lost * TOLERATED > self.sent
    }
}

impl<const FIRST: u32, const MOST: u32> Default for Cwnd<FIRST, MOST> {
    fn default() -> Self {
        Self { packets: FIRST, acknowledged: 0, longest: 0, losses: Losses::default() }
    }
}

impl<const FIRST: u32, const MOST: u32> Cwnd<FIRST, MOST> {
    /// Checks a window that was saved.
    pub fn check(self) -> Result<(), Wrong> {
        let fits = (1..=MOST).contains(&self.packets) && self.acknowledged <= 2 * MOST;
        require(fits, "the congestion window is too large")
    }

    /// Returns how many packets may be under way.
    #[inline]
    pub fn packets(&self) -> u32 {
        self.packets
    }

    /// Returns the distance of packets that request an acknowledgement: those whose PSN is a multiple of this number.
    /// So an acknowledgement arrives while the window still has room. A window that losses have made smaller has
    /// several in a round trip, so that its packets do not leave in one burst.
    #[inline]
    pub fn ack_every(&self) -> u32 {
        match self.losses.threshold {
            Some(_) if !self.is_full() => 1 << (self.packets / 4).max(1).ilog2(),
            _ => ACK_EVERY,
        }
    }

    /// Returns whether the window has its greatest size.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.packets >= self.bound()
    }

    /// Returns the greatest size.
    #[inline]
    pub fn bound(&self) -> u32 {
        if self.losses.wary == 0 {
            self.longest.max(MOST)
        } else {
            MOST
        }
    }

    /// Sets how long the window may become for packets with a payload of `mtu` bytes and the shortest `round_trip`.
    pub fn set_longest(&mut self, mtu: u64, round_trip: Duration) {
        let nanoseconds = u64::try_from(round_trip.as_nanos()).unwrap_or(u64::MAX);
        let under_way = nanoseconds.saturating_mul(LONGEST_RATE / 1_000_000) / 1000;
        // A window that begins with more packets has as many times the bytes.
        let bytes = under_way.min(LONGEST) * u64::from(MOST / 256);
        self.longest = u32::try_from(bytes / mtu.max(1)).unwrap_or(MOST);
    }

    /// Returns the window as it is saved, with as many packets as any version takes.
    pub fn saved(self) -> Self {
        let (packets, acknowledged) = (self.packets.min(MOST), self.acknowledged.min(MOST));
        Self { packets, acknowledged, ..self }
    }

    /// Handles an acknowledgement of `packets` packets, before which `in_flight` were under way. `is_cut` is whether a
    /// CNP has cut the rate of the flow. A window of which less than half is in use does not grow, because its size is
    /// not what bounds the flow (RFC 7661).
    pub fn acknowledge(&mut self, packets: u32, in_flight: u32, is_cut: bool) {
        if self.is_full() || 2 * in_flight < self.packets {
            return;
        }
        let threshold = self.losses.threshold.unwrap_or(u32::MAX).min(self.bound());
        if !is_cut && self.packets < threshold {
            self.packets = self.packets.saturating_add(packets).min(threshold);
            return;
        }
        self.acknowledged += packets;
        if self.acknowledged >= if is_cut { self.packets } else { 2 * self.packets } {
            self.acknowledged = 0;
            self.packets += 1;
        }
    }

    /// Counts packets that are sent for the first time.
    #[inline]
    pub fn sent(&mut self, packets: u32) {
        let losses = &mut self.losses;
        losses.sent = losses.sent.saturating_add(packets);
        losses.wary = losses.wary.saturating_sub(packets);
        if losses.sent >= LATELY {
            (losses.sent, losses.lost) = (losses.sent / 2, losses.lost / 2);
        }
    }

    /// Handles the loss of `packets` packets, of which `psn` is one. `end` is the PSN behind all packets that were
    /// sent.
    pub fn lose(&mut self, psn: Psn, packets: u32, end: Psn, signs: Signs) {
        let Signs { is_queued, is_marking, is_unsure, fits } = signs;
        self.losses.lost = self.losses.lost.saturating_add(packets);
        self.be_wary();
        let is_unsure = is_unsure && !is_queued || fits.is_some();
        let least = if is_unsure { LEAST_IF_UNSURE } else { LEAST };
        if !is_marking && (is_queued || self.losses.are_many()) {
            self.shrink(psn, end, least, fits.unwrap_or(100 * KEPT).min(100 * KEPT));
        }
    }

    /// Handles the loss of the packet `psn` and of all others that are under way: nothing has come for a while.
    /// `is_marking` is whether the path marks packets.
    pub fn lose_all(&mut self, psn: Psn, end: Psn, is_marking: bool) {
        self.be_wary();
        if !is_marking {
            self.shrink(psn, end, LEAST, 100 * KEPT);
        }
    }

    /// Brings the window back to as many packets as a responder holds.
    fn be_wary(&mut self) {
        self.losses.wary = WARY;
        self.packets = self.packets.min(MOST);
    }

    /// Leaves `kept` thousandths of the window, but no fewer than `least` packets, for the loss of a packet, unless it
    /// was sent before the window was made smaller last.
    fn shrink(&mut self, psn: Psn, end: Psn, least: u32, kept: u32) {
        if self.losses.recover.is_some_and(|recover| psn.is_before(recover)) {
            return;
        }
        self.packets = (self.packets * kept / 1000).max(least.min(self.packets));
        self.acknowledged = 0;
        self.losses.threshold = Some(self.packets);
        self.losses.recover = Some(end);
    }

    /// Forgets losses of packets in front of a PSN, which are acknowledged.
    #[inline]
    pub fn forget_before(&mut self, acked: Psn) {
        let Losses { recover, counted_below, .. } = &mut self.losses;
        *recover = recover.filter(|psn| psn.is_after(acked));
        *counted_below = counted_below.filter(|psn| psn.is_after(acked));
    }

    /// Handles a time-out: the window doubles from its first size up to half of the one that it had. What is sent again
    /// and lost once more, in front of the PSN `end`, makes it no smaller (RFC 5681, section 3.1).
    pub fn time_out(&mut self, end: Psn) {
        self.losses.recover = Some(end);
        self.losses.threshold = Some((self.packets / 2).max(LEAST));
        self.be_wary();
        self.packets = self.packets.min(FIRST);
        self.acknowledged = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the window after so many round trips in which all of it is used.
    fn after(round_trips: u32, is_cut: bool) -> u32 {
        let mut cwnd = Requests::default();
        pass(&mut cwnd, round_trips, is_cut);
        cwnd.packets()
    }

    fn pass(cwnd: &mut Requests, round_trips: u32, is_cut: bool) {
        for _ in 0..round_trips {
            let packets = cwnd.packets();
            cwnd.acknowledge(packets, packets, is_cut);
        }
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
        let mut cwnd = Requests::default();
        (0..16).for_each(|_| cwnd.acknowledge(1, 16, true));
        assert_eq!(cwnd.packets(), 17, "packets that are acknowledged one by one");
    }

    #[test]
    fn a_window_that_is_not_used_stays() {
        let mut cwnd = Requests::default();
        (0..1000).for_each(|_| cwnd.acknowledge(1, 7, false));
        assert_eq!(cwnd.packets(), INITIAL);
        cwnd.acknowledge(1, 8, false);
        assert_eq!(cwnd.packets(), INITIAL + 1);
    }

    #[test]
    fn losses_of_a_round_trip_count_once() {
        let mut cwnd = Requests::default();
        pass(&mut cwnd, 2, false);
        let lose = |cwnd: &mut Requests, psn: u32, end: u32| {
            cwnd.lose(
                Psn::new(psn),
                1,
                Psn::new(end),
                Signs { is_queued: true, ..Signs::default() },
            );
            cwnd.packets()
        };
        assert_eq!(lose(&mut cwnd, 10, 100), 44);
        assert_eq!(lose(&mut cwnd, 90, 120), 44, "it was sent before");
        assert_eq!(lose(&mut cwnd, 100, 150), 30);
        pass(&mut cwnd, 2, false);
        assert_eq!(cwnd.packets(), 31, "it grows slowly from there on");
        // What is acknowledged does not count half of all PSNs later.
        cwnd.forget_before(Psn::new(150));
        assert_eq!(lose(&mut cwnd, (1 << 23) + 160, (1 << 23) + 170), 21);
        for psn in (1 << 23) + 170..(1 << 23) + 270 {
            lose(&mut cwnd, psn, psn + 1);
        }
        assert_eq!(cwnd.packets(), LEAST);
    }

    #[test]
    fn a_loss_without_a_queue_counts_if_there_are_many() {
        let packets_after = |one_of: u32, signs: Signs| {
            let mut cwnd = Requests::default();
            for psn in 0..4096 {
                cwnd.sent(1);
                if psn % one_of == 0 {
                    cwnd.lose(Psn::new(psn), 1, Psn::new(psn + 1), signs);
                }
            }
            cwnd.packets()
        };
        let none = Signs::default();
        let marking = Signs { is_marking: true, ..none };
        assert_eq!([100, 50, 40].map(|one_of| packets_after(one_of, none)), [INITIAL; 3]);
        assert_eq!([25, 20, 2].map(|one_of| packets_after(one_of, none)), [LEAST; 3]);
        assert_eq!(packets_after(2, marking), INITIAL, "marks tell of congestion");
        let unsure = Signs { is_unsure: true, ..none };
        assert_eq!(packets_after(2, unsure), LEAST_IF_UNSURE);
    }

    #[test]
    fn a_window_is_longer_on_a_long_path_until_a_loss() {
        let longest = |mtu, micros| {
            let mut cwnd = Requests::default();
            cwnd.set_longest(mtu, Duration::from_micros(micros));
            pass(&mut cwnd, 10, false);
            cwnd
        };
        assert_eq!(
            [0, 250, 500, 1000, 2000].map(|us| longest(1024, us).packets()),
            [256, 256, 488, 976, 1024]
        );
        assert_eq!([4096, 2048, 256].map(|mtu| longest(mtu, 10_000).packets()), [256, 512, 4096]);
        let mut cwnd = longest(1024, 2000);
        cwnd.lose(Psn::new(5), 1, Psn::new(9), Signs::default());
        assert_eq!(cwnd.packets(), 256);
        cwnd.sent(WARY - 1);
        pass(&mut cwnd, 10, false);
        assert_eq!(cwnd.packets(), 256);
        cwnd.sent(1);
        pass(&mut cwnd, 10, false);
        assert_eq!(cwnd.packets(), 1024);
    }

    #[test]
    fn a_long_window_can_be_saved() {
        let mut cwnd = Requests::default();
        cwnd.set_longest(1024, Duration::from_millis(2));
        pass(&mut cwnd, 10, false);
        let signs = Signs { is_queued: true, ..Signs::default() };
        cwnd.lose(Psn::new(5), 1, Psn::new(9), signs);
        cwnd.sent(WARY);
        pass(&mut cwnd, 1001, false);
        assert!(cwnd.packets() > 500 && cwnd.acknowledged > 500);
        assert!(cwnd.check().is_err() && cwnd.saved().check().is_ok());
        assert_eq!(cwnd.saved().packets(), 256);
    }

    #[test]
    fn after_a_time_out_a_window_doubles_up_to_half() {
        let mut cwnd = Requests::default();
        pass(&mut cwnd, 4, false);
        cwnd.time_out(Psn::new(9));
        assert_eq!(cwnd.packets(), INITIAL);
        pass(&mut cwnd, 3, false);
        assert_eq!(cwnd.packets(), 128);
        pass(&mut cwnd, 2, false);
        assert_eq!(cwnd.packets(), 129);
    }
}
