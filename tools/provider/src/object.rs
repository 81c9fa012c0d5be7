// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The C objects that libibverbs and a provider share.
//!
//! The provider allocates an object, libibverbs and the program hold pointers
//! to it, and the provider frees it when its verb of destruction succeeds. In
//! between threads use it at the same time, and libibverbs writes to it under
//! its own mutexes, so no Rust reference to its part of an object is ever made.
//! The provider's own part stands behind that of libibverbs. It is complete
//! before the object is handed out, and changes only by its own locks and
//! atomics from then on.

#[cfg(test)]
use crate::model::freed::free;
use crate::{
    bindings,
    errno::{Errno, Result},
};
use core::{marker::PhantomData, mem::ManuallyDrop, ptr::NonNull, sync::atomic::AtomicU32};

/// Points to a C object that lives for at least `'a`.
pub struct Ref<'a, T> {
    object: NonNull<T>,
    lifetime: PhantomData<&'a ()>,
}

impl<T> Clone for Ref<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Ref<'_, T> {}

impl<'a, T> Ref<'a, T> {
    /// Takes a pointer that C code passed in.
    ///
    /// # Safety
    ///
    /// `object` points to a live, initialised `T` for all of `'a`.
    pub unsafe fn new(object: *mut T) -> Self {
        Self {
            // SAFETY: a pointer to a live object is not null.
            object: unsafe { NonNull::new_unchecked(object) },
            lifetime: PhantomData,
        }
    }

    /// Takes a pointer that may be null, for which it returns `None`.
    ///
    /// # Safety
    ///
    /// A pointer that is not null is as [`Self::new`] demands.
    pub unsafe fn optional(object: *mut T) -> Option<Self> {
        // SAFETY: the pointer is not null, so the caller vouches for the object.
        (!object.is_null()).then(|| unsafe { Self::new(object) })
    }

    /// Returns the object's address.
    pub fn as_ptr(self) -> *mut T {
        self.object.as_ptr()
    }

    /// Returns the field of type `U` whose address `project` computes.
    ///
    /// # Safety
    ///
    /// `project` returns the address of an initialised field of its argument.
    pub unsafe fn project<U>(self, project: impl FnOnce(*mut T) -> *mut U) -> Ref<'a, U> {
        // SAFETY: a field lives as long as its object.
        unsafe { Ref::new(project(self.as_ptr())) }
    }
}

/// A type of C object for which all bytes zero is a valid value.
///
/// # Safety
///
/// All bytes zero are a valid value of the type.
pub unsafe trait Zeroable {}

/// A C structure behind which the provider keeps private data of its own.
pub trait Extended {
    /// The private data of the provider: `CqPrivate` behind `struct verbs_cq`. Any thread may read
    /// it.
    type Private: Sync;
}

/// A C object, and the provider's private data.
#[repr(C)]
pub struct Object<V: Extended> {
    /// The part of libibverbs; first, because libibverbs hands out its address.
    verbs: V,
    /// The provider's private data.
    private: V::Private,
}

/// A C object on the heap that the provider owns.
pub struct Owned<T>(NonNull<T>);

impl<T> Owned<T> {
    /// Takes back the object that [`Self::into_raw`] gave away.
    ///
    /// # Safety
    ///
    /// `object` came from [`Self::into_raw`] for this type, and nobody uses it after this value is
    /// dropped.
    pub unsafe fn from_raw(object: *mut T) -> Self {
        // SAFETY: into_raw() does not give a null pointer.
        Self(unsafe { NonNull::new_unchecked(object) })
    }

    /// Gives the object away. Only [`Self::from_raw`] leads to its memory being freed.
    pub fn into_raw(self) -> *mut T {
        ManuallyDrop::new(self).0.as_ptr()
    }

    /// Borrows the object.
    pub fn as_ref(&self) -> Ref<'_, T> {
        // SAFETY: the object is live until `self` is dropped.
        unsafe { Ref::new(self.0.as_ptr()) }
    }
}

impl<T: Zeroable> Owned<T> {
    /// Allocates a zeroed object.
    ///
    /// # Errors
    ///
    /// ENOMEM.
    pub fn zeroed() -> Result<Self> {
        allocate().map(Self)
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: the object came from malloc() and is owned by `self` alone.
        unsafe {
            self.0.drop_in_place();
            free(self.0);
        }
    }
}

/// An object that is not complete: it has the part of libibverbs, but not yet the provider's.
pub struct Blank<V: Extended>(NonNull<Object<V>>);

impl<V: Extended + Zeroable> Blank<V> {
    /// Allocates an object whose C part is zeroed.
    ///
    /// # Errors
    ///
    /// ENOMEM.
    pub fn new() -> Result<Self> {
        allocate().map(Self)
    }
}

impl<V: Extended> Blank<V> {
    /// Returns the part of libibverbs.
    pub fn verbs(&self) -> Ref<'_, V> {
        // SAFETY: the C part is initialised, and lives as long as `self`.
        unsafe { Ref::new(&raw mut (*self.0.as_ptr()).verbs) }
    }

    /// Completes the object.
    pub fn finish(self, private: V::Private) -> Owned<Object<V>> {
        let object = ManuallyDrop::new(self).0;
        // SAFETY: the memory has room for the whole object, and nobody else uses it yet.
        unsafe { (&raw mut (*object.as_ptr()).private).write(private) };
        Owned(object)
    }
}

impl<V: Extended> Drop for Blank<V> {
    fn drop(&mut self) {
        // SAFETY: the object came from malloc(), is owned by `self` alone, and
        // its C part is plain data.
        unsafe { free(self.0) };
    }
}

/// The alignment that any memory of malloc() has.
const MALLOC_ALIGN: usize = 16;

/// Allocates zeroed memory for a `T`.
fn allocate<T>() -> Result<NonNull<T>> {
    let (align, len) = const { (align_of::<T>(), size_of::<T>()) };
    const { assert!(size_of::<T>() != 0) };
    if align <= MALLOC_ALIGN {
        // SAFETY: calloc() has no preconditions.
        let object = unsafe { bindings::calloc(1, len as _) };
        return NonNull::new(object.cast()).ok_or(Errno::ENOMEM);
    }
    // SAFETY: the alignment is a power of two that divides the length.
    let object = unsafe { bindings::aligned_alloc(align as _, len as _) };
    let object = NonNull::new(object.cast::<T>()).ok_or(Errno::ENOMEM)?;
    // SAFETY: the memory has room for a `T`.
    unsafe { object.write_bytes(0, 1) };
    Ok(object)
}

/// Frees memory of [`allocate`] or malloc().
///
/// # Safety
///
/// Nobody uses the memory any more.
#[cfg(not(test))]
unsafe fn free<T>(object: NonNull<T>) {
    // SAFETY: the memory came from malloc(), and its only user gives it up.
    unsafe { bindings::free(object.as_ptr().cast()) };
}

macro_rules! zeroable {
    ($($type:ty),* $(,)?) => {
        $(
            // SAFETY: libibverbs itself allocates the structure zeroed; it consists of
            // integers, pointers and types of pthread.
            unsafe impl Zeroable for $type {}
        )*
    };
}
zeroable!(
    bindings::verbs_device,
    bindings::ibv_pd,
    bindings::ibv_td,
    bindings::ibv_ah,
    bindings::verbs_mr,
    bindings::ibv_mw,
    bindings::verbs_cq,
    bindings::verbs_qp,
    bindings::verbs_srq,
    bindings::verbs_xrcd,
);
// SAFETY: zero is a valid atomic.
unsafe impl Zeroable for AtomicU32 {}

impl<'a, V: Extended> Ref<'a, Object<V>> {
    /// Returns the part of libibverbs.
    pub fn verbs(self) -> Ref<'a, V> {
        // SAFETY: the field is initialised.
        unsafe { self.project(|object| &raw mut (*object).verbs) }
    }

    /// Returns the provider's private data.
    pub fn private(self) -> &'a V::Private {
        // SAFETY: the field is initialised, and not written to since the
        // object was handed out.
        unsafe { &(*self.as_ptr()).private }
    }
}

impl<V: Extended> Ref<'_, Object<V>> {
    /// Completes an object in memory that libibverbs allocated and initialised.
    ///
    /// # Safety
    ///
    /// The memory has room for the whole object, which is aligned, and nobody else uses it yet.
    pub unsafe fn complete(self, private: V::Private) {
        // SAFETY: see above.
        unsafe { (&raw mut (*self.as_ptr()).private).write(private) };
    }

    /// Drops the provider's private data of an object in memory of libibverbs.
    ///
    /// # Safety
    ///
    /// The object was completed, and nobody uses it any more.
    pub unsafe fn finish(self) {
        // SAFETY: see above.
        unsafe { (&raw mut (*self.as_ptr()).private).drop_in_place() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::freed;
    use std::{
        mem::offset_of,
        slice,
        sync::{Arc, atomic::Ordering::Relaxed},
    };

    /// The part of libibverbs of an object of these tests.
    #[repr(C)]
    struct Tested {
        handle: u64,
        words: [u64; 5],
    }

    // SAFETY: the structure consists of integers.
    unsafe impl Zeroable for Tested {}

    impl Extended for Tested {
        type Private = Dropped;
    }

    /// Private data, which counts how often it is dropped.
    struct Dropped(Arc<AtomicU32>);

    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    fn tested(count: &Arc<AtomicU32>) -> Owned<Object<Tested>> {
        Blank::<Tested>::new().unwrap().finish(Dropped(Arc::clone(count)))
    }

    /// libibverbs finds its part where the object begins; the provider's private data is behind it.
    #[test]
    fn libibverbs_part_comes_first() {
        let count = Arc::default();
        let object = tested(&count);
        let at = object.as_ref().as_ptr();
        assert_eq!(object.as_ref().verbs().as_ptr().addr(), at.addr());
        assert_eq!(offset_of!(Object<Tested>, verbs), 0);
        assert!(offset_of!(Object<Tested>, private) >= size_of::<Tested>());
    }

    /// An object that was given away is dropped once, after it was taken back. Its memory is freed
    /// with it.
    #[test]
    fn an_object_is_dropped_once() {
        let count = Arc::default();
        drop(tested(&count));
        assert_eq!(count.load(Relaxed), 1);
        let raw = tested(&count).into_raw();
        assert_eq!(count.load(Relaxed), 1);
        // SAFETY: it came from into_raw().
        let object = unsafe { Owned::from_raw(raw) };
        assert_eq!((object.as_ref().as_ptr(), count.load(Relaxed)), (raw, 1));
        drop(object);
        assert_eq!(count.load(Relaxed), 2);
    }

    /// An object that was not completed has no private data, and none is dropped.
    #[test]
    fn a_blank_drops_nothing() {
        let blank = Blank::<Tested>::new().unwrap();
        // SAFETY: the part is there.
        let bytes = unsafe {
            slice::from_raw_parts(blank.verbs().as_ptr().cast::<u8>(), size_of::<Tested>())
        };
        assert!(bytes.iter().all(|&byte| byte == 0));
        let before = freed::count();
        drop(blank);
        assert_eq!(freed::count() - before, 1);
        // An object that libibverbs allocated keeps its fields.
        // SAFETY: calloc() has no preconditions, and the memory has room.
        let memory = unsafe {
            let raw: *mut Object<Tested> =
                bindings::calloc(1, size_of::<Object<Tested>>() as _).cast();
            (*raw).verbs.handle = 77;
            raw
        };
        let count = Arc::default();
        // SAFETY: the memory is this test's alone, and has room.
        unsafe {
            let object = Ref::new(memory);
            object.complete(Dropped(Arc::clone(&count)));
            assert_eq!((*object.verbs().as_ptr()).handle, 77);
            assert_eq!(count.load(Relaxed), 0);
            object.finish();
            bindings::free(memory.cast());
        }
        assert_eq!(count.load(Relaxed), 1);
    }

    /// Memory is zeroed and aligned as the type demands, also where malloc() does not do that.
    #[test]
    fn memory_is_zeroed_and_aligned() {
        #[repr(C, align(256))]
        struct Wide([u8; 512]);
        #[repr(C, align(16))]
        struct Narrow([u8; 48]);
        // SAFETY: the structure consists of bytes.
        unsafe impl Zeroable for Wide {}
        // SAFETY: the structure consists of bytes.
        unsafe impl Zeroable for Narrow {}
        fn check<T: Zeroable>() {
            // Several, as the first may be zeroed and aligned by chance.
            let mut all: Vec<Owned<T>> = vec![];
            for _ in 0..16 {
                let object = Owned::<T>::zeroed().unwrap();
                let at = object.as_ref().as_ptr();
                assert!(at.is_aligned());
                // SAFETY: the object is live, and this thread's alone.
                unsafe {
                    let bytes = slice::from_raw_parts(at.cast::<u8>(), size_of::<T>());
                    assert!(bytes.iter().all(|&byte| byte == 0));
                    at.write_bytes(0xa5, 1);
                }
                if all.len() < 8 {
                    all.push(object);
                } else {
                    let raw = object.into_raw();
                    // SAFETY: the memory came from malloc(), and nobody uses it any more.
                    unsafe { bindings::free(raw.cast()) };
                }
            }
        }
        check::<Wide>();
        check::<Narrow>();
    }
}
