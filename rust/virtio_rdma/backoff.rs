// SPDX-License-Identifier: GPL-2.0

//! The times at which a device that has failed is tried again: at once, then after 1, 2, 4 … 60 s.

#![deny(unsafe_code)]

use kernel::time::{
    Delta,
    Instant,
    Monotonic, //
};

/// The longest delay, in seconds.
const LONGEST: u32 = 60;

/// A device that works for so many times the delay before, and for a second, starts from the beginning.
const TIMES: u32 = 4;

/// The delays between attempts to take a device into service again.
pub(crate) struct Backoff {
    /// Attempts since the device has last worked for long.
    attempts: u32,
    /// The last delay, in seconds.
    delay: u32,
    /// The time since which the device works.
    works: Option<Instant<Monotonic>>,
}

impl Backoff {
    /// Makes the delays of a device that has never failed.
    pub(crate) const fn new() -> Self {
        Self {
            attempts: 0,
            delay: 0,
            works: None,
        }
    }

    /// Notes that the device works from now on.
    pub(crate) fn works(&mut self) {
        self.works = Some(Instant::now());
    }

    /// Counts an attempt. Returns how many seconds it has to wait.
    pub(crate) fn attempt(&mut self) -> u32 {
        let long = Delta::from_secs((TIMES * self.delay).max(1).into());
        if self
            .works
            .take()
            .is_some_and(|since| since.elapsed() >= long)
        {
            self.attempts = 0;
        }
        let delay = match self.attempts {
            0 => 0,
            attempts => 1 << (attempts - 1).min(LONGEST.ilog2() + 1),
        };
        self.attempts = self.attempts.saturating_add(1);
        self.delay = delay.min(LONGEST);
        self.delay
    }
}

#[cfg(virtio_rdma_kunit)]
#[kernel::macros::kunit_tests(virtio_rdma_backoff)]
#[allow(unsafe_code)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow() {
        let mut backoff = Backoff::new();
        for delay in [0, 1, 2, 4, 8, 16, 32, 60, 60, 60] {
            assert_eq!(backoff.attempt(), delay);
        }
        backoff.attempts = u32::MAX;
        assert_eq!(backoff.attempt(), 60);
    }

    #[test]
    fn a_device_that_works_for_a_moment_does_not_start_again() {
        let mut backoff = Backoff::new();
        for delay in [0, 1, 2, 4] {
            backoff.works();
            assert_eq!(backoff.attempt(), delay);
        }
    }
}
