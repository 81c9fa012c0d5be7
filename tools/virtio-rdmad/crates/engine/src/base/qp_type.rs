// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The transport services of QPs.

use serde::{Deserialize, Serialize};

/// The transport service of a QP, `enum virtio_rdma_qp_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum QpType {
    /// QP 1, for communication management.
    Gsi,
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Extended reliable connection, the end that sends.
    XrcIni,
    /// Extended reliable connection, the end that receives.
    XrcTgt,
}

impl QpType {
    /// All types.
    pub const ALL: [Self; 6] =
        [Self::Gsi, Self::Rc, Self::Uc, Self::Ud, Self::XrcIni, Self::XrcTgt];

    /// Returns the name, as the field has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gsi => "GSI",
            Self::Rc => "RC",
            Self::Uc => "UC",
            Self::Ud => "UD",
            Self::XrcIni => "XRC_INI",
            Self::XrcTgt => "XRC_TGT",
        }
    }

    /// Returns the type of this number.
    pub fn from_abi(value: u8) -> Option<Self> {
        Some(match u32::from(value) {
            abi::VIRTIO_RDMA_QPT_GSI => Self::Gsi,
            abi::VIRTIO_RDMA_QPT_RC => Self::Rc,
            abi::VIRTIO_RDMA_QPT_UC => Self::Uc,
            abi::VIRTIO_RDMA_QPT_UD => Self::Ud,
            abi::VIRTIO_RDMA_QPT_XRC_INI => Self::XrcIni,
            abi::VIRTIO_RDMA_QPT_XRC_TGT => Self::XrcTgt,
            _ => return None,
        })
    }

    /// Returns whether the QP has one peer, named by its address vector.
    pub fn is_connected(self) -> bool {
        matches!(self, Self::Rc | Self::Uc | Self::XrcIni | Self::XrcTgt)
    }

    /// Returns whether each message is answered, and an error ends the connection.
    pub fn is_reliable(self) -> bool {
        matches!(self, Self::Rc | Self::XrcIni | Self::XrcTgt)
    }

    /// Returns whether it is either end of an extended reliable connection.
    pub fn is_xrc(self) -> bool {
        matches!(self, Self::XrcIni | Self::XrcTgt)
    }

    /// Returns the type of the QP that answers messages of one of this type.
    pub fn responder(self) -> Self {
        match self {
            Self::XrcIni => Self::XrcTgt,
            same => same,
        }
    }
}
