// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests unreliable connections: which messages arrive, and which are dropped without an error.

use abi::*;

use super::driver::*;
use crate::Counter;

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
const SEND: u32 = VIRTIO_RDMA_WR_SEND;
const RDMA_WRITE: u32 = VIRTIO_RDMA_WR_RDMA_WRITE;
const WRITE_IMM: u32 = VIRTIO_RDMA_WR_RDMA_WRITE_WITH_IMM;

fn connect(guest: &mut Guest, end: End, dgid: crate::Gid, dest: u32, access: u32) {
    guest.make_init(end.qpn, access);
    guest.make_rtr(end.qpn, dgid, dest, false).unwrap();
    guest.make_rts(end.qpn, false).unwrap();
}

fn connected_with(access: u32) -> Pair {
    let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_UC);
    let [a, b] = pair.ends;
    let (gid_a, gid_b) = (pair.a.gid, pair.b.gid);
    connect(&mut pair.a, a, gid_b, b.qpn, ALL);
    connect(&mut pair.b, b, gid_a, a.qpn, access);
    pair
}

pub fn connected() -> Pair {
    connected_with(ALL)
}

#[test]
pub fn every_operation_arrives() {
    let mut pair = connected();
    let [a, b] = pair.ends;
    let len = 3 * (64 << 10) + 17;
    let data = pair.a.fill(DATA, len, 3);
    let part = [sge(DATA, len as u32, a.key)];
    let there = DATA + (2 << 20);
    let place = [sge(there, len as u32, b.key)];
    for opcode in [SEND, VIRTIO_RDMA_WR_SEND_WITH_IMM, RDMA_WRITE, WRITE_IMM] {
        pair.b.fill(there, len, 0);
        let takes_receive = opcode != RDMA_WRITE;
        if takes_receive {
            pair.b.post_recv(b.qpn, 9, &place);
        }
        pair.a.post_send(a.qpn, &Send::new(1, opcode, &part).rdma(there, b.key).imm(0x55));
        pair.settle();
        assert_eq!(brief(pair.poll_a()).map(|(id, status, _)| (id, status)), Some((1, OK)));
        let received = pair.poll_b();
        assert_eq!(
            received.map(|cqe| (cqe.wr_id, cqe.byte_len as usize)),
            takes_receive.then_some((9, len))
        );
        assert!(pair.b.bytes(there, len) == data);
    }
}

#[test]
pub fn what_finds_no_receive_is_lost() {
    let mut pair = connected();
    let [a, b] = pair.ends;
    let part = [sge(DATA, 8, a.key)];
    for opcode in [SEND, WRITE_IMM] {
        pair.a.post_send(a.qpn, &Send::new(1, opcode, &part).rdma(DATA, b.key));
    }
    pair.settle();
    for _ in 0..2 {
        assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
    }
    assert_eq!(pair.counter(Counter::DropNoReceive), 2);
    pair.b.post_recv(b.qpn, 9, &[sge(DATA, 8, b.key)]);
    pair.a.post_send(a.qpn, &Send::new(2, SEND, &part));
    pair.settle();
    assert_eq!(brief(pair.poll_b()), Some((9, OK, VIRTIO_RDMA_WC_RECV)));
}

#[test]
pub fn what_the_responder_refuses_is_lost() {
    let mut pair = connected_with(LOCAL);
    let [a, b] = pair.ends;
    let part = [sge(DATA, 8, a.key)];
    pair.b.post_recv(b.qpn, 9, &[sge(DATA, 7, b.key)]);
    // Not let by the QP, then too long for the receive.
    pair.a.post_send(a.qpn, &Send::new(1, RDMA_WRITE, &part).rdma(DATA, b.key));
    pair.a.post_send(a.qpn, &Send::new(2, SEND, &part));
    pair.settle();
    assert_eq!(pair.b.device.counter(Counter::DropRefused), 2);
    for _ in 0..2 {
        assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
    }
    assert!(pair.poll_b().is_none());
    assert_eq!(u32::from(pair.b.query(b.qpn).qp_state), VIRTIO_RDMA_QPS_RTS);
    // The next message takes the receive that was too small.
    pair.a.post_send(a.qpn, &Send::new(4, SEND, &[sge(DATA, 7, a.key)]));
    pair.settle();
    assert_eq!(brief(pair.poll_b()), Some((9, OK, VIRTIO_RDMA_WC_RECV)));
}

#[test]
pub fn a_write_with_a_bad_key_is_lost() {
    let mut pair = connected();
    let [a, b] = pair.ends;
    let part = [sge(DATA, 8, a.key)];
    pair.a.post_send(a.qpn, &Send::new(3, RDMA_WRITE, &part).rdma(DATA, b.key ^ 1));
    pair.settle();
    assert_eq!(pair.b.device.counter(Counter::DropRefused), 1);
    assert_eq!(brief(pair.poll_a()).unwrap().1, OK);
    assert!(pair.poll_b().is_none());
    assert_eq!(u32::from(pair.b.query(b.qpn).qp_state), VIRTIO_RDMA_QPS_RTS);
}

/// IBA 9.9.3 (class A): also on an unreliable connection, an error of the receiver itself completes the
/// receive and fails its QP, for example if the receive names memory without access. The sender does not
/// learn of it.
#[test]
pub fn a_bad_receive_fails_the_receiver_alone() {
    let mut pair = connected();
    let [a, b] = pair.ends;
    pair.b.post_recv(b.qpn, 9, &[sge(DATA, 8, b.key ^ 1)]);
    pair.a.post_send(a.qpn, &Send::new(1, SEND, &[sge(DATA, 8, a.key)]));
    pair.settle();
    assert_eq!(brief(pair.poll_a()), Some((1, OK, VIRTIO_RDMA_WC_SEND)));
    assert_eq!(brief(pair.poll_b()), Some((9, VIRTIO_RDMA_WC_LOC_PROT_ERR, VIRTIO_RDMA_WC_RECV)));
    assert_eq!(u32::from(pair.b.query(b.qpn).qp_state), VIRTIO_RDMA_QPS_ERR);
    assert_eq!(u32::from(pair.a.query(a.qpn).qp_state), VIRTIO_RDMA_QPS_RTS);
}

#[test]
pub fn a_message_cut_off_is_lost() {
    let mut pair = connected();
    let [a, b] = pair.ends;
    let len = 4 << 20;
    pair.b.post_recv(b.qpn, 9, &[sge(DATA, len, b.key)]);
    pair.a.post_send(a.qpn, &Send::new(1, SEND, &[sge(DATA, len, a.key)]));
    pair.a.device.run(1);
    pair.a.device.run(1);
    assert!(pair.poll_a().is_none());
    let gid = pair.a.gid;
    pair.b.set_state(b.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
    connect(&mut pair.b, b, gid, a.qpn, ALL);
    pair.b.post_recv(b.qpn, 10, &[sge(DATA, len, b.key)]);
    pair.settle();
    assert_eq!(brief(pair.poll_a()), Some((1, OK, VIRTIO_RDMA_WC_SEND)));
    assert!(pair.poll_b().is_none());
    assert_eq!(pair.a.device.counter(Counter::DropUnreachable), 1);
}

#[test]
pub fn errors_of_the_sender_stop_its_queue_alone() {
    let mut pair = connected();
    let [a, b] = pair.ends;
    let part = [sge(DATA, 8, a.key)];
    let wrong = [
        (SEND, a.key ^ 1, VIRTIO_RDMA_WC_LOC_PROT_ERR),
        (VIRTIO_RDMA_WR_RDMA_READ, a.key, VIRTIO_RDMA_WC_LOC_QP_OP_ERR),
        (VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD, a.key, VIRTIO_RDMA_WC_LOC_QP_OP_ERR),
    ];
    for (opcode, key, status) in wrong {
        pair.a.post_send(a.qpn, &Send::new(1, opcode, &[sge(DATA, 8, key)]).rdma(DATA, b.key));
        pair.a.post_send(a.qpn, &Send::new(2, SEND, &part));
        pair.settle();
        assert_eq!(brief(pair.poll_a()).map(|(id, status, _)| (id, status)), Some((1, status)));
        assert_eq!(brief(pair.poll_a()).unwrap().1, VIRTIO_RDMA_WC_WR_FLUSH_ERR);
        assert_eq!(u32::from(pair.a.query(a.qpn).qp_state), VIRTIO_RDMA_QPS_SQE);
        // Its receives still work.
        pair.a.post_recv(a.qpn, 7, &[sge(DATA, 8, a.key)]);
        pair.b.post_send(b.qpn, &Send::new(3, SEND, &[sge(DATA, 8, b.key)]));
        pair.settle();
        assert_eq!(brief(pair.poll_a()), Some((7, OK, VIRTIO_RDMA_WC_RECV)));
        assert_eq!(brief(pair.poll_b()), Some((3, OK, VIRTIO_RDMA_WC_SEND)));
        pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_RTS).unwrap();
        pair.b.post_recv(b.qpn, 9, &[sge(DATA, 8, b.key)]);
        pair.a.post_send(a.qpn, &Send::new(4, SEND, &part));
        pair.settle();
        assert_eq!(brief(pair.poll_a()), Some((4, OK, VIRTIO_RDMA_WC_SEND)));
        assert_eq!(brief(pair.poll_b()), Some((9, OK, VIRTIO_RDMA_WC_RECV)));
    }
}
