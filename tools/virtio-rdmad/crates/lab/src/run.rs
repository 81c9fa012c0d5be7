// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs commands in guests.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::{stdin, IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use rustix::termios::{tcgetattr, tcgetwinsize, tcsetattr, OptionalActions, Termios};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGWINCH};

use crate::course::{Course, Step};
use crate::device;
use crate::error::{of_output, say, Error};
use crate::event::{self, Event};
use crate::guest::Guest;
use crate::job::{End, Job, Size, Tell};
use crate::options::{Guests, Run, Shell};
use crate::payload::Payload;
use crate::plan::Plan;

/// The signals that the commands get.
const SIGNALS: [i32; 3] = [SIGHUP, SIGINT, SIGTERM];
/// What a shell adds to the number of the signal that ended a command.
const BY_SIGNAL: u8 = 128;

/// What a guest runs, and on which terminal.
#[derive(Default)]
struct Task {
    /// The command and its arguments.
    command: Vec<String>,
    /// The size of its terminal.
    terminal: Option<Size>,
}

/// The number of a guest that has ended, and the exit status of its command.
type Ended = (u8, Result<u8, Error>);

/// Runs the commands in the guests, and returns the exit status of the lab.
pub fn run(options: &Run) -> Result<u8, Error> {
    let Run { guests, timeout, commands, command } = options;
    let mut course =
        Course::new(Instant::now(), timeout.map(|seconds| Duration::from_secs(seconds.into())));
    commands.check(guests.count)?;
    let tasks = (1..=guests.count).map(|guest| {
        let command = match commands.of(guest) {
            Some(line) => of_shell(line),
            None if command.is_empty() => {
                return Err(format!(
                    "guest {guest} has no command: give -- COMMAND, or --cmd{guest}"
                )
                .into());
            }
            None => command.iter().map(text).collect::<Result<_, _>>()?,
        };
        Ok(Task { command, terminal: None })
    });
    let mut running = start(guests, tasks.collect::<Result<_, Error>>()?)?;
    pass_signals(&running.guests, &SIGNALS)?;
    running.follow(&mut course)?;
    Ok(course.status())
}

/// Opens a shell in guest 1, and returns the exit status of the shell.
pub fn shell(options: &Shell) -> Result<u8, Error> {
    let Shell { guests, commands } = options;
    commands.check(guests.count)?;
    if commands.of(1).is_some() {
        return Err("--cmd1: guest 1 has the shell".into());
    }
    if !stdin().is_terminal() {
        return Err("the standard input is no terminal: `run` runs a command without one".into());
    }
    let task = |guest| match commands.of(guest) {
        _ if guest == 1 => {
            let shell = std::env::var("SHELL").unwrap_or_else(|_| "/bin/sh".to_owned());
            Task { command: vec![shell], terminal: size() }
        }
        Some(line) => Task { command: of_shell(line), terminal: None },
        None => Task::default(),
    };
    let _raw = Raw::set()?;
    let mut running = start(guests, (1..=guests.count).map(task).collect())?;
    let first = running.guests.get(..1).ok_or("there is no guest")?;
    pass_signals(first, &[SIGHUP, SIGTERM, SIGWINCH])?;
    // The shell goes on without a guest that fails.
    let mut statuses = BTreeMap::new();
    while !statuses.contains_key(&1) {
        statuses.extend(running.next(None)?);
    }
    let mut course = Course::new(Instant::now(), None);
    course.terminate(Instant::now());
    running.terminate()?;
    running.follow(&mut course)?;
    let statuses = statuses.into_values().collect::<Result<Vec<_>, _>>()?;
    statuses.first().copied().ok_or_else(|| "there is no guest".into())
}

/// Guests that run, and their devices. The fields are dropped in this order.
struct Running {
    /// Those that have not ended.
    guests: Vec<Guest>,
    events: Receiver<Event>,
    _devices: Vec<device::Device>,
    /// A kernel opens its initramfs after a while.
    _payload: Payload,
    _directory: tempfile::TempDir,
}

impl Running {
    /// Waits until all guests have ended, and ends them when that is their course.
    fn follow(&mut self, course: &mut Course) -> Result<(), Error> {
        loop {
            let next = course.next();
            for (guest, status) in self.next(next.map(|(at, _)| at))? {
                course.ended(Instant::now(), guest, status?);
            }
            if self.guests.is_empty() {
                return Ok(());
            }
            match course.next() {
                Some((at, Step::Terminate)) if at <= Instant::now() => {
                    say(&course.terminate(Instant::now()));
                    self.terminate()?;
                }
                Some((at, Step::Kill)) if at <= Instant::now() => self.kill(),
                _ => {}
            }
        }
    }

    /// Gives SIGTERM to the commands that run.
    fn terminate(&self) -> Result<(), Error> {
        let signal = u8::try_from(SIGTERM)?;
        self.guests.iter().for_each(|guest| guest.signal(signal));
        Ok(())
    }

    /// Ends the guests that run.
    fn kill(&mut self) {
        for guest in self.guests.drain(..) {
            say(&format!("{} still runs after SIGTERM, and is killed", guest.name()));
        }
    }

    /// Waits until a guest has ended, or some have, or until a time. Returns those that have ended.
    fn next(&mut self, until: Option<Instant>) -> Result<Vec<Ended>, Error> {
        loop {
            let mut ends = Vec::new();
            for guest in &mut self.guests {
                ends.extend(guest.try_wait()?.map(|end| (guest.number(), guest.name(), end)));
            }
            // Where output was not written, that is the reason, and not how the guest has ended.
            let mut is_news = false;
            while let Ok(event) = self.events.try_recv() {
                is_news = true;
                check(event)?;
            }
            let is_over = until.is_some_and(|until| until <= Instant::now());
            if !ends.is_empty() || is_over {
                self.guests.retain(|guest| ends.iter().all(|(ended, ..)| *ended != guest.number()));
                let of = |(number, name, end): (_, String, _)| (number, status(&name, end));
                return Ok(ends.into_iter().map(of).collect());
            }
            if !is_news {
                self.wait(until)?;
            }
        }
    }

    /// Waits for an event, or until a time.
    fn wait(&self, until: Option<Instant>) -> Result<(), Error> {
        let Some(until) = until else { return check(self.events.recv()?) };
        match self.events.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(event) => check(event),
            Err(RecvTimeoutError::Timeout) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Returns the error of which an event tells, if it does.
fn check(event: Event) -> Result<(), Error> {
    match event {
        Event::Child => Ok(()),
        Event::Output(error) => Err(of_output(&error)),
    }
}

/// Starts guests, a task for each.
fn start(options: &Guests, tasks: Vec<Task>) -> Result<Running, Error> {
    let payload = Payload::unpack()?;
    let parent = std::env::temp_dir();
    let directory = tempfile::Builder::new().prefix("virtio-rdma-lab.").tempdir_in(&parent);
    let directory = directory.map_err(|error| format!("TMPDIR, {}: {error}", parent.display()))?;
    let plans = (1..=options.count).map(|number| Plan::new(number, directory.path()));
    let plans = plans.collect::<Result<Vec<_>, _>>()?;
    let devices = device::start(&payload, &plans, options)?;
    let (sender, events) = channel();
    let mut guests = Vec::new();
    for (plan, task) in plans.iter().zip(tasks) {
        let job = job(options, plan, &plans, task)?;
        guests.push(Guest::boot(&payload, plan, options, &job, &sender)?);
    }
    event::notice_children(sender)?;
    Ok(Running { guests, events, _devices: devices, _payload: payload, _directory: directory })
}

/// Returns the exit status of a guest's command.
fn status(name: &str, end: End) -> Result<u8, Error> {
    match end {
        End::Exited(status) => Ok(status),
        End::Killed(signal) => Ok(BY_SIGNAL.saturating_add(signal)),
        End::Failed(why) => Err(format!("{name}: {why}").into()),
    }
}

/// Returns the command for a line of the shell.
fn of_shell(line: &str) -> Vec<String> {
    ["sh", "-c", line].map(str::to_owned).to_vec()
}

fn text(text: &OsString) -> Result<String, Error> {
    text.to_str()
        .map(str::to_owned)
        .ok_or_else(|| format!("{} is not UTF-8", text.to_string_lossy()).into())
}

/// Returns the job of a guest.
fn job(options: &Guests, plan: &Plan, plans: &[Plan], task: Task) -> Result<Job, Error> {
    let peers: Vec<_> = plans.iter().filter(|peer| peer.number != plan.number).collect();
    let peers = peers.iter().map(|peer| peer.address.as_str()).collect::<Vec<_>>().join(" ");
    let text = |text: &OsStr| text.to_str().map(str::to_owned);
    let mut environment: Vec<_> = std::env::vars_os()
        .filter_map(|(name, value)| Some((text(&name)?, text(&value)?)))
        .collect();
    environment.push(("GUEST".to_owned(), plan.number.to_string()));
    environment.push(("PEERS".to_owned(), peers));
    let directory = std::env::current_dir()?;
    if options.share && directory == Path::new("/") {
        return Err("--share: the working directory is /, which guests cannot write to".into());
    }
    Ok(Job {
        command: task.command,
        directory,
        is_shared: options.share,
        environment,
        hosts: plans.iter().map(|plan| (plan.name(), plan.address.clone())).collect(),
        number: plan.number,
        clock: clock(),
        modules: options.modules.clone(),
        terminal: task.terminal,
    })
}

/// Returns the rate of the processors' clock in MHz, if the machine tells.
fn clock() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("cpu MHz"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Returns the size of the user's terminal.
fn size() -> Option<Size> {
    let size = tcgetwinsize(stdin()).ok()?;
    Some(Size { rows: size.ws_row, columns: size.ws_col })
}

/// The user's terminal, while each key goes to the guest as it is.
struct Raw(Termios);

impl Raw {
    fn set() -> Result<Self, Error> {
        let before = tcgetattr(stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(stdin(), OptionalActions::Now, &raw)?;
        Ok(Self(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = tcsetattr(stdin(), OptionalActions::Now, &self.0);
    }
}

/// Passes signals of this process to the commands in the guests from now on.
fn pass_signals(guests: &[Guest], signals: &[i32]) -> Result<(), Error> {
    for signal in signals {
        let (mut read, write) = UnixStream::pair()?;
        signal_hook::low_level::pipe::register(*signal, write)?;
        let mut lines = guests.iter().map(Guest::signals).collect::<Result<Vec<_>, _>>()?;
        let signal = u8::try_from(*signal)?;
        std::thread::spawn(move || {
            while matches!(read.read(&mut [0]), Ok(1)) {
                let tell = Tell { signal, size: size().unwrap_or_default() };
                for line in &mut lines {
                    // A guest that has ended needs no signal.
                    let _ = line.write_all(&tell.to_bytes());
                }
            }
        });
    }
    Ok(())
}
