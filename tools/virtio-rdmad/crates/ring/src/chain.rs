// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A descriptor chain, and how it is found.

use memory::{GuestMemory, MemoryError, Slice};
use smallvec::SmallVec;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::error::{RingError, MAX_DESCRIPTORS};

/// `struct virtq_desc`.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub(crate) struct Descriptor {
    pub(crate) addr: U64,
    pub(crate) len: U32,
    pub(crate) flags: U16,
    pub(crate) next: U16,
}

/// The bytes of a descriptor.
pub(crate) const DESCRIPTOR_SIZE: usize = size_of::<Descriptor>();

/// `VIRTQ_DESC_F_NEXT`: `next` names the descriptor that follows.
pub(crate) const F_NEXT: u16 = 1;
/// `VIRTQ_DESC_F_WRITE`: the device writes this buffer; otherwise it reads it.
pub(crate) const F_WRITE: u16 = 2;
/// `VIRTQ_DESC_F_INDIRECT`: the buffer is a table of descriptors.
pub(crate) const F_INDIRECT: u16 = 4;

/// One buffer of a chain. All of it is memory of the guest.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Buffer {
    /// Guest address.
    pub addr: u64,
    /// Bytes, at least 1.
    pub len: u32,
}

/// The buffers of a descriptor chain, which the driver made available together.
///
/// The chain was checked when it was taken from the queue: it has [`MAX_DESCRIPTORS`] at most, readable buffers come
/// before writable ones, and each is in guest memory.
#[derive(Debug)]
pub struct Chain {
    /// The index of the first descriptor, by which the chain is given back.
    pub head: u16,
    memory: GuestMemory,
    readable: SmallVec<[Buffer; 4]>,
    writable: SmallVec<[Buffer; 4]>,
}

impl Chain {
    /// Returns the buffers that the device reads, in their order.
    pub fn readable(&self) -> &[Buffer] {
        &self.readable
    }

    /// Returns the buffers that the device writes, in their order.
    pub fn writable(&self) -> &[Buffer] {
        &self.writable
    }

    /// Returns the number of bytes that the device can read.
    pub fn readable_len(&self) -> usize {
        total(&self.readable)
    }

    /// Returns the number of bytes that the device can write.
    pub fn writable_len(&self) -> usize {
        total(&self.writable)
    }

    /// Copies the first readable bytes into `to`. Returns how many: all of `to`, or fewer if the chain
    /// has fewer.
    pub fn read(&self, to: &mut [u8]) -> Result<usize, MemoryError> {
        self.read_at(0, to)
    }

    /// Does the same as [`Chain::read`] without the first `skip` readable bytes.
    pub fn read_at(&self, mut skip: usize, to: &mut [u8]) -> Result<usize, MemoryError> {
        let mut done = 0;
        for buffer in &self.readable {
            let len = buffer.len as usize;
            if skip >= len {
                skip -= len;
                continue;
            }
            let count = (to.len() - done).min(len - skip);
            self.memory.read(buffer.addr + skip as u64, &mut to[done..done + count])?;
            done += count;
            skip = 0;
            if done == to.len() {
                break;
            }
        }
        Ok(done)
    }

    /// Copies `from` into the first writable bytes. Returns how many: all of `from`, or fewer if the
    /// chain has fewer.
    pub fn write(&self, from: &[u8]) -> Result<u32, MemoryError> {
        let mut rest = from;
        for buffer in &self.writable {
            let (now, later) = rest.split_at(rest.len().min(buffer.len as usize));
            self.memory.write(buffer.addr, now)?;
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        // A chain has less than 4 GiB, and no more was copied.
        Ok(u32::try_from(from.len() - rest.len()).unwrap_or(u32::MAX))
    }

    /// Returns the writable buffer, if there is exactly one and it is contiguous in this process.
    pub fn writable_slice(&self) -> Option<Slice> {
        let &[buffer] = self.writable.as_slice() else { return None };
        self.memory.slice(buffer.addr, buffer.len.into()).ok()
    }
}

fn total(buffers: &[Buffer]) -> usize {
    buffers.iter().map(|buffer| buffer.len as usize).sum()
}

/// Follows one chain.
pub(crate) struct Walk<'a> {
    memory: &'a GuestMemory,
    chain: Chain,
    /// The number of descriptors that were seen, [`MAX_DESCRIPTORS`] at most.
    seen: usize,
    /// The number of bytes of their buffers.
    bytes: u64,
}

impl<'a> Walk<'a> {
    /// Makes a walk along the chain at `head`.
    pub(crate) fn new(memory: &'a GuestMemory, head: u16) -> Self {
        let chain = Chain {
            head,
            memory: memory.clone(),
            readable: SmallVec::new(),
            writable: SmallVec::new(),
        };
        Self { memory, chain, seen: 0, bytes: 0 }
    }

    /// Follows the chain through the queue's own table, of `size` descriptors. A chain that loops is one that is too
    /// long.
    pub(crate) fn run(mut self, table: &Slice, size: usize) -> Result<Chain, RingError> {
        let mut index = usize::from(self.chain.head);
        loop {
            if index >= size {
                return Err(RingError::DescriptorIndex { index, size });
            }
            let descriptor: Descriptor = table.read_obj(index * DESCRIPTOR_SIZE)?;
            let flags = descriptor.flags.get();
            if flags & F_INDIRECT != 0 {
                if flags & F_NEXT != 0 {
                    return Err(RingError::IndirectNext);
                }
                self.run_indirect(descriptor)?;
                return Ok(self.chain);
            }
            self.add(descriptor)?;
            if flags & F_NEXT == 0 {
                return Ok(self.chain);
            }
            index = descriptor.next.get().into();
        }
    }

    /// Follows the chain through an indirect table, from the first entry on.
    fn run_indirect(&mut self, table: Descriptor) -> Result<(), RingError> {
        let (addr, len) = (table.addr.get(), table.len.get());
        if len == 0 || len as usize % DESCRIPTOR_SIZE != 0 {
            return Err(RingError::IndirectLength { len });
        }
        let size = len as usize / DESCRIPTOR_SIZE;
        let unmapped = || RingError::IndirectTable { addr, len };
        let entry = |index: usize| {
            let addr = addr.checked_add((index * DESCRIPTOR_SIZE) as u64).ok_or_else(unmapped)?;
            self.memory.read_obj::<Descriptor>(addr).map_err(|_| unmapped())
        };
        let mut index = 0;
        loop {
            if index >= size {
                return Err(RingError::DescriptorIndex { index, size });
            }
            let descriptor = entry(index)?;
            let flags = descriptor.flags.get();
            if flags & F_INDIRECT != 0 {
                return Err(RingError::IndirectNested);
            }
            self.add(descriptor)?;
            if flags & F_NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next.get().into();
        }
    }

    /// Adds one buffer. A buffer without bytes is counted and left out.
    fn add(&mut self, descriptor: Descriptor) -> Result<(), RingError> {
        let (addr, len) = (descriptor.addr.get(), descriptor.len.get());
        let write = descriptor.flags.get() & F_WRITE != 0;
        self.seen += 1;
        if self.seen > MAX_DESCRIPTORS {
            return Err(RingError::TooLong);
        }
        if !write && !self.chain.writable.is_empty() {
            return Err(RingError::Order);
        }
        self.bytes += u64::from(len);
        if self.bytes > u32::MAX.into() {
            return Err(RingError::TooManyBytes);
        }
        if len == 0 {
            return Ok(());
        }
        if !self.memory.contains(addr, len.into()) {
            return Err(RingError::Buffer { addr, len });
        }
        let side = if write { &mut self.chain.writable } else { &mut self.chain.readable };
        side.push(Buffer { addr, len });
        Ok(())
    }
}
