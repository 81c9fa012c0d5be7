// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whether it pays to share large copies with threads that help.
//!
//! It mostly does. But where the caches of two processors are far apart, a helper takes longer to get what lies in the
//! other cache than the other processor takes to copy it. So copies are timed, and one in [`TRIAL`] is made in the way
//! that is slower otherwise.

use std::time::Duration;

/// One copy in so many is a trial.
const TRIAL: u32 = 64;

/// The weight of the newest copy in a mean is 1 in this many.
const WEIGHT: u64 = 8;

/// A copy counts as at most so many times the mean: it may have waited for memory or for a processor.
const MOST: u64 = 4;

/// Knows how fast copies of one guest were, with help and without.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sharing {
    /// Mean times of a byte in picoseconds: without help, and with help. 0 as long as there was no copy.
    times: [u64; 2],
    /// The number of copies.
    copies: u32,
}

impl Sharing {
    /// Returns whether the next copy is to be shared.
    pub fn decide(&mut self) -> bool {
        self.copies = self.copies.wrapping_add(1);
        let [alone, shared] = self.times;
        let pays = shared <= alone;
        if self.copies % TRIAL == 0 {
            !pays
        } else {
            pays
        }
    }

    /// Notes that a copy of so many bytes took `time`.
    pub fn note(&mut self, shared: bool, bytes: u64, time: Duration) {
        let now =
            u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).saturating_mul(1000) / bytes.max(1);
        let mean = &mut self.times[usize::from(shared)];
        *mean =
            if *mean == 0 { now } else { ((WEIGHT - 1) * *mean + now.min(MOST * *mean)) / WEIGHT };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 1 << 17;

    /// Makes copies that take this many microseconds alone and with help. Returns how many were shared.
    fn shared(sharing: &mut Sharing, copies: u32, alone: u64, with_help: u64) -> u32 {
        let copies = (0..copies).filter(|_| {
            let shared = sharing.decide();
            let time = if shared { with_help } else { alone };
            sharing.note(shared, BYTES, Duration::from_micros(time));
            shared
        });
        u32::try_from(copies.count()).unwrap()
    }

    #[test]
    fn the_faster_way_is_taken() {
        let mut sharing = Sharing::default();
        shared(&mut sharing, 2 * TRIAL, 4, 3);
        assert_eq!(shared(&mut sharing, 10 * TRIAL, 4, 3), 10 * (TRIAL - 1));
        // It turns out when sharing becomes slower, and when it becomes faster again.
        shared(&mut sharing, 10 * TRIAL, 4, 5);
        assert_eq!(shared(&mut sharing, 10 * TRIAL, 4, 5), 10);
        shared(&mut sharing, 20 * TRIAL, 4, 2);
        assert_eq!(shared(&mut sharing, 10 * TRIAL, 4, 2), 10 * (TRIAL - 1));
    }

    #[test]
    fn one_slow_copy_changes_little() {
        let mut sharing = Sharing::default();
        shared(&mut sharing, 10 * TRIAL, 4, 2);
        sharing.note(true, BYTES, Duration::from_secs(1));
        assert!(sharing.decide());
    }

    #[test]
    fn both_ways_are_tried() {
        let mut sharing = Sharing::default();
        let first = shared(&mut sharing, 2 * TRIAL, 4, 4);
        assert!((1..2 * TRIAL).contains(&first));
    }
}
