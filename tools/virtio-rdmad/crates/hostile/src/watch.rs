// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Who sees what a driver does.

use memory::GuestMemory;
use ring::{Chain, Layout, RingError};
use virtio_transport::Deed;

use crate::rule::Order;

/// Sees all that a driver does, and changes nothing unless it gives orders. The device calls it from the thread that
/// serves the guest.
pub trait Watch {
    /// Sees what the driver does at the transport.
    fn note(&mut self, _deed: Deed) {}

    /// Sees the feature bits with which the device starts, those of the transport among them, and its configuration.
    fn agree(&mut self, _features: u64, _config: &[u8; 256]) {}

    /// Sees a queue that starts.
    fn start(&mut self, _memory: &GuestMemory, _index: u16, _layout: &Layout) {}

    /// Sees that the driver notifies the device of buffers in a queue, where its transport says of which.
    fn kick(&mut self, _index: u16) {}

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

    /// Sees that the VMM has stopped the virtqueues. With user-mode Linux that is all that shows of a reset.
    fn stop(&mut self) {}

    /// Sees that the VMM has gone.
    fn leave(&mut self) {}

    /// Sees that the device was reset.
    fn reset(&mut self) {}

    /// Returns what the device is to do wrong from now on. A watch that only watches has no orders.
    fn orders(&mut self) -> Vec<Order> {
        Vec::new()
    }
}

/// Sees nothing.
pub struct Blind;

impl Watch for Blind {}
