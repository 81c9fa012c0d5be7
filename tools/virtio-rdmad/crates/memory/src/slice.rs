// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A contiguous range of guest memory.

use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU16, AtomicU32};
use std::sync::Arc;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::mapping::{check, Mapping, BLOCK};
use crate::{Chunk, MemoryError};

/// A range of guest memory that is contiguous in this process.
///
/// A slice keeps its mapping alive: after a change of the memory map it still reaches the bytes that
/// it was made for, and nothing else. Every access is checked against its bounds.
#[derive(Clone, Debug)]
pub struct Slice {
    addr: NonNull<u8>,
    len: usize,
    mapping: Arc<Mapping>,
    /// The words of the range, in a test of orders.
    #[cfg(loom)]
    model: Option<Arc<litmus::Memory>>,
}

// SAFETY: `addr` points into `mapping`, which is `Send` and `Sync`; a slice adds nothing to it.
unsafe impl Send for Slice {}
// SAFETY: as for `Send`.
unsafe impl Sync for Slice {}

impl Slice {
    /// Makes the slice `[offset, offset + len)` of `mapping`.
    pub(crate) fn new(
        mapping: &Arc<Mapping>,
        offset: usize,
        len: usize,
    ) -> Result<Self, MemoryError> {
        check(mapping.len(), offset, len)?;
        // SAFETY: `check` found `offset` to be at most the mapping's length.
        let addr = unsafe { mapping.addr().add(offset) };
        Ok(Self {
            addr,
            len,
            mapping: Arc::clone(mapping),
            #[cfg(loom)]
            model: None,
        })
    }

    /// Replaces the words of the slice by those of a model of memory, where a test watches them.
    #[cfg(loom)]
    #[must_use]
    pub fn modelled(self, memory: Arc<litmus::Memory>) -> Self {
        Self { model: Some(memory), ..self }
    }

    /// Returns the address of the first byte.
    pub(crate) fn addr(&self) -> NonNull<u8> {
        self.addr
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the slice has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether the slice may be written.
    pub fn writable(&self) -> bool {
        self.mapping.writable()
    }

    /// Returns the part `[offset, offset + len)`.
    pub fn sub(&self, offset: usize, len: usize) -> Result<Self, MemoryError> {
        let addr = self.at(offset, len)?;
        Ok(Self { addr, len, ..self.clone() })
    }

    /// Joins two slices that follow each other in this process and share their mapping. Returns
    /// `None` if they do not.
    pub fn join(&self, next: &Self) -> Option<Self> {
        let adjacent = Arc::ptr_eq(&self.mapping, &next.mapping)
            && self.addr.as_ptr() as usize + self.len == next.addr.as_ptr() as usize;
        adjacent.then(|| Self { len: self.len + next.len, ..self.clone() })
    }

    /// Borrows the part `[offset, offset + len)`.
    #[inline]
    pub fn chunk(&self, offset: usize, len: usize) -> Result<Chunk<'_>, MemoryError> {
        let addr = self.at(offset, len)?;
        // SAFETY: `at` checked that the range lies within this one, which lies within its mapping.
        Ok(unsafe { Chunk::new(addr, len, self.writable()) })
    }

    /// Copies the bytes from `offset` on into `to`.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<(), MemoryError> {
        let from = self.at(offset, to.len())?;
        // SAFETY: `at` checked the range; `to` is memory of this process that no guest maps, so
        // the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Copies `from` to `offset`. The last bytes are written last, as by [`Chunk::copy_to`].
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<(), MemoryError> {
        self.chunk(offset, from.len())?.write(from)
    }

    /// Reads a value at `offset`. Neither the guest nor a peer can change the copy.
    pub fn read_obj<T: FromBytes + IntoBytes>(&self, offset: usize) -> Result<T, MemoryError> {
        let mut value = T::new_zeroed();
        self.read(offset, value.as_mut_bytes())?;
        Ok(value)
    }

    /// Writes a value at `offset`.
    pub fn write_obj<T: IntoBytes + Immutable>(
        &self,
        offset: usize,
        value: &T,
    ) -> Result<(), MemoryError> {
        self.write(offset, value.as_bytes())
    }

    /// Touches up to `most` pages from the byte at `offset` on, so that a later access does not have to wait for them.
    /// The slice is touched from its beginning to its end. Returns the number of bytes whose pages are there now, and
    /// the number of pages that were touched for that: none where all pages around were touched before.
    ///
    /// The kernel finds the pages around a page at the same time, as far as they exist. It does so only for a read, and
    /// a write to them needs nothing else; MADV_POPULATE_WRITE takes twice as long.
    ///
    /// Does nothing for pages of hugetlbfs. These are few, and one that does not exist takes long to make, or cannot be
    /// made, which would count as a loss. Does nothing for memory without a file, which only tests have.
    pub fn touch(&self, offset: usize, most: usize) -> Result<(usize, usize), MemoryError> {
        let at = self.at(offset, 1)?.as_ptr() as usize - self.mapping.addr().as_ptr() as usize;
        let (block, to_end) = (at / BLOCK, BLOCK - at % BLOCK);
        let mut len = to_end.min(self.len - offset);
        if !self.mapping.has_small_pages() || self.mapping.is_touched(block) {
            return Ok((len, 0));
        }
        let page = rustix::param::page_size();
        len = len.min(page.saturating_mul(most) - at % page);
        // The first byte of this slice in each of the pages.
        let bytes = std::iter::once(0).chain((page - at % page..len).step_by(page));
        let mut pages = 0;
        for byte in bytes {
            black_box(self.read_obj::<u8>(offset + byte)?);
            pages += 1;
        }
        if len == to_end && at - offset <= block * BLOCK {
            self.mapping.set_touched(block);
        }
        Ok((len, pages))
    }

    /// Loads a little-endian 16-bit word from a multiple of 2.
    ///
    /// `order` is `Relaxed`, `Acquire` or `SeqCst`, as for an atomic load.
    pub fn load_u16(&self, offset: usize, order: Ordering) -> Result<u16, MemoryError> {
        Ok(u16::from_le(self.word16(offset)?.load(order)))
    }

    /// Stores a little-endian 16-bit word at a multiple of 2.
    ///
    /// `order` is `Relaxed`, `Release` or `SeqCst`, as for an atomic store.
    pub fn store_u16(&self, offset: usize, value: u16, order: Ordering) -> Result<(), MemoryError> {
        let word = self.word16(offset)?;
        self.check_writable()?;
        word.store(value.to_le(), order);
        Ok(())
    }

    /// Loads a little-endian 32-bit word from a multiple of 4; `order` as in [`Slice::load_u16`].
    pub fn load_u32(&self, offset: usize, order: Ordering) -> Result<u32, MemoryError> {
        Ok(u32::from_le(self.word32(offset)?.load(order)))
    }

    /// Stores a little-endian 32-bit word at a multiple of 4; `order` as in [`Slice::store_u16`].
    pub fn store_u32(&self, offset: usize, value: u32, order: Ordering) -> Result<(), MemoryError> {
        let word = self.word32(offset)?;
        self.check_writable()?;
        word.store(value.to_le(), order);
        Ok(())
    }

    /// Returns the word of 16 bits at `offset`. A caller that stores to the word checks that the slice may be written.
    #[cfg(not(loom))]
    #[inline]
    fn word16(&self, offset: usize) -> Result<&AtomicU16, MemoryError> {
        let word = self.aligned::<u16>(offset)?;
        // SAFETY: `aligned` found it within the slice and aligned. The mapping lives as long as the
        // slice. Everybody who maps the page may access it at the same time, by atomics.
        Ok(unsafe { AtomicU16::from_ptr(word.as_ptr()) })
    }

    /// Returns the word of 32 bits at `offset`, likewise.
    #[cfg(not(loom))]
    #[inline]
    fn word32(&self, offset: usize) -> Result<&AtomicU32, MemoryError> {
        let word = self.aligned::<u32>(offset)?;
        // SAFETY: as in `word16`.
        Ok(unsafe { AtomicU32::from_ptr(word.as_ptr()) })
    }

    #[cfg(loom)]
    fn word16(&self, offset: usize) -> Result<litmus::Word16<'_>, MemoryError> {
        self.word32(offset).map(litmus::Word16)
    }

    #[cfg(loom)]
    fn word32(&self, offset: usize) -> Result<&litmus::AtomicU32, MemoryError> {
        let missing = MemoryError::Bounds { offset, len: 0, have: 0 };
        self.model.as_ref().map(|memory| memory.word(offset)).ok_or(missing)
    }

    /// Returns the address of `[offset, offset + len)`, if that lies within the slice.
    #[inline]
    fn at(&self, offset: usize, len: usize) -> Result<NonNull<u8>, MemoryError> {
        check(self.len, offset, len)?;
        // SAFETY: `check` found `offset` to be at most the length of this slice.
        Ok(unsafe { self.addr.add(offset) })
    }

    fn check_writable(&self) -> Result<(), MemoryError> {
        if self.writable() {
            Ok(())
        } else {
            Err(MemoryError::ReadOnly)
        }
    }

    /// Returns the address of the `T` at `offset`, if that lies within the slice and is aligned in this
    /// process.
    #[cfg_attr(loom, allow(dead_code))]
    fn aligned<T>(&self, offset: usize) -> Result<NonNull<T>, MemoryError> {
        let word = self.at(offset, size_of::<T>())?.cast::<T>();
        if word.is_aligned() {
            Ok(word)
        } else {
            Err(MemoryError::Misaligned { align: size_of::<T>() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GuestMemory;

    fn slice(len: u64) -> Slice {
        GuestMemory::anonymous(&[(0, 4096)]).unwrap().slice(0, len).unwrap()
    }

    #[test]
    fn bounds_are_checked() {
        let slice = slice(16);
        let bounds = |offset, len| Err(MemoryError::Bounds { offset, len, have: 16 });
        assert_eq!(slice.read(9, &mut [0; 8]), bounds(9, 8));
        assert_eq!(slice.write(usize::MAX, &[0; 2]), bounds(usize::MAX, 2));
        assert_eq!(slice.sub(17, 0).map(|_| ()), bounds(17, 0));
        assert_eq!(slice.chunk(9, 8).map(|_| ()), bounds(9, 8));
        assert_eq!(slice.load_u32(13, Ordering::Relaxed), Err(bounds(13, 4).unwrap_err()));
        assert!(slice.read(16, &mut []).is_ok());
    }

    #[test]
    fn words_are_aligned() {
        let slice = slice(64).sub(4, 32).unwrap();
        slice.store_u32(4, 7, Ordering::Relaxed).unwrap();
        assert_eq!(slice.load_u32(4, Ordering::Relaxed), Ok(7));
        assert_eq!(slice.read_obj::<u64>(4), Ok(7));
        assert!(slice.load_u16(1, Ordering::Relaxed).is_err());
    }

    #[test]
    fn neighbours_join() {
        let whole = slice(64);
        let (a, b) = (whole.sub(0, 16).unwrap(), whole.sub(16, 48).unwrap());
        assert_eq!(a.join(&b).map(|joined| joined.len()), Some(64));
        assert!(b.join(&a).is_none());
        assert!(a.join(&slice(16)).is_none());
    }
}
