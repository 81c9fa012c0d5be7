// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device side of a split virtqueue (VIRTIO 1.3, section 2.7).
//!
//! [`SplitQueue::pop`] takes buffers that the driver made available, [`SplitQueue::push`] and
//! [`SplitQueue::publish`] give them back, a batch with one store. Everything the driver wrote is
//! copied once and then checked; whatever is wrong with it is a [`RingError`] of its own, and the
//! queue is where it was before.

mod chain;
mod queue;

pub use chain::{Buffer, Chain};
pub use queue::{Layout, RingError, SplitQueue, MAX_SIZE};
