// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What an uplink counts.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};

/// Something that an uplink counts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Event {
    /// A frame was sent. A train that the kernel takes apart counts as one.
    TxFrames,
    /// A frame was sent to all remotes, because no remote is known to have its destination, or because
    /// that is a group.
    TxFlooded,
    /// A frame was not sent: the kernel did not take it.
    TxLost,
    /// A frame was not sent: it is longer than the underlay carries.
    TxTooLong,
    /// A frame came.
    RxFrames,
    /// A frame that came was lost: too many waited to be taken.
    RxLost,
    /// A frame that came was dropped: no guest has its destination.
    RxUnclaimed,
    /// A frame that came was dropped: its source is the MAC address of a guest of this process.
    RxOwnSource,
    /// A packet was dropped: its source is not a remote.
    RxStranger,
    /// A packet was dropped: it is no VXLAN packet.
    RxMalformed,
    /// A packet was dropped: it belongs to another network.
    RxOtherVni,
    /// A frame was dropped that met congestion in the tunnel, and whose sender does not react to marks.
    RxCongested,
    /// The kernel reported an error when packets were to be taken.
    RxError,
    /// The place of a station was not learnt: the table is full.
    TableFull,
    /// A frame came from the address of a group.
    RxGroupSource,
}

impl Event {
    /// All events, in the order of their numbers.
    const ALL: [Self; 15] = [
        Self::TxFrames,
        Self::TxFlooded,
        Self::TxLost,
        Self::TxTooLong,
        Self::RxFrames,
        Self::RxLost,
        Self::RxUnclaimed,
        Self::RxOwnSource,
        Self::RxStranger,
        Self::RxMalformed,
        Self::RxOtherVni,
        Self::RxCongested,
        Self::RxError,
        Self::TableFull,
        Self::RxGroupSource,
    ];

    /// Returns the name in reports.
    fn name(self) -> &'static str {
        match self {
            Self::TxFrames => "tx_frames",
            Self::TxFlooded => "tx_flooded",
            Self::TxLost => "tx_lost",
            Self::TxTooLong => "tx_too_long",
            Self::RxFrames => "rx_frames",
            Self::RxLost => "rx_lost",
            Self::RxUnclaimed => "rx_unclaimed",
            Self::RxOwnSource => "rx_own_source",
            Self::RxStranger => "rx_stranger",
            Self::RxMalformed => "rx_malformed",
            Self::RxOtherVni => "rx_other_vni",
            Self::RxCongested => "rx_congested",
            Self::RxError => "rx_error",
            Self::TableFull => "table_full",
            Self::RxGroupSource => "rx_group_source",
        }
    }
}

/// The counters of an uplink. Any thread may use them.
#[derive(Debug)]
pub struct Counters {
    /// The uplink, for logs.
    uplink: String,
    values: [AtomicU64; Event::ALL.len()],
}

impl Counters {
    /// Returns the counters of an uplink, all zero.
    pub fn new(uplink: &str) -> Self {
        let values = std::array::from_fn(|_| AtomicU64::new(0));
        Self { uplink: uplink.to_owned(), values }
    }

    /// Returns the name of the uplink, for logs.
    pub fn uplink(&self) -> &str {
        &self.uplink
    }

    /// Counts an event. Returns whether it is the first of its kind.
    pub fn count(&self, event: Event) -> bool {
        self.values[event as usize].fetch_add(1, Ordering::Relaxed) == 0
    }

    /// Counts events that nobody was told of.
    pub fn add(&self, event: Event, count: u64) {
        self.values[event as usize].fetch_add(count, Ordering::Relaxed);
    }

    /// Counts an event that somebody should know of, and logs the first of its kind.
    pub fn report(&self, event: Event, detail: impl Display) {
        if self.count(event) {
            let (uplink, kind) = (&self.uplink, event.name());
            tracing::warn!(uplink, kind, "{detail} (further ones are only counted)");
        }
    }

    /// Returns the counters by name.
    pub fn read(&self) -> BTreeMap<String, u64> {
        let value = |event: Event| self.values[event as usize].load(Ordering::Relaxed);
        Event::ALL.into_iter().map(|event| (event.name().to_owned(), value(event))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_event_has_a_counter_of_its_own() {
        let counters = Counters::new("tap t");
        for (index, event) in Event::ALL.into_iter().enumerate() {
            assert_eq!(event as usize, index);
            assert!(counters.count(event));
        }
        counters.report(Event::TxLost, "again");
        counters.add(Event::RxLost, 7);
        let values = counters.read();
        assert_eq!(values.len(), Event::ALL.len());
        assert_eq!([values["tx_lost"], values["rx_frames"], values["rx_lost"]], [2, 1, 8]);
    }
}
