// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The status of a control command.

use crate::base::counters::Counter;
use crate::memory::mr::ResolveError;

/// `enum virtio_rdma_status` without OK.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Status {
    Error = abi::VIRTIO_RDMA_STATUS_ERR as u8,
    Invalid = abi::VIRTIO_RDMA_STATUS_INVAL as u8,
    NoObject = abi::VIRTIO_RDMA_STATUS_NO_OBJECT as u8,
    NoResource = abi::VIRTIO_RDMA_STATUS_NO_RESOURCE as u8,
    Busy = abi::VIRTIO_RDMA_STATUS_BUSY as u8,
    Unsupported = abi::VIRTIO_RDMA_STATUS_UNSUPPORTED as u8,
    Permission = abi::VIRTIO_RDMA_STATUS_PERM as u8,
    Fault = abi::VIRTIO_RDMA_STATUS_FAULT as u8,
    Length = abi::VIRTIO_RDMA_STATUS_LENGTH as u8,
    State = abi::VIRTIO_RDMA_STATUS_STATE as u8,
    Exists = abi::VIRTIO_RDMA_STATUS_EXISTS as u8,
}

impl Status {
    /// Returns the status of a command whose memory cannot be found.
    pub(crate) fn of_memory(why: ResolveError) -> Self {
        match why {
            ResolveError::Malformed => Self::Invalid,
            ResolveError::Fault => Self::Fault,
            ResolveError::TooManyExtents => Self::NoResource,
        }
    }

    /// Returns the counter of commands that end so.
    pub(crate) fn counter(self) -> Counter {
        match self {
            Self::Error => Counter::CommandError,
            Self::Invalid => Counter::CommandInvalid,
            Self::NoObject => Counter::CommandNoObject,
            Self::NoResource => Counter::CommandNoResource,
            Self::Busy => Counter::CommandBusy,
            Self::Unsupported => Counter::CommandUnsupported,
            Self::Permission => Counter::CommandPermission,
            Self::Fault => Counter::CommandFault,
            Self::Length => Counter::CommandLength,
            Self::State => Counter::CommandState,
            Self::Exists => Counter::CommandExists,
        }
    }
}
