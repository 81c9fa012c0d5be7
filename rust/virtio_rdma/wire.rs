// SPDX-License-Identifier: GPL-2.0

//! The device ABI: the structures of `include/uapi/linux/virtio_rdma.h`, which
//! may be copied to and from memory as bytes, and their sizes.
//!
//! An abstraction: that they may be copied, and what their unions hold, is unsafe
//! here, so that it is not elsewhere.

use crate::bindings;
use kernel::{
    prelude::*,
    transmute::{
        AsBytes,
        FromBytes, //
    },
};

pub(crate) use bindings::{
    virtio_rdma_ah_attr as AhAttr,
    virtio_rdma_av as Av,
    virtio_rdma_cqe as Cqe,
    virtio_rdma_event as Event,
    virtio_rdma_qp_attr as QpAttr,
    virtio_rdma_rq_wqe as RqWqe,
    virtio_rdma_rsp_query_port as PortAttr,
    virtio_rdma_sge as Sge,
    virtio_rdma_sq_wqe as SqWqe, //
};

/// Declares structures of the ABI with their sizes in bytes.
macro_rules! wire {
    ($($name:ident: $size:literal,)*) => {
        $(
            const _: () = assert!(size_of::<bindings::$name>() == $size);

            // SAFETY: The structure consists of integers, arrays of them, and unions, and its padding
            // is written out. All bytes of a union are initialised: it is zeroed, or assigned as a
            // whole by a member of its full length.
            unsafe impl AsBytes for bindings::$name {}
            // SAFETY: Integers, and arrays and unions of them, have no invalid values.
            unsafe impl FromBytes for bindings::$name {}
        )*
    };
}

wire! {
    virtio_rdma_cmd_query_port: 1,
    virtio_rdma_rsp_query_port: 164,
    virtio_rdma_cmd_create_cq: 4,
    virtio_rdma_rsp_create_cq: 4,
    virtio_rdma_cmd_destroy_cq: 4,
    virtio_rdma_rsp_create_pd: 4,
    virtio_rdma_cmd_destroy_pd: 4,
    virtio_rdma_cmd_get_dma_mr: 8,
    virtio_rdma_rsp_mr: 12,
    virtio_rdma_cmd_reg_user_mr: 48,
    virtio_rdma_cmd_dereg_mr: 4,
    virtio_rdma_cmd_create_qp: 68,
    virtio_rdma_rsp_create_qp: 4,
    virtio_rdma_cmd_modify_qp: 152,
    virtio_rdma_cmd_query_qp: 8,
    virtio_rdma_rsp_query_qp: 144,
    virtio_rdma_cmd_destroy_qp: 4,
    virtio_rdma_cmd_query_pkey: 8,
    virtio_rdma_rsp_query_pkey: 2,
    virtio_rdma_cmd_add_gid: 28,
    virtio_rdma_cmd_del_gid: 8,
    virtio_rdma_cmd_req_notify: 8,
    virtio_rdma_sge: 16,
    virtio_rdma_sq_wqe: 88,
    virtio_rdma_sq_wqe__bindgen_ty_2__bindgen_ty_1: 16,
    virtio_rdma_sq_wqe__bindgen_ty_2__bindgen_ty_2: 32,
    virtio_rdma_sq_wqe__bindgen_ty_2__bindgen_ty_3: 52,
    virtio_rdma_rq_wqe: 16,
    virtio_rdma_cqe: 40,
    virtio_rdma_event: 8,
    virtio_rdma_uresp_alloc_ucontext: 8,
}

const _: () = assert!(size_of::<bindings::virtio_rdma_config>() == 256);
const _: () = assert!(size_of::<Av>() == 44);

/// A request or reply without a structure.
#[repr(C)]
#[derive(Clone, Copy, Default, Zeroable)]
pub(crate) struct Nothing;

// SAFETY: There are no bytes.
unsafe impl AsBytes for Nothing {}
// SAFETY: There are no bytes.
unsafe impl FromBytes for Nothing {}

/// What follows the header of a send work request, by its opcode. See `virtio_rdma_sq_wqe.wr`.
pub(crate) enum WrBody {
    /// RDMA READ and RDMA WRITE.
    Rdma {
        /// The address of the first byte there.
        remote_addr: u64,
        /// The key of the memory there.
        rkey: u32,
    },
    /// Compare-and-swap, fetch-and-add.
    Atomic {
        /// The address of the 8 bytes there.
        remote_addr: u64,
        /// What to compare with, or to add.
        compare_add: u64,
        /// What to write if the comparison is true.
        swap: u64,
        /// The key of the memory there.
        rkey: u32,
    },
    /// A datagram.
    Ud {
        /// The QP there.
        remote_qpn: u32,
        /// Its Q_Key.
        remote_qkey: u32,
        /// Where it is.
        av: Av,
    },
    /// An opcode that needs no more.
    None,
}

impl WrBody {
    /// Writes the variant to the union of a work request; what is behind it becomes 0.
    pub(crate) fn write(&self, wqe: &mut SqWqe) {
        match *self {
            WrBody::Rdma { remote_addr, rkey } => set_wr(
                wqe,
                &bindings::virtio_rdma_sq_wqe__bindgen_ty_2__bindgen_ty_1 {
                    remote_addr: remote_addr.to_le(),
                    rkey: rkey.to_le(),
                    reserved_0c: 0,
                },
            ),
            WrBody::Atomic {
                remote_addr,
                compare_add,
                swap,
                rkey,
            } => set_wr(
                wqe,
                &bindings::virtio_rdma_sq_wqe__bindgen_ty_2__bindgen_ty_2 {
                    remote_addr: remote_addr.to_le(),
                    compare_add: compare_add.to_le(),
                    swap: swap.to_le(),
                    rkey: rkey.to_le(),
                    reserved_1c: 0,
                },
            ),
            WrBody::Ud {
                remote_qpn,
                remote_qkey,
                av,
            } => set_wr(
                wqe,
                &bindings::virtio_rdma_sq_wqe__bindgen_ty_2__bindgen_ty_3 {
                    remote_qpn: remote_qpn.to_le(),
                    remote_qkey: remote_qkey.to_le(),
                    av,
                },
            ),
            WrBody::None => {}
        }
    }
}

/// Sets the union of a work request by its longest member, of which `body` is the beginning.
fn set_wr<T: AsBytes>(wqe: &mut SqWqe, body: &T) {
    const LEN: usize = size_of::<bindings::virtio_rdma_sq_wqe__bindgen_ty_2>();
    const { assert!(size_of::<T>() <= LEN) };

    let mut raw = [0; LEN];
    raw[..size_of::<T>()].copy_from_slice(body.as_bytes());
    wqe.wr = bindings::virtio_rdma_sq_wqe__bindgen_ty_2 { raw };
}

/// Sets immediate data or the key to invalidate of a send work request, as it is in memory.
pub(crate) fn set_ex(wqe: &mut SqWqe, ex: [u8; 4]) {
    wqe.ex = bindings::virtio_rdma_sq_wqe__bindgen_ty_1 {
        imm_data: u32::from_ne_bytes(ex),
    };
}

/// Immediate data or the invalidated key of a completion, as it is in memory.
pub(crate) fn ex(cqe: &Cqe) -> [u8; 4] {
    // SAFETY: Both members of the union are integers of 32 bits.
    unsafe { cqe.ex.imm_data }.to_ne_bytes()
}
