// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Entry points that begin a work request, one for each operation.

use super::current::with;
use crate::{
    bindings::*,
    wqe::{Body, Flush},
    wr::{Atomic, Rdma, named_bind},
};
use core::ffi::c_void;

/// The operands of a work request: the remote side, and those of an atomic.
type Operands = ibv_send_wr__bindgen_ty_2;

/// Begins a work request; `ex` is immediate data or a key to invalidate.
///
/// # Safety
///
/// As [`with`].
unsafe fn begin(qp: *mut ibv_qp_ex, opcode: ibv_wr_opcode, ex: u32, wr: Operands) {
    // SAFETY: the program has set both, and does not write to them now.
    let (wr_id, send_flags) = unsafe { ((*qp).wr_id, (*qp).wr_flags) };
    let wr = ibv_send_wr {
        wr_id,
        opcode,
        send_flags,
        __bindgen_anon_1: ibv_send_wr__bindgen_ty_1 { imm_data: ex },
        wr,
        ..Default::default()
    };
    // SAFETY: this thread called ibv_wr_start().
    unsafe { with(qp, |builder| builder.begin(wr)) };
}

/// Returns the operands of a work request that has none.
fn nothing() -> Operands {
    rdma(0, 0)
}

/// Returns the operands of an RDMA operation.
fn rdma(rkey: u32, remote_addr: u64) -> Operands {
    Operands { rdma: Rdma { remote_addr, rkey } }
}

pub(super) unsafe extern "C" fn wr_send(qp: *mut ibv_qp_ex) {
    // SAFETY: this thread called ibv_wr_start().
    unsafe { begin(qp, IBV_WR_SEND, 0, nothing()) };
}

pub(super) unsafe extern "C" fn wr_send_imm(qp: *mut ibv_qp_ex, imm_data: __be32) {
    // SAFETY: this thread called ibv_wr_start().
    unsafe { begin(qp, IBV_WR_SEND_WITH_IMM, imm_data, nothing()) };
}

pub(super) unsafe extern "C" fn wr_rdma_write(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    // SAFETY: this thread called ibv_wr_start().
    unsafe { begin(qp, IBV_WR_RDMA_WRITE, 0, rdma(rkey, remote_addr)) };
}

pub(super) unsafe extern "C" fn wr_rdma_write_imm(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    imm_data: __be32,
) {
    // SAFETY: this thread called ibv_wr_start().
    unsafe { begin(qp, IBV_WR_RDMA_WRITE_WITH_IMM, imm_data, rdma(rkey, remote_addr)) };
}

pub(super) unsafe extern "C" fn wr_rdma_read(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    // SAFETY: this thread called ibv_wr_start().
    unsafe { begin(qp, IBV_WR_RDMA_READ, 0, rdma(rkey, remote_addr)) };
}

pub(super) unsafe extern "C" fn wr_atomic_cmp_swp(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    compare: u64,
    swap: u64,
) {
    let atomic = Atomic { remote_addr, compare_add: compare, swap, rkey };
    // SAFETY: this thread called ibv_wr_start().
    unsafe { begin(qp, IBV_WR_ATOMIC_CMP_AND_SWP, 0, Operands { atomic }) };
}

pub(super) unsafe extern "C" fn wr_atomic_fetch_add(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    add: u64,
) {
    let atomic = Atomic { remote_addr, compare_add: add, swap: 0, rkey };
    // SAFETY: this thread called ibv_wr_start().
    unsafe { begin(qp, IBV_WR_ATOMIC_FETCH_AND_ADD, 0, Operands { atomic }) };
}

pub(super) unsafe extern "C" fn wr_atomic_write(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    atomic_wr: *const c_void,
) {
    // SAFETY: the program lends 8 bytes.
    let word = unsafe { atomic_wr.cast::<[u8; 8]>().read_unaligned() };
    // SAFETY: this thread called ibv_wr_start().
    unsafe {
        begin(qp, IBV_WR_ATOMIC_WRITE, 0, rdma(rkey, remote_addr));
        with(qp, |builder| builder.set_body(|| Ok(Body::Word(word))));
    }
}

pub(super) unsafe extern "C" fn wr_flush(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    length: usize,
    placement: u8,
    level: u8,
) {
    let remote = Rdma { remote_addr, rkey };
    let flush = Flush { remote, length: length as u64, placement, level };
    // SAFETY: this thread called ibv_wr_start().
    unsafe {
        begin(qp, IBV_WR_FLUSH, 0, nothing());
        with(qp, |builder| builder.set_body(|| Ok(Body::Flush(flush))));
    }
}

pub(super) unsafe extern "C" fn wr_local_inv(qp: *mut ibv_qp_ex, invalidate_rkey: u32) {
    // SAFETY: this thread called ibv_wr_start().
    unsafe { begin(qp, IBV_WR_LOCAL_INV, invalidate_rkey, nothing()) };
}

pub(super) unsafe extern "C" fn wr_send_inv(qp: *mut ibv_qp_ex, invalidate_rkey: u32) {
    // SAFETY: this thread called ibv_wr_start().
    unsafe { begin(qp, IBV_WR_SEND_WITH_INV, invalidate_rkey, nothing()) };
}

pub(super) unsafe extern "C" fn wr_bind_mw(
    qp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    bind_info: *const ibv_mw_bind_info,
) {
    // SAFETY: this thread called ibv_wr_start().
    unsafe { begin(qp, IBV_WR_BIND_MW, 0, nothing()) };
    // The closure does not run after an error: the window keeps its key then.
    // SAFETY: the program names a live window and MR, and lends the structure.
    let bind = || unsafe { named_bind(mw, rkey, &*bind_info) }.map(Body::Bind);
    // SAFETY: this thread called ibv_wr_start().
    unsafe { with(qp, |builder| builder.set_body(bind)) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{errno::Errno, model::send_queue::DEPTH, object::Owned, wr_ex::testbed::*};
    use core::ffi::c_int;
    use std::ptr;

    const FLAGS: u32 = IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED;

    /// Each builder makes the work request that its name says, with the program's `wr_id`, flags
    /// and operands, each in its place.
    #[test]
    fn each_builder() {
        type Build = fn(&Testbed);
        type Expected = (ibv_wr_opcode, u32, u32, u64, u64, u64);
        let testbed = Testbed::new(IBV_QPT_RC);
        let (rkey, remote) = (0x1111_2222, 0x3333_4444_5555_6666);
        let builders: [(Build, Expected); 10] = [
            (|b| call!(b, wr_send), (IBV_WR_SEND, 0, 0, 0, 0, 0)),
            (
                |b| call!(b, wr_send_imm, 0x0102_0304),
                (IBV_WR_SEND_WITH_IMM, 0x0102_0304, 0, 0, 0, 0),
            ),
            (
                |b| call!(b, wr_send_inv, 0x0a0b_0c0d),
                (IBV_WR_SEND_WITH_INV, 0x0a0b_0c0d, 0, 0, 0, 0),
            ),
            (|b| call!(b, wr_local_inv, 0x0a0b_0c0d), (IBV_WR_LOCAL_INV, 0x0a0b_0c0d, 0, 0, 0, 0)),
            (
                |b| call!(b, wr_rdma_write, 0x1111_2222, 0x3333_4444_5555_6666),
                (IBV_WR_RDMA_WRITE, 0, rkey, remote, 0, 0),
            ),
            (
                |b| call!(b, wr_rdma_write_imm, 0x1111_2222, 0x3333_4444_5555_6666, 7),
                (IBV_WR_RDMA_WRITE_WITH_IMM, 7, rkey, remote, 0, 0),
            ),
            (
                |b| call!(b, wr_rdma_read, 0x1111_2222, 0x3333_4444_5555_6666),
                (IBV_WR_RDMA_READ, 0, rkey, remote, 0, 0),
            ),
            (
                |b| call!(b, wr_atomic_cmp_swp, 0x1111_2222, 0x3333_4444_5555_6666, 8, 9),
                (IBV_WR_ATOMIC_CMP_AND_SWP, 0, rkey, remote, 8, 9),
            ),
            (
                |b| call!(b, wr_atomic_fetch_add, 0x1111_2222, 0x3333_4444_5555_6666, 8),
                (IBV_WR_ATOMIC_FETCH_AND_ADD, 0, rkey, remote, 8, 0),
            ),
            (
                |b| {
                    // At an odd address, as the program may have it anywhere.
                    let word = [0, 1, 2, 3, 4, 5, 6, 7, 8u8];
                    let at = word[1..].as_ptr().cast();
                    call!(b, wr_atomic_write, 0x1111_2222, 0x3333_4444_5555_6666, at);
                },
                (IBV_WR_ATOMIC_WRITE, 0, rkey, remote, 0x0807_0605_0403_0201, 0),
            ),
        ];
        for (wr_id, (build, expected)) in (1 << 40..).zip(builders) {
            if !testbed.has(expected.0) {
                continue;
            }
            let wqe: virtio_rdma_ring_sq_wqe = testbed.posted(|| {
                testbed.set(wr_id, FLAGS);
                build(&testbed);
            });
            // SAFETY: both are integers of one size.
            let ex = unsafe { wqe.ex.imm_data };
            let operands = (wqe.rkey, wqe.remote_addr, wqe.compare_add, wqe.swap);
            let (opcode, expected_ex, rkey, remote, compare_add, swap) = expected;
            assert_eq!((wqe.wr_id, u32::from(wqe.opcode)), (wr_id, opcode));
            assert_eq!((ex, u32::from(wqe.send_flags)), (expected_ex, FLAGS), "{opcode}");
            assert_eq!(operands, (rkey, remote, compare_add, swap), "{opcode}");
            assert_eq!((wqe.num_sge, wqe.inline_len), (0, 0));
        }
    }

    #[test]
    fn flushes() {
        let testbed = Testbed::new(IBV_QPT_RC);
        if !testbed.has(IBV_WR_FLUSH) {
            return;
        }
        let wqe: virtio_rdma_ring_flush_wqe = testbed.posted(|| {
            testbed.set(1 << 40, FLAGS);
            call!(testbed, wr_flush, 2, 3 << 40, 4 << 40, 5, 1);
        });
        assert_eq!((wqe.wr_id, u32::from(wqe.opcode)), (1 << 40, IBV_WR_FLUSH));
        assert_eq!((wqe.rkey, wqe.remote_addr, wqe.length), (2, 3 << 40, 4 << 40));
        assert_eq!((wqe.type_, wqe.level, u32::from(wqe.send_flags)), (5, 1, FLAGS));
    }

    /// A window and the MR that it is bound to.
    fn window(rkey: u32) -> (Owned<ibv_mw>, Owned<verbs_mr>) {
        let (mw, mr) = (Owned::<ibv_mw>::zeroed().unwrap(), Owned::<verbs_mr>::zeroed().unwrap());
        mw.as_ref().set_rkey(rkey);
        // SAFETY: the MR is live.
        unsafe { (*mr.as_ref().as_ptr()).ibv_mr.lkey = 0x77 };
        (mw, mr)
    }

    /// A binding names its window by the key that it has, the MR by its lkey, and the window has
    /// the new key from then on.
    #[test]
    fn windows_are_bound() {
        let testbed = Testbed::new(IBV_QPT_RC);
        let (mw, mr) = window(0x5ff);
        let info = ibv_mw_bind_info {
            mr: mr.as_ref().as_ptr().cast(),
            addr: 8 << 40,
            length: 9 << 40,
            mw_access_flags: IBV_ACCESS_REMOTE_READ | IBV_ACCESS_ZERO_BASED,
        };
        let wqe: virtio_rdma_ring_bind_wqe = testbed.posted(|| {
            testbed.set(1 << 40, IBV_SEND_SIGNALED);
            call!(testbed, wr_bind_mw, mw.as_ref().as_ptr(), 0xabcd_ef12, &info);
        });
        assert_eq!((wqe.wr_id, u32::from(wqe.opcode)), (1 << 40, IBV_WR_BIND_MW));
        assert_eq!((wqe.mw_rkey, wqe.new_rkey, wqe.lkey), (0x5ff, 0x512, 0x77));
        assert_eq!((wqe.addr, wqe.length, wqe.access), (8 << 40, 9 << 40, info.mw_access_flags));
        assert_eq!(mw.as_ref().rkey(), 0x512);
        let none = ptr::null_mut();
        testbed.refused(|| call!(testbed, wr_bind_mw, none, 1, &info), Errno::EINVAL);
        let nowhere = ibv_mw_bind_info { mr: ptr::null_mut(), ..info };
        let mw = mw.as_ref();
        testbed.refused(|| call!(testbed, wr_bind_mw, mw.as_ptr(), 1, &nowhere), Errno::EINVAL);
        assert_eq!(mw.rkey(), 0x512);
    }

    /// A call that comes behind an error has no effect, and so a window keeps its key: no work
    /// request will change it.
    #[test]
    fn a_window_that_is_not_bound_keeps_its_key() {
        let testbed = Testbed::new(IBV_QPT_RC);
        let (mw, mr) = window(0x5ff);
        let info =
            ibv_mw_bind_info { mr: mr.as_ref().as_ptr().cast(), length: 8, ..Default::default() };
        let bind = || call!(testbed, wr_bind_mw, mw.as_ref().as_ptr(), 1, &info);
        let behind_an_error = || {
            testbed.set(1, IBV_SEND_IP_CSUM);
            call!(testbed, wr_send);
            bind();
        };
        testbed.refused(behind_an_error, Errno::EINVAL);
        assert_eq!(mw.as_ref().rkey(), 0x5ff);
        // Its own flags, a queue that is full, or one that binds nothing.
        let flags = || {
            testbed.set(1, IBV_SEND_IP_CSUM);
            bind();
        };
        testbed.refused(flags, Errno::EINVAL);
        let full = || {
            (1..DEPTH.into()).for_each(|id| testbed.send(id));
            bind();
        };
        testbed.refused(full, Errno::ENOMEM);
        assert_eq!(mw.as_ref().rkey(), 0x5ff);
        let datagrams = Testbed::new(IBV_QPT_UD);
        datagrams.start();
        call!(datagrams, wr_bind_mw, mw.as_ref().as_ptr(), 1, &info);
        assert_eq!((datagrams.complete(), mw.as_ref().rkey()), (EINVAL as c_int, 0x5ff));
    }
}
