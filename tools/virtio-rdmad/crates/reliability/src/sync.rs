// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Locks that a panicking thread does not take from the others.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex. No change that it protects is half made where a thread can panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
