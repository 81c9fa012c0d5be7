// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The shares that the frames of an interface are divided into.

use std::num::NonZeroU8;

/// A share of the frames that come over an interface: those to some of the MAC addresses. All frames to one address,
/// also to that of a group, are in one share.
///
/// The last byte of an address says which share it is in: addresses that count up are spread evenly, and the program of
/// a packet socket, which the kernel runs for each frame, stays short.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Share {
    index: u8,
    of: NonZeroU8,
}

impl Share {
    /// All frames.
    pub const ALL: Self = Self { index: 0, of: NonZeroU8::MIN };

    /// Returns the shares if there are so many, by their indices.
    pub fn divide(of: NonZeroU8) -> impl Iterator<Item = Self> {
        (0..of.get()).map(move |index| Self { index, of })
    }

    /// Returns the index of the share that an address is in if there are so many shares.
    pub fn index_of(mac: [u8; 6], of: NonZeroU8) -> usize {
        let [.., last] = mac;
        usize::from(last % of)
    }

    /// Returns whether an address is in the share.
    pub fn has(self, mac: [u8; 6]) -> bool {
        Self::index_of(mac, self.of) == usize::from(self.index)
    }

    /// Returns the index of the share, and the number of shares.
    pub(crate) fn numbers(self) -> (u32, u32) {
        (self.index.into(), self.of.get().into())
    }
}

/// The place of the byte of an address that says which share it is in.
pub(crate) const PLACE: u32 = 5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_address_is_in_one_share() {
        assert!((0..=u8::MAX).all(|last| Share::ALL.has([2, 0, 0, 0, 0, last])));
        for of in (1..=8).filter_map(NonZeroU8::new) {
            for last in 0..=u8::MAX {
                let mac = [2, 1, 1, 1, 1, last];
                let having: Vec<_> =
                    (0..).zip(Share::divide(of)).filter(|it| it.1.has(mac)).collect();
                assert_eq!(having.len(), 1, "{last} of {of}");
                assert_eq!(having[0].0, Share::index_of(mac, of));
            }
        }
    }
}
