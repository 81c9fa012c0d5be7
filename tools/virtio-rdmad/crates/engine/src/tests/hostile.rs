// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guests that write anything at all. The same seed gives the same bytes.

use abi::*;

use super::driver::*;
use crate::Counter;

/// xorshift64*: enough for tests, and the same everywhere.
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

    /// Mostly small numbers, some of them anything.
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
        // The other guest's connection may be lost, but not its device.
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
fn random_work_requests_end() {
    for seed in 1..=30 {
        let mut random = Random::new(seed * 0x51ed_2701);
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        for _ in 0..300 {
            let keys = [a.key, b.key, random.next() as u32];
            let word = |random: &mut Random| match random.below(6) {
                0 => keys[random.below(3) as usize],
                1 => (DATA as u32).wrapping_add(random.word()),
                _ => random.word(),
            };
            let words = random.below(70);
            let bytes: Vec<u8> = (0..words).flat_map(|_| word(&mut random).to_le_bytes()).collect();
            let queue = if random.below(2) == 0 {
                pair.a.send_queue(a.qpn)
            } else {
                pair.a.receive_queue(a.qpn)
            };
            if !bytes.is_empty() {
                pair.a.post(queue, &bytes);
            }
            pair.settle_in_time();
            while pair.poll_a().is_some() {}
            while pair.poll_b().is_some() {}
            for (guest, qpn, dgid, dest) in
                [(&mut pair.a, a.qpn, gid(2), b.qpn), (&mut pair.b, b.qpn, gid(1), a.qpn)]
            {
                if u32::from(guest.query(qpn).qp_state) == VIRTIO_RDMA_QPS_ERR {
                    guest.set_state(qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
                    guest.connect(qpn, dgid, dest);
                }
            }
        }
    }
}

#[test]
fn random_rings_break_their_object_alone() {
    for seed in 1..=60 {
        let mut random = Random::new(seed * 0x2545_f491);
        let mut pair = Pair::new();
        let [_, b] = pair.ends;
        let end = u64::from(pair.a.event_queue()) * 0x3000 + 0x4000;
        for _ in 0..200 {
            let at = 0x1000 + random.below(end - 0x1000);
            pair.a.memory.write(at, &random.word().to_le_bytes()).unwrap();
            pair.a.device.kick(random.below(18) as u16);
            for _ in 0..20 {
                pair.a.device.run(64);
            }
        }
        pair.a.device.arm();
        // A reset mends everything.
        pair.a.device.reset();
        assert!(!pair.a.device.needs_reset());
        pair.a.start();
        let a2 = End::new(&mut pair.a, VIRTIO_RDMA_QPT_RC);
        pair.b.set_state(b.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
        while pair.poll_b().is_some() {}
        pair.a.connect(a2.qpn, gid(2), b.qpn);
        pair.b.connect(b.qpn, gid(1), a2.qpn);
        pair.b.post_recv(b.qpn, 5, &[sge(DATA, 8, b.key)]);
        pair.a.post_send(a2.qpn, &Send::new(6, VIRTIO_RDMA_WR_SEND, &[sge(DATA, 8, a2.key)]));
        pair.settle();
        assert_eq!(pair.a.poll(a2.cqn).map(|cqe| (cqe.wr_id, cqe.status)), Some((6, 0)));
        assert_eq!(pair.poll_b().map(|cqe| (cqe.wr_id, cqe.status)), Some((5, 0)));
    }
}

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
