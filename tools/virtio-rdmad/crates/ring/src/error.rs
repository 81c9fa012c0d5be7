// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The limits of queues, and the mistakes of drivers.

use memory::MemoryError;

/// The entries of the largest queue that VIRTIO allows.
pub const MAX_SIZE: u16 = 32768;

/// Most descriptors of a chain. A visit of a queue counts chains, whose descriptors the device walks in the turn of the
/// guest that it serves, while others wait. A driver that knows its buffers to be contiguous needs two.
pub const MAX_DESCRIPTORS: usize = 8;

/// An error of a queue. Each of these errors is a mistake of the driver.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum RingError {
    /// The size is 0, or not a power of two, or above [`MAX_SIZE`].
    #[error("a queue cannot have {size} entries")]
    Size {
        /// The size asked for.
        size: u16,
    },
    /// A part of the ring is not in guest memory.
    #[error("{part} at {addr:#x}: {error}")]
    Part {
        /// "descriptor table", "available ring" or "used ring".
        part: &'static str,
        /// The address of the part.
        addr: u64,
        /// The reason.
        error: MemoryError,
    },
    /// A part of the ring is not aligned as VIRTIO requires.
    #[error("{part} at {addr:#x} is not a multiple of {align}")]
    Alignment {
        /// The name of the part, as in [`RingError::Part`].
        part: &'static str,
        /// The address of the part.
        addr: u64,
        /// The alignment it needs.
        align: u64,
    },
    /// More buffers are available than the queue has entries.
    #[error("the available index {idx} is more than {size} beyond {next}")]
    AvailIndex {
        /// The driver's index.
        idx: u16,
        /// The index of the next buffer that the device takes.
        next: u16,
        /// Entries of the queue.
        size: u16,
    },
    /// A head or `next` is beyond the table.
    #[error("descriptor {index} of a table of {size}")]
    DescriptorIndex {
        /// The index.
        index: usize,
        /// Entries of the table.
        size: usize,
    },
    /// A chain has more than [`MAX_DESCRIPTORS`] descriptors, or one of them twice.
    #[error("a descriptor chain has more than {MAX_DESCRIPTORS} descriptors")]
    TooLong,
    /// A chain has 4 GiB or more.
    #[error("a descriptor chain has 4 GiB or more")]
    TooManyBytes,
    /// A readable buffer follows a writable one.
    #[error("a readable descriptor follows a writable one")]
    Order,
    /// An indirect descriptor has the flag NEXT.
    #[error("an indirect descriptor names a next one")]
    IndirectNext,
    /// An indirect table has an indirect descriptor.
    #[error("an indirect table holds an indirect descriptor")]
    IndirectNested,
    /// An indirect table has no entry, or a part of one.
    #[error("an indirect table of {len} bytes")]
    IndirectLength {
        /// The length of the table, in bytes.
        len: u32,
    },
    /// An indirect table is outside of guest memory.
    #[error("an indirect table of {len} bytes at {addr:#x}, which is not memory of the guest")]
    IndirectTable {
        /// The address of the table.
        addr: u64,
        /// The length of the table, in bytes.
        len: u32,
    },
    /// A buffer is outside of guest memory.
    #[error("a buffer of {len} bytes at {addr:#x}, which is not memory of the guest")]
    Buffer {
        /// The address of the buffer.
        addr: u64,
        /// The length of the buffer, in bytes.
        len: u32,
    },
    /// The ring's own memory is read-only.
    #[error("access to the ring: {0}")]
    Memory(#[from] MemoryError),
}
