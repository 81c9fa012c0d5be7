// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What threads and guests meet by: the standard library's atomics and fences, or under `--cfg loom`
//! those of a model checker.

#[cfg(loom)]
pub use litmus::{fence, AtomicBool, AtomicU32, AtomicU64, AtomicU8, Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
pub use std::sync::atomic::{fence, AtomicBool, AtomicU32, AtomicU64, AtomicU8};
#[cfg(not(loom))]
pub use std::sync::{Condvar, Mutex, MutexGuard};
