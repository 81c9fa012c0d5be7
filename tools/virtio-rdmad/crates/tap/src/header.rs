// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The header of VIRTIO in front of each frame (`struct virtio_net_hdr`, VIRTIO 1.3, 5.1.6). The machines
//! that this runs on are little-endian, as the header is.

/// The bytes of the header.
pub const LEN: usize = 10;

/// VIRTIO_NET_HDR_F_NEEDS_CSUM: the checksum is to be completed.
const NEEDS_CSUM: u8 = 1;
/// VIRTIO_NET_HDR_GSO_UDP_L4: the frame is a train of UDP datagrams.
const GSO_UDP_L4: u8 = 5;
/// The offset of the checksum in a UDP header, and the bytes of that header.
const UDP_CHECKSUM: u16 = 6;
const UDP_HEADER: u16 = 8;

/// The shape of a train of UDP datagrams, whose bytes are in one frame.
#[derive(Clone, Copy, Debug)]
pub struct TrainShape {
    /// The bytes of each datagram but the last, without its headers. The last one has as many or fewer.
    pub segment: u16,
    /// The offset of the UDP header in the frame. In place of its checksum the header has the sum of the pseudo-header.
    pub udp: u16,
}

/// Returns the header of a frame that is given to the kernel.
pub fn encode(train: Option<TrainShape>) -> [u8; LEN] {
    let mut header = [0; LEN];
    if let Some(TrainShape { segment, udp }) = train {
        header[0] = NEEDS_CSUM;
        header[1] = GSO_UDP_L4;
        let words = [udp + UDP_HEADER, segment, udp, UDP_CHECKSUM];
        for (place, word) in header[2..].chunks_exact_mut(2).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
    }
    header
}

/// Returns the bytes of a segment, by the header of a frame that the kernel gave; 0 if the frame is no
/// train.
pub fn segment(header: [u8; LEN]) -> u16 {
    let [_, kind, _, _, low, high, ..] = header;
    if kind == GSO_UDP_L4 {
        u16::from_le_bytes([low, high])
    } else {
        0
    }
}
