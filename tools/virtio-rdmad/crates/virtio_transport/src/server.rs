// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The server's end of a connection: messages in, replies out.

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use memory::{GuestMemory, Policy};

use crate::channel::{Channel, Message};
use crate::{Backend, Error};

/// Bounds of what a server takes from a VMM.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of a message, header included.
    pub message: usize,
    /// File descriptors of a message, at most [`MAX_DESCRIPTORS`](crate::MAX_DESCRIPTORS).
    pub fds: usize,
    /// Messages that one call of [`Server::process`] handles before others have their turn.
    pub batch: usize,
}

/// What a protocol makes of messages, and what the VMM of one connection has said so far.
pub trait Protocol: Send {
    /// Returns the length of the message that begins with these bytes, header included, and at
    /// least that of the header. `None`: the header is not complete yet.
    fn message_length(&self, bytes: &[u8]) -> Result<Option<usize>, Error>;

    /// Does what a message asks for. An error ends the connection; a mistake that the protocol has
    /// a reply for is none.
    fn handle(&mut self, message: Message, backend: &mut dyn Backend) -> Result<(), Error>;

    /// Returns the reply to the last message, once: a whole message, or `None` if the VMM gets
    /// none. The backend is settled when the server calls this.
    fn take_reply(&mut self) -> Result<Option<Vec<u8>>, Error>;

    /// Returns the guest's memory as the VMM has given it out so far.
    fn memory(&self) -> &GuestMemory;

    /// Asks the driver for a reset, as far as the protocol can, because the device cannot go on.
    fn needs_reset(&mut self);
}

/// One connection of a VMM.
///
/// Whoever drops it resets the backend, which the server does not have then.
#[derive(Debug)]
pub struct Server<P: Protocol + ?Sized> {
    channel: Channel,
    batch: usize,
    protocol: P,
}

impl<P: Protocol> Server<P> {
    /// Serves a VMM that has just connected to `socket`.
    pub fn new(socket: UnixStream, protocol: P, limits: Limits, policy: Policy) -> Self {
        let channel = Channel::new(socket, limits.message, limits.fds, policy.any_file);
        Self { channel, batch: limits.batch, protocol }
    }

    /// Returns the protocol's part of the connection.
    pub fn protocol(&self) -> &P {
        &self.protocol
    }
}

impl<P: Protocol + ?Sized> Server<P> {
    /// Returns the socket. When it is readable, call [`Server::process`].
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    /// Returns the guest's memory as the VMM has given it out so far.
    pub fn memory(&self) -> &GuestMemory {
        self.protocol.memory()
    }

    /// Asks the driver for a reset, as far as the protocol can, because the device cannot go on.
    pub fn needs_reset(&mut self) {
        self.protocol.needs_reset();
    }

    /// Handles what the VMM sent. Never waits, and handles a bounded number of messages.
    /// Returns whether there was anything, or the backend is not settled: call again then, whether
    /// the socket is readable or not.
    ///
    /// On an error the connection is over: reset the backend and drop the server.
    pub fn process(&mut self, backend: &mut dyn Backend) -> Result<bool, Error> {
        for done in 0..self.batch {
            if !backend.is_settled() {
                return Ok(true);
            }
            if let Some(reply) = self.protocol.take_reply()? {
                self.channel.send(&reply)?;
            }
            let length = |bytes: &[u8]| self.protocol.message_length(bytes);
            let Some(message) = self.channel.receive(length)? else {
                return Ok(done > 0);
            };
            self.protocol.handle(message, backend)?;
        }
        Ok(true)
    }
}
