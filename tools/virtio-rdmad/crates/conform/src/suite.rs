// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The tests, and how they run.

use std::any::Any;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::rc::Rc;
use std::time::{Duration, Instant};

use abi::{closed, VIRTIO_RDMA_F_RINGS, VIRTIO_RDMA_F_SRQ, VIRTIO_RDMA_F_XRC};
use rand::SeedableRng as _;
use rand_xorshift::XorShiftRng;
use testkit::command::Gid;

use crate::bench::Bench;
use crate::clauses;
use crate::driver::{Driver, MEMORY};
use crate::journal::Journal;
use crate::outcome::{Failure, Outcome, Stop};
use crate::port::{Attach, Memory, Port, F_ACCESS_PLATFORM, F_ORDER_PLATFORM, F_VERSION_1};
use crate::test::{Test, Where};

/// One run of a test.
#[derive(Clone, Copy)]
pub struct Run {
    /// The test.
    pub test: &'static Test,
    /// Whether it runs on two members.
    pub on_two: bool,
}

impl Run {
    /// Returns the name of the run.
    pub fn name(&self) -> String {
        let path = self.test.name.rsplit("::").take(2).collect::<Vec<_>>();
        let name = format!("{}.{}", path[1], path[0]);
        match self.test.place {
            Where::Ends if self.on_two => format!("{name}.two"),
            Where::Ends => format!("{name}.loopback"),
            _ => name,
        }
    }
}

/// Returns all runs of all tests.
pub fn all() -> Vec<Run> {
    let mut runs = Vec::new();
    for test in clauses::families().into_iter().flatten() {
        if test.place != Where::Two {
            runs.push(Run { test, on_two: false });
        }
        if test.place != Where::One {
            runs.push(Run { test, on_two: true });
        }
    }
    runs
}

/// The result of a run.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// The device keeps all clauses that the run has judged.
    Pass,
    /// The device breaks a clause.
    Fail(Failure),
    /// The run has judged nothing, for this reason.
    NotJudged(String),
}

/// What a run has found.
pub struct Finding {
    /// The name of the run.
    pub name: String,
    /// The clauses that it is to judge.
    pub clauses: &'static [&'static str],
    /// The result.
    pub verdict: Verdict,
    /// The clauses that were judged, and are kept.
    pub passed: Vec<&'static str>,
    /// What a SHOULD asks for and the device does not do.
    pub remarks: Vec<String>,
    /// How long it took.
    pub took: Duration,
}

/// What holds for all runs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How long a test may wait.
    pub timeout: Duration,
    /// How long a command may take: 30 seconds, by D-FAIL-08.
    pub silence: Duration,
    /// The seed of all that is random.
    pub seed: u64,
    /// The GIDs of the members.
    pub gids: [Gid; 2],
}

impl Default for Settings {
    fn default() -> Self {
        let gids = [testkit::gid(1), testkit::gid(2)];
        let (timeout, silence) = (Duration::from_secs(10), Duration::from_secs(30));
        Self { timeout, silence, seed: 1, gids }
    }
}

/// A device that is judged, and the connection to it.
struct Member {
    attach: Box<dyn Attach>,
    memory: Rc<Memory>,
    port: Option<Box<dyn Port>>,
    /// Why the device is gone.
    gone: Option<String>,
}

/// The suite.
pub struct Suite {
    settings: Settings,
    members: Vec<Member>,
}

impl Suite {
    /// Returns the suite for one device or two.
    pub fn new(settings: Settings, devices: Vec<Box<dyn Attach>>) -> Self {
        let member = |attach| {
            let memory = Rc::new(Memory::new(MEMORY));
            Member { attach, memory, port: None, gone: None }
        };
        Self { settings, members: devices.into_iter().map(member).collect() }
    }

    /// Runs a test.
    pub fn run(&mut self, run: &Run) -> Finding {
        let begin = Instant::now();
        let journal = Rc::new(Journal::new(
            run.test.clauses[0],
            self.settings.timeout,
            self.settings.silence,
        ));
        let result = self.judge(run, &journal);
        let verdict = match result {
            Ok(()) => Verdict::Pass,
            Err(Stop::Failed(failure)) => Verdict::Fail(*failure),
            Err(Stop::NotJudged(reason)) => Verdict::NotJudged(reason),
            Err(Stop::Gone(reason)) => self.note_gone(&journal, &reason),
        };
        Finding {
            name: run.name(),
            clauses: run.test.clauses,
            verdict,
            passed: journal.passed().into_iter().collect(),
            remarks: journal.remarks(),
            took: begin.elapsed(),
        }
    }

    /// Forgets the connections, because one has ended. A device that ends while a test runs fails the test.
    fn note_gone(&mut self, journal: &Journal, reason: &str) -> Verdict {
        for member in &mut self.members {
            member.port = None;
        }
        let failure =
            journal.failure(journal.clause(), "device", "it goes on".into(), reason.into());
        match failure {
            Stop::Failed(failure) => Verdict::Fail(*failure),
            _ => Verdict::NotJudged(reason.into()),
        }
    }

    /// Runs a test on devices that were reset.
    fn judge(&mut self, run: &Run, journal: &Rc<Journal>) -> Outcome {
        let count = 1 + usize::from(run.on_two);
        if self.members.len() < count {
            return Err(Stop::NotJudged("needs two devices".into()));
        }
        // Also the other member forgets what the last test has done.
        let mut drivers = Vec::new();
        for index in 0..self.members.len() {
            drivers.push(self.fresh(index, journal)?);
        }
        let mut others = drivers.split_off(count);
        let mut bench = Bench {
            members: drivers,
            journal: Rc::clone(journal),
            random: XorShiftRng::seed_from_u64(self.seed_of(run)),
            far: count - 1,
        };
        let result = catch_unwind(AssertUnwindSafe(|| start_and_run(run.test, &mut bench)));
        let result = result.unwrap_or_else(|panic| Err(Stop::NotJudged(text_of(&*panic))));
        let was_right = result.is_ok() || matches!(result, Err(Stop::NotJudged(_)));
        for (member, driver) in
            self.members.iter_mut().zip(bench.members.drain(..).chain(others.drain(..)))
        {
            // A device that broke a clause may be in any state: the next test attaches to it again.
            member.port = was_right.then_some(driver.port);
        }
        result
    }

    fn seed_of(&self, run: &Run) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.settings.seed, run.name()).hash(&mut hasher);
        hasher.finish()
    }

    /// Returns the driver of a device that was reset.
    fn fresh(&mut self, index: usize, journal: &Rc<Journal>) -> Outcome<Driver> {
        let member = &mut self.members[index];
        if let Some(reason) = &member.gone {
            return Err(Stop::NotJudged(format!("the device is gone: {reason}")));
        }
        // A device that knows no reset, or fails it, is one that a VMM attaches to again.
        let kept = member.port.take().and_then(|mut port| port.reset().is_ok().then_some(port));
        let port = kept.map_or_else(|| member.attach.attach(&member.memory), Ok);
        let port = port.map_err(|stop| {
            let reason = if let Stop::Gone(reason) = stop { reason } else { String::new() };
            member.gone = Some(reason.clone());
            Stop::NotJudged(format!("the device is gone: {reason}"))
        })?;
        let gid = self.settings.gids[index];
        let mut driver = Driver::new(port, Rc::clone(&member.memory), Rc::clone(journal), gid);
        driver.clear_memory();
        Ok(driver)
    }
}

/// Starts the members of a test, runs it, and checks what holds at its end.
fn start_and_run(test: &Test, bench: &mut Bench) -> Outcome {
    for driver in &mut bench.members {
        let offered = driver.port.offered()?;
        let features = features_of(test, offered)?;
        driver.read_config()?;
        driver.wanted = features;
        if test.starts {
            driver.begin()?;
        }
    }
    (test.run)(bench)?;
    bench.members.iter_mut().try_for_each(Driver::finish)
}

/// Returns the features with which a test runs.
fn features_of(test: &Test, offered: u64) -> Outcome<u64> {
    let base = F_VERSION_1 | 1 << VIRTIO_RDMA_F_RINGS;
    let of_transport = offered & (F_ACCESS_PLATFORM | F_ORDER_PLATFORM);
    let mut wanted = base | of_transport;
    for feature in test.features {
        wanted |= 1 << feature;
        if [VIRTIO_RDMA_F_XRC, abi::VIRTIO_RDMA_F_SRQ_RESIZE].contains(feature) {
            wanted |= 1 << VIRTIO_RDMA_F_SRQ;
        }
        if *feature == abi::VIRTIO_RDMA_F_ATOMICS_GLOBAL {
            wanted |= 1 << abi::VIRTIO_RDMA_F_ATOMICS;
        }
    }
    let missing = wanted & !offered & !base;
    if missing != 0 {
        return Err(Stop::NotJudged(format!(
            "not offered: feature bit {}",
            missing.trailing_zeros()
        )));
    }
    debug_assert_eq!(closed(wanted), wanted);
    Ok(wanted)
}

/// Returns the text of a panic, which is an error of the suite.
fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("the suite itself failed: {}", text.unwrap_or("no text"))
}
