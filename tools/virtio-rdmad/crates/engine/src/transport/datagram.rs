// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A datagram, and how it comes to its receivers on this host.

use std::ops::Range;
use std::sync::Arc;

use abi::{
    virtio_rdma_av, VIRTIO_RDMA_ACCESS_LOCAL_WRITE, VIRTIO_RDMA_PORT, VIRTIO_RDMA_WC_GRH,
    VIRTIO_RDMA_WC_RECV, VIRTIO_RDMA_WC_WITH_VLAN,
};
use roce::Qpn;

use super::batch::{CompletionBatch, Traffic};
use super::fabric_core::Member;
use super::hca::Hca;
use super::observe;
use super::receive::{Received, Receiver};
use crate::base::address::{ipv4, is_multicast, Address, Gid};
use crate::base::budget::{cost, Budget};
use crate::base::counters::Counter;
use crate::base::qp_type::QpType;
use crate::base::refused::SgeError;
use crate::base::slot::Slot;
use crate::base::sync::lock;
use crate::base::wc_status::WcStatus;
use crate::memory::copy::{self, Data, View};
use crate::memory::mr::Claim;
use crate::memory::mr_cache::{Mappings, MrCache};
use crate::queue::wqe::SendWqe;

/// The port's MTU: the largest payload of a datagram.
pub(super) const MTU: u64 = 4096;

/// Bytes in front of the payload of a received datagram.
pub(crate) const GRH_LEN: usize = 40;

/// IANA's number of UDP.
const PROTOCOL_UDP: u8 = 17;

/// A datagram, as its receiver sees it.
pub(crate) struct Datagram<'a> {
    /// The destination.
    pub dgid: Gid,
    /// The VLAN that it is in.
    pub vlan: Option<u16>,
    /// The QP that has sent it.
    pub src_qpn: Qpn,
    /// The Q_Key.
    pub qkey: u32,
    /// The service level.
    pub sl: u8,
    /// The bytes in front of the payload.
    pub grh: [u8; GRH_LEN],
    /// Immediate data.
    pub immediate: Option<u32>,
    /// Whether it asks for a solicited event.
    pub solicited: bool,
    /// Bytes of the payload.
    pub total: u64,
    /// The payload.
    pub payload: Data<'a>,
}

/// Members of a group that a visit of the sender brings a datagram to, before it looks at its budget outside.
const CHUNK: usize = 32;

/// The state of the delivery of a datagram to a group.
pub(super) struct Delivery<'a> {
    /// The HCA of the sender.
    pub hca: &'a Arc<Hca>,
    /// Whether the sender does not get its own datagrams.
    pub blocks: bool,
    pub cache: &'a mut MrCache,
    pub batch: &'a mut CompletionBatch,
    pub budget: &'a mut Budget,
    /// Shows the datagram to the observer of a member.
    pub show: &'a dyn Fn(&Hca, Slot),
}

/// The destination that a datagram has reached.
pub(super) struct Reached {
    /// The HCA.
    pub device: Arc<Hca>,
    /// The place of the QP.
    pub slot: Slot,
    /// Whether the QP is observed.
    pub is_observed: bool,
}

/// Counts a datagram that was dropped, at the HCA that has sent it or got it over the wire. A wrong Q_Key is
/// counted where it arrives, and nowhere else (IBA 14.2.5.6, `Q_KeyViolations`).
pub(super) fn count_drop(hca: &Hca, dropped: Counter) {
    if dropped != Counter::DropQkey {
        hca.stats.add(dropped, 1);
    }
}

impl Datagram<'_> {
    pub(super) fn is_multicast(&self) -> bool {
        is_multicast(&self.dgid)
    }

    /// Brings the datagram to some of those `members` of its group whose numbers are in `left`, and to its sender
    /// unless that blocks it. Returns those that are left then.
    pub(super) fn send_to_group(
        &self,
        group: &mut Delivery<'_>,
        members: &[Arc<Member<Hca>>],
        left: Range<u64>,
    ) -> Range<u64> {
        let first = members.partition_point(|member| member.number < left.start);
        let members = members[first..].iter().take_while(|member| member.number < left.end);
        for (served, member) in members.enumerate() {
            if served == CHUNK || served != 0 && group.budget.is_over() {
                return member.number..left.end;
            }
            self.send_to_member(group, member);
        }
        left.end..left.end
    }

    /// Brings the datagram to a member of its group, and charges for it.
    fn send_to_member(&self, group: &mut Delivery<'_>, member: &Member<Hca>) {
        let Delivery { hca, blocks, cache, batch, budget, show } = group;
        budget.work(cost::MESSAGE);
        let Some(device) = member.device.upgrade() else { return };
        let is_sender = member.slot.qpn() == self.src_qpn && Arc::ptr_eq(&device, hca);
        let is_deaf = is_sender && *blocks;
        if is_deaf || !device.is_in_vlan(self.vlan) {
            return;
        }
        match self.arrive(&device, member.slot, cache, batch) {
            Ok(is_observed) => {
                if is_observed {
                    (*show)(&device, member.slot);
                }
                device.stats.add(Counter::MulticastRcvPackets, 1);
                budget.spend(self.total);
            }
            Err(dropped) => count_drop(hca, dropped),
        }
    }

    /// Brings the datagram to its destination, which it returns, or says why it is dropped.
    pub(super) fn send_to_address(
        &self,
        hca: &Hca,
        source: &Address,
        qpn: u32,
        cache: &mut MrCache,
        batch: &mut CompletionBatch,
    ) -> Result<Reached, Counter> {
        let target = source.beside(self.dgid);
        let device = hca.fabric.find(&target).ok_or(Counter::DropUnreachable)?;
        let slot = device.slot_of(qpn).ok_or(Counter::DropUnreachable)?;
        let is_observed = self.arrive(&device, slot, cache, batch)?;
        Ok(Reached { device, slot, is_observed })
    }

    /// Gives the datagram to a QP of an HCA, if the QP takes datagrams, and those of this
    /// multicast group. Runs in the sender's thread, or in that of the guest itself if the datagram came
    /// over the wire. Returns whether the QP is observed.
    pub fn arrive(
        &self,
        hca: &Arc<Hca>,
        slot: Slot,
        cache: &mut MrCache,
        batch: &mut CompletionBatch,
    ) -> Result<bool, Counter> {
        let qp = hca.qps.get(slot).ok_or(Counter::DropUnreachable)?;
        let mut responder = lock(&qp.responder);
        let kind = responder.config.map(|config| config.wq.kind);
        // A QP that has left since, or another in its place.
        let is_foreign = self.is_multicast() && !responder.groups.contains(&self.dgid);
        let takes = matches!(kind, Some(QpType::Ud | QpType::Gsi)) && qp.state().receives();
        if is_foreign || !takes {
            return Err(Counter::DropUnreachable);
        }
        let mut to = Receiver { hca, slot, responder: &mut responder, batch: &mut *batch };
        let result = self.receive(&mut to, cache);
        let is_observed = responder.observed;
        batch.place_completions();
        drop(responder);
        result?;
        batch.carry(hca, Traffic::sent(self.total, 1).mirrored());
        Ok(is_observed)
    }

    /// Takes the datagram in.
    fn receive(&self, to: &mut Receiver<'_>, cache: &mut MrCache) -> Result<(), Counter> {
        if to.responder.attr.qkey != self.qkey {
            to.hca.stats.add(Counter::DropQkey, 1);
            return Err(Counter::DropQkey);
        }
        // The sender does not wait for a receive, and not for a guest that is frozen: what it sends next may be
        // for others.
        if to.hca.is_frozen() || to.take_receive(false).is_err() {
            return Err(Counter::DropNoReceive);
        }
        let len = GRH_LEN as u64 + self.total;
        if to.responder.receive.sges.total() < len {
            return Err(Counter::DropRefused);
        }
        cache.begin(&**to.hca);
        if let Err(wrong) = self.write(to, cache) {
            let refused = wrong.access(to.responder.receive.sges.as_slice());
            to.fail_receive(WcStatus::LocalProtection, refused);
            return Err(Counter::DropRefused);
        }
        if to.responder.observed {
            observe::copied_datagram(to.hca, to.slot, self.total);
        }
        let received = Received {
            opcode: VIRTIO_RDMA_WC_RECV,
            len,
            immediate: self.immediate,
            invalidated: None,
            solicited: self.solicited,
        };
        to.complete(received, |cqe| {
            cqe.src_qp = self.src_qpn.get();
            cqe.wc_flags |= VIRTIO_RDMA_WC_GRH;
            cqe.sl = self.sl;
            cqe.port_num = VIRTIO_RDMA_PORT as u8;
            if let Some(vlan) = self.vlan {
                cqe.wc_flags |= VIRTIO_RDMA_WC_WITH_VLAN;
                cqe.vlan_id = vlan;
            }
        });
        Ok(())
    }

    /// Writes header and payload into the memory of a receive.
    fn write(&self, to: &Receiver<'_>, cache: &mut MrCache) -> Result<(), SgeError> {
        let pdn = to.responder.config.ok_or(SgeError::COPY)?.recv_pdn;
        let sges = to.responder.receive.sges.as_slice();
        let claim = Claim::local(pdn, VIRTIO_RDMA_ACCESS_LOCAL_WRITE);
        let (mut header, mut payload) = (Mappings::new(), Mappings::new());
        let begin = GRH_LEN as u64;
        let end = begin + self.total;
        let keys = &to.hca.keys;
        let mut map = |bytes, to| cache.map_sges(keys, sges, claim, bytes, to);
        map(0..begin, &mut header)?;
        map(begin..end, &mut payload)?;
        let view = |mappings| View { cache, mappings };
        let copied = copy::write(view(&header), &self.grh);
        let copied = copied.and_then(|()| copy::scatter(self.payload, view(&payload), self.total));
        copied.map_err(|_| SgeError::COPY)
    }
}

/// Returns the bytes of the UDP packet that would carry a datagram: UDP, BTH, DETH,
/// immediate data, payload padded to 4 bytes, ICRC.
pub(super) fn packet_len(wqe: &SendWqe) -> u16 {
    let immediate = if wqe.request.immediate.is_some() { 4 } else { 0 };
    let payload = wqe.request.total.min(MTU).next_multiple_of(4);
    u16::try_from(8 + 12 + 8 + immediate + payload + 4).unwrap_or(u16::MAX)
}

/// Returns the bytes in front of a received datagram: an IPv6 header, or 20 bytes of zeros and an IPv4 header
/// (specification, Datagrams).
pub(super) fn grh(av: &virtio_rdma_av, sgid: &Gid, len: u16) -> [u8; GRH_LEN] {
    match (ipv4(sgid), ipv4(&av.dgid)) {
        (Some(source), Some(target)) => ipv4_header(av, source, target, len),
        _ => ipv6_header(av, sgid, len),
    }
}

fn ipv6_header(av: &virtio_rdma_av, sgid: &Gid, len: u16) -> [u8; GRH_LEN] {
    let mut header = [0; GRH_LEN];
    let first = 6 << 28 | av.sl_tclass_flowlabel & 0x0fff_ffff;
    header[0..4].copy_from_slice(&first.to_be_bytes());
    header[4..6].copy_from_slice(&len.to_be_bytes());
    header[6] = PROTOCOL_UDP;
    header[7] = av.hop_limit;
    header[8..24].copy_from_slice(sgid);
    header[24..40].copy_from_slice(&av.dgid);
    header
}

fn ipv4_header(av: &virtio_rdma_av, source: [u8; 4], target: [u8; 4], len: u16) -> [u8; GRH_LEN] {
    let mut header = [0; GRH_LEN];
    let ip = &mut header[20..];
    ip[0] = 0x45;
    ip[1] = (av.sl_tclass_flowlabel >> 20) as u8;
    ip[2..4].copy_from_slice(&len.saturating_add(20).to_be_bytes());
    ip[6] = 0x40;
    ip[8] = av.hop_limit;
    ip[9] = PROTOCOL_UDP;
    ip[12..16].copy_from_slice(&source);
    ip[16..20].copy_from_slice(&target);
    let checksum = checksum(ip);
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    header
}

/// Returns the Internet checksum (RFC 1071) of an even number of bytes.
fn checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 =
        bytes.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    #[test]
    fn ipv4_header_has_a_valid_checksum() {
        let mut av = virtio_rdma_av::new_zeroed();
        av.hop_limit = 64;
        av.dgid = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 2];
        let sgid = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1];
        let header = grh(&av, &sgid, 300);
        assert_eq!(header[..20], [0; 20]);
        assert_eq!(header[20], 0x45);
        assert_eq!(checksum(&header[20..]), 0);
        assert_eq!(header[32..40], [10, 0, 0, 1, 10, 0, 0, 2]);
    }

    #[test]
    fn ipv6_header_names_both_ends() {
        let mut av = virtio_rdma_av::new_zeroed();
        av.sl_tclass_flowlabel = 3 << 28 | 0x45 << 20 | 0x12345;
        av.dgid = [0xfe; 16];
        let header = grh(&av, &[0xfd; 16], 300);
        assert_eq!(header[..4], [0x64, 0x51, 0x23, 0x45]);
        assert_eq!(header[6], PROTOCOL_UDP);
        assert_eq!(header[8..24], [0xfd; 16]);
        assert_eq!(header[24..], [0xfe; 16]);
    }
}
