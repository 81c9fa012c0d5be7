// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Error numbers, and the ways in which verbs report them.
//!
//! A verb that returns a pointer answers NULL and sets `errno`; a verb that
//! returns `int` answers the number itself (only `ibv_poll_cq()` answers -1 and sets
//! `errno`).

use crate::bindings;
use core::{ffi::c_int, num::NonZero};

/// A positive number of errno(3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(NonZero<c_int>);

/// The result of a verb.
pub type Result<T = (), E = Errno> = core::result::Result<T, E>;

impl Errno {
    /// The program may not do it.
    pub const EACCES: Self = Self::constant(bindings::EACCES);
    /// The object is in use.
    pub const EBUSY: Self = Self::constant(bindings::EBUSY);
    /// An argument is not valid.
    pub const EINVAL: Self = Self::constant(bindings::EINVAL);
    /// The device is gone.
    pub const EIO: Self = Self::constant(bindings::EIO);
    /// There is no such device any more.
    pub const ENODEV: Self = Self::constant(bindings::ENODEV);
    /// There is no completion.
    pub const ENOENT: Self = Self::constant(bindings::ENOENT);
    /// There is no memory, or no free entry in a queue.
    pub const ENOMEM: Self = Self::constant(bindings::ENOMEM);
    /// The object does not have the operation.
    pub const EOPNOTSUPP: Self = Self::constant(bindings::EOPNOTSUPP);
    /// The kernel speaks an ABI that this provider does not know.
    pub const EPROTONOSUPPORT: Self = Self::constant(bindings::EPROTONOSUPPORT);

    const fn constant(number: u32) -> Self {
        match NonZero::new(number as c_int) {
            Some(number) => Self(number),
            None => panic!("zero is no error"),
        }
    }

    /// Takes the return value of a command of libibverbs: 0 or an error number.
    pub fn check(ret: c_int) -> Result {
        NonZero::new(ret).map_or(Ok(()), |number| Err(Self(number)))
    }

    /// Returns this thread's `errno`, or [`Self::EINVAL`] if that is 0.
    pub fn last() -> Self {
        // SAFETY: __errno_location() gives a pointer to this thread's errno.
        NonZero::new(unsafe { *bindings::__errno_location() }).map_or(Self::EINVAL, Self)
    }

    /// Sets this thread's `errno`.
    pub fn set(self) {
        // SAFETY: __errno_location() gives a pointer to this thread's errno.
        unsafe { *bindings::__errno_location() = self.get() };
    }

    /// Returns the number.
    pub fn get(self) -> c_int {
        self.0.get()
    }
}

/// Returns the return value of a verb of type `int`.
pub fn code(result: Result) -> c_int {
    result.map_or_else(Errno::get, |()| 0)
}
