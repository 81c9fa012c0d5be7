// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Observers, by which the process follows the messages of a guest.

use super::refused::RefusedAccess;

/// Learns what happens to the messages of a guest.
pub trait Observer: Send + Sync {
    /// Returns whether it wants to know of the QP with this number. It is asked when it begins to observe the device,
    /// and when a QP is made.
    fn wants(&self, qpn: u32) -> bool;

    /// Returns whether it wants to see the frames of this QP, which it wants to know of: those of the wire, and those
    /// that the messages of the local path would be. Called as [`Self::observe`].
    fn wants_frames(&self, _qpn: u32) -> bool {
        false
    }

    /// Reports an event of a message. Any thread of the process calls this, with locks of the engine held; the function
    /// must not block and must not call into the engine.
    fn observe(&self, seen: Seen);
}

/// Something that has happened to a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The number of the guest's QP.
    pub qpn: u32,
    /// The PSN of the packet, or of the first packet of the message or of the chunk, if it has one.
    pub psn: Option<u32>,
    /// The event.
    pub what: Observation,
}

/// An event of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Observation {
    /// The device has taken a work request from the send queue.
    Posted {
        /// The operation, by its name in `enum ibv_wr_opcode` without the prefix.
        opcode: &'static str,
        /// Comes back in the CQE.
        wr_id: u64,
        /// Bytes.
        length: u64,
    },
    /// A chunk of a message was copied from the memory of one guest to that of the other. Both ends are told.
    Copied {
        /// Bytes of the message in front of the chunk.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// The responder refuses a message. Nobody is told why but the process.
    Refused {
        /// The reason that the requester gets, or the name of the error of the responder.
        reason: &'static str,
        /// The memory of the guest that may not be used, if that is why.
        refused: Option<RefusedAccess>,
    },
    /// The responder of the peer refuses a message.
    Nak {
        /// The reason that the peer names.
        reason: &'static str,
    },
    /// A CQE is written.
    Completed {
        /// The `wr_id` of the work request.
        wr_id: u64,
        /// Whether it is of a receive.
        is_receive: bool,
        /// `enum virtio_rdma_wc_status`.
        status: u32,
        /// Bytes.
        length: u32,
    },
    /// The requester tries again.
    Retried {
        /// The reason for the retry.
        reason: &'static str,
        /// The number of retries that are left after this one; `None` if they have no limit.
        left: Option<u8>,
    },
    /// A packet leaves, or has come.
    Packet {
        /// Whether it leaves.
        leaves: bool,
        /// The operation of the packet, and either its position in the message or the syndrome of its AETH.
        opcode: String,
        /// Bytes of payload.
        length: u64,
    },
    /// A frame leaves or has come, or would if the peer was not in the same network.
    Frame {
        /// Whether it leaves.
        leaves: bool,
        /// An Ethernet frame, without its checksum.
        frame: Vec<u8>,
    },
}
