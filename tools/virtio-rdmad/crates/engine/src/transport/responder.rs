// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The responder: carries out messages at the QP at which they arrive.
//!
//! Everything here runs in the requester's thread, with the responder's lock
//! held, on the HCA of the responder.

use std::sync::Arc;

use abi::{
    VIRTIO_RDMA_ACCESS_LOCAL_WRITE, VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC,
    VIRTIO_RDMA_ACCESS_REMOTE_READ, VIRTIO_RDMA_ACCESS_REMOTE_WRITE, VIRTIO_RDMA_EVENT_COMM_EST,
    VIRTIO_RDMA_EVENT_QP_ACCESS_ERR, VIRTIO_RDMA_EVENT_QP_REQ_ERR, VIRTIO_RDMA_WC_RECV,
    VIRTIO_RDMA_WC_RECV_RDMA_WITH_IMM,
};
use zerocopy::IntoBytes;

use super::hca::{Hca, Responder};
use super::message::{Message, Nak};
use super::observe;
use super::receive::{NoReceive, Received, Receiver};
use crate::base::counters::Counter;
use crate::base::features::Features;
use crate::base::refused::{KeyError, RefusedAccess, SgeError};
use crate::base::slot::Slot;
use crate::base::wc_status::WcStatus;
use crate::memory::copy::{self, Atomic, Data, Side, View};
use crate::memory::fast_reg::{Invalidation, Invalidator};
use crate::memory::flush::{flush, Flush};
use crate::memory::management::invalidate;
use crate::memory::mr::{Claim, Mr};
use crate::memory::mr_cache::{Mapping, Mappings, MrCache};
use crate::qp::state::QpState;
use crate::queue::request::Operation;

/// The reason why the responder refuses an RDMA operation.
#[derive(Clone, Copy)]
enum Refusal {
    /// The QP does not let its peer do this at all.
    Operation,
    /// The key does not give this access to this range.
    Memory(KeyError),
}

/// The statuses of the work requests of both ends, if a message fails that has taken its receive.
#[derive(Clone, Copy)]
struct BothStatuses {
    /// The status of the receive, at the responder.
    receive: WcStatus,
    /// The status of the send work request, at the requester.
    send: WcStatus,
}

impl BothStatuses {
    /// The message is longer than its receive.
    const TOO_LONG: Self =
        Self { receive: WcStatus::LocalLength, send: WcStatus::RemoteInvalidRequest };
}

/// A chunk of a message at the QP that it arrives at.
pub(crate) struct Arrival<'a, 'm> {
    /// The QP.
    pub to: Receiver<'a>,
    /// The chunk.
    pub message: &'a Message<'m>,
    /// Regions of the responder's HCA.
    pub cache: &'a mut MrCache,
}

impl Arrival<'_, '_> {
    /// Carries out the chunk. `waiter` is the HCA and the place of the requester, should it have to wait for a receive;
    /// a requester on the wire asks again by itself.
    #[inline(always)] // or each message waits for the context to be written and read again
    pub fn respond(&mut self, waiter: Option<(&Arc<Hca>, Slot)>) -> Result<(), Nak> {
        self.establish();
        self.cache.begin(&**self.to.hca);
        let answer = match self.message.request.operation {
            _ if !self.message.fits_path(self.to.responder.attr.path_mtu) => self.refuse_packets(),
            Operation::Send => self.receive_send(waiter.is_some()),
            Operation::Write => self.receive_write(),
            Operation::Read => self.serve_read(),
            operation if !offers(&self.to.hca.features, operation) => Err(self.request_failed()),
            Operation::Atomic(atomic) => self.serve_atomic(atomic),
            Operation::AtomicWrite => self.receive_atomic_write(),
            Operation::Flush(flush) => self.serve_flush(flush),
            // These concern no peer.
            Operation::RegMr(_) | Operation::LocalInv | Operation::BindMw(_) => {
                Err(self.request_failed())
            }
        };
        if matches!(answer, Err(Nak::NotReady(_))) && self.to.is_reliable() {
            self.to.responder.waiter = waiter.map(|(hca, slot)| (Arc::clone(hca), slot));
        }
        answer
    }

    /// Raises COMM_EST with the first message in RTR.
    fn establish(&mut self) {
        let Receiver { hca, slot, responder, .. } = &mut self.to;
        if !responder.established {
            responder.established = true;
            if hca.qps.take(*slot).state() == QpState::Rtr {
                hca.raise(VIRTIO_RDMA_EVENT_COMM_EST, slot.number());
            }
        }
    }

    /// Receives a chunk of a SEND. If the requester `comes_again`, it is told to where a copy by the key that the
    /// message invalidates is under way; else this waits for the copy.
    fn receive_send(&mut self, comes_again: bool) -> Result<(), Nak> {
        let message = self.message;
        if !message.is_first() && !self.to.responder.has_receive {
            return Err(Nak::Restart);
        }
        self.take_receive()?;
        if message.request.total > self.to.responder.receive.sges.total() {
            return Err(self.receive_failed(BothStatuses::TOO_LONG, None));
        }
        if let Err(wrong) = self.scatter() {
            let refused = wrong.access(self.to.responder.receive.sges.as_slice());
            self.to.fail_receive(WcStatus::LocalProtection, refused);
            return Err(Nak::Failed(WcStatus::RemoteOperation));
        }
        if message.is_last() {
            if message.request.invalidate.is_some() && !self.to.hca.features.has_invalidation() {
                let status = WcStatus::RemoteInvalidRequest;
                return Err(
                    self.receive_failed(BothStatuses { receive: status, send: status }, None)
                );
            }
            loop {
                match self.invalidate_remote() {
                    Ok(None) => break,
                    Ok(Some(_)) if comes_again => return Err(Nak::Again),
                    Ok(Some(in_use)) => in_use.revoke(),
                    Err(why) => {
                        // An error of class J (IBA 9.9.3.1), which no NAK tells of.
                        let key = message.request.invalidate.unwrap_or_default();
                        let refused = RefusedAccess { key, address: 0, length: 0, why };
                        self.to.fail_receive(WcStatus::RemoteInvalidRequest, Some(refused));
                        return Err(Nak::Silence);
                    }
                }
            }
            self.complete_receive(VIRTIO_RDMA_WC_RECV);
        }
        advance_psn(self.to.responder, message);
        Ok(())
    }

    /// Invalidates the key that a SEND names, if it does, as [`invalidate`]. The key must be one of the QP's PD, and
    /// VALID.
    fn invalidate_remote(&self) -> Result<Option<Arc<Mr>>, KeyError> {
        let Some(key) = self.message.request.invalidate else { return Ok(None) };
        let Receiver { hca, slot, responder, .. } = &self.to;
        let pdn = responder.config.ok_or(KeyError::Pd)?.pdn;
        let what = Invalidation { key, pdn, qp: *slot, by: Invalidator::Remote };
        invalidate(&hca.keys, what).inspect_err(|_| {
            hca.stats.add(Counter::AccessViolations, 1);
        })
    }

    /// Copies the chunk into the memory of a receive.
    fn scatter(&mut self) -> Result<(), SgeError> {
        let message = self.message;
        let pdn = self.to.responder.config.ok_or(SgeError::COPY)?.recv_pdn;
        let sges = self.to.responder.receive.sges.as_slice();
        let claim = Claim::local(pdn, VIRTIO_RDMA_ACCESS_LOCAL_WRITE);
        let mut target = Mappings::new();
        let (keys, cache) = (&self.to.hca.keys, &mut *self.cache);
        let mut map = |bytes| cache.map_sges(keys, sges, claim, bytes, &mut target);
        if message.is_first() && !message.is_last() {
            map(0..message.request.total)?;
        }
        map(message.done..message.done + message.len)?;
        let target = View { cache, mappings: &target };
        copy::scatter(message.local, target, message.request.total).map_err(|_| SgeError::COPY)
    }

    #[inline(always)]
    fn receive_write(&mut self) -> Result<(), Nak> {
        let message = self.message;
        let access = VIRTIO_RDMA_ACCESS_REMOTE_WRITE;
        let takes_receive = message.is_last() && message.request.takes_receive();
        // A packet is checked for the operation, then for the receive that it needs, then for its
        // key (IBA 9.7.4.1, the latter in 9.7.4.1.5). The key stands in the first packet, the immediate
        // data in the last.
        let in_one_packet = takes_receive && message.is_one_packet();
        if in_one_packet && may(self.to.responder, access) {
            self.take_receive()?;
        }
        let target = match self.map_remote(access) {
            Ok(target) => target,
            Err(Refusal::Memory(why)) if in_one_packet => return Err(self.write_failed(why)),
            Err(refusal) => return Err(self.refuse(refusal)),
        };
        if takes_receive {
            self.take_receive()?;
        }
        let target = View { cache: self.cache, mappings: target.as_slice() };
        if copy::scatter(message.local, target, message.request.total).is_err() {
            let why = KeyError::Memory;
            return Err(if takes_receive {
                self.write_failed(why)
            } else {
                self.access_failed(why)
            });
        }
        if takes_receive {
            self.complete_receive(VIRTIO_RDMA_WC_RECV_RDMA_WITH_IMM);
        }
        advance_psn(self.to.responder, message);
        Ok(())
    }

    fn serve_read(&mut self) -> Result<(), Nak> {
        let message = self.message;
        if self.to.responder.attr.max_dest_rd_atomic == 0 {
            return Err(self.request_failed());
        }
        let source = self
            .map_remote(VIRTIO_RDMA_ACCESS_REMOTE_READ)
            .map_err(|refusal| self.refuse(refusal))?;
        let Data::Mapped(local) = message.local else {
            return Err(Nak::Failed(WcStatus::LocalProtection));
        };
        let source = View { cache: self.cache, mappings: source.as_slice() };
        copy::copy(source, local, message.request.total).map_err(|side| match side {
            Side::Source => self.access_failed(KeyError::Memory),
            Side::Target => Nak::Failed(WcStatus::LocalProtection),
        })?;
        advance_psn(self.to.responder, message);
        Ok(())
    }

    fn serve_atomic(&mut self, atomic: Atomic) -> Result<(), Nak> {
        let before = self.do_atomic(atomic)?;
        match self.message.local {
            Data::Mapped(local) if copy::write(local, before.as_bytes()).is_ok() => Ok(()),
            _ => Err(Nak::Failed(WcStatus::LocalProtection)),
        }
    }

    /// Does an atomic operation; returns the word that was there.
    pub fn do_atomic(&mut self, atomic: Atomic) -> Result<u64, Nak> {
        self.establish();
        self.cache.begin(&**self.to.hca);
        let target = self.map_word(VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC)?;
        // An address that is aligned only in the region's own numbering fails
        // here: the word cannot be reached atomically.
        let Ok(before) = copy::atomic(self.cache, &target, atomic) else {
            return Err(self.request_failed());
        };
        advance_psn(self.to.responder, self.message);
        Ok(before)
    }

    /// Checks the whole request of a READ.
    pub fn begin_read(&mut self) -> Result<(), Nak> {
        self.establish();
        self.cache.begin(&**self.to.hca);
        if self.to.responder.attr.max_dest_rd_atomic == 0 {
            return Err(self.request_failed());
        }
        let mapped = self.map_remote(VIRTIO_RDMA_ACCESS_REMOTE_READ).map(|_| ());
        mapped.map_err(|refusal| self.refuse(refusal))
    }

    /// Checks the word that an atomic operation or write names, and holds its region.
    fn map_word(&mut self, access: u32) -> Result<Mapping, Nak> {
        let is_aligned = self.message.request.remote_addr % 8 == 0;
        if self.to.responder.attr.max_dest_rd_atomic == 0 || !is_aligned {
            return Err(self.request_failed());
        }
        match self.map_remote(access) {
            Ok(Some(target)) => Ok(target),
            Ok(None) => Err(self.request_failed()),
            Err(refusal) => Err(self.refuse(refusal)),
        }
    }

    /// Writes a word (IBA A19.4.2).
    fn receive_atomic_write(&mut self) -> Result<(), Nak> {
        let target = self.map_word(VIRTIO_RDMA_ACCESS_REMOTE_WRITE)?;
        let value = match self.message.local {
            Data::Mapped(local) => {
                let mut bytes = [0; 8];
                copy::read(local, &mut bytes).ok().map(|()| bytes)
            }
            Data::Inline(bytes) => bytes.try_into().ok(),
        };
        let Some(value) = value.map(u64::from_ne_bytes) else {
            return Err(Nak::Failed(WcStatus::LocalProtection));
        };
        // As for the other atomics, an address is aligned in memory as well.
        if copy::store(self.cache, &target, value).is_err() {
            return Err(self.request_failed());
        }
        advance_psn(self.to.responder, self.message);
        Ok(())
    }

    fn serve_flush(&mut self, wanted: Flush) -> Result<(), Nak> {
        if !may(self.to.responder, wanted.access) {
            return Err(self.refuse(Refusal::Operation));
        }
        let Some(config) = self.to.responder.config else {
            return Err(self.request_failed());
        };
        let claim = Claim { pdn: config.pdn, access: wanted.access, qp: Some(self.to.slot) };
        let (request, keys) = (self.message.request, &self.to.hca.keys);
        flush(keys, &wanted, request.rkey, request.remote_addr, claim, self.cache)
            .map_err(|why| self.access_failed(why))?;
        advance_psn(self.to.responder, self.message);
        Ok(())
    }

    /// Checks the remote side of the chunk and holds its region; with the first chunk, all of
    /// the message is checked. Returns `None` for no bytes, whose key does not matter.
    #[inline(always)]
    fn map_remote(&mut self, access: u32) -> Result<Option<Mapping>, Refusal> {
        let message = self.message;
        let request = message.request;
        if !may(self.to.responder, access) {
            return Err(Refusal::Operation);
        }
        // IBA C9-88.
        if request.total == 0 {
            return Ok(None);
        }
        let pdn = self.to.responder.config.ok_or(Refusal::Memory(KeyError::Pd))?.pdn;
        let claim = Claim { pdn, access, qp: Some(self.to.slot) };
        let (keys, cache) = (&self.to.hca.keys, &mut *self.cache);
        let mut map =
            |addr, len| cache.map(keys, request.rkey, claim, addr, len).map_err(Refusal::Memory);
        if message.is_first() && !message.is_last() {
            map(request.remote_addr, request.total)?;
        }
        let addr = request
            .remote_addr
            .checked_add(message.done)
            .ok_or(Refusal::Memory(KeyError::Range))?;
        map(addr, message.len).map(Some)
    }

    /// Takes the receive for the message into its place, unless one is there
    /// already.
    #[inline(always)]
    fn take_receive(&mut self) -> Result<(), Nak> {
        let waits = self.to.is_reliable() && !self.message.asks_again;
        self.to.take_receive(waits).map_err(|why| match why {
            NoReceive::Empty => Nak::NotReady(self.to.responder.attr.min_rnr_timer),
            NoReceive::Malformed => Nak::Failed(WcStatus::RemoteOperation),
        })
    }

    /// Fails the receive of this message, and the QP with it, and tells the requester. On an unreliable connection the
    /// message is dropped instead, and the receive waits for the next.
    fn receive_failed(&mut self, statuses: BothStatuses, refused: Option<RefusedAccess>) -> Nak {
        if self.to.is_reliable() {
            self.to.fail_receive(statuses.receive, refused);
        } else {
            self.drop_refused(refused);
        }
        Nak::Failed(statuses.send)
    }

    /// Refuses the key or the range of a write that has taken its receive: the completion of that
    /// tells of it, and no event (IBA 11.6.2, Local Access Error).
    fn write_failed(&mut self, why: KeyError) -> Nak {
        self.to.hca.stats.add(Counter::AccessViolations, 1);
        let (receive, send) = (WcStatus::LocalAccess, WcStatus::RemoteAccess);
        let refused = self.access(why);
        self.receive_failed(BothStatuses { receive, send }, Some(refused))
    }

    /// Refuses a message whose packets would not have the size that the responder expects (IBA
    /// 9.7.4.1.6). A SEND has taken its receive by then, whose completion tells of it.
    ///
    /// The request of a READ is one packet, whatever it asks for, so that the responder finds nothing
    /// wrong and answers in packets of its own path MTU (IBA 9.7.5.1.3). It is the requester that gets
    /// packets of the wrong size (IBA 9.7.6). The work request ends with Local Length Error, not with
    /// Bad Response Error, which is for an opcode that is not expected (IBA 11.6.2).
    #[cold]
    fn refuse_packets(&mut self) -> Result<(), Nak> {
        match self.message.request.operation {
            Operation::Read => Err(Nak::Failed(WcStatus::LocalLength)),
            Operation::Send => {
                self.take_receive()?;
                Err(self.receive_failed(BothStatuses::TOO_LONG, None))
            }
            _ => Err(self.request_failed()),
        }
    }

    fn refuse(&mut self, refusal: Refusal) -> Nak {
        match refusal {
            Refusal::Operation => {
                let refused = self.access(KeyError::QpAccess);
                self.fail_or_drop(VIRTIO_RDMA_EVENT_QP_REQ_ERR, Some(refused));
                Nak::Failed(WcStatus::RemoteInvalidRequest)
            }
            Refusal::Memory(why) => self.access_failed(why),
        }
    }

    /// Returns the access that the message asks for, and that is refused.
    fn access(&self, why: KeyError) -> RefusedAccess {
        let request = self.message.request;
        let length = match request.operation {
            Operation::Flush(flush) => flush.length.unwrap_or_default(),
            _ => request.total,
        };
        RefusedAccess { key: request.rkey, address: request.remote_addr, length, why }
    }

    /// Refuses memory that the requester asked for and may not have.
    #[cold]
    fn access_failed(&mut self, why: KeyError) -> Nak {
        self.to.hca.stats.add(Counter::AccessViolations, 1);
        let refused = self.access(why);
        self.fail_or_drop(VIRTIO_RDMA_EVENT_QP_ACCESS_ERR, Some(refused));
        Nak::Failed(WcStatus::RemoteAccess)
    }

    /// Refuses a request that the responder does not carry out.
    pub fn request_failed(&mut self) -> Nak {
        self.fail_or_drop(VIRTIO_RDMA_EVENT_QP_REQ_ERR, None);
        Nak::Failed(WcStatus::RemoteInvalidRequest)
    }

    /// Ends a reliable connection with this event, because of a request that the responder refuses;
    /// on an unreliable one the request is dropped (IBA 9.8.2).
    fn fail_or_drop(&mut self, event: u32, refused: Option<RefusedAccess>) {
        if self.to.is_reliable() {
            self.to.fail(event, refused);
        } else {
            self.drop_refused(refused);
        }
    }

    /// Drops a message of an unreliable connection.
    fn drop_refused(&mut self, refused: Option<RefusedAccess>) {
        let Receiver { hca, slot, responder, .. } = &self.to;
        hca.stats.add(Counter::DropRefused, 1);
        if responder.observed {
            observe::refused_access(hca, *slot, Some(responder.expected.psn), "DROPPED", refused);
        }
    }

    /// Completes the receive of the message with success.
    fn complete_receive(&mut self, opcode: u32) {
        let request = self.message.request;
        let received = Received {
            opcode,
            len: request.total,
            immediate: request.immediate,
            invalidated: request.invalidate,
            solicited: request.solicited,
        };
        self.to.complete(received, |_| ());
    }
}

/// Returns whether driver and device agreed on the features that an operation needs.
pub(crate) fn offers(features: &Features, operation: Operation) -> bool {
    match operation {
        Operation::Atomic(_) => features.has_atomics(),
        Operation::AtomicWrite => features.has_atomic_write(),
        Operation::Flush(_) => features.has_flush(),
        _ => true,
    }
}

/// Returns whether a QP lets its peer do this.
fn may(responder: &Responder, access: u32) -> bool {
    responder.attr.qp_access_flags & access == access
}

/// Counts the PSNs of a chunk that is done.
fn advance_psn(responder: &mut Responder, message: &Message<'_>) {
    responder.expected.psn = responder.expected.psn.plus(message.psns);
}
