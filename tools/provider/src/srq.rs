// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Shared receive queues (IBA 10.2.9; specification, Shared receive queues).
//!
//! The device copies a work request when a QP takes it, and counts those that it
//! took. An entry is free from then on, before its completion is polled. The `wr_id`
//! of the program travels in the work request and comes back in the CQE.
//!
//! An SRQ is resized as a CQ is: it gets another ring, to which the device moves
//! the work requests that wait. Posting waits for that.
#![forbid(unsafe_code)]

use crate::{
    attr,
    bindings::*,
    causes::{Cause, cause},
    cmd,
    errno::{Errno, Result},
    limits::Limits,
    lock::Lock,
    log::Refuse,
    object::{Blank, Extended, Object, Owned, Ref},
    owed::Doorbell,
    pd::Domain,
    qp_table::Registration,
    ring::{Resource, Ring, RingRegion, Word, Writer},
    wq::{Freed, Head, Posted, State},
    wqe,
    wr::{List, Request},
};
use core::{ffi::c_int, mem::offset_of};

/// The head's words.
const HEAD: Head = Head::new(
    Word::at(offset_of!(virtio_rdma_srq_ring, producer)),
    Word::at(offset_of!(virtio_rdma_srq_ring, wake)),
);
const CONSUMER: Word = Word::at(offset_of!(virtio_rdma_srq_ring, consumer));

/// An SRQ: `struct verbs_srq` and the provider's private data.
pub type Srq = Object<verbs_srq>;

impl Extended for verbs_srq {
    type Private = SrqPrivate;
}

/// The private data of an SRQ.
pub struct SrqPrivate {
    /// The limits of a work request.
    limits: Limits,
    /// The ring to which work requests are posted.
    shared: Lock<Shared>,
    doorbell: Doorbell,
    /// Keeps the number that its completions name, if the SRQ is for XRC.
    _number: Option<Registration>,
    /// The domain that the ring's memory comes from; the last field, because it must be dropped
    /// last.
    domain: Domain,
}

/// The ring of an SRQ.
struct Shared {
    region: RingRegion,
    state: State,
}

impl Shared {
    /// Allocates a ring of at least `max_wr` work requests of `max_sge` SGEs.
    ///
    /// # Errors
    ///
    /// EINVAL for sizes that no ring has; ENOMEM.
    fn new(max_wr: u32, max_sge: u32, domain: &Domain) -> Result<Self, Cause> {
        if max_wr == 0 {
            return Err(cause!(EINVAL, "an SRQ of 0 receives is wanted"));
        }
        let stride = wqe::RECV_HEADER.saturating_add(wqe::sges(max_sge));
        let ring = Ring::new(size_of::<virtio_rdma_srq_ring>(), max_wr, stride)?;
        let region =
            RingRegion::lent(ring.end(), domain.barriers, domain.allocator, Resource::Srq)?;
        Ok(Self { region, state: State::new(ring) })
    }

    /// Returns the description of the ring for the driver.
    fn request(&self) -> virtio_rdma_ureq_create_srq {
        let ring = self.state.ring();
        virtio_rdma_ureq_create_srq {
            buf_addr: self.region.addr(),
            buf_len: self.region.size() as u64,
            depth: ring.depth(),
            stride: ring.stride() as u32,
            offset: ring.offset(),
            reserved_1c: 0,
        }
    }
}

impl SrqPrivate {
    /// Allocates a ring of at least `max_wr` work requests of `max_sge` SGEs.
    ///
    /// # Errors
    ///
    /// EINVAL for sizes that no ring has; ENOMEM.
    fn new(max_wr: u32, max_sge: u32, domain: Domain) -> Result<Self, Cause> {
        let shared = Shared::new(max_wr, max_sge, &domain)?;
        let shared = Lock::with(shared, domain.threads);
        Ok(Self {
            limits: Limits::of_receives(max_sge),
            shared,
            doorbell: Doorbell::default(),
            _number: None,
            domain,
        })
    }

    /// Returns the description of the ring for the driver.
    pub(crate) fn request(&self) -> virtio_rdma_ureq_create_srq {
        self.shared.lock().request()
    }

    /// Returns the doorbell.
    pub fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    /// Posts a list to the ring; `refuse` is that of [`State::post`].
    pub fn post(
        &self,
        list: List<'_, ibv_recv_wr>,
        refuse: impl Fn(Cause) -> Errno,
    ) -> Posted<ibv_recv_wr> {
        let mut shared = self.shared.lock();
        let Shared { region, state } = &mut *shared;
        let encode =
            |request: &Request<'_, _>, entry: Writer<'_>| wqe::recv(&self.limits, request, entry);
        state.post(region, HEAD, Freed::Taken(CONSUMER), list, encode, refuse)
    }

    /// Makes the next request ask for the doorbell, which did not ring.
    pub fn not_rung(&self) {
        HEAD.not_rung(&self.shared.lock().region);
    }

    /// Replaces the ring by one of at least `max_wr` work requests. `tell` makes the device move
    /// the work requests that wait to the new ring; `refuse` is that of [`State::post`].
    ///
    /// # Errors
    ///
    /// As [`Self::new`], and those of `tell`; the old ring then stays.
    fn resize(
        &self,
        max_wr: u32,
        tell: impl FnOnce(virtio_rdma_ureq_create_srq) -> Result,
        refuse: impl FnOnce(Cause) -> Errno,
    ) -> Result {
        let new = Shared::new(max_wr, self.limits.max_recv_sge, &self.domain);
        let mut new = new.map_err(refuse)?;
        let mut old = self.shared.lock();
        tell(new.request())?;
        new.state = State::moved(new.state.ring(), HEAD.posted(&new.region));
        *old = new;
        Ok(())
    }
}

/// Returns the private data of an SRQ in `pd`.
///
/// # Errors
///
/// EINVAL for an SRQ without work requests, or sizes that no SRQ has; ENOMEM.
fn new(pd: Ref<'_, ibv_pd>, asked: &ibv_srq_attr) -> Result<SrqPrivate, Cause> {
    let context = pd.context().private();
    context.sizes.check_srq(asked.max_wr, asked.max_sge)?;
    let domain = Domain::of(pd.whole()).with(context.barriers);
    SrqPrivate::new(asked.max_wr, asked.max_sge, domain)
}

/// Creates an SRQ: ibv_create_srq(3). Sets `attr.attr` to what the SRQ really has.
///
/// # Errors
///
/// EINVAL for an SRQ without work requests, or sizes that no SRQ has; ENOMEM;
/// the kernel's.
pub fn create(pd: Ref<'_, ibv_pd>, attr: &mut ibv_srq_init_attr) -> Result<Owned<Srq>> {
    let srq = Blank::<verbs_srq>::new()?;
    let private = new(pd, &attr.attr).map_err(|cause| pd.refuse(cause))?;
    cmd::srq::create(pd, attr, srq.verbs().srq(), private.request())?;
    Ok(srq.finish(private))
}

/// Creates an SRQ for XRC: ibv_create_srq_ex(3). Sets `attr.attr` to what the SRQ really has.
///
/// # Errors
///
/// EOPNOTSUPP for attributes or a type that no SRQ has; EINVAL for an attribute that is
/// missing; otherwise as [`create`].
pub fn create_ex(
    context: Ref<'_, ibv_context>,
    attr: &mut ibv_srq_init_attr_ex,
) -> Result<Owned<Srq>> {
    const MASK: u32 = IBV_SRQ_INIT_ATTR_TYPE
        | IBV_SRQ_INIT_ATTR_PD
        | IBV_SRQ_INIT_ATTR_XRCD
        | IBV_SRQ_INIT_ATTR_CQ;
    // libibverbs calls ibv_create_srq(3) for SRQs of other types.
    let is_xrc = attr.comp_mask & IBV_SRQ_INIT_ATTR_TYPE != 0 && attr.srq_type == IBV_SRQT_XRC;
    let unknown = attr.comp_mask & !MASK;
    if unknown != 0 {
        let cause =
            cause!(EOPNOTSUPP, "an SRQ with the unknown attributes 0x%x is wanted", unknown);
        return Err(context.refuse(cause));
    }
    if !is_xrc {
        let cause = cause!(EOPNOTSUPP, "an SRQ of the unknown type %u is wanted", attr.srq_type);
        return Err(context.refuse(cause));
    }
    let table = context.whole().private().qp_table.as_ref().ok_or(Errno::EOPNOTSUPP)?;
    let asked = *attr;
    let missing = || context.refuse(cause!(EINVAL, "an SRQ lacks its PD, XRC domain or CQ"));
    let (pd, cq) = attr::pd_and_cq(&asked).ok_or_else(missing)?;
    let srq = Blank::<verbs_srq>::new()?;
    let private = new(pd, &attr.attr).map_err(|cause| pd.refuse(cause))?;
    cmd::srq::create_xrc(context, attr, srq.verbs(), private.request())?;
    srq.verbs().set_attributes(attr);
    let number = srq.verbs().xrc_number().ok_or(Errno::EINVAL);
    match number.and_then(|number| Registration::of_srq(table, number, cq.private().state())) {
        Ok(registration) => Ok(srq.finish(SrqPrivate { _number: Some(registration), ..private })),
        Err(errno) => {
            // The error that counts is the first.
            let _ = cmd::srq::destroy(srq.verbs().srq());
            Err(errno)
        }
    }
}

/// Returns the number of an SRQ for XRC: ibv_get_srq_num(3).
///
/// # Errors
///
/// EOPNOTSUPP for another SRQ.
pub fn number(srq: Ref<'_, Srq>) -> Result<u32> {
    let no_number =
        || srq.srq().refuse(cause!(EOPNOTSUPP, "the SRQ is not for XRC and has no number"));
    srq.verbs().xrc_number().ok_or_else(no_number)
}

/// Resizes an SRQ, sets its limit, or both: ibv_modify_srq(3). Work requests that
/// the device did not take stay, in order.
///
/// # Errors
///
/// EINVAL for a size below the number of work requests that wait, or below the limit; ENOMEM; the
/// kernel's.
pub fn modify(srq: Ref<'_, Srq>, attr: &mut ibv_srq_attr, mask: c_int) -> Result {
    let tell = |attr: &mut _, ring| cmd::srq::modify(srq.srq(), attr, mask, ring);
    if mask & IBV_SRQ_MAX_WR as c_int == 0 {
        return tell(attr, None);
    }
    let refuse = |cause| srq.srq().refuse(cause);
    srq.srq().context().private().sizes.check_srq(attr.max_wr, 0).map_err(refuse)?;
    srq.private().resize(attr.max_wr, |ring| tell(attr, Some(ring)), refuse)
}

/// Reads the attributes of an SRQ: ibv_query_srq(3).
///
/// # Errors
///
/// The kernel's.
pub fn query(srq: Ref<'_, Srq>, attr: &mut ibv_srq_attr) -> Result {
    cmd::srq::query(srq.srq(), attr)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{model::device::Memory, wr::tests::list};
    use core::sync::atomic::Ordering::{Acquire, SeqCst};

    /// Returns an SRQ that the kernel does not know.
    pub fn srq(max_wr: u32) -> Owned<Srq> {
        let private = SrqPrivate::new(max_wr, 1, Domain::NONE).unwrap();
        Blank::<verbs_srq>::new().unwrap().finish(private)
    }

    /// Returns the device's side of the present ring.
    fn memory(srq: &SrqPrivate) -> Memory {
        Memory::new(&srq.shared.lock().region)
    }

    /// Returns where the present ring lies.
    fn ring(srq: &SrqPrivate) -> Ring {
        srq.shared.lock().state.ring()
    }

    /// Posts a request. Returns its error, and whether the device wants a doorbell.
    fn post(srq: &SrqPrivate, wr_id: u64, sges: &mut [ibv_sge]) -> (Option<Errno>, bool) {
        let mut wr = ibv_recv_wr {
            wr_id,
            sg_list: sges.as_mut_ptr(),
            num_sge: sges.len() as _,
            ..Default::default()
        };
        let posted = srq.post(list(&mut wr), Cause::errno);
        (posted.result.err().map(|error| error.errno), posted.doorbell)
    }

    #[test]
    fn what_the_device_took_is_free() {
        let srq = SrqPrivate::new(6, 1, Domain::NONE).unwrap();
        let memory = memory(&srq);
        let consumer = memory.word(64);
        for wr_id in 0..8 {
            assert_eq!(post(&srq, wr_id, &mut []), (None, false));
        }
        assert_eq!(post(&srq, 8, &mut []), (Some(Errno::ENOMEM), false));
        consumer.store(3, SeqCst);
        for wr_id in 8..11 {
            assert_eq!(post(&srq, wr_id, &mut []), (None, false));
        }
        assert_eq!(post(&srq, 11, &mut []), (Some(Errno::ENOMEM), false));
        assert_eq!(memory.word(0).load(Acquire), 11);
        let id = |index| memory.read::<u64>(ring(&srq), index, 8);
        assert!((3..11).all(|index| id(index) == index.into()));
        // The queue stays full if the device counts wrongly.
        for wrong in [12, 2, u32::MAX, 1 << 31] {
            consumer.store(wrong, SeqCst);
            assert_eq!(post(&srq, 11, &mut []), (Some(Errno::ENOMEM), false));
        }
        consumer.store(11, SeqCst);
        assert_eq!(post(&srq, 11, &mut []), (None, false));
    }

    #[test]
    fn doorbell_if_somebody_waits() {
        let srq = SrqPrivate::new(8, 1, Domain::NONE).unwrap();
        let wake = memory(&srq);
        assert_eq!(post(&srq, 0, &mut []), (None, false));
        wake.word(128).store(1, SeqCst);
        assert_eq!(post(&srq, 1, &mut []), (None, true));
        assert_eq!(post(&srq, 2, &mut []), (None, false));
        srq.not_rung();
        assert_eq!(post(&srq, 3, &mut []), (None, true));
    }

    #[test]
    fn requests_are_checked() {
        let srq = SrqPrivate::new(8, 2, Domain::NONE).unwrap();
        let mut sges = [ibv_sge { addr: 1, length: 2, lkey: 3 }; 3];
        assert_eq!(post(&srq, 0, &mut sges[..2]), (None, false));
        assert_eq!(post(&srq, 1, &mut sges), (Some(Errno::EINVAL), false));
        let entry: [u64; 4] = memory(&srq).read(ring(&srq), 0, 0);
        assert_eq!(entry, [2, 0, 1, 3 << 32 | 2]);
        for (max_wr, max_sge) in [(u32::MAX, 1), (1 << 31, 1), (1, 256), (1, u32::MAX)] {
            assert_eq!(
                SrqPrivate::new(max_wr, max_sge, Domain::NONE).err().map(Cause::errno),
                Some(Errno::EINVAL)
            );
        }
    }

    #[test]
    fn resizing_goes_on_behind_what_the_device_moved() {
        let srq = SrqPrivate::new(4, 1, Domain::NONE).unwrap();
        for wr_id in 0..4 {
            assert_eq!(post(&srq, wr_id, &mut []), (None, false));
        }
        let mut told = None;
        assert_eq!(srq.resize(9, |_| Err(Errno::EOPNOTSUPP), Cause::errno), Err(Errno::EOPNOTSUPP));
        assert_eq!(srq.resize(0, |_| Ok(()), Cause::errno), Err(Errno::EINVAL));
        assert_eq!(post(&srq, 4, &mut []), (Some(Errno::ENOMEM), false));
        let resized = srq.resize(
            6,
            |request| {
                told = Some(request.depth);
                let new = Memory::at(request.buf_addr);
                // Three work requests wait, and a QP waits too.
                new.word(0).store(3, SeqCst);
                new.word(128).store(1, SeqCst);
                Ok(())
            },
            Cause::errno,
        );
        assert_eq!((resized, told), (Ok(()), Some(8)));
        // A request that is refused tells the device of nothing.
        let mut sges = [ibv_sge { addr: 1, length: 2, lkey: 3 }; 2];
        assert_eq!(post(&srq, 4, &mut sges), (Some(Errno::EINVAL), false));
        assert_eq!(post(&srq, 4, &mut []), (None, true));
        for wr_id in 5..9 {
            assert_eq!(post(&srq, wr_id, &mut []), (None, false));
        }
        assert_eq!(post(&srq, 9, &mut []), (Some(Errno::ENOMEM), false));
        assert_eq!(memory(&srq).word(0).load(Acquire), 8);
        let id = |index| memory(&srq).read::<u64>(ring(&srq), index, 8);
        assert!((3..8).all(|index| id(index) == u64::from(index) + 1));
        // The device says that more wait than the ring has room for.
        srq.resize(
            2,
            |request| {
                Memory::at(request.buf_addr).word(0).store(99, SeqCst);
                Ok(())
            },
            Cause::errno,
        )
        .unwrap();
        assert_eq!(post(&srq, 0, &mut []), (Some(Errno::ENOMEM), false));
    }

    #[test]
    fn the_driver_is_told_of_the_ring() {
        let srq = SrqPrivate::new(100, 4, Domain::NONE).unwrap();
        let request = srq.request();
        assert_eq!((request.depth, request.stride, request.offset), (128, 128, 256));
        assert_eq!(request.buf_len, 20480);
    }
}
