// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests what only virtqueues have: the buffers of work requests and of completions.

use std::sync::Arc;

use abi::*;
use ring::{Signal, SplitQueue};
use testkit::receive;

use super::driver::*;

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
const SEND: u32 = VIRTIO_RDMA_WR_SEND;
/// The bytes of a CQE.
const CQE: u32 = size_of::<virtio_rdma_cqe>() as u32;
/// The address of the buffer of a CQE, and what the device has not written.
const BUFFER: u64 = DATA + (1 << 20);
const FILL: [u8; 64] = [0xa5; 64];
/// The bytes of a message that takes several turns.
const LONG: u32 = 1 << 20;

struct NoSignal;

impl Signal for NoSignal {
    fn signal(&self) {}
}

/// Makes a guest with a QP that is connected with itself, whose CQ has this buffer alone. Does a WRITE of no bytes.
fn complete_into(buffer: (u64, u32, bool)) -> (Guest, End) {
    let (fabric, clock) = fabric();
    let mut guest = Guest::new(&fabric, &clock, 1);
    let other = End::new(&mut guest, VIRTIO_RDMA_QPT_RC);
    let cqn = guest.create_cq(0);
    let qpn = guest.create_qp(other.pdn, cqn, VIRTIO_RDMA_QPT_RC);
    let own = guest.gid;
    guest.connect(qpn, own, qpn);
    guest.memory.write(BUFFER, &FILL).unwrap();
    let queue = guest.cq_queue(cqn);
    guest.add(queue, &[buffer]);
    guest.post_send(qpn, &Send::new(7, VIRTIO_RDMA_WR_RDMA_WRITE, &[]));
    guest.run();
    (guest, End { cqn, qpn, ..other })
}

/// Checks that a CQ is in error, and its QP with it.
fn cq_has_failed(guest: &mut Guest, end: End) {
    let events: Vec<_> = std::iter::from_fn(|| guest.poll_event()).collect();
    assert!(events.contains(&(VIRTIO_RDMA_EVENT_CQ_ERR, end.cqn)), "{events:?}");
    assert_eq!(u32::from(guest.query(end.qpn).qp_state), VIRTIO_RDMA_QPS_ERR);
}

#[test]
fn a_buffer_that_is_too_small_for_a_cqe_ends_the_cq() {
    let (mut guest, end) = complete_into((BUFFER, CQE - 1, true));
    assert_eq!(guest.used(guest.cq_queue(end.cqn)).map(|used| used.1), Some(0));
    assert_eq!(guest.bytes(BUFFER, 64), FILL);
    cq_has_failed(&mut guest, end);
}

#[test]
fn a_buffer_that_is_larger_than_a_cqe_is_used() {
    let (mut guest, end) = complete_into((BUFFER, 64, true));
    assert_eq!(guest.used(guest.cq_queue(end.cqn)).map(|used| used.1), Some(CQE));
    assert_eq!(guest.bytes(BUFFER, 8), 7_u64.to_le_bytes());
    let rest = CQE as usize;
    assert_eq!(guest.bytes(BUFFER + u64::from(CQE), 64 - rest), FILL[rest..]);
}

#[test]
fn a_malformed_chain_ends_the_cq() {
    let (mut guest, end) = complete_into((1 << 40, 64, true));
    cq_has_failed(&mut guest, end);
}

#[test]
fn buffers_for_no_object_are_not_touched() {
    let (fabric, clock) = fabric();
    let mut guest = Guest::new(&fabric, &clock, 1);
    guest.memory.write(BUFFER, &FILL).unwrap();
    let queues = [guest.cq_queue(3), guest.send_queue(5), guest.receive_queue(5)];
    for queue in queues {
        guest.add(queue, &[(BUFFER, 64, queue == guest.cq_queue(3))]);
    }
    guest.create_pd();
    guest.run();
    assert_eq!(queues.map(|queue| guest.used_index(queue)), [0; 3]);
    assert_eq!(guest.bytes(BUFFER, 64), FILL);
}

/// Begins a long message of A to B, and stops in the middle.
fn stop_halfway(pair: &mut Pair) {
    let [a, b] = pair.ends;
    pair.a.fill(DATA, LONG as usize, 1);
    pair.b.post_recv(b.qpn, 1, &[sge(DATA, LONG, b.key)]);
    pair.a.post_send(a.qpn, &Send::new(2, SEND, &[sge(DATA, LONG, a.key)]));
    while pair.b.bytes(DATA, 1) == [0] {
        pair.a.device.run(1);
        pair.b.device.run(1);
    }
    assert_eq!(pair.b.bytes(DATA + u64::from(LONG) - 64, 64), [0; 64]);
}

/// The memory of work requests is the owner's again with the reply to the command that ends them.
#[test]
fn a_qp_that_ends_leaves_memory_alone() {
    let ends: [fn(&mut Guest, u32); 2] = [
        |guest, qpn| guest.destroy_qp(qpn).unwrap(),
        |guest, qpn| guest.set_state(qpn, VIRTIO_RDMA_QPS_RESET).unwrap(),
    ];
    for end in ends {
        let mut pair = Pair::new();
        let b = pair.ends[1];
        stop_halfway(&mut pair);
        end(&mut pair.b, b.qpn);
        let mine = pair.b.fill(DATA, LONG as usize, 99);
        pair.settle_in_time();
        assert!(pair.b.bytes(DATA, LONG as usize) == mine);
    }
}

#[test]
fn a_cq_has_no_more_buffers_than_its_virtqueue() {
    let (fabric, clock) = fabric();
    let mut guest = Guest::new(&fabric, &clock, 1);
    let mut layout = guest.virtqueues[&guest.cq_queue(0)].layout;
    layout.size = 8;
    let ring = SplitQueue::new(&guest.memory, layout, 0).unwrap();
    guest.device.set_queue(guest.cq_queue(0), ring, Arc::new(NoSignal));
    let mut create = |cqe| {
        let request = virtio_rdma_cmd_create_cq { cqe };
        let reply: Result<virtio_rdma_rsp_create_cq, u32> =
            guest.command(VIRTIO_RDMA_CMD_CREATE_CQ, &request);
        reply.map(|reply| reply.cqn)
    };
    let invalid = Err(VIRTIO_RDMA_STATUS_INVAL);
    assert_eq!(create(0), invalid);
    assert_eq!(create(u32::from(RING) + 1), invalid);
    assert_eq!(create(9), invalid, "the virtqueue has 8 entries");
    assert_eq!(create(8), Ok(0));
}

/// A work request is copied before its descriptor is back.
#[test]
fn a_work_request_is_copied_once() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let data = pair.a.fill(DATA, 64, 3);
    let bytes = Send::new(1, SEND, &[sge(DATA, 64, a.key)]).bytes();
    pair.a.memory.write(BUFFER, &bytes).unwrap();
    let queue = pair.a.send_queue(a.qpn);
    pair.a.add(queue, &[(BUFFER, bytes.len() as u32, false)]);
    // The message waits for a receive.
    pair.settle();
    assert_eq!(pair.a.used_index(queue), 1);
    let other = Send::new(9, SEND, &[sge(DATA + 4096, 7, a.key)]).bytes();
    pair.a.memory.write(BUFFER, &other).unwrap();
    pair.b.post_recv(b.qpn, 2, &[sge(DATA, 64, b.key)]);
    pair.settle_and_pause();
    assert_eq!(brief(pair.poll_a()), Some((1, OK, VIRTIO_RDMA_WC_SEND)));
    assert_eq!(pair.poll_b().map(|cqe| (cqe.wr_id, cqe.byte_len)), Some((2, 64)));
    assert_eq!(pair.b.bytes(DATA, 64), data);
}

#[test]
fn a_work_request_that_is_cut_off_is_malformed() {
    let mut pair = Pair::new();
    let [a, _] = pair.ends;
    let part = sge(DATA, 8, a.key);
    let bytes = Send::new(1, SEND, &[part, part]).bytes();
    let queue = pair.a.send_queue(a.qpn);
    pair.a.post(queue, &bytes[..bytes.len() - 1]);
    pair.settle();
    let malformed = VIRTIO_RDMA_WC_LOC_QP_OP_ERR;
    assert_eq!(brief(pair.poll_a()).map(|cqe| (cqe.0, cqe.1)), Some((1, malformed)));

    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let part = sge(DATA, 8, b.key);
    let bytes = receive(2, &[part, part]);
    let queue = pair.b.receive_queue(b.qpn);
    pair.b.post(queue, &bytes[..bytes.len() - 1]);
    pair.a.post_send(a.qpn, &Send::new(1, SEND, &[sge(DATA, 8, a.key)]));
    pair.settle();
    assert_eq!(brief(pair.poll_b()).map(|cqe| (cqe.0, cqe.1)), Some((2, malformed)));
}

#[test]
fn buffers_of_a_qp_in_reset_wait() {
    let mut pair = Pair::unconnected(VIRTIO_RDMA_QPT_RC);
    let [a, b] = pair.ends;
    pair.b.post_recv(b.qpn, 2, &[sge(DATA, 8, b.key)]);
    pair.a.post_send(a.qpn, &Send::new(1, SEND, &[sge(DATA, 8, a.key)]));
    pair.settle();
    let used = |pair: &Pair| {
        let queues = (pair.a.send_queue(a.qpn), pair.b.receive_queue(b.qpn));
        (pair.a.used_index(queues.0), pair.b.used_index(queues.1))
    };
    assert_eq!(used(&pair), (0, 0));
    pair.a.connect(a.qpn, gid(2), b.qpn);
    pair.b.connect(b.qpn, gid(1), a.qpn);
    pair.settle_in_time();
    assert_eq!(brief(pair.poll_a()), Some((1, OK, VIRTIO_RDMA_WC_SEND)));
    assert_eq!(brief(pair.poll_b()), Some((2, OK, VIRTIO_RDMA_WC_RECV)));
    assert_eq!(used(&pair), (1, 1));
}

#[test]
fn a_suppressed_interrupt_leaves_the_cq_armed() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let queue = pair.b.cq_queue(b.cqn);
    let flags = pair.b.virtqueues[&queue].layout.avail;
    let message = |pair: &mut Pair| {
        pair.b.post_recv(b.qpn, 1, &[]);
        pair.a.post_send(a.qpn, &Send::new(1, SEND, &[]));
        pair.settle();
        pair.poll_b().unwrap();
        pair.b.signals(queue)
    };
    // VIRTQ_AVAIL_F_NO_INTERRUPT.
    pair.b.memory.write(flags, &1_u16.to_le_bytes()).unwrap();
    pair.b.arm_cq(b.cqn, VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION).unwrap();
    assert_eq!(message(&mut pair), 0);
    pair.b.memory.write(flags, &0_u16.to_le_bytes()).unwrap();
    assert_eq!(message(&mut pair), 1);
    assert_eq!(message(&mut pair), 1, "the signal disarmed it");
}
