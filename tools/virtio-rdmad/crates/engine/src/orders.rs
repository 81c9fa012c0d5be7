// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests what the device and a program see of each other on any kind of processor: `make loom`.
//!
//! The program does what the specification demands, and no more.

use std::mem::offset_of;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::Arc;

use abi::{
    virtio_rdma_cq_ring, virtio_rdma_qp_ring, virtio_rdma_ring_cqe, virtio_rdma_ring_shape,
    virtio_rdma_srq_ring,
};
use litmus::{check, fence, thread, Memory};
use memory::Pages;
use zerocopy::FromZeros;

use crate::base::gate::Gate;
use crate::base::ready_set::{ReadySet, Set};
use crate::queue::cq_ring::{CqRing, Due, NotPlaced};
use crate::queue::wq_ring::{Kind, Shape, WqRing};
use crate::SystemClock;

const SQ_PRODUCER: usize = offset_of!(virtio_rdma_qp_ring, sq_producer);
const SQ_WAKE: usize = offset_of!(virtio_rdma_qp_ring, sq_wake);
const SRQ_PRODUCER: usize = offset_of!(virtio_rdma_srq_ring, producer);
const SRQ_CONSUMER: usize = offset_of!(virtio_rdma_srq_ring, consumer);
const CQ_CONSUMER: usize = offset_of!(virtio_rdma_cq_ring, consumer);
const ARM_NEXT: usize = offset_of!(virtio_rdma_cq_ring, arm_next);
const ARM_SOLICITED: usize = offset_of!(virtio_rdma_cq_ring, arm_solicited);

/// The first entry of a work queue.
const ENTRY: usize = size_of::<virtio_rdma_qp_ring>();
/// The first CQE.
const CQE: usize = size_of::<virtio_rdma_cq_ring>();
const LAP: usize = CQE + offset_of!(virtio_rdma_ring_cqe, lap);

/// Returns the device's side of a work queue of one entry.
fn work_queue(memory: &Arc<Memory>, kind: Kind) -> WqRing {
    let offset = ENTRY as u32;
    let shape = virtio_rdma_ring_shape { depth: 1, stride: 32, offset, reserved_0c: 0 };
    let shape = Shape::check(&shape, 1, 1, 32).unwrap();
    WqRing::new(Arc::new(Pages::modelled(Arc::clone(memory))), shape, kind)
}

fn send_queue() -> (Arc<Memory>, WqRing) {
    let memory = Arc::new(Memory::new([SQ_PRODUCER, SQ_WAKE], [ENTRY]));
    let ring = work_queue(&memory, Kind::Send);
    (memory, ring)
}

/// Takes the entry, if the device sees it.
fn pop(ring: &mut WqRing) -> Option<u64> {
    let (_, entry) = ring.pop().unwrap()?;
    let mut bytes = [0; 8];
    entry.read(0, &mut bytes).unwrap();
    Some(u64::from_le_bytes(bytes))
}

/// Returns the device's side of a CQ of one CQE.
fn completion_queue() -> (Arc<Memory>, CqRing) {
    let words = [CQ_CONSUMER, ARM_NEXT, ARM_SOLICITED, LAP];
    let memory = Arc::new(Memory::new(words, [CQE]));
    let pages = Pages::modelled(Arc::clone(&memory));
    (memory, CqRing::new(pages, [].into(), 1, 0))
}

fn cqe(wr_id: u64) -> virtio_rdma_ring_cqe {
    let mut cqe = virtio_rdma_ring_cqe::new_zeroed();
    cqe.wr_id = wr_id;
    cqe
}

#[test]
fn an_entry_is_read_behind_the_index() {
    check(|| {
        let (memory, mut ring) = send_queue();
        let device = thread::spawn(move || pop(&mut ring));
        memory.set(ENTRY, 7);
        memory.word(SQ_PRODUCER).store(1, Release);
        assert!(matches!(device.join().unwrap(), None | Some(7)));
    });
}

#[test]
fn a_device_that_sleeps_is_rung() {
    check(|| {
        let (memory, mut ring) = send_queue();
        let device = thread::spawn(move || ring.sleep());
        memory.word(SQ_PRODUCER).store(1, Release);
        fence(SeqCst);
        let rings = memory.word(SQ_WAKE).load(Relaxed) != 0;
        let looks = device.join().unwrap();
        assert!(rings || looks);
    });
}

#[test]
fn an_entry_is_free_when_it_was_copied() {
    check(|| {
        let memory = Arc::new(Memory::new([SRQ_PRODUCER, SRQ_CONSUMER], [ENTRY]));
        let mut ring = work_queue(&memory, Kind::Shared);
        memory.set(ENTRY, 7);
        memory.word(SRQ_PRODUCER).store(1, Release);
        let device = thread::spawn(move || {
            assert_eq!(pop(&mut ring), Some(7));
            ring.publish_consumer();
        });
        if memory.word(SRQ_CONSUMER).load(Acquire) == 1 {
            memory.set(ENTRY, 9);
        }
        device.join().unwrap();
    });
}

#[test]
fn a_cqe_is_read_behind_its_lap() {
    check(|| {
        let (memory, mut ring) = completion_queue();
        let device = thread::spawn(move || ring.place(&cqe(7), false).unwrap());
        if memory.word(LAP).load(Acquire) == 1 {
            assert_eq!(memory.get(CQE), 7);
        }
        device.join().unwrap();
    });
}

#[test]
fn a_cqe_is_written_over_when_it_was_taken() {
    check(|| {
        let (memory, mut ring) = completion_queue();
        ring.place(&cqe(7), false).unwrap();
        let device = thread::spawn(move || ring.place(&cqe(9), false));
        assert_eq!(memory.get(CQE), 7);
        memory.word(CQ_CONSUMER).store(1, Release);
        assert!(matches!(device.join().unwrap(), Ok(()) | Err(NotPlaced::Overflow)));
    });
}

#[test]
fn a_program_that_arms_misses_no_cqe() {
    for word in [ARM_NEXT, ARM_SOLICITED] {
        check(move || {
            let (memory, mut ring) = completion_queue();
            let device = thread::spawn(move || {
                ring.place(&cqe(7), true).unwrap();
                ring.take_event(&SystemClock)
            });
            memory.word(word).store(1, Relaxed);
            fence(SeqCst);
            let found = memory.word(LAP).load(Acquire) == 1;
            assert!(device.join().unwrap() == Due::Now(0) || found);
        });
    }
}

/// Two threads have work for the guest's thread, which may have been woken before.
#[test]
fn a_bit_is_found_with_what_stands_behind_it() {
    check(|| {
        let ready = Arc::new(ReadySet::new(64));
        let work = Arc::new(Memory::new([], [0, 8]));
        ready.call(63);
        ready.take(&mut Set::new(64));
        let callers = [0, 1].map(|queue: u16| {
            let (ready, work) = (Arc::clone(&ready), Arc::clone(&work));
            thread::spawn(move || {
                work.set(usize::from(queue) * 8, 7);
                ready.call(queue)
            })
        });
        let mut found = Set::new(64);
        ready.begin();
        ready.take(&mut found);
        for queue in (0..2).filter(|&queue| found.contains(queue)) {
            assert_eq!(work.get(usize::from(queue) * 8), 7);
        }
        let (mut is_woken, mut is_found) = (false, true);
        for (queue, caller) in (0..).zip(callers) {
            is_woken |= caller.join().unwrap();
            is_found &= found.contains(queue);
        }
        assert!(is_woken || is_found);
    });
}

/// Checks that nobody is inside of a gate where `close` says so.
fn check_gate(close: fn(&Gate) -> bool) {
    check(move || {
        let gate = Arc::new(Gate::default());
        let inside = Arc::new(Memory::new([], [0]));
        let visitor = thread::spawn({
            let (gate, inside) = (Arc::clone(&gate), Arc::clone(&inside));
            move || {
                if gate.enter() {
                    assert_eq!(inside.get(0), 0);
                    gate.leave();
                }
            }
        });
        if close(&gate) {
            inside.set(0, 7);
        }
        visitor.join().unwrap();
    });
}

#[test]
fn nobody_is_inside_of_a_closed_gate() {
    check_gate(|gate| {
        gate.close();
        true
    });
}

/// It is asked twice, as by a command that goes on.
#[test]
fn nobody_is_inside_of_a_gate_that_is_shut() {
    check_gate(|gate| gate.shut() || gate.shut());
}
