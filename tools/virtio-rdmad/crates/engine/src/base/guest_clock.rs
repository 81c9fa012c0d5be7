// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The time of a guest, which stands still while its device is frozen.
//!
//! All times of a guest are times of this clock: retries, RNR timers, the timers of windows, rates. So a freeze makes
//! none of them expire, and each of them has as much left afterwards as before.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::host::Clock;

/// The value of [`GuestClock::stopped`] while the clock runs.
const RUNS: u64 = u64::MAX;

/// The clock of a guest: that of the network, less the time for which it stood still. Any thread may read it. It is
/// stopped and started by the guest's own thread.
pub(crate) struct GuestClock {
    /// The nanoseconds from `origin` to the time of the clock while the clock stands still; [`RUNS`] while it runs.
    stopped: AtomicU64,
    /// The nanoseconds for which it stood still.
    lag: AtomicU64,
    clock: Arc<dyn Clock>,
    origin: Instant,
}

impl GuestClock {
    /// Returns a clock that runs, and shows the time of the clock of the network.
    pub fn new(clock: &Arc<dyn Clock>) -> Self {
        Self {
            stopped: AtomicU64::new(RUNS),
            lag: AtomicU64::new(0),
            clock: Arc::clone(clock),
            origin: clock.now(),
        }
    }

    /// Returns whether the clock stands still. A thread that has taken a lock after the stopping thread had it sees
    /// that the clock was stopped before.
    #[inline]
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire) != RUNS
    }

    /// Stops the clock.
    pub fn stop(&self) {
        if !self.is_stopped() {
            self.stopped.store(nanos(self.now() - self.origin), Ordering::Release);
        }
    }

    /// Starts the clock again. Returns whether it stood still.
    pub fn start(&self) -> bool {
        let stopped = self.stopped.load(Ordering::Acquire);
        if stopped == RUNS {
            return false;
        }
        let lag = nanos(self.clock.now() - self.origin).saturating_sub(stopped);
        // A thread that finds that the clock runs finds this value as well.
        self.lag.store(lag, Ordering::Release);
        self.stopped.store(RUNS, Ordering::Release);
        true
    }

    /// Returns the time that the clock of the network shows when this clock shows `time`, if this clock runs until
    /// then.
    pub fn in_network(&self, time: Instant) -> Instant {
        time + Duration::from_nanos(self.lag.load(Ordering::Acquire))
    }
}

impl Clock for GuestClock {
    fn now(&self) -> Instant {
        // This comes first: a clock that was stopped and started meanwhile shows an earlier time, and no later one.
        let now = self.clock.now();
        match self.stopped.load(Ordering::Acquire) {
            RUNS => {
                let lag = Duration::from_nanos(self.lag.load(Ordering::Acquire));
                now.checked_sub(lag).unwrap_or(self.origin)
            }
            stopped => self.origin + Duration::from_nanos(stopped),
        }
    }
}

/// Returns a time in nanoseconds, of which 64 bits hold those of 584 years.
fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(RUNS - 1)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    struct Hand(Mutex<Instant>);

    impl Clock for Hand {
        fn now(&self) -> Instant {
            *self.0.lock().unwrap()
        }
    }

    /// The clock goes on where it was stopped, as often as that happens, and stopping it twice changes nothing.
    #[test]
    fn time_goes_on_where_it_stood_still() {
        let second = Duration::from_secs(1);
        let hand = Arc::new(Hand(Mutex::new(Instant::now())));
        let pass = || *hand.0.lock().unwrap() += second;
        let clock = GuestClock::new(&(Arc::clone(&hand) as Arc<dyn Clock>));
        let origin = clock.now();
        for round in 1..4 {
            pass();
            clock.stop();
            pass();
            clock.stop();
            assert!(clock.is_stopped());
            assert_eq!(clock.now(), origin + second * round);
            assert!(clock.start() && !clock.start());
            assert_eq!(clock.now(), origin + second * round);
            assert_eq!(clock.in_network(clock.now()), hand.now());
        }
    }
}
