// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Frames in a stream: the length of each stands in front of it, in 32 bits, big-endian (QEMU's `-netdev
//! stream`, its net/stream.c).

use std::ops::Range;

/// The bytes of the shortest frame, its Ethernet header, and of the longest.
const SHORTEST: usize = 14;
const LONGEST: usize = 0xffff;
/// The bytes of a length.
const LENGTH: usize = 4;
/// Bytes that are read at once.
const ROOM: usize = 128 << 10;

/// Returns whether a frame of so many bytes can be: it has an Ethernet header, and is not too long.
pub fn is_possible(len: usize) -> bool {
    (SHORTEST..=LONGEST).contains(&len)
}

/// A length in a stream is that of no frame, so nobody knows where the next frame begins.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("a frame of {0} bytes")]
pub struct BadLength(pub usize);

/// Returns what stands in front of a frame; `None` if the frame is too long for it.
pub fn length(frame: &[u8]) -> Option<[u8; LENGTH]> {
    Some(u32::try_from(frame.len()).ok()?.to_be_bytes())
}

/// Finds the frames in a stream that comes in parts.
#[derive(Debug)]
pub struct Reader {
    room: Vec<u8>,
    /// The part of `room` with bytes that have come and were not taken.
    filled: Range<usize>,
}

impl Default for Reader {
    fn default() -> Self {
        Self { room: vec![0; ROOM], filled: 0..0 }
    }
}

impl Reader {
    /// Returns where the next part is to be put. This is never empty if [`Reader::take`] has returned
    /// `None`. Frames that were taken are overwritten.
    pub fn room(&mut self) -> &mut [u8] {
        self.room.copy_within(self.filled.clone(), 0);
        self.filled = 0..self.filled.len();
        &mut self.room[self.filled.end..]
    }

    /// Adds what was put to the beginning of the [room](Reader::room).
    pub fn add(&mut self, len: usize) {
        self.filled.end = (self.filled.end + len).min(self.room.len());
    }

    /// Takes the next frame. Returns where it is ([`Reader::frame`]); `None` if it has not come whole.
    ///
    /// # Errors
    ///
    /// The stream has to end.
    pub fn take(&mut self) -> Result<Option<Range<usize>>, BadLength> {
        let there = &self.room[self.filled.clone()];
        let Some(length) = there.first_chunk::<LENGTH>() else { return Ok(None) };
        let length = u32::from_be_bytes(*length) as usize;
        if !is_possible(length) {
            return Err(BadLength(length));
        }
        if there.len() < LENGTH + length {
            return Ok(None);
        }
        let start = self.filled.start + LENGTH;
        self.filled.start = start + length;
        Ok(Some(start..start + length))
    }

    /// Returns a frame that was taken last.
    pub fn frame(&mut self, range: Range<usize>) -> &mut [u8] {
        &mut self.room[range]
    }
}

/// The bytes that are to be written to a stream and were not taken by the other end yet.
#[derive(Debug, Default)]
pub struct Rest {
    bytes: Vec<u8>,
}

impl Rest {
    /// Returns whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns whether a frame of so many bytes may wait as well, where `most` bytes may.
    pub fn has_room(&self, frame: usize, most: usize) -> bool {
        self.bytes.len().saturating_add(LENGTH).saturating_add(frame) <= most
    }

    /// Adds a frame and its length, without their first `taken` bytes.
    pub fn add(&mut self, length: [u8; LENGTH], frame: &[u8], taken: usize) {
        let of_length = taken.min(LENGTH);
        self.bytes.extend_from_slice(&length[of_length..]);
        self.bytes.extend_from_slice(frame.get(taken - of_length..).unwrap_or_default());
    }

    /// Gives `write` what waits until nothing does or `write` takes nothing. It returns how many bytes it
    /// has taken.
    pub fn flush(&mut self, mut write: impl FnMut(&[u8]) -> Option<usize>) {
        let mut taken = 0;
        while let Some(rest) = self.bytes.get(taken..).filter(|rest| !rest.is_empty()) {
            match write(rest) {
                None | Some(0) => break,
                Some(count) => taken += count.min(rest.len()),
            }
        }
        self.bytes.drain(..taken);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn framed(frame: &[u8]) -> Vec<u8> {
        [&length(frame).unwrap()[..], frame].concat()
    }

    /// Puts a part into the room.
    fn put(reader: &mut Reader, part: &[u8]) {
        reader.room()[..part.len()].copy_from_slice(part);
        reader.add(part.len());
    }

    #[test]
    fn frames_come_in_parts() {
        let frames = [vec![1; SHORTEST], vec![2; LONGEST], vec![3; 1500], vec![4; LONGEST]];
        let stream: Vec<u8> = frames.iter().flat_map(|frame| framed(frame)).collect();
        for part in [1, 3, 1000, 60_000] {
            let (mut reader, mut came) = (Reader::default(), Vec::new());
            for part in stream.chunks(part) {
                put(&mut reader, part);
                while let Some(range) = reader.take().unwrap() {
                    came.push(reader.frame(range).to_vec());
                }
            }
            assert!(came == frames, "{part}");
        }
    }

    #[test]
    fn what_is_no_length_ends_the_stream() {
        for bad in [0, SHORTEST - 1, LONGEST + 1, u32::MAX as usize] {
            let mut reader = Reader::default();
            put(&mut reader, &framed(&[7; SHORTEST]));
            put(&mut reader, &u32::try_from(bad).unwrap().to_be_bytes());
            assert_eq!(reader.take(), Ok(Some(LENGTH..LENGTH + SHORTEST)));
            assert_eq!(reader.take(), Err(BadLength(bad)));
        }
    }

    #[test]
    fn what_is_not_taken_waits() {
        let frame = [9; 20];
        for taken in 0..=24 {
            let mut rest = Rest::default();
            rest.add(length(&frame).unwrap(), &frame, taken);
            assert_eq!(rest.is_empty(), taken == 24);
            assert!(rest.has_room(0, 28 - taken) && !rest.has_room(1, 28 - taken));
            let (mut written, mut may_take) = (Vec::new(), 3);
            rest.flush(|bytes| {
                may_take -= 1;
                (may_take > 0).then(|| {
                    written.push(bytes[0]);
                    1
                })
            });
            rest.flush(|bytes| {
                written.extend(bytes);
                Some(bytes.len())
            });
            assert!(rest.is_empty() && written == framed(&frame)[taken..]);
        }
    }
}
