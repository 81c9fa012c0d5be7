// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Opcodes of the BTH, and what each of them says about its packet.

use crate::extended::ExtendedHeader;

/// The transport service of a packet: bits 7 to 5 of the opcode (IBA 9.2.1, table 38).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Service {
    /// Reliable connection: 0x00.
    Rc,
    /// Unreliable connection: 0x20.
    Uc,
    /// Unreliable datagram: 0x60.
    Ud,
    /// Congestion notification, which belongs to no service: 0x80 (IBA A17.9).
    Cnp,
    /// Extended reliable connection: 0xa0 (IBA A14).
    Xrc,
    /// An extension of this project: 0xc0, which IBA leaves to manufacturers. Its packets are for reliable and
    /// for extended reliable connections, and are sent to peers that know the extension.
    Manufacturer,
}

impl Service {
    const fn bits(self) -> u8 {
        match self {
            Self::Rc => 0x00,
            Self::Uc => 0x20,
            Self::Ud => 0x60,
            Self::Cnp => 0x80,
            Self::Xrc => 0xa0,
            Self::Manufacturer => 0xc0,
        }
    }

    const fn from_byte(byte: u8) -> Option<Self> {
        match byte & 0xe0 {
            0x00 => Some(Self::Rc),
            0x20 => Some(Self::Uc),
            0x60 => Some(Self::Ud),
            0x80 => Some(Self::Cnp),
            0xa0 => Some(Self::Xrc),
            0xc0 => Some(Self::Manufacturer),
            _ => None,
        }
    }
}

/// The operation that a packet is part of, or asks for.
///
/// The first and the middle packets of a message have the same opcode whether or not its last packet
/// carries immediate data, or a key to invalidate.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Operation {
    /// SEND.
    Send,
    /// The end of a SEND with immediate data.
    SendWithImmediate,
    /// The end of a SEND that invalidates an rkey of the responder.
    SendWithInvalidate,
    /// RDMA WRITE.
    Write,
    /// The end of an RDMA WRITE with immediate data.
    WriteWithImmediate,
    /// A request for an RDMA READ.
    ReadRequest,
    /// The data of an RDMA READ. Without payload it also answers FLUSH and ATOMIC WRITE.
    ReadResponse,
    /// ACK or NAK, as the AETH says.
    Acknowledge,
    /// The result of CMP SWAP or FETCH ADD.
    AtomicAcknowledge,
    /// Compare and swap.
    CompareSwap,
    /// Fetch and add.
    FetchAdd,
    /// FLUSH (IBA A19).
    Flush,
    /// ATOMIC WRITE of 8 bytes (IBA A19).
    AtomicWrite,
    /// An acknowledgement of the packets in front of a missing one, which tells what is held of those behind it. If
    /// nothing is held, it says only that the responder knows such acknowledgements.
    SelectiveAcknowledge,
    /// The requester knows selective acknowledgements.
    SelectiveOffer,
    /// Congestion notification: the receiver of packets marked with [`Ecn::Ce`](crate::Ecn::Ce) tells
    /// their sender.
    Cnp,
}

/// The position of a packet in its message.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Position {
    /// The first packet of several. Its payload has exactly the path MTU.
    First,
    /// Neither the first packet nor the last one. Its payload has exactly the path MTU.
    Middle,
    /// The last packet of several.
    Last,
    /// The whole message.
    Only,
}

/// An opcode that is defined for its service.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Opcode {
    byte: u8,
    service: Service,
    operation: Operation,
    position: Position,
}

/// The meanings of bits 4 to 0 of an opcode (IBA 9.2.1, table 38; FLUSH and ATOMIC WRITE: A19).
const KINDS: [Option<(Operation, Position)>; 32] = {
    use Operation as O;
    use Position::{First, Last, Middle, Only};

    let mut kinds = [None; 32];
    kinds[0x00] = Some((O::Send, First));
    kinds[0x01] = Some((O::Send, Middle));
    kinds[0x02] = Some((O::Send, Last));
    kinds[0x03] = Some((O::SendWithImmediate, Last));
    kinds[0x04] = Some((O::Send, Only));
    kinds[0x05] = Some((O::SendWithImmediate, Only));
    kinds[0x06] = Some((O::Write, First));
    kinds[0x07] = Some((O::Write, Middle));
    kinds[0x08] = Some((O::Write, Last));
    kinds[0x09] = Some((O::WriteWithImmediate, Last));
    kinds[0x0a] = Some((O::Write, Only));
    kinds[0x0b] = Some((O::WriteWithImmediate, Only));
    kinds[0x0c] = Some((O::ReadRequest, Only));
    kinds[0x0d] = Some((O::ReadResponse, First));
    kinds[0x0e] = Some((O::ReadResponse, Middle));
    kinds[0x0f] = Some((O::ReadResponse, Last));
    kinds[0x10] = Some((O::ReadResponse, Only));
    kinds[0x11] = Some((O::Acknowledge, Only));
    kinds[0x12] = Some((O::AtomicAcknowledge, Only));
    kinds[0x13] = Some((O::CompareSwap, Only));
    kinds[0x14] = Some((O::FetchAdd, Only));
    kinds[0x16] = Some((O::SendWithInvalidate, Last));
    kinds[0x17] = Some((O::SendWithInvalidate, Only));
    kinds[0x1c] = Some((O::Flush, Only));
    kinds[0x1d] = Some((O::AtomicWrite, Only));
    kinds
};

/// The opcode of each byte, so that a packet costs a load and not a search.
static OPCODES: [Option<Opcode>; 256] = {
    let mut opcodes = [None; 256];
    let mut byte = u8::MIN;
    loop {
        opcodes[byte as usize] = Opcode::parse(byte);
        let Some(next) = byte.checked_add(1) else { break opcodes };
        byte = next;
    }
};

/// The bytes of the opcodes, by the upper three bits of the service, operation and position.
static BYTES: [[[u8; POSITIONS]; OPERATIONS]; 8] = {
    let mut bytes = [[[UNDEFINED; POSITIONS]; OPERATIONS]; 8];
    let mut byte = 0;
    while byte < OPCODES.len() {
        if let Some(opcode) = OPCODES[byte] {
            bytes[byte >> 5][opcode.operation as usize][opcode.position as usize] = opcode.byte;
        }
        byte += 1;
    }
    bytes
};

/// The numbers of kinds of [`Operation`] and of [`Position`].
const OPERATIONS: usize = Operation::Cnp as usize + 1;
const POSITIONS: usize = Position::Only as usize + 1;
/// A byte that is no opcode.
const UNDEFINED: u8 = 0xff;

/// Bits 4 to 0 of the opcode of a CNP, which mean something else for every other service.
const CNP_BITS: u8 = 0x01;

/// Bits 4 to 0 of the opcode of a selective acknowledgement: those of an acknowledgement.
const SELECTIVE_BITS: u8 = 0x11;

/// Bits 4 to 0 of the opcode of the offer of a requester.
const OFFER_BITS: u8 = 0x12;

impl Opcode {
    /// The opcode of a congestion notification packet: 0x81.
    pub const CNP: Self = Self {
        byte: Service::Cnp.bits() | CNP_BITS,
        service: Service::Cnp,
        operation: Operation::Cnp,
        position: Position::Only,
    };

    /// The opcode of a selective acknowledgement: 0xd1.
    pub const SELECTIVE_ACKNOWLEDGE: Self = Self {
        byte: Service::Manufacturer.bits() | SELECTIVE_BITS,
        service: Service::Manufacturer,
        operation: Operation::SelectiveAcknowledge,
        position: Position::Only,
    };

    /// The opcode of a requester that knows selective acknowledgements: 0xd2.
    pub const SELECTIVE_OFFER: Self = Self {
        byte: Service::Manufacturer.bits() | OFFER_BITS,
        service: Service::Manufacturer,
        operation: Operation::SelectiveOffer,
        position: Position::Only,
    };

    /// Returns the opcode of this byte; `None` if the byte is reserved, or belongs to reliable
    /// datagrams or to another manufacturer.
    #[inline]
    pub const fn from_byte(byte: u8) -> Option<Self> {
        OPCODES[byte as usize]
    }

    /// Does the same as [`from_byte`](Self::from_byte), without a table.
    const fn parse(byte: u8) -> Option<Self> {
        let Some(service) = Service::from_byte(byte) else { return None };
        let only = match service {
            Service::Cnp => Some(Self::CNP),
            Service::Manufacturer if byte & 0x1f == OFFER_BITS => Some(Self::SELECTIVE_OFFER),
            Service::Manufacturer => Some(Self::SELECTIVE_ACKNOWLEDGE),
            _ => None,
        };
        if let Some(only) = only {
            return if byte == only.byte { Some(only) } else { None };
        }
        let Some((operation, position)) = KINDS[(byte & 0x1f) as usize] else { return None };
        let defined = match service {
            Service::Rc | Service::Xrc => true,
            Service::Uc => byte & 0x1f <= 0x0b,
            Service::Ud => matches!(byte & 0x1f, 0x04 | 0x05),
            Service::Cnp | Service::Manufacturer => false,
        };
        if defined {
            Some(Self { byte, service, operation, position })
        } else {
            None
        }
    }

    /// Returns the opcode of an operation of a service, at a position of the message; `None` if there is
    /// no such opcode.
    #[inline]
    pub const fn new(service: Service, operation: Operation, position: Position) -> Option<Self> {
        Self::from_byte(BYTES[service.bits() as usize >> 5][operation as usize][position as usize])
    }

    /// Returns the byte that stands in the BTH.
    pub const fn byte(self) -> u8 {
        self.byte
    }

    /// Returns the service.
    pub const fn service(self) -> Service {
        self.service
    }

    /// Returns the operation.
    pub const fn operation(self) -> Operation {
        self.operation
    }

    /// Returns the position of the packet in its message.
    pub const fn position(self) -> Position {
        self.position
    }

    /// Returns the headers that follow the BTH, in their order (IBA 9.2.1, table 38; XRC: A14; FLUSH
    /// and ATOMIC WRITE: A19).
    pub const fn extended_headers(self) -> &'static [ExtendedHeader] {
        use ExtendedHeader as H;
        use Operation as O;
        use Position::{First, Only};

        let of_xrc: &'static [H] = match (self.operation, self.position) {
            (O::SendWithInvalidate, _) => &[H::Xrceth, H::Ieth],
            (O::Write, First | Only) | (O::ReadRequest | O::AtomicWrite, _) => {
                &[H::Xrceth, H::Reth]
            }
            (O::Send | O::Write, _) => &[H::Xrceth],
            (O::WriteWithImmediate, Only) => &[H::Xrceth, H::Reth, H::ImmDt],
            (O::SendWithImmediate | O::WriteWithImmediate, _) => &[H::Xrceth, H::ImmDt],
            (O::ReadResponse, Position::Middle) | (O::SelectiveOffer, _) => &[],
            (O::ReadResponse | O::Acknowledge, _) => &[H::Aeth],
            (O::AtomicAcknowledge, _) => &[H::Aeth, H::AtomicAckEth],
            (O::CompareSwap | O::FetchAdd, _) => &[H::Xrceth, H::AtomicEth],
            (O::Flush, _) => &[H::Xrceth, H::Feth, H::Reth],
            (O::Cnp, _) => &[H::CnpReserved],
            (O::SelectiveAcknowledge, _) => &[H::Aeth, H::SackEth],
        };
        match (self.service, of_xrc) {
            (Service::Ud, [_, H::ImmDt]) => &[H::Deth, H::ImmDt],
            (Service::Ud, _) => &[H::Deth],
            (Service::Rc | Service::Uc, [H::Xrceth, rest @ ..]) => rest,
            (_, all) => all,
        }
    }

    /// Returns whether the packet may carry payload. How much a packet must carry depends on the path
    /// MTU and on the message, except that ATOMIC WRITE carries 8 bytes (IBA oA19-28).
    pub const fn may_carry_payload(self) -> bool {
        matches!(
            self.operation,
            Operation::Send
                | Operation::SendWithImmediate
                | Operation::SendWithInvalidate
                | Operation::Write
                | Operation::WriteWithImmediate
                | Operation::ReadResponse
                | Operation::AtomicWrite
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All opcodes by their bytes, as the kernel's `ib_pack.h` and IBA A14 have them.
    fn defined() -> Vec<u8> {
        let rc = (0x00..=0x14).chain([0x16, 0x17, 0x1c, 0x1d]);
        let xrc = rc.clone().map(|bits| 0xa0 | bits);
        rc.chain(0x20..=0x2b).chain([0x64, 0x65, 0x81]).chain(xrc).chain([0xd1, 0xd2]).collect()
    }

    #[test]
    fn defined_opcodes_are_known() {
        let known: Vec<u8> = (0..=255).filter(|byte| Opcode::from_byte(*byte).is_some()).collect();
        assert_eq!(known, defined());
    }

    #[test]
    fn opcode_is_found_by_what_it_says() {
        for byte in defined() {
            let opcode = Opcode::from_byte(byte).unwrap();
            assert_eq!(opcode.byte(), byte);
            let (service, operation) = (opcode.service(), opcode.operation());
            if service != Service::Cnp {
                assert_eq!(Opcode::new(service, operation, opcode.position()), Some(opcode));
            }
        }
        assert_eq!(Opcode::new(Service::Cnp, Operation::Cnp, Position::Only), Some(Opcode::CNP));
        assert_eq!(Opcode::new(Service::Uc, Operation::ReadRequest, Position::Only), None);
        assert_eq!(Opcode::new(Service::Ud, Operation::Send, Position::First), None);
        assert_eq!(Opcode::new(Service::Rc, Operation::Cnp, Position::Only), None);
    }

    /// The bytes of all headers from the BTH on, as the table `rxe_opcode` of the kernel's rxe has them,
    /// and for XRC as IBA A14 has them.
    #[test]
    fn headers_have_the_lengths_of_the_tables() {
        let of = |byte| {
            let headers = Opcode::from_byte(byte).unwrap().extended_headers();
            12 + headers.iter().map(|header| header.len()).sum::<usize>()
        };
        for (bytes, len) in [
            (vec![0x00, 0x01, 0x02, 0x04, 0x07, 0x08, 0x0e], 12),
            (vec![0x03, 0x05, 0x09, 0x16, 0x17, 0x0d, 0x0f, 0x10, 0x11], 16),
            (vec![0x06, 0x0a, 0x0c, 0x1d], 28),
            (vec![0x0b, 0x1c], 32),
            (vec![0x12], 24),
            (vec![0x13, 0x14], 40),
            (vec![0x20, 0x21, 0x22, 0x24, 0x27, 0x28], 12),
            (vec![0x23, 0x25, 0x29], 16),
            (vec![0x26, 0x2a], 28),
            (vec![0x2b], 32),
            (vec![0x64], 20),
            (vec![0x65], 24),
            (vec![0x81], 28),
            (vec![0xa0, 0xa1, 0xa2, 0xa4, 0xa7, 0xa8], 16),
            (vec![0xa3, 0xa5, 0xa9, 0xb6, 0xb7], 20),
            (vec![0xa6, 0xaa, 0xac, 0xbd], 32),
            (vec![0xab, 0xbc], 36),
            (vec![0xad, 0xaf, 0xb0, 0xb1], 16),
            (vec![0xae], 12),
            (vec![0xb2], 24),
            (vec![0xb3, 0xb4], 44),
            (vec![0xd1], 48),
            (vec![0xd2], 12),
        ] {
            for byte in bytes {
                assert_eq!(of(byte), len, "opcode {byte:#04x}");
            }
        }
    }

    #[test]
    fn requests_for_data_and_answers_without_data_carry_no_payload() {
        let carries: Vec<u8> = (0..=0x1f)
            .filter(|byte| Opcode::from_byte(*byte).is_some_and(Opcode::may_carry_payload))
            .collect();
        let expected: Vec<u8> =
            (0x00..=0x0b).chain(0x0d..=0x10).chain([0x16, 0x17, 0x1d]).collect();
        assert_eq!(carries, expected);
        assert!(!Opcode::CNP.may_carry_payload());
    }
}
