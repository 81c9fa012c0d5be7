// SPDX-License-Identifier: GPL-2.0

//! Memory that driver and device share.
//!
//! The device may write it at any time, whatever the protocol says. So nobody
//! gets a reference into it: values are copied in and out, each word read once.
//!
//! Every access is a volatile one of a word, or of a byte behind the last whole
//! word, and so what READ_ONCE() and WRITE_ONCE() are to the kernel's memory model
//! (`tools/memory-model`): those of several threads do not race. Threads that
//! write to the same place at a time leave some words of each, as a device may.

use crate::{
    bindings,
    kernel_release, //
};
use kernel::{
    alloc::{
        flags::GFP_NOWAIT,
        Flags, //
    },
    device,
    dma::Coherent,
    page::PAGE_SIZE as PAGE_SIZE_OF_KERNEL,
    prelude::*,
    sync::aref::ARef,
    transmute::{
        AsBytes,
        FromBytes, //
    },
};

/// Bytes of a word, the unit of access and the alignment of every offset.
const WORD: usize = size_of::<u64>();

/// A range of addresses as the device sees them.
#[derive(Clone, Copy)]
pub(crate) struct Span {
    /// Address of the first byte.
    pub(crate) addr: u64,
    /// Number of bytes.
    pub(crate) len: u32,
}

/// The device that does the DMA.
#[derive(Clone)]
pub(crate) struct Device {
    dev: ARef<device::Device>,
    behind_bus: bool,
}

impl Device {
    /// Wraps the device whose DMA operations map memory for the virtqueues. Consumers of the RDMA
    /// device map theirs through it too: a segment may be of any length. `behind_bus` says whether the words that are
    /// shared with the device need the platform's barriers for devices, and not only those between processors.
    ///
    /// # Safety
    ///
    /// `dev` is bound to a bus's driver, and [`Device::alloc`] may be called only while it is.
    pub(crate) unsafe fn new(dev: ARef<device::Device>, behind_bus: bool) -> Self {
        // SAFETY: `dev` is valid. It is the device of a transport, whose DMA nobody else uses.
        unsafe { bindings::virtio_rdma_set_max_seg_size(device_as_raw(&dev), u32::MAX) };
        Self { dev, behind_bus }
    }

    /// Allocates `len` bytes of zeroed coherent memory, contiguous for the device.
    ///
    /// May sleep.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a length of 0, `ENOMEM`.
    pub(crate) fn alloc(&self, len: usize) -> Result<Buffer> {
        self.alloc_with(len, GFP_KERNEL)
    }

    /// Allocates coherent memory as [`Device::alloc`] does, with these flags.
    fn alloc_with(&self, len: usize, flags: Flags) -> Result<Buffer> {
        // SAFETY: Whoever called `Device::new` promised to call this only while the device is bound. Buffers are
        // allocated by the virtio driver, between its probe and its end.
        let dev = unsafe { self.dev.as_bound() };

        Ok(Buffer(Coherent::<u64>::zeroed_slice(
            dev,
            len.div_ceil(WORD),
            flags,
        )?))
    }

    /// Returns the C structure.
    pub(crate) fn as_raw(&self) -> *mut bindings::device {
        device_as_raw(&self.dev)
    }
}

/// Returns the C structure of a device.
pub(crate) fn device_as_raw(dev: &device::Device) -> *mut bindings::device {
    // CAST: `device::Device` is a transparent wrapper of an `Opaque<bindings::device>`.
    core::ptr::from_ref(dev).cast_mut().cast()
}

/// A block of coherent memory.
pub(crate) struct Buffer(Coherent<[u64]>);

impl Buffer {
    /// Returns the address of its first byte, as the device sees it.
    pub(crate) fn addr(&self) -> u64 {
        kernel_release::dma_address(&self.0)
    }

    /// Returns the first word and the number of words, for functions in C that access each word once.
    pub(crate) fn words(&self) -> (*mut u64, usize) {
        (self.0.as_mut_ptr().cast(), self.0.size() / WORD)
    }

    /// Returns the range of `len` bytes at `offset`, as the device sees it.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the range is not within the buffer.
    pub(crate) fn span(&self, offset: usize, len: usize) -> Result<Span> {
        self.check(offset, len)?;
        Ok(Span {
            addr: self.addr() + offset as u64,
            len: u32::try_from(len)?,
        })
    }

    /// Copies `value` to `offset`, a multiple of 8, word by word. A reader may see some of the new words beside old
    /// ones meanwhile.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the range is not within the buffer.
    pub(crate) fn write<T: AsBytes>(&self, offset: usize, value: &T) -> Result {
        let bytes = value.as_bytes();
        let ptr = self.check(offset, bytes.len())?;
        let words = bytes.chunks_exact(WORD);
        let rest = words.remainder();
        let whole = bytes.len() - rest.len();

        for (i, word) in words.enumerate() {
            let mut raw = [0; WORD];
            raw.copy_from_slice(word);
            // SAFETY: `check` says that the range is within the buffer and `ptr` aligned.
            unsafe { ptr.add(i).write_volatile(u64::from_ne_bytes(raw)) };
        }
        for (i, byte) in rest.iter().enumerate() {
            // SAFETY: `check` says that the range is within the buffer; `whole + i` is less than its length.
            unsafe { ptr.cast::<u8>().add(whole + i).write_volatile(*byte) };
        }
        Ok(())
    }

    /// Copies a value out of `offset`, a multiple of 8.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the range is not within the buffer.
    pub(crate) fn read<T: FromBytes + AsBytes + Zeroable>(&self, offset: usize) -> Result<T> {
        let mut value = T::zeroed();
        let bytes = value.as_bytes_mut();
        let ptr = self.check(offset, bytes.len())?;
        let whole = bytes.len() / WORD * WORD;
        let (words, rest) = bytes.split_at_mut(whole);

        for (i, word) in words.chunks_exact_mut(WORD).enumerate() {
            // SAFETY: `check` says that the range is within the buffer and `ptr` aligned.
            word.copy_from_slice(&unsafe { ptr.add(i).read_volatile() }.to_ne_bytes());
        }
        for (i, byte) in rest.iter_mut().enumerate() {
            // SAFETY: `check` says that the range is within the buffer; `whole + i` is less than its length.
            *byte = unsafe { ptr.cast::<u8>().add(whole + i).read_volatile() };
        }
        Ok(value)
    }

    /// Returns the pointer to the 32 bits at `offset`, a multiple of 4.
    fn word(&self, offset: usize) -> Result<*mut u32> {
        let word = self.check(offset / WORD * WORD, WORD)?;
        if offset % size_of::<u32>() != 0 {
            return Err(EINVAL);
        }
        Ok(word.cast::<u32>().wrapping_byte_add(offset % WORD))
    }

    /// Returns the pointer to `offset`, if it is aligned and `len` bytes from there are in the buffer.
    fn check(&self, offset: usize, len: usize) -> Result<*mut u64> {
        let end = offset.checked_add(len).ok_or(EINVAL)?;
        if offset % WORD != 0 || end > self.0.size() {
            return Err(EINVAL);
        }
        Ok(self
            .0
            .as_mut_ptr()
            .cast::<u64>()
            .wrapping_add(offset / WORD))
    }
}

/// Bytes of a page, as page tables list them.
pub(crate) const PAGE_SIZE: usize = 1 << bindings::VIRTIO_RDMA_PAGE_SHIFT;

/// The bytes of a piece of [`Pages`], as a power of two.
const LARGE: u32 = bindings::VIRTIO_RDMA_PAGE_SHIFT + 4;

/// The bytes of a piece where the kernel has no larger one: a page of the kernel.
const SMALL: u32 = PAGE_SIZE_OF_KERNEL.trailing_zeros();

/// Coherent memory that the device knows as a list of pages.
///
/// Several threads may use it at a time: what they write to the same bytes mixes word by word, and
/// harms nothing else.
pub(crate) struct Pages {
    /// Blocks of one size; the last one may be smaller.
    pieces: KVVec<Buffer>,
    /// The bytes of such a block, as a power of two.
    shift: u32,
    /// Whether the words need the platform's barriers for devices.
    behind_bus: bool,
}

impl Pages {
    /// Allocates `len` bytes, rounded up to whole pages, zeroed. May sleep.
    ///
    /// While memory is short it waits for single pages alone. For two or more in a row the kernel would wait longer, and
    /// then fail or kill a process, and an NVMe host needs its QPs to write the dirty pages that lie behind this device.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a length of 0, `ENOMEM`.
    pub(crate) fn new(dma: &Device, len: usize) -> Result<Self> {
        let len = len.checked_next_multiple_of(PAGE_SIZE).ok_or(EINVAL)?;
        Self::in_pieces(dma, len, LARGE, GFP_NOWAIT)
            .or_else(|_| Self::in_pieces(dma, len, SMALL, GFP_KERNEL))
    }

    /// Allocates `len` bytes in pieces of a size.
    fn in_pieces(dma: &Device, len: usize, shift: u32, flags: Flags) -> Result<Self> {
        let size = 1 << shift;
        let mut pieces = KVVec::with_capacity(len.div_ceil(size), flags)?;
        let mut rest = len;
        loop {
            let piece = rest.min(size);
            pieces.push(dma.alloc_with(piece, flags)?, flags)?;
            rest -= piece;
            if rest == 0 {
                return Ok(Self {
                    pieces,
                    shift,
                    behind_bus: dma.behind_bus,
                });
            }
        }
    }

    /// Returns the number of pages.
    pub(crate) fn num_pages(&self) -> usize {
        let bytes: usize = self.pieces.iter().map(|piece| piece.0.size()).sum();
        bytes / PAGE_SIZE
    }

    /// Returns the addresses of the pages, as the device sees them.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = u64> + '_ {
        self.pieces.iter().flat_map(|piece| {
            (0..piece.0.size())
                .step_by(PAGE_SIZE)
                .map(|offset| piece.addr() + offset as u64)
        })
    }

    /// Returns the piece that has an offset, and the offset in it.
    fn piece(&self, offset: usize) -> Result<(&Buffer, usize)> {
        let piece = self
            .pieces
            .get(offset.wrapping_shr(self.shift))
            .ok_or(EINVAL)?;
        Ok((piece, offset & !usize::MAX.wrapping_shl(self.shift)))
    }

    /// Copies `value` to `offset`, a multiple of 8, word by word.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the range is not within the memory, or not in one page.
    pub(crate) fn write<T: AsBytes>(&self, offset: usize, value: &T) -> Result {
        let (piece, offset) = self.piece(offset)?;
        piece.write(offset, value)
    }

    /// Copies a value out of `offset`, a multiple of 8, word by word.
    ///
    /// # Errors
    ///
    /// The errors of [`Pages::write`].
    pub(crate) fn read<T: FromBytes + AsBytes + Zeroable>(&self, offset: usize) -> Result<T> {
        let (piece, offset) = self.piece(offset)?;
        piece.read(offset)
    }

    /// Writes the 32 bits at `offset`, a multiple of 4, after everything that was written and read before.
    ///
    /// # Errors
    ///
    /// The errors of [`Pages::write`].
    pub(crate) fn store_release(&self, offset: usize, value: u32) -> Result {
        let (piece, offset) = self.piece(offset)?;
        let word = piece.word(offset)?;
        // SAFETY: `word` says that the range is within the buffer and aligned.
        unsafe { bindings::virtio_rdma_store_release(word, value.to_le(), self.behind_bus) };
        Ok(())
    }

    /// Reads the 32 bits at `offset`, a multiple of 4, before everything that is read and written afterwards.
    ///
    /// # Errors
    ///
    /// The errors of [`Pages::write`].
    pub(crate) fn load_acquire(&self, offset: usize) -> Result<u32> {
        let (piece, offset) = self.piece(offset)?;
        let word = piece.word(offset)?;
        // SAFETY: `word` says that the range is within the buffer and aligned.
        Ok(u32::from_le(unsafe {
            bindings::virtio_rdma_load_acquire(word, self.behind_bus)
        }))
    }

    /// Orders all reads and writes before it against all reads and writes after it, as this CPU and the device see
    /// them.
    pub(crate) fn barrier(&self) {
        // SAFETY: The function has no requirements.
        unsafe { bindings::virtio_rdma_mb(self.behind_bus) };
    }
}
