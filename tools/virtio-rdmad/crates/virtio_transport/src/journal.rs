// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The state that another process needs to go on with a connection when this process has ended.
//!
//! The other process, the successor, has the same socket, so that the VMM does not notice. All that the VMM has said
//! before is in the [`ConnectionState`].

use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The difference between the state of a connection and the state before.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub enum Change {
    /// There is no difference.
    #[default]
    No,
    /// The bytes differ.
    Bytes,
    /// The file descriptors may differ, and the bytes too.
    Descriptors,
}

/// The state of a connection: all that the VMM has said so far.
#[derive(Debug, Default)]
pub struct ConnectionState {
    /// The state, in the protocol's own encoding.
    pub bytes: Vec<u8>,
    /// The file descriptors of the VMM, which the bytes name by their position here.
    pub descriptors: Vec<Arc<OwnedFd>>,
}

/// The reason why a successor cannot go on with a connection.
#[derive(Debug, thiserror::Error)]
pub enum ResumeError {
    /// The bytes are not a state, or one of another version of the encoding.
    #[error("the connection's state cannot be read: {0}")]
    Encoding(postcard::Error),
    /// A value of the state is not possible for this device.
    #[error("the connection's state: {what} {value} is not possible")]
    Value {
        /// The name of the value.
        what: &'static str,
        /// The value.
        value: u64,
    },
    /// The state names more descriptors than there are, or fewer.
    #[error("the connection's state names {named} file descriptors, and there are {there}")]
    Descriptors {
        /// The number of descriptors that the state names.
        named: usize,
        /// The number of descriptors that there are.
        there: usize,
    },
    /// Memory of the guest cannot be mapped.
    #[error("the connection's state: {0}")]
    Memory(#[from] memory::MapError),
    /// The driver has agreed to features that the device does not have: a later version has served it.
    #[error("the driver has agreed to the feature bits {0:#x}, which this version does not have")]
    Features(u64),
    /// The driver was offered another device than there is now.
    #[error("the connection's state is that of another device")]
    Device,
    /// The device cannot tell its driver that it has failed.
    #[error("the device cannot tell its driver that it has failed: {0}")]
    Fail(String),
    /// The device behind the connection cannot be served.
    #[error(transparent)]
    Transport(#[from] crate::Error),
}

/// Keeps the state of one connection where it outlives the process.
pub trait Journal: Send {
    /// Keeps this state in the place of the one before. When this returns, the end of the process does not lose it.
    /// `change` is [`Change::Bytes`] if the descriptors are those of the state before, and otherwise
    /// [`Change::Descriptors`]. Never waits.
    fn keep(&mut self, state: &ConnectionState, change: Change);
}
