// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Unreliable connections on the wire (IBA 9.8): no packet is acknowledged, and none is sent again. A message
//! of which a packet is lost is dropped.

use std::sync::Arc;

use roce::{Packet, Position, Service};

use super::check::check_responder;
use super::congestion;
use super::path::Path;
use super::requester::{opcode, position};
use super::responder::execute;
use crate::base::counters::Counter;
use crate::base::qp_type::QpType;
use crate::base::slot::Slot;
use crate::base::sync::lock;
use crate::base::wc_status::WcStatus;
use crate::memory::mr_cache::Mappings;
use crate::qp::halves::Requester;
use crate::qp::inbound::Inbound;
use crate::qp::mtu::{mtu_bytes, packets};
use crate::transport::hca::{Hca, Responder, ResponderHalf};
use crate::transport::observe;
use crate::transport::round::Round;
use crate::transport::sender::{Progress, Sender};

impl Sender<'_> {
    /// Sends packets of the message under way, until the budget is exhausted, or the connection has to
    /// wait for its rate or for the limit of its guest.
    pub(crate) fn send_packets(&self, requester: &mut Requester, round: &mut Round) -> Progress {
        if requester.done == 0 {
            let (total, mut local) = (requester.wqe.request.total, Mappings::new());
            if let Err(status) = self.map_local(requester, total, &mut round.local, &mut local) {
                round.budget.spend(0);
                return Progress::End(status);
            }
        }
        let attr = &requester.attr;
        let Some(path) = Path::new(self.hca, self.slot, attr, &requester.source) else {
            round.budget.spend(0);
            self.hca.stats.add(Counter::DropUnreachable, 1);
            return Progress::End(WcStatus::Success);
        };
        let (total, mtu) = (requester.wqe.request.total, mtu_bytes(attr.path_mtu));
        let (count, psn) = (packets(total, attr.path_mtu), requester.sq_psn());
        while !round.budget.is_over() {
            let len = (total - requester.done).min(mtu);
            if self.holds(requester, len) {
                return Progress::Wait;
            }
            let Requester { wqe, done, .. } = &mut *requester;
            let index = (*done / mtu) as u32;
            let position = position(index, count);
            let is_last = index + 1 == count;
            let Some((opcode, extended)) = opcode(Service::Uc, &wqe.request, position, *done)
            else {
                return Progress::End(WcStatus::LocalQpOperation);
            };
            let mut headers = path.headers(opcode, psn.plus(index), extended);
            headers.bth.solicited_event = wqe.request.solicited && is_last;
            round.budget.spend(len);
            let Round { outbox, local, .. } = round;
            let observed = self.observed.then_some(self.slot);
            let sent = outbox.send(self.hca, &headers, observed, len as usize, |place| {
                self.gather(wqe, *done, place, local)
            });
            if sent.is_err() {
                return Progress::End(WcStatus::LocalProtection);
            }
            if is_last {
                return Progress::End(WcStatus::Success);
            }
            *done += len;
        }
        Progress::Partial
    }
}

/// Handles a packet of a message. Returns the counter of the reason if the packet is dropped.
pub(crate) fn arrive(
    hca: &Arc<Hca>,
    slot: Slot,
    packet: &Packet<'_>,
    round: &mut Round,
) -> Result<(), Counter> {
    let qp = hca.qps.get(slot).ok_or(Counter::DropNoQp)?;
    let mut half = lock(&qp.responder);
    check_responder(&half, qp.state(), QpType::Uc, &packet.headers)?;
    if half.observed {
        observe::packet(hca, slot, false, &packet.headers, packet.payload);
    }
    let ResponderHalf { inbound, responder } = &mut *half;
    let inbound = inbound.get_or_insert_default();
    let Responder { attr, source, .. } = &*responder;
    congestion::look(hca, slot, attr, source, &mut inbound.flow, false, packet, round);
    follow(hca, slot, responder, inbound, packet, round);
    round.batch.place_completions();
    Ok(())
}

/// Adds a packet to its message. The first packet of a message is expected at any time; another one must
/// have the PSN behind the one before, or its message is dropped (IBA 9.8.2.2).
fn follow(
    hca: &Arc<Hca>,
    slot: Slot,
    responder: &mut Responder,
    inbound: &mut Inbound,
    packet: &Packet<'_>,
    round: &mut Round,
) {
    let bth = &packet.headers.bth;
    let begins = matches!(bth.opcode.position(), Position::First | Position::Only);
    let goes_on = !begins && bth.psn == responder.expected.psn;
    if !goes_on && inbound.assembly.take().is_some() {
        hca.stats.add(Counter::MessageCutOff, 1);
    }
    if !begins && inbound.assembly.is_none() {
        hca.stats.add(Counter::DropNoMessage, 1);
        return;
    }
    responder.expected.psn = bth.psn;
    match execute(hca, slot, responder, inbound, packet, round) {
        Ok(done) => {
            responder.partner.uses_wire();
            responder.expected.done(done.packets, done.ends);
        }
        Err(nak) => {
            responder.expected.done(1, false);
            inbound.assembly = None;
            if let Some(dropped) = nak.drop_counter() {
                hca.stats.add(dropped, 1);
            }
        }
    }
}
