// SPDX-License-Identifier: GPL-2.0

//! Memory windows: `struct ib_mw`.

use super::{
    object::{
        Mw,
        Pd, //
    },
    udata::no_driver_data,
    Driver, //
};
use crate::bindings;
use kernel::{
    error::from_result,
    prelude::*, //
};

/// A memory window. Programs bind it by work requests.
pub(crate) trait MemoryWindow<D: Driver>: Sized + Send + Sync {
    /// Creates a window of this type (`enum ib_mw_type`), not bound yet. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device has no windows, or what the device says.
    fn alloc(pd: &Pd<D>, mw_type: u32) -> Result<Self>;

    /// Destroys the window, which is in `pd`, in the device, bound or not. May sleep. It is dropped
    /// afterwards, unless this fails.
    ///
    /// # Errors
    ///
    /// What the device says; the object then lives on.
    fn dealloc(&self, pd: &Pd<D>) -> Result;

    /// Returns the first key of the window.
    fn key(&self) -> u32;
}

/// The operation `alloc_mw`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn alloc_mw<D: Driver>(
    raw: *mut bindings::ib_mw,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core has set the type of the new window, and its PD to one that `alloc_pd` made
    // and that it keeps until this returns.
    let (pd, mw_type) = unsafe { (Pd::<D>::from_raw((*raw).pd), (*raw).type_) };
    from_result(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this
        // returns.
        unsafe { no_driver_data(udata)? };
        let data = D::Mw::alloc(pd, mw_type)?;
        let key = data.key();
        // SAFETY: The core allocated `size_ib_mw` bytes, and initialised only its own members.
        unsafe {
            Mw::<D>::write(raw, data);
            (*raw).rkey = key;
        }
        Ok(0)
    })
}

/// The operation `dealloc_mw`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn dealloc_mw<D: Driver>(raw: *mut bindings::ib_mw) -> c_int {
    from_result(|| {
        // SAFETY: `raw` is a window that `alloc_mw` made, which the core destroys once: it stays
        // until the data is dropped below. Its PD stays too, because the core counts the window as
        // a user of the PD.
        let (mw, pd) = unsafe { (Mw::<D>::from_raw(raw), Pd::<D>::from_raw((*raw).pd)) };
        mw.dealloc(pd)?;
        // SAFETY: The core frees the memory next.
        unsafe { Mw::<D>::drop_data(raw) };
        Ok(0)
    })
}
