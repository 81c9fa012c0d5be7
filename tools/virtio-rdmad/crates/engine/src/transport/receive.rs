// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Receives: how a responder takes work requests of its receive queue or SRQ, and completes them.

use std::sync::Arc;

use abi::{
    VIRTIO_RDMA_EVENT_QP_FATAL, VIRTIO_RDMA_EVENT_QP_LAST_WQE_REACHED, VIRTIO_RDMA_WC_WITH_IMM,
    VIRTIO_RDMA_WC_WITH_INVALIDATE,
};
use zerocopy::FromZeros;

use super::batch::CompletionBatch;
use super::failure::{fail_responder, fail_srq, fatal};
use super::hca::{Hca, Responder};
use super::observe;
use super::srq;
use crate::base::budget::Budget;
use crate::base::counters::Counter;
use crate::base::host::Incident;
use crate::base::qp_type::QpType;
use crate::base::refused::RefusedAccess;
use crate::base::slot::Slot;
use crate::base::wc_status::WcStatus;
use crate::qp::config::QpConfig;
use crate::queue::cq::Cqe;
use crate::queue::srq::Wait;
use crate::queue::wqe::{Ended, Popped};

/// The reason why no receive was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoReceive {
    /// No receive is posted.
    Empty,
    /// A receive is posted that is malformed, or the queue is; the QP has failed.
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

/// The responder of a QP, locked, and what its thread needs to receive. That thread is the requester's
/// while a message arrives, and the guest's own otherwise.
pub(crate) struct Receiver<'a> {
    /// The HCA of the QP.
    pub hca: &'a Arc<Hca>,
    /// The place of the QP.
    pub slot: Slot,
    /// Its responder.
    pub responder: &'a mut Responder,
    /// The batch that holds completions back.
    pub batch: &'a mut CompletionBatch,
}

impl Receiver<'_> {
    /// Returns whether an error ends the connection.
    pub fn is_reliable(&self) -> bool {
        self.responder.config.is_some_and(|config| config.wq.kind.is_reliable())
    }

    /// Takes the next receive into its place, unless one is there already. If there is none and the
    /// sender `waits`, the guest is asked to tell of one.
    pub fn take_receive(&mut self, waits: bool) -> Result<(), NoReceive> {
        if self.responder.has_receive {
            return Ok(());
        }
        let srq = self.responder.config.and_then(|config| config.srq);
        let popped = match srq {
            Some(srq) => {
                let wait = if !self.is_reliable() {
                    Wait::No
                } else if waits {
                    Wait::Roused
                } else {
                    Wait::AsksAgain
                };
                self.next_shared(srq, wait)?
            }
            None => self.next_own(waits)?,
        };
        match popped {
            Popped::Empty => Err(NoReceive::Empty),
            Popped::Taken => {
                self.responder.has_receive = true;
                Ok(())
            }
            Popped::Malformed(malformed) => {
                self.hca.stats.guest_error(Counter::BadReceiveRequest, malformed.why);
                self.complete_with_error(malformed.ended, malformed.status);
                self.fail_after_receive(malformed.status, None);
                if let Some(srq) = srq {
                    fail_srq(self.hca, srq);
                }
                Err(NoReceive::Malformed)
            }
        }
    }

    /// Takes the next work request of the QP's SRQ.
    fn next_shared(&mut self, srq: Slot, wait: Wait) -> Result<Popped, NoReceive> {
        srq::take(self.hca, self.slot, srq, self.responder, wait).map_err(|error| {
            self.hca.stats.guest_error(Counter::BadReceiveChain, error);
            fail_srq(self.hca, srq);
            fail_responder(self.hca, self.slot, self.responder, fatal(self.slot));
            NoReceive::Malformed
        })
    }

    /// Takes the next work request of the QP's own receive queue.
    fn next_own(&mut self, waits: bool) -> Result<Popped, NoReceive> {
        let responder = &mut *self.responder;
        let max_sge = responder.config.map_or(0, |config| config.wq.max_recv_sge);
        // The guest is asked to tell once, whatever the index does meanwhile.
        let mut asked = false;
        let popped = loop {
            match responder.queue.pop_receive(&mut responder.receive, max_sge) {
                Ok(Popped::Empty) if asked || !waits => return Ok(Popped::Empty),
                Ok(Popped::Empty) => {
                    (asked, responder.notify) = (true, true);
                    if !responder.queue.enable_notify() {
                        return Ok(Popped::Empty);
                    }
                }
                Ok(popped) => break popped,
                Err(error) => {
                    self.hca.stats.guest_error(Counter::BadReceiveChain, error);
                    fail_responder(self.hca, self.slot, self.responder, fatal(self.slot));
                    return Err(NoReceive::Malformed);
                }
            }
        };
        if responder.notify {
            responder.notify = false;
            responder.queue.disable_notify();
        }
        Ok(popped)
    }

    /// Completes the receive with success; `fill` sets what datagrams add to its CQE.
    #[inline(always)]
    pub fn complete(&mut self, received: Received, fill: impl FnOnce(&mut Cqe)) {
        self.responder.has_receive = false;
        let Some(config) = self.responder.config else { return };
        let mut cqe = Cqe::new_zeroed();
        cqe.wr_id = self.responder.receive.wr_id;
        cqe.wqe_index = self.responder.receive.index;
        cqe.status = WcStatus::Success.to_abi();
        cqe.opcode = received.opcode as u8;
        cqe.byte_len = u32::try_from(received.len).unwrap_or(u32::MAX);
        cqe.qp_num = self.slot.number();
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
        if self.responder.observed {
            observe::completed(self.hca, self.slot, &cqe, true);
        }
        self.batch.complete_receive(self.hca, config.recv_cq, cqe, received.solicited);
        self.batch.count_receive(received.len);
    }

    /// Completes a receive with an error.
    fn complete_with_error(&mut self, ended: Ended, status: WcStatus) {
        let Some(config) = self.responder.config else { return };
        let mut cqe = Cqe::new_zeroed();
        cqe.wr_id = ended.wr_id;
        cqe.wqe_index = ended.index;
        cqe.status = status.to_abi();
        cqe.opcode = ended.wc_opcode;
        cqe.qp_num = self.slot.number();
        cqe.srqn = config.named_srqn();
        status.count(&self.hca.stats);
        if self.responder.observed {
            observe::completed(self.hca, self.slot, &cqe, true);
        }
        self.batch.complete_receive(self.hca, config.recv_cq, cqe, false);
    }

    /// Completes the receive that was taken with this error, and fails the QP with it. `refused` is the memory that may
    /// not be used, if that is the error.
    #[cold]
    pub fn fail_receive(&mut self, status: WcStatus, refused: Option<RefusedAccess>) {
        self.responder.has_receive = false;
        self.complete_with_error(self.responder.receive.ended(), status);
        self.fail_after_receive(status, refused);
    }

    /// Moves the QP into ERR behind a receive that has ended with an error.
    fn fail_after_receive(&mut self, status: WcStatus, refused: Option<RefusedAccess>) {
        let (qpn, status) = (self.slot.number(), status.to_abi().into());
        let why = Incident::Receive { qpn, status, refused };
        fail_responder(self.hca, self.slot, self.responder, why);
    }

    /// Moves the QP into ERR and raises this event, because of what the peer has asked for.
    pub fn fail(&mut self, event: u32, refused: Option<RefusedAccess>) {
        let why = Incident::Qp { qpn: self.slot.number(), event, refused };
        fail_responder(self.hca, self.slot, self.responder, why);
    }

    /// Completes posted receives with WR_FLUSH_ERR; whether some are left.
    pub(super) fn flush(&mut self, budget: &mut Budget) -> bool {
        let status = WcStatus::Flushed;
        self.responder.rouse();
        if std::mem::take(&mut self.responder.has_receive) {
            self.complete_with_error(self.responder.receive.ended(), status);
        }
        let shares = |config: QpConfig| config.srq.is_some() || config.wq.kind == QpType::XrcTgt;
        if self.responder.config.is_some_and(shares) {
            self.reach_last_wqe();
            return false;
        }
        loop {
            if budget.is_over() {
                return true;
            }
            match self.responder.queue.pop_flushed_receive() {
                Ok(Some(flushed)) => {
                    budget.spend(0);
                    self.complete_with_error(flushed, status);
                }
                Ok(None) => {
                    budget.spend(0);
                    self.responder.notify = true;
                    self.responder.queue.signal_if_needed();
                    if !self.responder.queue.enable_notify() {
                        return false;
                    }
                }
                Err(error) => {
                    self.hca.stats.guest_error(Counter::BadReceiveChain, error);
                    self.hca.raise_only(VIRTIO_RDMA_EVENT_QP_FATAL, self.slot.number());
                    self.hca.note(fatal(self.slot));
                    return false;
                }
            }
        }
    }

    /// Parts the QP, which is in ERR, from its SRQ, and tells its owner once that it takes no more work
    /// requests of that.
    fn reach_last_wqe(&mut self) {
        srq::leave(self.hca, self.slot, self.responder);
        if !std::mem::replace(&mut self.responder.last_wqe, true) {
            self.hca.raise(VIRTIO_RDMA_EVENT_QP_LAST_WQE_REACHED, self.slot.number());
        }
    }
}
