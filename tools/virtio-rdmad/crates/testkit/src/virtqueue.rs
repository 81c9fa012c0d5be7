// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A driver's side of a split virtqueue (VIRTIO 1.3, section 2.7).

use std::sync::atomic::{fence, Ordering};

use ring::Layout;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::memory::Memory;

/// The flag of a descriptor: the chain goes on with another one.
pub const F_NEXT: u16 = 1;
/// The flag of a descriptor: the device writes to this buffer.
pub const F_WRITE: u16 = 2;
/// The flag of a descriptor: the buffer is a table of descriptors.
pub const F_INDIRECT: u16 = 4;

/// The bytes of a descriptor.
const DESCRIPTOR: u64 = size_of::<Descriptor>() as u64;
/// The offsets of the index and of the entries in either ring.
const INDEX: u64 = 2;
const ENTRIES: u64 = 4;

/// A buffer: its address, its length, and whether the device writes to it.
pub type Buffer = (u64, u32, bool);

/// An entry of a descriptor table.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub struct Descriptor {
    /// The address of the buffer.
    pub addr: u64,
    /// The bytes of the buffer.
    pub len: u32,
    /// [`F_NEXT`], [`F_WRITE`] and [`F_INDIRECT`].
    pub flags: u16,
    /// The entry that the chain goes on with.
    pub next: u16,
}

impl Descriptor {
    /// Returns the descriptor of a buffer, which is the last one of its chain or goes on with `next`.
    pub fn new((addr, len, writes): Buffer, next: Option<u16>) -> Self {
        let flags = if writes { F_WRITE } else { 0 } | if next.is_some() { F_NEXT } else { 0 };
        Self { addr, len, flags, next: next.unwrap_or(0) }
    }

    /// Writes it to an entry of the table at this address.
    pub fn write(&self, memory: &impl Memory, table: u64, index: u16) {
        memory.put(table + u64::from(index) * DESCRIPTOR, self);
    }
}

/// A driver's side of a split virtqueue. The driver chooses which descriptors it uses.
#[derive(Clone, Debug)]
pub struct Virtqueue {
    /// The number of entries, and the addresses of its parts.
    pub layout: Layout,
    /// The number of chains that were made available so far, modulo 2^16.
    pub next: u16,
    /// The number of chains that were taken back so far, modulo 2^16.
    pub seen: u16,
}

impl Virtqueue {
    /// Returns a queue that nobody has used.
    pub fn new(layout: Layout) -> Self {
        Self { layout, next: 0, seen: 0 }
    }

    /// Returns the entry by whose number the next chain may begin if all chains have one descriptor.
    pub fn next_head(&self) -> u16 {
        self.next % self.layout.size
    }

    /// Returns how many chains the device has.
    pub fn outstanding(&self) -> u16 {
        self.next.wrapping_sub(self.seen)
    }

    /// Makes a chain of neighbouring descriptors available, which begin at `head`.
    pub fn add(&mut self, memory: &impl Memory, head: u16, buffers: &[Buffer]) {
        for (at, &buffer) in (0_u16..).zip(buffers) {
            let index = |at| (head + at) % self.layout.size;
            let next = (usize::from(at) + 1 < buffers.len()).then(|| index(at + 1));
            Descriptor::new(buffer, next).write(memory, self.layout.desc, index(at));
        }
        self.offer(memory, head);
    }

    /// Makes the chain that begins at `head` available.
    pub fn offer(&mut self, memory: &impl Memory, head: u16) {
        let slot = u64::from(self.next % self.layout.size);
        memory.put(self.layout.avail + ENTRIES + slot * size_of::<u16>() as u64, &head);
        self.next = self.next.wrapping_add(1);
        fence(Ordering::Release);
        memory.put(self.layout.avail + INDEX, &self.next);
    }

    /// Returns the number of chains that the device has used so far, modulo 2^16.
    pub fn used_index(&self, memory: &impl Memory) -> u16 {
        let index = memory.get(self.layout.used + INDEX);
        fence(Ordering::Acquire);
        index
    }

    /// Takes the next chain back that the device has used, and returns its head and the number of bytes in it.
    pub fn take(&mut self, memory: &impl Memory) -> Option<(u32, u32)> {
        if self.used_index(memory) == self.seen {
            return None;
        }
        let slot = u64::from(self.seen % self.layout.size);
        let entry: [u32; 2] = memory.get(self.layout.used + ENTRIES + slot * 8);
        self.seen = self.seen.wrapping_add(1);
        Some((entry[0], entry[1]))
    }
}
