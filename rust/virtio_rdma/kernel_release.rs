// SPDX-License-Identifier: GPL-2.0

//! The differences between the releases of Linux that the driver builds for.
//!
//! Other modules use what is here and do not know the release. Kbuild passes
//! `--cfg virtio_rdma_linux_X_Y` for each release X.Y that changed an interface
//! and is not newer than the kernel. When the oldest of these releases is no
//! longer supported, its variants go from here and its line from Kbuild.

use core::borrow::Borrow;
use kernel::{
    dma::Coherent,
    prelude::*,
    ptr::KnownSize, //
};

/// Defines `$table`, a static table of the devices that a driver serves, by which userspace finds the
/// module too.
///
/// Linux 7.3 has the macro of the kernel make the table. Before, the macro takes one that exists, and its
/// entries come with data.
#[cfg(virtio_rdma_linux_7_3)]
macro_rules! device_table {
    ($bus:literal, $id_type:ty, $table:ident, [$($id:expr),+ $(,)?]) => {
        ::kernel::module_device_table!($bus, $id_type, $table, @none, [$($id),+]);
    };
}
#[cfg(not(virtio_rdma_linux_7_3))]
macro_rules! device_table {
    ($bus:literal, $id_type:ty, $table:ident, [$($id:expr),+ $(,)?]) => {
        const $table: ::kernel::device_id::IdArray<
            $id_type,
            (),
            { <[$id_type]>::len(&[$($id),+]) },
        > = ::kernel::device_id::IdArray::new_without_index([$(($id, ())),+]);

        ::kernel::module_device_table!($bus, MODULE_DEVICE_TABLE, $table);
    };
}
pub(crate) use device_table;

/// Returns the address of coherent memory, as the device sees it.
pub(crate) fn dma_address<T: KnownSize + ?Sized>(memory: &Coherent<T>) -> u64 {
    #[cfg(virtio_rdma_linux_7_3)]
    {
        memory.dma_address()
    }
    #[cfg(not(virtio_rdma_linux_7_3))]
    {
        memory.dma_handle()
    }
}

/// Initialises what `slot` points to.
///
/// # Safety
///
/// `slot` must be valid for writes, and what is there must stay there. The caller uses it only after a
/// success.
///
/// # Errors
///
/// The errors of `init`.
pub(crate) unsafe fn init_in_place<T, E>(slot: *mut T, init: impl PinInit<T, E>) -> Result<(), E> {
    #[cfg(virtio_rdma_linux_7_3)]
    {
        // SAFETY: The caller promises that `slot` is valid for writes and stays where it is.
        unsafe { pin_init::raw_try_init(slot, init) }
    }
    #[cfg(not(virtio_rdma_linux_7_3))]
    {
        // SAFETY: The caller promises that `slot` is valid for writes and stays where it is.
        unsafe { init.__pinned_init(slot) }
    }
}

/// Returns the value of a module parameter. Its `value()` returns a copy since Linux 7.3, and a reference before.
pub(crate) fn parameter<T: Copy>(value: impl Borrow<T>) -> T {
    *value.borrow()
}
