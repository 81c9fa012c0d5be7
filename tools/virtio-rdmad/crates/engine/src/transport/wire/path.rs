// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The path of a connection: the headers that all of its packets have in common.

use std::net::IpAddr;

use abi::{virtio_rdma_av, virtio_rdma_qp_attr};
use roce::{
    ip_of, Bth, Ethernet, ExtendedHeaders, FlowLabel, Headers, Ip, Ipv4, Ipv6, Opcode, Psn, Qpn,
    Vlan,
};

use crate::base::address::{is_multicast, Address, Gid};
use crate::base::slot::Slot;
use crate::transport::hca::Hca;

/// The bytes that a packet takes on the wire besides its payload, about: preamble, Ethernet header, IPv4, UDP,
/// BTH, ICRC, frame check sequence and gap.
pub(crate) const OVERHEAD: u64 = 8 + 14 + 20 + 8 + 12 + 4 + 4 + 12;

/// Bits of the traffic class that tell of congestion, below the DSCP. The sender of a packet sets them (RFC 3168).
const ECN_BITS: u8 = 2;
/// ECT(0): the network may mark the packet instead of dropping it.
const ECT: u8 = 2;

/// The bits of a flow label.
const FLOW_LABEL: u32 = 0xf_ffff;

/// The fields of the address vector of a connection or of a datagram.
struct Target {
    dmac: [u8; 6],
    dgid: Gid,
    sl: u8,
    traffic_class: u8,
    flow_label: u32,
    hop_limit: u8,
}

/// The path of the packets of a connection.
pub(crate) struct Path {
    ethernet: Ethernet,
    ip: Ip,
    source_port: u16,
    dest_qp: Qpn,
    /// The place of the QP, if it is observed.
    pub observed: Option<Slot>,
}

impl Path {
    /// Returns the path of the QP in place `slot` with these attributes, whose packets have this source; `None` if the
    /// peer can have no such address.
    pub fn new(
        hca: &Hca,
        slot: Slot,
        attr: &virtio_rdma_qp_attr,
        source: &Address,
    ) -> Option<Self> {
        let av = &attr.ah_attr;
        let to = Target {
            dmac: av.dmac,
            dgid: av.grh.dgid,
            sl: av.sl,
            traffic_class: av.grh.traffic_class,
            flow_label: av.grh.flow_label,
            hop_limit: av.grh.hop_limit,
        };
        Self::to(hca, slot.qpn(), attr.dest_qp_num, &to, source)
    }

    /// Returns the path of a datagram from the QP `qpn` to the QP `dest_qpn`.
    pub fn of_datagram(
        hca: &Hca,
        qpn: Qpn,
        dest_qpn: u32,
        av: &virtio_rdma_av,
        source: &Address,
    ) -> Option<Self> {
        let to = Target {
            dmac: av.dmac,
            dgid: av.dgid,
            sl: (av.sl_tclass_flowlabel >> 28) as u8,
            traffic_class: (av.sl_tclass_flowlabel >> 20) as u8,
            flow_label: av.sl_tclass_flowlabel,
            hop_limit: av.hop_limit,
        };
        Self::to(hca, qpn, dest_qpn, &to, source)
    }

    /// Returns a path; `None` for a peer that can have no such address: packets for one peer do not go to a group's MAC
    /// address, by which they would reach every station of the network.
    fn to(hca: &Hca, qpn: Qpn, dest_qpn: u32, to: &Target, source: &Address) -> Option<Self> {
        let flow_label = FlowLabel::new(to.flow_label & FLOW_LABEL)?;
        let dest_qp = Qpn::new(dest_qpn)?;
        let destination = if is_multicast(&to.dgid) {
            roce::multicast_mac(&to.dgid)
        } else {
            Some(to.dmac).filter(|mac| mac[0] & 1 == 0)?
        };
        let tag = |id| Vlan::new(u16::from(hca.classes.pcp(to.sl & 7)) << 13 | id);
        let dscp = hca.classes.dscp(to.traffic_class >> ECN_BITS);
        Some(Self {
            ethernet: Ethernet {
                destination,
                source: hca.identity.mac(),
                vlan: source.vlan.map(tag),
            },
            ip: ip(to, dscp, flow_label, source)?,
            source_port: roce::source_port(flow_label, qpn, dest_qp),
            dest_qp,
            observed: None,
        })
    }

    /// Returns the path, whose packets an observer is told of if the QP in this place is observed.
    pub fn observed_if(self, is_observed: bool, slot: Slot) -> Self {
        Self { observed: is_observed.then_some(slot), ..self }
    }

    /// Returns the path of notifications of congestion about packets of this path, which may have a class of traffic of
    /// their own.
    pub fn of_cnps(mut self, hca: &Hca) -> Self {
        let (Ip::V4(Ipv4 { traffic_class, .. }) | Ip::V6(Ipv6 { traffic_class, .. })) =
            &mut self.ip;
        *traffic_class = hca.classes.cnp_dscp(*traffic_class >> ECN_BITS) << ECN_BITS | ECT;
        self
    }

    /// Returns the path to a peer with this MAC address.
    pub fn with_mac(mut self, mac: [u8; 6]) -> Self {
        self.ethernet.destination = mac;
        self
    }

    /// Returns the headers of a packet.
    pub fn headers(&self, opcode: Opcode, psn: Psn, extended: ExtendedHeaders) -> Headers {
        Headers {
            ethernet: self.ethernet,
            ip: self.ip,
            source_port: self.source_port,
            bth: Bth::new(opcode, self.dest_qp, psn),
            extended,
        }
    }
}

fn ip(to: &Target, dscp: u8, flow_label: FlowLabel, source: &Address) -> Option<Ip> {
    let traffic_class = dscp << ECN_BITS | ECT;
    let hop_limit = to.hop_limit;
    Some(match (ip_of(&source.gid), ip_of(&to.dgid)) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => Ip::V4(Ipv4 {
            traffic_class,
            // Packets that are never fragmented need no identification (RFC 6864, 4.1).
            identification: 0,
            dont_fragment: true,
            hop_limit,
            source,
            destination,
        }),
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            Ip::V6(Ipv6 { traffic_class, flow_label, hop_limit, source, destination })
        }
        _ => return None,
    })
}
