// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The entry points of `struct verbs_context_ops` (rdma-core
//! libibverbs/driver.h).
//!
//! Each turns the pointers of C into the types of [`crate::object`] and calls
//! the verb. For a verb that is not in a table libibverbs calls its own function, which answers
//! EOPNOTSUPP. libibverbs and the program's contract with it vouch for the
//! pointers: this provider made the objects that are passed in, and they are
//! not yet destroyed; attribute structures are valid, and the caller's.

use crate::{
    ah::{self, Ah},
    attr::DeviceAttr,
    bindings::*,
    cmd::{self, mr::Region},
    context,
    cq::{self, Cq},
    cq_ex,
    errno::{Errno, Result, code},
    lock::Threads,
    mr, mw,
    object::{Owned, Ref},
    pd::{self, Domain, Pd},
    post,
    qp::{self, Qp},
    ring::Allocator,
    srq::{self, Srq},
    td::{self, Td},
    wr::{List, PostError},
    wr_ex, xrcd,
};
use core::{
    ffi::{c_int, c_void},
    mem::MaybeUninit,
    ptr, slice,
};

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

/// Returns what a verb that creates an object answers: the object, or NULL and `errno`.
fn created<T, U>(result: Result<Owned<T>>) -> *mut U {
    match result {
        Ok(object) => object.into_raw().cast(),
        Err(errno) => {
            errno.set();
            ptr::null_mut()
        }
    }
}

/// Runs a verb that destroys an object, and frees the object if the verb succeeds.
///
/// # Safety
///
/// `object` came from [`created`] with this type, and the caller gives it up
/// if the verb succeeds.
unsafe fn destroyed<T>(object: *mut T, verb: impl FnOnce(Ref<'_, T>) -> Result) -> c_int {
    // SAFETY: `object` came from `created` with this type.
    let object = unsafe { Owned::from_raw(object) };
    let result = verb(object.as_ref());
    if result.is_err() {
        object.into_raw();
    }
    code(result)
}

unsafe extern "C" fn free_context(context: *mut ibv_context) {
    // SAFETY: libibverbs passes a part of a `verbs_context` that it allocated for
    // `driver::alloc_context`, and nobody uses the context any more.
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
    // SAFETY: libibverbs passes a live context, and the program lends `attr_size` bytes at `attr`.
    code(unsafe {
        cmd::context::query_device(Ref::new(context), input, attr, attr_size)
            .map(|()| context::set_clock(&mut DeviceAttr::new(attr, attr_size)))
    })
}

unsafe extern "C" fn query_rt_values(_: *mut ibv_context, values: *mut ibv_values_ex) -> c_int {
    // SAFETY: the program lends the structure.
    code(context::query_rt_values(unsafe { &mut *values }))
}

unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port_num: u8,
    port_attr: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: libibverbs passes a live context, and the program lends the attributes.
    let (context, attr) = unsafe { (Ref::new(context), &mut *port_attr) };
    code(cmd::context::query_port(context, port_num, attr))
}

#[cfg(has_port_speed)]
unsafe extern "C" fn query_port_speed(
    context: *mut ibv_context,
    port_num: u32,
    speed: *mut u64,
) -> c_int {
    // SAFETY: libibverbs passes a live context, and the program lends the number.
    let (context, speed) = unsafe { (Ref::new(context), &mut *speed) };
    code(cmd::context::query_port_speed(context, port_num, speed))
}

unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: libibverbs passes a live context.
    created(pd::alloc(unsafe { Ref::new(context) }))
}

unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: the PD is live, and the first member of an object that `alloc_pd` or
    // `alloc_parent_domain` made.
    unsafe { destroyed(pd.cast::<Pd>(), pd::dealloc) }
}

unsafe extern "C" fn alloc_td(_: *mut ibv_context, attr: *mut ibv_td_init_attr) -> *mut ibv_td {
    // SAFETY: the program passes valid attributes.
    let mask = unsafe { (*attr).comp_mask };
    created(if mask == 0 { td::alloc() } else { Err(Errno::EINVAL) })
}

unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    // SAFETY: the thread domain is live, and the first member of an object that `alloc_td` made.
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
    // SAFETY: the program passes valid attributes.
    let attr = unsafe { &*attr };
    if attr.pd.is_null() || attr.comp_mask & !MASK != 0 {
        return created::<Pd, _>(Err(Errno::EINVAL));
    }
    // SAFETY: the program passes a live PD, and a live thread domain or none. It uses the objects
    // of a thread domain in one thread at a time: ibv_alloc_td(3).
    let (pd, td) = unsafe {
        let td = Ref::<Td>::optional(attr.td.cast()).map(|td| (td, Threads::one()));
        (Ref::new(attr.pd.cast()), td)
    };
    // SAFETY: the functions are as ibv_alloc_parent_domain(3) describes them, and each object that
    // uses the allocator keeps the domain.
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
    // SAFETY: the program passes a live PD.
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
    // The provider is for processors with addresses of 64 bits.
    let region = Region { start: offset as usize, length, iova, access };
    // SAFETY: the program passes a live PD.
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
    // SAFETY: the program passes a live MR; the PD is live, or null where the program asks for no
    // other one.
    let (mr, pd) = unsafe { (Ref::new(mr), (!pd.is_null()).then(|| Ref::new(pd))) };
    code(cmd::mr::reregister(mr, flags, pd, region))
}

unsafe extern "C" fn dereg_mr(mr: *mut verbs_mr) -> c_int {
    // SAFETY: the MR is live, and an object that `reg_mr`, `reg_dmabuf_mr` or `import_mr` made.
    unsafe { destroyed(mr, cmd::mr::deregister) }
}

unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, mw_type: ibv_mw_type) -> *mut ibv_mw {
    // SAFETY: the program passes a live PD.
    created(mw::alloc(unsafe { Ref::new(pd) }, mw_type))
}

unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: the window is live, and an object that `alloc_mw` made.
    unsafe { destroyed(mw, cmd::mw::dealloc) }
}

unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    // SAFETY: the QP is live, and the first member of an object that `create_qp` made; the window
    // is live, and the structure valid.
    let (qp, mw, bind) = unsafe { (Ref::new(qp.cast()), Ref::new(mw), &*bind) };
    code(mw::bind_request(mw, bind).and_then(|mut wr| {
        // SAFETY: the list has one request, and names the objects that the program named.
        let list = unsafe { List::new(&mut wr) };
        post::send(qp, list).map_err(|error| error.errno)
    }))
}

unsafe extern "C" fn import_pd(context: *mut ibv_context, pd_handle: u32) -> *mut ibv_pd {
    // SAFETY: libibverbs passes a live context.
    created(pd::import(unsafe { Ref::new(context) }, pd_handle))
}

/// Frees the program's PD. The PD in the kernel belongs to the program that created it.
unsafe extern "C" fn unimport_pd(pd: *mut ibv_pd) {
    // SAFETY: the PD is live, and the first member of an object that `import_pd` made.
    unsafe { destroyed(pd.cast::<Pd>(), |_| Ok(())) };
}

unsafe extern "C" fn import_mr(pd: *mut ibv_pd, mr_handle: u32) -> *mut ibv_mr {
    // SAFETY: the program passes a live PD.
    created(mr::import(unsafe { Ref::new(pd) }, mr_handle))
}

/// Frees the program's MR. The MR in the kernel belongs to the program that created it.
unsafe extern "C" fn unimport_mr(mr: *mut ibv_mr) {
    // SAFETY: the MR is live, and the first member of an object that `import_mr` made.
    unsafe { destroyed(mr.cast::<verbs_mr>(), |_| Ok(())) };
}

unsafe extern "C" fn create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: the program passes a live PD and valid attributes.
    let (pd, attr) = unsafe { (Ref::new(pd), &mut *attr) };
    created(ah::create(pd, attr))
}

unsafe extern "C" fn destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: the AH is live, and the first member of an object that `create_ah` made.
    unsafe { destroyed(ah.cast::<Ah>(), |ah| cmd::ah::destroy(ah.verbs())) }
}

unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: libibverbs passes a live context; the channel is live, or null.
    let (context, channel) = unsafe { (Ref::new(context), Ref::optional(channel)) };
    created(cq::create(context, cq::Attr { cqe, channel, comp_vector, domain: Domain::NONE }))
}

unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: libibverbs passes a live context, and the program valid attributes.
    let (context, attr) = unsafe { (Ref::new(context), &*attr) };
    // SAFETY: the attributes are valid.
    let result = unsafe { cq_domain(attr) }.and_then(|domain| {
        let attr_of_cq = cq::Attr {
            cqe: c_int::try_from(attr.cqe).map_err(|_| Errno::EINVAL)?,
            // SAFETY: the channel of valid attributes is live, or null.
            channel: unsafe { Ref::optional(attr.channel) },
            comp_vector: c_int::try_from(attr.comp_vector).map_err(|_| Errno::EINVAL)?,
            domain,
        };
        cq::create_ex(context, attr_of_cq, attr.wc_flags)
    });
    // SAFETY: the CQ is an extended one, and nobody else has it yet.
    created(result.inspect(|cq| unsafe { cq_ex::install(cq.as_ref()) }))
}

/// Returns how an extended CQ is locked and where its memory comes from.
///
/// # Errors
///
/// EOPNOTSUPP for attributes that no CQ has; EINVAL for a PD that is not a parent
/// domain.
///
/// # Safety
///
/// The attributes are valid: the parent domain is one that this provider made and that is live,
/// or null.
unsafe fn cq_domain(attr: &ibv_cq_init_attr_ex) -> Result<Domain> {
    const MASK: u32 = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
    if attr.comp_mask & !MASK != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    let mut domain = Domain::NONE;
    if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_PD != 0 {
        // SAFETY: the parent domain of valid attributes is live, or null.
        let pd = unsafe { Ref::<ibv_pd>::optional(attr.parent_domain) }.ok_or(Errno::EINVAL)?;
        domain = Domain::of_parent(pd.whole())?;
    }
    let flags = if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 { attr.flags } else { 0 };
    if flags & !IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    if flags != 0 {
        // SAFETY: the program sets the flag if it uses the CQ in one thread at a time.
        domain.threads = unsafe { Threads::one() };
    }
    Ok(domain)
}

/// Polls a CQ by `poll`, and returns what ibv_poll_cq(3) answers.
///
/// # Safety
///
/// The caller lends an array of `num_entries` entries at `wc`.
#[inline]
unsafe fn polled(
    num_entries: c_int,
    wc: *mut ibv_wc,
    poll: impl FnOnce(&mut [MaybeUninit<ibv_wc>]) -> Result<usize>,
) -> c_int {
    let result = match usize::try_from(num_entries) {
        Err(_) => Err(Errno::EINVAL),
        Ok(0) => Ok(0),
        // SAFETY: the caller lends as many entries.
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
    // SAFETY: the CQ is live, and the first member of an object that `create_cq` made; the program
    // lends the array.
    unsafe { polled(num_entries, wc, |entries| cq::poll(Ref::new(cq.cast()), entries)) }
}

unsafe extern "C" fn poll_cq_kernel(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the program passes a live CQ, and lends the array.
    unsafe { polled(num_entries, wc, |entries| cq::poll_kernel(Ref::new(cq), entries)) }
}

unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the CQ is live, and the first member of an object that `create_cq` made.
    code(cq::req_notify(unsafe { Ref::new(cq.cast()) }, solicited_only != 0))
}

unsafe extern "C" fn req_notify_cq_kernel(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the program passes a live CQ.
    code(cmd::cq::req_notify(unsafe { Ref::new(cq) }, solicited_only != 0))
}

unsafe extern "C" fn resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: the CQ is live, and the first member of an object that `create_cq` made.
    code(cq::resize(unsafe { Ref::new(cq.cast()) }, cqe))
}

unsafe extern "C" fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    // SAFETY: the program passes a live CQ and valid attributes.
    code(unsafe { cmd::cq::modify(Ref::new(cq), &mut *attr) })
}

unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: the CQ is live, and the first member of an object that `create_cq` made.
    unsafe { destroyed(cq.cast::<Cq>(), |cq| cmd::cq::destroy(cq.cq())) }
}

unsafe extern "C" fn create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the program passes a live PD and valid attributes.
    let (pd, attr) = unsafe { (Ref::new(pd), &mut *attr) };
    created(qp::create(pd, attr))
}

unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: libibverbs passes a live context, and the program valid attributes.
    let (context, attr) = unsafe { (Ref::new(context), &mut *attr) };
    if attr.qp_type == IBV_QPT_XRC_RECV {
        return created(qp::create_xrc_target(context, attr));
    }
    // SAFETY: the PD of valid attributes is live, or null; `create_ex` ignores it unless the mask
    // names it.
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
    // SAFETY: libibverbs passes a live context, and the program valid attributes.
    let (context, attr) = unsafe { (Ref::new(context), &mut *attr) };
    created(qp::open(context, attr))
}

unsafe extern "C" fn open_xrcd(
    context: *mut ibv_context,
    attr: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    // SAFETY: libibverbs passes a live context, and the program valid attributes.
    let (context, attr) = unsafe { (Ref::new(context), &mut *attr) };
    created(xrcd::open(context, attr))
}

unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    // SAFETY: the XRC domain is live, and the first member of an object that `open_xrcd` made.
    unsafe { destroyed(xrcd.cast::<verbs_xrcd>(), cmd::xrcd::close) }
}

unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, attr_mask: c_int) -> c_int {
    // SAFETY: the QP is live, and the first member of an object that `create_qp` made; the
    // attributes are valid.
    let (qp, attr) = unsafe { (Ref::new(qp.cast()), &mut *attr) };
    code(qp::modify(qp, attr, attr_mask))
}

unsafe extern "C" fn query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    attr_mask: c_int,
    init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the QP is live, and the first member of an object that `create_qp` made; the program
    // lends both structures.
    let (qp, attr, init) = unsafe { (Ref::new(qp.cast()), &mut *attr, &mut *init_attr) };
    code(qp::query(qp, attr, attr_mask, init))
}

unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: the QP is live, and the first member of an object that `create_qp`, `create_qp_ex` or
    // `open_qp` made.
    unsafe { destroyed(qp.cast::<Qp>(), |qp| cmd::qp::destroy(qp.qp())) }
}

unsafe extern "C" fn attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int {
    // SAFETY: the program passes a live QP and a GID.
    code(unsafe { cmd::qp::attach_mcast(Ref::new(qp), &*gid, lid) })
}

unsafe extern "C" fn detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int {
    // SAFETY: the program passes a live QP and a GID.
    code(unsafe { cmd::qp::detach_mcast(Ref::new(qp), &*gid, lid) })
}

/// Returns what a verb that posts a list answers, and sets `bad_wr` on failure.
///
/// # Safety
///
/// `bad_wr` is null or the caller's to write.
unsafe fn posted<W>(result: Result<(), PostError<W>>, bad_wr: *mut *mut W) -> c_int {
    code(result.map_err(|error| {
        if !bad_wr.is_null() {
            // SAFETY: the pointer is not null, so the caller may write to it.
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
    // SAFETY: the QP is live, and the first member of an object that `create_qp` made; the list is
    // as ibv_post_send(3) describes it.
    unsafe { posted(post::send(Ref::new(qp.cast()), List::new(wr)), bad_wr) }
}

unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the QP is live, and the first member of an object that `create_qp` made; the list is
    // as ibv_post_recv(3) describes it.
    unsafe { posted(post::recv(Ref::new(qp.cast()), List::new(wr)), bad_wr) }
}

unsafe extern "C" fn create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: the program passes a live PD and valid attributes.
    let (pd, attr) = unsafe { (Ref::new(pd), &mut *attr) };
    created(srq::create(pd, attr))
}

unsafe extern "C" fn create_srq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    // SAFETY: libibverbs passes a live context, and the program valid attributes.
    let (context, attr) = unsafe { (Ref::new(context), &mut *attr) };
    created(srq::create_ex(context, attr))
}

unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, number: *mut u32) -> c_int {
    // SAFETY: the SRQ is live, and the first member of an object that `create_srq` or
    // `create_srq_ex` made; the program lends the number.
    let (srq, to) = unsafe { (Ref::new(srq.cast()), &mut *number) };
    code(srq::number(srq).map(|number| *to = number))
}

unsafe extern "C" fn modify_srq(
    srq: *mut ibv_srq,
    attr: *mut ibv_srq_attr,
    attr_mask: c_int,
) -> c_int {
    // SAFETY: the SRQ is live, and the first member of an object that `create_srq` made; the
    // attributes are valid.
    let (srq, attr) = unsafe { (Ref::new(srq.cast()), &mut *attr) };
    code(srq::modify(srq, attr, attr_mask))
}

unsafe extern "C" fn query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    // SAFETY: the SRQ is live, and the first member of an object that `create_srq` made; the
    // program lends the attributes.
    let (srq, attr) = unsafe { (Ref::new(srq.cast()), &mut *attr) };
    code(srq::query(srq, attr))
}

unsafe extern "C" fn destroy_srq(srq: *mut ibv_srq) -> c_int {
    // SAFETY: the SRQ is live, and the first member of an object that `create_srq` or
    // `create_srq_ex` made.
    unsafe { destroyed(srq.cast::<Srq>(), |srq| cmd::srq::destroy(srq.srq())) }
}

unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the SRQ is live, and the first member of an object that `create_srq` made; the list
    // is as ibv_post_srq_recv(3) describes it.
    unsafe { posted(post::srq_recv(Ref::new(srq.cast()), List::new(wr)), bad_wr) }
}

unsafe extern "C" fn post_send_kernel(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the QP is live, and the first member of an object that `create_qp` made; the list is
    // as ibv_post_send(3) describes it.
    unsafe { posted(post::send_kernel(Ref::new(qp.cast()), List::new(wr)), bad_wr) }
}

unsafe extern "C" fn post_recv_kernel(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the QP is live, and the first member of an object that `create_qp` made; the list is
    // as ibv_post_recv(3) describes it.
    unsafe { posted(post::recv_kernel(Ref::new(qp.cast()), List::new(wr)), bad_wr) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{
        device::Memory,
        freed,
        opened::{Opened, description},
        uverbs::{
            FIRST_HANDLE, Kernel,
            Name::{self, Method, Write},
        },
    };
    use core::mem::offset_of;
    use std::{cell::Cell, vec};

    /// Calls an entry point, as libibverbs or the program does.
    macro_rules! call {
        ($table:ident.$verb:ident($($argument:expr),* $(,)?)) => {{
            let verb = $table.$verb.expect(stringify!($verb));
            // SAFETY: the arguments are as the verb's page of the manual has them, for objects
            // that are live.
            #[allow(unused_unsafe)]
            unsafe { verb($($argument),*) }
        }};
    }

    /// The commands that destroy each kind of object.
    const END: [Name; 8] = [
        Method(UVERBS_OBJECT_PD, UVERBS_METHOD_PD_DESTROY),
        Method(UVERBS_OBJECT_MR, UVERBS_METHOD_MR_DESTROY),
        Method(UVERBS_OBJECT_MW, UVERBS_METHOD_MW_DESTROY),
        Method(UVERBS_OBJECT_AH, UVERBS_METHOD_AH_DESTROY),
        Method(UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_DESTROY),
        Method(UVERBS_OBJECT_QP, UVERBS_METHOD_QP_DESTROY),
        Method(UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_DESTROY),
        Method(UVERBS_OBJECT_XRCD, UVERBS_METHOD_XRCD_DESTROY),
    ];
    const NEW_CQ: Name = Method(UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_CREATE);
    const NEW_QP: Name = Method(UVERBS_OBJECT_QP, UVERBS_METHOD_QP_CREATE);
    const NEW_SRQ: Name = Method(UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_CREATE);

    /// A program with an object of each kind.
    struct Program {
        pd: *mut ibv_pd,
        mr: *mut ibv_mr,
        mw: *mut ibv_mw,
        ah: *mut ibv_ah,
        xrcd: *mut ibv_xrcd,
        cq: *mut ibv_cq,
        qp: *mut ibv_qp,
        srq: *mut ibv_srq,
        context: *mut ibv_context,
        opened: Opened,
        kernel: Kernel,
    }

    impl Program {
        /// Returns a program whose objects have rings.
        fn new() -> Self {
            let kernel = Kernel::new();
            let opened = Opened::with_rings(&kernel);
            let context = opened.verbs();
            let pd = call!(COMMON.alloc_pd(context));
            let cq = call!(COMMON.create_cq(context, 4, ptr::null_mut(), 0));
            let mut program = Self {
                pd,
                cq,
                mr: call!(COMMON.reg_mr(pd, ptr::null_mut(), 4096, 0, 1)),
                mw: call!(RINGS.alloc_mw(pd, IBV_MW_TYPE_1)),
                ah: call!(COMMON.create_ah(pd, &mut Default::default())),
                xrcd: call!(RINGS.open_xrcd(context, &mut domain_attr())),
                qp: ptr::null_mut(),
                srq: call!(RINGS.create_srq(pd, &mut srq_attr())),
                context,
                opened,
                kernel,
            };
            program.kernel.answer(UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, NUMBER);
            program.qp = call!(COMMON.create_qp(pd, &mut program.init()));
            program.set_state(IBV_QPS_RTS);
            program.kernel.take();
            program
        }

        fn init(&self) -> ibv_qp_init_attr {
            let cap = ibv_qp_cap { max_send_wr: 8, max_recv_wr: 8, ..cap() };
            ibv_qp_init_attr {
                send_cq: self.cq,
                recv_cq: self.cq,
                qp_type: IBV_QPT_RC,
                cap,
                ..Default::default()
            }
        }

        fn init_ex(&self) -> ibv_qp_init_attr_ex {
            ibv_qp_init_attr_ex {
                send_cq: self.cq,
                recv_cq: self.cq,
                qp_type: IBV_QPT_RC,
                cap: cap(),
                comp_mask: IBV_QP_INIT_ATTR_PD,
                pd: self.pd,
                ..Default::default()
            }
        }

        fn init_xrc(&self) -> ibv_srq_init_attr_ex {
            ibv_srq_init_attr_ex {
                attr: srq_attr().attr,
                comp_mask: IBV_SRQ_INIT_ATTR_TYPE
                    | IBV_SRQ_INIT_ATTR_PD
                    | IBV_SRQ_INIT_ATTR_XRCD
                    | IBV_SRQ_INIT_ATTR_CQ,
                srq_type: IBV_SRQT_XRC,
                pd: self.pd,
                xrcd: self.xrcd,
                cq: self.cq,
                ..Default::default()
            }
        }

        fn cq_attr(&self) -> ibv_cq_init_attr_ex {
            ibv_cq_init_attr_ex { cqe: 4, ..Default::default() }
        }

        /// Sets the state, as libibverbs does after ibv_modify_qp(3).
        fn set_state(&self, state: ibv_qp_state) {
            // SAFETY: the QP is live, and nobody else uses it.
            unsafe { (*self.qp).state = state };
        }

        fn qp(&self) -> Ref<'_, Qp> {
            // SAFETY: the QP is live.
            unsafe { Ref::new(self.qp.cast()) }
        }

        /// Returns what the device sees of the rings of the QP.
        fn rings(&self) -> (Memory, virtio_rdma_ureq_create_qp) {
            let request = self.qp().private().request();
            (Memory::at(request.buf_addr), request)
        }

        /// Returns what the device sees of the ring of the SRQ.
        fn shared(&self) -> (Memory, virtio_rdma_ureq_create_srq) {
            // SAFETY: the SRQ is live.
            let srq: Ref<'_, Srq> = unsafe { Ref::new(self.srq.cast()) };
            let request = srq.private().request();
            (Memory::at(request.buf_addr), request)
        }
    }

    impl Drop for Program {
        fn drop(&mut self) {
            let answers = [
                call!(COMMON.destroy_qp(self.qp)),
                call!(RINGS.destroy_srq(self.srq)),
                call!(COMMON.destroy_cq(self.cq)),
                call!(COMMON.destroy_ah(self.ah)),
                call!(RINGS.close_xrcd(self.xrcd)),
                call!(RINGS.dealloc_mw(self.mw)),
                call!(COMMON.dereg_mr(self.mr.cast())),
                call!(COMMON.dealloc_pd(self.pd)),
            ];
            assert_eq!(answers, [0; 8]);
            // The context is dropped before the kernel, in the order of the fields.
            let _ = (&self.opened, &self.kernel);
        }
    }

    /// The number of the program's QP.
    const NUMBER: u32 = 5;

    fn cap() -> ibv_qp_cap {
        ibv_qp_cap { max_send_wr: 1, max_send_sge: 1, max_recv_sge: 1, ..Default::default() }
    }

    fn srq_attr() -> ibv_srq_init_attr {
        let attr = ibv_srq_attr { max_wr: 4, max_sge: 1, srq_limit: 0 };
        ibv_srq_init_attr { attr, ..Default::default() }
    }

    fn domain_attr() -> ibv_xrcd_init_attr {
        let comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
        ibv_xrcd_init_attr { comp_mask, fd: -1, oflags: 0 }
    }

    fn parent_attr(pd: *mut ibv_pd) -> ibv_parent_domain_init_attr {
        ibv_parent_domain_init_attr { pd, ..Default::default() }
    }

    /// Returns the error of a verb that answered NULL.
    fn refusal<T>(object: *mut T) -> Option<Errno> {
        object.is_null().then(Errno::last)
    }

    /// Each verb that creates an object, the verb that destroys it, and the commands of both.
    #[test]
    fn each_verb_that_creates() {
        type End = fn(*mut c_void) -> c_int;
        type Create = (&'static str, fn(&Program) -> *mut c_void, Name, End, Name);
        let p = Program::new();
        let [end_pd, end_mr, end_mw, end_ah, end_cq, end_qp, end_srq, end_xrcd] = END;
        let verbs: [Create; 16] = [
            (
                "alloc_pd",
                |p| call!(COMMON.alloc_pd(p.context)).cast(),
                Write(IB_USER_VERBS_CMD_ALLOC_PD),
                |pd| call!(COMMON.dealloc_pd(pd.cast())),
                end_pd,
            ),
            (
                "reg_mr",
                |p| call!(COMMON.reg_mr(p.pd, ptr::null_mut(), 1, 2, 0)).cast(),
                Write(IB_USER_VERBS_CMD_REG_MR),
                |mr| call!(COMMON.dereg_mr(mr.cast())),
                end_mr,
            ),
            (
                "reg_dmabuf_mr",
                |p| call!(COMMON.reg_dmabuf_mr(p.pd, 1, 2, 3, 4, 0)).cast(),
                Method(UVERBS_OBJECT_MR, UVERBS_METHOD_REG_DMABUF_MR),
                |mr| call!(COMMON.dereg_mr(mr.cast())),
                end_mr,
            ),
            (
                "import_mr",
                |p| call!(COMMON.import_mr(p.pd, 77)).cast(),
                Method(UVERBS_OBJECT_MR, UVERBS_METHOD_QUERY_MR),
                |mr| call!(COMMON.dereg_mr(mr.cast())),
                end_mr,
            ),
            (
                "alloc_mw",
                |p| call!(RINGS.alloc_mw(p.pd, IBV_MW_TYPE_2)).cast(),
                Write(IB_USER_VERBS_CMD_ALLOC_MW),
                |mw| call!(RINGS.dealloc_mw(mw.cast())),
                end_mw,
            ),
            (
                "create_ah",
                |p| call!(COMMON.create_ah(p.pd, &mut Default::default())).cast(),
                Write(IB_USER_VERBS_CMD_CREATE_AH),
                |ah| call!(COMMON.destroy_ah(ah.cast())),
                end_ah,
            ),
            (
                "create_cq",
                |p| call!(COMMON.create_cq(p.context, 4, ptr::null_mut(), 0)).cast(),
                NEW_CQ,
                |cq| call!(COMMON.destroy_cq(cq.cast())),
                end_cq,
            ),
            (
                "create_cq_ex",
                |p| call!(COMMON.create_cq_ex(p.context, &mut p.cq_attr())).cast(),
                NEW_CQ,
                |cq| call!(COMMON.destroy_cq(cq.cast())),
                end_cq,
            ),
            (
                "create_qp",
                |p| call!(COMMON.create_qp(p.pd, &mut p.init())).cast(),
                NEW_QP,
                |qp| call!(COMMON.destroy_qp(qp.cast())),
                end_qp,
            ),
            (
                "create_qp_ex",
                |p| call!(COMMON.create_qp_ex(p.context, &mut p.init_ex())).cast(),
                NEW_QP,
                |qp| call!(COMMON.destroy_qp(qp.cast())),
                end_qp,
            ),
            (
                "create_qp_ex, XRC target",
                |p| {
                    let mut attr = ibv_qp_init_attr_ex {
                        qp_type: IBV_QPT_XRC_RECV,
                        comp_mask: IBV_QP_INIT_ATTR_XRCD,
                        xrcd: p.xrcd,
                        ..Default::default()
                    };
                    call!(COMMON.create_qp_ex(p.context, &mut attr)).cast()
                },
                NEW_QP,
                |qp| call!(COMMON.destroy_qp(qp.cast())),
                end_qp,
            ),
            (
                "open_qp",
                |p| {
                    let mut attr = ibv_qp_open_attr {
                        comp_mask: IBV_QP_OPEN_ATTR_NUM
                            | IBV_QP_OPEN_ATTR_XRCD
                            | IBV_QP_OPEN_ATTR_TYPE,
                        qp_type: IBV_QPT_XRC_RECV,
                        xrcd: p.xrcd,
                        ..Default::default()
                    };
                    call!(RINGS.open_qp(p.context, &mut attr)).cast()
                },
                Write(IB_USER_VERBS_CMD_OPEN_QP),
                |qp| call!(COMMON.destroy_qp(qp.cast())),
                end_qp,
            ),
            (
                "create_srq",
                |p| call!(RINGS.create_srq(p.pd, &mut srq_attr())).cast(),
                NEW_SRQ,
                |srq| call!(RINGS.destroy_srq(srq.cast())),
                end_srq,
            ),
            (
                "create_srq_ex",
                |p| {
                    p.kernel.answer(UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM, 9u32);
                    call!(RINGS.create_srq_ex(p.context, &mut p.init_xrc())).cast()
                },
                NEW_SRQ,
                |srq| call!(RINGS.destroy_srq(srq.cast())),
                end_srq,
            ),
            (
                "open_xrcd",
                |p| call!(RINGS.open_xrcd(p.context, &mut domain_attr())).cast(),
                Write(IB_USER_VERBS_CMD_OPEN_XRCD),
                |xrcd| call!(RINGS.close_xrcd(xrcd.cast())),
                end_xrcd,
            ),
            (
                "create_cq_ex, one thread",
                |p| {
                    let mut attr = ibv_cq_init_attr_ex {
                        comp_mask: IBV_CQ_INIT_ATTR_MASK_FLAGS,
                        flags: IBV_CREATE_CQ_ATTR_SINGLE_THREADED,
                        ..p.cq_attr()
                    };
                    call!(COMMON.create_cq_ex(p.context, &mut attr)).cast()
                },
                NEW_CQ,
                |cq| call!(COMMON.destroy_cq(cq.cast())),
                end_cq,
            ),
        ];
        for (name, create, new, end, gone) in verbs {
            for errno in [EPERM, EINVAL, ENOMEM] {
                if name != "create_srq_ex" {
                    p.kernel.fail(errno);
                    let error = refusal(create(&p)).map(Errno::get);
                    assert_eq!(error, Some(errno as c_int), "{name}");
                    assert_eq!(p.kernel.names(), [new], "{name}");
                }
            }
            let object = create(&p);
            assert!(!object.is_null(), "{name}");
            assert_eq!(p.kernel.names(), [new], "{name}");
            // An object that the kernel does not destroy stays.
            for errno in [EBUSY, EIO] {
                p.kernel.fail(errno);
                assert_eq!(end(object), errno as c_int, "{name}");
                assert_eq!(p.kernel.names(), [gone], "{name}");
            }
            assert_eq!(end(object), 0, "{name}");
            assert_eq!(p.kernel.names(), [gone], "{name}");
        }
        assert!(freed::is_intact());
    }

    /// Each verb that changes or reads an object, and its command.
    #[test]
    fn each_verb_that_asks_the_kernel() {
        type Verb = (&'static str, fn(&Program) -> c_int, Name);
        let p = Program::new();
        let verbs: [Verb; 10] = [
            (
                "query_port",
                |p| call!(COMMON.query_port(p.context, 1, &mut Default::default())),
                Method(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_PORT),
            ),
            (
                "query_qp",
                |p| {
                    let (mut attr, mut init) = Default::default();
                    call!(COMMON.query_qp(p.qp, &mut attr, 1, &mut init))
                },
                Write(IB_USER_VERBS_CMD_QUERY_QP),
            ),
            (
                "modify_qp",
                |p| call!(COMMON.modify_qp(p.qp, &mut Default::default(), 0)),
                Write(IB_USER_VERBS_CMD_MODIFY_QP),
            ),
            (
                "modify_cq",
                |p| call!(COMMON.modify_cq(p.cq, &mut Default::default())),
                Write(IB_USER_VERBS_EX_CMD_MODIFY_CQ | 1 << 31),
            ),
            ("resize_cq", |p| call!(RINGS.resize_cq(p.cq, 8)), Write(IB_USER_VERBS_CMD_RESIZE_CQ)),
            (
                "attach_mcast",
                |p| call!(COMMON.attach_mcast(p.qp, &ibv_gid { raw: [1; 16] }, 2)),
                Write(IB_USER_VERBS_CMD_ATTACH_MCAST),
            ),
            (
                "detach_mcast",
                |p| call!(COMMON.detach_mcast(p.qp, &ibv_gid { raw: [1; 16] }, 2)),
                Write(IB_USER_VERBS_CMD_DETACH_MCAST),
            ),
            (
                "rereg_mr",
                |p| {
                    let flags = IBV_REREG_MR_CHANGE_ACCESS as c_int;
                    let (mr, none) = (p.mr.cast(), ptr::null_mut());
                    call!(COMMON.rereg_mr(mr, flags, none, ptr::null_mut(), 0, 1))
                },
                Write(IB_USER_VERBS_CMD_REREG_MR),
            ),
            (
                "modify_srq",
                |p| {
                    let limit = IBV_SRQ_LIMIT as c_int;
                    call!(RINGS.modify_srq(p.srq, &mut Default::default(), limit))
                },
                Write(IB_USER_VERBS_CMD_MODIFY_SRQ),
            ),
            (
                "query_srq",
                |p| call!(RINGS.query_srq(p.srq, &mut Default::default())),
                Write(IB_USER_VERBS_CMD_QUERY_SRQ),
            ),
        ];
        for (name, verb, command) in verbs {
            for errno in [EPERM, ENOMEM] {
                p.kernel.fail(errno);
                assert_eq!(verb(&p), errno as c_int, "{name}");
                assert_eq!(p.kernel.names(), [command], "{name}");
            }
            assert_eq!(verb(&p), 0, "{name}");
            assert_eq!(p.kernel.names(), [command], "{name}");
        }
    }

    /// Imported objects have the handle that was asked for, and no command destroys them.
    #[test]
    fn what_is_imported() {
        let p = Program::new();
        let pd = call!(COMMON.import_pd(p.context, 55));
        // SAFETY: the PD is live.
        assert_eq!(unsafe { ((*pd).handle, (*pd).context) }, (55, p.context));
        assert_eq!(p.kernel.names(), []);
        let mr = call!(COMMON.import_mr(pd, 66));
        let command = p.kernel.one();
        assert_eq!(command.handle(UVERBS_ATTR_QUERY_MR_HANDLE), 66);
        // SAFETY: the MR is live.
        assert_eq!(unsafe { (*mr).handle }, 66);
        call!(COMMON.unimport_mr(mr));
        call!(COMMON.unimport_pd(pd));
        assert_eq!(p.kernel.names(), []);
    }

    /// Each argument of the program reaches its field of the command.
    #[test]
    fn arguments_of_regions() {
        let p = Program::new();
        let at = ptr::without_provenance_mut(0x1000);
        let mr = call!(COMMON.reg_mr(p.pd, at, 0x2000, 0x3000, 5));
        let core: ib_uverbs_reg_mr = p.kernel.one().core();
        assert_eq!((core.start, core.length, core.hca_va), (0x1000, 0x2000, 0x3000));
        assert_eq!(core.access_flags, 5);
        let flags = IBV_REREG_MR_CHANGE_TRANSLATION as c_int;
        let none = ptr::null_mut();
        assert_eq!(call!(COMMON.rereg_mr(mr.cast(), flags, none, at, 0x4000, 7)), 0);
        let core: ib_uverbs_rereg_mr = p.kernel.one().core();
        // Work requests name the first byte by its address (ibv_rereg_mr(3)).
        assert_eq!((core.start, core.length, core.hca_va), (0x1000, 0x4000, 0x1000));
        assert_eq!((core.flags as c_int, core.access_flags), (flags, 7));
        let flags = IBV_REREG_MR_CHANGE_PD as c_int;
        assert_eq!(call!(COMMON.rereg_mr(mr.cast(), flags, none, at, 1, 0)), EINVAL as c_int);
        assert_eq!(call!(COMMON.rereg_mr(mr.cast(), flags, p.pd, at, 1, 0)), 0);
        assert_eq!(p.kernel.one().core::<ib_uverbs_rereg_mr>().pd_handle, FIRST_HANDLE);
        assert_eq!(call!(COMMON.dereg_mr(mr.cast())), 0);
    }

    /// Attributes that no object has, or that are missing, end in an error, and no command
    /// is sent.
    #[test]
    fn attributes_that_cannot_be() {
        let p = Program::new();
        let td = |comp_mask| {
            refusal(call!(COMMON.alloc_td(p.context, &mut ibv_td_init_attr { comp_mask })))
        };
        assert_eq!(td(1), Some(Errno::EINVAL));

        let parent = |attr: &mut _| refusal(call!(COMMON.alloc_parent_domain(p.context, attr)));
        assert_eq!(parent(&mut parent_attr(ptr::null_mut())), Some(Errno::EINVAL));
        let mut attr = ibv_parent_domain_init_attr { comp_mask: 1 << 3, ..parent_attr(p.pd) };
        assert_eq!(parent(&mut attr), Some(Errno::EINVAL));
        attr.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS;
        assert_eq!(parent(&mut attr), Some(Errno::EINVAL));
        attr.alloc = Some(Lender::alloc);
        assert_eq!(parent(&mut attr), Some(Errno::EINVAL));

        let cq = |attr: ibv_cq_init_attr_ex| {
            refusal(call!(COMMON.create_cq_ex(p.context, &mut { attr })))
        };
        let flags = IBV_CQ_INIT_ATTR_MASK_FLAGS;
        let with_pd = IBV_CQ_INIT_ATTR_MASK_PD;
        let good = p.cq_attr();
        for (attr, errno) in [
            (ibv_cq_init_attr_ex { comp_mask: 1 << 2, ..good }, Errno::EOPNOTSUPP),
            (
                ibv_cq_init_attr_ex {
                    comp_mask: flags,
                    flags: IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN,
                    ..good
                },
                Errno::EOPNOTSUPP,
            ),
            (ibv_cq_init_attr_ex { comp_mask: with_pd, ..good }, Errno::EINVAL),
            // A PD that is not a parent domain.
            (
                ibv_cq_init_attr_ex { comp_mask: with_pd, parent_domain: p.pd, ..good },
                Errno::EINVAL,
            ),
            (ibv_cq_init_attr_ex { cqe: u32::MAX, ..good }, Errno::EINVAL),
            (ibv_cq_init_attr_ex { cqe: 0, ..good }, Errno::EINVAL),
            (ibv_cq_init_attr_ex { comp_vector: u32::MAX, ..good }, Errno::EINVAL),
            (ibv_cq_init_attr_ex { wc_flags: 1 << 32, ..good }, Errno::EOPNOTSUPP),
            (
                ibv_cq_init_attr_ex { wc_flags: IBV_WC_EX_WITH_TM_INFO.into(), ..good },
                Errno::EOPNOTSUPP,
            ),
        ] {
            assert_eq!(cq(attr), Some(errno));
        }
        let none = ptr::null_mut();
        for cqe in [0, -1, c_int::MAX] {
            let cq = call!(COMMON.create_cq(p.context, cqe, none, 0));
            assert_eq!(refusal(cq), Some(Errno::EINVAL));
        }

        let qp = |attr: ibv_qp_init_attr_ex| {
            refusal(call!(COMMON.create_qp_ex(p.context, &mut { attr })))
        };
        let (good, pd) = (p.init_ex(), IBV_QP_INIT_ATTR_PD);
        for (attr, errno) in [
            (
                ibv_qp_init_attr_ex { comp_mask: pd | IBV_QP_INIT_ATTR_MAX_TSO_HEADER, ..good },
                Errno::EOPNOTSUPP,
            ),
            (ibv_qp_init_attr_ex { comp_mask: 0, ..good }, Errno::EINVAL),
            (ibv_qp_init_attr_ex { pd: ptr::null_mut(), ..good }, Errno::EINVAL),
            (
                ibv_qp_init_attr_ex {
                    comp_mask: pd | IBV_QP_INIT_ATTR_CREATE_FLAGS,
                    create_flags: IBV_QP_CREATE_SOURCE_QPN,
                    ..good
                },
                Errno::EOPNOTSUPP,
            ),
            (
                ibv_qp_init_attr_ex {
                    comp_mask: pd | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                    send_ops_flags: 1 << 63,
                    ..good
                },
                Errno::EOPNOTSUPP,
            ),
            // A UD QP has no RDMA READ.
            (
                ibv_qp_init_attr_ex {
                    qp_type: IBV_QPT_UD,
                    comp_mask: pd | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                    send_ops_flags: IBV_QP_EX_WITH_RDMA_READ.into(),
                    ..good
                },
                Errno::EOPNOTSUPP,
            ),
            (ibv_qp_init_attr_ex { send_cq: ptr::null_mut(), ..good }, Errno::EINVAL),
            (ibv_qp_init_attr_ex { recv_cq: ptr::null_mut(), ..good }, Errno::EINVAL),
            (ibv_qp_init_attr_ex { qp_type: IBV_QPT_XRC_RECV, ..good }, Errno::EINVAL),
            (
                ibv_qp_init_attr_ex {
                    qp_type: IBV_QPT_XRC_RECV,
                    comp_mask: IBV_QP_INIT_ATTR_XRCD | IBV_QP_INIT_ATTR_CREATE_FLAGS,
                    xrcd: p.xrcd,
                    ..good
                },
                Errno::EOPNOTSUPP,
            ),
        ] {
            assert_eq!(qp(attr), Some(errno));
        }

        let srq = |attr: ibv_srq_init_attr_ex| {
            refusal(call!(RINGS.create_srq_ex(p.context, &mut { attr })))
        };
        let good = p.init_xrc();
        for (attr, errno) in [
            (ibv_srq_init_attr_ex { srq_type: IBV_SRQT_BASIC, ..good }, Errno::EOPNOTSUPP),
            (ibv_srq_init_attr_ex { srq_type: IBV_SRQT_TM, ..good }, Errno::EOPNOTSUPP),
            (
                ibv_srq_init_attr_ex { comp_mask: good.comp_mask | IBV_SRQ_INIT_ATTR_TM, ..good },
                Errno::EOPNOTSUPP,
            ),
            (ibv_srq_init_attr_ex { pd: ptr::null_mut(), ..good }, Errno::EINVAL),
            (ibv_srq_init_attr_ex { xrcd: ptr::null_mut(), ..good }, Errno::EINVAL),
            (ibv_srq_init_attr_ex { cq: ptr::null_mut(), ..good }, Errno::EINVAL),
            (
                ibv_srq_init_attr_ex { comp_mask: good.comp_mask & !IBV_SRQ_INIT_ATTR_CQ, ..good },
                Errno::EINVAL,
            ),
        ] {
            assert_eq!(srq(attr), Some(errno));
        }
        let mut attr = ibv_srq_init_attr::default();
        assert_eq!(refusal(call!(RINGS.create_srq(p.pd, &mut attr))), Some(Errno::EINVAL));
        assert_eq!(
            refusal(call!(RINGS.open_qp(p.context, &mut Default::default()))),
            Some(Errno::EINVAL)
        );

        let mut values = ibv_values_ex { comp_mask: 1 << 1, ..Default::default() };
        assert_eq!(call!(COMMON.query_rt_values(p.context, &mut values)), EINVAL as c_int);
        for entries in [-1, c_int::MIN] {
            assert_eq!(call!(RINGS.poll_cq(p.cq, entries, ptr::null_mut())), -1);
            assert_eq!(Errno::last(), Errno::EINVAL);
        }
        assert_eq!(call!(RINGS.poll_cq(p.cq, 0, ptr::null_mut())), 0);
        assert_eq!(p.kernel.names(), []);
    }

    /// An SRQ for XRC has the number that the kernel gave it; other SRQs do not have a number. An SRQ
    /// with an invalid number is destroyed again.
    #[test]
    fn numbers_of_srqs() {
        let p = Program::new();
        let mut number = 0;
        assert_eq!(call!(RINGS.get_srq_num(p.srq, &mut number)), EOPNOTSUPP as c_int);
        p.kernel.answer(UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM, 9u32);
        let srq = call!(RINGS.create_srq_ex(p.context, &mut p.init_xrc()));
        assert_eq!((call!(RINGS.get_srq_num(srq, &mut number)), number), (0, 9));
        // SAFETY: the SRQ is live.
        assert_eq!(unsafe { (*srq).pd }, p.pd);
        assert_eq!(call!(RINGS.destroy_srq(srq)), 0);
        p.kernel.take();
        for number in [0, 1 << 24] {
            p.kernel.answer(UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM, number);
            let srq = call!(RINGS.create_srq_ex(p.context, &mut p.init_xrc()));
            assert_eq!(refusal(srq), Some(Errno::EINVAL));
            assert_eq!(p.kernel.names(), [NEW_SRQ, END[6]]);
        }
        p.kernel.answer(UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, 1u32 << 24);
        assert_eq!(refusal(call!(COMMON.create_qp(p.pd, &mut p.init()))), Some(Errno::EINVAL));
        assert_eq!(p.kernel.names(), [NEW_QP, END[5]]);
        p.kernel.fail(ENOMEM);
        let srq = call!(RINGS.create_srq_ex(p.context, &mut p.init_xrc()));
        assert_eq!((refusal(srq), p.kernel.names()), (Some(Errno::ENOMEM), vec![NEW_SRQ]));
    }

    /// Extended objects have their entry points. Other objects do not have room for them.
    #[test]
    fn extended_objects_have_entry_points() {
        let p = Program::new();
        let cq = call!(COMMON.create_cq_ex(p.context, &mut p.cq_attr()));
        // SAFETY: the objects are live, here and below.
        unsafe {
            let mut attr = ibv_poll_cq_attr::default();
            assert_eq!((*cq).start_poll.unwrap()(cq, &mut attr), ENOENT as c_int);
        }
        for by_calls in [false, true] {
            let mut attr = p.init_ex();
            if by_calls {
                attr.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
                attr.send_ops_flags = IBV_QP_EX_WITH_SEND.into();
            }
            let qp = call!(COMMON.create_qp_ex(p.context, &mut attr));
            let ex = qp.cast::<ibv_qp_ex>();
            // SAFETY: see above.
            unsafe {
                assert_eq!((*ex).wr_start.is_some(), by_calls);
                let mask = (*qp.cast::<verbs_qp>()).comp_mask & VERBS_QP_EX;
                assert_eq!(mask != 0, by_calls);
            }
            assert_eq!(call!(COMMON.destroy_qp(qp)), 0);
        }
        assert_eq!(call!(COMMON.destroy_cq(cq.cast())), 0);
    }

    /// Each verb that posts writes to its own ring, and to no other. It names the request that it
    /// cannot post.
    #[test]
    fn each_verb_that_posts() {
        let p = Program::new();
        let (memory, rings) = p.rings();
        let (shared, srq) = p.shared();
        let posted = || {
            let word =
                |memory: Memory, at| memory.word(at).load(core::sync::atomic::Ordering::SeqCst);
            let rq = offset_of!(virtio_rdma_qp_ring, rq_producer);
            (word(memory, 0), word(memory, rq), word(shared, 0))
        };
        let id = |memory: Memory, at: u32| {
            let at = at as usize;
            let half = |at| memory.word(at).load(core::sync::atomic::Ordering::SeqCst);
            u64::from(half(at)) | u64::from(half(at + 4)) << 32
        };
        let mut send =
            ibv_send_wr { wr_id: 1 << 32 | 11, opcode: IBV_WR_SEND, ..Default::default() };
        let mut bad = ptr::null_mut();
        assert_eq!(call!(RINGS.post_send(p.qp, &mut send, &mut bad)), 0);
        assert_eq!((posted(), id(memory, rings.sq_offset)), ((1, 0, 0), 1 << 32 | 11));
        assert!(bad.is_null());
        let mut recv = ibv_recv_wr { wr_id: 1 << 32 | 12, ..Default::default() };
        let mut bad_recv = ptr::null_mut();
        assert_eq!(call!(RINGS.post_recv(p.qp, &mut recv, &mut bad_recv)), 0);
        assert_eq!((posted(), id(memory, rings.rq_offset + 8)), ((1, 1, 0), 1 << 32 | 12));
        recv.wr_id = 1 << 32 | 13;
        assert_eq!(call!(RINGS.post_srq_recv(p.srq, &mut recv, &mut bad_recv)), 0);
        assert_eq!((posted(), id(shared, srq.offset + 8)), ((1, 1, 1), 1 << 32 | 13));
        assert!(bad_recv.is_null());

        // The second request of a list is wrong.
        let mut wrong = ibv_send_wr { opcode: 99, ..Default::default() };
        send.next = &raw mut wrong;
        assert_eq!(call!(RINGS.post_send(p.qp, &mut send, &mut bad)), EINVAL as c_int);
        assert_eq!((bad, posted()), (&raw mut wrong, (2, 1, 1)));
        // The program may pass NULL for `bad_wr`.
        assert_eq!(call!(RINGS.post_send(p.qp, &mut send, ptr::null_mut())), EINVAL as c_int);
        let mut wrong = ibv_recv_wr { num_sge: -1, ..Default::default() };
        recv.next = &raw mut wrong;
        assert_eq!(call!(RINGS.post_recv(p.qp, &mut recv, &mut bad_recv)), EINVAL as c_int);
        assert_eq!((bad_recv, posted()), (&raw mut wrong, (3, 2, 1)));
        bad_recv = ptr::null_mut();
        assert_eq!(call!(RINGS.post_srq_recv(p.srq, &mut recv, &mut bad_recv)), EINVAL as c_int);
        assert_eq!((bad_recv, posted()), (&raw mut wrong, (3, 2, 2)));
        assert_eq!(p.kernel.names(), []);
    }

    /// ibv_bind_mw(3) posts the binding, and the window gets its next key. It keeps the old key if
    /// the binding is not posted.
    #[test]
    fn a_window_is_bound() {
        let p = Program::new();
        let (memory, rings) = p.rings();
        // SAFETY: the window is live, here and below.
        unsafe { (*p.mw).rkey = 0x5ff };
        // SAFETY: see above.
        let key = || unsafe { (*p.mw).rkey };
        let mut bind = ibv_mw_bind { wr_id: 7, ..Default::default() };
        bind.bind_info = ibv_mw_bind_info {
            mr: p.mr,
            addr: 0x1000,
            length: 0x2000,
            mw_access_flags: IBV_ACCESS_REMOTE_READ,
        };
        p.set_state(IBV_QPS_INIT);
        assert_eq!(call!(RINGS.bind_mw(p.qp, p.mw, &mut bind)), EINVAL as c_int);
        assert_eq!(key(), 0x5ff);
        p.set_state(IBV_QPS_RTS);
        assert_eq!(call!(RINGS.bind_mw(p.qp, p.mw, &mut bind)), 0);
        assert_eq!(key(), 0x500);
        let word = |at: usize| {
            memory.word(rings.sq_offset as usize + at).load(core::sync::atomic::Ordering::SeqCst)
        };
        let at = |at| word(at);
        assert_eq!(at(offset_of!(virtio_rdma_ring_bind_wqe, wr_id)), 7);
        assert_eq!(at(offset_of!(virtio_rdma_ring_bind_wqe, mw_rkey)), 0x5ff);
        assert_eq!(at(offset_of!(virtio_rdma_ring_bind_wqe, new_rkey)), 0x500);
        assert_eq!(at(offset_of!(virtio_rdma_ring_bind_wqe, addr)), 0x1000);
        assert_eq!(at(offset_of!(virtio_rdma_ring_bind_wqe, length)), 0x2000);
        assert_eq!(at(offset_of!(virtio_rdma_ring_bind_wqe, access)), IBV_ACCESS_REMOTE_READ);
    }

    /// If the kernel posts and polls, the verbs are commands, and do not touch a ring.
    #[test]
    fn the_verbs_without_rings() {
        let kernel = Kernel::new();
        let opened = Opened::new(&kernel, description(VIRTIO_RDMA_UDATA_PATH_KERNEL));
        let context = opened.verbs();
        let pd = call!(COMMON.alloc_pd(context));
        let cq = call!(COMMON.create_cq(context, 4, ptr::null_mut(), 0));
        assert!(kernel.take().iter().all(|command| command.is_without_driver()));
        let mut attr = ibv_qp_init_attr {
            send_cq: cq,
            recv_cq: cq,
            qp_type: IBV_QPT_RC,
            cap: ibv_qp_cap { max_recv_wr: 1, ..cap() },
            ..Default::default()
        };
        let qp = call!(COMMON.create_qp(pd, &mut attr));
        assert!(kernel.one().is_without_driver());
        let (mut send, mut recv) = (ibv_send_wr::default(), ibv_recv_wr::default());
        let (mut bad_send, mut bad_recv) = (ptr::null_mut(), ptr::null_mut());
        assert_eq!(call!(KERNEL.post_send(qp, &mut send, &mut bad_send)), 0);
        assert_eq!(call!(KERNEL.post_recv(qp, &mut recv, &mut bad_recv)), 0);
        assert_eq!(call!(KERNEL.req_notify_cq(cq, 1)), 0);
        let mut wc = ibv_wc::default();
        kernel.answer(UVERBS_ATTR_CORE_OUT, 0u32);
        assert_eq!(call!(KERNEL.poll_cq(cq, 1, &mut wc)), 0);
        let commands = kernel.take();
        let names: Vec<_> = commands.iter().map(|command| command.name).collect();
        let expected = [
            IB_USER_VERBS_CMD_POST_SEND,
            IB_USER_VERBS_CMD_POST_RECV,
            IB_USER_VERBS_CMD_REQ_NOTIFY_CQ,
            IB_USER_VERBS_CMD_POLL_CQ,
        ];
        assert_eq!(names, expected.map(Write));
        let core: ib_uverbs_req_notify_cq = commands[2].core();
        assert_eq!(core.solicited_only, 1);
        // The request that the kernel does not take is the program's, not a copy.
        kernel.fail(ENOMEM);
        assert_eq!(call!(KERNEL.post_send(qp, &mut send, &mut bad_send)), ENOMEM as c_int);
        assert_eq!(bad_send, &raw mut send);
        kernel.fail(EIO);
        assert_eq!(call!(KERNEL.post_recv(qp, &mut recv, &mut bad_recv)), EIO as c_int);
        assert_eq!(bad_recv, &raw mut recv);
        kernel.fail(EIO);
        assert_eq!(call!(KERNEL.poll_cq(cq, 1, &mut wc)), -1);
        assert_eq!(Errno::last(), Errno::EIO);
        assert_eq!(call!(KERNEL.poll_cq(cq, -1, &mut wc)), -1);
        assert_eq!(Errno::last(), Errno::EINVAL);
        // There are no work requests by calls either.
        kernel.take();
        let mut attr = ibv_qp_init_attr_ex {
            send_cq: cq,
            recv_cq: cq,
            qp_type: IBV_QPT_RC,
            comp_mask: IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            pd,
            ..Default::default()
        };
        let refused = call!(COMMON.create_qp_ex(context, &mut attr));
        assert_eq!((refusal(refused), kernel.names()), (Some(Errno::EOPNOTSUPP), vec![]));
        assert_eq!(call!(COMMON.destroy_qp(qp)), 0);
        assert_eq!(call!(COMMON.destroy_cq(cq)), 0);
        assert_eq!(call!(COMMON.dealloc_pd(pd)), 0);
    }

    /// The attributes of a device are written as far as the program has room, with the
    /// clock of the time stamps.
    #[test]
    fn attributes_of_the_device() {
        let p = Program::new();
        let clock = offset_of!(ibv_device_attr_ex, hca_core_clock);
        for (size, has_clock) in [(clock, false), (clock + 8, true)] {
            let mut attr = ibv_device_attr_ex { hca_core_clock: 1, ..Default::default() };
            let input = ptr::null();
            p.kernel.answer(UVERBS_ATTR_CORE_OUT, [0u64; 22]);
            assert_eq!(call!(COMMON.query_device_ex(p.context, input, &mut attr, size)), 0);
            assert_eq!(attr.completion_timestamp_mask, u64::MAX);
            assert_eq!(attr.hca_core_clock, if has_clock { crate::clock::KHZ } else { 1 });
        }
        let mut attr = ibv_device_attr_ex::default();
        p.kernel.fail(EPERM);
        let error =
            call!(COMMON.query_device_ex(p.context, ptr::null(), &mut attr, size_of_val(&attr)));
        assert_eq!((error, attr.completion_timestamp_mask), (EPERM as c_int, 0));
        let mut values = ibv_values_ex { comp_mask: 1, ..Default::default() };
        assert_eq!(call!(COMMON.query_rt_values(p.context, &mut values)), 0);
        assert_ne!(values.raw_clock.tv_nsec, 0);
    }

    /// The memory functions of a program.
    #[derive(Default)]
    struct Lender {
        /// The next answer to an allocation: memory, or another value.
        next: Cell<*mut c_void>,
        /// The last allocation: its size, its resource, and the domain.
        lent: Cell<Option<(usize, u64, *mut ibv_pd)>>,
        /// The last memory that came back, and its resource.
        back: Cell<Option<(*mut c_void, u64)>>,
    }

    impl Lender {
        unsafe extern "C" fn alloc(
            pd: *mut ibv_pd,
            context: *mut c_void,
            size: usize,
            alignment: usize,
            resource: u64,
        ) -> *mut c_void {
            // SAFETY: the tests' context is a lender that lives longer.
            let lender = unsafe { &*context.cast::<Self>() };
            assert_eq!((alignment, size % alignment), (crate::ring::page_size(), 0));
            lender.lent.set(Some((size, resource, pd)));
            lender.next.get()
        }

        unsafe extern "C" fn free(
            _: *mut ibv_pd,
            context: *mut c_void,
            at: *mut c_void,
            resource: u64,
        ) {
            // SAFETY: as above.
            let lender = unsafe { &*context.cast::<Self>() };
            assert_eq!(lender.back.replace(Some((at, resource))), None);
        }

        /// Returns a parent domain with these memory functions.
        fn domain(&self, p: &Program) -> *mut ibv_pd {
            let mut attr = ibv_parent_domain_init_attr {
                alloc: Some(Self::alloc),
                free: Some(Self::free),
                pd_context: ptr::from_ref(self).cast_mut().cast(),
                comp_mask: IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS
                    | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
                ..parent_attr(p.pd)
            };
            let domain = call!(COMMON.alloc_parent_domain(p.context, &mut attr));
            assert!(!domain.is_null());
            domain
        }
    }

    /// A page of the program's memory, as large as any machine has.
    #[derive(Clone, Copy)]
    #[repr(align(65536))]
    struct Page([u8; 65536]);

    /// Returns memory of the program, filled with a byte.
    fn pages(byte: u8) -> Box<[Page]> {
        vec![Page([byte; 65536]); 4].into()
    }

    /// The rings of a QP, a CQ and an SRQ of a parent domain are in memory of its functions. The
    /// memory is zeroed, and given back when the object is destroyed; until then the
    /// domain is busy. The kernel sees the PD in place of the domain.
    #[test]
    fn memory_of_a_parent_domain() {
        let p = Program::new();
        let lender = Lender::default();
        let domain = lender.domain(&p);
        assert_eq!(p.kernel.names(), []);
        // SAFETY: both are live.
        unsafe { assert_eq!(((*domain).handle, (*domain).context), ((*p.pd).handle, p.context)) };
        assert_eq!(call!(COMMON.dealloc_pd(p.pd)), EBUSY as c_int);
        type Create = fn(&Program, *mut ibv_pd) -> *mut c_void;
        type End = fn(*mut c_void) -> c_int;
        let kinds: [(u64, Create, End); 3] = [
            (
                1,
                |p, pd| call!(COMMON.create_qp(pd, &mut p.init())).cast(),
                |qp| call!(COMMON.destroy_qp(qp.cast())),
            ),
            (
                2,
                |p, parent_domain| {
                    let comp_mask = IBV_CQ_INIT_ATTR_MASK_PD;
                    let mut attr = ibv_cq_init_attr_ex { comp_mask, parent_domain, ..p.cq_attr() };
                    call!(COMMON.create_cq_ex(p.context, &mut attr)).cast()
                },
                |cq| call!(COMMON.destroy_cq(cq.cast())),
            ),
            (
                3,
                |_, pd| call!(RINGS.create_srq(pd, &mut srq_attr())).cast(),
                |srq| call!(RINGS.destroy_srq(srq.cast())),
            ),
        ];
        for (resource, create, end) in kinds {
            let mut pages = pages(0xa5);
            let at: *mut c_void = pages.as_mut_ptr().cast();
            lender.next.set(at);
            let object = create(&p, domain);
            assert!(!object.is_null());
            let (size, for_what, asked) = lender.lent.take().unwrap();
            assert_eq!((for_what, asked), (resource, domain));
            assert!(pages.iter().flat_map(|page| page.0).take(size).all(|byte| byte == 0));
            // The driver is told of this memory.
            let told: [u64; 2] = p.kernel.one().input[&UVERBS_ATTR_UHW_IN][..16]
                .as_chunks::<8>()
                .0
                .iter()
                .map(|word| u64::from_ne_bytes(*word))
                .collect::<Vec<_>>()
                .try_into()
                .unwrap();
            assert_eq!(told, [at.expose_provenance() as u64, size as u64]);
            assert_eq!(call!(COMMON.dealloc_pd(domain)), EBUSY as c_int);
            p.kernel.fail(EIO);
            assert_eq!((end(object), lender.back.get()), (EIO as c_int, None));
            assert_eq!((end(object), lender.back.take()), (0, Some((at, resource))));

            // Memory that does not begin at a page is given back; NULL is an error.
            let odd = at.wrapping_byte_add(64);
            lender.next.set(odd);
            assert_eq!(refusal(create(&p, domain)), Some(Errno::EINVAL));
            assert_eq!(lender.back.take(), Some((odd, resource)));
            lender.next.set(ptr::null_mut());
            assert_eq!(refusal(create(&p, domain)), Some(Errno::ENOMEM));
            // Memory of an object that the kernel refuses is given back as well.
            lender.next.set(at);
            p.kernel.fail(EPERM);
            assert_eq!(refusal(create(&p, domain)).map(Errno::get), Some(EPERM as c_int));
            assert_eq!(lender.back.take(), Some((at, resource)));
            // IBV_ALLOCATOR_USE_DEFAULT: the provider allocates the memory.
            lender.next.set(ptr::without_provenance_mut(usize::MAX));
            let object = create(&p, domain);
            assert!(!object.is_null());
            assert_eq!((end(object), lender.back.get()), (0, None));
            p.kernel.take();
        }
        assert_eq!((call!(COMMON.dealloc_pd(domain)), p.kernel.names()), (0, vec![]));
    }

    /// A CQ that moves allocates its next ring before it frees the old one.
    #[test]
    fn a_cq_of_a_parent_domain_moves() {
        let p = Program::new();
        let lender = Lender::default();
        let parent_domain = lender.domain(&p);
        let mut pages = [pages(0), pages(0)];
        let [old, new]: [*mut c_void; 2] = pages.each_mut().map(|pages| pages.as_mut_ptr().cast());
        let comp_mask = IBV_CQ_INIT_ATTR_MASK_PD;
        let mut attr = ibv_cq_init_attr_ex { comp_mask, parent_domain, ..p.cq_attr() };
        lender.next.set(old);
        let cq: *mut ibv_cq = call!(COMMON.create_cq_ex(p.context, &mut attr)).cast();
        lender.next.set(new);
        // The memory of the new ring is given back if the kernel does not move the CQ.
        p.kernel.fail(EINVAL);
        assert_eq!(call!(RINGS.resize_cq(cq, 8)), EINVAL as c_int);
        assert_eq!(lender.back.take(), Some((new, 2)));
        assert_eq!(call!(RINGS.resize_cq(cq, 8)), 0);
        assert_eq!(lender.back.take(), Some((old, 2)));
        assert_eq!(call!(COMMON.destroy_cq(cq)), 0);
        assert_eq!(lender.back.take(), Some((new, 2)));
        assert_eq!(call!(COMMON.dealloc_pd(parent_domain)), 0);
    }

    /// Objects of a thread domain do not take their locks. The domain is busy while a parent
    /// domain uses it.
    #[test]
    fn threads_of_a_thread_domain() {
        let p = Program::new();
        let td = call!(COMMON.alloc_td(p.context, &mut ibv_td_init_attr::default()));
        for with_td in [false, true] {
            let mut attr = parent_attr(p.pd);
            attr.td = if with_td { td } else { ptr::null_mut() };
            // A flag that this device ignores.
            attr.comp_mask = 1 << 2;
            let domain = call!(COMMON.alloc_parent_domain(p.context, &mut attr));
            let qp = call!(COMMON.create_qp(domain, &mut p.init()));
            // SAFETY: the objects are live, here and below.
            let whole: Ref<'_, Qp> = unsafe { Ref::new(qp.cast()) };
            let state = whole.private().rings().unwrap().send().state();
            let guard = state.lock();
            assert_eq!(state.is_taken(), !with_td);
            drop(guard);
            for one in [false, true] {
                let mut attr = ibv_cq_init_attr_ex {
                    comp_mask: IBV_CQ_INIT_ATTR_MASK_PD | IBV_CQ_INIT_ATTR_MASK_FLAGS,
                    flags: if one { IBV_CREATE_CQ_ATTR_SINGLE_THREADED } else { 0 },
                    parent_domain: domain,
                    ..p.cq_attr()
                };
                let cq = call!(COMMON.create_cq_ex(p.context, &mut attr));
                // SAFETY: see above.
                let whole: Ref<'_, Cq> = unsafe { Ref::new(cq.cast()) };
                let state = whole.private().state();
                let guard = state.lock();
                assert_eq!(state.is_taken(), !(with_td || one));
                drop(guard);
                assert_eq!(call!(COMMON.destroy_cq(cq.cast())), 0);
            }
            assert_eq!(call!(COMMON.destroy_qp(qp)), 0);
            let busy = if with_td { EBUSY as c_int } else { 0 };
            if with_td {
                assert_eq!(call!(COMMON.dealloc_td(td)), busy);
            }
            assert_eq!(call!(COMMON.dealloc_pd(domain)), 0);
        }
        assert_eq!(call!(COMMON.dealloc_td(td)), 0);
    }

    /// A QP that comes to RESET has empty queues. It keeps its work requests if the kernel refuses.
    #[test]
    fn a_qp_is_reset() {
        let p = Program::new();
        let (memory, _) = p.rings();
        let posted = || memory.word(0).load(core::sync::atomic::Ordering::SeqCst);
        let mut send = ibv_send_wr { opcode: IBV_WR_SEND, ..Default::default() };
        let mut bad = ptr::null_mut();
        assert_eq!(call!(RINGS.post_send(p.qp, &mut send, &mut bad)), 0);
        let mut attr = ibv_qp_attr { qp_state: IBV_QPS_RESET, ..Default::default() };
        let state = IBV_QP_STATE as c_int;
        p.kernel.fail(EINVAL);
        assert_eq!(call!(COMMON.modify_qp(p.qp, &mut attr, state)), EINVAL as c_int);
        assert_eq!(posted(), 1);
        // Other attributes, and other states, do not change the queues.
        assert_eq!(call!(COMMON.modify_qp(p.qp, &mut attr, 0)), 0);
        attr.qp_state = IBV_QPS_ERR;
        assert_eq!(call!(COMMON.modify_qp(p.qp, &mut attr, state)), 0);
        assert_eq!(posted(), 1);
        attr.qp_state = IBV_QPS_RESET;
        assert_eq!(call!(COMMON.modify_qp(p.qp, &mut attr, state)), 0);
        assert_eq!(posted(), 0);
    }
}
