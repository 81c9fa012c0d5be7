// SPDX-License-Identifier: GPL-2.0

//! Debug messages. `dev_dbg!` of the `kernel` crate prints in kernels with
//! CONFIG_RUST_DEBUG_ASSERTIONS alone; these are switched on like those of drivers in C
//! (`Documentation/admin-guide/dynamic-debug-howto.rst`), with `dyndbg=+p` for example.

use crate::{
    bindings,
    dma::device_as_raw, //
};
use kernel::{
    device,
    prelude::*, //
};

/// Logs that the device refused a command, with the names of the command and of the status. Any context.
///
/// It is a debug message, because a program can cause refusals as often as it likes.
pub(crate) fn command_failed(dev: &device::Device, command: &str, status: &str) {
    // SAFETY: `dev` is a reference to a device, and each of the two strings is as long as it says; the function
    // only reads them.
    unsafe {
        bindings::virtio_rdma_command_failed(
            device_as_raw(dev),
            command.as_ptr(),
            command.len() as c_int,
            status.as_ptr(),
            status.len() as c_int,
        );
    }
}
