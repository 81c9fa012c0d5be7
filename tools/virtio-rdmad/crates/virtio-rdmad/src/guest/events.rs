// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The events of guests that clients of the control socket are told of when they watch.
//!
//! A queue holds the events that clients are yet to be told of. It has a bound, and a thread that adds an event does
//! not wait.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use engine::Incident;
use rustix::event::{eventfd, EventfdFlags};
use rustix::io::Errno;

/// Most events that wait to be told. Others are counted.
const MAX_WAITING: usize = 1024;

/// An event of a guest.
#[derive(Clone, Debug)]
pub enum Event {
    /// Its VMM has connected, and this worker serves it.
    Connected { worker: usize },
    /// Another worker than before, this one, serves it.
    Moved { worker: usize },
    /// Its VMM is connected no longer, for this reason.
    Disconnected { reason: String },
    /// Its driver has started the device.
    Started,
    /// Its driver has reset the device, or its VMM has.
    Reset,
    /// Something has happened to an object of it.
    Incident(Incident),
}

/// The events that clients are yet to be told of.
pub type Events = EventQueue<Event>;

/// A bounded queue of events that clients of the control socket are yet to be told of. Events are kept only while a
/// client watches.
#[derive(Debug)]
pub struct EventQueue<T> {
    is_watched: AtomicBool,
    waiting: Mutex<Waiting<T>>,
    /// Most events that wait.
    room: usize,
    /// Readable while events wait.
    ready: OwnedFd,
}

/// Events that wait to be told.
#[derive(Debug)]
pub struct Waiting<T> {
    /// The events, each with its time and the name of the guest.
    pub events: VecDeque<(SystemTime, String, T)>,
    /// The number of events that found no room.
    pub lost: u64,
}

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Self { events: VecDeque::new(), lost: 0 }
    }
}

impl Events {
    /// Makes a place for events, which no client watches yet.
    pub fn new() -> Result<Self, Errno> {
        Self::with_room(MAX_WAITING)
    }
}

impl<T> EventQueue<T> {
    /// Makes a place for so many events, which no client watches yet.
    pub fn with_room(room: usize) -> Result<Self, Errno> {
        let ready = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (is_watched, waiting) = (AtomicBool::new(false), Mutex::default());
        Ok(Self { is_watched, waiting, room, ready })
    }

    /// Notes whether a client watches.
    pub fn set_watched(&self, is_watched: bool) {
        self.is_watched.store(is_watched, Ordering::Relaxed);
    }

    /// Notes an event of the guest of this name. Any thread may call this; it does not wait.
    pub fn note(&self, guest: &str, event: T) {
        if !self.is_watched.load(Ordering::Relaxed) {
            return;
        }
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.events.len() >= self.room {
            waiting.lost += 1;
            return;
        }
        waiting.events.push_back((SystemTime::now(), guest.to_owned(), event));
        if waiting.events.len() == 1 {
            let _ = rustix::io::write(&self.ready, &1_u64.to_ne_bytes());
        }
    }

    /// Takes the events that wait.
    pub fn take(&self) -> Waiting<T> {
        let _ = rustix::io::read(&self.ready, &mut [0; 8]);
        std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<T> AsFd for EventQueue<T> {
    /// Returns a descriptor that is readable while events wait.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_wait_while_somebody_watches() {
        let events = Events::new().unwrap();
        events.note("g1", Event::Started);
        assert!(events.take().events.is_empty());
        events.set_watched(true);
        events.note("g1", Event::Started);
        events.note("g2", Event::Reset);
        let Waiting { events: taken, lost } = events.take();
        let taken: Vec<_> = taken.iter().map(|(_, guest, event)| (&**guest, event)).collect();
        assert!(matches!(taken[..], [("g1", Event::Started), ("g2", Event::Reset)]), "{taken:?}");
        assert_eq!((lost, events.take().events.len()), (0, 0));
    }

    #[test]
    fn events_that_find_no_room_are_counted() {
        let events = Events::new().unwrap();
        events.set_watched(true);
        for cqn in (0..).take(MAX_WAITING + 5) {
            events.note("g", Event::Incident(Incident::Cq { cqn }));
        }
        let Waiting { events: taken, lost } = events.take();
        assert_eq!((taken.len(), lost), (MAX_WAITING, 5));
        events.note("g", Event::Connected { worker: 0 });
        assert_eq!(events.take().events.len(), 1);
    }
}
