// SPDX-License-Identifier: GPL-2.0

//! Shared receive queues: `struct ib_srq`.

use super::{
    c_enum::c_enum,
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
        Object,
        Pd,
        Srq,
        Xrcd, //
    },
    restrack::{
        self,
        Details, //
    },
    udata::Udata,
    wr::{
        finish_post,
        RecvQueue,
        RecvWrs, //
    },
    Driver, //
};
use crate::{
    bindings,
    errno::unsupported, //
    trace::refuse,
};
use kernel::{
    error::from_result,
    prelude::*, //
};

c_enum! {
    /// The type of an SRQ, `enum ib_srq_type`, as far as this abstraction knows it.
    SrqType {
        /// QPs of one PD receive from it.
        Basic = ib_srq_type_IB_SRQT_BASIC,
        /// The targets of an extended connection domain receive from it.
        Xrc = ib_srq_type_IB_SRQT_XRC,
    }
}

/// The attributes that an SRQ is created with.
pub(crate) struct SrqInitAttr<'a, D: Driver> {
    /// The type.
    pub(crate) srq_type: SrqType,
    /// The PD.
    pub(crate) pd: &'a Pd<D>,
    /// Number of work requests.
    pub(crate) max_wr: u32,
    /// SGEs of each.
    pub(crate) max_sge: u32,
    /// The domain and the CQ of completions of an SRQ for XRC; `None` for a basic SRQ.
    pub(crate) xrc: Option<(&'a Xrcd<D>, &'a Cq<D>)>,
    /// The way back to the program; `None` if the kernel creates the object for itself.
    pub(crate) udata: Option<Udata<'a>>,
}

/// A shared receive queue.
pub(crate) trait SharedReceiveQueue<D: Driver>: Sized + Send + Sync {
    /// Creates the SRQ. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` for a type that the driver does not know, or if the device has no SRQs; `EINVAL`
    /// for sizes beyond the limits, `ENOMEM`, or what the device says.
    fn create(dev: &Device<D>, attr: &SrqInitAttr<'_, D>) -> Result<impl PinInit<Self, Error>>;

    /// Asks for one event when fewer than `limit` work requests wait; for no event if `limit` is 0. May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` for more than the SRQ holds, or what the device says.
    fn arm(&self, limit: u32) -> Result;

    /// Gives a program's SRQ another ring, for at least `max_wr` work requests. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the SRQ cannot be resized, `EINVAL` for sizes, or what the device says; the SRQ
    /// is then as before.
    fn resize(&self, dev: &Device<D>, max_wr: u32, udata: &Udata<'_>) -> Result;

    /// Reads the attributes of the SRQ. May sleep.
    ///
    /// # Errors
    ///
    /// What the device says.
    fn query(&self, attr: &mut bindings::ib_srq_attr) -> Result;

    /// Destroys the SRQ in the device. May sleep. It is dropped afterwards, unless this fails.
    ///
    /// # Errors
    ///
    /// What the device says; the object then lives on.
    fn destroy(&self) -> Result;

    /// Returns the device's number of the SRQ.
    fn number(&self) -> u32;

    /// Returns the number of work requests that the SRQ has room for, and SGEs of each. May sleep.
    fn sizes(&self) -> (u32, u32);

    /// Adds what `rdma resource show` tells of the object. May sleep.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE`.
    fn details(&self, details: &mut Details<'_>) -> Result;

    /// Posts receive work requests. Any context.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if a program posts itself, `EINVAL` for a work request that is malformed,
    /// `ENOMEM` if the queue is full. Those before the one that `wrs` stopped at are posted.
    fn post_recv(&self, wrs: &mut RecvWrs<'_>) -> Result;

    /// Tells the device that a program has posted to its own ring: POST_SRQ_RECV without work
    /// requests. Any context.
    ///
    /// # Errors
    ///
    /// `EIO` if the device has failed.
    fn ring_doorbell(&self) -> Result;
}

impl<T> Object<bindings::ib_srq, T> {
    /// Reports an asynchronous event of this SRQ. Any context.
    pub(crate) fn report(&self, event: EventType) {
        let raw = self.as_raw();
        // SAFETY: By the type invariants `raw` is a valid SRQ; handler and context were set before it
        // came to the driver.
        unsafe {
            event::report(
                (*raw).device,
                raw,
                event,
                (*raw).event_handler,
                (*raw).srq_context,
            );
        }
    }
}

/// The operation `create_srq`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn create_srq<D: Driver>(
    raw: *mut bindings::ib_srq,
    init: *mut bindings::ib_srq_init_attr,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: The core has set `device` of the new object to the device that it calls for, which
    // stays registered meanwhile. `init` is the caller's, and nobody else changes it before this
    // returns.
    let (dev, init) = unsafe { (Device::<D>::from_raw((*raw).device), &mut *init) };
    from_result(|| {
        // SAFETY: `udata` is null, or that of the system call that the core is in until this returns.
        let udata = unsafe { Udata::from_raw(udata) };
        udata.as_ref().map_or(Ok(()), Udata::no_answer)?;
        let srq_type = SrqType::try_from(init.srq_type).map_err(|_| {
            refuse(
                unsupported(),
                c"the type of an SRQ",
                init.srq_type.into(),
                0,
            )
        })?;
        // SAFETY: The type says which member of the union is in use. The domain and the CQ that it
        // names are from the functions here, and the core has counted this SRQ as a user of them.
        let xrc = unsafe {
            (srq_type == SrqType::Xrc).then(|| {
                let xrcd = init.ext.__bindgen_anon_1.xrc.xrcd;
                (Xrcd::<D>::from_raw(xrcd), Cq::<D>::from_raw(init.ext.cq))
            })
        };
        let attr = SrqInitAttr {
            xrc,
            srq_type,
            // SAFETY: The core has set the PD of the new SRQ to one that `alloc_pd` made, and counted
            // this SRQ as a user of it.
            pd: unsafe { Pd::<D>::from_raw((*raw).pd) },
            max_wr: init.attr.max_wr,
            max_sge: init.attr.max_sge,
            udata,
        };
        let data = D::Srq::create(dev, &attr)?;
        // SAFETY: The core allocated `size_ib_srq` bytes, which are not initialised yet. `destroy_srq` takes the object
        // out of the table before it drops the data.
        let srq = unsafe {
            publish_new(
                dev,
                &dev.handles().srqs,
                raw,
                data,
                D::Srq::number,
                D::Srq::destroy,
            )?
        };
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
pub(crate) unsafe fn modify_srq<D: Driver>(
    raw: *mut bindings::ib_srq,
    attr: *mut bindings::ib_srq_attr,
    mask: bindings::ib_srq_attr_mask,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: `raw` is an SRQ that `create_srq` made. Uverbs locks its user object, and a ULP uses
    // no SRQ that it destroys, so the SRQ stays until this returns. Its device is registered as
    // long as it has objects. `attr` is the core's own. `udata` is null, or that of the system call
    // that the core is in until this returns.
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
            let (number, limit) = (attr.srq_limit.into(), attr.max_wr.into());
            let reason = c"the limit of an SRQ beyond its size, or an unknown attribute";
            return Err(refuse(EINVAL, reason, number, limit));
        }
        if let Some(udata) = &udata {
            udata.no_answer()?;
            if !resizes {
                udata.no_request()?;
            }
        }
        if resizes {
            let udata = udata.ok_or_else(unsupported)?;
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
pub(super) unsafe extern "C" fn query_srq<D: Driver>(
    raw: *mut bindings::ib_srq,
    attr: *mut bindings::ib_srq_attr,
) -> c_int {
    // SAFETY: `raw` is an SRQ that `create_srq` made. Uverbs locks its user object, and a ULP uses
    // no SRQ that it destroys, so the SRQ stays until this returns. `attr` is the caller's, which
    // nobody else has before this returns.
    let (srq, attr) = unsafe { (Srq::<D>::from_raw(raw), &mut *attr) };
    from_result(|| srq.query(attr).map(|()| 0))
}

/// The operation `destroy_srq`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn destroy_srq<D: Driver>(
    raw: *mut bindings::ib_srq,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: `raw` is an SRQ that `create_srq` made, which the core destroys once, and frees next. Its device is
    // registered as long as it has objects. `udata` is null, or that of the system call that the core is in
    // until this returns.
    from_result(|| unsafe {
        let dev = Device::<D>::from_raw((*raw).device);
        retire_old(&dev.handles().srqs, raw, udata, D::Srq::destroy)
    })
}

/// The operation `post_srq_recv`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn post_srq_recv<D: Driver>(
    raw: *mut bindings::ib_srq,
    wr: *const bindings::ib_recv_wr,
    bad: *mut *const bindings::ib_recv_wr,
) -> c_int {
    // SAFETY: `raw` is an SRQ that `create_srq` made. Uverbs locks its user object, and a ULP uses
    // no SRQ that it destroys, so the SRQ stays until this returns. `wr` heads the caller's list,
    // which may be empty.
    let (srq, mut wrs) = unsafe {
        let srq = Srq::<D>::from_raw(raw);
        let queue = RecvQueue::Srq(raw, SharedReceiveQueue::number(&**srq));
        (srq, RecvWrs::new(queue, wr))
    };
    let result = if wr.is_null() {
        srq.ring_doorbell()
    } else {
        srq.post_recv(&mut wrs)
    };
    // SAFETY: `bad` is valid for writes: the core gives a place of its own where the caller passed a null
    // pointer.
    unsafe { finish_post(result, wrs.current(), bad) }
}

/// The operation `fill_res_srq_entry`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn fill_res_srq_entry<D: Driver>(
    message: *mut bindings::sk_buff,
    raw: *mut bindings::ib_srq,
) -> c_int {
    // SAFETY: The core calls with an SRQ of this driver that it keeps until this returns, and with a message
    // that nobody else uses.
    unsafe { restrack::nest(message, |details| Srq::<D>::from_raw(raw).details(details)) }
}
