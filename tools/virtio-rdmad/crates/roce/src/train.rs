// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Trains: several packets in one frame, as the kernel's segmentation offload takes them and gives them
//! (the kernel's Documentation/networking/segmentation-offloads.rst, `VIRTIO_NET_HDR_GSO_UDP_L4` in
//! VIRTIO 1.3, 5.1.6.2).
//!
//! A train has the headers up to UDP once, with the lengths of the whole, and behind them what UDP
//! carries in each of the packets, which is called a segment. All segments are equally long, except that
//! the last one may be shorter. Segmentation gives each packet its own lengths, and the first
//! identification of IPv4 plus the number of the segment (`inet_gso_segment()` in the kernel's
//! `net/ipv4/af_inet.c`, with and without DF). ICRC covers these, so each segment has the ICRC that is
//! right after segmentation.

use std::ops::Range;

use zerocopy::FromBytes;

use crate::ethernet::{self, Ethernet};
use crate::ip::{self, Ip, Wire4, Wire6};
use crate::packet::{encode_with, segment_len, Headers, Unencodable};
use crate::{bth, icrc, udp};

/// The most bytes of a train. The kernel does not segment frames of 65536 bytes or more
/// (`GSO_LEGACY_MAX_SIZE`).
const MOST_BYTES: usize = 0xffff;
/// The most packets of a train (`UDP_MAX_SEGMENTS` in the kernel's `include/linux/udp.h`, before 6.9).
const MOST_SEGMENTS: usize = 64;
/// The bytes of the longest headers up to UDP: Ethernet with a tag, IPv6 and UDP.
const MOST_HEADERS: usize = 18 + 40 + udp::LEN;
/// The bytes of the shortest segment.
const SHORTEST: usize = bth::LEN + icrc::LEN;

/// A train that is being made.
#[derive(Debug, Default)]
pub struct Train {
    bytes: Vec<u8>,
    /// The bytes of `bytes` that are in use.
    len: usize,
    /// The headers of the first packet.
    first: Option<Headers>,
    /// The bytes of the first segment.
    segment: usize,
    segments: usize,
    /// Whether the last segment is shorter than the first, so that none can follow.
    is_closed: bool,
}

/// A train that is complete, or a frame with one packet.
#[derive(Debug)]
pub struct Segments<'a> {
    /// The frame.
    pub frame: &'a mut [u8],
    /// The bytes of each segment but the last; 0: the frame is one packet.
    pub segment: u16,
    /// The offset of the UDP header in the frame.
    pub udp: u16,
}

impl Train {
    /// Returns whether the train has no packet.
    pub fn is_empty(&self) -> bool {
        self.segments == 0
    }

    /// Returns whether a packet with these headers and so many bytes of payload may be added.
    pub fn takes(&self, headers: &Headers, payload: usize) -> bool {
        let Some(first) = &self.first else { return true };
        let len = segment_len(headers.bth.opcode, payload);
        !self.is_closed
            && self.segments < MOST_SEGMENTS
            && len <= self.segment
            && self.len + len <= MOST_BYTES
            && first.ethernet == headers.ethernet
            && first.ip == headers.ip
            && first.source_port == headers.source_port
    }

    /// Adds a packet that the train [takes](Train::takes). `fill` writes its payload of `payload` bytes;
    /// nothing is added if it fails.
    ///
    /// # Errors
    ///
    /// The errors of [`encode_with`], and outside of these the error of `fill`.
    pub fn push<E>(
        &mut self,
        headers: &Headers,
        payload: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Result<(), E>, Unencodable> {
        let before = headers_len(headers);
        let segment = segment_len(headers.bth.opcode, payload);
        // The packet is made where its segment belongs. Its headers lie upon the end of what is there,
        // which is put back.
        let start = if self.is_empty() { 0 } else { self.len.saturating_sub(before) };
        self.bytes.resize(MOST_BYTES, 0);
        let mut there = [0; MOST_HEADERS];
        there[..before].copy_from_slice(&self.bytes[start..start + before]);
        let mut filled = Ok(());
        let numbered = Headers { ip: headers.ip.numbered(self.segments), ..*headers };
        let made =
            encode_with(&numbered, payload, &mut self.bytes[start..], |at| filled = fill(at));
        if !self.is_empty() {
            self.bytes[start..start + before].copy_from_slice(&there[..before]);
        }
        let frame = match (made, filled) {
            (Ok(frame), Ok(())) => frame,
            (made, filled) => return made.map(|_| filled),
        };
        if self.is_empty() {
            self.first = Some(*headers);
            self.segment = segment;
        }
        self.is_closed = segment < self.segment;
        self.segments += 1;
        self.len = start + frame;
        Ok(Ok(()))
    }

    /// Gives `send` the train, unless it is empty, and empties it.
    pub fn take(&mut self, send: impl FnOnce(Segments<'_>)) {
        let Some(first) = self.first.take() else { return };
        let is_one = self.segments == 1;
        let frame = &mut self.bytes[..std::mem::take(&mut self.len)];
        let udp = headers_len(&first) - udp::LEN;
        if !is_one {
            let ip = first.ethernet.len();
            set_lengths(&mut frame[ip..], 0);
            put_checksum(&mut frame[ip..], &first.ip);
        }
        let segment = if is_one { 0 } else { self.segment };
        (self.segments, self.is_closed) = (0, false);
        // Both are at most `MOST_BYTES`.
        let [segment, udp] = [segment, udp].map(|bytes| u16::try_from(bytes).unwrap_or(0));
        send(Segments { frame, segment, udp });
    }
}

/// Returns the bytes of the headers up to UDP.
fn headers_len(headers: &Headers) -> usize {
    headers.ethernet.len() + headers.ip.len() + udp::LEN
}

/// Writes the lengths of the IP packet that `packet` is into its headers, and no UDP checksum, and adds
/// `number` to its identification. Does nothing if `packet` is too short.
fn set_lengths(packet: &mut [u8], number: usize) {
    let total = packet.len();
    let udp = match packet.first().map(|byte| byte >> 4) {
        Some(4) => {
            let Ok((header, rest)) = Wire4::mut_from_prefix(packet) else { return };
            header.number(total, number);
            rest
        }
        Some(6) => {
            let Ok((header, rest)) = Wire6::mut_from_prefix(packet) else { return };
            header.set_len(rest.len());
            rest
        }
        _ => return,
    };
    udp::set_len(udp);
}

/// Writes what the kernel wants in place of the UDP checksum, which it completes: the sum of the
/// pseudo-header (`struct virtio_net_hdr`, `VIRTIO_NET_HDR_F_NEEDS_CSUM`).
fn put_checksum(packet: &mut [u8], ip: &Ip) {
    let Some(udp) = packet.get_mut(ip.len()..) else { return };
    let sum = ip.pseudo_sum(udp.len());
    udp::set_checksum(udp, sum);
}

/// The state of taking a train apart into frames, one for each packet.
///
/// The frames are made within the train: the headers of a packet lie upon the end of the packet before
/// it. So each frame is used before the next one is taken, and the train can be taken apart once.
#[derive(Clone, Debug)]
pub struct Split {
    headers: [u8; MOST_HEADERS],
    /// The offsets of the IP header and of the first segment.
    ip: usize,
    start: usize,
    /// The bytes of each segment but the last; 0: the frame is one packet.
    segment: usize,
    /// Segments that were taken.
    taken: usize,
    is_done: bool,
}

impl Split {
    /// Begins to take a train apart; `segment` is as in [`Segments`]. A frame that is no train of
    /// packets of RoCE v2, as far as its headers and the length of its segments tell, counts as one
    /// packet.
    pub fn new(frame: &[u8], segment: u16) -> Self {
        let mut headers = [0; MOST_HEADERS];
        let bounds = bounds(frame).filter(|_| usize::from(segment) >= SHORTEST);
        let (ip, start) = bounds.unwrap_or((0, 0));
        headers[..start].copy_from_slice(&frame[..start]);
        let segment = if start == 0 { 0 } else { segment.into() };
        Self { headers, ip, start, segment, taken: 0, is_done: false }
    }

    /// Returns where in the train the next packet is, as a frame; `None` if there is no other.
    /// `frame` is the train that this was begun with.
    pub fn next(&mut self, frame: &mut [u8]) -> Option<Range<usize>> {
        if self.segment == 0 {
            return (!std::mem::replace(&mut self.is_done, true)).then_some(0..frame.len());
        }
        let at = self.taken * self.segment;
        let end = frame.len().min(at + self.start + self.segment);
        if end <= at + self.start {
            return None;
        }
        let packet = &mut frame[at..end];
        packet[..self.start].copy_from_slice(&self.headers[..self.start]);
        set_lengths(&mut packet[self.ip..], self.taken);
        self.taken += 1;
        Some(at..end)
    }
}

/// Returns where IP begins in a frame, and where UDP ends.
fn bounds(frame: &[u8]) -> Option<(usize, usize)> {
    let mut rest = frame;
    let (_, kind) = Ethernet::take(&mut rest).ok()?;
    let ip = frame.len() - rest.len();
    let header = match kind {
        ethernet::IPV4 => ip::take_v4(&mut rest).ok()?.len(),
        ethernet::IPV6 => ip::take_v6(&mut rest).ok()?.len(),
        _ => return None,
    };
    let start = ip + header + udp::LEN;
    (start <= frame.len()).then_some((ip, start))
}
