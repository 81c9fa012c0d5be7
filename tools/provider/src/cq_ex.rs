// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The entry points of `struct ibv_cq_ex` (rdma-core libibverbs/verbs.h), by
//! which a program polls one completion at a time and reads what it wants of it:
//! ibv_create_cq_ex(3).
//!
//! As in [`crate::ops`], the program's contract vouches for the pointers. It also
//! says that a program calls all functions but ibv_start_poll() in the thread whose ibv_start_poll()
//! succeeded last, and before that thread's ibv_end_poll().
//!
//! Between these two calls the thread has the lock of the CQ. It does not wait for itself when it
//! arms or resizes the CQ meanwhile, or destroys a QP. (Where two threads destroy QPs, one of them
//! between the two calls, each may wait for the other, as with other providers.)

use crate::{
    bindings::*,
    cq::{self, Cq},
    cq_state::{CqState, Poll},
    errno::{Errno, Result, code},
    lock::Lock,
    object::Ref,
};
use core::ffi::{c_int, c_uint};

/// Installs the functions of an extended CQ.
///
/// # Safety
///
/// The CQ is an extended one, and nobody else uses it yet.
pub unsafe fn install(cq: Ref<'_, Cq>) {
    let ex = cq.verbs().as_ptr().cast::<ibv_cq_ex>();
    // SAFETY: the CQ is the caller's alone; its union holds a `struct
    // ibv_cq_ex`, which begins with the CQ.
    unsafe {
        (*ex).start_poll = Some(start_poll);
        (*ex).next_poll = Some(next_poll);
        (*ex).end_poll = Some(end_poll);
        (*ex).read_opcode = Some(read_opcode);
        (*ex).read_vendor_err = Some(read_vendor_err);
        (*ex).read_byte_len = Some(read_byte_len);
        (*ex).read_imm_data = Some(read_imm_data);
        (*ex).read_qp_num = Some(read_qp_num);
        (*ex).read_src_qp = Some(read_src_qp);
        (*ex).read_wc_flags = Some(read_wc_flags);
        (*ex).read_slid = Some(read_slid);
        (*ex).read_sl = Some(read_sl);
        (*ex).read_dlid_path_bits = Some(read_dlid_path_bits);
        (*ex).read_completion_ts = Some(read_completion_ts);
        (*ex).read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
    }
}

/// Returns a CQ and its lock.
///
/// # Safety
///
/// The CQ is live and one of [`install`].
unsafe fn lock<'a>(cq: *mut ibv_cq_ex) -> (Ref<'a, Cq>, &'a Lock<CqState>) {
    // SAFETY: the CQ is live, and the first member of an object that `create_cq_ex` made.
    let cq: Ref<'a, Cq> = unsafe { Ref::new(cq.cast()) };
    (cq, cq.private().state())
}

/// Returns the completion that was taken last.
fn wc(poll: &Poll) -> &ibv_wc {
    // SAFETY: it is never uninitialised.
    unsafe { poll.wc.assume_init_ref() }
}

/// Takes the next completion, and sets the fields that the program reads itself.
///
/// # Safety
///
/// `at` and `cq` are one CQ, whose lock the calling thread has.
unsafe fn take(at: *mut ibv_cq_ex, cq: Ref<'_, Cq>, state: &mut CqState) -> Result {
    cq::next(cq, state)?;
    let wc = wc(&state.poll);
    // SAFETY: only the thread that has the lock uses the fields.
    unsafe {
        (*at).wr_id = wc.wr_id;
        (*at).status = wc.status;
    }
    Ok(())
}

/// Reads a field of the completion that the calling thread took last.
///
/// # Safety
///
/// The CQ is live and one of [`install`]; the calling thread's ibv_start_poll() succeeded, and it
/// did not call ibv_end_poll() since.
unsafe fn read<T>(cq: *mut ibv_cq_ex, read: impl FnOnce(&Poll) -> T) -> T {
    // SAFETY: this thread's ibv_start_poll() succeeded, and kept the guard.
    let state = unsafe { lock(cq).1.kept() };
    let value = read(&state.poll);
    state.keep();
    value
}

unsafe extern "C" fn start_poll(at: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: the program passes a live CQ and valid attributes.
    let ((cq, lock), mask) = unsafe { (lock(at), (*attr).comp_mask) };
    if mask != 0 {
        return Errno::EINVAL.get();
    }
    let mut state = lock.lock();
    // SAFETY: this thread has the lock.
    let result = unsafe { take(at, cq, &mut state) };
    if result.is_ok() {
        state.keep_open();
    }
    code(result)
}

unsafe extern "C" fn next_poll(at: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the program passes a live CQ.
    let (cq, lock) = unsafe { lock(at) };
    // SAFETY: this thread's ibv_start_poll() kept the guard.
    let mut state = unsafe { lock.kept() };
    // SAFETY: this thread has the lock.
    let result = unsafe { take(at, cq, &mut state) };
    state.keep();
    code(result)
}

unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: this thread's ibv_start_poll() succeeded, and kept the guard.
    drop(unsafe { lock(cq).1.reclaim() });
}

unsafe extern "C" fn read_opcode(cq: *mut ibv_cq_ex) -> ibv_wc_opcode {
    // SAFETY: this thread's ibv_start_poll() succeeded.
    unsafe { read(cq, |poll| wc(poll).opcode) }
}

unsafe extern "C" fn read_vendor_err(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: this thread's ibv_start_poll() succeeded.
    unsafe { read(cq, |poll| wc(poll).vendor_err) }
}

unsafe extern "C" fn read_byte_len(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: this thread's ibv_start_poll() succeeded.
    unsafe { read(cq, |poll| wc(poll).byte_len) }
}

/// Reads immediate data; ibv_wc_read_invalidated_rkey() calls this as well.
unsafe extern "C" fn read_imm_data(cq: *mut ibv_cq_ex) -> __be32 {
    // SAFETY: this thread's ibv_start_poll() succeeded; both variants are integers of one size.
    unsafe { read(cq, |poll| wc(poll).__bindgen_anon_1.imm_data) }
}

unsafe extern "C" fn read_qp_num(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: this thread's ibv_start_poll() succeeded.
    unsafe { read(cq, |poll| wc(poll).qp_num) }
}

unsafe extern "C" fn read_src_qp(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: this thread's ibv_start_poll() succeeded.
    unsafe { read(cq, |poll| wc(poll).src_qp) }
}

unsafe extern "C" fn read_wc_flags(cq: *mut ibv_cq_ex) -> c_uint {
    // SAFETY: this thread's ibv_start_poll() succeeded.
    unsafe { read(cq, |poll| wc(poll).wc_flags) }
}

unsafe extern "C" fn read_slid(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: this thread's ibv_start_poll() succeeded.
    unsafe { read(cq, |poll| wc(poll).slid.into()) }
}

unsafe extern "C" fn read_sl(cq: *mut ibv_cq_ex) -> u8 {
    // SAFETY: this thread's ibv_start_poll() succeeded.
    unsafe { read(cq, |poll| wc(poll).sl) }
}

unsafe extern "C" fn read_dlid_path_bits(cq: *mut ibv_cq_ex) -> u8 {
    // SAFETY: this thread's ibv_start_poll() succeeded.
    unsafe { read(cq, |poll| wc(poll).dlid_path_bits) }
}

unsafe extern "C" fn read_completion_ts(cq: *mut ibv_cq_ex) -> u64 {
    // SAFETY: this thread's ibv_start_poll() succeeded.
    unsafe { read(cq, |poll| poll.device_time) }
}

unsafe extern "C" fn read_completion_wallclock_ns(cq: *mut ibv_cq_ex) -> u64 {
    // SAFETY: this thread's ibv_start_poll() succeeded.
    unsafe { read(cq, |poll| poll.wallclock) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cq_ring::CqRing,
        model::{device::Completer, objects},
        object::Owned,
        qp_table::Registration,
    };

    const QPN: u32 = 5;

    /// An extended CQ, a QP that completes to it, and the device.
    struct Testbed {
        device: Completer,
        registration: Option<Registration>,
        cq: Owned<Cq>,
        context: objects::TestContext,
    }

    impl Testbed {
        fn new(depth: u32, flags: u32) -> Self {
            let context = objects::context();
            let cq = objects::cq_ex(CqRing::new(depth).unwrap(), flags, &context);
            let mut testbed = Self { device: Completer::of(&cq), registration: None, cq, context };
            testbed.registration = Some(testbed.register(QPN));
            testbed
        }

        fn register(&self, number: u32) -> Registration {
            let table = self.context.as_ref().private().qp_table.as_ref().unwrap();
            let cq = self.cq.as_ref().private().state();
            Registration::new(table, number, cq, cq).unwrap()
        }

        /// Completes a work request of a QP. Returns whether there was room for the CQE.
        fn complete(&mut self, cqe: virtio_rdma_ring_cqe) -> bool {
            let table = self.context.as_ref().private().qp_table.as_ref().unwrap();
            let wqe_index = self.device.producer;
            self.device.complete_posted(table, virtio_rdma_ring_cqe { wqe_index, ..cqe })
        }

        fn complete_next(&mut self) -> bool {
            let wr_id = self.device.producer.into();
            self.complete(virtio_rdma_ring_cqe { wr_id, qp_num: QPN, ..Default::default() })
        }

        fn ex(&self) -> *mut ibv_cq_ex {
            self.cq.as_ref().as_ptr().cast()
        }

        fn start(&self) -> c_int {
            // SAFETY: as ibv_create_cq_ex(3) has it, here and below.
            unsafe { (*self.ex()).start_poll.unwrap()(self.ex(), &mut Default::default()) }
        }

        fn next(&self) -> c_int {
            // SAFETY: see above.
            unsafe { (*self.ex()).next_poll.unwrap()(self.ex()) }
        }

        fn end(&self) {
            // SAFETY: see above.
            unsafe { (*self.ex()).end_poll.unwrap()(self.ex()) }
        }

        fn wr_id(&self) -> u64 {
            // SAFETY: see above.
            unsafe { (*self.ex()).wr_id }
        }

        /// Returns whether another thread can use the CQ.
        fn is_open(&self) -> bool {
            !self.cq.as_ref().private().state().is_taken()
        }
    }

    #[test]
    fn each_completion_once_and_in_order() {
        let mut testbed = Testbed::new(32, 0);
        let mut expected = 0;
        for round in 0..100 {
            assert_eq!(testbed.start(), Errno::ENOENT.get());
            let count = 1 + round % 32;
            (0..count).for_each(|_| assert!(testbed.complete_next()));
            assert_eq!((testbed.start(), testbed.wr_id()), (0, expected));
            for wr_id in expected + 1..expected + count {
                assert_eq!((testbed.next(), testbed.wr_id()), (0, wr_id));
            }
            assert_eq!(testbed.next(), Errno::ENOENT.get());
            testbed.end();
            expected += count;
        }
    }

    /// A work request may be posted, and complete, as soon as the completion of another was read,
    /// in a CQ that has as many CQEs as there are work requests.
    #[test]
    fn completions_make_room_before_the_end() {
        let mut testbed = Testbed::new(4, 0);
        (0..4).for_each(|_| assert!(testbed.complete_next()));
        assert!(!testbed.complete_next());
        assert_eq!(testbed.start(), 0);
        for wr_id in 0..100 {
            assert_eq!(testbed.wr_id(), wr_id);
            assert!(testbed.complete_next());
            assert!(!testbed.complete_next());
            assert_eq!(testbed.next(), 0);
        }
        testbed.end();
    }

    /// A thread has the CQ from the first completion to ibv_end_poll(), and does not have it if
    /// there is no completion.
    #[test]
    fn one_thread_from_start_to_end() {
        let mut testbed = Testbed::new(4, 0);
        assert_eq!(testbed.start(), Errno::ENOENT.get());
        assert!(testbed.is_open());
        // SAFETY: as ibv_create_cq_ex(3) has it.
        let unknown = unsafe {
            let mut attr = ibv_poll_cq_attr { comp_mask: 1 };
            (*testbed.ex()).start_poll.unwrap()(testbed.ex(), &mut attr)
        };
        assert_eq!(unknown, Errno::EINVAL.get());
        assert!(testbed.complete_next() && testbed.complete_next());
        assert_eq!(testbed.start(), 0);
        assert_eq!((testbed.next(), testbed.next()), (0, Errno::ENOENT.get()));
        assert!(!testbed.is_open());
        testbed.end();
        assert!(testbed.is_open());
    }

    /// The thread that polls arms the CQ and destroys a QP meanwhile. It continues with the CQEs that
    /// are still in the CQ.
    #[test]
    fn no_wait_for_oneself() {
        let mut testbed = Testbed::new(8, 0);
        let other = testbed.register(9);
        for qp_num in [QPN, 9, QPN, 9] {
            let wr_id = qp_num.into();
            assert!(testbed.complete(virtio_rdma_ring_cqe { wr_id, qp_num, ..Default::default() }));
        }
        assert_eq!((testbed.start(), testbed.wr_id()), (0, QPN.into()));
        assert_eq!(cq::req_notify(testbed.cq.as_ref(), false), Ok(()));
        assert!(testbed.device.event(false));
        drop(other);
        assert_eq!((testbed.next(), testbed.wr_id()), (0, QPN.into()));
        assert_eq!(testbed.next(), Errno::ENOENT.get());
        testbed.end();
        assert!(testbed.is_open());
    }

    #[test]
    fn a_device_that_is_gone() {
        let mut testbed = Testbed::new(4, 0);
        assert!(testbed.complete_next());
        testbed.device.close();
        assert_eq!((testbed.start(), testbed.next()), (0, Errno::EIO.get()));
        testbed.end();
        assert_eq!(testbed.start(), Errno::EIO.get());
        assert!(testbed.is_open());
    }

    #[test]
    fn what_the_program_reads() {
        let stamps =
            IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
        for flags in [0, stamps] {
            let mut testbed = Testbed::new(4, flags);
            assert!(testbed.complete(virtio_rdma_ring_cqe {
                wr_id: 1,
                status: 10,
                opcode: 128,
                sl: 3,
                vendor_err: 4,
                byte_len: 5,
                ex: virtio_rdma_ring_cqe__bindgen_ty_1 { imm_data: 6 },
                qp_num: QPN,
                src_qp: 8,
                wc_flags: VIRTIO_RDMA_WC_GRH | VIRTIO_RDMA_WC_WITH_IMM,
                ..Default::default()
            }));
            assert_eq!(testbed.start(), 0);
            let at = testbed.ex();
            // SAFETY: as ibv_create_cq_ex(3) has it.
            unsafe {
                let cq = &*at;
                assert_eq!((cq.wr_id, cq.status), (1, IBV_WC_REM_ACCESS_ERR));
                assert_eq!(cq.read_opcode.unwrap()(at), IBV_WC_RECV);
                assert_eq!(cq.read_vendor_err.unwrap()(at), 4);
                assert_eq!(cq.read_byte_len.unwrap()(at), 5);
                assert_eq!(cq.read_imm_data.unwrap()(at), 6);
                assert_eq!(cq.read_qp_num.unwrap()(at), QPN);
                assert_eq!(cq.read_src_qp.unwrap()(at), 8);
                assert_eq!(cq.read_wc_flags.unwrap()(at), IBV_WC_GRH | IBV_WC_WITH_IMM);
                assert_eq!(cq.read_sl.unwrap()(at), 3);
                assert_eq!(cq.read_slid.unwrap()(at), 0);
                assert_eq!(cq.read_dlid_path_bits.unwrap()(at), 0);
                assert_eq!(cq.read_completion_ts.unwrap()(at) != 0, flags != 0);
                assert_eq!(cq.read_completion_wallclock_ns.unwrap()(at) != 0, flags != 0);
            }
            testbed.end();
        }
    }
}
