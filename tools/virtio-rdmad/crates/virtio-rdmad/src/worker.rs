// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A thread that serves guests.
//!
//! A worker goes round: each guest that is [`State::Runnable`] gets a turn. A turn has a bounded
//! length, so that a guest that floods the worker makes the others wait for one of its turns at most.
//! While there is work, or was a moment ago, the worker looks at sockets and kicks only every so
//! often: a system call in each round would be most of the round, and a guest that gets turns has no
//! need to kick. A guest that has had no work for a while ([`rest`]) is armed: it has to kick from then on. A worker
//! all of whose guests are armed sleeps, and uses no processor time. For some guests it naps instead. A worker that would
//! sleep may be called by another one, and helps that with large copies ([`memory::Helpers`]).
//!
//! What comes over the uplinks of its guests' networks is taken in before the guests get their turns, so
//! that they find it there ([`intakes`]).

mod backend;
pub mod balance;
mod clock;
mod connection;
pub mod crew;
mod intakes;
mod poller;
mod rest;
mod spin;

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blame::Word;
use engine::Wake;
use memory::{Helper, Helpers};
use network::Intake;
use rustix::io::Errno;
use virtio_transport::ConnectionState;

use crate::guest::events::Event;
use crate::guest::guests::Guests;
use crate::guest::mailbox::{least, Inbox, Mailbox, Order};
use crate::guest::times::Doing;
use crate::guest::Guest;
use crate::handover::{Connected, Unreadable, Work};
use clock::{Passed, ThreadClock};
use connection::{Connection, Ended, State};
use intakes::Intakes;
use poller::{Poller, Source};
use rest::{Rest, NAP};
use spin::Contention;

/// Time between two looks at sockets and kicks while there is work.
const EVENTS_BUSY: Duration = Duration::from_micros(50);
/// Time between two looks at sockets and kicks while there is no work.
const EVENTS_IDLE: Duration = Duration::from_micros(10);
/// Rounds without work between two looks at the clock.
const ROUNDS: u32 = 8;

/// The time for which a worker looks for large copies of others to help with.
const HELP: Duration = Duration::from_micros(200);
/// The time for which a worker has to sleep before it is called, if it has found that other threads want its processor.
/// They may stop wanting it, and a worker without guests does not sleep so often that it would find out by itself.
const NO_HELP: Duration = Duration::from_secs(1);
/// The number of looks for such copies between two looks at the worker's own sockets and kicks.
const HELP_LOOKS: u32 = 64;
/// The number of copies after which the worker looks at these at once.
const HELP_COPIES: u32 = 2;

/// Time between two yields of a worker without work.
const YIELD_PERIOD: Duration = Duration::from_micros(10);

/// A guest, and its VMM, which was connected to an earlier process.
pub type Resumed = (Arc<Guest>, Connected);

/// The guests that other workers have served and that are on their way to a worker. No poller watches their
/// descriptors, and their links name the worker already.
#[derive(Default)]
pub struct Passing(Mutex<Vec<Connection>>);

impl Passing {
    fn lock(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a guest to the worker that has this mailbox. A worker that has retired returns the guest.
    fn hand_over(&self, connection: Connection, mailbox: &Mailbox) -> Result<(), Box<Connection>> {
        let mut passing = self.lock();
        if mailbox.is_retired() {
            return Err(Box::new(connection));
        }
        mailbox.claim();
        passing.push(connection);
        drop(passing);
        mailbox.waker.wake();
        Ok(())
    }

    fn take(&self) -> Vec<Connection> {
        std::mem::take(&mut *self.lock())
    }

    /// Keeps guests away from now on from the worker that has this mailbox. Returns what has come until now.
    fn retire(&self, mailbox: &Mailbox) -> (Inbox, Vec<Connection>) {
        let mut passing = self.lock();
        (mailbox.retire(), std::mem::take(&mut *passing))
    }
}

/// A worker, as its own thread sees it.
pub struct Worker {
    /// The mailboxes of all workers, by index.
    mailboxes: Arc<[Mailbox]>,
    /// The guests that are on their way to each worker, by index.
    passing: Arc<[Passing]>,
    /// The index of this one.
    index: usize,
    /// All guests of the process.
    guests: Arc<Guests>,
    poller: Arc<Poller>,
    /// The longest time that a guest without work gets turns.
    poll: Duration,
    connections: Vec<Connection>,
    /// The guests of another process that could not be loaded, and why. Without a reason that panicked.
    not_loaded: Vec<(Arc<Guest>, Option<Ended>)>,
    intakes: Intakes,
    /// The word of the board in which this worker says for which guest it works, if a later process is to know.
    word: Option<Word>,
    contention: Contention,
    /// All workers, as helpers of each other.
    helpers: Arc<Helpers>,
    /// The time until which the worker helps others while it has nothing to do.
    helps_until: Option<Instant>,
    clock: ThreadClock,
    /// Losses of memory of all guests that this worker knows of.
    losses: u64,
    /// The time at which the worker last looked at sockets and kicks.
    looked: Instant,
    /// The time at which the worker last yielded.
    yielded: Instant,
    /// The time that the work of this round has taken so far.
    round_work: Duration,
    /// Rounds without work since there was work.
    idle_rounds: u32,
    /// The time that a round without work took when one was last timed.
    idle_round: Duration,
}

impl Worker {
    /// Makes the worker with this index, which serves nobody yet.
    pub fn new(
        mailboxes: Arc<[Mailbox]>,
        passing: Arc<[Passing]>,
        index: usize,
        guests: Arc<Guests>,
        intakes: &[Arc<Intake>],
        poll: Duration,
        helpers: Arc<Helpers>,
    ) -> Result<Self, Errno> {
        let poller = Arc::new(Poller::new()?);
        poller.add(mailboxes[index].waker.as_fd(), Source::Wake)?;
        let clock = ThreadClock::new();
        let now = clock.now();
        let intakes = Intakes::new(intakes, index, &poller, poll, now);
        Ok(Self {
            mailboxes,
            passing,
            index,
            guests,
            poller,
            poll,
            connections: Vec::new(),
            not_loaded: Vec::new(),
            intakes,
            word: None,
            contention: Contention::default(),
            helpers,
            helps_until: None,
            clock,
            losses: memory::losses(),
            looked: now,
            yielded: now,
            round_work: Duration::ZERO,
            idle_rounds: 0,
            idle_round: Duration::ZERO,
        })
    }

    /// Makes the worker say in this word for which guest it works, from [`Self::load`] on.
    pub fn say_in(&mut self, word: Word) {
        self.word = Some(word);
    }

    /// Says for which guest the worker works now.
    #[inline]
    fn say(&self, work: Work) {
        if let Some(word) = self.word {
            word.set(work.subject());
        }
    }

    /// Loads guests that another process has served. Nothing of what that process has left is changed before
    /// [`Self::begin`], so that yet another one can do the same if this one fails. Returns what cannot be read.
    pub fn load(&mut self, guests: Vec<Resumed>) -> Vec<Unreadable> {
        if let Some(word) = self.word {
            word.adopt();
        }
        let mut unreadable = Vec::new();
        for (guest, connected) in guests {
            self.say(Work::Load(guest.subject()));
            // Without this, another VMM would wait until this one has gone.
            let _ = guest.seat.take(&connected.stream);
            guest.link.set_worker(Some(self.index));
            self.mailbox().claim();
            match self.connect(&guest, connected) {
                Some(Ok(connection)) => {
                    let missing = connection.check_features().err();
                    unreadable.extend(missing.and_then(|ended| ended.unreadable(&guest)));
                    self.take(connection, true);
                }
                Some(Err(ended)) => {
                    unreadable.extend(ended.unreadable(&guest));
                    self.not_loaded.push((guest, Some(ended)));
                }
                None => self.not_loaded.push((guest, None)),
            }
        }
        self.say(Work::Nobody);
        unreadable
    }

    /// Begins to serve the guests that were loaded. The VMMs of those that could not be loaded are disconnected.
    pub fn begin(&mut self) {
        for (guest, ended) in std::mem::take(&mut self.not_loaded) {
            self.refuse(&guest, ended.as_ref());
        }
        self.connections.iter_mut().for_each(Connection::keep);
    }

    fn mailbox(&self) -> &Mailbox {
        &self.mailboxes[self.index]
    }

    /// Completes all messages of VMMs that this process has read, because another process is to go on with the guests.
    /// Returns the states of the connections. The worker does not run any more.
    pub fn finish(&mut self) -> Vec<Option<ConnectionState>> {
        // Guests that are on their way to this worker are left as well. None goes to another one any more.
        let Inbox { connected, .. } = self.mailbox().take_inbox();
        let passed = self.passing[self.index].take();
        self.receive(connected, passed);
        let finish = |connection: &mut Connection| {
            let span = connection.span.clone();
            let _span = span.enter();
            let finished = catch_unwind(AssertUnwindSafe(|| connection.finish()));
            match finished {
                Ok(Ok(state)) => return Some(state),
                Ok(Err(ended)) => tracing::warn!(reason = %ended, "not left to another process"),
                Err(_) => report_panic(&connection.guest.spec.name),
            }
            None
        };
        self.connections.iter_mut().map(finish).collect()
    }

    /// Leaves the guests to another process, with what [`Self::finish`] has returned. No worker runs any more since
    /// this time of [`handover::now`](crate::handover::now).
    pub fn leave(self, states: &[Option<ConnectionState>], stopped: u64) {
        for (connection, state) in self.connections.into_iter().zip(states) {
            if let Some(state) = state {
                connection.leave(state, stopped);
            }
        }
    }

    /// Serves guests until [`Mailbox::stop`].
    pub fn run(&mut self) {
        // The clock is that of the thread that made the worker, which may be another one.
        self.clock.wake();
        while !self.mailbox().is_stopped() {
            if let Err(error) = self.round().and_then(|()| self.sleep()) {
                self.retire(error);
                break;
            }
        }
    }

    /// Takes in frames that have come over uplinks, and gives a turn to each guest that is runnable.
    pub fn round(&mut self) -> Result<(), Errno> {
        self.take_requests();
        if self.must_look() {
            let events = self.poller.wait(Some(Duration::ZERO))?;
            self.looked = self.clock.now();
            self.dispatch(&events);
            self.intakes.review(self.looked)?;
        }
        let mut worked = self.take_in();
        let mut at = 0;
        while at < self.connections.len() {
            match self.turn(at) {
                Some(had_work) => {
                    worked |= had_work;
                    at += 1;
                }
                // The guest has gone, and another one has its place.
                None => worked = true,
            }
        }
        self.mailbox().times.count_round();
        self.notice_losses();
        self.end_round(worked);
        Ok(())
    }

    /// Takes in frames that have come over uplinks. Returns whether there were any.
    #[inline]
    fn take_in(&mut self) -> bool {
        self.say(Work::Nobody);
        let worked = self.intakes.turn();
        if worked {
            self.count_work();
            self.intakes.worked(self.clock.now());
            // The guests that it is for get a turn in this round.
            self.take_requests();
        }
        worked
    }

    /// Gives every guest a turn, those of other workers too, if memory of any was lost: the worker
    /// whose access finds that out need not be the one of the guest whose memory it is.
    fn notice_losses(&mut self) {
        let losses = memory::losses();
        if losses == self.losses {
            return;
        }
        self.losses = losses;
        for connection in &mut self.connections {
            connection.state = State::Runnable;
        }
        for worker in self.mailboxes.iter() {
            worker.waker.wake();
        }
    }

    /// Gives a guest its turn if it is runnable, and returns whether there was work; `None` if the
    /// guest's connection has ended.
    fn turn(&mut self, at: usize) -> Option<bool> {
        let connection = &mut self.connections[at];
        if connection.state != State::Runnable {
            return Some(false);
        }
        let worked = self.guard(at, Connection::turn)?;
        if worked {
            let passed = self.count_work();
            self.mailbox().times.count_turn(passed.total());
            let now = self.clock.now();
            self.connections[at].worked(passed.ran, now);
        }
        Some(worked)
    }

    /// Calls `f` for a guest. An error, and a panic too, which is a bug, ends the guest's connection
    /// and nothing else; this returns `None` then.
    fn guard<R>(
        &mut self,
        at: usize,
        f: impl FnOnce(&mut Connection) -> Result<R, Ended>,
    ) -> Option<R> {
        self.say(Work::Serve(self.connections[at].subject));
        let connection = &mut self.connections[at];
        match catch_unwind(AssertUnwindSafe(|| f(connection))) {
            Ok(Ok(result)) => return Some(result),
            Ok(Err(ended)) => self.remove(at, Some(&ended)),
            Err(_) => self.remove(at, None),
        }
        None
    }

    /// Sleeps until there is something to do, if all guests are armed, and for a nap at most if it naps for those that
    /// are not.
    fn sleep(&mut self) -> Result<(), Errno> {
        let mut timer: Option<Instant> = None;
        let mut naps = false;
        for connection in &self.connections {
            match connection.state {
                State::Runnable if connection.rest == Rest::Nap => {
                    naps = true;
                    timer = timer.into_iter().chain(connection.timer()).min();
                }
                State::Runnable => return Ok(()),
                State::Armed(time) => timer = timer.into_iter().chain(time).min(),
            }
        }
        if naps {
            timer = timer.into_iter().chain([self.clock.now() + NAP]).min();
        }
        if self.intakes.is_polling() || !self.mailbox().waker.may_sleep() {
            return Ok(());
        }
        self.say(Work::Nobody);
        self.count_time(Doing::Poll);
        let events = match self.help(timer)? {
            Some(events) => Ok(events),
            None => self.wait(timer, naps),
        };
        self.clock.wake();
        if naps {
            self.contention.napped();
            // The first round without work decides again.
            self.idle_rounds = 0;
        } else {
            self.contention.slept();
        }
        self.looked = self.clock.now();
        self.dispatch(&events?);
        self.intakes.review(self.looked)?;
        self.expire();
        Ok(())
    }

    /// Sleeps until there are events or it is time for a timer. Returns the events. `naps`: only for a moment.
    fn wait(&self, timer: Option<Instant>, naps: bool) -> Result<Vec<Source>, Errno> {
        let timeout = timer.map(|time| time.saturating_duration_since(self.clock.now()));
        let rest = if self.contention.is_high() { NO_HELP } else { Duration::ZERO };
        self.mailbox().may_be_called((!naps).then(|| self.clock.now() + rest));
        self.mailbox().times.sleeps(true);
        let events = self.poller.wait(timeout);
        self.mailbox().times.sleeps(false);
        events
    }

    /// Helps other workers with large copies, if this one was called, until there are events or it is time for a timer.
    /// Returns the events; `None` if this worker may sleep, because nobody has wanted help for a while or other threads
    /// want the processor.
    fn help(&mut self, timer: Option<Instant>) -> Result<Option<Vec<Source>>, Errno> {
        let Some(mut until) = self.helps_until.take() else { return Ok(None) };
        let helpers = self.helpers.clone();
        let mut helper = helpers.join();
        while !self.contention.is_high() && self.clock.now() < until {
            if look_for_copies(&mut helper) {
                self.count_time(Doing::Work);
                until = self.clock.now() + HELP.min(self.poll);
            } else {
                let passed = self.count_time(Doing::Poll);
                self.contention.polled(passed.total());
            }
            self.yield_now();
            let events = self.poller.wait(Some(Duration::ZERO))?;
            if !events.is_empty() || timer.is_some_and(|time| time <= self.clock.now()) {
                // It goes on when these are done.
                self.helps_until = Some(until);
                return Ok(Some(events));
            }
        }
        Ok(None)
    }

    /// Handles the requests of other threads.
    fn take_requests(&mut self) {
        if !self.mailbox().waker.take() {
            return;
        }
        if self.mailbox().take_call() {
            // If other threads wanted the processor, that is a while ago.
            self.contention = Contention::default();
            self.helps_until = Some(self.clock.now() + HELP.min(self.poll));
        }
        let Inbox { connected, orders } = self.mailbox().take_inbox();
        let passed = self.passing[self.index].take();
        self.receive(connected, passed);
        self.obey(orders);
        self.take_wanted();
    }

    /// Begins to serve guests whose VMMs have connected, and goes on with those that another worker has served.
    fn receive(&mut self, connected: Vec<(u32, Connected)>, passed: Vec<Connection>) {
        for (guest, connected) in connected {
            if let Some(guest) = self.guests.get(guest) {
                self.adopt(&guest, connected);
            }
        }
        for connection in passed {
            self.go_on(connection);
        }
    }

    fn obey(&mut self, orders: Vec<Order>) {
        for order in orders {
            match order {
                Order::SendAway(guest, to) => self.send_away(guest, to),
            }
        }
    }

    /// Makes the guests runnable for which other threads want a turn. A guest that was handed to another worker gets
    /// its turn there.
    fn take_wanted(&mut self) {
        let mailboxes = self.mailboxes.clone();
        mailboxes[self.index].take_wanted(|guest| {
            if let Some(connection) = self.connection(guest) {
                connection.state = State::Runnable;
            } else if let Some(guest) = self.guests.get(guest) {
                // A guest whose link names this worker is yet to arrive, and gets a turn then.
                if guest.link.worker() != Some(self.index) {
                    guest.link.wake();
                }
            }
        });
    }

    fn position(&self, guest: u32) -> Option<usize> {
        self.connections.iter().position(|connection| connection.guest.index == guest)
    }

    fn connection(&mut self, guest: u32) -> Option<&mut Connection> {
        self.position(guest).map(|at| &mut self.connections[at])
    }

    fn dispatch(&mut self, events: &[Source]) {
        for &source in events {
            match source {
                Source::Wake => {}
                Source::Socket(guest) | Source::Kick(guest, _) => {
                    if let Some(connection) = self.connection(guest) {
                        connection.notice(source);
                    }
                }
                Source::Uplink(intake) => self.intakes.notice(intake),
            }
        }
    }

    /// Begins to serve a guest, whose VMM is connected.
    fn adopt(&mut self, guest: &Arc<Guest>, connected: Connected) {
        let resumed = connected.said.is_some();
        match self.connect(guest, connected) {
            Some(Ok(mut connection)) => {
                connection.keep();
                self.take(connection, resumed);
            }
            Some(Err(ended)) => self.refuse(guest, Some(&ended)),
            None => self.refuse(guest, None),
        }
    }

    /// Makes the connection of a guest. Returns nothing after a panic.
    fn connect(
        &self,
        guest: &Arc<Guest>,
        connected: Connected,
    ) -> Option<Result<Connection, Ended>> {
        let (poller, poll, now) = (&self.poller, self.poll, self.clock.now());
        let begin = || Connection::new(guest.clone(), connected, poller, poll, now);
        catch_unwind(AssertUnwindSafe(begin)).ok()
    }

    /// Takes a connection among those that are served.
    fn take(&mut self, connection: Connection, resumed: bool) {
        let guest = &connection.guest;
        let transport = guest.spec.transport().name();
        connection.span.in_scope(|| {
            tracing::info!(transport, worker = self.index, resumed, "connected");
        });
        guest.link.tell(Event::Connected { worker: self.index });
        self.intakes.join(&guest.spec.network, guest.spec.mac());
        self.connections.push(connection);
    }

    /// Disconnects the VMM of a guest that cannot be served. Without a reason that panicked.
    fn refuse(&self, guest: &Guest, reason: Option<&Ended>) {
        let name = &guest.spec.name;
        match reason {
            Some(error) => tracing::warn!(guest = name, reason = %error, "disconnected"),
            None => report_panic(name),
        }
        self.release(guest);
    }

    /// Hands a guest to another worker, if this worker serves it.
    fn send_away(&mut self, guest: u32, to: usize) {
        let Some(at) = self.position(guest).filter(|_| to != self.index) else { return };
        if let Err(connection) = self.hand_over(at, to) {
            // It has retired.
            connection.guest.link.set_worker(Some(self.index));
            self.go_on(*connection);
        }
    }

    /// Hands a guest to another worker, or returns it if that one has retired. No poller watches its descriptors then.
    ///
    /// Nothing is lost on the way: the guest gets a turn when it arrives, and finds what has come until then. Its kicks
    /// wait in their eventfds. A thread that still takes this worker for the guest's sets the bit of the guest here,
    /// and [`Self::take_wanted`] passes that on.
    fn hand_over(&mut self, at: usize, to: usize) -> Result<(), Box<Connection>> {
        let connection = self.connections.swap_remove(at);
        let guest = connection.guest.clone();
        self.intakes.leave(&guest.spec.network, guest.spec.mac());
        connection.detach();
        guest.link.set_worker(Some(to));
        self.passing[to].hand_over(connection, &self.mailboxes[to])?;
        self.mailbox().release();
        Ok(())
    }

    /// Goes on to serve a guest that another worker has served.
    fn go_on(&mut self, connection: Connection) {
        let spec = &connection.guest.spec;
        self.intakes.join(&spec.network, spec.mac());
        self.connections.push(connection);
        let (worker, poller) = (self.index, self.poller.clone());
        self.guard(self.connections.len() - 1, |connection| {
            connection.attach(&poller)?;
            connection.span.in_scope(|| tracing::info!(worker, "moved"));
            connection.guest.link.tell(Event::Moved { worker });
            Ok(())
        });
    }

    /// Ends a guest's service. Without a `reason` it panicked. A panic while the connection is dropped
    /// is caught as well: it ends no other guest's service.
    fn remove(&mut self, at: usize, reason: Option<&Ended>) {
        let connection = self.connections.swap_remove(at);
        let spec = &connection.guest.spec;
        self.intakes.leave(&spec.network, spec.mac());
        self.end(connection, reason);
    }

    /// Ends the service of a guest, which is not among the connections any more.
    fn end(&mut self, connection: Connection, reason: Option<&Ended>) {
        let (guest, span) = (connection.guest.clone(), connection.span.clone());
        let _span = span.enter();
        let ends = catch_unwind(AssertUnwindSafe(|| drop(connection)));
        self.release(&guest);
        let told = reason.map_or("a bug in virtio-rdmad".to_owned(), Ended::to_string);
        guest.link.tell(Event::Disconnected { reason: told });
        match reason {
            Some(ended) if ended.is_closed() => tracing::info!("disconnected"),
            Some(ended) => tracing::warn!(reason = %ended, "disconnected"),
            None => report_panic(&guest.spec.name),
        }
        if ends.is_err() {
            report_panic(&guest.spec.name);
        }
    }

    /// Lets a guest's VMM connect again.
    fn release(&self, guest: &Guest) {
        if let Some(mut kept) = guest.kept() {
            kept.disconnect();
        }
        guest.seat.leave();
        guest.set_node(None);
        guest.link.set_worker(None);
        self.mailbox().release();
        self.guests.note_change();
    }

    /// Looks at the clock, and counts the time that passed since the last look: as spent on `doing`
    /// while this thread ran, and as waiting while it did not.
    fn count_time(&mut self, doing: Doing) -> Passed {
        let passed = self.clock.look();
        self.mailbox().times.add(doing, passed.ran);
        self.mailbox().times.add(Doing::Wait, passed.waited);
        passed
    }

    /// Looks at the clock after a turn that had work, and counts the time that passed since the last
    /// look. Returns how long the work ran, and waited for the processor.
    ///
    /// Rounds without work may have come before it that were not timed. Each counts as long as the
    /// last one that was.
    fn count_work(&mut self) -> Passed {
        let Passed { ran, waited } = self.clock.look();
        let untimed = std::mem::take(&mut self.idle_rounds).saturating_sub(1) % ROUNDS;
        let poll = ran.min(self.idle_round * untimed);
        let work = ran.saturating_sub(poll);
        for (doing, time) in [(Doing::Poll, poll), (Doing::Work, work), (Doing::Wait, waited)] {
            self.mailbox().times.add(doing, time);
        }
        let passed = Passed { ran: work, waited };
        self.round_work += passed.total();
        passed
    }

    /// Returns whether it is time to look at sockets and kicks.
    fn must_look(&self) -> bool {
        let period = if self.idle_rounds == 0 { EVENTS_BUSY } else { EVENTS_IDLE };
        self.clock.now().saturating_duration_since(self.looked) >= period
    }

    /// Ends a round: arms the guests that have had no work for long enough.
    ///
    /// Of rounds without work only every [`ROUNDS`]th does so, from the first one on: a guest that is
    /// not to be waited for at all is armed after one.
    fn end_round(&mut self, worked: bool) {
        if worked {
            self.idle_rounds = 0;
            let time = std::mem::take(&mut self.round_work);
            self.mailbox().times.count_worked_round(time);
        } else {
            self.idle_rounds += 1;
            if self.idle_rounds % ROUNDS != 1 {
                std::hint::spin_loop();
                return;
            }
            let passed = self.count_time(Doing::Poll);
            self.idle_round = passed.ran / if self.idle_rounds == 1 { 1 } else { ROUNDS };
            self.contention.polled(passed.total());
            if !self.contention.is_high() {
                self.yield_now();
            }
        }
        self.arm();
        self.expire();
    }

    /// Arms the guests that have had no work for long enough, and the uplinks over which nothing has come.
    fn arm(&mut self) {
        let (now, contended) = (self.clock.now(), self.contention.is_high());
        self.intakes.arm(now, contended);
        for at in (0..self.connections.len()).rev() {
            if self.connections[at].decide_rest(now, contended) == Rest::Sleep {
                self.guard(at, |connection| {
                    connection.arm();
                    Ok(())
                });
            }
        }
    }

    /// Lets other threads have the processor, unless this worker yielded just now.
    fn yield_now(&mut self) {
        if self.clock.now().saturating_duration_since(self.yielded) < YIELD_PERIOD {
            return;
        }
        std::thread::yield_now();
        let passed = self.count_time(Doing::Poll);
        self.contention.yielded(passed.total());
        self.yielded = self.clock.now();
    }

    /// Makes the armed guests runnable whose time has come.
    fn expire(&mut self) {
        for connection in &mut self.connections {
            if matches!(connection.state, State::Armed(Some(time)) if time <= self.clock.now()) {
                connection.state = State::Runnable;
            }
        }
    }

    /// Ends, because the kernel does not let this worker wait. The guests go to the other workers.
    fn retire(&mut self, error: Errno) {
        tracing::error!(%error, worker = self.index, "the worker ends");
        let (Inbox { connected, orders }, passed) = self.passing[self.index].retire(self.mailbox());
        self.receive(connected, passed);
        while let Some(last) = self.connections.len().checked_sub(1) {
            let Some(other) = least(&self.mailboxes) else {
                self.remove(last, Some(&Ended::Poll(error)));
                continue;
            };
            if let Err(connection) = self.hand_over(last, other) {
                self.end(*connection, Some(&Ended::Poll(error)));
            }
        }
        // What is left for these guests goes after them.
        self.obey(orders);
        self.take_wanted();
        self.intakes.give_all_back(self.clock.now());
    }
}

/// Helps with copies for a moment. Returns whether there were any.
fn look_for_copies(helper: &mut Helper<'_>) -> bool {
    let mut copies = 0;
    for _ in 0..HELP_LOOKS {
        if helper.help() {
            copies += 1;
            if copies == HELP_COPIES {
                break;
            }
        } else {
            std::hint::spin_loop();
        }
    }
    copies != 0
}

fn report_panic(guest: &str) {
    tracing::error!(guest, "a bug in virtio-rdmad: the service of this guest panicked");
}

#[cfg(test)]
mod tests;
