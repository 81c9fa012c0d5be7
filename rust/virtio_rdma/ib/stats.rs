// SPDX-License-Identifier: GPL-2.0

//! The counters that `rdma stat` and sysfs show of a port.

use super::{
    device::Device,
    Driver, //
};
use crate::bindings;
use kernel::prelude::*;

/// The name of a counter.
#[repr(transparent)]
pub(crate) struct StatDesc(bindings::rdma_stat_desc);

// SAFETY: The description is never written, and its only pointer is to a static string.
unsafe impl Sync for StatDesc {}

impl StatDesc {
    /// Names a counter.
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self(bindings::rdma_stat_desc {
            name: name.to_bytes_with_nul().as_ptr(),
            flags: 0,
            priv_: core::ptr::null(),
        })
    }
}

/// The time in milliseconds for which the core may show a value without asking again.
const LIFESPAN_MS: c_ulong = 10;

/// The operation `alloc_hw_port_stats`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn alloc_hw_port_stats<D: Driver>(
    _dev: *mut bindings::ib_device,
    _port: u32,
) -> *mut bindings::rdma_hw_stats {
    // SAFETY: `StatDesc` is a transparent wrapper, and the descriptions are static.
    unsafe {
        bindings::rdma_alloc_hw_stats_struct(
            D::STATS.as_ptr().cast(),
            D::STATS.len() as c_int,
            LIFESPAN_MS,
        )
    }
}

/// The operation `get_hw_stats`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn get_hw_stats<D: Driver>(
    dev: *mut bindings::ib_device,
    stats: *mut bindings::rdma_hw_stats,
    _port: u32,
    _index: c_int,
) -> c_int {
    // SAFETY: The core calls with a device of this driver and what `alloc_hw_port_stats` made, which
    // has `num_counters` values, zeroed at first, and holds the lock of these.
    let (dev, values) = unsafe {
        (
            Device::<D>::from_raw(dev),
            core::slice::from_raw_parts_mut(
                (&raw mut (*stats).value).cast::<u64>(),
                (*stats).num_counters as usize,
            ),
        )
    };
    for (index, value) in values.iter_mut().enumerate() {
        *value = dev.stat(index);
    }
    values.len() as c_int
}
