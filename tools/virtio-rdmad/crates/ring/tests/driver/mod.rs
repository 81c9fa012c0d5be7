// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A driver's side of a split virtqueue, written from VIRTIO 1.3, section 2.7.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;

use memory::GuestMemory;
use ring::Layout;

/// The address of the descriptor table in guest memory.
pub const DESC: u64 = 0x1000;
/// The address of the available ring.
pub const AVAIL: u64 = 0x4000;
/// The address of the used ring.
pub const USED: u64 = 0x6000;
/// The address of the indirect tables. Each head has one of 4 KiB.
pub const TABLES: u64 = 0x10_0000;
/// The address of the buffers.
pub const DATA: u64 = 0x80_0000;
/// The end of guest memory.
pub const END: u64 = 0x100_0000;

pub const F_NEXT: u16 = 1;
pub const F_WRITE: u16 = 2;
pub const F_INDIRECT: u16 = 4;

pub struct Driver {
    pub memory: GuestMemory,
    pub layout: Layout,
    pub avail_idx: u16,
    pub used_idx: u16,
    free: Vec<u16>,
    /// The descriptors of each chain that the device has, by head.
    chains: HashMap<u16, Vec<u16>>,
}

impl Driver {
    pub fn new(size: u16, event_idx: bool) -> Self {
        let memory = GuestMemory::anonymous(&[(0x1000, END - 0x1000)]).unwrap();
        let layout = Layout { size, desc: DESC, avail: AVAIL, used: USED, event_idx };
        Self {
            memory,
            layout,
            avail_idx: 0,
            used_idx: 0,
            free: (0..size).rev().collect(),
            chains: HashMap::new(),
        }
    }

    pub fn write_desc(&self, table: u64, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.memory.write(table + u64::from(index) * 16, &bytes).unwrap();
    }

    pub fn set_u16(&self, addr: u64, value: u16) {
        self.memory.slice(addr, 2).unwrap().store_u16(0, value, Relaxed).unwrap();
    }

    pub fn get_u16(&self, addr: u64) -> u16 {
        self.memory.slice(addr, 2).unwrap().load_u16(0, Relaxed).unwrap()
    }

    fn get_u32(&self, addr: u64) -> u32 {
        self.memory.slice(addr, 4).unwrap().load_u32(0, Relaxed).unwrap()
    }

    /// Makes `head` available.
    pub fn offer(&mut self, head: u16) {
        let slot = u64::from(self.avail_idx & (self.layout.size - 1));
        self.set_u16(AVAIL + 4 + slot * 2, head);
        self.avail_idx = self.avail_idx.wrapping_add(1);
        self.set_u16(AVAIL + 2, self.avail_idx);
    }

    /// Adds a chain of `(address, length, device writes)` and returns its head, or `None` if there
    /// are too few free descriptors.
    pub fn add(&mut self, buffers: &[(u64, u32, bool)], indirect: bool) -> Option<u16> {
        let needed = if indirect { 1 } else { buffers.len() };
        if self.free.len() < needed {
            return None;
        }
        let indices: Vec<u16> = if indirect {
            (0..).take(buffers.len()).collect()
        } else {
            self.free.split_off(self.free.len() - needed)
        };
        let head = if indirect { self.free.pop().unwrap() } else { indices[0] };
        let table = if indirect { TABLES + u64::from(head) * 4096 } else { DESC };
        for (i, &(addr, len, write)) in buffers.iter().enumerate() {
            let next = indices.get(i + 1).copied();
            let flags = if write { F_WRITE } else { 0 } | if next.is_some() { F_NEXT } else { 0 };
            self.write_desc(table, indices[i], addr, len, flags, next.unwrap_or(0));
        }
        if indirect {
            let len = u32::try_from(buffers.len() * 16).unwrap();
            self.write_desc(DESC, head, table, len, F_INDIRECT, 0);
        }
        self.chains.insert(head, if indirect { vec![head] } else { indices });
        self.offer(head);
        Some(head)
    }

    /// Takes the next used entry, and returns its head and its length.
    pub fn take(&mut self) -> Option<(u16, u32)> {
        if self.get_u16(USED + 2) == self.used_idx {
            return None;
        }
        let entry = USED + 4 + u64::from(self.used_idx & (self.layout.size - 1)) * 8;
        self.used_idx = self.used_idx.wrapping_add(1);
        let head = u16::try_from(self.get_u32(entry)).unwrap();
        self.free.extend(self.chains.remove(&head).unwrap());
        Some((head, self.get_u32(entry + 4)))
    }
}
