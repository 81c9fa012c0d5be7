// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A histogram of durations, whose buckets double from 1 us to 131 ms.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Buckets that have an upper bound. The bound of bucket N is 2^N us.
const BOUNDED: usize = 18;

/// Counts durations by their length. One thread writes it, so it needs no atomic additions; any thread may read it.
#[derive(Debug, Default)]
pub struct Histogram {
    /// Durations up to the bound of each bucket and above that of the bucket before. The last bucket has no bound.
    counts: [AtomicU64; BOUNDED + 1],
    /// The sum of all durations, in nanoseconds.
    sum: AtomicU64,
}

/// The values of a [`Histogram`] at one moment.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Reading {
    /// The sum of all durations.
    pub sum: Duration,
    /// The upper bound of each bucket, and how many durations are in it and in no bucket before. The last one has no
    /// bound.
    pub buckets: Vec<(Option<Duration>, u64)>,
}

impl Histogram {
    /// Counts a duration. This takes a few nanoseconds.
    #[inline]
    pub fn record(&self, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        add(&self.counts[bucket(nanoseconds)], 1);
        add(&self.sum, nanoseconds);
    }

    /// Returns the values of this moment. A duration that is counted meanwhile may be in one of them only.
    pub fn read(&self) -> Reading {
        let bounds = (0..BOUNDED).map(|at| Some(Duration::from_micros(1 << at))).chain([None]);
        let counts = self.counts.iter().map(|count| count.load(Ordering::Relaxed));
        let sum = Duration::from_nanos(self.sum.load(Ordering::Relaxed));
        Reading { sum, buckets: bounds.zip(counts).collect() }
    }
}

/// Returns the index of the bucket of a duration.
#[inline]
fn bucket(nanoseconds: u64) -> usize {
    // The bound belongs to its bucket. This is the number of bits of one less than the microseconds, rounded up.
    let below = nanoseconds.saturating_sub(1) / 1000;
    ((u64::BITS - below.leading_zeros()) as usize).min(BOUNDED)
}

/// Adds to a counter of which this thread is the only writer.
fn add(counter: &AtomicU64, value: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each duration is in the first bucket whose bound is not below it.
    #[test]
    fn a_bound_belongs_to_its_bucket() {
        let bounds: Vec<_> = Histogram::default().read().buckets.iter().map(|(b, _)| *b).collect();
        assert_eq!(bounds.first().copied().flatten(), Some(Duration::from_micros(1)));
        assert_eq!(bounds[BOUNDED - 1], Some(Duration::from_micros(131_072)));
        let near = bounds.iter().flatten().flat_map(|bound| {
            let bound = u64::try_from(bound.as_nanos()).unwrap();
            [bound - 1, bound, bound + 1]
        });
        for time in near.chain([0, 1, u64::MAX]) {
            let holds = |bound: &Option<Duration>| {
                bound.is_none_or(|bound| Duration::from_nanos(time) <= bound)
            };
            assert_eq!(Some(bucket(time)), bounds.iter().position(holds), "{time} ns");
        }
    }

    #[test]
    fn durations_are_counted_and_added() {
        let histogram = Histogram::default();
        for time in [500, 3000, 4000, 1_000_000_000] {
            histogram.record(Duration::from_nanos(time));
        }
        let Reading { sum, buckets } = histogram.read();
        assert_eq!(sum, Duration::from_nanos(1_000_007_500));
        let counts: Vec<_> = buckets.iter().map(|(_, count)| *count).collect();
        assert_eq!((counts[0], counts[2], counts[BOUNDED]), (1, 2, 1));
        assert_eq!(counts.iter().sum::<u64>(), 4);
    }
}
