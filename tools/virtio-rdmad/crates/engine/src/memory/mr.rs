// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory regions and keys.

use std::cell::Cell;
use std::hash::Hasher;
use std::sync::Arc;

use abi::{
    VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL, VIRTIO_RDMA_ACCESS_HUGETLB, VIRTIO_RDMA_ACCESS_LOCAL_WRITE,
    VIRTIO_RDMA_ACCESS_MW_BIND, VIRTIO_RDMA_ACCESS_RELAXED_ORDERING,
    VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC, VIRTIO_RDMA_ACCESS_REMOTE_READ,
    VIRTIO_RDMA_ACCESS_REMOTE_WRITE, VIRTIO_RDMA_PAGE_SHIFT,
};
use memory::{Chunk, GuestMemory, Slice};
use smallvec::SmallVec;

use crate::base::by_key::ByKey;
use crate::base::gate::Gate;
use crate::device::Shared;
use crate::memory::fast_reg::{FastReg, Invalidation};
use crate::memory::mr_cache::PinSet;
use crate::memory::mw::{Part, Reach, Windows};
use crate::transport::turn::{cost, Turn};

/// Bytes of a page in a page table.
pub(crate) const PAGE_SIZE: u64 = 1 << VIRTIO_RDMA_PAGE_SHIFT;

/// Pages of a region that are freed at a time.
const FREED: usize = 256;

/// Access flags that mean something, or may be given without meaning anything, whatever was
/// agreed on.
pub(crate) const KNOWN_ACCESS: u32 = VIRTIO_RDMA_ACCESS_LOCAL_WRITE
    | VIRTIO_RDMA_ACCESS_REMOTE_WRITE
    | VIRTIO_RDMA_ACCESS_REMOTE_READ
    | VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC
    | VIRTIO_RDMA_ACCESS_MW_BIND
    | VIRTIO_RDMA_ACCESS_HUGETLB
    | VIRTIO_RDMA_ACCESS_RELAXED_ORDERING;

impl Shared {
    /// Whether a region may have these access flags: all known, and remote writes
    /// only where local ones are allowed (IBA 10.6.3). No memory is persistent.
    pub(crate) fn valid_access(&self, flags: u32) -> bool {
        let remote_write = VIRTIO_RDMA_ACCESS_REMOTE_WRITE | VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC;
        let flush = if self.has_flush() { VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL } else { 0 };
        flags & !(KNOWN_ACCESS | flush) == 0
            && (flags & remote_write == 0 || flags & VIRTIO_RDMA_ACCESS_LOCAL_WRITE != 0)
    }
}

/// A range of guest addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    /// First address.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
}

impl Range {
    /// Pages of a range of whole pages.
    pub fn pages(&self) -> usize {
        usize::try_from(self.len / PAGE_SIZE).unwrap_or(usize::MAX)
    }
}

/// What a region is made of, in guest addresses.
#[derive(Clone)]
pub(crate) enum Backing {
    /// All memory of the guest, named by guest address.
    Dma,
    /// These ranges one after the other; no two neighbours are adjacent.
    Ranges(Arc<Vec<Range>>),
}

/// A contiguous piece of a region.
pub(crate) struct Extent {
    /// Offset of its first byte within the region.
    start: u64,
    slice: Slice,
}

impl Extent {
    /// Where in this extent the region's byte `offset` is, if it is there.
    #[inline]
    fn skip(&self, offset: u64) -> Option<usize> {
        let skip = usize::try_from(offset.checked_sub(self.start)?).ok()?;
        (skip < self.slice.len()).then_some(skip)
    }
}

/// The same, in addresses of this process.
pub(crate) enum Map {
    Dma(GuestMemory),
    Extents(Vec<Extent>),
    /// A window has those of its region.
    Window(Arc<Mr>),
}

/// On what grounds a key is used.
#[derive(Clone, Copy)]
pub(crate) struct Claim {
    /// Protection domain of the queue that names the key.
    pub pdn: u32,
    /// Access that the key must give, `VIRTIO_RDMA_ACCESS_*`.
    pub access: u32,
    /// The place of the QP whose peer asks for the access; `None` if the QP's
    /// owner does.
    pub qp: Option<u16>,
}

impl Claim {
    /// Of the owner of a queue.
    pub fn local(pdn: u32, access: u32) -> Self {
        Self { pdn, access, qp: None }
    }
}

/// What a region is, apart from where its memory lies.
#[derive(Clone)]
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

impl Attributes {
    /// Whether the memory is to be written.
    pub fn writes(&self) -> bool {
        self.access & VIRTIO_RDMA_ACCESS_LOCAL_WRITE != 0
    }
}

/// A memory region, or a window that is bound to one, resolved against one map of
/// guest memory.
///
/// It does not change. Whoever copies from or to it pins it for one round of
/// turns; [`Mr::retire`] waits for these.
///
/// What work requests invalidate is revocable besides: [`Mr::revoke`] waits for
/// copies under way only, which take no lock, so locks may be held meanwhile.
pub(crate) struct Mr {
    attributes: Attributes,
    /// Who may use its key.
    reach: Reach,
    map: Map,
    /// Offset of its first byte in `map`.
    base: u64,
    /// Those who pin it.
    pins: Gate,
    /// Those who copy, if it is revocable.
    copies: Option<Gate>,
}

/// Why a region cannot be resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResolveError {
    /// A range is not memory of the guest, or is read-only and to be written.
    Fault,
    /// More contiguous pieces than the device may keep.
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
        resolving.run(memory, &mut Turn::endless());
        Ok(Self::resolved(attributes, resolving.finish(memory)?))
    }

    /// A region that was resolved.
    pub fn resolved(attributes: Attributes, map: Map) -> Self {
        let reach = Reach::Everybody;
        Self { attributes, reach, map, base: 0, pins: Gate::default(), copies: None }
    }

    /// Frees what is known of some pages of a region that nobody uses; of how many.
    pub fn shed(&mut self) -> u64 {
        match &mut self.map {
            Map::Extents(extents) => shed(extents),
            Map::Dma(_) | Map::Window(_) => 0,
        }
    }

    /// A window on a part of the region, which is within it; revocable.
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

    /// Lets the region be revoked.
    pub fn revocable(self) -> Self {
        Self { copies: Some(Gate::default()), ..self }
    }

    /// What the region is.
    pub fn attributes(&self) -> &Attributes {
        &self.attributes
    }

    /// Extents in use.
    pub fn extents(&self) -> usize {
        match &self.map {
            Map::Dma(_) | Map::Window(_) => 0,
            Map::Extents(extents) => extents.len(),
        }
    }

    /// Ends all use: no new pin succeeds, and when this returns none is left. Whether it had to wait
    /// for that, which is for the end of a peer's round.
    pub fn retire(&self) -> bool {
        self.pins.close()
    }

    /// Ends all access: no copy begins, whoever has pinned the region, and when
    /// this returns none is under way. Of a revocable region only.
    pub fn revoke(&self) {
        if let Some(copies) = &self.copies {
            copies.close();
        }
    }

    /// Whether the region may be revoked.
    #[inline]
    pub fn is_revocable(&self) -> bool {
        self.copies.is_some()
    }

    /// A copy begins, which a revocation waits for; `false` if the region was revoked.
    fn enter(&self) -> bool {
        self.copies.as_ref().is_none_or(Gate::enter)
    }

    /// The copy ends.
    fn leave(&self) {
        if let Some(copies) = &self.copies {
            copies.leave();
        }
    }

    /// Whether the region was revoked.
    #[inline]
    pub fn is_revoked(&self) -> bool {
        self.copies.as_ref().is_some_and(Gate::is_closed)
    }

    /// Keeps [`Mr::retire`] from returning for as long as the pin lives; `None`
    /// if the region is retired.
    fn pin(self: Arc<Self>) -> Option<Pin> {
        self.pins.enter().then(|| Pin { region: self, near: Cell::new(0) })
    }

    /// Checks the grounds alone.
    #[inline]
    pub fn check_claim(&self, claim: Claim) -> Result<(), KeyError> {
        if self.attributes.pdn != claim.pdn {
            return Err(KeyError::Pd);
        }
        if self.attributes.access & claim.access != claim.access || !self.reach.includes(claim.qp) {
            return Err(KeyError::Access);
        }
        Ok(())
    }

    /// Checks `[addr, addr + len)`; its offset in the memory of the region.
    #[inline]
    pub fn check(&self, claim: Claim, addr: u64, len: u64) -> Result<u64, KeyError> {
        self.check_claim(claim)?;
        self.offset(addr, len).map(|offset| self.base + offset).ok_or(KeyError::Range)
    }

    /// Offset in the region of `[addr, addr + len)`, if that lies within.
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
pub(crate) enum Pieces<'a> {
    /// That of the guest, from an address on.
    Dma { memory: &'a GuestMemory, addr: u64 },
    /// That of the extents, the first of them from the byte `skip` on.
    Extents { extents: std::slice::Iter<'a, Extent>, skip: usize },
}

impl<'a> Pieces<'a> {
    /// The next piece, or its first `most` bytes; then the others are not to be had. `None` at the
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

/// A region that is being resolved, over as many turns as that takes.
pub(crate) struct Resolving {
    /// `None`: all memory of the guest.
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
}

impl Resolving {
    /// Begins with a region of this; `room` is how many extents it may use.
    pub fn new(backing: &Backing, write: bool, room: usize) -> Self {
        let ranges = match backing {
            Backing::Dma => None,
            Backing::Ranges(ranges) => Some(Arc::clone(ranges)),
        };
        let (found, failed) = (Vec::new(), None);
        Self { ranges, write, room, at: 0, done: 0, start: 0, found, failed }
    }

    /// Goes on until the turn is over; whether it has come to an end.
    pub fn run(&mut self, memory: &GuestMemory, turn: &mut Turn) -> bool {
        let Some(ranges) = self.ranges.clone() else { return true };
        while let (Some(range), None) = (ranges.get(self.at), self.failed) {
            if turn.is_over() {
                return false;
            }
            turn.work(cost::PAGE);
            self.failed = self.step(memory, range).err();
        }
        // What was found before is of no use.
        self.failed.is_none() || self.shed(turn)
    }

    /// Frees what was found, until the turn is over; whether nothing is left.
    pub fn shed(&mut self, turn: &mut Turn) -> bool {
        while !self.found.is_empty() && !turn.is_over() {
            turn.work(shed(&mut self.found) * cost::FREE);
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

    /// Where the region's memory is, if it was found.
    pub fn finish(self, memory: &GuestMemory) -> Result<Map, ResolveError> {
        if let Some(why) = self.failed {
            return Err(why);
        }
        let mut extents = self.found;
        extents.shrink_to_fit();
        Ok(if self.ranges.is_some() { Map::Extents(extents) } else { Map::Dma(memory.clone()) })
    }
}

/// Frees some extents; how many.
fn shed(extents: &mut Vec<Extent>) -> u64 {
    let freed = extents.len().min(FREED);
    extents.truncate(extents.len() - freed);
    freed as u64
}

/// Which of the extents the region's byte `offset` is in, and where there; `near` is the first guess.
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
    /// The region.
    pub fn region(&self) -> &Mr {
        &self.region
    }

    /// Its memory from the byte `offset` on.
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

/// A part of a region that is checked, and pinned in a [`PinSet`].
pub(crate) struct Mapping {
    /// Which of the set.
    pub pin: u32,
    /// Whether its region may be revoked while it is pinned.
    pub revocable: bool,
    /// Of the first byte in the memory of the region.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// What a chunk of a message covers on one side.
pub(crate) type Mappings = SmallVec<[Mapping; 4]>;

/// Mappings and where their regions are.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    /// The regions.
    pub pins: &'a PinSet,
    /// Parts of them, in turn.
    pub mappings: &'a [Mapping],
}

/// A copy from or to revocable regions: none of them is revoked from its
/// beginning to its end.
pub(crate) struct Copying<'a> {
    view: &'a View<'a>,
    /// How many mappings of revocable regions were entered.
    entered: usize,
}

impl<'a> Copying<'a> {
    /// One that has not begun.
    #[inline]
    pub fn new(view: &'a View<'a>) -> Self {
        Self { view, entered: 0 }
    }

    /// Begins it; the bytes of the mappings. `None` if a region was revoked.
    #[inline]
    pub fn begin(&mut self) -> Option<u64> {
        let mut len = 0;
        for mapping in self.view.mappings {
            if mapping.revocable {
                if !self.view.pins.region(mapping).enter() {
                    return None;
                }
                self.entered += 1;
            }
            len += mapping.len;
        }
        Some(len)
    }
}

impl Drop for Copying<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.entered == 0 {
            return;
        }
        let revocable = self.view.mappings.iter().filter(|mapping| mapping.revocable);
        for mapping in revocable.take(self.entered) {
            self.view.pins.region(mapping).leave();
        }
    }
}

/// What a message carries.
#[derive(Clone, Copy)]
pub(crate) enum Data<'a> {
    /// Memory of a guest.
    Mapped(View<'a>),
    /// Inline data, already copied out of guest memory.
    Inline(&'a [u8]),
}

/// A key, PD, access right or range that does not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyError {
    /// No region has this key.
    Key,
    /// The region belongs to another PD.
    Pd,
    /// The region does not allow the access, or not to this QP.
    Access,
    /// The range is not within the region.
    Range,
}

/// Mixes the bits of a key or of a queue's number; both are chosen by the device.
#[derive(Default)]
pub(crate) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32((*byte).into());
        }
    }

    fn write_u16(&mut self, value: u16) {
        self.write_u32(value.into());
    }

    fn write_u32(&mut self, value: u32) {
        self.0 = (self.0 ^ u64::from(value)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// The regions of one device, by key.
#[derive(Default)]
pub(crate) struct KeyTable {
    /// By the upper 24 bits of the key, of which each region has its own.
    regions: ByKey<Arc<Mr>>,
    /// Those for fast registration, likewise; what is VALID is in `regions` too,
    /// unless it is not in memory.
    fast_regs: ByKey<FastReg>,
    /// Windows; what is bound is in `regions` too, unless it is not in memory.
    pub windows: Windows,
    /// The guest's memory.
    memory: GuestMemory,
}

impl KeyTable {
    /// A random key whose upper 24 bits no region has, or `None` when the
    /// machine has no random numbers. `taken` tells of those not in the table.
    pub fn choose_key(&self, taken: impl Fn(u32) -> bool) -> Option<u32> {
        loop {
            let key = getrandom::u32().ok()?;
            let index = key >> 8;
            let is_used = self.regions.contains(index)
                || self.fast_regs.contains(index)
                || self.windows.has(key);
            let is_crowded = self.regions.is_crowded(index)
                || self.fast_regs.is_crowded(index)
                || self.windows.is_crowded(key);
            if index != 0 && !is_used && !is_crowded && !taken(key) {
                return Some(key);
            }
        }
    }

    /// The guest's memory.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Adds a region for fast registration.
    pub fn insert_fast_reg(&mut self, region: FastReg) {
        self.fast_regs.insert(region.key >> 8, region);
    }

    /// The region for fast registration that has this key, or will have it.
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

    /// Makes the region or window with a key FREE; returns what is to be revoked.
    pub fn invalidate(&mut self, what: Invalidation) -> Result<Option<Arc<Mr>>, KeyError> {
        let index = what.key >> 8;
        if self.windows.has(what.key) {
            self.windows.invalidate(what)?;
        } else {
            let region = self.fast_regs.get_mut(index).ok_or(KeyError::Key)?;
            what.check(region.pdn, region.key, region.valid.is_none())?;
            region.valid = None;
        }
        Ok(self.regions.remove(index))
    }

    /// The guest's memory is another from now on. Regions follow one by one.
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

    /// The region with these upper 24 bits of its key, if it is in memory.
    pub fn resolved(&self, index: u32) -> Option<&Arc<Mr>> {
        self.regions.get(index)
    }

    /// Adds a region, or puts it in the place of the one with the same key, which it
    /// returns.
    pub fn insert(&mut self, mr: Arc<Mr>) -> Option<Arc<Mr>> {
        self.regions.insert(mr.attributes.key >> 8, mr)
    }

    /// Takes a region out and returns it; it may still be pinned.
    pub fn remove(&mut self, key: u32) -> Option<Arc<Mr>> {
        self.regions.remove(key >> 8)
    }

    /// A region of a list of pages, no window and not for fast registration, that is
    /// in memory.
    pub fn fixed(&self, key: u32) -> Option<&Arc<Mr>> {
        let is_listed = |mr: &&Arc<Mr>| matches!(mr.attributes.backing, Backing::Ranges(_));
        let index = key >> 8;
        if self.fast_regs.contains(index) || self.windows.has(key) {
            return None;
        }
        self.regions.get(index).filter(is_listed).filter(|mr| mr.attributes.key == key)
    }

    /// Pins the region with this key.
    pub fn pin(&self, key: u32) -> Result<Pin, KeyError> {
        let mr = self.regions.get(key >> 8).ok_or(KeyError::Key)?;
        if mr.attributes.key != key {
            return Err(KeyError::Key);
        }
        Arc::clone(mr).pin().ok_or(KeyError::Key)
    }
}

/// Collects the pages of a table into ranges, and cuts them to
/// `[offset, offset + length)`, which begins in the first page and ends in the last.
#[derive(Default)]
pub(crate) struct PageList {
    ranges: Vec<Range>,
}

impl PageList {
    /// The ranges of the whole pages.
    pub fn ranges(self) -> Box<[Range]> {
        self.ranges.into()
    }

    /// Appends a page; `false` if there would be more than `room` ranges.
    pub fn push(&mut self, page: u64, room: usize) -> bool {
        self.push_range(Range { addr: page, len: PAGE_SIZE }, room)
    }

    /// Appends a page of any size; `false` if there would be more than `room` ranges.
    pub fn push_range(&mut self, page: Range, room: usize) -> bool {
        if let Some(last) = self.ranges.last_mut() {
            if last.addr.checked_add(last.len) == Some(page.addr) {
                last.len += page.len;
                return true;
            }
        }
        if self.ranges.len() == room {
            return false;
        }
        self.ranges.push(page);
        true
    }

    /// The ranges of the bytes themselves; the whole pages have `total` bytes.
    pub fn cut(mut self, offset: u64, length: u64, total: u64) -> Arc<Vec<Range>> {
        if let Some(first) = self.ranges.first_mut() {
            first.addr += offset;
            first.len -= offset;
        }
        if let Some(last) = self.ranges.last_mut() {
            last.len -= total - offset - length;
        }
        Arc::new(self.ranges)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::RwLock;

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
    fn pages_coalesce_and_are_cut() {
        let mut list = PageList::default();
        for page in [0x1000, 0x2000, 0x5000, 0x3000] {
            assert!(list.push(page, 3));
        }
        assert!(!list.push(0x9000, 3));
        let ranges = list.cut(0x10, 0x3000, 4 * PAGE_SIZE);
        assert_eq!(
            ranges[..],
            [
                Range { addr: 0x1010, len: 0x1ff0 },
                Range { addr: 0x5000, len: 0x1000 },
                Range { addr: 0x3000, len: 0x10 }
            ]
        );
    }

    #[test]
    fn keys_are_checked() {
        let memory = GuestMemory::anonymous(&[(0, 0x2000)]).unwrap();
        let mut table = KeyTable::default();
        let mr = region(&memory, 0x1_2345, 0x1000, &[Range { addr: 0, len: 0x1000 }]);
        table.insert(Arc::clone(&mr));
        let table = RwLock::new(table);
        let map = |key, pdn, access, addr, len| {
            let claim = Claim::local(pdn, access);
            PinSet::default().map(&table, key, claim, addr, len).map(|_| ()).err()
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
    fn what_a_work_request_made_is_returned_to_be_retired() {
        let memory = GuestMemory::anonymous(&[(0, 0x2000)]).unwrap();
        let mut table = KeyTable::default();
        for key in [0x100, 0x200] {
            table.insert_fast_reg(FastReg { pdn: 1, max_pages: 1, key, valid: None });
        }
        let mr = region(&memory, 0x100, 0, &[Range { addr: 0, len: 0x1000 }]);
        table.set_valid(mr.attributes.clone(), Arc::clone(&mr));
        assert!(table.remove_fast_reg(0x200).is_none());
        let valid = table.remove_fast_reg(0x100).unwrap();
        assert!(Arc::ptr_eq(&valid, &mr) && table.pin(0x100).is_err());
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
