// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whether the packets of a flow may leave as trains, which the network segments.
//!
//! A network card that segments a train may number its packets in another way than the kernel does: its driver need not
//! count up the identification of packets that are never fragmented (Documentation/networking/segmentation-offloads.rst
//! of the kernel). The ICRC covers the identification. So the first packet of each train arrives and the others are
//! lost, and the sender learns nothing but that. A flow that loses most packets therefore sends its packets alone for a
//! while. If something else loses them, that costs system calls only. What a peer had no receive for is not lost: a
//! consumer that posts receives slowly makes no packet leave alone.

/// The number of packets that are judged together.
const JUDGED: u32 = 128;

/// The number of packets among those from which on the next ones leave alone.
const MOST_AGAIN: u32 = 96;

/// The number of packets that leave alone before trains are tried again.
const ALONE: u32 = 1 << 14;

/// The packets of a flow that were sent lately.
#[derive(Default)]
pub(crate) struct Trains {
    sent: u32,
    again: u32,
    /// The number of packets that are yet to leave alone.
    alone: u32,
}

impl Trains {
    /// Returns whether the next packet may be part of a train.
    #[inline]
    pub fn may_form(&self) -> bool {
        self.alone == 0
    }

    /// Notes that a packet was sent, and whether it was sent before.
    #[inline]
    pub fn sent(&mut self, is_again: bool) {
        if self.alone != 0 {
            self.alone -= 1;
            return;
        }
        self.sent += 1;
        self.again += u32::from(is_again);
        if self.sent == JUDGED {
            let alone = if self.again >= MOST_AGAIN { ALONE } else { 0 };
            *self = Self { alone, ..Self::default() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how many packets leave alone while so many in sixteen are sent again.
    fn alone(again: u32) -> u32 {
        let (packets, mut trains) = (10 * (ALONE + JUDGED), Trains::default());
        let mut is_alone = |at: u32| {
            let is_alone = !trains.may_form();
            trains.sent(at % 16 < again);
            is_alone
        };
        (0..packets).filter(|at| is_alone(*at)).count() as u32
    }

    #[test]
    fn packets_leave_alone_while_most_are_sent_again() {
        assert_eq!([0, 4, 11].map(alone), [0, 0, 0]);
        assert_eq!([12, 15, 16].map(alone), [10 * ALONE; 3]);
    }
}
