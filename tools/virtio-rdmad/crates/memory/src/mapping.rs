// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One `mmap` and its end.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::io::Errno;
use rustix::mm::{madvise, mmap, mmap_anonymous, Advice, MapFlags, ProtFlags};

use crate::sigbus::{Lost, Registration};
use crate::unmap::unmap;
use crate::{slice, Chunk, MemoryError};

/// A shared mapping of this process, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    addr: NonNull<u8>,
    len: usize,
    writable: bool,
    /// Of memory of a file, which can be lost.
    registration: Option<Registration>,
}

// SAFETY: a mapping belongs to the process, not to a thread, and is reached by raw copies only,
// which are defined (or race over plain bytes, see the crate's documentation) from every thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method hands out a reference to the mapped bytes.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd` at `offset`, both multiples of `block`, which is the file's page
    /// size. Core dumps leave them out.
    pub(crate) fn of_file(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        block: usize,
        writable: bool,
    ) -> Result<Self, Errno> {
        let null = std::ptr::null_mut();
        // SAFETY: the kernel chooses the address, so no existing mapping is replaced; the new one
        // is reached through `Mapping` alone.
        let addr = unsafe { mmap(null, len, protection(writable), MapFlags::SHARED, fd, offset) }?;
        let mut mapping = Self::adopt(addr.cast(), len, writable)?;
        // SAFETY: the range was mapped just now; the advice does not change what it holds.
        unsafe { madvise(addr, len, Advice::LinuxDontDump) }?;
        mapping.registration = Some(Registration::new(mapping.addr, len, block)?);
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
        Ok(Self { addr, len, writable, registration: None })
    }

    /// Whether a part of it ever became zeros, which are this process's own.
    pub(crate) fn is_damaged(&self) -> bool {
        self.registration.as_ref().is_some_and(Registration::is_damaged)
    }

    /// What became zeros since this was last asked.
    pub(crate) fn take_lost(&self) -> Option<Lost> {
        self.registration.as_ref().and_then(Registration::take_lost)
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
        // Before another mapping can be at this address.
        self.registration = None;
        // SAFETY: this is the range that mmap returned, and whoever could still reach it holds the
        // `Arc` around this mapping, so nobody does.
        unsafe { unmap(self.addr, self.len) };
    }
}

fn protection(writable: bool) -> ProtFlags {
    if writable {
        ProtFlags::READ | ProtFlags::WRITE
    } else {
        ProtFlags::READ
    }
}
