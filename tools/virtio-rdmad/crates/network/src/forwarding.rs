// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The forwarding of Ethernet frames by MAC address, as bridges do it (IEEE 802.1Q, 8.7 and 8.8): which
//! port leads to which address.
//!
//! A table learns from the source address of each frame that comes. It forgets an address that sends
//! nothing for the ageing time. It has a bound, because whoever sends frames chooses their addresses.
//! [`stream`] is how frames stand in a stream. The module does no I/O.

pub mod stream;

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// A MAC address.
pub type Mac = [u8; 6];

/// The ageing time that IEEE 802.1Q recommends (table 8-6).
pub const AGEING_TIME: Duration = Duration::from_secs(300);

/// The time between two searches for old entries in a table that is full.
const SWEEP_PERIOD: Duration = Duration::from_secs(1);

/// Returns whether a frame to this address is for several stations: for a group, or for all.
pub fn is_group(mac: Mac) -> bool {
    mac[0] & 1 != 0
}

/// Returns the destination and the source address of a frame, if it has both.
pub fn addresses(frame: &[u8]) -> Option<(Mac, Mac)> {
    let (destination, rest) = frame.split_first_chunk()?;
    let (source, _) = rest.split_first_chunk()?;
    Some((*destination, *source))
}

/// The result of learning from a frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Learnt {
    /// The address is behind this port now.
    Yes,
    /// Nothing was learnt, because the table is full.
    Full,
    /// Nothing was learnt, because the address is that of a group, which no station sends from.
    Group,
}

/// An address that was learnt.
#[derive(Clone, Copy, Debug)]
struct Entry<P> {
    port: P,
    /// The time at which the last frame came from the address.
    seen: Instant,
}

/// The table of addresses and the ports, of type `P`, that lead to them.
#[derive(Debug)]
pub struct Table<P> {
    entries: HashMap<Mac, Entry<P>>,
    most: usize,
    ageing_time: Duration,
    /// The time of the last search for old entries.
    swept: Option<Instant>,
}

impl<P: Copy> Table<P> {
    /// Makes an empty table for up to `most` addresses.
    pub fn new(most: usize, ageing_time: Duration) -> Self {
        Self { entries: HashMap::new(), most, ageing_time, swept: None }
    }

    /// Learns that a frame came from `mac` over `port`. An address that was behind another port has moved.
    pub fn learn(&mut self, mac: Mac, port: P, now: Instant) -> Learnt {
        if is_group(mac) {
            return Learnt::Group;
        }
        let entry = Entry { port, seen: now };
        if let Some(known) = self.entries.get_mut(&mac) {
            *known = entry;
            return Learnt::Yes;
        }
        if self.entries.len() >= self.most && !self.sweep(now) {
            return Learnt::Full;
        }
        self.entries.insert(mac, entry);
        Learnt::Yes
    }

    /// Returns the port that leads to `mac`; `None` if it is not known, or if it was not heard of for the
    /// ageing time.
    pub fn find(&self, mac: Mac, now: Instant) -> Option<P> {
        self.entries.get(&mac).filter(|entry| !self.is_old(entry, now)).map(|entry| entry.port)
    }

    /// Returns how many addresses the table holds, those that nobody heard of for the ageing time among
    /// them.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether the table holds no address.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn is_old(&self, entry: &Entry<P>, now: Instant) -> bool {
        now.saturating_duration_since(entry.seen) >= self.ageing_time
    }

    /// Removes old entries, at most once in each period: a table that is full costs little. Returns
    /// whether there is room.
    fn sweep(&mut self, now: Instant) -> bool {
        let is_due = |swept| now.saturating_duration_since(swept) >= SWEEP_PERIOD;
        if self.swept.is_none_or(is_due) {
            self.swept = Some(now);
            let mut entries = std::mem::take(&mut self.entries);
            entries.retain(|_, entry| !self.is_old(entry, now));
            self.entries = entries;
        }
        self.entries.len() < self.most
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const AGE: Duration = Duration::from_secs(10);

    fn mac(last: u8) -> Mac {
        [0x52, 0x54, 0, 0, 0, last]
    }

    #[test]
    fn addresses_of_frames() {
        let frame: Vec<u8> = (0..20).collect();
        assert_eq!(addresses(&frame), Some(([0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11])));
        assert_eq!(addresses(&frame[..11]), None);
        assert!(is_group([0xff; 6]) && is_group([0x33, 0x33, 0, 0, 0, 1]));
        assert!(!is_group(mac(1)));
    }

    #[test]
    fn an_address_is_found_until_it_is_old() {
        let (mut table, start) = (Table::new(2, AGE), Instant::now());
        assert_eq!(table.find(mac(1), start), None);
        assert_eq!(table.learn(mac(1), 'a', start), Learnt::Yes);
        assert_eq!(table.find(mac(1), start + AGE / 2), Some('a'));
        assert_eq!(table.find(mac(1), start + AGE), None);
        // A frame renews it, and may move it.
        assert_eq!(table.learn(mac(1), 'b', start + AGE / 2), Learnt::Yes);
        assert_eq!(table.find(mac(1), start + AGE), Some('b'));
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn a_full_table_learns_nothing_until_something_is_old() {
        let (mut table, start) = (Table::new(2, AGE), Instant::now());
        assert_eq!(table.learn(mac(1), 'a', start), Learnt::Yes);
        assert_eq!(table.learn(mac(2), 'a', start + AGE / 2), Learnt::Yes);
        assert_eq!(table.learn(mac(3), 'a', start + AGE / 2), Learnt::Full);
        assert_eq!(table.find(mac(3), start + AGE / 2), None);
        // An address that is known still moves.
        assert_eq!(table.learn(mac(2), 'b', start + AGE / 2), Learnt::Yes);
        assert_eq!(table.learn(mac(3), 'c', start + AGE), Learnt::Yes);
        assert_eq!(table.find(mac(3), start + AGE), Some('c'));
        assert_eq!(table.find(mac(2), start + AGE), Some('b'));
        assert_eq!(table.len(), 2);
    }

    #[test]
    fn a_full_table_is_searched_once_in_a_period() {
        let (mut table, start) = (Table::new(1, AGE), Instant::now());
        let just_before = start + AGE * 19 / 20;
        table.learn(mac(1), 'a', start);
        assert_eq!(table.learn(mac(2), 'a', just_before), Learnt::Full);
        assert_eq!(table.learn(mac(2), 'a', start + AGE), Learnt::Full);
        assert_eq!(table.learn(mac(2), 'a', just_before + SWEEP_PERIOD), Learnt::Yes);
    }

    #[test]
    fn no_station_sends_from_a_group() {
        let (mut table, now) = (Table::new(2, AGE), Instant::now());
        assert_eq!(table.learn([0xff; 6], 'a', now), Learnt::Group);
        assert!(table.is_empty());
    }

    proptest! {
        /// A table without a bound finds the same, as long as the bound refuses nothing.
        #[test]
        fn it_agrees_with_a_simple_model(
            frames in prop::collection::vec((0_u8..8, 0_u8..3, 0_u64..4), 0..200),
            most in 1_usize..10,
        ) {
            let (mut table, mut now) = (Table::new(most, AGE), Instant::now());
            let mut model: BTreeMap<u8, (u8, Instant)> = BTreeMap::new();
            for (address, port, seconds) in frames {
                now += Duration::from_secs(seconds);
                if table.learn(mac(address), port, now) == Learnt::Yes {
                    model.insert(address, (port, now));
                } else {
                    prop_assert!(table.len() == most);
                }
                prop_assert!(table.len() <= most);
                for address in 0..8 {
                    let expected = model.get(&address).filter(|(_, seen)| now - *seen < AGE);
                    prop_assert_eq!(table.find(mac(address), now), expected.map(|(port, _)| *port));
                }
            }
        }
    }
}
