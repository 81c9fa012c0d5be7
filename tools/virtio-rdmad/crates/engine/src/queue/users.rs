// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The users of a CQ or an SRQ, which fail when it does.

use std::collections::BTreeSet;
use std::ops::Bound;

use crate::base::slot::Slot;
use serde::{Deserialize, Serialize};

/// A user of a CQ or an SRQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum User {
    /// The QP in this place.
    Qp(Slot),
    /// The SRQ in this place, which is for XRC.
    Srq(Slot),
}

/// The users of a CQ or an SRQ. After an error they fail one after the other, over as many visits
/// as that takes, and each of them once.
#[derive(Default)]
pub(crate) struct Users {
    all: BTreeSet<User>,
    /// The bound from which [`Self::next_to_fail`] goes on, if users are to fail.
    failing: Option<Bound<User>>,
}

/// The progress of the failure of users: `None` if they do not fail, otherwise the last one that has failed, if one
/// has.
pub(crate) type Failing = Option<Option<User>>;

impl Users {
    /// Returns the progress of the failure. The users themselves know the objects that they use.
    pub fn save(&self) -> Failing {
        self.failing.map(|from| match from {
            Bound::Excluded(user) | Bound::Included(user) => Some(user),
            Bound::Unbounded => None,
        })
    }

    /// Returns no users, whose failure has come so far.
    pub fn load(failing: Failing) -> Self {
        let from = |user: Option<User>| user.map_or(Bound::Unbounded, Bound::Excluded);
        Self { failing: failing.map(from), ..Self::default() }
    }

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

    /// Notes that the object of the users has failed.
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
            users.insert(User::Qp(Slot::from(slot)));
        }
        users.insert(User::Srq(Slot::from(0)));
        assert_eq!((users.len(), users.next_to_fail()), (4, None));
        users.fail();
        assert_eq!(users.next_to_fail(), Some(User::Qp(Slot::from(1))));
        users.remove(User::Qp(Slot::from(2)));
        users.insert(User::Qp(Slot::from(0)));
        let rest = [users.next_to_fail(), users.next_to_fail(), users.next_to_fail()];
        assert_eq!(rest, [Some(User::Qp(Slot::from(3))), Some(User::Srq(Slot::from(0))), None]);
        assert_eq!(users.next_to_fail(), None);
    }
}
