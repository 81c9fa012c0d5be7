// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! When the commands of a run have to end, and what its exit status is.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long the other commands may go on after one has failed. Within this time, RDMA tells them that their peer is gone,
/// and they can say so.
const GRACE: Duration = Duration::from_secs(10);
/// How long a command may take to end after SIGTERM.
const PATIENCE: Duration = Duration::from_secs(10);
/// The exit status of a run whose time is over, as that of timeout(1).
const LATE: u8 = 124;

/// What is to be done with the guests that still run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// Give SIGTERM to their commands.
    Terminate,
    /// Kill them.
    Kill,
}

/// The course of a run.
#[derive(Debug)]
pub struct Course {
    /// When its time is over.
    end: Option<Instant>,
    /// The exit statuses of the commands that ended before they got SIGTERM.
    statuses: BTreeMap<u8, u8>,
    /// When the first one failed, and its guest.
    failed: Option<(Instant, u8)>,
    /// When the others got SIGTERM.
    terminated: Option<Instant>,
    is_late: bool,
}

impl Course {
    /// Begins a run, which may take so long.
    pub fn new(now: Instant, timeout: Option<Duration>) -> Self {
        Self {
            end: timeout.map(|timeout| now + timeout),
            statuses: BTreeMap::new(),
            failed: None,
            terminated: None,
            is_late: false,
        }
    }

    /// Notes that the command of a guest has ended.
    pub fn ended(&mut self, now: Instant, guest: u8, status: u8) {
        // What SIGTERM does to a command is not its failure.
        if self.terminated.is_none() {
            self.statuses.insert(guest, status);
            if status != 0 {
                self.failed.get_or_insert((now, guest));
            }
        }
    }

    /// Returns the next step, and when it is due, if other guests still run then.
    pub fn next(&self) -> Option<(Instant, Step)> {
        if let Some(terminated) = self.terminated {
            return Some((terminated + PATIENCE, Step::Kill));
        }
        let grace = self.failed.map(|(at, _)| at + GRACE);
        let at = grace.into_iter().chain(self.end).min()?;
        Some((at, Step::Terminate))
    }

    /// Notes that the commands get SIGTERM, and returns why.
    pub fn terminate(&mut self, now: Instant) -> String {
        self.terminated = Some(now);
        self.is_late = self.end.is_some_and(|end| end <= now);
        match self.failed {
            Some((_, guest)) if !self.is_late => {
                let status = self.statuses.get(&guest).copied().unwrap_or_default();
                format!("guest{guest} has failed with status {status}: the others get SIGTERM")
            }
            _ => "the time is over: what still runs gets SIGTERM".to_owned(),
        }
    }

    /// Returns the exit status of the run.
    pub fn status(&self) -> u8 {
        if self.is_late {
            return LATE;
        }
        self.statuses.values().copied().find(|status| *status != 0).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_status_is_that_of_the_first_guest_that_failed() {
        let start = Instant::now();
        let mut course = Course::new(start, None);
        assert_eq!((course.next(), course.status()), (None, 0));
        course.ended(start, 2, 0);
        assert_eq!((course.next(), course.status()), (None, 0));
        course.ended(start, 3, 6);
        course.ended(start + SECOND, 1, 5);
        assert_eq!(course.status(), 5);
        assert_eq!(course.next(), Some((start + GRACE, Step::Terminate)));
    }

    #[test]
    fn a_failure_ends_the_others() {
        let start = Instant::now();
        let mut course = Course::new(start, Some(60 * SECOND));
        course.ended(start + SECOND, 2, 3);
        let (at, step) = course.next().unwrap();
        assert_eq!((at, step), (start + SECOND + GRACE, Step::Terminate));
        let why = course.terminate(at);
        assert!(why.starts_with("guest2 has failed with status 3"), "{why}");
        assert_eq!(course.next(), Some((at + PATIENCE, Step::Kill)));
        course.ended(at, 1, 143);
        assert_eq!(course.status(), 3);
    }

    #[test]
    fn a_run_ends_when_its_time_is_over() {
        let start = Instant::now();
        let mut course = Course::new(start, Some(5 * SECOND));
        assert_eq!(course.next(), Some((start + 5 * SECOND, Step::Terminate)));
        course.ended(start + SECOND, 1, 1);
        let (at, step) = course.next().unwrap();
        assert_eq!((at, step), (start + 5 * SECOND, Step::Terminate));
        let why = course.terminate(at);
        assert!(why.starts_with("the time is over"), "{why}");
        course.ended(at, 2, 0);
        assert_eq!(course.next(), Some((at + PATIENCE, Step::Kill)));
        assert_eq!(course.status(), LATE);
    }
}
