// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The data path of virtqueues.

use abi::*;
use testkit::command;
use testkit::{receive, Buffer, Descriptor, Memory as _, Send, F_WRITE, LOCAL, READ, WRITE};

use crate::bench::{Bench, End, Link, AREA, QUIET};
use crate::driver::{Driver, FILL, NOWHERE};
use crate::objects::{DEPTH, SGES};
use crate::outcome::{not_judged, Outcome};
use crate::port::{F_ACCESS_PLATFORM, F_ORDER_PLATFORM, F_VERSION_1};
use crate::queue::Returned;
use crate::test::family;

family! {
    limits_of_no_virtqueues One [] [idle]: "D-VQ-04";
    commands_of_rings One [] [idle]: "D-VQ-19";
    refused_cqs One [] [idle]: "D-VQ-20";
    messages_arrive One [] [idle]: "D-VQ-16" "D-VQ-17" "D-VQ-05" "D-VQ-06" "D-VQ-14" "D-VQ-31" "D-VQ-32" "D-VQ-33";
    buffers_that_are_too_small One [] [idle]: "D-VQ-13";
    malformed_chain One [] [idle]: "D-VQ-15";
    queues_of_nothing One [] [idle]: "D-VQ-08";
    buffers_in_reset One [] [idle]: "D-VQ-36";
    ends_give_buffers_back One [] [idle]: "D-VQ-10";
    cut_off_work_request One [] [idle]: "D-VQ-34";
}

const RC: u32 = VIRTIO_RDMA_QPT_RC;
const SEND: u32 = VIRTIO_RDMA_WR_SEND;
const INVALID: u32 = VIRTIO_RDMA_STATUS_INVAL;
const UNSUPPORTED: u32 = VIRTIO_RDMA_STATUS_UNSUPPORTED;
const CREATE_CQ: (&str, u32) = ("CREATE_CQ", VIRTIO_RDMA_CMD_CREATE_CQ);
/// The bytes of a CQE.
const CQE: u32 = size_of::<virtio_rdma_cqe>() as u32;

/// Starts the device with virtqueues.
fn start(t: &mut Bench) -> Outcome {
    let a = t.a();
    let offered = a.port.offered()?;
    if offered >> VIRTIO_RDMA_F_VIRTQUEUES & 1 == 0 {
        return not_judged(format!("not offered: feature bit {VIRTIO_RDMA_F_VIRTQUEUES}"));
    }
    let of_transport = offered & (F_ACCESS_PLATFORM | F_ORDER_PLATFORM);
    let features = F_VERSION_1 | 1 << VIRTIO_RDMA_F_VIRTQUEUES | of_transport;
    if a.negotiate(features)? == Some(false) {
        let expected = format!("it stands for {features:#x}");
        return Err(a.journal.failure(
            "D-FEAT-06",
            "FEATURES_OK",
            expected,
            "it is cleared".into(),
        ));
    }
    a.start_virtqueues()?;
    a.add_own_gid()
}

/// Ends a test, whose virtqueues have other numbers than those of rings.
fn end(t: &mut Bench) -> Outcome {
    t.a().check_frozen()?;
    t.a().forget();
    Ok(())
}

/// Returns the virtqueue of a CQ.
fn cq_queue(cqn: u32) -> u16 {
    1 + cqn as u16
}

/// Returns the virtqueue of a QP's sends. That of its receives is the next one.
fn send_queue(a: &Driver, qpn: u32) -> u16 {
    1 + (a.config.max_cq + 2 * (qpn - 1)) as u16
}

/// Creates a CQ.
fn create_cq(a: &mut Driver, cqe: u32) -> Outcome<u32> {
    let request = virtio_rdma_cmd_create_cq { cqe };
    let reply: virtio_rdma_rsp_create_cq =
        a.command("D-VQ-16", CREATE_CQ.0, CREATE_CQ.1, &request)?;
    let is_one = reply.cqn < a.config.max_cq;
    a.journal.holds("D-VQ-16", "number of a new CQ", is_one, reply.cqn)?;
    Ok(reply.cqn)
}

/// Makes a buffer for a CQE available.
fn add_cq_buffer(a: &mut Driver, cqn: u32, len: u32) -> Outcome {
    let at = a.place(&vec![FILL; len as usize]);
    a.add(cq_queue(cqn), &[(at, len, true)])
}

/// Creates a QP with a CQ that has no buffers, and memory.
fn create_end(t: &mut Bench) -> Outcome<End> {
    let a = t.a();
    let (pdn, cqn) = (a.create_pd()?, create_cq(a, DEPTH)?);
    let area = a.allocate(AREA, command::PAGE);
    let mr = a.reg_mr(pdn, area, AREA, READ | WRITE | LOCAL)?;
    let mut request = command::create_qp(pdn, cqn, RC, SGES);
    request.sq_sig_type = VIRTIO_RDMA_SIGNAL_ALL_WR as u8;
    (request.max_send_wr, request.max_recv_wr) = (DEPTH, DEPTH);
    let name = "CREATE_QP";
    let reply: virtio_rdma_rsp_create_qp =
        a.command("D-VQ-17", name, VIRTIO_RDMA_CMD_CREATE_QP, &request)?;
    let qpn = reply.qpn;
    let is_one = (2..=a.config.max_qp).contains(&qpn);
    a.journal.holds("D-VQ-17", "number of a new QP", is_one, qpn)?;
    Ok(End { member: 0, pdn, cqn, qpn, mr, area })
}

/// Makes a QP that is connected with itself.
fn connected(t: &mut Bench) -> Outcome<End> {
    start(t)?;
    let x = create_end(t)?;
    t.connect(&x, &x, RC, Link::default())?;
    Ok(x)
}

/// Posts bytes to a virtqueue.
fn post(a: &mut Driver, queue: u16, bytes: &[u8]) -> Outcome<u64> {
    let at = a.place(bytes);
    a.add(queue, &[(at, bytes.len() as u32, false)])?;
    Ok(at)
}

/// Posts a SEND of 100 bytes from the beginning of the memory of an end. Returns the address of the work request.
fn post_send(t: &mut Bench, x: &End, wr_id: u64) -> Outcome<u64> {
    let queue = send_queue(t.a(), x.qpn);
    post(t.a(), queue, &Send::new(wr_id, SEND, &[x.sge(0, 100)]).bytes())
}

/// Posts a receive. Returns the address of the work request.
fn post_recv(t: &mut Bench, x: &End, wr_id: u64) -> Outcome<u64> {
    let queue = send_queue(t.a(), x.qpn) + 1;
    post(t.a(), queue, &receive(wr_id, &[x.sge(0x1000 * wr_id, 100)]))
}

/// Waits for the next chain that comes back.
fn next(a: &mut Driver, queue: u16, clause: &'static str) -> Outcome<Returned> {
    a.journal.about(clause);
    a.wait("a buffer", |a| a.take(queue, clause))
}

/// Waits for the next CQE of a CQ, and checks its buffer.
fn next_cqe(a: &mut Driver, cqn: u32) -> Outcome<virtio_rdma_cqe> {
    let returned = next(a, cq_queue(cqn), "D-VQ-06")?;
    a.journal.is("D-VQ-06", "used length of a CQE", returned.written, CQE)?;
    let (at, len, _): Buffer = returned.buffers[0];
    let rest = a.bytes(at + u64::from(CQE), (len - CQE) as usize);
    a.journal.same_bytes("D-VQ-14", "bytes behind a CQE", &rest, &vec![FILL; rest.len()])?;
    Ok(a.memory.map.get(at))
}

fn limits_of_no_virtqueues(t: &mut Bench) -> Outcome {
    let a = t.a();
    if a.port.offered()? >> VIRTIO_RDMA_F_VIRTQUEUES & 1 != 0 {
        a.journal.pass("D-VQ-04");
        return Ok(());
    }
    let config = a.config;
    let limits = [config.max_qp, config.max_qp_wr, config.max_cq, config.max_cqe];
    a.journal.is("D-VQ-04", "max_qp, max_qp_wr, max_cq and max_cqe", limits, [0; 4])
}

fn commands_of_rings(t: &mut Bench) -> Outcome {
    start(t)?;
    for (name, number) in [
        ("CREATE_RING_CQ", VIRTIO_RDMA_CMD_CREATE_RING_CQ),
        ("CREATE_RING_QP", VIRTIO_RDMA_CMD_CREATE_RING_QP),
        ("RESIZE_CQ", VIRTIO_RDMA_CMD_RESIZE_CQ),
    ] {
        t.a().fails::<_, ()>("D-VQ-19", (name, number), &[0_u8; 256], UNSUPPORTED)?;
    }
    end(t)
}

fn refused_cqs(t: &mut Bench) -> Outcome {
    start(t)?;
    let size = u32::from(t.a().queues[&cq_queue(0)].layout.size);
    for cqe in [0, size + 1, u32::MAX] {
        let request = virtio_rdma_cmd_create_cq { cqe };
        t.a().fails::<_, virtio_rdma_rsp_create_cq>("D-VQ-20", CREATE_CQ, &request, INVALID)?;
    }
    end(t)
}

fn messages_arrive(t: &mut Bench) -> Outcome {
    let x = connected(t)?;
    t.journal.pass("D-VQ-05");
    let sent = t.fill(&x, 0, 100);
    for _ in 0..8 {
        add_cq_buffer(t.a(), x.cqn, CQE + 24)?;
    }
    let (mut places, mut done) = (Vec::new(), Vec::new());
    for wr_id in 1..5 {
        post_recv(t, &x, wr_id)?;
        places.push(post_send(t, &x, 10 + wr_id)?);
    }
    let queue = send_queue(t.a(), x.qpn);
    for _ in 0..8 {
        let cqe = next_cqe(t.a(), x.cqn)?;
        t.journal.is("D-WQE-30", "status", u32::from(cqe.status), VIRTIO_RDMA_WC_SUCCESS)?;
        if cqe.wr_id < 10 {
            continue;
        }
        done.push(cqe.wr_id);
        // Whoever sees the CQE sees that the descriptor is back.
        let Some(returned) = t.a().take(queue, "D-VQ-31")? else {
            let expected = "its descriptor is back".into();
            let what = format!("CQE of work request {}", cqe.wr_id);
            return Err(t.journal.failure("D-VQ-32", &what, expected, "it is not".into()));
        };
        t.journal.pass("D-VQ-32");
        t.journal.is("D-VQ-31", "used length of a work request", returned.written, 0)?;
        t.journal.is("D-VQ-33", "order", returned.buffers[0].0, places[done.len() - 1])?;
    }
    t.journal.is("D-VQ-33", "CQEs of sends", done, vec![11, 12, 13, 14])?;
    for wr_id in 1..5 {
        let got = t.bytes(&x, 0x1000 * wr_id, 100);
        t.journal.same_bytes("D-TERM-21", "message", &got, &sent)?;
    }
    end(t)
}

fn buffers_that_are_too_small(t: &mut Bench) -> Outcome {
    let x = connected(t)?;
    add_cq_buffer(t.a(), x.cqn, CQE - 1)?;
    post_recv(t, &x, 1)?;
    post_send(t, &x, 2)?;
    let returned = next(t.a(), cq_queue(x.cqn), "D-VQ-13")?;
    t.journal.is("D-VQ-13", "used length of a small buffer", returned.written, 0)?;
    let bytes = t.a().bytes(returned.buffers[0].0, CQE as usize - 1);
    t.journal.same_bytes("D-VQ-13", "a small buffer", &bytes, &vec![FILL; bytes.len()])?;
    t.comes_to(&x, "D-VQ-13", VIRTIO_RDMA_QPS_ERR)?;
    end(t)
}

fn malformed_chain(t: &mut Bench) -> Outcome {
    let x = connected(t)?;
    let queue = cq_queue(x.cqn);
    let chain = [Descriptor { addr: NOWHERE, len: CQE, flags: F_WRITE, next: 0 }];
    let a = t.a();
    let memory = &a.memory.map;
    if let Some(queue) = a.queues.get_mut(&queue) {
        queue.add_raw(memory, &chain);
    }
    a.port.kick(queue)?;
    post_recv(t, &x, 1)?;
    post_send(t, &x, 2)?;
    t.comes_to(&x, "D-VQ-15", VIRTIO_RDMA_QPS_ERR)?;
    end(t)
}

fn queues_of_nothing(t: &mut Bench) -> Outcome {
    start(t)?;
    let (most, bytes) = (t.a().config.max_qp, [FILL; 64]);
    let queue = send_queue(t.a(), most);
    for queue in [queue, queue + 1] {
        let at = post(t.a(), queue, &bytes)?;
        t.a().freeze(at, bytes.len(), "D-VQ-08");
    }
    let last = t.a().config.max_cq - 1;
    add_cq_buffer(t.a(), last, 64)?;
    t.a().create_pd()?;
    t.a().pause(QUIET)?;
    for queue in [queue, queue + 1, cq_queue(last)] {
        let returned = t.a().take(queue, "D-VQ-08")?;
        t.journal.holds("D-VQ-08", "no buffer comes back", returned.is_none(), &returned)?;
    }
    end(t)
}

fn buffers_in_reset(t: &mut Bench) -> Outcome {
    start(t)?;
    let x = create_end(t)?;
    for _ in 0..2 {
        add_cq_buffer(t.a(), x.cqn, CQE)?;
    }
    post_recv(t, &x, 1)?;
    post_send(t, &x, 2)?;
    t.a().pause(QUIET)?;
    let queue = send_queue(t.a(), x.qpn);
    for queue in [queue, queue + 1] {
        let returned = t.a().take(queue, "D-VQ-36")?;
        t.journal.holds("D-VQ-36", "no buffer comes back", returned.is_none(), &returned)?;
    }
    t.connect(&x, &x, RC, Link::default())?;
    for _ in 0..2 {
        let cqe = next_cqe(t.a(), x.cqn)?;
        t.journal.is("D-VQ-36", "status", u32::from(cqe.status), VIRTIO_RDMA_WC_SUCCESS)?;
    }
    end(t)
}

fn ends_give_buffers_back(t: &mut Bench) -> Outcome {
    let x = connected(t)?;
    for wr_id in 1..4 {
        post_recv(t, &x, wr_id)?;
    }
    add_cq_buffer(t.a(), x.cqn, CQE)?;
    let request = virtio_rdma_cmd_destroy_qp { qpn: x.qpn };
    let () = t.a().command("D-CTRL-28", "DESTROY_QP", VIRTIO_RDMA_CMD_DESTROY_QP, &request)?;
    let request = virtio_rdma_cmd_destroy_cq { cqn: x.cqn };
    let () = t.a().command("D-CTRL-21", "DESTROY_CQ", VIRTIO_RDMA_CMD_DESTROY_CQ, &request)?;
    let queue = send_queue(t.a(), x.qpn) + 1;
    for queue in [queue, queue, queue, cq_queue(x.cqn)] {
        let returned = t.a().take(queue, "D-VQ-10")?;
        let written = returned.map(|returned| returned.written);
        t.journal.is("D-VQ-10", "a buffer that the reply follows", written, Some(0))?;
    }
    end(t)
}

fn cut_off_work_request(t: &mut Bench) -> Outcome {
    let x = connected(t)?;
    add_cq_buffer(t.a(), x.cqn, CQE)?;
    let bytes = Send::new(5, SEND, &[x.sge(0, 100), x.sge(0x200, 100)]).bytes();
    let queue = send_queue(t.a(), x.qpn);
    post(t.a(), queue, &bytes[..bytes.len() - 1])?;
    let cqe = next_cqe(t.a(), x.cqn)?;
    let got = (cqe.wr_id, u32::from(cqe.status));
    t.journal.is("D-VQ-34", "CQE", got, (5, VIRTIO_RDMA_WC_LOC_QP_OP_ERR))?;
    end(t)
}
