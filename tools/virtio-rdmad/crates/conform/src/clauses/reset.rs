// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reset, and what a device does with what breaks a virtqueue.

use std::time::{Duration, Instant};

use abi::*;
use testkit::command;
use testkit::{Descriptor, F_NEXT, F_WRITE};

use crate::bench::{Bench, Link, QUIET};
use crate::driver::NOWHERE;
use crate::outcome::{not_judged, Outcome};
use crate::test::family;

family! {
    reset_destroys_everything One []: "D-RST-01" "D-RST-04";
    reset_clears_the_gid_table One []: "D-RST-02";
    reset_ends_access Ends []: "D-RST-05" "D-WQE-76";
    reset_is_quick Ends []: "D-RST-06" "D-RST-07";
    reset_returns_no_buffers One []: "D-RST-08";
    device_works_after_many_resets One []: "D-RST-01" "D-RST-04";
    commands_are_quick_under_load One []: "D-FAIL-08" "D-FAIL-07";
    malformed_control_chain One []: "D-CTRL-11";
    malformed_control_chain_is_silent One []: "D-CTRL-12";
    long_control_chain One []: "D-RING-10";
    other_queues_after_a_malformed_chain One []: "D-CTRL-13";
    malformed_event_chain One [] [idle]: "D-RING-15" "D-RING-16";
    malformed_doorbell_chain One []: "D-RING-86";
    handles_of_events One []: "D-EVT-04" "D-EVT-01";
    events_wait_once_each One [] [idle]: "D-EVT-02" "D-EVT-03";
}

const SEND: u32 = VIRTIO_RDMA_WR_SEND;
const RC: u32 = VIRTIO_RDMA_QPT_RC;

/// Resets the first member, and begins with it again.
fn restart(t: &mut Bench) -> Outcome {
    t.journal.step("reset");
    let a = t.a();
    a.port.reset()?;
    a.forget();
    a.begin()
}

fn reset_destroys_everything(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    restart(t)?;
    let none = VIRTIO_RDMA_STATUS_NO_OBJECT;
    let a = t.a();
    for end in [x, y] {
        let qp = virtio_rdma_cmd_destroy_qp { qpn: end.qpn };
        a.fails::<_, ()>("D-RST-01", ("DESTROY_QP", VIRTIO_RDMA_CMD_DESTROY_QP), &qp, none)?;
        let cq = virtio_rdma_cmd_destroy_cq { cqn: end.cqn };
        a.fails::<_, ()>("D-RST-01", ("DESTROY_CQ", VIRTIO_RDMA_CMD_DESTROY_CQ), &cq, none)?;
        let mr = virtio_rdma_cmd_dereg_mr { mrn: end.mr.mrn };
        a.fails::<_, ()>("D-RST-01", ("DEREG_MR", VIRTIO_RDMA_CMD_DEREG_MR), &mr, none)?;
        let pd = virtio_rdma_cmd_destroy_pd { pdn: end.pdn };
        a.fails::<_, ()>("D-RST-01", ("DESTROY_PD", VIRTIO_RDMA_CMD_DESTROY_PD), &pd, none)?;
    }
    a.journal.pass("D-RST-04");
    Ok(())
}

fn reset_clears_the_gid_table(t: &mut Bench) -> Outcome {
    let a = t.a();
    a.port.reset()?;
    a.forget();
    let wanted = a.wanted;
    a.negotiate(wanted)?;
    a.start()?;
    let z = t.end(0, RC)?;
    t.make_init(&z, RC, 0)?;
    let gid = t.a().gid;
    let to = Bench::of_rtr(RC, (gid, z.qpn), Link::default());
    t.a().modify_fails(z.qpn, "D-RST-02", to, VIRTIO_RDMA_STATUS_INVAL)
}

fn reset_ends_access(t: &mut Bench) -> Outcome {
    let link = Link { rnr_retry: 7, ..Link::default() };
    let (x, y) = t.connection_of(RC, link)?;
    for wr_id in 0..4 {
        t.receive(&x, wr_id, wr_id * 0x100, 100)?;
        t.post(&x, &x.send(wr_id, SEND, 0x1000, 100))?;
    }
    if x.member == y.member {
        t.a().pause(QUIET)?;
    } else {
        // The peer is under way, too.
        for wr_id in 0..4 {
            t.post(&y, &y.send(wr_id, SEND, 0x1000, 100))?;
        }
    }
    let (regions, area) = {
        let a = t.on(&x);
        let qp = a.qps[&x.qpn].rings.region;
        (vec![qp, a.cqs[&x.cqn].ring.region], x.area)
    };
    t.on(&x).port.reset()?;
    t.on(&x).forget();
    for region in regions {
        t.on(&x).freeze(region, 256, "D-RST-05");
    }
    t.on(&x).poison(area, 0x4000, "D-WQE-76");
    t.on(&x).pause(QUIET)?;
    t.on(&x).check_frozen()
}

fn reset_is_quick(t: &mut Bench) -> Outcome {
    let link = Link { rnr_retry: 7, retry_cnt: 7, ..Link::default() };
    let (x, _) = t.connection_of(RC, link)?;
    for wr_id in 0..10 {
        t.post(&x, &x.send(wr_id, SEND, 0, 0x1_0000))?;
    }
    let begin = Instant::now();
    t.journal.about("D-RST-07");
    t.a().port.reset()?;
    t.a().forget();
    let took = begin.elapsed();
    let limit = Duration::from_secs(30);
    t.journal.holds("D-RST-07", "a reset takes 30 seconds at most", took < limit, took)?;
    if took > Duration::from_secs(1) {
        t.journal.remark(format!("a reset takes {} ms (D-RST-06)", took.as_millis()));
    } else {
        t.journal.pass("D-RST-06");
    }
    Ok(())
}

fn reset_returns_no_buffers(t: &mut Bench) -> Outcome {
    let a = t.a();
    let queues: Vec<u16> = a.queues.keys().copied().collect();
    let layouts: Vec<u64> = queues.iter().map(|queue| a.queues[queue].layout.used).collect();
    a.port.reset()?;
    for used in layouts {
        a.freeze(used, 512, "D-RST-08");
    }
    a.pause(QUIET)?;
    for queue in queues {
        let returned = a.take(queue, "D-RST-08")?;
        a.journal.holds("D-RST-08", "no buffer is returned", returned.is_none(), &returned)?;
    }
    a.forget();
    a.check_frozen()
}

fn device_works_after_many_resets(t: &mut Bench) -> Outcome {
    for round in 0..10 {
        t.journal.step(format!("reset {round}"));
        restart(t)?;
        let pdn = t.a().create_pd()?;
        let mut mrs = Vec::new();
        for _ in 0..20 {
            let at = t.a().allocate(4096, 4096);
            mrs.push(t.a().reg_mr(pdn, at, 4096, 1)?);
        }
    }
    t.journal.pass("D-RST-01");
    t.journal.pass("D-RST-04");
    Ok(())
}

fn commands_are_quick_under_load(t: &mut Bench) -> Outcome {
    let link = Link { rnr_retry: 7, retry_cnt: 7, ..Link::default() };
    let (x, y) = t.connection_of(RC, link)?;
    for wr_id in 0..10 {
        t.post(&x, &x.rdma(&y, wr_id, VIRTIO_RDMA_WR_RDMA_WRITE, 0, 0x2_0000))?;
    }
    for _ in 0..20 {
        let begin = Instant::now();
        t.a().create_pd()?;
        if begin.elapsed() < Duration::from_secs(1) {
            t.journal.pass("D-FAIL-07");
        }
    }
    for wr_id in 0..10 {
        t.succeeds(&x, "D-WQE-30", wr_id)?;
    }
    Ok(())
}

/// Makes a chain available in the control queue that is malformed, and checks that the device says so.
fn control_breaks(t: &mut Bench, clause: &'static str, chain: &[Descriptor]) -> Outcome {
    let a = t.a();
    let memory = &a.memory.map;
    if let Some(queue) = a.queues.get_mut(&0) {
        queue.add_raw(memory, chain);
    }
    a.port.kick(0)?;
    if a.port.needs_reset()?.is_none() {
        return control_is_silent(t);
    }
    a.journal.about(clause);
    a.wait("DEVICE_NEEDS_RESET", |driver| {
        Ok((driver.port.needs_reset()? == Some(true)).then_some(()))
    })?;
    a.journal.pass(clause);
    restart(t)
}

/// Checks that the control queue is served no more.
fn control_is_silent(t: &mut Bench) -> Outcome {
    let a = t.a();
    a.send_request(&command::encode(VIRTIO_RDMA_CMD_CREATE_PD, &()), 64)?;
    a.pause(QUIET * 4)?;
    let reply = a.take(0, "D-CTRL-12")?;
    let got = reply.map(|reply| reply.written);
    a.journal.holds("D-CTRL-12", "no reply after a malformed chain", got.is_none(), got)?;
    a.journal.pass("D-RING-10");
    restart(t)
}

fn malformed_control_chain_is_silent(t: &mut Bench) -> Outcome {
    let a = t.a();
    if a.port.needs_reset()?.is_some() {
        return not_judged("the transport shows DEVICE_NEEDS_RESET");
    }
    let chain = [Descriptor { addr: NOWHERE, len: 1, flags: 0, next: 0 }];
    control_breaks(t, "D-CTRL-12", &chain)
}

fn malformed_control_chain(t: &mut Bench) -> Outcome {
    let a = t.a();
    if a.port.needs_reset()?.is_none() {
        return not_judged("the transport does not show DEVICE_NEEDS_RESET");
    }
    let at = a.place(&command::encode(VIRTIO_RDMA_CMD_CREATE_PD, &()));
    let size = a.queues[&0].layout.size;
    let descriptor = |addr, len, flags, next| Descriptor { addr, len, flags, next };
    let chains = [
        vec![descriptor(NOWHERE, 1, F_NEXT, 0), descriptor(at, 64, F_WRITE, 0)],
        vec![descriptor(at, 1, F_NEXT, size)],
        vec![descriptor(at, 1, F_NEXT, u16::MAX)],
    ];
    for chain in chains {
        control_breaks(t, "D-CTRL-11", &chain)?;
    }
    Ok(())
}

fn long_control_chain(t: &mut Bench) -> Outcome {
    let a = t.a();
    let request = [command::encode(VIRTIO_RDMA_CMD_CREATE_PD, &()), vec![0; 16]].concat();
    let (at, reply) = (a.place(&request), a.place(&[0; 64]));
    let mut chain: Vec<_> =
        (0..8).map(|part| Descriptor { addr: at + part, len: 1, flags: F_NEXT, next: 0 }).collect();
    chain.push(Descriptor { addr: reply, len: 64, flags: F_WRITE, next: 0 });
    control_breaks(t, "D-RING-10", &chain)
}

fn other_queues_after_a_malformed_chain(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    t.receive(&y, 1, 0x1000, 100)?;
    let a = t.a();
    let memory = &a.memory.map;
    let chain = [Descriptor { addr: NOWHERE, len: 1, flags: 0, next: 0 }];
    if let Some(queue) = a.queues.get_mut(&0) {
        queue.add_raw(memory, &chain);
    }
    a.port.kick(0)?;
    a.pause(QUIET)?;
    t.post(&x, &x.send(2, SEND, 0, 100))?;
    t.succeeds(&x, "D-CTRL-13", 2)?;
    t.succeeds(&y, "D-CTRL-13", 1)?;
    Ok(())
}

/// Makes a QP fail, which raises QP_FATAL. Returns its number.
fn fail_qp(t: &mut Bench) -> Outcome<u32> {
    let x = t.end(0, RC)?;
    t.make_init(&x, RC, 0)?;
    let at = t.a().qps[&x.qpn].rings.region + testkit::PRODUCER[0];
    let rings = &t.a().qps[&x.qpn].rings;
    let far = rings.shapes[0].depth + 1;
    t.a().write(at, &far.to_le_bytes());
    t.a().set_state(x.qpn, VIRTIO_RDMA_QPS_ERR)?;
    t.a().ring_doorbell(x.qpn, VIRTIO_RDMA_DOORBELL_SQ)?;
    Ok(x.qpn)
}

fn malformed_event_chain(t: &mut Bench) -> Outcome {
    t.a().event_buffers = 0;
    t.a().begin()?;
    let a = t.a();
    let queue = a.event_queue();
    let memory = &a.memory.map;
    let chain = [Descriptor { addr: NOWHERE, len: 8, flags: F_WRITE, next: 0 }];
    if let Some(queue) = a.queues.get_mut(&queue) {
        queue.add_raw(memory, &chain);
    }
    a.port.kick(queue)?;
    let qpn = fail_qp(t)?;
    t.a().pause(QUIET)?;
    t.a().add_event_buffer(queue, 8)?;
    t.a().pause(QUIET)?;
    let has_event = t.a().has_event(VIRTIO_RDMA_EVENT_QP_FATAL, qpn)?;
    t.journal.is("D-RING-15", "an event behind a malformed chain", has_event, false)?;
    t.a().create_pd()?;
    t.journal.pass("D-RING-16");
    Ok(())
}

fn malformed_doorbell_chain(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (queue, memory) = (a.doorbells(), &a.memory.map);
    let chain = [Descriptor { addr: NOWHERE, len: 8, flags: 0, next: 0 }];
    if let Some(queue) = a.queues.get_mut(&queue) {
        queue.add_raw(memory, &chain);
    }
    a.port.kick(queue)?;
    a.pause(QUIET)?;
    if a.port.needs_reset()?.is_none() {
        return not_judged("the transport does not show DEVICE_NEEDS_RESET");
    }
    a.journal.about("D-RING-86");
    a.wait("DEVICE_NEEDS_RESET", |driver| {
        Ok((driver.port.needs_reset()? == Some(true)).then_some(()))
    })?;
    a.journal.pass("D-RING-86");
    Ok(())
}

fn handles_of_events(t: &mut Bench) -> Outcome {
    for _ in 0..3 {
        let qpn = fail_qp(t)?;
        t.journal.about("D-EVT-04");
        t.a().await_event(VIRTIO_RDMA_EVENT_QP_FATAL, qpn, "event QP_FATAL")?;
    }
    t.journal.pass("D-EVT-01");
    Ok(())
}

fn events_wait_once_each(t: &mut Bench) -> Outcome {
    t.a().event_buffers = 0;
    t.a().begin()?;
    let queue = t.a().event_queue();
    let qpns = [fail_qp(t)?, fail_qp(t)?];
    t.a().pause(QUIET)?;
    for _ in 0..8 {
        t.a().add_event_buffer(queue, 8)?;
    }
    t.journal.about("D-EVT-02");
    for qpn in qpns {
        t.a().await_event(VIRTIO_RDMA_EVENT_QP_FATAL, qpn, "an event that waited")?;
    }
    t.a().pause(QUIET)?;
    t.a().take_events()?;
    let rest: Vec<_> = t.a().events.clone();
    t.journal.holds("D-EVT-03", "each event comes once", rest.is_empty(), &rest)
}
