// SPDX-License-Identifier: GPL-2.0

//! Regions: the memory of an MR, or of the rings of a QP, CQ or SRQ, which the
//! device knows as a list of pages.
//!
//! The device may touch such memory until it has replied to the command that ends
//! its use. If the device fails before, the memory is kept until the device has been reset.

#![deny(unsafe_code)]

use crate::{
    bindings,
    cmd::Command,
    dma::{
        Buffer,
        Pages,
        PAGE_SIZE, //
    },
    hca::Hca,
    ib,
    memory::Memory,
    ring,
    trace::refuse,
    umem::Umem, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// Bytes of an entry of a page table.
const ENTRY: usize = size_of::<u64>();

/// Entries of a page of a page table with levels.
const LIST_ENTRIES: usize = PAGE_SIZE / ENTRY;

/// A region. It must not be dropped while an object of the device has it, unless the device has failed.
pub(crate) struct Region {
    hca: Arc<Hca>,
    memory: Option<Memory>,
}

impl Region {
    /// Pins memory of the current process. May sleep.
    ///
    /// # Errors
    ///
    /// The errors of [`Umem::pin`].
    pub(crate) fn pin(dev: &ib::Device<Hca>, start: u64, length: u64, access: u32) -> Result<Self> {
        let umem = Umem::pin(dev, start, length, access)?;
        Ok(Self {
            hca: dev.data().clone(),
            memory: Some(Memory::Program(umem)),
        })
    }

    /// Pins memory for rings that the program names by an attribute of the core, and returns it with its length; `None`
    /// if it names none. May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` for memory that is not made of whole pages; the errors of [`Umem::named`].
    pub(crate) fn named(
        dev: &ib::Device<Hca>,
        udata: &ib::Udata<'_>,
        object: ib::BufferOf,
        least: usize,
    ) -> Result<Option<(Self, u64)>> {
        let Some(umem) = Umem::named(dev, udata, object, least)? else {
            return Ok(None);
        };
        let (start, length) = umem.range();
        if !ring::is_region(start, length) {
            let reason = c"rings that are not made of whole pages";
            return Err(refuse(EINVAL, reason, start, length));
        }
        let region = Self {
            hca: dev.data().clone(),
            memory: Some(Memory::Program(umem)),
        };
        Ok(Some((region, length)))
    }

    /// Pins memory of the current process for an MR, whose page table may list larger pages. May sleep.
    ///
    /// # Errors
    ///
    /// The errors of [`Umem::pin`].
    pub(crate) fn pin_for_mr(dev: &ib::Device<Hca>, memory: &ib::UserMemory) -> Result<Self> {
        let mut umem = Umem::pin(dev, memory.start, memory.length, memory.access)?;
        umem.choose_block(dev.data().config().mr_page_sizes, memory.start)?;
        Ok(Self {
            hca: dev.data().clone(),
            memory: Some(Memory::Program(umem)),
        })
    }

    /// Returns a region of no bytes.
    pub(crate) fn empty(hca: &Arc<Hca>) -> Self {
        Self {
            hca: hca.clone(),
            memory: None,
        }
    }

    /// Attaches to memory behind a dma-buf of the current process, for an MR. May sleep.
    ///
    /// # Errors
    ///
    /// The errors of [`Umem::attach`].
    pub(crate) fn attach(
        dev: &ib::Device<Hca>,
        fd: c_int,
        memory: &ib::UserMemory,
    ) -> Result<Self> {
        let umem = Umem::attach(dev, fd, memory, dev.data().config().mr_page_sizes)?;
        Ok(Self {
            hca: dev.data().clone(),
            memory: Some(Memory::DmaBuf(umem)),
        })
    }

    /// Returns whether its memory is behind a dma-buf.
    pub(crate) fn is_dma_buf(&self) -> bool {
        matches!(self.memory, Some(Memory::DmaBuf(_)))
    }

    /// Wraps memory of the kernel.
    pub(crate) fn of_kernel(hca: &Arc<Hca>, pages: Arc<Pages>) -> Self {
        Self {
            hca: hca.clone(),
            memory: Some(Memory::Kernel(pages)),
        }
    }

    /// Writes 32 bits to the head of a program's ring. Any context.
    pub(crate) fn tell_program(&self, offset: usize, value: u32) {
        if let Some(Memory::Program(umem)) = &self.memory {
            // The head of a ring is in the first page, and rings are pinned to be written to.
            let _ = umem.store(offset, value);
        }
    }

    /// Reads 32 bits of the head of a program's ring; 0 if the region is no ring of a program. Any context.
    pub(crate) fn ask_program(&self, offset: usize) -> u32 {
        match &self.memory {
            // The head of a ring is in the first page.
            Some(Memory::Program(umem)) => umem.load(offset).unwrap_or(0),
            _ => 0,
        }
    }

    /// Returns the binary logarithm of the bytes of a page of its page table.
    pub(crate) fn page_shift(&self) -> u8 {
        match &self.memory {
            Some(Memory::Program(umem) | Memory::DmaBuf(umem)) => umem.block_shift(),
            _ => bindings::VIRTIO_RDMA_PAGE_SHIFT as u8,
        }
    }

    /// Lists the pages for a command, in one contiguous block. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`, `EINVAL` if there are more than a command can say.
    pub(crate) fn page_table(&self) -> Result<PageTable> {
        match &self.memory {
            Some(Memory::Program(umem) | Memory::DmaBuf(umem)) => {
                let mut blocks = umem.blocks();
                PageTable::new(&self.hca, umem.num_blocks(), |list| Ok(blocks.list(list)))
            }
            Some(Memory::Kernel(pages)) => {
                let mut addresses = pages.addresses();
                PageTable::new(&self.hca, pages.num_pages(), |list| {
                    list_addresses(list, &mut addresses)
                })
            }
            _ => Err(EINVAL),
        }
    }

    /// Lists the pages of what an MR covers, for a command that allows a page table with levels. May
    /// sleep.
    ///
    /// # Errors
    ///
    /// The errors of [`Region::page_table`].
    pub(crate) fn page_table_with_levels(&self) -> Result<PageTable> {
        match &self.memory {
            Some(Memory::Program(umem) | Memory::DmaBuf(umem)) => {
                let mut blocks = umem.blocks();
                PageTable::with_levels(&self.hca, |list| Ok(blocks.list(list)))
            }
            _ => Err(EINVAL),
        }
    }

    /// Executes the command that gives the region, listed in `table`, to the device. Sleeps.
    ///
    /// # Errors
    ///
    /// The errors of [`Hca::execute`]. If the reply makes no sense, the device may use the region or not, and so the
    /// memory is kept until the device has been reset.
    pub(crate) fn give<C: Command>(
        mut self,
        mut table: PageTable,
        request: &C::Request,
    ) -> Result<(C::Reply, Self)> {
        match self.hca.execute::<C>(request) {
            Ok(reply) => Ok((reply, self)),
            Err(error) => {
                if error == EIO {
                    self.keep();
                    table.keep();
                }
                Err(error)
            }
        }
    }

    /// Keeps the memory until the device has been reset. May sleep.
    pub(crate) fn keep(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.hca.quarantine().keep(memory);
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.hca.is_broken() {
            self.keep();
        }
    }
}

/// A list of pages for fast registrations, which the device reads when it does one.
pub(crate) struct PageList {
    hca: Arc<Hca>,
    list: Option<Buffer>,
    addr: u64,
}

impl PageList {
    /// Allocates a list of `max` pages. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`; `EINVAL` for 0 pages.
    pub(crate) fn new(hca: &Arc<Hca>, max: usize) -> Result<Self> {
        let list = hca.alloc(max.checked_mul(ENTRY).ok_or(EINVAL)?)?;
        Ok(Self {
            hca: hca.clone(),
            addr: list.span(0, ENTRY)?.addr,
            list: Some(list),
        })
    }

    /// Sets an entry. Any context.
    ///
    /// # Errors
    ///
    /// `EINVAL` beyond the end.
    pub(crate) fn set(&self, index: usize, page: u64) -> Result {
        let list = self.list.as_ref().ok_or(EINVAL)?;
        list.write(index * ENTRY, &page.to_le())
    }

    /// Returns the address of the list, as the device sees it.
    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }
}

impl Drop for PageList {
    fn drop(&mut self) {
        if !self.hca.is_broken() {
            return;
        }
        if let Some(list) = self.list.take() {
            self.hca.quarantine().keep(Memory::List(list));
        }
    }
}

/// Writes the next addresses to `list` until that is full or there are no more. Returns how many there were.
fn list_addresses(list: &Buffer, addresses: &mut impl Iterator<Item = u64>) -> Result<usize> {
    let (_, len) = list.words();
    for count in 0..len {
        let Some(address) = addresses.next() else {
            return Ok(count);
        };
        list.write(count * ENTRY, &address.to_le())?;
    }
    Ok(len)
}

/// A page table. The command that names it needs it until the device has replied.
pub(crate) struct PageTable {
    hca: Arc<Hca>,
    lists: KVVec<Buffer>,
    addr: u64,
    npages: u32,
    levels: u8,
}

impl PageTable {
    /// Returns a table of `npages` entries in one block. `fill` writes the next entries to a list until that is
    /// full or there are no more, and returns how many there were.
    fn new(
        hca: &Arc<Hca>,
        npages: usize,
        mut fill: impl FnMut(&Buffer) -> Result<usize>,
    ) -> Result<Self> {
        let mut table = Self::empty(hca);
        let list = if npages <= LIST_ENTRIES {
            hca.take_list()?
        } else {
            hca.alloc(npages.checked_mul(ENTRY).ok_or(EINVAL)?)?
        };
        let count = fill(&list)?;
        table.addr = list.addr();
        table.lists.push(list, GFP_KERNEL)?;
        if count != npages {
            return Err(EINVAL);
        }
        table.npages = u32::try_from(npages)?;
        Ok(table)
    }

    /// Returns the table of a region of no bytes.
    pub(crate) fn empty(hca: &Arc<Hca>) -> Self {
        Self {
            hca: hca.clone(),
            lists: KVVec::new(),
            addr: 0,
            npages: 0,
            levels: 0,
        }
    }

    /// Returns a table whose blocks are pages, with as many levels of lists above it as it needs. `fill` does what
    /// it does for [`PageTable::new`].
    fn with_levels(hca: &Arc<Hca>, mut fill: impl FnMut(&Buffer) -> Result<usize>) -> Result<Self> {
        let mut table = Self::empty(hca);
        loop {
            let list = hca.take_list()?;
            let count = fill(&list)?;
            if count == 0 && !table.lists.is_empty() {
                hca.lists().put(list);
                break;
            }
            table.lists.push(list, GFP_KERNEL)?;
            table.npages = table
                .npages
                .checked_add(u32::try_from(count)?)
                .ok_or(EINVAL)?;
            if count < LIST_ENTRIES {
                break;
            }
        }
        let mut level = 0..table.lists.len();
        while level.len() > 1 {
            for index in level.clone() {
                let list = table.lists.get(index).ok_or(EINVAL)?.addr();
                table.append(index - level.start, list)?;
            }
            level = level.end..table.lists.len();
            table.levels += 1;
        }
        table.addr = table.lists.last().ok_or(EINVAL)?.addr();
        Ok(table)
    }

    /// Sets the next entry of a level, which is its `index`th.
    fn append(&mut self, index: usize, address: u64) -> Result {
        let place = index % LIST_ENTRIES;
        if place == 0 {
            self.lists.push(self.hca.take_list()?, GFP_KERNEL)?;
        }
        let list = self.lists.last().ok_or(EINVAL)?;
        list.write(place * ENTRY, &address.to_le())
    }

    /// Returns the address of the table, as the device sees it.
    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    /// Returns the number of pages.
    pub(crate) fn npages(&self) -> u32 {
        self.npages
    }

    /// Returns the number of levels of lists above the table.
    pub(crate) fn levels(&self) -> u8 {
        self.levels
    }

    /// Keeps the table until the device has been reset. May sleep.
    fn keep(&mut self) {
        let lists = core::mem::take(&mut self.lists);
        if !lists.is_empty() {
            self.hca.quarantine().keep(Memory::Table(lists));
        }
    }

    /// Returns the region of rings as a command has it.
    pub(crate) fn to_wire(&self) -> bindings::virtio_rdma_ring_region {
        bindings::virtio_rdma_ring_region {
            pages: self.addr.to_le(),
            npages: self.npages.to_le(),
            reserved_0c: 0,
        }
    }
}

impl Drop for PageTable {
    fn drop(&mut self) {
        if self.hca.is_broken() {
            self.keep();
        }
        while let Some(list) = self.lists.pop() {
            self.hca.lists().put(list);
        }
    }
}
