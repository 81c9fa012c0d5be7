// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The command line.

use clap::Parser;

use crate::faults::Faults;

/// What stands below the options in the help.
const MORE: &str = "\
Shares are numbers from 0 to 1, such as 0.01 for 1 %, of the packets of each direction.

Packets of RoCE v2 are those of UDP, to port 4791, over IPv4 without options or IPv6 without extensions, with the tag \
of a VLAN or without. All other frames pass as they are.

The taps have to be there, up, and owned by the user that starts this program, which then needs no privilege:

  ip tuntap add cable1 mode tap user \"$USER\"
  ip link set cable1 txqueuelen 10000 master bridge1 up

Example:

  virtio-rdma-impair cable1 cable2 --loss 0.01 --delay 0.1 --delay-ms 20 --seed 7";

/// A bad network cable between two taps, for packets of RoCE v2.
///
/// The cable brings each frame that the kernel sends over one tap to the other one. On the way it loses, repeats,
/// delays, reorders, corrupts and marks packets of RoCE v2 in both directions, as the options say. Without an option
/// it changes nothing. SIGINT and SIGTERM end it; then it prints what it has counted.
#[derive(Debug, Parser)]
#[command(name = "virtio-rdma-impair", version, after_long_help = MORE)]
pub struct Options {
    /// The tap at one end of the cable.
    #[arg(value_name = "TAP1")]
    pub one: String,
    /// The tap at the other end.
    #[arg(value_name = "TAP2")]
    pub other: String,
    #[command(flatten)]
    pub faults: Faults,
    /// Read lines from the standard input, each with a JSON object of the faults that packets meet from then on.
    ///
    /// The object has the names of the options, with _ in place of -; what it leaves out is 0. The answer is a line
    /// of the standard output, with a JSON object of what was counted since the line before. The cable also ends with
    /// its input, and answers a last time.
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use clap::error::ErrorKind;
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Result<Options, clap::Error> {
        Options::try_parse_from(std::iter::once("virtio-rdma-impair").chain(line.split(' ')))
    }

    /// Checks that a command line is refused for this reason, by a text that names what is wrong.
    fn refuse(line: &str, kind: ErrorKind, wrong: &str) {
        let error = parse(line).unwrap_err();
        assert_eq!(error.kind(), kind, "{line}");
        assert!(error.to_string().contains(wrong), "{line}: {error}");
    }

    #[test]
    fn options_say_what_json_says() {
        let options = parse(
            "a b --loss 0.01 --duplicate 0.02 --corrupt 0.03 --reorder 1 --delay .5 --delay-ms 20 --mark 1e-3 --seed 7",
        )
        .unwrap();
        let line = r#"{"loss": 0.01, "duplicate": 0.02, "corrupt": 0.03, "reorder": 1, "delay": 0.5, "delay_ms": 20,
            "mark": 0.001, "seed": 7}"#;
        assert_eq!((&*options.one, &*options.other), ("a", "b"));
        assert!(!options.json);
        assert_eq!(options.faults, Faults::parse(line).unwrap());
    }

    #[test]
    fn without_options_there_are_no_faults() {
        let options = parse("a b --json").unwrap();
        assert!(options.json);
        assert_eq!(options.faults, Faults::default());
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for share in ["1.5", "-0.1", "nan", "inf", "1%", "x"] {
            refuse(&format!("a b --loss={share}"), ErrorKind::ValueValidation, "--loss");
        }
        refuse("a b --delay 0.1", ErrorKind::MissingRequiredArgument, "--delay-ms");
        refuse("a b --delay-ms 20", ErrorKind::MissingRequiredArgument, "--delay");
        refuse("a b --delay 1 --delay-ms 70000", ErrorKind::ValueValidation, "70000");
        refuse("a b --los 1", ErrorKind::UnknownArgument, "--los");
        refuse("a", ErrorKind::MissingRequiredArgument, "<TAP2>");
        refuse("a b c", ErrorKind::UnknownArgument, "'c'");
    }

    #[test]
    fn the_help_and_the_manual_page_name_all_options() {
        let mut command = Options::command();
        command.clone().debug_assert();
        let help = command.render_long_help().to_string();
        for option in command.get_arguments().filter_map(clap::Arg::get_long) {
            assert!(help.contains(&format!("--{option}")), "{option}");
        }
        let helps = [(String::new(), help)];
        testkit::manual::check(include_str!("../../../virtio-rdma-impair.8"), helps);
    }
}
