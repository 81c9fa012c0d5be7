// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Processes that end with this one.

use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{getpid, getppid, set_parent_process_death_signal, Signal};

/// Has a command end with this process, however that ends.
pub fn die_with_parent(command: &mut Command) -> &mut Command {
    let parent = getpid();
    let ask = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have ended before.
        if getppid() == Some(parent) {
            Ok(())
        } else {
            Err(rustix::io::Errno::SRCH.into())
        }
    };
    // SAFETY: In the child, before exec, the function makes two system calls and allocates nothing.
    unsafe { command.pre_exec(ask) }
}
