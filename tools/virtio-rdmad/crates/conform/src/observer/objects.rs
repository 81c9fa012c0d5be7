// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What an observer knows of the objects of a driver, and of their rings.

use std::collections::{BTreeMap, HashSet};
use std::mem::offset_of;
use std::sync::atomic::Ordering;
use std::time::Instant;

use abi::*;
use memory::GuestMemory;
use testkit::PAGE;

/// The most pages of a region that are looked at.
const PAGES: u64 = 1 << 14;

/// The pages of a region, as the table had them when the command came.
#[derive(Clone, Default)]
pub struct Region {
    /// The addresses of the pages.
    pub pages: Vec<u64>,
}

impl Region {
    /// Reads the table of a region, of which `len` bytes count. `None`: the table is not memory of the guest.
    pub fn read_table(
        memory: &GuestMemory,
        region: &virtio_rdma_ring_region,
        len: u64,
    ) -> Option<Self> {
        let count = len.div_ceil(PAGE).min(region.npages.into()).min(PAGES);
        let entry = |at: u64| memory.read_obj(region.pages.checked_add(at * 8)?).ok();
        Some(Self { pages: (0..count).map(entry).collect::<Option<_>>()? })
    }

    /// Copies bytes of the region. `None`: they are not there.
    pub fn read(&self, memory: &GuestMemory, at: u64, to: &mut [u8]) -> Option<()> {
        let mut at = at;
        let mut rest = to;
        while !rest.is_empty() {
            let page = self.pages.get(usize::try_from(at / PAGE).ok()?)?;
            let count = rest.len().min((PAGE - at % PAGE) as usize);
            let (now, later) = rest.split_at_mut(count);
            memory.read(page.checked_add(at % PAGE)?, now).ok()?;
            (at, rest) = (at + count as u64, later);
        }
        Some(())
    }

    /// Reads a word by one access.
    pub fn word(&self, memory: &GuestMemory, at: u64) -> Option<u32> {
        let page = self.pages.get(usize::try_from(at / PAGE).ok()?)?;
        let slice = memory.slice(page.checked_add(at % PAGE)?, 4).ok()?;
        slice.load_u32(0, Ordering::Acquire).ok()
    }

    /// Returns the first byte that is not zero among the first `len`, with its offset.
    pub fn first_dirty(&self, memory: &GuestMemory, len: u64) -> Option<(u64, u8)> {
        for (page, at) in self.pages.iter().zip((0..len).step_by(PAGE as usize)) {
            let mut bytes = vec![0; PAGE.min(len - at) as usize];
            memory.read(*page, &mut bytes).ok()?;
            if let Some(index) = bytes.iter().position(|byte| *byte != 0) {
                return Some((at + index as u64, bytes[index]));
            }
        }
        None
    }
}

/// A ring of work requests, as its owner has filled it.
#[derive(Clone)]
pub struct Ring {
    /// The shape.
    pub shape: virtio_rdma_ring_shape,
    /// The offset of the producer in the head.
    pub producer: u64,
    /// The offset of the wake word.
    pub wake: u64,
    /// The most work requests that may be outstanding.
    pub most: u32,
    /// The producer at the last look.
    pub seen: u32,
    /// The index behind the last work request that the device has completed; `None` where it was not seen.
    pub completed: Option<u32>,
    /// The producer when the device did not look at the ring any more and asked for a doorbell.
    pub asleep: Option<u32>,
    /// When a doorbell must have come.
    pub due: Option<Instant>,
    /// Whether the owner is to write 0 to the producer, because of a RESET.
    pub is_to_restart: bool,
    /// Whether the owner is to go on behind `seen`, because of a RESIZE.
    pub is_resumed: bool,
}

impl Ring {
    fn new(shape: virtio_rdma_ring_shape, producer: usize, wake: usize, most: u32) -> Self {
        Self {
            shape,
            producer: producer as u64,
            wake: wake as u64,
            most,
            seen: 0,
            completed: Some(0),
            asleep: None,
            due: None,
            is_to_restart: false,
            is_resumed: false,
        }
    }
}

/// A QP.
#[derive(Clone)]
pub struct Qp {
    /// The type.
    pub kind: u32,
    /// The state to which the driver has led it.
    pub state: u32,
    /// Whether the driver has led it back to RESET.
    pub was_reset: bool,
    /// Where its rings are.
    pub region: Region,
    /// The send ring and the receive ring.
    pub rings: [Option<Ring>; 2],
    /// Its CQs.
    pub cqns: [u32; 2],
}

impl Qp {
    /// Returns the QP that a request has made.
    pub fn new(request: &virtio_rdma_cmd_create_ring_qp, region: Region) -> Self {
        type Head = virtio_rdma_qp_ring;
        let base = &request.base;
        let has_rings = u32::from(base.qp_type) != VIRTIO_RDMA_QPT_XRC_TGT;
        let [sp, rp] = [offset_of!(Head, sq_producer), offset_of!(Head, rq_producer)];
        let [sw, rw] = [offset_of!(Head, sq_wake), offset_of!(Head, rq_wake)];
        let sq = Ring::new(request.sq, sp, sw, base.max_send_wr);
        let rq = Ring::new(request.rq, rp, rw, base.max_recv_wr);
        let of = |ring: Ring| (has_rings && ring.shape.depth != 0).then_some(ring);
        Self {
            kind: base.qp_type.into(),
            state: VIRTIO_RDMA_QPS_RESET,
            was_reset: false,
            region,
            rings: [of(sq), of(rq)],
            cqns: [base.send_cqn, base.recv_cqn],
        }
    }
}

/// An SRQ.
#[derive(Clone)]
pub struct Srq {
    /// Where its ring is.
    pub region: Region,
    /// The ring.
    pub ring: Ring,
}

impl Srq {
    /// Returns an SRQ with this ring.
    pub fn new(shape: virtio_rdma_ring_shape, region: Region) -> Self {
        type Head = virtio_rdma_srq_ring;
        let (producer, wake) = (offset_of!(Head, producer), offset_of!(Head, wake));
        Self { region, ring: Ring::new(shape, producer, wake, shape.depth) }
    }
}

/// A CQ.
#[derive(Clone)]
pub struct Cq {
    /// Where its ring is.
    pub region: Region,
    /// The number of entries.
    pub depth: u32,
    /// The number of CQEs that the device has written to the ring.
    pub produced: u32,
    /// The consumer at the last look.
    pub consumer: u32,
}

/// The objects of a driver.
#[derive(Clone, Default)]
pub struct Objects {
    /// The QPs that have rings.
    pub qps: BTreeMap<u32, Qp>,
    /// The CQs that have rings.
    pub cqs: BTreeMap<u32, Cq>,
    /// The SRQs.
    pub srqs: BTreeMap<u32, Srq>,
    /// The MRs: their first page and their last one, if the page table has no levels and the MR has bytes.
    pub mrs: BTreeMap<u32, [u64; 2]>,
}

impl Objects {
    /// Returns all regions.
    pub fn regions(&self) -> impl Iterator<Item = &Region> {
        let regions = self.qps.values().map(|qp| &qp.region);
        let regions = regions.chain(self.cqs.values().map(|cq| &cq.region));
        regions.chain(self.srqs.values().map(|srq| &srq.region))
    }

    /// Returns whether one of these pages is one of a region that is in use.
    pub fn uses(&self, pages: &[u64]) -> bool {
        let pages: HashSet<u64> = pages.iter().copied().collect();
        self.regions().any(|region| region.pages.iter().any(|page| pages.contains(page)))
    }

    /// Returns the ring that a doorbell names.
    pub fn ring(&mut self, queue: u32, number: u32) -> Option<&mut Ring> {
        match queue {
            VIRTIO_RDMA_DOORBELL_SRQ => Some(&mut self.srqs.get_mut(&number)?.ring),
            _ => self.qps.get_mut(&number)?.rings.get_mut(queue as usize)?.as_mut(),
        }
    }
}
