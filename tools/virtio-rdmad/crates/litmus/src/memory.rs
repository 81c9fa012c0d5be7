// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory that consists of words and data.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use loom::cell::UnsafeCell;

use crate::AtomicU32;

/// The bytes of a cell.
const CELL: usize = 8;

/// 8 bytes that must not be read while they are written. A thread that does so fails the test, even if
/// it finds the right bytes in this run.
#[derive(Debug)]
struct Cell {
    access: UnsafeCell<()>,
    value: Mutex<[u8; CELL]>,
}

impl Cell {
    fn read(&self) -> [u8; CELL] {
        self.access.with(|_| ());
        *self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, value: [u8; CELL]) {
        self.access.with_mut(|_| ());
        *self.value.lock().unwrap_or_else(PoisonError::into_inner) = value;
    }
}

/// Shared memory with the words and cells that a test names, all of them 0 at first. A copy from or to
/// any other place does nothing.
#[derive(Debug)]
pub struct Memory {
    words: BTreeMap<usize, AtomicU32>,
    cells: BTreeMap<usize, Cell>,
}

impl Memory {
    /// Makes memory with words for atomic accesses at the offsets `words`, and with 8 bytes of data at
    /// each of the offsets `cells`.
    pub fn new(
        words: impl IntoIterator<Item = usize>,
        cells: impl IntoIterator<Item = usize>,
    ) -> Self {
        let word = |at| (at, AtomicU32::new(0));
        let cell = |at| (at, Cell { access: UnsafeCell::new(()), value: Mutex::default() });
        Self {
            words: words.into_iter().map(word).collect(),
            cells: cells.into_iter().map(cell).collect(),
        }
    }

    /// Returns the word at `at`.
    ///
    /// # Panics
    ///
    /// Panics if the test named no word there.
    pub fn word(&self, at: usize) -> &AtomicU32 {
        self.words.get(&at).unwrap_or_else(|| panic!("there is no word at {at}"))
    }

    /// Copies out the cells that begin within the bytes from `at` on.
    pub fn read(&self, at: usize, to: &mut [u8]) {
        for (place, cell) in self.cells.range(at..at + to.len()) {
            let place = place - at;
            if let Some(to) = to.get_mut(place..place + CELL) {
                to.copy_from_slice(&cell.read());
            }
        }
    }

    /// Copies in the cells that begin within the bytes from `at` on.
    pub fn write(&self, at: usize, from: &[u8]) {
        for (place, cell) in self.cells.range(at..at + from.len()) {
            let place = place - at;
            if let Some(Ok(from)) = from.get(place..place + CELL).map(TryInto::try_into) {
                cell.write(from);
            }
        }
    }

    /// Reads the data at `at`.
    pub fn get(&self, at: usize) -> u64 {
        let mut bytes = [0; CELL];
        self.read(at, &mut bytes);
        u64::from_le_bytes(bytes)
    }

    /// Writes the data at `at`.
    pub fn set(&self, at: usize, value: u64) {
        self.write(at, &value.to_le_bytes());
    }
}

/// A word of 16 bits.
#[derive(Debug)]
pub struct Word16<'a>(pub &'a AtomicU32);

impl Word16<'_> {
    /// Loads the word, as an atomic does.
    #[allow(clippy::cast_possible_truncation)] // only 16 bits are ever stored
    pub fn load(&self, order: Ordering) -> u16 {
        self.0.load(order) as u16
    }

    /// Stores the word, as an atomic does.
    pub fn store(&self, value: u16, order: Ordering) {
        self.0.store(value.into(), order);
    }
}

/// A word of 64 bits. Either its upper half is a word of the memory, or all of it is data.
#[derive(Debug)]
pub struct Word64<'a> {
    memory: &'a Memory,
    at: usize,
}

impl<'a> Word64<'a> {
    /// Makes the word at `at`.
    pub fn new(memory: &'a Memory, at: usize) -> Self {
        Self { memory, at }
    }

    /// Stores the word, as an atomic does. If its upper half is a word, only that is stored.
    pub fn store(&self, value: u64, order: Ordering) {
        match self.memory.words.get(&(self.at + CELL / 2)) {
            Some(word) => word.store((value >> 32) as u32, order),
            None => self.memory.set(self.at, value),
        }
    }
}
