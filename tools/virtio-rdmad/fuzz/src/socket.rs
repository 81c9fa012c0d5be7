// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The VMM's end of a connection.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use testkit::socket::{new_eventfd, new_memory, send, MAX_FDS};
use virtio_transport::{Backend, Protocol, Server};

use crate::Program;

/// The bytes of the file that is given out as guest memory.
const FILE: u64 = 0x1_0000;

/// The VMM's end of a connection, and the file descriptors that it can hand over.
#[derive(Debug)]
pub struct Peer {
    socket: UnixStream,
    memory: OwnedFd,
    event: OwnedFd,
    received: Vec<u8>,
}

impl Peer {
    /// Makes a connection, and returns this end and the server's.
    pub fn new() -> (Self, UnixStream) {
        let (socket, server) = UnixStream::pair().expect("a pair of sockets");
        socket.set_nonblocking(true).expect("a socket that does not block");
        let (memory, event) = (new_memory(FILE), new_eventfd());
        (Self { socket, memory, event, received: Vec::new() }, server)
    }

    /// Returns file descriptors that the program chooses: the memory, the eventfd or the socket.
    pub fn fds(&self, program: &mut Program<'_>) -> Vec<BorrowedFd<'_>> {
        let count = program.below(MAX_FDS + 1);
        let all = [self.event.as_fd(), self.memory.as_fd(), self.socket.as_fd()];
        let chosen = program.pick(&all);
        vec![chosen; count]
    }

    /// Returns the file that can be guest memory.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Returns an eventfd.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Sends bytes with file descriptors. Returns whether all bytes were sent.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        send(&self.socket, bytes, fds) == Ok(bytes.len())
    }

    /// Returns the bytes of the server's answers that were not taken yet.
    pub fn received(&mut self) -> &mut Vec<u8> {
        let mut part = [0; 4096];
        while let Ok(count @ 1..) = self.socket.read(&mut part) {
            self.received.extend(&part[..count]);
        }
        &mut self.received
    }
}

/// A server under test and its peer.
pub trait Conversation {
    /// Connects a peer to a server.
    fn new() -> Self;

    /// Returns the peer.
    fn peer(&self) -> &Peer;

    /// Sends messages that are right but for what the program changes, and checks the answers.
    fn messages(&mut self, program: &mut Program<'_>);

    /// Lets the server answer, and checks the answers. If `plain`, the peer sent bytes that may not be
    /// messages. Returns `false` if the connection is over.
    fn process(&mut self, plain: bool) -> bool;
}

/// Runs a conversation that the fuzzer's bytes describe, and checks that it leaves no file descriptor
/// open.
pub fn connect<C: Conversation>(bytes: &[u8]) {
    let before = open_files();
    let mut program = Program::new(bytes);
    let mut conversation = C::new();
    if program.u8() & 7 == 7 {
        stream(&mut conversation, &mut program);
    } else {
        conversation.messages(&mut program);
    }
    drop(conversation);
    assert_eq!(open_files(), before, "file descriptors left open");
}

/// Sends plain bytes in pieces whose lengths the program chooses.
fn stream(conversation: &mut impl Conversation, program: &mut Program<'_>) {
    while let Some(len) = program.operation() {
        let bytes = program.bytes(len.into());
        let peer = conversation.peer();
        let fds = if program.u8() == 255 { peer.fds(program) } else { Vec::new() };
        if !bytes.is_empty() {
            peer.send(bytes, &fds);
        }
        if !conversation.process(true) {
            return;
        }
    }
}

/// Lets a server answer until it has no more messages. Returns `false` if the connection is over.
pub fn serve<P: Protocol>(server: &mut Server<P>, backend: &mut dyn Backend) -> bool {
    loop {
        match server.process(backend) {
            Ok(true) => {}
            Ok(false) => return true,
            Err(_) => return false,
        }
    }
}

/// Returns how many file descriptors this process has open.
fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}
