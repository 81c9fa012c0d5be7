// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Contexts: a program's view of a device.
#![forbid(unsafe_code)]

use crate::{
    bindings::{VIRTIO_RDMA_UDATA_PATH_KERNEL, VIRTIO_RDMA_UDATA_PATH_RINGS, verbs_context},
    cmd,
    errno::{Errno, Result},
    object::Ref,
    qpn::Numbers,
};

/// What the provider adds to a context.
pub struct Private {
    /// The QP numbers in use, if the program owns the rings of its QPs and
    /// CQs; otherwise the kernel posts and polls.
    pub numbers: Option<Numbers>,
}

/// Opens a context in the kernel.
///
/// # Errors
///
/// The kernel's; ENOMEM; EPROTONOSUPPORT when the driver wants programs to post
/// and poll in a way that this provider does not know.
pub fn open(context: Ref<'_, verbs_context>) -> Result<Private> {
    let numbers = match cmd::get_context(context)?.data_path {
        VIRTIO_RDMA_UDATA_PATH_KERNEL => None,
        VIRTIO_RDMA_UDATA_PATH_RINGS => Some(Numbers::new()?),
        _ => return Err(Errno::EPROTONOSUPPORT),
    };
    Ok(Private { numbers })
}
