// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Limits of a device, its configuration space and its numbering of queues.

use std::sync::Arc;

use abi::{
    virtio_rdma_config, VIRTIO_RDMA_ATOMIC_GLOB, VIRTIO_RDMA_CAP_ATOMIC_WRITE,
    VIRTIO_RDMA_CAP_BAD_PKEY_CNTR, VIRTIO_RDMA_CAP_BAD_QKEY_CNTR,
    VIRTIO_RDMA_CAP_BLOCK_MCAST_LOOPBACK, VIRTIO_RDMA_CAP_FLUSH_GLOBAL,
    VIRTIO_RDMA_CAP_MEM_MGT_EXTENSIONS, VIRTIO_RDMA_CAP_MEM_WINDOW,
    VIRTIO_RDMA_CAP_MEM_WINDOW_TYPE_2B, VIRTIO_RDMA_CAP_RC_RNR_NAK_GEN, VIRTIO_RDMA_CAP_SRQ_RESIZE,
    VIRTIO_RDMA_CAP_SYS_IMAGE_GUID, VIRTIO_RDMA_CAP_XRC, VIRTIO_RDMA_F_ATOMIC_WRITE,
    VIRTIO_RDMA_F_COUNTERS, VIRTIO_RDMA_F_CQ_MODERATION, VIRTIO_RDMA_F_EVENTS,
    VIRTIO_RDMA_F_FAST_REG, VIRTIO_RDMA_F_FLUSH, VIRTIO_RDMA_F_MAC, VIRTIO_RDMA_F_MCAST,
    VIRTIO_RDMA_F_MW, VIRTIO_RDMA_F_PAGE_LEVELS, VIRTIO_RDMA_F_REREG_MR, VIRTIO_RDMA_F_RINGS,
    VIRTIO_RDMA_F_SRQ, VIRTIO_RDMA_F_VLAN, VIRTIO_RDMA_F_XRC, VIRTIO_RDMA_PAGE_SHIFT,
};
use zerocopy::{transmute, FromZeros};

use crate::{AddressRights, Wake};

/// SGEs of one work request, at most; bounds what is copied per request.
pub(crate) const MAX_SGE: usize = 16;

/// QPs or CQs with rings, at most: 16,384 for programs, and some for the kernel, whose MADs and
/// shared CQs come out of the same numbers. Bounds the numbers of [`Jobs`].
const MAX_RING_OBJECTS: u16 = 16384 + 64;
/// SRQs, at most: with the others, they leave the numbers of [`Jobs`] in 16 bits.
const MAX_SRQS: u16 = 8192;
/// Completion event virtqueues, at most.
const MAX_VECTORS: u16 = 64;
/// Entries of a send or receive ring, at most.
const MAX_RING_WR: u32 = 32768;
/// Bytes of inline data, at most; with the header they fit the largest stride.
const MAX_INLINE: u16 = 2048;

/// Pages of a fast registration, at most; bounds what REG_MR reads.
pub(crate) const MAX_FAST_REG_PAGES: usize = 512;

/// Bytes of a memory region, at most: bounds how long the device reads a page table.
const MAX_MR_SIZE: u64 = 1 << 40;

/// Largest message, in bytes.
pub(crate) const MAX_MSG_SIZE: u32 = 1 << 31;

/// Vendor and part that the configuration space names: the virtio vendor, and
/// the device ID.
const VENDOR_ID: u32 = 0x1af4;
const VENDOR_PART_ID: u32 = abi::VIRTIO_RDMA_DEVICE_ID;

/// What one guest may use. All of it is fixed before the guest starts.
#[derive(Clone, Debug)]
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
    /// READs and atomics that one QP has under way or serves. They cost no memory: each is done
    /// at once, and nothing is kept for one that comes twice.
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
    /// Limits for a transport with 256 virtqueues or more.
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
    /// Limits for a transport with 64 virtqueues.
    pub fn for_64_queues() -> Self {
        Self { max_qp: 21, max_cq: 20, comp_vectors: 4, ..Self::default() }
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
        self.gid_table = self.gid_table.clamp(1, 1024);
        self
    }
}

/// One guest's device.
pub struct DeviceConfig {
    /// The guest's name, for logs.
    pub name: String,
    /// MAC address of the paired network interface.
    pub mac: Option<[u8; 6]>,
    /// The addresses that the guest may use.
    pub addresses: AddressRights,
    /// What the guest may use.
    pub limits: Limits,
    /// Whether VIRTIO_RDMA_F_RINGS is offered, and with it what needs rings.
    pub rings: bool,
    /// Makes the guest's thread call [`crate::Device::run`].
    pub wake: Arc<dyn Wake>,
}

/// What the device looks after: virtqueues and, with rings, what lies in guest
/// memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    /// Control.
    Control,
    /// Asynchronous events.
    Event,
    /// Doorbells of rings.
    Doorbell,
    /// Completion events of this vector.
    CompletionEvents(u16),
    /// The CQ of this number.
    Completion(u16),
    /// Send queue of the QP in this slot (QP number less one).
    Send(u16),
    /// Receive queue of the QP in this slot.
    Receive(u16),
    /// The SRQ in this slot (SRQ number less one).
    Srq(u16),
}

/// The numbering of virtqueues, which depends on the features agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Control, N completion, M pairs, event (specification, chapter 2).
    Virtqueues {
        /// N.
        cqs: u16,
        /// M.
        qps: u16,
    },
    /// Control, V completion events, doorbells, event (chapter 13).
    Rings {
        /// V.
        vectors: u16,
    },
}

impl Layout {
    /// The numbering for these limits.
    pub fn new(limits: &Limits, rings: bool) -> Self {
        if rings {
            Self::Rings { vectors: limits.comp_vectors }
        } else {
            Self::Virtqueues { cqs: limits.max_cq, qps: limits.max_qp }
        }
    }

    /// How many virtqueues there are.
    pub fn count(self) -> u16 {
        match self {
            Self::Virtqueues { cqs, qps } => 2 + cqs + 2 * qps,
            Self::Rings { vectors } => 3 + vectors,
        }
    }

    /// What the virtqueue of this index is for.
    pub fn queue(self, index: u16) -> Option<Queue> {
        if index == 0 {
            return Some(Queue::Control);
        }
        if index >= self.count() {
            return None;
        }
        if index == self.count() - 1 {
            return Some(Queue::Event);
        }
        Some(match self {
            Self::Virtqueues { cqs, .. } if index <= cqs => Queue::Completion(index - 1),
            Self::Virtqueues { cqs, .. } => {
                let pair = index - 1 - cqs;
                if pair % 2 == 0 {
                    Queue::Send(pair / 2)
                } else {
                    Queue::Receive(pair / 2)
                }
            }
            Self::Rings { vectors } if index <= vectors => Queue::CompletionEvents(index - 1),
            Self::Rings { .. } => Queue::Doorbell,
        })
    }
}

/// A number for each [`Queue`], the same in both layouts.
#[derive(Clone, Copy)]
pub(crate) struct Jobs {
    vectors: u16,
    cqs: u16,
    qps: u16,
    srqs: u16,
}

impl Jobs {
    /// The numbering for these limits.
    pub fn new(limits: &Limits) -> Self {
        Self {
            vectors: limits.comp_vectors,
            cqs: limits.max_cq.max(limits.ring_cq),
            qps: limits.max_qp.max(limits.ring_qp),
            srqs: limits.max_srq,
        }
    }

    /// How many numbers there are.
    pub fn count(self) -> u16 {
        self.srq(self.srqs)
    }

    /// The CQ of this number.
    pub fn completion(self, cq: u16) -> u16 {
        3 + self.vectors + cq
    }

    /// The send queue of a QP slot.
    pub fn send(self, slot: u16) -> u16 {
        self.completion(self.cqs) + 2 * slot
    }

    /// The receive queue of a QP slot.
    pub fn receive(self, slot: u16) -> u16 {
        self.send(slot) + 1
    }

    /// The SRQ in this slot.
    pub fn srq(self, slot: u16) -> u16 {
        self.send(self.qps) + slot
    }

    /// The number of a queue.
    pub fn number(self, queue: Queue) -> u16 {
        match queue {
            Queue::Control => 0,
            Queue::Event => 1,
            Queue::Doorbell => 2,
            Queue::CompletionEvents(vector) => 3 + vector,
            Queue::Completion(cq) => self.completion(cq),
            Queue::Send(slot) => self.send(slot),
            Queue::Receive(slot) => self.receive(slot),
            Queue::Srq(slot) => self.srq(slot),
        }
    }

    /// The queue of a number.
    pub fn queue(self, number: u16) -> Option<Queue> {
        Some(match number {
            0 => Queue::Control,
            1 => Queue::Event,
            2 => Queue::Doorbell,
            _ if number < self.completion(0) => Queue::CompletionEvents(number - 3),
            _ if number < self.send(0) => Queue::Completion(number - self.completion(0)),
            _ if number >= self.count() => return None,
            _ if number >= self.srq(0) => Queue::Srq(number - self.srq(0)),
            _ => {
                let pair = number - self.send(0);
                if pair % 2 == 0 {
                    Queue::Send(pair / 2)
                } else {
                    Queue::Receive(pair / 2)
                }
            }
        })
    }
}

/// Device-specific feature bits of a device.
pub(crate) fn features(mac: Option<[u8; 6]>, rings: bool) -> u64 {
    1 << VIRTIO_RDMA_F_EVENTS
        | 1 << VIRTIO_RDMA_F_FAST_REG
        | 1 << VIRTIO_RDMA_F_REREG_MR
        | 1 << VIRTIO_RDMA_F_PAGE_LEVELS
        | 1 << VIRTIO_RDMA_F_MCAST
        | 1 << VIRTIO_RDMA_F_COUNTERS
        | 1 << VIRTIO_RDMA_F_VLAN
        | u64::from(mac.is_some()) << VIRTIO_RDMA_F_MAC
        | u64::from(rings) << VIRTIO_RDMA_F_RINGS
        | u64::from(rings) << VIRTIO_RDMA_F_SRQ
        | u64::from(rings) << VIRTIO_RDMA_F_XRC
        | u64::from(rings) << VIRTIO_RDMA_F_MW
        | u64::from(rings) << VIRTIO_RDMA_F_FLUSH
        | u64::from(rings) << VIRTIO_RDMA_F_ATOMIC_WRITE
        | u64::from(rings) << VIRTIO_RDMA_F_CQ_MODERATION
}

/// The EUI-64 of a MAC address, as RoCE forms a GUID.
pub(crate) fn guid(mac: [u8; 6]) -> [u8; 8] {
    let [oui @ .., m3, m4, m5] = mac;
    [oui[0] ^ 2, oui[1], oui[2], 0xff, 0xfe, m3, m4, m5]
}

/// Page sizes of a fast registration, bit n for 2^n bytes: 4 KiB to 2 GiB.
const PAGE_SIZES: u64 = 0xffff_f000;

/// The bytes of a page of which `shift` is the binary logarithm, if there are pages of that size.
pub(crate) fn page_size(shift: u8) -> Option<u64> {
    let size = 1_u64.checked_shl(shift.into())?;
    (size & PAGE_SIZES != 0).then_some(size)
}

/// The configuration space.
pub(crate) fn config_space(
    limits: &Limits,
    rings: bool,
    mac: Option<[u8; 6]>,
    node: [u8; 6],
) -> [u8; 256] {
    let mut config = virtio_rdma_config::new_zeroed();
    let rd_atomic = u32::from(limits.max_rd_atomic);
    let sge = MAX_SGE as u32;
    config.phys_port_cnt = 1;
    config.sys_image_guid = u64::from_ne_bytes(guid(node));
    config.vendor_id = VENDOR_ID;
    config.vendor_part_id = VENDOR_PART_ID;
    config.hw_ver = 1;
    config.max_mr_size = limits.max_mr_size;
    config.page_size_cap = PAGE_SIZES;
    config.max_qp = limits.max_qp.into();
    config.max_qp_wr = limits.wq_size.into();
    config.device_cap_flags = u64::from(
        VIRTIO_RDMA_CAP_BAD_PKEY_CNTR
            | VIRTIO_RDMA_CAP_BAD_QKEY_CNTR
            | VIRTIO_RDMA_CAP_SYS_IMAGE_GUID
            | VIRTIO_RDMA_CAP_RC_RNR_NAK_GEN
            | VIRTIO_RDMA_CAP_MEM_MGT_EXTENSIONS
            | VIRTIO_RDMA_CAP_BLOCK_MCAST_LOOPBACK,
    );
    config.max_send_sge = sge;
    config.max_recv_sge = sge;
    config.max_sge_rd = sge;
    config.max_cq = limits.max_cq.into();
    config.max_cqe = limits.cq_size.into();
    config.max_mr = limits.max_mr;
    config.max_pd = limits.max_pd;
    config.max_qp_rd_atom = rd_atomic;
    let qps = if rings { limits.max_qp.max(limits.ring_qp) } else { limits.max_qp };
    config.max_res_rd_atom = rd_atomic * u32::from(qps);
    config.max_qp_init_rd_atom = rd_atomic;
    config.atomic_cap = VIRTIO_RDMA_ATOMIC_GLOB as u8;
    config.max_mcast_grp = limits.max_mcast_grp;
    config.max_mcast_qp_attach = limits.max_mcast_qp_attach;
    config.max_total_mcast_qp_attach = limits.max_mcast_attach;
    config.max_ah = limits.max_ah;
    config.max_fast_reg_page_list_len = MAX_FAST_REG_PAGES as u32;
    config.max_pkeys = 1;
    config.local_ca_ack_delay = 15;
    config.features = features(mac, rings);
    config.mac = mac.unwrap_or_default();
    if rings {
        config.device_cap_flags |= u64::from(VIRTIO_RDMA_CAP_SRQ_RESIZE | VIRTIO_RDMA_CAP_XRC);
        config.num_comp_vectors = limits.comp_vectors.into();
        config.ring_max_qp = limits.ring_qp.into();
        config.ring_max_cq = limits.ring_cq.into();
        config.ring_max_qp_wr = limits.ring_wr;
        config.ring_max_cqe = limits.ring_cqe;
        config.ring_max_inline_data = limits.inline_data.into();
        config.device_cap_flags |=
            u64::from(VIRTIO_RDMA_CAP_MEM_WINDOW | VIRTIO_RDMA_CAP_MEM_WINDOW_TYPE_2B)
                | VIRTIO_RDMA_CAP_FLUSH_GLOBAL
                | VIRTIO_RDMA_CAP_ATOMIC_WRITE;
        config.max_mw = limits.max_mw;
        config.max_srq = limits.max_srq.into();
        config.max_srq_wr = limits.ring_wr;
        config.max_srq_sge = sge;
    }
    transmute!(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queues(layout: Layout) -> Vec<Queue> {
        assert_eq!(layout.queue(layout.count()), None);
        (0..layout.count()).map(|i| layout.queue(i).unwrap()).collect()
    }

    #[test]
    fn layouts_name_each_queue_once() {
        assert_eq!(
            queues(Layout::Virtqueues { cqs: 3, qps: 2 }),
            [
                Queue::Control,
                Queue::Completion(0),
                Queue::Completion(1),
                Queue::Completion(2),
                Queue::Send(0),
                Queue::Receive(0),
                Queue::Send(1),
                Queue::Receive(1),
                Queue::Event
            ]
        );
        assert_eq!(
            queues(Layout::Rings { vectors: 2 }),
            [
                Queue::Control,
                Queue::CompletionEvents(0),
                Queue::CompletionEvents(1),
                Queue::Doorbell,
                Queue::Event
            ]
        );
    }

    #[test]
    fn every_queue_has_a_number_of_its_own() {
        let limits = Limits { comp_vectors: MAX_VECTORS, ..Limits::default() };
        let jobs = Jobs::new(&limits);
        for number in 0..jobs.count() {
            assert_eq!(jobs.number(jobs.queue(number).unwrap()), number);
        }
        assert_eq!(jobs.queue(jobs.count()), None);
        assert_eq!(jobs.queue(jobs.count() - 1), Some(Queue::Srq(8191)));
    }

    #[test]
    fn limits_fit_the_transports() {
        for (limits, queues) in [(Limits::default(), 256), (Limits::for_64_queues(), 64)] {
            assert_eq!(Layout::new(&limits, false).count(), queues);
            assert!(Layout::new(&limits, true).count() <= queues);
        }
    }

    #[test]
    fn guid_is_the_eui64_of_the_mac() {
        assert_eq!(
            guid([0x52, 0x54, 0, 0x12, 0x34, 1]),
            [0x50, 0x54, 0, 0xff, 0xfe, 0x12, 0x34, 1]
        );
    }
}
