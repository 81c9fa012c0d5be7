// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Rings in guest memory, as the program or the driver that owns them writes and reads them (specification, Rings).

use std::mem::offset_of;
use std::sync::atomic::{fence, Ordering};

use abi::*;

use crate::memory::Memory;

/// The offsets of the words in the head of the rings of a QP: of the send ring, and of the receive ring.
pub const PRODUCER: [u64; 2] = [
    offset_of!(virtio_rdma_qp_ring, sq_producer) as u64,
    offset_of!(virtio_rdma_qp_ring, rq_producer) as u64,
];
/// The offsets of the wake words.
pub const WAKE: [u64; 2] = [
    offset_of!(virtio_rdma_qp_ring, sq_wake) as u64,
    offset_of!(virtio_rdma_qp_ring, rq_wake) as u64,
];
/// The offsets of the arming words in the head of the ring of a CQ: for the next CQE, and for the next solicited one.
pub const ARM: [u64; 2] = [
    offset_of!(virtio_rdma_cq_ring, arm_next) as u64,
    offset_of!(virtio_rdma_cq_ring, arm_solicited) as u64,
];
/// The bytes of the head of the ring of a CQ.
pub const CQ_HEAD: u64 = size_of::<virtio_rdma_cq_ring>() as u64;
/// The bytes of a CQE in a ring.
pub const CQE: u64 = size_of::<virtio_rdma_ring_cqe>() as u64;

/// Writes an entry of a work queue's ring, and then the producer index behind it, for the device to see.
fn write_entry(
    memory: &impl Memory,
    region: u64,
    shape: &virtio_rdma_ring_shape,
    (producer, at): (&mut u32, u64),
    bytes: &[u8],
) -> u32 {
    let index = *producer;
    let offset = shape.offset + index % shape.depth * shape.stride;
    memory.write_bytes(region + u64::from(offset), bytes);
    *producer = index.wrapping_add(1);
    fence(Ordering::Release);
    memory.put(region + at, producer);
    index
}

/// Returns whether the owner has to ring for what was written before. It clears the wake word then, as the driver and
/// the provider do, so that the device has to ask for the next doorbell itself.
fn must_ring(memory: &impl Memory, wake: u64) -> bool {
    fence(Ordering::SeqCst);
    let is_asleep = memory.get::<u32>(wake) != 0;
    if is_asleep {
        memory.put(wake, &0_u32);
    }
    is_asleep
}

/// The owner's side of the rings of a QP.
#[derive(Clone)]
pub struct QpRings {
    /// The address of the region that has them.
    pub region: u64,
    /// The shapes of the send ring and of the receive ring.
    pub shapes: [virtio_rdma_ring_shape; 2],
    /// The producer indices.
    pub producers: [u32; 2],
}

impl QpRings {
    /// Returns new rings.
    pub fn new(region: u64, shapes: [virtio_rdma_ring_shape; 2]) -> Self {
        Self { region, shapes, producers: [0; 2] }
    }

    /// Writes an entry of a ring, and returns its index.
    pub fn write(&mut self, memory: &impl Memory, queue: u32, bytes: &[u8]) -> u32 {
        let queue = queue as usize;
        let producer = (&mut self.producers[queue], PRODUCER[queue]);
        write_entry(memory, self.region, &self.shapes[queue], producer, bytes)
    }

    /// Returns whether the owner has to ring for a ring, once for each time that the device asks for it.
    pub fn must_ring(&self, memory: &impl Memory, queue: u32) -> bool {
        must_ring(memory, self.region + WAKE[queue as usize])
    }

    /// Makes both rings start again at entry 0, after RESET.
    pub fn restart(&mut self, memory: &impl Memory) {
        self.producers = [0; 2];
        for at in PRODUCER {
            memory.put(self.region + at, &0_u32);
        }
    }
}

/// The owner's side of the ring of an SRQ.
#[derive(Clone)]
pub struct SrqRing {
    /// The address of the region that has it.
    pub region: u64,
    /// The shape of the ring.
    pub shape: virtio_rdma_ring_shape,
    /// The producer index.
    pub producer: u32,
}

impl SrqRing {
    /// Writes an entry.
    pub fn write(&mut self, memory: &impl Memory, bytes: &[u8]) {
        let producer = (&mut self.producer, offset_of!(virtio_rdma_srq_ring, producer) as u64);
        write_entry(memory, self.region, &self.shape, producer, bytes);
    }

    /// Returns whether the owner has to ring, once for each time that the device asks for it.
    pub fn must_ring(&self, memory: &impl Memory) -> bool {
        must_ring(memory, self.region + offset_of!(virtio_rdma_srq_ring, wake) as u64)
    }

    /// Returns how many receives the device has taken by its own count.
    pub fn consumer(&self, memory: &impl Memory) -> u32 {
        memory.get(self.region + offset_of!(virtio_rdma_srq_ring, consumer) as u64)
    }
}

/// The owner's side of the ring of a CQ.
#[derive(Clone, Debug)]
pub struct CqRing {
    /// The address of the region that has it.
    pub region: u64,
    /// The number of entries.
    pub depth: u32,
    /// The consumer index.
    pub consumer: u32,
    /// The arming words: for the next CQE, and for the next solicited one.
    pub arms: [u32; 2],
    /// The completion vector.
    pub vector: u16,
    /// The number of times that the owner asked for an event.
    pub asked: u32,
    /// The number of events that the owner got.
    pub events: u32,
}

impl CqRing {
    /// Returns a new ring.
    pub fn new(region: u64, depth: u32, vector: u16) -> Self {
        Self { region, depth, consumer: 0, arms: [0; 2], vector, asked: 0, events: 0 }
    }

    /// Notes that the CQ moved to another ring. Returns the address of the one before.
    pub fn moved(&mut self, region: u64, depth: u32) -> u64 {
        (self.depth, self.consumer) = (depth, 0);
        std::mem::replace(&mut self.region, region)
    }

    /// Takes the next CQE. The device may use its place when [`Self::release`] was called.
    pub fn take(&mut self, memory: &impl Memory) -> Option<virtio_rdma_ring_cqe> {
        let at = self.region + CQ_HEAD + u64::from(self.consumer % self.depth) * CQE;
        let lap: u32 = memory.get(at + offset_of!(virtio_rdma_ring_cqe, lap) as u64);
        if lap != self.consumer / self.depth + 1 {
            return None;
        }
        fence(Ordering::Acquire);
        self.consumer = self.consumer.wrapping_add(1);
        Some(memory.get(at))
    }

    /// Gives the places of the CQEs that were taken back to the device.
    pub fn release(&self, memory: &impl Memory) {
        fence(Ordering::Release);
        let at = offset_of!(virtio_rdma_cq_ring, consumer) as u64;
        memory.put(self.region + at, &self.consumer);
    }

    /// Asks for an event at the next CQE, or at the next solicited one.
    pub fn arm(&mut self, memory: &impl Memory, is_solicited: bool) {
        let which = usize::from(is_solicited);
        self.arms[which] = self.arms[which].wrapping_add(1);
        self.asked += 1;
        memory.put(self.region + ARM[which], &self.arms[which]);
        fence(Ordering::SeqCst);
    }
}
