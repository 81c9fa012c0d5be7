// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The connection of one guest's VMM, and the turns that the guest gets on a worker.

use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::{Counter, Next};
use memory::Loss;
use rustix::io::Errno;
use tracing::Span;
use virtio_transport::{Backend, Change, ConnectionState, Protocol, ResumeError, Server};

use super::backend::GuestBackend;
use super::poller::{Poller, Source};
use super::rest::{Idleness, Rest};
use crate::guest::Guest;
use crate::handover::{Connected, Said, Unreadable};
use crate::spec::Transport;

/// The reason why a connection ended.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// The VMM went away, or did what the transport cannot go on after.
    #[error(transparent)]
    Transport(#[from] virtio_transport::Error),
    /// The state of the connection that another process has left is of no use.
    #[error(transparent)]
    Resume(#[from] ResumeError),
    /// A queue cannot go on.
    #[error("{0}")]
    GoOn(String),
    /// The socket cannot be waited for.
    #[error("waiting for messages: {0}")]
    Poll(#[from] Errno),
}

impl Ended {
    /// Returns what this is for a guest whose connection has ended before it began, if what another process has left
    /// cannot be read. Another version may have written it.
    pub fn unreadable(&self, guest: &Guest) -> Option<Unreadable> {
        use ResumeError::{Descriptors, Device, Encoding, Features, Value};
        let Self::Resume(error) = self else { return None };
        let name = guest.spec.name.clone();
        matches!(error, Encoding(_) | Value { .. } | Descriptors { .. } | Features(_) | Device)
            .then(|| Unreadable::Guest { name, reason: self.to_string() })
    }

    /// Returns whether the guest's VMM just went away.
    pub fn is_closed(&self) -> bool {
        matches!(self, Self::Transport(error) if error.is_closed())
    }
}

/// The device ID, as the transports have it.
fn device_id() -> u16 {
    u16::try_from(abi::VIRTIO_RDMA_DEVICE_ID).unwrap_or(u16::MAX)
}

/// Begins to serve a VMM that has connected.
pub fn serve(
    stream: UnixStream,
    transport: Transport,
    backend: &dyn Backend,
) -> Result<Box<Server<dyn Protocol>>, virtio_transport::Error> {
    Ok(match transport {
        Transport::VhostUser => Box::new(vhost_user::serve(stream, backend)),
        Transport::VfioUser => Box::new(vfio_user::serve(stream, device_id(), backend)?),
    })
}

/// Goes on to serve a VMM that has said this to another process. The device goes on as well if that process has left
/// its image. Otherwise its driver is told that it must reset the device.
fn resume(
    stream: UnixStream,
    state: ConnectionState,
    image: Option<&[u8]>,
    guest: &Arc<Guest>,
    poller: &Arc<Poller>,
) -> Result<(Box<Server<dyn Protocol>>, GuestBackend), Ended> {
    let share = guest.memory.clone();
    let mut server: Box<Server<dyn Protocol>> = match guest.spec.transport() {
        Transport::VhostUser => Box::new(vhost_user::resume(stream, share, state)?),
        Transport::VfioUser => Box::new(vfio_user::resume(stream, device_id(), share, state)?),
    };
    let is_whole = server.missing_features(guest.device.features()) == 0;
    let is_loaded = is_whole && image.is_some_and(|image| load(guest, &server, image));
    let mut backend = GuestBackend::new(guest, poller);
    if is_loaded {
        server.withdraw(guest.device.features());
        backend.go_on(server.features(), server.queues()).map_err(Ended::GoOn)?;
    } else {
        server.fail(&mut backend)?;
    }
    // The freeze is no part of an image. No thread serves the guest or a peer of it yet.
    if server.is_paused() {
        backend.freeze();
        guest.device.settle();
    }
    for queue in server.queues() {
        backend.locate(server.memory(), queue.index, &queue.layout);
    }
    Ok((server, backend))
}

/// Loads the image of the device of a guest. Returns whether that succeeded.
fn load(guest: &Guest, server: &Server<dyn Protocol>, image: &[u8]) -> bool {
    let queues = server.queues().into_iter().map(|queue| (queue.index, queue.layout, queue.signal));
    let loaded = guest.device.load(image, server.memory(), queues);
    loaded.inspect_err(|error| tracing::error!(%error, "the device cannot go on")).is_ok()
}

/// The work of one turn of a guest, in the unit of [`engine::Device::run`].
///
/// Messages have very different lengths, and what is fair between guests is time. So a turn with work
/// that took longer than [`Budget::TURN`] halves the budget of the next, and one that took less than
/// half of it doubles that.
#[derive(Debug)]
struct Budget(u32);

impl Budget {
    /// The time that a turn should take at most.
    const TURN: Duration = Duration::from_micros(50);
    const FIRST: u32 = 32;
    const MOST: u32 = 256;

    /// Returns the budget of the next turn.
    fn get(&self) -> u32 {
        self.0
    }

    /// Notes that a turn with work took `time`.
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
    /// The guest gets a turn in each round.
    Runnable,
    /// The guest gets a turn after a kick or a message, when another thread wants it to, or at this time.
    Armed(Option<Instant>),
}

/// Whether the driver was asked for a reset, because the device cannot go on without one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Asked {
    /// The device goes on.
    No,
    /// The device resets itself, because memory of the guest was lost. The driver is asked when that is done.
    AfterReset,
    /// The driver was asked, and has not reset the device yet.
    Yes,
}

/// A guest whose VMM is connected.
pub struct Connection {
    /// The guest.
    pub guest: Arc<Guest>,
    /// The subject that a worker writes on the board while it serves the guest.
    pub subject: u64,
    /// Whether the guest gets turns.
    pub state: State,
    /// The last decision about a rest, for a guest that is runnable.
    pub rest: Rest,
    /// Names the guest in the log.
    pub span: Span,
    /// The work of one turn.
    budget: Budget,
    /// Decides what the worker does while the guest has no work.
    idleness: Idleness,
    /// Whether the last turn had work.
    busy: bool,
    server: Box<Server<dyn Protocol>>,
    backend: GuestBackend,
    poller: Arc<Poller>,
    /// Whether the server is to look for messages.
    unread: bool,
    /// Whether the driver was asked for a reset.
    asked: Asked,
    /// Losses of memory of all guests when this one's memory was last checked.
    losses: u64,
    /// The result of the last round of the device, before a reset that ends the connection.
    next: Next,
    /// The reason why the connection has ended, while the reset that follows is under way.
    ended: Option<Ended>,
}

impl Connection {
    /// Begins to serve `guest`, whose VMM is connected. A guest without work gets turns for `poll` at most. A later
    /// process has nothing of this before [`Self::keep`].
    pub fn new(
        guest: Arc<Guest>,
        connected: Connected,
        poller: &Arc<Poller>,
        poll: Duration,
        now: Instant,
    ) -> Result<Self, Ended> {
        let Connected { stream, said } = connected;
        let (server, backend) = match said {
            None => {
                let backend = GuestBackend::new(&guest, poller);
                (serve(stream, guest.spec.transport(), &backend)?, backend)
            }
            Some(Said { state, image }) => resume(stream, state, image.as_deref(), &guest, poller)?,
        };
        poller.add(server.as_fd(), Source::Socket(guest.index))?;
        let asked = if guest.device.needs_reset() { Asked::Yes } else { Asked::No };
        Ok(Self {
            span: tracing::info_span!("guest", name = guest.spec.name),
            subject: guest.subject(),
            guest,
            state: State::Runnable,
            rest: Rest::Poll,
            budget: Budget(Budget::FIRST),
            idleness: Idleness::new(poll, now),
            busy: false,
            server,
            backend,
            poller: poller.clone(),
            unread: true,
            asked,
            losses: memory::losses(),
            next: Next::Idle,
            ended: None,
        })
    }

    /// Checks that the device has all features that the driver has agreed to with another process. If it does not, the
    /// device has failed, and the driver is asked for a reset.
    pub fn check_features(&self) -> Result<(), Ended> {
        match self.server.missing_features(self.guest.device.features()) {
            0 => Ok(()),
            missing => Err(ResumeError::Features(missing).into()),
        }
    }

    /// Keeps the state of the connection from now on, in the place of the state that another process has left.
    pub fn keep(&mut self) {
        let is_kept = self.guest.kept().is_some_and(|mut kept| kept.connect(self.server.as_fd()));
        if is_kept {
            self.server.keep_in(Box::new(ConnectionJournal { guest: self.guest.clone() }));
        }
    }

    /// Removes the descriptors of the guest from the poller, because another worker is to serve the guest.
    pub fn detach(&self) {
        self.poller.remove(self.server.as_fd());
        self.backend.detach();
    }

    /// Goes on after [`Self::detach`], on the worker that has this poller. The guest gets a turn, which finds the
    /// messages and kicks that have come meanwhile.
    pub fn attach(&mut self, poller: &Arc<Poller>) -> Result<(), Ended> {
        self.poller = poller.clone();
        (self.state, self.rest) = (State::Runnable, Rest::Poll);
        poller.add(self.server.as_fd(), Source::Socket(self.guest.index))?;
        self.backend.attach(poller).map_err(Ended::GoOn)
    }

    /// Takes an event of this guest.
    pub fn notice(&mut self, source: Source) {
        match source {
            Source::Wake | Source::Uplink(_) => {}
            Source::Socket(_) => self.unread = true,
            Source::Kick(_, queue) => self.guest.device.kick(queue),
        }
        self.state = State::Runnable;
    }

    /// Does a bounded part of the work of the guest, and returns whether there was any. An error comes when the
    /// connection has ended and the reset of the guest's device is done.
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

    /// Completes all messages of the VMM that this process has read, because another process is to go on with the
    /// guest. Returns the state of the connection.
    pub fn finish(&mut self) -> Result<ConnectionState, Ended> {
        if let Some(ended) = self.ended.take() {
            return Err(ended);
        }
        loop {
            self.guest.device.settle();
            self.tell_loss();
            if let Some(state) = self.server.leave(&mut self.backend)? {
                return Ok(state);
            }
        }
    }

    /// Leaves the guest to another process, with the device as it is. No device of its network runs any more since this
    /// time of [`handover::now`](crate::handover::now).
    pub fn leave(self, state: &ConnectionState, stopped: u64) {
        if let Some(mut kept) = self.guest.kept() {
            kept.leave(state, &self.guest.device.save(), stopped);
        }
        // A drop would reset the device.
        std::mem::forget(self);
    }

    fn serve(&mut self) -> Result<bool, Ended> {
        let unread = std::mem::take(&mut self.unread);
        if unread {
            let span = self.span.clone();
            let _span = span.enter();
            self.unread = self.server.process(&mut self.backend)?;
        }
        let device = &self.guest.device;
        self.next = device.run(self.budget.get());
        self.tell_loss();
        let device = &self.guest.device;
        // While a reset is under way, the driver has asked for it already.
        let is_asked = self.asked == Asked::Yes;
        if device.is_settled() && device.needs_reset() != is_asked {
            self.asked = if is_asked { Asked::No } else { Asked::Yes };
            if !is_asked {
                self.server.needs_reset();
                // No front end asks for the status, so the driver gets an event.
                if self.guest.spec.transport() == Transport::VhostUser {
                    device.fail();
                }
            }
        }
        self.notice_losses();
        self.busy = unread || self.next == Next::Busy;
        Ok(self.busy)
    }

    /// Ends what the guest's device does if memory of the guest was lost, and asks the driver for a reset.
    ///
    /// The device has zeros in its place, which the guest does not see. So nothing that the device
    /// does with that memory can be trusted any more. The device does not wait for the driver: what peers write to a
    /// guest that ignores its loss would fill memory of this process, for which no limit of the guest counts.
    fn notice_losses(&mut self) {
        let losses = memory::losses();
        if losses == self.losses {
            return;
        }
        self.losses = losses;
        let lost = self.server.memory().take_losses();
        let Some(first) = lost.first() else { return };
        let span = self.span.clone();
        let _span = span.enter();
        self.server.needs_reset();
        // What is lost behind the first loss was in use until the reset has come to its end. To begin that once more
        // would end it at once, however long that takes.
        if self.backend.is_started() {
            report_loss(first, lost.len());
            self.backend.reset();
            self.asked = Asked::AfterReset;
        }
    }

    /// Tells the driver that memory of the guest was lost, when the reset of the device is done: by an event, where
    /// the protocol has no other way.
    fn tell_loss(&mut self) {
        if self.asked != Asked::AfterReset || !self.guest.device.is_settled() {
            return;
        }
        self.asked = Asked::Yes;
        if let Err(error) = self.server.fail(&mut self.backend) {
            tracing::error!(%error, "the driver does not hear that memory was lost");
        }
        if self.server.is_paused() {
            self.backend.freeze();
        }
    }

    /// Notes that the turn that ended at `now` had work and took `time`.
    pub fn worked(&mut self, time: Duration, now: Instant) {
        self.guest.count_work(time);
        self.budget.adapt(time);
        self.idleness.worked(time, now);
    }

    /// Decides what the worker does for the guest until it has work. `contended`: other threads want the processor.
    pub fn decide_rest(&mut self, now: Instant, contended: bool) -> Rest {
        self.rest = if self.state == State::Runnable && !self.busy {
            let has_rings = self.guest.rings.load(Ordering::Relaxed);
            let events = has_rings.then(|| self.guest.device.counter(Counter::CompletionEvents));
            self.idleness.rest(now, contended, events)
        } else {
            Rest::Poll
        };
        self.rest
    }

    /// Stops the turns, unless work has come meanwhile.
    ///
    /// From now on a peer that has something for the guest wakes the worker, and the guest kicks when
    /// it makes buffers available. Work that came before is found here.
    pub fn arm(&mut self) {
        if self.unread || self.guest.device.arm() {
            return;
        }
        self.state = State::Armed(self.timer());
    }

    /// Returns the time at which the device has work next, if it knows that.
    pub fn timer(&self) -> Option<Instant> {
        match self.next {
            Next::At(time) => Some(time),
            Next::Busy | Next::Idle => None,
        }
    }
}

/// Keeps the state of the connection of a guest.
struct ConnectionJournal {
    guest: Arc<Guest>,
}

impl virtio_transport::Journal for ConnectionJournal {
    fn keep(&mut self, state: &ConnectionState, change: Change) {
        if let Some(mut kept) = self.guest.kept() {
            kept.keep(state, change);
        }
    }
}

/// Logs the first of so many losses.
fn report_loss(first: &Loss, count: usize) {
    let Loss { region, offset, len, poisoned } = first;
    let cause = if *poisoned { "a memory error of this host" } else { "its file has lost it" };
    tracing::error!(
        "{len} bytes at {offset:#x} of the memory region at {region:#x} are zeros now: {cause}; {} other regions have \
         lost memory; the device is reset, and its driver has to reset it as well",
        count - 1
    );
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
