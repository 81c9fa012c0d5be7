// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Changes that concern all objects of a guest: another memory map, a reset, and a freeze. A change goes on over as
//! many visits as it takes, object by object.
//!
//! Until a change is done, the guest's own thread does nothing else for the guest. Peers go on meanwhile, and find each
//! object as it was or as it is to be.

use super::freeze::Freeze;
use super::guest::Guest;
use super::remap::Remap;
use super::reset::Reset;
use super::step::Step;
use crate::base::budget::Budget;

/// A change that is under way.
pub(crate) enum Change {
    /// Everything that the guest made is found again in other memory.
    Memory(Box<Remap>),
    /// Everything that the guest made ends.
    Reset(Reset),
    /// The guest's memory is not touched any more.
    Freeze(Freeze),
}

impl Change {
    /// Goes on until the budget is exhausted; returns whether it has come to its end.
    pub fn run(&mut self, guest: &Guest, budget: &mut Budget) -> bool {
        while !budget.is_over() {
            let step = match self {
                Self::Memory(remap) => remap.step(guest, budget),
                Self::Reset(reset) => reset.step(guest, budget),
                Self::Freeze(freeze) => freeze.step(guest, budget),
            };
            match step {
                Step::Done => return true,
                Step::More => {}
                Step::Wait => return false,
            }
        }
        false
    }
}
