// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The responder: what a message does at the QP that it arrives at.
//!
//! Everything here runs in the requester's thread, with the responder's lock
//! held, on the device of the responder.

use std::sync::Arc;

use abi::{
    VIRTIO_RDMA_ACCESS_LOCAL_WRITE, VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC,
    VIRTIO_RDMA_ACCESS_REMOTE_READ, VIRTIO_RDMA_ACCESS_REMOTE_WRITE, VIRTIO_RDMA_EVENT_COMM_EST,
    VIRTIO_RDMA_EVENT_QP_ACCESS_ERR, VIRTIO_RDMA_EVENT_QP_FATAL,
    VIRTIO_RDMA_EVENT_QP_LAST_WQE_REACHED, VIRTIO_RDMA_EVENT_QP_REQ_ERR,
    VIRTIO_RDMA_F_ATOMIC_WRITE, VIRTIO_RDMA_WC_LOC_ACCESS_ERR, VIRTIO_RDMA_WC_LOC_LEN_ERR,
    VIRTIO_RDMA_WC_LOC_PROT_ERR, VIRTIO_RDMA_WC_RECV, VIRTIO_RDMA_WC_RECV_RDMA_WITH_IMM,
    VIRTIO_RDMA_WC_REM_ACCESS_ERR, VIRTIO_RDMA_WC_REM_INV_REQ_ERR, VIRTIO_RDMA_WC_REM_OP_ERR,
    VIRTIO_RDMA_WC_SUCCESS, VIRTIO_RDMA_WC_WITH_IMM, VIRTIO_RDMA_WC_WITH_INVALIDATE,
    VIRTIO_RDMA_WC_WR_FLUSH_ERR,
};
use zerocopy::{FromZeros, IntoBytes};

use crate::base::counters::Counter;
use crate::base::sync::lock;
use crate::device::Shared;
use crate::memory::copy::{self, Atomic, Side};
use crate::memory::fast_reg::{Invalidation, Invalidator};
use crate::memory::flush::Flush;
use crate::memory::mr::{Claim, Data, Mapping, Mappings, View};
use crate::memory::mr_cache::PinSet;
use crate::qp::halves::{QpConfig, Responder};
use crate::qp::state::{QpState, QpType};
use crate::queue::cq::Cqe;
use crate::queue::work_queue::Flushed;
use crate::queue::wqe::{Malformed, Operation, SendWqe};
use crate::transport::turn::{Outbox, Turn};

/// A chunk of a message.
pub(crate) struct Message<'a> {
    /// The work request.
    pub wqe: &'a SendWqe,
    /// Bytes of it that earlier chunks carried.
    pub done: u64,
    /// Bytes of this chunk.
    pub len: u64,
    /// What they are, or where they go, at the requester.
    pub local: Data<'a>,
    /// The requester's path MTU, an `enum ib_mtu`: the size of the packets that it would send.
    pub path_mtu: u8,
    /// Whether the requester, should there be no receive for it, asks again by itself, so that it
    /// need not be told of one.
    pub asks_again: bool,
}

impl Message<'_> {
    fn is_first(&self) -> bool {
        self.done == 0
    }

    fn is_last(&self) -> bool {
        self.done + self.len == self.wqe.total
    }

    /// Whether it is one packet at the requester.
    fn is_one_packet(&self) -> bool {
        packets(self.wqe.total, self.path_mtu) == 1
    }

    /// Whether its packets have the size that the responder expects of them. Both path MTUs are the
    /// same on a connection that was made well; if not, what is one packet for both still passes.
    #[inline]
    fn fits_path(&self, responders: u8) -> bool {
        self.path_mtu == responders
            || self.is_one_packet() && packets(self.wqe.total, responders) == 1
    }
}

/// Why the remote side of an RDMA operation was refused.
#[derive(Clone, Copy)]
enum Refusal {
    /// The QP does not let its peer do this at all.
    Operation,
    /// The key does not give this access to this range.
    Memory,
}

/// Why the responder does not do what a chunk asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nak {
    /// RNR NAK, with the encoded timer.
    NotReady(u8),
    /// The responder knows nothing of the chunks before: begin again.
    Restart,
    /// There is no answer.
    Silence,
    /// It ends with this `enum virtio_rdma_wc_status` at the requester.
    Failed(u32),
}

/// Why no receive was taken.
enum NoReceive {
    /// None is posted.
    Empty,
    /// One is, but it is none; the QP has failed.
    Malformed,
}

/// The completion of a receive, as far as messages differ.
#[derive(Clone, Copy)]
pub(crate) struct Received {
    /// `enum virtio_rdma_wc_opcode`.
    pub opcode: u32,
    /// Bytes received.
    pub len: u64,
    /// Immediate data.
    pub immediate: Option<u32>,
    /// The key that was invalidated.
    pub invalidated: Option<u32>,
    /// Whether the sender asked for a solicited event.
    pub solicited: bool,
}

impl Shared {
    /// Does what a chunk asks for. `waiter` is the requester, should it have to
    /// wait for a receive.
    pub(crate) fn respond(
        self: &Arc<Self>,
        slot: u16,
        responder: &mut Responder,
        message: &Message<'_>,
        waiter: (&Arc<Self>, u16),
        pins: &mut PinSet,
        outbox: &mut Outbox,
    ) -> Result<(), Nak> {
        self.establish(slot, responder);
        pins.begin(&**self);
        let answer = match message.wqe.operation {
            _ if !message.fits_path(responder.attr.path_mtu) => {
                self.refuse_packets(slot, responder, message, outbox)
            }
            Operation::Send => self.receive_send(slot, responder, message, pins, outbox),
            Operation::Write => self.receive_write(slot, responder, message, pins, outbox),
            Operation::Read => self.serve_read(slot, responder, message, pins),
            Operation::Atomic(atomic) => self.serve_atomic(slot, responder, message, atomic, pins),
            operation if !self.offers(operation) => Err(self.request_failed(slot, responder)),
            Operation::AtomicWrite => self.receive_atomic_write(slot, responder, message, pins),
            Operation::Flush(flush) => self.serve_flush(slot, responder, message, flush, pins),
            // These concern no peer.
            Operation::RegMr(_) | Operation::LocalInv | Operation::BindMw(_) => {
                Err(self.request_failed(slot, responder))
            }
        };
        if matches!(answer, Err(Nak::NotReady(_))) && is_reliable(responder) {
            responder.waiter = Some((Arc::clone(waiter.0), waiter.1));
        }
        answer
    }

    /// Raises COMM_EST with the first message in RTR.
    fn establish(&self, slot: u16, responder: &mut Responder) {
        if !responder.established {
            responder.established = true;
            if self.qps.take(slot).state() == QpState::Rtr {
                self.raise(VIRTIO_RDMA_EVENT_COMM_EST, u32::from(slot) + 1);
            }
        }
    }

    fn receive_send(
        self: &Arc<Self>,
        slot: u16,
        responder: &mut Responder,
        message: &Message<'_>,
        pins: &mut PinSet,
        outbox: &mut Outbox,
    ) -> Result<(), Nak> {
        if !message.is_first() && !responder.has_receive {
            return Err(Nak::Restart);
        }
        self.take_receive(slot, responder, message, outbox)?;
        if message.wqe.total > responder.receive.sges.total() {
            let statuses = (VIRTIO_RDMA_WC_LOC_LEN_ERR, VIRTIO_RDMA_WC_REM_INV_REQ_ERR);
            return Err(self.receive_failed(slot, responder, statuses, outbox));
        }
        if self.scatter(responder, message, pins).is_err() {
            self.fail_taken_receive(slot, responder, VIRTIO_RDMA_WC_LOC_PROT_ERR, outbox);
            return Err(Nak::Failed(VIRTIO_RDMA_WC_REM_OP_ERR));
        }
        if message.is_last() {
            if message.wqe.invalidate.is_some() && !self.can_invalidate() {
                let status = VIRTIO_RDMA_WC_REM_INV_REQ_ERR;
                return Err(self.receive_failed(slot, responder, (status, status), outbox));
            }
            if self.invalidate_remote(slot, responder, message).is_err() {
                // An error of class J (IBA 9.9.3.1), which no NAK tells of.
                let status = VIRTIO_RDMA_WC_REM_INV_REQ_ERR;
                self.fail_taken_receive(slot, responder, status, outbox);
                return Err(Nak::Silence);
            }
            self.complete_receive(slot, responder, VIRTIO_RDMA_WC_RECV, message, outbox);
        }
        advance_psn(responder, message);
        Ok(())
    }

    /// Invalidates the key that a SEND names, if it does: one of the QP's PD, and
    /// VALID.
    fn invalidate_remote(
        &self,
        slot: u16,
        responder: &Responder,
        message: &Message<'_>,
    ) -> Result<(), ()> {
        let Some(key) = message.wqe.invalidate else { return Ok(()) };
        let pdn = responder.config.ok_or(())?.pdn;
        let by = Invalidator::Remote;
        self.invalidate(Invalidation { key, pdn, qp: slot, by }).map_err(|_| {
            self.stats.add(Counter::AccessViolations, 1);
        })
    }

    /// Copies a chunk into the memory of a receive.
    fn scatter(
        &self,
        responder: &Responder,
        message: &Message<'_>,
        pins: &mut PinSet,
    ) -> Result<(), ()> {
        let pdn = responder.config.ok_or(())?.recv_pdn;
        let sges = responder.receive.sges.as_slice();
        let claim = Claim::local(pdn, VIRTIO_RDMA_ACCESS_LOCAL_WRITE);
        let mut target = Mappings::new();
        let mut map =
            |bytes| pins.map_sges(&self.keys, sges, claim, bytes, &mut target).map_err(|_| ());
        if message.is_first() && !message.is_last() {
            map(0..message.wqe.total)?;
        }
        map(message.done..message.done + message.len)?;
        let target = View { pins, mappings: &target };
        copy::scatter(message.local, target, message.wqe.total).map_err(|_| ())
    }

    #[inline(always)]
    fn receive_write(
        self: &Arc<Self>,
        slot: u16,
        responder: &mut Responder,
        message: &Message<'_>,
        pins: &mut PinSet,
        outbox: &mut Outbox,
    ) -> Result<(), Nak> {
        let access = VIRTIO_RDMA_ACCESS_REMOTE_WRITE;
        let takes_receive = message.is_last() && message.wqe.takes_receive();
        // A packet is checked for the operation, then for the receive that it needs, then for its
        // key (IBA 9.7.4.1, the latter in 9.7.4.1.5). The key stands in the first packet, the immediate
        // data in the last.
        let in_one_packet = takes_receive && message.is_one_packet();
        if in_one_packet && may(responder, access) {
            self.take_receive(slot, responder, message, outbox)?;
        }
        let target = match self.map_remote(slot, responder, message, access, pins) {
            Ok(target) => target,
            Err(Refusal::Memory) if in_one_packet => {
                return Err(self.write_failed(slot, responder, outbox));
            }
            Err(refusal) => return Err(self.refuse(slot, responder, refusal)),
        };
        if takes_receive {
            self.take_receive(slot, responder, message, outbox)?;
        }
        let target = View { pins, mappings: target.as_slice() };
        if copy::scatter(message.local, target, message.wqe.total).is_err() {
            return Err(if takes_receive {
                self.write_failed(slot, responder, outbox)
            } else {
                self.access_failed(slot, responder)
            });
        }
        if takes_receive {
            let opcode = VIRTIO_RDMA_WC_RECV_RDMA_WITH_IMM;
            self.complete_receive(slot, responder, opcode, message, outbox);
        }
        advance_psn(responder, message);
        Ok(())
    }

    fn serve_read(
        &self,
        slot: u16,
        responder: &mut Responder,
        message: &Message<'_>,
        pins: &mut PinSet,
    ) -> Result<(), Nak> {
        if responder.attr.max_dest_rd_atomic == 0 {
            return Err(self.request_failed(slot, responder));
        }
        let access = VIRTIO_RDMA_ACCESS_REMOTE_READ;
        let source = self
            .map_remote(slot, responder, message, access, pins)
            .map_err(|refusal| self.refuse(slot, responder, refusal))?;
        let Data::Mapped(local) = message.local else {
            return Err(Nak::Failed(VIRTIO_RDMA_WC_LOC_PROT_ERR));
        };
        let source = View { pins, mappings: source.as_slice() };
        copy::copy(source, local, message.wqe.total).map_err(|side| match side {
            Side::Source => self.access_failed(slot, responder),
            Side::Target => Nak::Failed(VIRTIO_RDMA_WC_LOC_PROT_ERR),
        })?;
        advance_psn(responder, message);
        Ok(())
    }

    fn serve_atomic(
        &self,
        slot: u16,
        responder: &mut Responder,
        message: &Message<'_>,
        atomic: Atomic,
        pins: &mut PinSet,
    ) -> Result<(), Nak> {
        let access = VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC;
        let target = self.map_word(slot, responder, message, access, pins)?;
        // An address that is aligned only in the region's own numbering fails
        // here: the word cannot be reached atomically.
        let Ok(before) = copy::atomic(pins, &target, atomic) else {
            return Err(self.request_failed(slot, responder));
        };
        advance_psn(responder, message);
        match message.local {
            Data::Mapped(local) if copy::write(local, before.as_bytes()).is_ok() => Ok(()),
            _ => Err(Nak::Failed(VIRTIO_RDMA_WC_LOC_PROT_ERR)),
        }
    }

    /// Checks and pins the word that an atomic operation or write names.
    fn map_word(
        &self,
        slot: u16,
        responder: &mut Responder,
        message: &Message<'_>,
        access: u32,
        pins: &mut PinSet,
    ) -> Result<Mapping, Nak> {
        if responder.attr.max_dest_rd_atomic == 0 || message.wqe.remote_addr % 8 != 0 {
            return Err(self.request_failed(slot, responder));
        }
        match self.map_remote(slot, responder, message, access, pins) {
            Ok(Some(target)) => Ok(target),
            Ok(None) => Err(self.request_failed(slot, responder)),
            Err(refusal) => Err(self.refuse(slot, responder, refusal)),
        }
    }

    /// Whether driver and device agreed on what an operation needs.
    pub(crate) fn offers(&self, operation: Operation) -> bool {
        match operation {
            Operation::AtomicWrite => self.has_rings() && self.has(VIRTIO_RDMA_F_ATOMIC_WRITE),
            Operation::Flush(_) => self.has_flush(),
            _ => true,
        }
    }

    /// A write of a word (IBA A19.4.2).
    fn receive_atomic_write(
        &self,
        slot: u16,
        responder: &mut Responder,
        message: &Message<'_>,
        pins: &mut PinSet,
    ) -> Result<(), Nak> {
        let access = VIRTIO_RDMA_ACCESS_REMOTE_WRITE;
        let target = self.map_word(slot, responder, message, access, pins)?;
        let value = match message.local {
            Data::Mapped(local) => {
                let mut bytes = [0; 8];
                copy::read(local, &mut bytes).ok().map(|()| bytes)
            }
            Data::Inline(bytes) => bytes.try_into().ok(),
        };
        let Some(value) = value.map(u64::from_ne_bytes) else {
            return Err(Nak::Failed(VIRTIO_RDMA_WC_LOC_PROT_ERR));
        };
        // As for the other atomics, an address is aligned in memory as well.
        if copy::store(pins, &target, value).is_err() {
            return Err(self.request_failed(slot, responder));
        }
        advance_psn(responder, message);
        Ok(())
    }

    fn serve_flush(
        &self,
        slot: u16,
        responder: &mut Responder,
        message: &Message<'_>,
        flush: Flush,
        pins: &mut PinSet,
    ) -> Result<(), Nak> {
        if !may(responder, flush.access) {
            return Err(self.request_failed(slot, responder));
        }
        let Some(config) = responder.config else {
            return Err(self.request_failed(slot, responder));
        };
        let claim = Claim { pdn: config.pdn, access: flush.access, qp: Some(slot) };
        let wqe = message.wqe;
        if self.flush(&flush, wqe.rkey, wqe.remote_addr, claim, pins).is_err() {
            return Err(self.access_failed(slot, responder));
        }
        advance_psn(responder, message);
        Ok(())
    }

    /// Checks and pins the remote side of a chunk; with the first chunk, all of
    /// it is checked. `None` for no bytes, of which no key is asked.
    #[inline(always)]
    fn map_remote(
        &self,
        slot: u16,
        responder: &Responder,
        message: &Message<'_>,
        access: u32,
        pins: &mut PinSet,
    ) -> Result<Option<Mapping>, Refusal> {
        let wqe = message.wqe;
        if !may(responder, access) {
            return Err(Refusal::Operation);
        }
        // IBA C9-88.
        if wqe.total == 0 {
            return Ok(None);
        }
        let pdn = responder.config.ok_or(Refusal::Memory)?.pdn;
        let claim = Claim { pdn, access, qp: Some(slot) };
        let mut map = |addr, len| {
            pins.map(&self.keys, wqe.rkey, claim, addr, len).map_err(|_| Refusal::Memory)
        };
        if message.is_first() && !message.is_last() {
            map(wqe.remote_addr, wqe.total)?;
        }
        let addr = wqe.remote_addr.checked_add(message.done).ok_or(Refusal::Memory)?;
        map(addr, message.len).map(Some)
    }

    /// Takes the receive for a message into its place, unless one is there
    /// already.
    fn take_receive(
        self: &Arc<Self>,
        slot: u16,
        responder: &mut Responder,
        message: &Message<'_>,
        outbox: &mut Outbox,
    ) -> Result<(), Nak> {
        let waits = is_reliable(responder) && !message.asks_again;
        self.next_receive(slot, responder, waits, outbox).map_err(|why| match why {
            NoReceive::Empty => Nak::NotReady(responder.attr.min_rnr_timer),
            NoReceive::Malformed => Nak::Failed(VIRTIO_RDMA_WC_REM_OP_ERR),
        })
    }

    /// As `take_receive`, for senders that wait for nothing; whether there is
    /// one.
    pub(crate) fn take_receive_unreliable(
        self: &Arc<Self>,
        slot: u16,
        responder: &mut Responder,
        outbox: &mut Outbox,
    ) -> bool {
        self.next_receive(slot, responder, false, outbox).is_ok()
    }

    /// Takes the next receive into its place; if it `waits`, the guest is asked to tell of one.
    fn next_receive(
        self: &Arc<Self>,
        slot: u16,
        responder: &mut Responder,
        waits: bool,
        outbox: &mut Outbox,
    ) -> Result<(), NoReceive> {
        if responder.has_receive {
            return Ok(());
        }
        let srq = responder.config.and_then(|config| config.srq);
        let receive = match srq {
            Some(srq) => self.next_shared(slot, srq, responder, waits)?,
            None => self.next_own(slot, responder, waits)?,
        };
        responder.has_receive = receive.is_ok();
        receive.map_err(|malformed| {
            self.complain(Counter::BadReceiveRequest, &malformed.why);
            let Malformed { wr_id, wc_opcode, index, status, .. } = malformed;
            let failed = Flushed { wr_id, wc_opcode, index };
            self.fail_receive(slot, responder, failed, status, outbox);
            self.fail_responder(slot, responder, None);
            if let Some(srq) = srq {
                self.fail_srq(srq);
            }
            NoReceive::Malformed
        })
    }

    /// Takes the next work request of the QP's SRQ.
    fn next_shared(
        &self,
        slot: u16,
        srq: u16,
        responder: &mut Responder,
        waits: bool,
    ) -> Result<Result<(), Malformed>, NoReceive> {
        self.take_shared(slot, srq, responder, waits)
            .map_err(|error| {
                self.complain(Counter::BadReceiveChain, &error);
                self.fail_srq(srq);
                self.fail_responder(slot, responder, Some(VIRTIO_RDMA_EVENT_QP_FATAL));
                NoReceive::Malformed
            })?
            .ok_or(NoReceive::Empty)
    }

    /// Takes the next work request of the QP's own receive queue.
    fn next_own(
        &self,
        slot: u16,
        responder: &mut Responder,
        waits: bool,
    ) -> Result<Result<(), Malformed>, NoReceive> {
        let max_sge = responder.config.map_or(0, |config| config.max_recv_sge);
        // Asked to be told: once, whatever the index does meanwhile.
        let mut asked = false;
        let receive = loop {
            match responder.queue.pop_receive(&mut responder.receive, max_sge) {
                Ok(Some(receive)) => break receive,
                Ok(None) if asked || !waits => {
                    return Err(NoReceive::Empty);
                }
                Ok(None) => {
                    (asked, responder.notify) = (true, true);
                    if !responder.queue.enable_notify() {
                        return Err(NoReceive::Empty);
                    }
                }
                Err(error) => {
                    self.complain(Counter::BadReceiveChain, &error);
                    self.fail_responder(slot, responder, Some(VIRTIO_RDMA_EVENT_QP_FATAL));
                    return Err(NoReceive::Malformed);
                }
            }
        };
        if responder.notify {
            responder.notify = false;
            responder.queue.disable_notify();
        }
        Ok(receive)
    }

    /// The receive of this message fails with the first status, and the QP with
    /// it; the requester is told the second. On an unreliable connection the
    /// message is dropped instead, and the receive waits for the next.
    fn receive_failed(
        self: &Arc<Self>,
        slot: u16,
        responder: &mut Responder,
        (local, remote): (u32, u32),
        outbox: &mut Outbox,
    ) -> Nak {
        if is_reliable(responder) {
            self.fail_taken_receive(slot, responder, local, outbox);
        } else {
            self.stats.add(Counter::DropRefused, 1);
        }
        Nak::Failed(remote)
    }

    /// The receive that was taken fails with this status, and the QP with it.
    pub(crate) fn fail_taken_receive(
        self: &Arc<Self>,
        slot: u16,
        responder: &mut Responder,
        status: u32,
        outbox: &mut Outbox,
    ) {
        responder.has_receive = false;
        self.fail_receive(slot, responder, responder.receive.failed(), status, outbox);
        self.fail_responder(slot, responder, None);
    }

    /// Refuses the key or the range of a write that has taken its receive: the completion of that
    /// tells of it, and no event (IBA 11.6.2, Local Access Error).
    fn write_failed(
        self: &Arc<Self>,
        slot: u16,
        responder: &mut Responder,
        outbox: &mut Outbox,
    ) -> Nak {
        self.stats.add(Counter::AccessViolations, 1);
        let statuses = (VIRTIO_RDMA_WC_LOC_ACCESS_ERR, VIRTIO_RDMA_WC_REM_ACCESS_ERR);
        self.receive_failed(slot, responder, statuses, outbox)
    }

    /// Refuses a message whose packets would not have the size that the responder expects (IBA
    /// 9.7.4.1.6). A SEND has taken its receive by then, whose completion tells of it.
    ///
    /// The request of a READ is one packet, whatever it asks for, so that the responder finds nothing
    /// wrong and answers in packets of its own path MTU (IBA 9.7.5.1.3). It is the requester that gets
    /// packets of the wrong size (IBA 9.7.6). The work request ends with Local Length Error, not with
    /// Bad Response Error, which is for an opcode that is not expected (IBA 11.6.2).
    #[cold]
    fn refuse_packets(
        self: &Arc<Self>,
        slot: u16,
        responder: &mut Responder,
        message: &Message<'_>,
        outbox: &mut Outbox,
    ) -> Result<(), Nak> {
        match message.wqe.operation {
            Operation::Read => Err(Nak::Failed(VIRTIO_RDMA_WC_LOC_LEN_ERR)),
            Operation::Send => {
                self.take_receive(slot, responder, message, outbox)?;
                let statuses = (VIRTIO_RDMA_WC_LOC_LEN_ERR, VIRTIO_RDMA_WC_REM_INV_REQ_ERR);
                Err(self.receive_failed(slot, responder, statuses, outbox))
            }
            _ => Err(self.request_failed(slot, responder)),
        }
    }

    fn refuse(&self, slot: u16, responder: &mut Responder, refusal: Refusal) -> Nak {
        match refusal {
            Refusal::Operation => self.request_failed(slot, responder),
            Refusal::Memory => self.access_failed(slot, responder),
        }
    }

    /// The requester asked for memory that it may not have.
    fn access_failed(&self, slot: u16, responder: &mut Responder) -> Nak {
        self.stats.add(Counter::AccessViolations, 1);
        self.fail_or_drop(slot, responder, VIRTIO_RDMA_EVENT_QP_ACCESS_ERR);
        Nak::Failed(VIRTIO_RDMA_WC_REM_ACCESS_ERR)
    }

    /// The requester asked for what the responder does not do.
    pub(crate) fn request_failed(&self, slot: u16, responder: &mut Responder) -> Nak {
        self.fail_or_drop(slot, responder, VIRTIO_RDMA_EVENT_QP_REQ_ERR);
        Nak::Failed(VIRTIO_RDMA_WC_REM_INV_REQ_ERR)
    }

    /// A request that the responder refuses ends a reliable connection with this
    /// event; on an unreliable one it is dropped (IBA 9.8.2).
    fn fail_or_drop(&self, slot: u16, responder: &mut Responder, event: u32) {
        if is_reliable(responder) {
            self.fail_responder(slot, responder, Some(event));
        } else {
            self.stats.add(Counter::DropRefused, 1);
        }
    }

    /// Moves the QP into ERR, and has its own thread flush it.
    pub(crate) fn fail_responder(&self, slot: u16, responder: &mut Responder, event: Option<u32>) {
        self.qps.take(slot).set_state(responder, QpState::Err);
        if let Some(event) = event {
            self.raise(event, u32::from(slot) + 1);
        }
        self.make_hot(self.jobs.send(slot));
        self.make_hot(self.jobs.receive(slot));
    }

    /// Completes the receive of a message with success.
    fn complete_receive(
        self: &Arc<Self>,
        slot: u16,
        responder: &mut Responder,
        opcode: u32,
        message: &Message<'_>,
        outbox: &mut Outbox,
    ) {
        let received = Received {
            opcode,
            len: message.wqe.total,
            immediate: message.wqe.immediate,
            invalidated: message.wqe.invalidate,
            solicited: message.wqe.solicited,
        };
        self.received(slot, responder, received, outbox, |_| ());
    }

    /// Completes a receive with success; `fill` sets what datagrams add.
    pub(crate) fn received(
        self: &Arc<Self>,
        slot: u16,
        responder: &mut Responder,
        received: Received,
        outbox: &mut Outbox,
        fill: impl FnOnce(&mut Cqe),
    ) {
        responder.has_receive = false;
        let Some(config) = responder.config else { return };
        let mut cqe = Cqe::new_zeroed();
        cqe.wr_id = responder.receive.wr_id;
        cqe.wqe_index = responder.receive.index;
        cqe.status = VIRTIO_RDMA_WC_SUCCESS as u8;
        cqe.opcode = received.opcode as u8;
        cqe.byte_len = u32::try_from(received.len).unwrap_or(u32::MAX);
        cqe.qp_num = u32::from(slot) + 1;
        cqe.srqn = config.named_srqn();
        if let Some(immediate) = received.immediate {
            cqe.ex = immediate;
            cqe.wc_flags = VIRTIO_RDMA_WC_WITH_IMM;
        }
        if let Some(key) = received.invalidated {
            cqe.ex = key;
            cqe.wc_flags = VIRTIO_RDMA_WC_WITH_INVALIDATE;
        }
        fill(&mut cqe);
        outbox.complete_receive(self, config.recv_cq, cqe, received.solicited);
        outbox.count_receive(received.len);
    }

    /// Completes a receive with an error.
    pub(crate) fn fail_receive(
        self: &Arc<Self>,
        slot: u16,
        responder: &Responder,
        failed: Flushed,
        status: u32,
        outbox: &mut Outbox,
    ) {
        let Some(config) = responder.config else { return };
        let mut cqe = Cqe::new_zeroed();
        cqe.wr_id = failed.wr_id;
        cqe.wqe_index = failed.index;
        cqe.status = status as u8;
        cqe.opcode = failed.wc_opcode;
        cqe.qp_num = u32::from(slot) + 1;
        cqe.srqn = config.named_srqn();
        self.count_error(status);
        outbox.complete_receive(self, config.recv_cq, cqe, false);
    }

    /// Looks after the receive queue when it was kicked or the QP has failed.
    /// Whether work is left at the end of the turn. Own thread only.
    pub(crate) fn service_receive(self: &Arc<Self>, slot: u16, turn: &mut Turn) -> bool {
        let Some(qp) = self.qps.get(slot) else { return false };
        let mut responder = lock(&qp.responder);
        if responder.config.is_none() {
            return false;
        }
        if qp.state() == QpState::Err {
            let is_left = self.flush_receive(slot, &mut responder, turn);
            turn.outbox.place_completions();
            return is_left;
        }
        if let Some((device, slot)) = responder.waiter.take() {
            drop(responder);
            device.make_hot(device.jobs.send(slot));
        }
        false
    }

    /// Completes posted receives with WR_FLUSH_ERR; whether some are left.
    fn flush_receive(
        self: &Arc<Self>,
        slot: u16,
        responder: &mut Responder,
        turn: &mut Turn,
    ) -> bool {
        let status = VIRTIO_RDMA_WC_WR_FLUSH_ERR;
        responder.waiter = None;
        if std::mem::take(&mut responder.has_receive) {
            let flushed = responder.receive.failed();
            self.fail_receive(slot, responder, flushed, status, &mut turn.outbox);
        }
        let shares = |config: QpConfig| config.srq.is_some() || config.kind == QpType::XrcTgt;
        if responder.config.is_some_and(shares) {
            self.last_wqe_reached(slot, responder);
            return false;
        }
        loop {
            if turn.is_over() {
                return true;
            }
            match responder.queue.pop_flushed_receive() {
                Ok(Some(flushed)) => {
                    turn.spend(0);
                    self.fail_receive(slot, responder, flushed, status, &mut turn.outbox);
                }
                Ok(None) => {
                    turn.spend(0);
                    responder.notify = true;
                    responder.queue.signal_if_needed();
                    if !responder.queue.enable_notify() {
                        return false;
                    }
                }
                Err(error) => {
                    self.complain(Counter::BadReceiveChain, &error);
                    self.raise(VIRTIO_RDMA_EVENT_QP_FATAL, u32::from(slot) + 1);
                    return false;
                }
            }
        }
    }

    /// A QP in ERR takes no more work requests of its SRQ.
    fn last_wqe_reached(&self, slot: u16, responder: &mut Responder) {
        self.leave_srq(slot, responder);
        if !std::mem::replace(&mut responder.last_wqe, true) {
            self.raise(VIRTIO_RDMA_EVENT_QP_LAST_WQE_REACHED, u32::from(slot) + 1);
        }
    }
}

/// Whether a QP lets its peer do this.
fn may(responder: &Responder, access: u32) -> bool {
    responder.attr.qp_access_flags & access == access
}

fn is_reliable(responder: &Responder) -> bool {
    responder.config.is_some_and(|config| config.kind.is_reliable())
}

/// Bytes of an `enum ib_mtu` as a power of two, of 4096 for one that is not set.
fn mtu_log2(mtu: u8) -> u32 {
    if (1..=5).contains(&mtu) {
        7 + u32::from(mtu)
    } else {
        12
    }
}

/// How many packets a message of `len` bytes would be.
#[inline]
pub(crate) fn packets(len: u64, mtu: u8) -> u32 {
    // Not by a division: each message asks several times.
    let log2 = mtu_log2(mtu);
    let last = u64::from(len & ((1 << log2) - 1) != 0);
    u32::try_from((len >> log2) + last).map_or(u32::MAX, |packets| packets.max(1))
}

/// Bits of a packet sequence number.
pub(crate) const PSN_MASK: u32 = 0xff_ffff;

/// Counts the packets of a message when its last chunk is done.
fn advance_psn(responder: &mut Responder, message: &Message<'_>) {
    if message.is_last() {
        let count = packets(message.wqe.total, responder.attr.path_mtu);
        responder.attr.rq_psn = responder.attr.rq_psn.wrapping_add(count) & PSN_MASK;
    }
}
