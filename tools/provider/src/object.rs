// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The C objects that libibverbs and a provider share.
//!
//! The provider allocates an object, libibverbs and the program hold pointers
//! to it, and the provider frees it when its verb of destruction succeeds. In
//! between threads use it at the same time, and libibverbs writes to it under
//! its own mutexes, so no Rust reference to an object is ever made.

use crate::{
    bindings,
    errno::{Errno, Result},
    qp::{Limits, Qp},
};
use core::{marker::PhantomData, mem::ManuallyDrop, ptr::NonNull};

/// A C object that lives for at least `'a`.
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

    /// The object's address.
    pub fn as_ptr(self) -> *mut T {
        self.object.as_ptr()
    }

    /// The field of type `U` that `project` gives the address of.
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

/// A C object on the heap that the provider owns.
pub struct Owned<T>(NonNull<T>);

impl<T: Zeroable> Owned<T> {
    /// Allocates a zeroed object.
    ///
    /// # Errors
    ///
    /// ENOMEM.
    pub fn zeroed() -> Result<Self> {
        const { assert!(size_of::<T>() != 0 && align_of::<T>() <= 16) };
        // SAFETY: calloc() has no preconditions.
        let object = unsafe { bindings::calloc(1, size_of::<T>() as _) };
        NonNull::new(object.cast()).map(Self).ok_or(Errno::ENOMEM)
    }
}

impl<T> Owned<T> {
    /// Takes back what [`Self::into_raw`] gave away.
    ///
    /// # Safety
    ///
    /// `object` came from [`Self::into_raw`] for this type, or from malloc()
    /// holding a `T`, and nobody uses it after this value is dropped.
    pub unsafe fn from_raw(object: *mut T) -> Self {
        // SAFETY: a pointer from into_raw() is not null.
        Self(unsafe { NonNull::new_unchecked(object) })
    }

    /// Gives the object away; the memory is freed by [`Self::from_raw`] alone.
    pub fn into_raw(self) -> *mut T {
        ManuallyDrop::new(self).0.as_ptr()
    }

    /// Borrows the object.
    pub fn as_ref(&self) -> Ref<'_, T> {
        // SAFETY: the object is live until `self` is dropped.
        unsafe { Ref::new(self.0.as_ptr()) }
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: the object came from calloc() and is owned by `self` alone.
        unsafe { bindings::free(self.0.as_ptr().cast()) };
    }
}

// SAFETY: plain C structures of integers, pointers and pthread types, which
// libibverbs itself allocates zeroed.
unsafe impl Zeroable for bindings::verbs_device {}
// SAFETY: as above.
unsafe impl Zeroable for bindings::ibv_pd {}
// SAFETY: as above.
unsafe impl Zeroable for bindings::ibv_ah {}
// SAFETY: as above.
unsafe impl Zeroable for bindings::verbs_mr {}
// SAFETY: as above.
unsafe impl Zeroable for bindings::verbs_cq {}
// SAFETY: as above.
unsafe impl Zeroable for Qp {}

impl<'a> Ref<'a, bindings::verbs_cq> {
    /// The CQ as libibverbs hands it out.
    pub fn cq(self) -> Ref<'a, bindings::ibv_cq> {
        // SAFETY: every variant of the union begins with the CQ.
        unsafe { self.project(|cq| cq.cast()) }
    }
}

impl<'a> Ref<'a, Qp> {
    /// The QP as libibverbs hands it out.
    pub fn qp(self) -> Ref<'a, bindings::ibv_qp> {
        // SAFETY: every variant of the union in `Qp::verbs` begins with the QP.
        unsafe { self.project(|qp| (&raw mut (*qp).verbs).cast()) }
    }

    /// What a work request may ask for.
    pub fn limits(self) -> Limits {
        // SAFETY: the field is written before the QP is handed out, and only
        // read from then on.
        unsafe { (&raw const (*self.as_ptr()).limits).read() }
    }
}

impl Owned<Qp> {
    /// Sets what a work request may ask for, before the QP is handed out.
    pub fn set_limits(&mut self, limits: Limits) {
        // SAFETY: the object is live, and nobody else has it yet.
        unsafe { (&raw mut (*self.as_ref().as_ptr()).limits).write(limits) };
    }
}
