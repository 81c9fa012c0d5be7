// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory regions: the memory that a key names, resolved against the guest's memory.

use std::cell::Cell;
use std::sync::Arc;

use abi::VIRTIO_RDMA_ACCESS_LOCAL_WRITE;
use memory::{Chunk, GuestMemory, Slice};
use serde::{Deserialize, Serialize};

use super::page_list::{touched, Range, PAGE_SIZE};
use crate::base::budget::{cost, Budget};
use crate::base::gate::Gate;
use crate::base::image::{require, Wrong};
use crate::base::refused::KeyError;
use crate::base::slot::Slot;

/// Pages of a region that are freed at a time.
const FREED: usize = 256;

/// Pages of a region that are touched at a time, and all that are. The others are found when they are used.
const TOUCHED: usize = 16;
const MOST_TOUCHED: usize = 1 << 18;

/// The number of extents or ranges whose memory is given back to the system at a time. To give all of it back at once
/// takes milliseconds for a region of millions of pages.
const GIVEN_BACK: usize = 4096;

/// The memory of a region, in guest addresses.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) enum Backing {
    /// All memory of the guest, named by guest address.
    Dma,
    /// These ranges one after the other, of which no two neighbours are adjacent.
    Ranges(#[serde(with = "shared")] Arc<Vec<Range>>),
}

impl Backing {
    /// Frees some of the ranges, if nobody else has them; how many.
    fn shed_some(&mut self) -> u64 {
        match self {
            Self::Dma => 0,
            Self::Ranges(ranges) => Arc::get_mut(ranges).map_or(0, shed),
        }
    }

    /// Frees the ranges until the budget is exhausted, unless somebody else has them; whether nothing is left to free.
    pub fn shed(&mut self, budget: &mut Budget) -> bool {
        while !budget.is_over() {
            match self.shed_some() {
                0 => return true,
                freed => budget.work(freed * cost::FREE),
            }
        }
        false
    }
}

/// A contiguous piece of a region.
pub(crate) struct Extent {
    /// Offset of its first byte within the region.
    start: u64,
    slice: Slice,
}

impl Extent {
    /// Returns where in this extent the region's byte `offset` is, if it is there.
    #[inline]
    fn skip(&self, offset: u64) -> Option<usize> {
        let skip = usize::try_from(offset.checked_sub(self.start)?).ok()?;
        (skip < self.slice.len()).then_some(skip)
    }
}

/// The memory of a region, in addresses of this process.
pub(crate) enum Map {
    Dma(GuestMemory),
    Extents(Vec<Extent>),
    /// A window has those of its region.
    Window(Arc<Mr>),
}

impl Map {
    /// The map of a region that is not in memory.
    pub const NOWHERE: Self = Self::Extents(Vec::new());
}

/// The access that a user of a key claims.
#[derive(Clone, Copy)]
pub(crate) struct Claim {
    /// Protection domain of the queue that names the key.
    pub pdn: u32,
    /// Access that the key must give, `VIRTIO_RDMA_ACCESS_*`.
    pub access: u32,
    /// The place of the QP whose peer asks for the access; `None` if the QP's
    /// owner does.
    pub qp: Option<Slot>,
}

impl Claim {
    /// Returns the claim of the owner of a queue.
    pub fn local(pdn: u32, access: u32) -> Self {
        Self { pdn, access, qp: None }
    }
}

/// The attributes of a region, apart from the place of its memory in this process.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Attributes {
    /// Its lkey and rkey.
    pub key: u32,
    /// Its protection domain.
    pub pdn: u32,
    /// `VIRTIO_RDMA_ACCESS_*`.
    pub access: u32,
    /// Address by which work requests name the first byte.
    pub iova: u64,
    /// Bytes.
    pub length: u64,
    /// Its memory.
    pub backing: Backing,
}

/// The encoding of ranges that are shared, which is that of any other ranges.
mod shared {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::Range;

    pub fn serialize<S: Serializer>(ranges: &Arc<Vec<Range>>, to: S) -> Result<S::Ok, S::Error> {
        ranges.as_slice().serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Arc<Vec<Range>>, D::Error> {
        Vec::deserialize(from).map(Arc::new)
    }
}

impl Attributes {
    /// Checks attributes that were saved: that the memory is as long as they say, and no longer than `longest`.
    pub fn check(&self, longest: u64) -> Result<(), Wrong> {
        let Backing::Ranges(ranges) = &self.backing else {
            return require(self.iova == 0 && self.length == u64::MAX, "it is not of all memory");
        };
        require(self.length <= longest, "it is longer than the limit")?;
        require(self.iova.checked_add(self.length).is_some(), "its addresses wrap around")?;
        let mut total = 0_u64;
        for range in ranges.iter() {
            let fits = range.len != 0 && range.addr.checked_add(range.len).is_some();
            require(fits, "a range of its memory is empty, or wraps around")?;
            total = total.checked_add(range.len).ok_or("its memory is too long")?;
        }
        require(total == self.length, "its memory has another length")
    }

    /// Returns how many bytes the whole pages have that the memory consists of; 0 for all memory.
    pub fn covered(&self) -> u64 {
        match self.backing {
            Backing::Dma => 0,
            Backing::Ranges(_) => touched(self.iova, self.length, PAGE_SIZE) * PAGE_SIZE,
        }
    }

    /// Returns whether the memory is to be written.
    pub fn writes(&self) -> bool {
        self.access & VIRTIO_RDMA_ACCESS_LOCAL_WRITE != 0
    }
}

/// The users of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Reach {
    /// Everybody: that of a region.
    Everybody,
    /// The peers of all QPs: that of a window of type 1.
    Peers,
    /// The peer of the QP in this place: that of a window of type 2B.
    PeerOf(Slot),
}

impl Reach {
    /// Returns whether the owner is one of the users (`None`), or whether the peer of the QP in a place is.
    #[inline]
    pub fn includes(self, peer_of: Option<Slot>) -> bool {
        match self {
            Self::Everybody => true,
            Self::Peers => peer_of.is_some(),
            Self::PeerOf(qp) => peer_of == Some(qp),
        }
    }
}

/// The part of a region that a window is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Part {
    /// Offset of its first byte in the region.
    pub offset: u64,
    /// Address by which peers name that.
    pub iova: u64,
    /// Bytes.
    pub length: u64,
    /// `VIRTIO_RDMA_ACCESS_REMOTE_*`, `VIRTIO_RDMA_ACCESS_FLUSH_*`.
    pub access: u32,
    /// The users of the key.
    pub reach: Reach,
}

/// A memory region, or a window that is bound to one, resolved against one map of
/// guest memory.
///
/// It does not change. A thread that copies from or to it pins it for one round; [`Mr::retire`] waits
/// for that.
///
/// A region that work requests invalidate is revocable besides: [`Mr::revoke`] waits only for copies that are under
/// way. These take no lock, so locks may be held meanwhile. A caller that need not wait calls [`Mr::begin_to_revoke`]
/// again and again.
pub(crate) struct Mr {
    attributes: Attributes,
    /// The users of its key.
    reach: Reach,
    map: Map,
    /// Offset of its first byte in `map`.
    base: u64,
    /// The threads that pin it.
    pins: Gate,
    /// The copies under way, if it is revocable.
    copies: Option<Gate>,
}

/// The reason why memory that a guest names cannot be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResolveError {
    /// An address in the page table is not aligned.
    Malformed,
    /// A range is not memory of the guest, or is read-only and to be written.
    Fault,
    /// There are more contiguous pieces than the device may keep.
    TooManyExtents,
}

impl Mr {
    /// Resolves a region; `room` is how many extents it may use.
    pub fn new(
        memory: &GuestMemory,
        attributes: Attributes,
        room: usize,
    ) -> Result<Self, ResolveError> {
        let mut resolving = Resolving::new(&attributes.backing, attributes.writes(), room);
        resolving.run(memory, &mut Budget::endless());
        Ok(Self::resolved(attributes, resolving.finish(memory)?))
    }

    /// Returns a region that was resolved.
    pub fn resolved(attributes: Attributes, map: Map) -> Self {
        let reach = Reach::Everybody;
        Self { attributes, reach, map, base: 0, pins: Gate::default(), copies: None }
    }

    /// Returns the rest of a region that has ended or was never made, to be [shed](Self::shed).
    pub fn remains(backing: Backing, map: Map) -> Self {
        let attributes = Attributes { key: 0, pdn: 0, access: 0, iova: 0, length: 0, backing };
        Self::resolved(attributes, map)
    }

    /// Frees some extents or ranges of a region that nobody uses. Returns their number.
    pub fn shed(&mut self) -> u64 {
        let freed = match &mut self.map {
            Map::Extents(extents) => shed(extents),
            Map::Dma(_) | Map::Window(_) => 0,
        };
        if freed == 0 {
            self.attributes.backing.shed_some()
        } else {
            freed
        }
    }

    /// Returns a window on a part of the region, which is within it; revocable.
    pub fn window(self: &Arc<Self>, key: u32, part: &Part) -> Self {
        let Part { offset, iova, length, access, reach } = *part;
        let map = match &self.map {
            Map::Dma(memory) => Map::Dma(memory.clone()),
            Map::Extents(_) | Map::Window(_) => Map::Window(Arc::clone(self)),
        };
        let attributes = Attributes { key, access, iova, length, ..self.attributes.clone() };
        let base = self.base + offset;
        Self { attributes, reach, map, base, pins: Gate::default(), copies: Some(Gate::default()) }
    }

    /// Makes the region revocable.
    pub fn revocable(self) -> Self {
        Self { copies: Some(Gate::default()), ..self }
    }

    /// Returns the attributes of the region.
    pub fn attributes(&self) -> &Attributes {
        &self.attributes
    }

    /// Returns how many extents are in use.
    pub fn extents(&self) -> usize {
        match &self.map {
            Map::Dma(_) | Map::Window(_) => 0,
            Map::Extents(extents) => extents.len(),
        }
    }

    /// Ends all use: no new pin succeeds, and when this returns none is left.
    pub fn retire(&self) {
        self.pins.close();
    }

    /// Begins to retire the region: no new pin succeeds from now on. Returns whether none is left.
    pub fn begin_to_retire(&self) -> bool {
        self.pins.shut()
    }

    /// Begins to revoke the region: no pin succeeds and no copy begins from now on, whoever has pinned it. Returns
    /// whether no copy is under way. Of a revocable region only.
    pub fn begin_to_revoke(&self) -> bool {
        self.pins.shut();
        self.copies.as_ref().is_none_or(Gate::shut)
    }

    /// Ends all access: no copy begins, whoever has pinned the region, and when
    /// this returns none is under way. Of a revocable region only.
    pub fn revoke(&self) {
        if let Some(copies) = &self.copies {
            copies.close();
        }
    }

    /// Returns whether the region may be revoked.
    #[inline]
    pub fn is_revocable(&self) -> bool {
        self.copies.is_some()
    }

    /// Begins a copy, which a revocation waits for; `false` if the region was revoked.
    pub fn enter(&self) -> bool {
        self.copies.as_ref().is_none_or(Gate::enter)
    }

    /// Ends the copy.
    pub fn leave(&self) {
        if let Some(copies) = &self.copies {
            copies.leave();
        }
    }

    /// Returns whether the region was revoked.
    #[inline]
    pub fn is_revoked(&self) -> bool {
        self.copies.as_ref().is_some_and(Gate::is_closed)
    }

    /// Returns a pin, which keeps [`Mr::retire`] from returning for as long as it lives; `None` if the
    /// region is retired.
    pub fn pin(self: Arc<Self>) -> Option<Pin> {
        self.pins.enter().then(|| Pin { region: self, near: Cell::new(0) })
    }

    /// Checks the grounds alone.
    #[inline]
    pub fn check_claim(&self, claim: Claim) -> Result<(), KeyError> {
        if self.attributes.pdn != claim.pdn {
            return Err(KeyError::Pd);
        }
        if self.attributes.access & claim.access != claim.access || !self.reach.includes(claim.qp) {
            return Err(self.why_not(claim));
        }
        Ok(())
    }

    /// Returns why a queue of the region's PD does not get the access.
    #[cold]
    fn why_not(&self, claim: Claim) -> KeyError {
        let is_others = matches!(self.reach, Reach::PeerOf(_)) && !self.reach.includes(claim.qp);
        if is_others && claim.qp.is_some() {
            KeyError::Qp
        } else {
            KeyError::Access
        }
    }

    /// Checks `[addr, addr + len)`; its offset in the memory of the region.
    #[inline]
    pub fn check(&self, claim: Claim, addr: u64, len: u64) -> Result<u64, KeyError> {
        self.check_claim(claim)?;
        self.offset(addr, len).map(|offset| self.base + offset).ok_or(KeyError::Range)
    }

    /// Returns the offset in the region of `[addr, addr + len)`, if that lies within.
    pub fn offset(&self, addr: u64, len: u64) -> Option<u64> {
        let offset = match &self.map {
            Map::Dma(memory) => {
                return memory.contains(addr, len).then_some(addr);
            }
            Map::Extents(_) | Map::Window(_) => addr.checked_sub(self.attributes.iova)?,
        };
        (offset.checked_add(len)? <= self.attributes.length).then_some(offset)
    }
}

/// The memory of a region from some place on, piece by contiguous piece.
#[derive(Clone)]
pub(crate) enum Pieces<'a> {
    /// The memory of the guest from an address on.
    Dma { memory: &'a GuestMemory, addr: u64 },
    /// The memory of extents, of the first from the byte `skip` on.
    Extents { extents: std::slice::Iter<'a, Extent>, skip: usize },
}

impl<'a> Pieces<'a> {
    /// Returns the next piece, or its first `most` bytes; then the other bytes of it are skipped. `None` at the
    /// end, or where the guest has no memory any more.
    #[inline(always)]
    pub fn next(&mut self, most: u64) -> Option<Chunk<'a>> {
        match self {
            Self::Dma { memory, addr } => {
                let chunk = memory.chunk(*addr, most).ok()?;
                *addr += chunk.len() as u64;
                Some(chunk)
            }
            Self::Extents { extents, skip } => {
                let slice = &extents.next()?.slice;
                let skip = std::mem::take(skip);
                let have = slice.len() - skip;
                slice.chunk(skip, usize::try_from(most).map_or(have, |most| have.min(most))).ok()
            }
        }
    }
}

impl Pieces<'_> {
    /// Leaves `bytes` out. `None` if the extents have not so many. What the guest has no memory for is found later.
    pub fn skip(&mut self, bytes: u64) -> Option<()> {
        match self {
            Self::Dma { addr, .. } => *addr = addr.checked_add(bytes)?,
            Self::Extents { extents, skip } => {
                let mut offset = skip.checked_add(usize::try_from(bytes).ok()?)?;
                while offset != 0 {
                    let len = extents.as_slice().first()?.slice.len();
                    if offset < len {
                        break;
                    }
                    offset -= len;
                    extents.next();
                }
                *skip = offset;
            }
        }
        Some(())
    }
}

/// A region that is being resolved, over as many visits as that takes.
pub(crate) struct Resolving {
    /// The ranges of the region; `None` for all memory of the guest.
    ranges: Option<Arc<Vec<Range>>>,
    /// Whether it is to be written.
    write: bool,
    /// Extents that there may be.
    room: usize,
    /// The range that comes next, and how many bytes of it were found.
    at: usize,
    done: u64,
    /// Bytes of the ranges before.
    start: u64,
    found: Vec<Extent>,
    failed: Option<ResolveError>,
    /// The extent that is touched next, where in it, and how many pages were touched.
    next: (usize, usize),
    touched: usize,
}

impl Resolving {
    /// Begins with a region of this; `room` is how many extents it may use.
    pub fn new(backing: &Backing, write: bool, room: usize) -> Self {
        let ranges = match backing {
            Backing::Dma => None,
            Backing::Ranges(ranges) => Some(Arc::clone(ranges)),
        };
        let (at, done, start, found, failed) = (0, 0, 0, Vec::new(), None);
        let (next, touched) = ((0, 0), 0);
        Self { ranges, write, room, at, done, start, found, failed, next, touched }
    }

    /// Goes on until the budget is exhausted; whether it has come to an end.
    pub fn run(&mut self, memory: &GuestMemory, budget: &mut Budget) -> bool {
        while self.failed.is_none() {
            let next = self.ranges.as_ref().and_then(|ranges| ranges.get(self.at));
            let Some(range) = next.copied() else { return true };
            if budget.is_over() {
                return false;
            }
            budget.work(cost::PAGE);
            self.failed = self.step(memory, &range).err();
        }
        // The extents that were found before are of no use.
        self.shed(budget)
    }

    /// Returns whether the memory was not found.
    pub fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Returns the extents that were found so far, which nobody needs any more.
    pub fn abandon(self) -> Map {
        Map::Extents(self.found)
    }

    /// Touches the pages that were found until the budget is exhausted; whether all are that should be.
    ///
    /// The pages exist, because the guest has pinned them: programs of the guest have written them, or read them from
    /// files. But this process has not found most of them, and would do so one by one in the path of messages, with the
    /// QP of a peer locked, and at three times the price. A region of all memory is not touched: the guest has not
    /// pinned it, and may never use most of it.
    pub fn touch(&mut self, budget: &mut Budget) -> bool {
        if self.failed.is_some() {
            return true;
        }
        while self.touched < MOST_TOUCHED {
            let Some(Extent { slice, .. }) = self.found.get(self.next.0) else { return true };
            if budget.is_over() {
                return false;
            }
            let most = if budget.is_wary() { 1 } else { TOUCHED };
            // It begins within the slice.
            let (len, pages) = slice.touch(self.next.1, most).unwrap_or((slice.len(), 0));
            budget.work(cost::PAGE + pages as u64 * cost::TOUCH);
            self.touched += pages;
            self.next.1 += len;
            if self.next.1 >= slice.len() {
                self.next = (self.next.0 + 1, 0);
            }
        }
        true
    }

    /// Frees the extents that were found, until the budget is exhausted. Returns whether none is left. The ranges are
    /// freed by their other owner.
    pub fn shed(&mut self, budget: &mut Budget) -> bool {
        self.ranges = None;
        while !self.found.is_empty() && !budget.is_over() {
            budget.work(shed(&mut self.found) * cost::FREE);
        }
        self.found.is_empty()
    }

    /// Finds the next piece of a range in this process.
    fn step(&mut self, memory: &GuestMemory, range: &Range) -> Result<(), ResolveError> {
        let slice = memory
            .prefix(range.addr + self.done, range.len - self.done)
            .map_err(|_| ResolveError::Fault)?;
        if self.write && !slice.writable() {
            return Err(ResolveError::Fault);
        }
        if self.found.len() == self.room {
            return Err(ResolveError::TooManyExtents);
        }
        let start = self.start + self.done;
        self.done += slice.len() as u64;
        self.found.push(Extent { start, slice });
        if self.done >= range.len {
            (self.at, self.done, self.start) = (self.at + 1, 0, self.start + range.len);
        }
        Ok(())
    }

    /// Returns where the region's memory is, if it was found.
    pub fn finish(self, memory: &GuestMemory) -> Result<Map, ResolveError> {
        if let Some(why) = self.failed {
            return Err(why);
        }
        let mut extents = self.found;
        extents.shrink_to_fit();
        Ok(if self.ranges.is_some() { Map::Extents(extents) } else { Map::Dma(memory.clone()) })
    }
}

/// Frees some extents or ranges, the last ones; how many.
fn shed<T>(pieces: &mut Vec<T>) -> u64 {
    let freed = pieces.len().min(FREED);
    pieces.truncate(pieces.len() - freed);
    if pieces.capacity() - pieces.len() >= GIVEN_BACK {
        pieces.shrink_to_fit();
    }
    freed as u64
}

/// Returns which of the extents the region's byte `offset` is in, and where in it; `near` is the first
/// guess.
#[inline]
fn locate(extents: &[Extent], near: usize, offset: u64) -> Option<(usize, usize)> {
    let there = |at: usize| Some((at, extents.get(at)?.skip(offset)?));
    there(near).or_else(|| there(near + 1)).or_else(|| {
        let at = extents.partition_point(|extent| extent.start <= offset).checked_sub(1)?;
        there(at)
    })
}

/// A region that is in use.
pub(crate) struct Pin {
    region: Arc<Mr>,
    /// The extent that was used last. Messages walk through memory, and a large region has
    /// thousands.
    near: Cell<usize>,
}

impl Pin {
    /// Returns the region.
    pub fn region(&self) -> &Mr {
        &self.region
    }

    /// Returns `len` bytes of its memory from the byte `offset` on, if they are contiguous.
    #[inline(always)]
    pub fn piece(&self, offset: u64, len: u64) -> Option<Chunk<'_>> {
        let Map::Extents(extents) = &self.region.map else {
            let piece = self.pieces(offset)?.next(len)?;
            return (piece.len() as u64 == len).then_some(piece);
        };
        let (at, skip) = locate(extents, self.near.get(), offset)?;
        self.near.set(at);
        extents.get(at)?.slice.chunk(skip, usize::try_from(len).ok()?).ok()
    }

    /// Returns its memory from the byte `offset` on.
    #[inline(always)] // or it is written word by word, and read from there before that is done
    pub fn pieces(&self, offset: u64) -> Option<Pieces<'_>> {
        let mut map = &self.region.map;
        if let Map::Window(region) = map {
            map = &region.map;
        }
        let extents = match map {
            Map::Dma(memory) => return Some(Pieces::Dma { memory, addr: offset }),
            Map::Extents(extents) => extents,
            // There is no window on a window.
            Map::Window(_) => return None,
        };
        let (at, skip) = locate(extents, self.near.get(), offset)?;
        self.near.set(at);
        Some(Pieces::Extents { extents: extents[at..].iter(), skip })
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.region.pins.leave();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const OWN: Claim = Claim { pdn: 1, access: 0, qp: None };

    pub(crate) fn region(memory: &GuestMemory, key: u32, iova: u64, ranges: &[Range]) -> Arc<Mr> {
        let attributes = Attributes {
            key,
            pdn: 1,
            access: VIRTIO_RDMA_ACCESS_LOCAL_WRITE,
            iova,
            length: ranges.iter().map(|r| r.len).sum(),
            backing: Backing::Ranges(Arc::new(ranges.to_vec())),
        };
        Arc::new(Mr::new(memory, attributes, ranges.len()).unwrap())
    }

    #[test]
    fn every_byte_is_found_from_everywhere() {
        let memory = GuestMemory::anonymous(&[(0, 0x1_0000)]).unwrap();
        let lens = [3, 1, 7, 64, 2, 1, 9];
        let ranges: Vec<Range> =
            (0..).zip(lens).map(|(i, len)| Range { addr: i << 12, len }).collect();
        let mr = region(&memory, 0x100, 0, &ranges);
        let pin = Arc::clone(&mr).pin().unwrap();
        let Map::Extents(extents) = &mr.map else { panic!() };
        let places = (0..).zip(lens).flat_map(|(at, len)| (0..len).map(move |skip| (at, skip)));
        let places: Vec<(usize, u64)> = places.collect();
        for near in 0..lens.len() {
            for (offset, &(at, skip)) in (0..).zip(&places) {
                let skip = usize::try_from(skip).unwrap();
                assert_eq!(locate(extents, near, offset), Some((at, skip)), "{offset} from {near}");
                pin.near.set(near);
                let piece = pin.pieces(offset).unwrap().next(1 << 12).unwrap();
                assert_eq!(piece.len() + skip, extents[at].slice.len());
            }
            assert_eq!(locate(extents, near, places.len() as u64), None);
        }
    }

    #[test]
    fn a_large_region_is_freed_bit_by_bit() {
        let memory = GuestMemory::anonymous(&[(0, 0x10_0000)]).unwrap();
        let ranges: Vec<Range> =
            (0..100_000).map(|i| Range { addr: i % 128 * 0x2000, len: 8 }).collect();
        let mut mr = Arc::into_inner(region(&memory, 0x100, 0, &ranges)).unwrap();
        drop(ranges);
        let room = |mr: &Mr| {
            let (Map::Extents(extents), Backing::Ranges(ranges)) =
                (&mr.map, &mr.attributes.backing)
            else {
                panic!()
            };
            (extents.capacity(), ranges.capacity())
        };
        let mut before = room(&mr);
        while mr.shed() != 0 {
            let after = room(&mr);
            let freed = before.0 - after.0 + before.1 - after.1;
            assert!(freed <= 2 * GIVEN_BACK, "{freed} at once");
            before = after;
        }
        assert!(before.0 + before.1 < 2 * GIVEN_BACK, "{before:?} are freed in the end");
    }

    #[test]
    fn retiring_waits_for_pins() {
        let memory = GuestMemory::anonymous(&[(0, 0x1000)]).unwrap();
        let mr = region(&memory, 0x100, 0, &[Range { addr: 0, len: 0x1000 }]);
        let pin = Arc::clone(&mr).pin().unwrap();
        let retiring = {
            let mr = Arc::clone(&mr);
            std::thread::spawn(move || mr.retire())
        };
        while !mr.pins.is_closed() {
            std::thread::yield_now();
        }
        assert!(!retiring.is_finished());
        drop(pin);
        retiring.join().unwrap();
    }
}
