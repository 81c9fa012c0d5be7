// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Congestion on the wire: CNPs that are sent and received (IBA A17.9), and the limit of a guest.

use abi::virtio_rdma_qp_attr;
use roce::{Ecn, ExtendedHeaders, Opcode, Packet, Psn};

use super::path::{Path, OVERHEAD};
use super::{is_away, is_group_away};
use crate::base::address::Address;
use crate::base::counters::Counter;
use crate::base::qp_type::QpType;
use crate::base::sync::lock;
use crate::qp::dcqcn::LINE_RATE;
use crate::qp::flow::Flow;
use crate::qp::halves::Wait;
use crate::transport::hca::{Hca, Requester, Responder};
use crate::transport::round::Round;
use crate::transport::sender::Sender;

/// Looks whether a packet of the peer of a QP is marked, and sends the peer a CNP if one is due.
pub(super) fn look(
    hca: &Hca,
    slot: u16,
    attr: &virtio_rdma_qp_attr,
    source: &Address,
    flow: &mut Flow,
    packet: &Packet<'_>,
    round: &mut Round,
) {
    if packet.headers.ip.ecn() != Ecn::Ce {
        return;
    }
    hca.stats.add(Counter::EcnMarked, 1);
    if !flow.notifier.marked(hca.clock().now()) {
        return;
    }
    let Some(path) = Path::new(hca, u32::from(slot) + 1, attr, source) else { return };
    let mut headers = path.headers(Opcode::CNP, Psn::new(0), ExtendedHeaders::default());
    headers.bth.becn = true;
    headers.bth.migrated = false;
    charge(hca);
    let _ = round.outbox.send(hca, &headers, 0, |_| Ok::<(), ()>(()));
    hca.stats.add(Counter::CnpSent, 1);
}

/// Follows a CNP, and counts it; it is ignored if it is from no peer of the QP. It does not say which half
/// of the QP sent the packets that were marked, so both send more slowly.
pub(super) fn arrive(hca: &Hca, slot: u16, packet: &Packet<'_>) {
    let ip = &packet.headers.ip;
    let is_peers = |attr: &virtio_rdma_qp_attr, source: &Address| {
        attr.ah_attr.grh.dgid == ip.source_gid() && source.gid == ip.destination_gid()
    };
    let now = hca.clock().now();
    let line_rate = hca.limits.wire_rate.map_or(LINE_RATE, |rate| rate.min(LINE_RATE));
    let mut counter = Counter::CnpIgnored;
    let mut cut = |flow: &mut Flow| {
        flow.cut(now, line_rate);
        counter = Counter::CnpHandled;
    };
    if let Some(qp) = hca.qps.get(slot) {
        let Requester { window, flow, attr, source, config, .. } = &mut *lock(&qp.requester);
        if is_peers(attr, source) {
            match window {
                Some(window) => cut(&mut window.flow),
                None if config.is_some_and(|config| config.wq.kind == QpType::Uc) => {
                    cut(flow.get_or_insert_default());
                }
                None => {}
            }
        }
        if let Responder { inbound: Some(inbound), attr, source, .. } = &mut *lock(&qp.responder) {
            if is_peers(attr, source) {
                cut(&mut inbound.flow);
            }
        }
    }
    hca.stats.add(counter, 1);
}

/// Counts an acknowledgement or a CNP, which does not wait, against the limit of the guest.
pub(super) fn charge(hca: &Hca) {
    if let Some(limit) = &hca.rate_limit {
        lock(limit).charge(OVERHEAD, hca.clock().now());
    }
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
        let Some(turn) = flow.wait(now, bytes, self.hca.rate_limit.as_ref()) else {
            flow.sent(now, bytes);
            self.stop_waiting(requester);
            return false;
        };
        requester.wait = Wait::Answer(Some(turn));
        self.hca.set_timer(self.slot, Some(turn));
        true
    }
}
