// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The errors of accesses to guest memory.

/// The reason why an access to guest memory was refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum MemoryError {
    /// The range is not memory of the guest, or not contiguous in this process.
    #[error("{len} bytes at {addr:#x} are not memory of the guest")]
    Unmapped {
        /// First address of the range.
        addr: u64,
        /// The length of the range, in bytes.
        len: u64,
    },
    /// The range goes beyond the slice.
    #[error("{len} bytes at offset {offset} of a slice of {have}")]
    Bounds {
        /// Offset in the slice.
        offset: usize,
        /// Bytes asked for.
        len: usize,
        /// Bytes in the slice.
        have: usize,
    },
    /// The address is not a multiple of the word's size.
    #[error("a word of {align} bytes is not aligned")]
    Misaligned {
        /// The alignment it needs.
        align: usize,
    },
    /// A write to memory that the VMM gave out for reading only.
    #[error("the memory is read-only")]
    ReadOnly,
}
