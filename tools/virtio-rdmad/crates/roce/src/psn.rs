// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Packet sequence numbers, and how they are compared.

use serde::{Deserialize, Serialize};

use crate::wire::LOW_24;

/// A packet sequence number (IBA 9.7.1): 24 bits, which wrap around.
///
/// Two PSNs are compared by the shorter way round, as serial numbers are (RFC 1982). This is no order
/// in the sense of [`Ord`]: of three PSNs, each may be before the next one.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq, Serialize, Deserialize)]
#[serde(from = "u32", into = "u32")]
pub struct Psn(u32);

impl Psn {
    /// Makes a PSN of the lowest 24 bits of `value`.
    pub const fn new(value: u32) -> Self {
        Self(value & LOW_24)
    }

    /// Returns the PSN as a number below 2^24.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the PSN that is `count` packets later.
    #[must_use]
    pub const fn plus(self, count: u32) -> Self {
        Self::new(self.0.wrapping_add(count))
    }

    /// Returns the PSN that is `count` packets earlier.
    #[must_use]
    pub const fn minus(self, count: u32) -> Self {
        Self::new(self.0.wrapping_sub(count))
    }

    /// Returns how many packets this PSN is after `other`, from -2^23 to 2^23 - 1. The number is
    /// negative if this PSN is before `other`.
    pub const fn distance_from(self, other: Self) -> i32 {
        // The 24 bits at the top of the word make the sign of the difference that of the word.
        i32::from_ne_bytes((self.0.wrapping_sub(other.0) << 8).to_ne_bytes()) >> 8
    }

    /// Returns whether this PSN is before `other`.
    pub const fn is_before(self, other: Self) -> bool {
        self.distance_from(other) < 0
    }

    /// Returns whether this PSN is after `other`. Two PSNs that are 2^23 apart are each before the other.
    pub const fn is_after(self, other: Self) -> bool {
        self.distance_from(other) > 0
    }
}

impl From<u32> for Psn {
    fn from(value: u32) -> Self {
        Self::new(value)
    }
}

impl From<Psn> for u32 {
    fn from(psn: Psn) -> Self {
        psn.get()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HALF: u32 = 1 << 23;
    const HALF_SIGNED: i32 = 1 << 23;

    #[test]
    fn wraps_around() {
        let last = Psn::new(LOW_24);
        assert_eq!(last.plus(1), Psn::new(0));
        assert_eq!(Psn::new(0).minus(1), last);
        assert!(last.is_before(Psn::new(0)) && Psn::new(0).is_after(last));
        assert_eq!(Psn::new(5).distance_from(last), 6);
        assert_eq!(last.distance_from(Psn::new(5)), -6);
    }

    #[test]
    fn half_of_all_apart_is_before() {
        let (one, other) = (Psn::new(7), Psn::new(7 + HALF));
        assert!(one.is_before(other) && other.is_before(one));
        assert!(!one.is_after(other) && !other.is_after(one));
    }

    proptest! {
        #[test]
        fn distance_is_what_was_added(start: u32, count in 0..HALF_SIGNED) {
            let start = Psn::new(start);
            let later = start.plus(count.unsigned_abs());
            prop_assert!(later.get() <= LOW_24);
            prop_assert_eq!(later.distance_from(start), count);
            prop_assert_eq!(start.distance_from(later), -count);
            prop_assert_eq!(later.is_after(start), count > 0);
            prop_assert_eq!(start.is_before(later), count > 0);
            prop_assert_eq!(later.minus(count.unsigned_abs()), start);
        }

        #[test]
        fn exactly_one_of_before_equal_and_after(one: u32, other: u32) {
            let (one, other) = (Psn::new(one), Psn::new(other));
            let answers = [one.is_before(other), one == other, one.is_after(other)];
            prop_assert_eq!(answers.into_iter().filter(|answer| *answer).count(), 1);
        }

        #[test]
        fn steps_add_up(start: u32, first: u32, second: u32) {
            let start = Psn::new(start);
            prop_assert_eq!(start.plus(first).plus(second), start.plus(first.wrapping_add(second)));
            prop_assert_eq!(start.plus(1 << 24), start);
        }
    }
}
