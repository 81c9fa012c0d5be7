// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The parts of a large copy, which several threads make.

use std::sync::OnceLock;

use memory::{Chunk, Helpers};
use smallvec::SmallVec;

use super::cursor::{copy_part, Cursor, Side};
use super::mr::Pieces;

/// The most parts of a copy of memory that is one mapping on each side.
const PARTS: u64 = 8;

/// The least bytes of a part. A processor copies it in one to three microseconds, many times what it takes to get it.
const LEAST: u64 = 32 << 10;

/// A part: the same number of bytes of one mapping on each side. Another thread finds the pieces by itself, which it has
/// in its cache, and reads nothing else that this thread has just written.
struct Part<'a> {
    source: Pieces<'a>,
    target: Pieces<'a>,
    len: u64,
}

impl Part<'_> {
    fn copy(&self, is_cached: bool) -> Result<(), Side> {
        let (mut from, mut to) = (self.source.clone(), self.target.clone());
        let (mut source, mut target) = (Chunk::EMPTY, Chunk::EMPTY);
        let (mut of_source, mut of_target) = (self.len, self.len);
        let mut left = self.len;
        while left > 0 {
            if source.is_empty() {
                source = from.next(of_source).ok_or(Side::Source)?;
                of_source -= source.len() as u64;
            }
            if target.is_empty() {
                target = to.next(of_target).ok_or(Side::Target)?;
                of_target -= target.len() as u64;
            }
            let copied = copy_part(source, target, is_cached).map_err(|_| Side::Target)?;
            (source, target) = (source.skip(copied), target.skip(copied));
            left -= copied as u64;
        }
        Ok(())
    }
}

/// A copy that was cut into parts.
pub(super) struct Parts<'a>(SmallVec<[Part<'a>; PARTS as usize]>);

impl<'a> Parts<'a> {
    /// Cuts the copy of the next `len` bytes from one list of mappings to another into parts.
    pub fn cut(from: &mut Cursor<'a>, to: &mut Cursor<'a>, len: u64) -> Result<Self, Side> {
        let most = len.div_ceil(PARTS).next_multiple_of(4096).max(LEAST);
        let mut parts = SmallVec::new();
        let mut left = len;
        while left > 0 {
            let (source, of_source) = from.rest().ok_or(Side::Source)?;
            let (target, of_target) = to.rest().ok_or(Side::Target)?;
            let len = most.min(left).min(of_source).min(of_target);
            from.skip(len).ok_or(Side::Source)?;
            to.skip(len).ok_or(Side::Target)?;
            parts.push(Part { source, target, len });
            left -= len;
        }
        Ok(Self(parts))
    }

    /// Copies all parts, with the threads that help. `is_cached`: as in [`copy_part`].
    pub fn copy(&self, helpers: &Helpers, is_cached: bool) -> Result<(), Side> {
        let failed = OnceLock::new();
        let copy = |part: u32| {
            if let Err(side) = self.0[part as usize].copy(is_cached) {
                let _ = failed.set(side);
            }
        };
        helpers.share(u32::try_from(self.0.len()).unwrap_or(u32::MAX), &copy);
        failed.into_inner().map_or(Ok(()), Err)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::sync::{Arc, RwLock};

    use memory::GuestMemory;

    use super::*;
    use crate::base::budget::{CHUNK, SHARED_CHUNK};
    use crate::memory::copy::{copy, read, write, View};
    use crate::memory::key_table::KeyTable;
    use crate::memory::mr::tests::{region, OWN};
    use crate::memory::mr_cache::MrCache;
    use crate::memory::page_list::Range;

    /// Bytes of a page, of the pages of each region, and of memory.
    const PAGE: u64 = 0x1000;
    const PAGES: u64 = 0x4_0000;
    const MEMORY: u64 = 0x10_0000;
    const HUGE_PAGE: u64 = 0x10_0000;

    /// Copies `len` bytes from the offset `from` of scattered pages to the offset `to` of other ones, with a thread
    /// that helps, and checks all bytes.
    fn copy_scattered(helpers: &Arc<Helpers>, from: u64, to: u64, len: u64) {
        let memory = GuestMemory::anonymous(&[(0, MEMORY)]).unwrap();
        // No page is contiguous with the previous one.
        let page = |first, at| Range { addr: first + (at * 27 % 64) * 2 * PAGE, len: PAGE };
        let pages = |first| (0..PAGES / PAGE).map(|at| page(first, at)).collect::<Vec<_>>();
        let mut table = KeyTable::default();
        table.insert(region(&memory, 0x100, 0, &pages(0)));
        table.insert(region(&memory, 0x200, 0, &pages(MEMORY / 2)));
        let table = RwLock::new(table);
        let mut cache = MrCache::with_helpers(Some(helpers));
        let source = [cache.map(&table, 0x100, OWN, from, len).unwrap()];
        let target = [cache.map(&table, 0x200, OWN, to, len).unwrap()];
        let all = [cache.map(&table, 0x200, OWN, 0, PAGES).unwrap()];
        let view = |mappings| View { cache: &cache, mappings };
        let data: Vec<u8> = (0..len).map(|at| (at * 31 % 251) as u8 | 1).collect();
        write(view(&source), &data).unwrap();
        assert_eq!(copy(view(&source), view(&target), len), Ok(len));
        let mut found = vec![0; PAGES as usize];
        read(view(&all), &mut found).unwrap();
        let (begin, end) = (to as usize, (to + len) as usize);
        assert_eq!(found[begin..end], data);
        assert!(found[..begin].iter().chain(&found[end..]).all(|&byte| byte == 0));
    }

    #[test]
    fn parts_of_any_pages_arrive() {
        with_helper(|helpers, helped| {
            let part = LEAST;
            for (from, to) in [(0, 0), (0, 100), (3000, 1), (PAGE - 1, 1)] {
                for len in
                    [4 * part, 4 * part + 1, 4 * part + 64, 5 * part + 63, 6 * part, 7 * part + 65]
                {
                    copy_scattered(helpers, from, to, len);
                }
            }
            // This thread may have been too fast so far.
            while helped.load(Ordering::Relaxed) == 0 {
                copy_scattered(helpers, 0, 0, 7 * part);
            }
        });
    }

    /// Calls `f` with helpers, one of which is a thread that helps, and with the number of copies that it helped with.
    pub(crate) fn with_helper(f: impl FnOnce(&Arc<Helpers>, &AtomicU32)) {
        struct Ends<'a>(&'a AtomicBool);
        impl Drop for Ends<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let helpers = Arc::new(Helpers::new(|| {}));
        let (ends, helped) = (AtomicBool::new(false), AtomicU32::new(0));
        // Copies are shared while somebody is there, whether the thread has begun or not.
        let _here = helpers.join();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut helper = helpers.join();
                while !ends.load(Ordering::Relaxed) {
                    if helper.help() {
                        helped.fetch_add(1, Ordering::Relaxed);
                    } else {
                        std::thread::yield_now();
                    }
                }
            });
            // A check that fails ends the thread as well.
            let _ends = Ends(&ends);
            f(&helpers, &helped);
        });
    }

    /// Prints how fast chunk after chunk of a region is copied, alone and with a thread that helps.
    #[test]
    #[ignore = "measures, and proves nothing"]
    fn speed_of_large_copies() {
        with_helper(|helpers, _| {
            for size in [128 << 10, 512 << 10, 1 << 20, 8 << 20, 64 << 20] {
                for (page, chunk) in [
                    (PAGE, CHUNK),
                    (PAGE, SHARED_CHUNK),
                    (HUGE_PAGE, CHUNK),
                    (HUGE_PAGE, SHARED_CHUNK),
                ] {
                    if page > size || chunk > size {
                        continue;
                    }
                    let speed = |helpers| copy_speed(helpers, size, page, chunk);
                    let (alone, shared) = (speed(None), speed(Some(helpers)));
                    let [size, page, chunk] = [size, page, chunk].map(|bytes| bytes >> 10);
                    println!(
                        "{size} KiB, pages of {page}, chunks of {chunk}: {alone:.1} GB/s, {shared:.1} with help"
                    );
                }
            }
        });
    }

    /// Returns the speed of copies of a region of `size` bytes, in GB/s: pages with the distance of so many.
    fn copy_speed(helpers: Option<&Arc<Helpers>>, size: u64, of_page: u64, chunk: u64) -> f64 {
        let memory = GuestMemory::anonymous(&[(0, 4 * size)]).unwrap();
        let page = |first, at| Range { addr: first + at * 2 * of_page, len: of_page };
        let pages = |first| (0..size / of_page).map(|at| page(first, at)).collect::<Vec<_>>();
        let mut table = KeyTable::default();
        table.insert(region(&memory, 0x100, 0, &pages(0)));
        table.insert(region(&memory, 0x200, 0, &pages(2 * size)));
        let table = RwLock::new(table);
        let mut cache = MrCache::with_helpers(helpers);
        let mut least = std::time::Duration::MAX;
        for _ in 0..8 {
            let begin = std::time::Instant::now();
            for _ in 0..(64 << 20) / size {
                for at in (0..size).step_by(chunk as usize) {
                    let source = [cache.map(&table, 0x100, OWN, at, chunk).unwrap()];
                    let target = [cache.map(&table, 0x200, OWN, at, chunk).unwrap()];
                    let view = |mappings| View { cache: &cache, mappings };
                    copy(view(&source), view(&target), size).unwrap();
                }
            }
            least = least.min(begin.elapsed());
        }
        f64::from(64 << 20) / least.as_secs_f64() / 1e9
    }
}
