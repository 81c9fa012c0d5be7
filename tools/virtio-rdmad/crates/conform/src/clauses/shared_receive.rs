// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Shared receive queues.

use abi::*;

use crate::bench::{Bench, Change, End, Link};
use crate::driver::Driver;
use crate::objects::Shape;
use crate::outcome::Outcome;
use crate::test::family;

family! {
    srqs_are_made One [VIRTIO_RDMA_F_SRQ]: "D-SRQ-06" "D-SRQ-02" "D-SRQ-01" "D-SRQ-08" "D-SRQ-09";
    srqs_are_refused One [VIRTIO_RDMA_F_SRQ]:
        "D-SRQ-12" "D-SRQ-13" "D-SRQ-14" "D-SRQ-16" "D-SRQ-17" "D-SRQ-27" "D-SRQ-28" "D-SRQ-29";
    qps_share_receives Ends [VIRTIO_RDMA_F_SRQ]: "D-SRQ-35" "D-SRQ-38" "D-SRQ-39" "D-SRQ-37" "D-SRQ-25";
    srq_is_busy One [VIRTIO_RDMA_F_SRQ]: "D-SRQ-19";
    limit_is_told Ends [VIRTIO_RDMA_F_SRQ]: "D-SRQ-50" "D-SRQ-52" "D-SRQ-07";
    limit_above_what_waits One [VIRTIO_RDMA_F_SRQ]: "D-SRQ-51" "D-SRQ-53";
    messages_wait_for_the_srq Ends [VIRTIO_RDMA_F_SRQ]: "D-SRQ-40" "D-SRQ-42";
    last_receive_is_told One [VIRTIO_RDMA_F_SRQ]: "D-SRQ-57" "D-SRQ-59" "D-SRQ-55";
    srq_producer_too_far_ahead One [VIRTIO_RDMA_F_SRQ]: "D-SRQ-76" "D-SRQ-79" "D-SRQ-81" "D-SRQ-18";
    resize_moves_receives One [VIRTIO_RDMA_F_SRQ_RESIZE]:
        "D-SRQ-65" "D-SRQ-66" "D-SRQ-69" "D-SRQ-70" "D-SRQ-10" "D-RING-38";
    resize_that_is_refused One [VIRTIO_RDMA_F_SRQ_RESIZE]: "D-SRQ-22" "D-SRQ-23" "D-SRQ-71" "D-SRQ-16";
    srqs_without_their_feature One []: "D-SRQ-03" "D-SRQ-04";
}

const SEND: u32 = VIRTIO_RDMA_WR_SEND;
const RC: u32 = VIRTIO_RDMA_QPT_RC;
const DEPTH: u32 = 16;
const NO_OBJECT: u32 = VIRTIO_RDMA_STATUS_NO_OBJECT;
const INVALID: u32 = VIRTIO_RDMA_STATUS_INVAL;

const CREATE_SRQ: (&str, u32) = ("CREATE_SRQ", VIRTIO_RDMA_CMD_CREATE_SRQ);
const MODIFY_SRQ: (&str, u32) = ("MODIFY_SRQ", VIRTIO_RDMA_CMD_MODIFY_SRQ);
const QUERY_SRQ: (&str, u32) = ("QUERY_SRQ", VIRTIO_RDMA_CMD_QUERY_SRQ);
const DESTROY_SRQ: (&str, u32) = ("DESTROY_SRQ", VIRTIO_RDMA_CMD_DESTROY_SRQ);
const CREATE_RING_QP: (&str, u32) = ("CREATE_RING_QP", VIRTIO_RDMA_CMD_CREATE_RING_QP);

fn query(a: &mut Driver, srqn: u32) -> Outcome<virtio_rdma_rsp_query_srq> {
    let request = virtio_rdma_cmd_query_srq { srqn };
    a.command("D-SRQ-08", QUERY_SRQ.0, QUERY_SRQ.1, &request)
}

fn set_limit(a: &mut Driver, srqn: u32, srq_limit: u32) -> Outcome {
    let request = virtio_rdma_cmd_modify_srq { srqn, srq_limit };
    a.command("D-SRQ-07", MODIFY_SRQ.0, MODIFY_SRQ.1, &request)
}

fn destroy(a: &mut Driver, srqn: u32) -> Outcome {
    let request = virtio_rdma_cmd_destroy_srq { srqn };
    let () = a.command("D-SRQ-09", DESTROY_SRQ.0, DESTROY_SRQ.1, &request)?;
    if let Some(srq) = a.srqs.remove(&srqn) {
        a.freeze(srq.ring.region, 256, "D-SRQ-09");
    }
    Ok(())
}

fn shape(cqn: u32) -> Shape {
    Shape { kind: RC, send_cqn: cqn, recv_cqn: cqn, signals_all: false, inline: 0 }
}

/// Makes a connection whose far end receives from an SRQ. Returns the number of the SRQ, too.
fn shared(t: &mut Bench, link: Link) -> Outcome<(End, End, u32)> {
    let far = t.far;
    let (x, y) = (t.end(0, RC)?, t.end(far, RC)?);
    let srqn = t.on(&y).create_srq(y.pdn, DEPTH)?;
    let y = share(t, &y, srqn)?;
    t.connect(&x, &y, RC, link)?;
    t.connect(&y, &x, RC, Link::default())?;
    Ok((x, y, srqn))
}

/// Makes another QP with what an end has, which receives from an SRQ.
fn share(t: &mut Bench, y: &End, srqn: u32) -> Outcome<End> {
    let qpn = t.on(y).create_srq_qp(y.pdn, &shape(y.cqn), srqn)?;
    Ok(End { qpn, ..*y })
}

/// Posts a receive to an SRQ.
fn receive(t: &mut Bench, y: &End, srqn: u32, wr_id: u64) -> Outcome {
    let sges = [y.sge(0x100 * wr_id, 0x100)];
    t.on(y).post_srq_recv(srqn, wr_id, &sges)
}

fn srqs_are_made(t: &mut Bench) -> Outcome {
    let a = t.a();
    let most = a.config.max_srq_wr;
    a.journal.holds("D-SRQ-01", "max_srq_wr is a power of two", most.is_power_of_two(), most)?;
    let pdn = a.create_pd()?;
    let srqn = a.create_srq(pdn, DEPTH)?;
    let got = query(a, srqn)?;
    a.journal.is("D-SRQ-08", "max_wr and srq_limit", (got.max_wr, got.srq_limit), (DEPTH, 0))?;
    destroy(a, srqn)?;
    let request = virtio_rdma_cmd_query_srq { srqn };
    a.fails::<_, virtio_rdma_rsp_query_srq>("D-SRQ-09", QUERY_SRQ, &request, NO_OBJECT)
}

fn srqs_are_refused(t: &mut Bench) -> Outcome {
    let x = t.end(0, RC)?;
    let a = t.a();
    let most = a.config.max_srq_sge;
    let (_, good) = a.srq_request(x.pdn, DEPTH);
    let cases: Vec<(&'static str, u32, Change<virtio_rdma_cmd_create_srq>)> = vec![
        ("D-SRQ-12", NO_OBJECT, Box::new(|it| it.pdn = u32::MAX)),
        ("D-SRQ-13", INVALID, Box::new(|it| it.ring.depth = 3)),
        ("D-SRQ-13", INVALID, Box::new(|it| it.ring.depth = 0)),
        ("D-SRQ-13", INVALID, Box::new(|it| it.ring.stride = 16)),
        ("D-SRQ-13", INVALID, Box::new(|it| it.region.npages = 0)),
        ("D-SRQ-14", INVALID, Box::new(move |it| it.max_sge = most + 1)),
    ];
    for (clause, status, change) in cases {
        let mut request = good;
        change(&mut request);
        a.fails::<_, virtio_rdma_rsp_create_srq>(clause, CREATE_SRQ, &request, status)?;
    }
    let srqn = u32::MAX;
    let modify = virtio_rdma_cmd_modify_srq { srqn, srq_limit: 1 };
    a.fails::<_, ()>("D-SRQ-16", MODIFY_SRQ, &modify, NO_OBJECT)?;
    let gone = virtio_rdma_cmd_destroy_srq { srqn };
    a.fails::<_, ()>("D-SRQ-16", DESTROY_SRQ, &gone, NO_OBJECT)?;
    let srqn = a.create_srq(x.pdn, DEPTH)?;
    let modify = virtio_rdma_cmd_modify_srq { srqn, srq_limit: DEPTH + 1 };
    a.fails::<_, ()>("D-SRQ-17", MODIFY_SRQ, &modify, INVALID)?;
    let (_, mut request) = a.qp_request(x.pdn, &shape(x.cqn));
    request.srqn = srqn;
    a.fails::<_, virtio_rdma_rsp_create_qp>("D-SRQ-28", CREATE_RING_QP, &request, INVALID)?;
    request.rq = zerocopy::FromZeros::new_zeroed();
    request.base.max_recv_wr = 0;
    request.srqn = u32::MAX;
    a.fails::<_, virtio_rdma_rsp_create_qp>("D-SRQ-27", CREATE_RING_QP, &request, NO_OBJECT)?;
    (request.srqn, request.base.qp_type) = (srqn, VIRTIO_RDMA_QPT_GSI as u8);
    a.fails::<_, virtio_rdma_rsp_create_qp>("D-SRQ-29", CREATE_RING_QP, &request, INVALID)
}

fn qps_share_receives(t: &mut Bench) -> Outcome {
    let (x, y, srqn) = shared(t, Link::default())?;
    let v = t.add_qp(&x, RC, 0)?;
    let w = share(t, &y, srqn)?;
    t.connect(&v, &w, RC, Link::default())?;
    t.connect(&w, &v, RC, Link::default())?;
    for wr_id in 0..6 {
        receive(t, &y, srqn, wr_id)?;
    }
    for wr_id in 0..6 {
        let (from, to) = if wr_id % 2 == 0 { (&x, &y) } else { (&v, &w) };
        t.post(from, &from.send(wr_id, SEND, 0x8000, 0x80))?;
        t.succeeds(from, "D-SRQ-25", wr_id)?;
        let cqe = t.succeeds(to, "D-SRQ-35", wr_id)?;
        t.journal.is("D-SRQ-38", "qp_num", cqe.qp_num, to.qpn)?;
        t.journal.is("D-SRQ-39", "wqe_index", u64::from(cqe.wqe_index), wr_id)?;
    }
    let driver = t.on(&y);
    let consumer = driver.srqs[&srqn].ring.consumer(&driver.memory.map);
    t.journal.is("D-SRQ-37", "consumer", consumer, 6)
}

fn srq_is_busy(t: &mut Bench) -> Outcome {
    let (_, y, srqn) = shared(t, Link::default())?;
    let request = virtio_rdma_cmd_destroy_srq { srqn };
    t.a().fails::<_, ()>("D-SRQ-19", DESTROY_SRQ, &request, VIRTIO_RDMA_STATUS_BUSY)?;
    t.a().destroy_qp(y.qpn)?;
    destroy(t.a(), srqn)
}

fn limit_is_told(t: &mut Bench) -> Outcome {
    let (x, y, srqn) = shared(t, Link::default())?;
    for wr_id in 0..3 {
        receive(t, &y, srqn, wr_id)?;
    }
    set_limit(t.on(&y), srqn, 2)?;
    for wr_id in 0..2 {
        t.post(&x, &x.send(wr_id, SEND, 0x8000, 0x80))?;
        t.succeeds(&y, "D-SRQ-35", wr_id)?;
    }
    t.journal.about("D-SRQ-50");
    t.on(&y).await_event(VIRTIO_RDMA_EVENT_SRQ_LIMIT_REACHED, srqn, "event SRQ_LIMIT_REACHED")?;
    let got = query(t.on(&y), srqn)?;
    t.journal.is("D-SRQ-52", "srq_limit after the event", got.srq_limit, 0)
}

fn limit_above_what_waits(t: &mut Bench) -> Outcome {
    let (_, y, srqn) = shared(t, Link::default())?;
    receive(t, &y, srqn, 1)?;
    let early = t.a().has_event(VIRTIO_RDMA_EVENT_SRQ_LIMIT_REACHED, srqn)?;
    t.journal.is("D-SRQ-53", "SRQ_LIMIT_REACHED without a limit", early, false)?;
    set_limit(t.a(), srqn, 2)?;
    t.journal.about("D-SRQ-51");
    t.a().await_event(VIRTIO_RDMA_EVENT_SRQ_LIMIT_REACHED, srqn, "event SRQ_LIMIT_REACHED")
}

fn messages_wait_for_the_srq(t: &mut Bench) -> Outcome {
    let (x, y, srqn) = shared(t, Link { rnr_retry: 7, ..Link::default() })?;
    t.post(&x, &x.send(1, SEND, 0x8000, 0x80))?;
    let wake = t.on(&y).srqs[&srqn].ring.region + 128;
    t.journal.about("D-SRQ-40");
    t.on(&y).wait("the wake word of the SRQ", |driver| {
        let word: u32 = testkit::Memory::get(&driver.memory.map, wake);
        Ok((word != 0).then_some(()))
    })?;
    t.journal.pass("D-SRQ-40");
    receive(t, &y, srqn, 2)?;
    t.succeeds(&y, "D-SRQ-42", 2)?;
    t.succeeds(&x, "D-SRQ-42", 1)?;
    Ok(())
}

fn last_receive_is_told(t: &mut Bench) -> Outcome {
    let (x, y, srqn) = shared(t, Link::default())?;
    receive(t, &y, srqn, 1)?;
    t.on(&y).set_state(y.qpn, VIRTIO_RDMA_QPS_ERR)?;
    t.journal.about("D-SRQ-57");
    t.on(&y).await_event(
        VIRTIO_RDMA_EVENT_QP_LAST_WQE_REACHED,
        y.qpn,
        "event QP_LAST_WQE_REACHED",
    )?;
    t.is_quiet(&y, "D-SRQ-59", "receives of the SRQ are not flushed")?;
    t.post(&x, &x.send(2, SEND, 0x8000, 0x80))?;
    t.completes(&x, "D-SRQ-55", 2, VIRTIO_RDMA_WC_RETRY_EXC_ERR)?;
    Ok(())
}

fn srq_producer_too_far_ahead(t: &mut Bench) -> Outcome {
    let (x, y, srqn) = shared(t, Link { rnr_retry: 7, ..Link::default() })?;
    let region = t.a().srqs[&srqn].ring.region;
    t.a().write(region, &(DEPTH + 1).to_le_bytes());
    t.post(&x, &x.send(1, SEND, 0x8000, 0x80))?;
    t.a().ring_doorbell(srqn, VIRTIO_RDMA_DOORBELL_SRQ)?;
    t.journal.about("D-SRQ-79");
    t.a().await_event(VIRTIO_RDMA_EVENT_SRQ_ERR, srqn, "event SRQ_ERR")?;
    t.journal.pass("D-SRQ-76");
    t.journal.about("D-SRQ-81");
    t.a().await_event(VIRTIO_RDMA_EVENT_QP_FATAL, y.qpn, "event QP_FATAL")?;
    let modify = virtio_rdma_cmd_modify_srq { srqn, srq_limit: 1 };
    t.a().fails::<_, ()>("D-SRQ-18", MODIFY_SRQ, &modify, VIRTIO_RDMA_STATUS_STATE)
}

const RESIZE_SRQ: (&str, u32) = ("RESIZE_SRQ", VIRTIO_RDMA_CMD_RESIZE_SRQ);

/// Returns the request that moves an SRQ to a ring of so many places, and the address of the ring.
fn resize_request(a: &mut Driver, srqn: u32, depth: u32) -> (u64, virtio_rdma_cmd_resize_srq) {
    let (at, new) = a.srq_request(0, depth);
    (at, testkit::command::resize_srq(srqn, new.region, new.ring))
}

fn resize_moves_receives(t: &mut Bench) -> Outcome {
    let (x, y, srqn) = shared(t, Link::default())?;
    for wr_id in 0..5 {
        receive(t, &y, srqn, wr_id)?;
    }
    for wr_id in 0..2 {
        t.post(&x, &x.send(wr_id, SEND, 0x8000, 0x80))?;
        t.succeeds(&y, "D-SRQ-35", wr_id)?;
    }
    set_limit(t.a(), srqn, 2)?;
    let (at, request) = resize_request(t.a(), srqn, 8);
    let (name, number) = RESIZE_SRQ;
    let reply: virtio_rdma_rsp_resize_srq = t.a().command("D-SRQ-10", name, number, &request)?;
    t.journal.is("D-SRQ-66", "moved", reply.moved, 3)?;
    let old = t.a().move_srq(srqn, (at, request.ring), reply.moved);
    let producer: u32 = testkit::Memory::get(&t.a().memory.map, at);
    t.journal.is("D-SRQ-66", "producer of the new head", producer, 3)?;
    t.a().freeze(old, 256, "D-RING-38");
    receive(t, &y, srqn, 5)?;
    for wr_id in 2..6 {
        t.post(&x, &x.send(wr_id, SEND, 0x8000, 0x80))?;
        t.succeeds(&y, "D-SRQ-65", wr_id)?;
    }
    t.journal.pass("D-SRQ-69");
    t.journal.about("D-SRQ-70");
    t.a().await_event(VIRTIO_RDMA_EVENT_SRQ_LIMIT_REACHED, srqn, "event of the limit of before")?;
    t.a().check_frozen()?;
    t.journal.pass("D-RING-38");
    Ok(())
}

fn resize_that_is_refused(t: &mut Bench) -> Outcome {
    let (x, y, srqn) = shared(t, Link::default())?;
    for wr_id in 0..5 {
        receive(t, &y, srqn, wr_id)?;
    }
    let (_, request) = resize_request(t.a(), srqn, 4);
    let a = t.a();
    a.fails::<_, virtio_rdma_rsp_resize_srq>("D-SRQ-22", RESIZE_SRQ, &request, INVALID)?;
    let gone = virtio_rdma_cmd_resize_srq { srqn: u32::MAX, ..request };
    a.fails::<_, virtio_rdma_rsp_resize_srq>("D-SRQ-16", RESIZE_SRQ, &gone, NO_OBJECT)?;
    for wr_id in 0..5 {
        t.post(&x, &x.send(wr_id, SEND, 0x8000, 0x80))?;
        t.succeeds(&y, "D-SRQ-71", wr_id)?;
    }
    for wr_id in 5..8 {
        receive(t, &y, srqn, wr_id)?;
    }
    set_limit(t.a(), srqn, 3)?;
    let (_, request) = resize_request(t.a(), srqn, 2);
    t.a().fails::<_, virtio_rdma_rsp_resize_srq>("D-SRQ-23", RESIZE_SRQ, &request, INVALID)
}

fn srqs_without_their_feature(t: &mut Bench) -> Outcome {
    let x = t.end(0, RC)?;
    let a = t.a();
    let (_, request) = a.srq_request(x.pdn, DEPTH);
    let unsupported = VIRTIO_RDMA_STATUS_UNSUPPORTED;
    a.fails::<_, virtio_rdma_rsp_create_srq>("D-SRQ-03", CREATE_SRQ, &request, unsupported)?;
    let (at, mut request) = a.qp_request(x.pdn, &shape(x.cqn));
    request.srqn = 77;
    let (name, number) = CREATE_RING_QP;
    let reply: virtio_rdma_rsp_create_qp = a.command("D-SRQ-04", name, number, &request)?;
    a.journal.step(format!("QP {} with a region at {at:#x}", reply.qpn));
    Ok(())
}
