// SPDX-License-Identifier: GPL-2.0

//! Error codes that the `kernel` crate does not name.

#![deny(unsafe_code)]

use crate::bindings;
use kernel::prelude::*;

/// Returns `EOPNOTSUPP`: the device or the driver does not have what was asked for.
pub(crate) fn unsupported() -> Error {
    Error::from_errno(-(bindings::EOPNOTSUPP as c_int))
}

/// Returns `ENETDOWN`: there is no way to the network now, and there may be one later.
pub(crate) fn network_down() -> Error {
    Error::from_errno(-(bindings::ENETDOWN as c_int))
}

/// Returns `EPROTO`: the state of the object does not allow it.
pub(crate) fn wrong_state() -> Error {
    Error::from_errno(-(bindings::EPROTO as c_int))
}
