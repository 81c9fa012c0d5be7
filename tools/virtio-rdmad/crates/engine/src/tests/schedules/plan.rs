// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The plan of a schedule, which follows from its number.

use super::network::Links;

/// The bytes of the memory that the peer of a QP works on.
pub const AREA: usize = 8192;
/// The work requests of a queue that are not done, at most.
pub const DEPTH: usize = 16;

/// The operation of a work request. Places are offsets in the area of the peer.
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

/// The flaw of a work request.
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
    /// The index of the queue that it is for, among the queues of its peer.
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

/// A time in which a device is frozen.
#[derive(Clone, Copy, Debug)]
pub struct Freeze {
    pub from: u64,
    pub until: u64,
    /// Whether the guest goes on in a copy of its memory.
    pub is_moved: bool,
}

/// A guest.
#[derive(Clone, Debug)]
pub struct GuestPlan {
    /// The number of its host.
    pub host: usize,
    /// The number of its address, which may be that of an earlier guest.
    pub address: usize,
    /// The periods in which it does not have its address, each with start and end. The first period starts at 0 if the
    /// guest takes over the address of another guest.
    pub absences: Vec<(u64, u64)>,
    /// The periods in which its device is frozen, in order.
    pub freezes: Vec<Freeze>,
    /// Whether its driver knows VIRTIO_RDMA_F_RINGS. Without, it has virtqueues, and none of the following:
    /// SRQs, XRC, FLUSH, ATOMIC WRITE and inline data.
    pub has_rings: bool,
}

impl GuestPlan {
    /// Returns whether it has its address when a schedule begins.
    pub fn is_there_first(&self) -> bool {
        self.absences.iter().all(|(from, _)| *from != 0)
    }

    /// Returns how many tries may have been in vain between two times because the address was away, each of
    /// which takes so long: one may have been under way at the beginning, and one at the end.
    pub fn tries_in_vain(&self, since: u64, now: u64, answer: u64) -> usize {
        tries(self.absences.iter().copied(), since, now, answer)
    }

    /// Returns how many tries of a peer on another host may have been in vain because the device was frozen,
    /// likewise.
    pub fn tries_while_frozen(&self, since: u64, now: u64, answer: u64) -> usize {
        tries(self.freezes.iter().map(|freeze| (freeze.from, freeze.until)), since, now, answer)
    }

    /// Returns the latest time at which what happened at a time or later may have been seen, by the guest itself: it
    /// sees what comes while it is frozen afterwards.
    pub fn seen_since(&self, since: u64) -> u64 {
        let is_in_it = |freeze: &&Freeze| freeze.from < since && since <= freeze.until;
        self.freezes.iter().find(is_in_it).map_or(since, |freeze| freeze.from)
    }

    /// Returns whether it is without its address between two times.
    pub fn is_away(&self, since: u64, now: u64) -> bool {
        self.absences.iter().any(|(from, until)| *from < since && now < *until)
    }
}

/// Returns how many tries that take so long may lie in these times, between two others.
fn tries(times: impl Iterator<Item = (u64, u64)>, since: u64, now: u64, answer: u64) -> usize {
    let times = times.map(|(from, until)| (since.max(from), now.min(until)));
    let times = times.filter(|(from, until)| from < until);
    times.map(|(from, until)| (until - from) as usize / answer as usize + 2).sum()
}

/// The type of the QP of an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Rc,
    /// The QP of XRC that sends.
    Initiator,
    /// The QP of XRC that receives.
    Target,
}

/// The plan of one end of a connection.
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
    /// The work requests for its send queue, each with the pause in nanoseconds after the previous one.
    pub works: Vec<(u64, Work)>,
    /// The queues of its receives: one of RC, the SRQs of its domain of a target, and none of an initiator.
    pub queues: Vec<usize>,
}

/// The object that a queue of receives belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    Qp,
    Srq,
    /// An SRQ for XRC.
    XrcSrq,
}

/// The plan of a queue of receives.
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
    /// The guests. Some are on one host.
    pub guests: Vec<GuestPlan>,
    /// The links between addresses.
    pub links: Links,
    /// The ends of connections: that of number `n` is the peer of [`peer`]`(n)`.
    pub ends: Vec<EndPlan>,
    pub queues: Vec<QueuePlan>,
}

impl Plan {
    /// Returns whether an end is connected when a guest takes over an address, and not at the beginning: that of
    /// this guest is, and that of its peer if the earlier guest is in the peer's network, with which it would be
    /// connected.
    pub fn connects_late(&self, end: usize) -> bool {
        let [own, other] = [end, peer(end)].map(|end| &self.guests[self.ends[end].guest]);
        let earlier = &self.guests[other.address];
        !own.is_there_first() || !other.is_there_first() && earlier.host == own.host
    }
}

/// Returns the number of the other end of a connection.
pub fn peer(end: usize) -> usize {
    end ^ 1
}
