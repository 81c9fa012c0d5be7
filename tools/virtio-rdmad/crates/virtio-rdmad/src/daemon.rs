// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The process: guests, their threads, signals.

use std::collections::{HashMap, HashSet};
use std::io::Error;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use engine::{DeviceConfig, Fabric, FabricConfig};
use rustix::event::{poll, PollFd, PollFlags};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::control;
use crate::guest::Guest;
use crate::options::{GuestSpec, Options};
use crate::socket::Socket;
use crate::waker::Waker;

/// Why the process does not start, or ends.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// Two guests with one name.
    #[error("two guests have the name \"{0}\"")]
    Name(String),
    /// Two sockets at one path.
    #[error("two sockets at {0}")]
    Path(PathBuf),
    /// Two guests of a network with one MAC address.
    #[error("two guests of network \"{0}\" have the same MAC address")]
    Mac(String),
    /// The operating system refused something.
    #[error("{0}")]
    Os(#[from] Error),
}

/// Serves guests until SIGTERM or SIGINT.
pub fn run(options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    check(options)?;
    // Caught from here on, so that no socket stays behind.
    let signals = signals()?;
    let control = options.control.as_deref().map(Socket::bind).transpose()?;
    let guests = guests(options)?;
    let threads = start(&guests)?;
    tracing::info!(guests = guests.len(), "ready");
    let result = wait(&signals, control.as_ref(), &guests);
    for guest in &guests {
        guest.waker.stop();
    }
    for thread in threads {
        // A thread that panicked has said so itself.
        let _ = thread.join();
    }
    tracing::info!("ends");
    Ok(result?)
}

/// Refuses guests that would be taken for each other.
fn check(options: &Options) -> Result<(), DaemonError> {
    let mut names = HashSet::new();
    let mut paths: HashSet<&PathBuf> = options.control.iter().collect();
    let mut macs = HashSet::new();
    for GuestSpec { name, path, mac, network, .. } in &options.guests {
        if !names.insert(name) {
            return Err(DaemonError::Name(name.clone()));
        }
        if !paths.insert(path) {
            return Err(DaemonError::Path(path.clone()));
        }
        if mac.is_some_and(|mac| !macs.insert((network, mac))) {
            return Err(DaemonError::Mac(network.clone()));
        }
    }
    Ok(())
}

/// Becomes readable when the process is to end.
fn signals() -> Result<UnixStream, Error> {
    let (read, write) = UnixStream::pair()?;
    signal_hook::low_level::pipe::register(SIGTERM, write.try_clone()?)?;
    signal_hook::low_level::pipe::register(SIGINT, write)?;
    Ok(read)
}

fn guests(options: &Options) -> Result<Vec<Arc<Guest>>, DaemonError> {
    let mut fabrics = HashMap::new();
    let poll = Duration::from_micros(options.poll_us.into());
    let mut guests = Vec::with_capacity(options.guests.len());
    for spec in &options.guests {
        let fabric = fabrics.entry(&spec.network).or_insert_with(|| {
            let name = spec.network.clone();
            Fabric::new(FabricConfig { name, ..FabricConfig::default() })
        });
        let waker = Arc::new(Waker::new().map_err(Error::from)?);
        let device = fabric.add_device(DeviceConfig {
            name: spec.name.clone(),
            mac: spec.mac,
            limits: spec.limits.clone(),
            wake: waker.clone(),
        });
        let socket = Socket::bind(&spec.path)?;
        guests.push(Arc::new(Guest::new(spec.clone(), device, waker, socket, poll)));
    }
    Ok(guests)
}

fn start(guests: &[Arc<Guest>]) -> Result<Vec<JoinHandle<()>>, Error> {
    let spawn = |guest: &Arc<Guest>| {
        let guest = guest.clone();
        // The kernel cuts a thread's name at 15 bytes.
        std::thread::Builder::new()
            .name(format!("guest {}", guest.spec.name))
            .spawn(move || guest.run())
    };
    guests.iter().map(spawn).collect()
}

/// Answers on the control socket until a signal comes.
fn wait(
    signals: &UnixStream,
    control: Option<&Socket>,
    guests: &[Arc<Guest>],
) -> Result<(), Error> {
    loop {
        let mut fds = vec![PollFd::new(signals, PollFlags::IN)];
        fds.extend(control.map(|socket| PollFd::new(socket.listener(), PollFlags::IN)));
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
        }
        let readable = |fd: Option<&PollFd<'_>>| fd.is_some_and(|fd| !fd.revents().is_empty());
        if readable(fds.first()) {
            return Ok(());
        }
        if let (Some(socket), true) = (control, readable(fds.get(1))) {
            control::answer(socket, guests);
        }
    }
}
