// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What happens to the messages of guests that clients of the control socket trace.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use engine::{Observer, Seen};
use rustix::io::Errno;

use super::events::Queue;
use super::guests::Guests;

/// Most things that were seen and wait to be told. Others are counted.
const MAX_SEEN: usize = 1 << 14;

/// What a client traces.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Traced {
    /// The name of the guest.
    pub guest: String,
    /// The number of the QP; `None`: all QPs of the guest.
    pub qpn: Option<u32>,
}

impl Traced {
    /// Returns whether the client is told of a QP of a guest.
    pub fn covers(&self, guest: &str, qpn: u32) -> bool {
        self.guest == guest && self.qpn.is_none_or(|own| own == qpn)
    }
}

/// The QPs of a guest that are traced; `None`: all of them.
type Qpns = Option<BTreeSet<u32>>;

/// The observer of a guest.
struct GuestObserver {
    name: String,
    qpns: Qpns,
    seen: Arc<Queue<Seen>>,
}

impl Observer for GuestObserver {
    fn wants(&self, qpn: u32) -> bool {
        self.qpns.as_ref().is_none_or(|qpns| qpns.contains(&qpn))
    }

    fn observe(&self, seen: Seen) {
        self.seen.note(&self.name, seen);
    }
}

/// The observers of the guests that are traced.
pub struct Traces {
    guests: Arc<Guests>,
    /// What was seen.
    pub seen: Arc<Queue<Seen>>,
    /// The guests that have observers, and the QPs that are observed.
    observed: BTreeMap<String, Qpns>,
}

impl Traces {
    /// Makes a place for what is seen. No guest is observed yet.
    pub fn new(guests: Arc<Guests>) -> Result<Self, Errno> {
        let seen = Arc::new(Queue::with_room(MAX_SEEN)?);
        seen.set_watched(true);
        Ok(Self { guests, seen, observed: BTreeMap::new() })
    }

    /// Has what these clients trace observed, and nothing else.
    pub fn follow(&mut self, traced: &[Traced]) {
        let wanted = gather(traced);
        if wanted == self.observed {
            return;
        }
        for guest in self.guests.all() {
            let name = &guest.spec.name;
            let qpns = wanted.get(name);
            if qpns == self.observed.get(name) {
                continue;
            }
            let observer = qpns.map(|qpns| {
                let (name, seen) = (name.clone(), self.seen.clone());
                Arc::new(GuestObserver { name, qpns: qpns.clone(), seen }) as Arc<dyn Observer>
            });
            guest.device.set_observer(observer);
        }
        self.observed = wanted;
    }
}

/// Returns the QPs of each guest that some client traces.
fn gather(traced: &[Traced]) -> BTreeMap<String, Qpns> {
    let mut wanted: BTreeMap<String, Qpns> = BTreeMap::new();
    for Traced { guest, qpn } in traced {
        let qpns = wanted.entry(guest.clone()).or_insert_with(|| Some(BTreeSet::new()));
        match (qpns.as_mut(), qpn) {
            (Some(qpns), Some(qpn)) => {
                qpns.insert(*qpn);
            }
            _ => *qpns = None,
        }
    }
    wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_clients_trace_is_observed() {
        let traced = |guest: &str, qpn| Traced { guest: guest.to_owned(), qpn };
        let wanted = gather(&[
            traced("a", Some(5)),
            traced("b", Some(5)),
            traced("a", Some(7)),
            traced("b", None),
            traced("b", Some(6)),
        ]);
        let both = Some(BTreeSet::from([5, 7]));
        assert_eq!(wanted, BTreeMap::from([("a".to_owned(), both), ("b".to_owned(), None)]));
        assert!(traced("a", None).covers("a", 9) && !traced("a", Some(5)).covers("a", 9));
        assert!(!traced("a", None).covers("b", 9));
    }
}
