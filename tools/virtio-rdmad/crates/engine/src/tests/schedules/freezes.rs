// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Freezes: a device stands still in the middle of what it does, and its guest with it.

use std::collections::VecDeque;

use super::dice::Dice;
use super::hosts::Hosts;
use super::model::Verdict;
use super::plan::{Freeze, GuestPlan};
use crate::tests::driver::{pages_in_use, OfEngine};

/// The freezes that are to come, and the guests that are frozen.
pub struct Freezes {
    /// The times at which devices are frozen (`true`), or go on (`false`).
    due: VecDeque<(u64, bool, usize, Freeze)>,
    /// The memory of each guest whose device is frozen, as it was then.
    memories: Vec<Option<Vec<u8>>>,
}

impl Freezes {
    pub fn new(guests: &[GuestPlan]) -> Self {
        let mut due = Vec::new();
        for (number, guest) in guests.iter().enumerate() {
            for freeze in &guest.freezes {
                due.extend([
                    (freeze.from, true, number, *freeze),
                    (freeze.until, false, number, *freeze),
                ]);
            }
        }
        due.sort_by_key(|(time, begins, ..)| (*time, *begins));
        Self { due: due.into(), memories: vec![None; guests.len()] }
    }

    /// Returns whether the device of a guest is frozen.
    pub fn has(&self, guest: usize) -> bool {
        self.memories[guest].is_some()
    }

    /// Returns when the next freeze begins or ends.
    pub fn next(&self) -> Option<u64> {
        self.due.front().map(|(time, ..)| *time)
    }

    /// Freezes the devices for which it is time, and lets others go on. The memory of a frozen guest has not changed at
    /// the end, and may then be a copy.
    pub fn pass(&mut self, hosts: &mut Hosts, dice: &mut Dice, tells: bool) -> Verdict {
        let now = hosts.now();
        while self.next().is_some_and(|time| time <= now) {
            let Some((_, begins, number, freeze)) = self.due.pop_front() else { break };
            if tells {
                println!("{now} guest {number} is frozen: {begins}");
            }
            if begins {
                hosts.run_some(dice);
                let guest = &hosts.guests[number];
                guest.freeze();
                self.memories[number] = Some(guest.all_bytes());
            } else {
                self.end(hosts, number, freeze)?;
            }
        }
        Ok(())
    }

    fn end(&mut self, hosts: &mut Hosts, number: usize, freeze: Freeze) -> Verdict {
        let now = hosts.now();
        let guest = &mut hosts.guests[number];
        let before = self.memories[number].take().unwrap_or_default();
        if before != guest.all_bytes() {
            return Err(format!("{now} ns: the memory of the frozen guest {number} has changed"));
        }
        if freeze.is_moved {
            // What looks at the memory of before finds nothing there.
            let old = guest.move_memory();
            for (addr, page) in pages_in_use(&before) {
                old.write(addr, &vec![0; page.len()]).unwrap();
            }
        }
        guest.device.thaw();
        Ok(())
    }
}
