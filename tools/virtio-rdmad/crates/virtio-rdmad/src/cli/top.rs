// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdmad top`: shows what workers and guests of a running process do, again and again.

mod terminal;
mod view;

use std::io::{IsTerminal, Write};
use std::time::Instant;

use super::call::ask_summary;
use super::options::TopOptions;
use crate::control::report::Report;
use terminal::{Keys, Screen};

/// A report of the process, and its time.
struct Sample {
    report: Report,
    at: Instant,
}

impl Sample {
    /// Asks the process behind the control socket.
    fn take(options: &TopOptions) -> Result<Self, Box<dyn std::error::Error>> {
        let report = ask_summary(&options.running.control)?;
        Ok(Self { report, at: Instant::now() })
    }

    /// Returns lines that say what has happened since an earlier sample.
    fn since(&self, before: &Self) -> Vec<String> {
        view::lines(&before.report, &self.report, self.at.duration_since(before.at))
    }
}

/// Shows one view each interval, until the user ends that, the process ends, or nobody reads the output any more.
pub fn run(options: &TopOptions) -> Result<(), Box<dyn std::error::Error>> {
    let mut before = Sample::take(options)?;
    let is_live = std::io::stdout().is_terminal() && !options.once;
    let keys = Keys::open()?;
    let screen = if is_live { Some(Screen::open()?) } else { None };
    let mut is_first = true;
    // The next sample has its time from the last one, so that a slow answer makes no view late for ever.
    while keys.wait_until(before.at + options.interval)? {
        let now = Sample::take(options)?;
        let lines = now.since(&before);
        let shown = match &screen {
            Some(screen) => screen.show(&lines),
            None => print(&lines, is_first),
        };
        if shown.is_err() || options.once {
            break;
        }
        (before, is_first) = (now, false);
    }
    Ok(())
}

/// Prints lines behind those of the view before.
fn print(lines: &[String], is_first: bool) -> Result<(), std::io::Error> {
    let mut stdout = std::io::stdout();
    let gap = if is_first { "" } else { "\n" };
    writeln!(stdout, "{gap}{}", lines.join("\n"))?;
    stdout.flush()
}
