// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Immediate data.

use crate::wire::Header;

/// The immediate data extended transport header (IBA 9.3): four bytes, which mean what the two
/// programs agree on.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ImmDt(pub [u8; 4]);

impl Header for ImmDt {
    type Wire = [u8; 4];

    fn from_wire(wire: &[u8; 4]) -> Self {
        Self(*wire)
    }

    fn to_wire(&self) -> [u8; 4] {
        self.0
    }
}
