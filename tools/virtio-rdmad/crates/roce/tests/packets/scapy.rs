// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two frames that scapy made (`scapy.contrib.roce`). The host suite compares many more, of every opcode
//! (`test_roce.py`).

use roce::{
    decode, encode, Aeth, Bth, Credits, Ethernet, ExtendedHeaders, FlowLabel, Headers, Ip, Ipv4,
    Ipv6, Msn, Opcode, Psn, Qpn, Syndrome, Vlan,
};

/// A SEND ONLY of RC over IPv4, with 5 bytes and a pad of 3.
const SEND: &str = "\
    5254000000025254000000010800\
    456a0034123440004011a417c0000201c0000202\
    c12312b700200000\
    0470ffff0000001180123456\
    68656c6c6f000000\
    fde09a7a";

/// An ACK over IPv6, in VLAN 5.
const ACK: &str = "\
    525400000002525400000001\
    8100600586dd\
    66babcde001c113ffe800000000000000000000000000001fe800000000000000000000000000002\
    c12312b7001c0000\
    1140ffff0000001200ffffff\
    1f000007\
    0473868e";

const ETHERNET: Ethernet = Ethernet {
    destination: [0x52, 0x54, 0, 0, 0, 2],
    source: [0x52, 0x54, 0, 0, 0, 1],
    vlan: None,
};

fn bth(opcode: u8, dest_qp: u32, psn: u32) -> Bth {
    Bth::new(Opcode::from_byte(opcode).unwrap(), Qpn::new(dest_qp).unwrap(), Psn::new(psn))
}

fn check(hex: &str, headers: &Headers, payload: &[u8]) {
    let digits = hex.as_bytes().chunks(2);
    let frame: Vec<u8> = digits
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect();
    let packet = decode(&frame).unwrap();
    assert_eq!(&packet.headers, headers);
    assert_eq!(packet.payload, payload);
    let mut made = vec![0xee; 200];
    let len = encode(headers, payload, &mut made).unwrap();
    assert_eq!(made[..len], frame);
}

#[test]
fn send_over_ipv4() {
    let ip = Ip::V4(Ipv4 {
        traffic_class: 0x6a,
        identification: 0x1234,
        dont_fragment: true,
        hop_limit: 64,
        source: [192, 0, 2, 1].into(),
        destination: [192, 0, 2, 2].into(),
    });
    let bth = Bth { ack_request: true, ..bth(0x04, 0x11, 0x12_3456) };
    let extended = ExtendedHeaders::default();
    let headers = Headers { ethernet: ETHERNET, ip, source_port: 0xc123, bth, extended };
    check(SEND, &headers, b"hello");
}

#[test]
fn ack_over_ipv6_in_a_vlan() {
    let ip = Ip::V6(Ipv6 {
        traffic_class: 0x6b,
        flow_label: FlowLabel::new(0xa_bcde).unwrap(),
        hop_limit: 63,
        source: "fe80::1".parse().unwrap(),
        destination: "fe80::2".parse().unwrap(),
    });
    let ethernet = Ethernet { vlan: Some(Vlan::new(0x6005)), ..ETHERNET };
    let aeth = Aeth { syndrome: Syndrome::Ack(Credits::UNLIMITED), msn: Msn::new(7) };
    let extended = ExtendedHeaders { aeth: Some(aeth), ..ExtendedHeaders::default() };
    let bth = bth(0x11, 0x12, 0xff_ffff);
    check(ACK, &Headers { ethernet, ip, source_port: 0xc123, bth, extended }, &[]);
}
