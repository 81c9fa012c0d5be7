// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory that is no longer memory of the guest, while objects have it.

use abi::*;
use testkit::command::{self, PAGE};
use testkit::{Send, LOCAL, READ, WRITE};

use crate::bench::{Bench, End, Link};
use crate::driver::Driver;
use crate::objects::Shape;
use crate::outcome::Outcome;
use crate::test::family;

family! {
    keys_of_an_mr_that_is_away Ends []: "D-MR-37" "D-MR-36" "D-MR-38" "D-MR-39";
    local_keys_of_an_mr_that_is_away One []: "D-MR-37" "D-MR-38";
    a_qp_whose_rings_are_away_fails Ends []: "D-RING-40" "D-RING-39";
    a_qp_in_reset_does_not_fail One []: "D-RING-40";
    a_cq_whose_ring_is_away_fails One []: "D-RING-41" "D-RING-39";
    a_cq_whose_ring_is_away_is_not_resized One [VIRTIO_RDMA_F_CQ_RESIZE]: "D-CQ-38";
    an_srq_whose_ring_is_away_fails One [VIRTIO_RDMA_F_SRQ]: "D-RING-42" "D-RING-39" "D-SRQ-78";
}

const RC: u32 = VIRTIO_RDMA_QPT_RC;
const SEND: u32 = VIRTIO_RDMA_WR_SEND;
const RDMA_WRITE: u32 = VIRTIO_RDMA_WR_RDMA_WRITE;

/// Writes 100 bytes from x by a key, and returns the status.
fn write(
    t: &mut Bench,
    x: &End,
    wr_id: u64,
    (at, key): (u64, u32),
    status: u32,
    clause: &'static str,
) -> Outcome {
    let send = x.send(wr_id, RDMA_WRITE, 0, 100).rdma(at, key);
    t.post(x, &send)?;
    t.completes(x, clause, wr_id, status).map(|_| ())
}

/// Connects other QPs with the objects of two ends.
fn other_connection(t: &mut Bench, x: &End, y: &End) -> Outcome<(End, End)> {
    let (x, y) = (t.add_qp(x, RC, 0)?, t.add_qp(y, RC, 0)?);
    t.connect(&x, &y, RC, Link::default())?;
    t.connect(&y, &x, RC, Link::default())?;
    Ok((x, y))
}

fn keys_of_an_mr_that_is_away(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let at = t.on(&y).spare();
    let mr = t.on(&y).reg_mr(y.pdn, at, PAGE, READ | WRITE | LOCAL)?;
    let ok = VIRTIO_RDMA_WC_SUCCESS;
    write(t, &x, 1, (at, mr.rkey), ok, "D-WQE-30")?;
    t.on(&y).set_spare(false)?;
    t.on(&y).freeze(at, PAGE as usize, "D-MR-37");
    write(t, &x, 2, (y.area, y.mr.rkey), ok, "D-MR-39")?;
    write(t, &x, 3, (at, mr.rkey), VIRTIO_RDMA_WC_REM_ACCESS_ERR, "D-MR-37")?;
    t.on(&y).check_frozen()?;
    t.on(&y).unfreeze(at, PAGE as usize);
    t.on(&y).set_spare(true)?;
    let sent = t.fill(&x, 0, 100);
    let (x, y) = other_connection(t, &x, &y)?;
    write(t, &x, 4, (at, mr.rkey), ok, "D-MR-38")?;
    let got = t.on(&y).bytes(at, 100);
    t.journal.same_bytes("D-MR-38", "bytes of the MR", &got, &sent)?;
    t.on(&y).dereg_mr(mr.mrn)?;
    t.journal.pass("D-MR-36");
    Ok(())
}

fn local_keys_of_an_mr_that_is_away(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let at = t.a().spare();
    let mr = t.a().reg_mr(x.pdn, at, PAGE, LOCAL)?;
    let part = [testkit::sge(at, 100, mr.lkey)];
    let send = Send::new(1, RDMA_WRITE, &part).rdma(y.area, y.mr.rkey);
    t.a().set_spare(false)?;
    t.post(&x, &send)?;
    t.completes(&x, "D-MR-37", 1, VIRTIO_RDMA_WC_LOC_PROT_ERR)?;
    t.a().set_spare(true)?;
    let (x, _) = other_connection(t, &x, &y)?;
    t.post(&x, &send)?;
    t.succeeds(&x, "D-MR-38", 1)?;
    Ok(())
}

/// Returns the page table of rings in the memory that the device can lose, and their address.
fn spare_pages(a: &mut Driver, region: virtio_rdma_ring_region) -> (u64, virtio_rdma_ring_region) {
    let at = a.spare();
    let pages: Vec<u64> = (0..u64::from(region.npages)).map(|page| at + page * PAGE).collect();
    (at, command::region(a.table(&pages), region.npages))
}

/// Makes a QP whose rings the device can lose, with the objects of an end.
fn spare_qp(t: &mut Bench, x: &End) -> Outcome<End> {
    let shape = Shape { kind: RC, send_cqn: x.cqn, recv_cqn: x.cqn, signals_all: false, inline: 0 };
    let a = t.on(x);
    let (_, mut request) = a.qp_request(x.pdn, &shape);
    let (at, region) = spare_pages(a, request.region);
    request.region = region;
    let qpn = a.create_qp_of(at, &request)?;
    Ok(End { qpn, ..*x })
}

fn a_qp_whose_rings_are_away_fails(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let z = spare_qp(t, &x)?;
    t.make_init(&z, RC, 0)?;
    t.on(&x).set_spare(false)?;
    t.journal.about("D-RING-40");
    t.on(&x).await_event(VIRTIO_RDMA_EVENT_QP_FATAL, z.qpn, "event QP_FATAL")?;
    t.has_state(&z, "D-RING-40", VIRTIO_RDMA_QPS_ERR)?;
    t.journal.pass("D-RING-39");
    // The other objects go on.
    t.receive(&y, 1, 0x1000, 100)?;
    t.post(&x, &x.send(2, SEND, 0, 100))?;
    t.succeeds(&x, "D-RING-40", 2)?;
    t.succeeds(&y, "D-RING-40", 1)?;
    Ok(())
}

fn a_qp_in_reset_does_not_fail(t: &mut Bench) -> Outcome {
    let x = t.end(0, RC)?;
    let z = spare_qp(t, &x)?;
    t.a().set_spare(false)?;
    t.a().pause(crate::bench::QUIET)?;
    let has_event = t.a().has_event(VIRTIO_RDMA_EVENT_QP_FATAL, z.qpn)?;
    t.journal.is("D-RING-40", "QP_FATAL of a QP in RESET", has_event, false)?;
    t.has_state(&z, "D-RING-40", VIRTIO_RDMA_QPS_RESET)
}

/// Makes a CQ whose ring the device can lose.
fn spare_cq(a: &mut Driver) -> Outcome<u32> {
    let (_, mut request) = a.cq_request(16);
    let (at, region) = spare_pages(a, request.region);
    request.region = region;
    let (name, number) = ("CREATE_RING_CQ", VIRTIO_RDMA_CMD_CREATE_RING_CQ);
    let reply: virtio_rdma_rsp_create_cq = a.command("D-CTRL-32", name, number, &request)?;
    a.note_cq(reply.cqn, at, 16);
    Ok(reply.cqn)
}

/// Takes the memory of a CQ away, and waits for its error.
fn lose_cq(a: &mut Driver, cqn: u32) -> Outcome {
    a.set_spare(false)?;
    a.journal.about("D-RING-41");
    a.await_event(VIRTIO_RDMA_EVENT_CQ_ERR, cqn, "event CQ_ERR")
}

fn a_cq_whose_ring_is_away_fails(t: &mut Bench) -> Outcome {
    let x = t.end(0, RC)?;
    let cqn = spare_cq(t.a())?;
    let z = t.add_qp(&End { cqn, ..x }, RC, 0)?;
    t.make_init(&z, RC, 0)?;
    lose_cq(t.a(), cqn)?;
    // As after an overflow, its QPs fail, and no other one.
    t.journal.about("D-RING-41");
    t.a().await_event(VIRTIO_RDMA_EVENT_QP_FATAL, z.qpn, "event QP_FATAL")?;
    t.comes_to(&z, "D-RING-41", VIRTIO_RDMA_QPS_ERR)?;
    t.has_state(&x, "D-RING-41", VIRTIO_RDMA_QPS_RESET)?;
    t.journal.pass("D-RING-39");
    Ok(())
}

fn a_cq_whose_ring_is_away_is_not_resized(t: &mut Bench) -> Outcome {
    let cqn = spare_cq(t.a())?;
    lose_cq(t.a(), cqn)?;
    let a = t.a();
    let (_, other) = a.cq_request(32);
    let request = virtio_rdma_cmd_resize_cq { region: other.region, cqe: 32, cqn };
    let name = ("RESIZE_CQ", VIRTIO_RDMA_CMD_RESIZE_CQ);
    let invalid = VIRTIO_RDMA_STATUS_INVAL;
    a.fails::<_, virtio_rdma_rsp_resize_cq>("D-CQ-38", name, &request, invalid)
}

fn an_srq_whose_ring_is_away_fails(t: &mut Bench) -> Outcome {
    let x = t.end(0, RC)?;
    let a = t.a();
    let (_, mut request) = a.srq_request(x.pdn, 16);
    let (at, region) = spare_pages(a, request.region);
    request.region = region;
    let srqn = a.create_srq_of(at, &request)?;
    let shape = Shape { kind: RC, send_cqn: x.cqn, recv_cqn: x.cqn, signals_all: false, inline: 0 };
    let qpn = a.create_srq_qp(x.pdn, &shape, srqn)?;
    t.make_init(&End { qpn, ..x }, RC, 0)?;
    t.a().set_spare(false)?;
    t.journal.about("D-RING-42");
    t.a().await_event(VIRTIO_RDMA_EVENT_SRQ_ERR, srqn, "event SRQ_ERR")?;
    t.comes_to(&End { qpn, ..x }, "D-RING-42", VIRTIO_RDMA_QPS_ERR)?;
    t.journal.pass("D-RING-39");
    t.journal.pass("D-SRQ-78");
    Ok(())
}
