// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The ways in which a worker waits for the work of a guest: it polls, naps or sleeps.
//!
//! On a processor of its own a worker polls for as long as [`Spin`] says, and then sleeps until the guest kicks. Where
//! other threads want the processor ([`Contention`](super::spin::Contention)), polling takes it from the thread that
//! has the guest's next work. But sleeping is dear there too if the guest's programs poll: each of their doorbells is
//! an exit from the guest and a wake-up, for a single work request, because a worker that is woken at once takes the
//! first one before the program has posted the second. The worker then gets less than its fair share of the processor,
//! and spends most of that on wake-ups.
//!
//! So the worker naps: it sleeps for [`NAP`] with the guest unarmed, so that no doorbell rings, and finds a batch of
//! work afterwards. [`Naps`] knows whether that pays: a batch takes longer than one message, so there is a least work
//! that is worth a nap ([`WORTH`]). Without that the guest is armed again after [`CREDIT`] naps, and one nap in many
//! sleeps finds out whether the guest has more to do by now. There is no nap for a guest with programs that wait for
//! events: these programs leave the processor to the worker, and would wait for the end of the nap.

use std::time::{Duration, Instant};

use super::spin::Spin;

/// The length of a nap. A program that polls waits less for the end of a nap than for a worker that competes with it
/// for the processor.
pub const NAP: Duration = Duration::from_micros(40);

/// The least work for which a nap is worth its time. A program that posts one message of up to 64 KiB and polls for it
/// gives less, and would wait for the end of each nap.
const WORTH: Duration = Duration::from_micros(10);

/// The number of naps in a row that may find less work than [`WORTH`].
const CREDIT: u32 = 4;

/// The number of sleeps after which a nap is tried, at first and after naps that were worth it.
const FIRST_TRIAL: u32 = 4;

/// The highest number of sleeps after which a nap is tried. Each trial that fails doubles the number.
const LAST_TRIAL: u32 = 64;

/// A way in which a worker waits for the work of a guest.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Rest {
    /// The worker looks again in the next round.
    Poll,
    /// The worker sleeps for [`NAP`], and looks then. The guest is not armed.
    Nap,
    /// The guest is armed, and the worker sleeps until it kicks.
    Sleep,
}

/// Decides what a worker does for one guest without work.
#[derive(Debug)]
pub struct Idleness {
    /// The longest time that the worker polls.
    poll: Duration,
    spin: Spin,
    naps: Naps,
    /// The end of the nap. Other guests may have work meanwhile, so that the worker asks in each round.
    nap_end: Instant,
}

impl Idleness {
    /// Polls for `poll` at most. Without such a time there are no naps either.
    pub fn new(poll: Duration, now: Instant) -> Self {
        Self { poll, spin: Spin::new(poll, now), naps: Naps::default(), nap_end: now }
    }

    /// Notes work, which took `time` and was done by `now`.
    pub fn worked(&mut self, time: Duration, now: Instant) {
        self.spin.worked(now);
        self.naps.work += time;
    }

    /// Notes that there was no work, and returns what to do until there is. `contended`: other threads want the
    /// processor. `events`: the number of completion events that the guest has got so far, or `None` if its programs
    /// do not post to rings, so that they ring a doorbell anyway.
    pub fn rest(&mut self, now: Instant, contended: bool, events: Option<u64>) -> Rest {
        if !contended {
            self.naps = Naps::default();
        }
        let events = events.filter(|_| contended && !self.poll.is_zero());
        if events.is_some() && now < self.nap_end {
            return Rest::Nap;
        }
        let pays = events.is_some() && self.naps.pay();
        if !pays && self.spin.again(now, contended) {
            return Rest::Poll;
        }
        match events {
            Some(events) if self.naps.again(events) => {
                self.nap_end = now + NAP;
                Rest::Nap
            }
            _ => Rest::Sleep,
        }
    }
}

/// Knows whether naps pay for a guest.
#[derive(Debug)]
struct Naps {
    /// The work since the last rest.
    work: Duration,
    /// The number of completion events at the last rest.
    events: u64,
    /// The number of naps that may still find too little work.
    credit: u32,
    /// The number of sleeps since the last trial.
    sleeps: u32,
    /// The number of sleeps after which a nap is tried.
    trial: u32,
}

impl Default for Naps {
    fn default() -> Self {
        Self { work: Duration::ZERO, events: 0, credit: 0, sleeps: 0, trial: FIRST_TRIAL }
    }
}

impl Naps {
    /// Returns whether the last naps found enough work.
    fn pay(&self) -> bool {
        self.credit > 0
    }

    /// Judges the work since the last rest, and returns whether the next rest is a nap.
    fn again(&mut self, events: u64) -> bool {
        let worth = std::mem::take(&mut self.work) >= WORTH;
        let waits = std::mem::replace(&mut self.events, events) != events;
        if waits {
            self.credit = 0;
        } else if self.credit == 0 {
            self.count_sleep();
        } else if worth {
            (self.credit, self.trial) = (CREDIT, FIRST_TRIAL);
        } else {
            self.credit -= 1;
        }
        self.pay()
    }

    /// Counts a sleep, or makes a trial of it.
    fn count_sleep(&mut self) {
        self.sleeps += 1;
        if self.sleeps >= self.trial {
            (self.sleeps, self.credit) = (0, 1);
            self.trial = (2 * self.trial).min(LAST_TRIAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLL: Duration = Duration::from_micros(500);

    /// Rests `times` times on a contended processor, with work of `work` before each. Returns the number of naps.
    fn naps(idleness: &mut Idleness, now: &mut Instant, work: Duration, times: u32) -> u32 {
        let rests = (0..times).map(|_| {
            idleness.worked(work, *now);
            *now += NAP;
            idleness.rest(*now, true, Some(0))
        });
        u32::try_from(rests.filter(|rest| *rest == Rest::Nap).count()).unwrap()
    }

    #[test]
    fn a_worker_with_a_processor_of_its_own_polls_and_then_sleeps() {
        let now = Instant::now();
        let mut idleness = Idleness::new(POLL, now);
        idleness.worked(WORTH, now);
        assert_eq!(idleness.rest(now, false, Some(0)), Rest::Poll);
        assert_eq!(idleness.rest(now + POLL, false, Some(0)), Rest::Sleep);
    }

    #[test]
    fn a_worker_naps_for_programs_that_poll() {
        let mut now = Instant::now();
        let mut idleness = Idleness::new(POLL, now);
        assert_eq!(naps(&mut idleness, &mut now, WORTH, FIRST_TRIAL - 1), 0);
        assert_eq!(naps(&mut idleness, &mut now, WORTH, 1000), 1000);
        // Some naps may find nothing.
        for _ in 0..100 {
            assert_eq!(naps(&mut idleness, &mut now, Duration::ZERO, CREDIT - 1), CREDIT - 1);
            assert_eq!(naps(&mut idleness, &mut now, WORTH, 1), 1);
        }
        assert_eq!(naps(&mut idleness, &mut now, Duration::ZERO, CREDIT), CREDIT - 1);
    }

    #[test]
    fn a_guest_that_posts_little_is_armed() {
        let mut now = Instant::now();
        let mut idleness = Idleness::new(POLL, now);
        let little = WORTH / 2;
        naps(&mut idleness, &mut now, little, 1000);
        assert_eq!(naps(&mut idleness, &mut now, little, 10 * (LAST_TRIAL + 1)), 10);
        // A trial finds programs that poll. When they end, the guest is armed soon.
        naps(&mut idleness, &mut now, WORTH, LAST_TRIAL);
        assert_eq!(naps(&mut idleness, &mut now, WORTH, 100), 100);
        assert_eq!(naps(&mut idleness, &mut now, little, CREDIT), CREDIT - 1);
    }

    #[test]
    fn a_contended_processor_is_left_soon_or_at_once() {
        let mut now = Instant::now();
        let mut idleness = Idleness::new(POLL, now);
        idleness.worked(WORTH, now);
        // The program may be about to post the rest of a batch.
        assert_eq!(idleness.rest(now, true, Some(0)), Rest::Poll);
        naps(&mut idleness, &mut now, WORTH, FIRST_TRIAL);
        idleness.worked(WORTH, now);
        assert_eq!(idleness.rest(now, true, Some(0)), Rest::Nap);
    }

    #[test]
    fn a_nap_goes_on_while_other_guests_have_work() {
        let mut now = Instant::now();
        let mut idleness = Idleness::new(POLL, now);
        naps(&mut idleness, &mut now, WORTH, FIRST_TRIAL);
        for _ in 0..10 * CREDIT {
            assert_eq!(idleness.rest(now + NAP / 2, true, Some(0)), Rest::Nap);
        }
        // Without other threads, the worker polls as ever.
        assert_eq!(idleness.rest(now + NAP / 2, false, Some(0)), Rest::Poll);
    }

    #[test]
    fn there_are_no_naps_for_programs_that_wait_for_events() {
        let mut now = Instant::now();
        let mut idleness = Idleness::new(POLL, now);
        naps(&mut idleness, &mut now, WORTH, FIRST_TRIAL);
        for events in 1..1000 {
            now += NAP;
            idleness.worked(WORTH, now);
            now += NAP;
            assert_eq!(idleness.rest(now, true, Some(events)), Rest::Sleep);
        }
        assert_eq!(
            naps(&mut idleness, &mut now, WORTH, 2 * LAST_TRIAL),
            2 * LAST_TRIAL - 2 * FIRST_TRIAL
        );
    }

    #[test]
    fn without_polling_and_without_rings_there_are_no_naps() {
        let mut now = Instant::now();
        let mut idleness = Idleness::new(POLL, now);
        for _ in 0..1000 {
            idleness.worked(WORTH, now);
            now += NAP;
            assert_eq!(idleness.rest(now, true, None), Rest::Sleep);
        }
        let mut idleness = Idleness::new(Duration::ZERO, now);
        assert_eq!(naps(&mut idleness, &mut now, WORTH, 1000), 0);
        assert_eq!(idleness.rest(now, true, Some(0)), Rest::Sleep);
    }
}
