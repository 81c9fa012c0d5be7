// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Tests of the entry points of all objects alike, and of those of each data path.

use super::testbed::*;
use crate::{
    barriers::executed::{self, Executed},
    model::{
        freed,
        opened::{description, library},
    },
};
use std::vec;

/// Each verb that creates an object, the verb that destroys it, and the commands of both.
#[test]
fn each_verb_that_creates() {
    type End = (fn(*mut c_void) -> c_int, Name);
    type Create = (&'static str, fn(&Program) -> *mut c_void, Name, End);
    let p = Program::new();
    let [end_pd, end_mr, end_mw, end_ah, end_cq, end_qp, end_srq, end_xrcd] = END;
    let pd: End = (|pd| call!(COMMON.dealloc_pd(pd.cast())), end_pd);
    let mr: End = (|mr| call!(COMMON.dereg_mr(mr.cast())), end_mr);
    let mw: End = (|mw| call!(RINGS.dealloc_mw(mw.cast())), end_mw);
    let ah: End = (|ah| call!(COMMON.destroy_ah(ah.cast())), end_ah);
    let cq: End = (|cq| call!(COMMON.destroy_cq(cq.cast())), end_cq);
    let qp: End = (|qp| call!(COMMON.destroy_qp(qp.cast())), end_qp);
    let srq: End = (|srq| call!(RINGS.destroy_srq(srq.cast())), end_srq);
    let xrcd: End = (|xrcd| call!(RINGS.close_xrcd(xrcd.cast())), end_xrcd);
    let verbs: [Create; 16] = [
        (
            "alloc_pd",
            |p| call!(COMMON.alloc_pd(p.context)).cast(),
            Write(IB_USER_VERBS_CMD_ALLOC_PD),
            pd,
        ),
        (
            "reg_mr",
            |p| call!(COMMON.reg_mr(p.pd, ptr::null_mut(), 1, 2, 0)).cast(),
            Write(IB_USER_VERBS_CMD_REG_MR),
            mr,
        ),
        (
            "reg_dmabuf_mr",
            |p| call!(COMMON.reg_dmabuf_mr(p.pd, 1, 2, 3, 4, 0)).cast(),
            Method(UVERBS_OBJECT_MR, UVERBS_METHOD_REG_DMABUF_MR),
            mr,
        ),
        (
            "import_mr",
            |p| call!(COMMON.import_mr(p.pd, 77)).cast(),
            Method(UVERBS_OBJECT_MR, UVERBS_METHOD_QUERY_MR),
            mr,
        ),
        (
            "alloc_mw",
            |p| call!(RINGS.alloc_mw(p.pd, IBV_MW_TYPE_2)).cast(),
            Write(IB_USER_VERBS_CMD_ALLOC_MW),
            mw,
        ),
        (
            "create_ah",
            |p| call!(COMMON.create_ah(p.pd, &mut Default::default())).cast(),
            Write(IB_USER_VERBS_CMD_CREATE_AH),
            ah,
        ),
        (
            "create_cq",
            |p| call!(COMMON.create_cq(p.context, 4, ptr::null_mut(), 0)).cast(),
            NEW_CQ,
            cq,
        ),
        (
            "create_cq_ex",
            |p| call!(COMMON.create_cq_ex(p.context, &mut p.cq_attr())).cast(),
            NEW_CQ,
            cq,
        ),
        ("create_qp", |p| call!(COMMON.create_qp(p.pd, &mut p.init())).cast(), NEW_QP, qp),
        (
            "create_qp_ex",
            |p| call!(COMMON.create_qp_ex(p.context, &mut p.init_ex())).cast(),
            NEW_QP,
            qp,
        ),
        (
            "create_qp_ex, XRC target",
            |p| {
                let mut attr = ibv_qp_init_attr_ex {
                    qp_type: IBV_QPT_XRC_RECV,
                    comp_mask: IBV_QP_INIT_ATTR_XRCD,
                    xrcd: p.xrcd,
                    ..Default::default()
                };
                call!(COMMON.create_qp_ex(p.context, &mut attr)).cast()
            },
            NEW_QP,
            qp,
        ),
        (
            "open_qp",
            |p| {
                let mut attr = ibv_qp_open_attr {
                    comp_mask: IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
                    qp_type: IBV_QPT_XRC_RECV,
                    xrcd: p.xrcd,
                    ..Default::default()
                };
                call!(RINGS.open_qp(p.context, &mut attr)).cast()
            },
            Write(IB_USER_VERBS_CMD_OPEN_QP),
            qp,
        ),
        ("create_srq", |p| call!(RINGS.create_srq(p.pd, &mut srq_attr())).cast(), NEW_SRQ, srq),
        (
            "create_srq_ex",
            |p| {
                p.kernel.answer(UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM, 9u32);
                call!(RINGS.create_srq_ex(p.context, &mut p.init_xrc())).cast()
            },
            NEW_SRQ,
            srq,
        ),
        (
            "open_xrcd",
            |p| call!(RINGS.open_xrcd(p.context, &mut domain_attr())).cast(),
            Write(IB_USER_VERBS_CMD_OPEN_XRCD),
            xrcd,
        ),
        (
            "create_cq_ex, one thread",
            |p| {
                let mut attr = ibv_cq_init_attr_ex {
                    comp_mask: IBV_CQ_INIT_ATTR_MASK_FLAGS,
                    flags: IBV_CREATE_CQ_ATTR_SINGLE_THREADED,
                    ..p.cq_attr()
                };
                call!(COMMON.create_cq_ex(p.context, &mut attr)).cast()
            },
            NEW_CQ,
            cq,
        ),
    ];
    for (name, create, new, (end, gone)) in verbs {
        for errno in [EPERM, EINVAL, ENOMEM] {
            if name != "create_srq_ex" {
                p.kernel.fail(errno);
                let error = refusal(create(&p)).map(Errno::get);
                assert_eq!(error, Some(errno as c_int), "{name}");
                assert_eq!(p.kernel.names(), [new], "{name}");
            }
        }
        let object = create(&p);
        assert!(!object.is_null(), "{name}");
        assert_eq!(p.kernel.names(), [new], "{name}");
        // An object that the kernel does not destroy stays.
        for errno in [EBUSY, EIO] {
            p.kernel.fail(errno);
            assert_eq!(end(object), errno as c_int, "{name}");
            assert_eq!(p.kernel.names(), [gone], "{name}");
        }
        assert_eq!(end(object), 0, "{name}");
        assert_eq!(p.kernel.names(), [gone], "{name}");
    }
    assert!(freed::is_intact());
}

/// Each verb that changes or reads an object, and its command.
#[test]
fn each_verb_that_asks_the_kernel() {
    type Verb = (&'static str, fn(&Program) -> c_int, Name);
    let p = Program::new();
    let verbs: [Verb; 10] = [
        (
            "query_port",
            |p| call!(COMMON.query_port(p.context, 1, &mut Default::default())),
            Method(UVERBS_OBJECT_DEVICE, UVERBS_METHOD_QUERY_PORT),
        ),
        (
            "query_qp",
            |p| {
                let (mut attr, mut init) = Default::default();
                call!(COMMON.query_qp(p.qp, &mut attr, 1, &mut init))
            },
            Write(IB_USER_VERBS_CMD_QUERY_QP),
        ),
        (
            "modify_qp",
            |p| call!(COMMON.modify_qp(p.qp, &mut Default::default(), 0)),
            Write(IB_USER_VERBS_CMD_MODIFY_QP),
        ),
        (
            "modify_cq",
            |p| call!(COMMON.modify_cq(p.cq, &mut Default::default())),
            Write(IB_USER_VERBS_EX_CMD_MODIFY_CQ | 1 << 31),
        ),
        ("resize_cq", |p| call!(RINGS.resize_cq(p.cq, 8)), Write(IB_USER_VERBS_CMD_RESIZE_CQ)),
        (
            "attach_mcast",
            |p| call!(COMMON.attach_mcast(p.qp, &ibv_gid { raw: [1; 16] }, 2)),
            Write(IB_USER_VERBS_CMD_ATTACH_MCAST),
        ),
        (
            "detach_mcast",
            |p| call!(COMMON.detach_mcast(p.qp, &ibv_gid { raw: [1; 16] }, 2)),
            Write(IB_USER_VERBS_CMD_DETACH_MCAST),
        ),
        (
            "rereg_mr",
            |p| {
                let flags = IBV_REREG_MR_CHANGE_ACCESS as c_int;
                let (mr, none) = (p.mr.cast(), ptr::null_mut());
                call!(COMMON.rereg_mr(mr, flags, none, ptr::null_mut(), 0, 1))
            },
            Write(IB_USER_VERBS_CMD_REREG_MR),
        ),
        (
            "modify_srq",
            |p| {
                let limit = IBV_SRQ_LIMIT as c_int;
                call!(RINGS.modify_srq(p.srq, &mut Default::default(), limit))
            },
            Write(IB_USER_VERBS_CMD_MODIFY_SRQ),
        ),
        (
            "query_srq",
            |p| call!(RINGS.query_srq(p.srq, &mut Default::default())),
            Write(IB_USER_VERBS_CMD_QUERY_SRQ),
        ),
    ];
    for (name, verb, command) in verbs {
        for errno in [EPERM, ENOMEM] {
            p.kernel.fail(errno);
            assert_eq!(verb(&p), errno as c_int, "{name}");
            assert_eq!(p.kernel.names(), [command], "{name}");
        }
        assert_eq!(verb(&p), 0, "{name}");
        assert_eq!(p.kernel.names(), [command], "{name}");
    }
}

/// Imported objects have the handle that was asked for, and no command destroys them.
#[test]
fn what_is_imported() {
    let p = Program::new();
    let pd = call!(COMMON.import_pd(p.context, 55));
    // SAFETY: the PD is live.
    assert_eq!(unsafe { ((*pd).handle, (*pd).context) }, (55, p.context));
    assert_eq!(p.kernel.names(), []);
    let mr = call!(COMMON.import_mr(pd, 66));
    let command = p.kernel.one();
    assert_eq!(command.handle(UVERBS_ATTR_QUERY_MR_HANDLE), 66);
    // SAFETY: the MR is live.
    assert_eq!(unsafe { (*mr).handle }, 66);
    call!(COMMON.unimport_mr(mr));
    call!(COMMON.unimport_pd(pd));
    assert_eq!(p.kernel.names(), []);
}

/// Extended objects have their entry points. Other objects do not have room for them.
#[test]
fn extended_objects_have_entry_points() {
    let p = Program::new();
    let cq = call!(COMMON.create_cq_ex(p.context, &mut p.cq_attr()));
    // SAFETY: the objects are live, here and below.
    unsafe {
        let mut attr = ibv_poll_cq_attr::default();
        assert_eq!((*cq).start_poll.unwrap()(cq, &mut attr), ENOENT as c_int);
    }
    for by_calls in [false, true] {
        let mut attr = p.init_ex();
        if by_calls {
            attr.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
            attr.send_ops_flags = IBV_QP_EX_WITH_SEND.into();
        }
        let qp = call!(COMMON.create_qp_ex(p.context, &mut attr));
        let ex = qp.cast::<ibv_qp_ex>();
        // SAFETY: see above.
        unsafe {
            assert_eq!((*ex).wr_start.is_some(), by_calls);
            let mask = qp.byte_add(library().qp_comp_mask()).cast::<u32>().read() & VERBS_QP_EX;
            assert_eq!(mask != 0, by_calls);
        }
        assert_eq!(call!(COMMON.destroy_qp(qp)), 0);
    }
    assert_eq!(call!(COMMON.destroy_cq(cq.cast())), 0);
}

/// Each verb that posts writes to its own ring, and to no other. It names the request that it
/// cannot post.
#[test]
fn each_verb_that_posts() {
    let p = Program::new();
    let (memory, rings) = p.rings();
    let (shared, srq) = p.shared();
    let posted = || {
        let word = |memory: Memory, at| memory.word(at).load(core::sync::atomic::Ordering::SeqCst);
        let rq = offset_of!(virtio_rdma_qp_ring, rq_producer);
        (word(memory, 0), word(memory, rq), word(shared, 0))
    };
    let id = |memory: Memory, at: u32| {
        let at = at as usize;
        u64::from(word(memory, at)) | u64::from(word(memory, at + 4)) << 32
    };
    let mut send = ibv_send_wr { wr_id: 1 << 32 | 11, opcode: IBV_WR_SEND, ..Default::default() };
    let mut bad = ptr::null_mut();
    assert_eq!(call!(RINGS.post_send(p.qp, &mut send, &mut bad)), 0);
    assert_eq!((posted(), id(memory, rings.sq_offset)), ((1, 0, 0), 1 << 32 | 11));
    assert!(bad.is_null());
    let mut recv = ibv_recv_wr { wr_id: 1 << 32 | 12, ..Default::default() };
    let mut bad_recv = ptr::null_mut();
    assert_eq!(call!(RINGS.post_recv(p.qp, &mut recv, &mut bad_recv)), 0);
    assert_eq!((posted(), id(memory, rings.rq_offset + 8)), ((1, 1, 0), 1 << 32 | 12));
    recv.wr_id = 1 << 32 | 13;
    assert_eq!(call!(RINGS.post_srq_recv(p.srq, &mut recv, &mut bad_recv)), 0);
    assert_eq!((posted(), id(shared, srq.offset + 8)), ((1, 1, 1), 1 << 32 | 13));
    assert!(bad_recv.is_null());

    // The second request of a list is wrong.
    let mut wrong = ibv_send_wr { opcode: 99, ..Default::default() };
    send.next = &raw mut wrong;
    assert_eq!(call!(RINGS.post_send(p.qp, &mut send, &mut bad)), EINVAL as c_int);
    assert_eq!((bad, posted()), (&raw mut wrong, (2, 1, 1)));
    // The program may pass NULL for `bad_wr`.
    assert_eq!(call!(RINGS.post_send(p.qp, &mut send, ptr::null_mut())), EINVAL as c_int);
    let mut wrong = ibv_recv_wr { num_sge: -1, ..Default::default() };
    recv.next = &raw mut wrong;
    assert_eq!(call!(RINGS.post_recv(p.qp, &mut recv, &mut bad_recv)), EINVAL as c_int);
    assert_eq!((bad_recv, posted()), (&raw mut wrong, (3, 2, 1)));
    bad_recv = ptr::null_mut();
    assert_eq!(call!(RINGS.post_srq_recv(p.srq, &mut recv, &mut bad_recv)), EINVAL as c_int);
    assert_eq!((bad_recv, posted()), (&raw mut wrong, (3, 2, 2)));
    assert_eq!(p.kernel.names(), []);
}

/// If the kernel posts and polls, the verbs are commands, and do not touch a ring.
#[test]
fn the_verbs_without_rings() {
    let kernel = Kernel::new();
    let opened = Opened::new(&kernel, description(VIRTIO_RDMA_UDATA_PATH_KERNEL));
    let context = opened.verbs();
    let pd = call!(COMMON.alloc_pd(context));
    let cq = call!(COMMON.create_cq(context, 4, ptr::null_mut(), 0));
    assert!(kernel.take().iter().all(|command| command.is_without_driver()));
    let mut attr = ibv_qp_init_attr {
        send_cq: cq,
        recv_cq: cq,
        qp_type: IBV_QPT_RC,
        cap: ibv_qp_cap { max_recv_wr: 1, ..cap() },
        ..Default::default()
    };
    let qp = call!(COMMON.create_qp(pd, &mut attr));
    assert!(kernel.one().is_without_driver());
    let (mut send, mut recv) = (ibv_send_wr::default(), ibv_recv_wr::default());
    let (mut bad_send, mut bad_recv) = (ptr::null_mut(), ptr::null_mut());
    assert_eq!(call!(KERNEL.post_send(qp, &mut send, &mut bad_send)), 0);
    assert_eq!(call!(KERNEL.post_recv(qp, &mut recv, &mut bad_recv)), 0);
    assert_eq!(call!(KERNEL.req_notify_cq(cq, 1)), 0);
    let mut wc = ibv_wc::default();
    kernel.answer(UVERBS_ATTR_CORE_OUT, 0u32);
    assert_eq!(call!(KERNEL.poll_cq(cq, 1, &mut wc)), 0);
    let commands = kernel.take();
    let names: Vec<_> = commands.iter().map(|command| command.name).collect();
    let expected = [
        IB_USER_VERBS_CMD_POST_SEND,
        IB_USER_VERBS_CMD_POST_RECV,
        IB_USER_VERBS_CMD_REQ_NOTIFY_CQ,
        IB_USER_VERBS_CMD_POLL_CQ,
    ];
    assert_eq!(names, expected.map(Write));
    let core: ib_uverbs_req_notify_cq = commands[2].core();
    assert_eq!(core.solicited_only, 1);
    // The request that the kernel does not take is the program's, not a copy.
    kernel.fail(ENOMEM);
    assert_eq!(call!(KERNEL.post_send(qp, &mut send, &mut bad_send)), ENOMEM as c_int);
    assert_eq!(bad_send, &raw mut send);
    kernel.fail(EIO);
    assert_eq!(call!(KERNEL.post_recv(qp, &mut recv, &mut bad_recv)), EIO as c_int);
    assert_eq!(bad_recv, &raw mut recv);
    kernel.fail(EIO);
    assert_eq!(call!(KERNEL.poll_cq(cq, 1, &mut wc)), -1);
    assert_eq!(Errno::last(), Errno::EIO);
    assert_eq!(call!(KERNEL.poll_cq(cq, -1, &mut wc)), -1);
    assert_eq!(Errno::last(), Errno::EINVAL);
    // There are no work requests by calls either.
    kernel.take();
    let mut attr = ibv_qp_init_attr_ex {
        send_cq: cq,
        recv_cq: cq,
        qp_type: IBV_QPT_RC,
        comp_mask: IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        pd,
        ..Default::default()
    };
    let refused = call!(COMMON.create_qp_ex(context, &mut attr));
    assert_eq!((refusal(refused), kernel.names()), (Some(Errno::EOPNOTSUPP), vec![]));
    assert_eq!(call!(COMMON.destroy_qp(qp)), 0);
    assert_eq!(call!(COMMON.destroy_cq(cq)), 0);
    assert_eq!(call!(COMMON.dealloc_pd(pd)), 0);
}

/// Each verb that uses a ring executes the platform's barriers if the device is behind a bus, and none for
/// another device. A CQ and an SRQ keep theirs in another ring.
#[test]
fn barriers_of_each_data_path() {
    type Verb = (&'static str, fn(&Program) -> c_int, Executed);
    // The index is published, and then the wake word is read.
    let posted = Executed { write: 1, full: 1, read: 1 };
    let verbs: [Verb; 5] = [
        (
            "post_send",
            |p| {
                let mut send = ibv_send_wr { opcode: IBV_WR_SEND, ..Default::default() };
                call!(RINGS.post_send(p.qp, &mut send, ptr::null_mut()))
            },
            posted,
        ),
        (
            "post_recv",
            |p| call!(RINGS.post_recv(p.qp, &mut Default::default(), ptr::null_mut())),
            posted,
        ),
        (
            "post_srq_recv",
            |p| call!(RINGS.post_srq_recv(p.srq, &mut Default::default(), ptr::null_mut())),
            posted,
        ),
        (
            "poll_cq",
            |p| call!(RINGS.poll_cq(p.cq, 1, &mut Default::default())),
            // The CQ is empty, and not closed.
            Executed { read: 1, ..Default::default() },
        ),
        (
            "req_notify_cq",
            |p| call!(RINGS.req_notify_cq(p.cq, 0)),
            Executed { write: 1, full: 1, read: 0 },
        ),
    ];
    let check = |p: &Program, is_bus: bool| {
        for (name, verb, expected) in &verbs {
            let got = executed::by(|| assert_eq!(verb(p), 0, "{name}"));
            assert_eq!(got, if is_bus { *expected } else { Executed::default() }, "{name}");
        }
    };
    for (path, is_bus) in
        [(VIRTIO_RDMA_UDATA_PATH_RINGS, false), (VIRTIO_RDMA_UDATA_PATH_RINGS_BUS, true)]
    {
        let p = Program::on(path);
        check(&p, is_bus);
        assert_eq!(call!(RINGS.resize_cq(p.cq, 64)), 0);
        let mut attr = srq_attr().attr;
        assert_eq!(call!(RINGS.modify_srq(p.srq, &mut attr, IBV_SRQ_MAX_WR as c_int)), 0);
        // The first post in the new ring also reads which entries are free.
        call!(RINGS.post_srq_recv(p.srq, &mut Default::default(), ptr::null_mut()));
        check(&p, is_bus);
    }
}
