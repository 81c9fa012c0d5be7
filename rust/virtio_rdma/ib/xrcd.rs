// SPDX-License-Identifier: GPL-2.0

//! Extended connection domains: `struct ib_xrcd`.

use super::{
    device::Device,
    object::Xrcd,
    udata::no_driver_data,
    Driver, //
};
use crate::bindings;
use kernel::{
    error::from_result,
    prelude::*, //
};

/// An extended connection domain.
pub(crate) trait XrcDomain<D: Driver>: Sized + Send + Sync {
    /// Creates the domain. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device has no XRC domains, or what it says.
    fn alloc(dev: &Device<D>) -> Result<Self>;

    /// Destroys the domain in the device. May sleep. It is dropped afterwards, unless this fails.
    ///
    /// # Errors
    ///
    /// What the device says; the object then lives on.
    fn dealloc(&self) -> Result;
}

/// The operation `alloc_xrcd`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn alloc_xrcd<D: Driver>(
    raw: *mut bindings::ib_xrcd,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core has set `device` of the new object to the device that it calls for, which
    // stays registered meanwhile.
    let dev = unsafe { Device::<D>::from_raw((*raw).device) };
    from_result(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this
        // returns.
        unsafe { no_driver_data(udata)? };
        let data = D::Xrcd::alloc(dev)?;
        // SAFETY: The core allocated `size_ib_xrcd` bytes, which are not initialised yet.
        unsafe { Xrcd::<D>::write(raw, data) };
        Ok(0)
    })
}

/// The operation `dealloc_xrcd`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn dealloc_xrcd<D: Driver>(
    raw: *mut bindings::ib_xrcd,
    udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this
        // returns.
        unsafe { no_driver_data(udata)? };
        // SAFETY: `raw` is an XRC domain that `alloc_xrcd` made, which the core destroys once: it
        // stays until the data is dropped below.
        unsafe { Xrcd::<D>::from_raw(raw) }.dealloc()?;
        // SAFETY: The core frees the memory next.
        unsafe { Xrcd::<D>::drop_data(raw) };
        Ok(0)
    })
}
