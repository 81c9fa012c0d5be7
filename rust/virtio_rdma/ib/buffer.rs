// SPDX-License-Identifier: GPL-2.0

//! Memory for an object that a program names by an attribute of the core.

use super::{
    device::Device,
    udata::Udata,
    Driver, //
};
use crate::bindings;
use kernel::{
    error::from_err_ptr,
    prelude::*, //
};

/// An object whose memory a program may name by an attribute of the core (`struct ib_uverbs_buffer_desc`).
#[derive(Clone, Copy)]
pub(crate) enum BufferOf {
    /// A CQ, by `UVERBS_ATTR_CREATE_CQ_BUF_UMEM` or the attributes that were before it.
    Cq,
    /// A QP, by `UVERBS_ATTR_CREATE_QP_BUF_UMEM`.
    Qp,
}

impl BufferOf {
    /// Pins and maps the memory that the program names for this object, of `least` bytes or more, to be written to.
    /// Returns a null pointer if it names none. The caller owns the memory. May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a description that the core does not know, two of them, and too few bytes; what pinning says.
    pub(crate) fn pin<D: Driver>(
        self,
        dev: &Device<D>,
        udata: &Udata<'_>,
        least: usize,
    ) -> Result<*mut bindings::ib_umem> {
        let get = match self {
            Self::Cq => bindings::virtio_rdma_umem_get_cq_buf,
            Self::Qp => bindings::virtio_rdma_umem_get_qp_buf,
        };
        let access = bindings::VIRTIO_RDMA_ACCESS_LOCAL_WRITE as c_int;
        // SAFETY: `udata` is that of the current system call, and the core has it in the attributes of that call. The
        // device is valid, and outlives its objects.
        from_err_ptr(unsafe { get(dev.as_raw(), udata.as_raw(), least, access) })
    }
}
