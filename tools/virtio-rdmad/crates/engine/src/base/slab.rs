// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A table of objects named by small numbers.

use serde::{Deserialize, Serialize};

use super::image::{require, Wrong};

/// The image of a table: the image of each object, by number, and the numbers that are given out next, the last first.
#[derive(Serialize, Deserialize)]
pub(crate) struct SlabImage<S> {
    slots: Vec<Option<S>>,
    free: Vec<u32>,
}

impl<S> SlabImage<S> {
    /// Returns the table, of at most `limit` objects; `load` makes an object of its image.
    pub fn load<T>(
        self,
        limit: u32,
        mut load: impl FnMut(S) -> Result<T, Wrong>,
    ) -> Result<Slab<T>, (u32, Wrong)> {
        let Self { slots, free } = self;
        let count = u32::try_from(slots.len()).unwrap_or(u32::MAX);
        require(count <= limit, "there are more than the limit").map_err(|why| (count, why))?;
        let mut is_free = vec![false; slots.len()];
        for number in &free {
            let is_new = is_free
                .get_mut(*number as usize)
                .is_some_and(|free| !std::mem::replace(free, true));
            let is_unused = matches!(slots.get(*number as usize), Some(None));
            require(is_new && is_unused, "the number is not free").map_err(|why| (*number, why))?;
        }
        let used = slots.iter().flatten().count();
        require(used + free.len() == slots.len(), "numbers are lost")
            .map_err(|why| (count, why))?;
        let load_one = |(number, slot): (u32, Option<S>)| {
            slot.map(&mut load).transpose().map_err(|why| (number, why))
        };
        let slots = (0..).zip(slots).map(load_one).collect::<Result<_, _>>()?;
        Ok(Slab { slots, free, used, limit })
    }
}

/// Objects with numbers from 0 to a fixed limit; the number freed last is given
/// out first.
pub(crate) struct Slab<T> {
    slots: Vec<Option<T>>,
    free: Vec<u32>,
    used: usize,
    limit: u32,
}

impl<T> Slab<T> {
    /// Returns an empty table of at most `limit` objects. Memory grows with use.
    pub fn new(limit: u32) -> Self {
        Self { slots: Vec::new(), free: Vec::new(), used: 0, limit }
    }

    /// Returns whether another object fits.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty() || self.slots.len() < self.limit as usize
    }

    /// Stores an object and names it; gives it back if the table is full.
    pub fn insert(&mut self, value: T) -> Result<u32, T> {
        if let Some(number) = self.free.pop() {
            self.slots[number as usize] = Some(value);
            self.used += 1;
            return Ok(number);
        }
        match u32::try_from(self.slots.len()) {
            Ok(number) if number < self.limit => {
                self.slots.push(Some(value));
                self.used += 1;
                Ok(number)
            }
            _ => Err(value),
        }
    }

    /// Returns the object of this number.
    pub fn get(&self, number: u32) -> Option<&T> {
        self.slots.get(number as usize)?.as_ref()
    }

    /// Returns the object of this number, to change it.
    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        self.slots.get_mut(number as usize)?.as_mut()
    }

    /// Takes the object of this number out.
    pub fn remove(&mut self, number: u32) -> Option<T> {
        let value = self.slots.get_mut(number as usize)?.take()?;
        self.free.push(number);
        self.used -= 1;
        Some(value)
    }

    /// Returns how many numbers were given out so far; the numbers of all objects are less.
    pub fn numbers(&self) -> u32 {
        u32::try_from(self.slots.len()).unwrap_or(u32::MAX)
    }

    /// Takes the highest number back, and returns its object if there is one. No other object may come
    /// afterwards.
    pub fn pop(&mut self) -> Option<T> {
        let last = self.slots.pop()?;
        self.used -= usize::from(last.is_some());
        last
    }

    /// Returns the image of the table; `save` returns the image of an object.
    pub fn save<S>(&self, save: impl Fn(&T) -> Option<S>) -> SlabImage<S> {
        let slots = self.slots.iter().map(|slot| slot.as_ref().and_then(&save)).collect();
        SlabImage { slots, free: self.free.clone() }
    }

    /// Returns how many objects there are.
    pub fn len(&self) -> usize {
        self.used
    }
}
