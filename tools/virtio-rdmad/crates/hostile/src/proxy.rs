// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One virtqueue between the guest and the engine.
//!
//! The engine uses the guest's own descriptor table, but an available and a used ring of this process.
//! So every buffer passes through here on its way in and on its way out, and only this module writes
//! the guest's used ring.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use memory::{GuestMemory, MemoryError, Slice};
use ring::{Chain, Layout, RingError, Signal, SplitQueue};

/// The bytes from the rings of one queue to those of the next.
pub const STRIDE: u64 = 0x10000;
/// The offset of the used ring. The available ring of the largest queue fits in front of it.
const USED: u64 = 0x4000;

/// The offsets of the index and of the entries, in both rings.
const IDX: usize = 2;
const ENTRIES: usize = 4;

/// The engine's interrupt of a queue. The guest gets it when it gets the buffers.
#[derive(Debug, Default)]
pub struct Wanted(AtomicBool);

impl Signal for Wanted {
    fn signal(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A used ring of the guest, which can be given any content.
struct UsedRing {
    slice: Slice,
    size: u16,
    next: u16,
}

impl UsedRing {
    fn new(memory: &GuestMemory, layout: &Layout) -> Result<Self, MemoryError> {
        let len = ENTRIES as u64 + 8 * u64::from(layout.size);
        let slice = memory.slice(layout.used, len)?;
        let next = slice.load_u16(IDX, Ordering::Relaxed)?;
        Ok(Self { slice, size: layout.size, next })
    }

    fn push(&mut self, id: u32, len: u32) -> Result<(), MemoryError> {
        let at = ENTRIES + 8 * usize::from(self.next & (self.size - 1));
        self.slice.store_u32(at, id, Ordering::Relaxed)?;
        self.slice.store_u32(at + 4, len, Ordering::Relaxed)?;
        self.jump(1)
    }

    fn jump(&mut self, by: u16) -> Result<(), MemoryError> {
        self.next = self.next.wrapping_add(by);
        self.slice.store_u16(IDX, self.next, Ordering::Release)
    }
}

/// A queue of the guest, and the rings that the engine has of it.
pub struct Proxy {
    guest: SplitQueue,
    guest_used: UsedRing,
    avail: Slice,
    used: Slice,
    size: u16,
    next_avail: u16,
    next_used: u16,
    chains: HashMap<u16, Chain>,
    signal: Arc<dyn Signal>,
    wanted: Arc<Wanted>,
}

impl Proxy {
    /// Makes the proxy of a queue that the guest set up, and the queue for the engine with its
    /// interrupt. The engine's rings are at `shadow`, an address of `memory` that the guest does not
    /// have.
    pub fn new(
        memory: &GuestMemory,
        layout: Layout,
        base: u16,
        shadow: u64,
        signal: Arc<dyn Signal>,
    ) -> Result<(Self, SplitQueue, Arc<Wanted>), RingError> {
        let size = usize::from(layout.size) as u64;
        let avail = memory.slice(shadow, ENTRIES as u64 + 2 * size)?;
        let used = memory.slice(shadow + USED, ENTRIES as u64 + 8 * size)?;
        for ring in [&avail, &used] {
            ring.store_u16(0, 0, Ordering::Relaxed)?;
            ring.store_u16(IDX, 0, Ordering::Relaxed)?;
        }
        let inner = Layout { avail: shadow, used: shadow + USED, ..layout };
        let engine = SplitQueue::new(memory, inner, 0)?;
        let wanted = Arc::new(Wanted::default());
        let proxy = Self {
            guest: SplitQueue::new(memory, layout, base)?,
            guest_used: UsedRing::new(memory, &layout)?,
            avail,
            used,
            size: layout.size,
            next_avail: 0,
            next_used: 0,
            chains: HashMap::new(),
            signal,
            wanted: wanted.clone(),
        };
        Ok((proxy, engine, wanted))
    }

    /// Takes a buffer that the driver made available and that the engine is not to see.
    pub fn take(&mut self) -> Result<Option<Chain>, RingError> {
        self.guest.pop()
    }

    /// Shows what the driver made available, and passes it on. Returns whether that was anything.
    pub fn forward(&mut self, mut show: impl FnMut(&Chain)) -> Result<bool, RingError> {
        let mut moved = false;
        while let Some(chain) = self.guest.pop()? {
            let at = ENTRIES + 2 * usize::from(self.next_avail & (self.size - 1));
            self.avail.store_u16(at, chain.head, Ordering::Relaxed)?;
            show(&chain);
            self.set_next_avail(self.next_avail.wrapping_add(1))?;
            self.chains.insert(chain.head, chain);
            moved = true;
        }
        Ok(moved)
    }

    fn set_next_avail(&mut self, next: u16) -> Result<(), MemoryError> {
        self.next_avail = next;
        self.avail.store_u16(IDX, next, Ordering::Release)
    }

    /// Takes back a buffer that the engine has not taken. This is only for completion and event queues,
    /// of which the engine uses each buffer as soon as it takes it.
    pub fn steal(&mut self) -> Result<Option<Chain>, MemoryError> {
        if self.used.load_u16(IDX, Ordering::Acquire)? == self.next_avail {
            return Ok(None);
        }
        let last = self.next_avail.wrapping_sub(1);
        let at = ENTRIES + 2 * usize::from(last & (self.size - 1));
        let head = self.avail.load_u16(at, Ordering::Relaxed)?;
        self.set_next_avail(last)?;
        Ok(self.chains.remove(&head))
    }

    /// Takes the next buffer that the engine has used, and returns how many bytes it wrote too.
    pub fn next_used(&mut self) -> Result<Option<(Chain, u32)>, MemoryError> {
        while self.used.load_u16(IDX, Ordering::Acquire)? != self.next_used {
            let at = ENTRIES + 8 * usize::from(self.next_used & (self.size - 1));
            let head = self.used.load_u32(at, Ordering::Relaxed)?;
            let written = self.used.load_u32(at + 4, Ordering::Relaxed)?;
            self.next_used = self.next_used.wrapping_add(1);
            let chain = u16::try_from(head).ok().and_then(|head| self.chains.remove(&head));
            if let Some(chain) = chain {
                return Ok(Some((chain, written)));
            }
        }
        Ok(None)
    }

    /// Puts an entry in the guest's used ring, a wrong one too.
    pub fn push(&mut self, id: u32, len: u32) -> Result<(), MemoryError> {
        self.guest_used.push(id, len)
    }

    /// Moves the guest's used index without an entry.
    pub fn jump(&mut self, by: u16) -> Result<(), MemoryError> {
        self.guest_used.jump(by)
    }

    /// Interrupts the guest.
    pub fn interrupt(&self) {
        self.signal.signal();
    }

    /// Passes on the engine's interrupt, if there is one.
    pub fn pass_interrupt(&self) {
        if self.wanted.0.swap(false, Ordering::Relaxed) {
            self.interrupt();
        }
    }
}
