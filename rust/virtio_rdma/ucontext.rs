// SPDX-License-Identifier: GPL-2.0

//! The contexts of programs.

#![deny(unsafe_code)]

use crate::{
    bindings,
    hca::Hca,
    ib,
    trace::refuse, //
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
        let asked: bindings::virtio_rdma_ureq_alloc_ucontext = udata.optional_request()?;
        if asked.comp_mask != 0 {
            let error = crate::errno::unsupported();
            return Err(refuse(error, c"the mask of a context", asked.comp_mask, 0));
        }
        udata.respond(&Self::describe(dev))?;
        Ok(Self)
    }

    fn describe(dev: &ib::Device<Hca>) -> Self::Description {
        let config = dev.config();
        let has_srqs = config.max_srq != 0;
        bindings::virtio_rdma_uresp_alloc_ucontext {
            data_path: match config.rings {
                Some(_) if config.behind_bus => bindings::VIRTIO_RDMA_UDATA_PATH_RINGS_BUS,
                Some(_) => bindings::VIRTIO_RDMA_UDATA_PATH_RINGS,
                None => bindings::VIRTIO_RDMA_UDATA_PATH_KERNEL,
            },
            max_inline_data: config.max_inline_data,
            features: config.features,
            max_cqe: dev.max_cqe(),
            max_qp_wr: dev.max_qp_wr(),
            max_send_sge: config.max_send_sge,
            max_recv_sge: config.max_recv_sge,
            max_srq_wr: if has_srqs { config.max_srq_wr } else { 0 },
            max_srq_sge: if has_srqs { config.max_srq_sge } else { 0 },
            // The driver knows no bit, and so it has taken none.
            comp_mask: 0,
        }
    }
}
