// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The UDP header, and how its source port is chosen.

use zerocopy::big_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::ip::FlowLabel;
use crate::qpn::Qpn;
use crate::wire::{take_wire, Writer};
use crate::Malformed;

/// The destination port of RoCE v2 (IBA A17).
pub const PORT: u16 = 4791;

/// The lowest source port; the highest one is 0xffff.
const FIRST_SOURCE_PORT: u16 = 0xc000;

/// Returns the source port of the packets of a connection, from 0xc000 on. Switches choose the path of
/// a packet by it, so that the packets of a connection stay in their order.
///
/// The port follows from the flow label or, if that is 0, from the numbers of the two QPs in either
/// order, as all drivers of the kernel agree (`rdma_get_udp_sport()` in `include/rdma/ib_verbs.h`).
pub fn source_port(flow_label: FlowLabel, local: Qpn, remote: Qpn) -> u16 {
    let label = match flow_label.get() {
        0 => symmetric_label(local, remote),
        label => label,
    };
    // The 6 bits above the 14 of the port change the lowest ones.
    let [_, _, high, low] = ((label & 0x3fff) ^ (label >> 14)).to_be_bytes();
    FIRST_SOURCE_PORT | u16::from_be_bytes([high, low])
}

/// Returns a flow label of 20 bits that follows from two QPNs.
fn symmetric_label(one: Qpn, other: Qpn) -> u32 {
    let mut product = u64::from(one.get()) * u64::from(other.get());
    product ^= product >> 20;
    product ^= product >> 40;
    let [.., b2, b1, b0] = product.to_be_bytes();
    u32::from_be_bytes([0, b2, b1, b0]) & FlowLabel::MASK
}

/// The header on the wire (RFC 768).
#[derive(FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
struct Wire {
    source: U16,
    destination: U16,
    /// The bytes from this header on.
    len: U16,
    /// 0: there is no checksum (IBA A17).
    checksum: U16,
}

/// The bytes of the header.
pub(crate) const LEN: usize = size_of::<Wire>();

/// Takes a header from the beginning of `bytes`, which are all that the IP packet carries. Returns the
/// source port.
pub(crate) fn take(bytes: &mut &[u8]) -> Result<u16, Malformed> {
    let available = bytes.len();
    let wire: &Wire = take_wire(bytes).ok_or(Malformed::UdpCutOff)?;
    if wire.destination.get() != PORT {
        return Err(Malformed::NotRocePort);
    }
    if usize::from(wire.len.get()) != available {
        return Err(Malformed::UdpLength);
    }
    Ok(wire.source.get())
}

/// Writes a header to `writer`, which must have room; `len` counts the bytes from the header on.
pub(crate) fn put(writer: &mut Writer<'_>, source_port: u16, len: u16) {
    let wire = Wire {
        source: source_port.into(),
        destination: PORT.into(),
        len: len.into(),
        checksum: 0.into(),
    };
    writer.put_wire(&wire);
}

/// Writes the length of the datagram that `bytes` are into its header, and no checksum. Does nothing if
/// they are too few.
pub(crate) fn set_len(bytes: &mut [u8]) {
    let len = u16::try_from(bytes.len()).unwrap_or(u16::MAX);
    if let Ok((wire, _)) = Wire::mut_from_prefix(bytes) {
        wire.len = len.into();
        wire.checksum = 0.into();
    }
}

/// Writes the checksum of the datagram that `bytes` are. Does nothing if they are too few.
pub(crate) fn set_checksum(bytes: &mut [u8], checksum: u16) {
    if let Ok((wire, _)) = Wire::mut_from_prefix(bytes) {
        wire.checksum = checksum.into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(label: u32, local: u32, remote: u32) -> u16 {
        let qpn = |number| Qpn::new(number).unwrap();
        source_port(FlowLabel::new(label).unwrap(), qpn(local), qpn(remote))
    }

    /// The results of the kernel's function, which was compiled for this.
    #[test]
    fn port_is_that_of_the_kernel() {
        for (label, local, remote, expected) in [
            (0x0, 0x11, 0x12, 0xc132),
            (0x0, 0xff_ffff, 0xff_ffff, 0xff21),
            (0x0, 0x12_3456, 0x65_4321, 0xf787),
            (0x0, 0x0, 0x5, 0xc000),
            (0x1, 0x11, 0x12, 0xc001),
            (0xfffff, 0x0, 0x0, 0xffc0),
            (0xabcde, 0x7, 0x9, 0xfcf4),
            (0x3fff, 0x1, 0x1, 0xffff),
            (0x4000, 0x1, 0x1, 0xc001),
        ] {
            assert_eq!(port(label, local, remote), expected, "{label:#x} {local:#x} {remote:#x}");
            assert_eq!(port(label, remote, local), expected);
        }
    }
}
