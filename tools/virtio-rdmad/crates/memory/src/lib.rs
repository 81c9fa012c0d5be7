// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest memory as a device sees it.
//!
//! [`GuestMemory`] is an immutable snapshot of a guest's memory map. It is cheap to clone and to
//! share, and it hands out [`Slice`]s: ranges that are contiguous in this process and that keep
//! their mapping alive for as long as they exist; a [`Chunk`] is a part of one, borrowed for a copy.
//!
//! The guest's processors, and those of other guests, write this memory at any time. So no Rust
//! reference to it is ever made: everything is copied in or out through raw pointers, and what was
//! copied once is what the caller checks and uses. A copy that races with the guest delivers
//! undefined bytes, never undefined behaviour of anything but those bytes.
//!
//! All `unsafe` code of the data path lives in this crate.

pub mod atomic;
mod chunk;
mod error;
mod helpers;
mod map;
mod mapping;
mod node;
mod pages;
mod pool;
mod prefetch;
mod sigbus;
mod slice;
mod unmap;

pub use chunk::Chunk;
pub use error::MemoryError;
pub use helpers::{Helper, Helpers};
pub use map::{is_same_file, whole_pages, GuestMemory, GuestRegion, Loss, MapError, PAGE_SIZE};
pub use pages::Pages;
pub use pool::{Pool, Share, ShareError, ALL_REGIONS, GUARANTEED, MAX_REGIONS};
pub use prefetch::prefetch;
pub use sigbus::{losses, survive_losses};
pub use slice::Slice;
pub use unmap::start_unmapper;
