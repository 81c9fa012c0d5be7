// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! PCI configuration space and the layout of the BARs.
//!
//! BAR 0 has the virtio structures, BAR 1 the MSI-X table and the pending bits. The client emulates the table itself.
//! It may ask for the pending bits, as QEMU does, and is told that there are none: the device knows of no mask, and
//! signals each interrupt at once. What waits for a vector that the guest has masked is known to the client alone.
//! Offsets follow PCI Local Bus 3.0, chapter 6, and VIRTIO 1.3, 4.1.4.

use crate::wire::region;

/// A structure in BAR 0.
#[derive(Clone, Copy, Debug)]
pub struct BarStructure {
    pub offset: u32,
    pub len: u32,
}

impl BarStructure {
    /// Returns the offset of `at` in the structure, if `[at, at + len)` is inside.
    pub fn hit(self, at: u64, len: usize) -> Option<usize> {
        let inside = at.checked_sub(u64::from(self.offset))?;
        let end = inside.checked_add(len as u64)?;
        (end <= u64::from(self.len)).then_some(inside).and_then(|inside| inside.try_into().ok())
    }
}

pub const COMMON: BarStructure = BarStructure { offset: 0x0000, len: 64 };
pub const ISR: BarStructure = BarStructure { offset: 0x1000, len: 1 };
pub const DEVICE: BarStructure = BarStructure { offset: 0x2000, len: 0x1000 };
pub const NOTIFY: BarStructure = BarStructure { offset: 0x3000, len: 0x1000 };
/// The bytes of the notification structure that belong to one queue.
pub const NOTIFY_MULTIPLIER: u32 = 4;

pub const BAR0_SIZE: u32 = 0x4000;
pub const BAR1_SIZE: u32 = 0x8000;
const MSIX_TABLE: u32 = 0;
const MSIX_PBA: u32 = 0x4000;

/// The length of configuration space, that of a conventional PCI device.
pub const CONFIG_SIZE: usize = 256;

const VENDOR_RED_HAT: u16 = 0x1af4;
const DEVICE_BASE: u16 = 0x1040;
/// Any value from 0x40 on means "not transitional", VIRTIO 1.3, 4.1.2.1.
const SUBSYSTEM: u16 = 0x1100;
const REVISION: u8 = 1;
/// Network controller, InfiniBand.
const CLASS: [u8; 3] = [0x00, 0x07, 0x02];

const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const BAR0: usize = 0x10;
const BAR1: usize = 0x14;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
const INTERRUPT_PIN: usize = 0x3d;
const FIRST_CAPABILITY: usize = 0x40;

const STATUS_CAPABILITIES: u16 = 1 << 4;
/// I/O, memory, bus master, INTx disable.
const COMMAND_WRITABLE: u16 = 0x0407;
const MSIX_CONTROL_WRITABLE: u16 = 0xc000;

const CAP_ID_PM: u8 = 0x01;
const CAP_ID_VENDOR: u8 = 0x09;
const CAP_ID_MSIX: u8 = 0x11;
/// Power management (PCI Power Management 1.2, 3.2.3): the version; no D1, no D2 and no PME#.
const PM_CAPABILITIES: u16 = 3;
/// `PowerState` and `No_Soft_Reset`, PCI Power Management 1.2, 3.2.4.
const PM_STATE: u16 = 3;
const PM_NO_SOFT_RESET: u16 = 1 << 3;
/// `enum` of virtio structures, VIRTIO 1.3, 4.1.4.
const CFG_COMMON: u8 = 1;
const CFG_NOTIFY: u8 = 2;
const CFG_ISR: u8 = 3;
const CFG_DEVICE: u8 = 4;
const CFG_PCI: u8 = 5;

/// Configuration space: its bytes, and which of their bits the guest can write.
#[derive(Debug)]
pub struct ConfigSpace {
    bytes: [u8; CONFIG_SIZE],
    writable: [u8; CONFIG_SIZE],
    /// The offset of the capability that reaches BARs through configuration space.
    access: usize,
}

/// An access to a BAR through configuration space, VIRTIO 1.3, 4.1.4.9.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct BarAccess {
    pub bar: u32,
    pub offset: u64,
    pub len: usize,
}

impl ConfigSpace {
    /// Makes the configuration space of virtio device `id` with `vectors` MSI-X vectors.
    pub fn new(id: u16, vectors: u16, config_len: u32) -> Self {
        let mut space = Self { bytes: [0; CONFIG_SIZE], writable: [0; CONFIG_SIZE], access: 0 };
        space.put(0x00, &VENDOR_RED_HAT.to_le_bytes());
        space.put(0x02, &(DEVICE_BASE + id).to_le_bytes());
        space.put(STATUS, &STATUS_CAPABILITIES.to_le_bytes());
        space.put(0x08, &[REVISION]);
        space.put(0x09, &CLASS);
        space.put(0x2c, &VENDOR_RED_HAT.to_le_bytes());
        space.put(0x2e, &SUBSYSTEM.to_le_bytes());
        space.put(INTERRUPT_PIN, &[1]);
        space.allow(COMMAND, &COMMAND_WRITABLE.to_le_bytes());
        space.allow(BAR0, &(!(BAR0_SIZE - 1)).to_le_bytes());
        space.allow(BAR1, &(!(BAR1_SIZE - 1)).to_le_bytes());
        space.allow(INTERRUPT_LINE, &[0xff]);
        space.add_capabilities(vectors, config_len);
        space
    }

    fn add_capabilities(&mut self, vectors: u16, config_len: u32) {
        let device = BarStructure { len: config_len, ..DEVICE };
        let mut link = CAPABILITIES;
        let mut at = FIRST_CAPABILITY;
        let mut add = |space: &mut Self, body: &[u8]| {
            let start = at;
            space.put(link, &[u8::try_from(start).unwrap_or(0)]);
            space.put(start, body);
            link = start + 1;
            at += body.len().next_multiple_of(4);
            start
        };
        add(self, &virtio_cap(CFG_COMMON, COMMON, &[]));
        add(self, &virtio_cap(CFG_NOTIFY, NOTIFY, &NOTIFY_MULTIPLIER.to_le_bytes()));
        add(self, &virtio_cap(CFG_ISR, ISR, &[]));
        add(self, &virtio_cap(CFG_DEVICE, device, &[]));
        self.access = add(self, &virtio_cap(CFG_PCI, BarStructure { offset: 0, len: 0 }, &[0; 4]));
        let msix = add(self, &msix_cap(vectors));
        self.allow(msix + 2, &MSIX_CONTROL_WRITABLE.to_le_bytes());
        let pm = add(self, &pm_cap());
        self.allow(pm + 4, &PM_STATE.to_le_bytes());
        self.allow(self.access + 4, &[0xff]);
        self.allow(self.access + 8, &[0xff; 8]);
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn allow(&mut self, at: usize, mask: &[u8]) {
        self.writable[at..at + mask.len()].copy_from_slice(mask);
    }

    /// Returns the bytes at an offset, if they are inside.
    pub fn read(&self, at: usize, len: usize) -> Option<&[u8]> {
        self.bytes.get(at..at.checked_add(len)?)
    }

    /// Returns all bytes.
    pub fn bytes(&self) -> &[u8; CONFIG_SIZE] {
        &self.bytes
    }

    /// Writes the bits that can be written. Returns `None` if the bytes are not inside.
    pub fn write(&mut self, at: usize, data: &[u8]) -> Option<()> {
        let end = at.checked_add(data.len())?;
        let masks = self.writable.get(at..end)?;
        for ((byte, mask), new) in self.bytes.get_mut(at..end)?.iter_mut().zip(masks).zip(data) {
            *byte = (*byte & !mask) | (new & mask);
        }
        Some(())
    }

    /// Returns the BAR access that an access to these bytes means, if they are the data of the
    /// capability for that.
    pub fn bar_access(&self, at: usize, len: usize) -> Option<BarAccess> {
        let data = self.access + 16;
        if at != data {
            return None;
        }
        let word = |offset: usize| {
            let bytes = self.bytes[self.access + offset..self.access + offset + 4].try_into();
            bytes.map_or(0, u32::from_le_bytes)
        };
        let wanted = word(12) as usize;
        let valid = matches!(wanted, 1 | 2 | 4) && wanted == len;
        let bar = u32::from(self.bytes[self.access + 4]);
        valid.then(|| BarAccess { bar, offset: word(8).into(), len })
    }
}

/// Returns a virtio capability whose structure is in BAR 0. The link to the next capability comes later.
fn virtio_cap(kind: u8, structure: BarStructure, more: &[u8]) -> Vec<u8> {
    let len = u8::try_from(16 + more.len()).unwrap_or(0);
    let bar = u8::try_from(region::BAR0).unwrap_or(0);
    let mut cap = vec![CAP_ID_VENDOR, 0, len, kind, bar, 0, 0, 0];
    cap.extend(structure.offset.to_le_bytes());
    cap.extend(structure.len.to_le_bytes());
    cap.extend(more);
    cap
}

fn msix_cap(vectors: u16) -> Vec<u8> {
    let mut cap = vec![CAP_ID_MSIX, 0];
    cap.extend((vectors - 1).to_le_bytes());
    cap.extend((MSIX_TABLE | region::BAR1).to_le_bytes());
    cap.extend((MSIX_PBA | region::BAR1).to_le_bytes());
    cap
}

/// Returns a capability which says that the device keeps its state in D3hot, so that the driver of a
/// guest that is suspended need not reset it. In D3hot the device works as in D0: peers still access
/// the guest's memory.
fn pm_cap() -> Vec<u8> {
    let mut cap = vec![CAP_ID_PM, 0];
    cap.extend(PM_CAPABILITIES.to_le_bytes());
    cap.extend(PM_NO_SOFT_RESET.to_le_bytes());
    cap.extend([0; 2]);
    cap
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walk(space: &ConfigSpace) -> Vec<(u8, usize)> {
        let mut found = Vec::new();
        let mut at = usize::from(space.bytes[CAPABILITIES]);
        while at != 0 {
            found.push((space.bytes[at], at));
            at = usize::from(space.bytes[at + 1]);
        }
        found
    }

    #[test]
    fn the_capability_list_holds_every_structure_once() {
        let space = ConfigSpace::new(42, 258, 256);
        let ids: Vec<u8> = walk(&space).iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, [9, 9, 9, 9, 9, 0x11, 0x01]);
        let kinds: Vec<u8> = walk(&space)[..5].iter().map(|(_, at)| space.bytes[at + 3]).collect();
        assert_eq!(kinds, [1, 2, 3, 4, 5]);
        let msix = walk(&space)[5].1;
        assert_eq!(space.read(msix + 2, 2), Some(&257u16.to_le_bytes()[..]));
        assert_eq!(space.read(0, 4), Some(&[0xf4, 0x1a, 0x6a, 0x10][..]));
    }

    /// PCI Power Management 1.2, 3.2.4 and 5.4.1: a driver that finds `No_Soft_Reset` need not set the
    /// device up again after D3hot.
    #[test]
    fn the_device_keeps_its_state_in_d3hot() {
        let mut space = ConfigSpace::new(42, 2, 256);
        let (id, pm) = *walk(&space).last().unwrap();
        assert_eq!(id, CAP_ID_PM);
        assert_eq!(space.read(pm + 4, 2), Some(&PM_NO_SOFT_RESET.to_le_bytes()[..]));
        space.write(pm + 4, &PM_STATE.to_le_bytes()).unwrap();
        let asleep = PM_NO_SOFT_RESET | PM_STATE;
        assert_eq!(space.read(pm + 4, 2), Some(&asleep.to_le_bytes()[..]), "D3hot");
        space.write(pm + 4, &0u16.to_le_bytes()).unwrap();
        assert_eq!(space.read(pm + 4, 2), Some(&PM_NO_SOFT_RESET.to_le_bytes()[..]), "D0");
    }

    #[test]
    fn only_writable_bits_change() {
        let mut space = ConfigSpace::new(42, 2, 256);
        for at in 0..CONFIG_SIZE {
            assert_eq!(space.write(at, &[0xff]), Some(()));
        }
        assert_eq!(space.read(0, 2), Some(&[0xf4, 0x1a][..]));
        assert_eq!(space.read(BAR0, 4), Some(&(!(BAR0_SIZE - 1)).to_le_bytes()[..]));
        assert_eq!(space.read(COMMAND, 2), Some(&COMMAND_WRITABLE.to_le_bytes()[..]));
        assert_eq!(space.write(255, &[0, 0]), None);
        assert_eq!(space.read(usize::MAX, 2), None);
    }

    #[test]
    fn the_access_capability_reaches_a_bar() {
        let mut space = ConfigSpace::new(42, 2, 256);
        let at = space.access;
        assert_eq!(space.bar_access(at + 16, 4), None, "length 0 is no access");
        space.write(at + 8, &0x2010u32.to_le_bytes()).unwrap();
        space.write(at + 12, &4u32.to_le_bytes()).unwrap();
        let access = BarAccess { bar: 0, offset: 0x2010, len: 4 };
        assert_eq!(space.bar_access(at + 16, 4), Some(access));
        assert_eq!(space.bar_access(at + 16, 2), None);
    }
}
