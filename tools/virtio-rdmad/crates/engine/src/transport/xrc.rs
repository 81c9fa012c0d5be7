// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Extended reliable connections (IBA, annex A14; specification, Extended reliable connections).
//!
//! An XRC target has no queues. It receives from whichever SRQ of its domain a
//! message names, and while the message is under way it has what that SRQ has: its
//! PD, its CQ and its work requests.

use std::sync::Arc;

use super::hca::Hca;
use super::message::Nak;
use super::receive::Receiver;
use super::responder::Arrival;
use super::srq;
use crate::base::counters::Counter;
use crate::base::slot::Slot;
use crate::qp::config::QpConfig;

/// Carries out a chunk for an XRC target, as [`Arrival::respond`].
#[inline(never)]
pub(crate) fn respond(arrival: &mut Arrival<'_, '_>, waiter: (&Arc<Hca>, Slot)) -> Result<(), Nak> {
    with_srq(arrival, |arrival| arrival.respond(Some(waiter)))
}

/// Calls `act` with a chunk for an XRC target, which has the PD, the CQ and the work requests of the SRQ that the chunk
/// names meanwhile. Refuses the chunk if that SRQ is not of the target's domain.
pub(crate) fn with_srq<'a, 'm, T>(
    arrival: &mut Arrival<'a, 'm>,
    act: impl FnOnce(&mut Arrival<'a, 'm>) -> Result<T, Nak>,
) -> Result<T, Nak> {
    if !select_srq(&mut arrival.to, arrival.message.request.srqn) {
        arrival.to.hca.stats.add(Counter::XrcViolations, 1);
        return Err(arrival.request_failed());
    }
    let answer = act(arrival);
    // It has a work request of that SRQ, or waits for one.
    let goes_on = arrival.to.responder.has_receive || matches!(answer, Err(Nak::NotReady(_)));
    if !goes_on {
        // Without it, the SRQ's CQ may be gone when its CQEs are placed.
        arrival.to.batch.place_completions();
        arrival.to.responder.deselect();
    }
    answer
}

/// Selects the SRQ of this number for an XRC target, if the SRQ is in the target's domain.
fn select_srq(to: &mut Receiver<'_>, srqn: u32) -> bool {
    let Some(config) = to.responder.config else { return false };
    let Some((srq, pdn, cq)) = find_srq(to.hca, &config, srqn) else { return false };
    if config.srq.is_some_and(|before| before != srq) {
        // An earlier message may have left a work request undone.
        srq::leave(to.hca, to.slot, to.responder);
    }
    to.responder.config =
        Some(QpConfig { srq: Some(srq), pdn, recv_pdn: pdn, recv_cq: cq, ..config });
    true
}

/// Returns the place, the PD and the CQ of the SRQ of this number, if it is of the domain of an XRC target.
fn find_srq(hca: &Hca, target: &QpConfig, srqn: u32) -> Option<(Slot, u32, u16)> {
    let srq = hca.srq_slot_of(srqn)?;
    let (pdn, cq) = hca.with_srq(srq, |srq| srq.of_domain(target.xrcdn))??;
    Some((srq, pdn, cq))
}
