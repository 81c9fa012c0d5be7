// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Trains are what the kernel's segmentation offload makes the same packets of as the encoder.

use proptest::prelude::*;
use roce::{
    decode, encode, Bth, Ethernet, ExtendedHeaders, FlowLabel, Headers, Ip, Ipv4, Ipv6, Opcode,
    Operation, Position, Psn, Qpn, Reth, Service, Split, Train, Vlan,
};

/// Room for every packet here.
const ROOM: usize = 8192;

fn ip(is_v4: bool, identification: u16) -> Ip {
    if is_v4 {
        return Ip::V4(Ipv4 {
            traffic_class: 2,
            identification,
            dont_fragment: true,
            hop_limit: 64,
            source: [10, 0, 0, 1].into(),
            destination: [10, 255, 0, 2].into(),
        });
    }
    Ip::V6(Ipv6 {
        traffic_class: 2,
        flow_label: FlowLabel::default(),
        hop_limit: 64,
        source: [0xfe; 16].into(),
        destination: [0xfd; 16].into(),
    })
}

/// Returns the headers of packet `index` of a WRITE of so many packets.
fn headers(ip: Ip, tci: Option<u16>, index: u32, count: u32) -> Headers {
    let position = match (index == 0, index + 1 == count) {
        (true, true) => Position::Only,
        (true, false) => Position::First,
        (false, true) => Position::Last,
        (false, false) => Position::Middle,
    };
    let reth = matches!(position, Position::First | Position::Only).then_some(Reth {
        va: 0x1234_5678_9abc,
        rkey: 7,
        dma_len: 9,
    });
    let opcode = Opcode::new(Service::Rc, Operation::Write, position).unwrap();
    Headers {
        ethernet: Ethernet { destination: [2; 6], source: [4; 6], vlan: tci.map(Vlan::new) },
        ip,
        source_port: 0xc001,
        bth: Bth::new(opcode, Qpn::new(5).unwrap(), Psn::new(0xff_fffe + index)),
        extended: ExtendedHeaders { reth, ..ExtendedHeaders::default() },
    }
}

/// Returns the payload of packet `index`.
fn bytes_of(index: u32, len: usize) -> Vec<u8> {
    let [seed, ..] = index.to_le_bytes();
    (0..=u8::MAX).cycle().take(len).map(|byte| byte.wrapping_mul(7).wrapping_add(seed)).collect()
}

fn word(value: usize) -> u16 {
    value.try_into().unwrap()
}

/// A train that was taken: the frame, the bytes of a segment, and where UDP is.
type Taken = (Vec<u8>, u16, u16);

fn take(train: &mut Train) -> Option<Taken> {
    let mut taken = None;
    train.take(|segments| taken = Some((segments.frame.to_vec(), segments.segment, segments.udp)));
    taken
}

/// Puts packets into trains; returns the trains, and the packets as the encoder makes them: the
/// identification counts up within a train.
fn make(ip: Ip, tci: Option<u16>, lens: &[usize]) -> (Vec<Taken>, Vec<Vec<u8>>) {
    let (mut train, mut trains, mut packets) = (Train::default(), Vec::new(), Vec::new());
    let mut number = 0;
    for (index, len) in (0..).zip(lens) {
        let headers = headers(ip, tci, index, lens.len().try_into().unwrap());
        let payload = bytes_of(index, *len);
        if !train.takes(&headers, *len) {
            trains.extend(take(&mut train));
            number = 0;
        }
        let fill = |place: &mut [u8]| {
            place.copy_from_slice(&payload);
            Ok::<(), ()>(())
        };
        train.push(&headers, *len, fill).unwrap().unwrap();
        let ip = match headers.ip {
            Ip::V4(v4) => {
                Ip::V4(Ipv4 { identification: v4.identification.wrapping_add(number), ..v4 })
            }
            v6 @ Ip::V6(_) => v6,
        };
        number += 1;
        let mut frame = vec![0; ROOM];
        let len = encode(&Headers { ip, ..headers }, &payload, &mut frame).unwrap();
        packets.push(frame[..len].to_vec());
    }
    trains.extend(take(&mut train));
    assert!(train.is_empty());
    (trains, packets)
}

/// Returns the sum of words of 16 bits, carried (RFC 1071).
fn sum(bytes: &[u8]) -> u16 {
    let mut sum = 0_u32;
    for word in bytes.chunks(2) {
        sum += u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0));
        sum = (sum >> 16) + (sum & 0xffff);
    }
    sum.try_into().unwrap()
}

/// Returns the sum that a right UDP checksum brings to 0xffff: of the pseudo-header and the datagram.
fn udp_sum(frame: &[u8], udp: usize) -> u16 {
    let addresses = if udp >= 54 { udp - 32 } else { udp - 8 };
    let len = word(frame.len() - udp);
    let mut bytes = frame[addresses..udp].to_vec();
    bytes.extend([0, 17]);
    bytes.extend(len.to_be_bytes());
    bytes.extend(&frame[udp..]);
    sum(&bytes)
}

/// Does what the kernel does (`inet_gso_segment()`, `ipv6_gso_segment()`, `__udp_gso_segment()`), step by
/// step as bytes.
fn segment(train: &Taken) -> Vec<Vec<u8>> {
    let (frame, segment, udp) = (&train.0, usize::from(train.1), usize::from(train.2));
    if segment == 0 {
        return vec![frame.clone()];
    }
    let is_v6 = udp >= 54;
    let ip = udp - if is_v6 { 40 } else { 20 };
    let whole = word(frame.len() - udp);
    assert_eq!(frame[udp + 4..udp + 6], whole.to_be_bytes(), "UDP length of the train");
    if is_v6 {
        assert_eq!(frame[ip + 4..ip + 6], whole.to_be_bytes(), "IPv6 length of the train");
    } else {
        assert_eq!(frame[ip + 2..ip + 4], (whole + 20).to_be_bytes(), "IPv4 length of the train");
        assert_eq!(sum(&frame[ip..udp]), 0xffff, "IPv4 checksum of the train");
    }
    // The checksum is that of the pseudo-header alone, to which that of the rest is added.
    let mut complete = frame.clone();
    let checksum = !sum(&frame[udp..]);
    complete[udp + 6..udp + 8].copy_from_slice(&checksum.to_be_bytes());
    assert_eq!(udp_sum(&complete, udp), 0xffff, "UDP checksum of the train");
    let base = u16::from_be_bytes([frame[ip + 4], frame[ip + 5]]);
    let segments = frame[udp + 8..].chunks(segment).enumerate();
    let one = |(index, bytes): (usize, &[u8])| {
        let mut packet = frame[..udp + 8].to_vec();
        packet.extend(bytes);
        let len = word(bytes.len() + 8);
        if is_v6 {
            packet[ip + 4..ip + 6].copy_from_slice(&len.to_be_bytes());
        } else {
            packet[ip + 2..ip + 4].copy_from_slice(&(len + 20).to_be_bytes());
            let identification = base.wrapping_add(word(index));
            packet[ip + 4..ip + 6].copy_from_slice(&identification.to_be_bytes());
            packet[ip + 10..ip + 12].fill(0);
            let checksum = !sum(&packet[ip..udp]);
            packet[ip + 10..ip + 12].copy_from_slice(&checksum.to_be_bytes());
        }
        packet[udp + 4..udp + 6].copy_from_slice(&len.to_be_bytes());
        // The encoder writes no UDP checksum.
        packet[udp + 6..udp + 8].fill(0);
        packet
    };
    segments.map(one).collect()
}

fn split(train: &Taken) -> Vec<Vec<u8>> {
    let mut frame = train.0.clone();
    let mut split = Split::new(&frame, train.1);
    let mut packets = Vec::new();
    while let Some(range) = split.next(&mut frame) {
        packets.push(frame[range].to_vec());
    }
    packets
}

proptest! {
    #[test]
    fn segments_of_a_train_are_what_the_encoder_makes(
        is_v4: bool,
        identification in prop_oneof![Just(0), any::<u16>()],
        tci: Option<u16>,
        mtu in prop::sample::select(vec![4_usize, 64, 256, 1024, 4096]),
        full in 0..150_usize,
        last in 0..4097_usize,
    ) {
        let ip = ip(is_v4, identification);
        let mut lens = vec![mtu; full];
        lens.push(last.min(mtu));
        let (trains, packets) = make(ip, tci, &lens);
        let segmented: Vec<Vec<u8>> = trains.iter().flat_map(segment).collect();
        prop_assert!(segmented == packets);
        let split: Vec<Vec<u8>> = trains.iter().flat_map(split).collect();
        prop_assert!(split == packets);
        for (index, packet) in (0..).zip(&packets) {
            let decoded = decode(packet).unwrap();
            prop_assert_eq!(decoded.headers.bth.psn, Psn::new(0xff_fffe + index));
            prop_assert!(decoded.payload == bytes_of(index, lens[index as usize]));
        }
        for (frame, ..) in &trains {
            prop_assert!(frame.len() < 1 << 16);
        }
        if full > 4 && mtu == 1024 {
            prop_assert!(trains.len() <= 3 + full / 60, "{} trains", trains.len());
        }
    }

    #[test]
    fn bytes_that_are_no_train_do_no_harm(
        mut bytes in prop::collection::vec(any::<u8>(), 0..300),
        segment: u16,
    ) {
        let mut split = Split::new(&bytes, segment);
        let mut packets = 0;
        while let Some(range) = split.next(&mut bytes) {
            let _ = decode(&bytes[range]);
            packets += 1;
        }
        prop_assert!(packets <= 1 + bytes.len() / 16);
    }

    /// Headers and lengths of a train are changed at random: what comes out is within the train, and no
    /// more packets than fit.
    #[test]
    fn a_train_that_was_changed_does_no_harm(
        is_v4: bool,
        at: prop::sample::Index,
        to: u8,
        segment in prop_oneof![Just(84_u16), any::<u16>()],
        cut in 0..100_usize,
    ) {
        let (mut trains, _) = make(ip(is_v4, 0), None, &[64; 20]);
        let (mut frame, ..) = trains.swap_remove(1);
        let at = at.index(60);
        frame[at] = to;
        frame.truncate(frame.len() - cut);
        let mut split = Split::new(&frame, segment);
        let mut packets = 0;
        while let Some(range) = split.next(&mut frame) {
            let _ = decode(&frame[range]);
            packets += 1;
        }
        prop_assert!(packets <= 1 + frame.len() / 16);
    }
}

#[test]
fn another_flow_is_not_taken() {
    let mut train = Train::default();
    let first = headers(ip(true, 0), None, 1, 3);
    let fill = |place: &mut [u8]| {
        place.fill(1);
        Ok::<(), ()>(())
    };
    train.push(&first, 64, fill).unwrap().unwrap();
    assert!(train.takes(&first, 64) && train.takes(&first, 60));
    assert!(!train.takes(&first, 68), "a longer packet");
    for other in [
        Headers { source_port: 0xc002, ..first },
        Headers { ip: ip(false, 0), ..first },
        Headers { ethernet: Ethernet { destination: [8; 6], ..first.ethernet }, ..first },
    ] {
        assert!(!train.takes(&other, 64));
    }
    train.push(&first, 60, fill).unwrap().unwrap();
    assert!(!train.takes(&first, 60), "behind a short packet");
}

#[test]
fn a_packet_that_is_not_filled_leaves_the_train_as_it_was() {
    let (whole, _) = make(ip(true, 0), None, &[64; 3]);
    let mut train = Train::default();
    let mut taken = Vec::new();
    for index in 0..3 {
        let headers = headers(ip(true, 0), None, index, 3);
        if !train.takes(&headers, 64) {
            taken.extend(take(&mut train));
        }
        let fails = |place: &mut [u8]| {
            place.fill(0xee);
            Err(())
        };
        assert_eq!(train.push(&headers, 64, fails), Ok(Err(())));
        let fill = |place: &mut [u8]| {
            place.copy_from_slice(&bytes_of(index, 64));
            Ok::<(), ()>(())
        };
        assert_eq!(train.push(&headers, 64, fill), Ok(Ok(())));
    }
    taken.extend(take(&mut train));
    assert!(taken == whole);
    assert!(take(&mut train).is_none());
}
