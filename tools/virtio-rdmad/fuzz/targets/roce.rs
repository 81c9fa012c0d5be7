// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Frames of RoCE v2: bytes of the fuzzer, or a packet that has the right lengths, checksum and ICRC but
//! for some details.
//!
//! What must hold: a frame that is decoded is encoded to the same bytes again, except for the bits that
//! a receiver ignores; and these encoded bytes are decoded to the same packet.

#![no_main]

use fuzz::Program;
use libfuzzer_sys::fuzz_target;
use roce::{decode, encode, icrc, ExtendedHeader, Ip, Packet};

/// The bytes of an ICRC.
const ICRC: usize = 4;
/// Bits of the first byte.
const RAW: u8 = 1 << 7;
const TAG: u8 = 1 << 0;
const IPV6: u8 = 1 << 1;
/// What is behind the end of the IP packet.
const BEHIND: [u8; 3] = [0xaa; 3];

/// Where the headers of a frame begin.
struct Places {
    ip: usize,
    udp: usize,
    bth: usize,
}

impl Places {
    fn new(tag: bool, ipv6: bool) -> Self {
        let ip = if tag { 18 } else { 14 };
        let udp = ip + if ipv6 { 40 } else { 20 };
        Self { ip, udp, bth: udp + 8 }
    }
}

/// Returns a frame around bytes of the program, with the right lengths.
fn frame(kind: u8, program: &mut Program<'_>) -> Vec<u8> {
    let (tag, ipv6) = (kind & TAG != 0, kind & IPV6 != 0);
    let mut outer = vec![0x52; 12];
    if tag {
        outer.extend([0x81, 0, program.u8(), program.u8()]);
    }
    let (class, hop_limit) = (program.u8(), program.u8());
    let (source_port, checksum) = (program.array::<2>(), program.array::<2>());
    let transport = program.bytes(300).to_vec();
    let datagram = u16::try_from(8 + transport.len() + ICRC).expect("a short packet");
    if ipv6 {
        outer.extend([0x86, 0xdd, 0x60 | class >> 4, class << 4, 0, 0]);
        outer.extend(datagram.to_be_bytes());
        outer.extend([17, hop_limit]);
        outer.extend([0xfe; 32]);
    } else {
        outer.extend([0x08, 0, 0x45, class]);
        outer.extend((20 + datagram).to_be_bytes());
        outer.extend([0, 1, 0x40, 0, hop_limit, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]);
    }
    outer.extend(source_port);
    outer.extend(roce::PORT.to_be_bytes());
    outer.extend(datagram.to_be_bytes());
    outer.extend(checksum);
    [outer, transport, vec![0; ICRC]].concat()
}

/// Writes the right checksum and the right ICRC.
fn seal(places: &Places, ipv6: bool, frame: &mut [u8]) {
    if !ipv6 {
        frame[places.ip + 10..places.ip + 12].fill(0);
        let words = frame[places.ip..places.udp].chunks(2);
        let sum: u32 = words.map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
        let sum = (sum >> 16) + (sum & 0xffff);
        let sum = (sum >> 16) + (sum & 0xffff);
        frame[places.ip + 10..places.ip + 12].copy_from_slice(&(!sum).to_be_bytes()[2..]);
    }
    let (covered, place) = frame.split_at_mut(frame.len() - ICRC);
    if let Some(right) = icrc(&covered[places.ip..]) {
        place.copy_from_slice(&right);
    }
}

/// Returns the bits of a frame that a receiver ignores, without its ICRC.
fn ignored(packet: &Packet<'_>, len: usize) -> Vec<u8> {
    let headers = &packet.headers;
    let ipv6 = matches!(headers.ip, Ip::V6(_));
    let places = Places::new(headers.ethernet.vlan.is_some(), ipv6);
    let mut bits = vec![0; len - ICRC];
    if !ipv6 {
        // A flag is reserved. The checksum follows from it, and there are two ways to write 0.
        bits[places.ip + 6] = 0x80;
        bits[places.ip + 10..places.ip + 12].fill(0xff);
    }
    bits[places.udp + 6..places.bth].fill(0xff);
    bits[places.bth + 4] = 0x3f;
    bits[places.bth + 8] = 0x7f;
    let mut at = places.bth + 12;
    for header in headers.bth.opcode.extended_headers() {
        match header {
            ExtendedHeader::Xrceth => bits[at] = 0xff,
            ExtendedHeader::Deth => bits[at + 4] = 0xff,
            ExtendedHeader::Feth => bits[at..at + 4].copy_from_slice(&[0xff, 0xff, 0xff, 0xc0]),
            ExtendedHeader::CnpReserved => bits[at..at + header.len()].fill(0xff),
            _ => {}
        }
        at += header.len();
    }
    bits[at + packet.payload.len()..].fill(0xff);
    bits
}

fn check(frame: &[u8]) {
    let Ok(packet) = decode(frame) else { return };
    let mut again = vec![0xee; frame.len()];
    let len = encode(&packet.headers, packet.payload, &mut again).expect("it was a packet");
    let again = &again[..len];
    let same = decode(again).expect("it is a packet");
    assert_eq!((packet.headers, packet.payload), (same.headers, same.payload));

    let (body, icrc) = frame[..len].split_at(len - ICRC);
    for (at, ignored) in ignored(&packet, len).into_iter().enumerate() {
        assert_eq!(body[at] & !ignored, again[at] & !ignored, "byte {at}");
    }
    if body == &again[..len - ICRC] {
        assert_eq!(icrc, &again[len - ICRC..]);
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut program = Program::new(bytes);
    let kind = program.u8();
    if kind & RAW != 0 {
        return check(program.bytes(bytes.len()));
    }
    let mut patches = Program::new(program.bytes(10));
    let mut frame = frame(kind, &mut program);
    patches.patch(&mut frame);
    seal(&Places::new(kind & TAG != 0, kind & IPV6 != 0), kind & IPV6 != 0, &mut frame);
    check(&frame);
    frame.extend(BEHIND);
    check(&frame);
});
