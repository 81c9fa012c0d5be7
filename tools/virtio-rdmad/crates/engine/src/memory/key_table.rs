// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The table of keys: which region or window a key names.

use std::sync::Arc;

use abi::{
    VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL, VIRTIO_RDMA_ACCESS_LOCAL_WRITE, VIRTIO_RDMA_ACCESS_MW_BIND,
    VIRTIO_RDMA_ACCESS_RELAXED_ORDERING, VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC,
    VIRTIO_RDMA_ACCESS_REMOTE_READ, VIRTIO_RDMA_ACCESS_REMOTE_WRITE, VIRTIO_RDMA_ACCESS_ZERO_BASED,
};
use memory::GuestMemory;

use super::fast_reg::{FastReg, Invalidation};
use super::mr::{Attributes, Backing, Mr, Part, Pin, Reach};
use super::mw::{Bind, Binding, MemoryWindow, MemoryWindows, MwType};
use crate::base::by_key::ByKey;
use crate::base::image::{require, Wrong};
use crate::base::limits::MAX_FAST_REG_PAGES;
use crate::base::refused::KeyError;
use crate::base::slot::Slot;

/// Access to a window that changes memory, which its region must allow its owner.
const CHANGES: u32 = VIRTIO_RDMA_ACCESS_REMOTE_WRITE | VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC;

/// Access that a window gives.
const ACCESS: u32 = CHANGES | VIRTIO_RDMA_ACCESS_REMOTE_READ;

/// Flags that a BIND_MW may have besides: what they mean concerns the owner, who has
/// no use for the key.
const WITHOUT_MEANING: u32 = VIRTIO_RDMA_ACCESS_LOCAL_WRITE
    | VIRTIO_RDMA_ACCESS_MW_BIND
    | VIRTIO_RDMA_ACCESS_RELAXED_ORDERING;

/// Windows of a QP that are freed at a time when it goes.
const FEW: usize = 64;

/// The regions of one device, by key.
#[derive(Default)]
pub(crate) struct KeyTable {
    /// The regions by the upper 24 bits of their keys. No two regions have the same upper 24 bits.
    regions: ByKey<Arc<Mr>>,
    /// Regions for fast registration, likewise. A region that is VALID is in `regions` too, unless it is
    /// not in memory.
    fast_regs: ByKey<FastReg>,
    /// Windows. A window that is bound is in `regions` too, unless it is not in memory.
    pub windows: MemoryWindows,
    /// The guest's memory.
    memory: GuestMemory,
}

impl KeyTable {
    /// Returns whether a region or a window has the upper 24 bits of a key.
    fn has(&self, key: u32) -> bool {
        let index = key >> 8;
        self.regions.contains(index) || self.fast_regs.contains(index) || self.windows.has(key)
    }

    /// Checks that no region and no window has a key that was saved.
    pub fn check_new(&self, key: u32) -> Result<(), Wrong> {
        require(key >> 8 != 0 && !self.has(key), "another one has its key")
    }

    /// Returns the state of the region for fast registration with this key: the region, and whether it has memory.
    pub fn save_fast_reg(&self, key: u32) -> Option<(FastReg, bool)> {
        let region = self.fast_regs.get(key >> 8)?;
        Some((region.clone(), self.regions.contains(key >> 8)))
    }

    /// Takes over a region for fast registration.
    pub fn load_fast_reg(
        &mut self,
        region: FastReg,
        has_memory: bool,
        longest: u64,
    ) -> Result<(), Wrong> {
        self.check_new(region.key)?;
        let max_pages = region.max_pages;
        require((1..=MAX_FAST_REG_PAGES).contains(&max_pages), "it has another number of pages")?;
        require(region.valid.is_some() || !has_memory, "it has memory, and is FREE")?;
        if let Some(attributes) = &region.valid {
            attributes.check(longest)?;
            let is_its = (attributes.key, attributes.pdn) == (region.key, region.pdn);
            require(is_its, "its registration has another key or PD")?;
        }
        let valid = region.valid.clone().filter(|_| has_memory);
        let mr = valid.map(|attributes| Mr::new(&self.memory, attributes, max_pages)).transpose();
        let mr = mr.map_err(|_| "it is not in memory")?;
        self.insert_fast_reg(region);
        if let Some(mr) = mr {
            self.insert(Arc::new(mr.revocable()));
        }
        Ok(())
    }

    /// Returns the state of the window with this key: the window, and whether it has memory.
    pub fn save_window(&self, key: u32) -> Option<(MemoryWindow, bool)> {
        let window = self.windows.get(key >> 8)?;
        Some((*window, self.regions.contains(key >> 8)))
    }

    /// Takes over a window; the region that it is bound to is there already.
    pub fn load_window(&mut self, window: MemoryWindow, has_memory: bool) -> Result<(), Wrong> {
        let MemoryWindow { key, binding, .. } = window;
        self.check_new(key)?;
        self.windows.insert(MemoryWindow { binding: None, ..window });
        self.windows.assign(key, binding);
        if !has_memory {
            return Ok(());
        }
        let Binding { region, part } = binding.ok_or("it has memory, and is FREE")?;
        let region = self.fixed(region).ok_or("it is bound to a region that is not there")?;
        let end = part.offset.checked_add(part.length);
        let fits = end.is_some_and(|end| end <= region.attributes().length);
        require(fits, "it is bound beyond its region")?;
        let bound = Arc::new(region.window(key, &part));
        self.insert(bound);
        Ok(())
    }

    /// Returns a random key whose upper 24 bits no region has, or `None` when the
    /// machine has no random numbers. `taken` tells of those not in the table.
    pub fn choose_key(&self, taken: impl Fn(u32) -> bool) -> Option<u32> {
        loop {
            let key = getrandom::u32().ok()?;
            let index = key >> 8;
            let is_used = self.has(key);
            let is_crowded = self.regions.is_crowded(index)
                || self.fast_regs.is_crowded(index)
                || self.windows.is_crowded(key);
            if index != 0 && !is_used && !is_crowded && !taken(key) {
                return Some(key);
            }
        }
    }

    /// Returns the guest's memory.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Adds a region for fast registration.
    pub fn insert_fast_reg(&mut self, region: FastReg) {
        self.fast_regs.insert(region.key >> 8, region);
    }

    /// Returns the region for fast registration that has this key, or will have it.
    pub fn fast_reg(&self, key: u32) -> Option<&FastReg> {
        self.fast_regs.get(key >> 8)
    }

    /// Takes a region for fast registration out; returns it, if it is VALID.
    pub fn remove_fast_reg(&mut self, key: u32) -> Option<Arc<Mr>> {
        self.fast_regs.remove(key >> 8)?;
        self.regions.remove(key >> 8)
    }

    /// Makes a region VALID.
    pub fn set_valid(&mut self, attributes: Attributes, mr: Arc<Mr>) {
        let Some(region) = self.fast_regs.get_mut(attributes.key >> 8) else { return };
        region.key = attributes.key;
        region.valid = Some(attributes);
        self.insert(mr);
    }

    /// Makes the region or window with a key FREE. Returns the region or window instead if a copy by the key is under
    /// way. Then the caller calls this again: no other copy begins meanwhile.
    pub fn invalidate(&mut self, what: Invalidation) -> Result<Option<Arc<Mr>>, KeyError> {
        let index = what.key >> 8;
        if self.windows.has(what.key) {
            self.windows.check_invalidation(what)?;
        } else {
            let region = self.fast_regs.get(index).ok_or(KeyError::Key)?;
            what.check(region.pdn, region.key, region.valid.is_none())?;
        }
        if let Some(in_use) = self.begin_to_revoke(index) {
            return Ok(Some(in_use));
        }
        self.windows.release(index);
        if let Some(region) = self.fast_regs.get_mut(index) {
            region.valid = None;
        }
        self.regions.remove(index);
        Ok(None)
    }

    /// Begins to revoke the region or window with these upper 24 bits of its key, if it is in memory. Returns the
    /// region or window if a copy by it is under way.
    fn begin_to_revoke(&self, index: u32) -> Option<Arc<Mr>> {
        self.regions.get(index).filter(|mr| !mr.begin_to_revoke()).cloned()
    }

    /// Sets the guest's memory from now on. Regions follow one by one.
    pub fn set_memory(&mut self, memory: &GuestMemory) {
        self.memory = memory.clone();
    }

    /// Follows a change of the memory map with a region for fast registration, if it is VALID; returns
    /// the one of before, which is to be retired.
    pub fn remap_fast_reg(&mut self, key: u32) -> Option<Arc<Mr>> {
        let index = key >> 8;
        let region = self.fast_regs.get(index)?;
        let attributes = region.valid.clone()?;
        let before = self.regions.remove(index);
        if let Ok(mr) = Mr::new(&self.memory, attributes, region.max_pages) {
            self.regions.insert(index, Arc::new(mr.revocable()));
        }
        before
    }

    /// Returns the region with these upper 24 bits of its key, if it is in memory.
    pub fn resolved(&self, index: u32) -> Option<&Arc<Mr>> {
        self.regions.get(index)
    }

    /// Adds a region, or puts it in the place of the one with the same key, which it
    /// returns.
    pub fn insert(&mut self, mr: Arc<Mr>) -> Option<Arc<Mr>> {
        self.regions.insert(mr.attributes().key >> 8, mr)
    }

    /// Takes a region out and returns it; it may still be pinned.
    pub fn remove(&mut self, key: u32) -> Option<Arc<Mr>> {
        self.regions.remove(key >> 8)
    }

    /// Returns a region of a list of pages, no window and not for fast registration, that is
    /// in memory.
    pub fn fixed(&self, key: u32) -> Option<&Arc<Mr>> {
        let is_listed = |mr: &&Arc<Mr>| matches!(mr.attributes().backing, Backing::Ranges(_));
        let index = key >> 8;
        if self.fast_regs.contains(index) || self.windows.has(key) {
            return None;
        }
        self.regions.get(index).filter(is_listed).filter(|mr| mr.attributes().key == key)
    }

    /// Pins the region with this key.
    pub fn pin(&self, key: u32) -> Result<Pin, KeyError> {
        let mr = self.regions.get(key >> 8).filter(|mr| mr.attributes().key == key);
        mr.and_then(|mr| Arc::clone(mr).pin()).ok_or_else(|| self.why_not(key))
    }

    /// Returns why no memory has this key.
    #[cold]
    fn why_not(&self, key: u32) -> KeyError {
        let index = key >> 8;
        let region = self.fast_regs.get(index).map(|region| (region.key, region.valid.is_none()));
        let window = self.windows.get(index).map(|window| (window.key, window.binding.is_none()));
        match region.or(window) {
            Some((_, true)) => KeyError::Free,
            // A region or window in the table cannot be pinned while it is being invalidated.
            Some((own, false)) if own == key && self.regions.contains(index) => KeyError::Free,
            Some((own, false)) if own == key => KeyError::Memory,
            _ => KeyError::Key,
        }
    }

    /// Checks a BIND_MW in the QP in place `slot`. Returns the new binding of the window, if it gets one, or the reason
    /// of a refusal.
    fn check_bind(
        &self,
        slot: Slot,
        pdn: u32,
        flush: bool,
        bind: &Bind,
    ) -> Result<Option<(Binding, &Arc<Mr>)>, &'static str> {
        let window = self.windows.get(bind.key >> 8);
        let Some(window) = window.filter(|window| window.pdn == pdn) else {
            return Err("BIND_MW of a key that its PD does not have");
        };
        let access =
            bind.access & if flush { ACCESS | VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL } else { ACCESS };
        let zero_based = bind.access & VIRTIO_RDMA_ACCESS_ZERO_BASED != 0;
        if bind.access & !(access | WITHOUT_MEANING | VIRTIO_RDMA_ACCESS_ZERO_BASED) != 0
            || zero_based && window.kind == MwType::One
        {
            return Err("BIND_MW with access flags that the window cannot have");
        }
        if window.kind == MwType::Two && window.binding.is_some() {
            return Err("BIND_MW of a window of type 2 that is not FREE");
        }
        if bind.length == 0 {
            return match window.kind {
                MwType::One => Ok(None),
                MwType::Two => Err("BIND_MW of no bytes to a window of type 2"),
            };
        }
        let Some(region) = self.fixed(bind.lkey).filter(|mr| mr.attributes().pdn == pdn) else {
            return Err("BIND_MW to a region that its PD does not have");
        };
        let rights = region.attributes().access;
        let owner_writes = rights & VIRTIO_RDMA_ACCESS_LOCAL_WRITE != 0;
        if rights & VIRTIO_RDMA_ACCESS_MW_BIND == 0 || bind.access & CHANGES != 0 && !owner_writes {
            return Err("BIND_MW to a region that does not allow it");
        }
        let Some(offset) = region.offset(bind.addr, bind.length) else {
            return Err("BIND_MW beyond the region");
        };
        let reach = match window.kind {
            MwType::One => Reach::Peers,
            MwType::Two => Reach::PeerOf(slot),
        };
        let iova = if zero_based { 0 } else { bind.addr };
        let part = Part { offset, iova, length: bind.length, access, reach };
        Ok(Some((Binding { region: bind.lkey, part }, region)))
    }

    /// Carries out a BIND_MW, unless a copy by the former binding of the window is under way. Then the function returns
    /// the memory of that binding, as [`Self::invalidate`].
    pub fn bind(
        &mut self,
        slot: Slot,
        pdn: u32,
        flush: bool,
        bind: &Bind,
    ) -> Result<Option<Arc<Mr>>, &'static str> {
        let window = self.check_bind(slot, pdn, flush, bind)?;
        if let Some(in_use) = self.begin_to_revoke(bind.key >> 8) {
            return Ok(Some(in_use));
        }
        let mapped = window.map(|(binding, region)| {
            (binding, Arc::new(region.window(bind.new_key, &binding.part)))
        });
        self.windows.assign(bind.new_key, mapped.as_ref().map(|(binding, _)| *binding));
        match mapped {
            Some((_, window)) => self.insert(window),
            None => self.remove(bind.new_key),
        };
        Ok(None)
    }

    /// Follows with a window after its region has followed a change of the memory map: with the one
    /// that comes first of those from `from` on, which are bound to `region`, both the upper 24 bits of
    /// a key. Returns those of the window and what it was before, which is to be retired.
    pub fn remap_window(&mut self, region: u32, from: u32) -> Option<(u32, Option<Arc<Mr>>)> {
        let index = self.windows.first_on(region, from)?;
        let window = self.windows.get(index)?;
        let (key, binding) = (window.key, window.binding?);
        let before = self.remove(key);
        if let Some(mr) = self.resolved(region) {
            let bound = Arc::new(mr.window(key, &binding.part));
            self.insert(bound);
        }
        Some((index, before))
    }

    /// Returns whether more windows are bound to a QP than [`Self::release_windows`] makes FREE.
    pub fn has_many_windows(&self, qp: Slot) -> bool {
        self.windows.of_qp(qp).nth(FEW).is_some()
    }

    /// Takes a window out. Returns its memory, which is to be revoked.
    pub fn remove_window(&mut self, key: u32) -> Option<Arc<Mr>> {
        let index = key >> 8;
        self.windows.release(index);
        self.windows.remove(index)?;
        self.remove(key)
    }

    /// Makes [`FEW`] windows of a QP FREE, or all if there are no more. Returns their number, and their memory, which
    /// is to be revoked.
    pub fn release_windows(&mut self, qp: Slot) -> (usize, Vec<Arc<Mr>>) {
        let indices: Vec<u32> = self.windows.of_qp(qp).take(FEW).collect();
        let revoked = indices.iter().filter_map(|index| {
            self.windows.release(*index);
            self.remove(index << 8)
        });
        let revoked = revoked.collect();
        (indices.len(), revoked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::mr::tests::region;
    use crate::memory::page_list::Range;

    #[test]
    fn what_a_work_request_made_is_returned_to_be_retired() {
        let memory = GuestMemory::anonymous(&[(0, 0x2000)]).unwrap();
        let mut table = KeyTable::default();
        for key in [0x100, 0x200] {
            table.insert_fast_reg(FastReg { pdn: 1, max_pages: 1, key, valid: None });
        }
        let mr = region(&memory, 0x100, 0, &[Range { addr: 0, len: 0x1000 }]);
        table.set_valid(mr.attributes().clone(), Arc::clone(&mr));
        assert!(table.remove_fast_reg(0x200).is_none());
        let valid = table.remove_fast_reg(0x100).unwrap();
        assert!(Arc::ptr_eq(&valid, &mr) && table.pin(0x100).is_err());
    }
}
