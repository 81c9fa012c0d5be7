// SPDX-License-Identifier: GPL-2.0

//! Trace events (`/sys/kernel/tracing/events/virtio_rdma`). While an event is switched off, it costs an instruction
//! that does nothing, or a load and a branch in kernels without CONFIG_JUMP_LABEL. Kernels without CONFIG_TRACEPOINTS
//! have no events.

use crate::{
    bindings,
    dma::device_as_raw, //
};
use kernel::{
    device,
    prelude::*,
    time::{
        Instant,
        Monotonic, //
    },
};

/// Returns whether a trace event is switched on.
#[cfg(CONFIG_TRACEPOINTS)]
macro_rules! is_on {
    ($event:ident) => {{
        // SAFETY: `rust/helpers/trace.c` defines the event, with its static key.
        unsafe {
            kernel::jump_label::static_branch_unlikely!(bindings::$event, bindings::tracepoint, key)
        }
    }};
}

#[cfg(not(CONFIG_TRACEPOINTS))]
macro_rules! is_on {
    ($event:ident) => {
        false
    };
}

/// Records that a consumer posts a send work request. Any context.
///
/// # Safety
///
/// `qp` must be a QP, and `wr` a work request for it.
#[inline]
pub(crate) unsafe fn post_send(qp: *const bindings::ib_qp, wr: *const bindings::ib_send_wr) {
    if is_on!(__tracepoint_post_send) {
        // SAFETY: The caller promises that both are what the function takes.
        unsafe { bindings::virtio_rdma_trace_post_send(qp, wr) };
    }
}

/// Records that a consumer posts a receive work request to a QP. Any context.
///
/// # Safety
///
/// `qp` must be a QP, and `wr` a work request.
#[inline]
pub(crate) unsafe fn post_recv(qp: *const bindings::ib_qp, wr: *const bindings::ib_recv_wr) {
    if is_on!(__tracepoint_post_recv) {
        // SAFETY: The caller promises that both are what the function takes.
        unsafe { bindings::virtio_rdma_trace_post_recv(qp, wr) };
    }
}

/// Records that a consumer posts a receive work request to the SRQ with a number. Any context.
///
/// # Safety
///
/// `srq` must be an SRQ, and `wr` a work request.
#[inline]
pub(crate) unsafe fn post_srq_recv(
    srq: *const bindings::ib_srq,
    srqn: u32,
    wr: *const bindings::ib_recv_wr,
) {
    if is_on!(__tracepoint_post_recv) {
        // SAFETY: The caller promises that both are what the function takes.
        unsafe { bindings::virtio_rdma_trace_post_srq_recv(srq, srqn, wr) };
    }
}

/// Records that a consumer takes the completion of a work request of `qp`. Any context.
///
/// # Safety
///
/// `qp` must be a QP.
#[inline]
pub(crate) unsafe fn complete(qp: *const bindings::ib_qp, wc: &bindings::ib_wc) {
    if is_on!(__tracepoint_complete) {
        // SAFETY: The caller promises that `qp` is a QP.
        unsafe { bindings::virtio_rdma_trace_complete(qp, wc) };
    }
}

/// Returns the time if commands are recorded, for [`command`].
#[inline]
pub(crate) fn command_begins() -> Option<Instant<Monotonic>> {
    is_on!(__tracepoint_command).then(Instant::now)
}

/// Records the result of the command with this name that began then. Any context.
#[cold]
pub(crate) fn command(dev: &device::Device, name: &str, began: Instant<Monotonic>, result: Result) {
    let error = result.map_or_else(Error::to_errno, |()| 0);
    let nsecs = began.elapsed().as_nanos() as u64;
    // SAFETY: `dev` is a reference to a device, and the string is as long as it says; the function only reads both.
    unsafe {
        bindings::virtio_rdma_trace_command(
            device_as_raw(dev),
            name.as_ptr(),
            name.len() as c_int,
            error,
            nsecs,
        );
    }
}

/// Records why the driver refuses a verb, with the number that is wrong and the most or the least that it may be; both
/// are 0 where the reason has none. Returns the error. Any context.
#[cold]
pub(crate) fn refuse(error: Error, reason: &'static CStr, number: u64, limit: u64) -> Error {
    if is_on!(__tracepoint_refuse) {
        // SAFETY: The reason is a string, which the function only reads.
        unsafe {
            bindings::virtio_rdma_trace_refuse(
                error.to_errno(),
                reason.as_char_ptr(),
                number,
                limit,
            );
        }
    }
    error
}
