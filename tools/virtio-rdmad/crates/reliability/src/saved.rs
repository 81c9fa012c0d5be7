// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The common parts of saved states: times, and the reason why a state is refused.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// The longest time that a saved state may tell of, in either direction from its own.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// The reason why a part of a saved state is refused.
pub type Wrong = &'static str;

/// Returns an error unless a condition holds.
pub fn require(condition: bool, otherwise: Wrong) -> Result<(), Wrong> {
    if condition {
        Ok(())
    } else {
        Err(otherwise)
    }
}

/// A time, as nanoseconds from that at which a state is saved. A time that is over has a negative number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment(i64);

impl Moment {
    /// Returns a time; `now` is that at which the state is saved.
    pub fn of(time: Instant, now: Instant) -> Self {
        let nanos = |time: Duration| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
        match time.checked_duration_since(now) {
            Some(later) => Self(nanos(later)),
            None => Self(-nanos(now.saturating_duration_since(time))),
        }
    }

    /// Returns the time, which goes on at `now`.
    pub fn time(self, now: Instant) -> Instant {
        let distance = Duration::from_nanos(self.0.unsigned_abs()).min(LONGEST);
        let time = if self.0 < 0 { now.checked_sub(distance) } else { now.checked_add(distance) };
        time.unwrap_or(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_go_on() {
        let now = Instant::now();
        let later = now + Duration::from_secs(5);
        for time in
            [now, now + Duration::from_nanos(1), now.checked_sub(Duration::from_millis(3)).unwrap()]
        {
            let moment = Moment::of(time, now);
            assert_eq!(Moment::of(moment.time(later), later), moment);
            assert_eq!(moment.time(now), time);
        }
        assert_eq!(Moment(i64::MAX).time(now), now + LONGEST);
        assert_eq!(Moment(i64::MIN).time(now), now.checked_sub(LONGEST).unwrap());
    }
}
