// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options that have a few tests each: UC, REREG_MR, multicast, counters, VLANs, moderation, FLUSH and ATOMIC_WRITE.

use abi::*;
use testkit::command::{self, Gid, PAGE};
use testkit::{Send, LOCAL, READ, WRITE};
use zerocopy::FromZeros;

use crate::bench::{Bench, End, Link, QKEY, QUIET};
use crate::driver::Driver;
use crate::outcome::Outcome;
use crate::test::family;

family! {
    uc_carries_messages Ends [VIRTIO_RDMA_F_UC]: "D-WQE-30" "D-TERM-21";
    uc_drops_without_a_receive Ends [VIRTIO_RDMA_F_UC]: "D-UC-11" "D-UC-02" "D-UC-10";
    uc_drops_what_is_too_long Ends [VIRTIO_RDMA_F_UC]: "D-UC-12" "D-UC-02";
    uc_drops_what_is_not_allowed Ends [VIRTIO_RDMA_F_UC]: "D-UC-13" "D-UC-14";
    uc_drops_for_nobody Ends [VIRTIO_RDMA_F_UC]: "D-UC-15";
    uc_takes_any_first_psn Ends [VIRTIO_RDMA_F_UC]: "D-UC-01";
    uc_needs_one_path_mtu Ends [VIRTIO_RDMA_F_UC]: "D-UC-03" "D-UC-17";
    uc_ends_at_a_bad_receive Ends [VIRTIO_RDMA_F_UC]: "D-UC-19" "D-WQE-26" "D-WQE-23";
    uc_has_no_read Ends [VIRTIO_RDMA_F_UC]: "D-WQE-17" "D-WQE-24";
    rereg_replaces_access One [VIRTIO_RDMA_F_REREG_MR]: "D-MR-23" "D-MR-24" "D-MR-25" "D-MR-26";
    rereg_is_refused One [VIRTIO_RDMA_F_REREG_MR]: "D-MR-29" "D-MR-31" "D-MR-32" "D-MR-33" "D-MR-34";
    counters_count One [VIRTIO_RDMA_F_COUNTERS]: "D-CNT-03" "D-CNT-04" "D-CNT-05" "D-RST-03";
    counters_of_other_ports One [VIRTIO_RDMA_F_COUNTERS]: "D-CNT-01";
    multicast_reaches_members Ends [VIRTIO_RDMA_F_MCAST]:
        "D-MCAST-14" "D-MCAST-02" "D-MCAST-04" "D-MCAST-15" "D-MCAST-16";
    multicast_stays_over_reset One [VIRTIO_RDMA_F_MCAST]: "D-MCAST-01" "D-MCAST-18" "D-QP-23";
    multicast_to_a_single_qp Ends [VIRTIO_RDMA_F_MCAST]: "D-MCAST-13";
    multicast_is_refused One [VIRTIO_RDMA_F_MCAST]:
        "D-MCAST-07" "D-MCAST-08" "D-MCAST-09" "D-MCAST-10" "D-MCAST-12" "D-MCAST-03" "D-CTRL-58" "D-TERM-05";
    vlans_are_checked One [VIRTIO_RDMA_F_VLAN]: "D-VLAN-01" "D-VLAN-02";
    vlan_comes_with_a_datagram Ends [VIRTIO_RDMA_F_VLAN]: "D-VLAN-06" "D-VLAN-04";
    moderation_by_count One [VIRTIO_RDMA_F_CQ_MODERATION]: "D-MOD-03" "D-MOD-05" "D-MOD-02";
    moderation_by_time One [VIRTIO_RDMA_F_CQ_MODERATION]: "D-MOD-04";
    atomic_write_writes Ends [VIRTIO_RDMA_F_ATOMIC_WRITE]: "D-AW-03" "D-AW-04" "D-AW-06" "D-AW-07";
    flush_completes Ends [VIRTIO_RDMA_F_FLUSH]: "D-FLUSH-13" "D-FLUSH-12" "D-FLUSH-15";
    flush_is_refused Ends [VIRTIO_RDMA_F_FLUSH]: "D-FLUSH-06" "D-FLUSH-07" "D-FLUSH-09";
}

const SEND: u32 = VIRTIO_RDMA_WR_SEND;
const RDMA_WRITE: u32 = VIRTIO_RDMA_WR_RDMA_WRITE;
const RC: u32 = VIRTIO_RDMA_QPT_RC;
const UC: u32 = VIRTIO_RDMA_QPT_UC;
const INVALID: u32 = VIRTIO_RDMA_STATUS_INVAL;
const NO_OBJECT: u32 = VIRTIO_RDMA_STATUS_NO_OBJECT;

/// Makes an unreliable connection.
fn unreliable(t: &mut Bench) -> Outcome<(End, End)> {
    t.connection_of(UC, Link::default())
}

/// Sends a message that arrives.
fn arrives(t: &mut Bench, (x, y): (&End, &End), clause: &'static str, wr_id: u64) -> Outcome {
    let sent = t.fill(x, 0, 2500);
    t.receive(y, wr_id, 0x2000, 2500)?;
    t.post(x, &x.send(wr_id, SEND, 0, 2500))?;
    t.succeeds(x, clause, wr_id)?;
    t.succeeds(y, clause, wr_id)?;
    let got = t.bytes(y, 0x2000, 2500);
    t.journal.same_bytes("D-TERM-21", "message", &got, &sent)
}

fn uc_carries_messages(t: &mut Bench) -> Outcome {
    let (x, y) = unreliable(t)?;
    arrives(t, (&x, &y), "D-WQE-30", 1)?;
    let sent = t.fill(&x, 0x1_0000, 3000);
    t.post(&x, &x.rdma(&y, 2, RDMA_WRITE, 0x1_0000, 3000).flags(0))?;
    t.receive(&y, 3, 0, 16)?;
    t.post(&x, &x.send(3, SEND, 0, 16))?;
    t.succeeds(&y, "D-WQE-30", 3)?;
    let got = t.bytes(&y, 0x1_0000, 3000);
    t.journal.same_bytes("D-TERM-21", "bytes of a WRITE", &got, &sent)
}

fn uc_drops_without_a_receive(t: &mut Bench) -> Outcome {
    let (x, y) = unreliable(t)?;
    t.post(&x, &x.send(1, SEND, 0, 100))?;
    t.succeeds(&x, "D-UC-02", 1)?;
    t.on(&y).pause(QUIET)?;
    t.receive(&y, 2, 0, 100)?;
    t.is_quiet(&y, "D-UC-11", "the message is dropped")?;
    t.has_state(&x, "D-UC-10", VIRTIO_RDMA_QPS_RTS)?;
    t.has_state(&y, "D-UC-10", VIRTIO_RDMA_QPS_RTS)
}

fn uc_drops_what_is_too_long(t: &mut Bench) -> Outcome {
    let (x, y) = unreliable(t)?;
    t.receive(&y, 1, 0x2000, 99)?;
    t.post(&x, &x.send(2, SEND, 0, 100))?;
    t.succeeds(&x, "D-UC-02", 2)?;
    t.is_quiet(&y, "D-UC-12", "the message is dropped")?;
    t.post(&x, &x.send(3, SEND, 0, 50))?;
    let cqe = t.succeeds(&y, "D-UC-12", 1)?;
    t.journal.is("D-UC-12", "byte_len of the next message", cqe.byte_len, 50)
}

fn uc_drops_what_is_not_allowed(t: &mut Bench) -> Outcome {
    let (x, y) = unreliable(t)?;
    t.on(&y).write(y.area, &[0x77; 100]);
    t.post(&x, &x.send(1, RDMA_WRITE, 0, 100).rdma(y.area, y.mr.rkey ^ 1))?;
    t.succeeds(&x, "D-UC-13", 1)?;
    let (v, w) = t.connection_of(UC, Link { access: READ, ..Link::default() })?;
    t.on(&w).write(w.area, &[0x77; 100]);
    t.post(&v, &v.rdma(&w, 2, RDMA_WRITE, 0, 100))?;
    t.succeeds(&v, "D-UC-14", 2)?;
    for (end, clause) in [(&y, "D-UC-13"), (&w, "D-UC-14")] {
        t.on(end).pause(QUIET)?;
        let got = t.bytes(end, 0, 100);
        t.journal.same_bytes(clause, "memory of the responder", &got, &[0x77; 100])?;
        t.has_state(end, clause, VIRTIO_RDMA_QPS_RTS)?;
    }
    Ok(())
}

fn uc_drops_for_nobody(t: &mut Bench) -> Outcome {
    let (x, y) = unreliable(t)?;
    t.on(&y).destroy_qp(y.qpn)?;
    t.post(&x, &x.send(1, SEND, 0, 100))?;
    t.succeeds(&x, "D-UC-15", 1)?;
    Ok(())
}

fn uc_takes_any_first_psn(t: &mut Bench) -> Outcome {
    let far = t.far;
    let (x, y) = (t.end(0, UC)?, t.end(far, UC)?);
    t.connect(&x, &y, UC, Link { sq_psn: 1000, ..Link::default() })?;
    t.connect(&y, &x, UC, Link { rq_psn: 5, ..Link::default() })?;
    arrives(t, (&x, &y), "D-UC-01", 1)
}

fn uc_needs_one_path_mtu(t: &mut Bench) -> Outcome {
    let far = t.far;
    let (x, y) = (t.end(0, UC)?, t.end(far, UC)?);
    t.connect(&x, &y, UC, Link { path_mtu: 3, ..Link::default() })?;
    t.connect(&y, &x, UC, Link { path_mtu: 2, ..Link::default() })?;
    t.receive(&y, 1, 0x2000, 3000)?;
    t.post(&x, &x.send(2, SEND, 0, 2000))?;
    t.succeeds(&x, "D-UC-02", 2)?;
    t.is_quiet(&y, "D-UC-17", "a message of packets of another size is dropped")?;
    t.post(&x, &x.send(3, SEND, 0, 200))?;
    let cqe = t.succeeds(&y, "D-UC-03", 1)?;
    t.journal.is("D-UC-03", "byte_len", cqe.byte_len, 200)
}

fn uc_ends_at_a_bad_receive(t: &mut Bench) -> Outcome {
    let (x, y) = unreliable(t)?;
    let mut place = y.sge(0, 100);
    place.lkey ^= 1;
    t.on(&y).post_recv(y.qpn, 1, &[place])?;
    t.post(&x, &x.send(2, SEND, 0, 100))?;
    t.succeeds(&x, "D-WQE-26", 2)?;
    t.completes(&y, "D-UC-19", 1, VIRTIO_RDMA_WC_LOC_PROT_ERR)?;
    t.comes_to(&y, "D-WQE-23", VIRTIO_RDMA_QPS_ERR)
}

fn uc_has_no_read(t: &mut Bench) -> Outcome {
    let (x, y) = unreliable(t)?;
    t.post(&x, &x.rdma(&y, 1, VIRTIO_RDMA_WR_RDMA_READ, 0, 100))?;
    t.completes(&x, "D-WQE-17", 1, VIRTIO_RDMA_WC_LOC_QP_OP_ERR)?;
    t.has_state(&x, "D-WQE-24", VIRTIO_RDMA_QPS_SQE)
}

/// Returns a REREG_MR that replaces this.
fn rereg(mrn: u32, flags: u32) -> virtio_rdma_cmd_rereg_mr {
    let mut request = virtio_rdma_cmd_rereg_mr::new_zeroed();
    (request.mrn, request.flags) = (mrn, flags);
    request
}

const REREG_MR: (&str, u32) = ("REREG_MR", VIRTIO_RDMA_CMD_REREG_MR);

fn rereg_replaces_access(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let mut request = rereg(y.mr.mrn, VIRTIO_RDMA_REREG_ACCESS);
    request.mr.access_flags = READ | LOCAL;
    // What is not replaced is ignored.
    (request.mr.pdn, request.mr.length, request.mr.pages) = (u32::MAX, u64::MAX, 7);
    t.on(&y).command::<_, ()>("D-MR-24", REREG_MR.0, REREG_MR.1, &request)?;
    t.post(&x, &x.rdma(&y, 1, VIRTIO_RDMA_WR_RDMA_READ, 0, 100))?;
    t.succeeds(&x, "D-MR-25", 1)?;
    t.journal.pass("D-MR-23");
    t.post(&x, &x.rdma(&y, 2, RDMA_WRITE, 0, 100))?;
    t.completes(&x, "D-MR-26", 2, VIRTIO_RDMA_WC_REM_ACCESS_ERR)?;
    Ok(())
}

fn rereg_is_refused(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (pdn, at) = (a.create_pd()?, a.allocate(PAGE, PAGE));
    let mr = a.reg_mr(pdn, at, PAGE, LOCAL)?;
    let dma = virtio_rdma_cmd_get_dma_mr { pdn, access_flags: LOCAL };
    let dma: virtio_rdma_rsp_mr =
        a.command("D-CTRL-24", "GET_DMA_MR", VIRTIO_RDMA_CMD_GET_DMA_MR, &dma)?;
    let mut access = rereg(mr.mrn, VIRTIO_RDMA_REREG_ACCESS);
    access.mr.access_flags = WRITE;
    let mut pd = rereg(mr.mrn, VIRTIO_RDMA_REREG_PD);
    pd.mr.pdn = u32::MAX;
    let mut pages = rereg(mr.mrn, VIRTIO_RDMA_REREG_TRANS);
    pages.mr = a.mr_request(pdn, at, PAGE, LOCAL);
    pages.mr.pages = crate::driver::NOWHERE;
    for (clause, request, status) in [
        ("D-MR-29", rereg(u32::MAX, VIRTIO_RDMA_REREG_ACCESS), NO_OBJECT),
        ("D-MR-29", pd, NO_OBJECT),
        ("D-MR-31", rereg(mr.mrn, 0), INVALID),
        ("D-MR-31", rereg(mr.mrn, 1 << 9 | VIRTIO_RDMA_REREG_ACCESS), INVALID),
        ("D-MR-32", rereg(dma.mrn, VIRTIO_RDMA_REREG_ACCESS), INVALID),
        ("D-MR-33", access, INVALID),
        ("D-MR-34", pages, VIRTIO_RDMA_STATUS_FAULT),
    ] {
        a.fails::<_, ()>(clause, REREG_MR, &request, status)?;
    }
    Ok(())
}

/// Returns the counters of the port.
fn counters(a: &mut Driver) -> Outcome<virtio_rdma_rsp_query_counters> {
    let (name, number) = ("QUERY_COUNTERS", VIRTIO_RDMA_CMD_QUERY_COUNTERS);
    a.command("D-CNT-02", name, number, &virtio_rdma_cmd_query_counters { port: 1 })
}

fn counters_count(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let before = counters(t.a())?;
    // Three packets of 1024 bytes, in loopback.
    arrives(t, (&x, &y), "D-TERM-23", 1)?;
    let after = counters(t.a())?;
    t.journal.is("D-CNT-03", "xmit_data", after.xmit_data - before.xmit_data, 2500)?;
    t.journal.is("D-CNT-03", "rcv_data", after.rcv_data - before.rcv_data, 2500)?;
    let packets = after.xmit_packets - before.xmit_packets;
    t.journal.is("D-CNT-04", "xmit_packets", packets, 3)?;
    t.post(&x, &x.rdma(&y, 2, VIRTIO_RDMA_WR_RDMA_READ, 0, 2000))?;
    t.succeeds(&x, "D-WQE-30", 2)?;
    let last = counters(t.a())?;
    // One packet of the request, and two of the answer.
    let packets = last.xmit_packets - after.xmit_packets;
    t.journal.is("D-CNT-05", "packets of a READ in loopback", packets, 3)?;
    t.a().port.reset()?;
    t.a().forget();
    t.a().begin()?;
    let kept = counters(t.a())?;
    t.journal.is("D-RST-03", "xmit_data after a reset", kept.xmit_data, last.xmit_data)
}

fn counters_of_other_ports(t: &mut Bench) -> Outcome {
    let name = ("QUERY_COUNTERS", VIRTIO_RDMA_CMD_QUERY_COUNTERS);
    let request = virtio_rdma_cmd_query_counters { port: 2 };
    t.a().fails::<_, virtio_rdma_rsp_query_counters>("D-CNT-01", name, &request, INVALID)
}

/// Returns the GID of a group.
fn group() -> Gid {
    let mut gid = [0; 16];
    (gid[0], gid[1], gid[15]) = (0xff, 0x0e, 0x77);
    gid
}

fn mcast(qpn: u32, gid: Gid) -> virtio_rdma_cmd_mcast {
    virtio_rdma_cmd_mcast { gid, qpn, lid: 0, reserved_16: 0 }
}

const ATTACH: (&str, u32) = ("ATTACH_MCAST", VIRTIO_RDMA_CMD_ATTACH_MCAST);
const DETACH: (&str, u32) = ("DETACH_MCAST", VIRTIO_RDMA_CMD_DETACH_MCAST);

fn multicast_reaches_members(t: &mut Bench) -> Outcome {
    let (x, y) = t.datagrams()?;
    let z = t.add_qp(&y, VIRTIO_RDMA_QPT_UD, 0)?;
    let other = t.end(y.member, VIRTIO_RDMA_QPT_UD)?;
    for end in [&z, &other] {
        t.make_ready(end, VIRTIO_RDMA_QPT_UD)?;
    }
    for end in [&y, &other] {
        t.on(end).command::<_, ()>("D-MCAST-02", ATTACH.0, ATTACH.1, &mcast(end.qpn, group()))?;
    }
    for (wr_id, end) in [(1, &y), (2, &z), (3, &other)] {
        t.receive(end, wr_id, 0x1000 * wr_id, 300)?;
        t.receive(end, 10 + wr_id, 0x1000 * wr_id, 300)?;
    }
    let send = |t: &Bench, wr_id| {
        let send = t.datagram(&x, &y, wr_id, 0, 100).ud(group(), 0xff_ffff, QKEY, x.pdn);
        send.at_mac([0x33, 0x33, 0, 0, 0, 0x77])
    };
    let first = send(t, 5);
    t.post(&x, &first)?;
    t.succeeds(&x, "D-UD-17", 5)?;
    t.succeeds(&y, "D-MCAST-14", 1)?;
    t.succeeds(&other, "D-MCAST-14", 3)?;
    t.is_quiet(&y, "D-MCAST-15", "one copy for each member, and none for others")?;
    t.journal.pass("D-MCAST-16");
    t.on(&y).command::<_, ()>("D-MCAST-04", DETACH.0, DETACH.1, &mcast(y.qpn, group()))?;
    let second = send(t, 6);
    t.post(&x, &second)?;
    t.succeeds(&other, "D-MCAST-14", 13)?;
    t.is_quiet(&y, "D-MCAST-04", "no copy after DETACH_MCAST")
}

fn multicast_stays_over_reset(t: &mut Bench) -> Outcome {
    let (x, _) = t.datagrams()?;
    t.a().command::<_, ()>("D-MCAST-02", ATTACH.0, ATTACH.1, &mcast(x.qpn, group()))?;
    t.a().reset_qp(x.qpn)?;
    t.make_ready(&x, VIRTIO_RDMA_QPT_UD)?;
    t.receive(&x, 1, 0x1000, 300)?;
    let send = t.datagram(&x, &x, 2, 0, 100).ud(group(), 0xff_ffff, QKEY, x.pdn);
    t.post(&x, &send.at_mac([0x33, 0x33, 0, 0, 0, 0x77]).flags(0))?;
    t.succeeds(&x, "D-MCAST-18", 1)?;
    t.journal.pass("D-MCAST-01");
    t.journal.pass("D-QP-23");
    Ok(())
}

fn multicast_to_a_single_qp(t: &mut Bench) -> Outcome {
    let (x, y) = t.datagrams()?;
    t.on(&y).command::<_, ()>("D-MCAST-02", ATTACH.0, ATTACH.1, &mcast(y.qpn, group()))?;
    t.receive(&y, 1, 0x1000, 300)?;
    let send = t.datagram(&x, &y, 2, 0, 100).ud(group(), y.qpn, QKEY, x.pdn);
    t.post(&x, &send.at_mac([0x33, 0x33, 0, 0, 0, 0x77]))?;
    t.succeeds(&x, "D-UD-17", 2)?;
    t.is_quiet(&y, "D-MCAST-13", "a datagram to a group names no QP")
}

fn multicast_is_refused(t: &mut Bench) -> Outcome {
    let (x, _) = t.datagrams()?;
    let rc = t.end(0, RC)?;
    let a = t.a();
    let lid = virtio_rdma_cmd_mcast { lid: 1, ..mcast(x.qpn, group()) };
    for (clause, name, request, status) in [
        ("D-MCAST-07", ATTACH, mcast(9999, group()), NO_OBJECT),
        ("D-MCAST-07", DETACH, mcast(9999, group()), NO_OBJECT),
        ("D-MCAST-08", ATTACH, mcast(rc.qpn, group()), INVALID),
        ("D-MCAST-09", ATTACH, mcast(x.qpn, a.gid), INVALID),
        ("D-MCAST-10", ATTACH, lid, INVALID),
        ("D-MCAST-12", DETACH, mcast(x.qpn, group()), NO_OBJECT),
    ] {
        a.fails::<_, ()>(clause, name, &request, status)?;
    }
    a.journal.pass("D-TERM-05");
    for _ in 0..2 {
        a.command::<_, ()>("D-MCAST-03", ATTACH.0, ATTACH.1, &mcast(x.qpn, group()))?;
    }
    let request = virtio_rdma_cmd_destroy_qp { qpn: x.qpn };
    let name = ("DESTROY_QP", VIRTIO_RDMA_CMD_DESTROY_QP);
    a.fails::<_, ()>("D-CTRL-58", name, &request, VIRTIO_RDMA_STATUS_BUSY)
}

fn vlan_gid(gid: Gid, index: u16, vlan_id: u16) -> virtio_rdma_cmd_add_gid {
    virtio_rdma_cmd_add_gid { vlan_id, ..command::add_gid(index, gid) }
}

const ADD_GID: (&str, u32) = ("ADD_GID", VIRTIO_RDMA_CMD_ADD_GID);

fn vlans_are_checked(t: &mut Bench) -> Outcome {
    let a = t.a();
    let gid = a.gid;
    for vlan_id in [4095, 4096, 0x7fff, 0xfffe] {
        a.fails::<_, ()>("D-VLAN-02", ADD_GID, &vlan_gid(gid, 0, vlan_id), INVALID)?;
    }
    for vlan_id in [1, 4094, 0xffff] {
        a.command::<_, ()>("D-VLAN-01", ADD_GID.0, ADD_GID.1, &vlan_gid(gid, 0, vlan_id))?;
    }
    Ok(())
}

fn vlan_comes_with_a_datagram(t: &mut Bench) -> Outcome {
    let members = t.members.len();
    for member in 0..members {
        let a = &mut t.members[member];
        let request = vlan_gid(a.gid, 1, 100);
        a.command::<_, ()>("D-VLAN-01", ADD_GID.0, ADD_GID.1, &request)?;
    }
    let (x, y) = t.datagrams()?;
    t.receive(&y, 1, 0, 300)?;
    let send = t.datagram(&x, &y, 2, 0x1000, 100).from(1);
    t.post(&x, &send)?;
    let cqe = t.succeeds(&y, "D-VLAN-04", 1)?;
    let has = cqe.wc_flags & VIRTIO_RDMA_WC_WITH_VLAN;
    t.journal.is("D-VLAN-06", "WC_WITH_VLAN", has, VIRTIO_RDMA_WC_WITH_VLAN)?;
    t.journal.is("D-VLAN-06", "vlan_id", cqe.vlan_id, 100)?;
    t.receive(&y, 3, 0, 300)?;
    let send = t.datagram(&x, &y, 4, 0x1000, 100);
    t.post(&x, &send)?;
    let cqe = t.succeeds(&y, "D-UD-18", 3)?;
    t.journal.is("D-VLAN-07", "WC_WITH_VLAN", cqe.wc_flags & VIRTIO_RDMA_WC_WITH_VLAN, 0)
}

const MODIFY_CQ: (&str, u32) = ("MODIFY_CQ", VIRTIO_RDMA_CMD_MODIFY_CQ);

/// Makes a QP in ERR whose CQ is armed and holds events back.
fn moderated(t: &mut Bench, cq_count: u16, cq_period: u16) -> Outcome<End> {
    let x = t.end(0, RC)?;
    t.make_init(&x, RC, 0)?;
    let request = virtio_rdma_cmd_modify_cq { cqn: x.cqn, cq_count, cq_period };
    t.a().command::<_, ()>("D-MOD-03", MODIFY_CQ.0, MODIFY_CQ.1, &request)?;
    t.a().arm(x.cqn, false);
    t.a().set_state(x.qpn, VIRTIO_RDMA_QPS_ERR)?;
    Ok(x)
}

fn moderation_by_count(t: &mut Bench) -> Outcome {
    let none = virtio_rdma_cmd_modify_cq { cqn: u32::MAX, cq_count: 1, cq_period: 1 };
    t.a().fails::<_, ()>("D-MOD-02", MODIFY_CQ, &none, NO_OBJECT)?;
    let x = moderated(t, 3, u16::MAX)?;
    for wr_id in 0..3 {
        t.a().take_events()?;
        let early = t.a().completion_events.len();
        t.journal.is("D-MOD-05", "completion events so far", early, 0)?;
        t.receive(&x, wr_id, 0, 16)?;
    }
    t.journal.about("D-MOD-03");
    t.a().await_completion_event(x.cqn, "completion event of the third CQE")?;
    t.journal.pass("D-MOD-03");
    Ok(())
}

fn moderation_by_time(t: &mut Bench) -> Outcome {
    let x = moderated(t, 100, 20_000)?;
    t.receive(&x, 1, 0, 16)?;
    t.journal.about("D-MOD-04");
    t.a().await_completion_event(x.cqn, "completion event after 20 ms")?;
    t.journal.pass("D-MOD-04");
    Ok(())
}

fn atomic_write_writes(t: &mut Bench) -> Outcome {
    let opcode = VIRTIO_RDMA_WR_ATOMIC_WRITE;
    let (x, y) = t.connection()?;
    let word = t.fill(&x, 0, 8);
    t.post(&x, &x.send(1, opcode, 0, 8).rdma(y.area + 8, y.mr.rkey))?;
    let cqe = t.succeeds(&x, "D-AW-03", 1)?;
    t.journal.is("D-WQE-31", "opcode", u32::from(cqe.opcode), VIRTIO_RDMA_WC_ATOMIC_WRITE)?;
    let got = t.bytes(&y, 8, 8);
    t.journal.same_bytes("D-AW-03", "word", &got, &word)?;
    let value = 0x0102_0304_0506_0708_u64;
    t.post(&x, &Send::new(2, opcode, &[]).atomic(y.area + 16, y.mr.rkey, value, 0))?;
    t.succeeds(&x, "D-AW-04", 2)?;
    let got = t.bytes(&y, 16, 8);
    t.journal.same_bytes("D-AW-04", "word", &got, &value.to_le_bytes())?;
    t.post(&x, &x.send(3, opcode, 0, 8).rdma(y.area + 4, y.mr.rkey))?;
    t.completes(&x, "D-AW-07", 3, VIRTIO_RDMA_WC_REM_INV_REQ_ERR)?;
    let (x, y) = t.connection()?;
    t.post(&x, &x.send(4, opcode, 0, 4).rdma(y.area, y.mr.rkey))?;
    t.completes(&x, "D-AW-06", 4, VIRTIO_RDMA_WC_LOC_LEN_ERR)?;
    Ok(())
}

/// Makes a connection that flushes, and an MR that allows it.
fn flushing(t: &mut Bench, access: u32) -> Outcome<(End, End, virtio_rdma_rsp_mr)> {
    let (x, y) = t.connection_of(RC, Link { access, ..Link::default() })?;
    let rights = LOCAL | WRITE | VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL;
    let mr = t.on(&y).reg_mr(y.pdn, y.area, PAGE, rights)?;
    Ok((x, y, mr))
}

/// Returns a FLUSH of some bytes.
fn flush(y: &End, mr: &virtio_rdma_rsp_mr, wr_id: u64, (kind, level): (u32, u32)) -> Send {
    let mut entry = virtio_rdma_ring_flush_wqe::new_zeroed();
    (entry.remote_addr, entry.length, entry.rkey) = (y.area, 100, mr.rkey);
    (entry.type_, entry.level) = (kind as _, level as _);
    let wr = zerocopy::IntoBytes::as_bytes(&entry).to_vec();
    Send { wr, ..Send::new(wr_id, VIRTIO_RDMA_WR_FLUSH, &[]) }
}

fn flush_completes(t: &mut Bench) -> Outcome {
    let (x, y, mr) = flushing(t, WRITE | VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL)?;
    t.journal.pass("D-FLUSH-12");
    let sent = t.fill(&x, 0, 100);
    t.post(&x, &x.send(1, RDMA_WRITE, 0, 100).rdma(y.area, mr.rkey).flags(0))?;
    let global = (VIRTIO_RDMA_FLUSH_GLOBAL, VIRTIO_RDMA_FLUSH_RANGE);
    t.post(&x, &flush(&y, &mr, 2, global))?;
    t.succeeds(&x, "D-FLUSH-13", 2)?;
    let got = t.bytes(&y, 0, 100);
    t.journal.same_bytes("D-FLUSH-13", "bytes of the WRITE", &got, &sent)?;
    let persistent = LOCAL | VIRTIO_RDMA_ACCESS_FLUSH_PERSISTENT;
    let request = t.on(&y).mr_request(y.pdn, y.area, PAGE, persistent);
    let name = ("REG_USER_MR", VIRTIO_RDMA_CMD_REG_USER_MR);
    t.on(&y).fails::<_, virtio_rdma_rsp_mr>("D-FLUSH-15", name, &request, INVALID)
}

fn flush_is_refused(t: &mut Bench) -> Outcome {
    let (global, range) = (VIRTIO_RDMA_FLUSH_GLOBAL, VIRTIO_RDMA_FLUSH_RANGE);
    let all = WRITE | VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL;
    for (clause, access, kind, status) in [
        ("D-FLUSH-06", all, (0, range), VIRTIO_RDMA_WC_LOC_QP_OP_ERR),
        ("D-FLUSH-06", all, (1 << 6, range), VIRTIO_RDMA_WC_LOC_QP_OP_ERR),
        ("D-FLUSH-07", all, (global, 9), VIRTIO_RDMA_WC_LOC_QP_OP_ERR),
        ("D-FLUSH-09", WRITE, (global, range), VIRTIO_RDMA_WC_REM_INV_REQ_ERR),
    ] {
        let (x, y, mr) = flushing(t, access)?;
        t.post(&x, &flush(&y, &mr, 2, kind))?;
        t.completes(&x, clause, 2, status)?;
    }
    Ok(())
}
