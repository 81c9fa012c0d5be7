// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The interrupt of a queue.

/// Interrupts the guest on behalf of one virtqueue.
pub trait Signal: Send + Sync {
    /// Interrupts the guest. Any thread of the process may call this; an implementation must not
    /// wait and must not call into the device.
    fn signal(&self);
}
