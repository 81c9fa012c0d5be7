// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Packets that come out of a VXLAN tunnel: bytes of the fuzzer, or packets that are right but for some
//! details, from several hosts and over some time.
//!
//! What must hold:
//! - A packet that is decoded has the flag and the bytes of its network where RFC 7348 draws them, and its
//!   frame is what stands behind the header.
//! - A frame that leaves the tunnel has the mark of congestion that RFC 6040 wants, or is dropped where
//!   that says so. Nothing else of it changes but the checksum of IPv4, which stays right.
//! - The table of stations keeps its bound, and finds what it has learnt until that is old.

#![no_main]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fuzz::Program;
use libfuzzer_sys::fuzz_target;
use network::forwarding::{Learnt, Mac, Table};
use network::vxlan::congestion::{self, Ecn};

/// Most stations that the table may know, and how long it knows them.
const MOST: usize = 4;
const AGEING_TIME: Duration = Duration::from_secs(300);
/// Bits of an operation: all bytes are the program's; what the frame has.
const RAW: u8 = 1 << 7;
const TAG: u8 = 1 << 0;
const IPV6: u8 = 1 << 1;
const NO_IP: u8 = 1 << 2;
/// The marks, by their bits.
const MARKS: [Ecn; 4] = [Ecn::NotEct, Ecn::Ect1, Ecn::Ect0, Ecn::Ce];

/// Returns a packet that is right but for what the program changes.
fn packet(operation: u8, program: &mut Program<'_>) -> Vec<u8> {
    let [high, middle, low] = program.array();
    let mut packet = vec![8, 0, 0, 0, high, middle, low, 0];
    // Few stations, so that they are met again. The lowest bit of the first byte says that it is a group.
    packet.extend([0x52, 0x54, 0, 0, 0, program.u8() & 7]);
    packet.extend([0x52 | program.u8() >> 7, 0x54, 0, 0, 0, program.u8() & 7]);
    if operation & TAG != 0 {
        packet.extend([0x81, 0, 0x60, 5]);
    }
    let class = program.u8();
    if operation & NO_IP != 0 {
        packet.extend([0x08, 0x06]);
    } else if operation & IPV6 != 0 {
        packet.extend([0x86, 0xdd, 0x60 | class >> 4, class << 4]);
        packet.extend([7; 38]);
    } else {
        packet.extend([0x08, 0x00]);
        let mut header = [7; 20];
        (header[0], header[1]) = (0x45, class);
        header[10..12].fill(0);
        let sum = !sum(&header);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        packet.extend(header);
    }
    packet.extend(program.bytes(40));
    program.patch(&mut packet);
    packet
}

/// Returns the sum of words that checksums are made of (RFC 1071). It is all ones where a checksum is
/// right.
fn sum(header: &[u8]) -> u16 {
    header.chunks(2).fold(0_u16, |sum, word| {
        let (sum, carry) = sum.overflowing_add(u16::from_be_bytes([word[0], word[1]]));
        sum + u16::from(carry)
    })
}

/// Returns where the IP header of a frame is, and whether it is that of IPv4.
fn ip(frame: &[u8]) -> Option<(usize, bool)> {
    let start = if frame.get(12..14)? == [0x81, 0x00] { 18 } else { 14 };
    match (frame.get(start - 2..start)?, frame.get(start)? >> 4) {
        ([0x08, 0x00], 4) if frame.len() >= start + 20 => Some((start, true)),
        ([0x86, 0xdd], 6) if frame.len() >= start + 40 => Some((start, false)),
        _ => None,
    }
}

/// Returns the mark that a frame has.
fn mark(frame: &[u8]) -> Ecn {
    match ip(frame) {
        Some((start, true)) => MARKS[usize::from(frame[start + 1] & 3)],
        Some((start, false)) => MARKS[usize::from(frame[start + 1] >> 4 & 3)],
        None => Ecn::NotEct,
    }
}

/// Returns the mark that a frame is to have, by its own and that of the packet around it; `None`: it is to
/// be dropped (RFC 6040, figure 4).
fn wanted(inner: Ecn, outer: Ecn) -> Option<Ecn> {
    match (inner, outer) {
        (Ecn::NotEct, Ecn::Ce) => None,
        (Ecn::NotEct, _) => Some(Ecn::NotEct),
        (_, Ecn::Ce) => Some(Ecn::Ce),
        (Ecn::Ect0, Ecn::Ect1) => Some(Ecn::Ect1),
        (inner, _) => Some(inner),
    }
}

/// Takes a frame out of the tunnel and checks what became of it.
fn leave(frame: &mut [u8], outer: Ecn) {
    let (before, inner) = (frame.to_vec(), mark(frame));
    assert_eq!(congestion::of(frame), inner);
    let wanted = if ip(frame).is_some() { wanted(inner, outer) } else { Some(inner) };
    let left = congestion::leave(frame, outer);
    assert_eq!(left.is_ok().then(|| mark(frame)), wanted);
    let Some((start, is_ipv4)) = ip(&before).filter(|_| mark(frame) != inner) else {
        return assert!(*frame == before);
    };
    let mut places = vec![start + 1];
    if is_ipv4 {
        places.extend([start + 10, start + 11]);
        let is_right = |frame: &[u8]| sum(&frame[start..start + 20]) == 0xffff;
        assert!(!is_right(&before) || is_right(frame));
    }
    for (at, (byte, old)) in frame.iter().zip(&before).enumerate() {
        assert!(byte == old || places.contains(&at), "byte {at}");
    }
}

/// The table, and another one, without a bound, of what it has learnt.
struct Stations {
    table: Table<usize>,
    learnt: BTreeMap<Mac, (usize, Instant)>,
}

impl Stations {
    fn learn(&mut self, mac: Mac, remote: usize, now: Instant) {
        match self.table.learn(mac, remote, now) {
            Learnt::Yes => _ = self.learnt.insert(mac, (remote, now)),
            Learnt::Full => assert_eq!(self.table.len(), MOST),
            Learnt::Group => assert!(network::forwarding::is_group(mac)),
        }
        assert!(self.table.len() <= MOST);
        for (mac, (remote, seen)) in &self.learnt {
            let is_known = now - *seen < AGEING_TIME;
            assert_eq!(self.table.find(*mac, now), is_known.then_some(*remote));
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut program = Program::new(bytes);
    let mut stations = Stations { table: Table::new(MOST, AGEING_TIME), learnt: BTreeMap::new() };
    let mut now = Instant::now();
    while let Some(operation) = program.operation() {
        let (remote, outer) = (program.below(3), program.pick(&MARKS));
        now += Duration::from_secs(program.u8().into());
        let mut packet = if operation & RAW != 0 {
            program.bytes(usize::from(operation & !RAW)).to_vec()
        } else {
            packet(operation, &mut program)
        };
        let original = packet.clone();
        let Ok((vni, frame)) = network::vxlan::decode(&mut packet) else {
            assert!(original.len() < 22 || original[0] & 8 == 0);
            continue;
        };
        assert!(original[0] & 8 != 0 && *frame == original[8..]);
        assert_eq!(
            network::vxlan::header(vni),
            [8, 0, 0, 0, original[4], original[5], original[6], 0]
        );
        let (_, source) = network::forwarding::addresses(frame).expect("an Ethernet header");
        stations.learn(source, remote, now);
        leave(frame, outer);
    }
});
