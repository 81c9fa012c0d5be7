// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdma-impair`: a bad network cable between two taps, to test devices.
//!
//! It brings frames from either tap to the other. Until it is told to, it changes nothing. Each line of
//! its standard input is a JSON object that says which faults packets of RoCE v2 meet from then on
//! ([`Faults`]). It answers each line by one of its standard output, with what it counted in both directions
//! since the line before ([`Counters`]). When its input ends, it writes such a line too, and ends.

#![forbid(unsafe_code)]

mod direction;
mod faults;

use std::error::Error;
use std::io::{stdin, ErrorKind};
use std::time::Instant;

use clap::Parser;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use tap::PacketTap;

use direction::Direction;
use faults::{Counters, Faults};

/// Bytes of the longest frame.
const FRAME: usize = 64 << 10;
/// Frames that are read from one tap before the other one has its turn.
const BURST: usize = 64;
/// The longest line of the input, in bytes.
const LINE: usize = 4096;

/// A bad network cable between two taps. Each line of the standard input names the faults that packets of
/// RoCE v2 meet from then on, for example {"seed": 1, "loss": 0.01, "delay": 0.1, "delay_ms": 20}. The
/// answer says what was counted since the line before.
#[derive(Debug, Parser)]
struct Options {
    /// The taps at both ends of the cable.
    #[arg(num_args = 2, required = true)]
    taps: Vec<String>,
}

/// One end of the cable, and the direction in which frames go from there.
#[derive(Debug)]
struct End {
    tap: PacketTap,
    direction: Direction,
}

impl End {
    fn open(name: &str, number: u64) -> Result<Self, Box<dyn Error>> {
        let tap = PacketTap::open(name).map_err(|error| format!("tap {name}: {error}"))?;
        Ok(Self { tap, direction: Direction::new(number) })
    }

    /// Brings frames that came, and those that waited until now, to the tap of the other end.
    fn carry(&mut self, to: &PacketTap, room: &mut [u8]) -> Result<(), Box<dyn Error>> {
        let frames = self.direction.due(Instant::now());
        self.send(to, &frames);
        for _ in 0..BURST {
            match self.tap.receive(room) {
                Ok(frame) => {
                    let frames = self.direction.take(frame, Instant::now());
                    self.send(to, &frames);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
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

/// Changes the faults in both directions, and prints what was counted until then.
fn change(ends: &mut [End; 2], faults: Faults) -> Result<(), Box<dyn Error>> {
    let mut counters = Counters::default();
    for end in ends {
        counters += end.direction.change(faults);
    }
    println!("{}", serde_json::to_string(&counters)?);
    Ok(())
}

/// Waits until a frame or an order comes, or a frame has waited long enough. Returns whether an order came.
fn wait(ends: &[End; 2]) -> Result<bool, Box<dyn Error>> {
    let next = ends.iter().filter_map(|end| end.direction.next()).min();
    let timeout = match next.map(|next| next.saturating_duration_since(Instant::now())) {
        Some(time) => Some(Timespec::try_from(time)?),
        None => None,
    };
    let stdin = stdin();
    let [one, other] = ends;
    let mut fds = [
        PollFd::new(&stdin, PollFlags::IN),
        PollFd::new(&one.tap, PollFlags::IN),
        PollFd::new(&other.tap, PollFlags::IN),
    ];
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) => Ok(!fds[0].revents().is_empty()),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn run(ends: &mut [End; 2]) -> Result<(), Box<dyn Error>> {
    let mut room = vec![0; FRAME];
    let mut orders = Orders::default();
    loop {
        if wait(ends)? {
            let Some(lines) = orders.read()? else { return change(ends, Faults::default()) };
            for line in lines {
                change(ends, Faults::parse(&line)?)?;
            }
        }
        let [one, other] = ends;
        one.carry(&other.tap, &mut room)?;
        other.carry(&one.tap, &mut room)?;
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let mut ends = [End::open(&options.taps[0], 0)?, End::open(&options.taps[1], 1)?];
    run(&mut ends)
}
