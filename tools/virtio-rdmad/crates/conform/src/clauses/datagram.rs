// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Datagrams, and the GSI.

use abi::*;
use testkit::command::{Gid, PAGE};

use crate::bench::{Bench, End, QKEY};
use crate::clauses::port::{add_gid, query_port};
use crate::outcome::Outcome;
use crate::test::family;

family! {
    datagram_arrives Ends []: "D-UD-01" "D-UD-02" "D-UD-18" "D-UD-22" "D-UD-25" "D-CQ-13"
        "D-CQ-15" "D-CQ-19" "D-WQE-30";
    datagram_with_imm Ends []: "D-CQ-16";
    header_of_ipv4 Ends []: "D-UD-24" "D-UD-04" "D-UD-05" "D-UD-06";
    header_of_ipv6 Ends []: "D-UD-23" "D-UD-04" "D-UD-06";
    longest_datagram Ends []: "D-UD-12" "D-UD-16" "D-UD-17";
    wrong_address_vectors One []: "D-UD-13" "D-UD-14" "D-UD-15" "D-UD-16";
    wrong_qkey Ends []: "D-UD-19" "D-UD-17" "D-UD-21" "D-PORT-04";
    own_qkey Ends []: "D-UD-03";
    no_receive Ends []: "D-UD-20" "D-UD-17";
    receive_without_room Ends []: "D-UD-20" "D-UD-21";
    nobody_there One []: "D-UD-17";
    gsi_carries_datagrams Ends []: "D-GSI-01" "D-RING-06";
    sender_is_not_told_of_a_bad_receive Ends []: "D-WQE-26" "D-WQE-23";
}

const AREA: u64 = 0x1000;
const HEADER: u32 = 40;
const SQE: u32 = VIRTIO_RDMA_QPS_SQE;
const OP_ERR: u32 = VIRTIO_RDMA_WC_LOC_QP_OP_ERR;
/// The hop limit of datagrams whose header is looked at.
const HOPS: u8 = 17;
/// The Q_Key of the GSI.
const GSI_QKEY: u32 = 0x8001_0000;

fn datagram_arrives(t: &mut Bench) -> Outcome {
    let (x, y) = t.datagrams()?;
    let sent = t.fill(&x, 0, 300);
    t.receive(&y, 1, AREA, 400)?;
    let send = t.datagram(&x, &y, 2, 0, 300);
    t.post(&x, &send)?;
    t.succeeds(&x, "D-WQE-30", 2)?;
    let cqe = t.succeeds(&y, "D-UD-18", 1)?;
    t.journal.is("D-CQ-13", "byte_len", cqe.byte_len, HEADER + 300)?;
    t.journal.pass("D-UD-25");
    let grh = cqe.wc_flags & VIRTIO_RDMA_WC_GRH;
    t.journal.is("D-CQ-15", "WC_GRH", grh, VIRTIO_RDMA_WC_GRH)?;
    t.journal.is("D-CQ-21", "WC_IP_CSUM_OK", cqe.wc_flags & VIRTIO_RDMA_WC_IP_CSUM_OK, 0)?;
    t.journal.is("D-CQ-19", "src_qp", cqe.src_qp, x.qpn)?;
    t.journal.is("D-CQ-19", "port_num", cqe.port_num, 1)?;
    t.journal.is("D-CQ-19", "sl", cqe.sl, 0)?;
    let got = t.bytes(&y, AREA + 40, 300);
    t.journal.same_bytes("D-UD-22", "payload", &got, &sent)?;
    t.journal.pass("D-UD-01");
    t.journal.pass("D-UD-02");
    let rest = t.bytes(&y, AREA + 340, 60);
    t.journal.same_bytes("D-TERM-26", "room behind the payload", &rest, &[0; 60])
}

fn datagram_with_imm(t: &mut Bench) -> Outcome {
    let (x, y) = t.datagrams()?;
    t.receive(&y, 1, AREA, 400)?;
    let mut send = t.datagram(&x, &y, 2, 0, 10).imm(0x1122_3344);
    send.opcode = VIRTIO_RDMA_WR_SEND_WITH_IMM;
    t.post(&x, &send)?;
    let cqe = t.succeeds(&y, "D-CQ-16", 1)?;
    let has = cqe.wc_flags & VIRTIO_RDMA_WC_WITH_IMM;
    t.journal.is("D-CQ-16", "WITH_IMM", has, VIRTIO_RDMA_WC_WITH_IMM)?;
    t.journal.is("D-CQ-16", "imm_data", cqe.ex, 0x1122_3344)
}

/// Returns the sum of the 16-bit words of a header, as RFC 1071 has it.
fn checksum(header: &[u8]) -> u16 {
    let words = header.chunks(2).map(|two| u32::from(u16::from_be_bytes([two[0], two[1]])));
    let mut sum: u32 = words.sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Sends a datagram of 10 bytes with a traffic class and a service level. Returns its area at the receiver.
fn area_of(t: &mut Bench, x: &End, y: &End, gid_index: u8, dgid: Gid) -> Outcome<Vec<u8>> {
    t.receive(y, 1, AREA, 400)?;
    let send = t.datagram(x, y, 2, 0, 10).ud(dgid, y.qpn, QKEY, x.pdn);
    let send = send.from(gid_index).at_mac([2, 0, 0, 0, 0, 1]).in_class((0x68, 5)).hops(HOPS);
    t.post(x, &send)?;
    t.succeeds(x, "D-UD-17", 2)?;
    let cqe = t.succeeds(y, "D-UD-18", 1)?;
    t.journal.is("D-UD-05", "sl", cqe.sl, 5)?;
    Ok(t.bytes(y, AREA, HEADER))
}

fn header_of_ipv4(t: &mut Bench) -> Outcome {
    let (x, y) = t.datagrams()?;
    let (from, to) = (t.members[x.member].gid, t.members[y.member].gid);
    let is_ipv4 = |gid: &Gid| gid[..12] == testkit::gid(0)[..12];
    t.needs(is_ipv4(&from) && is_ipv4(&to), "the GIDs of --gid are no IPv4 addresses")?;
    let area = area_of(t, &x, &y, 0, to)?;
    let header = &area[20..];
    t.journal.is("D-UD-24", "version and length", header[0], 0x45)?;
    t.journal.is("D-UD-24", "checksum of the header", checksum(header), 0xffff)?;
    t.journal.is("D-UD-04", "traffic class but the bits of ECN", header[1] & 0xfc, 0x68)?;
    let total = u16::from_be_bytes([header[2], header[3]]);
    t.journal.is("D-UD-24", "total length", total, 20 + 32 + 12)?;
    t.journal.is("D-UD-24", "flags", header[6], 0x40)?;
    t.journal.is("D-UD-06", "time to live", header[8], HOPS)?;
    t.journal.is("D-UD-24", "protocol", header[9], 17)?;
    t.journal.same_bytes("D-UD-24", "source", &header[12..16], &from[12..])?;
    t.journal.same_bytes("D-UD-24", "destination", &header[16..20], &to[12..])
}

fn header_of_ipv6(t: &mut Bench) -> Outcome {
    let (x, y) = t.datagrams()?;
    let of = |member: usize| {
        let mut gid = [0; 16];
        (gid[0], gid[1], gid[15]) = (0xfe, 0x80, 1 + member as u8);
        gid
    };
    let (from, to) = (of(x.member), of(y.member));
    for (end, gid) in [(&x, from), (&y, to)] {
        let entries = query_port(t.on(end))?.gid_tbl_len;
        t.needs(entries >= 2, "the GID table has one entry")?;
        match add_gid(t.on(end), 1, gid) {
            Err(crate::outcome::Stop::Failed(failure)) if failure.got == "PERM" => {
                return crate::outcome::not_judged("the device may not use an IPv6 address");
            }
            result => result?,
        }
    }
    let area = area_of(t, &x, &y, 1, to)?;
    let first = u32::from_be_bytes([area[0], area[1], area[2], area[3]]);
    t.journal.is("D-UD-23", "version", first >> 28, 6)?;
    t.journal.is("D-UD-04", "traffic class but the bits of ECN", first >> 20 & 0xfc, 0x68)?;
    t.journal.is("D-UD-04", "flow label", first & 0xf_ffff, 0)?;
    let length = u16::from_be_bytes([area[4], area[5]]);
    t.journal.is("D-UD-23", "payload length", length, 32 + 12)?;
    t.journal.is("D-UD-23", "next header", area[6], 17)?;
    t.journal.is("D-UD-06", "hop limit", area[7], HOPS)?;
    t.journal.same_bytes("D-UD-23", "source", &area[8..24], &from)?;
    t.journal.same_bytes("D-UD-23", "destination", &area[24..40], &to)
}

fn longest_datagram(t: &mut Bench) -> Outcome {
    let (x, y) = t.datagrams()?;
    let most = 128 << query_port(t.on(&x))?.max_mtu.min(5);
    t.receive(&y, 1, AREA, most + HEADER)?;
    let send = t.datagram(&x, &y, 2, 0, most);
    t.post(&x, &send)?;
    t.succeeds(&x, "D-UD-17", 2)?;
    let send = t.datagram(&x, &y, 3, 0, most + 1);
    t.post(&x, &send)?;
    t.completes(&x, "D-UD-12", 3, VIRTIO_RDMA_WC_LOC_LEN_ERR)?;
    t.has_state(&x, "D-UD-16", SQE)
}

fn wrong_address_vectors(t: &mut Bench) -> Outcome {
    let (x, y) = t.datagrams()?;
    let good = t.datagram(&x, &y, 1, 0, 10);
    let change = |change: fn(&mut WrUd)| {
        let mut send = good.clone();
        if let Ok(mut ud) = <WrUd as zerocopy::FromBytes>::read_from_bytes(&send.wr) {
            change(&mut ud);
            send.wr = zerocopy::IntoBytes::as_bytes(&ud).to_vec();
        }
        send
    };
    let cases = [
        ("D-UD-13", change(|ud| ud.av.port = 2)),
        ("D-UD-13", change(|ud| ud.av.port = 0)),
        ("D-UD-14", change(|ud| ud.av.pdn ^= 1)),
        ("D-UD-15", change(|ud| ud.av.gid_index = 200)),
    ];
    for (clause, send) in cases {
        t.post(&x, &send)?;
        t.completes(&x, clause, 1, OP_ERR)?;
        t.has_state(&x, "D-UD-16", SQE)?;
        t.on(&x).set_state(x.qpn, VIRTIO_RDMA_QPS_RTS)?;
    }
    Ok(())
}

/// Sends a datagram that is dropped, and then one that takes the receive.
fn is_dropped(
    t: &mut Bench,
    (x, y): (&End, &End),
    clause: &'static str,
    send: &testkit::Send,
) -> Outcome {
    t.receive(y, 1, AREA, 400)?;
    t.post(x, send)?;
    t.succeeds(x, "D-UD-17", send.wr_id)?;
    t.is_quiet(y, clause, "the datagram is dropped")?;
    let good = t.datagram(x, y, 99, 0, 20);
    t.post(x, &good)?;
    t.succeeds(x, "D-UD-17", 99)?;
    let cqe = t.succeeds(y, "D-UD-21", 1)?;
    t.journal.is("D-UD-21", "byte_len", cqe.byte_len, HEADER + 20)
}

fn wrong_qkey(t: &mut Bench) -> Outcome {
    let (x, y) = t.datagrams()?;
    let dgid = t.members[y.member].gid;
    let send = t.datagram(&x, &y, 2, 0, 10).ud(dgid, y.qpn, QKEY + 1, x.pdn);
    let before = query_port(t.on(&y))?.qkey_viol_cntr;
    is_dropped(t, (&x, &y), "D-UD-19", &send.at_mac([2, 0, 0, 0, 0, 1]))?;
    let after = query_port(t.on(&y))?.qkey_viol_cntr;
    t.journal.is("D-PORT-04", "qkey_viol_cntr", after, before.saturating_add(1))
}

fn own_qkey(t: &mut Bench) -> Outcome {
    let (x, y) = t.datagrams()?;
    let dgid = t.members[y.member].gid;
    t.receive(&y, 1, AREA, 400)?;
    let send = t.datagram(&x, &y, 2, 0, 10).ud(dgid, y.qpn, 0x8000_0000, x.pdn);
    t.post(&x, &send.at_mac([2, 0, 0, 0, 0, 1]))?;
    t.succeeds(&y, "D-UD-03", 1)?;
    Ok(())
}

fn no_receive(t: &mut Bench) -> Outcome {
    let (x, y) = t.datagrams()?;
    let send = t.datagram(&x, &y, 2, 0, 10);
    t.post(&x, &send)?;
    t.succeeds(&x, "D-UD-17", 2)?;
    t.receive(&y, 1, AREA, 400)?;
    t.is_quiet(&y, "D-UD-20", "a datagram does not wait for a receive")
}

fn receive_without_room(t: &mut Bench) -> Outcome {
    let (x, y) = t.datagrams()?;
    let long = t.datagram(&x, &y, 2, 0, 400);
    is_dropped(t, (&x, &y), "D-UD-20", &long)?;
    // Nor is there one in front of the payload.
    t.receive(&y, 5, AREA, HEADER - 1)?;
    let send = t.datagram(&x, &y, 3, 0, 0);
    t.post(&x, &send)?;
    t.is_quiet(&y, "D-UD-20", "a receive of 39 bytes has no room")
}

fn nobody_there(t: &mut Bench) -> Outcome {
    let (x, y) = t.datagrams()?;
    let gid = t.a().gid;
    let mut foreign = gid;
    foreign[15] ^= 0x55;
    for (wr_id, to, qpn) in [(1, foreign, y.qpn), (2, gid, 0xff_ff00), (3, gid, 0)] {
        let send = t.datagram(&x, &y, wr_id, 0, 10).ud(to, qpn, QKEY, x.pdn);
        t.post(&x, &send.at_mac([2, 0, 0, 0, 0, 1]))?;
        t.succeeds(&x, "D-UD-17", wr_id)?;
    }
    Ok(())
}

fn gsi_carries_datagrams(t: &mut Bench) -> Outcome {
    let far = t.far;
    let kind = VIRTIO_RDMA_QPT_GSI;
    let x = t.end(0, kind)?;
    t.make_ready(&x, kind)?;
    let y = if far == 0 { x } else { t.end(far, kind)? };
    if far != 0 {
        t.make_ready(&y, kind)?;
    }
    let dgid = t.members[y.member].gid;
    let sent = t.fill(&x, 0, 256);
    t.receive(&y, 1, AREA, 400)?;
    let send = t.datagram(&x, &y, 2, 0, 256).ud(dgid, 1, GSI_QKEY, x.pdn);
    t.post(&x, &send.at_mac([2, 0, 0, 0, 0, 1]))?;
    t.journal.about("D-GSI-01");
    if far == 0 {
        let mut ids = [t.a().next(x.cqn)?.wr_id, t.a().next(x.cqn)?.wr_id];
        ids.sort_unstable();
        t.journal.is("D-GSI-01", "CQEs of both", ids, [1, 2])?;
    } else {
        t.succeeds(&x, "D-GSI-01", 2)?;
        let cqe = t.succeeds(&y, "D-GSI-01", 1)?;
        t.journal.is("D-GSI-01", "src_qp", cqe.src_qp, 1)?;
    }
    let got = t.bytes(&y, AREA + 40, 256);
    t.journal.same_bytes("D-GSI-01", "payload", &got, &sent)
}

fn sender_is_not_told_of_a_bad_receive(t: &mut Bench) -> Outcome {
    let (x, y) = t.datagrams()?;
    let mr = t.on(&y).reg_mr(y.pdn, y.area, PAGE, 0)?;
    // An MR without LOCAL_WRITE is no place for a message.
    let mut place = y.sge(0, 400);
    place.lkey = mr.lkey;
    t.on(&y).post_recv(y.qpn, 1, &[place])?;
    let send = t.datagram(&x, &y, 2, 0, 10);
    t.post(&x, &send)?;
    t.succeeds(&x, "D-WQE-26", 2)?;
    t.completes(&y, "D-WQE-23", 1, VIRTIO_RDMA_WC_LOC_PROT_ERR)?;
    t.comes_to(&y, "D-WQE-23", VIRTIO_RDMA_QPS_ERR)?;
    t.has_state(&x, "D-WQE-26", VIRTIO_RDMA_QPS_RTS)
}
