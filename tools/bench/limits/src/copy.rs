// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! memcpy between two mappings of shared memory files, as a device has the memory of two guests.

use std::fs::File;
use std::hint::black_box;
use std::path::Path;
use std::time::Duration;

use memmap2::MmapMut;
use rustix::fs::{ftruncate, memfd_create, open, MemfdFlags, Mode, OFlags};

use crate::samples::mean;
use crate::Error;

/// perftest walks through so many bytes with messages smaller than that, and sends larger ones
/// from one place to one place.
const CYCLE: usize = 4096;
/// perftest's steps are multiples of this.
const LINE: usize = 64;

/// A page of a guest, and the memory that its pages are chosen from.
const PAGE: usize = 4096;
const SPREAD: usize = 64 << 20;

/// MiB a second of copies of `size` bytes, with the working set of perftest. The files are in
/// `dir`, for instance where a guest's memory is, or memfds.
pub fn bandwidth(size: usize, time: Duration, dir: Option<&Path>) -> Result<f64, Error> {
    let len = size.max(CYCLE);
    let (source, mut target) = (filled(len, dir)?, filled(len, dir)?);
    let places: Vec<usize> = (0..=len - size).step_by(size.next_multiple_of(LINE)).collect();
    let mut place = places.iter().cycle();
    let seconds = mean(time, |count| {
        for &at in place.by_ref().take(usize::try_from(count).unwrap_or(usize::MAX)) {
            let source = black_box(&source[at..at + size]);
            black_box(&mut target[at..at + size]).copy_from_slice(source);
        }
        Ok::<_, Error>(())
    })?;
    Ok(size as f64 / seconds / f64::from(1 << 20))
}

/// The same, page by page, of pages that lie anywhere in their files, as those of a guest's program
/// do: `rep movsb` begins anew with each, no prefetch leads from one to the next, and more of them
/// are in each other's place in the caches.
pub fn bandwidth_of_pages(size: usize, time: Duration, dir: &Path) -> Result<f64, Error> {
    let (source, mut target) = (filled(SPREAD, Some(dir))?, filled(SPREAD, Some(dir))?);
    let mut random = Random(0x5eed);
    let pages: Vec<_> = (0..size.div_ceil(PAGE)).map(|_| (random.page(), random.page())).collect();
    let seconds = mean(time, |count| {
        for _ in 0..count {
            for &(from, to) in &pages {
                let source = black_box(&source[from..from + PAGE]);
                black_box(&mut target[to..to + PAGE]).copy_from_slice(source);
            }
        }
        Ok::<_, Error>(())
    })?;
    Ok((pages.len() * PAGE) as f64 / seconds / f64::from(1 << 20))
}

/// The same pages in each run.
struct Random(u64);

impl Random {
    /// Where a page begins.
    fn page(&mut self) -> usize {
        // Knuth's MMIX generator; its upper bits are the better ones.
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % (SPREAD / PAGE) * PAGE
    }
}

/// A mapping whose pages are all there.
fn filled(len: usize, dir: Option<&Path>) -> Result<MmapMut, Error> {
    let file = shared_file(len, dir)?;
    // SAFETY: the file has no name and its descriptor does not leave this function, so nobody
    // truncates it or writes to it behind the mapping's back.
    let mut map = unsafe { MmapMut::map_mut(&file) }.map_err(Error::system("mmap"))?;
    map.fill(0x5a);
    Ok(map)
}

fn shared_file(len: usize, dir: Option<&Path>) -> Result<File, Error> {
    let file = match dir {
        Some(dir) => {
            open(dir, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)
        }
        None => memfd_create("limits", MemfdFlags::CLOEXEC),
    }
    .map_err(Error::system("making a memory file"))?;
    ftruncate(&file, len as u64).map_err(Error::system("ftruncate"))?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_odd_and_large() {
        for size in [1, 2, 4095, 4096, 100_001] {
            let rate = bandwidth(size, Duration::ZERO, None);
            assert!(rate.is_ok_and(|rate| rate > 0.0), "{size}");
        }
        let rate = bandwidth_of_pages(100_001, Duration::ZERO, Path::new("/tmp"));
        assert!(rate.is_ok_and(|rate| rate > 0.0));
    }
}
