// SPDX-License-Identifier: GPL-2.0

//! Pinned memory, of a program or behind a dma-buf.
//!
//! C header: [`include/rdma/ib_umem.h`](srctree/include/rdma/ib_umem.h)

use crate::{
    bindings,
    dma::Buffer,
    ib, //
};
use core::{
    marker::PhantomData,
    mem::MaybeUninit,
    ptr::NonNull, //
};
use kernel::{
    error::from_err_ptr,
    prelude::*, //
};

/// The size of the blocks that any memory can be listed in.
const BLOCK: c_ulong = 1 << bindings::VIRTIO_RDMA_PAGE_SHIFT;

/// A `struct ib_umem`: memory of a program, or of a dma-buf, pinned and mapped for the device.
pub(crate) struct Umem {
    raw: NonNull<bindings::ib_umem>,
    /// The size of the blocks that it is listed in, a power of two.
    block: c_ulong,
    /// Where the kernel has mapped it, if it is of a dma-buf that holds rings.
    mapped: Option<NonNull<c_void>>,
}

// SAFETY: A `struct ib_umem` may be released from any thread: it holds a reference to the address
// space that it accounts to.
unsafe impl Send for Umem {}
// SAFETY: The structure is changed by nobody who has no exclusive reference.
unsafe impl Sync for Umem {}

impl Umem {
    /// Pins `length` bytes at `start` of the current process. May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a range that wraps or a thread of the kernel, `EPERM` for a RLIMIT_MEMLOCK of 0, `ENOMEM` beyond
    /// that limit, `EFAULT`.
    pub(crate) fn pin<D: ib::Driver>(
        dev: &ib::Device<D>,
        start: u64,
        length: u64,
        access: u32,
    ) -> Result<Self> {
        // The C function does not check whether the thread has an address space.
        kernel::current!().mm().ok_or(EINVAL)?;
        // SAFETY: The device is valid, and outlives its MRs; the current task has an address space.
        let raw = from_err_ptr(unsafe {
            bindings::virtio_rdma_umem_get(
                dev.as_raw(),
                start as c_ulong,
                length as usize,
                access as c_int,
            )
        })?;
        Ok(Self {
            raw: NonNull::new(raw).ok_or(EINVAL)?,
            block: BLOCK,
            mapped: None,
        })
    }

    /// Pins memory of `least` bytes or more that the program names by an attribute of the core; `None` if it names
    /// none. The kernel can read and write the first page, also of a dma-buf. May sleep.
    ///
    /// # Errors
    ///
    /// Those of [`ib::BufferOf::pin`]; of a dma-buf, also those of the exporter, and `EOPNOTSUPP` if it is no memory
    /// of the machine.
    pub(crate) fn named<D: ib::Driver>(
        dev: &ib::Device<D>,
        udata: &ib::Udata<'_>,
        object: ib::BufferOf,
        least: usize,
    ) -> Result<Option<Self>> {
        // The C function does not check whether the thread has an address space.
        kernel::current!().mm().ok_or(EINVAL)?;
        let Some(raw) = NonNull::new(object.pin(dev, udata, least)?) else {
            return Ok(None);
        };
        let mut umem = Self {
            raw,
            block: BLOCK,
            mapped: None,
        };
        // SAFETY: The memory is valid.
        if unsafe { raw.as_ref().is_dmabuf() } != 0 {
            // SAFETY: The memory is that of a dma-buf.
            let start = from_err_ptr(unsafe { bindings::virtio_rdma_umem_vmap(raw.as_ptr()) })?;
            umem.mapped = NonNull::new(start);
        }
        Ok(Some(umem))
    }

    /// Returns the address of the first byte, which is an offset in a dma-buf, and the number of bytes.
    pub(crate) fn range(&self) -> (u64, u64) {
        // SAFETY: The memory is valid, and the fields stay as they are.
        let umem = unsafe { self.raw.as_ref() };
        (umem.address as u64, umem.length as u64)
    }

    /// Returns where the kernel has mapped the memory, or a null pointer.
    fn mapped(&self) -> *mut c_void {
        self.mapped.map_or(core::ptr::null_mut(), NonNull::as_ptr)
    }

    /// Attaches to a range of the dma-buf behind a descriptor of the current process: `memory.start`
    /// is its offset there. It is listed in the largest blocks of `sizes` that fit, or in blocks of 4 KiB. May sleep.
    ///
    /// The exporter keeps the memory where it is until this is dropped. An exporter that wants to move or to remove
    /// its memory refuses to pin it.
    ///
    /// # Errors
    ///
    /// `EBADF`; `EINVAL` for a descriptor of something else, a range that is not within the dma-buf, and
    /// one whose first byte has another offset in its page than its IOVA; what the exporter says.
    pub(crate) fn attach<D: ib::Driver>(
        dev: &ib::Device<D>,
        fd: c_int,
        memory: &ib::UserMemory,
        sizes: Option<u64>,
    ) -> Result<Self> {
        // SAFETY: The device is valid, and outlives its MRs.
        let raw = from_err_ptr(unsafe {
            bindings::ib_umem_dmabuf_get_pinned(
                dev.as_raw(),
                memory.start as c_ulong,
                memory.length as usize,
                fd,
                memory.access as c_int,
            )
        })?;
        let mut umem = Self {
            // SAFETY: `raw` is not an error pointer, so it is valid.
            raw: NonNull::new(unsafe { &raw mut (*raw).umem }).ok_or(EINVAL)?,
            block: BLOCK,
            mapped: None,
        };
        umem.choose_block(sizes, memory.virt_addr)?;
        Ok(umem)
    }

    /// Lists the memory in the largest blocks of `sizes`, a mask with bit n for 2^n bytes, in which the first byte
    /// has the offset that `address` has; with `None`, in blocks of 4 KiB.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the first byte has that offset in no block.
    pub(crate) fn choose_block(&mut self, sizes: Option<u64>, address: u64) -> Result {
        let sizes = sizes.map_or(BLOCK, |sizes| sizes as c_ulong);
        // The function sets the IOVA, and the blocks are counted from it.
        // SAFETY: The memory is valid, and nobody else uses it: `self` is borrowed exclusively.
        let block = unsafe { bindings::ib_umem_find_best_pgsz(self.raw.as_ptr(), sizes, address) };
        if block == 0 {
            return Err(EINVAL);
        }
        self.block = block;
        Ok(())
    }

    /// Writes the 32 bits at `offset`, a multiple of 4 in the first page, of a program's memory that was
    /// pinned to be written to, after everything that was written before. Any context.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it is not.
    pub(crate) fn store(&self, offset: usize, value: u32) -> Result {
        if offset % size_of::<u32>() != 0 {
            return Err(EINVAL);
        }
        let (raw, mapped) = (self.raw.as_ptr(), self.mapped());
        // SAFETY: The memory is valid, and mapped there; the function checks the offset.
        let stored =
            unsafe { bindings::virtio_rdma_umem_store(raw, mapped, offset, value.to_le()) };
        stored.then_some(()).ok_or(EINVAL)
    }

    /// Reads the 32 bits at `offset`, a multiple of 4 in the first page of a program's memory. Any
    /// context.
    ///
    /// # Errors
    ///
    /// `EINVAL` if it is not.
    pub(crate) fn load(&self, offset: usize) -> Result<u32> {
        if offset % size_of::<u32>() != 0 {
            return Err(EINVAL);
        }
        let mut value = 0;
        let (raw, mapped) = (self.raw.as_ptr(), self.mapped());
        // SAFETY: The memory is valid, and mapped there; the function checks the offset.
        let loaded =
            unsafe { bindings::virtio_rdma_umem_load(raw, mapped, offset, &raw mut value) };
        loaded.then_some(u32::from_le(value)).ok_or(EINVAL)
    }

    /// Returns the binary logarithm of the bytes of a block.
    pub(crate) fn block_shift(&self) -> u8 {
        self.block.trailing_zeros() as u8
    }

    /// Returns how many blocks the memory touches.
    pub(crate) fn num_blocks(&self) -> usize {
        // SAFETY: The memory is valid.
        unsafe { bindings::virtio_rdma_umem_num_blocks(self.raw.as_ptr(), self.block) }
    }

    /// Returns the addresses of the blocks, as the device sees them.
    pub(crate) fn blocks(&self) -> Blocks<'_> {
        let mut iter = MaybeUninit::uninit();
        // SAFETY: The memory is valid, and the function zeroes the iterator and sets it up.
        let iter = unsafe {
            bindings::virtio_rdma_block_iter_start(
                iter.as_mut_ptr(),
                self.raw.as_ptr(),
                self.block,
            );
            iter.assume_init()
        };
        Blocks {
            iter,
            _umem: PhantomData,
        }
    }
}

impl Drop for Umem {
    fn drop(&mut self) {
        if let Some(start) = self.mapped {
            // SAFETY: The memory is valid, and mapped there by `named`.
            unsafe { bindings::virtio_rdma_umem_vunmap(self.raw.as_ptr(), start.as_ptr()) };
        }
        // SAFETY: The memory is valid, and this is its only owner.
        unsafe { bindings::ib_umem_release(self.raw.as_ptr()) };
    }
}

/// The blocks of an [`Umem`].
pub(crate) struct Blocks<'a> {
    iter: bindings::ib_block_iter,
    _umem: PhantomData<&'a Umem>,
}

impl Blocks<'_> {
    /// Writes the addresses of the next blocks to `list`, little-endian, until it is full or there are no
    /// more. Returns how many there were.
    pub(crate) fn list(&mut self, list: &Buffer) -> usize {
        let (words, len) = list.words();
        // SAFETY: The iterator is initialised, and holds no pointer into itself. What it points to,
        // the list of pages, lives as long as the borrowed `Umem`. `words` are `len` words of memory
        // that is shared with the device, and the function writes each of them once.
        unsafe { bindings::virtio_rdma_block_iter_list(&raw mut self.iter, words.cast(), len) }
    }
}
