// SPDX-License-Identifier: GPL-2.0

//! The objects of a device: the C structures with what the driver adds to them.

use super::Driver;
use crate::{
    bindings,
    kernel_release, //
};
use core::ops::Deref;
use kernel::{
    prelude::*,
    types::Opaque, //
};

/// A C structure of the RDMA core, and the driver's data behind it.
///
/// # Invariants
///
/// A reference to an [`Object`] exists only between the initialisation of `handle` and `data` and
/// the drop of `data`.
#[repr(C)]
pub(crate) struct Object<C, T> {
    raw: Opaque<C>,
    handle: u32,
    data: T,
}

// SAFETY: The driver only reads the C part, or hands it to the RDMA core, which locks.
unsafe impl<C, T: Send> Send for Object<C, T> {}
// SAFETY: The driver only reads the C part, or hands it to the RDMA core, which locks.
unsafe impl<C, T: Sync> Sync for Object<C, T> {}

impl<C, T> Object<C, T> {
    /// Bytes that the RDMA core must allocate for the object.
    pub(super) const SIZE: usize = {
        // kmalloc() aligns every size to that of a u64 at least.
        assert!(core::mem::align_of::<Self>() <= core::mem::align_of::<u64>());
        core::mem::size_of::<Self>()
    };

    /// Returns the C structure.
    pub(crate) fn as_raw(&self) -> *mut C {
        self.raw.get()
    }

    /// Returns the number by which the driver finds the object: the one that the driver's data said when the
    /// object was created. It is 0 for an object that is not found by number.
    pub(super) fn handle(&self) -> u32 {
        self.handle
    }

    /// Returns the object in which `raw` is embedded.
    ///
    /// # Safety
    ///
    /// `raw` must be the structure of an object of this type, valid and initialised for `'a`.
    pub(super) unsafe fn from_raw<'a>(raw: *mut C) -> &'a Self {
        // SAFETY: `raw` is at offset 0 of the object, which the caller promises is valid and initialised for `'a`.
        unsafe { &*raw.cast::<Self>() }
    }

    /// Initialises the driver's data in place; `handle` says by which number the object is found.
    ///
    /// # Safety
    ///
    /// `raw` must be the first member of [`Object::SIZE`] bytes that stay where they are, the
    /// driver's data of which is not initialised.
    ///
    /// # Errors
    ///
    /// The errors of `init`.
    pub(super) unsafe fn init<'a>(
        raw: *mut C,
        init: impl PinInit<T, Error>,
        handle: impl FnOnce(&T) -> u32,
    ) -> Result<&'a Self> {
        let this = raw.cast::<Self>();
        // SAFETY: The caller promises that `raw` heads `SIZE` bytes that stay where they are, so `handle` and
        // `data` are valid for writes and `data` is pinned. `data` is initialised when `handle` gets it.
        unsafe {
            kernel_release::init_in_place(&raw mut (*this).data, init)?;
            (&raw mut (*this).handle).write(handle(&(*this).data));
        }
        // SAFETY: `handle` and `data` have just been initialised.
        Ok(unsafe { &*this })
    }

    /// Initialises the driver's data of an object that is not found by number with a value.
    ///
    /// # Safety
    ///
    /// `raw` must be the first member of [`Object::SIZE`] bytes that stay where they are, the
    /// driver's data of which is not initialised.
    pub(super) unsafe fn write(raw: *mut C, data: T) {
        let this = raw.cast::<Self>();
        // SAFETY: The caller promises that `raw` heads `SIZE` bytes, so `handle` and `data` are valid for writes.
        unsafe {
            (&raw mut (*this).handle).write(0);
            (&raw mut (*this).data).write(data);
        }
    }

    /// Makes an object that is not found by number, with the C structure zeroed.
    pub(super) fn new(data: T) -> Self
    where
        C: Default,
    {
        Self {
            raw: Opaque::new(C::default()),
            handle: 0,
            data,
        }
    }

    /// Drops the driver's data.
    ///
    /// # Safety
    ///
    /// `raw` must be the structure of an initialised object, and there must be no reference to it.
    pub(super) unsafe fn drop_data(raw: *mut C) {
        // SAFETY: The caller promises that the data is initialised and that there is no reference to it.
        unsafe { core::ptr::drop_in_place(&raw mut (*raw.cast::<Self>()).data) };
    }
}

impl<C, T> Deref for Object<C, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.data
    }
}

/// A `struct ib_ucontext`.
pub(crate) type Ucontext<D> = Object<bindings::ib_ucontext, <D as Driver>::Ucontext>;
/// A `struct ib_pd`.
pub(crate) type Pd<D> = Object<bindings::ib_pd, <D as Driver>::Pd>;
/// A `struct ib_cq`.
pub(crate) type Cq<D> = Object<bindings::ib_cq, <D as Driver>::Cq>;
/// A `struct ib_qp`.
pub(crate) type Qp<D> = Object<bindings::ib_qp, <D as Driver>::Qp>;
/// A `struct ib_srq`.
pub(crate) type Srq<D> = Object<bindings::ib_srq, <D as Driver>::Srq>;
/// A `struct ib_xrcd`.
pub(crate) type Xrcd<D> = Object<bindings::ib_xrcd, <D as Driver>::Xrcd>;
/// A `struct ib_ah`.
pub(crate) type Ah<D> = Object<bindings::ib_ah, <D as Driver>::Ah>;
/// A `struct ib_mr`.
pub(crate) type Mr<D> = Object<bindings::ib_mr, <D as Driver>::Mr>;
/// A `struct ib_mw`.
pub(crate) type Mw<D> = Object<bindings::ib_mw, <D as Driver>::Mw>;
