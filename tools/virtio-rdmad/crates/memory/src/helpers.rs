// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Threads without work of their own help other threads with large copies.
//!
//! A thread that has much to copy cuts the copy into parts and shares it ([`Helpers::share`]). Helpers, which look for
//! shared copies all the time ([`Helper::help`]), take parts as the thread itself does, until there are no more. The
//! thread goes on when all parts are done, so what it copies from and to needs to last no longer than for a copy
//! without help.
//!
//! A thread is a helper only while it has nothing else to do ([`Helpers::join`]). Helpers that find nothing to do leave,
//! and are called again when enough was copied without them. A call that brings no help makes the next one later.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use crate::atomic::{AtomicU32, AtomicU64};

/// The number of copies that are shared at the same time. Threads that find no seat copy alone.
const SEATS: usize = 8;

/// The number of helpers above which nobody is called. More of them would wait for memory.
const ENOUGH: u32 = 3;

/// Bytes that are copied without enough help before a helper is called, at first and at last.
const SHORTEST_PATIENCE: u64 = 1 << 20;
const LONGEST_PATIENCE: u64 = 1 << 30;

/// Looks at a helper that is not done before the thread that waits for it offers its processor to others. A part takes
/// a tenth of the time.
#[cfg(not(loom))]
const LOOKS: u32 = 1000;

/// The state of a seat: somebody has it.
const TAKEN: u32 = 1 << 30;
/// The state of a seat: helpers may join. The number of those that have is in the bits below.
const OPEN: u32 = 1 << 31;

/// A copy that is shared.
struct Job<'a> {
    parts: u32,
    copy: &'a (dyn Fn(u32) + Sync),
    /// Whether a helper panicked, so that a part is missing.
    panicked: AtomicBool,
}

/// The place of a copy that is shared.
#[repr(align(128))]
struct Seat {
    state: AtomicU32,
    /// The number of parts, for helpers that look whether any is left.
    parts: AtomicU32,
    /// The next part.
    next: AtomicU32,
    /// The copy, while the seat is open or has helpers.
    job: AtomicPtr<Job<'static>>,
}

impl Seat {
    fn new() -> Self {
        Self {
            state: AtomicU32::new(0),
            parts: AtomicU32::new(0),
            next: AtomicU32::new(0),
            job: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// Takes the seat, if nobody has it.
    fn take(&self) -> bool {
        let free = || self.state.load(Ordering::Relaxed) == 0;
        let take =
            || self.state.compare_exchange(0, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok();
        free() && take()
    }

    /// Lets helpers join.
    ///
    /// # Safety
    ///
    /// The caller has taken the seat, and `job` lives until the result is dropped.
    unsafe fn open(&self, job: &Job<'_>) -> Opened<'_> {
        self.parts.store(job.parts, Ordering::Relaxed);
        self.next.store(0, Ordering::Relaxed);
        self.job.store(std::ptr::from_ref(job).cast_mut().cast(), Ordering::Relaxed);
        self.state.store(TAKEN | OPEN, Ordering::Release);
        Opened(self)
    }

    /// Copies parts until there are no more. Returns whether there were any.
    fn work(&self, job: &Job<'_>) -> bool {
        let mut worked = false;
        loop {
            let part = self.next.fetch_add(1, Ordering::Relaxed);
            if part >= job.parts {
                return worked;
            }
            (job.copy)(part);
            worked = true;
        }
    }

    /// Joins the copy, if the seat has one with parts that are left. Returns whether it copied any.
    #[inline]
    fn help(&self) -> bool {
        let state = self.state.load(Ordering::Relaxed);
        let is_left = || self.next.load(Ordering::Relaxed) < self.parts.load(Ordering::Relaxed);
        state & OPEN != 0 && is_left() && self.join(state)
    }

    fn join(&self, state: u32) -> bool {
        let joined =
            self.state.compare_exchange(state, state + 1, Ordering::Acquire, Ordering::Relaxed);
        if joined.is_err() {
            return false;
        }
        let _joined = Joined(self);
        // SAFETY: the seat was open when this thread joined, so its job was stored before and lives until the seat is
        // closed and `_joined` is dropped (`Seat::open`).
        let job = unsafe { &*self.job.load(Ordering::Relaxed) };
        catch_unwind(AssertUnwindSafe(|| self.work(job))).unwrap_or_else(|_| {
            job.panicked.store(true, Ordering::Relaxed);
            true
        })
    }
}

/// A seat that is open. When this is dropped, nobody uses the job any more.
struct Opened<'a>(&'a Seat);

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_and(!OPEN, Ordering::Relaxed);
        let mut looks = 0;
        // What helpers have copied is there when they have left.
        while self.0.state.load(Ordering::Acquire) != TAKEN {
            looks += 1;
            wait(looks);
        }
        self.0.state.store(0, Ordering::Release);
    }
}

/// Waits for a moment, between two of so many looks.
#[cfg(not(loom))]
fn wait(looks: u32) {
    if looks % LOOKS == 0 {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}

#[cfg(loom)]
fn wait(_looks: u32) {
    litmus::thread::yield_now();
}

/// A helper that has joined a copy.
struct Joined<'a>(&'a Seat);

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_sub(1, Ordering::Release);
    }
}

/// A value with cache lines of its own.
#[repr(align(128))]
struct Aligned<T>(T);

/// The threads that help each other.
pub struct Helpers {
    seats: [Seat; SEATS],
    /// The number of helpers.
    there: Aligned<AtomicU32>,
    /// Bytes that were copied without enough help since somebody was called.
    unhelped: Aligned<AtomicU64>,
    /// Bytes after which somebody is called.
    patience: AtomicU64,
    /// Calls a thread without work, if there is one.
    call: Box<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for Helpers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Helpers").field("there", &self.there.0).finish_non_exhaustive()
    }
}

impl Helpers {
    /// Returns helpers without any thread. `call` is to make a thread without work call [`Self::join`]. Any thread that
    /// shares copies calls it; it must not block.
    pub fn new(call: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            seats: std::array::from_fn(|_| Seat::new()),
            there: Aligned(AtomicU32::new(0)),
            unhelped: Aligned(AtomicU64::new(0)),
            patience: AtomicU64::new(SHORTEST_PATIENCE),
            call: Box::new(call),
        }
    }

    /// Returns whether there are any.
    #[inline]
    pub fn are_there(&self) -> bool {
        self.there.0.load(Ordering::Relaxed) != 0
    }

    /// Returns whether a copy of so many bytes finds help. Calls for more if there is not enough.
    #[inline]
    pub fn are_there_for(&self, bytes: u64) -> bool {
        let there = self.there.0.load(Ordering::Relaxed);
        if there < ENOUGH {
            self.miss(bytes);
        }
        there != 0
    }

    /// Notes a copy without enough help.
    fn miss(&self, bytes: u64) {
        let patience = self.patience.load(Ordering::Relaxed);
        if self.unhelped.0.fetch_add(bytes, Ordering::Relaxed) + bytes >= patience {
            self.unhelped.0.store(0, Ordering::Relaxed);
            self.patience.store((2 * patience).min(LONGEST_PATIENCE), Ordering::Relaxed);
            (self.call)();
        }
    }

    /// Calls `copy` with each number below `parts`, in any order and by several threads at the same time. All calls have
    /// ended, and what they wrote is there, when this returns. `copy` must not share copies itself.
    ///
    /// # Panics
    ///
    /// If `copy` does, in whichever thread.
    pub fn share(&self, parts: u32, copy: &(dyn Fn(u32) + Sync)) {
        let Some(seat) = self.seats.iter().find(|seat| seat.take()) else {
            (0..parts).for_each(copy);
            return;
        };
        let job = Job { parts, copy, panicked: AtomicBool::new(false) };
        // SAFETY: this thread took the seat, and drops the result before the job.
        let opened = unsafe { seat.open(&job) };
        seat.work(&job);
        drop(opened);
        assert!(!job.panicked.into_inner(), "a helper panicked");
    }

    /// Makes the calling thread a helper.
    pub fn join(&self) -> Helper<'_> {
        self.there.0.fetch_add(1, Ordering::Relaxed);
        Helper { helpers: self, next: 0, has_helped: false }
    }
}

/// A thread that helps others, until this is dropped.
#[derive(Debug)]
pub struct Helper<'a> {
    helpers: &'a Helpers,
    /// The seat that it looks at first: the one behind that of the copy that it last helped with.
    next: usize,
    has_helped: bool,
}

impl Helper<'_> {
    /// Takes parts of a copy that is shared, until that has no more. Returns whether there was one.
    #[inline]
    pub fn help(&mut self) -> bool {
        let (before, behind) = self.helpers.seats.split_at(self.next);
        let Some(at) = behind.iter().chain(before).position(Seat::help) else { return false };
        self.next = (self.next + at + 1) % SEATS;
        if !self.has_helped {
            self.has_helped = true;
            // It was worth to call.
            self.helpers.patience.store(SHORTEST_PATIENCE, Ordering::Relaxed);
        }
        true
    }
}

impl Drop for Helper<'_> {
    fn drop(&mut self) {
        self.helpers.there.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;
    use std::thread::yield_now;

    use super::*;

    fn helpers() -> (Arc<Helpers>, Arc<AtomicU32>) {
        let calls = Arc::new(AtomicU32::new(0));
        let counter = Arc::clone(&calls);
        let call = move || {
            counter.fetch_add(1, Ordering::Relaxed);
        };
        (Arc::new(Helpers::new(call)), calls)
    }

    /// Ends threads when it is dropped, also by a failed check.
    struct Ends<'a>(&'a AtomicBool);

    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// Shares jobs one after the other, each in memory of its own, and checks that each part was done once.
    fn share_jobs(helpers: &Helpers, jobs: u32, parts: u32) {
        for job in 0..jobs {
            let done: Vec<_> = (0..parts).map(|_| AtomicU32::new(0)).collect();
            helpers.share(parts, &|part| {
                let before = done[part as usize].fetch_add(job + 1, Ordering::Relaxed);
                assert_eq!(before, 0);
            });
            assert!(done.iter().all(|part| part.load(Ordering::Relaxed) == job + 1));
        }
    }

    #[test]
    fn each_part_is_done_once_and_before_the_end() {
        let (helpers, _) = helpers();
        let ends = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut helper = helpers.join();
                    while !ends.load(Ordering::Relaxed) {
                        if !helper.help() {
                            yield_now();
                        }
                    }
                });
            }
            let ends = Ends(&ends);
            // More threads share than there are seats.
            let sharing: Vec<_> =
                (0..=SEATS).map(|_| scope.spawn(|| share_jobs(&helpers, 500, 7))).collect();
            for thread in sharing {
                thread.join().unwrap();
            }
            drop(ends);
        });
        assert!(!helpers.join().help(), "nobody shares anything any more");
    }

    #[test]
    fn a_helper_does_all_that_the_thread_leaves() {
        let (helpers, _) = helpers();
        let helped = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut helper = helpers.join();
                while !helper.help() {
                    yield_now();
                }
                helped.store(true, Ordering::Relaxed);
            });
            // The first part waits for the second one, which the helper does.
            let second = AtomicBool::new(false);
            helpers.share(2, &|part| match part {
                0 => {
                    while !second.load(Ordering::Acquire) {
                        yield_now();
                    }
                }
                _ => second.store(true, Ordering::Release),
            });
        });
        assert!(helped.into_inner());
    }

    #[test]
    fn a_panic_of_either_thread_ends_the_copy() {
        let (helpers, _) = helpers();
        for _ in 0..=SEATS {
            let shared = || helpers.share(1, &|_| panic!("part"));
            assert!(catch_unwind(AssertUnwindSafe(shared)).is_err());
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut helper = helpers.join();
                while !helper.help() {
                    yield_now();
                }
            });
            // The part of this thread waits for that of the helper, which panics.
            let (this, other) = (std::thread::current().id(), AtomicBool::new(false));
            let shared = || {
                helpers.share(2, &|_| {
                    if std::thread::current().id() == this {
                        while !other.load(Ordering::Relaxed) {
                            yield_now();
                        }
                    } else {
                        other.store(true, Ordering::Relaxed);
                        panic!("part of the helper");
                    }
                });
            };
            assert!(catch_unwind(AssertUnwindSafe(shared)).is_err());
        });
        assert!(helpers.seats.iter().all(|seat| seat.state.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn calls_become_rare_unless_they_bring_help() {
        let (helpers, calls) = helpers();
        let calls = || calls.swap(0, Ordering::Relaxed);
        let copies =
            |bytes: u64| (0..bytes >> 16).filter(|_| helpers.are_there_for(1 << 16)).count();
        assert_eq!((copies(SHORTEST_PATIENCE), calls()), (0, 1));
        assert_eq!((copies(SHORTEST_PATIENCE), calls()), (0, 0));
        assert_eq!((copies(SHORTEST_PATIENCE), calls()), (0, 1));
        for _ in 0..20 {
            copies(LONGEST_PATIENCE);
        }
        calls();
        assert_eq!((copies(LONGEST_PATIENCE), calls()), (0, 1));
        // A helper that comes by itself and helps.
        let mut helper = helpers.join();
        let begun = [AtomicBool::new(false), AtomicBool::new(false)];
        let both = |part| {
            begun[part as usize].store(true, Ordering::Relaxed);
            while !begun.iter().all(|begun| begun.load(Ordering::Relaxed)) {
                yield_now();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| helpers.share(2, &both));
            while !helper.help() {
                yield_now();
            }
        });
        assert_eq!((copies(SHORTEST_PATIENCE), calls()), (16, 1), "another one may come as well");
        let _enough: Vec<_> = (1..ENOUGH).map(|_| helpers.join()).collect();
        copies(LONGEST_PATIENCE);
        assert_eq!(calls(), 0);
    }
}

/// Checks the orders of memory accesses on a processor of any kind: `make loom`.
#[cfg(all(test, loom))]
mod orders {
    use std::sync::Arc;

    use litmus::{check, thread};

    use super::*;

    const WORDS: usize = 3;

    /// Two copies use a seat in turn while a helper looks at it. The parts of each are there when it ends, whichever
    /// thread has copied them, and the helper meets no job that has ended.
    #[test]
    fn copies_are_there_when_they_end() {
        check(|| {
            let seat = Arc::new(Seat::new());
            let words: [AtomicU32; WORDS] = std::array::from_fn(|_| AtomicU32::new(0));
            let helper = thread::spawn({
                let seat = Arc::clone(&seat);
                move || seat.help()
            });
            for (first, parts) in [(0, 2), (2, 1)] {
                assert!(seat.take());
                let copy = |part: u32| words[first + part as usize].store(1, Ordering::Relaxed);
                let job = Job { parts, copy: &copy, panicked: AtomicBool::new(false) };
                // SAFETY: this thread took the seat, and drops the result before the job.
                let opened = unsafe { seat.open(&job) };
                seat.work(&job);
                drop(opened);
                for word in &words[first..first + parts as usize] {
                    assert_eq!(word.load(Ordering::Relaxed), 1);
                }
            }
            helper.join().unwrap();
        });
    }
}
