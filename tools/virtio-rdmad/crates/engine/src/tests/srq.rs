// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests shared receive queues.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use abi::*;
use testkit::receive;
use zerocopy::{FromZeros, IntoBytes};

use super::driver::*;
use crate::base::ready_set::Set;
use crate::{Counter, Limits, Next, QpState};

const SEND: u32 = VIRTIO_RDMA_WR_SEND;
const RECV: u32 = VIRTIO_RDMA_WC_RECV;
const LIMIT: u32 = VIRTIO_RDMA_EVENT_SRQ_LIMIT_REACHED;
const LAST: u32 = VIRTIO_RDMA_EVENT_QP_LAST_WQE_REACHED;

/// Guest `b` has an SRQ with several QPs, each of which is connected to a QP of guest `a`.
struct Bench {
    pair: Pair,
    srqn: u32,
    /// The QPs of `a`, and those of `b`.
    qps: Vec<(u32, u32)>,
}

impl Bench {
    fn new(count: usize) -> Self {
        Self::of(Pair::unconnected(VIRTIO_RDMA_QPT_RC), count)
    }

    /// Makes one whose guests may have as many QPs as it takes, on rings.
    fn large(count: usize) -> Self {
        let (fabric, clock) = fabric();
        let limits = Limits { ring_qp: count as u16 + 2, ..limits() };
        let sizes = Sizes { region_count: count as u64 + 4, ..Sizes::default() };
        let setup = Setup { limits, sizes, ..Setup::default() };
        let guest =
            |number| Guest::with_setup(&fabric, &clock, number, Arc::new(NoWake), setup.clone());
        let (mut a, mut b) = with_rings(|| (guest(1), guest(2)));
        // None of them gives up.
        (a.rnr_retry, b.rnr_retry) = (7, 7);
        let kind = VIRTIO_RDMA_QPT_RC;
        let ends = [End::new(&mut a, kind), End::new(&mut b, kind)];
        Self::of(Pair { clock, fabric, a, b, ends }, count)
    }

    fn of(mut pair: Pair, count: usize) -> Self {
        let [a, b] = pair.ends;
        let srqn = pair.b.create_srq(b.pdn);
        let mut qps = Vec::new();
        for _ in 0..count {
            let from = pair.a.create_qp(a.pdn, a.cqn, VIRTIO_RDMA_QPT_RC);
            let to = pair.b.create_srq_qp(b.pdn, b.cqn, VIRTIO_RDMA_QPT_RC, srqn).unwrap();
            pair.a.connect(from, pair.b.gid, to);
            pair.b.connect(to, pair.a.gid, from);
            qps.push((from, to));
        }
        // COMM_EST comes with RTR, and these are in RTS.
        while pair.b.poll_event().is_some() {}
        Self { pair, srqn, qps }
    }

    fn post(&mut self, wr_id: u64) {
        let key = self.pair.ends[1].key;
        self.pair.b.post_srq_recv(self.srqn, wr_id, &[sge(DATA + wr_id * 64, 64, key)]);
    }

    fn send(&mut self, qp: usize, wr_id: u64) {
        let key = self.pair.ends[0].key;
        let send = Send::new(wr_id, SEND, &[sge(DATA + wr_id * 64, 64, key)]);
        self.pair.a.post_send(self.qps[qp].0, &send);
    }

    /// Returns the work request, the status and the QP of the next receive.
    fn received(&mut self) -> Option<(u64, u32, u32)> {
        self.pair.poll_b().map(|cqe| (cqe.wr_id, u32::from(cqe.status), cqe.qp_num))
    }

    fn state(&mut self, qp: usize) -> u32 {
        self.pair.b.query(self.qps[qp].1).qp_state.into()
    }
}

/// The thread of the SRQ's owner does not stand while a peer sends to the QP that is to look for a receive.
#[test]
fn a_visit_of_an_srq_waits_in_turns() {
    let mut bench = with_rings(|| Bench::new(2));
    for qp in [0, 1] {
        bench.send(qp, 1 + qp as u64);
    }
    bench.pair.settle_and_pause();
    let hca = Arc::clone(bench.pair.b.device.hca());
    let slot = hca.slot_of(bench.qps[0].1).unwrap();
    let responder = hca.qps.get(slot).unwrap().responder.lock().unwrap();
    bench.post(5);
    for _ in 0..10 {
        assert_eq!(bench.pair.b.device.run(64), Next::Busy);
    }
    drop(responder);
    bench.pair.settle();
    // It has kept its turn.
    assert_eq!(bench.received(), Some((5, VIRTIO_RDMA_WC_SUCCESS, bench.qps[0].1)));
    bench.post(6);
    bench.pair.settle();
    assert_eq!(bench.received(), Some((6, VIRTIO_RDMA_WC_SUCCESS, bench.qps[1].1)));
}

#[test]
fn receives_are_taken_in_order_by_whoever_needs_one() {
    with_rings(|| {
        let mut bench = Bench::new(3);
        let mut expected = 0;
        // The indices go round the ring several times.
        for round in 0..u64::from(3 * RING) {
            let (qp, wr_id) = ((round % 3) as usize, round % 7);
            let data = bench.pair.a.fill(DATA + wr_id * 64, 64, round as u8);
            bench.post(wr_id);
            bench.send(qp, wr_id);
            bench.pair.settle();
            let cqe = bench.pair.b.poll_ring(bench.pair.ends[1].cqn).unwrap();
            assert_eq!((cqe.wr_id, cqe.qp_num, cqe.byte_len), (wr_id, bench.qps[qp].1, 64));
            assert_eq!(cqe.wqe_index, expected);
            assert_eq!(u32::from(cqe.opcode), RECV);
            assert_eq!(bench.pair.b.bytes(DATA + wr_id * 64, 64), data);
            assert_eq!(brief(bench.pair.poll_a()).unwrap(), (wr_id, 0, VIRTIO_RDMA_WC_SEND));
            expected += 1;
            assert_eq!(bench.pair.b.srq_consumer(bench.srqn), expected);
        }
    });
}

#[test]
fn a_post_wakes_whoever_waits() {
    with_rings(|| {
        let mut bench = Bench::new(4);
        for qp in 0..4 {
            bench.send(qp, qp as u64);
        }
        bench.pair.settle_and_pause();
        assert_eq!(bench.pair.b.device.counter(Counter::RnrNaks), 4);
        assert!(bench.received().is_none());
        // Each post wakes one QP, however many wait, and without a timer.
        for wr_id in 0..4 {
            bench.post(wr_id);
            bench.pair.settle();
            assert_eq!(bench.received().unwrap().0, wr_id);
            assert!(bench.received().is_none());
        }
        assert_eq!(bench.pair.clock.passed(), PAUSE);
        // No QP waits, so no doorbell is needed.
        let bells = bench.pair.b.device.counter(Counter::Doorbells);
        bench.post(5);
        assert_eq!(bench.pair.b.device.counter(Counter::Doorbells), bells);
    });
}

/// As many requesters are told of receives as there are receives: the others would find nothing.
#[test]
fn a_post_rouses_as_many_as_it_serves() {
    without_upgrades();
    let mut bench = Bench::large(16);
    for qp in 0..16 {
        bench.send(qp, 0);
    }
    bench.pair.settle_and_pause();
    for receives in [1, 2, 3] {
        for _ in 0..receives {
            bench.post(0);
        }
        bench.pair.b.run();
        let hca = bench.pair.a.device.hca();
        let mut roused = Set::new(hca.jobs.count());
        hca.ready.take(&mut roused);
        assert_eq!(roused.len(), receives, "requesters that look");
        (0..hca.jobs.count())
            .filter(|&job| roused.contains(job))
            .for_each(|job| hca.ready.set(job));
        bench.pair.settle();
        let received = std::iter::from_fn(|| bench.received()).count();
        assert_eq!(received, receives);
    }
}

/// A requester that has come to an end leaves the receive to the next one, at once.
#[test]
fn one_that_has_ended_is_passed_over() {
    without_upgrades();
    let mut bench = Bench::large(3);
    for qp in 0..3 {
        bench.send(qp, 0);
    }
    bench.pair.settle_and_pause();
    bench.pair.a.set_state(bench.qps[0].0, VIRTIO_RDMA_QPS_ERR).unwrap();
    bench.pair.a.destroy_qp(bench.qps[1].0).unwrap();
    let passed = bench.pair.clock.passed();
    bench.post(7);
    bench.pair.settle();
    assert_eq!(bench.received(), Some((7, 0, bench.qps[2].1)));
    assert_eq!(bench.pair.clock.passed(), passed);
}

/// A requester that said that it asks again, and has come to an end, leaves the receive to the next one in time.
#[test]
fn one_that_does_not_come_loses_its_turn() {
    without_upgrades();
    let mut bench = Bench::large(2);
    // The first one has more to send, so it asks by itself.
    for qp in [0, 0, 0, 1] {
        bench.send(qp, 0);
    }
    bench.pair.settle_and_pause();
    bench.pair.a.set_state(bench.qps[0].0, VIRTIO_RDMA_QPS_RESET).unwrap();
    bench.post(7);
    bench.pair.settle_for(Duration::from_millis(3));
    assert_eq!(bench.received(), Some((7, 0, bench.qps[1].1)));
}

/// 16 QPs send as fast as they can, and there are receives for half of them. None of them starves, whether it has one
/// message under way or many.
#[test]
fn receives_in_short_supply_are_shared() {
    without_upgrades();
    for backlog in [1, 4, 40] {
        let mut bench = Bench::large(16);
        let mut under_way = [0; 16];
        let mut served = [0_u32; 16];
        for _ in 0..500 {
            for (qp, under_way) in under_way.iter_mut().enumerate() {
                while *under_way < backlog {
                    bench.send(qp, 0);
                    *under_way += 1;
                }
            }
            for _ in 0..8 {
                bench.post(0);
            }
            bench.pair.settle_for(Duration::from_micros(100));
            while let Some((_, status, qpn)) = bench.received() {
                assert_eq!(status, 0);
                let qp = bench.qps.iter().position(|(_, to)| *to == qpn).unwrap();
                served[qp] += 1;
                under_way[qp] -= 1;
            }
            while let Some(cqe) = bench.pair.poll_a() {
                assert_eq!(cqe.status, 0);
            }
        }
        let (least, sum) = (served.iter().min().unwrap(), served.iter().sum::<u32>());
        assert!(least * 16 * 5 >= sum, "of {sum} messages with {backlog} under way: {served:?}");
        assert!(sum >= 500 * 7, "{sum} messages for {} receives", 500 * 8);
    }
}

#[test]
fn one_that_comes_later_has_its_turn() {
    without_upgrades();
    with_rings(|| {
        let mut bench = Bench::new(2);
        bench.send(0, 0);
        bench.pair.settle_and_pause();
        // QP 1 finds the receive before the owner has sent the doorbell for QP 0, and leaves it.
        let key = bench.pair.ends[1].key;
        let sges = [sge(DATA, 64, key)];
        bench.pair.b.write_srq_entry(bench.srqn, &receive(1, &sges));
        bench.send(1, 1);
        bench.pair.settle();
        assert!(bench.received().is_none());
        // The next post finds that a QP waits.
        bench.post(2);
        bench.pair.settle();
        assert_eq!(bench.received(), Some((1, 0, bench.qps[0].1)));
        assert_eq!(bench.pair.clock.passed(), PAUSE);
        // QP 1 asks again by itself.
        bench.pair.settle_and_pause();
        assert_eq!(bench.received(), Some((2, 0, bench.qps[1].1)));
        assert_eq!(bench.pair.clock.passed(), 2 * PAUSE);
    });
}

#[test]
fn the_limit_is_told_once() {
    with_rings(|| {
        let mut bench = Bench::new(1);
        let srqn = bench.srqn;
        for wr_id in 0..4 {
            bench.post(wr_id);
        }
        bench.pair.b.arm_srq(srqn, 3).unwrap();
        assert_eq!(bench.pair.b.query_srq(srqn).unwrap().srq_limit, 3);
        bench.send(0, 0);
        bench.pair.settle();
        assert_eq!(bench.pair.b.poll_event(), None);
        bench.send(0, 1);
        bench.send(0, 2);
        bench.pair.settle();
        assert_eq!(bench.pair.b.poll_event(), Some((LIMIT, srqn)));
        assert_eq!(bench.pair.b.poll_event(), None);
        assert_eq!(bench.pair.b.query_srq(srqn).unwrap().srq_limit, 0);
        // One receive is left, so the limit is reached when it is set.
        bench.pair.b.arm_srq(srqn, 2).unwrap();
        assert_eq!(bench.pair.b.poll_event(), Some((LIMIT, srqn)));
        bench.pair.b.arm_srq(srqn, 1).unwrap();
        assert_eq!(bench.pair.b.poll_event(), None);
        bench.send(0, 3);
        bench.pair.settle();
        assert_eq!(bench.pair.b.poll_event(), Some((LIMIT, srqn)));
        let most = RING.into();
        assert_eq!(bench.pair.b.arm_srq(srqn, most + 1), Err(VIRTIO_RDMA_STATUS_INVAL));
        assert_eq!(bench.pair.b.query_srq(srqn).unwrap().max_wr, most);
    });
}

#[test]
fn a_qp_in_error_tells_that_it_took_its_last() {
    with_rings(|| {
        let mut bench = Bench::new(2);
        let (_, qpn) = bench.qps[0];
        bench.post(1);
        bench.pair.b.set_state(qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
        bench.pair.settle();
        assert_eq!(bench.pair.b.poll_event(), Some((LAST, qpn)));
        // Receives that no QP took are not flushed.
        assert!(bench.received().is_none());
        bench.pair.b.set_state(qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
        bench.pair.settle();
        assert_eq!(bench.pair.b.poll_event(), None);
        bench.send(1, 2);
        bench.pair.settle();
        assert_eq!(bench.received(), Some((1, 0, bench.qps[1].1)));
        // Each life has an end.
        bench.pair.b.set_state(qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
        bench.pair.b.connect(qpn, gid(1), bench.qps[0].0);
        bench.pair.b.set_state(qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
        bench.pair.settle();
        assert_eq!(bench.pair.b.poll_event(), Some((LAST, qpn)));
    });
}

#[test]
fn a_receive_that_fails_is_the_last() {
    with_rings(|| {
        let mut bench = Bench::new(2);
        let key = bench.pair.ends[1].key;
        bench.pair.b.post_srq_recv(bench.srqn, 1, &[sge(DATA, 8, key)]);
        bench.post(2);
        bench.send(0, 0);
        bench.pair.settle();
        let (_, qpn) = bench.qps[0];
        assert_eq!(bench.received(), Some((1, VIRTIO_RDMA_WC_LOC_LEN_ERR, qpn)));
        assert_eq!(bench.pair.b.poll_event(), Some((LAST, qpn)));
        assert_eq!(bench.pair.b.poll_event(), None);
        bench.send(1, 3);
        bench.pair.settle();
        assert_eq!(bench.received(), Some((2, 0, bench.qps[1].1)));
    });
}

#[test]
fn what_a_reset_qp_did_not_complete_is_taken_by_another() {
    with_rings(|| {
        let mut bench = Bench::new(2);
        let [a, b] = bench.pair.ends;
        // The message takes longer than a turn, so the device stops in the middle.
        let len = 1 << 20;
        bench.pair.b.post_srq_recv(bench.srqn, 7, &[sge(DATA, len, b.key)]);
        let send = Send::new(1, SEND, &[sge(DATA, len, a.key)]);
        bench.pair.a.post_send(bench.qps[0].0, &send);
        bench.pair.a.device.run(1);
        while bench.pair.b.srq_consumer(bench.srqn) == 0 {
            bench.pair.a.device.run(1);
        }
        bench.send(1, 2);
        bench.pair.b.set_state(bench.qps[0].1, VIRTIO_RDMA_QPS_RESET).unwrap();
        bench.pair.settle();
        assert_eq!(bench.received(), Some((7, 0, bench.qps[1].1)));
        assert_eq!(bench.pair.b.srq_consumer(bench.srqn), 1);
    });
}

/// Returns a pair whose responder has an SRQ of another PD than its QP, an MR of that PD, and the number of the SRQ.
fn with_srq_of_another_pd() -> (Pair, virtio_rdma_rsp_mr, u32) {
    let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
    let [a, b] = pair.ends;
    let other = pair.b.create_pd();
    let mr = pair.b.reg_mr(other, DATA, 4096, ALL);
    let srqn = pair.b.create_srq(other);
    let qpn = pair.b.create_srq_qp(b.pdn, b.cqn, VIRTIO_RDMA_QPT_RC, srqn).unwrap();
    pair.a.connect(a.qpn, pair.b.gid, qpn);
    pair.b.connect(qpn, pair.a.gid, a.qpn);
    (pair, mr, srqn)
}

#[test]
fn receives_are_checked_in_the_pd_of_the_srq() {
    with_rings(|| {
        let (mut pair, mr, srqn) = with_srq_of_another_pd();
        let [a, b] = pair.ends;
        pair.b.post_srq_recv(srqn, 1, &[sge(DATA, 64, mr.lkey)]);
        pair.b.post_srq_recv(srqn, 2, &[sge(DATA, 64, b.key)]);
        let send = Send::new(1, SEND, &[sge(DATA, 64, a.key)]);
        pair.a.post_send(a.qpn, &send);
        pair.a.post_send(a.qpn, &send);
        pair.settle();
        assert_eq!(brief(pair.poll_b()), Some((1, 0, RECV)));
        assert_eq!(brief(pair.poll_b()), Some((2, VIRTIO_RDMA_WC_LOC_PROT_ERR, RECV)));
    });
}

#[test]
fn datagrams_find_their_receives() {
    with_rings(|| {
        let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_UD);
        let [a, b] = pair.ends;
        let srqn = pair.b.create_srq(b.pdn);
        let qpn = pair.b.create_srq_qp(b.pdn, b.cqn, VIRTIO_RDMA_QPT_UD, srqn).unwrap();
        let ready = |guest: &mut Guest, qpn| {
            let mut attr = virtio_rdma_qp_attr::new_zeroed();
            (attr.qp_state, attr.port_num, attr.qkey) = (1, 1, 5);
            let mask = VIRTIO_RDMA_QP_STATE
                | VIRTIO_RDMA_QP_PKEY_INDEX
                | VIRTIO_RDMA_QP_PORT
                | VIRTIO_RDMA_QP_QKEY;
            guest.modify(qpn, mask, attr).unwrap();
            guest.set_state(qpn, VIRTIO_RDMA_QPS_RTR).unwrap();
            guest.make_rts(qpn, false).unwrap();
        };
        ready(&mut pair.a, a.qpn);
        ready(&mut pair.b, qpn);
        let send = Send::new(1, SEND, &[sge(DATA, 64, a.key)]).ud(pair.b.gid, qpn, 5, a.pdn);
        pair.a.post_send(a.qpn, &send);
        pair.settle();
        assert_eq!(pair.a.device.counter(Counter::DropNoReceive), 1);
        pair.b.post_srq_recv(srqn, 9, &[sge(DATA, 104, b.key)]);
        pair.a.post_send(a.qpn, &send);
        pair.settle();
        let cqe = pair.poll_b().unwrap();
        assert_eq!((cqe.wr_id, cqe.byte_len, cqe.qp_num), (9, 104, qpn));
    });
}

#[test]
fn an_index_that_runs_away_is_the_end_of_the_srq_alone() {
    with_rings(|| {
        for wild in [u32::from(RING) + 1, u32::MAX, 1 << 31] {
            let mut bench = Bench::new(2);
            let region = bench.pair.b.srq_rings[&bench.srqn].region;
            bench.send(0, 0);
            bench.pair.settle_and_pause();
            bench.pair.b.memory.write(region, &wild.to_le_bytes()).unwrap();
            bench.pair.b.ring_doorbell(bench.srqn, VIRTIO_RDMA_DOORBELL_SRQ);
            bench.pair.settle();
            let mut events = Vec::new();
            while let Some(event) = bench.pair.b.poll_event() {
                events.push(event);
            }
            assert_eq!(events[0], (VIRTIO_RDMA_EVENT_SRQ_ERR, bench.srqn));
            for (qp, (_, qpn)) in bench.qps.clone().into_iter().enumerate() {
                assert!(events.contains(&(VIRTIO_RDMA_EVENT_QP_FATAL, qpn)));
                assert!(events.contains(&(LAST, qpn)));
                assert_eq!(bench.state(qp), QpState::Err as u32);
            }
            assert_eq!(events.len(), 5);
            assert_eq!(bench.pair.b.device.counter(Counter::BadReceiveChain), 1);
            let status = bench.pair.poll_a().unwrap().status;
            assert_eq!(u32::from(status), VIRTIO_RDMA_WC_REM_OP_ERR);
            assert_eq!(bench.pair.b.arm_srq(bench.srqn, 1), Err(VIRTIO_RDMA_STATUS_STATE));
        }
    });
}

#[test]
fn a_malformed_receive_is_the_end_of_the_srq() {
    with_rings(|| {
        let mut bench = Bench::new(2);
        let header = virtio_rdma_rq_wqe { num_sge: 5, reserved_04: 0, wr_id: 3 };
        bench.pair.b.write_srq_entry(bench.srqn, header.as_bytes());
        bench.post(4);
        bench.send(0, 0);
        bench.pair.settle();
        let (_, qpn) = bench.qps[0];
        assert_eq!(bench.received(), Some((3, VIRTIO_RDMA_WC_LOC_QP_OP_ERR, qpn)));
        assert!(bench.received().is_none());
        assert_eq!(bench.pair.b.poll_event(), Some((VIRTIO_RDMA_EVENT_SRQ_ERR, bench.srqn)));
        assert_eq!(bench.state(1), QpState::Err as u32);
    });
}

/// A QP in RESET does not fail with its SRQ. It fails as soon as it leaves RESET, whenever it was made.
#[test]
fn a_qp_with_an_srq_in_error_fails_when_it_leaves_reset() {
    with_rings(|| {
        let mut bench = Bench::new(1);
        let (srqn, b) = (bench.srqn, bench.pair.ends[1]);
        let create =
            |guest: &mut Guest| guest.create_srq_qp(b.pdn, b.cqn, VIRTIO_RDMA_QPT_RC, srqn);
        let before = create(&mut bench.pair.b).unwrap();
        let region = bench.pair.b.srq_rings[&srqn].region;
        bench.pair.b.memory.write(region, &999_u32.to_le_bytes()).unwrap();
        bench.send(0, 0);
        bench.pair.settle();
        let guest = &mut bench.pair.b;
        let events = std::iter::from_fn(|| guest.poll_event()).collect::<Vec<_>>();
        assert_eq!(events[0], (VIRTIO_RDMA_EVENT_SRQ_ERR, srqn));
        assert!(events[1..].iter().all(|(_, qpn)| *qpn == bench.qps[0].1), "{events:?}");
        let later = create(guest).unwrap();
        for qpn in [before, later] {
            for at_once in [false, true] {
                for _ in 0..2 {
                    guest.add_event_buffer();
                }
                if at_once {
                    guest.make_rtr_at_once(qpn, ALL, gid(1), qpn).unwrap();
                } else {
                    guest.make_init(qpn, ALL);
                }
                guest.run();
                assert_eq!(guest.poll_event(), Some((VIRTIO_RDMA_EVENT_QP_FATAL, qpn)));
                assert_eq!(guest.poll_event(), Some((LAST, qpn)));
                assert_eq!(u32::from(guest.query(qpn).qp_state), VIRTIO_RDMA_QPS_ERR);
                guest.set_state(qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
            }
        }
    });
}

#[test]
fn an_srq_lives_as_long_as_its_users() {
    with_rings(|| {
        let mut bench = Bench::new(1);
        let (srqn, b) = (bench.srqn, bench.pair.ends[1]);
        let guest = &mut bench.pair.b;
        assert_eq!(guest.destroy_srq(srqn), Err(VIRTIO_RDMA_STATUS_BUSY));
        guest.destroy_qp(bench.qps[0].1).unwrap();
        guest.destroy_srq(srqn).unwrap();
        assert_eq!(guest.destroy_srq(srqn), Err(VIRTIO_RDMA_STATUS_NO_OBJECT));
        assert_eq!(guest.query_srq(srqn).err(), Some(VIRTIO_RDMA_STATUS_NO_OBJECT));
        let refused = guest.create_srq_qp(b.pdn, b.cqn, VIRTIO_RDMA_QPT_RC, srqn);
        assert_eq!(refused, Err(VIRTIO_RDMA_STATUS_NO_OBJECT));
        // Of a PD that lives as long as it, and a number that comes back late.
        let pdn = guest.create_pd();
        let numbers: Vec<u32> = (0..3).map(|_| guest.create_srq(pdn)).collect();
        assert_eq!(numbers, [2, 3, 1]);
        let request = virtio_rdma_cmd_destroy_pd { pdn };
        let busy = guest.command::<_, ()>(VIRTIO_RDMA_CMD_DESTROY_PD, &request);
        assert_eq!(busy, Err(VIRTIO_RDMA_STATUS_BUSY));
        for srqn in numbers {
            guest.destroy_srq(srqn).unwrap();
        }
        guest.command::<_, ()>(VIRTIO_RDMA_CMD_DESTROY_PD, &request).unwrap();
    });
}

#[test]
fn resizing_loses_no_receive_and_doubles_none() {
    with_rings(|| {
        let mut bench = Bench::new(2);
        let (mut posted, mut taken, mut moved) = (0, 0, 0);
        for (round, depth) in [4, 64, 8, 16, 2, 64].into_iter().cycle().take(60).enumerate() {
            // Some receives wait at each change, and some are taken between two changes.
            while posted - taken < 2 {
                bench.post(posted);
                posted += 1;
            }
            moved += bench.pair.b.resize_srq(bench.srqn, depth).unwrap();
            assert_eq!(bench.pair.b.query_srq(bench.srqn).unwrap().max_wr, depth);
            assert_eq!(bench.pair.b.srq_consumer(bench.srqn), 0);
            for _ in 0..=round % 2 {
                bench.send(round % 2, taken);
                bench.pair.settle();
                assert_eq!(bench.received(), Some((taken, 0, bench.qps[round % 2].1)));
                assert!(bench.pair.poll_a().is_some());
                taken += 1;
            }
        }
        assert_eq!(moved, 120);
        assert!(bench.received().is_none());
    });
}

/// An SRQ moves again and again while a peer in a thread of its own sends without end. The receives that the device
/// took while it moved the SRQ are counted in the new ring.
#[test]
fn resizing_counts_what_is_taken_meanwhile() {
    with_rings(moves_under_traffic);
}

fn moves_under_traffic() {
    let mut bench = Bench::new(1);
    (bench.pair.a.rnr_retry, bench.pair.b.rnr_retry) = (7, 7);
    bench.pair.a.set_state(bench.qps[0].0, VIRTIO_RDMA_QPS_RESET).unwrap();
    bench.pair.a.connect(bench.qps[0].0, bench.pair.b.gid, bench.qps[0].1);
    let Bench { pair, srqn, qps } = bench;
    let Pair { mut a, mut b, ends, clock, fabric: _fabric } = pair;
    let is_over = Arc::new(AtomicBool::new(false));
    let ends_when = Arc::clone(&is_over);
    let sender = thread::spawn(move || {
        let mut sent = 0;
        while !ends_when.load(Ordering::Acquire) {
            a.post_send(qps[0].0, &Send::new(sent, SEND, &[sge(DATA, 64, ends[0].key)]));
            while a.poll(ends[0].cqn).is_none() {
                let next = a.device.run(64);
                a.clock.end_pause(next);
                thread::yield_now();
            }
            sent += 1;
        }
        sent
    });
    let (mut posted, mut taken) = (0, 0);
    let mut post = |b: &mut Guest, taken: u64| {
        while posted < taken + 16 {
            b.post_srq_recv(srqn, posted, &[sge(DATA + posted % 16 * 64, 64, ends[1].key)]);
            posted += 1;
        }
    };
    let take = |b: &mut Guest, taken: &mut u64| {
        let next = b.device.run(64);
        clock.end_pause(next);
        while let Some(cqe) = b.poll(ends[1].cqn) {
            assert_eq!((cqe.wr_id, u32::from(cqe.status)), (*taken, VIRTIO_RDMA_WC_SUCCESS));
            *taken += 1;
        }
    };
    for depth in [64, 32].into_iter().cycle().take(200) {
        post(&mut b, taken);
        let moved = b.resize_srq(srqn, depth).unwrap();
        while taken % 16 != 0 || b.srq_consumer(srqn) < moved {
            take(&mut b, &mut taken);
        }
        assert_eq!(b.srq_consumer(srqn), moved);
    }
    is_over.store(true, Ordering::Release);
    while !sender.is_finished() {
        post(&mut b, taken);
        take(&mut b, &mut taken);
    }
    take(&mut b, &mut taken);
    assert_eq!(sender.join().unwrap(), taken);
}

#[test]
fn a_qp_that_waits_is_woken_at_the_new_ring() {
    with_rings(|| {
        let mut bench = Bench::new(2);
        bench.send(0, 0);
        bench.send(1, 1);
        bench.pair.settle_and_pause();
        assert_eq!(bench.pair.b.resize_srq(bench.srqn, 16), Ok(0));
        for wr_id in 0..2 {
            bench.post(wr_id);
            bench.pair.settle();
            assert_eq!(bench.received().unwrap().0, wr_id);
        }
        assert_eq!(bench.pair.clock.passed(), PAUSE);
    });
}

#[test]
fn a_ring_that_is_too_small_changes_nothing() {
    with_rings(|| {
        let mut bench = Bench::new(1);
        let srqn = bench.srqn;
        for wr_id in 0..5 {
            bench.post(wr_id);
        }
        let invalid = Err(VIRTIO_RDMA_STATUS_INVAL);
        for depth in [0, 1, 3, 4, 2 * u32::from(RING)] {
            assert_eq!(bench.pair.b.resize_srq(srqn, depth), invalid);
        }
        bench.pair.b.arm_srq(srqn, 5).unwrap();
        bench.send(0, 0);
        bench.send(0, 1);
        bench.pair.settle();
        assert_eq!(bench.pair.b.poll_event(), Some((LIMIT, srqn)));
        // The ring must have room for the limit, too.
        bench.pair.b.arm_srq(srqn, 3).unwrap();
        assert_eq!(bench.pair.b.resize_srq(srqn, 2), invalid);
        assert_eq!(bench.pair.b.resize_srq(srqn, 4), Ok(3));
        assert_eq!(bench.pair.b.query_srq(srqn).unwrap().srq_limit, 3);
        bench.send(0, 2);
        bench.pair.settle();
        assert_eq!(bench.pair.b.poll_event(), Some((LIMIT, srqn)));
        for wr_id in 0..3 {
            assert_eq!(bench.received().unwrap().0, wr_id);
        }
        let none = Err(VIRTIO_RDMA_STATUS_NO_OBJECT);
        let ring = bench.pair.b.srq_rings[&srqn].clone();
        bench.pair.b.srq_rings.insert(3, ring);
        assert_eq!(bench.pair.b.resize_srq(3, 4), none);
    });
}

#[test]
fn what_a_qp_gave_back_is_no_part_of_the_ring() {
    with_rings(|| {
        let mut bench = Bench::new(2);
        let [a, b] = bench.pair.ends;
        let len = 1 << 20;
        bench.pair.b.post_srq_recv(bench.srqn, 7, &[sge(DATA, len, b.key)]);
        bench.pair.a.post_send(bench.qps[0].0, &Send::new(1, SEND, &[sge(DATA, len, a.key)]));
        while bench.pair.b.srq_consumer(bench.srqn) == 0 {
            bench.pair.a.device.run(1);
        }
        bench.pair.b.set_state(bench.qps[0].1, VIRTIO_RDMA_QPS_RESET).unwrap();
        assert_eq!(bench.pair.b.resize_srq(bench.srqn, 2), Ok(0));
        bench.post(8);
        for wr_id in [7, 8] {
            bench.send(1, wr_id);
            bench.pair.settle();
            assert_eq!(bench.received(), Some((wr_id, 0, bench.qps[1].1)));
        }
    });
}

#[test]
fn an_srq_in_error_is_not_resized() {
    with_rings(|| {
        let mut bench = Bench::new(1);
        let region = bench.pair.b.srq_rings[&bench.srqn].region;
        bench.pair.b.memory.write(region, &999_u32.to_le_bytes()).unwrap();
        let state = Err(VIRTIO_RDMA_STATUS_STATE);
        assert_eq!(bench.pair.b.resize_srq(bench.srqn, 16), state);
        assert_eq!(bench.pair.b.poll_event(), Some((VIRTIO_RDMA_EVENT_SRQ_ERR, bench.srqn)));
        assert_eq!(bench.pair.b.resize_srq(bench.srqn, 16), state);
        assert_eq!(bench.pair.b.device.counter(Counter::BadReceiveChain), 1);
    });
}

#[test]
fn commands_are_checked() {
    with_rings(|| {
        let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
        let b = pair.ends[1];
        let guest = &mut pair.b;
        let region = guest.qp_rings[&b.qpn].region;
        let good = guest.srq_request(region, b.pdn);
        let mut create = |change: &dyn Fn(&mut virtio_rdma_cmd_create_srq)| {
            let mut request = good;
            change(&mut request);
            let reply: Result<virtio_rdma_rsp_create_srq, u32> =
                guest.command(VIRTIO_RDMA_CMD_CREATE_SRQ, &request);
            reply.map(|_| ())
        };
        let invalid = Err(VIRTIO_RDMA_STATUS_INVAL);
        assert_eq!(create(&|request| request.ring.depth = 0), invalid);
        assert_eq!(create(&|request| request.ring.depth = 3), invalid);
        assert_eq!(create(&|request| request.ring.depth = 2 * u32::from(RING)), invalid);
        assert_eq!(create(&|request| request.ring.stride = 64), invalid);
        assert_eq!(create(&|request| request.ring.offset = 128), invalid);
        assert_eq!(create(&|request| request.max_sge = 17), invalid);
        assert_eq!(create(&|request| request.max_sge = u32::MAX), invalid);
        assert_eq!(create(&|request| request.region.npages = 1), invalid);
        assert_eq!(create(&|request| request.pdn = 99), Err(VIRTIO_RDMA_STATUS_NO_OBJECT));
        assert_eq!(
            create(&|request| request.region.pages = 1 << 40),
            Err(VIRTIO_RDMA_STATUS_FAULT)
        );
        let srqn = guest.create_srq(b.pdn);
        // A receive ring beside it, and the GSI's.
        let mut request = guest.qp_ring_request(region, Guest::qp_request(b.pdn, b.cqn, 2));
        request.srqn = srqn;
        let result: Result<virtio_rdma_rsp_create_qp, u32> =
            guest.command(VIRTIO_RDMA_CMD_CREATE_RING_QP, &request);
        assert_eq!(result.err(), Some(VIRTIO_RDMA_STATUS_INVAL));
        let gsi = guest.create_srq_qp(b.pdn, b.cqn, VIRTIO_RDMA_QPT_GSI, srqn);
        assert_eq!(gsi, Err(VIRTIO_RDMA_STATUS_INVAL));
    });
}

#[test]
fn a_driver_that_knows_no_srqs_has_none() {
    with_rings(|| {
        let (fabric, clock) = fabric();
        let mut guest = Guest::new(&fabric, &clock, 1);
        guest.device.reset();
        let features = guest.device.features() & !(1 << VIRTIO_RDMA_F_SRQ);
        guest.start_with(features);
        let pdn = guest.create_pd();
        for command in 35..=39 {
            let result = guest.command::<_, ()>(command, &[0_u8; 64]);
            assert_eq!(result, Err(VIRTIO_RDMA_STATUS_UNSUPPORTED));
        }
        // The word is reserved to it.
        let cqn = guest.create_cq(RING);
        guest.create_srq_qp(pdn, cqn, VIRTIO_RDMA_QPT_RC, 77).unwrap();
    });
}

#[test]
fn a_reset_device_forgets_its_srqs() {
    with_rings(|| {
        let mut bench = Bench::new(2);
        bench.send(0, 0);
        bench.pair.settle();
        bench.pair.b.device.reset();
        assert!(bench.pair.b.device.status().srqs.is_empty());
        bench.pair.b.start();
        let pdn = bench.pair.b.create_pd();
        assert_eq!(bench.pair.b.create_srq(pdn), 1);
    });
}

/// Makes an SRQ whose ring lies in memory that a test can take away.
fn srq_in_extra_memory(guest: &mut Guest, pdn: u32) -> u32 {
    let mut request = guest.srq_request(EXTRA.0, pdn);
    request.ring.depth = 8;
    let reply: virtio_rdma_rsp_create_srq =
        guest.command(VIRTIO_RDMA_CMD_CREATE_SRQ, &request).unwrap();
    reply.srqn
}

#[test]
fn an_srq_whose_ring_leaves_memory_is_in_error() {
    with_rings(|| {
        let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
        let [a, b] = pair.ends;
        let srqn = srq_in_extra_memory(&mut pair.b, b.pdn);
        let qpn = pair.b.create_srq_qp(b.pdn, b.cqn, VIRTIO_RDMA_QPT_RC, srqn).unwrap();
        pair.b.connect(qpn, gid(1), a.qpn);
        let (less, _) = pair.b.memory.without(EXTRA.0, EXTRA.1);
        pair.b.device.set_memory(&less);
        pair.settle();
        assert_eq!(pair.b.poll_event(), Some((VIRTIO_RDMA_EVENT_SRQ_ERR, srqn)));
        let events: Vec<_> = std::iter::from_fn(|| pair.b.poll_event()).collect();
        assert!(events.contains(&(VIRTIO_RDMA_EVENT_QP_FATAL, qpn)), "{events:?}");
        assert_eq!(u32::from(pair.b.query(qpn).qp_state), VIRTIO_RDMA_QPS_ERR);
        assert_eq!(pair.b.arm_srq(srqn, 1), Err(VIRTIO_RDMA_STATUS_STATE));
        // No other QP fails.
        assert_eq!(u32::from(pair.b.query(b.qpn).qp_state), VIRTIO_RDMA_QPS_RESET);
    });
}

#[test]
fn doorbells_for_the_receives_of_its_qps_are_ignored() {
    with_rings(|| {
        let mut bench = Bench::new(1);
        let (_, qpn) = bench.qps[0];
        for round in 0..3 {
            bench.pair.b.ring_doorbell(qpn, VIRTIO_RDMA_DOORBELL_RQ);
            bench.pair.settle();
            bench.post(round);
            bench.pair.b.ring_doorbell(qpn, VIRTIO_RDMA_DOORBELL_RQ);
            bench.pair.settle();
            assert!(bench.received().is_none());
            bench.send(0, round);
            bench.pair.settle();
            assert_eq!(bench.received(), Some((round, 0, qpn)));
        }
        assert_eq!(bench.pair.b.poll_event(), None);
    });
}

/// Only the keys of receives are those of the SRQ's PD.
#[test]
fn keys_of_peers_are_checked_in_the_pd_of_the_qp() {
    with_rings(|| {
        let (mut pair, mr, _) = with_srq_of_another_pd();
        let [a, b] = pair.ends;
        let part = [sge(DATA, 64, a.key)];
        for (key, status) in [(b.key, 0), (mr.rkey, VIRTIO_RDMA_WC_REM_ACCESS_ERR)] {
            let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(DATA, key);
            pair.a.post_send(a.qpn, &write);
            pair.settle();
            assert_eq!(brief(pair.poll_a()).unwrap().1, status);
        }
    });
}

#[test]
fn what_a_qp_took_is_flushed_in_err() {
    with_rings(|| {
        let mut bench = Bench::new(1);
        let [a, b] = bench.pair.ends;
        let len = 1 << 20;
        bench.pair.b.post_srq_recv(bench.srqn, 7, &[sge(DATA, len, b.key)]);
        bench.post(8);
        bench.pair.a.post_send(bench.qps[0].0, &Send::new(1, SEND, &[sge(DATA, len, a.key)]));
        while bench.pair.b.srq_consumer(bench.srqn) == 0 {
            bench.pair.a.device.run(1);
        }
        let (_, qpn) = bench.qps[0];
        bench.pair.b.set_state(qpn, VIRTIO_RDMA_QPS_ERR).unwrap();
        bench.pair.settle();
        assert_eq!(bench.received(), Some((7, VIRTIO_RDMA_WC_WR_FLUSH_ERR, qpn)));
        assert!(bench.received().is_none());
        assert_eq!(bench.pair.b.poll_event(), Some((LAST, qpn)));
    });
}

/// The memory of receives that no QP took is the owner's again with the reply to DESTROY_SRQ.
#[test]
fn a_destroyed_srq_leaves_memory_alone() {
    with_rings(|| {
        let mut bench = Bench::new(1);
        bench.post(1);
        bench.pair.settle();
        bench.pair.b.destroy_qp(bench.qps[0].1).unwrap();
        bench.pair.b.destroy_srq(bench.srqn).unwrap();
        let mine = bench.pair.b.fill(DATA, 256, 9);
        let [a, b] = bench.pair.ends;
        bench.pair.a.connect(a.qpn, gid(2), b.qpn);
        bench.pair.b.connect(b.qpn, gid(1), a.qpn);
        bench.send(0, 1);
        bench.pair.a.post_send(a.qpn, &Send::new(2, SEND, &[sge(DATA, 64, a.key)]));
        bench.pair.settle_in_time();
        assert_eq!(bench.pair.b.bytes(DATA, 256), mine);
    });
}
