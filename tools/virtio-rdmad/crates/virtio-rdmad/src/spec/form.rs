// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The forms of a guest or an uplink: an object of JSON, and the text KEY=VALUE[,KEY=VALUE...] of the command line.
//!
//! Each form becomes a [`Map`], of which serde makes the structure. A key is the name of a field; text and TOML have
//! `-` where the field has `_`.

use serde::de::value::MapDeserializer;
use serde::de::DeserializeOwned;
use serde::Serialize;
use serde_json::Value;

use super::text;

/// Keys and their values.
pub type Map = serde_json::Map<String, Value>;

/// The value in the text of a change that stands for a guest without the key.
const DEFAULT: &str = "default";

/// The key that is in a text once for each of its values. Other lists have `+` between their values.
const REPEATED: &str = "remote";

/// A mistake in a guest, an uplink, or a change of a policy.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct SpecError {
    /// The key that is wrong, as in a text; empty if no single key is.
    pub key: String,
    message: String,
}

impl SpecError {
    /// Returns an error that concerns no single key.
    pub fn new(message: impl Into<String>) -> Self {
        Self { key: String::new(), message: message.into() }
    }

    /// Returns the error of something that must be there.
    pub fn missing(what: &str) -> Self {
        Self::new(format!("{what} is missing"))
    }

    /// Returns the error of a key, for this reason.
    pub fn of(key: &str, reason: &str) -> Self {
        let key = in_text(key);
        Self { message: format!("{key}: {reason}"), key }
    }

    /// Returns the error of a key that there is twice.
    fn twice(key: &str) -> Self {
        let key = in_text(key);
        Self { message: format!("\"{key}\" is given twice"), key }
    }

    /// Returns the error of a key that is none of these.
    pub fn unknown(key: &str, known: &[&str]) -> Self {
        let known: Vec<_> = known.iter().map(|key| in_text(key)).collect();
        let key = in_text(key);
        Self { message: format!("unknown key \"{key}\"; there are {}", known.join(", ")), key }
    }
}

/// Returns a key as in a text.
pub fn in_text(key: &str) -> String {
    key.replace('_', "-")
}

/// Returns a key as in an object.
pub fn in_object(key: &str) -> String {
    key.replace('-', "_")
}

/// A structure that is written as keys and values.
pub trait Spec: DeserializeOwned + Serialize {
    /// The keys in the order in which a text has them.
    const KEYS: &'static [&'static str];

    /// Checks what concerns several keys.
    ///
    /// # Errors
    ///
    /// A key is missing, or two do not go together.
    fn check(&self) -> Result<(), SpecError>;

    /// Reads an object.
    ///
    /// # Errors
    ///
    /// A key does not exist, or has a value that it cannot have, or [`Self::check`] fails.
    fn of_map(map: Map) -> Result<Self, SpecError> {
        let spec: Self = read(map)?;
        spec.check()?;
        Ok(spec)
    }

    /// Reads an object, or the text that earlier versions have in its place.
    ///
    /// # Errors
    ///
    /// The value is neither of these, or [`Self::of_map`] fails.
    fn of_value(value: Value) -> Result<Self, SpecError> {
        Self::of_map(map_of(value)?)
    }

    /// Returns the object. A key that has its default is not in it.
    fn to_map(&self) -> Map {
        let defaults = defaults::<Self>();
        let is_set = |(key, value): &(String, Value)| defaults.get(key) != Some(value);
        all(self).into_iter().filter(is_set).collect()
    }
}

/// Returns the keys and values of a structure of which nothing is said.
fn defaults<T: Spec>() -> Map {
    let nothing: serde_json::Result<T> = serde_json::from_value(Map::new().into());
    nothing.as_ref().map(all).unwrap_or_default()
}

/// Returns all keys and values of a structure.
fn all(of: &impl Serialize) -> Map {
    match serde_json::to_value(of) {
        Ok(Value::Object(map)) => map,
        _ => Map::new(),
    }
}

/// Reads keys and values, and does not check what concerns several keys. A key with null counts as not there.
///
/// # Errors
///
/// A key does not exist, or has a value that it cannot have.
pub fn read<T: Spec>(given: Map) -> Result<T, SpecError> {
    let mut map = Map::new();
    for (key, value) in given {
        let key = in_object(&key);
        if !T::KEYS.contains(&key.as_str()) {
            return Err(SpecError::unknown(&key, T::KEYS));
        }
        if value.is_null() {
            continue;
        }
        check_text(&value).map_err(|reason| SpecError::of(&key, reason))?;
        // Each key is read alone first, so that the error is known to be that of the key.
        let alone = MapDeserializer::new(std::iter::once((key.as_str(), &value)));
        let read = T::deserialize(alone);
        read.map_err(|error: serde_json::Error| SpecError::of(&key, &error.to_string()))?;
        if map.insert(key.clone(), value).is_some() {
            return Err(SpecError::twice(&key));
        }
    }
    serde_json::from_value(Value::Object(map)).map_err(|error| SpecError::new(error.to_string()))
}

/// Checks that texts can be written in a list of KEY=VALUE.
fn check_text(value: &Value) -> Result<(), &'static str> {
    match value {
        Value::String(text) if text.is_empty() => Err("a value cannot be empty"),
        Value::String(text) if text.contains(',') => Err("a value cannot have a comma"),
        Value::Array(values) => values.iter().try_for_each(check_text),
        _ => Ok(()),
    }
}

/// Returns the keys and values of an object or a text.
///
/// # Errors
///
/// The value is neither of these, or the text is no list of KEY=VALUE.
pub fn map_of(value: Value) -> Result<Map, SpecError> {
    match value {
        Value::Object(map) => Ok(map),
        Value::String(text) => map_of_text(&text),
        _ => Err(SpecError::new("this is no object")),
    }
}

/// Reads a list of KEY=VALUE.
///
/// # Errors
///
/// A part has no value, or its key is there again.
pub fn map_of_text(list: &str) -> Result<Map, SpecError> {
    let mut map = Map::new();
    for pair in list.split(',') {
        let parts = pair.split_once('=').filter(|(_, value)| !value.is_empty());
        let (key, value) =
            parts.ok_or_else(|| SpecError::new(format!("\"{pair}\" is not KEY=VALUE")))?;
        match map.get_mut(key) {
            None if key == REPEATED => map.insert(key.to_owned(), vec![value].into()),
            None => map.insert(key.to_owned(), value.into()),
            Some(Value::Array(values)) => {
                values.push(value.into());
                continue;
            }
            Some(_) => return Err(SpecError::twice(key)),
        };
    }
    Ok(map)
}

/// Writes these keys with their values as [`map_of_text`] reads them.
pub fn text_of(keys: &[&str], map: &Map) -> String {
    let there = keys.iter().filter_map(|key| Some((*key, map.get(*key)?)));
    let pairs = there.flat_map(|(key, value)| {
        let values = match value {
            Value::Null => vec![DEFAULT.to_owned()],
            Value::Array(values) if key != REPEATED => {
                vec![values.iter().filter_map(text::of).collect::<Vec<_>>().join("+")]
            }
            Value::Array(values) => values.iter().filter_map(text::of).collect(),
            value => text::of(value).into_iter().collect(),
        };
        values.into_iter().map(move |value| format!("{}={value}", in_text(key)))
    });
    pairs.collect::<Vec<_>>().join(",")
}

/// Replaces each value "default" of a text by null, which stands for a guest without the key.
pub fn with_defaults(map: Map) -> Map {
    let value = |value: Value| if value == DEFAULT { Value::Null } else { value };
    map.into_iter().map(|(key, of)| (key, value(of))).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::string::string_regex;

    use super::super::file::Mistake;
    use super::super::{ConfigFile, GuestSpec, UplinkSpec};
    use super::*;

    /// The values that each key of a guest may have, as regular expressions. `nic` needs `mac`.
    const GUEST: [(&str, &str); 27] = [
        ("vfio-user", "/[a-z]{1,8}/vfio"),
        ("mac", "52(:[0-9a-f]{1,2}){5}"),
        ("network", "default|[a-z]{1,8}"),
        ("nic", "/[a-z]{1,8}/nic"),
        ("owner", "[a-z]{1,8}|:[a-z]{1,8}|[a-z]{1,8}:[a-z]{1,8}|[1-9][0-9]{0,4}"),
        ("mode", "0?[0-7]{1,3}"),
        ("rings", "on|off"),
        ("virtqueues", "on"),
        ("vectors", "[1-5][0-9]?"),
        ("max-qp", "[1-9]"),
        ("max-cq", "[1-9]"),
        (
            "gid",
            "(10\\.[1-9]?[0-9]\\.0\\.1(/[12][0-9]|/32)?|fd[0-9a-f]{2}::[1-9a-f](/[1-9][0-9]|/128)?)\
             (\\+::1|\\+::ffff:1\\.2\\.3\\.4){0,3}",
        ),
        ("vlan", "(none|[0-9]{1,3}|[0-9]{2}-[1-9][0-9]{2})(\\+none|\\+4094|\\+7-9){0,3}"),
        ("dscp", "([0-9]|[1-5][0-9])(\\+63|\\+8-15){0,3}"),
        ("pcp", "[0-7](\\+[0-3]-[3-7]){0,3}"),
        ("cnp-dscp", "[0-9]|[1-5][0-9]|6[0-3]"),
        ("rate", "[1-9][0-9]{4,9}|[1-9][0-9]{0,4}[MG]|8000|8K"),
        ("message-rate", "[1-9][0-9]{0,9}[KMG]?"),
        ("qps", "[1-9][0-9]{0,8}"),
        ("cqs", "[1-9][0-9]{0,8}"),
        ("srqs", "[1-9][0-9]{0,8}"),
        ("mrs", "[1-9][0-9]{0,8}"),
        ("mws", "[1-9][0-9]{0,8}"),
        ("pds", "[1-9][0-9]{0,8}"),
        ("groups", "0|[1-9][0-9]{0,8}"),
        ("memory", "[1-9][0-9]{3,6}[KMGT]|4096|[5-9][0-9]{3,9}"),
        ("name", "[a-z][a-z0-9=é.-]{0,8}"),
    ];

    /// Likewise for a tunnel. The other ends differ.
    const UPLINK: [(&str, &str); 6] = [
        ("carrier", "[a-z]{1,8}"),
        ("vxlan", "[0-9]{1,6}"),
        ("local", "10\\.0\\.0\\.[1-9]"),
        ("remote", "10\\.0\\.1\\.[1-9](,remote=10\\.0\\.2\\.[1-9])?(,remote=10\\.0\\.3\\.[1-9])?"),
        ("port", "[1-9][0-9]{0,3}"),
        ("network", "default|[a-z]{1,8}"),
    ];

    /// Likewise for an interface of the host.
    const PORT: [(&str, &str); 3] =
        [("interface", "[a-z]{1,8}"), ("trains", "on|off"), ("network", "default|[a-z]{1,8}")];

    /// Returns texts that have some of these keys, and these ones in any case.
    fn texts(
        keys: &'static [(&str, &str)],
        needed: &'static [&str],
    ) -> impl Strategy<Value = String> {
        let pair = |(key, values): &(&'static str, &str)| {
            let (key, is_needed) = (*key, needed.contains(key));
            let value = (string_regex(values).unwrap(), any::<bool>());
            value.prop_map(move |(value, is_there)| {
                (is_there || is_needed).then(|| format!("{key}={value}"))
            })
        };
        let pairs = keys.iter().map(pair).collect::<Vec<_>>().prop_shuffle();
        pairs.prop_map(|pairs| pairs.into_iter().flatten().collect::<Vec<_>>().join(","))
    }

    /// Returns what a file reads of a table that has these keys and values.
    fn read_file(table: &str, map: &Map) -> ConfigFile {
        let pairs = map.iter().map(|(key, value)| format!("{} = {value}\n", in_text(key)));
        let text = format!("[[{table}]]\n{}", pairs.collect::<String>());
        ConfigFile::parse(&text, no_option).unwrap()
    }

    fn no_option(name: &str, _: &toml::de::DeValue<'_>) -> Result<String, Mistake> {
        Err(Mistake::Syntax(name.to_owned()))
    }

    proptest! {
        #[test]
        fn a_guest_is_the_same_in_each_form(text in texts(&GUEST, &["name", "mac", "vfio-user"])) {
            let guest: GuestSpec = text.parse().unwrap();
            let (map, shortest) = (guest.to_map(), guest.to_string());
            prop_assert_eq!(&shortest.parse::<GuestSpec>().unwrap(), &guest);
            prop_assert_eq!(&GuestSpec::of_value(map.clone().into()).unwrap(), &guest);
            prop_assert_eq!(&GuestSpec::of_value(text.into()).unwrap(), &guest);
            let written = Value::from(map.clone()).to_string();
            let sent: Value = serde_json::from_str(&written).unwrap();
            prop_assert_eq!(&GuestSpec::of_value(sent).unwrap(), &guest);
            prop_assert_eq!(&read_file("guest", &map).guests, &[guest]);
            prop_assert_eq!(shortest.parse::<GuestSpec>().unwrap().to_string(), shortest);
        }

        #[test]
        fn an_uplink_is_the_same_in_each_form(
            text in prop_oneof![texts(&UPLINK, &["vxlan", "local", "remote"]), texts(&PORT, &["interface"])],
        ) {
            let uplink: UplinkSpec = text.parse().unwrap();
            let map = uplink.to_map();
            prop_assert_eq!(&uplink.to_string().parse::<UplinkSpec>().unwrap(), &uplink);
            prop_assert_eq!(&UplinkSpec::of_value(map.clone().into()).unwrap(), &uplink);
            prop_assert_eq!(&read_file("uplink", &map).uplinks, &[uplink]);
        }
    }

    #[test]
    fn each_field_has_a_key() {
        fn check<T: Spec>() {
            let mut keys = T::KEYS.to_vec();
            keys.sort_unstable();
            assert!(defaults::<T>().keys().eq(keys));
        }
        check::<GuestSpec>();
        check::<UplinkSpec>();
    }

    #[test]
    fn values_have_the_forms_of_their_types() {
        let guest: GuestSpec =
            "name=g,vhost-user=/a,max-qp=9,rings=off,gid=::1,vlan=none+7-9,rate=10G,mode=660"
                .parse()
                .unwrap();
        let expected = serde_json::json!({ "name": "g", "vhost_user": "/a", "mode": "0660", "rings": false,
            "max_qp": 9, "gid": ["::1"], "vlan": ["none", "7-9"], "rate": "10G" });
        assert_eq!(Value::from(guest.to_map()), expected);
        let other = serde_json::json!({ "name": "g", "vhost-user": "/a", "mode": 660, "rings": "off", "max_qp": "9",
            "gid": "::1", "vlan": ["none+7-9"], "rate": 10_000_000_000_u64, "mac": null, "network": null });
        assert_eq!(GuestSpec::of_value(other).unwrap(), guest);
    }

    #[test]
    fn mistakes_in_texts_are_named() {
        let error = |text: &str| map_of_text(text).unwrap_err().to_string();
        assert_eq!(error(""), "\"\" is not KEY=VALUE");
        assert_eq!(error("name"), "\"name\" is not KEY=VALUE");
        assert_eq!(error("name=a,port="), "\"port=\" is not KEY=VALUE");
        assert_eq!(error("name=a,name=b"), "\"name\" is given twice");
        let twice = "name=a,vfio-user=/a,max-qp=1,max_qp=2".parse::<GuestSpec>().unwrap_err();
        assert_eq!(twice.to_string(), "\"max-qp\" is given twice");
    }
}
