// SPDX-License-Identifier: GPL-2.0

//! The data that a program sends to the driver beside the attributes of a verb, and the answer.

use crate::bindings;
use core::{
    marker::PhantomData,
    ptr::NonNull, //
};
use kernel::{
    error::to_result,
    prelude::*,
    transmute::{
        AsBytes,
        FromBytes, //
    },
};

/// The data that a program sent to the driver, and the way back to it: `struct ib_udata`.
pub(crate) struct Udata<'a> {
    raw: NonNull<bindings::ib_udata>,
    _lifetime: PhantomData<&'a ()>,
}

impl Udata<'_> {
    /// Wraps what the RDMA core hands over; `None` for a null pointer, which means that no program asks.
    ///
    /// # Safety
    ///
    /// `raw` must be null, or that of the current system call and valid for the lifetime.
    pub(super) unsafe fn from_raw(raw: *mut bindings::ib_udata) -> Option<Self> {
        Some(Self {
            raw: NonNull::new(raw)?,
            _lifetime: PhantomData,
        })
    }

    /// Copies what the program sent. May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it is too short, `EOPNOTSUPP` if bytes beyond `T` are not zero, `EFAULT`.
    pub(crate) fn request<T: FromBytes + AsBytes + Zeroable>(&self) -> Result<T> {
        self.request_of(size_of::<T>())
    }

    /// Copies what the program sent to an operation that had no request structure in its first version: bytes that it
    /// did not send are zero. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if bytes beyond `T` are not zero, `EFAULT`.
    pub(crate) fn optional_request<T: FromBytes + AsBytes + Zeroable>(&self) -> Result<T> {
        self.request_of(0)
    }

    /// Copies what the program sent, which is `least` bytes or more.
    fn request_of<T: FromBytes + AsBytes + Zeroable>(&self, least: usize) -> Result<T> {
        let mut request = T::zeroed();
        let bytes = request.as_bytes_mut();
        // SAFETY: `from_raw` got `raw` from the current system call, for the lifetime of `self`; `bytes` has room
        // for `T`.
        to_result(unsafe {
            bindings::_ib_copy_validate_udata_in(
                self.raw.as_ptr(),
                bytes.as_mut_ptr().cast(),
                bytes.len(),
                least,
            )
        })?;
        Ok(request)
    }

    /// Returns what the core handed over.
    pub(super) fn as_raw(&self) -> *mut bindings::ib_udata {
        self.raw.as_ptr()
    }

    /// Refuses what the program sent to an operation that has no request structure, as
    /// `ib_is_udata_in_empty()` does. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if any byte is not zero, `EFAULT`.
    pub(crate) fn no_request(&self) -> Result {
        // SAFETY: `from_raw` got `raw` from the current system call, for the lifetime of `self`.
        to_result(unsafe { bindings::virtio_rdma_is_udata_in_empty(self.raw.as_ptr()) })
    }

    /// Zeroes what the program has room for behind an operation that has no answer, as
    /// `ib_respond_empty_udata()` does. May sleep.
    ///
    /// # Errors
    ///
    /// `EFAULT`.
    pub(crate) fn no_answer(&self) -> Result {
        // SAFETY: `from_raw` got `raw` from the current system call, for the lifetime of `self`.
        to_result(unsafe { bindings::virtio_rdma_respond_empty_udata(self.raw.as_ptr()) })
    }

    /// Copies as much of `answer` to the program as it has room for, and zeros behind it. May
    /// sleep.
    ///
    /// # Errors
    ///
    /// `EFAULT`.
    pub(crate) fn respond<T: AsBytes>(&self, answer: &T) -> Result {
        let bytes = answer.as_bytes();
        // SAFETY: `from_raw` got `raw` from the current system call, for the lifetime of `self`; `bytes` is
        // valid for reads of its length.
        to_result(unsafe {
            bindings::_ib_respond_udata(self.raw.as_ptr(), bytes.as_ptr().cast(), bytes.len())
        })
    }
}

/// Checks the data of an operation for which driver and program exchange no data of their own
/// (`ib_no_udata_io()`).
///
/// # Safety
///
/// `udata` must be null, or that of the current system call.
///
/// # Errors
///
/// `EOPNOTSUPP` if the program sent bytes that are not zero, `EFAULT`.
pub(super) unsafe fn no_driver_data(udata: *mut bindings::ib_udata) -> Result {
    // SAFETY: The caller promises that `udata` is null or that of the current system call.
    let Some(udata) = (unsafe { Udata::from_raw(udata) }) else {
        return Ok(());
    };
    udata.no_request()?;
    udata.no_answer()
}
