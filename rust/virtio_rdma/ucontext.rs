// SPDX-License-Identifier: GPL-2.0

//! The contexts of programs.

#![deny(unsafe_code)]

use crate::{
    bindings,
    hca::Hca,
    ib, //
};
use kernel::prelude::*;

/// The context of a program that has opened the device. The kernel posts and polls for it, so there
/// is nothing to keep.
pub(crate) struct Ucontext;

impl ib::UserContext<Hca> for Ucontext {
    fn alloc(_dev: &ib::Device<Hca>, udata: &ib::Udata<'_>) -> Result<Self> {
        udata.respond(&bindings::virtio_rdma_uresp_alloc_ucontext {
            data_path: bindings::VIRTIO_RDMA_UDATA_PATH_KERNEL,
            reserved_04: 0,
        })?;
        Ok(Self)
    }
}
