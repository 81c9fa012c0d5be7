// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The window of a requester: the messages that wait for their packets to be sent, acknowledged, or answered.
//!
//! Packets are numbered by PSNs. Five PSNs divide them, in this order (the names are those of RFC 9293, section 3.3.1,
//! and of 4.4BSD):
//!
//! * `snd_una`: each message in front of this PSN is complete: acknowledged, and answered if it has a response.
//! * `acked`: the peer has acknowledged each request in front of this PSN. Between `snd_una` and `acked`, data of
//!   responses is missing.
//! * `snd_nxt`: each packet in front of this PSN was sent. After a time-out or a NAK, `snd_nxt` goes back to `acked`,
//!   and the packets behind that are sent again (go-back-N, IBA 9.7.5.1.1).
//! * `snd_max`: the greatest value that `snd_nxt` ever had. Nothing with this PSN or a later one was sent, so an
//!   acknowledgement of that is ignored.
//! * `next_psn`: the next message begins with this PSN.
//!
//! A packet of a response may arrive before an earlier one and is taken at once, because the memory of a work request
//! belongs to the requester until the work request completes. Only the gaps between packets that have arrived are
//! requested again, each by a request for this part of the response (IBA 9.7.5.1.5 lets a requester ask for a part of
//! an earlier READ). From a peer that has no selective acknowledgements the gaps are requested one after the other: a
//! peer such as rxe forgets the data in front of the part that was requested last.
//!
//! A window never reads a clock. The times in it are set by the caller, which has the timers.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use roce::{Psn, SackEth};
use serde::{Deserialize, Serialize};

use crate::cwnd::{Requests, Responses, Signs, MOST};
use crate::flow::Flow;
use crate::gaps::Gaps;
use crate::probe::Probe;
use crate::saved::{require, Moment, Wrong};

/// The most messages in a window.
const MOST_MESSAGES: usize = 64;

/// The most packets of a message. PSNs are compared by the sign of their difference, so all PSNs of a window are less
/// than 2^23 apart (IBA 9.7.2).
pub const MOST_PACKETS_OF_MESSAGE: u32 = (1 << 23) - 1;

/// The most packets of all messages in a window with several messages.
const MOST_PACKETS: u32 = 1 << 22;

/// The number of later packets that a peer holds if a packet is lost, at least. A packet behind which it holds fewer
/// may have been overtaken (DupThresh of RFC 6675).
const DUPLICATES: u32 = 3;

/// The number of questions for receives without an answer after which a message goes without a credit.
const MOST_QUESTIONS: u32 = 7;

/// The most questions for receives after each of which the next one comes later.
const MOST_DELAYS: u32 = 8;

/// The most times that a peer is asked whether it has selective acknowledgements.
pub const MOST_OFFERS: u8 = 16;

/// The properties of a message that decide when its packets are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kind {
    /// Whether the message is one packet, which a response of as many packets as the message has PSNs answers: READ,
    /// atomics, FLUSH and ATOMIC WRITE.
    pub has_response: bool,
    /// Whether the message is sent only when all responses to earlier messages have arrived (IBA 10.8.3.3).
    pub is_fenced: bool,
    /// Whether the message takes a receive of the peer: SEND, and WRITE with immediate data. A saved window leaves it
    /// to [`SavedSendWindow::load`].
    #[serde(skip)]
    pub takes_receive: bool,
}

/// The receives of which the peer has told (end-to-end flow control, IBA 9.7.7.2).
#[derive(Clone, Copy)]
struct Credit {
    /// The PSN behind the last packet that the peer had received when it counted its receives.
    from: Psn,
    /// The number of messages that take a receive and may be sent from there on.
    messages: u32,
    /// The number of times that the peer was asked for its receives since it told of one.
    asked: u32,
    /// The number of times that it was asked since it told anything.
    unanswered: u32,
}

/// A message in the window.
#[derive(Clone, Serialize, Deserialize)]
struct Entry<T> {
    message: T,
    /// The PSN of the first packet.
    first: Psn,
    /// The number of PSNs of the message: one for each of its packets, or for each packet of its response (IBA
    /// 9.7.3.1).
    packets: u32,
    kind: Kind,
    /// The packets of the response that have arrived.
    received: Gaps,
    /// Packets of the response in front of this one are lost if they have not arrived.
    lost_below: u32,
    /// Lost packets of the response in front of this one were requested again.
    requested_below: u32,
}

impl<T> Entry<T> {
    /// Returns the PSN behind the last packet.
    fn end(&self) -> Psn {
        self.first.plus(self.packets)
    }

    /// Returns whether packets of a response are missing.
    fn awaits_response(&self) -> bool {
        self.kind.has_response && self.received.complete() < self.packets
    }

    /// Returns how many packets of the response are missing at most: packets behind a gap may have arrived.
    fn missing_packets(&self) -> u32 {
        self.packets - self.received.complete()
    }

    /// Marks the missing packets of the response in front of a packet as lost. Returns whether there are lost packets
    /// that were not requested again.
    fn lose(&mut self, in_front_of: u32) -> bool {
        self.lost_below = self.lost_below.max(in_front_of);
        self.gap(true).is_some()
    }

    /// Returns how many missing packets of the response are taken for lost for the first time when the ones in front of
    /// a packet are. A responder sends them in their order, so they are one range.
    fn newly_lost(&self, in_front_of: u32) -> u32 {
        self.received.missing(self.lost_below..in_front_of).map_or(0, |lost| lost.end - lost.start)
    }

    /// Returns the lost packets of the response that are requested next. Unless the peer takes requests for `several`
    /// gaps at a time, the gap that was requested last has to be filled before.
    fn gap(&self, several: bool) -> Option<Range<u32>> {
        if !several && self.received.complete() < self.requested_below {
            return None;
        }
        self.received.missing(self.requested_below..self.lost_below)
    }
}

/// The question to the peer whether it has selective acknowledgements.
struct Offer {
    /// Whether the question is sent next.
    is_due: bool,
    /// The number of times that the question may still be sent.
    left: u8,
}

impl Default for Offer {
    fn default() -> Self {
        Self { is_due: false, left: MOST_OFFERS }
    }
}

/// The packet that is sent next. [`SendWindow::message`] has its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// The place of its message in the window.
    at: usize,
    /// The number of the packet in its message, from 0 on; for a request, the first packet of the response that it
    /// requests.
    pub index: u32,
    /// The number of packets of the response that the packet requests.
    pub count: u32,
    /// The PSN of the packet.
    pub psn: Psn,
    /// Whether the packet requests an acknowledgement (AckReq, IBA 9.2.5).
    pub ack_request: bool,
    /// Whether the packet was sent before, or requests a part of a response that was requested before.
    pub is_retransmit: bool,
    /// Whether it is sent again because it was lost, as far as is known, and not because the peer had no receive.
    pub is_lost: bool,
}

/// The judgement of a packet of a response.
#[derive(Debug, PartialEq, Eq)]
pub enum Response<'a, T> {
    /// The packet was missing: the message that it answers, and the number of the packet in the response. A caller that
    /// has taken its payload calls [`SendWindow::accept_response`].
    Missing(&'a T, u32),
    /// The packet has arrived before, or answers no message.
    Unexpected,
}

/// The messages of a requester that are not complete, and the state of their transmission. The crate's documentation
/// has the order in which its methods are called; the module's documentation says what the PSNs mean.
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own
pub struct SendWindow<T> {
    /// The messages, the oldest first.
    entries: VecDeque<Entry<T>>,
    /// The number of messages with a response.
    with_response: usize,
    /// Each message in front of this PSN is complete.
    snd_una: Psn,
    /// Each request in front of this PSN is acknowledged.
    acked: Psn,
    /// The PSN of the next packet that is sent.
    snd_nxt: Psn,
    /// The PSN behind all packets that were ever sent.
    snd_max: Psn,
    /// Whether `snd_nxt` has gone back and no request was acknowledged since. Packets that were under way behind a lost
    /// one lead to a NAK each, and only the first NAK has all packets sent again.
    went_back: bool,
    /// Whether responses may have gaps that were not requested again.
    has_gaps: bool,
    /// Whether progress was made since [`Self::take_progress`] was called last.
    has_progress: bool,
    /// Whether the peer has selective acknowledgements.
    pub is_selective: bool,
    /// Whether the peer has sent a selective acknowledgement. Its CNPs have the PSN of the marked packet then.
    pub names_marked: bool,
    /// The question whether the peer has selective acknowledgements.
    offer: Offer,
    /// The last selective acknowledgement: the PSN of the first missing packet, and which packets behind it the peer
    /// holds (the scoreboard of RFC 6675).
    scoreboard: (Psn, SackEth),
    /// Lost packets in front of this PSN were sent again (HighRxt of RFC 6675).
    high_rxt: Psn,
    /// The value of `snd_max` when a lost packet was sent again last. If the peer holds a packet that was sent later,
    /// what was sent again and is still missing is lost once more.
    rxt_snd_max: Psn,
    /// The packet that is sent again as a tail loss probe (RFC 8985, section 7).
    tail_probe: Option<Psn>,
    /// The packet of a response that was requested alone last, by an [inquiry](Self::inquiry).
    inquired: Option<Psn>,
    /// Packets in front of this PSN are lost if the peer neither has acknowledged nor holds them.
    lost_below: Psn,
    /// Packets in front of this PSN were sent when the peer had no receive, and dropped because of that.
    refused_below: Psn,
    /// The end of the time for an answer (IBA 9.7.6.1.3), at which all packets are sent again.
    pub timeout_at: Option<Instant>,
    /// The time of the next tail loss probe.
    pub probe_at: Option<Instant>,
    /// The measured time of answers, from which `probe_at` follows.
    pub probe: Probe,
    /// The end of the RNR timer (IBA 9.7.5.2.8). No packet is sent before.
    pub rnr_until: Option<Instant>,
    /// The rate of the packets.
    pub flow: Flow,
    /// The number of packets of SENDs and WRITEs that may be under way.
    cwnd: Requests,
    /// The number of packets of responses that may be missing when another response is requested.
    responses: Responses,
    /// The time at which the rate allows the next packet. No packet is sent before.
    pub paced_until: Option<Instant>,
    /// The receives of the peer; `None`: the peer does not count them.
    credit: Option<Credit>,
    /// The time at which a message is sent without a credit, because the peer has told of no new receive for long.
    pub credit_at: Option<Instant>,
}

/// The saved state of a window. The time of answers and losses are not saved, because they are measured again. Neither
/// is the window of responses, which losses make smaller again; nor progress, which a requester takes before it is
/// saved; nor the question for selective acknowledgements, which may be asked again.
#[derive(Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools)] // as in the window itself
pub struct SavedSendWindow<T> {
    entries: Vec<Entry<T>>,
    snd_una: Psn,
    acked: Psn,
    snd_nxt: Psn,
    snd_max: Psn,
    next_psn: Psn,
    went_back: bool,
    has_gaps: bool,
    is_selective: bool,
    names_marked: bool,
    scoreboard: (Psn, SackEth),
    high_rxt: Psn,
    rxt_snd_max: Psn,
    tail_probe: Option<Psn>,
    lost_below: Psn,
    timeout_at: Option<Moment>,
    probe_at: Option<Moment>,
    rnr_until: Option<Moment>,
    cwnd: Requests,
    #[serde(skip)]
    responses: Responses,
    sent_at: Option<Moment>,
}

impl<T> SavedSendWindow<T> {
    /// Returns the window at the time `now`. `packets` returns how many packets a message has, and whether it takes a
    /// receive of the peer.
    ///
    /// # Errors
    /// No window can be in this state.
    pub fn load(
        self,
        now: Instant,
        packets: impl Fn(&T) -> Result<(u32, bool), Wrong>,
    ) -> Result<SendWindow<T>, Wrong> {
        let Self { mut entries, snd_una, acked, snd_nxt, snd_max, next_psn, scoreboard, .. } = self;
        require(entries.len() <= MOST_MESSAGES, "too many messages are under way")?;
        let first = entries.first().map_or(next_psn, |entry| entry.first);
        let mut span = 0_u32;
        for entry in &mut entries {
            require(
                entry.first == first.plus(span),
                "messages under way do not follow each other",
            )?;
            let (count, takes_receive) = packets(&entry.message)?;
            entry.kind.takes_receive = takes_receive;
            let fits = entry.packets == count && entry.packets <= MOST_PACKETS_OF_MESSAGE;
            require(fits, "a message under way has another number of packets")?;
            entry.received.check(entry.packets)?;
            let is_asked = entry.lost_below.max(entry.requested_below) <= entry.packets;
            require(is_asked, "packets of a response are lost that it does not have")?;
            span = span.saturating_add(entry.packets);
            require(span <= MOST_PACKETS_OF_MESSAGE, "too many packets are under way")?;
        }
        require(next_psn == first.plus(span), "messages under way have another end")?;
        let at = |psn: Psn| psn.distance_from(first);
        let span = at(next_psn);
        let is_within =
            [snd_una, acked, snd_nxt, snd_max].iter().all(|psn| (0..=span).contains(&at(*psn)));
        require(is_within && at(snd_nxt) <= at(snd_max), "PSNs under way are out of order")?;
        let near = |psn: Psn| {
            let before = acked.minus(SackEth::PACKETS);
            !psn.is_before(before) && psn.distance_from(acked) <= span
        };
        let are_near =
            [scoreboard.0, self.high_rxt, self.rxt_snd_max, self.lost_below].map(near) == [true; 4];
        require(are_near, "PSNs of lost packets are out of range")?;
        let is_due =
            self.tail_probe.is_none_or(|psn| (at(snd_una)..at(snd_max)).contains(&at(psn)));
        require(is_due, "a packet is asked for that was not sent")?;
        self.cwnd.check()?;
        let time = |moment: Option<Moment>| moment.map(|moment| moment.time(now));
        let with_response = entries.iter().filter(|entry| entry.kind.has_response).count();
        Ok(SendWindow {
            entries: entries.into(),
            with_response,
            snd_una,
            acked,
            snd_nxt,
            snd_max,
            went_back: self.went_back,
            has_gaps: self.has_gaps,
            has_progress: false,
            is_selective: self.is_selective,
            names_marked: self.names_marked,
            offer: Offer::default(),
            scoreboard,
            high_rxt: self.high_rxt,
            rxt_snd_max: self.rxt_snd_max,
            tail_probe: self.tail_probe,
            inquired: None,
            lost_below: self.lost_below,
            refused_below: acked,
            timeout_at: time(self.timeout_at),
            probe_at: time(self.probe_at),
            probe: Probe::default(),
            rnr_until: time(self.rnr_until),
            flow: Flow::load(self.sent_at, now),
            cwnd: self.cwnd,
            responses: self.responses,
            paced_until: None,
            credit: None,
            credit_at: None,
        })
    }
}

impl<T: Clone> SendWindow<T> {
    /// Returns the state at the time `now`.
    pub fn save(&self, now: Instant) -> SavedSendWindow<T> {
        let moment = |time: Option<Instant>| time.map(|time| Moment::of(time, now));
        SavedSendWindow {
            entries: self.entries.iter().cloned().collect(),
            snd_una: self.snd_una,
            acked: self.acked,
            snd_nxt: self.snd_nxt,
            snd_max: self.snd_max,
            next_psn: self.next_psn(),
            went_back: self.went_back,
            has_gaps: self.has_gaps,
            is_selective: self.is_selective,
            names_marked: self.names_marked,
            scoreboard: self.scoreboard,
            high_rxt: self.high_rxt,
            rxt_snd_max: self.rxt_snd_max,
            tail_probe: self.tail_probe,
            lost_below: self.lost_below,
            timeout_at: moment(self.timeout_at),
            probe_at: moment(self.probe_at),
            rnr_until: moment(self.rnr_until),
            cwnd: self.cwnd.saved(),
            responses: self.responses,
            sent_at: self.flow.save(now),
        }
    }
}

impl<T> SendWindow<T> {
    /// Returns an empty window. The first packet gets the PSN `psn`.
    pub fn new(psn: Psn) -> Self {
        Self {
            entries: VecDeque::new(),
            with_response: 0,
            snd_una: psn,
            acked: psn,
            snd_nxt: psn,
            snd_max: psn,
            went_back: false,
            has_gaps: false,
            has_progress: false,
            is_selective: false,
            names_marked: false,
            offer: Offer::default(),
            scoreboard: (psn, SackEth::default()),
            high_rxt: psn,
            rxt_snd_max: psn,
            tail_probe: None,
            inquired: None,
            lost_below: psn,
            refused_below: psn,
            timeout_at: None,
            probe_at: None,
            probe: Probe::default(),
            rnr_until: None,
            flow: Flow::default(),
            cwnd: Requests::default(),
            responses: Responses::default(),
            paced_until: None,
            credit: None,
            credit_at: None,
        }
    }

    /// Notes that the peer is to be asked whether it has selective acknowledgements, because a packet may be lost.
    pub fn ask_for_sack(&mut self) {
        self.offer.is_due |= self.may_ask_for_sack();
    }

    /// Handles progress, of which [`Self::take_progress`] tells: the timers begin again, and the time of an answer is
    /// measured. The data of a response that comes slowly is no answer to the inquiry about it, so the next inquiry comes
    /// later than this one.
    pub fn handle_progress(&mut self, now: Instant) {
        (self.timeout_at, self.probe_at) = (None, None);
        let acked = self.acked;
        if self.inquired.is_none() {
            self.probe.done(acked, now);
        } else {
            self.probe.measure(now, |measured| measured.is_before(acked));
        }
    }

    /// Returns the delay of the next probe.
    pub fn probe_delay(&self) -> Duration {
        self.probe.delay(!self.is_selective)
    }

    /// Returns whether the peer may be asked: it has not said that it has selective acknowledgements, and was asked
    /// fewer than [`MOST_OFFERS`] times.
    fn may_ask_for_sack(&self) -> bool {
        !self.is_selective && self.offer.left != 0
    }

    /// Returns the PSN of the question for selective acknowledgements if the question is sent now.
    pub fn poll_sack_question(&mut self) -> Option<Psn> {
        let is_due = std::mem::take(&mut self.offer.is_due) && self.may_ask_for_sack();
        self.offer.left -= u8::from(is_due);
        is_due.then_some(self.snd_una)
    }

    /// Notes that the peer has selective acknowledgements.
    pub fn handle_sack_offer(&mut self) {
        self.is_selective = true;
    }

    /// Returns whether the window has room for a message of `packets` packets.
    pub fn has_room(&self, packets: u32) -> bool {
        let Some(oldest) = self.entries.front() else { return true };
        let under_way = self.next_psn().distance_from(oldest.first).unsigned_abs();
        self.entries.len() < MOST_MESSAGES && under_way.saturating_add(packets) <= MOST_PACKETS
    }

    /// Returns the number of messages.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether there is no message.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the first PSN of the next message. An empty window is complete up to that.
    pub fn next_psn(&self) -> Psn {
        self.entries.back().map_or(self.snd_una, Entry::end)
    }

    /// Returns the PSN in front of which all requests are acknowledged.
    pub fn acked(&self) -> Psn {
        self.acked
    }

    /// Returns the PSN of the packet that is sent next, which was sent before after a loss.
    pub fn snd_nxt(&self) -> Psn {
        self.snd_nxt
    }

    /// Returns whether progress was made since the last call: a request was acknowledged, or a missing packet of a
    /// response was taken. A window makes progress at most as often as it has packets, whatever a peer sends.
    pub fn take_progress(&mut self) -> bool {
        std::mem::take(&mut self.has_progress)
    }

    /// Returns whether a packet was sent whose message is not complete.
    pub fn awaits_answer(&self) -> bool {
        self.snd_max.is_after(self.snd_una)
    }

    /// Returns whether a packet with this PSN may have been sent lately. A CNP for a packet may arrive after its
    /// acknowledgement, and after other packets were sent.
    pub fn may_have_sent(&self, psn: Psn) -> bool {
        let most = i32::try_from(2 * self.cwnd.packets().max(MOST)).unwrap_or(i32::MAX);
        psn.is_before(self.snd_max) && psn.distance_from(self.snd_una) >= -most
    }

    /// Returns whether the packet with this PSN was sent and its message is not complete. An answer to another packet
    /// is a duplicate, or answers nothing that was sent.
    pub fn is_in_flight(&self, psn: Psn) -> bool {
        psn.distance_from(self.snd_una) >= 0 && psn.distance_from(self.snd_max) < 0
    }

    /// Adds a message of `packets` packets, for which the window [has room](Self::has_room).
    pub fn push(&mut self, message: T, packets: u32, kind: Kind) {
        let first = self.next_psn();
        self.with_response += usize::from(kind.has_response);
        let (received, lost_below, requested_below) = Default::default();
        self.entries.push_back(Entry {
            message,
            first,
            packets,
            kind,
            received,
            lost_below,
            requested_below,
        });
    }

    /// Returns the packet that is sent next: a request for a gap of a response, then a lost packet, then a new one.
    /// `None` if there is no packet, if the congestion window is full, if the peer has told of no receive for the next
    /// message, or if the next packet requests a response while `most_responses` are missing. A caller that has sent the
    /// packet calls [`Self::transmitted`].
    pub fn poll_transmit(&self, most_responses: u8) -> Option<Transmit> {
        let is_lost = |psn: Psn| !psn.is_before(self.refused_below);
        let again = |at, index, count, psn| {
            let (ack_request, is_retransmit, is_lost) = (true, true, is_lost(psn));
            Some(Transmit { at, index, count, psn, ack_request, is_retransmit, is_lost })
        };
        if let Some((at, gap)) = self.next_gap() {
            let psn = self.entries.get(at)?.first.plus(gap.start);
            return again(at, gap.start, gap.end - gap.start, psn);
        }
        if let Some((at, psn)) = self.next_retransmit() {
            let Entry { first, packets, .. } = self.entries.get(at)?;
            let index = psn.distance_from(*first).unsigned_abs();
            let count = if psn.is_before(self.acked) { 1 } else { packets - index };
            return again(at, index, count, psn);
        }
        let at = self.at_snd_nxt();
        let entry = self.entries.get(at)?;
        let before = self.entries.range(..at);
        let index = self.snd_nxt.distance_from(entry.first).unsigned_abs();
        if entry.kind.is_fenced && index == 0 && before.clone().any(Entry::awaits_response) {
            return None;
        }
        if index == 0 && !self.snd_nxt.is_before(self.snd_max) && !self.has_credit(at) {
            return None;
        }
        let (ack_request, may_go) = if entry.kind.has_response {
            // The peer keeps the answers of its last requests only. So an answer that has arrived counts while an
            // earlier answer is missing, which may have to be requested again.
            let responses = before
                .skip_while(|other| !other.awaits_response())
                .filter(|other| other.kind.has_response);
            let missing: u32 = responses.clone().map(Entry::missing_packets).sum();
            let is_few = missing < self.responses.packets();
            (true, is_few && responses.count() < usize::from(most_responses))
        } else {
            let (span, cwnd) = (self.span(), self.cwnd.packets());
            let in_flight = span - self.held().min(span);
            let most = self.cwnd.bound();
            let is_last = index + 1 == entry.packets || in_flight + 1 == cwnd || span + 1 == most;
            let ack_request = is_last || self.snd_nxt.get() % self.cwnd.ack_every() == 0;
            (ack_request, in_flight < cwnd && span < most)
        };
        let count = entry.packets - index;
        let psn = self.snd_nxt;
        let is_retransmit = psn.is_before(self.snd_max);
        let is_lost = is_retransmit && is_lost(psn);
        may_go.then_some(Transmit { at, index, count, psn, ack_request, is_retransmit, is_lost })
    }

    /// Returns the message of a packet that [`Self::poll_transmit`] has returned, as long as the window has not changed
    /// since, and the flow that the packet belongs to.
    #[inline]
    pub fn message(&mut self, transmit: &Transmit) -> Option<(&T, &mut Flow)> {
        let entry = self.entries.get(transmit.at)?;
        Some((&entry.message, &mut self.flow))
    }

    /// Returns the gap that is requested next: the place of its message, and its packets.
    fn next_gap(&self) -> Option<(usize, Range<u32>)> {
        if !self.has_gaps {
            return None;
        }
        let several = self.is_selective;
        self.entries.iter().enumerate().find_map(|(at, entry)| Some((at, entry.gap(several)?)))
    }

    /// Returns the place of the message and the PSN of the packet that is sent again next: the tail probe, or the first
    /// lost packet that was not sent again. Of a message with a response, the peer can miss the request alone, which
    /// has the first PSN.
    fn next_retransmit(&self) -> Option<(usize, Psn)> {
        if let Some(psn) = self.tail_probe {
            return Some((self.at(psn), psn));
        }
        let (from, sack) = &self.scoreboard;
        let end = later(from.plus(sack.end()), self.lost_below);
        let mut psn = later(self.high_rxt, self.acked);
        while psn.is_before(end) {
            let at = self.at(psn);
            let entry = self.entries.get(at)?;
            let is_request = !entry.kind.has_response || psn == entry.first;
            let distance = u32::try_from(psn.distance_from(*from)).ok()?;
            if is_request && !sack.has(distance) {
                return Some((at, psn));
            }
            psn = if entry.kind.has_response { entry.end() } else { psn.plus(1) };
        }
        None
    }

    /// Handles a selective acknowledgement: of all packets in front of the PSN `psn`, and of the packets in `sack`
    /// behind that. The packets between them are lost and are sent again. If the peer holds a packet that was sent
    /// later than a lost one was sent again, that one is lost once more. Packets that the peer holds are no progress,
    /// so that the retries of a requester end if its peer misses the same packet for ever.
    pub fn handle_sack(&mut self, psn: Psn, sack: SackEth) {
        self.handle_ack(psn.minus(1));
        let end = psn.plus(sack.end());
        if psn.is_before(self.acked) || end.is_after(self.snd_max) || sack.count() == 0 {
            return;
        }
        (self.is_selective, self.names_marked) = (true, true);
        self.scoreboard = (psn, sack);
        if end.is_after(self.rxt_snd_max) {
            self.high_rxt = psn;
        }
        self.count_losses();
    }

    /// Lets the windows become longer on a long path, for packets with a payload of `mtu` bytes.
    #[inline]
    pub fn set_mtu(&mut self, mtu: u64) {
        let round_trip = self.probe.least();
        self.cwnd.set_longest(mtu, round_trip);
        self.responses.set_longest(mtu, round_trip);
    }

    /// Sends what is behind the last packet again that the peer can hold, which it drops while a packet is missing.
    fn go_back_to_held(&mut self) {
        let far = self.scoreboard.0.plus(SackEth::PACKETS);
        if !self.snd_nxt.is_after(far) {
            return;
        }
        // A response is requested as a whole, if the peer does not hold the request.
        let entry = self.entries.get(self.at(far)).filter(|entry| entry.kind.has_response);
        let psn = match entry {
            Some(entry) if self.holds(entry.first) => entry.end(),
            Some(entry) => entry.first,
            None => far,
        };
        if psn.is_before(self.snd_nxt) {
            self.snd_nxt = later(psn, self.acked_or_complete());
        }
    }

    /// Measures the time of an answer if the peer holds the packet whose answer is measured.
    pub fn measure_held(&mut self, now: Instant) {
        let (from, sack) = self.scoreboard;
        let distance = |psn: Psn| u32::try_from(psn.distance_from(from));
        self.probe.measure(now, |psn| distance(psn).is_ok_and(|distance| sack.has(distance)));
    }

    /// Counts the packets that the last selective acknowledgement shows to be lost, and that were not counted before.
    fn count_losses(&mut self) {
        let (from, sack) = self.scoreboard;
        let Some(end) = sack.last_but(DUPLICATES - 1).map(|distance| from.plus(distance)) else {
            return;
        };
        let mut psn = later(from, self.cwnd.losses.counted_below.unwrap_or(from));
        while psn.is_before(end) {
            let Some(entry) = self.entries.get(self.at(psn)) else { break };
            let is_request = !entry.kind.has_response || psn == entry.first;
            let next = if entry.kind.has_response { entry.end() } else { psn.plus(1) };
            if is_request && !sack.has(psn.distance_from(from).unsigned_abs()) {
                self.lose(psn, false);
                self.go_back_to_held();
            }
            psn = next;
        }
        self.cwnd.losses.counted_below = Some(psn);
    }

    /// Handles the loss of a request, or of a packet of one. `is_unsure` is whether later packets may have overtaken
    /// it.
    fn lose(&mut self, psn: Psn, is_unsure: bool) {
        if psn.is_before(self.refused_below) {
            // The peer has dropped it behind a message that it had no receive for.
            return;
        }
        let (queue, is_marking) = (&self.probe.queue, self.flow.is_marked());
        // Everything behind a lost packet is sent again to a peer that holds nothing. So what waits is sent in vain.
        let fits = if self.is_selective { None } else { queue.fits() };
        let is_queued = queue.is_long() || fits.is_some();
        self.cwnd.lose(psn, 1, self.snd_max, Signs { is_queued, is_marking, is_unsure, fits });
    }

    /// Returns the place of the message with this PSN, or the place behind the last message. Mostly this is the last
    /// message, which was added just now.
    fn at(&self, psn: Psn) -> usize {
        match self.entries.back() {
            Some(last) if !psn.is_before(last.first) => {
                self.entries.len() - usize::from(psn.is_before(last.end()))
            }
            _ => self.entries.partition_point(|entry| !entry.end().is_after(psn)),
        }
    }

    /// Returns the place of the message with the PSN `snd_nxt`, or the place behind the last message.
    fn at_snd_nxt(&self) -> usize {
        self.at(self.snd_nxt)
    }

    /// Sets the congestion windows to their first sizes, because nothing was sent for a while (RFC 5681, section 4.1).
    pub fn restart_cwnd(&mut self) {
        (self.cwnd, self.responses) = (Requests::default(), Responses::default());
    }

    /// Returns how many of the packets behind the first missing one the peer holds. They are not under way any more
    /// (RFC 6675, pipe).
    fn held(&self) -> u32 {
        let (from, sack) = &self.scoreboard;
        match self.acked.distance_from(*from) {
            0 => sack.count(),
            passed => {
                (passed.max(0).unsigned_abs()..sack.end()).map(|at| u32::from(sack.has(at))).sum()
            }
        }
    }

    /// Returns the number of packets that were sent behind those that are acknowledged, and that belong to messages
    /// without a response.
    fn span(&self) -> u32 {
        let from = self.acked_or_complete();
        let all = self.snd_nxt.distance_from(from).max(0).unsigned_abs();
        if self.with_response == 0 {
            return all;
        }
        let responses = self.entries.iter().filter(|entry| entry.kind.has_response).map(|entry| {
            let from = later(entry.first, from);
            let to = if self.snd_nxt.distance_from(entry.end()) < 0 {
                self.snd_nxt
            } else {
                entry.end()
            };
            to.distance_from(from).max(0).unsigned_abs()
        });
        all.saturating_sub(responses.sum())
    }

    /// Returns the PSN in front of which no packet is sent again, but for requests for gaps of responses.
    fn acked_or_complete(&self) -> Psn {
        later(self.acked, self.snd_una)
    }

    /// Returns whether the peer has a receive for the message at this place, as far as it tells.
    fn has_credit(&self, at: usize) -> bool {
        let Some(Credit { from, messages, .. }) = self.credit else { return true };
        // A message of which the peer has a part counts as well: the peer counts the messages behind those that are done
        // (MSN).
        let takes = |entry: &&Entry<T>| entry.kind.takes_receive && entry.end().is_after(from);
        let entry = self.entries.get(at).filter(|entry| entry.kind.takes_receive);
        entry.is_none() || (self.entries.range(..at).filter(takes).count() as u64) < messages.into()
    }

    /// Returns whether the next message waits for a receive of the peer, and nothing else is under way.
    pub fn lacks_credit(&self) -> bool {
        let at = self.at_snd_nxt();
        self.entries.get(at).is_some_and(|entry| entry.first == self.snd_nxt)
            && !self.awaits_answer()
            && !self.has_credit(at)
    }

    /// Handles the number of messages for which the peer has receives behind the packet `psn`, as an acknowledgement of
    /// this packet tells; `None`: the peer does not count them. An acknowledgement that is older than another one tells
    /// nothing.
    pub fn handle_credits(&mut self, psn: Psn, messages: Option<u16>) {
        let from = psn.plus(1);
        if self.credit.is_some_and(|credit| from.is_before(credit.from)) {
            return;
        }
        let before = self.credit.map_or(0, |credit| credit.asked);
        self.credit = messages.map(|messages| {
            let asked = if messages == 0 { before } else { 0 };
            Credit { from, messages: messages.into(), asked, unanswered: 0 }
        });
    }

    /// Counts the receive that a message has taken of which the peer has not told yet, and forgets the message.
    fn spend_credit(&mut self, end: Psn, takes_receive: bool) {
        if let Some(credit) = self.credit.as_mut().filter(|credit| end.is_after(credit.from)) {
            credit.from = end;
            credit.messages = credit.messages.saturating_sub(takes_receive.into());
        }
    }

    /// Takes the peer for one that counts its receives until it says otherwise, because the consumer relies on that: of
    /// the messages that take a receive, the first one is sent and the others wait. Messages under way have their
    /// receives; one that is acknowledged is not under way, even if it waits for the response of an earlier one.
    pub fn expect_credits(&mut self) {
        let from = self.acked_or_complete();
        let is_under_way = |entry: &&Entry<T>| {
            let is_sent = entry.first.is_before(self.snd_max);
            entry.kind.takes_receive && is_sent && entry.end().is_after(from)
        };
        let messages = self.entries.iter().filter(is_under_way).count().max(1);
        let messages = u32::try_from(messages).unwrap_or(u32::MAX);
        self.credit = Some(Credit { from, messages, asked: 0, unanswered: 0 });
    }

    /// Returns whether an acknowledgement of this packet tells of receives alone: everything up to the packet was
    /// acknowledged before (IBA 9.7.7.2.6).
    pub fn is_credit_update(&self, psn: Psn) -> bool {
        psn.plus(1) == self.acked_or_complete()
    }

    /// Lets one message go without a credit. The peer may have a receive of which it has told in a packet that was
    /// lost; otherwise it answers that it has none.
    pub fn lend_credit(&mut self) {
        self.credit_at = None;
        if let Some(credit) = &mut self.credit {
            credit.messages += 1;
        }
    }

    /// Asks the peer for its receives, for a consumer that wants no retry for want of a receive. Returns the PSN of a
    /// packet that the peer has received and acknowledges again. A peer that does not answer may be gone, which only a
    /// message tells: after a few questions this [lends](Self::lend_credit) a credit, and returns `None`.
    pub fn ask_for_credit(&mut self) -> Option<Psn> {
        let psn = self.acked_or_complete().minus(1);
        let Some(credit) = self.credit.as_mut().filter(|credit| credit.unanswered < MOST_QUESTIONS)
        else {
            self.lend_credit();
            return None;
        };
        credit.asked = credit.asked.saturating_add(1);
        credit.unanswered += 1;
        self.credit_at = None;
        Some(psn)
    }

    /// Returns how long a message waits for a receive before it goes without, or before the peer is asked. The delay
    /// doubles with each question, up to a bound.
    pub fn credit_delay(&self) -> Duration {
        let asked = self.credit.map_or(0, |credit| credit.asked);
        self.probe_delay().saturating_mul(1 << asked.min(MOST_DELAYS))
    }

    /// Notes that the packet was sent that [`Self::poll_transmit`] returns.
    pub fn transmitted(&mut self) {
        if let Some((at, gap)) = self.next_gap() {
            let entry = &mut self.entries[at];
            entry.requested_below = gap.end;
            self.probe.forget(entry.first.plus(gap.start));
            return;
        }
        self.has_gaps = false;
        if let Some(psn) = self.tail_probe.take() {
            self.inquired = (!self.is_selective && psn.is_before(self.acked)).then_some(psn);
            return;
        }
        if let Some((at, psn)) = self.next_retransmit() {
            let entry = &self.entries[at];
            self.high_rxt = if entry.kind.has_response { entry.end() } else { psn.plus(1) };
            self.rxt_snd_max = self.snd_max;
            self.probe.forget(psn);
            return;
        }
        let Some(entry) = self.entries.get(self.at_snd_nxt()) else { return };
        if self.snd_nxt.is_before(self.snd_max) {
            self.probe.forget(self.snd_nxt);
        } else if !entry.kind.has_response {
            self.cwnd.sent(1);
        }
        self.snd_nxt = if entry.kind.has_response { entry.end() } else { self.snd_nxt.plus(1) };
        self.snd_max = later(self.snd_max, self.snd_nxt);
    }

    /// Handles an acknowledgement of the packet `psn` and all packets in front of it. Returns `false` if the packet is
    /// not [under way](Self::is_in_flight). A peer sends responses and acknowledgements in the order of the requests,
    /// so the missing packets of responses in front of `psn` are lost.
    pub fn handle_ack(&mut self, psn: Psn) -> bool {
        if !self.is_in_flight(psn) {
            return false;
        }
        for entry in &mut self.entries {
            if psn.is_before(entry.first) {
                break;
            }
            if entry.awaits_response() {
                self.has_gaps |= entry.lose(entry.packets);
            }
        }
        self.note_acked(psn);
        true
    }

    /// Notes that the peer has acknowledged the request `psn`, and those in front of it.
    fn note_acked(&mut self, psn: Psn) {
        let acked = match self.entries.get(self.at(psn)) {
            Some(entry) if entry.kind.has_response && !psn.is_before(entry.first) => entry.end(),
            _ => psn.plus(1),
        };
        if acked.is_after(self.acked) {
            self.move_acked(acked);
            self.forget_lost(acked);
            self.tail_probe = self.tail_probe.filter(|psn| !psn.is_before(acked));
            self.has_progress = true;
            self.went_back = false;
        }
        self.complete_prefix();
    }

    /// Forgets which packets in front of a PSN are lost.
    fn forget_lost(&mut self, acked: Psn) {
        self.high_rxt = later(self.high_rxt, acked);
        self.rxt_snd_max = later(self.rxt_snd_max, acked);
        self.lost_below = later(self.lost_below, acked);
        self.refused_below = later(self.refused_below, acked);
        self.cwnd.forget_before(acked);
        if !self.scoreboard.0.plus(self.scoreboard.1.end()).is_after(acked) {
            self.scoreboard = (acked, SackEth::default());
        }
    }

    /// Moves `acked`, and lets the congestion window grow by the packets that are acknowledged by that.
    fn move_acked(&mut self, acked: Psn) {
        let is_counted = self.with_response < self.entries.len() && !self.cwnd.is_full();
        let in_flight = if is_counted { self.span() } else { 0 };
        self.acked = acked;
        if is_counted {
            let acknowledged = in_flight.saturating_sub(self.span());
            self.cwnd.acknowledge(acknowledged, in_flight, self.flow.is_cut());
        }
    }

    /// Moves `snd_una` behind the messages that are complete.
    fn complete_prefix(&mut self) {
        for entry in &self.entries {
            let to = if entry.kind.has_response {
                entry.first.plus(entry.received.complete())
            } else if self.acked.is_after(entry.end()) {
                entry.end()
            } else {
                self.acked
            };
            self.snd_una = later(self.snd_una, to);
            if self.snd_una.is_before(entry.end()) {
                break;
            }
        }
        self.end_tail_probe();
        self.responses.forget_before(self.snd_una);
        self.snd_nxt = later(self.snd_nxt, self.acked_or_complete());
    }

    /// Returns the place of the message whose response has a packet with this PSN, and the number of the packet in it.
    fn response_at(&self, psn: Psn) -> Option<(usize, u32)> {
        let at = self.at(psn);
        let entry = self.entries.get(at)?;
        let index = u32::try_from(psn.distance_from(entry.first)).ok()?;
        entry.kind.has_response.then_some((at, index))
    }

    /// Handles a packet of a response, which acknowledges its request and all requests in front of it (IBA 9.7.5.1.2).
    /// `is_end` is whether it is the last one of what was requested.
    pub fn handle_response(&mut self, psn: Psn, is_end: bool) -> Response<'_, T> {
        if !self.is_in_flight(psn) {
            return Response::Unexpected;
        }
        let Some((at, index)) = self.response_at(psn) else { return Response::Unexpected };
        if is_end && self.inquired.take_if(|inquired| *inquired == psn).is_some() {
            self.lose_response(at);
        }
        if self.entries[at].received.has(index) {
            return Response::Unexpected;
        }
        let mut lost = self.entries[at].newly_lost(index);
        for entry in self.entries.range_mut(..at).filter(|entry| entry.awaits_response()) {
            lost += entry.newly_lost(entry.packets);
            self.has_gaps |= entry.lose(entry.packets);
        }
        if lost != 0 {
            let is_marking = self.flow.arrives_marked();
            let signs = Signs { is_marking, is_unsure: true, ..Signs::default() };
            self.responses.lose(psn, lost, self.snd_max, signs);
        }
        self.has_gaps |= self.entries[at].lose(index);
        self.note_acked(psn);
        Response::Missing(&self.entries[at].message, index)
    }

    /// Notes that the payload of a packet was taken that was [missing](Response::Missing).
    pub fn accept_response(&mut self, psn: Psn) {
        let Some((at, index)) = self.response_at(psn) else { return };
        if self.entries[at].received.fill(index) {
            self.has_progress = true;
            // The gap that was requested may be filled, so that the next gap is requested.
            self.has_gaps |= self.entries[at].gap(true).is_some();
            self.responses.sent(1);
            self.widen_responses();
            self.complete_prefix();
        }
    }

    /// Lets the window of responses grow by a packet that has arrived, if losses have made it smaller.
    fn widen_responses(&mut self) {
        if self.responses.is_full() {
            return;
        }
        let missing = self.entries.iter().filter(|entry| entry.kind.has_response);
        let missing = missing.map(Entry::missing_packets).sum();
        self.responses.acknowledge(1, missing, false);
    }

    /// Returns the PSN in front of which all messages are complete.
    pub fn snd_una(&self) -> Psn {
        self.snd_una
    }

    /// Returns whether the response to the oldest message has a packet with this PSN.
    pub fn is_of_oldest(&self, psn: Psn) -> bool {
        self.response_at(psn).is_some_and(|(at, _)| at == 0)
    }

    /// Returns whether the oldest message that is not complete has a packet with this PSN.
    pub fn is_of_oldest_incomplete(&self, psn: Psn) -> bool {
        self.at(psn) == self.at(self.snd_una)
    }

    /// Begins to send all packets again that are not acknowledged, and to request the gaps of all responses again. Both
    /// timers begin again.
    pub fn go_back(&mut self) {
        self.went_back = true;
        self.snd_nxt = self.acked_or_complete();
        self.scoreboard = (self.acked, SackEth::default());
        (self.high_rxt, self.rxt_snd_max, self.lost_below) = (self.acked, self.acked, self.acked);
        self.cwnd.losses.counted_below = None;
        (self.tail_probe, self.inquired) = (None, None);
        (self.timeout_at, self.probe_at) = (None, None);
        self.lose_responses();
    }

    /// Handles an RNR NAK, which says that the peer has no receive for a message: goes back.
    pub fn handle_rnr_nak(&mut self) {
        self.go_back();
        self.refused_below = self.snd_max;
    }

    /// Handles the end of the time for an answer: goes back, with a congestion window of the first size at most (RFC
    /// 5681, section 3.1).
    pub fn handle_timeout(&mut self) {
        self.go_back();
        self.cwnd.time_out(self.snd_max);
    }

    /// Handles the end of the time after which a tail loss is probed. The time for an answer goes on.
    ///
    /// The first probe is one packet: the last one that was sent, or a request for the last packet of a response. A peer
    /// that has received everything answers it as a duplicate (IBA 9.7.5.1.5), and any other says which packets it
    /// misses. A peer that is only slow gets no other packet twice. The next probe without progress takes all packets
    /// for lost that the peer neither has acknowledged nor holds, and all gaps of responses.
    ///
    /// A peer without selective acknowledgements gets one packet each time, an inquiry, because that peer would get
    /// everything once more each time that it is slow.
    pub fn handle_probe_timeout(&mut self) {
        if self.is_selective {
            let probe = self.last_request().or_else(|| self.last_response());
            self.tail_probe = probe.filter(|_| self.probe.is_first());
            if self.tail_probe.is_none() {
                self.lose_all();
            }
        } else {
            self.tail_probe = self.inquiry();
        }
        self.probe.again();
    }

    /// Takes all packets for lost that the peer neither has acknowledged nor holds, and all gaps of responses.
    fn lose_all(&mut self) {
        if self.span() != 0 {
            let is_marking = self.flow.is_marked();
            self.cwnd.lose_all(self.acked_or_complete(), self.snd_max, is_marking);
        }
        // What the peer cannot hold is sent as the window allows.
        self.go_back_to_held();
        self.high_rxt = self.acked;
        self.lost_below = self.snd_nxt;
        self.lose_responses();
    }

    /// Returns the packet that tells whether a peer without selective acknowledgements is only slow: the last or the
    /// oldest packet that is not acknowledged, by turns, because a peer says only once that a packet is missing, and
    /// that answer may be lost; otherwise a request for the first missing packet of a response.
    ///
    /// That packet arrives behind all that the peer has sent before, so the packets behind it that have not arrived are
    /// lost. The last packet would tell the same, but a peer such as rxe then forgets what is in front of it.
    fn inquiry(&self) -> Option<Psn> {
        let oldest = if self.probe.is_even() { None } else { Some(self.acked) };
        let may_repeat = |psn: &Psn| self.may_repeat(*psn);
        let request = oldest.filter(may_repeat);
        let request = request.or_else(|| self.last_request().filter(may_repeat));
        request.or_else(|| self.first_missing())
    }

    /// Returns whether a packet is not acknowledged, and no more than a packet answers it. A READ of many packets is
    /// repeated once, by the third probe, before the time for an answer is over.
    fn may_repeat(&self, psn: Psn) -> bool {
        let Some(entry) = self.entries.get(self.at(psn)) else { return false };
        let is_one = !entry.kind.has_response || entry.packets == 1 || self.probe.is_third();
        is_one && psn.is_before(self.snd_max) && !psn.is_before(self.acked)
    }

    /// Returns the PSN of the first missing packet of the oldest response to a request that is acknowledged.
    fn first_missing(&self) -> Option<Psn> {
        let is_due =
            |entry: &&Entry<T>| entry.awaits_response() && entry.first.is_before(self.acked);
        let entry = self.entries.iter().find(is_due)?;
        Some(entry.first.plus(entry.received.complete()))
    }

    /// Returns the PSN of the packet that was sent last, also where older ones are sent again, unless the peer has
    /// acknowledged or holds it.
    fn last_request(&self) -> Option<Psn> {
        let last = self.snd_nxt.minus(1);
        let entry = self.entries.get(self.at(last))?;
        let psn = if entry.kind.has_response { entry.first } else { last };
        (!psn.is_before(self.acked) && !self.holds(psn)).then_some(psn)
    }

    /// Returns whether the last selective acknowledgement says that the peer holds a packet.
    fn holds(&self, psn: Psn) -> bool {
        let (from, sack) = &self.scoreboard;
        u32::try_from(psn.distance_from(*from)).is_ok_and(|distance| sack.has(distance))
    }

    /// Returns the PSN of the last packet of the last response to a request that is acknowledged, unless this packet
    /// has arrived.
    fn last_response(&self) -> Option<Psn> {
        let is_due =
            |entry: &&Entry<T>| entry.awaits_response() && entry.first.is_before(self.acked);
        let entry = self.entries.iter().rev().find(is_due)?;
        let last = entry.packets - 1;
        entry.received.missing(last..entry.packets).map(|_| entry.first.plus(last))
    }

    /// Marks all that is missing of a response as lost, so that it is requested again.
    fn lose_response(&mut self, at: usize) {
        let entry = &mut self.entries[at];
        entry.requested_below = entry.received.complete();
        self.has_gaps |= entry.lose(entry.packets);
    }

    /// Marks the gaps of responses to acknowledged requests as lost, so that they are requested again.
    fn lose_responses(&mut self) {
        let to = self.acked_or_complete();
        for entry in &mut self.entries {
            if !entry.first.is_before(to) {
                break;
            }
            if entry.awaits_response() {
                entry.requested_below = 0;
                self.has_gaps |= entry.lose(entry.packets);
            }
        }
    }

    /// Handles a NAK that says that a packet is missing: goes back, unless that was done before and nothing was
    /// acknowledged since. A peer that misses the same packet again gets it by a probe, or when the time for an answer is
    /// over.
    pub fn handle_nak(&mut self) {
        if !self.went_back {
            self.lose(self.acked_or_complete(), true);
            self.go_back();
        }
    }

    /// Takes the oldest message if the message is complete.
    pub fn poll_completed(&mut self) -> Option<T> {
        let entry = self.entries.front()?;
        let is_done = entry.end().distance_from(self.snd_una) <= 0 && !entry.awaits_response();
        is_done.then(|| self.pop())?
    }

    /// Takes the oldest message, whether the message is complete or not.
    pub fn pop(&mut self) -> Option<T> {
        let entry = self.entries.pop_front()?;
        self.with_response -= usize::from(entry.kind.has_response);
        self.snd_una = later(self.snd_una, entry.end());
        self.end_tail_probe();
        self.inquired = self.inquired.filter(|psn| !psn.is_before(self.snd_una));
        self.spend_credit(entry.end(), entry.kind.takes_receive);
        if self.snd_una.is_after(self.acked) {
            // The message has failed, so nothing of it is sent any more.
            self.acked = self.snd_una;
            self.forget_lost(self.snd_una);
        }
        self.snd_nxt = later(self.snd_nxt, self.snd_una);
        self.snd_max = later(self.snd_max, self.snd_nxt);
        Some(entry.message)
    }

    /// Ends the tail probe if its answer has arrived, or its message is gone.
    fn end_tail_probe(&mut self) {
        self.tail_probe = self.tail_probe.filter(|psn| !psn.is_before(self.snd_una));
    }
}

/// Returns the later one of two PSNs.
fn later(one: Psn, other: Psn) -> Psn {
    if one.is_before(other) {
        other
    } else {
        one
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Returns how many READs of so many packets are asked for before one is answered.
    fn asked_for(packets: u32) -> usize {
        let mut window = SendWindow::new(Psn::new(0));
        let kind = Kind { has_response: true, ..Kind::default() };
        (0..32).for_each(|number| window.push(number, packets, kind));
        let mut count = 0;
        while window.poll_transmit(16).is_some() {
            window.transmitted();
            count += 1;
        }
        count
    }

    /// Sends what is due, of one message of 4,096 packets. Returns how many packets were sent, and how many of them
    /// ask for an acknowledgement.
    fn sends(window: &mut SendWindow<()>) -> (u32, u32) {
        let (mut sent, mut asked) = (0, 0);
        while let Some(due) = window.poll_transmit(1) {
            asked += u32::from(due.ack_request);
            sent += 1;
            window.transmitted();
        }
        (sent, asked)
    }

    #[test]
    fn a_window_begins_with_a_few_packets() {
        let mut window = SendWindow::new(Psn::new(0xff_fff1));
        window.push((), 4096, Kind::default());
        assert_eq!(sends(&mut window), (16, 1), "the last one asks");
        window.handle_ack(Psn::new(0xff_fff1).plus(15));
        assert_eq!(sends(&mut window), (32, 1));
        window.handle_ack(Psn::new(0xff_fff1).plus(15 + 32));
        window.handle_ack(Psn::new(0xff_fff1).plus(15 + 32));
        assert_eq!(sends(&mut window), (64, 1));
        window.restart_cwnd();
        window.handle_ack(Psn::new(0xff_fff1).plus(15 + 32 + 64));
        assert_eq!(sends(&mut window), (16 + 64, 2), "the one of PSN 128 asks, too");
    }

    #[test]
    fn a_time_out_begins_with_a_few_packets() {
        let mut window = SendWindow::new(Psn::new(0));
        window.is_selective = true;
        window.push((), 4096, Kind::default());
        for sent in [16, 32, 64] {
            assert_eq!(sends(&mut window).0, sent);
            window.handle_ack(window.snd_max.minus(1));
        }
        assert_eq!(sends(&mut window).0, 128);
        window.handle_timeout();
        assert_eq!(window.poll_transmit(1).map(|due| due.psn), Some(Psn::new(112)));
        assert_eq!(sends(&mut window).0, 16);
        window.handle_probe_timeout();
        assert_eq!(sends(&mut window).0, 1, "the peer is asked what it misses");
        window.handle_probe_timeout();
        assert_eq!(sends(&mut window).0, 16, "it does not answer");
        window.handle_ack(Psn::new(112 + 15));
        assert_eq!(sends(&mut window).0, 32);
    }

    #[test]
    fn a_slow_peer_is_sent_one_packet_again() {
        let mut window = SendWindow::new(Psn::new(0));
        window.is_selective = true;
        window.push((), 10, Kind::default());
        assert_eq!(sends(&mut window), (10, 2));
        window.handle_probe_timeout();
        assert_eq!(window.poll_transmit(1).map(|due| due.psn), Some(Psn::new(9)));
        assert_eq!(sends(&mut window), (1, 1));
        // The peer holds it, and misses three in front of it.
        let mut sack = SackEth::default();
        for distance in [1, 3, 4, 6, 7, 8, 9] {
            sack.set(distance);
        }
        window.handle_sack(Psn::new(0), sack);
        assert_eq!(sends(&mut window).0, 3);
        // Nothing has come since.
        window.handle_probe_timeout();
        assert_eq!(sends(&mut window).0, 3);
        window.handle_ack(Psn::new(9));
        assert!(!window.awaits_answer());
    }

    #[test]
    fn a_peer_that_does_not_answer_is_sent_everything_again() {
        let mut window = SendWindow::new(Psn::new(0));
        window.is_selective = true;
        window.push((), 10, Kind::default());
        window.push((), 100, Kind { has_response: true, ..Kind::default() });
        sends(&mut window);
        window.handle_probe_timeout();
        assert_eq!(
            window.poll_transmit(1).map(|due| (due.psn, due.count)),
            Some((Psn::new(10), 100))
        );
        assert_eq!(sends(&mut window).0, 1);
        window.handle_probe_timeout();
        assert_eq!(sends(&mut window).0, 11);
        // What the peer has done since needs no probe.
        window.push((), 1, Kind::default());
        sends(&mut window);
        window.handle_ack(Psn::new(9));
        window.probe.done(window.acked(), Instant::now());
        window.handle_probe_timeout();
        window.handle_ack(Psn::new(110));
        assert_eq!(sends(&mut window).0, 1, "the response of the READ is missing");
    }

    #[test]
    fn a_slow_responder_is_asked_for_one_packet() {
        let mut window = SendWindow::new(Psn::new(0));
        window.is_selective = true;
        window.push((), 100, Kind { has_response: true, ..Kind::default() });
        sends(&mut window);
        let come = |window: &mut SendWindow<()>, psn: u32| {
            assert!(matches!(
                window.handle_response(Psn::new(psn), false),
                Response::Missing((), _)
            ));
            window.accept_response(Psn::new(psn));
        };
        (0..40).for_each(|psn| come(&mut window, psn));
        window.handle_probe_timeout();
        assert_eq!(
            window.poll_transmit(1).map(|due| (due.psn, due.count)),
            Some((Psn::new(99), 1))
        );
        assert_eq!(sends(&mut window).0, 1);
        // Packets of a response come in their order, so the others are lost.
        come(&mut window, 99);
        assert_eq!(
            window.poll_transmit(1).map(|due| (due.psn, due.count)),
            Some((Psn::new(40), 59))
        );
        assert_eq!(sends(&mut window).0, 1);
        // Nothing has come since.
        window.handle_probe_timeout();
        assert_eq!(
            window.poll_transmit(1).map(|due| (due.psn, due.count)),
            Some((Psn::new(40), 59))
        );
    }

    /// Returns a window with a message of many packets, of which 64 are under way.
    fn used() -> SendWindow<()> {
        let mut window = SendWindow::new(Psn::new(0));
        window.is_selective = true;
        window.push((), 4096, Kind::default());
        for sent in [16, 32, 64] {
            window.handle_ack(window.snd_max.minus(1));
            assert_eq!(sends(&mut window).0, sent);
        }
        window
    }

    /// Tells a window of answers that take longer and longer, as behind a queue.
    fn build_queue(window: &mut SendWindow<()>) {
        let start = Instant::now();
        for micros in [100, 100, 200, 200] {
            window.probe.sent(window.acked, start);
            window.probe.done(window.acked.plus(1), start + Duration::from_micros(micros));
        }
    }

    /// Holds `count` packets of a peer behind a packet, which is missing.
    fn hold(window: &mut SendWindow<()>, missing: u32, count: u32) {
        let mut sack = SackEth::default();
        (1..=count).for_each(|distance| sack.set(distance));
        window.handle_sack(Psn::new(missing), sack);
    }

    #[test]
    fn packets_that_the_peer_holds_make_room() {
        let mut window = used();
        hold(&mut window, 48, 5);
        assert_eq!(
            sends(&mut window).0,
            1 + 5,
            "the missing one, and as many new ones as are held"
        );
        hold(&mut window, 48, 9);
        assert_eq!(sends(&mut window).0, 4);
        // The peer holds no more packets than it has bits for.
        (0..20).for_each(|_| hold_all(&mut window));
        assert_eq!(window.snd_max.distance_from(window.acked), 256);
        window.handle_ack(Psn::new(48 + 255));
        assert_eq!(sends(&mut window).0, 256);
    }

    /// Holds what was sent but for the first packet, and sends what is due.
    fn hold_all(window: &mut SendWindow<()>) {
        let behind = window.snd_max.distance_from(window.acked).unsigned_abs() - 1;
        hold(window, window.acked.get(), behind);
        sends(window);
    }

    #[test]
    fn a_loss_in_a_queue_makes_the_window_smaller() {
        let mut window = used();
        hold(&mut window, 48, 10);
        assert_eq!(window.cwnd.packets(), 64, "nothing tells of a queue");

        let mut window = used();
        build_queue(&mut window);
        hold(&mut window, 48, 2);
        assert_eq!(window.cwnd.packets(), 64, "two packets may have overtaken it");
        hold(&mut window, 48, 3);
        assert_eq!(window.cwnd.packets(), 44);
        hold(&mut window, 50, 20);
        assert_eq!(window.cwnd.packets(), 44, "it was sent in the same round trip");
        window.handle_ack(window.snd_max.minus(1));
        sends(&mut window);
        build_queue(&mut window);
        let missing = window.acked.get();
        hold(&mut window, missing, 3);
        assert_eq!(window.cwnd.packets(), 30);

        let (mut window, now) = (used(), Instant::now());
        build_queue(&mut window);
        window.flow.sent(now, 100, false);
        window.flow.cut(now, 1_000_000_000);
        hold(&mut window, 48, 10);
        assert_eq!(window.cwnd.packets(), 64, "the path marks packets");
    }

    /// A peer holds 256 packets, and drops what is behind them.
    #[test]
    fn a_loss_on_a_long_path_sends_again_what_the_peer_cannot_hold() {
        let (mut window, start) = (used(), Instant::now());
        window.probe.sent(window.acked, start);
        window.probe.done(window.acked.plus(1), start + Duration::from_millis(2));
        window.set_mtu(1024);
        for sent in [128, 256, 512, 1024] {
            window.handle_ack(window.snd_max.minus(1));
            assert_eq!(sends(&mut window).0, sent);
        }
        let (first, end) = (window.acked, window.snd_max);
        hold(&mut window, first.get(), 10);
        assert_eq!(window.snd_nxt, first.plus(256));
        assert_eq!(sends(&mut window).0, 1, "the missing packet");
        window.handle_ack(first.plus(255));
        assert_eq!(sends(&mut window).0, 256);
        window.handle_ack(first.plus(511));
        assert_eq!(sends(&mut window).0, 256);
        assert_eq!((window.snd_nxt, window.snd_max), (first.plus(768), end));
    }

    /// Returns a window of 1,024 packets, all of which are under way.
    fn long() -> SendWindow<()> {
        let (mut window, start) = (used(), Instant::now());
        window.push((), 1 << 20, Kind::default());
        window.probe.sent(window.acked, start);
        window.probe.done(window.acked.plus(1), start + Duration::from_millis(2));
        window.set_mtu(1024);
        for _ in 0..4 {
            window.handle_ack(window.snd_max.minus(1));
            sends(&mut window);
        }
        assert_eq!(window.span(), 1024);
        window
    }

    /// Has the peer acknowledge all that is sent, for so many round trips. Returns the greatest number of packets under
    /// way.
    fn acknowledge_all(window: &mut SendWindow<()>, round_trips: u32) -> u32 {
        let spans = (0..round_trips).map(|_| {
            window.handle_ack(window.snd_nxt.minus(1));
            sends(window);
            window.span()
        });
        spans.max().unwrap_or(0)
    }

    #[test]
    fn a_time_out_on_a_long_path_makes_the_next_windows_short() {
        let mut window = long();
        window.handle_timeout();
        assert_eq!(sends(&mut window).0, 16);
        assert_eq!(acknowledge_all(&mut window, 40), 256);
    }

    /// Silence is a loss of all packets. On a path that marks packets, it leaves what a responder can hold.
    #[test]
    fn silence_on_a_path_that_marks_makes_the_next_windows_short() {
        let (mut window, now) = (long(), Instant::now());
        window.flow.sent(now, 100, false);
        window.flow.cut(now, 1_000_000_000);
        (0..2).for_each(|_| {
            window.handle_probe_timeout();
            sends(&mut window);
        });
        assert_eq!(window.cwnd.packets(), 256);
        assert_eq!(acknowledge_all(&mut window, 40), 256);
    }

    /// A peer that says nothing is sent no more at once than it can hold.
    #[test]
    fn silence_on_a_long_path_sends_again_what_the_peer_can_hold() {
        let (mut window, now) = (long(), Instant::now());
        let first = window.acked;
        assert_eq!(window.snd_max, first.plus(1024));
        window.handle_probe_timeout();
        assert_eq!(sends(&mut window).0, 1, "the last one");
        window.handle_probe_timeout();
        assert_eq!((sends(&mut window).0, window.snd_nxt), (256, first.plus(256)));
        // The next probe is about what was sent last.
        window.handle_ack(first.plus(9));
        window.handle_progress(now);
        window.handle_probe_timeout();
        assert_eq!(window.poll_transmit(1).map(|due| due.psn), Some(first.plus(255)));
    }

    #[test]
    fn a_request_that_the_peer_holds_is_not_repeated() {
        for is_held in [false, true] {
            let mut window = SendWindow::new(Psn::new(0));
            window.is_selective = true;
            window.push((), 10, Kind::default());
            window.push((), 400, Kind { has_response: true, ..Kind::default() });
            window.push((), 5, Kind::default());
            sends(&mut window);
            let mut sack = SackEth::default();
            (1..=10).filter(|at| is_held || *at != 10).for_each(|distance| sack.set(distance));
            window.handle_sack(Psn::new(0), sack);
            assert_eq!(window.snd_nxt, Psn::new(if is_held { 410 } else { 10 }));
        }
    }

    /// A message that was sent once is sent again whatever the peer says of its receives.
    #[test]
    fn what_is_sent_again_needs_no_credit() {
        let mut window = SendWindow::new(Psn::new(0));
        window.expect_credits();
        let kind = Kind { takes_receive: true, ..Kind::default() };
        (0..3).for_each(|_| window.push((), 1, kind));
        assert_eq!(sends(&mut window).0, 1);
        window.handle_credits(Psn::new(0).minus(1), Some(0));
        assert_eq!(sends(&mut window).0, 0);
        window.go_back();
        assert_eq!(sends(&mut window).0, 1);
        assert!(!window.lacks_credit(), "an answer is due");
        window.handle_ack(Psn::new(0));
        assert!(window.poll_completed().is_some() && window.lacks_credit());
        window.lend_credit();
        assert_eq!(sends(&mut window).0, 1);
    }

    /// After an upgrade one new message leaves. What the peer has acknowledged, and what waits behind a READ alone, is
    /// not under way.
    #[test]
    fn acknowledged_messages_behind_a_read_give_no_credit() {
        let mut window = SendWindow::new(Psn::new(0));
        let kind = Kind { takes_receive: true, ..Kind::default() };
        window.push((), 1, Kind { has_response: true, ..Kind::default() });
        (0..3).for_each(|_| window.push((), 1, kind));
        assert_eq!(sends(&mut window).0, 4);
        window.handle_ack(Psn::new(3));
        assert_eq!(sends(&mut window).0, 1, "the response of the READ is missing");
        window.expect_credits();
        (0..3).for_each(|_| window.push((), 1, kind));
        assert_eq!(sends(&mut window).0, 1);
    }

    #[test]
    fn a_peer_without_receives_is_asked_later_and_later() {
        let mut window = SendWindow::new(Psn::new(7));
        window.push((), 1, Kind { takes_receive: true, ..Kind::default() });
        let none = |window: &mut SendWindow<()>| window.handle_credits(Psn::new(6), Some(0));
        none(&mut window);
        let first = window.credit_delay();
        for asked in 0..20_u32 {
            assert_eq!(window.credit_delay(), first * (1 << asked.min(MOST_DELAYS)));
            assert_eq!((window.ask_for_credit(), sends(&mut window).0), (Some(Psn::new(6)), 0));
            none(&mut window);
        }
        for _ in 0..MOST_QUESTIONS {
            assert_eq!(window.ask_for_credit(), Some(Psn::new(6)));
        }
        assert_eq!((window.ask_for_credit(), sends(&mut window).0), (None, 1));
        window.handle_credits(Psn::new(6), Some(1));
        assert_eq!(window.credit_delay(), first);
    }

    /// A message counts until the peer says that it is done, and no longer, whatever acknowledges it.
    #[test]
    fn messages_that_are_done_have_taken_their_receives() {
        let mut window = SendWindow::new(Psn::new(0xff_fffe));
        let kind = Kind { takes_receive: true, ..Kind::default() };
        (0..6).for_each(|_| window.push((), 3, kind));
        window.handle_credits(Psn::new(0xff_fffd), Some(3));
        assert_eq!(sends(&mut window).0, 9);
        // The second message is under way at the peer, which has told of none but the one behind it.
        window.handle_credits(Psn::new(2), Some(2));
        window.handle_ack(Psn::new(2));
        assert!(window.poll_completed().is_some());
        assert_eq!(sends(&mut window).0, 0);
        window.handle_ack(Psn::new(6));
        while window.poll_completed().is_some() {}
        assert_eq!((sends(&mut window).0, window.lacks_credit()), (0, true));
        window.handle_credits(Psn::new(6), Some(1));
        assert_eq!(sends(&mut window).0, 3);
    }

    /// What the peer had no receive for is sent again, and is no loss.
    #[test]
    fn what_a_peer_refuses_is_not_lost() {
        let mut window = used();
        let (first, end) = (window.acked, window.snd_max);
        window.handle_rnr_nak();
        for distance in 0..64 {
            let due = window.poll_transmit(1).unwrap();
            assert_eq!((due.psn, due.is_retransmit), (first.plus(distance), true));
            assert!(!due.is_lost);
            window.transmitted();
        }
        build_queue(&mut window);
        window.handle_nak();
        assert_eq!(window.cwnd.packets(), 64);
        window.handle_ack(end.minus(1));
        sends(&mut window);
        window.handle_timeout();
        assert_eq!(window.poll_transmit(1).map(|due| (due.psn, due.is_lost)), Some((end, true)));
    }

    #[test]
    fn a_loss_that_a_nak_tells_makes_the_window_smaller() {
        let mut window = used();
        build_queue(&mut window);
        window.handle_nak();
        window.handle_nak();
        assert_eq!((window.cwnd.packets(), sends(&mut window).0), (44, 44));
    }

    #[test]
    fn one_loss_in_a_long_flow_to_a_go_back_n_peer_keeps_trains() {
        let (mut window, now) = (SendWindow::new(Psn::new(0)), Instant::now());
        window.push((), 1 << 20, Kind::default());
        let send = |window: &mut SendWindow<()>| {
            let mut again = 0;
            while let Some(due) = window.poll_transmit(1) {
                assert!(window.flow.forms_trains(), "{due:?}");
                again += u32::from(due.is_lost);
                window.flow.sent(now, 1024, due.is_lost);
                window.transmitted();
            }
            again
        };
        for _ in 0..40 {
            send(&mut window);
            window.handle_ack(window.snd_nxt.minus(1));
        }
        send(&mut window);
        assert_eq!(window.span(), 256);
        window.handle_nak();
        assert_eq!(send(&mut window), 256);
        window.handle_ack(window.snd_nxt.minus(1));
        assert_eq!(send(&mut window), 0);
    }

    #[test]
    fn many_losses_of_responses_have_fewer_requested() {
        let asked_for = |lost: u32| {
            let mut window = SendWindow::new(Psn::new(0));
            window.is_selective = true;
            (0..16).for_each(|_| {
                window.push((), 64, Kind { has_response: true, ..Kind::default() });
            });
            while window.poll_transmit(16).is_some() {
                window.transmitted();
            }
            for psn in (0..512).filter(|psn| psn % 512 % lost != 0) {
                assert!(matches!(
                    window.handle_response(Psn::new(psn), false),
                    Response::Missing((), _)
                ));
                window.accept_response(Psn::new(psn));
            }
            window.responses.packets()
        };
        assert_eq!([100, 50, 25].map(asked_for), [512, 512, 358]);
    }

    /// The rate of a flow, or the budget of a round, may keep a tail probe back until its answer is here.
    #[test]
    fn a_tail_probe_ends_with_its_message() {
        let mut window = SendWindow::new(Psn::new(0));
        window.is_selective = true;
        window.push((), 4, Kind { has_response: true, ..Kind::default() });
        sends(&mut window);
        window.push((), 2, Kind::default());
        for psn in 0..4 {
            if psn == 1 {
                window.handle_probe_timeout();
            }
            assert!(matches!(
                window.handle_response(Psn::new(psn), false),
                Response::Missing((), _)
            ));
            window.accept_response(Psn::new(psn));
        }
        let due = |window: &SendWindow<()>| {
            window.poll_transmit(1).map(|due| (due.psn, due.index, due.is_retransmit))
        };
        assert_eq!(due(&window), Some((Psn::new(4), 0, false)), "its message is complete");
        assert!(window.poll_completed().is_some());
        assert_eq!(due(&window), Some((Psn::new(4), 0, false)), "its message is gone");
        assert_eq!(sends(&mut window).0, 2);
    }

    #[test]
    fn packets_in_the_window_are_comparable() {
        let mut window = SendWindow::new(Psn::new(0xff_0000));
        assert!(window.has_room(1 << 23), "one message may be of any length");
        window.push((), 1 << 21, Kind::default());
        assert!(window.has_room(1 << 21));
        window.push((), 1 << 21, Kind::default());
        assert!(!window.has_room(1));
        window.pop();
        assert!(window.has_room(1));
    }

    #[test]
    fn responses_that_are_to_come_are_bounded() {
        assert_eq!(asked_for(1), 16, "as many as the peer takes");
        assert_eq!(asked_for(64), 8);
        assert_eq!(asked_for(1024), 1);
    }

    /// A peer keeps the answers of its last requests, and one that is missing has to stay among them.
    #[test]
    fn answers_behind_a_missing_one_make_no_room() {
        let mut window = SendWindow::new(Psn::new(0));
        let kind = Kind { has_response: true, ..Kind::default() };
        (0..4).for_each(|number| window.push(number, 1, kind));
        (0..2).for_each(|_| window.transmitted());
        assert!(matches!(window.handle_response(Psn::new(1), false), Response::Missing(1, 0)));
        window.accept_response(Psn::new(1));
        assert_eq!(
            window.poll_transmit(2).map(|due| due.psn),
            Some(Psn::new(0)),
            "the missing one"
        );
        window.transmitted();
        assert!(window.poll_transmit(2).is_none(), "the third has to wait");
    }
}
