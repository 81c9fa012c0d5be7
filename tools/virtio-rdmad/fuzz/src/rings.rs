// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The rings of QPs and CQs, as their owner writes and reads them (specification, Rings).

use std::mem::offset_of;

use abi::{
    virtio_rdma_cmd_create_qp, virtio_rdma_cmd_create_ring_cq, virtio_rdma_cmd_create_ring_qp,
    virtio_rdma_cmd_create_srq, virtio_rdma_cmd_resize_cq, virtio_rdma_ring_cqe,
    virtio_rdma_ring_region, virtio_rdma_ring_shape, virtio_rdma_srq_ring,
};
use testkit::command::{self, shape};
use testkit::{doorbell, CqRing, Memory, QpRings, ARM, CQE, CQ_HEAD, PAGE, WAKE};
use zerocopy::IntoBytes;

use crate::guest::{Guest, INLINE, VECTORS};

/// The pages for rings, one for each object.
pub const RING_PAGES: [u64; 4] = [0x2000, 0x3000, 0x5000, 0x6000];
/// The number of entries of a send or receive ring.
pub const DEPTH: u32 = 8;
/// The bytes of an entry of the send ring and of the receive ring.
const STRIDES: [u32; 2] = [256, 128];
/// The offsets of the send ring and of the receive ring in their page.
const OFFSETS: [u32; 2] = [256, 256 + DEPTH * 256];

/// Returns the shapes of the send ring and of the receive ring.
fn shapes() -> [virtio_rdma_ring_shape; 2] {
    [0, 1].map(|ring| shape(DEPTH, STRIDES[ring], OFFSETS[ring]))
}

/// The offsets of the words that the device writes into the head of an SRQ.
const SRQ_WORDS: [u64; 2] = [
    offset_of!(virtio_rdma_srq_ring, consumer) as u64,
    offset_of!(virtio_rdma_srq_ring, wake) as u64,
];

impl Guest {
    /// Fills a page with zeros, and returns the region that consists of it.
    fn region(&mut self, page: u64) -> virtio_rdma_ring_region {
        self.memory.write_bytes(page, &[0; PAGE as usize]);
        command::region(self.place(page.as_bytes()), 1)
    }

    /// Returns the request for a CQ of `cqe` entries on a page. The device may then write CQEs there.
    pub fn ring_cq_request(&mut self, page: u64, cqe: u32) -> virtio_rdma_cmd_create_ring_cq {
        let region = self.region(page);
        self.memory.open(page + CQ_HEAD, u64::from(cqe) * CQE);
        virtio_rdma_cmd_create_ring_cq { region, cqe, comp_vector: 1 }
    }

    /// Returns the request that moves a CQ to another page. The device may then also write arming words
    /// there.
    pub fn resize_request(&mut self, page: u64, cqe: u32, cqn: u32) -> virtio_rdma_cmd_resize_cq {
        let virtio_rdma_cmd_create_ring_cq { region, cqe, .. } = self.ring_cq_request(page, cqe);
        for at in ARM {
            self.memory.open(page + at, 4);
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
            self.memory.open(page + at, 4);
        }
        (base.max_send_wr, base.max_recv_wr, base.max_inline_data) = (DEPTH, DEPTH, INLINE);
        command::create_ring_qp(base, region, shapes())
    }

    /// Returns the request for an SRQ on a page. The device may then write the consumer index and the
    /// wake word there.
    pub fn srq_request(&mut self, page: u64, pdn: u32) -> virtio_rdma_cmd_create_srq {
        let region = self.region(page);
        for at in SRQ_WORDS {
            self.memory.open(page + at, 4);
        }
        command::create_srq(pdn, region, shape(DEPTH, STRIDES[1], 256))
    }

    /// Notes that the CQ of this number has its ring on this page.
    pub fn has_cq_ring(&mut self, cqn: u32, page: u64, depth: u32) {
        self.cq_rings.insert(cqn, CqRing::new(page, depth, 1));
    }

    /// Notes that the CQ moved to another page.
    pub fn moved_cq_ring(&mut self, cqn: u32, page: u64, depth: u32) {
        if let Some(ring) = self.cq_rings.get_mut(&cqn) {
            ring.moved(page, depth);
        }
    }

    /// Notes that the QP of this number has its rings on this page.
    pub fn has_qp_rings(&mut self, qpn: u32, page: u64) {
        self.qp_rings.insert(qpn, QpRings::new(page, shapes()));
    }

    /// Makes both rings start again at entry 0, after RESET.
    pub fn reset_qp_rings(&mut self, qpn: u32) {
        let Some(rings) = self.qp_rings.get_mut(&qpn) else { return };
        rings.restart(&self.memory);
    }

    /// Writes an entry of a QP's ring, shows it to the device, and returns its index. Bytes that do not
    /// fit into the entry are left out.
    pub fn post_entry(&mut self, qpn: u32, ring: u32, bytes: &[u8]) -> Option<u32> {
        let rings = self.qp_rings.get_mut(&qpn)?;
        let len = bytes.len().min(STRIDES[ring as usize] as usize);
        let index = rings.write(&self.memory, ring, &bytes[..len]);
        if rings.must_ring(&self.memory, ring) {
            self.ring_doorbell(&doorbell(qpn, ring));
        }
        Some(index)
    }

    /// Asks for an event for the next CQE, or for the next solicited one.
    pub fn arm_cq(&mut self, cqn: u32, solicited: bool) {
        if let Some(ring) = self.cq_rings.get_mut(&cqn) {
            ring.arm(&self.memory, solicited);
        }
    }

    /// Takes completion events. A CQ may have at most one for each time that it was armed.
    pub fn take_events_of_cqs(&mut self) {
        for index in 1..=VECTORS {
            for cqn in self.take_completion_events(index) {
                let Some(ring) = self.cq_rings.get_mut(&cqn) else { continue };
                ring.events += 1;
                assert_eq!(ring.vector, index - 1, "the vector of CQ {cqn}");
                assert!(ring.events <= ring.asked, "an event that CQ {cqn} did not ask for");
            }
        }
    }

    /// Takes the CQEs out of a ring.
    pub fn poll_ring(&mut self, cqn: u32) -> Vec<virtio_rdma_ring_cqe> {
        let Some(ring) = self.cq_rings.get_mut(&cqn) else { return Vec::new() };
        // The owner may have overwritten CQEs, so the loop has a bound.
        let cqes = (0..ring.depth).map_while(|_| ring.take(&self.memory)).collect();
        ring.release(&self.memory);
        cqes
    }
}
