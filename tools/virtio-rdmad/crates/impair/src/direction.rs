// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One direction of the cable: which packets arrive, when, and with which bits.

use std::time::{Duration, Instant};

use network::vxlan::congestion::{self, Ecn};
use rand::{RngExt, SeedableRng};
use rand_xorshift::XorShiftRng;

use crate::faults::{Counters, Faults};

/// The most packets that pass one that is reordered, and how long it waits for them.
const PASSING: u32 = 8;
const PASSING_TIME: Duration = Duration::from_millis(2);
/// The bytes of an Ethernet header, which stays as it is.
const ETHERNET: usize = 14;
/// The bytes behind it that have all headers of a packet. Half of the flipped bits are in these.
const HEADERS: usize = 64;
/// The most bits that are flipped.
const FLIPPED: u32 = 4;
/// One of so many corrupted packets loses its end in place of some bits.
const CUT_OFF: u32 = 8;
/// The most packets that wait. Further ones do not wait.
const WAITING: usize = 4096;

/// A packet that waits.
#[derive(Debug)]
struct Waiting {
    frame: Vec<u8>,
    /// It arrives when so many packets have passed it,
    passing: u32,
    /// or at this time.
    until: Instant,
}

/// One direction of the cable. The fate of a packet follows from the seed and from how many packets of
/// RoCE v2 came before it, and from nothing else.
#[derive(Debug)]
pub struct Direction {
    /// 0 for one direction, 1 for the other.
    number: u64,
    faults: Faults,
    waiting: Vec<Waiting>,
    counters: Counters,
}

impl Direction {
    /// Returns a direction without faults, which has this number, 0 or 1.
    pub fn new(number: u64) -> Self {
        let counters = Counters::default();
        Self { number, faults: Faults::default(), waiting: Vec::new(), counters }
    }

    /// Changes which faults packets meet from now on. Returns what was counted since the last change.
    pub fn change(&mut self, faults: Faults) -> Counters {
        self.faults = faults;
        std::mem::take(&mut self.counters)
    }

    /// Counts a frame that the kernel did not take.
    pub fn refused(&mut self) {
        self.counters.refused += 1;
    }

    /// Returns when the next packet arrives that waits, at the latest.
    pub fn next(&self) -> Option<Instant> {
        self.waiting.iter().map(|waiting| waiting.until).min()
    }

    /// Returns the packets that have waited until now.
    pub fn due(&mut self, now: Instant) -> Vec<Vec<u8>> {
        self.release(|waiting| waiting.until <= now)
    }

    /// Takes a frame that came. Returns the frames that arrive now, in their order.
    pub fn take(&mut self, frame: &[u8], now: Instant) -> Vec<Vec<u8>> {
        if roce::destination(frame).is_none() {
            self.counters.others += 1;
            return vec![frame.to_vec()];
        }
        let mut random = self.random();
        self.counters.packets += 1;
        if random.random_bool(self.faults.loss) {
            self.counters.lost += 1;
            return Vec::new();
        }
        let twice = random.random_bool(self.faults.duplicate);
        self.counters.duplicated += u64::from(twice);
        let mut arriving = Vec::new();
        for _ in 0..=u8::from(twice) {
            let mut copy = self.copy(frame, &mut random);
            let wait = self.wait(now, &mut random);
            self.mark(&mut copy, &mut random);
            match wait {
                Some((passing, until)) if self.waiting.len() < WAITING => {
                    self.waiting.push(Waiting { frame: copy, passing, until });
                }
                _ => {
                    arriving.push(copy);
                    arriving.extend(self.passed());
                }
            }
        }
        arriving
    }

    /// Returns what decides about the packet that comes next.
    fn random(&self) -> XorShiftRng {
        let mut of_direction = XorShiftRng::seed_from_u64(self.faults.seed ^ (self.number << 63));
        let first: u64 = of_direction.random();
        XorShiftRng::seed_from_u64(first.wrapping_add(self.counters.packets))
    }

    /// Returns a copy of a packet, perhaps with other bits.
    fn copy(&mut self, frame: &[u8], random: &mut XorShiftRng) -> Vec<u8> {
        let mut copy = frame.to_vec();
        if !random.random_bool(self.faults.corrupt) {
            return copy;
        }
        self.counters.corrupted += 1;
        if random.random_ratio(1, CUT_OFF) {
            copy.truncate(random.random_range(ETHERNET..frame.len()));
            return copy;
        }
        let end = frame.len();
        // Two flips of one bit leave the packet as it was.
        while copy == frame {
            for _ in 0..random.random_range(1..=FLIPPED) {
                let end = if random.random() { end } else { end.min(ETHERNET + HEADERS) };
                copy[random.random_range(ETHERNET..end)] ^= 1 << random.random_range(0..8);
            }
        }
        copy
    }

    /// Returns how many packets pass the next one, and until when it waits, if it waits.
    fn wait(&mut self, now: Instant, random: &mut XorShiftRng) -> Option<(u32, Instant)> {
        if random.random_bool(self.faults.delay) {
            self.counters.delayed += 1;
            let most = Duration::from_millis(self.faults.delay_ms.into());
            return Some((u32::MAX, now + most.mul_f64(random.random())));
        }
        if random.random_bool(self.faults.reorder) {
            self.counters.reordered += 1;
            return Some((random.random_range(1..=PASSING), now + PASSING_TIME));
        }
        None
    }

    /// Perhaps has a packet say that it met congestion. Without this fault nothing random is taken for it, so that the
    /// other faults of a seed stay.
    fn mark(&mut self, frame: &mut [u8], random: &mut XorShiftRng) {
        let is_chosen = self.faults.mark > 0.0 && random.random_bool(self.faults.mark);
        // A frame with a mark keeps it, and one whose sender does not react to marks has none.
        let reacts = matches!(congestion::of(frame), Ecn::Ect0 | Ecn::Ect1);
        if is_chosen && reacts && congestion::leave(frame, Ecn::Ce).is_ok() {
            self.counters.marked += 1;
        }
    }

    /// A packet has passed those that wait: returns those that enough packets have passed.
    fn passed(&mut self) -> Vec<Vec<u8>> {
        for waiting in &mut self.waiting {
            waiting.passing -= 1;
        }
        self.release(|waiting| waiting.passing == 0)
    }

    /// Takes out those that wait no longer, in the order in which they came.
    fn release(&mut self, ready: impl Fn(&Waiting) -> bool) -> Vec<Vec<u8>> {
        if !self.waiting.iter().any(&ready) {
            return Vec::new();
        }
        let (out, waiting) = std::mem::take(&mut self.waiting).into_iter().partition(ready);
        self.waiting = waiting;
        let out: Vec<Waiting> = out;
        out.into_iter().map(|waiting| waiting.frame).collect()
    }
}

#[cfg(test)]
mod tests;
