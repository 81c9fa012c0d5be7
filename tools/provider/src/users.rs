// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Counts of the users that keep an object from being destroyed.

use crate::{errno::Result, object::Owned};
use core::{
    ptr::NonNull,
    sync::atomic::{
        AtomicU32,
        Ordering::{AcqRel, Acquire, Relaxed},
    },
};

/// Counts the users of an object, which is not destroyed before they give it up.
///
/// The count has memory of its own, which the last of the object and its users frees:
/// ibv_unimport_pd(3) frees a PD whatever uses it.
pub struct Users(Hold);

impl Users {
    /// Returns a count of no users.
    ///
    /// # Errors
    ///
    /// ENOMEM.
    pub fn new() -> Result<Self> {
        let count = Owned::<AtomicU32>::zeroed()?.into_raw();
        // SAFETY: a pointer from into_raw() is not null.
        let count = Hold(unsafe { NonNull::new_unchecked(count) });
        count.count().store(1, Relaxed);
        Ok(Self(count))
    }

    /// Returns whether the object has users.
    pub fn any(&self) -> bool {
        self.0.count().load(Acquire) != 1
    }
}

/// Keeps an object: its verb of destruction answers EBUSY until this is dropped.
pub struct Hold(NonNull<AtomicU32>);

impl Hold {
    /// Keeps the object that has this count.
    pub fn new(users: &Users) -> Self {
        users.0.count().fetch_add(1, Relaxed);
        Self(users.0.0)
    }

    fn count(&self) -> &AtomicU32 {
        // SAFETY: the count is freed with the last hold that shares it, and this is one.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.count().fetch_sub(1, AcqRel) == 1 {
            // SAFETY: the count came from `Owned`, and this was the last hold that shared it.
            drop(unsafe { Owned::from_raw(self.0.as_ptr()) });
        }
    }
}

// SAFETY: a hold leads to an atomic counter and nothing else.
unsafe impl Send for Hold {}
// SAFETY: as above.
unsafe impl Sync for Hold {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::freed;
    use std::thread;

    /// An object is busy until its last user gives it up.
    #[test]
    fn holds_are_counted() {
        let users = Users::new().unwrap();
        assert!(!users.any());
        let mut holds: Vec<Hold> = (0..3).map(|_| Hold::new(&users)).collect();
        for left in (0..3).rev() {
            assert!(users.any());
            drop(holds.remove(left / 2));
        }
        assert!(!users.any());
        // The count outlives the object while there are users.
        let (first, second) = (Hold::new(&users), Hold::new(&users));
        drop(users);
        assert_eq!(second.count().load(Relaxed), 2);
        drop(first);
        assert_eq!(second.count().load(Relaxed), 1);
        drop(second);
        assert!(freed::is_intact());
    }

    /// Threads that take and give back an object at the same time leave it free, and its count is
    /// freed once.
    #[test]
    fn holds_of_many_threads() {
        let users = Users::new().unwrap();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        let hold = Hold::new(&users);
                        assert!(users.any());
                        drop(hold);
                    }
                });
            }
        });
        assert!(!users.any());
        for _ in 0..100 {
            let users = Users::new().unwrap();
            let hold = Hold::new(&users);
            thread::scope(|scope| {
                scope.spawn(move || drop(hold));
                scope.spawn(move || drop(users));
            });
        }
    }
}
