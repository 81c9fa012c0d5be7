// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The limits of the device of one guest.

use abi::VIRTIO_RDMA_PAGE_SHIFT;
use serde::{Deserialize, Serialize};

use super::image::LoadError;

/// SGEs of one work request, at most; bounds what is copied per request.
pub(crate) const MAX_SGE: usize = 16;

/// QPs or CQs with rings, at most: 16,384 for programs, and some for the kernel, whose MADs and
/// shared CQs come out of the same numbers. Bounds the numbers of [`super::queues::Jobs`].
const MAX_RING_OBJECTS: u16 = 16384 + 64;
/// SRQs, at most: with the others, they leave the numbers of [`super::queues::Jobs`] in 16 bits.
const MAX_SRQS: u16 = 8192;
/// Completion event virtqueues, at most.
pub(crate) const MAX_VECTORS: u16 = 64;
/// Entries of a send or receive ring, at most.
const MAX_RING_WR: u32 = 32768;
/// Bytes of inline data, at most; with the header they fit the largest stride.
pub(crate) const MAX_INLINE: u16 = 2048;

/// Pages of a fast registration, at most; bounds what REG_MR reads.
pub(crate) const MAX_FAST_REG_PAGES: usize = 512;

/// Bytes of a memory region, at most: bounds how long the device reads a page table.
const MAX_MR_SIZE: u64 = 1 << 40;

/// Largest message, in bytes.
pub(crate) const MAX_MSG_SIZE: u32 = 1 << 31;

/// Entries of the GID table, at most: address vectors name one of them by 8 bits.
const MAX_GIDS: u16 = 256;

/// The limits of the device of one guest. They are fixed before the guest starts; a [`super::quota::Quota`] may allow
/// the guest less.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// QPs on virtqueues, the GSI's among them; M in the numbering of virtqueues.
    pub max_qp: u16,
    /// CQs on virtqueues; N in the numbering of virtqueues.
    pub max_cq: u16,
    /// Descriptors of the largest send or receive ring, a power of two.
    pub wq_size: u16,
    /// Descriptors of the largest completion ring, a power of two.
    pub cq_size: u16,
    /// Completion event virtqueues, with rings.
    pub comp_vectors: u16,
    /// QPs with rings, the GSI's among them.
    pub ring_qp: u16,
    /// CQs with rings.
    pub ring_cq: u16,
    /// SRQs.
    pub max_srq: u16,
    /// Entries of the largest send, receive or shared receive ring, a power of two.
    pub ring_wr: u32,
    /// Entries of the largest completion ring, a power of two.
    pub ring_cqe: u32,
    /// Bytes of inline data of a work request, with rings.
    pub inline_data: u16,
    /// Memory regions.
    pub max_mr: u32,
    /// Memory windows, with rings.
    pub max_mw: u32,
    /// Protection domains.
    pub max_pd: u32,
    /// XRC domains.
    pub max_xrcd: u32,
    /// Bytes of one memory region.
    pub max_mr_size: u64,
    /// Pieces of contiguous memory that all regions together may consist of, and
    /// pages of rings: bounds the memory that a guest can make the device use, 48
    /// bytes each.
    pub max_extents: usize,
    /// The most READs and atomics that one QP has under way or serves. Each is carried out at once. Of one that came
    /// over the wire, some 60 bytes are kept in case the requester repeats it.
    pub max_rd_atomic: u8,
    /// Address handles (the driver's own; the device only names a number).
    pub max_ah: u32,
    /// Multicast groups that QPs are attached to.
    pub max_mcast_grp: u32,
    /// QPs attached to one multicast group; bounds the copies of a datagram.
    pub max_mcast_qp_attach: u32,
    /// Attachments in all.
    pub max_mcast_attach: u32,
    /// Entries of the GID table.
    pub gid_table: u16,
}

impl Default for Limits {
    /// Returns limits for a transport with 256 virtqueues or more.
    fn default() -> Self {
        Self {
            max_qp: 95,
            max_cq: 64,
            wq_size: 1024,
            cq_size: 4096,
            comp_vectors: 8,
            ring_qp: MAX_RING_OBJECTS,
            ring_cq: MAX_RING_OBJECTS,
            max_srq: MAX_SRQS,
            ring_wr: MAX_RING_WR,
            ring_cqe: 1 << 18,
            inline_data: 512,
            max_mr: 1 << 18,
            max_mw: 1 << 16,
            max_pd: 65536,
            max_xrcd: 65536,
            max_mr_size: MAX_MR_SIZE,
            max_extents: 4 << 20,
            max_rd_atomic: 128,
            max_ah: 65536,
            max_mcast_grp: 4096,
            max_mcast_qp_attach: 64,
            max_mcast_attach: 16384,
            gid_table: 128,
        }
    }
}

impl Limits {
    /// Returns limits for a transport with 64 virtqueues.
    pub fn for_64_queues() -> Self {
        Self { max_qp: 21, max_cq: 20, comp_vectors: 4, ..Self::default() }
    }

    /// Checks that a guest was told of the same limits.
    pub(crate) fn check(&self, told: &Self) -> Result<(), LoadError> {
        macro_rules! check {
            ($($field:ident)*) => {
                $(if told.$field != self.$field {
                    return Err(LoadError::Limit { what: stringify!($field) });
                })*
            };
        }
        check! {
            max_qp max_cq wq_size cq_size comp_vectors ring_qp ring_cq max_srq ring_wr ring_cqe inline_data
            max_mr max_mw max_pd max_xrcd max_mr_size max_extents max_rd_atomic max_ah max_mcast_grp
            max_mcast_qp_attach max_mcast_attach gid_table
        }
        Ok(())
    }

    /// Forces each limit into the range that the engine works with.
    pub(crate) fn clamped(mut self) -> Self {
        let ring = |size: u16, most: u16| size.clamp(2, most).next_power_of_two().min(most);
        self.max_qp = self.max_qp.clamp(1, 16384);
        self.max_cq = self.max_cq.clamp(1, 16384);
        self.wq_size = ring(self.wq_size, 1 << 15);
        self.cq_size = ring(self.cq_size, 1 << 15);
        let entries = |entries: u32, most: u32| match entries.clamp(2, most) {
            entries if entries.is_power_of_two() => entries,
            entries => entries.next_power_of_two() / 2,
        };
        self.comp_vectors = self.comp_vectors.clamp(1, MAX_VECTORS);
        self.ring_qp = self.ring_qp.clamp(1, MAX_RING_OBJECTS);
        self.ring_cq = self.ring_cq.clamp(1, MAX_RING_OBJECTS);
        self.max_srq = self.max_srq.clamp(1, MAX_SRQS);
        self.ring_wr = entries(self.ring_wr, MAX_RING_WR);
        self.ring_cqe = entries(self.ring_cqe, 1 << 22);
        self.inline_data = self.inline_data.min(MAX_INLINE);
        self.max_mr = self.max_mr.clamp(1, 1 << 22);
        self.max_mw = self.max_mw.clamp(1, 1 << 22);
        self.max_pd = self.max_pd.clamp(1, 1 << 22);
        self.max_xrcd = self.max_xrcd.clamp(1, 1 << 22);
        self.max_mr_size = self.max_mr_size.clamp(1 << VIRTIO_RDMA_PAGE_SHIFT, MAX_MR_SIZE);
        self.gid_table = self.gid_table.clamp(1, MAX_GIDS);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gid_table_has_256_entries_at_most() {
        for (gid_table, entries) in [(0, 1), (128, 128), (256, 256), (257, 256), (u16::MAX, 256)] {
            let limits = Limits { gid_table, ..Limits::default() };
            assert_eq!(limits.clamped().gid_table, entries);
        }
    }
}
