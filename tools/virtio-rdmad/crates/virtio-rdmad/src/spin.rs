// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long a thread without work looks for more before it sleeps.

use std::time::{Duration, Instant};

/// A yield that takes longer found somebody else who wants the processor.
const CROWDED: Duration = Duration::from_micros(100);

/// How often a thread sleeps at once after it found its processor crowded.
const PENANCE: u32 = 64;

/// Decides between looking again and sleeping.
///
/// Looking again yields the processor each time. On a crowded machine a yield costs a scheduler's
/// slice, milliseconds, while a sleeper that is woken runs soon: there it is better to sleep.
#[derive(Debug)]
pub struct Spin {
    limit: Duration,
    since: Option<Instant>,
    penance: u32,
}

impl Spin {
    /// One that looks for `limit`.
    pub fn new(limit: Duration) -> Self {
        Self { limit, since: None, penance: 0 }
    }

    /// There was work.
    pub fn restart(&mut self) {
        self.since = None;
    }

    /// There was none: whether to look again (`true`) or to sleep.
    pub fn again(&mut self) -> bool {
        if self.penance > 0 {
            self.penance -= 1;
            return false;
        }
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        if now - since >= self.limit {
            self.since = None;
            return false;
        }
        std::thread::yield_now();
        if now.elapsed() > CROWDED {
            self.penance = PENANCE;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_time_means_sleep() {
        let mut spin = Spin::new(Duration::ZERO);
        assert!(!spin.again());
        assert!(!spin.again());
    }

    #[test]
    fn a_crowded_processor_means_sleep() {
        let mut spin = Spin::new(Duration::MAX);
        spin.penance = 2;
        assert_eq!([spin.again(), spin.again(), spin.again()], [false, false, true]);
    }
}
