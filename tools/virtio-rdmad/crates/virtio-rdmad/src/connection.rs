// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The connection of one guest's monitor, and the guest's turns on a worker.

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::Next;
use memory::{GuestMemory, Loss};
use rustix::io::Errno;
use tracing::Span;

use crate::backend::Backend;
use crate::guest::Guest;
use crate::options::Transport;
use crate::poller::{Poller, Source};
use crate::spin::Spin;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// By way of vhost-user.
    #[error(transparent)]
    VhostUser(#[from] vhost_user::Error),
    /// By way of vfio-user.
    #[error(transparent)]
    VfioUser(#[from] vfio_user::Error),
    /// The socket cannot be waited for.
    #[error("waiting for messages: {0}")]
    Poll(#[from] Errno),
}

impl Ended {
    /// Whether the guest's monitor just went away.
    pub fn is_closed(&self) -> bool {
        match self {
            Self::VhostUser(error) => error.is_closed(),
            Self::VfioUser(error) => matches!(error, vfio_user::Error::Closed),
            Self::Poll(_) => false,
        }
    }
}

/// Either transport.
enum Server {
    VhostUser(Box<vhost_user::Server>),
    VfioUser(Box<vfio_user::Server>),
}

impl Server {
    fn new(transport: Transport, stream: UnixStream, backend: &Backend) -> Result<Self, Ended> {
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
    fn process(&mut self, backend: &mut Backend) -> Result<bool, Ended> {
        match self {
            Self::VhostUser(server) => Ok(server.serve(backend)?),
            Self::VfioUser(server) => Ok(server.process(backend)?),
        }
    }

    /// Tells the driver that only a reset helps, as far as the transport can.
    fn needs_reset(&mut self) {
        match self {
            Self::VhostUser(server) => server.needs_reset(),
            Self::VfioUser(server) => server.needs_reset(),
        }
    }

    fn memory(&self) -> &GuestMemory {
        match self {
            Self::VhostUser(server) => server.memory(),
            Self::VfioUser(server) => server.memory(),
        }
    }
}

/// How much of a guest's work is one turn, in the unit of [`engine::Device::run`].
///
/// Messages are of very different length, and what is fair between guests is time: a turn that took
/// longer than [`Budget::TURN`] halves the next, one of less than half of it that used its budget up
/// doubles it.
#[derive(Debug)]
struct Budget(u32);

impl Budget {
    /// What a turn should take at most.
    const TURN: Duration = Duration::from_micros(50);
    const FIRST: u32 = 32;
    const MOST: u32 = 256;

    /// For the next turn.
    fn get(&self) -> u32 {
        self.0
    }

    /// A turn with work took `time`.
    fn adapt(&mut self, time: Duration) {
        if time > Self::TURN {
            self.0 = (self.0 / 2).max(1);
        } else if time < Self::TURN / 2 {
            self.0 = (self.0 * 2).min(Self::MOST);
        }
    }
}

/// Whether a guest gets turns.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum State {
    /// In each round.
    Hot,
    /// No more until an event, a wish of another thread, or this time.
    Parked(Option<Instant>),
}

/// A guest whose monitor is connected.
pub struct Connection {
    /// The guest.
    pub guest: Arc<Guest>,
    /// Whether it gets turns.
    pub state: State,
    /// For what concerns the guest in the log.
    pub span: Span,
    /// How much a turn is.
    budget: Budget,
    /// How long it is looked at in vain.
    spin: Spin,
    /// The last turn had work.
    busy: bool,
    server: Server,
    backend: Backend,
    poller: Arc<Poller>,
    /// There are messages.
    unread: bool,
    needs_reset: bool,
    /// Losses of memory of all guests when this one's was last looked at.
    losses: u64,
    /// What the engine said last.
    next: Next,
    /// Why the connection has ended, while the reset that follows is under way.
    ended: Option<Ended>,
}

impl Connection {
    /// Begins to serve `guest`, whose monitor is at the other end of `stream`; looks for work for
    /// at most `poll` in vain.
    pub fn new(
        guest: Arc<Guest>,
        stream: UnixStream,
        poller: &Arc<Poller>,
        poll: Duration,
        now: Instant,
    ) -> Result<Self, Ended> {
        let backend = Backend::new(&guest, poller);
        let server = Server::new(guest.spec.transport, stream, &backend)?;
        poller.add(server.as_fd(), Source::Socket(guest.index))?;
        Ok(Self {
            span: tracing::info_span!("guest", name = guest.spec.name),
            guest,
            state: State::Hot,
            budget: Budget(Budget::FIRST),
            spin: Spin::new(poll, now),
            busy: false,
            server,
            backend,
            poller: poller.clone(),
            unread: true,
            needs_reset: false,
            losses: memory::losses(),
            next: Next::Idle,
            ended: None,
        })
    }

    /// Something happened that concerns this guest.
    pub fn notice(&mut self, source: Source) {
        match source {
            Source::Wake => {}
            Source::Socket(_) => self.unread = true,
            Source::Kick(_, queue) => self.guest.device.kick(queue),
        }
        self.state = State::Hot;
    }

    /// Does a bounded part of what there is to do; whether that was anything. An error comes when the
    /// guest's device is reset.
    pub fn turn(&mut self) -> Result<bool, Ended> {
        if self.ended.is_none() {
            match self.serve() {
                Ok(busy) => return Ok(busy),
                Err(ended) => {
                    self.backend.reset();
                    self.ended = Some(ended);
                }
            }
        }
        if self.guest.device.is_settled() {
            if let Some(ended) = self.ended.take() {
                return Err(ended);
            }
        }
        self.guest.device.run(self.budget.get());
        self.busy = true;
        Ok(true)
    }

    fn serve(&mut self) -> Result<bool, Ended> {
        let spoken = std::mem::take(&mut self.unread);
        if spoken {
            let _span = self.span.enter();
            self.unread = self.server.process(&mut self.backend)?;
        }
        self.next = self.guest.device.run(self.budget.get());
        if self.guest.device.needs_reset() != self.needs_reset {
            self.needs_reset = !self.needs_reset;
            if self.needs_reset {
                self.server.needs_reset();
            }
        }
        self.notice_losses();
        self.busy = spoken || self.next == Next::Busy;
        Ok(self.busy)
    }

    /// Tells the guest if memory of it was lost.
    ///
    /// What the device has in its place are zeros that the guest does not see, so nothing that it
    /// does with that memory can be trusted any more.
    fn notice_losses(&mut self) {
        let losses = memory::losses();
        if losses == self.losses {
            return;
        }
        self.losses = losses;
        let lost = self.server.memory().take_losses();
        let _span = self.span.enter();
        for Loss { region, offset, len, poisoned } in &lost {
            let cause =
                if *poisoned { "a memory error of this host" } else { "its file has lost it" };
            tracing::error!(
                "{len} bytes at {offset:#x} of the memory region at {region:#x} are zeros now: \
                 {cause}; the device needs a reset"
            );
        }
        if !lost.is_empty() {
            self.server.needs_reset();
        }
    }

    /// The turn that just ended, at `now`, had work and took `time`.
    pub fn worked(&mut self, time: Duration, now: Instant) {
        self.budget.adapt(time);
        self.spin.worked(now);
    }

    /// Whether it was looked at in vain for long enough; `dense`: by a worker that should do that for
    /// a moment only.
    pub fn is_tired(&mut self, now: Instant, dense: bool) -> bool {
        self.state == State::Hot && !self.busy && !self.spin.again(now, dense)
    }

    /// Stops the turns, unless work has come meanwhile.
    ///
    /// From here on a peer that wants the guest looked at tells the worker, and a guest that makes
    /// buffers available kicks; what came before is found now.
    pub fn park(&mut self) {
        if self.unread || self.guest.device.arm() {
            return;
        }
        self.state = State::Parked(match self.next {
            Next::At(time) => Some(time),
            Next::Busy | Next::Idle => None,
        });
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.poller.remove(self.server.as_fd());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_become_as_long_as_they_should() {
        let mut budget = Budget(Budget::FIRST);
        for _ in 0..16 {
            budget.adapt(Duration::from_nanos(1));
        }
        assert_eq!(budget.get(), Budget::MOST);
        // Messages of 20 us each.
        for _ in 0..16 {
            budget.adapt(Duration::from_micros(20) * budget.get());
        }
        assert!((1..=4).contains(&budget.get()));
        budget.adapt(Duration::from_secs(1));
        budget.adapt(Duration::from_secs(1));
        budget.adapt(Duration::from_secs(1));
        assert_eq!(budget.get(), 1);
    }
}
