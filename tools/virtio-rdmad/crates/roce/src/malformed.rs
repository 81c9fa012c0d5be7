// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The reasons why a frame is no packet of RoCE v2, or a wrong one.

use thiserror::Error;

/// The reason why [`decode`](crate::decode) refuses a frame. The reasons stand in the order in which they are looked
/// for, and only the first one is reported.
#[derive(Clone, Copy, Debug, Eq, Error, Hash, PartialEq)]
pub enum Malformed {
    /// The frame ends within the Ethernet header.
    #[error("the frame ends within the Ethernet header")]
    EthernetCutOff,
    /// The frame carries neither IPv4 nor IPv6, or has more than one tag of a VLAN.
    #[error("the frame is neither IPv4 nor IPv6")]
    NotIp,
    /// The frame ends within the IP header.
    #[error("the frame ends within the IP header")]
    IpCutOff,
    /// The version of the IP header is not that of the Ethernet header.
    #[error("the IP version is not that of the Ethernet header")]
    IpVersion,
    /// The length of the IPv4 header is not 20 bytes. Packets of RoCE v2 have no options.
    #[error("the IPv4 header is not 20 bytes long")]
    IpHeaderLength,
    /// The IP packet is longer than the frame, or shorter than its own header.
    #[error("the length of the IP packet is wrong")]
    IpLength,
    /// The IP packet is a fragment. Packets of RoCE v2 are not fragmented (IBA A17).
    #[error("the IP packet is a fragment")]
    Fragment,
    /// The IP packet does not carry UDP. This includes IPv6 with extension headers.
    #[error("the IP packet does not carry UDP")]
    NotUdp,
    /// The checksum of the IPv4 header is wrong.
    #[error("the checksum of the IPv4 header is wrong")]
    IpChecksum,
    /// The IP packet ends within the UDP header.
    #[error("the IP packet ends within the UDP header")]
    UdpCutOff,
    /// The destination port is not that of RoCE v2.
    #[error("the UDP destination port is not 4791")]
    NotRocePort,
    /// The length in the UDP header is not that of the IP packet.
    #[error("the UDP length is not that of the IP packet")]
    UdpLength,
    /// The packet is too short for a BTH and an ICRC.
    #[error("the packet is too short for a BTH and an ICRC")]
    BthCutOff,
    /// The version of the BTH is not 0.
    #[error("the version of the BTH is not 0")]
    TransportVersion,
    /// The opcode is reserved, or belongs to a service that this crate does not know.
    #[error("the opcode is unknown")]
    UnknownOpcode,
    /// The packet ends within the headers that its opcode says.
    #[error("the packet ends within its extended headers")]
    ExtendedHeaderCutOff,
    /// The pad count is larger than what follows the headers, or does not bring the payload to a
    /// multiple of 4 bytes.
    #[error("the pad count does not belong to the length")]
    PadCount,
    /// The packet carries payload, and its opcode does not allow that.
    #[error("the packet carries payload, which its opcode does not allow")]
    UnexpectedPayload,
    /// The ICRC is wrong.
    #[error("the ICRC is wrong")]
    Icrc,
}

impl Malformed {
    /// All causes. A cause's place here is its value as a number.
    pub const ALL: [Self; 19] = [
        Self::EthernetCutOff,
        Self::NotIp,
        Self::IpCutOff,
        Self::IpVersion,
        Self::IpHeaderLength,
        Self::IpLength,
        Self::Fragment,
        Self::NotUdp,
        Self::IpChecksum,
        Self::UdpCutOff,
        Self::NotRocePort,
        Self::UdpLength,
        Self::BthCutOff,
        Self::TransportVersion,
        Self::UnknownOpcode,
        Self::ExtendedHeaderCutOff,
        Self::PadCount,
        Self::UnexpectedPayload,
        Self::Icrc,
    ];

    /// Returns the name of the counter of frames that are refused for this cause.
    pub const fn counter(self) -> &'static str {
        match self {
            Self::EthernetCutOff => "ethernet_cut_off",
            Self::NotIp => "not_ip",
            Self::IpCutOff => "ip_cut_off",
            Self::IpVersion => "ip_version",
            Self::IpHeaderLength => "ip_header_length",
            Self::IpLength => "ip_length",
            Self::Fragment => "fragment",
            Self::NotUdp => "not_udp",
            Self::IpChecksum => "ip_checksum",
            Self::UdpCutOff => "udp_cut_off",
            Self::NotRocePort => "not_roce_port",
            Self::UdpLength => "udp_length",
            Self::BthCutOff => "bth_cut_off",
            Self::TransportVersion => "transport_version",
            Self::UnknownOpcode => "unknown_opcode",
            Self::ExtendedHeaderCutOff => "extended_header_cut_off",
            Self::PadCount => "pad_count",
            Self::UnexpectedPayload => "unexpected_payload",
            Self::Icrc => "icrc",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn each_cause_has_its_place_and_its_counter() {
        let mut names = HashSet::new();
        for (place, cause) in Malformed::ALL.into_iter().enumerate() {
            assert_eq!(cause as usize, place);
            assert!(names.insert(cause.counter()));
        }
    }
}
