// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One `mmap` and its end.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::io::Errno;
use rustix::mm::{mmap, mmap_anonymous, munmap, MapFlags, ProtFlags};

use crate::{sigbus, slice, Chunk, MemoryError};

/// A shared mapping of this process, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    addr: NonNull<u8>,
    len: usize,
    writable: bool,
}

// SAFETY: a mapping belongs to the process, not to a thread, and is reached by raw copies only,
// which are defined (or race over plain bytes, see the crate's documentation) from every thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method hands out a reference to the mapped bytes.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd` at `offset`, which is a multiple of the page size.
    pub(crate) fn of_file(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        writable: bool,
    ) -> Result<Self, Errno> {
        let null = std::ptr::null_mut();
        // SAFETY: the kernel chooses the address, so no existing mapping is replaced; the new one
        // is reached through `Mapping` alone.
        let addr = unsafe { mmap(null, len, protection(writable), MapFlags::SHARED, fd, offset) }?;
        let mapping = Self::adopt(addr.cast(), len, writable)?;
        sigbus::register(mapping.addr, len)?;
        Ok(mapping)
    }

    /// Maps `len` bytes of zeros, which take memory from their first use on.
    pub(crate) fn anonymous(len: usize) -> Result<Self, Errno> {
        let null = std::ptr::null_mut();
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: as in `of_file`.
        let addr = unsafe { mmap_anonymous(null, len, protection(true), flags) }?;
        Self::adopt(addr.cast(), len, true)
    }

    fn adopt(addr: *mut u8, len: usize, writable: bool) -> Result<Self, Errno> {
        let addr = NonNull::new(addr).ok_or(Errno::NOMEM)?;
        Ok(Self { addr, len, writable })
    }

    /// First byte.
    pub(crate) fn addr(&self) -> NonNull<u8> {
        self.addr
    }

    /// The part `[offset, offset + len)`.
    pub(crate) fn chunk(&self, offset: usize, len: usize) -> Result<Chunk<'_>, MemoryError> {
        slice::check(self.len, offset, len)?;
        // SAFETY: `offset` is at most the length of the mapping.
        let addr = unsafe { self.addr.add(offset) };
        // SAFETY: the range was checked.
        Ok(unsafe { Chunk::new(addr, len, self.writable) })
    }

    /// Bytes mapped.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether it may be written.
    pub(crate) fn writable(&self) -> bool {
        self.writable
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        sigbus::unregister(self.addr);
        // SAFETY: this is the range that mmap returned, and whoever could still reach it holds the
        // `Arc` around this mapping, so nobody does.
        let result = unsafe { munmap(self.addr.as_ptr().cast(), self.len) };
        debug_assert!(result.is_ok(), "munmap of a whole mapping does not fail");
    }
}

fn protection(writable: bool) -> ProtFlags {
    if writable {
        ProtFlags::READ | ProtFlags::WRITE
    } else {
        ProtFlags::READ
    }
}
