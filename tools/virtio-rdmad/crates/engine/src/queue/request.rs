// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The request of a send work request, as far as its peer sees it.

use serde::{Deserialize, Serialize};

use crate::memory::copy::Atomic;
use crate::memory::fast_reg::Registration;
use crate::memory::flush::Flush;
use crate::memory::mw::Bind;

/// The operation of a send work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Operation {
    /// A message to a receive, or a datagram.
    Send,
    /// A write, which takes a receive if it has immediate data.
    Write,
    /// A read.
    Read,
    /// An atomic operation.
    Atomic(Atomic),
    /// A write of 8 bytes, which every reader sees as a whole; in rings only.
    AtomicWrite,
    /// A flush; in rings only.
    Flush(Flush),
    /// A fast registration.
    RegMr(Registration),
    /// Invalidation of the key in `invalidate`, and nothing else.
    LocalInv,
    /// The binding of a memory window; in rings only.
    BindMw(Bind),
}

impl Operation {
    /// Returns whether it carries nothing.
    pub fn has_no_data(self) -> bool {
        self.is_local() || matches!(self, Self::Flush(_))
    }

    /// Returns whether it concerns 8 bytes.
    pub fn is_of_a_word(self) -> bool {
        matches!(self, Self::Atomic(_) | Self::AtomicWrite)
    }

    /// Returns whether it concerns no peer.
    pub fn is_local(self) -> bool {
        matches!(self, Self::RegMr(_) | Self::LocalInv | Self::BindMw(_))
    }
}

/// The request of a send work request: the operation and, if it concerns a peer, the contents of the headers of its
/// packets.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Request {
    /// The operation.
    pub operation: Operation,
    /// Whether it asks for a solicited event.
    pub solicited: bool,
    /// Immediate data, in the order of the wire.
    pub immediate: Option<u32>,
    /// A key to invalidate: of LOCAL_INV and READ here, of SEND at the peer.
    pub invalidate: Option<u32>,
    /// Bytes of the message.
    pub total: u64,
    /// The remote side of WRITE, READ and atomics.
    pub remote_addr: u64,
    /// Its key.
    pub rkey: u32,
    /// The SRQ that a message of an XRC initiator is for.
    pub srqn: u32,
}

impl Request {
    /// A SEND of no bytes.
    pub const EMPTY: Self = Self {
        operation: Operation::Send,
        solicited: false,
        immediate: None,
        invalidate: None,
        total: 0,
        remote_addr: 0,
        rkey: 0,
        srqn: 0,
    };

    /// Returns whether the responder takes a receive for it.
    pub fn takes_receive(&self) -> bool {
        matches!(self.operation, Operation::Send) || self.immediate.is_some()
    }
}
