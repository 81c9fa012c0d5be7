// SPDX-License-Identifier: GPL-2.0

//! Contexts: `struct ib_ucontext`, one for each program that has opened the device.

use super::{
    device::Device,
    object::Ucontext,
    udata::Udata,
    Driver, //
};
use crate::bindings;
use kernel::{
    error::from_result,
    prelude::*,
    transmute::AsBytes, //
};

/// The context of a program that has opened the device.
pub(crate) trait UserContext<D: Driver>: Sized + Send + Sync {
    /// The description of a context for its provider.
    type Description: AsBytes;

    /// The attribute of `UVERBS_METHOD_QUERY_CONTEXT` that takes the [`Description`](Self::Description).
    /// It is declared in [`Driver::UAPI`].
    const QUERY_ATTR: usize;

    /// Creates the context; `udata` has what the provider says of itself, and takes the answer to it.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` for what the driver does not know, `EFAULT`, or any of the driver's.
    fn alloc(dev: &Device<D>, udata: &Udata<'_>) -> Result<Self>;

    /// Returns what the provider of a program that imports a context is told. The provider of the program that
    /// created the context was told the same.
    fn describe(dev: &Device<D>) -> Self::Description;
}

/// The operation `alloc_ucontext`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn alloc_ucontext<D: Driver>(
    raw: *mut bindings::ib_ucontext,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core has set `device` of the new object to the device that it calls for, which
    // stays registered meanwhile. `udata` is null, or that of the system call that the core is in
    // until this returns.
    let (dev, udata) = unsafe { (Device::<D>::from_raw((*raw).device), Udata::from_raw(udata)) };
    from_result(|| {
        let udata = udata.ok_or(EINVAL)?;
        let data = D::Ucontext::alloc(dev, &udata)?;
        // SAFETY: The core allocated `size_ib_ucontext` bytes, which are not initialised yet.
        unsafe { Ucontext::<D>::write(raw, data) };
        Ok(0)
    })
}

/// The operation `dealloc_ucontext`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn dealloc_ucontext<D: Driver>(raw: *mut bindings::ib_ucontext) {
    // SAFETY: `raw` is a context that `alloc_ucontext` made. The core has destroyed all of its
    // objects and frees it next, so that there is no reference to it.
    unsafe { Ucontext::<D>::drop_data(raw) };
}

/// The operation `query_ucontext`: a program that got another one's open file imports the context.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn query_ucontext<D: Driver>(
    raw: *mut bindings::ib_ucontext,
    attrs: *mut bindings::uverbs_attr_bundle,
) -> c_int {
    // SAFETY: `raw` is a context that `alloc_ucontext` made; its device is registered while the
    // system call is in uverbs, which holds `disassociate_srcu`.
    let dev = unsafe { Device::<D>::from_raw((*raw).device) };
    let answer = D::Ucontext::describe(dev);
    let bytes = answer.as_bytes();
    // SAFETY: `attrs` are those of the current system call; `bytes` is valid for reads of its
    // length.
    unsafe {
        bindings::uverbs_copy_to_struct_or_zero(
            attrs,
            D::Ucontext::QUERY_ATTR,
            bytes.as_ptr().cast(),
            bytes.len(),
        )
    }
}

/// Lets the device go while programs have it open. The core destroys their objects itself, and
/// nothing of this driver is mapped into them.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn disassociate_ucontext(_context: *mut bindings::ib_ucontext) {}

/// The attributes and methods that a driver adds to those of uverbs.
pub(crate) struct UapiDefinitions(unsafe extern "C" fn() -> *const bindings::uapi_definition);

impl UapiDefinitions {
    /// Wraps the function that returns the definitions, which only C can write down.
    ///
    /// # Safety
    ///
    /// `get` must be callable from any context, and return a static list that ends with an empty entry.
    pub(crate) const unsafe fn new(
        get: unsafe extern "C" fn() -> *const bindings::uapi_definition,
    ) -> Self {
        Self(get)
    }

    /// Returns the first entry of the list.
    pub(super) fn as_ptr(&self) -> *const bindings::uapi_definition {
        // SAFETY: The only way to make `self` is `new`, whose caller promised that `get` may be called.
        unsafe { (self.0)() }
    }
}
