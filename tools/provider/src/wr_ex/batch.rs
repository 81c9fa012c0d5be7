// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Entry points that begin and end a batch of work requests.

use super::current::builder;
use crate::{
    bindings::ibv_qp_ex,
    errno::{Errno, code},
    object::Ref,
    qp::Qp,
    wr_builder::WrBuilder,
};
use core::ffi::c_int;

pub(super) unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: the QP is the first member of an object that `create_qp_ex` made.
    let qp: Ref<'_, Qp> = unsafe { Ref::new(qp.cast()) };
    if let Some(rings) = qp.private().rings() {
        let mut builder = WrBuilder::new(qp, rings, rings.send().state().lock());
        builder.start();
        builder.keep();
    }
}

pub(super) unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: this thread called ibv_wr_start().
    code(unsafe { builder(qp) }.map_or(Err(Errno::EOPNOTSUPP), WrBuilder::complete))
}

pub(super) unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    // SAFETY: this thread called ibv_wr_start().
    if let Some(builder) = unsafe { builder(qp) } {
        builder.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        bindings::*,
        model::{kernel::Kernel, objects, send_queue::DEPTH},
        wr_ex::testbed::*,
    };
    use core::{ffi::c_void, mem::offset_of, sync::atomic::Ordering::SeqCst};
    use std::ptr;

    /// Each work request has its own `wr_id`, flags and data. The device is told of all of them at
    /// the end; until then no other thread has the send queue.
    #[test]
    fn a_batch() {
        let testbed = Testbed::new(IBV_QPT_RC);
        testbed.start();
        for n in 0..u64::from(DEPTH) {
            testbed.set(n, if n % 2 == 0 { 0 } else { IBV_SEND_SIGNALED });
            call!(testbed, wr_rdma_write, n as u32, n + 1);
            call!(testbed, wr_set_sge, n as u32 + 2, n + 3, n as u32 + 4);
            assert!(!testbed.is_open());
        }
        assert_eq!(testbed.told(), 0);
        assert_eq!(testbed.complete(), 0);
        assert!(testbed.is_open());
        assert_eq!(testbed.told(), DEPTH);
        for n in 0..DEPTH {
            let wqe: virtio_rdma_ring_sq_wqe = testbed.read(n, 0);
            assert_eq!((wqe.wr_id, wqe.rkey, wqe.remote_addr), (n.into(), n, u64::from(n) + 1));
            assert_eq!(u32::from(wqe.send_flags), n % 2 * IBV_SEND_SIGNALED);
            let got: virtio_rdma_sge = testbed.read(n, size_of_val(&wqe));
            assert_eq!((got.lkey, got.addr, got.length), (n + 2, u64::from(n) + 3, n + 4));
        }
    }

    /// ibv_wr_complete(3) returns the error of a call that failed, and no work request is posted.
    #[test]
    fn errors_come_at_the_end() {
        let testbed = Testbed::new(IBV_QPT_RC);
        let einval = Errno::EINVAL;
        let list = [sge(1), sge(2), sge(3)];
        let data = [0u8; 41];
        let at: *mut c_void = data.as_ptr().cast_mut().cast();
        testbed.refused(|| call!(testbed, wr_set_sge_list, 3, list.as_ptr()), einval);
        testbed.refused(|| call!(testbed, wr_set_inline_data, at, 41), einval);
        let buffers = [buffer(&data[..21]), buffer(&data[..20])];
        testbed.refused(|| call!(testbed, wr_set_inline_data_list, 2, buffers.as_ptr()), einval);
        let twice = || {
            call!(testbed, wr_set_sge, 1, 2, 3);
            call!(testbed, wr_set_inline_data, at, 1);
        };
        testbed.refused(twice, einval);
        let flags = || {
            testbed.set(1, IBV_SEND_IP_CSUM);
            call!(testbed, wr_send);
        };
        testbed.refused(flags, einval);
        testbed.refused(|| call!(testbed, wr_set_ud_addr, ptr::null_mut(), 1, 2), einval);
        testbed.refused(|| (0..DEPTH.into()).for_each(|id| testbed.send(id)), Errno::ENOMEM);
        let read = || {
            call!(testbed, wr_rdma_read, 1, 2);
            call!(testbed, wr_set_inline_data, at, 8);
        };
        testbed.refused(read, einval);
        let invalidate = || {
            call!(testbed, wr_flush, 1, 2, 3, 1, 0);
            call!(testbed, wr_set_sge, 1, 2, 3);
        };
        if testbed.has(IBV_WR_FLUSH) {
            testbed.refused(invalidate, einval);
        }
        // The first error counts.
        let both = || {
            (0..DEPTH.into()).for_each(|id| testbed.send(id));
            call!(testbed, wr_set_sge_list, 3, list.as_ptr());
        };
        testbed.refused(both, Errno::ENOMEM);
    }

    /// A setter, or a builder of another type of QP, does not make a work request.
    #[test]
    fn calls_out_of_place() {
        let testbed = Testbed::new(IBV_QPT_RC);
        let data = [0u8; 8];
        type Call<'a> = &'a dyn Fn();
        let calls: [Call<'_>; 5] = [
            &|| call!(testbed, wr_set_sge, 1, 2, 3),
            &|| call!(testbed, wr_set_sge_list, 0, ptr::null()),
            &|| call!(testbed, wr_set_inline_data, data.as_ptr().cast_mut().cast(), 8),
            &|| call!(testbed, wr_set_xrc_srqn, 1),
            &|| call!(testbed, wr_set_ud_addr, address(1).into_raw().cast(), 1, 2),
        ];
        for call in calls {
            testbed.start();
            call();
            assert_eq!((testbed.complete(), testbed.told()), (EINVAL as c_int, 0));
        }
        let datagrams = Testbed::new(IBV_QPT_UD);
        datagrams.start();
        call!(datagrams, wr_rdma_read, 1, 2);
        assert_eq!((datagrams.complete(), datagrams.told()), (EINVAL as c_int, 0));
        // Each datagram needs its own destination, and each message of XRC its own SRQ.
        for qp_type in [IBV_QPT_UD, IBV_QPT_XRC_SEND] {
            let testbed = Testbed::new(qp_type);
            testbed.start();
            for set in [true, false] {
                testbed.send(1);
                if set && qp_type == IBV_QPT_UD {
                    call!(testbed, wr_set_ud_addr, address(1).into_raw().cast(), 1, 2);
                } else if set {
                    call!(testbed, wr_set_xrc_srqn, 1);
                }
            }
            assert_eq!((testbed.complete(), testbed.told()), (EINVAL as c_int, 0));
        }
    }

    /// No work request is posted after ibv_wr_abort(3), after an error or without one, and the send
    /// queue is free.
    #[test]
    fn abort() {
        let testbed = Testbed::new(IBV_QPT_RC);
        let list = [sge(1); 3];
        for with_error in [false, true] {
            testbed.start();
            (0..DEPTH.into()).for_each(|id| testbed.send(id));
            if with_error {
                call!(testbed, wr_set_sge_list, 3, list.as_ptr());
            }
            assert!(!testbed.is_open());
            call!(testbed, wr_abort);
            assert!(testbed.is_open());
            assert_eq!(testbed.told(), 0);
        }
        testbed.start();
        (10..10 + u64::from(DEPTH)).for_each(|id| testbed.send(id));
        assert_eq!((testbed.complete(), testbed.told()), (0, DEPTH));
        let ids: Vec<u64> = (0..DEPTH).map(|index| testbed.read(index, 0)).collect();
        assert_eq!(ids, [10, 11, 12, 13]);
        // A work request that was begun does not end up in the next batch.
        testbed.set_done(DEPTH);
        testbed.start();
        testbed.send(20);
        call!(testbed, wr_set_sge, 1, 2, 3);
        call!(testbed, wr_abort);
        testbed.start();
        assert_eq!((testbed.complete(), testbed.told()), (0, DEPTH));
    }

    /// A QP that is not in a state to send refuses all work requests at the end.
    #[test]
    fn a_state_that_cannot_send() {
        let testbed = Testbed::new(IBV_QPT_RC);
        testbed.start();
        testbed.send(1);
        objects::set_state(&testbed.qp, IBV_QPS_INIT);
        assert_eq!((testbed.complete(), testbed.told()), (EINVAL as c_int, 0));
        objects::set_state(&testbed.qp, IBV_QPS_RTS);
        assert!(testbed.is_open());
        assert_eq!(testbed.posted::<u64>(|| testbed.send(2)), 2);
    }

    /// ibv_wr_complete(3) rings the doorbell of a device that sleeps once. Work requests that are
    /// refused or aborted do not ring it.
    #[test]
    fn one_doorbell_for_a_batch() {
        let context = objects::context();
        let kernel = Box::<Kernel>::default();
        let testbed = Testbed::new(IBV_QPT_RC);
        objects::qp_of(&testbed.qp, &context, &kernel);
        let memory = testbed.memory();
        let asleep = || memory.word(offset_of!(virtio_rdma_qp_ring, sq_wake));
        asleep().store(1, SeqCst);
        testbed.start();
        (0..2).for_each(|id| testbed.send(id));
        call!(testbed, wr_abort);
        let csum = || {
            testbed.set(1, IBV_SEND_IP_CSUM);
            call!(testbed, wr_send);
        };
        testbed.start();
        csum();
        assert_eq!((testbed.complete(), kernel.take_rung()), (EINVAL as c_int, 0));
        testbed.start();
        assert_eq!((testbed.complete(), kernel.take_rung()), (0, 0));
        testbed.start();
        (0..2).for_each(|id| testbed.send(id));
        assert_eq!((testbed.complete(), kernel.take_rung()), (0, 1));
        testbed.start();
        testbed.send(3);
        assert_eq!((testbed.complete(), kernel.take_rung()), (0, 0));
        // A device that is gone.
        asleep().store(1, SeqCst);
        kernel.fail(1, EIO);
        testbed.start();
        testbed.send(4);
        assert_eq!(testbed.complete(), EIO as c_int);
        assert!(testbed.is_open());
    }
}
