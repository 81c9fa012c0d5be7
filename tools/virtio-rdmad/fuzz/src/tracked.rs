// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest memory that knows what its guest wrote.

use std::cell::RefCell;
use std::ops::Range;

use memory::GuestMemory;
use testkit::Memory;

use crate::guest::WINDOW;

/// A guest's memory. What the guest writes into its lower half must stay as it is, but for the bytes that the device
/// may write to.
pub struct Tracked {
    /// The memory that the device gets.
    pub map: GuestMemory,
    kept: RefCell<Kept>,
}

/// The expected content of the lower half of memory.
struct Kept {
    bytes: Box<[u8]>,
    /// Whether the device may write here.
    open: Box<[bool]>,
}

impl Kept {
    /// Returns the part of `[addr, addr + len)` that is in the lower half.
    fn part(addr: u64, len: u64) -> Range<usize> {
        let end = addr.saturating_add(len).min(WINDOW.start) as usize;
        (addr.min(WINDOW.start) as usize).min(end)..end
    }
}

impl Tracked {
    /// Takes this memory, which consists of zeros.
    pub fn new(map: GuestMemory) -> Self {
        let len = WINDOW.start as usize;
        let kept = Kept { bytes: vec![0; len].into(), open: vec![false; len].into() };
        Self { map, kept: RefCell::new(kept) }
    }

    /// Allows the device to write to these bytes from now on.
    pub fn open(&self, addr: u64, len: u64) {
        self.kept.borrow_mut().open[Kept::part(addr, len)].fill(true);
    }

    /// Returns an address in the lower half of memory that the device wrote to without permission.
    pub fn written(&self) -> Option<usize> {
        let kept = self.kept.borrow();
        let mut now = vec![0; kept.bytes.len()];
        self.read_bytes(0, &mut now);
        let differ = |(i, (now, kept)): (usize, (&u8, &u8))| (now != kept).then_some(i);
        let mut places = now.iter().zip(kept.bytes.iter()).enumerate().filter_map(differ);
        places.find(|i| !kept.open[*i])
    }
}

impl Memory for Tracked {
    fn read_bytes(&self, addr: u64, bytes: &mut [u8]) {
        self.map.read_bytes(addr, bytes);
    }

    fn write_bytes(&self, addr: u64, bytes: &[u8]) {
        self.map.write_bytes(addr, bytes);
        let part = Kept::part(addr, bytes.len() as u64);
        let len = part.len();
        self.kept.borrow_mut().bytes[part].copy_from_slice(&bytes[..len]);
    }
}
