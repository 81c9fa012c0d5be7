// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The configuration file, and how it adds to the command line.

use std::ffi::OsString;
use std::path::Path;

use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches, Parser};
use toml::de::DeValue;

use super::options::Options;
use crate::spec::file::{require_one, texts, ConfigError, ConfigFile, Mistake, TABLES};

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
    options.uplinks.extend(file.uplinks.iter().map(|(_, uplink)| uplink.clone()));
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

/// Returns the value of an option as on the command line, which the option can have.
fn option(name: &str, value: &DeValue<'_>) -> Result<String, Mistake> {
    let command = Options::command();
    let names = command.get_arguments().filter_map(clap::Arg::get_long);
    let names: Vec<_> = names.filter(|name| !NOT_IN_FILE.contains(name)).collect();
    if !names.contains(&name) {
        let known = names.into_iter().chain(TABLES).map(str::to_owned).collect();
        return Err(Mistake::UnknownKey { key: name.to_owned(), known });
    }
    let texts = texts(name, value)?;
    if name != "cpus" {
        require_one(name, &texts)?;
    }
    let text = texts.join(",");
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
    use crate::spec::key_values::ListError;
    use crate::spec::keys;
    use crate::spec::SpecError;

    fn error(text: &str) -> (usize, Mistake) {
        let WrongLine { line, mistake } = ConfigFile::parse(text, option).unwrap_err();
        (line, mistake)
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
        let guests: Vec<_> = file.guests.iter().map(|guest| guest.text.as_str()).collect();
        let expected = [
            "name=a,vhost-user=/run/a,rings=on,max-qp=10,gid=10.0.0.1+fd00::/64",
            "name=b,vfio-user=/run/b,dscp=26+0-7,pcp=3,rate=10G,groups=0",
        ];
        assert_eq!(guests, expected);
        let uplink = "vxlan=7,local=192.0.2.1,remote=192.0.2.2,remote=192.0.2.3";
        assert_eq!(file.uplinks, [(uplink.to_owned(), uplink.parse().unwrap())]);
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
        assert!(matches!(error("workers = 1\nworkers ="), (2, Mistake::Syntax(_))));
        assert!(matches!(error("workers = 1\nworkers = 2"), (2, Mistake::Syntax(_))));
        assert!(matches!(error("\nworker = 1"), (2, Mistake::UnknownKey { key, known })
                if key == "worker" && known.contains(&"workers".to_owned()) && known.contains(&"guest".to_owned())));
        for key in ["config", "help", "version"] {
            assert!(
                matches!(error(&format!("{key} = 'x'")), (1, Mistake::UnknownKey { .. })),
                "{key}"
            );
        }
        let known = keys::GUEST.iter().map(|key| (*key).to_owned()).collect();
        let key = "nome".to_owned();
        assert_eq!(error(&format!("{guest}nome = 1")), (4, Mistake::UnknownKey { key, known }));
        assert!(matches!(error("workers = 1.5"), (1, Mistake::Kind { found: "float", .. })));
        assert!(matches!(error("workers = 0x10"), (1, Mistake::Kind { .. })));
        assert!(matches!(error("cpus = []"), (1, Mistake::Kind { .. })));
        assert!(matches!(error("guest = 1"), (1, Mistake::Kind { .. })));
        assert!(matches!(error("[guest]\nname = 'a'"), (1, Mistake::Kind { .. })));
        assert!(matches!(error("guest = [1]"), (1, Mistake::Kind { .. })));
        assert_eq!(error("[[guest]]\n\nname = 'a,b'"), (3, Mistake::Comma("name".to_owned())));
        assert!(
            matches!(error("\nworkers = 0"), (2, Mistake::Option(why)) if why.contains("--workers"))
        );
        assert!(matches!(error("cpus = '3-1'"), (1, Mistake::Option(why)) if why.contains("3-1")));
        assert!(matches!(error("sandbox = 'yes'"), (1, Mistake::Option(_))));
        assert_eq!(error("control = 'c'"), (1, Mistake::Relative("c".into())));
        let missing = SpecError::List(ListError::Missing("vfio-user=PATH or vhost-user=PATH"));
        assert_eq!(error("\n[[guest]]\nname = 'a'"), (2, Mistake::Guest(missing)));
        assert!(matches!(
            error("[[guest]]\nname='a'\nvfio-user='/a'\nqps=0"),
            (4, Mistake::Guest(_))
        ));
        assert!(matches!(error("[[guest]]\nname=['a','b']"), (2, Mistake::Kind { .. })));
        assert!(matches!(error("workers=[1, 2]"), (1, Mistake::Kind { .. })));
        assert!(matches!(error("[[uplink]]\nvxlan = 1"), (1, Mistake::Uplink(_))));
        assert_eq!(error("[[guest]]\nname='a'\nvfio-user='a'"), (1, Mistake::Relative("a".into())));
    }

    #[test]
    fn guests_and_uplinks_differ() {
        let guest = |name: &str, path: &str| {
            format!("[[guest]]\nname='{name}'\nvfio-user='{path}'\nmac='52:54:0:0:0:1'\n")
        };
        let two = |one: (&str, &str), other: (&str, &str)| {
            error(&(guest(one.0, one.1) + &guest(other.0, other.1)))
        };
        assert_eq!(two(("a", "/a"), ("a", "/b")), (5, Mistake::Name("a".to_owned())));
        assert_eq!(two(("a", "/a"), ("b", "/b")), (5, Mistake::Mac("default".to_owned())));
        let other = guest("b", "/a") + "network = 'other'";
        let path = error(&(guest("a", "/a") + &other));
        assert_eq!(path, (5, Mistake::Path("/a".into())));
        let uplinks = "[[uplink]]\ntap='t'\n[[uplink]]\ntap='u'\n";
        assert_eq!(error(uplinks), (3, Mistake::UplinkTwice("default".to_owned())));
    }
}
