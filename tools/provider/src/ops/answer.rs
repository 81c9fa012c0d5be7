// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The return values of entry points.

use crate::{
    errno::{Result, code},
    object::{Owned, Ref},
    wr::PostError,
};
use core::{ffi::c_int, ptr};

/// Returns the return value of a verb that creates an object: the object, or NULL and `errno`.
pub(super) fn created<T, U>(result: Result<Owned<T>>) -> *mut U {
    match result {
        Ok(object) => object.into_raw().cast(),
        Err(errno) => {
            errno.set();
            ptr::null_mut()
        }
    }
}

/// Runs a verb that destroys an object, and frees the object if the verb succeeds.
///
/// # Safety
///
/// `object` came from [`created`] with this type, and the caller gives it up
/// if the verb succeeds.
pub(super) unsafe fn destroyed<T>(
    object: *mut T,
    verb: impl FnOnce(Ref<'_, T>) -> Result,
) -> c_int {
    // SAFETY: `object` came from `created` with this type.
    let object = unsafe { Owned::from_raw(object) };
    let result = verb(object.as_ref());
    if result.is_err() {
        object.into_raw();
    }
    code(result)
}

/// Returns the return value of a verb that posts a list, and sets `bad_wr` on failure.
///
/// # Safety
///
/// `bad_wr` is null or the caller's to write.
pub(super) unsafe fn posted<W>(result: Result<(), PostError<W>>, bad_wr: *mut *mut W) -> c_int {
    code(result.map_err(|error| {
        if !bad_wr.is_null() {
            // SAFETY: the pointer is not null, so the caller may write to it.
            unsafe { *bad_wr = error.bad_wr };
        }
        error.errno
    }))
}
