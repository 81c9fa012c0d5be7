// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whole packets: frames to headers and payload, and back.

use thiserror::Error;

use crate::bth::Bth;
use crate::ethernet::{self, Ethernet};
use crate::extended::{self, ExtendedHeader, ExtendedHeaders};
use crate::gid::Gid;
use crate::icrc::{self, icrc};
use crate::ip::{self, Ip};
use crate::opcode::Opcode;
use crate::wire::Writer;
use crate::{bth, udp, Malformed};

/// The headers of a packet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Headers {
    /// The Ethernet header.
    pub ethernet: Ethernet,
    /// The IP header.
    pub ip: Ip,
    /// The UDP source port. The destination port is always 4791.
    pub source_port: u16,
    /// The base transport header.
    pub bth: Bth,
    /// The headers that follow it.
    pub extended: ExtendedHeaders,
}

/// A packet that was received.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// The headers.
    pub headers: Headers,
    /// The payload, without the pad.
    pub payload: &'a [u8],
    /// The IP header as it was in the frame.
    ip_header: &'a [u8],
}

/// The bytes of a global route header.
const GRH: usize = 40;

impl<'a> Packet<'a> {
    /// Returns a packet that was received before, of what was kept of it: its headers and its payload. Its
    /// global route header was not kept.
    pub const fn kept(headers: Headers, payload: &'a [u8]) -> Self {
        Self { headers, payload, ip_header: &[] }
    }

    /// Returns what stands in front of the payload in the memory of a datagram's receiver, in place of
    /// the global route header: the IPv6 header, or 20 zeros and the IPv4 header (`rdma_network_hdr` in
    /// the kernel's `include/rdma/ib_verbs.h`).
    pub fn grh(&self) -> [u8; GRH] {
        let mut grh = [0; GRH];
        grh[GRH - self.ip_header.len()..].copy_from_slice(self.ip_header);
        grh
    }
}

/// The reason why [`encode`] makes no frame. Each of these reasons is a mistake of the caller.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum Unencodable {
    /// The opcode needs this header.
    #[error("the header {0:?} is missing")]
    HeaderMissing(ExtendedHeader),
    /// The opcode does not have this header.
    #[error("the opcode does not have the header {0:?}")]
    HeaderUnexpected(ExtendedHeader),
    /// The opcode does not allow payload.
    #[error("the opcode does not allow payload")]
    PayloadUnexpected,
    /// The packet would be longer than IP allows.
    #[error("{payload} bytes of payload are more than an IP packet can hold")]
    PayloadTooLong {
        /// The bytes of the payload.
        payload: usize,
    },
    /// The frame does not fit.
    #[error("the frame has {needed} bytes, and there is room for {room}")]
    NoRoom {
        /// The bytes of the frame.
        needed: usize,
        /// The bytes that there are.
        room: usize,
    },
}

/// Returns the GID that a frame is sent to, and the VLAN that it is in, if any. Returns `None` unless the
/// frame is a packet of RoCE v2 as far as its headers up to UDP tell; no checksum of the packet is
/// looked at.
pub fn destination(frame: &[u8]) -> Option<(Gid, Option<u16>)> {
    take_up_to_udp(frame).map(|(ip, vlan)| (ip.destination_gid(), vlan))
}

/// Returns the GID that a frame says that it comes from, and the VLAN that it is in, under the conditions of
/// [`destination`].
pub fn source(frame: &[u8]) -> Option<(Gid, Option<u16>)> {
    take_up_to_udp(frame).map(|(ip, vlan)| (ip.source_gid(), vlan))
}

/// Reads the headers of a packet of RoCE v2 up to UDP.
fn take_up_to_udp(frame: &[u8]) -> Option<(Ip, Option<u16>)> {
    let mut rest = frame;
    let (ethernet, kind) = Ethernet::take(&mut rest).ok()?;
    let ip = match kind {
        ethernet::IPV4 => ip::take_v4(&mut rest).ok()?,
        ethernet::IPV6 => ip::take_v6(&mut rest).ok()?,
        _ => return None,
    };
    udp::take(&mut rest).ok()?;
    Some((ip, ethernet.vlan_id()))
}

/// Reads a frame, which begins with its Ethernet header and has no frame check sequence. Everything that
/// can be said of a packet by itself is checked, ICRC last.
pub fn decode(frame: &[u8]) -> Result<Packet<'_>, Malformed> {
    let mut rest = frame;
    let (ethernet, kind) = Ethernet::take(&mut rest)?;
    let from_ip = rest;
    let ip = match kind {
        ethernet::IPV4 => ip::take_v4(&mut rest)?,
        ethernet::IPV6 => ip::take_v6(&mut rest)?,
        _ => return Err(Malformed::NotIp),
    };
    let packet = &from_ip[..ip.len() + rest.len()];
    let source_port = udp::take(&mut rest)?;

    let (mut rest, received_icrc) =
        rest.split_last_chunk::<{ icrc::LEN }>().ok_or(Malformed::BthCutOff)?;
    let (bth, pad) = Bth::take(&mut rest)?;
    let extended = ExtendedHeaders::take(bth.opcode.extended_headers(), &mut rest)
        .ok_or(Malformed::ExtendedHeaderCutOff)?;
    let payload = match rest.len().checked_sub(pad) {
        Some(len) if rest.len() % 4 == 0 => &rest[..len],
        _ => return Err(Malformed::PadCount),
    };
    if !payload.is_empty() && !bth.opcode.may_carry_payload() {
        return Err(Malformed::UnexpectedPayload);
    }
    if icrc(&packet[..packet.len() - icrc::LEN]) != Some(*received_icrc) {
        return Err(Malformed::Icrc);
    }
    let headers = Headers { ethernet, ip, source_port, bth, extended };
    Ok(Packet { headers, payload, ip_header: &packet[..ip.len()] })
}

/// Writes a packet with this payload to the beginning of `frame`. Returns the bytes of the packet. The
/// pad, the lengths, the checksum of IPv4 and the ICRC follow from the rest; there is no UDP checksum.
///
/// Fails if the headers do not belong to the opcode or if the packet is too long; `frame` may have been
/// written to then.
pub fn encode(headers: &Headers, payload: &[u8], frame: &mut [u8]) -> Result<usize, Unencodable> {
    encode_with(headers, payload.len(), frame, |place| place.copy_from_slice(payload))
}

/// Returns the bytes that UDP carries in a packet with a payload of `payload` bytes.
pub(crate) fn segment_len(opcode: Opcode, payload: usize) -> usize {
    let headers = bth::LEN + extended::len(opcode.extended_headers()) + icrc::LEN;
    payload.div_ceil(4).saturating_mul(4).saturating_add(headers)
}

/// Does the same as [`encode`] with a payload of `payload` bytes, which `fill` writes to its place in
/// the frame. This saves a copy where the payload is not in one slice.
pub fn encode_with(
    headers: &Headers,
    payload: usize,
    frame: &mut [u8],
    fill: impl FnOnce(&mut [u8]),
) -> Result<usize, Unencodable> {
    let opcode = headers.bth.opcode;
    let extended = opcode.extended_headers();
    if let Some(header) = headers.extended.beyond(extended) {
        return Err(Unencodable::HeaderUnexpected(header));
    }
    if payload > 0 && !opcode.may_carry_payload() {
        return Err(Unencodable::PayloadUnexpected);
    }
    let too_long = Unencodable::PayloadTooLong { payload };
    let padded = payload.checked_next_multiple_of(4).ok_or(too_long)?;
    let transport = bth::LEN + extended::len(extended);
    let datagram = padded.checked_add(udp::LEN + transport + icrc::LEN).ok_or(too_long)?;
    if datagram > headers.ip.max_payload() {
        return Err(too_long);
    }
    let datagram_len = u16::try_from(datagram).map_err(|_| too_long)?;

    let ip_start = headers.ethernet.len();
    let needed = ip_start + headers.ip.len() + datagram;
    let room = frame.len();
    let frame = frame.get_mut(..needed).ok_or(Unencodable::NoRoom { needed, room })?;
    let (covered, icrc_place) = frame.split_at_mut(needed - icrc::LEN);

    let (headers_place, payload_place) = covered.split_at_mut(needed - icrc::LEN - padded);
    let (payload_place, pad_place) = payload_place.split_at_mut(payload);
    let mut writer = Writer::new(headers_place);
    let kind = match headers.ip {
        Ip::V4(_) => ethernet::IPV4,
        Ip::V6(_) => ethernet::IPV6,
    };
    headers.ethernet.put(&mut writer, kind);
    headers.ip.put(&mut writer, datagram_len);
    udp::put(&mut writer, headers.source_port, datagram_len);
    headers.bth.put(&mut writer, pad_place.len());
    headers.extended.put(extended, &mut writer).map_err(Unencodable::HeaderMissing)?;
    fill(payload_place);
    pad_place.fill(0);
    if let Some(icrc) = icrc(&covered[ip_start..]) {
        icrc_place.copy_from_slice(&icrc);
    }
    Ok(needed)
}
