// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The verbs of the virtio-rdma device.
//!
//! A [`Fabric`] is one network; a [`Device`] is the RDMA device of one guest in
//! it. The engine does no I/O and starts no thread: a transport gives it guest
//! memory and rings, and calls [`Device::run`] from the one thread that serves
//! the guest. Messages between two guests of a fabric are one copy from the
//! memory of the one to the memory of the other, made by the requester's
//! thread.
//!
//! # Concurrency
//! What only the guest's own thread touches is locked all the same, but never
//! contended: the service state, the control state and the requester half of
//! each QP. What a peer's thread touches is under short locks of its own: the
//! responder half of a QP, a CQ, an SRQ, the event queue, the table of keys.
//! The order is: service, control, requester half, responder half (one
//! at a time, of whichever device), then the leaves, never two at once. The
//! use of a memory region is pinned by a count for one call of [`Device::run`] at
//! most, which is bounded in messages and bytes, and not while the control queue
//! has its turn or a change of memory or a reset goes on, so these wait for a bounded
//! time, and never for themselves.
//!
//! # What a guest wrote
//! is copied once, then checked. Nothing that a guest, or a peer, writes makes
//! the engine panic, loop or grow beyond [`Limits`]; each kind of bad input is
//! counted, and logged the first time.

#![forbid(unsafe_code)]
// The header's constants are all 32 bits wide, the fields that hold them often 8.
#![allow(clippy::cast_possible_truncation)]
// Requests are passed alike, whatever their size.
#![allow(clippy::trivially_copy_pass_by_ref)]
// On the path of each message a small structure that is returned through memory, and moved on from
// there in wider words, makes the processor wait for the stores: up to 10 ns of a message's 100.
#![allow(clippy::inline_always)]

mod base;
mod config;
mod control;
mod device;
mod fabric;
mod memory;
mod qp;
mod queue;
mod rights;
mod schedule;
mod transport;

#[cfg(all(test, loom))]
mod orders;
#[cfg(all(test, not(loom)))]
mod tests;

use std::time::Instant;

pub use base::counters::{Counter, DeviceStatus, QpStatus, SrqStatus};
pub use config::{DeviceConfig, Limits};
pub use device::{Device, Next};
pub use fabric::{Fabric, FabricConfig};
pub use qp::state::QpState;
pub use rights::{AddressRights, GidPrefix, VlanList};
pub use ring::Signal;

/// Bytes that are copied before other queues have their turn.
pub const CHUNK: u64 = 128 << 10;

/// A 16-byte global identifier, in network byte order.
pub type Gid = [u8; 16];

/// What a device is reached by: the same GID may be another guest's in another
/// VLAN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Address {
    /// The GID.
    pub gid: Gid,
    /// The VLAN that it belongs to (IEEE 802.1Q); `None`: to none.
    pub vlan: Option<u16>,
}

impl Address {
    /// The address of a GID in the same VLAN.
    pub(crate) fn beside(self, gid: Gid) -> Self {
        Self { gid, ..self }
    }
}

/// Makes the thread that serves a guest call [`Device::run`].
pub trait Wake: Send + Sync {
    /// Wakes the thread. Called from any thread of the process; must not block
    /// and must not call into the engine.
    fn wake(&self);
}

/// A source of time, so that tests have their own.
pub trait Clock: Send + Sync {
    /// The time now; never runs backwards.
    fn now(&self) -> Instant;
}

/// The clock of the machine.
#[derive(Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }
}
