// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Unreliable datagrams, and those of the GSI.

use std::sync::Arc;

use abi::{
    virtio_rdma_av, VIRTIO_RDMA_ACCESS_LOCAL_WRITE, VIRTIO_RDMA_MCAST_QPN, VIRTIO_RDMA_PORT,
    VIRTIO_RDMA_WC_GRH, VIRTIO_RDMA_WC_LOC_LEN_ERR, VIRTIO_RDMA_WC_LOC_PROT_ERR,
    VIRTIO_RDMA_WC_LOC_QP_OP_ERR, VIRTIO_RDMA_WC_RECV, VIRTIO_RDMA_WC_SUCCESS,
    VIRTIO_RDMA_WC_WITH_VLAN,
};

use crate::base::counters::Counter;
use crate::base::sync::lock;
use crate::control::mcast::is_multicast;
use crate::device::Shared;
use crate::memory::copy;
use crate::memory::mr::{Claim, Data, Mappings, View};
use crate::memory::mr_cache::PinSet;
use crate::qp::halves::{QpConfig, Requester, Responder};
use crate::qp::state::QpType;
use crate::queue::wqe::SendWqe;
use crate::transport::responder::Received;
use crate::transport::turn::{cost, Outbox, Traffic, Turn};
use crate::{Address, Gid};

/// The port's MTU: the largest payload of a datagram.
const MTU: u64 = 4096;

/// Bytes in front of the payload of a received datagram.
const GRH_LEN: usize = 40;

/// The bit of a Q_Key that only privileged senders set themselves.
const CONTROLLED_QKEY: u32 = 1 << 31;

/// IANA's number of UDP.
const PROTOCOL_UDP: u8 = 17;

/// What the wire would carry of a datagram besides its payload.
struct Datagram<'a> {
    wqe: &'a SendWqe,
    source: Address,
    src_qpn: u32,
    qkey: u32,
    /// Whether it does not come back to its sender from a multicast group.
    block_loopback: bool,
    payload: Data<'a>,
}

impl Datagram<'_> {
    fn is_multicast(&self) -> bool {
        is_multicast(&self.wqe.ud.av.dgid)
    }
}

impl Shared {
    /// Sends the datagram under way; its `enum virtio_rdma_wc_status`. Success
    /// says nothing of its delivery.
    pub(crate) fn send_datagram(
        self: &Arc<Self>,
        slot: u16,
        requester: &Requester,
        config: &QpConfig,
        turn: &mut Turn,
    ) -> u32 {
        let wqe = &requester.wqe;
        let av = &wqe.ud.av;
        if wqe.total > MTU {
            return VIRTIO_RDMA_WC_LOC_LEN_ERR;
        }
        if av.port != VIRTIO_RDMA_PORT || av.pdn != config.pdn {
            return VIRTIO_RDMA_WC_LOC_QP_OP_ERR;
        }
        let Some(source) = self.gid(av.gid_index.into()) else {
            return VIRTIO_RDMA_WC_LOC_QP_OP_ERR;
        };
        let Turn { local, remote, outbox, .. } = turn;
        local.begin(&**self);
        // Inline data has no SGEs.
        let sges = if wqe.is_inline { &[] } else { wqe.sges.as_slice() };
        let claim = Claim::local(config.pdn, 0);
        let mut mappings = Mappings::new();
        if local.map_sges(&self.keys, sges, claim, 0..wqe.total, &mut mappings).is_err() {
            return VIRTIO_RDMA_WC_LOC_PROT_ERR;
        }
        let payload = if wqe.is_inline {
            Data::Inline(&wqe.inline)
        } else {
            Data::Mapped(View { pins: local, mappings: &mappings })
        };
        let own_qkey = wqe.ud.remote_qkey & CONTROLLED_QKEY != 0;
        let datagram = Datagram {
            wqe,
            source,
            src_qpn: u32::from(slot) + 1,
            qkey: if own_qkey { requester.attr.qkey } else { wqe.ud.remote_qkey },
            block_loopback: config.block_loopback,
            payload,
        };
        outbox.carry_own(Traffic::sent(wqe.total, 1));
        if datagram.is_multicast() {
            outbox.count(Counter::MulticastXmitPackets, 1);
            let (copies, dropped) = self.multicast(&datagram, remote, outbox);
            (0..copies).for_each(|_| turn.spend(wqe.total));
            turn.work(dropped * cost::MESSAGE);
        } else if let Err(dropped) = self.deliver(&datagram, remote, outbox) {
            self.count_drop(dropped);
        }
        VIRTIO_RDMA_WC_SUCCESS
    }

    /// Brings a datagram to each QP that is attached to its group; how many got
    /// it, and how many did not.
    fn multicast(
        self: &Arc<Self>,
        datagram: &Datagram<'_>,
        pins: &mut PinSet,
        outbox: &mut Outbox,
    ) -> (u32, u64) {
        let ud = &datagram.wqe.ud;
        let group = self.fabric.group(&ud.av.dgid);
        let Some(group) = group.filter(|_| ud.remote_qpn == VIRTIO_RDMA_MCAST_QPN) else {
            self.stats.add(Counter::DropUnreachable, 1);
            return (0, 0);
        };
        let mut copies = 0;
        for member in group.iter() {
            let Some(device) = member.device.upgrade() else { continue };
            let is_sender =
                u32::from(member.slot) + 1 == datagram.src_qpn && Arc::ptr_eq(&device, self);
            let is_deaf = is_sender && datagram.block_loopback;
            if is_deaf || !device.is_in_vlan(datagram.source.vlan) {
                continue;
            }
            match device.accept(member.slot, datagram, pins, outbox) {
                Ok(()) => {
                    device.stats.add(Counter::MulticastRcvPackets, 1);
                    copies += 1;
                }
                Err(dropped) => self.count_drop(dropped),
            }
        }
        (copies, group.len() as u64 - u64::from(copies))
    }

    /// Counts a datagram of this sender that was dropped. A wrong Q_Key is counted where it arrives,
    /// and nowhere else (IBA 14.2.5.6, `Q_KeyViolations`).
    fn count_drop(&self, dropped: Counter) {
        if dropped != Counter::DropQkey {
            self.stats.add(dropped, 1);
        }
    }

    /// Brings a datagram to its destination, or says why it is dropped.
    fn deliver(
        &self,
        datagram: &Datagram<'_>,
        pins: &mut PinSet,
        outbox: &mut Outbox,
    ) -> Result<(), Counter> {
        let ud = &datagram.wqe.ud;
        let target = datagram.source.beside(ud.av.dgid);
        let device = self.fabric.find(&target).ok_or(Counter::DropUnreachable)?;
        let slot = device.slot_of(ud.remote_qpn).ok_or(Counter::DropUnreachable)?;
        device.accept(slot, datagram, pins, outbox)
    }

    /// Gives a datagram to a QP of this device, if it takes any, and any of this
    /// multicast group. Runs in the sender's thread.
    fn accept(
        self: &Arc<Self>,
        slot: u16,
        datagram: &Datagram<'_>,
        pins: &mut PinSet,
        outbox: &mut Outbox,
    ) -> Result<(), Counter> {
        let qp = self.qps.get(slot).ok_or(Counter::DropUnreachable)?;
        let mut responder = lock(&qp.responder);
        let kind = responder.config.map(|config| config.kind);
        // A QP that has left since, or another in its place.
        let is_foreign =
            datagram.is_multicast() && !responder.groups.contains(&datagram.wqe.ud.av.dgid);
        let takes = matches!(kind, Some(QpType::Ud | QpType::Gsi)) && qp.state().receives();
        if is_foreign || !takes {
            return Err(Counter::DropUnreachable);
        }
        let result = self.receive_datagram(slot, &mut responder, datagram, pins, outbox);
        outbox.place_completions();
        drop(responder);
        result?;
        outbox.carry(self, Traffic::sent(datagram.wqe.total, 1).mirrored());
        Ok(())
    }

    /// Takes a datagram in. Runs in the sender's thread.
    fn receive_datagram(
        self: &Arc<Self>,
        slot: u16,
        responder: &mut Responder,
        datagram: &Datagram<'_>,
        pins: &mut PinSet,
        outbox: &mut Outbox,
    ) -> Result<(), Counter> {
        if responder.attr.qkey != datagram.qkey {
            self.stats.add(Counter::DropQkey, 1);
            return Err(Counter::DropQkey);
        }
        if !self.take_receive_unreliable(slot, responder, outbox) {
            return Err(Counter::DropNoReceive);
        }
        let len = GRH_LEN as u64 + datagram.wqe.total;
        if responder.receive.sges.total() < len {
            return Err(Counter::DropRefused);
        }
        pins.begin(&**self);
        if self.write_datagram(responder, datagram, pins).is_err() {
            let status = VIRTIO_RDMA_WC_LOC_PROT_ERR;
            self.fail_taken_receive(slot, responder, status, outbox);
            return Err(Counter::DropRefused);
        }
        let received = Received {
            opcode: VIRTIO_RDMA_WC_RECV,
            len,
            immediate: datagram.wqe.immediate,
            invalidated: None,
            solicited: datagram.wqe.solicited,
        };
        self.received(slot, responder, received, outbox, |cqe| {
            cqe.src_qp = datagram.src_qpn;
            cqe.wc_flags |= VIRTIO_RDMA_WC_GRH;
            cqe.sl = (datagram.wqe.ud.av.sl_tclass_flowlabel >> 28) as u8;
            cqe.port_num = VIRTIO_RDMA_PORT as u8;
            if let Some(vlan) = datagram.source.vlan {
                cqe.wc_flags |= VIRTIO_RDMA_WC_WITH_VLAN;
                cqe.vlan_id = vlan;
            }
        });
        Ok(())
    }

    /// Writes header and payload into the memory of a receive.
    fn write_datagram(
        &self,
        responder: &Responder,
        datagram: &Datagram<'_>,
        pins: &mut PinSet,
    ) -> Result<(), ()> {
        let pdn = responder.config.ok_or(())?.recv_pdn;
        let sges = responder.receive.sges.as_slice();
        let claim = Claim::local(pdn, VIRTIO_RDMA_ACCESS_LOCAL_WRITE);
        let (mut header, mut payload) = (Mappings::new(), Mappings::new());
        let begin = GRH_LEN as u64;
        let end = begin + datagram.wqe.total;
        let mut map = |bytes, to| pins.map_sges(&self.keys, sges, claim, bytes, to).map_err(|_| ());
        map(0..begin, &mut header)?;
        map(begin..end, &mut payload)?;
        let view = |mappings| View { pins, mappings };
        let grh = grh(&datagram.wqe.ud.av, &datagram.source.gid, packet_len(datagram.wqe));
        copy::write(view(&header), &grh).map_err(|_| ())?;
        copy::scatter(datagram.payload, view(&payload), datagram.wqe.total).map_err(|_| ())
    }
}

/// Bytes of the UDP packet that would carry a datagram: UDP, BTH, DETH,
/// immediate data, payload padded to 4 bytes, ICRC.
fn packet_len(wqe: &SendWqe) -> u16 {
    let immediate = if wqe.immediate.is_some() { 4 } else { 0 };
    let payload = wqe.total.min(MTU).next_multiple_of(4);
    u16::try_from(8 + 12 + 8 + immediate + payload + 4).unwrap_or(u16::MAX)
}

/// The IPv4 address that a GID holds.
pub(crate) fn ipv4(gid: &Gid) -> Option<[u8; 4]> {
    let prefix = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
    let address = gid.strip_prefix(&prefix)?;
    address.try_into().ok()
}

/// What stands in front of a received datagram: an IPv6 header, or 20 bytes of
/// zeros and an IPv4 header (specification, chapter 10).
fn grh(av: &virtio_rdma_av, sgid: &Gid, len: u16) -> [u8; GRH_LEN] {
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

/// The Internet checksum (RFC 1071) of an even number of bytes.
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
