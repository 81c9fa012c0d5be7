// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A change of what a guest may do, while the guest is there.

use std::fmt::{Display, Formatter};
use std::str::FromStr;

use serde_json::Value;

use super::form::{self, Map, Spec, SpecError};
use super::guest::GuestSpec;
use super::policy;

/// A change of a guest's policy: keys and their new values (a merge patch, RFC 7396). With null, the guest does not
/// have the key any more. A key that is not there stays as it is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PolicyChange(Map);

/// The reason why a policy cannot be changed.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
pub enum PolicyError {
    /// A key does not belong to the policy.
    #[error("{0} cannot be changed while the guest is there")]
    Fixed(String),
    /// A key does not exist or has a wrong value.
    #[error(transparent)]
    Spec(#[from] SpecError),
}

impl PolicyChange {
    /// Reads an object, or the text that earlier versions have in its place.
    ///
    /// # Errors
    ///
    /// A key does not belong to the policy, or cannot have its value.
    pub fn of_value(value: Value) -> Result<Self, PolicyError> {
        if let Value::String(text) = &value {
            return text.parse();
        }
        Self::of_map(&form::map_of(value)?)
    }

    fn of_map(map: &Map) -> Result<Self, PolicyError> {
        let read: GuestSpec = form::read(map.clone())?;
        let of = read.to_map();
        let mut changes = Map::new();
        for key in map.keys().map(|key| form::in_object(key)) {
            if !policy::KEYS.contains(&key.as_str()) {
                return Err(PolicyError::Fixed(form::in_text(&key)));
            }
            let value = of.get(&key).cloned().unwrap_or_default();
            changes.insert(key, value);
        }
        Ok(Self(changes))
    }

    /// Returns the change that makes the policy of one guest that of another.
    pub fn between(old: &GuestSpec, new: &GuestSpec) -> Self {
        let (old, new) = (old.to_map(), new.to_map());
        let differs = |key: &&&str| old.get(**key) != new.get(**key);
        let change = |key: &&str| ((*key).to_owned(), new.get(*key).cloned().unwrap_or_default());
        Self(policy::KEYS.iter().filter(differs).map(change).collect())
    }

    /// Returns whether nothing changes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the object.
    pub fn to_value(&self) -> Value {
        self.0.clone().into()
    }

    /// Returns the specification of a guest once the change is made.
    ///
    /// # Errors
    ///
    /// The guest would not be right any more.
    pub fn of(&self, spec: &GuestSpec) -> Result<GuestSpec, SpecError> {
        let mut map = spec.to_map();
        map.extend(self.0.clone());
        GuestSpec::of_map(map)
    }
}

impl FromStr for PolicyChange {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        Self::of_map(&form::with_defaults(form::map_of_text(text)?))
    }
}

impl Display for PolicyChange {
    /// Writes the change as it is read.
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        out.write_str(&form::text_of(policy::KEYS, &self.0))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_change_concerns_what_it_names() {
        let change = |text: &str, changes: &str| {
            let change = changes.parse::<PolicyChange>().unwrap();
            assert_eq!(PolicyChange::of_value(change.to_value()).unwrap(), change);
            change.of(&format!("name=a,vfio-user=b{text}").parse().unwrap()).unwrap().to_string()
        };
        assert_eq!(change("", "rate=1G"), "name=a,vfio-user=b,rate=1G");
        assert_eq!(
            change(",rate=1G,rings=off,qps=3", "rate=2G"),
            "name=a,vfio-user=b,rings=off,rate=2G,qps=3"
        );
        assert_eq!(change(",rate=1G,qps=3", "qps=default,rate=default"), "name=a,vfio-user=b");
        assert_eq!(change("", "rate=default"), "name=a,vfio-user=b");
        assert_eq!(
            change("", "message-rate=5K,gid=::1+10.0.0.0/8"),
            "name=a,vfio-user=b,gid=::1+10.0.0.0/8,message-rate=5K"
        );
    }

    #[test]
    fn a_change_is_an_object_or_a_text() {
        let object =
            json!({ "gid": ["10.0.0.1", "fd00::/64"], "qps": 3, "rate": 8000, "memory": null });
        let text = "gid=10.0.0.1+fd00::/64,rate=8K,qps=3,memory=default";
        let change = PolicyChange::of_value(object).unwrap();
        assert_eq!(PolicyChange::of_value(text.into()).unwrap(), change);
        assert_eq!(change.to_string(), text);
    }

    #[test]
    fn mistakes_in_changes_are_named() {
        let error = |text: &str| text.parse::<PolicyChange>().unwrap_err();
        assert_eq!(error("rings=off"), PolicyError::Fixed("rings".to_owned()));
        assert_eq!(error("rate=1G,max-qp=3"), PolicyError::Fixed("max-qp".to_owned()));
        for (text, reason) in [
            ("speed=1", "unknown key \"speed\"; there are name, vfio-user, "),
            ("", "\"\" is not KEY=VALUE"),
            ("qps=1,qps=2", "\"qps\" is given twice"),
            ("qps=0", "qps: \"0\" is not a number of at least 1"),
            ("gid=default+10.0.0.1", "gid: \"default\" is not an IP address or a prefix"),
        ] {
            let error = error(text).to_string();
            assert!(error.starts_with(reason), "{text}: {error}");
        }
        for object in [json!({ "rings": null }), json!({ "name": "b" })] {
            let error = PolicyChange::of_value(object.clone()).unwrap_err();
            assert!(matches!(error, PolicyError::Fixed(_)), "{object}: {error}");
        }
        for object in
            [json!({ "qps": 1.5 }), json!({ "gid": [] }), json!({ "qps": [1] }), json!([])]
        {
            let error = PolicyChange::of_value(object.clone()).unwrap_err();
            assert!(matches!(error, PolicyError::Spec(_)), "{object}: {error}");
        }
    }

    #[test]
    fn the_policy_is_a_part_of_a_guest() {
        assert_eq!((policy::KEYS.first(), policy::KEYS.last()), (Some(&"gid"), Some(&"memory")));
    }
}
