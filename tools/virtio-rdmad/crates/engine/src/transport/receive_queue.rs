// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Visits of the receive queue of a QP.

use std::sync::Arc;

use super::hca::Hca;
use super::receive::Receiver;
use super::round::Round;
use super::wire;
use crate::base::budget::cost;
use crate::base::slot::Slot;
use crate::base::sync::try_lock;
use crate::qp::state::QpState;

/// Visits the receive queue of the QP in place `slot`, which was kicked, or whose QP has failed.
/// Returns whether work is left at the end of the visit. Own thread only.
pub(crate) fn visit(hca: &Arc<Hca>, slot: Slot, round: &mut Round) -> bool {
    let Some(qp) = hca.qps.get(slot) else { return false };
    let Some(mut responder) = try_lock(&qp.responder) else {
        // A peer sends to it, which may take as long as an access to memory does.
        round.budget.work(cost::VISIT);
        return true;
    };
    if responder.config.is_none() {
        return false;
    }
    if qp.state() == QpState::Err {
        if let Some(inbound) = &mut responder.inbound {
            inbound.held.clear();
        }
        let Round { budget, batch, .. } = round;
        let is_left = Receiver { hca, slot, responder: &mut responder, batch }.flush(budget);
        batch.place_completions();
        return is_left;
    }
    if responder.inbound.is_some() {
        let is_left = wire::responder::pump(hca, slot, &mut responder, round);
        round.batch.place_completions();
        return is_left;
    }
    responder.rouse();
    false
}
