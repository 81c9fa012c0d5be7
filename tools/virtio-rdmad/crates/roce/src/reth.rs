// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The extended header of RDMA.

use zerocopy::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::wire::Header;

/// The RDMA extended transport header (IBA 9.3): the memory of the responder that a READ, a WRITE, a
/// FLUSH or an ATOMIC WRITE is about.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Reth {
    /// The virtual address.
    pub va: u64,
    /// The key of the MR or MW.
    pub rkey: u32,
    /// The bytes of the whole message.
    pub dma_len: u32,
}

/// The header on the wire.
#[derive(FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Wire {
    va: U64,
    rkey: U32,
    dma_len: U32,
}

impl Header for Reth {
    type Wire = Wire;

    fn from_wire(wire: &Wire) -> Self {
        Self { va: wire.va.get(), rkey: wire.rkey.get(), dma_len: wire.dma_len.get() }
    }

    fn to_wire(&self) -> Wire {
        Wire { va: self.va.into(), rkey: self.rkey.into(), dma_len: self.dma_len.into() }
    }
}
