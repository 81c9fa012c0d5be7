// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is kept of one guest.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use virtio_transport::{Change, State};

use super::journal::{Journal, JournalError};
use super::manager::{kept_descriptors, Manager};
use super::stash::Stash;
use crate::guest::Guest;
use crate::options::{GuestSpec, SpecError};

/// The beginning of the names of what is kept. A number follows.
const NAME: &str = "guest-";

/// The record of a guest's journal. The descriptors of the set are: the journal, the listener if there is one, and
/// with a connection its socket and the descriptors of its state.
#[derive(Debug, Deserialize, Serialize)]
struct Record {
    /// The guest, as on the command line.
    spec: String,
    /// Whether it was added while the process ran.
    is_added: bool,
    /// Whether the socket that its VMM connects to is kept.
    has_listener: bool,
    /// What the VMM that is connected has said.
    connection: Option<Vec<u8>>,
}

/// A VMM that has connected, and perhaps said something to another process.
#[derive(Debug)]
pub struct Connected {
    /// The connection.
    pub stream: UnixStream,
    /// What the VMM has said so far to another process.
    pub state: Option<State>,
}

/// Why something cannot be kept.
#[derive(Debug, thiserror::Error)]
enum KeepError {
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error("the stash: {0}")]
    Stash(rustix::io::Errno),
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
    listener: Option<OwnedFd>,
}

impl Kept {
    /// Begins to keep a guest, which has this number: one that no other guest has, nor had. `listener` is the socket
    /// that its VMM connects to, if the successor cannot make that itself. Returns nothing, and logs why, if the guest
    /// cannot be kept.
    pub fn new(
        manager: &Arc<Manager>,
        number: u64,
        spec: &str,
        is_added: bool,
        listener: Option<OwnedFd>,
    ) -> Option<Self> {
        let name = format!("{NAME}{number}");
        let begin = || {
            let record = Record {
                spec: spec.to_owned(),
                is_added,
                has_listener: listener.is_some(),
                connection: None,
            };
            let (stash, journal) = (Stash::new()?, Journal::new()?);
            let mut kept =
                Self { manager: manager.clone(), name, stash, journal, record, listener };
            kept.write(Change::Descriptors, None)?;
            manager.keep(&kept.name, kept.stash.sockets())?;
            Ok::<_, KeepError>(kept)
        };
        begin().map_err(|error| refused(spec, &error)).ok()
    }

    /// Goes on to keep a guest that another process has served, which is now as `spec` says. No connection of it is
    /// kept before a [`ConnectionJournal`] begins.
    pub fn go_on(&mut self, spec: &str, is_added: bool) {
        spec.clone_into(&mut self.record.spec);
        self.record.is_added = is_added;
        if !is_added {
            self.listener = None;
            self.record.has_listener = false;
        }
    }

    /// Returns the number of the guest.
    fn number(&self) -> u64 {
        self.name.strip_prefix(NAME).and_then(|number| number.parse().ok()).unwrap_or(0)
    }

    /// Keeps what the VMM has said, which is connected by `stream`.
    fn keep(&mut self, stream: BorrowedFd<'_>, state: &State, change: Change) {
        self.record.connection = Some(state.bytes.clone());
        if let Err(error) = self.write(change, Some((stream, state))) {
            refused(&self.record.spec, &error);
            self.disconnect();
        }
    }

    /// Ends this, because the guest is removed.
    pub fn end(&self) {
        self.manager.forget(&self.name);
    }

    /// Forgets the VMM that was connected.
    pub fn disconnect(&mut self) {
        if self.record.connection.take().is_none() {
            return;
        }
        if let Err(error) = self.write(Change::Descriptors, None) {
            refused(&self.record.spec, &error);
        }
    }

    fn write(
        &mut self,
        change: Change,
        connection: Option<(BorrowedFd<'_>, &State)>,
    ) -> Result<(), KeepError> {
        let record = postcard::to_stdvec(&self.record)?;
        if change != Change::Descriptors {
            return Ok(self.journal.write(self.stash.set(), &record)?);
        }
        let mut descriptors = vec![self.journal.file()];
        descriptors.extend(self.listener.as_ref().map(AsFd::as_fd));
        if let Some((stream, state)) = connection {
            descriptors.push(stream);
            descriptors.extend(state.descriptors.iter().map(|descriptor| descriptor.as_fd()));
        }
        let set = self.stash.put(&descriptors).map_err(KeepError::Stash)?;
        self.journal.write(set, &record)?;
        self.stash.forget().map_err(KeepError::Stash)
    }
}

/// Keeps what the VMM of a guest says that is connected by a stream.
pub struct ConnectionJournal {
    guest: Arc<Guest>,
    stream: UnixStream,
}

impl ConnectionJournal {
    /// Makes the journal of a connection, if the guest is kept.
    pub fn new(guest: &Arc<Guest>, stream: &UnixStream) -> Option<Self> {
        guest.kept.as_ref()?;
        let stream = stream.try_clone();
        let stream = stream.map_err(|error| refused(&guest.spec.text, &error.into())).ok()?;
        Some(Self { guest: guest.clone(), stream })
    }
}

impl virtio_transport::Journal for ConnectionJournal {
    fn keep(&mut self, state: &State, change: Change) {
        if let Some(mut kept) = self.guest.kept() {
            kept.keep(self.stream.as_fd(), state, change);
        }
    }
}

/// A guest that another process has served.
pub struct Left {
    /// What is kept of it.
    pub kept: Kept,
    /// The guest.
    pub spec: GuestSpec,
    /// Whether it was added while that process ran.
    pub is_added: bool,
    /// The socket that its VMM connects to, if that was kept.
    pub listener: Option<OwnedFd>,
    /// Its VMM, if one is connected.
    pub connected: Option<Connected>,
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
        let listener = take(record.has_listener)?;
        let stream = take(record.connection.is_some())?;
        let connected = stream.zip(record.connection.clone()).map(|(stream, bytes)| Connected {
            stream: stream.into(),
            state: Some(State { bytes, descriptors: set.map(Arc::new).collect() }),
        });
        let (spec, is_added) = (record.spec.parse()?, record.is_added);
        let kept_listener = listener.as_ref().map(OwnedFd::try_clone).transpose()?;
        let (manager, name) = (manager.clone(), name.to_owned());
        let kept = Kept { manager, name, stash, journal, record, listener: kept_listener };
        Ok(Self { kept, spec, is_added, listener, connected })
    }
}

fn refused(spec: &str, error: &KeepError) {
    tracing::error!(%error, spec, "the guest would not survive the end of this process");
}
