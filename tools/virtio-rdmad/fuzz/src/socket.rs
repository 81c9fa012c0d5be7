// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The VMM's end of a connection.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::event::{eventfd, EventfdFlags};
use rustix::fs::{ftruncate, memfd_create, MemfdFlags};
use rustix::net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use crate::Program;

/// Bytes of the file that is given out as guest memory.
const FILE: u64 = 0x1_0000;
/// Most file descriptors with one message, one more than a server takes.
const MAX_FDS: usize = 17;

/// The VMM's end of a connection, and the file descriptors that it has to give.
#[derive(Debug)]
pub struct Peer {
    socket: UnixStream,
    memory: OwnedFd,
    event: OwnedFd,
    received: Vec<u8>,
}

impl Peer {
    /// A connection: this end and the server's.
    pub fn new() -> (Self, UnixStream) {
        let (socket, server) = UnixStream::pair().expect("a pair of sockets");
        socket.set_nonblocking(true).expect("a socket that does not block");
        let memory = memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a file in memory");
        ftruncate(&memory, FILE).expect("a file of some pages");
        let event = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        (Self { socket, memory, event, received: Vec::new() }, server)
    }

    /// File descriptors as the program wants them: memory, events, or something else.
    pub fn fds(&self, program: &mut Program<'_>) -> Vec<BorrowedFd<'_>> {
        let count = program.below(MAX_FDS + 1);
        let all = [self.event.as_fd(), self.memory.as_fd(), self.socket.as_fd()];
        let chosen = program.pick(&all);
        vec![chosen; count]
    }

    /// The file that can be guest memory.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// An eventfd.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Sends bytes with file descriptors; whether the server took them.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, flags) == Ok(bytes.len())
    }

    /// What the server has answered and was not yet taken.
    pub fn received(&mut self) -> &mut Vec<u8> {
        let mut part = [0; 4096];
        while let Ok(count @ 1..) = self.socket.read(&mut part) {
            self.received.extend(&part[..count]);
        }
        &mut self.received
    }
}

/// How many file descriptors this process has open.
pub fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}
