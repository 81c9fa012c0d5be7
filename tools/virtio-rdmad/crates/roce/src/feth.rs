// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The extended header of FLUSH.

use zerocopy::big_endian::U32;

use crate::wire::Header;

/// The FLUSH extended transport header (IBA A19; `rxe_hdr.h` of the kernel).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Feth {
    placement: u8,
    selectivity: u8,
}

impl Feth {
    /// The bit of the placement type: the data is visible to all readers (`IB_FLUSH_GLOBAL`).
    pub const GLOBAL: u8 = 1 << 0;
    /// The bit of the placement type: the data outlives the loss of power (`IB_FLUSH_PERSISTENT`).
    pub const PERSISTENT: u8 = 1 << 1;
    /// The selectivity level: the range that the RETH names (`IB_FLUSH_RANGE`).
    pub const RANGE: u8 = 0;
    /// The selectivity level: all of the MR (`IB_FLUSH_MR`).
    pub const MR: u8 = 1;

    const PLACEMENT_MASK: u8 = 0x0f;
    const SELECTIVITY_SHIFT: u32 = 4;
    const SELECTIVITY_MASK: u8 = 0x03;

    /// Makes a header; `None` if the placement type has more than 4 bits, or the selectivity level more
    /// than 2.
    pub const fn new(placement: u8, selectivity: u8) -> Option<Self> {
        if placement > Self::PLACEMENT_MASK || selectivity > Self::SELECTIVITY_MASK {
            return None;
        }
        Some(Self { placement, selectivity })
    }

    /// Returns the placement type (PLT), 4 bits. The two higher ones are reserved; a responder refuses
    /// what it does not know.
    pub const fn placement(self) -> u8 {
        self.placement
    }

    /// Returns the selectivity level (SEL), 2 bits. Values from 2 on are reserved.
    pub const fn selectivity(self) -> u8 {
        self.selectivity
    }
}

impl Header for Feth {
    type Wire = U32;

    fn from_wire(wire: &U32) -> Self {
        let [.., low] = wire.get().to_be_bytes();
        Self {
            placement: low & Self::PLACEMENT_MASK,
            selectivity: low >> Self::SELECTIVITY_SHIFT & Self::SELECTIVITY_MASK,
        }
    }

    fn to_wire(&self) -> U32 {
        u32::from(self.placement | self.selectivity << Self::SELECTIVITY_SHIFT).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_they_belong() {
        let header = Feth::new(Feth::PERSISTENT, Feth::MR).unwrap();
        assert_eq!(header.to_wire().to_bytes(), [0, 0, 0, 0x12]);
        assert_eq!(Feth::from_wire(&U32::from(0xffff_ffd2)), header);
        assert_eq!((Feth::new(16, 0), Feth::new(0, 4)), (None, None));
    }
}
