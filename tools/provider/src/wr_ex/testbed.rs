// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! A QP for the tests of its entry points.

use super::install;
use crate::{
    ah::{Ah, AhPrivate},
    bindings::*,
    errno::Errno,
    model::{opened, send_queue::SendQueue},
    object::{Blank, Owned},
};
use core::{ffi::c_int, mem::offset_of, ops::Deref};

/// A QP in RTS to which a program posts by calls, and what the device sees of its send queue.
pub struct Testbed(SendQueue);

impl Deref for Testbed {
    type Target = SendQueue;

    fn deref(&self) -> &SendQueue {
        &self.0
    }
}

/// Calls an entry point of a QP.
macro_rules! call {
    ($testbed:expr, $call:ident $(, $argument:expr)*) => {{
        let at = $testbed.ex();
        // SAFETY: calls and arguments are as ibv_wr_post(3) has them.
        unsafe { ((*at).$call.expect(stringify!($call)))(at $(, $argument)*) }
    }};
}
pub(super) use call;

impl Testbed {
    pub fn new(qp_type: ibv_qp_type) -> Self {
        let queue = SendQueue::new(qp_type);
        // SAFETY: the QP has rings, and nobody else has it.
        unsafe { install(queue.qp.as_ref(), opened::library()) };
        Self(queue)
    }

    /// Returns whether the release of the tests' libibverbs has the function for an opcode.
    pub fn has(&self, opcode: ibv_wr_opcode) -> bool {
        let at = match opcode {
            IBV_WR_FLUSH => offset_of!(ibv_qp_ex, wr_flush),
            IBV_WR_ATOMIC_WRITE => offset_of!(ibv_qp_ex, wr_atomic_write),
            _ => 0,
        };
        opened::library().qp_ex_has(at)
    }

    pub fn ex(&self) -> *mut ibv_qp_ex {
        self.qp.as_ref().as_ptr().cast()
    }

    /// Sets the `wr_id` and the flags of the next work request.
    pub fn set(&self, wr_id: u64, flags: u32) {
        // SAFETY: the QP is live, and its program this thread.
        unsafe { ((*self.ex()).wr_id, (*self.ex()).wr_flags) = (wr_id, flags) };
    }

    pub fn start(&self) {
        call!(self, wr_start);
    }

    pub fn complete(&self) -> c_int {
        call!(self, wr_complete)
    }

    pub fn send(&self, wr_id: u64) {
        self.set(wr_id, IBV_SEND_SIGNALED);
        call!(self, wr_send);
    }

    /// Returns whether another thread can post.
    pub fn is_open(&self) -> bool {
        !self.qp.as_ref().private().rings().unwrap().send().state().is_taken()
    }

    /// Posts the one work request that `make` makes. Returns it as the device sees it.
    pub fn posted<T: Copy>(&self, make: impl FnOnce()) -> T {
        let index = self.told();
        self.start();
        make();
        assert_eq!(self.complete(), 0);
        assert_eq!(self.told(), index + 1);
        self.set_done(index + 1);
        self.read(index, 0)
    }

    /// Checks that the calls of `make` fail after a valid work request: nothing is posted, the
    /// QP is free, and the next work request is posted.
    pub fn refused(&self, make: impl FnOnce(), errno: Errno) {
        let index = self.told();
        self.start();
        self.send(1);
        make();
        assert_eq!((self.complete(), self.told()), (errno.get(), index));
        assert!(self.is_open());
        let next: virtio_rdma_ring_sq_wqe = self.posted(|| self.send(8));
        assert_eq!((next.wr_id, next.num_sge, next.inline_len), (8, 0, 0));
    }
}

/// Returns an SGE whose fields follow from its address.
pub fn sge(addr: u64) -> ibv_sge {
    ibv_sge { addr, length: addr as u32 + 1, lkey: addr as u32 + 2 }
}

/// Returns the buffer of inline data.
pub fn buffer(data: &[u8]) -> ibv_data_buf {
    ibv_data_buf { addr: data.as_ptr().cast_mut().cast(), length: data.len() }
}

/// Returns an AH with an address vector.
pub fn address(n: u8) -> Owned<Ah> {
    let av = virtio_rdma_av { dmac: [n; 6], ..Default::default() };
    Blank::<ibv_ah>::new().unwrap().finish(AhPrivate { av })
}
