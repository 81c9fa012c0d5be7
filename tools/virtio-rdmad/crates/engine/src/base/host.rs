// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the engine asks of the process around it, which are wake-ups and the time, and what it tells the process.

use std::time::Instant;

use roce::Segments;

use super::refused::RefusedAccess;

/// Makes the thread that serves a guest call [`crate::Device::run`], and learns what happens to the guest.
pub trait Wake: Send + Sync {
    /// Wakes the thread. Called from any thread of the process; must not block
    /// and must not call into the engine.
    fn wake(&self);

    /// Takes note of what has happened. Called from any thread of the process, and with locks of the engine
    /// held; must not block and must not call into the engine. A guest can cause any number of incidents.
    fn note(&self, _: Incident) {}
}

/// What happens to an object of a guest, and is not what the guest wants.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Incident {
    /// A work request of a QP has ended with an error, so the QP is in ERR or SQE.
    Send {
        /// The QP number.
        qpn: u32,
        /// The error, one of `enum virtio_rdma_wc_status`.
        status: u32,
        /// What memory of the guest the work request names and may not use, with a local protection error.
        refused: Option<RefusedAccess>,
    },
    /// A receive work request of a QP has ended with an error, so the QP is in ERR.
    Receive {
        /// The QP number.
        qpn: u32,
        /// The error, one of `enum virtio_rdma_wc_status`.
        status: u32,
        /// What memory the receive, or the message for it, names and may not use, if that is the error.
        refused: Option<RefusedAccess>,
    },
    /// A QP is in ERR because of its queues, or of what its peer asked for.
    Qp {
        /// The QP number.
        qpn: u32,
        /// The event that the guest is told, one of `enum virtio_rdma_event_type`.
        event: u32,
        /// What memory of the guest the peer has asked for and may not have, if that is why.
        refused: Option<RefusedAccess>,
    },
    /// A CQ has overflowed, or its ring cannot be used any more.
    Cq {
        /// The CQ number.
        cqn: u32,
    },
    /// An SRQ cannot be used any more.
    Srq {
        /// The SRQ number.
        srqn: u32,
    },
}

/// The way out of the process: an interface of the network that carries frames.
pub trait Uplink: Send + Sync {
    /// Sends a packet, or a train of packets of one connection, in the order in which they are in it.
    /// Called from any thread of the process; must not block and must not call into the engine. What
    /// cannot be sent is lost, as on any network.
    ///
    /// Returns how many times it has left the host: several times where the network below has no groups, and a frame
    /// that is for all goes to each other host by itself.
    fn send(&self, segments: Segments<'_>) -> usize;
}

/// A source of time, so that tests have their own.
pub trait Clock: Send + Sync {
    /// Returns the time now, which never runs backwards.
    fn now(&self) -> Instant;
}

/// Returns a random number of the machine, or 0 if it has none.
pub(crate) fn system_random() -> u64 {
    getrandom::u64().unwrap_or(0)
}

/// The clock of the machine.
#[derive(Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }
}
