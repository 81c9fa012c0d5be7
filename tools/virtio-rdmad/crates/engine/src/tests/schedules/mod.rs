// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Random schedules: connections between hosts over a network that loses, repeats, delays, reorders, marks
//! and spoils packets, in virtual time. A reference judges what programs get. All of a schedule follows
//! from its number.
//!
//! The device is the one that ships. Some guests share a host, and reach each other by copies; a fifth of them
//! have virtqueues. Some guests lose their address for a while, and another guest may take it over: it gets
//! messages of its own connections alone. Connections are of RC or XRC, some with an SRQ, and some requests
//! have a wrong key, range, address or SRQ. A second run saves, forgets and loads all devices of a host at
//! random moments. Others freeze a device for up to five seconds.
//!
//! The variable `SCHEDULES` has the numbers of those that run: `7`, or `0..50000`. A single one tells each
//! packet, post and CQE.

pub(super) mod dice;
mod draw;
mod end;
mod freezes;
mod hosts;
mod model;
mod network;
mod objects;
mod plan;
mod receives;
mod request;
mod unreliable;
mod world;

use std::ops::Range;

use model::Verdict;
use plan::Plan;
use unreliable::Kind;
use world::World;

use crate::tests::driver::without_upgrades;

/// The schedules that run if nothing else is said.
const USUAL: Range<u64> = 0..1000;
/// The schedules with freezes that run if nothing else is said. Each of them copies and compares the memory of a guest.
const USUAL_FREEZES: Range<u64> = 0..150;

/// Returns the numbers of the schedules that run, by the variable, or those that do so usually.
fn chosen(usual: Range<u64>) -> Range<u64> {
    let Ok(text) = std::env::var("SCHEDULES") else { return usual };
    let number = |text: &str| text.parse().expect("SCHEDULES is a number, or two: 0..50000");
    match text.split_once("..") {
        Some((first, end)) => number(first)..number(end),
        None => number(&text)..number(&text) + 1,
    }
}

/// Says which schedule ran when a test panics.
struct Name(u64);

impl Drop for Name {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("schedule {0} fails: make schedules SCHEDULES={0}", self.0);
        }
    }
}

/// Runs the schedules that are chosen, each with a number and with whether it tells what happens.
fn each(run: impl Fn(u64, bool) -> Verdict) {
    each_of(USUAL, run);
}

/// Does the same as [`each`]. `usual` are the schedules that run if nothing else is said.
fn each_of(usual: Range<u64>, run: impl Fn(u64, bool) -> Verdict) {
    let schedules = chosen(usual);
    let tells = schedules.end - schedules.start == 1;
    for seed in schedules {
        let _name = Name(seed);
        if let Err(why) = run(seed, tells) {
            panic!("schedule {seed}: {why}");
        }
    }
}

#[test]
fn reliable_connections_keep_their_guarantees() {
    each(|seed, tells| {
        let plan = Plan::new(seed);
        if tells {
            println!("{plan:#?}");
        }
        World::new(seed, plan, tells).run()
    });
}

#[test]
fn freezes_of_guests_change_nothing_for_reliable_connections() {
    without_upgrades();
    each_of(USUAL_FREEZES, |seed, tells| {
        let plan = Plan::new(seed).with_freezes(seed);
        if tells {
            println!("{plan:#?}");
        }
        World::new(seed, plan, tells).run()
    });
}

#[test]
fn upgrades_between_freezes_change_nothing_for_reliable_connections() {
    without_upgrades();
    each_of(USUAL_FREEZES, |seed, tells| {
        World::new(seed, Plan::new(seed).with_freezes(seed), tells).with_upgrades(seed).run()
    });
}

#[test]
fn unreliable_connections_bring_whole_messages() {
    each(|seed, tells| unreliable::run(seed, Kind::default(), tells));
}

#[test]
fn datagrams_arrive_whole() {
    let kind = Kind { is_datagrams: true, ..Kind::default() };
    each(|seed, tells| unreliable::run(seed, kind, tells));
}

#[test]
fn upgrades_of_hosts_change_nothing_for_reliable_connections() {
    each(|seed, tells| World::new(seed, Plan::new(seed), tells).with_upgrades(seed).run());
}

#[test]
fn upgrades_of_hosts_change_nothing_for_unreliable_connections() {
    let kind = Kind { has_upgrades: true, ..Kind::default() };
    each(|seed, tells| unreliable::run(seed, kind, tells));
}

#[test]
fn upgrades_of_hosts_change_nothing_for_datagrams() {
    let kind = Kind { is_datagrams: true, has_upgrades: true, ..Kind::default() };
    each(|seed, tells| unreliable::run(seed, kind, tells));
}

#[test]
fn freezes_of_guests_spoil_nothing_of_unreliable_connections() {
    without_upgrades();
    let kind = Kind { has_freezes: true, ..Kind::default() };
    each_of(USUAL_FREEZES, |seed, tells| unreliable::run(seed, kind, tells));
}

#[test]
fn freezes_of_guests_spoil_no_datagrams() {
    without_upgrades();
    let kind = Kind { is_datagrams: true, has_freezes: true, ..Kind::default() };
    each_of(USUAL_FREEZES, |seed, tells| unreliable::run(seed, kind, tells));
}

#[test]
fn damaged_images_do_no_harm() {
    let (mut loaded, mut all) = (0, 0);
    // Each of them is loaded many times.
    for seed in chosen(USUAL).step_by(10) {
        let _name = Name(seed);
        let [ok, count] = World::new(seed, Plan::new(seed), false).damage(seed);
        (loaded, all) = (loaded + ok, all + count);
    }
    println!("{loaded} of {all} damaged images were loaded");
}
