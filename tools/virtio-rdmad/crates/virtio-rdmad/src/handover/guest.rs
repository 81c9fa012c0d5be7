// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is kept of one guest.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{fstat, memfd_create, MemfdFlags};
use rustix::io::{pread, Errno};
use rustix::net::{recv, RecvFlags};
use rustix::time::{clock_gettime, ClockId};
use serde::{Deserialize, Serialize};
use virtio_transport::{Change, State};

use super::journal::{Journal, JournalError};
use super::manager::{kept_descriptors, Manager};
use super::stash::Stash;
use crate::guest::{Guest, Origin};
use crate::options::{GuestSpec, SpecError};

/// The beginning of the names of what is kept. A number follows.
const NAME: &str = "guest-";

/// The record of a guest's journal. The descriptors of the set are: the journal, the listeners if there are any, and
/// with a connection its socket and the descriptors of its state.
#[derive(Debug, Deserialize, Serialize)]
struct Record {
    /// The guest, as in `--guest`, as it is now.
    spec: String,
    /// The guest as its origin named it. Its policy may have been changed since.
    named: String,
    /// Who has named it.
    origin: Origin,
    /// Whether it leaves when its VMM does.
    leaves: bool,
    /// Whether the socket that its VMM connects to is kept, and behind it that of its network interface if the spec has
    /// `nic=`.
    has_listener: bool,
    /// What the VMM that is connected has said.
    connection: Option<Vec<u8>>,
    /// When the device stopped whose image the last process has left, which is the last descriptor of the set, as a time
    /// of [`now`].
    left: Option<u64>,
    /// What the VMM had sent when the last process ended, if that did not end in order.
    unhandled: Option<Unhandled>,
}

/// The first message that waits in the socket of a VMM when a process takes over from one that has crashed. A message
/// stays in the socket until it is handled, so it may be what ends one process after the other.
#[derive(Debug, Deserialize, Serialize)]
struct Unhandled {
    /// Its first bytes, [`HEAD`] at most.
    head: Vec<u8>,
    /// How many processes in a row have ended while a message that begins so waited.
    processes: u8,
}

/// Bytes by which a message is known. A message of vfio-user has a number in there, which the next one does not have.
const HEAD: usize = 64;

/// How many processes may end in a row while one message waits. Then the VMM that has sent it is disconnected, so that
/// the other guests go on.
const MOST_PROCESSES: u8 = 3;

/// A VMM that has connected.
#[derive(Debug)]
pub struct Connected {
    /// The connection.
    pub stream: UnixStream,
    /// What another process knows of it.
    pub said: Option<Said>,
}

/// What another process knew of a VMM.
#[derive(Debug)]
pub struct Said {
    /// What the VMM has said so far.
    pub state: State,
    /// The image of the device, if that process has ended in order.
    pub image: Option<Vec<u8>>,
}

/// Why something cannot be kept.
#[derive(Debug, thiserror::Error)]
enum KeepError {
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error("the stash: {0}")]
    Stash(Errno),
    #[error("the image: {0}")]
    Image(#[from] Errno),
    #[error("the stash: {0}")]
    Os(#[from] std::io::Error),
    #[error("the record: {0}")]
    Encoding(#[from] postcard::Error),
    #[error("the set of descriptors that the journal names is not there")]
    NoSet,
    #[error("{0} descriptors in the place of two")]
    Sockets(usize),
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// What is kept of a guest for as long as it is there.
pub struct Kept {
    manager: Arc<Manager>,
    /// The name by which the service manager keeps it.
    name: String,
    stash: Stash,
    journal: Journal,
    record: Record,
    listeners: Vec<OwnedFd>,
    /// The VMM that is connected.
    stream: Option<UnixStream>,
}

impl Kept {
    /// Begins to keep a guest, which has this number: one that no other guest has or had. `listeners` are the sockets
    /// that its VMM connects to, if the successor cannot make them itself. Returns nothing, and logs why, if the guest
    /// cannot be kept.
    pub fn new(
        manager: &Arc<Manager>,
        number: u64,
        spec: &str,
        origin: Origin,
        listeners: Vec<OwnedFd>,
    ) -> Option<Self> {
        let name = format!("{NAME}{number}");
        let begin = || {
            let record = Record {
                spec: spec.to_owned(),
                named: spec.to_owned(),
                origin,
                leaves: false,
                has_listener: !listeners.is_empty(),
                connection: None,
                left: None,
                unhandled: None,
            };
            let (stash, journal) = (Stash::new()?, Journal::new()?);
            let (manager, stream) = (manager.clone(), None);
            let mut kept = Self { manager, name, stash, journal, record, listeners, stream };
            kept.write(Change::Descriptors, &[], None)?;
            kept.manager.keep(&kept.name, kept.stash.sockets())?;
            Ok::<_, KeepError>(kept)
        };
        begin().map_err(|error| refused(spec, &error)).ok()
    }

    /// Goes on to keep a guest that another process has served, which is now as `spec` says. No connection of it is
    /// kept before a [`ConnectionJournal`] begins.
    pub fn go_on(&mut self, spec: &str, origin: Origin) {
        spec.clone_into(&mut self.record.spec);
        self.record.origin = origin;
        if origin != Origin::Call {
            self.listeners.clear();
            self.record.has_listener = false;
        }
    }

    /// Notes that the guest's origin names it so now.
    pub fn set_named(&mut self, named: &str) {
        named.clone_into(&mut self.record.named);
    }

    /// Keeps the guest as it is from now on, after a change of its policy.
    pub fn set_spec(&mut self, spec: &str) {
        spec.clone_into(&mut self.record.spec);
        if let Err(error) = self.write_record() {
            refused(spec, &error);
        }
    }

    /// Returns whether the guest leaves when its VMM does.
    pub fn leaves(&self) -> bool {
        self.record.leaves
    }

    /// Notes that the guest leaves when its VMM does, whichever process serves it then.
    pub fn set_leaves(&mut self) {
        self.record.leaves = true;
        if let Err(error) = self.write_record() {
            refused(&self.record.spec, &error);
        }
    }

    /// Returns the number of the guest.
    fn number(&self) -> u64 {
        self.name.strip_prefix(NAME).and_then(|number| number.parse().ok()).unwrap_or(0)
    }

    /// Keeps what the VMM that is connected has said.
    fn keep(&mut self, state: &State, change: Change) {
        self.record.connection = Some(state.bytes.clone());
        self.record.left = None;
        if let Err(error) = self.write(change, &state.descriptors, None) {
            refused(&self.record.spec, &error);
            self.disconnect();
        }
    }

    /// Keeps the last that this process knows: what the VMM has said, and the image of the device, which stopped at this
    /// time of [`now`].
    pub fn leave(&mut self, state: &State, image: &[u8], stopped: u64) {
        self.record.connection = Some(state.bytes.clone());
        self.record.left = Some(stopped);
        self.record.unhandled = None;
        let write = |kept: &mut Self| {
            let file = file_of(image)?;
            kept.write(Change::Descriptors, &state.descriptors, Some(file.as_fd()))
        };
        if let Err(error) = write(self) {
            refused(&self.record.spec, &error);
        }
    }

    /// Looks at what waits in the socket of the VMM, after a process that did not end in order. Returns whether that may
    /// be handled.
    fn may_handle(&mut self, stream: &UnixStream) -> Result<bool, KeepError> {
        let mut head = vec![0; HEAD];
        // A socket that has ended is the connection's matter.
        let length = recv(stream, &mut head[..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        head.truncate(length.map_or(0, |(length, _)| length));
        let before = self.record.unhandled.take().filter(|before| before.head == head);
        let processes = before.map_or(1, |before| before.processes.saturating_add(1));
        self.record.unhandled = (!head.is_empty()).then_some(Unhandled { head, processes });
        self.write_record()?;
        Ok(self.record.unhandled.is_none() || processes < MOST_PROCESSES)
    }

    /// Forgets the image, so that it is used once: the device would not be what it is now if the process that uses it
    /// ends as well.
    fn forget_image(&mut self) -> Result<(), KeepError> {
        if self.record.left.take().is_none() {
            return Ok(());
        }
        self.write_record()
    }

    /// Writes the record, which names the descriptors of the last one.
    fn write_record(&mut self) -> Result<(), KeepError> {
        let record = postcard::to_stdvec(&self.record)?;
        Ok(self.journal.write(self.stash.set(), &record)?)
    }

    /// Ends this, because the guest is removed.
    pub fn end(&self) {
        self.ender()();
    }

    /// Returns what does the same, also when this is gone.
    pub fn ender(&self) -> impl Fn() {
        let (manager, name) = (self.manager.clone(), self.name.clone());
        move || manager.forget(&name)
    }

    /// Forgets the VMM that was connected.
    pub fn disconnect(&mut self) {
        self.stream = None;
        self.record.unhandled = None;
        if self.record.connection.take().is_none() {
            return;
        }
        if let Err(error) = self.write(Change::Descriptors, &[], None) {
            refused(&self.record.spec, &error);
        }
    }

    fn write(
        &mut self,
        change: Change,
        of_state: &[Arc<OwnedFd>],
        image: Option<BorrowedFd<'_>>,
    ) -> Result<(), KeepError> {
        if change != Change::Descriptors {
            return self.write_record();
        }
        let record = postcard::to_stdvec(&self.record)?;
        let mut descriptors = vec![self.journal.file()];
        descriptors.extend(self.listeners.iter().map(AsFd::as_fd));
        descriptors.extend(self.stream.as_ref().map(AsFd::as_fd));
        descriptors.extend(of_state.iter().map(|descriptor| descriptor.as_fd()));
        descriptors.extend(image);
        let set = self.stash.put(&descriptors).map_err(KeepError::Stash)?;
        self.journal.write(set, &record)?;
        self.stash.forget().map_err(KeepError::Stash)
    }
}

/// Returns a file in memory with these bytes.
fn file_of(bytes: &[u8]) -> Result<OwnedFd, KeepError> {
    let file = memfd_create("virtio-rdmad image", MemfdFlags::CLOEXEC)?;
    let mut left = bytes;
    while !left.is_empty() {
        left = &left[rustix::io::write(&file, left)?..];
    }
    Ok(file)
}

/// Returns the bytes of such a file.
fn bytes_of(file: &OwnedFd) -> Result<Vec<u8>, KeepError> {
    let length = usize::try_from(fstat(file)?.st_size).unwrap_or(0);
    let mut bytes = vec![0; length];
    let mut done = 0;
    while done < length {
        match pread(file, &mut bytes[done..], done as u64)? {
            0 => return Err(KeepError::NoSet),
            more => done += more,
        }
    }
    Ok(bytes)
}

/// Returns the time of CLOCK_MONOTONIC, which all processes share, in nanoseconds.
pub fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = now.tv_sec.unsigned_abs();
    seconds.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec.unsigned_abs())
}

/// Keeps what the VMM of a guest says that is connected.
pub struct ConnectionJournal {
    guest: Arc<Guest>,
}

impl ConnectionJournal {
    /// Makes the journal of a connection, which has this socket, if the guest is kept.
    pub fn new(guest: &Arc<Guest>, socket: BorrowedFd<'_>) -> Option<Self> {
        let mut kept = guest.kept()?;
        let socket = socket.try_clone_to_owned();
        match socket {
            Ok(socket) => kept.stream = Some(socket.into()),
            Err(error) => {
                refused(&guest.spec.text, &error.into());
                kept.disconnect();
                return None;
            }
        }
        Some(Self { guest: guest.clone() })
    }
}

impl virtio_transport::Journal for ConnectionJournal {
    fn keep(&mut self, state: &State, change: Change) {
        if let Some(mut kept) = self.guest.kept() {
            kept.keep(state, change);
        }
    }
}

/// A guest that another process has served.
pub struct Left {
    /// What is kept of it.
    pub kept: Kept,
    /// The guest.
    pub spec: GuestSpec,
    /// The guest as its origin had named it, in the form of `--guest`. Its policy may have been changed since.
    pub named: String,
    /// Who had named it.
    pub origin: Origin,
    /// The socket that its VMM connects to, if that was kept.
    pub listener: Option<OwnedFd>,
    /// The socket of its network interface, if that was kept.
    pub nic: Option<OwnedFd>,
    /// Its VMM, if one is connected.
    pub connected: Option<Connected>,
    /// When that process left it, if it has ended in order, as a time of CLOCK_MONOTONIC in nanoseconds.
    since: Option<u64>,
}

/// What another process has left to this one.
#[derive(Default)]
pub struct Inherited {
    /// The guests.
    pub guests: Vec<Left>,
    /// A number that is higher than that of any guest.
    pub next: u64,
}

impl Inherited {
    /// Takes what another process has left to this one. What cannot be read is dropped, and logged. Call this once.
    pub fn take(manager: &Arc<Manager>) -> Result<Self, std::io::Error> {
        let mut guests = Vec::new();
        for (name, sockets) in kept_descriptors()? {
            match Left::read(manager, &name, sockets) {
                Ok(guest) => guests.push(guest),
                Err(error) => {
                    tracing::error!(%error, name, "what the last process has left cannot be read");
                    manager.forget(&name);
                }
            }
        }
        let next = guests.iter().map(|guest| guest.kept.number() + 1).max().unwrap_or(0);
        Ok(Self { guests, next })
    }

    /// Returns since when no process serves the guests, if the last one has ended in order.
    pub fn paused_since(&self) -> Option<Instant> {
        let left = self.guests.iter().filter_map(|guest| guest.since).min()?;
        Instant::now().checked_sub(Duration::from_nanos(now().saturating_sub(left)))
    }

    /// Takes the guest of this name out, if there is one.
    pub fn remove(&mut self, name: &str) -> Option<Left> {
        let at = self.guests.iter().position(|guest| guest.spec.name == name)?;
        Some(self.guests.swap_remove(at))
    }
}

impl Left {
    fn read(manager: &Arc<Manager>, name: &str, sockets: Vec<OwnedFd>) -> Result<Self, KeepError> {
        let sockets = sockets.try_into();
        let sockets = sockets.map_err(|other: Vec<_>| KeepError::Sockets(other.len()))?;
        let (stash, mut sets) = Stash::inherit(sockets)?;
        // The journal is in each set, and only its record says which set belongs to it.
        let first = sets.values().next().and_then(|set| set.first()).ok_or(KeepError::NoSet)?;
        let (journal, entry) = Journal::inherit(first.try_clone()?)?;
        let set = sets.remove(&entry.set).ok_or(KeepError::NoSet)?;
        let record: Record = postcard::from_bytes(&entry.record)?;
        let mut set = set.into_iter().skip(1);
        let mut take = |is_there: bool| match is_there.then(|| set.next()) {
            Some(None) => Err(KeepError::NoSet),
            descriptor => Ok(descriptor.flatten()),
        };
        let spec: GuestSpec = record.spec.parse()?;
        let listener = take(record.has_listener)?;
        let nic = take(record.has_listener && spec.nic.is_some())?;
        let stream = take(record.connection.is_some())?;
        let mut descriptors: Vec<_> = set.map(Arc::new).collect();
        let image = record.left.and_then(|_| descriptors.pop());
        let image = image.map(|file| bytes_of(&file)).transpose()?;
        let since = record.left;
        let (named, origin) = (record.named.clone(), record.origin);
        let connected = stream.zip(record.connection.clone()).map(|(stream, bytes)| Connected {
            stream: stream.into(),
            said: Some(Said { state: State { bytes, descriptors }, image }),
        });
        let listeners = listener.iter().chain(&nic).map(OwnedFd::try_clone);
        let listeners = listeners.collect::<Result<_, _>>()?;
        let (manager, name, stream) = (manager.clone(), name.to_owned(), None);
        let mut kept = Kept { manager, name, stash, journal, record, listeners, stream };
        kept.forget_image()?;
        let mut left = Self { kept, spec, named, origin, listener, nic, connected, since };
        left.review()?;
        Ok(left)
    }

    /// Disconnects the VMM if its next message may be what has ended process after process.
    fn review(&mut self) -> Result<(), KeepError> {
        let Some(Connected { stream, .. }) = &self.connected else { return Ok(()) };
        if self.since.is_some() || self.kept.may_handle(stream)? {
            return Ok(());
        }
        tracing::error!(
            guest = self.spec.name,
            "{MOST_PROCESSES} processes have ended while the same message of its VMM waited; its VMM is disconnected"
        );
        self.connected = None;
        self.kept.disconnect();
        Ok(())
    }
}

fn refused(spec: &str, error: &KeepError) {
    tracing::error!(%error, spec, "the guest would not survive the end of this process");
}
