// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Failures: the effect of an error on a QP or an SRQ, and on the users of a failed object.

use abi::{VIRTIO_RDMA_EVENT_QP_FATAL, VIRTIO_RDMA_EVENT_SRQ_ERR};

use super::hca::{Hca, Responder};
use crate::base::budget::{cost, Budget};
use crate::base::host::Incident;
use crate::base::slot::Slot;
use crate::base::sync::lock;
use crate::qp::state::QpState;
use crate::queue::srq::Srq;
use crate::queue::users::User;

/// Moves the QP in place `slot`, whose responder is locked, into ERR, raises the event of the incident if it has one,
/// and has the guest's own thread flush both queues.
pub(crate) fn fail_responder(hca: &Hca, slot: Slot, responder: &mut Responder, why: Incident) {
    hca.qps.take(slot).set_state(responder, QpState::Err);
    if let Incident::Qp { qpn, event, .. } = why {
        hca.raise_only(event, qpn);
    }
    responder.failure = Some(Box::new((hca.clock().now(), why)));
    hca.note(why);
    hca.make_ready(hca.jobs.send(slot));
    hca.make_ready(hca.jobs.receive(slot));
}

/// Moves the QP in place `slot` into ERR or SQE after an error of its requester. The responder of a
/// peer must not be locked.
pub(crate) fn fail_requester(hca: &Hca, slot: Slot, next: QpState) {
    let qp = hca.qps.take(slot);
    let mut responder = lock(&qp.responder);
    if qp.state() != QpState::Err {
        qp.set_state(&mut responder, next);
    }
    drop(responder);
    hca.make_ready(hca.jobs.receive(slot));
}

/// Returns the incident of a QP that cannot go on because of its queues.
pub(crate) fn fatal(slot: Slot) -> Incident {
    Incident::Qp { qpn: slot.number(), event: VIRTIO_RDMA_EVENT_QP_FATAL, refused: None }
}

/// Fails the QP in place `slot`, unless it has failed already or does nothing.
fn fail_qp(hca: &Hca, slot: Slot) {
    let Some(qp) = hca.qps.get(slot) else { return };
    let mut responder = lock(&qp.responder);
    if responder.config.is_some() && !matches!(qp.state(), QpState::Err | QpState::Reset) {
        fail_responder(hca, slot, &mut responder, fatal(slot));
    }
}

/// Puts the SRQ in a place into error, for its owner's doing. Every QP that uses it fails
/// when the guest's own thread comes to it.
pub(crate) fn fail_srq(hca: &Hca, srq: Slot) {
    if hca.with_srq(srq, Srq::fail) == Some(true) {
        hca.raise(VIRTIO_RDMA_EVENT_SRQ_ERR, srq.number());
        hca.make_ready(hca.jobs.srq(srq));
    }
}

/// Fails all users that `next` returns, until the budget is exhausted; whether some are left.
pub(crate) fn fail_users(
    hca: &Hca,
    budget: &mut Budget,
    mut next: impl FnMut() -> Option<User>,
) -> bool {
    while !budget.is_over() {
        match next() {
            Some(User::Qp(slot)) => fail_qp(hca, slot),
            Some(User::Srq(slot)) => fail_srq(hca, slot),
            None => return false,
        }
        budget.work(cost::OBJECT);
    }
    true
}

/// Fails every QP and SRQ that uses a CQ which is in error. Returns whether some are left at the end of
/// the visit.
pub(crate) fn fail_users_of_cq(hca: &Hca, cq: u16, budget: &mut Budget) -> bool {
    let Some(place) = hca.cqs.get(cq) else { return false };
    fail_users(hca, budget, || lock(place).users.next_to_fail())
}
