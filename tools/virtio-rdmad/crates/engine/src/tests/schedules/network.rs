// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A network between hosts that loses, repeats, delays, reorders, marks and spoils frames in virtual time,
//! as a seed says.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use roce::{Segments, Split};

use super::dice::Dice;
use crate::tests::cable::mark;
use crate::tests::driver::TestClock;
use crate::Uplink;

/// The faults of a link: rates in thousandths, and times in nanoseconds.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// A frame is lost.
    pub loss: u64,
    /// A frame comes twice.
    pub repeat: u64,
    /// A frame is late, and so comes behind others.
    pub delay: u64,
    /// A bit of a frame is another.
    pub corrupt: u64,
    /// A frame comes marked, as one that met congestion.
    pub mark: u64,
    /// The time that each frame takes.
    pub latency: u64,
    /// The additional time of a late frame, at most.
    pub lateness: u64,
    /// The times of frames are multiples of this one, so that several come together.
    pub tick: u64,
    /// Whether trains of packets stay whole.
    pub keeps_trains: bool,
    /// The start and the end of the period in which all frames are lost.
    pub outage: Option<(u64, u64)>,
}

impl Faults {
    /// Returns the longest time that a frame takes.
    pub fn longest(&self) -> u64 {
        self.latency + self.lateness + 2 * self.tick
    }
}

/// The faults between each two guests.
#[derive(Clone, Debug)]
pub struct Links(Vec<Vec<Faults>>);

impl Links {
    /// Returns the links between so many guests. `draw` says what goes wrong on each.
    pub fn new(guests: usize, mut draw: impl FnMut() -> Faults) -> Self {
        Self((0..guests).map(|guest| (0..guest).map(|_| draw()).collect()).collect())
    }

    /// Returns what goes wrong between two guests.
    pub fn between(&self, one: usize, other: usize) -> &Faults {
        &self.0[one.max(other)][one.min(other)]
    }

    /// Returns what goes wrong on the way of a frame, by the addresses of its two guests.
    fn of(&self, frame: &[u8]) -> &Faults {
        let [source, destination] = [29, 33].map(|at| usize::from(frame[at]) - 1);
        self.between(source, destination)
    }
}

/// A frame that was lost, spoilt or late.
#[derive(Clone, Copy, Debug)]
pub struct Harm {
    /// The time at which the frame was sent.
    pub time: u64,
    /// The last byte of the address that it was for.
    pub to: u8,
    /// The QP that it was for.
    pub qpn: u32,
}

/// A frame under way: the host that has sent it, its bytes, and those of a segment of a train.
pub struct Frame {
    pub from: usize,
    pub bytes: Vec<u8>,
    pub segment: u16,
}

struct State {
    dice: Dice,
    /// The frames under way, by the time of arrival and in the order of sending.
    under_way: BTreeMap<(u64, u64), Frame>,
    sent: u64,
    harm: Vec<Harm>,
    /// Whether each packet is printed.
    tells: bool,
}

pub struct Network {
    clock: Arc<TestClock>,
    links: Links,
    state: Mutex<State>,
}

/// The end of the network at a host.
pub struct Port {
    pub network: Arc<Network>,
    pub host: usize,
}

impl Uplink for Port {
    fn send(&self, segments: Segments<'_>) -> usize {
        self.network.take(self.host, segments);
        1
    }
}

/// Returns a time in nanoseconds.
pub fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap()
}

impl Network {
    pub fn new(clock: &Arc<TestClock>, links: &Links, seed: u64, tells: bool) -> Arc<Self> {
        let state = State {
            dice: Dice::new(seed),
            under_way: BTreeMap::new(),
            sent: 0,
            harm: Vec::new(),
            tells,
        };
        Arc::new(Self { clock: Arc::clone(clock), links: links.clone(), state: Mutex::new(state) })
    }

    fn now(&self) -> u64 {
        nanos(self.clock.passed())
    }

    fn take(&self, from: usize, Segments { frame, segment, .. }: Segments<'_>) {
        let mut state = self.state.lock().unwrap();
        if self.links.of(frame).keeps_trains {
            return self.take_frame(&mut state, from, frame, segment);
        }
        let mut split = Split::new(frame, segment);
        while let Some(range) = split.next(frame) {
            self.take_frame(&mut state, from, &frame[range], 0);
        }
    }

    fn take_frame(&self, state: &mut State, from: usize, frame: &[u8], segment: u16) {
        let (faults, now) = (self.links.of(frame), self.now());
        state.tell(now, "sends", from, frame, segment);
        let is_out = faults.outage.is_some_and(|(begin, end)| (begin..end).contains(&now));
        if is_out || state.dice.happens(faults.loss) {
            state.tell(now, "loses", from, frame, segment);
            return state.note(now, frame, segment);
        }
        let copies = 1 + u64::from(state.dice.happens(faults.repeat));
        let mut is_late = true;
        for _ in 0..copies {
            let mut bytes = frame.to_vec();
            let mut is_harmed = state.dice.happens(faults.corrupt);
            if is_harmed {
                let bit = state.dice.below(frame.len() as u64 * 8) as usize;
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            if state.dice.happens(faults.mark) {
                mark(&mut bytes);
            }
            let mut time = now + faults.latency;
            if state.dice.happens(faults.delay) {
                time += state.dice.below(faults.lateness + 1);
                is_harmed = true;
            }
            is_late &= is_harmed;
            let number = state.sent;
            state.sent += 1;
            let arrival = time.next_multiple_of(faults.tick);
            state.under_way.insert((arrival, number), Frame { from, bytes, segment });
        }
        if is_late {
            state.note(now, frame, segment);
        }
    }

    /// Returns when the next frame arrives.
    pub fn next(&self) -> Option<u64> {
        self.state.lock().unwrap().under_way.first_key_value().map(|((time, _), _)| *time)
    }

    /// Returns the frames that arrive now.
    pub fn arrivals(&self) -> Vec<Frame> {
        let now = self.now();
        let mut state = self.state.lock().unwrap();
        let later = state.under_way.split_off(&(now + 1, 0));
        let due = std::mem::replace(&mut state.under_way, later);
        for frame in due.values() {
            state.tell(now, "brings", frame.from, &frame.bytes, frame.segment);
        }
        due.into_values().collect()
    }

    /// Returns how many frames for these QPs were lost or late since a time.
    pub fn harm_since(&self, time: u64, qps: &[(u8, u32)]) -> usize {
        let state = self.state.lock().unwrap();
        let is_theirs = |harm: &&Harm| harm.time >= time && qps.contains(&(harm.to, harm.qpn));
        state.harm.iter().filter(is_theirs).count()
    }
}

impl State {
    /// Notes the packets of a frame that was lost or is late.
    fn note(&mut self, time: u64, frame: &[u8], segment: u16) {
        let mut frame = frame.to_vec();
        let mut split = Split::new(&frame, segment);
        while let Some(range) = split.next(&mut frame) {
            if let Ok(packet) = roce::decode(&frame[range]) {
                let headers = &packet.headers;
                let (to, qpn) = (headers.ip.destination_gid()[15], headers.bth.dest_qp.get());
                self.harm.push(Harm { time, to, qpn });
            }
        }
    }

    fn tell(&self, time: u64, what: &str, from: usize, frame: &[u8], segment: u16) {
        if !self.tells {
            return;
        }
        let mut frame = frame.to_vec();
        let mut split = Split::new(&frame, segment);
        while let Some(range) = split.next(&mut frame) {
            match roce::decode(&frame[range]) {
                Ok(packet) => println!(
                    "{time} host {from} {what} {:?} {:?} {:?} {} bytes for QP {}",
                    packet.headers.bth.psn,
                    packet.headers.bth.opcode,
                    packet.headers.extended.aeth,
                    packet.payload.len(),
                    packet.headers.bth.dest_qp.get(),
                ),
                Err(malformed) => println!("{time} host {from} {what} a frame: {malformed}"),
            }
        }
    }
}
