// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device-specific feature bits that driver and device agreed on.

use std::sync::atomic::{AtomicU64, Ordering};

use abi::{
    VIRTIO_RDMA_F_ATOMICS, VIRTIO_RDMA_F_ATOMIC_WRITE, VIRTIO_RDMA_F_COUNTERS,
    VIRTIO_RDMA_F_CQ_MODERATION, VIRTIO_RDMA_F_CQ_RESIZE, VIRTIO_RDMA_F_FAST_REG,
    VIRTIO_RDMA_F_FLUSH, VIRTIO_RDMA_F_MCAST, VIRTIO_RDMA_F_MW, VIRTIO_RDMA_F_PAGE_LEVELS,
    VIRTIO_RDMA_F_PAGE_SIZES, VIRTIO_RDMA_F_REREG_MR, VIRTIO_RDMA_F_RESET_TO_RTR,
    VIRTIO_RDMA_F_RINGS, VIRTIO_RDMA_F_SRQ, VIRTIO_RDMA_F_SRQ_RESIZE, VIRTIO_RDMA_F_UC,
    VIRTIO_RDMA_F_VLAN, VIRTIO_RDMA_F_XRC,
};

/// The agreed bits. They change only while the device is not started; any thread may ask.
#[derive(Default)]
pub(crate) struct Features(AtomicU64);

impl Features {
    /// Sets the bits that driver and device agreed on.
    pub fn agree(&self, bits: u64) {
        self.0.store(bits, Ordering::Release);
    }

    /// Returns the bits that driver and device agreed on.
    pub fn agreed(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    fn has(&self, feature: u32) -> bool {
        self.0.load(Ordering::Acquire) & 1 << feature != 0
    }

    /// Returns whether queues are rings in guest memory.
    pub fn has_rings(&self) -> bool {
        self.has(VIRTIO_RDMA_F_RINGS)
    }

    /// Returns whether queues are virtqueues.
    pub fn has_virtqueues(&self) -> bool {
        !self.has_rings()
    }

    /// Returns whether there are SRQs.
    pub fn has_srqs(&self) -> bool {
        self.has_rings() && self.has(VIRTIO_RDMA_F_SRQ)
    }

    /// Returns whether there are extended reliable connections.
    pub fn has_xrc(&self) -> bool {
        self.has_srqs() && self.has(VIRTIO_RDMA_F_XRC)
    }

    /// Returns whether SRQs can be resized.
    pub fn has_srq_resize(&self) -> bool {
        self.has_srqs() && self.has(VIRTIO_RDMA_F_SRQ_RESIZE)
    }

    /// Returns whether CQs can be resized.
    pub fn has_cq_resize(&self) -> bool {
        self.has_rings() && self.has(VIRTIO_RDMA_F_CQ_RESIZE)
    }

    /// Returns whether there are unreliable connections.
    pub fn has_uc(&self) -> bool {
        self.has(VIRTIO_RDMA_F_UC)
    }

    /// Returns whether there are atomic operations.
    pub fn has_atomics(&self) -> bool {
        self.has(VIRTIO_RDMA_F_ATOMICS)
    }

    /// Returns whether completion events can be held back.
    pub fn has_cq_moderation(&self) -> bool {
        self.has_rings() && self.has(VIRTIO_RDMA_F_CQ_MODERATION)
    }

    /// Returns whether there are memory windows.
    pub fn has_mws(&self) -> bool {
        self.has_rings() && self.has(VIRTIO_RDMA_F_MW)
    }

    /// Returns whether there is FLUSH.
    pub fn has_flush(&self) -> bool {
        self.has_rings() && self.has(VIRTIO_RDMA_F_FLUSH)
    }

    /// Returns whether there is ATOMIC WRITE.
    pub fn has_atomic_write(&self) -> bool {
        self.has_rings() && self.has(VIRTIO_RDMA_F_ATOMIC_WRITE)
    }

    /// Returns whether QPs go from RESET to RTR at once.
    pub fn has_reset_to_rtr(&self) -> bool {
        self.has(VIRTIO_RDMA_F_RESET_TO_RTR)
    }

    /// Returns whether there is fast registration.
    pub fn has_fast_reg(&self) -> bool {
        self.has(VIRTIO_RDMA_F_FAST_REG)
    }

    /// Returns whether there are keys that work requests invalidate.
    pub fn has_invalidation(&self) -> bool {
        self.has_fast_reg() || self.has_mws()
    }

    /// Returns whether MRs can be registered again.
    pub fn has_rereg_mr(&self) -> bool {
        self.has(VIRTIO_RDMA_F_REREG_MR)
    }

    /// Returns whether page tables may have levels.
    pub fn has_page_levels(&self) -> bool {
        self.has(VIRTIO_RDMA_F_PAGE_LEVELS)
    }

    /// Returns whether page tables of regions may list pages larger than 4 KiB.
    pub fn has_page_sizes(&self) -> bool {
        self.has(VIRTIO_RDMA_F_PAGE_SIZES)
    }

    /// Returns whether there is multicast.
    pub fn has_mcast(&self) -> bool {
        self.has(VIRTIO_RDMA_F_MCAST)
    }

    /// Returns whether the port's counters can be read.
    pub fn has_counters(&self) -> bool {
        self.has(VIRTIO_RDMA_F_COUNTERS)
    }

    /// Returns whether GIDs may belong to VLANs.
    pub fn has_vlans(&self) -> bool {
        self.has(VIRTIO_RDMA_F_VLAN)
    }
}
