// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Lists of pages in guest memory.

use std::sync::Arc;

use abi::VIRTIO_RDMA_PAGE_SHIFT;
use memory::{GuestMemory, Pages};
use serde::{Deserialize, Serialize};

use crate::base::image::{require, Wrong};

/// Bytes of a page of rings, and the least that a page of an MR has.
pub(crate) const PAGE_SIZE: u64 = 1 << VIRTIO_RDMA_PAGE_SHIFT;

/// Sizes of the pages of MRs, bit n for 2^n bytes: 4 KiB to 2 GiB.
pub(crate) const PAGE_SIZES: u64 = 0xffff_f000;

/// Returns the bytes of a page of which `shift` is the binary logarithm, if there are pages of that
/// size.
pub(crate) fn page_size(shift: u8) -> Option<u64> {
    let size = 1_u64.checked_shl(shift.into())?;
    (size & PAGE_SIZES != 0).then_some(size)
}

/// Returns how many pages of `page_size` bytes `length` bytes touch, of which the first is at
/// `start`. No bytes touch no page.
pub(crate) fn touched(start: u64, length: u64, page_size: u64) -> u64 {
    match length {
        0 => 0,
        _ => length.saturating_add(start % page_size).div_ceil(page_size),
    }
}

/// A range of guest addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Range {
    /// First address.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
}

impl Range {
    /// Returns the pages of a range of whole pages.
    pub fn pages(&self) -> usize {
        usize::try_from(self.len / PAGE_SIZE).unwrap_or(usize::MAX)
    }
}

/// Returns the pages of a region of whole pages.
pub(crate) fn pages_of(region: &[Range]) -> usize {
    region.iter().map(Range::pages).sum()
}

/// Checks a region of rings that was saved, which has `room` pages at most. Returns its bytes.
pub(crate) fn check_region(region: &[Range], room: usize) -> Result<u64, Wrong> {
    let len = region.iter().try_fold(0, |sum: u64, range| sum.checked_add(range.len));
    let len = len.ok_or("its region is too long")?;
    require(len / PAGE_SIZE <= room as u64, "its region is beyond the limit of extents")?;
    Ok(len)
}

/// Returns the pages of a region of rings that was saved.
pub(crate) fn find_pages(memory: &GuestMemory, region: &[Range]) -> Result<Pages, Wrong> {
    let ranges = region.iter().map(|range| (range.addr, range.len));
    Pages::new(memory, ranges).map_err(|_| "its region is not in memory")
}

/// Collects the pages of a table into ranges, and cuts them to
/// `[offset, offset + length)`, which begins in the first page and ends in the last.
#[derive(Default)]
pub(crate) struct PageList {
    ranges: Vec<Range>,
}

impl PageList {
    /// Returns the ranges of the whole pages.
    pub fn ranges(self) -> Box<[Range]> {
        self.ranges.into()
    }

    /// Returns them as they are, with room for more.
    pub fn into_vec(self) -> Vec<Range> {
        self.ranges
    }

    /// Appends a page of any size; `false` if there would be more than `room` ranges.
    pub fn push(&mut self, page: Range, room: usize) -> bool {
        if let Some(last) = self.ranges.last_mut() {
            if last.addr.checked_add(last.len) == Some(page.addr) {
                last.len += page.len;
                return true;
            }
        }
        if self.ranges.len() == room {
            return false;
        }
        self.ranges.push(page);
        true
    }

    /// Returns the ranges of the bytes themselves; the whole pages have `total` bytes.
    pub fn cut(mut self, offset: u64, length: u64, total: u64) -> Arc<Vec<Range>> {
        if let Some(first) = self.ranges.first_mut() {
            first.addr += offset;
            first.len -= offset;
        }
        if let Some(last) = self.ranges.last_mut() {
            last.len -= total - offset - length;
        }
        Arc::new(self.ranges)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_coalesce_and_are_cut() {
        let mut list = PageList::default();
        let page = |addr| Range { addr, len: PAGE_SIZE };
        for addr in [0x1000, 0x2000, 0x5000, 0x3000] {
            assert!(list.push(page(addr), 3));
        }
        assert!(!list.push(page(0x9000), 3));
        let ranges = list.cut(0x10, 0x3000, 4 * PAGE_SIZE);
        assert_eq!(
            ranges[..],
            [
                Range { addr: 0x1010, len: 0x1ff0 },
                Range { addr: 0x5000, len: 0x1000 },
                Range { addr: 0x3000, len: 0x10 }
            ]
        );
    }
}
