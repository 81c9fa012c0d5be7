// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The base transport header.

use zerocopy::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::opcode::Opcode;
use crate::psn::Psn;
use crate::qpn::Qpn;
use crate::wire::{take_wire, Writer};
use crate::Malformed;

/// The P_Key of RoCE packets: that of the default partition, as a full member (`IB_DEFAULT_PKEY_FULL`).
pub const DEFAULT_PKEY: u16 = 0xffff;

/// The base transport header (IBA 9.2), with which every packet begins. The pad count and the version
/// of the header are not fields here: [`encode`](crate::encode) and [`decode`](crate::decode) take care
/// of them.
#[allow(clippy::struct_excessive_bools)] // The header has these bits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Bth {
    /// The opcode of the packet.
    pub opcode: Opcode,
    /// SE: the responder is asked for a solicited event.
    pub solicited_event: bool,
    /// M (MigReq): the state of path migration is "migrated". Hardware sends 1; rxe sends 0 and ignores
    /// it.
    pub migrated: bool,
    /// The partition.
    pub pkey: u16,
    /// FECN: the packet met congestion. RoCE v2 has [`Ecn`](crate::Ecn) for this.
    pub fecn: bool,
    /// BECN: packets of this receiver met congestion. A CNP has it set (IBA A17.9).
    pub becn: bool,
    /// The QP that the packet is for.
    pub dest_qp: Qpn,
    /// A (AckReq): the responder is asked for an acknowledgement.
    pub ack_request: bool,
    /// The PSN.
    pub psn: Psn,
}

/// The header on the wire.
#[derive(FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
struct Wire {
    opcode: u8,
    /// SE, M, two bits of pad count, four bits of version.
    flags: u8,
    pkey: U16,
    /// FECN, BECN, 6 reserved bits, 24 bits of QPN.
    dest_qp: U32,
    /// AckReq, 7 reserved bits, 24 bits of PSN. Adapters of NVIDIA set the highest reserved bit, by which switches tell
    /// packets that may overtake each other (adaptive routing).
    psn: U32,
}

/// The bytes of the header.
pub(crate) const LEN: usize = size_of::<Wire>();

const SOLICITED_EVENT: u8 = 1 << 7;
const MIGRATED: u8 = 1 << 6;
const PAD_SHIFT: u32 = 4;
const PAD_MASK: u8 = 3;
/// The mask of the version of the header, which is 0.
const VERSION: u8 = 0x0f;
const FECN: u32 = 1 << 31;
const BECN: u32 = 1 << 30;
const ACK_REQUEST: u32 = 1 << 31;

impl Bth {
    /// Makes a header with the default partition and the bit M, and without all other bits.
    pub const fn new(opcode: Opcode, dest_qp: Qpn, psn: Psn) -> Self {
        Self {
            opcode,
            solicited_event: false,
            migrated: true,
            pkey: DEFAULT_PKEY,
            fecn: false,
            becn: false,
            dest_qp,
            ack_request: false,
            psn,
        }
    }

    /// Takes a header from the beginning of `bytes`. Returns it and the pad count.
    pub(crate) fn take(bytes: &mut &[u8]) -> Result<(Self, usize), Malformed> {
        let wire: &Wire = take_wire(bytes).ok_or(Malformed::BthCutOff)?;
        if wire.flags & VERSION != 0 {
            return Err(Malformed::TransportVersion);
        }
        let opcode = Opcode::from_byte(wire.opcode).ok_or(Malformed::UnknownOpcode)?;
        let (dest_qp, psn) = (wire.dest_qp.get(), wire.psn.get());
        let header = Self {
            opcode,
            solicited_event: wire.flags & SOLICITED_EVENT != 0,
            migrated: wire.flags & MIGRATED != 0,
            pkey: wire.pkey.get(),
            fecn: dest_qp & FECN != 0,
            becn: dest_qp & BECN != 0,
            dest_qp: Qpn::from_word(dest_qp),
            ack_request: psn & ACK_REQUEST != 0,
            psn: Psn::new(psn),
        };
        Ok((header, usize::from(wire.flags >> PAD_SHIFT & PAD_MASK)))
    }

    /// Writes the header to `writer`, which must have room, with a pad count from 0 to 3.
    pub(crate) fn put(&self, writer: &mut Writer<'_>, pad: usize) {
        let bit8 = |set, bit| if set { bit } else { 0_u8 };
        let bit32 = |set, bit| if set { bit } else { 0_u32 };
        let [pad_count, ..] = pad.to_le_bytes();
        let pad_bits = (pad_count & PAD_MASK) << PAD_SHIFT;
        let flags =
            bit8(self.solicited_event, SOLICITED_EVENT) | bit8(self.migrated, MIGRATED) | pad_bits;
        let dest_qp = bit32(self.fecn, FECN) | bit32(self.becn, BECN) | self.dest_qp.get();
        let psn = bit32(self.ack_request, ACK_REQUEST) | self.psn.get();
        let wire = Wire {
            opcode: self.opcode.byte(),
            flags,
            pkey: self.pkey.into(),
            dest_qp: dest_qp.into(),
            psn: psn.into(),
        };
        writer.put_wire(&wire);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::opcode::{Operation, Position, Service};

    const OPCODE: Option<Opcode> = Opcode::new(Service::Rc, Operation::Send, Position::Only);

    fn header() -> Bth {
        Bth::new(OPCODE.unwrap(), Qpn::new(0x12_3456).unwrap(), Psn::new(0xab_cdef))
    }

    fn bytes(header: &Bth, pad: usize) -> [u8; LEN] {
        let mut bytes = [0xee; LEN];
        header.put(&mut Writer::new(&mut bytes), pad);
        bytes
    }

    #[test]
    fn fields_are_where_they_belong() {
        assert_eq!(
            bytes(&header(), 3),
            [0x04, 0x70, 0xff, 0xff, 0x00, 0x12, 0x34, 0x56, 0x00, 0xab, 0xcd, 0xef]
        );
        let all = Bth { solicited_event: true, fecn: true, ack_request: true, ..header() };
        assert_eq!(
            bytes(&all, 0),
            [0x04, 0xc0, 0xff, 0xff, 0x80, 0x12, 0x34, 0x56, 0x80, 0xab, 0xcd, 0xef]
        );
        let becn = Bth { migrated: false, pkey: 0x8001, becn: true, ..header() };
        assert_eq!(bytes(&becn, 1)[..5], [0x04, 0x10, 0x80, 0x01, 0x40]);
    }

    #[test]
    fn reserved_bits_are_ignored() {
        let mut wire = bytes(&header(), 2);
        wire[4] |= 0x3f;
        wire[8] |= 0x7f;
        assert_eq!(Bth::take(&mut wire.as_slice()), Ok((header(), 2)));
    }

    #[test]
    fn version_and_opcode_are_checked() {
        let mut wire = bytes(&header(), 0);
        wire[1] |= 1;
        assert_eq!(Bth::take(&mut wire.as_slice()), Err(Malformed::TransportVersion));
        wire[1] &= !1;
        wire[0] = 0x15;
        assert_eq!(Bth::take(&mut wire.as_slice()), Err(Malformed::UnknownOpcode));
        assert_eq!(Bth::take(&mut &wire[..LEN - 1]), Err(Malformed::BthCutOff));
    }
}
