// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Measures the time that the engine takes for a message, and compares it with a copy of the same bytes.
//!
//! It asserts nothing. Run it with
//! `cargo test --release -p engine -- --ignored --nocapture rate`; `wire_rate` has a wire without a
//! kernel between the guests.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use abi::*;
use roce::Segments;

use super::driver::*;

use crate::queue::cq::Cq;
use crate::queue::cq_ring::CqRing;
use crate::transport::hca::Qp;
use crate::{Fabric, FabricConfig, Limits, Uplink};

const DEPTH: u32 = 64;

fn setup(qps: u16) -> Setup {
    let limits = Limits { gid_table: 4, comp_vectors: VECTORS, ..Limits::default() };
    let sizes = Sizes {
        memory: 128 << 20,
        depth: DEPTH,
        stride: 128,
        sges: 1,
        inline: 64,
        regions: 64 << 20,
        region_len: 0x5000,
        region_count: u64::from(qps) + 1,
        ..Sizes::default()
    };
    Setup { limits, sizes, ..Setup::default() }
}

/// The way to the other fabric, which takes in each train at once.
#[derive(Default)]
struct Wire(OnceLock<Weak<Fabric>>);

impl Uplink for Wire {
    fn send(&self, Segments { frame, segment, .. }: Segments<'_>) -> usize {
        let other = self.0.get().and_then(Weak::upgrade).unwrap();
        assert!(other.receive(frame, segment), "the inbox has room");
        1
    }
}

/// Returns two fabrics with a wire between them, and their clock.
fn wired() -> ([Arc<Fabric>; 2], Arc<TestClock>) {
    let clock = TestClock::new();
    let ends = [0, 1].map(|_| Arc::new(Wire::default()));
    let fabrics = ends
        .clone()
        .map(|end| Fabric::new(FabricConfig { uplink: Some(end), ..fabric_config(&clock) }));
    for (end, other) in ends.iter().zip(fabrics.iter().rev()) {
        end.0.set(Arc::downgrade(other)).unwrap();
    }
    (fabrics, clock)
}

/// Two guests with this many connected pairs of QPs.
struct Bench {
    /// The fabrics, which may be one.
    fabrics: [Arc<Fabric>; 2],
    a: Guest,
    b: Guest,
    ends: [End; 2],
    qpns: Vec<(u32, u32)>,
}

impl Bench {
    fn new(qps: u16) -> Self {
        let (fabric, clock) = fabric();
        Self::between([Arc::clone(&fabric), fabric], &clock, qps)
    }

    fn on_the_wire(qps: u16) -> Self {
        let (fabrics, clock) = wired();
        Self::between(fabrics, &clock, qps)
    }

    fn between(fabrics: [Arc<Fabric>; 2], clock: &Arc<TestClock>, qps: u16) -> Self {
        let guest = |number: usize| {
            let fabric = &fabrics[number - 1];
            Guest::with_setup(fabric, clock, number as u8, Arc::new(NoWake), setup(qps))
        };
        let (mut a, mut b) = (guest(1), guest(2));
        let kind = VIRTIO_RDMA_QPT_RC;
        let ends = [End::new(&mut a, kind), End::new(&mut b, kind)];
        let mut qpns = vec![(ends[0].qpn, ends[1].qpn)];
        for _ in 1..qps {
            let [x, y] = ends;
            qpns.push((a.create_qp(x.pdn, x.cqn, kind), b.create_qp(y.pdn, y.cqn, kind)));
        }
        for (x, y) in &qpns {
            a.connect(*x, gid(2), *y);
            b.connect(*y, gid(1), *x);
        }
        Self { fabrics, a, b, ends, qpns }
    }

    /// Returns whether the device of `b` has work of its own for messages of `a`.
    fn is_wired(&self) -> bool {
        !Arc::ptr_eq(&self.fabrics[0], &self.fabrics[1])
    }

    /// Returns the time that the device of `a` takes for a message and, on the wire, that of `b` with it. It
    /// is the median of all rounds, each of which has `batch` messages on each of `group` QPs in turn.
    fn measure(&mut self, send: &Send, batch: u32, group: usize, messages: u32) -> f64 {
        let [a, b] = self.ends;
        let receives = send.opcode == VIRTIO_RDMA_WR_SEND;
        let each = send.flags & VIRTIO_RDMA_SEND_SIGNALED != 0;
        let last = send.clone().flags(send.flags | VIRTIO_RDMA_SEND_SIGNALED);
        let (entry, last) = (send.entry(), last.entry());
        let mut times = Vec::new();
        let qpns = self.qpns.clone();
        for group in qpns.chunks(group).cycle().take((messages / batch) as usize / group) {
            for (x, y) in group {
                for index in 0..batch {
                    if receives {
                        self.b.post_recv(*y, 1, &[sge(DATA, 64, b.key)]);
                    }
                    let entry = if index == batch - 1 { &last } else { &entry };
                    self.a.write_entry(*x, VIRTIO_RDMA_DOORBELL_SQ, entry);
                }
                self.a.ring_if_asleep(*x, VIRTIO_RDMA_DOORBELL_SQ);
            }
            let start = Instant::now();
            let mut found = 0;
            let expected = if each { group.len() * batch as usize } else { group.len() };
            while found < expected {
                self.a.device.run(64);
                if self.is_wired() {
                    self.b.device.run(64);
                }
                while self.a.poll_ring(a.cqn).is_some() {
                    found += 1;
                }
                while receives && self.b.poll_ring(b.cqn).is_some() {}
            }
            times.push(start.elapsed());
        }
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64() * 1e9 / f64::from(batch * group as u32)
    }
}

/// Returns the time of a copy of `len` bytes between the two guests, without the engine.
fn copy(bench: &Bench, len: usize, times: u32) -> f64 {
    let (from, to) = (&bench.a.memory, &bench.b.memory);
    let (from, to) = (from.slice(DATA, 16 << 20).unwrap(), to.slice(DATA, 16 << 20).unwrap());
    let start = Instant::now();
    for index in 0..times as usize {
        let at = index % 64 * 64;
        from.chunk(at, len).unwrap().copy_to(to.chunk(at, len).unwrap()).unwrap();
    }
    start.elapsed().as_secs_f64() * 1e9 / f64::from(times)
}

#[test]
#[ignore = "prints numbers"]
fn rate() {
    let cq = size_of::<Cq>() + size_of::<CqRing>();
    println!("a QP takes {} bytes, a CQ {cq}, without their pages", size_of::<Qp>());
    with_rings(|| {
        for qps in [1, 1000] {
            let mut bench = Bench::new(qps);
            println!("{qps} QPs: a copy of 64 bytes takes {:.0} ns", copy(&bench, 64, 1 << 22));
            small_messages(&mut bench, qps);
        }
        let mut bench = Bench::new(1);
        let [a, b] = bench.ends;
        let scattered = [scattered(&mut bench.a, a.pdn, 77), scattered(&mut bench.b, b.pdn, 91)];
        for len in [4 << 10, 64 << 10, 1 << 20] {
            let bare = copy(&bench, len as usize, (1 << 30) / len);
            for (name, [from, to]) in [("one extent", [a.key, b.key]), ("pages", scattered)] {
                let part = [sge(DATA, len, from)];
                let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(DATA, to).flags(0);
                let ns = bench.measure(&write, 8, 1, (1 << 30) / len);
                println!("{len} bytes, {name}: {:.2} of a copy ({ns:.0} ns)", bare / ns);
            }
        }
    });
}

#[test]
#[ignore = "prints numbers"]
fn wire_rate() {
    with_rings(|| {
        for qps in [1, 1000] {
            small_messages(&mut Bench::on_the_wire(qps), qps);
        }
        let mut bench = Bench::on_the_wire(1);
        let [a, b] = bench.ends;
        for len in [4 << 10, 64 << 10, 1 << 20] {
            let bare = copy(&bench, len as usize, (1 << 30) / len);
            let part = [sge(DATA, len, a.key)];
            let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(DATA, b.key).flags(0);
            let read = Send::new(1, VIRTIO_RDMA_WR_RDMA_READ, &part).rdma(DATA, b.key).flags(0);
            for (name, send) in [("write", write), ("read", read)] {
                let ns = bench.measure(&send, 2, 1, (1 << 28) / len);
                println!("{len} bytes, {name}: {:.2} of a copy ({ns:.0} ns)", bare / ns);
            }
        }
    });
}

/// Prints how long messages of 64 bytes take.
fn small_messages(bench: &mut Bench, qps: u16) {
    let [a, b] = bench.ends;
    let part = [sge(DATA, 64, a.key)];
    let write = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &part).rdma(DATA, b.key).flags(0);
    let inline = Send::new(1, VIRTIO_RDMA_WR_RDMA_WRITE, &[]).rdma(DATA, b.key).flags(0);
    let send = Send::new(1, VIRTIO_RDMA_WR_SEND, &part).flags(0);
    let read = Send::new(1, VIRTIO_RDMA_WR_RDMA_READ, &part).rdma(DATA, b.key);
    let signaled = write.clone().flags(VIRTIO_RDMA_SEND_SIGNALED);
    let inline = inline.inline(&[1; 64]);
    for (name, send, batch) in [
        ("write", &write, 32),
        ("write, inline", &inline, 32),
        ("send", &send, 32),
        ("write, each signaled", &signaled, 32),
        ("read, each signaled", &read, 32),
        ("write, one at a time", &write, 1),
        ("read, one at a time", &read, 1),
    ] {
        let each = send.flags & VIRTIO_RDMA_SEND_SIGNALED != 0;
        let group = usize::from(qps).min(if each { 64 / batch as usize } else { 32 });
        let ns = bench.measure(send, batch, group, 1 << 19);
        println!("{qps} QPs, 64 bytes, {name}: {ns:.0} ns, {:.2} M/s", 1e3 / ns);
    }
}

/// Returns the key of a region at [`DATA`] whose pages are not contiguous, like those of a program. They
/// are `stride` pages apart, which is an odd number.
fn scattered(guest: &mut Guest, pdn: u32, stride: u64) -> u32 {
    let pages: Vec<u64> = (0..256).map(|page| DATA + page * stride % 256 * 4096).collect();
    guest.reg_pages(pdn, DATA, 1 << 20, ALL, &pages).unwrap().lkey
}
