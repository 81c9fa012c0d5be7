// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The atomics and fences between threads and the device; under `--cfg loom` those of a model
//! checker.

#[cfg(not(loom))]
pub use core::{
    hint::spin_loop,
    sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, fence},
};
#[cfg(loom)]
pub use litmus::{AtomicBool, AtomicU32, AtomicUsize, fence, spin_loop};
