// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The window of a requester: messages whose packets were sent, or will be, and are not acknowledged.
//!
//! It knows PSNs, and nothing of packets or time. Packets have the PSNs from `una`, the oldest whose
//! message is not complete, to `end`, the one behind the last message. The peer has done the requests in
//! front of `done`. Those up to `cursor` were sent; after a loss `cursor` goes back to `done`, and they are
//! sent again (go-back-N, IBA 9.7.5.1.1). `top` is how far `cursor` ever was: an acknowledgement of what was
//! never sent is none.
//!
//! The packets of a response are taken in any order, as its memory belongs to the requester until the work
//! request completes. Only the gaps between them are asked for again, by requests for these
//! parts of the response (IBA 9.7.5.1.5 has the responder answer a part of an earlier READ). The gaps of a
//! message are asked for one after the other: a peer such as rxe forgets what is in front of the part that was
//! asked for last.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use roce::{Psn, SackEth};
use serde::{Deserialize, Serialize};

use crate::cwnd::{Cwnd, MOST};
use crate::flow::Flow;
use crate::gaps::Gaps;
use crate::probe::Probe;
use crate::saved::{require, Moment, Wrong};

/// Messages that are in the window at a time.
const MOST_MESSAGES: usize = 64;

/// Packets of a message. PSNs are compared by the sign of their difference, so those that are compared are
/// less than 2^23 apart (IBA 9.7.2).
pub const MOST_PACKETS_OF_MESSAGE: u32 = (1 << 23) - 1;

/// Packets of the messages in the window, if there are several.
const MOST_PACKETS: u32 = 1 << 22;

/// A packet whose PSN is a multiple of this asks for an acknowledgement, so that it comes while packets behind it
/// may be sent.
const ACK_EVERY: u32 = 128;

/// Packets of responses that are to come when another response is asked for. The peer sends all packets
/// of a response at once, and what does not fit into an inbox is lost.
const MOST_TO_COME: u32 = 512;

/// How often a peer is asked whether it knows selective acknowledgements.
pub const MOST_OFFERS: u8 = 16;

/// What the window has to know of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kind {
    /// Whether a response answers it, of as many packets: READ, atomics, FLUSH and ATOMIC WRITE.
    pub is_answered: bool,
    /// Whether it is sent when all responses before it have come (IBA 10.8.3.3).
    pub is_fenced: bool,
}

/// A message in the window.
#[derive(Clone, Serialize, Deserialize)]
struct Sent<T> {
    what: T,
    /// The PSN of its first packet.
    first: Psn,
    /// Packets that it takes PSNs for: its own, or those of its response (IBA 9.7.3.1).
    packets: u32,
    kind: Kind,
    /// Packets of the response that came.
    response: Gaps,
    /// Packets of the response in front of this one that have not come are lost.
    lost_to: u32,
    /// Those in front of this one were asked for again.
    asked_to: u32,
}

impl<T> Sent<T> {
    /// Returns the PSN behind it.
    fn end(&self) -> Psn {
        self.first.plus(self.packets)
    }

    /// Returns whether a response is still to come.
    fn awaits_response(&self) -> bool {
        self.kind.is_answered && self.response.complete() < self.packets
    }

    /// Returns how many packets of the response are still to come, about: those behind a gap may be there.
    fn to_come(&self) -> u32 {
        self.packets - self.response.complete()
    }

    /// Notes that what has not come of the response in front of a packet is lost. Returns whether something is
    /// to be asked for.
    fn lose(&mut self, in_front_of: u32) -> bool {
        self.lost_to = self.lost_to.max(in_front_of);
        self.gap(true).is_some()
    }

    /// Returns the packets of the response that are asked for next, of a peer that may be asked for several
    /// gaps at a time or not.
    fn gap(&self, several: bool) -> Option<Range<u32>> {
        if !several && self.response.complete() < self.asked_to {
            return None;
        }
        self.response.missing(self.asked_to..self.lost_to)
    }
}

/// The question whether the peer knows selective acknowledgements.
struct Offer {
    /// Whether it is sent next.
    is_due: bool,
    /// Whether a probe waits for the answer.
    is_probe: bool,
    /// How often it may be sent yet.
    left: u8,
}

impl Default for Offer {
    fn default() -> Self {
        Self { is_due: false, is_probe: false, left: MOST_OFFERS }
    }
}

/// A packet that is next to be sent.
#[derive(Debug, PartialEq, Eq)]
pub struct Due<'a, T> {
    /// Its message.
    pub what: &'a T,
    /// Which packet of the message; of a response, the first that is asked for.
    pub index: u32,
    /// How many packets of a response are asked for.
    pub count: u32,
    /// Its PSN.
    pub psn: Psn,
    /// Whether it asks for an acknowledgement.
    pub asks: bool,
    /// Whether it was sent before, or asks for a part of a response that was asked for before.
    pub is_again: bool,
}

/// What a packet of a response is to the window.
#[derive(Debug, PartialEq, Eq)]
pub enum Response<'a, T> {
    /// It is this packet of the response to this message, and was missing. [`Window::take`] notes that it is
    /// not any more.
    Missing(&'a T, u32),
    /// It came before, or answers nothing.
    Unexpected,
}

/// The messages of a requester that are not acknowledged.
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own
pub struct Window<T> {
    sent: VecDeque<Sent<T>>,
    /// Messages that a response answers.
    answered: usize,
    una: Psn,
    done: Psn,
    cursor: Psn,
    top: Psn,
    end: Psn,
    /// Whether everything was sent again, and nothing has come since. What was under way behind a lost
    /// packet must not have it sent once more each.
    went_back: bool,
    /// Whether gaps of responses may have to be asked for.
    has_gaps: bool,
    /// Whether something has come since this was last asked.
    has_news: bool,
    /// Whether the peer knows selective acknowledgements.
    pub is_selective: bool,
    /// Whether the peer has sent one, so that its CNPs name the packet that came marked.
    pub names_marked: bool,
    /// Whether the peer is asked next whether it knows them; whether the last packets under way wait for that, and how
    /// often the peer may be asked yet.
    offer: Offer,
    /// What the peer holds, from a PSN on.
    held: (Psn, SackEth),
    /// What is missing of what the peer holds was sent again up to this PSN,
    resent_to: Psn,
    /// and what has this PSN or a later one was sent after that.
    resent_at: Psn,
    /// The packet that is sent again to learn what the peer misses.
    inquiry: Option<Psn>,
    /// Packets in front of this PSN that the peer does not hold are taken for lost.
    probed_to: Psn,
    /// When what is not acknowledged is sent again.
    pub deadline: Option<Instant>,
    /// When what is not acknowledged is sent again for the first time.
    pub probe_at: Option<Instant>,
    /// How long answers take.
    pub probe: Probe,
    /// Until when nothing is sent, as the peer has no receive.
    pub pause: Option<Instant>,
    /// The rate of its packets.
    pub flow: Flow,
    /// How many of them may be under way.
    cwnd: Cwnd,
    /// Until when nothing is sent, as the rate allows no more.
    pub hold: Option<Instant>,
}

/// The state of a window. How long answers take is not in it: it is measured again. Neither is whether something has
/// come, which a requester asks in the same turn.
#[derive(Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools)] // as in the window itself
pub struct SavedWindow<T> {
    sent: Vec<Sent<T>>,
    una: Psn,
    done: Psn,
    cursor: Psn,
    top: Psn,
    end: Psn,
    went_back: bool,
    has_gaps: bool,
    is_selective: bool,
    names_marked: bool,
    held: (Psn, SackEth),
    resent_to: Psn,
    resent_at: Psn,
    inquiry: Option<Psn>,
    probed_to: Psn,
    deadline: Option<Moment>,
    probe_at: Option<Moment>,
    pause: Option<Moment>,
    cwnd: Cwnd,
    sent_at: Option<Moment>,
}

impl<T> SavedWindow<T> {
    /// Returns the window; `packets` says how many packets a message has.
    pub fn load(
        self,
        now: Instant,
        packets: impl Fn(&T) -> Result<u32, Wrong>,
    ) -> Result<Window<T>, Wrong> {
        let Self { sent, una, done, cursor, top, end, held, inquiry, .. } = self;
        require(sent.len() <= MOST_MESSAGES, "too many messages are under way")?;
        let first = sent.first().map_or(end, |sent| sent.first);
        let mut span = 0_u32;
        for one in &sent {
            require(one.first == first.plus(span), "messages under way do not follow each other")?;
            let fits = one.packets == packets(&one.what)? && one.packets <= MOST_PACKETS_OF_MESSAGE;
            require(fits, "a message under way has another number of packets")?;
            one.response.check(one.packets)?;
            let is_asked = one.lost_to.max(one.asked_to) <= one.packets;
            require(is_asked, "packets of a response are lost that it does not have")?;
            span = span.saturating_add(one.packets);
            require(span <= MOST_PACKETS_OF_MESSAGE, "too many packets are under way")?;
        }
        require(end == first.plus(span), "messages under way have another end")?;
        let at = |psn: Psn| psn.distance_from(first);
        let span = at(end);
        let is_within = [una, done, cursor, top].iter().all(|psn| (0..=span).contains(&at(*psn)));
        require(is_within && at(cursor) <= at(top), "PSNs under way are out of order")?;
        let near = |psn: Psn| {
            let before = done.minus(SackEth::PACKETS);
            !psn.is_before(before) && psn.distance_from(done) <= span
        };
        let are_near =
            [held.0, self.resent_to, self.resent_at, self.probed_to].map(near) == [true; 4];
        require(are_near, "PSNs of lost packets are out of range")?;
        let is_due = inquiry.is_none_or(|psn| (at(una)..at(top)).contains(&at(psn)));
        require(is_due, "a packet is asked for that was not sent")?;
        self.cwnd.check()?;
        let time = |moment: Option<Moment>| moment.map(|moment| moment.time(now));
        let answered = sent.iter().filter(|sent| sent.kind.is_answered).count();
        Ok(Window {
            sent: sent.into(),
            answered,
            una,
            done,
            cursor,
            top,
            end,
            went_back: self.went_back,
            has_gaps: self.has_gaps,
            has_news: false,
            is_selective: self.is_selective,
            names_marked: self.names_marked,
            offer: Offer::default(),
            held,
            resent_to: self.resent_to,
            resent_at: self.resent_at,
            inquiry,
            probed_to: self.probed_to,
            deadline: time(self.deadline),
            probe_at: time(self.probe_at),
            probe: Probe::default(),
            pause: time(self.pause),
            flow: Flow::load(self.sent_at, now),
            cwnd: self.cwnd,
            hold: None,
        })
    }
}

impl<T: Clone> Window<T> {
    /// Returns the state.
    pub fn save(&self, now: Instant) -> SavedWindow<T> {
        let moment = |time: Option<Instant>| time.map(|time| Moment::of(time, now));
        SavedWindow {
            sent: self.sent.iter().cloned().collect(),
            una: self.una,
            done: self.done,
            cursor: self.cursor,
            top: self.top,
            end: self.end,
            went_back: self.went_back,
            has_gaps: self.has_gaps,
            is_selective: self.is_selective,
            names_marked: self.names_marked,
            held: self.held,
            resent_to: self.resent_to,
            resent_at: self.resent_at,
            inquiry: self.inquiry,
            probed_to: self.probed_to,
            deadline: moment(self.deadline),
            probe_at: moment(self.probe_at),
            pause: moment(self.pause),
            cwnd: self.cwnd,
            sent_at: self.flow.save(now),
        }
    }
}

impl<T> Window<T> {
    /// Returns an empty window; the next packet has this PSN.
    pub fn new(psn: Psn) -> Self {
        Self {
            sent: VecDeque::new(),
            answered: 0,
            una: psn,
            done: psn,
            cursor: psn,
            top: psn,
            end: psn,
            went_back: false,
            has_gaps: false,
            has_news: false,
            is_selective: false,
            names_marked: false,
            offer: Offer::default(),
            held: (psn, SackEth::default()),
            resent_to: psn,
            resent_at: psn,
            inquiry: None,
            probed_to: psn,
            deadline: None,
            probe_at: None,
            probe: Probe::default(),
            pause: None,
            flow: Flow::default(),
            cwnd: Cwnd::default(),
            hold: None,
        }
    }

    /// Asks the peer whether it knows selective acknowledgements, if that is not known: something was lost, or may be, as
    /// for a probe.
    pub fn ask(&mut self, is_probe: bool) {
        self.offer.is_due |= self.may_ask();
        self.offer.is_probe |= is_probe;
    }

    /// Returns whether the peer may be asked whether it knows selective acknowledgements.
    pub fn may_ask(&self) -> bool {
        !self.is_selective && self.offer.left != 0
    }

    /// Returns the PSN of the question that is sent now, if one is.
    pub fn take_question(&mut self) -> Option<Psn> {
        let is_due = std::mem::take(&mut self.offer.is_due) && self.may_ask();
        self.offer.left -= u8::from(is_due);
        is_due.then_some(self.una)
    }

    /// Notes that the peer knows selective acknowledgements. Returns whether a probe has waited for that.
    pub fn learn(&mut self) -> bool {
        self.is_selective = true;
        std::mem::take(&mut self.offer.is_probe)
    }

    /// Returns whether there is room for a message of so many packets.
    pub fn has_room(&self, packets: u32) -> bool {
        let Some(oldest) = self.sent.front() else { return true };
        let under_way = self.end.distance_from(oldest.first).unsigned_abs();
        self.sent.len() < MOST_MESSAGES && under_way.saturating_add(packets) <= MOST_PACKETS
    }

    /// Returns how many messages it holds.
    pub fn len(&self) -> usize {
        self.sent.len()
    }

    /// Returns whether it holds no message.
    pub fn is_empty(&self) -> bool {
        self.sent.is_empty()
    }

    /// Returns the PSN behind the last message.
    pub fn end(&self) -> Psn {
        self.end
    }

    /// Returns the PSN in front of which the peer has done all requests.
    pub fn done(&self) -> Psn {
        self.done
    }

    /// Returns whether something has come since this was last asked: an acknowledgement of a request, or a
    /// packet of a response that was missing. There is less of that than there are packets in the window.
    pub fn take_news(&mut self) -> bool {
        std::mem::take(&mut self.has_news)
    }

    /// Returns whether something was sent that is not acknowledged.
    pub fn awaits(&self) -> bool {
        self.top.is_after(self.una)
    }

    /// Returns whether a packet of this PSN may have been sent lately. A CNP for it may come when it is acknowledged
    /// and others were sent.
    pub fn may_have_sent(&self, psn: Psn) -> bool {
        let most = i32::try_from(2 * MOST).unwrap_or(i32::MAX);
        psn.is_before(self.top) && psn.distance_from(self.una) >= -most
    }

    /// Returns whether the packet of this PSN was sent, and is not acknowledged. What answers another one
    /// is a duplicate, or was never asked for.
    pub fn is_under_way(&self, psn: Psn) -> bool {
        psn.distance_from(self.una) >= 0 && psn.distance_from(self.top) < 0
    }

    /// Adds a message.
    pub fn push(&mut self, what: T, packets: u32, kind: Kind) {
        let first = self.end;
        self.end = first.plus(packets);
        self.answered += usize::from(kind.is_answered);
        let (response, lost_to, asked_to) = Default::default();
        self.sent.push_back(Sent { what, first, packets, kind, response, lost_to, asked_to });
    }

    /// Returns the next packet to send, unless there is none, too many are under way, or it asks for a
    /// response while `most_responses` are to come.
    pub fn due(&self, most_responses: u8) -> Option<Due<'_, T>> {
        if let Some((at, gap)) = self.gap() {
            let Sent { what, first, .. } = self.sent.get(at)?;
            let (index, count) = (gap.start, gap.end - gap.start);
            let psn = first.plus(index);
            return Some(Due { what, index, count, psn, asks: true, is_again: true });
        }
        if let Some((at, psn)) = self.missing() {
            let Sent { what, first, packets, .. } = self.sent.get(at)?;
            let index = psn.distance_from(*first).unsigned_abs();
            let count = packets - index;
            return Some(Due { what, index, count, psn, asks: true, is_again: true });
        }
        let at = self.at_cursor();
        let sent = self.sent.get(at)?;
        let before = self.sent.range(..at);
        let index = self.cursor.distance_from(sent.first).unsigned_abs();
        if sent.kind.is_fenced && index == 0 && before.clone().any(Sent::awaits_response) {
            return None;
        }
        let (asks, may_go) = if sent.kind.is_answered {
            // The peer keeps the answers of its last requests. So one that came counts while an earlier one is missing,
            // which may have to be asked for once more.
            let responses = before
                .skip_while(|other| !other.awaits_response())
                .filter(|other| other.kind.is_answered);
            let is_few = responses.clone().map(Sent::to_come).sum::<u32>() < MOST_TO_COME;
            (true, is_few && responses.count() < usize::from(most_responses))
        } else {
            let (in_flight, cwnd) = (self.in_flight(), self.cwnd.packets());
            let is_last = index + 1 == sent.packets || in_flight + 1 == cwnd;
            let asks = is_last || self.cursor.get() % ACK_EVERY == 0;
            (asks, in_flight < cwnd)
        };
        let count = sent.packets - index;
        let (what, psn) = (&sent.what, self.cursor);
        let is_again = psn.is_before(self.top);
        may_go.then_some(Due { what, index, count, psn, asks, is_again })
    }

    /// Returns the gap that is asked for next: the place of its message, and its packets.
    fn gap(&self) -> Option<(usize, Range<u32>)> {
        if !self.has_gaps {
            return None;
        }
        let several = self.is_selective;
        self.sent.iter().enumerate().find_map(|(at, sent)| Some((at, sent.gap(several)?)))
    }

    /// Returns the packet that is sent again next, as the peer holds packets behind it or is asked what it misses:
    /// the place of its message, and its PSN. The request of a READ has the first PSN of its response, and is all of it
    /// that the peer can miss.
    fn missing(&self) -> Option<(usize, Psn)> {
        if let Some(psn) = self.inquiry {
            return Some((self.at(psn), psn));
        }
        let (from, sack) = &self.held;
        let end = later(from.plus(sack.end()), self.probed_to);
        let mut psn = later(self.resent_to, self.done);
        while psn.is_before(end) {
            let at = self.at(psn);
            let sent = self.sent.get(at)?;
            let is_request = !sent.kind.is_answered || psn == sent.first;
            let distance = u32::try_from(psn.distance_from(*from)).ok()?;
            if is_request && !sack.has(distance) {
                return Some((at, psn));
            }
            psn = if sent.kind.is_answered { sent.end() } else { psn.plus(1) };
        }
        None
    }

    /// Follows a selective acknowledgement: of all packets in front of this PSN, and of those behind it that the
    /// peer holds. Those that it misses are sent again. If it holds what was sent after that and still misses
    /// them, they were lost once more. That something is held is no news: a peer that misses the same packet all
    /// the time is not asked for ever.
    pub fn hold(&mut self, psn: Psn, sack: SackEth) {
        self.acknowledge(psn.minus(1));
        let end = psn.plus(sack.end());
        if psn.is_before(self.done) || end.is_after(self.top) || sack.count() == 0 {
            return;
        }
        (self.is_selective, self.names_marked) = (true, true);
        self.held = (psn, sack);
        if end.is_after(self.resent_at) {
            self.resent_to = psn;
        }
    }

    /// Returns the place of the message that has this PSN, or that behind the last one. It is mostly the last
    /// message, which was added just now.
    fn at(&self, psn: Psn) -> usize {
        match self.sent.back() {
            Some(last) if !psn.is_before(last.first) => {
                self.sent.len() - usize::from(psn.is_before(last.end()))
            }
            _ => self.sent.partition_point(|sent| !sent.end().is_after(psn)),
        }
    }

    /// Returns the place of the message whose packet is next to be sent, or that behind the last one.
    fn at_cursor(&self) -> usize {
        self.at(self.cursor)
    }

    /// Forgets how many packets may be under way: what is known of the network is too old.
    pub fn restart(&mut self) {
        self.cwnd = Cwnd::default();
    }

    /// Returns how many packets of SENDs and WRITEs were sent and are not acknowledged.
    fn in_flight(&self) -> u32 {
        let from = self.done_or_complete();
        let all = self.cursor.distance_from(from).max(0).unsigned_abs();
        if self.answered == 0 {
            return all;
        }
        let responses = self.sent.iter().filter(|sent| sent.kind.is_answered).map(|sent| {
            let from = later(sent.first, from);
            let to =
                if self.cursor.distance_from(sent.end()) < 0 { self.cursor } else { sent.end() };
            to.distance_from(from).max(0).unsigned_abs()
        });
        all.saturating_sub(responses.sum())
    }

    /// Returns the PSN in front of which nothing has to be sent again but requests for gaps of responses.
    fn done_or_complete(&self) -> Psn {
        later(self.done, self.una)
    }

    /// Notes that the packet was sent that was due.
    pub fn advance(&mut self) {
        if let Some((at, gap)) = self.gap() {
            self.sent[at].asked_to = gap.end;
            return;
        }
        self.has_gaps = false;
        if self.inquiry.take().is_some() {
            return;
        }
        if let Some((at, psn)) = self.missing() {
            let sent = &self.sent[at];
            self.resent_to = if sent.kind.is_answered { sent.end() } else { psn.plus(1) };
            self.resent_at = self.top;
            return;
        }
        let Some(sent) = self.sent.get(self.at_cursor()) else { return };
        self.cursor = if sent.kind.is_answered { sent.end() } else { self.cursor.plus(1) };
        self.top = later(self.top, self.cursor);
    }

    /// Follows an acknowledgement of this PSN and all before it. Returns `false` if it acknowledges
    /// nothing that was sent. Responses are sent in the order of the requests, so what has not come of those
    /// in front of an acknowledgement is lost.
    pub fn acknowledge(&mut self, psn: Psn) -> bool {
        if !self.is_under_way(psn) {
            return false;
        }
        for sent in &mut self.sent {
            if psn.is_before(sent.first) {
                break;
            }
            if sent.awaits_response() {
                self.has_gaps |= sent.lose(sent.packets);
            }
        }
        self.note_done(psn);
        true
    }

    /// Notes that the peer has done the request of this PSN, and those before it.
    fn note_done(&mut self, psn: Psn) {
        let done = match self.sent.get(self.at(psn)) {
            Some(sent) if sent.kind.is_answered && !psn.is_before(sent.first) => sent.end(),
            _ => psn.plus(1),
        };
        if done.is_after(self.done) {
            self.move_done(done);
            self.forget_lost(done);
            self.inquiry = self.inquiry.filter(|psn| !psn.is_before(done));
            self.has_news = true;
            self.went_back = false;
        }
        self.complete();
    }

    /// Forgets what was lost in front of a PSN.
    fn forget_lost(&mut self, done: Psn) {
        self.resent_to = later(self.resent_to, done);
        self.resent_at = later(self.resent_at, done);
        self.probed_to = later(self.probed_to, done);
        if !self.held.0.plus(self.held.1.end()).is_after(done) {
            self.held = (done, SackEth::default());
        }
    }

    /// Moves `done`, and lets the congestion window grow by the packets of SENDs and WRITEs in front of it.
    fn move_done(&mut self, done: Psn) {
        let is_counted = self.answered < self.sent.len() && !self.cwnd.is_full();
        let in_flight = if is_counted { self.in_flight() } else { 0 };
        self.done = done;
        if is_counted {
            let acknowledged = in_flight.saturating_sub(self.in_flight());
            self.cwnd.acknowledge(acknowledged, in_flight, self.flow.is_cut());
        }
    }

    /// Moves `una` behind what is complete.
    fn complete(&mut self) {
        for sent in &self.sent {
            let to = if sent.kind.is_answered {
                sent.first.plus(sent.response.complete())
            } else if self.done.is_after(sent.end()) {
                sent.end()
            } else {
                self.done
            };
            self.una = later(self.una, to);
            if self.una.is_before(sent.end()) {
                break;
            }
        }
        self.end_inquiry();
        self.cursor = later(self.cursor, self.done_or_complete());
    }

    /// Returns the place of the message whose response has a packet of this PSN, and which packet that is.
    fn response_at(&self, psn: Psn) -> Option<(usize, u32)> {
        let at = self.at(psn);
        let sent = self.sent.get(at)?;
        let index = u32::try_from(psn.distance_from(sent.first)).ok()?;
        sent.kind.is_answered.then_some((at, index))
    }

    /// Follows a packet of a response, which acknowledges its request and all in front of it (IBA
    /// 9.7.5.1.2).
    pub fn respond(&mut self, psn: Psn) -> Response<'_, T> {
        if !self.is_under_way(psn) {
            return Response::Unexpected;
        }
        let Some((at, index)) = self.response_at(psn) else { return Response::Unexpected };
        if self.sent[at].response.has(index) {
            return Response::Unexpected;
        }
        for sent in self.sent.range_mut(..at).filter(|sent| sent.awaits_response()) {
            self.has_gaps |= sent.lose(sent.packets);
        }
        self.has_gaps |= self.sent[at].lose(index);
        self.note_done(psn);
        Response::Missing(&self.sent[at].what, index)
    }

    /// Notes that the packet of this PSN was taken, which was [missing](Response::Missing).
    pub fn take(&mut self, psn: Psn) {
        let Some((at, index)) = self.response_at(psn) else { return };
        if self.sent[at].response.fill(index) {
            self.has_news = true;
            // What was asked for may have come, and the next gap is asked for.
            self.has_gaps |= self.sent[at].gap(true).is_some();
            self.complete();
        }
    }

    /// Returns the oldest PSN whose request was not done, or whose response has not come.
    pub fn oldest(&self) -> Psn {
        self.una
    }

    /// Returns whether the response to the oldest message has a packet of this PSN.
    pub fn is_of_oldest(&self, psn: Psn) -> bool {
        self.response_at(psn).is_some_and(|(at, _)| at == 0)
    }

    /// Has everything sent again that the peer has not done, and asked for again what has not come of the
    /// responses to what it has done. The time for an answer begins again.
    pub fn go_back(&mut self) {
        self.went_back = true;
        self.cursor = self.done_or_complete();
        self.held = (self.done, SackEth::default());
        (self.resent_to, self.resent_at, self.probed_to) = (self.done, self.done, self.done);
        self.inquiry = None;
        (self.deadline, self.probe_at) = (None, None);
        self.lose_responses();
    }

    /// Has everything sent again, as the time for an answer is over: a few packets at first, as at the beginning
    /// (RFC 5681, 3.1).
    pub fn time_out(&mut self) {
        self.go_back();
        self.restart();
    }

    /// Has something sent again, as nothing has come for a while. The time for an answer goes on.
    ///
    /// The first time this is one packet, which asks the peer what it misses, or for the last packet of a response: a
    /// peer that is only slow is not sent everything once more, nor asked for it. After that it is everything under way
    /// that the peer neither has done nor holds, and what has not come of the responses to what it has done is asked
    /// for.
    pub fn send_again(&mut self) {
        let inquiry = self.last_request().or_else(|| self.last_response());
        self.inquiry = inquiry.filter(|_| self.probe.is_first());
        self.probe.again();
        if self.inquiry.is_none() {
            self.resent_to = self.done;
            self.probed_to = self.cursor;
            self.lose_responses();
        }
    }

    /// Returns the PSN of the last packet that was sent, unless the peer has done its request or holds it.
    fn last_request(&self) -> Option<Psn> {
        let last = self.top.minus(1);
        let sent = self.sent.get(self.at(last))?;
        let psn = if sent.kind.is_answered { sent.first } else { last };
        let (from, sack) = &self.held;
        let is_held =
            u32::try_from(psn.distance_from(*from)).is_ok_and(|distance| sack.has(distance));
        (!psn.is_before(self.done) && !is_held).then_some(psn)
    }

    /// Returns the PSN of the last packet of the last response that is to come to a request that is done, unless it
    /// has come.
    fn last_response(&self) -> Option<Psn> {
        let is_due = |sent: &&Sent<T>| sent.awaits_response() && sent.first.is_before(self.done);
        let sent = self.sent.iter().rev().find(is_due)?;
        let last = sent.packets - 1;
        sent.response.missing(last..sent.packets).map(|_| sent.first.plus(last))
    }

    /// Has asked for again what has not come of the responses to requests that were sent, and are done.
    fn lose_responses(&mut self) {
        let to = self.done_or_complete();
        for sent in &mut self.sent {
            if !sent.first.is_before(to) {
                break;
            }
            if sent.awaits_response() {
                sent.asked_to = 0;
                self.has_gaps |= sent.lose(sent.packets);
            }
        }
    }

    /// Has everything sent again, unless that was done and nothing was acknowledged since: a peer that
    /// misses the same packet all the time is asked again when the time for an answer is over.
    pub fn go_back_once(&mut self) {
        if !self.went_back {
            self.go_back();
        }
    }

    /// Takes the oldest message if all of it is acknowledged, and its response is here.
    pub fn pop_done(&mut self) -> Option<T> {
        let sent = self.sent.front()?;
        let is_done = sent.end().distance_from(self.una) <= 0 && !sent.awaits_response();
        is_done.then(|| self.pop())?
    }

    /// Takes the oldest message, done or not.
    pub fn pop(&mut self) -> Option<T> {
        let sent = self.sent.pop_front()?;
        self.answered -= usize::from(sent.kind.is_answered);
        self.una = later(self.una, sent.end());
        self.end_inquiry();
        if self.una.is_after(self.done) {
            // It was not done, so nothing is sent any more.
            self.done = self.una;
            self.forget_lost(self.una);
        }
        self.cursor = later(self.cursor, self.una);
        self.top = later(self.top, self.cursor);
        Some(sent.what)
    }

    /// Ends an inquiry whose answer is here, or whose message is gone.
    fn end_inquiry(&mut self) {
        self.inquiry = self.inquiry.filter(|psn| !psn.is_before(self.una));
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

    /// Returns how many READs of so many packets are asked for before one is answered.
    fn asked_for(packets: u32) -> usize {
        let mut window = Window::new(Psn::new(0));
        let kind = Kind { is_answered: true, is_fenced: false };
        (0..32).for_each(|number| window.push(number, packets, kind));
        let mut count = 0;
        while window.due(16).is_some() {
            window.advance();
            count += 1;
        }
        count
    }

    /// Sends what is due, of one message of 4,096 packets. Returns how many packets were sent, and how many of them
    /// ask for an acknowledgement.
    fn sends(window: &mut Window<()>) -> (u32, u32) {
        let (mut sent, mut asked) = (0, 0);
        while let Some(due) = window.due(1) {
            asked += u32::from(due.asks);
            sent += 1;
            window.advance();
        }
        (sent, asked)
    }

    #[test]
    fn a_window_begins_with_a_few_packets() {
        let mut window = Window::new(Psn::new(0xff_fff1));
        window.push((), 4096, Kind::default());
        assert_eq!(sends(&mut window), (16, 1), "the last one asks");
        window.acknowledge(Psn::new(0xff_fff1).plus(15));
        assert_eq!(sends(&mut window), (32, 1));
        window.acknowledge(Psn::new(0xff_fff1).plus(15 + 32));
        window.acknowledge(Psn::new(0xff_fff1).plus(15 + 32));
        assert_eq!(sends(&mut window), (64, 1));
        window.restart();
        window.acknowledge(Psn::new(0xff_fff1).plus(15 + 32 + 64));
        assert_eq!(sends(&mut window), (16 + 64, 2), "the one of PSN 128 asks, too");
    }

    #[test]
    fn a_time_out_begins_with_a_few_packets() {
        let mut window = Window::new(Psn::new(0));
        window.is_selective = true;
        window.push((), 4096, Kind::default());
        for sent in [16, 32, 64] {
            assert_eq!(sends(&mut window).0, sent);
            window.acknowledge(window.top.minus(1));
        }
        assert_eq!(sends(&mut window).0, 128);
        window.time_out();
        assert_eq!(window.due(1).map(|due| due.psn), Some(Psn::new(112)));
        assert_eq!(sends(&mut window).0, 16);
        window.send_again();
        assert_eq!(sends(&mut window).0, 1, "the peer is asked what it misses");
        window.send_again();
        assert_eq!(sends(&mut window).0, 16, "it does not answer");
        window.acknowledge(Psn::new(112 + 15));
        assert_eq!(sends(&mut window).0, 32);
    }

    #[test]
    fn a_slow_peer_is_sent_one_packet_again() {
        let mut window = Window::new(Psn::new(0));
        window.is_selective = true;
        window.push((), 10, Kind::default());
        assert_eq!(sends(&mut window), (10, 2));
        window.send_again();
        assert_eq!(window.due(1).map(|due| due.psn), Some(Psn::new(9)));
        assert_eq!(sends(&mut window), (1, 1));
        // The peer holds it, and misses three in front of it.
        let mut sack = SackEth::default();
        for distance in [1, 3, 4, 6, 7, 8, 9] {
            sack.set(distance);
        }
        window.hold(Psn::new(0), sack);
        assert_eq!(sends(&mut window).0, 3);
        // Nothing has come since.
        window.send_again();
        assert_eq!(sends(&mut window).0, 3);
        window.acknowledge(Psn::new(9));
        assert!(!window.awaits());
    }

    #[test]
    fn a_peer_that_does_not_answer_is_sent_everything_again() {
        let mut window = Window::new(Psn::new(0));
        window.is_selective = true;
        window.push((), 10, Kind::default());
        window.push((), 100, Kind { is_answered: true, is_fenced: false });
        sends(&mut window);
        window.send_again();
        assert_eq!(window.due(1).map(|due| (due.psn, due.count)), Some((Psn::new(10), 100)));
        assert_eq!(sends(&mut window).0, 1);
        window.send_again();
        assert_eq!(sends(&mut window).0, 11);
        // What the peer has done since needs no inquiry.
        window.push((), 1, Kind::default());
        sends(&mut window);
        window.acknowledge(Psn::new(9));
        window.probe.done(window.done(), Instant::now());
        window.send_again();
        window.acknowledge(Psn::new(110));
        assert_eq!(sends(&mut window).0, 1, "the response of the READ is missing");
    }

    #[test]
    fn a_slow_responder_is_asked_for_one_packet() {
        let mut window = Window::new(Psn::new(0));
        window.is_selective = true;
        window.push((), 100, Kind { is_answered: true, is_fenced: false });
        sends(&mut window);
        let come = |window: &mut Window<()>, psn: u32| {
            assert!(matches!(window.respond(Psn::new(psn)), Response::Missing((), _)));
            window.take(Psn::new(psn));
        };
        (0..40).for_each(|psn| come(&mut window, psn));
        window.send_again();
        assert_eq!(window.due(1).map(|due| (due.psn, due.count)), Some((Psn::new(99), 1)));
        assert_eq!(sends(&mut window).0, 1);
        // Packets of a response come in their order, so the others are lost.
        come(&mut window, 99);
        assert_eq!(window.due(1).map(|due| (due.psn, due.count)), Some((Psn::new(40), 59)));
        assert_eq!(sends(&mut window).0, 1);
        // Nothing has come since.
        window.send_again();
        assert_eq!(window.due(1).map(|due| (due.psn, due.count)), Some((Psn::new(40), 59)));
    }

    /// The rate of a flow, or the budget of a round, may keep an inquiry back until its answer is here.
    #[test]
    fn an_inquiry_ends_with_its_message() {
        let mut window = Window::new(Psn::new(0));
        window.is_selective = true;
        window.push((), 4, Kind { is_answered: true, is_fenced: false });
        sends(&mut window);
        window.push((), 2, Kind::default());
        for psn in 0..4 {
            if psn == 1 {
                window.send_again();
            }
            assert!(matches!(window.respond(Psn::new(psn)), Response::Missing((), _)));
            window.take(Psn::new(psn));
        }
        let due = |window: &Window<()>| window.due(1).map(|due| (due.psn, due.index, due.is_again));
        assert_eq!(due(&window), Some((Psn::new(4), 0, false)), "its message is complete");
        assert!(window.pop_done().is_some());
        assert_eq!(due(&window), Some((Psn::new(4), 0, false)), "its message is gone");
        assert_eq!(sends(&mut window).0, 2);
    }

    #[test]
    fn packets_in_the_window_are_comparable() {
        let mut window = Window::new(Psn::new(0xff_0000));
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
        let mut window = Window::new(Psn::new(0));
        let kind = Kind { is_answered: true, is_fenced: false };
        (0..4).for_each(|number| window.push(number, 1, kind));
        (0..2).for_each(|_| window.advance());
        assert!(matches!(window.respond(Psn::new(1)), Response::Missing(1, 0)));
        window.take(Psn::new(1));
        assert_eq!(window.due(2).map(|due| due.psn), Some(Psn::new(0)), "the missing one");
        window.advance();
        assert!(window.due(2).is_none(), "the third has to wait");
    }
}
