// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The rings of QPs and CQs, as their owner writes and reads them (specification, chapter 13).

use std::mem::offset_of;

use abi::{
    virtio_rdma_cmd_create_qp, virtio_rdma_cmd_create_ring_cq, virtio_rdma_cmd_create_ring_qp,
    virtio_rdma_cmd_create_srq, virtio_rdma_cmd_resize_cq, virtio_rdma_cq_ring,
    virtio_rdma_doorbell, virtio_rdma_qp_ring, virtio_rdma_ring_cqe, virtio_rdma_ring_region,
    virtio_rdma_ring_shape, virtio_rdma_srq_ring, VIRTIO_RDMA_QP_PRIVILEGED,
};
use zerocopy::{FromZeros, IntoBytes};

use crate::guest::{Guest, VECTORS};
use crate::owner::{CqRing, QpRings, INLINE};

/// The pages for rings, one for each object.
pub const RING_PAGES: [u64; 4] = [0x2000, 0x3000, 0x5000, 0x6000];
/// The number of entries of a send or receive ring.
pub const DEPTH: u32 = 8;
/// The bytes of an entry of the send ring and of the receive ring.
const STRIDES: [u32; 2] = [256, 128];
/// The offsets of the send ring and of the receive ring in their page.
const OFFSETS: [u32; 2] = [256, 256 + DEPTH * 256];
const PAGE: u64 = 0x1000;

const CQ_HEAD: u64 = size_of::<virtio_rdma_cq_ring>() as u64;
const CQE: u64 = size_of::<virtio_rdma_ring_cqe>() as u64;
const ARM: [usize; 2] =
    [offset_of!(virtio_rdma_cq_ring, arm_next), offset_of!(virtio_rdma_cq_ring, arm_solicited)];
const PRODUCER: [usize; 2] =
    [offset_of!(virtio_rdma_qp_ring, sq_producer), offset_of!(virtio_rdma_qp_ring, rq_producer)];
const WAKE: [usize; 2] =
    [offset_of!(virtio_rdma_qp_ring, sq_wake), offset_of!(virtio_rdma_qp_ring, rq_wake)];

/// The offsets of the words that the device writes into the head of an SRQ.
const SRQ_WORDS: [usize; 2] =
    [offset_of!(virtio_rdma_srq_ring, consumer), offset_of!(virtio_rdma_srq_ring, wake)];

impl Guest {
    /// Fills a page with zeros, and returns the region that consists of it.
    fn region(&mut self, page: u64) -> virtio_rdma_ring_region {
        self.store(page, &[0; PAGE as usize]);
        let pages = self.place(page.as_bytes());
        virtio_rdma_ring_region { pages, npages: 1, reserved_0c: 0 }
    }

    /// Returns the request for a CQ of `cqe` entries on a page. The device may then write CQEs there.
    pub fn ring_cq_request(&mut self, page: u64, cqe: u32) -> virtio_rdma_cmd_create_ring_cq {
        let region = self.region(page);
        self.open(page + CQ_HEAD, u64::from(cqe) * CQE);
        virtio_rdma_cmd_create_ring_cq { region, cqe, comp_vector: 1 }
    }

    /// Returns the request that moves a CQ to another page. The device may then also write arming words
    /// there.
    pub fn resize_request(&mut self, page: u64, cqe: u32, cqn: u32) -> virtio_rdma_cmd_resize_cq {
        let virtio_rdma_cmd_create_ring_cq { region, cqe, .. } = self.ring_cq_request(page, cqe);
        for at in ARM {
            self.open(page + at as u64, 4);
        }
        virtio_rdma_cmd_resize_cq { region, cqe, cqn }
    }

    /// Returns the request for a QP with rings on a page. The device may then write its wake words there.
    pub fn ring_qp_request(
        &mut self,
        page: u64,
        mut base: virtio_rdma_cmd_create_qp,
    ) -> virtio_rdma_cmd_create_ring_qp {
        let region = self.region(page);
        for at in WAKE {
            self.open(page + at as u64, 4);
        }
        (base.max_send_wr, base.max_recv_wr, base.max_inline_data) = (DEPTH, DEPTH, INLINE);
        let shape = |ring: usize| virtio_rdma_ring_shape {
            depth: DEPTH,
            stride: STRIDES[ring],
            offset: OFFSETS[ring],
            reserved_0c: 0,
        };
        let (sq, rq) = (shape(0), shape(1));
        let mut request = virtio_rdma_cmd_create_ring_qp::new_zeroed();
        (request.base, request.flags) = (base, VIRTIO_RDMA_QP_PRIVILEGED);
        (request.region, request.sq, request.rq) = (region, sq, rq);
        request
    }

    /// Returns the request for an SRQ on a page. The device may then write the consumer index and the
    /// wake word there.
    pub fn srq_request(&mut self, page: u64, pdn: u32) -> virtio_rdma_cmd_create_srq {
        let mut request = virtio_rdma_cmd_create_srq::new_zeroed();
        request.region = self.region(page);
        for at in SRQ_WORDS {
            self.open(page + at as u64, 4);
        }
        (request.ring.depth, request.ring.stride, request.ring.offset) = (DEPTH, STRIDES[1], 256);
        (request.pdn, request.max_sge) = (pdn, 4);
        request
    }

    /// Notes that the CQ of this number has its ring on this page.
    pub fn has_cq_ring(&mut self, cqn: u32, page: u64, depth: u32) {
        let (asked, told, vector) = (0, 0, 1);
        let ring = CqRing { page, depth, consumer: 0, arms: [0; 2], vector, asked, told };
        self.cq_rings.insert(cqn, ring);
    }

    /// Notes that the CQ moved to another page.
    pub fn moved_cq_ring(&mut self, cqn: u32, page: u64, depth: u32) {
        if let Some(ring) = self.cq_rings.get_mut(&cqn) {
            (ring.page, ring.depth, ring.consumer) = (page, depth, 0);
        }
    }

    /// Notes that the QP of this number has its rings on this page.
    pub fn has_qp_rings(&mut self, qpn: u32, page: u64) {
        self.qp_rings.insert(qpn, QpRings { page, producers: [0; 2] });
    }

    /// Makes both rings start again at entry 0, after RESET.
    pub fn reset_qp_rings(&mut self, qpn: u32) {
        let Some(rings) = self.qp_rings.get_mut(&qpn) else { return };
        rings.producers = [0; 2];
        let page = rings.page;
        for at in PRODUCER {
            self.store(page + at as u64, &[0; 4]);
        }
    }

    /// Writes an entry of a QP's ring, shows it to the device, and returns its index. Bytes that do not
    /// fit into the entry are left out.
    pub fn post_entry(&mut self, qpn: u32, ring: usize, bytes: &[u8]) -> Option<u32> {
        let rings = self.qp_rings.get_mut(&qpn)?;
        let (page, index) = (rings.page, rings.producers[ring]);
        rings.producers[ring] = index.wrapping_add(1);
        let stride = STRIDES[ring];
        let at = page + u64::from(OFFSETS[ring] + index % DEPTH * stride);
        self.store(at, &bytes[..bytes.len().min(stride as usize)]);
        let producer = index.wrapping_add(1);
        self.store(page + PRODUCER[ring] as u64, producer.as_bytes());
        let wake: u32 = self.memory.read_obj(page + WAKE[ring] as u64).expect("a head in memory");
        if wake != 0 {
            let bell = virtio_rdma_doorbell { number: qpn, queue: ring as u32 };
            self.ring_doorbell(bell.as_bytes());
        }
        Some(index)
    }

    /// Asks for an event for the next CQE, or for the next solicited one.
    pub fn arm_cq(&mut self, cqn: u32, solicited: bool) {
        let Some(ring) = self.cq_rings.get_mut(&cqn) else { return };
        let which = usize::from(solicited);
        ring.arms[which] = ring.arms[which].wrapping_add(1);
        ring.asked += 1;
        let (at, arm) = (ring.page + ARM[which] as u64, ring.arms[which]);
        self.store(at, arm.as_bytes());
    }

    /// Takes completion events. A CQ may have at most one for each time that it was armed.
    pub fn take_events_of_cqs(&mut self) {
        for index in 1..=VECTORS {
            for cqn in self.take_completion_events(index) {
                let Some(ring) = self.cq_rings.get_mut(&cqn) else { continue };
                ring.told += 1;
                assert_eq!(ring.vector, index - 1, "the vector of CQ {cqn}");
                assert!(ring.told <= ring.asked, "an event that CQ {cqn} did not ask for");
            }
        }
    }

    /// Takes the CQEs out of a ring.
    pub fn poll_ring(&mut self, cqn: u32) -> Vec<virtio_rdma_ring_cqe> {
        let Some(ring) = self.cq_rings.get(&cqn) else { return Vec::new() };
        let (page, depth, first) = (ring.page, ring.depth, ring.consumer);
        let mut cqes = Vec::new();
        // The owner may have overwritten CQEs, so the loop has a bound.
        for ahead in 0..depth {
            let index = first.wrapping_add(ahead);
            let at = page + CQ_HEAD + u64::from(index % depth) * CQE;
            let cqe: virtio_rdma_ring_cqe = self.memory.read_obj(at).expect("a CQE in memory");
            if cqe.lap != index / depth + 1 {
                break;
            }
            cqes.push(cqe);
        }
        let consumer = first.wrapping_add(cqes.len() as u32);
        self.store(page, consumer.as_bytes());
        if let Some(ring) = self.cq_rings.get_mut(&cqn) {
            ring.consumer = consumer;
        }
        cqes
    }
}
