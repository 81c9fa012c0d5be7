// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The way of a guest to another connection, as the guest's worker goes it.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use virtio_transport::{MemoryRule, Misfit, QueueSetup};

use super::{Connection, Ended};
use crate::attempt::Attempt;
use crate::events::Event;
use crate::handover::ConnectionJournal;
use crate::poller::Source;
use crate::takeover::{NotMoved, Step, Successor};

/// An attempt to move the guest, which the worker knows of.
pub(super) struct Moving {
    attempt: Arc<Attempt>,
    /// The VMM that is to take the guest over, once it has connected.
    successor: Option<Successor>,
}

impl Moving {
    /// Returns the socket of the VMM that is to take the guest over.
    pub(super) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.successor.as_ref().map(Successor::as_fd)
    }

    /// Returns which memory the other VMM must have.
    fn memory(&self) -> MemoryRule {
        if self.attempt.freezes {
            MemoryRule::Copy
        } else {
            MemoryRule::Same
        }
    }
}

impl Connection {
    /// Looks at the attempt to move the guest to another connection, after another thread has begun or ended it, or has
    /// accepted the other VMM.
    pub fn review_move(&mut self) {
        let wanted = self.guest.attempt();
        let known = self.moving.as_ref().map(|moving| &moving.attempt);
        let is_known = match (&wanted, known) {
            (Some(wanted), Some(known)) => Arc::ptr_eq(wanted, known),
            (wanted, known) => wanted.is_none() && known.is_none(),
        };
        if !is_known {
            self.forget_move();
            self.moving = wanted.map(|attempt| Moving { attempt, successor: None });
        }
        if let Err(error) = self.begin_successor() {
            self.end_move(&error);
        }
        self.notice(Source::Socket(self.guest.index));
    }

    /// Begins to serve the VMM that is to take the guest over, if it has just connected.
    fn begin_successor(&mut self) -> Result<(), NotMoved> {
        let Some(moving) = &mut self.moving else { return Ok(()) };
        let Some(stream) = moving.attempt.take_stream() else { return Ok(()) };
        self.span.in_scope(|| tracing::info!("a VMM is to take the guest over"));
        let successor = Successor::new(&self.guest, stream)?;
        let added = self.poller.add(successor.as_fd(), Source::Socket(self.guest.index));
        added.map_err(|error| NotMoved::Wait(format!("waiting for messages: {error}")))?;
        moving.successor = Some(successor);
        Ok(())
    }

    /// Handles what the VMM has sent that is to take the guest over, and has it do so when it can. Returns whether this
    /// is to be called again. An error ends the connection of the other VMM.
    pub(super) fn serve_move(&mut self) -> Result<bool, Ended> {
        let Some(moving) = &mut self.moving else { return Ok(false) };
        // A reset has ended the freeze.
        if moving.attempt.freezes && self.server.queues().is_empty() {
            self.end_move(&Misfit::NotStarted.into());
            return Ok(false);
        }
        let memory = moving.memory();
        let Some(successor) = &mut moving.successor else { return Ok(false) };
        match successor.process(&self.server, memory) {
            Ok(Step::Busy) => Ok(true),
            Ok(Step::Lacks(lack)) => {
                moving.attempt.set_lack(Some(lack));
                Ok(false)
            }
            Ok(Step::Ready) => {
                moving.attempt.set_lack(None);
                self.hand_over()?;
                Ok(true)
            }
            Err(error) => {
                self.end_move(&error);
                Ok(false)
            }
        }
    }

    /// Has the VMM that is ready take the guest over, as soon as nothing is left of what the other VMM has sent.
    fn hand_over(&mut self) -> Result<(), Ended> {
        let waits = |moving: &Moving| moving.attempt.freezes && !moving.attempt.is_frozen();
        if self.server.process(&mut self.backend)?
            || !self.guest.device.is_settled()
            || self.moving.as_ref().is_none_or(waits)
        {
            return Ok(());
        }
        let Some(Moving { attempt, successor: Some(successor) }) = self.moving.take() else {
            return Ok(());
        };
        // Another thread may have ended the attempt meanwhile.
        if !self.guest.end_attempt(&attempt) {
            self.poller.remove(successor.as_fd());
        } else if let Err(error) = self.change_vmm(successor) {
            self.guest.link.tell_not_moved(&error);
        }
        Ok(())
    }

    /// Has the VMM that is ready take the guest over. After an error the guest is as before.
    fn change_vmm(&mut self, mut successor: Successor) -> Result<(), NotMoved> {
        let queues = match self.prepare(&mut successor) {
            Ok(queues) => queues,
            Err(error) => {
                self.poller.remove(successor.as_fd());
                return Err(error);
            }
        };
        let (guest, mut server) = (&self.guest, successor.into_server());
        if let Some(journal) = ConnectionJournal::new(guest, server.as_fd()) {
            server.keep_in(Box::new(journal));
        }
        guest.device.begin_memory(server.memory());
        for queue in queues {
            guest.device.set_signal(queue.index, queue.signal.clone());
            // The other VMM may not have passed on what it was told last.
            guest.device.kick(queue.index);
            queue.signal.signal();
        }
        self.poller.remove(self.server.as_fd());
        self.server = server;
        tracing::info!("another VMM has taken the guest over");
        guest.link.tell(Event::Disconnected { reason: "moved to another connection".to_owned() });
        if let Some(worker) = guest.link.worker() {
            guest.link.tell(Event::Connected { worker });
        }
        Ok(())
    }

    /// Does what can fail. Returns the queues with the interrupts of the VMM.
    fn prepare(&mut self, successor: &mut Successor) -> Result<Vec<QueueSetup>, NotMoved> {
        successor.adopt(&self.server)?;
        let queues = successor.queues();
        self.backend.replace_kicks(&queues).map_err(NotMoved::Wait)?;
        Ok(queues)
    }

    /// Freezes the device or lets it go on, as the attempt to move the guest wants. Returns whether something has
    /// changed, so that the guest needs another turn.
    ///
    /// After the change to another VMM, the device goes on when it has found all in the other memory.
    pub(super) fn follow_freeze(&mut self) -> bool {
        let freezes = self.moving.as_ref().map(|moving| &moving.attempt);
        let freezes = freezes.filter(|attempt| attempt.freezes);
        let device = &self.guest.device;
        let is_done = freezes.map_or_else(|| !device.is_frozen(), |attempt| attempt.is_frozen());
        if is_done || !device.is_settled() {
            return false;
        }
        let _span = self.span.enter();
        match freezes {
            None => {
                device.thaw();
                tracing::info!("the device goes on");
            }
            Some(_) if !device.is_frozen() => device.begin_freeze(),
            Some(attempt) => {
                attempt.set_frozen();
                tracing::info!("the device is frozen");
                self.guest.link.tell(Event::Frozen);
            }
        }
        true
    }

    /// Ends the attempt to move the guest, for this reason, and disconnects the other VMM.
    fn end_move(&mut self, reason: &NotMoved) {
        let attempt = self.moving.as_ref().map(|moving| moving.attempt.clone());
        self.forget_move();
        if attempt.is_some_and(|attempt| self.guest.end_attempt(&attempt)) {
            self.guest.link.tell_not_moved(reason);
        }
    }

    /// Disconnects the VMM that is to take the guest over, and forgets the attempt. Whoever has ended the attempt tells
    /// so; if the guest's own VMM has gone, that is the main thread.
    pub(super) fn forget_move(&mut self) {
        let Some(moving) = self.moving.take() else { return };
        if let Some(socket) = moving.socket() {
            self.poller.remove(socket);
        }
    }
}
