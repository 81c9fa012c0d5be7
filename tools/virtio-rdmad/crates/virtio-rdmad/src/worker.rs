// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A thread that serves guests.
//!
//! A worker goes round: each guest that is [`State::Hot`] gets a turn, whose length is bounded, so
//! that a guest that floods costs the others no more than their waiting for one turn of it. While
//! there is work, or was lately, sockets and kicks are looked at only every so often: a system call
//! a round would be most of the round, and guests that are looked at have no need to kick. A guest
//! that lets itself be looked at in vain is parked ([`crate::spin`]): it has to kick from then on. A
//! worker all of whose guests are parked sleeps, and costs nothing.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::clock::{Clock, Passed};
use crate::connection::{Connection, Ended, State};
use crate::guest::Guest;
use crate::poller::{Poller, Source};
use crate::spin::Crowd;
use crate::times::{Doing, Times};
use crate::waker::Waker;

/// How often sockets and kicks are looked at while there is work.
const EVENTS_BUSY: Duration = Duration::from_micros(50);
/// The same while there is none and the worker has nothing better to do.
const EVENTS_IDLE: Duration = Duration::from_micros(10);
/// Rounds in vain between two looks at the clock.
const ROUNDS: u32 = 8;

/// How often a worker without work lets others have the processor.
const OFFER: Duration = Duration::from_micros(10);

/// Guests of a worker that is not to get any.
const RETIRED: usize = usize::MAX / 2;

/// A monitor that has connected.
struct Arrival {
    guest: Arc<Guest>,
    stream: UnixStream,
}

/// What other threads have of a worker.
pub struct Shared {
    waker: Waker,
    stop: AtomicBool,
    /// Guests that other threads want to be looked at, a bit each.
    wanted: Box<[AtomicU64]>,
    arrivals: Mutex<Vec<Arrival>>,
    /// Guests that it serves, or is about to.
    guests: AtomicUsize,
    /// What it does with its time.
    pub times: Times,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("guests", &self.guests).finish_non_exhaustive()
    }
}

impl Shared {
    /// Of a worker in a process of so many guests.
    pub fn new(guests: usize) -> Result<Self, Errno> {
        Ok(Self {
            waker: Waker::new()?,
            stop: AtomicBool::new(false),
            wanted: (0..guests.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            arrivals: Mutex::new(Vec::new()),
            guests: AtomicUsize::new(0),
            times: Times::new(),
        })
    }

    /// How many guests it serves.
    pub fn guests(&self) -> usize {
        self.guests.load(Ordering::Relaxed)
    }

    /// Has the worker look at a guest.
    pub fn want(&self, guest: u32) {
        if let Some(word) = self.wanted.get(guest as usize / 64) {
            word.fetch_or(1 << (guest % 64), Ordering::SeqCst);
        }
        self.waker.wake();
    }

    /// Has the worker serve a guest, whose link names it already.
    pub fn serve(&self, guest: Arc<Guest>, stream: UnixStream) {
        self.guests.fetch_add(1, Ordering::Relaxed);
        let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        arrivals.push(Arrival { guest, stream });
        drop(arrivals);
        self.waker.wake();
    }

    /// Ends the worker.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.waker.wake();
    }

    fn arrivals(&self) -> Vec<Arrival> {
        std::mem::take(&mut *self.arrivals.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Calls `f` with each guest that is wanted.
    fn take_wanted(&self, mut f: impl FnMut(u32)) {
        for (base, word) in (0..).step_by(64).zip(&*self.wanted) {
            if word.load(Ordering::SeqCst) == 0 {
                continue;
            }
            let mut bits = word.swap(0, Ordering::SeqCst);
            while bits != 0 {
                f(base + bits.trailing_zeros());
                bits &= bits - 1;
            }
        }
    }
}

/// A worker, as its own thread sees it.
pub struct Worker {
    workers: Arc<[Shared]>,
    index: usize,
    poller: Arc<Poller>,
    /// The longest that a guest is looked at in vain.
    poll: Duration,
    /// An eventfd, written to when a guest is served no longer.
    departures: Arc<OwnedFd>,
    connections: Vec<Connection>,
    crowd: Crowd,
    clock: Clock,
    /// Losses of memory of all guests that this worker knows of.
    losses: u64,
    /// When sockets and kicks were looked at.
    looked: Instant,
    /// When the processor was last offered to others.
    yielded: Instant,
    /// Rounds in vain since there was work.
    vain: u32,
    /// How long a round in vain took when one was last timed.
    look: Duration,
}

impl Worker {
    /// The worker with this index, without guests.
    pub fn new(
        workers: Arc<[Shared]>,
        index: usize,
        poll: Duration,
        departures: Arc<OwnedFd>,
    ) -> Result<Self, Errno> {
        let poller = Arc::new(Poller::new()?);
        poller.add(workers[index].waker.as_fd(), Source::Wake)?;
        let clock = Clock::new();
        let now = clock.now();
        let (connections, crowd) = (Vec::new(), Crowd::default());
        Ok(Self {
            workers,
            index,
            poller,
            poll,
            departures,
            connections,
            crowd,
            clock,
            losses: memory::losses(),
            looked: now,
            yielded: now,
            vain: 0,
            look: Duration::ZERO,
        })
    }

    fn shared(&self) -> &Shared {
        &self.workers[self.index]
    }

    /// Serves guests until [`Shared::stop`].
    pub fn run(mut self) {
        // Another thread may have made it.
        self.clock.wake();
        while !self.shared().stop.load(Ordering::Relaxed) {
            if let Err(error) = self.round().and_then(|()| self.rest()) {
                self.retire(error);
                break;
            }
        }
        // They hold their guests, which hold all workers.
        drop(self.shared().arrivals());
    }

    /// A turn for each guest that is hot.
    pub fn round(&mut self) -> Result<(), Errno> {
        self.heed();
        if self.look_due() {
            let events = self.poller.wait(Some(Duration::ZERO))?;
            self.looked = self.clock.now();
            self.dispatch(&events);
        }
        let mut worked = false;
        let mut at = 0;
        while at < self.connections.len() {
            match self.turn(at) {
                Some(had_work) => {
                    worked |= had_work;
                    at += 1;
                }
                // Another guest is in its place.
                None => worked = true,
            }
        }
        self.shared().times.count_round();
        self.notice_losses();
        self.tick(worked);
        Ok(())
    }

    /// Gives every guest a turn, those of other workers too, if memory of any was lost: who finds that
    /// out by an access need not be the worker of the guest whose memory it is.
    fn notice_losses(&mut self) {
        let losses = memory::losses();
        if losses == self.losses {
            return;
        }
        self.losses = losses;
        for connection in &mut self.connections {
            connection.state = State::Hot;
        }
        for worker in self.workers.iter() {
            worker.waker.wake();
        }
    }

    /// A guest's turn, if it gets one: whether there was work. `None`: it is gone.
    fn turn(&mut self, at: usize) -> Option<bool> {
        let connection = &mut self.connections[at];
        if connection.state != State::Hot {
            return Some(false);
        }
        let worked = self.guard(at, Connection::turn)?;
        if worked {
            let time = self.pass_work();
            let now = self.clock.now();
            self.connections[at].worked(time, now);
        }
        Some(worked)
    }

    /// Calls `f` for a guest. What goes wrong ends the guest's connection and nothing else, even if
    /// it is a bug that panics.
    fn guard<R>(
        &mut self,
        at: usize,
        f: impl FnOnce(&mut Connection) -> Result<R, Ended>,
    ) -> Option<R> {
        let connection = &mut self.connections[at];
        match catch_unwind(AssertUnwindSafe(|| f(connection))) {
            Ok(Ok(result)) => return Some(result),
            Ok(Err(ended)) => self.remove(at, Some(&ended)),
            Err(_) => self.remove(at, None),
        }
        None
    }

    /// Sleeps if there is nothing to do.
    fn rest(&mut self) -> Result<(), Errno> {
        let mut timer: Option<Instant> = None;
        for connection in &self.connections {
            match connection.state {
                State::Hot => return Ok(()),
                State::Parked(Some(time)) => timer = Some(timer.map_or(time, |t| t.min(time))),
                State::Parked(None) => {}
            }
        }
        if !self.shared().waker.may_sleep() {
            return Ok(());
        }
        self.pass(Doing::Poll);
        let timeout = timer.map(|time| time.saturating_duration_since(self.clock.now()));
        self.shared().times.sleeps(true);
        let events = self.poller.wait(timeout);
        self.shared().times.sleeps(false);
        self.clock.wake();
        self.crowd.slept();
        self.looked = self.clock.now();
        self.dispatch(&events?);
        self.expire();
        Ok(())
    }

    /// Does what other threads want.
    fn heed(&mut self) {
        if !self.shared().waker.take() {
            return;
        }
        for Arrival { guest, stream } in self.shared().arrivals() {
            self.adopt(&guest, stream);
        }
        let workers = self.workers.clone();
        workers[self.index].take_wanted(|guest| {
            if let Some(connection) = self.connection(guest) {
                connection.state = State::Hot;
            }
        });
    }

    fn connection(&mut self, guest: u32) -> Option<&mut Connection> {
        self.connections.iter_mut().find(|connection| connection.guest.index == guest)
    }

    fn dispatch(&mut self, events: &[Source]) {
        for &source in events {
            let (Source::Socket(guest) | Source::Kick(guest, _)) = source else { continue };
            if let Some(connection) = self.connection(guest) {
                connection.notice(source);
            }
        }
    }

    /// Begins to serve a guest.
    fn adopt(&mut self, guest: &Arc<Guest>, stream: UnixStream) {
        let name = &guest.spec.name;
        let (poller, poll, now) = (&self.poller, self.poll, self.clock.now());
        let begin = || Connection::new(guest.clone(), stream, poller, poll, now);
        match catch_unwind(AssertUnwindSafe(begin)) {
            Ok(Ok(connection)) => {
                let transport = guest.spec.transport.name();
                connection.span.in_scope(|| {
                    tracing::info!(transport, worker = self.index, "connected");
                });
                self.connections.push(connection);
                return;
            }
            Ok(Err(error)) => tracing::warn!(guest = name, reason = %error, "disconnected"),
            Err(_) => report_panic(name),
        }
        self.release(guest);
    }

    /// Ends a guest's service. A bug that showed in it, which is what no reason means, is kept from
    /// taking the other guests along.
    fn remove(&mut self, at: usize, reason: Option<&Ended>) {
        let connection = self.connections.swap_remove(at);
        let (guest, span) = (connection.guest.clone(), connection.span.clone());
        let _span = span.enter();
        let ends = catch_unwind(AssertUnwindSafe(|| drop(connection)));
        self.release(&guest);
        match reason {
            Some(ended) if ended.is_closed() => tracing::info!("disconnected"),
            Some(ended) => tracing::warn!(reason = %ended, "disconnected"),
            None => report_panic(&guest.spec.name),
        }
        if ends.is_err() {
            report_panic(&guest.spec.name);
        }
    }

    /// Lets a guest's monitor connect again.
    fn release(&self, guest: &Guest) {
        guest.link.set_worker(None);
        self.shared().guests.fetch_sub(1, Ordering::Relaxed);
        // A counter that is full is an event that is yet to be seen.
        let _ = rustix::io::write(&self.departures, &1_u64.to_ne_bytes());
    }

    /// Looks at the clock; the time that passed since it did last was spent on something, as far as
    /// this thread ran.
    fn pass(&mut self, doing: Doing) -> Passed {
        let passed = self.clock.look();
        self.shared().times.add(doing, passed.ran);
        self.shared().times.add(Doing::Wait, passed.waited);
        passed
    }

    /// The same after work, before which there may have been rounds in vain that were not timed:
    /// they are taken to have been as long as the last that was. How long the work ran.
    fn pass_work(&mut self) -> Duration {
        let Passed { ran, waited } = self.clock.look();
        let untimed = std::mem::take(&mut self.vain).saturating_sub(1) % ROUNDS;
        let poll = ran.min(self.look * untimed);
        let work = ran.saturating_sub(poll);
        for (doing, time) in [(Doing::Poll, poll), (Doing::Work, work), (Doing::Wait, waited)] {
            self.shared().times.add(doing, time);
        }
        work
    }

    /// Whether it is time to look at sockets and kicks.
    fn look_due(&self) -> bool {
        let period = if self.vain == 0 { EVENTS_BUSY } else { EVENTS_IDLE };
        self.clock.now().saturating_duration_since(self.looked) >= period
    }

    /// After a round: parks guests that were looked at in vain for long enough.
    fn tick(&mut self, worked: bool) {
        if worked {
            self.vain = 0;
        } else {
            self.vain += 1;
            // The first round in vain is late enough for those that wait for nothing.
            if self.vain % ROUNDS != 1 {
                std::hint::spin_loop();
                return;
            }
            let passed = self.pass(Doing::Poll);
            self.look = passed.ran / if self.vain == 1 { 1 } else { ROUNDS };
            self.crowd.looked(passed.total());
            if !self.crowd.is_dense() {
                self.offer();
            }
        }
        let (now, dense) = (self.clock.now(), self.crowd.is_dense());
        for at in (0..self.connections.len()).rev() {
            if self.connections[at].is_tired(now, dense) {
                self.guard(at, |connection| {
                    connection.park();
                    Ok(())
                });
            }
        }
        self.expire();
    }

    /// Lets others have the processor, if they want it and have not been asked just now.
    fn offer(&mut self) {
        if self.clock.now().saturating_duration_since(self.yielded) < OFFER {
            return;
        }
        std::thread::yield_now();
        let passed = self.pass(Doing::Poll);
        self.crowd.yielded(passed.total());
        self.yielded = self.clock.now();
    }

    /// Gives turns to parked guests whose time has come.
    fn expire(&mut self) {
        for connection in &mut self.connections {
            if matches!(connection.state, State::Parked(Some(time)) if time <= self.clock.now()) {
                connection.state = State::Hot;
            }
        }
    }

    /// Ends all service, because the kernel does not let this worker wait.
    fn retire(&mut self, error: Errno) {
        tracing::error!(%error, worker = self.index, "the worker ends");
        while !self.connections.is_empty() {
            self.remove(0, Some(&Ended::Poll(error)));
        }
        self.shared().guests.store(RETIRED, Ordering::Relaxed);
    }
}

fn report_panic(guest: &str) {
    tracing::error!(guest, "a bug in virtio-rdmad: the service of this guest panicked");
}

#[cfg(test)]
mod tests;
