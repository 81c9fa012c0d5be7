// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Which virtqueues have work: one bit each.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bits that any thread sets and the guest's own thread takes.
pub(crate) struct Hot {
    words: Box<[AtomicU64]>,
}

impl Hot {
    /// All bits clear.
    pub fn new(queues: u16) -> Self {
        Self { words: (0..words(queues)).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Sets a queue's bit; what the caller wrote before is seen by whoever
    /// takes it.
    pub fn set(&self, queue: u16) {
        self.words[usize::from(queue / 64)].fetch_or(1 << (queue % 64), Ordering::Release);
    }

    /// Moves all bits into `set`.
    pub fn take(&self, set: &mut Set) {
        for (word, to) in self.words.iter().zip(set.words.iter_mut()) {
            if word.load(Ordering::Relaxed) != 0 {
                *to |= word.swap(0, Ordering::Acquire);
            }
        }
    }

    /// Whether no bit is set.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|w| w.load(Ordering::Acquire) == 0)
    }
}

/// The same of one thread.
#[derive(Clone)]
pub(crate) struct Set {
    words: Box<[u64]>,
}

impl Set {
    /// All bits clear.
    pub fn new(queues: u16) -> Self {
        Self { words: vec![0; words(queues)].into() }
    }

    /// Sets a queue's bit.
    pub fn insert(&mut self, queue: u16) {
        self.words[usize::from(queue / 64)] |= 1 << (queue % 64);
    }

    /// Clears a queue's bit.
    pub fn remove(&mut self, queue: u16) {
        self.words[usize::from(queue / 64)] &= !(1 << (queue % 64));
    }

    /// Whether a queue's bit is set.
    pub fn contains(&self, queue: u16) -> bool {
        self.words[usize::from(queue / 64)] & 1 << (queue % 64) != 0
    }

    /// Clears all bits.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// The first queue at or after `from` whose bit is set.
    pub fn next(&self, from: u16) -> Option<u16> {
        let mut index = usize::from(from / 64);
        let mut word = self.words.get(index)? & (u64::MAX << (from % 64));
        while word == 0 {
            index += 1;
            word = *self.words.get(index)?;
        }
        u16::try_from(index * 64 + word.trailing_zeros() as usize).ok()
    }

    /// Whether no bit is set.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|w| *w == 0)
    }
}

fn words(queues: u16) -> usize {
    usize::from(queues).div_ceil(64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_each_bit_in_turn() {
        let hot = Hot::new(200);
        for queue in [0, 63, 64, 130, 199] {
            hot.set(queue);
        }
        let mut set = Set::new(200);
        hot.take(&mut set);
        assert!(hot.is_empty());
        let mut found = Vec::new();
        let mut from = 0;
        while let Some(queue) = set.next(from) {
            found.push(queue);
            from = queue + 1;
        }
        assert_eq!(found, [0, 63, 64, 130, 199]);
        assert_eq!(set.next(200), None);
    }
}
