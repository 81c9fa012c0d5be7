// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tenures of addresses: a peer that has found a device by an address learns when the device has the address no longer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// The time for which a device has an address without a break. A peer that has found the device keeps the tenure, and
/// looks the address up again when the tenure has ended.
#[derive(Clone, Default)]
pub(crate) struct Tenure(Arc<AtomicBool>);

impl Tenure {
    /// Notes that the device has the address no longer.
    pub fn end(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Returns whether it has not come to its end.
    pub fn lasts(&self) -> bool {
        !self.0.load(Ordering::Acquire)
    }
}
