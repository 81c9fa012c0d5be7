// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The service manager that has started the process, and keeps descriptors for the next one.
//!
//! systemd(1), or any other program that speaks the protocols of sd_notify(3), sd_pid_notify_with_fds(3) and
//! sd_listen_fds(3), such as [`super::supervisor`].

use std::collections::BTreeMap;
use std::io::{Error, ErrorKind, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::mpsc::{sync_channel, SyncSender};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::io::{fcntl_setfd, FdFlags};
use rustix::net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

/// Most descriptors of one message to the service manager.
const MOST: usize = 2;

/// The time that a process that ends waits for a service manager that does not read its messages.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// Most messages that wait to be sent.
const WAITING: usize = 1024;

/// The service manager.
#[derive(Debug)]
pub struct Manager {
    socket: UnixDatagram,
    /// Whether it keeps descriptors.
    keeps: bool,
    /// The queue of messages to the thread that sends them, once there is this thread: the service manager may not read
    /// for a while, and no thread that serves guests waits for it.
    queue: OnceLock<SyncSender<Waiting>>,
}

/// An entry of the queue.
#[derive(Debug)]
enum Waiting {
    Message(String, Vec<OwnedFd>),
    /// Tell this that everything before it is sent.
    Flush(SyncSender<()>),
}

impl Manager {
    /// Returns the service manager, if one has started this process and wants to hear of it. Call this before the
    /// process starts threads or other processes.
    pub fn from_environment() -> Result<Option<Self>, Error> {
        let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(None) };
        // A process that this one starts has nothing to tell.
        std::env::remove_var("NOTIFY_SOCKET");
        let keeps =
            std::env::var("FDSTORE").is_ok_and(|most| most.parse::<u32>().is_ok_and(|n| n > 0));
        let bytes = path.as_encoded_bytes();
        let address = match bytes.strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(&path)?,
        };
        let named = |error: Error| Error::new(error.kind(), format!("NOTIFY_SOCKET: {error}"));
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&address).map_err(named)?;
        Ok(Some(Self { socket, keeps, queue: OnceLock::new() }))
    }

    /// Starts the thread that sends messages from now on. It calls `confine` first. Call this once.
    pub fn start_sender(&self, confine: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let socket = self.socket.try_clone()?;
        let (sender, waiting) = sync_channel(WAITING);
        let send = move || {
            confine();
            for message in waiting {
                match message {
                    Waiting::Message(text, descriptors) => {
                        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
                        if let Err(error) = send(&socket, &text, &descriptors) {
                            tracing::warn!(%error, text, "the service manager cannot be told");
                        }
                    }
                    Waiting::Flush(done) => {
                        let _ = done.send(());
                    }
                }
            }
        };
        std::thread::Builder::new().name("manager".to_owned()).spawn(send)?;
        let _ = self.queue.set(sender);
        Ok(())
    }

    /// Waits until everything is sent, but not longer than this. Returns whether it is.
    pub fn flush(&self, limit: Duration) -> bool {
        let Some(queue) = self.queue.get() else { return true };
        let (done, is_done) = sync_channel(1);
        queue.try_send(Waiting::Flush(done)).is_ok() && is_done.recv_timeout(limit).is_ok()
    }

    /// Returns whether the service manager keeps descriptors.
    pub fn keeps_descriptors(&self) -> bool {
        self.keeps
    }

    /// Tells the service manager something, such as `READY=1`.
    pub fn tell(&self, assignment: &str) -> Result<(), Error> {
        self.send(assignment, &[])
    }

    /// Makes the service manager keep descriptors by a name, whatever becomes of the other ends of them.
    pub fn keep(&self, name: &str, descriptors: &[BorrowedFd<'_>]) -> Result<(), Error> {
        self.send(&format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}"), descriptors)
    }

    /// Makes the service manager close the descriptors of a name.
    pub fn forget(&self, name: &str) {
        if let Err(error) = self.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), &[]) {
            tracing::warn!(%error, name, "the service manager does not close descriptors");
        }
    }

    fn send(&self, text: &str, descriptors: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let Some(queue) = self.queue.get() else { return send(&self.socket, text, descriptors) };
        let copies = descriptors.iter().map(BorrowedFd::try_clone_to_owned);
        let message = Waiting::Message(text.to_owned(), copies.collect::<Result<_, _>>()?);
        let full = |_| Error::other(format!("it has not read {WAITING} messages"));
        queue.try_send(message).map_err(full)
    }
}

/// Sends a message, and waits until the service manager has room for it.
fn send(socket: &UnixDatagram, text: &str, descriptors: &[BorrowedFd<'_>]) -> Result<(), Error> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(ErrorKind::InvalidInput.into());
    }
    let parts = [IoSlice::new(text.as_bytes())];
    sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Takes the descriptors that the service manager has kept, by their names. Call this once.
pub fn kept_descriptors() -> Result<BTreeMap<String, Vec<OwnedFd>>, Error> {
    let malformed = |error: sd_listen_fds::Error| Error::new(ErrorKind::InvalidInput, error);
    let mut kept: BTreeMap<String, Vec<OwnedFd>> = BTreeMap::new();
    for (name, descriptor) in sd_listen_fds::get().map_err(malformed)? {
        let descriptor = descriptor.into_std();
        fcntl_setfd(&descriptor, FdFlags::CLOEXEC)?;
        kept.entry(name.unwrap_or_default()).or_default().push(descriptor);
    }
    Ok(kept)
}
