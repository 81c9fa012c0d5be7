// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The memory of rings, shared with the device (specification, Rings).
//!
//! The device reads and writes it at any time, so no Rust reference to it is
//! ever made, and what is read from it is copied once. The mapping is a shared
//! one: after fork(2) the device and the parent still use the same memory.

use crate::{
    atomic::AtomicU32,
    barriers::Barriers,
    bindings::{self, virtio_rdma_ring_cqe, virtio_rdma_sge},
    causes::{Cause, cause},
    errno::Result,
};
use core::{
    ffi::c_void,
    marker::PhantomData,
    mem,
    ptr::{self, NonNull},
    sync::atomic::{
        Ordering,
        Ordering::{Acquire, SeqCst},
    },
};

/// Bytes of the smallest page, and therefore of the smallest region.
const MIN_PAGE: usize = 4096;

/// The purpose of a region: the resource type that a program's allocator gets
/// (ibv_alloc_parent_domain(3)). Its upper half would be a driver ID, which virtio-rdma does not
/// have.
#[derive(Clone, Copy)]
#[repr(u64)]
pub enum Resource {
    /// The rings of a QP.
    Qp = 1,
    /// The ring of a CQ.
    Cq = 2,
    /// The ring of an SRQ.
    Srq = 3,
}

/// The memory functions of a parent domain (ibv_alloc_parent_domain(3)).
#[derive(Clone, Copy)]
pub struct Allocator {
    pd: *mut bindings::ibv_pd,
    context: *mut c_void,
    alloc:
        unsafe extern "C" fn(*mut bindings::ibv_pd, *mut c_void, usize, usize, u64) -> *mut c_void,
    free: unsafe extern "C" fn(*mut bindings::ibv_pd, *mut c_void, *mut c_void, u64),
}

// SAFETY: any thread of the program that creates and destroys objects may call the program's
// functions.
unsafe impl Send for Allocator {}
// SAFETY: as above.
unsafe impl Sync for Allocator {}

/// Returns why there are no rings of `len` bytes.
fn no_memory(len: usize) -> Cause {
    let len = u32::try_from(len).unwrap_or(u32::MAX);
    cause!(ENOMEM, "there is no memory for rings of %u bytes", len)
}

impl Allocator {
    /// Returns the allocator that the attributes of a parent domain ask for, for the domain at `pd`.
    ///
    /// # Errors
    ///
    /// EINVAL for one function without the other.
    ///
    /// # Safety
    ///
    /// The functions are as ibv_alloc_parent_domain(3) describes them, and nobody uses
    /// the allocator after the domain was freed.
    pub unsafe fn new(
        attr: &bindings::ibv_parent_domain_init_attr,
        pd: *mut bindings::ibv_pd,
    ) -> Result<Option<Self>, Cause> {
        if attr.comp_mask & bindings::IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS == 0 {
            return Ok(None);
        }
        let (Some(alloc), Some(free)) = (attr.alloc, attr.free) else {
            return Err(cause!(
                EINVAL,
                "a parent domain has one function for memory without the other"
            ));
        };
        let context = match attr.comp_mask & bindings::IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT {
            0 => ptr::null_mut(),
            _ => attr.pd_context,
        };
        Ok(Some(Self { pd, context, alloc, free }))
    }

    /// Allocates `len` bytes of the program's memory, which begin at a page. Returns `None` if the
    /// program leaves that to the provider.
    ///
    /// # Errors
    ///
    /// ENOMEM; EINVAL for memory that does not begin at a page.
    fn allocate(&self, len: usize, resource: Resource) -> Result<Option<NonNull<u8>>, Cause> {
        let page = page_size();
        // SAFETY: `new` got functions that may be called so, and the domain is live.
        let base = unsafe { (self.alloc)(self.pd, self.context, len, page, resource as u64) };
        // IBV_ALLOCATOR_USE_DEFAULT is all ones.
        if base.addr() == usize::MAX {
            return Ok(None);
        }
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| no_memory(len))?;
        let beyond = base.addr().get() & (page - 1);
        if beyond != 0 {
            self.free(base, resource);
            let text =
                cause!(EINVAL, "the program's memory begins %u bytes beyond a page", beyond as u32);
            return Err(text);
        }
        // SAFETY: the program allocated `len` bytes for this call.
        unsafe { base.write_bytes(0, len) };
        Ok(Some(base))
    }

    /// Gives memory back to the program.
    fn free(&self, base: NonNull<u8>, resource: Resource) {
        // SAFETY: `new` got functions that may be called so; the memory came from `alloc`.
        unsafe { (self.free)(self.pd, self.context, base.as_ptr().cast(), resource as u64) };
    }
}

/// A region of rings: memory that the driver pins and the device shares, for the rings of a QP, CQ
/// or SRQ.
pub struct RingRegion {
    base: NonNull<u8>,
    len: usize,
    /// The barriers that the device needs.
    barriers: Barriers,
    /// The program's allocator, if it allocated the memory; otherwise the provider mapped it.
    lender: Option<(Allocator, Resource)>,
    /// The words of the region in a model checker, which sees each access to the bytes.
    #[cfg(loom)]
    pub model: Option<std::sync::Arc<litmus::Memory>>,
}

// SAFETY: threads use the memory by atomic operations, and write to entries that they own by the
// protocol of the rings.
unsafe impl Send for RingRegion {}
// SAFETY: as above.
unsafe impl Sync for RingRegion {}

impl RingRegion {
    /// Allocates at least `len` bytes, page-aligned and zeroed, as memory of the provider.
    #[cfg(test)]
    pub fn new(len: usize) -> Result<Self, Cause> {
        Self::mapped(len, Barriers::PROCESSORS)
    }

    /// Maps at least `len` bytes, page-aligned and zeroed, for a device that needs these barriers.
    ///
    /// # Errors
    ///
    /// ENOMEM.
    fn mapped(len: usize, barriers: Barriers) -> Result<Self, Cause> {
        let page = page_size();
        let len = len.max(1).checked_next_multiple_of(page).ok_or_else(|| no_memory(len))?;
        // SAFETY: a new mapping touches no other.
        let base = unsafe {
            bindings::mmap(
                ptr::null_mut(),
                len as _,
                (bindings::PROT_READ | bindings::PROT_WRITE) as _,
                (bindings::MAP_SHARED | bindings::MAP_ANONYMOUS) as _,
                -1,
                0,
            )
        };
        // MAP_FAILED is all ones.
        if base.addr() == usize::MAX {
            return Err(no_memory(len));
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| no_memory(len))?;
        Ok(Self {
            base,
            len,
            barriers,
            lender: None,
            #[cfg(loom)]
            model: None,
        })
    }

    /// Allocates at least `len` bytes, page-aligned and zeroed, for a device that needs these barriers:
    /// by the program's allocator, if there is one and it does not leave that to the provider.
    ///
    /// # Errors
    ///
    /// EINVAL for memory that does not begin at a page; ENOMEM.
    pub fn lent(
        len: usize,
        barriers: Barriers,
        allocator: Option<Allocator>,
        resource: Resource,
    ) -> Result<Self, Cause> {
        let Some(allocator) = allocator else { return Self::mapped(len, barriers) };
        let page = page_size();
        let len = len.max(1).checked_next_multiple_of(page).ok_or_else(|| no_memory(len))?;
        match allocator.allocate(len, resource)? {
            Some(base) => Ok(Self {
                base,
                len,
                barriers,
                lender: Some((allocator, resource)),
                #[cfg(loom)]
                model: None,
            }),
            None => Self::mapped(len, barriers),
        }
    }

    /// Returns the address of the region in the program.
    pub fn addr(&self) -> u64 {
        self.base.as_ptr().expose_provenance() as u64
    }

    /// Returns the length in bytes, a multiple of the page size.
    pub fn size(&self) -> usize {
        self.len
    }

    /// Returns the barriers that the device needs.
    pub fn barriers(&self) -> Barriers {
        self.barriers
    }

    /// Reads a word of the head.
    pub fn load(&self, word: Word, order: Ordering) -> u32 {
        let value = self.word(word).load(order);
        self.barriers.read();
        u32::from_le(value)
    }

    /// Writes a word of the head.
    pub fn store(&self, word: Word, value: u32, order: Ordering) {
        self.barriers.write();
        self.word(word).store(value.to_le(), order);
    }

    /// Clears a word of the head that was not 0. Returns whether the device may not have cleared it before.
    pub fn clear(&self, word: Word) -> bool {
        // A device behind a bus may write the word in the middle of a processor's exchange, and ask for a
        // doorbell that the exchange does not see. So the program rings in any case.
        if self.barriers.are_for_bus() {
            self.store(word, 0, SeqCst);
            return true;
        }
        self.word(word).swap(0, SeqCst) != 0
    }

    fn word(&self, word: Word) -> &AtomicU32 {
        // SAFETY: a `Word` is aligned and lies in the first page of any region;
        // it is used by atomic operations alone, on both sides.
        unsafe { self.atomic(self.base.add(word.0)) }
    }

    /// Returns the word at `at`.
    ///
    /// # Safety
    ///
    /// It is aligned and in the region, and used only by atomic operations.
    #[cfg(not(loom))]
    #[inline]
    unsafe fn atomic(&self, at: NonNull<u8>) -> &AtomicU32 {
        // SAFETY: the caller passes an aligned word of the region, used only by atomic operations.
        unsafe { AtomicU32::from_ptr(at.cast().as_ptr()) }
    }

    #[cfg(loom)]
    unsafe fn atomic(&self, at: NonNull<u8>) -> &AtomicU32 {
        let model = self.model.as_ref().expect("a test of orders");
        model.word(at.addr().get() - self.base.addr().get())
    }

    /// Tells the model checker that an entry is read or written.
    #[cfg(loom)]
    fn watch(&self, entry: NonNull<u8>, writes: bool) {
        let model = self.model.as_ref().expect("a test of orders");
        let offset = entry.addr().get() - self.base.addr().get();
        if writes { model.set(offset, 0) } else { _ = model.get(offset) }
    }

    /// Returns the address of entry `index` of a ring, if it is within the region.
    fn entry(&self, ring: Ring, index: u32) -> Option<NonNull<u8>> {
        let offset = ring.offset as usize + (((index & ring.mask) as usize) << ring.stride_shift);
        if offset + ring.stride() > self.len {
            return None;
        }
        // SAFETY: the offset is within the region.
        Some(unsafe { self.base.add(offset) })
    }

    /// Opens entry `index` of a ring, which the caller owns, for writing.
    ///
    /// # Errors
    ///
    /// EINVAL for a ring that is not within the region.
    pub fn writer(&self, ring: Ring, index: u32) -> Result<Writer<'_>, Cause> {
        let entry = self.entry(ring, index);
        let entry = entry.ok_or_else(|| cause!(EINVAL, "entry %u lies beyond the ring", index))?;
        #[cfg(loom)]
        self.watch(entry, true);
        Ok(Writer { at: entry, left: ring.stride(), lifetime: PhantomData })
    }

    /// Copies CQE `index` of a completion ring, if the device has written it.
    pub fn cqe(&self, ring: Ring, index: u32) -> Option<virtio_rdma_ring_cqe> {
        const WORDS: usize = size_of::<virtio_rdma_ring_cqe>() / size_of::<u64>();
        const LAP: usize = mem::offset_of!(virtio_rdma_ring_cqe, lap);
        if ring.stride() != size_of::<virtio_rdma_ring_cqe>() {
            return None;
        }
        let entry = self.entry(ring, index)?;
        // SAFETY: the entry holds a CQE, whose lap is aligned and used only by atomic operations.
        let lap = unsafe { self.atomic(entry.add(LAP)) };
        if u32::from_le(lap.load(Acquire)) != ring.lap(index) {
            return None;
        }
        self.barriers.read();
        #[cfg(loom)]
        self.watch(entry, false);
        let words: [u64; WORDS] = core::array::from_fn(|word| {
            // SAFETY: the entry holds as many words. The device may write to them meanwhile; each is
            // read once.
            unsafe { entry.cast::<u64>().add(word).read_volatile() }
        });
        // SAFETY: a CQE consists of integers.
        Some(unsafe { mem::transmute::<[u64; WORDS], virtio_rdma_ring_cqe>(words) })
    }
}

impl virtio_rdma_ring_cqe {
    /// Returns immediate data, or the key that was invalidated.
    pub fn ex(&self) -> u32 {
        // SAFETY: both are integers of one size.
        unsafe { self.ex.imm_data }
    }
}

impl Drop for RingRegion {
    fn drop(&mut self) {
        if let Some((allocator, resource)) = &self.lender {
            return allocator.free(self.base, *resource);
        }
        // SAFETY: only this value uses the mapping, and the kernel has unpinned
        // it. If that fails, the memory stays mapped, which is harmless.
        unsafe { bindings::munmap(self.base.as_ptr().cast(), self.len as _) };
    }
}

/// Returns the bytes of a page of the program's memory, which may be larger than the 4 KiB of
/// the device's pages.
pub(crate) fn page_size() -> usize {
    // SAFETY: sysconf() has no preconditions.
    let size = unsafe { bindings::sysconf(bindings::_SC_PAGESIZE as _) };
    usize::try_from(size).unwrap_or(MIN_PAGE).max(MIN_PAGE)
}

/// The offset of a word in the head of a region.
#[derive(Clone, Copy)]
pub struct Word(usize);

impl Word {
    /// Returns the word at `offset`.
    pub const fn at(offset: usize) -> Self {
        assert!(offset % size_of::<u32>() == 0 && offset <= MIN_PAGE - size_of::<u32>());
        Self(offset)
    }
}

/// The place of a ring in its region.
#[derive(Clone, Copy)]
pub struct Ring {
    offset: u32,
    mask: u32,
    depth_shift: u32,
    stride_shift: u32,
}

impl Ring {
    /// Places a ring of at least `depth` entries of at least `stride` bytes, both
    /// rounded up to powers of two, behind `head` bytes that are in use.
    ///
    /// # Errors
    ///
    /// EINVAL for sizes that no region can hold.
    pub fn new(head: usize, depth: u32, stride: usize) -> Result<Self, Cause> {
        Self::placed(head, depth, stride).ok_or_else(|| {
            let stride = u32::try_from(stride).unwrap_or(u32::MAX);
            cause!(EINVAL, "no ring holds %u entries of %u bytes", depth, stride)
        })
    }

    fn placed(head: usize, depth: u32, stride: usize) -> Option<Self> {
        let depth = depth.max(1).checked_next_power_of_two()?;
        let stride = stride.max(32).checked_next_power_of_two()?;
        let offset = head.checked_next_multiple_of(stride)?;
        if stride > MIN_PAGE {
            return None;
        }
        let ring = Self {
            offset: u32::try_from(offset).ok()?,
            mask: depth - 1,
            depth_shift: depth.trailing_zeros(),
            stride_shift: stride.trailing_zeros(),
        };
        // The next ring must have an offset as well.
        u32::try_from(ring.end()).ok()?;
        Some(ring)
    }

    /// Returns the offset of the first entry, a multiple of the stride.
    pub fn offset(self) -> u32 {
        self.offset
    }

    /// Returns the number of entries, a power of two.
    pub fn depth(self) -> u32 {
        1 << self.depth_shift
    }

    /// Returns the bytes of an entry, a power of two.
    pub fn stride(self) -> usize {
        1 << self.stride_shift
    }

    /// Returns the bytes of the region up to the ring's end.
    pub fn end(self) -> usize {
        self.offset as usize + ((self.mask as usize + 1) << self.stride_shift)
    }

    /// Returns the lap of CQE `index`.
    pub fn lap(self, index: u32) -> u32 {
        (index >> self.depth_shift).wrapping_add(1)
    }
}

/// A structure of the device ABI that is written to an entry as it is.
///
/// # Safety
///
/// The type has no padding.
pub unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($type:ty),* $(,)?) => {
        $(
            // SAFETY: the header has a field for each byte of padding.
            unsafe impl Plain for $type {}
        )*
    };
}
plain!(
    bindings::virtio_rdma_ring_sq_wqe,
    bindings::virtio_rdma_ring_xrc_wqe,
    bindings::virtio_rdma_ring_bind_wqe,
    bindings::virtio_rdma_ring_flush_wqe,
    bindings::virtio_rdma_ring_ud_wqe,
    bindings::virtio_rdma_rq_wqe,
    virtio_rdma_ring_cqe,
    virtio_rdma_sge,
);

/// Writes to an entry, from its front.
///
/// The entry is the caller's until it gives it to the device by a release
/// store of an index, so its writes need no order among themselves.
pub struct Writer<'a> {
    at: NonNull<u8>,
    left: usize,
    lifetime: PhantomData<&'a RingRegion>,
}

impl Writer<'_> {
    /// Appends a structure.
    ///
    /// # Errors
    ///
    /// EINVAL if it does not fit.
    pub fn put<T: Plain>(&mut self, value: T) -> Result<(), Cause> {
        let at = self.take(size_of::<T>())?;
        // SAFETY: the entry has room for the structure.
        unsafe { at.cast().write_unaligned(value) };
        Ok(())
    }

    /// Skips `len` bytes, to write them later.
    ///
    /// # Errors
    ///
    /// EINVAL if the entry has fewer bytes left.
    pub fn skip(&mut self, len: usize) -> Result<(), Cause> {
        self.take(len).map(|_| ())
    }

    /// Appends `len` bytes of the program's memory.
    ///
    /// # Errors
    ///
    /// EINVAL if they do not fit.
    ///
    /// # Safety
    ///
    /// The program may read the `len` bytes at `from`.
    pub unsafe fn put_bytes(&mut self, from: *const u8, len: usize) -> Result<(), Cause> {
        let at = self.take(len)?;
        // SAFETY: the entry has room for the bytes, and the program's bytes are elsewhere.
        unsafe { ptr::copy_nonoverlapping(from, at.as_ptr(), len) };
        Ok(())
    }

    fn take(&mut self, len: usize) -> Result<NonNull<u8>, Cause> {
        let at = self.at;
        self.left = self.left.checked_sub(len).ok_or_else(|| {
            let len = u32::try_from(len).unwrap_or(u32::MAX);
            cause!(EINVAL, "an entry has %u bytes left for %u bytes", self.left as u32, len)
        })?;
        // SAFETY: the entry has at least `len` more bytes.
        self.at = unsafe { at.add(len) };
        Ok(at)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::errno::Errno;
    use crate::model::device::Memory;
    use core::sync::atomic::Ordering::{Relaxed, Release, SeqCst};
    use std::{cell::Cell, fs};

    const CQE: usize = size_of::<virtio_rdma_ring_cqe>();

    /// A ring is as deep and its entries are as long as was asked for at least, both powers of
    /// two, and it begins behind its head, at a multiple of its stride.
    #[test]
    fn geometry() {
        for head in [0usize, 1, 64, 192, 256, 4095, 4096, 100_000] {
            for depth in [0u32, 1, 2, 3, 31, 32, 33, 1000, 1 << 15] {
                for stride in [0usize, 1, 32, 33, 64, 65, 500, 4095, 4096] {
                    let ring = Ring::new(head, depth, stride).unwrap();
                    assert!(ring.depth() >= depth.max(1) && ring.depth() < 2 * depth.max(1));
                    let wanted = stride.max(32);
                    assert!(ring.stride() >= wanted && ring.stride() < 2 * wanted);
                    assert!(ring.depth().is_power_of_two() && ring.stride().is_power_of_two());
                    let offset = ring.offset() as usize;
                    assert!(offset >= head && offset - head < ring.stride());
                    assert_eq!(offset % ring.stride(), 0);
                    assert_eq!(ring.end(), offset + ring.depth() as usize * ring.stride());
                }
            }
        }
    }

    /// Geometry that no region can hold is refused, up to the last byte that has an offset.
    #[test]
    fn geometry_that_cannot_be() {
        for (head, depth, stride) in [
            (0, (1 << 31) + 1, 32),
            (0, u32::MAX, 32),
            (0, 1, 4097),
            (0, 1, usize::MAX),
            (usize::MAX, 1, 32),
            (1 << 32, 1, 32),
            (0, 1 << 27, 32),
            (0, 1 << 20, 4096),
            (32, (1 << 27) - 1, 32),
        ] {
            assert_eq!(Ring::new(head, depth, stride).err().map(Cause::errno), Some(Errno::EINVAL));
        }
        let ring = Ring::new((1 << 31) - 32, 1 << 25, 32).unwrap();
        assert_eq!(ring.end(), (1 << 31) - 32 + (1 << 30));
        assert!(Ring::new(0, 1 << 26, 32).is_ok());
    }

    /// A lap takes as many indices as there are entries; indices go round where a lap ends, and
    /// no lap has the number that memory has before the first one.
    #[test]
    fn laps() {
        let ring = Ring::new(0, 8, CQE).unwrap();
        let laps =
            |range: core::ops::Range<u32>| range.map(|index| ring.lap(index)).collect::<Vec<_>>();
        assert_eq!(laps(6..10), [1, 1, 2, 2]);
        let last = u32::MAX;
        assert_eq!(ring.lap(last), (last >> 3) + 1);
        assert_eq!(ring.lap(last.wrapping_add(1)), 1);
        for depth in [2, 32, 1 << 20] {
            let ring = Ring::new(0, depth, CQE).unwrap();
            for index in [0, depth - 1, depth, u32::MAX - depth, u32::MAX] {
                assert_ne!(ring.lap(index), 0);
                assert_ne!(ring.lap(index), ring.lap(index.wrapping_add(depth)));
            }
        }
    }

    /// A region is zeroed, whole pages, and one that a child of fork(2) and the device share with
    /// the program.
    #[test]
    fn a_region_is_shared_memory() {
        let page = page_size();
        for (len, pages) in [(0, 1), (1, 1), (page, 1), (page + 1, 2), (25 * page - 1, 25)] {
            let region = RingRegion::new(len).unwrap();
            let size = pages * page;
            assert_eq!(region.size(), size);
            assert_eq!(region.addr() % page as u64, 0);
            let memory = Memory::new(&region);
            assert!((0..size).step_by(4).all(|at| memory.word(at).load(Relaxed) == 0));
            memory.word(size - 4).store(7, Relaxed);
            let maps = fs::read_to_string("/proc/self/maps").unwrap();
            let mapping = maps.lines().find(|line| {
                let (range, _) = line.split_once(' ').unwrap();
                let (from, to) = range.split_once('-').unwrap();
                let [from, to] = [from, to].map(|at| u64::from_str_radix(at, 16).unwrap());
                (from..to).contains(&region.addr())
            });
            assert!(mapping.unwrap().contains(" rw-s "), "{mapping:?}");
        }
        assert_eq!(RingRegion::new(usize::MAX).err().map(Cause::errno), Some(Errno::ENOMEM));
        assert_eq!(RingRegion::new(usize::MAX / 2).err().map(Cause::errno), Some(Errno::ENOMEM));
    }

    /// Memory that is no longer needed is given back.
    #[test]
    fn a_region_is_unmapped() {
        let region = RingRegion::new(1 << 20).unwrap();
        let at = format!("{:x}-", region.addr());
        let is_mapped = || {
            let maps = fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().any(|line| line.starts_with(&at))
        };
        // The kernel may join neighbours, so that the region does not begin a line; then there is
        // nothing to see here.
        let was_mapped = is_mapped();
        drop(region);
        assert!(!(was_mapped && is_mapped()));
    }

    /// The words of the head are little-endian, each at its own offset, and the last one of the
    /// page is one.
    #[test]
    fn words_of_the_head() {
        const FIRST: Word = Word::at(0);
        const LAST: Word = Word::at(4092);
        let region = RingRegion::new(1).unwrap();
        region.store(FIRST, 0x1122_3344, Release);
        region.store(LAST, 5, SeqCst);
        let memory = Memory::new(&region);
        assert_eq!(memory.word(0).load(Relaxed).to_ne_bytes(), [0x44, 0x33, 0x22, 0x11]);
        assert_eq!((region.load(FIRST, Relaxed), memory.word(4).load(Relaxed)), (0x1122_3344, 0));
        region.store(LAST, 0xaabb_ccdd, SeqCst);
        assert_eq!(memory.word(4092).load(Relaxed).to_ne_bytes(), [0xdd, 0xcc, 0xbb, 0xaa]);
    }

    /// Whether the device has cleared a word before is known, except of a device behind a bus.
    #[test]
    fn clearing_a_word() {
        const WAKE: Word = Word::at(128);
        for (barriers, is_known) in [(Barriers::PROCESSORS, true), (Barriers::BUS, false)] {
            let region = RingRegion::lent(1, barriers, None, Resource::Qp).unwrap();
            region.store(WAKE, 3, SeqCst);
            assert!(region.clear(WAKE));
            assert_eq!((region.load(WAKE, SeqCst), region.clear(WAKE)), (0, !is_known));
        }
    }

    /// Bytes of a region, each of which says where it is.
    fn patterned(len: usize) -> RingRegion {
        let region = RingRegion::new(len).unwrap();
        let memory = Memory::new(&region);
        for at in (0..region.size()).step_by(4) {
            memory.word(at).store(u32::MAX - at as u32, Relaxed);
        }
        region
    }

    /// The words of a region that are not as [`patterned`] left them.
    fn changed(region: &RingRegion) -> Vec<usize> {
        let memory = Memory::new(region);
        let is_changed = |at: &usize| memory.word(*at).load(Relaxed) != u32::MAX - *at as u32;
        (0..region.size()).step_by(4).filter(is_changed).collect()
    }

    /// An index names an entry modulo the depth, at a stride from the one before, for any index
    /// up to the last one; what is written to it is nowhere else.
    #[test]
    fn entries_are_a_stride_apart() {
        for (head, depth, stride) in [(192, 8, 64), (256, 4, 33), (1, 1, 32), (64, 16, 500)] {
            let ring = Ring::new(head, depth, stride).unwrap();
            for index in [0, 1, depth - 1, depth, 5 * depth + 3, u32::MAX - 1, u32::MAX] {
                let region = patterned(ring.end());
                let mut writer = region.writer(ring, index).unwrap();
                let bytes = vec![0u8; ring.stride()];
                // SAFETY: the bytes are there.
                unsafe { writer.put_bytes(bytes.as_ptr(), bytes.len()) }.unwrap();
                let place = (index % ring.depth()) as usize;
                let from = ring.offset() as usize + place * ring.stride();
                let expected: Vec<_> = (from..from + ring.stride()).step_by(4).collect();
                assert_eq!(changed(&region), expected);
            }
        }
    }

    /// A ring that is not within its region has no entry there, for a writer or for a reader.
    #[test]
    fn an_entry_is_within_its_region() {
        let ring = Ring::new(0, 128, CQE).unwrap();
        let region = RingRegion::new(4096).unwrap();
        for (index, is_there) in [(0, true), (63, true), (64, false), (127, false), (128, true)] {
            assert_eq!(region.writer(ring, index).is_ok(), is_there);
            if is_there {
                let mut writer = region.writer(ring, index).unwrap();
                let lap = ring.lap(index).to_le();
                writer.put(virtio_rdma_ring_cqe { lap, ..Default::default() }).unwrap();
            }
            assert_eq!(region.cqe(ring, index).is_some(), is_there);
        }
        let behind = Ring::new(4096, 1, CQE).unwrap();
        assert_eq!(region.writer(behind, 0).err().map(Cause::errno), Some(Errno::EINVAL));
    }

    /// Returns what the program gets.
    fn errno(result: Result<(), Cause>) -> Result {
        result.map_err(Cause::errno)
    }

    /// A writer fills its entry from the front without a gap, and not a byte more than there is:
    /// what does not fit changes nothing.
    #[test]
    fn a_writer_ends_with_its_entry() {
        let ring = Ring::new(64, 4, 64).unwrap();
        let region = patterned(ring.end());
        let mut writer = region.writer(ring, 1).unwrap();
        let sge = |n: u32| virtio_rdma_sge { addr: n.into(), length: n + 1, lkey: n + 2 };
        assert_eq!(writer.skip(16), Ok(()));
        assert_eq!((writer.put(sge(10)), writer.put(sge(20))), (Ok(()), Ok(())));
        let data = [9u8; 32];
        // SAFETY: the bytes are there, here and below.
        assert_eq!(unsafe { writer.put_bytes(data.as_ptr(), 13) }, Ok(()));
        let before = changed(&region);
        assert_eq!([writer.put(sge(30)), writer.skip(4)].map(errno), [Err(Errno::EINVAL); 2]);
        for len in [4, 32, usize::MAX] {
            // SAFETY: as many bytes are not read.
            assert_eq!(errno(unsafe { writer.put_bytes(data.as_ptr(), len) }), Err(Errno::EINVAL));
        }
        assert_eq!(changed(&region), before);
        // SAFETY: see above.
        assert_eq!(unsafe { writer.put_bytes(data.as_ptr(), 3) }, Ok(()));
        assert_eq!([writer.skip(0), writer.skip(1)].map(errno), [Ok(()), Err(Errno::EINVAL)]);
        let memory = Memory::new(&region);
        let [first, second]: [virtio_rdma_sge; 2] = memory.read(ring, 1, 16);
        assert_eq!((first.addr, first.length, first.lkey), (10, 11, 12));
        assert_eq!((second.addr, second.length, second.lkey), (20, 21, 22));
        assert_eq!(memory.bytes(ring, 1, 48, 16), [9; 16]);
        // The next entry begins behind it, untouched, as what was left out is.
        assert!(changed(&region).iter().all(|at| (64 + 64 + 16..64 + 128).contains(at)));
    }

    /// A CQE is there when its lap is, which is the last that the device writes; what is copied
    /// is what stood there.
    #[test]
    fn a_cqe_is_there_with_its_lap() {
        let ring = Ring::new(128, 4, CQE).unwrap();
        let region = RingRegion::new(ring.end()).unwrap();
        let cqe = |index: u32, lap: u32| virtio_rdma_ring_cqe {
            wr_id: 0x1111_2222_3333_4444 + u64::from(index),
            byte_len: 5,
            qp_num: 6,
            wqe_index: index,
            lap: lap.to_le(),
            ..Default::default()
        };
        for index in [0, 3, 4, 11, 12, u32::MAX - 3, u32::MAX] {
            let lap = ring.lap(index);
            for other in [0, lap - 1, lap + 1, !lap, u32::MAX] {
                region.writer(ring, index).unwrap().put(cqe(index, other)).unwrap();
                assert!(region.cqe(ring, index).is_none());
            }
            region.writer(ring, index).unwrap().put(cqe(index, lap)).unwrap();
            let got = region.cqe(ring, index).unwrap();
            assert_eq!((got.wr_id, got.wqe_index), (cqe(index, lap).wr_id, index));
            assert_eq!((got.byte_len, got.qp_num), (5, 6));
            assert!(region.cqe(ring, index.wrapping_add(4)).is_none());
        }
        // Entries of another length hold no CQEs.
        let wide = Ring::new(128, 2, 2 * CQE).unwrap();
        region.writer(wide, 0).unwrap().put(cqe(0, 1)).unwrap();
        assert!(region.cqe(wide, 0).is_none());
    }

    unsafe extern "C" fn no_memory(
        _: *mut bindings::ibv_pd,
        _: *mut c_void,
        _: usize,
        _: usize,
        _: u64,
    ) -> *mut c_void {
        ptr::null_mut()
    }

    unsafe extern "C" fn nothing(_: *mut bindings::ibv_pd, _: *mut c_void, _: *mut c_void, _: u64) {
    }

    /// An allocator of a program that has no memory.
    pub fn allocator() -> Allocator {
        Allocator { pd: ptr::null_mut(), context: ptr::null_mut(), alloc: no_memory, free: nothing }
    }

    /// If the program's allocator has no memory, the provider does not allocate it elsewhere.
    #[test]
    fn no_memory_of_the_program() {
        let lent = |allocator| RingRegion::lent(1, Barriers::PROCESSORS, allocator, Resource::Cq);
        let region = lent(Some(allocator()));
        assert_eq!(region.err().map(Cause::errno), Some(Errno::ENOMEM));
        assert_eq!(lent(None).unwrap().size(), page_size());
    }

    /// An allocator is there if the attributes say so, with both functions, and its context
    /// counts if they say that.
    #[test]
    fn memory_functions() {
        use bindings::*;
        thread_local! {
            static HEARD: Cell<usize> = const { Cell::new(0) };
        }
        unsafe extern "C" fn alloc(
            _: *mut ibv_pd,
            context: *mut c_void,
            _: usize,
            _: usize,
            _: u64,
        ) -> *mut c_void {
            HEARD.set(context.addr());
            // IBV_ALLOCATOR_USE_DEFAULT
            ptr::without_provenance_mut(usize::MAX)
        }
        unsafe extern "C" fn free(_: *mut ibv_pd, _: *mut c_void, _: *mut c_void, _: u64) {}
        let new = |attr: &ibv_parent_domain_init_attr| {
            // SAFETY: the functions are as the page of the manual has them.
            unsafe { Allocator::new(attr, ptr::null_mut()) }
        };
        let mut attr = ibv_parent_domain_init_attr {
            alloc: Some(alloc),
            free: Some(free),
            pd_context: ptr::without_provenance_mut(7),
            ..Default::default()
        };
        assert!(new(&attr).unwrap().is_none());
        for (mask, heard) in [(0, 0), (IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT, 7)] {
            attr.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | mask;
            let allocator = new(&attr).unwrap();
            HEARD.set(99);
            let barriers = Barriers::PROCESSORS;
            let region = RingRegion::lent(5000, barriers, allocator, Resource::Qp).unwrap();
            assert_eq!((region.size(), HEARD.get()), (8192, heard));
        }
        for (alloc, free) in [(attr.alloc, None), (None, attr.free), (None, None)] {
            let half = ibv_parent_domain_init_attr { alloc, free, ..attr };
            assert_eq!(new(&half).err().map(Cause::errno), Some(Errno::EINVAL));
        }
    }
}
