// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The entry points of memory regions and memory windows.

use super::answer::{created, destroyed};
use crate::{
    bindings::*,
    cmd::{self, mr::MrRange},
    errno::code,
    mr, mw,
    object::Ref,
    post,
    wr::List,
};
use core::ffi::{c_int, c_void};

pub(super) unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    hca_va: u64,
    access: c_int,
) -> *mut ibv_mr {
    let range = MrRange { start: addr.addr(), length, iova: hca_va, access };
    // SAFETY: the program passes a live PD.
    created(mr::register(unsafe { Ref::new(pd) }, range))
}

pub(super) unsafe extern "C" fn reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    // The provider is for processors with addresses of 64 bits.
    let range = MrRange { start: offset as usize, length, iova, access };
    // SAFETY: the program passes a live PD.
    created(mr::register_dmabuf(unsafe { Ref::new(pd) }, range, fd))
}

pub(super) unsafe extern "C" fn rereg_mr(
    mr: *mut verbs_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let range = MrRange { start: addr.addr(), length, iova: addr.addr() as u64, access };
    // SAFETY: the program passes a live MR; the PD is live, or null where the program asks for no
    // other one.
    let (mr, pd) = unsafe { (Ref::new(mr), (!pd.is_null()).then(|| Ref::new(pd))) };
    code(cmd::mr::reregister(mr, flags, pd, range))
}

pub(super) unsafe extern "C" fn dereg_mr(mr: *mut verbs_mr) -> c_int {
    // SAFETY: the MR is live, and an object that `reg_mr`, `reg_dmabuf_mr` or `import_mr` made.
    unsafe { destroyed(mr, cmd::mr::deregister) }
}

pub(super) unsafe extern "C" fn import_mr(pd: *mut ibv_pd, mr_handle: u32) -> *mut ibv_mr {
    // SAFETY: the program passes a live PD.
    created(mr::import(unsafe { Ref::new(pd) }, mr_handle))
}

/// Frees the program's MR. The MR in the kernel belongs to the program that created it.
pub(super) unsafe extern "C" fn unimport_mr(mr: *mut ibv_mr) {
    // SAFETY: the MR is live, and the first member of an object that `import_mr` made.
    unsafe { destroyed(mr.cast::<verbs_mr>(), |_| Ok(())) };
}

pub(super) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, mw_type: ibv_mw_type) -> *mut ibv_mw {
    // SAFETY: the program passes a live PD.
    created(mw::alloc(unsafe { Ref::new(pd) }, mw_type))
}

pub(super) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: the window is live, and an object that `alloc_mw` made.
    unsafe { destroyed(mw, cmd::mw::dealloc) }
}

pub(super) unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp,
    mw: *mut ibv_mw,
    bind: *mut ibv_mw_bind,
) -> c_int {
    // SAFETY: the QP is live, and the first member of an object that `create_qp` made; the window
    // is live, and the structure valid.
    let (qp, mw, bind) = unsafe { (Ref::new(qp.cast()), Ref::new(mw), &*bind) };
    code(mw::bind_request(mw, bind).and_then(|mut wr| {
        // SAFETY: the list has one request, and names the objects that the program named.
        let list = unsafe { List::new(&mut wr) };
        post::send(qp, list).map_err(|error| error.errno)
    }))
}

#[cfg(test)]
mod tests {
    use crate::ops::testbed::*;

    /// Each argument of the program reaches its field of the command.
    #[test]
    fn arguments_of_regions() {
        let p = Program::new();
        let at = ptr::without_provenance_mut(0x1000);
        let mr = call!(COMMON.reg_mr(p.pd, at, 0x2000, 0x3000, 5));
        let core: ib_uverbs_reg_mr = p.kernel.one().core();
        assert_eq!((core.start, core.length, core.hca_va), (0x1000, 0x2000, 0x3000));
        assert_eq!(core.access_flags, 5);
        let flags = IBV_REREG_MR_CHANGE_TRANSLATION as c_int;
        let none = ptr::null_mut();
        assert_eq!(call!(COMMON.rereg_mr(mr.cast(), flags, none, at, 0x4000, 7)), 0);
        let core: ib_uverbs_rereg_mr = p.kernel.one().core();
        // Work requests name the first byte by its address (ibv_rereg_mr(3)).
        assert_eq!((core.start, core.length, core.hca_va), (0x1000, 0x4000, 0x1000));
        assert_eq!((core.flags as c_int, core.access_flags), (flags, 7));
        let flags = IBV_REREG_MR_CHANGE_PD as c_int;
        assert_eq!(call!(COMMON.rereg_mr(mr.cast(), flags, none, at, 1, 0)), EINVAL as c_int);
        assert_eq!(call!(COMMON.rereg_mr(mr.cast(), flags, p.pd, at, 1, 0)), 0);
        assert_eq!(p.kernel.one().core::<ib_uverbs_rereg_mr>().pd_handle, FIRST_HANDLE);
        assert_eq!(call!(COMMON.dereg_mr(mr.cast())), 0);
    }

    /// ibv_bind_mw(3) posts the binding, and the window gets its next key. It keeps the old key if
    /// the binding is not posted.
    #[test]
    fn a_window_is_bound() {
        let p = Program::new();
        let (memory, rings) = p.rings();
        // SAFETY: the window is live, here and below.
        unsafe { (*p.mw).rkey = 0x5ff };
        // SAFETY: see above.
        let key = || unsafe { (*p.mw).rkey };
        let mut bind = ibv_mw_bind { wr_id: 7, ..Default::default() };
        bind.bind_info = ibv_mw_bind_info {
            mr: p.mr,
            addr: 0x1000,
            length: 0x2000,
            mw_access_flags: IBV_ACCESS_REMOTE_READ,
        };
        p.set_state(IBV_QPS_INIT);
        assert_eq!(call!(RINGS.bind_mw(p.qp, p.mw, &mut bind)), EINVAL as c_int);
        assert_eq!(key(), 0x5ff);
        p.set_state(IBV_QPS_RTS);
        assert_eq!(call!(RINGS.bind_mw(p.qp, p.mw, &mut bind)), 0);
        assert_eq!(key(), 0x500);
        let at = |at: usize| word(memory, rings.sq_offset as usize + at);
        assert_eq!(at(offset_of!(virtio_rdma_ring_bind_wqe, wr_id)), 7);
        assert_eq!(at(offset_of!(virtio_rdma_ring_bind_wqe, mw_rkey)), 0x5ff);
        assert_eq!(at(offset_of!(virtio_rdma_ring_bind_wqe, new_rkey)), 0x500);
        assert_eq!(at(offset_of!(virtio_rdma_ring_bind_wqe, addr)), 0x1000);
        assert_eq!(at(offset_of!(virtio_rdma_ring_bind_wqe, length)), 0x2000);
        assert_eq!(at(offset_of!(virtio_rdma_ring_bind_wqe, access)), IBV_ACCESS_REMOTE_READ);
    }
}
