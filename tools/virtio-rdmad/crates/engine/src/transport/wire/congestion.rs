// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Congestion on the wire: CNPs that are sent and received (IBA A17.9), and the limit of a guest.

use abi::virtio_rdma_qp_attr;
use reliability::{Flow, LINE_RATE};
use roce::{Ecn, ExtendedHeaders, Opcode, Packet, Psn};

use super::path::{Path, OVERHEAD};
use super::{is_away, is_group_away};
use crate::base::address::Address;
use crate::base::counters::Counter;
use crate::base::qp_type::QpType;
use crate::base::slot::Slot;
use crate::base::sync::lock;
use crate::qp::halves::{Requester, Wait};
use crate::transport::hca::{Hca, ResponderHalf};
use crate::transport::observe;
use crate::transport::round::Round;
use crate::transport::sender::Sender;

/// Looks whether a packet of the peer of a QP is marked, or has come with data into a crowded inbox, and sends the peer a
/// CNP if one is due. The CNP says which packet it was if the peer expects that; others expect the PSN 0.
#[allow(clippy::too_many_arguments)] // halves of a QP have these in common
pub(super) fn look(
    hca: &Hca,
    slot: Slot,
    attr: &virtio_rdma_qp_attr,
    source: &Address,
    flow: &mut Flow,
    is_named: bool,
    packet: &Packet<'_>,
    round: &mut Round,
) {
    let is_marked = packet.headers.ip.ecn() == Ecn::Ce;
    if !is_marked && (!round.is_crowded || packet.payload.is_empty()) {
        return;
    }
    hca.stats.add(Counter::EcnMarked, is_marked.into());
    if !flow.notifier.marked(hca.clock().now()) {
        return;
    }
    let Some(path) = Path::new(hca, slot, attr, source) else { return };
    let psn = if is_named { packet.headers.bth.psn } else { Psn::new(0) };
    let mut headers = path.of_cnps(hca).headers(Opcode::CNP, psn, ExtendedHeaders::default());
    headers.bth.becn = true;
    headers.bth.migrated = false;
    charge(hca);
    let observed = hca.is_observed(slot).then_some(slot);
    let _ = round.outbox.send(hca, &headers, observed, 0, |_| Ok::<(), ()>(()));
    hca.stats.add(Counter::CnpSent, 1);
}

/// Follows a CNP, and counts it. Without its PSN it does not say which half of the QP sent the packet that was
/// marked, so both send more slowly.
pub(super) fn arrive(hca: &Hca, slot: Slot, packet: &Packet<'_>) {
    let Some(qp) = hca.qps.get(slot) else { return hca.count_cnp(None) };
    let mut requester = lock(&qp.requester);
    if requester.observed {
        observe::packet(hca, slot, false, &packet.headers, packet.payload);
    }
    let by_requester = to_requester(hca, &mut requester, packet);
    drop(requester);
    let by_responder = to_responder(hca, &mut lock(&qp.responder), packet);
    hca.count_cnp(by_requester.max(by_responder));
}

/// The effect of a CNP on one half of a QP; if both halves differ, the greater one counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    /// The CNP does not name a packet that was sent lately.
    Stray,
    /// The CNP comes too soon after another one, or nothing was sent lately.
    Ignored,
    /// The half sends more slowly.
    Handled,
}

impl Hca {
    /// Counts a CNP; with `None`, it is from no peer of a connection.
    fn count_cnp(&self, outcome: Option<Outcome>) {
        let counter = match outcome {
            None | Some(Outcome::Ignored) => Counter::CnpIgnored,
            Some(Outcome::Stray) => Counter::CnpStray,
            Some(Outcome::Handled) => Counter::CnpHandled,
        };
        self.stats.add(counter, 1);
    }
}

/// Applies a CNP to a requester, if the CNP is from its peer.
fn to_requester(hca: &Hca, requester: &mut Requester, packet: &Packet<'_>) -> Option<Outcome> {
    let Requester { window, flow, attr, source, config, .. } = requester;
    if !is_peers(attr, source, packet) {
        return None;
    }
    if let Some(window) = window {
        let is_stray = is_stray(window.names_marked, packet, |psn| window.may_have_sent(psn));
        return Some(follow(hca, &mut window.flow, is_stray));
    }
    let is_uc = config.is_some_and(|config| config.wq.kind == QpType::Uc);
    let flow = flow.as_deref_mut().filter(|_| is_uc)?;
    Some(follow(hca, flow, false))
}

/// Applies a CNP to a responder, if the CNP is from its peer.
fn to_responder(hca: &Hca, half: &mut ResponderHalf, packet: &Packet<'_>) -> Option<Outcome> {
    let ResponderHalf { inbound: Some(inbound), responder } = half else { return None };
    if !is_peers(&responder.attr, &responder.source, packet) {
        return None;
    }
    let expected = responder.expected.psn;
    let may_have_sent = |psn| inbound.may_have_sent(expected, psn);
    let is_stray = is_stray(inbound.is_selective, packet, may_have_sent);
    Some(follow(hca, &mut inbound.flow, is_stray))
}

/// Returns whether a packet is from the peer of half of a QP.
fn is_peers(attr: &virtio_rdma_qp_attr, source: &Address, packet: &Packet<'_>) -> bool {
    let ip = &packet.headers.ip;
    attr.ah_attr.grh.dgid == ip.source_gid() && source.gid == ip.destination_gid()
}

/// Returns whether a CNP does not name a packet that was sent lately, and is from a peer that names it.
fn is_stray(is_named: bool, packet: &Packet<'_>, may_have_sent: impl Fn(Psn) -> bool) -> bool {
    is_named && !may_have_sent(packet.headers.bth.psn)
}

/// Slows half of a QP down, unless the CNP is a stray one.
fn follow(hca: &Hca, flow: &mut Flow, is_stray: bool) -> Outcome {
    let line_rate = hca.rate_limit.rate().map_or(LINE_RATE, |rate| rate.min(LINE_RATE));
    if is_stray {
        Outcome::Stray
    } else if flow.cut(hca.clock().now(), line_rate) {
        Outcome::Handled
    } else {
        Outcome::Ignored
    }
}

/// Counts an acknowledgement or a CNP, which does not wait, against the limit of the guest.
pub(super) fn charge(hca: &Hca) {
    hca.rate_limit.charge(OVERHEAD, hca.clock().now());
}

impl Sender<'_> {
    /// Returns whether the datagram under way has to wait for the limit of the guest.
    #[cold]
    pub(crate) fn holds_datagram(&self, requester: &mut Requester) -> bool {
        let av = &requester.wqe.ud.av;
        let Some(source) = self.hca.gid(av.gid_index.into()) else { return false };
        let leaves =
            is_away(self.hca, &source, &av.dgid) || is_group_away(self.hca, &source, &av.dgid);
        leaves && self.holds(requester, requester.wqe.request.total)
    }

    /// Returns whether an unreliable packet with `len` bytes of payload has to wait for the rate of the
    /// connection or the limit of the guest. A packet that does not wait any more has its share.
    pub(super) fn holds(&self, requester: &mut Requester, len: u64) -> bool {
        let (now, bytes) = (self.hca.clock().now(), len + OVERHEAD);
        let flow = requester.flow.get_or_insert_default();
        let Some(turn) = flow.wait(now, bytes, &self.hca.rate_limit) else {
            flow.sent(now, bytes, false);
            self.stop_waiting(requester);
            return false;
        };
        requester.wait = Wait::Answer(Some(turn));
        self.hca.set_timer(self.slot, Some(turn));
        true
    }
}
