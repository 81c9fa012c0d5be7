// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A process of its own that removes the sockets when the one that serves guests ends.
//!
//! A process that is confined to its guests can remove no file, and one that is killed does nothing
//! at all any more. So before the [`sandbox`] is entered the program is started once more, with the
//! sockets' paths. That process serves nobody. It waits for the end of a pipe, of which the first
//! process has the only other end, and removes the sockets then.

use std::fs::{File, OpenOptions};
use std::io::{Error, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::Arc;

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use crate::options::RemoverOptions;
use crate::sandbox::{self, Filters};
use crate::socket::Name;

/// Name of the command that makes a process a remover.
pub const COMMAND: &str = "remove-sockets";

/// The process that removes the sockets. When this goes it does, and the sockets are gone then.
#[derive(Debug)]
pub struct Remover(Child);

impl Remover {
    /// Starts the process. It knows the files of the sockets at `paths` when this returns.
    pub fn start<'a>(paths: impl Iterator<Item = &'a Path>) -> Result<Self, Error> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("virtio-rdmad").args([COMMAND, "--"]).args(paths);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let ready = child.stdout.as_mut().map(|stdout| stdout.read_exact(&mut [0]));
        ready.transpose()?;
        Ok(Self(child))
    }
}

impl Drop for Remover {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // It writes nothing: its end of the pipe closes when it ends.
        let _ = self.0.stdout.take().map(|mut stdout| stdout.read_to_end(&mut Vec::new()));
    }
}

/// Is that process: waits for the end of the standard input, and removes the sockets.
pub fn run(options: &RemoverOptions) -> Result<(), Box<dyn std::error::Error>> {
    // Who ends all processes of a terminal or a service ends the other one, which this one outlives.
    for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))?;
    }
    // Shorter than the limit of 15 bytes; without it the name is that of the link, "exe".
    let _ = rustix::thread::set_name(c"rdmad-sockets");
    let sockets =
        options.paths.iter().map(|path| Kept::new(path)).collect::<Result<Vec<_>, _>>()?;
    sandbox::leave_file_system(options.paths.iter().map(AsRef::as_ref))?;
    Filters::new()?.confine_remover()?;
    let mut stdout = std::io::stdout();
    stdout.write_all(b"\n")?;
    stdout.flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    for socket in &sockets {
        socket.name.remove();
    }
    Ok(())
}

/// A socket whose file keeps its number: no file that somebody else makes at its path has the same.
struct Kept {
    name: Name,
    _file: File,
}

impl Kept {
    fn new(path: &Path) -> Result<Self, Error> {
        let flags = libc::O_PATH | libc::O_NOFOLLOW;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        Ok(Self { name: Name::of(path)?, _file: file })
    }
}
