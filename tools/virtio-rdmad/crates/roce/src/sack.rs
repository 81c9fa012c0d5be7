// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The extended header of selective acknowledgements, an extension of this project.

use serde::{Deserialize, Serialize};
use zerocopy::big_endian::U64;

use crate::wire::Header;

/// The packets behind a missing packet that a responder holds. The bits stand for the PSNs from that of the BTH on,
/// which is the PSN of the missing packet.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct SackEth {
    /// A bit for each packet, of which the lowest one of the first word is the first.
    pub held: [u64; Self::WORDS],
}

impl SackEth {
    /// The number of packets that the header tells of.
    pub const PACKETS: u32 = 256;
    /// The words of the bits.
    pub const WORDS: usize = (Self::PACKETS / 64) as usize;

    /// Notes that the packet is held whose PSN is so many behind the one of the BTH, if there is a bit for it.
    pub fn set(&mut self, distance: u32) {
        if let Some(word) = self.held.get_mut(distance as usize / 64) {
            *word |= 1 << (distance % 64);
        }
    }

    /// Returns whether the packet is held whose PSN is so many behind the one of the BTH.
    pub fn has(&self, distance: u32) -> bool {
        self.held.get(distance as usize / 64).is_some_and(|word| word >> (distance % 64) & 1 != 0)
    }

    /// Returns how many packets are held.
    pub fn count(&self) -> u32 {
        self.held.iter().map(|word| word.count_ones()).sum()
    }

    /// Returns how far the one behind the last packet that is held is behind the PSN of the BTH.
    pub fn end(&self) -> u32 {
        let words = (0..).step_by(64).zip(self.held);
        words
            .map(
                |(from, word): (u32, _)| {
                    if word == 0 {
                        0
                    } else {
                        from + 64 - word.leading_zeros()
                    }
                },
            )
            .max()
            .unwrap_or(0)
    }

    /// Returns how far the last packet that is held but for `others` ones is behind the PSN of the BTH; `None` if no
    /// more than these are held.
    pub fn last_but(&self, others: u32) -> Option<u32> {
        let mut others = others;
        for (from, mut word) in (0..Self::PACKETS).step_by(64).zip(self.held).rev() {
            let count = word.count_ones();
            if count <= others {
                others -= count;
                continue;
            }
            for _ in 0..others {
                word &= !(1 << word.ilog2());
            }
            return Some(from + word.ilog2());
        }
        None
    }
}

impl Header for SackEth {
    type Wire = [U64; Self::WORDS];

    fn from_wire(wire: &Self::Wire) -> Self {
        Self { held: wire.map(U64::get) }
    }

    fn to_wire(&self) -> Self::Wire {
        self.held.map(U64::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_found_again() {
        let mut sack = SackEth::default();
        assert_eq!((sack.count(), sack.end()), (0, 0));
        for distance in [1, 63, 64, 255, 256, 1000] {
            sack.set(distance);
        }
        assert_eq!((sack.count(), sack.end()), (4, 256));
        assert!(sack.has(1) && sack.has(63) && sack.has(64) && sack.has(255));
        assert_eq!(
            [0, 1, 2, 3, 4].map(|others| sack.last_but(others)),
            [Some(255), Some(64), Some(63), Some(1), None]
        );
        assert!(!sack.has(0) && !sack.has(65) && !sack.has(256) && !sack.has(1000));
        assert_eq!(sack.to_wire()[0].to_bytes(), [0x80, 0, 0, 0, 0, 0, 0, 2]);
    }
}
