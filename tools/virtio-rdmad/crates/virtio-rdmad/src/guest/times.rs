// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Counts the time of a worker by its use.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::histogram::{self, Histogram};

/// A use of time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Doing {
    /// Turns that had work, and help with large copies of other workers.
    Work,
    /// Polling without finding work.
    Poll,
    /// Neither, because other threads had the processor.
    Wait,
}

/// The times and counts of one worker. Only the worker writes them, so it needs no atomic additions, and they share no
/// cache line with what others write.
#[derive(Debug)]
#[repr(align(128))]
pub struct Times {
    begin: Instant,
    work: AtomicU64,
    poll: AtomicU64,
    wait: AtomicU64,
    rounds: AtomicU64,
    sleeps: AtomicU64,
    asleep: AtomicBool,
    worked_rounds: Histogram,
    turns: Histogram,
}

/// The values of [`Times`] at one moment.
#[derive(Clone, Debug)]
pub struct Reading {
    /// Time in turns that had work, and in which the worker helped others.
    pub work: Duration,
    /// Time spent polling without finding work.
    pub poll: Duration,
    /// Time in which the worker was ready to do either and other threads had the processor.
    pub wait: Duration,
    /// All other time since the worker was made.
    pub sleep: Duration,
    /// The number of rounds over all guests.
    pub rounds: u64,
    /// The number of times that the worker went to sleep.
    pub sleeps: u64,
    /// Whether it sleeps now.
    pub asleep: bool,
    /// The durations of rounds with work.
    pub worked_rounds: histogram::Reading,
    /// The durations of turns with work.
    pub turns: histogram::Reading,
}

impl Times {
    /// Makes times and counts that are all zero.
    pub fn new() -> Self {
        Self {
            begin: Instant::now(),
            work: AtomicU64::new(0),
            poll: AtomicU64::new(0),
            wait: AtomicU64::new(0),
            rounds: AtomicU64::new(0),
            sleeps: AtomicU64::new(0),
            asleep: AtomicBool::new(false),
            worked_rounds: Histogram::default(),
            turns: Histogram::default(),
        }
    }

    /// Adds time that was spent on something. Time that is never added counts as sleep.
    pub fn add(&self, doing: Doing, time: Duration) {
        let counter = match doing {
            Doing::Work => &self.work,
            Doing::Poll => &self.poll,
            Doing::Wait => &self.wait,
        };
        add(counter, u64::try_from(time.as_nanos()).unwrap_or(0));
    }

    /// Counts a round.
    pub fn count_round(&self) {
        add(&self.rounds, 1);
    }

    /// Counts a round that had work, and took this long.
    pub fn count_worked_round(&self, time: Duration) {
        self.worked_rounds.record(time);
    }

    /// Counts a turn of a guest that had work, and took this long.
    pub fn count_turn(&self, time: Duration) {
        self.turns.record(time);
    }

    /// Notes that the worker goes to sleep, or has woken up.
    pub fn sleeps(&self, asleep: bool) {
        if asleep {
            add(&self.sleeps, 1);
        }
        self.asleep.store(asleep, Ordering::Release);
    }

    /// Returns whether the worker sleeps.
    pub fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::Acquire)
    }

    /// Returns the values of this moment.
    pub fn read(&self) -> Reading {
        let asleep = self.is_asleep();
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let [work, poll, wait] =
            [&self.work, &self.poll, &self.wait].map(|counter| Duration::from_nanos(get(counter)));
        let sleep = self.begin.elapsed().saturating_sub(work + poll + wait);
        let (rounds, sleeps) = (get(&self.rounds), get(&self.sleeps));
        let (worked_rounds, turns) = (self.worked_rounds.read(), self.turns.read());
        Reading { work, poll, wait, sleep, rounds, sleeps, asleep, worked_rounds, turns }
    }
}

/// Adds to a counter of which this thread is the only writer.
pub fn add(counter: &AtomicU64, value: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
}
