// SPDX-License-Identifier: GPL-2.0

//! Completion queues: `struct ib_cq`.

use super::{
    device::{
        publish_new,
        retire_old,
        Device, //
    },
    event::{
        self,
        EventType, //
    },
    object::{
        Cq,
        Object, //
    },
    restrack::{
        self,
        Details, //
    },
    udata::Udata,
    wc::Wcs,
    Driver, //
};
use crate::bindings;
use kernel::{
    error::from_result,
    prelude::*, //
};

/// The attributes that a CQ is created with.
pub(crate) struct CqInitAttr<'a> {
    /// Number of entries.
    pub(crate) cqe: u32,
    /// The completion vector.
    pub(crate) comp_vector: u32,
    /// Flags of `enum ib_uverbs_ex_create_cq_flags`.
    pub(crate) flags: u32,
    /// The way back to the program; `None` if the kernel creates the object for itself.
    pub(crate) udata: Option<Udata<'a>>,
}

/// A completion queue.
pub(crate) trait CompletionQueue<D: Driver>: Sized + Send + Sync {
    /// Creates the CQ. May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` for attributes beyond the limits, `ENOMEM`, or what the device says.
    fn create(dev: &Device<D>, attr: &CqInitAttr<'_>) -> Result<impl PinInit<Self, Error>>;

    /// Destroys the CQ in the device. May sleep. It is dropped afterwards, unless this fails.
    ///
    /// # Errors
    ///
    /// What the device says; the object then lives on.
    fn destroy(&self) -> Result;

    /// Returns the device's number of the CQ.
    fn number(&self) -> u32;

    /// Returns the number of entries that the CQ has room for.
    fn cqe(&self) -> u32;

    /// Holds completion events back until there are `count` completions, or `period` microseconds
    /// have passed since the first of them; not at all if either is 0. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device cannot, or what it says.
    fn moderate(&self, count: u16, period: u16) -> Result;

    /// Gives a program's CQ room for `cqe` entries. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the CQ cannot be resized, `EINVAL` for sizes, or what the device says.
    fn resize(&self, dev: &Device<D>, cqe: u32, udata: &Udata<'_>) -> Result;

    /// Moves completions to `wcs` until it is full or no completion is left. Any context.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if a program polls the CQ itself.
    fn poll(&self, wcs: &mut Wcs<'_>) -> Result;

    /// Asks for one call of the completion handler, at the next completion or at the next solicited
    /// one. Any context. True if completions are there already and `report_missed` asked to be told.
    fn req_notify(&self, solicited: bool, report_missed: bool) -> bool;

    /// Adds what `rdma resource show` tells of the object. May sleep.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE`.
    fn details(&self, details: &mut Details<'_>) -> Result;
}

impl<T> Object<bindings::ib_cq, T> {
    /// Calls the completion handler, if the consumer has set one by now. Any context.
    pub(crate) fn complete(&self) {
        let raw = self.as_raw();
        // SAFETY: By the type invariants `raw` is a valid CQ. Its context was set before it came to
        // the driver; `ib_alloc_cq()` sets the handler afterwards, once, and stores one word. So it
        // is loaded once.
        unsafe {
            if let Some(handler) = (&raw const (*raw).comp_handler).read_volatile() {
                handler(raw, (*raw).cq_context);
            }
        }
    }

    /// Reports an asynchronous event of this CQ. Any context.
    pub(crate) fn report(&self, event: EventType) {
        let raw = self.as_raw();
        // SAFETY: By the type invariants `raw` is a valid CQ; handler and context were set before it
        // came to the driver.
        unsafe {
            event::report(
                (*raw).device,
                raw,
                event,
                (*raw).event_handler,
                (*raw).cq_context,
            );
        }
    }
}

/// The operations `create_cq` and `create_user_cq`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn create_cq<D: Driver>(
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
        // SAFETY: The core allocated `size_ib_cq` bytes, which are not initialised yet. `destroy_cq` takes the object
        // out of the table before it drops the data.
        let cq = unsafe {
            publish_new(
                dev,
                &dev.handles().cqs,
                raw,
                data,
                D::Cq::number,
                D::Cq::destroy,
            )?
        };
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
pub(super) unsafe extern "C" fn destroy_cq<D: Driver>(
    raw: *mut bindings::ib_cq,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: `raw` is a CQ that `create_cq` made, which the core destroys once, and frees next. Its device is
    // registered as long as it has objects. `udata` is null, or that of the system call that the core is in
    // until this returns.
    from_result(|| unsafe {
        let dev = Device::<D>::from_raw((*raw).device);
        retire_old(&dev.handles().cqs, raw, udata, D::Cq::destroy)
    })
}

/// The operation `modify_cq`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn modify_cq<D: Driver>(
    raw: *mut bindings::ib_cq,
    count: u16,
    period: u16,
) -> c_int {
    // SAFETY: `raw` is a CQ that `create_cq` made. Uverbs locks its user object, and a ULP uses no
    // CQ that it destroys, so the CQ stays until this returns.
    let cq = unsafe { Cq::<D>::from_raw(raw) };
    from_result(|| cq.moderate(count, period).map(|()| 0))
}

/// The operation `resize_user_cq`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn resize_user_cq<D: Driver>(
    raw: *mut bindings::ib_cq,
    cqe: c_uint,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: `raw` is a CQ that `create_cq` made. Uverbs locks its user object, and a ULP uses no
    // CQ that it destroys, so the CQ stays until this returns. Its device is registered as long as
    // it has objects. `udata` is null, or that of the system call that the core is in until this
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
        // SAFETY: `raw` is a valid CQ until this returns. A thread that reads the number meanwhile gets the old or
        // the new one.
        unsafe { (&raw mut (*raw).cqe).write_volatile(cqe as c_int) };
        Ok(0)
    })
}

/// The operation `poll_cq`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn poll_cq<D: Driver>(
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
    // SAFETY: `raw` is a CQ that `create_cq` made. Uverbs locks its user object, and a ULP uses no
    // CQ that it destroys, so the CQ stays until this returns. Its device is registered as long as
    // it has objects. `wc` has room for `num` completions. The CQ of a program has a user object
    // all its life.
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
pub(crate) unsafe fn req_notify_cq<D: Driver>(
    raw: *mut bindings::ib_cq,
    flags: bindings::ib_cq_notify_flags,
) -> c_int {
    // SAFETY: `raw` is a CQ that `create_cq` made. Uverbs locks its user object, and a ULP uses no
    // CQ that it destroys, so the CQ stays until this returns.
    let cq = unsafe { Cq::<D>::from_raw(raw) };
    let solicited = flags & bindings::ib_cq_notify_flags_IB_CQ_SOLICITED_MASK
        == bindings::ib_cq_notify_flags_IB_CQ_SOLICITED;
    let report_missed = flags & bindings::ib_cq_notify_flags_IB_CQ_REPORT_MISSED_EVENTS != 0;

    c_int::from(cq.req_notify(solicited, report_missed))
}

/// The operation `fill_res_cq_entry`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn fill_res_cq_entry<D: Driver>(
    message: *mut bindings::sk_buff,
    raw: *mut bindings::ib_cq,
) -> c_int {
    // SAFETY: The core calls with a CQ of this driver that it keeps until this returns, and with a message
    // that nobody else uses.
    unsafe { restrack::nest(message, |details| Cq::<D>::from_raw(raw).details(details)) }
}
