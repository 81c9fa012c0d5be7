// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The memory of rings, shared with the device (specification, chapter 13).
//!
//! The device reads and writes it at any time, so no Rust reference to it is
//! ever made, and what comes out of it is copied once. The pages are shared
//! ones: after fork(2) the device and the parent still mean the same memory.

use crate::{
    bindings::{self, virtio_rdma_ring_cqe, virtio_rdma_sge},
    errno::{Errno, Result},
};
use core::{
    ffi::c_void,
    marker::PhantomData,
    mem,
    ptr::{self, NonNull},
    sync::atomic::{AtomicU32, Ordering, Ordering::Acquire},
};

/// Bytes of the smallest page, and so of the smallest region.
const MIN_PAGE: usize = 4096;

/// What a region is for, as the program's allocator hears it: the resource type
/// of ibv_alloc_parent_domain(3). Its upper half would be a driver ID, of which
/// virtio-rdma has none.
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

// SAFETY: the program says that its functions may be called by whoever creates
// and destroys objects.
unsafe impl Send for Allocator {}
// SAFETY: as above.
unsafe impl Sync for Allocator {}

impl Allocator {
    /// What the attributes of a parent domain ask for, for the domain at `pd`.
    ///
    /// # Errors
    ///
    /// EINVAL for one function without the other.
    ///
    /// # Safety
    ///
    /// The functions are what ibv_alloc_parent_domain(3) says, and nobody uses
    /// the allocator when the domain is gone.
    pub unsafe fn new(
        attr: &bindings::ibv_parent_domain_init_attr,
        pd: *mut bindings::ibv_pd,
    ) -> Result<Option<Self>> {
        if attr.comp_mask & bindings::IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS == 0 {
            return Ok(None);
        }
        let (Some(alloc), Some(free)) = (attr.alloc, attr.free) else { return Err(Errno::EINVAL) };
        let context = match attr.comp_mask & bindings::IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT {
            0 => ptr::null_mut(),
            _ => attr.pd_context,
        };
        Ok(Some(Self { pd, context, alloc, free }))
    }

    /// `len` bytes at a page of the program's, or `None` if it leaves that to
    /// the provider.
    fn allocate(&self, len: usize, resource: Resource) -> Result<Option<NonNull<u8>>> {
        let page = page_size();
        // SAFETY: by the contract of `new`.
        let base = unsafe { (self.alloc)(self.pd, self.context, len, page, resource as u64) };
        // IBV_ALLOCATOR_USE_DEFAULT is all ones.
        if base.addr() == usize::MAX {
            return Ok(None);
        }
        let base = NonNull::new(base.cast::<u8>()).ok_or(Errno::ENOMEM)?;
        if base.addr().get() & (page - 1) != 0 {
            self.free(base, resource);
            return Err(Errno::EINVAL);
        }
        // SAFETY: the memory is the caller's, of `len` bytes.
        unsafe { base.write_bytes(0, len) };
        Ok(Some(base))
    }

    /// Gives memory back to the program.
    fn free(&self, base: NonNull<u8>, resource: Resource) {
        // SAFETY: by the contract of `new`; the memory came from `alloc`.
        unsafe { (self.free)(self.pd, self.context, base.as_ptr().cast(), resource as u64) };
    }
}

/// Pinned by the driver and shared with the device: the rings of a QP, CQ or SRQ.
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    /// Whose memory it is; without it, a mapping of the provider's own.
    lender: Option<(Allocator, Resource)>,
}

// SAFETY: the memory is reached by atomic operations, and by writes to entries
// that the caller owns by the protocol of the rings.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Allocates at least `len` bytes, page-aligned and zeroed.
    ///
    /// # Errors
    ///
    /// ENOMEM.
    pub fn new(len: usize) -> Result<Self> {
        let page = page_size();
        let len = len.max(1).checked_next_multiple_of(page).ok_or(Errno::ENOMEM)?;
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
            return Err(Errno::ENOMEM);
        }
        let base = NonNull::new(base.cast()).ok_or(Errno::ENOMEM)?;
        Ok(Self { base, len, lender: None })
    }

    /// The same in the program's own memory, if it has an allocator and that
    /// does not leave it to the provider.
    ///
    /// # Errors
    ///
    /// EINVAL for memory that does not begin at a page; ENOMEM.
    pub fn lent(len: usize, allocator: Option<Allocator>, resource: Resource) -> Result<Self> {
        let Some(allocator) = allocator else { return Self::new(len) };
        let len = len.max(1).checked_next_multiple_of(page_size()).ok_or(Errno::ENOMEM)?;
        match allocator.allocate(len, resource)? {
            Some(base) => Ok(Self { base, len, lender: Some((allocator, resource)) }),
            None => Self::new(len),
        }
    }

    /// Address of the region in the program.
    pub fn addr(&self) -> u64 {
        self.base.as_ptr().expose_provenance() as u64
    }

    /// Bytes, a multiple of the page size.
    pub fn size(&self) -> usize {
        self.len
    }

    /// Reads a word of the head.
    pub fn load(&self, word: Word, order: Ordering) -> u32 {
        u32::from_le(self.word(word).load(order))
    }

    /// Writes a word of the head.
    pub fn store(&self, word: Word, value: u32, order: Ordering) {
        self.word(word).store(value.to_le(), order);
    }

    /// Writes a word of the head; answers what it was.
    pub fn swap(&self, word: Word, value: u32, order: Ordering) -> u32 {
        u32::from_le(self.word(word).swap(value.to_le(), order))
    }

    fn word(&self, word: Word) -> &AtomicU32 {
        // SAFETY: a `Word` is aligned and lies in the first page of any region;
        // it is used by atomic operations alone, on both sides.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(word.0).cast()) }
    }

    /// The bytes of entry `index` of a ring.
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
    pub fn writer(&self, ring: Ring, index: u32) -> Result<Writer<'_>> {
        let entry = self.entry(ring, index).ok_or(Errno::EINVAL)?;
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
        // SAFETY: the entry holds a CQE, whose lap is used by atomic
        // operations alone.
        let lap = unsafe { AtomicU32::from_ptr(entry.add(LAP).as_ptr().cast()) };
        if u32::from_le(lap.load(Acquire)) != ring.lap(index) {
            return None;
        }
        let words: [u64; WORDS] = core::array::from_fn(|word| {
            // SAFETY: as above; each word is read once, whatever the device
            // does meanwhile.
            unsafe { entry.cast::<u64>().add(word).read_volatile() }
        });
        // SAFETY: a CQE is made of integers.
        Some(unsafe { mem::transmute::<[u64; WORDS], virtio_rdma_ring_cqe>(words) })
    }
}

impl virtio_rdma_ring_cqe {
    /// Immediate data or the key that was invalidated, whichever it is.
    pub fn ex(&self) -> u32 {
        // SAFETY: both are integers of one size.
        unsafe { self.ex.imm_data }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some((allocator, resource)) = &self.lender {
            return allocator.free(self.base, *resource);
        }
        // SAFETY: the mapping is this value's own, and the kernel has unpinned
        // it; failure would leave the memory mapped, nothing else.
        unsafe { bindings::munmap(self.base.as_ptr().cast(), self.len as _) };
    }
}

/// Bytes of a page.
fn page_size() -> usize {
    // SAFETY: sysconf() has no preconditions.
    let size = unsafe { bindings::sysconf(bindings::_SC_PAGESIZE as _) };
    usize::try_from(size).unwrap_or(MIN_PAGE).max(MIN_PAGE)
}

/// The place of a word in the head of a region.
#[derive(Clone, Copy)]
pub struct Word(usize);

impl Word {
    /// The word at `offset`.
    pub const fn at(offset: usize) -> Self {
        assert!(offset % size_of::<u32>() == 0 && offset <= MIN_PAGE - size_of::<u32>());
        Self(offset)
    }
}

/// Where in its region a ring lies.
#[derive(Clone, Copy)]
pub struct Ring {
    offset: u32,
    mask: u32,
    depth_shift: u32,
    stride_shift: u32,
}

impl Ring {
    /// A ring of at least `depth` entries of at least `stride` bytes, both
    /// rounded up to powers of two, behind `head` bytes that are in use.
    ///
    /// # Errors
    ///
    /// EINVAL for what no region can hold.
    pub fn new(head: usize, depth: u32, stride: usize) -> Result<Self> {
        let depth = depth.max(1).checked_next_power_of_two().ok_or(Errno::EINVAL)?;
        let stride = stride.max(32).checked_next_power_of_two().ok_or(Errno::EINVAL)?;
        let offset = head.checked_next_multiple_of(stride).ok_or(Errno::EINVAL)?;
        if stride > MIN_PAGE {
            return Err(Errno::EINVAL);
        }
        let ring = Self {
            offset: u32::try_from(offset).map_err(|_| Errno::EINVAL)?,
            mask: depth - 1,
            depth_shift: depth.trailing_zeros(),
            stride_shift: stride.trailing_zeros(),
        };
        // What is behind a ring must have an offset, too.
        u32::try_from(ring.end()).map_err(|_| Errno::EINVAL)?;
        Ok(ring)
    }

    /// Offset of the first entry, a multiple of the stride.
    pub fn offset(self) -> u32 {
        self.offset
    }

    /// Number of entries, a power of two.
    pub fn depth(self) -> u32 {
        1 << self.depth_shift
    }

    /// Bytes of an entry, a power of two.
    pub fn stride(self) -> usize {
        1 << self.stride_shift
    }

    /// Bytes of the region up to the ring's end.
    pub fn end(self) -> usize {
        self.offset as usize + ((self.mask as usize + 1) << self.stride_shift)
    }

    /// The lap of CQE `index`.
    pub fn lap(self, index: u32) -> u32 {
        (index >> self.depth_shift).wrapping_add(1)
    }
}

/// Structures of the device ABI that are written as they are.
///
/// # Safety
///
/// The type has no padding.
pub unsafe trait Plain: Copy {}

// SAFETY: padding is written out.
unsafe impl Plain for bindings::virtio_rdma_ring_sq_wqe {}
// SAFETY: as above.
unsafe impl Plain for bindings::virtio_rdma_ring_xrc_wqe {}
// SAFETY: as above.
unsafe impl Plain for bindings::virtio_rdma_ring_bind_wqe {}
// SAFETY: as above.
unsafe impl Plain for bindings::virtio_rdma_ring_flush_wqe {}
// SAFETY: as above.
unsafe impl Plain for bindings::virtio_rdma_ring_ud_wqe {}
// SAFETY: as above.
unsafe impl Plain for bindings::virtio_rdma_rq_wqe {}
// SAFETY: as above.
unsafe impl Plain for virtio_rdma_ring_cqe {}
// SAFETY: as above.
unsafe impl Plain for virtio_rdma_sge {}

/// Fills in an entry from its front.
///
/// The entry is the caller's until it gives it to the device by a release
/// store of an index, so its writes need no order among themselves.
pub struct Writer<'a> {
    at: NonNull<u8>,
    left: usize,
    lifetime: PhantomData<&'a Region>,
}

impl Writer<'_> {
    /// Appends a structure.
    ///
    /// # Errors
    ///
    /// EINVAL if it does not fit.
    pub fn put<T: Plain>(&mut self, value: T) -> Result {
        let at = self.take(size_of::<T>())?;
        // SAFETY: there is room for the structure.
        unsafe { at.cast().write_unaligned(value) };
        Ok(())
    }

    /// Leaves `len` bytes as they are, to be written later.
    ///
    /// # Errors
    ///
    /// EINVAL if there are not as many.
    pub fn skip(&mut self, len: usize) -> Result {
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
    /// The `len` bytes at `from` are the program's to read.
    pub unsafe fn put_bytes(&mut self, from: *const u8, len: usize) -> Result {
        let at = self.take(len)?;
        // SAFETY: there is room for the bytes, and the entry is no memory of
        // the program's own.
        unsafe { ptr::copy_nonoverlapping(from, at.as_ptr(), len) };
        Ok(())
    }

    fn take(&mut self, len: usize) -> Result<NonNull<u8>> {
        let at = self.at;
        self.left = self.left.checked_sub(len).ok_or(Errno::EINVAL)?;
        // SAFETY: the entry has at least `len` more bytes.
        self.at = unsafe { at.add(len) };
        Ok(at)
    }
}
