// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdma-hostile`: a virtio-rdma device that misbehaves when it is told to.
//!
//! It tests drivers. Until it is told to misbehave, it is a device like that of `virtio-rdmad`, for one
//! guest that talks to itself. Each connection to the control socket brings one order, which is a line
//! ([`rule`]). The answer is a line that says how often a rule has been applied so far.

#![forbid(unsafe_code)]

mod device;
mod events;
mod proxy;
mod rings;
mod rule;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, Parser};
use engine::{Limits, Next};
use signal_hook::consts::{SIGINT, SIGTERM};
use virtio_transport::{Backend, Protocol, Server};

use device::Hostile;
use events::{Events, Source};
use rule::Order;

type Error = Box<dyn std::error::Error>;

/// How long a client may take to send its order.
const PATIENCE: Duration = Duration::from_secs(10);

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

#[derive(Clone, Copy, Debug)]
struct Mac([u8; 6]);

fn parse_mac(text: &str) -> Result<Mac, String> {
    let bytes: Result<Vec<u8>, _> = text.split(':').map(|b| u8::from_str_radix(b, 16)).collect();
    let bytes = bytes.map_err(|error| error.to_string())?;
    <[u8; 6]>::try_from(bytes).map(Mac).map_err(|_| "not six bytes".to_owned())
}

/// Serves a VMM that has connected.
fn serve(
    stream: UnixStream,
    is_vfio: bool,
    device: &Hostile,
) -> Result<Box<Server<dyn Protocol>>, Error> {
    if !is_vfio {
        return Ok(Box::new(vhost_user::serve(stream, device)));
    }
    let id = u16::try_from(abi::VIRTIO_RDMA_DEVICE_ID)?;
    Ok(Box::new(vfio_user::serve(stream, id, device)?))
}

/// The process.
struct Process {
    listener: UnixListener,
    control: UnixListener,
    is_vfio: bool,
    events: Arc<Events>,
    device: Hostile,
    server: Option<Box<Server<dyn Protocol>>>,
    /// Becomes readable when the process is to end.
    _signals: UnixStream,
}

impl Process {
    fn new(options: &Options) -> Result<Self, Error> {
        let Transport { vhost_user, vfio_user } = &options.socket;
        let path = vhost_user.as_ref().or(vfio_user.as_ref()).ok_or("no socket")?;
        let events = Arc::new(Events::new()?);
        let is_vfio = vfio_user.is_some();
        let limits = if is_vfio { Limits::default() } else { Limits::for_64_queues() };
        let small = Limits { ring_qp: 95, ring_cq: 64, max_srq: 64, ring_wr: 1024, ..limits };
        let limits = Limits { ring_cqe: 4096, ..small };
        let mac = options.mac.map(|Mac(mac)| mac);
        let bits = |list: &[u32]| list.iter().fold(0, |bits, bit| bits | 1 << bit);
        let (with, without) = (bits(&options.with), bits(&options.without));
        let (rings, direct) = (!options.no_rings, options.direct);
        let mut device = Hostile::new(limits, mac, rings, direct, events.clone())?;
        device.offer(with, without);
        let (signals, write) = UnixStream::pair()?;
        signal_hook::low_level::pipe::register(SIGTERM, write.try_clone()?)?;
        signal_hook::low_level::pipe::register(SIGINT, write)?;
        events.add(&signals, Source::End)?;
        let control = UnixListener::bind(&options.control)?;
        let listener = UnixListener::bind(path)?;
        events.add(&listener, Source::Listener)?;
        events.add(&control, Source::Control)?;
        Ok(Self { listener, control, is_vfio, events, device, server: None, _signals: signals })
    }

    fn run(&mut self) -> Result<(), Error> {
        let mut timeout = None;
        let mut unread = false;
        loop {
            if unread {
                unread = self.serve();
            }
            for source in self.events.wait(timeout)? {
                match source {
                    Source::Listener => self.accept()?,
                    Source::Vmm => unread = self.serve(),
                    Source::Control => self.obey()?,
                    Source::Kick => {}
                    Source::End => return Ok(()),
                }
            }
            let (more, next) = self.device.turn();
            timeout = match next {
                _ if unread || more => Some(Duration::ZERO),
                Next::At(time) => Some(time.saturating_duration_since(Instant::now())),
                Next::Busy | Next::Idle => None,
            };
        }
    }

    fn accept(&mut self) -> Result<(), Error> {
        let (stream, _) = self.listener.accept()?;
        self.disconnect();
        let server = serve(stream, self.is_vfio, &self.device)?;
        self.events.add(server.as_fd(), Source::Vmm)?;
        self.server = Some(server);
        Ok(())
    }

    fn disconnect(&mut self) {
        if let Some(server) = self.server.take() {
            self.events.remove(server.as_fd());
        }
        self.device.reset();
    }

    /// Answers messages. Returns whether to call this again even if the socket is not readable.
    fn serve(&mut self) -> bool {
        let Some(server) = &mut self.server else { return false };
        match server.process(&mut self.device) {
            Ok(more) => {
                self.ask_for_reset();
                more
            }
            Err(error) => {
                tracing::info!(%error, "disconnected");
                self.disconnect();
                false
            }
        }
    }

    /// Asks the driver for a reset, if the device is to.
    fn ask_for_reset(&mut self) {
        if let (Some(server), true) = (&mut self.server, self.device.take_needs_reset()) {
            server.needs_reset();
        }
    }

    fn obey(&mut self) -> Result<(), Error> {
        let (mut stream, _) = self.control.accept()?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line)?;
        let answer = match Order::parse(&line) {
            Ok(order) => {
                tracing::info!(?order);
                self.device.obey(order);
                serde_json::json!({ "hits": self.device.hits() })
            }
            Err(error) => serde_json::json!({ "error": error }),
        };
        self.ask_for_reset();
        Ok(writeln!(stream, "{answer}")?)
    }
}

fn main() -> Result<(), Error> {
    let options = Options::parse();
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let result = Process::new(&options)?.run();
    let Transport { vhost_user, vfio_user } = &options.socket;
    for path in [vhost_user, vfio_user].into_iter().flatten().chain([&options.control]) {
        std::fs::remove_file(path)?;
    }
    result
}
