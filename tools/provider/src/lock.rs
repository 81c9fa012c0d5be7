// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Locks of the data path.
//!
//! They are spin locks, because posting and polling hold them for some tens of nanoseconds.
//! A thread that waits for longer gives up the processor, so that the holder can run.

use crate::{
    atomic::{AtomicU32, AtomicUsize, spin_loop},
    bindings,
};
use core::{
    cell::UnsafeCell,
    mem,
    ops::{Deref, DerefMut},
    sync::atomic::Ordering::{Acquire, Relaxed, Release},
};

/// The number of times that a thread looks at a taken lock before it gives up the processor.
const SPINS: u32 = 200;

/// The number of threads that use an object at a time.
#[derive(Clone, Copy)]
pub struct Threads {
    one: bool,
}

impl Threads {
    /// Any number of threads.
    pub const MANY: Self = Self { one: false };

    /// One thread.
    ///
    /// # Safety
    ///
    /// The program ensures it: it said so by a thread domain, or by a flag of
    /// the object.
    pub const unsafe fn one() -> Self {
        Self { one: true }
    }

    /// Returns one thread if either is.
    pub const fn or(self, other: Self) -> Self {
        Self { one: self.one || other.one }
    }
}

/// A value that one thread at a time can use.
pub struct Lock<T> {
    taken: AtomicU32,
    /// Whether one thread uses the object ([`Threads::one`]), so that the lock is never taken.
    elided: bool,
    /// The thread that keeps the lock and may take it again; 0 if there is no such thread.
    keeper: AtomicUsize,
    value: UnsafeCell<T>,
}

// SAFETY: the lock hands out the value to one thread at a time.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    /// Returns an open lock.
    pub fn new(value: T) -> Self {
        Self::with(value, Threads::MANY)
    }

    /// Returns an open lock for as many threads. For one thread, the
    /// lock costs nothing.
    pub fn with(value: T, threads: Threads) -> Self {
        Self {
            taken: AtomicU32::new(0),
            elided: threads.one,
            keeper: AtomicUsize::new(0),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the lock, and holds it until the guard is dropped.
    pub fn lock(&self) -> Guard<'_, T> {
        let frees = !self.elided && (self.taken.swap(1, Acquire) == 0 || self.wait());
        Guard { lock: self, frees }
    }

    /// Returns whether a thread has the lock.
    #[cfg(test)]
    pub fn is_taken(&self) -> bool {
        self.taken.load(Relaxed) != 0
    }

    /// Returns the guard that was kept.
    ///
    /// # Safety
    ///
    /// This thread took the lock and kept its guard ([`Guard::keep`], [`Guard::keep_open`]). It has
    /// no other guard of the lock, and does not take the lock while it has this one.
    pub unsafe fn kept(&self) -> Guard<'_, T> {
        Guard { lock: self, frees: !self.elided }
    }

    /// Returns the guard that [`Guard::keep_open`] kept. From now on this thread waits for the lock as
    /// others do.
    ///
    /// # Safety
    ///
    /// As [`Self::kept`].
    pub unsafe fn reclaim(&self) -> Guard<'_, T> {
        self.keeper.store(0, Relaxed);
        // SAFETY: this thread kept the guard, and has no other one.
        unsafe { self.kept() }
    }

    /// Waits until the lock is free, and takes it. Returns false if this thread has it already.
    #[cold]
    fn wait(&self) -> bool {
        // Only this thread stores its own number there.
        if self.keeper.load(Relaxed) == this_thread() {
            return false;
        }
        loop {
            let mut spins = 0;
            while self.taken.load(Relaxed) != 0 {
                spins += 1;
                if spins % SPINS == 0 {
                    // SAFETY: sched_yield() has no preconditions.
                    unsafe { bindings::sched_yield() };
                }
                spin_loop();
            }
            if self.taken.swap(1, Acquire) == 0 {
                return true;
            }
        }
    }
}

/// Returns a number that is not 0 and that no other live thread has.
fn this_thread() -> usize {
    // SAFETY: the function has no preconditions. Each thread has an errno of its own.
    unsafe { bindings::__errno_location() }.addr()
}

/// A lock that is held.
pub struct Guard<'a, T> {
    lock: &'a Lock<T>,
    /// Whether dropping this guard opens the lock.
    frees: bool,
}

impl<T> Guard<'_, T> {
    /// Keeps the lock taken without the guard, for a later call of this thread.
    pub fn keep(self) {
        mem::forget(self);
    }

    /// Keeps the lock as [`Self::keep`] does. Until [`Lock::reclaim`] this thread may take the lock
    /// as if it were open.
    pub fn keep_open(self) {
        self.lock.keeper.store(this_thread(), Relaxed);
        self.keep();
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one, and so the only way to the value.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard is the only one, and so the only way to the value.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        if self.frees {
            self.lock.taken.store(0, Release);
        }
    }
}

// SAFETY: a shared guard gives shared access to the value, and nothing else.
unsafe impl<T: Sync> Sync for Guard<'_, T> {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{thread, time::Duration};

    #[test]
    fn one_thread_at_a_time() {
        const ROUNDS: u64 = 100_000;
        let lock = Lock::new(0u64);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..ROUNDS).for_each(|_| *lock.lock() += 1));
            }
        });
        assert_eq!(*lock.lock(), 4 * ROUNDS);
    }

    #[test]
    fn kept_until_it_is_returned() {
        let lock = Lock::new(1u32);
        let mut guard = lock.lock();
        *guard = 2;
        guard.keep();
        assert!(lock.is_taken());
        // SAFETY: the guard of this thread was kept.
        let guard = unsafe { lock.kept() };
        assert_eq!(*guard, 2);
        drop(guard);
        assert!(!lock.is_taken());
    }

    /// The thread that keeps a lock open does not wait for itself, another one does.
    #[test]
    fn kept_open_for_one_thread() {
        let lock = Lock::new(0u32);
        lock.lock().keep_open();
        *lock.lock() += 1;
        *lock.lock() += 1;
        assert!(lock.is_taken());
        thread::scope(|scope| {
            let other = scope.spawn(|| *lock.lock());
            thread::sleep(Duration::from_millis(20));
            assert!(!other.is_finished());
            // SAFETY: this thread kept the guard.
            let mut guard = unsafe { lock.reclaim() };
            *guard = 7;
            drop(guard);
            assert_eq!(other.join().unwrap(), 7);
        });
        // A thread that kept the lock once has to wait for it later.
        thread::scope(|scope| {
            lock.lock().keep_open();
            // SAFETY: this thread kept the guard.
            drop(unsafe { lock.reclaim() });
            let held = scope.spawn(|| lock.lock().keep()).join();
            assert!(held.is_ok() && lock.keeper.load(Relaxed) == 0);
            assert!(lock.is_taken());
        });
    }

    #[test]
    fn elided_waits_for_nobody() {
        // SAFETY: there is one thread.
        let lock = Lock::with(1u32, unsafe { Threads::one() });
        lock.lock().keep();
        assert_eq!(*lock.lock(), 1);
    }
}
