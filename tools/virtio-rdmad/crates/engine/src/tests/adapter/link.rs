// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The link between the host of a guest and an adapter: the frames under way, and what happens to them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use roce::{Headers, Segments, Split};

use crate::tests::cable::mark;
use crate::tests::driver::TestClock;
use crate::tests::schedules::dice::Dice;
use crate::{Clock, Uplink};

/// The end of the link that a frame goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum To {
    Guest,
    Adapter,
}

/// Decides whether a packet is lost.
type Loss = Box<dyn FnMut(To, &Headers) -> bool + Send>;

/// The faults of a link. The numbers are thousandths of the packets.
#[derive(Clone, Copy, Default)]
pub struct Faults {
    /// Packets that are lost.
    pub loss: u64,
    /// Packets to the adapter that come marked.
    pub mark: u64,
    /// The longest time for which a packet to the guest is late. Packets with less delay overtake it.
    pub spread: Duration,
}

/// The state of a link.
struct Frames {
    /// The frames under way, by the time at which they arrive and the order in which they were sent.
    under_way: BTreeMap<(Instant, u64), (To, Vec<u8>)>,
    sent: u64,
    /// The time at which the line of the guest's host is free.
    free_at: Instant,
    dice: Dice,
    faults: Faults,
    loss: Option<Loss>,
}

/// A link between the host of a guest and an adapter, whose frames take a time.
pub struct Link {
    clock: Arc<TestClock>,
    delay: Duration,
    /// The rate of the line of the guest's host, in bytes per second.
    rate: u64,
    frames: Mutex<Frames>,
    /// All packets that were sent, also those that were lost.
    pub log: Mutex<Vec<(To, Headers)>>,
    /// The number of frames that the guest's host has sent. A train is one.
    pub of_host: AtomicU64,
}

impl Link {
    /// Makes a link whose frames take `delay` one way, and leave the guest's host at so many bytes per second.
    pub fn new(clock: &Arc<TestClock>, delay: Duration, rate: u64, seed: u64) -> Arc<Self> {
        let (under_way, sent, dice) = (BTreeMap::new(), 0, Dice::new(seed));
        let (faults, loss, free_at) = (Faults::default(), None, clock.now());
        let frames = Mutex::new(Frames { under_way, sent, free_at, dice, faults, loss });
        Arc::new(Self {
            clock: Arc::clone(clock),
            delay,
            rate,
            frames,
            log: Mutex::default(),
            of_host: AtomicU64::new(0),
        })
    }

    /// Sets the faults from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.frames.lock().unwrap().faults = faults;
    }

    /// Has a function decide which packets are lost besides.
    pub fn lose(&self, loss: impl FnMut(To, &Headers) -> bool + Send + 'static) {
        self.frames.lock().unwrap().loss = Some(Box::new(loss));
    }

    /// Loses the first packet for which a function says so.
    pub fn lose_one(&self, mut is_it: impl FnMut(To, &Headers) -> bool + Send + 'static) {
        let mut is_lost = false;
        self.lose(move |to, headers| {
            let now = !is_lost && is_it(to, headers);
            is_lost |= now;
            now
        });
    }

    /// Sends a frame to an end.
    pub fn send(&self, to: To, frame: &[u8]) {
        let Ok(packet) = roce::decode(frame) else {
            return self.frames.lock().unwrap().put(self.clock.now() + self.delay, to, frame);
        };
        self.log.lock().unwrap().push((to, packet.headers));
        let mut frames = self.frames.lock().unwrap();
        let nanos = (frame.len() as u64 + 24) * 1_000_000_000 / self.rate;
        let left = frames.free_at.max(self.clock.now()) + Duration::from_nanos(nanos);
        let is_lost = frames.loss.as_mut().is_some_and(|loss| loss(to, &packet.headers));
        if to == To::Adapter {
            frames.free_at = left;
        }
        if is_lost || frames.happens(|faults| faults.loss) {
            return;
        }
        let mut frame = frame.to_vec();
        if to == To::Adapter && frames.happens(|faults| faults.mark) {
            mark(&mut frame);
        }
        let mut at = self.clock.now() + self.delay;
        if to == To::Adapter {
            at = left + self.delay;
        }
        let spread = frames.faults.spread.as_nanos() as u64;
        if to == To::Guest && spread != 0 {
            at += Duration::from_nanos(frames.dice.below(spread));
        }
        frames.put(at, to, &frame);
    }

    /// Takes the next frame that has arrived.
    pub fn arrived(&self) -> Option<(To, Vec<u8>)> {
        let mut frames = self.frames.lock().unwrap();
        let first = frames.under_way.first_entry()?;
        (first.key().0 <= self.clock.now()).then(|| first.remove())
    }

    /// Returns when the next frame arrives.
    pub fn next(&self) -> Option<Instant> {
        self.frames.lock().unwrap().under_way.keys().next().map(|(at, _)| *at)
    }

    /// Returns how many packets to an end were sent for which a function says so.
    pub fn count(&self, to: To, is_it: impl Fn(&Headers) -> bool) -> usize {
        let log = self.log.lock().unwrap();
        log.iter().filter(|(other, headers)| *other == to && is_it(headers)).count()
    }
}

impl Link {
    /// Returns the last packets, for a test that fails.
    pub fn last_packets(&self) -> String {
        let log = self.log.lock().unwrap();
        let packet = |(to, headers): &(To, Headers)| {
            let (bth, aeth) = (&headers.bth, headers.extended.aeth);
            let (what, psn) = (bth.opcode.operation(), bth.psn.get());
            let says = aeth.map_or(String::new(), |aeth| format!(", {:?}", aeth.syndrome));
            format!("to the {to:?}: {what:?} {psn:#x}{says}\n")
        };
        log[log.len().saturating_sub(12)..].iter().map(packet).collect()
    }
}

impl Frames {
    fn put(&mut self, at: Instant, to: To, frame: &[u8]) {
        self.sent += 1;
        self.under_way.insert((at, self.sent), (to, frame.to_vec()));
    }

    fn happens(&mut self, thousandths: impl Fn(&Faults) -> u64) -> bool {
        let thousandths = thousandths(&self.faults);
        thousandths != 0 && self.dice.happens(thousandths)
    }
}

impl Uplink for Link {
    fn send(&self, Segments { frame, segment, .. }: Segments<'_>) -> usize {
        self.of_host.fetch_add(1, Ordering::Relaxed);
        let mut frame = frame.to_vec();
        let mut split = Split::new(&frame, segment);
        while let Some(range) = split.next(&mut frame) {
            Link::send(self, To::Adapter, &frame[range]);
        }
        1
    }
}
