// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The commands of the program. Each but the daemon itself calls a running one over its control socket, or is a
//! helper; `check` only reads a file.

mod add_remove;
mod call;
mod capture;
pub mod config;
mod metrics;
pub mod options;
mod reload;
mod set;
mod status;
mod top;
mod trace;
mod watch;

use std::error::Error;

use options::Command;

use crate::handover::{ask, supervisor};
use crate::os::remover;

/// Does what a command says.
///
/// # Errors
///
/// The command has failed. The error says why, to whoever has given the command.
pub fn run(command: &Command) -> Result<(), Box<dyn Error>> {
    match command {
        Command::Status(options) => status::print(options),
        Command::Metrics(options) => metrics::print(options),
        Command::Watch(options) => watch::print(options),
        Command::Capture(options) => capture::run(options),
        Command::Trace(options) => trace::print(options),
        Command::Top(options) => top::run(options),
        Command::Add(options) => add_remove::add(options),
        Command::Set(options) => set::run(options),
        Command::Reload(options) => reload::run(options),
        Command::Remove(options) => add_remove::remove(options),
        Command::Check(options) => config::check(options),
        Command::Supervise(options) => supervisor::run(options),
        Command::HandOver(options) => ask::run(options),
        Command::RemoveSockets(options) => remover::run(options),
    }
}
