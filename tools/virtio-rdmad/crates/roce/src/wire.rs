// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The conversion of headers from bytes and to bytes.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The bits of a 32-bit word that a QPN, a PSN or an MSN has; the other 8 hold something else.
pub(crate) const LOW_24: u32 = 0x00ff_ffff;

/// A header whose length on the wire is always the same.
pub(crate) trait Header: Sized {
    /// The header as it is on the wire.
    type Wire: FromBytes + Immutable + IntoBytes + KnownLayout + Unaligned + 'static;

    /// Reads the header. Reserved bits are ignored.
    fn from_wire(wire: &Self::Wire) -> Self;

    /// Returns the header as it is on the wire, with zeros for reserved bits.
    fn to_wire(&self) -> Self::Wire;
}

/// Takes what a header is on the wire from the beginning of `bytes`. Takes nothing and returns `None`
/// if there are not enough bytes.
pub(crate) fn take_wire<'a, W>(bytes: &mut &'a [u8]) -> Option<&'a W>
where
    W: FromBytes + Immutable + KnownLayout + Unaligned,
{
    let (wire, rest) = W::ref_from_prefix(bytes).ok()?;
    *bytes = rest;
    Some(wire)
}

/// Takes a header from the beginning of `bytes`. Takes nothing and returns `None` if there are not
/// enough bytes.
pub(crate) fn take<H: Header>(bytes: &mut &[u8]) -> Option<H> {
    take_wire(bytes).map(H::from_wire)
}

/// The place to which the headers of a packet are written, one behind the other.
pub(crate) struct Writer<'a>(&'a mut [u8]);

impl<'a> Writer<'a> {
    /// Makes a writer that begins at the beginning of `place`.
    pub(crate) fn new(place: &'a mut [u8]) -> Self {
        Self(place)
    }

    /// Writes what a header is on the wire. There must be room for it.
    pub(crate) fn put_wire<W: Immutable + IntoBytes>(&mut self, wire: &W) {
        let (first, rest) = std::mem::take(&mut self.0).split_at_mut(size_of::<W>());
        first.copy_from_slice(wire.as_bytes());
        self.0 = rest;
    }

    /// Writes a header. There must be room for it.
    pub(crate) fn put<H: Header>(&mut self, header: &H) {
        self.put_wire(&header.to_wire());
    }
}
