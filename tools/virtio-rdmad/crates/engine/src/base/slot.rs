// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The places of QPs and SRQs, and the numbers by which guests and peers name them.

use roce::Qpn;
use serde::{Deserialize, Serialize};

/// The place of a QP or an SRQ in the table of its kind. The number of the object is one more, because no object has
/// the number 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Slot(u16);

impl Slot {
    /// The place of the GSI QP, which has the number 1.
    pub const GSI: Self = Self(0);

    /// Returns the place of the object with a number, which may be any; `None`: no object has this number.
    #[inline]
    pub fn of_number(number: u32) -> Option<Self> {
        u16::try_from(number.checked_sub(1)?).ok().map(Self)
    }

    /// Returns the number of the object in this place.
    #[inline]
    pub fn number(self) -> u32 {
        u32::from(self.0) + 1
    }

    /// Returns the number of the QP in this place.
    #[inline]
    pub fn qpn(self) -> Qpn {
        Qpn::from_word(self.number())
    }
}

impl From<u16> for Slot {
    #[inline]
    fn from(index: u16) -> Self {
        Self(index)
    }
}

impl From<Slot> for u16 {
    #[inline]
    fn from(slot: Slot) -> Self {
        slot.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_one_more_than_places() {
        for index in [0, 1, u16::MAX] {
            let slot = Slot::from(index);
            assert_eq!(slot.number(), u32::from(index) + 1);
            assert_eq!(
                (slot.qpn().get(), Slot::of_number(slot.number())),
                (slot.number(), Some(slot))
            );
        }
        assert_eq!([0, 0x1_0001, u32::MAX].map(Slot::of_number), [None; 3]);
    }
}
