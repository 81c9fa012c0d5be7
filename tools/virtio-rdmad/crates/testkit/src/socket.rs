// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The VMM's end of a connection, and the files that it hands over.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{eventfd, EventfdFlags};
use rustix::fs::{ftruncate, memfd_create, MemfdFlags};
use rustix::io::Errno;
use rustix::net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

/// The bound on each wait for a device in another process. A test takes seconds.
pub const LIMIT: Duration = Duration::from_secs(300);
/// The largest number of file descriptors with one message, which is one more than a device takes.
pub const MAX_FDS: usize = 17;

/// Sends bytes with file descriptors, if there are any. Returns how many bytes were sent, or why the socket takes none.
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
}

/// Makes an eventfd that does not block.
pub fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

/// Makes a file that can be guest memory.
pub fn new_memory(bytes: u64) -> OwnedFd {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, bytes).unwrap();
    file
}

/// Returns the bytes of 32-bit words in a message. Both protocols have the byte order of the host.
pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Returns the bytes of 64-bit words in a message.
pub fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
}
