// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a network costs that loses, repeats and reorders packets: how many packets are sent besides those
//! that a message needs.

use abi::*;

use super::cable::{over_a_cable, Faults};
use super::driver::*;
use super::wire::a_bit_of_everything;
use crate::Counter;

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
const MIB: usize = 1 << 20;
const COUNT: u64 = 4;

/// What can go wrong, and the most packets that are sent for 1 MiB then, besides 1024 with data.
const COSTS: [(Faults, u64); 3] = [
    (Faults { loss: 10, repeat: 0, reorder: 0, corrupt: 0, mark: 0, foreign: false }, 120),
    (Faults { loss: 0, repeat: 0, reorder: 20, corrupt: 0, mark: 0, foreign: false }, 140),
    (Faults { loss: 10, repeat: 20, reorder: 20, corrupt: 0, mark: 0, foreign: false }, 180),
];

/// Sends, writes or reads 1 MiB four times, checks the data, and returns how many packets were sent for each.
fn packets(opcode: u32, seed: u64, faults: Faults) -> u64 {
    let cable = over_a_cable(seed, faults, || {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        let place = |number: u64| DATA + (number << 20);
        for number in 0..COUNT {
            if opcode == VIRTIO_RDMA_WR_RDMA_READ {
                pair.b.fill(place(number), MIB, number as u8);
            } else {
                pair.a.fill(place(number), MIB, number as u8);
            }
            pair.b.post_recv(b.qpn, number, &[sge(place(number), MIB as u32, b.key)]);
            let part = [sge(place(number), MIB as u32, a.key)];
            let send = Send::new(number, opcode, &part);
            let is_send = opcode == VIRTIO_RDMA_WR_SEND;
            let send = if is_send { send } else { send.rdma(place(number), b.key) };
            pair.a.post_send(a.qpn, &send);
        }
        pair.settle_in_time();
        for number in 0..COUNT {
            let cqe = pair.poll_a().map(|cqe| (cqe.wr_id, u32::from(cqe.status)));
            assert_eq!(cqe, Some((number, OK)), "seed {seed}");
            let [here, there] = [&pair.a, &pair.b].map(|guest| guest.bytes(place(number), MIB));
            assert!(here == there, "seed {seed}: the data of message {number}");
        }
    });
    let sent = cable.sent.lock().unwrap().len() as u64;
    sent / COUNT
}

/// Each packet of a response that is lost is asked for alone, of any peer. At a path MTU of 1024 a READ of
/// 1 MiB has 1024 packets and a request.
#[test]
fn a_read_asks_for_what_is_missing() {
    assert_eq!(packets(VIRTIO_RDMA_WR_RDMA_READ, 1, Faults::default()), 1025);
    for (faults, most) in COSTS {
        for seed in 0..4 {
            for foreign in [false, true] {
                let faults = Faults { foreign, ..faults };
                let packets = packets(VIRTIO_RDMA_WR_RDMA_READ, seed, faults) - 1024;
                assert!(packets <= most, "seed {seed}: {packets} more for a READ, above {most}");
            }
        }
    }
}

/// Each packet of a SEND or WRITE that is lost is sent again alone, if the peer knows selective
/// acknowledgements.
#[test]
fn what_is_lost_is_sent_again_alone() {
    for opcode in [VIRTIO_RDMA_WR_SEND, VIRTIO_RDMA_WR_RDMA_WRITE] {
        for (faults, most) in COSTS {
            for seed in 0..4 {
                let data = packets(opcode, seed, faults) - 1024;
                assert!(data <= most, "seed {seed}: {data} packets more, above {most}");
            }
        }
    }
    let (loss, _) = COSTS[0];
    let again = packets(VIRTIO_RDMA_WR_RDMA_WRITE, 0, Faults { foreign: true, ..loss }) - 1024;
    assert!(again > 1000, "go-back-N sends {again} packets more");
}

/// A network with all faults has no other effect than one without, whether or not the peers know selective
/// acknowledgements.
#[test]
fn effects_are_the_same_with_and_without_selective_acknowledgements() {
    for foreign in [false, true] {
        let (mut sent, mut held) = (0, 0);
        for seed in 100..120 {
            let faults = Faults { loss: 30, repeat: 30, reorder: 50, foreign, ..Faults::default() };
            over_a_cable(seed, faults, || {
                let mut pair = Pair::new();
                a_bit_of_everything(&mut pair, 6);
                sent += pair.counter(Counter::SelectiveAcksSent);
                held += pair.counter(Counter::Held);
            });
        }
        assert_eq!((sent == 0, held == 0), (foreign, foreign), "{sent} sent, {held} held");
    }
}
