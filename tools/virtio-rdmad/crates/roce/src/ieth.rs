// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The key that a SEND invalidates.

use zerocopy::big_endian::U32;

use crate::wire::Header;

/// The invalidate extended transport header (IBA 9.3).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Ieth {
    /// The key of the MR or MW of the responder that is invalidated.
    pub rkey: u32,
}

impl Header for Ieth {
    type Wire = U32;

    fn from_wire(wire: &U32) -> Self {
        Self { rkey: wire.get() }
    }

    fn to_wire(&self) -> U32 {
        self.rkey.into()
    }
}
