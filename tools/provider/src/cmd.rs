// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! libibverbs' commands to the kernel (`ibv_cmd_*`, rdma-core
//! libibverbs/cmd*.c), as safe functions.
//!
//! Each is one call of ioctl(2) or write(2) on the context's file, keeps no
//! state of its own and may run in any number of threads. Each answers the
//! kernel's error number. Those that destroy a CQ, QP or SRQ return only after the
//! program has acknowledged every event of the object.

#[cfg(test)]
use crate::model::kernel::{ibv_cmd_post_recv, ibv_cmd_post_send, ibv_cmd_post_srq_recv};
use crate::{
    bindings::*,
    errno::{Errno, Result},
    object::Ref,
};
use core::{
    ffi::c_int,
    mem::{self, MaybeUninit},
    ptr,
};

/// A command or its answer: the core's part, then the driver's.
#[repr(C)]
#[derive(Default)]
struct Message<C, D> {
    core: C,
    driver: D,
}

impl<C, D> Message<C, D> {
    /// Bytes; those of the driver's part only if there is one.
    fn len(&self, driver: bool) -> usize {
        const { assert!(size_of::<Self>() == size_of::<C>() + size_of::<D>()) };
        if driver { size_of::<Self>() } else { size_of::<C>() }
    }
}

/// Hides that the command takes descriptors for the new context, of which there
/// are none here, in later releases of rdma-core.
///
/// # Safety
///
/// As the function of the same name without the descriptors.
#[cfg(get_context_takes_fds)]
unsafe fn ibv_cmd_get_context(
    context: *mut verbs_context,
    cmd: *mut ibv_get_context,
    cmd_size: usize,
    resp: *mut ib_uverbs_get_context_resp,
    resp_size: usize,
) -> c_int {
    let none = ptr::null_mut();
    // SAFETY: by the contract of this function; the descriptors may be null.
    unsafe { crate::bindings::ibv_cmd_get_context(context, cmd, cmd_size, none, resp, resp_size) }
}

/// Hides that the command takes attributes of the driver, of which there are none
/// here, in later releases of rdma-core.
///
/// # Safety
///
/// As the function of the same name without the attributes.
#[cfg(create_qp_takes_attrs)]
unsafe fn ibv_cmd_create_qp_ex2(
    context: *mut ibv_context,
    qp: *mut verbs_qp,
    attr: *mut ibv_qp_init_attr_ex,
    cmd: *mut ibv_create_qp_ex,
    cmd_size: usize,
    resp: *mut ib_uverbs_ex_create_qp_resp,
    resp_size: usize,
) -> c_int {
    // SAFETY: by the contract of this function; the attributes may be null.
    unsafe {
        crate::bindings::ibv_cmd_create_qp_ex2(
            context,
            qp,
            attr,
            cmd,
            cmd_size,
            resp,
            resp_size,
            ptr::null_mut(),
        )
    }
}

/// Opens the context in the kernel; answers what the driver says of it.
pub fn get_context(context: Ref<'_, verbs_context>) -> Result<virtio_rdma_uresp_alloc_ucontext> {
    let mut cmd = ibv_get_context::default();
    let mut resp =
        Message::<ib_uverbs_get_context_resp, virtio_rdma_uresp_alloc_ucontext>::default();
    // SAFETY: the buffers have the sizes given, and `resp` begins with the
    // core's structure.
    Errno::check(unsafe {
        ibv_cmd_get_context(
            context.as_ptr(),
            &mut cmd,
            size_of_val(&cmd),
            (&raw mut resp).cast(),
            resp.len(true),
        )
    })?;
    Ok(resp.driver)
}

/// A command's attributes of the driver, of which there is one, which the kernel
/// writes (rdma-core libibverbs/cmd_ioctl.h).
#[repr(C)]
struct DriverAttr {
    buffer: ibv_command_buffer,
    attr: ib_uverbs_attr,
}

/// Asks the kernel for a context that another program opened, through its file.
pub fn query_context(context: Ref<'_, verbs_context>) -> Result<virtio_rdma_uresp_alloc_ucontext> {
    const {
        let attrs = mem::offset_of!(ibv_command_buffer, hdr.attrs);
        assert!(attrs == mem::offset_of!(DriverAttr, attr));
    };
    let mut resp = virtio_rdma_uresp_alloc_ucontext::default();
    let mut driver = DriverAttr {
        // SAFETY: integers and pointers.
        buffer: unsafe { mem::zeroed() },
        attr: ib_uverbs_attr {
            attr_id: VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP as u16,
            len: size_of_val(&resp) as u16,
            flags: UVERBS_ATTR_F_MANDATORY as u16,
            __bindgen_anon_1: ib_uverbs_attr__bindgen_ty_2 {
                data: (&raw mut resp).expose_provenance() as u64,
            },
            ..Default::default()
        },
    };
    driver.buffer.hdr.object_id = UVERBS_OBJECT_DEVICE as u16;
    driver.buffer.hdr.method_id = UVERBS_METHOD_QUERY_CONTEXT as u16;
    driver.buffer.uhw_in_idx = _UHW_NO_INDEX as u8;
    driver.buffer.uhw_out_idx = _UHW_NO_INDEX as u8;
    let all = &raw mut driver;
    // SAFETY: the buffer holds one attribute, behind which it ends; the kernel
    // writes to `resp`, which is as long as the attribute says.
    Errno::check(unsafe {
        let attr = &raw mut (*all).attr;
        (*all).buffer.last_attr = attr.add(1);
        (*all).buffer.next_attr = attr.add(1);
        let context = &raw mut (*context.as_ptr()).context;
        ibv_cmd_query_context(context, all.cast())
    })?;
    Ok(resp)
}

/// Reads the device's attributes into the `size` bytes at `attr`.
///
/// # Safety
///
/// `input` is null or points to a valid structure; `attr` points to `size`
/// bytes that are the caller's to write.
pub unsafe fn query_device(
    context: Ref<'_, ibv_context>,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> Result {
    // SAFETY: `input`, `attr` and `size` are as the function wants them, by
    // the contract of this one; the response buffer may be null.
    Errno::check(unsafe {
        ibv_cmd_query_device_any(
            context.as_ptr(),
            input,
            attr,
            size,
            ptr::null_mut(),
            ptr::null_mut(),
        )
    })
}

/// Reads the attributes of a port.
pub fn query_port(context: Ref<'_, ibv_context>, port: u8, attr: &mut ibv_port_attr) -> Result {
    let mut cmd = ibv_query_port::default();
    // SAFETY: `cmd` has the size given.
    Errno::check(unsafe {
        ibv_cmd_query_port(context.as_ptr(), port, attr, &mut cmd, size_of_val(&cmd))
    })
}

/// Reads the speed of a port, in units of 100 Mb/s.
#[cfg(has_port_speed)]
pub fn query_port_speed(context: Ref<'_, ibv_context>, port: u32, speed: &mut u64) -> Result {
    // SAFETY: the context is live.
    Errno::check(unsafe { ibv_cmd_query_port_speed(context.as_ptr(), port, speed) })
}

/// Allocates a PD and fills in `pd`.
pub fn alloc_pd(context: Ref<'_, ibv_context>, pd: Ref<'_, ibv_pd>) -> Result {
    let mut cmd = ibv_alloc_pd::default();
    let mut resp = ib_uverbs_alloc_pd_resp::default();
    // SAFETY: the buffers have the sizes given.
    Errno::check(unsafe {
        ibv_cmd_alloc_pd(
            context.as_ptr(),
            pd.as_ptr(),
            &mut cmd,
            size_of_val(&cmd),
            &mut resp,
            size_of_val(&resp),
        )
    })
}

/// Deallocates a PD.
pub fn dealloc_pd(pd: Ref<'_, ibv_pd>) -> Result {
    // SAFETY: `pd` is a live PD.
    Errno::check(unsafe { ibv_cmd_dealloc_pd(pd.as_ptr()) })
}

/// The memory that an MR is to cover, as in ibv_reg_mr_iova2(3) and
/// ibv_reg_dmabuf_mr(3).
#[derive(Clone, Copy)]
pub struct Region {
    /// Address of the first byte in the program, or its offset in the dma-buf.
    pub start: usize,
    /// Bytes.
    pub length: usize,
    /// Address by which work requests name the first byte.
    pub iova: u64,
    /// `IBV_ACCESS_*`
    pub access: c_int,
}

/// Registers memory and fills in `mr`. The kernel pins and checks it: an
/// address that is not the program's ends in EFAULT.
pub fn reg_mr(pd: Ref<'_, ibv_pd>, region: Region, mr: Ref<'_, verbs_mr>) -> Result {
    let mut cmd = ibv_reg_mr::default();
    let mut resp = ib_uverbs_reg_mr_resp::default();
    // SAFETY: the buffers have the sizes given; the region's address is a
    // number to this function, which does not follow it.
    Errno::check(unsafe {
        ibv_cmd_reg_mr(
            pd.as_ptr(),
            ptr::without_provenance_mut(region.start),
            region.length,
            region.iova,
            region.access,
            mr.as_ptr(),
            &mut cmd,
            size_of_val(&cmd),
            &mut resp,
            size_of_val(&resp),
        )
    })
}

/// Registers memory of the dma-buf behind `fd`, where `region.start` is its
/// offset, and fills in `mr`. The kernel checks both.
pub fn reg_dmabuf_mr(
    pd: Ref<'_, ibv_pd>,
    region: Region,
    fd: c_int,
    mr: Ref<'_, verbs_mr>,
) -> Result {
    // SAFETY: both are live; the function fills in the MR, and takes no command
    // of the driver's.
    Errno::check(unsafe {
        ibv_cmd_reg_dmabuf_mr(
            pd.as_ptr(),
            region.start as u64,
            region.length,
            region.iova,
            fd,
            region.access,
            mr.as_ptr(),
            ptr::null_mut(),
        )
    })
}

/// Replaces what `flags` (`IBV_REREG_MR_*`) name of an MR, which stays as it was
/// if that fails.
pub fn rereg_mr(
    mr: Ref<'_, verbs_mr>,
    flags: c_int,
    pd: Option<Ref<'_, ibv_pd>>,
    region: Region,
) -> Result {
    if flags & IBV_REREG_MR_CHANGE_PD as c_int != 0 && pd.is_none() {
        return Err(Errno::EINVAL);
    }
    let mut cmd = ibv_rereg_mr::default();
    let mut resp = ib_uverbs_rereg_mr_resp::default();
    // SAFETY: the buffers have the sizes given; the region's address is a
    // number to this function, which does not follow it; the PD is read only
    // where `flags` ask for another, and is there then.
    Errno::check(unsafe {
        ibv_cmd_rereg_mr(
            mr.as_ptr(),
            flags as u32,
            ptr::without_provenance_mut(region.start),
            region.length,
            region.iova,
            region.access,
            pd.map_or(ptr::null_mut(), |pd| pd.as_ptr()),
            &mut cmd,
            size_of_val(&cmd),
            &mut resp,
            size_of_val(&resp),
        )
    })
}

/// Fills in `mr`, the MR that has a handle in the kernel.
pub fn query_mr(pd: Ref<'_, ibv_pd>, mr: Ref<'_, verbs_mr>, handle: u32) -> Result {
    // SAFETY: both are live; the function fills in the MR.
    Errno::check(unsafe { ibv_cmd_query_mr(pd.as_ptr(), mr.as_ptr(), handle) })
}

/// Deregisters an MR.
pub fn dereg_mr(mr: Ref<'_, verbs_mr>) -> Result {
    // SAFETY: `mr` is a live MR.
    Errno::check(unsafe { ibv_cmd_dereg_mr(mr.as_ptr()) })
}

/// Allocates a memory window and fills in `mw`.
pub fn alloc_mw(pd: Ref<'_, ibv_pd>, mw_type: ibv_mw_type, mw: Ref<'_, ibv_mw>) -> Result {
    let mut cmd = ibv_alloc_mw::default();
    let mut resp = ib_uverbs_alloc_mw_resp::default();
    // SAFETY: the buffers have the sizes given.
    Errno::check(unsafe {
        ibv_cmd_alloc_mw(
            pd.as_ptr(),
            mw_type,
            mw.as_ptr(),
            &mut cmd,
            size_of_val(&cmd),
            &mut resp,
            size_of_val(&resp),
        )
    })
}

/// Deallocates a memory window.
pub fn dealloc_mw(mw: Ref<'_, ibv_mw>) -> Result {
    // SAFETY: `mw` is a live window.
    Errno::check(unsafe { ibv_cmd_dealloc_mw(mw.as_ptr()) })
}

/// Creates an address handle in the kernel and fills in `ah`; answers its
/// address vector, or zeros if the driver keeps it.
pub fn create_ah(
    pd: Ref<'_, ibv_pd>,
    attr: &mut ibv_ah_attr,
    ah: Ref<'_, ibv_ah>,
) -> Result<virtio_rdma_av> {
    let mut resp = Message::<ib_uverbs_create_ah_resp, virtio_rdma_uresp_create_ah>::default();
    // SAFETY: the buffer has the size given, and begins with the core's
    // structure.
    Errno::check(unsafe {
        ibv_cmd_create_ah(pd.as_ptr(), ah.as_ptr(), attr, (&raw mut resp).cast(), resp.len(true))
    })?;
    // SAFETY: an address vector is made of integers.
    Ok(unsafe {
        mem::transmute::<[u8; size_of::<virtio_rdma_av>()], virtio_rdma_av>(resp.driver.av)
    })
}

/// Destroys an address handle.
pub fn destroy_ah(ah: Ref<'_, ibv_ah>) -> Result {
    // SAFETY: `ah` is a live AH.
    Errno::check(unsafe { ibv_cmd_destroy_ah(ah.as_ptr()) })
}

/// Creates a CQ of at least `cqe` entries and fills in `cq`. Its completion
/// events go to `channel`, if there is one. With `ring`, the program has the
/// CQE ring, and `cqe` is its depth.
pub fn create_cq(
    context: Ref<'_, ibv_context>,
    cqe: c_int,
    channel: Option<Ref<'_, ibv_comp_channel>>,
    comp_vector: c_int,
    cq: Ref<'_, ibv_cq>,
    ring: Option<virtio_rdma_ureq_create_cq>,
) -> Result {
    let mut cmd = Message::<ibv_create_cq, virtio_rdma_ureq_create_cq> {
        core: Default::default(),
        driver: ring.unwrap_or_default(),
    };
    let mut resp = ib_uverbs_create_cq_resp::default();
    // SAFETY: the buffers have the sizes given, and `cmd` begins with the
    // core's structure; the channel may be null.
    Errno::check(unsafe {
        ibv_cmd_create_cq(
            context.as_ptr(),
            cqe,
            channel.map_or(ptr::null_mut(), Ref::as_ptr),
            comp_vector,
            cq.as_ptr(),
            (&raw mut cmd).cast(),
            cmd.len(ring.is_some()),
            &mut resp,
            size_of_val(&resp),
        )
    })
}

/// Changes the attributes of a CQ that `attr` names.
pub fn modify_cq(cq: Ref<'_, ibv_cq>, attr: &mut ibv_modify_cq_attr) -> Result {
    let mut cmd = ibv_modify_cq::default();
    // SAFETY: `cmd` has the size given.
    Errno::check(unsafe { ibv_cmd_modify_cq(cq.as_ptr(), attr, &mut cmd, size_of_val(&cmd)) })
}

/// Moves a CQ to another ring of `cqe` entries, and sets `cqe` of `cq`.
pub fn resize_cq(cq: Ref<'_, ibv_cq>, cqe: c_int, ring: virtio_rdma_ureq_create_cq) -> Result {
    let mut cmd = Message::<ibv_resize_cq, virtio_rdma_ureq_create_cq> {
        core: Default::default(),
        driver: ring,
    };
    let mut resp = Message::<ib_uverbs_resize_cq_resp, virtio_rdma_uresp_resize_cq>::default();
    // SAFETY: the buffers have the sizes given, and begin with the core's
    // structures.
    Errno::check(unsafe {
        ibv_cmd_resize_cq(
            cq.as_ptr(),
            cqe,
            (&raw mut cmd).cast(),
            cmd.len(true),
            (&raw mut resp).cast(),
            resp.len(true),
        )
    })
}

/// Takes completions off a CQ; answers how many.
///
/// `entries` may be too long for one command; see [`crate::cq::poll`].
pub fn poll_cq(cq: Ref<'_, ibv_cq>, entries: &mut [MaybeUninit<ibv_wc>]) -> Result<usize> {
    let room = c_int::try_from(entries.len()).map_err(|_| Errno::EINVAL)?;
    // SAFETY: the function writes at most `room` entries.
    let polled = unsafe { ibv_cmd_poll_cq(cq.as_ptr(), room, entries.as_mut_ptr().cast()) };
    usize::try_from(polled).map_err(|_| Errno::last())
}

/// Arms a CQ: one event for the next completion, or the next solicited one.
pub fn req_notify_cq(cq: Ref<'_, ibv_cq>, solicited_only: bool) -> Result {
    // SAFETY: `cq` is a live CQ.
    Errno::check(unsafe { ibv_cmd_req_notify_cq(cq.as_ptr(), solicited_only.into()) })
}

/// Destroys a CQ.
pub fn destroy_cq(cq: Ref<'_, ibv_cq>) -> Result {
    // SAFETY: `cq` is a live CQ, whose mutex ibv_create_cq() made.
    Errno::check(unsafe { ibv_cmd_destroy_cq(cq.as_ptr()) })
}

/// Creates a QP in `pd`, which `attr` names too, fills in `qp`, and writes to
/// `attr.cap` what it really has. With `rings`, the program has its rings.
pub fn create_qp(
    pd: Ref<'_, ibv_pd>,
    attr: &mut ibv_qp_init_attr_ex,
    qp: Ref<'_, verbs_qp>,
    rings: Option<virtio_rdma_ureq_create_qp>,
) -> Result {
    let mut cmd = Message::<ibv_create_qp_ex, virtio_rdma_ureq_create_qp> {
        core: Default::default(),
        driver: rings.unwrap_or_default(),
    };
    let mut resp = ib_uverbs_ex_create_qp_resp::default();
    // SAFETY: the buffers have the sizes given, and `cmd` begins with the
    // core's structure; the CQs that `attr` names are live by the contract of
    // ibv_create_qp(3).
    Errno::check(unsafe {
        ibv_cmd_create_qp_ex2(
            pd.context().context().as_ptr(),
            qp.as_ptr(),
            attr,
            (&raw mut cmd).cast(),
            cmd.len(rings.is_some()),
            &mut resp,
            size_of_val(&resp),
        )
    })
}

/// Creates an XRC target, a QP without rings, and fills in `qp`.
///
/// # Errors
///
/// EINVAL without a domain; the kernel's.
pub fn create_xrc_target(
    context: Ref<'_, ibv_context>,
    attr: &mut ibv_qp_init_attr_ex,
    qp: Ref<'_, verbs_qp>,
) -> Result {
    if attr.comp_mask & IBV_QP_INIT_ATTR_XRCD == 0 || attr.xrcd.is_null() {
        return Err(Errno::EINVAL);
    }
    let mut cmd = ibv_create_qp::default();
    let mut resp = ib_uverbs_create_qp_resp::default();
    // SAFETY: the buffers have the sizes given; the domain is there, and live by
    // the contract of ibv_create_qp_ex(3).
    Errno::check(unsafe {
        ibv_cmd_create_qp_ex(
            context.as_ptr(),
            qp.as_ptr(),
            attr,
            &mut cmd,
            size_of_val(&cmd),
            &mut resp,
            size_of_val(&resp),
        )
    })
}

/// Opens an XRC target that has a number in a domain, and fills in `qp`.
///
/// # Errors
///
/// EINVAL without a domain; the kernel's.
pub fn open_qp(
    context: Ref<'_, ibv_context>,
    attr: &mut ibv_qp_open_attr,
    qp: Ref<'_, verbs_qp>,
) -> Result {
    if attr.comp_mask & IBV_QP_OPEN_ATTR_XRCD == 0 || attr.xrcd.is_null() {
        return Err(Errno::EINVAL);
    }
    let mut cmd = ibv_open_qp::default();
    let mut resp = ib_uverbs_create_qp_resp::default();
    // SAFETY: the buffers have the sizes given, and `qp` has room for all of a
    // `struct verbs_qp`; the domain is there, and live by the contract of
    // ibv_open_qp(3).
    Errno::check(unsafe {
        ibv_cmd_open_qp(
            context.as_ptr(),
            qp.as_ptr(),
            size_of::<verbs_qp>() as c_int,
            attr,
            &mut cmd,
            size_of_val(&cmd),
            &mut resp,
            size_of_val(&resp),
        )
    })
}

/// Opens an extended connection domain and fills in `xrcd`.
pub fn open_xrcd(
    context: Ref<'_, ibv_context>,
    xrcd: Ref<'_, verbs_xrcd>,
    attr: &mut ibv_xrcd_init_attr,
) -> Result {
    let mut cmd = ibv_open_xrcd::default();
    let mut resp = ib_uverbs_open_xrcd_resp::default();
    // SAFETY: the buffers have the sizes given, and `xrcd` has room for all of a
    // `struct verbs_xrcd`.
    Errno::check(unsafe {
        ibv_cmd_open_xrcd(
            context.as_ptr(),
            xrcd.as_ptr(),
            size_of::<verbs_xrcd>() as c_int,
            attr,
            &mut cmd,
            size_of_val(&cmd),
            &mut resp,
            size_of_val(&resp),
        )
    })
}

/// Closes an extended connection domain.
pub fn close_xrcd(xrcd: Ref<'_, verbs_xrcd>) -> Result {
    // SAFETY: `xrcd` is a live domain.
    Errno::check(unsafe { ibv_cmd_close_xrcd(xrcd.as_ptr()) })
}

/// Changes the attributes of a QP that `mask` names (`IBV_QP_*`).
pub fn modify_qp(qp: Ref<'_, ibv_qp>, attr: &mut ibv_qp_attr, mask: c_int) -> Result {
    let mut cmd = ibv_modify_qp::default();
    // SAFETY: `cmd` has the size given.
    Errno::check(unsafe { ibv_cmd_modify_qp(qp.as_ptr(), attr, mask, &mut cmd, size_of_val(&cmd)) })
}

/// Reads the attributes of a QP.
pub fn query_qp(
    qp: Ref<'_, ibv_qp>,
    attr: &mut ibv_qp_attr,
    mask: c_int,
    init: &mut ibv_qp_init_attr,
) -> Result {
    let mut cmd = ibv_query_qp::default();
    // SAFETY: `cmd` has the size given.
    Errno::check(unsafe {
        ibv_cmd_query_qp(qp.as_ptr(), attr, mask, init, &mut cmd, size_of_val(&cmd))
    })
}

/// Attaches a QP to a multicast group.
pub fn attach_mcast(qp: Ref<'_, ibv_qp>, gid: &ibv_gid, lid: u16) -> Result {
    // SAFETY: the QP and the GID are valid.
    Errno::check(unsafe { ibv_cmd_attach_mcast(qp.as_ptr(), gid, lid) })
}

/// Detaches a QP from a multicast group.
pub fn detach_mcast(qp: Ref<'_, ibv_qp>, gid: &ibv_gid, lid: u16) -> Result {
    // SAFETY: the QP and the GID are valid.
    Errno::check(unsafe { ibv_cmd_detach_mcast(qp.as_ptr(), gid, lid) })
}

/// Destroys a QP.
pub fn destroy_qp(qp: Ref<'_, ibv_qp>) -> Result {
    // SAFETY: `qp` is a live QP, whose mutex ibv_cmd_create_qp() made.
    Errno::check(unsafe { ibv_cmd_destroy_qp(qp.as_ptr()) })
}

/// Creates an SRQ, fills in `srq`, and writes to `attr.attr` what it really has.
pub fn create_srq(
    pd: Ref<'_, ibv_pd>,
    attr: &mut ibv_srq_init_attr,
    srq: Ref<'_, ibv_srq>,
    ring: virtio_rdma_ureq_create_srq,
) -> Result {
    let mut cmd = Message::<ibv_create_srq, virtio_rdma_ureq_create_srq> {
        core: Default::default(),
        driver: ring,
    };
    let mut resp = ib_uverbs_create_srq_resp::default();
    // SAFETY: the buffers have the sizes given, and `cmd` begins with the
    // core's structure.
    Errno::check(unsafe {
        ibv_cmd_create_srq(
            pd.as_ptr(),
            srq.as_ptr(),
            attr,
            (&raw mut cmd).cast(),
            cmd.len(true),
            &mut resp,
            size_of_val(&resp),
        )
    })
}

/// Creates an SRQ for XRC, fills in `srq`, and writes to `attr.attr` what it really
/// has.
pub fn create_xrc_srq(
    context: Ref<'_, ibv_context>,
    attr: &mut ibv_srq_init_attr_ex,
    srq: Ref<'_, verbs_srq>,
    ring: virtio_rdma_ureq_create_srq,
) -> Result {
    let mut cmd = Message::<ibv_create_xsrq, virtio_rdma_ureq_create_srq> {
        core: Default::default(),
        driver: ring,
    };
    let mut resp = ib_uverbs_create_srq_resp::default();
    // SAFETY: the buffers have the sizes given, and `cmd` begins with the
    // core's structure; PD, domain and CQ are live by the contract of
    // ibv_create_srq_ex(3).
    Errno::check(unsafe {
        ibv_cmd_create_srq_ex(
            context.as_ptr(),
            srq.as_ptr(),
            attr,
            (&raw mut cmd).cast(),
            cmd.len(true),
            &mut resp,
            size_of_val(&resp),
        )
    })
}

/// Changes the attributes of an SRQ that `mask` names (`IBV_SRQ_*`). With
/// IBV_SRQ_MAX_WR, it moves to `ring`.
pub fn modify_srq(
    srq: Ref<'_, ibv_srq>,
    attr: &mut ibv_srq_attr,
    mask: c_int,
    ring: Option<virtio_rdma_ureq_create_srq>,
) -> Result {
    let mut cmd = Message::<ibv_modify_srq, virtio_rdma_ureq_create_srq> {
        core: Default::default(),
        driver: ring.unwrap_or_default(),
    };
    let len = cmd.len(ring.is_some());
    // SAFETY: `cmd` has the size given, and begins with the core's structure.
    Errno::check(unsafe {
        ibv_cmd_modify_srq(srq.as_ptr(), attr, mask, (&raw mut cmd).cast(), len)
    })
}

/// Reads the attributes of an SRQ.
pub fn query_srq(srq: Ref<'_, ibv_srq>, attr: &mut ibv_srq_attr) -> Result {
    let mut cmd = ibv_query_srq::default();
    // SAFETY: `cmd` has the size given.
    Errno::check(unsafe { ibv_cmd_query_srq(srq.as_ptr(), attr, &mut cmd, size_of_val(&cmd)) })
}

/// Destroys an SRQ.
pub fn destroy_srq(srq: Ref<'_, ibv_srq>) -> Result {
    // SAFETY: `srq` is a live SRQ, whose mutex ibv_cmd_create_srq() made.
    Errno::check(unsafe { ibv_cmd_destroy_srq(srq.as_ptr()) })
}

/// Wakes the QPs that wait for a receive of an SRQ: POST_SRQ_RECV without
/// requests.
pub fn ring_srq_doorbell(srq: Ref<'_, ibv_srq>) -> Result {
    let mut bad_wr = ptr::null_mut();
    // SAFETY: `srq` is a live SRQ, and an empty list is valid.
    Errno::check(unsafe { ibv_cmd_post_srq_recv(srq.as_ptr(), ptr::null_mut(), &mut bad_wr) })
}

/// Wakes the device for the send ring of a QP: POST_SEND without requests.
pub fn ring_send_doorbell(qp: Ref<'_, ibv_qp>) -> Result {
    let mut bad_wr = ptr::null_mut();
    // SAFETY: `qp` is a live QP, and an empty list is valid.
    Errno::check(unsafe { ibv_cmd_post_send(qp.as_ptr(), ptr::null_mut(), &mut bad_wr) })
}

/// Wakes the device for the receive ring of a QP: POST_RECV without requests.
pub fn ring_recv_doorbell(qp: Ref<'_, ibv_qp>) -> Result {
    let mut bad_wr = ptr::null_mut();
    // SAFETY: as above.
    Errno::check(unsafe { ibv_cmd_post_recv(qp.as_ptr(), ptr::null_mut(), &mut bad_wr) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        object::{Owned, Zeroable},
        uverbs::{
            FIRST_HANDLE, Kernel,
            Name::{Method, Write},
            Opened, description,
        },
    };
    use core::mem::offset_of;

    /// A context, and an object of each kind that the kernel knows by a handle of its own.
    struct Bench {
        mr: Owned<verbs_mr>,
        mw: Owned<ibv_mw>,
        ah: Owned<ibv_ah>,
        xrcd: Owned<verbs_xrcd>,
        cq: Owned<verbs_cq>,
        qp: Owned<verbs_qp>,
        srq: Owned<verbs_srq>,
        pd: Owned<ibv_pd>,
        opened: Opened,
        kernel: Kernel,
    }

    const PD: u32 = 11;
    const MR: u32 = 12;
    const MW: u32 = 13;
    const AH: u32 = 14;
    const XRCD: u32 = 15;
    const CQ: u32 = 16;
    const QP: u32 = 17;
    const SRQ: u32 = 18;

    /// A new object.
    fn object<T: Zeroable>() -> Owned<T> {
        Owned::zeroed().unwrap()
    }

    impl Bench {
        fn new() -> Self {
            let kernel = Kernel::new();
            let opened = Opened::with_rings(&kernel);
            let (pd, mw, ah) = (object::<ibv_pd>(), object::<ibv_mw>(), object::<ibv_ah>());
            let (mr, xrcd) = (object::<verbs_mr>(), object::<verbs_xrcd>());
            let (cq, qp, srq) = (object::<verbs_cq>(), object::<verbs_qp>(), object::<verbs_srq>());
            let context = opened.verbs();
            // SAFETY: all are live, and nobody else uses them.
            unsafe {
                (*pd.as_ref().as_ptr()).context = context;
                (*pd.as_ref().as_ptr()).handle = PD;
                (*mr.as_ref().as_ptr()).ibv_mr.context = context;
                (*mr.as_ref().as_ptr()).ibv_mr.handle = MR;
                (*mw.as_ref().as_ptr()).context = context;
                (*mw.as_ref().as_ptr()).handle = MW;
                (*ah.as_ref().as_ptr()).context = context;
                (*ah.as_ref().as_ptr()).handle = AH;
                (*xrcd.as_ref().as_ptr()).xrcd.context = context;
                (*xrcd.as_ref().as_ptr()).handle = XRCD;
                (*cq.as_ref().cq().as_ptr()).context = context;
                (*cq.as_ref().cq().as_ptr()).handle = CQ;
                (*qp.as_ref().qp().as_ptr()).context = context;
                (*qp.as_ref().qp().as_ptr()).handle = QP;
                (*srq.as_ref().srq().as_ptr()).context = context;
                (*srq.as_ref().srq().as_ptr()).handle = SRQ;
            }
            Self { mr, mw, ah, xrcd, cq, qp, srq, pd, opened, kernel }
        }

        fn context(&self) -> Ref<'_, ibv_context> {
            self.opened.context()
        }

        fn verbs_context(&self) -> Ref<'_, verbs_context> {
            // SAFETY: the context is live.
            unsafe { Ref::new(self.opened.verbs_context) }
        }

        fn cq(&self) -> Ref<'_, ibv_cq> {
            self.cq.as_ref().cq()
        }

        fn qp(&self) -> Ref<'_, ibv_qp> {
            self.qp.as_ref().qp()
        }

        fn srq(&self) -> Ref<'_, ibv_srq> {
            self.srq.as_ref().srq()
        }

        /// Attributes of a QP that name objects of the bench.
        fn init(&self, qp_type: ibv_qp_type) -> ibv_qp_init_attr_ex {
            let cap = ibv_qp_cap {
                max_send_wr: 1,
                max_recv_wr: 2,
                max_send_sge: 3,
                max_recv_sge: 4,
                max_inline_data: 5,
            };
            ibv_qp_init_attr_ex {
                qp_type,
                cap,
                comp_mask: IBV_QP_INIT_ATTR_PD,
                pd: self.pd.as_ref().as_ptr(),
                send_cq: self.cq().as_ptr(),
                recv_cq: self.cq().as_ptr(),
                srq: self.srq().as_ptr(),
                ..Default::default()
            }
        }

        /// The same for an SRQ.
        fn srq_init(&self) -> ibv_srq_init_attr_ex {
            ibv_srq_init_attr_ex {
                attr: ibv_srq_attr { max_wr: 31, max_sge: 32, srq_limit: 0 },
                comp_mask: IBV_SRQ_INIT_ATTR_TYPE
                    | IBV_SRQ_INIT_ATTR_PD
                    | IBV_SRQ_INIT_ATTR_XRCD
                    | IBV_SRQ_INIT_ATTR_CQ,
                srq_type: IBV_SRQT_XRC,
                pd: self.pd.as_ref().as_ptr(),
                xrcd: self.xrcd(),
                cq: self.cq().as_ptr(),
                ..Default::default()
            }
        }

        fn xrcd(&self) -> *mut ibv_xrcd {
            self.xrcd.as_ref().as_ptr().cast()
        }
    }

    const REGION: Region = Region { start: 0x1000, length: 0x2000, iova: 0x3000, access: 5 };
    const CQ_RING: virtio_rdma_ureq_create_cq =
        virtio_rdma_ureq_create_cq { buf_addr: 0x1111_2222_3333_4444, buf_len: 0x5555 };
    const QP_RINGS: virtio_rdma_ureq_create_qp = virtio_rdma_ureq_create_qp {
        buf_addr: 0x1111_2222_3333_4444,
        buf_len: 0x5555,
        sq_depth: 6,
        sq_stride: 7,
        sq_offset: 8,
        rq_depth: 9,
        rq_stride: 10,
        rq_offset: 11,
    };
    const SRQ_RING: virtio_rdma_ureq_create_srq = virtio_rdma_ureq_create_srq {
        buf_addr: 0x1111_2222_3333_4444,
        buf_len: 0x5555,
        depth: 6,
        stride: 7,
        offset: 8,
        reserved_1c: 0,
    };

    /// All bytes of a structure that has no padding.
    fn bytes<T>(value: &T) -> &[u8] {
        // SAFETY: they are there.
        unsafe { core::slice::from_raw_parts(ptr::from_ref(value).cast(), size_of::<T>()) }
    }

    /// What the driver says of a context is taken as it is, and the program has no part of its
    /// own in the command.
    #[test]
    fn a_context_is_what_the_driver_says() {
        let said = virtio_rdma_uresp_alloc_ucontext {
            max_inline_data: 512,
            features: 0x1234_5678_9abc_def0,
            ..description(VIRTIO_RDMA_UDATA_PATH_RINGS)
        };
        let bench = Bench::new();
        bench.kernel.answer(UVERBS_ATTR_UHW_OUT, said);
        bench.kernel.answer(UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS, 3u32);
        let got = get_context(bench.verbs_context()).unwrap();
        assert_eq!(bytes(&got), bytes(&said));
        let command = bench.kernel.take().remove(0);
        assert_eq!(command.name, Method(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_GET_CONTEXT));
        assert_eq!(command.room[&UVERBS_ATTR_UHW_OUT], size_of_val(&said));
        assert!(command.input.is_empty());
        // SAFETY: the context is live.
        assert_eq!(unsafe { (*bench.opened.verbs()).num_comp_vectors }, 3);

        bench.kernel.answer(VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP, said);
        bench.kernel.answer(UVERBS_ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS, 4u32);
        let got = query_context(bench.verbs_context()).unwrap();
        assert_eq!(bytes(&got), bytes(&said));
        let command = bench.kernel.take().remove(0);
        assert_eq!(command.name, Method(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_CONTEXT));
        assert_eq!(command.room[&VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP], size_of_val(&said));
        // A kernel that does not know the attribute refuses, and does not leave it zero.
        assert!(command.mandatory.contains(&VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP));
        assert!(command.input.is_empty() && command.is_without_driver());
        // SAFETY: as above.
        assert_eq!(unsafe { (*bench.opened.verbs()).num_comp_vectors }, 4);
    }

    /// A driver that is older says less; what it does not say is zero.
    #[test]
    fn a_shorter_answer_of_an_older_driver() {
        let bench = Bench::new();
        bench.kernel.answer(UVERBS_ATTR_UHW_OUT, VIRTIO_RDMA_UDATA_PATH_RINGS);
        let got = get_context(bench.verbs_context()).unwrap();
        assert_eq!(bytes(&got), bytes(&description(VIRTIO_RDMA_UDATA_PATH_RINGS)));
    }

    #[test]
    fn pds() {
        let bench = Bench::new();
        let pd = object::<ibv_pd>();
        assert_eq!(alloc_pd(bench.context(), pd.as_ref()), Ok(()));
        let command = bench.kernel.one();
        assert_eq!(command.name, Write(IB_USER_VERBS_CMD_ALLOC_PD));
        assert!(command.is_without_driver());
        let at = pd.as_ref().as_ptr();
        // SAFETY: the PD is live.
        let (handle, context) = unsafe { ((*at).handle, (*at).context) };
        assert_eq!((handle, context), (FIRST_HANDLE, bench.opened.verbs()));
        assert_eq!(dealloc_pd(bench.pd.as_ref()), Ok(()));
        let command = bench.kernel.one();
        assert_eq!(command.name, Method(UVERBS_OBJECT_PD, UVERBS_METHOD_PD_DESTROY));
        assert_eq!(command.handle(UVERBS_ATTR_DESTROY_PD_HANDLE), PD.into());
    }

    #[test]
    fn mrs() {
        let bench = Bench::new();
        let (mr, pd) = (bench.mr.as_ref(), bench.pd.as_ref());
        // SAFETY: the MR is live, here and below.
        let handle = || unsafe { (*mr.as_ptr()).ibv_mr.handle };
        // SAFETY: see above.
        let keys = || unsafe { ((*mr.as_ptr()).ibv_mr.lkey, (*mr.as_ptr()).ibv_mr.rkey) };
        bench.kernel.answer(UVERBS_ATTR_CORE_OUT, [77u32, 78, 79]);
        assert_eq!(reg_mr(pd, REGION, mr), Ok(()));
        let command = bench.kernel.one();
        assert_eq!(command.name, Write(IB_USER_VERBS_CMD_REG_MR));
        assert!(command.is_without_driver());
        let core: ib_uverbs_reg_mr = command.core();
        assert_eq!((core.start, core.length, core.hca_va), (0x1000, 0x2000, 0x3000));
        assert_eq!((core.pd_handle, core.access_flags), (PD, 5));
        assert_eq!((handle(), keys()), (77, (78, 79)));

        bench.kernel.answer(UVERBS_ATTR_REG_DMABUF_MR_RESP_LKEY, 5u32);
        bench.kernel.answer(UVERBS_ATTR_REG_DMABUF_MR_RESP_RKEY, 6u32);
        assert_eq!(reg_dmabuf_mr(pd, REGION, 9, mr), Ok(()));
        let command = bench.kernel.one();
        assert_eq!(command.name, Method(UVERBS_OBJECT_MR, UVERBS_METHOD_REG_DMABUF_MR));
        assert_eq!(command.input::<u64>(UVERBS_ATTR_REG_DMABUF_MR_OFFSET), 0x1000);
        assert_eq!(command.input::<u64>(UVERBS_ATTR_REG_DMABUF_MR_LENGTH), 0x2000);
        assert_eq!(command.input::<u64>(UVERBS_ATTR_REG_DMABUF_MR_IOVA), 0x3000);
        assert_eq!(command.input::<u32>(UVERBS_ATTR_REG_DMABUF_MR_FD), 9);
        assert_eq!(command.input::<u32>(UVERBS_ATTR_REG_DMABUF_MR_ACCESS_FLAGS), 5);
        assert_eq!(command.handle(UVERBS_ATTR_REG_DMABUF_MR_PD_HANDLE), PD.into());
        assert!(command.is_without_driver());
        assert_eq!((handle(), keys()), (FIRST_HANDLE, (5, 6)));

        bench.kernel.answer(UVERBS_ATTR_CORE_OUT, [7u32, 8]);
        let flags = IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_TRANSLATION;
        assert_eq!(rereg_mr(mr, flags as c_int, Some(pd), REGION), Ok(()));
        let command = bench.kernel.one();
        assert_eq!(command.name, Write(IB_USER_VERBS_CMD_REREG_MR));
        let core: ib_uverbs_rereg_mr = command.core();
        assert_eq!((core.mr_handle, core.flags, core.pd_handle), (FIRST_HANDLE, flags, PD));
        assert_eq!((core.start, core.length, core.hca_va), (0x1000, 0x2000, 0x3000));
        assert_eq!((core.access_flags, keys()), (5, (7, 8)));

        bench.kernel.answer(UVERBS_ATTR_QUERY_MR_RESP_LKEY, 9u32);
        bench.kernel.answer(UVERBS_ATTR_QUERY_MR_RESP_RKEY, 10u32);
        assert_eq!(query_mr(pd, mr, 55), Ok(()));
        let command = bench.kernel.one();
        assert_eq!(command.name, Method(UVERBS_OBJECT_MR, UVERBS_METHOD_QUERY_MR));
        assert_eq!(command.handle(UVERBS_ATTR_QUERY_MR_HANDLE), 55);
        assert_eq!((handle(), keys()), (55, (9, 10)));

        assert_eq!(dereg_mr(mr), Ok(()));
        let command = bench.kernel.one();
        assert_eq!(command.name, Method(UVERBS_OBJECT_MR, UVERBS_METHOD_MR_DESTROY));
        assert_eq!(command.handle(UVERBS_ATTR_DESTROY_MR_HANDLE), 55);
    }

    /// The kernel is asked for another PD only where the flags say so, and never without one.
    #[test]
    fn an_mr_changes_its_pd_only_to_one_that_is_there() {
        let bench = Bench::new();
        let (mr, change) = (bench.mr.as_ref(), IBV_REREG_MR_CHANGE_PD as c_int);
        assert_eq!(rereg_mr(mr, change, None, REGION), Err(Errno::EINVAL));
        assert_eq!(bench.kernel.take().len(), 0);
        let access = IBV_REREG_MR_CHANGE_ACCESS as c_int;
        for pd in [None, Some(bench.pd.as_ref())] {
            assert_eq!(rereg_mr(mr, access, pd, REGION), Ok(()));
            assert_eq!(bench.kernel.one().core::<ib_uverbs_rereg_mr>().pd_handle, 0);
        }
    }

    #[test]
    fn windows() {
        let bench = Bench::new();
        let mw = bench.mw.as_ref();
        for mw_type in [IBV_MW_TYPE_1, IBV_MW_TYPE_2] {
            bench.kernel.answer(UVERBS_ATTR_CORE_OUT, [21u32, 22]);
            assert_eq!(alloc_mw(bench.pd.as_ref(), mw_type, mw), Ok(()));
            let command = bench.kernel.one();
            assert_eq!(command.name, Write(IB_USER_VERBS_CMD_ALLOC_MW));
            let core: ib_uverbs_alloc_mw = command.core();
            assert_eq!((core.pd_handle, u32::from(core.mw_type)), (PD, mw_type));
            // SAFETY: the window is live.
            let handle = unsafe { (*mw.as_ptr()).handle };
            assert_eq!((handle, mw.rkey()), (21, 22));
        }
        assert_eq!(dealloc_mw(mw), Ok(()));
        let command = bench.kernel.one();
        assert_eq!(command.name, Method(UVERBS_OBJECT_MW, UVERBS_METHOD_MW_DESTROY));
        assert_eq!(command.handle(UVERBS_ATTR_DESTROY_MW_HANDLE), 21);
    }

    /// The address vector of an AH is what the driver answers, byte by byte.
    #[test]
    fn ahs() {
        let bench = Bench::new();
        let av: [u8; size_of::<virtio_rdma_av>()] = core::array::from_fn(|i| i as u8 + 1);
        let mut attr = ibv_ah_attr { dlid: 3, sl: 4, port_num: 1, ..Default::default() };
        bench
            .kernel
            .answer(UVERBS_ATTR_UHW_OUT, virtio_rdma_uresp_create_ah { av, ..Default::default() });
        let got = create_ah(bench.pd.as_ref(), &mut attr, bench.ah.as_ref()).unwrap();
        assert_eq!(bytes(&got), av);
        let command = bench.kernel.one();
        assert_eq!(command.name, Write(IB_USER_VERBS_CMD_CREATE_AH));
        assert_eq!(command.room[&UVERBS_ATTR_UHW_OUT], size_of::<virtio_rdma_uresp_create_ah>());
        assert!(!command.input.contains_key(&UVERBS_ATTR_UHW_IN));
        // A driver that keeps the vector answers nothing.
        let got = create_ah(bench.pd.as_ref(), &mut attr, bench.ah.as_ref()).unwrap();
        assert_eq!(bytes(&got), [0; size_of::<virtio_rdma_av>()]);
        assert_eq!(bench.kernel.take().len(), 1);
        assert_eq!(destroy_ah(bench.ah.as_ref()), Ok(()));
        let command = bench.kernel.one();
        assert_eq!(command.name, Method(UVERBS_OBJECT_AH, UVERBS_METHOD_AH_DESTROY));
        assert_eq!(command.handle(UVERBS_ATTR_DESTROY_AH_HANDLE), u64::from(FIRST_HANDLE) + 1);
    }

    /// With a ring the driver hears where it is, and without one nothing.
    #[test]
    fn cqs() {
        let bench = Bench::new();
        let mut channel = ibv_comp_channel { context: bench.opened.verbs(), fd: 33, refcnt: 0 };
        for ring in [None, Some(CQ_RING)] {
            for with_channel in [false, true] {
                // SAFETY: the channel is live.
                let channel = with_channel.then(|| unsafe { Ref::new(&raw mut channel) });
                let cq = object::<verbs_cq>();
                assert_eq!(
                    create_cq(bench.context(), 64, channel, 2, cq.as_ref().cq(), ring),
                    Ok(())
                );
                let command = bench.kernel.one();
                assert_eq!(command.name, Method(UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_CREATE));
                assert_eq!(command.input::<u32>(UVERBS_ATTR_CREATE_CQ_CQE), 64);
                assert_eq!(command.input::<u32>(UVERBS_ATTR_CREATE_CQ_COMP_VECTOR), 2);
                let fd = command.input.get(&UVERBS_ATTR_CREATE_CQ_COMP_CHANNEL);
                assert_eq!(fd.map(|fd| fd[0]), with_channel.then_some(33));
                let driver = command.input.get(&UVERBS_ATTR_UHW_IN).map(Vec::as_slice);
                assert_eq!(driver, ring.as_ref().map(bytes));
                assert!(!command.room.contains_key(&UVERBS_ATTR_UHW_OUT));
                // SAFETY: the CQ is live.
                assert_eq!(unsafe { (*cq.as_ref().cq().as_ptr()).cqe }, 64);
            }
        }
    }

    /// A CQ has as many CQEs as the kernel says when it moved.
    #[test]
    fn a_cq_moves() {
        let bench = Bench::new();
        bench.kernel.answer(UVERBS_ATTR_CORE_OUT, 256u32);
        assert_eq!(resize_cq(bench.cq(), 128, CQ_RING), Ok(()));
        let command = bench.kernel.one();
        assert_eq!(command.name, Write(IB_USER_VERBS_CMD_RESIZE_CQ));
        let core: ib_uverbs_resize_cq = command.core();
        assert_eq!((core.cq_handle, core.cqe), (CQ, 128));
        assert_eq!(command.input[&UVERBS_ATTR_UHW_IN], bytes(&CQ_RING));
        assert_eq!(command.room[&UVERBS_ATTR_UHW_OUT], size_of::<virtio_rdma_uresp_resize_cq>());
        // SAFETY: the CQ is live.
        assert_eq!(unsafe { (*bench.cq().as_ptr()).cqe }, 256);
    }

    /// As the kernel has completions, three of which it answers.
    #[repr(C)]
    struct Completions {
        count: u32,
        reserved: u32,
        wc: [ib_uverbs_wc; 3],
    }

    /// The completions of the kernel reach the program, field by field, and no entry behind them
    /// is written.
    #[test]
    fn the_kernel_polls() {
        let bench = Bench::new();
        let wc = |n: u32| ib_uverbs_wc {
            wr_id: n.into(),
            status: n + 1,
            opcode: n + 2,
            vendor_err: n + 3,
            byte_len: n + 4,
            ex: ib_uverbs_wc__bindgen_ty_1 { imm_data: n + 5 },
            qp_num: n + 6,
            src_qp: n + 7,
            wc_flags: n + 8,
            pkey_index: n as u16 + 9,
            slid: n as u16 + 10,
            sl: n as u8 + 11,
            dlid_path_bits: n as u8 + 12,
            ..Default::default()
        };
        let answer = Completions { count: 2, reserved: 0, wc: [wc(20), wc(40), wc(60)] };
        bench.kernel.answer(UVERBS_ATTR_CORE_OUT, answer);
        let mut entries = [const { MaybeUninit::zeroed() }; 5];
        assert_eq!(poll_cq(bench.cq(), &mut entries), Ok(2));
        let command = bench.kernel.one();
        assert_eq!(command.name, Write(IB_USER_VERBS_CMD_POLL_CQ));
        let core: ib_uverbs_poll_cq = command.core();
        assert_eq!((core.cq_handle, core.ne), (CQ, 5));
        let room = size_of::<ib_uverbs_poll_cq_resp>() + 5 * size_of::<ib_uverbs_wc>();
        assert_eq!(command.room[&UVERBS_ATTR_CORE_OUT], room);
        for (entry, n) in entries.iter().zip([20u32, 40]) {
            // SAFETY: zero or written.
            let wc: &ibv_wc = unsafe { entry.assume_init_ref() };
            assert_eq!((wc.wr_id, wc.status, wc.opcode), (n.into(), n + 1, n + 2));
            assert_eq!((wc.vendor_err, wc.byte_len), (n + 3, n + 4));
            assert_eq!((crate::model::ex(wc), wc.qp_num, wc.src_qp), (n + 5, n + 6, n + 7));
            assert_eq!((wc.wc_flags, u32::from(wc.pkey_index)), (n + 8, n + 9));
            assert_eq!((u32::from(wc.slid), u32::from(wc.sl)), (n + 10, n + 11));
            assert_eq!(u32::from(wc.dlid_path_bits), n + 12);
        }
        for entry in &entries[2..] {
            // SAFETY: as above.
            assert_eq!(unsafe { entry.assume_init_ref() }.wr_id, 0);
        }
        for errno in [EIO, ENOMEM, EINTR] {
            bench.kernel.fail(errno);
            let error = poll_cq(bench.cq(), &mut entries).unwrap_err();
            assert_eq!(error.get(), errno as c_int);
        }
    }

    #[test]
    fn arming_and_moderation() {
        let bench = Bench::new();
        for solicited_only in [false, true] {
            assert_eq!(req_notify_cq(bench.cq(), solicited_only), Ok(()));
            let command = bench.kernel.one();
            assert_eq!(command.name, Write(IB_USER_VERBS_CMD_REQ_NOTIFY_CQ));
            let core: ib_uverbs_req_notify_cq = command.core();
            assert_eq!((core.cq_handle, core.solicited_only), (CQ, solicited_only.into()));
        }
        let moderate = ibv_moderate_cq { cq_count: 8, cq_period: 9 };
        let mut attr = ibv_modify_cq_attr { attr_mask: IBV_CQ_ATTR_MODERATE, moderate };
        assert_eq!(modify_cq(bench.cq(), &mut attr), Ok(()));
        let command = bench.kernel.one();
        let extended = IB_USER_VERBS_EX_CMD_MODIFY_CQ | EXTENDED;
        assert_eq!(command.name, Write(extended));
        let core: ib_uverbs_ex_modify_cq = command.core();
        assert_eq!((core.cq_handle, core.attr_mask), (CQ, IBV_CQ_ATTR_MODERATE));
        assert_eq!((core.attr.cq_count, core.attr.cq_period), (8, 9));
    }

    /// IB_USER_VERBS_CMD_FLAG_EXTENDED.
    const EXTENDED: u32 = 0x8000_0000;

    /// A QP has the number and the caps that the kernel answers; with rings the driver hears
    /// where they are, and without them nothing.
    #[test]
    fn qps() {
        let bench = Bench::new();
        for rings in [None, Some(QP_RINGS)] {
            let mut attr = bench.init(IBV_QPT_RC);
            let qp = object::<verbs_qp>();
            bench.kernel.answer(UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, 99u32);
            bench.kernel.answer(UVERBS_ATTR_CREATE_QP_RESP_CAP, [10u32, 20, 30, 40, 50]);
            assert_eq!(create_qp(bench.pd.as_ref(), &mut attr, qp.as_ref(), rings), Ok(()));
            let command = bench.kernel.one();
            assert_eq!(command.name, Method(UVERBS_OBJECT_QP, UVERBS_METHOD_QP_CREATE));
            let driver = command.input.get(&UVERBS_ATTR_UHW_IN).map(Vec::as_slice);
            assert_eq!(driver, rings.as_ref().map(bytes));
            assert!(!command.room.contains_key(&UVERBS_ATTR_UHW_OUT));
            for (attr, handle) in [
                (UVERBS_ATTR_CREATE_QP_PD_HANDLE, PD),
                (UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE, CQ),
                (UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE, CQ),
                (UVERBS_ATTR_CREATE_QP_SRQ_HANDLE, SRQ),
            ] {
                assert_eq!(command.handle(attr), handle.into());
            }
            assert_eq!(command.input::<[u32; 5]>(UVERBS_ATTR_CREATE_QP_CAP), [1, 2, 3, 4, 5]);
            assert_eq!(qp.as_ref().qp().number(), 99);
            let cap = attr.cap;
            assert_eq!((cap.max_send_wr, cap.max_recv_wr, cap.max_send_sge), (10, 20, 30));
            assert_eq!((cap.max_recv_sge, cap.max_inline_data), (40, 50));
        }
    }

    /// An XRC target is created in a domain and nowhere else, and the driver hears of no rings.
    #[test]
    fn xrc_targets() {
        let bench = Bench::new();
        let (context, qp) = (bench.context(), object::<verbs_qp>());
        let mut attr = bench.init(IBV_QPT_XRC_RECV);
        attr.xrcd = bench.xrcd();
        assert_eq!(create_xrc_target(context, &mut attr, qp.as_ref()), Err(Errno::EINVAL));
        attr.comp_mask = IBV_QP_INIT_ATTR_XRCD;
        attr.xrcd = ptr::null_mut();
        assert_eq!(create_xrc_target(context, &mut attr, qp.as_ref()), Err(Errno::EINVAL));
        assert_eq!(bench.kernel.take().len(), 0);
        attr.xrcd = bench.xrcd();
        bench.kernel.answer(UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, 98u32);
        assert_eq!(create_xrc_target(context, &mut attr, qp.as_ref()), Ok(()));
        let command = bench.kernel.one();
        assert_eq!(command.name, Method(UVERBS_OBJECT_QP, UVERBS_METHOD_QP_CREATE));
        assert_eq!(command.handle(UVERBS_ATTR_CREATE_QP_XRCD_HANDLE), XRCD.into());
        assert!(command.is_without_driver());
        assert_eq!(qp.as_ref().qp().number(), 98);

        let mut attr = ibv_qp_open_attr {
            comp_mask: IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_TYPE,
            qp_num: 97,
            xrcd: bench.xrcd(),
            qp_type: IBV_QPT_XRC_RECV,
            ..Default::default()
        };
        assert_eq!(open_qp(context, &mut attr, qp.as_ref()), Err(Errno::EINVAL));
        attr.comp_mask |= IBV_QP_OPEN_ATTR_XRCD;
        attr.xrcd = ptr::null_mut();
        assert_eq!(open_qp(context, &mut attr, qp.as_ref()), Err(Errno::EINVAL));
        assert_eq!(bench.kernel.take().len(), 0);
        attr.xrcd = bench.xrcd();
        assert_eq!(open_qp(context, &mut attr, qp.as_ref()), Ok(()));
        let command = bench.kernel.one();
        assert_eq!(command.name, Write(IB_USER_VERBS_CMD_OPEN_QP));
        let core: ib_uverbs_open_qp = command.core();
        assert_eq!((core.pd_handle, core.qpn), (XRCD, 97));
        assert_eq!(u32::from(core.qp_type), IBV_QPT_XRC_RECV);
    }

    #[test]
    fn xrc_domains() {
        let bench = Bench::new();
        let xrcd = object::<verbs_xrcd>();
        let mut attr = ibv_xrcd_init_attr {
            comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
            fd: 9,
            oflags: 10,
        };
        assert_eq!(open_xrcd(bench.context(), xrcd.as_ref(), &mut attr), Ok(()));
        let command = bench.kernel.one();
        assert_eq!(command.name, Write(IB_USER_VERBS_CMD_OPEN_XRCD));
        let core: ib_uverbs_open_xrcd = command.core();
        assert_eq!((core.fd, core.oflags), (9, 10));
        assert_eq!(close_xrcd(xrcd.as_ref()), Ok(()));
        let command = bench.kernel.one();
        assert_eq!(command.name, Method(UVERBS_OBJECT_XRCD, UVERBS_METHOD_XRCD_DESTROY));
        assert_eq!(command.handle(UVERBS_ATTR_DESTROY_XRCD_HANDLE), FIRST_HANDLE.into());
    }

    #[test]
    fn what_a_qp_is_modified_to_and_says() {
        let bench = Bench::new();
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            pkey_index: 3,
            port_num: 1,
            qp_access_flags: 7,
            ..Default::default()
        };
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        assert_eq!(modify_qp(bench.qp(), &mut attr, mask as c_int), Ok(()));
        let command = bench.kernel.one();
        assert_eq!(command.name, Write(IB_USER_VERBS_CMD_MODIFY_QP));
        assert!(command.is_without_driver());
        let core: ib_uverbs_modify_qp = command.core();
        assert_eq!((core.qp_handle, core.attr_mask), (QP, mask));
        assert_eq!((u32::from(core.qp_state), core.pkey_index), (IBV_QPS_INIT, 3));
        assert_eq!((core.port_num, core.qp_access_flags), (1, 7));

        let mut init = ibv_qp_init_attr::default();
        bench.kernel.answer(
            UVERBS_ATTR_CORE_OUT,
            ib_uverbs_query_qp_resp {
                qp_state: IBV_QPS_RTS as u8,
                dest_qp_num: 44,
                max_send_wr: 45,
                ..Default::default()
            },
        );
        assert_eq!(query_qp(bench.qp(), &mut attr, mask as c_int, &mut init), Ok(()));
        let command = bench.kernel.one();
        assert_eq!(command.name, Write(IB_USER_VERBS_CMD_QUERY_QP));
        let core: ib_uverbs_query_qp = command.core();
        assert_eq!((core.qp_handle, core.attr_mask), (QP, mask));
        assert_eq!((attr.qp_state, attr.dest_qp_num, attr.cap.max_send_wr), (IBV_QPS_RTS, 44, 45));
        assert_eq!(init.cap.max_send_wr, 45);
    }

    #[test]
    fn multicast_groups() {
        type Verb = fn(Ref<'_, ibv_qp>, &ibv_gid, u16) -> Result;
        let bench = Bench::new();
        let gid = ibv_gid { raw: core::array::from_fn(|i| i as u8) };
        for (verb, number) in [
            (attach_mcast as Verb, IB_USER_VERBS_CMD_ATTACH_MCAST),
            (detach_mcast as Verb, IB_USER_VERBS_CMD_DETACH_MCAST),
        ] {
            assert_eq!(verb(bench.qp(), &gid, 0xc123), Ok(()));
            let command = bench.kernel.one();
            assert_eq!(command.name, Write(number));
            // Both commands have this structure.
            let core: ib_uverbs_attach_mcast = command.core();
            assert_eq!((core.qp_handle, core.mlid), (QP, 0xc123));
            assert_eq!(core.gid, core::array::from_fn(|i| i as u8));
        }
    }

    /// An SRQ has what the kernel answers; the driver hears of its ring.
    #[test]
    fn srqs() {
        let bench = Bench::new();
        let srq = object::<verbs_srq>();
        let mut attr = ibv_srq_init_attr {
            attr: ibv_srq_attr { max_wr: 31, max_sge: 32, srq_limit: 0 },
            ..Default::default()
        };
        bench.kernel.answer(UVERBS_ATTR_CREATE_SRQ_RESP_MAX_WR, 64u32);
        bench.kernel.answer(UVERBS_ATTR_CREATE_SRQ_RESP_MAX_SGE, 33u32);
        assert_eq!(create_srq(bench.pd.as_ref(), &mut attr, srq.as_ref().srq(), SRQ_RING), Ok(()));
        let command = bench.kernel.one();
        assert_eq!(command.name, Method(UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_CREATE));
        assert_eq!(command.handle(UVERBS_ATTR_CREATE_SRQ_PD_HANDLE), PD.into());
        assert_eq!(command.input::<u32>(UVERBS_ATTR_CREATE_SRQ_MAX_WR), 31);
        assert_eq!(command.input::<u32>(UVERBS_ATTR_CREATE_SRQ_MAX_SGE), 32);
        assert_eq!(command.input[&UVERBS_ATTR_UHW_IN], bytes(&SRQ_RING));
        assert_eq!((attr.attr.max_wr, attr.attr.max_sge), (64, 33));

        let mut attr = bench.srq_init();
        bench.kernel.answer(UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM, 77u32);
        assert_eq!(create_xrc_srq(bench.context(), &mut attr, srq.as_ref(), SRQ_RING), Ok(()));
        let command = bench.kernel.one();
        assert_eq!(command.name, Method(UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_CREATE));
        assert_eq!(command.handle(UVERBS_ATTR_CREATE_SRQ_XRCD_HANDLE), XRCD.into());
        assert_eq!(command.handle(UVERBS_ATTR_CREATE_SRQ_CQ_HANDLE), CQ.into());
        assert_eq!(command.input[&UVERBS_ATTR_UHW_IN], bytes(&SRQ_RING));
        assert_eq!(srq.as_ref().xrc_number(), Some(77));
    }

    /// The driver hears of a ring only if the SRQ moves to one.
    #[test]
    fn what_an_srq_is_modified_to_and_says() {
        let bench = Bench::new();
        let mut attr = ibv_srq_attr { max_wr: 41, max_sge: 0, srq_limit: 42 };
        for ring in [None, Some(SRQ_RING)] {
            let mask = IBV_SRQ_LIMIT as c_int;
            assert_eq!(modify_srq(bench.srq(), &mut attr, mask, ring), Ok(()));
            let command = bench.kernel.one();
            assert_eq!(command.name, Write(IB_USER_VERBS_CMD_MODIFY_SRQ));
            let driver = command.input.get(&UVERBS_ATTR_UHW_IN).map(Vec::as_slice);
            assert_eq!(driver, ring.as_ref().map(bytes));
            let core: ib_uverbs_modify_srq = command.core();
            assert_eq!((core.srq_handle, core.attr_mask), (SRQ, IBV_SRQ_LIMIT));
            assert_eq!((core.max_wr, core.srq_limit), (41, 42));
        }
        bench.kernel.answer(UVERBS_ATTR_CORE_OUT, [51u32, 52, 53, 0]);
        assert_eq!(query_srq(bench.srq(), &mut attr), Ok(()));
        let command = bench.kernel.one();
        assert_eq!(command.name, Write(IB_USER_VERBS_CMD_QUERY_SRQ));
        assert_eq!(command.core::<ib_uverbs_query_srq>().srq_handle, SRQ);
        assert_eq!((attr.max_wr, attr.max_sge, attr.srq_limit), (51, 52, 53));
    }

    /// A doorbell is the command that posts, with nothing to post.
    #[test]
    fn doorbells() {
        let bench = Bench::new();
        assert_eq!(ring_send_doorbell(bench.qp()), Ok(()));
        assert_eq!(ring_recv_doorbell(bench.qp()), Ok(()));
        assert_eq!(ring_srq_doorbell(bench.srq()), Ok(()));
        let expected = [
            (IB_USER_VERBS_CMD_POST_SEND, QP),
            (IB_USER_VERBS_CMD_POST_RECV, QP),
            (IB_USER_VERBS_CMD_POST_SRQ_RECV, SRQ),
        ];
        for (command, (number, handle)) in bench.kernel.take().iter().zip(expected) {
            assert_eq!(command.name, Write(number));
            // The three begin alike.
            let core: [u32; 6] = command.core();
            assert_eq!(core[2..5], [handle, 0, 0]);
        }
        assert_eq!(offset_of!(ib_uverbs_post_recv, wr_count), 12);
        assert_eq!(offset_of!(ib_uverbs_post_srq_recv, sge_count), 16);
    }

    #[test]
    fn what_is_asked_of_device_and_port() {
        let bench = Bench::new();
        let mut port = ibv_port_attr::default();
        bench.kernel.answer(
            UVERBS_ATTR_QUERY_PORT_RESP,
            ib_uverbs_query_port_resp_ex {
                legacy_resp: ib_uverbs_query_port_resp {
                    state: 4,
                    gid_tbl_len: 9,
                    ..Default::default()
                },
                ..Default::default()
            },
        );
        assert_eq!(query_port(bench.context(), 3, &mut port), Ok(()));
        let command = bench.kernel.one();
        assert_eq!(command.name, Method(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_PORT));
        assert_eq!(command.handle(UVERBS_ATTR_QUERY_PORT_PORT_NUM), 3);
        assert_eq!((port.state, port.gid_tbl_len), (4, 9));

        let mut attr = ibv_device_attr_ex::default();
        let mut answer = ib_uverbs_ex_query_device_resp {
            response_length: size_of::<ib_uverbs_ex_query_device_resp>() as u32,
            ..Default::default()
        };
        answer.base.max_qp = 1234;
        bench.kernel.answer(UVERBS_ATTR_CORE_OUT, answer);
        // SAFETY: the attributes are as long.
        let result = unsafe {
            query_device(bench.context(), ptr::null(), &mut attr, size_of::<ibv_device_attr_ex>())
        };
        assert_eq!((result, attr.orig_attr.max_qp), (Ok(()), 1234));
        let number = IB_USER_VERBS_EX_CMD_QUERY_DEVICE | EXTENDED;
        assert_eq!(bench.kernel.names(), [Write(number)]);
    }

    #[test]
    fn what_is_destroyed() {
        let bench = Bench::new();
        assert_eq!(destroy_cq(bench.cq()), Ok(()));
        assert_eq!(destroy_qp(bench.qp()), Ok(()));
        assert_eq!(destroy_srq(bench.srq()), Ok(()));
        let expected = [
            (UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_DESTROY, UVERBS_ATTR_DESTROY_CQ_HANDLE, CQ),
            (UVERBS_OBJECT_QP, UVERBS_METHOD_QP_DESTROY, UVERBS_ATTR_DESTROY_QP_HANDLE, QP),
            (UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_DESTROY, UVERBS_ATTR_DESTROY_SRQ_HANDLE, SRQ),
        ];
        for (command, (object, method, attr, handle)) in bench.kernel.take().iter().zip(expected) {
            assert_eq!(command.name, Method(object, method));
            assert_eq!(command.handle(attr), handle.into());
        }
    }

    /// A command, and what it is called.
    type Named = (&'static str, fn(&Bench) -> Result);

    /// Each command of this module, on the objects of a bench.
    fn commands() -> Vec<Named> {
        vec![
            ("get_context", |b| get_context(b.verbs_context()).map(|_| ())),
            ("query_context", |b| query_context(b.verbs_context()).map(|_| ())),
            ("query_port", |b| query_port(b.context(), 1, &mut Default::default())),
            ("alloc_pd", |b| alloc_pd(b.context(), object().as_ref())),
            ("dealloc_pd", |b| dealloc_pd(b.pd.as_ref())),
            ("reg_mr", |b| reg_mr(b.pd.as_ref(), REGION, object().as_ref())),
            ("reg_dmabuf_mr", |b| reg_dmabuf_mr(b.pd.as_ref(), REGION, 1, object().as_ref())),
            ("rereg_mr", |b| rereg_mr(b.mr.as_ref(), 4, None, REGION)),
            ("query_mr", |b| query_mr(b.pd.as_ref(), object().as_ref(), 1)),
            ("dereg_mr", |b| dereg_mr(b.mr.as_ref())),
            ("alloc_mw", |b| alloc_mw(b.pd.as_ref(), 1, object().as_ref())),
            ("dealloc_mw", |b| dealloc_mw(b.mw.as_ref())),
            ("create_ah", |b| {
                create_ah(b.pd.as_ref(), &mut Default::default(), object().as_ref()).map(|_| ())
            }),
            ("destroy_ah", |b| destroy_ah(b.ah.as_ref())),
            ("create_cq", |b| {
                let cq = object::<verbs_cq>();
                create_cq(b.context(), 1, None, 0, cq.as_ref().cq(), Some(CQ_RING))
            }),
            ("modify_cq", |b| modify_cq(b.cq(), &mut Default::default())),
            ("resize_cq", |b| resize_cq(b.cq(), 1, CQ_RING)),
            ("poll_cq", |b| poll_cq(b.cq(), &mut [MaybeUninit::uninit()]).map(|_| ())),
            ("req_notify_cq", |b| req_notify_cq(b.cq(), false)),
            ("destroy_cq", |b| destroy_cq(b.cq())),
            ("create_qp", |b| {
                let mut attr = b.init(IBV_QPT_RC);
                create_qp(b.pd.as_ref(), &mut attr, object().as_ref(), Some(QP_RINGS))
            }),
            ("create_xrc_target", |b| {
                let mut attr = b.init(IBV_QPT_XRC_RECV);
                (attr.comp_mask, attr.xrcd) = (IBV_QP_INIT_ATTR_XRCD, b.xrcd());
                create_xrc_target(b.context(), &mut attr, object().as_ref())
            }),
            ("open_qp", |b| {
                let mut attr = ibv_qp_open_attr {
                    comp_mask: IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
                    xrcd: b.xrcd(),
                    ..Default::default()
                };
                open_qp(b.context(), &mut attr, object().as_ref())
            }),
            ("open_xrcd", |b| {
                let mut attr = ibv_xrcd_init_attr { comp_mask: 3, fd: -1, oflags: 0 };
                open_xrcd(b.context(), object().as_ref(), &mut attr)
            }),
            ("close_xrcd", |b| close_xrcd(b.xrcd.as_ref())),
            ("modify_qp", |b| modify_qp(b.qp(), &mut Default::default(), 1)),
            ("query_qp", |b| query_qp(b.qp(), &mut Default::default(), 1, &mut Default::default())),
            ("attach_mcast", |b| attach_mcast(b.qp(), &ibv_gid { raw: [0; 16] }, 0)),
            ("detach_mcast", |b| detach_mcast(b.qp(), &ibv_gid { raw: [0; 16] }, 0)),
            ("destroy_qp", |b| destroy_qp(b.qp())),
            ("create_srq", |b| {
                let srq = object::<verbs_srq>();
                create_srq(b.pd.as_ref(), &mut Default::default(), srq.as_ref().srq(), SRQ_RING)
            }),
            ("create_xrc_srq", |b| {
                create_xrc_srq(b.context(), &mut b.srq_init(), object().as_ref(), SRQ_RING)
            }),
            ("modify_srq", |b| modify_srq(b.srq(), &mut Default::default(), 1, None)),
            ("query_srq", |b| query_srq(b.srq(), &mut Default::default())),
            ("destroy_srq", |b| destroy_srq(b.srq())),
            ("ring_srq_doorbell", |b| ring_srq_doorbell(b.srq())),
            ("ring_send_doorbell", |b| ring_send_doorbell(b.qp())),
            ("ring_recv_doorbell", |b| ring_recv_doorbell(b.qp())),
        ]
    }

    /// Each command answers the kernel's error, whatever it is, and is sent once.
    #[test]
    fn errors_are_the_kernel_s() {
        for errno in [EPERM, EINTR, EIO, ENOMEM, EBUSY, EINVAL, ENODEV, EOPNOTSUPP] {
            let bench = Bench::new();
            for (name, command) in commands() {
                bench.kernel.fail(errno);
                let error = command(&bench).map_err(Errno::get);
                assert_eq!(error, Err(errno as c_int), "{name}");
                assert_eq!(bench.kernel.take().len(), 1, "{name}");
            }
        }
    }

    /// As many bytes as the core's structure without a driver's part, and both with it; the
    /// driver's part follows at once.
    #[test]
    fn a_message_is_both_parts() {
        let message = Message::<ibv_create_cq, virtio_rdma_ureq_create_cq>::default();
        let core = size_of::<ibv_create_cq>();
        assert_eq!((message.len(false), message.len(true)), (core, core + 16));
        assert_eq!(offset_of!(Message<ibv_create_cq, virtio_rdma_ureq_create_cq>, driver), core);
    }
}
