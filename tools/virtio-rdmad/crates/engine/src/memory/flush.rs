// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! FLUSH (IBA A19.4.1; specification, chapter 15.1): what earlier work requests put
//! into memory of the peer is where everybody there finds it.

use std::sync::atomic::Ordering;

use abi::{
    virtio_rdma_ring_flush_wqe, VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL,
    VIRTIO_RDMA_ACCESS_FLUSH_PERSISTENT, VIRTIO_RDMA_FLUSH_GLOBAL, VIRTIO_RDMA_FLUSH_MR,
    VIRTIO_RDMA_FLUSH_PERSISTENT, VIRTIO_RDMA_FLUSH_RANGE, VIRTIO_RDMA_F_FLUSH,
};
use memory::atomic::fence;

use crate::device::Shared;
use crate::memory::mr::{Claim, KeyError};
use crate::memory::mr_cache::PinSet;

/// What FLUSH asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flush {
    /// The access that its key must give, `VIRTIO_RDMA_ACCESS_FLUSH_*`.
    pub access: u32,
    /// Bytes at `remote_addr`; `None` for all that the key is good for.
    pub length: Option<u64>,
}

impl Flush {
    /// Of a ring; `None` if it is none.
    pub fn from_entry(entry: &virtio_rdma_ring_flush_wqe) -> Option<Self> {
        let placement = u32::from(entry.type_);
        let known = VIRTIO_RDMA_FLUSH_GLOBAL | VIRTIO_RDMA_FLUSH_PERSISTENT;
        if placement == 0 || placement & !known != 0 {
            return None;
        }
        let access = |bit, access| if placement & bit != 0 { access } else { 0 };
        let access = access(VIRTIO_RDMA_FLUSH_GLOBAL, VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL)
            | access(VIRTIO_RDMA_FLUSH_PERSISTENT, VIRTIO_RDMA_ACCESS_FLUSH_PERSISTENT);
        let length = match entry.level.into() {
            VIRTIO_RDMA_FLUSH_RANGE => Some(entry.length),
            VIRTIO_RDMA_FLUSH_MR => None,
            _ => return None,
        };
        Some(Self { access, length })
    }
}

impl Shared {
    /// Whether there is FLUSH.
    pub(crate) fn has_flush(&self) -> bool {
        self.has_rings() && self.has(VIRTIO_RDMA_F_FLUSH)
    }

    /// Flushes memory that a peer names.
    pub(crate) fn flush(
        &self,
        flush: &Flush,
        key: u32,
        addr: u64,
        claim: Claim,
        pins: &mut PinSet,
    ) -> Result<(), KeyError> {
        match flush.length {
            Some(length) => pins.map(&self.keys, key, claim, addr, length).map(|_| ())?,
            None => pins.check_key(&self.keys, key, claim)?,
        }
        // All copies of this QP were made by this thread, before. Stores that bypass the caches,
        // as large copies have, are behind no later one of another thread but by a fence.
        fence(Ordering::SeqCst);
        Ok(())
    }
}
