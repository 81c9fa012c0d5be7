// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Timers: when queues that wait are visited again.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::BuildHasherDefault;
use std::time::Instant;

use super::by_key::KeyHasher;
use super::image::Moment;

/// Times that no longer hold stay in the heap until they come up; where setting one finds more of
/// them than this and as many as hold, they go.
const STALE: usize = 64;

/// At most one time for each queue, by its number in [`super::queues::Jobs`].
///
/// Most times are set and taken back before they come, so to set and to take back is cheap.
#[derive(Default)]
pub(crate) struct Timers {
    by_queue: HashMap<u16, Instant, BuildHasherDefault<KeyHasher>>,
    /// These times, and others that do not hold any more.
    order: BinaryHeap<Reverse<(Instant, u16)>>,
}

impl Timers {
    /// Sets or takes back the time of a queue.
    pub fn set(&mut self, queue: u16, deadline: Option<Instant>) {
        let Some(deadline) = deadline else {
            self.by_queue.remove(&queue);
            return;
        };
        if self.by_queue.insert(queue, deadline) == Some(deadline) {
            return;
        }
        self.order.push(Reverse((deadline, queue)));
        if self.order.len() > 2 * self.by_queue.len() + STALE {
            let hold = self.by_queue.iter().map(|(&queue, &deadline)| Reverse((deadline, queue)));
            self.order = hold.collect();
        }
    }

    /// Takes all back.
    pub fn clear(&mut self) {
        self.by_queue.clear();
        self.order.clear();
    }

    /// Returns the times of all queues, in the order of their numbers.
    pub fn save(&self, now: Instant) -> Vec<(u16, Moment)> {
        let mut times: Vec<_> =
            self.by_queue.iter().map(|(queue, time)| (*queue, Moment::of(*time, now))).collect();
        times.sort_unstable_by_key(|(queue, _)| *queue);
        times
    }

    /// Returns the earliest time.
    pub fn next(&mut self) -> Option<Instant> {
        while let Some(&Reverse((deadline, queue))) = self.order.peek() {
            if self.by_queue.get(&queue) == Some(&deadline) {
                return Some(deadline);
            }
            self.order.pop();
        }
        None
    }

    /// Takes a queue whose time has come.
    #[inline]
    pub fn pop(&mut self, now: Instant) -> Option<u16> {
        self.next().filter(|deadline| *deadline <= now)?;
        let Reverse((_, queue)) = self.order.pop()?;
        self.by_queue.remove(&queue);
        Some(queue)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_the_last_time_of_a_queue_counts() {
        let now = Instant::now();
        let at = |millis| now + Duration::from_millis(millis);
        let mut timers = Timers::default();
        assert_eq!((timers.next(), timers.pop(now)), (None, None));
        timers.set(1, Some(at(5)));
        timers.set(2, Some(at(3)));
        timers.set(1, Some(at(2)));
        timers.set(3, Some(at(1)));
        timers.set(3, None);
        assert_eq!(timers.next(), Some(at(2)));
        assert_eq!(timers.pop(at(1)), None);
        assert_eq!(timers.pop(at(2)), Some(1));
        // Queue 1 gets the time 5 again, and gets it twice.
        timers.set(1, Some(at(5)));
        timers.set(1, Some(at(5)));
        assert_eq!(
            [timers.pop(at(9)), timers.pop(at(9)), timers.pop(at(9))],
            [Some(2), Some(1), None]
        );
        timers.set(4, Some(at(7)));
        timers.clear();
        assert_eq!(timers.next(), None);
    }

    #[test]
    fn what_no_longer_holds_does_not_pile_up() {
        let now = Instant::now();
        let mut timers = Timers::default();
        for micros in 0..10_000 {
            timers.set((micros % 8) as u16, Some(now + Duration::from_micros(micros)));
            timers.set(9, None);
            assert!(timers.order.len() <= 2 * 8 + STALE);
        }
        let late = now + Duration::from_secs(1);
        let queues: Vec<u16> = std::iter::from_fn(|| timers.pop(late)).collect();
        assert_eq!(queues, [0, 1, 2, 3, 4, 5, 6, 7]);
    }
}
