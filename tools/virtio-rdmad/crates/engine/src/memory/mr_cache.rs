// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The MR cache: the memory regions that a round uses, found once and held to its end.

use std::cell::Cell;
use std::ops::Range;
use std::sync::{Arc, RwLock};

use abi::virtio_rdma_sge;
use memory::{Chunk, Helpers};
use smallvec::SmallVec;

use super::key_table::KeyTable;
use super::mr::{Claim, Mr, Pieces, Pin};
use super::sharing::Sharing;
use crate::base::refused::{KeyError, SgeError};
use crate::base::sync::read;

/// Regions that are kept from one message to the next.
const KEPT: usize = 8;

/// A part of a region that is checked, and held in an [`MrCache`].
pub(crate) struct Mapping {
    /// The index of the region in the cache.
    pub pin: u32,
    /// Whether its region may be revoked while it is pinned.
    pub revocable: bool,
    /// Offset of the first byte in the memory of the region.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// The memory that a chunk of a message covers on one side.
pub(crate) type Mappings = SmallVec<[Mapping; 4]>;

/// Regions of one device, found by key and pinned.
#[derive(Default)]
pub(crate) struct MrCache {
    pins: Vec<Pin>,
    /// The address of the owner of these regions. It is only compared.
    owner: usize,
    /// The threads that help with large copies from and to these regions.
    helpers: Option<Arc<Helpers>>,
    /// Whether the thread copies alone.
    is_alone: bool,
    /// Whether help pays.
    pub sharing: Cell<Sharing>,
}

impl MrCache {
    /// Returns a cache without regions, with helpers for large copies.
    pub fn with_helpers(helpers: Option<&Arc<Helpers>>) -> Self {
        Self { helpers: helpers.cloned(), ..Self::default() }
    }

    /// Returns the helpers for a copy of so many bytes, if any are there.
    #[inline]
    pub fn helpers(&self, bytes: u64) -> Option<&Helpers> {
        let helpers = self.helpers.as_deref().filter(|_| !self.is_alone)?;
        helpers.are_there_for(bytes).then_some(helpers)
    }

    /// Returns whether threads are there that help with large copies.
    #[inline]
    pub fn has_helpers(&self) -> bool {
        !self.is_alone && self.helpers.as_ref().is_some_and(|helpers| helpers.are_there())
    }

    /// Makes the thread copy alone, or not. Accesses to memory may hold a thread up, which then holds nobody else up.
    pub fn copy_alone(&mut self, is_alone: bool) {
        self.is_alone = is_alone;
    }

    /// Ends the use of all regions.
    pub fn release(&mut self) {
        self.pins.clear();
        self.owner = 0;
    }

    /// Begins a message to or from `owner`. Indices of earlier mappings are void.
    #[inline]
    pub fn begin<T>(&mut self, owner: &T) {
        let owner = std::ptr::from_ref(owner) as usize;
        if self.owner != owner || self.pins.len() > KEPT {
            self.owner = owner;
            self.pins.clear();
        }
    }

    /// Returns the region of a mapping.
    pub fn region(&self, mapping: &Mapping) -> &Mr {
        self.pins[mapping.pin as usize].region()
    }

    /// Returns the memory of a mapping, and the memory behind it in the region.
    #[inline(always)]
    pub fn pieces(&self, mapping: &Mapping) -> Option<Pieces<'_>> {
        self.pins[mapping.pin as usize].pieces(mapping.offset)
    }

    /// Returns the memory of a mapping, if that is contiguous.
    #[inline(always)]
    pub fn piece(&self, mapping: &Mapping) -> Option<Chunk<'_>> {
        self.pins[mapping.pin as usize].piece(mapping.offset, mapping.len)
    }

    /// Returns the index of the region with this key.
    #[inline(always)]
    fn find(&mut self, keys: &RwLock<KeyTable>, key: u32) -> Result<usize, KeyError> {
        let has_key =
            |pin: &Pin| pin.region().attributes().key == key && !pin.region().is_revoked();
        if let Some(index) = self.pins.iter().position(has_key) {
            return Ok(index);
        }
        self.add(keys, key)
    }

    /// Pins the region with this key.
    #[inline(never)]
    fn add(&mut self, keys: &RwLock<KeyTable>, key: u32) -> Result<usize, KeyError> {
        self.pins.push(read(keys).pin(key)?);
        Ok(self.pins.len() - 1)
    }

    /// Checks `[addr, addr + len)` of the region with this key.
    #[inline(always)]
    pub fn map(
        &mut self,
        keys: &RwLock<KeyTable>,
        key: u32,
        claim: Claim,
        addr: u64,
        len: u64,
    ) -> Result<Mapping, KeyError> {
        let pin = self.find(keys, key)?;
        let region = self.pins[pin].region();
        let offset = region.check(claim, addr, len)?;
        // A cache has a few dozen regions at most.
        Ok(Mapping { pin: pin as u32, revocable: region.is_revocable(), offset, len })
    }

    /// Checks the key alone.
    pub fn check_key(
        &mut self,
        keys: &RwLock<KeyTable>,
        key: u32,
        claim: Claim,
    ) -> Result<(), KeyError> {
        let pin = self.find(keys, key)?;
        self.pins[pin].region().check_claim(claim)
    }

    /// Checks the part `bytes` of the memory that `sges` name in turn, which has at least as many bytes, and puts its
    /// mappings into `mappings`, in the place of those before.
    #[inline(always)]
    pub fn map_sges(
        &mut self,
        keys: &RwLock<KeyTable>,
        sges: &[virtio_rdma_sge],
        claim: Claim,
        bytes: Range<u64>,
        mappings: &mut Mappings,
    ) -> Result<(), SgeError> {
        mappings.clear();
        match sges {
            // Most work requests have one SGE.
            [sge] if !bytes.is_empty() && bytes.end <= u64::from(sge.length) => {
                mappings.push(self.map_sge(keys, (0, sge), claim, bytes)?);
                Ok(())
            }
            _ => self.map_some(keys, sges, claim, bytes, mappings),
        }
    }

    /// Checks the part `bytes` of the memory of one SGE, which is at the place `at` in its list.
    #[inline(always)]
    fn map_sge(
        &mut self,
        keys: &RwLock<KeyTable>,
        (at, sge): (u8, &virtio_rdma_sge),
        claim: Claim,
        bytes: Range<u64>,
    ) -> Result<Mapping, SgeError> {
        let wrong = |why| SgeError { at, why };
        let addr = sge.addr.checked_add(bytes.start).ok_or(wrong(KeyError::Range))?;
        self.map(keys, sge.lkey, claim, addr, bytes.end - bytes.start).map_err(wrong)
    }

    /// Checks memory of any number of SGEs, as [`Self::map_sges`], and adds its mappings to `mappings`.
    #[inline(never)]
    fn map_some(
        &mut self,
        keys: &RwLock<KeyTable>,
        sges: &[virtio_rdma_sge],
        claim: Claim,
        bytes: Range<u64>,
        mappings: &mut Mappings,
    ) -> Result<(), SgeError> {
        let (mut skip, mut left) = (bytes.start, bytes.end - bytes.start);
        for (at, sge) in (0..).zip(sges) {
            let length = u64::from(sge.length);
            if left == 0 {
                break;
            }
            if skip >= length {
                skip -= length;
                continue;
            }
            let part = (length - skip).min(left);
            mappings.push(self.map_sge(keys, (at, sge), claim, skip..skip + part)?);
            left -= part;
            skip = 0;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use abi::VIRTIO_RDMA_ACCESS_REMOTE_READ;
    use memory::GuestMemory;

    use super::*;
    use crate::memory::mr::tests::region;
    use crate::memory::page_list;

    #[test]
    fn keys_are_checked() {
        let memory = GuestMemory::anonymous(&[(0, 0x2000)]).unwrap();
        let mut table = KeyTable::default();
        let mr = region(&memory, 0x1_2345, 0x1000, &[page_list::Range { addr: 0, len: 0x1000 }]);
        table.insert(Arc::clone(&mr));
        let table = RwLock::new(table);
        let map = |key, pdn, access, addr, len| {
            let claim = Claim::local(pdn, access);
            MrCache::default().map(&table, key, claim, addr, len).map(|_| ()).err()
        };
        assert_eq!(map(0x1_2345, 1, 0, 0x1000, 0x1000), None);
        assert_eq!(map(0x1_2346, 1, 0, 0x1000, 1), Some(KeyError::Key));
        assert_eq!(map(0x2_2345, 1, 0, 0x1000, 1), Some(KeyError::Key));
        assert_eq!(map(0x1_2345, 2, 0, 0x1000, 1), Some(KeyError::Pd));
        let read = VIRTIO_RDMA_ACCESS_REMOTE_READ;
        assert_eq!(map(0x1_2345, 1, read, 0x1000, 1), Some(KeyError::Access));
        assert_eq!(map(0x1_2345, 1, 0, 0xfff, 1), Some(KeyError::Range));
        assert_eq!(map(0x1_2345, 1, 0, 0x1001, 0x1000), Some(KeyError::Range));
        assert_eq!(map(0x1_2345, 1, 0, u64::MAX, 2), Some(KeyError::Range));
        mr.retire();
        assert_eq!(map(0x1_2345, 1, 0, 0x1000, 1), Some(KeyError::Key));
    }
}
