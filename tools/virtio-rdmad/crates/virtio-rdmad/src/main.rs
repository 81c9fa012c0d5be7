// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdmad`: the virtio-rdma device, one process for many guests.
//!
//! The main thread reads the command line, makes one [`engine::Fabric`] a network and one
//! [`engine::Device`] a guest, starts the workers ([`worker`]), hands the monitors that connect to
//! them, and waits for signals. Another thread answers on the control socket ([`control`]).

#![forbid(unsafe_code)]

mod backend;
mod clock;
mod connection;
mod control;
mod daemon;
mod guest;
mod options;
mod poller;
mod sandbox;
mod socket;
mod spin;
mod status;
mod times;
mod waker;
mod worker;

use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use options::{Command, Options};

fn main() -> ExitCode {
    let options = Options::parse();
    let result = match &options.command {
        Some(Command::Status(status)) => status::print(status),
        None => {
            start_log(&options.log);
            daemon::run(&options)
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("virtio-rdmad: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Logs go to standard error. `RUST_LOG` wins over `--log`.
fn start_log(level: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(ansi)
        .with_target(false)
        .init();
}
