// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tables with places for many objects, most of which are never used.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use super::image::{require, Wrong};

/// A fixed number of places, which are named by `K`. A place takes memory from its first use on.
pub(crate) struct Table<T, K = u16> {
    places: Box<[OnceLock<Box<T>>]>,
    keys: PhantomData<K>,
}

impl<T: Default, K: From<u16> + Into<u16>> Table<T, K> {
    /// Returns a table with `len` places.
    pub fn new(len: u16) -> Self {
        Self { places: (0..len).map(|_| OnceLock::new()).collect(), keys: PhantomData }
    }

    /// Returns how many places there are.
    pub fn len(&self) -> u16 {
        u16::try_from(self.places.len()).unwrap_or(u16::MAX)
    }

    /// Returns the object in a place, if the place was used.
    pub fn get(&self, index: K) -> Option<&T> {
        self.places.get(usize::from(index.into()))?.get().map(|place| &**place)
    }

    /// Returns the object in a place of the table, and makes it at the first use.
    pub fn take(&self, index: K) -> &T {
        self.places[usize::from(index.into())].get_or_init(Box::default)
    }

    /// Returns all that were used, with their places.
    pub fn iter(&self) -> impl Iterator<Item = (K, &T)> {
        let places = (0_u16..).zip(&*self.places);
        places.filter_map(|(index, place)| Some((index.into(), &**place.get()?)))
    }
}

/// The image of [`Numbers`]: the first one that was never given out, and those that were given back.
#[derive(Serialize, Deserialize)]
pub(crate) struct NumbersImage {
    next: u16,
    freed: Vec<u16>,
}

/// Numbers to give out, or places. A number that was used is given out again when no other number was unused for
/// longer.
pub(crate) struct Numbers<K = u16> {
    first: u16,
    next: u16,
    end: u16,
    freed: VecDeque<u16>,
    kind: PhantomData<K>,
}

impl<K: From<u16> + Into<u16>> Numbers<K> {
    /// Returns the numbers from `first` to before `end`.
    pub fn new(first: u16, end: u16) -> Self {
        Self::beginning_at(first, first, end)
    }

    /// Returns the numbers from `first` to before `end`, of which `next` is given out first. Those in front of it come
    /// behind the last one, as if they had been used.
    pub fn beginning_at(next: u16, first: u16, end: u16) -> Self {
        Self { first, next, end, freed: (first..next).collect(), kind: PhantomData }
    }

    /// Returns the image.
    pub fn save(&self) -> NumbersImage {
        NumbersImage { next: self.next, freed: self.freed.iter().copied().collect() }
    }

    /// Loads an image, with which these numbers are `used`.
    pub fn load(
        &mut self,
        image: NumbersImage,
        used: impl IntoIterator<Item = K>,
    ) -> Result<(), Wrong> {
        let NumbersImage { next, freed } = image;
        let first = self.first;
        require((first..=self.end).contains(&next), "the next number is out of range")?;
        let mut is_taken = vec![false; usize::from(next - first)];
        let used = used.into_iter().map(K::into).filter(|number| *number >= first);
        for number in freed.iter().copied().chain(used) {
            let at = usize::from(number.checked_sub(first).ok_or("a free number is out of range")?);
            let taken = is_taken.get_mut(at).ok_or("a number is used that was not given out")?;
            require(!std::mem::replace(taken, true), "a number is used and free")?;
        }
        (self.next, self.freed) = (next, freed.into());
        Ok(())
    }

    /// Takes a number, if one is left.
    pub fn take(&mut self) -> Option<K> {
        if self.next < self.end {
            self.next += 1;
            return Some(K::from(self.next - 1));
        }
        self.freed.pop_front().map(K::from)
    }

    /// Gives a number back.
    pub fn give_back(&mut self, number: K) {
        self.freed.push_back(number.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_late() {
        let mut numbers = Numbers::<u16>::new(1, 4);
        assert_eq!(numbers.take(), Some(1));
        numbers.give_back(1);
        assert_eq!([numbers.take(), numbers.take()], [Some(2), Some(3)]);
        numbers.give_back(3);
        assert_eq!([numbers.take(), numbers.take(), numbers.take()], [Some(1), Some(3), None]);
    }

    #[test]
    fn numbers_may_begin_anywhere() {
        let mut numbers = Numbers::<u16>::beginning_at(3, 1, 5);
        assert_eq!([numbers.take(), numbers.take()], [Some(3), Some(4)]);
        numbers.give_back(3);
        let mut other = Numbers::beginning_at(2, 1, 5);
        other.load(numbers.save(), [4]).unwrap();
        for numbers in [&mut numbers, &mut other] {
            let rest = std::iter::from_fn(|| numbers.take());
            assert_eq!(rest.collect::<Vec<_>>(), [1, 2, 3]);
        }
    }

    #[test]
    fn places_are_made_when_they_are_used() {
        let table: Table<u32> = Table::new(3);
        assert!(table.get(1).is_none() && table.get(3).is_none());
        assert_eq!(*table.take(1), 0);
        assert_eq!(table.iter().collect::<Vec<_>>(), [(1, &0)]);
    }
}
