// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The configuration file: the options of the command line, in TOML.
//!
//! An option with one value is a key of its name. `[[guest]]` and `[[uplink]]` are tables, with the keys of the options
//! of these names. Each value becomes what it is on the command line, and is read as there.

use std::collections::{BTreeMap, HashSet};
use std::fmt::{Display, Formatter};
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};
use toml::Spanned;

use super::guest::{GuestSpec, SpecError};
use super::key_values::KeyValues;
use super::keys;
use super::uplink::{self, UplinkError, UplinkSpec};

/// The tables of the file.
pub const TABLES: [&str; 2] = ["guest", "uplink"];

/// Returns the value of an option of this name as on the command line, if there is such an option and it can have the
/// value.
pub type ReadOption = fn(&str, &DeValue<'_>) -> Result<String, Mistake>;

/// Keys of a guest whose value is a list.
const LISTS: [&str; 4] = ["gid", "vlan", "dscp", "pcp"];

/// What a configuration file says.
#[derive(Clone, Debug, Default)]
pub struct ConfigFile {
    /// The options with one value, and their values as on the command line.
    pub options: BTreeMap<String, String>,
    /// The guests.
    pub guests: Vec<GuestSpec>,
    /// The uplinks, each as on the command line and as it was read.
    pub uplinks: Vec<(String, UplinkSpec)>,
}

/// Why a configuration file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("{path}: {error}", path = .0.display(), error = .1)]
    Read(PathBuf, std::io::Error),
    /// There is a mistake in it.
    #[error("{path}:{error}", path = .0.display(), error = .1)]
    Wrong(PathBuf, WrongLine),
    /// There is nothing to do for a process that is started by it.
    #[error("{path}: there is neither a guest nor control", path = .0.display())]
    Nothing(PathBuf),
}

/// A mistake, and the line that it is in, counted from 1.
#[derive(Debug, Eq, PartialEq)]
pub struct WrongLine {
    /// The line.
    pub line: usize,
    /// What is wrong in it.
    pub mistake: Mistake,
}

impl Display for WrongLine {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}: {}", self.line, self.mistake)
    }
}

/// What is wrong in a configuration file.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
pub enum Mistake {
    /// It is not TOML.
    #[error("{0}")]
    Syntax(String),
    /// A key does not exist.
    #[error("unknown key \"{key}\"; there are {}", known.join(", "))]
    UnknownKey {
        /// The key.
        key: String,
        /// The keys that exist.
        known: Vec<String>,
    },
    /// A key has a value of another kind.
    #[error("{key}: this is {found}, and not {wanted}")]
    Kind {
        /// The key.
        key: String,
        /// What kind of value it has.
        found: &'static str,
        /// What kind of value it can have.
        wanted: &'static str,
    },
    /// A value has a comma, which ends values on the command line.
    #[error("{0}: a value cannot have a comma")]
    Comma(String),
    /// An option cannot have its value.
    #[error("{0}")]
    Option(String),
    /// A guest is not right.
    #[error(transparent)]
    Guest(#[from] SpecError),
    /// An uplink is not right.
    #[error(transparent)]
    Uplink(#[from] UplinkError),
    /// The path of a socket is relative: it would depend on who reads the file.
    #[error("the path {path} is relative", path = .0.display())]
    Relative(PathBuf),
    /// Two guests have one name.
    #[error("two guests have the name \"{0}\"")]
    Name(String),
    /// Two guests of a network have one MAC address.
    #[error("two guests of network \"{0}\" have the same MAC address")]
    Mac(String),
    /// Two sockets have one path.
    #[error("two sockets at {path}", path = .0.display())]
    Path(PathBuf),
    /// Two uplinks are for one network.
    #[error("two uplinks for network \"{0}\"")]
    UplinkTwice(String),
}

impl ConfigFile {
    /// Reads a file, and checks all of it.
    pub fn read(path: &Path, option: ReadOption) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|error| ConfigError::Read(path.to_owned(), error))?;
        Self::parse(&text, option).map_err(|error| ConfigError::Wrong(path.to_owned(), error))
    }

    /// Returns what it says beside the guests, by the names of options. The uplink of a network is named after it.
    pub fn settings(&self) -> BTreeMap<String, String> {
        let uplinks = self.uplinks.iter();
        let uplinks =
            uplinks.map(|(text, spec)| (format!("uplink {}", spec.network), text.clone()));
        self.options.clone().into_iter().chain(uplinks).collect()
    }

    pub(crate) fn parse(text: &str, option: ReadOption) -> Result<Self, WrongLine> {
        let lines = Lines(text);
        let table = DeTable::parse(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            lines.wrong(at, Mistake::Syntax(error.message().to_owned()))
        })?;
        let mut this = Self::default();
        for (key, value) in table.get_ref() {
            let (name, at) = (key.get_ref().as_ref(), key.span().start);
            match name {
                "guest" => this.read_guests(&lines, value)?,
                "uplink" => this.read_uplinks(&lines, value)?,
                _ => {
                    let value =
                        option(name, value.get_ref()).map_err(|why| lines.wrong(at, why))?;
                    this.options.insert(name.to_owned(), value);
                }
            }
        }
        Ok(this)
    }

    fn read_guests(
        &mut self,
        lines: &Lines<'_>,
        value: &Spanned<DeValue<'_>>,
    ) -> Result<(), WrongLine> {
        let (mut names, mut macs, mut paths) = (HashSet::new(), HashSet::new(), HashSet::new());
        for table in tables(lines, "guest", value)? {
            let wrong = |why| lines.wrong(table.span().start, why);
            let text = list(lines, table, keys::GUEST)?;
            let guest: GuestSpec = text.parse().map_err(|error: SpecError| {
                let key = if let SpecError::List(error) = &error { error.key() } else { "" };
                lines.wrong(place_of(table, key), error.into())
            })?;
            if !names.insert(guest.name.clone()) {
                return Err(wrong(Mistake::Name(guest.name)));
            }
            if guest.mac.is_some() && !macs.insert((guest.network.clone(), guest.mac)) {
                return Err(wrong(Mistake::Mac(guest.network)));
            }
            for path in guest.sockets() {
                if !path.is_absolute() {
                    return Err(wrong(Mistake::Relative(path.clone())));
                }
                if !paths.insert(path.clone()) {
                    return Err(wrong(Mistake::Path(path.clone())));
                }
            }
            self.guests.push(guest);
        }
        Ok(())
    }

    fn read_uplinks(
        &mut self,
        lines: &Lines<'_>,
        value: &Spanned<DeValue<'_>>,
    ) -> Result<(), WrongLine> {
        for table in tables(lines, "uplink", value)? {
            let wrong = |why| lines.wrong(table.span().start, why);
            let text = list(lines, table, uplink::KEYS)?;
            let uplink: UplinkSpec = text.parse().map_err(|error: UplinkError| {
                let key = if let UplinkError::List(error) = &error { error.key() } else { "" };
                lines.wrong(place_of(table, key), error.into())
            })?;
            if self.uplinks.iter().any(|(_, other)| other.network == uplink.network) {
                return Err(wrong(Mistake::UplinkTwice(uplink.network)));
            }
            self.uplinks.push((text, uplink));
        }
        Ok(())
    }
}

/// The text of a file, in which positions are found.
struct Lines<'a>(&'a str);

impl Lines<'_> {
    /// Returns a mistake at a position, in bytes.
    fn wrong(&self, at: usize, mistake: Mistake) -> WrongLine {
        let before = self.0.as_bytes().iter().take(at);
        WrongLine { line: 1 + before.filter(|byte| **byte == b'\n').count(), mistake }
    }
}

/// Returns the tables of an array of tables.
fn tables<'t, 'i>(
    lines: &Lines<'_>,
    key: &str,
    value: &'t Spanned<DeValue<'i>>,
) -> Result<Vec<&'t Spanned<DeValue<'i>>>, WrongLine> {
    let wanted = if key == "guest" { "tables [[guest]]" } else { "tables [[uplink]]" };
    let wrong = |of: &Spanned<DeValue<'_>>| {
        let found = of.get_ref().type_str();
        lines.wrong(of.span().start, Mistake::Kind { key: key.to_owned(), found, wanted })
    };
    let array = value.get_ref().as_array().ok_or_else(|| wrong(value))?;
    let all: Vec<_> = array.iter().collect();
    match all.iter().find(|table| !table.get_ref().is_table()) {
        Some(other) => Err(wrong(other)),
        None => Ok(all),
    }
}

/// Returns where a key of a table stands, or where the table begins that does not have the key.
fn place_of(table: &Spanned<DeValue<'_>>, key: &str) -> usize {
    let mut keys = table.get_ref().as_table().into_iter().flatten().map(|(key, _)| key);
    keys.find(|each| each.get_ref() == key).map_or(table.span().start, |key| key.span().start)
}

/// Returns a table as a list for the command line, with its keys in the order in which they are `known`.
fn list(
    lines: &Lines<'_>,
    table: &Spanned<DeValue<'_>>,
    known: &'static [&'static str],
) -> Result<String, WrongLine> {
    let mut values: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    for (key, value) in table.get_ref().as_table().into_iter().flatten() {
        let (name, wrong) = (key.get_ref(), |why| lines.wrong(key.span().start, why));
        let Some(place) = known.iter().position(|each| each == name) else {
            let known = known.iter().map(|key| (*key).to_owned()).collect();
            return Err(wrong(Mistake::UnknownKey { key: name.to_string(), known }));
        };
        let mut texts = texts(name, value.get_ref()).map_err(wrong)?;
        if texts.iter().any(|text| text.contains(',')) {
            return Err(wrong(Mistake::Comma(name.to_string())));
        }
        if LISTS.contains(&known[place]) {
            texts = vec![texts.join("+")];
        } else if !uplink::REPEATABLE.contains(&known[place]) {
            require_one(name, &texts).map_err(wrong)?;
        }
        values.insert(place, texts);
    }
    let pairs = values
        .iter()
        .flat_map(|(place, texts)| texts.iter().map(|text| (known[*place], text.as_str())));
    Ok(pairs.collect::<KeyValues<'_>>().to_string())
}

/// Fails if a key has several values.
pub fn require_one(key: &str, texts: &[String]) -> Result<(), Mistake> {
    if texts.len() == 1 {
        return Ok(());
    }
    Err(Mistake::Kind { key: key.to_owned(), found: "array", wanted: "one value" })
}

/// Returns a value, or the values of an array, as on the command line.
pub fn texts(key: &str, value: &DeValue<'_>) -> Result<Vec<String>, Mistake> {
    let one = |value: &DeValue<'_>| match value {
        DeValue::String(text) => Ok(text.to_string()),
        DeValue::Integer(number) if number.radix() == 10 => Ok(number.as_str().to_owned()),
        DeValue::Boolean(is_on) => Ok(if *is_on { "on" } else { "off" }.to_owned()),
        other => Err(Mistake::Kind {
            key: key.to_owned(),
            found: other.type_str(),
            wanted: "a string, a decimal number, a boolean or an array of these",
        }),
    };
    match value {
        DeValue::Array(values) if values.iter().next().is_some() => {
            values.iter().map(|value| one(value.get_ref())).collect()
        }
        value => Ok(vec![one(value)?]),
    }
}
