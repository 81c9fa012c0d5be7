// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Repeats something for a while and says how long it typically took.

use std::time::{Duration, Instant};

/// How long one timed batch should take: long against the clock, short against a time slice, so
/// that what else the machine does spoils some batches and not the median.
const BATCH: Duration = Duration::from_micros(500);

/// Calls `run(n)`, which does its thing n times, again and again for `time`; the median of the
/// seconds that one took. `run` fails to end it early.
pub fn typical<E>(time: Duration, mut run: impl FnMut(u64) -> Result<(), E>) -> Result<f64, E> {
    let mut timed = |count| {
        let start = Instant::now();
        run(count).map(|()| start.elapsed())
    };
    // Warm up, and learn how many make a batch. One slow trial may be the scheduler's doing.
    let mut count = 1;
    while timed(count)?.min(timed(count)?).min(timed(count)?) < BATCH {
        count *= 2;
    }
    let end = Instant::now() + time;
    let mut samples = Vec::new();
    while samples.is_empty() || Instant::now() < end {
        samples.push(timed(count)?.as_secs_f64() / count as f64);
    }
    Ok(median(&mut samples))
}

fn median(samples: &mut [f64]) -> f64 {
    let middle = samples.len() / 2;
    *samples.select_nth_unstable_by(middle, f64::total_cmp).1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_some() {
        assert!((median(&mut [3.0, 1.0, 2.0]) - 2.0).abs() < f64::EPSILON);
        assert!((median(&mut [7.0]) - 7.0).abs() < f64::EPSILON);
    }

    #[test]
    fn one_batch_at_least() {
        let mut total = 0;
        let seconds = typical(Duration::ZERO, |count| {
            total += count;
            std::thread::sleep(BATCH);
            Ok::<_, ()>(())
        });
        assert!(seconds.is_ok_and(|seconds| seconds >= BATCH.as_secs_f64()));
        assert_eq!(total, 4);
    }
}
