// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `virtio-rdma-conform`: judges a virtio-rdma device by the clauses of the specification.

#![forbid(unsafe_code)]

use std::io::{self, Write};
use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use conform::port::{Attach, InProcess, Network, VfioUser, VhostUser};
use conform::report::Report;
use conform::suite::{all, Run, Settings, Suite};
use regex::Regex;

type Error = Box<dyn std::error::Error>;

/// Judges virtio-rdma by the clauses of its specification.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    #[command(subcommand)]
    side: Side,
}

#[derive(Debug, Subcommand)]
enum Side {
    /// Judges a device, as the VMM and the driver of it.
    Device(Device),
}

#[derive(Args, Debug)]
struct Device {
    #[command(flatten)]
    way: Way,

    /// Runs only tests whose name, or one of whose clauses, this regular expression matches.
    #[arg(long, value_name = "REGEX")]
    only: Option<Regex>,

    /// Writes everything that was found to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Prints the tests and their clauses, and does nothing else.
    #[arg(long)]
    list: bool,

    /// The seconds for which a test waits for what must come.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,

    /// The number from which all that is random follows.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// The GIDs that the devices may use, as IPv6 addresses.
    #[arg(long, value_name = "GID", num_args = 2, default_values = ["::ffff:10.0.0.1", "::ffff:10.0.0.2"])]
    gid: Vec<Ipv6Addr>,
}

/// The way to the device. Another socket is that of another device of the same network.
#[derive(Args, Debug)]
#[group(multiple = false)]
struct Way {
    /// Attaches by vhost-user.
    #[arg(long, value_name = "PATH", num_args = 1..=2)]
    vhost_user: Vec<PathBuf>,

    /// Attaches by vfio-user.
    #[arg(long, value_name = "PATH", num_args = 1..=2)]
    vfio_user: Vec<PathBuf>,

    /// Judges two devices like those of virtio-rdmad, in this process.
    #[arg(long)]
    in_process: bool,
}

impl Way {
    fn devices(self) -> Vec<Box<dyn Attach>> {
        let vhost = self.vhost_user.into_iter().map(|path| Box::new(VhostUser::new(path)) as _);
        let vfio = self.vfio_user.into_iter().map(|path| Box::new(VfioUser::new(path)) as _);
        let mut devices: Vec<Box<dyn Attach>> = vhost.chain(vfio).collect();
        if self.in_process {
            let network = Network::new();
            devices.extend([1, 2].map(|number| in_process(&network, number)));
        }
        devices
    }
}

fn in_process(network: &Rc<Network>, number: u8) -> Box<dyn Attach> {
    Box::new(InProcess::new(network, number))
}

fn list(out: &mut impl Write, runs: &[Run]) -> io::Result<()> {
    runs.iter().try_for_each(|run| writeln!(out, "{} {}", run.name(), run.test.clauses.join(" ")))
}

/// Judges the devices. Returns whether they break no clause.
fn judge(options: Device) -> Result<bool, Error> {
    let Device { way, only, json, list: lists, timeout, seed, gid } = options;
    let matches = |run: &Run| {
        let is_named = |regex: &Regex| {
            regex.is_match(&run.name()) || run.test.clauses.iter().any(|it| regex.is_match(it))
        };
        only.as_ref().is_none_or(is_named)
    };
    let runs: Vec<Run> = all().into_iter().filter(matches).collect();
    let mut out = io::stdout().lock();
    if lists {
        list(&mut out, &runs)?;
        return Ok(true);
    }
    let devices = way.devices();
    if devices.is_empty() {
        return Err("no device: --vhost-user, --vfio-user or --in-process".into());
    }
    let names: Vec<String> = devices.iter().map(|device| device.name()).collect();
    let gids = [gid[0].octets(), gid[1].octets()];
    let timeout = Duration::from_secs(timeout);
    let settings = Settings { timeout, seed, gids, ..Settings::default() };
    let mut suite = Suite::new(settings, devices);
    let mut report = Report::default();
    Report::begin(&mut out, &runs, seed)?;
    for run in &runs {
        let finding = suite.run(run);
        report.add(&mut out, finding)?;
    }
    report.end(&mut out)?;
    if let Some(path) = json {
        let text = serde_json::to_string_pretty(&report.json(&names, seed))?;
        std::fs::write(path, text + "\n")?;
    }
    Ok(!report.has_failed())
}

fn main() -> ExitCode {
    let Side::Device(device) = Options::parse().side;
    match judge(device) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("virtio-rdma-conform: {error}");
            ExitCode::from(2)
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_help_and_the_manual_page_name_all_options() {
        let mut command = Options::command();
        command.clone().debug_assert();
        let device = command.find_subcommand_mut("device").expect("a command");
        let helps = [("device".into(), device.render_long_help().to_string())];
        testkit::manual::check(include_str!("../../../virtio-rdma-conform.1"), helps);
    }

    #[test]
    fn a_device_is_found_by_one_way() {
        for words in ["", "--vhost-user a b --only x", "--vfio-user a", "--in-process --list"] {
            let words = format!("virtio-rdma-conform device {words}");
            assert!(Options::try_parse_from(words.split_whitespace()).is_ok(), "{words}");
        }
        for words in ["--vhost-user a b c", "--vhost-user a --vfio-user b", "--only ("] {
            let words = format!("virtio-rdma-conform device {words}");
            assert!(Options::try_parse_from(words.split_whitespace()).is_err(), "{words}");
        }
    }
}
