// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Who sees what a driver does.

use memory::GuestMemory;
use ring::{Chain, Layout, RingError};
use virtio_transport::Deed;

/// Sees all that a driver does, and changes nothing. The device calls it from the thread that serves the guest.
pub trait Watch {
    /// Sees what the driver does at the transport.
    fn note(&mut self, _deed: Deed) {}

    /// Sees the feature bits with which the device starts, those of the transport among them, and its configuration.
    fn agree(&mut self, _features: u64, _config: &[u8; 256]) {}

    /// Sees a queue that starts.
    fn start(&mut self, _memory: &GuestMemory, _index: u16, _layout: &Layout) {}

    /// Sees a buffer before the device does.
    fn available(&mut self, _index: u16, _chain: &Chain) {}

    /// Sees that a queue has a chain that cannot be followed. The device stops looking at the queue.
    fn malformed(&mut self, _index: u16, _error: &RingError) {}

    /// Sees the bytes of a request, of which the device has no other ones, before it is carried out. There is room for
    /// so many bytes of a reply.
    fn request(&mut self, _memory: &GuestMemory, _request: &[u8], _room: usize) {}

    /// Sees the reply to a request, which the driver does not have yet.
    fn reply(&mut self, _memory: &GuestMemory, _request: &[u8], _reply: &[u8]) {}

    /// Sees a buffer before it is given back to the driver.
    fn returned(&mut self, _memory: &GuestMemory, _index: u16, _chain: &Chain) {}

    /// Looks at memory before the device works.
    fn before(&mut self, _memory: &GuestMemory) {}

    /// Looks at memory after the device has worked.
    fn after(&mut self, _memory: &GuestMemory) {}

    /// Sees that the memory of the guest is another one.
    fn set_memory(&mut self, _memory: &GuestMemory) {}

    /// Sees that the device was reset.
    fn reset(&mut self) {}
}

/// Sees nothing.
pub struct Blind;

impl Watch for Blind {}
