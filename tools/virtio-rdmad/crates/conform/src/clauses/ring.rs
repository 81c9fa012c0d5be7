// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Rings: regions, doorbells, wake words and event queues.

use std::time::Duration;

use abi::*;
use testkit::command::PAGE;
use testkit::{doorbell, sge, Memory as _, Send, PRODUCER, WAKE};

use crate::bench::{Bench, Change, End, QUIET};
use crate::driver::NOWHERE;
use crate::objects::{Shape, DEPTH};
use crate::outcome::Outcome;
use crate::test::family;

family! {
    numbers_of_objects One []: "D-RING-05" "D-RING-07" "D-RING-08";
    refused_cqs One []: "D-RING-22" "D-RING-26" "D-RING-27" "D-RING-28" "D-RING-29";
    refused_qps One []: "D-RING-22" "D-RING-23" "D-RING-24" "D-RING-25" "D-RING-26" "D-RING-29";
    longer_tables_are_accepted One []: "D-RING-31" "D-RING-32";
    qp_without_receives One []: "D-RING-33";
    pages_in_any_order Ends []: "D-RING-20";
    rings_go_round Ends []: "D-RING-20" "D-RING-60" "D-RING-71";
    destroyed_objects_are_left_alone Ends []: "D-RING-35" "D-RING-36" "D-WQE-72";
    owner_words_are_not_written Ends []: "D-RING-58" "D-RING-59";
    device_sleeps_and_wakes Ends []: "D-RING-72" "D-RING-73" "D-RING-70";
    one_doorbell_for_many_entries Ends []: "D-RING-71" "D-RING-80";
    cleared_wake_word_and_doorbell Ends []: "D-RING-70" "D-RING-72";
    receive_ring_sleeps_only_for_messages Ends []: "D-RING-74" "D-RING-80";
    producer_too_far_ahead One []: "D-RING-75" "D-EVT-06";
    producer_that_moves_back One []: "D-RING-75";
    strange_doorbells_are_ignored One []: "D-RING-81" "D-RING-04";
    many_doorbells_in_a_buffer Ends []: "D-RING-82" "D-RING-83";
    doorbells_come_back One []: "D-RING-84" "D-RING-85";
    entries_are_copied_once Ends []: "D-WQE-02";
    interrupts_come One []: "D-RING-03";
    small_event_buffers One [] [idle]: "D-RING-12" "D-RING-13" "D-RING-14" "D-EVT-02";
    garbage_harms_its_own_objects Ends []: "D-RING-01";
    reset_ring_is_left_alone One []: "D-RING-37" "D-RING-63";
}

const INVALID: u32 = VIRTIO_RDMA_STATUS_INVAL;
const FAULT: u32 = VIRTIO_RDMA_STATUS_FAULT;
const SQ: u32 = VIRTIO_RDMA_DOORBELL_SQ;
const RQ: u32 = VIRTIO_RDMA_DOORBELL_RQ;
const SEND: u32 = VIRTIO_RDMA_WR_SEND;
const RC: u32 = VIRTIO_RDMA_QPT_RC;

fn shape(kind: u32, cqn: u32) -> Shape {
    Shape { kind, send_cqn: cqn, recv_cqn: cqn, signals_all: false, inline: 0 }
}

fn numbers_of_objects(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (pdn, cqn) = (a.create_pd()?, a.create_cq(16)?);
    let first = a.create_qp(pdn, &shape(RC, cqn))?;
    a.destroy_qp(first)?;
    let second = a.create_qp(pdn, &shape(RC, cqn))?;
    if second == first && a.config.ring_max_qp > 2 {
        a.journal.remark("the number of a QP is given out again at once (D-RING-08)");
    } else {
        a.journal.pass("D-RING-08");
    }
    let other = a.create_cq(16)?;
    a.journal.holds("D-RING-07", "CQs have numbers of their own", other != cqn, other)
}

fn refused_cqs(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (most, vectors) = (a.config.ring_max_cqe, u32::from(a.vectors()));
    let page = a.allocate(PAGE, PAGE);
    let unaligned = a.table(&[page + 64, page + PAGE]);
    let nowhere = a.table(&[NOWHERE, NOWHERE]);
    let cases: Vec<(&'static str, u32, Change<virtio_rdma_cmd_create_ring_cq>)> = vec![
        ("D-RING-22", INVALID, Box::new(|it| it.cqe = 0)),
        ("D-RING-22", INVALID, Box::new(|it| it.cqe = 48)),
        ("D-RING-22", INVALID, Box::new(move |it| it.cqe = most.wrapping_mul(2))),
        ("D-RING-26", INVALID, Box::new(|it| it.region.npages = 1)),
        ("D-RING-26", INVALID, Box::new(|it| it.region.npages = 0)),
        ("D-RING-27", INVALID, Box::new(|it| it.region.pages += 4)),
        ("D-RING-27", INVALID, Box::new(move |it| it.region.pages = unaligned)),
        ("D-RING-28", INVALID, Box::new(move |it| it.comp_vector = vectors)),
        ("D-RING-28", INVALID, Box::new(|it| it.comp_vector = u32::MAX)),
        ("D-RING-29", FAULT, Box::new(|it| it.region.pages = NOWHERE)),
        ("D-RING-29", FAULT, Box::new(move |it| it.region.pages = nowhere)),
    ];
    let (_, good) = a.cq_request(64);
    for (clause, status, change) in cases {
        let mut request = good;
        change(&mut request);
        let name = ("CREATE_RING_CQ", VIRTIO_RDMA_CMD_CREATE_RING_CQ);
        a.fails::<_, virtio_rdma_rsp_create_cq>(clause, name, &request, status)?;
    }
    Ok(())
}

fn refused_qps(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (pdn, cqn) = (a.create_pd()?, a.create_cq(16)?);
    let most = a.config.ring_max_qp_wr;
    let cases: Vec<(&'static str, u32, Change<virtio_rdma_cmd_create_ring_qp>)> = vec![
        ("D-RING-22", INVALID, Box::new(|it| it.sq.depth = DEPTH / 2)),
        ("D-RING-22", INVALID, Box::new(|it| it.rq.depth = 0)),
        ("D-RING-22", INVALID, Box::new(|it| it.sq.depth = DEPTH - 1)),
        ("D-RING-22", INVALID, Box::new(move |it| it.sq.depth = most.wrapping_mul(2))),
        ("D-RING-23", INVALID, Box::new(|it| it.sq.stride = 16)),
        ("D-RING-23", INVALID, Box::new(|it| it.sq.stride = 0)),
        ("D-RING-23", INVALID, Box::new(|it| it.rq.stride = 8192)),
        ("D-RING-23", INVALID, Box::new(|it| it.sq.stride = 32)),
        ("D-RING-24", INVALID, Box::new(|it| it.sq.offset = 0)),
        ("D-RING-24", INVALID, Box::new(|it| it.sq.offset += 8)),
        ("D-RING-25", INVALID, Box::new(|it| it.rq.offset = 1 << 20)),
        ("D-RING-26", INVALID, Box::new(|it| it.region.npages = 1)),
        ("D-RING-29", FAULT, Box::new(|it| it.region.pages = NOWHERE)),
    ];
    let (_, good) = a.qp_request(pdn, &shape(RC, cqn));
    for (clause, status, change) in cases {
        let mut request = good;
        change(&mut request);
        let name = ("CREATE_RING_QP", VIRTIO_RDMA_CMD_CREATE_RING_QP);
        a.fails::<_, virtio_rdma_rsp_create_qp>(clause, name, &request, status)?;
    }
    Ok(())
}

fn longer_tables_are_accepted(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (_, mut request) = a.cq_request(16);
    let page: u64 = a.memory.map.get(request.region.pages);
    request.region.pages = a.table(&[page, 1, u64::MAX, NOWHERE]);
    request.region.npages = 4;
    let (name, number) = ("CREATE_RING_CQ", VIRTIO_RDMA_CMD_CREATE_RING_CQ);
    let _: virtio_rdma_rsp_create_cq = a.command("D-RING-31", name, number, &request)?;
    a.journal.pass("D-RING-32");
    Ok(())
}

fn qp_without_receives(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (pdn, cqn) = (a.create_pd()?, a.create_cq(16)?);
    let (_, mut request) = a.qp_request(pdn, &shape(RC, cqn));
    (request.base.max_recv_wr, request.base.max_recv_sge) = (0, 0);
    (request.rq.depth, request.rq.stride, request.rq.offset) = (0, 7, u32::MAX);
    let (name, number) = ("CREATE_RING_QP", VIRTIO_RDMA_CMD_CREATE_RING_QP);
    let _: virtio_rdma_rsp_create_qp = a.command("D-RING-33", name, number, &request)?;
    Ok(())
}

/// Sends a message from x to y, and takes both CQEs.
fn exchange(t: &mut Bench, x: &End, y: &End, clause: &'static str, wr_id: u64) -> Outcome {
    let sent = t.fill(x, 0, 200);
    t.receive(y, wr_id, 0x1000, 200)?;
    t.post(x, &x.send(wr_id, SEND, 0, 200))?;
    t.succeeds(x, clause, wr_id)?;
    t.succeeds(y, clause, wr_id)?;
    let got = t.bytes(y, 0x1000, 200);
    t.journal.same_bytes("D-TERM-21", "message", &got, &sent)
}

fn pages_in_any_order(t: &mut Bench) -> Outcome {
    // The rings of a QP have three pages or more, and lie in one block otherwise.
    let far = t.far;
    let (x, y) = (t.end(0, RC)?, t.end(far, RC)?);
    let a = t.on(&x);
    let (at, mut request) = a.qp_request(x.pdn, &shape(RC, x.cqn));
    let pages: Vec<u64> =
        (0..u64::from(request.region.npages)).map(|page| at + page * PAGE).collect();
    // A longer table whose pages are the same: what lies behind the rings has no meaning.
    request.region.pages = a.table(&pages);
    let qpn = a.create_qp_of(at, &request)?;
    let x = End { qpn, ..x };
    t.connect(&x, &y, RC, crate::bench::Link::default())?;
    t.connect(&y, &x, RC, crate::bench::Link::default())?;
    exchange(t, &x, &y, "D-RING-20", 1)
}

fn rings_go_round(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    for wr_id in 0..u64::from(DEPTH) * 5 + 3 {
        exchange(t, &x, &y, "D-RING-20", wr_id)?;
    }
    t.journal.pass("D-RING-60");
    t.journal.pass("D-RING-71");
    Ok(())
}

fn destroyed_objects_are_left_alone(t: &mut Bench) -> Outcome {
    let link = crate::bench::Link { rnr_retry: 7, ..crate::bench::Link::default() };
    let (x, y) = t.connection_of(RC, link)?;
    t.receive(&x, 1, 0, 100)?;
    t.post(&x, &x.send(2, SEND, 0x1000, 100))?;
    t.on(&x).pause(QUIET)?;
    t.on(&x).destroy_qp(x.qpn)?;
    t.on(&x).poison(x.area, 100, "D-WQE-72");
    t.on(&x).destroy_cq(x.cqn)?;
    // The peer answers late, and sends itself.
    t.receive(&y, 3, 0, 100)?;
    t.post(&y, &y.send(4, SEND, 0x1000, 100))?;
    t.on(&y).pause(QUIET)?;
    t.on(&x).check_frozen()
}

fn owner_words_are_not_written(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let cq = t.on(&y).cqs[&y.cqn].ring.region;
    t.on(&y).write(cq + 4, &0xdead_beef_u32.to_le_bytes());
    for wr_id in 0..5 {
        exchange(t, &x, &y, "D-RING-59", wr_id)?;
    }
    let word = |t: &mut Bench, end: &End, at: u64| -> u32 { t.on(end).memory.map.get(at) };
    let closed = word(t, &y, cq + 4);
    t.journal.is("D-RING-58", "closed", closed, 0xdead_beef)?;
    let consumer = word(t, &y, cq);
    t.journal.is("D-RING-59", "consumer of the CQ", consumer, 5)?;
    let rings = t.on(&x).qps[&x.qpn].rings.region;
    let producer = word(t, &x, rings + PRODUCER[0]);
    t.journal.is("D-RING-59", "sq_producer", producer, 5)?;
    let head = t.on(&x).bytes(rings, 256);
    t.journal.same_bytes("D-TERM-03", "reserved bytes of the head", &head[136..], &[0; 120])
}

/// Waits until the device has gone to sleep on a ring.
fn await_sleep(t: &mut Bench, x: &End, queue: u32) -> Outcome {
    let wake = t.on(x).qps[&x.qpn].rings.region + WAKE[queue as usize];
    t.journal.about("D-RING-72");
    t.on(x).wait("a wake word other than 0", |driver| {
        Ok((driver.memory.map.get::<u32>(wake) != 0).then_some(()))
    })?;
    t.journal.pass("D-RING-72");
    Ok(())
}

fn device_sleeps_and_wakes(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    for wr_id in 0..3 {
        await_sleep(t, &x, SQ)?;
        exchange(t, &x, &y, "D-RING-70", wr_id)?;
    }
    t.journal.pass("D-RING-73");
    Ok(())
}

fn one_doorbell_for_many_entries(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    for wr_id in 0..8 {
        t.receive(&y, wr_id, 0x1000, 100)?;
    }
    for wr_id in 0..8 {
        let send = x.send(wr_id, SEND, 0, 100);
        t.on(&x).write_entry(x.qpn, SQ, (wr_id, true), &send.entry());
    }
    t.on(&x).ring_doorbell(x.qpn, SQ)?;
    for wr_id in 0..8 {
        t.succeeds(&x, "D-RING-71", wr_id)?;
        t.succeeds(&y, "D-RING-80", wr_id)?;
    }
    Ok(())
}

fn cleared_wake_word_and_doorbell(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let wake = t.on(&x).qps[&x.qpn].rings.region + WAKE[0];
    for wr_id in 0..3 {
        await_sleep(t, &x, SQ)?;
        t.receive(&y, wr_id, 0x1000, 100)?;
        let send = x.send(wr_id, SEND, 0, 100);
        t.on(&x).write_entry(x.qpn, SQ, (wr_id, true), &send.entry());
        t.on(&x).write(wake, &[0; 4]);
        t.on(&x).ring_doorbell(x.qpn, SQ)?;
        t.succeeds(&x, "D-RING-70", wr_id)?;
        t.succeeds(&y, "D-RING-70", wr_id)?;
    }
    Ok(())
}

fn receive_ring_sleeps_only_for_messages(t: &mut Bench) -> Outcome {
    let link = crate::bench::Link { rnr_retry: 7, ..crate::bench::Link::default() };
    let (x, y) = t.connection_of(RC, link)?;
    let wake = t.on(&y).qps[&y.qpn].rings.region + WAKE[1];
    exchange(t, &x, &y, "D-RING-80", 0)?;
    t.on(&y).pause(QUIET)?;
    let word: u32 = t.on(&y).memory.map.get(wake);
    t.journal.zero("D-RING-74", "rq_wake while no message waits", word)?;
    t.post(&x, &x.send(1, SEND, 0, 100))?;
    t.on(&y).pause(QUIET)?;
    t.receive(&y, 1, 0x1000, 100)?;
    t.succeeds(&y, "D-RING-80", 1)?;
    t.succeeds(&x, "D-RING-80", 1)?;
    Ok(())
}

/// Writes a producer that no owner may write, and checks that the QP fails.
fn producer_is_refused(t: &mut Bench, x: &End, queue: u32, producer: u32) -> Outcome {
    let at = t.on(x).qps[&x.qpn].rings.region + PRODUCER[queue as usize];
    t.journal.step(format!("producer {producer}"));
    t.on(x).write(at, &producer.to_le_bytes());
    t.on(x).ring_doorbell(x.qpn, queue)?;
    t.journal.about("D-RING-75");
    let qpn = x.qpn;
    t.on(x).await_event(VIRTIO_RDMA_EVENT_QP_FATAL, qpn, "event QP_FATAL")?;
    t.journal.pass("D-EVT-06");
    t.comes_to(x, "D-RING-75", VIRTIO_RDMA_QPS_ERR)
}

fn producer_too_far_ahead(t: &mut Bench) -> Outcome {
    let (x, _) = t.connection()?;
    producer_is_refused(t, &x, SQ, DEPTH + 1)?;
    let (x, _) = t.connection()?;
    producer_is_refused(t, &x, SQ, u32::MAX)
}

fn producer_that_moves_back(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    for wr_id in 0..3 {
        exchange(t, &x, &y, "D-RING-60", wr_id)?;
    }
    producer_is_refused(t, &x, SQ, 1)
}

fn strange_doorbells_are_ignored(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    for (number, queue) in
        [(x.qpn, 3), (x.qpn, u32::MAX), (9999, SQ), (u32::MAX, RQ), (0, SQ), (1, 2)]
    {
        t.journal.step(format!("doorbell {number} of queue {queue}"));
        t.on(&x).ring_doorbell(number, queue)?;
    }
    // Doorbells that no entry was posted for.
    t.on(&x).ring_doorbell(x.qpn, SQ)?;
    t.on(&x).ring_doorbell(x.qpn, RQ)?;
    exchange(t, &x, &y, "D-RING-81", 1)?;
    t.on(&x).take_doorbells()?;
    t.journal.pass("D-RING-04");
    Ok(())
}

fn many_doorbells_in_a_buffer(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    for (wr_id, count, tail) in [(1, 512_usize, 0), (2, 3, 5), (3, 1, 7)] {
        t.receive(&y, wr_id, 0x1000, 100)?;
        let send = x.send(wr_id, SEND, 0, 100);
        t.on(&x).write_entry(x.qpn, SQ, (wr_id, true), &send.entry());
        // The last one is the one that counts.
        let mut bells = doorbell(9999, SQ).repeat(count - 1);
        bells.extend(doorbell(x.qpn, SQ));
        bells.extend(vec![0xff; tail]);
        t.on(&x).ring_doorbells(&bells)?;
        let clause = if tail == 0 { "D-RING-82" } else { "D-RING-83" };
        t.succeeds(&x, clause, wr_id)?;
        t.succeeds(&y, clause, wr_id)?;
    }
    Ok(())
}

fn doorbells_come_back(t: &mut Bench) -> Outcome {
    let (x, _) = t.connection()?;
    let begin = std::time::Instant::now();
    for _ in 0..200 {
        t.on(&x).ring_doorbell(x.qpn, SQ)?;
    }
    t.on(&x).await_doorbells(|queue| queue.outstanding() == 0)?;
    if begin.elapsed() > Duration::from_secs(1) {
        t.journal.remark("doorbells come back after more than a second (D-RING-84)");
    } else {
        t.journal.pass("D-RING-84");
    }
    Ok(())
}

fn entries_are_copied_once(t: &mut Bench) -> Outcome {
    let link = crate::bench::Link { rnr_retry: 7, ..crate::bench::Link::default() };
    let (x, y) = t.connection_of(RC, link)?;
    let sent = t.fill(&x, 0, 100);
    t.post(&x, &x.send(1, SEND, 0, 100))?;
    // The device has begun the work request, which waits for a receive.
    t.on(&x).pause(QUIET)?;
    let rings = &t.on(&x).qps[&x.qpn].rings;
    let at = rings.region + u64::from(rings.shapes[0].offset);
    let other = Send::new(99, SEND, &[sge(x.area + 0x1000, 7, x.mr.lkey)]);
    t.on(&x).write(at, &other.entry());
    t.receive(&y, 2, 0x1000, 100)?;
    t.succeeds(&x, "D-WQE-02", 1)?;
    let cqe = t.succeeds(&y, "D-WQE-02", 2)?;
    t.journal.is("D-WQE-02", "byte_len", cqe.byte_len, 100)?;
    let got = t.bytes(&y, 0x1000, 100);
    t.journal.same_bytes("D-WQE-02", "message", &got, &sent)
}

/// Writes random bytes to memory, and rings for a ring in it.
fn scramble(t: &mut Bench, x: &End, (at, len): (u64, usize)) -> Outcome {
    let mut bytes = vec![0; len];
    rand::Rng::fill_bytes(&mut t.random, &mut bytes);
    t.on(x).write(at, &bytes);
    for queue in [SQ, RQ] {
        t.on(x).ring_doorbell(x.qpn, queue)?;
    }
    Ok(())
}

fn garbage_harms_its_own_objects(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    for round in 0..8 {
        let (v, w) = t.connection()?;
        for end in [&v, &w] {
            t.on(end).freeze(end.area, crate::bench::AREA as usize, "D-RING-01");
        }
        let rings = t.on(&v).qps[&v.qpn].rings.clone();
        let (first, size) = (rings.shapes[0].offset, rings.shapes[0].stride * DEPTH);
        let entries = (rings.region + u64::from(first), 2 * size as usize);
        let cq = (t.on(&v).cqs[&v.cqn].ring.region, 128 + 64 * 64);
        t.journal.step(format!("random bytes in rings, round {round}"));
        scramble(t, &v, entries)?;
        let few = 1 + t.below(u64::from(DEPTH)) as u32;
        for at in PRODUCER {
            t.on(&v).write(rings.region + at, &few.to_le_bytes());
        }
        t.on(&v).ring_doorbell(v.qpn, SQ)?;
        exchange(t, &x, &y, "D-RING-01", round)?;
        scramble(t, &v, (rings.region, 256))?;
        scramble(t, &v, cq)?;
        exchange(t, &x, &y, "D-RING-01", 100 + round)?;
        // What its CQ says has no meaning any more.
        t.on(&v).cqs.remove(&v.cqn);
    }
    Ok(())
}

fn interrupts_come(t: &mut Bench) -> Outcome {
    let a = t.a();
    let before = a.port.interrupts(0);
    a.create_pd()?;
    a.journal.about("D-RING-03");
    a.wait("the interrupt of the control queue", |driver| {
        Ok((driver.port.interrupts(0) != before).then_some(()))
    })?;
    a.journal.pass("D-RING-03");
    Ok(())
}

/// Makes a QP fail, which raises an event.
fn raise_event(t: &mut Bench) -> Outcome<u32> {
    let (x, _) = t.connection()?;
    let at = t.on(&x).qps[&x.qpn].rings.region + PRODUCER[0];
    t.on(&x).write(at, &(DEPTH + 1).to_le_bytes());
    t.on(&x).ring_doorbell(x.qpn, SQ)?;
    Ok(x.qpn)
}

fn small_event_buffers(t: &mut Bench) -> Outcome {
    t.a().event_buffers = 0;
    t.a().begin()?;
    let queue = t.a().event_queue();
    let qpn = raise_event(t)?;
    t.a().pause(QUIET)?;
    t.a().add_event_buffer(queue, 4)?;
    t.journal.about("D-RING-12");
    let small = t.a().wait("the small buffer", |driver| driver.take(queue, "D-RING-04"))?;
    t.journal.is("D-RING-12", "used length of a small buffer", small.written, 0)?;
    let bytes = t.a().bytes(small.buffers[0].0, 20);
    t.journal.same_bytes("D-RING-12", "a small buffer", &bytes, &[crate::driver::FILL; 20])?;
    t.a().add_event_buffer(queue, 24)?;
    t.journal.about("D-RING-13");
    t.a().await_event(VIRTIO_RDMA_EVENT_QP_FATAL, qpn, "the event that had no room")?;
    t.journal.pass("D-RING-14");
    t.journal.pass("D-EVT-02");
    Ok(())
}

fn reset_ring_is_left_alone(t: &mut Bench) -> Outcome {
    let (x, _) = t.connection()?;
    t.a().reset_qp(x.qpn)?;
    let (region, shapes) = {
        let rings = &t.a().qps[&x.qpn].rings;
        (rings.region, rings.shapes)
    };
    // An entry and a doorbell for a QP in RESET.
    let send = x.send(1, SEND, 0, 100);
    t.a().write(region + u64::from(shapes[0].offset), &send.entry());
    t.a().write(region + PRODUCER[0], &1_u32.to_le_bytes());
    t.a().freeze(region, 256, "D-RING-37");
    t.a().ring_doorbell(x.qpn, SQ)?;
    t.is_quiet(&x, "D-RING-63", "nothing completes")?;
    t.a().check_frozen()?;
    t.has_state(&x, "D-RING-63", VIRTIO_RDMA_QPS_RESET)
}
