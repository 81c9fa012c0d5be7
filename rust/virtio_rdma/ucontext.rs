// SPDX-License-Identifier: GPL-2.0

//! The contexts of programs.

#![deny(unsafe_code)]

use crate::{
    bindings,
    hca::Hca,
    ib, //
};
use kernel::prelude::*;

/// The attribute [`Ucontext::QUERY_ATTR`](ib::UserContext::QUERY_ATTR).
#[allow(unsafe_code)]
pub(crate) const UAPI: ib::UapiDefinitions =
    // SAFETY: The function only returns the address of a static list, whose last entry is empty.
    unsafe { ib::UapiDefinitions::new(bindings::virtio_rdma_uapi_definitions) };

/// The context of a program that has opened the device. It holds nothing: the objects of the program keep themselves.
pub(crate) struct Ucontext;

impl ib::UserContext<Hca> for Ucontext {
    type Description = bindings::virtio_rdma_uresp_alloc_ucontext;

    const QUERY_ATTR: usize = bindings::VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP as usize;

    fn alloc(dev: &ib::Device<Hca>, udata: &ib::Udata<'_>) -> Result<Self> {
        udata.respond(&Self::describe(dev))?;
        Ok(Self)
    }

    fn describe(dev: &ib::Device<Hca>) -> Self::Description {
        bindings::virtio_rdma_uresp_alloc_ucontext {
            data_path: match dev.config().rings {
                Some(_) => bindings::VIRTIO_RDMA_UDATA_PATH_RINGS,
                None => bindings::VIRTIO_RDMA_UDATA_PATH_KERNEL,
            },
            max_inline_data: dev.config().max_inline_data,
            features: dev.config().features,
        }
    }
}
