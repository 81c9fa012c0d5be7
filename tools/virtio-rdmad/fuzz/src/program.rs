// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The fuzzer's bytes, read as a program.

/// What is left of the fuzzer's bytes. Behind their end everything is 0.
#[derive(Debug)]
pub struct Program<'a>(&'a [u8]);

impl<'a> Program<'a> {
    /// A program of these bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The next operation; `None` at the end.
    pub fn operation(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// The next byte.
    pub fn u8(&mut self) -> u8 {
        self.operation().unwrap_or(0)
    }

    /// The next bit, in a byte of its own.
    pub fn flag(&mut self) -> bool {
        self.u8() & 1 != 0
    }

    /// The next 16-bit number.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// The next 32-bit number.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// The next 64-bit number.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// The next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        std::array::from_fn(|_| self.u8())
    }

    /// The next bytes, at most `len`.
    pub fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (first, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        first
    }

    /// A number below `end`, which is at least 1.
    pub fn below(&mut self, end: usize) -> usize {
        usize::from(self.u8()) % end
    }

    /// One of `choices`, of which there is at least one.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Changes up to three places of a structure that is right so far, or none.
    pub fn patch(&mut self, bytes: &mut [u8]) {
        for _ in 0..self.u8() & 3 {
            let (at, value) = (usize::from(self.u16()), self.u8());
            if !bytes.is_empty() {
                bytes[at % bytes.len()] = value;
            }
        }
    }
}
