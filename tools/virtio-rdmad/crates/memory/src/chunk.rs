// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A contiguous range of guest memory for the time of one copy.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{fence, AtomicU64, Ordering};

use crate::error::MemoryError;

/// A borrowed part of a [`crate::Slice`], which data is copied from or to.
///
/// A chunk is a few words that stay in registers. Its bounds were checked when it was made.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    addr: NonNull<u8>,
    len: usize,
    writable: bool,
    /// The mapping, which outlives the chunk.
    mapping: PhantomData<&'a ()>,
}

impl Chunk<'_> {
    /// A chunk without bytes.
    pub const EMPTY: Self =
        Self { addr: NonNull::dangling(), len: 0, writable: false, mapping: PhantomData };

    /// Makes a chunk of the `len` bytes at `addr`, which may be written if `writable` says so.
    ///
    /// # Safety
    ///
    /// The bytes must lie within a mapping that lives for `'a`, and that may be written if `writable`
    /// says so.
    #[inline]
    pub(crate) unsafe fn new(addr: NonNull<u8>, len: usize, writable: bool) -> Self {
        Self { addr, len, writable, mapping: PhantomData }
    }

    /// Returns the number of bytes.
    #[inline]
    pub fn len(self) -> usize {
        self.len
    }

    /// Returns whether the chunk has no bytes.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Returns the chunk without its first `bytes`; an empty one if it has no more.
    #[inline]
    #[must_use]
    pub fn skip(self, bytes: usize) -> Self {
        let bytes = bytes.min(self.len);
        // SAFETY: `bytes` is at most the length of this chunk.
        let addr = unsafe { self.addr.add(bytes) };
        Self { addr, len: self.len - bytes, ..self }
    }

    /// Copies to the beginning of `to` as much as fits there, and returns how much that is. The two may
    /// overlap.
    ///
    /// The last naturally aligned word of what is written (up to 8 bytes) is written by one store
    /// and after everything before it: programs poll the last byte of an RDMA WRITE, and words that
    /// they use as flags must not tear.
    #[inline]
    pub fn copy_to(self, to: Chunk<'_>) -> Result<usize, MemoryError> {
        let len = self.fit(to)?;
        // SAFETY: both have `len` bytes or more, and `to` may be written.
        unsafe { copy_in_order(self.addr.as_ptr(), to.addr.as_ptr(), len) };
        Ok(len)
    }

    /// Does the same in any order, for a part of a message that is not the last one.
    #[inline]
    pub fn copy_part_to(self, to: Chunk<'_>) -> Result<usize, MemoryError> {
        let len = self.fit(to)?;
        // SAFETY: as in `copy_to`; `copy` allows the two to overlap.
        unsafe { std::ptr::copy(self.addr.as_ptr(), to.addr.as_ptr(), len) };
        Ok(len)
    }

    /// Does the same as [`Chunk::copy_part_to`], for a page or two of memory that a processor has in its
    /// second-level cache.
    ///
    /// libc copies 2 KiB and more by `rep movsb`, which is as fast as the cache once it runs but takes
    /// some 10 ns to begin. A message of scattered pages would take these 10 ns for each page.
    #[inline]
    pub fn copy_cached_part_to(self, to: Chunk<'_>) -> Result<usize, MemoryError> {
        let len = self.fit(to)?;
        let (from, to) = (self.addr.as_ptr(), to.addr.as_ptr());
        if from.addr().abs_diff(to.addr()) < len {
            // SAFETY: as in `copy_part_to`.
            unsafe { std::ptr::copy(from, to, len) };
        } else {
            // SAFETY: as in `copy_part_to`, and the two begin at least `len` bytes from each other.
            unsafe { copy_lines(from, to, len) };
        }
        Ok(len)
    }

    /// Copies the first bytes of the chunk into `to`.
    pub fn read(self, to: &mut [u8]) -> Result<(), MemoryError> {
        let (len, have) = (to.len(), self.len);
        if len > have {
            return Err(MemoryError::Bounds { offset: 0, len, have });
        }
        // SAFETY: this chunk has `len` bytes or more; `to` is memory of this process that no guest maps,
        // so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(self.addr.as_ptr(), to.as_mut_ptr(), len) };
        Ok(())
    }

    /// Copies `from` to the beginning of the chunk. The last bytes are written last, as by
    /// [`Chunk::copy_to`].
    pub fn write(self, from: &[u8]) -> Result<(), MemoryError> {
        let (len, have) = (from.len(), self.len);
        if len > have {
            return Err(MemoryError::Bounds { offset: 0, len, have });
        }
        self.check_writable()?;
        // SAFETY: this chunk has `len` bytes or more and may be written; `from` has `len` bytes.
        unsafe { copy_in_order(from.as_ptr(), self.addr.as_ptr(), len) };
        Ok(())
    }

    /// Adds to the first 64-bit word of the chunk, in the host's byte order, and returns the value that the word had
    /// before. The addition is atomic for the guest's processors too.
    pub fn fetch_add_u64(self, add: u64) -> Result<u64, MemoryError> {
        Ok(self.word()?.fetch_add(add, Ordering::SeqCst))
    }

    /// Writes the first 64-bit word of the chunk. Each reader, also a processor of the guest, finds the whole old value
    /// or the whole new one.
    pub fn store_u64(self, value: u64) -> Result<(), MemoryError> {
        self.word()?.store(value, Ordering::SeqCst);
        Ok(())
    }

    /// Replaces the first 64-bit word of the chunk by `swap` if it is `compare`, and returns the value that the word
    /// had before. This is atomic for the guest's processors too.
    pub fn compare_exchange_u64(self, compare: u64, swap: u64) -> Result<u64, MemoryError> {
        let result =
            self.word()?.compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst);
        Ok(result.unwrap_or_else(|found| found))
    }

    /// Returns the first word of the chunk.
    fn word(&self) -> Result<&AtomicU64, MemoryError> {
        let align = size_of::<u64>();
        if self.len < align {
            return Err(MemoryError::Bounds { offset: 0, len: align, have: self.len });
        }
        let word = self.addr.cast::<u64>();
        if !word.is_aligned() {
            return Err(MemoryError::Misaligned { align });
        }
        self.check_writable()?;
        // SAFETY: the word is within the chunk, aligned and writable, as found above. Everybody who maps
        // the page may access it at the same time, by atomics.
        Ok(unsafe { AtomicU64::from_ptr(word.as_ptr()) })
    }

    /// Returns how many bytes of this chunk fit into `to`, which must be writable.
    #[inline]
    fn fit(self, to: Chunk<'_>) -> Result<usize, MemoryError> {
        to.check_writable()?;
        Ok(self.len.min(to.len))
    }

    #[inline]
    fn check_writable(self) -> Result<(), MemoryError> {
        if self.writable {
            Ok(())
        } else {
            Err(MemoryError::ReadOnly)
        }
    }
}

/// The bytes that [`copy_lines`] moves at once: a cache line, if they are aligned.
type Line = [u128; 4];

/// Copies `len` bytes by loads and stores.
///
/// # Safety
///
/// `from` must be valid for reads and `to` for writes of `len` bytes, and the two must not overlap.
#[inline]
unsafe fn copy_lines(mut from: *const u8, mut to: *mut u8, len: usize) {
    let rest = len % size_of::<Line>();
    for _ in 0..len / size_of::<Line>() {
        // SAFETY: the loop makes as many steps as there are lines in `len`, so a whole line is left; no
        // alignment is assumed.
        let line = unsafe { from.cast::<Line>().read_unaligned() };
        // SAFETY: as for the read.
        unsafe { to.cast::<Line>().write_unaligned(line) };
        // SAFETY: this is at most the end of the `len` bytes.
        from = unsafe { from.add(size_of::<Line>()) };
        // SAFETY: as for `from`.
        to = unsafe { to.add(size_of::<Line>()) };
    }
    // SAFETY: `rest` bytes of `len` are left behind the lines.
    unsafe { std::ptr::copy_nonoverlapping(from, to, rest) };
}

/// Returns the size, in bytes, of the largest naturally aligned word that ends where
/// `[to, to + len)` ends.
fn tail_len(to: *const u8, len: usize) -> usize {
    let end = (to as usize).wrapping_add(len);
    [8, 4, 2].into_iter().find(|&size| len >= size && end % size == 0).unwrap_or(1)
}

/// Copies `len` bytes. The last aligned word of the target is written by one store and after the rest.
///
/// # Safety
///
/// `from` must be valid for reads and `to` for writes of `len` bytes. The two may overlap.
unsafe fn copy_in_order(from: *const u8, to: *mut u8, len: usize) {
    if len == 0 {
        return;
    }
    let tail = tail_len(to, len);
    let body = len - tail;
    // SAFETY: `body` is less than `len`, so this is within the bytes that the caller promises.
    let from_tail = unsafe { from.add(body) };
    // SAFETY: as for `from_tail`.
    let to_tail = unsafe { to.add(body) };
    match tail {
        // SAFETY: `tail_len` chose the size such that `to_tail` is aligned for it; the caller promises
        // both ranges.
        8 => unsafe { copy_with_tail::<u64>(from, to, body, from_tail, to_tail) },
        // SAFETY: as for 8.
        4 => unsafe { copy_with_tail::<u32>(from, to, body, from_tail, to_tail) },
        // SAFETY: as for 8.
        2 => unsafe { copy_with_tail::<u16>(from, to, body, from_tail, to_tail) },
        // SAFETY: as for 8.
        _ => unsafe { copy_with_tail::<u8>(from, to, body, from_tail, to_tail) },
    }
}

/// Copies `body` bytes, then one `T`.
///
/// # Safety
///
/// As for [`copy_in_order`], for `body` bytes and a `T`. The tail pointers follow the body, and
/// `to_tail` is aligned for `T`.
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
    }
    // What `copy_part_to` copied before comes before the last word too.
    fence(Ordering::Release);
    // SAFETY: `to_tail` is writable and aligned for a `T`; volatile makes it one store.
    unsafe { to_tail.cast::<T>().write_volatile(last) };
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::{GuestMemory, Slice};

    fn slice(len: u64) -> Slice {
        GuestMemory::anonymous(&[(0, 4096)]).unwrap().slice(0, len).unwrap()
    }

    const WAYS: Range<usize> = 0..3;

    /// Copies in the way that `way` names.
    fn copy(way: usize, memory: &Slice, from: usize, to: usize, len: usize) {
        let (from, to) = (memory.chunk(from, len).unwrap(), memory.chunk(to, len).unwrap());
        let copied = match way {
            0 => from.copy_to(to),
            1 => from.copy_part_to(to),
            _ => from.copy_cached_part_to(to),
        };
        assert_eq!(copied, Ok(len));
    }

    #[test]
    fn the_shorter_one_decides() {
        let memory = slice(64);
        memory.write(0, &[7; 16]).unwrap();
        let (from, to) = (memory.chunk(0, 16).unwrap(), memory.chunk(32, 8).unwrap());
        assert_eq!(from.copy_to(to), Ok(8));
        assert_eq!(to.copy_part_to(from), Ok(8));
        assert_eq!(to.copy_cached_part_to(from), Ok(8));
        assert_eq!(memory.read_obj::<[u64; 2]>(32), Ok([u64::from_ne_bytes([7; 8]), 0]));
        assert!(to.write(&[0; 9]).is_err());
        let mut found = [0; 9];
        assert!(to.read(&mut found).is_err());
        assert_eq!((to.read(&mut found[..8]), found), (Ok(()), [7, 7, 7, 7, 7, 7, 7, 7, 0]));
    }

    #[test]
    fn words_are_aligned() {
        let slice = slice(64).sub(4, 32).unwrap();
        let word = |offset| slice.chunk(offset, 8).unwrap();
        assert_eq!(word(0).fetch_add_u64(1), Err(MemoryError::Misaligned { align: 8 }));
        assert!(slice.chunk(4, 7).unwrap().fetch_add_u64(1).is_err());
        assert_eq!(word(4).fetch_add_u64(7), Ok(0));
        assert_eq!(word(4).fetch_add_u64(1), Ok(7));
        assert_eq!(word(4).compare_exchange_u64(9, 1), Ok(8));
        assert_eq!(word(4).compare_exchange_u64(8, 1), Ok(8));
        assert_eq!(slice.read_obj::<u64>(4), Ok(1));
        assert_eq!(word(0).store_u64(1), Err(MemoryError::Misaligned { align: 8 }));
        assert_eq!(word(4).store_u64(u64::MAX), Ok(()));
        assert_eq!(slice.read_obj::<u64>(4), Ok(u64::MAX));
    }

    #[test]
    fn every_length_and_alignment_copies() {
        let memory = slice(4096);
        let pattern: Vec<u8> = (0..200_u8).map(|i| i | 1).collect();
        let places =
            || (0..9).flat_map(|f| (0..9).flat_map(move |t| (0..140).map(move |l| (f, t, l))));
        for (way, (from, to, len)) in WAYS.flat_map(|way| places().map(move |p| (way, p))) {
            memory.write(0, &[0; 1024]).unwrap();
            memory.write(from, &pattern).unwrap();
            copy(way, &memory, from, 512 + to, len);
            let mut found = vec![0; len + 2];
            memory.read(511 + to, &mut found).unwrap();
            assert_eq!(found[1..=len], pattern[..len]);
            assert_eq!((found[0], found[len + 1]), (0, 0));
        }
    }

    /// A reader that polls the last byte and finds it new finds all other bytes new, too.
    #[test]
    fn the_last_word_comes_last() {
        const ROUNDS: u8 = 100;
        const TARGET: usize = 0x10_0000;
        let memory = GuestMemory::anonymous(&[(0, 0x20_0000)]).unwrap();
        let memory = &memory.slice(0, 0x20_0000).unwrap();
        for len in [64, 4095, 0x1_0002, 0x4_0000] {
            let target = memory.sub(TARGET, len).unwrap();
            let seen = &AtomicU64::new(0);
            let mut wrong = 0;
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    for round in 1..=ROUNDS {
                        memory.write(0, &vec![round; len]).unwrap();
                        copy(0, memory, 0, TARGET, len);
                        wait(|| seen.load(Ordering::Acquire) == round.into());
                    }
                });
                let mut found = vec![0; len];
                for round in 1..=ROUNDS {
                    wait(|| target.read_obj::<u8>(len - 1).unwrap() == round);
                    target.read(0, &mut found).unwrap();
                    wrong += usize::from(found.iter().any(|&byte| byte != round));
                    seen.store(round.into(), Ordering::Release);
                }
            });
            assert_eq!(wrong, 0, "copies of {len} bytes");
        }
    }

    /// Waits, and yields the processor now and then.
    fn wait(is_over: impl Fn() -> bool) {
        for look in 1_u32.. {
            let over = is_over();
            fence(Ordering::Acquire);
            if over {
                return;
            }
            if look % 1024 == 0 {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn overlapping_copies_move() {
        for (from, to) in [(0, 5), (5, 0), (0, 1), (8, 0), (3, 3), (0, 65), (65, 0)] {
            for way in WAYS {
                let memory = slice(4096);
                let pattern: Vec<u8> = (0..=255).collect();
                memory.write(from, &pattern).unwrap();
                copy(way, &memory, from, to, 256);
                let mut found = [0; 256];
                memory.read(to, &mut found).unwrap();
                assert_eq!(found[..], pattern[..]);
            }
        }
    }
}
