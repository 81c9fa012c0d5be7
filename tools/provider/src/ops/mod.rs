// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The entry points of `struct verbs_context_ops` (rdma-core
//! libibverbs/driver.h).
//!
//! Each turns the pointers of C into the types of [`crate::object`] and calls
//! the verb. For a verb that is not in a table libibverbs calls its own function, which answers
//! EOPNOTSUPP. libibverbs and the program's contract with it vouch for the
//! pointers: this provider made the objects that are passed in, and they are
//! not yet destroyed; attribute structures are valid, and the caller's.
//!
//! This module has the tables; the modules below it have the entry points of each kind of object.

mod ah;
mod answer;
#[cfg(test)]
mod causes;
mod context;
mod cq;
mod domains;
mod mr;
mod qp;
mod srq;
#[cfg(test)]
mod testbed;
#[cfg(test)]
mod tests;

use crate::bindings::verbs_context_ops;
use ah::*;
pub use context::query_port_speed;
use context::*;
use core::mem::MaybeUninit;
use cq::*;
use domains::*;
use mr::*;
use qp::*;
use srq::*;

/// The verbs that are the same on both data paths.
pub static COMMON: verbs_context_ops = verbs_context_ops {
    alloc_parent_domain: Some(alloc_parent_domain),
    alloc_pd: Some(alloc_pd),
    alloc_td: Some(alloc_td),
    attach_mcast: Some(attach_mcast),
    create_ah: Some(create_ah),
    create_cq: Some(create_cq),
    create_cq_ex: Some(create_cq_ex),
    create_qp: Some(create_qp),
    create_qp_ex: Some(create_qp_ex),
    dealloc_pd: Some(dealloc_pd),
    dealloc_td: Some(dealloc_td),
    dereg_mr: Some(dereg_mr),
    destroy_ah: Some(destroy_ah),
    destroy_cq: Some(destroy_cq),
    destroy_qp: Some(destroy_qp),
    detach_mcast: Some(detach_mcast),
    free_context: Some(free_context),
    import_mr: Some(import_mr),
    import_pd: Some(import_pd),
    modify_cq: Some(modify_cq),
    modify_qp: Some(modify_qp),
    query_device_ex: Some(query_device_ex),
    query_port: Some(query_port),
    query_qp: Some(query_qp),
    query_rt_values: Some(query_rt_values),
    reg_dmabuf_mr: Some(reg_dmabuf_mr),
    reg_mr: Some(reg_mr),
    rereg_mr: Some(rereg_mr),
    unimport_mr: Some(unimport_mr),
    unimport_pd: Some(unimport_pd),
    ..NONE
};

/// The verbs of the data path on which the program has the rings.
pub static RINGS: verbs_context_ops = verbs_context_ops {
    alloc_mw: Some(alloc_mw),
    bind_mw: Some(bind_mw),
    close_xrcd: Some(close_xrcd),
    create_srq: Some(create_srq),
    create_srq_ex: Some(create_srq_ex),
    dealloc_mw: Some(dealloc_mw),
    destroy_srq: Some(destroy_srq),
    get_srq_num: Some(get_srq_num),
    modify_srq: Some(modify_srq),
    open_qp: Some(open_qp),
    open_xrcd: Some(open_xrcd),
    poll_cq: Some(poll_cq),
    post_recv: Some(post_recv),
    post_send: Some(post_send),
    post_srq_recv: Some(post_srq_recv),
    query_srq: Some(query_srq),
    req_notify_cq: Some(req_notify_cq),
    resize_cq: Some(resize_cq),
    ..NONE
};

/// The verbs of the data path on which the kernel posts and polls.
pub static KERNEL: verbs_context_ops = verbs_context_ops {
    poll_cq: Some(poll_cq_kernel),
    post_recv: Some(post_recv_kernel),
    post_send: Some(post_send_kernel),
    req_notify_cq: Some(req_notify_cq_kernel),
    ..NONE
};

// SAFETY: all fields are optional function pointers.
const NONE: verbs_context_ops = unsafe { MaybeUninit::zeroed().assume_init() };
