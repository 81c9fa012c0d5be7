// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! A program with an object of each kind, for the tests of entry points.

pub use super::{COMMON, KERNEL, RINGS};
pub use crate::{
    bindings::*,
    errno::Errno,
    model::{
        device::Memory,
        opened::{Opened, description},
        uverbs::{
            FIRST_HANDLE, Kernel,
            Name::{self, Method, Write},
        },
    },
    object::Ref,
    qp::Qp,
};
use crate::{cq::Cq, model::device::Completer, srq::Srq};
use core::sync::atomic::Ordering::SeqCst;
pub use core::{
    ffi::{c_int, c_void},
    mem::offset_of,
    ptr,
};

/// Calls an entry point, as libibverbs or the program does.
macro_rules! call {
    ($table:ident.$verb:ident($($argument:expr),* $(,)?)) => {{
        let verb = $table.$verb.expect(stringify!($verb));
        // SAFETY: the arguments are as the verb's page of the manual has them, for objects
        // that are live.
        #[allow(unused_unsafe)]
        unsafe { verb($($argument),*) }
    }};
}
pub(super) use call;

/// The commands that destroy each kind of object.
pub const END: [Name; 8] = [
    Method(UVERBS_OBJECT_PD, UVERBS_METHOD_PD_DESTROY),
    Method(UVERBS_OBJECT_MR, UVERBS_METHOD_MR_DESTROY),
    Method(UVERBS_OBJECT_MW, UVERBS_METHOD_MW_DESTROY),
    Method(UVERBS_OBJECT_AH, UVERBS_METHOD_AH_DESTROY),
    Method(UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_DESTROY),
    Method(UVERBS_OBJECT_QP, UVERBS_METHOD_QP_DESTROY),
    Method(UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_DESTROY),
    Method(UVERBS_OBJECT_XRCD, UVERBS_METHOD_XRCD_DESTROY),
];

// The commands that create a CQ, a QP and an SRQ.
pub const NEW_CQ: Name = Method(UVERBS_OBJECT_CQ, UVERBS_METHOD_CQ_CREATE);
pub const NEW_QP: Name = Method(UVERBS_OBJECT_QP, UVERBS_METHOD_QP_CREATE);
pub const NEW_SRQ: Name = Method(UVERBS_OBJECT_SRQ, UVERBS_METHOD_SRQ_CREATE);

/// A program with an object of each kind.
pub struct Program {
    pub pd: *mut ibv_pd,
    pub mr: *mut ibv_mr,
    pub mw: *mut ibv_mw,
    pub ah: *mut ibv_ah,
    pub xrcd: *mut ibv_xrcd,
    pub cq: *mut ibv_cq,
    pub qp: *mut ibv_qp,
    pub srq: *mut ibv_srq,
    pub context: *mut ibv_context,
    pub opened: Opened,
    pub kernel: Kernel,
}

impl Program {
    /// Returns a program whose objects have rings.
    pub fn new() -> Self {
        Self::on(VIRTIO_RDMA_UDATA_PATH_RINGS)
    }

    /// Returns a program whose objects have rings, on this data path.
    pub fn on(data_path: u32) -> Self {
        Self::of(description(data_path))
    }

    /// Returns a program whose objects have rings, on a device that the driver describes so.
    pub fn of(description: virtio_rdma_uresp_alloc_ucontext) -> Self {
        let kernel = Kernel::new();
        let opened = Opened::new(&kernel, description);
        let context = opened.verbs();
        let pd = call!(COMMON.alloc_pd(context));
        let cq = call!(COMMON.create_cq(context, 4, ptr::null_mut(), 0));
        let mut program = Self {
            pd,
            cq,
            mr: call!(COMMON.reg_mr(pd, ptr::null_mut(), 4096, 0, 1)),
            mw: call!(RINGS.alloc_mw(pd, IBV_MW_TYPE_1)),
            ah: call!(COMMON.create_ah(pd, &mut Default::default())),
            xrcd: call!(RINGS.open_xrcd(context, &mut domain_attr())),
            qp: ptr::null_mut(),
            srq: call!(RINGS.create_srq(pd, &mut srq_attr())),
            context,
            opened,
            kernel,
        };
        program.kernel.answer(UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, NUMBER);
        program.qp = call!(COMMON.create_qp(pd, &mut program.init()));
        program.set_state(IBV_QPS_RTS);
        program.kernel.take();
        program
    }

    pub fn init(&self) -> ibv_qp_init_attr {
        let cap = ibv_qp_cap { max_send_wr: 8, max_recv_wr: 8, ..cap() };
        ibv_qp_init_attr {
            send_cq: self.cq,
            recv_cq: self.cq,
            qp_type: IBV_QPT_RC,
            cap,
            ..Default::default()
        }
    }

    pub fn init_ex(&self) -> ibv_qp_init_attr_ex {
        ibv_qp_init_attr_ex {
            send_cq: self.cq,
            recv_cq: self.cq,
            qp_type: IBV_QPT_RC,
            cap: cap(),
            comp_mask: IBV_QP_INIT_ATTR_PD,
            pd: self.pd,
            ..Default::default()
        }
    }

    pub fn init_xrc(&self) -> ibv_srq_init_attr_ex {
        ibv_srq_init_attr_ex {
            attr: srq_attr().attr,
            comp_mask: IBV_SRQ_INIT_ATTR_TYPE
                | IBV_SRQ_INIT_ATTR_PD
                | IBV_SRQ_INIT_ATTR_XRCD
                | IBV_SRQ_INIT_ATTR_CQ,
            srq_type: IBV_SRQT_XRC,
            pd: self.pd,
            xrcd: self.xrcd,
            cq: self.cq,
            ..Default::default()
        }
    }

    pub fn cq_attr(&self) -> ibv_cq_init_attr_ex {
        ibv_cq_init_attr_ex { cqe: 4, ..Default::default() }
    }

    /// Sets the state, as libibverbs does after ibv_modify_qp(3).
    pub fn set_state(&self, state: ibv_qp_state) {
        // SAFETY: the QP is live, and nobody else uses it.
        unsafe { (*self.qp).state = state };
    }

    pub fn qp(&self) -> Ref<'_, Qp> {
        // SAFETY: the QP is live.
        unsafe { Ref::new(self.qp.cast()) }
    }

    /// Returns what the device sees of the rings of the QP.
    pub fn rings(&self) -> (Memory, virtio_rdma_ureq_create_qp) {
        let request = self.qp().private().request();
        (Memory::at(request.buf_addr), request)
    }

    /// Returns the device's side of the CQ.
    pub fn completer(&self) -> Completer {
        // SAFETY: the CQ is live.
        let cq: Ref<'_, Cq> = unsafe { Ref::new(self.cq.cast()) };
        Completer::new(cq.private().state().lock().ring().unwrap())
    }

    /// Returns how many completions the CQ has; at most 4.
    pub fn poll(&self) -> c_int {
        let mut entries = [ibv_wc::default(); 4];
        call!(RINGS.poll_cq(self.cq, 4, entries.as_mut_ptr()))
    }

    /// Returns what the device sees of the ring of the SRQ.
    pub fn shared(&self) -> (Memory, virtio_rdma_ureq_create_srq) {
        // SAFETY: the SRQ is live.
        let srq: Ref<'_, Srq> = unsafe { Ref::new(self.srq.cast()) };
        let request = srq.private().request();
        (Memory::at(request.buf_addr), request)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let answers = [
            call!(COMMON.destroy_qp(self.qp)),
            call!(RINGS.destroy_srq(self.srq)),
            call!(COMMON.destroy_cq(self.cq)),
            call!(COMMON.destroy_ah(self.ah)),
            call!(RINGS.close_xrcd(self.xrcd)),
            call!(RINGS.dealloc_mw(self.mw)),
            call!(COMMON.dereg_mr(self.mr.cast())),
            call!(COMMON.dealloc_pd(self.pd)),
        ];
        assert_eq!(answers, [0; 8]);
        // The context is dropped before the kernel, in the order of the fields.
        let _ = (&self.opened, &self.kernel);
    }
}

/// The number of the program's QP.
pub const NUMBER: u32 = 5;

pub fn cap() -> ibv_qp_cap {
    ibv_qp_cap { max_send_wr: 1, max_send_sge: 1, max_recv_sge: 1, ..Default::default() }
}

pub fn srq_attr() -> ibv_srq_init_attr {
    let attr = ibv_srq_attr { max_wr: 4, max_sge: 1, srq_limit: 0 };
    ibv_srq_init_attr { attr, ..Default::default() }
}

pub fn domain_attr() -> ibv_xrcd_init_attr {
    let comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
    ibv_xrcd_init_attr { comp_mask, fd: -1, oflags: 0 }
}

/// Returns the error of a verb that answered NULL.
pub fn refusal<T>(object: *mut T) -> Option<Errno> {
    object.is_null().then(Errno::last)
}

/// Returns a word of the memory of rings.
pub fn word(memory: Memory, at: usize) -> u32 {
    memory.word(at).load(SeqCst)
}
