// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Packets of adapters, byte by byte as captures have them that others have published. An adapter calculates the ICRC in
//! hardware, so these show that the crate agrees with it.

use roce::{decode, encode, Ecn, Operation, Position, Service};

/// A CNP of a ConnectX-4 Lx, in the test of the layer RoCE of scapy (`test/contrib/roce.uts`). Its DSCP is 48, and its
/// UDP source port 0.
const CNP: &str = "e41d2dab2bc27cfe90643b32080045c2003c718c4000401191610a0011010a001201\
    000012b7002800008100ffff4000011800000000\
    0000000000000000000000000000000082fd002a";

/// A SEND on an unreliable connection whose MAC addresses are Mellanox's, in the same test.
const SEND: &str = "248a07a8fa22248a07a8fa22080045010040047840004011b4d5c0a80007c0a80007\
    c00012b7002caca22460ffff000000d300cf1710\
    4630818be28935d90e9a95505401be885e50000078f353f3";

fn bytes(digits: &str) -> Vec<u8> {
    let digits: Vec<u8> = digits.bytes().filter(u8::is_ascii_hexdigit).collect();
    let text = |pair: &[u8]| String::from_utf8(pair.to_vec()).unwrap();
    digits.chunks(2).map(|pair| u8::from_str_radix(&text(pair), 16).unwrap()).collect()
}

#[test]
fn a_cnp_of_an_adapter_is_read() {
    let frame = bytes(CNP);
    let packet = decode(&frame).unwrap();
    let bth = &packet.headers.bth;
    assert_eq!(bth.opcode.service(), Service::Cnp);
    assert_eq!((bth.dest_qp.get(), bth.psn.get()), (0x118, 0));
    assert!(bth.becn && !bth.fecn && !bth.migrated);
    assert_eq!(packet.headers.ip.ecn(), Ecn::Ect0);
    assert_eq!(packet.headers.source_port, 0);
    let mut again = vec![0; frame.len()];
    assert_eq!(encode(&packet.headers, packet.payload, &mut again), Ok(frame.len()));
    assert_eq!(again, frame);
}

#[test]
fn a_send_of_an_adapter_is_read() {
    let frame = bytes(SEND);
    let packet = decode(&frame).unwrap();
    let bth = &packet.headers.bth;
    assert_eq!(bth.opcode.service(), Service::Uc);
    assert_eq!((bth.opcode.operation(), bth.opcode.position()), (Operation::Send, Position::Only));
    assert_eq!((bth.dest_qp.get(), bth.psn.get()), (211, 13_571_856));
    assert!(bth.migrated && !bth.ack_request);
    assert_eq!(packet.payload.len(), 18);
}
