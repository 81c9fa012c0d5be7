// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The long part of control commands: what is read, found or copied before a command is carried out,
//! over as many turns as that takes.
//!
//! Of a command that may be refused, it changes nothing that anybody else sees. The end of an SRQ or a QP
//! begins with what the object has of others, or they of it, once nothing can refuse it any more. By
//! then a QP is gone for its peer, which is not to find that it lacks what it had.

use std::sync::Arc;

use abi::{
    virtio_rdma_cmd_create_ring_cq, virtio_rdma_cmd_create_ring_qp, virtio_rdma_cmd_create_srq,
    virtio_rdma_cmd_destroy_qp, virtio_rdma_cmd_destroy_srq, virtio_rdma_cmd_reg_user_mr,
    virtio_rdma_cmd_rereg_mr, virtio_rdma_cmd_resize_cq, virtio_rdma_cmd_resize_srq,
    virtio_rdma_ring_region, VIRTIO_RDMA_ACCESS_LOCAL_WRITE, VIRTIO_RDMA_F_REREG_MR,
    VIRTIO_RDMA_REREG_ACCESS, VIRTIO_RDMA_REREG_TRANS,
};
use memory::{GuestMemory, Pages};
use zerocopy::FromBytes;

use crate::control::queue::{touched, Control, MrEntry, Status};
use crate::device::Shared;
use crate::memory::mr::{Backing, Map, Range, Resolving, PAGE_SIZE};
use crate::memory::page_table::Reader;
use crate::queue::cq_ring::{region_len, MovingCq};
use crate::queue::srq::MovingSrq;
use crate::transport::turn::{cost, Turn};

/// Pages that are found at a time.
const STEP: u64 = 64;
/// Entries of a ring that are moved under one lock.
pub(crate) const MOVED: u32 = 64;

/// What a command needs before it is carried out.
pub(crate) enum Prepared {
    /// Nothing, or what it cannot have: it ends in an error.
    Nothing,
    /// The memory of a region.
    Memory(PreparedMemory),
    /// Pages for rings.
    Rings(PreparedRings),
    /// A CQ's move to a new ring.
    Cq(u32, MovingCq),
    /// An SRQ's.
    Srq(u16, MovingSrq),
    /// An SRQ for XRC ends, and with it what the QPs from a place on have of it.
    SrqEnd(u16, u16),
    /// A QP ends that may have many windows.
    QpEnd(u16),
    /// The command ends with this.
    Failed(Status),
}

impl Prepared {
    /// Frees what was found, until the turn is over; whether nothing is left that takes long to free.
    pub fn shed(&mut self, turn: &mut Turn) -> bool {
        match self {
            Self::Memory(PreparedMemory { resolving: Some(resolving), .. }) => resolving.shed(turn),
            _ => true,
        }
    }
}

/// The memory of REG_USER_MR and REREG_MR.
pub(crate) struct PreparedMemory {
    /// What it is to be, by offset in the first page, bytes, and bytes of all pages of the table.
    table: Option<(Reader, [u64; 3])>,
    write: bool,
    room: usize,
    backing: Backing,
    resolving: Option<Resolving>,
    failed: Option<Status>,
}

impl PreparedMemory {
    fn run(&mut self, memory: &GuestMemory, turn: &mut Turn) -> bool {
        if let Some((mut reader, shape)) = self.table.take() {
            if !reader.run(memory, turn) {
                self.table = Some((reader, shape));
                return false;
            }
            let [offset, length, total] = shape;
            match reader.finish(memory) {
                Ok(list) => self.backing = Backing::Ranges(list.cut(offset, length, total)),
                Err(why) => self.failed = Some(why),
            }
        }
        if self.failed.is_some() {
            return true;
        }
        let (backing, write, room) = (&self.backing, self.write, self.room);
        self.resolving.get_or_insert_with(|| Resolving::new(backing, write, room)).run(memory, turn)
    }

    /// What the region is made of, and where that is.
    pub fn finish(self, memory: &GuestMemory) -> Result<(Backing, Map), Status> {
        let resolving = self.resolving.ok_or(self.failed.unwrap_or(Status::Error))?;
        Ok((self.backing, resolving.finish(memory).map_err(Status::of_region)?))
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
    fn new(table: Reader) -> Self {
        let (table, pages) = (Some(table), Pages::empty());
        Self { table, ranges: Box::default(), at: 0, done: 0, pages, failed: None }
    }

    /// To find the pages of these ranges.
    pub fn of_ranges(ranges: Box<[Range]>) -> Self {
        Self { table: None, ranges, at: 0, done: 0, pages: Pages::empty(), failed: None }
    }

    /// Goes on until the turn is over; whether it has come to an end.
    pub fn run(&mut self, memory: &GuestMemory, turn: &mut Turn) -> bool {
        if let Some(mut table) = self.table.take() {
            if !table.run(memory, turn) {
                self.table = Some(table);
                return false;
            }
            match table.finish(memory) {
                Ok(list) => self.ranges = list.ranges(),
                Err(why) => self.failed = Some(why),
            }
        }
        while let (Some(range), None) = (self.ranges.get(self.at), self.failed) {
            if turn.is_over() {
                return false;
            }
            let len = (range.len - self.done).min(STEP * PAGE_SIZE);
            if self.pages.extend(memory, range.addr + self.done, len).is_err() {
                self.failed = Some(Status::Fault);
            }
            turn.work(len / PAGE_SIZE * cost::PAGE);
            self.done += len;
            if self.done >= range.len {
                (self.at, self.done) = (self.at + 1, 0);
            }
        }
        true
    }

    /// The pages and what they are made of.
    pub fn finish(mut self) -> Result<(Pages, Box<[Range]>), Status> {
        if let Some(why) = self.failed {
            return Err(why);
        }
        self.pages.seal();
        Ok((self.pages, self.ranges))
    }
}

fn parse<T: FromBytes>(request: &[u8]) -> Option<T> {
    Some(T::read_from_prefix(request).ok()?.0)
}

impl Shared {
    /// Begins with what a request needs, if it is long enough and asks for nothing impossible.
    pub(crate) fn prepare(&self, control: &Control, request: &[u8]) -> Prepared {
        let prepared = request
            .split_first()
            .and_then(|(command, body)| self.try_prepare(control, (*command).into(), body));
        prepared.unwrap_or(Prepared::Nothing)
    }

    fn try_prepare(&self, control: &Control, command: u32, request: &[u8]) -> Option<Prepared> {
        let rings = |region: &virtio_rdma_ring_region, len| {
            self.prepare_rings(control, region, len).map(Prepared::Rings).ok()
        };
        match command {
            abi::VIRTIO_RDMA_CMD_REG_USER_MR => {
                let request = parse::<virtio_rdma_cmd_reg_user_mr>(request)?;
                self.prepare_memory(control, &request).map(Prepared::Memory).ok()
            }
            abi::VIRTIO_RDMA_CMD_REREG_MR if self.has(VIRTIO_RDMA_F_REREG_MR) => {
                self.prepare_rereg(control, &parse(request)?).map(Prepared::Memory)
            }
            abi::VIRTIO_RDMA_CMD_CREATE_RING_CQ if self.has_rings() => {
                let request: virtio_rdma_cmd_create_ring_cq = parse(request)?;
                rings(&request.region, self.cq_region_len(request.cqe).ok()?)
            }
            abi::VIRTIO_RDMA_CMD_CREATE_RING_QP if self.has_rings() => {
                let request: virtio_rdma_cmd_create_ring_qp = parse(request)?;
                let (send, receive) = self.qp_shapes(&request).ok()?;
                rings(&request.region, send.end().max(receive.end()))
            }
            abi::VIRTIO_RDMA_CMD_CREATE_SRQ if self.has_srqs() => {
                let request: virtio_rdma_cmd_create_srq = parse(request)?;
                let shape = self.srq_shape(&request.ring, request.max_sge as usize).ok()?;
                rings(&request.region, shape.end())
            }
            abi::VIRTIO_RDMA_CMD_RESIZE_CQ if self.has_rings() => {
                let request: virtio_rdma_cmd_resize_cq = parse(request)?;
                rings(&request.region, self.cq_region_len(request.cqe).ok()?)
            }
            abi::VIRTIO_RDMA_CMD_DESTROY_SRQ if self.has_srqs() => {
                let request: virtio_rdma_cmd_destroy_srq = parse(request)?;
                self.begin_srq_end(request.srqn).map(|slot| Prepared::SrqEnd(slot, 0))
            }
            abi::VIRTIO_RDMA_CMD_DESTROY_QP if self.has_mws() => {
                let request: virtio_rdma_cmd_destroy_qp = parse(request)?;
                let slot = self.slot_of(request.qpn)?;
                self.may_destroy_qp(slot).then_some(Prepared::QpEnd(slot))
            }
            abi::VIRTIO_RDMA_CMD_RESIZE_SRQ if self.has_srqs() => {
                let request: virtio_rdma_cmd_resize_srq = parse(request)?;
                rings(&request.region, self.resized_shape(&request).ok()?.end())
            }
            _ => None,
        }
    }

    /// The page table of REG_USER_MR and REREG_MR, once what they say of the memory is checked.
    pub(crate) fn prepare_memory(
        &self,
        control: &Control,
        request: &virtio_rdma_cmd_reg_user_mr,
    ) -> Result<PreparedMemory, Status> {
        let levels = self.page_levels(request)?;
        let (offset, length) = (request.start % PAGE_SIZE, request.length);
        let valid = length <= self.limits.max_mr_size
            && request.virt_addr.checked_add(length).is_some()
            && touched(request.start, length, PAGE_SIZE) == request.npages.into();
        if !valid {
            return Err(Status::Invalid);
        }
        let room = self.limits.max_extents.saturating_sub(control.extents);
        let pages = request.npages.into();
        let table = Reader::new(request.pages, levels, pages, room);
        Ok(PreparedMemory {
            table: Some((table, [offset, length, pages * PAGE_SIZE])),
            write: request.access_flags & VIRTIO_RDMA_ACCESS_LOCAL_WRITE != 0,
            room,
            backing: Backing::Dma,
            resolving: None,
            failed: None,
        })
    }

    /// The memory of a region from now on: other pages, or the same with other access.
    fn prepare_rereg(
        &self,
        control: &Control,
        request: &virtio_rdma_cmd_rereg_mr,
    ) -> Option<PreparedMemory> {
        let MrEntry::Fixed { attributes, live } = control.mr(request.mrn)? else { return None };
        let changes = |flag| request.flags & flag != 0;
        let access = if changes(VIRTIO_RDMA_REREG_ACCESS) {
            request.mr.access_flags
        } else {
            attributes.access
        };
        let old_extents = live.as_ref().map_or(0, |mr| mr.extents());
        let room = self.limits.max_extents.saturating_sub(control.extents - old_extents);
        let memory = if changes(VIRTIO_RDMA_REREG_TRANS) {
            self.prepare_memory(control, &request.mr).ok()?
        } else {
            PreparedMemory {
                table: None,
                write: false,
                room,
                backing: attributes.backing.clone(),
                resolving: None,
                failed: None,
            }
        };
        let write = access & VIRTIO_RDMA_ACCESS_LOCAL_WRITE != 0;
        Some(PreparedMemory { write, room, ..memory })
    }

    /// The page table of a region that holds `len` bytes.
    pub(crate) fn prepare_rings(
        &self,
        control: &Control,
        region: &virtio_rdma_ring_region,
        len: u64,
    ) -> Result<PreparedRings, Status> {
        // Pages beyond those that the rings need are never touched.
        let needed = len.div_ceil(PAGE_SIZE);
        if u64::from(region.npages) < needed {
            return Err(Status::Invalid);
        }
        let room = self.limits.max_extents.saturating_sub(control.extents);
        if usize::try_from(needed).map_or(true, |count| count > room) {
            return Err(Status::NoResource);
        }
        Ok(PreparedRings::new(Reader::new(region.pages, 0, needed, room)))
    }

    /// Bytes of the region of a CQ, if it may have so many entries.
    pub(crate) fn cq_region_len(&self, cqe: u32) -> Result<u64, Status> {
        if !cqe.is_power_of_two() || cqe > self.limits.ring_cqe {
            return Err(Status::Invalid);
        }
        Ok(region_len(cqe))
    }

    /// Goes on until the turn is over; whether it has come to an end.
    pub(crate) fn go_on(
        self: &Arc<Self>,
        prepared: &mut Prepared,
        control: &Control,
        request: &[u8],
        turn: &mut Turn,
    ) -> bool {
        let memory = &control.memory;
        match prepared {
            Prepared::Nothing | Prepared::Failed(_) => true,
            Prepared::Memory(region) => region.run(memory, turn),
            Prepared::Rings(rings) => {
                if !rings.run(memory, turn) {
                    return false;
                }
                let Some((command, body)) = request.split_first() else { return true };
                let resizes = matches!(
                    u32::from(*command),
                    abi::VIRTIO_RDMA_CMD_RESIZE_CQ | abi::VIRTIO_RDMA_CMD_RESIZE_SRQ
                );
                if !resizes {
                    return true;
                }
                let rings = std::mem::replace(rings, PreparedRings::of_ranges(Box::default()));
                let moving = rings.finish().and_then(|(pages, ranges)| {
                    if u32::from(*command) == abi::VIRTIO_RDMA_CMD_RESIZE_CQ {
                        let request: virtio_rdma_cmd_resize_cq =
                            parse(body).ok_or(Status::Length)?;
                        let moving = self.begin_resize_cq(&request, pages, ranges)?;
                        Ok(Prepared::Cq(request.cqn, moving))
                    } else {
                        let request = parse(body).ok_or(Status::Length)?;
                        let (slot, moving) = self.begin_resize_srq(&request, pages, ranges)?;
                        Ok(Prepared::Srq(slot, moving))
                    }
                });
                *prepared = moving.unwrap_or_else(Prepared::Failed);
                self.go_on(prepared, control, request, turn)
            }
            Prepared::SrqEnd(srq, next) => {
                while *next < self.qps.len() {
                    if turn.is_over() {
                        return false;
                    }
                    turn.work(if self.abandon_srq(*srq, *next) {
                        cost::OBJECT
                    } else {
                        cost::LOOK
                    });
                    *next += 1;
                }
                true
            }
            Prepared::QpEnd(slot) => {
                if self.has_many_windows(*slot) {
                    self.part_qp(*slot);
                }
                while self.has_many_windows(*slot) {
                    if turn.is_over() {
                        return false;
                    }
                    turn.work(self.release_windows(*slot) * cost::OBJECT);
                }
                true
            }
            Prepared::Cq(cqn, moving) => {
                let moved = go_on_moving(turn, || self.move_cqes(*cqn, moving));
                moved.unwrap_or_else(|why| {
                    *prepared = Prepared::Failed(why);
                    true
                })
            }
            Prepared::Srq(slot, moving) => {
                let moved = go_on_moving(turn, || self.move_receives(*slot, moving));
                moved.unwrap_or_else(|why| {
                    *prepared = Prepared::Failed(why);
                    true
                })
            }
        }
    }
}

/// Moves entries of a ring until the turn is over or there are no more for now; whether that is so.
fn go_on_moving(
    turn: &mut Turn,
    mut step: impl FnMut() -> Result<u32, Status>,
) -> Result<bool, Status> {
    while !turn.is_over() {
        let moved = step()?;
        turn.work(u64::from(moved) * cost::ENTRY);
        if moved < MOVED {
            return Ok(true);
        }
    }
    Ok(false)
}
