// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The extended header of acknowledgements.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use zerocopy::big_endian::U32;

use crate::wire::{Header, LOW_24};

/// The number of a message, which its responder counts (IBA 9.7.7): 24 bits, which wrap around.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq, Serialize, Deserialize)]
#[serde(from = "u32", into = "u32")]
pub struct Msn(u32);

impl Msn {
    /// Makes an MSN of the lowest 24 bits of `value`.
    pub const fn new(value: u32) -> Self {
        Self(value & LOW_24)
    }

    /// Returns the MSN as a number below 2^24.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the MSN of the next message.
    #[must_use]
    pub const fn next(self) -> Self {
        Self::new(self.0 + 1)
    }
}

impl From<u32> for Msn {
    fn from(value: u32) -> Self {
        Self::new(value)
    }
}

impl From<Msn> for u32 {
    fn from(msn: Msn) -> Self {
        msn.get()
    }
}

/// The number of further messages that a responder can receive, in the encoding of IBA 9.7.7.2: 5 bits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Credits(u8);

impl Credits {
    /// The encoding by which a responder says that it does not count credits. rxe sends nothing else.
    pub const UNLIMITED: Self = Self(0x1f);

    /// Makes credits of their encoding; `None` if it has more than 5 bits.
    pub const fn new(code: u8) -> Option<Self> {
        if code > VALUE {
            return None;
        }
        Some(Self(code))
    }

    /// Returns the encoding.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// Returns the number of messages; `None` if it is not limited.
    pub const fn messages(self) -> Option<u16> {
        if self.0 == Self::UNLIMITED.0 {
            return None;
        }
        Some(MESSAGES[self.0 as usize])
    }
}

/// The time that a requester waits after an RNR NAK, in the encoding of IBA 9.7.5.2.8 (table 45): 5 bits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RnrTimer(u8);

impl RnrTimer {
    /// Makes a timer of its encoding, which is also that of `min_rnr_timer` of the verbs; `None` if it
    /// has more than 5 bits.
    pub const fn new(code: u8) -> Option<Self> {
        if code > VALUE {
            return None;
        }
        Some(Self(code))
    }

    /// Returns the encoding.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// Returns the time.
    pub const fn delay(self) -> Duration {
        Duration::from_micros(10 * TIMERS[self.0 as usize])
    }
}

/// The numbers of messages of IBA 9.7.7.2, by their encodings.
const MESSAGES: [u16; 31] = [
    0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768,
];

/// The RNR timers of IBA, table 45, by their encodings, in units of 10 µs.
const TIMERS: [u64; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// The reason why a responder refuses a request (IBA 9.7.5.2).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NakCode {
    /// 0x60: a packet before this one is missing.
    PsnSequenceError,
    /// 0x61: the request is not allowed, or its length is wrong.
    InvalidRequest,
    /// 0x62: the rkey does not give the access.
    RemoteAccessError,
    /// 0x63: the responder failed.
    RemoteOperationalError,
    /// 0x64: the request does not belong to its reliable datagram channel.
    InvalidRdRequest,
}

/// The syndrome of an acknowledgement (IBA 9.7.5).
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(from = "u8", into = "u8")]
pub enum Syndrome {
    /// The responder executed everything up to the PSN. It can receive this many more messages.
    Ack(Credits),
    /// The responder has no receive. The requester tries again after this time.
    RnrNak(RnrTimer),
    /// The responder refuses the request.
    Nak(NakCode),
    /// A byte that is reserved. A requester ignores the packet.
    Reserved(ReservedSyndrome),
}

/// The byte of a syndrome that is reserved.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ReservedSyndrome(u8);

/// The bits of a syndrome that say what it is.
const KIND: u8 = 0xe0;
const ACK: u8 = 0x00;
const RNR_NAK: u8 = 0x20;
/// The bits of a syndrome that have a value.
const VALUE: u8 = 0x1f;

impl From<u8> for Syndrome {
    fn from(byte: u8) -> Self {
        Self::from_byte(byte)
    }
}

impl From<Syndrome> for u8 {
    fn from(syndrome: Syndrome) -> Self {
        syndrome.byte()
    }
}

impl Syndrome {
    /// Reads a syndrome.
    pub const fn from_byte(byte: u8) -> Self {
        match (byte & KIND, byte) {
            (ACK, _) => Self::Ack(Credits(byte & VALUE)),
            (RNR_NAK, _) => Self::RnrNak(RnrTimer(byte & VALUE)),
            (_, 0x60) => Self::Nak(NakCode::PsnSequenceError),
            (_, 0x61) => Self::Nak(NakCode::InvalidRequest),
            (_, 0x62) => Self::Nak(NakCode::RemoteAccessError),
            (_, 0x63) => Self::Nak(NakCode::RemoteOperationalError),
            (_, 0x64) => Self::Nak(NakCode::InvalidRdRequest),
            _ => Self::Reserved(ReservedSyndrome(byte)),
        }
    }

    /// Returns the byte that stands in the AETH.
    pub const fn byte(self) -> u8 {
        match self {
            Self::Ack(credits) => ACK | credits.0,
            Self::RnrNak(timer) => RNR_NAK | timer.0,
            Self::Nak(NakCode::PsnSequenceError) => 0x60,
            Self::Nak(NakCode::InvalidRequest) => 0x61,
            Self::Nak(NakCode::RemoteAccessError) => 0x62,
            Self::Nak(NakCode::RemoteOperationalError) => 0x63,
            Self::Nak(NakCode::InvalidRdRequest) => 0x64,
            Self::Reserved(ReservedSyndrome(byte)) => byte,
        }
    }
}

/// The ACK extended transport header (IBA 9.3).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Aeth {
    /// The syndrome, which has the responder's answer.
    pub syndrome: Syndrome,
    /// The number of messages that the responder has completed.
    pub msn: Msn,
}

impl Header for Aeth {
    type Wire = U32;

    fn from_wire(wire: &U32) -> Self {
        let [syndrome, ..] = wire.get().to_be_bytes();
        Self { syndrome: Syndrome::from_byte(syndrome), msn: Msn::new(wire.get()) }
    }

    fn to_wire(&self) -> U32 {
        (u32::from(self.syndrome.byte()) << 24 | self.msn.get()).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_a_syndrome() {
        for byte in 0..=255 {
            assert_eq!(Syndrome::from_byte(byte).byte(), byte);
        }
        assert_eq!(Syndrome::from_byte(0x1f), Syndrome::Ack(Credits::UNLIMITED));
        assert_eq!(Syndrome::from_byte(0x2e), Syndrome::RnrNak(RnrTimer(14)));
        assert_eq!(Syndrome::from_byte(0x63), Syndrome::Nak(NakCode::RemoteOperationalError));
        for byte in [0x40, 0x65, 0x7f, 0x80, 0xe0, 0xff] {
            assert_eq!(Syndrome::from_byte(byte), Syndrome::Reserved(ReservedSyndrome(byte)));
        }
    }

    #[test]
    fn timers_and_credits_have_five_bits() {
        let delay = |code| RnrTimer::new(code).unwrap().delay();
        assert_eq!(delay(0), Duration::from_micros(655_360));
        assert_eq!(delay(1), Duration::from_micros(10));
        assert_eq!(delay(14), Duration::from_millis(1) + Duration::from_micros(280));
        assert_eq!(delay(31), Duration::from_micros(491_520));
        assert_eq!(RnrTimer::new(32), None);
        let messages = |code| Credits::new(code).unwrap().messages();
        assert_eq!((messages(0), messages(5), messages(30)), (Some(0), Some(6), Some(32768)));
        assert_eq!(messages(31), None);
        assert_eq!(Credits::new(32), None);
    }

    #[test]
    fn fields_are_where_they_belong() {
        let header = Aeth { syndrome: Syndrome::from_byte(0x62), msn: Msn::new(0xff_ffff) };
        assert_eq!(header.to_wire().to_bytes(), [0x62, 0xff, 0xff, 0xff]);
        assert_eq!(header.msn.next(), Msn::new(0));
    }
}
