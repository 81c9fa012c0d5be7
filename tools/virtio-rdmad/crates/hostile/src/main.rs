// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdma-hostile`: a virtio-rdma device that misbehaves when it is told to.
//!
//! It tests drivers. Until it is told to misbehave, it is a device like that of `virtio-rdmad`, for one
//! guest that talks to itself. Each connection to the control socket brings one order, which is a line
//! (module `rule`). The answer is a line that says how often a rule has been applied so far.

#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;

use clap::{Args, Parser};
use hostile::{bits, parse_mac, Blind, End, Mac, Process, Settings, Socket};

type Error = Box<dyn std::error::Error>;

/// A virtio-rdma device that misbehaves when it is told to, to test drivers.
#[derive(Debug, Parser)]
struct Options {
    #[command(flatten)]
    socket: Transport,

    /// MAC address of the guest's network interface.
    #[arg(long, value_parser = parse_mac)]
    mac: Option<Mac>,

    /// Does not offer rings.
    #[arg(long)]
    no_rings: bool,

    /// Does not offer these feature bits.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(0..64))]
    without: Vec<u32>,

    /// Offers these feature bits too, and does nothing about them.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(0..64))]
    with: Vec<u32>,

    /// Has no rules for completions in rings: they go to the guest as they are.
    #[arg(long)]
    direct: bool,

    /// Socket on which it takes orders.
    #[arg(long)]
    control: PathBuf,
}

/// How the VMM attaches the device.
#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
struct Transport {
    /// Socket for user-mode Linux.
    #[arg(long)]
    vhost_user: Option<PathBuf>,

    /// Socket for QEMU.
    #[arg(long)]
    vfio_user: Option<PathBuf>,
}

fn main() -> Result<(), Error> {
    let options = Options::parse();
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let Transport { vhost_user, vfio_user } = options.socket;
    let socket = match (vhost_user, vfio_user) {
        (Some(path), _) => Socket::VhostUser(path),
        (None, Some(path)) => Socket::VfioUser(path),
        (None, None) => return Err("no socket".into()),
    };
    let settings = Settings {
        rings: !options.no_rings,
        direct: options.direct,
        with: bits(&options.with),
        without: bits(&options.without),
        ..Settings::new(socket.is_vfio(), options.mac.map(|Mac(mac)| mac))
    };
    let watch = Rc::new(RefCell::new(Blind));
    Process::new(&socket, Some(&options.control), settings, watch)?.run(End::default())
}
