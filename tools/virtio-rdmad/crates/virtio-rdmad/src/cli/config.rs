// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The configuration file, and how it adds to the command line.

use std::ffi::OsString;
use std::path::Path;

use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches, Parser};
use serde_json::Value;
use toml::de::DeValue;

use super::options::{CheckOptions, Options};
use crate::spec::file::{texts, ConfigError, ConfigFile, Mistake, TABLES};
use crate::spec::SpecError;

/// Options that a file cannot have as keys with a value.
const NOT_IN_FILE: [&str; 5] = ["config", "guest", "uplink", "help", "version"];

/// The arguments of the process, with what its configuration file says besides, if there is one. An option of the
/// command line takes precedence over that of the file; guests and uplinks are those of both.
pub fn options() -> Result<Options, ConfigError> {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    let matches = Options::command().get_matches_from(&arguments);
    let mut options = Options::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let Some(path) = options.config.clone() else { return Ok(options) };
    let file = read(&path)?;
    let is_given = |option: &str| {
        let command = Options::command();
        let id = command.get_arguments().find(|arg| arg.get_long() == Some(option));
        let source = id.and_then(|arg| matches.value_source(arg.get_id().as_str()));
        source == Some(ValueSource::CommandLine)
    };
    let more = file.options.iter().filter(|(option, _)| !is_given(option));
    arguments.extend(more.map(|(option, value)| format!("--{option}={value}").into()));
    options = Options::parse_from(arguments);
    options.guests.extend(file.guests.iter().cloned());
    options.uplinks.extend(file.uplinks.iter().cloned());
    options.file = file;
    if options.guests.is_empty() && options.control.is_none() {
        return Err(ConfigError::Nothing(path));
    }
    Ok(options)
}

/// Reads a configuration file, and checks all of it.
///
/// # Errors
///
/// The file cannot be read, or has a mistake.
pub fn read(path: &Path) -> Result<ConfigFile, ConfigError> {
    ConfigFile::read(path, option)
}

/// `virtio-rdmad check`: says that a file is right, or what is wrong in it.
pub fn check(options: &CheckOptions) -> Result<(), Box<dyn std::error::Error>> {
    let path = options.config.display();
    match read(&options.config) {
        Ok(file) => {
            let (guests, uplinks) = (file.guests.len(), file.uplinks.len());
            println!("{path}: no mistakes; guests: {guests}, uplinks: {uplinks}");
            Ok(())
        }
        Err(ConfigError::Wrong(_, mistakes)) => {
            for mistake in &mistakes {
                eprintln!("{path}:{mistake}");
            }
            Err(format!("{path}: mistakes: {}", mistakes.len()).into())
        }
        Err(error) => Err(error.into()),
    }
}

/// Returns the value of an option as on the command line, which the option can have.
fn option(name: &str, value: &DeValue<'_>) -> Result<String, Mistake> {
    let command = Options::command();
    let names = command.get_arguments().filter_map(clap::Arg::get_long);
    let names: Vec<_> = names.filter(|name| !NOT_IN_FILE.contains(name)).chain(TABLES).collect();
    if !names.contains(&name) {
        return Err(SpecError::unknown(name, &names).into());
    }
    let text = match texts(name, value)? {
        Value::String(text) => text,
        Value::Array(cpus) if name == "cpus" => {
            cpus.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(",")
        }
        _ => {
            let (key, found, wanted) = (name.to_owned(), value.type_str(), "one value");
            return Err(Mistake::Kind { key, found, wanted });
        }
    };
    if name == "control" && !Path::new(&text).is_absolute() {
        return Err(Mistake::Relative(text.into()));
    }
    // Something has to be there for the process to do, which is not what is looked at here.
    let config = "--config=/";
    Options::try_parse_from(["virtio-rdmad", config, &format!("--{name}={text}")])
        .map(|_| text)
        .map_err(|error| {
            let text = error.to_string();
            let line = text.lines().next().unwrap_or_default();
            Mistake::Option(line.strip_prefix("error: ").unwrap_or(line).to_owned())
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::file::WrongLine;

    /// Returns all mistakes of a file, with their lines.
    fn mistakes(text: &str) -> Vec<String> {
        let mistakes = ConfigFile::parse(text, option).unwrap_err();
        mistakes.iter().map(WrongLine::to_string).collect()
    }

    /// Checks that a file has one mistake, whose text begins so.
    fn check(text: &str, mistake: &str) {
        let mistakes = mistakes(text);
        assert!(
            mistakes.len() == 1 && mistakes[0].starts_with(mistake),
            "{text}: {mistakes:?}, and not {mistake}"
        );
    }

    #[test]
    fn a_file_says_what_options_say() {
        let file = ConfigFile::parse(
            "control = '/run/c'\nworkers = 2\ncpus = [2, '4-7']\nsandbox = false\npoll-us = 10\n\
             [[guest]]\nvhost-user = '/run/a'\nname = 'a'\nrings = true\nmax-qp = 10\ngid = ['10.0.0.1', 'fd00::/64']\n\
             [[guest]]\nname = 'b'\nvfio-user = '/run/b'\nrate = '10G'\ngroups = 0\ndscp = [26, '0-7']\npcp = 3\n\
             [[uplink]]\nvxlan = 7\nlocal = '192.0.2.1'\nremote = ['192.0.2.2', '192.0.2.3']\n",
            option,
        )
        .unwrap();
        let options: Vec<_> =
            file.options.iter().map(|(key, value)| format!("{key}={value}")).collect();
        assert_eq!(
            options,
            ["control=/run/c", "cpus=2,4-7", "poll-us=10", "sandbox=off", "workers=2"]
        );
        let guests: Vec<_> = file.guests.iter().map(ToString::to_string).collect();
        let expected = [
            "name=a,vhost-user=/run/a,max-qp=10,gid=10.0.0.1+fd00::/64",
            "name=b,vfio-user=/run/b,dscp=26+0-7,pcp=3,rate=10G,groups=0",
        ];
        assert_eq!(guests, expected);
        let uplink = "vxlan=7,local=192.0.2.1,remote=192.0.2.2,remote=192.0.2.3";
        assert_eq!(file.uplinks, [uplink.parse().unwrap()]);
        assert_eq!(file.settings()["uplink default"], uplink);
        assert_eq!(file.settings()["cpus"], "2,4-7");
        let nothing = ConfigFile::parse("# nothing\n", option).unwrap();
        assert!(nothing.guests.is_empty() && nothing.settings().is_empty());
    }

    #[test]
    fn the_example_is_right() {
        let file =
            ConfigFile::parse(include_str!("../../../../examples/virtio-rdmad.toml"), option)
                .unwrap();
        assert!(file.guests.len() >= 2 && file.options.contains_key("control"));
    }

    #[test]
    fn mistakes_are_named_with_their_lines() {
        let guest = "[[guest]]\nname='a'\nvfio-user='/a'\n";
        let kind = "this is";
        for (text, mistake) in [
            ("workers = 1\npoll-us =", "2: "),
            ("workers = 1\nworkers = 2", "2: "),
            ("\nworker = 1", "2: unknown key \"worker\"; there are "),
            ("config = 'x'", "1: unknown key \"config\""),
            ("help = 'x'", "1: unknown key \"help\""),
            ("version = 'x'", "1: unknown key \"version\""),
            (&format!("{guest}nome = 1"), "4: unknown key \"nome\"; there are name, vfio-user, "),
            ("workers = 1.5", &format!("1: workers: {kind} float, and not a string")),
            ("workers = 0x10", &format!("1: workers: {kind} integer, and not")),
            ("workers = [1, 2]", &format!("1: workers: {kind} array, and not one value")),
            ("cpus = []", &format!("1: cpus: {kind} array, and not")),
            ("guest = 1", &format!("1: guest: {kind} integer, and not tables [[guest]]")),
            ("[guest]\nname = 'a'", &format!("1: guest: {kind} table, and not tables")),
            ("guest = [1]", &format!("1: guest: {kind} integer, and not tables [[guest]]")),
            ("\nworkers = 0", "2: invalid value '0' for '--workers <N>'"),
            ("cpus = '3-1'", "1: invalid value '3-1' for '--cpus <LIST>'"),
            ("sandbox = 'yes'", "1: invalid value 'yes'"),
            ("control = 'c'", "1: the path c is relative"),
            ("[[guest]]\n\nname = 'a,b'", "3: name: a value cannot have a comma"),
            (&format!("{guest}nic = ''"), "4: nic: a value cannot be empty"),
            ("\n[[guest]]\nname = 'a'", "2: vfio-user=PATH or vhost-user=PATH is missing"),
            (&format!("{guest}qps = 0"), "4: qps: \"0\" is not a number of at least 1"),
            (&format!("{guest}rate = 1.5"), &format!("4: rate: {kind} float")),
            (
                &format!("{guest}gid = ['10.0.0.1', '10.0.0']"),
                "4: gid: \"10.0.0\" is not an IP address",
            ),
            (&format!("{guest}network = ['a', 'b']"), "4: network: invalid type: sequence"),
            (&format!("{guest}vectors = 65"), "4: vectors: 65 are too many"),
            ("[[uplink]]\nvxlan = 1", "1: local=ADDRESS is missing"),
            ("[[guest]]\nname='a'\nvfio-user='a'", "1: the path a is relative"),
        ] {
            check(text, mistake);
        }
    }

    #[test]
    fn all_mistakes_are_named() {
        let file = "workers = 0\n[[guest]]\nname = 'a'\nrate = 'fast'\nnome = 1\nqps = 1.5\n\
                    [[uplink]]\ntap = 't'\nport = 0\n[[guest]]\nname = 'b'\nvfio-user = 'b'\n";
        let lines = mistakes(file);
        let lines: Vec<_> =
            lines.iter().map(|mistake| mistake.split(' ').next().unwrap()).collect();
        // The missing socket of the first guest is not reported before its keys are right.
        assert_eq!(lines, ["1:", "4:", "5:", "6:", "9:", "10:"]);
        let syntax = mistakes("workers = \nlog = 'a\n[[guest]\n");
        assert!(syntax.len() > 1, "{syntax:?}");
    }

    #[test]
    fn guests_and_uplinks_differ() {
        let guest = |name: &str, path: &str| {
            format!("[[guest]]\nname='{name}'\nvfio-user='{path}'\nmac='52:54:0:0:0:1'\n")
        };
        let two = |one: (&str, &str), other: (&str, &str), mistake: &str| {
            let other = guest(other.0, other.1)
                .replace("0:1", if one.0 == other.0 { "0:2" } else { "0:1" });
            check(&(guest(one.0, one.1) + &other), mistake);
        };
        two(("a", "/a"), ("a", "/b"), "5: two guests have the name \"a\"");
        two(
            ("a", "/a"),
            ("b", "/b"),
            "5: two guests of network \"default\" have the same MAC address",
        );
        let other = guest("b", "/a") + "network = 'other'";
        check(&(guest("a", "/a") + &other), "5: two sockets at /a");
        let uplinks = "[[uplink]]\ntap='t'\n[[uplink]]\ntap='u'\n";
        check(uplinks, "3: two uplinks for network \"default\"");
    }
}
