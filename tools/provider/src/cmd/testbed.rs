// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Objects for the tests of commands, each of which the kernel of the tests knows.

pub use crate::model::uverbs::{
    FIRST_HANDLE,
    Name::{Method, Write},
};
use crate::{
    bindings::*,
    cmd::mr::MrRange,
    model::{
        opened::Opened,
        uverbs::{Command, Kernel, Name},
    },
    object::{Owned, Ref, Zeroable},
};
use core::ptr;

/// A context with an object of each kind, each of which has a handle.
pub struct Testbed {
    pub mr: Owned<verbs_mr>,
    pub mw: Owned<ibv_mw>,
    pub ah: Owned<ibv_ah>,
    pub xrcd: Owned<verbs_xrcd>,
    pub cq: Owned<verbs_cq>,
    pub qp: Owned<verbs_qp>,
    pub srq: Owned<verbs_srq>,
    pub pd: Owned<ibv_pd>,
    pub opened: Opened,
    pub kernel: Kernel,
}

pub const PD: u32 = 11;

pub const MR: u32 = 12;

pub const MW: u32 = 13;

pub const AH: u32 = 14;

pub const XRCD: u32 = 15;

pub const CQ: u32 = 16;

pub const QP: u32 = 17;

pub const SRQ: u32 = 18;

/// Returns a zeroed object.
pub fn object<T: Zeroable>() -> Owned<T> {
    Owned::zeroed().unwrap()
}

impl Testbed {
    pub fn new() -> Self {
        let kernel = Kernel::new();
        let opened = Opened::with_rings(&kernel);
        let (pd, mw, ah) = (object::<ibv_pd>(), object::<ibv_mw>(), object::<ibv_ah>());
        let (mr, xrcd) = (object::<verbs_mr>(), object::<verbs_xrcd>());
        let (cq, qp, srq) = (object::<verbs_cq>(), object::<verbs_qp>(), object::<verbs_srq>());
        let context = opened.verbs();
        // SAFETY: all are live, and nobody else uses them.
        unsafe {
            (*pd.as_ref().as_ptr()).context = context;
            (*pd.as_ref().as_ptr()).handle = PD;
            (*mr.as_ref().as_ptr()).ibv_mr.context = context;
            (*mr.as_ref().as_ptr()).ibv_mr.handle = MR;
            (*mw.as_ref().as_ptr()).context = context;
            (*mw.as_ref().as_ptr()).handle = MW;
            (*ah.as_ref().as_ptr()).context = context;
            (*ah.as_ref().as_ptr()).handle = AH;
            (*xrcd.as_ref().as_ptr()).xrcd.context = context;
            (*xrcd.as_ref().as_ptr()).handle = XRCD;
            (*cq.as_ref().cq().as_ptr()).context = context;
            (*cq.as_ref().cq().as_ptr()).handle = CQ;
            (*qp.as_ref().qp().as_ptr()).context = context;
            (*qp.as_ref().qp().as_ptr()).handle = QP;
            (*srq.as_ref().srq().as_ptr()).context = context;
            (*srq.as_ref().srq().as_ptr()).handle = SRQ;
        }
        Self { mr, mw, ah, xrcd, cq, qp, srq, pd, opened, kernel }
    }

    /// Returns the one command since the last call, which must have this name.
    #[track_caller]
    pub fn command(&self, name: Name) -> Command {
        let command = self.kernel.one();
        assert_eq!(command.name, name);
        command
    }

    pub fn context(&self) -> Ref<'_, ibv_context> {
        self.opened.context()
    }

    pub fn cq(&self) -> Ref<'_, ibv_cq> {
        self.cq.as_ref().cq()
    }

    pub fn qp(&self) -> Ref<'_, ibv_qp> {
        self.qp.as_ref().qp()
    }

    pub fn srq(&self) -> Ref<'_, ibv_srq> {
        self.srq.as_ref().srq()
    }

    /// Returns attributes of a QP that name the objects here.
    pub fn init(&self, qp_type: ibv_qp_type) -> ibv_qp_init_attr_ex {
        let cap = ibv_qp_cap {
            max_send_wr: 1,
            max_recv_wr: 2,
            max_send_sge: 3,
            max_recv_sge: 4,
            max_inline_data: 5,
        };
        ibv_qp_init_attr_ex {
            qp_type,
            cap,
            comp_mask: IBV_QP_INIT_ATTR_PD,
            pd: self.pd.as_ref().as_ptr(),
            send_cq: self.cq().as_ptr(),
            recv_cq: self.cq().as_ptr(),
            srq: self.srq().as_ptr(),
            ..Default::default()
        }
    }

    /// Returns attributes of an SRQ that name the objects here.
    pub fn srq_init(&self) -> ibv_srq_init_attr_ex {
        ibv_srq_init_attr_ex {
            attr: ibv_srq_attr { max_wr: 31, max_sge: 32, srq_limit: 0 },
            comp_mask: IBV_SRQ_INIT_ATTR_TYPE
                | IBV_SRQ_INIT_ATTR_PD
                | IBV_SRQ_INIT_ATTR_XRCD
                | IBV_SRQ_INIT_ATTR_CQ,
            srq_type: IBV_SRQT_XRC,
            pd: self.pd.as_ref().as_ptr(),
            xrcd: self.xrcd(),
            cq: self.cq().as_ptr(),
            ..Default::default()
        }
    }

    pub fn xrcd(&self) -> *mut ibv_xrcd {
        self.xrcd.as_ref().as_ptr().cast()
    }
}

pub const REGION: MrRange = MrRange { start: 0x1000, length: 0x2000, iova: 0x3000, access: 5 };

pub const CQ_RING: virtio_rdma_ureq_create_cq =
    virtio_rdma_ureq_create_cq { buf_addr: 0x1111_2222_3333_4444, buf_len: 0x5555 };
pub const QP_RINGS: virtio_rdma_ureq_create_qp = virtio_rdma_ureq_create_qp {
    buf_addr: 0x1111_2222_3333_4444,
    buf_len: 0x5555,
    sq_depth: 6,
    sq_stride: 7,
    sq_offset: 8,
    rq_depth: 9,
    rq_stride: 10,
    rq_offset: 11,
};

pub const SRQ_RING: virtio_rdma_ureq_create_srq = virtio_rdma_ureq_create_srq {
    buf_addr: 0x1111_2222_3333_4444,
    buf_len: 0x5555,
    depth: 6,
    stride: 7,
    offset: 8,
    reserved_1c: 0,
};

/// Returns the bytes of a structure that has no padding.
pub fn bytes<T>(value: &T) -> &[u8] {
    // SAFETY: the value has as many bytes, and no padding.
    unsafe { core::slice::from_raw_parts(ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// IB_USER_VERBS_CMD_FLAG_EXTENDED.
pub const EXTENDED: u32 = 0x8000_0000;
