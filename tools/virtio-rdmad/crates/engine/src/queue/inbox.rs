// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The inbox of a guest: frames that came over the wire, and that its thread has not looked into.
//!
//! A frame is a packet, or a train of packets that the network did not take apart. The thread that
//! brings frames adds them to a heap. The guest's thread takes the whole heap, and gives back an empty
//! one; so there are two heaps, no frame has memory of its own, and the lock is held for a moment.
//!
//! A single source, whoever it is, has three quarters of a heap at most. So one that sends more than the guest's thread
//! looks into does not keep the frames of others out.
//!
//! A heap that is half full is crowded. The senders of its packets are told to send more slowly, as if the network had
//! marked the packets: many peers, such as adapters, have no window, and send at the rate of their line until then.

use roce::Split;

use crate::base::address::Gid;
use crate::base::image::abi_bytes::Bytes;
use crate::base::image::{require, Wrong};

/// Bytes that a heap holds. What comes when it is full is lost, as in any network.
const MOST_BYTES: usize = 4 << 20;

/// Parts that the sources of frames are divided into, by address.
const PARTS: usize = 32;

/// A part of the sources leaves room for others: for each so many bytes that it has in a heap, one is free.
const LEFT: usize = 3;

/// Bytes of all frames that wait: of both heaps, and of the headers of a train that was taken apart.
const MOST_SAVED: usize = 4 * MOST_BYTES;

/// The image of a frame: its bytes, and the bytes of a segment if it is a train.
pub(crate) type FrameImage = (Bytes, u16);

/// The place of a frame in a heap.
struct Frame {
    len: usize,
    /// The bytes of a segment of a train; 0: the frame is one packet.
    segment: u16,
}

/// Frames, one behind the other, and how many of them were taken.
#[derive(Default)]
pub(crate) struct Heap {
    bytes: Vec<u8>,
    frames: Vec<Frame>,
    /// Frames that were taken, and where the next one begins.
    taken: usize,
    at: usize,
    /// The train under way.
    split: Option<Split>,
    /// Whether it is crowded, or has been.
    pub is_crowded: bool,
}

impl Heap {
    fn append(&mut self, frame: &[u8], segment: u16) {
        self.bytes.extend_from_slice(frame);
        self.frames.push(Frame { len: frame.len(), segment });
    }

    /// Takes the packets that are left of the train that is being taken apart, if there is one.
    fn take_train(&mut self) -> Option<Vec<Vec<u8>>> {
        let mut split = self.split.take()?;
        let len = self.frames.get(self.taken)?.len;
        let frame = self.bytes.get_mut(self.at..self.at + len)?;
        (self.taken, self.at) = (self.taken + 1, self.at + len);
        let mut packets = Vec::new();
        while let Some(range) = split.next(frame) {
            packets.push(frame.get(range)?.to_vec());
        }
        Some(packets)
    }

    /// Returns the frames that were not taken.
    fn rest(&self) -> impl Iterator<Item = (&[u8], u16)> {
        let frames = self.frames.get(self.taken..).unwrap_or_default();
        frames.iter().scan(self.at, |at, Frame { len, segment }| {
            let frame = self.bytes.get(*at..*at + len)?;
            *at += len;
            Some((frame, *segment))
        })
    }

    /// Takes the oldest packet, as a frame.
    #[inline]
    pub fn pop(&mut self) -> Option<&[u8]> {
        let (at, range) = loop {
            let Frame { len, segment } = *self.frames.get(self.taken)?;
            let frame = self.bytes.get_mut(self.at..self.at + len)?;
            let split = self.split.get_or_insert_with(|| Split::new(frame, segment));
            if let Some(range) = split.next(frame) {
                break (self.at, range);
            }
            self.split = None;
            self.taken += 1;
            self.at += len;
        };
        self.bytes.get(at + range.start..at + range.end)
    }

    /// Returns whether no frame is left.
    fn is_empty(&self) -> bool {
        self.taken == self.frames.len()
    }

    /// Forgets all frames.
    fn clear(&mut self) {
        self.bytes.clear();
        self.frames.clear();
        (self.taken, self.at, self.split) = (0, 0, None);
        self.is_crowded = false;
    }
}

/// Frames, oldest first.
#[derive(Default)]
pub(crate) struct Inbox {
    arriving: Heap,
    under_way: Heap,
    /// Bytes of the heap that arrives, by the part that their source is in.
    by_part: [usize; PARTS],
}

impl Inbox {
    /// Adds a frame of a source; `false` if there is no room, or if the part of the source would not leave what it has
    /// to leave to others. `segment` is as in [`roce::Segments`].
    pub fn push(&mut self, source: &Gid, frame: &[u8], segment: u16) -> bool {
        let of_part = &mut self.by_part[part_of(source)];
        let (all, own) = (self.arriving.bytes.len() + frame.len(), *of_part + frame.len());
        self.arriving.is_crowded |= all > MOST_BYTES / 2;
        if all + own / LEFT > MOST_BYTES {
            return false;
        }
        *of_part = own;
        self.arriving.append(frame, segment);
        true
    }

    /// Takes the oldest frames. The heap is to be [put back](Inbox::put_back), with the frames that are left of it.
    pub fn take(&mut self) -> Heap {
        if self.under_way.is_empty() {
            self.under_way.clear();
            self.by_part = [0; PARTS];
            std::mem::swap(&mut self.arriving, &mut self.under_way);
        }
        std::mem::take(&mut self.under_way)
    }

    /// Puts a heap back. Returns whether a frame is left.
    pub fn put_back(&mut self, heap: Heap) -> bool {
        self.under_way = heap;
        !self.under_way.is_empty() || !self.arriving.is_empty()
    }

    /// Returns the frames that wait. A train that is being taken apart is one no more.
    pub fn save(&mut self) -> Vec<FrameImage> {
        let mut heap = Heap::default();
        for packet in self.under_way.take_train().unwrap_or_default() {
            heap.append(&packet, 0);
        }
        for (frame, segment) in self.under_way.rest() {
            heap.append(frame, segment);
        }
        self.under_way = heap;
        let all = self.under_way.rest().chain(self.arriving.rest());
        all.map(|(frame, segment)| (Bytes(frame.to_vec()), segment)).collect()
    }

    /// Takes over frames that wait.
    pub fn load(&mut self, frames: &[FrameImage]) -> Result<(), Wrong> {
        let bytes: usize = frames.iter().map(|(frame, _)| frame.0.len()).sum();
        require(bytes <= MOST_SAVED, "too many bytes wait")?;
        for (frame, segment) in frames {
            self.under_way.append(&frame.0, *segment);
        }
        Ok(())
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Returns the part that a source is in.
fn part_of(source: &Gid) -> usize {
    let [.., a, b, c, d] = *source;
    let mixed = u32::from_be_bytes([a, b, c, d]).wrapping_mul(0x9e37_79b1);
    (mixed >> 24) as usize % PARTS
}
