// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Tests of what libibverbs' log says when the provider refuses a verb.

use super::testbed::*;
use crate::model::{
    log::take,
    opened::{DEVICE, description},
};
use core::ffi::CStr;
use std::{format, string::String, vec, vec::Vec};

const ERR: u32 = VERBS_LOG_ERR;

/// Returns the lines of the log since the last call, without the name of the device.
fn said() -> Vec<(u32, String)> {
    let device = format!("{}: ", CStr::to_str(DEVICE).unwrap());
    let line = |(level, line): (u32, String)| {
        (level, line.strip_prefix(&device).expect("the name of the device").into())
    };
    take().into_iter().map(line).collect()
}

/// Returns the line of an error with this text of an object.
fn error(object: &str, text: &str) -> Vec<(u32, String)> {
    vec![(ERR, format!("{object}: {text}"))]
}

/// Posts a send work request. Returns what ibv_post_send(3) answers.
fn send(p: &Program, mut wr: ibv_send_wr) -> c_int {
    call!(RINGS.post_send(p.qp, &mut wr, &mut ptr::null_mut()))
}

/// Posts a receive work request. Returns what ibv_post_recv(3) answers.
fn recv(p: &Program, mut wr: ibv_recv_wr) -> c_int {
    call!(RINGS.post_recv(p.qp, &mut wr, &mut ptr::null_mut()))
}

/// A work request that the QP cannot carry, or does not carry in its state, is named with the queue and with the
/// number that is wrong. Nothing is said of one that is posted.
#[test]
fn a_work_request() {
    let p = Program::new();
    let mut sges = [ibv_sge { length: 1000, ..Default::default() }; 3];
    let sg_list = sges.as_mut_ptr();
    let send_wr = ibv_send_wr { opcode: IBV_WR_SEND, ..Default::default() };
    let named = |num_sge| ibv_send_wr { sg_list, num_sge, ..send_wr };
    assert_eq!((send(&p, named(1)), said()), (0, vec![]));
    let inline = [(IBV_WR_SEND, IBV_SEND_INLINE), (IBV_WR_RDMA_READ, IBV_SEND_INLINE)];
    let [inline, read] =
        inline.map(|(opcode, send_flags)| ibv_send_wr { opcode, send_flags, ..named(1) });
    let max_inline = p.qp().private().limits().max_inline_data;
    for (wr, text) in [
        (named(3), "a work request has 3 SGEs, and the most is 1"),
        (named(-1), "a work request has -1 SGEs, and the most is 1"),
        (ibv_send_wr { num_sge: 1, ..send_wr }, "a work request has 1 SGEs at a null pointer"),
        (ibv_send_wr { opcode: 77, ..send_wr }, "the QP has no work requests with opcode 77"),
        (
            ibv_send_wr { send_flags: 1 << 9 | IBV_SEND_SIGNALED, ..send_wr },
            "a work request has the unknown flags 0x200",
        ),
        (
            inline,
            &format!("a work request has 1000 bytes of inline data, and the most is {max_inline}"),
        ),
        (read, "a work request with opcode 4 has inline data"),
        (
            ibv_send_wr { opcode: IBV_WR_BIND_MW, ..send_wr },
            "a work request binds no memory window",
        ),
    ] {
        assert_eq!((send(&p, wr), said()), (EINVAL as c_int, error("send queue of QP 5", text)));
    }
    let recv_wr = ibv_recv_wr { sg_list, num_sge: 2, ..Default::default() };
    let text = error("receive queue of QP 5", "a work request has 2 SGEs, and the most is 1");
    assert_eq!((recv(&p, recv_wr), said()), (EINVAL as c_int, text));
    let answer = call!(RINGS.post_srq_recv(p.srq, &mut { recv_wr }, &mut ptr::null_mut()));
    let srq = format!("SRQ {}", handle(p.srq));
    let text = error(&srq, "a work request has 2 SGEs, and the most is 1");
    assert_eq!((answer, said()), (EINVAL as c_int, text));

    p.set_state(IBV_QPS_INIT);
    let text = error("send queue of QP 5", "the QP is in state 1, in which it cannot send");
    assert_eq!((send(&p, send_wr), said()), (EINVAL as c_int, text));
    p.set_state(IBV_QPS_RESET);
    let text = error("receive queue of QP 5", "the QP is in state RESET");
    assert_eq!((recv(&p, Default::default()), said()), (EINVAL as c_int, text));
    p.set_state(IBV_QPS_RTS);
}

/// A queue that is full is said at the level of debugging alone: a program may post until that happens.
#[test]
fn a_full_queue() {
    let p = Program::new();
    let send_wr = ibv_send_wr { opcode: IBV_WR_SEND, ..Default::default() };
    for _ in 0..8 {
        assert_eq!((send(&p, send_wr), recv(&p, Default::default())), (0, 0));
    }
    assert_eq!(said(), []);
    assert_eq!(send(&p, send_wr), ENOMEM as c_int);
    assert_eq!(recv(&p, Default::default()), ENOMEM as c_int);
    let text = |queue| (VERBS_LOG_DEBUG, format!("{queue} queue of QP 5: all 8 entries are taken"));
    assert_eq!(said(), [text("send"), text("receive")]);
}

/// Returns the handle of an SRQ.
fn handle(srq: *mut ibv_srq) -> u32 {
    // SAFETY: the SRQ is live.
    unsafe { (*srq).handle }
}

/// An object that cannot be is named with what it belongs to and with the number that is wrong.
#[test]
fn a_new_object() {
    let p = Program::new();
    // SAFETY: the objects are live.
    let (file, pd) = unsafe { ((*p.context).cmd_fd, (*p.pd).handle) };
    let (context, pd) = (format!("context {file}"), format!("PD {pd}"));
    type Create = (fn(&Program) -> *mut c_void, Errno, &'static str);
    let of_context: [Create; 4] = [
        (
            |p| call!(COMMON.create_cq(p.context, -3, ptr::null_mut(), 0)).cast(),
            Errno::EINVAL,
            "a CQ of -3 CQEs is wanted",
        ),
        (
            |p| {
                let mut attr = ibv_cq_init_attr_ex { wc_flags: 1 << 40, ..p.cq_attr() };
                call!(COMMON.create_cq_ex(p.context, &mut attr)).cast()
            },
            Errno::EOPNOTSUPP,
            "a CQ with bit 40 of wc_flags is wanted",
        ),
        (
            |p| {
                let mut attr = ibv_qp_init_attr_ex { comp_mask: 1 << 12, ..p.init_ex() };
                call!(COMMON.create_qp_ex(p.context, &mut attr)).cast()
            },
            Errno::EOPNOTSUPP,
            "a QP with the unknown attributes 0x1000 is wanted",
        ),
        (
            |p| {
                let mut attr = ibv_td_init_attr { comp_mask: 1 };
                call!(COMMON.alloc_td(p.context, &mut attr)).cast()
            },
            Errno::EINVAL,
            "a thread domain with the attributes 0x1 is wanted",
        ),
    ];
    let of_pd: [Create; 3] = [
        (
            |p| {
                let cap = ibv_qp_cap { max_send_sge: 5000, ..cap() };
                call!(COMMON.create_qp(p.pd, &mut ibv_qp_init_attr { cap, ..p.init() })).cast()
            },
            Errno::EINVAL,
            "no ring holds 1 entries of 80048 bytes",
        ),
        (
            |p| {
                let mut attr = ibv_qp_init_attr { send_cq: ptr::null_mut(), ..p.init() };
                call!(COMMON.create_qp(p.pd, &mut attr)).cast()
            },
            Errno::EINVAL,
            "a QP without a CQ is wanted",
        ),
        (
            |p| {
                let mut attr = srq_attr();
                attr.attr.max_wr = 0;
                call!(RINGS.create_srq(p.pd, &mut attr)).cast()
            },
            Errno::EINVAL,
            "an SRQ of 0 receives is wanted",
        ),
    ];
    for (object, creates) in [(&context, &of_context[..]), (&pd, &of_pd)] {
        for (create, errno, text) in creates {
            assert_eq!(refusal(create(&p)), Some(*errno), "{text}");
            assert_eq!(said(), error(object, text));
        }
    }
    let created = call!(COMMON.create_cq_ex(p.context, &mut p.cq_attr()));
    assert_eq!((refusal(created), said()), (None, vec![]));
    // SAFETY: the CQ is live.
    assert_eq!(call!(COMMON.destroy_cq(created.cast())), 0);
}

/// The limits of the device are in the text, as the driver tells them.
#[test]
fn a_limit_of_the_device() {
    let kernel = Kernel::new();
    let told = virtio_rdma_uresp_alloc_ucontext {
        max_cqe: 100,
        ..description(VIRTIO_RDMA_UDATA_PATH_RINGS)
    };
    let opened = Opened::new(&kernel, told);
    let context = opened.verbs();
    let cq = call!(COMMON.create_cq(context, 101, ptr::null_mut(), 0));
    assert_eq!(refusal(cq), Some(Errno::EINVAL));
    // SAFETY: the context is live.
    let context = format!("context {}", unsafe { (*context).cmd_fd });
    assert_eq!(said(), error(&context, "a CQ of 101 CQEs is wanted, and the most is 100"));
}

/// A context that cannot be opened is named, with the error of the kernel. The error of the thread is that
/// of the verb, whatever the log does.
#[test]
fn a_context() {
    let kernel = Kernel::new();
    kernel.answer(UVERBS_ATTR_UHW_OUT, description(7));
    assert!(Opened::open(crate::driver::tests::alloc_context).is_none());
    assert_eq!(Errno::last(), Errno::EPROTONOSUPPORT);
    let lines: Vec<_> = said().into_iter().map(|(_, line)| line).collect();
    let ends = ["the data path 7 is unknown", "it cannot be opened: errno 93"];
    assert_eq!(lines.len(), ends.len());
    for (line, end) in lines.iter().zip(ends) {
        assert!(line.starts_with("context ") && line.ends_with(end), "{line}");
    }
}
