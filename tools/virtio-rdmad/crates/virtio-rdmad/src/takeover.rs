// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VMM that takes a guest over from the one that is connected, for example another process of the same VMM.
//!
//! The device of a guest outlives the connections of its VMM ([`Guest`]). So a take-over replaces what the connection
//! gives to the device: the mapping of the guest's memory, the kicks and the interrupts. Objects, numbers, keys and
//! addresses stay, as do the positions in the queues, and peers notice nothing.
//!
//! The VMM sets the device up as if it were new. Until it has started all queues that the guest uses, nothing of this
//! reaches the device ([`Rehearsal`]), which goes on to serve the other VMM. What it has set up must be what the guest
//! has: the device does not know which memory of the guest it has written, so the memory must be the same files.

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use engine::Device;
use memory::{GuestMemory, Policy};
use virtio_transport::{Backend, Protocol, QueueSetup, Server};

use crate::guest::Guest;

/// Why a VMM does not take a guest over.
#[derive(Debug, thiserror::Error)]
pub enum NotMoved {
    /// It went away, or did what the transport cannot go on after.
    #[error(transparent)]
    Transport(#[from] virtio_transport::Error),
    /// There is nothing to go on with.
    #[error("the driver of the guest has not started the device")]
    NotStarted,
    /// The driver has agreed on other features.
    #[error("its features are {found:#x}, and the driver of the guest has agreed on {agreed:#x}")]
    Features {
        /// What the VMM has set.
        found: u64,
        /// What the driver has agreed on.
        agreed: u64,
    },
    /// The guest has this queue in another place or with another size, or does not use it.
    #[error("queue {0} is not as the guest has it")]
    Queue(u16),
    /// It has other memory, or the same memory elsewhere.
    #[error("its memory is not the memory of the guest")]
    Memory,
    /// Its socket or a kick cannot be waited for.
    #[error("{0}")]
    Wait(String),
    /// Another VMM is to take the guest over.
    #[error("another VMM has connected to take the guest over")]
    Replaced,
    /// The VMM that was connected has gone, and the device was reset.
    #[error("the VMM that the guest was to be taken from has gone")]
    Gone,
}

/// How far a VMM is with the device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Progress {
    /// It has set up a part, and may have sent more.
    Busy,
    /// It has set up a part.
    Part,
    /// It can take the guest over.
    Ready,
}

/// A VMM that is to take a guest over.
pub struct Successor {
    server: Box<Server<dyn Protocol>>,
    rehearsal: Rehearsal,
}

impl Successor {
    /// Begins to serve a VMM, which has connected, with what looks like the device of the guest.
    pub fn new(guest: &Guest, stream: UnixStream) -> Self {
        let rehearsal = Rehearsal::new(guest);
        Self { server: Box::new(vhost_user::serve(stream, &rehearsal)), rehearsal }
    }

    /// Returns the socket. When it is readable, call [`Self::process`].
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.server.as_fd()
    }

    /// Handles what the VMM has sent, a bounded part of it. `current` is the server of the VMM that is connected. Never
    /// waits. An error ends the attempt.
    pub fn process(&mut self, current: &Server<dyn Protocol>) -> Result<Progress, NotMoved> {
        let is_busy = self.server.process(&mut self.rehearsal)?;
        let (queues, found) = (current.queues(), self.server.queues());
        if queues.is_empty() {
            return Err(NotMoved::NotStarted);
        }
        let is_right = |queue: &QueueSetup| {
            queues.iter().any(|other| (other.index, other.layout) == (queue.index, queue.layout))
        };
        if let Some(queue) = found.iter().find(|queue| !is_right(queue)) {
            return Err(NotMoved::Queue(queue.index));
        }
        if found.len() < queues.len() {
            return Ok(if is_busy { Progress::Busy } else { Progress::Part });
        }
        let offered = self.rehearsal.features();
        let [found, agreed] = [self.server.features(), current.features()].map(|f| f & offered);
        if found != agreed {
            return Err(NotMoved::Features { found, agreed });
        }
        if !self.server.memory().is_same(current.memory()) {
            return Err(NotMoved::Memory);
        }
        Ok(Progress::Ready)
    }

    /// Returns the queues that the VMM has set up.
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
