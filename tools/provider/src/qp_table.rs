// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The QP table of a context: finds by number how far the work requests of a QP are, and the SRQs
//! for XRC.
//!
//! A CQE names its QP, or its SRQ, by number. What polling then writes stands in the table and
//! not in the QP, and is freed with the context: whatever number a CQE has, and
//! whatever another thread destroys meanwhile, polling finds valid memory and
//! takes no lock but the CQ's.

use crate::{
    atomic::AtomicU32,
    bindings::{VIRTIO_RDMA_WC_RECV, virtio_rdma_ring_cqe},
    cq_ring::Owner,
    cq_state::{self, CqState},
    errno::{Errno, Result},
    lock::Lock,
    object::{Owned, Zeroable},
};
use core::{
    ptr::{self, NonNull},
    sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU64,
        Ordering::{Acquire, Relaxed, Release},
    },
};

/// The number of QP numbers, which have 24 bits.
const NUMBERS: usize = 1 << 24;
/// The number of QP numbers in a chunk.
const CHUNK: usize = 1 << 8;

/// The progress of the work requests of the two queues of a QP.
///
/// Threads that post sends, post receives and poll each CQ write to cache lines of their own.
#[repr(C)]
pub struct QpProgress {
    /// The send queue.
    send: QueueProgress,
    /// The receive queue.
    recv: QueueProgress,
}

/// The progress of the work requests of a queue: the number that was posted since RESET, and the
/// number of these that are no longer outstanding, modulo 2^32.
#[derive(Default)]
#[repr(C)]
pub struct QueueProgress {
    polled: Polled,
    posted: Posted,
}

/// The state of a queue that a thread reads and writes while it polls the CQ of the queue, under
/// the lock of the CQ.
#[derive(Default)]
#[repr(C, align(64))]
struct Polled {
    /// Work requests that are no longer outstanding.
    done: AtomicU32,
    /// Whether the receives are those of an SRQ.
    shared: AtomicBool,
    /// The ID of the registration that has the number, 0 if no QP has it.
    owner: AtomicU64,
    /// The CQ of the queue; written under [`QpTable::registrations`], as `owner` is.
    cq: AtomicPtr<Lock<CqState>>,
}

/// The state of a queue that a thread writes while it posts to the queue.
#[derive(Default)]
#[repr(C, align(64))]
struct Posted {
    /// Work requests that were posted. Written before the device is told of them.
    count: AtomicU32,
}

impl QueueProgress {
    /// Returns how many work requests are no longer outstanding.
    pub fn done(&self) -> u32 {
        self.polled.done.load(Acquire)
    }

    /// Notes how many work requests were posted since RESET.
    pub fn post(&self, posted: u32) {
        self.posted.count.store(posted, Release);
    }

    /// Notes that the work request with an index, and all before it, are no longer outstanding.
    /// Returns false, and notes nothing, if it is not outstanding: the device chose the index.
    pub fn complete(&self, index: u32) -> bool {
        let done = self.polled.done.load(Relaxed);
        let outstanding = self.posted.count.load(Acquire).wrapping_sub(done);
        if index.wrapping_sub(done) >= outstanding {
            return false;
        }
        self.polled.done.store(index.wrapping_add(1), Release);
        true
    }

    fn reset(&self) {
        self.polled.done.store(0, Relaxed);
        self.posted.count.store(0, Relaxed);
    }

    /// Gives the number to a new QP, whose queue completes to `cq`. The caller holds
    /// [`QpTable::registrations`].
    fn register(&self, owner: u64, cq: &Lock<CqState>) {
        self.reset();
        self.polled.shared.store(false, Relaxed);
        self.polled.cq.store(ptr::from_ref(cq).cast_mut(), Relaxed);
        self.polled.owner.store(owner, Release);
    }

    /// Sets how many work requests are no longer outstanding.
    #[cfg(test)]
    pub fn set_done(&self, done: u32) {
        self.polled.done.store(done, Release);
    }

    /// Makes the work request with an index outstanding.
    #[cfg(test)]
    fn expect(&self, index: u32) {
        let posted = index.wrapping_add(1);
        if posted == self.done() {
            self.set_done(index);
        }
        self.post(posted);
    }
}

/// Returns whether a CQE is that of a receive.
fn is_receive(cqe: &virtio_rdma_ring_cqe) -> bool {
    u32::from(cqe.opcode) & VIRTIO_RDMA_WC_RECV != 0
}

impl QpProgress {
    /// Notes that the receives of the QP, which is new, are those of an SRQ.
    pub fn share_receives(&self) {
        self.recv.polled.shared.store(true, Relaxed);
    }

    /// Returns the progress of the send queue.
    pub fn send(&self) -> &QueueProgress {
        &self.send
    }

    /// Returns the progress of the receive queue.
    pub fn recv(&self) -> &QueueProgress {
        &self.recv
    }

    /// Returns the progress of the queue that a CQE is of.
    fn queue(&self, cqe: &virtio_rdma_ring_cqe) -> &QueueProgress {
        if is_receive(cqe) { &self.recv } else { &self.send }
    }

    /// Notes a completion: its work request, and all before it in the same
    /// queue, are no longer outstanding. Returns false if it was not outstanding: the
    /// CQE makes no sense, or is one too many.
    ///
    /// The receives of an SRQ complete in any order, and are not counted.
    #[inline]
    pub fn complete(&self, cqe: &virtio_rdma_ring_cqe) -> bool {
        let queue = self.queue(cqe);
        queue.polled.owner.load(Acquire) != 0
            && (queue.polled.shared.load(Relaxed) || queue.complete(u32::from_le(cqe.wqe_index)))
    }

    /// Makes the work request of a CQE outstanding.
    #[cfg(test)]
    pub fn expect(&self, cqe: &virtio_rdma_ring_cqe) {
        self.queue(cqe).expect(u32::from_le(cqe.wqe_index));
    }

    /// Returns the send CQ and the receive CQ of the QP.
    ///
    /// # Safety
    ///
    /// They are live.
    unsafe fn cqs(&self) -> (&Lock<CqState>, &Lock<CqState>) {
        // SAFETY: `register` stored the addresses of both, and the caller says that they are live.
        unsafe {
            let cq = |queue: &QueueProgress| &*queue.polled.cq.load(Relaxed).cast_const();
            (cq(&self.send), cq(&self.recv))
        }
    }

    /// Notes that no work request was posted yet.
    fn reset(&self) {
        self.send.reset();
        self.recv.reset();
    }

    /// Returns the ID of the registration that has the number, 0 if no QP has it.
    fn owner(&self) -> &AtomicU64 {
        &self.send.polled.owner
    }
}

type Chunk = [QpProgress; CHUNK];
type Chunks = [AtomicPtr<Chunk>; NUMBERS / CHUNK];

// SAFETY: zero is a valid atomic.
unsafe impl Zeroable for Chunk {}
// SAFETY: null is a valid pointer.
unsafe impl Zeroable for Chunks {}

/// Finds the objects of one kind by number, in two levels.
struct Directory(Owned<Chunks>);

impl Directory {
    fn new() -> Result<Self> {
        Owned::zeroed().map(Self)
    }

    /// Returns the slot of a number that an object has.
    fn get(&self, number: u32) -> Option<&QpProgress> {
        self.slot(number).filter(|slot| slot.owner().load(Acquire) != 0)
    }

    /// Returns the slot of a number, if an object ever had a number of the same chunk.
    fn slot(&self, number: u32) -> Option<&QpProgress> {
        let index = number as usize;
        let chunk = NonNull::new(self.chunk(index)?.load(Acquire))?;
        // SAFETY: a chunk that is in the directory stays there, and is freed
        // with it.
        let chunk: &Chunk = unsafe { chunk.as_ref() };
        chunk.get(index % CHUNK)
    }

    fn chunk(&self, index: usize) -> Option<&AtomicPtr<Chunk>> {
        // SAFETY: the array lives as long as the directory, and its elements are atomics.
        let chunks: &Chunks = unsafe { &*self.0.as_ref().as_ptr() };
        chunks.get(index / CHUNK)
    }

    /// Returns the slot of a number, and allocates its chunk if there is none. The caller
    /// holds [`QpTable::registrations`].
    ///
    /// # Errors
    ///
    /// EINVAL for a number of more than 24 bits; ENOMEM.
    fn slot_or_new(&self, number: u32) -> Result<&QpProgress> {
        let chunk = self.chunk(number as usize).ok_or(Errno::EINVAL)?;
        if chunk.load(Relaxed).is_null() {
            chunk.store(Owned::<Chunk>::zeroed()?.into_raw(), Release);
        }
        self.slot(number).ok_or(Errno::EINVAL)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        for index in (0..NUMBERS).step_by(CHUNK) {
            let chunk = self.chunk(index).map_or(ptr::null_mut(), |chunk| chunk.load(Acquire));
            if !chunk.is_null() {
                // SAFETY: the chunk came from `slot_or_new`, and no object has a
                // number any more.
                drop(unsafe { Owned::from_raw(chunk) });
            }
        }
    }
}

/// The QPs of a context by number, and its SRQs for XRC, whose receives a QP of another program
/// may take.
pub struct QpTable {
    qps: Directory,
    srqs: Directory,
    /// Counts registrations. Held by whoever takes or gives back a number.
    registrations: Lock<u64>,
}

// SAFETY: each field is atomic or under a lock, and so is the memory that it points to.
unsafe impl Send for QpTable {}
// SAFETY: as above.
unsafe impl Sync for QpTable {}

impl QpTable {
    /// Returns an empty table.
    ///
    /// # Errors
    ///
    /// ENOMEM.
    pub fn new() -> Result<Self> {
        let (qps, srqs) = (Directory::new()?, Directory::new()?);
        Ok(Self { qps, srqs, registrations: Lock::new(0) })
    }

    /// Returns the progress of the QP that has a number.
    pub fn get(&self, number: u32) -> Option<&QpProgress> {
        self.qps.get(number)
    }

    /// Notes a completion, as [`QpProgress::complete`]. Returns false if it makes no sense, or
    /// belongs neither to a QP of the table nor to an SRQ for XRC.
    #[inline]
    pub fn complete(&self, cqe: &virtio_rdma_ring_cqe) -> bool {
        match u32::from_le(cqe.srqn) {
            0 => {
                let progress = self.qps.slot(u32::from_le(cqe.qp_num));
                progress.is_some_and(|progress| progress.complete(cqe))
            }
            srqn => is_receive(cqe) && self.srqs.get(srqn).is_some(),
        }
    }

    /// Returns the directory that has the owner's number, and the number.
    fn place(&self, owner: Owner) -> (&Directory, u32) {
        match owner {
            Owner::Qp(number) => (&self.qps, number),
            Owner::Srq(number) => (&self.srqs, number),
        }
    }

    /// Ends a registration: drops the CQEs of its QP or SRQ from their CQs. The caller
    /// holds [`Self::registrations`].
    fn retire(slot: &QpProgress, owner: Owner) {
        slot.send.polled.owner.store(0, Release);
        slot.recv.polled.owner.store(0, Release);
        // SAFETY: the CQs of a QP are live until ibv_destroy_qp() returns,
        // which needs the lock first: ibv_destroy_cq(3) refuses before. The same holds
        // for an SRQ for XRC.
        let (send_cq, recv_cq) = unsafe { slot.cqs() };
        cq_state::purge(send_cq, recv_cq, owner);
    }
}

/// Keeps the number of a QP or SRQ, from the reply to CREATE to that to DESTROY.
///
/// The kernel gives a number out again as soon as its QP is destroyed there.
/// Another thread may then register the number of a QP that this program has not finished
/// destroying. It purges that QP's CQEs first, before the new QP can have CQEs of its own.
pub struct Registration {
    table: NonNull<QpTable>,
    progress: NonNull<QpProgress>,
    owner: Owner,
    id: u64,
}

// SAFETY: any thread may use the table and the progress that it points to.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// Registers a QP that the kernel has created.
    ///
    /// The program keeps the context, which has the table, and the CQs until the QP is destroyed,
    /// as ibv_close_device(3) and ibv_destroy_cq(3) demand of it.
    ///
    /// # Errors
    ///
    /// ENOMEM; EINVAL for a number of more than 24 bits.
    pub fn new(
        table: &QpTable,
        number: u32,
        send_cq: &Lock<CqState>,
        recv_cq: &Lock<CqState>,
    ) -> Result<Self> {
        Self::of(table, Owner::Qp(number), send_cq, recv_cq)
    }

    /// Registers an SRQ for XRC that the kernel has created. The program keeps the context and
    /// the CQ, as for [`Self::new`].
    ///
    /// # Errors
    ///
    /// ENOMEM; EINVAL for 0 or a number of more than 24 bits.
    pub fn of_srq(table: &QpTable, number: u32, cq: &Lock<CqState>) -> Result<Self> {
        // A CQE that names SRQ 0 belongs to a QP.
        if number == 0 {
            return Err(Errno::EINVAL);
        }
        Self::of(table, Owner::Srq(number), cq, cq)
    }

    fn of(
        table: &QpTable,
        owner: Owner,
        send_cq: &Lock<CqState>,
        recv_cq: &Lock<CqState>,
    ) -> Result<Self> {
        let mut registrations = table.registrations.lock();
        let (directory, number) = table.place(owner);
        let slot = directory.slot_or_new(number)?;
        if slot.owner().load(Relaxed) != 0 {
            QpTable::retire(slot, owner);
        }
        *registrations += 1;
        slot.recv.register(*registrations, recv_cq);
        slot.send.register(*registrations, send_cq);
        Ok(Self { table: table.into(), progress: slot.into(), owner, id: *registrations })
    }

    /// Drops the CQEs of the QP, which is in RESET.
    pub fn reset(&self) {
        // SAFETY: the QP is live, and so are its CQs.
        let (send_cq, recv_cq) = unsafe { self.progress().cqs() };
        cq_state::purge(send_cq, recv_cq, self.owner);
        self.progress().reset();
    }

    /// Returns how far the QP's work requests are.
    pub fn progress(&self) -> &QpProgress {
        // SAFETY: the memory is freed with the table, which lives longer.
        unsafe { self.progress.as_ref() }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: the table lives longer.
        let table = unsafe { self.table.as_ref() };
        let _registrations = table.registrations.lock();
        let slot = self.progress();
        if slot.owner().load(Relaxed) == self.id {
            QpTable::retire(slot, self.owner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::offset_of;

    use crate::{
        cq_ring::CqRing,
        model::{
            device::{self, Completer},
            freed,
            objects::{self, Harness},
        },
    };

    fn complete(device: &mut Completer, harness: &Harness, numbers: &[u32]) {
        for (index, &qp_num) in numbers.iter().enumerate() {
            let wqe_index = index as u32;
            let cqe = virtio_rdma_ring_cqe { qp_num, wqe_index, ..Default::default() };
            assert!(device.complete_posted(&harness.table, cqe));
        }
    }

    fn poll(harness: &Harness) -> Vec<u32> {
        let mut state = harness.cq.as_ref().private().state().lock();
        device::poll(state.ring().unwrap(), &harness.table, 99).iter().map(|wc| wc.qp_num).collect()
    }

    /// Two threads that post and two that poll write to four cache lines.
    #[test]
    fn each_writer_has_a_line_of_its_own() {
        let line = |at: usize| at / 64;
        let (polled, posted) =
            (offset_of!(QueueProgress, polled), offset_of!(QueueProgress, posted));
        let lines = [offset_of!(QpProgress, send), offset_of!(QpProgress, recv)]
            .map(|side| [line(side + polled), line(side + posted)]);
        assert_eq!(lines, [[0, 1], [2, 3]]);
        assert_eq!((align_of::<QpProgress>(), size_of::<QpProgress>()), (64, 256));
    }

    #[test]
    fn every_number_has_a_place() {
        let numbers = [0, 1, 1023, 1024, 65537, (1 << 24) - 1];
        let harness = Harness::new(&numbers);
        for number in numbers {
            assert_eq!(harness.progress(number), (0, 0));
        }
        for number in [2, 1025, 1 << 24, u32::MAX] {
            assert!(harness.table.get(number).is_none());
        }
        let cq = harness.cq.as_ref().private().state();
        let result = Registration::new(&harness.table, 1 << 24, cq, cq);
        assert_eq!(result.err(), Some(Errno::EINVAL));
    }

    #[test]
    fn a_table_frees_its_chunks() {
        let mut harness = Harness::new(&[0, 1, 1024]);
        harness.registrations.clear();
        let before = freed::count();
        drop(harness.table);
        assert_eq!(freed::count() - before, 4, "two directories, and two chunks");
    }

    #[test]
    fn destroyed_qp_takes_its_completions_along() {
        let ring = CqRing::new(8).unwrap();
        let mut device = Completer::new(&ring);
        let mut harness = Harness::with_cq(&[3, 4], objects::cq(Some(ring)));
        complete(&mut device, &harness, &[3, 4, 4, 3]);
        drop(harness.registrations.remove(1));
        assert!(harness.table.get(4).is_none());
        assert_eq!(device.consumer(), 2, "the device may use the places of its CQEs");
        assert_eq!(poll(&harness), [3, 3]);
    }

    #[test]
    fn reset_qp_starts_at_zero() {
        let ring = CqRing::new(8).unwrap();
        let mut device = Completer::new(&ring);
        let harness = Harness::with_cq(&[3], objects::cq(Some(ring)));
        complete(&mut device, &harness, &[3, 3]);
        assert_eq!(poll(&harness), [3, 3]);
        assert_eq!(harness.progress(3), (2, 0));
        complete(&mut device, &harness, &[3]);
        harness.registrations[0].reset();
        assert_eq!(device.consumer(), 3);
        assert_eq!(poll(&harness), []);
        assert_eq!(harness.progress(3), (0, 0));
    }

    #[test]
    fn receives_of_xrc_are_their_srqs() {
        let ring = CqRing::new(8).unwrap();
        let mut device = Completer::new(&ring);
        let mut harness = Harness::with_cq(&[3], objects::cq(Some(ring)));
        let cq = harness.cq.as_ref().private().state();
        let srq = Registration::of_srq(&harness.table, 5, cq).unwrap();
        let receive = |qp_num, srqn| virtio_rdma_ring_cqe {
            qp_num,
            srqn,
            opcode: VIRTIO_RDMA_WC_RECV as u8,
            ..Default::default()
        };
        // CQEs of a target of another program, of one whose number a QP here has by now,
        // of an SRQ that is not in the table, and of a send.
        for (qp_num, srqn) in [(99, 5), (3, 5), (99, 6), (3, 6)] {
            assert!(device.complete(receive(qp_num, srqn)));
        }
        assert!(device.complete(virtio_rdma_ring_cqe { opcode: 0, ..receive(99, 5) }));
        assert_eq!(poll(&harness), [99, 3]);
        assert_eq!(harness.progress(3), (0, 0));
        // The CQEs stay when the QP is destroyed, and leave with the SRQ.
        device.complete(receive(3, 5));
        harness.registrations.clear();
        assert_eq!(poll(&harness), [3]);
        device.complete(receive(99, 5));
        drop(srq);
        assert_eq!(device.consumer(), 7);
        assert_eq!(poll(&harness), []);
        assert_eq!(Registration::of_srq(&harness.table, 0, cq).err(), Some(Errno::EINVAL));
    }

    #[test]
    fn number_given_out_again_before_its_qp_is_gone() {
        let ring = CqRing::new(8).unwrap();
        let mut device = Completer::new(&ring);
        let mut harness = Harness::with_cq(&[3], objects::cq(Some(ring)));
        complete(&mut device, &harness, &[3, 3]);
        let cq = harness.cq.as_ref().private().state();
        let next = Registration::new(&harness.table, 3, cq, cq).unwrap();
        complete(&mut device, &harness, &[3]);
        // The old registration ends without an effect.
        harness.registrations.clear();
        assert_eq!(poll(&harness), [3]);
        drop(next);
        assert!(harness.table.get(3).is_none());
    }
}
