// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The format of VXLAN packets (RFC 7348): Ethernet frames in UDP datagrams, and what becomes of marks
//! of congestion at both ends of such a tunnel (RFC 6040). It does no I/O.

pub mod congestion;
pub mod inner;

use std::str::FromStr;

/// The UDP port that IANA has assigned.
pub const PORT: u16 = 4789;

/// The bytes of the header in front of a frame.
pub const HEADER: usize = 8;

/// The bytes of the shortest frame: its Ethernet header.
const SHORTEST_FRAME: usize = 14;

/// The flag I: the VNI is valid. Other flags are reserved, and a receiver ignores them.
const VALID_VNI: u8 = 0x08;

/// The identifier of a network: 24 bits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Vni(u32);

impl Vni {
    /// Returns the number.
    pub fn get(self) -> u32 {
        self.0
    }
}

/// A text is not the number of a VNI.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
#[error("a VNI is a number of 0 to 16777215")]
pub struct NoVni;

impl FromStr for Vni {
    type Err = NoVni;

    fn from_str(text: &str) -> Result<Self, NoVni> {
        text.parse().map_err(|_| NoVni).and_then(|number: u32| number.try_into())
    }
}

impl TryFrom<u32> for Vni {
    type Error = NoVni;

    fn try_from(number: u32) -> Result<Self, NoVni> {
        (number < 1 << 24).then_some(Self(number)).ok_or(NoVni)
    }
}

/// The reason why a datagram is no VXLAN packet.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Malformed {
    /// It has no room for the header and the shortest frame.
    #[error("a VXLAN packet of {0} bytes")]
    CutOff(usize),
    /// The flag I is not set.
    #[error("a VXLAN packet without a valid VNI")]
    NoVni,
}

/// Returns the header of a packet.
pub fn header(vni: Vni) -> [u8; HEADER] {
    let [_, high, middle, low] = vni.0.to_be_bytes();
    [VALID_VNI, 0, 0, 0, high, middle, low, 0]
}

/// Takes the header off a packet. Returns its network and its frame.
pub fn decode(packet: &mut [u8]) -> Result<(Vni, &mut [u8]), Malformed> {
    let len = packet.len();
    let cut_off = Malformed::CutOff(len);
    let (header, frame) = packet.split_first_chunk_mut::<HEADER>().ok_or(cut_off)?;
    if frame.len() < SHORTEST_FRAME {
        return Err(cut_off);
    }
    let [flags, _, _, _, high, middle, low, _] = *header;
    if flags & VALID_VNI == 0 {
        return Err(Malformed::NoVni);
    }
    Ok((Vni(u32::from_be_bytes([0, high, middle, low])), frame))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_as_the_rfc_draws_it() {
        let vni: Vni = "74565".parse().unwrap();
        assert_eq!(header(vni), [0x08, 0, 0, 0, 0x01, 0x23, 0x45, 0]);
        let mut packet = header(vni).to_vec();
        packet.extend([7; SHORTEST_FRAME]);
        assert_eq!(decode(&mut packet), Ok((vni, &mut [7; SHORTEST_FRAME][..])));
        // What is reserved is ignored.
        packet[..8].copy_from_slice(&[0xff, 1, 2, 3, 0x01, 0x23, 0x45, 4]);
        assert_eq!(decode(&mut packet).unwrap().0, vni);
    }

    #[test]
    fn what_is_no_packet_is_refused() {
        let mut packet = header(Vni(1)).to_vec();
        packet.extend([0; SHORTEST_FRAME - 1]);
        for len in 0..packet.len() {
            assert_eq!(decode(&mut packet[..len]), Err(Malformed::CutOff(len)));
        }
        packet.push(0);
        packet[0] = !VALID_VNI;
        assert_eq!(decode(&mut packet), Err(Malformed::NoVni));
    }

    #[test]
    fn a_vni_has_24_bits() {
        assert_eq!("0".parse(), Ok(Vni(0)));
        assert_eq!("16777215".parse(), Ok(Vni(0x00ff_ffff)));
        for text in ["16777216", "-1", "", "x", "1.0"] {
            assert_eq!(text.parse::<Vni>(), Err(NoVni), "{text}");
        }
    }
}
