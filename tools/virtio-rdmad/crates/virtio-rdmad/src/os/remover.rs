// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A second process, which removes the sockets when the one that serves guests ends.
//!
//! A process in the [`sandbox`] cannot remove a file, and a process that is killed does nothing any
//! more. So before it enters the sandbox, the process starts the program once more, with the paths of
//! the sockets. That second process serves no guest. It waits until a pipe is closed, of which the first
//! process has the only other end, and then removes the sockets.

use std::fs::{File, OpenOptions};
use std::io::{Error, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::Arc;

use clap::Args;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use super::sandbox::{self, Filters};
use super::socket::Name;

/// The name of the command that makes a process a remover.
pub const COMMAND: &str = "remove-sockets";

/// Options of the process that removes the sockets.
#[derive(Args, Debug)]
pub struct RemoverOptions {
    /// The paths of the sockets.
    #[arg(required = true)]
    pub paths: Vec<PathBuf>,
}

/// The messages to the process: the sockets stay when this one ends, or they go. Without a message they go.
const STAY: u8 = b's';
const GO: u8 = b'g';

/// The process that removes the sockets. When this is dropped, that process ends, and the sockets are
/// gone, unless another process is to go on with them.
#[derive(Debug)]
pub struct Remover(Child);

impl Remover {
    /// Starts the process. When this returns, the process has the files of the sockets at `paths` open.
    pub fn start<'a>(paths: impl Iterator<Item = &'a Path>) -> Result<Self, Error> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("virtio-rdmad").args([COMMAND, "--"]).args(paths);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let ready = child.stdout.as_mut().map(|stdout| stdout.read_exact(&mut [0]));
        ready.transpose()?;
        Ok(Self(child))
    }

    /// Says whether the sockets stay when this process ends, however that happens, because another one goes on with
    /// them.
    pub fn set_stay(&mut self, stay: bool) -> Result<(), Error> {
        let told = [if stay { STAY } else { GO }];
        self.0.stdin.as_mut().map_or(Ok(()), |stdin| stdin.write_all(&told))
    }
}

impl Drop for Remover {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // The process writes nothing more; its end of this pipe closes when it ends.
        let _ = self.0.stdout.take().map(|mut stdout| stdout.read_to_end(&mut Vec::new()));
    }
}

/// Does the work of that process: waits until standard input is closed, and removes the sockets, unless they stay.
pub fn run(options: &RemoverOptions) -> Result<(), Box<dyn std::error::Error>> {
    // A signal to all processes of a terminal or a service ends the other process, and this one has to
    // outlive it.
    for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))?;
    }
    // The name has less than 16 bytes. Without it the process has the name of the link, "exe".
    let _ = rustix::thread::set_name(c"rdmad-sockets");
    let sockets =
        options.paths.iter().map(|path| Kept::new(path)).collect::<Result<Vec<_>, _>>()?;
    sandbox::leave_file_system(options.paths.iter().map(AsRef::as_ref))?;
    Filters::new()?.confine_remover()?;
    let mut stdout = std::io::stdout();
    stdout.write_all(b"\n")?;
    stdout.flush()?;
    let mut told = Vec::new();
    std::io::stdin().read_to_end(&mut told)?;
    if told.last() == Some(&STAY) {
        return Ok(());
    }
    for socket in &sockets {
        socket.name.remove();
    }
    Ok(())
}

/// A socket whose file is open, so that it keeps its inode number, and no other file at its path can
/// have the same.
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
