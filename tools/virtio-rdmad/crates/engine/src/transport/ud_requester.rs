// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The requester of UD and GSI QPs.

use std::ops::Range;
use std::sync::Arc;

use abi::{VIRTIO_RDMA_MCAST_QPN, VIRTIO_RDMA_PORT};

use super::batch::Traffic;
use super::datagram::{count_drop, grh, packet_len, Datagram, Delivery, Reached, MTU};
use super::hca::Hca;
use super::observe;
use super::round::Round;
use super::wire::datagram::Shown;
use super::wire::{self, is_away, is_group_away};
use crate::base::counters::Counter;
use crate::base::slot::Slot;
use crate::base::wc_status::WcStatus;
use crate::memory::copy::{Data, View};
use crate::memory::mr::Claim;
use crate::memory::mr_cache::Mappings;
use crate::qp::config::QpConfig;
use crate::qp::halves::Requester;

/// The bit of a Q_Key that only privileged senders set themselves.
const CONTROLLED_QKEY: u32 = 1 << 31;

/// Sends the datagram under way, and returns its status. Success
/// says nothing of its delivery. If it is yet to reach members of a group, by number, fails with these: it is to be
/// sent once more.
pub(crate) fn send(
    hca: &Arc<Hca>,
    slot: Slot,
    requester: &Requester,
    config: &QpConfig,
    round: &mut Round,
) -> Result<WcStatus, Range<u64>> {
    let wqe = &requester.wqe;
    let av = &wqe.ud.av;
    if wqe.request.total > MTU {
        return Ok(WcStatus::LocalLength);
    }
    if av.port != VIRTIO_RDMA_PORT || av.pdn != config.pdn {
        return Ok(WcStatus::LocalQpOperation);
    }
    let Some(source) = hca.gid(av.gid_index.into()) else {
        return Ok(WcStatus::LocalQpOperation);
    };
    let observed = requester.observed.then_some(slot);
    let Round { local: cache, remote, batch, budget, outbox, .. } = round;
    cache.begin(&**hca);
    // Inline data has no SGEs.
    let sges = if wqe.is_inline { &[] } else { wqe.sges.as_slice() };
    let claim = Claim::local(config.pdn, 0);
    let mut mappings = Mappings::new();
    if cache.map_sges(&hca.keys, sges, claim, 0..wqe.request.total, &mut mappings).is_err() {
        return Ok(WcStatus::LocalProtection);
    }
    let payload = if wqe.is_inline {
        Data::Inline(&wqe.inline)
    } else {
        Data::Mapped(View { cache, mappings: &mappings })
    };
    let own_qkey = wqe.ud.remote_qkey & CONTROLLED_QKEY != 0;
    let datagram = Datagram {
        dgid: av.dgid,
        vlan: source.vlan,
        src_qpn: slot.qpn(),
        qkey: if own_qkey { requester.attr.qkey } else { wqe.ud.remote_qkey },
        sl: (av.sl_tclass_flowlabel >> 28) as u8,
        grh: grh(av, &source.gid, packet_len(wqe)),
        immediate: wqe.request.immediate,
        solicited: wqe.request.solicited,
        total: wqe.request.total,
        payload,
    };
    let (psn, source_of, to) = (requester.sq_psn(), &source, &wqe.ud);
    let shown = Shown { hca, datagram: &datagram, source: source_of, to, psn };
    if requester.members.is_none() {
        batch.carry_own(Traffic::sent(wqe.request.total, 1));
    }
    if datagram.is_multicast() {
        let is_group = wqe.ud.remote_qpn == VIRTIO_RDMA_MCAST_QPN;
        let members = hca.fabric.group(&av.dgid).filter(|_| is_group);
        if requester.members.is_none() {
            batch.count(Counter::MulticastXmitPackets, 1);
            let leaves = is_group && is_group_away(hca, &source, &av.dgid);
            let psn = requester.sq_psn();
            if leaves
                && wire::datagram::send(hca, outbox, &datagram, &source, &wqe.ud, psn, observed)
                    .is_err()
            {
                return Ok(WcStatus::LocalProtection);
            }
            if requester.observed && !leaves {
                shown.show((hca, slot), true, None);
            }
            if members.is_none() && !leaves {
                hca.stats.add(Counter::DropUnreachable, 1);
            }
        }
        let members = members.as_deref().unwrap_or_default();
        let whole = || 0..members.last().map_or(0, |last| last.number + 1);
        let left = requester.members.clone().unwrap_or_else(whole);
        let show = |device: &Hca, member: Slot| shown.show((device, member), false, None);
        let mut group = Delivery {
            hca,
            blocks: config.block_loopback,
            cache: remote,
            batch,
            budget,
            show: &show,
        };
        let left = datagram.send_to_group(&mut group, members, left);
        if !left.is_empty() {
            return Err(left);
        }
    } else if is_away(hca, &source, &av.dgid) {
        let psn = requester.sq_psn();
        if wire::datagram::send(hca, outbox, &datagram, &source, &wqe.ud, psn, observed).is_err() {
            return Ok(WcStatus::LocalProtection);
        }
    } else {
        match datagram.send_to_address(hca, &source, wqe.ud.remote_qpn, remote, batch) {
            Ok(reached) if requester.observed || reached.is_observed => {
                show_reached(&shown, (hca, slot), requester.observed, &reached);
            }
            Ok(_) => {}
            Err(dropped) => count_drop(hca, dropped),
        }
    }
    Ok(WcStatus::Success)
}

/// Tells the observers of both ends of a datagram that has arrived.
#[cold]
fn show_reached(shown: &Shown<'_>, sender: (&Hca, Slot), is_observed: bool, reached: &Reached) {
    let peer = Some(&*reached.device);
    if is_observed {
        observe::copied_datagram(sender.0, sender.1, shown.datagram.total);
        shown.show(sender, true, peer);
    }
    if reached.is_observed {
        shown.show((&reached.device, reached.slot), false, peer);
    }
}
