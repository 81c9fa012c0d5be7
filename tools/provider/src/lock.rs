// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Locks of the data path.
//!
//! A spin lock, as posting and polling hold it for some tens of nanoseconds.
//! Where more threads than CPUs meet on one, those that wait give up the CPU.

use crate::bindings;
use core::{
    cell::UnsafeCell,
    hint, mem,
    ops::{Deref, DerefMut},
    sync::atomic::{
        AtomicU32,
        Ordering::{Acquire, Relaxed, Release},
    },
};

/// Looks at a taken lock before the CPU is given up.
const SPINS: u32 = 200;

/// How many threads use an object at a time.
#[derive(Clone, Copy)]
pub struct Threads {
    one: bool,
}

impl Threads {
    /// Any number.
    pub const MANY: Self = Self { one: false };

    /// One.
    ///
    /// # Safety
    ///
    /// The program sees to it: it said so by a thread domain, or by a flag of
    /// the object.
    pub const unsafe fn one() -> Self {
        Self { one: true }
    }

    /// One, if either is.
    pub const fn or(self, other: Self) -> Self {
        Self { one: self.one || other.one }
    }
}

/// A value that one thread at a time can use.
pub struct Lock<T> {
    taken: AtomicU32,
    /// See [`Threads::one`].
    elided: bool,
    value: UnsafeCell<T>,
}

// SAFETY: the lock hands out the value to one thread at a time.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    /// An open lock.
    pub const fn new(value: T) -> Self {
        Self { taken: AtomicU32::new(0), elided: false, value: UnsafeCell::new(value) }
    }

    /// An open lock for as many threads. With one, nobody ever waits, and the
    /// lock costs nothing.
    pub const fn with(value: T, threads: Threads) -> Self {
        Self { taken: AtomicU32::new(0), elided: threads.one, value: UnsafeCell::new(value) }
    }

    /// Takes the lock, and holds it until the guard is dropped.
    pub fn lock(&self) -> Guard<'_, T> {
        if !self.elided && self.taken.swap(1, Acquire) != 0 {
            self.wait();
        }
        Guard(self)
    }

    /// The guard that was kept.
    ///
    /// # Safety
    ///
    /// This thread took the lock, kept its guard ([`Guard::keep`]) and has no
    /// other one of it.
    pub unsafe fn kept(&self) -> Guard<'_, T> {
        Guard(self)
    }

    /// Takes the lock when its holder lets go.
    #[cold]
    fn wait(&self) {
        loop {
            let mut spins = 0;
            while self.taken.load(Relaxed) != 0 {
                spins += 1;
                if spins % SPINS == 0 {
                    // SAFETY: sched_yield() has no preconditions.
                    unsafe { bindings::sched_yield() };
                }
                hint::spin_loop();
            }
            if self.taken.swap(1, Acquire) == 0 {
                return;
            }
        }
    }
}

/// A lock that is held.
pub struct Guard<'a, T>(&'a Lock<T>);

impl<T> Guard<'_, T> {
    /// Keeps the lock beyond the guard, for a later call of this thread.
    pub fn keep(self) {
        mem::forget(self);
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one, and so the only way to the value.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        if !self.0.elided {
            self.0.taken.store(0, Release);
        }
    }
}

// SAFETY: a guard gives no more than a reference to the value does.
unsafe impl<T: Sync> Sync for Guard<'_, T> {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

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
    fn kept_until_it_is_given_back() {
        let lock = Lock::new(1u32);
        let mut guard = lock.lock();
        *guard = 2;
        guard.keep();
        assert_eq!(lock.taken.load(Relaxed), 1);
        // SAFETY: the guard of this thread was kept.
        let guard = unsafe { lock.kept() };
        assert_eq!(*guard, 2);
        drop(guard);
        assert_eq!(lock.taken.load(Relaxed), 0);
    }

    #[test]
    fn elided_waits_for_nobody() {
        // SAFETY: there is one thread.
        let lock = Lock::with(1u32, unsafe { Threads::one() });
        lock.lock().keep();
        assert_eq!(*lock.lock(), 1);
    }
}
