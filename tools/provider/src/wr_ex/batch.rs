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
        wr_ex::bench::*,
    };
    use core::{ffi::c_void, mem::offset_of, sync::atomic::Ordering::SeqCst};
    use std::ptr;

    /// Each work request has its own `wr_id`, flags and data. The device is told of all of them at
    /// the end; until then no other thread has the send queue.
    #[test]
    fn a_batch() {
        let bench = Bench::new(IBV_QPT_RC);
        bench.start();
        for n in 0..u64::from(DEPTH) {
            bench.set(n, if n % 2 == 0 { 0 } else { IBV_SEND_SIGNALED });
            call!(bench, wr_rdma_write, n as u32, n + 1);
            call!(bench, wr_set_sge, n as u32 + 2, n + 3, n as u32 + 4);
            assert!(!bench.is_open());
        }
        assert_eq!(bench.told(), 0);
        assert_eq!(bench.complete(), 0);
        assert!(bench.is_open());
        assert_eq!(bench.told(), DEPTH);
        for n in 0..DEPTH {
            let wqe: virtio_rdma_ring_sq_wqe = bench.read(n, 0);
            assert_eq!((wqe.wr_id, wqe.rkey, wqe.remote_addr), (n.into(), n, u64::from(n) + 1));
            assert_eq!(u32::from(wqe.send_flags), n % 2 * IBV_SEND_SIGNALED);
            let got: virtio_rdma_sge = bench.read(n, size_of_val(&wqe));
            assert_eq!((got.lkey, got.addr, got.length), (n + 2, u64::from(n) + 3, n + 4));
        }
    }

    /// ibv_wr_complete(3) returns the error of a call that failed, and no work request is posted.
    #[test]
    fn errors_come_at_the_end() {
        let bench = Bench::new(IBV_QPT_RC);
        let einval = Errno::EINVAL;
        let list = [sge(1), sge(2), sge(3)];
        let data = [0u8; 41];
        let at: *mut c_void = data.as_ptr().cast_mut().cast();
        bench.refused(|| call!(bench, wr_set_sge_list, 3, list.as_ptr()), einval);
        bench.refused(|| call!(bench, wr_set_inline_data, at, 41), einval);
        let buffers = [buffer(&data[..21]), buffer(&data[..20])];
        bench.refused(|| call!(bench, wr_set_inline_data_list, 2, buffers.as_ptr()), einval);
        let twice = || {
            call!(bench, wr_set_sge, 1, 2, 3);
            call!(bench, wr_set_inline_data, at, 1);
        };
        bench.refused(twice, einval);
        let flags = || {
            bench.set(1, IBV_SEND_IP_CSUM);
            call!(bench, wr_send);
        };
        bench.refused(flags, einval);
        bench.refused(|| call!(bench, wr_set_ud_addr, ptr::null_mut(), 1, 2), einval);
        bench.refused(|| (0..DEPTH.into()).for_each(|id| bench.send(id)), Errno::ENOMEM);
        let read = || {
            call!(bench, wr_rdma_read, 1, 2);
            call!(bench, wr_set_inline_data, at, 8);
        };
        bench.refused(read, einval);
        let invalidate = || {
            call!(bench, wr_flush, 1, 2, 3, 1, 0);
            call!(bench, wr_set_sge, 1, 2, 3);
        };
        if bench.has(IBV_WR_FLUSH) {
            bench.refused(invalidate, einval);
        }
        // The first error counts.
        let both = || {
            (0..DEPTH.into()).for_each(|id| bench.send(id));
            call!(bench, wr_set_sge_list, 3, list.as_ptr());
        };
        bench.refused(both, Errno::ENOMEM);
    }

    /// A setter, or a builder of another type of QP, does not make a work request.
    #[test]
    fn calls_out_of_place() {
        let bench = Bench::new(IBV_QPT_RC);
        let data = [0u8; 8];
        type Call<'a> = &'a dyn Fn();
        let calls: [Call<'_>; 5] = [
            &|| call!(bench, wr_set_sge, 1, 2, 3),
            &|| call!(bench, wr_set_sge_list, 0, ptr::null()),
            &|| call!(bench, wr_set_inline_data, data.as_ptr().cast_mut().cast(), 8),
            &|| call!(bench, wr_set_xrc_srqn, 1),
            &|| call!(bench, wr_set_ud_addr, address(1).into_raw().cast(), 1, 2),
        ];
        for call in calls {
            bench.start();
            call();
            assert_eq!((bench.complete(), bench.told()), (EINVAL as c_int, 0));
        }
        let datagrams = Bench::new(IBV_QPT_UD);
        datagrams.start();
        call!(datagrams, wr_rdma_read, 1, 2);
        assert_eq!((datagrams.complete(), datagrams.told()), (EINVAL as c_int, 0));
        // Each datagram needs its own destination, and each message of XRC its own SRQ.
        for qp_type in [IBV_QPT_UD, IBV_QPT_XRC_SEND] {
            let bench = Bench::new(qp_type);
            bench.start();
            for set in [true, false] {
                bench.send(1);
                if set && qp_type == IBV_QPT_UD {
                    call!(bench, wr_set_ud_addr, address(1).into_raw().cast(), 1, 2);
                } else if set {
                    call!(bench, wr_set_xrc_srqn, 1);
                }
            }
            assert_eq!((bench.complete(), bench.told()), (EINVAL as c_int, 0));
        }
    }

    /// No work request is posted after ibv_wr_abort(3), after an error or without one, and the send
    /// queue is free.
    #[test]
    fn abort() {
        let bench = Bench::new(IBV_QPT_RC);
        let list = [sge(1); 3];
        for with_error in [false, true] {
            bench.start();
            (0..DEPTH.into()).for_each(|id| bench.send(id));
            if with_error {
                call!(bench, wr_set_sge_list, 3, list.as_ptr());
            }
            assert!(!bench.is_open());
            call!(bench, wr_abort);
            assert!(bench.is_open());
            assert_eq!(bench.told(), 0);
        }
        bench.start();
        (10..10 + u64::from(DEPTH)).for_each(|id| bench.send(id));
        assert_eq!((bench.complete(), bench.told()), (0, DEPTH));
        let ids: Vec<u64> = (0..DEPTH).map(|index| bench.read(index, 0)).collect();
        assert_eq!(ids, [10, 11, 12, 13]);
        // A work request that was begun does not end up in the next batch.
        bench.set_done(DEPTH);
        bench.start();
        bench.send(20);
        call!(bench, wr_set_sge, 1, 2, 3);
        call!(bench, wr_abort);
        bench.start();
        assert_eq!((bench.complete(), bench.told()), (0, DEPTH));
    }

    /// A QP that is not in a state to send refuses all work requests at the end.
    #[test]
    fn a_state_that_cannot_send() {
        let bench = Bench::new(IBV_QPT_RC);
        bench.start();
        bench.send(1);
        objects::set_state(&bench.qp, IBV_QPS_INIT);
        assert_eq!((bench.complete(), bench.told()), (EINVAL as c_int, 0));
        objects::set_state(&bench.qp, IBV_QPS_RTS);
        assert!(bench.is_open());
        assert_eq!(bench.posted::<u64>(|| bench.send(2)), 2);
    }

    /// ibv_wr_complete(3) rings the doorbell of a device that sleeps once. Work requests that are
    /// refused or aborted do not ring it.
    #[test]
    fn one_doorbell_for_a_batch() {
        let context = objects::context();
        let kernel = Box::<Kernel>::default();
        let bench = Bench::new(IBV_QPT_RC);
        objects::qp_of(&bench.qp, &context, &kernel);
        let memory = bench.memory();
        let asleep = || memory.word(offset_of!(virtio_rdma_qp_ring, sq_wake));
        asleep().store(1, SeqCst);
        bench.start();
        (0..2).for_each(|id| bench.send(id));
        call!(bench, wr_abort);
        let csum = || {
            bench.set(1, IBV_SEND_IP_CSUM);
            call!(bench, wr_send);
        };
        bench.start();
        csum();
        assert_eq!((bench.complete(), kernel.take_rung()), (EINVAL as c_int, 0));
        bench.start();
        assert_eq!((bench.complete(), kernel.take_rung()), (0, 0));
        bench.start();
        (0..2).for_each(|id| bench.send(id));
        assert_eq!((bench.complete(), kernel.take_rung()), (0, 1));
        bench.start();
        bench.send(3);
        assert_eq!((bench.complete(), kernel.take_rung()), (0, 0));
        // A device that is gone.
        asleep().store(1, SeqCst);
        kernel.fail(1, EIO);
        bench.start();
        bench.send(4);
        assert_eq!(bench.complete(), EIO as c_int);
        assert!(bench.is_open());
    }
}
