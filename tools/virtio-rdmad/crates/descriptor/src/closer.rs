// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Descriptors of files that a file system answers for, and how to be rid of them.
//!
//! To close one calls its file system (`flush`), and a FUSE server can let that wait for ever. So
//! another thread closes it, which may.

use std::io::Error;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{sync_channel, SyncSender, TrySendError};
use std::sync::OnceLock;

/// Descriptors that can wait to be closed.
const WAITING: usize = 256;

static CLOSER: OnceLock<SyncSender<OwnedFd>> = OnceLock::new();
/// Whether one more would have had no room.
static FULL: AtomicBool = AtomicBool::new(false);

/// Starts the thread that closes what [`discard`] is given, after `confine` in it. Once a process.
pub fn start_closer(confine: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let (sender, receiver) = sync_channel::<OwnedFd>(WAITING);
    let close = move || {
        confine();
        for fd in receiver {
            drop(fd);
            FULL.store(false, Ordering::Relaxed);
        }
    };
    std::thread::Builder::new().name("closer".to_owned()).spawn(close)?;
    // A second one would end at once, without its sender.
    let _ = CLOSER.set(sender);
    Ok(())
}

/// Closes a descriptor without waiting for it, if [`start_closer`] was called.
pub fn discard(fd: OwnedFd) {
    let Some(closer) = CLOSER.get() else { return };
    match closer.try_send(fd) {
        Ok(()) => {}
        Err(TrySendError::Full(fd) | TrySendError::Disconnected(fd)) => {
            FULL.store(true, Ordering::Relaxed);
            // It stays open: nobody can be let wait for it.
            std::mem::forget(fd);
        }
    }
}

/// Whether descriptors may be received: not while as many wait to be closed as can.
///
/// Those of a message that is read without room for them are closed by the kernel, which asks no
/// file system then.
pub fn may_receive() -> bool {
    !FULL.load(Ordering::Relaxed)
}
