// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Protection domains (IBA 10.2.3).
#![forbid(unsafe_code)]

use crate::{
    bindings::{ibv_context, ibv_pd},
    cmd,
    errno::Result,
    object::{Owned, Ref},
};

/// ibv_alloc_pd(3).
pub fn alloc(context: Ref<'_, ibv_context>) -> Result<Owned<ibv_pd>> {
    let pd = Owned::zeroed()?;
    cmd::alloc_pd(context, pd.as_ref())?;
    Ok(pd)
}
