// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sockets that have a file.

use std::fs::File;
use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use network::Framing;
use rustix::fs::{fcntl_setfl, flock, FlockOperation, OFlags};
use rustix::io::Errno;
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{
    bind, listen, socket_with, AddressFamily, SocketAddrUnix, SocketFlags, SocketType,
};

use super::access::Access;

/// The number of connections that may wait to be accepted.
const BACKLOG: i32 = 16;

/// The time for which another process may lock the directory of a socket. It does so for some system calls.
const LOCKED: Duration = Duration::from_secs(5);

/// The form in which a socket gives the bytes that come.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// The bytes come as a stream.
    Stream,
    /// The bytes come as packets (SOCK_SEQPACKET).
    Packets,
}

impl From<Framing> for Kind {
    /// Returns how a VMM connects that gives frames so.
    fn from(framing: Framing) -> Self {
        match framing {
            Framing::Stream => Self::Stream,
            Framing::Packets => Self::Packets,
        }
    }
}

/// A socket that other processes connect to. Its file is removed when this is dropped, if the process
/// may remove files; otherwise a [`Remover`](crate::os::remover::Remover) removes it.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    /// Its file, if this process or an earlier one has made it.
    name: Option<Name>,
    /// Whether the file stays when this is dropped, because another process goes on with the socket.
    stays: AtomicBool,
}

/// Device and inode of a file.
pub type FileId = (u64, u64);

impl Socket {
    /// Makes the socket. A socket that an earlier process left at this path is replaced. It is an error
    /// if a process still listens there, or if the file is not a socket.
    pub fn bind(path: &Path, kind: Kind, access: &Access) -> Result<Self, Error> {
        let named = |error: Error| Error::new(error.kind(), format!("{}: {error}", path.display()));
        // Another process would take this socket for an abandoned one until it listens.
        let _lock = lock_directory(path).map_err(named)?;
        remove_stale(path).map_err(named)?;
        let listener = listen_at(path, kind, access).map_err(named)?;
        listener.set_nonblocking(true).map_err(named)?;
        let name = Name::of(path).map_err(named)?;
        Ok(Self { listener, name: Some(name), stays: AtomicBool::new(false) })
    }

    /// Takes a socket that another process has made, and has passed on. It is an error if the descriptor is not a
    /// socket of this kind that connections can be made to. The file stays when this is dropped.
    pub fn passed(descriptor: OwnedFd, kind: Kind) -> Result<Self, Error> {
        let (wanted, refused) = match kind {
            Kind::Stream => (SocketType::STREAM, "not a listening UNIX stream socket"),
            Kind::Packets => (SocketType::SEQPACKET, "not a listening UNIX socket of packets"),
        };
        let is_right = socket_domain(&descriptor)? == AddressFamily::UNIX
            && socket_type(&descriptor)? == wanted
            && socket_acceptconn(&descriptor)?;
        if !is_right {
            return Err(Error::new(ErrorKind::InvalidInput, refused));
        }
        // The standard library makes an ioctl of it, which the sandbox does not allow.
        fcntl_setfl(&descriptor, OFlags::RDWR | OFlags::NONBLOCK)?;
        Ok(Self { listener: descriptor.into(), name: None, stays: AtomicBool::new(false) })
    }

    /// Goes on with a socket of this name that an earlier process has made. Its file stays, also when this is dropped,
    /// until [`Self::set_stays`].
    pub fn inherited(descriptor: OwnedFd, kind: Kind, name: Name) -> Result<Self, Error> {
        let mut socket = Self::passed(descriptor, kind)?;
        (socket.name, socket.stays) = (Some(name), AtomicBool::new(true));
        Ok(socket)
    }

    /// Says whether its file stays when this is dropped.
    pub fn set_stays(&self, stays: bool) {
        self.stays.store(stays, Ordering::Relaxed);
    }

    /// Returns its file, if this process or an earlier one has made it.
    pub fn file(&self) -> Option<FileId> {
        self.name.as_ref().map(Name::file)
    }

    /// Makes a socket without a file, which nobody is told of: that of a guest whose next VMM cannot connect any more.
    pub fn nowhere() -> Result<Self, Error> {
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // Without a name of its own it gets an abstract one that is free (unix(7), "Autobind feature").
        bind(&socket, &SocketAddrUnix::new_unnamed())?;
        listen(&socket, BACKLOG)?;
        Self::passed(socket, Kind::Stream)
    }

    /// Keeps the file when this is dropped.
    pub fn keep_file(&mut self) {
        self.name = None;
    }

    /// Returns the socket, which is readable when a connection can be accepted.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Accepts a connection, if one waits.
    pub fn accept(&self) -> Result<Option<UnixStream>, Error> {
        match self.listener.accept() {
            Ok((stream, _)) => Ok(Some(stream)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(None),
            // The client has gone again.
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl network::Listener for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    fn accept(&self) -> Result<Option<UnixStream>, Error> {
        Socket::accept(self)
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Some(name) = self.name.as_ref().filter(|_| !self.stays.load(Ordering::Relaxed)) {
            name.remove();
        }
    }
}

/// Makes a socket that listens. The standard library has a type for streams alone, which does with any socket what it
/// is used for here.
fn listen_at(path: &Path, kind: Kind, access: &Access) -> Result<UnixListener, Error> {
    let kind = match kind {
        Kind::Stream => SocketType::STREAM,
        Kind::Packets => SocketType::SEQPACKET,
    };
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    access.bind(&socket, path)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// The name of a socket in the file system.
#[derive(Debug)]
pub struct Name {
    path: PathBuf,
    file: FileId,
}

impl Name {
    /// Returns the name of the socket whose file is at `path` now.
    pub fn of(path: &Path) -> Result<Self, Error> {
        Ok(Self { path: path.to_owned(), file: identity(path)? })
    }

    /// Returns the same. It is an error if the file is no socket.
    pub fn of_socket(path: &Path) -> Result<Self, Error> {
        require_socket(path)?;
        Self::of(path)
    }

    /// Returns the file.
    pub fn file(&self) -> FileId {
        self.file
    }

    /// Removes the file, unless another file is there by now.
    pub fn remove(&self) {
        if identity(&self.path).is_ok_and(|file| file == self.file) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Result<FileId, Error> {
    let metadata = std::fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Keeps other processes of this program from making sockets in the directory of this path until the result is dropped.
fn lock_directory(path: &Path) -> Result<File, Error> {
    let parent = path.parent().filter(|parent| *parent != Path::new(""));
    let directory = File::open(parent.unwrap_or(Path::new(".")))?;
    let until = Instant::now() + LOCKED;
    loop {
        match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(directory),
            Err(Errno::AGAIN) if Instant::now() < until => std::thread::sleep(LOCKED / 1000),
            Err(Errno::AGAIN) => {
                return Err(Error::new(
                    ErrorKind::WouldBlock,
                    "another process locks the directory",
                ));
            }
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Removes the file of a socket.
///
/// # Errors
///
/// There is no file, or it is no socket. It stays.
pub fn remove_socket(path: &Path) -> Result<(), Error> {
    require_socket(path)?;
    std::fs::remove_file(path)
}

/// Refuses a file that is no socket.
fn require_socket(path: &Path) -> Result<(), Error> {
    if std::fs::symlink_metadata(path)?.file_type().is_socket() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::AlreadyExists, "exists and is no socket"))
}

/// Removes a socket that no process listens on.
fn remove_stale(path: &Path) -> Result<(), Error> {
    match require_socket(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        required => required?,
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        Err(error) => Err(error),
        Ok(_) => Err(Error::new(ErrorKind::AddrInUse, "another process listens there")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(name: &str) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("rdmad-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        directory
    }

    fn bind_at(path: &Path) -> Result<Socket, Error> {
        Socket::bind(path, Kind::Stream, &Access::default())
    }

    /// One of several processes that want a socket at one path has it, and its file stays there.
    #[test]
    fn one_of_several_has_the_socket() {
        let directory = directory("several");
        let path = directory.join("a");
        for _ in 0..50 {
            drop(UnixListener::bind(&path).unwrap());
            let bind = || bind_at(&path);
            let sockets = std::thread::scope(|scope| {
                let threads = [(); 4].map(|()| scope.spawn(bind));
                threads.map(|thread| thread.join().unwrap())
            });
            assert_eq!(sockets.iter().filter(|socket| socket.is_ok()).count(), 1);
            UnixStream::connect(&path).unwrap();
        }
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn files_come_and_go() {
        let directory = directory("socket");
        let path = directory.join("a");
        let socket = bind_at(&path).unwrap();
        assert!(socket.accept().unwrap().is_none());
        let _client = UnixStream::connect(&path).unwrap();
        assert!(socket.accept().unwrap().is_some());
        assert_eq!(bind_at(&path).unwrap_err().kind(), ErrorKind::AddrInUse);
        drop(socket);
        assert!(!path.exists());

        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "nobody listens, but the file is there");
        let socket = bind_at(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "somebody else's").unwrap();
        drop(socket);
        assert!(path.exists());
        assert_eq!(bind_at(&path).unwrap_err().kind(), ErrorKind::AlreadyExists);
        std::fs::remove_dir_all(directory).unwrap();
    }
    #[test]
    fn only_sockets_are_removed() {
        let directory = directory("sockets");
        let (path, link) = (directory.join("a"), directory.join("b"));
        assert_eq!(remove_socket(&path).unwrap_err().kind(), ErrorKind::NotFound);
        drop(UnixListener::bind(&path).unwrap());
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert_eq!(remove_socket(&link).unwrap_err().kind(), ErrorKind::AlreadyExists);
        remove_socket(&path).unwrap();
        std::fs::write(&path, "somebody else's").unwrap();
        assert_eq!(remove_socket(&path).unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert!(path.exists());
        std::fs::remove_dir_all(directory).unwrap();
    }

    /// The file has the owner and the permissions that are asked for, whatever the umask.
    #[test]
    fn files_have_the_access_that_is_asked_for() {
        let directory = directory("access");
        let path = directory.join("a");
        let me = std::fs::metadata(&directory).unwrap();
        for (kind, mode) in [(Kind::Stream, 0o666), (Kind::Packets, 0o600), (Kind::Stream, 0)] {
            let [user, group] = [me.uid(), me.gid()].map(|id| Some(id.to_string()));
            let access = Access { user, group, mode: Some(mode) };
            let socket = Socket::bind(&path, kind, &access).unwrap();
            let file = std::fs::symlink_metadata(&path).unwrap();
            assert_eq!((file.mode() & 0o7777, file.uid(), file.gid()), (mode, me.uid(), me.gid()));
            drop(socket);
        }
        std::fs::remove_dir_all(directory).unwrap();
    }
}
