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
    context, cq, cq_ex,
    errno::{Errno, Result, code},
    lock::Threads,
    mr, mw,
    object::{Ah, Attributes, Cq, Owned, Pd, Qp, Ref, Srq, Td},
    pd::{self, Domain},
    qp,
    ring::Allocator,
    srq, td,
    wr::{List, PostError},
    wr_ex, xrcd,
};
use core::{
    ffi::{c_int, c_void},
    mem::MaybeUninit,
    ptr, slice,
};

/// The verbs whatever the data path is.
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
    #[cfg(has_port_speed)]
    query_port_speed: Some(query_port_speed),
    query_qp: Some(query_qp),
    query_rt_values: Some(query_rt_values),
    reg_dmabuf_mr: Some(reg_dmabuf_mr),
    reg_mr: Some(reg_mr),
    rereg_mr: Some(rereg_mr),
    unimport_mr: Some(unimport_mr),
    unimport_pd: Some(unimport_pd),
    ..NONE
};

/// The verbs of the data path where the program has the rings.
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
    // SAFETY: see the head of this file; the program lends `attr_size` bytes.
    code(unsafe {
        cmd::query_device(Ref::new(context), input, attr, attr_size)
            .map(|()| context::set_clock(&mut Attributes::new(attr, attr_size)))
    })
}

unsafe extern "C" fn query_rt_values(_: *mut ibv_context, values: *mut ibv_values_ex) -> c_int {
    // SAFETY: see the head of this file.
    code(context::query_rt_values(unsafe { &mut *values }))
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

#[cfg(has_port_speed)]
unsafe extern "C" fn query_port_speed(
    context: *mut ibv_context,
    port_num: u32,
    speed: *mut u64,
) -> c_int {
    // SAFETY: see the head of this file.
    let (context, speed) = unsafe { (Ref::new(context), &mut *speed) };
    code(cmd::query_port_speed(context, port_num, speed))
}

unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: see the head of this file.
    created(pd::alloc(unsafe { Ref::new(context) }))
}

unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: see the head of this file; the PD is the first member of what
    // `alloc_pd` or `alloc_parent_domain` made.
    unsafe { destroyed(pd.cast::<Pd>(), pd::dealloc) }
}

unsafe extern "C" fn alloc_td(_: *mut ibv_context, attr: *mut ibv_td_init_attr) -> *mut ibv_td {
    // SAFETY: see the head of this file.
    let mask = unsafe { (*attr).comp_mask };
    created(if mask == 0 { td::alloc() } else { Err(Errno::EINVAL) })
}

unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    // SAFETY: see the head of this file; the thread domain is the first member
    // of what `alloc_td` made.
    unsafe { destroyed(td.cast::<Td>(), td::dealloc) }
}

unsafe extern "C" fn alloc_parent_domain(
    _: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    // IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC, which not every
    // release has, and which asks for nothing of a device that needs no such memory.
    const UNPROTECTED: u32 = 1 << 2;
    const MASK: u32 = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS
        | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT
        | UNPROTECTED;
    // SAFETY: see the head of this file.
    let attr = unsafe { &*attr };
    if attr.pd.is_null() || attr.comp_mask & !MASK != 0 {
        return created::<Pd, _>(Err(Errno::EINVAL));
    }
    // SAFETY: see the head of this file; the program uses what it creates with
    // a thread domain in one thread at a time: ibv_alloc_td(3).
    let (pd, td) = unsafe {
        let td = Ref::<Td>::optional(attr.td.cast()).map(|td| (td, Threads::one()));
        (Ref::new(attr.pd.cast()), td)
    };
    // SAFETY: ibv_alloc_parent_domain(3) says what the functions are; who uses
    // the allocator keeps the domain.
    created(pd::alloc_parent(pd, td, |domain| unsafe { Allocator::new(attr, domain.as_ptr()) }))
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

unsafe extern "C" fn reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    // The provider is for machines whose addresses have 64 bits.
    let region = Region { start: offset as usize, length, iova, access };
    // SAFETY: see the head of this file.
    created(mr::register_dmabuf(unsafe { Ref::new(pd) }, region, fd))
}

unsafe extern "C" fn rereg_mr(
    mr: *mut verbs_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let region = Region { start: addr.addr(), length, iova: addr.addr() as u64, access };
    // SAFETY: see the head of this file; there may be no PD where no other is
    // asked for.
    let (mr, pd) = unsafe { (Ref::new(mr), (!pd.is_null()).then(|| Ref::new(pd))) };
    code(cmd::rereg_mr(mr, flags, pd, region))
}

unsafe extern "C" fn dereg_mr(mr: *mut verbs_mr) -> c_int {
    // SAFETY: see the head of this file.
    unsafe { destroyed(mr, cmd::dereg_mr) }
}

unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, mw_type: ibv_mw_type) -> *mut ibv_mw {
    // SAFETY: see the head of this file.
    created(mw::alloc(unsafe { Ref::new(pd) }, mw_type))
}

unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: see the head of this file.
    unsafe { destroyed(mw, cmd::dealloc_mw) }
}

unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    // SAFETY: see the head of this file; the QP is the first member of what
    // `create_qp` made.
    let (qp, mw, bind) = unsafe { (Ref::new(qp.cast()), Ref::new(mw), &*bind) };
    code(mw::bind_request(mw, bind).and_then(|mut wr| {
        // SAFETY: a list of one, which names what the program does.
        let list = unsafe { List::new(&mut wr) };
        qp::post_send(qp, list).map_err(|error| error.errno)
    }))
}

unsafe extern "C" fn import_pd(context: *mut ibv_context, pd_handle: u32) -> *mut ibv_pd {
    // SAFETY: see the head of this file.
    created(pd::import(unsafe { Ref::new(context) }, pd_handle))
}

/// The program's own is freed; the kernel's is whose it was.
unsafe extern "C" fn unimport_pd(pd: *mut ibv_pd) {
    // SAFETY: see the head of this file; the PD came from `import_pd`.
    unsafe { destroyed(pd.cast::<Pd>(), |_| Ok(())) };
}

unsafe extern "C" fn import_mr(pd: *mut ibv_pd, mr_handle: u32) -> *mut ibv_mr {
    // SAFETY: see the head of this file.
    created(mr::import(unsafe { Ref::new(pd) }, mr_handle))
}

/// As [`unimport_pd`].
unsafe extern "C" fn unimport_mr(mr: *mut ibv_mr) {
    // SAFETY: see the head of this file; the MR is the first member of what
    // `import_mr` made.
    unsafe { destroyed(mr.cast::<verbs_mr>(), |_| Ok(())) };
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
    let (context, channel) = unsafe { (Ref::new(context), Ref::optional(channel)) };
    created(cq::create(context, cq::Attr { cqe, channel, comp_vector, domain: Domain::NONE }))
}

unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: see the head of this file.
    let (context, attr) = unsafe { (Ref::new(context), &*attr) };
    // SAFETY: as above; the domain and channel may be null, and are those of a
    // valid attribute structure.
    let result = unsafe { cq_domain(attr) }.and_then(|domain| {
        let attr_of_cq = cq::Attr {
            cqe: c_int::try_from(attr.cqe).map_err(|_| Errno::EINVAL)?,
            // SAFETY: as above.
            channel: unsafe { Ref::optional(attr.channel) },
            comp_vector: c_int::try_from(attr.comp_vector).map_err(|_| Errno::EINVAL)?,
            domain,
        };
        cq::create_ex(context, attr_of_cq, attr.wc_flags)
    });
    // SAFETY: the CQ is extended, and nobody else has it yet.
    created(result.inspect(|cq| unsafe { cq_ex::install(cq.as_ref()) }))
}

/// How an extended CQ is locked and where its memory comes from.
///
/// # Errors
///
/// EOPNOTSUPP for attributes that no CQ has; EINVAL for a PD that is no parent
/// domain.
///
/// # Safety
///
/// See the head of this file.
unsafe fn cq_domain(attr: &ibv_cq_init_attr_ex) -> Result<Domain> {
    const MASK: u32 = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
    if attr.comp_mask & !MASK != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    let mut domain = Domain::NONE;
    if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_PD != 0 {
        // SAFETY: by the contract of this function.
        let pd = unsafe { Ref::<ibv_pd>::optional(attr.parent_domain) }.ok_or(Errno::EINVAL)?;
        domain = Domain::of_parent(pd.whole())?;
    }
    let flags = if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 { attr.flags } else { 0 };
    if flags & !IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    if flags != 0 {
        // SAFETY: the program says that it is one thread.
        domain.threads = unsafe { Threads::one() };
    }
    Ok(domain)
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

unsafe extern "C" fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    // SAFETY: see the head of this file.
    code(unsafe { cmd::modify_cq(Ref::new(cq), &mut *attr) })
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

unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: see the head of this file.
    let (context, attr) = unsafe { (Ref::new(context), &mut *attr) };
    if attr.qp_type == IBV_QPT_XRC_RECV {
        return created(qp::create_xrc_target(context, attr));
    }
    // SAFETY: see the head of this file; the PD counts if the mask says so.
    let pd = unsafe { Ref::optional(attr.pd) };
    let result = qp::create_ex(pd, attr).map(|(qp, by_calls)| {
        if by_calls {
            // SAFETY: the QP has rings, and nobody else has it yet.
            unsafe { wr_ex::install(qp.as_ref()) };
        }
        qp
    });
    created(result)
}

unsafe extern "C" fn open_qp(
    context: *mut ibv_context,
    attr: *mut ibv_qp_open_attr,
) -> *mut ibv_qp {
    // SAFETY: see the head of this file.
    let (context, attr) = unsafe { (Ref::new(context), &mut *attr) };
    created(qp::open(context, attr))
}

unsafe extern "C" fn open_xrcd(
    context: *mut ibv_context,
    attr: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    // SAFETY: see the head of this file.
    let (context, attr) = unsafe { (Ref::new(context), &mut *attr) };
    created(xrcd::open(context, attr))
}

unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    // SAFETY: see the head of this file; the domain is the first member of what
    // `open_xrcd` made.
    unsafe { destroyed(xrcd.cast::<verbs_xrcd>(), cmd::close_xrcd) }
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

unsafe extern "C" fn attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int {
    // SAFETY: see the head of this file.
    code(unsafe { cmd::attach_mcast(Ref::new(qp), &*gid, lid) })
}

unsafe extern "C" fn detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int {
    // SAFETY: see the head of this file.
    code(unsafe { cmd::detach_mcast(Ref::new(qp), &*gid, lid) })
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

unsafe extern "C" fn create_srq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    // SAFETY: see the head of this file.
    let (context, attr) = unsafe { (Ref::new(context), &mut *attr) };
    created(srq::create_ex(context, attr))
}

unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, number: *mut u32) -> c_int {
    // SAFETY: see the head of this file; the SRQ is the first member of what
    // `create_srq` or `create_srq_ex` made.
    let (srq, to) = unsafe { (Ref::new(srq.cast()), &mut *number) };
    code(srq::number(srq).map(|number| *to = number))
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
