// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a schedule does: it follows from its number.

use super::network::Links;

/// The bytes of the memory that the peer of a QP works on.
pub const AREA: usize = 8192;
/// The work requests of a queue that are not done, at most.
pub const DEPTH: usize = 16;

/// What a work request asks for. Places are offsets in the area of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Send {
        len: usize,
        imm: Option<u32>,
    },
    Write {
        at: usize,
        len: usize,
        imm: Option<u32>,
    },
    Read {
        at: usize,
        len: usize,
    },
    Add {
        at: usize,
        value: u64,
    },
    /// Whether `compare` is what the word has.
    Swap {
        at: usize,
        matches: bool,
        value: u64,
    },
    Store {
        at: usize,
    },
    Flush {
        at: usize,
        len: usize,
    },
}

impl Op {
    /// Returns whether it takes a receive.
    pub fn takes_receive(self) -> bool {
        match self {
            Self::Send { .. } => true,
            Self::Write { imm, .. } => imm.is_some(),
            _ => false,
        }
    }

    /// Returns whether a response answers it.
    pub fn is_answered(self) -> bool {
        !matches!(self, Self::Send { .. } | Self::Write { .. })
    }

    /// Returns the bytes that it sends, or gets.
    pub fn len(self) -> usize {
        match self {
            Self::Send { len, .. } | Self::Write { len, .. } | Self::Read { len, .. } => len,
            Self::Add { .. } | Self::Swap { .. } | Self::Store { .. } => 8,
            Self::Flush { .. } => 0,
        }
    }
}

/// What is wrong with a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// The rkey is that of no region.
    RemoteKey,
    /// The remote range goes beyond its region.
    RemoteRange,
    /// The remote address of an atomic is not aligned.
    Unaligned,
    /// An lkey is that of no region.
    LocalKey,
    /// The receive that it takes is too short.
    ShortReceive,
    /// The lkey of the receive that it takes is that of no region.
    ReceiveKey,
    /// It names an SRQ that the peer does not have.
    OtherSrq,
}

/// A send work request.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    pub op: Op,
    pub is_signaled: bool,
    pub is_fenced: bool,
    pub is_inline: bool,
    /// The bytes of an SGE, at most.
    pub piece: usize,
    /// Which of the queues of its peer it is for.
    pub queue: usize,
    pub flaw: Option<Flaw>,
}

/// The memory of a receive.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Its bytes.
    pub len: usize,
    /// Whether its lkey is that of a region.
    pub has_key: bool,
}

/// A guest.
#[derive(Clone, Copy, Debug)]
pub struct GuestPlan {
    /// Whether its driver knows VIRTIO_RDMA_F_RINGS. Without, it has virtqueues, and none of the following:
    /// SRQs, XRC, FLUSH, ATOMIC WRITE and inline data.
    pub has_rings: bool,
}

/// What kind of QP an end has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Rc,
    /// That of XRC which sends.
    Initiator,
    /// That of XRC which receives.
    Target,
}

/// What one end of a connection does.
#[derive(Clone, Debug)]
pub struct EndPlan {
    pub kind: Kind,
    /// Its guest.
    pub guest: usize,
    /// The path MTU of the connection (`enum ib_mtu`).
    pub path_mtu: u8,
    /// The PSN that it sends first.
    pub psn: u32,
    /// READs and atomics that it has under way.
    pub max_rd_atomic: u8,
    /// Its retries (`retry_cnt`, `rnr_retry`).
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    /// The time for an answer (`timeout`).
    pub timeout: u8,
    /// Its RNR timer (`min_rnr_timer`).
    pub rnr_timer: u8,
    /// What it posts to its send queue, and how many nanoseconds after the one before.
    pub works: Vec<(u64, Work)>,
    /// The queues of its receives: one of RC, the SRQs of its domain of a target, and none of an initiator.
    pub queues: Vec<usize>,
}

/// Whose receives are in a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    Qp,
    Srq,
    /// An SRQ for XRC.
    XrcSrq,
}

/// What is posted to a queue of receives.
#[derive(Clone, Debug)]
pub struct QueuePlan {
    /// Its guest.
    pub guest: usize,
    pub owner: Owner,
    /// The receives, and how many nanoseconds after the one before each is posted.
    pub receives: Vec<(u64, Place)>,
}

/// All of a schedule.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The guests, each on a host of its own.
    pub guests: Vec<GuestPlan>,
    pub links: Links,
    /// The ends of connections: that of number `n` is the peer of [`peer`]`(n)`.
    pub ends: Vec<EndPlan>,
    pub queues: Vec<QueuePlan>,
}

/// Returns the number of the other end of a connection.
pub fn peer(end: usize) -> usize {
    end ^ 1
}
