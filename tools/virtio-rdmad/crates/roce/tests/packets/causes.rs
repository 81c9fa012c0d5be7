// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Every cause for which a frame is refused.

use roce::{
    decode, encode, icrc, Bth, Ethernet, ExtendedHeaders, Headers, Ip, Ipv4, Ipv6, Malformed,
    Opcode, Psn, Qpn,
};

/// Where the headers are in a frame here: there is no tag of a VLAN.
const IP: usize = 14;
const UDP_V4: usize = IP + 20;
const BTH_V4: usize = UDP_V4 + 8;
const UDP_V6: usize = IP + 40;

fn headers(opcode: u8, ip: Ip) -> Headers {
    let opcode = Opcode::from_byte(opcode).unwrap();
    Headers {
        ethernet: Ethernet::default(),
        ip,
        source_port: 0xc000,
        bth: Bth::new(opcode, Qpn::new(0x11).unwrap(), Psn::new(7)),
        extended: ExtendedHeaders::default(),
    }
}

fn v4() -> Ip {
    Ip::V4(Ipv4 {
        traffic_class: 0,
        identification: 1,
        dont_fragment: true,
        hop_limit: 64,
        source: [192, 0, 2, 1].into(),
        destination: [192, 0, 2, 2].into(),
    })
}

fn v6() -> Ip {
    Ip::V6(Ipv6 {
        traffic_class: 0,
        flow_label: roce::FlowLabel::default(),
        hop_limit: 64,
        source: [0xfe; 16].into(),
        destination: [0xfd; 16].into(),
    })
}

/// Returns a SEND ONLY of RC with 5 bytes.
fn frame(ip: Ip) -> Vec<u8> {
    let mut frame = vec![0; 200];
    let len = encode(&headers(0x04, ip), b"bytes", &mut frame).unwrap();
    frame.truncate(len);
    frame
}

/// Writes the right checksum into a frame with IPv4, and the right ICRC if it is long enough for one.
fn seal(frame: &mut [u8]) {
    frame[IP + 10..IP + 12].fill(0);
    let mut sum: u32 =
        frame[IP..UDP_V4].chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    frame[IP + 10..IP + 12].copy_from_slice(&(!sum).to_be_bytes()[2..]);
    let end = frame.len() - 4;
    if let Some(right) = icrc(&frame[IP..end]) {
        frame[end..].copy_from_slice(&right);
    }
}

/// Returns what is said of a frame with IPv4 that is right but for a change.
fn after(change: impl FnOnce(&mut Vec<u8>)) -> Result<(), Malformed> {
    let mut frame = frame(v4());
    change(&mut frame);
    seal(&mut frame);
    decode(&frame).map(|_| ())
}

/// Makes the frame longer or shorter, with the lengths that belong to it.
fn resize(frame: &mut Vec<u8>, len: usize) {
    frame.resize(len, 0);
    let bytes = |from: usize| u16::try_from(len - from).unwrap().to_be_bytes();
    frame[IP + 2..IP + 4].copy_from_slice(&bytes(IP));
    frame[UDP_V4 + 4..UDP_V4 + 6].copy_from_slice(&bytes(UDP_V4));
}

#[test]
fn unchanged_frame_is_right() {
    assert_eq!(after(|_| {}), Ok(()));
    assert_eq!(decode(&frame(v6())).unwrap().payload, b"bytes");
}

#[test]
fn ethernet_and_ip() {
    let cut = |ip, len: usize| decode(&frame(ip)[..len]).map(|_| ());
    assert_eq!(cut(v4(), 0), Err(Malformed::EthernetCutOff));
    assert_eq!(cut(v4(), 13), Err(Malformed::EthernetCutOff));
    let tagged =
        |kind| after(|frame| drop(frame.splice(12..12, [0x81, 0, 0, 5].into_iter().chain(kind))));
    assert_eq!(tagged([0x81, 0, 0, 6]), Err(Malformed::NotIp));
    assert_eq!(after(|frame| frame[12..14].copy_from_slice(&[0x08, 0x06])), Err(Malformed::NotIp));

    assert_eq!(cut(v4(), 33), Err(Malformed::IpCutOff));
    assert_eq!(cut(v6(), 53), Err(Malformed::IpCutOff));
    assert_eq!(after(|frame| frame[IP] = 0x65), Err(Malformed::IpVersion));
    let mut six = frame(v6());
    six[IP] = 0x45;
    assert_eq!(decode(&six).err(), Some(Malformed::IpVersion));
    assert_eq!(after(|frame| frame[IP] = 0x46), Err(Malformed::IpHeaderLength));
    assert_eq!(after(|frame| frame[IP] = 0x44), Err(Malformed::IpHeaderLength));
    assert_eq!(after(|frame| frame[IP + 3] += 1), Err(Malformed::IpLength));
    assert_eq!(after(|frame| frame[IP + 3] = 19), Err(Malformed::IpLength));
    assert_eq!(cut(v6(), 60), Err(Malformed::IpLength));
    assert_eq!(after(|frame| frame[IP + 6] |= 0x20), Err(Malformed::Fragment));
    assert_eq!(after(|frame| frame[IP + 7] = 1), Err(Malformed::Fragment));
    six[IP] = 0x60;
    six[IP + 6] = 44;
    assert_eq!(decode(&six).err(), Some(Malformed::Fragment));
    six[IP + 6] = 0;
    assert_eq!(decode(&six).err(), Some(Malformed::NotUdp));
    assert_eq!(after(|frame| frame[IP + 9] = 6), Err(Malformed::NotUdp));
    let mut four = frame(v4());
    four[IP + 10] ^= 1;
    assert_eq!(decode(&four).err(), Some(Malformed::IpChecksum));
}

#[test]
fn udp() {
    assert_eq!(after(|frame| frame[IP + 3] = 27), Err(Malformed::UdpCutOff));
    assert_eq!(after(|frame| frame[UDP_V4 + 3] ^= 1), Err(Malformed::NotRocePort));
    assert_eq!(after(|frame| frame[UDP_V4 + 5] -= 4), Err(Malformed::UdpLength));
    // A checksum is allowed, and not looked at.
    assert_eq!(after(|frame| frame[UDP_V4 + 6] = 0xab), Ok(()));
    let mut six = frame(v6());
    six[UDP_V6 + 7] = 0xab;
    assert!(decode(&six).is_ok());
}

#[test]
fn transport() {
    assert_eq!(after(|frame| resize(frame, BTH_V4 + 15)), Err(Malformed::BthCutOff));
    assert_eq!(after(|frame| resize(frame, BTH_V4 + 3)), Err(Malformed::BthCutOff));
    assert_eq!(after(|frame| frame[BTH_V4 + 1] |= 1), Err(Malformed::TransportVersion));
    for opcode in
        [0x15, 0x18, 0x1b, 0x1e, 0x1f, 0x2c, 0x3d, 0x44, 0x60, 0x66, 0x80, 0x82, 0xb5, 0xc0, 0xff]
    {
        assert_eq!(after(|frame| frame[BTH_V4] = opcode), Err(Malformed::UnknownOpcode));
    }
    // 8 bytes behind the BTH are fewer than a RETH has.
    assert_eq!(after(|frame| frame[BTH_V4] = 0x0a), Err(Malformed::ExtendedHeaderCutOff));
    assert_eq!(after(|frame| frame[BTH_V4] = 0x81), Err(Malformed::ExtendedHeaderCutOff));
    // 7 bytes with the pad.
    let len = frame(v4()).len();
    assert_eq!(after(|frame| resize(frame, len - 1)), Err(Malformed::PadCount));
    assert_eq!(after(|frame| resize(frame, BTH_V4 + 16)), Err(Malformed::PadCount));
    // An ACK with 4 bytes behind the AETH, one of them as payload.
    assert_eq!(after(|frame| frame[BTH_V4] = 0x11), Err(Malformed::UnexpectedPayload));
    let mut four = frame(v4());
    four[len - 1] ^= 1;
    assert_eq!(decode(&four).err(), Some(Malformed::Icrc));
}
