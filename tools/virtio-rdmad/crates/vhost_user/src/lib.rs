// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtio device, served over vhost-user.
//!
//! The front end (user-mode Linux's `virtio_uml`, Cloud Hypervisor's `--generic-vhost-user`)
//! connects to a socket, negotiates features and hands over the guest's memory, where the queues
//! are, and an eventfd or pipe for each direction of notification. [`serve`] answers one such
//! connection; what the driver wants goes to a [`Backend`](virtio_transport::Backend), the virtio
//! device itself.
//!
//! A device of this kind has no use for single queues that stop: the first queue that the front
//! end stops resets the device, and the others stop with it. (vhost-user has no other sign of a
//! reset by the guest's driver.)
//!
//! Source: the vhost-user protocol specification (QEMU docs/interop/vhost-user.rst) and the front
//! end in Linux arch/um/drivers/virtio_uml.c.

#![forbid(unsafe_code)]

mod fault;
mod protocol;
mod signal;
mod vring;
mod wire;

pub use fault::Fault;
pub use protocol::{resume, serve, BadFlags, Unanswerable, VhostUser};

/// Most queues that a device can have here: messages name a queue by 8 bits.
pub const MAX_QUEUES: u16 = 256;
