// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Unmaps memory in a thread of its own: the kernel takes milliseconds for each gibibyte of small
//! pages, and a worker has other guests to serve.

use std::io::Error;
use std::ptr::NonNull;
use std::sync::mpsc::{sync_channel, SyncSender, TrySendError};
use std::sync::OnceLock;

use rustix::mm::munmap;

/// Most ranges that wait to be unmapped.
const WAITING: usize = 256;

static UNMAPPER: OnceLock<SyncSender<Range>> = OnceLock::new();

/// Addresses that nothing reaches any more, and that are mapped until this is dropped.
struct Range {
    addr: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for Range {}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: `unmap`, which alone makes a `Range`, is given whole mappings that nothing reaches.
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
/// Fails if the thread cannot be made.
pub fn start_unmapper(confine: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let (sender, receiver) = sync_channel::<Range>(WAITING);
    let unmap = move || {
        confine();
        receiver.into_iter().for_each(drop);
    };
    std::thread::Builder::new().name("unmapper".to_owned()).spawn(unmap)?;
    // If there is such a thread already, the sender is dropped, and the new thread ends.
    let _ = UNMAPPER.set(sender);
    Ok(())
}

/// Unmaps a range soon, or at once if there is no thread for that or too many ranges wait.
///
/// # Safety
///
/// The range must be a whole mapping, and nothing may reach it any more.
pub(crate) unsafe fn unmap(addr: NonNull<u8>, len: usize) {
    let range = Range { addr, len };
    match UNMAPPER.get().map(|unmapper| unmapper.try_send(range)) {
        None | Some(Ok(())) => {}
        Some(Err(TrySendError::Full(range) | TrySendError::Disconnected(range))) => drop(range),
    }
}
