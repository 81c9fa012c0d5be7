// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory whose file was truncated.
//!
//! Whoever gave out a guest's memory can truncate the file behind it, and the next access beyond its
//! end raises SIGBUS, which ends a process: with it the devices of all other guests would go. Seals
//! forbid it to a memfd, but not to files of tmpfs. So SIGBUS is handled: in a mapping of guest
//! memory, what has no file any more becomes memory of zeros of this process, and the access goes
//! on. The guest has lost its memory, and its monitor asked for that; nobody else notices.

use std::io::Error;
use std::mem::MaybeUninit;
use std::ptr::{null_mut, NonNull};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use rustix::io::Errno;
use rustix::mm::{mmap_anonymous, MapFlags, ProtFlags};

/// Most mappings of guest memory in this process.
const MAX_MAPPINGS: usize = 16384;

/// Where a mapping is; `end` is 0 while the entry is not valid, `start` while it is free.
struct Range {
    start: AtomicUsize,
    end: AtomicUsize,
}

/// The mappings that the handler knows. A signal handler can take no lock and allocate nothing.
static RANGES: [Range; MAX_MAPPINGS] =
    [const { Range { start: AtomicUsize::new(0), end: AtomicUsize::new(0) } }; MAX_MAPPINGS];

/// Times that memory was replaced.
static REPLACED: AtomicU64 = AtomicU64::new(0);

/// Survives that files behind guest memory are truncated, from now on. Once a process.
pub fn survive_truncation() -> Result<(), Error> {
    // The first answer to this is looked up by other system calls than the later ones, which
    // neither a handler nor a process in a sandbox should make.
    rustix::param::page_size();
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    let place = action.as_mut_ptr();
    let flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = handle;
    // SAFETY: `place` is valid for writes; all zeros is a sigaction with an empty mask.
    unsafe { (*place).sa_sigaction = handler as usize };
    // SAFETY: as above.
    unsafe { (*place).sa_flags = flags };
    // SAFETY: `action` is a whole sigaction, and `handle` has the signature that SA_SIGINFO asks
    // for and does only what a handler may: atomics and system calls.
    match unsafe { libc::sigaction(libc::SIGBUS, place, null_mut()) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

/// How often guest memory has turned into zeros.
pub fn truncations() -> u64 {
    REPLACED.load(Ordering::Relaxed)
}

/// Notes a mapping, whose address is not 0.
pub(crate) fn register(addr: NonNull<u8>, len: usize) -> Result<(), Errno> {
    let start = addr.as_ptr() as usize;
    let claim = |range: &&Range| {
        range.start.compare_exchange(0, start, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    };
    let range = RANGES.iter().find(claim).ok_or(Errno::NOMEM)?;
    range.end.store(start + len, Ordering::Release);
    Ok(())
}

/// Forgets a mapping, before it goes.
pub(crate) fn unregister(addr: NonNull<u8>) {
    let start = addr.as_ptr() as usize;
    let is_it = |range: &&Range| range.start.load(Ordering::Acquire) == start;
    if let Some(range) = RANGES.iter().find(is_it) {
        range.end.store(0, Ordering::Release);
        range.start.store(0, Ordering::Release);
    }
}

/// The handler of SIGBUS.
extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a siginfo_t to a handler that was set with SA_SIGINFO.
    let info = unsafe { &*info };
    // SAFETY: that of SIGBUS has an address.
    let addr = unsafe { info.si_addr() };
    if replace(addr as usize).is_none() {
        // SAFETY: the access is repeated when this returns, and ends the process as it would have
        // without this handler.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// Puts zeros behind `addr` to the end of its mapping, all of which the file has lost.
fn replace(addr: usize) -> Option<()> {
    let holds = |range: &&Range| {
        let start = range.start.load(Ordering::Acquire);
        (start..range.end.load(Ordering::Acquire)).contains(&addr)
    };
    let range = RANGES.iter().find(holds)?;
    let page = addr - addr % rustix::param::page_size();
    let len = range.end.load(Ordering::Acquire).checked_sub(page)?;
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the range is the tail of a mapping of guest memory, which is reached by raw copies
    // alone and stays mapped; what it held is lost already.
    unsafe { mmap_anonymous(page as *mut libc::c_void, len, protection, flags) }.ok()?;
    REPLACED.fetch_add(1, Ordering::Relaxed);
    Some(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::{GuestMemory, Region};

    #[test]
    fn truncated_memory_reads_as_zeros() {
        survive_truncation().unwrap();
        let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let len = 0x10000;
        rustix::fs::ftruncate(&fd, len).unwrap();
        let region = Region { guest_addr: 0, len, fd: fd.as_fd(), offset: 0, writable: true };
        let memory = GuestMemory::default().with_region(&region).unwrap();
        memory.write(0, &vec![1; 0x10000]).unwrap();
        rustix::fs::ftruncate(&fd, 0x8000).unwrap();
        let mut bytes = [7; 2];
        memory.read(0x7fff, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 0]);
        memory.write(0xfffe, &[2; 2]).unwrap();
        memory.read(0xfffe, &mut bytes).unwrap();
        assert_eq!(bytes, [2, 2]);
        assert_eq!(truncations(), 1);
        // Mapped anew, it is another file's.
        drop(memory);
        rustix::fs::ftruncate(&fd, len).unwrap();
        let memory = GuestMemory::default().with_region(&region).unwrap();
        memory.read(0xfffe, &mut bytes).unwrap();
        assert_eq!((bytes, truncations()), ([0, 0], 1));
    }
}
