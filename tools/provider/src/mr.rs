// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Memory regions (IBA 10.6).
#![forbid(unsafe_code)]

use crate::{
    bindings::{ibv_pd, verbs_mr},
    cmd::{self, mr::MrRange},
    errno::Result,
    object::{Owned, Ref},
};
use core::ffi::c_int;

/// Registers memory of the program: ibv_reg_mr_iova2(3).
///
/// # Errors
///
/// ENOMEM; the kernel's.
pub fn register(pd: Ref<'_, ibv_pd>, range: MrRange) -> Result<Owned<verbs_mr>> {
    let mr = Owned::zeroed()?;
    cmd::mr::register(pd, range, mr.as_ref())?;
    Ok(mr)
}

/// Registers memory of the dma-buf behind `fd`: ibv_reg_dmabuf_mr(3).
///
/// # Errors
///
/// ENOMEM; the kernel's.
pub fn register_dmabuf(pd: Ref<'_, ibv_pd>, range: MrRange, fd: c_int) -> Result<Owned<verbs_mr>> {
    let mr = Owned::zeroed()?;
    cmd::mr::register_dmabuf(pd, range, fd, mr.as_ref())?;
    Ok(mr)
}

/// Imports the MR that has a handle in the kernel: ibv_import_mr(3).
///
/// # Errors
///
/// ENOMEM; the kernel's.
pub fn import(pd: Ref<'_, ibv_pd>, handle: u32) -> Result<Owned<verbs_mr>> {
    let mr = Owned::zeroed()?;
    cmd::mr::query(pd, mr.as_ref(), handle)?;
    Ok(mr)
}
