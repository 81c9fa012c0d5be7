// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The end of a send work request: its CQE, its counters, and the effect of an error on the QP.

use std::sync::Arc;
use std::time::Duration;

use abi::VIRTIO_RDMA_ACCESS_LOCAL_WRITE;
use zerocopy::FromZeros;

use super::batch::{CompletionBatch, Traffic};
use super::failure::fail_requester;
use super::hca::{Hca, Qp};
use super::observe;
use crate::base::counters::Counter;
use crate::base::host::Incident;
use crate::base::refused::{RefusedAccess, SgeError};
use crate::base::slot::Slot;
use crate::base::wc_status::WcStatus;
use crate::memory::fast_reg::{Invalidation, Invalidator};
use crate::memory::management::invalidate;
use crate::memory::mr::{Claim, Mr};
use crate::memory::mr_cache::{Mappings, MrCache};
use crate::qp::config::QpConfig;
use crate::qp::halves::{Requester, Wait};
use crate::qp::mtu::packets;
use crate::qp::state::QpState;
use crate::queue::cq::Cqe;
use crate::queue::request::Operation;
use crate::queue::work_queue::WorkQueueError;
use crate::queue::wqe::{Ended, Malformed, Popped, SendWqe};

/// Returns the time for an answer: 4.096 us * 2^`timeout`; `None` if the requester waits for ever.
pub(super) fn answer_delay(timeout: u8) -> Option<Duration> {
    let exponent = u32::from(timeout & 31);
    (exponent != 0).then(|| Duration::from_nanos(4096 << exponent))
}

/// The progress of the work request under way in one step.
pub(super) enum Progress {
    /// A part was done, and another one may follow.
    Partial,
    /// The work request ends with this status.
    End(WcStatus),
    /// The work request waits.
    Wait,
    /// The work request waits for another thread, which does not tell when it is done.
    Again,
    /// The work request is done, and the queue has this behind it.
    Next(Result<Popped, WorkQueueError>),
}

/// A QP whose requester is visited.
pub(super) struct Sender<'a> {
    /// Its HCA.
    pub hca: &'a Arc<Hca>,
    /// Its place.
    pub slot: Slot,
    /// The QP, whose requester is locked.
    pub qp: &'a Qp,
    /// Its configuration.
    pub config: &'a QpConfig,
    /// Whether it is observed.
    pub observed: bool,
}

impl Sender<'_> {
    /// Invalidates the key that a work request names for this side, if the work request names a key. Returns the status
    /// of the work request. `Err`: a copy by this key is under way, and the work request does not end before it.
    pub fn invalidate_local(&self, wqe: &SendWqe) -> Result<WcStatus, Arc<Mr>> {
        let Some(key) = wqe.request.invalidate else { return Ok(WcStatus::Success) };
        let hca = self.hca;
        let (pdn, by) = (self.config.pdn, Invalidator::Local);
        match invalidate(&hca.keys, Invalidation { key, pdn, qp: self.slot, by }) {
            Ok(None) => Ok(WcStatus::Success),
            Ok(Some(in_use)) => Err(in_use),
            Err(why) => {
                hca.stats.guest_error(
                    Counter::BadRegistration,
                    format_args!("a local invalidation ended in {why:?}"),
                );
                Ok(WcStatus::MwBind)
            }
        }
    }

    /// Invalidates the key as [`Self::invalidate_local`] does, and waits for a copy by it.
    pub fn invalidate_now(&self, wqe: &SendWqe) -> WcStatus {
        loop {
            match self.invalidate_local(wqe) {
                Ok(status) => return status,
                Err(in_use) => in_use.revoke(),
            }
        }
    }

    /// Returns whether the work request under way has to wait for the limit of the guest's work requests.
    #[cold]
    pub fn holds_message(&self, requester: &mut Requester) -> bool {
        let until = requester.admission.wait(&self.hca.message_limit, self.hca.clock().now());
        if until.is_some() && requester.window.is_none() {
            // With a window, the queue waits for answers as well: whoever visits it sets the timer for both.
            self.hca.set_timer(self.slot, until);
        }
        until.is_some()
    }

    /// Ends the wait of the work request under way.
    #[inline]
    pub fn stop_waiting(&self, requester: &mut Requester) {
        if requester.wait != Wait::No {
            requester.wait = Wait::No;
            self.hca.set_timer(self.slot, None);
        }
    }

    /// Ends the work request under way: places its CQE, and fails the QP after an error.
    pub fn finish(&self, requester: &mut Requester, status: WcStatus, batch: &mut CompletionBatch) {
        if status == WcStatus::Success {
            let count = packets(requester.wqe.request.total, requester.attr.path_mtu);
            return self.succeed(requester, count, batch);
        }
        requester.active = false;
        self.stop_waiting(requester);
        let why = self.error(&requester.wqe, status);
        self.fail(requester, why);
        self.complete(requester.wqe.ended(), status, 0, batch);
    }

    /// Ends the work request under way, which is done. Its message is so many packets on the wire.
    #[inline]
    pub fn succeed(&self, requester: &mut Requester, packets: u32, batch: &mut CompletionBatch) {
        requester.active = false;
        self.stop_waiting(requester);
        requester.count_psns(packets);
        self.end_done(&requester.wqe, packets, batch);
    }

    /// Ends the oldest work request on the wire, which was taken out of the window.
    pub fn finish_on_wire(
        &self,
        requester: &mut Requester,
        wqe: &SendWqe,
        status: WcStatus,
        batch: &mut CompletionBatch,
    ) {
        self.stop_waiting(requester);
        if status != WcStatus::Success {
            self.fail(requester, self.error(wqe, status));
            return self.complete(wqe.ended(), status, 0, batch);
        }
        self.end_done(wqe, packets(wqe.request.total, requester.attr.path_mtu), batch);
    }

    /// Returns the incident of a work request that ends with an error.
    #[cold]
    fn error(&self, wqe: &SendWqe, status: WcStatus) -> Incident {
        let refused = self.find_refused(wqe).filter(|_| status == WcStatus::LocalProtection);
        Incident::Send { qpn: self.slot.number(), status: status.to_abi().into(), refused }
    }

    /// Returns which memory the work request of a local protection error may not use: its SGEs are checked once more.
    fn find_refused(&self, wqe: &SendWqe) -> Option<RefusedAccess> {
        let fetches = matches!(wqe.request.operation, Operation::Read | Operation::Atomic(_));
        let access = if fetches { VIRTIO_RDMA_ACCESS_LOCAL_WRITE } else { 0 };
        let claim = Claim::local(self.config.pdn, access);
        let sges = if wqe.is_inline { &[] } else { wqe.sges.as_slice() };
        let (mut cache, mut mappings) = (MrCache::default(), Mappings::new());
        let bytes = 0..wqe.sges.total();
        let checked = cache.map_sges(&self.hca.keys, sges, claim, bytes, &mut mappings);
        checked.err().unwrap_or(SgeError::COPY).access(sges)
    }

    /// Fails the QP because of an error of its requester.
    #[cold]
    pub fn fail(&self, requester: &mut Requester, why: Incident) {
        let is_reliable = self.config.wq.kind.is_reliable();
        let is_of_queue = matches!(why, Incident::Qp { .. });
        let next = if is_reliable || is_of_queue { QpState::Err } else { QpState::Sqe };
        if let Incident::Qp { qpn, event, .. } = why {
            self.hca.raise_only(event, qpn);
        }
        fail_requester(self.hca, self.slot, next);
        requester.failure = Some(Box::new((self.hca.clock().now(), why)));
        self.hca.note(why);
    }

    /// Counts a work request that is done, and makes its CQE.
    #[inline(always)]
    fn end_done(&self, wqe: &SendWqe, packets: u32, batch: &mut CompletionBatch) {
        self.count(wqe, packets, batch);
        if self.config.signal_all || wqe.signaled {
            self.complete(wqe.ended(), WcStatus::Success, wqe.request.total, batch);
        }
    }

    /// Ends a malformed work request, and the QP with it.
    #[cold]
    pub fn end_malformed(
        &self,
        requester: &mut Requester,
        Malformed { ended, status, .. }: Malformed,
        batch: &mut CompletionBatch,
    ) {
        let (qpn, abi) = (self.slot.number(), status.to_abi().into());
        self.fail(requester, Incident::Send { qpn, status: abi, refused: None });
        self.complete(ended, status, 0, batch);
    }

    /// Counts a work request that the peer has done.
    #[inline(always)]
    fn count(&self, wqe: &SendWqe, packets: u32, batch: &mut CompletionBatch) {
        if !wqe.request.operation.is_local() && self.config.wq.kind.is_connected() {
            batch.carry_own(traffic(wqe, packets));
        }
        count_send(self.config, wqe, batch);
    }

    /// Makes a READ whose data is there wait for a copy by the key that it invalidates: only a LOCAL_INV is left of it.
    #[cold]
    pub fn leave_invalidation(
        &self,
        requester: &mut Requester,
        batch: &mut CompletionBatch,
    ) -> Progress {
        let count = packets(requester.wqe.request.total, requester.attr.path_mtu);
        requester.count_psns(count);
        self.count(&requester.wqe, count, batch);
        requester.wqe.request.operation = Operation::LocalInv;
        Progress::Again
    }

    /// Completes a work request.
    #[inline]
    pub fn complete(&self, ended: Ended, status: WcStatus, len: u64, batch: &mut CompletionBatch) {
        let mut cqe = Cqe::new_zeroed();
        cqe.wr_id = ended.wr_id;
        cqe.status = status.to_abi();
        cqe.opcode = ended.wc_opcode;
        cqe.wqe_index = ended.index;
        cqe.byte_len = u32::try_from(len).unwrap_or(u32::MAX);
        cqe.qp_num = self.slot.number();
        status.count(&self.hca.stats);
        if self.observed {
            observe::completed(self.hca, self.slot, &cqe, false);
        }
        batch.complete_send(self.hca, self.config.send_cq, cqe);
    }
}

/// Returns the traffic of a work request that succeeds, whose message is so many packets.
#[inline(always)]
pub(super) fn traffic(wqe: &SendWqe, packets: u32) -> Traffic {
    let total = wqe.request.total;
    match wqe.request.operation {
        Operation::Send | Operation::Write | Operation::AtomicWrite | Operation::Flush(_) => {
            Traffic::sent(total, packets)
        }
        Operation::Read | Operation::Atomic(_) => Traffic {
            xmit_packets: 1,
            rcv_bytes: total,
            rcv_packets: packets.into(),
            ..Traffic::default()
        },
        Operation::RegMr(_) | Operation::LocalInv | Operation::BindMw(_) => Traffic::default(),
    }
}

/// Counts a message that was sent.
#[inline]
fn count_send(config: &QpConfig, wqe: &SendWqe, batch: &mut CompletionBatch) {
    let (messages, bytes) = match wqe.request.operation {
        _ if !config.wq.kind.is_connected() => (Counter::DatagramMessages, Counter::DatagramBytes),
        Operation::Send => (Counter::SendMessages, Counter::SendBytes),
        Operation::Write | Operation::AtomicWrite => (Counter::WriteMessages, Counter::WriteBytes),
        Operation::Read => (Counter::ReadMessages, Counter::ReadBytes),
        Operation::Atomic(_) => return batch.count(Counter::AtomicMessages, 1),
        Operation::Flush(_) => return batch.count(Counter::FlushMessages, 1),
        Operation::RegMr(_) | Operation::LocalInv | Operation::BindMw(_) => return,
    };
    batch.count(messages, 1);
    batch.count(bytes, wqe.request.total);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_are_those_of_iba() {
        assert_eq!(answer_delay(0), None);
        assert_eq!(answer_delay(14), Some(Duration::from_nanos(67_108_864)));
    }
}
