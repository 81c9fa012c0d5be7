// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Extended reliable connections.

use abi::*;
use testkit::command;
use testkit::{sge, Send, LOCAL, READ, WRITE};
use zerocopy::FromZeros;

use crate::bench::{Bench, End, Link};
use crate::driver::Driver;
use crate::objects::{Shape, DEPTH};
use crate::outcome::Outcome;
use crate::test::family;

family! {
    domains_are_made One [VIRTIO_RDMA_F_XRC]: "D-XRC-10" "D-XRC-11" "D-XRC-12";
    srqs_of_a_domain One [VIRTIO_RDMA_F_XRC]: "D-XRC-13" "D-XRC-16" "D-XRC-17" "D-XRC-12";
    initiators_and_targets One [VIRTIO_RDMA_F_XRC]: "D-XRC-14" "D-XRC-15" "D-XRC-12";
    messages_name_their_srq Ends [VIRTIO_RDMA_F_XRC]: "D-XRC-30" "D-XRC-31" "D-XRC-34";
    keys_are_those_of_the_srq Ends [VIRTIO_RDMA_F_XRC]: "D-XRC-32";
    rights_are_those_of_the_target Ends [VIRTIO_RDMA_F_XRC]: "D-XRC-33";
    srqs_that_there_are_not Ends [VIRTIO_RDMA_F_XRC]: "D-XRC-40" "D-XRC-41" "D-XRC-42" "D-XRC-43";
}

const SEND: u32 = VIRTIO_RDMA_WR_SEND;
const RC: u32 = VIRTIO_RDMA_QPT_RC;
const UC: u32 = VIRTIO_RDMA_QPT_UC;
const INI: u32 = VIRTIO_RDMA_QPT_XRC_INI;
const INVALID: u32 = VIRTIO_RDMA_STATUS_INVAL;
const BUSY: u32 = VIRTIO_RDMA_STATUS_BUSY;
const NO_OBJECT: u32 = VIRTIO_RDMA_STATUS_NO_OBJECT;
const REFUSED: u32 = VIRTIO_RDMA_WC_REM_INV_REQ_ERR;
const CREATE_QP: (&str, u32) = ("CREATE_RING_QP", VIRTIO_RDMA_CMD_CREATE_RING_QP);
const CREATE_SRQ: (&str, u32) = ("CREATE_SRQ", VIRTIO_RDMA_CMD_CREATE_SRQ);
const DEALLOC_XRCD: (&str, u32) = ("DEALLOC_XRCD", VIRTIO_RDMA_CMD_DEALLOC_XRCD);

/// Allocates a domain.
fn alloc_xrcd(a: &mut Driver) -> Outcome<u32> {
    let (name, number) = ("ALLOC_XRCD", VIRTIO_RDMA_CMD_ALLOC_XRCD);
    let reply: virtio_rdma_rsp_alloc_xrcd = a.command("D-XRC-11", name, number, &())?;
    a.journal.holds("D-XRC-11", "the number of a domain is not 0", reply.xrcdn != 0, 0)?;
    Ok(reply.xrcdn)
}

/// Frees a domain.
fn dealloc_xrcd(a: &mut Driver, xrcdn: u32) -> Outcome {
    let request = virtio_rdma_cmd_dealloc_xrcd { xrcdn };
    a.command("D-XRC-12", DEALLOC_XRCD.0, DEALLOC_XRCD.1, &request)
}

/// Checks that a domain cannot be freed.
fn dealloc_fails(a: &mut Driver, xrcdn: u32, status: u32) -> Outcome {
    let request = virtio_rdma_cmd_dealloc_xrcd { xrcdn };
    a.fails::<_, ()>("D-XRC-12", DEALLOC_XRCD, &request, status)
}

/// Creates an SRQ of a domain, with the objects of an end.
fn xrc_srq(t: &mut Bench, y: &End, xrcdn: u32) -> Outcome<u32> {
    let a = t.on(y);
    let (at, mut request) = a.srq_request(y.pdn, DEPTH);
    (request.xrcdn, request.cqn) = (xrcdn, y.cqn);
    a.create_srq_of(at, &request)
}

/// Destroys an SRQ.
fn destroy_srq(a: &mut Driver, srqn: u32) -> Outcome {
    let request = virtio_rdma_cmd_destroy_srq { srqn };
    a.srqs.remove(&srqn);
    a.command("D-XRC-17", "DESTROY_SRQ", VIRTIO_RDMA_CMD_DESTROY_SRQ, &request)
}

/// Creates a target.
fn target(t: &mut Bench, y: &End, xrcdn: u32) -> Outcome<End> {
    let qpn = t.on(y).create_qp_of(0, &command::create_xrc_tgt(xrcdn))?;
    Ok(End { qpn, ..*y })
}

/// Returns the request for an initiator, and the address of its ring.
fn initiator_request(t: &mut Bench, x: &End) -> (u64, virtio_rdma_cmd_create_ring_qp) {
    let shape =
        Shape { kind: INI, send_cqn: x.cqn, recv_cqn: x.cqn, signals_all: false, inline: 0 };
    let (at, mut request) = t.on(x).qp_request(x.pdn, &shape);
    request.rq = FromZeros::new_zeroed();
    (request.base.max_recv_wr, request.base.max_recv_sge) = (0, 0);
    (at, request)
}

/// An initiator, and its target in a domain, with two SRQs.
struct Extended {
    x: End,
    y: End,
    xrcdn: u32,
    srqns: [u32; 2],
}

/// Connects an initiator and a target, whose peer may do this.
fn extended(t: &mut Bench, access: u32) -> Outcome<Extended> {
    let far = t.far;
    let (x, y) = (t.end(0, RC)?, t.end(far, RC)?);
    let xrcdn = alloc_xrcd(t.on(&y))?;
    let srqns = [xrc_srq(t, &y, xrcdn)?, xrc_srq(t, &y, xrcdn)?];
    let (at, request) = initiator_request(t, &x);
    let qpn = t.on(&x).create_qp_of(at, &request)?;
    let (x, y) = (End { qpn, ..x }, target(t, &y, xrcdn)?);
    let (link, of_x, of_y) = (Link::default(), t.members[x.member].gid, t.members[y.member].gid);
    // An initiator has nothing of a responder, and a target has nothing of a requester.
    t.make_init(&x, RC, 0)?;
    t.make_rtr(&x, UC, (of_y, y.qpn), link)?;
    t.make_rts(&x, RC, link)?;
    t.make_init(&y, RC, access)?;
    t.make_rtr(&y, RC, (of_x, x.qpn), link)?;
    let (_, attr) = Bench::of_rts(RC, link);
    let mask = VIRTIO_RDMA_QP_STATE | VIRTIO_RDMA_QP_SQ_PSN | VIRTIO_RDMA_QP_TIMEOUT;
    t.on(&y).modify(y.qpn, "D-QP-40", mask, attr)?;
    Ok(Extended { x, y, xrcdn, srqns })
}

fn domains_are_made(t: &mut Bench) -> Outcome {
    let a = t.a();
    let xrcdn = alloc_xrcd(a)?;
    dealloc_xrcd(a, xrcdn)?;
    dealloc_fails(a, xrcdn, NO_OBJECT)?;
    a.journal.pass("D-XRC-10");
    Ok(())
}

fn srqs_of_a_domain(t: &mut Bench) -> Outcome {
    let x = t.end(0, RC)?;
    let xrcdn = alloc_xrcd(t.a())?;
    let (_, good) = t.a().srq_request(x.pdn, DEPTH);
    for (domain, cqn) in [(xrcdn + 1, x.cqn), (xrcdn, x.cqn + 1)] {
        let request = virtio_rdma_cmd_create_srq { xrcdn: domain, cqn, ..good };
        t.a()
            .fails::<_, virtio_rdma_rsp_create_srq>("D-XRC-13", CREATE_SRQ, &request, NO_OBJECT)?;
    }
    let srqn = xrc_srq(t, &x, xrcdn)?;
    dealloc_fails(t.a(), xrcdn, BUSY)?;
    let shape = Shape { kind: RC, send_cqn: x.cqn, recv_cqn: x.cqn, signals_all: false, inline: 0 };
    let (_, mut request) = t.a().qp_request(x.pdn, &shape);
    request.rq = FromZeros::new_zeroed();
    (request.base.max_recv_wr, request.srqn) = (0, srqn);
    t.a().fails::<_, virtio_rdma_rsp_create_qp>("D-XRC-16", CREATE_QP, &request, INVALID)?;
    // It uses its CQ.
    t.a().destroy_qp(x.qpn)?;
    let name = ("DESTROY_CQ", VIRTIO_RDMA_CMD_DESTROY_CQ);
    let request = virtio_rdma_cmd_destroy_cq { cqn: x.cqn };
    t.a().fails::<_, ()>("D-XRC-13", name, &request, BUSY)?;
    // A target of the domain does not keep it.
    target(t, &x, xrcdn)?;
    destroy_srq(t.a(), srqn)
}

fn initiators_and_targets(t: &mut Bench) -> Outcome {
    let x = t.end(0, RC)?;
    let xrcdn = alloc_xrcd(t.a())?;
    let shape =
        Shape { kind: INI, send_cqn: x.cqn, recv_cqn: x.cqn, signals_all: false, inline: 0 };
    let (_, request) = t.a().qp_request(x.pdn, &shape);
    t.a().fails::<_, virtio_rdma_rsp_create_qp>("D-XRC-14", CREATE_QP, &request, INVALID)?;
    let (at, mut request) = initiator_request(t, &x);
    request.base.recv_cqn = u32::MAX;
    t.a().create_qp_of(at, &request)?;
    t.journal.pass("D-XRC-14");
    let good = command::create_xrc_tgt(xrcdn);
    let wrong = virtio_rdma_cmd_create_ring_qp { xrcdn: xrcdn + 1, ..good };
    t.a().fails::<_, virtio_rdma_rsp_create_qp>("D-XRC-15", CREATE_QP, &wrong, NO_OBJECT)?;
    let wrong = virtio_rdma_cmd_create_ring_qp { srqn: 1, ..good };
    t.a().fails::<_, virtio_rdma_rsp_create_qp>("D-XRC-15", CREATE_QP, &wrong, INVALID)?;
    let mut strange = good;
    (strange.base.pdn, strange.base.send_cqn, strange.base.max_send_wr) = (u32::MAX, 99, 1 << 20);
    let qpn = t.a().create_qp_of(0, &strange)?;
    t.journal.pass("D-XRC-15");
    dealloc_fails(t.a(), xrcdn, BUSY)?;
    t.a().qps.remove(&qpn);
    let request = virtio_rdma_cmd_destroy_qp { qpn };
    let () = t.a().command("D-CTRL-28", "DESTROY_QP", VIRTIO_RDMA_CMD_DESTROY_QP, &request)?;
    dealloc_xrcd(t.a(), xrcdn)
}

fn messages_name_their_srq(t: &mut Bench) -> Outcome {
    let Extended { x, y, srqns, .. } = extended(t, 0)?;
    for (which, srqn) in srqns.into_iter().enumerate() {
        let wr_id = 10 + which as u64;
        t.on(&y).post_srq_recv(srqn, wr_id, &[y.sge(0x1000 * wr_id, 100)])?;
    }
    // The receive of the first SRQ was there first.
    for (which, srqn) in srqns.into_iter().enumerate().rev() {
        let wr_id = 10 + which as u64;
        let sent = t.fill(&x, 0, 100);
        t.post(&x, &x.send(wr_id, SEND, 0, 100).srqn(srqn))?;
        t.succeeds(&x, "D-XRC-30", wr_id)?;
        let cqe = t.succeeds(&y, "D-XRC-31", wr_id)?;
        t.journal.is("D-XRC-34", "qp_num and srqn", (cqe.qp_num, cqe.srqn), (y.qpn, srqn))?;
        let got = t.bytes(&y, 0x1000 * wr_id, 100);
        t.journal.same_bytes("D-XRC-30", "message", &got, &sent)?;
    }
    Ok(())
}

fn keys_are_those_of_the_srq(t: &mut Bench) -> Outcome {
    let Extended { x, y, srqns, .. } = extended(t, READ | WRITE)?;
    let write = |wr_id, key| {
        let send = x.send(wr_id, VIRTIO_RDMA_WR_RDMA_WRITE, 0, 100).rdma(y.area, key);
        send.srqn(srqns[0])
    };
    t.post(&x, &write(1, y.mr.rkey))?;
    t.succeeds(&x, "D-XRC-32", 1)?;
    let pdn = t.on(&y).create_pd()?;
    let mr = t.on(&y).reg_mr(pdn, y.area, 4096, READ | WRITE | LOCAL)?;
    t.post(&x, &write(2, mr.rkey))?;
    t.completes(&x, "D-XRC-32", 2, VIRTIO_RDMA_WC_REM_ACCESS_ERR)?;
    let Extended { x, y, srqns, .. } = extended(t, 0)?;
    t.on(&y).post_srq_recv(srqns[0], 3, &[sge(y.area, 100, mr.lkey)])?;
    t.post(&x, &x.send(4, SEND, 0, 100).srqn(srqns[0]))?;
    t.completes(&y, "D-XRC-32", 3, VIRTIO_RDMA_WC_LOC_PROT_ERR)?;
    Ok(())
}

fn rights_are_those_of_the_target(t: &mut Bench) -> Outcome {
    for (access, opcode) in [(READ, VIRTIO_RDMA_WR_RDMA_WRITE), (WRITE, VIRTIO_RDMA_WR_RDMA_READ)] {
        let Extended { x, y, srqns, .. } = extended(t, access)?;
        t.post(&x, &x.rdma(&y, 1, opcode, 0, 100).srqn(srqns[0]))?;
        t.completes(&x, "D-XRC-33", 1, REFUSED)?;
    }
    Ok(())
}

fn srqs_that_there_are_not(t: &mut Bench) -> Outcome {
    for clause in ["D-XRC-41", "D-XRC-42", "D-XRC-43"] {
        let Extended { x, y, srqns, xrcdn } = extended(t, 0)?;
        let srqn = match clause {
            "D-XRC-41" => {
                destroy_srq(t.on(&y), srqns[1])?;
                srqns[1]
            }
            "D-XRC-42" => t.on(&y).create_srq(y.pdn, DEPTH)?,
            _ => {
                let other = alloc_xrcd(t.on(&y))?;
                t.journal.holds(
                    "D-XRC-11",
                    "a domain has its own number",
                    other != xrcdn,
                    other,
                )?;
                xrc_srq(t, &y, other)?
            }
        };
        if t.on(&y).srqs.contains_key(&srqn) {
            t.on(&y).post_srq_recv(srqn, 1, &[y.sge(0, 100)])?;
        }
        t.post(&x, &Send::new(2, SEND, &[x.sge(0x1000, 100)]).srqn(srqn))?;
        t.completes(&x, clause, 2, REFUSED)?;
        let qpn = y.qpn;
        t.journal.about(clause);
        t.on(&y).await_event(VIRTIO_RDMA_EVENT_QP_REQ_ERR, qpn, "event QP_REQ_ERR")?;
        t.comes_to(&x, clause, VIRTIO_RDMA_QPS_ERR)?;
        t.comes_to(&y, clause, VIRTIO_RDMA_QPS_ERR)?;
        t.is_quiet(&y, clause, "no receive is taken")?;
    }
    t.journal.pass("D-XRC-40");
    Ok(())
}
