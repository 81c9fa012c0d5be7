// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The programs by which the kernel chooses what a socket gets: classic BPF programs (the kernel's
//! Documentation/networking/filter.rst). That of a packet socket lets some frames pass.
//!
//! It sees a frame without the tag of its VLAN, which the kernel keeps elsewhere.

use libc::sock_filter;

use crate::share::{self, Share};

/// EtherTypes of IPv4 and IPv6.
const IPV4: u32 = 0x0800;
const IPV6: u32 = 0x86dd;
/// The first byte of an IPv4 header without options.
const IPV4_PLAIN: u32 = 0x45;
/// Bits of the IPv4 header of a fragment: another one follows, or the place of this one.
const FRAGMENT: u32 = 0x3fff;
/// The number of UDP among the protocols of IP.
const UDP: u32 = 17;
/// The UDP port of RoCE v2.
const ROCE_V2: u32 = 4791;

/// The offsets of fields in a frame. The offsets of IPv4 are for a header without options, those of IPv6 for a header
/// without extensions.
const ETHERTYPE: u32 = 12;
const IPV4_START: u32 = 14;
const IPV4_FLAGS: u32 = 20;
const IPV4_PROTOCOL: u32 = 23;
const IPV4_PORT: u32 = 36;
const IPV6_PROTOCOL: u32 = 20;
const IPV6_PORT: u32 = 56;

/// The value that the program returns for a frame that is wanted: the most bytes of the frame.
const ALL: u32 = u32::MAX;

/// Most stations that a program can tell apart (`BPF_MAXINSNS`: 4096 instructions).
const MOST_STATIONS: usize = 512;

/// Makes the program that lets packets of RoCE v2 pass that are in a share: those to `stations` and to groups, or all
/// of them if it is not known to which stations, or if there are too many of these.
pub fn program(share: Share, stations: Option<&[[u8; 6]]>) -> Vec<sock_filter> {
    let mut program = roce_v2();
    if share != Share::ALL {
        program.extend(in_share(share));
    }
    match stations.filter(|stations| stations.len() <= MOST_STATIONS) {
        None => program.push(end(ALL)),
        Some(stations) => {
            // The lowest bit of the first byte: the address is that of a group.
            program.extend([load(libc::BPF_B, 0), test(libc::BPF_JSET, 1, 0, 1), end(ALL)]);
            program.extend(stations.iter().copied().flat_map(station));
            program.push(end(0));
        }
    }
    program
}

/// Makes the program that lets nothing pass.
pub fn nothing() -> Vec<sock_filter> {
    vec![end(0)]
}

/// Goes on behind itself with packets of RoCE v2 alone.
fn roce_v2() -> Vec<sock_filter> {
    let equal = |value, yes, no| test(libc::BPF_JEQ, value, yes, no);
    // Each test that fails jumps to the refusal behind the part of its version of IP.
    let ipv6 = [
        load(libc::BPF_B, IPV6_PROTOCOL),
        equal(UDP, 0, 2),
        load(libc::BPF_H, IPV6_PORT),
        equal(ROCE_V2, 10, 0),
        end(0),
    ];
    let ipv4 = [
        load(libc::BPF_B, IPV4_START),
        equal(IPV4_PLAIN, 0, 6),
        load(libc::BPF_B, IPV4_PROTOCOL),
        equal(UDP, 0, 4),
        load(libc::BPF_H, IPV4_FLAGS),
        test(libc::BPF_JSET, FRAGMENT, 2, 0),
        load(libc::BPF_H, IPV4_PORT),
        equal(ROCE_V2, 1, 0),
        end(0),
    ];
    let version = [load(libc::BPF_H, ETHERTYPE), equal(IPV4, 6, 0), equal(IPV6, 0, 4)];
    version.into_iter().chain(ipv6).chain(ipv4).collect()
}

/// Returns instructions that end the filter for a frame outside of a share. For all other frames the filter goes on
/// with the instruction behind these.
fn in_share(share: Share) -> [sock_filter; 4] {
    let (index, of) = share.numbers();
    [
        // The destination stands first in a frame.
        load(libc::BPF_B, share::PLACE),
        instruction(libc::BPF_ALU | libc::BPF_MOD | libc::BPF_K, of, 0, 0),
        test(libc::BPF_JEQ, index, 1, 0),
        end(0),
    ]
}

/// Lets frames to a station pass, and goes on behind itself with the others.
fn station(mac: [u8; 6]) -> [sock_filter; 5] {
    let [a, b, rest @ ..] = mac;
    [
        load(libc::BPF_W, 2),
        test(libc::BPF_JEQ, u32::from_be_bytes(rest), 0, 3),
        load(libc::BPF_H, 0),
        test(libc::BPF_JEQ, u16::from_be_bytes([a, b]).into(), 0, 1),
        end(ALL),
    ]
}

/// Loads so many bytes of the frame from a place on. A frame that does not have them is refused.
fn load(size: u32, place: u32) -> sock_filter {
    instruction(libc::BPF_LD | libc::BPF_ABS | size, place, 0, 0)
}

/// Tests what was loaded, and skips so many instructions.
fn test(kind: u32, value: u32, yes: u8, no: u8) -> sock_filter {
    instruction(libc::BPF_JMP | libc::BPF_K | kind, value, yes, no)
}

/// Ends with so many bytes of the frame; 0: it is refused.
fn end(bytes: u32) -> sock_filter {
    instruction(libc::BPF_RET | libc::BPF_K, bytes, 0, 0)
}

fn instruction(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    // All codes of classic BPF have one byte.
    sock_filter { code: u16::try_from(code).unwrap_or(0), jt, jf, k }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::num::NonZeroU8;
    use std::os::unix::net::UnixDatagram;

    use super::*;
    use crate::packet_socket::attach;

    const STATIONS: [[u8; 6]; 2] = [[0x52, 0x54, 0, 0, 0, 1], [0x52, 0x55, 0, 0, 0, 2]];
    const GROUP: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
    const OTHER: [u8; 6] = [0x52, 0x54, 0, 0, 0, 2];

    /// The kernel, with a program. The sockets of each family run it in the same way.
    struct Kernel {
        near: UnixDatagram,
        far: UnixDatagram,
    }

    impl Kernel {
        fn new(stations: Option<&[[u8; 6]]>) -> Self {
            Self::with_share(Share::ALL, stations)
        }

        fn with_share(share: Share, stations: Option<&[[u8; 6]]>) -> Self {
            let (near, far) = UnixDatagram::pair().unwrap();
            far.set_nonblocking(true).unwrap();
            attach(&far, &program(share, stations)).unwrap();
            Self { near, far }
        }

        /// Returns whether the program lets all of a frame pass.
        fn passes(&self, frame: &[u8]) -> bool {
            self.near.send(frame).unwrap();
            let mut room = [0; 200];
            match self.far.recv(&mut room) {
                Ok(len) => room[..len] == *frame,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    false
                }
            }
        }
    }

    /// Returns the shortest packets of RoCE v2 to a station.
    fn packets(to: [u8; 6]) -> [Vec<u8>; 2] {
        let udp = [0xc0, 1, 0x12, 0xb7, 0, 24, 0, 0];
        let ipv4 = [0x45, 0, 0, 44, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        let ipv6 = [0x60, 0, 0, 0, 0, 24, 17, 64];
        let behind = [&udp[..], &[7; 16]].concat();
        [
            [&to[..], &[2; 6], &[0x08, 0x00], &ipv4, &behind].concat(),
            [&to[..], &[2; 6], &[0x86, 0xdd], &ipv6, &[0xfd; 32], &behind].concat(),
        ]
    }

    #[test]
    fn packets_of_roce_v2_pass() {
        let (chosen, all) = (Kernel::new(Some(&STATIONS)), Kernel::new(None));
        for to in [STATIONS[0], STATIONS[1], GROUP] {
            for packet in packets(to) {
                assert!(chosen.passes(&packet) && all.passes(&packet), "{packet:x?}");
            }
        }
        for packet in packets(OTHER) {
            assert!(!chosen.passes(&packet) && all.passes(&packet), "{packet:x?}");
        }
    }

    #[test]
    fn a_packet_passes_in_its_share() {
        let addresses = || (0..=u8::MAX).map(|last| [0x52, 0x54, 0, 0, 0, last]);
        let stations: Vec<_> = addresses().collect();
        for of in [1, 2, 3, 8].map(|of| NonZeroU8::new(of).unwrap()) {
            for share in Share::divide(of) {
                for stations in [None, Some(&stations[..])] {
                    let kernel = Kernel::with_share(share, stations);
                    for to in addresses().chain([GROUP, [0xff; 6]]) {
                        for packet in packets(to) {
                            assert_eq!(kernel.passes(&packet), share.has(to), "{share:?}, {to:x?}");
                        }
                    }
                }
                assert!(!Kernel::with_share(share, Some(&STATIONS)).passes(&packets(OTHER)[0]));
            }
        }
    }

    #[test]
    fn other_frames_do_not_pass() {
        let kernel = Kernel::new(None);
        let [ipv4, ipv6] = packets(STATIONS[0]);
        // The EtherType, UDP, the port; for IPv4 its options, and the place of a fragment.
        for (packet, places) in [(&ipv4, &[12, 13, 14, 21, 23, 36, 37][..]), (&ipv6, &[12, 20, 56])]
        {
            for place in places {
                let mut other = packet.clone();
                other[*place] += 1;
                assert!(!kernel.passes(&other), "{place}");
            }
        }
        let mut first_fragment = ipv4.clone();
        first_fragment[20] |= 0x20;
        assert!(!kernel.passes(&first_fragment));
        for packet in [ipv4, ipv6] {
            // Up to the port.
            let enough = if packet[12] == 8 { 38 } else { 58 };
            for len in 0..packet.len() {
                assert_eq!(kernel.passes(&packet[..len]), len >= enough, "{len}");
            }
        }
    }

    #[test]
    fn with_too_many_stations_all_pass() {
        let stations = |count: usize| vec![STATIONS[0]; count];
        let [packet, _] = packets(OTHER);
        assert!(!Kernel::new(Some(&stations(MOST_STATIONS))).passes(&packet));
        assert!(Kernel::new(Some(&stations(MOST_STATIONS + 1))).passes(&packet));
    }
}
