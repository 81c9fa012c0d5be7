// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! The builder of the thread that called ibv_wr_start() last.

use crate::{bindings::ibv_qp_ex, object::Ref, qp::Qp, wr_builder::WrBuilder};

/// Returns the builder of the calling thread, if the QP has rings.
///
/// # Safety
///
/// The QP is live and one of [`super::install`]; the calling thread called ibv_wr_start() on it,
/// and since then neither ibv_wr_complete() nor ibv_wr_abort().
pub(super) unsafe fn builder<'a>(qp: *mut ibv_qp_ex) -> Option<WrBuilder<'a>> {
    // SAFETY: the QP is the first member of an object that `create_qp_ex` made.
    let qp: Ref<'a, Qp> = unsafe { Ref::new(qp.cast()) };
    let rings = qp.private().rings()?;
    // SAFETY: this thread called ibv_wr_start(), which kept the guard.
    let state = unsafe { rings.send().state().kept() };
    Some(WrBuilder::new(qp, rings, state))
}

/// Calls `act` with the builder of the calling thread.
///
/// # Safety
///
/// As [`builder`].
pub(super) unsafe fn with(qp: *mut ibv_qp_ex, act: impl FnOnce(&mut WrBuilder<'_>)) {
    // SAFETY: this thread called ibv_wr_start().
    if let Some(mut builder) = unsafe { builder(qp) } {
        act(&mut builder);
        builder.keep();
    }
}
