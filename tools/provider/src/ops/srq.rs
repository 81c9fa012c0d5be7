// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The entry points of shared receive queues.

use super::answer::{created, destroyed, posted};
use crate::{
    bindings::*,
    cmd,
    errno::code,
    object::Ref,
    post,
    srq::{self, Srq},
    wr::List,
};
use core::ffi::c_int;

pub(super) unsafe extern "C" fn create_srq(
    pd: *mut ibv_pd,
    attr: *mut ibv_srq_init_attr,
) -> *mut ibv_srq {
    // SAFETY: the program passes a live PD and valid attributes.
    let (pd, attr) = unsafe { (Ref::new(pd), &mut *attr) };
    created(srq::create(pd, attr))
}

pub(super) unsafe extern "C" fn create_srq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    // SAFETY: libibverbs passes a live context, and the program valid attributes.
    let (context, attr) = unsafe { (Ref::new(context), &mut *attr) };
    created(srq::create_ex(context, attr))
}

pub(super) unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, number: *mut u32) -> c_int {
    // SAFETY: the SRQ is live, and the first member of an object that `create_srq` or
    // `create_srq_ex` made; the program lends the number.
    let (srq, to) = unsafe { (Ref::new(srq.cast()), &mut *number) };
    code(srq::number(srq).map(|number| *to = number))
}

pub(super) unsafe extern "C" fn modify_srq(
    srq: *mut ibv_srq,
    attr: *mut ibv_srq_attr,
    attr_mask: c_int,
) -> c_int {
    // SAFETY: the SRQ is live, and the first member of an object that `create_srq` made; the
    // attributes are valid.
    let (srq, attr) = unsafe { (Ref::new(srq.cast()), &mut *attr) };
    code(srq::modify(srq, attr, attr_mask))
}

pub(super) unsafe extern "C" fn query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    // SAFETY: the SRQ is live, and the first member of an object that `create_srq` made; the
    // program lends the attributes.
    let (srq, attr) = unsafe { (Ref::new(srq.cast()), &mut *attr) };
    code(srq::query(srq, attr))
}

pub(super) unsafe extern "C" fn destroy_srq(srq: *mut ibv_srq) -> c_int {
    // SAFETY: the SRQ is live, and the first member of an object that `create_srq` or
    // `create_srq_ex` made.
    unsafe { destroyed(srq.cast::<Srq>(), |srq| cmd::srq::destroy(srq.srq())) }
}

pub(super) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the SRQ is live, and the first member of an object that `create_srq` made; the list
    // is as ibv_post_srq_recv(3) describes it.
    unsafe { posted(post::srq_recv(Ref::new(srq.cast()), List::new(wr)), bad_wr) }
}

#[cfg(test)]
mod tests {
    use crate::ops::testbed::*;
    use std::vec;

    /// Attributes that no SRQ has, or that are missing, end in an error, and no command is sent.
    #[test]
    fn attributes_that_cannot_be() {
        let p = Program::new();
        let srq = |attr: ibv_srq_init_attr_ex| {
            refusal(call!(RINGS.create_srq_ex(p.context, &mut { attr })))
        };
        let good = p.init_xrc();
        for (attr, errno) in [
            (ibv_srq_init_attr_ex { srq_type: IBV_SRQT_BASIC, ..good }, Errno::EOPNOTSUPP),
            (ibv_srq_init_attr_ex { srq_type: IBV_SRQT_TM, ..good }, Errno::EOPNOTSUPP),
            (
                ibv_srq_init_attr_ex { comp_mask: good.comp_mask | IBV_SRQ_INIT_ATTR_TM, ..good },
                Errno::EOPNOTSUPP,
            ),
            (ibv_srq_init_attr_ex { pd: ptr::null_mut(), ..good }, Errno::EINVAL),
            (ibv_srq_init_attr_ex { xrcd: ptr::null_mut(), ..good }, Errno::EINVAL),
            (ibv_srq_init_attr_ex { cq: ptr::null_mut(), ..good }, Errno::EINVAL),
            (
                ibv_srq_init_attr_ex { comp_mask: good.comp_mask & !IBV_SRQ_INIT_ATTR_CQ, ..good },
                Errno::EINVAL,
            ),
            (
                ibv_srq_init_attr_ex {
                    comp_mask: good.comp_mask & !IBV_SRQ_INIT_ATTR_TYPE,
                    ..good
                },
                Errno::EOPNOTSUPP,
            ),
        ] {
            assert_eq!(srq(attr), Some(errno));
        }
        let mut attr = ibv_srq_init_attr::default();
        assert_eq!(refusal(call!(RINGS.create_srq(p.pd, &mut attr))), Some(Errno::EINVAL));
        assert_eq!(p.kernel.names(), []);
    }

    /// An SRQ for XRC has the number that the kernel gave it; other SRQs do not have a number. An SRQ
    /// with an invalid number is destroyed again.
    #[test]
    fn numbers_of_srqs() {
        let p = Program::new();
        let mut number = 0;
        assert_eq!(call!(RINGS.get_srq_num(p.srq, &mut number)), EOPNOTSUPP as c_int);
        p.kernel.answer(UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM, 9u32);
        let srq = call!(RINGS.create_srq_ex(p.context, &mut p.init_xrc()));
        assert_eq!((call!(RINGS.get_srq_num(srq, &mut number)), number), (0, 9));
        // SAFETY: the SRQ is live.
        assert_eq!(unsafe { (*srq).pd }, p.pd);
        // Its receives are known by its number, whatever QP took them.
        let mut device = p.completer();
        for srqn in [9, 10] {
            let opcode = VIRTIO_RDMA_WC_RECV as u8;
            device.complete(virtio_rdma_ring_cqe { srqn, opcode, ..Default::default() });
        }
        assert_eq!(p.poll(), 1);
        assert_eq!(call!(RINGS.destroy_srq(srq)), 0);
        p.kernel.take();
        for number in [0, 1 << 24] {
            p.kernel.answer(UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM, number);
            let srq = call!(RINGS.create_srq_ex(p.context, &mut p.init_xrc()));
            assert_eq!(refusal(srq), Some(Errno::EINVAL));
            assert_eq!(p.kernel.names(), [NEW_SRQ, END[6]]);
        }
        p.kernel.answer(UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, 1u32 << 24);
        assert_eq!(refusal(call!(COMMON.create_qp(p.pd, &mut p.init()))), Some(Errno::EINVAL));
        assert_eq!(p.kernel.names(), [NEW_QP, END[5]]);
        p.kernel.fail(ENOMEM);
        let srq = call!(RINGS.create_srq_ex(p.context, &mut p.init_xrc()));
        assert_eq!((refusal(srq), p.kernel.names()), (Some(Errno::ENOMEM), vec![NEW_SRQ]));
    }
}
