// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a device does wrong on purpose, and what the driver must do then.

use std::time::{Duration, Instant};

use hostile::Order;

use super::notes::Notes;

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
        }
    }
}

/// What a driver must do.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Answer {
    /// It refuses the device.
    Refuses,
    /// It goes on as if nothing had happened.
    Ignores,
    /// It resets the device.
    Resets,
    /// It waits for the reply, and then resets the device.
    Waits,
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

/// Returns a provocation by a configuration that no device may have.
const fn config(
    name: &'static str,
    clause: &'static [&'static str],
    order: &'static [&'static str],
) -> Provocation {
    Provocation { name, clauses: clause, answer: Answer::Refuses, orders: order }
}

/// Returns a provocation that a driver ignores.
const fn ignored(
    name: &'static str,
    clause: &'static [&'static str],
    order: &'static [&'static str],
) -> Provocation {
    Provocation { name, clauses: clause, answer: Answer::Ignores, orders: order }
}

/// All of them. The numbers in `config` are offsets in the configuration.
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
    Provocation {
        name: "device-fatal",
        clauses: &["V-EVT-05"],
        answer: Answer::Resets,
        orders: &[r#"{"forge": "event", "bytes": "0800000000000000", "used": 8}"#],
    },
    Provocation {
        name: "no-reply",
        clauses: &["V-FAIL-08", "V-FAIL-05", "V-FAIL-06"],
        answer: Answer::Waits,
        orders: &[r#"{"on": "control", "keep": true}"#],
    },
];

/// Returns the names of the provocations that are about a clause.
pub fn names(clause: &str) -> String {
    let about = ALL.iter().filter(|what| what.clauses.contains(&clause));
    about.map(|what| what.name).collect::<Vec<_>>().join(" or ")
}

/// Provokes a driver, and judges what it does.
#[derive(Debug)]
pub struct Provoker {
    what: Provocation,
    times: Times,
    /// Since when the device runs.
    begun: Option<Instant>,
    /// When the driver was provoked.
    done: Option<Instant>,
    /// Whether the driver has looked at the device; where it gets no reply, whether it has sent that command.
    was_there: bool,
    is_judged: bool,
    /// Whether the VMM has gone.
    is_left: bool,
}

impl Provoker {
    /// Returns one with the provocation of this name.
    pub fn new(name: &str, times: Times) -> Option<Self> {
        let what = *ALL.iter().find(|what| what.name == name)?;
        let (begun, done) = (None, None);
        Some(Self { what, times, begun, done, was_there: false, is_judged: false, is_left: false })
    }

    fn orders(&mut self) -> Vec<Order> {
        self.done = Some(Instant::now());
        self.what.orders.iter().filter_map(|line| Order::parse(line).ok()).collect()
    }

    /// Returns the orders that are due. The driver has sent so many commands.
    pub fn due(&mut self, commands: u64) -> Vec<Order> {
        let has_run = |begun: Instant| begun.elapsed() >= self.times.settled;
        let is_settled = commands >= self.times.commands && self.begun.is_some_and(has_run);
        if self.done.is_none() && (self.what.answer == Answer::Refuses || is_settled) {
            return self.orders();
        }
        Vec::new()
    }

    /// Notes that the driver looks at the device.
    pub fn note_look(&mut self) {
        self.was_there |= self.what.answer == Answer::Refuses;
    }

    /// Notes that the device runs.
    pub fn note_start(&mut self, notes: &mut Notes) {
        self.begun.get_or_insert_with(Instant::now);
        if self.what.answer == Answer::Refuses {
            self.fail(
                notes,
                self.what.clauses[0],
                "no driver for this device",
                "the driver starts it",
            );
        }
    }

    /// Notes that the driver sends a command.
    pub fn note_command(&mut self, notes: &mut Notes) {
        let Some(took) = self.done.map(|done| done.elapsed()) else { return };
        match self.what.answer {
            Answer::Resets if took > self.times.on_its_way => {
                let got = format!("a command after {} ms", took.as_millis());
                self.fail(notes, self.what.clauses[0], "a reset before the next command", &got);
            }
            // The first command after the order is the one that gets no reply.
            Answer::Waits if !self.was_there => {
                (self.was_there, self.done) = (true, Some(Instant::now()));
            }
            _ => {}
        }
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
            Answer::Refuses | Answer::Ignores => {}
            Answer::Waits if !self.was_there => {}
            Answer::Waits => self.judge_wait(notes, took),
            Answer::Resets => self.pass(notes),
        }
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
            _ => {}
        }
    }

    /// Judges what shows at the end.
    pub fn finish(&mut self, notes: &mut Notes) {
        if self.what.answer == Answer::Refuses && self.was_there {
            self.pass(notes);
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
    fn configurations_name_their_fields() {
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
        ];
        for (what, field) in ALL.iter().zip(fields) {
            let begin = format!("{{\"config\": [{field}, ");
            assert!(what.orders[0].starts_with(&begin), "{}: {field}", what.name);
        }
    }
}
