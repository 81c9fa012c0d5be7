// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state that the owner of rings keeps for them.

/// The bytes of inline data of a QP.
pub const INLINE: u32 = 64;

/// The owner's side of the rings of a QP: the send ring is 0, the receive ring 1.
#[derive(Clone, Debug)]
pub struct QpRings {
    /// The address of the page that has both rings.
    pub page: u64,
    /// The producer indices.
    pub producers: [u32; 2],
}

/// The owner's side of a completion ring.
#[derive(Clone, Debug)]
pub struct CqRing {
    /// The address of the page that has the ring.
    pub page: u64,
    /// The number of entries.
    pub depth: u32,
    /// The consumer index.
    pub consumer: u32,
    /// The arming words: for the next CQE, and for the next solicited one.
    pub arms: [u32; 2],
    /// The completion vector.
    pub vector: u16,
    /// How many times the owner asked for an event.
    pub asked: u32,
    /// How many events the owner got.
    pub told: u32,
}
