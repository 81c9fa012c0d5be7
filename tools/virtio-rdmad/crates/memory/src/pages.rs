// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A region of guest memory that consists of pages.

use std::ptr::NonNull;
use std::sync::atomic::Ordering;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::Arc;

use crate::mapping::Mapping;
use crate::prefetch::lines;
use crate::{GuestMemory, MemoryError, PAGE_SIZE};

/// The place of the pages in this process.
#[derive(Debug)]
enum Place {
    /// They follow each other from here on: to find an address takes an addition.
    Contiguous(NonNull<u8>),
    /// Each has its own place: to find an address takes a look into this table.
    Scattered(Vec<NonNull<u8>>),
    /// They are in a model of memory, where a test watches each access.
    #[cfg(loom)]
    Modelled(Arc<litmus::Memory>),
}

/// Words of 64 bits that follow each other.
#[cfg(not(loom))]
struct Words<'a> {
    first: NonNull<u64>,
    pages: std::marker::PhantomData<&'a Pages>,
}

#[cfg(not(loom))]
impl<'a> Words<'a> {
    /// Returns the word with this index.
    ///
    /// # Safety
    ///
    /// There must be more words than `index`.
    #[inline]
    unsafe fn at(&self, index: usize) -> &'a AtomicU64 {
        // SAFETY: the caller promises that there are more words than `index`.
        let place = unsafe { self.first.add(index) };
        // SAFETY: the word is within the region, and aligned as the first one is. Everybody who maps
        // the page may access it at the same time, by atomics.
        unsafe { AtomicU64::from_ptr(place.as_ptr()) }
    }
}

/// Words of 64 bits in a model of memory.
#[cfg(loom)]
struct Words<'a> {
    memory: &'a litmus::Memory,
    offset: usize,
}

#[cfg(loom)]
impl<'a> Words<'a> {
    unsafe fn at(&self, index: usize) -> litmus::Word64<'a> {
        litmus::Word64::new(self.memory, self.offset + index * size_of::<u64>())
    }
}

/// A region of whole pages, with words that the guest and this process share. The pages are found
/// once, when the region is made.
///
/// A region is for rings: an access never goes from one page to the next. The region keeps its mappings
/// alive, as a [`crate::Slice`] does: after a change of the memory map it still reaches the bytes
/// that it was made for, and nothing else. Every access is checked against its bounds.
#[derive(Debug)]
pub struct Pages {
    place: Place,
    len: usize,
    /// The mappings that `place` points into, which this keeps alive. Each is here once; they are in
    /// the order of their addresses.
    mappings: Vec<Arc<Mapping>>,
}

// SAFETY: the pointers lead into `mappings`, which are `Send` and `Sync`; they are reached by raw
// copies and atomics only, which are defined from every thread.
unsafe impl Send for Pages {}
// SAFETY: as for `Send`; no method returns a reference to plain bytes of the pages.
unsafe impl Sync for Pages {}

impl Pages {
    /// Finds the pages of these ranges, one range after the other. Each range must consist of whole
    /// pages, and all of it must be memory that may be written.
    pub fn new(
        memory: &GuestMemory,
        ranges: impl IntoIterator<Item = (u64, u64)>,
    ) -> Result<Self, MemoryError> {
        let mut pages = Self::empty();
        for (addr, len) in ranges {
            pages.extend(memory, addr, len)?;
        }
        pages.seal();
        Ok(pages)
    }

    /// Makes a region of a model of memory.
    #[cfg(loom)]
    pub fn modelled(memory: Arc<litmus::Memory>) -> Self {
        Self { place: Place::Modelled(memory), len: PAGE_SIZE, mappings: Vec::new() }
    }

    /// Makes a region without pages, for [`Self::extend`].
    pub fn empty() -> Self {
        Self { place: Place::Scattered(Vec::new()), len: 0, mappings: Vec::new() }
    }

    /// Appends the pages of a range, as [`Self::new`] does, to a region that is not sealed. After an
    /// error the region must not be used.
    pub fn extend(&mut self, memory: &GuestMemory, addr: u64, len: u64) -> Result<(), MemoryError> {
        let Place::Scattered(pages) = &mut self.place else {
            return Err(MemoryError::Unmapped { addr, len });
        };
        if addr % PAGE_SIZE as u64 != 0 || len % PAGE_SIZE as u64 != 0 {
            return Err(MemoryError::Misaligned { align: PAGE_SIZE });
        }
        let mut done = 0;
        while done < len {
            let at = addr.checked_add(done).ok_or(MemoryError::Unmapped { addr, len })?;
            let (page, mapping) = memory.page(at)?;
            let place = self.mappings.binary_search_by_key(&Arc::as_ptr(mapping), Arc::as_ptr);
            if let Err(place) = place {
                self.mappings.insert(place, Arc::clone(mapping));
            }
            pages.push(page);
            self.len += PAGE_SIZE;
            done += PAGE_SIZE as u64;
        }
        Ok(())
    }

    /// Ends the region, and makes access to it fast if its pages follow each other.
    pub fn seal(&mut self) {
        let Place::Scattered(pages) = &mut self.place else { return };
        pages.shrink_to_fit();
        let next = |page: &NonNull<u8>| page.as_ptr() as usize + PAGE_SIZE;
        // Pages that follow each other may be of different mappings; a pointer into one mapping must
        // not be used for the other.
        let is_contiguous = self.mappings.len() == 1
            && pages.windows(2).all(|pair| next(&pair[0]) == pair[1].as_ptr() as usize);
        if let (true, Some(first)) = (is_contiguous, pages.first()) {
            self.place = Place::Contiguous(*first);
        }
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the region has no pages.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of entries of the region's table; 0 if its pages follow each other.
    pub fn table_len(&self) -> usize {
        match &self.place {
            Place::Contiguous(_) => 0,
            Place::Scattered(pages) => pages.len(),
            #[cfg(loom)]
            Place::Modelled(_) => 0,
        }
    }

    /// Copies the bytes from `offset` on into `to`. They must be in one page.
    #[inline]
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<(), MemoryError> {
        #[cfg(loom)]
        if let Place::Modelled(memory) = &self.place {
            memory.read(offset, to);
            return Ok(());
        }
        let from = self.at(offset, to.len())?;
        // SAFETY: `at` checked the range; `to` is memory of this process that no guest maps, so
        // the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Asks the processor for the cache lines of `len` bytes at `offset`, which are read soon. Does
    /// nothing if there is no such page.
    #[inline]
    pub fn prefetch(&self, offset: usize, len: usize) {
        if let Ok(addr) = self.at(offset, 1) {
            lines(addr.as_ptr(), len);
        }
    }

    /// Copies `from` to `offset`. The target must be in one page.
    #[inline]
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<(), MemoryError> {
        #[cfg(loom)]
        if let Place::Modelled(memory) = &self.place {
            memory.write(offset, from);
            return Ok(());
        }
        let to = self.at(offset, from.len())?;
        // SAFETY: `at` checked the range; `from` is memory of this process that no guest maps.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len()) };
        Ok(())
    }

    /// Writes `words` from `offset` on, which is a multiple of 8, within one page: in their order, each
    /// by one store, and the last one with release semantics.
    #[inline]
    pub fn publish(&self, offset: usize, words: &[u64]) -> Result<(), MemoryError> {
        let Some((last, body)) = words.split_last() else { return Ok(()) };
        let to = self.words(offset, words.len())?;
        for (index, word) in body.iter().enumerate() {
            // SAFETY: there are as many words at `offset` as in `words`, and this is not the last.
            unsafe { to.at(index) }.store(*word, Ordering::Relaxed);
        }
        // SAFETY: this is the last of these words.
        unsafe { to.at(body.len()) }.store(*last, Ordering::Release);
        Ok(())
    }

    /// Loads a little-endian 32-bit word from a multiple of 4.
    ///
    /// `order` is `Relaxed`, `Acquire` or `SeqCst`, as for an atomic load.
    #[inline]
    pub fn load_u32(&self, offset: usize, order: Ordering) -> Result<u32, MemoryError> {
        Ok(u32::from_le(self.word(offset)?.load(order)))
    }

    /// Stores a little-endian 32-bit word at a multiple of 4.
    ///
    /// `order` is `Relaxed`, `Release` or `SeqCst`, as for an atomic store.
    #[inline]
    pub fn store_u32(&self, offset: usize, value: u32, order: Ordering) -> Result<(), MemoryError> {
        self.word(offset)?.store(value.to_le(), order);
        Ok(())
    }

    /// Returns the word at `offset`, a multiple of 4.
    #[cfg(not(loom))]
    #[inline]
    fn word(&self, offset: usize) -> Result<&AtomicU32, MemoryError> {
        let word = self.aligned::<u32>(offset, 1)?;
        // SAFETY: the word is within the region and aligned, and all pages may be written. Everybody who
        // maps the page may access it at the same time, by atomics.
        Ok(unsafe { AtomicU32::from_ptr(word.as_ptr()) })
    }

    /// Returns the `count` words at `offset`, a multiple of 8, within one page.
    #[cfg(not(loom))]
    #[inline]
    fn words(&self, offset: usize, count: usize) -> Result<Words<'_>, MemoryError> {
        let first = self.aligned(offset, count)?;
        Ok(Words { first, pages: std::marker::PhantomData })
    }

    #[cfg(loom)]
    fn word(&self, offset: usize) -> Result<&litmus::AtomicU32, MemoryError> {
        self.model(offset).map(|memory| memory.word(offset))
    }

    #[cfg(loom)]
    fn words(&self, offset: usize, _count: usize) -> Result<Words<'_>, MemoryError> {
        self.model(offset).map(|memory| Words { memory, offset })
    }

    #[cfg(loom)]
    fn model(&self, offset: usize) -> Result<&litmus::Memory, MemoryError> {
        match &self.place {
            Place::Modelled(memory) => Ok(memory),
            _ => Err(MemoryError::Bounds { offset, len: 0, have: 0 }),
        }
    }

    /// Returns the address of `[offset, offset + len)`, if that lies within one page of the region.
    #[inline]
    fn at(&self, offset: usize, len: usize) -> Result<NonNull<u8>, MemoryError> {
        let within = offset % PAGE_SIZE;
        // The region has whole pages, so a range that begins in it and stays in a page is all in it.
        if offset >= self.len || len > PAGE_SIZE - within {
            return Err(MemoryError::Bounds { offset, len, have: self.len });
        }
        match &self.place {
            // SAFETY: `offset` is less than the length of the region, which is all in one mapping.
            Place::Contiguous(base) => Ok(unsafe { base.add(offset) }),
            // SAFETY: `within` is less than the size of the page that the pointer leads to.
            Place::Scattered(pages) => Ok(unsafe { pages[offset / PAGE_SIZE].add(within) }),
            #[cfg(loom)]
            Place::Modelled(_) => Err(MemoryError::Bounds { offset, len, have: 0 }),
        }
    }

    /// Returns the address of `count` values of `T` at `offset`, which is a multiple of their size.
    #[inline]
    #[cfg_attr(loom, allow(dead_code))]
    fn aligned<T>(&self, offset: usize, count: usize) -> Result<NonNull<T>, MemoryError> {
        if offset % size_of::<T>() != 0 {
            return Err(MemoryError::Misaligned { align: size_of::<T>() });
        }
        // A page begins at a multiple of its size in this process too.
        Ok(self.at(offset, count.saturating_mul(size_of::<T>()))?.cast())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> GuestMemory {
        GuestMemory::anonymous(&[(0, 0x8000), (0x10000, 0x8000)]).unwrap()
    }

    #[test]
    fn one_range_needs_no_table() {
        let memory = memory();
        let pages = Pages::new(&memory, [(0x1000, 0x1000), (0x2000, 0x2000)]).unwrap();
        assert_eq!((pages.len(), pages.table_len()), (0x3000, 0));
        pages.write(0x2ff0, &[7; 16]).unwrap();
        assert_eq!(memory.read_obj::<u8>(0x3fff), Ok(7));
    }

    #[test]
    fn pages_are_found_wherever_they_are() {
        let memory = memory();
        let order = [0x12000, 0x3000, 0x3000, 0x1000, 0x17000];
        let pages = Pages::new(&memory, order.map(|addr| (addr, 0x1000))).unwrap();
        assert_eq!(pages.table_len(), 5);
        for (value, (index, addr)) in (1_u32..).zip(order.into_iter().enumerate()) {
            pages.store_u32(index * PAGE_SIZE + 8, value, Ordering::Release).unwrap();
            assert_eq!(memory.read_obj::<u32>(addr + 8), Ok(value));
        }
        // The list names one page twice.
        assert_eq!(pages.load_u32(PAGE_SIZE + 8, Ordering::Acquire), Ok(3));
    }

    #[test]
    fn accesses_stay_within_a_page() {
        let memory = memory();
        for ranges in [vec![(0x1000, 0x2000)], vec![(0x1000, 0x1000), (0x3000, 0x1000)]] {
            let pages = Pages::new(&memory, ranges).unwrap();
            let bounds = |offset, len| Err(MemoryError::Bounds { offset, len, have: 0x2000 });
            assert_eq!(pages.read(0xfff, &mut [0; 2]), bounds(0xfff, 2));
            assert_eq!(pages.write(0x1fff, &[0; 2]), bounds(0x1fff, 2));
            assert_eq!(pages.read(0x2000, &mut []), bounds(0x2000, 0));
            assert_eq!(pages.read(usize::MAX, &mut [0]), bounds(usize::MAX, 1));
            assert_eq!(pages.publish(0xff8, &[1, 2]), bounds(0xff8, 16));
            assert_eq!(pages.publish(4, &[1]), Err(MemoryError::Misaligned { align: 8 }));
            assert!(pages.load_u32(2, Ordering::Relaxed).is_err());
            assert!(pages.write(0x1ffc, &[1; 4]).is_ok());
        }
    }

    #[test]
    fn words_are_published_in_order() {
        let memory = memory();
        let pages = Pages::new(&memory, [(0x2000, 0x1000)]).unwrap();
        pages.publish(64, &[1, 2, 3]).unwrap();
        assert_eq!(memory.read_obj::<[u64; 3]>(0x2040), Ok([1, 2, 3]));
    }

    #[test]
    fn only_memory_that_may_be_written_is_taken() {
        let memory = memory();
        let new = |addr, len| Pages::new(&memory, [(addr, len)]).map(|_| ()).unwrap_err();
        assert_eq!(new(0x800, 0x1000), MemoryError::Misaligned { align: PAGE_SIZE });
        assert!(matches!(new(0x7000, 0x2000), MemoryError::Unmapped { .. }));
        assert!(matches!(new(u64::MAX - 0xfff, 0x1000), MemoryError::Unmapped { .. }));
    }
}
