// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Completion queues: laps, overflow and arming.

use std::mem::offset_of;

use abi::*;
use testkit::{Memory as _, CQE, CQ_HEAD};

use crate::bench::{Bench, End, QUIET};
use crate::objects::Shape;
use crate::outcome::Outcome;
use crate::test::family;

family! {
    cqes_go_round Ends []: "D-CQ-01" "D-CQ-02";
    smallest_cq One []: "D-CQ-02" "D-CQ-01";
    cqes_wait_for_their_owner Ends []: "D-CQ-30" "D-CQ-32";
    overflow_fails_the_cq One []: "D-CQ-30" "D-CQ-32" "D-CQ-33" "D-CQ-34" "D-CQ-35" "D-CQ-36";
    consumer_that_runs_ahead One []: "D-CQ-31" "D-CQ-34";
    cq_in_error_answers_commands One []: "D-CQ-37";
    arm_for_the_next Ends []: "D-CQ-40" "D-CQ-43" "D-CQ-44";
    arm_for_the_solicited Ends []: "D-CQ-41" "D-CQ-42" "D-WQE-35";
    arm_for_an_error One []: "D-CQ-41";
    no_event_without_arming Ends []: "D-CQ-42";
    events_of_other_vectors One []: "D-CQ-44";
    resize_without_its_feature One []: "D-CQ-50";
    resize_moves_cqes One [VIRTIO_RDMA_F_CQ_RESIZE]:
        "D-CQ-51" "D-CQ-52" "D-CQ-53" "D-CQ-54" "D-RING-38";
    resize_that_does_not_fit One [VIRTIO_RDMA_F_CQ_RESIZE]: "D-CQ-56";
    resize_keeps_what_is_armed One [VIRTIO_RDMA_F_CQ_RESIZE]: "D-CQ-55";
}

const SEND: u32 = VIRTIO_RDMA_WR_SEND;
const RC: u32 = VIRTIO_RDMA_QPT_RC;
const ERR: u32 = VIRTIO_RDMA_QPS_ERR;

fn cqes_go_round(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    // More than three times the depth of the CQs. poll() checks laps and indices.
    for wr_id in 0..200 {
        t.receive(&y, wr_id, 0x1000, 16)?;
        t.post(&x, &x.send(wr_id, SEND, 0, 16))?;
        t.succeeds(&x, "D-CQ-01", wr_id)?;
        t.succeeds(&y, "D-CQ-02", wr_id)?;
    }
    Ok(())
}

/// Makes a QP in INIT whose receives complete in a CQ of their own, with so many places.
fn end_with_cq(t: &mut Bench, depth: u32) -> Outcome<End> {
    let x = t.end(0, RC)?;
    let cqn = t.a().create_cq(depth)?;
    let shape = Shape { kind: RC, send_cqn: cqn, recv_cqn: cqn, signals_all: false, inline: 0 };
    let qpn = t.a().create_qp(x.pdn, &shape)?;
    let x = End { cqn, qpn, ..x };
    t.make_init(&x, RC, 0)?;
    Ok(x)
}

fn smallest_cq(t: &mut Bench) -> Outcome {
    let x = end_with_cq(t, 1)?;
    t.a().set_state(x.qpn, ERR)?;
    for wr_id in 0..5 {
        t.receive(&x, wr_id, 0, 16)?;
        t.completes(&x, "D-CQ-02", wr_id, VIRTIO_RDMA_WC_WR_FLUSH_ERR)?;
    }
    t.journal.pass("D-CQ-01");
    Ok(())
}

fn cqes_wait_for_their_owner(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    for wr_id in 0..10 {
        t.receive(&y, wr_id, 0x1000, 16)?;
        t.post(&x, &x.send(wr_id, SEND, 0, 16))?;
        t.succeeds(&x, "D-CQ-30", wr_id)?;
    }
    t.on(&y).pause(QUIET)?;
    for wr_id in 0..10 {
        t.succeeds(&y, "D-CQ-32", wr_id)?;
    }
    Ok(())
}

/// Flushes so many receives of a QP with CQ places for four.
fn flush(t: &mut Bench, count: u64) -> Outcome<End> {
    let x = end_with_cq(t, 4)?;
    t.a().set_state(x.qpn, ERR)?;
    for wr_id in 0..count {
        t.receive(&x, wr_id, 0, 16)?;
    }
    Ok(x)
}

fn overflow_fails_the_cq(t: &mut Bench) -> Outcome {
    let x = end_with_cq(t, 4)?;
    // Another QP uses the CQ, and has done nothing.
    let shape = Shape { kind: RC, send_cqn: x.cqn, recv_cqn: x.cqn, signals_all: false, inline: 0 };
    let qpn = t.a().create_qp(x.pdn, &shape)?;
    let other = End { qpn, ..x };
    t.make_init(&other, RC, 0)?;
    t.a().set_state(x.qpn, ERR)?;
    for wr_id in 0..6 {
        t.receive(&x, wr_id, 0, 16)?;
    }
    t.journal.about("D-CQ-34");
    t.a().await_event(VIRTIO_RDMA_EVENT_CQ_ERR, x.cqn, "event CQ_ERR")?;
    t.journal.about("D-CQ-35");
    t.a().await_event(VIRTIO_RDMA_EVENT_QP_FATAL, other.qpn, "event QP_FATAL of the other QP")?;
    t.comes_to(&other, "D-CQ-35", ERR)?;
    for wr_id in 0..4 {
        t.completes(&x, "D-CQ-32", wr_id, VIRTIO_RDMA_WC_WR_FLUSH_ERR)?;
    }
    t.journal.pass("D-CQ-30");
    t.receive(&other, 9, 0, 16)?;
    t.is_quiet(&x, "D-CQ-36", "later CQEs are dropped")?;
    t.journal.pass("D-CQ-33");
    Ok(())
}

fn consumer_that_runs_ahead(t: &mut Bench) -> Outcome {
    let x = end_with_cq(t, 4)?;
    let region = t.a().cqs[&x.cqn].ring.region;
    t.a().write(region, &100_u32.to_le_bytes());
    t.a().set_state(x.qpn, ERR)?;
    // The device may read it as late as when all places are taken.
    for wr_id in 0..6 {
        t.receive(&x, wr_id, 0, 16)?;
    }
    t.journal.about("D-CQ-31");
    t.a().await_event(VIRTIO_RDMA_EVENT_CQ_ERR, x.cqn, "event CQ_ERR")?;
    t.journal.pass("D-CQ-34");
    Ok(())
}

fn cq_in_error_answers_commands(t: &mut Bench) -> Outcome {
    let x = flush(t, 6)?;
    t.journal.about("D-CQ-34");
    t.a().await_event(VIRTIO_RDMA_EVENT_CQ_ERR, x.cqn, "event CQ_ERR")?;
    let shape = Shape { kind: RC, send_cqn: x.cqn, recv_cqn: x.cqn, signals_all: false, inline: 0 };
    let qpn = t.a().create_qp(x.pdn, &shape)?;
    let request = virtio_rdma_cmd_destroy_cq { cqn: x.cqn };
    let name = ("DESTROY_CQ", VIRTIO_RDMA_CMD_DESTROY_CQ);
    t.a().fails::<_, ()>("D-CQ-37", name, &request, VIRTIO_RDMA_STATUS_BUSY)?;
    t.a().destroy_qp(qpn)?;
    t.a().destroy_qp(x.qpn)?;
    t.a().destroy_cq(x.cqn)
}

/// Sends a message whose receive completes in the CQ of `y`.
fn message(t: &mut Bench, (x, y): (&End, &End), wr_id: u64, flags: u32) -> Outcome {
    t.receive(y, wr_id, 0x1000, 16)?;
    t.post(x, &x.send(wr_id, SEND, 0, 16).flags(flags))?;
    t.succeeds(y, "D-CQ-01", wr_id)?;
    Ok(())
}

/// Checks that no completion event of a CQ comes.
fn no_event(t: &mut Bench, y: &End, clause: &'static str) -> Outcome {
    t.on(y).pause(QUIET)?;
    t.on(y).take_events()?;
    let events: Vec<_> =
        t.on(y).completion_events.iter().filter(|it| it.1 == y.cqn).copied().collect();
    t.journal.holds(clause, "no completion event", events.is_empty(), &events)
}

fn arm_for_the_next(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    for wr_id in 0..3 {
        t.on(&y).arm(y.cqn, false);
        message(t, (&x, &y), 10 + wr_id, 0)?;
        t.journal.about("D-CQ-40");
        let vector = t.on(&y).await_completion_event(y.cqn, "completion event")?;
        let expected = t.on(&y).vectors() - 1;
        t.journal.is("D-CQ-44", "vector of the event", vector, expected)?;
        t.journal.pass("D-CQ-40");
        // One event disarms.
        message(t, (&x, &y), 20 + wr_id, 0)?;
        no_event(t, &y, "D-CQ-43")?;
    }
    Ok(())
}

fn arm_for_the_solicited(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    t.on(&y).arm(y.cqn, true);
    message(t, (&x, &y), 1, 0)?;
    no_event(t, &y, "D-CQ-42")?;
    message(t, (&x, &y), 2, VIRTIO_RDMA_SEND_SOLICITED)?;
    t.journal.about("D-CQ-41");
    t.on(&y).await_completion_event(y.cqn, "completion event of a solicited CQE")?;
    t.journal.pass("D-CQ-41");
    t.journal.pass("D-WQE-35");
    message(t, (&x, &y), 3, VIRTIO_RDMA_SEND_SOLICITED)?;
    no_event(t, &y, "D-CQ-42")
}

fn arm_for_an_error(t: &mut Bench) -> Outcome {
    let x = end_with_cq(t, 4)?;
    t.a().arm(x.cqn, true);
    t.a().set_state(x.qpn, ERR)?;
    t.receive(&x, 1, 0, 16)?;
    t.journal.about("D-CQ-41");
    t.a().await_completion_event(x.cqn, "completion event of an error")?;
    t.journal.pass("D-CQ-41");
    Ok(())
}

fn no_event_without_arming(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    message(t, (&x, &y), 1, VIRTIO_RDMA_SEND_SOLICITED)?;
    no_event(t, &y, "D-CQ-42")
}

fn events_of_other_vectors(t: &mut Bench) -> Outcome {
    let vectors = u32::from(t.a().vectors());
    for vector in 0..vectors.min(4) {
        let x = t.end(0, RC)?;
        let (at, mut request) = t.a().cq_request(16);
        request.comp_vector = vector;
        let (name, number) = ("CREATE_RING_CQ", VIRTIO_RDMA_CMD_CREATE_RING_CQ);
        let reply: virtio_rdma_rsp_create_cq =
            t.a().command("D-CTRL-32", name, number, &request)?;
        t.a().note_cq(reply.cqn, at, 16);
        let shape = Shape {
            kind: RC,
            send_cqn: reply.cqn,
            recv_cqn: reply.cqn,
            signals_all: false,
            inline: 0,
        };
        let qpn = t.a().create_qp(x.pdn, &shape)?;
        let x = End { qpn, cqn: reply.cqn, ..x };
        t.make_init(&x, RC, 0)?;
        t.a().arm(x.cqn, false);
        t.a().set_state(x.qpn, ERR)?;
        t.receive(&x, 1, 0, 16)?;
        t.journal.about("D-CQ-44");
        let came = t.a().await_completion_event(x.cqn, "completion event")?;
        t.journal.is("D-CQ-44", "vector of the event", u32::from(came), vector)?;
    }
    Ok(())
}

fn resize_without_its_feature(t: &mut Bench) -> Outcome {
    let x = t.end(0, RC)?;
    let (_, new) = t.a().cq_request(32);
    let request = virtio_rdma_cmd_resize_cq { region: new.region, cqe: 32, cqn: x.cqn };
    let name = ("RESIZE_CQ", VIRTIO_RDMA_CMD_RESIZE_CQ);
    let unsupported = VIRTIO_RDMA_STATUS_UNSUPPORTED;
    t.a().fails::<_, virtio_rdma_rsp_resize_cq>("D-CQ-50", name, &request, unsupported)
}

/// Returns the request that moves a CQ to a ring of so many places, and the address of the ring.
fn resize_request(t: &mut Bench, cqn: u32, depth: u32) -> (u64, virtio_rdma_cmd_resize_cq) {
    let (at, new) = t.a().cq_request(depth);
    (at, virtio_rdma_cmd_resize_cq { region: new.region, cqe: depth, cqn })
}

fn resize_moves_cqes(t: &mut Bench) -> Outcome {
    let x = flush(t, 3)?;
    t.completes(&x, "D-CQ-01", 0, VIRTIO_RDMA_WC_WR_FLUSH_ERR)?;
    t.a().pause(QUIET)?;
    let (at, request) = resize_request(t, x.cqn, 16);
    let (name, number) = ("RESIZE_CQ", VIRTIO_RDMA_CMD_RESIZE_CQ);
    let reply: virtio_rdma_rsp_resize_cq = t.a().command("D-CQ-51", name, number, &request)?;
    t.journal.is("D-CQ-53", "moved", reply.moved, 2)?;
    let consumer: u32 = t.a().memory.map.get(at);
    t.journal.is("D-CQ-54", "consumer of the new head", consumer, 0)?;
    let laps: Vec<u32> = (0..3)
        .map(|index| at + CQ_HEAD + index * CQE + offset_of!(virtio_rdma_ring_cqe, lap) as u64)
        .map(|lap| t.a().memory.map.get(lap))
        .collect();
    t.journal.is("D-CQ-51", "laps in the new ring", laps, vec![1, 1, 0])?;
    let old = t.a().move_cq(x.cqn, at, 16);
    t.a().freeze(old, 128 + 4 * 64, "D-RING-38");
    for wr_id in [1, 2] {
        t.completes(&x, "D-CQ-51", wr_id, VIRTIO_RDMA_WC_WR_FLUSH_ERR)?;
    }
    for wr_id in 10..14 {
        t.receive(&x, wr_id, 0, 16)?;
        t.completes(&x, "D-CQ-52", wr_id, VIRTIO_RDMA_WC_WR_FLUSH_ERR)?;
    }
    t.journal.pass("D-RING-38");
    Ok(())
}

fn resize_that_does_not_fit(t: &mut Bench) -> Outcome {
    let x = flush(t, 3)?;
    t.a().pause(QUIET)?;
    let (_, request) = resize_request(t, x.cqn, 2);
    let name = ("RESIZE_CQ", VIRTIO_RDMA_CMD_RESIZE_CQ);
    let invalid = VIRTIO_RDMA_STATUS_INVAL;
    t.a().fails::<_, virtio_rdma_rsp_resize_cq>("D-CQ-56", name, &request, invalid)?;
    t.receive(&x, 3, 0, 16)?;
    for wr_id in 0..4 {
        t.completes(&x, "D-CQ-56", wr_id, VIRTIO_RDMA_WC_WR_FLUSH_ERR)?;
    }
    Ok(())
}

fn resize_keeps_what_is_armed(t: &mut Bench) -> Outcome {
    let x = flush(t, 0)?;
    t.a().arm(x.cqn, false);
    let (at, request) = resize_request(t, x.cqn, 16);
    let (name, number) = ("RESIZE_CQ", VIRTIO_RDMA_CMD_RESIZE_CQ);
    let _: virtio_rdma_rsp_resize_cq = t.a().command("D-CQ-51", name, number, &request)?;
    let arm: u32 = t.a().memory.map.get(at + 64);
    t.journal.is("D-CQ-55", "arm_next of the new head", arm, 1)?;
    t.a().move_cq(x.cqn, at, 16);
    t.receive(&x, 1, 0, 16)?;
    t.journal.about("D-CQ-55");
    t.a().await_completion_event(x.cqn, "completion event of what was armed before")?;
    t.journal.pass("D-CQ-55");
    Ok(())
}
