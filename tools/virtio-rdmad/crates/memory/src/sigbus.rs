// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory that is lost: its file was truncated, or has no page to give, or the page is poisoned.
//!
//! The VMM that gave out a guest's memory can truncate the file behind it. The next access beyond
//! the end of the file raises SIGBUS, which ends a process, and with it the devices of all other
//! guests. Seals forbid that to a memfd, but not to files of tmpfs. So this process handles SIGBUS: in
//! a mapping of guest memory, the page that was accessed becomes zeros of this process's own, and the
//! access goes on. The worker that serves the guest finds out by [`losses`] and tells the guest;
//! nobody else notices.
//!
//! To replace a page splits its mapping, and the kernel lets a process have some 65,530 mappings. So
//! only a few pages are replaced one by one; a mapping that loses more is replaced as a whole.

use std::io::Error;
use std::mem::MaybeUninit;
use std::ptr::{null_mut, NonNull};
use std::sync::atomic::{fence, AtomicBool, AtomicU64, AtomicUsize, Ordering};

use rustix::io::Errno;
use rustix::mm::{madvise, mmap_anonymous, Advice, MapFlags, ProtFlags};

/// Most mappings of guest memory in this process: as many as the kernel allows if nobody changed
/// `vm.max_map_count`.
pub(crate) const MAX_MAPPINGS: usize = 65_536;
/// Most blocks of one mapping that are replaced one by one.
const MAX_SINGLE: usize = 8;
/// Most blocks of all mappings that are replaced one by one.
const MAX_SINGLE_OF_ALL: usize = 8192;

/// The addresses of a mapping.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Range {
    /// First address, a multiple of `block`.
    start: usize,
    /// Bytes.
    len: usize,
    /// The bytes of a block, which can only be replaced as a whole: a page, or a huge page.
    block: usize,
}

impl Range {
    fn holds(self, addr: usize) -> bool {
        addr.checked_sub(self.start).is_some_and(|skip| skip < self.len)
    }

    /// Returns the block around `addr`, which must be in the range.
    fn block_at(self, addr: usize) -> Self {
        let skip = (addr - self.start) / self.block * self.block;
        Self { start: self.start + skip, len: self.block.min(self.len - skip), ..self }
    }
}

/// A mapping that the handler knows.
///
/// The handler reads the range while another thread may write it. So `version` is odd during a write
/// and has a new value afterwards: a reader finds a whole range or none. The range that the handler
/// looks for does not change, because a thread accesses it.
struct Entry {
    taken: AtomicBool,
    version: AtomicUsize,
    start: AtomicUsize,
    len: AtomicUsize,
    block: AtomicUsize,
    /// The number of blocks that were ever replaced one by one.
    single: AtomicUsize,
    /// Whether anything was replaced, ever.
    damaged: AtomicBool,
    /// The number of bytes that were replaced since [`Registration::take_lost`].
    lost: AtomicUsize,
    /// The lowest offset of these bytes.
    offset: AtomicUsize,
    /// Whether some of these bytes were poisoned.
    poisoned: AtomicBool,
}

impl Entry {
    const fn free() -> Self {
        Self {
            taken: AtomicBool::new(false),
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            block: AtomicUsize::new(0),
            single: AtomicUsize::new(0),
            damaged: AtomicBool::new(false),
            lost: AtomicUsize::new(0),
            offset: AtomicUsize::new(usize::MAX),
            poisoned: AtomicBool::new(false),
        }
    }

    /// Changes the range. Only the owner of the entry may.
    fn set(&self, range: Range) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(range.start, Ordering::Relaxed);
        self.len.store(range.len, Ordering::Relaxed);
        self.block.store(range.block, Ordering::Relaxed);
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// Returns the range, unless its owner changes it at the moment.
    fn range(&self) -> Option<Range> {
        let version = self.version.load(Ordering::Acquire);
        let range = Range {
            start: self.start.load(Ordering::Relaxed),
            len: self.len.load(Ordering::Relaxed),
            block: self.block.load(Ordering::Relaxed),
        };
        fence(Ordering::Acquire);
        let same = self.version.load(Ordering::Relaxed) == version;
        (same && version % 2 == 0).then_some(range)
    }

    /// Returns the range to replace, now that the block around `addr` cannot be accessed: that block, or all of
    /// `range`.
    fn part(&self, range: Range, addr: usize) -> Range {
        let below = |most: usize| move |count: usize| (count < most).then_some(count + 1);
        let add = |counter: &AtomicUsize, most| {
            counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, below(most)).is_ok()
        };
        if add(&self.single, MAX_SINGLE) {
            if add(&SINGLE, MAX_SINGLE_OF_ALL) {
                return range.block_at(addr);
            }
            self.single.fetch_sub(1, Ordering::Relaxed);
        }
        range
    }

    fn record(&self, offset: usize, len: usize, poisoned: bool) {
        self.damaged.store(true, Ordering::Release);
        self.offset.fetch_min(offset, Ordering::Relaxed);
        self.poisoned.fetch_or(poisoned, Ordering::Relaxed);
        self.lost.fetch_add(len, Ordering::Release);
        LOSSES.fetch_add(1, Ordering::Release);
    }
}

/// The mappings that the handler knows. A signal handler can take no lock and allocate nothing.
static ENTRIES: [Entry; MAX_MAPPINGS] = [const { Entry::free() }; MAX_MAPPINGS];

/// The index from which on entries were never taken.
static ENTRIES_USED: AtomicUsize = AtomicUsize::new(0);

/// The number of blocks of all mappings that were replaced one by one.
static SINGLE: AtomicUsize = AtomicUsize::new(0);

/// The number of times that memory was replaced.
static LOSSES: AtomicU64 = AtomicU64::new(0);

/// A part of a mapping that was replaced by zeros.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Lost {
    /// The offset of the first byte in the mapping.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
    /// Whether a memory error of the host was the cause, and not the file.
    pub poisoned: bool,
}

/// Makes the handler know a mapping until this is dropped.
#[derive(Debug)]
pub(crate) struct Registration(usize);

impl Registration {
    /// Makes the handler know the mapping of `len` bytes at `addr`. It can be replaced in blocks of
    /// `block` bytes, which begin at multiples of that.
    pub(crate) fn new(addr: NonNull<u8>, len: usize, block: usize) -> Result<Self, Errno> {
        let take = |entry: &Entry| {
            !entry.taken.load(Ordering::Relaxed) && !entry.taken.swap(true, Ordering::Acquire)
        };
        let index = ENTRIES.iter().position(take).ok_or(Errno::NOMEM)?;
        ENTRIES_USED.fetch_max(index + 1, Ordering::Release);
        ENTRIES[index].set(Range { start: addr.as_ptr() as usize, len, block });
        Ok(Self(index))
    }

    fn entry(&self) -> &'static Entry {
        &ENTRIES[self.0]
    }

    /// Returns whether anything was ever lost.
    pub(crate) fn is_damaged(&self) -> bool {
        self.entry().damaged.load(Ordering::Acquire)
    }

    /// Returns the loss since the last call.
    pub(crate) fn take_lost(&self) -> Option<Lost> {
        let entry = self.entry();
        let len = entry.lost.swap(0, Ordering::Acquire);
        let offset = entry.offset.swap(usize::MAX, Ordering::Relaxed);
        let poisoned = entry.poisoned.swap(false, Ordering::Relaxed);
        (len > 0).then_some(Lost { offset, len, poisoned })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let entry = self.entry();
        entry.set(Range { start: 0, len: 0, block: 0 });
        self.take_lost();
        entry.damaged.store(false, Ordering::Relaxed);
        SINGLE.fetch_sub(entry.single.swap(0, Ordering::Relaxed), Ordering::Relaxed);
        entry.taken.store(false, Ordering::Release);
    }
}

/// Makes the process survive a loss of guest memory from now on. Call this once in a process.
pub fn survive_losses() -> Result<(), Error> {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    let place = action.as_mut_ptr();
    let flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = handle;
    // SAFETY: `place` is valid for writes; all zeros is a sigaction with an empty mask.
    unsafe { (*place).sa_sigaction = handler as usize };
    // SAFETY: `place` is valid for writes.
    unsafe { (*place).sa_flags = flags };
    // SAFETY: `action` is a whole sigaction, and `handle` has the signature that SA_SIGINFO asks
    // for and does only what a handler may: atomics and system calls.
    match unsafe { libc::sigaction(libc::SIGBUS, place, null_mut()) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

/// Returns how many times guest memory was lost. [`crate::GuestMemory::take_losses`] says where.
#[inline]
pub fn losses() -> u64 {
    LOSSES.load(Ordering::Acquire)
}

/// The handler of SIGBUS.
extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a siginfo_t to a handler that was set with SA_SIGINFO.
    let info = unsafe { &*info };
    // SAFETY: a siginfo_t of SIGBUS has an address.
    let addr = unsafe { info.si_addr() };
    let poisoned = matches!(info.si_code, libc::BUS_MCEERR_AR | libc::BUS_MCEERR_AO);
    if replace(addr as usize, poisoned).is_none() {
        // SAFETY: `signal` may be called in a handler. The access is repeated when this returns, and
        // ends the process as it would have without this handler.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// Puts zeros in place of the block around `addr`, if that is guest memory.
fn replace(addr: usize, poisoned: bool) -> Option<()> {
    let used = ENTRIES_USED.load(Ordering::Acquire);
    let found = |entry: &'static Entry| {
        let range = entry.range()?;
        range.holds(addr).then_some((entry, range))
    };
    let (entry, range) = ENTRIES[..used].iter().find_map(found)?;
    let part = entry.part(range, addr);
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let start = part.start as *mut libc::c_void;
    // SAFETY: the range is whole blocks of a mapping of guest memory. It stays mapped, and is accessed
    // by raw copies only, for which any bytes will do. What it had is lost, or is given up with the
    // part that is.
    unsafe { mmap_anonymous(start, part.len, protection, flags) }.ok()?;
    // SAFETY: the advice does not change the memory. If it fails, core dumps have these pages, which
    // are zeros and what this process writes there.
    let _ = unsafe { madvise(start, part.len, Advice::LinuxDontDump) };
    entry.record(part.start - range.start, part.len, poisoned);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;
    const HUGE: usize = 2 << 20;

    /// A part begins and ends at the borders of pages of its mapping, also if these are huge pages.
    #[test]
    fn blocks_are_whole_pages() {
        let small = Range { start: 16 * PAGE, len: 4 * PAGE, block: PAGE };
        assert!(!small.holds(16 * PAGE - 1) && !small.holds(20 * PAGE));
        for (addr, start) in [(16 * PAGE, 16), (17 * PAGE - 1, 16), (20 * PAGE - 1, 19)] {
            assert!(small.holds(addr));
            let block = small.block_at(addr);
            assert_eq!((block.start, block.len), (start * PAGE, PAGE));
        }
        let huge = Range { start: 8 * HUGE, len: 3 * HUGE, block: HUGE };
        for (addr, start) in [(8 * HUGE + PAGE, 8), (9 * HUGE, 9), (11 * HUGE - 1, 10)] {
            let block = huge.block_at(addr);
            assert_eq!((block.start, block.len), (start * HUGE, HUGE));
        }
        // If the length of a mapping is no multiple of its page size, the last part ends at its end.
        let odd = Range { start: PAGE, len: PAGE + 1, block: PAGE };
        assert_eq!(odd.block_at(2 * PAGE).len, 1);
    }

    /// A mapping is split a limited number of times. After that all of it is replaced.
    #[test]
    fn a_mapping_is_not_split_without_end() {
        let entry = Entry::free();
        let range = Range { start: 16 * PAGE, len: 64 * PAGE, block: PAGE };
        for page in 0..MAX_SINGLE {
            let start = range.start + page * PAGE;
            assert_eq!(entry.part(range, start + 1), Range { start, len: PAGE, block: PAGE });
        }
        assert_eq!(entry.part(range, range.start), range);
        SINGLE.fetch_sub(MAX_SINGLE, Ordering::Relaxed);
    }

    /// A thread that reads while another thread writes finds a complete range, or no range.
    #[test]
    fn ranges_are_never_mixed() {
        let entry = Entry::free();
        let range = |number: usize| Range { start: number, len: number, block: number };
        entry.set(range(0));
        std::thread::scope(|scope| {
            scope.spawn(|| (0..100_000).for_each(|number| entry.set(range(number))));
            for _ in 0..100_000 {
                if let Some(found) = entry.range() {
                    assert_eq!(found, range(found.start));
                }
            }
        });
        assert_eq!(entry.range(), Some(range(99_999)));
    }

    #[test]
    fn an_entry_that_is_free_holds_nothing() {
        let place = [0_u8; 64];
        let addr = NonNull::from(&place).cast();
        let registration = Registration::new(addr, 64, 64).unwrap();
        let entry = registration.entry();
        assert!(entry.range().unwrap().holds(addr.as_ptr() as usize));
        entry.record(32, 8, false);
        entry.record(16, 8, true);
        let lost = Lost { offset: 16, len: 16, poisoned: true };
        assert_eq!(registration.take_lost(), Some(lost));
        assert_eq!(registration.take_lost(), None);
        entry.record(0, 8, false);
        assert!(registration.is_damaged());
        drop(registration);
        let again = Registration::new(addr, 64, 64).unwrap();
        assert!(!again.is_damaged());
        assert_eq!(again.take_lost(), None, "nothing is left of an earlier mapping");
    }
}
