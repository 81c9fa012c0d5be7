// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Queue pairs (IBA 10.2.4).
#![forbid(unsafe_code)]

use crate::{
    attr::cqs,
    bindings::*,
    causes::{Cause, cause},
    cmd,
    errno::{Errno, Result},
    limits::{Limits, Opcodes, QpType},
    log::Refuse,
    object::{Blank, Extended, Object, Owned, Ref},
    owed::Doorbell,
    pd::Domain,
    qp_table::Registration,
    ring::{Resource, Ring, RingRegion, Writer},
    wq::{self, Freed, Posted, WorkQueue},
    wqe,
    wr::{List, Request},
};
use core::ffi::c_int;

/// A QP: `struct verbs_qp` and the provider's private data.
pub type Qp = Object<verbs_qp>;

impl Extended for verbs_qp {
    type Private = QpPrivate;
}

/// The private data of a QP.
pub struct QpPrivate {
    /// The limits of a work request.
    limits: Limits,
    /// The rings, if the program has them.
    rings: Option<Rings>,
    /// The domain that the rings' memory came from; the last field, because it must be dropped
    /// last.
    _domain: Domain,
}

impl QpPrivate {
    /// Returns the private data of an XRC target, to which nobody posts.
    fn of_xrc_target() -> Self {
        Self { limits: Limits::of_receives(0), rings: None, _domain: Domain::NONE }
    }

    /// Returns the limits of a work request.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Returns the rings, if the program has them.
    pub fn rings(&self) -> Option<&Rings> {
        self.rings.as_ref()
    }
}

/// Most bytes of inline data that a QP gets beyond what the program asked for, if its entries have
/// room for them.
const FREE_INLINE_DATA: u32 = 96;

/// The queues of a QP that has no number yet.
struct Queues {
    region: RingRegion,
    /// Bytes of inline data that cost nothing.
    free_inline_data: u32,
    send: WorkQueue,
    /// `None` with an SRQ, or for a QP that receives nothing.
    recv: Option<WorkQueue>,
}

/// The queues of a QP whose rings the program has.
pub struct Rings {
    queues: Queues,
    registration: Registration,
    send_doorbell: Doorbell,
    recv_doorbell: Doorbell,
}

impl Rings {
    fn new(queues: Queues, registration: Registration) -> Self {
        let (send_doorbell, recv_doorbell) = Default::default();
        Self { queues, registration, send_doorbell, recv_doorbell }
    }

    /// Returns the doorbell of the send queue.
    pub fn send_doorbell(&self) -> &Doorbell {
        &self.send_doorbell
    }

    /// Returns the doorbell of the receive queue.
    pub fn recv_doorbell(&self) -> &Doorbell {
        &self.recv_doorbell
    }

    /// Returns the send queue.
    pub fn send(&self) -> &WorkQueue {
        &self.queues.send
    }

    /// Returns how the send queue learns which of its entries are free.
    fn send_freed(&self) -> Freed<'_> {
        Freed::Completed(self.registration.progress().send())
    }

    /// Posts a list of sends; `encode` and `refuse` are those of [`wq::State::post`].
    #[inline]
    pub fn post_send(
        &self,
        list: List<'_, ibv_send_wr>,
        encode: impl Fn(&Request<'_, ibv_send_wr>, Writer<'_>) -> Result<(), Cause>,
        refuse: impl Fn(Cause) -> Errno,
    ) -> Posted<ibv_send_wr> {
        let Queues { region, send, .. } = &self.queues;
        send.post(region, wq::SEND, self.send_freed(), list, encode, refuse)
    }

    /// Posts a list of receives, as [`Self::post_send`]. Returns `None` if the QP has no receive queue of
    /// its own.
    #[inline]
    pub fn post_recv(
        &self,
        list: List<'_, ibv_recv_wr>,
        encode: impl Fn(&Request<'_, ibv_recv_wr>, Writer<'_>) -> Result<(), Cause>,
        refuse: impl Fn(Cause) -> Errno,
    ) -> Option<Posted<ibv_recv_wr>> {
        let recv = self.queues.recv.as_ref()?;
        let freed = Freed::Completed(self.registration.progress().recv());
        Some(recv.post(&self.queues.region, wq::RECV, freed, list, encode, refuse))
    }

    /// Returns the entry of the send ring to write the next work request to.
    ///
    /// # Errors
    ///
    /// ENOMEM if no entry is free.
    pub fn entry(&self, state: &mut wq::State) -> Result<Writer<'_>, Cause> {
        state.entry(&self.queues.region, self.send_freed())
    }

    /// Tells the device of the send work requests that were written. Returns whether the device
    /// wants a doorbell, which the caller rings.
    pub fn publish(&self, state: &mut wq::State) -> bool {
        state.publish(&self.queues.region, wq::SEND, self.send_freed())
    }

    /// Makes the next send ask for the doorbell, which did not ring.
    pub fn send_not_rung(&self) {
        wq::SEND.not_rung(&self.queues.region);
    }

    /// Makes the next receive ask for the doorbell, which did not ring.
    pub fn recv_not_rung(&self) {
        wq::RECV.not_rung(&self.queues.region);
    }

    /// Empties the queues, and drops their CQEs.
    fn reset(&self) {
        let Self { queues, registration, .. } = self;
        registration.reset();
        queues.send.reset(&queues.region, wq::SEND);
        if let Some(recv) = &queues.recv {
            recv.reset(&queues.region, wq::RECV);
        }
    }
}

impl Queues {
    /// Allocates rings for the queues that `attr` asks for, on a device that takes
    /// `max_inline_data` bytes of inline data.
    ///
    /// # Errors
    ///
    /// EINVAL for depths or entries that no ring can hold; ENOMEM.
    fn new(
        attr: &ibv_qp_init_attr_ex,
        max_inline_data: u32,
        domain: &Domain,
    ) -> Result<Self, Cause> {
        let cap = &attr.cap;
        let header = wqe::send_header(attr.qp_type.into());
        // The driver gives each send queue at least one SGE.
        let data = wqe::sges(cap.max_send_sge.max(1)).max(cap.max_inline_data as usize);
        let stride = header.saturating_add(data);
        let send = Ring::new(size_of::<virtio_rdma_qp_ring>(), cap.max_send_wr, stride)?;
        let room = (send.stride() - header) as u32;
        let free_inline_data = room.min(FREE_INLINE_DATA).min(max_inline_data);
        let mut end = send.end();
        let mut recv = None;
        if cap.max_recv_wr != 0 && attr.srq.is_null() {
            let stride = wqe::RECV_HEADER.saturating_add(wqe::sges(cap.max_recv_sge));
            let ring = Ring::new(end, cap.max_recv_wr, stride)?;
            end = ring.end();
            recv = Some(WorkQueue::new(ring, domain.threads));
        }
        let region = RingRegion::lent(end, domain.barriers, domain.allocator, Resource::Qp)?;
        let send = WorkQueue::new(send, domain.threads);
        Ok(Self { region, free_inline_data, send, recv })
    }

    /// Returns the description of the rings for the driver.
    fn request(&self) -> virtio_rdma_ureq_create_qp {
        let send = self.send.ring();
        let mut request = virtio_rdma_ureq_create_qp {
            buf_addr: self.region.addr(),
            buf_len: self.region.size() as u64,
            sq_depth: send.depth(),
            sq_stride: send.stride() as u32,
            sq_offset: send.offset(),
            ..Default::default()
        };
        if let Some(recv) = self.recv.as_ref().map(WorkQueue::ring) {
            request.rq_depth = recv.depth();
            request.rq_stride = recv.stride() as u32;
            request.rq_offset = recv.offset();
        }
        request
    }

    /// Returns the capabilities that the QP really has, if the program asked for `cap`.
    fn cap(&self, cap: ibv_qp_cap) -> ibv_qp_cap {
        ibv_qp_cap {
            max_send_wr: self.send.ring().depth(),
            max_recv_wr: self.recv.as_ref().map_or(0, |recv| recv.ring().depth()),
            max_inline_data: cap.max_inline_data.max(self.free_inline_data),
            ..cap
        }
    }
}

/// Creates a QP: ibv_create_qp(3). Sets `attr.cap` to what the QP really has.
///
/// # Errors
///
/// EINVAL for queues that no QP has, or without a CQ; ENOMEM; the kernel's.
pub fn create(pd: Ref<'_, ibv_pd>, attr: &mut ibv_qp_init_attr) -> Result<Owned<Qp>> {
    let mut extended = ibv_qp_init_attr_ex {
        qp_context: attr.qp_context,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        cap: attr.cap,
        qp_type: attr.qp_type,
        sq_sig_all: attr.sq_sig_all,
        comp_mask: IBV_QP_INIT_ATTR_PD,
        pd: pd.as_ptr(),
        ..Default::default()
    };
    let qp = create_in(pd, &mut extended)?;
    attr.cap = extended.cap;
    Ok(qp)
}

/// Creates a QP in `pd`, which `attr` names too. Sets `attr.cap` to what the QP really has.
fn create_in(pd: Ref<'_, ibv_pd>, attr: &mut ibv_qp_init_attr_ex) -> Result<Owned<Qp>> {
    if QpType::from(attr.qp_type) == QpType::XrcInitiator {
        (attr.cap.max_recv_wr, attr.cap.max_recv_sge) = (0, 0);
    }
    let qp = Blank::<verbs_qp>::new()?;
    let context = pd.context();
    let domain = Domain::of(pd.whole()).with(context.private().barriers);
    let Some(table) = &context.private().qp_table else {
        cmd::qp::create(pd, attr, qp.verbs(), None)?;
        let limits = Limits::new(attr);
        return Ok(qp.finish(QpPrivate { limits, rings: None, _domain: Domain::NONE }));
    };
    let private = context.private();
    private.sizes.check_qp(&attr.cap, !attr.srq.is_null()).map_err(|cause| pd.refuse(cause))?;
    let queues = Queues::new(attr, private.max_inline_data, &domain);
    let queues = queues.map_err(|cause| pd.refuse(cause))?;
    let mut got = ibv_qp_init_attr_ex { cap: queues.cap(attr.cap), ..*attr };
    let no_cq = || pd.refuse(cause!(EINVAL, "a QP without a CQ is wanted"));
    let (send_cq, recv_cq) = cqs(attr).ok_or_else(no_cq)?;
    cmd::qp::create(pd, &mut got, qp.verbs(), Some(queues.request()))?;
    let number = qp.verbs().qp().number();
    let (send_cq, recv_cq) = (send_cq.private().state(), recv_cq.private().state());
    match Registration::new(table, number, send_cq, recv_cq) {
        Ok(registration) => {
            if !attr.srq.is_null() {
                registration.progress().share_receives();
            }
            attr.cap = queues.cap(attr.cap);
            let rings = Some(Rings::new(queues, registration));
            Ok(qp.finish(QpPrivate { limits: Limits::new(attr), rings, _domain: domain }))
        }
        Err(errno) => {
            // The error that counts is the first.
            let _ = cmd::qp::destroy(qp.verbs().qp());
            Err(errno)
        }
    }
}

/// Creates a QP: ibv_create_qp_ex(3). Returns it, and whether it takes work requests by calls as
/// well.
///
/// # Errors
///
/// EINVAL without a PD; EOPNOTSUPP for attributes, flags or work requests that no QP
/// of the device has, or work requests by calls where the kernel posts; otherwise as [`create`].
pub fn create_ex(
    context: Ref<'_, ibv_context>,
    pd: Option<Ref<'_, ibv_pd>>,
    attr: &mut ibv_qp_init_attr_ex,
) -> Result<(Owned<Qp>, bool)> {
    const MASK: u32 =
        IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    let has_flags = attr.comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS != 0;
    let create_flags = if has_flags { attr.create_flags } else { 0 };
    let unknown = attr.comp_mask & !MASK;
    if unknown != 0 {
        let cause = cause!(EOPNOTSUPP, "a QP with the unknown attributes 0x%x is wanted", unknown);
        return Err(context.refuse(cause));
    }
    let unknown = create_flags & !IBV_QP_CREATE_BLOCK_SELF_MCAST_LB;
    if unknown != 0 {
        let cause = cause!(EOPNOTSUPP, "a QP with the unknown flags 0x%x is wanted", unknown);
        return Err(context.refuse(cause));
    }
    let no_pd = || context.refuse(cause!(EINVAL, "a QP without a PD is wanted"));
    let pd = pd.filter(|_| attr.comp_mask & IBV_QP_INIT_ATTR_PD != 0).ok_or_else(no_pd)?;
    let by_calls = attr.comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0;
    if by_calls {
        check_calls(pd, attr)?;
    }
    Ok((create_in(pd, attr)?, by_calls))
}

/// Checks that a QP can have the work requests by calls that a program wants.
///
/// # Errors
///
/// EOPNOTSUPP if it cannot.
fn check_calls(pd: Ref<'_, ibv_pd>, attr: &ibv_qp_init_attr_ex) -> Result {
    let context = pd.context().private();
    if context.qp_table.is_none() {
        let cause = cause!(EOPNOTSUPP, "work requests by calls are wanted, and the kernel posts");
        return Err(pd.refuse(cause));
    }
    let opcodes = Opcodes::of_type(attr.qp_type.into()).intersection(context.opcodes);
    let unknown = attr.send_ops_flags & !opcodes.send_ops_flags();
    if unknown != 0 {
        let bit = unknown.trailing_zeros();
        let cause = cause!(EOPNOTSUPP, "a QP with bit %u of send_ops_flags is wanted", bit);
        return Err(pd.refuse(cause));
    }
    Ok(())
}

/// Creates an XRC target, which has no queues: ibv_create_qp_ex(3).
///
/// # Errors
///
/// EOPNOTSUPP for attributes that it does not have, or if the device has no such
/// QPs; EINVAL without an XRC domain; ENOMEM; the kernel's.
pub fn create_xrc_target(
    context: Ref<'_, ibv_context>,
    attr: &mut ibv_qp_init_attr_ex,
) -> Result<Owned<Qp>> {
    let unknown = attr.comp_mask & !(IBV_QP_INIT_ATTR_XRCD | IBV_QP_INIT_ATTR_PD);
    if unknown != 0 {
        let cause = cause!(EOPNOTSUPP, "an XRC target with the attributes 0x%x is wanted", unknown);
        return Err(context.refuse(cause));
    }
    let qp = Blank::<verbs_qp>::new()?;
    cmd::qp::create_xrc_target(context, attr, qp.verbs())?;
    Ok(qp.finish(QpPrivate::of_xrc_target()))
}

/// Opens an XRC target that any program created: ibv_open_qp(3).
///
/// # Errors
///
/// As [`create_xrc_target`].
pub fn open(context: Ref<'_, ibv_context>, attr: &mut ibv_qp_open_attr) -> Result<Owned<Qp>> {
    let qp = Blank::<verbs_qp>::new()?;
    cmd::qp::open(context, attr, qp.verbs())?;
    Ok(qp.finish(QpPrivate::of_xrc_target()))
}

/// Changes the attributes of a QP: ibv_modify_qp(3). A QP that comes to RESET has empty queues,
/// and no CQEs.
///
/// # Errors
///
/// The kernel's; the queues then stay as they are.
pub fn modify(qp: Ref<'_, Qp>, attr: &mut ibv_qp_attr, mask: c_int) -> Result {
    cmd::qp::modify(qp.qp(), attr, mask)?;
    let is_reset = mask & IBV_QP_STATE as c_int != 0 && attr.qp_state == IBV_QPS_RESET;
    if let (true, Some(rings)) = (is_reset, qp.private().rings()) {
        rings.reset();
    }
    Ok(())
}

/// Reads the attributes of a QP: ibv_query_qp(3).
///
/// # Errors
///
/// The kernel's.
pub fn query(
    qp: Ref<'_, Qp>,
    attr: &mut ibv_qp_attr,
    mask: c_int,
    init: &mut ibv_qp_init_attr,
) -> Result {
    cmd::qp::query(qp.qp(), attr, mask, init)?;
    let QpPrivate { limits, rings, .. } = qp.private();
    if let Some(rings) = rings {
        attr.cap = rings.queues.cap(ibv_qp_cap {
            max_send_sge: limits.max_send_sge,
            max_recv_sge: limits.max_recv_sge,
            max_inline_data: limits.max_inline_data,
            ..Default::default()
        });
        init.cap = attr.cap;
    }
    Ok(())
}

/// Checks that a QP is in a state to post sends (IBA 10.8.2).
///
/// # Errors
///
/// EINVAL if it is not.
pub fn check_can_send(qp: Ref<'_, Qp>) -> Result<(), Cause> {
    match qp.qp().state() {
        IBV_QPS_RTS | IBV_QPS_SQD | IBV_QPS_SQE | IBV_QPS_ERR => Ok(()),
        state => Err(cause!(EINVAL, "the QP is in state %u, in which it cannot send", state)),
    }
}

#[cfg(test)]
impl QpPrivate {
    /// A QP that the kernel does not know.
    pub fn without_kernel(attr: &ibv_qp_init_attr_ex, registration: Registration) -> Self {
        let queues = Queues::new(attr, 0, &Domain::NONE).unwrap();
        let rings = Some(Rings::new(queues, registration));
        Self { limits: Limits::new(attr), rings, _domain: Domain::NONE }
    }

    /// Returns the description of the rings for the driver.
    pub fn request(&self) -> virtio_rdma_ureq_create_qp {
        self.rings.as_ref().unwrap().queues.request()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn init(qp_type: ibv_qp_type, cap: [u32; 5]) -> ibv_qp_init_attr_ex {
        let [max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data] = cap;
        let cap =
            ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data };
        ibv_qp_init_attr_ex { qp_type, cap, ..Default::default() }
    }

    #[test]
    fn rings_hold_what_was_asked_for() {
        for (qp_type, cap, send, recv) in [
            (IBV_QPT_RC, [128, 128, 1, 1, 0], (128, 64, 256), (128, 32, 8448)),
            (IBV_QPT_RC, [100, 0, 4, 9, 236], (128, 512, 512), (0, 0, 0)),
            (IBV_QPT_UD, [0, 1, 0, 0, 0], (1, 128, 256), (1, 32, 384)),
            (IBV_QPT_XRC_SEND, [1, 0, 0, 0, 0], (1, 128, 256), (0, 0, 0)),
            (IBV_QPT_UC, [3, 3, 253, 255, 0], (4, 4096, 4096), (4, 4096, 20480)),
        ] {
            let queues = Queues::new(&init(qp_type, cap), 0, &Domain::NONE).unwrap();
            let request = queues.request();
            assert_eq!((request.sq_depth, request.sq_stride, request.sq_offset), send);
            assert_eq!((request.rq_depth, request.rq_stride, request.rq_offset), recv);
            let end = u64::from(request.sq_offset + request.sq_depth * request.sq_stride)
                .max(u64::from(request.rq_offset + request.rq_depth * request.rq_stride));
            assert!(request.buf_len >= end && request.buf_len.is_multiple_of(4096));
            assert!(request.buf_addr.is_multiple_of(4096));
            let got = queues.cap(init(qp_type, cap).cap);
            assert_eq!((got.max_send_wr, got.max_recv_wr), (send.0, recv.0));
        }
    }

    /// A QP gets the inline data that its entries have room for anyway: 96 bytes at most, and no
    /// more than the device takes. If a program asks for more than the device takes, the driver
    /// refuses that.
    #[test]
    fn inline_data_that_costs_nothing() {
        for (qp_type, sges, asked, device, got) in [
            (IBV_QPT_RC, 1, 0, 512, 16),
            (IBV_QPT_RC, 0, 0, 512, 16),
            (IBV_QPT_RC, 2, 0, 512, 80),
            (IBV_QPT_RC, 4, 0, 512, 80),
            (IBV_QPT_RC, 1, 17, 512, 80),
            (IBV_QPT_RC, 6, 0, 512, 96),
            (IBV_QPT_RC, 16, 0, 512, 96),
            (IBV_QPT_RC, 16, 97, 512, 97),
            (IBV_QPT_UD, 1, 0, 512, 48),
            (IBV_QPT_XRC_SEND, 1, 0, 512, 64),
            (IBV_QPT_RC, 4, 0, 60, 60),
            (IBV_QPT_RC, 4, 61, 60, 61),
            (IBV_QPT_RC, 4, 0, 0, 0),
        ] {
            let attr = init(qp_type, [8, 0, sges, 1, asked]);
            let queues = Queues::new(&attr, device, &Domain::NONE).unwrap();
            let plain = Queues::new(&attr, 0, &Domain::NONE).unwrap();
            assert_eq!(queues.cap(attr.cap).max_inline_data, got, "{sges} SGEs, {asked}");
            let [with, without] = [&queues, &plain].map(Queues::request);
            assert_eq!((with.sq_stride, with.buf_len), (without.sq_stride, without.buf_len));
        }
    }

    #[test]
    fn rings_that_cannot_be_are_refused() {
        for cap in [
            [u32::MAX, 0, 1, 1, 0],
            [1, u32::MAX, 1, 1, 0],
            [1 << 31, 1 << 31, 1, 1, 0],
            [1, 1, 254, 1, 0],
            [1, 1, 1, 256, 0],
            [1, 1, 1, 1, u32::MAX],
            [1, 1, u32::MAX, u32::MAX, 0],
        ] {
            let queues = Queues::new(&init(IBV_QPT_RC, cap), 512, &Domain::NONE);
            assert_eq!(queues.err().map(Cause::errno), Some(Errno::EINVAL), "{cap:?}");
        }
    }
}
