// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! A kernel that counts doorbells, for the tests in which several threads share one.

use crate::{bindings::*, model::uverbs};
use core::ffi::{c_int, c_void};
use std::sync::atomic::*;

/// The kernel behind a QP or SRQ, which points to it by the program's context of the object.
#[derive(Default)]
pub struct Kernel {
    /// The number of doorbells that reached the device.
    pub rung: AtomicU32,
    /// The number of commands that fail from now on.
    pub failures: AtomicU32,
    /// The error of the commands that fail.
    pub errno: AtomicI32,
}

impl Kernel {
    /// Makes the next `count` commands fail.
    pub fn fail(&self, count: u32, errno: u32) {
        self.errno.store(errno as i32, Ordering::Relaxed);
        self.failures.store(count, Ordering::Relaxed);
    }

    /// Returns how many doorbells reached the device since the last call.
    pub fn take_rung(&self) -> u32 {
        self.rung.swap(0, Ordering::Relaxed)
    }

    /// Stands for a command of the object that has this context.
    unsafe fn ring(context: *mut c_void) -> c_int {
        // SAFETY: the tests put a kernel there that lives longer, or nothing.
        let Some(kernel) = (unsafe { context.cast::<Self>().as_ref() }) else { return 0 };
        let less = |failures: u32| failures.checked_sub(1);
        if kernel.failures.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok() {
            return kernel.errno.load(Ordering::Relaxed);
        }
        kernel.rung.fetch_add(1, Ordering::Relaxed);
        0
    }
}

/// Stands for the function of libibverbs.
pub unsafe fn ibv_cmd_post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    if uverbs::is_there() {
        // SAFETY: the caller passes what the function of libibverbs demands.
        return unsafe { crate::libibverbs::ibv_cmd_post_send(qp, wr, bad_wr) };
    }
    // SAFETY: the tests pass live QPs.
    unsafe { Kernel::ring((*qp).qp_context) }
}

/// Stands for the function of libibverbs.
pub unsafe fn ibv_cmd_post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    if uverbs::is_there() {
        // SAFETY: the caller passes what the function of libibverbs demands.
        return unsafe { crate::libibverbs::ibv_cmd_post_recv(qp, wr, bad_wr) };
    }
    // SAFETY: the tests pass live QPs.
    unsafe { Kernel::ring((*qp).qp_context) }
}

/// Stands for the function of libibverbs.
pub unsafe fn ibv_cmd_post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    if uverbs::is_there() {
        // SAFETY: the caller passes what the function of libibverbs demands.
        return unsafe { crate::libibverbs::ibv_cmd_post_srq_recv(srq, wr, bad_wr) };
    }
    // SAFETY: the tests pass live SRQs.
    unsafe { Kernel::ring((*srq).srq_context) }
}
