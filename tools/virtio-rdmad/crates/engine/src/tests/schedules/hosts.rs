// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Hosts with guests, and the network between them, in virtual time.

use std::sync::Arc;
use std::time::Duration;

use roce::Segments;

use super::dice::Dice;
use super::network::{nanos, Links, Network, Port};
use super::plan::GuestPlan;
use crate::tests::driver::*;
use crate::{Clock, Counter, Fabric, FabricConfig, Limits, Uplink};

pub struct Hosts {
    clock: Arc<TestClock>,
    pub network: Arc<Network>,
    fabrics: Vec<Arc<Fabric>>,
    /// The guests. Their addresses end with the numbers of these, counted from 1.
    pub guests: Vec<Guest>,
    /// The address of the first unused byte of memory of each guest.
    free: Vec<u64>,
    /// The host of each guest.
    places: Vec<usize>,
    /// The dice by which hosts are upgraded; `None` if they are not upgraded.
    upgrades: Option<Dice>,
    tells: bool,
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
    let sizes = Sizes {
        memory: DATA + MEMORY,
        depth: 32,
        stride: 256,
        sges: 8,
        inline: 64,
        region_len: 0x5000,
        region_count: 24,
        ..Sizes::default()
    };
    Setup { limits, adds_gid: false, sizes, ..Setup::default() }
}

/// A way out on which all is lost.
struct Nowhere;

impl Uplink for Nowhere {
    fn send(&self, _: Segments<'_>) -> usize {
        1
    }
}

/// Returns an image with some bytes changed, and the checksum that belongs to them.
fn damage(image: &[u8], dice: &mut Dice) -> Vec<u8> {
    const CRC: usize = 20;
    let (header, payload) = image.split_at(CRC + 4);
    let (mut header, mut payload) = (header.to_vec(), payload.to_vec());
    for _ in 0..=dice.below(3) {
        let at = dice.below(payload.len() as u64) as usize;
        match dice.below(4) {
            0 => payload[at] ^= 1 << dice.below(8),
            1 => payload[at] = payload[at].wrapping_add(1),
            2 => payload[at] = dice.below(128) as u8,
            _ => {
                let from = dice.below(payload.len() as u64) as usize;
                payload[at] = payload[from];
            }
        }
    }
    let mut crc = crc32fast::Hasher::new();
    crc.update(&header[..CRC]);
    crc.update(&payload);
    header[CRC..].copy_from_slice(&crc.finalize().to_le_bytes());
    [header, payload].concat()
}

/// Returns the network of a host.
fn fabric(clock: &Arc<TestClock>, network: &Arc<Network>, host: usize) -> Arc<Fabric> {
    let uplink = Arc::new(Port { network: Arc::clone(network), host });
    let clock = Arc::clone(clock) as Arc<dyn Clock>;
    let (name, random) = ("test".into(), || 0);
    Fabric::new(FabricConfig { name, clock, uplink: Some(uplink), random, helpers: None })
}

impl Hosts {
    /// Makes these guests, and their hosts.
    pub fn new(seed: u64, plans: &[GuestPlan], links: &Links, tells: bool) -> Self {
        let clock = TestClock::new();
        let network = Network::new(&clock, links, seed ^ 0x6e65_7477, tells);
        let fabrics: Vec<_> = (0..=plans.iter().map(|plan| plan.host).max().unwrap_or(0))
            .map(|host| fabric(&clock, &network, host))
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
        let places = plans.iter().map(|plan| plan.host).collect();
        Self { clock, network, fabrics, guests, free, places, upgrades: None, tells }
    }

    /// Upgrades the hosts at random times, from now on.
    pub fn upgrade(&mut self, seed: u64) {
        self.upgrades = Some(Dice::new(seed ^ 0x7570_6772));
    }

    /// Upgrades a host now and then, which may be in the middle of what its guests do. A freeze is not a part of an
    /// image, so a host with a guest that is frozen stays.
    fn upgrade_some(&mut self) {
        let Some(dice) = &mut self.upgrades else { return };
        if !dice.happens(300) {
            return;
        }
        let host = dice.pick(&self.places);
        let mut guests = self.guests.iter().zip(&self.places);
        if guests.any(|(guest, place)| *place == host && guest.device.is_frozen()) {
            return;
        }
        let here = |(_, place): &(&mut Guest, &usize)| **place == host;
        let guests = self.guests.iter_mut().zip(&self.places).filter(here);
        let mut guests: Vec<_> = guests.map(|(guest, _)| guest).collect();
        for _ in 0..dice.below(8) {
            let guest = &guests[dice.below(guests.len() as u64) as usize];
            guest.device.run(1 + dice.below(2) as u32);
        }
        if self.tells {
            println!("{} host {host} is upgraded", nanos(self.clock.passed()));
        }
        self.fabrics[host] = fabric(&self.clock, &self.network, host);
        reload(&mut guests, &self.fabrics[host]);
    }

    /// Runs devices of some guests, for a part of their work.
    pub fn run_some(&self, dice: &mut Dice) {
        for _ in 0..dice.below(8) {
            let guest = &self.guests[dice.below(self.guests.len() as u64) as usize];
            guest.device.run(1 + dice.below(2) as u32);
        }
    }

    /// Loads images of the guests into devices, with some bytes changed, and runs those that are not refused. None of
    /// this may panic, or take long. The guests' memory is of no use afterwards.
    pub fn load_damaged(&self, dice: &mut Dice) -> [usize; 2] {
        let mut counts = [0; 2];
        let images: Vec<_> = self.guests.iter().map(|guest| guest.device.save()).collect();
        for _ in 0..20 {
            let clock = Arc::clone(&self.clock) as Arc<dyn Clock>;
            // An address may be one that the network of the schedule does not have.
            let uplink = Some(Arc::new(Nowhere) as Arc<dyn Uplink>);
            let (name, random) = ("test".into(), || 0);
            let fabric = Fabric::new(FabricConfig { name, clock, uplink, random, helpers: None });
            let load = |(guest, image): (&Guest, &Vec<u8>)| {
                let device = fabric.add_device(guest.config());
                guest.load(&device, &damage(image, dice)).map(|()| device)
            };
            let loaded: Vec<_> = self.guests.iter().zip(&images).map(load).collect();
            counts[0] += loaded.iter().filter(|loaded| loaded.is_ok()).count();
            counts[1] += loaded.len();
            for _ in 0..100 {
                for device in loaded.iter().flatten() {
                    let before = device.counter(Counter::Work);
                    device.run(64);
                    let took = device.counter(Counter::Work).wrapping_sub(before);
                    assert!(took <= TURN, "a turn of {took} ns");
                }
                self.clock.advance_to(self.clock.now() + Duration::from_millis(1));
                for frame in self.network.arrivals() {
                    fabric.receive(&frame.bytes, frame.segment);
                }
            }
            loaded.iter().flatten().for_each(|device| drop(device.save()));
        }
        counts
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
    pub fn settle(&mut self) -> Option<u64> {
        self.upgrade_some();
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
