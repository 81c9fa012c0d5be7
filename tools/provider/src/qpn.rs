// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The numbers of a context's QPs, and of its SRQs for XRC, and how far each QP's
//! work requests are done.
//!
//! A CQE names its QP by number, or its SRQ. What polling then writes stands here and not
//! in the QP, and is freed with the context: whatever number a CQE has, and
//! whatever another thread destroys meanwhile, polling finds valid memory and
//! takes no lock but the CQ's.

use crate::{
    atomic::AtomicU32,
    bindings::{VIRTIO_RDMA_WC_RECV, virtio_rdma_ring_cqe},
    cq,
    cq_ring::Owner,
    errno::{Errno, Result},
    lock::Lock,
    object::{Cq, Owned, Ref, Zeroable},
};
use core::{
    ptr::{self, NonNull},
    sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU64,
        Ordering::{Acquire, Relaxed, Release},
    },
};

/// QP numbers have 24 bits.
const NUMBERS: usize = 1 << 24;
/// Numbers of one chunk.
const CHUNK: usize = 1 << 8;

/// How far the work requests of a QP are done.
///
/// Threads that post sends, post receives and poll each CQ write to cache lines of their own.
#[repr(C)]
pub struct Progress {
    /// Its send queue.
    send: Side,
    /// Its receive queue.
    recv: Side,
}

/// How far the work requests of a queue are: numbers of them since RESET,
/// modulo 2^32. Those between the two are outstanding.
#[derive(Default)]
#[repr(C)]
pub struct Side {
    polled: Polled,
    posted: Posted,
}

/// What the thread that polls the CQ of a queue reads and writes, under the lock of the CQ.
#[derive(Default)]
#[repr(C, align(64))]
struct Polled {
    /// Work requests that are no longer outstanding.
    done: AtomicU32,
    /// Whether they are those of an SRQ.
    shared: AtomicBool,
    /// The registration of the QP that has the number, 0 for none.
    owner: AtomicU64,
    /// The CQ of the queue; as `owner`, written under [`Numbers::owners`].
    cq: AtomicPtr<Cq>,
}

/// What the thread that posts to a queue writes.
#[derive(Default)]
#[repr(C, align(64))]
struct Posted {
    /// Work requests that were posted. Written before the device hears of them.
    count: AtomicU32,
}

impl Side {
    /// Work requests that are no longer outstanding.
    pub fn done(&self) -> u32 {
        self.polled.done.load(Acquire)
    }

    /// Work requests were posted, `posted` so far.
    pub fn post(&self, posted: u32) {
        self.posted.count.store(posted, Release);
    }

    /// Notes that a work request, and all before it, are no longer outstanding.
    /// False, and nothing noted, if it is not: the index is the device's word.
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

    /// A new QP has the number, and this queue completes to `cq`. The caller holds
    /// [`Numbers::owners`].
    fn register(&self, owner: u64, cq: Ref<'_, Cq>) {
        self.reset();
        self.polled.shared.store(false, Relaxed);
        self.polled.cq.store(cq.as_ptr(), Relaxed);
        self.polled.owner.store(owner, Release);
    }

    /// Sets the number of those that are no longer outstanding.
    #[cfg(test)]
    pub fn set_done(&self, done: u32) {
        self.polled.done.store(done, Release);
    }

    /// Makes a work request one that is outstanding.
    #[cfg(test)]
    fn expect(&self, index: u32) {
        let posted = index.wrapping_add(1);
        if posted == self.done() {
            self.set_done(index);
        }
        self.post(posted);
    }
}

/// Whether a CQE is that of a receive.
fn is_receive(cqe: &virtio_rdma_ring_cqe) -> bool {
    u32::from(cqe.opcode) & VIRTIO_RDMA_WC_RECV != 0
}

impl Progress {
    /// The receives of the QP, which is new, are those of an SRQ.
    pub fn share_receives(&self) {
        self.recv.polled.shared.store(true, Relaxed);
    }

    /// The send queue.
    pub fn send(&self) -> &Side {
        &self.send
    }

    /// The receive queue.
    pub fn recv(&self) -> &Side {
        &self.recv
    }

    /// The queue that a CQE is of.
    fn side(&self, cqe: &virtio_rdma_ring_cqe) -> &Side {
        if is_receive(cqe) { &self.recv } else { &self.send }
    }

    /// Notes a completion: its work request, and all before it in the same
    /// queue, are no longer outstanding. False if it was not outstanding: the
    /// CQE makes no sense, or is one too many.
    ///
    /// The receives of an SRQ complete in any order, and nothing waits for
    /// that.
    pub fn complete(&self, cqe: &virtio_rdma_ring_cqe) -> bool {
        let side = self.side(cqe);
        side.polled.owner.load(Acquire) != 0
            && (side.polled.shared.load(Relaxed) || side.complete(u32::from_le(cqe.wqe_index)))
    }

    /// Makes the work request of a CQE one that is outstanding.
    #[cfg(test)]
    pub fn expect(&self, cqe: &virtio_rdma_ring_cqe) {
        self.side(cqe).expect(u32::from_le(cqe.wqe_index));
    }

    /// The CQs of the QP.
    ///
    /// # Safety
    ///
    /// They are live.
    unsafe fn cqs(&self) -> (Ref<'_, Cq>, Ref<'_, Cq>) {
        // SAFETY: by the contract of this function.
        unsafe {
            let cq = |side: &Side| Ref::new(side.polled.cq.load(Relaxed));
            (cq(&self.send), cq(&self.recv))
        }
    }

    /// Nothing was posted yet.
    fn reset(&self) {
        self.send.reset();
        self.recv.reset();
    }

    /// The registration of the QP that has the number, 0 for none.
    fn owner(&self) -> &AtomicU64 {
        &self.send.polled.owner
    }
}

type Chunk = [Progress; CHUNK];
type Places = [AtomicPtr<Chunk>; NUMBERS / CHUNK];

// SAFETY: zero is a valid atomic.
unsafe impl Zeroable for Chunk {}
// SAFETY: null is a valid pointer.
unsafe impl Zeroable for Places {}

/// The numbers of one kind of object.
struct Directory(Owned<Places>);

impl Directory {
    fn new() -> Result<Self> {
        Owned::zeroed().map(Self)
    }

    /// The place of a number that is taken.
    fn get(&self, number: u32) -> Option<&Progress> {
        self.slot(number).filter(|slot| slot.owner().load(Acquire) != 0)
    }

    /// The place of a number, if one of its chunk was ever taken.
    fn slot(&self, number: u32) -> Option<&Progress> {
        let index = number as usize;
        let chunk = NonNull::new(self.chunk(index)?.load(Acquire))?;
        // SAFETY: a chunk that is in the directory stays there, and is freed
        // with it.
        let chunk: &Chunk = unsafe { chunk.as_ref() };
        chunk.get(index % CHUNK)
    }

    fn chunk(&self, index: usize) -> Option<&AtomicPtr<Chunk>> {
        // SAFETY: the places are live, and their elements are atomics.
        let places: &Places = unsafe { &*self.0.as_ref().as_ptr() };
        places.get(index / CHUNK)
    }

    /// The place of a number, which gets its memory if it has none. The caller
    /// holds [`Numbers::owners`].
    fn slot_or_new(&self, number: u32) -> Result<&Progress> {
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
                // SAFETY: the chunk came from `slot_or_new`, and nobody has a
                // number any more.
                drop(unsafe { Owned::from_raw(chunk) });
            }
        }
    }
}

/// The numbers of a context: those of its QPs, and those of its SRQs for XRC, whose
/// receives a QP of another program may take.
pub struct Numbers {
    qps: Directory,
    srqs: Directory,
    /// Taken by those that take and give back numbers; counts registrations.
    owners: Lock<u64>,
}

// SAFETY: all of it is atomic or under a lock, and what it points to is.
unsafe impl Send for Numbers {}
// SAFETY: as above.
unsafe impl Sync for Numbers {}

impl Numbers {
    /// No numbers.
    ///
    /// # Errors
    ///
    /// ENOMEM.
    pub fn new() -> Result<Self> {
        Ok(Self { qps: Directory::new()?, srqs: Directory::new()?, owners: Lock::new(0) })
    }

    /// The progress of the QP that has a number.
    pub fn get(&self, number: u32) -> Option<&Progress> {
        self.qps.get(number)
    }

    /// Notes a completion, as [`Progress::complete`]; false if it makes no sense, or
    /// is of no QP here, nor of an SRQ for XRC.
    pub fn complete(&self, cqe: &virtio_rdma_ring_cqe) -> bool {
        match u32::from_le(cqe.srqn) {
            0 => {
                let progress = self.qps.slot(u32::from_le(cqe.qp_num));
                progress.is_some_and(|progress| progress.complete(cqe))
            }
            srqn => is_receive(cqe) && self.srqs.get(srqn).is_some(),
        }
    }

    /// Where the numbers of an owner's kind are, and which one is its.
    fn place(&self, owner: Owner) -> (&Directory, u32) {
        match owner {
            Owner::Qp(number) => (&self.qps, number),
            Owner::Srq(number) => (&self.srqs, number),
        }
    }

    /// Ends a registration: the CQEs of its QP or SRQ leave their CQs. The caller
    /// holds [`Self::owners`].
    fn retire(slot: &Progress, owner: Owner) {
        slot.send.polled.owner.store(0, Release);
        slot.recv.polled.owner.store(0, Release);
        // SAFETY: the CQs of a QP are live until ibv_destroy_qp() returns,
        // which needs the lock first: ibv_destroy_cq(3) refuses before. So it is
        // with an SRQ for XRC.
        let (send_cq, recv_cq) = unsafe { slot.cqs() };
        cq::purge(send_cq, recv_cq, owner);
    }
}

/// A QP's or SRQ's hold on its number, from the reply to CREATE to that to DESTROY.
///
/// The kernel gives a number out again as soon as its QP is destroyed there.
/// Another thread may so register the number of a QP that is on its way out;
/// it then purges that QP's CQEs first, before it can have any of its own.
pub struct Registration {
    numbers: NonNull<Numbers>,
    progress: NonNull<Progress>,
    owner: Owner,
    id: u64,
}

// SAFETY: what it points to may be used by any thread.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// Registers a QP that the kernel has created.
    ///
    /// The program keeps the context and the CQs until the QP is destroyed, as
    /// ibv_close_device(3) and ibv_destroy_cq(3) demand of it.
    ///
    /// # Errors
    ///
    /// ENOMEM; EINVAL for what is no QP number.
    pub fn new(
        numbers: &Numbers,
        number: u32,
        send_cq: Ref<'_, Cq>,
        recv_cq: Ref<'_, Cq>,
    ) -> Result<Self> {
        Self::of(numbers, Owner::Qp(number), send_cq, recv_cq)
    }

    /// Registers an SRQ for XRC that the kernel has created, as [`Self::new`].
    ///
    /// # Errors
    ///
    /// ENOMEM; EINVAL for what is no SRQ number.
    pub fn of_srq(numbers: &Numbers, number: u32, cq: Ref<'_, Cq>) -> Result<Self> {
        // What names none is a QP's.
        if number == 0 {
            return Err(Errno::EINVAL);
        }
        Self::of(numbers, Owner::Srq(number), cq, cq)
    }

    fn of(
        numbers: &Numbers,
        owner: Owner,
        send_cq: Ref<'_, Cq>,
        recv_cq: Ref<'_, Cq>,
    ) -> Result<Self> {
        let mut owners = numbers.owners.lock();
        let (directory, number) = numbers.place(owner);
        let slot = directory.slot_or_new(number)?;
        if slot.owner().load(Relaxed) != 0 {
            Numbers::retire(slot, owner);
        }
        *owners += 1;
        slot.recv.register(*owners, recv_cq);
        slot.send.register(*owners, send_cq);
        Ok(Self { numbers: numbers.into(), progress: slot.into(), owner, id: *owners })
    }

    /// Drops the CQEs of the QP, which is in RESET.
    pub fn reset(&self) {
        // SAFETY: the QP is live, and so are its CQs.
        let (send_cq, recv_cq) = unsafe { self.progress().cqs() };
        cq::purge(send_cq, recv_cq, self.owner);
        self.progress().reset();
    }

    /// How far the QP's work requests are done.
    pub fn progress(&self) -> &Progress {
        // SAFETY: the memory is freed with the numbers, which live longer.
        unsafe { self.progress.as_ref() }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: the numbers live longer.
        let numbers = unsafe { self.numbers.as_ref() };
        let _owners = numbers.owners.lock();
        let slot = self.progress();
        if slot.owner().load(Relaxed) == self.id {
            Numbers::retire(slot, self.owner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::offset_of;

    use crate::{
        cq_ring::CqRing,
        model::{self, Completer, Harness},
    };

    fn complete(device: &mut Completer, harness: &Harness, numbers: &[u32]) {
        for (index, &qp_num) in numbers.iter().enumerate() {
            let wqe_index = index as u32;
            let cqe = virtio_rdma_ring_cqe { qp_num, wqe_index, ..Default::default() };
            assert!(device.complete_posted(&harness.numbers, cqe));
        }
    }

    fn poll(harness: &Harness) -> Vec<u32> {
        let mut state = harness.cq.as_ref().private().state().lock();
        model::poll(state.ring().unwrap(), &harness.numbers, 99)
            .iter()
            .map(|wc| wc.qp_num)
            .collect()
    }

    /// Two that post and two that poll write to four cache lines.
    #[test]
    fn each_writer_has_a_line_of_its_own() {
        let line = |at: usize| at / 64;
        let (polled, posted) = (offset_of!(Side, polled), offset_of!(Side, posted));
        let lines = [offset_of!(Progress, send), offset_of!(Progress, recv)]
            .map(|side| [line(side + polled), line(side + posted)]);
        assert_eq!(lines, [[0, 1], [2, 3]]);
        assert_eq!((align_of::<Progress>(), size_of::<Progress>()), (64, 256));
    }

    #[test]
    fn every_number_has_a_place() {
        let numbers = [0, 1, 1023, 1024, 65537, (1 << 24) - 1];
        let harness = Harness::new(&numbers);
        for number in numbers {
            assert_eq!(harness.progress(number), (0, 0));
        }
        for number in [2, 1025, 1 << 24, u32::MAX] {
            assert!(harness.numbers.get(number).is_none());
        }
        let cq = harness.cq.as_ref();
        let result = Registration::new(&harness.numbers, 1 << 24, cq, cq);
        assert_eq!(result.err(), Some(Errno::EINVAL));
    }

    #[test]
    fn destroyed_qp_takes_its_completions_along() {
        let ring = CqRing::new(8).unwrap();
        let mut device = Completer::new(&ring);
        let mut harness = Harness::with_cq(&[3, 4], model::cq(Some(ring)));
        complete(&mut device, &harness, &[3, 4, 4, 3]);
        drop(harness.registrations.remove(1));
        assert!(harness.numbers.get(4).is_none());
        assert_eq!(poll(&harness), [3, 3]);
    }

    #[test]
    fn reset_qp_starts_anew() {
        let ring = CqRing::new(8).unwrap();
        let mut device = Completer::new(&ring);
        let harness = Harness::with_cq(&[3], model::cq(Some(ring)));
        complete(&mut device, &harness, &[3, 3]);
        assert_eq!(poll(&harness), [3, 3]);
        assert_eq!(harness.progress(3), (2, 0));
        complete(&mut device, &harness, &[3]);
        harness.registrations[0].reset();
        assert_eq!(poll(&harness), []);
        assert_eq!(harness.progress(3), (0, 0));
    }

    #[test]
    fn receives_of_xrc_are_their_srqs() {
        let ring = CqRing::new(8).unwrap();
        let mut device = Completer::new(&ring);
        let mut harness = Harness::with_cq(&[3], model::cq(Some(ring)));
        let cq = harness.cq.as_ref();
        let srq = Registration::of_srq(&harness.numbers, 5, cq).unwrap();
        let receive = |qp_num, srqn| virtio_rdma_ring_cqe {
            qp_num,
            srqn,
            opcode: VIRTIO_RDMA_WC_RECV as u8,
            ..Default::default()
        };
        // Of a target of another program, of one whose number is a QP's here by now,
        // of an SRQ that is none here, and a send.
        for (qp_num, srqn) in [(99, 5), (3, 5), (99, 6), (3, 6)] {
            assert!(device.complete(receive(qp_num, srqn)));
        }
        assert!(device.complete(virtio_rdma_ring_cqe { opcode: 0, ..receive(99, 5) }));
        assert_eq!(poll(&harness), [99, 3]);
        assert_eq!(harness.progress(3), (0, 0));
        // A QP that goes does not take them along, the SRQ does.
        device.complete(receive(3, 5));
        harness.registrations.clear();
        assert_eq!(poll(&harness), [3]);
        device.complete(receive(99, 5));
        drop(srq);
        assert_eq!(poll(&harness), []);
        assert_eq!(Registration::of_srq(&harness.numbers, 0, cq).err(), Some(Errno::EINVAL));
    }

    #[test]
    fn number_given_out_again_before_its_qp_is_gone() {
        let ring = CqRing::new(8).unwrap();
        let mut device = Completer::new(&ring);
        let mut harness = Harness::with_cq(&[3], model::cq(Some(ring)));
        complete(&mut device, &harness, &[3, 3]);
        let cq = harness.cq.as_ref();
        let next = Registration::new(&harness.numbers, 3, cq, cq).unwrap();
        complete(&mut device, &harness, &[3]);
        // The old one no longer has a say.
        harness.registrations.clear();
        assert_eq!(poll(&harness), [3]);
        drop(next);
        assert!(harness.numbers.get(3).is_none());
    }
}
