// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The state of a CQ, which its lock protects.
#![forbid(unsafe_code)]

use crate::{
    bindings::ibv_wc,
    cq_ring::{CqRing, Owner},
    errno::{Errno, Result},
    lock::Lock,
};
use core::{mem::MaybeUninit, ptr};

/// The state of a CQ, which its lock protects.
pub struct CqState {
    /// The ring, if the program has it; otherwise the kernel polls.
    pub ring: Option<CqRing>,
    /// The completion that the program reads from an extended CQ.
    pub poll: Poll,
}

impl CqState {
    /// Returns the state of a new CQ, whose completions have the fields that `flags`
    /// (`IBV_WC_EX_WITH_*`) names.
    pub fn new(ring: Option<CqRing>, flags: u32) -> Self {
        let wc = MaybeUninit::new(ibv_wc::default());
        Self { ring, poll: Poll { wc, device_time: 0, wallclock: 0, flags } }
    }

    /// Returns the ring.
    ///
    /// # Errors
    ///
    /// EOPNOTSUPP if the kernel polls.
    pub fn ring(&mut self) -> Result<&mut CqRing> {
        self.ring.as_mut().ok_or(Errno::EOPNOTSUPP)
    }
}

/// A completion that a program reads field by field, and when it was polled.
pub struct Poll {
    /// The completion; never uninitialised.
    pub wc: MaybeUninit<ibv_wc>,
    /// The time by the device's clock ([`crate::clock::device`]), in nanoseconds, if the CQ has
    /// such time stamps.
    pub device_time: u64,
    /// The time by the wall clock, in nanoseconds, if the CQ has such time stamps.
    pub wallclock: u64,
    /// The CQ's `IBV_WC_EX_WITH_*`.
    pub flags: u32,
}

/// Drops the CQEs of `owner`, which is destroyed or reset, from its two CQs. Takes the lock of
/// one after the other.
pub fn purge(send_cq: &Lock<CqState>, recv_cq: &Lock<CqState>, owner: Owner) {
    let count = if ptr::eq(send_cq, recv_cq) { 1 } else { 2 };
    for cq in [send_cq, recv_cq].into_iter().take(count) {
        if let Ok(ring) = cq.lock().ring() {
            ring.purge(owner);
        }
    }
}
