// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The clocks of completions' time stamps: the system's, in nanoseconds.

use crate::bindings::{self, clockid_t, timespec};

/// Ticks of [`device`] in a millisecond, as `hca_core_clock` counts them.
pub const KHZ: u64 = 1_000_000;

/// Returns the time of the clock that stands for the device's, in nanoseconds. Setting the system's
/// time does not change it.
pub fn device() -> u64 {
    now(bindings::CLOCK_MONOTONIC as clockid_t)
}

/// Returns the nanoseconds since the Epoch.
pub fn wallclock() -> u64 {
    now(bindings::CLOCK_REALTIME as clockid_t)
}

fn now(clock: clockid_t) -> u64 {
    let mut now = timespec::default();
    // SAFETY: `now` is valid; the system has both clocks.
    unsafe { bindings::clock_gettime(clock, &mut now) };
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        thread,
        time::{Duration, SystemTime, UNIX_EPOCH},
    };

    #[test]
    fn nanoseconds() {
        let before = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
        let between = u128::from(wallclock());
        let after = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
        assert!((before..=after).contains(&between));
        let first = device();
        thread::sleep(Duration::from_millis(1));
        assert!(device() >= first + KHZ);
    }
}
