// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! File descriptors that a monitor handed over, used without waiting for anybody.
//!
//! Whoever hands over a descriptor keeps the same open file, and O_NONBLOCK belongs to that: they can
//! clear the flag, fill the counter of an eventfd, and the next `write()` to it waits until they
//! read. `RWF_NOWAIT` is not for eventfds either. What never waits is the kernel's own way to signal
//! one, `eventfd_signal()` (fs/eventfd.c): it adds to the counter or leaves a full one as it is. The
//! completion of an asynchronous read does that for the eventfd that was named with it
//! (IOCB_FLAG_RESFD of io_submit(2)), so [`signal`] reads nothing from an empty file of its own. That
//! takes about twice as long as a `write()`, once for each interrupt.
//!
//! Where the kernel has no asynchronous reads, or a sandbox around this process forbids them,
//! [`signal`] writes, and [`prepare`] says so.

#![forbid(unsafe_code)]

mod closer;

pub use closer::{discard, may_receive, start_closer};

use std::cell::OnceCell;
use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{memfd_create, MemfdFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags};
use vmm_sys_util::aio::{IoContext, IoControlBlock, IoEvent, IOCB_CMD_PREAD, IOCB_FLAG_RESFD};

/// Reads that can be complete before their results are taken.
const RESULTS: u16 = 128;
/// A bit of `aio_rw_flags` that means nothing: a read with it is refused after its eventfd was found
/// to be one, and before anything is done.
const UNKNOWN_FLAG: u32 = 1 << 31;

thread_local! {
    /// The way of this thread; no lock, and no thread waits for another.
    static SIGNALS: OnceCell<Option<Signals>> = const { OnceCell::new() };
}

/// Asynchronous reads whose completion signals an eventfd.
#[derive(Debug)]
struct Signals {
    context: IoContext,
    /// An empty file: to read from it is complete at once.
    file: OwnedFd,
}

impl Signals {
    fn new() -> Result<Self, Error> {
        let file = memfd_create("signals", MemfdFlags::CLOEXEC)?;
        Ok(Self { context: IoContext::new(RESULTS.into())?, file })
    }

    /// Reads nothing; the completion signals `fd`.
    fn read(&self, fd: BorrowedFd<'_>, flags: u32) -> Result<(), Error> {
        match self.submit(fd, flags) {
            // There is no room for another result until those that are there were taken.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let mut results = [IoEvent::default(); RESULTS as usize];
                self.context.get_events(0, &mut results, None)?;
                self.submit(fd, flags)
            }
            result => result,
        }
    }

    fn submit(&self, fd: BorrowedFd<'_>, flags: u32) -> Result<(), Error> {
        let number = |fd: BorrowedFd<'_>| fd.as_raw_fd().unsigned_abs();
        let mut read = IoControlBlock {
            aio_lio_opcode: u16::try_from(IOCB_CMD_PREAD).unwrap_or_default(),
            aio_fildes: number(self.file.as_fd()),
            aio_flags: IOCB_FLAG_RESFD,
            aio_resfd: number(fd),
            ..IoControlBlock::default()
        };
        // The two are one 64-bit word, the other way round in the other byte order (PADDED() in
        // linux/aio_abi.h).
        if cfg!(target_endian = "little") {
            read.aio_reserved1 = flags;
        } else {
            read.aio_key = flags;
        }
        self.context.submit(&[&mut read]).map(|_| ())
    }

    fn is_eventfd(&self, fd: BorrowedFd<'_>) -> bool {
        let refused = self.read(fd, UNKNOWN_FLAG).err().and_then(|error| error.raw_os_error());
        refused == Some(Errno::OPNOTSUPP.raw_os_error())
    }
}

fn with_signals<R>(f: impl FnOnce(Option<&Signals>) -> R) -> R {
    SIGNALS.with(|signals| f(signals.get_or_init(|| Signals::new().ok()).as_ref()))
}

/// Makes what [`signal`] needs in this thread, before the thread gives up the right to. On an error
/// [`signal`] goes the other way, on which whoever handed over a descriptor can let it wait.
pub fn prepare() -> Result<(), Error> {
    let signals = Signals::new()?;
    // Whoever signalled before has made them already.
    SIGNALS.with(|place| place.set(Some(signals))).or(Ok(()))
}

/// Adds 1 to the counter of an eventfd, unless it is full: that is a signal already. Never waits.
pub fn signal(fd: impl AsFd) -> Result<(), Error> {
    let fd = fd.as_fd();
    with_signals(|signals| match signals {
        Some(signals) => signals.read(fd, 0),
        None => write(fd),
    })
}

/// Sends 8 bytes, as one adds to the counter of an eventfd, to a [socket of this machine](is_socket);
/// nothing if it is full. Never waits: its sender takes no lock that a receiver keeps.
pub fn send(fd: impl AsFd) -> Result<(), Error> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match rustix::net::send(fd, &1_u64.to_ne_bytes(), flags) {
        Ok(_) | Err(Errno::AGAIN) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Adds 1 to the counter of an eventfd. Whoever shares the open file can let this wait, but for
/// O_NONBLOCK.
fn write(fd: BorrowedFd<'_>) -> Result<(), Error> {
    match rustix::io::write(fd, &1_u64.to_ne_bytes()) {
        Ok(_) | Err(Errno::AGAIN) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether this is an eventfd, as far as this kernel can tell without asking the file itself, which
/// may belong to a file system whose server never answers.
pub fn is_eventfd(fd: impl AsFd) -> bool {
    with_signals(|signals| signals.is_none_or(|signals| signals.is_eventfd(fd.as_fd())))
}

/// Whether this is a file of a memfd, of tmpfs or of hugetlbfs, which alone have seals: no access to
/// it waits for anybody. Asks the file nothing.
pub fn is_memory(fd: impl AsFd) -> bool {
    rustix::fs::fcntl_get_seals(fd).is_ok()
}

/// Whether this is a socket of this machine, AF_UNIX. Asks the file nothing.
pub fn is_socket(fd: impl AsFd) -> bool {
    rustix::net::sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX)
}

/// Whether this is of a kind that can be used and closed without waiting for anybody. Not a pipe: a
/// reader keeps its lock while it waits for a page to read into.
pub fn is_harmless(fd: impl AsFd) -> bool {
    let fd = fd.as_fd();
    is_memory(fd) || is_eventfd(fd) || is_socket(fd)
}

/// Those of `fds` that are [harmless](is_harmless), and whether there were others, which are
/// [discarded](discard).
pub fn keep_harmless(fds: Vec<OwnedFd>) -> (Vec<OwnedFd>, bool) {
    let (harmless, others): (Vec<_>, Vec<_>) = fds.into_iter().partition(|fd| is_harmless(fd));
    let foreign = !others.is_empty();
    others.into_iter().for_each(discard);
    (harmless, foreign)
}
