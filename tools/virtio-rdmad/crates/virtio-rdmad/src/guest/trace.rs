// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Observers of the guests whose messages clients of the control socket trace, or whose frames they capture.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use engine::{Observation, Observer, Seen};
use rustix::io::Errno;

use super::events::EventQueue;
use super::guests::Guests;

/// Most things that were seen and wait to be told. Others are counted. A frame has 4 KiB at most, and some headers.
const MAX_SEEN: usize = 1 << 13;

/// The QPs that a client traces.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Traced {
    /// The name of the guest.
    pub guest: String,
    /// The number of the QP; `None`: all QPs of the guest.
    pub qpn: Option<u32>,
    /// The number of bytes that it wants of each frame, 0 for whole frames. `None`: it wants to know what happens, and
    /// wants no frames.
    pub snaplen: Option<u32>,
}

impl Traced {
    /// Returns whether the client is told of an event that was seen in a guest.
    pub fn covers(&self, guest: &str, seen: &Seen) -> bool {
        let is_frame = matches!(seen.what, Observation::Frame { .. });
        self.guest == guest
            && self.qpn.is_none_or(|own| own == seen.qpn)
            && self.snaplen.is_some() == is_frame
    }
}

/// QPs of a guest.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
struct Qpns {
    /// Whether they are all.
    all: bool,
    some: BTreeSet<u32>,
}

impl Qpns {
    fn has(&self, qpn: u32) -> bool {
        self.all || self.some.contains(&qpn)
    }

    /// Adds a QP, or all.
    fn add(&mut self, qpn: Option<u32>) {
        match qpn {
            Some(qpn) => {
                self.some.insert(qpn);
            }
            None => self.all = true,
        }
    }
}

/// The QPs of a guest that clients trace.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
struct Wanted {
    /// The QPs that are traced.
    traced: Qpns,
    /// The QPs whose frames are captured.
    captured: Qpns,
}

/// The observer of a guest.
struct GuestObserver {
    name: String,
    wanted: Wanted,
    seen: Arc<EventQueue<Seen>>,
}

impl Observer for GuestObserver {
    fn wants(&self, qpn: u32) -> bool {
        self.wanted.traced.has(qpn) || self.wanted.captured.has(qpn)
    }

    fn wants_frames(&self, qpn: u32) -> bool {
        self.wanted.captured.has(qpn)
    }

    fn observe(&self, seen: Seen) {
        // If only frames of a QP are captured, no client waits for its other events.
        if matches!(seen.what, Observation::Frame { .. }) || self.wanted.traced.has(seen.qpn) {
            self.seen.note(&self.name, seen);
        }
    }
}

/// The observers of the guests that are traced.
pub struct Traces {
    guests: Arc<Guests>,
    /// The events that were seen, and that clients are yet to be told of.
    pub seen: Arc<EventQueue<Seen>>,
    /// The guests that have observers, and their QPs that are observed.
    observed: BTreeMap<String, Wanted>,
}

impl Traces {
    /// Makes this without observers: no guest is traced yet.
    pub fn new(guests: Arc<Guests>) -> Result<Self, Errno> {
        let seen = Arc::new(EventQueue::with_room(MAX_SEEN)?);
        seen.set_watched(true);
        Ok(Self { guests, seen, observed: BTreeMap::new() })
    }

    /// Observes the QPs that these clients trace, and no others.
    pub fn follow(&mut self, traced: &[Traced]) {
        let wanted = gather(traced);
        if wanted == self.observed {
            return;
        }
        for guest in self.guests.all() {
            let name = &guest.spec.name;
            let own = wanted.get(name);
            if own == self.observed.get(name) {
                continue;
            }
            let observer = own.map(|wanted| {
                let (name, seen) = (name.clone(), self.seen.clone());
                Arc::new(GuestObserver { name, wanted: wanted.clone(), seen }) as Arc<dyn Observer>
            });
            guest.device.set_observer(observer);
        }
        self.observed = wanted;
    }
}

/// Returns the QPs of each guest that clients trace.
fn gather(traced: &[Traced]) -> BTreeMap<String, Wanted> {
    let mut all: BTreeMap<String, Wanted> = BTreeMap::new();
    for Traced { guest, qpn, snaplen } in traced {
        let wanted = all.entry(guest.clone()).or_default();
        let qpns = if snaplen.is_some() { &mut wanted.captured } else { &mut wanted.traced };
        qpns.add(*qpn);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traced(guest: &str, qpn: Option<u32>, snaplen: Option<u32>) -> Traced {
        Traced { guest: guest.to_owned(), qpn, snaplen }
    }

    #[test]
    fn what_clients_want_is_observed() {
        let wanted = gather(&[
            traced("a", Some(5), None),
            traced("b", Some(5), Some(0)),
            traced("a", Some(7), None),
            traced("b", None, Some(64)),
        ]);
        let has = |name: &str, qpn| {
            let Wanted { traced, captured } = &wanted[name];
            (traced.has(qpn), captured.has(qpn))
        };
        assert_eq!(wanted.len(), 2);
        assert_eq!([5, 6, 7].map(|qpn| has("a", qpn)), [5, 6, 7].map(|qpn| (qpn != 6, false)));
        assert_eq!([5, 6].map(|qpn| has("b", qpn)), [(false, true); 2]);
    }

    #[test]
    fn clients_are_told_of_what_they_want() {
        let what = Observation::Nak { reason: "RNR" };
        let seen = Seen { qpn: 9, psn: None, what };
        let frame = Observation::Frame { leaves: true, frame: Vec::new() };
        let frame = Seen { qpn: 9, psn: None, what: frame };
        assert!(traced("a", None, None).covers("a", &seen));
        assert!(traced("a", Some(9), Some(0)).covers("a", &frame));
        assert!(!traced("a", Some(8), None).covers("a", &seen));
        assert!(!traced("b", None, None).covers("a", &seen));
        assert!(!traced("a", None, None).covers("a", &frame));
        assert!(!traced("a", None, Some(0)).covers("a", &seen));
    }
}
