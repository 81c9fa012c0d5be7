// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdmad hand-over`: asks a running process to end, and to leave its sockets to the next one.
//!
//! The next process has to know what to do with them. So whoever restarts a process runs the program that is to start
//! next with this command: a version that does not take sockets over does not know the command either, and the process
//! removes its sockets when it ends, as it does otherwise.

use clap::Args;
use rustix::process::{kill_process, Pid, Signal};

/// The name of the command.
pub const COMMAND: &str = "hand-over";

/// The signal that asks a process to end so. A version that does not know it is not ended by it, as it would be by most
/// other ones, without leaving the devices of its guests.
pub const SIGNAL: Signal = Signal::URG;

/// Options of the command.
#[derive(Args, Debug)]
pub struct HandOverOptions {
    /// The process.
    pub pid: i32,
}

/// Asks the process.
pub fn run(options: &HandOverOptions) -> Result<(), Box<dyn std::error::Error>> {
    let pid = Pid::from_raw(options.pid).filter(|_| options.pid > 0).ok_or("no such process")?;
    Ok(kill_process(pid, SIGNAL)?)
}
