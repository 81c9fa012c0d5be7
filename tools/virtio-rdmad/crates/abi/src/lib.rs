// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-rdma device ABI.
//!
//! Everything here is generated from `include/uapi/linux/virtio_rdma.h`, which is
//! the only definition of what driver and device exchange, and has the header's
//! names; `Documentation/specification` explains it. The build asserts that
//! sizes and offsets are those of the C compiler. Safe code can read every
//! structure from bytes and see it as bytes (`zerocopy`).
//!
//! The header's unions of work requests and completions are plain words here:
//! `ex` of a CQE and of a work request has the four bytes of `imm_data` (in
//! the order of the wire) or `invalidate_rkey`; `wr` is read by means of
//! [`WrRdma`], [`WrAtomic`], [`WrUd`] and [`WrReg`].

#[cfg(not(target_endian = "little"))]
compile_error!("the ABI is little-endian and is used in place");

#[allow(
    missing_docs,
    non_camel_case_types,
    unused_qualifications,
    clippy::all,
    clippy::pedantic,
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block
)]
mod bindings {
    type virtio_rdma_cqe__bindgen_ty_1 = u32;
    type virtio_rdma_sq_wqe__bindgen_ty_1 = u32;
    type virtio_rdma_sq_wqe__bindgen_ty_2 = [u64; 7];
    type virtio_rdma_ring_cqe__bindgen_ty_1 = u32;
    type virtio_rdma_ring_sq_wqe__bindgen_ty_1 = u32;
    type virtio_rdma_ring_ud_wqe__bindgen_ty_1 = u32;

    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}

mod features;

pub use bindings::*;
pub use features::{closed, is_agreement};

/// `wr.rdma` of a send work request: READ and WRITE.
pub type WrRdma = virtio_rdma_sq_wqe__bindgen_ty_2__bindgen_ty_1;
/// `wr.atomic` of a send work request: compare-and-swap, fetch-and-add.
pub type WrAtomic = virtio_rdma_sq_wqe__bindgen_ty_2__bindgen_ty_2;
/// `wr.ud` of a send work request: a datagram.
pub type WrUd = virtio_rdma_sq_wqe__bindgen_ty_2__bindgen_ty_3;
/// `wr.reg` of a send work request: fast registration.
pub type WrReg = virtio_rdma_sq_wqe__bindgen_ty_2__bindgen_ty_4;
