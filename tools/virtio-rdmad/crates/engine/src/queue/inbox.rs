// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The inbox of a guest: frames that came over the wire, and that its thread has not looked into.
//!
//! A frame is a packet, or a train of packets that the network did not take apart. The thread that
//! brings frames adds them to a heap. The guest's thread takes the whole heap, and gives back an empty
//! one; so there are two heaps, no frame has memory of its own, and the lock is held for a moment.

use roce::Split;

/// Bytes that a heap holds. What comes when it is full is lost, as in any network.
const MOST_BYTES: usize = 4 << 20;

/// Where a frame is in a heap.
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
}

impl Heap {
    /// Adds a frame; `false` if there is no room.
    fn push(&mut self, frame: &[u8], segment: u16) -> bool {
        if self.bytes.len() + frame.len() > MOST_BYTES {
            return false;
        }
        self.bytes.extend_from_slice(frame);
        self.frames.push(Frame { len: frame.len(), segment });
        true
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
    }
}

/// Frames, oldest first.
#[derive(Default)]
pub(crate) struct Inbox {
    arriving: Heap,
    under_way: Heap,
}

impl Inbox {
    /// Adds a frame; `false` if there is no room. `segment` is as in [`roce::Segments`].
    pub fn push(&mut self, frame: &[u8], segment: u16) -> bool {
        self.arriving.push(frame, segment)
    }

    /// Takes the oldest frames. They are to be [put back](Inbox::put_back), with what is left of them.
    pub fn take(&mut self) -> Heap {
        if self.under_way.is_empty() {
            self.under_way.clear();
            std::mem::swap(&mut self.arriving, &mut self.under_way);
        }
        std::mem::take(&mut self.under_way)
    }

    /// Puts back what was taken. Returns whether a frame is left.
    pub fn put_back(&mut self, heap: Heap) -> bool {
        self.under_way = heap;
        !self.under_way.is_empty() || !self.arriving.is_empty()
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}
