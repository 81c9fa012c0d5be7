// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state of one guest that is kept for a later process.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blame::Board;
use rustix::fs::{fstat, memfd_create, MemfdFlags};
use rustix::io::{pread, Errno};
use rustix::time::{clock_gettime, ClockId};
use serde::{Deserialize, Serialize};
use virtio_transport::{Change, ConnectionState};

use super::journal::{JournalError, JournalFile};
use super::listeners::Listeners;
use super::manager::{kept_descriptors, Manager};
use super::stash::Stash;
use crate::spec::{GuestSpec, Origin, SpecError};

/// The beginning of the name under which a guest is kept. A number follows.
const NAME: &str = "guest-";

/// The record of a guest's journal. The descriptors of the set are: the journal, the listeners if there are any, with a
/// connection its socket and the descriptors of its state, and the image if there is one.
///
/// In the file it comes first, and [`More`] follows. A process that does not know what follows ignores it, so that an
/// older version of this program goes on with what a newer one has left.
#[derive(Debug, Deserialize, Serialize)]
struct Record {
    /// The guest as it is now: the text of a [`GuestSpec`], because that is what earlier versions of this program read.
    spec: String,
    /// The guest as its origin named it, likewise. Its policy may have been changed since.
    named: String,
    /// The origin that has named the guest.
    origin: Origin,
    /// Whether it leaves when its VMM does.
    leaves: bool,
    /// Whether the socket that its VMM connects to is kept, and behind it that of its network interface if the spec has
    /// `nic=`.
    has_listener: bool,
    /// The state of the connection, if a VMM is connected.
    connection: Option<Vec<u8>>,
    /// The time, by [`now`], at which the device stopped. It is there if the last process has left an image, which is
    /// the last descriptor of the set.
    left: Option<u64>,
    /// A field of earlier versions: a message of the VMM, and the number of processes that had ended while it waited.
    message: Option<(Vec<u8>, u8)>,
}

/// The fields behind the record. A later version may append fields.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
struct More {
    /// The number of descriptors of the connection's state.
    of_state: u32,
    /// The number of processes that have aborted while they served the guest, with less than [`FORGIVEN`] between two.
    aborts: u8,
    /// The time, by [`now`], at which the last of these aborts was noticed.
    last_abort: u64,
}

/// The number of processes that abort while they serve one guest before its VMM is disconnected, so that the other
/// guests go on.
const MOST_ABORTS: u8 = 3;

/// After this time in nanoseconds without another abort, those before do not count any more.
const FORGIVEN: u64 = 600_000_000_000;

/// The name by which the service manager keeps what the threads say on whose behalf they work ([`blame`]).
const BOARD: &str = "board";

/// On the board, the number of a guest counts from 1, and this is added while the guest is loaded.
const LOADS: u64 = 1 << 62;

/// A VMM that has connected.
#[derive(Debug)]
pub struct Connected {
    /// The connection.
    pub stream: UnixStream,
    /// The state of the connection, if another process has served it.
    pub said: Option<Said>,
}

/// The state of a connection that another process has served, and the image of the device.
#[derive(Debug)]
pub struct Said {
    /// The state of the connection.
    pub state: ConnectionState,
    /// The image of the device, if that process has ended in order.
    pub image: Option<Vec<u8>>,
}

/// The reason why something cannot be kept.
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
    #[error("it has other descriptors than the journal says")]
    OtherSet,
    #[error("{0} descriptors in the place of two")]
    Sockets(usize),
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// The state of a guest that is kept for as long as the guest is there.
pub struct Kept {
    manager: Arc<Manager>,
    /// The name by which the service manager keeps it.
    name: String,
    stash: Stash,
    journal: JournalFile,
    record: Record,
    /// The guest as its origin named it, as the record has it.
    named: GuestSpec,
    more: More,
    /// The number of the set of descriptors that belongs to the record.
    set: u64,
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
        spec: &GuestSpec,
        origin: Origin,
        listeners: Vec<OwnedFd>,
    ) -> Option<Self> {
        let name = format!("{NAME}{number}");
        let begin = || {
            let record = Record {
                spec: spec.to_string(),
                named: spec.to_string(),
                origin,
                leaves: false,
                has_listener: !listeners.is_empty(),
                connection: None,
                left: None,
                message: None,
            };
            let (stash, journal) = (Stash::new()?, JournalFile::new()?);
            let (manager, named) = (manager.clone(), spec.clone());
            let (more, set, stream) = (More::default(), 0, None);
            let mut kept =
                Self { manager, name, stash, journal, record, named, more, set, listeners, stream };
            kept.write(Change::Descriptors, &[], None)?;
            kept.manager.keep(&kept.name, &kept.stash.sockets())?;
            Ok::<_, KeepError>(kept)
        };
        begin().map_err(|error| refused(&spec.to_string(), &error)).ok()
    }

    /// Goes on to keep a guest that another process has served, which is now as `spec` says. No connection of it is
    /// kept before [`Self::connect`].
    pub fn go_on(&mut self, spec: &GuestSpec, origin: Origin) {
        self.record.spec = spec.to_string();
        self.record.origin = origin;
        if origin != Origin::Call {
            self.listeners.clear();
            self.record.has_listener = false;
        }
    }

    /// Keeps the guest as it is now if it has no VMM. One that has a VMM is kept by [`Self::connect`].
    pub fn renew(&mut self) {
        if self.record.connection.is_some() {
            return;
        }
        if let Err(error) = self.write(Change::Descriptors, &[], None) {
            refused(&self.record.spec, &error);
        }
    }

    /// Returns how the guest's origin names it.
    pub fn named(&self) -> &GuestSpec {
        &self.named
    }

    /// Notes that the guest's origin names it so now.
    pub fn set_named(&mut self, named: &GuestSpec) {
        self.record.named = named.to_string();
        named.clone_into(&mut self.named);
    }

    /// Keeps the guest as it is from now on, after a change of its policy.
    pub fn set_spec(&mut self, spec: &GuestSpec) {
        self.record.spec = spec.to_string();
        if let Err(error) = self.write_record() {
            refused(&self.record.spec, &error);
        }
    }

    /// Returns whether the guest leaves when its VMM does.
    pub fn leaves(&self) -> bool {
        self.record.leaves
    }

    /// Notes that the guest does not leave when its VMM does.
    pub fn set_stays(&mut self) {
        self.record.leaves = false;
    }

    /// Notes that the guest leaves when its VMM does, whichever process serves it then.
    pub fn set_leaves(&mut self) {
        self.record.leaves = true;
        if let Err(error) = self.write_record() {
            refused(&self.record.spec, &error);
        }
    }

    /// Returns the subject that a thread writes on the board while it works for the guest.
    pub fn subject(&self) -> u64 {
        self.number() + 1
    }

    /// Notes that a process has aborted while it served the guest.
    fn note_abort(&mut self) {
        let now = now();
        let again = now.saturating_sub(self.more.last_abort) < FORGIVEN;
        self.more.aborts = if again { self.more.aborts.saturating_add(1) } else { 1 };
        self.more.last_abort = now;
    }

    /// Returns whether the guest is not served, because processes have aborted while they served it.
    pub fn is_fenced(&self) -> bool {
        self.more.aborts >= MOST_ABORTS && now().saturating_sub(self.more.last_abort) < FORGIVEN
    }

    /// Returns the number of the guest.
    fn number(&self) -> u64 {
        self.name.strip_prefix(NAME).and_then(|number| number.parse().ok()).unwrap_or(0)
    }

    /// Begins to keep the connection of a VMM, which has this socket, in the place of any other one. Returns whether it
    /// can be kept; otherwise this logs why not.
    pub fn connect(&mut self, socket: BorrowedFd<'_>) -> bool {
        match socket.try_clone_to_owned() {
            Ok(socket) => self.stream = Some(socket.into()),
            Err(error) => {
                refused(&self.record.spec, &error.into());
                self.disconnect();
                return false;
            }
        }
        true
    }

    /// Keeps the state of the connection of the VMM.
    pub fn keep(&mut self, state: &ConnectionState, change: Change) {
        self.record.connection = Some(state.bytes.clone());
        // The set has the image as well until it is another one.
        let has_image = self.record.left.take().is_some();
        let change = if has_image { Change::Descriptors } else { change };
        if let Err(error) = self.write(change, &state.descriptors, None) {
            refused(&self.record.spec, &error);
            self.disconnect();
        }
    }

    /// Keeps the last state that this process knows: that of the connection, and the image of the device, which stopped
    /// at this time of [`now`].
    pub fn leave(&mut self, state: &ConnectionState, image: &[u8], stopped: u64) {
        self.record.connection = Some(state.bytes.clone());
        self.record.left = Some(stopped);
        let write = |kept: &mut Self| {
            let file = file_of(image)?;
            kept.write(Change::Descriptors, &state.descriptors, Some(file.as_fd()))
        };
        if let Err(error) = write(self) {
            refused(&self.record.spec, &error);
        }
    }

    /// Writes the record, which names the descriptors of the last one.
    fn write_record(&mut self) -> Result<(), KeepError> {
        let record = self.encode()?;
        Ok(self.journal.write(self.set, &record)?)
    }

    fn encode(&self) -> Result<Vec<u8>, postcard::Error> {
        let record = postcard::to_stdvec(&self.record)?;
        postcard::to_extend(&self.more, record)
    }

    /// Gives this up, because the guest is removed. The record says so at once, because the service manager may not
    /// have read the message when this process is killed.
    pub fn end(&mut self) {
        self.set_leaves();
        self.ender()();
    }

    /// Returns a function that makes the service manager forget the guest, also when this has another owner or is gone.
    pub fn ender(&self) -> impl Fn() {
        let (manager, name) = (self.manager.clone(), self.name.clone());
        move || manager.forget(&name)
    }

    /// Forgets the VMM that was connected.
    pub fn disconnect(&mut self) {
        self.stream = None;
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
        let before = self.more;
        self.more.of_state = u32::try_from(of_state.len()).unwrap_or(u32::MAX);
        let record = self.encode()?;
        let mut descriptors = vec![self.journal.file()];
        descriptors.extend(self.listeners.iter().map(AsFd::as_fd));
        descriptors.extend(self.stream.as_ref().map(AsFd::as_fd));
        descriptors.extend(of_state.iter().map(|descriptor| descriptor.as_fd()));
        descriptors.extend(image);
        let set = self.stash.put(&descriptors).map_err(KeepError::Stash);
        let written = set.and_then(|set| Ok((set, self.journal.write(set, &record)?)));
        // After an error the record from before is still the one that counts.
        (self.set, ()) = written.inspect_err(|_| self.more = before)?;
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

/// A guest that another process has served.
pub struct Left {
    /// The state that is kept of the guest.
    pub kept: Kept,
    /// The guest.
    pub spec: GuestSpec,
    /// The origin that has named the guest.
    pub origin: Origin,
    /// The socket that its VMM connects to, if that was kept.
    pub listener: Option<OwnedFd>,
    /// The socket of its network interface, if that was kept.
    pub nic: Option<OwnedFd>,
    /// Its VMM, if one is connected.
    pub connected: Option<Connected>,
    /// Whether its VMM is to be disconnected, because processes have aborted while they served it.
    pub is_fenced: bool,
    /// The time at which that process left it, in nanoseconds of CLOCK_MONOTONIC, if the process has ended in order.
    since: Option<u64>,
}

/// Takes over the board of another process, or makes one.
fn board(manager: &Manager, kept: Option<Vec<OwnedFd>>) -> Option<Board> {
    let inherited = kept.and_then(|mut kept| Board::inherit(kept.pop()?).ok());
    if inherited.is_some() {
        return inherited;
    }
    let make = || {
        let board = Board::new()?;
        manager.forget(BOARD);
        manager.keep(BOARD, &[board.file()])?;
        Ok::<_, std::io::Error>(board)
    };
    let failed = |error: &std::io::Error| {
        tracing::warn!(%error, "a later process would not know for which guest this one aborts");
    };
    make().inspect_err(failed).ok()
}

/// The reason why a process cannot go on with the state that another one has left. It must not serve then: each guest
/// that it does not know of would lose its device.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// The service manager does not hand over what it has kept.
    #[error("the descriptors that the service manager keeps: {0}")]
    Store(std::io::Error),
    /// The kept state of a guest has been damaged, or another version of this program has written it.
    #[error(
        "{name}: what the last process has left cannot be read: {reason}. Nothing of it has changed: start the version \
         that has served the guests, or use --forget-unreadable, with which the guests that cannot be read lose their devices"
    )]
    Guest {
        /// The name by which the service manager keeps it.
        name: String,
        /// The reason.
        reason: String,
    },
}

/// The state that another process has left to this one.
#[derive(Default)]
pub struct Inherited {
    /// The guests.
    pub guests: Vec<Left>,
    /// A number that is higher than that of any guest.
    pub next: u64,
    /// The board on which the threads say on whose behalf they work.
    pub board: Option<Board>,
    /// The sockets that it has made.
    pub listeners: Listeners,
}

impl Inherited {
    /// Takes what another process has left to this one, and changes nothing of it. What cannot be read is an error, and
    /// stays where it is for a process that can read it; with `forget` it is logged, and the service manager forgets
    /// it. Call this once.
    pub fn take(manager: &Arc<Manager>, forget: bool) -> Result<Self, Unreadable> {
        let mut guests = Vec::new();
        let mut kept = kept_descriptors().map_err(Unreadable::Store)?;
        let board = board(manager, kept.remove(BOARD));
        let listeners = Listeners::take(&mut kept);
        for (name, sockets) in kept {
            match Left::read(manager, &name, sockets) {
                Ok(guest) => guests.push(guest),
                Err(error) if forget => {
                    tracing::error!(%error, name, "what the last process has left is forgotten");
                    manager.forget(&name);
                }
                Err(error) => {
                    return Err(Unreadable::Guest { name, reason: error.to_string() });
                }
            }
        }
        let next = guests.iter().map(|guest| guest.kept.number() + 1).max().unwrap_or(0);
        let aborted = board.as_ref().map(Board::aborted).unwrap_or_default();
        for guest in &mut guests {
            guest.note_aborts(&aborted);
        }
        Ok(Self { guests, next, board, listeners })
    }

    /// Returns since when no process serves the guests, if the last one has ended in order.
    pub fn paused_since(&self) -> Option<Instant> {
        let left = self.guests.iter().filter_map(|guest| guest.since).min()?;
        Instant::now().checked_sub(Duration::from_nanos(now().saturating_sub(left)))
    }

    /// Returns whether the sockets of this guest are to have the same owner and mode as those that are there.
    pub fn has_access_of(&self, spec: &GuestSpec) -> bool {
        let mut olds = self.guests.iter().map(|guest| &guest.spec);
        olds.find(|old| old.name == spec.name).is_some_and(|old| old.access() == spec.access())
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
        let (journal, entry) = JournalFile::inherit(first.try_clone()?)?;
        let set = sets.remove(&entry.set).ok_or(KeepError::NoSet)?;
        let (record, rest): (Record, _) = postcard::take_from_bytes(&entry.record)?;
        let more = (!rest.is_empty()).then(|| postcard::take_from_bytes::<More>(rest));
        let more = more.transpose()?.map(|(more, _)| more);
        let mut set = set.into_iter().skip(1);
        let mut take = |is_there: bool| match is_there.then(|| set.next()) {
            Some(None) => Err(KeepError::NoSet),
            descriptor => Ok(descriptor.flatten()),
        };
        let spec: GuestSpec = record.spec.parse()?;
        let named: GuestSpec = record.named.parse()?;
        let listener = take(record.has_listener)?;
        let nic = take(record.has_listener && spec.nic.is_some())?;
        let stream = take(record.connection.is_some())?;
        let mut descriptors: Vec<_> = set.map(Arc::new).collect();
        let image = record.left.and_then(|_| descriptors.pop());
        let image = image.map(|file| bytes_of(&file)).transpose()?;
        let of_state = u32::try_from(descriptors.len()).unwrap_or(u32::MAX);
        if more.is_some_and(|more| more.of_state != of_state) {
            return Err(KeepError::OtherSet);
        }
        let more = more.unwrap_or(More { of_state, ..More::default() });
        let since = record.left;
        let origin = record.origin;
        let connected = stream.zip(record.connection.clone()).map(|(stream, bytes)| Connected {
            stream: stream.into(),
            said: Some(Said { state: ConnectionState { bytes, descriptors }, image }),
        });
        let listeners = listener.iter().chain(&nic).map(OwnedFd::try_clone);
        let listeners = listeners.collect::<Result<_, _>>()?;
        let (manager, name, set, stream) = (manager.clone(), name.to_owned(), entry.set, None);
        let kept =
            Kept { manager, name, stash, journal, record, named, more, set, listeners, stream };
        let is_fenced = false;
        Ok(Self { kept, spec, origin, listener, nic, connected, is_fenced, since })
    }
}

impl Left {
    /// Returns whether the guest is gone: it was to leave with its VMM, or was removed.
    pub fn is_gone(&self) -> bool {
        self.kept.leaves() && self.connected.is_none()
    }

    /// Notes that threads of another process have aborted while they worked for these subjects.
    fn note_aborts(&mut self, aborted: &[u64]) {
        let (guest, subject) = (&self.spec.name, self.kept.subject());
        if aborted.contains(&(subject | LOADS)) {
            tracing::error!(
                guest,
                "a process has aborted while it loaded the device, which needs a reset"
            );
            if let Some(said) = self.connected.as_mut().and_then(|vmm| vmm.said.as_mut()) {
                said.image = None;
            }
        }
        if aborted.contains(&subject) {
            self.kept.note_abort();
            tracing::error!(
                guest,
                aborts = self.kept.more.aborts,
                "a process has aborted while it served the guest"
            );
        }
        if self.kept.is_fenced() && self.connected.take().is_some() {
            tracing::error!(
                guest,
                "{MOST_ABORTS} processes have aborted while they served the guest: its VMM is disconnected, and no VMM may connect for ten minutes"
            );
            self.is_fenced = true;
        }
    }
}

/// The work of a thread, as the thread writes it on the board.
#[derive(Clone, Copy, Debug)]
pub enum Work {
    /// No guest.
    Nobody,
    /// A guest that it serves, by [`Kept::subject`].
    Serve(u64),
    /// A guest that it loads.
    Load(u64),
}

impl Work {
    /// Returns the subject that is written on the board.
    pub fn subject(self) -> u64 {
        match self {
            Self::Nobody => 0,
            Self::Serve(subject) => subject,
            Self::Load(subject) => subject | LOADS,
        }
    }
}

fn refused(spec: &str, error: &KeepError) {
    tracing::error!(%error, spec, "the guest would not survive the end of this process");
}
