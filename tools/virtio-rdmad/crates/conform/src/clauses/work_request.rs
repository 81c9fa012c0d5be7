// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Work requests: what is malformed, inline data, fences and signalling.

use abi::*;
use testkit::{sge, Send, LOCAL, READ};

use crate::bench::{Bench, End, Link, AREA, QUIET};
use crate::clauses::port::query_port;
use crate::objects::{Shape, SGES};
use crate::outcome::Outcome;
use crate::test::family;

family! {
    too_many_sges Ends []: "D-WQE-16" "D-WQE-22";
    opcodes_that_the_type_lacks Ends []: "D-WQE-17" "D-WQE-33" "D-WQE-31";
    unknown_flags Ends []: "D-WQE-18" "D-WQE-25";
    memory_of_another_pd Ends []: "D-WQE-21" "D-WQE-41";
    memory_beyond_the_mr Ends []: "D-WQE-41" "D-WQE-45";
    sinks_need_local_write Ends []: "D-WQE-42" "D-WQE-46";
    messages_that_are_too_long Ends []: "D-WQE-20" "D-WQE-43";
    malformed_receives Ends []: "D-WQE-16" "D-WQE-23";
    inline_data_is_sent Ends []: "D-WQE-60";
    inline_data_is_bounded Ends []: "D-WQE-62" "D-WQE-63" "D-WQE-64" "D-WQE-61";
    all_sends_are_signalled Ends []: "D-WQE-65" "D-WQE-68";
    unsignalled_sends_are_quiet Ends []: "D-WQE-66" "D-WQE-67";
    fences_wait_for_reads Ends []: "D-WQE-34";
    memory_is_the_owners_again Ends []: "D-WQE-70" "D-WQE-71";
    atomics_need_their_feature One []: "D-WQE-89";
}

const SEND: u32 = VIRTIO_RDMA_WR_SEND;
const RDMA_WRITE: u32 = VIRTIO_RDMA_WR_RDMA_WRITE;
const RDMA_READ: u32 = VIRTIO_RDMA_WR_RDMA_READ;
const RC: u32 = VIRTIO_RDMA_QPT_RC;
const OP_ERR: u32 = VIRTIO_RDMA_WC_LOC_QP_OP_ERR;
const PROT_ERR: u32 = VIRTIO_RDMA_WC_LOC_PROT_ERR;

/// Posts a send that its sender must find to be wrong. The peer hears nothing of it.
fn is_wrong(
    t: &mut Bench,
    (x, y): (&End, &End),
    clause: &'static str,
    send: &Send,
    status: u32,
) -> Outcome {
    t.receive(y, 77, 0x2000, 0x1000)?;
    t.post(x, send)?;
    t.completes(x, clause, send.wr_id, status)?;
    t.comes_to(x, "D-WQE-22", VIRTIO_RDMA_QPS_ERR)?;
    t.is_quiet(y, clause, "the responder hears nothing")?;
    t.on(x).take_events()?;
    let events: Vec<_> = t.on(x).events.iter().filter(|event| event.1 == x.qpn).copied().collect();
    t.journal.holds("D-WQE-25", "no event tells of the error", events.is_empty(), &events)
}

fn too_many_sges(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let count = SGES.min(t.on(&x).config.max_send_sge) as usize;
    let sges = vec![x.sge(0, 10); count + 1];
    is_wrong(t, (&x, &y), "D-WQE-16", &Send::new(1, SEND, &sges), OP_ERR)
}

fn opcodes_that_the_type_lacks(t: &mut Bench) -> Outcome {
    // ATOMIC_WRITE, FLUSH and the memory windows are not agreed on; the others are no opcodes.
    for opcode in [10, 12, 13, 33, 100, 255] {
        let (x, y) = t.connection()?;
        t.receive(&y, 77, 0x2000, 100)?;
        let entry = x.send(1, opcode, 0, 10).entry();
        t.on(&x).write_entry(x.qpn, 0, (1, true), &entry);
        t.on(&x).ring_if_asleep(x.qpn, 0)?;
        let cqe = t.completes(&x, "D-WQE-17", 1, OP_ERR)?;
        let got = u32::from(cqe.opcode);
        t.journal.is("D-WQE-33", "opcode of the CQE", got, VIRTIO_RDMA_WC_SEND)?;
    }
    let (x, y) = t.datagrams()?;
    let mut send = t.datagram(&x, &y, 1, 0, 10);
    send.opcode = RDMA_WRITE;
    t.post(&x, &send)?;
    let cqe = t.completes(&x, "D-WQE-17", 1, OP_ERR)?;
    let got = u32::from(cqe.opcode);
    t.journal.is("D-WQE-31", "opcode of the CQE", got, VIRTIO_RDMA_WC_RDMA_WRITE)
}

fn unknown_flags(t: &mut Bench) -> Outcome {
    for bit in [4, 5, 9, 15] {
        let (x, y) = t.connection()?;
        let send = x.send(1, SEND, 0, 10).flags(VIRTIO_RDMA_SEND_SIGNALED | 1 << bit);
        is_wrong(t, (&x, &y), "D-WQE-18", &send, OP_ERR)?;
    }
    Ok(())
}

fn memory_of_another_pd(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let pdn = t.on(&x).create_pd()?;
    let mr = t.on(&x).reg_mr(pdn, x.area, 4096, LOCAL)?;
    let send = Send::new(1, SEND, &[sge(x.area, 10, mr.lkey)]);
    is_wrong(t, (&x, &y), "D-WQE-41", &send, PROT_ERR)?;
    t.journal.pass("D-WQE-21");
    Ok(())
}

fn memory_beyond_the_mr(t: &mut Bench) -> Outcome {
    for (at, len) in [(AREA - 9, 10), (AREA, 1), (0_u64.wrapping_sub(1), 2), (u64::MAX - 100, 50)] {
        let (x, y) = t.connection()?;
        t.on(&y).write(y.area + 0x2000, &[0x77; 100]);
        let wrong = sge(x.area.wrapping_add(at), len, x.mr.lkey);
        // The first piece is good, and is not moved either.
        let send = Send::new(1, SEND, &[x.sge(0, 10), wrong]);
        is_wrong(t, (&x, &y), "D-WQE-41", &send, PROT_ERR)?;
        let got = t.bytes(&y, 0x2000, 100);
        t.journal.same_bytes("D-WQE-45", "memory of the receive", &got, &[0x77; 100])?;
    }
    Ok(())
}

fn sinks_need_local_write(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let mr = t.on(&x).reg_mr(x.pdn, x.area, 4096, READ)?;
    // The key of the peer is wrong, too: the requester finds its own error first.
    let send = Send::new(1, RDMA_READ, &[sge(x.area, 10, mr.lkey)]).rdma(y.area, y.mr.rkey ^ 1);
    is_wrong(t, (&x, &y), "D-WQE-42", &send, PROT_ERR)?;
    t.journal.pass("D-WQE-46");
    Ok(())
}

fn messages_that_are_too_long(t: &mut Bench) -> Outcome {
    let most = query_port(t.a())?.max_msg_sz;
    t.needs(most >= 1 << 30, "short messages, which one MR has room for")?;
    let (x, y) = t.connection()?;
    // The pages of an MR may be the same one many times.
    let pages = vec![x.area; (1 << 30) / 4096];
    let a = t.on(&x);
    let bytes: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
    let table = a.allocate(bytes.len() as u64, 4096);
    a.write(table, &bytes);
    let iova = 1 << 32;
    let request =
        testkit::command::reg_user_mr(x.pdn, LOCAL, (iova, 1 << 30), (table, pages.len() as u32));
    let (name, number) = ("REG_USER_MR", VIRTIO_RDMA_CMD_REG_USER_MR);
    let mr: virtio_rdma_rsp_mr = a.command("D-CTRL-25", name, number, &request)?;
    let piece = sge(iova, 1 << 30, mr.lkey);
    let send = Send::new(1, SEND, &[piece, piece, sge(iova, 1, mr.lkey)]);
    is_wrong(t, (&x, &y), "D-WQE-43", &send, VIRTIO_RDMA_WC_LOC_LEN_ERR)?;
    t.journal.pass("D-WQE-20");
    Ok(())
}

fn malformed_receives(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let count = SGES.min(t.on(&y).config.max_recv_sge) as usize;
    let sges = vec![y.sge(0, 100); count + 1];
    t.on(&y).post_recv(y.qpn, 1, &sges)?;
    t.post(&x, &x.send(2, SEND, 0, 10))?;
    t.completes(&x, "D-WQE-16", 2, VIRTIO_RDMA_WC_REM_OP_ERR)?;
    t.completes(&y, "D-WQE-16", 1, OP_ERR)?;
    t.comes_to(&y, "D-WQE-23", VIRTIO_RDMA_QPS_ERR)
}

/// Makes a connection whose first end has inline data, if the device has it. Returns the most bytes of it, too.
fn inline_connection(t: &mut Bench) -> Outcome<(End, End, u32)> {
    let most = t.a().config.ring_max_inline_data.min(128);
    t.needs(most != 0, "the device has no inline data")?;
    let far = t.far;
    let (x, y) = (t.end_with(0, RC, most)?, t.end(far, RC)?);
    t.connect(&x, &y, RC, Link::default())?;
    t.connect(&y, &x, RC, Link::default())?;
    Ok((x, y, most))
}

fn inline_data_is_sent(t: &mut Bench) -> Outcome {
    let (x, y, most) = inline_connection(t)?;
    for (wr_id, len) in [(1, 0), (2, 1), (3, most)] {
        let data: Vec<u8> = (0..len).map(|at| at as u8 ^ 0x3c).collect();
        t.receive(&y, wr_id, 0x1000, most)?;
        t.post(&x, &Send::new(wr_id, SEND, &[]).inline(&data))?;
        t.succeeds(&x, "D-WQE-60", wr_id)?;
        let cqe = t.succeeds(&y, "D-WQE-60", wr_id)?;
        t.journal.is("D-CQ-13", "byte_len", cqe.byte_len, len)?;
        let got = t.bytes(&y, 0x1000, len);
        t.journal.same_bytes("D-WQE-60", "message", &got, &data)?;
    }
    let data = vec![0x42; most as usize];
    let write = Send::new(4, RDMA_WRITE, &[]).rdma(y.area, y.mr.rkey).inline(&data);
    t.post(&x, &write)?;
    t.succeeds(&x, "D-WQE-60", 4)?;
    let got = t.bytes(&y, 0, most);
    t.journal.same_bytes("D-WQE-60", "bytes of the WRITE", &got, &data)
}

fn inline_data_is_bounded(t: &mut Bench) -> Outcome {
    let (x, y, most) = inline_connection(t)?;
    let mut both = x.send(1, SEND, 0, 10);
    both.flags |= VIRTIO_RDMA_SEND_INLINE;
    is_wrong(t, (&x, &y), "D-WQE-62", &both, OP_ERR)?;
    let (x, y, _) = inline_connection(t)?;
    let long = Send::new(1, SEND, &[]).inline(&vec![0; most as usize + 1]);
    is_wrong(t, (&x, &y), "D-WQE-63", &long, OP_ERR)?;
    let (x, y, _) = inline_connection(t)?;
    let read = Send::new(1, RDMA_READ, &[]).rdma(y.area, y.mr.rkey).inline(&[0; 8]);
    is_wrong(t, (&x, &y), "D-WQE-64", &read, OP_ERR)?;
    t.journal.pass("D-WQE-61");
    Ok(())
}

fn all_sends_are_signalled(t: &mut Bench) -> Outcome {
    let far = t.far;
    let (x, y) = (t.end(0, RC)?, t.end(far, RC)?);
    let shape = Shape { kind: RC, send_cqn: x.cqn, recv_cqn: x.cqn, signals_all: true, inline: 0 };
    let qpn = t.a().create_qp(x.pdn, &shape)?;
    let x = End { qpn, ..x };
    t.connect(&x, &y, RC, Link::default())?;
    t.connect(&y, &x, RC, Link::default())?;
    for wr_id in 0..4 {
        t.receive(&y, wr_id, 0x1000, 100)?;
        t.post(&x, &x.send(wr_id, SEND, 0, 10).flags(0))?;
    }
    for wr_id in 0..4 {
        t.succeeds(&x, "D-WQE-65", wr_id)?;
        t.succeeds(&y, "D-WQE-68", wr_id)?;
    }
    Ok(())
}

fn unsignalled_sends_are_quiet(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    for wr_id in 0..3 {
        t.receive(&y, wr_id, 0x1000, 100)?;
        t.post(&x, &x.send(wr_id, SEND, 0, 10).flags(0))?;
        t.succeeds(&y, "D-WQE-68", wr_id)?;
    }
    t.is_quiet(&x, "D-WQE-66", "no CQE of unsignalled sends")?;
    let mut bad = x.send(9, SEND, 0, 10).flags(0);
    bad.sges[0].lkey ^= 1;
    t.post(&x, &bad)?;
    t.completes(&x, "D-WQE-67", 9, PROT_ERR)?;
    Ok(())
}

fn fences_wait_for_reads(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    for round in 0..8 {
        // The SEND sends what the READ has brought.
        let there = t.fill(&y, 0, 0x4000);
        t.on(&x).write(x.area, &[0; 0x4000]);
        t.receive(&y, 1, 0x8000, 0x4000)?;
        t.post(&x, &x.rdma(&y, 2, RDMA_READ, 0, 0x4000).flags(0))?;
        let fenced = VIRTIO_RDMA_SEND_SIGNALED | VIRTIO_RDMA_SEND_FENCE;
        t.journal.step(format!("fence {round}"));
        t.post(&x, &x.send(3, SEND, 0, 0x4000).flags(fenced))?;
        t.succeeds(&x, "D-WQE-34", 3)?;
        t.succeeds(&y, "D-WQE-34", 1)?;
        let got = t.bytes(&y, 0x8000, 0x4000);
        t.journal.same_bytes("D-WQE-34", "message behind a fence", &got, &there)?;
    }
    Ok(())
}

fn memory_is_the_owners_again(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    for wr_id in 0..8 {
        let at = wr_id * 0x1000;
        let sent = t.fill(&x, at, 0x1000);
        t.receive(&y, wr_id, at, 0x1000)?;
        t.post(&x, &x.send(wr_id, SEND, at, 0x1000))?;
        t.post(&x, &x.rdma(&y, 100 + wr_id, RDMA_READ, 0x1_0000 + at, 0x1000))?;
        t.succeeds(&y, "D-WQE-70", wr_id)?;
        let got = t.bytes(&y, at, 0x1000);
        t.journal.same_bytes("D-CQ-22", "message when its CQE is there", &got, &sent)?;
        t.on(&y).poison(y.area + at, 0x1000, "D-WQE-71");
        t.succeeds(&x, "D-WQE-70", wr_id)?;
        t.on(&x).poison(x.area + at, 0x1000, "D-WQE-71");
        t.succeeds(&x, "D-WQE-70", 100 + wr_id)?;
        t.on(&x).poison(x.area + 0x1_0000 + at, 0x1000, "D-WQE-71");
    }
    t.on(&x).pause(QUIET)?;
    t.journal.pass("D-WQE-71");
    Ok(())
}

fn atomics_need_their_feature(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let add = x.send(1, VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD, 0, 8);
    let add = add.atomic(y.area, y.mr.rkey, 1, 0);
    is_wrong(t, (&x, &y), "D-WQE-89", &add, OP_ERR)
}
