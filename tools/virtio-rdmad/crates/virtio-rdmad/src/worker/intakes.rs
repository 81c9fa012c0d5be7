// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The intakes of networks, as one worker sees them.
//!
//! A worker takes over the intakes of a network that it serves a guest of, if no other worker has them: those of the
//! lanes of its guests, and those of lanes that are no guest's. It polls a lane for as long as something tends to come
//! soon, as it polls guests. Then the lane is armed: an event tells that something has come.

use std::sync::Arc;
use std::time::{Duration, Instant};

use network::{Budget, Found, Intake, Mac};
use rustix::io::Errno;

use super::poller::{Poller, Source};
use super::spin::Spin;

/// Rounds in a row that leave something behind, after which the worker gives back the intakes that are busy.
const MOST_PARTS: u32 = 8;
/// The time for which the worker then leaves an intake to the thread of the switch, also after an error.
const RELIEF: Duration = Duration::from_millis(10);

/// The thread that takes in the frames of an uplink, as one worker sees it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    /// Another thread. The worker takes the intake over from this time on, if it may.
    Away(Instant),
    /// The worker, in each round.
    Runnable,
    /// The worker, after an event.
    Armed,
}

/// An intake, as one worker sees it.
struct View {
    intake: Arc<Intake>,
    /// The number of guests of the network that the worker serves.
    guests: u32,
    /// The number of those whose lane it is.
    own_guests: u32,
    state: State,
    /// The time for which the worker polls while nothing comes.
    spin: Spin,
    /// Whether the last turn found something, or there was no time for a turn.
    is_busy: bool,
}

/// The intakes of all networks that have an uplink.
pub struct Intakes {
    views: Vec<View>,
    /// The index of the view that has the first turn of the next round.
    first: usize,
    /// Rounds in a row that have left something behind.
    parts: u32,
    /// The index of the worker.
    worker: usize,
    poller: Arc<Poller>,
}

impl Intakes {
    /// Returns the intakes as the worker with this index sees them, which has none of them yet. It polls each for
    /// `poll` at most.
    pub fn new(
        intakes: &[Arc<Intake>],
        worker: usize,
        poller: &Arc<Poller>,
        poll: Duration,
        now: Instant,
    ) -> Self {
        let view = |intake: &Arc<Intake>| View {
            intake: Arc::clone(intake),
            guests: 0,
            own_guests: 0,
            state: State::Away(now),
            spin: Spin::new(poll, now),
            is_busy: false,
        };
        let views = intakes.iter().map(view).collect();
        Self { views, first: 0, parts: 0, worker, poller: Arc::clone(poller) }
    }

    /// Notes that the worker begins to serve a guest of a network, with its MAC address if that is known.
    pub fn join(&mut self, network: &str, mac: Option<Mac>) {
        for view in self.views_of(network) {
            view.guests += 1;
            if mac.is_some_and(|mac| view.intake.is_of(mac)) {
                view.own_guests += 1;
                view.intake.add_guest();
            }
        }
    }

    /// Notes that the worker serves a guest of a network no longer.
    pub fn leave(&mut self, network: &str, mac: Option<Mac>) {
        for view in self.views_of(network) {
            view.guests -= 1;
            if mac.is_some_and(|mac| view.intake.is_of(mac)) {
                view.own_guests -= 1;
                view.intake.remove_guest();
            }
        }
    }

    fn views_of<'a>(&'a mut self, network: &'a str) -> impl Iterator<Item = &'a mut View> {
        self.views.iter_mut().filter(move |view| view.intake.network() == network)
    }

    /// Takes over the intakes that the worker is to have, and gives back the others.
    pub fn review(&mut self, now: Instant) -> Result<(), Errno> {
        let is_flood = self.parts >= MOST_PARTS;
        for at in 0..self.views.len() {
            let View { state, is_busy, .. } = self.views[at];
            let is_wanted = self.views[at].is_wanted();
            match state {
                State::Away(until) if is_wanted && until <= now => self.take_over(at, now)?,
                State::Away(_) => {}
                _ if !is_wanted => self.give_back(at, now),
                _ if is_flood && is_busy => self.give_back(at, now + RELIEF),
                _ => {}
            }
        }
        if is_flood {
            self.parts = 0;
        }
        Ok(())
    }

    /// Takes over an intake, if no other worker has it.
    fn take_over(&mut self, at: usize, now: Instant) -> Result<(), Errno> {
        let view = &mut self.views[at];
        if !view.intake.claim(self.worker) {
            return Ok(());
        }
        (view.state, view.is_busy) = (State::Armed, false);
        // An event reports the frames that have come already.
        let source = Source::Uplink(u32::try_from(at).unwrap_or(u32::MAX));
        let added = self.poller.add(&*view.intake, source);
        if added.is_err() {
            self.give_back(at, now);
        }
        added
    }

    /// Gives an intake back, and does not take it over before `until`.
    fn give_back(&mut self, at: usize, until: Instant) {
        let view = &mut self.views[at];
        self.poller.remove(&*view.intake);
        view.state = State::Away(until);
        view.intake.give_back();
    }

    /// Gives all intakes back, because the worker ends.
    pub fn give_all_back(&mut self, now: Instant) {
        for at in 0..self.views.len() {
            if !matches!(self.views[at].state, State::Away(_)) {
                self.give_back(at, now);
            }
        }
    }

    /// Takes an event: something has come over the uplink of this intake.
    pub fn notice(&mut self, at: u32) {
        if let Some(view) = self.views.get_mut(at as usize) {
            if view.state == State::Armed {
                // It is armed after a turn that finds nothing, and not before.
                (view.state, view.is_busy) = (State::Runnable, true);
            }
        }
    }

    /// Takes in a bounded part of the frames that have come over uplinks: as many as one lane may have in a round, but
    /// of all lanes, by turns. Returns whether there were any.
    #[inline]
    pub fn turn(&mut self) -> bool {
        let (mut budget, mut worked) = (Budget::default(), false);
        let (count, first) = (self.views.len(), self.first);
        for at in (first..count).chain(0..first) {
            let view = &mut self.views[at];
            if view.state != State::Runnable {
                continue;
            }
            if budget.is_over() {
                // It is not armed before it had a turn.
                view.is_busy = true;
                continue;
            }
            let found = view.intake.turn(&mut budget);
            view.is_busy = found == Found::Frames;
            worked |= view.is_busy;
            if found == Found::Failed {
                // The lane may have no interface any more, and no event tells a worker that sleeps when it has one.
                self.give_back(at, Instant::now() + RELIEF);
            }
            if budget.is_over() {
                self.first = (at + 1) % count;
            }
        }
        self.parts = if budget.is_over() { self.parts + 1 } else { 0 };
        worked
    }

    /// Notes that the turns that ended at `now` had work.
    pub fn worked(&mut self, now: Instant) {
        let polled = self.views.iter_mut().filter(|view| view.state == State::Runnable);
        polled.filter(|view| view.is_busy).for_each(|view| view.spin.worked(now));
    }

    /// Arms the uplinks over which nothing has come for long enough. `contended`: other threads want the
    /// processor, so that a moment is long enough.
    pub fn arm(&mut self, now: Instant, contended: bool) {
        for view in &mut self.views {
            let is_idle = view.state == State::Runnable && !view.is_busy;
            if is_idle && !view.spin.again(now, contended) {
                view.state = State::Armed;
            }
        }
    }

    /// Returns whether an uplink is polled.
    pub fn is_polling(&self) -> bool {
        self.views.iter().any(|view| view.state == State::Runnable)
    }
}

impl View {
    /// Returns whether the worker is to have the intake: the lane is that of a guest that it serves, or that of no
    /// guest that a worker serves.
    fn is_wanted(&self) -> bool {
        self.own_guests != 0 || self.guests != 0 && !self.intake.has_guests()
    }
}

impl Drop for Intakes {
    fn drop(&mut self) {
        self.give_all_back(Instant::now());
        for View { intake, own_guests, .. } in &self.views {
            (0..*own_guests).for_each(|_| intake.remove_guest());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::num::NonZeroU8;
    use std::process::Command;

    use engine::{Fabric, FabricConfig};
    use network::{vxlan, Switch, Uplink};

    use super::*;
    use crate::spec::UplinkSpec;

    /// Frames of 8 KiB that are more than one turn takes, and that the kernel keeps for a socket.
    const MANY: usize = 20;

    /// The intake of a tunnel, and whoever is at its other end.
    struct Bench {
        intake: Arc<Intake>,
        poller: Arc<Poller>,
        other: UdpSocket,
        address: String,
    }

    impl Bench {
        /// Makes a tunnel between two loopback addresses of this process and test.
        fn new(test: u8) -> Self {
            let [.., high, low] = std::process::id().to_be_bytes();
            let at = |end: u8| format!("127.{high}.{low}.{end}");
            let (here, there) = (at(0x81 + 2 * test), at(0x82 + 2 * test));
            let spec: UplinkSpec = format!("vxlan=9,local={here},remote={there}").parse().unwrap();
            let way = spec.way().unwrap();
            let lanes = NonZeroU8::MIN;
            let uplink = Uplink::open("default", &way, None, false, Some(&[]), lanes).unwrap();
            let switch = Arc::new(Switch::new(Some(uplink.clone()), Vec::new()).unwrap());
            let fabric = Fabric::new(FabricConfig::default());
            let intake = Intake::of_lanes(&switch, &uplink, &fabric).unwrap().remove(0);
            let other = UdpSocket::bind((there, 0)).unwrap();
            let address = format!("{here}:{}", vxlan::PORT);
            Self { intake, poller: Arc::new(Poller::new().unwrap()), other, address }
        }

        /// Returns what a worker sees of it.
        fn view(&self, worker: usize, now: Instant) -> Intakes {
            let intakes = std::slice::from_ref(&self.intake);
            Intakes::new(intakes, worker, &self.poller, Duration::ZERO, now)
        }

        /// Sends so many frames of 8 KiB through the tunnel.
        fn send(&self, count: usize) {
            let header = vxlan::header("9".parse().unwrap());
            let frame = [&header[..], &[2; 12], &[0; 8 << 10]].concat();
            for _ in 0..count {
                self.other.send_to(&frame, &self.address).unwrap();
            }
        }

        /// Takes events.
        fn events(&self) -> Vec<Source> {
            self.poller.wait(Some(Duration::ZERO)).unwrap()
        }
    }

    #[test]
    fn one_worker_has_it_while_it_serves_a_guest_of_the_network() {
        let (bench, now) = (Bench::new(0), Instant::now());
        let (mut one, mut other) = (bench.view(0, now), bench.view(1, now));
        one.join("another network", None);
        one.review(now).unwrap();
        assert!(bench.intake.is_of_thread());
        one.join("default", None);
        one.review(now).unwrap();
        assert!(!bench.intake.is_of_thread());
        other.join("default", None);
        other.review(now).unwrap();
        bench.send(1);
        assert_eq!(bench.events(), [Source::Uplink(0)]);
        other.notice(0);
        assert!(!other.turn() && !other.is_polling());
        one.leave("default", None);
        one.review(now).unwrap();
        assert!(bench.intake.is_of_thread());
        other.review(now).unwrap();
        assert!(!bench.intake.is_of_thread());
        drop(other);
        assert!(bench.intake.is_of_thread());
    }

    /// A worker that serves the guest of a lane takes the lane over from another worker, which has it again when the
    /// guest has gone.
    #[test]
    fn the_worker_of_the_lane_comes_first() {
        const GUEST: Option<Mac> = Some([0x52, 0x54, 0, 0, 0, 1]);
        let (bench, now) = (Bench::new(3), Instant::now());
        let (mut own, mut other) = (bench.view(0, now), bench.view(1, now));
        let has = |view: &Intakes| view.views[0].state == State::Armed;
        other.join("default", None);
        other.review(now).unwrap();
        assert!(has(&other));
        own.join("default", GUEST);
        own.review(now).unwrap();
        assert!(!has(&own), "the other one has it");
        other.review(now).unwrap();
        assert!(!has(&other) && bench.intake.is_of_thread());
        other.review(now).unwrap();
        assert!(!has(&other), "it is left to the worker whose it is");
        own.review(now).unwrap();
        assert!(has(&own));
        own.leave("default", GUEST);
        own.review(now).unwrap();
        other.review(now).unwrap();
        assert!(!has(&own) && has(&other));
        own.join("default", GUEST);
        drop(own);
        other.review(now).unwrap();
        assert!(has(&other), "a worker that has ended wants nothing");
    }

    #[test]
    fn it_is_polled_after_an_event() {
        let (bench, now) = (Bench::new(1), Instant::now());
        bench.send(1);
        let mut view = bench.view(0, now);
        view.join("default", None);
        view.review(now).unwrap();
        assert!(!view.turn() && !view.is_polling());
        // The worker is also told of frames that came before it took the intake over.
        assert_eq!(bench.events(), [Source::Uplink(0)]);
        view.notice(0);
        view.arm(now, false);
        assert!(view.is_polling(), "it has not looked since the event");
        assert!(view.turn());
        view.worked(now);
        view.arm(now, false);
        assert!(view.is_polling());
        assert!(!view.turn());
        view.arm(now, false);
        assert!(!view.is_polling());
        bench.send(1);
        assert_eq!(bench.events(), [Source::Uplink(0)]);
    }

    #[test]
    fn a_flood_is_left_to_the_thread_of_the_switch() {
        let (bench, now) = (Bench::new(2), Instant::now());
        let mut view = bench.view(0, now);
        view.join("default", None);
        view.review(now).unwrap();
        bench.send(1);
        view.notice(0);
        for _ in 0..MOST_PARTS {
            view.review(now).unwrap();
            assert!(!bench.intake.is_of_thread());
            bench.send(MANY);
            assert!(view.turn());
        }
        view.review(now).unwrap();
        assert!(bench.intake.is_of_thread() && !view.is_polling());
        view.review(now + RELIEF / 2).unwrap();
        assert!(bench.intake.is_of_thread());
        while bench.intake.turn(&mut Budget::default()) != Found::Nothing {}
        view.review(now + RELIEF).unwrap();
        assert!(!bench.intake.is_of_thread());
    }

    /// A worker that sleeps would not be told when the lane has an interface again. The test runs once more in a process
    /// that has a network namespace of its own.
    #[test]
    fn a_lane_without_an_interface_is_given_back() {
        const INSIDE: &str = "RDMAD_TEST_HAS_A_NAMESPACE";
        const TEST: &str = "worker::intakes::tests::a_lane_without_an_interface_is_given_back";
        let run = |words: &str| {
            let mut words = words.split(' ');
            Command::new(words.next().unwrap()).args(words).status().is_ok_and(|it| it.success())
        };
        if std::env::var_os(INSIDE).is_none() {
            if !run("unshare --net true") {
                return eprintln!("skipped: this process may not make a network namespace");
            }
            let mut again = Command::new("unshare");
            again.arg("--net").arg(std::env::current_exe().unwrap()).env(INSIDE, "1");
            let output = again.args([TEST, "--exact", "--nocapture"]).output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
            return;
        }
        assert!(run("ip tuntap add name tap0 mode tap") && run("ip link set tap0 up"));
        let spec: UplinkSpec = "tap=tap0".parse().unwrap();
        let (way, lanes, now) = (spec.way().unwrap(), NonZeroU8::MIN, Instant::now());
        let uplink = Uplink::open("default", &way, None, false, Some(&[]), lanes).unwrap();
        let switch = Arc::new(Switch::new(Some(uplink.clone()), Vec::new()).unwrap());
        let fabric = Fabric::new(FabricConfig::default());
        let intakes = Intake::of_lanes(&switch, &uplink, &fabric).unwrap();
        let poller = Arc::new(Poller::new().unwrap());
        let mut view = Intakes::new(&intakes, 0, &poller, Duration::ZERO, now);
        view.join("default", None);
        view.review(now).unwrap();
        assert!(!intakes[0].is_of_thread());
        assert!(run("ip link del tap0"));
        view.notice(0);
        // What had come before is taken first.
        while view.turn() {}
        assert!(intakes[0].is_of_thread() && !view.is_polling());
    }

    /// All lanes of a worker have the time of one, by turns, and a flood over all of them is left to others as soon.
    #[test]
    fn lanes_share_the_time_of_one() {
        let (benches, now) = ([Bench::new(4), Bench::new(5)], Instant::now());
        let intakes = benches.each_ref().map(|bench| Arc::clone(&bench.intake));
        let mut view = Intakes::new(&intakes, 0, &benches[0].poller, Duration::ZERO, now);
        view.join("default", None);
        view.review(now).unwrap();
        for round in 0..MOST_PARTS {
            view.review(now).unwrap();
            for (at, bench) in (0..).zip(&benches) {
                bench.send(MANY);
                view.notice(at);
            }
            assert!(view.turn());
            assert_eq!(view.first, usize::from(round % 2 == 0), "round {round}");
            view.arm(now, true);
            assert!(view.views.iter().all(|view| view.state == State::Runnable), "round {round}");
        }
        view.review(now).unwrap();
        assert!(intakes.iter().all(|intake| intake.is_of_thread()));
    }
}
