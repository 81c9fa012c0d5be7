// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Copies from and to the memory of regions.

use std::ops::RangeInclusive;
use std::time::Instant;

use super::cursor::{copy_part, Cursor};
pub(crate) use super::cursor::{Side, View};
use super::mr_cache::{Mapping, MrCache};
use super::parts::Parts;
use crate::base::budget::CHUNK;
use memory::{Chunk, MemoryError};
use serde::{Deserialize, Serialize};

/// Bytes of a message that is likely to be copied from and to a processor's second cache, if it is
/// sent again and again: its two sides fit in that, and not in the first.
const SECOND_CACHE: RangeInclusive<u64> = (32 << 10)..=(512 << 10);

/// Least bytes of a copy that is shared with threads without work. To share it takes some transfers of cache lines: one
/// of 64 KiB gains an eighth by a helper, and one of 128 KiB a third.
const SHARED: u64 = CHUNK;

/// Bytes at the end of a shared copy that this thread copies itself when the rest is there: programs poll the last ones.
const SHARED_TAIL: u64 = 64;

/// A copy from or to revocable regions: none of them is revoked from its
/// beginning to its end.
pub(crate) struct Copying<'a> {
    view: &'a View<'a>,
    /// The number of mappings of revocable regions that were entered.
    entered: usize,
}

impl<'a> Copying<'a> {
    /// Returns a copy that has not begun.
    #[inline]
    pub fn new(view: &'a View<'a>) -> Self {
        Self { view, entered: 0 }
    }

    /// Begins it; the bytes of the mappings. `None` if a region was revoked.
    #[inline]
    pub fn begin(&mut self) -> Option<u64> {
        let mut len = 0;
        for mapping in self.view.mappings {
            if mapping.revocable {
                if !self.view.cache.region(mapping).enter() {
                    return None;
                }
                self.entered += 1;
            }
            len += mapping.len;
        }
        Some(len)
    }
}

impl Drop for Copying<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.entered == 0 {
            return;
        }
        let revocable = self.view.mappings.iter().filter(|mapping| mapping.revocable);
        for mapping in revocable.take(self.entered) {
            self.view.cache.region(mapping).leave();
        }
    }
}

/// The data of a message.
#[derive(Clone, Copy)]
pub(crate) enum Data<'a> {
    /// Memory of a guest.
    Mapped(View<'a>),
    /// Inline data, already copied out of guest memory.
    Inline(&'a [u8]),
}

/// Writes a part of what a message of `total` bytes carries; as [`copy`].
#[inline]
pub(crate) fn scatter(source: Data<'_>, target: View<'_>, total: u64) -> Result<(), Side> {
    match source {
        Data::Mapped(source) => copy(source, target, total).map(|_| ()),
        Data::Inline(bytes) => write(target, bytes),
    }
}

/// Copies from one list to another until one of them ends. Returns the number of bytes. `total` is the number of bytes
/// of the whole message, which decides in which cache its memory is expected.
///
/// Memory that was checked when it was mapped fails here only where the guest's own map of memory is at odds with its
/// region (a DMA region over memory that is read-only), or where the region was revoked meanwhile.
#[inline(always)]
pub(crate) fn copy(source: View<'_>, target: View<'_>, total: u64) -> Result<u64, Side> {
    match one_piece(&source, &target) {
        Some((from, to)) => from.copy_to(to).map(|len| len as u64).map_err(|_| Side::Target),
        None => copy_pieces(source, target, total),
    }
}

/// Returns both sides of a copy that is not shared, if each is one contiguous piece of a region that nobody revokes, and
/// both have the same length. Most small messages are such copies.
#[inline(always)]
fn one_piece<'a>(source: &View<'a>, target: &View<'a>) -> Option<(Chunk<'a>, Chunk<'a>)> {
    let ([from], [to]) = (source.mappings, target.mappings) else { return None };
    if from.revocable || to.revocable || from.len != to.len || from.len >= SHARED {
        return None;
    }
    Some((source.cache.piece(from)?, target.cache.piece(to)?))
}

/// Copies piece by piece, as [`copy`].
#[inline(never)] // or small messages have its stack frame
fn copy_pieces(source: View<'_>, target: View<'_>, total: u64) -> Result<u64, Side> {
    let caches = [source.cache, target.cache];
    let (mut reading, mut writing) = (Copying::new(&source), Copying::new(&target));
    let have = reading.begin().ok_or(Side::Source)?;
    let len = have.min(writing.begin().ok_or(Side::Target)?);
    let (mut from, mut to) = (Cursor::new(&source), Cursor::new(&target));
    let is_cached = SECOND_CACHE.contains(&total);
    let helped = || caches.into_iter().find_map(|cache| Some((cache, cache.helpers(len)?)));
    let Some((cache, helpers)) = (len >= SHARED).then(helped).flatten() else {
        copy_rest(&mut from, &mut to, len, is_cached)?;
        return Ok(len);
    };
    let mut sharing = cache.sharing.get();
    let (is_shared, begin) = (sharing.decide(), Instant::now());
    let mut left = len;
    if is_shared {
        left = SHARED_TAIL;
        Parts::cut(&mut from, &mut to, len - left)?.copy(helpers, is_cached)?;
    }
    copy_rest(&mut from, &mut to, left, is_cached)?;
    sharing.note(is_shared, len, begin.elapsed());
    cache.sharing.set(sharing);
    Ok(len)
}

/// Copies `left` bytes, the last of them at the end.
#[inline(always)]
fn copy_rest(
    from: &mut Cursor<'_>,
    to: &mut Cursor<'_>,
    mut left: u64,
    is_cached: bool,
) -> Result<(), Side> {
    // The rest of each current piece. Both are in registers: a load of a value that was stored a moment ago may wait
    // for the copy to drain.
    let (mut source, mut target) = (Chunk::EMPTY, Chunk::EMPTY);
    while left > 0 {
        if source.is_empty() {
            source = from.next().ok_or(Side::Source)?;
        }
        if target.is_empty() {
            target = to.next().ok_or(Side::Target)?;
        }
        let piece = source.len().min(target.len());
        let copied = if piece as u64 == left {
            // Programs poll only the end of a message.
            source.copy_to(target)
        } else {
            copy_part(source, target, is_cached)
        };
        let copied = copied.map_err(|_| Side::Target)?;
        (source, target) = (source.skip(copied), target.skip(copied));
        left -= copied as u64;
    }
    Ok(())
}

/// Writes `bytes` to the beginning of mapped memory.
pub(crate) fn write(target: View<'_>, bytes: &[u8]) -> Result<(), Side> {
    let mut writing = Copying::new(&target);
    writing.begin().ok_or(Side::Target)?;
    let mut to = Cursor::new(&target);
    let mut left = bytes;
    while !left.is_empty() {
        let piece = to.next().ok_or(Side::Target)?;
        let (now, rest) = left.split_at(piece.len().min(left.len()));
        piece.write(now).map_err(|_| Side::Target)?;
        left = rest;
    }
    Ok(())
}

/// Reads as many bytes as `bytes` has from mapped memory.
pub(crate) fn read(source: View<'_>, bytes: &mut [u8]) -> Result<(), Side> {
    let mut reading = Copying::new(&source);
    reading.begin().ok_or(Side::Source)?;
    let mut from = Cursor::new(&source);
    let mut left = bytes;
    while !left.is_empty() {
        let piece = from.next().ok_or(Side::Source)?;
        let (now, rest) = left.split_at_mut(piece.len().min(left.len()));
        piece.read(now).map_err(|_| Side::Source)?;
        left = rest;
    }
    Ok(())
}

/// An atomic operation on a 64-bit word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Atomic {
    /// Replaces `compare` by `swap`.
    CompareSwap {
        /// The value that the word must have.
        compare: u64,
        /// The value that the word gets.
        swap: u64,
    },
    /// Adds.
    FetchAdd(u64),
}

/// Does an atomic operation on a mapped word and returns its value before.
pub(crate) fn atomic(cache: &MrCache, target: &Mapping, operation: Atomic) -> Result<u64, Side> {
    on_word(cache, target, |word| match operation {
        Atomic::CompareSwap { compare, swap } => word.compare_exchange_u64(compare, swap),
        Atomic::FetchAdd(add) => word.fetch_add_u64(add),
    })
}

/// Writes a mapped word, which every reader sees as a whole.
pub(crate) fn store(cache: &MrCache, target: &Mapping, value: u64) -> Result<(), Side> {
    on_word(cache, target, |word| word.store_u64(value))
}

/// Does something to a mapped word.
fn on_word<R>(
    cache: &MrCache,
    target: &Mapping,
    act: impl FnOnce(Chunk<'_>) -> Result<R, MemoryError>,
) -> Result<R, Side> {
    let view = View { cache, mappings: std::slice::from_ref(target) };
    let mut writing = Copying::new(&view);
    writing.begin().ok_or(Side::Target)?;
    let word = cache.pieces(target).and_then(|mut pieces| pieces.next(8)).ok_or(Side::Target)?;
    act(word).map_err(|_| Side::Target)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, RwLock};

    use abi::virtio_rdma_sge;
    use memory::{GuestMemory, Helpers};

    use super::*;
    use crate::memory::key_table::KeyTable;
    use crate::memory::mr::tests::{region, OWN};
    use crate::memory::mr_cache::Mappings;
    use crate::memory::page_list::Range;

    #[test]
    fn copies_across_extents() {
        let memory = GuestMemory::anonymous(&[(0, 0x8000)]).unwrap();
        let data: Vec<u8> = (0..6000_u32).map(|i| (i * 7 % 253) as u8).collect();
        memory.write(0x4000, &data).unwrap();
        let mut table = KeyTable::default();
        let source = [Range { addr: 0x4000, len: 6000 }];
        let target = [Range { addr: 0x1000, len: 0x1000 }, Range { addr: 0x3000, len: 0x800 }];
        table.insert(region(&memory, 0x100, 0x10_0000, &source));
        table.insert(region(&memory, 0x200, 0, &target));
        let table = RwLock::new(table);
        let sges = [
            virtio_rdma_sge { addr: 0x10_0000, length: 1000, lkey: 0x100 },
            virtio_rdma_sge { addr: 0x10_0000 + 1000, length: 5000, lkey: 0x100 },
        ];
        let mut cache = MrCache::default();
        let (mut all, mut window) = (Mappings::new(), Mappings::new());
        cache.map_sges(&table, &sges, OWN, 0..6000, &mut all).unwrap();
        cache.map_sges(&table, &sges, OWN, 900..1100, &mut window).unwrap();
        let to_all = [cache.map(&table, 0x200, OWN, 0, 6000).unwrap()];
        let to_window = [cache.map(&table, 0x200, OWN, 4000, 200).unwrap()];
        let view = |mappings| View { cache: &cache, mappings };
        assert_eq!(copy(view(&all), view(&to_all), 6000), Ok(6000));
        let mut found = vec![0; 6000];
        memory.read(0x1000, &mut found[..0x1000]).unwrap();
        memory.read(0x3000, &mut found[0x1000..]).unwrap();
        assert_eq!(found, data);

        assert_eq!(copy(view(&window), view(&to_window), 200), Ok(200));
        memory.read(0x1000 + 4000, &mut found[..96]).unwrap();
        assert_eq!(found[..96], data[900..996]);

        let to_gap = [cache.map(&table, 0x200, OWN, 4090, 14).unwrap()];
        write(View { cache: &cache, mappings: &to_gap }, b"across the gap").unwrap();
        memory.read(0x1000 + 4090, &mut found[..6]).unwrap();
        memory.read(0x3000, &mut found[6..14]).unwrap();
        assert_eq!(&found[..14], b"across the gap");
    }

    #[test]
    fn messages_of_every_way_to_copy_arrive() {
        messages_arrive(None);
        let helpers = Arc::new(Helpers::new(|| {}));
        messages_arrive(Some(&helpers));
        // Copies are shared while there is a helper, whether it helps or not.
        let _helper = helpers.join();
        messages_arrive(Some(&helpers));
    }

    fn messages_arrive(helpers: Option<&Arc<Helpers>>) {
        let memory = GuestMemory::anonymous(&[(0, 0x20_0000)]).unwrap();
        let pages = |first: u64, len: u64| -> Vec<Range> {
            // No page is contiguous with the previous one.
            let page = |at| Range { addr: first + (at * 37 % 128) * 0x2000, len: 0x1000 };
            (0..len / 0x1000).map(page).collect()
        };
        let mut table = KeyTable::default();
        for (key, first) in [(0x100, 0), (0x200, 0x10_0000)] {
            table.insert(region(&memory, key, 0, &pages(first, 0x8_0000)));
        }
        let table = RwLock::new(table);
        // The last copy is a part of a message that is too large to be cached.
        for (len, of) in
            [(0x7fff, 0x7fff), (0x8000, 0x8000), (0x1_2345, 0x1_2345), (0x8_0000, 0x8_0001)]
        {
            let data: Vec<u8> = (0..len).map(|i| (i * 31 % 251) as u8 | 1).collect();
            let mut cache = MrCache::with_helpers(helpers);
            let from = [cache.map(&table, 0x100, OWN, 0, len).unwrap()];
            let to = [cache.map(&table, 0x200, OWN, 0, 0x8_0000).unwrap()];
            let view = |mappings| View { cache: &cache, mappings };
            write(view(&to), &vec![0; 0x8_0000]).unwrap();
            write(view(&from), &data).unwrap();
            assert_eq!(copy(view(&from), view(&to), of), Ok(len));
            let mut found = vec![0; 0x8_0000];
            read(view(&to), &mut found).unwrap();
            let (begin, end) = found.split_at(data.len());
            assert_eq!(begin, data);
            assert!(end.iter().all(|&byte| byte == 0));
        }
    }
}
