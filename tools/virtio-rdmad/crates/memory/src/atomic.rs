// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The atomics, fences and locks by which threads and guests communicate: those of the standard
//! library, or under `--cfg loom` those of a model checker.

#[cfg(loom)]
pub use litmus::{fence, AtomicBool, AtomicU32, AtomicU64, AtomicU8, Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
pub use std::sync::atomic::{fence, AtomicBool, AtomicU32, AtomicU64, AtomicU8};
#[cfg(not(loom))]
pub use std::sync::{Condvar, Mutex, MutexGuard};
