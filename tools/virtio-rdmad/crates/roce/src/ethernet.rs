// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The Ethernet header, with or without a VLAN.

use std::net::IpAddr;

use zerocopy::big_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::gid::{ip_of, Gid};
use crate::wire::{take_wire, Writer};
use crate::Malformed;

/// A MAC address.
pub type Mac = [u8; 6];

/// Returns the MAC address of a multicast group. The address of an IPv4 group ends with 23 bits of that
/// (RFC 1112, 6.4), the address of an IPv6 group with 32 (RFC 2464, 7).
pub fn multicast_mac(group: &Gid) -> Mac {
    let [.., a, b, c, d] = *group;
    match ip_of(group) {
        IpAddr::V4(_) => [0x01, 0x00, 0x5e, b & 0x7f, c, d],
        IpAddr::V6(_) => [0x33, 0x33, a, b, c, d],
    }
}

/// The tag of a VLAN (IEEE 802.1Q): its number, and the priority of the frame.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct Vlan(u16);

impl Vlan {
    /// Makes a tag of its control information (TCI), 16 bits.
    pub const fn new(tci: u16) -> Self {
        Self(tci)
    }

    /// Returns the control information (TCI).
    pub const fn tci(self) -> u16 {
        self.0
    }

    /// Returns the number of the VLAN, 12 bits. 0 says that the tag has only a priority.
    pub const fn id(self) -> u16 {
        self.0 & 0x0fff
    }

    /// Returns the priority (PCP), from 0 to 7.
    pub const fn priority(self) -> u8 {
        (self.0 >> 13) as u8
    }
}

/// The Ethernet header (IEEE 802.3), whose type follows from the IP header.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Ethernet {
    /// The address that the frame is for.
    pub destination: Mac,
    /// The address that it comes from.
    pub source: Mac,
    /// The VLAN that it belongs to.
    pub vlan: Option<Vlan>,
}

/// The type of IPv4.
pub(crate) const IPV4: u16 = 0x0800;
/// The type of IPv6.
pub(crate) const IPV6: u16 = 0x86dd;
/// The type that says that a tag of a VLAN follows.
const TAG: u16 = 0x8100;

/// The header on the wire.
#[derive(FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
struct Wire {
    destination: Mac,
    source: Mac,
    kind: U16,
}

/// The bytes that a tag adds to the header.
#[derive(FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
struct TagWire {
    tci: U16,
    kind: U16,
}

impl Ethernet {
    /// Returns the number of the VLAN that the frame is in, if any. The number 0 tells of a priority alone
    /// (IEEE 802.1Q), except where the receiver has an interface for VLAN 0, as Linux may.
    pub fn vlan_id(&self) -> Option<u16> {
        self.vlan.map(Vlan::id)
    }

    /// Returns the bytes of the header.
    pub(crate) fn len(&self) -> usize {
        size_of::<Wire>() + self.vlan.map_or(0, |_| size_of::<TagWire>())
    }

    /// Takes a header from the beginning of `bytes`. Returns it and the type of what follows it.
    pub(crate) fn take(bytes: &mut &[u8]) -> Result<(Self, u16), Malformed> {
        let wire: &Wire = take_wire(bytes).ok_or(Malformed::EthernetCutOff)?;
        let mut header = Self { destination: wire.destination, source: wire.source, vlan: None };
        let kind = wire.kind.get();
        if kind != TAG {
            return Ok((header, kind));
        }
        let tag: &TagWire = take_wire(bytes).ok_or(Malformed::EthernetCutOff)?;
        header.vlan = Some(Vlan(tag.tci.get()));
        Ok((header, tag.kind.get()))
    }

    /// Writes the header to `writer`, which must have room.
    pub(crate) fn put(&self, writer: &mut Writer<'_>, kind: u16) {
        let first = if self.vlan.is_some() { TAG } else { kind };
        let wire = Wire { destination: self.destination, source: self.source, kind: first.into() };
        writer.put_wire(&wire);
        if let Some(vlan) = self.vlan {
            writer.put_wire(&TagWire { tci: vlan.0.into(), kind: kind.into() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tag_has_priority_and_number() {
        let vlan = Vlan::new(0x6123);
        assert_eq!((vlan.priority(), vlan.id(), vlan.tci()), (3, 0x123, 0x6123));
    }

    #[test]
    fn groups_have_macs() {
        let mac = |address: &str| multicast_mac(&crate::gid_of(address.parse().unwrap()));
        assert_eq!(mac("239.255.1.2"), [0x01, 0x00, 0x5e, 0x7f, 0x01, 0x02]);
        assert_eq!(mac("ff0e::12:3456:789a"), [0x33, 0x33, 0x34, 0x56, 0x78, 0x9a]);
    }
}
