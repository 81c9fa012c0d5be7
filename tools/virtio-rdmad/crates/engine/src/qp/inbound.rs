// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The state of a responder whose peer is reached over the wire.

use std::collections::VecDeque;
use std::time::Instant;

use reliability::{Expected, Flow, Held, HoldQuota, Naks, MOST_OFFERS, MOST_UNDER_WAY};
use roce::{Psn, Syndrome};
use serde::{Deserialize, Serialize};

use super::answered::{Answered, AnsweredImage, ReadReply};
use crate::base::image::abi_bytes::Bytes;
use crate::base::image::{require, Moment, Wrong};
use crate::base::limits::MAX_MSG_SIZE;
use crate::queue::request::{Operation, Request};

/// Answers that wait to be sent. A requester that keeps to the limit of its READs and atomics never has so
/// many: acknowledgements that wait next to each other are one.
const MOST_REPLIES: usize = 512;

/// Packets of responses that were sent behind one for which a CNP comes, at most: those of all responses that a
/// requester of ours asks for at a time, and more.
const MOST_BEHIND_CNP: i32 = 4096;

/// A message whose first packet has come, and whose last has not.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Assembly {
    /// The request of the message.
    pub request: Request,
    /// Bytes that have come.
    pub done: u64,
}

/// A reply of the responder.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// The data of a READ, from a packet on.
    Read(ReadReply),
    /// The word that an atomic found.
    Atomic {
        /// The PSN of the request.
        psn: Psn,
        /// The word.
        original: u64,
    },
    /// An acknowledgement of everything up to this PSN, or a NAK.
    Acknowledge {
        /// The PSN.
        psn: Psn,
        /// The syndrome of its AETH.
        syndrome: Syndrome,
    },
    /// An acknowledgement of all packets in front of this PSN, and of those that are held behind it.
    Selective {
        /// The PSN of the missing packet.
        psn: Psn,
    },
    /// An offer: it says that this responder knows selective acknowledgements.
    Offer {
        /// The PSN of the missing packet, or that of the requester's offer.
        psn: Psn,
        /// Whether the requester is asked for an offer.
        asks: bool,
    },
}

impl Reply {
    /// Returns the PSN of the request that the reply answers; `None` if it acknowledges many.
    fn answers(&self) -> Option<Psn> {
        match self {
            Self::Read(read) => Some(read.psn),
            Self::Atomic { psn, .. } => Some(*psn),
            Self::Acknowledge { .. } | Self::Selective { .. } | Self::Offer { .. } => None,
        }
    }

    /// Returns whether it acknowledges requests, and says nothing else.
    fn is_ack(&self) -> bool {
        matches!(self, Self::Acknowledge { syndrome: Syndrome::Ack(_), .. })
    }

    /// Returns the PSN up to which or in front of which the reply acknowledges requests; `None` if it answers one
    /// request.
    fn acknowledges(&self) -> Option<Psn> {
        match self {
            Self::Acknowledge { psn, .. } | Self::Selective { psn } => Some(*psn),
            Self::Read(_) | Self::Atomic { .. } | Self::Offer { .. } => None,
        }
    }
}

/// A reply that waits to be sent.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Waiting {
    /// The reply.
    pub reply: Reply,
    /// Whether it was sent before, and its request came once more.
    pub is_repeated: bool,
}

/// The offers of selective acknowledgements that a responder makes.
struct Offers {
    /// The PSN of the last one.
    last: Option<Psn>,
    /// The number of offers that are left.
    left: u8,
}

impl Default for Offers {
    fn default() -> Self {
        Self { last: None, left: MOST_OFFERS }
    }
}

/// The state of a responder whose peer is reached over the wire.
#[derive(Default)]
pub(crate) struct Inbound {
    /// The message under way.
    pub assembly: Option<Assembly>,
    /// The replies that wait, in the order in which the peer asked for them last.
    pub replies: VecDeque<Waiting>,
    /// The last READs and atomics.
    pub answered: Answered,
    /// The NAKs for missing packets.
    pub naks: Naks,
    /// The rate of the data of READs.
    pub flow: Flow,
    /// Packets that came too early.
    pub held: Held,
    /// Whether the peer knows selective acknowledgements.
    pub is_selective: bool,
    /// The offers to a peer that has not said whether it knows them.
    offers: Offers,
}

/// The image of an [`Inbound`], with the PSN that the responder expects.
#[derive(Serialize, Deserialize)]
pub(crate) struct InboundImage {
    expected: Expected,
    assembly: Option<Assembly>,
    replies: Vec<Waiting>,
    answered: AnsweredImage,
    is_nak_late: bool,
    sent_at: Option<Moment>,
    held: Vec<Bytes>,
    is_selective: bool,
}

impl InboundImage {
    /// Returns the expected PSN and the [`Inbound`]; `packets` returns how many packets a response of so many bytes
    /// has.
    pub fn load(
        self,
        now: Instant,
        quota: &HoldQuota,
        packets: impl Fn(u64) -> u32,
    ) -> Result<(Expected, Inbound), Wrong> {
        let Self { expected, assembly, replies, answered, is_selective, .. } = self;
        if let Some(Assembly { request, done }) = &assembly {
            let has_parts = matches!(request.operation, Operation::Send | Operation::Write);
            let fits = request.total <= MAX_MSG_SIZE.into() && *done <= MAX_MSG_SIZE.into();
            require(has_parts && fits, "a message has come in part that has no parts")?;
        }
        require(replies.len() <= 2 * MOST_REPLIES, "too many answers are due")?;
        for waiting in &replies {
            if let Reply::Read(read) = &waiting.reply {
                require(read.total <= MAX_MSG_SIZE.into(), "a response is too long")?;
                let count = packets(read.total);
                let is_due = read.sent < count && read.end == read.psn.plus(count);
                require(is_due, "a response has another number of packets")?;
            }
        }
        let held = self.held.iter().map(|frame| &frame.0[..]);
        let inbound = Inbound {
            held: Held::load(held, expected.psn, quota)?,
            assembly,
            replies: replies.into(),
            answered: answered.load(packets)?,
            naks: Naks::load(self.is_nak_late, now),
            flow: Flow::load(self.sent_at, now),
            is_selective,
            offers: Offers::default(),
        };
        Ok((expected, inbound))
    }
}

impl Inbound {
    /// Returns the image, for a responder that expects the PSN `expected`.
    pub fn save(&self, expected: Expected, now: Instant) -> InboundImage {
        InboundImage {
            expected,
            assembly: self.assembly,
            replies: self.replies.iter().copied().collect(),
            answered: self.answered.save(),
            is_nak_late: self.naks.is_late(),
            sent_at: self.flow.save(now),
            held: self.held.save(expected.psn).into_iter().map(Bytes).collect(),
            is_selective: self.is_selective,
        }
    }

    /// Returns whether a response with this PSN may have been sent lately. `expected` is the PSN of the expected
    /// request.
    pub fn may_have_sent(&self, expected: Psn, psn: Psn) -> bool {
        let next = match self.replies.front().map(|first| &first.reply) {
            Some(Reply::Read(read)) => read.next(),
            _ => expected,
        };
        (1..=MOST_BEHIND_CNP).contains(&next.distance_from(psn))
    }

    /// Notes that a request was done, behind which the PSN `expected` is expected.
    pub fn done(&mut self, expected: Psn) {
        self.naks.forget();
        self.answered.forget_before(expected);
    }

    /// Tells the peer, behind a NAK for the PSN `psn`, that this responder knows selective acknowledgements, and asks
    /// whether the peer does. A peer that never says so is not asked for ever.
    pub fn offer(&mut self, psn: Psn) {
        let Offers { last, left } = &mut self.offers;
        if self.is_selective || *left == 0 {
            return;
        }
        *left -= 1;
        *last = Some(psn);
        self.reply(Reply::Offer { psn, asks: true });
    }

    /// Tells a requester that asks that this responder knows selective acknowledgements. It waits behind nothing: what
    /// the requester misses would come first, and the requester would ask for one gap after the other.
    pub fn answer_offer(&mut self, psn: Psn) {
        let reply = Reply::Offer { psn, asks: false };
        self.replies.push_front(Waiting { reply, is_repeated: false });
    }

    /// Follows the offer of a requester, which names the PSN of this responder's offer. Returns whether it does: others
    /// can guess it as little as the expected PSN.
    pub fn offered(&mut self, psn: Psn) -> bool {
        let is_it = self.offers.last.take_if(|offered| *offered == psn).is_some();
        self.is_selective |= is_it;
        is_it
    }

    /// Returns whether a requester may repeat a request of this PSN, which is behind the `expected` one. Its answer,
    /// and those to all READs behind it, may have been lost.
    pub fn may_repeat(&self, expected: Psn, psn: Psn) -> bool {
        let oldest = self.answered.oldest_read().unwrap_or(expected);
        psn.distance_from(oldest) >= -MOST_UNDER_WAY
            || psn.distance_from(expected) >= -MOST_UNDER_WAY
    }

    /// Returns whether so many answers wait that no further request can be taken.
    pub fn is_full(&self) -> bool {
        self.replies.len() >= MOST_REPLIES
    }

    /// Queues data of a READ once more. If the same data up to its end waits already, from an earlier packet on or from
    /// a later one, both become one reply that begins with the earlier packet: a requester that asks for the rest
    /// behind each gap must not be sent the rest as many times.
    pub fn read_again(&mut self, again: ReadReply) {
        let is_same = |reply: &Reply| matches!(reply, Reply::Read(read) if read.end == again.end);
        let waiting = self.take(is_same);
        let is_repeated = waiting.as_ref().is_none_or(|waiting| waiting.is_repeated);
        let reply = match waiting.map(|waiting| waiting.reply) {
            Some(Reply::Read(read)) if !again.psn.is_before(read.next()) => Reply::Read(read),
            _ => Reply::Read(again),
        };
        self.put_last(again.psn, Waiting { reply, is_repeated });
    }

    /// Takes an answer that waits to be sent.
    fn take(&mut self, is_it: impl Fn(&Reply) -> bool) -> Option<Waiting> {
        let at = self.replies.iter().position(|waiting| is_it(&waiting.reply))?;
        self.replies.remove(at)
    }

    /// Queues the answer to the request of this PSN behind all others: a peer that takes answers only in their order
    /// asks for all of them again, in that order. Acknowledgements of later requests stay behind the answer, because
    /// they say that it was sent. Those of earlier requests are dropped, because the answer acknowledges these requests
    /// too.
    fn put_last(&mut self, psn: Psn, answer: Waiting) {
        let mut behind = Vec::new();
        self.replies.retain(|waiting| {
            let is_later = waiting.reply.acknowledges().is_some_and(|other| other.is_after(psn));
            if is_later {
                behind.push(waiting.reply);
            }
            !is_later && !waiting.reply.is_ack()
        });
        self.replies.push_back(answer);
        let waiting = |reply| Waiting { reply, is_repeated: false };
        self.replies.extend(behind.into_iter().map(waiting));
    }

    /// Returns whether the replies that wait acknowledge this PSN too: the last of them is an acknowledgement, or one
    /// of them answers a later request (IBA 9.7.5.1.2). In the middle of the data of a READ, a peer expects no
    /// acknowledgement of an earlier request: rxe takes it for the end of the data, and fails.
    pub fn acknowledges(&self, psn: Psn) -> bool {
        let last = self.replies.back().map(|last| &last.reply).filter(|last| last.is_ack());
        let mut answers = self.replies.iter().filter_map(|waiting| waiting.reply.answers());
        last.and_then(Reply::acknowledges).is_some_and(|last| last.distance_from(psn) >= 0)
            || answers.any(|of| of.is_after(psn))
    }

    /// Queues a reply. An acknowledgement takes the place of one that was not sent yet.
    pub fn reply(&mut self, reply: Reply) {
        let is_selective = |reply: &Reply| matches!(reply, Reply::Selective { .. });
        let covers = |last: &Reply| match &reply {
            Reply::Selective { .. } => last.is_ack() || is_selective(last),
            reply => reply.is_ack() && last.is_ack(),
        };
        if self.replies.back().is_some_and(|last| covers(&last.reply)) {
            self.replies.pop_back();
        }
        self.replies.push_back(Waiting { reply, is_repeated: false });
    }

    /// Queues the answer to the request of this PSN once more. If the answer still waits, it is sent only once.
    pub fn repeat(&mut self, psn: Psn, reply: Reply) {
        let waiting = self.take(|waiting| waiting.answers() == Some(psn));
        let is_repeated = waiting.is_none_or(|waiting| waiting.is_repeated);
        self.put_last(psn, Waiting { reply, is_repeated });
    }

    /// Returns the number of answers that wait and that the peer has asked for once. A repeated answer takes nothing of
    /// what the peer may have under way: a network that repeats packets must not end its connection.
    pub fn answers(&self) -> usize {
        let is_first =
            |waiting: &&Waiting| !waiting.is_repeated && waiting.reply.answers().is_some();
        self.replies.iter().filter(is_first).count()
    }
}
