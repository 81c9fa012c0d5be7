// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests guests that break their rings, each in one way. The fuzz target `engine` covers everything else.

use abi::*;

use super::driver::*;
use crate::Counter;

/// The generator xorshift64*, which gives the same numbers on every machine.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 11) % end
    }

    /// Returns mostly small numbers, and sometimes any number.
    fn word(&mut self) -> u32 {
        match self.below(8) {
            0 => self.next() as u32,
            1 => u32::MAX - self.below(3) as u32,
            _ => self.below(8) as u32,
        }
    }
}

#[test]
pub fn random_commands_are_answered() {
    for seed in 1..=20 {
        let mut random = Random::new(seed * 0x9e37_79b9);
        let mut pair = Pair::new();
        let mut reply = [0; 256];
        for _ in 0..2000 {
            let mut request = vec![random.below(36) as u8];
            for _ in 0..random.below(40) {
                request.extend_from_slice(&random.word().to_le_bytes());
            }
            let room = random.below(256) as usize;
            let written = pair.a.device.command(&request, &mut reply[..room]);
            assert!(written <= room && (written > 0) == (room > 0));
            pair.a.device.run(16);
        }
        pair.settle_in_time();
        // The other guest may lose its connection, but its device still works.
        let (b, cqn) = (&mut pair.b, pair.ends[1].cqn);
        let qpn = b.create_qp(pair.ends[1].pdn, cqn, VIRTIO_RDMA_QPT_RC);
        let own = b.gid;
        b.connect(qpn, own, qpn);
        b.post_send(qpn, &Send::new(77, VIRTIO_RDMA_WR_RDMA_WRITE, &[]));
        b.run();
        while b.poll(cqn).is_some_and(|cqe| cqe.wr_id != 77) {}
        assert!(b.device.counter(Counter::WriteMessages) >= 1);
    }
}

#[test]
fn a_looping_chain_fails_its_qp_with_an_event() {
    let mut pair = Pair::new();
    let [a, b] = pair.ends;
    let queue = pair.a.send_queue(a.qpn);
    // Two descriptors name each other as the next one.
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
