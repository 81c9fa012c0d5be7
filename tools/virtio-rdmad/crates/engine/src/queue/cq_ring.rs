// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Completion rings in guest memory (specification, Completion queues).

use std::mem::offset_of;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use abi::{virtio_rdma_cq_ring, virtio_rdma_ring_cqe};
use memory::atomic::fence;
use memory::{GuestMemory, MemoryError, Pages};
use serde::{Deserialize, Serialize};
use zerocopy::transmute;

use crate::base::host::Clock;
use crate::base::image::{require, Moment, Wrong};
use crate::base::limits::Limits;
use crate::memory::page_list::{check_region, find_pages, Range};

const HEAD: usize = size_of::<virtio_rdma_cq_ring>();
const CQE: usize = size_of::<virtio_rdma_ring_cqe>();
const CONSUMER: usize = offset_of!(virtio_rdma_cq_ring, consumer);
const ARM_NEXT: usize = offset_of!(virtio_rdma_cq_ring, arm_next);
const ARM_SOLICITED: usize = offset_of!(virtio_rdma_cq_ring, arm_solicited);

/// The reason why a CQE was not placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotPlaced {
    /// The ring is full of CQEs that the owner has not taken, or the owner says so.
    Overflow,
    /// The ring is not in the guest's memory.
    Lost,
}

impl From<MemoryError> for NotPlaced {
    fn from(_: MemoryError) -> Self {
        Self::Lost
    }
}

/// Whether an event is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// No event is due.
    No,
    /// An event is due, in this vector.
    Now(u16),
    /// An event is held back until then.
    At(Instant),
}

/// The moderation of events: how long an event is held back.
#[derive(Clone, Copy)]
struct Moderation {
    /// The event is held back until there are so many completions.
    count: u32,
    /// The event is held back no longer than this, from the first of these completions on.
    period: Duration,
}

/// An event that is held back.
struct Held {
    /// Completions so far.
    count: u32,
    /// The time at which the first of these completions was placed.
    since: Instant,
}

/// Returns the bytes of the region of a CQ with `cqe` entries.
pub(crate) fn region_len(cqe: u32) -> u64 {
    HEAD as u64 + u64::from(cqe) * CQE as u64
}

/// The device's side of a completion ring.
pub(crate) struct CqRing {
    /// `None` while the region is not in the guest's memory.
    pages: Option<Pages>,
    ranges: Box<[Range]>,
    /// Entries, as a power of two.
    depth_log2: u32,
    /// Index of the next CQE.
    produced: u32,
    /// The consumer's index, as it was last read.
    consumer: u32,
    /// `arm_next` and `arm_solicited` at the last event.
    armed: [u32; 2],
    /// CQEs that were placed since the owner's wish was last looked at.
    fresh: u32,
    /// CQEs among these from the first on that is solicited or an error; 0 if there is no such CQE.
    fresh_solicited: u32,
    /// The moderation that MODIFY_CQ asked for.
    moderation: Option<Moderation>,
    /// The event that the owner waits for.
    held: Option<Held>,
    /// Completion event virtqueue.
    pub vector: u16,
}

/// The image of the ring of a CQ.
#[derive(Serialize, Deserialize)]
pub(crate) struct CqRingImage {
    ranges: Vec<Range>,
    has_pages: bool,
    cqe: u32,
    produced: u32,
    consumer: u32,
    armed: [u32; 2],
    fresh: [u32; 2],
    moderation: Option<(u16, u16)>,
    held: Option<(u32, Moment)>,
    vector: u16,
}

impl CqRingImage {
    /// Returns the ring, whose region has `room` pages at most.
    pub fn load(
        self,
        memory: &GuestMemory,
        limits: &Limits,
        room: usize,
        now: Instant,
    ) -> Result<CqRing, Wrong> {
        let Self { ranges, has_pages, cqe, vector, .. } = self;
        require(cqe.is_power_of_two() && cqe <= limits.ring_cqe, "it has another size")?;
        require(vector < limits.comp_vectors, "its vector does not exist")?;
        let len = check_region(&ranges, room)?;
        require(len >= region_len(cqe), "its region is too short")?;
        let pages = has_pages.then(|| find_pages(memory, &ranges)).transpose()?;
        let held = self.held.map(|(count, since)| Held { count, since: since.time(now) });
        let [fresh, fresh_solicited] = self.fresh;
        let (produced, consumer, armed) = (self.produced, self.consumer, self.armed);
        let depth_log2 = cqe.ilog2();
        let mut ring = CqRing {
            pages,
            ranges: ranges.into(),
            depth_log2,
            produced,
            consumer,
            armed,
            fresh,
            fresh_solicited,
            moderation: None,
            held,
            vector,
        };
        if let Some((count, period)) = self.moderation {
            ring.moderate(count, period);
        }
        Ok(ring)
    }
}

impl CqRing {
    /// Returns the image.
    pub fn save(&self, now: Instant) -> CqRingImage {
        let moderation = |Moderation { count, period }: Moderation| {
            // MODIFY_CQ has 16 bits for each.
            (count as u16, period.as_micros() as u16)
        };
        CqRingImage {
            ranges: self.ranges.to_vec(),
            has_pages: self.pages.is_some(),
            cqe: self.depth(),
            produced: self.produced,
            consumer: self.consumer,
            armed: self.armed,
            fresh: [self.fresh, self.fresh_solicited],
            moderation: self.moderation.map(moderation),
            held: self.held.as_ref().map(|held| (held.count, Moment::of(held.since, now))),
            vector: self.vector,
        }
    }

    /// Returns a ring of `cqe` entries, a power of two, in a region that holds them.
    pub fn new(pages: Pages, ranges: Box<[Range]>, cqe: u32, vector: u16) -> Self {
        Self {
            pages: Some(pages),
            ranges,
            depth_log2: cqe.ilog2(),
            produced: 0,
            consumer: 0,
            armed: [0; 2],
            fresh: 0,
            fresh_solicited: 0,
            moderation: None,
            held: None,
            vector,
        }
    }

    /// Returns how many pages the region has.
    pub fn pages_len(&self) -> usize {
        self.ranges.iter().map(Range::pages).sum()
    }

    /// Returns the ranges of the region.
    pub fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    /// Follows a change of the memory map; with `None`, the region is not in memory.
    pub fn set_pages(&mut self, pages: Option<Pages>) {
        self.pages = pages;
    }

    fn depth(&self) -> u32 {
        1 << self.depth_log2
    }

    fn place_of(&self, index: u32) -> usize {
        HEAD + (index & (self.depth() - 1)) as usize * CQE
    }

    /// Places a CQE, and remembers whether it is solicited or an error.
    #[inline]
    pub fn place(&mut self, cqe: &virtio_rdma_ring_cqe, wakes: bool) -> Result<(), NotPlaced> {
        let pages = self.pages.as_ref().ok_or(NotPlaced::Lost)?;
        let index = self.produced;
        if index.wrapping_sub(self.consumer) >= self.depth() {
            self.consumer = pages.load_u32(CONSUMER, Ordering::Acquire)?;
            if index.wrapping_sub(self.consumer) >= self.depth() {
                return Err(NotPlaced::Overflow);
            }
        }
        let mut cqe = *cqe;
        cqe.lap = (index >> self.depth_log2).wrapping_add(1);
        let words: [u64; CQE / 8] = transmute!(cqe);
        pages.publish(self.place_of(index), &words)?;
        self.produced = index.wrapping_add(1);
        self.fresh = self.fresh.saturating_add(1);
        let counts = wakes || self.fresh_solicited != 0;
        self.fresh_solicited = self.fresh_solicited.saturating_add(counts.into());
        Ok(())
    }

    /// Returns the words `arm_next` and `arm_solicited`, by which the owner asks for events.
    fn wish(&self) -> Option<[u32; 2]> {
        let pages = self.pages.as_ref()?;
        let load = |at| pages.load_u32(at, Ordering::Relaxed).ok();
        Some([load(ARM_NEXT)?, load(ARM_SOLICITED)?])
    }

    /// Looks whether the owner wants an event for what was placed since this
    /// was last asked. An event disarms.
    pub fn take_event(&mut self, clock: &dyn Clock) -> Due {
        let fresh = std::mem::take(&mut self.fresh);
        let fresh_solicited = std::mem::take(&mut self.fresh_solicited);
        if fresh == 0 {
            return Due::No;
        }
        if let Some(held) = &mut self.held {
            held.count = held.count.saturating_add(fresh);
            let enough = self.moderation.is_none_or(|moderation| held.count >= moderation.count);
            return if enough { self.release() } else { Due::No };
        }
        // The owner writes its wish and then looks for CQEs; this side the reverse.
        fence(Ordering::SeqCst);
        let Some(wish) = self.wish() else { return Due::No };
        let [next, on_solicited] = wish;
        // Completions from the one on that makes the event due.
        let counted = if next != self.armed[0] {
            fresh
        } else if on_solicited != self.armed[1] {
            fresh_solicited
        } else {
            0
        };
        if counted == 0 {
            return Due::No;
        }
        match self.moderation {
            Some(Moderation { count, period }) if counted < count => {
                let since = clock.now();
                self.held = Some(Held { count: counted, since });
                Due::At(since + period)
            }
            _ => {
                self.armed = wish;
                Due::Now(self.vector)
            }
        }
    }

    /// Looks after the event that is held back.
    pub fn take_held(&mut self, now: Instant) -> Due {
        let Some(held) = &self.held else { return Due::No };
        match self.moderation {
            Some(Moderation { count, period })
                if held.count < count && now < held.since + period =>
            {
                Due::At(held.since + period)
            }
            _ => self.release(),
        }
    }

    /// Ends the hold of the event, which is due now.
    fn release(&mut self) -> Due {
        self.held = None;
        match self.wish() {
            Some(wish) => {
                self.armed = wish;
                Due::Now(self.vector)
            }
            None => Due::No,
        }
    }

    /// Holds events back until there are `count` completions, or `period`
    /// microseconds have passed; not at all if either is 0.
    pub fn moderate(&mut self, count: u16, period: u16) {
        let moderation =
            Moderation { count: count.into(), period: Duration::from_micros(period.into()) };
        self.moderation = (count != 0 && period != 0).then_some(moderation);
    }

    /// Begins to move the CQEs that were not taken to another ring; `None` if they do not fit there.
    pub fn begin_move(&self, pages: Pages, ranges: Box<[Range]>, cqe: u32) -> Option<MovingCq> {
        let from = self.pages.as_ref()?.load_u32(CONSUMER, Ordering::Acquire).ok()?;
        let moving = MovingCq { new: Self::new(pages, ranges, cqe, self.vector), from };
        self.left(&moving).map(|_| moving)
    }

    /// Returns how many CQEs are yet to be moved; `None` if they do not fit.
    fn left(&self, moving: &MovingCq) -> Option<u32> {
        let count = self.produced.wrapping_sub(moving.from);
        if count > self.depth().min(moving.new.depth()) {
            return None;
        }
        count.checked_sub(moving.new.produced)
    }

    /// Moves up to `most` CQEs; how many. `None` if they do not fit.
    pub fn move_some(&self, moving: &mut MovingCq, most: u32) -> Option<u32> {
        let old = self.pages.as_ref()?;
        let count = self.left(moving)?.min(most);
        for _ in 0..count {
            let index = moving.from.wrapping_add(moving.new.produced);
            let mut cqe = [0; CQE];
            old.read(self.place_of(index), &mut cqe).ok()?;
            moving.new.place(&transmute!(cqe), false).ok()?;
        }
        Some(count)
    }

    /// Goes on in the other ring; how many CQEs were moved there. `None`, and the old ring is still
    /// in use, if they do not fit.
    pub fn end_move(&mut self, mut moving: MovingCq) -> Option<u32> {
        self.move_some(&mut moving, u32::MAX)?;
        let [next, solicited] = self.wish()?;
        let MovingCq { mut new, .. } = moving;
        let head = new.pages.as_ref()?;
        head.store_u32(ARM_NEXT, next, Ordering::Relaxed).ok()?;
        head.store_u32(ARM_SOLICITED, solicited, Ordering::Relaxed).ok()?;
        new.armed = self.armed;
        (new.fresh, new.fresh_solicited) = (self.fresh, self.fresh_solicited);
        (new.moderation, new.held) = (self.moderation, self.held.take());
        let moved = new.produced;
        *self = new;
        Some(moved)
    }
}

/// A completion ring that takes the place of another, and has a part of its CQEs so far.
pub(crate) struct MovingCq {
    new: CqRing,
    /// The consumer's index in the old ring: nobody polls meanwhile.
    from: u32,
}

#[cfg(test)]
mod tests {
    use memory::GuestMemory;
    use zerocopy::FromZeros;

    use super::*;
    use crate::base::host::SystemClock;

    const OTHER: u64 = 0x4000;
    const NOW: Due = Due::Now(0);

    fn region(memory: &GuestMemory, addr: u64) -> (Pages, Box<[Range]>) {
        let pages = Pages::new(memory, [(addr, 0x2000)]).unwrap();
        (pages, [Range { addr, len: 0x2000 }].into())
    }

    fn ring(memory: &GuestMemory, cqe: u32) -> CqRing {
        let (pages, ranges) = region(memory, 0);
        CqRing::new(pages, ranges, cqe, 0)
    }

    fn numbered(wr_id: u64) -> virtio_rdma_ring_cqe {
        let mut cqe = virtio_rdma_ring_cqe::new_zeroed();
        cqe.wr_id = wr_id;
        cqe
    }

    fn read(memory: &GuestMemory, base: u64, index: u32, depth: u32) -> (u64, u32) {
        let at = base + (HEAD + (index % depth) as usize * CQE) as u64;
        let cqe: virtio_rdma_ring_cqe = memory.read_obj(at).unwrap();
        (cqe.wr_id, cqe.lap)
    }

    #[test]
    fn laps_count_on_when_the_index_wraps() {
        let memory = GuestMemory::anonymous(&[(0, 0x8000)]).unwrap();
        let mut ring = ring(&memory, 4);
        let start = u32::MAX - 5;
        (ring.produced, ring.consumer) = (start, start);
        for step in 0..12_u32 {
            let index = start.wrapping_add(step);
            memory.write(0, &index.to_le_bytes()).unwrap();
            ring.place(&numbered(index.into()), false).unwrap();
            assert_eq!(read(&memory, 0, index, 4), (index.into(), index / 4 + 1));
        }
    }

    #[test]
    fn overflow_writes_over_nothing() {
        let memory = GuestMemory::anonymous(&[(0, 0x8000)]).unwrap();
        for consumer in [0_u32, 5, u32::MAX] {
            let mut ring = ring(&memory, 4);
            memory.write(0, &0_u32.to_le_bytes()).unwrap();
            for index in 0..4 {
                ring.place(&numbered(index), false).unwrap();
            }
            memory.write(0, &consumer.to_le_bytes()).unwrap();
            assert_eq!(ring.place(&numbered(9), false), Err(NotPlaced::Overflow));
            assert_eq!(read(&memory, 0, 0, 4), (0, 1));
        }
    }

    #[test]
    fn an_event_disarms() {
        let memory = GuestMemory::anonymous(&[(0, 0x8000)]).unwrap();
        let mut ring = ring(&memory, 64);
        let arm = |at: usize, value: u32| memory.write(at as u64, &value.to_le_bytes()).unwrap();
        let mut due = |wakes| {
            ring.place(&numbered(0), wakes).unwrap();
            ring.take_event(&SystemClock) == NOW
        };
        assert!(!due(true));
        arm(ARM_NEXT, 1);
        assert!(due(false) && !due(true));
        arm(ARM_SOLICITED, 1);
        assert!(!due(false) && due(true) && !due(true));
        arm(ARM_NEXT, 2);
        arm(ARM_SOLICITED, 2);
        assert!(due(false) && !due(true));
        arm(ARM_NEXT, 3);
        assert_eq!(ring.take_event(&SystemClock), Due::No, "nothing was placed");
    }

    /// Specification, Moderation of CQs: the first CQE that counts is the one that made the event due.
    #[test]
    fn moderation_counts_from_the_cqe_that_made_the_event_due() {
        let memory = GuestMemory::anonymous(&[(0, 0x8000)]).unwrap();
        for (at, fresh, due) in [(ARM_NEXT, 3, true), (ARM_SOLICITED, 3, false)] {
            let mut ring = ring(&memory, 64);
            ring.moderate(3, u16::MAX);
            memory.write(ARM_NEXT as u64, &[0; 8]).unwrap();
            memory.write(at as u64, &1_u32.to_le_bytes()).unwrap();
            for index in 1..=fresh {
                ring.place(&numbered(0), index == fresh).unwrap();
            }
            assert_eq!(ring.take_event(&SystemClock) == NOW, due);
            if !due {
                ring.place(&numbered(0), false).unwrap();
                assert_eq!(ring.take_event(&SystemClock), Due::No);
                ring.place(&numbered(0), false).unwrap();
                assert_eq!(ring.take_event(&SystemClock), NOW);
            }
        }
    }

    #[test]
    fn resizing_moves_what_was_not_taken() {
        let memory = GuestMemory::anonymous(&[(0, 0x8000)]).unwrap();
        let mut ring = ring(&memory, 8);
        for index in 0..8 {
            ring.place(&numbered(index), false).unwrap();
        }
        memory.write(0, &3_u32.to_le_bytes()).unwrap();
        memory.write(ARM_NEXT as u64, &7_u32.to_le_bytes()).unwrap();
        let (pages, ranges) = region(&memory, OTHER);
        assert!(ring.begin_move(pages, ranges, 4).is_none());
        let (pages, ranges) = region(&memory, OTHER);
        let mut moving = ring.begin_move(pages, ranges, 16).unwrap();
        assert_eq!(ring.move_some(&mut moving, 3), Some(3));
        assert_eq!(ring.end_move(moving), Some(5));
        ring.place(&numbered(8), false).unwrap();
        let found: Vec<_> = (0..6).map(|index| read(&memory, OTHER, index, 16)).collect();
        assert_eq!(found, [(3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1)]);
        assert_eq!(memory.read_obj::<u32>(OTHER + ARM_NEXT as u64), Ok(7));
        assert_eq!(ring.take_event(&SystemClock), NOW);
    }
}
