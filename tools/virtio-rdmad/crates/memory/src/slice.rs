// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A contiguous range of guest memory.

use std::ptr::NonNull;
use std::sync::atomic::{fence, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::mapping::Mapping;
use crate::MemoryError;

/// A range of guest memory that is contiguous in this process.
///
/// It keeps its mapping alive: after a change of the memory map it still reaches the bytes that it
/// was made for, and nothing else. Every access is checked against its bounds.
#[derive(Clone, Debug)]
pub struct Slice {
    addr: NonNull<u8>,
    len: usize,
    mapping: Arc<Mapping>,
}

// SAFETY: `addr` points into `mapping`, which is `Send` and `Sync`; a slice adds nothing to it.
unsafe impl Send for Slice {}
// SAFETY: as above.
unsafe impl Sync for Slice {}

impl Slice {
    /// The range `[offset, offset + len)` of `mapping`.
    pub(crate) fn new(
        mapping: &Arc<Mapping>,
        offset: usize,
        len: usize,
    ) -> Result<Self, MemoryError> {
        check(mapping.len(), offset, len)?;
        // SAFETY: `offset` is at most the mapping's length.
        let addr = unsafe { mapping.addr().add(offset) };
        Ok(Self { addr, len, mapping: Arc::clone(mapping) })
    }

    /// First byte.
    pub(crate) fn addr(&self) -> NonNull<u8> {
        self.addr
    }

    /// Bytes in this range.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether it may be written.
    pub fn writable(&self) -> bool {
        self.mapping.writable()
    }

    /// The part `[offset, offset + len)`.
    pub fn sub(&self, offset: usize, len: usize) -> Result<Self, MemoryError> {
        let addr = self.at(offset, len)?;
        Ok(Self { addr, len, mapping: Arc::clone(&self.mapping) })
    }

    /// Joins two slices that follow each other in this process and share their mapping.
    ///
    /// `None` if they do not; then a caller keeps both.
    pub fn join(&self, next: &Self) -> Option<Self> {
        let adjacent = Arc::ptr_eq(&self.mapping, &next.mapping)
            && self.addr.as_ptr() as usize + self.len == next.addr.as_ptr() as usize;
        adjacent.then(|| Self { len: self.len + next.len, ..self.clone() })
    }

    /// Copies from `offset` into `to`.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<(), MemoryError> {
        let from = self.at(offset, to.len())?;
        // SAFETY: `at` checked the range; `to` is memory of this process that no guest maps, so
        // the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Copies `from` to `offset`. The last bytes are written last, as [`Slice::copy_to`] does.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<(), MemoryError> {
        let to = self.at_writable(offset, from.len())?;
        // SAFETY: `at_writable` checked the target; the source is a live slice.
        unsafe { copy_in_order(from.as_ptr(), to.as_ptr(), from.len()) };
        Ok(())
    }

    /// Copies `len` bytes from `offset` to `to_offset` of `to`; the two may overlap.
    ///
    /// The last naturally aligned word of the target (up to 8 bytes) is written by one store and
    /// after everything before it: programs poll the last byte of an RDMA WRITE, and words that
    /// they use as flags must not tear.
    pub fn copy_to(
        &self,
        offset: usize,
        to: &Self,
        to_offset: usize,
        len: usize,
    ) -> Result<(), MemoryError> {
        let from = self.at(offset, len)?;
        let to = to.at_writable(to_offset, len)?;
        // SAFETY: both ranges were checked.
        unsafe { copy_in_order(from.as_ptr(), to.as_ptr(), len) };
        Ok(())
    }

    /// Reads a value; the copy is the caller's own.
    pub fn read_obj<T: FromBytes + IntoBytes>(&self, offset: usize) -> Result<T, MemoryError> {
        let mut value = T::new_zeroed();
        self.read(offset, value.as_mut_bytes())?;
        Ok(value)
    }

    /// Writes a value.
    pub fn write_obj<T: IntoBytes + Immutable>(
        &self,
        offset: usize,
        value: &T,
    ) -> Result<(), MemoryError> {
        self.write(offset, value.as_bytes())
    }

    /// Loads a little-endian 16-bit word from a multiple of 2.
    ///
    /// `order` is `Relaxed`, `Acquire` or `SeqCst`, as for an atomic load.
    pub fn load_u16(&self, offset: usize, order: Ordering) -> Result<u16, MemoryError> {
        let word = self.aligned::<u16>(offset)?;
        // SAFETY: in bounds and aligned; atomics may be shared with whoever else maps the page.
        let word = unsafe { AtomicU16::from_ptr(word.as_ptr()) };
        Ok(u16::from_le(word.load(order)))
    }

    /// Stores a little-endian 16-bit word at a multiple of 2.
    ///
    /// `order` is `Relaxed`, `Release` or `SeqCst`, as for an atomic store.
    pub fn store_u16(&self, offset: usize, value: u16, order: Ordering) -> Result<(), MemoryError> {
        let word = self.aligned::<u16>(offset)?;
        self.check_writable()?;
        // SAFETY: as in `load_u16`, and writable.
        let word = unsafe { AtomicU16::from_ptr(word.as_ptr()) };
        word.store(value.to_le(), order);
        Ok(())
    }

    /// Loads a little-endian 32-bit word from a multiple of 4; `order` as in [`Slice::load_u16`].
    pub fn load_u32(&self, offset: usize, order: Ordering) -> Result<u32, MemoryError> {
        let word = self.aligned::<u32>(offset)?;
        // SAFETY: as in `load_u16`.
        let word = unsafe { AtomicU32::from_ptr(word.as_ptr()) };
        Ok(u32::from_le(word.load(order)))
    }

    /// Stores a little-endian 32-bit word at a multiple of 4; `order` as in [`Slice::store_u16`].
    pub fn store_u32(&self, offset: usize, value: u32, order: Ordering) -> Result<(), MemoryError> {
        let word = self.aligned::<u32>(offset)?;
        self.check_writable()?;
        // SAFETY: as in `store_u16`.
        let word = unsafe { AtomicU32::from_ptr(word.as_ptr()) };
        word.store(value.to_le(), order);
        Ok(())
    }

    /// Adds to the 64-bit word of the host's byte order at a multiple of 8, atomically against the
    /// guest's processors too, and returns what was there.
    pub fn fetch_add_u64(&self, offset: usize, add: u64) -> Result<u64, MemoryError> {
        let word = self.aligned::<u64>(offset)?;
        self.check_writable()?;
        // SAFETY: as in `store_u16`.
        let word = unsafe { AtomicU64::from_ptr(word.as_ptr()) };
        Ok(word.fetch_add(add, Ordering::SeqCst))
    }

    /// Replaces the 64-bit word at a multiple of 8 by `swap` if it is `compare`, atomically against
    /// the guest's processors too, and returns what was there.
    pub fn compare_exchange_u64(
        &self,
        offset: usize,
        compare: u64,
        swap: u64,
    ) -> Result<u64, MemoryError> {
        let word = self.aligned::<u64>(offset)?;
        self.check_writable()?;
        // SAFETY: as in `store_u16`.
        let word = unsafe { AtomicU64::from_ptr(word.as_ptr()) };
        let result = word.compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst);
        Ok(result.unwrap_or_else(|found| found))
    }

    /// Address of `[offset, offset + len)`, if that lies within.
    fn at(&self, offset: usize, len: usize) -> Result<NonNull<u8>, MemoryError> {
        check(self.len, offset, len)?;
        // SAFETY: `offset` is at most the length of this range.
        Ok(unsafe { self.addr.add(offset) })
    }

    fn at_writable(&self, offset: usize, len: usize) -> Result<NonNull<u8>, MemoryError> {
        self.check_writable()?;
        self.at(offset, len)
    }

    fn check_writable(&self) -> Result<(), MemoryError> {
        if self.writable() {
            Ok(())
        } else {
            Err(MemoryError::ReadOnly)
        }
    }

    /// Address of the `T` at `offset`, if that lies within and is aligned in this process.
    fn aligned<T>(&self, offset: usize) -> Result<NonNull<T>, MemoryError> {
        let word = self.at(offset, size_of::<T>())?.cast::<T>();
        if word.is_aligned() {
            Ok(word)
        } else {
            Err(MemoryError::Misaligned { align: size_of::<T>() })
        }
    }
}

fn check(have: usize, offset: usize, len: usize) -> Result<(), MemoryError> {
    match offset.checked_add(len) {
        Some(end) if end <= have => Ok(()),
        _ => Err(MemoryError::Bounds { offset, len, have }),
    }
}

/// Largest naturally aligned word, in bytes, that ends where `[to, to + len)` ends.
fn tail_len(to: *const u8, len: usize) -> usize {
    let end = (to as usize).wrapping_add(len);
    [8, 4, 2].into_iter().find(|&size| len >= size && end % size == 0).unwrap_or(1)
}

/// Copies `len` bytes, the last aligned word of the target by one store and after the rest.
///
/// # Safety
///
/// `from` is valid for reads and `to` for writes of `len` bytes; they may overlap.
unsafe fn copy_in_order(from: *const u8, to: *mut u8, len: usize) {
    if len == 0 {
        return;
    }
    let tail = tail_len(to, len);
    let body = len - tail;
    // SAFETY: `body` is at most `len`, so this stays within the range that the caller vouches for.
    let from_tail = unsafe { from.add(body) };
    // SAFETY: as above.
    let to_tail = unsafe { to.add(body) };
    match tail {
        // SAFETY: `tail_len` chose the size such that `to_tail` is aligned for it; the ranges are
        // the caller's promise.
        8 => unsafe { copy_with_tail::<u64>(from, to, body, from_tail, to_tail) },
        // SAFETY: as above.
        4 => unsafe { copy_with_tail::<u32>(from, to, body, from_tail, to_tail) },
        // SAFETY: as above.
        2 => unsafe { copy_with_tail::<u16>(from, to, body, from_tail, to_tail) },
        // SAFETY: as above.
        _ => unsafe { copy_with_tail::<u8>(from, to, body, from_tail, to_tail) },
    }
}

/// Copies `body` bytes, then one `T`.
///
/// # Safety
///
/// As for [`copy_in_order`]; the tail pointers follow the body, and `to_tail` is aligned for `T`.
#[inline]
unsafe fn copy_with_tail<T: Copy>(
    from: *const u8,
    to: *mut u8,
    body: usize,
    from_tail: *const u8,
    to_tail: *mut u8,
) {
    // The tail is read first: in an overlapping copy the body may write over it.
    // SAFETY: `from_tail` is readable for a `T`; no alignment is assumed.
    let last = unsafe { from_tail.cast::<T>().read_unaligned() };
    if body > 0 {
        // SAFETY: both ranges hold `body` bytes; `copy` allows them to overlap.
        unsafe { std::ptr::copy(from, to, body) };
        fence(Ordering::Release);
    }
    // SAFETY: `to_tail` is writable and aligned for a `T`; volatile makes it one store.
    unsafe { to_tail.cast::<T>().write_volatile(last) };
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
        assert_eq!(slice.copy_to(0, &slice, 9, 8), bounds(9, 8));
        assert_eq!(slice.load_u32(13, Ordering::Relaxed), Err(bounds(13, 4).unwrap_err()));
        assert!(slice.read(16, &mut []).is_ok());
    }

    #[test]
    fn words_are_aligned() {
        let slice = slice(64).sub(4, 32).unwrap();
        assert_eq!(slice.fetch_add_u64(0, 1), Err(MemoryError::Misaligned { align: 8 }));
        assert_eq!(slice.fetch_add_u64(4, 7), Ok(0));
        assert_eq!(slice.fetch_add_u64(4, 1), Ok(7));
        assert_eq!(slice.compare_exchange_u64(4, 9, 1), Ok(8));
        assert_eq!(slice.compare_exchange_u64(4, 8, 1), Ok(8));
        assert_eq!(slice.read_obj::<u64>(4), Ok(1));
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

    #[test]
    fn every_length_and_alignment_copies() {
        let memory = slice(4096);
        let pattern: Vec<u8> = (0..200_u8).map(|i| i | 1).collect();
        for (from, to, len) in
            (0..9).flat_map(|f| (0..9).flat_map(move |t| (0..70).map(move |l| (f, t, l))))
        {
            memory.write(0, &[0; 1024]).unwrap();
            memory.write(from, &pattern).unwrap();
            memory.copy_to(from, &memory, 512 + to, len).unwrap();
            let mut found = vec![0; len + 2];
            memory.read(511 + to, &mut found).unwrap();
            assert_eq!(found[1..=len], pattern[..len]);
            assert_eq!((found[0], found[len + 1]), (0, 0));
        }
    }

    #[test]
    fn overlapping_copies_move() {
        for (from, to) in [(0, 5), (5, 0), (0, 1), (8, 0), (3, 3)] {
            let memory = slice(4096);
            let pattern: Vec<u8> = (0..64).collect();
            memory.write(from, &pattern).unwrap();
            memory.copy_to(from, &memory, to, 64).unwrap();
            let mut found = [0; 64];
            memory.read(to, &mut found).unwrap();
            assert_eq!(found[..], pattern[..]);
        }
    }
}
