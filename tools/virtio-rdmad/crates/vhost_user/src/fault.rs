// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a front end can do wrong, counted by kind.

/// A mistake of the front end. The message it stands in fails, nothing else.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Fault {
    /// A request that is not part of the protocol or not served.
    #[error("unknown request")]
    UnknownRequest,
    /// A payload of another length than its request has.
    #[error("wrong length of a payload")]
    Payload,
    /// Not as many file descriptors as the request needs.
    #[error("wrong number of file descriptors")]
    Descriptors,
    /// A feature bit that was not offered.
    #[error("a feature that was not offered")]
    Features,
    /// No queue has this index.
    #[error("no such queue")]
    QueueIndex,
    /// A ring size that the queue cannot have, or an index that goes beyond 16 bits.
    #[error("invalid size or index of a ring")]
    QueueValue,
    /// A ring at an address that is in no memory region.
    #[error("a ring outside of the memory table")]
    QueueAddress,
    /// A queue that was set up such that the device cannot serve it.
    #[error("a queue that cannot be served")]
    QueueSetup,
    /// A change to a queue that runs.
    #[error("a queue was changed while it runs")]
    QueueRunning,
    /// Memory that cannot be mapped.
    #[error("a memory region that cannot be mapped")]
    Region,
    /// More regions than were offered.
    #[error("too many memory regions")]
    RegionCount,
    /// No memory region is the one named.
    #[error("no such memory region")]
    RegionUnknown,
    /// A range beyond the configuration space.
    #[error("access beyond the configuration space")]
    ConfigBounds,
    /// A write to the configuration space, which is read-only.
    #[error("write to the configuration space")]
    ConfigWrite,
}

impl Fault {
    const COUNT: usize = Self::ConfigWrite as usize + 1;
}

/// How often each [`Fault`] happened.
#[derive(Debug, Default)]
pub struct Faults([u64; Fault::COUNT]);

impl Faults {
    /// Counts a fault; the first of its kind is logged.
    pub(crate) fn count(&mut self, fault: Fault, request: u32) {
        let counter = &mut self.0[fault as usize];
        *counter += 1;
        if *counter == 1 {
            tracing::warn!(%fault, request, "vhost-user front end; further ones are only counted");
        }
    }

    /// How often this one happened.
    pub fn get(&self, fault: Fault) -> u64 {
        self.0[fault as usize]
    }
}
