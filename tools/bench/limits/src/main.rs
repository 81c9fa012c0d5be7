// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `limits`: what the machine itself does at most, and TCP and UDP between two guests.
//!
//! Each invocation measures one thing for a given time and prints one number, so that the
//! benchmark can set it between two measurements of the same size over RDMA:
//!
//! ```text
//! limits memcpy SIZE SECONDS [DIR]       MiB/s from one shared memory file to another
//! limits memcpy-pages SIZE SECONDS DIR   the same between pages that lie anywhere
//! limits cacheline SECONDS               µs a round trip of a polled cache line
//! limits eventfd SECONDS                 µs a round trip of two blocking eventfds
//! limits taps-lat TAP TAP SIZE SECONDS   µs one way of a UDP datagram between two polled taps
//! limits taps-rtt TAP TAP SIZE SECONDS   µs there and back
//! limits tcp-serve                       the other end of the next three
//! limits tcp-bw ADDRESS SIZE SECONDS     MiB/s, one write(2) a message
//! limits tcp-count ADDRESS SIZE COUNT    the same for a number of messages
//! limits tcp-lat ADDRESS SIZE SECONDS    µs one way, half of a round trip
//! limits udp-serve                       the other end of the next two
//! limits udp-lat ADDRESS SIZE SECONDS    µs one way between two polled sockets
//! limits udp-rtt ADDRESS SIZE SECONDS    µs there and back
//! ```

mod copy;
mod pingpong;
mod polling;
mod samples;
mod taps;
mod tcp;
mod udp;

use std::net::IpAddr;
use std::path::Path;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

const USAGE: &str = "usage: limits memcpy SIZE SECONDS [DIR] | \
                     memcpy-pages SIZE SECONDS DIR | cacheline SECONDS | \
                     eventfd SECONDS | taps-lat TAP TAP SIZE SECONDS | \
                     taps-rtt TAP TAP SIZE SECONDS | tcp-serve | \
                     tcp-bw ADDRESS SIZE SECONDS | tcp-count ADDRESS SIZE COUNT | \
                     tcp-lat ADDRESS SIZE SECONDS | udp-serve | \
                     udp-lat ADDRESS SIZE SECONDS | udp-rtt ADDRESS SIZE SECONDS";

/// Why there is no number.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command line.
    #[error("{USAGE}")]
    Usage,
    /// A system call.
    #[error("{0}: {1}")]
    System(&'static str, #[source] std::io::Error),
    /// Two threads that poll need a processor each.
    #[error("one processor only: nobody to poll with")]
    OneProcessor,
    /// The other thread is gone.
    #[error("the other thread panicked")]
    Thread,
    /// The other end of a TCP connection said something else than expected.
    #[error("the peer answered {0} instead of {1} bytes")]
    Peer(u64, u64),
    /// What was sent by UDP had no answer, however often.
    #[error("no answer comes back")]
    Silent,
}

impl Error {
    /// For `map_err`: an error of a system call, with its name.
    pub fn system<E: Into<std::io::Error>>(call: &'static str) -> impl Fn(E) -> Self {
        move |error| Self::System(call, error.into())
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match measure(&arguments) {
        Ok(value) => {
            println!("{value:.6}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("limits: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(arguments: &[&str]) -> Result<f64, Error> {
    match *arguments {
        ["memcpy", size, time] => copy::bandwidth(message_size(size)?, seconds(time)?, None),
        ["memcpy", size, time, dir] => {
            copy::bandwidth(message_size(size)?, seconds(time)?, Some(Path::new(dir)))
        }
        ["memcpy-pages", size, time, dir] => {
            copy::bandwidth_of_pages(message_size(size)?, seconds(time)?, Path::new(dir))
        }
        ["cacheline", time] => pingpong::cacheline(seconds(time)?),
        ["eventfd", time] => pingpong::eventfd(seconds(time)?),
        [taps @ ("taps-lat" | "taps-rtt"), one, other, size, time] => {
            let both = taps::round_trip([one, other], message_size(size)?, seconds(time)?)?;
            Ok(if taps == "taps-lat" { both / 2.0 } else { both })
        }
        ["tcp-serve"] => tcp::serve(),
        ["udp-serve"] => udp::serve(),
        [program, peer, size, how_much] => {
            between(program, parse(peer)?, message_size(size)?, how_much)
        }
        _ => Err(Error::Usage),
    }
}

/// What is measured between this guest and a server in another one.
fn between(program: &str, peer: IpAddr, size: usize, how_much: &str) -> Result<f64, Error> {
    match program {
        "tcp-bw" => tcp::bandwidth(peer, size, seconds(how_much)?),
        "tcp-count" => tcp::bandwidth_of(peer, size, parse(how_much)?),
        "tcp-lat" => tcp::latency(peer, size, seconds(how_much)?),
        "udp-lat" => Ok(udp::round_trip(peer, size, seconds(how_much)?)? / 2.0),
        "udp-rtt" => udp::round_trip(peer, size, seconds(how_much)?),
        _ => Err(Error::Usage),
    }
}

fn parse<T: FromStr>(text: &str) -> Result<T, Error> {
    text.parse().map_err(|_| Error::Usage)
}

/// 1 byte to 1 GiB.
fn message_size(text: &str) -> Result<usize, Error> {
    let size = parse(text)?;
    if (1..=1 << 30).contains(&size) {
        Ok(size)
    } else {
        Err(Error::Usage)
    }
}

fn seconds(text: &str) -> Result<Duration, Error> {
    Duration::try_from_secs_f64(parse(text)?).map_err(|_| Error::Usage)
}
