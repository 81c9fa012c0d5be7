// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Work queues in rings: posting (specification, Rings: Posting).
#![forbid(unsafe_code)]

use crate::{
    bindings::virtio_rdma_qp_ring,
    causes::{Cause, cause},
    errno::{Errno, Result},
    lock::{Lock, Threads},
    qp_table::QueueProgress,
    ring::{Ring, RingRegion, Word, Writer},
    wqe::Open,
    wr::{List, PostError, Request, WorkRequest},
};
use core::{
    mem::offset_of,
    sync::atomic::Ordering::{Acquire, Relaxed, SeqCst},
};

/// The words of the head that belong to one queue.
#[derive(Clone, Copy)]
pub struct Head {
    producer: Word,
    wake: Word,
}

impl Head {
    /// Takes the producer's index and the word by which the device asks for a doorbell.
    pub const fn new(producer: Word, wake: Word) -> Self {
        Self { producer, wake }
    }

    /// Returns how many work requests were posted, by the word in the head.
    pub fn posted(self, region: &RingRegion) -> u32 {
        region.load(self.producer, Acquire)
    }

    /// Makes the next request ask for the doorbell, which did not ring.
    pub fn not_rung(self, region: &RingRegion) {
        region.store(self.wake, 1, SeqCst);
    }
}

/// The head's words of the send queue.
pub const SEND: Head = Head::new(
    Word::at(offset_of!(virtio_rdma_qp_ring, sq_producer)),
    Word::at(offset_of!(virtio_rdma_qp_ring, sq_wake)),
);
/// The head's words of the receive queue.
pub const RECV: Head = Head::new(
    Word::at(offset_of!(virtio_rdma_qp_ring, rq_producer)),
    Word::at(offset_of!(virtio_rdma_qp_ring, rq_wake)),
);

/// The way in which a queue learns which of its entries are free.
#[derive(Clone, Copy)]
pub enum Freed<'a> {
    /// An entry is free when its work request is no longer outstanding. The queue notes here how
    /// many it posted.
    Completed(&'a QueueProgress),
    /// An entry is free when the device took it; this word of the device counts those.
    Taken(Word),
}

impl Freed<'_> {
    /// Returns how many entries were freed since RESET.
    fn count(self, region: &RingRegion) -> u32 {
        match self {
            Self::Completed(progress) => progress.done(),
            // The device read the entries before it counted them.
            Self::Taken(word) => region.load(word, Acquire),
        }
    }
}

/// The state that a queue's lock protects: indices of its ring, modulo 2^32, and the work request
/// that a program makes by calls ([`crate::wr_builder`]).
pub struct State {
    /// The place of the ring.
    ring: Ring,
    /// The number of entries that the device was told of since RESET.
    producer: u32,
    /// The number of entries that were written since RESET; more than `producer` while work
    /// requests are being posted.
    next: u32,
    /// The value at which no entry is known to be free for `next`; more may be free by now.
    limit: u32,
    /// The work request that is being made in entry `next`.
    pub open: Option<Open>,
    /// The first error of the calls since ibv_wr_start().
    pub error: Option<Errno>,
}

impl State {
    /// Returns the state of an empty queue.
    pub fn new(ring: Ring) -> Self {
        Self { ring, producer: 0, next: 0, limit: ring.depth(), open: None, error: None }
    }

    /// Returns the state of a queue that begins with `posted` work requests.
    pub fn moved(ring: Ring, posted: u32) -> Self {
        Self { producer: posted, next: posted, limit: posted, ..Self::new(ring) }
    }

    /// Returns where the ring lies.
    pub fn ring(&self) -> Ring {
        self.ring
    }

    /// Posts a list; `encode` writes a request to its entry, and `refuse` returns the error that the program
    /// gets for a cause.
    pub fn post<W: WorkRequest>(
        &mut self,
        region: &RingRegion,
        head: Head,
        freed: Freed<'_>,
        list: List<'_, W>,
        encode: impl Fn(&Request<'_, W>, Writer<'_>) -> Result<(), Cause>,
        refuse: impl Fn(Cause) -> Errno,
    ) -> Posted<W> {
        let mut result = Ok(());
        for request in list {
            let posted = self.entry(region, freed).and_then(|entry| encode(&request, entry));
            if let Err(cause) = posted {
                result = Err(PostError { errno: refuse(cause), bad_wr: request.origin() });
                break;
            }
            self.filled();
        }
        Posted { result, doorbell: self.publish(region, head, freed) }
    }

    /// Returns the entry to write the next work request to.
    ///
    /// # Errors
    ///
    /// ENOMEM if no entry is free.
    pub fn entry<'a>(
        &mut self,
        region: &'a RingRegion,
        freed: Freed<'_>,
    ) -> Result<Writer<'a>, Cause> {
        self.reserve(region, freed)?;
        region.writer(self.ring, self.next)
    }

    /// Notes that the work request in that entry is complete.
    pub fn filled(&mut self) {
        self.next = self.next.wrapping_add(1);
    }

    /// Forgets the work requests that the device was not told of.
    pub fn discard(&mut self) {
        self.next = self.producer;
    }

    /// Tells the device of the work requests that were written. Returns whether
    /// it sleeps and wants a doorbell, which the caller rings.
    pub fn publish(&mut self, region: &RingRegion, head: Head, freed: Freed<'_>) -> bool {
        if self.next == self.producer {
            return false;
        }
        self.producer = self.next;
        if let Freed::Completed(progress) = freed {
            progress.post(self.producer);
        }
        // Sequential consistency ensures that the device sees the index, or that this thread
        // sees that the device sleeps.
        region.store(head.producer, self.producer, SeqCst);
        region.barriers().full();
        let asleep = region.load(head.wake, SeqCst) != 0;
        // One doorbell is enough, however long the device takes to wake up.
        asleep && region.clear(head.wake)
    }

    /// Ensures that an entry is free.
    fn reserve(&mut self, region: &RingRegion, freed: Freed<'_>) -> Result<(), Cause> {
        if self.next != self.limit {
            return Ok(());
        }
        let done = freed.count(region);
        if self.next.wrapping_sub(done) >= self.ring.depth() {
            return Err(cause!(debug ENOMEM, "all %u entries are taken", self.ring.depth()));
        }
        self.limit = done.wrapping_add(self.ring.depth());
        Ok(())
    }
}

/// A send or receive queue. Each has a cache line of its own, so that threads that send and
/// threads that post receives do not slow each other down.
#[repr(align(64))]
pub struct WorkQueue {
    state: Lock<State>,
    ring: Ring,
}

/// The result of posting a list.
#[must_use]
pub struct Posted<W> {
    /// The first request that was not posted, and why.
    pub result: Result<(), PostError<W>>,
    /// Whether the device sleeps and wants a doorbell. The caller rings it; later posts do not ask
    /// for it until the device sleeps again.
    pub doorbell: bool,
}

impl WorkQueue {
    /// Returns an empty queue.
    pub fn new(ring: Ring, threads: Threads) -> Self {
        Self { state: Lock::with(State::new(ring), threads), ring }
    }

    /// Returns the state that the queue's lock protects.
    pub fn state(&self) -> &Lock<State> {
        &self.state
    }

    /// Returns where the queue's ring lies.
    pub fn ring(&self) -> Ring {
        self.ring
    }

    /// Posts a list, as [`State::post`].
    pub fn post<W: WorkRequest>(
        &self,
        region: &RingRegion,
        head: Head,
        freed: Freed<'_>,
        list: List<'_, W>,
        encode: impl Fn(&Request<'_, W>, Writer<'_>) -> Result<(), Cause>,
        refuse: impl Fn(Cause) -> Errno,
    ) -> Posted<W> {
        self.state.lock().post(region, head, freed, list, encode, refuse)
    }

    /// Empties the queue, after the QP came to RESET.
    pub fn reset(&self, region: &RingRegion, head: Head) {
        *self.state.lock() = State::new(self.ring);
        region.store(head.producer, 0, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        barriers::{Barriers, executed},
        bindings::ibv_recv_wr,
        model::device::{self, Memory},
        ring::Resource,
        wr::tests::list,
    };
    use std::{
        hint,
        ops::Deref,
        ptr,
        sync::atomic::{AtomicU32, Ordering::Release, fence},
        thread,
    };

    const DEPTH: u32 = 8;

    /// A receive queue, and what the device sees of it.
    struct Testbed {
        region: RingRegion,
        queue: WorkQueue,
        progress: QueueProgress,
    }

    impl Testbed {
        fn new() -> Self {
            Self::with(Barriers::PROCESSORS)
        }

        /// Returns a queue of a device that needs these barriers.
        fn with(barriers: Barriers) -> Self {
            let ring = Ring::new(size_of::<virtio_rdma_qp_ring>(), DEPTH, 32).unwrap();
            let region = RingRegion::lent(ring.end(), barriers, None, Resource::Qp).unwrap();
            Self {
                region,
                queue: WorkQueue::new(ring, Threads::MANY),
                progress: QueueProgress::default(),
            }
        }

        /// Posts requests, of which `invalid` cannot be encoded. Returns the
        /// error with the request that it names, and whether the device wants a doorbell.
        fn post(&self, ids: &[u64], invalid: u64) -> (Option<(Errno, u64)>, bool) {
            let mut requests: Vec<ibv_recv_wr> =
                ids.iter().map(|&wr_id| ibv_recv_wr { wr_id, ..Default::default() }).collect();
            let mut next = ptr::null_mut();
            for wr in requests.iter_mut().rev() {
                wr.next = next;
                next = wr;
            }
            let base = requests.as_ptr().addr();
            let list = list(&mut requests[0]);
            let freed = Freed::Completed(&self.progress);
            let posted = self.queue.post(
                &self.region,
                RECV,
                freed,
                list,
                |request, mut entry| {
                    if request.wr().wr_id == invalid {
                        return Err(cause!(EINVAL, "a test"));
                    }
                    entry.put(crate::bindings::virtio_rdma_rq_wqe {
                        wr_id: request.wr().wr_id,
                        ..Default::default()
                    })
                },
                Cause::errno,
            );
            let error = posted.result.err().map(|error| {
                let index = (error.bad_wr.addr() - base) / size_of::<ibv_recv_wr>();
                (error.errno, ids[index])
            });
            (error, posted.doorbell)
        }

        fn memory(&self) -> Memory {
            Memory::new(&self.region)
        }

        fn producer(&self) -> u32 {
            self.memory().word(64).load(Acquire)
        }

        fn posted(&self, index: u32) -> u64 {
            self.memory().read(self.queue.ring(), index, 8)
        }
    }

    #[test]
    fn full_queue() {
        let testbed = Testbed::new();
        let ids: Vec<u64> = (0..10).collect();
        assert_eq!(testbed.post(&ids, 99), (Some((Errno::ENOMEM, 8)), false));
        assert_eq!(testbed.producer(), 8);
        testbed.progress.set_done(3);
        assert_eq!(testbed.post(&[8, 9], 99), (None, false));
        assert_eq!(testbed.post(&[10, 11], 99), (Some((Errno::ENOMEM, 11)), false));
        assert_eq!(testbed.producer(), 11);
        assert_eq!(
            (3..11).map(|i| testbed.posted(i)).collect::<Vec<_>>(),
            (3..11).collect::<Vec<_>>()
        );
    }

    #[test]
    fn invalid_request_stops_behind_its_predecessors() {
        let testbed = Testbed::new();
        assert_eq!(testbed.post(&[1], 1), (Some((Errno::EINVAL, 1)), false));
        assert_eq!(testbed.producer(), 0);
        assert_eq!(testbed.post(&[1, 2, 3], 3), (Some((Errno::EINVAL, 3)), false));
        assert_eq!(testbed.producer(), 2);
    }

    #[test]
    fn doorbell_if_the_device_sleeps() {
        doorbell_if_asleep(&Testbed::new());
    }

    #[test]
    fn doorbell_if_the_device_behind_a_bus_sleeps() {
        doorbell_if_asleep(&Testbed::with(Barriers::BUS));
    }

    fn doorbell_if_asleep(testbed: &Testbed) {
        testbed.memory().word(132).store(1, SeqCst);
        // Without a new work request there is no doorbell.
        assert_eq!(testbed.post(&[3], 3), (Some((Errno::EINVAL, 3)), false));
        assert_eq!(testbed.post(&[1], 99), (None, true));
        assert_eq!(testbed.post(&[1], 99), (None, false));
        RECV.not_rung(&testbed.region);
        assert_eq!(testbed.post(&[2, 3], 3), (Some((Errno::EINVAL, 3)), true));
        assert_eq!(testbed.memory().word(132).load(SeqCst), 0);
        testbed.memory().word(128).store(1, SeqCst);
        assert_eq!(testbed.post(&[4], 99), (None, false));
    }

    /// A device behind a bus wakes up by itself between the poster's look at the wake word and the store that clears
    /// it. The poster rings nevertheless: what the device writes next may be what the store replaces.
    #[test]
    fn each_word_that_is_cleared_over_a_bus_rings() {
        let testbed = Testbed::with(Barriers::BUS);
        for id in 1..=u64::from(DEPTH) {
            let memory = testbed.memory();
            memory.word(WAKE).store(1, SeqCst);
            let mut state = testbed.queue.state.lock();
            state.filled();
            executed::at_read(move || memory.word(WAKE).store(0, SeqCst));
            assert!(state.publish(&testbed.region, RECV, Freed::Completed(&testbed.progress)));
            assert_eq!(u64::from(testbed.producer()), id);
        }
        // Without a word to clear there is no doorbell.
        testbed.progress.set_done(DEPTH);
        assert_eq!(testbed.post(&[1], 99), (None, false));
    }

    /// No work request is lost to a device that goes to sleep (specification, Rings: Posting): either the
    /// device sees it when it looks once more, or the poster sees that the device sleeps, and
    /// rings. Both do so at the same time, again and again, some nanoseconds earlier or later,
    /// on a processor each: with a weaker barrier in `publish` one round in 2,000 fails.
    #[test]
    fn neither_side_misses_the_other() {
        both_look(&Testbed::new());
    }

    /// The platform's barriers keep what the atomics promise.
    #[test]
    fn neither_side_misses_the_other_over_a_bus() {
        both_look(&Testbed::with(Barriers::BUS));
    }

    fn both_look(testbed: &Testbed) {
        const ROUNDS: u32 = 200_000;
        let memory = testbed.memory();
        let race = &Race::default();
        let missed = thread::scope(|scope| {
            scope.spawn(move || {
                device::pin(1);
                for round in 1..=ROUNDS {
                    wait_for(&race.round, round);
                    // The device goes to sleep.
                    memory.word(WAKE).store(1, Relaxed);
                    fence(SeqCst);
                    let saw = memory.word(PRODUCER).load(Acquire) == round;
                    race.device.store(round << 1 | u32::from(saw), Release);
                }
            });
            device::pin(0);
            let mut state = testbed.queue.state.lock();
            let mut missed = 0;
            for round in 1..=ROUNDS {
                let freed = Freed::Completed(&testbed.progress);
                memory.word(WAKE).store(0, SeqCst);
                state.filled();
                race.round.store(round, Release);
                // The poster waits until the device is under way, or somewhat less or more.
                (0..round % 512).for_each(|step| {
                    hint::black_box(step);
                });
                let rings = state.publish(&testbed.region, RECV, freed);
                wait_until(&race.device, |word| word >> 1 == round);
                let saw = race.device.load(Acquire) & 1 != 0;
                missed += u32::from(!saw && !rings);
            }
            missed
        });
        assert_eq!(missed, 0, "work requests of {ROUNDS} on which the device sleeps");
    }

    const PRODUCER: usize = offset_of!(virtio_rdma_qp_ring, rq_producer);
    const WAKE: usize = offset_of!(virtio_rdma_qp_ring, rq_wake);

    /// The words that the two sides of a round exchange, besides the words that are tested, in a
    /// cache line each.
    #[derive(Default)]
    struct Race {
        /// The round that the poster has begun.
        round: Line,
        /// The last round of the device, and in bit 0 whether it saw the work request.
        device: Line,
    }

    #[derive(Default)]
    #[repr(align(128))]
    struct Line(AtomicU32);

    impl Deref for Line {
        type Target = AtomicU32;

        fn deref(&self) -> &AtomicU32 {
            &self.0
        }
    }

    /// Waits for a word, and gives up the processor if that takes longer than the other side does.
    fn wait_until(word: &AtomicU32, is_there: impl Fn(u32) -> bool) {
        let mut looks = 0u32;
        while !is_there(word.load(Acquire)) {
            looks += 1;
            if looks.is_multiple_of(4096) {
                thread::yield_now();
            }
        }
    }

    fn wait_for(word: &AtomicU32, value: u32) {
        wait_until(word, |now| now == value);
    }

    #[test]
    fn wrong_word_of_the_device_leaves_the_queue_full() {
        let testbed = Testbed::new();
        let ids: Vec<u64> = (0..8).collect();
        assert_eq!(testbed.post(&ids, 99), (None, false));
        for wrong in [9, 100, u32::MAX, 1 << 31] {
            testbed.progress.set_done(wrong);
            assert_eq!(testbed.post(&[8], 99), (Some((Errno::ENOMEM, 8)), false));
        }
        testbed.progress.set_done(8);
        assert_eq!(testbed.post(&ids, 99), (None, false));
    }

    #[test]
    fn indices_wrap() {
        let testbed = Testbed::new();
        let start = u32::MAX - 2;
        *testbed.queue.state.lock() =
            State { limit: u32::MAX, ..State::moved(testbed.queue.ring(), start) };
        testbed.progress.set_done(u32::MAX - 2);
        assert_eq!(
            testbed.post(&[0, 1, 2, 3, 4, 5, 6, 7, 8], 99),
            (Some((Errno::ENOMEM, 8)), false)
        );
        assert_eq!(testbed.producer(), 5);
        assert_eq!(testbed.posted(4), 7);
    }

    #[test]
    fn reset_empties() {
        let testbed = Testbed::new();
        assert_eq!(testbed.post(&(0..8).collect::<Vec<_>>(), 99), (None, false));
        testbed.queue.reset(&testbed.region, RECV);
        assert_eq!(testbed.producer(), 0);
        assert_eq!(testbed.post(&(10..18).collect::<Vec<_>>(), 99), (None, false));
        assert_eq!((testbed.producer(), testbed.posted(0)), (8, 10));
    }
}
