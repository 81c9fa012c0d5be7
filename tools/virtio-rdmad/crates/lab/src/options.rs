// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The command line.

use std::collections::BTreeMap;
use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches, Parser, Subcommand};

use crate::error::Error;

/// The most guests.
const MOST_GUESTS: u8 = 16;
/// The guests whose options the help shows. The others have the same.
const SHOWN: u8 = 2;
/// What a user is told who leaves `run` out.
const TIP: &str = "`run` or `shell` comes first: virtio-rdma-lab run --guests 2 -- ./my_test";

/// Guests with virtio-rdma devices: RDMA without hardware, without root and without a module in the host's kernel.
#[derive(Debug, Parser)]
#[command(name = "virtio-rdma-lab", version, flatten_help = true)]
pub struct Options {
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

impl Options {
    /// Takes a command line apart, whose first word is the name of the program.
    pub fn of(line: &[OsString]) -> Result<Self, clap::Error> {
        let first = line.get(1).and_then(|word| word.to_str()).unwrap_or_default();
        Self::try_parse_from(line).map_err(|error| with_tip(error, first))
    }
}

/// Adds the tip to an error, if the first word of the command line is what is wrong, and clap knows no verb like it.
fn with_tip(mut error: clap::Error, first: &str) -> clap::Error {
    let is_first = |kind| match error.get(kind) {
        Some(ContextValue::String(wrong)) => first.starts_with(wrong),
        _ => false,
    };
    let is_wrong = is_first(ContextKind::InvalidArg) || is_first(ContextKind::InvalidSubcommand);
    if is_wrong && error.get(ContextKind::SuggestedSubcommand).is_none() {
        // Here clap would suggest `--version` for `--verbose`.
        error.remove(ContextKind::SuggestedArg);
        error.remove(ContextKind::Usage);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![TIP.into()]));
    }
    error
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Runs a command in each guest at the same time, and ends when all of them have ended.
    ///
    /// If a command fails, the others get SIGTERM 10 seconds later. A guest whose command still runs 10 seconds after
    /// SIGTERM is killed.
    ///
    /// The command sees the files of this machine, and what it changes is gone afterwards. GUEST in its environment is
    /// the number of its guest, from 1 on, and PEERS has the addresses of the other guests. The exit status is that of
    /// the first guest whose command fails, 128 and the number of the signal that ended it, 124 if the time is over, or
    /// 125 if the lab itself fails.
    Run(Run),
    /// Opens a shell in guest 1, and ends when the shell ends.
    Shell(Shell),
}

/// The options of `run`.
#[derive(Args, Debug)]
pub struct Run {
    /// The guests.
    #[command(flatten)]
    pub guests: Guests,

    /// Gives SIGTERM to all commands after this time. The exit status is 124 then.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    pub timeout: Option<u32>,

    /// Commands of single guests.
    #[command(flatten)]
    pub commands: Commands,

    /// Command of each guest that has no --cmdN, and its arguments; no shell looks at them.
    #[arg(trailing_var_arg = true)]
    pub command: Vec<OsString>,
}

/// The options of `shell`.
#[derive(Args, Debug)]
pub struct Shell {
    /// The guests.
    #[command(flatten)]
    pub guests: Guests,

    /// Commands of the other guests. They get SIGTERM when the shell ends.
    #[command(flatten)]
    pub commands: Commands,
}

/// The options of the guests.
#[derive(Args, Debug)]
pub struct Guests {
    /// Number of guests.
    #[arg(long = "guests", value_name = "N", default_value_t = 2,
          value_parser = clap::value_parser!(u8).range(1..=i64::from(MOST_GUESTS)))]
    pub count: u8,

    /// Processors of each guest.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub cpus: u8,

    /// Memory of each guest, in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(128..))]
    pub memory: u32,

    /// MTU of the guests' network interfaces.
    #[arg(long, value_name = "BYTES", default_value_t = 1500, value_parser = clap::value_parser!(u16).range(1280..=9000))]
    pub mtu: u16,

    /// Percentage of packets that are lost between the guests, which have a host of their own each then.
    #[arg(long, value_name = "PERCENT", value_parser = percentage)]
    pub loss: Option<f64>,

    /// Lets the guests write to the working directory of this machine.
    #[arg(long)]
    pub share: bool,

    /// Module for the guests' kernel, and its parameters, for example "./my_ulp.ko depth=64"; several are loaded in
    /// this order.
    #[arg(long = "kernel-module", value_name = "FILE")]
    pub modules: Vec<String>,

    /// Prints the messages of the guests' kernels and of the device too.
    #[arg(long = "verbose", short = 'v')]
    pub is_verbose: bool,
}

/// The commands of single guests: the option `--cmdN` of guest N, a line for the shell.
#[derive(Debug)]
pub struct Commands(BTreeMap<u8, String>);

impl Commands {
    /// Returns the command of a guest.
    pub fn of(&self, guest: u8) -> Option<&str> {
        self.0.get(&guest).map(String::as_str)
    }

    /// Checks that they are for guests up to `count`.
    pub fn check(&self, count: u8) -> Result<(), Error> {
        match self.0.keys().find(|guest| **guest > count) {
            Some(guest) => Err(format!("--cmd{guest}: there are {count} guests").into()),
            None => Ok(()),
        }
    }
}

impl Args for Commands {
    fn augment_args(command: Command) -> Command {
        (1..=MOST_GUESTS).fold(command, |command, guest| {
            let name = format!("cmd{guest}");
            let help =
                format!("Command of guest {guest}, for the shell; --cmdN is that of guest N");
            let arg = Arg::new(name.clone()).long(name).value_name("LINE").help(help);
            command.arg(arg.hide(guest > SHOWN))
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Commands {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let of = |guest| Some((guest, matches.get_one::<String>(&format!("cmd{guest}"))?.clone()));
        Ok(Self((1..=MOST_GUESTS).filter_map(of).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0.append(&mut Self::from_arg_matches(matches)?.0);
        Ok(())
    }
}

fn percentage(text: &str) -> Result<f64, String> {
    let number = text.parse().map_err(|_| "not a number".to_owned())?;
    let is_one = (0.0..=50.0).contains(&number);
    is_one.then_some(number).ok_or_else(|| "not between 0 and 50".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// Returns what a user reads whose command line is wrong.
    fn mistake(line: &str) -> String {
        let words = std::iter::once("virtio-rdma-lab").chain(line.split(' '));
        Options::of(&words.map(OsString::from).collect::<Vec<_>>()).unwrap_err().to_string()
    }

    #[test]
    fn the_manual_page_has_all_options() {
        let mut command = Options::command();
        command.build();
        let all = command.render_help().to_string();
        assert!(all.contains("--timeout <SECONDS>"), "it has the options of the verbs: {all}");
        let verbs = command.get_subcommands_mut().filter(|verb| verb.get_name() != "help");
        let help =
            |verb: &mut Command| (verb.get_name().to_owned(), verb.render_long_help().to_string());
        testkit::manual::check(include_str!("../../../virtio-rdma-lab.1"), verbs.map(help));
    }

    #[test]
    fn a_user_who_leaves_run_out_gets_a_tip() {
        for line in [
            "--guests 2 ./test",
            "--guests=2 run ./test",
            "./test",
            "-v run ./test",
            "--verbose ./test",
        ] {
            let text = mistake(line);
            assert!(text.contains(TIP) && !text.contains("--version"), "{line}: {text}");
        }
        for (line, expected) in
            [("runn -- true", "'run'"), ("help ./test", "./test"), ("run --guest 2", "'--guests'")]
        {
            let text = mistake(line);
            assert!(text.contains(expected) && !text.contains(TIP), "{line}: {text}");
        }
    }
}
