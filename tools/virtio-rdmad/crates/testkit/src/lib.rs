// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The driver's side of the virtio-rdma device, for tests.
//!
//! Tests of several crates drive the device, in their own process or behind the socket of a VMM; so do the fuzz
//! targets. What they have in common is here once, from the bottom:
//!
//! * `memory`: guest memory
//! * `virtqueue`: a driver's side of a split virtqueue
//! * `command`: requests of the control queue, and what they consist of
//! * `wqe`: work requests, in virtqueues and in rings
//! * `rings`: the owner's side of rings
//! * `driver`: a driver that makes objects and uses them, over any [`Transport`]
//! * `socket`, `vhost_user` and `vfio_user`: messages of a VMM
//! * `vmm`: the transport of a guest whose device is in another process
//! * `manual`: whether the manual page of a program has its options
//!
//! Nothing that serves a guest depends on this crate, and this crate does not depend on the engine, whose tests use it.

#![forbid(unsafe_code)]
// The header's constants are all 32 bits wide, the fields that hold them often 8.
#![allow(clippy::cast_possible_truncation)]
// A test fails by a panic, and its numbers of objects and bytes are small.
#![allow(clippy::missing_panics_doc)]
// The header's names are unmistakable, and there are many.
#![allow(clippy::wildcard_imports)]

pub mod command;
mod driver;
pub mod manual;
mod memory;
mod rings;
pub mod socket;
pub mod vfio_user;
pub mod vhost_user;
mod virtqueue;
mod vmm;
mod wqe;

pub use self::memory::Memory;
pub use command::{gid, Gid, PAGE};
pub use driver::{
    Driver, Sizes, Transport, ALL, ATOMIC, DATA, INLINE, LOCAL, MEMORY, PAGE_SHIFT, READ, RING,
    STRIDE, VECTORS, WRITE,
};
pub use rings::{CqRing, QpRings, SrqRing, ARM, CQE, CQ_HEAD, PRODUCER, WAKE};
pub use virtqueue::{Buffer, Descriptor, Virtqueue, F_INDIRECT, F_NEXT, F_WRITE};
pub use vmm::{Pause, Protocol, Vmm};
pub use wqe::{brief, doorbell, receive, sge, shortened, Send};
