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
