// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Entries of rings in guest memory.

use memory::{MemoryError, Pages};

/// An entry of a ring, which its owner may write at any time.
#[derive(Clone, Copy)]
pub(crate) struct Entry<'a> {
    pages: &'a Pages,
    offset: usize,
}

impl<'a> Entry<'a> {
    /// Returns the entry at `offset` in the pages of its ring.
    #[inline]
    pub fn new(pages: &'a Pages, offset: usize) -> Self {
        Self { pages, offset }
    }

    /// Copies from `at` within the entry.
    #[inline]
    pub fn read(&self, at: usize, to: &mut [u8]) -> Result<(), MemoryError> {
        self.pages.read(self.offset + at, to)
    }
}
