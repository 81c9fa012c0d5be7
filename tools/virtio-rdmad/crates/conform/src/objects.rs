// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a driver knows of its CQs, QPs and SRQs.

use std::collections::VecDeque;

use abi::virtio_rdma_ring_cqe;
use testkit::{CqRing, QpRings, SrqRing};

/// The number of entries of send and receive rings.
pub const DEPTH: u32 = 16;
/// The bytes of an entry of a send or receive ring, at the least.
pub const STRIDE: u32 = 256;
/// The largest number of SGEs of a work request.
pub const SGES: u32 = 4;

/// A CQ.
pub struct Cq {
    /// The ring.
    pub ring: CqRing,
    /// The time of the last CQE.
    pub timestamp: u64,
    /// The CQEs that were taken while those of another QP were dropped.
    pub kept: VecDeque<virtio_rdma_ring_cqe>,
}

/// A work request that was posted.
#[derive(Clone, Copy, Debug)]
pub struct Posted {
    /// Its index in the ring.
    pub index: u32,
    /// Its number.
    pub wr_id: u64,
    /// Whether its success makes a CQE.
    pub signalled: bool,
}

/// A QP.
pub struct Qp {
    /// The rings.
    pub rings: QpRings,
    /// The type.
    pub kind: u32,
    /// Whether each send makes a CQE.
    pub signals_all: bool,
    /// The SRQ from which it receives, or 0.
    pub srqn: u32,
    /// The work requests of the send queue and of the receive queue that are outstanding.
    pub posted: [VecDeque<Posted>; 2],
}

/// An SRQ.
pub struct Srq {
    /// The ring.
    pub ring: SrqRing,
    /// The work requests that are outstanding.
    pub posted: VecDeque<Posted>,
}

/// What a QP is made with.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// The type.
    pub kind: u32,
    /// The CQ of sends.
    pub send_cqn: u32,
    /// The CQ of receives.
    pub recv_cqn: u32,
    /// Whether each send makes a CQE.
    pub signals_all: bool,
    /// The bytes of inline data.
    pub inline: u32,
}
