// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The switch of a network: it forwards Ethernet frames between the guests' network interfaces, the
//! guests' devices and the uplink.
//!
//! It knows the MAC addresses of the interfaces from the specs of guests, and so learns nothing: a frame for
//! one of them goes there, a frame for a group to all, and any other frame to the uplink. A packet of
//! RoCE v2 goes to the device of the guest that has its destination address, and not to an interface. No
//! frame goes back to where it came from.
//!
//! One thread takes what comes from the interfaces, and what comes over the uplink while no worker does
//! ([`crate::intake`]). It gives each source a bounded turn, so that no source holds up the others. Workers
//! send from their own threads what the devices send.

use std::io::Error;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use engine::Fabric;
use roce::{Segments, Split};
use rustix::event::{epoll, Timespec};
use rustix::io::Errno;

use crate::intake::{Found, Intake};
use crate::nic::{self, Allowance, Ended, Event, Incoming, Nic};
use crate::uplink::counters::Event as UplinkEvent;
use crate::uplink::Uplink;
use crate::waker::Waker;

/// How often the thread looks after the uplink.
const LOOK: Duration = Duration::from_secs(1);

/// Frames that a source may bring in a turn.
const BURST: usize = 64;

/// The interfaces of guests, by index. One that has gone leaves its index to another one.
type Nics = Vec<Option<Arc<Nic>>>;

/// The switch of a network.
#[derive(Debug)]
pub struct Switch {
    /// The way to other hosts, if there is one.
    pub uplink: Option<Arc<Uplink>>,
    nics: RwLock<Nics>,
    /// Whether there is an interface. Most packets need not know more.
    has_nics: AtomicBool,
    /// Tells the thread that interfaces have come or gone.
    changes: Waker,
}

/// Where a frame comes from.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Origin {
    /// The device of a guest.
    Device,
    Uplink,
    /// The interface of a guest, by its index.
    Nic(usize),
}

impl Switch {
    /// Makes a switch with these interfaces.
    pub fn new(uplink: Option<Arc<Uplink>>, nics: Vec<Nic>) -> Result<Self, Errno> {
        let has_nics = AtomicBool::new(!nics.is_empty());
        let nics = RwLock::new(nics.into_iter().map(|nic| Some(Arc::new(nic))).collect());
        Ok(Self { uplink, nics, has_nics, changes: Waker::new()? })
    }

    /// Returns the interfaces, locked. Any thread may call this, and keeps the lock for a moment alone.
    fn slots(&self) -> RwLockReadGuard<'_, Nics> {
        self.nics.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the interfaces. Any thread may call this.
    pub fn nics(&self) -> Vec<Arc<Nic>> {
        self.slots().iter().flatten().cloned().collect()
    }

    fn has_nics(&self) -> bool {
        self.has_nics.load(Ordering::Relaxed)
    }

    /// Changes the interfaces, and has the thread follow.
    fn change_nics(&self, change: impl FnOnce(&mut Nics)) {
        let mut nics = self.nics.write().unwrap_or_else(PoisonError::into_inner);
        change(&mut nics);
        self.has_nics.store(nics.iter().any(Option::is_some), Ordering::Relaxed);
        drop(nics);
        self.changes.wake();
    }

    /// Returns whether it can forward what interfaces send and are sent.
    pub fn takes_nics(&self) -> bool {
        self.uplink.as_ref().is_none_or(|uplink| uplink.takes_nics)
    }

    /// Adds an interface. Any thread may call this.
    pub fn add_nic(&self, nic: Nic) {
        let nic = Some(Arc::new(nic));
        self.change_nics(|nics| match nics.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = nic,
            None => nics.push(nic),
        });
    }

    /// Removes the interface of a guest, if it has one. Any thread may call this.
    pub fn remove_nic(&self, guest: &str) {
        self.change_nics(|nics| {
            for place in nics {
                place.take_if(|nic| nic.guest == guest);
            }
        });
    }

    /// Forwards frames until `end` is closed. `intake` is that of the uplink, if there is one.
    pub fn run(&self, fabric: &Fabric, intake: Option<&Intake>, end: &UnixStream) {
        if let Err(error) = Turns::new(self, fabric, intake, end).and_then(|mut turns| turns.run())
        {
            tracing::error!(network = fabric.name(), %error, "the switch ends");
        }
    }

    /// Gives a frame to the interfaces that it is for. Returns whether it is for one of them alone.
    fn give_to_nics(&self, frame: &[u8], origin: Origin) -> bool {
        let Some((destination, source)) = forwarding::addresses(frame) else { return true };
        if !self.has_nics() {
            return false;
        }
        let slots = self.slots();
        let mut nics =
            slots.iter().enumerate().filter_map(|(index, nic)| Some((index, nic.as_ref()?)));
        if forwarding::is_group(destination) {
            for (index, nic) in nics {
                if origin != Origin::Nic(index) && nic.mac != source {
                    nic.send(frame);
                }
            }
            return false;
        }
        let nic = nics.find(|(_, nic)| nic.mac == destination);
        if let Some((_, nic)) = nic.filter(|(index, _)| origin != Origin::Nic(*index)) {
            nic.send(frame);
        }
        nic.is_some()
    }

    /// Takes a frame that came over the uplink. Any thread may call this.
    pub fn take_from_uplink(&self, uplink: &Uplink, fabric: &Fabric, frame: &[u8], segment: u16) {
        let Some((destination, source)) = forwarding::addresses(frame) else { return };
        if self.has_nics() && self.slots().iter().flatten().any(|nic| nic.mac == source) {
            return uplink.counters.report(UplinkEvent::RxOwnSource, "a frame of a guest of ours");
        }
        let is_for_group = forwarding::is_group(destination);
        let is_taken = fabric.receive(frame, segment);
        if !is_for_group && (is_taken || fabric.has_destination(frame)) {
            return;
        }
        let is_for_one = self.give_to_nics(frame, Origin::Uplink);
        let is_heard = is_for_group && (is_taken || self.has_nics());
        if !is_for_one && !is_heard {
            uplink.counters.count(UplinkEvent::RxUnclaimed);
        }
    }

    /// Takes a frame that came from an interface.
    fn take_from_nic(
        &self,
        nic: &Nic,
        index: usize,
        fabric: &Fabric,
        frame: &mut [u8],
        floods: &mut Allowance,
    ) {
        let addresses = forwarding::addresses(frame).filter(|_| nic::is_well_formed(frame));
        let Some((destination, source)) = addresses else { return nic.count(Event::RxMalformed) };
        if source != nic.mac {
            return nic.count(Event::RxSpoofed);
        }
        if forwarding::is_group(destination) && !floods.take(Instant::now()) {
            return nic.count(Event::RxStorm);
        }
        let is_for_group = forwarding::is_group(destination);
        let is_for_device = !is_for_group && fabric.has_destination(frame);
        if (is_for_device || is_for_group) && !fabric.may_send(nic.mac, frame) {
            return nic.count(Event::RxForged);
        }
        nic.count(Event::RxFrames);
        let is_taken = fabric.receive(frame, 0);
        if !is_for_group && (is_taken || is_for_device) {
            return;
        }
        if self.give_to_nics(frame, Origin::Nic(index)) {
            return;
        }
        match &self.uplink {
            Some(uplink) => _ = uplink.send(Segments { frame, segment: 0, udp: 0 }),
            None if forwarding::is_group(destination) => {}
            None => nic.count(Event::RxUnknown),
        }
    }
}

impl engine::Uplink for Switch {
    fn send(&self, segments: Segments<'_>) -> usize {
        if self.has_nics() {
            // The frame is taken apart in a copy, because the uplink may want it as a whole.
            let mut frame = segments.frame.to_vec();
            let (mut split, mut is_for_one) = (Split::new(&frame, segments.segment), false);
            while let Some(packet) = split.next(&mut frame) {
                is_for_one = self.give_to_nics(&frame[packet], Origin::Device);
            }
            if is_for_one {
                return 0;
            }
        }
        self.uplink.as_ref().map_or(0, |uplink| uplink.send(segments))
    }
}

/// What the thread waits for. Interfaces are named by their index.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Source {
    End,
    /// Something has come over the uplink.
    Uplink,
    /// The intake of the uplink may be the thread's again.
    Intake,
    /// Interfaces have come or gone.
    Changes,
    /// A VMM connects.
    Listener(usize),
    /// The connection of a VMM.
    Link(usize),
}

impl Source {
    fn token(self) -> u64 {
        match self {
            Self::End => 0,
            Self::Uplink => 1,
            Self::Intake => 2,
            Self::Changes => 3,
            Self::Listener(index) => 4 + 2 * index as u64,
            Self::Link(index) => 5 + 2 * index as u64,
        }
    }

    fn of(token: u64) -> Self {
        let index = usize::try_from(token / 2).unwrap_or(usize::MAX).wrapping_sub(2);
        match token {
            0 => Self::End,
            1 => Self::Uplink,
            2 => Self::Intake,
            3 => Self::Changes,
            even if even % 2 == 0 => Self::Listener(index),
            _ => Self::Link(index),
        }
    }
}

/// Returns what the kernel says when something happens to a source.
fn data(source: Source) -> epoll::EventData {
    epoll::EventData::new_u64(source.token())
}

/// What comes from an interface.
#[derive(Debug)]
struct Session {
    nic: Arc<Nic>,
    /// The connection, if there is one.
    incoming: Option<Incoming>,
    /// How many frames to groups the guest may send.
    floods: Allowance,
    /// Whether something may have come that was not taken.
    is_ready: bool,
    /// Whether a VMM may wait to be accepted.
    is_awaited: bool,
}

/// The state of the switch's thread.
///
/// An event says that something has changed (edge-triggered). So whoever is told of one keeps it in mind
/// until the kernel says that there is nothing more.
struct Turns<'a> {
    switch: &'a Switch,
    fabric: &'a Fabric,
    intake: Option<&'a Intake>,
    /// Whether this thread waits for what comes over the uplink: whether the intake was its own when it
    /// last looked.
    watches: bool,
    epoll: OwnedFd,
    /// What comes from each interface, by its index.
    sessions: Vec<Option<Session>>,
    /// Whether something may have come over the uplink that was not taken.
    is_uplink_ready: bool,
    /// When it looks after the uplink.
    look_at: Instant,
}

impl<'a> Turns<'a> {
    fn new(
        switch: &'a Switch,
        fabric: &'a Fabric,
        intake: Option<&'a Intake>,
        end: &UnixStream,
    ) -> Result<Self, Error> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, end, data(Source::End), edge)?;
        if let Some(intake) = intake {
            epoll::add(&epoll, intake.waker.as_fd(), data(Source::Intake), edge)?;
        }
        epoll::add(&epoll, switch.changes.as_fd(), data(Source::Changes), edge)?;
        let (watches, sessions, is_uplink_ready) = Default::default();
        let look_at = Instant::now() + LOOK;
        let mut this =
            Self { switch, fabric, intake, watches, epoll, sessions, is_uplink_ready, look_at };
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
            self.look_at_intake()?;
            if !self.wait()? {
                return Ok(());
            }
            if let Some(intake) = self.intake.filter(|_| self.is_uplink_ready) {
                self.is_uplink_ready = intake.turn() == Found::Part;
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
        let is_new = uplink.look_after();
        if let Some(intake) = self.intake.filter(|_| is_new && self.watches) {
            epoll::delete(&self.epoll, intake)?;
            self.watch(intake)?;
        }
        Ok(())
    }

    /// Returns how long the thread may sleep; `None`: for ever.
    fn rest(&self) -> Option<Timespec> {
        self.switch.uplink.as_ref()?;
        Timespec::try_from(self.look_at.saturating_duration_since(Instant::now())).ok()
    }

    /// Begins to wait for what comes over the uplink if the intake is this thread's again, or ends that.
    fn look_at_intake(&mut self) -> Result<(), Error> {
        let Some(intake) = self.intake.filter(|intake| intake.is_of_thread() != self.watches)
        else {
            return Ok(());
        };
        self.watches = !self.watches;
        if self.watches {
            self.watch(intake)?;
        } else {
            epoll::delete(&self.epoll, intake)?;
            self.is_uplink_ready = false;
        }
        Ok(())
    }

    /// Begins to wait for what comes over the uplink. What has come already is told of by an event.
    fn watch(&self, intake: &Intake) -> Result<(), Error> {
        let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
        Ok(epoll::add(&self.epoll, intake, data(Source::Uplink), edge)?)
    }

    /// Takes events, and waits for one if there is nothing to do. Returns `false` at the end.
    fn wait(&mut self) -> Result<bool, Error> {
        let is_busy = self.is_uplink_ready || self.sessions.iter().flatten().any(Session::has_work);
        let may_sleep = !is_busy
            && self.switch.changes.may_sleep()
            && self.intake.is_none_or(|intake| intake.waker.may_sleep());
        let rest = if may_sleep { self.rest() } else { Some(Timespec::default()) };
        let none = epoll::Event { flags: epoll::EventFlags::empty(), data: data(Source::End) };
        let mut events = [none; BURST];
        let count = match epoll::wait(&self.epoll, &mut events, rest.as_ref()) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(errno) => return Err(errno.into()),
        };
        if let Some(intake) = self.intake {
            intake.waker.take();
        }
        for event in &events[..count] {
            match Source::of(event.data.u64()) {
                Source::End => return Ok(false),
                Source::Uplink => self.is_uplink_ready = true,
                // The next round looks at it, or this one does below.
                Source::Intake | Source::Changes => {}
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
            match nic.socket.accept() {
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

impl Session {
    /// Begins to wait for a VMM.
    fn new(epoll: &OwnedFd, nic: Arc<Nic>, index: usize) -> Result<Self, Error> {
        let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(epoll, nic.socket.listener(), data(Source::Listener(index)), edge)?;
        let floods = Allowance::new(Instant::now());
        // What came before is told of by no event.
        Ok(Self { nic, incoming: None, floods, is_ready: false, is_awaited: true })
    }

    /// Ends all service, because the interface has gone.
    fn leave(self, epoll: &OwnedFd) {
        // This fails only if it was never added.
        let _ = epoll::delete(epoll, self.nic.socket.listener());
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
            Ended::Length(_) => nic.count(Event::BadLength),
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
