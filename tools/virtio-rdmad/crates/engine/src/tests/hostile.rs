// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guests that break their rings, each in one way. The fuzz target `engine` breaks everything else.

use abi::*;

use super::driver::*;
use crate::Counter;

#[test]
fn a_looping_chain_fails_its_qp_with_an_event() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let queue = pair.a.send_queue(a.qpn);
    // Two descriptors that name each other.
    pair.a.add_at(queue, 63, &[(DATA, 8, false), (DATA, 8, false)]);
    let desc = pair.a.descriptors(queue);
    pair.a.memory.write(desc + 12, &1_u16.to_le_bytes()).unwrap();
    pair.a.memory.write(desc + 14, &63_u16.to_le_bytes()).unwrap();
    pair.a.device.kick(queue);
    pair.settle();
    assert_eq!(pair.a.poll_event(), Some((VIRTIO_RDMA_EVENT_QP_FATAL, a.qpn)));
    assert_eq!(u32::from(pair.a.query(a.qpn).qp_state), VIRTIO_RDMA_QPS_ERR);
    assert_eq!(pair.a.device.counter(Counter::BadSendChain), 1);
    // RESET gives the chain back unread, and the queue works again.
    pair.a.set_state(a.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
    assert_eq!(pair.a.used_index(queue), 1);
    pair.a.connect(a.qpn, gid(2), b.qpn);
    let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &[sge(DATA, 8, a.key)]);
    pair.a.post_send(a.qpn, &write.rdma(DATA, b.key));
    pair.settle();
    assert_eq!(pair.poll_a().map(|cqe| (cqe.wr_id, cqe.status)), Some((1, 0)));
}

#[test]
fn a_broken_control_queue_asks_for_a_reset() {
    let mut pair = Pair::new();
    pair.a.add_at(0, 63, &[(1 << 40, 8, false)]);
    pair.a.device.kick(0);
    pair.settle();
    assert!(pair.a.device.needs_reset());
    assert_eq!(pair.a.device.counter(Counter::BadControlChain), 1);
    pair.a.device.reset();
    assert!(!pair.a.device.needs_reset());
}
