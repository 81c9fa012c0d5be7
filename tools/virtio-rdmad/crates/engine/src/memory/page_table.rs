// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Page tables of memory regions, flat or with levels (specification, Memory regions: Page tables).

use memory::GuestMemory;
use zerocopy::IntoBytes;

use super::mr::ResolveError;
use super::page_list::{PageList, Range, PAGE_SIZE};
use crate::base::budget::Budget;

/// Bytes of an entry.
const ENTRY: u64 = size_of::<u64>() as u64;
/// Entries of a page, which are read at a time.
const ENTRIES: usize = (PAGE_SIZE / ENTRY) as usize;
/// The cost of an entry that is read, in bytes that are copied in the same time.
const COST: u64 = 4 * ENTRY;

/// The shape of a page table.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    /// The number of levels of lists above the table.
    pub levels: u32,
    /// Bytes of a page, a power of two.
    pub page_size: u64,
}

impl Shape {
    /// A table of pages of 4 KiB, in one block.
    pub const FLAT: Self = Self { levels: 0, page_size: PAGE_SIZE };
}

/// A page table that is being read, a page of entries after the other.
///
/// Nothing of the guest's memory is kept from one part to the next: each address that leads to a
/// part is read and checked anew.
pub(crate) struct Reader {
    /// The highest list, or the table itself.
    addr: u64,
    levels: u32,
    /// Bytes of a page.
    page_size: u64,
    /// Entries of the table.
    count: u64,
    /// The number of entries that were read.
    done: u64,
    /// Ranges that there may be.
    room: usize,
    /// The pages so far.
    found: PageList,
    /// The error of the table, if it has one.
    failed: Option<ResolveError>,
}

impl Reader {
    /// Begins with the table of `count` entries at `addr`; `room` is how many ranges its pages may make up.
    pub fn new(addr: u64, shape: Shape, count: u64, room: usize) -> Self {
        let Shape { levels, page_size } = shape;
        let is_aligned = addr % ENTRY == 0;
        let failed = (!is_aligned).then_some(ResolveError::Malformed);
        Self { addr, levels, page_size, count, done: 0, room, found: PageList::default(), failed }
    }

    /// Reads entries until the budget is exhausted. Returns whether all were read, or the table has an error.
    pub fn run(&mut self, memory: &GuestMemory, budget: &mut Budget) -> bool {
        while !self.is_over() {
            if budget.is_over() {
                return false;
            }
            let before = self.done;
            self.step(memory);
            budget.spend(COST * (self.done - before));
        }
        true
    }

    /// Reads the entries that are left, up to an error. Returns the pages that were found, and the error of the table.
    pub fn finish(mut self, memory: &GuestMemory) -> (PageList, Option<ResolveError>) {
        while !self.is_over() {
            self.step(memory);
        }
        self.abandon()
    }

    /// Returns the pages that were found so far, and the error of the table.
    pub fn abandon(self) -> (PageList, Option<ResolveError>) {
        (self.found, self.failed)
    }

    fn is_over(&self) -> bool {
        self.done == self.count || self.failed.is_some()
    }

    fn step(&mut self, memory: &GuestMemory) {
        self.failed = self.read(memory).err();
    }

    /// Reads the next page of entries.
    fn read(&mut self, memory: &GuestMemory) -> Result<(), ResolveError> {
        let addr = self.part(memory)?;
        let mut entries = [0_u64; ENTRIES];
        let left = usize::try_from(self.count - self.done).unwrap_or(ENTRIES);
        let entries = &mut entries[..left.min(ENTRIES)];
        memory.read(addr, entries.as_mut_bytes()).map_err(|_| ResolveError::Fault)?;
        for page in &*entries {
            if page % self.page_size != 0 {
                return Err(ResolveError::Malformed);
            }
            if page.checked_add(self.page_size).is_none() {
                return Err(ResolveError::Fault);
            }
            if !self.found.push(Range { addr: *page, len: self.page_size }, self.room) {
                return Err(ResolveError::TooManyExtents);
            }
        }
        self.done += entries.len() as u64;
        Ok(())
    }

    /// Returns where the entries that come next are, found from the highest list down.
    fn part(&self, memory: &GuestMemory) -> Result<u64, ResolveError> {
        let entry =
            |list: u64, index: u64| list.checked_add(index * ENTRY).ok_or(ResolveError::Fault);
        if self.levels == 0 {
            return entry(self.addr, self.done);
        }
        let (mut list, mut below) = (self.addr, self.done / ENTRIES as u64);
        for level in (0..self.levels).rev() {
            let each = (ENTRIES as u64).pow(level);
            let at = entry(list, below / each)?;
            list = memory.read_obj(at).map_err(|_| ResolveError::Fault)?;
            if list % PAGE_SIZE != 0 {
                return Err(ResolveError::Malformed);
            }
            below %= each;
        }
        Ok(list)
    }
}
