// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The map from guest addresses to this process.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use crate::error::MemoryError;
use crate::mapping::Mapping;
use crate::pool::{Place, Share, ShareError};
use crate::sigbus::Lost;
use crate::{Chunk, Slice};

/// The bytes of a page.
pub const PAGE_SIZE: usize = 4096;

/// The reason why a region was not mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The region has no bytes, or its address, offset or length is not a multiple of the page size.
    #[error("region of {len} bytes at {guest_addr:#x}, file offset {offset:#x}: not whole pages")]
    Alignment {
        /// First guest address.
        guest_addr: u64,
        /// Bytes.
        len: u64,
        /// Offset in the file.
        offset: u64,
    },
    /// The end is beyond the last address.
    #[error("region of {len} bytes at {guest_addr:#x} goes beyond the last address")]
    Overflow {
        /// First guest address.
        guest_addr: u64,
        /// Bytes.
        len: u64,
    },
    /// Another region holds some of these addresses.
    #[error("region of {len} bytes at {guest_addr:#x} overlaps another")]
    Overlap {
        /// First guest address.
        guest_addr: u64,
        /// Bytes.
        len: u64,
    },
    /// The file ends before the region does; an access would end in SIGBUS.
    #[error("region at {guest_addr:#x} ends at {end:#x} of a file of {size:#x} bytes")]
    Truncated {
        /// First guest address.
        guest_addr: u64,
        /// The end of the region in the file.
        end: u64,
        /// Bytes in the file.
        size: u64,
    },
    /// The guest can have no more regions.
    #[error("region of {len} bytes at {guest_addr:#x}: {reason}")]
    TooMany {
        /// First guest address.
        guest_addr: u64,
        /// Bytes.
        len: u64,
        /// The limit that is reached.
        reason: ShareError,
    },
    /// The file is none of memfd, tmpfs or hugetlbfs.
    #[error(
        "region of {len} bytes at {guest_addr:#x}: its file is none of memfd, tmpfs or hugetlbfs"
    )]
    FileSystem {
        /// First guest address.
        guest_addr: u64,
        /// Bytes.
        len: u64,
    },
    /// The kernel refused.
    #[error("region of {len} bytes at {guest_addr:#x}, file offset {offset:#x}: {call}: {errno}")]
    Os {
        /// First guest address.
        guest_addr: u64,
        /// Bytes.
        len: u64,
        /// Offset in the file.
        offset: u64,
        /// The system call.
        call: &'static str,
        /// The error of that call.
        errno: Errno,
    },
}

/// A region of guest memory, as a VMM describes it.
#[derive(Clone, Copy, Debug)]
pub struct GuestRegion<'fd> {
    /// First guest address.
    pub guest_addr: u64,
    /// Bytes.
    pub len: u64,
    /// The file behind it.
    pub fd: BorrowedFd<'fd>,
    /// The beginning of the region in the file.
    pub offset: u64,
    /// Whether the device may write it.
    pub writable: bool,
}

/// A part of guest memory that has turned into zeros, because its file has lost it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Loss {
    /// First guest address of the region.
    pub region: u64,
    /// The offset of the first lost byte in the region.
    pub offset: u64,
    /// The number of bytes, of all losses of the region together.
    pub len: u64,
    /// Whether a memory error of the host was among the reasons.
    pub poisoned: bool,
}

/// A file, by its device and inode, and an offset in it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct InFile {
    device: u64,
    inode: u64,
    offset: u64,
}

impl InFile {
    fn of(fd: BorrowedFd<'_>, offset: u64) -> Result<Self, Errno> {
        let stat = rustix::fs::fstat(fd)?;
        Ok(Self { device: stat.st_dev, inode: stat.st_ino, offset })
    }

    fn behind(self, len: u64) -> Self {
        Self { offset: self.offset.saturating_add(len), ..self }
    }
}

/// Returns whether two descriptors are of one file.
pub fn is_same_file(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> bool {
    matches!((InFile::of(one, 0), InFile::of(other, 0)), (Ok(one), Ok(other)) if one == other)
}

/// Returns the first address of the whole pages in `[addr, addr + len)`, and the address behind the last one. If there
/// is no whole page, the second address is not above the first.
pub fn whole_pages(addr: u64, len: u64) -> (u64, u64) {
    let mask = rustix::param::page_size() as u64 - 1;
    (addr.saturating_add(mask) & !mask, addr.saturating_add(len) & !mask)
}

/// A mapped region: `[start, start + len)` is at `offset` of the mapping.
#[derive(Clone, Debug)]
struct Mapped {
    start: u64,
    len: u64,
    offset: usize,
    mapping: Arc<Mapping>,
    /// The place of the region in its file; `None` for memory without a file.
    file: Option<InFile>,
    /// Counts a region that shares its mapping with another one, from which it was split.
    _place: Option<Arc<Place>>,
}

impl Mapped {
    fn end(&self) -> u64 {
        // Checked when the region was added.
        self.start + self.len
    }

    /// Returns whether one mapping can have this region and another one of `file`, because one follows the other at its
    /// addresses and in the file.
    fn joins(&self, other: &GuestRegion<'_>, file: InFile) -> bool {
        let Some(own) = self.file else { return false };
        let is_before = self.end() == other.guest_addr && own.behind(self.len) == file;
        let is_behind = other.guest_addr + other.len == self.start && file.behind(other.len) == own;
        // A lost part of a mapping stays lost until the VMM maps it again.
        let is_alike = self.mapping.writable() == other.writable && !self.mapping.is_damaged();
        is_alike && (is_before || is_behind)
    }

    /// Returns the part of this region between two addresses in it.
    fn part(&self, start: u64, end: u64) -> Self {
        let skip = start - self.start;
        Self {
            start,
            len: end - start,
            // The region has so many bytes in this process.
            offset: self.offset + usize::try_from(skip).unwrap_or(usize::MAX),
            file: self.file.map(|file| file.behind(skip)),
            ..self.clone()
        }
    }
}

/// An immutable snapshot of a guest's memory map. Cloning shares it.
///
/// A change makes a new snapshot, which shares the mappings that stayed. An old snapshot keeps all of its mappings.
#[derive(Clone, Debug, Default)]
pub struct GuestMemory {
    /// The regions in the order of their addresses; no two overlap.
    regions: Arc<Vec<Mapped>>,
    share: Share,
}

impl GuestMemory {
    /// Makes a map without memory, to which regions may be added as far as `share` has some.
    pub fn new(share: Share) -> Self {
        Self { regions: Arc::default(), share }
    }

    /// Returns a map without memory and with the share of this one.
    #[must_use]
    pub fn cleared(&self) -> Self {
        Self::new(self.share.clone())
    }

    /// Makes memory of zeros at these ranges of `(address, length)`, for tests.
    pub fn anonymous(ranges: &[(u64, u64)]) -> Result<Self, MapError> {
        ranges.iter().try_fold(Self::default(), |memory, &(start, len)| {
            memory.check_range(start, len, 0)?;
            let bytes = to_usize(start, len)?;
            let failed =
                |errno| MapError::Os { guest_addr: start, len, offset: 0, call: "mmap", errno };
            let mapping = Arc::new(Mapping::anonymous(bytes).map_err(failed)?);
            Ok(memory.insert(Mapped { start, len, offset: 0, mapping, file: None, _place: None }))
        })
    }

    /// Returns this map with one more region.
    ///
    /// The file must be a memfd or one of tmpfs or hugetlbfs: to map any other file, or to access a page of it, may
    /// wait as long as the server of its file system likes, and anybody may be that server (FUSE).
    ///
    /// `len`, `guest_addr` and the file offset must be multiples of the page size. The mapping begins
    /// and ends at multiples of the file's own page size, which may be larger; nothing outside of the
    /// region is accessed.
    pub fn with_region(&self, region: &GuestRegion<'_>) -> Result<Self, MapError> {
        let &GuestRegion { guest_addr, len, .. } = region;
        self.check_new(region)?;
        let refused = |reason| MapError::TooMany { guest_addr, len, reason };
        self.map(region, self.share.take().map_err(refused)?)
    }

    /// Returns this map with one more region, as [`Self::with_region`], which may become one with its neighbours:
    /// memory that a VMM gives out in `n` blocks of one size takes about `log2(n)` mappings instead of `n`.
    ///
    /// A region becomes one with a neighbour that is not larger, so that each page is mapped again only as often as the
    /// memory around it has doubled.
    pub fn with_joined_region(&self, region: &GuestRegion<'_>) -> Result<Self, MapError> {
        let &GuestRegion { guest_addr, len, .. } = region;
        self.check_new(region)?;
        let refused = |reason| MapError::TooMany { guest_addr, len, reason };
        let place = self.share.take().map_err(refused)?;
        let Some((rest, whole)) = self.join(region) else { return self.map(region, place) };
        match rest.map(&whole, place) {
            Ok(memory) => Ok(memory),
            // The file may have lost what a neighbour has of it.
            Err(_) => self.map(region, self.share.take().map_err(refused)?),
        }
    }

    /// Returns the region that this one makes together with its neighbours, and this map without those. Returns `None`
    /// if the region stays alone.
    fn join<'fd>(&self, region: &GuestRegion<'fd>) -> Option<(Self, GuestRegion<'fd>)> {
        let mut file = InFile::of(region.fd, region.offset).ok()?;
        let (mut whole, mut regions) = (*region, Vec::clone(&self.regions));
        let joins = |other: &Mapped, whole: &GuestRegion<'_>, file| {
            other.len <= whole.len && other.joins(whole, file)
        };
        while let Some(at) = regions.iter().position(|other| joins(other, &whole, file)) {
            let other = regions.remove(at);
            file.offset = file.offset.min(other.file?.offset);
            whole.guest_addr = whole.guest_addr.min(other.start);
            whole.len += other.len;
            whole.offset = file.offset;
        }
        let rest = Self { share: self.share.clone(), regions: Arc::new(regions) };
        (whole.len > region.len).then_some((rest, whole))
    }

    /// Returns this map with one more region, which the guest has had in an earlier process. It is not refused because
    /// there are too many. See [`Self::with_region`].
    pub fn with_region_again(&self, region: &GuestRegion<'_>) -> Result<Self, MapError> {
        self.check_new(region)?;
        self.map(region, self.share.take_again())
    }

    fn map(&self, region: &GuestRegion<'_>, place: Place) -> Result<Self, MapError> {
        let &GuestRegion { guest_addr: start, len, fd, offset, writable } = region;
        let failed =
            |call| move |errno| MapError::Os { guest_addr: start, len, offset, call, errno };
        if !descriptor::is_memory(fd) {
            return Err(MapError::FileSystem { guest_addr: start, len });
        }
        check_file(region)?;
        let block = block_size(fd).map_err(failed("fstatfs"))?;
        let whole = whole_blocks(offset, len, block)
            .ok_or(MapError::Overflow { guest_addr: start, len })?;
        let mapping = Mapping::of_file(fd, whole.offset, whole.len, block, writable, place);
        let mapping = Arc::new(mapping.map_err(failed("mmap"))?);
        let file = Some(InFile::of(fd, offset).map_err(failed("fstat"))?);
        Ok(self.insert(Mapped { start, len, offset: whole.skip, mapping, file, _place: None }))
    }

    /// Returns this map without the regions that lie within `[guest_addr, guest_addr + len)`, and how
    /// many those were. A region that is only partly inside stays.
    pub fn without(&self, guest_addr: u64, len: u64) -> (Self, usize) {
        let end = guest_addr.saturating_add(len);
        let inside = |region: &Mapped| region.start >= guest_addr && region.end() <= end;
        let kept: Vec<_> = self.regions.iter().filter(|r| !inside(r)).cloned().collect();
        let removed = self.regions.len() - kept.len();
        (Self { regions: Arc::new(kept), share: self.share.clone() }, removed)
    }

    /// Returns this map without the whole pages in `[guest_addr, guest_addr + len)`, and the number of regions that had
    /// any of those. The rest of a region stays. A region that falls into two counts as two, and the guest must be able
    /// to have one more.
    pub fn without_part(&self, guest_addr: u64, len: u64) -> Result<(Self, usize), ShareError> {
        let (from, to) = whole_pages(guest_addr, len);
        let is_outside = |region: &Mapped| from >= to || region.end() <= from || region.start >= to;
        let mut kept = Vec::with_capacity(self.regions.len() + 1);
        let mut changed = 0;
        for region in self.regions.iter() {
            if is_outside(region) {
                kept.push(region.clone());
                continue;
            }
            changed += 1;
            let (has_left, has_right) = (region.start < from, to < region.end());
            if has_left {
                kept.push(region.part(region.start, from));
            }
            if has_right {
                let right = region.part(to, region.end());
                kept.push(if has_left {
                    Mapped { _place: Some(Arc::new(self.share.take()?)), ..right }
                } else {
                    right
                });
            }
        }
        Ok((Self { regions: Arc::new(kept), share: self.share.clone() }, changed))
    }

    /// Returns whether a part of this memory was lost, so that this process has zeros of its own where
    /// the guest has something else. This stays so until the memory is mapped again.
    pub fn is_damaged(&self) -> bool {
        self.regions.iter().any(|region| region.mapping.is_damaged())
    }

    /// Returns the losses of each region since the last call, for this map or another one that shares its mappings.
    /// [`crate::losses`] says at less cost whether there are any.
    pub fn take_losses(&self) -> Vec<Loss> {
        let loss = |region: &Mapped| {
            let Lost { offset, len, poisoned } = region.mapping.take_lost()?;
            // Several regions may be parts of the mapping.
            let has = |other: &&Mapped| {
                Arc::ptr_eq(&other.mapping, &region.mapping) && other.offset <= offset
            };
            let region = self.regions.iter().rfind(has).unwrap_or(region);
            let offset = offset.saturating_sub(region.offset) as u64;
            Some(Loss { region: region.start, offset, len: len as u64, poisoned })
        };
        self.regions.iter().filter_map(loss).collect()
    }

    /// Returns whether there is no memory.
    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// Returns the number of bytes of all regions.
    pub fn size(&self) -> u64 {
        self.regions.iter().map(|region| region.len).sum()
    }

    /// Returns every region as `(address, length)`, in the order of the addresses.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.regions.iter().map(|region| (region.start, region.len))
    }

    /// Returns the `len` bytes at `addr`, if they are contiguous in this process.
    pub fn slice(&self, addr: u64, len: u64) -> Result<Slice, MemoryError> {
        let (region, skip, have) = self.find(addr, len)?;
        if have < len {
            return Err(MemoryError::Unmapped { addr, len });
        }
        let bytes = usize::try_from(len).map_err(|_| MemoryError::Unmapped { addr, len })?;
        Slice::new(&region.mapping, region.offset + skip, bytes)
    }

    /// Returns the contiguous range that begins at `addr`: `len` bytes, or fewer where a region ends.
    ///
    /// This is for ranges that may go from one region to the next: call it again for the rest.
    pub fn prefix(&self, addr: u64, len: u64) -> Result<Slice, MemoryError> {
        let (region, skip, have) = self.find(addr, len)?;
        let bytes =
            usize::try_from(have.min(len)).map_err(|_| MemoryError::Unmapped { addr, len })?;
        Slice::new(&region.mapping, region.offset + skip, bytes)
    }

    /// Borrows the memory that [`GuestMemory::prefix`] returns.
    pub fn chunk(&self, addr: u64, len: u64) -> Result<Chunk<'_>, MemoryError> {
        let (region, skip, have) = self.find(addr, len)?;
        let len =
            usize::try_from(have.min(len)).map_err(|_| MemoryError::Unmapped { addr, len })?;
        region.mapping.chunk(region.offset + skip, len)
    }

    /// Returns the page of [`PAGE_SIZE`] bytes at `addr`, which is aligned to that and may be
    /// written, and the mapping that the page is in.
    pub(crate) fn page(&self, addr: u64) -> Result<(NonNull<u8>, &Arc<Mapping>), MemoryError> {
        let len = PAGE_SIZE as u64;
        let (region, skip, have) = self.find(addr, len)?;
        if have < len {
            return Err(MemoryError::Unmapped { addr, len });
        }
        if !region.mapping.writable() {
            return Err(MemoryError::ReadOnly);
        }
        // `Slice` checks the place against the mapping.
        let slice = Slice::new(&region.mapping, region.offset + skip, PAGE_SIZE)?;
        Ok((slice.addr(), &region.mapping))
    }

    /// Returns whether all of `[addr, addr + len)` is memory, in one region or several.
    pub fn contains(&self, addr: u64, len: u64) -> bool {
        let mut done = 0;
        while done < len {
            let Some(at) = addr.checked_add(done) else { return false };
            let Ok((_, _, have)) = self.find(at, len - done) else { return false };
            done += have.min(len - done);
        }
        true
    }

    /// Copies the bytes from guest address `addr` on into `to`. They may be in several regions.
    pub fn read(&self, addr: u64, to: &mut [u8]) -> Result<(), MemoryError> {
        self.each(addr, to.len() as u64, |slice, done| {
            slice.read(0, &mut to[done..done + slice.len()])
        })
    }

    /// Copies `from` to guest address `addr`. The target may be in several regions.
    pub fn write(&self, addr: u64, from: &[u8]) -> Result<(), MemoryError> {
        self.each(addr, from.len() as u64, |slice, done| {
            slice.write(0, &from[done..done + slice.len()])
        })
    }

    /// Reads the value at guest address `addr`. Neither the guest nor a peer can change the copy.
    pub fn read_obj<T: FromBytes + IntoBytes>(&self, addr: u64) -> Result<T, MemoryError> {
        let mut value = T::new_zeroed();
        self.read(addr, value.as_mut_bytes())?;
        Ok(value)
    }

    /// Calls `f` with each contiguous part of the range and the number of bytes before that part.
    fn each(
        &self,
        addr: u64,
        len: u64,
        mut f: impl FnMut(&Slice, usize) -> Result<(), MemoryError>,
    ) -> Result<(), MemoryError> {
        let unmapped = MemoryError::Unmapped { addr, len };
        let mut done = 0;
        while done < len {
            let at = addr.checked_add(done).ok_or(unmapped)?;
            let slice = self.prefix(at, len - done).map_err(|_| unmapped)?;
            f(&slice, usize::try_from(done).map_err(|_| unmapped)?)?;
            done += slice.len() as u64;
        }
        Ok(())
    }

    /// Returns the region that has `addr`, the offset of `addr` in it, and the number of bytes from
    /// there to its end.
    fn find(&self, addr: u64, len: u64) -> Result<(&Mapped, usize, u64), MemoryError> {
        let unmapped = MemoryError::Unmapped { addr, len };
        let after = self.regions.partition_point(|region| region.start <= addr);
        let region = after.checked_sub(1).and_then(|i| self.regions.get(i)).ok_or(unmapped)?;
        let skip = addr - region.start;
        if skip >= region.len {
            return Err(unmapped);
        }
        Ok((region, usize::try_from(skip).map_err(|_| unmapped)?, region.len - skip))
    }

    fn check_new(&self, region: &GuestRegion<'_>) -> Result<(), MapError> {
        self.check_range(region.guest_addr, region.len, region.offset)
    }

    fn check_range(&self, guest_addr: u64, len: u64, offset: u64) -> Result<(), MapError> {
        let page = rustix::param::page_size() as u64;
        if len == 0 || [guest_addr, len, offset].iter().any(|value| value % page != 0) {
            return Err(MapError::Alignment { guest_addr, len, offset });
        }
        let end = guest_addr.checked_add(len).ok_or(MapError::Overflow { guest_addr, len })?;
        if self.regions.iter().any(|region| region.start < end && guest_addr < region.end()) {
            return Err(MapError::Overlap { guest_addr, len });
        }
        Ok(())
    }

    fn insert(&self, region: Mapped) -> Self {
        let mut regions = Vec::clone(&self.regions);
        let index = regions.partition_point(|other| other.start < region.start);
        regions.insert(index, region);
        Self { regions: Arc::new(regions), share: self.share.clone() }
    }
}

fn to_usize(guest_addr: u64, len: u64) -> Result<usize, MapError> {
    usize::try_from(len).map_err(|_| MapError::Overflow { guest_addr, len })
}

/// Refuses a file that ends before the region does.
fn check_file(region: &GuestRegion<'_>) -> Result<(), MapError> {
    let &GuestRegion { guest_addr, len, fd, offset, .. } = region;
    let failed = |errno| MapError::Os { guest_addr, len, offset, call: "fstat", errno };
    let stat = rustix::fs::fstat(fd).map_err(failed)?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let end = offset.saturating_add(len);
    // A device file has no size (a file of hugetlbfs is a regular file); mmap refuses what the device
    // cannot map.
    let sized = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file();
    if sized && end > size {
        return Err(MapError::Truncated { guest_addr, end, size });
    }
    Ok(())
}

/// Returns the page size of a file, in bytes: its mappings begin and end at multiples of that.
///
/// tmpfs may have huge pages as well, but splits them where a mapping needs that.
fn block_size(fd: BorrowedFd<'_>) -> Result<usize, Errno> {
    /// `HUGETLBFS_MAGIC`, `linux/magic.h`.
    const HUGETLBFS: u64 = 0x9584_58f6;
    let page = rustix::param::page_size();
    let stat = rustix::fs::fstatfs(fd)?;
    // The width and the sign of the field differ between architectures.
    #[allow(clippy::unnecessary_fallible_conversions, clippy::useless_conversion)]
    let kind = u64::try_from(stat.f_type).map_or(0, |kind| kind & u64::from(u32::MAX));
    let size = usize::try_from(stat.f_bsize).unwrap_or(page);
    Ok(if kind == HUGETLBFS && size.is_power_of_two() { size.max(page) } else { page })
}

/// Whole blocks of a file, of which the first `skip` bytes come before a region.
#[derive(Debug, Eq, PartialEq)]
struct Whole {
    offset: u64,
    len: usize,
    skip: usize,
}

/// Returns the blocks of `block` bytes, a power of two, that have `[offset, offset + len)` of a file.
fn whole_blocks(offset: u64, len: u64, block: usize) -> Option<Whole> {
    let mask = block as u64 - 1;
    let skip = offset & mask;
    let whole = skip.checked_add(len)?.checked_add(mask)? & !mask;
    let (len, skip) = (usize::try_from(whole).ok()?, usize::try_from(skip).ok()?);
    Some(Whole { offset: offset - skip as u64, len, skip })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::pool::{Pool, GUARANTEED};

    fn memfd(len: u64) -> std::os::fd::OwnedFd {
        let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, len).unwrap();
        fd
    }

    #[test]
    fn ranges_cross_regions_only_when_asked() {
        let memory = GuestMemory::anonymous(&[(0x3000, 0x1000), (0x1000, 0x2000)]).unwrap();
        assert_eq!(memory.ranges().collect::<Vec<_>>(), [(0x1000, 0x2000), (0x3000, 0x1000)]);
        let data: Vec<u8> = (0..0x2000_u32).map(|i| (i % 251) as u8).collect();
        memory.write(0x1800, &data).unwrap();
        let mut found = vec![0; data.len()];
        memory.read(0x1800, &mut found).unwrap();
        assert_eq!(found, data);
        assert!(memory.slice(0x2fff, 2).is_err());
        assert_eq!(memory.prefix(0x2fff, 2).unwrap().len(), 1);
        assert!(memory.contains(0x1000, 0x3000));
        assert!(!memory.contains(0x1000, 0x3001));
        assert!(!memory.contains(0xfff, 2));
        assert!(memory.read(u64::MAX, &mut [0; 2]).is_err());
    }

    #[test]
    fn regions_come_and_go() {
        let fd = memfd(0x4000);
        let region = GuestRegion {
            guest_addr: 0x1000,
            len: 0x2000,
            fd: fd.as_fd(),
            offset: 0x1000,
            writable: true,
        };
        let memory = GuestMemory::default().with_region(&region).unwrap();
        memory.write(0x1000, b"guest").unwrap();
        let mut found = [0; 5];
        rustix::io::pread(&fd, &mut found, 0x1000).unwrap();
        assert_eq!(&found, b"guest");

        let slice = memory.slice(0x1000, 5).unwrap();
        let (none, removed) = memory.without(0, 0x2fff);
        assert_eq!((none.size(), removed), (0x2000, 0));
        let (none, removed) = memory.without(0, u64::MAX);
        assert_eq!((none.is_empty(), removed), (true, 1));
        drop(memory);
        slice.read(0, &mut found).unwrap();
        assert_eq!(&found, b"guest");
    }

    #[test]
    fn mappings_are_whole_blocks() {
        let whole = |offset, len, block| whole_blocks(offset, len, block).unwrap();
        let is = |offset, len, skip| Whole { offset, len, skip };
        assert_eq!(whole(0x3000, 0x2000, 0x1000), is(0x3000, 0x2000, 0));
        let huge = 2 << 20;
        assert_eq!(whole(0, 0xa_0000, huge), is(0, huge, 0));
        assert_eq!(whole(0xc_0000, 0x14_0000, huge), is(0, huge, 0xc_0000));
        assert_eq!(whole(0x30_0000, 0x20_0000, huge), is(0x20_0000, 2 * huge, 0x10_0000));
        assert_eq!(whole_blocks(0x1000, u64::MAX - 0x1fff, huge), None);
    }

    #[test]
    fn a_guest_has_no_more_regions_than_its_share() {
        let fd = memfd(0x1000);
        let region = |guest_addr| GuestRegion {
            guest_addr,
            len: 0x1000,
            fd: fd.as_fd(),
            offset: 0,
            writable: true,
        };
        let share = Pool::new(GUARANTEED).share().unwrap();
        let mut memory = GuestMemory::new(share.clone());
        for index in 0..GUARANTEED as u64 {
            memory = memory.with_region(&region(0x1000 * index)).unwrap();
        }
        let next = region(0x10_0000);
        let error = memory.with_region(&next).map(|_| ()).unwrap_err();
        let reason = ShareError::Pool { used: GUARANTEED, total: GUARANTEED };
        let MapError::TooMany { guest_addr: 0x10_0000, reason: found, .. } = error else {
            panic!("{error}")
        };
        assert_eq!(found, reason);
        // A region counts until its last user is gone.
        let slice = memory.slice(0, 1).unwrap();
        memory = memory.without(0, 0x1000).0;
        assert!(memory.with_region(&next).is_err());
        drop(slice);
        memory = memory.with_region(&next).unwrap();
        let more = memory.with_region_again(&region(0x20_0000)).unwrap();
        assert_eq!(share.used(), GUARANTEED + 1);
        drop((memory.cleared(), memory, more));
        assert_eq!(share.used(), 0);
    }

    /// Blocks of one file that a VMM plugs one by one, in either order, take few mappings, and have their bytes.
    #[test]
    fn neighbours_become_one() {
        const BLOCKS: u64 = 64;
        let fd = memfd(BLOCKS * 0x1000);
        let region = |index: u64| GuestRegion {
            guest_addr: 0x10_0000 + index * 0x1000,
            len: 0x1000,
            fd: fd.as_fd(),
            offset: index * 0x1000,
            writable: true,
        };
        let upwards: Vec<_> = (0..BLOCKS).collect();
        let downwards: Vec<_> = (0..BLOCKS).rev().collect();
        for order in [upwards, downwards] {
            let share = Pool::new(GUARANTEED).share().unwrap();
            let mut memory = GuestMemory::new(share.clone());
            let mut first = None;
            for index in order {
                memory = memory.with_joined_region(&region(index)).unwrap();
                memory.write(0x10_0000 + index * 0x1000, &index.to_ne_bytes()).unwrap();
                first.get_or_insert((memory.slice(0x10_0000 + index * 0x1000, 8).unwrap(), index));
                assert!(memory.ranges().count() <= 7, "{index}");
            }
            assert_eq!(memory.ranges().collect::<Vec<_>>(), [(0x10_0000, BLOCKS * 0x1000)]);
            for index in 0..BLOCKS {
                assert_eq!(memory.read_obj::<u64>(0x10_0000 + index * 0x1000), Ok(index));
            }
            // The mapping of a slice stays for as long as the slice.
            let (slice, index) = first.unwrap();
            assert_eq!((slice.read_obj::<u64>(0), share.used()), (Ok(index), 2));
            drop(slice);
            assert_eq!(share.used(), 1);
        }
    }

    #[test]
    fn only_neighbours_of_one_file_become_one() {
        let (fd, other) = (memfd(0x8000), memfd(0x8000));
        let region = |guest_addr, fd, offset, writable| GuestRegion {
            guest_addr,
            len: 0x1000,
            fd,
            offset,
            writable,
        };
        let (fd, other) = (fd.as_fd(), other.as_fd());
        let memory = GuestMemory::default().with_region(&region(0x1000, fd, 0x1000, true)).unwrap();
        let count =
            |region: &GuestRegion<'_>| memory.with_joined_region(region).unwrap().ranges().count();
        assert_eq!(count(&region(0x2000, fd, 0x2000, true)), 1);
        assert_eq!(count(&region(0, fd, 0, true)), 1);
        assert_eq!(count(&region(0x2000, other, 0x2000, true)), 2);
        assert_eq!(count(&region(0x2000, fd, 0x3000, true)), 2);
        assert_eq!(count(&region(0x3000, fd, 0x2000, true)), 2);
        assert_eq!(count(&region(0x2000, fd, 0x2000, false)), 2);
        assert_eq!(count(&region(0, fd, 0x2000, true)), 2);
    }

    #[test]
    fn a_part_of_a_region_goes() {
        let fd = memfd(0x10_0000);
        let region = GuestRegion {
            guest_addr: 0,
            len: 0x10_0000,
            fd: fd.as_fd(),
            offset: 0,
            writable: true,
        };
        let share = Pool::new(GUARANTEED).share().unwrap();
        let mut memory = GuestMemory::new(share.clone()).with_joined_region(&region).unwrap();
        for page in 0..0x100 {
            memory.write(page * 0x1000, &u64::to_ne_bytes(page)).unwrap();
        }
        let (less, changed) = memory.without_part(0, 0x1fff).unwrap();
        assert_eq!((less.ranges().collect::<Vec<_>>(), changed), (vec![(0x1000, 0xf_f000)], 1));
        assert_eq!(less.read_obj::<u64>(0x1000), Ok(1));
        drop(less);
        assert_eq!(memory.without_part(0x1001, 0x1ffe).unwrap().1, 0, "no whole page");
        // Every second page goes, as far as the guest can have more regions.
        for page in 0..GUARANTEED as u64 - 1 {
            memory = memory.without_part((2 * page + 1) * 0x1000, 0x1000).unwrap().0;
        }
        assert_eq!((memory.ranges().count(), share.used()), (GUARANTEED, GUARANTEED));
        assert!(memory.without_part(0x8_0000, 0x1000).is_err());
        for page in 0..0x100 {
            let is_gone = page % 2 == 1 && page < 2 * GUARANTEED as u64 - 2;
            let found = memory.read_obj::<u64>(page * 0x1000).ok();
            assert_eq!(found, (!is_gone).then_some(page));
        }
        // What was removed can come again, and becomes one with what is left.
        let again = GuestRegion { guest_addr: 0x1000, len: 0x1000, offset: 0x1000, ..region };
        let (less, _) = memory.without_part(0x2000, 0x1000).unwrap();
        drop(memory);
        let more = less.with_joined_region(&again).unwrap();
        assert_eq!(more.ranges().next(), Some((0, 0x2000)));
        let (none, changed) = more.without_part(0, u64::MAX).unwrap();
        assert_eq!((none.is_empty(), changed), (true, GUARANTEED - 1));
        drop((less, more));
        assert_eq!(share.used(), 0);
    }

    /// Only files of memory are mapped, because an access to another file system may never end.
    #[test]
    fn only_memory_is_taken_for_memory() {
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let region = GuestRegion {
            guest_addr: 0x7000,
            len: 0x1000,
            fd: file.as_fd(),
            offset: 0,
            writable: false,
        };
        let error = GuestMemory::default().with_region(&region).map(|_| ()).unwrap_err();
        assert!(matches!(error, MapError::FileSystem { guest_addr: 0x7000, .. }), "{error}");
    }

    #[test]
    fn read_only_memory_is_not_written() {
        let fd = memfd(0x1000);
        let region =
            GuestRegion { guest_addr: 0, len: 0x1000, fd: fd.as_fd(), offset: 0, writable: false };
        let memory = GuestMemory::default().with_region(&region).unwrap();
        let slice = memory.slice(0, 16).unwrap();
        assert_eq!(memory.write(0, &[1]), Err(MemoryError::ReadOnly));
        let word = slice.chunk(0, 8).unwrap();
        assert_eq!(word.fetch_add_u64(1), Err(MemoryError::ReadOnly));
        assert_eq!(
            slice.store_u16(0, 1, std::sync::atomic::Ordering::Relaxed),
            Err(MemoryError::ReadOnly)
        );
        assert_eq!(word.copy_to(word), Err(MemoryError::ReadOnly));
        assert_eq!(slice.read_obj::<u64>(0), Ok(0));
    }

    #[test]
    fn bad_regions_are_refused() {
        let fd = memfd(0x2000);
        let region = |guest_addr, len, offset| GuestRegion {
            guest_addr,
            len,
            fd: fd.as_fd(),
            offset,
            writable: true,
        };
        let memory = GuestMemory::default().with_region(&region(0x1000, 0x1000, 0)).unwrap();
        let add = |guest_addr, len, offset| {
            memory.with_region(&region(guest_addr, len, offset)).map(|_| ()).unwrap_err()
        };
        assert!(matches!(add(0x10, 0x1000, 0), MapError::Alignment { .. }));
        assert!(matches!(add(0x4000, 0, 0), MapError::Alignment { .. }));
        assert!(matches!(add(0x4000, 0x1000, 1), MapError::Alignment { .. }));
        assert!(matches!(add(u64::MAX - 0xfff, 0x2000, 0), MapError::Overflow { .. }));
        assert!(matches!(add(0, 0x2000, 0), MapError::Overlap { .. }));
        assert!(matches!(add(0x4000, 0x3000, 0), MapError::Truncated { .. }));
        assert!(matches!(add(0x4000, 0x1000, u64::MAX - 0xfff), MapError::Truncated { .. }));
    }
}
