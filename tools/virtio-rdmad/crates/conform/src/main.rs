// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `virtio-rdma-conform`: judges a virtio-rdma device, or a driver, by the clauses of the specification.

#![forbid(unsafe_code)]

use std::io::{self, Write};
use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::{Duration, Instant};

use clap::{value_parser, Args, Parser, Subcommand};
use conform::observer::observe;
use conform::observer::provoke::{self, Provoker, Times};
use conform::port::{Attach, InProcess, Network, VfioUser, VhostUser};
use conform::report::Report;
use conform::suite::{all, Run, Settings, Suite};
use hostile::{bits, parse_mac, End, Mac, Settings as Offer, Socket};
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
    /// Judges a driver, as the device that it finds.
    Driver(Driver),
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

#[derive(Args, Debug)]
struct Driver {
    #[command(flatten)]
    place: Place,

    /// Writes everything that was found to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Ends when the VMM disconnects.
    #[arg(long)]
    until_disconnect: bool,

    /// Ends after this time.
    #[arg(long, value_name = "SECONDS", value_parser = value_parser!(u64).range(1..=86400))]
    seconds: Option<u64>,

    /// The seconds within which a doorbell, and a buffer for events, must come.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = value_parser!(u64).range(1..=3600))]
    patience: u64,

    /// Does this wrong, once; "list" prints what there is, and its clauses.
    #[arg(long, value_name = "NAME")]
    provoke: Option<String>,

    /// The MAC address of the guest's network interface.
    #[arg(long, value_name = "MAC", value_parser = parse_mac)]
    mac: Option<Mac>,

    /// Does not offer these feature bits.
    #[arg(long, value_name = "BIT", value_delimiter = ',', value_parser = value_parser!(u32).range(0..64))]
    without: Vec<u32>,

    /// Offers these feature bits too, and does nothing about them.
    #[arg(long, value_name = "BIT", value_delimiter = ',', value_parser = value_parser!(u32).range(0..64))]
    with: Vec<u32>,
}

/// The socket at which the VMM finds the device.
#[derive(Args, Debug)]
#[group(multiple = false)]
struct Place {
    /// Waits for a VMM that speaks vhost-user.
    #[arg(long, value_name = "PATH")]
    vhost_user: Option<PathBuf>,

    /// Waits for a VMM that speaks vfio-user.
    #[arg(long, value_name = "PATH")]
    vfio_user: Option<PathBuf>,
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

/// Judges the driver that comes. Returns whether it breaks no clause.
fn judge_driver(options: Driver) -> Result<bool, Error> {
    if options.provoke.as_deref() == Some("list") {
        let mut out = io::stdout().lock();
        for what in provoke::ALL {
            writeln!(out, "{} {}", what.name, what.clauses.join(" "))?;
        }
        return Ok(true);
    }
    let find = |name: String| {
        let provoker = Provoker::new(&name, Times::default());
        provoker.ok_or_else(|| format!("no provocation is called {name}, see list"))
    };
    let provoker = options.provoke.map(find).transpose()?;
    let Place { vhost_user, vfio_user } = options.place;
    let vhost = vhost_user.map(Socket::VhostUser);
    let socket = vhost
        .or_else(|| vfio_user.map(Socket::VfioUser))
        .ok_or("no socket: --vhost-user or --vfio-user")?;
    let (with, without) = (bits(&options.with), bits(&options.without));
    let offer = Offer::new(socket.is_vfio(), options.mac.map(|Mac(mac)| mac));
    let offer = Offer { direct: true, with, without, ..offer };
    let at = options.seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let end = End { at_disconnect: options.until_disconnect, at };
    let report = observe(&socket, offer, end, Duration::from_secs(options.patience), provoker)?;
    report.write(&mut io::stdout().lock())?;
    if let Some(path) = options.json {
        std::fs::write(path, serde_json::to_string_pretty(&report.json())? + "\n")?;
    }
    Ok(!report.has_failed())
}

fn main() -> ExitCode {
    let result = match Options::parse().side {
        Side::Device(device) => judge(device),
        Side::Driver(driver) => judge_driver(driver),
    };
    match result {
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
        let helps = ["device", "driver"].map(|name| {
            let side = command.find_subcommand_mut(name).expect("a command");
            (name.into(), side.render_long_help().to_string())
        });
        testkit::manual::check(include_str!("../../../virtio-rdma-conform.1"), helps);
    }

    #[test]
    fn a_driver_comes_to_one_socket() {
        for words in ["--vhost-user a", "--vfio-user a --without 1,2 --seconds 3", "--provoke list"]
        {
            let words = format!("virtio-rdma-conform driver {words}");
            assert!(Options::try_parse_from(words.split_whitespace()).is_ok(), "{words}");
        }
        for words in ["--vhost-user a --vfio-user b", "--vhost-user a --mac 1:2"] {
            let words = format!("virtio-rdma-conform driver {words}");
            assert!(Options::try_parse_from(words.split_whitespace()).is_err(), "{words}");
        }
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
