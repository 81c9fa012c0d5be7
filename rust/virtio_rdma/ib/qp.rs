// SPDX-License-Identifier: GPL-2.0

//! Queue pairs: `struct ib_qp`.

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
        Qp,
        Srq,
        Xrcd, //
    },
    port::gid_bytes,
    restrack::{
        self,
        Details, //
    },
    srq::SharedReceiveQueue,
    udata::{
        no_driver_data,
        Udata, //
    },
    wr::{
        finish_post,
        Poster,
        RecvQueue,
        RecvWrs,
        SendWrs, //
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
    /// The state of a QP, `enum ib_qp_state` (IBA 10.3.1).
    QpState {
        /// Nothing can be posted, and nothing arrives.
        Reset = ib_qp_state_IB_QPS_RESET,
        /// Receives can be posted.
        Init = ib_qp_state_IB_QPS_INIT,
        /// Ready to receive.
        Rtr = ib_qp_state_IB_QPS_RTR,
        /// Ready to send.
        Rts = ib_qp_state_IB_QPS_RTS,
        /// The send queue is drained: no further send begins.
        Sqd = ib_qp_state_IB_QPS_SQD,
        /// A send of a QP without connection failed.
        Sqe = ib_qp_state_IB_QPS_SQE,
        /// All work requests are flushed.
        Err = ib_qp_state_IB_QPS_ERR,
    }
}

c_enum! {
    /// The type of a QP, `enum ib_qp_type`, as far as this abstraction knows it.
    QpType {
        /// The QP of the general services interface, QP 1.
        Gsi = ib_qp_type_IB_QPT_GSI,
        /// Reliable connection.
        Rc = ib_qp_type_IB_QPT_RC,
        /// Unreliable connection.
        Uc = ib_qp_type_IB_QPT_UC,
        /// Unreliable datagram.
        Ud = ib_qp_type_IB_QPT_UD,
        /// The sending end of an extended reliable connection.
        XrcIni = ib_qp_type_IB_QPT_XRC_INI,
        /// The receiving end of an extended reliable connection.
        XrcTgt = ib_qp_type_IB_QPT_XRC_TGT,
    }
}

impl QpType {
    /// Returns whether each send work request names its own destination.
    pub(crate) fn has_datagrams(self) -> bool {
        matches!(self, Self::Ud | Self::Gsi)
    }
}

/// Returns whether IBA allows a QP of this type to go from one state to another with the attributes of `mask`
/// (`enum ib_qp_attr_mask`).
pub(crate) fn modify_is_ok(current: QpState, next: QpState, qp_type: QpType, mask: u32) -> bool {
    // SAFETY: The function has no requirements: it looks its arguments up in a table of the core.
    unsafe { bindings::ib_modify_qp_is_ok(current.into(), next.into(), qp_type.into(), mask) }
}

/// The attributes that a QP is created with.
pub(crate) struct QpInitAttr<'a, D: Driver> {
    /// The type.
    pub(crate) qp_type: QpType,
    /// Whether every send work request completes with a CQE.
    pub(crate) signal_all: bool,
    /// The PD. Some types of QPs have no PD, no CQ or no domain.
    pub(crate) pd: Option<&'a Pd<D>>,
    /// The CQ of sends.
    pub(crate) send_cq: Option<&'a Cq<D>>,
    /// The CQ of receives.
    pub(crate) recv_cq: Option<&'a Cq<D>>,
    /// The extended connection domain.
    pub(crate) xrcd: Option<&'a Xrcd<D>>,
    /// Sizes of the work queues.
    pub(crate) cap: bindings::ib_qp_cap,
    /// Flags of `enum ib_qp_create_flags`.
    pub(crate) create_flags: u32,
    /// The shared receive queue that the QP shall receive from.
    pub(crate) srq: Option<&'a Srq<D>>,
    /// The way back to the program; `None` if the kernel creates the object for itself.
    pub(crate) udata: Option<Udata<'a>>,
}

impl<D: Driver> QpInitAttr<'_, D> {
    /// Returns the number of the shared receive queue, if there is one.
    pub(crate) fn srq_number(&self) -> Option<u32> {
        self.srq.map(|srq| srq.number())
    }
}

/// A queue pair.
pub(crate) trait QueuePair<D: Driver>: Sized + Send + Sync {
    /// Creates the QP. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` for a type or a flag that the driver does not know, `EINVAL` for sizes beyond
    /// the limits, `ENOMEM`, or what the device says.
    fn create(dev: &Device<D>, attr: &QpInitAttr<'_, D>) -> Result<impl PinInit<Self, Error>>;

    /// Changes attributes of the QP. May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a transition that IBA does not have, or what the device says.
    fn modify(&self, attr: &bindings::ib_qp_attr, mask: u32) -> Result;

    /// Reads the attributes of the QP, into a structure zeroed before. May sleep.
    ///
    /// # Errors
    ///
    /// What the device says.
    fn query(&self, attr: &mut bindings::ib_qp_attr) -> Result;

    /// Destroys the QP in the device. May sleep. The QP is dropped afterwards, unless this fails.
    ///
    /// # Errors
    ///
    /// What the device says; the object then lives on.
    fn destroy(&self) -> Result;

    /// Returns the device's number of the QP.
    fn number(&self) -> u32;

    /// Returns the sizes that the QP has.
    fn cap(&self) -> bindings::ib_qp_cap;

    /// Returns whether every send work request completes with a CQE.
    fn signals_all(&self) -> bool;

    /// Posts send work requests. Any context.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a work request that is malformed or not allowed in the state of the QP,
    /// `ENOMEM` if the queue is full. Those before the one that `wrs` stopped at are posted.
    fn post_send(&self, wrs: &mut SendWrs<'_, D>) -> Result;

    /// Posts receive work requests. Any context.
    ///
    /// # Errors
    ///
    /// The errors of [`QueuePair::post_send`].
    fn post_recv(&self, wrs: &mut RecvWrs<'_>) -> Result;

    /// Tells the device that a program has posted to its own send ring: POST_SEND without work
    /// requests. Any context.
    ///
    /// # Errors
    ///
    /// `EIO` if the device has failed.
    fn ring_send_doorbell(&self) -> Result;

    /// Tells the device that a program has posted to its own receive ring: POST_RECV without work
    /// requests. Any context.
    ///
    /// # Errors
    ///
    /// The errors of [`QueuePair::ring_send_doorbell`].
    fn ring_recv_doorbell(&self) -> Result;

    /// Attaches the QP to a multicast group, if it is not yet. May sleep.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device has no multicast, `ENOMEM` beyond its limits, or what else the device
    /// says.
    fn attach_mcast(&self, gid: [u8; 16]) -> Result;

    /// Detaches the QP from a multicast group. May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it is not attached to it.
    fn detach_mcast(&self, gid: [u8; 16]) -> Result;

    /// Adds what `rdma resource show` tells of the object. May sleep.
    ///
    /// # Errors
    ///
    /// `EMSGSIZE`.
    fn details(&self, details: &mut Details<'_>) -> Result;
}

impl<T> Object<bindings::ib_qp, T> {
    /// Reports an asynchronous event of this QP. May sleep: the core promises handlers of QPs the context
    /// of a work queue (`struct ib_qp_init_attr`).
    pub(crate) fn report(&self, event: EventType) {
        let raw = self.as_raw();
        // SAFETY: By the type invariants `raw` is a valid QP. The core set handler and context before the QP came
        // to the driver. For an XRC target it sets them a second time, before anybody can change the state of
        // the QP, and the driver reports nothing of a target until its state was changed.
        unsafe {
            event::report(
                (*raw).device,
                raw,
                event,
                (*raw).event_handler,
                (*raw).qp_context,
            );
        }
    }

    /// Fills in what the core knows of how the QP was created.
    pub(crate) fn fill_init_attr(&self, init: &mut bindings::ib_qp_init_attr) {
        let raw = self.as_raw();
        // SAFETY: By the type invariants the QP is valid, and these members do not change. There is
        // no reference to the whole, since the core changes others meanwhile.
        unsafe {
            init.event_handler = (*raw).event_handler;
            init.qp_context = (*raw).qp_context;
            init.send_cq = (*raw).send_cq;
            init.recv_cq = (*raw).recv_cq;
            init.srq = (*raw).srq;
            init.xrcd = (*raw).xrcd;
            init.qp_type = (*raw).qp_type;
            init.port_num = (*raw).port;
        }
    }
}

/// The operation `create_qp`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn create_qp<D: Driver>(
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
        // SAFETY: `udata` is null, or that of the system call that the core is in until this returns.
        let udata = unsafe { Udata::from_raw(udata) };
        udata.as_ref().map_or(Ok(()), Udata::no_answer)?;
        let qp_type = QpType::try_from(init.qp_type)
            .map_err(|_| refuse(unsupported(), c"the type of a QP", init.qp_type.into(), 0))?;
        // SAFETY: What `init` and `pd` name are objects that the functions here made and that the
        // core has counted this QP as a user of, or null where a QP of this type has no such object.
        let attr = unsafe {
            QpInitAttr {
                qp_type,
                signal_all: init.sq_sig_type == bindings::ib_sig_type_IB_SIGNAL_ALL_WR,
                pd: (!pd.is_null()).then(|| Pd::<D>::from_raw(pd)),
                send_cq: (!init.send_cq.is_null()).then(|| Cq::<D>::from_raw(init.send_cq)),
                recv_cq: (!init.recv_cq.is_null()).then(|| Cq::<D>::from_raw(init.recv_cq)),
                xrcd: (!init.xrcd.is_null()).then(|| Xrcd::<D>::from_raw(init.xrcd)),
                cap: init.cap,
                create_flags: init.create_flags,
                srq: (!init.srq.is_null()).then(|| Srq::<D>::from_raw(init.srq)),
                udata,
            }
        };
        let data = D::Qp::create(dev, &attr)?;
        // SAFETY: The core allocated `size_ib_qp` bytes, which are not initialised yet. `destroy_qp` takes the object
        // out of the table before it drops the data.
        let qp = unsafe {
            publish_new(
                dev,
                &dev.handles().qps,
                raw,
                data,
                D::Qp::number,
                D::Qp::destroy,
            )?
        };
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
pub(super) unsafe extern "C" fn modify_qp<D: Driver>(
    raw: *mut bindings::ib_qp,
    attr: *mut bindings::ib_qp_attr,
    mask: c_int,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: `raw` is a QP that `create_qp` made. Uverbs locks its user object, and a ULP uses no
    // QP that it destroys, so the QP stays until this returns. `attr` is the core's own.
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
pub(super) unsafe extern "C" fn query_qp<D: Driver>(
    raw: *mut bindings::ib_qp,
    attr: *mut bindings::ib_qp_attr,
    _mask: c_int,
    init: *mut bindings::ib_qp_init_attr,
) -> c_int {
    // SAFETY: `raw` is a QP that `create_qp` made. Uverbs locks its user object, and a ULP uses no
    // QP that it destroys, so the QP stays until this returns. `attr` and `init` are the caller's,
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
pub(super) unsafe extern "C" fn destroy_qp<D: Driver>(
    raw: *mut bindings::ib_qp,
    udata: *mut bindings::ib_udata,
) -> c_int {
    // SAFETY: `raw` is a QP that `create_qp` made, which the core destroys once, and frees next. Its device is
    // registered as long as it has objects. `udata` is null, or that of the system call that the core is in
    // until this returns.
    from_result(|| unsafe {
        let dev = Device::<D>::from_raw((*raw).device);
        retire_old(&dev.handles().qps, raw, udata, D::Qp::destroy)
    })
}

/// The operation `attach_mcast`. RoCE has no LIDs.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn attach_mcast<D: Driver>(
    raw: *mut bindings::ib_qp,
    gid: *mut bindings::ib_gid,
    _lid: u16,
) -> c_int {
    // SAFETY: `raw` is a QP that `create_qp` made. Uverbs locks its user object, and a ULP uses no
    // QP that it destroys, so the QP stays until this returns. `gid` is the caller's.
    let (qp, gid) = unsafe { (Qp::<D>::from_raw(raw), gid_bytes(&*gid)) };
    from_result(|| qp.attach_mcast(gid).map(|()| 0))
}

/// The operation `detach_mcast`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn detach_mcast<D: Driver>(
    raw: *mut bindings::ib_qp,
    gid: *mut bindings::ib_gid,
    _lid: u16,
) -> c_int {
    // SAFETY: `raw` is a QP that `create_qp` made. Uverbs locks its user object, and a ULP uses no QP that it destroys,
    // so the QP stays until this returns. `gid` is the caller's.
    let (qp, gid) = unsafe { (Qp::<D>::from_raw(raw), gid_bytes(&*gid)) };
    from_result(|| qp.detach_mcast(gid).map(|()| 0))
}

/// The operation `post_send`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn post_send<D: Driver>(
    raw: *mut bindings::ib_qp,
    wr: *const bindings::ib_send_wr,
    bad: *mut *const bindings::ib_send_wr,
) -> c_int {
    // SAFETY: `raw` is a QP that `create_qp` made. Uverbs locks its user object, and a ULP uses no
    // QP that it destroys, so the QP stays until this returns. `wr` heads the caller's list for a
    // QP of this type, which may be empty.
    let (qp, mut wrs) = unsafe {
        let datagram = QpType::try_from((*raw).qp_type).is_ok_and(QpType::has_datagrams);
        let poster = if (*raw).uobject.is_null() {
            Poster::Kernel
        } else {
            Poster::Program
        };
        (
            Qp::<D>::from_raw(raw),
            SendWrs::new(raw, wr, datagram, poster),
        )
    };
    let result = if wr.is_null() {
        qp.ring_send_doorbell()
    } else {
        qp.post_send(&mut wrs)
    };
    // SAFETY: `bad` is valid for writes: the core gives a place of its own where the caller passed a null
    // pointer.
    unsafe { finish_post(result, wrs.current(), bad) }
}

/// The operation `post_recv`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn post_recv<D: Driver>(
    raw: *mut bindings::ib_qp,
    wr: *const bindings::ib_recv_wr,
    bad: *mut *const bindings::ib_recv_wr,
) -> c_int {
    // SAFETY: `raw` is a QP that `create_qp` made. Uverbs locks its user object, and a ULP uses no
    // QP that it destroys, so the QP stays until this returns. `wr` heads the caller's list, which
    // may be empty.
    let (qp, mut wrs) = unsafe { (Qp::<D>::from_raw(raw), RecvWrs::new(RecvQueue::Qp(raw), wr)) };
    let result = if wr.is_null() {
        qp.ring_recv_doorbell()
    } else {
        qp.post_recv(&mut wrs)
    };
    // SAFETY: `bad` is valid for writes: the core gives a place of its own where the caller passed a null
    // pointer.
    unsafe { finish_post(result, wrs.current(), bad) }
}

/// The operation `fill_res_qp_entry`.
///
/// # Safety
///
/// Only the RDMA core may call it, for a device of this driver.
pub(super) unsafe extern "C" fn fill_res_qp_entry<D: Driver>(
    message: *mut bindings::sk_buff,
    raw: *mut bindings::ib_qp,
) -> c_int {
    // SAFETY: The core calls with a QP of this driver that it keeps until this returns, and with a message
    // that nobody else uses.
    unsafe { restrack::nest(message, |details| Qp::<D>::from_raw(raw).details(details)) }
}

#[cfg(virtio_rdma_kunit)]
#[kunit_tests(virtio_rdma_ib_qp)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_c_are_converted() {
        for raw in 0..7 {
            assert!(QpState::try_from(raw).is_ok_and(|state| u32::from(state) == raw));
        }
        assert!(QpState::try_from(7).is_err());
        assert!(QpType::try_from(bindings::ib_qp_type_IB_QPT_SMI).is_err());
        assert!(QpType::try_from(bindings::ib_qp_type_IB_QPT_RAW_PACKET).is_err());
        assert!(QpType::Ud.has_datagrams() && QpType::Gsi.has_datagrams());
        assert!(!QpType::Rc.has_datagrams() && !QpType::XrcTgt.has_datagrams());
    }

    #[test]
    fn transitions_are_those_of_iba() {
        let init = bindings::ib_qp_attr_mask_IB_QP_STATE
            | bindings::ib_qp_attr_mask_IB_QP_PKEY_INDEX
            | bindings::ib_qp_attr_mask_IB_QP_PORT
            | bindings::ib_qp_attr_mask_IB_QP_ACCESS_FLAGS;
        let state = bindings::ib_qp_attr_mask_IB_QP_STATE;
        assert!(modify_is_ok(
            QpState::Reset,
            QpState::Init,
            QpType::Rc,
            init
        ));
        // A UD QP has a Q_Key in place of access flags.
        assert!(!modify_is_ok(
            QpState::Reset,
            QpState::Init,
            QpType::Ud,
            init
        ));
        assert!(!modify_is_ok(
            QpState::Reset,
            QpState::Init,
            QpType::Rc,
            state
        ));
        assert!(!modify_is_ok(
            QpState::Reset,
            QpState::Rts,
            QpType::Rc,
            init
        ));
        assert!(modify_is_ok(QpState::Rts, QpState::Err, QpType::Rc, state));
        assert!(modify_is_ok(
            QpState::Err,
            QpState::Reset,
            QpType::Uc,
            state
        ));
    }
}
