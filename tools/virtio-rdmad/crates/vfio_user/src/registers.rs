// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The common configuration structure (VIRTIO 1.3, 4.1.4.3), by which a driver sets the device up.

use std::sync::Arc;

use ring::{Layout, Signal as _};
use serde::{Deserialize, Serialize};
use virtio_transport::{Deed, QueueSetup, ResumeError};

use crate::interrupt::{Interrupts, Vector, NO_VECTOR};

/// Feature bits of the transport, VIRTIO 1.3, chapter 6.
const F_VERSION_1: u64 = 1 << 32;
/// The driver gives the device addresses as DMA_MAP has them, also behind an IOMMU of the guest.
const F_ACCESS_PLATFORM: u64 = 1 << 33;

/// Bits of `device_status`, VIRTIO 1.3, 2.1.
mod status {
    pub const DRIVER_OK: u8 = 4;
    pub const FEATURES_OK: u8 = 8;
    pub const NEEDS_RESET: u8 = 0x40;
}

/// Offsets of the fields, `linux/virtio_pci.h`.
mod field {
    pub const DEVICE_FEATURE_SELECT: usize = 0;
    pub const DEVICE_FEATURE: usize = 4;
    pub const DRIVER_FEATURE_SELECT: usize = 8;
    pub const DRIVER_FEATURE: usize = 12;
    pub const CONFIG_VECTOR: usize = 16;
    pub const NUM_QUEUES: usize = 18;
    pub const STATUS: usize = 20;
    pub const QUEUE_SELECT: usize = 22;
    pub const QUEUE_SIZE: usize = 24;
    pub const QUEUE_VECTOR: usize = 26;
    pub const QUEUE_ENABLE: usize = 28;
    pub const QUEUE_NOTIFY_OFF: usize = 30;
    pub const QUEUE_ADDRESSES: usize = 32;
    pub const QUEUE_ADDRESSES_END: usize = 56;
    pub const END: usize = 64;
}

/// The registers of one queue (VIRTIO 1.3, 4.1.4.3).
#[derive(Debug)]
struct QueueRegisters {
    max_size: u16,
    size: u16,
    enabled: bool,
    /// Descriptor table, available ring, used ring.
    addresses: [u64; 3],
    vector: Arc<Vector>,
}

impl QueueRegisters {
    fn reset(&mut self) {
        self.size = self.max_size;
        self.enabled = false;
        self.addresses = [0; 3];
        self.vector.set(NO_VECTOR);
    }
}

/// The action that a write to a register asks for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Action {
    /// The write changes only the register.
    None,
    /// The driver set DRIVER_OK.
    Start,
    /// The driver wrote 0 to the status.
    Reset,
    /// The register cannot have this value; nothing changed.
    Refused,
}

/// The values of the registers.
#[derive(Debug, Deserialize, Serialize)]
pub struct SavedRegisters {
    offered: u64,
    accepted: u64,
    device_select: u32,
    driver_select: u32,
    status: u8,
    queue_select: u16,
    queues: Vec<SavedQueue>,
    config_vector: u16,
}

/// The values of the registers of one queue.
#[derive(Debug, Deserialize, Serialize)]
struct SavedQueue {
    max_size: u16,
    size: u16,
    enabled: bool,
    addresses: [u64; 3],
    vector: u16,
}

impl SavedQueue {
    fn of(queue: &QueueRegisters) -> Self {
        let &QueueRegisters { max_size, size, enabled, addresses, ref vector } = queue;
        Self { max_size, size, enabled, addresses, vector: vector.get() }
    }
}

/// The registers.
#[derive(Debug)]
pub struct Registers {
    offered: u64,
    accepted: u64,
    device_select: u32,
    driver_select: u32,
    status: u8,
    queue_select: u16,
    vectors: u16,
    queues: Vec<QueueRegisters>,
    config: Vector,
}

impl Registers {
    /// Makes the registers of a device with these features, and with a queue for each of these largest
    /// sizes.
    pub fn new(features: u64, max_sizes: &[u16], interrupts: &Arc<Interrupts>) -> Self {
        let queue = |&max_size| QueueRegisters {
            max_size,
            size: max_size,
            enabled: false,
            addresses: [0; 3],
            vector: Arc::new(Vector::of_queue(interrupts)),
        };
        Self {
            offered: with_own(features),
            accepted: 0,
            device_select: 0,
            driver_select: 0,
            status: 0,
            queue_select: 0,
            vectors: u16::try_from(max_sizes.len() + 1).unwrap_or(u16::MAX),
            queues: max_sizes.iter().map(queue).collect(),
            config: Vector::of_config(interrupts),
        }
    }

    /// Returns the number of MSI-X vectors: one for each queue and one for configuration changes.
    pub fn vectors(&self) -> u16 {
        self.vectors
    }

    /// Returns which features the driver has agreed to that a device with these features does not have. Before
    /// FEATURES_OK a driver may have written anything.
    pub fn missing(&self, features: u64) -> u64 {
        match self.status & status::FEATURES_OK {
            0 => 0,
            _ => self.accepted & !with_own(features),
        }
    }

    /// Returns the features that the driver accepted.
    pub fn features(&self) -> u64 {
        self.accepted
    }

    /// Returns whether the driver set DRIVER_OK.
    fn running(&self) -> bool {
        self.status & status::DRIVER_OK != 0
    }

    /// Returns whether the driver enabled this queue.
    pub fn is_enabled(&self, queue: usize) -> bool {
        self.queues.get(queue).is_some_and(|queue| queue.enabled)
    }

    /// Returns the queues that the driver enabled.
    pub fn enabled_queues(&self) -> Vec<QueueSetup> {
        let queues = (0..).zip(&self.queues).filter(|(_, queue)| queue.enabled);
        let setup = |(index, queue): (u16, &QueueRegisters)| {
            let [desc, avail, used] = queue.addresses;
            let layout = Layout { size: queue.size, desc, avail, used, event_idx: false };
            QueueSetup { index, layout, base: 0, kick: None, signal: queue.vector.clone() }
        };
        queues.map(setup).collect()
    }

    /// Gives all registers their first values.
    pub fn reset(&mut self) {
        self.accepted = 0;
        self.device_select = 0;
        self.driver_select = 0;
        self.status = 0;
        self.queue_select = 0;
        self.config.set(NO_VECTOR);
        self.queues.iter_mut().for_each(QueueRegisters::reset);
    }

    /// Returns the values of the registers.
    pub fn save(&self) -> SavedRegisters {
        SavedRegisters {
            offered: self.offered,
            accepted: self.accepted,
            device_select: self.device_select,
            driver_select: self.driver_select,
            status: self.status,
            queue_select: self.queue_select,
            queues: self.queues.iter().map(SavedQueue::of).collect(),
            config_vector: self.config.get(),
        }
    }

    /// Makes registers of these values. The driver may have agreed to more than is offered by now: [`Self::missing`]
    /// says whether that matters.
    pub fn load(saved: &SavedRegisters, interrupts: &Arc<Interrupts>) -> Result<Self, ResumeError> {
        let refused = |what, value| Err(ResumeError::Value { what, value });
        if saved.queues.len() > crate::MAX_QUEUES.into() {
            return refused("number of queues", saved.queues.len() as u64);
        }
        let sizes: Vec<u16> = saved.queues.iter().map(|queue| queue.max_size).collect();
        let mut registers = Self::new(saved.offered, &sizes, interrupts);
        registers.offered = saved.offered;
        registers.accepted = saved.accepted;
        registers.device_select = saved.device_select;
        registers.driver_select = saved.driver_select;
        registers.status = saved.status;
        registers.queue_select = saved.queue_select;
        let vectors = registers.vectors;
        let vector = |number| if number < vectors { number } else { NO_VECTOR };
        registers.config.set(vector(saved.config_vector));
        for (queue, saved) in registers.queues.iter_mut().zip(&saved.queues) {
            // A queue that a device has in another layout only has the size 0.
            let is_size = saved.size.is_power_of_two() || saved.size == 0;
            if !is_size || saved.size > queue.max_size {
                return refused("queue size", saved.size.into());
            }
            queue.size = saved.size;
            queue.enabled = saved.enabled;
            queue.addresses = saved.addresses;
            queue.vector.set(vector(saved.vector));
        }
        Ok(registers)
    }

    /// Returns whether a driver can go on with another device after a reset: that has the same queues, because the VMM
    /// has a vector for each of them. Features are negotiated again then.
    pub fn is_like(&self, other: &Self) -> bool {
        let sizes = |registers: &Self| -> Vec<u16> {
            registers.queues.iter().map(|queue| queue.max_size).collect()
        };
        sizes(self) == sizes(other)
    }

    /// Offers nothing any more that a device with these features does not have, from the next negotiation on.
    pub fn withdraw(&mut self, features: u64) {
        self.offered &= with_own(features);
    }

    /// Offers what another device offers, from the next negotiation on.
    pub fn offer_as(&mut self, other: &Self) {
        self.offered = other.offered;
    }

    /// Asks the driver for a reset.
    pub fn needs_reset(&mut self) {
        self.status |= status::NEEDS_RESET;
        self.signal_request();
    }

    /// Raises the interrupt for changes of the configuration if the driver was asked for a reset, of which it may not
    /// know yet.
    pub fn signal_request(&self) {
        if self.status & status::NEEDS_RESET != 0 {
            self.config.signal();
        }
    }

    /// Returns the device status.
    pub fn status(&self) -> u8 {
        self.status
    }

    /// Returns the bytes at an offset, with this device status. Bytes that belong to no field are zero.
    pub fn read(&self, at: usize, len: usize, status: u8) -> Vec<u8> {
        let mut image = [0u8; field::END];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(field::DEVICE_FEATURE_SELECT, &self.device_select.to_le_bytes());
        put(field::DEVICE_FEATURE, &half(self.offered, self.device_select).to_le_bytes());
        put(field::DRIVER_FEATURE_SELECT, &self.driver_select.to_le_bytes());
        put(field::DRIVER_FEATURE, &half(self.accepted, self.driver_select).to_le_bytes());
        put(field::CONFIG_VECTOR, &self.config.get().to_le_bytes());
        put(field::NUM_QUEUES, &(self.vectors - 1).to_le_bytes());
        put(field::STATUS, &[status]);
        put(field::QUEUE_SELECT, &self.queue_select.to_le_bytes());
        if let Some(queue) = self.queues.get(usize::from(self.queue_select)) {
            put(field::QUEUE_SIZE, &queue.size.to_le_bytes());
            put(field::QUEUE_VECTOR, &queue.vector.get().to_le_bytes());
            put(field::QUEUE_ENABLE, &u16::from(queue.enabled).to_le_bytes());
            put(field::QUEUE_NOTIFY_OFF, &self.queue_select.to_le_bytes());
            for (i, address) in queue.addresses.iter().enumerate() {
                put(field::QUEUE_ADDRESSES + 8 * i, &address.to_le_bytes());
            }
        }
        image.get(at..at + len).map_or_else(|| vec![0; len], <[u8]>::to_vec)
    }

    /// Returns what a driver does that reads bytes at an offset, with this device status, if that is more than a look
    /// at a register.
    pub fn deed_of_read(at: usize, len: usize, status: u8) -> Option<Deed> {
        (at..at + len).contains(&field::STATUS).then_some(Deed::ReadStatus(status))
    }

    /// Returns what a driver does that writes a register, if that is more than a value of the register.
    pub fn deed_of_write(&self, at: usize, data: &[u8]) -> Option<Deed> {
        match (at, data) {
            (field::STATUS, &[status]) => {
                Some(Deed::WriteStatus { status, features: self.accepted })
            }
            (field::QUEUE_ENABLE, &[1, 0]) => Some(Deed::EnableQueue(self.queue_select)),
            _ => None,
        }
    }

    /// Writes a register. An access must have the width of its register. `accepts`: whether the device lets the driver
    /// accept these of the bits that it offers.
    pub fn write(&mut self, at: usize, data: &[u8], accepts: impl Fn(u64) -> bool) -> Action {
        match *data {
            [value] if at == field::STATUS => self.write_status(value, accepts),
            [a, b] => self.write_16(at, u16::from_le_bytes([a, b])),
            [a, b, c, d] => self.write_32(at, u32::from_le_bytes([a, b, c, d])),
            _ => Action::Refused,
        }
    }

    fn write_status(&mut self, value: u8, accepts: impl Fn(u64) -> bool) -> Action {
        if value == 0 {
            return Action::Reset;
        }
        // Only a reset clears bits. Otherwise a device that runs would go on without its driver.
        if self.status & !status::NEEDS_RESET & !value != 0 {
            return Action::Refused;
        }
        let mut value = value | (self.status & status::NEEDS_RESET);
        let is_settled = self.status & status::FEATURES_OK != 0;
        let is_acceptable = self.acceptable() && (is_settled || accepts(self.accepted));
        if value & status::FEATURES_OK != 0 && !is_acceptable {
            value &= !status::FEATURES_OK;
        }
        let starts = value & status::DRIVER_OK != 0 && !self.running();
        if starts && value & status::FEATURES_OK == 0 {
            return Action::Refused;
        }
        self.status = value;
        if starts {
            Action::Start
        } else {
            Action::None
        }
    }

    fn acceptable(&self) -> bool {
        self.accepted & !self.offered == 0 && self.accepted & F_VERSION_1 != 0
    }

    fn write_16(&mut self, at: usize, value: u16) -> Action {
        let vector = if value < self.vectors { value } else { NO_VECTOR };
        match at {
            field::CONFIG_VECTOR => self.config.set(vector),
            field::QUEUE_SELECT => self.queue_select = value,
            field::QUEUE_VECTOR => match self.selected() {
                Some(queue) => queue.vector.set(vector),
                None => return Action::Refused,
            },
            field::QUEUE_SIZE => match self.idle() {
                Some(queue) if value.is_power_of_two() && value <= queue.max_size => {
                    queue.size = value;
                }
                _ => return Action::Refused,
            },
            field::QUEUE_ENABLE => match self.idle() {
                Some(queue) if value == 1 => queue.enabled = true,
                _ => return Action::Refused,
            },
            _ => return Action::Refused,
        }
        Action::None
    }

    fn write_32(&mut self, at: usize, value: u32) -> Action {
        match at {
            field::DEVICE_FEATURE_SELECT => self.device_select = value,
            field::DRIVER_FEATURE_SELECT => self.driver_select = value,
            field::DRIVER_FEATURE if self.status & status::FEATURES_OK == 0 => {
                set_half(&mut self.accepted, self.driver_select, value);
            }
            field::QUEUE_ADDRESSES..field::QUEUE_ADDRESSES_END if at % 4 == 0 => {
                let word = (at - field::QUEUE_ADDRESSES) / 4;
                let Some(queue) = self.idle() else { return Action::Refused };
                set_half(&mut queue.addresses[word / 2], u32::from(word % 2 == 1), value);
            }
            _ => return Action::Refused,
        }
        Action::None
    }

    fn selected(&mut self) -> Option<&mut QueueRegisters> {
        self.queues.get_mut(usize::from(self.queue_select))
    }

    /// Returns the selected queue, as long as the driver may change it.
    fn idle(&mut self) -> Option<&mut QueueRegisters> {
        self.selected().filter(|queue| !queue.enabled)
    }
}

/// Returns the feature bits of a device with these features, and those of this transport.
fn with_own(features: u64) -> u64 {
    features | F_VERSION_1 | F_ACCESS_PLATFORM
}

/// Returns the low (0) or the high (1) half of a 64-bit register; zero for any other selection.
fn half(value: u64, select: u32) -> u32 {
    let word = match select {
        0 => value & u64::from(u32::MAX),
        1 => value >> 32,
        _ => 0,
    };
    u32::try_from(word).unwrap_or_default()
}

fn set_half(value: &mut u64, select: u32, new: u32) {
    let new = u64::from(new);
    match select {
        0 => *value = (*value & !u64::from(u32::MAX)) | new,
        1 => *value = (*value & u64::from(u32::MAX)) | (new << 32),
        _ => {}
    }
}
