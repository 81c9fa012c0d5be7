// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The entry points of `struct ibv_cq_ex` (rdma-core libibverbs/verbs.h), by
//! which a program polls one completion at a time and reads what it wants of it:
//! ibv_create_cq_ex(3).
//!
//! As in [`crate::ops`], the program's contract vouches for the pointers. It also
//! says that all but ibv_start_poll() come from the thread whose ibv_start_poll()
//! succeeded last, and before its ibv_end_poll().

use crate::{
    bindings::*,
    cq::{self, Poll},
    errno::{Errno, Result, code},
    lock::Lock,
    object::{Cq, Ref},
};
use core::ffi::{c_int, c_uint};

/// Makes a CQ an extended one.
///
/// # Safety
///
/// `cq` is a CQ with a [`Poll`] that nobody else uses yet.
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

/// The lock of what the program reads of a completion.
///
/// # Safety
///
/// See the head of this file.
unsafe fn lock<'a>(cq: *mut ibv_cq_ex) -> (Ref<'a, Cq>, Option<&'a Lock<Poll>>) {
    // SAFETY: the CQ is the first member of what `create_cq_ex` made.
    let cq: Ref<'a, Cq> = unsafe { Ref::new(cq.cast()) };
    (cq, cq.private().poll())
}

/// The completion that was taken last.
fn wc(poll: &Poll) -> &ibv_wc {
    // SAFETY: it is never uninitialised.
    unsafe { poll.wc.assume_init_ref() }
}

/// Takes the next completion, and shows the program what it reads itself.
///
/// # Safety
///
/// See the head of this file.
unsafe fn take(at: *mut ibv_cq_ex, cq: Ref<'_, Cq>, poll: &mut Poll) -> Result {
    cq::next(cq, poll)?;
    let wc = wc(poll);
    // SAFETY: the fields are the polling thread's.
    unsafe {
        (*at).wr_id = wc.wr_id;
        (*at).status = wc.status;
    }
    Ok(())
}

/// Reads something of the completion that the calling thread took last.
///
/// # Safety
///
/// See the head of this file.
unsafe fn read<T: Default>(cq: *mut ibv_cq_ex, read: impl FnOnce(&Poll) -> T) -> T {
    // SAFETY: by the contract of this function.
    let Some(lock) = (unsafe { lock(cq) }).1 else { return T::default() };
    // SAFETY: this thread's ibv_start_poll() kept the guard.
    let poll = unsafe { lock.kept() };
    let value = read(&poll);
    poll.keep();
    value
}

unsafe extern "C" fn start_poll(at: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: see the head of this file.
    let ((cq, lock), mask) = unsafe { (lock(at), (*attr).comp_mask) };
    let Some(lock) = lock else { return Errno::EOPNOTSUPP.get() };
    if mask != 0 {
        return Errno::EINVAL.get();
    }
    let mut poll = lock.lock();
    // SAFETY: this thread has the lock.
    let result = unsafe { take(at, cq, &mut poll) };
    if result.is_ok() {
        poll.keep();
    }
    code(result)
}

unsafe extern "C" fn next_poll(at: *mut ibv_cq_ex) -> c_int {
    // SAFETY: see the head of this file.
    let (cq, Some(lock)) = (unsafe { lock(at) }) else { return Errno::EOPNOTSUPP.get() };
    // SAFETY: this thread's ibv_start_poll() kept the guard.
    let mut poll = unsafe { lock.kept() };
    // SAFETY: this thread has the lock.
    let result = unsafe { take(at, cq, &mut poll) };
    poll.keep();
    code(result)
}

unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: see the head of this file.
    if let Some(lock) = (unsafe { lock(cq) }).1 {
        // SAFETY: this thread's ibv_start_poll() kept the guard.
        drop(unsafe { lock.kept() });
    }
}

unsafe extern "C" fn read_opcode(cq: *mut ibv_cq_ex) -> ibv_wc_opcode {
    // SAFETY: see the head of this file.
    unsafe { read(cq, |poll| wc(poll).opcode) }
}

unsafe extern "C" fn read_vendor_err(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: see the head of this file.
    unsafe { read(cq, |poll| wc(poll).vendor_err) }
}

unsafe extern "C" fn read_byte_len(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: see the head of this file.
    unsafe { read(cq, |poll| wc(poll).byte_len) }
}

/// Also what ibv_wc_read_invalidated_rkey() calls.
unsafe extern "C" fn read_imm_data(cq: *mut ibv_cq_ex) -> __be32 {
    // SAFETY: see the head of this file; both variants are integers of one size.
    unsafe { read(cq, |poll| wc(poll).__bindgen_anon_1.imm_data) }
}

unsafe extern "C" fn read_qp_num(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: see the head of this file.
    unsafe { read(cq, |poll| wc(poll).qp_num) }
}

unsafe extern "C" fn read_src_qp(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: see the head of this file.
    unsafe { read(cq, |poll| wc(poll).src_qp) }
}

unsafe extern "C" fn read_wc_flags(cq: *mut ibv_cq_ex) -> c_uint {
    // SAFETY: see the head of this file.
    unsafe { read(cq, |poll| wc(poll).wc_flags) }
}

unsafe extern "C" fn read_slid(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: see the head of this file.
    unsafe { read(cq, |poll| wc(poll).slid.into()) }
}

unsafe extern "C" fn read_sl(cq: *mut ibv_cq_ex) -> u8 {
    // SAFETY: see the head of this file.
    unsafe { read(cq, |poll| wc(poll).sl) }
}

unsafe extern "C" fn read_dlid_path_bits(cq: *mut ibv_cq_ex) -> u8 {
    // SAFETY: see the head of this file.
    unsafe { read(cq, |poll| wc(poll).dlid_path_bits) }
}

unsafe extern "C" fn read_completion_ts(cq: *mut ibv_cq_ex) -> u64 {
    // SAFETY: see the head of this file.
    unsafe { read(cq, |poll| poll.device_time) }
}

unsafe extern "C" fn read_completion_wallclock_ns(cq: *mut ibv_cq_ex) -> u64 {
    // SAFETY: see the head of this file.
    unsafe { read(cq, |poll| poll.wallclock) }
}
