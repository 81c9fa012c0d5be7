// SPDX-License-Identifier: GPL-2.0

//! Error codes that the `kernel` crate does not name.

#![deny(unsafe_code)]

use crate::bindings;
use kernel::prelude::*;

/// `EOPNOTSUPP`: neither device nor driver has what was asked for.
pub(crate) fn unsupported() -> Error {
    Error::from_errno(-(bindings::EOPNOTSUPP as c_int))
}

/// `EPROTO`: not allowed in the object's present state.
pub(crate) fn wrong_state() -> Error {
    Error::from_errno(-(bindings::EPROTO as c_int))
}
