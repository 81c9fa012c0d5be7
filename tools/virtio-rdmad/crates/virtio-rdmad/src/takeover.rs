// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VMM that takes a guest over from the one that is connected, for example another process of the same VMM.
//!
//! The device of a guest outlives the connections of its VMM ([`Guest`]). So a take-over replaces what the connection
//! gives to the device: the mapping of the guest's memory, the kicks and the interrupts. Objects, numbers, keys and
//! addresses stay, as do the positions in the queues, and peers notice nothing.
//!
//! The VMM sets the device up as if it were new. Until it has set up all that a VMM gives to the device
//! ([`Protocol::progress`]), nothing of this reaches the device ([`Rehearsal`]), which goes on to serve the other VMM. What
//! it has set up must be what the guest has. The device does not know which memory of the guest it has written, so the
//! memory must be the same files, or a copy that was made while the device was frozen ([`MemoryRule`]). What the driver has
//! made of the device comes from the connection of the VMM from before ([`Protocol::adopt`]).

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use engine::Device;
use memory::{GuestMemory, Policy};
use virtio_transport::{Backend, Lack, MemoryRule, Misfit, Progress, Protocol, QueueSetup, Server};

use crate::connection::serve;
use crate::guest::Guest;

/// Why a VMM does not take a guest over.
#[derive(Debug, thiserror::Error)]
pub enum NotMoved {
    /// It went away, or did what the transport cannot go on after, before it had set this up.
    #[error("{error}; {lack}")]
    Unfinished {
        /// What has ended the connection.
        error: virtio_transport::Error,
        /// What was to come.
        lack: Lack,
    },
    /// It could not be served.
    #[error(transparent)]
    Transport(#[from] virtio_transport::Error),
    /// What it has set up is not what the guest has.
    #[error(transparent)]
    Misfit(#[from] Misfit),
    /// Its socket or a kick cannot be waited for.
    #[error("{0}")]
    Wait(String),
    /// Another attempt has begun.
    #[error("another call of move has taken the place of this one")]
    Replaced,
    /// Somebody has cancelled the attempt.
    #[error("the move was cancelled")]
    Cancelled,
    /// The VMM that was connected has gone, and the device was reset.
    #[error("the VMM that the guest was to be taken from has gone")]
    Gone,
}

/// How far a VMM is with the device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Step {
    /// It may have sent more.
    Busy,
    /// It has not set this up yet, and has sent nothing else.
    Lacks(Lack),
    /// It can take the guest over, and has sent nothing else.
    Ready,
}

/// A VMM that is to take a guest over.
pub struct Successor {
    server: Box<Server<dyn Protocol>>,
    rehearsal: Rehearsal,
}

impl Successor {
    /// Begins to serve a VMM, which has connected, with what looks like the device of the guest.
    pub fn new(guest: &Guest, stream: UnixStream) -> Result<Self, NotMoved> {
        let rehearsal = Rehearsal::new(guest);
        let server = serve(stream, guest.spec.transport, &rehearsal)?;
        Ok(Self { server, rehearsal })
    }

    /// Returns the socket. When it is readable, call [`Self::process`].
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.server.as_fd()
    }

    /// Handles what the VMM has sent, a bounded part of it. `current` is the server of the VMM that is connected, and
    /// `memory` says which memory the other VMM must have. Never waits. An error ends the attempt.
    pub fn process(
        &mut self,
        current: &Server<dyn Protocol>,
        memory: MemoryRule,
    ) -> Result<Step, NotMoved> {
        let handled = self.server.process(&mut self.rehearsal);
        // It may have set up something before it went.
        let progress = self.server.progress(current, &self.rehearsal, memory)?;
        let is_busy = handled.map_err(|error| match progress {
            Progress::Lacks(lack) => NotMoved::Unfinished { error, lack },
            Progress::Ready => NotMoved::Transport(error),
        })?;
        // A message that was handled and not answered would be handled again by another process.
        Ok(match progress {
            _ if is_busy => Step::Busy,
            Progress::Lacks(lack) => Step::Lacks(lack),
            Progress::Ready => Step::Ready,
        })
    }

    /// Takes over what the guest's driver has made of the device by the VMM that is connected, whose server is
    /// `current`.
    pub fn adopt(&mut self, current: &Server<dyn Protocol>) -> Result<(), NotMoved> {
        Ok(self.server.adopt(current)?)
    }

    /// Returns the queues that run, with the interrupts of the VMM.
    pub fn queues(&self) -> Vec<QueueSetup> {
        self.server.queues()
    }

    /// Returns the server of the VMM, which is the guest's from now on.
    pub fn into_server(self) -> Box<Server<dyn Protocol>> {
        self.server
    }
}

/// What looks like the device of a guest, and does nothing.
struct Rehearsal {
    device: Arc<Device>,
    config: [u8; 256],
    memory: Policy,
}

impl Rehearsal {
    fn new(guest: &Guest) -> Self {
        let device = guest.device.clone();
        Self { config: device.config_space(), device, memory: guest.memory }
    }
}

impl Backend for Rehearsal {
    fn memory_policy(&self) -> Policy {
        self.memory
    }

    fn features(&self) -> u64 {
        self.device.features()
    }

    fn set_features(&mut self, _: u64) {}

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn queue_count(&self) -> u16 {
        self.device.queue_count()
    }

    fn queue_max_size(&self, queue: u16) -> u16 {
        self.device.queue_max_size(queue)
    }

    fn start(&mut self, _: &GuestMemory, _: Vec<QueueSetup>) -> Result<(), String> {
        Ok(())
    }

    fn set_memory(&mut self, _: &GuestMemory) {}

    fn kick(&mut self, _: u16) {}

    fn reset(&mut self) {}
}
