// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The IP header, of version 4 or 6.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use zerocopy::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::gid::{gid_of, Gid};
use crate::wire::{take_wire, Writer};
use crate::Malformed;

/// Explicit congestion notification: the two lowest bits of the traffic class (RFC 3168).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Ecn {
    /// 0: the sender does not react to congestion.
    NotEct,
    /// 1: the sender reacts to congestion.
    Ect1,
    /// 2: the sender reacts to congestion.
    Ect0,
    /// 3: the packet met congestion.
    Ce,
}

/// The flow label of IPv6: 20 bits (RFC 6437).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct FlowLabel(u32);

impl FlowLabel {
    pub(crate) const MASK: u32 = 0x000f_ffff;

    /// Makes a flow label; `None` if it has more than 20 bits.
    pub const fn new(label: u32) -> Option<Self> {
        if label > Self::MASK {
            return None;
        }
        Some(Self(label))
    }

    /// Returns the label as a number below 2^20.
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// The header of IPv4 (RFC 791), without options.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Ipv4 {
    /// The type of service: 6 bits of DSCP and 2 bits of ECN.
    pub traffic_class: u8,
    /// The identification. ICRC covers it.
    pub identification: u16,
    /// DF: routers do not fragment the packet. rxe sets it.
    pub dont_fragment: bool,
    /// The time to live.
    pub hop_limit: u8,
    /// The address that the packet comes from.
    pub source: Ipv4Addr,
    /// The address that it is for.
    pub destination: Ipv4Addr,
}

/// The header of IPv6 (RFC 8200), without extension headers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Ipv6 {
    /// The traffic class: 6 bits of DSCP and 2 bits of ECN.
    pub traffic_class: u8,
    /// The flow label.
    pub flow_label: FlowLabel,
    /// The hop limit.
    pub hop_limit: u8,
    /// The address that the packet comes from.
    pub source: Ipv6Addr,
    /// The address that it is for.
    pub destination: Ipv6Addr,
}

/// The IP header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Ip {
    /// Version 4.
    V4(Ipv4),
    /// Version 6.
    V6(Ipv6),
}

impl Ip {
    /// Returns the GID of the sender.
    pub fn source_gid(&self) -> Gid {
        gid_of(match self {
            Self::V4(header) => IpAddr::V4(header.source),
            Self::V6(header) => IpAddr::V6(header.source),
        })
    }

    /// Returns the GID of the receiver.
    pub fn destination_gid(&self) -> Gid {
        gid_of(match self {
            Self::V4(header) => IpAddr::V4(header.destination),
            Self::V6(header) => IpAddr::V6(header.destination),
        })
    }

    /// Returns what the header says about congestion.
    pub const fn ecn(&self) -> Ecn {
        let traffic_class = match self {
            Self::V4(header) => header.traffic_class,
            Self::V6(header) => header.traffic_class,
        };
        match traffic_class & 3 {
            0 => Ecn::NotEct,
            1 => Ecn::Ect1,
            2 => Ecn::Ect0,
            _ => Ecn::Ce,
        }
    }

    /// Returns the bytes of the header.
    pub(crate) const fn len(&self) -> usize {
        match self {
            Self::V4(_) => size_of::<Wire4>(),
            Self::V6(_) => size_of::<Wire6>(),
        }
    }

    /// Returns the most bytes that can follow the header in one packet.
    pub(crate) fn max_payload(&self) -> usize {
        match self {
            Self::V4(_) => usize::from(u16::MAX) - size_of::<Wire4>(),
            Self::V6(_) => u16::MAX.into(),
        }
    }
}

/// The header of IPv4 on the wire.
#[derive(FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Wire4 {
    /// 4 bits of version, 4 bits of the header's length in words.
    version: u8,
    pub(crate) traffic_class: u8,
    /// The bytes of the packet, with this header.
    len: U16,
    pub(crate) identification: U16,
    /// A reserved bit, DF, MF, 13 bits of the offset of a fragment.
    fragment: U16,
    pub(crate) hop_limit: u8,
    protocol: u8,
    pub(crate) checksum: [u8; 2],
    source: [u8; 4],
    destination: [u8; 4],
}

/// The header of IPv6 on the wire.
#[derive(FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Wire6 {
    /// 4 bits of version, 8 bits of traffic class, 20 bits of flow label.
    pub(crate) version: U32,
    /// The bytes behind this header.
    len: U16,
    next_header: u8,
    pub(crate) hop_limit: u8,
    source: [u8; 16],
    destination: [u8; 16],
}

/// The number of UDP among protocols.
const UDP: u8 = 17;
/// The number of the extension header of IPv6 that fragments have.
const IPV6_FRAGMENT: u8 = 44;
/// Version 4, and five words of header.
const VERSION_4: u8 = 0x45;
const DONT_FRAGMENT: u16 = 1 << 14;
/// More fragments follow, or the offset of this one.
const FRAGMENT: u16 = 0x3fff;
const TRAFFIC_CLASS_SHIFT: u32 = 20;

/// Takes an IPv4 header from the beginning of `bytes`. What is left of `bytes` is what the packet
/// carries.
pub(crate) fn take_v4(bytes: &mut &[u8]) -> Result<Ip, Malformed> {
    let packet = *bytes;
    let wire: &Wire4 = take_wire(bytes).ok_or(Malformed::IpCutOff)?;
    if wire.version >> 4 != 4 {
        return Err(Malformed::IpVersion);
    }
    if wire.version != VERSION_4 {
        return Err(Malformed::IpHeaderLength);
    }
    let len = usize::from(wire.len.get());
    *bytes = packet.get(size_of::<Wire4>()..len).ok_or(Malformed::IpLength)?;
    let fragment = wire.fragment.get();
    if fragment & FRAGMENT != 0 {
        return Err(Malformed::Fragment);
    }
    if wire.protocol != UDP {
        return Err(Malformed::NotUdp);
    }
    if checksum(wire) != [0, 0] {
        return Err(Malformed::IpChecksum);
    }
    Ok(Ip::V4(Ipv4 {
        traffic_class: wire.traffic_class,
        identification: wire.identification.get(),
        dont_fragment: fragment & DONT_FRAGMENT != 0,
        hop_limit: wire.hop_limit,
        source: wire.source.into(),
        destination: wire.destination.into(),
    }))
}

/// Takes an IPv6 header from the beginning of `bytes`. What is left of `bytes` is what the packet
/// carries.
pub(crate) fn take_v6(bytes: &mut &[u8]) -> Result<Ip, Malformed> {
    let wire: &Wire6 = take_wire(bytes).ok_or(Malformed::IpCutOff)?;
    let version = wire.version.get();
    if version >> 28 != 6 {
        return Err(Malformed::IpVersion);
    }
    *bytes = bytes.get(..wire.len.get().into()).ok_or(Malformed::IpLength)?;
    match wire.next_header {
        UDP => {}
        IPV6_FRAGMENT => return Err(Malformed::Fragment),
        _ => return Err(Malformed::NotUdp),
    }
    let [_, _, class, _] = (version >> (TRAFFIC_CLASS_SHIFT - 8)).to_be_bytes();
    Ok(Ip::V6(Ipv6 {
        traffic_class: class,
        flow_label: FlowLabel(version & FlowLabel::MASK),
        hop_limit: wire.hop_limit,
        source: wire.source.into(),
        destination: wire.destination.into(),
    }))
}

impl Ip {
    /// Returns the header of packet `number` of a train that begins with this one: the identification of
    /// IPv4 counts up.
    pub(crate) fn numbered(self, number: usize) -> Self {
        match self {
            Self::V4(header) => {
                Self::V4(Ipv4 { identification: plus(header.identification, number), ..header })
            }
            Self::V6(_) => self,
        }
    }

    /// Returns the sum of the pseudo-header of a UDP packet of so many bytes (RFC 768, RFC 8200 8.1),
    /// which is part of its checksum.
    pub(crate) fn pseudo_sum(&self, len: usize) -> u16 {
        let addresses = match self {
            Self::V4(header) => sum(&header.source.octets()) + sum(&header.destination.octets()),
            Self::V6(header) => sum(&header.source.octets()) + sum(&header.destination.octets()),
        };
        let [.., b3, b2, b1, b0] = len.to_be_bytes();
        fold(addresses + u32::from(UDP) + sum(&[b3, b2, b1, b0]))
    }

    /// Writes the header of a packet that carries `payload` bytes to `writer`, which must
    /// have room. `payload` must be at most [`Ip::max_payload`].
    pub(crate) fn put(&self, writer: &mut Writer<'_>, payload: u16) {
        match self {
            Self::V4(header) => header.put(writer, payload),
            Self::V6(header) => header.put(writer, payload),
        }
    }
}

/// Returns an identification that counted up.
fn plus(identification: u16, number: usize) -> u16 {
    let [low, high, ..] = number.to_le_bytes();
    identification.wrapping_add(u16::from_le_bytes([low, high]))
}

impl Wire4 {
    /// Makes the header that of a packet of `total` bytes, `number` packets behind the one that it is
    /// of.
    pub(crate) fn number(&mut self, total: usize, number: usize) {
        self.len = u16::try_from(total).unwrap_or(u16::MAX).into();
        self.identification = plus(self.identification.get(), number).into();
        self.checksum = [0, 0];
        self.checksum = checksum(self);
    }
}

impl Wire6 {
    /// Makes the header that of a packet that carries so many bytes.
    pub(crate) fn set_len(&mut self, payload: usize) {
        self.len = u16::try_from(payload).unwrap_or(u16::MAX).into();
    }
}

impl Ipv4 {
    fn put(&self, writer: &mut Writer<'_>, payload: u16) {
        let mut wire = Wire4 {
            version: VERSION_4,
            traffic_class: self.traffic_class,
            len: (payload + 20).into(),
            identification: self.identification.into(),
            fragment: if self.dont_fragment { DONT_FRAGMENT } else { 0 }.into(),
            hop_limit: self.hop_limit,
            protocol: UDP,
            checksum: [0, 0],
            source: self.source.octets(),
            destination: self.destination.octets(),
        };
        wire.checksum = checksum(&wire);
        writer.put_wire(&wire);
    }
}

impl Ipv6 {
    fn put(&self, writer: &mut Writer<'_>, payload: u16) {
        let version =
            6 << 28 | u32::from(self.traffic_class) << TRAFFIC_CLASS_SHIFT | self.flow_label.get();
        let wire = Wire6 {
            version: version.into(),
            len: payload.into(),
            next_header: UDP,
            hop_limit: self.hop_limit,
            source: self.source.octets(),
            destination: self.destination.octets(),
        };
        writer.put_wire(&wire);
    }
}

/// Returns the checksum of a header (RFC 1071): 0 if the header has the right one, else the right one
/// if the header has 0 there.
fn checksum(wire: &Wire4) -> [u8; 2] {
    (!fold(sum(wire.as_bytes()))).to_be_bytes()
}

/// Returns the sum of the words of 16 bits that these bytes are, of which there are few.
fn sum(bytes: &[u8]) -> u32 {
    bytes.chunks_exact(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum()
}

/// Adds what a sum of few words has beyond 16 bits to its lowest bits (RFC 1071). It carries twice at
/// most.
fn fold(sum: u32) -> u16 {
    let folded = (sum >> 16) + (sum & 0xffff);
    let [.., high, low] = ((folded >> 16) + (folded & 0xffff)).to_be_bytes();
    u16::from_be_bytes([high, low])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn congestion_is_in_the_traffic_class() {
        let ip = |traffic_class| {
            Ip::V6(Ipv6 {
                traffic_class,
                flow_label: FlowLabel::default(),
                hop_limit: 64,
                source: Ipv6Addr::LOCALHOST,
                destination: Ipv6Addr::LOCALHOST,
            })
        };
        assert_eq!(
            [0x68, 0x69, 0x6a, 0x6b].map(|class| ip(class).ecn()),
            [Ecn::NotEct, Ecn::Ect1, Ecn::Ect0, Ecn::Ce]
        );
    }

    #[test]
    fn flow_label_has_20_bits() {
        assert_eq!(FlowLabel::new(0x10_0000), None);
        assert_eq!(FlowLabel::new(0xf_ffff).map(FlowLabel::get), Some(0xf_ffff));
    }
}
