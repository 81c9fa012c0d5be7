// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The extended headers of atomics: the request and its result.

use zerocopy::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::wire::Header;

/// The atomic extended transport header (IBA 9.3): what CMP SWAP and FETCH ADD do to 8 bytes of the
/// responder.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct AtomicEth {
    /// The virtual address, a multiple of 8.
    pub va: u64,
    /// The key of the MR or MW.
    pub rkey: u32,
    /// The operand that CMP SWAP stores, or that FETCH ADD adds.
    pub swap_add: u64,
    /// The operand that CMP SWAP compares with. FETCH ADD has it too and does not use it.
    pub compare: u64,
}

/// The header on the wire.
#[derive(FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Wire {
    va: U64,
    rkey: U32,
    swap_add: U64,
    compare: U64,
}

impl Header for AtomicEth {
    type Wire = Wire;

    fn from_wire(wire: &Wire) -> Self {
        Self {
            va: wire.va.get(),
            rkey: wire.rkey.get(),
            swap_add: wire.swap_add.get(),
            compare: wire.compare.get(),
        }
    }

    fn to_wire(&self) -> Wire {
        Wire {
            va: self.va.into(),
            rkey: self.rkey.into(),
            swap_add: self.swap_add.into(),
            compare: self.compare.into(),
        }
    }
}

/// The atomic acknowledge extended transport header (IBA 9.3).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct AtomicAckEth {
    /// The value of the 8 bytes before the operation.
    pub original: u64,
}

impl Header for AtomicAckEth {
    type Wire = U64;

    fn from_wire(wire: &U64) -> Self {
        Self { original: wire.get() }
    }

    fn to_wire(&self) -> U64 {
        self.original.into()
    }
}
