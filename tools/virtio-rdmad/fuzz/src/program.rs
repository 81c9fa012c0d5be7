// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reads the fuzzer's bytes as a program.

/// The rest of the fuzzer's bytes. After the last one, every byte is 0.
#[derive(Debug)]
pub struct Program<'a>(&'a [u8]);

impl<'a> Program<'a> {
    /// Makes a program of these bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Returns the next operation; `None` at the end.
    pub fn operation(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// Returns the next byte.
    pub fn u8(&mut self) -> u8 {
        self.operation().unwrap_or(0)
    }

    /// Returns the next bit, which has a byte of its own.
    pub fn flag(&mut self) -> bool {
        self.u8() & 1 != 0
    }

    /// Returns the next 16-bit number.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// Returns the next 32-bit number.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// Returns the next 64-bit number.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// Returns the next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        std::array::from_fn(|_| self.u8())
    }

    /// Returns the next bytes, at most `len`.
    pub fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (first, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        first
    }

    /// Returns a number below `end`, which must be at least 1.
    pub fn below(&mut self, end: usize) -> usize {
        usize::from(self.u8()) % end
    }

    /// Returns one of `choices`, which must not be empty.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Changes up to three places of a structure that was right.
    pub fn patch(&mut self, bytes: &mut [u8]) {
        for _ in 0..self.u8() & 3 {
            let (at, value) = (usize::from(self.u16()), self.u8());
            if !bytes.is_empty() {
                bytes[at % bytes.len()] = value;
            }
        }
    }
}
