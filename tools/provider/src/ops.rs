// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The entry points of `struct verbs_context_ops` (rdma-core
//! libibverbs/driver.h).
//!
//! Each turns the pointers of C into the types of [`crate::object`] and calls
//! the verb. A verb that is not listed stays libibverbs' own, which answers
//! EOPNOTSUPP. libibverbs and the program's contract with it vouch for the
//! pointers: an object passed in is one that this provider made and that is
//! not yet destroyed, an attribute structure is valid and the caller's.

use crate::{
    ah,
    bindings::*,
    cmd::{self, Region},
    cq,
    errno::{Errno, Result, code},
    mr,
    object::{Ah, Cq, Owned, Qp, Ref, Srq},
    pd, qp, srq,
    wr::{List, PostError},
};
use core::{
    ffi::{c_int, c_void},
    mem::MaybeUninit,
    ptr, slice,
};

/// The verbs whatever the data path is.
pub static COMMON: verbs_context_ops = verbs_context_ops {
    alloc_pd: Some(alloc_pd),
    create_ah: Some(create_ah),
    create_cq: Some(create_cq),
    create_qp: Some(create_qp),
    dealloc_pd: Some(dealloc_pd),
    dereg_mr: Some(dereg_mr),
    destroy_ah: Some(destroy_ah),
    destroy_cq: Some(destroy_cq),
    destroy_qp: Some(destroy_qp),
    free_context: Some(free_context),
    modify_qp: Some(modify_qp),
    query_device_ex: Some(query_device_ex),
    query_port: Some(query_port),
    query_qp: Some(query_qp),
    reg_mr: Some(reg_mr),
    ..NONE
};

/// The verbs of the data path where the program has the rings.
pub static RINGS: verbs_context_ops = verbs_context_ops {
    create_srq: Some(create_srq),
    destroy_srq: Some(destroy_srq),
    modify_srq: Some(modify_srq),
    poll_cq: Some(poll_cq),
    post_recv: Some(post_recv),
    post_send: Some(post_send),
    post_srq_recv: Some(post_srq_recv),
    query_srq: Some(query_srq),
    req_notify_cq: Some(req_notify_cq),
    resize_cq: Some(resize_cq),
    ..NONE
};

/// The verbs of the data path where the kernel has them.
pub static KERNEL: verbs_context_ops = verbs_context_ops {
    poll_cq: Some(poll_cq_kernel),
    post_recv: Some(post_recv_kernel),
    post_send: Some(post_send_kernel),
    req_notify_cq: Some(req_notify_cq_kernel),
    ..NONE
};

// SAFETY: all fields are optional function pointers.
const NONE: verbs_context_ops = unsafe { MaybeUninit::zeroed().assume_init() };

/// Answers a verb that creates: the object, or NULL and `errno`.
fn created<T, U>(result: Result<Owned<T>>) -> *mut U {
    match result {
        Ok(object) => object.into_raw().cast(),
        Err(errno) => {
            errno.set();
            ptr::null_mut()
        }
    }
}

/// Runs a verb that destroys an object, and frees the object if it did.
///
/// # Safety
///
/// `object` came from [`created`] with this type, and the caller gives it up
/// if the verb succeeds.
unsafe fn destroyed<T>(object: *mut T, verb: impl FnOnce(Ref<'_, T>) -> Result) -> c_int {
    // SAFETY: by the contract of this function.
    let object = unsafe { Owned::from_raw(object) };
    let result = verb(object.as_ref());
    if result.is_err() {
        object.into_raw();
    }
    code(result)
}

unsafe extern "C" fn free_context(context: *mut ibv_context) {
    // SAFETY: the context is part of a `verbs_context` that libibverbs
    // allocated for `driver::alloc_context`, and nobody uses it any more.
    unsafe {
        let context = Owned::from_raw(Ref::<'_, ibv_context>::new(context).whole().as_ptr());
        verbs_uninit_context(context.as_ref().verbs().as_ptr());
    }
}

unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    attr_size: usize,
) -> c_int {
    // SAFETY: see the head of this file.
    code(unsafe { cmd::query_device(Ref::new(context), input, attr, attr_size) })
}

unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port_num: u8,
    port_attr: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: see the head of this file.
    let (context, attr) = unsafe { (Ref::new(context), &mut *port_attr) };
    code(cmd::query_port(context, port_num, attr))
}

unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: see the head of this file.
    created(pd::alloc(unsafe { Ref::new(context) }))
}

unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: see the head of this file.
    unsafe { destroyed(pd, cmd::dealloc_pd) }
}

unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    hca_va: u64,
    access: c_int,
) -> *mut ibv_mr {
    let region = Region { start: addr.addr(), length, iova: hca_va, access };
    // SAFETY: see the head of this file.
    created(mr::register(unsafe { Ref::new(pd) }, region))
}

unsafe extern "C" fn dereg_mr(mr: *mut verbs_mr) -> c_int {
    // SAFETY: see the head of this file.
    unsafe { destroyed(mr, cmd::dereg_mr) }
}

unsafe extern "C" fn create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: see the head of this file.
    let (pd, attr) = unsafe { (Ref::new(pd), &mut *attr) };
    created(ah::create(pd, attr))
}

unsafe extern "C" fn destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: see the head of this file; the AH is the first member of what
    // `create_ah` made.
    unsafe { destroyed(ah.cast::<Ah>(), |ah| cmd::destroy_ah(ah.verbs())) }
}

unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: see the head of this file; the channel may be null.
    let (context, channel) =
        unsafe { (Ref::new(context), (!channel.is_null()).then(|| Ref::new(channel))) };
    created(cq::create(context, cqe, channel, comp_vector))
}

/// Answers a verb that polls a CQ.
///
/// # Safety
///
/// The program lends an array of `num_entries` entries at `wc`.
#[inline]
unsafe fn polled(
    num_entries: c_int,
    wc: *mut ibv_wc,
    poll: impl FnOnce(&mut [MaybeUninit<ibv_wc>]) -> Result<usize>,
) -> c_int {
    let result = match usize::try_from(num_entries) {
        Err(_) => Err(Errno::EINVAL),
        Ok(0) => Ok(0),
        // SAFETY: by the contract of this function.
        Ok(room) => poll(unsafe { slice::from_raw_parts_mut(wc.cast(), room) }),
    };
    match result {
        Ok(polled) => polled as c_int,
        Err(errno) => {
            errno.set();
            -1
        }
    }
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: see the head of this file; the CQ is the first member of what
    // `create_cq` made.
    unsafe { polled(num_entries, wc, |entries| cq::poll(Ref::new(cq.cast()), entries)) }
}

unsafe extern "C" fn poll_cq_kernel(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: see the head of this file.
    unsafe { polled(num_entries, wc, |entries| cq::poll_kernel(Ref::new(cq), entries)) }
}

unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: see the head of this file; the CQ is the first member of what
    // `create_cq` made.
    code(cq::req_notify(unsafe { Ref::new(cq.cast()) }, solicited_only != 0))
}

unsafe extern "C" fn req_notify_cq_kernel(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: see the head of this file.
    code(cmd::req_notify_cq(unsafe { Ref::new(cq) }, solicited_only != 0))
}

unsafe extern "C" fn resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: see the head of this file; the CQ is the first member of what
    // `create_cq` made.
    code(cq::resize(unsafe { Ref::new(cq.cast()) }, cqe))
}

unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: see the head of this file; the CQ is the first member of what
    // `create_cq` made.
    unsafe { destroyed(cq.cast::<Cq>(), |cq| cmd::destroy_cq(cq.cq())) }
}

unsafe extern "C" fn create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: see the head of this file.
    let (pd, attr) = unsafe { (Ref::new(pd), &mut *attr) };
    created(qp::create(pd, attr))
}

unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, attr_mask: c_int) -> c_int {
    // SAFETY: see the head of this file.
    let (qp, attr) = unsafe { (Ref::new(qp.cast()), &mut *attr) };
    code(qp::modify(qp, attr, attr_mask))
}

unsafe extern "C" fn query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    attr_mask: c_int,
    init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: see the head of this file.
    let (qp, attr, init) = unsafe { (Ref::new(qp.cast()), &mut *attr, &mut *init_attr) };
    code(qp::query(qp, attr, attr_mask, init))
}

unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: see the head of this file; the QP is the first member of what
    // `create_qp` made.
    unsafe { destroyed(qp.cast::<Qp>(), |qp| cmd::destroy_qp(qp.qp())) }
}

/// Answers a verb that posts a list.
///
/// # Safety
///
/// `bad_wr` is null or the caller's to write.
unsafe fn posted<W>(result: Result<(), PostError<W>>, bad_wr: *mut *mut W) -> c_int {
    code(result.map_err(|error| {
        if !bad_wr.is_null() {
            // SAFETY: by the contract of this function.
            unsafe { *bad_wr = error.bad_wr };
        }
        error.errno
    }))
}

unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: see the head of this file; the QP is the first member of what
    // `create_qp` made.
    unsafe { posted(qp::post_send(Ref::new(qp.cast()), List::new(wr)), bad_wr) }
}

unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: see the head of this file; the QP is the first member of what
    // `create_qp` made.
    unsafe { posted(qp::post_recv(Ref::new(qp.cast()), List::new(wr)), bad_wr) }
}

unsafe extern "C" fn create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: see the head of this file.
    let (pd, attr) = unsafe { (Ref::new(pd), &mut *attr) };
    created(srq::create(pd, attr))
}

unsafe extern "C" fn modify_srq(
    srq: *mut ibv_srq,
    attr: *mut ibv_srq_attr,
    attr_mask: c_int,
) -> c_int {
    // SAFETY: see the head of this file; the SRQ is the first member of what
    // `create_srq` made.
    let (srq, attr) = unsafe { (Ref::new(srq.cast()), &mut *attr) };
    code(srq::modify(srq, attr, attr_mask))
}

unsafe extern "C" fn query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    // SAFETY: as for `modify_srq`.
    let (srq, attr) = unsafe { (Ref::new(srq.cast()), &mut *attr) };
    code(srq::query(srq, attr))
}

unsafe extern "C" fn destroy_srq(srq: *mut ibv_srq) -> c_int {
    // SAFETY: see the head of this file; the SRQ is the first member of what
    // `create_srq` made.
    unsafe { destroyed(srq.cast::<Srq>(), |srq| cmd::destroy_srq(srq.srq())) }
}

unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: see the head of this file; the SRQ is the first member of what
    // `create_srq` made.
    unsafe { posted(srq::post_recv(Ref::new(srq.cast()), List::new(wr)), bad_wr) }
}

unsafe extern "C" fn post_send_kernel(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: as for `post_send`.
    unsafe { posted(qp::post_send_kernel(Ref::new(qp.cast()), List::new(wr)), bad_wr) }
}

unsafe extern "C" fn post_recv_kernel(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as for `post_recv`.
    unsafe { posted(qp::post_recv_kernel(Ref::new(qp.cast()), List::new(wr)), bad_wr) }
}
