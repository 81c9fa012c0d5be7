// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! A device for tests: the other side of the rings, as the specification has
//! it, in as few lines as possible.

use crate::{
    bindings::*,
    cq::Cq,
    cq_ring::CqRing,
    object::Owned,
    qp_table::QpTable,
    ring::{Ring, RingRegion},
};
use std::{
    mem::{MaybeUninit, offset_of},
    ptr, slice,
    sync::atomic::*,
};

/// Polls a ring for at most `room` completions. Returns them.
pub fn poll(ring: &mut CqRing, table: &QpTable, room: usize) -> Vec<ibv_wc> {
    let mut entries = vec![MaybeUninit::uninit(); room];
    let polled = ring.poll(move |cqe| table.complete(cqe), &mut entries);
    // SAFETY: the first `polled` entries were written.
    entries.iter().take(polled).map(|wc| unsafe { wc.assume_init() }).collect()
}

/// Returns immediate data or the key of a completion.
pub fn ex(wc: &ibv_wc) -> u32 {
    // SAFETY: both are integers.
    unsafe { wc.__bindgen_anon_1.imm_data }
}

/// The memory of a region, as the device uses it.
#[derive(Clone, Copy)]
pub struct Memory(*mut u8);

// SAFETY: the device is another thread, if not another process.
unsafe impl Send for Memory {}

impl Memory {
    /// Returns the memory of a region.
    pub fn new(region: &RingRegion) -> Self {
        Self::at(region.addr())
    }

    /// Returns the memory of the region at the address that the driver was told.
    pub fn at(addr: u64) -> Self {
        Self(ptr::with_exposed_provenance_mut(addr as usize))
    }

    /// Returns a word of the head or of an entry.
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: the tests name words of live regions.
        unsafe { AtomicU32::from_ptr(self.0.add(offset).cast()) }
    }

    /// Copies a structure out of an entry.
    pub fn read<T: Copy>(&self, ring: Ring, index: u32, offset: usize) -> T {
        let at = self.entry(ring, index) + offset;
        // SAFETY: the tests name entries of live regions.
        unsafe { self.0.add(at).cast::<T>().read_unaligned() }
    }

    /// Copies bytes out of an entry.
    pub fn bytes(&self, ring: Ring, index: u32, offset: usize, len: usize) -> Vec<u8> {
        // SAFETY: the tests name entries of live regions.
        unsafe { slice::from_raw_parts(self.0.add(self.entry(ring, index) + offset), len).to_vec() }
    }

    fn entry(&self, ring: Ring, index: u32) -> usize {
        ring.offset() as usize + (index % ring.depth()) as usize * ring.stride()
    }
}

/// The device's side of a CQ.
pub struct Completer {
    memory: Memory,
    depth: u32,
    /// The number of CQEs that were written.
    pub producer: u32,
    /// The arming words at the last event.
    armed: (u32, u32),
}

impl Completer {
    /// Returns the device's side of a ring.
    pub fn new(ring: &CqRing) -> Self {
        let request = ring.request();
        let memory = Memory::at(request.buf_addr);
        Self { memory, depth: ring.depth(), producer: 0, armed: (0, 0) }
    }

    /// Returns the device's side of the ring of a CQ.
    pub fn of(cq: &Owned<Cq>) -> Self {
        Self::new(cq.as_ref().private().state().lock().ring().unwrap())
    }

    /// Writes a CQE, if there is room. Returns whether there was.
    pub fn complete(&mut self, cqe: virtio_rdma_ring_cqe) -> bool {
        let consumer = self.memory.word(offset_of!(virtio_rdma_cq_ring, consumer));
        if self.producer.wrapping_sub(consumer.load(Ordering::Acquire)) >= self.depth {
            return false;
        }
        let offset = 128 + (self.producer % self.depth) as usize * 64;
        let lap = offset_of!(virtio_rdma_ring_cqe, lap);
        // SAFETY: the entry is in the region, and the device's to write; its
        // last word is written last.
        unsafe { ptr::copy((&raw const cqe).cast(), self.memory.0.add(offset), lap) };
        self.memory
            .word(offset + lap)
            .store((self.producer / self.depth).wrapping_add(1), Ordering::Release);
        self.producer = self.producer.wrapping_add(1);
        true
    }

    /// Writes the CQE of a work request, which is made to look as if it was posted.
    pub fn complete_posted(&mut self, table: &QpTable, cqe: virtio_rdma_ring_cqe) -> bool {
        if let Some(progress) = table.get(cqe.qp_num) {
            progress.expect(&cqe);
        }
        self.complete(cqe)
    }

    /// Returns whether the CQEs since the last call raise an event.
    pub fn event(&mut self, solicited: bool) -> bool {
        fence(Ordering::SeqCst);
        let next = self.memory.word(offset_of!(virtio_rdma_cq_ring, arm_next));
        let arm = self.memory.word(offset_of!(virtio_rdma_cq_ring, arm_solicited));
        let now = (next.load(Ordering::Relaxed), arm.load(Ordering::Relaxed));
        let event = now.0 != self.armed.0 || (solicited && now.1 != self.armed.1);
        if event {
            self.armed = now;
        }
        event
    }

    /// Closes the ring, as the driver does when the device is gone.
    pub fn close(&self) {
        self.memory.word(offset_of!(virtio_rdma_cq_ring, closed)).store(1, Ordering::Relaxed);
    }

    /// Moves the CQEs that the program has not taken to another ring, as RESIZE_CQ does. Returns
    /// whether they fit there.
    pub fn move_to(&self, new: &mut Self) -> bool {
        let consumer = self.consumer();
        let held = self.producer.wrapping_sub(consumer);
        for index in 0..held.min(new.depth) {
            let offset = 128 + (consumer.wrapping_add(index) % self.depth) as usize * 64;
            // SAFETY: the entry is in the region, and this side wrote it.
            let cqe = unsafe { self.memory.0.add(offset).cast::<virtio_rdma_ring_cqe>().read() };
            assert!(new.complete(cqe));
        }
        held <= new.depth
    }

    /// Returns how many CQEs the program took.
    pub fn consumer(&self) -> u32 {
        self.memory.word(offset_of!(virtio_rdma_cq_ring, consumer)).load(Ordering::Acquire)
    }
}

/// Keeps this thread on the n-th of the processors that it may use, if there are as many.
pub fn pin(n: usize) {
    unsafe extern "C" {
        fn sched_getaffinity(pid: i32, size: usize, mask: *mut [u64; 16]) -> i32;
        fn sched_setaffinity(pid: i32, size: usize, mask: *const [u64; 16]) -> i32;
    }
    let mut mask = [0u64; 16];
    // SAFETY: the mask has as many bytes.
    unsafe { sched_getaffinity(0, size_of_val(&mask), &mut mask) };
    let mut cpus = (0..1024usize).filter(|cpu| mask[cpu / 64] >> (cpu % 64) & 1 != 0);
    if let Some(cpu) = cpus.nth(n) {
        let mut one = [0u64; 16];
        one[cpu / 64] = 1 << (cpu % 64);
        // SAFETY: the mask has as many bytes.
        unsafe { sched_setaffinity(0, size_of_val(&one), &one) };
    }
}
