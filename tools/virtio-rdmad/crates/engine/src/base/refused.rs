// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Accesses to memory that are refused, and why.

use abi::virtio_rdma_sge;

/// The reason why a key does not give the access that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyError {
    /// No region and no window has this key.
    Key,
    /// The region or window with this key was invalidated, or was never made valid.
    Free,
    /// The region belongs to another PD.
    Pd,
    /// The region does not allow the access.
    Access,
    /// The QP does not let its peer do this at all, by its own access flags.
    QpAccess,
    /// The window is bound to another QP.
    Qp,
    /// The range is not within the region.
    Range,
    /// The memory is not there any more, or the guest cannot write it, or the key was invalidated during the copy.
    Memory,
}

impl KeyError {
    /// Returns the name of the reason, for other programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Key => "unknown_key",
            Self::Free => "invalidated",
            Self::Pd => "other_pd",
            Self::Access => "no_right",
            Self::QpAccess => "qp_forbids",
            Self::Qp => "other_qp",
            Self::Range => "out_of_range",
            Self::Memory => "no_memory",
        }
    }
}

/// An access to memory that is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusedAccess {
    /// The key that the memory was named by.
    pub key: u32,
    /// The address of the first byte, as the work request or the packet has it.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// The reason for the refusal.
    pub why: KeyError,
}

/// An SGE of a list that does not give access to its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SgeError {
    /// The place of the SGE in the list, or a number beyond the list if the SGE is not known.
    pub at: u8,
    /// The reason for the refusal.
    pub why: KeyError,
}

impl SgeError {
    /// The memory of an SGE cannot be copied from or to. It is not known which.
    pub const COPY: Self = Self { at: u8::MAX, why: KeyError::Memory };

    /// Returns the access that is refused with one of these SGEs, if the SGE is known.
    pub fn access(self, sges: &[virtio_rdma_sge]) -> Option<RefusedAccess> {
        let sge = match sges {
            [sge] => sge,
            _ => sges.get(usize::from(self.at))?,
        };
        let (key, address, length) = (sge.lkey, sge.addr, sge.length.into());
        Some(RefusedAccess { key, address, length, why: self.why })
    }
}
