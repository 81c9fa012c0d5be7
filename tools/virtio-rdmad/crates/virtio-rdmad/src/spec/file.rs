// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The configuration file: the options of the command line, in TOML.
//!
//! An option with one value is a key of its name. `[[guest]]` and `[[uplink]]` are tables, with the keys of the options
//! of these names. Each value becomes what it is on the command line, and is read as there.

use std::collections::{BTreeMap, HashSet};
use std::fmt::{Display, Formatter};
use std::path::{Path, PathBuf};

use serde_json::Value;
use toml::de::{DeTable, DeValue};
use toml::Spanned;

use super::form::{in_object, in_text, Map, Spec, SpecError};
use super::guest::GuestSpec;
use super::uplink::UplinkSpec;

/// The tables of the file.
pub const TABLES: [&str; 2] = ["guest", "uplink"];

/// Returns the value of an option of this name as on the command line, if there is such an option and it can have the
/// value.
pub type ReadOption = fn(&str, &DeValue<'_>) -> Result<String, Mistake>;

/// The content of a configuration file.
#[derive(Clone, Debug, Default)]
pub struct ConfigFile {
    /// The options with one value, and their values as on the command line.
    pub options: BTreeMap<String, String>,
    /// The guests.
    pub guests: Vec<GuestSpec>,
    /// The uplinks.
    pub uplinks: Vec<UplinkSpec>,
}

/// The reason why a configuration file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{path}: {error}", path = .0.display(), error = .1)]
    Read(PathBuf, std::io::Error),
    /// The file has mistakes.
    #[error("{}", lines(.0, .1))]
    Wrong(PathBuf, Vec<WrongLine>),
    /// A process that is started by the file has nothing to do.
    #[error("{path}: there is neither a guest nor control", path = .0.display())]
    Nothing(PathBuf),
}

/// Returns a line for each mistake of a file.
fn lines(path: &Path, mistakes: &[WrongLine]) -> String {
    let lines = mistakes.iter().map(|wrong| format!("{}:{wrong}", path.display()));
    lines.collect::<Vec<_>>().join("\n")
}

/// A mistake, and the line that it is in, counted from 1.
#[derive(Debug, Eq, PartialEq)]
pub struct WrongLine {
    /// The line.
    pub line: usize,
    /// The mistake.
    pub mistake: Mistake,
}

impl Display for WrongLine {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}: {}", self.line, self.mistake)
    }
}

/// A mistake in a configuration file.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
pub enum Mistake {
    /// The file is not TOML.
    #[error("{0}")]
    Syntax(String),
    /// A key has a value of another kind.
    #[error("{key}: this is {found}, and not {wanted}")]
    Kind {
        /// The key.
        key: String,
        /// The kind of value that the key has.
        found: &'static str,
        /// The kind of value that the key can have.
        wanted: &'static str,
    },
    /// An option cannot have its value.
    #[error("{0}")]
    Option(String),
    /// An option does not exist, or a guest or an uplink is not right.
    #[error(transparent)]
    Spec(#[from] SpecError),
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
        Self::parse(&text, option).map_err(|mistakes| ConfigError::Wrong(path.to_owned(), mistakes))
    }

    /// Returns what it says beside the guests, by the names of options. The uplink of a network is named after it.
    pub fn settings(&self) -> BTreeMap<String, String> {
        let uplinks = self.uplinks.iter();
        let uplinks = uplinks.map(|spec| (format!("uplink {}", spec.network), spec.to_string()));
        self.options.clone().into_iter().chain(uplinks).collect()
    }

    /// Reads the text of a file. The mistakes that this returns are in the order of their lines.
    pub(crate) fn parse(text: &str, option: ReadOption) -> Result<Self, Vec<WrongLine>> {
        let mut reader = Reader { text, mistakes: Vec::new() };
        let (table, errors) = DeTable::parse_recoverable(text);
        for error in errors {
            let at = error.span().map_or(0, |span| span.start);
            reader.note(at, Mistake::Syntax(error.message().to_owned()));
        }
        // The values that the parser makes of a line with an error may have further mistakes.
        let is_toml = reader.mistakes.is_empty();
        let mut file = Self::default();
        for (key, value) in table.get_ref().iter().filter(|_| is_toml) {
            match key.get_ref().as_ref() {
                "guest" => file.guests = reader.guests(value),
                "uplink" => file.uplinks = reader.uplinks(value),
                name => match option(&in_text(name), value.get_ref()) {
                    Ok(value) => drop(file.options.insert(in_text(name), value)),
                    Err(why) => reader.note(key.span().start, why),
                },
            }
        }
        reader.mistakes.sort_by_key(|mistake| mistake.line);
        if reader.mistakes.is_empty() {
            Ok(file)
        } else {
            Err(reader.mistakes)
        }
    }
}

/// The key of an array of tables, and what the array has to be.
type Named = (&'static str, &'static str);

/// Reads a file, and collects the mistakes.
struct Reader<'a> {
    text: &'a str,
    mistakes: Vec<WrongLine>,
}

impl Reader<'_> {
    /// Notes a mistake at a position, in bytes.
    fn note(&mut self, at: usize, mistake: Mistake) {
        let before = self.text.as_bytes().iter().take(at);
        let line = 1 + before.filter(|byte| **byte == b'\n').count();
        self.mistakes.push(WrongLine { line, mistake });
    }

    fn guests(&mut self, value: &Spanned<DeValue<'_>>) -> Vec<GuestSpec> {
        let (mut names, mut macs, mut paths) = (HashSet::new(), HashSet::new(), HashSet::new());
        let guests = self.tables::<GuestSpec>(value, ("guest", "tables [[guest]]"));
        for (at, guest) in &guests {
            if !names.insert(&guest.name) {
                self.note(*at, Mistake::Name(guest.name.clone()));
            }
            if guest.mac().is_some() && !macs.insert((&guest.network, guest.mac())) {
                self.note(*at, Mistake::Mac(guest.network.clone()));
            }
            for path in guest.sockets() {
                if !path.is_absolute() {
                    self.note(*at, Mistake::Relative(path.clone()));
                }
                if !paths.insert(path) {
                    self.note(*at, Mistake::Path(path.clone()));
                }
            }
        }
        guests.into_iter().map(|(_, guest)| guest).collect()
    }

    fn uplinks(&mut self, value: &Spanned<DeValue<'_>>) -> Vec<UplinkSpec> {
        let mut networks = HashSet::new();
        let uplinks = self.tables::<UplinkSpec>(value, ("uplink", "tables [[uplink]]"));
        for (at, uplink) in &uplinks {
            if !networks.insert(&uplink.network) {
                self.note(*at, Mistake::UplinkTwice(uplink.network.clone()));
            }
        }
        uplinks.into_iter().map(|(_, uplink)| uplink).collect()
    }

    /// Reads the tables of an array of tables. Returns those without a mistake, and where they begin.
    fn tables<T: Spec>(&mut self, value: &Spanned<DeValue<'_>>, named: Named) -> Vec<(usize, T)> {
        let DeValue::Array(tables) = value.get_ref() else {
            self.note_kind(value, named);
            return Vec::new();
        };
        tables.iter().filter_map(|table| self.table(table, named)).collect()
    }

    fn note_kind(&mut self, value: &Spanned<DeValue<'_>>, (key, wanted): Named) {
        let (key, found) = (key.to_owned(), value.get_ref().type_str());
        self.note(value.span().start, Mistake::Kind { key, found, wanted });
    }

    /// Reads a table. After a mistake, it goes on without the key.
    fn table<T: Spec>(&mut self, table: &Spanned<DeValue<'_>>, named: Named) -> Option<(usize, T)> {
        let DeValue::Table(keys) = table.get_ref() else {
            self.note_kind(table, named);
            return None;
        };
        let (mut map, before) = (Map::new(), self.mistakes.len());
        for (key, value) in keys {
            match texts(key.get_ref(), value.get_ref()) {
                Ok(value) => drop(map.insert(key.get_ref().to_string(), value)),
                Err(why) => self.note(key.span().start, why),
            }
        }
        loop {
            let error = match T::of_map(map.clone()) {
                Ok(_) if self.mistakes.len() > before => return None,
                Ok(spec) => return Some((table.span().start, spec)),
                Err(error) => error,
            };
            let mut keys = keys.iter().map(|(key, _)| key);
            let key = keys.find(|key| in_object(key.get_ref()) == in_object(&error.key));
            let known = key.and_then(|key| map.remove(key.get_ref().as_ref()));
            // Without the keys that were wrong, others may be missing.
            if known.is_some() || self.mistakes.len() == before {
                self.note(key.map_or(table.span(), Spanned::span).start, error.into());
            }
            known.as_ref()?;
        }
    }
}

/// Returns a value with its parts as texts, as on the command line.
pub fn texts(key: &str, value: &DeValue<'_>) -> Result<Value, Mistake> {
    let one = |value: &DeValue<'_>| match value {
        DeValue::String(text) => Ok(text.to_string().into()),
        DeValue::Integer(number) if number.radix() == 10 => Ok(number.as_str().into()),
        DeValue::Boolean(is_on) => Ok(if *is_on { "on" } else { "off" }.into()),
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
        value => one(value),
    }
}
