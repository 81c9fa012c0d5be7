// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VMM that takes a device over from another VMM: how far it is, and why it cannot.
//!
//! The device goes on, and so does its driver, which notices nothing. What the driver has made of the device is therefore
//! taken from the connection of the VMM from before ([`Protocol::adopt`](crate::Protocol::adopt)). Memory and eventfds
//! belong to the VMM: the new one must have given out its own before ([`Protocol::progress`](crate::Protocol::progress)).

use crate::ResumeError;

/// Which memory a VMM must have that is to take a device over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum MemoryRule {
    /// The same parts of the same files at the same guest addresses.
    Same,
    /// Memory at the same guest addresses, in ranges of the same lengths. It has the content that the guest's memory has
    /// while the device is frozen.
    Copy,
}

/// How far a VMM is that is to take a device over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Progress {
    /// It has set up all that it must.
    Ready,
    /// It has not set this up yet.
    Lacks(Lack),
}

/// What a VMM has not set up yet.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Lack {
    /// Memory of the guest, or it has memory that the guest does not have.
    #[error("its memory is not that of the guest at {guest_addr:#x} ({len} bytes)")]
    Memory {
        /// The first guest address.
        guest_addr: u64,
        /// Bytes.
        len: u64,
    },
    /// A queue that the guest uses.
    #[error("it has not started queue {0}")]
    Queue(u16),
    /// The eventfd of an MSI-X vector that has one at the VMM that is connected.
    #[error("it has not given an eventfd for MSI-X vector {0}")]
    Vector(u16),
    /// The eventfd of INTx, which has one at the VMM that is connected.
    #[error("it has not given an eventfd for INTx")]
    Intx,
    /// It has given eventfds for MSI-X vectors, and the VMM that is connected has none: the guest has MSI-X disabled.
    #[error("it has enabled MSI-X, which the guest has disabled")]
    NoMsix,
}

/// Why a VMM cannot take a device over.
#[derive(Debug, thiserror::Error)]
pub enum Misfit {
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
    /// It has other memory than the guest there, or one of the two has memory there and the other has not.
    #[error("its memory at {guest_addr:#x} ({len} bytes) is not that of the guest")]
    Memory {
        /// The first guest address.
        guest_addr: u64,
        /// Bytes.
        len: u64,
    },
    /// What the driver has made of the device cannot be taken from the connection of the VMM from before.
    #[error(transparent)]
    State(#[from] ResumeError),
}
