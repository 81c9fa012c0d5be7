// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Hosts with guests, and the network between them, in virtual time.

use std::sync::Arc;
use std::time::Duration;

use super::network::{nanos, Links, Network, Port};
use super::plan::GuestPlan;
use crate::tests::driver::*;
use crate::{Clock, Fabric, FabricConfig, Limits};

pub struct Hosts {
    clock: Arc<TestClock>,
    pub network: Arc<Network>,
    fabrics: Vec<Arc<Fabric>>,
    /// The guests. Their addresses end with the numbers of these, counted from 1.
    pub guests: Vec<Guest>,
    /// Where memory begins that is not used, for each guest.
    free: Vec<u64>,
}

/// The bytes of memory that a guest has for its data.
const MEMORY: u64 = 4 << 20;

fn setup() -> Setup {
    let limits = Limits {
        max_qp: 12,
        max_cq: 12,
        ring_qp: 12,
        ring_wr: 32,
        max_srq: 4,
        max_pd: 8,
        max_rd_atomic: 16,
        ..limits()
    };
    Setup {
        limits,
        adds_gid: false,
        memory: DATA + MEMORY,
        depth: 32,
        stride: 256,
        sges: 8,
        inline: 64,
        region_len: 0x5000,
        region_count: 24,
        ..Setup::default()
    }
}

impl Hosts {
    /// Makes these guests, and their hosts.
    pub fn new(seed: u64, plans: &[GuestPlan], links: &Links, tells: bool) -> Self {
        let clock = TestClock::new();
        let network = Network::new(&clock, links, seed ^ 0x6e65_7477, tells);
        let fabrics: Vec<_> = (0..=plans.iter().map(|plan| plan.host).max().unwrap_or(0))
            .map(|host| {
                let uplink = Arc::new(Port { network: Arc::clone(&network), host });
                let clock = Arc::clone(&clock) as Arc<dyn Clock>;
                Fabric::new(FabricConfig { name: "test".into(), clock, uplink: Some(uplink) })
            })
            .collect();
        let mut guests = Vec::new();
        for (number, plan) in (1..).zip(plans) {
            let (fabric, setup) = (&fabrics[plan.host], setup());
            let make = || Guest::with_setup(fabric, &clock, number, Arc::new(NoWake), setup);
            let mut guest = if plan.has_rings { with_rings(make) } else { make() };
            guest.gid = gid(plan.address as u8 + 1);
            if plan.is_there_first() {
                guest.add_gid(0, guest.gid, 0).unwrap();
            }
            guests.push(guest);
        }
        let free = vec![DATA; plans.len()];
        Self { clock, network, fabrics, guests, free }
    }

    /// Returns the address of so many bytes of a guest's memory that nothing uses.
    pub fn allocate(&mut self, guest: usize, len: u64) -> u64 {
        let at = self.free[guest];
        self.free[guest] += len;
        at
    }

    /// Returns the time in nanoseconds.
    pub fn now(&self) -> u64 {
        nanos(self.clock.passed())
    }

    /// Runs all guests until they have nothing to do now. Returns when they have.
    pub fn settle(&self) -> Option<u64> {
        let time = settle(&self.guests.iter().collect::<Vec<_>>())?;
        let left = time.saturating_duration_since(self.clock.now());
        Some(self.now() + nanos(left).max(1))
    }

    /// Moves to the first of these times, or to the one at which the next frames arrive, and brings these.
    /// Returns `false` if nothing is to come.
    pub fn pass(&self, times: impl Iterator<Item = u64>) -> bool {
        let now = self.now();
        let next = times.chain(self.network.next()).filter(|time| *time > now).min();
        let Some(next) = next else { return false };
        self.clock.advance_to(self.clock.now() + Duration::from_nanos(next - now));
        for frame in self.network.arrivals() {
            for (host, fabric) in self.fabrics.iter().enumerate() {
                if host != frame.from {
                    fabric.receive(&frame.bytes, frame.segment);
                }
            }
        }
        true
    }
}
