// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Send, receive and shared receive rings in guest memory (specification, Rings).

use std::mem::offset_of;
use std::sync::atomic::Ordering;
use std::sync::Arc;

use abi::{virtio_rdma_qp_ring, virtio_rdma_ring_shape, virtio_rdma_srq_ring};
use memory::atomic::fence;
use memory::{MemoryError, Pages};
use serde::{Deserialize, Serialize};
use zerocopy::FromZeros;

use super::entry::Entry;
use super::wqe::receive_entry_len;
use crate::base::image::{require, Wrong};
use crate::base::limits::MAX_SGE;
use crate::memory::page_list::PAGE_SIZE;

/// Smallest and largest stride.
const STRIDES: std::ops::RangeInclusive<u32> = 32..=4096;

/// Bytes of an entry that are prefetched before it is taken, at most.
const MOST_PREFETCHED: u32 = 128;

/// The number of entries that are asked for ahead of the one that is taken. Another processor wrote them, so that several
/// come at the same time. Eight were no faster than four.
const AHEAD: u32 = 4;

/// Bytes of an entry that is moved, at most: those of a receive with all SGEs.
const MOST_MOVED: usize = receive_entry_len(MAX_SGE);

/// The purpose of a ring, which decides the places of the fields of its head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The send ring of a QP.
    Send,
    /// The receive ring of a QP.
    Receive,
    /// The ring of an SRQ.
    Shared,
}

/// The error of a ring. In each case the ring's owner has made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WqRingError {
    /// The owner posted more than the ring holds, or moved the index back.
    #[error("the producer index {producer} is not within {depth} of {next}")]
    Producer {
        /// The index.
        producer: u32,
        /// The next that this side takes.
        next: u32,
        /// Entries of the ring.
        depth: u32,
    },
    /// The ring is not where its guest said.
    #[error("access to the ring: {0}")]
    Memory(#[from] MemoryError),
}

/// A ring's place in its region, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Entries; 0 if there is no such ring.
    pub depth: u32,
    /// Bytes of an entry, as a power of two.
    stride_log2: u32,
    /// Offset of the first entry in the region.
    offset: usize,
}

impl Shape {
    /// Checks a shape: at least `least` and at most `most` entries, each with
    /// room for `bytes`. `None` if it is not valid.
    pub fn check(
        shape: &virtio_rdma_ring_shape,
        least: u32,
        most: u32,
        bytes: usize,
    ) -> Option<Self> {
        let virtio_rdma_ring_shape { depth, stride, offset, .. } = *shape;
        if depth == 0 {
            return (least == 0).then_some(Self { depth, stride_log2: 0, offset: 0 });
        }
        let head = size_of::<virtio_rdma_qp_ring>();
        let valid = depth.is_power_of_two()
            && (least..=most).contains(&depth)
            && stride.is_power_of_two()
            && STRIDES.contains(&stride)
            && stride as usize >= bytes
            && offset % stride == 0
            && offset as usize >= head;
        valid.then(|| Self { depth, stride_log2: stride.ilog2(), offset: offset as usize })
    }

    /// Returns how many pages the ring touches, wherever in its region it begins.
    pub fn most_pages(&self) -> u64 {
        let bytes = u64::from(self.depth) << self.stride_log2;
        bytes.div_ceil(PAGE_SIZE) + u64::from(bytes != 0)
    }

    /// Returns where the ring ends in the region.
    pub fn end(&self) -> u64 {
        self.offset as u64 + (u64::from(self.depth) << self.stride_log2)
    }

    /// Returns how many bytes of an entry are prefetched: as many as most entries have.
    #[inline]
    fn prefetched(&self) -> usize {
        1 << self.stride_log2.min(MOST_PREFETCHED.ilog2())
    }

    /// Returns where entry `index` is in the region. The ring must have entries.
    #[inline]
    fn entry(&self, index: u32) -> usize {
        let place = (index & (self.depth - 1)) as usize;
        self.offset + (place << self.stride_log2)
    }
}

/// The device's side of a send, receive or shared receive ring.
pub(crate) struct WqRing {
    /// `None` while the region is not in the guest's memory.
    pages: Option<Arc<Pages>>,
    shape: Shape,
    kind: Kind,
    /// Index of the next entry to take.
    next: u32,
    /// The producer's index, as it was last read.
    limit: u32,
    /// The producer went wrong; the ring is empty until it is reset.
    broken: bool,
}

/// The image of the ring of a work queue. The index up to which the owner has produced is read again.
#[derive(Serialize, Deserialize)]
pub(crate) struct WqRingImage {
    depth: u32,
    stride: u32,
    offset: u32,
    next: u32,
    broken: bool,
    has_pages: bool,
}

impl WqRingImage {
    /// Returns the ring with its shape, whose region has `len` bytes. `pages` finds the region.
    pub fn load(
        &self,
        kind: Kind,
        sizes: Sizes,
        len: u64,
        pages: Option<&Arc<Pages>>,
    ) -> Result<WqRing, Wrong> {
        let Self { depth, stride, offset, next, broken, has_pages } = *self;
        let shape = virtio_rdma_ring_shape { depth, stride, offset, ..FromZeros::new_zeroed() };
        let Sizes { least, most, entry } = sizes;
        let shape = Shape::check(&shape, least, most, entry).ok_or("a ring has another shape")?;
        require(shape.end() <= len, "a ring is beyond its region")?;
        require(has_pages == pages.is_some(), "one ring of a region is lost")?;
        Ok(WqRing { pages: pages.cloned(), shape, kind, next, limit: next, broken })
    }

    /// Returns whether the region was in memory.
    pub fn has_pages(&self) -> bool {
        self.has_pages
    }
}

/// The bounds of the shape of a ring: the fewest and the most entries, and the bytes that an entry needs.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    /// The fewest entries.
    pub least: u32,
    /// The most entries.
    pub most: u32,
    /// The bytes that an entry needs.
    pub entry: usize,
}

/// Returns how many entries wait behind those before `next`.
fn count(pages: &Pages, producer: usize, next: u32, depth: u32) -> u32 {
    let producer = pages.load_u32(producer, Ordering::Relaxed).unwrap_or(next);
    producer.wrapping_sub(next).min(depth)
}

/// A count of the entries that wait in a queue, which is taken later: the owner's index is read when the queue's lock
/// is released, because an access to the guest's memory may take long.
pub(crate) struct Backlog {
    pages: Option<Arc<Pages>>,
    /// The offset of the owner's index.
    producer: usize,
    next: u32,
    depth: u32,
    /// Work requests that wait besides.
    known: u32,
}

impl Backlog {
    /// Returns the backlog of so many work requests, which reads no memory.
    pub fn known(known: u32) -> Self {
        Self { pages: None, producer: 0, next: 0, depth: 0, known }
    }

    /// Adds work requests that wait besides.
    pub fn and(mut self, known: u32) -> Self {
        self.known = self.known.saturating_add(known);
        self
    }

    /// Reads the owner's index, and returns how many work requests wait.
    pub fn count(&self) -> u32 {
        let in_ring =
            self.pages.as_ref().map_or(0, |it| count(it, self.producer, self.next, self.depth));
        self.known.saturating_add(in_ring)
    }
}

impl WqRing {
    /// Returns the image.
    pub fn save(&self) -> WqRingImage {
        let Shape { depth, stride_log2, offset } = self.shape;
        let offset = u32::try_from(offset).unwrap_or(u32::MAX);
        let (next, broken, has_pages) = (self.next, self.broken, self.pages.is_some());
        WqRingImage { depth, stride: 1 << stride_log2, offset, next, broken, has_pages }
    }

    /// Returns a ring of a QP in RESET.
    pub fn new(pages: Arc<Pages>, shape: Shape, kind: Kind) -> Self {
        Self { pages: Some(pages), shape, kind, next: 0, limit: 0, broken: false }
    }

    /// Returns whether the ring is not in memory.
    pub fn is_lost(&self) -> bool {
        self.pages.is_none()
    }

    /// Follows a change of the memory map; whether the ring is back in memory by that.
    pub fn set_pages(&mut self, pages: Option<Arc<Pages>>) -> bool {
        let was_lost = self.is_lost();
        self.pages = pages;
        was_lost && self.pages.is_some()
    }

    fn producer(&self) -> usize {
        match self.kind {
            Kind::Send => offset_of!(virtio_rdma_qp_ring, sq_producer),
            Kind::Receive => offset_of!(virtio_rdma_qp_ring, rq_producer),
            Kind::Shared => offset_of!(virtio_rdma_srq_ring, producer),
        }
    }

    fn wake(&self) -> usize {
        match self.kind {
            Kind::Send => offset_of!(virtio_rdma_qp_ring, sq_wake),
            Kind::Receive => offset_of!(virtio_rdma_qp_ring, rq_wake),
            Kind::Shared => offset_of!(virtio_rdma_srq_ring, wake),
        }
    }

    /// Tells the owner of an SRQ that the entries that were taken are copied.
    pub fn publish_consumer(&mut self) {
        if let Some(pages) = &self.pages {
            let consumer = offset_of!(virtio_rdma_srq_ring, consumer);
            // The head is within the region, checked at creation.
            let _ = pages.store_u32(consumer, self.next, Ordering::Release);
        }
    }

    /// Takes the next entry: its index and where it is. An error is reported
    /// once; from then on the ring is empty until it is reset.
    #[inline(always)]
    pub fn pop(&mut self) -> Result<Option<(u32, Entry<'_>)>, WqRingError> {
        if self.next == self.limit && !self.look()? {
            return Ok(None);
        }
        let Some(pages) = &self.pages else { return Ok(None) };
        let index = self.next;
        self.next = index.wrapping_add(1);
        self.prefetch_ahead(pages);
        Ok(Some((index, Entry::new(pages, self.shape.entry(index)))))
    }

    /// Reads the producer's index; whether there is something to take.
    fn look(&mut self) -> Result<bool, WqRingError> {
        let Some(pages) = &self.pages else { return Ok(false) };
        if self.broken || self.shape.depth == 0 {
            return Ok(false);
        }
        let (next, depth) = (self.next, self.shape.depth);
        let producer = pages.load_u32(self.producer(), Ordering::Acquire)?;
        if producer.wrapping_sub(next) > depth {
            self.broken = true;
            return Err(WqRingError::Producer { producer, next, depth });
        }
        self.limit = producer;
        for ahead in 1..producer.wrapping_sub(next).min(AHEAD) {
            self.prefetch(pages, ahead);
        }
        Ok(producer != next)
    }

    /// Asks for the entry that is [`AHEAD`] behind the one that was just taken, if it is there: another processor wrote
    /// it, and it comes while those before it are carried out.
    #[inline]
    fn prefetch_ahead(&self, pages: &Pages) {
        if self.limit.wrapping_sub(self.next) >= AHEAD {
            self.prefetch(pages, AHEAD - 1);
        }
    }

    /// Asks for the entry that is so many behind the next one.
    #[inline]
    fn prefetch(&self, pages: &Pages, behind: u32) {
        let entry = self.shape.entry(self.next.wrapping_add(behind));
        pages.prefetch(entry, self.shape.prefetched());
    }

    /// Returns how far entries were taken.
    pub fn taken(&self) -> u32 {
        self.next
    }

    /// Returns a watch of the next entry; `None` while the ring is not in memory.
    pub fn watch(&self) -> Option<Watch> {
        let pages = Arc::clone(self.pages.as_ref()?);
        Some(Watch { pages, producer: self.producer(), taken: self.next })
    }

    /// Returns how many entries wait to be taken.
    #[inline]
    pub fn waiting(&self) -> u32 {
        let Some(pages) = &self.pages else { return 0 };
        count(pages, self.producer(), self.next, self.shape.depth)
    }

    /// Returns the backlog of entries that wait.
    pub fn backlog(&self) -> Backlog {
        let (producer, next, depth) = (self.producer(), self.next, self.shape.depth);
        Backlog { pages: self.pages.clone(), producer, next, depth, known: 0 }
    }

    /// Says that this side no longer looks, and looks once more; whether there
    /// is something to take, or to report.
    pub fn sleep(&mut self) -> bool {
        self.set_wake(1);
        fence(Ordering::SeqCst);
        let may_pop = !self.broken && self.pages.is_some();
        may_pop && (self.next != self.limit || self.look_again())
    }

    /// Looks as `look` does, but leaves an error to be found by `pop`.
    fn look_again(&self) -> bool {
        let Some(pages) = &self.pages else { return false };
        self.shape.depth != 0 && pages.load_u32(self.producer(), Ordering::Acquire) != Ok(self.next)
    }

    /// Says that this side looks again.
    pub fn wake_up(&mut self) {
        self.set_wake(0);
    }

    fn set_wake(&mut self, value: u32) {
        if let Some(pages) = &self.pages {
            // The head is within the region, checked at creation.
            let _ = pages.store_u32(self.wake(), value, Ordering::Relaxed);
        }
    }

    /// Begins to move the ring of an SRQ, and the entries that wait in it to index 0 and on; the first `len` bytes of
    /// an entry count. `None` if the entries do not fit there. An error is one of the old ring.
    pub fn begin_move(
        &mut self,
        pages: Pages,
        shape: Shape,
        len: usize,
    ) -> Result<Option<MovingWq>, WqRingError> {
        self.look()?;
        let moving = MovingWq { pages, shape, len, from: self.next, moved: 0 };
        Ok(self.left(&moving).map(|_| moving))
    }

    /// Returns how many entries are yet to be moved; `None` if they do not fit.
    fn left(&self, moving: &MovingWq) -> Option<u32> {
        let count = self.limit.wrapping_sub(moving.from);
        if count > self.shape.depth.min(moving.shape.depth) {
            return None;
        }
        count.checked_sub(moving.moved)
    }

    /// Moves up to `most` entries; how many. `None` if they do not fit, or one of the two rings is
    /// not in memory.
    pub fn move_some(&self, moving: &mut MovingWq, most: u32) -> Option<u32> {
        let old = self.pages.as_ref()?;
        let count = self.left(moving)?.min(most);
        let mut bytes = [0; MOST_MOVED];
        let bytes = bytes.get_mut(..moving.len)?;
        for _ in 0..count {
            let from = self.shape.entry(moving.from.wrapping_add(moving.moved));
            old.read(from, bytes).ok()?;
            moving.pages.write(moving.shape.entry(moving.moved), bytes).ok()?;
            moving.moved += 1;
        }
        Some(count)
    }

    /// Goes on in the other ring. Returns the number of entries that were moved there, of which some may have been
    /// taken meanwhile. `None`, and the old ring is still in use, if the entries do not fit. An error is one of the old
    /// ring.
    pub fn end_move(&mut self, mut moving: MovingWq) -> Result<Option<u32>, WqRingError> {
        self.look()?;
        if self.move_some(&mut moving, u32::MAX).is_none() {
            return Ok(None);
        }
        let MovingWq { pages, shape, from, moved, .. } = moving;
        let taken = self.next.wrapping_sub(from);
        let consumer = offset_of!(virtio_rdma_srq_ring, consumer);
        pages.store_u32(consumer, taken, Ordering::Relaxed)?;
        pages.store_u32(self.producer(), moved, Ordering::Release)?;
        (self.pages, self.shape) = (Some(Arc::new(pages)), shape);
        (self.next, self.limit) = (taken, moved);
        Ok(Some(moved))
    }

    /// Forgets the entries that are posted, as RESET does.
    pub fn reset(&mut self) {
        self.next = 0;
        self.limit = 0;
        self.broken = false;
        self.wake_up();
    }
}

/// A ring that takes the place of that of an SRQ, and has a part of its entries so far.
pub(crate) struct MovingWq {
    pages: Pages,
    shape: Shape,
    /// Bytes of an entry.
    len: usize,
    /// Index in the old ring of the entry with index 0 in this one.
    from: u32,
    moved: u32,
}

/// Tells whether something was posted to a ring, without the ring. It is a hint: taking an entry checks
/// what the owner wrote. A change of the memory map, and a ring that is reset or replaced, need a new
/// watch.
pub(crate) struct Watch {
    pages: Arc<Pages>,
    /// The offset of the producer's index.
    producer: usize,
    taken: u32,
}

impl Watch {
    /// Returns whether there may be something to take, or to report.
    #[inline]
    pub fn has_work(&self) -> bool {
        self.pages.load_u32(self.producer, Ordering::Relaxed) != Ok(self.taken)
    }

    /// Follows the ring, from which entries were taken so far.
    pub fn follow(&mut self, taken: u32) {
        self.taken = taken;
    }
}

#[cfg(test)]
mod tests {
    use memory::GuestMemory;

    use super::*;

    fn ring(memory: &GuestMemory, depth: u32) -> WqRing {
        let pages = Arc::new(Pages::new(memory, [(0, 0x1000)]).unwrap());
        let shape = virtio_rdma_ring_shape { depth, stride: 32, offset: 256, reserved_0c: 0 };
        let shape = Shape::check(&shape, 1, 64, 32).unwrap();
        WqRing::new(pages, shape, Kind::Send)
    }

    fn produce(memory: &GuestMemory, index: u32) {
        memory.write(0, &index.to_le_bytes()).unwrap();
    }

    #[test]
    fn indices_wrap() {
        let memory = GuestMemory::anonymous(&[(0, 0x1000)]).unwrap();
        let mut ring = ring(&memory, 4);
        let start = u32::MAX - 5;
        (ring.next, ring.limit) = (start, start);
        produce(&memory, start);
        for step in 0..12_u32 {
            let index = start.wrapping_add(step);
            assert!(matches!(ring.pop(), Ok(None)));
            memory.write(256 + 32 * u64::from(index % 4), &index.to_le_bytes()).unwrap();
            produce(&memory, index.wrapping_add(1));
            let (found, entry) = ring.pop().unwrap().unwrap();
            let mut bytes = [0; 4];
            entry.read(0, &mut bytes).unwrap();
            assert_eq!((found, u32::from_le_bytes(bytes)), (index, index));
        }
    }

    #[test]
    fn a_producer_that_runs_away_is_told_once() {
        let memory = GuestMemory::anonymous(&[(0, 0x1000)]).unwrap();
        for (next, producer) in [(0, 5), (3, 2), (0, u32::MAX)] {
            let mut ring = ring(&memory, 4);
            (ring.next, ring.limit) = (next, next);
            produce(&memory, producer);
            let error = WqRingError::Producer { producer, next, depth: 4 };
            assert!(ring.sleep());
            assert_eq!(ring.pop().err(), Some(error));
            assert!(matches!(ring.pop(), Ok(None)) && !ring.sleep());
            ring.reset();
            produce(&memory, 0);
            assert!(matches!(ring.pop(), Ok(None)));
        }
    }

    #[test]
    fn a_sleeper_is_told_of_what_came() {
        let memory = GuestMemory::anonymous(&[(0, 0x1000)]).unwrap();
        let mut ring = ring(&memory, 4);
        let wake = || memory.read_obj::<u32>(128).unwrap();
        assert!(!ring.sleep());
        assert_eq!(wake(), 1);
        produce(&memory, 1);
        assert!(ring.sleep());
        ring.wake_up();
        assert_eq!((wake(), ring.waiting()), (0, 1));
    }

    #[test]
    fn a_ring_that_is_not_in_memory_is_empty() {
        let memory = GuestMemory::anonymous(&[(0, 0x1000)]).unwrap();
        let mut ring = ring(&memory, 4);
        produce(&memory, 3);
        assert!(matches!(ring.pop(), Ok(Some((0, _)))));
        let pages = ring.pages.clone();
        // The ring has seen two more entries already.
        assert!(!ring.set_pages(None));
        assert!(matches!(ring.pop(), Ok(None)));
        assert!(!ring.sleep());
        assert_eq!(ring.waiting(), 0);
        assert!(ring.set_pages(pages.clone()) && !ring.set_pages(pages));
        assert!(ring.sleep());
        let mut found = Vec::new();
        while let Ok(Some((index, _))) = ring.pop() {
            found.push(index);
        }
        assert_eq!((found, ring.sleep()), (vec![1, 2], false));
    }

    #[test]
    fn resizing_moves_what_waits() {
        let memory = GuestMemory::anonymous(&[(0, 0x2000)]).unwrap();
        let shape = |depth, stride| {
            let shape = virtio_rdma_ring_shape { depth, stride, offset: 256, reserved_0c: 0 };
            Shape::check(&shape, 1, 64, 32).unwrap()
        };
        let pages = |addr| Pages::new(&memory, [(addr, 0x1000)]).unwrap();
        let mut ring = WqRing::new(Arc::new(pages(0)), shape(4, 32), Kind::Shared);
        let start = u32::MAX - 1;
        (ring.next, ring.limit) = (start, start);
        for step in 0..4_u32 {
            let index = start.wrapping_add(step);
            memory.write(256 + 32 * u64::from(index % 4), &(100 + step).to_le_bytes()).unwrap();
        }
        produce(&memory, start.wrapping_add(4));
        assert!(matches!(ring.pop(), Ok(Some(_))));
        assert!(ring.begin_move(pages(0x1000), shape(2, 64), 32).unwrap().is_none());
        let mut moving = ring.begin_move(pages(0x1000), shape(8, 64), 32).unwrap().unwrap();
        assert_eq!(ring.move_some(&mut moving, 2), Some(2));
        assert_eq!(ring.end_move(moving), Ok(Some(3)));
        // The old ring has no effect any more.
        produce(&memory, 77);
        assert_eq!(memory.read_obj::<u32>(0x1000), Ok(3));
        memory.write(0x1000, &4_u32.to_le_bytes()).unwrap();
        memory.write(0x1000 + 256 + 3 * 64, &104_u32.to_le_bytes()).unwrap();
        for index in 0..4 {
            let (found, entry) = ring.pop().unwrap().unwrap();
            let mut bytes = [0; 4];
            entry.read(0, &mut bytes).unwrap();
            assert_eq!((found, u32::from_le_bytes(bytes)), (index, 101 + index));
        }
        assert!(matches!(ring.pop(), Ok(None)));
        memory.write(0x1000, &99_u32.to_le_bytes()).unwrap();
        assert!(ring.begin_move(pages(0), shape(4, 32), 32).is_err());
    }

    #[test]
    fn shapes_are_checked() {
        let check = |depth, stride, offset| {
            let shape = virtio_rdma_ring_shape { depth, stride, offset, reserved_0c: 0 };
            Shape::check(&shape, 2, 64, 80).is_some()
        };
        assert!(check(64, 128, 256) && check(2, 4096, 4096));
        for (depth, stride, offset) in [
            (0, 128, 256),
            (1, 128, 256),
            (3, 128, 256),
            (128, 128, 256),
            (64, 0, 0),
            (64, 0, 256),
            (64, 64, 256),
            (64, 96, 288),
            (64, 8192, 8192),
            (64, 128, 128),
            (64, 128, 257),
        ] {
            assert!(!check(depth, stride, offset), "{depth} {stride} {offset}");
        }
        let none = virtio_rdma_ring_shape { depth: 0, stride: 9, offset: 9, reserved_0c: 0 };
        assert_eq!(Shape::check(&none, 0, 64, 80).map(|shape| shape.end()), Some(0));
    }
}
