// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdmad`: the virtio-rdma device, one process for many guests.
//!
//! The main thread reads the command line, makes an [`engine::Fabric`] for each network and an
//! [`engine::Device`] for each guest, and starts the workers ([`worker`]). Then it gives each VMM
//! that connects to a worker, and waits for signals. Another thread answers on the control socket
//! ([`control`]), and another process removes the sockets in the end ([`remover`]).

#![forbid(unsafe_code)]

mod access;
mod add_remove;
mod backend;
mod balance;
mod call;
mod clock;
mod config;
mod connection;
mod control;
mod crew;
mod daemon;
mod events;
mod guest;
mod guests;
mod handover;
mod histogram;
mod log;
mod mailbox;
mod metrics;
mod options;
mod poller;
mod privileges;
mod reload;
mod remover;
mod report;
mod sandbox;
mod seat;
mod set;
mod socket;
mod spec;
mod spin;
mod status;
mod times;
mod top;
mod watch;
mod worker;

use std::process::ExitCode;

use handover::supervisor;
use options::Command;

fn main() -> ExitCode {
    let options = match config::options() {
        Ok(options) => options,
        Err(error) => return fail(&error),
    };
    let result = match &options.command {
        Some(Command::Status(status)) => status::print(status),
        Some(Command::Metrics(metrics)) => metrics::print(metrics),
        Some(Command::Watch(watch)) => watch::print(watch),
        Some(Command::Top(top)) => top::run(top),
        Some(Command::Add(add)) => add_remove::add(add),
        Some(Command::Set(set)) => set::run(set),
        Some(Command::Reload(reload)) => reload::run(reload),
        Some(Command::Remove(remove)) => add_remove::remove(remove),
        Some(Command::Supervise(supervise)) => supervisor::run(supervise),
        Some(Command::HandOver(options)) => handover::ask::run(options),
        Some(Command::RemoveSockets(sockets)) => remover::run(sockets),
        None => {
            log::start(&options.log);
            daemon::run(&options)
        }
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
