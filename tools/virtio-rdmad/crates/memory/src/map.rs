// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The map from guest addresses to this process.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use crate::mapping::Mapping;
use crate::{Chunk, Slice};

/// Most regions of one guest; bounds what a front end can make this process map.
pub const MAX_REGIONS: usize = 1024;

/// Why an access to guest memory was refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum MemoryError {
    /// The range is not memory of the guest, or not contiguous in this process.
    #[error("{len} bytes at {addr:#x} are not memory of the guest")]
    Unmapped {
        /// First address of the range.
        addr: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// The range goes beyond the slice.
    #[error("{len} bytes at offset {offset} of a slice of {have}")]
    Bounds {
        /// Offset in the slice.
        offset: usize,
        /// Bytes asked for.
        len: usize,
        /// Bytes in the slice.
        have: usize,
    },
    /// The address is not a multiple of the word's size.
    #[error("a word of {align} bytes is not aligned")]
    Misaligned {
        /// The alignment it needs.
        align: usize,
    },
    /// A write to memory that the front end gave out for reading.
    #[error("the memory is read-only")]
    ReadOnly,
}

/// Why a region was not mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// No bytes, or an address, offset or length that is not a multiple of the page size.
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
    #[error("region ends at {end:#x} of a file of {size:#x} bytes")]
    Truncated {
        /// Where the region ends in the file.
        end: u64,
        /// Bytes in the file.
        size: u64,
    },
    /// There are [`MAX_REGIONS`] already.
    #[error("more than {MAX_REGIONS} regions")]
    TooMany,
    /// The kernel refused.
    #[error("mapping guest memory: {0}")]
    Os(#[from] Errno),
}

/// What a front end says of one region of guest memory.
#[derive(Clone, Copy, Debug)]
pub struct Region<'fd> {
    /// First guest address.
    pub guest_addr: u64,
    /// Bytes.
    pub len: u64,
    /// The file behind it.
    pub fd: BorrowedFd<'fd>,
    /// Where the region begins in the file.
    pub offset: u64,
    /// Whether the device may write it.
    pub writable: bool,
}

/// A mapped region: `[start, start + len)` is at `offset` of the mapping.
#[derive(Clone, Debug)]
struct Mapped {
    start: u64,
    len: u64,
    offset: usize,
    mapping: Arc<Mapping>,
}

impl Mapped {
    fn end(&self) -> u64 {
        // Checked when the region was added.
        self.start + self.len
    }
}

/// An immutable snapshot of a guest's memory map. Cloning shares it.
///
/// A change makes a new snapshot, which shares the mappings that stayed; an old one keeps working
/// on what it had.
#[derive(Clone, Debug, Default)]
pub struct GuestMemory {
    /// By address, none overlapping.
    regions: Arc<Vec<Mapped>>,
}

impl GuestMemory {
    /// Memory of zeros at the given `(address, length)` ranges, for tests.
    pub fn anonymous(ranges: &[(u64, u64)]) -> Result<Self, MapError> {
        ranges.iter().try_fold(Self::default(), |memory, &(start, len)| {
            memory.check_new(start, len, 0)?;
            let bytes = to_usize(start, len)?;
            let mapping = Arc::new(Mapping::anonymous(bytes)?);
            Ok(memory.insert(Mapped { start, len, offset: 0, mapping }))
        })
    }

    /// This map with one region more.
    ///
    /// `len` and `guest_addr` are multiples of the page size; a file offset that is not is rounded
    /// down for the mapping.
    pub fn with_region(&self, region: &Region<'_>) -> Result<Self, MapError> {
        let &Region { guest_addr: start, len, fd, offset, writable } = region;
        self.check_new(start, len, offset)?;
        check_file(fd, len, offset)?;
        let bytes = to_usize(start, len)?;
        let mapping = Arc::new(Mapping::of_file(fd, offset, bytes, writable)?);
        Ok(self.insert(Mapped { start, len, offset: 0, mapping }))
    }

    /// This map without every region that lies within `[guest_addr, guest_addr + len)`, and how
    /// many those were. A region that is only partly inside stays.
    pub fn without(&self, guest_addr: u64, len: u64) -> (Self, usize) {
        let end = guest_addr.saturating_add(len);
        let inside = |region: &Mapped| region.start >= guest_addr && region.end() <= end;
        let kept: Vec<_> = self.regions.iter().filter(|r| !inside(r)).cloned().collect();
        let removed = self.regions.len() - kept.len();
        (Self { regions: Arc::new(kept) }, removed)
    }

    /// Whether there is no memory at all.
    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// Bytes in all regions.
    pub fn size(&self) -> u64 {
        self.regions.iter().map(|region| region.len).sum()
    }

    /// Every region as `(address, length)`, by address.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.regions.iter().map(|region| (region.start, region.len))
    }

    /// The `len` bytes at `addr`, if they are one contiguous range of this process.
    pub fn slice(&self, addr: u64, len: u64) -> Result<Slice, MemoryError> {
        let (region, skip, have) = self.find(addr, len)?;
        if have < len {
            return Err(MemoryError::Unmapped { addr, len });
        }
        let bytes = usize::try_from(len).map_err(|_| MemoryError::Unmapped { addr, len })?;
        Slice::new(&region.mapping, region.offset + skip, bytes)
    }

    /// The contiguous range that begins at `addr`: `len` bytes, or fewer where a region ends.
    ///
    /// For ranges that may cross from one region to the next; ask again behind what it returned.
    pub fn prefix(&self, addr: u64, len: u64) -> Result<Slice, MemoryError> {
        let (region, skip, have) = self.find(addr, len)?;
        let bytes =
            usize::try_from(have.min(len)).map_err(|_| MemoryError::Unmapped { addr, len })?;
        Slice::new(&region.mapping, region.offset + skip, bytes)
    }

    /// As [`GuestMemory::prefix`], borrowed.
    pub fn chunk(&self, addr: u64, len: u64) -> Result<Chunk<'_>, MemoryError> {
        let (region, skip, have) = self.find(addr, len)?;
        let len =
            usize::try_from(have.min(len)).map_err(|_| MemoryError::Unmapped { addr, len })?;
        region.mapping.chunk(region.offset + skip, len)
    }

    /// The page of [`crate::PAGE_SIZE`] bytes at `addr`, which is aligned to that and may be
    /// written, and the mapping that it is in.
    pub(crate) fn page(&self, addr: u64) -> Result<(NonNull<u8>, &Arc<Mapping>), MemoryError> {
        let len = crate::PAGE_SIZE as u64;
        let (region, skip, have) = self.find(addr, len)?;
        if have < len {
            return Err(MemoryError::Unmapped { addr, len });
        }
        if !region.mapping.writable() {
            return Err(MemoryError::ReadOnly);
        }
        // `Slice` checks the place against the mapping.
        let slice = Slice::new(&region.mapping, region.offset + skip, crate::PAGE_SIZE)?;
        Ok((slice.addr(), &region.mapping))
    }

    /// Whether all of `[addr, addr + len)` is memory, in one region or several.
    pub fn contains(&self, addr: u64, len: u64) -> bool {
        self.each(addr, len, |_, _| Ok(())).is_ok()
    }

    /// Copies from guest address `addr` into `to`, across regions where need be.
    pub fn read(&self, addr: u64, to: &mut [u8]) -> Result<(), MemoryError> {
        self.each(addr, to.len() as u64, |slice, done| {
            slice.read(0, &mut to[done..done + slice.len()])
        })
    }

    /// Copies `from` to guest address `addr`, across regions where need be.
    pub fn write(&self, addr: u64, from: &[u8]) -> Result<(), MemoryError> {
        self.each(addr, from.len() as u64, |slice, done| {
            slice.write(0, &from[done..done + slice.len()])
        })
    }

    /// Reads the value at guest address `addr`; the copy is the caller's own.
    pub fn read_obj<T: FromBytes + IntoBytes>(&self, addr: u64) -> Result<T, MemoryError> {
        let mut value = T::new_zeroed();
        self.read(addr, value.as_mut_bytes())?;
        Ok(value)
    }

    /// Calls `f` with each contiguous part of the range and the bytes that came before it.
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

    /// The region that holds `addr`, the offset there, and the bytes from there to its end.
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

    fn check_new(&self, guest_addr: u64, len: u64, offset: u64) -> Result<(), MapError> {
        let page = rustix::param::page_size() as u64;
        if len == 0 || [guest_addr, len, offset].iter().any(|value| value % page != 0) {
            return Err(MapError::Alignment { guest_addr, len, offset });
        }
        let end = guest_addr.checked_add(len).ok_or(MapError::Overflow { guest_addr, len })?;
        if self.regions.len() >= MAX_REGIONS {
            return Err(MapError::TooMany);
        }
        if self.regions.iter().any(|region| region.start < end && guest_addr < region.end()) {
            return Err(MapError::Overlap { guest_addr, len });
        }
        Ok(())
    }

    fn insert(&self, region: Mapped) -> Self {
        let mut regions = Vec::clone(&self.regions);
        let index = regions.partition_point(|other| other.start < region.start);
        regions.insert(index, region);
        Self { regions: Arc::new(regions) }
    }
}

fn to_usize(guest_addr: u64, len: u64) -> Result<usize, MapError> {
    usize::try_from(len).map_err(|_| MapError::Overflow { guest_addr, len })
}

/// Refuses a file that ends before the region does.
fn check_file(fd: BorrowedFd<'_>, len: u64, offset: u64) -> Result<(), MapError> {
    let stat = rustix::fs::fstat(fd)?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let end = offset.checked_add(len).ok_or(MapError::Truncated { end: u64::MAX, size })?;
    // A device file (hugetlbfs is none) has no size; mmap itself refuses what it cannot do there.
    let sized = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file();
    if sized && end > size {
        return Err(MapError::Truncated { end, size });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

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
        let region = Region {
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
    fn read_only_memory_is_not_written() {
        let fd = memfd(0x1000);
        let region =
            Region { guest_addr: 0, len: 0x1000, fd: fd.as_fd(), offset: 0, writable: false };
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
        let region = |guest_addr, len, offset| Region {
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
