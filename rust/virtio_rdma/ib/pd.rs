// SPDX-License-Identifier: GPL-2.0

//! Protection domains: `struct ib_pd`.

use super::{
    device::Device,
    object::Pd,
    udata::no_driver_data,
    Driver, //
};
use crate::bindings;
use kernel::{
    error::from_result,
    prelude::*, //
};

/// A protection domain.
pub(crate) trait ProtectionDomain<D: Driver>: Sized + Send + Sync {
    /// Creates the PD. May sleep.
    ///
    /// # Errors
    ///
    /// What the device says.
    fn alloc(dev: &Device<D>) -> Result<Self>;

    /// Destroys the PD in the device. May sleep. It is dropped afterwards, unless this fails.
    ///
    /// # Errors
    ///
    /// What the device says; the object then lives on.
    fn dealloc(&self) -> Result;
}

/// The operation `alloc_pd`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn alloc_pd<D: Driver>(
    raw: *mut bindings::ib_pd,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core has set `device` of the new object to the device that it calls for, which
    // stays registered meanwhile.
    let dev = unsafe { Device::<D>::from_raw((*raw).device) };
    from_result(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this
        // returns.
        unsafe { no_driver_data(udata)? };
        let data = D::Pd::alloc(dev)?;
        // SAFETY: The core allocated `size_ib_pd` bytes, which are not initialised yet.
        unsafe { Pd::<D>::write(raw, data) };
        Ok(0)
    })
}

/// The operation `dealloc_pd`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn dealloc_pd<D: Driver>(
    raw: *mut bindings::ib_pd,
    udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this
        // returns.
        unsafe { no_driver_data(udata)? };
        // SAFETY: `raw` is a PD that `alloc_pd` made, which the core destroys once: it stays until
        // the data is dropped below.
        unsafe { Pd::<D>::from_raw(raw) }.dealloc()?;
        // SAFETY: The core frees the memory next.
        unsafe { Pd::<D>::drop_data(raw) };
        Ok(0)
    })
}
