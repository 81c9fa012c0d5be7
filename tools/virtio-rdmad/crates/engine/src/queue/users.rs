// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Who uses a CQ or an SRQ, and fails when it does.

use std::collections::BTreeSet;
use std::ops::Bound;

/// What uses a CQ or an SRQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum User {
    /// The QP in this place.
    Qp(u16),
    /// The SRQ in this place, which is for XRC.
    Srq(u16),
}

/// The users of a CQ or an SRQ. After an error they fail one after the other, over as many visits
/// as that takes, and each of them once.
#[derive(Default)]
pub(crate) struct Users {
    all: BTreeSet<User>,
    /// Where [`Self::next_to_fail`] goes on, if there is something to fail.
    failing: Option<Bound<User>>,
}

impl Users {
    /// Adds a user, which may use both queues.
    pub fn insert(&mut self, user: User) {
        self.all.insert(user);
    }

    /// Removes a user.
    pub fn remove(&mut self, user: User) {
        self.all.remove(&user);
    }

    /// Returns how many users there are.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Returns whether there is no user.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Notes that what they use has failed.
    pub fn fail(&mut self) {
        self.failing = Some(Bound::Unbounded);
    }

    /// Returns the next user that has to fail.
    pub fn next_to_fail(&mut self) -> Option<User> {
        let from = self.failing?;
        let next = self.all.range((from, Bound::Unbounded)).next().copied();
        self.failing = next.map(Bound::Excluded);
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_user_fails_once() {
        let mut users = Users::default();
        for slot in [3, 1, 3, 2] {
            users.insert(User::Qp(slot));
        }
        users.insert(User::Srq(0));
        assert_eq!((users.len(), users.next_to_fail()), (4, None));
        users.fail();
        assert_eq!(users.next_to_fail(), Some(User::Qp(1)));
        users.remove(User::Qp(2));
        users.insert(User::Qp(0));
        let rest = [users.next_to_fail(), users.next_to_fail(), users.next_to_fail()];
        assert_eq!(rest, [Some(User::Qp(3)), Some(User::Srq(0)), None]);
        assert_eq!(users.next_to_fail(), None);
    }
}
