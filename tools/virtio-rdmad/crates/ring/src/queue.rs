// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The queue itself: available ring, used ring, notifications.

use std::sync::atomic::Ordering;

use memory::atomic::fence;
use memory::{GuestMemory, Slice};

use crate::chain::{Chain, Walk, DESCRIPTOR_SIZE};
use crate::error::{RingError, MAX_SIZE};

/// `VIRTQ_AVAIL_F_NO_INTERRUPT`.
const AVAIL_F_NO_INTERRUPT: u16 = 1;
/// `VIRTQ_USED_F_NO_NOTIFY`.
const USED_F_NO_NOTIFY: u16 = 1;

/// Offset of `flags` in either ring.
const FLAGS: usize = 0;
/// Offset of `idx` in either ring.
const IDX: usize = 2;
/// Offset of the entries in either ring.
const ENTRIES: usize = 4;
/// The bytes of an entry of the available ring.
const AVAIL_ENTRY: usize = 2;
/// The bytes of an entry of the used ring.
const USED_ENTRY: usize = 8;

/// The layout of a queue: its size, the guest addresses of its parts, and whether it has event indices.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Layout {
    /// The number of entries, a power of two.
    pub size: u16,
    /// The address of the descriptor table.
    pub desc: u64,
    /// The address of the available ring, which the driver writes.
    pub avail: u64,
    /// The address of the used ring, which the device writes.
    pub used: u64,
    /// Whether VIRTIO_F_EVENT_IDX was negotiated.
    pub event_idx: bool,
}

impl Layout {
    fn entries(&self) -> usize {
        self.size.into()
    }

    /// Returns the offset of `used_event` in the available ring.
    fn used_event(&self) -> usize {
        ENTRIES + self.entries() * AVAIL_ENTRY
    }

    /// Returns the offset of `avail_event` in the used ring.
    fn avail_event(&self) -> usize {
        ENTRIES + self.entries() * USED_ENTRY
    }
}

/// The position of the device in a queue: all that the device knows of the queue besides the ring itself.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Position {
    /// The index of the next buffer to take from the available ring.
    pub next_avail: u16,
    /// The index of the next entry to write in the used ring.
    pub next_used: u16,
    /// The index in the used ring up to which it is decided whether the driver gets an interrupt.
    pub signalled: u16,
}

/// The memory of a ring in this process.
#[derive(Debug)]
struct Parts {
    desc: Slice,
    avail: Slice,
    used: Slice,
}

impl Parts {
    fn resolve(memory: &GuestMemory, layout: &Layout) -> Result<Self, RingError> {
        let part = |part, addr: u64, len: usize, align: u64| {
            if addr % align != 0 {
                return Err(RingError::Alignment { part, addr, align });
            }
            memory.slice(addr, len as u64).map_err(|error| RingError::Part { part, addr, error })
        };
        Ok(Self {
            desc: part("descriptor table", layout.desc, layout.entries() * DESCRIPTOR_SIZE, 16)?,
            avail: part("available ring", layout.avail, layout.used_event() + 2, 2)?,
            used: part("used ring", layout.used, layout.avail_event() + 2, 4)?,
        })
    }
}

/// The device side of a split virtqueue. It has one owner at a time and no locks.
#[derive(Debug)]
pub struct SplitQueue {
    memory: GuestMemory,
    layout: Layout,
    parts: Parts,
    /// Index of the next buffer to take from the available ring.
    next_avail: u16,
    /// Index of the next entry to write in the used ring.
    next_used: u16,
    /// `next_used` as last published.
    published: u16,
    /// `published` at the last call of [`SplitQueue::signal_needed`].
    signalled: u16,
}

impl SplitQueue {
    /// Makes the queue at `layout` in `memory`. It goes on at available index `base` (0 for a new queue)
    /// and at the used index that the ring itself has.
    pub fn new(memory: &GuestMemory, layout: Layout, base: u16) -> Result<Self, RingError> {
        let mut queue = Self::at(memory, layout, Position::default())?;
        let used = queue.parts.used.load_u16(IDX, Ordering::Relaxed)?;
        queue.next_avail = base;
        (queue.next_used, queue.published, queue.signalled) = (used, used, used);
        Ok(queue)
    }

    /// Makes the queue at `layout` in `memory`, which goes on where another one was: at its
    /// [position](Self::position). All that the other one gave back was published.
    pub fn at(memory: &GuestMemory, layout: Layout, position: Position) -> Result<Self, RingError> {
        if !layout.size.is_power_of_two() || layout.size > MAX_SIZE {
            return Err(RingError::Size { size: layout.size });
        }
        let parts = Parts::resolve(memory, &layout)?;
        let Position { next_avail, next_used, signalled } = position;
        let memory = memory.clone();
        Ok(Self { memory, layout, parts, next_avail, next_used, published: next_used, signalled })
    }

    /// Returns how far the device has come.
    pub fn position(&self) -> Position {
        let Self { next_avail, next_used, signalled, .. } = *self;
        Position { next_avail, next_used, signalled }
    }

    /// Takes a new memory map. On an error the queue keeps the memory that it had.
    pub fn set_memory(&mut self, memory: &GuestMemory) -> Result<(), RingError> {
        self.parts = Parts::resolve(memory, &self.layout)?;
        self.memory = memory.clone();
        Ok(())
    }

    /// Returns the place of the queue.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Returns the number of entries.
    pub fn size(&self) -> u16 {
        self.layout.size
    }

    /// Returns the index of the next available buffer that the device takes, which is the base for a
    /// queue that goes on from here.
    pub fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// Returns how many buffers the device can take.
    pub fn pending(&self) -> Result<u16, RingError> {
        let idx = self.parts.avail.load_u16(IDX, Ordering::Acquire)?;
        let count = idx.wrapping_sub(self.next_avail);
        if count > self.layout.size {
            let (next, size) = (self.next_avail, self.layout.size);
            return Err(RingError::AvailIndex { idx, next, size });
        }
        Ok(count)
    }

    /// Takes the next available buffer, if there is one. On an error the buffer stays in the queue, so
    /// that the next call finds the same error.
    pub fn pop(&mut self) -> Result<Option<Chain>, RingError> {
        let Some(head) = self.next_head()? else { return Ok(None) };
        let chain = Walk::new(&self.memory, head).run(&self.parts.desc, self.layout.entries())?;
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(Some(chain))
    }

    /// Takes the next available buffer, to give it back, and returns the index of its first descriptor.
    /// It looks at no descriptor, so it empties a queue whatever the driver wrote.
    pub fn pop_head(&mut self) -> Result<Option<u16>, RingError> {
        let head = self.next_head()?;
        self.next_avail = self.next_avail.wrapping_add(head.is_some().into());
        Ok(head)
    }

    /// Returns the index of the first descriptor of the next available buffer.
    #[inline]
    fn next_head(&self) -> Result<Option<u16>, RingError> {
        if self.pending()? == 0 {
            return Ok(None);
        }
        let slot = usize::from(self.next_avail & (self.layout.size - 1));
        Ok(Some(self.parts.avail.load_u16(ENTRIES + slot * AVAIL_ENTRY, Ordering::Relaxed)?))
    }

    /// Gives back the chain `head`, into which the device wrote the first `written` bytes. The driver
    /// sees it after [`SplitQueue::publish`].
    pub fn push(&mut self, head: u16, written: u32) -> Result<(), RingError> {
        let slot = usize::from(self.next_used & (self.layout.size - 1));
        let at = ENTRIES + slot * USED_ENTRY;
        self.parts.used.store_u32(at, head.into(), Ordering::Relaxed)?;
        self.parts.used.store_u32(at + 4, written, Ordering::Relaxed)?;
        self.next_used = self.next_used.wrapping_add(1);
        Ok(())
    }

    /// Shows the driver the chains that were given back, and returns whether there were any.
    pub fn publish(&mut self) -> Result<bool, RingError> {
        if self.published == self.next_used {
            return Ok(false);
        }
        self.parts.used.store_u16(IDX, self.next_used, Ordering::Release)?;
        self.published = self.next_used;
        Ok(true)
    }

    /// Returns whether the driver wants an interrupt for what was published since the last call.
    pub fn signal_needed(&mut self) -> Result<bool, RingError> {
        let (old, new) = (self.signalled, self.published);
        if old == new {
            return Ok(false);
        }
        self.signalled = new;
        // The driver stores whether it wants interrupts and then loads the used index; the device
        // stores the index and then loads whether the driver wants interrupts.
        fence(Ordering::SeqCst);
        if self.layout.event_idx {
            let event = self.parts.avail.load_u16(self.layout.used_event(), Ordering::Relaxed)?;
            Ok(passed(event, new, old))
        } else {
            let flags = self.parts.avail.load_u16(FLAGS, Ordering::Relaxed)?;
            Ok(flags & AVAIL_F_NO_INTERRUPT == 0)
        }
    }

    /// Returns whether the driver wants an interrupt for something published that it has not taken yet.
    /// Without EVENT_IDX the driver says only whether it wants interrupts at all.
    ///
    /// Unlike [`SplitQueue::signal_needed`] this remembers nothing. It is for queues that have a rule of
    /// their own about when to interrupt.
    pub fn wants_signal(&self) -> Result<bool, RingError> {
        fence(Ordering::SeqCst);
        if self.layout.event_idx {
            let event = self.parts.avail.load_u16(self.layout.used_event(), Ordering::Relaxed)?;
            Ok(self.published.wrapping_sub(event).wrapping_sub(1) < self.layout.size)
        } else {
            let flags = self.parts.avail.load_u16(FLAGS, Ordering::Relaxed)?;
            Ok(flags & AVAIL_F_NO_INTERRUPT == 0)
        }
    }

    /// Asks the driver to notify the device of the next available buffer. Returns whether one has come
    /// meanwhile, of which the driver may not have notified the device.
    pub fn enable_notify(&mut self) -> Result<bool, RingError> {
        if self.layout.event_idx {
            let at = self.layout.avail_event();
            self.parts.used.store_u16(at, self.next_avail, Ordering::Relaxed)?;
        } else {
            self.parts.used.store_u16(FLAGS, 0, Ordering::Relaxed)?;
        }
        // The driver stores the available index and then loads whether to notify; the device stores
        // whether to notify and then loads the available index.
        fence(Ordering::SeqCst);
        Ok(self.pending()? > 0)
    }

    /// Asks the driver for no notifications. Some may still come.
    pub fn disable_notify(&mut self) -> Result<(), RingError> {
        if self.layout.event_idx {
            // No new buffer passes an event index that is behind the available index, until the indices
            // wrap, when one needless notification comes.
            let behind = self.next_avail.wrapping_sub(1);
            self.parts.used.store_u16(self.layout.avail_event(), behind, Ordering::Relaxed)?;
        } else {
            self.parts.used.store_u16(FLAGS, USED_F_NO_NOTIFY, Ordering::Relaxed)?;
        }
        Ok(())
    }
}

/// Returns whether an index that went from `old` to `new` passed `event` (`vring_need_event()` of
/// linux/virtio_ring.h).
fn passed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(all(test, loom))]
mod orders;
