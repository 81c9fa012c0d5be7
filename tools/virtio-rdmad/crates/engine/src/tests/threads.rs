// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests guests on their own threads, as in the daemon.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use abi::*;

use super::driver::*;
use crate::{Next, Wake};

/// Wakes a thread that sleeps.
#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    ring: Condvar,
}

impl Bell {
    fn wait(&self) {
        let mut rung = self.rung.lock().unwrap();
        while !*rung {
            rung = self.ring.wait(rung).unwrap();
        }
        *rung = false;
    }
}

impl Wake for Bell {
    fn wake(&self) {
        *self.rung.lock().unwrap() = true;
        self.ring.notify_all();
    }
}

/// Waits for a CQE as a program does: polls, arms, polls again, and sleeps until an interrupt. The clock
/// moves only for pauses, so mostly a peer ends a wait.
fn next_cqe(guest: &mut Guest, cqn: u32, bell: &Bell) -> virtio_rdma_cqe {
    loop {
        if let Some(cqe) = guest.poll(cqn) {
            return cqe;
        }
        let before = guest.cq_signals(cqn);
        guest.arm_cq(cqn, VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION).unwrap();
        if let Some(cqe) = guest.poll(cqn) {
            return cqe;
        }
        while guest.cq_signals(cqn) == before {
            let next = guest.device.run(64);
            if next != Next::Busy && !guest.clock.end_pause(next) && !guest.device.arm() {
                bell.wait();
            }
        }
    }
}

const ROUNDS: u64 = 2000;
const LEN: usize = 2048;

/// Posts a receive, sends a message and checks the one that arrives, many times. Each send has a new
/// region.
fn converse(mut guest: Guest, end: End, bell: &Bell, own: u8, peer: u8) {
    for round in 0..ROUNDS {
        let place = DATA + 0x10000;
        guest.post_recv(end.qpn, round, &[sge(place, LEN as u32, end.key)]);
        guest.fill(DATA, LEN, own.wrapping_add(round as u8));
        let mr = guest.reg_mr(end.pdn, DATA, LEN as u64, READ);
        let send = Send::new(round, VIRTIO_RDMA_WR_SEND, &[sge(DATA, LEN as u32, mr.lkey)]);
        guest.post_send(end.qpn, &send);
        let mut seen = 0;
        while seen < 2 {
            let cqe = next_cqe(&mut guest, end.cqn, bell);
            assert_eq!((cqe.wr_id, u32::from(cqe.status)), (round, VIRTIO_RDMA_WC_SUCCESS));
            seen += 1;
            if u32::from(cqe.opcode) == VIRTIO_RDMA_WC_RECV {
                let found = guest.bytes(place, LEN);
                let expected = guest.fill(place, LEN, peer.wrapping_add(round as u8));
                assert!(found == expected, "round {round}");
            }
        }
        guest.dereg_mr(mr.mrn).unwrap();
    }
}

fn pair_of_threads() -> (Pair, [Arc<Bell>; 2]) {
    let (fabric, clock) = fabric();
    let bells = [Arc::new(Bell::default()), Arc::new(Bell::default())];
    let guest = |number: u8| {
        let bell = Arc::clone(&bells[usize::from(number) - 1]) as Arc<dyn Wake>;
        Guest::with_wake(&fabric, &clock, number, bell)
    };
    let (mut a, mut b) = (guest(1), guest(2));
    // A pause of one guest moves the clock of both.
    (a.rnr_retry, b.rnr_retry) = (7, 7);
    let kind = VIRTIO_RDMA_QPT_RC;
    let ends = [End::new(&mut a, kind), End::new(&mut b, kind)];
    a.connect(ends[0].qpn, gid(2), ends[1].qpn);
    b.connect(ends[1].qpn, gid(1), ends[0].qpn);
    (Pair { clock, fabric, a, b, ends }, bells)
}

#[test]
pub fn two_guests_converse() {
    let (pair, [bell_a, bell_b]) = pair_of_threads();
    let Pair { a, b, ends, .. } = pair;
    let other = thread::spawn(move || converse(b, ends[1], &bell_b, 100, 50));
    converse(a, ends[0], &bell_a, 50, 100);
    other.join().unwrap();
}

#[test]
pub fn a_guest_comes_and_goes_under_traffic() {
    let (pair, _) = pair_of_threads();
    let Pair { mut a, mut b, ends, .. } = pair;
    let key = Arc::new(AtomicU32::new(ends[1].key));
    let new_key = Arc::clone(&key);
    // The device does not write to the victim's memory after a reset.
    let other = thread::spawn(move || {
        for round in 0..50_u8 {
            for _ in 0..20 {
                b.device.run(64);
                thread::yield_now();
            }
            b.device.reset();
            let before = b.fill(DATA, 1 << 20, round);
            thread::yield_now();
            assert!(b.bytes(DATA, 1 << 20) == before);
            b.start();
            let end = End::new(&mut b, VIRTIO_RDMA_QPT_RC);
            new_key.store(end.key, Ordering::Release);
            b.make_init(end.qpn, ALL);
            // A write with the old key may come any time, and fail the QP.
            if b.make_rtr(end.qpn, gid(1), ends[0].qpn, true).is_ok() {
                let _ = b.make_rts(end.qpn, true);
            }
        }
    });
    let end = ends[0];
    let mut wr_id = 0;
    while !other.is_finished() {
        wr_id += 1;
        let part = [sge(DATA, 1 << 20, end.key)];
        let write = Send::new(wr_id, VIRTIO_RDMA_WR_RDMA_WRITE, &part);
        a.post_send(end.qpn, &write.rdma(DATA, key.load(Ordering::Acquire)));
        for _ in 0..10 {
            a.device.run(64);
        }
        while a.poll(end.cqn).is_some() {}
        a.set_state(end.qpn, VIRTIO_RDMA_QPS_RESET).unwrap();
        a.connect(end.qpn, gid(2), ends[1].qpn);
    }
    other.join().unwrap();
}

/// A guest is frozen, and goes on in a copy of its memory, again and again, while a peer in a thread of its own sends
/// without end. Nothing is written to memory while it is frozen, nor to memory that was left, and all that the peer
/// sends arrives.
#[test]
pub fn a_guest_moves_under_traffic() {
    moves_under_traffic();
    with_rings(moves_under_traffic);
}

fn moves_under_traffic() {
    let (pair, _) = pair_of_threads();
    let Pair { mut a, mut b, ends, clock, .. } = pair;
    let is_over = Arc::new(AtomicU32::new(0));
    let ends_when = Arc::clone(&is_over);
    let sender = thread::spawn(move || {
        let end = ends[0];
        let mut sent = 0;
        while ends_when.load(Ordering::Acquire) == 0 {
            a.memory.write(DATA, &[sent as u8; LEN]).unwrap();
            let part = [sge(DATA, LEN as u32, end.key)];
            a.post_send(end.qpn, &Send::new(sent, VIRTIO_RDMA_WR_SEND, &part));
            let cqe = loop {
                let next = a.device.run(64);
                a.clock.end_pause(next);
                if let Some(cqe) = a.poll(end.cqn) {
                    break cqe;
                }
                thread::yield_now();
            };
            assert_eq!((cqe.wr_id, u32::from(cqe.status)), (sent, VIRTIO_RDMA_WC_SUCCESS));
            sent += 1;
        }
        sent
    });
    let end = ends[1];
    let mut received = 0;
    let take = |b: &mut Guest, received: &mut u64| {
        while let Some(cqe) = b.poll(end.cqn) {
            assert_eq!((cqe.wr_id, u32::from(cqe.status)), (*received, VIRTIO_RDMA_WC_SUCCESS));
            let place = DATA + *received % 8 * LEN as u64;
            assert!(b.bytes(place, LEN) == [*received as u8; LEN], "message {received}");
            let part = [sge(place, LEN as u32, end.key)];
            b.post_recv(end.qpn, *received + 8, &part);
            *received += 1;
        }
    };
    for number in 0..8 {
        let part = [sge(DATA + number * LEN as u64, LEN as u32, end.key)];
        b.post_recv(end.qpn, number, &part);
    }
    for _ in 0..20 {
        let before = received;
        while received < before + 20 {
            b.arm_cq(end.cqn, VIRTIO_RDMA_NOTIFY_NEXT_COMPLETION).unwrap();
            b.device.run(64);
            take(&mut b, &mut received);
            b.cq_signals(end.cqn);
        }
        b.freeze();
        let found = b.all_bytes();
        (0..10).for_each(|_| thread::yield_now());
        let old = b.move_memory();
        assert!(b.all_bytes() == found, "memory changes while it is copied");
        b.device.thaw();
        b.device.run(64);
        let mut bytes = vec![0; b.sizes.memory as usize];
        old.read(0, &mut bytes).unwrap();
        assert!(bytes == found[..bytes.len()], "the memory of before is written");
    }
    is_over.store(1, Ordering::Release);
    while !sender.is_finished() {
        let next = b.device.run(64);
        clock.end_pause(next);
        take(&mut b, &mut received);
    }
    b.run();
    take(&mut b, &mut received);
    assert_eq!(sender.join().unwrap(), received);
}

/// A processor of a guest adds to a word of its memory while a peer does. Each addition finds what the one before it
/// left, so no addition is lost, and the peer's ones are told what was there.
#[test]
pub fn atomics_meet_a_processor_of_the_guest() {
    let (mut pair, _) = pair_of_threads();
    let [a, b] = pair.ends;
    let memory = pair.b.memory.clone();
    let is_over = Arc::new(AtomicU32::new(0));
    let ends_when = Arc::clone(&is_over);
    let processor = thread::spawn(move || {
        let mut count = 0;
        while ends_when.load(Ordering::Acquire) == 0 {
            memory.chunk(DATA, 8).unwrap().fetch_add_u64(1).unwrap();
            count += 1;
        }
        count
    });
    let add = VIRTIO_RDMA_WR_ATOMIC_FETCH_AND_ADD;
    let mut before = 0;
    for wr_id in 0..ROUNDS {
        let send = Send::new(wr_id, add, &[sge(DATA, 8, a.key)]);
        pair.a.post_send(a.qpn, &send.atomic(DATA, b.key, 1 << 32, 0));
        pair.settle();
        assert_eq!(pair.poll_a().unwrap().wr_id, wr_id);
        let found: u64 = pair.a.memory.read_obj(DATA).unwrap();
        assert!(found >= before && found >> 32 == wr_id, "{before:#x}, {found:#x}");
        before = found;
    }
    is_over.store(1, Ordering::Release);
    let count: u64 = processor.join().unwrap();
    assert_eq!(pair.b.memory.read_obj::<u64>(DATA).unwrap(), ROUNDS << 32 | count);
}

/// A query of the status of a device and the commands of its guest take the same locks. Neither waits for
/// the other without an end.
#[test]
fn status_beside_commands() {
    let (fabric, clock) = fabric();
    let mut guest = Guest::new(&fabric, &clock, 1);
    let device = Arc::clone(&guest.device);
    let asking = thread::spawn(move || {
        for _ in 0..20 * ROUNDS {
            assert!(device.status().gids.len() <= 2);
        }
    });
    while !asking.is_finished() {
        guest.add_gid(1, gid(9), 0).unwrap();
        guest.del_gid(1).unwrap();
    }
    asking.join().unwrap();
}
