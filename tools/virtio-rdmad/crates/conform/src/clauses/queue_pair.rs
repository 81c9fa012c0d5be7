// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Queue pairs: states, transitions and attributes.

use abi::*;
use testkit::command;
use testkit::{LOCAL, READ, WRITE};
use zerocopy::FromZeros;

use crate::bench::{Bench, Change, End, Link, QKEY, QUIET};
use crate::objects::Shape;
use crate::outcome::Outcome;
use crate::test::family;

family! {
    capabilities_out_of_range One []: "D-CTRL-69" "D-QP-02";
    types_of_options One []: "D-QP-01";
    transitions_that_there_are_not One []: "D-QP-41";
    attributes_that_are_missing One []: "D-QP-43";
    attributes_that_do_not_belong One []: "D-QP-42";
    current_state One []: "D-QP-44" "D-QP-45";
    values_out_of_range One []: "D-QP-60";
    failed_modify_changes_nothing One []: "D-QP-46" "D-CTRL-14";
    query_gives_what_was_set One []:
        "D-QP-71" "D-QP-72" "D-QP-73" "D-QP-74" "D-QP-75" "D-QP-76" "D-QP-77" "D-QP-78";
    reset_forgets One []: "D-QP-21" "D-QP-22" "D-RING-62";
    qp_works_after_reset Ends []: "D-QP-21" "D-RING-61";
    psn_runs_on Ends []: "D-QP-73" "D-QP-74" "D-RC-03" "D-RC-01" "D-RC-02";
    receives_wait_in_init Ends []: "D-QP-12" "D-QP-19";
    receives_are_taken_in_rtr Ends []: "D-QP-13" "D-EVT-07";
    sends_wait_in_rtr Ends []: "D-QP-13";
    err_flushes Ends []: "D-QP-17" "D-QP-18" "D-WQE-67" "D-WQE-73" "D-WQE-71";
    err_takes_no_message Ends []: "D-QP-17";
    sqd_drains_and_tells Ends []: "D-QP-15" "D-QP-25" "D-QP-76";
    sqd_drains_without_telling Ends []: "D-QP-26";
    sqd_to_sqd_keeps_the_event Ends []: "D-QP-27";
    sqd_that_is_left_early Ends []: "D-QP-28";
    messages_for_a_qp_in_reset Ends []: "D-QP-11";
    cq_in_error_and_reset One []: "D-QP-32" "D-QP-33";
    qp_comes_back_from_qp_fatal One []: "D-QP-34";
    read_of_many_sges One []: "D-QP-03";
    sqe_flushes_sends_alone Ends []: "D-QP-16" "D-WQE-24";
    destroyed_qp_leaves_its_cqes One []: "D-CQ-04" "D-RING-35";
    reset_to_rtr Ends [VIRTIO_RDMA_F_RESET_TO_RTR]: "D-QP-50" "D-QP-51";
    reset_to_rtr_gives_receives_back One [VIRTIO_RDMA_F_RESET_TO_RTR]: "D-QP-52";
}

const RC: u32 = VIRTIO_RDMA_QPT_RC;
const UD: u32 = VIRTIO_RDMA_QPT_UD;
const RESET: u32 = VIRTIO_RDMA_QPS_RESET;
const INIT: u32 = VIRTIO_RDMA_QPS_INIT;
const RTR: u32 = VIRTIO_RDMA_QPS_RTR;
const RTS: u32 = VIRTIO_RDMA_QPS_RTS;
const SQD: u32 = VIRTIO_RDMA_QPS_SQD;
const SQE: u32 = VIRTIO_RDMA_QPS_SQE;
const ERR: u32 = VIRTIO_RDMA_QPS_ERR;
const STATE: u32 = VIRTIO_RDMA_STATUS_STATE;
const INVALID: u32 = VIRTIO_RDMA_STATUS_INVAL;
const SEND: u32 = VIRTIO_RDMA_WR_SEND;

/// Returns attributes with a state and nothing else.
fn to(state: u32) -> virtio_rdma_qp_attr {
    let mut attr = virtio_rdma_qp_attr::new_zeroed();
    attr.qp_state = state as u8;
    attr
}

/// Takes a new QP to a state.
fn end_in(t: &mut Bench, kind: u32, state: u32) -> Outcome<End> {
    let x = t.end(0, kind)?;
    if [INIT, RTR, RTS, SQD].contains(&state) {
        t.make_init(&x, kind, READ | WRITE)?;
    }
    if [RTR, RTS, SQD].contains(&state) {
        let gid = t.a().gid;
        t.make_rtr(&x, kind, (gid, x.qpn), Link::default())?;
    }
    if [RTS, SQD].contains(&state) {
        t.make_rts(&x, kind, Link::default())?;
    }
    if state == SQD {
        t.a().set_state(x.qpn, SQD)?;
    }
    if state == ERR {
        t.make_init(&x, kind, 0)?;
        t.a().set_state(x.qpn, ERR)?;
    }
    Ok(x)
}

fn capabilities_out_of_range(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (pdn, cqn) = (a.create_pd()?, a.create_cq(16)?);
    let shape = Shape { kind: RC, send_cqn: cqn, recv_cqn: cqn, signals_all: false, inline: 0 };
    let (_, good) = a.qp_request(pdn, &shape);
    let config = a.config;
    let cases: Vec<Change<virtio_rdma_cmd_create_qp>> = vec![
        Box::new(|it| it.max_send_wr = 0),
        Box::new(move |it| it.max_send_wr = config.ring_max_qp_wr + 1),
        Box::new(move |it| it.max_recv_wr = config.ring_max_qp_wr + 1),
        Box::new(|it| it.max_send_sge = 0),
        Box::new(move |it| it.max_send_sge = config.max_send_sge + 1),
        Box::new(move |it| it.max_recv_sge = config.max_recv_sge + 1),
    ];
    for change in cases {
        let mut request = good;
        change(&mut request.base);
        let name = ("CREATE_RING_QP", VIRTIO_RDMA_CMD_CREATE_RING_QP);
        a.fails::<_, virtio_rdma_rsp_create_qp>("D-CTRL-69", name, &request, INVALID)?;
    }
    a.journal.pass("D-QP-02");
    Ok(())
}

fn types_of_options(t: &mut Bench) -> Outcome {
    let a = t.a();
    let (pdn, cqn) = (a.create_pd()?, a.create_cq(16)?);
    for kind in [0, 3, 5, 8, 9, 10, 255] {
        let shape = Shape { kind, send_cqn: cqn, recv_cqn: cqn, signals_all: false, inline: 0 };
        let (_, request) = a.qp_request(pdn, &shape);
        let name = ("CREATE_RING_QP", VIRTIO_RDMA_CMD_CREATE_RING_QP);
        let unsupported = VIRTIO_RDMA_STATUS_UNSUPPORTED;
        a.fails::<_, virtio_rdma_rsp_create_qp>("D-QP-01", name, &request, unsupported)?;
    }
    Ok(())
}

fn transitions_that_there_are_not(t: &mut Bench) -> Outcome {
    let wrong: [(u32, &[u32]); 6] = [
        (RESET, &[RTR, RTS, SQD, SQE, ERR]),
        (INIT, &[RTS, SQD, SQE]),
        (RTR, &[INIT, SQD, SQE, RTR]),
        (RTS, &[INIT, RTR, SQE]),
        (SQD, &[INIT, RTR, SQE]),
        (ERR, &[INIT, RTR, RTS, SQD, SQE]),
    ];
    for kind in [RC, UD] {
        for (from, states) in wrong {
            let x = end_in(t, kind, from)?;
            for state in states {
                let change = (VIRTIO_RDMA_QP_STATE, to(*state));
                t.a().modify_fails(x.qpn, "D-QP-41", change, STATE)?;
            }
            t.has_state(&x, "D-QP-41", from)?;
        }
    }
    Ok(())
}

/// Returns each transition of the way to RTS with all that it needs, for QPs that talk to themselves.
fn way(t: &mut Bench, x: &End, kind: u32) -> Vec<(u32, u32, virtio_rdma_qp_attr)> {
    let mut init = to(INIT);
    (init.port_num, init.qkey) = (1, QKEY);
    let gid = t.a().gid;
    let (rtr, of_rtr) = Bench::of_rtr(kind, (gid, x.qpn), Link::default());
    let (rts, of_rts) = Bench::of_rts(kind, Link::default());
    vec![(RESET, command::attr_mask(kind, INIT), init), (INIT, rtr, of_rtr), (RTR, rts, of_rts)]
}

fn attributes_that_are_missing(t: &mut Bench) -> Outcome {
    for kind in [RC, UD] {
        let x = t.end(0, kind)?;
        for (_, mask, attr) in way(t, &x, kind) {
            let needed =
                (0..32).map(|bit| 1 << bit).filter(|bit| mask & bit & !VIRTIO_RDMA_QP_STATE != 0);
            for bit in needed.collect::<Vec<u32>>() {
                t.a().modify_fails(x.qpn, "D-QP-43", (mask & !bit, attr), INVALID)?;
            }
            t.a().modify(x.qpn, "D-QP-40", mask, attr)?;
        }
    }
    Ok(())
}

fn attributes_that_do_not_belong(t: &mut Bench) -> Outcome {
    // Those of no version of this text, and those that no transition has.
    let nowhere =
        [VIRTIO_RDMA_QP_ALT_PATH, VIRTIO_RDMA_QP_CAP, VIRTIO_RDMA_QP_RATE_LIMIT, 1 << 31, 1 << 26];
    for kind in [RC, UD] {
        let x = t.end(0, kind)?;
        for (from, mask, attr) in way(t, &x, kind) {
            let mut wrong = nowhere.to_vec();
            if from != RESET || kind == RC {
                wrong.push(VIRTIO_RDMA_QP_EN_SQD_ASYNC_NOTIFY);
            }
            if kind == UD {
                wrong.extend([VIRTIO_RDMA_QP_AV, VIRTIO_RDMA_QP_RETRY_CNT]);
            } else {
                wrong.push(VIRTIO_RDMA_QP_QKEY);
            }
            for bit in wrong {
                t.a().modify_fails(x.qpn, "D-QP-42", (mask | bit, attr), INVALID)?;
            }
            t.a().modify(x.qpn, "D-QP-40", mask, attr)?;
        }
    }
    Ok(())
}

fn current_state(t: &mut Bench) -> Outcome {
    let x = end_in(t, RC, RTR)?;
    let (mask, mut attr) = Bench::of_rts(RC, Link::default());
    attr.cur_qp_state = RTS as u8;
    let change = (mask | VIRTIO_RDMA_QP_CUR_STATE, attr);
    t.a().modify_fails(x.qpn, "D-QP-44", change, STATE)?;
    attr.cur_qp_state = RTR as u8;
    t.a().modify(x.qpn, "D-QP-44", mask | VIRTIO_RDMA_QP_CUR_STATE, attr)?;
    let x = t.end(0, RC)?;
    let (_, mask, mut attr) = way(t, &x, RC)[0];
    attr.cur_qp_state = RESET as u8;
    let change = (mask | VIRTIO_RDMA_QP_CUR_STATE, attr);
    t.a().modify_fails(x.qpn, "D-QP-45", change, STATE)
}

fn values_out_of_range(t: &mut Bench) -> Outcome {
    let x = t.end(0, RC)?;
    let config = t.a().config;
    let wrong: [Vec<Change<virtio_rdma_qp_attr>>; 3] = [
        vec![
            Box::new(|it| it.pkey_index = 1),
            Box::new(|it| it.port_num = 2),
            Box::new(|it| it.port_num = 0),
            Box::new(|it| it.qp_access_flags = 1 << 31),
        ],
        vec![
            Box::new(|it| it.path_mtu = 0),
            Box::new(|it| it.path_mtu = 6),
            Box::new(|it| it.min_rnr_timer = 32),
            Box::new(|it| it.dest_qp_num = 1 << 24),
            Box::new(|it| it.ah_attr.ah_flags = 0),
            Box::new(|it| it.ah_attr.port_num = 2),
            Box::new(|it| it.ah_attr.grh.sgid_index = 255),
        ],
        vec![
            Box::new(|it| it.timeout = 32),
            Box::new(|it| it.retry_cnt = 8),
            Box::new(|it| it.rnr_retry = 8),
        ],
    ];
    for ((_, mask, attr), changes) in way(t, &x, RC).into_iter().zip(wrong) {
        for change in changes {
            let mut attr = attr;
            change(&mut attr);
            t.a().modify_fails(x.qpn, "D-QP-60", (mask, attr), INVALID)?;
        }
        if let Ok(most) = u8::try_from(config.max_qp_rd_atom + 1) {
            let mut attr = attr;
            attr.max_dest_rd_atomic = most;
            if mask & VIRTIO_RDMA_QP_MAX_DEST_RD_ATOMIC != 0 {
                t.a().modify_fails(x.qpn, "D-QP-60", (mask, attr), INVALID)?;
            }
        }
        t.a().modify(x.qpn, "D-QP-60", mask, attr)?;
    }
    Ok(())
}

fn failed_modify_changes_nothing(t: &mut Bench) -> Outcome {
    let x = end_in(t, RC, INIT)?;
    let before = t.a().query_qp(x.qpn)?;
    let (_, mask, mut attr) = way(t, &x, RC)[1];
    (attr.min_rnr_timer, attr.rq_psn) = (99, 1234);
    t.a().modify_fails(x.qpn, "D-QP-60", (mask, attr), INVALID)?;
    let after = t.a().query_qp(x.qpn)?;
    let bytes = |attr: &virtio_rdma_qp_attr| zerocopy::IntoBytes::as_bytes(attr).to_vec();
    t.journal.same_bytes("D-CTRL-14", "attributes", &bytes(&after), &bytes(&before))?;
    t.journal.pass("D-QP-46");
    Ok(())
}

fn query_gives_what_was_set(t: &mut Bench) -> Outcome {
    let x = t.end(0, RC)?;
    let link = Link { sq_psn: 0xff12_3456, rq_psn: 0x00ab_cdef, ..Link::default() };
    t.make_init(&x, RC, READ | WRITE)?;
    let gid = t.a().gid;
    let (mask, mut attr) = Bench::of_rtr(RC, (gid, 0x12_3456), link);
    (attr.ah_attr.sl, attr.ah_attr.grh.traffic_class) = (3, 0x68);
    // What is reserved is ignored, and is not given back.
    (attr.reserved_27, attr.ah_attr.reserved_22) = (0xff, [0xff; 6]);
    attr.ah_attr.grh.reserved_17 = 0xff;
    t.a().modify(x.qpn, "D-QP-40", mask, attr)?;
    t.make_rts(&x, RC, link)?;
    let got = t.a().query_qp(x.qpn)?;
    let journal = &t.journal;
    journal.is("D-QP-71", "states", (got.qp_state, got.cur_qp_state), (RTS as u8, RTS as u8))?;
    let cap = (got.cap.max_send_wr, got.cap.max_recv_wr);
    journal.is("D-QP-72", "depths in cap", cap, (crate::objects::DEPTH, crate::objects::DEPTH))?;
    journal.is("D-QP-73", "sq_psn", got.sq_psn, 0x12_3456)?;
    journal.is("D-QP-74", "rq_psn", got.rq_psn, 0xab_cdef)?;
    journal.is("D-QP-75", "sq_draining", got.sq_draining, 0)?;
    journal.is("D-QP-76", "en_sqd_async_notify", got.en_sqd_async_notify, 0)?;
    let access = got.qp_access_flags & (READ | WRITE);
    journal.is("D-QP-77", "qp_access_flags", access, READ | WRITE)?;
    journal.is("D-QP-77", "dest_qp_num", got.dest_qp_num, 0x12_3456)?;
    journal.is("D-QP-77", "path_mtu", got.path_mtu, link.path_mtu)?;
    let timers = (got.timeout, got.retry_cnt, got.rnr_retry, got.min_rnr_timer);
    let set = (crate::bench::TIMEOUT, link.retry_cnt, link.rnr_retry, link.min_rnr_timer);
    journal.is("D-QP-77", "timeout, retry_cnt, rnr_retry, min_rnr_timer", timers, set)?;
    let depth = (got.max_rd_atomic, got.max_dest_rd_atomic);
    journal.is("D-QP-77", "READs under way", depth, (link.rd_atomic, link.rd_atomic))?;
    journal.is("D-QP-77", "destination GID", got.ah_attr.grh.dgid, gid)?;
    journal.is(
        "D-QP-77",
        "sl and traffic_class",
        (got.ah_attr.sl, got.ah_attr.grh.traffic_class),
        (3, 0x68),
    )?;
    journal.is("D-QP-77", "port_num", got.port_num, 1)?;
    journal.is("D-QP-78", "reserved_27", got.reserved_27, 0)?;
    journal.is("D-QP-78", "reserved_22", got.ah_attr.reserved_22, [0; 6])
}

fn reset_forgets(t: &mut Bench) -> Outcome {
    let x = end_in(t, RC, RTS)?;
    t.receive(&x, 1, 0, 100)?;
    t.a().reset_qp(x.qpn)?;
    t.is_quiet(&x, "D-QP-21", "no receive completes")?;
    let mut got = t.a().query_qp(x.qpn)?;
    let cap = got.cap;
    got.cap = FromZeros::new_zeroed();
    let bytes = zerocopy::IntoBytes::as_bytes(&got).to_vec();
    t.journal.same_bytes("D-QP-22", "attributes but cap", &bytes, &vec![0; bytes.len()])?;
    t.journal.is("D-QP-72", "max_send_wr in cap", cap.max_send_wr, crate::objects::DEPTH)
}

fn qp_works_after_reset(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    for round in 0..2 {
        t.receive(&y, 1, 0, 100)?;
        t.receive(&y, 2, 0, 100)?;
        t.post(&x, &x.send(3, SEND, 0x1000, 50))?;
        t.succeeds(&x, "D-RING-61", 3)?;
        t.succeeds(&y, "D-RING-61", 1)?;
        if round == 0 {
            for end in [&x, &y] {
                t.on(end).reset_qp(end.qpn)?;
            }
            t.connect(&x, &y, RC, Link::default())?;
            t.connect(&y, &x, RC, Link::default())?;
        }
    }
    t.journal.pass("D-QP-21");
    Ok(())
}

fn psn_runs_on(t: &mut Bench) -> Outcome {
    let link = Link { sq_psn: 0xff_fffe, rq_psn: 7, ..Link::default() };
    let (x, y) = t.connection_of(RC, link)?;
    // Three packets of 1024 bytes.
    t.receive(&y, 1, 0, 3000)?;
    t.post(&x, &x.send(2, SEND, 0x1000, 3000))?;
    t.succeeds(&x, "D-QP-73", 2)?;
    t.succeeds(&y, "D-QP-74", 1)?;
    let (sender, receiver) = (t.on(&x).query_qp(x.qpn)?, t.on(&y).query_qp(y.qpn)?);
    t.journal.is("D-QP-73", "sq_psn of the sender", sender.sq_psn, 1)?;
    t.journal.is("D-QP-74", "rq_psn of the receiver", receiver.rq_psn, 1)?;
    t.journal.is("D-QP-74", "rq_psn of the sender", sender.rq_psn, 7)?;
    for clause in ["D-RC-01", "D-RC-02", "D-RC-03"] {
        t.journal.pass(clause);
    }
    Ok(())
}

fn receives_wait_in_init(t: &mut Bench) -> Outcome {
    let far = t.far;
    let (x, y) = (t.end(0, RC)?, t.end(far, RC)?);
    t.connect(&x, &y, RC, Link::default())?;
    t.make_init(&y, RC, 0)?;
    t.receive(&y, 1, 0, 100)?;
    t.post(&x, &x.send(2, SEND, 0x1000, 100))?;
    t.completes(&x, "D-QP-12", 2, VIRTIO_RDMA_WC_RETRY_EXC_ERR)?;
    let got = t.bytes(&y, 0, 100);
    t.journal.same_bytes("D-QP-19", "memory of the receive", &got, &[0; 100])?;
    t.is_quiet(&y, "D-QP-12", "the receive waits")
}

fn receives_are_taken_in_rtr(t: &mut Bench) -> Outcome {
    let far = t.far;
    let (x, y) = (t.end(0, RC)?, t.end(far, RC)?);
    t.connect(&x, &y, RC, Link::default())?;
    t.make_init(&y, RC, 0)?;
    t.receive(&y, 1, 0, 100)?;
    let gid = t.members[x.member].gid;
    t.make_rtr(&y, RC, (gid, x.qpn), Link::default())?;
    t.post(&x, &x.send(2, SEND, 0x1000, 100))?;
    t.succeeds(&x, "D-QP-13", 2)?;
    t.succeeds(&y, "D-QP-13", 1)?;
    t.journal.about("D-EVT-07");
    let qpn = y.qpn;
    t.on(&y).await_event(VIRTIO_RDMA_EVENT_COMM_EST, qpn, "event COMM_EST")
}

fn sends_wait_in_rtr(t: &mut Bench) -> Outcome {
    let far = t.far;
    let (x, y) = (t.end(0, RC)?, t.end(far, RC)?);
    t.connect(&y, &x, RC, Link::default())?;
    t.make_init(&x, RC, 0)?;
    let gid = t.members[y.member].gid;
    t.make_rtr(&x, RC, (gid, y.qpn), Link::default())?;
    t.receive(&y, 1, 0, 100)?;
    // A driver must not do this; the device then has the send wait.
    t.post(&x, &x.send(2, SEND, 0x1000, 100))?;
    t.is_quiet(&y, "D-QP-13", "the send waits")?;
    t.make_rts(&x, RC, Link::default())?;
    t.succeeds(&y, "D-QP-13", 1)?;
    Ok(())
}

fn err_flushes(t: &mut Bench) -> Outcome {
    let link = Link { rnr_retry: 7, ..Link::default() };
    let (x, y) = t.connection_of(RC, link)?;
    for wr_id in 1..4 {
        t.receive(&x, wr_id, wr_id * 0x1000, 100)?;
    }
    // These wait for a receive of the peer.
    for wr_id in 11..14 {
        t.post(&x, &x.send(wr_id, SEND, wr_id * 0x1000, 100).flags(0))?;
    }
    t.on(&x).set_state(x.qpn, ERR)?;
    t.receive(&x, 4, 0x4000, 100)?;
    t.post(&x, &x.send(14, SEND, 14 * 0x1000, 100))?;
    let flushed = VIRTIO_RDMA_WC_WR_FLUSH_ERR;
    let (mut receives, mut sends) = (1, 11);
    t.journal.about("D-QP-18");
    while receives < 5 || sends < 15 {
        let cqe = t.on(&x).next(x.cqn)?;
        let next = if cqe.opcode & 0x80 != 0 { &mut receives } else { &mut sends };
        t.journal.is("D-QP-18", "flushed work request", cqe.wr_id, *next)?;
        t.journal.is("D-QP-17", "status", u32::from(cqe.status), flushed)?;
        *next += 1;
        t.on(&x).poison(x.area + cqe.wr_id * 0x1000, 100, "D-WQE-71");
    }
    t.journal.pass("D-WQE-67");
    // The peer gets its receives too late.
    t.receive(&y, 5, 0, 100)?;
    t.is_quiet(&y, "D-WQE-73", "nothing is sent that was flushed")?;
    t.is_quiet(&x, "D-QP-18", "one CQE for each work request")
}

fn err_takes_no_message(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    t.on(&y).set_state(y.qpn, ERR)?;
    t.receive(&y, 1, 0, 100)?;
    t.completes(&y, "D-QP-17", 1, VIRTIO_RDMA_WC_WR_FLUSH_ERR)?;
    t.post(&x, &x.send(2, SEND, 0x1000, 100))?;
    t.completes(&x, "D-QP-17", 2, VIRTIO_RDMA_WC_RETRY_EXC_ERR)?;
    Ok(())
}

/// Takes a QP from RTS to SQD. `notify` says whether an event tells when it has drained.
fn drain(t: &mut Bench, x: &End, notify: u8) -> Outcome {
    let mut attr = to(SQD);
    attr.en_sqd_async_notify = notify;
    let mask = VIRTIO_RDMA_QP_STATE | VIRTIO_RDMA_QP_EN_SQD_ASYNC_NOTIFY;
    t.on(x).modify(x.qpn, "D-QP-40", mask, attr)
}

fn sqd_drains_and_tells(t: &mut Bench) -> Outcome {
    let link = Link { rnr_retry: 7, ..Link::default() };
    let (x, y) = t.connection_of(RC, link)?;
    t.post(&x, &x.send(1, SEND, 0, 100))?;
    t.on(&x).pause(QUIET)?;
    drain(t, &x, 1)?;
    let attr = t.on(&x).query_qp(x.qpn)?;
    t.journal.is("D-QP-75", "sq_draining", attr.sq_draining, 1)?;
    t.journal.is("D-QP-76", "en_sqd_async_notify", attr.en_sqd_async_notify, 1)?;
    t.post(&x, &x.send(2, SEND, 0, 100))?;
    t.receive(&y, 11, 0x1000, 100)?;
    t.receive(&y, 12, 0x1000, 100)?;
    t.succeeds(&x, "D-QP-15", 1)?;
    t.journal.about("D-QP-25");
    let qpn = x.qpn;
    t.on(&x).await_event(VIRTIO_RDMA_EVENT_SQ_DRAINED, qpn, "event SQ_DRAINED")?;
    t.is_quiet(&x, "D-QP-15", "no other send starts")?;
    let again = t.on(&x).has_event(VIRTIO_RDMA_EVENT_SQ_DRAINED, qpn)?;
    t.journal.is("D-QP-25", "another SQ_DRAINED", again, false)?;
    t.on(&x).set_state(x.qpn, RTS)?;
    t.succeeds(&x, "D-QP-15", 2)?;
    Ok(())
}

fn sqd_drains_without_telling(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    t.receive(&y, 1, 0, 100)?;
    t.post(&x, &x.send(2, SEND, 0, 100))?;
    t.succeeds(&x, "D-QP-15", 2)?;
    drain(t, &x, 0)?;
    t.on(&x).pause(QUIET)?;
    let qpn = x.qpn;
    let has_event = t.on(&x).has_event(VIRTIO_RDMA_EVENT_SQ_DRAINED, qpn)?;
    t.journal.is("D-QP-26", "SQ_DRAINED", has_event, false)
}

fn sqd_to_sqd_keeps_the_event(t: &mut Bench) -> Outcome {
    let link = Link { rnr_retry: 7, ..Link::default() };
    let (x, y) = t.connection_of(RC, link)?;
    t.post(&x, &x.send(1, SEND, 0, 100))?;
    t.on(&x).pause(QUIET)?;
    drain(t, &x, 1)?;
    let mut attr = to(SQD);
    attr.timeout = 15;
    let mask = VIRTIO_RDMA_QP_STATE | VIRTIO_RDMA_QP_TIMEOUT;
    t.on(&x).modify(x.qpn, "D-QP-40", mask, attr)?;
    t.receive(&y, 11, 0x1000, 100)?;
    t.succeeds(&x, "D-QP-15", 1)?;
    t.journal.about("D-QP-27");
    let qpn = x.qpn;
    t.on(&x).await_event(VIRTIO_RDMA_EVENT_SQ_DRAINED, qpn, "event SQ_DRAINED")
}

fn sqd_that_is_left_early(t: &mut Bench) -> Outcome {
    let link = Link { rnr_retry: 7, ..Link::default() };
    let (x, y) = t.connection_of(RC, link)?;
    t.post(&x, &x.send(1, SEND, 0, 100))?;
    t.on(&x).pause(QUIET)?;
    drain(t, &x, 1)?;
    t.on(&x).set_state(x.qpn, RTS)?;
    t.receive(&y, 11, 0x1000, 100)?;
    t.succeeds(&x, "D-QP-14", 1)?;
    t.on(&x).pause(QUIET)?;
    let qpn = x.qpn;
    let has_event = t.on(&x).has_event(VIRTIO_RDMA_EVENT_SQ_DRAINED, qpn)?;
    t.journal.is("D-QP-28", "SQ_DRAINED", has_event, false)
}

fn messages_for_a_qp_in_reset(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    t.receive(&y, 1, 0, 100)?;
    t.on(&y).reset_qp(y.qpn)?;
    t.on(&y).freeze(y.area, 100, "D-QP-11");
    t.post(&x, &x.send(2, SEND, 0x1000, 100))?;
    t.completes(&x, "D-QP-11", 2, VIRTIO_RDMA_WC_RETRY_EXC_ERR)?;
    t.is_quiet(&y, "D-QP-11", "a QP in RESET takes no message")
}

fn cq_in_error_and_reset(t: &mut Bench) -> Outcome {
    let x = t.end(0, RC)?;
    let cqn = t.a().create_cq(1)?;
    let shape = Shape { kind: RC, send_cqn: cqn, recv_cqn: cqn, signals_all: false, inline: 0 };
    let qpns = [t.a().create_qp(x.pdn, &shape)?, t.a().create_qp(x.pdn, &shape)?];
    let [full, waits] = qpns.map(|qpn| End { cqn, qpn, ..x });
    t.make_init(&full, RC, 0)?;
    t.a().set_state(full.qpn, ERR)?;
    for wr_id in 0..2 {
        t.receive(&full, wr_id, 0, 16)?;
    }
    t.journal.about("D-CQ-34");
    t.a().await_event(VIRTIO_RDMA_EVENT_CQ_ERR, cqn, "event CQ_ERR")?;
    t.has_state(&waits, "D-QP-32", RESET)?;
    t.make_init(&waits, RC, 0)?;
    t.journal.about("D-QP-33");
    t.a().await_event(VIRTIO_RDMA_EVENT_QP_FATAL, waits.qpn, "event QP_FATAL")?;
    t.comes_to(&waits, "D-QP-33", ERR)
}

fn qp_comes_back_from_qp_fatal(t: &mut Bench) -> Outcome {
    let x = end_in(t, RC, RTS)?;
    let at = t.a().qps[&x.qpn].rings.region + testkit::PRODUCER[0];
    t.a().write(at, &u32::MAX.to_le_bytes());
    t.a().ring_doorbell(x.qpn, VIRTIO_RDMA_DOORBELL_SQ)?;
    t.journal.about("D-RING-75");
    t.a().await_event(VIRTIO_RDMA_EVENT_QP_FATAL, x.qpn, "event QP_FATAL")?;
    t.a().reset_qp(x.qpn)?;
    t.connect(&x, &x, RC, Link::default())?;
    t.receive(&x, 1, 0, 100)?;
    t.post(&x, &x.send(2, SEND, 0x1000, 100).flags(0))?;
    t.succeeds(&x, "D-QP-34", 1)?;
    Ok(())
}

fn read_of_many_sges(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let config = t.a().config;
    let most = config.max_sge_rd;
    t.needs(
        most < config.max_send_sge.min(crate::objects::SGES),
        "a READ has as many SGEs as a SEND",
    )?;
    let sges = vec![x.sge(0, 8); most as usize + 1];
    let read = testkit::Send::new(1, VIRTIO_RDMA_WR_RDMA_READ, &sges).rdma(y.area, y.mr.rkey);
    t.post(&x, &read)?;
    t.completes(&x, "D-QP-03", 1, VIRTIO_RDMA_WC_LOC_QP_OP_ERR)?;
    Ok(())
}

fn sqe_flushes_sends_alone(t: &mut Bench) -> Outcome {
    let (x, y) = t.datagrams()?;
    let mut bad = t.datagram(&x, &y, 1, 0, 100);
    bad.sges[0].lkey ^= 1;
    t.receive(&x, 5, 0x1000, 200)?;
    t.post(&x, &bad)?;
    t.completes(&x, "D-WQE-24", 1, VIRTIO_RDMA_WC_LOC_PROT_ERR)?;
    t.has_state(&x, "D-WQE-24", SQE)?;
    let good = t.datagram(&x, &y, 2, 0, 100);
    t.post(&x, &good)?;
    t.completes(&x, "D-QP-16", 2, VIRTIO_RDMA_WC_WR_FLUSH_ERR)?;
    let back = t.datagram(&y, &x, 3, 0, 100);
    t.post(&y, &back)?;
    t.succeeds(&x, "D-QP-16", 5)?;
    t.on(&x).set_state(x.qpn, RTS)?;
    t.receive(&y, 6, 0x1000, 200)?;
    let good = t.datagram(&x, &y, 4, 0, 100);
    t.post(&x, &good)?;
    t.succeeds(&x, "D-QP-16", 4)?;
    Ok(())
}

fn destroyed_qp_leaves_its_cqes(t: &mut Bench) -> Outcome {
    let x = end_in(t, RC, RTS)?;
    t.receive(&x, 1, 0, 100)?;
    t.post(&x, &x.send(2, SEND, 0x1000, 100))?;
    t.a().pause(QUIET)?;
    let cq = &t.a().cqs[&x.cqn];
    let (region, len) = (cq.ring.region, 128 + 2 * 64);
    let before = t.a().bytes(region, len);
    t.a().destroy_qp(x.qpn)?;
    let after = t.a().bytes(region, len);
    // The owner has written its index meanwhile.
    t.journal.same_bytes("D-CQ-04", "CQEs of the QP", &after[128..], &before[128..])
}

/// Returns the mask and the attributes with which an RC QP goes from RESET to RTR at once.
fn at_once(t: &Bench, y: &End) -> (u32, virtio_rdma_qp_attr) {
    let (mask, mut attr) = Bench::of_rtr(RC, (t.members[y.member].gid, y.qpn), Link::default());
    attr.qp_access_flags = READ | WRITE | LOCAL;
    (mask | command::attr_mask(RC, INIT), attr)
}

fn reset_to_rtr(t: &mut Bench) -> Outcome {
    let far = t.far;
    let (x, y) = (t.end(0, RC)?, t.end(far, RC)?);
    t.connect(&x, &y, RC, Link::default())?;
    t.receive(&y, 1, 0, 100)?;
    t.on(&y).ring_doorbell(y.qpn, VIRTIO_RDMA_DOORBELL_RQ)?;
    t.is_quiet(&y, "D-QP-51", "a receive waits in RESET")?;
    let (mask, attr) = at_once(t, &x);
    t.on(&y).modify(y.qpn, "D-QP-50", mask, attr)?;
    t.post(&x, &x.send(2, SEND, 0x1000, 100))?;
    t.succeeds(&y, "D-QP-51", 1)?;
    Ok(())
}

fn reset_to_rtr_gives_receives_back(t: &mut Bench) -> Outcome {
    let x = t.end(0, RC)?;
    t.receive(&x, 1, 0, 100)?;
    t.a().reset_qp(x.qpn)?;
    t.a().poison(x.area, 100, "D-QP-52");
    t.connect(&x, &x, RC, Link { rnr_retry: 1, ..Link::default() })?;
    t.post(&x, &x.send(2, SEND, 0x1000, 100))?;
    t.completes(&x, "D-QP-52", 2, VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR)?;
    Ok(())
}
