// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device side of a split virtqueue (VIRTIO 1.3, section 2.7).
//!
//! [`SplitQueue::pop`] takes a buffer that the driver made available. [`SplitQueue::push`] and
//! [`SplitQueue::publish`] give buffers back, a batch of them with one store. Everything that the
//! driver wrote is copied once and then checked. Each mistake has its own [`RingError`] and leaves the
//! queue as it was before.

mod chain;
mod error;
mod queue;
mod signal;

pub use chain::{Buffer, Chain};
pub use error::{RingError, MAX_DESCRIPTORS, MAX_SIZE};
pub use queue::{Layout, Position, SplitQueue};
pub use signal::Signal;
