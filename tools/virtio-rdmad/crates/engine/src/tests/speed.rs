// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Prints what a message costs in the engine alone: one thread does all work, and all memory is in its cache. In the tests
//! that say so, another worker polls. These tests prove nothing, so they run only if they are asked for
//! (Documentation/benchmark.md, One message).

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use abi::*;

use super::driver::*;

/// Messages of a list.
const LIST: u32 = 32;
/// Bytes of a message.
const LENGTH: u32 = 64;
/// Lists in a row whose mean time is one sample. The least sample counts: the others also contain other work of the
/// machine.
const SAMPLE: u32 = 200;

/// Sends lists of messages, SPEED_LISTS of them, and prints how long a message takes.
fn measure(mut pair: Pair, opcode: u32, takes_receive: bool) {
    let lists: u32 = std::env::var("SPEED_LISTS").map_or(10_000, |lists| lists.parse().unwrap());
    assert!(lists >= SAMPLE, "SPEED_LISTS is at least {SAMPLE}");
    let [a, b] = pair.ends;
    (pair.a.awake, pair.b.awake) = (true, true);
    let (mut sample, mut least) = (Duration::ZERO, Duration::MAX);
    for list in 1..=lists {
        for number in 0..LIST {
            let at = DATA + u64::from(number * LENGTH);
            if takes_receive {
                pair.b.post_recv(b.qpn, 0, &[sge(at, LENGTH, b.key)]);
            }
            let send = Send::new(0, opcode, &[sge(at, LENGTH, a.key)]).rdma(at, b.key);
            pair.a.write_entry(a.qpn, 0, &send.entry());
        }
        pair.a.ring_if_asleep(a.qpn, 0);
        pair.b.run();

        let start = Instant::now();
        pair.a.device.run(LIST);
        sample += start.elapsed();
        if list % SAMPLE == 0 {
            least = least.min(std::mem::take(&mut sample));
        }

        pair.settle();
        for _ in 0..LIST {
            assert_eq!(pair.poll_a().map(|cqe| cqe.status), Some(0));
            assert!(!takes_receive || pair.poll_b().is_some_and(|cqe| cqe.status == 0));
        }
    }
    let messages = f64::from(SAMPLE * LIST);
    println!("{:.1} ns a message of {LENGTH} bytes", least.as_secs_f64() * 1e9 / messages);
}

/// Ends the other worker, also if the test fails.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Does what [`measure`] does while another thread serves the receiver, as a second worker does.
fn measure_beside(opcode: u32, takes_receive: bool) {
    let pair = Pair::new();
    let (device, ends) = (pair.b.device.clone(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                device.run(LIST);
            }
        });
        let _ends = Ending(&ends);
        measure(pair, opcode, takes_receive);
    });
}

#[test]
#[ignore = "measures, and proves nothing"]
fn speed_of_writes() {
    with_rings(|| measure(Pair::new(), VIRTIO_RDMA_WR_RDMA_WRITE, false));
}

#[test]
#[ignore = "measures, and proves nothing"]
fn speed_of_reads() {
    with_rings(|| measure(Pair::new(), VIRTIO_RDMA_WR_RDMA_READ, false));
}

#[test]
#[ignore = "measures, and proves nothing"]
fn speed_of_sends() {
    with_rings(|| measure(Pair::new(), VIRTIO_RDMA_WR_SEND, true));
}

#[test]
#[ignore = "measures, and proves nothing"]
fn speed_of_writes_beside_another_worker() {
    with_rings(|| measure_beside(VIRTIO_RDMA_WR_RDMA_WRITE, false));
}

#[test]
#[ignore = "measures, and proves nothing"]
fn speed_of_sends_beside_another_worker() {
    with_rings(|| measure_beside(VIRTIO_RDMA_WR_SEND, true));
}
