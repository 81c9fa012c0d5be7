// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connections with a peer that is shaped like an adapter of RoCE v2: it sends at the rate of its line, goes back with
//! each gap, knows no selective acknowledgements, and has habits that neither the device nor rxe has. Time is virtual.

mod habits;
mod link;
mod nic;
mod requester;
mod responder;

use std::sync::Arc;
use std::time::{Duration, Instant};

use abi::*;
use roce::Psn;

use super::driver::*;
use crate::{Clock, Counter, Fabric, FabricConfig, Next};
use link::{Link, To};
use nic::{Habits, Nic};
use requester::Work;

const OK: u32 = VIRTIO_RDMA_WC_SUCCESS;
/// The time that a packet takes one way.
const DELAY: Duration = Duration::from_micros(5);
/// The first PSN of both directions. PSNs wrap around soon.
const FIRST: u32 = 0xff_fff0;

/// A guest, an adapter, and the link between them.
struct Bench {
    clock: Arc<TestClock>,
    fabric: Arc<Fabric>,
    link: Arc<Link>,
    guest: Guest,
    end: End,
    nic: Nic,
    /// The time between two visits of the device's thread; `None`: it looks at once.
    interval: Option<Duration>,
    served_at: Instant,
}

impl Bench {
    /// Connects a guest to an adapter with these habits.
    fn new(habits: Habits) -> Self {
        Self::with(habits, |_| ())
    }

    /// Does what `new` does, with a guest that is changed before it connects.
    fn with(habits: Habits, change: impl FnOnce(&mut Guest)) -> Self {
        without_upgrades();
        let clock = TestClock::new();
        let link = Link::new(&clock, DELAY, habits.line_rate, 1);
        let uplink = Some(Arc::clone(&link) as _);
        let fabric = Fabric::new(FabricConfig { uplink, ..fabric_config(&clock) });
        let mut guest = Guest::new(&fabric, &clock, 1);
        let end = End::new(&mut guest, VIRTIO_RDMA_QPT_RC);
        (guest.sq_psn, guest.rq_psn) = (FIRST, FIRST);
        change(&mut guest);
        guest.connect(end.qpn, gid(nic::HOST), nic::qpn());
        let nic = Nic::new(habits, end.qpn, end.key, Psn::new(FIRST));
        let served_at = clock.now();
        Self { clock, fabric, link, guest, end, nic, interval: None, served_at }
    }

    /// Goes on until `is_done` says so, and returns how long that took.
    fn run_until(&mut self, mut is_done: impl FnMut(&mut Self) -> bool) -> Duration {
        let start = self.clock.now();
        let limit = start + Duration::from_secs(20);
        loop {
            let next = self.step();
            if is_done(self) {
                break;
            }
            let Some(next) = next else {
                let state = self.nic.requester.state();
                panic!("nothing happens any more: {state}, behind\n{}", self.link.last_packets());
            };
            self.clock.advance_to(next);
            assert!(self.clock.now() < limit, "no end after 20 s");
        }
        self.clock.now() - start
    }

    /// Goes on for so long.
    fn run_for(&mut self, time: Duration) {
        let end = self.clock.now() + time;
        while let Some(next) = self.step().filter(|next| *next < end) {
            self.clock.advance_to(next);
        }
        self.clock.advance_to(end);
    }

    /// Goes on until neither end has anything to do any more.
    fn settle(&mut self) {
        while let Some(next) = self.step() {
            self.clock.advance_to(next);
        }
    }

    /// Does all that is due now. Returns the time of what is next.
    fn step(&mut self) -> Option<Instant> {
        loop {
            let now = self.clock.now();
            let of_guest = self.serve(now);
            let mut has_moved = false;
            while let Some((to, frame)) = self.link.arrived() {
                has_moved = true;
                match to {
                    To::Guest => _ = self.fabric.receive(&frame, 0),
                    To::Adapter => {
                        if let Some(cnp) = self.nic.take(&frame, now) {
                            self.link.send(To::Guest, &cnp);
                        }
                    }
                }
            }
            while let Some(frame) = self.nic.poll(now) {
                has_moved = true;
                self.link.send(To::Guest, &frame);
            }
            if !has_moved {
                let others = [self.link.next(), self.nic.next(now)];
                let next = others.into_iter().flatten().min();
                // A thread that looks now and then looks as long as something may come.
                let is_alive = next.is_some() || self.interval.is_none();
                return next.into_iter().chain(of_guest.filter(|_| is_alive)).min();
            }
        }
    }

    /// Runs the device if its thread looks now. Returns when it looks again.
    fn serve(&mut self, now: Instant) -> Option<Instant> {
        if let Some(interval) = self.interval {
            if now < self.served_at + interval {
                return Some(self.served_at + interval);
            }
            self.served_at = now;
        }
        let next = self.guest.run();
        match (self.interval, next) {
            (Some(interval), _) => Some(now + interval),
            (None, Next::At(time)) => Some(time),
            (None, _) => None,
        }
    }

    fn poll(&mut self) -> Option<(u64, u32, u32)> {
        brief(self.guest.poll(self.end.cqn))
    }

    /// Goes on until the guest has a completion. Returns it, and how long that took.
    fn completion(&mut self) -> ((u64, u32, u32), Duration) {
        let mut cqe = None;
        let time = self.run_until(|bench| {
            cqe = bench.poll();
            cqe.is_some()
        });
        (cqe.unwrap(), time)
    }

    /// Posts a work request of the guest with `len` bytes at DATA and beyond.
    fn post(&mut self, wr_id: u64, opcode: u32, len: usize, remote: u64) {
        let part = [sge(DATA, len as u32, self.end.key)];
        let send = Send::new(wr_id, opcode, &part);
        let is_send = opcode == VIRTIO_RDMA_WR_SEND;
        let send = if is_send { send } else { send.rdma(remote, nic::RKEY) };
        self.guest.post_send(self.end.qpn, &send);
    }

    fn counter(&self, counter: Counter) -> u64 {
        self.guest.device.counter(counter)
    }
}

/// Returns data that a seed says.
fn data(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251 + seed * 31) as u8).collect()
}

/// Has both ends do a few operations of each kind at the same time, and checks all data.
fn everything(bench: &mut Bench) {
    let add = VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD;
    let (word, there) = (DATA + (6 << 20), DATA + (4 << 20));
    bench.guest.memory.write(word, &0_u64.to_le_bytes()).unwrap();
    for round in 0..12 {
        let len = round * 1777 % 9000 + 1;
        let of_guest = bench.guest.fill(DATA, len, round as u8);
        let of_nic = data(len, round);
        bench.guest.post_recv(bench.end.qpn, 100, &[sge(there, 9000, bench.end.key)]);
        bench.nic.responder.post_receives(1, 9000);
        bench.post(1, VIRTIO_RDMA_WR_SEND, len, 0);
        bench.post(2, VIRTIO_RDMA_WR_RDMA_WRITE, len, 0x1_0000);
        let back = [sge(DATA + (1 << 20), len as u32, bench.end.key)];
        let read = Send::new(3, VIRTIO_RDMA_WR_RDMA_READ, &back).rdma(0x1_0000, nic::RKEY);
        bench.guest.post_send(bench.end.qpn, &read);
        let result = [sge(DATA + (2 << 20), 8, bench.end.key)];
        let atomic = Send::new(4, add, &result).atomic(0x100, nic::RKEY, 1, 0);
        bench.guest.post_send(bench.end.qpn, &atomic);
        let written = there + 0x1_0000;
        bench.nic.post(Work::Send { data: of_nic.clone(), immediate: None });
        bench.nic.post(Work::Write { at: written, data: of_nic.clone() });
        let read = bench.nic.post(Work::Read { at: written, len });
        let added = bench.nic.post(Work::Add { at: word, add: 1 });
        let mut completions = Vec::new();
        bench.run_until(|bench| {
            completions.extend(std::iter::from_fn(|| bench.poll()));
            completions.len() == 5 && bench.nic.requester.is_idle()
        });
        completions.sort_unstable();
        let all = [
            (1, OK, VIRTIO_RDMA_WC_SEND),
            (2, OK, VIRTIO_RDMA_WC_RDMA_WRITE),
            (3, OK, VIRTIO_RDMA_WC_RDMA_READ),
            (4, OK, VIRTIO_RDMA_WC_FETCH_ADD),
            (100, OK, VIRTIO_RDMA_WC_RECV),
        ];
        assert_eq!(completions, all, "round {round}");
        assert!(bench.nic.responder.received.pop().unwrap().0 == of_guest, "SEND {round}");
        assert!(bench.nic.responder.memory[0x1_0000..][..len] == of_guest, "WRITE {round}");
        assert!(bench.guest.bytes(DATA + (1 << 20), len) == of_guest, "READ {round}");
        let result = bench.guest.memory.read_obj::<u64>(DATA + (2 << 20)).unwrap();
        assert_eq!(result, round as u64, "the atomics of the guest");
        assert!(bench.guest.bytes(there, len) == of_nic, "the adapter's SEND {round}");
        assert!(bench.guest.bytes(written, len) == of_nic, "the adapter's WRITE {round}");
        let done: Vec<_> = bench.nic.requester.done.drain(..).collect();
        let of = |number| &done.iter().find(|(other, _)| *other == number).unwrap().1;
        assert!(*of(read) == of_nic, "the adapter's READ {round}");
        assert_eq!(of(added)[..], (round as u64).to_le_bytes(), "the atomics of the adapter");
        assert_eq!(done.len(), 4);
    }
}
