// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtio device, served over vhost-user.
//!
//! The front end (user-mode Linux's `virtio_uml`, Cloud Hypervisor's `--generic-vhost-user`)
//! connects to a socket, negotiates features and hands over the guest's memory, where the queues
//! are, and an eventfd or pipe for each direction of notification. [`Server`] answers one such
//! connection on behalf of a [`Backend`], the virtio device proper.
//!
//! A device of this kind has no use for single queues that stop: the first queue that the front
//! end stops resets the device, and the others stop with it. (The reset of the guest's driver shows
//! in vhost-user in no other way.)
//!
//! Source: the vhost-user protocol specification (QEMU docs/interop/vhost-user.rst) and the front
//! end in Linux arch/um/drivers/virtio_uml.c.

#![forbid(unsafe_code)]

mod channel;
mod fault;
mod server;
mod signal;
mod vring;
mod wire;

pub use channel::ChannelError;
pub use fault::{Fault, Faults};
pub use server::{Error, Server};
pub use signal::Signal;
pub use vring::QueueSetup;

use memory::{GuestMemory, Policy};

/// Most queues a device can have here: messages name a queue by 8 bits.
pub const MAX_QUEUES: u16 = 256;

/// A virtio device, as its transport sees it.
pub trait Backend {
    /// The device-specific feature bits that the device offers; the transport adds its own.
    fn features(&self) -> u64;

    /// Takes the feature bits that the driver agreed on, before the first queue starts.
    fn set_features(&mut self, features: u64);
    /// The device-specific configuration space.
    fn config(&self) -> &[u8];
    /// Number of virtqueues, at most [`MAX_QUEUES`].
    fn queue_count(&self) -> u16;
    /// What memory the front end may give out.
    fn memory_policy(&self) -> Policy {
        Policy::default()
    }
    /// A queue is set up and enabled. The first one that starts begins the device's life.
    fn start_queue(&mut self, queue: u16, setup: QueueSetup) -> Result<(), String>;
    /// The guest's memory changes. What the old map had and the new one lacks is not touched any
    /// more once the backend [is settled](Self::is_settled).
    fn set_memory(&mut self, memory: &GuestMemory);
    /// The driver resets the device. Guest memory is not touched any more, and no queue is started,
    /// once the backend [is settled](Self::is_settled).
    fn reset(&mut self);
    /// Whether the last [`Self::set_memory`] or [`Self::reset`] has come to its end. Until then the
    /// front end gets no answer, and nothing else is called.
    fn is_settled(&self) -> bool {
        true
    }
}
