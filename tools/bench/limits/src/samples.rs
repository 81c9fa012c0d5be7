// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Repeats something for a while and says how long it took: typically, or all in all.

use std::time::{Duration, Instant};

/// How long one timed batch should take: long against the clock, short against a time slice, so
/// that what else the machine does spoils some batches and not the median.
const BATCH: Duration = Duration::from_micros(500);

/// Calls `run(n)`, which does its thing n times, again and again for `time`; the median of the
/// seconds that one took. `run` fails to end it early.
pub fn typical<E>(time: Duration, mut run: impl FnMut(u64) -> Result<(), E>) -> Result<f64, E> {
    let count = batch(&mut run)?;
    let mut timed = |count| timed(&mut run, count);
    let end = Instant::now() + time;
    let mut samples = Vec::new();
    while samples.is_empty() || Instant::now() < end {
        samples.push(timed(count)?.as_secs_f64() / count as f64);
    }
    Ok(median(&mut samples))
}

/// The same, but the mean: the seconds of all divided by how many there were, which is what
/// perftest's bandwidth is made of. What else the machine does is in both.
pub fn mean<E>(time: Duration, mut run: impl FnMut(u64) -> Result<(), E>) -> Result<f64, E> {
    let count = batch(&mut run)?;
    let (mut done, mut passed) = (0, Duration::ZERO);
    while done == 0 || passed < time {
        passed += timed(&mut run, count)?;
        done += count;
    }
    Ok(passed.as_secs_f64() / done as f64)
}

/// How long `run(count)` takes.
fn timed<E>(run: &mut impl FnMut(u64) -> Result<(), E>, count: u64) -> Result<Duration, E> {
    let start = Instant::now();
    run(count).map(|()| start.elapsed())
}

/// Warms up, and learns how many make a batch. One slow trial may be the scheduler's doing.
fn batch<E>(run: &mut impl FnMut(u64) -> Result<(), E>) -> Result<u64, E> {
    let mut count = 1;
    while timed(run, count)?.min(timed(run, count)?).min(timed(run, count)?) < BATCH {
        count *= 2;
    }
    Ok(count)
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
    fn slow_ones_are_in_the_mean() {
        let mut calls = 0;
        let mut run = |_| {
            calls += 1;
            // Three trials, and two batches of which one is slow.
            std::thread::sleep(BATCH * if calls == 4 { 20 } else { 1 });
            Ok::<_, ()>(())
        };
        let seconds = mean(BATCH * 21, &mut run);
        assert!(seconds.is_ok_and(|seconds| seconds > BATCH.as_secs_f64() * 2.0));
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
