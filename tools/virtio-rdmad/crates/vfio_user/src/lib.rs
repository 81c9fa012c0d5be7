// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtio PCI device of a virtual machine, served over vfio-user.
//!
//! The VMM (QEMU's `vfio-user-pci`, Cloud Hypervisor's `--user-device`) connects to a socket and
//! sends what its guest does to the device: accesses to PCI configuration space and BARs, the
//! guest's memory as file descriptors, eventfds for interrupts. [`serve`] answers one such
//! connection; what the driver wants goes to a [`Backend`](virtio_transport::Backend), the virtio
//! device itself. [`resume`] goes on with a connection that another process has answered so far.
//!
//! The client cannot map any region. This is deliberate: as long as it can map none, QEMU posts the
//! guest's writes, so that a kick needs no round trip.
//!
//! Sources: the vfio-user protocol specification (QEMU docs/interop/vfio-user.rst), `linux/vfio.h`,
//! VIRTIO 1.3 chapter 4.1, PCI Local Bus 3.0.

#![forbid(unsafe_code)]

mod fault;
mod interrupt;
mod pci;
mod protocol;
mod registers;
mod wire;

pub use fault::Fault;
pub use protocol::{resume, serve, ProtocolError, VfioUser};

/// Most queues that a device can have here: each has an MSI-X vector, and configuration changes have
/// one.
pub const MAX_QUEUES: u16 = 1023;
