// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a device does wrong on purpose, and what the driver must do then.

use std::time::{Duration, Instant};

use abi::*;
use hostile::Order;
use virtio_transport::Deed;
use zerocopy::FromBytes as _;

use super::notes::Notes;
use super::requests::{self, Kind};
use super::setup::{DRIVER_OK, FEATURES_OK};
use crate::port::F_ORDER_PLATFORM;

/// The number of a CQ that no device can have.
const NO_CQ: u32 = 0x7fff_ffff;
/// How often a device asks for a reset that keeps asking.
const ASKS: usize = 4;

/// What is looked at.
const WHAT: &str = "what the driver does";

/// When the driver is provoked, and how long the provoker waits.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// How many commands the driver sends before it is provoked.
    pub commands: u64,
    /// How long the driver runs before it is provoked.
    pub settled: Duration,
    /// How long a driver that must go on is watched.
    pub watched: Duration,
    /// How long a command may be on its way that the driver has sent before it learns that the device has failed.
    pub on_its_way: Duration,
    /// The least time after which a driver resets a device that does not reply, by V-FAIL-05, the one that V-FAIL-06
    /// asks for, and twice that, which is the most.
    pub silence: [Duration; 3],
    /// How much earlier than that an answer in time may seem to be, because the device took the request late.
    pub slack: Duration,
    /// The number by which the times of orders are divided.
    pub haste: u64,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            commands: 4,
            settled: Duration::from_secs(1),
            watched: Duration::from_secs(3),
            on_its_way: Duration::from_secs(5),
            silence: [30, 60, 120].map(Duration::from_secs),
            slack: Duration::from_millis(500),
            haste: 1,
        }
    }
}

/// What a driver must do.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Answer {
    /// It refuses the device.
    Refuses,
    /// It works with the device.
    Works,
    /// It does not start the device.
    Leaves,
    /// It goes on as if nothing had happened.
    Ignores,
    /// It resets the device.
    Resets,
    /// It resets the device, and begins again.
    Returns,
    /// It resets the device each time, and waits longer before that than the time before.
    BacksOff,
    /// It waits for the reply, and then resets the device.
    Waits,
    /// It waits for the reply, and goes on.
    IsPatient,
    /// It does not use the number that the reply to this command has.
    Shuns(u32, Kind),
    /// It sends QUERY_PORT.
    Asks,
    /// A device that only watches judges it.
    IsJudged,
}

impl Answer {
    /// Returns whether the device is wrong from the start.
    fn is_at_start(self) -> bool {
        matches!(self, Self::Refuses | Self::Works | Self::Leaves)
    }

    /// Returns whether only a driver that reads the device status from the device can give it.
    fn is_by_status(self) -> bool {
        matches!(self, Self::Leaves | Self::Returns | Self::BacksOff | Self::IsJudged)
    }
}

/// Something that a device does wrong.
#[derive(Clone, Copy, Debug)]
pub struct Provocation {
    /// The name.
    pub name: &'static str,
    /// The clauses that it is about.
    pub clauses: &'static [&'static str],
    answer: Answer,
    /// The orders that the device gets.
    orders: &'static [&'static str],
}

type Strs = &'static [&'static str];

/// Returns a provocation by these orders.
const fn by(name: &'static str, clauses: Strs, answer: Answer, orders: Strs) -> Provocation {
    Provocation { name, clauses, answer, orders }
}

/// Returns a provocation by a configuration that no device may have.
const fn config(name: &'static str, clauses: Strs, orders: Strs) -> Provocation {
    by(name, clauses, Answer::Refuses, orders)
}

/// Returns a provocation that a driver ignores.
const fn ignored(name: &'static str, clauses: Strs, orders: Strs) -> Provocation {
    by(name, clauses, Answer::Ignores, orders)
}

/// DEVICE_FATAL.
const FATAL: &str = r#"{"forge": "event", "bytes": "0800000000000000", "used": 8}"#;

/// All of them. The numbers in `config` are offsets in the configuration, `late` and `late_reset` are milliseconds.
pub const ALL: &[Provocation] = &[
    config("config-magic", &["V-CFG-02"], &[r#"{"config": [4, "00000000"]}"#]),
    config("config-revision", &["V-CFG-03"], &[r#"{"config": [28, "02000000"]}"#]),
    config("config-ports", &["V-CFG-05"], &[r#"{"config": [0, "02000000"]}"#]),
    config("config-page-sizes", &["V-CFG-06"], &[r#"{"config": [40, "0000200000000000"]}"#]),
    config("config-no-qps", &["V-CFG-07"], &[r#"{"config": [164, "00000000"]}"#]),
    config("config-no-mrs", &["V-CFG-08"], &[r#"{"config": [84, "00000000"]}"#]),
    config("config-many-queues", &["V-CFG-09"], &[r#"{"config": [160, "00100000"]}"#]),
    config("config-no-vectors", &["V-CFG-10"], &[r#"{"config": [160, "00000000"]}"#]),
    config("config-odd-cqs", &["V-CFG-11"], &[r#"{"config": [176, "d00f0000"]}"#]),
    config("config-odd-srqs", &["V-CFG-12"], &[r#"{"config": [188, "d0030000"]}"#]),
    by(
        "config-other-maker",
        &["V-CFG-16"],
        Answer::Works,
        &[
            r#"{"config": [16, "010203040506070809000000"]}"#,
            r#"{"config": [200, "0100020003000000"]}"#,
        ],
    ),
    by("order-platform", &["V-FEAT-09"], Answer::Works, &[r#"{"require": 36}"#]),
    by("features-refused", &["V-INIT-01"], Answer::Leaves, &[r#"{"require": 63}"#]),
    ignored(
        "event-unknown",
        &["V-EVT-02"],
        &[r#"{"forge": "event", "bytes": "e803000001000000", "used": 8}"#],
    ),
    ignored(
        "event-of-no-object",
        &["V-EVT-03"],
        &[r#"{"forge": "event", "bytes": "01000000ffff0f00", "used": 8}"#],
    ),
    ignored(
        "completion-of-no-cq",
        &["V-CQ-24"],
        &[r#"{"forge": "comp", "bytes": "ffff0f0000000000", "used": 8}"#],
    ),
    by(
        "event-of-the-port",
        &["V-EVT-04"],
        Answer::Asks,
        &[r#"{"forge": "event", "bytes": "0900000001000000", "used": 8}"#],
    ),
    by("device-fatal", &["V-EVT-05"], Answer::Resets, &[FATAL]),
    by("needs-reset", &["V-FAIL-02"], Answer::Returns, &[r#"{"needs_reset": 1}"#]),
    by("needs-reset-again", &["V-FAIL-03"], Answer::BacksOff, &[r#"{"needs_reset": 4}"#]),
    by("reset-late", &["V-RST-01"], Answer::IsJudged, &[r#"{"late_reset": 5000}"#, FATAL]),
    by(
        "reply-status",
        &["V-CTRL-01"],
        Answer::Shuns(VIRTIO_RDMA_CMD_CREATE_PD, Kind::Pd),
        &[r#"{"on": "control", "command": 4, "write": [[0, "c8"]]}"#],
    ),
    by(
        "reply-number",
        &["V-CTRL-03"],
        Answer::Shuns(VIRTIO_RDMA_CMD_CREATE_RING_CQ, Kind::Cq),
        &[r#"{"on": "control", "command": 32, "write": [[1, "ffffff7f"]]}"#],
    ),
    by("reply-late", &["V-FAIL-05"], Answer::IsPatient, &[r#"{"on": "control", "late": 29000}"#]),
    by(
        "reply-very-late",
        &["V-FAIL-05", "V-FAIL-06"],
        Answer::IsPatient,
        &[r#"{"on": "control", "late": 59000}"#],
    ),
    by(
        "no-reply",
        &["V-FAIL-08", "V-FAIL-05", "V-FAIL-06"],
        Answer::Waits,
        &[r#"{"on": "control", "keep": true}"#],
    ),
];

/// Returns the names of the provocations that are about a clause.
pub fn names(clause: &str) -> String {
    let about = ALL.iter().filter(|what| what.clauses.contains(&clause));
    about.map(|what| what.name).collect::<Vec<_>>().join(" or ")
}

/// Provokes a driver, and judges what it does.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug)]
pub struct Provoker {
    what: Provocation,
    times: Times,
    /// Since when the device runs.
    begun: Option<Instant>,
    /// When the driver was provoked.
    done: Option<Instant>,
    /// Whether the driver has looked at the device; where a reply is wrong, whether the driver has sent that command;
    /// where the driver is to reset the device and begin again, whether it has reset the device.
    was_there: bool,
    /// The number that the driver must not use.
    wrong: Option<u32>,
    /// How late a reply is.
    late: Duration,
    /// When the device has asked for a reset, and how long the driver has waited each time.
    asked: Option<Instant>,
    waits: Vec<Duration>,
    /// Whether the driver reads the device status from the device.
    sees_status: bool,
    is_judged: bool,
    /// Whether the VMM has gone.
    is_left: bool,
}

impl Provoker {
    /// Returns one with the provocation of this name.
    pub fn new(name: &str, times: Times) -> Option<Self> {
        let what = *ALL.iter().find(|what| what.name == name)?;
        Some(Self {
            what,
            times,
            begun: None,
            done: None,
            was_there: false,
            wrong: None,
            late: Duration::ZERO,
            asked: None,
            waits: Vec::new(),
            sees_status: false,
            is_judged: false,
            is_left: false,
        })
    }

    /// Notes that the driver reads the device status from the device.
    pub fn set_sees_status(&mut self) {
        self.sees_status = true;
    }

    /// Returns the feature bits that the device offers for the provocation.
    pub fn offers(&self) -> u64 {
        if self.what.clauses == ["V-FEAT-09"] {
            F_ORDER_PLATFORM
        } else {
            0
        }
    }

    fn orders(&mut self) -> Vec<Order> {
        let now = Instant::now();
        (self.done, self.asked) = (Some(now), Some(now));
        let lines = self.what.orders.iter();
        lines.filter_map(|line| Order::parse(line).ok()).map(|order| self.hasten(order)).collect()
    }

    /// Shortens the times of an order.
    fn hasten(&mut self, mut order: Order) -> Order {
        match &mut order {
            Order::LateReset(time) => *time /= self.times.haste,
            Order::Rule(rule) => {
                rule.late = rule.late.map(|late| late / self.times.haste);
                self.late = Duration::from_millis(rule.late.unwrap_or(0));
            }
            _ => {}
        }
        order
    }

    /// Returns the orders that are due. The driver has sent so many commands.
    pub fn due(&mut self, commands: u64) -> Vec<Order> {
        let has_run = |begun: Instant| begun.elapsed() >= self.times.settled;
        let is_settled = commands >= self.times.commands && self.begun.is_some_and(has_run);
        let is_possible = self.sees_status || !self.what.answer.is_by_status();
        let is_due = self.what.answer.is_at_start() || is_settled;
        if self.done.is_none() && is_possible && is_due {
            return self.orders();
        }
        Vec::new()
    }

    /// Notes what the driver does at the transport.
    pub fn note_deed(&mut self, notes: &mut Notes, deed: Deed) {
        match (self.what.answer, deed) {
            (Answer::Refuses, Deed::ReadConfig { .. }) => self.was_there = true,
            (Answer::Leaves, Deed::WriteStatus { status, .. }) => {
                self.was_there |= status & FEATURES_OK != 0;
                if status & DRIVER_OK != 0 {
                    let expected = "no DRIVER_OK, because the device has refused the features";
                    self.fail(notes, self.what.clauses[0], expected, "DRIVER_OK");
                }
            }
            _ => {}
        }
    }

    /// Notes that the device runs.
    pub fn note_start(&mut self, notes: &mut Notes) {
        self.begun.get_or_insert_with(Instant::now);
        match self.what.answer {
            Answer::Refuses => {
                let expected = "no driver for this device";
                self.fail(notes, self.what.clauses[0], expected, "the driver starts it");
            }
            Answer::Returns if self.was_there => self.pass(notes),
            Answer::BacksOff if std::mem::take(&mut self.was_there) => {
                self.asked = Some(Instant::now());
            }
            _ => {}
        }
    }

    /// Notes that a work request of the driver has completed.
    pub fn note_work(&mut self, notes: &mut Notes) {
        if self.what.answer == Answer::Works {
            self.pass(notes);
        }
    }

    /// Notes that the driver sends a command.
    pub fn note_command(&mut self, notes: &mut Notes, number: u32, body: &[u8]) {
        let Some(took) = self.done.map(|done| done.elapsed()) else { return };
        match self.what.answer {
            Answer::Resets if took > self.times.on_its_way => {
                let got = format!("a command after {} ms", took.as_millis());
                self.fail(notes, self.what.clauses[0], "a reset before the next command", &got);
            }
            // The first command after the order is the one whose reply is late or does not come.
            Answer::Waits | Answer::IsPatient if !self.was_there => {
                (self.was_there, self.done) = (true, Some(Instant::now()));
            }
            Answer::Asks if number == VIRTIO_RDMA_CMD_QUERY_PORT => self.pass(notes),
            Answer::Shuns(_, kind) => {
                let named = requests::named(kind, number, body);
                if let Some(wrong) = self.wrong.filter(|wrong| named.contains(wrong)) {
                    let expected = format!("no use of the number {wrong}");
                    let got = format!("command {number}, which names it");
                    self.fail(notes, self.what.clauses[0], &expected, &got);
                }
            }
            _ => {}
        }
    }

    /// Notes the reply to a command, as it would be without the provocation. Returns whether the driver gets a wrong
    /// number in its place, or none, so that it knows nothing of the object.
    pub fn spoils(&mut self, number: u32, reply: &[u8]) -> bool {
        let Answer::Shuns(command, kind) = self.what.answer else { return false };
        if self.done.is_none() || self.was_there || command != number {
            return false;
        }
        let given = reply.get(1..).and_then(|body| u32::read_from_prefix(body).ok());
        self.wrong = if kind == Kind::Cq { Some(NO_CQ) } else { given.map(|(given, _)| given) };
        (self.was_there, self.done) = (true, Some(Instant::now()));
        true
    }

    /// Notes that the VMM has gone. What follows says nothing of the driver.
    pub fn note_leave(&mut self) {
        self.is_left = true;
    }

    /// Notes that the driver resets the device.
    pub fn note_reset(&mut self, notes: &mut Notes) {
        let Some(took) = self.done.map(|done| done.elapsed()).filter(|_| !self.is_left) else {
            return;
        };
        let got = format!("a reset after {} ms", took.as_millis());
        match self.what.answer {
            Answer::Ignores if took < self.times.watched => {
                self.fail(notes, self.what.clauses[0], "no reset", &got);
            }
            Answer::Resets => self.pass(notes),
            Answer::Waits if self.was_there => self.judge_wait(notes, took),
            Answer::IsPatient if self.was_there && took < self.late => self.judge_wait(notes, took),
            Answer::Returns => self.was_there = true,
            Answer::BacksOff => self.judge_delay(notes),
            Answer::Shuns(..) if self.was_there => self.judge_shy(notes),
            _ => {}
        }
    }

    /// Judges a driver that resets the device because of a wrong reply. So it does not use a number that cannot be; but
    /// whether it would do the same after ERR does not show. After that, the number may be that of another object.
    fn judge_shy(&mut self, notes: &mut Notes) {
        if self.what.answer == Answer::Shuns(VIRTIO_RDMA_CMD_CREATE_RING_CQ, Kind::Cq) {
            self.pass(notes);
        }
        self.is_judged = true;
    }

    /// Judges how long the driver has waited before it has reset a device that keeps asking.
    fn judge_delay(&mut self, notes: &mut Notes) {
        self.was_there = true;
        self.waits.extend(self.asked.take().map(|asked| asked.elapsed()));
        if self.waits.len() != ASKS {
            return;
        }
        // The device did not keep asking when it asked for the first time.
        let grows = |waits: &[Duration]| waits[1] >= waits[0] + self.times.slack;
        if self.waits[1..].windows(2).all(grows) {
            return self.pass(notes);
        }
        let waits: Vec<u128> = self.waits.iter().map(Duration::as_millis).collect();
        self.miss(notes, "a longer wait before each reset", &format!("{waits:?} ms"));
    }

    /// Judges how long the driver has waited for a reply before it has reset the device.
    fn judge_wait(&mut self, notes: &mut Notes, took: Duration) {
        let got = format!("a reset after {} ms", took.as_millis());
        let has_waited = |least: Duration| took + self.times.slack >= least;
        let [must, should] = [self.times.silence[0], self.times.silence[1]].map(has_waited);
        if !must {
            return self.fail(notes, "V-FAIL-05", "a wait of 30 seconds or more", &got);
        }
        if !should && !self.is_judged {
            self.step(notes);
            notes.miss("V-FAIL-06", WHAT, "a wait of 60 seconds", &got);
        }
        self.pass(notes);
    }

    /// Judges what shows by and by.
    pub fn look(&mut self, notes: &mut Notes) {
        let Some(took) = self.done.map(|done| done.elapsed()).filter(|_| !self.is_left) else {
            return;
        };
        match self.what.answer {
            Answer::Ignores if took >= self.times.watched => self.pass(notes),
            Answer::Waits if self.was_there && took > self.times.silence[2] => {
                self.fail(notes, self.what.clauses[0], "a reset within 120 seconds", "none");
            }
            Answer::IsPatient if self.was_there && took >= self.late + self.times.watched => {
                self.pass(notes);
            }
            Answer::Shuns(..) if self.was_there && took >= self.times.watched => self.pass(notes),
            Answer::Asks if took > self.times.on_its_way => {
                self.miss(notes, "QUERY_PORT", "no QUERY_PORT");
            }
            Answer::Returns if took > self.times.silence[1] => {
                self.miss(notes, "a reset, and a new beginning", "no new beginning");
            }
            _ => {}
        }
    }

    /// Judges what shows at the end. `is_in_vain`: a driver came, and has not started the device.
    pub fn finish(&mut self, notes: &mut Notes, is_in_vain: bool) {
        match self.what.answer {
            Answer::Refuses | Answer::Leaves if self.was_there => self.pass(notes),
            Answer::Works if is_in_vain => {
                let expected = "a driver that works with this device";
                self.fail(notes, self.what.clauses[0], expected, "it does not start the device");
            }
            _ => {}
        }
    }

    fn pass(&mut self, notes: &mut Notes) {
        if !std::mem::replace(&mut self.is_judged, true) {
            self.what.clauses.iter().for_each(|clause| notes.pass(clause));
        }
    }

    fn fail(&mut self, notes: &mut Notes, clause: &'static str, expected: &str, got: &str) {
        if !std::mem::replace(&mut self.is_judged, true) {
            self.step(notes);
            notes.fail(clause, WHAT, expected, got);
        }
    }

    /// Notes that the driver does not do what the clause says that it SHOULD do.
    fn miss(&mut self, notes: &mut Notes, expected: &str, got: &str) {
        if !std::mem::replace(&mut self.is_judged, true) {
            self.step(notes);
            notes.miss(self.what.clauses[0], WHAT, expected, got);
        }
    }

    fn step(&self, notes: &mut Notes) {
        notes.step(format!("provocation {}", self.what.name));
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use abi::virtio_rdma_config as Config;

    use super::*;

    #[test]
    fn each_order_can_be_read() {
        for what in ALL {
            for line in what.orders {
                assert!(Order::parse(line).is_ok(), "{}: {line}", what.name);
            }
        }
    }

    #[test]
    fn orders_name_their_fields_and_commands() {
        let fields = [
            offset_of!(Config, magic),
            offset_of!(Config, revision),
            offset_of!(Config, phys_port_cnt),
            offset_of!(Config, page_size_cap),
            offset_of!(Config, ring_max_qp),
            offset_of!(Config, max_mr),
            offset_of!(Config, num_comp_vectors),
            offset_of!(Config, num_comp_vectors),
            offset_of!(Config, ring_max_cqe),
            offset_of!(Config, max_srq_wr),
            offset_of!(Config, vendor_id),
        ];
        for (what, field) in ALL.iter().zip(fields) {
            let begin = format!("{{\"config\": [{field}, ");
            assert!(what.orders[0].starts_with(&begin), "{}: {field}", what.name);
        }
        let ends = [offset_of!(Config, vendor_part_id), offset_of!(Config, hw_ver)];
        assert_eq!(ends, [20, 24]);
        let maker = ALL.iter().find(|what| what.name == "config-other-maker").unwrap();
        let begin = format!("{{\"config\": [{}, ", offset_of!(Config, fw_ver));
        assert!(maker.orders[1].starts_with(&begin));
        for what in ALL {
            if let Answer::Shuns(command, _) = what.answer {
                assert!(
                    what.orders[0].contains(&format!("\"command\": {command},")),
                    "{}",
                    what.name
                );
            }
        }
        assert_eq!(1_u64 << 36, F_ORDER_PLATFORM);
    }
}
