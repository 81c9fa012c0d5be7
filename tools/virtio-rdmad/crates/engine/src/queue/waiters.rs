// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The QPs that wait for a work request of an SRQ. They stand in a line, so that each QP gets one in its turn where
//! there are few.

use crate::base::slot::Slot;
use std::collections::BTreeMap;

/// QPs of a line that are looked at, or taken out of it, at a time. All QPs of a guest may stand in one line, and
/// whoever asks for a work request pays for one message.
const LOOK: usize = 64;

/// The QPs that wait for a work request of an SRQ, by place, each in its turn. One that was roused is out of the line:
/// a work request is set aside for it until it looks.
#[derive(Default)]
pub(crate) struct Waiters {
    /// The turn of each QP that waits or was roused.
    turns: BTreeMap<Slot, u64>,
    /// The QPs that wait to be roused, by turn.
    idle: BTreeMap<u64, Slot>,
    /// The QPs that ask again by themselves, by turn.
    asking: BTreeMap<u64, Slot>,
    /// The QPs that were roused, by turn.
    roused: BTreeMap<u64, Slot>,
    /// The turn of the one that came last.
    last: u64,
    /// The last turns among those that were roused and those that ask, when they began to be forgotten; 0 while they
    /// are not.
    late: [u64; 2],
}

impl Waiters {
    /// Returns whether no QP waits to be roused.
    pub fn is_none_idle(&self) -> bool {
        self.idle.is_empty()
    }

    /// Returns whether a work request is set aside for a QP that has to come for it.
    pub fn has_others(&self) -> bool {
        self.turns.len() != self.idle.len()
    }

    /// Adds a QP behind all others, or in the place that it has. It waits to be roused, or asks again by itself.
    pub fn join(&mut self, slot: Slot, asks_again: bool) {
        let turn = *self.turns.entry(slot).or_insert_with(|| {
            self.last += 1;
            self.last
        });
        self.step_out(turn);
        let line = if asks_again { &mut self.asking } else { &mut self.idle };
        line.insert(turn, slot);
    }

    /// Removes a QP, which has a work request or waits for none.
    pub fn leave(&mut self, slot: Slot) {
        if let Some(turn) = self.turns.remove(&slot) {
            self.step_out(turn);
        }
    }

    fn step_out(&mut self, turn: u64) {
        for line in [&mut self.idle, &mut self.asking, &mut self.roused] {
            line.remove(&turn);
        }
    }

    /// Takes the first QP out of the line that waits to be roused, and returns it: it is to look. `None` if there is
    /// none, or if those before it need all of the `left` work requests.
    pub fn rouse(&mut self, left: usize) -> Option<Slot> {
        let turn = *self.idle.first_key_value()?.0;
        if !self.reaches(turn, left) {
            return None;
        }
        let slot = self.idle.remove(&turn)?;
        self.roused.insert(turn, slot);
        Some(slot)
    }

    /// Puts a QP that was roused back into the line, in the turn that it has, unless it asks again by itself by now.
    /// The QP may have come by itself and left meanwhile. Then it stands behind all others until it is roused. Returns
    /// whether the QP is to be roused.
    pub fn put_back(&mut self, slot: Slot) -> bool {
        let asks_again = self.turns.get(&slot).is_some_and(|turn| self.asking.contains_key(turn));
        if !asks_again {
            self.join(slot, false);
        }
        !asks_again
    }

    /// Returns whether the `left` work requests reach to this turn of the line. Where more QPs are before it than are
    /// looked at, they do if there is one for each QP.
    fn reaches(&self, turn: u64, left: usize) -> bool {
        if left >= self.turns.len() {
            return true;
        }
        let ahead = |line: &BTreeMap<u64, Slot>| line.range(..turn).take(LOOK).count();
        let (idle, asking) = (ahead(&self.idle), ahead(&self.asking));
        idle.max(asking) < LOOK && left > self.roused.len() + idle + asking
    }

    /// Forgets some of those that have to come by themselves, the first ones: what was set aside for them is for
    /// others. Returns whether some may be left. Until none is, those that join them behind the last one are not late.
    pub fn forget_others(&mut self) -> bool {
        if self.late == [0; 2] {
            let last =
                |line: &BTreeMap<u64, Slot>| line.last_key_value().map_or(0, |(turn, _)| *turn);
            self.late = [last(&self.roused), last(&self.asking)];
        }
        for _ in 0..LOOK {
            let Some(slot) = self.pop_late() else {
                self.late = [0; 2];
                return false;
            };
            self.turns.remove(&slot);
        }
        true
    }

    fn pop_late(&mut self) -> Option<Slot> {
        let [roused, asking] = self.late;
        let first = |line: &mut BTreeMap<u64, Slot>, late| {
            let entry = line.first_entry().filter(|entry| *entry.key() <= late)?;
            Some(entry.remove())
        };
        first(&mut self.roused, roused).or_else(|| first(&mut self.asking, asking))
    }

    /// Returns whether one of the `left` work requests is for this QP: there are more than QPs before it.
    #[inline]
    pub fn admit(&self, slot: Slot, left: impl FnOnce() -> usize) -> bool {
        self.turns.is_empty() || self.admit_in_line(slot, left())
    }

    #[cold]
    fn admit_in_line(&self, slot: Slot, left: usize) -> bool {
        let Some(turn) = self.turns.get(&slot) else { return left > self.turns.len() };
        self.roused.contains_key(turn) || self.reaches(*turn, left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(index: u16) -> Slot {
        Slot::from(index)
    }

    #[test]
    fn as_many_are_roused_as_there_is_work() {
        let mut waiters = Waiters::default();
        for slot in [5, 3, 9, 3] {
            waiters.join(at(slot), false);
        }
        assert_eq!(
            [waiters.rouse(2), waiters.rouse(2), waiters.rouse(2)],
            [Some(at(5)), Some(at(3)), None]
        );
        // The first one has taken its own: what is left is for the second.
        waiters.leave(at(5));
        assert_eq!(waiters.rouse(1), None);
        // The second one found nothing. It is in front of the third still.
        waiters.join(at(3), false);
        assert_eq!([waiters.rouse(2), waiters.rouse(2)], [Some(at(3)), Some(at(9))]);
        assert!(waiters.is_none_idle() && waiters.has_others());
        waiters.forget_others();
        assert!(!waiters.has_others());
        assert_eq!(waiters.rouse(1), None);
    }

    #[test]
    fn one_that_cannot_look_keeps_its_turn() {
        let mut waiters = Waiters::default();
        for slot in [5, 3] {
            waiters.join(at(slot), false);
        }
        assert_eq!(waiters.rouse(1), Some(at(5)));
        waiters.put_back(at(5));
        assert_eq!([waiters.rouse(1), waiters.rouse(1)], [Some(at(5)), None]);
        // It has come by itself, and asks again.
        waiters.join(at(5), true);
        waiters.put_back(at(5));
        assert_eq!([waiters.rouse(1), waiters.rouse(2)], [None, Some(at(3))]);
        // The work request that was set aside for it is for others. The QP is not forgotten.
        waiters.forget_others();
        waiters.put_back(at(3));
        assert_eq!(waiters.rouse(1), Some(at(3)));
    }

    #[test]
    fn whoever_comes_leaves_work_to_those_before() {
        let mut waiters = Waiters::default();
        let admits = |waiters: &Waiters, slot, left| waiters.admit(at(slot), || left);
        assert!(admits(&waiters, 1, 0));
        for slot in [5, 3, 9] {
            waiters.join(at(slot), slot == 9);
        }
        assert_eq!([3, 4].map(|left| admits(&waiters, 1, left)), [false, true]);
        // The QPs that wait look by themselves as well.
        assert_eq!([1, 2].map(|left| admits(&waiters, 3, left)), [false, true]);
        assert_eq!([2, 3].map(|left| admits(&waiters, 9, left)), [false, true]);
        assert_eq!(waiters.rouse(1), Some(at(5)));
        assert_eq!([1, 2].map(|left| admits(&waiters, 3, left)), [false, true]);
        assert!(admits(&waiters, 5, 1));
        // One that asks by itself has its turn before those behind it are roused.
        waiters.leave(at(5));
        waiters.join(at(3), true);
        waiters.join(at(7), false);
        assert_eq!([2, 3].map(|left| waiters.rouse(left)), [None, Some(at(7))]);
        // If it does not come, what was set aside for it is for others.
        waiters.join(at(8), false);
        waiters.forget_others();
        assert_eq!(waiters.rouse(1), Some(at(8)));
    }

    /// However many wait, nobody goes through all of them at once.
    #[test]
    fn a_long_line_is_looked_at_in_parts() {
        let mut waiters = Waiters::default();
        for slot in 0..1000 {
            waiters.join(at(slot), true);
        }
        waiters.join(at(1000), false);
        let admits = |waiters: &Waiters, slot, left| waiters.admit(at(slot), || left);
        // The QPs in front are served. The others are not, unless there is a work request for each: nobody counts which
        // QP is first.
        assert_eq!([60, 61].map(|left| admits(&waiters, 60, left)), [false, true]);
        assert_eq!([999, 1001].map(|left| admits(&waiters, 900, left)), [false, true]);
        assert_eq!(waiters.rouse(999), None);
        assert_eq!(waiters.rouse(1001), Some(at(1000)));
        waiters.join(at(1000), false);
        let mut parts = 1;
        while waiters.forget_others() {
            parts += 1;
        }
        assert_eq!(parts, 1000_usize.div_ceil(LOOK));
        assert!(!waiters.has_others());
        assert_eq!(waiters.rouse(1), Some(at(1000)));
        // One that is roused meanwhile is not late.
        for slot in 0..100 {
            waiters.join(at(slot), true);
        }
        waiters.join(at(200), false);
        assert!(waiters.forget_others());
        assert_eq!(waiters.rouse(1000), Some(at(200)));
        assert!(!waiters.forget_others());
        assert!(waiters.admit(at(200), || 1) && waiters.has_others());
    }
}
