// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Numbers of QPs.

use crate::wire::LOW_24;

/// The number of a QP, or of an SRQ: 24 bits (IBA 9.2).
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct Qpn(u32);

impl Qpn {
    /// The number that packets to a multicast group have in place of a QPN (`IB_MULTICAST_QPN`).
    pub const MULTICAST: Self = Self(0x00ff_ffff);

    /// Makes a QPN; `None` if `number` has more than 24 bits.
    pub const fn new(number: u32) -> Option<Self> {
        if number > LOW_24 {
            return None;
        }
        Some(Self(number))
    }

    /// Reads a QPN from a word whose highest 8 bits are not part of it.
    pub const fn from_word(word: u32) -> Self {
        Self(word & LOW_24)
    }

    /// Returns the number, which is below 2^24.
    pub const fn get(self) -> u32 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn has_24_bits() {
        assert_eq!(Qpn::new(0x00ff_ffff), Some(Qpn::MULTICAST));
        assert_eq!(Qpn::new(0x0100_0000), None);
        assert_eq!(Qpn::from_word(0xab12_3456).get(), 0x12_3456);
    }
}
