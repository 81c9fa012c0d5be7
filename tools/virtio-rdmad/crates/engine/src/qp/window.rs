// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The window of a requester: messages whose packets were sent, or will be, and are not acknowledged.
//!
//! It knows PSNs, and nothing of packets or time. Packets have the PSNs from `una`, the oldest that is
//! not acknowledged, to `end`, the one behind the last message. Those up to `cursor` were sent; after a
//! loss `cursor` goes back, and they are sent again (go-back-N, IBA 9.7.5.1.1). `top` is how far
//! `cursor` ever was: an acknowledgement of what was never sent is none.

use std::collections::VecDeque;
use std::time::Instant;

use roce::Psn;

use super::flow::Flow;

/// Messages that are in the window at a time.
const MOST_MESSAGES: usize = 64;

/// Packets of a message. PSNs are compared by the sign of their difference, so those that are compared are
/// less than 2^23 apart (IBA 9.7.2).
pub(crate) const MOST_PACKETS_OF_MESSAGE: u32 = (1 << 23) - 1;

/// Packets of the messages in the window, if there are several.
const MOST_PACKETS: u32 = 1 << 22;

/// Packets of SENDs and WRITEs that are sent before one of them is acknowledged.
const MOST_IN_FLIGHT: u32 = 256;

/// Packets of responses that are to come when another response is asked for. The peer sends all packets
/// of a response at once, and what does not fit into an inbox is lost.
const MOST_TO_COME: u32 = 512;

/// What the window has to know of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kind {
    /// Whether a response answers it, of as many packets: READ, atomics, FLUSH and ATOMIC WRITE.
    pub is_answered: bool,
    /// Whether it is sent when all responses before it have come (IBA 10.8.3.3).
    pub is_fenced: bool,
}

/// A message in the window.
struct Sent<T> {
    what: T,
    /// The PSN of its first packet.
    first: Psn,
    /// Packets that it takes PSNs for: its own, or those of its response (IBA 9.7.3.1).
    packets: u32,
    kind: Kind,
    /// Packets of the response that came.
    received: u32,
}

impl<T> Sent<T> {
    /// Returns the PSN behind it.
    fn end(&self) -> Psn {
        self.first.plus(self.packets)
    }

    /// Returns whether a response is still to come.
    fn awaits_response(&self) -> bool {
        self.kind.is_answered && self.received < self.packets
    }
}

/// A packet that is next to be sent.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Due<'a, T> {
    /// Its message.
    pub what: &'a T,
    /// Which packet of the message; of a response, the first that is asked for.
    pub index: u32,
    /// Its PSN.
    pub psn: Psn,
    /// Whether nothing else may follow before an acknowledgement.
    pub is_last: bool,
}

/// What a packet of a response is to the window.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Response<'a, T> {
    /// The next packet, this one of this message.
    Next(&'a T, u32),
    /// Packets in front of it were lost; they are asked for again.
    Lost,
    /// It came before, or answers nothing.
    Unexpected,
}

/// The messages of a requester that are not acknowledged.
pub(crate) struct Window<T> {
    sent: VecDeque<Sent<T>>,
    /// Messages that a response answers.
    answered: usize,
    una: Psn,
    cursor: Psn,
    top: Psn,
    end: Psn,
    /// Whether a response was asked for again, and nothing was acknowledged since. What was under way
    /// behind a lost packet must not have it asked for once more each.
    asked_again: bool,
    /// When what is not acknowledged is sent again.
    pub deadline: Option<Instant>,
    /// Until when nothing is sent, as the peer has no receive.
    pub pause: Option<Instant>,
    /// The rate of its packets.
    pub flow: Flow,
    /// Until when nothing is sent, as the rate allows no more.
    pub hold: Option<Instant>,
}

impl<T> Window<T> {
    /// Returns an empty window; the next packet has this PSN.
    pub fn new(psn: Psn) -> Self {
        Self {
            sent: VecDeque::new(),
            answered: 0,
            una: psn,
            cursor: psn,
            top: psn,
            end: psn,
            asked_again: false,
            deadline: None,
            pause: None,
            flow: Flow::default(),
            hold: None,
        }
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

    /// Returns the PSN behind the last message.
    pub fn end(&self) -> Psn {
        self.end
    }

    /// Returns the oldest PSN that is not acknowledged.
    pub fn oldest(&self) -> Psn {
        self.una
    }

    /// Returns whether something was sent that is not acknowledged.
    pub fn awaits(&self) -> bool {
        self.top.is_after(self.una)
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
        self.sent.push_back(Sent { what, first, packets, kind, received: 0 });
    }

    /// Returns the next packet to send, unless there is none, too many are under way, or it asks for a
    /// response while `most_responses` are to come.
    pub fn due(&self, most_responses: u8) -> Option<Due<'_, T>> {
        let at = self.at_cursor();
        let sent = self.sent.get(at)?;
        let before = self.sent.range(..at);
        let index = self.cursor.distance_from(sent.first).unsigned_abs();
        if sent.kind.is_fenced && index == 0 && before.clone().any(Sent::awaits_response) {
            return None;
        }
        let (is_last, may_go) = if sent.kind.is_answered {
            let responses = before.filter(|other| other.awaits_response());
            let to_come: u32 = responses.clone().map(|other| other.packets - other.received).sum();
            let is_few = to_come < MOST_TO_COME;
            (true, is_few && responses.count() < usize::from(most_responses))
        } else {
            let in_flight = self.in_flight();
            (
                index + 1 == sent.packets || in_flight + 1 == MOST_IN_FLIGHT,
                in_flight < MOST_IN_FLIGHT,
            )
        };
        may_go.then_some(Due { what: &sent.what, index, psn: self.cursor, is_last })
    }

    /// Returns the place of the message whose packet is next to be sent, or that behind the last one.
    fn at_cursor(&self) -> usize {
        self.sent.partition_point(|sent| sent.end().distance_from(self.cursor) <= 0)
    }

    /// Returns how many packets of SENDs and WRITEs were sent and are not acknowledged.
    fn in_flight(&self) -> u32 {
        let all = self.cursor.distance_from(self.una).max(0).unsigned_abs();
        if self.answered == 0 {
            return all;
        }
        let responses = self.sent.iter().filter(|sent| sent.kind.is_answered).map(|sent| {
            let from = if sent.first.distance_from(self.una) < 0 { self.una } else { sent.first };
            let to =
                if self.cursor.distance_from(sent.end()) < 0 { self.cursor } else { sent.end() };
            to.distance_from(from).max(0).unsigned_abs()
        });
        all.saturating_sub(responses.sum())
    }

    /// Notes that the packet was sent that was due.
    pub fn advance(&mut self) {
        let Some(sent) = self.sent.get(self.at_cursor()) else { return };
        self.cursor = if sent.kind.is_answered { sent.end() } else { self.cursor.plus(1) };
        if self.cursor.distance_from(self.top) > 0 {
            self.top = self.cursor;
        }
    }

    /// Follows an acknowledgement of this PSN and all before it. Returns `false` if it acknowledges
    /// nothing that was sent; if it skips a response, that is asked for again.
    pub fn acknowledge(&mut self, psn: Psn) -> bool {
        if !self.is_under_way(psn) {
            return false;
        }
        for sent in &self.sent {
            if psn.distance_from(sent.first) < 0 {
                break;
            }
            if sent.end().distance_from(self.una) <= 0 {
                continue;
            }
            if sent.awaits_response() {
                let una = sent.first.plus(sent.received);
                self.ask_again(una);
                return true;
            }
            self.asked_again = false;
            self.una = if psn.distance_from(sent.end()) < 0 { psn.plus(1) } else { sent.end() };
        }
        if self.cursor.distance_from(self.una) < 0 {
            self.cursor = self.una;
        }
        true
    }

    /// Follows a packet of a response, which acknowledges all messages in front of its own (IBA
    /// 9.7.5.1.2).
    pub fn respond(&mut self, psn: Psn) -> Response<'_, T> {
        if !self.is_under_way(psn) {
            return Response::Unexpected;
        }
        let is_its = |sent: &Sent<T>| {
            psn.distance_from(sent.first) >= 0
                && psn.distance_from(sent.end()) < 0
                && sent.kind.is_answered
        };
        let Some(at) = self.sent.iter().position(is_its) else { return Response::Unexpected };
        let first = self.sent[at].first;
        if first.distance_from(self.una) > 0 {
            self.acknowledge(first.minus(1));
            if first.distance_from(self.una) > 0 {
                return Response::Lost;
            }
        }
        let expected = first.plus(self.sent[at].received);
        match psn.distance_from(expected) {
            0 => {}
            ..0 => return Response::Unexpected,
            _ => {
                self.ask_again(expected);
                return Response::Lost;
            }
        }
        self.asked_again = false;
        let sent = &mut self.sent[at];
        let index = sent.received;
        sent.received += 1;
        self.una = psn.plus(1);
        if self.cursor.distance_from(self.una) < 0 {
            self.cursor = self.una;
        }
        Response::Next(&sent.what, index)
    }

    /// Has everything sent again that is not acknowledged. The time for an answer begins again.
    pub fn go_back(&mut self) {
        self.asked_again = true;
        self.cursor = self.una;
        self.deadline = None;
    }

    /// Has everything sent again, unless that was done and nothing was acknowledged since: a peer that
    /// misses the same packet all the time is asked again when the time for an answer is over.
    pub fn go_back_once(&mut self) {
        if !self.asked_again {
            self.go_back();
        }
    }

    /// Has the response sent again from this PSN on, which is the oldest that is not acknowledged.
    fn ask_again(&mut self, una: Psn) {
        self.una = una;
        self.go_back_once();
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
        if sent.end().distance_from(self.una) > 0 {
            self.una = sent.end();
        }
        Some(sent.what)
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
}
