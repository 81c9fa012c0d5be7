// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The terminal of `virtio-rdmad top`.

use std::io::{stdin, stdout, Error, IsTerminal, Stdout, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::termios::{
    tcgetattr, tcgetwinsize, tcsetattr, LocalModes, OptionalActions, SpecialCodeIndex, Termios,
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Begins the other screen of a terminal, and hides the cursor.
const BEGIN: &str = "\x1b[?1049h\x1b[?25l";
/// Shows the cursor, and ends the other screen.
const END: &str = "\x1b[?25h\x1b[?1049l";
/// The byte that a terminal sends for Ctrl-C if it makes no signal of that.
const CTRL_C: u8 = 3;

/// The keys that the user types, and signals.
pub struct Keys {
    /// Readable once a signal has come that ends the program.
    signals: UnixStream,
    /// The modes that the terminal had, if standard input is one.
    before: Option<Termios>,
}

impl Keys {
    /// Makes the terminal pass keys on at once, and show none of them, until this is dropped.
    pub fn open() -> Result<Self, Error> {
        let (signals, sender) = UnixStream::pair()?;
        for signal in [SIGHUP, SIGINT, SIGTERM] {
            signal_hook::low_level::pipe::register(signal, sender.try_clone()?)?;
        }
        let before = if stdin().is_terminal() && stdout().is_terminal() {
            Some(tcgetattr(stdin())?)
        } else {
            None
        };
        if let Some(before) = &before {
            let mut modes = before.clone();
            modes.local_modes &= !(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG);
            modes.special_codes[SpecialCodeIndex::VMIN] = 1;
            modes.special_codes[SpecialCodeIndex::VTIME] = 0;
            tcsetattr(stdin(), OptionalActions::Flush, &modes)?;
        }
        Ok(Self { signals, before })
    }

    /// Waits until a time. Returns whether the program is to go on then: the user has not typed q or Ctrl-C, and no
    /// signal has come.
    pub fn wait_until(&self, time: Instant) -> Result<bool, Error> {
        let stdin = stdin();
        loop {
            let mut fds = vec![PollFd::new(&self.signals, PollFlags::IN)];
            if self.before.is_some() {
                fds.push(PollFd::new(&stdin, PollFlags::IN));
            }
            let left = time.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
            match poll(&mut fds, Some(&timeout)) {
                Ok(0) => return Ok(true),
                Ok(_) if !fds[0].revents().is_empty() => return Ok(false),
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            let mut typed = [0; 64];
            let len = rustix::io::read(&stdin, &mut typed)?;
            // A terminal that is gone has no more keys.
            if len == 0 || typed[..len].iter().any(|key| matches!(*key, b'q' | b'Q' | CTRL_C)) {
                return Ok(false);
            }
        }
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = tcsetattr(stdin(), OptionalActions::Flush, before);
        }
    }
}

/// The other screen of the terminal, which is there until this is dropped.
pub struct Screen(Stdout);

impl Screen {
    /// Makes the terminal show its other screen.
    pub fn open() -> Result<Self, Error> {
        let screen = Self(stdout());
        screen.write(BEGIN)?;
        Ok(screen)
    }

    /// Shows lines, as much of them as the terminal has room for.
    pub fn show(&self, lines: &[String]) -> Result<(), Error> {
        let (rows, columns) = tcgetwinsize(&self.0)
            .ok()
            .map(|size| (size.ws_row.into(), size.ws_col.into()))
            .filter(|(rows, columns)| *rows != 0 && *columns != 0)
            .unwrap_or((24, 80));
        self.write(&frame(lines, rows, columns))
    }

    fn write(&self, text: &str) -> Result<(), Error> {
        let mut stdout = self.0.lock();
        stdout.write_all(text.as_bytes())?;
        stdout.flush()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.write(END);
    }
}

/// Returns what replaces all that a terminal of this size shows by lines.
fn frame(lines: &[String], rows: usize, columns: usize) -> String {
    let cut = |line: &str| line.chars().take(columns).collect::<String>();
    let mut shown: Vec<_> = lines.iter().take(rows).map(|line| cut(line)).collect();
    if lines.len() > rows {
        let more = lines.len() + 1 - rows;
        shown.truncate(rows.saturating_sub(1));
        shown.push(cut(&format!("... {more} more")));
    }
    // Each line overwrites the one that is there, and the rest of that goes; then what is below goes.
    format!("\x1b[H{}\x1b[K\x1b[J", shown.join("\x1b[K\r\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_fits_the_terminal() {
        let lines: Vec<_> = ["one", "two", "three", "four"].map(str::to_owned).into();
        assert_eq!(frame(&lines[..2], 2, 2), "\x1b[Hon\x1b[K\r\ntw\x1b[K\x1b[J");
        assert_eq!(frame(&lines, 3, 80), "\x1b[Hone\x1b[K\r\ntwo\x1b[K\r\n... 2 more\x1b[K\x1b[J");
        assert_eq!(frame(&lines, 4, 80).matches('\n').count(), 3);
        assert_eq!(frame(&lines, 1, 5), "\x1b[H... 4\x1b[K\x1b[J");
    }
}
