// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The control queue: framing, statuses, and what commands do.

use abi::*;
use testkit::command::{self, PAGE};
use testkit::{ALL, LOCAL, READ, WRITE};
use zerocopy::{FromZeros, IntoBytes};

use crate::bench::{Bench, Change};
use crate::driver::{Driver, FILL, NOWHERE};
use crate::objects::Shape;
use crate::outcome::Outcome;
use crate::reply::status_name;
use crate::test::family;

family! {
    requests_are_answered_in_order One []: "D-CTRL-01";
    bytes_are_spread_over_descriptors One []: "D-CTRL-02";
    used_length_is_that_of_the_reply One []: "D-CTRL-03";
    short_request_gets_length One []: "D-CTRL-04" "D-CTRL-14";
    short_room_gets_length One []: "D-CTRL-05" "D-CTRL-14";
    no_room_for_a_status One []: "D-CTRL-06" "D-CTRL-07";
    surplus_bytes_are_ignored One []: "D-CTRL-08";
    unknown_command One []: "D-CTRL-09" "D-CTRL-16";
    commands_of_options_without_them One []:
        "D-CTRL-10" "D-CTRL-16" "D-FRMR-09" "D-SRQ-20" "D-MR-28" "D-MW-10" "D-MCAST-06" "D-XRC-01" "D-MOD-01";
    reserved_members_are_ignored One []: "D-TERM-04";
    length_comes_before_others One []: "D-CTRL-17";
    objects_that_do_not_exist One []:
        "D-CTRL-18" "D-CTRL-42" "D-CTRL-44" "D-CTRL-46" "D-CTRL-55" "D-CTRL-57";
    pds One []: "D-CTRL-22" "D-CTRL-23" "D-CTRL-20" "D-CTRL-40";
    objects_keep_their_pd One []: "D-CTRL-45";
    cqs_are_busy One []: "D-CTRL-43" "D-CTRL-21";
    map_mr_sg One []: "D-CTRL-47";
    query_pkey One []: "D-CTRL-29" "D-CTRL-59";
    qps_are_made_in_reset One []: "D-CTRL-33" "D-CTRL-27" "D-CTRL-28" "D-CTRL-81" "D-FEAT-07";
    refused_qps One []:
        "D-CTRL-67" "D-CTRL-68" "D-CTRL-70" "D-CTRL-71" "D-CTRL-72" "D-CTRL-73";
    one_gsi One []: "D-CTRL-74" "D-RING-06";
    failed_commands_change_nothing One []: "D-CTRL-14";
}

const QUERY_PORT: (&str, u32) = ("QUERY_PORT", VIRTIO_RDMA_CMD_QUERY_PORT);
const QUERY_PKEY: (&str, u32) = ("QUERY_PKEY", VIRTIO_RDMA_CMD_QUERY_PKEY);
const DESTROY_PD: (&str, u32) = ("DESTROY_PD", VIRTIO_RDMA_CMD_DESTROY_PD);
const DESTROY_CQ: (&str, u32) = ("DESTROY_CQ", VIRTIO_RDMA_CMD_DESTROY_CQ);
const DESTROY_QP: (&str, u32) = ("DESTROY_QP", VIRTIO_RDMA_CMD_DESTROY_QP);
const CREATE_RING_QP: (&str, u32) = ("CREATE_RING_QP", VIRTIO_RDMA_CMD_CREATE_RING_QP);
const GET_DMA_MR: (&str, u32) = ("GET_DMA_MR", VIRTIO_RDMA_CMD_GET_DMA_MR);

/// Judges a clause by the status in the first byte of a reply.
fn status_is(a: &Driver, clause: &'static str, what: &str, reply: &[u8], status: u32) -> Outcome {
    let got = reply.first().copied().map_or_else(|| "no reply".into(), |it| status_name(it.into()));
    a.journal.is(clause, what, got, status_name(status))
}

/// Destroys a PD, which must exist.
fn destroy_pd(a: &mut Driver, clause: &'static str, pdn: u32) -> Outcome {
    let (name, number) = DESTROY_PD;
    a.command(clause, name, number, &virtio_rdma_cmd_destroy_pd { pdn })
}

fn requests_are_answered_in_order(t: &mut Bench) -> Outcome {
    let a = t.a();
    a.journal.step("8 requests at once");
    let kinds = [VIRTIO_RDMA_CMD_CREATE_PD, VIRTIO_RDMA_CMD_QUERY_PORT];
    let mut replies = Vec::new();
    for number in (0..8).map(|at| kinds[at % 2]) {
        let port = virtio_rdma_cmd_query_port { port: 1 };
        let request = if number == kinds[0] {
            command::encode(number, &())
        } else {
            command::encode(number, &port)
        };
        replies.push(a.send_request(&request, 256)?);
    }
    for at in replies {
        let reply = a.await_reply()?;
        a.journal.is("D-CTRL-01", "reply", reply.buffers.last().map(|it| it.0), Some(at))?;
    }
    Ok(())
}

fn bytes_are_spread_over_descriptors(t: &mut Bench) -> Outcome {
    let a = t.a();
    let pkey = virtio_rdma_cmd_query_pkey { port: 1, index: 0, reserved_06: 0 };
    let request = command::encode(QUERY_PKEY.1, &pkey);
    let whole = a.request(&request, 256)?;
    a.journal.step("QUERY_PKEY in 6 descriptors");
    let at = a.place(&request);
    let reply = a.place(&vec![FILL; whole.len()]);
    let rest = request.len() as u32 - 3;
    let to = [(at, 1, false), (at + 1, 2, false), (at + 3, rest, false)];
    let from = [(reply, 1, true), (reply + 1, 1, true), (reply + 2, 1, true)];
    a.add(0, &[to, from].concat())?;
    let returned = a.await_reply()?;
    a.journal.is("D-CTRL-02", "used length", returned.written as usize, whole.len())?;
    let bytes = a.bytes(reply, whole.len());
    a.journal.same_bytes("D-CTRL-02", "reply", &bytes, &whole)
}

fn used_length_is_that_of_the_reply(t: &mut Bench) -> Outcome {
    let a = t.a();
    let pdn = a.create_pd()?;
    destroy_pd(a, "D-CTRL-23", pdn)?;
    let request = virtio_rdma_cmd_destroy_pd { pdn };
    let reply = a.request(&command::encode(DESTROY_PD.1, &request), 64)?;
    a.journal.is("D-CTRL-03", "used length of an error", reply.len(), 1)?;
    let request =
        command::encode(VIRTIO_RDMA_CMD_QUERY_PORT, &virtio_rdma_cmd_query_port { port: 1 });
    let reply = a.request(&request, 1 + size_of::<virtio_rdma_rsp_query_port>())?;
    let expected = 1 + size_of::<virtio_rdma_rsp_query_port>();
    a.journal.is("D-CTRL-03", "used length without surplus room", reply.len(), expected)
}

fn short_request_gets_length(t: &mut Bench) -> Outcome {
    let a = t.a();
    let pdn = a.create_pd()?;
    let request = command::encode(DESTROY_PD.1, &virtio_rdma_cmd_destroy_pd { pdn });
    for len in 1..request.len() {
        a.journal.step(format!("DESTROY_PD of {len} bytes"));
        let reply = a.request(&request[..len], 64)?;
        status_is(a, "D-CTRL-04", "status", &reply, VIRTIO_RDMA_STATUS_LENGTH)?;
        a.journal.is("D-CTRL-03", "used length", reply.len(), 1)?;
    }
    destroy_pd(a, "D-CTRL-14", pdn)
}

fn short_room_gets_length(t: &mut Bench) -> Outcome {
    let a = t.a();
    let request = command::encode(VIRTIO_RDMA_CMD_CREATE_PD, &());
    for room in 1..=size_of::<virtio_rdma_rsp_create_pd>() {
        a.journal.step(format!("CREATE_PD with room for {room} bytes"));
        let reply = a.request(&request, room)?;
        status_is(a, "D-CTRL-05", "status", &reply, VIRTIO_RDMA_STATUS_LENGTH)?;
    }
    // DESTROY_PD has a reply without bytes, which always has room.
    let pdn = a.create_pd()?;
    destroy_pd(a, "D-CTRL-14", pdn)
}

fn no_room_for_a_status(t: &mut Bench) -> Outcome {
    let a = t.a();
    let pdn = a.create_pd()?;
    a.journal.step("DESTROY_PD without room for a status");
    a.send_request(&command::encode(DESTROY_PD.1, &virtio_rdma_cmd_destroy_pd { pdn }), 0)?;
    let returned = a.await_reply()?;
    a.journal.is("D-CTRL-06", "used length", returned.written, 0)?;
    destroy_pd(a, "D-CTRL-07", pdn)
}

fn surplus_bytes_are_ignored(t: &mut Bench) -> Outcome {
    let a = t.a();
    let mut request = command::encode(VIRTIO_RDMA_CMD_CREATE_PD, &());
    request.extend([0xff; 100]);
    a.journal.step("CREATE_PD with surplus bytes");
    // request() checks what is behind the reply.
    let reply = a.request(&request, 500)?;
    status_is(a, "D-CTRL-08", "status", &reply, VIRTIO_RDMA_STATUS_OK)?;
    a.journal.is("D-CTRL-08", "used length", reply.len(), 5)
}

fn unknown_command(t: &mut Bench) -> Outcome {
    let a = t.a();
    for number in [0_u8, 19, 31, 43, 50, 100, 255] {
        a.journal.step(format!("command {number}"));
        for request in [vec![number], [vec![number], vec![0; 200]].concat()] {
            let reply = a.request(&request, 300)?;
            status_is(a, "D-CTRL-09", "status", &reply, VIRTIO_RDMA_STATUS_UNSUPPORTED)?;
        }
    }
    let reply = a.request(&[19], 1)?;
    status_is(a, "D-CTRL-16", "status", &reply, VIRTIO_RDMA_STATUS_UNSUPPORTED)
}

/// The commands of options, none of which this test has agreed on.
const OF_OPTIONS: [(&str, u32); 17] = [
    ("CREATE_CQ", VIRTIO_RDMA_CMD_CREATE_CQ),
    ("CREATE_QP", VIRTIO_RDMA_CMD_CREATE_QP),
    ("REQ_NOTIFY_CQ", VIRTIO_RDMA_CMD_REQ_NOTIFY_CQ),
    ("CREATE_MR", VIRTIO_RDMA_CMD_CREATE_MR),
    ("RESIZE_CQ", VIRTIO_RDMA_CMD_RESIZE_CQ),
    ("CREATE_SRQ", VIRTIO_RDMA_CMD_CREATE_SRQ),
    ("MODIFY_SRQ", VIRTIO_RDMA_CMD_MODIFY_SRQ),
    ("QUERY_SRQ", VIRTIO_RDMA_CMD_QUERY_SRQ),
    ("DESTROY_SRQ", VIRTIO_RDMA_CMD_DESTROY_SRQ),
    ("RESIZE_SRQ", VIRTIO_RDMA_CMD_RESIZE_SRQ),
    ("REREG_MR", VIRTIO_RDMA_CMD_REREG_MR),
    ("ALLOC_MW", VIRTIO_RDMA_CMD_ALLOC_MW),
    ("DEALLOC_MW", VIRTIO_RDMA_CMD_DEALLOC_MW),
    ("ATTACH_MCAST", VIRTIO_RDMA_CMD_ATTACH_MCAST),
    ("QUERY_COUNTERS", VIRTIO_RDMA_CMD_QUERY_COUNTERS),
    ("ALLOC_XRCD", VIRTIO_RDMA_CMD_ALLOC_XRCD),
    ("MODIFY_CQ", VIRTIO_RDMA_CMD_MODIFY_CQ),
];

fn commands_of_options_without_them(t: &mut Bench) -> Outcome {
    let a = t.a();
    for (name, number) in OF_OPTIONS {
        a.journal.step(format!("{name} without its feature"));
        let whole = [vec![number as u8], vec![0; 300]].concat();
        let reply = a.request(&whole, 300)?;
        status_is(a, "D-CTRL-10", name, &reply, VIRTIO_RDMA_STATUS_UNSUPPORTED)?;
        let reply = a.request(&whole[..1], 300)?;
        status_is(a, "D-CTRL-16", name, &reply, VIRTIO_RDMA_STATUS_UNSUPPORTED)?;
    }
    let of_options =
        ["D-FRMR-09", "D-SRQ-20", "D-MR-28", "D-MW-10", "D-MCAST-06", "D-XRC-01", "D-MOD-01"];
    for clause in of_options {
        a.journal.pass(clause);
    }
    Ok(())
}

fn reserved_members_are_ignored(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (pdn, cqn) = (a.create_pd()?, a.create_cq(16)?);
    let (_, mut request) = a.qp_request(pdn, &shape(VIRTIO_RDMA_QPT_RC, cqn));
    (request.base.reserved_07, request.base.reserved) = (0xff, [u32::MAX; 8]);
    (request.region.reserved_0c, request.sq.reserved_0c) = (u32::MAX, u32::MAX);
    request.reserved = [u32::MAX; 6];
    // What belongs to options is reserved without them.
    request.xrcdn = u32::MAX;
    let (name, number) = CREATE_RING_QP;
    let _: virtio_rdma_rsp_create_qp = a.command("D-TERM-04", name, number, &request)?;
    let (_, mut request) = a.cq_request(16);
    request.region.reserved_0c = u32::MAX;
    let (name, number) = ("CREATE_RING_CQ", VIRTIO_RDMA_CMD_CREATE_RING_CQ);
    let _: virtio_rdma_rsp_create_cq = a.command("D-TERM-04", name, number, &request)?;
    Ok(())
}

fn length_comes_before_others(t: &mut Bench) -> Outcome {
    let a = t.a();
    let request = command::encode(QUERY_PORT.1, &virtio_rdma_cmd_query_port { port: 9 });
    a.journal.step("QUERY_PORT of port 9 with little room");
    let reply = a.request(&request, 2)?;
    status_is(a, "D-CTRL-17", "status", &reply, VIRTIO_RDMA_STATUS_LENGTH)
}

fn objects_that_do_not_exist(t: &mut Bench) -> Outcome {
    let a = t.a();
    let none = VIRTIO_RDMA_STATUS_NO_OBJECT;
    for number in [1000, u32::MAX] {
        let cq = virtio_rdma_cmd_destroy_cq { cqn: number };
        a.fails::<_, ()>("D-CTRL-42", DESTROY_CQ, &cq, none)?;
        let pd = virtio_rdma_cmd_destroy_pd { pdn: number };
        a.fails::<_, ()>("D-CTRL-44", DESTROY_PD, &pd, none)?;
        let qp = virtio_rdma_cmd_destroy_qp { qpn: number };
        a.fails::<_, ()>("D-CTRL-57", DESTROY_QP, &qp, none)?;
        let mr = virtio_rdma_cmd_dereg_mr { mrn: number };
        a.fails::<_, ()>("D-CTRL-55", ("DEREG_MR", VIRTIO_RDMA_CMD_DEREG_MR), &mr, none)?;
        let dma = virtio_rdma_cmd_get_dma_mr { pdn: number, access_flags: LOCAL };
        a.fails::<_, virtio_rdma_rsp_mr>("D-CTRL-46", GET_DMA_MR, &dma, none)?;
        let query = virtio_rdma_cmd_query_qp { qpn: number, attr_mask: 0 };
        let name = ("QUERY_QP", VIRTIO_RDMA_CMD_QUERY_QP);
        a.fails::<_, virtio_rdma_rsp_query_qp>("D-CTRL-57", name, &query, none)?;
        let mut modify = virtio_rdma_cmd_modify_qp::new_zeroed();
        // The state and the mask are wrong, too.
        (modify.qpn, modify.attr_mask, modify.attr.qp_state) = (number, u32::MAX, 99);
        let name = ("MODIFY_QP", VIRTIO_RDMA_CMD_MODIFY_QP);
        a.fails::<_, ()>("D-CTRL-18", name, &modify, none)?;
    }
    let qp = virtio_rdma_cmd_destroy_qp { qpn: 0 };
    a.fails::<_, ()>("D-CTRL-57", DESTROY_QP, &qp, none)
}

fn pds(t: &mut Bench) -> Outcome {
    let a = t.a();
    let pdns = [a.create_pd()?, a.create_pd()?, a.create_pd()?];
    let differ = pdns[0] != pdns[1] && pdns[1] != pdns[2] && pdns[0] != pdns[2];
    a.journal.holds("D-CTRL-22", "PDs have numbers of their own", differ, pdns)?;
    for pdn in pdns {
        destroy_pd(a, "D-CTRL-23", pdn)?;
        let request = virtio_rdma_cmd_destroy_pd { pdn };
        a.fails::<_, ()>("D-CTRL-23", DESTROY_PD, &request, VIRTIO_RDMA_STATUS_NO_OBJECT)?;
    }
    a.journal.pass("D-CTRL-20");
    a.journal.pass("D-CTRL-40");
    Ok(())
}

fn objects_keep_their_pd(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (pdn, at) = (a.create_pd()?, a.allocate(PAGE, PAGE));
    let request = virtio_rdma_cmd_destroy_pd { pdn };
    let busy = VIRTIO_RDMA_STATUS_BUSY;
    let mr = a.reg_mr(pdn, at, PAGE, LOCAL)?;
    a.fails::<_, ()>("D-CTRL-45", DESTROY_PD, &request, busy)?;
    a.dereg_mr(mr.mrn)?;
    let cqn = a.create_cq(16)?;
    let shape = shape(VIRTIO_RDMA_QPT_RC, cqn);
    let qpn = a.create_qp(pdn, &shape)?;
    a.fails::<_, ()>("D-CTRL-45", DESTROY_PD, &request, busy)?;
    a.destroy_qp(qpn)?;
    destroy_pd(a, "D-CTRL-23", pdn)
}

fn shape(kind: u32, cqn: u32) -> Shape {
    Shape { kind, send_cqn: cqn, recv_cqn: cqn, signals_all: false, inline: 0 }
}

fn cqs_are_busy(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (pdn, send_cqn, recv_cqn) = (a.create_pd()?, a.create_cq(16)?, a.create_cq(16)?);
    let shape = Shape { recv_cqn, ..shape(VIRTIO_RDMA_QPT_RC, send_cqn) };
    let qpn = a.create_qp(pdn, &shape)?;
    for cqn in [send_cqn, recv_cqn] {
        let request = virtio_rdma_cmd_destroy_cq { cqn };
        a.fails::<_, ()>("D-CTRL-43", DESTROY_CQ, &request, VIRTIO_RDMA_STATUS_BUSY)?;
    }
    a.destroy_qp(qpn)?;
    for cqn in [send_cqn, recv_cqn] {
        a.destroy_cq(cqn)?;
        let request = virtio_rdma_cmd_destroy_cq { cqn };
        a.fails::<_, ()>("D-CTRL-21", DESTROY_CQ, &request, VIRTIO_RDMA_STATUS_NO_OBJECT)?;
    }
    Ok(())
}

fn map_mr_sg(t: &mut Bench) -> Outcome {
    let a = t.a();
    a.journal.step("MAP_MR_SG");
    let request = [vec![VIRTIO_RDMA_CMD_MAP_MR_SG as u8], vec![0; 64]].concat();
    let reply = a.request(&request, 64)?;
    status_is(a, "D-CTRL-47", "status", &reply, VIRTIO_RDMA_STATUS_UNSUPPORTED)
}

fn query_pkey(t: &mut Bench) -> Outcome {
    let a = t.a();
    let request = |port, index| virtio_rdma_cmd_query_pkey { port, index, reserved_06: 0 };
    let (name, number) = QUERY_PKEY;
    let reply: virtio_rdma_rsp_query_pkey = a.command("D-CTRL-29", name, number, &request(1, 0))?;
    a.journal.is("D-CTRL-29", "pkey", reply.pkey, 0xffff)?;
    for wrong in [request(0, 0), request(2, 0), request(1, 1), request(1, u16::MAX)] {
        let invalid = VIRTIO_RDMA_STATUS_INVAL;
        a.fails::<_, virtio_rdma_rsp_query_pkey>("D-CTRL-59", QUERY_PKEY, &wrong, invalid)?;
    }
    Ok(())
}

fn qps_are_made_in_reset(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (pdn, cqn) = (a.create_pd()?, a.create_cq(16)?);
    for kind in [VIRTIO_RDMA_QPT_RC, VIRTIO_RDMA_QPT_UD, VIRTIO_RDMA_QPT_GSI] {
        let qpn = a.create_qp(pdn, &shape(kind, cqn))?;
        a.journal.holds("D-CTRL-81", "number of a QP", qpn != 0, qpn)?;
        let attr = a.query_qp(qpn)?;
        a.journal.is("D-CTRL-33", "state", u32::from(attr.qp_state), VIRTIO_RDMA_QPS_RESET)?;
        a.destroy_qp(qpn)?;
        let request = virtio_rdma_cmd_destroy_qp { qpn };
        a.fails::<_, ()>("D-CTRL-28", DESTROY_QP, &request, VIRTIO_RDMA_STATUS_NO_OBJECT)?;
    }
    a.journal.pass("D-FEAT-07");
    Ok(())
}

fn refused_qps(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (pdn, cqn) = (a.create_pd()?, a.create_cq(16)?);
    let (_, good) = a.qp_request(pdn, &shape(VIRTIO_RDMA_QPT_RC, cqn));
    let most_inline = a.config.ring_max_inline_data;
    let (invalid, none) = (VIRTIO_RDMA_STATUS_INVAL, VIRTIO_RDMA_STATUS_NO_OBJECT);
    let unsupported = VIRTIO_RDMA_STATUS_UNSUPPORTED;
    let cases: Vec<(&'static str, u32, Change<virtio_rdma_cmd_create_ring_qp>)> = vec![
        ("D-CTRL-67", none, Box::new(|it| it.base.pdn = u32::MAX)),
        ("D-CTRL-67", none, Box::new(|it| it.base.send_cqn = u32::MAX)),
        ("D-CTRL-67", none, Box::new(|it| it.base.recv_cqn = u32::MAX)),
        ("D-CTRL-68", invalid, Box::new(|it| it.base.sq_sig_type = 2)),
        ("D-CTRL-70", invalid, Box::new(move |it| it.base.max_inline_data = most_inline + 1)),
        ("D-CTRL-71", invalid, Box::new(|it| it.flags |= 1 << 31)),
        ("D-CTRL-72", unsupported, Box::new(|it| it.base.qp_type = 0)),
        ("D-CTRL-72", unsupported, Box::new(|it| it.base.qp_type = 77)),
        ("D-CTRL-72", unsupported, Box::new(|it| it.base.qp_type = VIRTIO_RDMA_QPT_UC as u8)),
        ("D-CTRL-73", unsupported, Box::new(|it| it.base.create_flags = 1 << 7)),
    ];
    for (clause, status, change) in cases {
        let mut request = good;
        change(&mut request);
        a.fails::<_, virtio_rdma_rsp_create_qp>(clause, CREATE_RING_QP, &request, status)?;
    }
    Ok(())
}

fn one_gsi(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (pdn, cqn) = (a.create_pd()?, a.create_cq(16)?);
    let gsi = shape(VIRTIO_RDMA_QPT_GSI, cqn);
    let qpn = a.create_qp(pdn, &gsi)?;
    let (_, request) = a.qp_request(pdn, &gsi);
    let busy = VIRTIO_RDMA_STATUS_BUSY;
    a.fails::<_, virtio_rdma_rsp_create_qp>("D-CTRL-74", CREATE_RING_QP, &request, busy)?;
    a.destroy_qp(qpn)?;
    a.create_qp(pdn, &gsi)?;
    Ok(())
}

fn failed_commands_change_nothing(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (pdn, at) = (a.create_pd()?, a.allocate(2 * PAGE, PAGE));
    // MRs that are refused keep the PD as little as those that are gone.
    let mut request = a.mr_request(pdn, at, 2 * PAGE, ALL);
    request.access_flags = READ | WRITE;
    let name = ("REG_USER_MR", VIRTIO_RDMA_CMD_REG_USER_MR);
    let invalid = VIRTIO_RDMA_STATUS_INVAL;
    a.fails::<_, virtio_rdma_rsp_mr>("D-MR-08", name, &request, invalid)?;
    let mut request = a.mr_request(pdn, at, 2 * PAGE, LOCAL);
    request.pages = a.table(&[at, NOWHERE]);
    let fault = VIRTIO_RDMA_STATUS_FAULT;
    a.fails::<_, virtio_rdma_rsp_mr>("D-CTRL-54", name, &request, fault)?;
    let mut request = a.cq_request(16).1;
    request.region.npages = 0;
    let name = ("CREATE_RING_CQ", VIRTIO_RDMA_CMD_CREATE_RING_CQ);
    a.fails::<_, virtio_rdma_rsp_create_cq>("D-RING-26", name, &request, invalid)?;
    a.journal.step(format!("the request had {} bytes", request.as_bytes().len()));
    destroy_pd(a, "D-CTRL-14", pdn)
}
