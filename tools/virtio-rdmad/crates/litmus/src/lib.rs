// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#![forbid(unsafe_code)]
//! Memory that two sides share, as the model checker `loom` sees it: a test is run with each order
//! of its threads, and each load with each value that the C11 memory model lets it have. So a test
//! on x86-64 finds what only another processor does.
//!
//! `check` runs a test, and panics with the first order in which the test panics, or reads what
//! another thread writes without anything between the two; `LOOM_LOG=trace` says what it was. Loom
//! has no loads that come after a later store of their thread, and it is `Memory` that finds the
//! stores that would be too early: they race with the load.
//!
//! All of this exists with `--cfg loom` alone. The types take the place of those of
//! `std::sync::atomic` and of mapped memory, so that what is tested is the code that ships.
//!
//! Loom takes a sequentially consistent access for one that acquires and releases, but it knows
//! sequentially consistent fences. So of two sequentially consistent accesses that follow each
//! other in a thread, the second has such a fence in front of it here: that orders the two, and
//! neither of them with a weaker access, as on processors. That way a test notices an access, on
//! either side, that became weaker.

#[cfg(loom)]
mod atomic;
#[cfg(loom)]
mod memory;

#[cfg(loom)]
pub use atomic::{fence, AtomicBool, AtomicU32, AtomicU64, AtomicU8, AtomicUsize};
#[cfg(loom)]
pub use loom::{
    hint::spin_loop, model as check, sync::Condvar, sync::Mutex, sync::MutexGuard, thread,
};
#[cfg(loom)]
pub use memory::{Memory, Word16, Word64};
