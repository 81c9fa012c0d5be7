// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The interface to the process around the engine: wake-ups and the time, which the engine needs, and incidents, which
//! it reports.

use std::time::Instant;

use roce::Segments;

use super::refused::RefusedAccess;

/// Makes the thread that serves a guest call [`crate::Device::run`], and learns what happens to the guest.
pub trait Wake: Send + Sync {
    /// Wakes the thread. Called from any thread of the process; must not block
    /// and must not call into the engine.
    fn wake(&self);

    /// Reports an incident. Any thread of the process calls this, with locks of the engine held; the function must not
    /// block and must not call into the engine. A guest can cause any number of incidents.
    fn note(&self, _: Incident) {}
}

/// An incident of an object of a guest: an error, or a change that the guest has not asked for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Incident {
    /// A work request of a QP has ended with an error, so the QP is in ERR or SQE.
    Send {
        /// The QP number.
        qpn: u32,
        /// The error, one of `enum virtio_rdma_wc_status`.
        status: u32,
        /// The memory of the guest that the work request may not use, if it ends with a local protection error.
        refused: Option<RefusedAccess>,
    },
    /// A receive work request of a QP has ended with an error, so the QP is in ERR.
    Receive {
        /// The QP number.
        qpn: u32,
        /// The error, one of `enum virtio_rdma_wc_status`.
        status: u32,
        /// The memory that the receive, or the message for it, may not use, if that is the error.
        refused: Option<RefusedAccess>,
    },
    /// A QP is in ERR because of its queues, or of what its peer asked for.
    Qp {
        /// The QP number.
        qpn: u32,
        /// The event that the guest is told, one of `enum virtio_rdma_event_type`.
        event: u32,
        /// The memory of the guest that the peer may not use, if the peer has asked for it.
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
    /// Sends a packet, or a train of packets of one connection in their order. Any thread of the process calls this;
    /// the function must not block and must not call into the engine. A packet that cannot be sent is lost, as on any
    /// network.
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
