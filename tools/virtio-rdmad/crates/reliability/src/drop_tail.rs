// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Queues that mark nothing, in virtual time: flows of this crate and a flow of TCP through a bottleneck that drops the
//! packets for which its queue has no room (drop-tail), and that may lose others by chance.
//!
//! Each flow of this crate is a [`SendWindow`] with as many WRITEs as it takes, and a receiver with selective
//! acknowledgements, as an engine has them. TCP is Reno, in packets: slow start, congestion avoidance and fast
//! retransmission (RFC 5681), with an acknowledgement of each packet, so that all losses of a round trip count once
//! (RFC 6675; RFC 9002, appendix B, has it in this form). All flows begin within a millisecond, and each has an access
//! of its own that is as fast as the bottleneck.

// Windows are far below 2^52.
#![allow(clippy::cast_precision_loss)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use roce::{Psn, SackEth};

use crate::random::Random;
use crate::rate_limit::time_of;
use crate::window::{Kind, SendWindow};

/// The rate of the bottleneck and of each access, in bytes per second: 10 Gbit/s.
const LINE: u64 = 1_250_000_000;
/// The bytes on the wire of a packet with a payload of 1024 bytes.
const PACKET: u64 = 1024 + 82;
/// The packets for which the queue of the bottleneck has room.
const ROOM: u128 = 100;
/// The packets of a message, and the messages that are posted in advance.
const MESSAGE: u32 = 128;
const MESSAGES: usize = 16;
/// All flows begin within this time, in nanoseconds.
const BEGIN: u64 = 1_000_000;
/// The time without an acknowledgement after which TCP takes all packets for lost: as short as data centres set it.
const TCP_TIMEOUT: Duration = Duration::from_millis(10);
/// The number of later packets whose acknowledgement tells TCP that a packet is lost.
const TCP_DUPLICATES: u64 = 3;

/// The flow that an event is of: one of this crate, or TCP.
type FlowAt = Option<usize>;

/// What happens at a time.
#[derive(Clone, Copy)]
enum Event {
    /// A packet comes to the bottleneck.
    Packet { of: FlowAt, number: u64, asks: bool },
    /// A packet comes to its receiver.
    Arrival { of: FlowAt, number: u64, asks: bool },
    /// An answer comes to a flow of this crate.
    Answer { at: usize, answer: Answer },
    /// A responder tells a flow that this packet is missing, if it still is.
    LateNak { at: usize, missing: u32 },
    /// A packet of TCP is acknowledged.
    TcpAck(u64),
    /// A flow begins, or its timer expires.
    Timer(FlowAt),
}

/// The answer of a responder.
#[derive(Clone, Copy)]
enum Answer {
    Ack(Psn),
    Selective(Psn, SackEth),
    Nak(Psn),
}

/// The time after which a responder tells of a packet that is missing in front of one that it cannot hold.
const LATE: Duration = Duration::from_millis(1);

/// The responder of a flow: the packet that it expects, and those that it holds.
#[derive(Default)]
struct Receiver {
    expected: u32,
    held: BTreeSet<u32>,
    /// Whether it has sent a NAK for the expected packet. It holds nothing then.
    is_told: bool,
}

impl Receiver {
    /// Takes a packet, and returns the answer.
    fn take(&mut self, psn: u32, asks: bool) -> Option<Answer> {
        if psn < self.expected {
            return Some(Answer::Ack(Psn::new(psn)));
        }
        if psn > self.expected {
            if self.is_told || self.is_far(psn) {
                return None;
            }
            self.held.insert(psn);
            return Some(self.tell());
        }
        self.is_told = false;
        self.expected += 1;
        if self.held.remove(&self.expected) {
            self.expected += 1;
            while self.held.remove(&self.expected) {
                self.expected += 1;
            }
            return Some(self.tell());
        }
        asks.then(|| Answer::Ack(Psn::new(psn)))
    }

    /// Returns whether a packet is too far ahead to be held.
    fn is_far(&self, psn: u32) -> bool {
        psn >= self.expected + SackEth::PACKETS
    }

    /// Returns the acknowledgement of all that has come.
    fn tell(&self) -> Answer {
        if self.held.is_empty() {
            return Answer::Ack(Psn::new(self.expected).minus(1));
        }
        let mut sack = SackEth::default();
        self.held.iter().for_each(|psn| sack.set(psn - self.expected));
        Answer::Selective(Psn::new(self.expected), sack)
    }
}

/// A flow of this crate.
struct Flow {
    window: SendWindow<()>,
    receiver: Receiver,
    /// The time at which the access is free.
    free_at: Instant,
    /// Whether a timer is set.
    has_timer: bool,
}

/// A flow of TCP.
struct Reno {
    cwnd: f64,
    threshold: f64,
    next: u64,
    /// Packets in front of this one were sent before the window was halved last.
    recover: u64,
    under_way: VecDeque<u64>,
    delivered: u64,
    free_at: Instant,
    expires_at: Instant,
    backoff: u32,
}

impl Reno {
    fn acknowledge(&mut self, number: u64, now: Instant) {
        let Ok(at) = self.under_way.binary_search(&number) else { return };
        self.under_way.remove(at);
        self.delivered += 1;
        self.backoff = 0;
        self.expires_at = now + TCP_TIMEOUT;
        if number >= self.recover {
            self.cwnd += if self.cwnd < self.threshold { 1.0 } else { 1.0 / self.cwnd };
        }
        while self.under_way.front().is_some_and(|lost| lost + TCP_DUPLICATES <= number) {
            let lost = self.under_way.pop_front();
            if lost >= Some(self.recover) {
                self.shrink(0.5);
            }
        }
    }

    fn expire(&mut self, now: Instant) {
        self.under_way.clear();
        self.shrink(0.5);
        self.cwnd = 1.0;
        self.backoff = (self.backoff + 1).min(6);
        self.expires_at = now + TCP_TIMEOUT * (1 << self.backoff);
    }

    fn shrink(&mut self, part: f64) {
        self.threshold = (self.cwnd * part).max(2.0);
        self.cwnd = self.threshold;
        self.recover = self.next;
    }
}

/// A path, and the flows on it.
#[derive(Clone, Copy)]
struct Setup {
    flows: usize,
    has_tcp: bool,
    /// The round trip without a queue.
    round_trip: Duration,
    /// The thousandths of packets that are lost by chance, behind the queue.
    loss: u64,
    /// The time that flows have before they are judged, and that in which they are judged.
    settling: Duration,
    judged: Duration,
}

/// What a simulation shows.
#[derive(Debug)]
struct Report {
    /// The goodput of TCP, in thousandths of an equal share of what the bottleneck carries.
    tcp: u64,
    /// The goodput of all flows, in thousandths of what the bottleneck carries.
    goodput: u64,
    /// The thousandths of packets that the queue dropped.
    dropped: u64,
}

struct Simulation {
    setup: Setup,
    random: Random,
    start: Instant,
    now: Instant,
    events: BTreeMap<(Instant, u64), Event>,
    count: u64,
    /// The time at which the queue is empty if nothing comes.
    empty_at: Instant,
    flows: Vec<Flow>,
    reno: Reno,
    /// Packets that came to the bottleneck, and that it dropped.
    offered: u64,
    dropped: u64,
}

impl Simulation {
    fn new(seed: u64, setup: Setup) -> Self {
        let start = Instant::now();
        let flow = || Flow {
            window: SendWindow::new(Psn::new(0)),
            receiver: Receiver::default(),
            free_at: start,
            has_timer: true,
        };
        let reno = Reno {
            cwnd: 10.0,
            threshold: f64::INFINITY,
            next: 0,
            recover: 0,
            under_way: VecDeque::new(),
            delivered: 0,
            free_at: start,
            expires_at: start,
            backoff: 0,
        };
        let mut simulation = Self {
            setup,
            random: Random(seed),
            start,
            now: start,
            events: BTreeMap::new(),
            count: 0,
            empty_at: start,
            flows: std::iter::repeat_with(flow).take(setup.flows).collect(),
            reno,
            offered: 0,
            dropped: 0,
        };
        let tcp = setup.has_tcp.then_some(None);
        for of in (0..setup.flows).map(Some).chain(tcp) {
            let begin = Duration::from_nanos(simulation.random.next() % BEGIN);
            simulation.at(start + begin, Event::Timer(of));
        }
        simulation.flows.iter_mut().for_each(|flow| flow.window.is_selective = true);
        simulation
    }

    fn at(&mut self, time: Instant, event: Event) {
        self.count += 1;
        self.events.insert((time, self.count), event);
    }

    /// Goes on until a time.
    fn run_until(&mut self, end: Instant) {
        while let Some(next) = self.events.first_entry().filter(|next| next.key().0 < end) {
            let ((now, _), event) = next.remove_entry();
            self.now = now;
            self.handle(event);
        }
    }

    fn handle(&mut self, event: Event) {
        let half = self.setup.round_trip / 2;
        match event {
            Event::Packet { of, number, asks } => {
                if let Some(out_at) = self.pass_bottleneck() {
                    self.at(out_at + half, Event::Arrival { of, number, asks });
                }
            }
            Event::Arrival { of: None, number, .. } => {
                self.at(self.now + half, Event::TcpAck(number));
            }
            Event::Arrival { of: Some(at), number, asks } => {
                let receiver = &mut self.flows[at].receiver;
                let late = receiver.is_far(number as u32).then_some(receiver.expected);
                if let Some(answer) = receiver.take(number as u32, asks) {
                    self.at(self.now + half, Event::Answer { at, answer });
                }
                if let Some(missing) = late {
                    self.at(self.now + LATE, Event::LateNak { at, missing });
                }
            }
            Event::LateNak { at, missing } => {
                let receiver = &mut self.flows[at].receiver;
                if receiver.expected == missing && !std::mem::replace(&mut receiver.is_told, true) {
                    let answer = Answer::Nak(Psn::new(missing));
                    self.at(self.now + half, Event::Answer { at, answer });
                }
            }
            Event::Answer { at, answer } => {
                self.answer(at, answer);
                self.send(at);
            }
            Event::TcpAck(number) => {
                self.reno.acknowledge(number, self.now);
                self.send_tcp();
            }
            Event::Timer(Some(at)) => self.expire(at),
            Event::Timer(None) => {
                if self.reno.next == 0 {
                    self.reno.expires_at = self.now + TCP_TIMEOUT;
                } else if self.now >= self.reno.expires_at {
                    self.reno.expire(self.now);
                }
                self.send_tcp();
                self.at(self.reno.expires_at, event);
            }
        }
    }

    /// Puts a packet into the queue. Returns when it leaves that; `None` if it is lost.
    fn pass_bottleneck(&mut self) -> Option<Instant> {
        let time = time_of(PACKET, LINE);
        let wait = self.empty_at.saturating_duration_since(self.now);
        self.offered += 1;
        if wait.as_nanos() / time.as_nanos() >= ROOM {
            self.dropped += 1;
            return None;
        }
        self.empty_at = self.empty_at.max(self.now) + time;
        let is_lost = self.random.next() % 1000 < self.setup.loss;
        (!is_lost).then_some(self.empty_at)
    }

    /// Follows an answer, as a requester does.
    fn answer(&mut self, at: usize, answer: Answer) {
        let window = &mut self.flows[at].window;
        match answer {
            Answer::Ack(psn) => {
                window.handle_ack(psn);
            }
            Answer::Nak(psn) => {
                window.handle_ack(psn.minus(1));
                window.handle_nak();
            }
            Answer::Selective(psn, sack) => {
                window.handle_sack(psn, sack);
                window.measure_held(self.now);
            }
        }
        if window.take_progress() {
            window.handle_progress(self.now);
        }
        while window.poll_completed().is_some() {}
    }

    /// Sends what is due, and sets the timer.
    fn send(&mut self, at: usize) {
        let flow = &mut self.flows[at];
        let now = self.now;
        flow.window.set_mtu(1024);
        while flow.window.len() < MESSAGES {
            flow.window.push((), MESSAGE, Kind::default());
        }
        let mut sent = Vec::new();
        while let Some(due) = flow.window.poll_transmit(16) {
            if !due.is_retransmit && due.ack_request {
                flow.window.probe.sent(due.psn, now);
            }
            flow.window.flow.sent(now, PACKET, false);
            flow.window.transmitted();
            flow.free_at = flow.free_at.max(now) + time_of(PACKET, LINE);
            sent.push((flow.free_at, u64::from(due.psn.get()), due.ack_request));
        }
        if flow.window.probe_at.is_none() {
            flow.window.probe_at = Some(now + flow.window.probe_delay());
        }
        let timer = flow.window.probe_at.filter(|_| !std::mem::replace(&mut flow.has_timer, true));
        for (time, number, asks) in sent {
            self.at(time, Event::Packet { of: Some(at), number, asks });
        }
        if let Some(time) = timer {
            self.at(time, Event::Timer(Some(at)));
        }
    }

    /// Begins a flow, or probes for the loss of its last packets.
    fn expire(&mut self, at: usize) {
        let flow = &mut self.flows[at];
        flow.has_timer = false;
        if flow.window.probe_at.is_some_and(|probe_at| probe_at <= self.now) {
            flow.window.handle_probe_timeout();
            flow.window.probe_at = None;
        }
        self.send(at);
    }

    fn send_tcp(&mut self) {
        while (self.reno.under_way.len() as f64) < self.reno.cwnd.floor() {
            let number = self.reno.next;
            self.reno.next += 1;
            self.reno.under_way.push_back(number);
            self.reno.free_at = self.reno.free_at.max(self.now) + time_of(PACKET, LINE);
            self.at(self.reno.free_at, Event::Packet { of: None, number, asks: true });
        }
    }

    /// Returns the packets that were delivered: those of the flows of this crate, and of TCP.
    fn delivered(&self) -> (u64, u64) {
        let ours = self.flows.iter().map(|flow| u64::from(flow.receiver.expected)).sum();
        (ours, self.reno.delivered)
    }

    fn run(mut self) -> Report {
        let Setup { flows, has_tcp, settling, judged, .. } = self.setup;
        self.run_until(self.start + settling);
        let (before, (offered, dropped)) = (self.delivered(), (self.offered, self.dropped));
        self.run_until(self.start + settling + judged);
        let after = self.delivered();
        let (ours, tcp) = (after.0 - before.0, after.1 - before.1);
        let possible = (judged.as_nanos() / time_of(PACKET, LINE).as_nanos()) as u64;
        Report {
            tcp: tcp * 1000 * (flows as u64 + u64::from(has_tcp)) / possible,
            goodput: (ours + tcp) * 1000 / possible,
            dropped: (self.dropped - dropped) * 1000 / (self.offered - offered).max(1),
        }
    }
}

/// Runs some flows for half as long again as they are judged.
fn run(seed: u64, flows: usize, has_tcp: bool, micros: u64, loss: u64, millis: u64) -> Report {
    let judged = Duration::from_millis(millis);
    let round_trip = Duration::from_micros(micros);
    let setup = Setup { flows, has_tcp, round_trip, loss, settling: judged / 2, judged };
    let report = Simulation::new(seed, setup).run();
    let Report { tcp, goodput, dropped } = report;
    println!(
        "seed {seed}, {flows} flows, {micros} us, {loss} of 1000 lost: TCP {tcp}, goodput {goodput}, dropped {dropped}"
    );
    report
}

/// TCP gets a good part of its share beside flows that see no mark, the bottleneck is used, and few packets are lost.
/// With 100 flows and a round trip of 1 ms a share is 13 packets.
#[test]
fn tcp_has_a_share_where_nothing_is_marked() {
    for (flows, micros, seeds, least) in
        [(2, 100, 1..5, 500), (10, 100, 1..5, 500), (100, 1000, 1..3, 200)]
    {
        for seed in seeds {
            let report = run(seed, flows, true, micros, 0, 200);
            assert!(report.tcp >= least, "seed {seed}: {flows} flows: {report:?}");
            assert!(report.goodput >= 950, "seed {seed}: {flows} flows: {report:?}");
            assert!(report.dropped <= 30, "seed {seed}: {flows} flows: {report:?}");
        }
    }
}

/// A share of two packets is less than TCP needs. The bottleneck does not collapse by that.
#[test]
fn the_bottleneck_is_used_where_shares_are_tiny() {
    let report = run(1, 100, true, 100, 0, 100);
    assert!(report.goodput >= 950 && report.dropped <= 120, "{report:?}");
}

/// The loss of a hundredth of all packets by chance costs little where a window is several times as long as the path.
#[test]
fn loss_by_chance_is_no_congestion() {
    for (micros, least) in [(20, 950), (50, 900), (100, 740)] {
        for seed in 1..4 {
            let report = run(seed, 1, false, micros, 10, 100);
            assert!(report.goodput >= least, "seed {seed}: {micros} us: {report:?}");
        }
    }
}

/// A window of 256 packets carries a fifth of the bottleneck over a path of 1 ms. A longer one carries most of it as long
/// as nothing is lost, and a little less than the short one otherwise.
#[test]
fn windows_are_longer_on_a_long_path() {
    for (loss, least) in [(0, 800), (1, 170), (10, 85)] {
        let report = run(1, 1, false, 1000, loss, 200);
        assert!(report.goodput >= least, "{report:?}");
    }
}
