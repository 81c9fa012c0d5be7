// SPDX-License-Identifier: GPL-2.0

//! Queue pairs (specification, Queue pairs and Work requests).

#![deny(unsafe_code)]

mod create;
mod progress;

use crate::{
    ah, bindings,
    cmd::{
        self,
        Command, //
    },
    doorbell,
    hca::Hca,
    ib::{
        self,
        EventType,
        QpState,
        QpType,
        WcOpcode,
        WrOpcode, //
    },
    region::Region,
    stats::Counter,
    sync::{
        new_irq_spinlock,
        IrqGuard,
        IrqSpinLock, //
    },
    trace::refuse,
    virtio,
    wire::{
        self,
        Completion,
        SendRequest,
        WrBody, //
    },
    wq::{
        Entry,
        Payload,
        WorkQueue, //
    },
};
use core::mem::offset_of;
use create::{
    cq_number,
    new_queues,
    new_xrc_target,
    queues,
    Parts, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    },
};
use progress::{
    Change,
    Progress, //
};

/// A queue pair.
#[pin_data]
pub(crate) struct Qp {
    hca: Arc<Hca>,
    qpn: u32,
    qp_type: QpType,
    signal_all: bool,
    send_cqn: Option<u32>,
    recv_cqn: Option<u32>,
    /// The number of the SRQ that the QP receives from, if there is one.
    srqn: Option<u32>,
    /// Whether completions of receives tell the VLAN: those of datagrams do, to consumers in the kernel. To
    /// programs, the flag means something else.
    tells_vlan: bool,
    cap: bindings::ib_qp_cap,
    /// What MODIFY_QP left the QP in.
    #[pin]
    progress: Mutex<Progress>,
    #[pin]
    sq: IrqSpinLock<WorkQueue>,
    #[pin]
    rq: IrqSpinLock<WorkQueue>,
    /// The memory of the rings, if the queues are rings.
    region: Option<Region>,
    /// Events that were reported since the state last changed, a bit for each `enum ib_event_type`.
    #[pin]
    reported: IrqSpinLock<u32>,
    /// The multicast groups that the device has attached the QP to.
    #[pin]
    groups: Mutex<KVec<[u8; 16]>>,
}

/// The flags of a send work request that the driver passes on.
const SEND_FLAGS: u32 = bindings::VIRTIO_RDMA_SEND_FENCE
    | bindings::VIRTIO_RDMA_SEND_SIGNALED
    | bindings::VIRTIO_RDMA_SEND_SOLICITED
    | bindings::VIRTIO_RDMA_SEND_INLINE;

/// Attributes of alternate paths, which RoCE does not have.
const ALTERNATE_PATH: u32 =
    bindings::VIRTIO_RDMA_QP_ALT_PATH | bindings::VIRTIO_RDMA_QP_PATH_MIG_STATE;

/// The largest number of a VLAN.
const MAX_VLAN: u16 = 4094;

/// Returns whether the state lets send work requests be posted.
fn accepts_sends(state: QpState) -> bool {
    matches!(
        state,
        QpState::Rts | QpState::Sqd | QpState::Sqe | QpState::Err
    )
}

/// Returns whether the state lets receive work requests be posted.
fn accepts_recvs(state: QpState) -> bool {
    state != QpState::Reset
}

/// Returns the completion of a work request that was flushed.
fn flushed(entry: &Entry) -> ib::Wc {
    ib::Wc {
        wr_id: entry.wr_id,
        status: bindings::ib_wc_status_IB_WC_WR_FLUSH_ERR,
        opcode: entry.opcode,
        ..ib::Wc::default()
    }
}

impl Qp {
    /// Completes the work request that a CQE of CQ `cqn` names. `None` if the CQE makes no sense.
    /// Any context.
    pub(crate) fn complete(&self, cqn: u32, cqe: &Completion) -> Option<ib::Wc> {
        if cqe.status > bindings::virtio_rdma_wc_status_VIRTIO_RDMA_WC_GENERAL_ERR {
            self.hca.stats().bad(Counter::BadCqeStatus);
            return None;
        }
        let is_recv = cqe.is_recv();
        let own_cqn = if is_recv {
            self.recv_cqn
        } else {
            self.send_cqn
        };
        if own_cqn != Some(cqn) {
            self.hca.stats().bad(Counter::BadCqeQp);
            return None;
        }
        if is_recv {
            self.complete_recv(cqe)
        } else {
            self.complete_send(cqe)
        }
    }

    fn complete_send(&self, cqe: &Completion) -> Option<ib::Wc> {
        let Some(entry) = self.sq.lock().complete_through(cqe.request) else {
            self.hca.stats().bad(Counter::BadCqeWrId);
            return None;
        };
        Some(ib::Wc {
            wr_id: entry.wr_id,
            status: cqe.status,
            opcode: entry.opcode,
            vendor_err: cqe.vendor_err,
            byte_len: cqe.byte_len,
            ..ib::Wc::default()
        })
    }

    /// Takes the receive work request that a CQE completes, with `bytes` placed into it.
    ///
    /// # Errors
    ///
    /// What is wrong with the CQE.
    fn take_recv(&self, cqe: &Completion, bytes: u64) -> Result<Entry, Counter> {
        if let Some(srqn) = self.srqn {
            let srqs = &self.hca.objects().srqs;
            let entry = srqs.with(srqn, |srq| srq.complete(cqe.tag, bytes));
            return entry.unwrap_or(Err(Counter::BadCqeWrId));
        }
        let mut rq = self.rq.lock();
        let entry = rq.peek(cqe.request).ok_or(Counter::BadCqeWrId)?;
        if bytes > entry.length {
            return Err(Counter::BadCqeByteLen);
        }
        rq.complete_one(cqe.request);
        Ok(entry)
    }

    fn complete_recv(&self, cqe: &Completion) -> Option<ib::Wc> {
        let byte_len = cqe.byte_len;
        let ok = cqe.status == bindings::ib_wc_status_IB_WC_SUCCESS;
        let opcode = match cqe.opcode {
            bindings::virtio_rdma_wc_opcode_VIRTIO_RDMA_WC_RECV => WcOpcode::Recv,
            bindings::virtio_rdma_wc_opcode_VIRTIO_RDMA_WC_RECV_RDMA_WITH_IMM => {
                WcOpcode::RecvRdmaWithImm
            }
            _ => {
                self.hca.stats().bad(Counter::BadCqeOpcode);
                return None;
            }
        };

        let placed = ok && opcode == WcOpcode::Recv;
        let bytes = if placed { u64::from(byte_len) } else { 0 };
        let entry = self
            .take_recv(cqe, bytes)
            .map_err(|counter| self.hca.stats().bad(counter))
            .ok()?;

        Some(ib::Wc {
            wr_id: entry.wr_id,
            status: cqe.status,
            opcode,
            vendor_err: cqe.vendor_err,
            byte_len,
            ex: cqe.ex,
            src_qp: cqe.src_qp,
            wc_flags: if ok { self.recv_flags(cqe, placed) } else { 0 },
            pkey_index: cqe.pkey_index,
            sl: cqe.sl,
            port_num: bindings::VIRTIO_RDMA_PORT as u8,
            vlan_id: cqe.vlan_id,
        })
    }

    /// Returns the `enum ib_wc_flags` of a receive that succeeded; `placed`: its data went into the work
    /// request.
    fn recv_flags(&self, cqe: &Completion, placed: bool) -> u32 {
        let mut flags = bindings::VIRTIO_RDMA_WC_GRH | bindings::VIRTIO_RDMA_WC_WITH_IMM;
        // A completion has either immediate data or a key.
        if placed
            && self.hca.config().fast_reg.is_some()
            && cqe.wc_flags & bindings::VIRTIO_RDMA_WC_WITH_IMM == 0
        {
            flags |= bindings::VIRTIO_RDMA_WC_WITH_INVALIDATE;
        }
        if self.tells_vlan && cqe.wc_flags & bindings::VIRTIO_RDMA_WC_WITH_VLAN != 0 {
            if cqe.vlan_id <= MAX_VLAN {
                flags |= bindings::VIRTIO_RDMA_WC_WITH_VLAN;
            } else {
                self.hca.stats().bad(Counter::BadCqeVlan);
            }
        }
        cqe.wc_flags & flags
    }

    /// Flushes outstanding work requests that complete to CQ `cqn`, because the device has failed.
    /// `this` is this QP. Any context.
    pub(crate) fn flush(&self, cqn: u32, wcs: &mut ib::Wcs<'_>, this: &ib::Qp<Hca>) {
        while self.send_cqn == Some(cqn) && !wcs.is_full() {
            let Some(entry) = self.sq.lock().flush() else {
                break;
            };
            wcs.push(this, &flushed(&entry));
        }
        while self.recv_cqn == Some(cqn) && !wcs.is_full() {
            let Some(entry) = self.rq.lock().flush() else {
                break;
            };
            wcs.push(this, &flushed(&entry));
        }
    }

    /// Lets the program that posts to the QP ring the doorbell with its next work request, so that it learns that
    /// the device has failed. Any context.
    pub(crate) fn close(&self) {
        if let Some(region) = &self.region {
            region.tell_program(offset_of!(wire::QpRing, sq_wake), 1);
            region.tell_program(offset_of!(wire::QpRing, rq_wake), 1);
        }
    }

    /// Takes the virtqueues away, with their indices, if the QP has some: the device has been reset. Any
    /// context.
    pub(crate) fn revoke(&self) -> [Option<(u32, virtio::Queue)>; 2] {
        [self.sq.lock().revoke(), self.rq.lock().revoke()]
    }

    /// Returns whether a work request that completes to CQ `cqn` is outstanding. Any context.
    pub(crate) fn has_outstanding(&self, cqn: u32) -> bool {
        (self.send_cqn == Some(cqn) && !self.sq.lock().is_empty())
            || (self.recv_cqn == Some(cqn) && !self.rq.lock().is_empty())
    }

    /// Reports an event, once between two changes of the state: the core keeps events until a program
    /// reads them, however many there are. `this` is this QP. May sleep, as the handlers of a QP may.
    pub(crate) fn report_once(&self, event: EventType, this: &ib::Qp<Hca>) {
        let mut reported = self.reported.lock();
        let first = *reported & 1 << event as u32 == 0;
        *reported |= 1 << event as u32;
        drop(reported);
        if first {
            this.report(event);
        }
    }

    /// Reports that the QP takes no more work requests of its SRQ, if it has one, because the device
    /// has failed: a consumer that drains the QP waits for that. `this` is this QP. May sleep.
    pub(crate) fn leave_srq(&self, this: &ib::Qp<Hca>) {
        if self.srqn.is_some() {
            self.report_once(EventType::QpLastWqeReached, this);
        }
    }

    /// Lets the work queues accept what the state allows.
    fn accept(&self, state: QpState) {
        self.sq.lock().set_accept(accepts_sends(state));
        self.rq.lock().set_accept(accepts_recvs(state));
    }

    /// Forgets what was posted and not completed, after the device did.
    fn forget(&self) {
        self.sq.lock().reset();
        self.rq.lock().reset();
        for cqn in [self.send_cqn, self.recv_cqn].into_iter().flatten() {
            let cqs = &self.hca.objects().cqs;
            cqs.with(cqn, |cq| cq.purge(self.qpn, self.srqn, cq));
        }
    }

    /// Returns the parts of a send work request that are the same in a virtqueue and in a ring.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an opcode, a flag or a destination that the QP does not have.
    fn send_request(&self, wr: &ib::SendWr<'_, Hca>, opcode: WrOpcode) -> Result<SendRequest> {
        let mut send_flags = wr.send_flags();
        if send_flags & !SEND_FLAGS != 0 {
            let (flags, known) = (send_flags.into(), SEND_FLAGS.into());
            return Err(refuse(
                EINVAL,
                c"send_flags of a work request",
                flags,
                known,
            ));
        }
        if self.signal_all {
            send_flags |= bindings::VIRTIO_RDMA_SEND_SIGNALED;
        }
        Ok(SendRequest {
            opcode: opcode.into(),
            send_flags,
            ex: wr.ex(),
            body: self.body(wr, opcode)?,
        })
    }

    /// Returns the data of a send work request, or where it is.
    ///
    /// # Errors
    ///
    /// `EINVAL` for data inline that is a program's, is too long, or that the operation or the queue has no place for.
    fn payload<'a>(&self, wr: &ib::SendWr<'a, Hca>, opcode: WrOpcode) -> Result<Payload<'a>> {
        let Some(data) = wr.inline_data()? else {
            return Ok(Payload::Sges(wr.sges()));
        };
        let carries = matches!(
            opcode,
            WrOpcode::Send
                | WrOpcode::SendWithImm
                | WrOpcode::RdmaWrite
                | WrOpcode::RdmaWriteWithImm
        );
        if !carries
            || self.hca.config().rings.is_none()
            || data.len() > u64::from(self.cap.max_inline_data)
        {
            let limit = self.cap.max_inline_data.into();
            return Err(refuse(
                EINVAL,
                c"inline data of a work request that has no place for it",
                data.len(),
                limit,
            ));
        }
        Ok(Payload::Inline(data))
    }

    fn body(&self, wr: &ib::SendWr<'_, Hca>, opcode: WrOpcode) -> Result<WrBody> {
        let rc = self.qp_type == QpType::Rc;
        let connected = rc || self.qp_type == QpType::Uc;

        match opcode {
            WrOpcode::Send | WrOpcode::SendWithImm => {
                if connected {
                    return Ok(WrBody::None);
                }
                let to = wr.datagram();
                let to = to.ok_or_else(|| refuse(EINVAL, c"a datagram without an AH", 0, 0))?;
                Ok(WrBody::Ud {
                    remote_qpn: to.remote_qpn,
                    remote_qkey: to.remote_qkey,
                    av: to.ah.av(),
                })
            }
            WrOpcode::RdmaWrite | WrOpcode::RdmaWriteWithImm if connected => Self::rdma_body(wr),
            WrOpcode::RdmaRead if rc => Self::rdma_body(wr),
            WrOpcode::AtomicWrite if rc && self.hca.config().atomic_write => Self::rdma_body(wr),
            WrOpcode::AtomicCmpAndSwp | WrOpcode::AtomicFetchAndAdd if rc => {
                let atomic = wr.atomic().ok_or(EINVAL)?;
                Ok(WrBody::Atomic {
                    remote_addr: atomic.remote_addr,
                    compare_add: atomic.compare_add,
                    swap: atomic.swap,
                    rkey: atomic.rkey,
                })
            }
            _ if self.hca.config().fast_reg.is_some() => {
                Self::managing_body(wr, opcode, rc, connected)
            }
            _ => Err(not_of_qp(opcode)),
        }
    }

    /// Returns the body of a work request that registers memory or invalidates a key.
    fn managing_body(
        wr: &ib::SendWr<'_, Hca>,
        opcode: WrOpcode,
        rc: bool,
        connected: bool,
    ) -> Result<WrBody> {
        match opcode {
            WrOpcode::SendWithInv if rc => Ok(WrBody::None),
            WrOpcode::RdmaReadWithInv if rc => Self::rdma_body(wr),
            WrOpcode::LocalInv if connected && wr.sges().is_empty() => Ok(WrBody::None),
            WrOpcode::RegMr if connected && wr.sges().is_empty() => {
                let registration = wr.registration().ok_or(EINVAL)?;
                Ok(WrBody::Reg(registration.mr.registration(&registration)?))
            }
            _ => Err(not_of_qp(opcode)),
        }
    }

    fn rdma_body(wr: &ib::SendWr<'_, Hca>) -> Result<WrBody> {
        let rdma = wr.rdma().ok_or(EINVAL)?;
        Ok(WrBody::Rdma {
            remote_addr: rdma.remote_addr,
            rkey: rdma.rkey,
        })
    }

    fn post_one_send(&self, sq: &mut WorkQueue, wr: &ib::SendWr<'_, Hca>) -> Result {
        sq.check(wr.sges())?;
        let opcode = wr.opcode()?;
        let request = self.send_request(wr, opcode)?;
        let payload = self.payload(wr, opcode)?;
        let entry = Entry {
            wr_id: wr.wr_id(),
            opcode: opcode.completes_as(),
            length: 0,
        };
        if self.hca.is_broken() {
            self.may_lose(wr)?;
            sq.keep(entry);
            return Ok(());
        }
        sq.post_send(&request, &payload, entry)
            .inspect_err(|error| self.post_failed(*error))
    }

    /// Checks whether a send work request may be posted to a device that has failed, to be flushed.
    ///
    /// MADs of the CM may once. If one has no answer, the MAD layer posts it 15 times more, which takes minutes, and
    /// only then tells the CM, which tells its consumer that the connection has ended. NFS does not let go of the RDMA
    /// device before that (`rpcrdma_remove_one()`). The MAD layer gives up when a MAD cannot be posted once more
    /// (`timeout_sends()`). The first time it must not fail, or the CM tells nobody (`ib_send_cm_dreq()`). Each MAD of
    /// the CM has an AH of its own, so the AH knows which time it is.
    ///
    /// # Errors
    ///
    /// `EIO` for a MAD that may not be posted once more.
    fn may_lose(&self, wr: &ib::SendWr<'_, Hca>) -> Result {
        match wr.datagram() {
            Some(to) if self.qp_type == QpType::Gsi && to.ah.loses_mad() => Err(EIO),
            _ => Ok(()),
        }
    }

    fn post_one_recv(&self, rq: &mut WorkQueue, wr: &ib::RecvWr<'_>) -> Result {
        let sges = wr.sges();
        rq.check(sges)?;
        let entry = Entry {
            wr_id: wr.wr_id(),
            opcode: WcOpcode::Recv,
            length: sges.iter().map(|sge| u64::from(sge.length)).sum(),
        };
        if self.hca.is_broken() {
            rq.keep(entry);
            return Ok(());
        }
        rq.post_recv(sges, entry)
            .inspect_err(|error| self.post_failed(*error))
    }

    /// Takes the device out of service, because a work queue had a slot for a work request and the ring did not
    /// take it.
    fn post_failed(&self, error: Error) {
        self.hca.fail(if error == ENOSPC {
            "it keeps buffers of work requests that it completed"
        } else {
            "a work queue broke"
        });
    }

    /// Tells the device of work requests that were posted, or, if it has failed, the consumer that they are
    /// flushed.
    fn posted(&self, mut queue: IrqGuard<'_, WorkQueue>, ring: doorbell::Ring, count: u64) {
        let counter = match ring {
            doorbell::Ring::Send => Counter::SendsPosted,
            doorbell::Ring::Receive => Counter::RecvsPosted,
        };
        self.hca.stats().add(counter, count);
        if self.hca.is_broken() {
            self.hca.attend();
        } else if queue.publish() {
            // Nobody who polls or posts waits for the doorbell.
            drop(queue);
            self.hca.ring_doorbell(self.qpn, ring);
        }
    }

    /// Tells the device that a program has posted to its own ring.
    ///
    /// # Errors
    ///
    /// `EIO` if the device has failed.
    fn ring_for_program(&self, ring: doorbell::Ring) -> Result {
        if self.hca.config().rings.is_none() {
            return Ok(());
        }
        if self.hca.is_broken() {
            return Err(EIO);
        }
        self.hca.ring_doorbell(self.qpn, ring);
        Ok(())
    }

    /// Returns the request that attaches the QP to a multicast group, or detaches it.
    fn mcast(&self, gid: [u8; 16]) -> bindings::virtio_rdma_cmd_mcast {
        bindings::virtio_rdma_cmd_mcast {
            gid,
            qpn: self.qpn.to_le(),
            lid: 0,
            reserved_16: 0,
        }
    }

    /// Sends MODIFY_QP.
    fn modify_device(&self, change: &Change) -> Result {
        let request = bindings::virtio_rdma_cmd_modify_qp {
            qpn: self.qpn.to_le(),
            attr_mask: change.mask.to_le(),
            attr: change.attr,
        };
        match self.hca.execute::<cmd::ModifyQp>(&request) {
            // Consumers move a QP to RESET or ERR to stop it, and a QP of a device that has failed
            // is stopped.
            Err(_) if self.hca.is_broken() => {
                self.hca.wait_if_broken();
                Ok(())
            }
            result => result.map(|_| ()),
        }
    }

    /// Sends the device the change to INIT that was kept, if there is one.
    fn send_init(&self, progress: &mut Progress, init: Option<Change>) -> Result {
        if let Some(init) = init {
            self.modify_device(&init)?;
            progress.sent();
        }
        Ok(())
    }
}

/// Rights to FLUSH. Where the device has no FLUSH, a program may grant them all the same; its peers cannot use
/// them.
const FLUSH_ACCESS: u32 =
    bindings::VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL | bindings::VIRTIO_RDMA_ACCESS_FLUSH_PERSISTENT;

/// Returns the attributes of MODIFY_QP that `mask` names.
fn to_wire(hca: &Hca, attr: &bindings::ib_qp_attr, mask: u32) -> Result<wire::QpAttr> {
    let no_access = if hca.config().flush { 0 } else { FLUSH_ACCESS };
    let mut wire = wire::QpAttr {
        qp_state: attr.qp_state as u8,
        cur_qp_state: attr.cur_qp_state as u8,
        path_mtu: attr.path_mtu as u8,
        qkey: attr.qkey.to_le(),
        rq_psn: attr.rq_psn.to_le(),
        sq_psn: attr.sq_psn.to_le(),
        dest_qp_num: attr.dest_qp_num.to_le(),
        qp_access_flags: (attr.qp_access_flags as u32 & !no_access).to_le(),
        pkey_index: attr.pkey_index.to_le(),
        en_sqd_async_notify: attr.en_sqd_async_notify,
        max_rd_atomic: attr.max_rd_atomic,
        max_dest_rd_atomic: attr.max_dest_rd_atomic,
        min_rnr_timer: attr.min_rnr_timer,
        port_num: attr.port_num as u8,
        timeout: attr.timeout,
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
        rate_limit: attr.rate_limit.to_le(),
        ..wire::QpAttr::zeroed()
    };
    if mask & bindings::VIRTIO_RDMA_QP_AV != 0 {
        wire.ah_attr = ah::to_wire(&ib::AhAttr::new(&attr.ah_attr).ok_or(EINVAL)?);
    }
    Ok(wire)
}

/// Returns the error for an operation that the QP does not have.
fn not_of_qp(opcode: WrOpcode) -> Error {
    let reason = c"a work request with an opcode that the QP does not have";
    refuse(EINVAL, reason, u32::from(opcode).into(), 0)
}

/// Copies the attributes that QUERY_QP returned.
fn from_wire(wire: &wire::QpAttr, attr: &mut bindings::ib_qp_attr) {
    attr.qp_state = u32::from(wire.qp_state);
    attr.cur_qp_state = u32::from(wire.qp_state);
    attr.path_mtu = u32::from(wire.path_mtu);
    attr.path_mig_state = bindings::ib_mig_state_IB_MIG_MIGRATED;
    attr.qkey = u32::from_le(wire.qkey);
    attr.rq_psn = u32::from_le(wire.rq_psn);
    attr.sq_psn = u32::from_le(wire.sq_psn);
    attr.dest_qp_num = u32::from_le(wire.dest_qp_num);
    attr.qp_access_flags = u32::from_le(wire.qp_access_flags) as c_int;
    attr.pkey_index = u16::from_le(wire.pkey_index);
    attr.en_sqd_async_notify = wire.en_sqd_async_notify;
    attr.sq_draining = wire.sq_draining;
    attr.max_rd_atomic = wire.max_rd_atomic;
    attr.max_dest_rd_atomic = wire.max_dest_rd_atomic;
    attr.min_rnr_timer = wire.min_rnr_timer;
    attr.port_num = u32::from(wire.port_num);
    attr.timeout = wire.timeout;
    attr.retry_cnt = wire.retry_cnt;
    attr.rnr_retry = wire.rnr_retry;
    attr.rate_limit = u32::from_le(wire.rate_limit);
    ah::from_wire(&wire.ah_attr, &mut attr.ah_attr);
}

impl ib::QueuePair<Hca> for Qp {
    fn create(
        dev: &ib::Device<Hca>,
        attr: &ib::QpInitAttr<'_, Hca>,
    ) -> Result<impl PinInit<Self, Error>> {
        let hca = dev.data().clone();
        let qp_type = attr.qp_type;
        let is_target = qp_type == QpType::XrcTgt;
        let (parts, cap) = if is_target {
            (new_xrc_target(&hca, attr)?, Default::default())
        } else {
            new_queues(dev, attr).map_err(|error| hca.create_error(attr.udata.is_none(), error))?
        };
        let Parts {
            qpn,
            sq,
            rq,
            region,
        } = parts;
        // The QP of the GSI belongs to the core, not to a consumer.
        if attr.udata.is_none() && qp_type != QpType::Gsi {
            if let Some(pd) = attr.pd {
                pd.consumer_came();
            }
        }
        let srqn = attr.srq_number();
        let signal_all = attr.signal_all;
        let tells_vlan = hca.config().vlan && qp_type.has_datagrams() && attr.udata.is_none();
        let has_recv_cq = !is_target && qp_type != QpType::XrcIni;
        let send_cqn = attr.send_cq.filter(|_| !is_target).map(cq_number);
        let recv_cqn = attr.recv_cq.filter(|_| has_recv_cq).map(cq_number);
        // Before the state of a target first changes, the core says who gets its events.
        let reported: u32 = if is_target { u32::MAX } else { 0 };

        Ok(try_pin_init!(Self {
            hca,
            qpn,
            qp_type,
            signal_all,
            send_cqn,
            recv_cqn,
            srqn,
            tells_vlan,
            cap,
            progress <- new_mutex!(Progress::new()),
            sq <- new_irq_spinlock!(sq, "virtio_rdma::Qp::sq"),
            rq <- new_irq_spinlock!(rq, "virtio_rdma::Qp::rq"),
            region,
            reported <- new_irq_spinlock!(reported, "virtio_rdma::Qp::reported"),
            groups <- new_mutex!(KVec::new()),
        }? Error))
    }

    fn modify(&self, attr: &bindings::ib_qp_attr, mask: u32) -> Result {
        let mut progress = self.progress.lock();
        if mask & ALTERNATE_PATH != 0 {
            let error = crate::errno::unsupported();
            return Err(refuse(error, c"an alternate path of a QP", mask.into(), 0));
        }
        let current = if mask & bindings::VIRTIO_RDMA_QP_CUR_STATE != 0 {
            QpState::try_from(attr.cur_qp_state)?
        } else {
            progress.state
        };
        let next = if mask & bindings::VIRTIO_RDMA_QP_STATE != 0 {
            QpState::try_from(attr.qp_state)?
        } else {
            current
        };
        if !ib::modify_is_ok(current, next, self.qp_type, mask) {
            let (to, from) = (u32::from(next).into(), u32::from(current).into());
            let reason = c"a QP to a state (number) from another (limit), or its attributes";
            return Err(refuse(EINVAL, reason, to, from));
        }

        let attr = to_wire(&self.hca, attr, mask)?;
        let change = Change { attr, mask };
        let may_keep = self.hca.config().reset_to_rtr;
        let reset = next == QpState::Reset;
        if !may_keep || !progress.keep(self.qp_type, next, &change) {
            let due = progress.due_before(next, &change);
            self.send_init(&mut progress, due)?;
            if reset {
                // The queues must not change while the device empties them.
                self.accept(next);
            }
            if let Err(error) = self.modify_device(&progress.join(next, change)) {
                self.accept(progress.state);
                return Err(error);
            }
            progress.sent();
        }
        if reset {
            self.forget();
        }
        progress.state = next;
        *self.reported.lock() = 0;
        self.accept(next);
        if next == QpState::Err && self.hca.is_broken() {
            // Hca::run() reports what the device would have reported.
            self.hca.attend();
        }
        Ok(())
    }

    fn query(&self, attr: &mut bindings::ib_qp_attr) -> Result {
        let mut progress = self.progress.lock();
        let kept = progress.kept();
        self.send_init(&mut progress, kept)?;
        let request = bindings::virtio_rdma_cmd_query_qp {
            qpn: self.qpn.to_le(),
            attr_mask: u32::MAX,
        };
        let reply = self.hca.execute::<cmd::QueryQp>(&request)?;
        if QpState::try_from(u32::from(reply.attr.qp_state)).is_err() {
            self.hca
                .stats()
                .bad_reply(Counter::BadReplyValue, cmd::QueryQp::NAME);
            return Err(EIO);
        }
        from_wire(&reply.attr, attr);
        attr.cap = self.cap;
        Ok(())
    }

    fn destroy(&self) -> Result {
        let mut progress = self.progress.lock();
        self.accept(QpState::Reset);
        let (sq, rq) = queues(&self.hca, self.qpn);
        self.hca.leave(sq);
        self.hca.leave(rq);
        let request = bindings::virtio_rdma_cmd_destroy_qp {
            qpn: self.qpn.to_le(),
        };
        self.hca.execute_destroy::<cmd::DestroyQp>(&request);
        *progress = Progress::new();
        self.hca.cancel_doorbell(self.qpn);
        self.close();
        self.forget();
        Ok(())
    }

    fn number(&self) -> u32 {
        self.qpn
    }

    fn cap(&self) -> bindings::ib_qp_cap {
        self.cap
    }

    fn signals_all(&self) -> bool {
        self.signal_all
    }

    fn post_send(&self, wrs: &mut ib::SendWrs<'_, Hca>) -> Result {
        let mut sq = self.sq.lock();
        let mut count = 0;
        let result = wrs.try_for_each(|wr| {
            self.post_one_send(&mut sq, &wr)?;
            count += 1;
            Ok(())
        });
        if count != 0 {
            self.posted(sq, doorbell::Ring::Send, count);
        }
        result
    }

    fn post_recv(&self, wrs: &mut ib::RecvWrs<'_>) -> Result {
        if let Some(srqn) = self.srqn {
            let reason = c"a receive to a QP that receives from an SRQ";
            return Err(refuse(EINVAL, reason, srqn.into(), 0));
        }
        let mut rq = self.rq.lock();
        let mut count = 0;
        let result = wrs.try_for_each(|wr| {
            self.post_one_recv(&mut rq, &wr)?;
            count += 1;
            Ok(())
        });
        if count != 0 {
            self.posted(rq, doorbell::Ring::Receive, count);
        }
        result
    }

    fn ring_send_doorbell(&self) -> Result {
        self.ring_for_program(doorbell::Ring::Send)
    }

    fn ring_recv_doorbell(&self) -> Result {
        self.ring_for_program(doorbell::Ring::Receive)
    }

    fn attach_mcast(&self, gid: [u8; 16]) -> Result {
        if self.hca.config().mcast.is_none() {
            let error = crate::errno::unsupported();
            return Err(refuse(
                error,
                c"a multicast group of a device that has none",
                0,
                0,
            ));
        }
        let mut groups = self.groups.lock();
        if groups.contains(&gid) {
            return Ok(());
        }
        groups.reserve(1, GFP_KERNEL)?;
        self.hca.execute::<cmd::AttachMcast>(&self.mcast(gid))?;
        let _ = groups.push_within_capacity(gid);
        Ok(())
    }

    fn detach_mcast(&self, gid: [u8; 16]) -> Result {
        let mut groups = self.groups.lock();
        let at = groups.iter().position(|group| *group == gid);
        let reason = c"a multicast group that the QP is not in";
        let _ = groups.remove(at.ok_or_else(|| refuse(EINVAL, reason, 0, 0))?);
        self.hca
            .execute_destroy::<cmd::DetachMcast>(&self.mcast(gid));
        Ok(())
    }

    fn details(&self, details: &mut ib::Details<'_>) -> Result {
        let state = self.progress.lock().state;
        details.put(c"state", state.into())?;
        if let Some(cqn) = self.send_cqn {
            details.put(c"send_cqn", cqn)?;
        }
        if let Some(cqn) = self.recv_cqn {
            details.put(c"recv_cqn", cqn)?;
        }
        details.put(c"sq_depth", self.cap.max_send_wr)?;
        details.put(c"rq_depth", self.cap.max_recv_wr)?;
        details.put(c"max_inline", self.cap.max_inline_data)?;
        details.put(c"rings", u32::from(self.region.is_some()))?;
        let groups = self.groups.lock().len();
        details.put(c"mcast_groups", u32::try_from(groups).unwrap_or(u32::MAX))
    }
}

#[cfg(virtio_rdma_kunit)]
#[kunit_tests(virtio_rdma_qp)]
#[allow(unsafe_code)]
mod tests {
    use super::*;

    #[test]
    fn states_accept_work_requests() {
        for (state, sends, recvs) in [
            (QpState::Reset, false, false),
            (QpState::Init, false, true),
            (QpState::Rtr, false, true),
            (QpState::Rts, true, true),
            (QpState::Sqd, true, true),
            (QpState::Sqe, true, true),
            (QpState::Err, true, true),
        ] {
            assert_eq!(accepts_sends(state), sends);
            assert_eq!(accepts_recvs(state), recvs);
        }
    }

    #[test]
    fn flushed_work_requests_say_what_they_were() {
        let wc = flushed(&Entry {
            wr_id: 17,
            opcode: WcOpcode::RdmaRead,
            length: 0,
        });
        assert_eq!(wc.wr_id, 17);
        assert_eq!(wc.status, bindings::ib_wc_status_IB_WC_WR_FLUSH_ERR);
        assert!(wc.opcode == WcOpcode::RdmaRead);
    }
}
