// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! File descriptors of a VMM, used without waiting for the VMM.
//!
//! A VMM that hands over a descriptor keeps the same open file, and O_NONBLOCK belongs to the open
//! file. So it can clear the flag and fill the counter of an eventfd, and the next `write()` to it waits
//! until the VMM reads. `RWF_NOWAIT` does not work for eventfds. The kernel's own way to signal an
//! eventfd never waits: `eventfd_signal()` (fs/eventfd.c) adds to the counter, or leaves a full one as
//! it is. The completion of an asynchronous read does that to the eventfd that the read names
//! (IOCB_FLAG_RESFD of io_submit(2)). So [`signal`] reads nothing from an empty file. That takes about
//! twice as long as a `write()`, once for each interrupt.
//!
//! If the kernel has no asynchronous reads, or a sandbox around this process forbids them, [`signal`]
//! writes, and [`prepare`] returns an error.

#![forbid(unsafe_code)]

mod closer;

pub use closer::{discard, may_receive, start_closer};

use std::cell::OnceCell;
use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{fcntl_getfl, fcntl_setfl, memfd_create, MemfdFlags, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags};
use vmm_sys_util::aio::{IoContext, IoControlBlock, IoEvent, IOCB_CMD_PREAD, IOCB_FLAG_RESFD};

/// The number of reads that can be complete before their results are taken.
const RESULTS: u16 = 128;
/// A bit of `aio_rw_flags` that has no meaning. The kernel refuses a read with it after it has found
/// the named descriptor to be an eventfd, and before it does anything.
const UNKNOWN_FLAG: u32 = 1 << 31;

thread_local! {
    /// The reads by which this thread signals. Each thread has its own, so there is no lock.
    static SIGNALS: OnceCell<Option<Signals>> = const { OnceCell::new() };
}

/// Asynchronous reads whose completion signals an eventfd.
#[derive(Debug)]
struct Signals {
    context: IoContext,
    /// An empty file, of which a read is complete at once.
    file: OwnedFd,
}

impl Signals {
    fn new() -> Result<Self, Error> {
        let file = memfd_create("signals", MemfdFlags::CLOEXEC)?;
        Ok(Self { context: IoContext::new(RESULTS.into())?, file })
    }

    /// Reads nothing. The completion signals `fd`.
    fn read(&self, fd: BorrowedFd<'_>, flags: u32) -> Result<(), Error> {
        match self.submit(fd, flags) {
            // There is no room for another result until the ones that are there are taken.
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
        // The two are one 64-bit word, whose halves are exchanged in the other byte order (PADDED() in
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

/// Makes what [`signal`] needs in this thread. Call it before the thread gives up the right to. After
/// an error [`signal`] writes to the eventfd, and the VMM can make it wait.
pub fn prepare() -> Result<(), Error> {
    let signals = Signals::new()?;
    // If the thread has signalled before, it has them already.
    SIGNALS.with(|place| place.set(Some(signals))).or(Ok(()))
}

/// Adds 1 to the counter of an eventfd, unless the counter is full, which is a signal already. Never
/// waits, if [`prepare`] succeeded in this thread.
pub fn signal(fd: impl AsFd) -> Result<(), Error> {
    let fd = fd.as_fd();
    with_signals(|signals| match signals {
        Some(signals) => signals.read(fd, 0),
        None => write(fd),
    })
}

/// Sends 8 bytes, the number 1 as for an eventfd, to a [socket of this machine](is_socket); nothing if
/// the socket is full. Never waits: sending takes no lock that a receiver keeps.
pub fn send(fd: impl AsFd) -> Result<(), Error> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match rustix::net::send(fd, &1_u64.to_ne_bytes(), flags) {
        Ok(_) | Err(Errno::AGAIN) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Makes the open file of a descriptor non-blocking, for the kernels on which [`signal`] writes.
pub fn set_nonblocking(fd: impl AsFd) -> Result<(), Errno> {
    let fd = fd.as_fd();
    fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)
}

/// Adds 1 to the counter of an eventfd. Without O_NONBLOCK, everybody who has the same open file can
/// make this wait.
fn write(fd: BorrowedFd<'_>) -> Result<(), Error> {
    match rustix::io::write(fd, &1_u64.to_ne_bytes()) {
        Ok(_) | Err(Errno::AGAIN) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Returns whether this is an eventfd; true if this kernel cannot tell without a question to the file
/// itself. The file may belong to a file system whose server never answers.
pub fn is_eventfd(fd: impl AsFd) -> bool {
    with_signals(|signals| signals.is_none_or(|signals| signals.is_eventfd(fd.as_fd())))
}

/// Returns whether this is a file of memfd, tmpfs or hugetlbfs. Only these have seals. No access to them waits for
/// another process. It may wait for the kernel: to make or clear a page, to read it from the swap, or to end a hole
/// that another process punches around it, which takes some 0.15 s for 1 GiB. Asks the file nothing.
pub fn is_memory(fd: impl AsFd) -> bool {
    rustix::fs::fcntl_get_seals(fd).is_ok()
}

/// Returns whether this is a socket of this machine (AF_UNIX). Asks the file nothing.
pub fn is_socket(fd: impl AsFd) -> bool {
    rustix::net::sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX)
}

/// Returns whether this can be used and closed without waiting for anybody. A pipe cannot: a reader
/// keeps its lock while it waits for a page to read into.
pub fn is_harmless(fd: impl AsFd) -> bool {
    let fd = fd.as_fd();
    is_memory(fd) || is_eventfd(fd) || is_socket(fd)
}

/// Returns the descriptors of `fds` that are [harmless](is_harmless), and whether there were others.
/// [Discards](discard) those.
pub fn keep_harmless(fds: Vec<OwnedFd>) -> (Vec<OwnedFd>, bool) {
    let (harmless, others): (Vec<_>, Vec<_>) = fds.into_iter().partition(|fd| is_harmless(fd));
    let foreign = !others.is_empty();
    others.into_iter().for_each(discard);
    (harmless, foreign)
}
