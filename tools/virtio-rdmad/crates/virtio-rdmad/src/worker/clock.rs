// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Measures how long a thread took, and for how much of that time it had a processor.

use std::time::{Duration, Instant};

use rustix::time::{clock_gettime, ClockId};

/// A time that is longer than this may include time without a processor. For a shorter one it is not
/// worth a system call to know.
const ASK: Duration = Duration::from_micros(50);

/// Time that passed.
#[derive(Clone, Copy, Debug)]
pub struct Passed {
    /// The time in which the thread ran.
    pub ran: Duration,
    /// The time in which it was ready to run and other threads had the processor.
    pub waited: Duration,
}

impl Passed {
    /// Returns the sum of both.
    pub fn total(self) -> Duration {
        self.ran + self.waited
    }
}

/// The clock of one thread.
#[derive(Debug)]
pub struct ThreadClock {
    now: Instant,
    /// The time at which the kernel was last asked how long the thread had run, and the answer.
    asked: (Instant, Duration),
}

impl ThreadClock {
    /// Starts a clock now.
    pub fn new() -> Self {
        let now = Instant::now();
        Self { now, asked: (now, processor_time()) }
    }

    /// Returns the time of the last look.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Looks at the clock, and returns the time that passed since the last look.
    pub fn look(&mut self) -> Passed {
        let now = Instant::now();
        let total = now.saturating_duration_since(self.now);
        self.now = now;
        let waited = if total < ASK { Duration::ZERO } else { self.waited().min(total) };
        Passed { ran: total.saturating_sub(waited), waited }
    }

    /// Looks at the clock after a sleep. The time of the sleep does not count as passed.
    pub fn wake(&mut self) {
        *self = Self::new();
    }

    /// Asks the kernel how long the thread did not run since it last asked.
    fn waited(&mut self) -> Duration {
        let (then, had) = std::mem::replace(&mut self.asked, (self.now, processor_time()));
        let ran = self.asked.1.saturating_sub(had);
        self.now.saturating_duration_since(then).saturating_sub(ran)
    }
}

/// Returns how long this thread has run so far.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    // Neither is ever negative.
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_without_the_processor_is_apart() {
        let mut clock = ThreadClock::new();
        std::thread::sleep(10 * ASK);
        let passed = clock.look();
        assert!(passed.waited > passed.ran, "{passed:?}");
        assert!(passed.total() >= 10 * ASK);
    }

    #[test]
    fn what_a_sleep_took_did_not_pass() {
        let mut clock = ThreadClock::new();
        std::thread::sleep(10 * ASK);
        clock.wake();
        let start = clock.now();
        assert_eq!(start + clock.look().total(), clock.now());
    }

    #[test]
    fn time_with_the_processor_is_not_waited_for() {
        let mut clock = ThreadClock::new();
        let start = processor_time();
        while processor_time() < start + 20 * ASK {}
        // Another process may have had the processor meanwhile, or not.
        assert!(clock.look().ran >= 20 * ASK);
    }
}
