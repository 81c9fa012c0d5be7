// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The server's end of a connection: messages in, replies out.

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use memory::GuestMemory;

use crate::channel::{Channel, Message};
use crate::journal::{Change, ConnectionState, Journal, ResumeError};
use crate::{Backend, Error, QueueSetup};

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

/// A protocol, with the state of one connection: all that the VMM has said so far.
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

    /// Returns the feature bits that the driver has agreed on.
    fn features(&self) -> u64;

    /// Returns which feature bits the driver has agreed to that a device with these features does not have.
    fn missing_features(&self, features: u64) -> u64;

    /// Offers nothing of what another process has offered, from the next negotiation on, that a device with these
    /// features does not have.
    fn withdraw(&mut self, features: u64);

    /// Returns the queues that have started since the last reset, as [`Backend::start`] takes them.
    fn queues(&self) -> Vec<QueueSetup>;

    /// Returns whether the VMM has paused the device ([`Backend::freeze`]).
    fn is_paused(&self) -> bool {
        false
    }

    /// Makes a device fail that another process served, and whose state ended with that process: asks the driver for a
    /// reset, by the device itself where the protocol has no way to do that. It is an error if the driver was offered
    /// another device.
    fn fail(&mut self, backend: &mut dyn Backend) -> Result<(), ResumeError>;

    /// Returns how the state differs from what it was at the last call.
    fn take_change(&mut self) -> Change;

    /// Returns what the VMM has said so far, for a successor of this process.
    fn state(&self) -> ConnectionState;
}

/// One connection of a VMM.
///
/// Whoever drops it resets the backend, which the server does not have then.
pub struct Server<P: Protocol + ?Sized> {
    channel: Channel,
    batch: usize,
    journal: Option<Box<dyn Journal>>,
    protocol: P,
}

impl<P: Protocol> Server<P> {
    /// Serves a VMM that has just connected to `socket`.
    pub fn new(socket: UnixStream, protocol: P, limits: Limits) -> Self {
        let channel = Channel::new(socket, limits.message, limits.fds);
        Self { channel, batch: limits.batch, journal: None, protocol }
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

    /// Makes a device fail that another process served, and whose state ended with that process. The driver is told
    /// that it must reset the device.
    pub fn fail(&mut self, backend: &mut dyn Backend) -> Result<(), ResumeError> {
        self.protocol.fail(backend)
    }

    /// Returns the feature bits that the driver has agreed on.
    pub fn features(&self) -> u64 {
        self.protocol.features()
    }

    /// Returns which feature bits the driver has agreed to that a device with these features does not have.
    pub fn missing_features(&self, features: u64) -> u64 {
        self.protocol.missing_features(features)
    }

    /// Offers nothing of what another process has offered, from the next negotiation on, that a device with these
    /// features does not have.
    pub fn withdraw(&mut self, features: u64) {
        self.protocol.withdraw(features);
    }

    /// Returns the queues that have started since the last reset, as [`Backend::start`] takes them.
    pub fn queues(&self) -> Vec<QueueSetup> {
        self.protocol.queues()
    }

    /// Returns whether the VMM has paused the device. The backend of a successor is frozen then before it is served.
    pub fn is_paused(&self) -> bool {
        self.protocol.is_paused()
    }

    /// Keeps the state of the connection in a journal from now on.
    ///
    /// The VMM gets no reply to a message before the journal has kept what the message changed. A message stays in the
    /// socket until then. So if the process is killed, the next one handles the message, and the VMM gets its reply. It
    /// gets none if the process is killed between the two system calls that take the message out of the socket and
    /// send the reply: a reply that came twice would be taken for that of another message. A message whose change was
    /// kept and that is still in the socket is handled twice. The second time, one that gives out memory or takes it
    /// away is refused.
    pub fn keep_in(&mut self, mut journal: Box<dyn Journal>) {
        self.protocol.take_change();
        journal.keep(&self.protocol.state(), Change::Descriptors);
        self.journal = Some(journal);
    }

    fn keep_changes(&mut self) {
        let Some(journal) = &mut self.journal else { return };
        let change = self.protocol.take_change();
        if change != Change::No {
            journal.keep(&self.protocol.state(), change);
        }
    }

    /// Returns what the VMM has said so far, for a successor, once nothing is left to do that this process has read.
    /// `None`: the backend is not settled; call again when it is.
    ///
    /// It is an error if the VMM has sent the beginning of a message: the successor could not tell what follows.
    pub fn leave(&mut self, backend: &mut dyn Backend) -> Result<Option<ConnectionState>, Error> {
        while backend.is_settled() {
            if let Some(reply) = self.protocol.take_reply()? {
                self.channel.confirm()?;
                self.channel.send(&reply)?;
            }
            let length = |bytes: &[u8]| self.protocol.message_length(bytes);
            let Some(message) = self.channel.received(length)? else {
                self.channel.confirm()?;
                if self.channel.is_within_message() {
                    return Err(Error::Partial);
                }
                return Ok(Some(self.protocol.state()));
            };
            self.protocol.handle(message, backend)?;
        }
        Ok(None)
    }

    /// Handles what the VMM sent. Never waits, and handles a bounded number of messages.
    /// Returns whether there was anything, or the backend is not settled: call again then, whether
    /// the socket is readable or not.
    ///
    /// On an error the connection is over: reset the backend and drop the server.
    pub fn process(&mut self, backend: &mut dyn Backend) -> Result<bool, Error> {
        let result = self.handle_messages(backend);
        if result.is_err() {
            self.channel.discard();
        }
        result
    }

    fn handle_messages(&mut self, backend: &mut dyn Backend) -> Result<bool, Error> {
        for done in 0..self.batch {
            if !backend.is_settled() {
                return Ok(true);
            }
            if let Some(reply) = self.protocol.take_reply()? {
                self.keep_changes();
                self.channel.confirm()?;
                self.channel.send(&reply)?;
            }
            // What has come is handled in order: messages that set a queue up come before a kick of another queue,
            // which the device sees after this.
            let reads = done == 0 || self.channel.was_cut();
            let Some(message) = self.next(reads)? else { return Ok(done > 0) };
            self.protocol.handle(message, backend)?;
        }
        Ok(true)
    }

    /// Returns the next message of those that were read. Once all of them are handled, the journal has what they
    /// changed, and they are taken out of the socket; then this reads others, if it `reads`.
    fn next(&mut self, reads: bool) -> Result<Option<Message>, Error> {
        let length = |bytes: &[u8]| self.protocol.message_length(bytes);
        if let Some(message) = self.channel.received(length)? {
            return Ok(Some(message));
        }
        self.keep_changes();
        self.channel.confirm()?;
        let length = |bytes: &[u8]| self.protocol.message_length(bytes);
        if reads {
            self.channel.receive(length)
        } else {
            Ok(None)
        }
    }
}
