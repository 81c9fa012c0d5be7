// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtio PCI device of a virtual machine, served over vfio-user.
//!
//! The VMM (QEMU's `vfio-user-pci`, Cloud Hypervisor's `--user-device`) connects to a socket and
//! sends what its guest does to the device: accesses to PCI configuration space and BARs, the
//! guest's memory as file descriptors, eventfds for interrupts. [`Server`] answers one such
//! connection on behalf of a [`Backend`], the virtio device proper.
//!
//! No region can be mapped by the client. That is deliberate: as long as none can, QEMU posts the
//! guest's writes, so that a kick costs it no round trip.
//!
//! Sources: the vfio-user protocol specification (QEMU docs/interop/vfio-user.rst), `linux/vfio.h`,
//! VIRTIO 1.3 chapter 4.1, PCI Local Bus 3.0.

#![forbid(unsafe_code)]

mod channel;
mod fault;
mod interrupt;
mod pci;
mod registers;
mod server;
mod wire;

pub use fault::{Fault, Faults};
pub use interrupt::Signal;
pub use registers::QueueSetup;
pub use server::{Error, Server};

use memory::{GuestMemory, Policy};

/// Most queues a device can have here: one MSI-X vector each and one for configuration changes.
pub const MAX_QUEUES: u16 = 1023;

/// What a driver set up by the time it sets DRIVER_OK.
#[derive(Debug)]
pub struct Setup {
    /// The feature bits that were negotiated.
    pub features: u64,
    /// The guest's memory.
    pub memory: GuestMemory,
    /// The queues by index, `None` where the driver did not enable one.
    pub queues: Vec<Option<QueueSetup>>,
}

/// A virtio device, as its transport sees it.
pub trait Backend {
    /// The feature bits that the device offers; the transport adds its own.
    fn features(&self) -> u64;
    /// The device-specific configuration space.
    fn config(&self) -> &[u8];
    /// Number of virtqueues, at most [`MAX_QUEUES`].
    fn queue_count(&self) -> u16;
    /// Largest ring size of a queue, a power of two.
    fn queue_max_size(&self, queue: u16) -> u16;
    /// What memory the client may give out.
    fn memory_policy(&self) -> Policy {
        Policy::default()
    }
    /// The driver set DRIVER_OK. On an error the device asks the driver for a reset; what follows is
    /// called of a device that has started, until its reset.
    fn start(&mut self, setup: Setup) -> Result<(), String>;
    /// The guest's memory changes. What the old map had and the new one lacks is not touched any
    /// more once the backend [is settled](Self::is_settled).
    fn set_memory(&mut self, memory: &GuestMemory);
    /// The driver made buffers available.
    fn kick(&mut self, queue: u16);
    /// The driver resets the device. Guest memory is not touched any more once the backend
    /// [is settled](Self::is_settled).
    fn reset(&mut self);
    /// Whether the last [`Self::set_memory`] or [`Self::reset`] has come to its end. Until then the
    /// client gets no reply, and nothing else is called.
    fn is_settled(&self) -> bool {
        true
    }
}
