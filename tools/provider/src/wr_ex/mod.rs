// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The entry points of `struct ibv_qp_ex` (rdma-core libibverbs/verbs.h), by
//! which a program makes work requests: ibv_wr_post(3).
//!
//! As in [`crate::ops`], the program's contract vouches for the pointers. It also
//! says that a program calls all functions but ibv_wr_start() in the thread that called
//! ibv_wr_start() last, and before that thread's ibv_wr_complete() or ibv_wr_abort().
//!
//! This module has the table of the entry points. They are in `batch`, `requests` and `setters`, and
//! call the [`WrBuilder`](crate::wr_builder::WrBuilder) that `current` finds.

mod batch;
mod current;
mod requests;
mod setters;
#[cfg(test)]
mod testbed;

use crate::{bindings::*, libibverbs::Library, object::Ref, qp::Qp};
use batch::*;
use core::mem::offset_of;
use requests::*;
use setters::*;

/// Installs the functions by which a program makes work requests on a QP.
///
/// # Safety
///
/// `qp` is a QP with rings that nobody else uses yet, and the copy of libibverbs is its own.
pub unsafe fn install(qp: Ref<'_, Qp>, library: &Library) {
    let verbs = qp.verbs().as_ptr();
    // SAFETY: the QP is the caller's alone; its union holds a `struct
    // ibv_qp_ex`, which begins with the QP, and has the functions of its release.
    unsafe {
        *verbs.byte_add(library.qp_comp_mask()).cast::<u32>() |= VERBS_QP_EX;
        let ex = verbs.cast::<ibv_qp_ex>();
        (*ex).wr_atomic_cmp_swp = Some(wr_atomic_cmp_swp);
        (*ex).wr_atomic_fetch_add = Some(wr_atomic_fetch_add);
        if library.qp_ex_has(offset_of!(ibv_qp_ex, wr_atomic_write)) {
            (*ex).wr_atomic_write = Some(wr_atomic_write);
        }
        (*ex).wr_bind_mw = Some(wr_bind_mw);
        if library.qp_ex_has(offset_of!(ibv_qp_ex, wr_flush)) {
            (*ex).wr_flush = Some(wr_flush);
        }
        (*ex).wr_local_inv = Some(wr_local_inv);
        (*ex).wr_rdma_read = Some(wr_rdma_read);
        (*ex).wr_rdma_write = Some(wr_rdma_write);
        (*ex).wr_rdma_write_imm = Some(wr_rdma_write_imm);
        (*ex).wr_send = Some(wr_send);
        (*ex).wr_send_imm = Some(wr_send_imm);
        (*ex).wr_send_inv = Some(wr_send_inv);
        (*ex).wr_set_ud_addr = Some(wr_set_ud_addr);
        (*ex).wr_set_xrc_srqn = Some(wr_set_xrc_srqn);
        (*ex).wr_set_inline_data = Some(wr_set_inline_data);
        (*ex).wr_set_inline_data_list = Some(wr_set_inline_data_list);
        (*ex).wr_set_sge = Some(wr_set_sge);
        (*ex).wr_set_sge_list = Some(wr_set_sge_list);
        (*ex).wr_start = Some(wr_start);
        (*ex).wr_complete = Some(wr_complete);
        (*ex).wr_abort = Some(wr_abort);
    }
}
