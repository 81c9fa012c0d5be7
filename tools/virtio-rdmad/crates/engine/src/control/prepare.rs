// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The long part of control commands: memory is read, found or copied before a command is carried out, over as many
//! visits as that takes.
//!
//! As long as a command may be refused, its long part changes nothing that anybody else sees. Once
//! nothing can refuse the end of an SRQ or a QP any more, the long part parts the object from others. By
//! then the QP is gone for its peer, so that the peer does not find a QP without its windows.

use std::sync::Arc;

use abi::{
    virtio_rdma_cmd_reg_user_mr, virtio_rdma_cmd_resize_cq, virtio_rdma_cmd_resize_srq,
    virtio_rdma_ring_region, VIRTIO_RDMA_ACCESS_LOCAL_WRITE, VIRTIO_RDMA_MAX_PAGE_LEVELS,
};
use memory::{GuestMemory, Pages};

use super::objects::Objects;
use super::status::Status;
use crate::base::budget::{cost, Budget};
use crate::base::features::Features;
use crate::base::slot::Slot;
use crate::memory::mr::{Backing, Map, Mr, Resolving};
use crate::memory::page_list::{page_size, touched, Range, PAGE_SIZE};
use crate::memory::page_table::{Reader, Shape};
use crate::queue::cq_ring::MovingCq;
use crate::queue::srq::MovingSrq;
use crate::transport::hca::Hca;

/// Pages that are found at a time.
const STEP: u64 = 64;
/// Entries of a ring that are moved under one lock.
pub(crate) const MOVED: u32 = 64;

/// The preparation of a command.
#[derive(Default)]
pub(crate) enum Prepared {
    /// Nothing is prepared. Either the command needs no preparation, or it asks for something that it cannot have, and
    /// ends in an error.
    #[default]
    Nothing,
    /// The memory of a region.
    Memory(PreparedMemory),
    /// Pages for rings.
    Rings(PreparedRings),
    /// Pages for the ring that a CQ moves to.
    CqRing(virtio_rdma_cmd_resize_cq, PreparedRings),
    /// Pages for the ring that an SRQ moves to.
    SrqRing(virtio_rdma_cmd_resize_srq, PreparedRings),
    /// The move of the CQ with this number to a new ring.
    MovingCq(u32, MovingCq),
    /// The move of the SRQ in this place to a new ring.
    MovingSrq(Slot, MovingSrq),
    /// The SRQ for XRC in the first place ends. The QPs from the second place on are yet to be parted
    /// from it.
    SrqEnd(Slot, u16),
    /// The QP in this place ends, which may have many windows.
    QpEnd(Slot),
    /// The command ends with this.
    Failed(Status),
}

impl Prepared {
    /// Leaves out the optional part of the preparation, because a thread waits for the end of the command.
    pub fn hurry(&mut self) {
        if let Self::Memory(memory) = self {
            memory.touches = false;
        }
    }

    /// Frees the memory of the preparation, until the budget is exhausted. Returns whether nothing is left that takes
    /// long to free.
    pub fn shed(&mut self, budget: &mut Budget) -> bool {
        match self {
            Self::Memory(memory) => memory.shed(budget),
            _ => true,
        }
    }

    /// Returns what takes long to free, as a command did without it.
    pub fn into_remains(self) -> Option<Mr> {
        match self {
            Self::Memory(memory) => Some(memory.into_remains()),
            _ => None,
        }
    }
}

/// The memory of REG_USER_MR and REREG_MR.
pub(crate) struct PreparedMemory {
    /// The reader of the page table, and three numbers of bytes: the offset of the region in its first page, the length
    /// of the region, and the length of all pages of the table. `None` if no table is left to be read.
    table: Option<(Reader, [u64; 3])>,
    write: bool,
    room: usize,
    backing: Backing,
    resolving: Option<Resolving>,
    /// Whether its pages are touched once they are found.
    touches: bool,
    failed: Option<Status>,
}

impl PreparedMemory {
    /// Goes on until the budget is exhausted; whether it has come to an end.
    pub fn run(&mut self, memory: &GuestMemory, budget: &mut Budget) -> bool {
        if let Some((mut reader, shape)) = self.table.take() {
            if !reader.run(memory, budget) {
                self.table = Some((reader, shape));
                return false;
            }
            let [offset, length, total] = shape;
            let (list, failed) = reader.finish(memory);
            self.failed = failed.map(Status::of_memory);
            self.backing = Backing::Ranges(match failed {
                None => list.cut(offset, length, total),
                Some(_) => Arc::new(list.into_vec()),
            });
        }
        if self.failed.is_some() {
            return self.backing.shed(budget);
        }
        let (backing, write, room) = (&self.backing, self.write, self.room);
        let resolving = self.resolving.get_or_insert_with(|| Resolving::new(backing, write, room));
        if !resolving.run(memory, budget) {
            return false;
        }
        if resolving.has_failed() {
            return self.backing.shed(budget);
        }
        !self.touches || resolving.touch(budget)
    }

    /// Frees the memory of the preparation, until the budget is exhausted. Returns whether nothing is left that takes
    /// long to free.
    fn shed(&mut self, budget: &mut Budget) -> bool {
        if let Some((reader, _)) = self.table.take() {
            let (list, _) = reader.abandon();
            self.backing = Backing::Ranges(Arc::new(list.into_vec()));
        }
        let is_shed = self.resolving.as_mut().is_none_or(|resolving| resolving.shed(budget));
        is_shed && self.backing.shed(budget)
    }

    fn into_remains(self) -> Mr {
        Mr::remains(self.backing, self.resolving.map_or(Map::NOWHERE, Resolving::abandon))
    }

    /// Returns the backing of the region, and its map.
    pub fn finish(self, memory: &GuestMemory) -> Result<(Backing, Map), Status> {
        let resolving = self.resolving.ok_or(self.failed.unwrap_or(Status::Error))?;
        Ok((self.backing, resolving.finish(memory).map_err(Status::of_memory)?))
    }
}

/// Pages of rings.
pub(crate) struct PreparedRings {
    table: Option<Reader>,
    ranges: Box<[Range]>,
    /// The range that comes next, and how many bytes of it were found.
    at: usize,
    done: u64,
    pages: Pages,
    failed: Option<Status>,
}

impl PreparedRings {
    /// Begins with the page table of a region.
    pub fn new(table: Reader) -> Self {
        let (table, pages) = (Some(table), Pages::empty());
        Self { table, ranges: Box::default(), at: 0, done: 0, pages, failed: None }
    }

    /// Begins with ranges whose pages are to be found.
    pub fn of_ranges(ranges: Box<[Range]>) -> Self {
        Self { table: None, ranges, at: 0, done: 0, pages: Pages::empty(), failed: None }
    }

    /// Goes on until the budget is exhausted; whether it has come to an end.
    pub fn run(&mut self, memory: &GuestMemory, budget: &mut Budget) -> bool {
        if let Some(mut table) = self.table.take() {
            if !table.run(memory, budget) {
                self.table = Some(table);
                return false;
            }
            match table.finish(memory) {
                (list, None) => self.ranges = list.ranges(),
                (_, Some(why)) => self.failed = Some(Status::of_memory(why)),
            }
        }
        while let (Some(range), None) = (self.ranges.get(self.at), self.failed) {
            if budget.is_over() {
                return false;
            }
            let len = (range.len - self.done).min(STEP * PAGE_SIZE);
            if self.pages.extend(memory, range.addr + self.done, len).is_err() {
                self.failed = Some(Status::Fault);
            }
            budget.work(len / PAGE_SIZE * cost::PAGE);
            self.done += len;
            if self.done >= range.len {
                (self.at, self.done) = (self.at + 1, 0);
            }
        }
        true
    }

    /// Returns the pages, and their ranges of guest memory.
    pub fn finish(mut self) -> Result<(Pages, Box<[Range]>), Status> {
        if let Some(why) = self.failed {
            return Err(why);
        }
        self.pages.seal();
        Ok((self.pages, self.ranges))
    }
}

impl PreparedMemory {
    /// Begins with memory that is known already, to be resolved for other access.
    pub fn of_backing(backing: Backing, room: usize) -> Self {
        Self {
            table: None,
            write: false,
            room,
            backing,
            resolving: None,
            touches: true,
            failed: None,
        }
    }

    /// Sets whether the memory is to be written, and how many extents it may have.
    pub fn for_access(self, write: bool, room: usize) -> Self {
        Self { write, room, ..self }
    }
}

/// Returns the shape of the page table of a request. Without its feature, a field is reserved.
fn shape(features: &Features, request: &virtio_rdma_cmd_reg_user_mr) -> Result<Shape, Status> {
    let mut shape = Shape::FLAT;
    if features.has_page_levels() {
        shape.levels = request.levels.into();
    }
    if features.has_page_sizes() {
        shape.page_size = page_size(request.page_shift).ok_or(Status::Invalid)?;
    }
    if shape.levels > VIRTIO_RDMA_MAX_PAGE_LEVELS {
        return Err(Status::Invalid);
    }
    Ok(shape)
}

/// Begins with the page table of REG_USER_MR and REREG_MR, once what they say of the memory is checked.
pub(crate) fn memory(
    hca: &Hca,
    objects: &Objects,
    request: &virtio_rdma_cmd_reg_user_mr,
) -> Result<PreparedMemory, Status> {
    let shape = shape(&hca.features, request)?;
    let (offset, length) = (request.start % shape.page_size, request.length);
    let valid = length <= hca.limits.max_mr_size
        && request.virt_addr.checked_add(length).is_some()
        && touched(request.start, length, shape.page_size) == request.npages.into();
    if !valid {
        return Err(Status::Invalid);
    }
    let room = objects.room(&hca.limits);
    let pages = request.npages.into();
    let table = Reader::new(request.pages, shape, pages, room);
    Ok(PreparedMemory {
        table: Some((table, [offset, length, pages * shape.page_size])),
        write: request.access_flags & VIRTIO_RDMA_ACCESS_LOCAL_WRITE != 0,
        room,
        backing: Backing::Dma,
        resolving: None,
        touches: true,
        failed: None,
    })
}

/// Begins with the page table of a region that holds `len` bytes.
pub(crate) fn rings(
    hca: &Hca,
    objects: &Objects,
    region: &virtio_rdma_ring_region,
    len: u64,
) -> Result<PreparedRings, Status> {
    // Pages beyond those that the rings need are never touched.
    let needed = len.div_ceil(PAGE_SIZE);
    if u64::from(region.npages) < needed {
        return Err(Status::Invalid);
    }
    let room = objects.room(&hca.limits);
    if usize::try_from(needed).map_or(true, |count| count > room) {
        return Err(Status::NoResource);
    }
    Ok(PreparedRings::new(Reader::new(region.pages, Shape::FLAT, needed, room)))
}

/// Returns the pages of a region that holds `len` bytes, which were found before.
pub(crate) fn found_rings(
    hca: &Hca,
    objects: &Objects,
    region: &virtio_rdma_ring_region,
    len: u64,
    prepared: Prepared,
) -> Result<(Pages, Box<[Range]>), Status> {
    match prepared {
        Prepared::Rings(rings) => rings.finish(),
        other => Err(why_not(hca, objects, region, len, &other)),
    }
}

/// Returns why there is no region for rings.
pub(crate) fn why_not(
    hca: &Hca,
    objects: &Objects,
    region: &virtio_rdma_ring_region,
    len: u64,
    prepared: &Prepared,
) -> Status {
    match prepared {
        Prepared::Failed(why) => *why,
        _ => rings(hca, objects, region, len).err().unwrap_or(Status::Error),
    }
}
