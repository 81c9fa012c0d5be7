// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An attempt to move a guest to another connection, as far as several threads have to do with it.
//!
//! A thread of the control socket begins it or cancels it, the main thread accepts the VMM that is to take the guest over,
//! and the guest's worker serves that VMM ([`takeover`](crate::takeover)). A guest has one attempt at a time. Whoever takes
//! it from the guest ([`Guest::end_attempt`](crate::guest::Guest::end_attempt)) tells how it has ended, so that this is told
//! once.

use std::io::Error;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use virtio_transport::Lack;

use crate::report::MoveReport;
use crate::socket::Socket;

/// An attempt to move a guest.
#[derive(Debug)]
pub struct Attempt {
    /// Whether the device is frozen until the end of the attempt, so that the guest's memory can be copied.
    pub freezes: bool,
    /// Whether it is frozen.
    is_frozen: AtomicBool,
    stage: Mutex<Stage>,
}

/// How far an attempt is.
#[derive(Debug)]
enum Stage {
    /// The other VMM is yet to connect here.
    Listens(Arc<Socket>),
    /// It has connected.
    Accepted(UnixStream),
    /// The worker serves it.
    Served {
        /// What it has not set up yet.
        lack: Option<Lack>,
    },
}

impl Attempt {
    /// Makes an attempt, in which the first VMM that connects to this socket is to take the guest over.
    pub fn new(socket: Socket, freezes: bool) -> Self {
        let stage = Mutex::new(Stage::Listens(Arc::new(socket)));
        Self { freezes, is_frozen: AtomicBool::new(false), stage }
    }

    /// Returns where the other VMM connects, unless it has connected.
    pub fn socket(&self) -> Option<Arc<Socket>> {
        match &*self.stage() {
            Stage::Listens(socket) => Some(socket.clone()),
            _ => None,
        }
    }

    /// Accepts the other VMM, if it waits at the socket, which is closed then. Returns whether it has come.
    pub fn accept(&self) -> Result<bool, Error> {
        let mut stage = self.stage();
        let Stage::Listens(socket) = &*stage else { return Ok(false) };
        let Some(stream) = socket.accept()? else { return Ok(false) };
        *stage = Stage::Accepted(stream);
        Ok(true)
    }

    /// Returns the connection of the other VMM, once, when that has come.
    pub fn take_stream(&self) -> Option<UnixStream> {
        let mut stage = self.stage();
        if !matches!(*stage, Stage::Accepted(_)) {
            return None;
        }
        match std::mem::replace(&mut *stage, Stage::Served { lack: None }) {
            Stage::Accepted(stream) => Some(stream),
            _ => None,
        }
    }

    /// Notes what the other VMM has not set up yet.
    pub fn set_lack(&self, lack: Option<Lack>) {
        *self.stage() = Stage::Served { lack };
    }

    /// Notes that no thread touches the guest's memory any more.
    pub fn set_frozen(&self) {
        self.is_frozen.store(true, Ordering::Release);
    }

    /// Returns whether no thread touches the guest's memory any more.
    pub fn is_frozen(&self) -> bool {
        self.is_frozen.load(Ordering::Acquire)
    }

    /// Returns what is told of it.
    pub fn report(&self) -> MoveReport {
        let (connected, lack) = match &*self.stage() {
            Stage::Listens(_) => (false, None),
            Stage::Accepted(_) => (true, None),
            Stage::Served { lack } => (true, *lack),
        };
        let lacks = lack.map(|lack| lack.to_string());
        MoveReport { freezes: self.freezes, frozen: self.is_frozen(), connected, lacks }
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
