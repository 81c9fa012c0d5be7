// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The extended header of XRC.

use zerocopy::big_endian::U32;

use crate::qpn::Qpn;
use crate::wire::Header;

/// The XRC extended transport header (IBA A14), which each request of an XRC QP has.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Xrceth {
    /// The SRQ of the responder that the message is for.
    pub srq: Qpn,
}

impl Header for Xrceth {
    type Wire = U32;

    fn from_wire(wire: &U32) -> Self {
        Self { srq: Qpn::from_word(wire.get()) }
    }

    fn to_wire(&self) -> U32 {
        self.srq.get().into()
    }
}
