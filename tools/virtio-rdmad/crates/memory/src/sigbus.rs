// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory that is lost: its file was truncated, or has no page to give, or the page is poisoned.
//!
//! Whoever gave out a guest's memory can truncate the file behind it, and the next access beyond its
//! end raises SIGBUS, which ends a process: with it the devices of all other guests would go. Seals
//! forbid it to a memfd, but not to files of tmpfs. So SIGBUS is handled: in a mapping of guest
//! memory, the page that was accessed becomes memory of zeros of this process, and the access goes
//! on. Who serves the guest finds out by [`losses`] and tells the guest; nobody else notices.
//!
//! A page that is replaced splits a mapping, of which the kernel lets a process have some 65,530. So
//! only a few are replaced one by one; a mapping that loses more is replaced as a whole.

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
/// Most blocks of all mappings that are.
const MAX_SINGLE_OF_ALL: usize = 8192;

/// Where a mapping is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Range {
    /// First address, a multiple of `block`.
    start: usize,
    /// Bytes.
    len: usize,
    /// Bytes that can be replaced at once: a page, or a huge page.
    block: usize,
}

impl Range {
    fn holds(self, addr: usize) -> bool {
        addr.checked_sub(self.start).is_some_and(|skip| skip < self.len)
    }

    /// The block around `addr`, which this holds.
    fn block_at(self, addr: usize) -> Self {
        let skip = (addr - self.start) / self.block * self.block;
        Self { start: self.start + skip, len: self.block.min(self.len - skip), ..self }
    }
}

/// A mapping that the handler knows.
///
/// The handler reads while others write, so `version` is odd while they do, and other than before
/// when they are through: who reads finds the whole of one range or none. The one that it looks for
/// does not change, because it is being accessed.
struct Entry {
    taken: AtomicBool,
    version: AtomicUsize,
    start: AtomicUsize,
    len: AtomicUsize,
    block: AtomicUsize,
    /// Blocks that were replaced one by one, ever.
    single: AtomicUsize,
    /// Whether anything was replaced, ever.
    damaged: AtomicBool,
    /// Bytes that were replaced and not yet taken notice of.
    lost: AtomicUsize,
    /// Lowest offset of these.
    offset: AtomicUsize,
    /// Whether one of these was poisoned.
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

    /// Changes the range. Only who has taken the entry does.
    fn set(&self, range: Range) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(range.start, Ordering::Relaxed);
        self.len.store(range.len, Ordering::Relaxed);
        self.block.store(range.block, Ordering::Relaxed);
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// The range, if nobody is changing it.
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

    /// What to replace, now that the block around `addr` of its range cannot be accessed: that
    /// block, or everything.
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

/// Entries from this one on have never been taken.
static ENTRIES_USED: AtomicUsize = AtomicUsize::new(0);

/// Blocks of all mappings that are replaced one by one.
static SINGLE: AtomicUsize = AtomicUsize::new(0);

/// Times that memory was replaced.
static LOSSES: AtomicU64 = AtomicU64::new(0);

/// A part of a mapping that was replaced by zeros.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Lost {
    /// Where the first of it is in the mapping.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
    /// By a memory error of the host, and not for lack of a file.
    pub poisoned: bool,
}

/// A mapping that the handler knows, until this is dropped.
#[derive(Debug)]
pub(crate) struct Registration(usize);

impl Registration {
    /// Notes the mapping of `len` bytes at `addr`, which can be replaced by blocks of `block` bytes
    /// that begin at multiples of that.
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

    /// Whether anything was ever lost.
    pub(crate) fn is_damaged(&self) -> bool {
        self.entry().damaged.load(Ordering::Acquire)
    }

    /// What was lost since this was last asked.
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

/// Survives that guest memory is lost, from now on. Once a process.
pub fn survive_losses() -> Result<(), Error> {
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

/// How often guest memory has turned into zeros. Where, [`crate::GuestMemory::take_losses`] says.
#[inline]
pub fn losses() -> u64 {
    LOSSES.load(Ordering::Acquire)
}

/// The handler of SIGBUS.
extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a siginfo_t to a handler that was set with SA_SIGINFO.
    let info = unsafe { &*info };
    // SAFETY: that of SIGBUS has an address.
    let addr = unsafe { info.si_addr() };
    let poisoned = matches!(info.si_code, libc::BUS_MCEERR_AR | libc::BUS_MCEERR_AO);
    if replace(addr as usize, poisoned).is_none() {
        // SAFETY: the access is repeated when this returns, and ends the process as it would have
        // without this handler.
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
    // SAFETY: the range is whole blocks of a mapping of guest memory, which is reached by raw copies
    // alone and stays mapped; what it held is lost already, or will be given up with what is.
    unsafe { mmap_anonymous(start, part.len, protection, flags) }.ok()?;
    // SAFETY: the advice does not change what the memory holds. That it may fail does no harm: what
    // is there are zeros, and what the guest still writes.
    let _ = unsafe { madvise(start, part.len, Advice::LinuxDontDump) };
    entry.record(part.start - range.start, part.len, poisoned);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;
    const HUGE: usize = 2 << 20;

    /// A part begins and ends where the pages of its mapping do, huge ones as well.
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
        // A mapping of whole pages whose length is no whole number of them is cut at its end.
        let odd = Range { start: PAGE, len: PAGE + 1, block: PAGE };
        assert_eq!(odd.block_at(2 * PAGE).len, 1);
    }

    /// What splits a mapping is bounded: after some blocks all of it is replaced.
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

    /// Who reads while another writes finds one range or the other, or none.
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
