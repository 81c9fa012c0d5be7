// SPDX-License-Identifier: GPL-2.0

//! The operations of a device: what the RDMA core calls, handed to the traits.
//!
//! The RDMA core alone calls these functions, by the table of a device that is
//! registered ([`super::device::Registration`]), and so with objects of this
//! driver. An object that is made is zeroed memory of the core's, of the size in
//! the table, in which the core has set its own members; one that exists has gone
//! through the function here that makes it, and goes through the one that ends
//! it once.

use super::{
    mad,
    object::{
        gid_bytes,
        Object,
        Ucontext, //
    },
    restrack,
    stats,
    AddressHandle,
    Ah,
    AhAttr,
    CompletionQueue,
    Cq,
    CqInitAttr,
    Device,
    Driver,
    GidAttr,
    MemoryRegion,
    MemoryWindow,
    Mr,
    Mw,
    Pd,
    ProtectionDomain,
    Qp,
    QpInitAttr,
    QueuePair,
    RecvWrs,
    SendWrs,
    SharedReceiveQueue,
    Srq,
    SrqInitAttr,
    Table,
    Udata,
    UserContext,
    UserMemory,
    Wcs,
    XrcDomain,
    Xrcd, //
};
use crate::{
    bindings,
    doorbell, //
};
use kernel::{
    error::{
        from_err_ptr,
        from_result,
        to_result, //
    },
    prelude::*,
    transmute::AsBytes, //
};

/// The commands of uverbs by which the kernel posts and polls for a program.
pub(super) fn uverbs_cmd_mask() -> u64 {
    [
        bindings::ib_uverbs_write_cmds_IB_USER_VERBS_CMD_POST_SEND,
        bindings::ib_uverbs_write_cmds_IB_USER_VERBS_CMD_POST_RECV,
        bindings::ib_uverbs_write_cmds_IB_USER_VERBS_CMD_POST_SRQ_RECV,
        bindings::ib_uverbs_write_cmds_IB_USER_VERBS_CMD_POLL_CQ,
        bindings::ib_uverbs_write_cmds_IB_USER_VERBS_CMD_REQ_NOTIFY_CQ,
    ]
    .iter()
    .fold(0, |mask, command| mask | 1 << command)
}

/// The table of operations of a driver.
pub(super) fn table<D: Driver>() -> bindings::ib_device_ops {
    bindings::ib_device_ops {
        driver_id: bindings::rdma_driver_id_RDMA_DRIVER_UNKNOWN,
        uverbs_abi_ver: D::UVERBS_ABI_VERSION,
        post_send: Some(post_send::<D>),
        post_recv: Some(post_recv::<D>),
        poll_cq: Some(poll_cq::<D>),
        req_notify_cq: Some(req_notify_cq::<D>),
        query_device: Some(query_device::<D>),
        query_port: Some(query_port::<D>),
        query_port_speed: Some(query_port_speed::<D>),
        get_port_immutable: Some(get_port_immutable::<D>),
        get_link_layer: Some(get_link_layer),
        add_gid: Some(add_gid::<D>),
        del_gid: Some(del_gid::<D>),
        query_pkey: Some(query_pkey::<D>),
        alloc_ucontext: Some(alloc_ucontext::<D>),
        dealloc_ucontext: Some(dealloc_ucontext::<D>),
        query_ucontext: Some(query_ucontext::<D>),
        disassociate_ucontext: Some(disassociate_ucontext),
        alloc_pd: Some(alloc_pd::<D>),
        dealloc_pd: Some(dealloc_pd::<D>),
        create_ah: Some(create_ah::<D>),
        create_user_ah: Some(create_ah::<D>),
        query_ah: Some(query_ah::<D>),
        destroy_ah: Some(destroy_ah::<D>),
        create_qp: Some(create_qp::<D>),
        modify_qp: Some(modify_qp::<D>),
        query_qp: Some(query_qp::<D>),
        destroy_qp: Some(destroy_qp::<D>),
        create_srq: Some(create_srq::<D>),
        modify_srq: Some(modify_srq::<D>),
        query_srq: Some(query_srq::<D>),
        destroy_srq: Some(destroy_srq::<D>),
        post_srq_recv: Some(post_srq_recv::<D>),
        alloc_xrcd: Some(alloc_xrcd::<D>),
        dealloc_xrcd: Some(dealloc_xrcd::<D>),
        create_cq: Some(create_cq::<D>),
        destroy_cq: Some(destroy_cq::<D>),
        modify_cq: Some(modify_cq::<D>),
        resize_user_cq: Some(resize_user_cq::<D>),
        get_dma_mr: Some(get_dma_mr::<D>),
        reg_user_mr: Some(reg_user_mr::<D>),
        reg_user_mr_dmabuf: Some(reg_user_mr_dmabuf::<D>),
        rereg_user_mr: Some(rereg_user_mr::<D>),
        alloc_mr: Some(alloc_mr::<D>),
        map_mr_sg: Some(map_mr_sg::<D>),
        dereg_mr: Some(dereg_mr::<D>),
        alloc_mw: Some(alloc_mw::<D>),
        dealloc_mw: Some(dealloc_mw::<D>),
        attach_mcast: Some(attach_mcast::<D>),
        detach_mcast: Some(detach_mcast::<D>),
        process_mad: Some(mad::process_mad::<D>),
        fill_res_cq_entry: Some(restrack::fill_res_cq_entry::<D>),
        fill_res_mr_entry: Some(restrack::fill_res_mr_entry::<D>),
        fill_res_qp_entry: Some(restrack::fill_res_qp_entry::<D>),
        alloc_hw_port_stats: Some(stats::alloc_hw_port_stats::<D>),
        get_hw_stats: Some(stats::get_hw_stats::<D>),
        size_ib_ah: Ah::<D>::SIZE,
        size_ib_cq: Cq::<D>::SIZE,
        size_ib_mw: Mw::<D>::SIZE,
        size_ib_pd: Pd::<D>::SIZE,
        size_ib_qp: Qp::<D>::SIZE,
        size_ib_srq: Srq::<D>::SIZE,
        size_ib_ucontext: Ucontext::<D>::SIZE,
        size_ib_xrcd: Xrcd::<D>::SIZE,
        ..Default::default()
    }
}

/// For an operation that takes nothing from a program but what the core knows of, and tells it nothing
/// either (`ib_no_udata_io()`).
///
/// # Safety
///
/// `udata` must be null, or that of the current system call.
///
/// # Errors
///
/// `EOPNOTSUPP` if the program sent bytes that are not zero, `EFAULT`.
unsafe fn no_driver_data(udata: *mut bindings::ib_udata) -> Result {
    // SAFETY: By the safety requirements.
    let Some(udata) = (unsafe { Udata::from_raw(udata) }) else {
        return Ok(());
    };
    udata.no_request()?;
    udata.no_answer()
}

/// Lets the driver find a new object by its number. If it cannot, the object is destroyed in the
/// device, as far as that knows it.
///
/// # Safety
///
/// [`Table::retire`] must take the object out of the table before it is dropped.
///
/// # Errors
///
/// `ENOMEM`; `EIO` for a number that is out of range or taken.
unsafe fn publish<D: Driver, C, T>(
    dev: &Device<D>,
    table: &Table<Object<C, T>>,
    object: &Object<C, T>,
    destroy: impl FnOnce() -> Result,
) -> Result
where
    Object<C, T>: Sync,
{
    // SAFETY: By the safety requirements.
    match unsafe { table.publish(object.handle(), object) } {
        Ok(()) => {
            dev.data().published();
            Ok(())
        }
        Err(error) => {
            let error = if error == ENOMEM {
                error
            } else {
                dev.data().bad_number();
                EIO
            };
            // The device may keep the object, the driver does not.
            let _ = destroy();
            Err(error)
        }
    }
}

/// The operation `query_device`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn query_device<D: Driver>(
    dev: *mut bindings::ib_device,
    attr: *mut bindings::ib_device_attr,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core calls for a device that `Registration::new` registered with this table, and
    // that it keeps until this returns. `attr` is the core's own, which nobody else has before this
    // returns.
    let (dev, attr) = unsafe { (Device::<D>::from_raw(dev), &mut *attr) };
    *attr = Default::default();
    from_result(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this
        // returns.
        unsafe { no_driver_data(udata)? };
        dev.data().query_device(attr).map(|()| 0)
    })
}

/// The operation `query_port`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn query_port<D: Driver>(
    dev: *mut bindings::ib_device,
    port: u32,
    attr: *mut bindings::ib_port_attr,
) -> c_int {
    // SAFETY: The core calls for a device that `Registration::new` registered with this table, and
    // that it keeps until this returns. `attr` is the core's own, and zeroed.
    let (dev, attr) = unsafe { (Device::<D>::from_raw(dev), &mut *attr) };
    from_result(|| D::query_port(dev, port, attr).map(|()| 0))
}

/// The operation `query_port_speed`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn query_port_speed<D: Driver>(
    dev: *mut bindings::ib_device,
    port: u32,
    speed: *mut u64,
) -> c_int {
    // SAFETY: The core calls for a device that `Registration::new` registered with this table, and
    // that it keeps until this returns.
    let dev = unsafe { Device::<D>::from_raw(dev) };
    from_result(|| {
        let mut attr = bindings::ib_port_attr::default();
        D::query_port(dev, port, &mut attr)?;
        // SAFETY: `speed` is the core's own, and valid for writes.
        unsafe { speed.write(port_speed(&mut attr)?) };
        Ok(0)
    })
}

/// The speed of a port with these attributes, in units of 100 Mb/s; 0 if it is down.
fn port_speed(attr: &mut bindings::ib_port_attr) -> Result<u64> {
    if attr.state != bindings::ib_port_state_IB_PORT_ACTIVE {
        return Ok(0);
    }
    let mut info = bindings::ib_port_speed_info::default();
    // SAFETY: Both structures are valid; speeds and widths that are none are an error to it.
    to_result(unsafe { bindings::ib_port_attr_to_speed_info(attr, &mut info) })?;
    Ok(u64::try_from(info.rate)?)
}

/// The operation `get_port_immutable`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn get_port_immutable<D: Driver>(
    dev: *mut bindings::ib_device,
    port: u32,
    attr: *mut bindings::ib_port_immutable,
) -> c_int {
    // SAFETY: The core calls for a device that `Registration::new` registered with this table, and
    // that it keeps until this returns. `attr` is that of the port, which nobody reads before the
    // device is registered.
    let (dev, attr) = unsafe { (Device::<D>::from_raw(dev), &mut *attr) };
    from_result(|| D::port_immutable(dev, port, attr).map(|()| 0))
}

/// The operation `get_link_layer`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn get_link_layer(
    _dev: *mut bindings::ib_device,
    _port: u32,
) -> bindings::rdma_link_layer {
    bindings::rdma_link_layer_IB_LINK_LAYER_ETHERNET
}

/// The operation `query_pkey`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn query_pkey<D: Driver>(
    dev: *mut bindings::ib_device,
    port: u32,
    index: u16,
    pkey: *mut u16,
) -> c_int {
    // SAFETY: The core calls for a device that `Registration::new` registered with this table, and
    // that it keeps until this returns. `pkey` is the caller's, and valid for writes.
    let (dev, pkey) = unsafe { (Device::<D>::from_raw(dev), &mut *pkey) };
    from_result(|| {
        *pkey = D::query_pkey(dev, port, index)?;
        Ok(0)
    })
}

/// The operation `add_gid`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn add_gid<D: Driver>(
    attr: *const bindings::ib_gid_attr,
    _context: *mut *mut c_void,
) -> c_int {
    // SAFETY: The core's GID table calls with an entry of its own, which it keeps until this
    // returns, and which names the registered device that has the table.
    let (dev, attr) = unsafe { (Device::<D>::from_raw((*attr).device), &*attr) };
    from_result(|| D::add_gid(dev, &GidAttr::new(attr)).map(|()| 0))
}

/// The operation `del_gid`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn del_gid<D: Driver>(
    attr: *const bindings::ib_gid_attr,
    _context: *mut *mut c_void,
) -> c_int {
    // SAFETY: As in `add_gid`; the entry goes when this has returned.
    let (dev, attr) = unsafe { (Device::<D>::from_raw((*attr).device), &*attr) };
    from_result(|| D::del_gid(dev, &GidAttr::new(attr)).map(|()| 0))
}

/// The operation `alloc_ucontext`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn alloc_ucontext<D: Driver>(
    raw: *mut bindings::ib_ucontext,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core has set `device` of the new object to the device that it calls for, which
    // stays registered meanwhile. `udata` is null, or that of the system call that the core is in
    // until this returns.
    let (dev, udata) = unsafe { (Device::<D>::from_raw((*raw).device), Udata::from_raw(udata)) };
    from_result(|| {
        let udata = udata.ok_or(EINVAL)?;
        udata.no_request()?;
        let data = D::Ucontext::alloc(dev, &udata)?;
        // SAFETY: The core allocated `size_ib_ucontext` bytes, not initialised yet.
        unsafe { Ucontext::<D>::write(raw, data) };
        Ok(0)
    })
}

/// The operation `dealloc_ucontext`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn dealloc_ucontext<D: Driver>(raw: *mut bindings::ib_ucontext) {
    // SAFETY: `raw` is a context that `alloc_ucontext` made. The core has destroyed all of its
    // objects and frees it next, so that there is no reference to it.
    unsafe { Ucontext::<D>::drop_data(raw) };
}

/// The operation `query_ucontext`: a program that got another one's open file imports the context.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn query_ucontext<D: Driver>(
    raw: *mut bindings::ib_ucontext,
    attrs: *mut bindings::uverbs_attr_bundle,
) -> c_int {
    // SAFETY: `raw` is a context that `alloc_ucontext` made; its device is registered while the
    // system call is in uverbs, which holds `disassociate_srcu`.
    let dev = unsafe { Device::<D>::from_raw((*raw).device) };
    let answer = D::Ucontext::describe(dev);
    let bytes = answer.as_bytes();
    // SAFETY: `attrs` are those of the current system call; `bytes` is valid for reads of its
    // length.
    unsafe {
        bindings::uverbs_copy_to_struct_or_zero(
            attrs,
            bindings::VIRTIO_RDMA_ATTR_QUERY_CONTEXT_RESP as usize,
            bytes.as_ptr().cast(),
            bytes.len(),
        )
    }
}

/// Lets the device go while programs have it open. The core destroys their objects itself, and
/// nothing of this driver is mapped into them.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn disassociate_ucontext(_context: *mut bindings::ib_ucontext) {}

/// The operation `alloc_pd`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn alloc_pd<D: Driver>(
    raw: *mut bindings::ib_pd,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core has set `device` of the new object to the device that it calls for, which
    // stays registered meanwhile.
    let dev = unsafe { Device::<D>::from_raw((*raw).device) };
    from_result(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this
        // returns.
        unsafe { no_driver_data(udata)? };
        let data = D::Pd::alloc(dev)?;
        // SAFETY: The core allocated `size_ib_pd` bytes, not initialised yet.
        unsafe { Pd::<D>::write(raw, data) };
        Ok(0)
    })
}

/// The operation `dealloc_pd`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn dealloc_pd<D: Driver>(
    raw: *mut bindings::ib_pd,
    udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this
        // returns.
        unsafe { no_driver_data(udata)? };
        // SAFETY: `raw` is a PD that `alloc_pd` made, which the core destroys once: it stays until
        // the data is dropped below.
        unsafe { Pd::<D>::from_raw(raw) }.dealloc()?;
        // SAFETY: The core frees the memory next.
        unsafe { Pd::<D>::drop_data(raw) };
        Ok(0)
    })
}

/// The operation `create_ah`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn create_ah<D: Driver>(
    raw: *mut bindings::ib_ah,
    attr: *mut bindings::rdma_ah_init_attr,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core has set the PD of the new object to one that `alloc_pd` made and that it
    // keeps, as it keeps the attributes, until this returns. `udata` is null, or that of the system
    // call that the core is in until this returns.
    let (pd, attr, udata) = unsafe {
        (
            Pd::<D>::from_raw((*raw).pd),
            &*(*attr).ah_attr,
            Udata::from_raw(udata),
        )
    };
    from_result(|| {
        udata.as_ref().map_or(Ok(()), Udata::no_request)?;
        let data = D::Ah::create(pd, &AhAttr::new(attr).ok_or(EINVAL)?, udata.as_ref())?;
        // SAFETY: The core allocated `size_ib_ah` bytes, not initialised yet.
        unsafe { Ah::<D>::write(raw, data) };
        Ok(0)
    })
}

/// The operation `query_ah`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn query_ah<D: Driver>(
    raw: *mut bindings::ib_ah,
    attr: *mut bindings::rdma_ah_attr,
) -> c_int {
    // SAFETY: `raw` is an AH that `create_ah` made and its owner keeps until this returns. `attr`
    // is the core's own, which nobody else has before this returns.
    let (ah, attr) = unsafe { (Ah::<D>::from_raw(raw), &mut *attr) };
    *attr = Default::default();
    ah.query(attr);
    0
}

/// The operation `destroy_ah`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn destroy_ah<D: Driver>(raw: *mut bindings::ib_ah, _flags: u32) -> c_int {
    // SAFETY: `raw` is an AH that `create_ah` made, which its owner uses no more, and which the
    // core frees next. Work requests have copies of what is in it.
    unsafe { Ah::<D>::drop_data(raw) };
    0
}

/// The operation `create_cq`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn create_cq<D: Driver>(
    raw: *mut bindings::ib_cq,
    attr: *const bindings::ib_cq_init_attr,
    attrs: *mut bindings::uverbs_attr_bundle,
) -> c_int {
    // SAFETY: The core has set `device` of the new object to the device that it calls for, which
    // stays registered meanwhile. `attr` is the core's own, and is not changed before this returns.
    let (dev, attr) = unsafe { (Device::<D>::from_raw((*raw).device), &*attr) };
    let attr = CqInitAttr {
        cqe: attr.cqe,
        comp_vector: attr.comp_vector,
        flags: attr.flags,
        // SAFETY: `driver_udata` is the first member of `attrs`, which are null, or those of the
        // system call that the core is in until this returns.
        udata: unsafe { Udata::from_raw(attrs.cast()) },
    };
    from_result(|| {
        attr.udata.as_ref().map_or(Ok(()), Udata::no_answer)?;
        let data = D::Cq::create(dev, &attr)?;
        // SAFETY: The core allocated `size_ib_cq` bytes, not initialised yet.
        let cq = unsafe { Cq::<D>::init(raw, data, |cq| cq.number())? };
        // SAFETY: `destroy_cq` takes it out before it is dropped.
        if let Err(error) = unsafe { publish(dev, &dev.handles().cqs, cq, || cq.destroy()) } {
            // SAFETY: The core frees the memory next.
            unsafe { Cq::<D>::drop_data(raw) };
            return Err(error);
        }
        // SAFETY: `raw` is valid, and the core reads `cqe` once this has returned.
        unsafe { (*raw).cqe = cq.cqe() as c_int };
        Ok(0)
    })
}

/// The operation `destroy_cq`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn destroy_cq<D: Driver>(
    raw: *mut bindings::ib_cq,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: `raw` is a CQ that `create_cq` made, which the core destroys once: it stays until the
    // data is dropped below. Its device is registered as long as it has objects.
    let (cq, dev) = unsafe { (Cq::<D>::from_raw(raw), Device::<D>::from_raw((*raw).device)) };
    from_result(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this
        // returns.
        unsafe { no_driver_data(udata)? };
        dev.handles().cqs.retire(cq.handle(), || cq.destroy())?;
        // SAFETY: The core frees the memory next.
        unsafe { Cq::<D>::drop_data(raw) };
        Ok(0)
    })
}

/// The operation `modify_cq`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn modify_cq<D: Driver>(
    raw: *mut bindings::ib_cq,
    count: u16,
    period: u16,
) -> c_int {
    // SAFETY: `raw` is a CQ that `create_cq` made. Uverbs locks its user object and a ULP uses none
    // that it destroys, so that it stays until this returns.
    let cq = unsafe { Cq::<D>::from_raw(raw) };
    from_result(|| cq.moderate(count, period).map(|()| 0))
}

/// The operation `resize_user_cq`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn resize_user_cq<D: Driver>(
    raw: *mut bindings::ib_cq,
    cqe: c_uint,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: `raw` is a CQ that `create_cq` made. Uverbs locks its user object and a ULP uses none
    // that it destroys, so that it stays until this returns. Its device is registered as long as it
    // has objects. `udata` is null, or that of the system call that the core is in until this
    // returns.
    let (cq, dev, udata) = unsafe {
        (
            Cq::<D>::from_raw(raw),
            Device::<D>::from_raw((*raw).device),
            Udata::from_raw(udata),
        )
    };
    from_result(|| {
        cq.resize(dev, cqe, &udata.ok_or(EINVAL)?)?;
        // SAFETY: `raw` is valid, as above. Whoever reads it meanwhile gets either number.
        unsafe { (&raw mut (*raw).cqe).write_volatile(cqe as c_int) };
        Ok(0)
    })
}

/// The operation `poll_cq`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn poll_cq<D: Driver>(
    raw: *mut bindings::ib_cq,
    num: c_int,
    wc: *mut bindings::ib_wc,
) -> c_int {
    let Ok(len) = usize::try_from(num) else {
        return EINVAL.to_errno();
    };
    if len == 0 {
        return 0;
    }
    // SAFETY: `raw` is a CQ that `create_cq` made. Uverbs locks its user object and a ULP uses none
    // that it destroys, so that it stays until this returns. Its device is registered as long as it
    // has objects. `wc` has room for `num` completions. The CQ of a program has a user object all
    // its life.
    let (cq, dev, slots, is_program) = unsafe {
        (
            Cq::<D>::from_raw(raw),
            Device::<D>::from_raw((*raw).device),
            core::slice::from_raw_parts_mut(wc.cast(), len),
            !(*raw).uobject.is_null(),
        )
    };
    let mut wcs = Wcs::new(slots, is_program.then(|| &dev.handles().stand_ins));
    from_result(|| cq.poll(&mut wcs).map(|()| wcs.filled() as c_int))
}

/// The operation `req_notify_cq`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn req_notify_cq<D: Driver>(
    raw: *mut bindings::ib_cq,
    flags: bindings::ib_cq_notify_flags,
) -> c_int {
    // SAFETY: `raw` is a CQ that `create_cq` made. Uverbs locks its user object and a ULP uses none
    // that it destroys, so that it stays until this returns.
    let cq = unsafe { Cq::<D>::from_raw(raw) };
    let solicited = flags & bindings::ib_cq_notify_flags_IB_CQ_SOLICITED_MASK
        == bindings::ib_cq_notify_flags_IB_CQ_SOLICITED;
    let report_missed = flags & bindings::ib_cq_notify_flags_IB_CQ_REPORT_MISSED_EVENTS != 0;

    c_int::from(cq.req_notify(solicited, report_missed))
}

/// The operation `create_qp`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn create_qp<D: Driver>(
    raw: *mut bindings::ib_qp,
    init: *mut bindings::ib_qp_init_attr,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core has set `device` of the new object to the device that it calls for, which
    // stays registered meanwhile. `init` is the caller's, and nobody else changes it before this
    // returns.
    let (dev, init) = unsafe { (Device::<D>::from_raw((*raw).device), &mut *init) };
    from_result(|| {
        // SAFETY: The core has set `pd` of the new QP, to null for an XRC target.
        let pd = unsafe { (*raw).pd };
        // SAFETY: What `init` and `pd` name are objects that the functions here made and that the
        // core has counted this QP as a user of, or null where the type of the QP has none. `udata`
        // is null, or that of the system call that the core is in until this returns.
        let attr = unsafe {
            QpInitAttr {
                qp_type: init.qp_type,
                signal_all: init.sq_sig_type == bindings::ib_sig_type_IB_SIGNAL_ALL_WR,
                pd: (!pd.is_null()).then(|| Pd::<D>::from_raw(pd)),
                send_cq: (!init.send_cq.is_null()).then(|| Cq::<D>::from_raw(init.send_cq)),
                recv_cq: (!init.recv_cq.is_null()).then(|| Cq::<D>::from_raw(init.recv_cq)),
                xrcd: (!init.xrcd.is_null()).then(|| Xrcd::<D>::from_raw(init.xrcd)),
                cap: init.cap,
                create_flags: init.create_flags,
                srq: (!init.srq.is_null()).then(|| Srq::<D>::from_raw(init.srq)),
                udata: Udata::from_raw(udata),
            }
        };
        attr.udata.as_ref().map_or(Ok(()), Udata::no_answer)?;
        let data = D::Qp::create(dev, &attr)?;
        // SAFETY: The core allocated `size_ib_qp` bytes, not initialised yet.
        let qp = unsafe { Qp::<D>::init(raw, data, |qp| qp.number())? };
        // SAFETY: `destroy_qp` takes it out before it is dropped.
        if let Err(error) = unsafe { publish(dev, &dev.handles().qps, qp, || qp.destroy()) } {
            // SAFETY: The core frees the memory next.
            unsafe { Qp::<D>::drop_data(raw) };
            return Err(error);
        }
        // SAFETY: `raw` is valid, and the core reads `qp_num` once this has returned.
        unsafe { (*raw).qp_num = qp.handle() };
        init.cap = qp.cap();
        Ok(0)
    })
}

/// The operation `modify_qp`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn modify_qp<D: Driver>(
    raw: *mut bindings::ib_qp,
    attr: *mut bindings::ib_qp_attr,
    mask: c_int,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: `raw` is a QP that `create_qp` made. Uverbs locks its user object and a ULP uses none
    // that it destroys, so that it stays until this returns. `attr` is the core's own.
    let (qp, attr) = unsafe { (Qp::<D>::from_raw(raw), &*attr) };
    from_result(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this
        // returns.
        unsafe { no_driver_data(udata)? };
        qp.modify(attr, mask as u32).map(|()| 0)
    })
}

/// The operation `query_qp`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn query_qp<D: Driver>(
    raw: *mut bindings::ib_qp,
    attr: *mut bindings::ib_qp_attr,
    _mask: c_int,
    init: *mut bindings::ib_qp_init_attr,
) -> c_int {
    // SAFETY: `raw` is a QP that `create_qp` made. Uverbs locks its user object and a ULP uses none
    // that it destroys, so that it stays until this returns. `attr` and `init` are the caller's,
    // which nobody else has before this returns.
    let (qp, attr, init) = unsafe { (Qp::<D>::from_raw(raw), &mut *attr, &mut *init) };
    *attr = Default::default();
    *init = Default::default();
    qp.fill_init_attr(init);
    init.cap = qp.cap();
    init.sq_sig_type = if qp.signals_all() {
        bindings::ib_sig_type_IB_SIGNAL_ALL_WR
    } else {
        bindings::ib_sig_type_IB_SIGNAL_REQ_WR
    };
    from_result(|| qp.query(attr).map(|()| 0))
}

/// The operation `destroy_qp`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn destroy_qp<D: Driver>(
    raw: *mut bindings::ib_qp,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: `raw` is a QP that `create_qp` made, which the core destroys once: it stays until the
    // data is dropped below. Its device is registered as long as it has objects.
    let (qp, dev) = unsafe { (Qp::<D>::from_raw(raw), Device::<D>::from_raw((*raw).device)) };
    from_result(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this
        // returns.
        unsafe { no_driver_data(udata)? };
        dev.handles().qps.retire(qp.handle(), || qp.destroy())?;
        // SAFETY: The core frees the memory next.
        unsafe { Qp::<D>::drop_data(raw) };
        Ok(0)
    })
}

/// The operation `attach_mcast`. RoCE has no LIDs.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn attach_mcast<D: Driver>(
    raw: *mut bindings::ib_qp,
    gid: *mut bindings::ib_gid,
    _lid: u16,
) -> c_int {
    // SAFETY: `raw` is a QP that `create_qp` made. Uverbs locks its user object and a ULP uses none
    // that it destroys, so that it stays until this returns. `gid` is the caller's.
    let (qp, gid) = unsafe { (Qp::<D>::from_raw(raw), gid_bytes(&*gid)) };
    from_result(|| qp.attach_mcast(gid).map(|()| 0))
}

/// The operation `detach_mcast`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn detach_mcast<D: Driver>(
    raw: *mut bindings::ib_qp,
    gid: *mut bindings::ib_gid,
    _lid: u16,
) -> c_int {
    // SAFETY: As in `attach_mcast`.
    let (qp, gid) = unsafe { (Qp::<D>::from_raw(raw), gid_bytes(&*gid)) };
    from_result(|| qp.detach_mcast(gid).map(|()| 0))
}

/// The operation `post_send`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn post_send<D: Driver>(
    raw: *mut bindings::ib_qp,
    wr: *const bindings::ib_send_wr,
    bad: *mut *const bindings::ib_send_wr,
) -> c_int {
    // SAFETY: `raw` is a QP that `create_qp` made. Uverbs locks its user object and a ULP uses none
    // that it destroys, so that it stays until this returns. `wr` heads the caller's list for a QP
    // of this type, which may be empty.
    let (qp, mut wrs) = unsafe { (Qp::<D>::from_raw(raw), SendWrs::new(wr, (*raw).qp_type)) };
    let result = if wr.is_null() {
        qp.doorbell(doorbell::Ring::Send)
    } else {
        qp.post_send(&mut wrs)
    };
    if result.is_err() {
        // SAFETY: `bad` is valid for writes: the core gives a place of its own for a caller that
        // has none.
        unsafe { *bad = wrs.current() };
    }
    from_result(|| result.map(|()| 0))
}

/// The operation `post_recv`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn post_recv<D: Driver>(
    raw: *mut bindings::ib_qp,
    wr: *const bindings::ib_recv_wr,
    bad: *mut *const bindings::ib_recv_wr,
) -> c_int {
    // SAFETY: `raw` is a QP that `create_qp` made. Uverbs locks its user object and a ULP uses none
    // that it destroys, so that it stays until this returns. `wr` heads the caller's list, which
    // may be empty.
    let (qp, mut wrs) = unsafe { (Qp::<D>::from_raw(raw), RecvWrs::new(wr)) };
    let result = if wr.is_null() {
        qp.doorbell(doorbell::Ring::Receive)
    } else {
        qp.post_recv(&mut wrs)
    };
    if result.is_err() {
        // SAFETY: `bad` is valid for writes: the core gives a place of its own for a caller that
        // has none.
        unsafe { *bad = wrs.current() };
    }
    from_result(|| result.map(|()| 0))
}

/// The operation `alloc_xrcd`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn alloc_xrcd<D: Driver>(
    raw: *mut bindings::ib_xrcd,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core has set `device` of the new object to the device that it calls for, which
    // stays registered meanwhile.
    let dev = unsafe { Device::<D>::from_raw((*raw).device) };
    from_result(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this
        // returns.
        unsafe { no_driver_data(udata)? };
        let data = D::Xrcd::alloc(dev)?;
        // SAFETY: The core allocated `size_ib_xrcd` bytes, not initialised yet.
        unsafe { Xrcd::<D>::write(raw, data) };
        Ok(0)
    })
}

/// The operation `dealloc_xrcd`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn dealloc_xrcd<D: Driver>(
    raw: *mut bindings::ib_xrcd,
    udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this
        // returns.
        unsafe { no_driver_data(udata)? };
        // SAFETY: `raw` is an XRC domain that `alloc_xrcd` made, which the core destroys once: it
        // stays until the data is dropped below.
        unsafe { Xrcd::<D>::from_raw(raw) }.dealloc()?;
        // SAFETY: The core frees the memory next.
        unsafe { Xrcd::<D>::drop_data(raw) };
        Ok(0)
    })
}

/// The operation `create_srq`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn create_srq<D: Driver>(
    raw: *mut bindings::ib_srq,
    init: *mut bindings::ib_srq_init_attr,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core has set `device` of the new object to the device that it calls for, which
    // stays registered meanwhile. `init` is the caller's, and nobody else changes it before this
    // returns.
    let (dev, init) = unsafe { (Device::<D>::from_raw((*raw).device), &mut *init) };
    // SAFETY: The type says which member of the union is in use. The domain and the CQ that it
    // names are from the functions here, and the core has counted this SRQ as a user of them.
    let xrc = unsafe {
        (init.srq_type == bindings::ib_srq_type_IB_SRQT_XRC).then(|| {
            let xrcd = init.ext.__bindgen_anon_1.xrc.xrcd;
            (Xrcd::<D>::from_raw(xrcd), Cq::<D>::from_raw(init.ext.cq))
        })
    };
    // SAFETY: The core has set the PD of the new SRQ to one that `alloc_pd` made, and counted this
    // SRQ as a user of it. `udata` is null, or that of the system call that the core is in until
    // this returns.
    let attr = unsafe {
        SrqInitAttr {
            xrc,
            srq_type: init.srq_type,
            pd: Pd::<D>::from_raw((*raw).pd),
            max_wr: init.attr.max_wr,
            max_sge: init.attr.max_sge,
            udata: Udata::from_raw(udata),
        }
    };
    from_result(|| {
        attr.udata.as_ref().map_or(Ok(()), Udata::no_answer)?;
        let data = D::Srq::create(dev, &attr)?;
        // SAFETY: The core allocated `size_ib_srq` bytes, not initialised yet.
        let srq = unsafe { Srq::<D>::init(raw, data, |srq| srq.number())? };
        // SAFETY: `destroy_srq` takes it out before it is dropped.
        if let Err(error) = unsafe { publish(dev, &dev.handles().srqs, srq, || srq.destroy()) } {
            // SAFETY: The core frees the memory next.
            unsafe { Srq::<D>::drop_data(raw) };
            return Err(error);
        }
        (init.attr.max_wr, init.attr.max_sge) = srq.sizes();
        if attr.xrc.is_some() {
            // SAFETY: `raw` is valid, and the member is in use: it is an SRQ for XRC.
            unsafe { (*raw).ext.__bindgen_anon_1.xrc.srq_num = srq.handle() };
        }
        Ok(0)
    })
}

/// The operation `modify_srq`: resizes an SRQ and sets its limit, both or neither.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn modify_srq<D: Driver>(
    raw: *mut bindings::ib_srq,
    attr: *mut bindings::ib_srq_attr,
    mask: bindings::ib_srq_attr_mask,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: `raw` is an SRQ that `create_srq` made. Uverbs locks its user object and a ULP uses
    // none that it destroys, so that it stays until this returns. Its device is registered as long
    // as it has objects. `attr` is the core's own. `udata` is null, or that of the system call that
    // the core is in until this returns.
    let (srq, dev, attr, udata) = unsafe {
        (
            Srq::<D>::from_raw(raw),
            Device::<D>::from_raw((*raw).device),
            &*attr,
            Udata::from_raw(udata),
        )
    };
    let resizes = mask & bindings::ib_srq_attr_mask_IB_SRQ_MAX_WR != 0;
    let arms = mask & bindings::ib_srq_attr_mask_IB_SRQ_LIMIT != 0;
    let known = bindings::ib_srq_attr_mask_IB_SRQ_MAX_WR | bindings::ib_srq_attr_mask_IB_SRQ_LIMIT;
    from_result(|| {
        if mask & !known != 0 || resizes && arms && attr.srq_limit > attr.max_wr {
            return Err(EINVAL);
        }
        if let Some(udata) = &udata {
            udata.no_answer()?;
            if !resizes {
                udata.no_request()?;
            }
        }
        if resizes {
            let udata = udata.ok_or_else(crate::errno::unsupported)?;
            srq.resize(dev, attr.max_wr, &udata)?;
        }
        if arms {
            srq.arm(attr.srq_limit)?;
        }
        Ok(0)
    })
}

/// The operation `query_srq`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn query_srq<D: Driver>(
    raw: *mut bindings::ib_srq,
    attr: *mut bindings::ib_srq_attr,
) -> c_int {
    // SAFETY: `raw` is an SRQ that `create_srq` made. Uverbs locks its user object and a ULP uses
    // none that it destroys, so that it stays until this returns. `attr` is the caller's, which
    // nobody else has before this returns.
    let (srq, attr) = unsafe { (Srq::<D>::from_raw(raw), &mut *attr) };
    from_result(|| srq.query(attr).map(|()| 0))
}

/// The operation `destroy_srq`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn destroy_srq<D: Driver>(
    raw: *mut bindings::ib_srq,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: `raw` is an SRQ that `create_srq` made, which the core destroys once: it stays until
    // the data is dropped below. Its device is registered as long as it has objects.
    let (srq, dev) = unsafe {
        (
            Srq::<D>::from_raw(raw),
            Device::<D>::from_raw((*raw).device),
        )
    };
    from_result(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this
        // returns.
        unsafe { no_driver_data(udata)? };
        dev.handles().srqs.retire(srq.handle(), || srq.destroy())?;
        // SAFETY: The core frees the memory next.
        unsafe { Srq::<D>::drop_data(raw) };
        Ok(0)
    })
}

/// The operation `post_srq_recv`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn post_srq_recv<D: Driver>(
    raw: *mut bindings::ib_srq,
    wr: *const bindings::ib_recv_wr,
    bad: *mut *const bindings::ib_recv_wr,
) -> c_int {
    // SAFETY: `raw` is an SRQ that `create_srq` made. Uverbs locks its user object and a ULP uses
    // none that it destroys, so that it stays until this returns. `wr` heads the caller's list,
    // which may be empty.
    let (srq, mut wrs) = unsafe { (Srq::<D>::from_raw(raw), RecvWrs::new(wr)) };
    let result = if wr.is_null() {
        srq.doorbell()
    } else {
        srq.post_recv(&mut wrs)
    };
    if result.is_err() {
        // SAFETY: `bad` is valid for writes: the core gives a place of its own for a caller that
        // has none.
        unsafe { *bad = wrs.current() };
    }
    from_result(|| result.map(|()| 0))
}

/// The operation `get_dma_mr`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn get_dma_mr<D: Driver>(
    pd: *mut bindings::ib_pd,
    access: c_int,
) -> *mut bindings::ib_mr {
    // SAFETY: `pd` is a PD that `alloc_pd` made. Uverbs locks its user object and a ULP uses none
    // that it destroys, so that it stays until this returns.
    let pd = unsafe { Pd::<D>::from_raw(pd) };
    new_mr::<D>(|| D::Mr::get_dma(pd, access as u32))
}

/// The operation `reg_user_mr`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn reg_user_mr<D: Driver>(
    pd: *mut bindings::ib_pd,
    start: u64,
    length: u64,
    virt_addr: u64,
    access: c_int,
    dmah: *mut bindings::ib_dmah,
    udata: *mut bindings::ib_udata,
) -> *mut bindings::ib_mr {
    // SAFETY: `pd` is a PD that `alloc_pd` made. Uverbs locks its user object and a ULP uses none
    // that it destroys, so that it stays until this returns. Its device is registered as long as it
    // has objects.
    let (dev, pd) = unsafe { (Device::<D>::from_raw((*pd).device), Pd::<D>::from_raw(pd)) };
    if !dmah.is_null() {
        return crate::errno::unsupported().to_ptr();
    }
    let memory = UserMemory {
        start,
        length,
        virt_addr,
        access: access as u32,
    };
    new_mr::<D>(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this
        // returns.
        unsafe { no_driver_data(udata)? };
        D::Mr::reg_user(dev, pd, &memory)
    })
}

/// The operation `reg_user_mr_dmabuf`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn reg_user_mr_dmabuf<D: Driver>(
    pd: *mut bindings::ib_pd,
    offset: u64,
    length: u64,
    virt_addr: u64,
    fd: c_int,
    access: c_int,
    dmah: *mut bindings::ib_dmah,
    attrs: *mut bindings::uverbs_attr_bundle,
) -> *mut bindings::ib_mr {
    // SAFETY: `pd` is a PD that `alloc_pd` made. Uverbs locks its user object and a ULP uses none
    // that it destroys, so that it stays until this returns. Its device is registered as long as it
    // has objects.
    let (dev, pd) = unsafe { (Device::<D>::from_raw((*pd).device), Pd::<D>::from_raw(pd)) };
    if !dmah.is_null() {
        return crate::errno::unsupported().to_ptr();
    }
    let memory = UserMemory {
        start: offset,
        length,
        virt_addr,
        access: access as u32,
    };
    let raw = new_mr::<D>(|| {
        // SAFETY: `driver_udata` is the first member of `attrs`, those of the system call that the
        // core is in until this returns.
        unsafe { no_driver_data(attrs.cast())? };
        D::Mr::reg_dma_buf(dev, pd, fd, &memory)
    });
    // Unlike those of other MRs, the core leaves these to the driver.
    if let Ok(mr) = from_err_ptr(raw) {
        // SAFETY: The MR is valid, and nobody else knows of it.
        unsafe {
            (*mr).iova = virt_addr;
            (*mr).length = length;
        }
    }
    raw
}

/// The operation `rereg_user_mr`. The core excludes other operations on the MR.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn rereg_user_mr<D: Driver>(
    raw: *mut bindings::ib_mr,
    flags: c_int,
    start: u64,
    length: u64,
    virt_addr: u64,
    access: c_int,
    pd: *mut bindings::ib_pd,
    udata: *mut bindings::ib_udata,
) -> *mut bindings::ib_mr {
    // SAFETY: `raw` is from `new_mr`, and its user object is locked for writing. `pd` is one that
    // `alloc_pd` made, which the core keeps until this returns. Its device is registered as long as
    // it has objects.
    let (dev, mr, pd) = unsafe {
        (
            Device::<D>::from_raw((*raw).device),
            Mr::<D>::from_raw(raw),
            Pd::<D>::from_raw(pd),
        )
    };
    let memory = UserMemory {
        start,
        length,
        virt_addr,
        access: access as u32,
    };
    // SAFETY: `udata` is null, or that of the system call that the core is in until this returns.
    let unused = unsafe { no_driver_data(udata) };
    match unused.and_then(|()| mr.rereg_user(dev, flags as u32, pd, &memory)) {
        // The same MR, with the same keys.
        Ok(()) => core::ptr::null_mut(),
        Err(error) => error.to_ptr(),
    }
}

/// The operation `alloc_mr`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn alloc_mr<D: Driver>(
    pd: *mut bindings::ib_pd,
    mr_type: bindings::ib_mr_type,
    max_num_sg: u32,
) -> *mut bindings::ib_mr {
    if mr_type != bindings::ib_mr_type_IB_MR_TYPE_MEM_REG {
        return EINVAL.to_ptr();
    }
    // SAFETY: `pd` is a PD that `alloc_pd` made. Uverbs locks its user object and a ULP uses none
    // that it destroys, so that it stays until this returns.
    let pd = unsafe { Pd::<D>::from_raw(pd) };
    new_mr::<D>(|| D::Mr::alloc(pd, max_num_sg))
}

/// The operation `map_mr_sg`. Any context.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn map_mr_sg<D: Driver>(
    raw: *mut bindings::ib_mr,
    sg: *mut bindings::scatterlist,
    nents: c_int,
    offset: *mut c_uint,
) -> c_int {
    from_result(|| {
        // SAFETY: `raw` is from `new_mr`, and its owner, a ULP, does nothing else with it until
        // this returns.
        let (mr, page_size) = unsafe { (Mr::<D>::from_raw(raw), (*raw).page_size) };
        mr.begin_pages(page_size)?;
        // SAFETY: `raw` is valid, as above, `sg` is the caller's list of `nents` entries, and
        // `set_page` is called for this MR alone.
        Ok(unsafe { bindings::ib_sg_to_pages(raw, sg, nents, offset, Some(set_page::<D>)) })
    })
}

/// Adds a page to an MR, for `map_mr_sg`.
///
/// # Safety
///
/// Only `ib_sg_to_pages()` may call it, for an MR of this driver.
unsafe extern "C" fn set_page<D: Driver>(raw: *mut bindings::ib_mr, addr: u64) -> c_int {
    // SAFETY: By the safety requirements.
    let mr = unsafe { Mr::<D>::from_raw(raw) };
    from_result(|| mr.add_page(addr).map(|()| 0))
}

/// Allocates an MR, which `dereg_mr` frees.
fn new_mr<D: Driver>(create: impl FnOnce() -> Result<D::Mr>) -> *mut bindings::ib_mr {
    // The memory first, so that nothing fails once the device has the MR.
    let mr = KBox::<Mr<D>>::new_uninit(GFP_KERNEL)
        .map_err(Error::from)
        .and_then(|memory| Ok(KBox::write(memory, Mr::<D>::new(create()?))));
    match mr {
        Ok(mr) => {
            let (lkey, rkey) = mr.keys();
            let raw = mr.as_raw();
            // SAFETY: The MR is valid, and nobody else knows of it.
            unsafe {
                (*raw).lkey = lkey;
                (*raw).rkey = rkey;
            }
            KBox::into_raw(mr);
            raw
        }
        Err(error) => error.to_ptr(),
    }
}

/// The operation `dereg_mr`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn dereg_mr<D: Driver>(
    raw: *mut bindings::ib_mr,
    udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this
        // returns.
        unsafe { no_driver_data(udata)? };
        // SAFETY: `raw` is from `new_mr`, and the core deregisters it once: it stays until it is
        // freed below. The core has set its PD, which it counts as a user of.
        let (mr, pd) = unsafe { (Mr::<D>::from_raw(raw), Pd::<D>::from_raw((*raw).pd)) };
        mr.dereg(pd)?;
        // SAFETY: It is from `new_mr`.
        drop(unsafe { KBox::from_raw(raw.cast::<Mr<D>>()) });
        Ok(0)
    })
}

/// The operation `alloc_mw`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn alloc_mw<D: Driver>(
    raw: *mut bindings::ib_mw,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core has set the type of the new window, and its PD to one that `alloc_pd` made
    // and that it keeps until this returns.
    let (pd, mw_type) = unsafe { (Pd::<D>::from_raw((*raw).pd), (*raw).type_) };
    from_result(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this
        // returns.
        unsafe { no_driver_data(udata)? };
        let data = D::Mw::alloc(pd, mw_type)?;
        let key = data.key();
        // SAFETY: The core allocated `size_ib_mw` bytes, of which only its own are initialised.
        unsafe {
            Mw::<D>::write(raw, data);
            (*raw).rkey = key;
        }
        Ok(0)
    })
}

/// The operation `dealloc_mw`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
unsafe extern "C" fn dealloc_mw<D: Driver>(raw: *mut bindings::ib_mw) -> c_int {
    from_result(|| {
        // SAFETY: `raw` is a window that `alloc_mw` made, which the core destroys once: it stays
        // until the data is dropped below. So does its PD, which the core counts it as a user of.
        let (mw, pd) = unsafe { (Mw::<D>::from_raw(raw), Pd::<D>::from_raw((*raw).pd)) };
        mw.dealloc(pd)?;
        // SAFETY: The core frees the memory next.
        unsafe { Mw::<D>::drop_data(raw) };
        Ok(0)
    })
}
