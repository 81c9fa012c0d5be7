// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! FLUSH (IBA A19.4.1; specification, FLUSH): what earlier work requests put
//! into memory of the peer is where everybody there finds it.

use std::sync::atomic::Ordering;
use std::sync::RwLock;

use abi::{
    virtio_rdma_ring_flush_wqe, VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL,
    VIRTIO_RDMA_ACCESS_FLUSH_PERSISTENT, VIRTIO_RDMA_FLUSH_GLOBAL, VIRTIO_RDMA_FLUSH_MR,
    VIRTIO_RDMA_FLUSH_PERSISTENT, VIRTIO_RDMA_FLUSH_RANGE,
};
use memory::atomic::fence;
use serde::{Deserialize, Serialize};

use super::key_table::KeyTable;
use super::mr::Claim;
use super::mr_cache::MrCache;
use crate::base::refused::KeyError;

/// The request of a FLUSH.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Flush {
    /// The access that its key must give, `VIRTIO_RDMA_ACCESS_FLUSH_*`.
    pub access: u32,
    /// Bytes at `remote_addr`; `None` for all that the key is good for.
    pub length: Option<u64>,
}

impl Flush {
    /// Reads the request from an entry of a ring; `None` if it is of an unknown kind, or if its range is longer than
    /// the 32 bits of a packet can say.
    pub fn from_entry(entry: &virtio_rdma_ring_flush_wqe) -> Option<Self> {
        let length = match entry.level.into() {
            VIRTIO_RDMA_FLUSH_RANGE => Some(u32::try_from(entry.length).ok()?.into()),
            VIRTIO_RDMA_FLUSH_MR => None,
            _ => return None,
        };
        Self::from_wire(entry.type_, length)
    }

    /// Returns a flush with these bits of placement, which are the same in a work request and in a packet
    /// (IBA A19.4.1.1); `None` if one of them is not known.
    pub fn from_wire(placement: u8, length: Option<u64>) -> Option<Self> {
        let placement = u32::from(placement);
        let known = VIRTIO_RDMA_FLUSH_GLOBAL | VIRTIO_RDMA_FLUSH_PERSISTENT;
        if placement == 0 || placement & !known != 0 {
            return None;
        }
        let access = |bit, access| if placement & bit != 0 { access } else { 0 };
        let access = access(VIRTIO_RDMA_FLUSH_GLOBAL, VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL)
            | access(VIRTIO_RDMA_FLUSH_PERSISTENT, VIRTIO_RDMA_ACCESS_FLUSH_PERSISTENT);
        Some(Self { access, length })
    }

    /// Returns the bits of placement.
    pub fn placement(&self) -> u8 {
        let placement = |access, bit| if self.access & access != 0 { bit } else { 0 };
        (placement(VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL, VIRTIO_RDMA_FLUSH_GLOBAL)
            | placement(VIRTIO_RDMA_ACCESS_FLUSH_PERSISTENT, VIRTIO_RDMA_FLUSH_PERSISTENT))
            as u8
    }
}

/// Flushes memory that a peer names by `key` at `addr`.
pub(crate) fn flush(
    keys: &RwLock<KeyTable>,
    flush: &Flush,
    key: u32,
    addr: u64,
    claim: Claim,
    cache: &mut MrCache,
) -> Result<(), KeyError> {
    match flush.length {
        Some(length) => cache.map(keys, key, claim, addr, length).map(|_| ())?,
        None => cache.check_key(keys, key, claim)?,
    }
    // All copies of this QP were made by this thread, before. Stores that bypass the caches,
    // as large copies have, are behind no later one of another thread but by a fence.
    fence(Ordering::SeqCst);
    Ok(())
}
