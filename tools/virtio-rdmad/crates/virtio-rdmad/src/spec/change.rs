// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A change of what a guest may do, while the guest is there.

use std::fmt::{Display, Formatter};
use std::str::FromStr;

use super::guest::{GuestSpec, SpecError};
use super::key_values::{KeyValues, ListError};
use super::{keys, policy};

/// The value of a key, in a change, that stands for a guest without that key.
pub const DEFAULT: &str = "default";

/// What changes of a guest's policy.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PolicyChange {
    /// Keys and their new values; `None`: the guest has the key no longer.
    changes: Vec<(&'static str, Option<String>)>,
}

/// Why a policy cannot change so.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
pub enum PolicyError {
    /// The list of keys and values is not right.
    #[error(transparent)]
    List(#[from] ListError),
    /// A key does not belong to the policy.
    #[error("{0} cannot be changed while the guest is there")]
    Fixed(&'static str),
    /// The guest would not be right any more.
    #[error(transparent)]
    Spec(#[from] SpecError),
}

impl FromStr for PolicyChange {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        let list = KeyValues::read(text, keys::GUEST, &[])?;
        let mut changes = Vec::new();
        for (key, value) in list.pairs() {
            if !keys::POLICY.contains(key) {
                return Err(PolicyError::Fixed(key));
            }
            changes.push((*key, (*value != DEFAULT).then(|| (*value).to_owned())));
        }
        // What other keys have does not matter: each of them has a right value already.
        let new = changes.iter().filter_map(|(key, value)| Some((*key, value.as_deref()?)));
        policy::read(&new.collect())?;
        Ok(Self { changes })
    }
}

impl Display for PolicyChange {
    /// Writes the change as it is read.
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        let value = |value: &'_ Option<String>| value.as_deref().unwrap_or(DEFAULT).to_owned();
        let changes: Vec<_> = self.changes.iter().map(|(key, of)| (*key, value(of))).collect();
        let pairs = changes.iter().map(|(key, value)| (*key, value.as_str()));
        pairs.collect::<KeyValues<'_>>().fmt(out)
    }
}

impl PolicyChange {
    /// Returns what a guest is that was as this text says, once the change is made.
    ///
    /// # Errors
    ///
    /// The text is not that of a guest.
    pub fn of(&self, spec: &str) -> Result<GuestSpec, SpecError> {
        let list = KeyValues::read(spec, keys::GUEST, &[])?;
        let is_changed = |key: &str| self.changes.iter().any(|(changed, _)| *changed == key);
        let kept = list.pairs().iter().copied().filter(|(key, _)| !is_changed(key));
        let new = self.changes.iter().filter_map(|(key, value)| Some((*key, value.as_deref()?)));
        kept.chain(new).collect::<KeyValues<'_>>().to_string().parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_concerns_what_it_names() {
        let change = |text: &str, changes: &str| {
            let change = changes.parse::<PolicyChange>().unwrap();
            change.of(&format!("name=a,vfio-user=b{text}")).unwrap().text
        };
        assert_eq!(change("", "rate=1G"), "name=a,vfio-user=b,rate=1G");
        assert_eq!(
            change(",rate=1G,rings=off,qps=3", "rate=2G"),
            "name=a,vfio-user=b,rings=off,qps=3,rate=2G"
        );
        assert_eq!(change(",rate=1G,qps=3", "qps=default,rate=default"), "name=a,vfio-user=b");
        assert_eq!(change("", "rate=default"), "name=a,vfio-user=b");
    }

    #[test]
    fn mistakes_in_changes_are_named() {
        let error = |text: &str| text.parse::<PolicyChange>().unwrap_err();
        assert_eq!(error("rings=off"), PolicyError::Fixed("rings"));
        assert_eq!(error("rate=1G,name=b"), PolicyError::Fixed("name"));
        assert!(matches!(error("speed=1"), PolicyError::List(ListError::UnknownKey { .. })));
        assert!(matches!(error(""), PolicyError::List(ListError::NoValue(_))));
        assert!(matches!(error("qps=1,qps=2"), PolicyError::List(ListError::Twice("qps"))));
        assert!(matches!(error("qps=0"), PolicyError::List(ListError::Value { key: "qps", .. })));
        assert!(matches!(
            error("gid=default+10.0.0.1"),
            PolicyError::List(ListError::Value { .. })
        ));
    }

    #[test]
    fn the_policy_is_a_part_of_a_guest() {
        assert_eq!((keys::POLICY.first(), keys::POLICY.last()), (Some(&"gid"), Some(&"memory")));
    }
}
