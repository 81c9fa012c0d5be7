// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The entry points of queue pairs.

use super::answer::{created, destroyed, posted};
use crate::{
    bindings::*,
    cmd,
    errno::code,
    libibverbs::library,
    object::Ref,
    post,
    qp::{self, Qp},
    wr::List,
    wr_ex,
};
use core::ffi::c_int;

pub(super) unsafe extern "C" fn create_qp(
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    // SAFETY: the program passes a live PD and valid attributes.
    let (pd, attr) = unsafe { (Ref::new(pd), &mut *attr) };
    created(qp::create(pd, attr))
}

pub(super) unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: libibverbs passes a live context, and the program valid attributes.
    let (context, attr) = unsafe { (Ref::new(context), &mut *attr) };
    if attr.qp_type == IBV_QPT_XRC_RECV {
        return created(qp::create_xrc_target(context, attr));
    }
    // SAFETY: the PD of valid attributes is live, or null; `create_ex` ignores it unless the mask
    // names it.
    let pd = unsafe { Ref::optional(attr.pd) };
    let result = qp::create_ex(context, pd, attr).map(|(qp, by_calls)| {
        if by_calls {
            // SAFETY: the QP has rings, and nobody else has it yet.
            unsafe { wr_ex::install(qp.as_ref(), library(context.as_ptr())) };
        }
        qp
    });
    created(result)
}

pub(super) unsafe extern "C" fn open_qp(
    context: *mut ibv_context,
    attr: *mut ibv_qp_open_attr,
) -> *mut ibv_qp {
    // SAFETY: libibverbs passes a live context, and the program valid attributes.
    let (context, attr) = unsafe { (Ref::new(context), &mut *attr) };
    created(qp::open(context, attr))
}

pub(super) unsafe extern "C" fn modify_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    attr_mask: c_int,
) -> c_int {
    // SAFETY: the QP is live, and the first member of an object that `create_qp` made; the
    // attributes are valid.
    let (qp, attr) = unsafe { (Ref::new(qp.cast()), &mut *attr) };
    code(qp::modify(qp, attr, attr_mask))
}

pub(super) unsafe extern "C" fn query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    attr_mask: c_int,
    init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the QP is live, and the first member of an object that `create_qp` made; the program
    // lends both structures.
    let (qp, attr, init) = unsafe { (Ref::new(qp.cast()), &mut *attr, &mut *init_attr) };
    code(qp::query(qp, attr, attr_mask, init))
}

pub(super) unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: the QP is live, and the first member of an object that `create_qp`, `create_qp_ex` or
    // `open_qp` made.
    unsafe { destroyed(qp.cast::<Qp>(), |qp| cmd::qp::destroy(qp.qp())) }
}

pub(super) unsafe extern "C" fn attach_mcast(
    qp: *mut ibv_qp,
    gid: *const ibv_gid,
    lid: u16,
) -> c_int {
    // SAFETY: the program passes a live QP and a GID.
    code(unsafe { cmd::qp::attach_mcast(Ref::new(qp), &*gid, lid) })
}

pub(super) unsafe extern "C" fn detach_mcast(
    qp: *mut ibv_qp,
    gid: *const ibv_gid,
    lid: u16,
) -> c_int {
    // SAFETY: the program passes a live QP and a GID.
    code(unsafe { cmd::qp::detach_mcast(Ref::new(qp), &*gid, lid) })
}

pub(super) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the QP is live, and the first member of an object that `create_qp` made; the list is
    // as ibv_post_send(3) describes it.
    unsafe { posted(post::send(Ref::new(qp.cast()), List::new(wr)), bad_wr) }
}

pub(super) unsafe extern "C" fn post_send_kernel(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the QP is live, and the first member of an object that `create_qp` made; the list is
    // as ibv_post_send(3) describes it.
    unsafe { posted(post::send_kernel(Ref::new(qp.cast()), List::new(wr)), bad_wr) }
}

pub(super) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the QP is live, and the first member of an object that `create_qp` made; the list is
    // as ibv_post_recv(3) describes it.
    unsafe { posted(post::recv(Ref::new(qp.cast()), List::new(wr)), bad_wr) }
}

pub(super) unsafe extern "C" fn post_recv_kernel(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the QP is live, and the first member of an object that `create_qp` made; the list is
    // as ibv_post_recv(3) describes it.
    unsafe { posted(post::recv_kernel(Ref::new(qp.cast()), List::new(wr)), bad_wr) }
}

#[cfg(test)]
mod tests {
    use crate::{model::opened::description, ops::testbed::*};
    use std::vec;

    /// Attributes that no QP has, or that are missing, end in an error, and no command is sent.
    #[test]
    fn attributes_that_cannot_be() {
        let p = Program::new();
        let qp = |attr: ibv_qp_init_attr_ex| {
            refusal(call!(COMMON.create_qp_ex(p.context, &mut { attr })))
        };
        let (good, pd) = (p.init_ex(), IBV_QP_INIT_ATTR_PD);
        for (attr, errno) in [
            (
                ibv_qp_init_attr_ex { comp_mask: pd | IBV_QP_INIT_ATTR_MAX_TSO_HEADER, ..good },
                Errno::EOPNOTSUPP,
            ),
            (ibv_qp_init_attr_ex { comp_mask: 0, ..good }, Errno::EINVAL),
            (ibv_qp_init_attr_ex { pd: ptr::null_mut(), ..good }, Errno::EINVAL),
            (
                ibv_qp_init_attr_ex {
                    comp_mask: pd | IBV_QP_INIT_ATTR_CREATE_FLAGS,
                    create_flags: IBV_QP_CREATE_SOURCE_QPN,
                    ..good
                },
                Errno::EOPNOTSUPP,
            ),
            (
                ibv_qp_init_attr_ex {
                    comp_mask: pd | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                    send_ops_flags: 1 << 63,
                    ..good
                },
                Errno::EOPNOTSUPP,
            ),
            // A UD QP has no RDMA READ.
            (
                ibv_qp_init_attr_ex {
                    qp_type: IBV_QPT_UD,
                    comp_mask: pd | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                    send_ops_flags: IBV_QP_EX_WITH_RDMA_READ.into(),
                    ..good
                },
                Errno::EOPNOTSUPP,
            ),
            (ibv_qp_init_attr_ex { send_cq: ptr::null_mut(), ..good }, Errno::EINVAL),
            (ibv_qp_init_attr_ex { recv_cq: ptr::null_mut(), ..good }, Errno::EINVAL),
            (ibv_qp_init_attr_ex { qp_type: IBV_QPT_XRC_RECV, ..good }, Errno::EINVAL),
            (
                ibv_qp_init_attr_ex {
                    qp_type: IBV_QPT_XRC_RECV,
                    comp_mask: IBV_QP_INIT_ATTR_XRCD | IBV_QP_INIT_ATTR_CREATE_FLAGS,
                    xrcd: p.xrcd,
                    ..good
                },
                Errno::EOPNOTSUPP,
            ),
        ] {
            assert_eq!(qp(attr), Some(errno));
        }
        assert_eq!(
            refusal(call!(RINGS.open_qp(p.context, &mut Default::default()))),
            Some(Errno::EINVAL)
        );
        assert_eq!(p.kernel.names(), []);
    }

    /// A field counts only if the mask names it.
    #[test]
    fn attributes_that_the_mask_does_not_name() {
        let p = Program::new();
        let mut attr =
            ibv_qp_init_attr_ex { create_flags: IBV_QP_CREATE_SOURCE_QPN, ..p.init_ex() };
        p.kernel.answer(UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, NUMBER + 1);
        let qp = call!(COMMON.create_qp_ex(p.context, &mut attr));
        assert_eq!((qp.is_null(), p.kernel.names()), (false, vec![NEW_QP]));
        assert_eq!(call!(COMMON.destroy_qp(qp)), 0);
    }

    /// A QP with an SRQ may be asked for receives that the device does not have: it has no receive queue.
    #[test]
    fn a_qp_with_an_srq() {
        let p = Program::of(virtio_rdma_uresp_alloc_ucontext {
            max_recv_sge: 1,
            ..description(VIRTIO_RDMA_UDATA_PATH_RINGS)
        });
        let cap = ibv_qp_cap { max_recv_sge: 2, ..p.init().cap };
        let mut attr = ibv_qp_init_attr { srq: p.srq, sq_sig_all: 1, cap, ..p.init() };
        p.kernel.answer(UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, NUMBER + 1);
        let qp = call!(COMMON.create_qp(p.pd, &mut attr));
        assert!(!qp.is_null());
        let command = p.kernel.one();
        // SAFETY: the SRQ is live.
        let srq = unsafe { (*p.srq).handle };
        assert_eq!(command.handle(UVERBS_ATTR_CREATE_QP_SRQ_HANDLE), srq.into());
        let flags = command.input::<u32>(UVERBS_ATTR_CREATE_QP_FLAGS);
        assert_eq!(flags, IB_UVERBS_QP_CREATE_SQ_SIG_ALL);
        // The QP does not know which receives of the SRQ are its own.
        let mut device = p.completer();
        for (qp_num, polled) in [(NUMBER, 0), (NUMBER + 1, 1)] {
            let opcode = VIRTIO_RDMA_WC_RECV as u8;
            device.complete(virtio_rdma_ring_cqe { qp_num, opcode, ..Default::default() });
            assert_eq!(p.poll(), polled);
        }
        attr.srq = ptr::null_mut();
        let refused = call!(COMMON.create_qp(p.pd, &mut attr));
        assert_eq!(refusal(refused), Some(Errno::EINVAL));
        assert_eq!(call!(COMMON.destroy_qp(qp)), 0);
    }

    /// A QP says the capabilities that it got when it was created, whatever the kernel answers.
    #[test]
    fn capabilities_of_a_qp() {
        let p = Program::new();
        let cap = ibv_qp_cap {
            max_send_wr: 5,
            max_recv_wr: 9,
            max_send_sge: 2,
            max_recv_sge: 3,
            max_inline_data: 100,
        };
        p.kernel.answer(UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, NUMBER + 1);
        let mut init = ibv_qp_init_attr { cap, ..p.init() };
        let qp = call!(COMMON.create_qp(p.pd, &mut init));
        let told = p.kernel.one().input::<[u32; 5]>(UVERBS_ATTR_CREATE_QP_CAP);
        assert_eq!(told, [8, 16, 2, 3, 100]);
        let (mut attr, mut queried) = Default::default();
        assert_eq!(call!(COMMON.query_qp(qp, &mut attr, 1, &mut queried)), 0);
        for cap in [init.cap, attr.cap, queried.cap] {
            let got = [
                cap.max_send_wr,
                cap.max_recv_wr,
                cap.max_send_sge,
                cap.max_recv_sge,
                cap.max_inline_data,
            ];
            assert_eq!(got, told);
        }
        assert_eq!(call!(COMMON.destroy_qp(qp)), 0);
    }

    /// A QP that comes to RESET has empty queues. It keeps its work requests if the kernel refuses.
    #[test]
    fn a_qp_is_reset() {
        let p = Program::new();
        let (memory, _) = p.rings();
        let posted = || word(memory, 0);
        let mut send = ibv_send_wr { opcode: IBV_WR_SEND, ..Default::default() };
        let mut bad = ptr::null_mut();
        assert_eq!(call!(RINGS.post_send(p.qp, &mut send, &mut bad)), 0);
        let mut attr = ibv_qp_attr { qp_state: IBV_QPS_RESET, ..Default::default() };
        let state = IBV_QP_STATE as c_int;
        p.kernel.fail(EINVAL);
        assert_eq!(call!(COMMON.modify_qp(p.qp, &mut attr, state)), EINVAL as c_int);
        assert_eq!(posted(), 1);
        // Other attributes, and other states, do not change the queues.
        assert_eq!(call!(COMMON.modify_qp(p.qp, &mut attr, 0)), 0);
        attr.qp_state = IBV_QPS_ERR;
        assert_eq!(call!(COMMON.modify_qp(p.qp, &mut attr, state)), 0);
        assert_eq!(posted(), 1);
        attr.qp_state = IBV_QPS_RESET;
        assert_eq!(call!(COMMON.modify_qp(p.qp, &mut attr, state)), 0);
        assert_eq!(posted(), 0);
    }
}
