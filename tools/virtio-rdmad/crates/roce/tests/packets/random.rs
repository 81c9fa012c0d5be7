// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Random packets are the same after they were encoded and decoded.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use roce::{
    decode, encode, encode_with, Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Ethernet,
    ExtendedHeader, ExtendedHeaders, Feth, FlowLabel, Headers, Ieth, ImmDt, Ip, Ipv4, Ipv6, Msn,
    Opcode, Psn, Qpn, Reth, SackEth, Syndrome, Unencodable, Vlan, Xrceth,
};

/// Room for every packet here.
const ROOM: usize = 8192;

fn qpn() -> impl Strategy<Value = Qpn> {
    (0..1_u32 << 24).prop_map(|number| Qpn::new(number).unwrap())
}

fn opcode() -> impl Strategy<Value = Opcode> {
    let all: Vec<Opcode> = (0..=255).filter_map(Opcode::from_byte).collect();
    select(all)
}

prop_compose! {
    fn ethernet()(destination: [u8; 6], source: [u8; 6], tci: Option<u16>) -> Ethernet {
        Ethernet { destination, source, vlan: tci.map(Vlan::new) }
    }
}

fn ip() -> impl Strategy<Value = Ip> {
    let v4 = any::<(u8, u16, bool, u8, [u8; 4], [u8; 4])>().prop_map(
        |(traffic_class, identification, dont_fragment, hop_limit, source, destination)| {
            Ip::V4(Ipv4 {
                traffic_class,
                identification,
                dont_fragment,
                hop_limit,
                source: source.into(),
                destination: destination.into(),
            })
        },
    );
    let v6 = (any::<(u8, u8, [u8; 16], [u8; 16])>(), 0..1_u32 << 20).prop_map(
        |((traffic_class, hop_limit, source, destination), label)| {
            Ip::V6(Ipv6 {
                traffic_class,
                flow_label: FlowLabel::new(label).unwrap(),
                hop_limit,
                source: source.into(),
                destination: destination.into(),
            })
        },
    );
    prop_oneof![v4, v6]
}

prop_compose! {
    fn bth()(
        opcode in opcode(),
        bits: [bool; 5],
        pkey: u16,
        dest_qp in qpn(),
        psn: u32,
    ) -> Bth {
        let [solicited_event, migrated, fecn, becn, ack_request] = bits;
        let psn = Psn::new(psn);
        Bth {
            opcode,
            solicited_event,
            migrated,
            pkey,
            fecn,
            becn,
            dest_qp,
            ack_request,
            psn,
        }
    }
}

prop_compose! {
    /// All headers, of which a packet gets those of its opcode.
    fn all_headers()(
        srq in qpn(),
        source_qp in qpn(),
        flush in (0..16_u8, 0..4_u8),
        words: [u32; 5],
        longs: [u64; 5],
        syndrome: u8,
    ) -> ExtendedHeaders {
        let [qkey, rkey, dma_len, msn, data] = words;
        let [va, atomic_va, swap_add, compare, original] = longs;
        ExtendedHeaders {
            xrceth: Some(Xrceth { srq }),
            deth: Some(Deth { qkey, source_qp }),
            feth: Feth::new(flush.0, flush.1),
            reth: Some(Reth { va, rkey, dma_len }),
            atomic_eth: Some(AtomicEth { va: atomic_va, rkey, swap_add, compare }),
            aeth: Some(Aeth { syndrome: Syndrome::from_byte(syndrome), msn: Msn::new(msn) }),
            atomic_ack_eth: Some(AtomicAckEth { original }),
            imm_dt: Some(ImmDt(data.to_be_bytes())),
            ieth: Some(Ieth { rkey: data }),
            sack_eth: Some(SackEth { held: [va, swap_add, compare, original] }),
        }
    }
}

/// Returns those of the headers that the opcode has.
fn only(all: &ExtendedHeaders, opcode: Opcode) -> ExtendedHeaders {
    let mut some = ExtendedHeaders::default();
    for header in opcode.extended_headers() {
        match header {
            ExtendedHeader::Xrceth => some.xrceth = all.xrceth,
            ExtendedHeader::Deth => some.deth = all.deth,
            ExtendedHeader::Feth => some.feth = all.feth,
            ExtendedHeader::Reth => some.reth = all.reth,
            ExtendedHeader::AtomicEth => some.atomic_eth = all.atomic_eth,
            ExtendedHeader::Aeth => some.aeth = all.aeth,
            ExtendedHeader::AtomicAckEth => some.atomic_ack_eth = all.atomic_ack_eth,
            ExtendedHeader::ImmDt => some.imm_dt = all.imm_dt,
            ExtendedHeader::Ieth => some.ieth = all.ieth,
            ExtendedHeader::SackEth => some.sack_eth = all.sack_eth,
            ExtendedHeader::CnpReserved => {}
        }
    }
    some
}

prop_compose! {
    fn headers()(
        ethernet in ethernet(),
        ip in ip(),
        source_port: u16,
        bth in bth(),
        all in all_headers(),
    ) -> Headers {
        Headers { ethernet, ip, source_port, bth, extended: only(&all, bth.opcode) }
    }
}

prop_compose! {
    fn packet()(
        headers in headers(),
        payload in prop_oneof![vec(any::<u8>(), 0..20), vec(any::<u8>(), 4090..4100)],
    ) -> (Headers, Vec<u8>) {
        let carries = headers.bth.opcode.may_carry_payload();
        (headers, if carries { payload } else { Vec::new() })
    }
}

fn frame(headers: &Headers, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0xee; ROOM];
    let len = encode(headers, payload, &mut frame).unwrap();
    frame.truncate(len);
    frame
}

proptest! {
    #[test]
    fn packet_is_the_same_there_and_back((headers, payload) in packet(), behind in 0..50_usize) {
        let mut frame = frame(&headers, &payload);
        let transport: usize =
            headers.bth.opcode.extended_headers().iter().map(|header| header.len()).sum();
        let ip = if headers.ethernet.vlan.is_some() { 18 } else { 14 };
        let udp = ip + if matches!(headers.ip, Ip::V4(_)) { 20 } else { 40 };
        let len = udp + 8 + 12 + transport + payload.len().next_multiple_of(4) + 4;
        prop_assert_eq!(frame.len(), len);
        // What Ethernet fills a short frame with is ignored.
        frame.resize(len + behind, 0xaa);
        let decoded = decode(&frame).unwrap();
        prop_assert_eq!(decoded.headers, headers);
        prop_assert_eq!(decoded.payload, payload);
        let mut grh = [0; 40];
        grh[40 - (udp - ip)..].copy_from_slice(&frame[ip..udp]);
        prop_assert_eq!(decoded.grh(), grh);
    }

    #[test]
    fn payload_may_be_written_in_place((headers, payload) in packet()) {
        let mut in_place = vec![0; ROOM];
        let len = encode_with(&headers, payload.len(), &mut in_place, |place| {
            for (to, from) in place.iter_mut().zip(&payload) {
                *to = *from;
            }
        });
        prop_assert_eq!(&in_place[..len.unwrap()], frame(&headers, &payload));
    }

    #[test]
    fn packet_that_is_cut_off_is_refused((headers, payload) in packet(), at: prop::sample::Index) {
        let frame = frame(&headers, &payload);
        prop_assert!(decode(&frame[..at.index(frame.len())]).is_err());
    }

    /// A changed bit is noticed, or lies where routers may change it.
    #[test]
    fn changed_bit_is_noticed((headers, payload) in packet(), at: prop::sample::Index) {
        let mut frame = frame(&headers, &payload);
        let bit = at.index(frame.len() * 8);
        frame[bit / 8] ^= 1 << (bit % 8);
        if decode(&frame).is_ok() {
            let ip = if headers.ethernet.vlan.is_some() { 18 } else { 14 };
            let (changeable, udp) = match headers.ip {
                // The checksum of IPv4 covers all of its header.
                Ip::V4(_) => (vec![], ip + 20),
                Ip::V6(_) => (vec![ip, ip + 1, ip + 2, ip + 3, ip + 7], ip + 40),
            };
            let byte = bit / 8;
            prop_assert!(
                byte < ip || changeable.contains(&byte) || [6, 7, 12].map(|at| udp + at).contains(&byte),
                "byte {} of {}", byte, frame.len()
            );
        }
    }

    #[test]
    fn headers_that_do_not_belong_to_the_opcode_are_refused(headers in headers(), all in all_headers()) {
        let mut frame = vec![0; ROOM];
        let wanted = headers.bth.opcode.extended_headers();
        let too_many = Headers { extended: all, ..headers };
        let refused = matches!(encode(&too_many, &[], &mut frame), Err(Unencodable::HeaderUnexpected(_)));
        prop_assert!(refused);
        let none = Headers { extended: ExtendedHeaders::default(), ..headers };
        let result = encode(&none, &[], &mut frame);
        match wanted.first() {
            None | Some(ExtendedHeader::CnpReserved) => prop_assert!(result.is_ok()),
            Some(first) => prop_assert_eq!(result, Err(Unencodable::HeaderMissing(*first))),
        }
    }

    #[test]
    fn room_and_length_are_checked((headers, payload) in packet()) {
        let needed = frame(&headers, &payload).len();
        let mut small = vec![0; needed - 1];
        prop_assert_eq!(
            encode(&headers, &payload, &mut small),
            Err(Unencodable::NoRoom { needed, room: needed - 1 })
        );
        for payload in [0x1_0000, usize::MAX - 2, usize::MAX] {
            let result = encode_with(&headers, payload, &mut small, |_| unreachable!());
            let expected = if headers.bth.opcode.may_carry_payload() {
                Unencodable::PayloadTooLong { payload }
            } else {
                Unencodable::PayloadUnexpected
            };
            prop_assert_eq!(result, Err(expected));
        }
    }

    #[test]
    fn bytes_never_panic(bytes in vec(any::<u8>(), 0..200)) {
        let _ = decode(&bytes);
        let _ = roce::icrc(&bytes);
    }
}
