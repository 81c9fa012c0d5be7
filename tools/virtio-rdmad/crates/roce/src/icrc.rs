// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The invariant CRC, which covers all of a packet that no router changes (IBA 7.8.1, A17).
//!
//! It is the CRC-32 of Ethernet over the packet from the IP header to the end of the pad. What routers
//! change counts as ones: traffic class, hop limit, checksums, the flow label of IPv6, and the byte of
//! the BTH with FECN and BECN. Eight bytes of ones stand in front, in place of the header of an
//! InfiniBand link.
//!
//! The identification and the flags of IPv4 are covered. Whoever leaves the IP header to a kernel must
//! know which identification that will write.

use crc32fast::Hasher;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::ip::{Wire4, Wire6};
use crate::{bth, udp};

/// The bytes of an ICRC.
pub(crate) const LEN: usize = 4;

/// The CRC of the eight bytes of ones in front. (The kernel's `rxe_icrc.c` has its complement,
/// 0xdebb20e3, because the CRC's register holds that.)
const PREFIX: u32 = 0x2144_df1c;

/// The offset of the checksum in a UDP header.
const UDP_CHECKSUM: usize = 6;
/// The offset of FECN, BECN and six reserved bits in a BTH.
const BTH_CONGESTION: usize = 4;

/// The bytes of a packet that are copied, to be masked: all headers of which a part does not count, and
/// short packets as a whole. A CRC of one piece is faster than that of several small ones, and one of
/// 128 bytes and more is made by carry-less multiplication.
const COPIED: usize = 256;

/// An IP header in which what routers change can be masked.
trait Mask: FromBytes + Immutable + IntoBytes + KnownLayout + Unaligned {
    fn mask(&mut self);
}

impl Mask for Wire4 {
    fn mask(&mut self) {
        self.traffic_class = 0xff;
        self.hop_limit = 0xff;
        self.checksum = [0xff, 0xff];
    }
}

impl Mask for Wire6 {
    fn mask(&mut self) {
        // Only the version stays.
        self.version = (self.version.get() | 0x0fff_ffff).into();
        self.hop_limit = 0xff;
    }
}

/// Returns the ICRC of a packet, as its bytes are on the wire. `packet` reaches from the IP header to
/// the end of the pad, and its lengths are those of the whole packet. Returns `None` if it is not IP, or
/// shorter than its headers up to the BTH.
pub fn icrc(packet: &[u8]) -> Option<[u8; LEN]> {
    match packet.first()? >> 4 {
        4 => of::<Wire4>(packet, |_| {}),
        6 => of::<Wire6>(packet, |_| {}),
        _ => None,
    }
}

/// Does the same as [`icrc`] for an IPv4 packet in which another identification will stand: that which
/// segmentation offload gives to each of the packets that it makes of one. Returns `None` if the packet
/// is not IPv4.
pub fn icrc_with_identification(packet: &[u8], identification: u16) -> Option<[u8; LEN]> {
    match packet.first()? >> 4 {
        4 => of::<Wire4>(packet, |header| header.identification = identification.into()),
        _ => None,
    }
}

/// Returns the ICRC of a packet with this IP header, after `change` has changed the header.
fn of<H: Mask>(packet: &[u8], change: impl FnOnce(&mut H)) -> Option<[u8; LEN]> {
    let (first, rest) = packet.split_at(packet.len().min(COPIED));
    let mut copy = [0; COPIED];
    let copy = &mut copy[..first.len()];
    copy.copy_from_slice(first);
    let (header, transport) = H::mut_from_prefix(copy).ok()?;
    let (transport, _) = transport.split_first_chunk_mut::<{ udp::LEN + bth::LEN }>()?;
    change(header);
    header.mask();
    transport[UDP_CHECKSUM..udp::LEN].fill(0xff);
    transport[udp::LEN + BTH_CONGESTION] = 0xff;

    let mut crc = Hasher::new_with_initial(PREFIX);
    crc.update(copy);
    crc.update(rest);
    Some(crc.finalize().to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_is_the_crc_of_ones() {
        assert_eq!(PREFIX, crc32fast::hash(&[0xff; 8]));
        assert_eq!(!PREFIX, 0xdebb_20e3);
    }

    #[test]
    fn packet_that_is_too_short_or_no_ip_has_none() {
        let mut packet = [0x40; 40];
        assert!(icrc(&packet).is_some());
        assert_eq!(icrc(&packet[..39]), None);
        assert_eq!(icrc(&[]), None);
        packet[0] = 0x60;
        assert_eq!(icrc(&packet), None);
        assert_eq!(icrc_with_identification(&packet, 1), None);
        packet[0] = 0x50;
        assert_eq!(icrc(&packet), None);
    }

    #[test]
    fn identification_is_covered() {
        let mut packet = [0x40; 44];
        let expected = icrc_with_identification(&packet, 0x1234);
        assert_ne!(icrc(&packet), expected);
        packet[4..6].copy_from_slice(&[0x12, 0x34]);
        assert_eq!(icrc(&packet), expected);
    }
}
