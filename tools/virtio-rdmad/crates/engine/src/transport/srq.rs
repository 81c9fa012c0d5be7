// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Shared receive queues, as the QPs see them that receive from them.

use abi::VIRTIO_RDMA_EVENT_SRQ_LIMIT_REACHED;

use super::failure;
use super::hca::{Hca, Responder};
use crate::base::budget::{cost, Budget};
use crate::base::slot::Slot;
use crate::base::sync::{lock, try_lock};
use crate::queue::srq::{SrqError, Wait};
use crate::queue::wqe::{Popped, ReceiveWqe};

/// Takes a work request of an SRQ for the QP in place `slot`, into the place of its responder's.
pub(crate) fn take(
    hca: &Hca,
    slot: Slot,
    srq: Slot,
    responder: &mut Responder,
    wait: Wait,
) -> Result<Popped, SrqError> {
    let wqe = &mut responder.receive;
    let (taken, limit, is_set_aside) = hca
        .with_srq(srq, |srq| {
            let taken = srq.take(slot, wait, wqe, hca.clock());
            let waits = wait == Wait::Roused && matches!(taken, Ok(Popped::Empty));
            (taken, srq.take_limit_reached(), waits && srq.left() != 0)
        })
        .unwrap_or((Ok(Popped::Empty), false, false));
    if limit {
        hca.raise(VIRTIO_RDMA_EVENT_SRQ_LIMIT_REACHED, srq.number());
    }
    if is_set_aside {
        // The others may not come for it, and no doorbell tells of that.
        hca.make_ready(hca.jobs.srq(srq));
    }
    taken
}

/// Parts the QP in place `slot` from its SRQ, because it is reset or destroyed, or takes no more work
/// requests: it does not wait for one, and one that it did not complete is taken by another.
pub(crate) fn leave(hca: &Hca, slot: Slot, responder: &mut Responder) {
    let Some(srq) = responder.config.and_then(|config| config.srq) else { return };
    let mut unfinished = None;
    if std::mem::take(&mut responder.has_receive) {
        unfinished = Some(std::mem::replace(&mut responder.receive, ReceiveWqe::empty()));
    }
    let is_awaited = hca.with_srq(srq, |srq| srq.leave(slot, unfinished));
    responder.deselect();
    if is_awaited == Some(true) {
        hca.make_ready(hca.jobs.srq(srq));
    }
}

/// Parts the XRC target in place `slot` from an SRQ that ends: it is not in the middle of a message for
/// that, and the sender of one finds that out. Returns whether there was ever a QP in the place.
pub(crate) fn abandon(hca: &Hca, srq: Slot, slot: Slot) -> bool {
    let Some(qp) = hca.qps.get(slot) else { return false };
    let mut responder = lock(&qp.responder);
    if responder.config.is_some_and(|config| config.srq == Some(srq)) {
        responder.has_receive = false;
        responder.deselect();
        responder.rouse();
    }
    true
}

/// Visits an SRQ whose owner rang, or which has failed: as many requesters that wait for a work request try again as
/// there are work requests. Returns whether some are left at the end of the visit. Own thread only.
pub(crate) fn visit(hca: &Hca, srq: Slot, budget: &mut Budget) -> bool {
    let next = || hca.with_srq(srq, |srq| srq.users.next_to_fail())?;
    if failure::fail_users(hca, budget, next) {
        return true;
    }
    let mut locked = Vec::new();
    let is_done = rouse(hca, srq, budget, &mut locked);
    for slot in &locked {
        budget.work(cost::WAIT);
        hca.with_srq(srq, |srq| srq.put_back(*slot));
    }
    !is_done || !locked.is_empty()
}

/// Rouses as many requesters as there are work requests, within the budget. QPs whose responders are locked are
/// `locked`: a peer sends to them, which may take as long as an access to memory does. Returns whether nobody else is
/// to be roused before the next visit.
fn rouse(hca: &Hca, srq: Slot, budget: &mut Budget, locked: &mut Vec<Slot>) -> bool {
    let now = hca.clock().now();
    while !budget.is_over() {
        let Some(slot) = hca.with_srq(srq, |srq| srq.rouse(now)).flatten() else {
            let next = hca.with_srq(srq, |srq| srq.next_visit(now)).flatten();
            lock(&hca.timers).set(hca.jobs.srq(srq), next);
            return true;
        };
        budget.work(cost::OBJECT);
        let Some(qp) = hca.qps.get(slot) else {
            hca.with_srq(srq, |srq| srq.skip(slot));
            continue;
        };
        let Some(mut responder) = try_lock(&qp.responder) else {
            locked.push(slot);
            continue;
        };
        // The QP may have come by itself meanwhile. It must not stand in the line once more before it is passed over.
        if !responder.rouse() {
            hca.with_srq(srq, |srq| srq.skip(slot));
        }
    }
    false
}
