// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Contexts: a program's view of a device.
#![forbid(unsafe_code)]

use crate::{
    bindings::{VIRTIO_RDMA_UDATA_PATH_KERNEL, verbs_context},
    cmd,
    errno::{Errno, Result},
    object::Ref,
};

/// Opens a context in the kernel.
///
/// # Errors
///
/// The kernel's; EPROTONOSUPPORT when the driver wants programs to post and
/// poll in a way that this provider does not know.
pub fn open(context: Ref<'_, verbs_context>) -> Result {
    match cmd::get_context(context)?.data_path {
        VIRTIO_RDMA_UDATA_PATH_KERNEL => Ok(()),
        _ => Err(Errno::EPROTONOSUPPORT),
    }
}
