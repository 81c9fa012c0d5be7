// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Checks what a program and the device see of each other, in each order that a processor allows:
//! `make loom`.
//!
//! The device of these tests does what the specification demands, and no more.

use crate::{
    bindings::{virtio_rdma_cq_ring, virtio_rdma_ring_cqe, virtio_rdma_srq_ring},
    cq,
    cq_ring::CqRing,
    lock::{Lock, Threads},
    qp_table::QueueProgress,
    ring::{Ring, RingRegion, Word},
    wq::{Freed, Head, State},
};
use litmus::{Memory, check, fence, thread};
use std::{
    mem::offset_of,
    sync::{
        Arc,
        atomic::Ordering::{Acquire, Relaxed, Release, SeqCst},
    },
};

const PRODUCER: usize = offset_of!(virtio_rdma_srq_ring, producer);
const CONSUMER: usize = offset_of!(virtio_rdma_srq_ring, consumer);
const WAKE: usize = offset_of!(virtio_rdma_srq_ring, wake);
const HEAD: Head = Head::new(Word::at(PRODUCER), Word::at(WAKE));
/// The first entry of a work queue.
const ENTRY: usize = size_of::<virtio_rdma_srq_ring>();

const CQ_CONSUMER: usize = offset_of!(virtio_rdma_cq_ring, consumer);
const CLOSED: usize = offset_of!(virtio_rdma_cq_ring, closed);
const ARM_NEXT: usize = offset_of!(virtio_rdma_cq_ring, arm_next);
const ARM_SOLICITED: usize = offset_of!(virtio_rdma_cq_ring, arm_solicited);
/// The first CQE.
const CQE: usize = size_of::<virtio_rdma_cq_ring>();
const LAP: usize = CQE + offset_of!(virtio_rdma_ring_cqe, lap);

/// A work queue of one entry.
struct Queue {
    region: RingRegion,
    state: State,
}

impl Queue {
    fn new() -> (Self, Arc<Memory>) {
        let memory = Arc::new(Memory::new([PRODUCER, CONSUMER, WAKE], [ENTRY]));
        let ring = Ring::new(ENTRY, 1, 32).unwrap();
        let mut region = RingRegion::new(ring.end()).unwrap();
        region.model = Some(Arc::clone(&memory));
        (Self { region, state: State::new(ring) }, memory)
    }

    /// Posts a work request, if there is room for it. Returns whether the device wants a doorbell.
    fn post(&mut self, freed: Freed<'_>) -> Option<bool> {
        self.state.entry(&self.region, freed).ok()?;
        self.state.filled();
        Some(self.state.publish(&self.region, HEAD, freed))
    }
}

/// Returns a CQ of one CQE.
fn completion_queue() -> (CqRing, Arc<Memory>) {
    let words = [CQ_CONSUMER, CLOSED, ARM_NEXT, ARM_SOLICITED, LAP];
    let memory = Arc::new(Memory::new(words, [CQE]));
    (CqRing::modelled(1, &memory), memory)
}

/// Takes CQEs. Returns how many.
fn poll(ring: &mut CqRing) -> usize {
    ring.take(|_| ()).map_or(0, |()| 1)
}

/// Writes CQE `index`.
fn complete(memory: &Memory, index: u32) {
    memory.set(CQE, index.into());
    memory.word(LAP).store(index + 1, Release);
}

/// Makes the device take the work request with an index. Returns whether it saw the request.
fn take(memory: &Memory, index: u32) -> bool {
    let sees = memory.word(PRODUCER).load(Acquire) == index + 1;
    if sees {
        memory.get(ENTRY);
    }
    sees
}

#[test]
fn an_entry_is_written_before_the_index() {
    check(|| {
        let (mut queue, memory) = Queue::new();
        let device = thread::spawn(move || take(&memory, 0));
        assert_eq!(queue.post(Freed::Taken(Word::at(CONSUMER))), Some(false));
        device.join().unwrap();
    });
}

#[test]
fn a_device_that_sleeps_is_rung() {
    check(|| {
        let (mut queue, memory) = Queue::new();
        let device = thread::spawn(move || {
            memory.word(WAKE).store(1, Relaxed);
            fence(SeqCst);
            memory.word(PRODUCER).load(Acquire) == 1
        });
        let rings = queue.post(Freed::Taken(Word::at(CONSUMER))).unwrap();
        assert!(device.join().unwrap() || rings);
    });
}

#[test]
fn an_entry_that_was_taken_is_written_again() {
    check(|| {
        let (mut queue, memory) = Queue::new();
        let freed = Freed::Taken(Word::at(CONSUMER));
        queue.post(freed);
        let device = thread::spawn(move || {
            assert!(take(&memory, 0));
            memory.word(CONSUMER).store(1, Release);
        });
        queue.post(freed);
        device.join().unwrap();
    });
}

/// One thread posts, another one polls.
#[test]
fn an_entry_whose_request_is_done_is_written_again() {
    check(|| {
        let (mut queue, memory) = Queue::new();
        let (mut ring, completions) = completion_queue();
        let progress = Arc::new(QueueProgress::default());
        queue.post(Freed::Completed(&progress));
        let poller = thread::spawn({
            let progress = Arc::clone(&progress);
            move || ring.take(|_| progress.complete(0))
        });
        let poster = thread::spawn(move || queue.post(Freed::Completed(&progress)));
        assert!(take(&memory, 0));
        complete(&completions, 0);
        poller.join().unwrap();
        poster.join().unwrap();
    });
}

/// A thread that polls does not drop a valid completion, even if it does not see yet which work
/// requests another thread has posted.
#[test]
fn what_completes_was_posted() {
    check(|| {
        let (mut queue, memory) = Queue::new();
        let (mut ring, completions) = completion_queue();
        let progress = Arc::new(QueueProgress::default());
        let device = thread::spawn(move || {
            if take(&memory, 0) {
                complete(&completions, 0);
            }
        });
        let poller = thread::spawn({
            let progress = Arc::clone(&progress);
            move || ring.take(|_| assert!(progress.complete(0)))
        });
        queue.post(Freed::Completed(&progress));
        device.join().unwrap();
        poller.join().unwrap();
    });
}

#[test]
fn a_cqe_is_read_behind_its_lap() {
    check(|| {
        let (mut ring, memory) = completion_queue();
        let device = thread::spawn(move || complete(&memory, 0));
        poll(&mut ring);
        device.join().unwrap();
    });
}

#[test]
fn a_cqe_is_taken_before_its_place_is_free() {
    check(|| {
        let (mut ring, memory) = completion_queue();
        complete(&memory, 0);
        let device = thread::spawn(move || {
            if memory.word(CQ_CONSUMER).load(Acquire) == 1 {
                complete(&memory, 1);
            }
        });
        assert_eq!(poll(&mut ring), 1);
        device.join().unwrap();
    });
}

#[test]
fn a_program_that_arms_misses_no_cqe() {
    for is_solicited in [false, true] {
        check(move || {
            let (mut ring, memory) = completion_queue();
            let device = thread::spawn(move || {
                complete(&memory, 0);
                fence(SeqCst);
                let word = if is_solicited { ARM_SOLICITED } else { ARM_NEXT };
                memory.word(word).load(Relaxed) == 1
            });
            ring.arm(is_solicited);
            let found = poll(&mut ring) == 1;
            assert!(device.join().unwrap() || found);
        });
    }
}

/// The driver closes a ring whose device has written its last CQE.
#[test]
fn a_ring_is_closed_behind_its_last_cqe() {
    check(|| {
        let (mut ring, memory) = completion_queue();
        let device = thread::spawn(move || {
            complete(&memory, 0);
            memory.word(CLOSED).store(1, Release);
        });
        assert!(cq::take_with(&mut ring, poll, CqRing::is_closed).is_ok());
        device.join().unwrap();
    });
}

/// No thread waits for the lock here: in the model checker an exchange that read the old value may
/// pass an atomic store. `make tsan` has threads that wait.
#[test]
fn a_lock_is_taken_behind_what_its_holder_did() {
    check(|| {
        let lock = Arc::new(Lock::with((), Threads::MANY));
        let memory = Arc::new(Memory::new([], [0]));
        let guard = lock.lock();
        let other = thread::spawn({
            let (lock, memory) = (Arc::clone(&lock), Arc::clone(&memory));
            move || {
                if !lock.is_taken() {
                    let _guard = lock.lock();
                    assert_eq!(memory.get(0), 7);
                }
            }
        });
        memory.set(0, 7);
        drop(guard);
        other.join().unwrap();
    });
}
