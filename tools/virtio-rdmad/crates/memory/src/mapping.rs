// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One mapping of this process, from `mmap` to `munmap`.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::mm::{madvise, mmap, mmap_anonymous, Advice, MapFlags, ProtFlags};

use crate::pool::Place;
use crate::sigbus::{Lost, Registration};
use crate::unmap::unmap;
use crate::{Chunk, MemoryError};

/// Bytes of a block of small pages. A mapping knows of each block whether all of its pages were touched.
pub(crate) const BLOCK: usize = 2 << 20;

/// A shared mapping of this process, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    addr: NonNull<u8>,
    len: usize,
    writable: bool,
    /// A bit for each block of [`BLOCK`] bytes, which is set if all pages of the block were touched; only for small
    /// pages of a file.
    touched: Option<Box<[AtomicU64]>>,
    /// The registration with the handler of SIGBUS; only for memory of a file, because only that can be lost.
    registration: Option<Registration>,
    /// Counts a mapping of a file among those of its guest, until it is unmapped.
    _place: Option<Place>,
}

// SAFETY: a mapping belongs to the process, not to a thread, and is reached by raw copies only,
// which are defined (or race over plain bytes, see the crate's documentation) from every thread.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`; no method returns a reference to the mapped bytes.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd` at `offset`, both multiples of `block`, which is the file's page
    /// size. Core dumps of this process do not have these bytes.
    pub(crate) fn of_file(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        block: usize,
        writable: bool,
        place: Place,
    ) -> Result<Self, Errno> {
        let null = std::ptr::null_mut();
        // SAFETY: the kernel chooses the address, so no existing mapping is replaced; the new one
        // is reached through `Mapping` alone.
        let addr = unsafe { mmap(null, len, protection(writable), MapFlags::SHARED, fd, offset) }?;
        let mut mapping = Self::adopt(addr.cast(), len, writable, Some(place))?;
        // SAFETY: the range was mapped just now; the advice does not change what it holds.
        unsafe { madvise(addr, len, Advice::LinuxDontDump) }?;
        if block == rustix::param::page_size() {
            let words = len.div_ceil(BLOCK * 64);
            mapping.touched = Some((0..words).map(|_| AtomicU64::new(0)).collect());
        }
        mapping.registration = Some(Registration::new(mapping.addr, len, block)?);
        Ok(mapping)
    }

    /// Maps `len` bytes of zeros, which take memory from their first use on.
    pub(crate) fn anonymous(len: usize) -> Result<Self, Errno> {
        let null = std::ptr::null_mut();
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: as in `of_file`.
        let addr = unsafe { mmap_anonymous(null, len, protection(true), flags) }?;
        Self::adopt(addr.cast(), len, true, None)
    }

    fn adopt(
        addr: *mut u8,
        len: usize,
        writable: bool,
        place: Option<Place>,
    ) -> Result<Self, Errno> {
        let addr = NonNull::new(addr).ok_or(Errno::NOMEM)?;
        Ok(Self { addr, len, writable, touched: None, registration: None, _place: place })
    }

    /// Returns whether a part of the mapping ever became zeros of this process's own.
    pub(crate) fn is_damaged(&self) -> bool {
        self.registration.as_ref().is_some_and(Registration::is_damaged)
    }

    /// Returns the memory that became zeros since the last call.
    pub(crate) fn take_lost(&self) -> Option<Lost> {
        self.registration.as_ref().and_then(Registration::take_lost)
    }

    /// Returns the address of the first byte.
    pub(crate) fn addr(&self) -> NonNull<u8> {
        self.addr
    }

    /// Returns the part `[offset, offset + len)`.
    pub(crate) fn chunk(&self, offset: usize, len: usize) -> Result<Chunk<'_>, MemoryError> {
        check(self.len, offset, len)?;
        // SAFETY: `check` found `offset` to be at most the length of the mapping.
        let addr = unsafe { self.addr.add(offset) };
        // SAFETY: `check` found the range within the mapping, which lives as long as the chunk.
        Ok(unsafe { Chunk::new(addr, len, self.writable) })
    }

    /// Returns the number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns whether this has small pages of a file, and none of hugetlbfs.
    pub(crate) fn has_small_pages(&self) -> bool {
        self.touched.is_some()
    }

    /// Returns whether the pages of this block were all touched.
    pub(crate) fn is_touched(&self, block: usize) -> bool {
        self.touched_word(block).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
    }

    /// Notes that the pages of this block were all touched.
    pub(crate) fn set_touched(&self, block: usize) {
        if let Some((word, bit)) = self.touched_word(block) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    fn touched_word(&self, block: usize) -> Option<(&AtomicU64, u64)> {
        Some((self.touched.as_ref()?.get(block / 64)?, 1 << (block % 64)))
    }

    /// Returns whether the mapping may be written.
    pub(crate) fn writable(&self) -> bool {
        self.writable
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // The handler forgets the range before another mapping can be at this address.
        self.registration = None;
        // SAFETY: this is the whole range that mmap returned. Slices, which reach it, hold the `Arc`
        // around this mapping, and chunks borrow it, so there are no more of either.
        unsafe { unmap(self.addr, self.len) };
    }
}

/// Refuses a range `[offset, offset + len)` that goes beyond `have` bytes.
#[inline]
pub(crate) fn check(have: usize, offset: usize, len: usize) -> Result<(), MemoryError> {
    match offset.checked_add(len) {
        Some(end) if end <= have => Ok(()),
        _ => Err(MemoryError::Bounds { offset, len, have }),
    }
}

fn protection(writable: bool) -> ProtFlags {
    if writable {
        ProtFlags::READ | ProtFlags::WRITE
    } else {
        ProtFlags::READ
    }
}
