// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest and the thread that serves it.

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::{Device, Next};
use rustix::io::Errno;

use crate::backend::Backend;
use crate::options::{GuestSpec, Transport};
use crate::poller::{Poller, Source};
use crate::socket::Socket;
use crate::spin::Spin;
use crate::waker::Waker;

/// Work requests that [`Device::run`] does before the socket has its turn.
const BUDGET: u32 = 64;

/// How long to wait when no connection can be accepted, for lack of file descriptors say.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Why the connection of a guest ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error(transparent)]
    VhostUser(#[from] vhost_user::Error),
    #[error(transparent)]
    VfioUser(#[from] vfio_user::Error),
    #[error("waiting for events: {0}")]
    Poll(#[from] Errno),
}

impl Ended {
    /// Whether the guest's monitor just went away.
    fn is_closed(&self) -> bool {
        match self {
            Self::VhostUser(error) => error.is_closed(),
            Self::VfioUser(error) => matches!(error, vfio_user::Error::Closed),
            Self::Poll(_) => false,
        }
    }
}

/// One connection, of either transport.
enum Server {
    VhostUser(Box<vhost_user::Server>),
    VfioUser(Box<vfio_user::Server>),
}

impl Server {
    fn new(transport: Transport, stream: UnixStream, backend: &Backend<'_>) -> Result<Self, Ended> {
        let id = u16::try_from(abi::VIRTIO_RDMA_DEVICE_ID).unwrap_or(u16::MAX);
        Ok(match transport {
            Transport::VhostUser => {
                Self::VhostUser(Box::new(vhost_user::Server::new(stream, backend)))
            }
            Transport::VfioUser => {
                Self::VfioUser(Box::new(vfio_user::Server::new(stream, id, backend)?))
            }
        })
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::VhostUser(server) => server.as_fd(),
            Self::VfioUser(server) => server.as_fd(),
        }
    }

    /// Answers messages; whether there may be more that the socket does not announce.
    fn process(&mut self, backend: &mut Backend<'_>) -> Result<bool, Ended> {
        match self {
            Self::VhostUser(server) => Ok(server.serve(backend).map(|()| false)?),
            Self::VfioUser(server) => Ok(server.process(backend)?),
        }
    }

    /// Tells the driver that only a reset helps, where the transport can.
    fn needs_reset(&mut self) {
        match self {
            // The protocol has no way to say so.
            Self::VhostUser(_) => {}
            Self::VfioUser(server) => server.needs_reset(),
        }
    }
}

/// A guest.
pub struct Guest {
    /// As it stands on the command line.
    pub spec: GuestSpec,
    /// Its device.
    pub device: Arc<Device>,
    /// Wakes its thread.
    pub waker: Arc<Waker>,
    socket: Socket,
    poll: Duration,
    connected: AtomicBool,
}

impl Guest {
    /// A guest that waits for its monitor on `socket`; its thread looks for more work for `poll`
    /// before it sleeps.
    pub fn new(
        spec: GuestSpec,
        device: Arc<Device>,
        waker: Arc<Waker>,
        socket: Socket,
        poll: Duration,
    ) -> Self {
        Self { spec, device, waker, socket, poll, connected: AtomicBool::new(false) }
    }

    /// Whether its monitor is connected.
    pub fn connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }

    /// Serves one connection after the other, until the waker says stop.
    pub fn run(&self) {
        let _span = tracing::info_span!("guest", name = self.spec.name).entered();
        if let Err(error) = self.accept_all() {
            tracing::error!(%error, "the guest is served no longer");
        }
    }

    fn accept_all(&self) -> Result<(), Errno> {
        let poller = Poller::new()?;
        poller.add(self.waker.as_fd(), Source::Wake)?;
        let listener = self.socket.listener();
        while !self.waker.stopped() {
            poller.add(listener, Source::Socket)?;
            self.sleep(&poller, None)?;
            // While one monitor is connected, others wait.
            poller.remove(listener);
            match self.socket.accept() {
                Ok(Some(stream)) => self.serve_guarded(stream, &poller),
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(%error, "accepting a connection");
                    self.sleep(&poller, Some(ACCEPT_PAUSE))?;
                }
            }
        }
        Ok(())
    }

    /// Sleeps until something happens, unless somebody wants this thread already.
    fn sleep(&self, poller: &Poller, timeout: Option<Duration>) -> Result<Vec<Source>, Errno> {
        let timeout = if self.waker.may_sleep() { timeout } else { Some(Duration::ZERO) };
        let events = poller.wait(timeout);
        self.waker.awake();
        events
    }

    /// Serves a connection, and keeps a bug that shows in it from taking other guests along.
    fn serve_guarded(&self, stream: UnixStream, poller: &Poller) {
        tracing::info!(transport = self.spec.transport.name(), "connected");
        self.connected.store(true, Ordering::Relaxed);
        let result = catch_unwind(AssertUnwindSafe(|| self.serve(stream, poller)));
        self.connected.store(false, Ordering::Relaxed);
        match result {
            Ok(Ok(())) => {}
            Ok(Err(ended)) if ended.is_closed() => tracing::info!("disconnected"),
            Ok(Err(ended)) => tracing::warn!(reason = %ended, "disconnected"),
            Err(_) => tracing::error!("a bug in virtio-rdmad: the thread of this guest panicked"),
        }
    }

    /// Serves a connection until it ends or the waker says stop.
    fn serve(&self, stream: UnixStream, poller: &Poller) -> Result<(), Ended> {
        let mut backend = Backend::new(&self.device, poller);
        let mut server = Server::new(self.spec.transport, stream, &backend)?;
        poller.add(server.as_fd(), Source::Socket)?;
        let result = self.serve_events(&mut server, &mut backend, poller);
        poller.remove(server.as_fd());
        result
    }

    fn serve_events(
        &self,
        server: &mut Server,
        backend: &mut Backend<'_>,
        poller: &Poller,
    ) -> Result<(), Ended> {
        let mut spin = Spin::new(self.poll);
        let mut unread = true;
        let mut needs_reset = false;
        let mut events = Vec::new();
        while !self.waker.stopped() {
            if unread || events.contains(&Source::Socket) {
                unread = server.process(backend)?;
            }
            for event in &events {
                if let Source::Kick(queue) = event {
                    self.device.kick(*queue);
                }
            }
            let next = self.device.run(BUDGET);
            if self.device.needs_reset() != needs_reset {
                needs_reset = !needs_reset;
                if needs_reset {
                    server.needs_reset();
                }
            }
            let busy = unread || next == Next::Busy;
            if busy {
                spin.restart();
            }
            events = if busy || spin.again() {
                poller.wait(Some(Duration::ZERO))?
            } else {
                self.sleep_idle(poller, next)?
            };
        }
        Ok(())
    }

    /// Sleeps while the device has nothing to do.
    fn sleep_idle(&self, poller: &Poller, next: Next) -> Result<Vec<Source>, Errno> {
        let timeout = match next {
            Next::At(time) => Some(time.saturating_duration_since(Instant::now())),
            Next::Busy | Next::Idle => None,
        };
        let may_sleep = self.waker.may_sleep();
        // From here on a peer that wants this thread writes to the waker, and a guest that makes
        // buffers available kicks; what came before is found now.
        let timeout = if may_sleep && !self.device.arm() { timeout } else { Some(Duration::ZERO) };
        let events = poller.wait(timeout);
        self.waker.awake();
        events
    }
}
