// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the engine asks of the process around it: wake-ups and the time.

use std::time::Instant;

use roce::Segments;

/// Makes the thread that serves a guest call [`crate::Device::run`].
pub trait Wake: Send + Sync {
    /// Wakes the thread. Called from any thread of the process; must not block
    /// and must not call into the engine.
    fn wake(&self);
}

/// The way out of the process: an interface of the network that carries frames.
pub trait Uplink: Send + Sync {
    /// Sends a packet, or a train of packets of one connection, in the order in which they are in it.
    /// Called from any thread of the process; must not block and must not call into the engine. What
    /// cannot be sent is lost, as on any network.
    fn send(&self, segments: Segments<'_>);
}

/// A source of time, so that tests have their own.
pub trait Clock: Send + Sync {
    /// Returns the time now, which never runs backwards.
    fn now(&self) -> Instant;
}

/// The clock of the machine.
#[derive(Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }
}
