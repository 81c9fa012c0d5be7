// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Lists of mappings, piece by contiguous piece.

use memory::{Chunk, MemoryError};

use super::mr::Pieces;
use super::mr_cache::{Mapping, MrCache};

/// Largest piece of a message in a second-level cache for which [`Chunk::copy_cached_part_to`] is the faster way.
const SMALL_PIECE: usize = 8 << 10;

/// Mappings and where their regions are.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    /// The regions.
    pub cache: &'a MrCache,
    /// Parts of them, in turn.
    pub mappings: &'a [Mapping],
}

/// The side of a copy that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The memory that is read.
    Source,
    /// The memory that is written.
    Target,
}

/// The memory of a list of mappings, piece by contiguous piece.
pub(super) struct Cursor<'a> {
    cache: &'a MrCache,
    /// The mappings that follow.
    mappings: std::slice::Iter<'a, Mapping>,
    /// The pieces of the current mapping that follow, and their bytes.
    pieces: Option<Pieces<'a>>,
    left: u64,
}

impl<'a> Cursor<'a> {
    pub fn new(view: &View<'a>) -> Self {
        Self { cache: view.cache, mappings: view.mappings.iter(), pieces: None, left: 0 }
    }

    /// Returns the next piece; `None` at the end, or where the guest has no memory any more.
    #[inline(always)]
    pub fn next(&mut self) -> Option<Chunk<'a>> {
        if self.left == 0 {
            self.enter()?;
        }
        let piece = self.pieces.as_mut()?.next(self.left)?;
        self.left -= piece.len() as u64;
        Some(piece)
    }

    /// Returns the memory of the current mapping from here on, and how many bytes of it belong to the mapping; `None` at
    /// the end.
    pub fn rest(&mut self) -> Option<(Pieces<'a>, u64)> {
        if self.left == 0 {
            self.enter()?;
        }
        Some((self.pieces.clone()?, self.left))
    }

    /// Leaves out `bytes`, which are no more than the current mapping has.
    pub fn skip(&mut self, bytes: u64) -> Option<()> {
        self.left -= bytes;
        self.pieces.as_mut()?.skip(bytes)
    }

    /// Goes to the next mapping that is not empty.
    #[inline(never)]
    fn enter(&mut self) -> Option<()> {
        let mapping = self.mappings.find(|mapping| mapping.len != 0)?;
        self.pieces = Some(self.cache.pieces(mapping)?);
        self.left = mapping.len;
        Some(())
    }
}

/// Copies a piece in the faster way, as [`Chunk::copy_part_to`].
#[inline(always)]
pub(super) fn copy_part(
    source: Chunk<'_>,
    target: Chunk<'_>,
    is_cached: bool,
) -> Result<usize, MemoryError> {
    if is_cached && source.len().min(target.len()) <= SMALL_PIECE {
        source.copy_cached_part_to(target)
    } else {
        source.copy_part_to(target)
    }
}
