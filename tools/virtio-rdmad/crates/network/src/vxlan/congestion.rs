// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Explicit congestion notification over a tunnel (RFC 6040): what marks the packets have between its
//! ends, and how a frame that leaves the tunnel shows that it met congestion there.

use super::inner::{ip, traffic_class, Version};

/// Explicit congestion notification: two bits (RFC 3168, section 5).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Ecn {
    /// 0: the sender does not react to congestion.
    NotEct,
    /// 1: the sender reacts to congestion.
    Ect1,
    /// 2: the sender reacts to congestion.
    Ect0,
    /// 3: the packet met congestion.
    Ce,
}

impl Ecn {
    /// Returns what the two lowest bits of a traffic class say.
    fn of(traffic_class: u8) -> Self {
        match traffic_class & 3 {
            0 => Self::NotEct,
            1 => Self::Ect1,
            2 => Self::Ect0,
            _ => Self::Ce,
        }
    }

    /// Returns the two bits.
    pub fn bits(self) -> u8 {
        match self {
            Self::NotEct => 0,
            Self::Ect1 => 1,
            Self::Ect0 => 2,
            Self::Ce => 3,
        }
    }
}

/// A frame met congestion in the tunnel, and its sender would not react to a mark: it is to be dropped
/// (RFC 6040, section 4.2).
#[derive(Debug, Eq, PartialEq)]
pub struct Congested;

/// Returns what an IP packet in a frame says, which the packet around it is to say as well (normal mode,
/// RFC 6040, section 4.1); `NotEct` for a frame without an IP packet.
pub fn of(frame: &[u8]) -> Ecn {
    Ecn::of(traffic_class(frame))
}

/// Writes into a frame that leaves the tunnel what the packet around it met.
///
/// # Errors
///
/// [`Congested`] if the frame is to be dropped.
pub fn leave(frame: &mut [u8], outer: Ecn) -> Result<(), Congested> {
    let Some((version, at)) = ip(frame) else { return Ok(()) };
    let inner = of(frame);
    match (inner, outer) {
        (Ecn::NotEct, Ecn::Ce) => return Err(Congested),
        (Ecn::Ect0 | Ecn::Ect1, Ecn::Ce) | (Ecn::Ect0, Ecn::Ect1) => {}
        _ => return Ok(()),
    }
    let change = inner.bits() ^ outer.bits();
    match version {
        Version::Four => {
            let old = frame[at + 1];
            frame[at + 1] ^= change;
            correct_checksum(&mut frame[at..], old);
        }
        Version::Six => frame[at + 1] ^= change << 4,
    }
    Ok(())
}

/// Corrects the checksum of an IPv4 header, whose traffic class was `old`, by what changed (RFC 1624,
/// equation 3).
fn correct_checksum(header: &mut [u8], old: u8) {
    let word = |high: u8, low: u8| u32::from(u16::from_be_bytes([high, low]));
    let (before, after) = (word(header[0], old), word(header[0], header[1]));
    let sum = (!word(header[10], header[11]) & 0xffff) + (!before & 0xffff) + after;
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    header[10..12].copy_from_slice(&(!sum).to_be_bytes()[2..]);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::inner::{IPV4, IPV6};
    use super::*;

    const ALL: [Ecn; 4] = [Ecn::NotEct, Ecn::Ect1, Ecn::Ect0, Ecn::Ce];

    /// Returns the checksum over an IPv4 header, which is 0 over one that has the right checksum.
    fn checksum(header: &[u8]) -> u16 {
        let words = header.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]));
        let mut sum: u32 = words.map(u32::from).sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !u16::try_from(sum).unwrap()
    }

    /// Returns a frame, and where its IP header is.
    fn frame(version: u8, is_tagged: bool, ecn: Ecn, fill: u8) -> (Vec<u8>, usize) {
        let mut frame = vec![fill; 12];
        if is_tagged {
            frame.extend([0x81, 0x00, 0x60, 0x05]);
        }
        frame.extend(if version == 4 { IPV4 } else { IPV6 });
        let at = frame.len();
        frame.extend([fill; 60]);
        if version == 4 {
            frame[at] = 0x45;
            frame[at + 1] = fill & !3 | ecn.bits();
            frame[at + 10..at + 12].fill(0);
            let sum = checksum(&frame[at..at + 20]);
            frame[at + 10..at + 12].copy_from_slice(&sum.to_be_bytes());
        } else {
            frame[at] = 0x60 | fill >> 4;
            frame[at + 1] = fill & 0xcf | ecn.bits() << 4;
        }
        (frame, at)
    }

    #[test]
    fn frames_leave_as_the_table_of_the_rfc_says() {
        // RFC 6040, figure 4: the rows are the inner header, the columns the outer one. None: drop.
        use Ecn::{Ce, Ect0, Ect1, NotEct};
        let table = [
            (NotEct, [Some(NotEct), Some(NotEct), Some(NotEct), None]),
            (Ect1, [Some(Ect1), Some(Ect1), Some(Ect1), Some(Ce)]),
            (Ect0, [Some(Ect0), Some(Ect1), Some(Ect0), Some(Ce)]),
            (Ce, [Some(Ce), Some(Ce), Some(Ce), Some(Ce)]),
        ];
        for (inner, row) in table {
            for (outer, expected) in ALL.into_iter().zip(row) {
                for (version, tagged) in [(4, false), (4, true), (6, false), (6, true)] {
                    for fill in [0, 0x5a, 0xff] {
                        let (mut frame, at) = frame(version, tagged, inner, fill);
                        assert_eq!(of(&frame), inner);
                        let done = leave(&mut frame, outer);
                        assert_eq!(done.ok().map(|()| of(&frame)), expected, "{inner:?} {outer:?}");
                        if version == 4 {
                            assert_eq!(checksum(&frame[at..at + 20]), 0, "{inner:?} {outer:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_checksum_stays_right_whatever_it_is() {
        for (inner, outer) in [(Ecn::Ect0, Ecn::Ce), (Ecn::Ect1, Ecn::Ce), (Ecn::Ect0, Ecn::Ect1)] {
            for identification in 0..=u16::MAX {
                let (mut frame, at) = frame(4, false, inner, 0x5a);
                frame[at + 4..at + 6].copy_from_slice(&identification.to_be_bytes());
                frame[at + 10..at + 12].fill(0);
                let sum = checksum(&frame[at..at + 20]);
                frame[at + 10..at + 12].copy_from_slice(&sum.to_be_bytes());
                assert_eq!(leave(&mut frame, outer), Ok(()));
                assert_eq!(checksum(&frame[at..at + 20]), 0, "{inner:?} {outer:?} {sum:#x}");
            }
        }
    }

    #[test]
    fn other_frames_stay_as_they_are() {
        let mut arp = [0_u8; 60];
        arp[12..14].copy_from_slice(&[0x08, 0x06]);
        let before = arp;
        assert_eq!((leave(&mut arp, Ecn::Ce), of(&arp)), (Ok(()), Ecn::NotEct));
        assert_eq!(arp, before);
    }

    proptest! {
        #[test]
        fn no_frame_is_too_short_or_too_odd(
            mut frame in prop::collection::vec(prop::sample::select(vec![0, 8, 0x45, 0x60, 0x81, 0x86, 0xdd]), 0..64),
            outer in 0_u8..4,
        ) {
            let _ = leave(&mut frame, Ecn::of(outer));
        }
    }
}
