// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
//! Address handles (IBA 11.2.2).
#![forbid(unsafe_code)]

use crate::{
    bindings::{ibv_ah, ibv_ah_attr, ibv_pd},
    cmd,
    errno::Result,
    object::{Owned, Ref},
};

/// ibv_create_ah(3). The kernel keeps the address vector, and resolves the
/// destination's MAC address from its GID.
pub fn create(pd: Ref<'_, ibv_pd>, attr: &mut ibv_ah_attr) -> Result<Owned<ibv_ah>> {
    let ah = Owned::zeroed()?;
    cmd::create_ah(pd, attr, ah.as_ref())?;
    Ok(ah)
}
