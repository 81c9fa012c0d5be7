// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests reliable connections.

use std::time::Duration;

use abi::*;
use testkit::command::reg_user_mr;
use zerocopy::FromZeros;

use super::cable::cable;
use super::driver::*;
use crate::{Counter, Limits, Next};

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
const SEND: u32 = VIRTIO_RDMA_WR_SEND;
const RDMA_WRITE: u32 = VIRTIO_RDMA_WR_RDMA_WRITE;
const RDMA_READ: u32 = VIRTIO_RDMA_WR_RDMA_READ;

#[test]
pub fn send_arrives_in_the_receive() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let data = pair.a.fill(DATA, 5000, 1);
    let places = [sge(DATA, 100, b.key), sge(DATA + 0x5000, 8000, b.key)];
    pair.b.post_recv(b.qpn, 70, &places);
    let parts = [sge(DATA, 4000, a.key), sge(DATA + 4000, 1000, a.key)];
    let send = Send::new(7, VIRTIO_RDMA_WR_SEND_WITH_IMM, &parts).imm(0x0102_0304);
    pair.a.post_send(a.qpn, &send);
    pair.settle();
    let cqe = pair.poll_b().unwrap();
    assert_eq!(brief(Some(cqe)), Some((70, OK, VIRTIO_RDMA_WC_RECV)));
    assert_eq!((cqe.byte_len, cqe.ex, cqe.qp_num), (5000, 0x0102_0304, b.qpn));
    assert_eq!(cqe.wc_flags, VIRTIO_RDMA_WC_WITH_IMM);
    assert_eq!(brief(pair.poll_a()), Some((7, OK, VIRTIO_RDMA_WC_SEND)));
    assert!(pair.poll_a().is_none() && pair.poll_b().is_none());
    let found = [pair.b.bytes(DATA, 100), pair.b.bytes(DATA + 0x5000, 4900)].concat();
    assert_eq!(found, data);
}

#[test]
pub fn write_and_read_move_large_messages() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let len = 3 * (256 << 10) + 17;
    let data = pair.a.fill(DATA, len, 9);
    let there = DATA + 0x0010_0001;
    let part = [sge(DATA, len as u32, a.key)];
    pair.a.post_send(a.qpn, &Send::new(1, RDMA_WRITE, &part).rdma(there, b.key));
    let back = [sge(DATA + (4 << 20), len as u32, a.key)];
    pair.a.post_send(a.qpn, &Send::new(2, RDMA_READ, &back).rdma(there, b.key));
    pair.settle();
    assert_eq!(brief(pair.poll_a()), Some((1, OK, VIRTIO_RDMA_WC_RDMA_WRITE)));
    let cqe = pair.poll_a().unwrap();
    assert_eq!(brief(Some(cqe)), Some((2, OK, VIRTIO_RDMA_WC_RDMA_READ)));
    assert_eq!(cqe.byte_len as usize, len);
    assert!(pair.b.bytes(there, len) == data);
    assert!(pair.a.bytes(DATA + (4 << 20), len) == data);
    assert!(pair.poll_b().is_none());
    assert_eq!(pair.a.device.counter(Counter::WriteBytes), len as u64);
    let psn = (len as u32).div_ceil(1024);
    assert_eq!(pair.a.query(a.qpn).sq_psn, 2 * psn);
    assert_eq!(pair.b.query(b.qpn).rq_psn, 2 * psn);
}

#[test]
pub fn write_with_immediate_takes_a_receive() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let data = pair.a.fill(DATA, 64, 3);
    pair.b.post_recv(b.qpn, 5, &[]);
    let write = VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM;
    let part = [sge(DATA, 64, a.key)];
    pair.a.post_send(a.qpn, &Send::new(6, write, &part).rdma(DATA, b.key).imm(9));
    pair.settle();
    let cqe = pair.poll_b().unwrap();
    let opcode = VIRTIO_RDMA_WC_RECV_RDMA_WITH_IMM;
    assert_eq!(brief(Some(cqe)), Some((5, OK, opcode)));
    assert_eq!((cqe.byte_len, cqe.ex), (64, 9));
    assert_eq!(pair.b.bytes(DATA, 64), data);
    assert_eq!(brief(pair.poll_a()), Some((6, OK, VIRTIO_RDMA_WC_RDMA_WRITE)));
}

#[test]
pub fn atomics_answer_what_was_there() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    pair.b.memory.write(DATA, &40_u64.to_le_bytes()).unwrap();
    let result = [sge(DATA + 16, 8, a.key)];
    let add = VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD;
    let swap = VIRTIO_RDMA_WR_ATOMIC_CMP_AND_SWP;
    let word = |guest: &Guest, at| guest.memory.read_obj::<u64>(at).unwrap();
    pair.a.post_send(a.qpn, &Send::new(1, add, &result).atomic(DATA, b.key, 2, 0));
    pair.settle();
    let cqe = pair.poll_a();
    assert_eq!(brief(cqe), Some((1, OK, VIRTIO_RDMA_WC_FETCH_ADD)));
    assert_eq!(cqe.unwrap().byte_len, 8);
    assert_eq!((word(&pair.a, DATA + 16), word(&pair.b, DATA)), (40, 42));
    pair.a.post_send(a.qpn, &Send::new(2, swap, &result).atomic(DATA, b.key, 42, 7));
    pair.a.post_send(a.qpn, &Send::new(3, swap, &result).atomic(DATA, b.key, 42, 8));
    pair.settle();
    assert_eq!(brief(pair.poll_a()), Some((2, OK, VIRTIO_RDMA_WC_COMP_SWAP)));
    assert_eq!(brief(pair.poll_a()), Some((3, OK, VIRTIO_RDMA_WC_COMP_SWAP)));
    assert_eq!((word(&pair.a, DATA + 16), word(&pair.b, DATA)), (7, 7));
}

#[test]
pub fn only_signaled_work_requests_complete() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let part = [sge(DATA, 8, a.key)];
    let write = |wr_id, flags| Send::new(wr_id, RDMA_WRITE, &part).rdma(DATA, b.key).flags(flags);
    for wr_id in 1..=3 {
        let last = if wr_id == 3 { VIRTIO_RDMA_SEND_SIGNALED } else { 0 };
        pair.a.post_send(a.qpn, &write(wr_id, last | VIRTIO_RDMA_SEND_FENCE));
    }
    pair.settle();
    assert_eq!(brief(pair.poll_a()), Some((3, OK, VIRTIO_RDMA_WC_RDMA_WRITE)));
    assert!(pair.poll_a().is_none());
    if !pair.a.rings {
        assert_eq!(pair.a.used_index(pair.a.send_queue(a.qpn)), 3);
    }
}

#[test]
pub fn loopback_and_a_qp_connected_to_itself() {
    let (fabric, clock) = fabric();
    let mut guest = Guest::new(&fabric, &clock, 1);
    let end = End::new(&mut guest, VIRTIO_RDMA_QPT_RC);
    let own = guest.gid;
    guest.connect(end.qpn, own, end.qpn);
    let other = guest.create_qp(end.pdn, end.cqn, VIRTIO_RDMA_QPT_RC);
    let third = guest.create_qp(end.pdn, end.cqn, VIRTIO_RDMA_QPT_RC);
    guest.connect(other, own, third);
    guest.connect(third, own, other);
    for (from, to) in [(end.qpn, end.qpn), (other, third), (third, other)] {
        let data = guest.fill(DATA, 99, from as u8);
        guest.post_recv(to, 20, &[sge(DATA + 4096, 99, end.key)]);
        guest.post_send(from, &Send::new(10, SEND, &[sge(DATA, 99, end.key)]));
        guest.run();
        let cqe = guest.poll(end.cqn).unwrap();
        assert_eq!((cqe.wr_id, cqe.qp_num), (20, to));
        let cqe = guest.poll(end.cqn).unwrap();
        assert_eq!((cqe.wr_id, cqe.qp_num), (10, from));
        assert_eq!(guest.bytes(DATA + 4096, 99), data);
    }
}

#[test]
pub fn a_missing_receive_is_waited_for() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    pair.a.post_send(a.qpn, &Send::new(1, SEND, &[sge(DATA, 8, a.key)]));
    assert!(pair.settle_and_pause().is_some());
    assert!(pair.poll_a().is_none());
    pair.b.post_recv(b.qpn, 2, &[sge(DATA, 8, b.key)]);
    // The receive ends the wait, while the clock stands still.
    pair.settle();
    assert_eq!(brief(pair.poll_b()), Some((2, OK, VIRTIO_RDMA_WC_RECV)));
    assert_eq!(brief(pair.poll_a()), Some((1, OK, VIRTIO_RDMA_WC_SEND)));
    assert_eq!(pair.clock.passed(), PAUSE);
    assert_eq!(pair.a.device.counter(Counter::RnrWaits), 1);
    assert_eq!(pair.b.device.counter(Counter::RnrNaks), 1);
}

#[test]
pub fn rnr_retries_end() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    pair.a.post_send(a.qpn, &Send::new(1, SEND, &[sge(DATA, 8, a.key)]));
    pair.a.post_send(a.qpn, &Send::new(2, SEND, &[sge(DATA, 8, a.key)]));
    pair.settle_in_time();
    // The requester retries three times, after 0.64 ms each.
    assert_eq!(pair.clock.passed(), 3 * RNR_TIMER);
    let error = VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR;
    assert_eq!(brief(pair.poll_a()), Some((1, error, VIRTIO_RDMA_WC_SEND)));
    let flushed = VIRTIO_RDMA_WC_WR_FLUSH_ERR;
    assert_eq!(brief(pair.poll_a()), Some((2, flushed, VIRTIO_RDMA_WC_SEND)));
    assert_eq!(u32::from(pair.a.query(a.qpn).qp_state), VIRTIO_RDMA_QPS_ERR);
    assert_eq!(u32::from(pair.b.query(b.qpn).qp_state), VIRTIO_RDMA_QPS_RTS);
}

#[test]
pub fn no_answer_ends_in_retry_exceeded() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    pair.b.set_state(b.qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
    pair.a.post_send(a.qpn, &Send::new(1, SEND, &[sge(DATA, 8, a.key)]));
    pair.settle_in_time();
    assert_eq!(pair.clock.passed(), 4 * Duration::from_nanos(4096 << 14));
    let error = VIRTIO_RDMA_WC_RETRY_EXC_ERR;
    assert_eq!(brief(pair.poll_a()), Some((1, error, VIRTIO_RDMA_WC_SEND)));
}

/// IBA 9.7.6.1.3: a requester waits for an answer for up to four times the timeout. A program makes its QP ready to
/// send while that of its peer is on the way there.
#[test]
fn a_peer_that_is_yet_to_receive_has_four_times_the_time() {
    let timeout = Duration::from_nanos(4096 << 14);
    let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
    let [a, b] = pair.ends;
    pair.a.connect(a.qpn, pair.b.gid, b.qpn);
    pair.b.make_init(b.qpn, ALL);
    pair.a.post_send(a.qpn, &Send::new(1, SEND, &[sge(DATA, 8, a.key)]));
    // The device looks for the peer after each timeout.
    let next = pair.settle().unwrap();
    pair.clock.advance_to(next);
    assert_eq!(pair.clock.passed(), timeout);
    pair.settle_in_time();
    // The requester retries three times.
    assert_eq!(pair.clock.passed(), 4 * 4 * timeout);
    let error = VIRTIO_RDMA_WC_RETRY_EXC_ERR;
    assert_eq!(brief(pair.poll_a()), Some((1, error, VIRTIO_RDMA_WC_SEND)));
}

/// A QP that was destroyed does not become ready. The requester does not wait longer for it than for any other peer.
#[test]
fn a_peer_that_was_destroyed_has_the_time_once() {
    let timeout = Duration::from_nanos(4096 << 14);
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    pair.b.destroy_qp(b.qpn).unwrap();
    pair.a.post_send(a.qpn, &Send::new(1, SEND, &[sge(DATA, 8, a.key)]));
    pair.settle_in_time();
    // The requester retries three times.
    assert_eq!(pair.clock.passed(), 4 * timeout);
    let error = VIRTIO_RDMA_WC_RETRY_EXC_ERR;
    assert_eq!(brief(pair.poll_a()), Some((1, error, VIRTIO_RDMA_WC_SEND)));
}

#[test]
pub fn a_peer_that_becomes_ready_is_found() {
    let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
    let [a, b] = pair.ends;
    pair.a.connect(a.qpn, pair.b.gid, b.qpn);
    pair.a.post_send(a.qpn, &Send::new(1, SEND, &[sge(DATA, 8, a.key)]));
    assert!(pair.settle().is_some());
    pair.b.make_init(b.qpn, ALL);
    pair.b.post_recv(b.qpn, 2, &[sge(DATA, 8, b.key)]);
    assert!(pair.settle().is_some());
    pair.b.make_rtr(b.qpn, pair.a.gid, a.qpn, true).unwrap();
    pair.settle();
    assert_eq!(brief(pair.poll_a()), Some((1, OK, VIRTIO_RDMA_WC_SEND)));
    assert_eq!(brief(pair.poll_b()), Some((2, OK, VIRTIO_RDMA_WC_RECV)));
    assert_eq!(pair.b.poll_event(), Some((VIRTIO_RDMA_EVENT_COMM_EST, b.qpn)));
}

/// A QP that goes from RESET to RTR at once has what both steps set, and takes what was posted before. The device
/// leaves that alone until then.
#[test]
pub fn reset_leads_to_rtr_at_once() {
    let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
    let [a, b] = pair.ends;
    pair.a.connect(a.qpn, pair.b.gid, b.qpn);
    pair.b.post_recv(b.qpn, 2, &[sge(DATA, 8, b.key)]);
    pair.a.post_send(a.qpn, &Send::new(1, SEND, &[sge(DATA, 8, a.key)]));
    assert!(pair.settle().is_some());
    assert!(pair.poll_b().is_none());
    pair.b.make_rtr_at_once(b.qpn, ALL, pair.a.gid, a.qpn).unwrap();
    pair.settle();
    assert_eq!(brief(pair.poll_a()), Some((1, OK, VIRTIO_RDMA_WC_SEND)));
    assert_eq!(brief(pair.poll_b()), Some((2, OK, VIRTIO_RDMA_WC_RECV)));
    let attr = pair.b.query(b.qpn);
    assert_eq!((attr.qp_access_flags, attr.port_num), (ALL, 1));
    pair.b.make_rts(b.qpn, true).unwrap();
    // The way over INIT is there as well, and RTR is not reached from anywhere else.
    let state = Err(VIRTIO_RDMA_STATUS_STATE);
    assert_eq!(pair.b.make_rtr_at_once(b.qpn, ALL, pair.a.gid, a.qpn), state);
    pair.b.set_state(b.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
    pair.b.connect(b.qpn, pair.a.gid, a.qpn);

    pair.b.device.reset();
    let rings = u64::from(pair.b.rings) << VIRTIO_RDMA_F_RINGS;
    let withheld = 1 << VIRTIO_RDMA_F_RESET_TO_RTR | 1 << VIRTIO_RDMA_F_RINGS;
    let features = pair.b.device.features() & !withheld | rings;
    pair.b.start_with(features);
    let end = End::new(&mut pair.b, VIRTIO_RDMA_QPT_RC);
    assert_eq!(pair.b.make_rtr_at_once(end.qpn, ALL, pair.a.gid, a.qpn), state);
    pair.b.connect(end.qpn, pair.a.gid, a.qpn);
}

/// Posts a work request that must fail, another one behind it, and a receive at each end. Checks the CQEs
/// of all four.
fn fails(change: impl FnOnce(&mut Pair) -> Send, status: u32, peer: Option<(u32, u32)>) -> Pair {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let send = change(&mut pair);
    let opcode = match send.opcode {
        RDMA_WRITE | VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM => VIRTIO_RDMA_WC_RDMA_WRITE,
        RDMA_READ => VIRTIO_RDMA_WC_RDMA_READ,
        VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD => VIRTIO_RDMA_WC_FETCH_ADD,
        _ => VIRTIO_RDMA_WC_SEND,
    };
    let flushed = VIRTIO_RDMA_WC_WR_FLUSH_ERR;
    pair.a.post_recv(a.qpn, 30, &[]);
    pair.a.post_send(a.qpn, &send.flags(0));
    pair.a.post_send(a.qpn, &Send::new(2, SEND, &[]).flags(0));
    pair.settle();
    let mut found = vec![brief(pair.poll_a()).unwrap(), brief(pair.poll_a()).unwrap()];
    assert_eq!(found[0], (1, status, opcode));
    found.push(brief(pair.poll_a()).unwrap());
    assert!(found.contains(&(2, flushed, VIRTIO_RDMA_WC_SEND)), "{found:?}");
    assert!(found.contains(&(30, flushed, VIRTIO_RDMA_WC_RECV)), "{found:?}");
    assert!(pair.poll_a().is_none());
    let state = u32::from(pair.b.query(b.qpn).qp_state);
    let Some((local, event)) = peer else {
        assert_eq!(state, VIRTIO_RDMA_QPS_RTS);
        return pair;
    };
    assert_eq!(state, VIRTIO_RDMA_QPS_ERR);
    if local != OK {
        assert_eq!(brief(pair.poll_b()), Some((50, local, VIRTIO_RDMA_WC_RECV)));
        assert_eq!(brief(pair.poll_b()), Some((51, flushed, VIRTIO_RDMA_WC_RECV)));
    }
    let raised = std::iter::from_fn(|| pair.b.poll_event()).any(|e| e == (event, b.qpn));
    assert_eq!(raised, event != u32::MAX);
    pair
}

/// Two receives at `b`, the first as given.
fn receives(pair: &mut Pair, first: virtio_rdma_sge) {
    let b = pair.ends[1];
    pair.b.post_recv(b.qpn, 50, &[first]);
    pair.b.post_recv(b.qpn, 51, &[sge(DATA, 100, b.key)]);
}

#[test]
pub fn a_receive_that_is_too_small_fails_both_ends() {
    let remote = VIRTIO_RDMA_WC_REM_INV_REQ_ERR;
    let send = |pair: &mut Pair| {
        receives(pair, sge(DATA, 7, pair.ends[1].key));
        Send::new(1, SEND, &[sge(DATA, 8, pair.ends[0].key)])
    };
    fails(send, remote, Some((VIRTIO_RDMA_WC_LOC_LEN_ERR, u32::MAX)));
}

#[test]
pub fn a_receive_with_a_bad_key_fails_both_ends() {
    let remote = VIRTIO_RDMA_WC_REM_OP_ERR;
    let send = |pair: &mut Pair| {
        receives(pair, sge(DATA, 8, pair.ends[1].key ^ 1));
        Send::new(1, SEND, &[sge(DATA, 8, pair.ends[0].key)])
    };
    fails(send, remote, Some((VIRTIO_RDMA_WC_LOC_PROT_ERR, u32::MAX)));
}

#[test]
pub fn a_bad_local_key_fails_the_requester_alone() {
    let prot = VIRTIO_RDMA_WC_LOC_PROT_ERR;
    let send = |pair: &mut Pair| Send::new(1, SEND, &[sge(DATA, 8, pair.ends[0].key ^ 0x100)]);
    fails(send, prot, None);
    let send = |pair: &mut Pair| {
        let beyond = sge((32 << 20) - 4, 8, pair.ends[0].key);
        Send::new(1, RDMA_WRITE, &[beyond]).rdma(DATA, pair.ends[1].key)
    };
    fails(send, prot, None);
    let send = |pair: &mut Pair| {
        let pdn = pair.a.create_pd();
        let mr = pair.a.reg_mr(pdn, DATA, 4096, ALL);
        Send::new(1, RDMA_WRITE, &[sge(DATA, 8, mr.lkey)]).rdma(DATA, pair.ends[1].key)
    };
    fails(send, prot, None);
    let send = |pair: &mut Pair| {
        let mr = pair.a.reg_mr(pair.ends[0].pdn, DATA, 4096, READ);
        Send::new(1, RDMA_READ, &[sge(DATA, 8, mr.lkey)]).rdma(DATA, pair.ends[1].key)
    };
    fails(send, prot, None);
}

#[test]
pub fn a_bad_remote_key_fails_both_ends() {
    let access = VIRTIO_RDMA_WC_REM_ACCESS_ERR;
    let peer = Some((OK, VIRTIO_RDMA_EVENT_QP_ACCESS_ERR));
    for opcode in [RDMA_WRITE, RDMA_READ] {
        let send = |pair: &mut Pair| {
            let [a, b] = pair.ends;
            Send::new(1, opcode, &[sge(DATA, 8, a.key)]).rdma(DATA, b.key ^ 1)
        };
        fails(send, access, peer);
        let send = |pair: &mut Pair| {
            let [a, b] = pair.ends;
            Send::new(1, opcode, &[sge(DATA, 8, a.key)]).rdma((32 << 20) - 7, b.key)
        };
        fails(send, access, peer);
        let send = |pair: &mut Pair| {
            let [a, b] = pair.ends;
            let other = if opcode == RDMA_READ { WRITE | LOCAL } else { READ | LOCAL };
            let mr = pair.b.reg_mr(b.pdn, DATA, 4096, other);
            Send::new(1, opcode, &[sge(DATA, 8, a.key)]).rdma(DATA, mr.rkey)
        };
        fails(send, access, peer);
    }
}

/// A WRITE with immediate data of `len` bytes whose key is bad, to a QP with a receive.
fn write_with_bad_key(len: u32, peer: (u32, u32)) {
    let send = |pair: &mut Pair| {
        let [a, b] = pair.ends;
        receives(pair, sge(DATA, 8, b.key));
        let local = [sge(DATA, len, a.key)];
        Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM, &local).rdma(DATA, b.key ^ 1)
    };
    fails(send, VIRTIO_RDMA_WC_REM_ACCESS_ERR, Some(peer));
}

/// IBA 11.6.2 (Local Access Error): a WRITE with immediate data that is refused for its key completes
/// the receive that it takes. A WRITE of several packets is refused before it takes a receive (9.7.4.1),
/// and an event reports this.
#[test]
pub fn a_write_with_immediate_and_a_bad_key_fails_its_receive() {
    write_with_bad_key(1024, (VIRTIO_RDMA_WC_LOC_ACCESS_ERR, u32::MAX));
    let flushed = VIRTIO_RDMA_WC_WR_FLUSH_ERR;
    write_with_bad_key(1025, (flushed, VIRTIO_RDMA_EVENT_QP_ACCESS_ERR));
}

/// IBA 9.7.4.1: the responder looks for a receive before it checks the key.
#[test]
pub fn a_write_with_immediate_waits_for_a_receive_before_its_key_is_checked() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM, &[sge(DATA, 8, a.key)]);
    pair.a.post_send(a.qpn, &write.rdma(DATA, b.key ^ 1));
    pair.settle_in_time();
    assert_eq!(brief(pair.poll_a()).unwrap().1, VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR);
    assert_eq!(u32::from(pair.b.query(b.qpn).qp_state), VIRTIO_RDMA_QPS_RTS);
}

/// IBA 9.7.4.1: the responder looks at the rights of its QP before it looks for a receive.
#[test]
pub fn the_rights_of_a_qp_are_checked_before_there_is_a_receive() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let mut attr = virtio_rdma_qp_attr::new_zeroed();
    attr.qp_access_flags = LOCAL;
    pair.b.modify(b.qpn, VIRTIO_RDMA_QP_ACCESS_FLAGS, attr).unwrap();
    let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM, &[sge(DATA, 8, a.key)]);
    pair.a.post_send(a.qpn, &write.rdma(DATA, b.key));
    pair.settle_in_time();
    assert_eq!(brief(pair.poll_a()).unwrap().1, VIRTIO_RDMA_WC_REM_INV_REQ_ERR);
    assert_eq!(u32::from(pair.b.query(b.qpn).qp_state), VIRTIO_RDMA_QPS_ERR);
}

/// A WRITE with immediate data takes a receive, and does not look at the memory that it names.
#[test]
pub fn a_write_with_immediate_does_not_look_at_the_memory_of_its_receive() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let read_only = pair.b.reg_mr(b.pdn, DATA, 8, READ);
    let no_memory =
        [sge(DATA, 8, b.key ^ 1), sge(u64::MAX - 7, 8, b.key), sge(DATA, 8, read_only.lkey)];
    for (wr_id, place) in (1..).zip(no_memory) {
        pair.b.post_recv(b.qpn, wr_id, &[place]);
        let write = Send::new(wr_id, VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM, &[sge(DATA, 8, a.key)]);
        pair.a.post_send(a.qpn, &write.rdma(DATA + 64, b.key));
        pair.settle();
        assert_eq!(brief(pair.poll_a()), Some((wr_id, OK, VIRTIO_RDMA_WC_RDMA_WRITE)));
        assert_eq!(brief(pair.poll_b()), Some((wr_id, OK, VIRTIO_RDMA_WC_RECV_RDMA_WITH_IMM)));
    }
}

/// IBA C9-88: the key of an access to no bytes is not checked, but the access flags of the QP are.
#[test]
pub fn no_bytes_need_no_key() {
    for opcode in [RDMA_WRITE, RDMA_READ] {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        pair.a.post_send(a.qpn, &Send::new(1, opcode, &[]).rdma(u64::MAX, b.key ^ 1));
        pair.settle();
        assert_eq!(brief(pair.poll_a()).map(|(id, status, _)| (id, status)), Some((1, OK)));
        let mut attr = virtio_rdma_qp_attr::new_zeroed();
        attr.qp_access_flags = LOCAL;
        pair.b.modify(b.qpn, VIRTIO_RDMA_QP_ACCESS_FLAGS, attr).unwrap();
        pair.a.post_send(a.qpn, &Send::new(2, opcode, &[]).rdma(DATA, b.key));
        pair.settle();
        assert_eq!(brief(pair.poll_a()).unwrap().1, VIRTIO_RDMA_WC_REM_INV_REQ_ERR);
    }
}

/// IBA 10.6.3: a region of no bytes has keys. They give no access to memory, but an access to no bytes
/// may name them.
#[test]
pub fn a_region_of_no_bytes_gives_access_to_none() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    for at in [DATA, DATA + 5] {
        let empty = pair.b.reg_pages(b.pdn, at, 0, ALL, &[]).unwrap();
        let own = pair.a.reg_pages(a.pdn, at, 0, ALL, &[]).unwrap();
        for opcode in [RDMA_WRITE, RDMA_READ] {
            pair.a.post_send(
                a.qpn,
                &Send::new(1, opcode, &[sge(at, 0, own.lkey)]).rdma(at, empty.rkey),
            );
            pair.settle();
            assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
        }
        assert_eq!(
            pair.b.reg_pages(b.pdn, at, 0, ALL, &[DATA]).err(),
            Some(VIRTIO_RDMA_STATUS_INVAL)
        );
    }
    let local = |pair: &mut Pair| {
        let own = pair.a.reg_pages(pair.ends[0].pdn, DATA, 0, ALL, &[]).unwrap();
        Send::new(1, RDMA_WRITE, &[sge(DATA, 1, own.lkey)]).rdma(DATA, pair.ends[1].key)
    };
    fails(local, VIRTIO_RDMA_WC_LOC_PROT_ERR, None);
    for opcode in [RDMA_WRITE, RDMA_READ] {
        let remote = |pair: &mut Pair| {
            let empty = pair.b.reg_pages(pair.ends[1].pdn, DATA, 0, ALL, &[]).unwrap();
            Send::new(1, opcode, &[sge(DATA, 1, pair.ends[0].key)]).rdma(DATA, empty.rkey)
        };
        let peer = Some((OK, VIRTIO_RDMA_EVENT_QP_ACCESS_ERR));
        fails(remote, VIRTIO_RDMA_WC_REM_ACCESS_ERR, peer);
    }
}

#[test]
pub fn a_qp_without_remote_access_refuses_the_request() {
    for opcode in [RDMA_WRITE, RDMA_READ] {
        let send = |pair: &mut Pair| {
            let [a, b] = pair.ends;
            let mut attr = virtio_rdma_qp_attr::new_zeroed();
            attr.qp_access_flags = LOCAL;
            assert_eq!(pair.b.modify(b.qpn, VIRTIO_RDMA_QP_ACCESS_FLAGS, attr), Ok(()));
            Send::new(1, opcode, &[sge(DATA, 8, a.key)]).rdma(DATA, b.key)
        };
        let peer = Some((OK, VIRTIO_RDMA_EVENT_QP_REQ_ERR));
        fails(send, VIRTIO_RDMA_WC_REM_INV_REQ_ERR, peer);
    }
}

#[test]
pub fn a_remote_range_is_checked_before_the_first_byte() {
    let access = VIRTIO_RDMA_WC_REM_ACCESS_ERR;
    let len = 600 << 10;
    let send = |pair: &mut Pair| {
        let [a, b] = pair.ends;
        pair.a.fill(DATA, len, 1);
        let mr = pair.b.reg_mr(b.pdn, DATA, len as u64 - 1, ALL);
        Send::new(1, RDMA_WRITE, &[sge(DATA, len as u32, a.key)]).rdma(DATA, mr.rkey)
    };
    let pair = fails(send, access, Some((OK, VIRTIO_RDMA_EVENT_QP_ACCESS_ERR)));
    assert!(pair.b.bytes(DATA, len).iter().all(|byte| *byte == 0));
}

#[test]
pub fn an_unaligned_atomic_is_an_invalid_request() {
    let send = |pair: &mut Pair| {
        let [a, b] = pair.ends;
        let add = VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD;
        Send::new(1, add, &[sge(DATA, 8, a.key)]).atomic(DATA + 4, b.key, 1, 0)
    };
    let peer = Some((OK, VIRTIO_RDMA_EVENT_QP_REQ_ERR));
    fails(send, VIRTIO_RDMA_WC_REM_INV_REQ_ERR, peer);
}

/// The word has to be at a multiple of 8 in memory, whatever the peer's address of it is.
#[test]
pub fn an_atomic_of_a_word_that_is_unaligned_in_memory_is_an_invalid_request() {
    let send = |pair: &mut Pair| {
        let [a, b] = pair.ends;
        let pages = (pair.b.memory_for(&[DATA]), 1);
        let mut request = reg_user_mr(b.pdn, ALL, (DATA + 4, 64), pages);
        request.virt_addr = 0x1000;
        let mr: virtio_rdma_rsp_mr = pair.b.command(VIRTIO_RDMA_CMD_REG_USER_MR, &request).unwrap();
        let add = VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD;
        Send::new(1, add, &[sge(DATA, 8, a.key)]).atomic(0x1000, mr.rkey, 1, 0)
    };
    let peer = Some((OK, VIRTIO_RDMA_EVENT_QP_REQ_ERR));
    let pair = fails(send, VIRTIO_RDMA_WC_REM_INV_REQ_ERR, peer);
    assert_eq!(pair.b.bytes(DATA, 16), [0; 16]);
}

#[test]
pub fn malformed_requests_fail_the_requester() {
    let operation = VIRTIO_RDMA_WC_LOC_QP_OP_ERR;
    fails(|_| Send::new(1, 0x55, &[]), operation, None);
    let length = VIRTIO_RDMA_WC_LOC_LEN_ERR;
    let send = |pair: &mut Pair| {
        let key = pair.ends[0].key;
        Send::new(1, SEND, &[sge(DATA, 1 << 31, key), sge(DATA, 1, key)])
    };
    fails(send, length, None);
}

#[test]
pub fn zero_bytes_ask_for_no_key() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    pair.a.post_send(a.qpn, &Send::new(1, RDMA_WRITE, &[]).rdma(0, 0));
    pair.a.post_send(a.qpn, &Send::new(2, RDMA_READ, &[sge(0, 0, 0)]).rdma(0, 0));
    pair.b.post_recv(b.qpn, 3, &[]);
    pair.a.post_send(a.qpn, &Send::new(3, SEND, &[]));
    pair.settle();
    for wr_id in 1..=3 {
        let cqe = pair.poll_a().unwrap();
        assert_eq!((cqe.wr_id, u32::from(cqe.status), cqe.byte_len), (wr_id, OK, 0));
    }
}

#[test]
pub fn err_flushes_what_is_posted_later() {
    let mut pair = Pair::new();
    let a = pair.ends[0];
    let flushed = VIRTIO_RDMA_WC_WR_FLUSH_ERR;
    pair.a.post_recv(a.qpn, 10, &[]);
    pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
    pair.settle();
    assert_eq!(brief(pair.poll_a()), Some((10, flushed, VIRTIO_RDMA_WC_RECV)));
    for round in 0..100 {
        pair.a.post_recv(a.qpn, round, &[]);
        pair.a.post_send(a.qpn, &Send::new(round, RDMA_WRITE, &[]));
        pair.a.run();
        let mut found = [pair.poll_a(), pair.poll_a()].map(|cqe| brief(cqe).unwrap());
        found.sort_unstable_by_key(|cqe| cqe.2);
        let expected =
            [VIRTIO_RDMA_WC_RDMA_WRITE, VIRTIO_RDMA_WC_RECV].map(|opcode| (round, flushed, opcode));
        assert_eq!(found, expected);
    }
}

/// The bytes of a message that takes several turns.
const LARGE: usize = 1 << 20;
/// What a guest writes to memory that is its own again.
static USED_AGAIN: [u8; LARGE] = [0x5a; LARGE];

/// Returns where the memory of a work request is: the READ 1, the SEND 2 or the receive 3.
fn memory_of(wr_id: u64) -> u64 {
    DATA + wr_id * LARGE as u64
}

/// Has an end of a pair read and send, and gives it a receive. What it sends has this pattern.
fn post_all(guest: &mut Guest, own: End, peer: End, seed: u8) {
    let part = |wr_id| [sge(memory_of(wr_id), LARGE as u32, own.key)];
    guest.fill(memory_of(2), LARGE, seed);
    guest.post_recv(own.qpn, 3, &part(3));
    guest.post_send(own.qpn, &Send::new(1, RDMA_READ, &part(1)).rdma(DATA, peer.key));
    guest.post_send(own.qpn, &Send::new(2, SEND, &part(2)));
}

/// Takes the CQEs of an end, and uses the memory of each work request again. Returns how many there are. A message
/// that has arrived has this pattern.
fn use_again(guest: &mut Guest, cqn: u32, seed: u8) -> usize {
    let cqes: Vec<_> = std::iter::from_fn(|| guest.poll(cqn)).collect();
    for cqe in &cqes {
        let memory = memory_of(cqe.wr_id);
        if (cqe.wr_id, u32::from(cqe.status)) == (3, OK) {
            let found = guest.bytes(memory, LARGE);
            assert!(found == guest.fill(memory, LARGE, seed), "the message is whole");
        }
        guest.memory.write(memory, &USED_AGAIN).unwrap();
    }
    cqes.len()
}

/// Runs both devices for a short turn. Returns whether something is under way.
fn take_a_turn(pair: &Pair) -> bool {
    let next = [pair.a.device.run(1), pair.b.device.run(1)];
    cable().is_some_and(|cable| cable.deliver()) || next.contains(&Next::Busy)
}

/// Lets both guests run until nothing is under way, and use memory again meanwhile. Returns the number of CQEs.
fn settle_and_use_again(pair: &mut Pair) -> usize {
    let [a, b] = pair.ends;
    let mut found = 0;
    loop {
        found += use_again(&mut pair.a, a.cqn, 2) + use_again(&mut pair.b, b.cqn, 1);
        if take_a_turn(pair) {
            continue;
        }
        match pair.settle() {
            Some(next) => pair.clock.advance_to(next),
            None => {
                return found + use_again(&mut pair.a, a.cqn, 2) + use_again(&mut pair.b, b.cqn, 1)
            }
        }
    }
}

/// Specification, Ownership of memory: memory that a work request names is the guest's again with its CQE, and with
/// that of a work request that is flushed while it is under way.
#[test]
pub fn memory_is_the_owners_again_with_its_flush() {
    for turns in 0..40 {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        post_all(&mut pair.a, a, b, 1);
        post_all(&mut pair.b, b, a, 2);
        for _ in 0..turns {
            take_a_turn(&pair);
        }
        pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
        let mut found = settle_and_use_again(&mut pair);
        // B may have nothing more to send, and not know of the end of A.
        pair.b.set_state(b.qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
        found += settle_and_use_again(&mut pair);
        assert_eq!(found, 6);
        for guest in [&pair.a, &pair.b] {
            for wr_id in 1..=3 {
                let found = guest.bytes(memory_of(wr_id), LARGE);
                assert!(found == USED_AGAIN, "work request {wr_id}, {turns} turns");
            }
        }
    }
}

#[test]
pub fn reset_discards_and_the_queues_go_on() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    for round in 0..200 {
        for wr_id in 0..3 {
            pair.a.post_send(a.qpn, &Send::new(wr_id, SEND, &[sge(DATA, 8, a.key)]));
            pair.a.post_recv(a.qpn, wr_id, &[]);
        }
        pair.settle();
        pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
        assert!(pair.poll_a().is_none());
        let total = 4 * round + 3;
        assert_eq!(u32::from(pair.a.used_index(pair.a.send_queue(a.qpn))), total);
        // B has had one message in each round, and was not reset.
        pair.a.sq_psn = round;
        pair.a.connect(a.qpn, pair.b.gid, b.qpn);
        pair.b.post_recv(b.qpn, 9, &[sge(DATA, 8, b.key)]);
        pair.a.post_send(a.qpn, &Send::new(4, SEND, &[sge(DATA, 8, a.key)]));
        pair.settle();
        assert_eq!(brief(pair.poll_a()), Some((4, OK, VIRTIO_RDMA_WC_SEND)));
        assert_eq!(brief(pair.poll_b()), Some((9, OK, VIRTIO_RDMA_WC_RECV)));
    }
}

/// Takes the QP of A to SQD, where it is to tell when its send queue has drained.
fn begin_to_drain(pair: &mut Pair) {
    let mut attr = virtio_rdma_qp_attr::new_zeroed();
    attr.qp_state = VIRTIO_RDMA_QPS_SQD as u8;
    attr.en_sqd_async_notify = 1;
    let mask = VIRTIO_RDMA_QP_STATE | VIRTIO_RDMA_QP_EN_SQD_ASYNC_NOTIFY;
    pair.a.modify(pair.ends[0].qpn, mask, attr).unwrap();
}

/// Makes a pair whose QP of A is in SQD, and is to tell when its message, for which B has no receive, is done.
fn draining() -> Pair {
    let mut pair = Pair::new();
    let a = pair.ends[0];
    pair.a.post_send(a.qpn, &Send::new(1, SEND, &[sge(DATA, 8, a.key)]));
    pair.settle_and_pause();
    begin_to_drain(&mut pair);
    pair.settle();
    pair
}

/// Posts the receive that the message of A waits for.
fn end_the_drain(pair: &mut Pair) {
    let b = pair.ends[1];
    pair.b.post_recv(b.qpn, 3, &[sge(DATA, 8, b.key)]);
    pair.settle_in_time();
    assert_eq!(brief(pair.poll_a()), Some((1, OK, VIRTIO_RDMA_WC_SEND)));
}

#[test]
pub fn sqd_drains_and_tells() {
    let mut pair = draining();
    let a = pair.ends[0];
    pair.a.post_send(a.qpn, &Send::new(2, RDMA_WRITE, &[]));
    pair.settle();
    let attr = pair.a.query(a.qpn);
    assert_eq!((attr.sq_draining, attr.en_sqd_async_notify), (1, 1));
    assert_eq!(pair.a.poll_event(), None);
    end_the_drain(&mut pair);
    assert!(pair.poll_a().is_none());
    assert_eq!(pair.a.poll_event(), Some((VIRTIO_RDMA_EVENT_SQ_DRAINED, a.qpn)));
    let attr = pair.a.query(a.qpn);
    assert_eq!((attr.sq_draining, attr.en_sqd_async_notify), (0, 0), "it is told once");
    pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_RTS).unwrap();
    pair.settle();
    assert_eq!(brief(pair.poll_a()), Some((2, OK, VIRTIO_RDMA_WC_RDMA_WRITE)));
}

/// A driver may change attributes in SQD before the send queue has drained. It gets SQ_DRAINED nevertheless.
#[test]
pub fn a_change_in_sqd_keeps_the_promise() {
    for mask in [0, VIRTIO_RDMA_QP_STATE] {
        let mut pair = draining();
        let a = pair.ends[0];
        let mut attr = virtio_rdma_qp_attr::new_zeroed();
        (attr.qp_state, attr.timeout) = (VIRTIO_RDMA_QPS_SQD as u8, 15);
        pair.a.modify(a.qpn, mask | VIRTIO_RDMA_QP_TIMEOUT, attr).unwrap();
        let attr = pair.a.query(a.qpn);
        assert_eq!((attr.timeout, attr.en_sqd_async_notify), (15, 1));
        end_the_drain(&mut pair);
        assert_eq!(pair.a.poll_event(), Some((VIRTIO_RDMA_EVENT_SQ_DRAINED, a.qpn)));
        // A change behind it promises nothing.
        pair.a.modify(a.qpn, mask | VIRTIO_RDMA_QP_TIMEOUT, attr).unwrap();
        pair.settle();
        assert_eq!(pair.a.query(a.qpn).en_sqd_async_notify, 0);
        assert_eq!(pair.a.poll_event(), None);
    }
}

/// A QP that leaves SQD before its send queue has drained does not tell of that, also when it is in SQD again.
#[test]
pub fn a_qp_that_leaves_sqd_early_tells_nothing() {
    for to in [VIRTIO_RDMA_QPS_RTS, VIRTIO_RDMA_QPS_ERR] {
        let mut pair = draining();
        let a = pair.ends[0];
        pair.a.set_state(a.qpn, to).unwrap();
        assert_eq!(pair.a.query(a.qpn).en_sqd_async_notify, 0);
        if to == VIRTIO_RDMA_QPS_RTS {
            pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_SQD).unwrap();
            end_the_drain(&mut pair);
        }
        pair.settle();
        assert_eq!(pair.a.poll_event(), None);
    }
}

/// An error that ends SQD ends its promise, too.
#[test]
pub fn an_error_in_sqd_ends_its_promise() {
    let mut pair = draining();
    let a = pair.ends[0];
    pair.settle_in_time();
    let error = VIRTIO_RDMA_WC_RNR_RETRY_EXC_ERR;
    assert_eq!(brief(pair.poll_a()), Some((1, error, VIRTIO_RDMA_WC_SEND)));
    let attr = pair.a.query(a.qpn);
    assert_eq!((attr.qp_state.into(), attr.en_sqd_async_notify), (VIRTIO_RDMA_QPS_ERR, 0));
    assert_eq!(pair.a.poll_event(), None);
}

#[test]
pub fn a_cq_that_overflows_fails_its_qps() {
    let (fabric, clock) = fabric();
    let mut guest = Guest::new(&fabric, &clock, 1);
    let mut end = End::new(&mut guest, VIRTIO_RDMA_QPT_RC);
    end.cqn = guest.create_cq(2);
    let qpn = guest.create_qp(end.pdn, end.cqn, VIRTIO_RDMA_QPT_RC);
    let idle = guest.create_qp(end.pdn, end.cqn, VIRTIO_RDMA_QPT_RC);
    let own = guest.gid;
    guest.connect(qpn, own, qpn);
    for wr_id in 1..=4 {
        guest.post_send(qpn, &Send::new(wr_id, RDMA_WRITE, &[]));
    }
    guest.run();
    assert_eq!(guest.poll_event(), Some((VIRTIO_RDMA_EVENT_CQ_ERR, end.cqn)));
    assert_eq!(guest.poll_event(), Some((VIRTIO_RDMA_EVENT_QP_FATAL, qpn)));
    assert_eq!(u32::from(guest.query(qpn).qp_state), VIRTIO_RDMA_QPS_ERR);
    assert_eq!(brief(guest.poll(end.cqn)).unwrap().0, 1);
    assert_eq!(brief(guest.poll(end.cqn)).unwrap().0, 2);
    assert!(guest.poll(end.cqn).is_none());
    assert_eq!(guest.device.counter(Counter::CqOverflows), 1);
    // A QP that was in RESET fails as soon as it leaves that.
    assert_eq!(guest.poll_event(), None);
    for at_once in [false, true] {
        if at_once {
            guest.make_rtr_at_once(idle, ALL, own, idle).unwrap();
        } else {
            guest.make_init(idle, ALL);
        }
        assert_eq!(guest.poll_event(), Some((VIRTIO_RDMA_EVENT_QP_FATAL, idle)));
        assert_eq!(u32::from(guest.query(idle).qp_state), VIRTIO_RDMA_QPS_ERR);
        guest.set_state(idle, VIRTIO_RDMA_QPS_RESET).unwrap();
    }
}

#[test]
pub fn arming_signals_once_and_misses_nothing() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let next = VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION;
    let solicited = VIRTIO_RDMA_NOTIFY_SOLICITED;
    let cq = 1 + b.cqn as u16;
    let message = |pair: &mut Pair, flags| {
        pair.b.post_recv(b.qpn, 1, &[]);
        pair.a.post_send(a.qpn, &Send::new(1, SEND, &[]).flags(flags));
        pair.settle();
        pair.poll_b().unwrap();
    };
    message(&mut pair, 0);
    assert_eq!(pair.b.signals(cq), 0);
    pair.b.arm_cq(b.cqn, next).unwrap();
    assert_eq!(pair.b.signals(cq), 1, "a CQE was placed before");
    message(&mut pair, 0);
    assert_eq!(pair.b.signals(cq), 2, "that signal left the CQ armed: the CQE was polled already");
    message(&mut pair, 0);
    assert_eq!(pair.b.signals(cq), 2, "the signal of a new CQE disarmed");
    pair.b.arm_cq(b.cqn, solicited).unwrap();
    message(&mut pair, 0);
    assert_eq!(pair.b.signals(cq), 2, "not solicited");
    message(&mut pair, VIRTIO_RDMA_SEND_SOLICITED);
    assert_eq!(pair.b.signals(cq), 3);
    pair.b.arm_cq(b.cqn, solicited).unwrap();
    pair.b.arm_cq(b.cqn, next).unwrap();
    pair.b.arm_cq(b.cqn, solicited).unwrap();
    message(&mut pair, 0);
    assert_eq!(pair.b.signals(cq), 4, "the wider arming holds");
    assert_eq!(pair.b.arm_cq(b.cqn, 0), Err(VIRTIO_RDMA_STATUS_INVAL));
    assert_eq!(pair.b.arm_cq(3, next), Err(VIRTIO_RDMA_STATUS_NO_OBJECT));
    pair.b.arm_cq(b.cqn, solicited).unwrap();
    pair.b.post_recv(b.qpn, 1, &[]);
    pair.b.set_state(b.qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
    pair.settle();
    assert_eq!(pair.b.signals(cq), 5, "an error is always solicited");
}

#[test]
pub fn events_wait_for_buffers_once_each() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    for _ in 0..20 {
        pair.a.post_send(a.qpn, &Send::new(1, RDMA_WRITE, &[sge(DATA, 8, a.key)]).rdma(0, 1));
        pair.settle();
        while pair.poll_a().is_some() {}
        pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
        pair.b.set_state(b.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
        let (gid_a, gid_b) = (pair.a.gid, pair.b.gid);
        pair.a.connect(a.qpn, gid_b, b.qpn);
        pair.b.connect(b.qpn, gid_a, a.qpn);
    }
    let event = (VIRTIO_RDMA_EVENT_QP_ACCESS_ERR, b.qpn);
    for _ in 0..8 {
        assert_eq!(pair.b.poll_event(), Some(event));
    }
    assert_eq!(pair.b.poll_event(), None);
    for _ in 0..5 {
        pair.b.add_event_buffer();
    }
    pair.b.run();
    assert_eq!(pair.b.poll_event(), Some(event));
    assert_eq!(pair.b.poll_event(), None);
}

#[test]
pub fn a_guest_that_goes_leaves_no_trace() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    pair.b.device.reset();
    pair.a.post_send(a.qpn, &Send::new(1, RDMA_WRITE, &[sge(DATA, 8, a.key)]).rdma(DATA, b.key));
    pair.settle_in_time();
    let error = VIRTIO_RDMA_WC_RETRY_EXC_ERR;
    assert_eq!(brief(pair.poll_a()), Some((1, error, VIRTIO_RDMA_WC_RDMA_WRITE)));
    pair.b.start();
    let b = End::new(&mut pair.b, VIRTIO_RDMA_QPT_RC);
    pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
    let (gid_a, gid_b) = (pair.a.gid, pair.b.gid);
    pair.a.connect(a.qpn, gid_b, b.qpn);
    pair.b.connect(b.qpn, gid_a, a.qpn);
    pair.a.post_send(a.qpn, &Send::new(1, RDMA_WRITE, &[sge(DATA, 8, a.key)]).rdma(DATA, b.key));
    pair.settle();
    assert_eq!(brief(pair.poll_a()), Some((1, OK, VIRTIO_RDMA_WC_RDMA_WRITE)));
}

#[test]
pub fn a_guest_sends_from_its_own_gids_only() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    pair.a.del_gid(0).unwrap();
    pair.a.post_send(a.qpn, &Send::new(1, RDMA_WRITE, &[sge(DATA, 8, a.key)]).rdma(DATA, b.key));
    pair.settle_in_time();
    let error = VIRTIO_RDMA_WC_RETRY_EXC_ERR;
    assert_eq!(brief(pair.poll_a()), Some((1, error, VIRTIO_RDMA_WC_RDMA_WRITE)));
}

#[test]
pub fn a_third_qp_cannot_speak_to_a_connected_one() {
    let mut pair = Pair::new();
    let [_, b] = pair.ends;
    let mut third = Guest::new(&pair.fabric, &pair.clock, 3);
    let c = End::new(&mut third, VIRTIO_RDMA_QPT_RC);
    third.connect(c.qpn, pair.b.gid, b.qpn);
    third.post_send(c.qpn, &Send::new(1, RDMA_WRITE, &[sge(DATA, 8, c.key)]).rdma(DATA, b.key));
    settle_in_time(&[&third, &pair.a, &pair.b]);
    let error = VIRTIO_RDMA_WC_RETRY_EXC_ERR;
    assert_eq!(brief(third.poll(c.cqn)), Some((1, error, VIRTIO_RDMA_WC_RDMA_WRITE)));
    assert!(pair.poll_b().is_none());
}

#[test]
pub fn default_limits_are_what_consumers_need() {
    let limits = Limits::default();
    assert!(limits.max_rd_atomic >= 128);
    assert!(limits.wq_size >= 1024 && limits.cq_size >= 4096);
}

#[test]
pub fn a_part_that_cannot_be_read_is_found_before_the_first_is_sent() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let before = pair.b.bytes(DATA, 64);
    pair.a.fill(DATA, 64, 9);
    let chunk = crate::CHUNK as u32;
    let parts = [sge(DATA, chunk, a.key), sge(DATA, chunk, a.key ^ 0x100)];
    pair.a.post_send(a.qpn, &Send::new(1, RDMA_WRITE, &parts).rdma(DATA, b.key));
    pair.settle();
    let error = VIRTIO_RDMA_WC_LOC_PROT_ERR;
    assert_eq!(brief(pair.poll_a()), Some((1, error, VIRTIO_RDMA_WC_RDMA_WRITE)));
    assert_eq!(pair.b.bytes(DATA, 64), before);
}

#[test]
pub fn a_sign_before_the_deadline_is_no_retry() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    pair.b.set_state(b.qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
    pair.a.post_send(a.qpn, &Send::new(1, SEND, &[sge(DATA, 8, a.key)]));
    pair.settle();
    for _ in 0..5 {
        pair.a.device.kick(pair.a.send_queue(a.qpn));
        pair.settle();
    }
    assert!(pair.poll_a().is_none());
    pair.settle_in_time();
    assert_eq!(pair.clock.passed(), 4 * Duration::from_nanos(4096 << 14));
    let error = VIRTIO_RDMA_WC_RETRY_EXC_ERR;
    assert_eq!(brief(pair.poll_a()), Some((1, error, VIRTIO_RDMA_WC_SEND)));
}

#[test]
pub fn memory_of_a_receive_that_is_filled_may_go_before_the_message_ends() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let chunk = crate::CHUNK as u32;
    let part = pair.b.reg_mr(b.pdn, DATA, chunk.into(), LOCAL);
    let rest = sge(DATA + u64::from(chunk), 2 * chunk, b.key);
    pair.b.post_recv(b.qpn, 2, &[sge(DATA, chunk, part.lkey), rest]);
    let data = pair.a.fill(DATA, 3 * chunk as usize, 5);
    pair.a.post_send(a.qpn, &Send::new(1, SEND, &[sge(DATA, 3 * chunk, a.key)]));
    while pair.b.bytes(DATA, chunk as usize) != data[..chunk as usize] {
        pair.a.device.run(1);
    }
    pair.b.dereg_mr(part.mrn).unwrap();
    pair.settle();
    assert_eq!(brief(pair.poll_b()), Some((2, OK, VIRTIO_RDMA_WC_RECV)));
    assert_eq!(brief(pair.poll_a()), Some((1, OK, VIRTIO_RDMA_WC_SEND)));
    assert_eq!(pair.b.bytes(DATA, data.len()), data);
}
