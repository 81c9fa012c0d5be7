// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The errors that end a connection.

use rustix::io::Errno;

/// The reason why a connection cannot go on. The owner of the server resets the backend then.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The VMM closed its end.
    #[error("the VMM closed the connection")]
    Closed,
    /// A message has fewer bytes than its header, or more than the server accepts: the two ends no
    /// longer agree where a message begins.
    #[error("a message of {0} bytes")]
    Length(usize),
    /// The VMM sends messages and does not read the replies.
    #[error("the VMM does not read the replies")]
    Stuck,
    /// A part of a message is there when the process is to end.
    #[error("the VMM has sent a part of a message")]
    Partial,
    /// The socket failed.
    #[error("socket: {0}")]
    Os(#[from] Errno),
    /// The VMM broke a rule of the protocol, which has no reply that says so.
    #[error("{0}")]
    Protocol(Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Makes an error of the protocol's own.
    pub fn protocol(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Protocol(Box::new(error))
    }

    /// Returns whether the VMM just went away.
    pub fn is_closed(&self) -> bool {
        matches!(self, Self::Closed)
    }
}
