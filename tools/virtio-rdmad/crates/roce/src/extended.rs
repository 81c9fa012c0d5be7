// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The headers that follow the BTH.

use zerocopy::big_endian::U64;

use crate::aeth::Aeth;
use crate::atomic_eth::{AtomicAckEth, AtomicEth};
use crate::deth::Deth;
use crate::feth::Feth;
use crate::ieth::Ieth;
use crate::imm::ImmDt;
use crate::reth::Reth;
use crate::sack::SackEth;
use crate::wire::{take, take_wire, Header, Writer};
use crate::xrceth::Xrceth;

/// A kind of header that follows the BTH (IBA 9.3).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum ExtendedHeader {
    /// The SRQ of XRC.
    Xrceth,
    /// Q_Key and source of a datagram.
    Deth,
    /// The placement type and the selectivity level of a FLUSH.
    Feth,
    /// Memory of the responder.
    Reth,
    /// The operands of an atomic.
    AtomicEth,
    /// The syndrome and the MSN of an acknowledgement.
    Aeth,
    /// The result of an atomic.
    AtomicAckEth,
    /// Immediate data.
    ImmDt,
    /// The key that a SEND invalidates.
    Ieth,
    /// The packets that a responder holds behind a missing packet.
    SackEth,
    /// 16 reserved bytes, which are all that a CNP has after the BTH (IBA A17.9).
    CnpReserved,
}

/// The reserved bytes of a CNP after the BTH, on the wire.
type CnpWire = [U64; 2];

impl ExtendedHeader {
    /// Returns the bytes of the header.
    #[allow(clippy::len_without_is_empty)] // No header is empty.
    pub const fn len(self) -> usize {
        const fn of<H: Header>() -> usize {
            size_of::<H::Wire>()
        }
        match self {
            Self::Xrceth => of::<Xrceth>(),
            Self::Deth => of::<Deth>(),
            Self::Feth => of::<Feth>(),
            Self::Reth => of::<Reth>(),
            Self::AtomicEth => of::<AtomicEth>(),
            Self::Aeth => of::<Aeth>(),
            Self::AtomicAckEth => of::<AtomicAckEth>(),
            Self::ImmDt => of::<ImmDt>(),
            Self::Ieth => of::<Ieth>(),
            Self::SackEth => of::<SackEth>(),
            Self::CnpReserved => size_of::<CnpWire>(),
        }
    }
}

/// The headers that follow the BTH of one packet.
///
/// A packet has exactly those of its [opcode](crate::Opcode::extended_headers). The reserved bytes of a
/// CNP are no field: they are ignored, and sent as zeros.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ExtendedHeaders {
    /// The SRQ of XRC.
    pub xrceth: Option<Xrceth>,
    /// Q_Key and source of a datagram.
    pub deth: Option<Deth>,
    /// The placement type and the selectivity level of a FLUSH.
    pub feth: Option<Feth>,
    /// Memory of the responder.
    pub reth: Option<Reth>,
    /// The operands of an atomic.
    pub atomic_eth: Option<AtomicEth>,
    /// The syndrome and the MSN of an acknowledgement.
    pub aeth: Option<Aeth>,
    /// The result of an atomic.
    pub atomic_ack_eth: Option<AtomicAckEth>,
    /// Immediate data.
    pub imm_dt: Option<ImmDt>,
    /// The key that a SEND invalidates.
    pub ieth: Option<Ieth>,
    /// The packets that a responder holds behind a missing packet.
    pub sack_eth: Option<SackEth>,
}

/// Returns the bytes of these headers.
pub(crate) fn len(headers: &[ExtendedHeader]) -> usize {
    headers.iter().map(|header| header.len()).sum()
}

impl ExtendedHeaders {
    /// Takes these headers from the beginning of `bytes`. Returns `None` if there are not enough bytes.
    pub(crate) fn take(headers: &[ExtendedHeader], bytes: &mut &[u8]) -> Option<Self> {
        let mut taken = Self::default();
        for header in headers {
            match header {
                ExtendedHeader::Xrceth => taken.xrceth = Some(take(bytes)?),
                ExtendedHeader::Deth => taken.deth = Some(take(bytes)?),
                ExtendedHeader::Feth => taken.feth = Some(take(bytes)?),
                ExtendedHeader::Reth => taken.reth = Some(take(bytes)?),
                ExtendedHeader::AtomicEth => taken.atomic_eth = Some(take(bytes)?),
                ExtendedHeader::Aeth => taken.aeth = Some(take(bytes)?),
                ExtendedHeader::AtomicAckEth => taken.atomic_ack_eth = Some(take(bytes)?),
                ExtendedHeader::ImmDt => taken.imm_dt = Some(take(bytes)?),
                ExtendedHeader::Ieth => taken.ieth = Some(take(bytes)?),
                ExtendedHeader::SackEth => taken.sack_eth = Some(take(bytes)?),
                ExtendedHeader::CnpReserved => {
                    take_wire::<CnpWire>(bytes)?;
                }
            }
        }
        Some(taken)
    }

    /// Writes these headers to `writer`, which must have room. Fails with the first one that is missing.
    pub(crate) fn put(
        &self,
        headers: &[ExtendedHeader],
        writer: &mut Writer<'_>,
    ) -> Result<(), ExtendedHeader> {
        fn put_one<H: Header>(writer: &mut Writer<'_>, header: Option<&H>) -> Option<()> {
            writer.put(header?);
            Some(())
        }
        for header in headers {
            let done = match header {
                ExtendedHeader::Xrceth => put_one(writer, self.xrceth.as_ref()),
                ExtendedHeader::Deth => put_one(writer, self.deth.as_ref()),
                ExtendedHeader::Feth => put_one(writer, self.feth.as_ref()),
                ExtendedHeader::Reth => put_one(writer, self.reth.as_ref()),
                ExtendedHeader::AtomicEth => put_one(writer, self.atomic_eth.as_ref()),
                ExtendedHeader::Aeth => put_one(writer, self.aeth.as_ref()),
                ExtendedHeader::AtomicAckEth => put_one(writer, self.atomic_ack_eth.as_ref()),
                ExtendedHeader::ImmDt => put_one(writer, self.imm_dt.as_ref()),
                ExtendedHeader::Ieth => put_one(writer, self.ieth.as_ref()),
                ExtendedHeader::SackEth => put_one(writer, self.sack_eth.as_ref()),
                ExtendedHeader::CnpReserved => {
                    writer.put_wire(&CnpWire::default());
                    Some(())
                }
            };
            done.ok_or(*header)?;
        }
        Ok(())
    }

    /// Returns a header that is there and not among `headers`.
    pub(crate) fn beyond(&self, headers: &[ExtendedHeader]) -> Option<ExtendedHeader> {
        let present = [
            (ExtendedHeader::Xrceth, self.xrceth.is_some()),
            (ExtendedHeader::Deth, self.deth.is_some()),
            (ExtendedHeader::Feth, self.feth.is_some()),
            (ExtendedHeader::Reth, self.reth.is_some()),
            (ExtendedHeader::AtomicEth, self.atomic_eth.is_some()),
            (ExtendedHeader::Aeth, self.aeth.is_some()),
            (ExtendedHeader::AtomicAckEth, self.atomic_ack_eth.is_some()),
            (ExtendedHeader::ImmDt, self.imm_dt.is_some()),
            (ExtendedHeader::Ieth, self.ieth.is_some()),
            (ExtendedHeader::SackEth, self.sack_eth.is_some()),
        ];
        present
            .into_iter()
            .find_map(|(header, is)| (is && !headers.contains(&header)).then_some(header))
    }
}
