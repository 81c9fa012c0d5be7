// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sockets at which a device is served: those of its VMM and of those who give it orders.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::Next;
use signal_hook::consts::{SIGINT, SIGTERM};
use virtio_transport::{Backend, Protocol, Server};

use crate::device::{Hostile, Settings};
use crate::events::{Events, Source};
use crate::rule::Order;
use crate::watch::Watch;

type Error = Box<dyn std::error::Error>;

/// How long a client may take to send its order.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest time between two looks at memory of a watch.
const LOOK: Duration = Duration::from_millis(100);

/// The socket at which a VMM finds the device.
#[derive(Clone, Debug)]
pub enum Socket {
    /// It speaks vhost-user.
    VhostUser(PathBuf),
    /// It speaks vfio-user.
    VfioUser(PathBuf),
}

impl Socket {
    /// Returns the path.
    pub fn path(&self) -> &PathBuf {
        let (Self::VhostUser(path) | Self::VfioUser(path)) = self;
        path
    }

    /// Returns whether it speaks vfio-user.
    pub fn is_vfio(&self) -> bool {
        matches!(self, Self::VfioUser(_))
    }
}

/// Why a process ends, besides a signal.
#[derive(Clone, Copy, Debug, Default)]
pub struct End {
    /// Whether it ends when a VMM disconnects.
    pub at_disconnect: bool,
    /// When it ends in any case.
    pub at: Option<Instant>,
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
pub struct Process {
    listener: UnixListener,
    control: Option<UnixListener>,
    paths: Vec<PathBuf>,
    is_vfio: bool,
    events: Arc<Events>,
    device: Hostile,
    server: Option<Box<Server<dyn Protocol>>>,
    has_disconnected: bool,
    /// Becomes readable when the process is to end.
    _signals: UnixStream,
}

impl Process {
    /// Makes a device that a VMM finds at a socket, and that takes orders at `control`.
    pub fn new(
        socket: &Socket,
        control: Option<&PathBuf>,
        settings: Settings,
        watch: Rc<RefCell<dyn Watch>>,
    ) -> Result<Self, Error> {
        let events = Arc::new(Events::new()?);
        let is_vfio = socket.is_vfio();
        let device = Hostile::new(settings, watch, events.clone())?;
        let (signals, write) = UnixStream::pair()?;
        signal_hook::low_level::pipe::register(SIGTERM, write.try_clone()?)?;
        signal_hook::low_level::pipe::register(SIGINT, write)?;
        events.add(&signals, Source::End)?;
        let mut paths = Vec::new();
        let mut bind = |path: &PathBuf, source| -> Result<UnixListener, Error> {
            let error = |error| format!("{}: {error}", path.display());
            let listener = UnixListener::bind(path).map_err(error)?;
            paths.push(path.clone());
            events.add(&listener, source)?;
            Ok(listener)
        };
        let control = control.map(|path| bind(path, Source::Control)).transpose()?;
        let listener = bind(socket.path(), Source::Listener)?;
        Ok(Self {
            listener,
            control,
            paths,
            is_vfio,
            events,
            device,
            server: None,
            has_disconnected: false,
            _signals: signals,
        })
    }

    /// Serves VMMs, one at a time, until the end.
    pub fn run(&mut self, end: End) -> Result<(), Error> {
        let mut timeout = None;
        let mut unread = false;
        while !self.has_ended(end) {
            self.device.obey_watch();
            self.ask_for_reset();
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
                Next::At(time) => Some(time.saturating_duration_since(Instant::now()).min(LOOK)),
                Next::Busy | Next::Idle => Some(LOOK),
            };
        }
        Ok(())
    }

    fn has_ended(&self, end: End) -> bool {
        end.at_disconnect && self.has_disconnected || end.at.is_some_and(|at| at <= Instant::now())
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
            self.has_disconnected = true;
            self.device.leave();
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
        let Some(control) = &self.control else { return Ok(()) };
        let (mut stream, _) = control.accept()?;
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

impl Drop for Process {
    fn drop(&mut self) {
        for path in &self.paths {
            // The socket is of no more use, whoever has removed it.
            let _ = std::fs::remove_file(path);
        }
    }
}
