// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests extended reliable connections.

use std::time::Duration;

use abi::*;
use testkit::command::{attr_mask, attributes, create_xrc_tgt};
use zerocopy::FromZeros;

use super::cable::{cable, over_a_cable, Faults};
use super::driver::*;
use crate::{Counter, QpState};

const SEND: u32 = VIRTIO_RDMA_WR_SEND;
const RECV: u32 = VIRTIO_RDMA_WC_RECV;
const REQ_ERR: u32 = VIRTIO_RDMA_EVENT_QP_REQ_ERR;
const LAST: u32 = VIRTIO_RDMA_EVENT_QP_LAST_WQE_REACHED;
const SIZE: u32 = 64;

/// A program of guest `b`: an SRQ with its own PD, MR and CQ.
#[derive(Clone, Copy)]
struct Program {
    pdn: u32,
    cqn: u32,
    key: u32,
    srqn: u32,
}

/// Guest `a` has initiators. Guest `b` has the same number of targets in one domain, and two programs that
/// receive in it.
struct Bench {
    pair: Pair,
    xrcdn: u32,
    programs: [Program; 2],
    /// The initiators of `a`, and the targets of `b`.
    qps: Vec<(u32, u32)>,
}

impl Bench {
    fn new(count: usize) -> Self {
        let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
        // The pauses of initiators move the clock.
        pair.a.rnr_retry = 7;
        let a = pair.ends[0];
        let xrcdn = pair.b.alloc_xrcd().unwrap();
        let programs = [(); 2].map(|()| {
            let pdn = pair.b.create_pd();
            let cqn = pair.b.create_cq(RING);
            let key = pair.b.reg_mr(pdn, DATA, 4 << 20, ALL).lkey;
            let srqn = pair.b.create_xrc_srq(pdn, xrcdn, cqn).unwrap();
            Program { pdn, cqn, key, srqn }
        });
        let mut qps = Vec::new();
        for _ in 0..count {
            let from = pair.a.create_xrc_ini(a.pdn, a.cqn).unwrap();
            let to = pair.b.create_xrc_tgt(xrcdn).unwrap();
            pair.a.connect_ini(from, pair.b.gid, to);
            pair.b.connect_tgt(to, pair.a.gid, from);
            qps.push((from, to));
        }
        Self { pair, xrcdn, programs, qps }
    }

    /// Posts a receive of a program.
    fn post(&mut self, program: usize, wr_id: u64, len: u32) {
        let Program { srqn, key, .. } = self.programs[program];
        let at = DATA + wr_id * u64::from(SIZE);
        self.pair.b.post_srq_recv(srqn, wr_id, &[sge(at, len, key)]);
    }

    /// Sends a message to the SRQ with this number.
    fn send_to(&mut self, qp: usize, srqn: u32, wr_id: u64, len: u32) {
        let key = self.pair.ends[0].key;
        let at = DATA + wr_id * u64::from(SIZE);
        let send = Send::new(wr_id, SEND, &[sge(at, len, key)]).srqn(srqn);
        self.pair.a.post_send(self.qps[qp].0, &send);
    }

    fn send(&mut self, qp: usize, program: usize, wr_id: u64) {
        self.send_to(qp, self.programs[program].srqn, wr_id, SIZE);
    }

    /// Returns the work request, the status, the QP and the SRQ of the next receive of a program.
    fn received(&mut self, program: usize) -> Option<(u64, u32, u32, u32)> {
        let cqe = self.pair.b.poll_ring(self.programs[program].cqn)?;
        Some((cqe.wr_id, u32::from(cqe.status), cqe.qp_num, cqe.srqn))
    }

    /// Returns the work request and the status of the next send.
    fn sent(&mut self) -> Option<(u64, u32)> {
        self.pair.poll_a().map(|cqe| (cqe.wr_id, u32::from(cqe.status)))
    }

    fn state(&mut self, qp: usize) -> u32 {
        self.pair.b.query(self.qps[qp].1).qp_state.into()
    }

    /// Takes all events.
    fn events(&mut self) -> Vec<(u32, u32)> {
        std::iter::from_fn(|| self.pair.b.poll_event()).collect()
    }

    /// Stops in the middle of a long message to a program.
    fn stop_halfway(&mut self, program: usize) {
        let len = 1 << 20;
        self.post(program, 0, len);
        self.send_to(0, self.programs[program].srqn, 0, len);
        while self.pair.b.srq_consumer(self.programs[program].srqn) == 0 {
            self.pair.a.device.run(1);
        }
    }
}

#[test]
pub fn messages_go_to_the_srq_that_they_name() {
    with_rings(|| {
        let mut bench = Bench::new(4);
        for round in 0..u64::from(3 * RING) {
            let (qp, program, wr_id) = ((round % 4) as usize, (round / 3 % 2) as usize, round % 7);
            let data = bench.pair.a.fill(DATA + wr_id * 64, 64, round as u8);
            bench.post(program, wr_id, SIZE);
            bench.send(qp, program, wr_id);
            bench.pair.settle();
            let expected = (wr_id, 0, bench.qps[qp].1, bench.programs[program].srqn);
            assert_eq!(bench.received(program), Some(expected));
            assert_eq!(bench.received(1 - program), None);
            assert_eq!(bench.pair.b.bytes(DATA + wr_id * 64, 64), data);
            assert_eq!(bench.sent(), Some((wr_id, 0)));
        }
        assert_eq!(bench.events(), []);
    });
}

#[test]
pub fn many_initiators_share_one_srq() {
    with_rings(|| {
        let mut bench = Bench::new(4);
        for qp in 0..4 {
            for round in 0..4 {
                bench.send(qp, 0, round);
            }
        }
        bench.pair.settle_for(ASKED);
        assert!(bench.received(0).is_none());
        let mut taken = [0; 4];
        for wr_id in 0..16 {
            bench.post(0, wr_id, SIZE);
            bench.pair.settle_for(ASKED);
            let (got, status, qpn, _) = bench.received(0).unwrap();
            assert_eq!((got, status), (wr_id, 0));
            taken[bench.qps.iter().position(|(_, to)| *to == qpn).unwrap()] += 1;
            // Each program receives its messages in the order of sending.
            assert!(bench.sent().is_some());
        }
        assert_eq!(taken, [4; 4]);
    });
}

#[test]
pub fn keys_are_those_of_the_srqs_pd() {
    with_rings(|| {
        let mut bench = Bench::new(2);
        let [first, second] = bench.programs;
        let a = bench.pair.ends[0];
        let data = bench.pair.a.fill(DATA, 64, 5);
        let local = [sge(DATA, 64, a.key)];
        let word = [sge(DATA + 512, 8, a.key)];
        let (remote, srqn) = (DATA + 4096, first.srqn);
        let requests = [
            Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &local).rdma(remote, first.key),
            Send::new(2, VIRTIO_RDMA_WR_RDMA_READ, &local).rdma(remote, first.key),
            Send::new(3, VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD, &word).atomic(
                remote + 1024,
                first.key,
                7,
                0,
            ),
            Send::new(4, VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM, &local)
                .rdma(remote, first.key)
                .imm(99),
        ];
        bench.post(0, 9, 0);
        for request in requests {
            bench.pair.a.post_send(bench.qps[0].0, &request.srqn(srqn));
        }
        bench.pair.settle();
        for wr_id in 1..=4 {
            assert_eq!(bench.sent(), Some((wr_id, 0)));
        }
        assert_eq!(bench.pair.b.bytes(remote, 64), data);
        assert_eq!(bench.pair.b.memory.read_obj(remote + 1024), Ok(7_u64));
        let cqe = bench.pair.b.poll_ring(first.cqn).unwrap();
        assert_eq!((cqe.wr_id, cqe.ex, cqe.srqn), (9, 99, srqn));
        // The same key is used with the SRQ of the other PD.
        let write = Send::new(5, VIRTIO_RDMA_WR_RDMA_WRITE, &local).rdma(remote, first.key);
        bench.pair.a.post_send(bench.qps[1].0, &write.srqn(second.srqn));
        bench.pair.settle();
        assert_eq!(bench.sent(), Some((5, VIRTIO_RDMA_WC_REM_ACCESS_ERR)));
        let access = (VIRTIO_RDMA_EVENT_QP_ACCESS_ERR, bench.qps[1].1);
        assert_eq!(bench.events(), [access, (LAST, bench.qps[1].1)]);
        assert_eq!(bench.state(0), QpState::Rts as u32);
    });
}

#[test]
pub fn an_srq_outside_of_the_domain_ends_the_connection() {
    with_rings(|| {
        for wrong in 0..5 {
            let mut bench = Bench::new(2);
            let program = bench.programs[0];
            bench.pair.b.destroy_srq(bench.programs[1].srqn).unwrap();
            let other = bench.pair.b.alloc_xrcd().unwrap();
            let foreign = bench.pair.b.create_xrc_srq(program.pdn, other, program.cqn).unwrap();
            let srqn = match wrong {
                0 => 0,
                1 => u32::MAX,
                2 => bench.programs[1].srqn,
                3 => foreign,
                _ => {
                    bench.pair.b.destroy_srq(foreign).unwrap();
                    bench.pair.b.create_srq(program.pdn)
                }
            };
            if bench.pair.b.srq_rings.contains_key(&srqn) {
                bench.pair.b.post_srq_recv(srqn, 1, &[sge(DATA, SIZE, program.key)]);
            }
            bench.send_to(0, srqn, 3, SIZE);
            bench.pair.settle();
            assert_eq!(bench.sent(), Some((3, VIRTIO_RDMA_WC_REM_INV_REQ_ERR)));
            let target = bench.qps[0].1;
            assert_eq!(bench.events(), [(REQ_ERR, target), (LAST, target)]);
            assert_eq!(bench.received(0), None);
            assert_eq!(bench.pair.b.device.counter(Counter::XrcViolations), 1);
            // No other connection is affected.
            bench.post(0, 4, SIZE);
            bench.send(1, 0, 4);
            bench.pair.settle();
            assert_eq!(bench.received(0), Some((4, 0, bench.qps[1].1, program.srqn)));
        }
    });
}

#[test]
fn an_srq_that_is_destroyed_under_a_message() {
    with_rings(|| {
        let mut bench = Bench::new(2);
        bench.stop_halfway(0);
        let Program { srqn, cqn, .. } = bench.programs[0];
        let region = bench.pair.b.srq_rings[&srqn].region;
        bench.pair.b.destroy_srq(srqn).unwrap();
        bench.pair.b.memory.write(region, &[0; 4096]).unwrap();
        bench.pair.settle();
        assert_eq!(bench.sent(), Some((0, VIRTIO_RDMA_WC_REM_INV_REQ_ERR)));
        assert_eq!(bench.pair.b.poll_ring(cqn).map(|cqe| cqe.wr_id), None);
        assert_eq!(bench.pair.b.bytes(region, 4096), [0; 4096]);
        // Its CQ can be destroyed, too.
        bench.pair.b.destroy_cq(cqn).unwrap();
        bench.send_to(1, srqn, 1, SIZE);
        bench.pair.settle();
        assert_eq!(bench.sent(), Some((1, VIRTIO_RDMA_WC_REM_INV_REQ_ERR)));
    });
}

#[test]
fn an_srq_that_is_destroyed_while_a_message_waits() {
    with_rings(|| {
        let mut bench = Bench::new(1);
        bench.send(0, 0, 1);
        bench.pair.settle();
        assert_eq!(bench.sent(), None);
        bench.pair.b.destroy_srq(bench.programs[0].srqn).unwrap();
        bench.pair.settle();
        assert_eq!(bench.sent(), Some((1, VIRTIO_RDMA_WC_REM_INV_REQ_ERR)));
        assert_eq!(bench.pair.clock.passed(), Duration::ZERO);
    });
}

#[test]
fn a_target_that_is_reset_gives_back_what_it_took() {
    with_rings(|| {
        let mut bench = Bench::new(2);
        bench.stop_halfway(0);
        bench.pair.b.set_state(bench.qps[0].1, VIRTIO_RDMA_QPS_RESET).unwrap();
        bench.send(1, 0, 3);
        bench.pair.settle();
        let expected = (0, 0, bench.qps[1].1, bench.programs[0].srqn);
        assert_eq!(bench.received(0), Some(expected));
        assert_eq!(bench.events(), []);
    });
}

#[test]
fn a_target_in_error_flushes_what_it_took() {
    with_rings(|| {
        let mut bench = Bench::new(2);
        bench.stop_halfway(1);
        let target = bench.qps[0].1;
        for _ in 0..2 {
            bench.pair.b.set_state(target, VIRTIO_RDMA_QPS_ERR).unwrap();
            bench.pair.b.run();
        }
        let flushed = (0, VIRTIO_RDMA_WC_WR_FLUSH_ERR, target, bench.programs[1].srqn);
        assert_eq!(bench.received(1), Some(flushed));
        assert_eq!(bench.events(), [(LAST, target)]);
        // A target that has received no message raises the event, too.
        bench.pair.b.set_state(bench.qps[1].1, VIRTIO_RDMA_QPS_ERR).unwrap();
        bench.pair.b.run();
        assert_eq!(bench.events(), [(LAST, bench.qps[1].1)]);
        assert_eq!(bench.received(0), None);
    });
}

#[test]
pub fn a_receive_that_is_too_short_ends_the_connection() {
    with_rings(|| {
        let mut bench = Bench::new(1);
        bench.post(0, 2, 8);
        bench.send(0, 0, 1);
        bench.pair.settle();
        let (target, srqn) = (bench.qps[0].1, bench.programs[0].srqn);
        let failed = (2, VIRTIO_RDMA_WC_LOC_LEN_ERR, target, srqn);
        assert_eq!(bench.received(0), Some(failed));
        assert_eq!(bench.sent(), Some((1, VIRTIO_RDMA_WC_REM_INV_REQ_ERR)));
        assert_eq!(bench.events(), [(LAST, target)]);
    });
}

#[test]
fn a_broken_srq_harms_whom_it_holds() {
    with_rings(|| {
        let mut bench = Bench::new(3);
        let [broken, sound] = bench.programs;
        // The first connection waits for it, and the others do not.
        bench.send(0, 0, 0);
        bench.pair.settle_and_pause();
        let region = bench.pair.b.srq_rings[&broken.srqn].region;
        bench.pair.b.memory.write(region, &999_u32.to_le_bytes()).unwrap();
        bench.pair.b.ring_doorbell(broken.srqn, VIRTIO_RDMA_DOORBELL_SRQ);
        bench.pair.settle();
        assert_eq!(bench.sent(), Some((0, VIRTIO_RDMA_WC_REM_OP_ERR)));
        let events = bench.events();
        assert!(events.contains(&(VIRTIO_RDMA_EVENT_SRQ_ERR, broken.srqn)));
        assert!(events.iter().all(|(_, handle)| [broken.srqn, bench.qps[0].1].contains(handle)));
        bench.post(1, 1, SIZE);
        bench.send(1, 1, 1);
        bench.send(2, 0, 2);
        bench.pair.settle();
        assert_eq!(bench.received(1), Some((1, 0, bench.qps[1].1, sound.srqn)));
        assert_eq!(bench.state(1), QpState::Rts as u32);
        assert_eq!(bench.state(2), QpState::Err as u32);
    });
}

#[test]
pub fn an_srq_whose_cq_overflows_is_in_error() {
    with_rings(|| {
        let mut bench = Bench::new(1);
        for wr_id in 0..=u64::from(RING) {
            bench.post(0, wr_id % 60, SIZE);
            bench.send(0, 0, wr_id % 60);
            bench.pair.settle();
            bench.sent().unwrap();
        }
        let Program { cqn, srqn, .. } = bench.programs[0];
        let events = bench.events();
        assert_eq!(
            events[..2],
            [(VIRTIO_RDMA_EVENT_CQ_ERR, cqn), (VIRTIO_RDMA_EVENT_SRQ_ERR, srqn)]
        );
        bench.send(0, 0, 1);
        bench.pair.settle();
        assert_eq!(bench.sent(), Some((1, VIRTIO_RDMA_WC_REM_OP_ERR)));
    });
}

/// An SRQ whose CQ is in error before it is made takes no message, whose CQE would be lost.
#[test]
fn an_srq_of_a_cq_in_error_is_in_error() {
    with_rings(|| {
        let mut bench = Bench::new(2);
        for wr_id in 0..=u64::from(RING) {
            bench.post(0, wr_id % 60, SIZE);
            bench.send(0, 0, wr_id % 60);
            bench.pair.settle();
            bench.sent().unwrap();
        }
        assert_ne!(bench.events(), []);
        let Program { pdn, cqn, .. } = bench.programs[0];
        let srqn = bench.pair.b.create_xrc_srq(pdn, bench.xrcdn, cqn).unwrap();
        bench.pair.b.run();
        assert_eq!(bench.events(), [(VIRTIO_RDMA_EVENT_SRQ_ERR, srqn)]);
        bench.programs[0].srqn = srqn;
        bench.post(0, 1, SIZE);
        bench.send(1, 0, 2);
        bench.pair.settle();
        assert_eq!(bench.sent(), Some((2, VIRTIO_RDMA_WC_REM_OP_ERR)));
        assert_eq!(bench.events()[0], (VIRTIO_RDMA_EVENT_QP_FATAL, bench.qps[1].1));
    });
}

#[test]
pub fn ends_of_other_types_do_not_answer() {
    with_rings(|| {
        let mut bench = Bench::new(1);
        let (ends, (ini, tgt)) = (bench.pair.ends, bench.qps[0]);
        // An RC QP is connected to a target, and an initiator to an RC QP.
        let gids = [bench.pair.a.gid, bench.pair.b.gid];
        bench.pair.a.connect(ends[0].qpn, gids[1], tgt);
        bench.pair.b.connect(ends[1].qpn, gids[0], ini);
        bench.pair.a.set_state(ini, VIRTIO_RDMA_QPS_RESET).unwrap();
        bench.pair.b.set_state(tgt, VIRTIO_RDMA_QPS_RESET).unwrap();
        bench.pair.a.connect_ini(ini, gids[1], ends[1].qpn);
        bench.pair.b.connect_tgt(tgt, gids[0], ends[0].qpn);
        bench.pair.b.post_recv(ends[1].qpn, 1, &[sge(DATA, SIZE, ends[1].key)]);
        bench.post(0, 1, SIZE);
        let send = Send::new(1, SEND, &[sge(DATA, 64, ends[0].key)]);
        bench.pair.a.post_send(ends[0].qpn, &send);
        bench.send(0, 0, 2);
        bench.pair.settle_in_time();
        for _ in 0..2 {
            assert_eq!(bench.sent().unwrap().1, VIRTIO_RDMA_WC_RETRY_EXC_ERR);
        }
        assert_eq!((bench.received(0), brief(bench.pair.poll_b())), (None, None));
    });
}

#[test]
fn everything_lives_as_long_as_its_users() {
    with_rings(|| {
        let mut bench = Bench::new(1);
        let (xrcdn, [first, second], (_, tgt)) = (bench.xrcdn, bench.programs, bench.qps[0]);
        let guest = &mut bench.pair.b;
        let busy = Err(VIRTIO_RDMA_STATUS_BUSY);
        assert_eq!(guest.dealloc_xrcd(xrcdn), busy);
        assert_eq!(guest.destroy_cq(first.cqn), busy);
        let pd = virtio_rdma_cmd_destroy_pd { pdn: first.pdn };
        assert_eq!(guest.command::<_, ()>(VIRTIO_RDMA_CMD_DESTROY_PD, &pd), busy);
        guest.destroy_srq(first.srqn).unwrap();
        guest.destroy_cq(first.cqn).unwrap();
        guest.destroy_srq(second.srqn).unwrap();
        assert_eq!(guest.dealloc_xrcd(xrcdn), busy);
        // The place of a target is used again.
        for _ in 0..20 {
            let other = guest.create_xrc_tgt(xrcdn).unwrap();
            guest.destroy_qp(other).unwrap();
        }
        guest.destroy_qp(tgt).unwrap();
        guest.dealloc_xrcd(xrcdn).unwrap();
        let none = Err(VIRTIO_RDMA_STATUS_NO_OBJECT);
        assert_eq!(guest.dealloc_xrcd(xrcdn), none);
        assert_eq!(guest.create_xrc_tgt(xrcdn).map(|_| ()), none);
        let srq = guest.create_xrc_srq(first.pdn, xrcdn, second.cqn);
        assert_eq!(srq.map(|_| ()), none);
    });
}

#[test]
fn commands_are_checked() {
    with_rings(|| {
        let mut bench = Bench::new(0);
        let (xrcdn, a, b) = (bench.xrcdn, bench.pair.ends[0], bench.pair.ends[1]);
        let srqn = bench.programs[0].srqn;
        let guest = &mut bench.pair.b;
        let invalid = Err(VIRTIO_RDMA_STATUS_INVAL);
        let mut create = |change: &dyn Fn(&mut virtio_rdma_cmd_create_ring_qp)| {
            let mut request = create_xrc_tgt(xrcdn);
            change(&mut request);
            let reply: Result<virtio_rdma_rsp_create_qp, u32> =
                guest.command(VIRTIO_RDMA_CMD_CREATE_RING_QP, &request);
            reply.map(|_| ())
        };
        assert_eq!(create(&|request| request.sq.depth = 1), invalid);
        assert_eq!(create(&|request| request.rq.depth = 1), invalid);
        assert_eq!(create(&|request| request.region.npages = 1), invalid);
        assert_eq!(create(&|request| request.srqn = srqn), invalid);
        assert_eq!(create(&|request| request.flags = VIRTIO_RDMA_QP_PRIVILEGED), invalid);
        let unsupported = Err(VIRTIO_RDMA_STATUS_UNSUPPORTED);
        assert_eq!(create(&|request| request.base.create_flags = 2), unsupported);
        let none = Err(VIRTIO_RDMA_STATUS_NO_OBJECT);
        for wrong in [0, 7, u32::MAX] {
            assert_eq!(create(&|request| request.xrcdn = wrong), none);
        }
        for wrong in [0, 7, u32::MAX] {
            assert_eq!(guest.dealloc_xrcd(wrong), none);
        }
        // A QP of another type cannot receive from an SRQ for XRC. An initiator cannot receive at all.
        let rc = guest.create_srq_qp(b.pdn, b.cqn, VIRTIO_RDMA_QPT_RC, srqn);
        assert_eq!(rc.map(|_| ()), invalid);
        let basic = guest.create_srq(b.pdn);
        let ini = guest.create_srq_qp(b.pdn, b.cqn, VIRTIO_RDMA_QPT_XRC_INI, basic);
        assert_eq!(ini.map(|_| ()), invalid);
        let request = Guest::qp_request(a.pdn, a.cqn, VIRTIO_RDMA_QPT_XRC_INI);
        assert_eq!(bench.pair.a.try_create_qp(request).map(|_| ()), invalid);
        let none = Err(VIRTIO_RDMA_STATUS_NO_OBJECT);
        bench.pair.b.destroy_srq(basic).unwrap();
        assert_eq!(bench.pair.b.create_xrc_srq(b.pdn, xrcdn, 99), none);
        assert_eq!(bench.pair.b.create_xrc_srq(b.pdn, xrcdn, u32::MAX), none);
    });
}

#[test]
pub fn an_initiator_needs_its_header() {
    with_rings(|| {
        let mut bench = Bench::new(1);
        let (ini, key) = (bench.qps[0].0, bench.pair.ends[0].key);
        bench.post(0, 1, SIZE);
        // Without the SRQ's number, the first SGE is in its place.
        let send = Send::new(1, SEND, &[sge(u64::from(u32::MAX), 0, key)]);
        bench.pair.a.post_send(ini, &send);
        bench.pair.settle();
        assert_eq!(bench.sent(), Some((1, VIRTIO_RDMA_WC_REM_INV_REQ_ERR)));
        assert_eq!(bench.received(0), None);
        assert_eq!(u32::from(bench.pair.a.query(ini).qp_state), QpState::Err as u32);
    });
}

#[test]
fn a_driver_that_knows_no_xrc_has_none() {
    with_rings(|| {
        let (fabric, clock) = fabric();
        let mut guest = Guest::new(&fabric, &clock, 1);
        guest.device.reset();
        let features = guest.device.features() & !(1 << VIRTIO_RDMA_F_XRC);
        guest.start_with(features);
        let unsupported = Err(VIRTIO_RDMA_STATUS_UNSUPPORTED);
        for command in [VIRTIO_RDMA_CMD_ALLOC_XRCD, VIRTIO_RDMA_CMD_DEALLOC_XRCD] {
            assert_eq!(guest.command::<_, ()>(command, &[0_u8; 64]), unsupported);
        }
        let pdn = guest.create_pd();
        let cqn = guest.create_cq(RING);
        assert_eq!(guest.create_xrc_tgt(1).map(|_| ()), unsupported);
        assert_eq!(guest.create_xrc_ini(pdn, cqn).map(|_| ()), unsupported);
        // The words are reserved to it.
        let srqn = guest.create_xrc_srq(pdn, 77, 77).unwrap();
        guest.create_srq_qp(pdn, cqn, VIRTIO_RDMA_QPT_RC, srqn).unwrap();
    });
    let (fabric, clock) = fabric();
    let mut guest = Guest::new(&fabric, &clock, 1);
    let unsupported = Err(VIRTIO_RDMA_STATUS_UNSUPPORTED);
    assert_eq!(guest.alloc_xrcd(), unsupported);
    let (pdn, cqn) = (guest.create_pd(), guest.create_cq(RING));
    for kind in [VIRTIO_RDMA_QPT_XRC_INI, VIRTIO_RDMA_QPT_XRC_TGT] {
        assert_eq!(guest.try_create_qp(Guest::qp_request(pdn, cqn, kind)), unsupported);
    }
}

#[test]
pub fn a_reset_device_forgets_its_domains() {
    with_rings(|| {
        let mut bench = Bench::new(1);
        bench.send(0, 0, 1);
        bench.pair.settle();
        bench.pair.b.device.reset();
        bench.pair.b.start();
        assert_eq!(bench.pair.b.alloc_xrcd(), Ok(1));
        assert_eq!(bench.pair.b.dealloc_xrcd(1), Ok(()));
        let attr = virtio_rdma_qp_attr::new_zeroed();
        let result = bench.pair.b.modify(bench.qps[0].1, VIRTIO_RDMA_QP_STATE, attr);
        assert_eq!(result, Err(VIRTIO_RDMA_STATUS_NO_OBJECT));
    });
}

#[test]
pub fn receives_say_what_they_are() {
    with_rings(|| {
        let mut bench = Bench::new(1);
        bench.post(0, 5, SIZE);
        bench.send(0, 0, 5);
        bench.pair.settle();
        let cqe = bench.pair.b.poll_ring(bench.programs[0].cqn).unwrap();
        assert_eq!((u32::from(cqe.opcode), cqe.byte_len, cqe.wqe_index), (RECV, SIZE, 0));
        let status = bench.pair.b.device.status();
        let services: Vec<_> = status.qps.iter().map(|qp| qp.service).collect();
        assert_eq!(services, ["RC", "XRC_TGT"]);
    });
}

/// Sends messages of each kind to both programs, over a network that loses, repeats and reorders packets.
#[test]
fn every_operation_passes_over_the_wire() {
    let faults = Faults { loss: 20, repeat: 20, reorder: 20, corrupt: 10, ..Faults::default() };
    for seed in 0..30 {
        over_a_cable(seed, faults, || {
            with_rings(|| {
                let mut bench = Bench::new(1);
                (0..6).for_each(|round| one_of_each(&mut bench, round));
            });
        });
    }
}

/// The header of XRC has 24 bits for the number of an SRQ. A longer number is refused by the peer, and no other SRQ
/// gets the message.
#[test]
fn an_srq_number_that_no_packet_can_carry_is_refused() {
    over_a_cable(1, Faults::default(), || {
        with_rings(|| {
            let mut bench = Bench::new(1);
            bench.post(0, 5, SIZE);
            let srqn = bench.programs[0].srqn;
            bench.send_to(0, srqn | 1 << 24, 7, SIZE);
            bench.pair.settle_in_time();
            let cqe = bench.pair.poll_a();
            assert_eq!(
                brief(cqe).map(|(id, status, _)| (id, status)),
                Some((7, VIRTIO_RDMA_WC_REM_INV_REQ_ERR))
            );
            assert_eq!(bench.pair.b.srq_consumer(srqn), 0);
        });
    });
}

/// Does a SEND, a WRITE, a READ and an atomic with one of the programs, and checks the data of both ends.
fn one_of_each(bench: &mut Bench, round: u64) {
    let program = (round % 2) as usize;
    let Program { key, srqn, .. } = bench.programs[program];
    let (ini, own) = (bench.qps[0].0, bench.pair.ends[0].key);
    let len = (round * 1777 % 5000) as usize;
    let data = bench.pair.a.fill(DATA, len, round as u8);
    let (there, back) = (DATA + 0x1_0000, DATA + 0x2_0000);
    let word = DATA + 0x4_0000 + 8 * round;
    bench.pair.b.memory.write(word, &round.to_le_bytes()).unwrap();
    bench.pair.b.post_srq_recv(srqn, round, &[sge(DATA + 0x3_0000, 0x2000, key)]);
    let part = [sge(DATA, len as u32, own)];
    let place = [sge(back, len as u32, own)];
    let result = [sge(back + 0x8000, 8, own)];
    let add = VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD;
    for send in [
        Send::new(1, SEND, &part),
        Send::new(2, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(there, key),
        Send::new(3, VIRTIO_RDMA_WR_RDMA_READ, &place).rdma(there, key),
        Send::new(4, add, &result).atomic(word, key, 5, 0),
    ] {
        bench.pair.a.post_send(ini, &send.srqn(srqn));
    }
    bench.pair.settle_in_time();
    for wr_id in 1..=4 {
        assert_eq!(bench.sent(), Some((wr_id, 0)), "round {round}");
    }
    assert_eq!(bench.received(program), Some((round, 0, bench.qps[0].1, srqn)));
    assert_eq!(bench.received(1 - program), None);
    let Pair { a, b, .. } = &bench.pair;
    for (guest, at) in [(b, DATA + 0x3_0000), (b, there), (a, back)] {
        assert!(guest.bytes(at, len) == data, "round {round}");
    }
    assert_eq!(a.memory.read_obj::<u64>(back + 0x8000), Ok(round));
    assert_eq!(b.memory.read_obj::<u64>(word), Ok(round + 5));
}

/// The data of a long READ is sent over several visits. Messages for another SRQ come meanwhile, and the key of
/// the READ is still one of the PD of its own SRQ.
#[test]
fn a_long_read_keeps_to_its_pd() {
    over_a_cable(1, Faults::default(), || {
        with_rings(|| {
            let mut bench = Bench::new(1);
            let [first, second] = bench.programs;
            let (ini, own, len) = (bench.qps[0].0, bench.pair.ends[0].key, 1 << 20);
            let data = bench.pair.b.fill(DATA, len, 3);
            let place = [sge(DATA + (1 << 20), len as u32, own)];
            let read = Send::new(1, VIRTIO_RDMA_WR_RDMA_READ, &place).rdma(DATA, first.key);
            let there = DATA + (3 << 20);
            let write = Send::new(2, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 64, own)]);
            bench.pair.a.post_send(ini, &read.srqn(first.srqn));
            bench.pair.a.post_send(ini, &write.rdma(there, second.key).srqn(second.srqn));
            bench.pair.settle();
            assert_eq!((bench.sent(), bench.sent()), (Some((1, 0)), Some((2, 0))));
            assert!(bench.pair.a.bytes(DATA + (1 << 20), len) == data);
        });
    });
}

/// A packet in the middle of a message names another SRQ than the first packet. The connection ends, and the
/// other SRQ loses no receive.
#[test]
fn a_message_is_for_one_srq() {
    over_a_cable(1, Faults { loss: 1000, ..Faults::default() }, || {
        with_rings(|| {
            let mut bench = Bench::new(1);
            let [first, second] = bench.programs;
            for program in [0, 1] {
                bench.post(program, program as u64, 3000);
            }
            bench.send_to(0, first.srqn, 1, 3000);
            bench.pair.settle();
            let cable = cable().unwrap();
            let sent = cable.sent.lock().unwrap().clone();
            cable.bring(1, &sent[0]);
            let packet = roce::decode(&sent[1]).unwrap();
            let mut headers = packet.headers;
            let srq = roce::Qpn::new(second.srqn).unwrap();
            headers.extended.xrceth = Some(roce::Xrceth { srq });
            let mut frame = vec![0; sent[1].len()];
            roce::encode(&headers, packet.payload, &mut frame).unwrap();
            cable.bring(1, &frame);
            bench.pair.b.run();
            assert_eq!(bench.state(0), QpState::Err as u32);
            assert_eq!(bench.received(1), None);
            let consumers = [first, second].map(|program| bench.pair.b.srq_consumer(program.srqn));
            assert_eq!(consumers, [1, 0]);
        });
    });
}

/// What a peer may do is what the target says, whatever the MRs of the SRQ's PD allow.
#[test]
fn a_message_has_the_rights_of_its_target() {
    with_rings(|| {
        let mut bench = Bench::new(0);
        let a = bench.pair.ends[0];
        let Program { key, srqn, .. } = bench.programs[0];
        let (gid_a, gid_b) = (bench.pair.a.gid, bench.pair.b.gid);
        let local = [sge(DATA, 64, a.key)];
        let cases = [
            (READ, 4, VIRTIO_RDMA_WR_RDMA_READ, 0),
            (READ, 4, VIRTIO_RDMA_WR_RDMA_WRITE, VIRTIO_RDMA_WC_REM_INV_REQ_ERR),
            (READ | WRITE, 0, VIRTIO_RDMA_WR_RDMA_WRITE, 0),
            (READ | WRITE, 0, VIRTIO_RDMA_WR_RDMA_READ, VIRTIO_RDMA_WC_REM_INV_REQ_ERR),
        ];
        for (access, depth, opcode, status) in cases {
            let from = bench.pair.a.create_xrc_ini(a.pdn, a.cqn).unwrap();
            let to = bench.pair.b.create_xrc_tgt(bench.xrcdn).unwrap();
            bench.pair.a.connect_ini(from, gid_b, to);
            bench.pair.b.make_init(to, access);
            let mut attr = attributes(VIRTIO_RDMA_QPS_RTR, gid_a, from);
            (attr.path_mtu, attr.max_dest_rd_atomic, attr.min_rnr_timer) = (3, depth, 12);
            let mask = attr_mask(VIRTIO_RDMA_QPT_RC, VIRTIO_RDMA_QPS_RTR);
            bench.pair.b.modify(to, mask, attr).unwrap();
            let send = Send::new(1, opcode, &local).rdma(DATA + 4096, key).srqn(srqn);
            bench.pair.a.post_send(from, &send);
            bench.pair.settle();
            assert_eq!(bench.sent(), Some((1, status)), "{access} {depth} {opcode}");
            bench.pair.a.destroy_qp(from).unwrap();
            bench.pair.b.destroy_qp(to).unwrap();
        }
    });
}
