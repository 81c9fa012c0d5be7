// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Closes descriptors in a thread of its own.
//!
//! `close()` calls the file system of the file (`flush`), and a FUSE server can make that wait for ever.
//! Only the thread that does nothing else may wait.

use std::io::Error;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{sync_channel, SyncSender, TrySendError};
use std::sync::OnceLock;

/// Most descriptors that wait to be closed.
const WAITING: usize = 256;

static CLOSER: OnceLock<SyncSender<OwnedFd>> = OnceLock::new();
/// Whether a descriptor found no room since the last one was closed.
static FULL: AtomicBool = AtomicBool::new(false);

/// Starts the thread that closes what [`discard`] is given. It calls `confine` first. Call this once in
/// a process.
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
    // If there is such a thread already, the sender is dropped, and the new thread ends.
    let _ = CLOSER.set(sender);
    Ok(())
}

/// Closes a descriptor without waiting for that, if [`start_closer`] was called; otherwise closes it
/// here.
pub fn discard(fd: OwnedFd) {
    let Some(closer) = CLOSER.get() else { return };
    match closer.try_send(fd) {
        Ok(()) => {}
        Err(TrySendError::Full(fd) | TrySendError::Disconnected(fd)) => {
            FULL.store(true, Ordering::Relaxed);
            // It stays open: no thread that has other work may wait for it.
            std::mem::forget(fd);
        }
    }
}

/// Returns whether descriptors may be received, which they may not while as many wait to be closed as
/// can.
///
/// If a message is read without room for its descriptors, the kernel does not install them, and there
/// is nothing to close here.
pub fn may_receive() -> bool {
    !FULL.load(Ordering::Relaxed)
}
