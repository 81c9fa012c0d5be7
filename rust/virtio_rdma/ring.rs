// SPDX-License-Identifier: GPL-2.0

//! Rings in guest memory: their layout, and the producer and the consumer that
//! the kernel is for its own QPs and CQs (specification, Rings).
//!
//! The device reads and writes this memory as it likes. The kernel keeps every
//! index itself and never reads one back.

#![deny(unsafe_code)]

use crate::{
    bindings,
    dma::{
        Pages,
        PAGE_SIZE, //
    },
    ib::QpType,
    trace::refuse,
    wire, //
};
use core::mem::offset_of;
use kernel::{
    bitmap::BitmapVec,
    page,
    prelude::*,
    sync::Arc,
    transmute::AsBytes, //
};

/// Bytes of the smallest entry of a work queue, and of the largest.
const MIN_STRIDE: u32 = 32;
const MAX_STRIDE: u32 = PAGE_SIZE as u32;

/// Bytes of the head of a QP's region.
const QP_HEAD: u32 = size_of::<wire::QpRing>() as u32;

/// Bytes of the head of an SRQ's region.
const SRQ_HEAD: u32 = size_of::<wire::SrqRing>() as u32;

/// Bytes of the head of a CQ's region, and of a CQE.
const CQ_HEAD: usize = size_of::<wire::CqRing>();
const CQE_SIZE: usize = size_of::<wire::RingCqe>();

/// The most bytes of a region that a program may give: enough for the largest rings, and no more than a page table
/// of 2 MiB can list.
const MAX_REGION: u64 = 1 << 30;

/// The most bytes of inline data that the largest entry has room for.
pub(crate) const MAX_INLINE_DATA: u32 = MAX_STRIDE - size_of::<wire::RingUdWqe>() as u32;

/// Returns whether a program's buffer may be a region: whole pages of the kernel, which may be larger than those of
/// the device, and not too many of them.
pub(crate) fn is_region(addr: u64, len: u64) -> bool {
    is_region_of(addr, len, page::PAGE_SIZE as u64)
}

/// Returns whether a buffer may be a region where the kernel's pages have `page_size` bytes.
fn is_region_of(addr: u64, len: u64, page_size: u64) -> bool {
    addr % page_size == 0 && len % page_size == 0 && len <= MAX_REGION
}

/// Returns the bytes of an entry of a send ring.
pub(crate) fn send_entry_size(qp_type: QpType, max_sge: u32, max_inline_data: u32) -> u32 {
    let header = match qp_type {
        QpType::Ud | QpType::Gsi => size_of::<wire::RingUdWqe>(),
        QpType::XrcIni => size_of::<wire::RingXrcWqe>(),
        QpType::Rc | QpType::Uc | QpType::XrcTgt => size_of::<wire::RingSqWqe>(),
    };
    let payload = (max_sge * size_of::<wire::Sge>() as u32).max(max_inline_data);
    header as u32 + payload
}

/// Returns the bytes of an entry of a receive ring.
pub(crate) fn recv_entry_size(max_sge: u32) -> u32 {
    size_of::<wire::RqWqe>() as u32 + max_sge * size_of::<wire::Sge>() as u32
}

/// The place of a send or receive ring in the region of its QP, or of the ring of an SRQ in its own
/// region.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    /// Number of entries, a power of two, or 0 if there is no such ring.
    pub(crate) depth: u32,
    /// Bytes of an entry, a power of two.
    pub(crate) stride: u32,
    /// Offset of the first entry, a multiple of the stride.
    pub(crate) offset: u32,
}

impl Shape {
    /// Returns a ring that begins at the first multiple of its stride behind `offset`.
    fn at(offset: u32, depth: u32, entry_size: u32) -> Self {
        let stride = entry_size.next_power_of_two().max(MIN_STRIDE);
        Self {
            depth,
            stride,
            offset: offset.next_multiple_of(stride),
        }
    }

    /// Returns the ring of an SRQ.
    pub(crate) fn of_srq(depth: u32, max_sge: u32) -> Self {
        Self::at(SRQ_HEAD, depth, recv_entry_size(max_sge))
    }

    /// Returns the ring that a program asks for, if its entries are large enough.
    ///
    /// # Errors
    ///
    /// `EINVAL` for one that the device would refuse.
    pub(crate) fn of_program_srq(
        asked: &bindings::virtio_rdma_ureq_create_srq,
        max_sge: u32,
    ) -> Result<Self> {
        // The rings of QPs lie behind a head of the same size.
        const { assert!(SRQ_HEAD == QP_HEAD) };
        let shape = Self {
            depth: asked.depth,
            stride: asked.stride,
            offset: asked.offset,
        };
        if shape.depth == 0 || !shape.is_sound(recv_entry_size(max_sge), asked.buf_len) {
            let (depth, stride) = (shape.depth.into(), shape.stride.into());
            let reason = c"the depth (number) and the stride (limit) of a ring of an SRQ";
            return Err(refuse(EINVAL, reason, depth, stride));
        }
        Ok(shape)
    }

    /// Returns the offset behind the last entry.
    pub(crate) fn end(&self) -> u64 {
        u64::from(self.offset) + u64::from(self.depth) * u64::from(self.stride)
    }

    /// Returns whether the ring lies within `len` bytes and has entries of `entry_size` bytes.
    fn is_sound(&self, entry_size: u32, len: u64) -> bool {
        self.depth == 0
            || self.depth.is_power_of_two()
                && self.stride.is_power_of_two()
                && (MIN_STRIDE..=MAX_STRIDE).contains(&self.stride)
                && self.stride >= entry_size
                && self.offset % self.stride == 0
                && self.offset >= QP_HEAD
                && self.end() <= len
    }

    /// Returns the ring as a command has it.
    pub(crate) fn to_wire(self) -> bindings::virtio_rdma_ring_shape {
        bindings::virtio_rdma_ring_shape {
            depth: self.depth.to_le(),
            stride: self.stride.to_le(),
            offset: self.offset.to_le(),
            reserved_0c: 0,
        }
    }
}

/// The layout of a QP's region.
#[derive(Clone, Copy)]
pub(crate) struct QpLayout {
    /// The send ring.
    pub(crate) sq: Shape,
    /// The receive ring.
    pub(crate) rq: Shape,
}

impl QpLayout {
    /// Lays out rings of these depths and entry sizes, one behind the other.
    pub(crate) fn new(depths: (u32, u32), entry_sizes: (u32, u32)) -> Self {
        let sq = Shape::at(QP_HEAD, depths.0, entry_sizes.0);
        // The limits of the configuration keep this within 32 bits.
        let rq = Shape::at(sq.end() as u32, depths.1, entry_sizes.1);
        Self { sq, rq }
    }

    /// Returns the layout that a program asks for, if its entries are large enough.
    ///
    /// # Errors
    ///
    /// `EINVAL` for one that the device would refuse.
    pub(crate) fn of_program(
        asked: &bindings::virtio_rdma_ureq_create_qp,
        entry_sizes: (u32, u32),
    ) -> Result<Self> {
        let layout = Self {
            sq: Shape {
                depth: asked.sq_depth,
                stride: asked.sq_stride,
                offset: asked.sq_offset,
            },
            rq: Shape {
                depth: asked.rq_depth,
                stride: asked.rq_stride,
                offset: asked.rq_offset,
            },
        };
        if !layout.sq.is_sound(entry_sizes.0, asked.buf_len)
            || !layout.rq.is_sound(entry_sizes.1, asked.buf_len)
            || asked.buf_len < u64::from(QP_HEAD)
        {
            let reason = c"depths, strides and offsets of the rings of a QP, in so many bytes";
            return Err(refuse(EINVAL, reason, asked.buf_len, 0));
        }
        Ok(layout)
    }

    /// Returns the bytes of the region.
    pub(crate) fn len(&self) -> usize {
        self.sq.end().max(self.rq.end()) as usize
    }

    /// Returns the rings as CREATE_RING_QP has them.
    pub(crate) fn to_wire(
        self,
    ) -> (
        bindings::virtio_rdma_ring_shape,
        bindings::virtio_rdma_ring_shape,
    ) {
        (self.sq.to_wire(), self.rq.to_wire())
    }
}

/// Returns the bytes of the region of a CQ with `depth` entries.
pub(crate) fn cq_len(depth: u32) -> usize {
    CQ_HEAD + depth as usize * CQE_SIZE
}

/// A send, receive or shared receive ring that the kernel posts to.
pub(crate) struct WorkRing {
    memory: Arc<Pages>,
    shape: Shape,
    producer_at: usize,
    wake_at: usize,
    producer: u32,
}

impl WorkRing {
    /// Returns the send ring of a region.
    pub(crate) fn send(memory: Arc<Pages>, layout: &QpLayout) -> Self {
        Self {
            memory,
            shape: layout.sq,
            producer_at: offset_of!(wire::QpRing, sq_producer),
            wake_at: offset_of!(wire::QpRing, sq_wake),
            producer: 0,
        }
    }

    /// Returns the receive ring of a region.
    pub(crate) fn recv(memory: Arc<Pages>, layout: &QpLayout) -> Self {
        Self {
            memory,
            shape: layout.rq,
            producer_at: offset_of!(wire::QpRing, rq_producer),
            wake_at: offset_of!(wire::QpRing, rq_wake),
            producer: 0,
        }
    }

    /// Returns the ring of an SRQ.
    pub(crate) fn shared(memory: Arc<Pages>, shape: Shape) -> Self {
        Self {
            memory,
            shape,
            producer_at: offset_of!(wire::SrqRing, producer),
            wake_at: offset_of!(wire::SrqRing, wake),
            producer: 0,
        }
    }

    /// Returns the index of the next entry.
    pub(crate) fn producer(&self) -> u32 {
        self.producer
    }

    /// Copies `value` to `offset` of the next entry.
    ///
    /// # Errors
    ///
    /// `EINVAL` beyond the end of the entry.
    pub(crate) fn write<T: AsBytes>(&mut self, offset: usize, value: &T) -> Result {
        let stride = self.shape.stride as usize;
        if offset + size_of::<T>() > stride {
            return Err(EINVAL);
        }
        let place = (self.producer & (self.shape.depth - 1)) as usize * stride;
        self.memory
            .write(self.shape.offset as usize + place + offset, value)
    }

    /// Goes on to the next entry. The device does not see it yet.
    pub(crate) fn advance(&mut self) {
        self.producer = self.producer.wrapping_add(1);
    }

    /// Lets the device see all entries. True if it wants a doorbell.
    ///
    /// # Errors
    ///
    /// It never fails, because the head is within the memory.
    pub(crate) fn publish(&mut self) -> Result<bool> {
        self.memory.store_release(self.producer_at, self.producer)?;
        self.memory.barrier();
        if self.memory.load_acquire(self.wake_at)? == 0 {
            return Ok(false);
        }
        // One doorbell is enough until the device goes to sleep once more.
        self.memory.store_release(self.wake_at, 0)?;
        Ok(true)
    }

    /// Starts again at entry 0. The QP is in RESET.
    ///
    /// # Errors
    ///
    /// It never fails, because the head is within the memory.
    pub(crate) fn reset(&mut self) -> Result {
        self.producer = 0;
        self.memory.store_release(self.producer_at, 0)
    }
}

/// A completion ring that the kernel polls.
pub(crate) struct CompletionRing {
    memory: Arc<Pages>,
    depth: u32,
    consumer: u32,
    /// The arming words, as they were written last.
    arm_next: u32,
    arm_solicited: u32,
    /// The places of CQEs that were dropped before they were polled, and how many these are.
    dropped: BitmapVec,
    num_dropped: u32,
}

impl CompletionRing {
    /// Returns the ring of a region of [`cq_len`] bytes. May sleep.
    ///
    /// # Errors
    ///
    /// `ENOMEM`.
    pub(crate) fn new(memory: Arc<Pages>, depth: u32) -> Result<Self> {
        Ok(Self {
            memory,
            depth,
            consumer: 0,
            arm_next: 0,
            arm_solicited: 0,
            dropped: BitmapVec::new(depth as usize, GFP_KERNEL)?,
            num_dropped: 0,
        })
    }

    fn place(&self, index: u32) -> usize {
        (index & (self.depth - 1)) as usize
    }

    /// Returns CQE `index`, if the device has written it.
    fn read(&self, index: u32) -> Option<wire::RingCqe> {
        let at = CQ_HEAD + self.place(index) * CQE_SIZE;
        let lap = self
            .memory
            .load_acquire(at + offset_of!(wire::RingCqe, lap))
            .ok()?;
        if lap != (index / self.depth).wrapping_add(1) {
            return None;
        }
        self.memory.read(at).ok()
    }

    fn is_dropped(&self, place: usize) -> bool {
        self.num_dropped != 0 && self.dropped.next_bit(place) == Some(place)
    }

    /// Takes the next CQE. The device does not see yet that its place is free.
    pub(crate) fn next(&mut self) -> Option<wire::RingCqe> {
        loop {
            let cqe = self.read(self.consumer)?;
            let place = self.place(self.consumer);
            self.consumer = self.consumer.wrapping_add(1);
            if !self.is_dropped(place) {
                return Some(cqe);
            }
            self.dropped.clear_bit(place);
            self.num_dropped -= 1;
        }
    }

    /// Lets the device see which places are free.
    pub(crate) fn release(&mut self) {
        // The store cannot fail: the head is within the memory.
        let _ = self
            .memory
            .store_release(offset_of!(wire::CqRing, consumer), self.consumer);
    }

    /// Asks for an event at the next CQE, or at the next solicited one.
    pub(crate) fn arm(&mut self, solicited: bool) {
        let (offset, word) = if solicited {
            (
                offset_of!(wire::CqRing, arm_solicited),
                &mut self.arm_solicited,
            )
        } else {
            (offset_of!(wire::CqRing, arm_next), &mut self.arm_next)
        };
        *word = word.wrapping_add(1);
        // The store cannot fail: the head is within the memory.
        let _ = self.memory.store_release(offset, *word);
        self.memory.barrier();
    }

    /// Returns whether a CQE is there.
    pub(crate) fn has_completions(&self) -> bool {
        self.read(self.consumer).is_some()
    }

    /// Drops the CQEs of a QP that are there; `dropped` gets each.
    pub(crate) fn drop_qp(&mut self, qpn: u32, mut dropped: impl FnMut(&wire::RingCqe)) {
        for ahead in 0..self.depth {
            let index = self.consumer.wrapping_add(ahead);
            let Some(cqe) = self.read(index) else {
                break;
            };
            let place = self.place(index);
            if u32::from_le(cqe.qp_num) == qpn && !self.is_dropped(place) {
                self.dropped.set_bit(place);
                self.num_dropped += 1;
                dropped(&cqe);
            }
        }
    }
}

#[cfg(virtio_rdma_kunit)]
#[kunit_tests(virtio_rdma_ring)]
#[allow(unsafe_code)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_room_for_header_and_payload() {
        // The header has 48 bytes, and an SGE has 16.
        assert_eq!(send_entry_size(QpType::Rc, 1, 0), 64);
        assert_eq!(send_entry_size(QpType::Ud, 1, 0), 96);
        assert_eq!(send_entry_size(QpType::XrcIni, 2, 0), 96);
        // The payload is the larger one of SGEs and inline data.
        assert_eq!(send_entry_size(QpType::Uc, 1, 200), 248);
        assert_eq!(recv_entry_size(3), 64);
    }

    #[test]
    fn rings_of_a_qp_do_not_overlap() {
        for (sizes, depths) in [
            ((64, 32), (1, 1)),
            ((64, 48), (16, 256)),
            ((4096, 16), (2, 4)),
            ((248, 1040), (128, 64)),
        ] {
            let layout = QpLayout::new(depths, sizes);
            assert!(layout.sq.offset >= QP_HEAD);
            assert!(u64::from(layout.rq.offset) >= layout.sq.end());
            assert!(layout.sq.is_sound(sizes.0, layout.len() as u64));
            assert!(layout.rq.is_sound(sizes.1, layout.len() as u64));
            assert!(!layout.rq.is_sound(sizes.1, layout.rq.end() - 1));
        }
    }

    #[test]
    fn no_receive_ring_takes_no_room() {
        let layout = QpLayout::new((4, 0), (64, 32));
        assert_eq!(layout.len() as u64, layout.sq.end());
    }

    #[test]
    fn rings_of_programs_are_checked() {
        let good = bindings::virtio_rdma_ureq_create_qp {
            buf_addr: 0,
            buf_len: 8192,
            sq_depth: 16,
            sq_stride: 64,
            sq_offset: 256,
            rq_depth: 32,
            rq_stride: 32,
            rq_offset: 4096,
        };
        let refused = |change: &dyn Fn(&mut bindings::virtio_rdma_ureq_create_qp)| {
            let mut asked = good;
            change(&mut asked);
            QpLayout::of_program(&asked, (64, 32)).is_err()
        };
        assert!(!refused(&|_| {}));
        assert!(!refused(&|asked| asked.rq_depth = 0));
        // A depth or a stride that is not a power of two is refused.
        assert!(refused(&|asked| asked.sq_depth = 15));
        assert!(refused(&|asked| asked.sq_stride = 96));
        // An entry that is too small or too large is refused.
        assert!(refused(&|asked| asked.sq_stride = 32));
        assert!(refused(&|asked| asked.rq_stride = 2 * MAX_STRIDE));
        // A ring in the head of the region, one between two entries and one beyond the end are
        // refused.
        assert!(refused(&|asked| asked.sq_offset = 192));
        assert!(refused(&|asked| asked.sq_offset = 288));
        assert!(refused(&|asked| asked.buf_len = 4096 + 32 * 32 - 1));
        // The end of a ring is computed without overflow.
        assert!(refused(&|asked| {
            asked.rq_depth = 1 << 31;
            asked.rq_stride = MAX_STRIDE;
            asked.rq_offset = 1 << 31;
        }));
        assert!(refused(&|asked| {
            asked.sq_depth = 0;
            asked.rq_depth = 0;
            asked.buf_len = 255;
        }));
    }

    #[test]
    fn rings_of_srqs_are_checked() {
        let asked = bindings::virtio_rdma_ureq_create_srq {
            buf_len: 4096,
            depth: 16,
            stride: 64,
            offset: 256,
            ..Default::default()
        };
        assert!(Shape::of_program_srq(&asked, 3).is_ok());
        assert!(Shape::of_program_srq(&asked, 4).is_err());
        let none = bindings::virtio_rdma_ureq_create_srq { depth: 0, ..asked };
        assert!(Shape::of_program_srq(&none, 1).is_err());
    }

    #[test]
    fn regions_are_whole_pages() {
        for page in [4 << 10, 16 << 10, 64 << 10] {
            assert!(is_region_of(3 * page, 2 * page, page));
            assert!(!is_region_of(page + 64, page, page));
            assert!(!is_region_of(page, page + 64, page));
            assert!(!is_region_of(page / 4, page, page));
            assert!(!is_region_of(page, page / 4, page));
            assert!(is_region_of(0, MAX_REGION, page));
            assert!(!is_region_of(0, MAX_REGION + page, page));
        }
        assert!(is_region(0, page::PAGE_SIZE as u64));
        assert_eq!(cq_len(16), 128 + 16 * 64);
    }
}
