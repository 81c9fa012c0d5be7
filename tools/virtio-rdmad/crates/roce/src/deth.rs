// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The extended header of datagrams.

use zerocopy::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::qpn::Qpn;
use crate::wire::Header;

/// The datagram extended transport header (IBA 9.3).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Deth {
    /// The Q_Key, which must be that of the receiving QP.
    pub qkey: u32,
    /// The QP that sent the datagram.
    pub source_qp: Qpn,
}

/// The header on the wire.
#[derive(FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Wire {
    qkey: U32,
    /// 8 reserved bits, 24 bits of QPN.
    source_qp: U32,
}

impl Header for Deth {
    type Wire = Wire;

    fn from_wire(wire: &Wire) -> Self {
        Self { qkey: wire.qkey.get(), source_qp: Qpn::from_word(wire.source_qp.get()) }
    }

    fn to_wire(&self) -> Wire {
        Wire { qkey: self.qkey.into(), source_qp: self.source_qp.get().into() }
    }
}
