// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whether packets wait in a queue, which follows from the times of answers.
//!
//! A queue that drops packets is full, so a packet that is lost there has later ones with long times of answers. One
//! that is lost by chance has not. A single long time may be that of a busy peer, and a queue stays for longer than a
//! round trip; so the shorter one of two times counts. Bounds are those of the last [`EPOCH`] times, or twice as many,
//! because other flows come and go, and paths change.

use std::time::Duration;

/// The number of times after which the bounds begin again.
const EPOCH: u32 = 128;

/// The part of the shortest time by which the longest is longer, at least, if there is a queue.
const SHARE: u32 = 16;

/// The times of answers.
#[derive(Clone, Copy, Default)]
pub(crate) struct Queue {
    /// The last time.
    last: Option<Duration>,
    /// The shorter one of the last two times.
    now: Duration,
    /// The shortest and the longest one of the epoch, and of the one before.
    bounds: [Option<(Duration, Duration)>; 2],
    /// The number of times of the epoch.
    count: u32,
}

impl Queue {
    /// Notes the time of an answer.
    pub fn measured(&mut self, time: Duration) {
        let Some(last) = self.last.replace(time) else { return };
        let now = time.min(last);
        self.now = now;
        if self.count == EPOCH {
            self.count = 0;
            self.bounds[1] = self.bounds[0].take();
        }
        self.count += 1;
        let (least, most) = self.bounds[0].unwrap_or((now, now));
        self.bounds[0] = Some((least.min(now), most.max(now)));
    }

    /// Returns which part of the packets under way, in thousandths, does not wait, if more than a third of them do: the
    /// shortest time of an answer, of the time now.
    pub fn fits(&self) -> Option<u32> {
        let least = self.bounds.iter().flatten().map(|(least, _)| *least).min()?;
        let part = (least.as_nanos() * 1000).checked_div(self.now.as_nanos())?;
        u32::try_from(part).ok().filter(|part| *part < 667)
    }

    /// Returns whether the queue is about as long as it was at most: the time of answers is in the uppermost quarter.
    /// Without two measured times it is not.
    pub fn is_long(&self) -> bool {
        let bounds = || self.bounds.iter().flatten();
        let least = bounds().map(|(least, _)| *least).min().unwrap_or_default();
        let most = bounds().map(|(_, most)| *most).max().unwrap_or_default();
        let range = most.saturating_sub(least);
        range > least / SHARE && self.now >= most.saturating_sub(range / 4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether there is a long queue after times of so many microseconds.
    fn is_long(times: impl IntoIterator<Item = u64>) -> bool {
        let mut queue = Queue::default();
        times.into_iter().for_each(|time| queue.measured(Duration::from_micros(time)));
        queue.is_long()
    }

    #[test]
    fn a_queue_is_long_where_answers_take_the_longest() {
        assert!(!is_long([]) && !is_long([100]) && !is_long([100, 200]), "nothing is known");
        assert!(is_long([100, 100, 150, 200, 200]));
        assert!(is_long((100..200).chain([180, 180])));
        assert!(!is_long((100..200).chain([170, 170])));
    }

    #[test]
    fn times_that_hardly_differ_tell_of_no_queue() {
        assert!(!is_long([160, 160, 170, 170]));
        assert!(is_long([160, 160, 171, 171]));
    }

    #[test]
    fn one_long_time_is_none_of_a_queue() {
        assert!(!is_long([100, 100, 104, 104, 5000]));
        assert!(is_long([100, 100, 5000, 120, 120]), "it is no bound either");
    }

    #[test]
    fn packets_wait_where_answers_take_half_longer() {
        let fits = |times: &[u64]| {
            let mut queue = Queue::default();
            for time in times {
                queue.measured(Duration::from_micros(*time));
            }
            queue.fits()
        };
        assert_eq!([fits(&[]), fits(&[200]), fits(&[100, 100, 149, 149])], [None; 3]);
        assert_eq!([fits(&[100, 100, 160, 160]), fits(&[100, 100, 160, 100])], [Some(625), None]);
    }

    #[test]
    fn bounds_are_forgotten() {
        let epochs = |count| std::iter::repeat_n(200, count * EPOCH as usize);
        let begin = [100, 100, 1000, 1000];
        assert!(!is_long(begin.into_iter().chain(epochs(1))));
        assert!(is_long(begin.into_iter().chain(epochs(3)).chain([300, 300])));
    }
}
