// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The packets of a sequence that have arrived, and the gaps between them.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::saved::{require, Wrong};

/// The most ranges behind the first gap. A packet that would begin another range is taken for lost.
const MOST_RANGES: usize = 64;

/// The packets that have arrived, by their numbers in the sequence.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Gaps {
    /// The number of packets in front of the first gap.
    complete: u32,
    /// The packets behind the first gap: ranges in order, which do not touch each other.
    ranges: Vec<Range<u32>>,
}

impl Gaps {
    /// Checks the saved gaps of a sequence of `packets` packets.
    pub fn check(&self, packets: u32) -> Result<(), Wrong> {
        let mut end = self.complete;
        let is_behind = |range: &Range<u32>| {
            let is_new = range.start > end && range.end > range.start;
            end = range.end;
            is_new
        };
        let is_ordered = self.ranges.iter().all(is_behind);
        let fits = self.ranges.len() <= MOST_RANGES && end <= packets;
        require(is_ordered && fits, "packets of a response have come that it does not have")
    }

    /// Returns the number of packets in front of the first gap.
    #[inline]
    pub fn complete(&self) -> u32 {
        self.complete
    }

    /// Returns whether a packet has arrived.
    pub fn has(&self, index: u32) -> bool {
        index < self.complete || self.ranges.iter().any(|range| range.contains(&index))
    }

    /// Notes that a packet has arrived. Returns `false` if the packet has arrived before, or there are too many gaps.
    pub fn fill(&mut self, index: u32) -> bool {
        if index == self.complete {
            self.complete += 1;
        } else if self.has(index) || !self.fill_behind(index) {
            return false;
        }
        if self.ranges.first().is_some_and(|range| range.start == self.complete) {
            self.complete = self.ranges.remove(0).end;
        }
        true
    }

    /// Notes that a packet behind the first gap has arrived. Returns `false` if there are too many gaps.
    fn fill_behind(&mut self, index: u32) -> bool {
        let at = self.ranges.partition_point(|range| range.end < index);
        let next = self.ranges.get(at + 1).map(|range| range.start);
        let is_full = self.ranges.len() == MOST_RANGES;
        match self.ranges.get_mut(at) {
            Some(range) if range.end == index => {
                range.end += 1;
                if next == Some(range.end) {
                    let joined = self.ranges.remove(at + 1);
                    self.ranges[at].end = joined.end;
                }
            }
            Some(range) if range.start == index + 1 => range.start = index,
            _ if is_full => return false,
            _ => self.ranges.insert(at, index..index + 1),
        }
        true
    }

    /// Returns the first gap within the range `within`; `None` if there is no gap.
    pub fn missing(&self, within: Range<u32>) -> Option<Range<u32>> {
        let mut start = within.start.max(self.complete);
        for range in &self.ranges {
            if start < range.start {
                break;
            }
            start = start.max(range.end);
        }
        let next = self.ranges.iter().map(|range| range.start).find(|next| *next > start);
        let end = next.map_or(within.end, |next| next.min(within.end));
        (start < end).then_some(start..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(indexes: &[u32]) -> Gaps {
        let mut gaps = Gaps::default();
        for index in indexes {
            assert!(gaps.fill(*index), "packet {index} is new");
        }
        gaps
    }

    #[test]
    fn ranges_join_where_they_touch() {
        let mut gaps = filled(&[0, 1, 5, 3, 7, 6, 4]);
        assert_eq!((gaps.complete, gaps.ranges.len(), gaps.ranges[0].clone()), (2, 1, 3..8));
        assert!(!gaps.fill(1) && !gaps.fill(5), "they came before");
        assert!(gaps.fill(2));
        assert_eq!((gaps.complete, gaps.ranges.len()), (8, 0));
    }

    #[test]
    fn missing_packets_are_named_gap_by_gap() {
        let gaps = filled(&[0, 3, 4, 8]);
        assert_eq!(gaps.missing(0..8), Some(1..3));
        assert_eq!(gaps.missing(2..8), Some(2..3));
        assert_eq!(gaps.missing(3..8), Some(5..8));
        assert_eq!(gaps.missing(5..7), Some(5..7));
        assert_eq!(gaps.missing(8..12), Some(9..12));
        assert_eq!((gaps.missing(3..5), gaps.missing(8..9)), (None, None));
    }

    #[test]
    fn gaps_are_bounded() {
        let mut gaps = Gaps::default();
        let taken = (0..1000).filter(|index| gaps.fill(2 * index + 1)).count();
        assert_eq!(taken, MOST_RANGES);
        assert!(gaps.fill(2) && gaps.fill(0), "what begins no range is taken");
        assert_eq!(gaps.complete, 4);
    }
}
