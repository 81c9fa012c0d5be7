// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tables of objects that have a key.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Mixes the bits of a key or of a queue's number; both are chosen by the device.
#[derive(Default)]
pub(crate) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32((*byte).into());
        }
    }

    fn write_u16(&mut self, value: u16) {
        self.write_u32(value.into());
    }

    fn write_u32(&mut self, value: u32) {
        self.0 = (self.0 ^ u64::from(value)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// Parts of a table.
const PARTS: usize = 256;
/// Entries that a part may have beyond its share.
const SLACK: usize = 1024;

/// Something by the upper 24 bits of its key, which are random.
///
/// A hash table that grows moves all of its entries at once. This table consists of many hash tables, which grow one by
/// one.
pub(crate) struct ByKey<T> {
    parts: Box<[HashMap<u32, T, BuildHasherDefault<KeyHasher>>; PARTS]>,
    len: usize,
}

impl<T> Default for ByKey<T> {
    fn default() -> Self {
        Self { parts: Box::new(std::array::from_fn(|_| HashMap::default())), len: 0 }
    }
}

impl<T> ByKey<T> {
    /// Returns the object whose key has these upper bits.
    #[inline(always)]
    pub fn get(&self, index: u32) -> Option<&T> {
        self.parts[index as usize % PARTS].get(&index)
    }

    /// Returns the object whose key has these upper bits, to change it.
    pub fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.parts[index as usize % PARTS].get_mut(&index)
    }

    /// Returns whether something has these bits.
    pub fn contains(&self, index: u32) -> bool {
        self.get(index).is_some()
    }

    /// Returns whether these bits should not be given out, because their part has more than its share.
    /// A guest that keeps the keys of one part alone does not make it large.
    pub fn is_crowded(&self, index: u32) -> bool {
        self.parts[index as usize % PARTS].len() >= 2 * self.len / PARTS + SLACK
    }

    /// Adds an object. Returns the object whose key had these upper bits before.
    pub fn insert(&mut self, index: u32, value: T) -> Option<T> {
        let before = self.parts[index as usize % PARTS].insert(index, value);
        self.len += usize::from(before.is_none());
        before
    }

    /// Takes something out.
    pub fn remove(&mut self, index: u32) -> Option<T> {
        let removed = self.parts[index as usize % PARTS].remove(&index);
        self.len -= usize::from(removed.is_some());
        removed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_part_is_large() {
        let mut table = ByKey::default();
        let largest = |table: &ByKey<char>| table.parts.iter().map(HashMap::len).max().unwrap();
        let mut key = 1_u32;
        let mut draw = || {
            key = key.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            key >> 8
        };
        // A guest keeps the keys of one part.
        for index in (0..1 << 20).map(|_| draw()).filter(|index| index % 256 == 7) {
            if !table.is_crowded(index) {
                table.insert(index, 'x');
            }
        }
        assert!((SLACK..=2 * SLACK).contains(&table.len), "{}", table.len);
        // Later it takes any key.
        while table.len < 1 << 18 {
            let index = draw();
            if !table.is_crowded(index) {
                table.insert(index, 'x');
            }
        }
        assert!(largest(&table) <= 4 * SLACK, "{}", largest(&table));
        assert_eq!(table.parts.iter().map(HashMap::len).sum::<usize>(), table.len);
    }
}
