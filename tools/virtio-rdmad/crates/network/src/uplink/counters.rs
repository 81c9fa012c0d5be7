// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The counters of an uplink.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};

engine::counted! {
    /// Something that an uplink counts.
    pub enum UplinkCounter {
        /// A frame was sent. A train that the kernel takes apart counts as one.
        TxFrames = "tx_frames",
        /// A frame was sent to all remotes, because no remote is known to have its destination, or because
        /// that is a group.
        TxFlooded = "tx_flooded",
        /// A frame was not sent: the kernel did not take it.
        TxLost = "tx_lost",
        /// A frame was not sent: it is longer than the underlay carries.
        TxTooLong = "tx_too_long",
        /// A frame came.
        RxFrames = "rx_frames",
        /// A frame that came was lost: too many waited to be taken.
        RxLost = "rx_lost",
        /// A frame that came was dropped: no guest has its destination.
        RxUnclaimed = "rx_unclaimed",
        /// A frame that came was dropped: its source is the MAC address of a guest of this process.
        RxOwnSource = "rx_own_source",
        /// A packet was dropped: its source is not a remote.
        RxStranger = "rx_stranger",
        /// A packet was dropped: it is no VXLAN packet.
        RxMalformed = "rx_malformed",
        /// A packet was dropped: it belongs to another network.
        RxOtherVni = "rx_other_vni",
        /// A frame was dropped that met congestion in the tunnel, and whose sender does not react to marks.
        RxCongested = "rx_congested",
        /// The kernel reported an error when packets were to be taken.
        RxError = "rx_error",
        /// The place of a station was not learnt: the table is full.
        TableFull = "table_full",
        /// A frame came from the address of a group.
        RxGroupSource = "rx_group_source",
    }
}

/// The counters of an uplink. Any thread may use them.
#[derive(Debug)]
pub struct Counters {
    /// The uplink, for logs.
    uplink: String,
    values: [AtomicU64; UplinkCounter::COUNT],
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
    pub fn count(&self, event: UplinkCounter) -> bool {
        self.values[event as usize].fetch_add(1, Ordering::Relaxed) == 0
    }

    /// Counts events that nobody was told of.
    pub fn add(&self, event: UplinkCounter, count: u64) {
        self.values[event as usize].fetch_add(count, Ordering::Relaxed);
    }

    /// Counts an event that somebody should know of, and logs the first of its kind.
    pub fn report(&self, event: UplinkCounter, detail: impl Display) {
        if self.count(event) {
            let (uplink, kind) = (&self.uplink, event.name());
            tracing::warn!(uplink, kind, "{detail} (further ones are only counted)");
        }
    }

    /// Returns the counters by name.
    pub fn read(&self) -> BTreeMap<String, u64> {
        let value = |event: UplinkCounter| self.values[event as usize].load(Ordering::Relaxed);
        UplinkCounter::ALL.iter().map(|event| (event.name().to_owned(), value(*event))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_event_has_a_counter_of_its_own() {
        let counters = Counters::new("tap t");
        for (index, event) in UplinkCounter::ALL.iter().enumerate() {
            assert_eq!(*event as usize, index);
            assert!(counters.count(*event));
        }
        counters.report(UplinkCounter::TxLost, "again");
        counters.add(UplinkCounter::RxLost, 7);
        let values = counters.read();
        assert_eq!(values.len(), UplinkCounter::ALL.len());
        assert_eq!([values["tx_lost"], values["rx_frames"], values["rx_lost"]], [2, 1, 8]);
    }
}
