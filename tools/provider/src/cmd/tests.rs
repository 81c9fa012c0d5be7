// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Tests of all commands alike.

use super::{testbed::*, *};
use crate::{
    bindings::*,
    errno::{Errno, Result},
};
use core::{
    ffi::c_int,
    mem::{MaybeUninit, offset_of},
};

/// A doorbell is the command that posts, with an empty list.
#[test]
fn doorbells() {
    let testbed = Testbed::new();
    assert_eq!(qp::ring_send_doorbell(testbed.qp()), Ok(()));
    assert_eq!(qp::ring_recv_doorbell(testbed.qp()), Ok(()));
    assert_eq!(srq::ring_doorbell(testbed.srq()), Ok(()));
    let expected = [
        (IB_USER_VERBS_CMD_POST_SEND, QP),
        (IB_USER_VERBS_CMD_POST_RECV, QP),
        (IB_USER_VERBS_CMD_POST_SRQ_RECV, SRQ),
    ];
    for (command, (number, handle)) in testbed.kernel.take().iter().zip(expected) {
        assert_eq!(command.name, Write(number));
        // The three begin alike.
        let core: [u32; 6] = command.core();
        assert_eq!(core[2..5], [handle, 0, 0]);
    }
    assert_eq!(offset_of!(ib_uverbs_post_recv, wr_count), 12);
    assert_eq!(offset_of!(ib_uverbs_post_srq_recv, sge_count), 16);
}

#[test]
fn what_is_destroyed() {
    let testbed = Testbed::new();
    assert_eq!(cq::destroy(testbed.cq()), Ok(()));
    assert_eq!(qp::destroy(testbed.qp()), Ok(()));
    assert_eq!(srq::destroy(testbed.srq()), Ok(()));
    let expected = [
        (UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_DESTROY, UVERBS_ATTR_DESTROY_CQ_HANDLE, CQ),
        (UVERBS_OBJECT_QP, UVERBS_METHOD_QP_DESTROY, UVERBS_ATTR_DESTROY_QP_HANDLE, QP),
        (UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_DESTROY, UVERBS_ATTR_DESTROY_SRQ_HANDLE, SRQ),
    ];
    for (command, (object, method, attr, handle)) in testbed.kernel.take().iter().zip(expected) {
        assert_eq!(command.name, Method(object, method));
        assert_eq!(command.handle(attr), handle.into());
    }
}

/// A command and its name.
type Named = (&'static str, fn(&Testbed) -> Result);

/// Returns a call of each command.
fn commands() -> Vec<Named> {
    vec![
        ("get_context", |b| context::get(b.context()).map(|_| ())),
        ("query_context", |b| context::query(b.context()).map(|_| ())),
        // SAFETY: the attributes are there.
        ("query_port", |b| unsafe { context::query_port(b.context(), 1, &mut Default::default()) }),
        ("alloc_pd", |b| pd::alloc(b.context(), object().as_ref())),
        ("dealloc_pd", |b| pd::dealloc(b.pd.as_ref())),
        ("reg_mr", |b| mr::register(b.pd.as_ref(), REGION, object().as_ref())),
        ("reg_dmabuf_mr", |b| mr::register_dmabuf(b.pd.as_ref(), REGION, 1, object().as_ref())),
        ("rereg_mr", |b| mr::reregister(b.mr.as_ref(), 4, None, REGION)),
        ("query_mr", |b| mr::query(b.pd.as_ref(), object().as_ref(), 1)),
        ("dereg_mr", |b| mr::deregister(b.mr.as_ref())),
        ("alloc_mw", |b| mw::alloc(b.pd.as_ref(), 1, object().as_ref())),
        ("dealloc_mw", |b| mw::dealloc(b.mw.as_ref())),
        ("create_ah", |b| {
            ah::create(b.pd.as_ref(), &mut Default::default(), object().as_ref()).map(|_| ())
        }),
        ("destroy_ah", |b| ah::destroy(b.ah.as_ref())),
        ("create_cq", |b| {
            let cq = object::<verbs_cq>();
            cq::create(b.context(), 1, None, 0, cq.as_ref().cq(), Some(CQ_RING))
        }),
        ("modify_cq", |b| cq::modify(b.cq(), &mut Default::default())),
        ("resize_cq", |b| cq::resize(b.cq(), 1, CQ_RING)),
        ("poll_cq", |b| cq::poll(b.cq(), &mut [MaybeUninit::uninit()]).map(|_| ())),
        ("req_notify_cq", |b| cq::req_notify(b.cq(), false)),
        ("destroy_cq", |b| cq::destroy(b.cq())),
        ("create_qp", |b| {
            let mut attr = b.init(IBV_QPT_RC);
            qp::create(b.pd.as_ref(), &mut attr, object().as_ref(), Some(QP_RINGS))
        }),
        ("create_xrc_target", |b| {
            let mut attr = b.init(IBV_QPT_XRC_RECV);
            (attr.comp_mask, attr.xrcd) = (IBV_QP_INIT_ATTR_XRCD, b.xrcd());
            qp::create_xrc_target(b.context(), &mut attr, object().as_ref())
        }),
        ("open_qp", |b| {
            let mut attr = ibv_qp_open_attr {
                comp_mask: IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
                xrcd: b.xrcd(),
                ..Default::default()
            };
            qp::open(b.context(), &mut attr, object().as_ref())
        }),
        ("open_xrcd", |b| {
            let mut attr = ibv_xrcd_init_attr { comp_mask: 3, fd: -1, oflags: 0 };
            xrcd::open(b.context(), object().as_ref(), &mut attr)
        }),
        ("close_xrcd", |b| xrcd::close(b.xrcd.as_ref())),
        ("modify_qp", |b| qp::modify(b.qp(), &mut Default::default(), 1)),
        ("query_qp", |b| qp::query(b.qp(), &mut Default::default(), 1, &mut Default::default())),
        ("attach_mcast", |b| qp::attach_mcast(b.qp(), &ibv_gid { raw: [0; 16] }, 0)),
        ("detach_mcast", |b| qp::detach_mcast(b.qp(), &ibv_gid { raw: [0; 16] }, 0)),
        ("destroy_qp", |b| qp::destroy(b.qp())),
        ("create_srq", |b| {
            let srq = object::<verbs_srq>();
            srq::create(b.pd.as_ref(), &mut Default::default(), srq.as_ref().srq(), SRQ_RING)
        }),
        ("create_xrc_srq", |b| {
            srq::create_xrc(b.context(), &mut b.srq_init(), object().as_ref(), SRQ_RING)
        }),
        ("modify_srq", |b| srq::modify(b.srq(), &mut Default::default(), 1, None)),
        ("query_srq", |b| srq::query(b.srq(), &mut Default::default())),
        ("destroy_srq", |b| srq::destroy(b.srq())),
        ("ring_srq_doorbell", |b| srq::ring_doorbell(b.srq())),
        ("ring_send_doorbell", |b| qp::ring_send_doorbell(b.qp())),
        ("ring_recv_doorbell", |b| qp::ring_recv_doorbell(b.qp())),
    ]
}

/// Each command returns the kernel's error, and is sent once.
#[test]
fn errors_are_the_kernel_s() {
    for errno in [EPERM, EINTR, EIO, ENOMEM, EBUSY, EINVAL, ENODEV, EOPNOTSUPP] {
        let testbed = Testbed::new();
        for (name, command) in commands() {
            testbed.kernel.fail(errno);
            let error = command(&testbed).map_err(Errno::get);
            assert_eq!(error, Err(errno as c_int), "{name}");
            assert_eq!(testbed.kernel.take().len(), 1, "{name}");
        }
    }
}
