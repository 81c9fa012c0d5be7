// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdmad`: the virtio-rdma device, one process for many guests.
//!
//! The main thread reads the command line, makes an [`engine::Fabric`] for each network and an
//! [`engine::Device`] for each guest, and starts the workers ([`worker`]). Then it gives each VMM
//! that connects to a worker, and waits for signals. Another thread answers on the control socket
//! ([`control`]), and another process removes the sockets in the end ([`os::remover`]).
//!
//! The floors, from the bottom to the top; a file imports only what stands below it:
//!
//! * [`os`]: sockets, rights, the log
//! * [`spec`]: guests, uplinks and the configuration file, as their users write them
//! * [`handover`]: what a process leaves to the next one
//! * [`guest`]: guests, and the mailboxes of the workers that serve them
//! * [`worker`]: the threads that serve guests
//! * [`control`]: the control socket
//! * [`cli`]: the commands
//! * [`daemon`]: the process that serves guests

#![forbid(unsafe_code)]

mod cli;
mod control;
mod daemon;
mod guest;
mod handover;
mod os;
mod spec;
mod worker;

use std::process::ExitCode;

use cli::config;
use os::log;

fn main() -> ExitCode {
    let options = match config::options() {
        Ok(options) => options,
        Err(error) => return fail(&error),
    };
    let result = if let Some(command) = &options.command {
        cli::run(command)
    } else {
        log::start(&options.log);
        daemon::run(&options)
    };
    log::flush();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&*error),
    }
}

/// Tells why the process ends.
fn fail(error: &dyn std::error::Error) -> ExitCode {
    eprintln!("virtio-rdmad: {error}");
    ExitCode::FAILURE
}
