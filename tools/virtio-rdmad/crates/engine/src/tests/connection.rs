// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests what must be the same at both ends of a connection: the PSNs, the path MTU, and the guest that
//! has the address.

use std::sync::Arc;

use abi::*;

use super::cable::{cable, headers, over_a_cable, Faults};
use super::driver::*;
use crate::{Fabric, FabricConfig, Gid, Uplink};

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
const SEND: u32 = VIRTIO_RDMA_WR_SEND;
const RDMA_WRITE: u32 = VIRTIO_RDMA_WR_RDMA_WRITE;
const RDMA_READ: u32 = VIRTIO_RDMA_WR_RDMA_READ;
const UC: u32 = VIRTIO_RDMA_QPT_UC;
const RC: u32 = VIRTIO_RDMA_QPT_RC;

fn connect(guest: &mut Guest, qpn: u32, dgid: Gid, dest: u32, kind: u32) {
    guest.make_init(qpn, ALL);
    guest.make_rtr(qpn, dgid, dest, kind == RC).unwrap();
    guest.make_rts(qpn, kind == RC).unwrap();
}

/// Makes a connected pair of QPs, whose attributes `change` sets.
fn pair_with(kind: u32, change: impl FnOnce(&mut Pair)) -> Pair {
    let mut pair = Pair::unconnected(kind);
    change(&mut pair);
    let ([a, b], gids) = (pair.ends, [pair.a.gid, pair.b.gid]);
    connect(&mut pair.a, a.qpn, gids[1], b.qpn, kind);
    connect(&mut pair.b, b.qpn, gids[0], a.qpn, kind);
    pair
}

/// Moves `len` bytes from A to B, or from B to A for a READ. Returns the status.
fn transfer(pair: &mut Pair, opcode: u32, len: u32) -> u32 {
    let [a, b] = pair.ends;
    let part = [sge(DATA, len, a.key)];
    pair.a.post_send(a.qpn, &Send::new(1, opcode, &part).rdma(DATA + 0x1_0000, b.key));
    pair.settle_in_time();
    brief(pair.poll_a()).unwrap().1
}

fn state(guest: &mut Guest, qpn: u32) -> u32 {
    guest.query(qpn).qp_state.into()
}

/// IBA 9.7.1: PSNs wrap around at 2^24, and each side counts the packets of all operations.
#[test]
pub fn psns_go_round() {
    let mut pair = pair_with(RC, |pair| {
        (pair.a.sq_psn, pair.b.rq_psn) = (0xff_fffe, 0xff_fffe);
        (pair.b.sq_psn, pair.a.rq_psn) = (7, 7);
    });
    let [a, b] = pair.ends;
    let add = Send::new(1, VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD, &[sge(DATA, 8, a.key)]);
    for opcode in [RDMA_WRITE, RDMA_READ, RDMA_WRITE, RDMA_READ] {
        assert_eq!(transfer(&mut pair, opcode, 3000), OK);
        pair.a.post_send(a.qpn, &add.clone().atomic(DATA, b.key, 1, 0));
        pair.settle();
        assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
    }
    assert_eq!(pair.a.query(a.qpn).sq_psn, 14);
    assert_eq!(pair.b.query(b.qpn).rq_psn, 14);
    assert_eq!(pair.b.query(b.qpn).sq_psn, 7);
}

/// Sends a message of one packet, whose PSN is not the expected one, over a reliable connection. Checks that the
/// responder does not execute it, and stays as it is (IBA 9.7.4.1). Returns the status at the requester.
pub fn unexpected(opcode: u32, sent: u32, expected: u32) -> u32 {
    let mut pair = pair_with(RC, |pair| (pair.a.sq_psn, pair.b.rq_psn) = (sent, expected));
    let b = pair.ends[1];
    let data = pair.a.fill(DATA, 8, 1);
    pair.b.post_recv(b.qpn, 9, &[sge(DATA, 8, b.key)]);
    let status = transfer(&mut pair, opcode, 8);
    assert!(pair.poll_b().is_none() && pair.b.poll_event().is_none());
    assert_eq!(state(&mut pair.b, b.qpn), VIRTIO_RDMA_QPS_RTS);
    assert_eq!(pair.b.query(b.qpn).rq_psn, expected);
    assert_eq!(pair.b.bytes(DATA, 8), [0; 8]);
    assert_eq!(pair.b.bytes(DATA + 0x1_0000, 8), [0; 8]);
    assert_eq!(pair.a.bytes(DATA, 8), data, "a READ brings nothing");
    status
}

/// The requester retries in vain a request whose PSN is ahead of the expected one.
#[test]
pub fn a_psn_that_is_ahead_is_not_executed() {
    for (sent, expected) in [(6, 5), (0, 0xff_ffff), (0x7f_ffff, 0)] {
        for opcode in [SEND, RDMA_WRITE, RDMA_READ] {
            assert_eq!(unexpected(opcode, sent, expected), VIRTIO_RDMA_WC_RETRY_EXC_ERR);
        }
    }
}

/// Where nothing is sent in packets, nothing is sent twice, so a device does not take a request for a duplicate whose
/// PSN is behind the expected one. The requester learns of the mistake.
#[test]
fn a_psn_that_is_behind_is_not_executed() {
    for (sent, expected) in [(5, 6), (0xff_ffff, 0), (0x80_0000, 0)] {
        for opcode in [SEND, RDMA_WRITE, RDMA_READ] {
            assert_eq!(unexpected(opcode, sent, expected), VIRTIO_RDMA_WC_RETRY_EXC_ERR);
        }
    }
}

/// IBA 9.8.2.2: on an unreliable connection the first packet of a message may have any PSN.
#[test]
pub fn an_unreliable_connection_takes_any_psn() {
    let mut pair = pair_with(UC, |pair| (pair.a.sq_psn, pair.b.rq_psn) = (100, 5));
    let [a, b] = pair.ends;
    assert_eq!(transfer(&mut pair, SEND, 5000), OK, "lost, without a receive");
    let data = pair.a.fill(DATA, 5000, 3);
    pair.b.post_recv(b.qpn, 9, &[sge(DATA, 5000, b.key)]);
    assert_eq!(transfer(&mut pair, SEND, 5000), OK);
    assert_eq!(brief(pair.poll_b()), Some((9, OK, VIRTIO_RDMA_WC_RECV)));
    assert_eq!(pair.b.bytes(DATA, 5000), data);
    assert_eq!(pair.a.query(a.qpn).sq_psn, 110);
    assert_eq!(pair.b.query(b.qpn).rq_psn, 110);
}

/// IBA 9.7.4.1.6: each packet but the last one of a message has the size of the path MTU. A message
/// that is one packet for both ends arrives. Any other one is an invalid request, whichever end has the
/// larger MTU.
#[test]
pub fn what_does_not_fit_the_smaller_mtu_is_refused() {
    for mtus in [(1, 3), (3, 1)] {
        let unequal = || pair_with(RC, |pair| (pair.a.path_mtu, pair.b.path_mtu) = mtus);
        let mut pair = unequal();
        let b = pair.ends[1];
        let data = pair.a.fill(DATA, 256, 7);
        pair.b.post_recv(b.qpn, 9, &[sge(DATA, 256, b.key)]);
        for opcode in [SEND, RDMA_WRITE, RDMA_READ, SEND] {
            pair.b.post_recv(b.qpn, 9, &[sge(DATA, 256, b.key)]);
            assert_eq!(transfer(&mut pair, opcode, 256), OK);
        }
        assert_eq!(pair.b.bytes(DATA, 256), data);
        for (opcode, remote, local, event) in [
            (RDMA_WRITE, VIRTIO_RDMA_WC_REM_INV_REQ_ERR, None, true),
            (SEND, VIRTIO_RDMA_WC_REM_INV_REQ_ERR, Some(VIRTIO_RDMA_WC_LOC_LEN_ERR), false),
            // The response does not fit (IBA 9.7.5.1.3), and the requester finds this (IBA 9.7.6).
            (RDMA_READ, VIRTIO_RDMA_WC_LOC_LEN_ERR, None, false),
        ] {
            let mut pair = unequal();
            let b = pair.ends[1];
            if local.is_some() {
                pair.b.post_recv(b.qpn, 9, &[sge(DATA, 512, b.key)]);
            }
            pair.a.fill(DATA, 257, 7);
            assert_eq!(transfer(&mut pair, opcode, 257), remote);
            assert_eq!(brief(pair.poll_b()).map(|(_, status, _)| status), local);
            let raised = event.then_some((VIRTIO_RDMA_EVENT_QP_REQ_ERR, b.qpn));
            assert_eq!(pair.b.poll_event(), raised);
            assert_eq!(pair.b.bytes(DATA, 257), [0; 257]);
            let ends = if opcode == RDMA_READ { VIRTIO_RDMA_QPS_RTS } else { VIRTIO_RDMA_QPS_ERR };
            assert_eq!(state(&mut pair.b, b.qpn), ends);
        }
    }
}

/// IBA 9.8.2: on an unreliable connection, a message with packets of the wrong size is dropped.
#[test]
pub fn what_does_not_fit_the_smaller_mtu_is_lost_on_an_unreliable_connection() {
    let mut pair = pair_with(UC, |pair| pair.b.path_mtu = 1);
    let b = pair.ends[1];
    pair.b.post_recv(b.qpn, 9, &[sge(DATA, 512, b.key)]);
    for opcode in [SEND, RDMA_WRITE] {
        assert_eq!(transfer(&mut pair, opcode, 257), OK);
    }
    assert!(pair.poll_b().is_none());
    assert_eq!(pair.b.device.counter(crate::Counter::DropRefused), 2);
    assert_eq!(transfer(&mut pair, SEND, 256), OK);
    assert_eq!(brief(pair.poll_b()), Some((9, OK, VIRTIO_RDMA_WC_RECV)));
}

/// Makes a third guest in the network of A, which takes the address of B. Its QP has the number and the peer of
/// B's QP, and these PSNs. The QP of A stays in RTS.
fn take_over(pair: &mut Pair, kind: u32, psn: u32) -> (Guest, End) {
    let fabric = Arc::clone(&pair.fabric);
    take_over_in(&fabric, pair, kind, psn)
}

/// Does what `take_over` does, in another network.
fn take_over_in(fabric: &Arc<Fabric>, pair: &mut Pair, kind: u32, psn: u32) -> (Guest, End) {
    let [a, b] = pair.ends;
    pair.b.del_gid(0).unwrap();
    let (gid_a, gid_b) = (pair.a.gid, pair.b.gid);
    let mut c = Guest::new(fabric, &pair.clock, 3);
    let end = End::new(&mut c, kind);
    assert_eq!(end.qpn, b.qpn);
    c.del_gid(0).unwrap();
    c.add_gid(0, gid_b, 0).unwrap();
    (c.sq_psn, c.rq_psn) = (psn, psn);
    connect(&mut c, end.qpn, gid_a, a.qpn, kind);
    (c, end)
}

/// Makes a pair of QPs, and a third guest that takes the address of B.
fn taken_over() -> (Pair, Guest, End) {
    let mut pair = Pair::new();
    let (c, end) = take_over(&mut pair, RC, 0);
    (pair, c, end)
}

/// A guest that takes over an address does not receive what a peer sends over a connection that was made
/// with the earlier guest (specification, Queue pairs: Connections and device instances).
#[test]
pub fn an_address_that_moves_takes_no_requests_along() {
    let (mut pair, mut c, end) = taken_over();
    let a = pair.ends[0];
    c.post_recv(end.qpn, 9, &[sge(DATA, 8, end.key)]);
    pair.a.post_send(a.qpn, &Send::new(1, SEND, &[sge(DATA, 8, a.key)]));
    settle_in_time(&[&pair.a, &pair.b, &c]);
    assert_eq!(brief(pair.poll_a()).unwrap().1, VIRTIO_RDMA_WC_RETRY_EXC_ERR);
    assert!(c.poll(end.cqn).is_none());
}

/// A peer does not receive from a guest that takes over the address of its connection.
#[test]
pub fn an_address_that_moves_takes_no_rights_along() {
    let (mut pair, mut c, end) = taken_over();
    let a = pair.ends[0];
    pair.a.post_recv(a.qpn, 9, &[sge(DATA, 8, a.key)]);
    c.post_send(end.qpn, &Send::new(1, SEND, &[sge(DATA, 8, end.key)]));
    settle_in_time(&[&pair.a, &pair.b, &c]);
    assert_eq!(brief(c.poll(end.cqn)).unwrap().1, VIRTIO_RDMA_WC_RETRY_EXC_ERR);
    assert!(pair.poll_a().is_none());
}

/// A peer can connect again, to the guest that has taken over the address.
#[test]
pub fn a_peer_connects_to_whoever_has_the_address() {
    let (mut pair, mut c, end) = taken_over();
    let (a, gid_b) = (pair.ends[0], pair.b.gid);
    pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
    pair.a.connect(a.qpn, gid_b, end.qpn);
    c.post_recv(end.qpn, 9, &[sge(DATA, 8, end.key)]);
    let data = pair.a.fill(DATA, 8, 4);
    pair.a.post_send(a.qpn, &Send::new(1, SEND, &[sge(DATA, 8, a.key)]));
    settle_in_time(&[&pair.a, &pair.b, &c]);
    assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
    assert_eq!(brief(c.poll(end.cqn)), Some((9, OK, VIRTIO_RDMA_WC_RECV)));
    assert_eq!(c.bytes(DATA, 8), data);
}

/// A network beside which nothing is.
struct Nowhere;

impl Uplink for Nowhere {
    fn send(&self, _: roce::Segments<'_>) -> usize {
        1
    }
}

/// Makes a connected pair of QPs in a network that has an uplink.
fn pair_beside_an_uplink() -> Pair {
    let clock = TestClock::new();
    let uplink: Option<Arc<dyn Uplink>> = Some(Arc::new(Nowhere));
    Pair::in_network(FabricConfig { uplink, ..fabric_config(&clock) }, clock)
}

/// A connection with a guest of this network goes on when the guest has its address again: it does not turn
/// to the uplink meanwhile, where the guest is not.
#[test]
fn an_address_that_comes_back_has_its_connections() {
    let mut pair = pair_beside_an_uplink();
    let ([a, b], gid_b) = (pair.ends, pair.b.gid);
    let data = pair.a.fill(DATA, 8, 5);
    pair.b.post_recv(b.qpn, 9, &[sge(DATA, 8, b.key)]);
    pair.b.del_gid(0).unwrap();
    pair.a.post_send(a.qpn, &Send::new(1, SEND, &[sge(DATA, 8, a.key)]));
    pair.settle();
    pair.b.add_gid(0, gid_b, 0).unwrap();
    pair.settle_in_time();
    assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
    assert_eq!(brief(pair.poll_b()), Some((9, OK, VIRTIO_RDMA_WC_RECV)));
    assert_eq!(pair.b.bytes(DATA, 8), data);
}

/// Whoever has the address of a guest of this network on another host has no part in the guest's
/// connections.
#[test]
fn an_address_on_another_host_takes_no_rights_along() {
    let mut pair = pair_beside_an_uplink();
    let a = pair.ends[0];
    pair.a.post_recv(a.qpn, 9, &[sge(DATA, 8, a.key)]);
    pair.b.del_gid(0).unwrap();
    let send = roce::Opcode::new(roce::Service::Rc, roce::Operation::Send, roce::Position::Only);
    let headers = headers([2, 1], send.unwrap(), a.qpn);
    let mut frame = vec![0; 128];
    let len = roce::encode(&headers, &[7; 8], &mut frame).unwrap();
    assert!(pair.fabric.receive(&frame[..len], 0), "a guest has the address");
    pair.settle();
    assert!(pair.poll_a().is_none());
    assert_eq!(pair.a.device.counter(crate::Counter::DropNotPeer), 1);
}

/// Makes A and B send each other a message of one packet.
fn exchange(pair: &mut Pair) {
    let [a, b] = pair.ends;
    pair.a.post_recv(a.qpn, 1, &[sge(DATA, 8, a.key)]);
    pair.b.post_recv(b.qpn, 1, &[sge(DATA, 8, b.key)]);
    pair.a.post_send(a.qpn, &Send::new(2, SEND, &[sge(DATA, 8, a.key)]));
    pair.b.post_send(b.qpn, &Send::new(2, SEND, &[sge(DATA, 8, b.key)]));
    pair.settle_in_time();
    for _ in 0..2 {
        assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
        assert_eq!(brief(pair.poll_b()).unwrap().1, OK);
    }
}

/// A connection with a guest on another host is with that guest: a guest of this network that takes over the
/// address neither sends to the QP at this end nor receives from it, with any type of connection.
#[test]
fn an_address_that_moves_here_takes_nothing_along() {
    for kind in [RC, UC] {
        over_a_cable(0, Faults::default(), || {
            let mut pair = pair_with(kind, |_| ());
            exchange(&mut pair);
            let (mut c, end) = take_over(&mut pair, kind, 1);
            let a = pair.ends[0];
            pair.a.post_recv(a.qpn, 9, &[sge(DATA, 8, a.key)]);
            c.post_recv(end.qpn, 9, &[sge(DATA, 8, end.key)]);
            pair.a.post_send(a.qpn, &Send::new(1, SEND, &[sge(DATA, 8, a.key)]));
            c.post_send(end.qpn, &Send::new(1, SEND, &[sge(DATA, 8, end.key)]));
            settle_in_time(&[&pair.a, &pair.b, &c]);
            let status = if kind == RC { VIRTIO_RDMA_WC_RETRY_EXC_ERR } else { OK };
            // A QP in error flushes its receive, and another one keeps it.
            let flushed = (kind == RC).then_some((9, VIRTIO_RDMA_WC_WR_FLUSH_ERR));
            for expected in [Some((1, status)), flushed] {
                for cqe in [pair.poll_a(), c.poll(end.cqn)] {
                    assert_eq!(cqe.map(|cqe| (cqe.wr_id, u32::from(cqe.status))), expected);
                }
            }
        });
    }
}

/// A device knows guests on other hosts by their addresses alone. One that takes over the address of another one, and
/// its QP number and PSNs, has its connections, too: whoever runs the network has to see to that.
#[test]
fn devices_outside_are_one() {
    for kind in [RC, UC] {
        over_a_cable(0, Faults::default(), || {
            let mut pair = pair_with(kind, |_| ());
            exchange(&mut pair);
            let there = cable().unwrap().fabric(1);
            let (mut c, end) = take_over_in(&there, &mut pair, kind, 1);
            let a = pair.ends[0];
            pair.a.post_recv(a.qpn, 1, &[sge(DATA, 8, a.key)]);
            c.post_recv(end.qpn, 1, &[sge(DATA, 8, end.key)]);
            pair.a.post_send(a.qpn, &Send::new(2, SEND, &[sge(DATA, 8, a.key)]));
            c.post_send(end.qpn, &Send::new(2, SEND, &[sge(DATA, 8, end.key)]));
            settle_in_time(&[&pair.a, &pair.b, &c]);
            for _ in 0..2 {
                assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
                assert_eq!(brief(c.poll(end.cqn)).unwrap().1, OK);
            }
        });
    }
}

/// If no guest has the address of a QP's peer yet, the QP is connected to the first guest that gets it.
#[test]
pub fn a_connection_is_with_the_first_guest_that_has_the_address() {
    let mut pair = Pair::unconnected(RC);
    let ([a, b], gids) = (pair.ends, [pair.a.gid, pair.b.gid]);
    pair.b.del_gid(0).unwrap();
    pair.a.connect(a.qpn, gids[1], b.qpn);
    pair.a.post_send(a.qpn, &Send::new(1, SEND, &[sge(DATA, 8, a.key)]));
    pair.settle();
    pair.b.add_gid(0, gids[1], 0).unwrap();
    pair.b.connect(b.qpn, gids[0], a.qpn);
    pair.b.post_recv(b.qpn, 9, &[sge(DATA, 8, b.key)]);
    pair.settle_in_time();
    assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
    assert_eq!(brief(pair.poll_b()), Some((9, OK, VIRTIO_RDMA_WC_RECV)));
}

/// A guest that adds and deletes GIDs has nobody look others up again.
#[test]
fn addresses_of_others_may_come_and_go() {
    without_upgrades();
    let mut pair = Pair::new();
    let mut other = Guest::new(&pair.fabric, &pair.clock, 3);
    let [a, b] = pair.ends;
    let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 64, a.key)]).rdma(DATA, b.key);
    let look_ups = |pair: &Pair| {
        pair.a.device.hca().fabric.look_ups.load(std::sync::atomic::Ordering::Relaxed)
    };
    for round in 0..10 {
        let before = look_ups(&pair);
        pair.a.post_send(a.qpn, &write);
        pair.a.run();
        assert_eq!(u32::from(pair.poll_a().unwrap().status), VIRTIO_RDMA_WC_SUCCESS);
        assert!(round == 0 || look_ups(&pair) == before, "{round}");
        other.add_gid(1, gid(9), 0).unwrap();
        other.del_gid(1).unwrap();
    }
    // One of its own that goes is noticed.
    pair.b.del_gid(0).unwrap();
    pair.a.post_send(a.qpn, &write);
    pair.settle();
    assert!(pair.poll_a().is_none());
    assert_eq!(pair.a.device.counter(crate::Counter::Timeouts), 1);
}
