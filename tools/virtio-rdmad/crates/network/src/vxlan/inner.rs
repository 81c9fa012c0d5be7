// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a tunnel looks at in the frames that it carries.

use std::hash::{DefaultHasher, Hasher};

/// A version of IP.
#[derive(Clone, Copy, Debug)]
pub enum Version {
    /// IPv4.
    Four,
    /// IPv6.
    Six,
}

/// The EtherType of IPv4 (IEEE 802).
pub const IPV4: [u8; 2] = [0x08, 0x00];
/// The EtherType of IPv6.
pub const IPV6: [u8; 2] = [0x86, 0xdd];
/// The EtherType of the tag of a VLAN.
const VLAN: [u8; 2] = [0x81, 0x00];

/// The protocols of IP that have ports in the first four bytes: TCP and UDP.
const WITH_PORTS: [u8; 2] = [6, 17];

/// Returns where the header of an IP packet is in a frame, if the frame has all of that header without
/// options and extensions. The frame has one tag of a VLAN at most.
pub fn ip(frame: &[u8]) -> Option<(Version, usize)> {
    let kind = |at: usize| frame.get(at..)?.first_chunk::<2>();
    let (kind, at) = match *kind(12)? {
        VLAN => (*kind(16)?, 18),
        untagged => (untagged, 14),
    };
    let version = frame.get(at)? >> 4;
    let has = |len: usize| frame.len() >= at + len;
    match kind {
        IPV4 if version == 4 && has(20) => Some((Version::Four, at)),
        IPV6 if version == 6 && has(40) => Some((Version::Six, at)),
        _ => None,
    }
}

/// Returns the traffic class of an IP packet in a frame: its DSCP, and two bits of congestion notification. It is 0 for
/// a frame without an IP packet.
pub fn traffic_class(frame: &[u8]) -> u8 {
    match ip(frame) {
        Some((Version::Four, at)) => frame[at + 1],
        Some((Version::Six, at)) => frame[at] << 4 | frame[at + 1] >> 4,
        None => 0,
    }
}

/// Returns a number that all frames of a flow have, and that the frames of another flow have by chance only (RFC 7348,
/// section 5). It is made of the MAC addresses; in a frame with an IP packet also of the addresses and the protocol;
/// and of the ports if each packet of the flow has them.
pub fn flow(frame: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(frame.get(..12).unwrap_or(frame));
    let (addresses, protocol, ports) = match ip(frame) {
        Some((Version::Four, at)) => {
            // The fragments of a packet have one path, and only the first of them has ports.
            let is_whole = frame[at] == 0x45 && matches!(frame[at + 6..at + 8], [0 | 0x40, 0]);
            (&frame[at + 12..at + 20], frame[at + 9], is_whole.then_some(at + 20))
        }
        Some((Version::Six, at)) => (&frame[at + 8..at + 40], frame[at + 6], Some(at + 40)),
        None => return hasher.finish(),
    };
    hasher.write(addresses);
    hasher.write_u8(protocol);
    let ports = ports.filter(|_| WITH_PORTS.contains(&protocol));
    hasher.write(ports.and_then(|at| frame.get(at..at + 4)).unwrap_or_default());
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns a frame with a UDP datagram.
    fn udp(version: u8, is_tagged: bool, source_port: u16) -> Vec<u8> {
        let mut frame = vec![0x52; 12];
        if is_tagged {
            frame.extend([0x81, 0x00, 0x60, 0x05]);
        }
        if version == 4 {
            frame.extend([0x08, 0x00, 0x45, 0xb9, 0, 0, 0, 1, 0x40, 0, 64, 17, 0, 0]);
            frame.extend([10, 0, 0, 1, 10, 0, 0, 2]);
        } else {
            frame.extend([0x86, 0xdd, 0x6b, 0x90, 0, 7, 0, 0, 17, 64]);
            frame.extend([0xfd; 32]);
        }
        frame.extend(source_port.to_be_bytes());
        frame.extend([0x12, 0xb7, 0, 0, 0, 0]);
        frame.extend([9; 20]);
        frame
    }

    const FORMS: [(u8, bool); 4] = [(4, false), (4, true), (6, false), (6, true)];

    #[test]
    fn the_traffic_class_is_found() {
        for (version, is_tagged) in FORMS {
            assert_eq!(traffic_class(&udp(version, is_tagged, 1)), 0xb9);
        }
        assert_eq!(traffic_class(&[0xff; 60]), 0);
    }

    #[test]
    fn packets_of_a_connection_are_one_flow() {
        for (version, is_tagged) in FORMS {
            let frame = udp(version, is_tagged, 0xc001);
            let mut other = frame.clone();
            // The identification of IPv4 or the length of IPv6, the hop limit or the flags, and the payload.
            let at = frame.len() - if version == 4 { 48 } else { 68 };
            other[at + 4..at + 6].fill(7);
            *other.last_mut().unwrap() = 7;
            assert_eq!(flow(&frame), flow(&other));
            assert_ne!(flow(&frame), flow(&udp(version, is_tagged, 0xc002)));
        }
    }

    #[test]
    fn connections_have_many_flows() {
        for (version, is_tagged) in FORMS {
            let of = |port: u16| flow(&udp(version, is_tagged, 0xc000 + port)) % 16;
            let mut counts = [0; 16];
            (0..1600).for_each(|port| counts[usize::try_from(of(port)).unwrap()] += 1);
            assert!(counts.iter().all(|count| (50..200).contains(count)), "{counts:?}");
        }
    }

    #[test]
    fn fragments_stay_together() {
        let mut first = udp(4, false, 1);
        // Another fragment follows; then one that is somewhere behind.
        first[14 + 6] = 0x20;
        let mut later = udp(4, false, 2);
        later[14 + 7] = 9;
        assert_eq!(flow(&first), flow(&later));
    }

    proptest! {
        #[test]
        fn no_frame_is_too_short_or_too_odd(
            frame in prop::collection::vec(prop::sample::select(vec![0, 8, 0x45, 0x60, 0x81, 0x86, 0xdd, 17]), 0..70),
        ) {
            let _ = (flow(&frame), traffic_class(&frame));
        }
    }
}
