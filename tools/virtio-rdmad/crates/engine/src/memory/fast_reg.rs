// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fast registration: regions that work requests give memory and take it from
//! (specification, Fast registration).
//!
//! A region of CREATE_MR is FREE until REG_MR makes it VALID; LOCAL_INV, and
//! invalidation by the peer, make it FREE again. The upper 24 bits of its key
//! stay, the rest comes with each REG_MR.
//!
//! Work requests of a guest are done by the guest's own thread, control commands
//! too. Only invalidation may come from a peer's: it revokes the region, and is
//! asked for again as long as a copy by the key is under way.

use abi::virtio_rdma_ring_reg_wqe;
use serde::{Deserialize, Serialize};

use super::mr::Attributes;
use crate::base::refused::KeyError;
use crate::base::slot::Slot;

/// A region for fast registration.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct FastReg {
    /// Its PD.
    pub pdn: u32,
    /// Most pages of a registration.
    pub max_pages: usize,
    /// The key of the last REG_MR; the first key of the region if there was no REG_MR yet.
    pub key: u32,
    /// The attributes of the region if it is VALID; `None` if it is FREE.
    pub valid: Option<Attributes>,
}

/// The request of a REG_MR.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Registration {
    /// The new key.
    pub key: u32,
    /// `VIRTIO_RDMA_ACCESS_*`.
    pub access: u32,
    /// Entries of the page list.
    pub npages: u32,
    /// Address of the page list.
    pub pages: u64,
    /// Address by which work requests name the first byte.
    pub iova: u64,
    /// Bytes.
    pub length: u64,
    /// Binary logarithm of the bytes of a page.
    pub page_shift: u8,
}

impl Registration {
    /// Reads the request from an entry of a ring.
    pub fn from_entry(entry: &virtio_rdma_ring_reg_wqe) -> Self {
        let virtio_rdma_ring_reg_wqe { key, access, pages, iova, length, page_shift, .. } = *entry;
        Self { key, access, npages: entry.npages.into(), pages, iova, length, page_shift }
    }
}

/// The side that invalidates a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Invalidator {
    /// The owner of the QP.
    Local,
    /// The peer of the QP.
    Remote,
}

/// The invalidation of a key by a work request.
#[derive(Clone, Copy)]
pub(crate) struct Invalidation {
    /// The key.
    pub key: u32,
    /// Protection domain of the QP.
    pub pdn: u32,
    /// Place of the QP.
    pub qp: Slot,
    /// The side that asks for the invalidation.
    pub by: Invalidator,
}

impl Invalidation {
    /// Checks the region or window with the index of the key: its protection domain, its key, and whether it is FREE.
    pub fn check(&self, pdn: u32, key: u32, is_free: bool) -> Result<(), KeyError> {
        if pdn != self.pdn {
            return Err(KeyError::Pd);
        }
        if key != self.key {
            return Err(KeyError::Key);
        }
        // For its owner, it is no error to invalidate a key that is FREE already.
        if is_free && self.by == Invalidator::Remote {
            return Err(KeyError::Free);
        }
        Ok(())
    }
}
