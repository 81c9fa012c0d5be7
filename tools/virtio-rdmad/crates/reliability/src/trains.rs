// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whether the packets of a flow may leave as trains, which the network segments.
//!
//! A network card that segments a train may number its packets in another way than the kernel does: its driver need not
//! count up the identification of packets that are never fragmented (Documentation/networking/segmentation-offloads.rst
//! of the kernel). The ICRC covers the identification. So the first packet of each train arrives and the others are
//! lost, and the sender learns nothing but that. A flow whose packets are sent many times until they arrive therefore
//! sends them alone for a while. If something else loses them, that costs system calls only. What a peer had no receive
//! for is not lost: a consumer that posts receives slowly makes no packet leave alone.
//!
//! A single loss may have thousands of packets sent again, to a peer that drops everything behind it, or that asks for
//! the rest of a long READ. They arrive the second time. So a packet that is sent again counts only if packets were sent
//! again more often than others were sent for the first time before. As long as nothing new is sent, no more than
//! [`LONGEST_RUN`] packets that are sent again form trains, because these may be spoilt once more.

/// The number of packets that are judged together.
const JUDGED: u32 = 128;

/// The number of packets that count among those from which on the next ones leave alone: each packet is sent four times
/// then.
const MOST_AGAIN: u32 = 64;

/// The most packets that may be sent again before one counts.
const MOST_SPARE: u32 = 1 << 10;

/// The most packets that are sent again in a row and form trains: those of a window behind a loss.
const LONGEST_RUN: u32 = 256;

/// The number of packets that leave alone before trains are tried again.
const ALONE: u32 = 1 << 14;

/// The packets of a flow that were sent lately.
#[derive(Default)]
pub(crate) struct Trains {
    sent: u32,
    /// The number of packets among them that were sent again and count.
    again: u32,
    /// The number of packets that may be sent again before one counts.
    spare: u32,
    /// The number of packets that were sent again since the last new one.
    run: u32,
    /// The number of packets that are yet to leave alone.
    alone: u32,
}

impl Trains {
    /// Returns whether the next packet may be part of a train.
    #[inline]
    pub fn may_form(&self) -> bool {
        self.alone == 0 && self.run <= LONGEST_RUN
    }

    /// Notes that a packet was sent, and whether it was sent before.
    #[inline]
    pub fn sent(&mut self, is_again: bool) {
        if self.alone != 0 {
            self.alone -= 1;
            return;
        }
        let is_long = self.run > LONGEST_RUN;
        self.run = if is_again { self.run.saturating_add(1) } else { 0 };
        if !(is_again && is_long) {
            self.judge(is_again);
        }
    }

    /// Judges a packet that may have been part of a train, together with those in front of it.
    fn judge(&mut self, is_again: bool) {
        self.sent += 1;
        match (is_again, self.spare) {
            (false, _) => self.spare = (self.spare + 1).min(MOST_SPARE),
            (true, 0) => self.again += 1,
            (true, _) => self.spare -= 1,
        }
        if self.sent == JUDGED {
            *self = if self.again >= MOST_AGAIN {
                Self { alone: ALONE, ..Self::default() }
            } else {
                Self { spare: self.spare, run: self.run, ..Self::default() }
            };
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

    /// Sends so many packets, for the first time or again. Returns how many of them may leave in trains.
    fn in_trains(trains: &mut Trains, packets: u32, is_again: bool) -> u32 {
        let mut may_form = || {
            let may_form = trains.may_form();
            trains.sent(is_again);
            may_form
        };
        (0..packets).filter(|_| may_form()).count() as u32
    }

    /// A peer that holds nothing is sent all packets again that were under way behind a lost one.
    #[test]
    fn packets_that_are_sent_twice_leave_in_trains() {
        let mut trains = Trains::default();
        for packets in [1, 16, 256, 256, 256] {
            assert_eq!(in_trains(&mut trains, packets, false), packets);
            assert_eq!(in_trains(&mut trains, packets, true), packets);
        }
    }

    /// The rest of a long READ may be sent again.
    #[test]
    fn packets_leave_alone_until_there_are_new_ones() {
        let mut trains = Trains::default();
        in_trains(&mut trains, 4096, false);
        assert_eq!(in_trains(&mut trains, 4096, true), LONGEST_RUN + 1);
        in_trains(&mut trains, 1, false);
        assert_eq!(in_trains(&mut trains, 4096, false), 4096);
    }

    /// What has arrived long ago tells little of the network of today.
    #[test]
    fn a_long_flow_ends_its_trains_too() {
        let mut trains = Trains::default();
        in_trains(&mut trains, 1 << 20, false);
        let mut step = || in_trains(&mut trains, 15, true) + in_trains(&mut trains, 1, false);
        let formed: u32 = (0..ALONE / 16).map(|_| step()).sum();
        assert!(formed < 1400, "{formed} packets in trains");
    }

    #[test]
    fn packets_leave_alone_while_most_are_sent_again() {
        assert_eq!([0, 4, 11].map(alone), [0, 0, 0]);
        assert_eq!([12, 15, 16].map(alone), [10 * ALONE; 3]);
    }
}
