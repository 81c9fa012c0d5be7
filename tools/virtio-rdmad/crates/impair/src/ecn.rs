// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The mark of congestion in the header of IP (RFC 3168, 5), which ICRC does not cover.

/// The offset of the EtherType, which names what follows it, in a frame, and the bytes of the tag of a VLAN.
const ETHERTYPE: usize = 12;
const TAG: usize = 4;
/// The EtherType of such a tag (IEEE 802.1Q).
const VLAN: [u8; 2] = [0x81, 0x00];
/// The offset of the checksum in the header of IPv4, in words of 16 bits.
const CHECKSUM: usize = 5;
/// The bits of ECN, and with all of them the value CE, congestion experienced.
const CE: u16 = 3;

/// Marks a packet of RoCE v2, if its sender reacts to congestion and it has no mark. Returns whether it did. The
/// checksum of IPv4 stays as right as it was.
pub fn mark(frame: &mut [u8]) -> bool {
    let is_tagged = frame.get(ETHERTYPE..ETHERTYPE + 2) == Some(&VLAN);
    let ip = ETHERTYPE + 2 + if is_tagged { TAG } else { 0 };
    let Some(header) = frame.get_mut(ip..) else { return false };
    let Some(first) = word(header, 0) else { return false };
    // The traffic class has the bits 7 to 0 of the first word with IPv4, and 11 to 4 with IPv6.
    let is_ipv4 = first >> 12 == 4;
    let ce = if is_ipv4 { CE } else { CE << 4 };
    if first & ce == 0 || first & ce == ce {
        return false;
    }
    let marked = first | ce;
    if is_ipv4 {
        let Some(checksum) = word(header, CHECKSUM) else { return false };
        put(header, CHECKSUM, updated(checksum, first, marked));
    }
    put(header, 0, marked);
    true
}

/// Returns the checksum of a header of which one word has become another one (RFC 1624, equation 3).
fn updated(checksum: u16, from: u16, to: u16) -> u16 {
    let sum = u32::from(!checksum) + u32::from(!from) + u32::from(to);
    let folded = (sum & 0xffff) + (sum >> 16);
    let folded = (folded & 0xffff) + (folded >> 16);
    !u16::try_from(folded).unwrap_or(0)
}

/// Returns a word of a header that may be cut off.
fn word(header: &[u8], number: usize) -> Option<u16> {
    header.get(2 * number..)?.first_chunk().copied().map(u16::from_be_bytes)
}

/// Changes a word of a header that has it.
fn put(header: &mut [u8], number: usize, word: u16) {
    header[2 * number..][..2].copy_from_slice(&word.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use roce::{
        Bth, Ecn, Ethernet, ExtendedHeaders, FlowLabel, Headers, Ip, Ipv4, Ipv6, Opcode, Psn, Qpn,
        Vlan,
    };

    use super::*;

    const VERSIONS: [fn(u8) -> Ip; 2] = [
        |traffic_class| {
            Ip::V4(Ipv4 {
                traffic_class,
                identification: 7,
                dont_fragment: true,
                hop_limit: 64,
                source: [10, 0, 0, 1].into(),
                destination: [10, 0, 0, 2].into(),
            })
        },
        |traffic_class| {
            Ip::V6(Ipv6 {
                source: "fd00::1".parse().unwrap(),
                destination: "fd00::2".parse().unwrap(),
                flow_label: FlowLabel::new(0xf_ffff).unwrap(),
                traffic_class,
                hop_limit: 64,
            })
        },
    ];

    /// Returns a frame with this header of IP.
    fn frame(ip: Ip, vlan: Option<Vlan>) -> Vec<u8> {
        let opcode = Opcode::from_byte(4).unwrap();
        let headers = Headers {
            ethernet: Ethernet { destination: [2; 6], source: [4; 6], vlan },
            ip,
            source_port: 0xc000,
            bth: Bth::new(opcode, Qpn::new(5).unwrap(), Psn::new(6)),
            extended: ExtendedHeaders::default(),
        };
        let mut frame = vec![0; 256];
        let len = roce::encode(&headers, &[0x5a; 100], &mut frame).unwrap();
        frame.truncate(len);
        frame
    }

    #[test]
    fn a_marked_packet_is_right_and_as_before_otherwise() {
        for version in VERSIONS {
            for vlan in [None, Some(Vlan::new(5))] {
                // The bits of DSCP lead to different checksums.
                for class in (0..=u8::MAX).filter(|class| matches!(class & 3, 1 | 2)) {
                    let mut marked = frame(version(class), vlan);
                    assert!(mark(&mut marked));
                    let headers = roce::decode(&marked).unwrap().headers;
                    assert_eq!((headers.ip, headers.ip.ecn()), (version(class | 3), Ecn::Ce));
                    assert_eq!(marked, frame(version(class | 3), vlan));
                }
            }
        }
    }

    #[test]
    fn a_packet_that_has_a_mark_or_whose_sender_does_not_react_stays() {
        for version in VERSIONS {
            for class in [0, 3, 0xfc, 0xff] {
                let before = frame(version(class), None);
                let mut after = before.clone();
                assert!(!mark(&mut after));
                assert_eq!(after, before);
            }
        }
    }

    #[test]
    fn what_is_left_of_a_packet_does_no_harm() {
        for version in VERSIONS {
            let whole = frame(version(2), Some(Vlan::new(5)));
            for len in 0..60 {
                mark(&mut whole[..len].to_vec());
            }
        }
    }
}
