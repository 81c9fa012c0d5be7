// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reliable connections: what arrives, and how errors end them.

use std::time::{Duration, Instant};

use abi::*;
use testkit::{sge, Send, LOCAL, READ, WRITE};
use zerocopy::FromZeros;

use crate::bench::{Bench, End, Link, QUIET, TIMEOUT};
use crate::outcome::Outcome;
use crate::test::family;

family! {
    send_arrives Ends []: "D-TERM-23" "D-TERM-21" "D-WQE-30" "D-WQE-31" "D-WQE-32" "D-CQ-10"
        "D-CQ-11" "D-CQ-13" "D-FEAT-08";
    send_with_imm Ends []: "D-CQ-16" "D-TERM-02";
    long_messages Ends []: "D-TERM-21";
    messages_come_in_order Ends []: "D-TERM-22" "D-WQE-06" "D-CQ-03";
    write_arrives Ends []: "D-WQE-30" "D-WQE-31" "D-TERM-26";
    write_with_imm Ends []: "D-WQE-32" "D-CQ-16" "D-CQ-13";
    read_fetches Ends []: "D-WQE-30" "D-WQE-31" "D-CQ-14" "D-TERM-27" "D-CQ-22";
    sges_are_gathered_and_scattered Ends []: "D-WQE-01" "D-WQE-40";
    empty_messages Ends []: "D-WQE-40" "D-CQ-13";
    no_key_for_nothing Ends []: "D-WQE-54";
    same_qp_talks_to_itself One []: "D-TERM-29";
    receive_that_is_too_small Ends []: "D-RC-31";
    missing_receive Ends []: "D-RC-34";
    missing_receive_is_tried_again Ends []: "D-RC-15" "D-RC-20";
    missing_receive_without_a_retry Ends []: "D-RC-15";
    receive_that_comes_late Ends []: "D-RC-16" "D-RING-71";
    no_answer Ends []: "D-RC-35" "D-RC-12" "D-RC-10";
    no_answer_is_tried_again Ends []: "D-RC-11";
    no_timeout Ends []: "D-RC-13";
    wrong_key Ends []: "D-RC-36" "D-MR-04";
    range_beyond_the_mr Ends []: "D-WQE-51" "D-RC-36";
    mr_of_another_pd Ends []: "D-WQE-50" "D-RC-36";
    right_that_the_mr_lacks Ends []: "D-WQE-52" "D-RC-36";
    right_that_the_qp_lacks Ends []: "D-WQE-53" "D-RC-39";
    receive_that_is_malformed Ends []: "D-RC-32" "D-WQE-23";
    read_without_depth Ends []: "D-WQE-55";
    read_from_a_responder_without_depth Ends []: "D-RC-40" "D-WQE-56";
    psn_ahead_is_not_answered Ends []: "D-RC-43" "D-RC-04" "D-RC-02";
    psn_behind_is_not_executed Ends []: "D-RC-04" "D-RC-01";
    read_with_a_psn_behind Ends []: "D-RC-06" "D-RC-04";
    other_path_mtus Ends []: "D-RC-44" "D-RC-45" "D-RC-46" "D-RC-07";
    write_with_imm_by_a_wrong_key Ends []: "D-RC-37" "D-RC-38" "D-RC-47";
    revoked_keys_give_nothing Ends []: "D-WQE-77";
    revoked_rights_give_nothing Ends []: "D-WQE-78";
    strangers_are_not_heard One []: "D-QP-80" "D-TERM-28";
    peer_that_was_reset Two []: "D-RC-35" "D-RST-01" "D-RST-05";
    atomics Ends [VIRTIO_RDMA_F_ATOMICS]:
        "D-WQE-81" "D-WQE-80" "D-WQE-82" "D-WQE-83" "D-WQE-84" "D-WQE-85" "D-RC-41";
}

const SEND: u32 = VIRTIO_RDMA_WR_SEND;
const SEND_IMM: u32 = VIRTIO_RDMA_WR_SEND_WITH_IMM;
const RDMA_WRITE: u32 = VIRTIO_RDMA_WR_RDMA_WRITE;
const WRITE_IMM: u32 = VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM;
const RDMA_READ: u32 = VIRTIO_RDMA_WR_RDMA_READ;
const RC: u32 = VIRTIO_RDMA_QPT_RC;
/// How late a wait may end, because a device may share its processors with others.
const SLACK: Duration = Duration::from_secs(1);

/// Sends a message, and checks both CQEs and the bytes.
fn send_one(t: &mut Bench, x: &End, y: &End, clause: &'static str, len: u32) -> Outcome {
    let far = 0x2_0000;
    let sent = t.fill(x, 0, len);
    t.receive(y, 1, far, len)?;
    t.post(x, &x.send(2, SEND, 0, len))?;
    t.succeeds(x, clause, 2)?;
    let cqe = t.succeeds(y, clause, 1)?;
    t.journal.is("D-CQ-13", "byte_len", cqe.byte_len, len)?;
    let got = t.bytes(y, far, len);
    t.journal.same_bytes("D-TERM-21", "message", &got, &sent)
}

fn send_arrives(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let sent = t.fill(&x, 0, 700);
    t.receive(&y, 7, 0x1000, 1000)?;
    t.post(&x, &x.send(8, SEND, 0, 700))?;
    let cqe = t.succeeds(&x, "D-TERM-23", 8)?;
    t.journal.is("D-WQE-31", "opcode", u32::from(cqe.opcode), VIRTIO_RDMA_WC_SEND)?;
    t.journal.is("D-CQ-10", "qp_num", cqe.qp_num, x.qpn)?;
    let cqe = t.succeeds(&y, "D-WQE-30", 7)?;
    t.journal.is("D-WQE-32", "opcode", u32::from(cqe.opcode), VIRTIO_RDMA_WC_RECV)?;
    t.journal.is("D-CQ-11", "bit 7 of the opcode", cqe.opcode >> 7, 1)?;
    t.journal.is("D-CQ-10", "qp_num", cqe.qp_num, y.qpn)?;
    t.journal.is("D-CQ-13", "byte_len", cqe.byte_len, 700)?;
    t.journal.is("D-CQ-16", "WITH_IMM", cqe.wc_flags & VIRTIO_RDMA_WC_WITH_IMM, 0)?;
    let got = t.bytes(&y, 0x1000, 700);
    t.journal.same_bytes("D-TERM-21", "message", &got, &sent)?;
    t.journal.pass("D-FEAT-08");
    let rest = t.bytes(&y, 0x1000 + 700, 300);
    t.journal.same_bytes("D-TERM-26", "room behind the message", &rest, &[0; 300])
}

fn send_with_imm(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    t.receive(&y, 1, 0, 64)?;
    t.post(&x, &x.send(2, SEND_IMM, 0x100, 64).imm(0x0403_0201))?;
    t.succeeds(&x, "D-CQ-16", 2)?;
    let cqe = t.succeeds(&y, "D-CQ-16", 1)?;
    t.journal.is(
        "D-CQ-16",
        "WITH_IMM",
        cqe.wc_flags & VIRTIO_RDMA_WC_WITH_IMM,
        VIRTIO_RDMA_WC_WITH_IMM,
    )?;
    t.journal.is("D-TERM-02", "imm_data", cqe.ex, 0x0403_0201)
}

fn long_messages(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    for len in [1, 1023, 1024, 1025, 4096, 0xffff, 0x1_8001] {
        send_one(t, &x, &y, "D-TERM-21", len)?;
    }
    Ok(())
}

fn messages_come_in_order(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    for round in 0..4 {
        for at in 0..10_u64 {
            t.receive(&y, 100 + at, at * 256, 256)?;
        }
        for at in 0..10_u64 {
            let mut send = x.send(200 + at, SEND, 0x8000 + at * 64, 1 + at as u32);
            if at % 3 != 0 {
                send = send.flags(0);
            }
            t.post(&x, &send)?;
        }
        for at in 0..10 {
            let cqe = t.succeeds(&y, "D-TERM-22", 100 + at)?;
            t.journal.is("D-TERM-22", "byte_len", u64::from(cqe.byte_len), 1 + at)?;
            t.journal.is("D-CQ-03", "wqe_index", cqe.wqe_index, round * 10 + at as u32)?;
        }
        for at in [0, 3, 6, 9] {
            t.succeeds(&x, "D-WQE-06", 200 + at)?;
        }
    }
    Ok(())
}

fn write_arrives(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let sent = t.fill(&x, 0x100, 3000);
    t.on(&y).write(y.area, &[0x77; 0x2000]);
    t.post(&x, &x.rdma(&y, 5, RDMA_WRITE, 0x100, 3000))?;
    let cqe = t.succeeds(&x, "D-WQE-30", 5)?;
    t.journal.is("D-WQE-31", "opcode", u32::from(cqe.opcode), VIRTIO_RDMA_WC_RDMA_WRITE)?;
    let got = t.bytes(&y, 0, 0x2000);
    let expected = [&[0x77; 0x100][..], &sent, &vec![0x77; 0x2000 - 0x100 - 3000]].concat();
    t.journal.same_bytes("D-TERM-26", "memory of the responder", &got, &expected)?;
    t.is_quiet(&y, "D-WQE-30", "a WRITE takes no receive")
}

fn write_with_imm(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let sent = t.fill(&x, 0x100, 2000);
    t.on(&y).write(y.area, &[0x77; 0x100]);
    t.receive(&y, 9, 0, 16)?;
    t.post(&x, &x.rdma(&y, 5, WRITE_IMM, 0x100, 2000).imm(77))?;
    t.succeeds(&x, "D-WQE-30", 5)?;
    let cqe = t.succeeds(&y, "D-WQE-32", 9)?;
    let opcode = u32::from(cqe.opcode);
    t.journal.is("D-WQE-32", "opcode", opcode, VIRTIO_RDMA_WC_RECV_RDMA_WITH_IMM)?;
    t.journal.is("D-CQ-13", "byte_len", cqe.byte_len, 2000)?;
    t.journal.is("D-CQ-16", "imm_data", cqe.ex, 77)?;
    let got = t.bytes(&y, 0x100, 2000);
    t.journal.same_bytes("D-TERM-21", "message", &got, &sent)?;
    let receive = t.bytes(&y, 0, 16);
    t.journal.same_bytes("D-TERM-26", "memory of the receive", &receive, &[0x77; 16])
}

fn read_fetches(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let there = t.fill(&y, 0x300, 5000);
    t.on(&x).write(x.area, &[0x66; 0x2000]);
    t.post(&x, &x.rdma(&y, 5, RDMA_READ, 0x300, 5000))?;
    let cqe = t.succeeds(&x, "D-WQE-30", 5)?;
    // Whoever sees the CQE sees the bytes.
    let got = t.bytes(&x, 0x300, 5000);
    t.journal.same_bytes("D-CQ-22", "bytes of the READ when its CQE is there", &got, &there)?;
    t.journal.is("D-WQE-31", "opcode", u32::from(cqe.opcode), VIRTIO_RDMA_WC_RDMA_READ)?;
    t.journal.is("D-CQ-14", "byte_len", cqe.byte_len, 5000)?;
    let before = t.bytes(&x, 0, 0x300);
    t.journal.same_bytes("D-TERM-27", "memory in front of the READ", &before, &[0x66; 0x300])
}

fn sges_are_gathered_and_scattered(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let sges = t.on(&x).config.max_send_sge.min(t.on(&y).config.max_recv_sge);
    t.needs(sges >= 3, "fewer than 3 SGEs")?;
    let parts = [t.fill(&x, 0, 100), t.fill(&x, 0x1fff, 3), t.fill(&x, 0x4000, 1000)];
    // An SGE of no bytes needs no key.
    let from = [x.sge(0, 100), x.sge(0x1fff, 3), x.sge(0x4000, 1000), sge(1 << 50, 0, 0)];
    let from = &from[..(t.on(&x).config.max_send_sge as usize).min(4)];
    let to = [y.sge(0x100, 1), y.sge(0x200, 1001), y.sge(0x1000, 200)];
    t.on(&y).post_recv(y.qpn, 1, &to)?;
    t.post(&x, &Send::new(2, SEND, from))?;
    t.succeeds(&x, "D-WQE-40", 2)?;
    t.succeeds(&y, "D-WQE-01", 1)?;
    let got = [t.bytes(&y, 0x100, 1), t.bytes(&y, 0x200, 1001), t.bytes(&y, 0x1000, 101)].concat();
    t.journal.same_bytes("D-WQE-01", "message", &got, &parts.concat())
}

fn empty_messages(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    t.on(&y).post_recv(y.qpn, 1, &[])?;
    t.post(&x, &Send::new(2, SEND, &[]))?;
    t.succeeds(&x, "D-WQE-40", 2)?;
    let cqe = t.succeeds(&y, "D-WQE-40", 1)?;
    t.journal.is("D-CQ-13", "byte_len", cqe.byte_len, 0)
}

fn no_key_for_nothing(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    for (wr_id, opcode) in [(1, RDMA_WRITE), (2, RDMA_READ)] {
        t.post(&x, &Send::new(wr_id, opcode, &[]).rdma(u64::MAX, 0xdead_beef))?;
        t.succeeds(&x, "D-WQE-54", wr_id)?;
    }
    t.is_quiet(&y, "D-WQE-54", "the responder reports nothing")
}

fn same_qp_talks_to_itself(t: &mut Bench) -> Outcome {
    let x = t.end(0, RC)?;
    t.connect(&x, &x, RC, Link::default())?;
    let sent = t.fill(&x, 0, 500);
    t.receive(&x, 1, 0x1000, 500)?;
    t.post(&x, &x.send(2, SEND, 0, 500))?;
    t.journal.about("D-TERM-29");
    let mut ids = [t.on(&x).next(x.cqn)?.wr_id, t.on(&x).next(x.cqn)?.wr_id];
    ids.sort_unstable();
    t.journal.is("D-TERM-29", "CQEs of both", ids, [1, 2])?;
    let got = t.bytes(&x, 0x1000, 500);
    t.journal.same_bytes("D-TERM-29", "message", &got, &sent)
}

/// Checks that both ends of a connection are in ERR.
fn both_fail(t: &mut Bench, x: &End, y: &End, clause: &'static str) -> Outcome {
    t.comes_to(x, clause, VIRTIO_RDMA_QPS_ERR)?;
    t.comes_to(y, clause, VIRTIO_RDMA_QPS_ERR)
}

fn receive_that_is_too_small(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    t.receive(&y, 1, 0, 99)?;
    t.post(&x, &x.send(2, SEND, 0, 100))?;
    t.completes(&x, "D-RC-31", 2, VIRTIO_RDMA_WC_REM_INV_REQ_ERR)?;
    t.completes(&y, "D-RC-31", 1, VIRTIO_RDMA_WC_LOC_LEN_ERR)?;
    both_fail(t, &x, &y, "D-RC-31")
}

fn missing_receive(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    t.post(&x, &x.send(2, SEND, 0, 100))?;
    t.completes(&x, "D-RC-34", 2, VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR)?;
    t.comes_to(&x, "D-RC-34", VIRTIO_RDMA_QPS_ERR)?;
    t.has_state(&y, "D-RC-34", VIRTIO_RDMA_QPS_RTS)
}

/// Sends a message that finds no receive. Returns the time after which the device gives up.
fn time_without_a_receive(t: &mut Bench, rnr_retry: u8, min_rnr_timer: u8) -> Outcome<Duration> {
    let link = Link { rnr_retry, min_rnr_timer, ..Link::default() };
    let (x, _) = t.connection_of(RC, link)?;
    t.journal.extend(SLACK);
    let begin = Instant::now();
    t.post(&x, &x.send(2, SEND, 0, 100))?;
    t.completes(&x, "D-RC-15", 2, VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR)?;
    Ok(begin.elapsed())
}

fn missing_receive_is_tried_again(t: &mut Bench) -> Outcome {
    // The numbers of RNR timers, and their microseconds.
    for (timer, micros) in [(26, 81_920), (24, 40_960)] {
        let took = time_without_a_receive(t, 3, timer)?;
        let least = Duration::from_micros(3 * micros);
        t.journal.holds("D-RC-15", "each of 3 tries waits for the timer", took >= least, took)?;
        // The machine may have kept the device or the suite from working.
        let in_time = took < least + SLACK;
        t.journal.holds("D-RC-20", &format!("3 times {micros} us"), in_time, took)?;
    }
    Ok(())
}

fn missing_receive_without_a_retry(t: &mut Bench) -> Outcome {
    // The machine may keep the device or the suite from working, but not each time.
    let mut least = Duration::MAX;
    for _ in 0..3 {
        least = least.min(time_without_a_receive(t, 0, 0)?);
    }
    let timer = Duration::from_micros(655_360);
    t.journal.holds("D-RC-15", "without a retry, no timer has to end", least < timer, least)
}

fn receive_that_comes_late(t: &mut Bench) -> Outcome {
    let link = Link { rnr_retry: 7, ..Link::default() };
    let (x, y) = t.connection_of(RC, link)?;
    t.post(&x, &x.send(2, SEND, 0, 100))?;
    t.is_quiet(&x, "D-RC-16", "a message waits for a receive")?;
    t.receive(&y, 1, 0x1000, 100)?;
    t.succeeds(&y, "D-RING-71", 1)?;
    t.succeeds(&x, "D-RC-16", 2)?;
    Ok(())
}

fn no_answer(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    t.on(&y).destroy_qp(y.qpn)?;
    let begin = Instant::now();
    t.post(&x, &x.send(2, SEND, 0, 100))?;
    t.completes(&x, "D-RC-35", 2, VIRTIO_RDMA_WC_RETRY_EXC_ERR)?;
    t.journal.pass("D-RC-10");
    let (took, one_try) = (begin.elapsed(), Duration::from_nanos(4096 << TIMEOUT));
    let in_time = took >= one_try * 2;
    t.journal.holds("D-RC-12", "each of two tries waits at least 67 ms", in_time, took)?;
    // The machine may have kept the device or the suite from working.
    if took > one_try * 8 + Duration::from_secs(1) {
        t.journal.remark(format!("two tries take {} ms (D-RC-12)", took.as_millis()));
    }
    t.comes_to(&x, "D-RC-35", VIRTIO_RDMA_QPS_ERR)
}

/// Sends a message that has no answer, of a QP with this `timeout`. Returns the time after which the device gives up.
fn time_without_an_answer(t: &mut Bench, retry_cnt: u8, timeout: u8) -> Outcome<Duration> {
    let far = t.far;
    let (x, y) = (t.end(0, RC)?, t.end(far, RC)?);
    let gid = t.members[y.member].gid;
    t.make_init(&x, RC, 0)?;
    t.make_rtr(&x, RC, (gid, y.qpn), Link::default())?;
    t.on(&y).destroy_qp(y.qpn)?;
    let (mask, mut attr) = Bench::of_rts(RC, Link { retry_cnt, ..Link::default() });
    attr.timeout = timeout;
    t.a().modify(x.qpn, "D-QP-60", mask, attr)?;
    t.journal.extend(2 * SLACK);
    let begin = Instant::now();
    t.post(&x, &x.send(1, SEND, 0, 100))?;
    t.completes(&x, "D-RC-11", 1, VIRTIO_RDMA_WC_RETRY_EXC_ERR)?;
    Ok(begin.elapsed())
}

fn no_answer_is_tried_again(t: &mut Bench) -> Outcome {
    let one_try = |timeout: u8| Duration::from_nanos(4096 << timeout);
    // Five tries take longer than the longest that one may take.
    let took = time_without_an_answer(t, 4, TIMEOUT)?;
    let is_long = took >= 5 * one_try(TIMEOUT);
    t.journal.holds("D-RC-11", "each of 5 tries waits at least 67 ms", is_long, took)?;
    // One try ends before the eight that another QP has.
    let timeout = TIMEOUT + 2;
    let took = time_without_an_answer(t, 0, timeout)?;
    let is_short = took < 4 * one_try(timeout) + SLACK;
    t.journal.holds("D-RC-11", "one try waits at most 1.1 seconds", is_short, took)
}

fn no_timeout(t: &mut Bench) -> Outcome {
    let far = t.far;
    let (x, y) = (t.end(0, RC)?, t.end(far, RC)?);
    let gid = t.members[y.member].gid;
    t.make_init(&x, RC, 0)?;
    t.make_rtr(&x, RC, (gid, y.qpn), Link::default())?;
    let (mask, mut attr) = Bench::of_rts(RC, Link { retry_cnt: 0, ..Link::default() });
    attr.timeout = 0;
    t.a().modify(x.qpn, "D-QP-60", mask, attr)?;
    t.post(&x, &x.send(1, SEND, 0, 100))?;
    t.a().pause(QUIET * 10)?;
    t.is_quiet(&x, "D-RC-13", "a message without a timeout waits")
}

/// Checks that a request is refused, and what the responder says of it.
fn is_refused(t: &mut Bench, (x, y): (&End, &End), clause: &'static str, send: &Send) -> Outcome {
    t.on(y).write(y.area, &[0x77; 0x2000]);
    t.post(x, send)?;
    let key = VIRTIO_RDMA_WC_REM_ACCESS_ERR;
    t.completes(x, clause, send.wr_id, key)?;
    let qpn = y.qpn;
    t.journal.about("D-RC-36");
    t.on(y).await_event(VIRTIO_RDMA_EVENT_QP_ACCESS_ERR, qpn, "event QP_ACCESS_ERR")?;
    both_fail(t, x, y, "D-RC-36")?;
    let got = t.bytes(y, 0, 0x2000);
    t.journal.same_bytes(clause, "memory of the responder", &got, &[0x77; 0x2000])
}

fn wrong_key(t: &mut Bench) -> Outcome {
    for opcode in [RDMA_WRITE, RDMA_READ] {
        let (x, y) = t.connection()?;
        let send = x.send(2, opcode, 0, 100).rdma(y.area, y.mr.rkey ^ 1);
        is_refused(t, (&x, &y), "D-RC-36", &send)?;
    }
    t.journal.pass("D-MR-04");
    Ok(())
}

fn range_beyond_the_mr(t: &mut Bench) -> Outcome {
    for opcode in [RDMA_WRITE, RDMA_READ] {
        let (x, y) = t.connection()?;
        let end = y.area + crate::bench::AREA;
        let send = x.send(2, opcode, 0, 100).rdma(end - 99, y.mr.rkey);
        is_refused(t, (&x, &y), "D-WQE-51", &send)?;
        let (x, y) = t.connection()?;
        let send = x.send(2, opcode, 0, 100).rdma(y.area - 1, y.mr.rkey);
        is_refused(t, (&x, &y), "D-WQE-51", &send)?;
    }
    Ok(())
}

fn mr_of_another_pd(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let pdn = t.on(&y).create_pd()?;
    let mr = t.on(&y).reg_mr(pdn, y.area, 4096, READ | WRITE | LOCAL)?;
    let send = x.send(2, RDMA_WRITE, 0, 100).rdma(y.area, mr.rkey);
    is_refused(t, (&x, &y), "D-WQE-50", &send)
}

fn right_that_the_mr_lacks(t: &mut Bench) -> Outcome {
    for (opcode, access) in [(RDMA_WRITE, READ | LOCAL), (RDMA_READ, WRITE | LOCAL)] {
        let (x, y) = t.connection()?;
        let mr = t.on(&y).reg_mr(y.pdn, y.area, 4096, access)?;
        let send = x.send(2, opcode, 0, 100).rdma(y.area, mr.rkey);
        is_refused(t, (&x, &y), "D-WQE-52", &send)?;
    }
    Ok(())
}

fn right_that_the_qp_lacks(t: &mut Bench) -> Outcome {
    for (opcode, access) in [(RDMA_WRITE, READ), (RDMA_READ, WRITE)] {
        let (x, y) = t.connection_of(RC, Link { access, ..Link::default() })?;
        t.post(&x, &x.rdma(&y, 2, opcode, 0, 100))?;
        t.completes(&x, "D-WQE-53", 2, VIRTIO_RDMA_WC_REM_INV_REQ_ERR)?;
        t.journal.about("D-RC-39");
        let qpn = y.qpn;
        t.on(&y).await_event(VIRTIO_RDMA_EVENT_QP_REQ_ERR, qpn, "event QP_REQ_ERR")?;
        both_fail(t, &x, &y, "D-RC-39")?;
    }
    Ok(())
}

fn receive_that_is_malformed(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let bad = sge(y.area, 100, y.mr.lkey ^ 1);
    t.on(&y).post_recv(y.qpn, 1, &[bad])?;
    t.post(&x, &x.send(2, SEND, 0, 100))?;
    t.completes(&x, "D-RC-32", 2, VIRTIO_RDMA_WC_REM_OP_ERR)?;
    t.completes(&y, "D-WQE-23", 1, VIRTIO_RDMA_WC_LOC_PROT_ERR)?;
    both_fail(t, &x, &y, "D-WQE-23")
}

fn read_without_depth(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection_of(RC, Link { rd_atomic: 0, ..Link::default() })?;
    t.post(&x, &x.rdma(&y, 2, RDMA_READ, 0, 100))?;
    t.completes(&x, "D-WQE-55", 2, VIRTIO_RDMA_WC_LOC_QP_OP_ERR)?;
    Ok(())
}

fn read_from_a_responder_without_depth(t: &mut Bench) -> Outcome {
    let far = t.far;
    let (x, y) = (t.end(0, RC)?, t.end(far, RC)?);
    t.connect(&x, &y, RC, Link::default())?;
    t.connect(&y, &x, RC, Link { rd_atomic: 0, ..Link::default() })?;
    t.post(&x, &x.rdma(&y, 2, RDMA_READ, 0, 100))?;
    t.completes(&x, "D-WQE-56", 2, VIRTIO_RDMA_WC_REM_INV_REQ_ERR)?;
    t.journal.about("D-RC-40");
    let qpn = y.qpn;
    t.on(&y).await_event(VIRTIO_RDMA_EVENT_QP_REQ_ERR, qpn, "event QP_REQ_ERR")
}

fn psn_ahead_is_not_answered(t: &mut Bench) -> Outcome {
    let far = t.far;
    let (x, y) = (t.end(0, RC)?, t.end(far, RC)?);
    t.connect(&x, &y, RC, Link { sq_psn: 100, ..Link::default() })?;
    t.connect(&y, &x, RC, Link::default())?;
    t.receive(&y, 1, 0, 100)?;
    t.post(&x, &x.send(2, SEND, 0x1000, 100))?;
    t.completes(&x, "D-RC-43", 2, VIRTIO_RDMA_WC_RETRY_EXC_ERR)?;
    t.is_quiet(&y, "D-RC-04", "no receive is taken")?;
    t.has_state(&y, "D-RC-43", VIRTIO_RDMA_QPS_RTS)?;
    t.journal.pass("D-RC-02");
    Ok(())
}

fn psn_behind_is_not_executed(t: &mut Bench) -> Outcome {
    let far = t.far;
    let (x, y) = (t.end(0, RC)?, t.end(far, RC)?);
    t.connect(&x, &y, RC, Link { sq_psn: 95, ..Link::default() })?;
    t.connect(&y, &x, RC, Link { rq_psn: 100, ..Link::default() })?;
    t.on(&y).write(y.area, &[0x77; 100]);
    t.receive(&y, 1, 0x1000, 100)?;
    t.post(&x, &x.rdma(&y, 2, RDMA_WRITE, 0, 100))?;
    // Both outcomes are allowed, but nothing is written.
    t.journal.about("D-RC-04");
    let cqe = t.on(&x).next(x.cqn)?;
    let status = u32::from(cqe.status);
    let outcomes = [VIRTIO_RDMA_WC_SUCCESS, VIRTIO_RDMA_WC_RETRY_EXC_ERR];
    t.journal.holds("D-RC-04", "SUCCESS or RETRY_EXC_ERR", outcomes.contains(&status), status)?;
    let got = t.bytes(&y, 0, 100);
    t.journal.same_bytes("D-RC-04", "memory of the responder", &got, &[0x77; 100])?;
    t.is_quiet(&y, "D-RC-04", "no receive is taken")?;
    t.has_state(&y, "D-RC-04", VIRTIO_RDMA_QPS_RTS)?;
    t.journal.pass("D-RC-01");
    Ok(())
}

fn read_with_a_psn_behind(t: &mut Bench) -> Outcome {
    let far = t.far;
    let (x, y) = (t.end(0, RC)?, t.end(far, RC)?);
    t.connect(&x, &y, RC, Link { sq_psn: 95, ..Link::default() })?;
    t.connect(&y, &x, RC, Link { rq_psn: 100, ..Link::default() })?;
    t.on(&x).write(x.area, &[0x77; 100]);
    t.post(&x, &x.rdma(&y, 1, RDMA_READ, 0, 100))?;
    t.completes(&x, "D-RC-06", 1, VIRTIO_RDMA_WC_RETRY_EXC_ERR)?;
    let got = t.bytes(&x, 0, 100);
    t.journal.same_bytes("D-RC-06", "memory of the READ", &got, &[0x77; 100])?;
    t.has_state(&y, "D-RC-04", VIRTIO_RDMA_QPS_RTS)
}

/// Makes a connection whose ends have other path MTUs.
fn unequal(t: &mut Bench) -> Outcome<(End, End)> {
    let far = t.far;
    let (x, y) = (t.end(0, RC)?, t.end(far, RC)?);
    t.connect(&x, &y, RC, Link { path_mtu: 3, ..Link::default() })?;
    t.connect(&y, &x, RC, Link { path_mtu: 2, ..Link::default() })?;
    Ok((x, y))
}

fn other_path_mtus(t: &mut Bench) -> Outcome {
    let refused = VIRTIO_RDMA_WC_REM_INV_REQ_ERR;
    let (x, y) = unequal(t)?;
    send_one(t, &x, &y, "D-RC-07", 500)?;
    t.receive(&y, 3, 0, 2000)?;
    t.post(&x, &x.send(4, SEND, 0x8000, 2000))?;
    t.completes(&x, "D-RC-44", 4, refused)?;
    t.completes(&y, "D-RC-44", 3, VIRTIO_RDMA_WC_LOC_LEN_ERR)?;
    let (x, y) = unequal(t)?;
    t.post(&x, &x.rdma(&y, 5, RDMA_WRITE, 0, 2000))?;
    t.completes(&x, "D-RC-45", 5, refused)?;
    t.journal.about("D-RC-45");
    let qpn = y.qpn;
    t.on(&y).await_event(VIRTIO_RDMA_EVENT_QP_REQ_ERR, qpn, "event QP_REQ_ERR")?;
    let (x, y) = unequal(t)?;
    t.post(&x, &x.rdma(&y, 6, RDMA_READ, 0, 2000))?;
    t.completes(&x, "D-RC-46", 6, VIRTIO_RDMA_WC_LOC_LEN_ERR)?;
    t.has_state(&y, "D-RC-46", VIRTIO_RDMA_QPS_RTS)
}

fn write_with_imm_by_a_wrong_key(t: &mut Bench) -> Outcome {
    let refused = VIRTIO_RDMA_WC_REM_ACCESS_ERR;
    let (x, y) = t.connection()?;
    t.receive(&y, 1, 0, 16)?;
    t.post(&x, &x.send(2, WRITE_IMM, 0, 500).rdma(y.area, y.mr.rkey ^ 1))?;
    t.completes(&x, "D-RC-37", 2, refused)?;
    t.completes(&y, "D-RC-37", 1, VIRTIO_RDMA_WC_LOC_ACCESS_ERR)?;
    both_fail(t, &x, &y, "D-RC-37")?;
    let (x, y) = t.connection()?;
    t.post(&x, &x.send(3, WRITE_IMM, 0, 3000).rdma(y.area, y.mr.rkey ^ 1))?;
    t.completes(&x, "D-RC-38", 3, refused)?;
    t.journal.about("D-RC-38");
    let qpn = y.qpn;
    t.on(&y).await_event(VIRTIO_RDMA_EVENT_QP_ACCESS_ERR, qpn, "event QP_ACCESS_ERR")?;
    let (x, y) = t.connection()?;
    t.post(&x, &x.send(4, WRITE_IMM, 0, 500).rdma(y.area, y.mr.rkey ^ 1))?;
    t.completes(&x, "D-RC-47", 4, VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR)?;
    Ok(())
}

fn revoked_keys_give_nothing(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let mr = t.on(&y).reg_mr(y.pdn, y.area, 4096, READ | WRITE | LOCAL)?;
    let send = x.send(2, RDMA_WRITE, 0, 100).rdma(y.area, mr.rkey);
    t.post(&x, &send)?;
    t.succeeds(&x, "D-WQE-30", 2)?;
    t.on(&y).dereg_mr(mr.mrn)?;
    let again = Send { wr_id: 3, ..send };
    is_refused(t, (&x, &y), "D-WQE-77", &again)
}

fn revoked_rights_give_nothing(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    let mut attr = virtio_rdma_qp_attr::new_zeroed();
    attr.qp_state = VIRTIO_RDMA_QPS_RTS as u8;
    let mask = VIRTIO_RDMA_QP_STATE | VIRTIO_RDMA_QP_ACCESS_FLAGS;
    t.on(&y).modify(y.qpn, "D-QP-40", mask, attr)?;
    t.on(&y).write(y.area, &[0x77; 100]);
    t.post(&x, &x.rdma(&y, 2, RDMA_WRITE, 0, 100))?;
    t.completes(&x, "D-WQE-78", 2, VIRTIO_RDMA_WC_REM_INV_REQ_ERR)?;
    let got = t.bytes(&y, 0, 100);
    t.journal.same_bytes("D-WQE-78", "memory of the responder", &got, &[0x77; 100])
}

fn strangers_are_not_heard(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    // A third QP names x, which is connected to y.
    let z = t.end(0, RC)?;
    t.connect(&z, &x, RC, Link::default())?;
    t.receive(&x, 1, 0, 100)?;
    t.post(&z, &z.send(2, SEND, 0, 100))?;
    t.completes(&z, "D-QP-80", 2, VIRTIO_RDMA_WC_RETRY_EXC_ERR)?;
    t.is_quiet(&x, "D-TERM-28", "no receive is taken")?;
    t.receive(&y, 3, 0, 100)?;
    t.post(&x, &x.send(4, SEND, 0x1000, 100))?;
    t.succeeds(&x, "D-QP-80", 4)?;
    Ok(())
}

fn peer_that_was_reset(t: &mut Bench) -> Outcome {
    let (x, y) = t.connection()?;
    t.receive(&y, 1, 0, 100)?;
    t.on(&y).port.reset()?;
    t.on(&y).forget();
    t.on(&y).freeze(y.area, 0x1000, "D-RST-05");
    t.post(&x, &x.send(2, SEND, 0, 100))?;
    t.completes(&x, "D-RC-35", 2, VIRTIO_RDMA_WC_RETRY_EXC_ERR)?;
    t.journal.pass("D-RST-01");
    t.on(&x).pause(QUIET)
}

/// Returns a word of the memory of an end.
fn word(t: &mut Bench, end: &End, at: u64) -> u64 {
    let bytes = t.bytes(end, at, 8);
    u64::from_le_bytes(bytes.try_into().unwrap_or_default())
}

/// Makes a connection with atomics.
fn atomic_connection(t: &mut Bench) -> Outcome<(End, End)> {
    let access = READ | WRITE | LOCAL | testkit::ATOMIC;
    t.connection_of(RC, Link { access, ..Link::default() })
}

fn atomics(t: &mut Bench) -> Outcome {
    let (x, y) = atomic_connection(t)?;
    t.on(&y).write(y.area + 8, &u64::MAX.to_le_bytes());
    let add = x.send(1, VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD, 0, 8);
    t.post(&x, &add.clone().atomic(y.area + 8, y.mr.rkey, 3, 0))?;
    let cqe = t.succeeds(&x, "D-WQE-81", 1)?;
    t.journal.is("D-WQE-31", "opcode", u32::from(cqe.opcode), VIRTIO_RDMA_WC_FETCH_ADD)?;
    t.journal.is("D-CQ-14", "byte_len", cqe.byte_len, 8)?;
    let (before, after) = (word(t, &x, 0), word(t, &y, 8));
    t.journal.is("D-WQE-83", "earlier number", before, u64::MAX)?;
    t.journal.is("D-WQE-80", "new number", after, 2)?;
    for (wr_id, compare, new) in [(2, 9, 2), (3, 2, 7)] {
        let swap = x.send(wr_id, VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP, 0, 8);
        t.post(&x, &swap.atomic(y.area + 8, y.mr.rkey, compare, 7))?;
        t.succeeds(&x, "D-WQE-82", wr_id)?;
        let got = (word(t, &x, 0), word(t, &y, 8));
        t.journal.is("D-WQE-82", "earlier and new number", got, (2, new))?;
    }
    t.post(&x, &add.clone().atomic(y.area + 4, y.mr.rkey, 3, 0))?;
    t.completes(&x, "D-WQE-85", 1, VIRTIO_RDMA_WC_REM_INV_REQ_ERR)?;
    t.journal.about("D-RC-41");
    let qpn = y.qpn;
    t.on(&y).await_event(VIRTIO_RDMA_EVENT_QP_REQ_ERR, qpn, "event QP_REQ_ERR")?;
    let (x, y) = atomic_connection(t)?;
    let short = x.send(4, VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD, 0, 7);
    t.post(&x, &short.atomic(y.area, y.mr.rkey, 3, 0))?;
    t.completes(&x, "D-WQE-84", 4, VIRTIO_RDMA_WC_LOC_LEN_ERR)?;
    Ok(())
}
