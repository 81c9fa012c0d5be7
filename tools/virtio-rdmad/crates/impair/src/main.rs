// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdma-impair`: a bad network cable between two taps, to test devices and programs.
//!
//! It brings frames from either tap to the other, and packets of RoCE v2 meet the faults of the command line
//! ([`Options`], [`Faults`]) on the way. A signal ends it, and it prints what it has counted ([`Counters`]).
//!
//! With `--json` each line of its standard input is a JSON object of faults that packets meet from then on. It
//! answers each line by one of its standard output, with what it counted in both directions since the line before. When
//! its input ends, it writes such a line too, and ends.

#![forbid(unsafe_code)]

mod direction;
mod faults;
mod options;

use std::error::Error;
use std::io::{self, stdin, stdout, ErrorKind, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::netdevice::name_to_index;
use signal_hook::consts::{SIGINT, SIGTERM};
use tap::PacketTap;

use direction::Direction;
use faults::{Counters, Faults};
use options::Options;

/// Bytes of the longest frame.
const FRAME: usize = 64 << 10;
/// Frames that are read from one tap before the other one has its turn.
const BURST: usize = 64;
/// The longest line of the input, in bytes.
const LINE: usize = 4096;

/// One end of the cable, and the direction in which frames go from there.
#[derive(Debug)]
struct End {
    name: String,
    tap: PacketTap,
    direction: Direction,
}

impl End {
    fn open(name: &str, number: u64, faults: Faults) -> Result<Self, String> {
        // To open a tap that is not there would make one, for those who may.
        let exists = UnixDatagram::unbound().and_then(|socket| Ok(name_to_index(&socket, name)?));
        let tap = exists.and_then(|_| PacketTap::open(name));
        let tap = tap.map_err(|error| format!("tap {name}: {}", why(&error)))?;
        let mut direction = Direction::new(number);
        direction.change(faults);
        Ok(Self { name: name.to_owned(), tap, direction })
    }

    /// Brings frames that came, and those that waited until now, to the tap of the other end.
    fn carry(&mut self, to: &PacketTap, room: &mut [u8]) -> Result<(), String> {
        let frames = self.direction.due(Instant::now());
        self.send(to, &frames);
        for _ in 0..BURST {
            match self.tap.receive(room) {
                Ok(frame) => {
                    let frames = self.direction.take(frame, Instant::now());
                    self.send(to, &frames);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(format!("tap {}: {}", self.name, why(&error))),
            }
        }
        Ok(())
    }

    fn send(&mut self, to: &PacketTap, frames: &[Vec<u8>]) {
        for frame in frames {
            if to.send(frame).is_err() {
                self.direction.refused();
            }
        }
    }
}

/// Says why a tap cannot be opened, or be read any more.
fn why(error: &io::Error) -> String {
    let reason = match Errno::from_io_error(error) {
        Some(Errno::NODEV) => "there is no such interface",
        Some(Errno::BADFD) => "the interface is gone",
        Some(Errno::NOENT) => "there is no /dev/net/tun",
        Some(Errno::ACCESS) => "this user may not open /dev/net/tun",
        Some(Errno::PERM) => "it belongs to another user (ip tuntap add ... user)",
        Some(Errno::INVAL) => "the interface is no tap, or one with several queues",
        Some(Errno::BUSY) => "another process has it open",
        _ => return error.to_string(),
    };
    format!("{reason}: {error}")
}

/// The lines of the standard input.
#[derive(Debug, Default)]
struct Orders {
    /// What is no whole line yet.
    rest: Vec<u8>,
}

impl Orders {
    /// Reads what there is. Returns the lines that are whole, or `None` at the end of the input.
    fn read(&mut self) -> Result<Option<Vec<String>>, Box<dyn Error>> {
        let mut bytes = [0; LINE];
        let len = rustix::io::read(stdin(), &mut bytes)?;
        if len == 0 {
            return Ok(None);
        }
        self.rest.extend(&bytes[..len]);
        let mut lines = Vec::new();
        while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            lines.push(String::from_utf8(line)?);
        }
        if self.rest.len() > LINE {
            return Err(format!("a line is longer than {LINE} bytes").into());
        }
        Ok(Some(lines))
    }
}

/// What has come while the cable waited.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum News {
    /// Frames at most.
    Frames,
    /// A part of the input, or its end.
    Order,
    /// A signal.
    End,
}

/// Waits until something comes, or a frame has waited long enough. Looks at the input if there are `orders`.
fn wait(ends: &[End; 2], signals: &UnixStream, orders: bool) -> Result<News, Box<dyn Error>> {
    let next = ends.iter().filter_map(|end| end.direction.next()).min();
    let timeout = match next.map(|next| next.saturating_duration_since(Instant::now())) {
        Some(time) => Some(Timespec::try_from(time)?),
        None => None,
    };
    let stdin = stdin();
    let [one, other] = ends;
    let mut fds = [
        PollFd::new(signals, PollFlags::IN),
        PollFd::new(&one.tap, PollFlags::IN),
        PollFd::new(&other.tap, PollFlags::IN),
        PollFd::new(&stdin, PollFlags::IN),
    ];
    let count = if orders { 4 } else { 3 };
    match poll(&mut fds[..count], timeout.as_ref()) {
        Ok(_) if !fds[0].revents().is_empty() => Ok(News::End),
        Ok(_) if orders && !fds[3].revents().is_empty() => Ok(News::Order),
        Ok(_) | Err(Errno::INTR) => Ok(News::Frames),
        Err(error) => Err(error.into()),
    }
}

/// Changes the faults in both directions. Returns what was counted until then.
fn change(ends: &mut [End; 2], faults: Faults) -> Counters {
    let mut counters = Counters::default();
    for end in ends {
        counters += end.direction.change(faults);
    }
    counters
}

/// Writes what was counted, as a line of JSON, or as lines for people.
fn report(counters: &Counters, json: bool) -> Result<(), Box<dyn Error>> {
    let mut out = stdout().lock();
    if json {
        writeln!(out, "{}", serde_json::to_string(counters)?)?;
    } else {
        write!(out, "{counters}")?;
    }
    Ok(out.flush()?)
}

/// Carries frames until a signal or the end of the input comes. Returns what was counted and is not written yet.
fn carry(
    ends: &mut [End; 2],
    signals: &UnixStream,
    json: bool,
) -> Result<Counters, Box<dyn Error>> {
    let mut room = vec![0; FRAME];
    let mut orders = Orders::default();
    loop {
        match wait(ends, signals, json)? {
            News::Frames => {}
            News::Order => match orders.read()? {
                Some(lines) => {
                    for line in lines {
                        let faults = Faults::parse(&line)?;
                        report(&change(ends, faults), json)?;
                    }
                }
                None => break,
            },
            News::End => break,
        }
        let [one, other] = ends;
        one.carry(&other.tap, &mut room)?;
        other.carry(&one.tap, &mut room)?;
    }
    Ok(change(ends, Faults::default()))
}

/// Returns a socket that becomes readable when a signal comes that ends this process.
fn signals() -> io::Result<UnixStream> {
    let (read, write) = UnixStream::pair()?;
    for signal in [SIGTERM, SIGINT] {
        signal_hook::low_level::pipe::register(signal, write.try_clone()?)?;
    }
    Ok(read)
}

fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let (one, other) = (&options.one, &options.other);
    if one == other {
        return Err(format!("tap {one}: the ends of the cable are two taps").into());
    }
    let signals = signals()?;
    let mut ends = [End::open(one, 0, options.faults)?, End::open(other, 1, options.faults)?];
    let counters = carry(&mut ends, &signals, options.json)?;
    report(&counters, options.json)
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("virtio-rdma-impair: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_tap_and_the_reason() {
        let faults = Faults::default();
        for name in ["nosuchtap0", "a-name-that-no-interface-can-have", ""] {
            let error = End::open(name, 0, faults).unwrap_err();
            assert!(
                error.starts_with(&format!("tap {name}: there is no such interface: ")),
                "{error}"
            );
        }
        for (errno, reason) in [
            (Errno::PERM, "it belongs to another user"),
            (Errno::ACCESS, "this user may not open /dev/net/tun"),
            (Errno::INVAL, "the interface is no tap"),
            (Errno::BUSY, "another process has it open"),
            (Errno::BADFD, "the interface is gone"),
            (Errno::NOENT, "there is no /dev/net/tun"),
            (Errno::IO, "Input/output error"),
        ] {
            let error = why(&errno.into());
            assert!(error.starts_with(reason), "{error}");
        }
    }
}
