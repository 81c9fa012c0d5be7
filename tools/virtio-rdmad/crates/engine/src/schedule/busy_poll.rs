// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Busy polling: queues that had work lately are looked at without being kicked.
//!
//! With many QPs nearly all of these looks find nothing, so a ring is not visited for a look: a
//! [`Watch`] reads the producer's index, and nothing else.

use crate::base::ready_set::Set;
use crate::queue::wq_ring::Watch;

/// Looks that find nothing, at all queues together, after which a queue is no longer busy-polled; and
/// the fewest and most at one queue.
const IDLE_LOOKS: usize = 4096;
const FEWEST_LOOKS: usize = 8;
const MOST_LOOKS: usize = 512;

/// The most queues that one round looks at; the next round goes on behind them.
const LOOKS: usize = 1024;

/// A queue that is busy-polled.
struct Polled {
    queue: u16,
    /// The generation of its watch.
    generation: u64,
    /// Looks that found nothing since it had work.
    idle: u16,
    /// `None`: only a visit tells whether there is work.
    watch: Option<Watch>,
}

/// The queues that are busy-polled, in no order.
pub(crate) struct BusyPoll {
    all: Vec<Polled>,
    /// The index of each queue in `all`, plus one; 0 if the queue is not busy-polled.
    places: Box<[u16]>,
    /// Queues where looks found nothing for long enough, until [`Self::next_tired`] returns them.
    tired: Vec<u16>,
    /// The index in `all` at which the next look begins.
    cursor: usize,
    /// Watches of earlier generations are not looked at any more.
    generation: u64,
}

impl BusyPoll {
    /// Returns a set without queues, for so many of them.
    pub fn new(queues: u16) -> Self {
        let (all, tired) = (Vec::new(), Vec::new());
        Self { all, places: vec![0; queues.into()].into(), tired, cursor: 0, generation: 0 }
    }

    /// Returns the entry of a queue, which is busy-polled from now on.
    fn place(&mut self, queue: u16) -> &mut Polled {
        let place = &mut self.places[usize::from(queue)];
        if *place == 0 {
            self.all.push(Polled { queue, generation: self.generation, idle: 0, watch: None });
            // There are fewer than 2^16 queues.
            *place = self.all.len() as u16;
        }
        let polled = &mut self.all[usize::from(*place) - 1];
        polled.renew(self.generation);
        polled
    }

    /// Notes that a queue had work, and has no more: it is busy-polled from now on. `taken` is how far its
    /// ring was emptied; `watch` makes a watch of it, if it has a ring.
    pub fn had_work(
        &mut self,
        queue: u16,
        taken: Option<u32>,
        watch: impl FnOnce() -> Option<Watch>,
    ) {
        let polled = self.place(queue);
        polled.idle = 0;
        polled.follow(taken, watch);
    }

    /// Notes that a visit found no work; returns whether that was so for long enough.
    #[inline]
    pub fn was_empty(
        &mut self,
        queue: u16,
        taken: Option<u32>,
        watch: impl FnOnce() -> Option<Watch>,
    ) -> bool {
        let most = self.most();
        let polled = self.place(queue);
        polled.follow(taken, watch);
        polled.is_tired(most)
    }

    /// Ends the busy polling of a queue.
    pub fn remove(&mut self, queue: u16) {
        let place = std::mem::take(&mut self.places[usize::from(queue)]);
        let Some(at) = usize::from(place).checked_sub(1) else { return };
        self.all.swap_remove(at);
        if let Some(moved) = self.all.get(at) {
            self.places[usize::from(moved.queue)] = place;
        }
    }

    /// Returns a queue that is busy-polled, if there is one.
    pub fn any(&self) -> Option<u16> {
        self.all.last().map(|polled| polled.queue)
    }

    /// Ends the busy polling of all queues.
    pub fn clear(&mut self) {
        self.all.clear();
        self.tired.clear();
        self.places.fill(0);
    }

    /// Rings may have become others: the next look at each queue is a visit.
    pub fn forget_watches(&mut self) {
        self.generation += 1;
    }

    /// Looks at the queues, or at the next [`LOOKS`] of them: those that may have work are added to
    /// `active`. Returns how many it looked at.
    #[inline]
    pub fn look(&mut self, active: &mut Set) -> usize {
        let (most, len) = (self.most(), self.all.len());
        let begin = if len <= LOOKS || self.cursor >= len { 0 } else { self.cursor };
        let end = len.min(begin + LOOKS);
        self.cursor = end;
        let generation = self.generation;
        for polled in &mut self.all[begin..end] {
            polled.renew(generation);
            if polled.watch.as_ref().is_none_or(Watch::has_work) {
                active.insert(polled.queue);
            } else if polled.is_tired(most) {
                self.tired.push(polled.queue);
            }
        }
        end - begin
    }

    /// Returns a queue where the last look found nothing for long enough.
    pub fn next_tired(&mut self) -> Option<u16> {
        self.tired.pop()
    }

    /// Returns how many looks at one queue may find nothing before it is tired.
    fn most(&self) -> u16 {
        // If no queue is in the set, one is about to come.
        let share = IDLE_LOOKS / self.all.len().max(1);
        share.clamp(FEWEST_LOOKS, MOST_LOOKS) as u16
    }
}

impl Polled {
    /// Drops a watch of an earlier generation.
    #[inline]
    fn renew(&mut self, generation: u64) {
        if self.generation != generation {
            self.generation = generation;
            self.watch = None;
        }
    }

    /// Follows with the watch after a visit.
    fn follow(&mut self, taken: Option<u32>, watch: impl FnOnce() -> Option<Watch>) {
        match (&mut self.watch, taken) {
            (Some(watch), Some(taken)) => watch.follow(taken),
            (place, Some(_)) => *place = watch(),
            (place, None) => *place = None,
        }
    }

    /// Counts a look that found nothing.
    fn is_tired(&mut self, most: u16) -> bool {
        self.idle = self.idle.saturating_add(1);
        self.idle >= most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looked_at(polled: &mut BusyPoll) -> Vec<u16> {
        let mut active = Set::new(100);
        polled.look(&mut active);
        (0..100).filter(|queue| active.contains(*queue)).collect()
    }

    #[test]
    fn queues_come_and_go() {
        let mut polled = BusyPoll::new(100);
        for queue in [3, 50, 99, 7, 50] {
            polled.had_work(queue, None, || None);
        }
        assert_eq!(looked_at(&mut polled), [3, 7, 50, 99]);
        polled.remove(3);
        polled.remove(3);
        assert_eq!(looked_at(&mut polled), [7, 50, 99]);
        polled.remove(99);
        polled.remove(7);
        assert_eq!((polled.any(), looked_at(&mut polled)), (Some(50), vec![50]));
        polled.clear();
        assert!(polled.any().is_none() && looked_at(&mut polled).is_empty());
    }

    #[test]
    fn looks_in_vain_are_counted_until_there_is_work() {
        let mut polled = BusyPoll::new(100);
        for _ in 1..MOST_LOOKS {
            assert!(!polled.was_empty(5, None, || None));
        }
        polled.had_work(5, None, || None);
        for _ in 1..MOST_LOOKS {
            assert!(!polled.was_empty(5, None, || None));
        }
        assert!(polled.was_empty(5, None, || None));
    }

    #[test]
    fn many_queues_are_looked_at_less() {
        let mut polled = BusyPoll::new(60_000);
        for queue in 0..60_000 {
            polled.had_work(queue, None, || None);
        }
        for _ in 1..FEWEST_LOOKS {
            assert!(!polled.was_empty(5, None, || None));
        }
        assert!(polled.was_empty(5, None, || None));
    }
}
