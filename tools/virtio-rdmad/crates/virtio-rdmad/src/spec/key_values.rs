// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lists of KEY=VALUE with commas between them, the form of `--guest` and `--uplink`.

use std::fmt::{Display, Formatter};
use std::str::FromStr;

/// What is wrong with a list.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
pub enum ListError {
    /// A part is not KEY=VALUE.
    #[error("\"{0}\" is not KEY=VALUE")]
    NoValue(String),
    /// A key does not exist.
    #[error("unknown key \"{key}\"; there are {}", known.join(", "))]
    UnknownKey {
        /// The key.
        key: String,
        /// The keys that exist.
        known: &'static [&'static str],
    },
    /// A key is given twice.
    #[error("\"{0}\" is given twice")]
    Twice(&'static str),
    /// A key is missing.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A key cannot have this value.
    #[error("{key}: \"{value}\" is not {wanted}")]
    Value {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What values the key can have.
        wanted: &'static str,
    },
}

impl ListError {
    /// Returns the key that is wrong, or what stands in the place of a key.
    pub fn key(&self) -> &str {
        match self {
            Self::NoValue(key) | Self::UnknownKey { key, .. } => key,
            Self::Twice(key) | Self::Missing(key) | Self::Value { key, .. } => key,
        }
    }

    /// Returns the error of a key that cannot have this value.
    pub fn value(key: &'static str, value: &str, wanted: &'static str) -> Self {
        Self::Value { key, value: value.to_owned(), wanted }
    }
}

/// The pairs of a list, in its order.
#[derive(Debug)]
pub struct KeyValues<'a> {
    pairs: Vec<(&'static str, &'a str)>,
}

impl<'a> KeyValues<'a> {
    /// Reads a list. Only keys of `repeatable` may be there more than once.
    ///
    /// # Errors
    ///
    /// A part has no value, or its key is none of `known`, or is there again.
    pub fn read(
        list: &'a str,
        known: &'static [&'static str],
        repeatable: &[&str],
    ) -> Result<Self, ListError> {
        let mut this = Self { pairs: Vec::new() };
        for pair in list.split(',') {
            let no_value = || ListError::NoValue(pair.to_owned());
            let (key, value) = pair.split_once('=').ok_or_else(no_value)?;
            let unknown = || ListError::UnknownKey { key: key.to_owned(), known };
            let key = *known.iter().find(|each| **each == key).ok_or_else(unknown)?;
            if value.is_empty() {
                return Err(no_value());
            }
            if !repeatable.contains(&key) && this.get(key).is_some() {
                return Err(ListError::Twice(key));
            }
            this.pairs.push((key, value));
        }
        Ok(this)
    }

    /// Returns the keys with their values, in the order of the list.
    pub fn pairs(&self) -> &[(&'static str, &'a str)] {
        &self.pairs
    }

    /// Returns the value of a key, the first one of a key that is there more than once.
    pub fn get(&self, key: &str) -> Option<&'a str> {
        self.all(key).next()
    }

    /// Returns the values of a key, in the order of the list.
    pub fn all<'k>(&'k self, key: &'k str) -> impl Iterator<Item = &'a str> + 'k {
        self.pairs.iter().filter(move |(each, _)| *each == key).map(|(_, value)| *value)
    }

    /// Reads the value of a key, if the key is there. `wanted` says what values it can have.
    ///
    /// # Errors
    ///
    /// The value is none of these.
    pub fn parse<T: FromStr>(
        &self,
        key: &'static str,
        wanted: &'static str,
    ) -> Result<Option<T>, ListError> {
        self.get(key).map(|value| parse(key, value, wanted)).transpose()
    }
}

impl<'a> FromIterator<(&'static str, &'a str)> for KeyValues<'a> {
    fn from_iter<I: IntoIterator<Item = (&'static str, &'a str)>>(pairs: I) -> Self {
        Self { pairs: pairs.into_iter().collect() }
    }
}

impl Display for KeyValues<'_> {
    /// Writes the list as [`KeyValues::read`] reads it.
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        for (at, (key, value)) in self.pairs.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            write!(out, "{comma}{key}={value}")?;
        }
        Ok(())
    }
}

/// Reads a value of a key. `wanted` says what values the key can have.
///
/// # Errors
///
/// The value is none of these.
pub fn parse<T: FromStr>(
    key: &'static str,
    value: &str,
    wanted: &'static str,
) -> Result<T, ListError> {
    value.parse().map_err(|_| ListError::value(key, value, wanted))
}

/// Reads a number of at least 1, if the key is there.
///
/// # Errors
///
/// The value is no such number, or is more than a `T` can hold.
pub fn number<T: FromStr + Default + PartialEq>(
    list: &KeyValues<'_>,
    key: &'static str,
) -> Result<Option<T>, ListError> {
    const WANTED: &str = "a number of at least 1";
    match list.parse(key, WANTED)? {
        Some(number) if number == T::default() => Err(ListError::value(key, "0", WANTED)),
        number => Ok(number),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: &[&str] = &["name", "port", "remote"];

    fn read(list: &str) -> Result<KeyValues<'_>, ListError> {
        KeyValues::read(list, KNOWN, &["remote"])
    }

    #[test]
    fn values_are_found_by_key() {
        let list = read("remote=b,name=x=y,remote=a").unwrap();
        assert_eq!((list.get("name"), list.get("port")), (Some("x=y"), None));
        assert_eq!(list.all("remote").collect::<Vec<_>>(), ["b", "a"]);
        assert_eq!(list.parse::<u16>("port", "a port"), Ok(None));
        assert_eq!(read("port=7").unwrap().parse("port", "a port"), Ok(Some(7_u16)));
    }

    #[test]
    fn mistakes_are_named() {
        let error = |list: &str| read(list).unwrap_err().to_string();
        assert_eq!(error(""), "\"\" is not KEY=VALUE");
        assert_eq!(error("name"), "\"name\" is not KEY=VALUE");
        assert_eq!(error("name=a,port="), "\"port=\" is not KEY=VALUE");
        assert_eq!(error("nome=a"), "unknown key \"nome\"; there are name, port, remote");
        assert_eq!(error("name=a,name=b"), "\"name\" is given twice");
        let port = read("port=x").unwrap().parse::<u16>("port", "a port").unwrap_err();
        assert_eq!(port.to_string(), "port: \"x\" is not a port");
    }
}
