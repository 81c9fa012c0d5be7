// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A cable between two fabrics, which stand for two hosts. It can lose, repeat and reorder frames, as a
//! seed says. A cable without faults leaves trains of packets whole, any other takes them apart.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use roce::{Segments, Split};

use super::driver::TestClock;
use crate::{Clock, Fabric, FabricConfig, Uplink};

/// The rates of faults, in thousandths.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// A frame is lost.
    pub loss: u64,
    /// A frame comes twice.
    pub repeat: u64,
    /// A frame comes behind the next ones.
    pub reorder: u64,
    /// A bit of a frame is another.
    pub corrupt: u64,
    /// A frame comes marked, as one that met congestion.
    pub mark: u64,
    /// Both hosts take each other for an adapter that does not know selective acknowledgements, and lets its packets be
    /// routed adaptively.
    pub foreign: bool,
    /// Whatever segments trains spoils all packets of a train but the first.
    pub spoils_trains: bool,
}

impl Faults {
    /// The faults of a cable that has none.
    pub const NONE: Self = Self {
        loss: 0,
        repeat: 0,
        reorder: 0,
        corrupt: 0,
        mark: 0,
        foreign: false,
        spoils_trains: false,
    };
}

/// A frame that is under way.
struct Frame {
    /// The number of the fabric that it goes to.
    to: usize,
    bytes: Vec<u8>,
    /// The bytes of the segments of a train.
    segment: u16,
    /// The time at which the frame arrives; `None` if it arrives at once.
    at: Option<Instant>,
}

/// A cable between fabrics: the frames under way, and the faults that they meet.
pub struct Cable {
    frames: Mutex<VecDeque<Frame>>,
    /// The time for which a frame is under way, by this clock.
    delay: Mutex<Option<(Duration, Arc<TestClock>)>>,
    fabrics: Mutex<Vec<Arc<Fabric>>>,
    faults: Faults,
    random: Mutex<u64>,
    /// The number of times that each packet leaves the host, as the uplink says.
    pub copies: AtomicUsize,
    /// The packet of every frame that was sent, as a frame.
    pub sent: Mutex<Vec<Vec<u8>>>,
}

/// An end of the cable.
struct End {
    cable: Arc<Cable>,
    /// The number of the fabric at the other end.
    to: usize,
}

impl Uplink for End {
    fn send(&self, segments: Segments<'_>) -> usize {
        self.cable.take(self.to, segments);
        self.cable.copies.load(Ordering::Relaxed)
    }
}

thread_local! {
    static CABLE: RefCell<Option<Arc<Cable>>> = const { RefCell::new(None) };
}

/// Runs a test whose pairs of guests are on two hosts, with a cable between them; returns the cable.
pub fn over_a_cable(seed: u64, faults: Faults, test: impl FnOnce()) -> Arc<Cable> {
    let cable = Arc::new(Cable {
        frames: Mutex::default(),
        delay: Mutex::default(),
        fabrics: Mutex::default(),
        faults,
        random: Mutex::new(seed),
        copies: AtomicUsize::new(1),
        sent: Mutex::default(),
    });
    CABLE.set(Some(Arc::clone(&cable)));
    test();
    CABLE.set(None);
    // The fabrics have the cable, and the cable has them.
    cable.fabrics.lock().unwrap().clear();
    cable
}

/// Returns the cable of the test that runs.
pub fn cable() -> Option<Arc<Cable>> {
    CABLE.with_borrow(Clone::clone)
}

impl Cable {
    /// Returns the fabrics at both ends.
    pub fn fabrics(self: &Arc<Self>, config: impl Fn() -> FabricConfig) -> [Arc<Fabric>; 2] {
        let fabrics = [1, 0].map(|to| {
            let uplink = Arc::new(End { cable: Arc::clone(self), to });
            Fabric::new(FabricConfig { uplink: Some(uplink), ..config() })
        });
        *self.fabrics.lock().unwrap() = fabrics.to_vec();
        fabrics
    }

    /// Returns whether something happens that does so many thousandths of the time.
    fn happens(&self, thousandths: u64) -> bool {
        self.random() % 1000 < thousandths
    }

    /// Returns a random number (splitmix64).
    fn random(&self) -> u64 {
        let mut state = self.random.lock().unwrap();
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = *state;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    fn take(&self, to: usize, Segments { frame, segment, .. }: Segments<'_>) {
        let is_whole = self.faults == Faults::default();
        if is_whole {
            let frame = self.frame(to, frame, segment);
            self.frames.lock().unwrap().push_back(frame);
        }
        let mut split = Split::new(frame, segment);
        for number in 0.. {
            let Some(range) = split.next(frame) else { break };
            self.sent.lock().unwrap().push(frame[range.clone()].to_vec());
            if self.faults.spoils_trains && number != 0 {
                continue;
            }
            if self.faults.foreign {
                if let Some(frame) = of_foreign_host(&frame[range]) {
                    self.take_packet(to, &frame);
                }
            } else if !is_whole {
                self.take_packet(to, &frame[range]);
            }
        }
    }

    fn take_packet(&self, to: usize, frame: &[u8]) {
        if self.happens(self.faults.loss) {
            return;
        }
        let mut frame = frame.to_vec();
        if self.happens(self.faults.corrupt) {
            let bit = self.random() as usize % (frame.len() * 8);
            frame[bit / 8] ^= 1 << (bit % 8);
        }
        if self.happens(self.faults.mark) {
            mark(&mut frame);
        }
        let copies = 1 + usize::from(self.happens(self.faults.repeat));
        for _ in 0..copies {
            let mut frames = self.frames.lock().unwrap();
            let at = if self.happens(self.faults.reorder) {
                frames.len().saturating_sub(3)
            } else {
                frames.len()
            };
            frames.insert(at, self.frame(to, &frame, 0));
        }
    }

    /// Puts a frame on the way to a fabric as it is, that of the first guest of a pair or of the second.
    pub fn inject(&self, to: usize, frame: &[u8]) {
        let frame = self.frame(to, frame, 0);
        self.frames.lock().unwrap().push_back(frame);
    }

    /// Returns the fabric at an end.
    pub fn fabric(&self, number: usize) -> Arc<Fabric> {
        Arc::clone(&self.fabrics.lock().unwrap()[number])
    }

    /// Brings a frame to a fabric, whatever else is under way. Returns whether a guest takes it.
    pub fn bring(&self, to: usize, frame: &[u8]) -> bool {
        self.fabric(to).receive(frame, 0)
    }

    /// Puts a CNP under way to a QP of a fabric, from the guest 9 to the guest 1.
    pub fn send_cnp(&self, to: usize, qpn: u32) {
        let mut frame = vec![0; 128];
        let len = roce::encode(&cnp([9, 1], qpn), &[], &mut frame).unwrap();
        self.inject(to, &frame[..len]);
    }

    /// Loses what is under way.
    pub fn lose(&self) {
        self.frames.lock().unwrap().clear();
    }

    /// Brings what is under way to the other ends, if its time has come; whether there was anything.
    pub fn deliver(&self) -> bool {
        let now = self.delay.lock().unwrap().as_ref().map(|(_, clock)| clock.now());
        let arrives = |frame: &Frame| now.is_none_or(|now| frame.at.is_none_or(|at| at <= now));
        let fabrics = self.fabrics.lock().unwrap().clone();
        let mut count = 0;
        loop {
            let mut frames = self.frames.lock().unwrap();
            let next = if frames.front().is_some_and(arrives) { frames.pop_front() } else { None };
            drop(frames);
            let Some(Frame { to, bytes, segment, .. }) = next else { break count != 0 };
            fabrics[to].receive(&bytes, segment);
            count += 1;
        }
    }

    /// Sets the time that each frame takes from now on.
    pub fn set_delay(&self, delay: Duration, clock: &Arc<TestClock>) {
        *self.delay.lock().unwrap() = Some((delay, Arc::clone(clock)));
    }

    /// Returns when the next frame arrives.
    pub fn next(&self) -> Option<Instant> {
        self.frames.lock().unwrap().front().and_then(|frame| frame.at)
    }

    /// Returns a frame that is sent now.
    fn frame(&self, to: usize, frame: &[u8], segment: u16) -> Frame {
        let at = self.delay.lock().unwrap().as_ref().map(|(delay, clock)| clock.now() + *delay);
        Frame { to, bytes: frame.to_vec(), segment, at }
    }
}

/// Returns the headers of a CNP for a QP, from one of the guests of these numbers to the other.
pub fn cnp(ends: [u8; 2], qpn: u32) -> roce::Headers {
    headers(ends, roce::Opcode::CNP, qpn)
}

/// Returns the headers of the packet of PSN 0 for a QP, from one of the guests of these numbers to the other.
pub fn headers([from, to]: [u8; 2], opcode: roce::Opcode, qpn: u32) -> roce::Headers {
    roce::Headers {
        ethernet: roce::Ethernet { destination: [2; 6], source: [4; 6], vlan: None },
        ip: roce::Ip::V4(roce::Ipv4 {
            traffic_class: 0,
            identification: 0,
            dont_fragment: true,
            hop_limit: 64,
            source: [10, 0, 0, from].into(),
            destination: [10, 0, 0, to].into(),
        }),
        source_port: 0xc000,
        bth: roce::Bth::new(opcode, roce::Qpn::new(qpn).unwrap(), roce::Psn::new(0)),
        extended: roce::ExtendedHeaders::default(),
    }
}

/// Returns a frame as an adapter sends it that does not know selective acknowledgements: it sets the bit by which
/// switches tell packets of adaptive routing, and has the opcodes of IBA alone.
fn of_foreign_host(frame: &[u8]) -> Option<Vec<u8>> {
    let packet = roce::decode(frame).unwrap();
    if packet.headers.bth.opcode.service() == roce::Service::Manufacturer {
        return None;
    }
    let ip = if packet.headers.ethernet.vlan.is_some() { 18 } else { 14 };
    let bth = ip + if matches!(packet.headers.ip, roce::Ip::V4(_)) { 28 } else { 48 };
    let mut foreign = frame.to_vec();
    foreign[bth + 8] |= 0x40;
    let end = frame.len() - 4;
    let icrc = roce::icrc(&foreign[ip..end]).unwrap();
    foreign[end..].copy_from_slice(&icrc);
    Some(foreign)
}

/// Marks a frame of IPv4 without a tag: sets CE (RFC 3168), and the checksum of the header.
pub fn mark(frame: &mut [u8]) {
    if frame[12..14] != [8, 0] {
        return;
    }
    let header = &mut frame[14..34];
    header[1] |= 3;
    header[10..12].fill(0);
    let words = header.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
}
