// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Completion queues in rings (specification, Completion queues).
#![forbid(unsafe_code)]

use crate::{
    atomic::fence,
    barriers::Barriers,
    bindings::*,
    causes::Cause,
    errno::Result,
    ring::{Allocator, Resource, Ring, RingRegion, Word},
};
use core::{
    mem::{MaybeUninit, offset_of},
    sync::atomic::Ordering::{Acquire, Release, SeqCst},
};

const CONSUMER: Word = Word::at(offset_of!(virtio_rdma_cq_ring, consumer));
const CLOSED: Word = Word::at(offset_of!(virtio_rdma_cq_ring, closed));
const ARM_NEXT: Word = Word::at(offset_of!(virtio_rdma_cq_ring, arm_next));
const ARM_SOLICITED: Word = Word::at(offset_of!(virtio_rdma_cq_ring, arm_solicited));

/// The owner of completions in a CQ.
#[derive(Clone, Copy)]
pub enum Owner {
    /// The QP with this number.
    Qp(u32),
    /// The SRQ for XRC with this number, whatever QP took the receive.
    Srq(u32),
}

impl Owner {
    /// Returns whether a CQE is the owner's. A CQE that names an SRQ is not the QP's that it
    /// names: the QP may be another program's, and its number given out again.
    fn has(self, cqe: &virtio_rdma_ring_cqe) -> bool {
        let srqn = u32::from_le(cqe.srqn);
        match self {
            Self::Qp(number) => srqn == 0 && u32::from_le(cqe.qp_num) == number,
            Self::Srq(number) => srqn == number,
        }
    }
}

/// A ring of CQEs, which the lock of the CQ protects.
pub struct CqRing {
    region: RingRegion,
    ring: Ring,
    /// The number of CQEs that were taken, modulo 2^32.
    consumer: u32,
    /// The value of the head's word `arm_next`.
    arm_next: u32,
    /// The value of the head's word `arm_solicited`.
    arm_solicited: u32,
}

impl CqRing {
    /// Allocates a ring of at least `depth` CQEs, by the program's allocator if it has one, for a device
    /// that needs these barriers.
    ///
    /// # Errors
    ///
    /// EINVAL for a depth that no ring has; ENOMEM.
    pub fn lent(
        depth: u32,
        barriers: Barriers,
        allocator: Option<Allocator>,
    ) -> Result<Self, Cause> {
        let (head, stride) =
            const { (size_of::<virtio_rdma_cq_ring>(), size_of::<virtio_rdma_ring_cqe>()) };
        let ring = Ring::new(head, depth, stride)?;
        let region = RingRegion::lent(ring.end(), barriers, allocator, Resource::Cq)?;
        Ok(Self { region, ring, consumer: 0, arm_next: 0, arm_solicited: 0 })
    }

    /// Allocates a ring in memory of the provider.
    #[cfg(test)]
    pub fn new(depth: u32) -> Result<Self, Cause> {
        Self::lent(depth, Barriers::PROCESSORS, None)
    }

    /// Returns a ring whose words belong to a model checker.
    #[cfg(loom)]
    pub fn modelled(depth: u32, memory: &std::sync::Arc<litmus::Memory>) -> Self {
        let mut ring = Self::lent(depth, Barriers::PROCESSORS, None).expect("memory");
        ring.region.model = Some(std::sync::Arc::clone(memory));
        ring
    }

    /// Returns the number of entries.
    pub fn depth(&self) -> u32 {
        self.ring.depth()
    }

    /// Returns the description of the ring for the driver.
    pub fn request(&self) -> virtio_rdma_ureq_create_cq {
        virtio_rdma_ureq_create_cq {
            buf_addr: self.region.addr(),
            buf_len: self.region.size() as u64,
        }
    }

    /// Goes on with the numbers by which another ring of the CQ was armed. The device writes them into the head of
    /// this ring, which is zeros until then.
    pub fn arm_as(&mut self, other: &Self) {
        self.arm_next = other.arm_next;
        self.arm_solicited = other.arm_solicited;
    }

    /// Asks for an event at the next CQE, or at the next one that is solicited or an
    /// error. CQEs in the ring do not raise an event: the program polls once
    /// more, and finds each CQE that the device wrote before it saw the request.
    pub fn arm(&mut self, solicited_only: bool) {
        let (word, number) = match solicited_only {
            true => (ARM_SOLICITED, &mut self.arm_solicited),
            false => (ARM_NEXT, &mut self.arm_next),
        };
        *number = number.wrapping_add(1);
        self.region.store(word, *number, Release);
        fence(SeqCst);
        self.region.barriers().full();
    }

    /// Takes CQEs and translates them to `entries`, from the front; returns how many. A CQE that
    /// `complete` refuses is dropped.
    pub fn poll(
        &mut self,
        complete: impl Fn(&virtio_rdma_ring_cqe) -> bool,
        entries: &mut [MaybeUninit<ibv_wc>],
    ) -> usize {
        let first = self.consumer;
        let mut polled = 0;
        // Bounds the time that CQEs take which are dropped.
        let mut budget = self.depth();
        while polled < entries.len() && budget > 0 {
            let Some(cqe) = self.next() else { break };
            budget -= 1;
            // The device misbehaves: the CQE names no QP or SRQ of the context, or a work
            // request that is not outstanding.
            if !complete(&cqe) {
                continue;
            }
            if let Some(entry) = entries.get_mut(polled) {
                completion(&cqe, entry);
                polled += 1;
            }
        }
        self.release(first);
        polled
    }

    /// Takes a CQE, if the device has written one.
    #[inline(always)]
    fn next(&mut self) -> Option<virtio_rdma_ring_cqe> {
        let cqe = self.region.cqe(self.ring, self.consumer)?;
        self.consumer = self.consumer.wrapping_add(1);
        Some(cqe)
    }

    /// Gives the entries of the CQEs that were taken since `first` back to the device.
    #[inline(always)]
    fn release(&mut self, first: u32) {
        // Extended polling does so as well after each completion: a program may post as soon as it
        // has read one, and the next completion needs the entry if the CQ has only as many CQEs as
        // there are work requests. The store is cheap: the device reads the word once a lap,
        // when it knows of no free entry, so that the cache line stays here.
        if self.consumer != first {
            self.region.store(CONSUMER, self.consumer, Release);
        }
    }

    /// Takes a CQE, if the device has written one, and passes it to `note`.
    #[cfg(loom)]
    pub fn take<R>(&mut self, note: impl FnOnce(&virtio_rdma_ring_cqe) -> R) -> Option<R> {
        let first = self.consumer;
        let noted = self.next().map(|cqe| note(&cqe));
        self.release(first);
        noted
    }

    /// Returns whether the driver has closed the ring, because the device is gone. The next poll sees
    /// all CQEs that were written before.
    pub fn is_closed(&self) -> bool {
        self.region.load(CLOSED, Acquire) != 0
    }

    /// Drops the CQEs of a QP that is destroyed or reset, or of an SRQ that is destroyed; it gets no
    /// more CQEs. The other CQEs move up, in order, to the end of those that the device has
    /// written. The device does not read them.
    pub fn purge(&mut self, owner: Owner) {
        let first = self.consumer;
        let held = (0..self.depth())
            .take_while(|&i| self.region.cqe(self.ring, first.wrapping_add(i)).is_some())
            .count() as u32;
        let end = first.wrapping_add(held);
        let mut kept = end;
        for i in (0..held).rev() {
            let from = first.wrapping_add(i);
            let Some(cqe) = self.region.cqe(self.ring, from) else { continue };
            if owner.has(&cqe) {
                continue;
            }
            kept = kept.wrapping_sub(1);
            if kept != from {
                self.replace(kept, cqe);
            }
        }
        if kept != first {
            self.consumer = kept;
            self.region.store(CONSUMER, kept, Release);
        }
    }

    /// Replaces a CQE that was not taken yet.
    fn replace(&self, index: u32, cqe: virtio_rdma_ring_cqe) {
        if let Ok(mut entry) = self.region.writer(self.ring, index) {
            // This cannot fail: a CQE has the size of its entry.
            let _ = entry.put(virtio_rdma_ring_cqe { lap: self.ring.lap(index).to_le(), ..cqe });
        }
    }
}

/// Translates a CQE to a `struct ibv_wc`.
fn completion(cqe: &virtio_rdma_ring_cqe, entry: &mut MaybeUninit<ibv_wc>) {
    let flags = u32::from_le(cqe.wc_flags);
    let ex = match flags & VIRTIO_RDMA_WC_WITH_INVALIDATE {
        0 => cqe.ex(),
        _ => u32::from_le(cqe.ex()),
    };
    entry.write(ibv_wc {
        wr_id: u64::from_le(cqe.wr_id),
        status: status(cqe),
        opcode: cqe.opcode.into(),
        vendor_err: u32::from_le(cqe.vendor_err),
        byte_len: u32::from_le(cqe.byte_len),
        __bindgen_anon_1: ibv_wc__bindgen_ty_1 { imm_data: ex },
        qp_num: u32::from_le(cqe.qp_num),
        src_qp: u32::from_le(cqe.src_qp),
        wc_flags: wc_flags(flags),
        pkey_index: u16::from_le(cqe.pkey_index),
        slid: 0,
        sl: cqe.sl,
        dlid_path_bits: 0,
    });
}

/// Returns the status of a CQE. The device uses the numbers of `enum ibv_wc_status`. Another number,
/// and success with an unknown opcode, are a general error.
fn status(cqe: &virtio_rdma_ring_cqe) -> ibv_wc_status {
    let status = u32::from(cqe.status);
    if status > IBV_WC_GENERAL_ERR || status == IBV_WC_SUCCESS && !is_known(cqe.opcode) {
        return IBV_WC_GENERAL_ERR;
    }
    status
}

/// Returns whether work requests of this provider have an opcode.
fn is_known(opcode: u8) -> bool {
    matches!(
        opcode.into(),
        IBV_WC_SEND
            | IBV_WC_RDMA_WRITE
            | IBV_WC_RDMA_READ
            | IBV_WC_COMP_SWAP
            | IBV_WC_FETCH_ADD
            | IBV_WC_LOCAL_INV
            | IBV_WC_BIND_MW
            | IBV_WC_FLUSH
            | IBV_WC_ATOMIC_WRITE
            | IBV_WC_RECV
            | IBV_WC_RECV_RDMA_WITH_IMM
    )
}

/// Translates the flags of a CQE. `enum ibv_wc_flags` has the last two bits in the other order.
fn wc_flags(flags: u32) -> u32 {
    let mut wc_flags = flags & (VIRTIO_RDMA_WC_GRH | VIRTIO_RDMA_WC_WITH_IMM);
    if flags & VIRTIO_RDMA_WC_WITH_INVALIDATE != 0 {
        wc_flags |= IBV_WC_WITH_INV;
    }
    if flags & VIRTIO_RDMA_WC_IP_CSUM_OK != 0 {
        wc_flags |= IBV_WC_IP_CSUM_OK;
    }
    wc_flags
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        barriers::executed::{self, Executed},
        model::{
            device::{self, Completer, Memory},
            objects::Harness,
        },
        qp_table::QpTable,
    };
    use core::{cell::RefCell, sync::atomic::Ordering::Relaxed};
    use std::thread;

    fn cqe(qp_num: u32, wqe_index: u32) -> virtio_rdma_ring_cqe {
        let wr_id = u64::from(qp_num) << 32 | u64::from(wqe_index);
        virtio_rdma_ring_cqe { wr_id, qp_num, wqe_index, ..Default::default() }
    }

    /// Polls for at most `room` completions. Returns their work requests.
    fn poll(ring: &mut CqRing, table: &QpTable, room: usize) -> Vec<u64> {
        device::poll(ring, table, room).iter().map(|wc| wc.wr_id).collect()
    }

    #[test]
    fn order_over_many_laps() {
        for depth in [1, 2, 64] {
            let harness = Harness::new(&[7]);
            let mut ring = CqRing::new(depth).unwrap();
            let mut device = Completer::new(&ring);
            let mut expected = 0;
            for round in 0..1000u32 {
                for _ in 0..round % (depth + 1) {
                    assert!(device.complete_posted(&harness.table, cqe(7, device.producer)));
                }
                for wr_id in poll(&mut ring, &harness.table, 3 + round as usize % 80) {
                    assert_eq!(wr_id as u32, expected);
                    expected += 1;
                }
                while expected != device.producer {
                    expected += poll(&mut ring, &harness.table, 1).len() as u32;
                }
                assert_eq!(device.consumer(), expected);
            }
            assert!(poll(&mut ring, &harness.table, 9).is_empty());
        }
    }

    #[test]
    fn closed_behind_the_last_cqe() {
        let harness = Harness::new(&[7]);
        let mut ring = CqRing::new(4).unwrap();
        let mut device = Completer::new(&ring);
        device.complete_posted(&harness.table, cqe(7, 0));
        assert!(!ring.is_closed());
        ring.region.store(CLOSED, 1, Relaxed);
        assert_eq!(poll(&mut ring, &harness.table, 4).len(), 1);
        assert!(ring.is_closed());
    }

    #[test]
    fn indices_wrap() {
        let harness = Harness::new(&[7]);
        let mut ring = CqRing::new(4).unwrap();
        let mut device = Completer::new(&ring);
        (ring.consumer, device.producer) = (u32::MAX - 1, u32::MAX - 1);
        ring.region.store(CONSUMER, ring.consumer, Relaxed);
        for i in 0..100 {
            assert!(device.complete_posted(&harness.table, cqe(7, i)));
            assert_eq!(poll(&mut ring, &harness.table, 4), [7 << 32 | u64::from(i)]);
        }
    }

    #[test]
    fn full_ring_is_not_written_over() {
        let harness = Harness::new(&[7]);
        let mut ring = CqRing::new(4).unwrap();
        let mut device = Completer::new(&ring);
        assert_eq!(
            (0..9).filter(|&i| device.complete_posted(&harness.table, cqe(7, i))).count(),
            4
        );
        assert_eq!(poll(&mut ring, &harness.table, 2).len(), 2);
        assert_eq!(
            (4..9).filter(|&i| device.complete_posted(&harness.table, cqe(7, i))).count(),
            2
        );
        assert_eq!(poll(&mut ring, &harness.table, 9).len(), 4);
    }

    #[test]
    fn completion_says_how_far_the_queue_is() {
        let harness = Harness::new(&[7, 9]);
        let mut ring = CqRing::new(8).unwrap();
        let mut device = Completer::new(&ring);
        device.complete_posted(&harness.table, cqe(7, 41));
        device.complete_posted(&harness.table, virtio_rdma_ring_cqe { opcode: 128, ..cqe(7, 5) });
        device.complete_posted(
            &harness.table,
            virtio_rdma_ring_cqe { opcode: 129, status: 5, ..cqe(9, 0) },
        );
        device.complete_posted(
            &harness.table,
            virtio_rdma_ring_cqe { status: 12, ..cqe(9, u32::MAX) },
        );
        assert_eq!(poll(&mut ring, &harness.table, 8).len(), 4);
        assert_eq!(harness.progress(7), (42, 6));
        assert_eq!(harness.progress(9), (0, 1));
    }

    #[test]
    fn what_is_not_outstanding_is_dropped() {
        let harness = Harness::new(&[7]);
        let mut ring = CqRing::new(32).unwrap();
        let mut device = Completer::new(&ring);
        let progress = harness.table.get(7).unwrap();
        progress.send().set_done(u32::MAX);
        progress.send().post(3);
        let sends = [3, u32::MAX - 1, 0, 0, u32::MAX, 1 << 31, 1, 1, 2, 2, 3];
        for index in sends {
            assert!(device.complete(cqe(7, index)));
        }
        progress.recv().post(1);
        for index in [1, 0, 0] {
            device.complete(virtio_rdma_ring_cqe { opcode: 128, ..cqe(7, index) });
        }
        let ids = [0, 1, 2, 0].map(|index| 7 << 32 | index);
        assert_eq!(poll(&mut ring, &harness.table, 32), ids);
        assert_eq!((harness.progress(7), device.consumer()), ((3, 1), 14));
    }

    #[test]
    fn unknown_qp_is_dropped() {
        let harness = Harness::new(&[7]);
        let mut ring = CqRing::new(8).unwrap();
        let mut device = Completer::new(&ring);
        for number in [0, 8, 1 << 24, u32::MAX, 7, 1023, 1024] {
            device.complete_posted(&harness.table, cqe(number, 1));
        }
        assert_eq!(poll(&mut ring, &harness.table, 8), [7 << 32 | 1]);
        assert_eq!(device.consumer(), 7);
    }

    /// A device that writes CQEs of an unknown QP as fast as they are dropped keeps a poll for one lap.
    #[test]
    fn dropped_cqes_take_the_time_of_one_lap() {
        let mut ring = CqRing::new(4).unwrap();
        let device = RefCell::new(Completer::new(&ring));
        let consumer = Memory::at(ring.request().buf_addr);
        let write = || {
            let mut device = device.borrow_mut();
            consumer
                .word(offset_of!(virtio_rdma_cq_ring, consumer))
                .store(device.producer, Relaxed);
            assert!(device.complete(cqe(7, 0)) && device.producer <= 5);
        };
        write();
        let drop_one = |_: &_| {
            write();
            false
        };
        assert_eq!(ring.poll(drop_one, &mut [MaybeUninit::uninit()]), 0);
        assert_eq!(ring.consumer, 4);
    }

    #[test]
    fn purge_keeps_the_others_in_order() {
        for pattern in 0..256u32 {
            let harness = Harness::new(&[7, 9]);
            let mut ring = CqRing::new(8).unwrap();
            let mut device = Completer::new(&ring);
            // Somewhere in the middle of a lap.
            (0..5).for_each(|i| assert!(device.complete_posted(&harness.table, cqe(7, i))));
            poll(&mut ring, &harness.table, 5);
            harness.table.get(7).unwrap().send().set_done(0);
            let number = |i| if pattern >> i & 1 != 0 { 9 } else { 7 };
            (0..8).for_each(|i| assert!(device.complete_posted(&harness.table, cqe(number(i), i))));
            ring.purge(Owner::Qp(9));
            assert_eq!(device.consumer(), 5 + pattern.count_ones());
            // The places of the CQEs that were freed can be used.
            (0..pattern.count_ones())
                .for_each(|i| assert!(device.complete_posted(&harness.table, cqe(7, 100 + i))));
            assert!(!device.complete(cqe(7, 0)));
            let expected: Vec<_> = (0..8)
                .filter(|&i| number(i) == 7)
                .chain(100..100 + pattern.count_ones())
                .map(|i| 7 << 32 | u64::from(i))
                .collect();
            assert_eq!(poll(&mut ring, &harness.table, 9), expected);
        }
    }

    #[test]
    fn one_event_disarms() {
        let mut ring = CqRing::new(8).unwrap();
        let mut device = Completer::new(&ring);
        assert!(!device.event(true));
        ring.arm(true);
        assert!(!device.event(false));
        assert!(device.event(true));
        assert!(!device.event(true));
        ring.arm(true);
        ring.arm(false);
        assert!(device.event(false));
        assert!(!device.event(true));
        let mut other = CqRing::new(16).unwrap();
        other.arm_as(&ring);
        assert_eq!((other.arm_next, other.arm_solicited), (1, 2));
        let words = [ARM_NEXT, ARM_SOLICITED].map(|word| other.region.load(word, Relaxed));
        assert_eq!(words, [0, 0], "the device has a region of zeros, and arms it itself");
    }

    /// A CQE of a device behind a bus is read behind its lap, and its place is given back behind that.
    #[test]
    fn barriers_of_a_cqe() {
        for (barriers, count) in [(Barriers::PROCESSORS, 0), (Barriers::BUS, 1)] {
            let harness = Harness::new(&[7]);
            let mut ring = CqRing::lent(8, barriers, None).unwrap();
            let mut device = Completer::new(&ring);
            let mut polled = || executed::by(|| poll(&mut ring, &harness.table, 1));
            assert_eq!(polled(), Executed::default());
            device.complete_posted(&harness.table, cqe(7, 0));
            assert_eq!(polled(), Executed { read: count, write: count, full: 0 });
        }
    }

    /// The word that the program writes at each poll is not in the cache line that the device reads
    /// after each CQE.
    #[test]
    fn arming_words_have_a_line_of_their_own() {
        let line = |offset: usize| offset / 64;
        let consumer = line(offset_of!(virtio_rdma_cq_ring, consumer));
        let next = line(offset_of!(virtio_rdma_cq_ring, arm_next));
        let solicited = line(offset_of!(virtio_rdma_cq_ring, arm_solicited));
        let cqes = line(size_of::<virtio_rdma_cq_ring>());
        assert!(next == solicited && consumer < next && next < cqes);
    }

    #[test]
    fn translation() {
        let cqe = virtio_rdma_ring_cqe {
            wr_id: 1,
            status: 0,
            opcode: 128,
            sl: 3,
            vendor_err: 4,
            byte_len: 5,
            ex: virtio_rdma_ring_cqe__bindgen_ty_1 { imm_data: 6 },
            qp_num: 7,
            src_qp: 8,
            wc_flags: VIRTIO_RDMA_WC_GRH | VIRTIO_RDMA_WC_WITH_INVALIDATE | 1 << 20,
            pkey_index: 9,
            ..Default::default()
        };
        let harness = Harness::new(&[7]);
        let mut ring = CqRing::new(1).unwrap();
        Completer::new(&ring).complete_posted(&harness.table, cqe);
        let wc = device::poll(&mut ring, &harness.table, 1)[0];
        let ex = device::ex(&wc);
        assert_eq!((wc.wr_id, wc.status, wc.opcode), (1, IBV_WC_SUCCESS, IBV_WC_RECV));
        assert_eq!((wc.sl, wc.vendor_err, wc.byte_len, ex), (3, 4, 5, 6));
        assert_eq!((wc.qp_num, wc.src_qp, wc.pkey_index), (7, 8, 9));
        assert_eq!(wc.wc_flags, IBV_WC_GRH | IBV_WC_WITH_INV);
        for (flags, expected) in [
            (VIRTIO_RDMA_WC_WITH_IMM, IBV_WC_WITH_IMM),
            (VIRTIO_RDMA_WC_IP_CSUM_OK, IBV_WC_IP_CSUM_OK),
            (
                VIRTIO_RDMA_WC_IP_CSUM_OK | VIRTIO_RDMA_WC_WITH_INVALIDATE,
                IBV_WC_IP_CSUM_OK | IBV_WC_WITH_INV,
            ),
        ] {
            assert_eq!(wc_flags(flags), expected);
        }
        for (number, opcode, expected) in [
            (0, 4, IBV_WC_SUCCESS),
            (12, 0, IBV_WC_RETRY_EXC_ERR),
            (12, 99, IBV_WC_RETRY_EXC_ERR),
            (21, 0, IBV_WC_GENERAL_ERR),
            (255, 0, IBV_WC_GENERAL_ERR),
            (0, 5, IBV_WC_SUCCESS),
            (0, 7, IBV_WC_GENERAL_ERR),
            (0, 130, IBV_WC_GENERAL_ERR),
            (0, 255, IBV_WC_GENERAL_ERR),
        ] {
            let cqe = virtio_rdma_ring_cqe { status: number, opcode, ..Default::default() };
            assert_eq!(status(&cqe), expected, "{number} {opcode}");
        }
    }

    #[test]
    fn device_and_program_at_the_same_time() {
        const COUNT: u32 = 200_000;
        let harness = Harness::new(&[7]);
        let mut ring = CqRing::new(32).unwrap();
        let mut device = Completer::new(&ring);
        let table = &*harness.table;
        thread::scope(|scope| {
            scope.spawn(|| {
                for i in 0..COUNT {
                    while !device.complete_posted(table, cqe(7, i)) {
                        thread::yield_now();
                    }
                }
            });
            let mut expected = 0;
            while expected < COUNT {
                for wr_id in poll(&mut ring, table, 16) {
                    assert_eq!(wr_id, 7 << 32 | u64::from(expected));
                    expected += 1;
                }
                thread::yield_now();
            }
        });
    }
}
