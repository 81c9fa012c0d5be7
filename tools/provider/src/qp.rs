// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Queue pairs and their work requests (IBA 10.2.4, 10.7).
#![forbid(unsafe_code)]

use crate::{
    bindings::*,
    cmd,
    doorbell::{self, Doorbell, Queue},
    errno::{Errno, Result},
    object::{self, Blank, Owned, Qp, Ref},
    pd::Domain,
    qpn::Registration,
    ring::{Region, Resource, Ring, Writer},
    wq::{self, Freed, Posted, WorkQueue},
    wqe,
    wr::{self, List, PostError},
    wr_ex,
};
use core::ffi::c_int;

/// What the provider adds to a QP.
pub struct Private {
    /// What a work request may ask for.
    limits: Limits,
    /// The rings, if the program has them.
    rings: Option<Rings>,
    /// Where the rings' memory came from, and so goes last.
    _domain: Domain,
}

impl Private {
    /// Of a QP that nobody posts to.
    fn of_xrc_target() -> Self {
        Self { limits: Limits::of_receives(0), rings: None, _domain: Domain::NONE }
    }

    /// What a work request may ask for.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The rings, if the program has them.
    pub fn rings(&self) -> Option<&Rings> {
        self.rings.as_ref()
    }
}

/// What a work request on a QP may ask for.
#[derive(Clone, Copy)]
pub struct Limits {
    /// Type of the QP.
    pub qp_type: ibv_qp_type,
    /// SGEs of a send work request.
    pub max_send_sge: u32,
    /// SGEs of a receive work request.
    pub max_recv_sge: u32,
    /// Bytes of inline data.
    pub max_inline_data: u32,
}

impl Limits {
    fn new(attr: &ibv_qp_init_attr_ex) -> Self {
        Self {
            qp_type: attr.qp_type,
            max_send_sge: attr.cap.max_send_sge,
            max_recv_sge: attr.cap.max_recv_sge,
            max_inline_data: attr.cap.max_inline_data,
        }
    }

    /// Of the work requests of an SRQ.
    pub fn of_receives(max_recv_sge: u32) -> Self {
        Self { qp_type: 0, max_send_sge: 0, max_recv_sge, max_inline_data: 0 }
    }
}

/// Bytes of inline data that a QP gets unasked, where its entries have room for them.
const FREE_INLINE_DATA: u32 = 96;

/// The queues of a QP before it has a number.
struct Queues {
    region: Region,
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

    /// The doorbell of the send queue.
    pub fn send_doorbell(&self) -> &Doorbell {
        &self.send_doorbell
    }

    /// The doorbell of the receive queue.
    pub fn recv_doorbell(&self) -> &Doorbell {
        &self.recv_doorbell
    }

    /// The send queue.
    pub fn send(&self) -> &WorkQueue {
        &self.queues.send
    }

    /// The entry of the send ring to write the next work request to.
    ///
    /// # Errors
    ///
    /// ENOMEM if there is no free one.
    pub fn entry(&self, state: &mut wq::State) -> Result<Writer<'_>> {
        let Self { queues, registration, .. } = self;
        let freed = Freed::Completed(registration.progress().send());
        state.entry(&queues.region, freed)
    }

    /// Tells the device of the send work requests that were written; answers
    /// whether it wants a doorbell.
    pub fn publish(&self, state: &mut wq::State) -> bool {
        let Self { queues, registration, .. } = self;
        let freed = Freed::Completed(registration.progress().send());
        state.publish(&queues.region, wq::SEND, freed)
    }

    /// The doorbell of the send queue was not rung.
    pub fn not_rung(&self, head: wq::Head) {
        head.not_rung(&self.queues.region);
    }
}

impl Queues {
    /// Rings for the queues that `attr` asks for, on a device that takes `max_inline_data` bytes
    /// of inline data.
    ///
    /// # Errors
    ///
    /// EINVAL for what no ring can hold; ENOMEM.
    fn new(attr: &ibv_qp_init_attr_ex, max_inline_data: u32, domain: &Domain) -> Result<Self> {
        let cap = &attr.cap;
        let header = wqe::send_header(attr.qp_type);
        // The driver gives each send queue at least one SGE.
        let data = sges(cap.max_send_sge.max(1)).max(cap.max_inline_data as usize);
        let stride = header.saturating_add(data);
        let send = Ring::new(size_of::<virtio_rdma_qp_ring>(), cap.max_send_wr, stride)?;
        let room = (send.stride() - header) as u32;
        let free_inline_data = room.min(FREE_INLINE_DATA).min(max_inline_data);
        let mut end = send.end();
        let mut recv = None;
        if cap.max_recv_wr != 0 && attr.srq.is_null() {
            let stride = wqe::RECV_HEADER.saturating_add(sges(cap.max_recv_sge));
            let ring = Ring::new(end, cap.max_recv_wr, stride)?;
            end = ring.end();
            recv = Some(WorkQueue::new(ring, domain.threads));
        }
        let region = Region::lent(end, domain.allocator, Resource::Qp)?;
        let send = WorkQueue::new(send, domain.threads);
        Ok(Self { region, free_inline_data, send, recv })
    }

    /// What the driver wants to know of the rings.
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

    /// What the QP has of what `cap` asks for.
    fn cap(&self, cap: ibv_qp_cap) -> ibv_qp_cap {
        ibv_qp_cap {
            max_send_wr: self.send.ring().depth(),
            max_recv_wr: self.recv.as_ref().map_or(0, |recv| recv.ring().depth()),
            max_inline_data: cap.max_inline_data.max(self.free_inline_data),
            ..cap
        }
    }
}

/// Bytes of an SGE list.
pub fn sges(count: u32) -> usize {
    (count as usize).saturating_mul(size_of::<virtio_rdma_sge>())
}

/// ibv_create_qp(3). `attr.cap` becomes what the QP really has.
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

/// A QP in `pd`, which `attr` names too. `attr.cap` becomes what it really has.
fn create_in(pd: Ref<'_, ibv_pd>, attr: &mut ibv_qp_init_attr_ex) -> Result<Owned<Qp>> {
    if attr.qp_type == IBV_QPT_XRC_SEND {
        (attr.cap.max_recv_wr, attr.cap.max_recv_sge) = (0, 0);
    }
    let qp = Blank::<verbs_qp, Private>::new()?;
    let context = pd.context();
    let domain = Domain::of(pd.whole());
    let Some(numbers) = &context.private().numbers else {
        cmd::create_qp(pd, attr, qp.verbs(), None)?;
        let limits = Limits::new(attr);
        return Ok(qp.finish(Private { limits, rings: None, _domain: Domain::NONE }));
    };
    let queues = Queues::new(attr, context.private().max_inline_data, &domain)?;
    let mut got = ibv_qp_init_attr_ex { cap: queues.cap(attr.cap), ..*attr };
    let (send_cq, recv_cq) = object::cqs(attr).ok_or(Errno::EINVAL)?;
    cmd::create_qp(pd, &mut got, qp.verbs(), Some(queues.request()))?;
    let number = qp.verbs().qp().number();
    match Registration::new(numbers, number, send_cq, recv_cq) {
        Ok(registration) => {
            if !attr.srq.is_null() {
                registration.progress().share_receives();
            }
            attr.cap = queues.cap(attr.cap);
            let rings = Some(Rings::new(queues, registration));
            Ok(qp.finish(Private { limits: Limits::new(attr), rings, _domain: domain }))
        }
        Err(errno) => {
            // The error that counts is the first.
            let _ = cmd::destroy_qp(qp.verbs().qp());
            Err(errno)
        }
    }
}

/// ibv_create_qp_ex(3). Answers whether the QP takes work requests by calls, too.
///
/// # Errors
///
/// EINVAL without a PD; EOPNOTSUPP for attributes, flags or work requests that no QP
/// of the device has, or work requests by calls where the kernel posts; as [`create`].
pub fn create_ex(
    pd: Option<Ref<'_, ibv_pd>>,
    attr: &mut ibv_qp_init_attr_ex,
) -> Result<(Owned<Qp>, bool)> {
    const MASK: u32 =
        IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    let has_flags = attr.comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS != 0;
    let create_flags = if has_flags { attr.create_flags } else { 0 };
    if attr.comp_mask & !MASK != 0 || create_flags & !IBV_QP_CREATE_BLOCK_SELF_MCAST_LB != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    let pd = pd.filter(|_| attr.comp_mask & IBV_QP_INIT_ATTR_PD != 0).ok_or(Errno::EINVAL)?;
    let by_calls = attr.comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0;
    let context = pd.context().private();
    let builders = wr_ex::builders(wqe::opcodes(attr.qp_type) & context.opcodes);
    let rings = context.numbers.is_some();
    if by_calls && (attr.send_ops_flags & !builders != 0 || !rings) {
        return Err(Errno::EOPNOTSUPP);
    }
    Ok((create_in(pd, attr)?, by_calls))
}

/// ibv_create_qp_ex(3) of an XRC target, which has no queues.
///
/// # Errors
///
/// EOPNOTSUPP for attributes that it does not have, or if the device has no such
/// QPs; EINVAL without a domain; ENOMEM; the kernel's.
pub fn create_xrc_target(
    context: Ref<'_, ibv_context>,
    attr: &mut ibv_qp_init_attr_ex,
) -> Result<Owned<Qp>> {
    if attr.comp_mask & !(IBV_QP_INIT_ATTR_XRCD | IBV_QP_INIT_ATTR_PD) != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    let qp = Blank::<verbs_qp, Private>::new()?;
    cmd::create_xrc_target(context, attr, qp.verbs())?;
    Ok(qp.finish(Private::of_xrc_target()))
}

/// ibv_open_qp(3): an XRC target that another program, or this one, created.
///
/// # Errors
///
/// As [`create_xrc_target`].
pub fn open(context: Ref<'_, ibv_context>, attr: &mut ibv_qp_open_attr) -> Result<Owned<Qp>> {
    let qp = Blank::<verbs_qp, Private>::new()?;
    cmd::open_qp(context, attr, qp.verbs())?;
    Ok(qp.finish(Private::of_xrc_target()))
}

/// ibv_modify_qp(3). A QP that comes to RESET has empty queues, and no CQEs.
pub fn modify(qp: Ref<'_, Qp>, attr: &mut ibv_qp_attr, mask: c_int) -> Result {
    cmd::modify_qp(qp.qp(), attr, mask)?;
    let reset = mask & IBV_QP_STATE as c_int != 0 && attr.qp_state == IBV_QPS_RESET;
    if let (true, Some(rings)) = (reset, &qp.private().rings) {
        let Rings { queues, registration, .. } = rings;
        registration.reset();
        queues.send.reset(&queues.region, wq::SEND);
        if let Some(recv) = &queues.recv {
            recv.reset(&queues.region, wq::RECV);
        }
    }
    Ok(())
}

/// ibv_query_qp(3).
pub fn query(
    qp: Ref<'_, Qp>,
    attr: &mut ibv_qp_attr,
    mask: c_int,
    init: &mut ibv_qp_init_attr,
) -> Result {
    cmd::query_qp(qp.qp(), attr, mask, init)?;
    let Private { limits, rings, .. } = qp.private();
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

/// ibv_post_send(3) on a ring; a system call only if the device sleeps.
///
/// # Errors
///
/// EINVAL for a request that the QP cannot carry, or a QP that is not in a
/// state to send; ENOMEM for a full queue. The requests before the one that
/// the error names are posted. EIO or ENODEV, with the list's first request, if the
/// device is gone.
pub fn post_send(
    qp: Ref<'_, Qp>,
    list: List<'_, ibv_send_wr>,
) -> Result<(), PostError<ibv_send_wr>> {
    let first = list.first();
    let refuse = |errno| Err(PostError { errno, bad_wr: first });
    let Private { limits, rings, .. } = qp.private();
    let Some(Rings { queues, registration, .. }) = rings else { return refuse(Errno::EINVAL) };
    if let Err(errno) = check_can_send(qp) {
        return refuse(errno);
    }
    let side = registration.progress().send();
    let Posted { result, doorbell } = queues.send.post(
        &queues.region,
        wq::SEND,
        Freed::Completed(side),
        list,
        |request, entry| wqe::send(limits, request, entry),
    );
    if !doorbell {
        return result;
    }
    let rung = doorbell::ring(Queue::Send(qp), || wq::SEND.not_rung(&queues.region));
    result.and(rung.or_else(refuse))
}

/// Checks that a QP is in a state to post sends (IBA 10.8.2).
///
/// # Errors
///
/// EINVAL if it is not.
pub fn check_can_send(qp: Ref<'_, Qp>) -> Result {
    match qp.qp().state() {
        IBV_QPS_RTS | IBV_QPS_SQD | IBV_QPS_SQE | IBV_QPS_ERR => Ok(()),
        _ => Err(Errno::EINVAL),
    }
}

/// ibv_post_recv(3) on a ring. Errors as [`post_send`].
pub fn post_recv(
    qp: Ref<'_, Qp>,
    list: List<'_, ibv_recv_wr>,
) -> Result<(), PostError<ibv_recv_wr>> {
    let first = list.first();
    let refuse = |errno| Err(PostError { errno, bad_wr: first });
    let Private { limits, rings, .. } = qp.private();
    let Some(Rings { queues, registration, .. }) = rings else { return refuse(Errno::EINVAL) };
    let Some(recv) = &queues.recv else { return refuse(Errno::EINVAL) };
    if qp.qp().state() == IBV_QPS_RESET {
        return refuse(Errno::EINVAL);
    }
    let side = registration.progress().recv();
    let Posted { result, doorbell } =
        recv.post(&queues.region, wq::RECV, Freed::Completed(side), list, |request, entry| {
            wqe::recv(limits, request, entry)
        });
    if !doorbell {
        return result;
    }
    let rung = doorbell::ring(Queue::Receive(qp), || wq::RECV.not_rung(&queues.region));
    result.and(rung.or_else(refuse))
}

/// ibv_post_send(3) through the kernel.
///
/// # Errors
///
/// EINVAL for a request that the QP cannot carry; what the kernel answers
/// otherwise, among it ENOMEM for a full queue. The requests before the one
/// that the error names are posted.
pub fn post_send_kernel(
    qp: Ref<'_, Qp>,
    list: List<'_, ibv_send_wr>,
) -> Result<(), PostError<ibv_send_wr>> {
    let limits = &qp.private().limits;
    wr::post(list, |request| check_send(limits, request), |first| first.post(qp.qp()))
}

/// ibv_post_recv(3) through the kernel. Errors as [`post_send_kernel`].
pub fn post_recv_kernel(
    qp: Ref<'_, Qp>,
    list: List<'_, ibv_recv_wr>,
) -> Result<(), PostError<ibv_recv_wr>> {
    let max_sge = qp.private().limits.max_recv_sge;
    wr::post(list, |request| request.sges(max_sge).map(|_| ()), |first| first.post(qp.qp()))
}

/// Checks a send work request for what would make libibverbs or the kernel
/// read what is not there.
///
/// Inline data would have to be copied while posting, which the kernel's
/// command has no room for: a QP has `max_inline_data` 0. A message without
/// data may carry the flag all the same; it has no meaning then.
fn check_send(limits: &Limits, request: &mut wr::Request<'_, ibv_send_wr>) -> Result {
    let sges = request.sges(limits.max_send_sge)?;
    if request.wr().send_flags & IBV_SEND_INLINE != 0 {
        if sges.iter().any(|sge| sge.length != 0) {
            return Err(Errno::EINVAL);
        }
        request.wr_mut().send_flags &= !IBV_SEND_INLINE;
    }
    if limits.qp_type == IBV_QPT_UD && request.ah().is_none() {
        return Err(Errno::EINVAL);
    }
    Ok(())
}

#[cfg(test)]
impl Private {
    /// A QP that the kernel does not know.
    pub fn without_kernel(attr: &ibv_qp_init_attr_ex, registration: Registration) -> Self {
        let queues = Queues::new(attr, 0, &Domain::NONE).unwrap();
        let rings = Some(Rings::new(queues, registration));
        Self { limits: Limits::new(attr), rings, _domain: Domain::NONE }
    }

    /// What the driver is told of the rings.
    pub fn request(&self) -> virtio_rdma_ureq_create_qp {
        self.rings.as_ref().unwrap().queues.request()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::ptr;

    const RC: Limits =
        Limits { qp_type: IBV_QPT_RC, max_send_sge: 4, max_recv_sge: 2, max_inline_data: 0 };

    fn send(sge: &mut [ibv_sge], flags: u32) -> ibv_send_wr {
        ibv_send_wr {
            sg_list: sge.as_mut_ptr(),
            num_sge: sge.len() as _,
            send_flags: flags,
            ..Default::default()
        }
    }

    /// Checks a request; answers it as the kernel gets it.
    fn check(limits: &Limits, wr: &mut ibv_send_wr) -> Result<ibv_send_wr> {
        let mut request = wr::tests::list(wr).next().unwrap();
        check_send(limits, &mut request).map(|()| *request.wr())
    }

    #[test]
    fn sge_count_within_the_qp() {
        let mut sge = [ibv_sge { addr: 0, length: 8, lkey: 0 }; 5];
        for count in 0..=4 {
            assert!(check(&RC, &mut send(&mut sge[..count], 0)).is_ok());
        }
        assert_eq!(check(&RC, &mut send(&mut sge, 0)).err(), Some(Errno::EINVAL));
        for num_sge in [-1, i32::MIN, i32::MAX, 1] {
            let mut wr = ibv_send_wr { num_sge, ..Default::default() };
            assert_eq!(check(&RC, &mut wr).err(), Some(Errno::EINVAL));
        }
    }

    #[test]
    fn inline_without_data_only_through_the_kernel() {
        let mut sge = [ibv_sge { addr: 0, length: 0, lkey: 0 }; 2];
        let mut wr = send(&mut sge, IBV_SEND_INLINE | IBV_SEND_SIGNALED);
        assert_eq!(check(&RC, &mut wr).unwrap().send_flags, IBV_SEND_SIGNALED);
        sge[1].length = 1;
        assert_eq!(check(&RC, &mut send(&mut sge, IBV_SEND_INLINE)).err(), Some(Errno::EINVAL));
    }

    #[test]
    fn datagram_needs_an_address_handle() {
        let ud = Limits { qp_type: IBV_QPT_UD, ..RC };
        let mut wr = send(&mut [], 0);
        assert_eq!(check(&ud, &mut wr).err(), Some(Errno::EINVAL));
        wr.wr.ud.ah = ptr::dangling_mut::<ibv_ah>();
        assert!(check(&ud, &mut wr).is_ok());
    }

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

    /// What the entries have room for anyway, 96 bytes at most, and no more than the device
    /// takes; what was asked for is left to the driver to refuse.
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
            assert_eq!(queues.err(), Some(Errno::EINVAL), "{cap:?}");
        }
    }
}
