// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a network costs that loses, repeats and reorders packets: how many packets are sent besides those
//! that a message needs.

use abi::*;

use super::cable::{over_a_cable, Faults};
use super::driver::*;

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
const MIB: usize = 1 << 20;

/// Reads `count` times 1 MiB from B to A, checks the data, and returns how many packets were sent for each.
fn packets_of_reads(seed: u64, faults: Faults, count: u64) -> u64 {
    let cable = over_a_cable(seed, faults, || {
        let mut pair = Pair::new();
        let [a, b] = pair.ends;
        for number in 0..count {
            pair.b.fill(DATA + (number << 20), MIB, number as u8);
            let part = [sge(DATA + (number << 20), MIB as u32, a.key)];
            let read = Send::new(number, VIRTIO_RDMA_WR_RDMA_READ, &part);
            pair.a.post_send(a.qpn, &read.rdma(DATA + (number << 20), b.key));
        }
        pair.settle_in_time();
        for number in 0..count {
            let cqe = brief(pair.poll_a());
            assert_eq!(cqe, Some((number, OK, VIRTIO_RDMA_WC_RDMA_READ)), "seed {seed}");
            let [here, there] =
                [&pair.a, &pair.b].map(|guest| guest.bytes(DATA + (number << 20), MIB));
            assert!(here == there, "seed {seed}: the data of READ {number}");
        }
    });
    let sent = cable.sent.lock().unwrap().len() as u64;
    sent / count
}

/// Each packet of a response that is lost is asked for alone. At a path MTU of 1024 a READ of 1 MiB has
/// 1024 packets and a request.
#[test]
fn a_read_asks_for_what_is_missing() {
    assert_eq!(packets_of_reads(1, Faults::default(), 4), 1025);
    for (faults, most) in [
        (Faults { loss: 10, ..Faults::default() }, 1025 + 40),
        (Faults { reorder: 20, ..Faults::default() }, 1025 + 120),
        (Faults { loss: 10, reorder: 20, repeat: 20, ..Faults::default() }, 1025 + 160),
    ] {
        for seed in 0..4 {
            let packets = packets_of_reads(seed, faults, 4);
            assert!(packets <= most, "seed {seed}: {packets} packets for a READ, more than {most}");
        }
    }
}
