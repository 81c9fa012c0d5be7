// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Window and expectation of the two ends of a connection, over a network that loses, repeats, delays and
//! reorders packets as a seed says, with go-back-N and with selective acknowledgements. A model of a reliable
//! connection judges: each message has its effect once, in order, and completes once, in order.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

use crate::expected::{Expected, Verdict};
use crate::window::{Kind, Response, SendWindow};
use roce::{Psn, SackEth};

/// Random numbers that follow from a seed (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    fn within(&mut self, range: Range<u32>) -> u32 {
        range.start + (self.next() % u64::from(range.end - range.start)) as u32
    }
}

/// A message: its number, how many packets it takes, and whether it is a READ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Work {
    number: u32,
    packets: u32,
    is_read: bool,
}

/// A packet under way in the network.
#[derive(Clone, Copy, Debug)]
enum Packet {
    /// A packet of a message, which of them, or the request of a READ from there on.
    Request {
        psn: Psn,
        work: Work,
        index: u32,
        count: u32,
    },
    Response {
        psn: Psn,
        number: u32,
    },
    Ack {
        psn: Psn,
    },
    NakSequence {
        psn: Psn,
    },
    Selective {
        psn: Psn,
        sack: SackEth,
    },
}

/// The rates of faults, in thousandths.
#[derive(Clone, Copy)]
struct Faults {
    loss: u32,
    repeat: u32,
    delay: u32,
}

struct Simulation {
    random: Random,
    faults: Faults,
    time: u64,
    /// Packets by the time at which they arrive, and in the order of sending.
    network: BTreeMap<(u64, u64), Packet>,
    packets: u64,
    window: SendWindow<Work>,
    expected: Expected,
    /// Messages that had their effect at the responder, in order.
    effects: Vec<u32>,
    /// Packets of the message that is under way there.
    arrived: u32,
    /// Messages that completed at the requester, in order.
    completed: Vec<u32>,
    /// The time at which the requester sends again.
    deadline: u64,
    /// The time at which it sends again for the first time, if the peer knows selective acknowledgements.
    probe_at: u64,
    /// Requests that came too early, by their PSN: the message, which packet of it, and how many are asked for.
    held: BTreeMap<u32, (Work, u32, u32)>,
    /// Whether the window is saved and loaded at each step.
    has_upgrades: bool,
}

const TIMEOUT: u64 = 2000;

/// The time after which a requester that has heard nothing sends again, before the time for an answer is over.
const PROBE: u64 = 300;

impl Simulation {
    fn new(seed: u64, faults: Faults, is_selective: bool) -> Self {
        let mut random = Random(seed);
        // Many runs wrap around.
        let psn = Psn::new(0xff_fff0).plus(random.within(0..0x20));
        let mut window = SendWindow::new(psn);
        window.is_selective = is_selective;
        Self {
            random,
            faults,
            time: 0,
            network: BTreeMap::new(),
            packets: 0,
            window,
            expected: Expected::new(psn),
            effects: Vec::new(),
            arrived: 0,
            completed: Vec::new(),
            deadline: TIMEOUT,
            probe_at: if is_selective { PROBE } else { u64::MAX },
            held: BTreeMap::new(),
            has_upgrades: false,
        }
    }

    /// Saves the window and loads it again. How long answers take is not saved.
    fn upgrade(&mut self) {
        let now = Instant::now();
        let loaded = self.window.save(now).load(now, |work| Ok((work.packets, false))).unwrap();
        let before = std::mem::replace(&mut self.window, loaded);
        self.window.probe = before.probe;
    }

    fn happens(&mut self, thousandths: u32) -> bool {
        self.random.within(0..1000) < thousandths
    }

    fn send(&mut self, packet: Packet) {
        loop {
            if !self.happens(self.faults.loss) {
                let late = if self.happens(self.faults.delay) {
                    self.random.within(0..400).into()
                } else {
                    0
                };
                self.packets += 1;
                self.network.insert((self.time + 10 + late, self.packets), packet);
            }
            if !self.happens(self.faults.repeat) {
                break;
            }
        }
    }

    /// Sends what is due.
    fn pump(&mut self) {
        while let Some(due) = self.window.poll_transmit(4) {
            let (work, index, count) =
                (*self.window.message(&due).unwrap().0, due.index, due.count);
            let packet = Packet::Request { psn: due.psn, work, index, count };
            self.send(packet);
            self.window.transmitted();
        }
    }

    fn respond(&mut self, psn: Psn, work: Work, count: u32) {
        for offset in 0..count {
            self.send(Packet::Response { psn: psn.plus(offset), number: work.number });
        }
    }

    /// Holds a request that came too early. Returns `false` if it is too far ahead, or the peer has to go back.
    fn hold(&mut self, psn: Psn, work: Work, index: u32, count: u32) -> bool {
        let ahead = psn.distance_from(self.expected.psn).unsigned_abs();
        if !self.window.is_selective || ahead >= SackEth::PACKETS {
            return false;
        }
        self.held.insert(psn.get(), (work, index, count));
        true
    }

    /// Tells which requests are held.
    fn tell_what_is_held(&mut self) {
        let (psn, mut sack) = (self.expected.psn, SackEth::default());
        for held in self.held.keys() {
            sack.set(Psn::new(*held).distance_from(psn).unsigned_abs());
        }
        self.send(Packet::Selective { psn, sack });
    }

    /// Does a request that arrives, and those behind it that are held.
    fn at_responder(&mut self, psn: Psn, work: Work, index: u32, count: u32) {
        self.follow(psn, work, index, count);
        let mut was_held = false;
        while let Some((work, index, count)) = self.held.remove(&self.expected.psn.get()) {
            self.follow(self.expected.psn, work, index, count);
            was_held = true;
        }
        let expected = self.expected.psn;
        self.held.retain(|psn, _| !Psn::new(*psn).is_before(expected));
        if was_held && self.held.is_empty() {
            self.send(Packet::Ack { psn: expected.minus(1) });
        } else if was_held {
            self.tell_what_is_held();
        }
    }

    fn follow(&mut self, psn: Psn, work: Work, index: u32, count: u32) {
        match self.expected.judge(psn) {
            Verdict::Ahead { nak: true } if self.hold(psn, work, index, count) => {
                self.tell_what_is_held();
            }
            Verdict::Ahead { nak: true } => {
                self.expected.tell();
                self.send(Packet::NakSequence { psn: self.expected.psn });
            }
            Verdict::Ahead { nak: false } | Verdict::Beyond => {}
            Verdict::Duplicate if work.is_read => self.respond(psn, work, count),
            Verdict::Duplicate => self.send(Packet::Ack { psn: self.expected.psn.minus(1) }),
            Verdict::Next if work.is_read => {
                let all = (0, work.packets);
                assert_eq!((index, count), all, "the first request of a READ is for all of it");
                self.expected.done(work.packets, true);
                self.effects.push(work.number);
                self.respond(psn, work, count);
            }
            Verdict::Next => {
                assert_eq!(index, self.arrived, "packets of a message come in turn");
                let ends = index + 1 == work.packets;
                self.arrived = if ends { 0 } else { index + 1 };
                self.expected.done(1, ends);
                if ends {
                    self.effects.push(work.number);
                    self.send(Packet::Ack { psn });
                }
            }
        }
    }

    fn at_requester(&mut self, packet: Packet) {
        match packet {
            Packet::Ack { psn } => {
                self.window.handle_ack(psn);
            }
            Packet::NakSequence { psn } => {
                self.window.handle_ack(psn.minus(1));
                self.window.handle_nak();
            }
            Packet::Selective { psn, sack } => self.window.handle_sack(psn, sack),
            Packet::Response { psn, number } => {
                if let Response::Missing(work, _) = self.window.handle_response(psn, false) {
                    assert_eq!(work.number, number, "a response is for its own READ");
                    self.window.accept_response(psn);
                }
            }
            Packet::Request { .. } => unreachable!(),
        }
        if self.window.take_progress() {
            self.deadline = self.time + TIMEOUT;
            self.set_probe();
        }
        while let Some(work) = self.window.poll_completed() {
            assert!(
                self.effects.contains(&work.number),
                "{} completes before its effect",
                work.number
            );
            self.completed.push(work.number);
        }
    }

    fn set_probe(&mut self) {
        if self.window.is_selective {
            self.probe_at = self.time + PROBE;
        }
    }

    /// Sends again, as nothing has come for long.
    fn expire(&mut self) {
        self.time = self.deadline.min(self.probe_at);
        if self.probe_at < self.deadline {
            self.window.handle_probe_timeout();
            self.probe_at = u64::MAX;
        } else {
            self.window.go_back();
            self.deadline = self.time + TIMEOUT;
            self.set_probe();
        }
    }

    /// Does so many messages. Returns how many packets are in the network for that.
    fn run(&mut self, count: u32) -> u64 {
        let mut posted = 0;
        let mut steps = 0;
        while self.completed.len() < count as usize {
            steps += 1;
            assert!(
                steps < 60_000,
                "no end: {} done, {} in the network",
                self.completed.len(),
                self.network.len()
            );
            while posted < count && self.window.len() < 16 {
                let is_read = self.random.within(0..4) == 0;
                let packets = self.random.within(1..12);
                let is_fenced = self.random.within(0..8) == 0;
                let kind = Kind { has_response: is_read, is_fenced, takes_receive: false };
                self.window.push(Work { number: posted, packets, is_read }, packets, kind);
                posted += 1;
            }
            if self.has_upgrades {
                self.upgrade();
            }
            self.pump();
            let end = self.deadline.min(self.probe_at);
            let Some(next) = self.network.first_entry().filter(|next| next.key().0 <= end) else {
                self.expire();
                continue;
            };
            let ((time, _), packet) = next.remove_entry();
            self.time = self.time.max(time);
            match packet {
                Packet::Request { psn, work, index, count } => {
                    self.at_responder(psn, work, index, count);
                }
                packet => self.at_requester(packet),
            }
        }
        let all: Vec<u32> = (0..count).collect();
        assert_eq!(self.effects, all, "each message has its effect once, in order");
        assert_eq!(self.completed, all, "each message completes once, in order");
        assert_eq!(self.expected.psn.distance_from(self.window.next_psn()), 0);
        self.packets
    }
}

/// Runs simulations of so many seeds. Returns how many packets all of them need with go-back-N, and with selective
/// acknowledgements.
fn runs(faults: Faults, seeds: u64, count: u32) -> [u64; 2] {
    [false, true].map(|is_selective| {
        let run = |seed| {
            let mut simulation = Simulation::new(seed, faults, is_selective);
            let run = std::panic::catch_unwind(move || simulation.run(count));
            run.unwrap_or_else(|_| panic!("seed {seed}, selective: {is_selective}"))
        };
        (0..seeds).map(run).sum()
    })
}

#[test]
fn messages_arrive_once_without_faults() {
    let [go_back, selective] = runs(Faults { loss: 0, repeat: 0, delay: 0 }, 20, 200);
    assert_eq!(go_back, selective);
}

#[test]
fn messages_arrive_once_over_a_lossy_network() {
    for loss in [1, 10, 50, 200] {
        let [go_back, selective] = runs(Faults { loss, repeat: 0, delay: 0 }, 200, 60);
        println!("{loss} of 1000 lost: {go_back} packets with go-back-N, {selective} selectively");
        assert!(selective < go_back, "{loss} of 1000 lost: {go_back}, {selective}");
    }
}

#[test]
fn messages_arrive_once_over_a_network_that_repeats_and_reorders() {
    runs(Faults { loss: 0, repeat: 100, delay: 0 }, 300, 60);
    runs(Faults { loss: 0, repeat: 0, delay: 100 }, 300, 60);
    runs(Faults { loss: 50, repeat: 50, delay: 50 }, 1000, 60);
}

#[test]
fn a_window_that_is_saved_and_loaded_sends_the_same_packets() {
    let faults = Faults { loss: 50, repeat: 50, delay: 50 };
    for seed in 0..100 {
        for is_selective in [false, true] {
            let [without, with] = [false, true].map(|has_upgrades| {
                let mut simulation = Simulation::new(seed, faults, is_selective);
                simulation.has_upgrades = has_upgrades;
                (simulation.run(60), simulation.time)
            });
            assert_eq!(without, with, "seed {seed}, selective: {is_selective}");
        }
    }
}
