// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Writes files of captured frames, in the format pcapng (draft-ietf-opsawg-pcapng): a section with one interface.

use std::io::{Error, Write};

/// Types of blocks.
const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE_DESCRIPTION: u32 = 1;
const INTERFACE_STATISTICS: u32 = 5;
const ENHANCED_PACKET: u32 = 6;

/// Says in which order the bytes of numbers are.
const BYTE_ORDER: u32 = 0x1a2b_3c4d;
const LINKTYPE_ETHERNET: u16 = 1;

/// Options of blocks, by the names of the format.
const OPT_ENDOFOPT: u16 = 0;
const SHB_USERAPPL: u16 = 4;
const IF_NAME: u16 = 2;
const IF_TSRESOL: u16 = 9;
const EPB_FLAGS: u16 = 2;
const ISB_IFRECV: u16 = 4;
const ISB_IFDROP: u16 = 5;

/// Times are nanoseconds: 10 to the power of minus 9.
const NANOSECONDS: u8 = 9;
/// The directions of a frame (bits of `epb_flags`).
const INBOUND: u32 = 1;
const OUTBOUND: u32 = 2;

/// A frame that was captured.
pub struct Frame<'a> {
    /// The time of the frame, in nanoseconds since 1970.
    pub time: u64,
    /// Whether it leaves the interface.
    pub leaves: bool,
    /// The length of the frame.
    pub length: u32,
    /// The first bytes of the frame.
    pub bytes: &'a [u8],
}

/// A file that is written.
pub struct Writer<W> {
    out: W,
    /// The number of frames in the file.
    pub count: u64,
}

impl<W: Write> Writer<W> {
    /// Begins a file with the frames of an interface, of which it has `snaplen` bytes each; 0: all.
    pub fn new(out: W, interface: &str, snaplen: u32) -> Result<Self, Error> {
        let mut writer = Self { out, count: 0 };
        let mut section = Block::new(SECTION_HEADER);
        section.word(BYTE_ORDER);
        // Version 1.0, and a section of a length that is not known.
        section.bytes(&[1_u16.to_le_bytes(), 0_u16.to_le_bytes()].concat());
        section.bytes(&u64::MAX.to_le_bytes());
        section
            .option(SHB_USERAPPL, concat!("virtio-rdmad ", env!("CARGO_PKG_VERSION")).as_bytes());
        writer.write(section)?;
        let mut description = Block::new(INTERFACE_DESCRIPTION);
        description.bytes(&[LINKTYPE_ETHERNET.to_le_bytes(), 0_u16.to_le_bytes()].concat());
        description.word(snaplen);
        description.option(IF_NAME, interface.as_bytes());
        description.option(IF_TSRESOL, &[NANOSECONDS]);
        writer.write(description)?;
        Ok(writer)
    }

    /// Adds a frame.
    pub fn add(&mut self, frame: &Frame<'_>) -> Result<(), Error> {
        let mut block = Block::new(ENHANCED_PACKET);
        block.word(0);
        block.time(frame.time);
        block.word(u32::try_from(frame.bytes.len()).unwrap_or(u32::MAX));
        block.word(frame.length);
        block.bytes(frame.bytes);
        let direction = if frame.leaves { OUTBOUND } else { INBOUND };
        block.option(EPB_FLAGS, &direction.to_le_bytes());
        self.count += 1;
        self.write(block)
    }

    /// Ends the file, and says how many frames are not in it.
    pub fn end(mut self, time: u64, dropped: u64) -> Result<(), Error> {
        let mut block = Block::new(INTERFACE_STATISTICS);
        block.word(0);
        block.time(time);
        block.option(ISB_IFRECV, &(self.count + dropped).to_le_bytes());
        block.option(ISB_IFDROP, &dropped.to_le_bytes());
        self.write(block)
    }

    fn write(&mut self, block: Block) -> Result<(), Error> {
        self.out.write_all(&block.end())?;
        self.out.flush()
    }
}

/// A block that is made.
struct Block {
    bytes: Vec<u8>,
    has_options: bool,
}

impl Block {
    fn new(kind: u32) -> Self {
        let mut block = Self { bytes: Vec::new(), has_options: false };
        block.word(kind);
        // The length comes in the end.
        block.word(0);
        block
    }

    fn word(&mut self, word: u32) {
        self.bytes.extend(word.to_le_bytes());
    }

    /// Adds a time, whose upper word is first.
    fn time(&mut self, time: u64) {
        self.bytes(&time.rotate_left(32).to_le_bytes());
    }

    /// Adds bytes, and fills the last word up.
    fn bytes(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn option(&mut self, code: u16, value: &[u8]) {
        self.has_options = true;
        let length = u16::try_from(value.len()).unwrap_or(u16::MAX);
        self.bytes.extend([code.to_le_bytes(), length.to_le_bytes()].concat());
        self.bytes(&value[..length.into()]);
    }

    fn end(mut self) -> Vec<u8> {
        if self.has_options {
            self.option(OPT_ENDOFOPT, &[]);
        }
        let length = u32::try_from(self.bytes.len() + 4).unwrap_or(u32::MAX);
        self.bytes[4..8].copy_from_slice(&length.to_le_bytes());
        self.word(length);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the types and bodies of the blocks of a file.
    fn blocks(mut file: &[u8]) -> Vec<(u32, Vec<u8>)> {
        let word = |bytes: &[u8]| u32::from_le_bytes(bytes[..4].try_into().unwrap());
        let mut blocks = Vec::new();
        while !file.is_empty() {
            let length = word(&file[4..]) as usize;
            assert!(length % 4 == 0 && word(&file[length - 4..]) as usize == length);
            blocks.push((word(file), file[8..length - 4].to_vec()));
            file = &file[length..];
        }
        blocks
    }

    #[test]
    fn a_file_has_frames_and_says_how_many_are_missing() {
        let mut file = Vec::new();
        let mut writer = Writer::new(&mut file, "g1", 0).unwrap();
        let time = 1 << 33 | 5;
        writer.add(&Frame { time, leaves: true, length: 100, bytes: b"frame" }).unwrap();
        writer.end(7, 3).unwrap();
        let [section, interface, frame, statistics] = &blocks(&file)[..] else { panic!("blocks") };
        assert_eq!((section.0, &section.1[..4]), (SECTION_HEADER, &BYTE_ORDER.to_le_bytes()[..]));
        assert_eq!((interface.0, interface.1[0]), (INTERFACE_DESCRIPTION, 1));
        assert!(interface.1.windows(2).any(|name| name == b"g1"));
        let mut expected = Vec::new();
        for word in [0, 2, 5, 5, 100_u32] {
            expected.extend(word.to_le_bytes());
        }
        expected.extend(b"frame\0\0\0\x02\0\x04\0\x02\0\0\0\0\0\0\0");
        assert_eq!(*frame, (ENHANCED_PACKET, expected));
        let mut expected = vec![0; 8];
        expected.extend(7_u32.to_le_bytes());
        expected.extend(b"\x04\0\x08\0\x04\0\0\0\0\0\0\0\x05\0\x08\0\x03\0\0\0\0\0\0\0\0\0\0\0");
        assert_eq!(*statistics, (INTERFACE_STATISTICS, expected));
    }
}
