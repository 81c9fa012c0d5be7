// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#![forbid(unsafe_code)]
//! Memory that two sides share, for the model checker `loom`. Loom runs a test with each order of its
//! threads, and gives each load each value that the C11 memory model allows. So a test on x86-64 finds
//! what happens only on another processor.
//!
//! `check` runs a test. It panics at the first order in which the test panics, or in which a thread
//! reads what another one writes without anything that orders the two; `LOOM_LOG=trace` shows that
//! order. In loom no load happens after a later store of its own thread. `Memory` finds stores that
//! would come too early, because they race with the load.
//!
//! All of this exists with `--cfg loom` only. The types replace those of `std::sync::atomic` and mapped
//! memory, so that the tests run the code that ships.
//!
//! Loom treats a sequentially consistent access as one that acquires and releases, but it has
//! sequentially consistent fences. So where two sequentially consistent accesses follow each other in a
//! thread, there is such a fence in front of the second one here. It orders these two, and neither of
//! them with a weaker access, as on processors. So a test notices if an access on either side becomes
//! weaker.

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
