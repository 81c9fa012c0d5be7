// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `virtio-rdma-lab`: guests with virtio-rdma devices, for an ordinary user, anywhere on x86-64.
//!
//! The program boots guests of user-mode Linux, whose root is the file system of the machine, and runs a command in
//! each of them. It is one file: kernel, modules, device and providers are behind the program in its own file
//! ([`payload`]), and it needs no privilege, no installed package, and no directory but one for sockets.
//!
//! On the machine, [`run`] starts a device ([`device`]) and guests ([`guest`]). In a guest, this program is the first
//! process ([`init`]). What the command is, and how it ends, is a file in a directory that both see ([`job`]).
//!
//! The modules, from the bottom to the top:
//!
//! * [`error`]: what keeps the lab from its work
//! * [`event`], [`job`], [`options`], [`payload`], [`plan`], [`child`], [`cable`],
//!   [`course`]
//! * [`device`], [`guest`]
//! * [`run`], [`init`]

mod cable;
mod child;
mod course;
mod device;
mod error;
mod event;
mod guest;
mod init;
mod job;
mod options;
mod payload;
mod plan;
mod run;

use std::process::ExitCode;

use signal_hook::consts::SIGPIPE;
use signal_hook::low_level::emulate_default_handler;

use error::{say, Error, OutputClosed};
use options::{Options, Verb};

/// The exit status if the lab itself fails, as that of env(1), nohup(1) and timeout(1).
const FAILED: u8 = 125;

fn main() -> ExitCode {
    if init::is_guest() {
        init::main();
    }
    let line: Vec<_> = std::env::args_os().collect();
    let options = Options::of(&line).unwrap_or_else(|error| error.exit());
    let result = match options.verb {
        Verb::Run(options) => run::run(&options),
        Verb::Shell(options) => run::shell(&options),
    };
    ExitCode::from(result.unwrap_or_else(|error| failed(&error)))
}

/// Says why the lab has failed, and returns its exit status. Where nobody reads the output, the process ends as other
/// programs do, by SIGPIPE.
fn failed(error: &Error) -> u8 {
    if error.is::<OutputClosed>() {
        // It fails if the table of signals lacks SIGPIPE.
        let _ = emulate_default_handler(SIGPIPE);
    }
    say(error);
    FAILED
}
