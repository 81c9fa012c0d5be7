// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The set of the queues that have work: one bit for each queue, and one for each word of these bits.

use std::sync::atomic::Ordering;

use memory::atomic::{AtomicBool, AtomicU64};

/// The ready set: bits that any thread sets and the guest's own thread takes.
pub(crate) struct ReadySet {
    words: Box<[AtomicU64]>,
    /// Words that may have bits.
    summary: Box<[AtomicU64]>,
    awake: Awake,
}

/// Whether the guest's own thread was woken and has not looked yet. It has a cache line of its own:
/// several threads write it, and each of them reads what stands beside it.
#[repr(align(64))]
struct Awake(AtomicBool);

impl ReadySet {
    /// Returns a set of so many queues, none of them ready.
    pub fn new(queues: u16) -> Self {
        let zeros = |count| (0..count).map(|_| AtomicU64::new(0)).collect();
        let count = words(queues.into());
        let awake = Awake(AtomicBool::new(false));
        Self { words: zeros(count), summary: zeros(words(count)), awake }
    }

    /// Sets a queue's bit. The thread that takes the bit sees what the caller wrote before.
    pub fn set(&self, queue: u16) {
        let word = usize::from(queue / 64);
        self.words[word].fetch_or(1 << (queue % 64), Ordering::SeqCst);
        // The summary comes after the bit: a thread that takes the summary finds the bit.
        self.summary[word / 64].fetch_or(1 << (word % 64), Ordering::SeqCst);
    }

    /// Sets a queue's bit for the guest's own thread, and returns whether that thread must be woken.
    pub fn call(&self, queue: u16) -> bool {
        self.set(queue);
        // After the bit: a thread that was woken and has not looked yet finds it.
        !self.awake.0.swap(true, Ordering::AcqRel)
    }

    /// Notes that the guest's own thread is about to look: from now on it is woken again.
    pub fn begin(&self) {
        // This is not a store, which would read nothing: it sees the bits of all threads that found this one woken.
        self.awake.0.swap(false, Ordering::AcqRel);
    }

    /// Moves all bits into `set`.
    pub fn take(&self, set: &mut Set) {
        for (at, summary) in self.summary.iter().enumerate() {
            if summary.load(Ordering::Relaxed) == 0 {
                continue;
            }
            for bit in bits(summary.swap(0, Ordering::SeqCst)) {
                let word = at * 64 + bit;
                let taken = self.words[word].swap(0, Ordering::SeqCst);
                set.insert_word(word, taken);
            }
        }
    }

    /// Returns whether no bit is set.
    pub fn is_empty(&self) -> bool {
        self.summary.iter().all(|word| word.load(Ordering::SeqCst) == 0)
    }
}

/// The queues that have work, as far as the guest's own thread knows.
pub(crate) struct Set {
    words: Box<[u64]>,
    /// Words that have bits.
    summary: Box<[u64]>,
    count: usize,
}

impl Set {
    /// Returns an empty set for so many queues.
    pub fn new(queues: u16) -> Self {
        let count = words(queues.into());
        Self { words: vec![0; count].into(), summary: vec![0; words(count)].into(), count: 0 }
    }

    /// Sets a queue's bit.
    pub fn insert(&mut self, queue: u16) {
        self.insert_word(usize::from(queue / 64), 1 << (queue % 64));
    }

    fn insert_word(&mut self, word: usize, bits: u64) {
        let before = self.words[word];
        self.words[word] = before | bits;
        self.count += (bits & !before).count_ones() as usize;
        if before | bits != 0 {
            self.summary[word / 64] |= 1 << (word % 64);
        }
    }

    /// Clears a queue's bit.
    pub fn remove(&mut self, queue: u16) {
        let word = usize::from(queue / 64);
        let before = self.words[word];
        let after = before & !(1 << (queue % 64));
        self.words[word] = after;
        self.count -= usize::from(before != after);
        if after == 0 {
            self.summary[word / 64] &= !(1 << (word % 64));
        }
    }

    /// Returns whether a queue's bit is set.
    pub fn contains(&self, queue: u16) -> bool {
        self.words[usize::from(queue / 64)] & 1 << (queue % 64) != 0
    }

    /// Clears all bits.
    pub fn clear(&mut self) {
        self.words.fill(0);
        self.summary.fill(0);
        self.count = 0;
    }

    /// Returns the first queue at or after `from` whose bit is set.
    pub fn next(&self, from: u16) -> Option<u16> {
        let index = usize::from(from / 64);
        let word = self.words.get(index)? & (u64::MAX << (from % 64));
        if word != 0 {
            return number(index, word);
        }
        let from = index + 1;
        let mut at = from / 64;
        let mut summary = self.summary.get(at)? & (u64::MAX << (from % 64));
        while summary == 0 {
            at += 1;
            summary = *self.summary.get(at)?;
        }
        let index = at * 64 + summary.trailing_zeros() as usize;
        number(index, self.words[index])
    }

    /// Returns how many bits are set.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns whether no bit is set.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
}

/// Returns the queue of the lowest bit of a word.
fn number(index: usize, word: u64) -> Option<u16> {
    u16::try_from(index * 64 + word.trailing_zeros() as usize).ok()
}

fn words(bits: usize) -> usize {
    bits.div_ceil(64)
}

/// Returns the numbers of the bits that are set.
fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = word.trailing_zeros() as usize;
        word &= word.wrapping_sub(1);
        (bit < 64).then_some(bit)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(set: &Set) -> Vec<u16> {
        let mut found = Vec::new();
        let mut from = 0;
        while let Some(queue) = set.next(from) {
            found.push(queue);
            from = queue + 1;
        }
        found
    }

    #[test]
    fn finds_each_bit_in_turn() {
        let ready = ReadySet::new(50_000);
        let queues = [0, 63, 64, 130, 4095, 4096, 12_345, 49_999];
        for queue in queues {
            ready.set(queue);
        }
        let mut set = Set::new(50_000);
        ready.take(&mut set);
        assert!(ready.is_empty());
        assert_eq!(all(&set), queues);
        assert_eq!(set.next(50_000), None);
    }

    #[test]
    fn bits_come_and_go() {
        let mut set = Set::new(50_000);
        for queue in [7, 70, 70, 40_000] {
            set.insert(queue);
        }
        set.remove(70);
        set.remove(71);
        assert_eq!((all(&set), set.len()), (vec![7, 40_000], 2));
        assert!(set.contains(7) && !set.contains(70));
        set.clear();
        assert!(set.is_empty() && set.next(0).is_none());
    }
}
