// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The thread of a switch: it takes what comes from the network interfaces of guests, and what comes over the uplink
//! while no worker does ([`crate::intake`]). It gives each source a bounded turn, so that no source holds up the
//! others.

use std::io::Error;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::Fabric;
use rustix::event::{epoll, Timespec};
use rustix::io::Errno;

use crate::intake::{Budget, Found, Intake};
use crate::nic::{Allowance, Ended, Incoming, Nic, NicCounter};
use crate::switch::Switch;

/// The interval at which the thread looks after the uplink.
const LOOK: Duration = Duration::from_secs(1);

/// Frames that a source may bring in a turn.
const BURST: usize = 64;

/// Forwards frames until `end` is closed. `intakes` are those of the uplink, if there is one.
pub fn run(switch: &Switch, fabric: &Fabric, intakes: &[Arc<Intake>], end: &UnixStream) {
    let turns = Turns::new(switch, fabric, intakes, end);
    if let Err(error) = turns.and_then(|mut turns| turns.run()) {
        tracing::error!(network = fabric.name(), %error, "the switch ends");
    }
}

/// A source of events that the thread waits for. Lanes and interfaces are named by their index.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Source {
    End,
    /// Interfaces have come or gone.
    Changes,
    /// Something has come over a lane of the uplink.
    Uplink(usize),
    /// The intake of a lane may be the thread's again.
    Intake(usize),
    /// A VMM connects.
    Listener(usize),
    /// The connection of a VMM.
    Link(usize),
}

impl Source {
    fn token(self) -> u64 {
        let of = |kind, index: usize| kind + 4 * index as u64;
        match self {
            Self::End => 0,
            Self::Changes => 1,
            Self::Uplink(index) => of(4, index),
            Self::Intake(index) => of(5, index),
            Self::Listener(index) => of(6, index),
            Self::Link(index) => of(7, index),
        }
    }

    fn of(token: u64) -> Self {
        let index = usize::try_from(token / 4).unwrap_or(usize::MAX).wrapping_sub(1);
        match (token, token % 4) {
            (0, _) => Self::End,
            (1, _) => Self::Changes,
            (_, 0) => Self::Uplink(index),
            (_, 1) => Self::Intake(index),
            (_, 2) => Self::Listener(index),
            _ => Self::Link(index),
        }
    }
}

/// Returns what the kernel says when something happens to a source.
fn data(source: Source) -> epoll::EventData {
    epoll::EventData::new_u64(source.token())
}

/// The state of an interface: its connection, and the frames that come from it.
#[derive(Debug)]
struct Session {
    nic: Arc<Nic>,
    /// The connection, if there is one.
    incoming: Option<Incoming>,
    /// The allowance for frames to groups.
    floods: Allowance,
    /// Whether something may have come that was not taken.
    is_ready: bool,
    /// Whether a VMM may wait to be accepted.
    is_awaited: bool,
}

/// A lane of the uplink, as the thread sees it.
struct Lane<'a> {
    intake: &'a Intake,
    /// Whether this thread waits for what comes over the lane: whether the intake was its own when it
    /// last looked.
    watches: bool,
    /// Whether something may have come over the lane that was not taken.
    is_ready: bool,
}

/// The state of the switch's thread.
///
/// An event says that something has changed (edge-triggered). So whoever is told of one keeps it in mind
/// until the kernel says that there is nothing more.
struct Turns<'a> {
    switch: &'a Switch,
    fabric: &'a Fabric,
    /// The state of each lane of the uplink, by its index.
    lanes: Vec<Lane<'a>>,
    epoll: OwnedFd,
    /// The state of each interface, by its index.
    sessions: Vec<Option<Session>>,
    /// The time at which the thread looks after the uplink.
    look_at: Instant,
}

impl<'a> Turns<'a> {
    fn new(
        switch: &'a Switch,
        fabric: &'a Fabric,
        intakes: &'a [Arc<Intake>],
        end: &UnixStream,
    ) -> Result<Self, Error> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, end, data(Source::End), edge)?;
        for (index, intake) in intakes.iter().enumerate() {
            epoll::add(&epoll, intake.waker.as_fd(), data(Source::Intake(index)), edge)?;
        }
        epoll::add(&epoll, switch.changes.as_fd(), data(Source::Changes), edge)?;
        let lane = |intake: &'a Arc<Intake>| Lane { intake, watches: false, is_ready: false };
        let (lanes, look_at) = (intakes.iter().map(lane).collect(), Instant::now());
        let mut this = Self { switch, fabric, lanes, epoll, sessions: Vec::new(), look_at };
        this.follow_changes()?;
        Ok(this)
    }

    /// Begins to serve the interfaces that have come, and ends that for those that have gone.
    fn follow_changes(&mut self) -> Result<(), Error> {
        let nics = self.switch.slots().clone();
        self.sessions.resize_with(nics.len(), || None);
        for (index, (session, nic)) in self.sessions.iter_mut().zip(nics).enumerate() {
            if session.as_ref().map(|session| Arc::as_ptr(&session.nic))
                == nic.as_ref().map(Arc::as_ptr)
            {
                continue;
            }
            if let Some(session) = session.take() {
                session.leave(&self.epoll);
            }
            if let Some(nic) = nic {
                *session = Some(Session::new(&self.epoll, nic, index)?);
            }
        }
        Ok(())
    }

    fn run(&mut self) -> Result<(), Error> {
        loop {
            self.look_at_intakes()?;
            if !self.wait()? {
                return Ok(());
            }
            for lane in self.lanes.iter_mut().filter(|lane| lane.is_ready) {
                // No event tells of what a turn has left.
                let found = lane.intake.turn(&mut Budget::default());
                lane.is_ready = found == Found::Frames;
            }
            for index in 0..self.sessions.len() {
                self.serve_nic(index);
            }
            self.look_after_uplink()?;
        }
    }

    /// Looks after the uplink, if it is time for that.
    fn look_after_uplink(&mut self) -> Result<(), Error> {
        let Some(uplink) = &self.switch.uplink else { return Ok(()) };
        let now = Instant::now();
        if self.look_at > now {
            return Ok(());
        }
        self.look_at = now + LOOK;
        if let Some(has_carrier) = uplink.has_carrier() {
            self.fabric.set_port(has_carrier);
        }
        if !uplink.look_after() {
            return Ok(());
        }
        for (index, lane) in self.lanes.iter().enumerate().filter(|(_, lane)| lane.watches) {
            epoll::delete(&self.epoll, lane.intake)?;
            lane.watch(&self.epoll, index)?;
        }
        Ok(())
    }

    /// Returns how long the thread may sleep; `None`: for ever.
    fn rest(&self) -> Option<Timespec> {
        self.switch.uplink.as_ref()?;
        Timespec::try_from(self.look_at.saturating_duration_since(Instant::now())).ok()
    }

    /// Begins to wait for what comes over the lanes whose intakes are this thread's again, or ends that.
    fn look_at_intakes(&mut self) -> Result<(), Error> {
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            if lane.intake.is_of_thread() == lane.watches {
                continue;
            }
            lane.watches = !lane.watches;
            if lane.watches {
                lane.watch(&self.epoll, index)?;
            } else {
                epoll::delete(&self.epoll, lane.intake)?;
                lane.is_ready = false;
            }
        }
        Ok(())
    }

    /// Takes events, and waits for one if there is nothing to do. Returns `false` at the end.
    fn wait(&mut self) -> Result<bool, Error> {
        let is_busy = self.lanes.iter().any(|lane| lane.is_ready)
            || self.sessions.iter().flatten().any(Session::has_work);
        let may_sleep = !is_busy
            && self.switch.changes.may_sleep()
            && self.lanes.iter().all(|lane| lane.intake.waker.may_sleep());
        let rest = if may_sleep { self.rest() } else { Some(Timespec::default()) };
        let none = epoll::Event { flags: epoll::EventFlags::empty(), data: data(Source::End) };
        let mut events = [none; BURST];
        let count = match epoll::wait(&self.epoll, &mut events, rest.as_ref()) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(errno) => return Err(errno.into()),
        };
        for lane in &self.lanes {
            lane.intake.waker.take();
        }
        for event in &events[..count] {
            match Source::of(event.data.u64()) {
                Source::End => return Ok(false),
                Source::Uplink(index) => self.lanes[index].is_ready = true,
                // The next round looks at it, or this one does below.
                Source::Intake(_) | Source::Changes => {}
                Source::Listener(index) => {
                    if let Some(session) = self.session(index) {
                        session.is_awaited = true;
                    }
                }
                Source::Link(index) => {
                    if let Some(session) = self.session(index) {
                        session.is_ready = true;
                        session.nic.flush();
                    }
                }
            }
        }
        if self.switch.changes.take() {
            self.follow_changes()?;
        }
        Ok(true)
    }

    fn session(&mut self, index: usize) -> Option<&mut Session> {
        self.sessions.get_mut(index)?.as_mut()
    }

    /// Accepts a VMM, or takes frames from one.
    fn serve_nic(&mut self, index: usize) {
        let session = self.sessions[index].as_mut().filter(|session| session.has_work());
        let Some(session) = session else { return };
        let nic = session.nic.clone();
        if session.incoming.is_none() && session.is_awaited {
            match nic.listener.accept() {
                Ok(Some(stream)) => session.begin(&self.epoll, index, stream),
                Ok(None) => session.is_awaited = false,
                Err(error) => {
                    tracing::warn!(guest = nic.guest, %error, "accepting a network interface");
                    session.is_awaited = false;
                }
            }
        }
        for _ in 0..BURST {
            let Session { incoming: Some(incoming), floods, is_ready: true, .. } = session else {
                return;
            };
            match incoming.take() {
                Ok(Some(frame)) => {
                    self.switch.take_from_nic(&nic, index, self.fabric, frame, floods);
                }
                Ok(None) => session.is_ready = false,
                Err(ended) => session.end(&ended),
            }
        }
    }
}

impl Lane<'_> {
    /// Begins to wait for what comes over the lane. What has come already is told of by an event.
    fn watch(&self, epoll: &OwnedFd, index: usize) -> Result<(), Error> {
        let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
        Ok(epoll::add(epoll, self.intake, data(Source::Uplink(index)), edge)?)
    }
}

impl Session {
    /// Begins to wait for a VMM.
    fn new(epoll: &OwnedFd, nic: Arc<Nic>, index: usize) -> Result<Self, Error> {
        let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(epoll, nic.listener.as_fd(), data(Source::Listener(index)), edge)?;
        let floods = Allowance::new(Instant::now());
        // No event tells of a VMM that came before.
        Ok(Self { nic, incoming: None, floods, is_ready: false, is_awaited: true })
    }

    /// Ends all service, because the interface has gone.
    fn leave(self, epoll: &OwnedFd) {
        // This fails only if it was never added.
        let _ = epoll::delete(epoll, self.nic.listener.as_fd());
        self.nic.disconnect();
    }

    /// Returns whether there is something to do.
    fn has_work(&self) -> bool {
        if self.incoming.is_some() {
            self.is_ready
        } else {
            self.is_awaited
        }
    }

    /// Begins to serve a VMM.
    fn begin(&mut self, epoll: &OwnedFd, index: usize, stream: UnixStream) {
        let nic = &self.nic;
        let edge = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        if let Err(error) = epoll::add(epoll, &stream, data(Source::Link(index)), edge) {
            return tracing::warn!(guest = nic.guest, %error, "the network interface is not served");
        }
        tracing::info!(guest = nic.guest, "network interface connected");
        self.incoming = Some(nic.connect(stream));
        self.is_ready = true;
    }

    /// Ends the connection. Its descriptor is closed, and so the epoll instance forgets it.
    fn end(&mut self, reason: &Ended) {
        let nic = &self.nic;
        match reason {
            Ended::Closed => tracing::info!(guest = nic.guest, "network interface disconnected"),
            Ended::Length(_) => nic.count(NicCounter::BadLength),
            Ended::Os(_) => {}
        }
        if !matches!(reason, Ended::Closed) {
            tracing::warn!(guest = nic.guest, %reason, "network interface disconnected");
        }
        nic.disconnect();
        (self.incoming, self.is_ready) = (None, false);
    }
}

#[cfg(test)]
mod tests;
