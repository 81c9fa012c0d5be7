// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Access flags of memory regions.

use abi::{
    VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL, VIRTIO_RDMA_ACCESS_HUGETLB, VIRTIO_RDMA_ACCESS_LOCAL_WRITE,
    VIRTIO_RDMA_ACCESS_MW_BIND, VIRTIO_RDMA_ACCESS_RELAXED_ORDERING,
    VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC, VIRTIO_RDMA_ACCESS_REMOTE_READ,
    VIRTIO_RDMA_ACCESS_REMOTE_WRITE,
};

use crate::base::features::Features;

/// Access flags that mean something, or may be given without meaning anything, whatever was
/// agreed on.
pub(crate) const KNOWN_ACCESS: u32 = VIRTIO_RDMA_ACCESS_LOCAL_WRITE
    | VIRTIO_RDMA_ACCESS_REMOTE_WRITE
    | VIRTIO_RDMA_ACCESS_REMOTE_READ
    | VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC
    | VIRTIO_RDMA_ACCESS_MW_BIND
    | VIRTIO_RDMA_ACCESS_HUGETLB
    | VIRTIO_RDMA_ACCESS_RELAXED_ORDERING;

/// Returns whether a region may have these access flags: all known, and remote writes
/// only where local ones are allowed (IBA 10.6.3). No memory is persistent.
pub(crate) fn is_valid(features: &Features, flags: u32) -> bool {
    let remote_write = VIRTIO_RDMA_ACCESS_REMOTE_WRITE | VIRTIO_RDMA_ACCESS_REMOTE_ATOMIC;
    let flush = if features.has_flush() { VIRTIO_RDMA_ACCESS_FLUSH_GLOBAL } else { 0 };
    flags & !(KNOWN_ACCESS | flush) == 0
        && (flags & remote_write == 0 || flags & VIRTIO_RDMA_ACCESS_LOCAL_WRITE != 0)
}
