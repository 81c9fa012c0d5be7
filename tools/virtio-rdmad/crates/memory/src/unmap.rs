// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Unmapping without waiting for it: the kernel takes milliseconds to forget each gibibyte of small
//! pages, and a worker has other guests.

use std::io::Error;
use std::ptr::NonNull;
use std::sync::mpsc::{sync_channel, SyncSender, TrySendError};
use std::sync::OnceLock;

use rustix::mm::munmap;

/// Ranges that can wait to be unmapped.
const WAITING: usize = 256;

static UNMAPPER: OnceLock<SyncSender<Range>> = OnceLock::new();

/// Addresses that nobody reaches any more, mapped until this is dropped.
struct Range {
    addr: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for Range {}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: by the contract of `unmap`, this is a whole mapping that nobody reaches.
        let result = unsafe { munmap(self.addr.as_ptr().cast(), self.len) };
        debug_assert!(result.is_ok(), "munmap of a whole mapping does not fail");
    }
}

/// Starts the thread that unmaps memory which guests do not share any more. It calls `confine` first.
/// Without this thread, the thread that drops the last use of memory unmaps it. Call this once in a
/// process.
///
/// # Errors
///
/// Those of making a thread.
pub fn start_unmapper(confine: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let (sender, receiver) = sync_channel::<Range>(WAITING);
    let unmap = move || {
        confine();
        receiver.into_iter().for_each(drop);
    };
    std::thread::Builder::new().name("unmapper".to_owned()).spawn(unmap)?;
    // A second one would end at once, without its sender.
    let _ = UNMAPPER.set(sender);
    Ok(())
}

/// Unmaps a range soon, or at once where there is no thread for it or too much waits.
///
/// # Safety
///
/// The range is a whole mapping, and nobody reaches it any more.
pub(crate) unsafe fn unmap(addr: NonNull<u8>, len: usize) {
    let range = Range { addr, len };
    match UNMAPPER.get().map(|unmapper| unmapper.try_send(range)) {
        None | Some(Ok(())) => {}
        Some(Err(TrySendError::Full(range) | TrySendError::Disconnected(range))) => drop(range),
    }
}
