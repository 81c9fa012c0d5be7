// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An attached device, and the memory of its guest.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use memory::{GuestMemory, GuestRegion};
use ring::Layout;

use crate::outcome::Outcome;

/// VIRTIO_F_VERSION_1.
pub const F_VERSION_1: u64 = 1 << 32;
/// VIRTIO_F_ACCESS_PLATFORM.
pub const F_ACCESS_PLATFORM: u64 = 1 << 33;
/// VIRTIO_F_ORDER_PLATFORM.
pub const F_ORDER_PLATFORM: u64 = 1 << 36;

/// The bytes at the end of a guest's memory that its device can lose.
pub const SPARE: u64 = 256 << 10;

/// An attached device.
pub trait Port {
    /// Returns the feature bits that the device offers.
    fn offered(&mut self) -> Outcome<u64>;

    /// Returns whether the device has a legacy interface, if its transport tells devices with one apart.
    fn is_legacy(&mut self) -> Outcome<Option<bool>>;

    /// Returns whether the device offers its transport's means of migration, if there are any.
    fn offers_migration(&mut self) -> Outcome<Option<bool>>;

    /// Returns the number of virtqueues, if the device says it.
    fn queue_count(&mut self) -> Outcome<Option<u16>>;

    /// Returns the largest size of a virtqueue, if the device says it.
    fn queue_max_size(&mut self, queue: u16) -> Outcome<Option<u16>>;

    /// Returns the first bytes of the configuration space.
    fn config(&mut self, len: usize) -> Outcome<Vec<u8>>;

    /// Writes bytes to the configuration space. Returns whether the transport can do that.
    fn write_config(&mut self, at: usize, bytes: &[u8]) -> Outcome<bool>;

    /// Accepts features. Returns whether FEATURES_OK stands, if the device has a say in it.
    fn negotiate(&mut self, features: u64) -> Outcome<Option<bool>>;

    /// Sets these virtqueues up, and DRIVER_OK.
    fn start(&mut self, memory: &GuestMemory, queues: &BTreeMap<u16, Layout>) -> Outcome;

    /// Tells the device that there are buffers in a virtqueue.
    fn kick(&mut self, queue: u16) -> Outcome;

    /// Waits for an interrupt, or for this time. A device in the process works meanwhile.
    fn rest(&mut self, at_most: Duration) -> Outcome;

    /// Returns how many interrupts of a virtqueue have come so far, where several at once may count as one.
    fn interrupts(&mut self, queue: u16) -> u64;

    /// Begins a reset, and does not wait until the device shows that it is complete. Returns whether the transport can
    /// do that.
    fn begin_reset(&mut self) -> Outcome<bool> {
        Ok(false)
    }

    /// Resets the device, and waits until it shows that the reset is complete.
    fn reset(&mut self) -> Outcome;

    /// Takes the last bytes of the memory away from the device, which are [`SPARE`], or gives them back. The device has
    /// followed when this returns. Returns whether the transport can do that.
    fn set_spare(&mut self, guest: &Memory, is_there: bool) -> Outcome<bool>;

    /// Returns whether the device shows DEVICE_NEEDS_RESET, if it can.
    fn needs_reset(&mut self) -> Outcome<Option<bool>>;
}

/// Attaches to a device, as often as it takes.
pub trait Attach {
    /// Attaches to the device. The memory is that of the guest, and begins at guest address 0.
    fn attach(&self, guest: &Memory) -> Outcome<Box<dyn Port>>;

    /// Returns a name of the device for reports.
    fn name(&self) -> String;
}

/// The memory of a guest, with its file.
pub struct Memory {
    /// The file.
    pub file: OwnedFd,
    /// The bytes in it.
    pub bytes: u64,
    /// The memory, as the suite reads and writes it.
    pub map: GuestMemory,
}

impl Memory {
    /// Returns memory of so many bytes, which are zeros.
    pub fn new(bytes: u64) -> Self {
        let file = testkit::socket::new_memory(bytes);
        let map = map(&file, bytes);
        Self { file, bytes, map }
    }

    /// Returns the memory without what the device can lose.
    pub fn without_spare(&self) -> GuestMemory {
        map(&self.file, self.bytes - SPARE)
    }
}

/// Maps the first bytes of a file.
fn map(file: &OwnedFd, len: u64) -> GuestMemory {
    let region = GuestRegion { guest_addr: 0, len, fd: file.as_fd(), offset: 0, writable: true };
    GuestMemory::default().with_region(&region).expect("the machine has memory")
}
