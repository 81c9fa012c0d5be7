// SPDX-License-Identifier: GPL-2.0

//! Tables of the objects of a device, by number.

use crate::sync::IrqSpinLock;
use core::ptr::{
    self,
    NonNull, //
};
use kernel::{
    alloc::KVVec,
    new_condvar,
    prelude::*,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Full,
            Relaxed, //
        },
        CondVar,
        LockClassKey, //
    },
};

/// Slots that are allocated together, when the first of them is needed.
const CHUNK: usize = 256;

struct Published<T> {
    object: NonNull<T>,
    /// The number of calls of [`Table::with_held`] that use the object.
    users: u32,
    /// The object is being destroyed, and the device may have given its number to another object.
    leaving: bool,
}

// SAFETY: The pointer stands for a shared reference, without its lifetime.
unsafe impl<T: Sync> Send for Published<T> {}

type Slot<T> = IrqSpinLock<Option<Published<T>>>;

#[pin_data]
struct Chunk<T> {
    #[pin]
    slots: [Slot<T>; CHUNK],
}

/// Objects that are found by number, from any context.
///
/// # Invariants
///
/// - An object that is in the table is valid: it is taken out before it is dropped. A lookup holds
///   the lock of the slot as long as it uses the object, or is one of its users, with which it is not
///   taken out.
/// - An element of `chunks` is null, or from [`KBox::into_raw`] and never changed again.
pub(crate) struct Table<T: Sync> {
    chunks: KVVec<Atomic<*mut Chunk<T>>>,
    len: usize,
    name: &'static CStr,
    class: Pin<&'static LockClassKey>,
    /// An object has lost its last user, has left the table, or stays in it.
    changed: Pin<KBox<CondVar>>,
}

// SAFETY: The chunks are shared between threads, and a lock protects each slot.
unsafe impl<T: Sync> Send for Table<T> {}
// SAFETY: The chunks are shared between threads, and a lock protects each slot.
unsafe impl<T: Sync> Sync for Table<T> {}

impl<T: Sync> Table<T> {
    /// Makes a table for the numbers 0 to `len` - 1, whose locks are of class `class`. It takes
    /// memory as objects need it. May sleep.
    ///
    /// Tables of different objects need different classes: a CQ's entry is locked outside of the CQ
    /// (an interrupt finds the CQ by its number), a QP's inside (a poll finds the QP of a CQE).
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new(
        len: usize,
        name: &'static CStr,
        class: Pin<&'static LockClassKey>,
    ) -> Result<Self> {
        let mut chunks = KVVec::with_capacity(len.div_ceil(CHUNK), GFP_KERNEL)?;
        for _ in 0..len.div_ceil(CHUNK) {
            chunks.push(Atomic::new(ptr::null_mut()), GFP_KERNEL)?;
        }
        Ok(Self {
            chunks,
            len,
            name,
            class,
            changed: KBox::pin_init(new_condvar!(), GFP_KERNEL)?,
        })
    }

    /// Returns the slot of this number, if it was ever needed.
    fn slot(&self, number: u32) -> Option<&Slot<T>> {
        let number = number as usize;
        let chunk = self.chunks.get(number / CHUNK)?.load(Acquire);
        // SAFETY: By the type invariants the chunk is null, or valid as long as the table.
        let chunk = unsafe { chunk.as_ref() }?;
        chunk.slots.get(number % CHUNK)
    }

    /// Makes sure that the slot of this number is there. May sleep.
    fn grow(&self, number: u32) -> Result {
        if number as usize >= self.len {
            return Err(EINVAL);
        }
        let place = self.chunks.get(number as usize / CHUNK).ok_or(EINVAL)?;
        if !place.load(Relaxed).is_null() {
            return Ok(());
        }
        let (name, class) = (self.name, self.class);
        let chunk = KBox::pin_init(
            try_pin_init!(Chunk {
                slots <- pin_init::pin_init_array_from_fn(|_| {
                    Slot::<T>::new(None, name, class)
                }),
            }? Error),
            GFP_KERNEL,
        )?;
        // SAFETY: The chunk stays where it is, and is not moved out of when it is freed.
        let chunk = KBox::into_raw(unsafe { Pin::into_inner_unchecked(chunk) });
        // INVARIANT: The element was null, and is now from `into_raw`.
        if place.cmpxchg(ptr::null_mut(), chunk, Full).is_err() {
            // Another thread has stored a chunk in the meantime.
            // SAFETY: It is from `into_raw`, and nobody else has seen it.
            drop(unsafe { KBox::from_raw(chunk) });
        }
        Ok(())
    }

    /// Calls `f` with the object of this number, if there is one, which stays while `f` runs.
    /// `f` runs with interrupts off and must not change the table. Any context.
    pub(crate) fn with<R>(&self, number: u32, f: impl FnOnce(&T) -> R) -> Option<R> {
        let entry = self.slot(number)?.lock();
        let published = entry.as_ref()?;
        // SAFETY: By the type invariants the object is valid as long as the lock is held.
        Some(f(unsafe { published.object.as_ref() }))
    }

    /// Calls `f` with the object of this number, if there is one. A thread that takes the object out of the table
    /// meanwhile waits, so `f` must not do that itself. `f` may sleep. May sleep.
    pub(crate) fn with_held<R>(&self, number: u32, f: impl FnOnce(&T) -> R) -> Option<R> {
        let slot = self.slot(number)?;
        let mut entry = slot.lock();
        let published = (*entry).as_mut()?;
        published.users += 1;
        let object = published.object;
        drop(entry);
        // SAFETY: By the type invariants the object is valid as long as it has users.
        let result = f(unsafe { object.as_ref() });
        if let Some(published) = &mut *slot.lock() {
            published.users -= 1;
            if published.users == 0 {
                self.changed.notify_all();
            }
        }
        Some(result)
    }

    /// Returns the numbers that objects may have, as far as slots were ever needed.
    fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        let chunks = self.chunks.iter().enumerate();
        chunks
            .filter(|(_, chunk)| !chunk.load(Relaxed).is_null())
            .flat_map(|(index, _)| index * CHUNK..(index + 1) * CHUNK)
            .map(|number| number as u32)
    }

    /// Calls `f` with each object, as [`Table::with`] does.
    pub(crate) fn for_each(&self, mut f: impl FnMut(&T)) {
        for number in self.numbers() {
            self.with(number, &mut f);
        }
    }

    /// Calls `f` with each object, as [`Table::with_held`] does. May sleep.
    pub(crate) fn for_each_held(&self, mut f: impl FnMut(&T)) {
        for number in self.numbers() {
            self.with_held(number, &mut f);
        }
    }

    /// Puts an object in the table. If another one has the number and is [leaving](Table::retire), waits
    /// until it has left. May sleep.
    ///
    /// # Safety
    ///
    /// [`Table::retire`] or [`Table::unpublish`] must take this number out before the object is dropped.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the number is beyond the table, `EEXIST` if it is taken, `ENOMEM`.
    pub(super) unsafe fn publish(&self, number: u32, object: &T) -> Result {
        self.grow(number)?;
        let mut entry = self.slot(number).ok_or(EINVAL)?.lock();
        while entry.as_ref().is_some_and(|published| published.leaving) {
            self.changed.wait(&mut entry);
        }
        if entry.is_some() {
            return Err(EEXIST);
        }
        *entry = Some(Published {
            object: NonNull::from(object),
            users: 0,
            leaving: false,
        });
        Ok(())
    }

    /// Calls `destroy`, which destroys the object with this number in the device, and takes it out as
    /// [`Table::unpublish`] does. The object is found until then, and a thread that publishes another one with
    /// the same number waits: the device may give a number out again as soon as it has destroyed the
    /// object, before `destroy` returns. May sleep.
    ///
    /// # Errors
    ///
    /// The errors of `destroy`; the object then stays in the table.
    pub(super) fn retire(&self, number: u32, destroy: impl FnOnce() -> Result) -> Result {
        self.set_leaving(number, true);
        let result = destroy();
        if result.is_ok() {
            self.unpublish(number);
        } else {
            self.set_leaving(number, false);
        }
        result
    }

    fn set_leaving(&self, number: u32, leaving: bool) {
        if let Some(slot) = self.slot(number) {
            if let Some(published) = &mut *slot.lock() {
                published.leaving = leaving;
            }
            self.changed.notify_all();
        }
    }

    /// Takes the object with this number out, and waits until nobody uses it. May sleep.
    pub(super) fn unpublish(&self, number: u32) {
        let Some(slot) = self.slot(number) else {
            return;
        };
        let mut entry = slot.lock();
        while entry.as_ref().is_some_and(|published| published.users != 0) {
            self.changed.wait(&mut entry);
        }
        *entry = None;
        drop(entry);
        self.changed.notify_all();
    }
}

impl<T: Sync> Drop for Table<T> {
    fn drop(&mut self) {
        for chunk in self.chunks.iter().map(|chunk| chunk.load(Relaxed)) {
            if !chunk.is_null() {
                // SAFETY: By the type invariants it is from `into_raw`; nobody uses it any more.
                drop(unsafe { KBox::from_raw(chunk) });
            }
        }
    }
}

#[cfg(virtio_rdma_kunit)]
#[kunit_tests(virtio_rdma_ib_table)]
mod tests {
    use super::*;
    use kernel::static_lock_class;

    fn table(len: usize) -> Result<Table<u32>> {
        Table::new(len, c"tests::table", static_lock_class!())
    }

    #[test]
    fn objects_are_found_by_number() -> Result {
        let (low, high) = (5, 7);
        let table = table(600)?;
        // SAFETY: Both are taken out below.
        unsafe {
            table.publish(0, &low)?;
            table.publish(599, &high)?;
            assert_eq!(table.publish(599, &low), Err(EEXIST));
            assert_eq!(table.publish(600, &low), Err(EINVAL));
        }
        assert_eq!(table.with(0, |object| *object), Some(5));
        assert_eq!(table.with_held(599, |object| *object), Some(7));
        assert_eq!(table.with(1, |object| *object), None);
        // The table finds neither the number of a chunk that was never needed nor one beyond its end.
        assert_eq!(table.with(300, |object| *object), None);
        assert_eq!(table.with(u32::MAX, |object| *object), None);
        let mut sum = 0;
        table.for_each(|object| sum += object);
        table.for_each_held(|object| sum += object);
        assert_eq!(sum, 24);
        table.unpublish(0);
        table.unpublish(599);
        assert_eq!(table.with(599, |object| *object), None);
        Ok(())
    }

    #[test]
    fn objects_that_are_not_destroyed_stay() -> Result {
        let object = 3;
        let table = table(10)?;
        // SAFETY: It is taken out below.
        unsafe { table.publish(4, &object)? };
        assert_eq!(table.retire(4, || Err(EBUSY)), Err(EBUSY));
        assert_eq!(table.with(4, |object| *object), Some(3));
        // The object is found until it has been destroyed.
        let found = table.retire(4, || table.with(4, |_| ()).ok_or(EINVAL));
        assert_eq!(found, Ok(()));
        assert_eq!(table.with(4, |object| *object), None);
        Ok(())
    }
}
