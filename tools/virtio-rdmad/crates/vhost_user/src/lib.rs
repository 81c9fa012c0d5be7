// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtio device, served over vhost-user.
//!
//! The front end (user-mode Linux's `virtio_uml`, Cloud Hypervisor's `--generic-vhost-user`)
//! connects to a socket, negotiates features and hands over the guest's memory, where the queues
//! are, and an eventfd or pipe for each direction of notification. [`serve`] answers one such
//! connection; what the driver wants goes to a [`Backend`](virtio_transport::Backend), the virtio
//! device itself.
//!
//! A device of this kind has no use for single queues that stop. The first queue that the front end stops (by
//! GET_VRING_BASE) or disables pauses the device: it touches no memory of the guest, and keeps all that the driver
//! made. It goes on once every queue runs again, as it was: with the same addresses, size and features, and from the
//! index that GET_VRING_BASE has returned.
//!
//! The device is reset by RESET_DEVICE. Some front ends do not send that: user-mode Linux and QEMU's vhost-user-base
//! only stop the queues. So the device is also reset when a queue is set up otherwise while the device is paused, and
//! when the first queue is to begin at index 0. Between the two the driver has reset its device, and the pause keeps
//! the device from the memory that the driver has given back.
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
