// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Large messages while other threads help with copies.

use std::sync::atomic::Ordering;
use std::sync::Arc;

use abi::*;
use memory::Helpers;

use super::driver::*;
use crate::memory::parts::tests::with_helper;
use crate::FabricConfig;

/// Bytes of a message: several chunks of the largest size, and a rest of an odd length.
const LENGTH: u32 = (3 << 20) + 4321;
/// The addresses of messages in both guests, none of which is aligned.
const FROM: u64 = DATA + 77;
const TO: u64 = DATA + (8 << 20) + 3;

/// Makes a connected pair of QPs whose large copies are shared with `helpers`.
pub fn pair_with(helpers: &Arc<Helpers>) -> Pair {
    let clock = TestClock::new();
    let helpers = Some(Arc::clone(helpers));
    Pair::in_network(FabricConfig { helpers, ..fabric_config(&clock) }, clock)
}

/// Sends a message of each kind, in two pieces on the side of the sender, and checks its data and that it leaves the
/// bytes beside it alone. A turn of a guest takes no longer than without help, which the driver checks.
fn send_messages(pair: &mut Pair, seed: u8) {
    let [a, b] = pair.ends;
    let whole = LENGTH as usize;
    let first = LENGTH / 3;
    let pieces = |key| {
        let rest = FROM + u64::from(first);
        [sge(FROM, first, key), sge(rest, LENGTH - first, key)]
    };
    for (number, opcode) in
        (1..).zip([VIRTIO_RDMA_WR_RDMA_WRITE, VIRTIO_RDMA_WR_SEND, VIRTIO_RDMA_WR_RDMA_READ])
    {
        let reads = opcode == VIRTIO_RDMA_WR_RDMA_READ;
        let (source, target) = if reads { (&pair.b, &pair.a) } else { (&pair.a, &pair.b) };
        let (from, to) = if reads { (TO, FROM) } else { (FROM, TO) };
        let data = source.fill(from, whole, seed.wrapping_add(number));
        let beside = (target.bytes(to - 64, 64), target.bytes(to + u64::from(LENGTH), 64));
        if opcode == VIRTIO_RDMA_WR_SEND {
            pair.b.post_recv(b.qpn, 9, &[sge(TO, LENGTH, b.key)]);
        }
        let send = Send::new(number.into(), opcode, &pieces(a.key)).rdma(TO, b.key);
        pair.a.post_send(a.qpn, &send);
        pair.settle();
        assert_eq!(pair.poll_a().map(|cqe| cqe.status), Some(0), "opcode {opcode}");
        let target = if reads { &pair.a } else { &pair.b };
        assert!(target.bytes(to, whole) == data, "opcode {opcode}");
        let found = (target.bytes(to - 64, 64), target.bytes(to + u64::from(LENGTH), 64));
        assert_eq!(found, beside);
        while pair.poll_b().is_some() {}
    }
}

/// Messages arrive whole, whether a helper that is there helps or not, and after it has gone.
#[test]
fn large_messages_are_shared() {
    let helpers = Arc::new(Helpers::new(|| {}));
    let mut pair = pair_with(&helpers);
    send_messages(&mut pair, 1);
    let helper = helpers.join();
    send_messages(&mut pair, 11);
    drop(helper);
    send_messages(&mut pair, 21);
}

/// Messages arrive whole while a thread helps.
#[test]
fn a_thread_helps_with_large_messages() {
    with_helper(|helpers, helped| {
        let mut pair = pair_with(helpers);
        let mut seed = 0;
        while helped.load(Ordering::Relaxed) < 10 {
            send_messages(&mut pair, seed);
            seed = seed.wrapping_add(3);
        }
    });
}
