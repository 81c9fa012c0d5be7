// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A driver that uses any free descriptors, and tables of descriptors, over that of the crate `testkit`.

use std::collections::HashMap;

use memory::GuestMemory;
use ring::Layout;
use testkit::{Buffer, Descriptor, Virtqueue, F_INDIRECT};

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

pub struct Driver {
    pub memory: GuestMemory,
    pub queue: Virtqueue,
    free: Vec<u16>,
    /// The descriptors of each chain that the device has, by head.
    chains: HashMap<u16, Vec<u16>>,
}

impl Driver {
    pub fn new(size: u16, event_idx: bool) -> Self {
        let memory = GuestMemory::anonymous(&[(0x1000, END - 0x1000)]).unwrap();
        let layout = Layout { size, desc: DESC, avail: AVAIL, used: USED, event_idx };
        let (queue, free) = (Virtqueue::new(layout), (0..size).rev().collect());
        Self { memory, queue, free, chains: HashMap::new() }
    }

    pub fn write_desc(&self, table: u64, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        Descriptor { addr, len, flags, next }.write(&self.memory, table, index);
    }

    /// Makes `head` available.
    pub fn offer(&mut self, head: u16) {
        self.queue.offer(&self.memory, head);
    }

    /// Adds a chain of buffers and returns its head, or `None` if there are too few free descriptors.
    pub fn add(&mut self, buffers: &[Buffer], indirect: bool) -> Option<u16> {
        let needed = if indirect { 1 } else { buffers.len() };
        if self.free.len() < needed {
            return None;
        }
        let taken = self.free.split_off(self.free.len() - needed);
        let head = taken[0];
        let (table, indices) = if indirect {
            (TABLES + u64::from(head) * 4096, (0..).take(buffers.len()).collect())
        } else {
            (DESC, taken.clone())
        };
        for (i, &buffer) in buffers.iter().enumerate() {
            let descriptor = Descriptor::new(buffer, indices.get(i + 1).copied());
            descriptor.write(&self.memory, table, indices[i]);
        }
        if indirect {
            let len = u32::try_from(buffers.len() * 16).unwrap();
            self.write_desc(DESC, head, table, len, F_INDIRECT, 0);
        }
        self.chains.insert(head, taken);
        self.offer(head);
        Some(head)
    }

    /// Takes the next used entry, and returns its head and its length.
    pub fn take(&mut self) -> Option<(u16, u32)> {
        let (head, len) = self.queue.take(&self.memory)?;
        let head = u16::try_from(head).unwrap();
        self.free.extend(self.chains.remove(&head).unwrap());
        Some((head, len))
    }
}
