// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Messages, as the requester hands them to the responder, chunk by chunk, and its answers.

use crate::base::counters::Counter;
use crate::base::wc_status::WcStatus;
use crate::memory::copy::Data;
use crate::qp::mtu::packets;
use crate::queue::request::Request;

/// A chunk of a message.
pub(crate) struct Message<'a> {
    /// The request of the message.
    pub request: &'a Request,
    /// Bytes of it that earlier chunks carried.
    pub done: u64,
    /// Bytes of this chunk.
    pub len: u64,
    /// PSNs that the responder counts when the chunk is done: on the local path those of the message, with its last
    /// chunk. The wire counts packets itself.
    pub psns: u32,
    /// The source of the bytes, or their destination, at the requester.
    pub local: Data<'a>,
    /// The requester's path MTU, an `enum ib_mtu`: the size of the packets that it would send.
    pub path_mtu: u8,
    /// Whether the requester, should there be no receive for it, asks again by itself, so that it
    /// need not be told of one.
    pub asks_again: bool,
}

impl Message<'_> {
    /// Returns whether this is the first chunk.
    pub fn is_first(&self) -> bool {
        self.done == 0
    }

    /// Returns whether this is the last chunk.
    pub fn is_last(&self) -> bool {
        self.done + self.len == self.request.total
    }

    /// Returns whether it is one packet at the requester.
    pub fn is_one_packet(&self) -> bool {
        packets(self.request.total, self.path_mtu) == 1
    }

    /// Returns whether its packets have the size that the responder expects of them. Both path MTUs are the
    /// same on a connection that was made well; if not, what is one packet for both still passes.
    #[inline]
    pub fn fits_path(&self, responders: u8) -> bool {
        self.path_mtu == responders
            || self.is_one_packet() && packets(self.request.total, responders) == 1
    }
}

/// The reason for which the responder refuses a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nak {
    /// RNR NAK, with the encoded timer.
    NotReady(u8),
    /// The responder knows nothing of the chunks before: begin again.
    Restart,
    /// A copy by the key that the message invalidates is under way: the end of the message is to be asked for again.
    Again,
    /// There is no answer.
    Silence,
    /// There is no other end, or it is not connected to this QP or not ready to receive.
    Unreachable,
    /// The work request ends with this status at the requester.
    Failed(WcStatus),
}

impl Nak {
    /// Returns the counter for a message of an unreliable connection that was dropped for this reason; `None` if the
    /// message was counted where it was refused.
    pub fn drop_counter(self) -> Option<Counter> {
        match self {
            Self::NotReady(_) => Some(Counter::DropNoReceive),
            // The responder is not there, or was reset in the middle of the message.
            Self::Unreachable | Self::Restart => Some(Counter::DropUnreachable),
            Self::Failed(_) | Self::Silence | Self::Again => None,
        }
    }
}
