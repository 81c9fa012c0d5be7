// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sockets that VMMs and clients connect to, on their way from a process that ends to the next one.
//!
//! A connection waits in the queue of its socket while no process accepts it. So the service manager keeps the sockets
//! meanwhile, and their files stay. A process that does not take the sockets over would find somebody listening where
//! it wants to, and not start. So a process leaves them only if it is asked to, which a program that takes them over
//! does ([`super::ask`]), and the service manager has no such socket while a process runs. The sockets of guests that
//! were added are kept with these guests all the time.

use std::collections::BTreeMap;
use std::io::Error;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use super::Manager;
use crate::os::access::Access;
use crate::os::socket::{FileId, Kind, Name, Socket};

/// The beginning of the names by which the service manager keeps sockets. The device and the inode of the file follow,
/// or twice 0 if the process has not made the file.
const NAME: &str = "listener-";

/// Sockets that another process has left to this one.
#[derive(Default)]
pub struct Listeners {
    /// The sockets that this process does not use yet.
    left: Vec<Left>,
    /// The names by which the service manager keeps them, but for those that were adopted.
    names: Vec<String>,
    /// Whether sockets of guests that were added are among them.
    has_adopted: bool,
}

/// A socket that another process has left.
struct Left {
    descriptor: OwnedFd,
    path: PathBuf,
    /// Its file, if that is known.
    file: Option<FileId>,
    /// Whether it is that of a guest that was added. Nobody makes such a socket again.
    is_adopted: bool,
}

impl Left {
    /// Takes a socket, if it has a path.
    fn of(descriptor: OwnedFd, file: Option<FileId>, is_adopted: bool) -> Option<Self> {
        let listener = UnixListener::from(descriptor);
        let path = listener.local_addr().ok()?.as_pathname()?.to_owned();
        Some(Self { descriptor: listener.into(), path, file, is_adopted })
    }

    /// Returns the name of its file, if that is still there.
    fn name(&self) -> Option<Name> {
        let name = Name::of_socket(&self.path).ok()?;
        self.file.is_none_or(|file| file == name.file()).then_some(name)
    }

    /// Removes its file, because nobody is to connect there any more.
    fn remove(self) {
        if let Some(name) = self.name() {
            name.remove();
        }
    }
}

impl Listeners {
    /// Takes the sockets out of what the service manager has kept.
    pub fn take(kept: &mut BTreeMap<String, Vec<OwnedFd>>) -> Self {
        let names: Vec<_> = kept.keys().filter(|name| name.starts_with(NAME)).cloned().collect();
        let mut left = Vec::new();
        for name in &names {
            let file = file_of(name);
            let descriptors = kept.remove(name).unwrap_or_default();
            left.extend(descriptors.into_iter().filter_map(|one| Left::of(one, file, false)));
        }
        Self { left, names, has_adopted: false }
    }

    /// Takes a socket of a guest that was added to an earlier process, and that the options of this one name.
    pub fn adopt(&mut self, socket: OwnedFd) {
        self.left.extend(Left::of(socket, None, true));
        self.has_adopted = true;
    }

    /// Returns the socket of this path: the one that another process has left, if it `may_stay` and its file is there,
    /// and a new one otherwise.
    pub fn bind(
        &mut self,
        path: &Path,
        kind: Kind,
        access: &Access,
        may_stay: bool,
    ) -> Result<Socket, Error> {
        let at = self.left.iter().position(|left| left.path == path);
        if let Some(left) = at.map(|at| self.left.swap_remove(at)) {
            let name = left.name().filter(|_| may_stay);
            let descriptor = left.descriptor.try_clone()?;
            match name.map(|name| Socket::inherited(descriptor, kind, name)) {
                Some(Ok(socket)) => return Ok(socket),
                _ => left.remove(),
            }
        }
        Socket::bind(path, kind, access)
    }

    /// Removes the files of the sockets that this process has no use for. Those of guests that were added stay: this
    /// process may fail yet, and the next one may have the guests as they were.
    pub fn remove_rest(&mut self) {
        self.left.drain(..).filter(|left| !left.is_adopted).for_each(Left::remove);
    }

    /// Makes the service manager close the sockets, because this process serves now.
    pub fn forget(&self, manager: &Manager) {
        self.names.iter().for_each(|name| manager.forget(name));
    }

    /// Returns whether another process has left any.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty() && !self.has_adopted
    }
}

/// Leaves a socket to the next process. Its file stays.
pub fn leave(manager: &Manager, socket: &Socket) {
    let (device, inode) = socket.file().unwrap_or_default();
    let name = format!("{NAME}{device}-{inode}");
    let descriptor = [socket.listener().as_fd()];
    let kept = manager.keep(&name, &descriptor).or_else(|_| {
        // There are more sockets than messages that may wait.
        manager.flush(super::PATIENCE);
        manager.keep(&name, &descriptor)
    });
    match kept {
        Ok(()) => socket.set_stays(true),
        Err(error) => tracing::warn!(%error, "a socket is not left to the next process"),
    }
}

/// Returns the file that a name has.
fn file_of(name: &str) -> Option<FileId> {
    let (device, inode) = name.strip_prefix(NAME)?.split_once('-')?;
    let file = (device.parse().ok()?, inode.parse().ok()?);
    Some(file).filter(|file| *file != FileId::default())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Makes the sockets a and b in a directory as another process does, and what the service manager hands over of
    /// them.
    fn left_in(directory: &Path) -> BTreeMap<String, Vec<OwnedFd>> {
        std::fs::create_dir_all(directory).unwrap();
        let leave = |name: &str| {
            let path = directory.join(name);
            let socket = Socket::bind(&path, Kind::Stream, &Access::default()).unwrap();
            socket.set_stays(true);
            let (device, inode) = socket.file().unwrap();
            let descriptor = socket.listener().as_fd().try_clone_to_owned().unwrap();
            (format!("{NAME}{device}-{inode}"), vec![descriptor])
        };
        ["a", "b"].map(leave).into()
    }

    #[test]
    fn sockets_that_are_wanted_stay() {
        let directory = std::env::temp_dir().join(format!("rdmad-left-{}", std::process::id()));
        let (a, b, c) = (directory.join("a"), directory.join("b"), directory.join("c"));
        let mut kept = left_in(&directory);
        kept.insert("guest-1".to_owned(), Vec::new());
        let _waits = UnixStream::connect(&a).unwrap();
        let mut listeners = Listeners::take(&mut kept);
        assert_eq!((kept.len(), listeners.names.len()), (1, 2));
        let mut bind = |path, may_stay| {
            listeners.bind(path, Kind::Stream, &Access::default(), may_stay).unwrap()
        };
        let (one, two) = (bind(&a, true), bind(&c, true));
        assert!(one.accept().unwrap().is_some() && two.accept().unwrap().is_none());
        listeners.remove_rest();
        assert!(a.exists() && !b.exists() && c.exists());
        // The file of an inherited socket stays until this process has it for good.
        drop((one, two));
        assert!(a.exists() && !c.exists());
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn sockets_that_cannot_stay_are_made_again() {
        let directory = std::env::temp_dir().join(format!("rdmad-again-{}", std::process::id()));
        let (a, b) = (directory.join("a"), directory.join("b"));
        let mut kept = left_in(&directory);
        let mut listeners = Listeners::take(&mut kept);
        std::fs::remove_file(&b).unwrap();
        let _waits = UnixStream::connect(&a).unwrap();
        for (path, kind, may_stay) in [(&a, Kind::Stream, false), (&b, Kind::Packets, true)] {
            let socket = listeners.bind(path, kind, &Access::default(), may_stay).unwrap();
            assert_eq!(socket.file(), Some(Name::of_socket(path).unwrap().file()));
            assert!(socket.accept().unwrap().is_none(), "nobody has connected to this one");
        }
        assert!(!a.exists() && !b.exists());
        std::fs::remove_dir_all(directory).unwrap();
    }
}
