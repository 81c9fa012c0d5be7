// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The queue itself: available ring, used ring, notifications.

use std::sync::atomic::Ordering;

use memory::atomic::fence;
use memory::{GuestMemory, MemoryError, Slice};

use crate::chain::{Chain, Walk, DESCRIPTOR_SIZE};

/// Largest queue that VIRTIO allows.
pub const MAX_SIZE: u16 = 32768;

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
/// Bytes of an entry of the available ring.
const AVAIL_ENTRY: usize = 2;
/// Bytes of an entry of the used ring.
const USED_ENTRY: usize = 8;

/// What is wrong with a queue. Each is the driver's doing.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum RingError {
    /// The size is 0, no power of two, or above [`MAX_SIZE`].
    #[error("a queue cannot have {size} entries")]
    Size {
        /// The size asked for.
        size: u16,
    },
    /// A part of the ring is not where it must be: not memory, or not aligned.
    #[error("{part} at {addr:#x}: {error}")]
    Part {
        /// "descriptor table", "available ring" or "used ring".
        part: &'static str,
        /// Its address.
        addr: u64,
        /// Why it cannot be there.
        error: MemoryError,
    },
    /// A part of the ring is not aligned as VIRTIO demands.
    #[error("{part} at {addr:#x} is not a multiple of {align}")]
    Alignment {
        /// As for [`RingError::Part`].
        part: &'static str,
        /// Its address.
        addr: u64,
        /// The alignment it needs.
        align: u64,
    },
    /// More buffers are available than the queue has entries.
    #[error("the available index {idx} is more than {size} beyond {next}")]
    AvailIndex {
        /// The driver's index.
        idx: u16,
        /// The next that this side will take.
        next: u16,
        /// Entries of the queue.
        size: u16,
    },
    /// A head or `next` is beyond the table.
    #[error("descriptor {index} of a table of {size}")]
    DescriptorIndex {
        /// The index.
        index: usize,
        /// Entries of the table.
        size: usize,
    },
    /// A chain comes back to one of its descriptors.
    #[error("a descriptor chain loops")]
    Loop,
    /// A chain has more descriptors than the queue has entries.
    #[error("a descriptor chain has more than {limit} descriptors")]
    TooLong {
        /// Entries of the queue.
        limit: usize,
    },
    /// A chain has 4 GiB or more.
    #[error("a descriptor chain has 4 GiB or more")]
    TooManyBytes,
    /// A readable buffer behind a writable one.
    #[error("a readable descriptor follows a writable one")]
    Order,
    /// An indirect descriptor with NEXT.
    #[error("an indirect descriptor names a next one")]
    IndirectNext,
    /// An indirect descriptor in an indirect table.
    #[error("an indirect table holds an indirect descriptor")]
    IndirectNested,
    /// An indirect table with no entry or a part of one.
    #[error("an indirect table of {len} bytes")]
    IndirectLength {
        /// Its length.
        len: u32,
    },
    /// An indirect table outside of guest memory.
    #[error("an indirect table of {len} bytes at {addr:#x}, which is not memory of the guest")]
    IndirectTable {
        /// Its address.
        addr: u64,
        /// Its length.
        len: u32,
    },
    /// A buffer outside of guest memory.
    #[error("a buffer of {len} bytes at {addr:#x}, which is not memory of the guest")]
    Buffer {
        /// Its address.
        addr: u64,
        /// Its length.
        len: u32,
    },
    /// The ring's own memory refused an access: it was given out read-only.
    #[error("access to the ring: {0}")]
    Memory(#[from] MemoryError),
}

/// Where a queue is, in guest addresses, and how it works.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Layout {
    /// Entries, a power of two.
    pub size: u16,
    /// Descriptor table.
    pub desc: u64,
    /// Available ring, which the driver writes.
    pub avail: u64,
    /// Used ring, which the device writes.
    pub used: u64,
    /// Whether VIRTIO_F_EVENT_IDX was negotiated.
    pub event_idx: bool,
}

impl Layout {
    fn entries(&self) -> usize {
        self.size.into()
    }

    /// Offset of `used_event` in the available ring.
    fn used_event(&self) -> usize {
        ENTRIES + self.entries() * AVAIL_ENTRY
    }

    /// Offset of `avail_event` in the used ring.
    fn avail_event(&self) -> usize {
        ENTRIES + self.entries() * USED_ENTRY
    }
}

/// The memory of a ring, resolved to this process.
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

/// The device side of a split virtqueue. One owner at a time; no locks inside.
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
    /// `published` when [`SplitQueue::signal_needed`] was last asked.
    signalled: u16,
}

impl SplitQueue {
    /// A queue at `layout` in `memory`, which goes on at available index `base` (0 for a fresh
    /// queue) and at the used index that the ring itself holds.
    pub fn new(memory: &GuestMemory, layout: Layout, base: u16) -> Result<Self, RingError> {
        if !layout.size.is_power_of_two() || layout.size > MAX_SIZE {
            return Err(RingError::Size { size: layout.size });
        }
        let parts = Parts::resolve(memory, &layout)?;
        let used = parts.used.load_u16(IDX, Ordering::Relaxed)?;
        Ok(Self {
            memory: memory.clone(),
            layout,
            parts,
            next_avail: base,
            next_used: used,
            published: used,
            signalled: used,
        })
    }

    /// Follows a change of the memory map. On an error the queue keeps what it had.
    pub fn set_memory(&mut self, memory: &GuestMemory) -> Result<(), RingError> {
        self.parts = Parts::resolve(memory, &self.layout)?;
        self.memory = memory.clone();
        Ok(())
    }

    /// Entries of the queue.
    pub fn size(&self) -> u16 {
        self.layout.size
    }

    /// Index of the next available buffer that this side will take; the base to go on from.
    pub fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// Buffers that wait to be taken.
    pub fn pending(&self) -> Result<u16, RingError> {
        let idx = self.parts.avail.load_u16(IDX, Ordering::Acquire)?;
        let count = idx.wrapping_sub(self.next_avail);
        if count > self.layout.size {
            let (next, size) = (self.next_avail, self.layout.size);
            return Err(RingError::AvailIndex { idx, next, size });
        }
        Ok(count)
    }

    /// Takes the next available buffer, if there is one.
    ///
    /// On an error nothing was taken, and the next call meets the same error.
    pub fn pop(&mut self) -> Result<Option<Chain>, RingError> {
        if self.pending()? == 0 {
            return Ok(None);
        }
        let slot = usize::from(self.next_avail & (self.layout.size - 1));
        let head = self.parts.avail.load_u16(ENTRIES + slot * AVAIL_ENTRY, Ordering::Relaxed)?;
        let chain = Walk::new(&self.memory, head, self.layout.size).run(&self.parts.desc)?;
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(Some(chain))
    }

    /// Takes the next available buffer without looking at its descriptors, to give it back.
    ///
    /// So a queue is emptied whatever the driver wrote into it.
    pub fn pop_head(&mut self) -> Result<Option<u16>, RingError> {
        if self.pending()? == 0 {
            return Ok(None);
        }
        let slot = usize::from(self.next_avail & (self.layout.size - 1));
        let head = self.parts.avail.load_u16(ENTRIES + slot * AVAIL_ENTRY, Ordering::Relaxed)?;
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(Some(head))
    }

    /// Gives back the chain `head`, into which `written` bytes were written from its beginning.
    ///
    /// The driver sees it after [`SplitQueue::publish`].
    pub fn push(&mut self, head: u16, written: u32) -> Result<(), RingError> {
        let slot = usize::from(self.next_used & (self.layout.size - 1));
        let at = ENTRIES + slot * USED_ENTRY;
        self.parts.used.store_u32(at, head.into(), Ordering::Relaxed)?;
        self.parts.used.store_u32(at + 4, written, Ordering::Relaxed)?;
        self.next_used = self.next_used.wrapping_add(1);
        Ok(())
    }

    /// Shows the driver everything pushed so far, and says whether that was anything.
    pub fn publish(&mut self) -> Result<bool, RingError> {
        if self.published == self.next_used {
            return Ok(false);
        }
        self.parts.used.store_u16(IDX, self.next_used, Ordering::Release)?;
        self.published = self.next_used;
        Ok(true)
    }

    /// Whether the driver wants an interrupt for what was published since this was last asked.
    pub fn signal_needed(&mut self) -> Result<bool, RingError> {
        let (old, new) = (self.signalled, self.published);
        if old == new {
            return Ok(false);
        }
        self.signalled = new;
        // The driver stores its wish and then looks at the used index; this side publishes the
        // index and then looks at the wish.
        fence(Ordering::SeqCst);
        if self.layout.event_idx {
            let event = self.parts.avail.load_u16(self.layout.used_event(), Ordering::Relaxed)?;
            Ok(passed(event, new, old))
        } else {
            let flags = self.parts.avail.load_u16(FLAGS, Ordering::Relaxed)?;
            Ok(flags & AVAIL_F_NO_INTERRUPT == 0)
        }
    }

    /// Whether the driver lets itself be interrupted for something published that it has not taken
    /// yet, as far as it said: without EVENT_IDX it says only whether it wants interrupts.
    ///
    /// Unlike [`SplitQueue::signal_needed`] this remembers nothing, for queues that have a rule of
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

    /// Asks the driver to notify this side of the next available buffer, and says whether one has
    /// come meanwhile, for which no notification may be under way.
    pub fn enable_notify(&mut self) -> Result<bool, RingError> {
        if self.layout.event_idx {
            let at = self.layout.avail_event();
            self.parts.used.store_u16(at, self.next_avail, Ordering::Relaxed)?;
        } else {
            self.parts.used.store_u16(FLAGS, 0, Ordering::Relaxed)?;
        }
        // The driver stores the available index and then looks at the wish; this side the reverse.
        fence(Ordering::SeqCst);
        Ok(self.pending()? > 0)
    }

    /// Asks the driver for no notifications. Some may still come.
    pub fn disable_notify(&mut self) -> Result<(), RingError> {
        if self.layout.event_idx {
            // An event index that lies behind is passed by no new buffer (until the indices wrap,
            // when one needless notification comes).
            let behind = self.next_avail.wrapping_sub(1);
            self.parts.used.store_u16(self.layout.avail_event(), behind, Ordering::Relaxed)?;
        } else {
            self.parts.used.store_u16(FLAGS, USED_F_NO_NOTIFY, Ordering::Relaxed)?;
        }
        Ok(())
    }
}

/// `vring_need_event`: whether an index that went from `old` to `new` passed `event`.
fn passed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(all(test, loom))]
mod orders;
